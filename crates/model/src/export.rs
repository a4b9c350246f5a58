//! Writes a built-in model as the folder that `transformers` and other servers load: config.json, model.safetensors, tokenizer.json,
//! tokenizer_config.json and generation_config.json.
//!
//! The published architecture is SmolLM3's (`SmolLM3ForCausalLM`): `layer_types` names the window layers, `no_rope_layers` those without positions, and
//! nothing else differs from Llama. What a built-in model has beyond that is refused by name. A layer without an MLP gets one of zeros, which
//! adds exactly 0.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use serde_json::{Value, json};
use suanpan_base::HeadShape;
use suanpan_ops::{RopeStyle, WeightFormat};

use crate::assemble::SAFETENSORS as NAMES;
use crate::builtin;
use crate::config::{Biases, ModelConfig, RopeConfig};
use crate::error::ModelError;
use crate::weights::{Ffn, Gated, LayerWeights, Linear, Mlp, Tensor, Values};

/// The least width of an exported MLP: some kernels of other servers want more than one column.
const LEAST_MLP: usize = 8;
/// Where the header's length is rounded to, so that the data begins aligned.
const ALIGN: usize = 8;

/// A file that was written, and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Name in the folder.
    pub name: &'static str,
    /// Length.
    pub bytes: u64,
}

/// Writes the built-in model `spec` into `folder`, which is made if it is not there.
///
/// Refuses names that are not built in and a folder that holds anything.
pub fn export(spec: &str, folder: &Path) -> Result<Vec<Written>, ModelError> {
    let model = builtin::load(spec)?;
    let config = config_json(spec, &model.config)?;
    let (tokenizer, tokenizer_config) = builtin::tokenizer_files(spec)?;
    let io = |e| ModelError::io(folder, e);
    std::fs::create_dir_all(folder).map_err(io)?;
    if std::fs::read_dir(folder).map_err(io)?.next().is_some() {
        return Err(ModelError::bad(
            folder.display().to_string(),
            "folder",
            "files in it",
            "an empty or a new folder",
        ));
    }
    let mut store = Store::default();
    store.model(&model.config, &model.weights)?;
    let ids = json!({"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_ids, "do_sample": false});
    let texts = [
        ("config.json", pretty(&config)),
        ("generation_config.json", pretty(&ids)),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", tokenizer_config),
    ];
    let mut written = Vec::new();
    for (name, text) in texts {
        let path = folder.join(name);
        std::fs::write(&path, &text).map_err(|e| ModelError::io(&path, e))?;
        written.push(Written { name, bytes: text.len() as u64 });
    }
    let name = "model.safetensors";
    let path = folder.join(name);
    let bytes = store.write(&path).map_err(|e| ModelError::io(&path, e))?;
    written.push(Written { name, bytes });
    Ok(written)
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// The width of the exported MLPs.
fn mlp_width(config: &ModelConfig) -> usize {
    config.intermediate_size.max(LEAST_MLP)
}

/// SmolLM3's config.json, for both spellings of rotary positions.
fn config_json(spec: &str, config: &ModelConfig) -> Result<Value, ModelError> {
    let refuse = |field: &str, found: &dyn std::fmt::Debug, supported: &str| {
        Err(ModelError::bad(spec, field, format!("{found:?}"), supported))
    };
    let heads = config.heads;
    if heads != HeadShape::new(heads.num_q_heads, heads.num_kv_heads, heads.head_dim_qk) {
        return refuse("heads", &heads, "keys and values of one width");
    }
    let theta = match config.ropes.as_slice() {
        [one] if *one == RopeConfig::plain(one.theta) => one.theta,
        other => return refuse("ropes", &other, "one set of plain rotary positions"),
    };
    if (config.rotary_dim, config.rope_style) != (heads.head_dim_qk, RopeStyle::Half) {
        return refuse("rope_style", &(config.rotary_dim, config.rope_style), "whole heads, in halves");
    }
    let others = (
        config.experts,
        config.latent,
        config.softmax_scale,
        config.attn_softcap,
        config.logit_softcap,
        config.fp8_block,
    );
    if others != (None, None, None, None, None, None) || config.biases != Biases::default() {
        return refuse("config", &(others, config.biases), "a plain transformer without biases");
    }
    let windows: Vec<usize> = config.layers.iter().filter_map(|l| l.window).collect();
    if windows.iter().any(|w| *w != windows[0]) {
        return refuse("layers.window", &windows, "one window for all window layers");
    }
    let kinds =
        config.layers.iter().map(|l| if l.window.is_some() { "sliding_attention" } else { "full_attention" });
    let with_rope = config.layers.iter().map(|l| u8::from(l.rope.is_some()));
    Ok(json!({
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "dtype": "float32", "torch_dtype": "float32",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": mlp_width(config),
        "num_hidden_layers": config.layers.len(), "num_attention_heads": heads.num_q_heads,
        "num_key_value_heads": heads.num_kv_heads, "head_dim": heads.head_dim_qk, "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": f64::from(config.rms_norm_eps),
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "use_sliding_window": !windows.is_empty(), "sliding_window": windows.first(),
        "layer_types": kinds.collect::<Vec<_>>(), "no_rope_layers": with_rope.collect::<Vec<_>>(),
        "attention_bias": false, "attention_dropout": 0.0, "mlp_bias": false, "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids, "pad_token_id": null, "use_cache": true,
    }))
}

/// Tensors by name: type, shape and bytes.
#[derive(Default)]
struct Store {
    tensors: BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)>,
}

impl Store {
    fn model(&mut self, config: &ModelConfig, weights: &crate::weights::Weights) -> Result<(), ModelError> {
        self.matrix(NAMES.embed.into(), &weights.embed)?;
        self.vector(NAMES.final_norm.into(), &weights.final_norm);
        if !config.tie_word_embeddings {
            self.matrix(NAMES.lm_head.into(), &weights.lm_head)?;
        }
        for (i, layer) in weights.layers.iter().enumerate() {
            self.layer(config, layer, |name| format!("{}{i}.{name}", NAMES.layer_prefix))?;
        }
        Ok(())
    }

    fn layer(
        &mut self,
        config: &ModelConfig,
        layer: &LayerWeights,
        name: impl Fn(&str) -> String,
    ) -> Result<(), ModelError> {
        let refuse = |field: &str| Err(ModelError::bad(name(field), "layer", field, "what SmolLM3 has"));
        let LayerWeights { attn_norm, q, k, v, o, qk_norms, sinks, post_attn_norm, ffn } = layer;
        let Values::Own(v) = v else { return refuse("latent values") };
        if qk_norms.is_some() || sinks.is_some() || post_attn_norm.is_some() {
            return refuse("norms of heads, sinks or norms behind");
        }
        self.vector(name(NAMES.attn_norm), attn_norm);
        for (role, linear) in [(NAMES.q, q), (NAMES.k, k), (NAMES.v, v), (NAMES.o, o)] {
            self.linear(name(role), linear)?;
        }
        let (hidden, width) = (config.hidden_size, mlp_width(config));
        match ffn {
            None => {
                self.vector(name(NAMES.ffn_norm), &vec![1.0; hidden]);
                for (role, shape) in [
                    (NAMES.gate, [width, hidden]),
                    (NAMES.up, [width, hidden]),
                    (NAMES.down, [hidden, width]),
                ] {
                    self.tensors.insert(name(role), ("F32", shape.to_vec(), vec![0; 4 * hidden * width]));
                }
                Ok(())
            }
            Some(Ffn { norm, post_norm: None, mlp: Mlp::Dense(gated) }) => {
                let Gated { gate, up, down } = &**gated;
                if gate.weight.rows() != width {
                    return refuse("an MLP of another width");
                }
                self.vector(name(NAMES.ffn_norm), norm);
                [(NAMES.gate, gate), (NAMES.up, up), (NAMES.down, down)]
                    .into_iter()
                    .try_for_each(|(role, linear)| self.linear(name(role), linear))
            }
            Some(_) => refuse("experts or a norm behind the MLP"),
        }
    }

    fn linear(&mut self, name: String, linear: &Linear) -> Result<(), ModelError> {
        match &linear.bias {
            None => self.matrix(name, &linear.weight),
            Some(_) => Err(ModelError::bad(name, "bias", "a bias", "none")),
        }
    }

    fn matrix(&mut self, name: String, tensor: &Tensor) -> Result<(), ModelError> {
        let dtype = match tensor.format() {
            WeightFormat::F32 => "F32",
            WeightFormat::Bf16 => "BF16",
            other => return Err(ModelError::bad(name, "format", other, "F32, BF16")),
        };
        self.tensors.insert(name, (dtype, vec![tensor.rows(), tensor.cols()], tensor.bytes().to_vec()));
        Ok(())
    }

    fn vector(&mut self, name: String, x: &[f32]) {
        self.tensors.insert(name, ("F32", vec![x.len()], x.iter().flat_map(|x| x.to_le_bytes()).collect()));
    }

    /// The safetensors file: the header's length, the header, the data in the header's order. Returns its bytes.
    fn write(&self, path: &Path) -> std::io::Result<u64> {
        let mut end = 0;
        let entries = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            let start = end;
            end += bytes.len();
            (name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}))
        });
        // `transformers` wants to be told whose layout the names follow.
        let meta = ("__metadata__".to_string(), json!({"format": "pt"}));
        let mut header = Value::Object(std::iter::once(meta).chain(entries).collect()).to_string();
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(ALIGN) - header.len()));
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        for (_, _, bytes) in self.tensors.values() {
            file.write_all(bytes)?;
        }
        file.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        Ok((8 + header.len() + end) as u64)
    }
}
