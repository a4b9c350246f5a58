//! The Llama family in GGUF: `llama.*` metadata to a config, tensor names to weights.
//!
//! Rows of q and k are in GGUF's order for this family: a rotary pair is two neighbours (2i, 2i + 1).

use std::collections::BTreeSet;
use std::path::Path;

use suanpan_base::HeadShape;
use suanpan_ops::RopeStyle;

use super::Gguf;
use crate::assemble::{self, GGUF as NAMES};
use crate::config::{LayerConfig, MAX_LAYERS, ModelConfig, RopeConfig, RopeScaling};
use crate::error::ModelError;
use crate::rope;
use crate::weights::Weights;

/// Values of `general.architecture` that are supported.
pub const ARCHITECTURES: [&str; 1] = ["llama"];
/// Tensor of frequency divisors, `[head_dim / 2]`.
const ROPE_FREQS: &str = "rope_freqs.weight";
/// Base of the rotary frequencies where a file names none.
const DEFAULT_THETA: f64 = 10_000.0;
/// Metadata of features that would change the numbers, each with the value that means "off".
const REFUSED_UNLESS: [(&str, f64); 7] = [
    ("expert_count", 0.0),
    ("rope.scale_linear", 1.0),
    ("attention.clamp_kqv", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
];

impl Gguf {
    fn need_uint(&self, key: &str) -> Result<usize, ModelError> {
        let value = self.uniform_uint(key)?;
        let value =
            value.ok_or_else(|| ModelError::missing(self.name(), format!("metadata {key}"), "an integer"))?;
        self.size(key, value)
    }

    fn size(&self, key: &str, value: u64) -> Result<usize, ModelError> {
        let limit = crate::config::MAX_SIZE;
        match usize::try_from(value) {
            Ok(n) if n <= limit => Ok(n),
            _ => Err(self.bad(format!("metadata {key}"), value, format!("at most {limit}"))),
        }
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        self.uniform_uint(key)?.map_or(Ok(default), |n| self.size(key, n))
    }

    fn token_id(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let Some(id) = self.uint(key)? else { return Ok(None) };
        let id = u32::try_from(id);
        id.map(Some).map_err(|_| self.bad(format!("metadata {key}"), "an id above 2^32", "a token id"))
    }
}

/// The config of the model in `gguf`.
pub fn config(gguf: &Gguf) -> Result<ModelConfig, ModelError> {
    const ARCH: &str = "general.architecture";
    let architecture = gguf.string(ARCH)?;
    let architecture = architecture
        .ok_or_else(|| ModelError::missing(gguf.name(), format!("metadata {ARCH}"), "a string"))?;
    if !ARCHITECTURES.contains(&architecture) {
        let found = format!("{architecture:?}");
        return Err(gguf.bad(format!("metadata {ARCH}"), found, ARCHITECTURES.join(", ")));
    }
    if let Some(parts) = gguf.uint("split.count")?.filter(|&n| n > 1) {
        return Err(gguf.bad("metadata split.count", parts, "1 (a whole model in one file)"));
    }
    let key = |name: &str| format!("{architecture}.{name}");
    for (name, off) in REFUSED_UNLESS {
        let set = match gguf.float(&key(name)) {
            Ok(value) => value,
            Err(_) => gguf.uint(&key(name))?.map(|n| n as f64),
        };
        if let Some(found) = set.filter(|&x| x != off) {
            return Err(gguf.bad(format!("metadata {}", key(name)), found, format!("{off} (off)")));
        }
    }
    let num_layers = gguf.need_uint(&key("block_count"))?;
    if num_layers > MAX_LAYERS {
        return Err(gguf.bad(
            format!("metadata {}", key("block_count")),
            num_layers,
            format!("1 to {MAX_LAYERS}"),
        ));
    }
    let hidden_size = gguf.need_uint(&key("embedding_length"))?;
    let heads = head_shape(gguf, &key, hidden_size)?;
    let window = match gguf.size_or(&key("attention.sliding_window"), 0)? {
        0 => None,
        w => Some(w),
    };
    let eps_key = key("attention.layer_norm_rms_epsilon");
    let eps = gguf.float(&eps_key)?;
    let eps =
        eps.ok_or_else(|| ModelError::missing(gguf.name(), format!("metadata {eps_key}"), "a number"))?;
    let config = ModelConfig {
        name: model_name(gguf)?,
        architecture: architecture.into(),
        vocab_size: vocab_size(gguf, &key("vocab_size"))?,
        hidden_size,
        intermediate_size: gguf.need_uint(&key("feed_forward_length"))?,
        heads,
        softmax_scale: gguf.float(&key("attention.scale"))?.filter(|&x| x != 0.0).map(|x| x as f32),
        rms_norm_eps: eps as f32,
        rope: rope_config(gguf, &key, heads.head_dim_qk)?,
        rope_style: RopeStyle::Interleaved,
        layers: vec![LayerConfig { window, rope: true }; num_layers],
        max_position_embeddings: gguf.need_uint(&key("context_length"))?,
        bos_token_id: gguf.token_id("tokenizer.ggml.bos_token_id")?,
        eos_token_ids: eos_token_ids(gguf)?,
        // Whoever builds the tokenizer knows.
        add_bos: false,
        tie_word_embeddings: gguf.tensor_info(NAMES.lm_head).is_none(),
    };
    config.check().map_err(|e| gguf.bad(e.field, e.asked, e.supported))?;
    Ok(config)
}

fn head_shape(
    gguf: &Gguf,
    key: &dyn Fn(&str) -> String,
    hidden_size: usize,
) -> Result<HeadShape, ModelError> {
    let num_q_heads = gguf.need_uint(&key("attention.head_count"))?;
    let num_kv_heads = gguf.size_or(&key("attention.head_count_kv"), num_q_heads)?;
    let even = hidden_size.checked_div(num_q_heads).unwrap_or(0);
    let head_dim_qk = gguf.size_or(&key("attention.key_length"), even)?;
    let head_dim_v = gguf.size_or(&key("attention.value_length"), even)?;
    let shape = HeadShape::with_widths(num_q_heads, num_kv_heads, head_dim_qk, head_dim_v);
    let rotated = gguf.size_or(&key("rope.dimension_count"), shape.head_dim_qk)?;
    if rotated != shape.head_dim_qk {
        let supported = format!("the whole head, {}", shape.head_dim_qk);
        return Err(gguf.bad(format!("metadata {}", key("rope.dimension_count")), rotated, supported));
    }
    shape.check("model config").map_err(|e| gguf.bad(e.field, e.asked, e.supported))?;
    Ok(shape)
}

fn rope_config(gguf: &Gguf, key: &dyn Fn(&str) -> String, head_dim: usize) -> Result<RopeConfig, ModelError> {
    let type_key = key("rope.scaling.type");
    // Llama 3's scaling comes as a tensor of divisors; the type key names only the scalings done by formula.
    if let Some(found) = gguf.string(&type_key)?.filter(|&t| t != "none") {
        let supported = format!("none, with or without a tensor {ROPE_FREQS}");
        return Err(gguf.bad(format!("metadata {type_key}"), format!("{found:?}"), supported));
    }
    let theta = gguf.float(&key("rope.freq_base"))?.unwrap_or(DEFAULT_THETA);
    let mut config = RopeConfig::plain(theta);
    if gguf.tensor_info(ROPE_FREQS).is_some() {
        let factors = gguf.tensor(ROPE_FREQS, &[head_dim / 2])?.to_f32();
        config.scaling = RopeScaling::Factors(factors.into_iter().map(f64::from).collect());
    }
    rope::check(&config, head_dim)
        .map_err(|e| gguf.bad(format!("rope {}", e.field), e.asked, e.supported))?;
    Ok(config)
}

fn model_name(gguf: &Gguf) -> Result<String, ModelError> {
    let stem = || Path::new(gguf.name()).file_stem().map(|s| s.to_string_lossy().into_owned());
    let given = gguf.string("general.name")?.map(str::trim).filter(|n| !n.is_empty()).map(String::from);
    Ok(given.or_else(stem).unwrap_or_default())
}

/// Rows of the embedding; a size in the metadata must agree.
fn vocab_size(gguf: &Gguf, key: &str) -> Result<usize, ModelError> {
    let name = NAMES.embed;
    let Some(info) = gguf.tensor_info(name) else {
        return Err(ModelError::missing(gguf.name(), format!("tensor {name}"), "the embedding"));
    };
    let rows = info.dims[1];
    match gguf.uint(key)? {
        Some(n) if n != rows as u64 => {
            Err(gguf.bad(format!("metadata {key}"), n, format!("{rows}, the rows of tensor {name}")))
        }
        _ => Ok(rows),
    }
}

fn eos_token_ids(gguf: &Gguf) -> Result<Vec<u32>, ModelError> {
    let mut ids = Vec::new();
    for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        if let Some(id) = gguf.token_id(&format!("tokenizer.ggml.{name}"))?
            && !ids.contains(&id)
        {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// The weights of `config`'s model in `gguf`, as views of the file. A tensor that nobody used is refused.
pub fn weights(gguf: &Gguf, config: &ModelConfig) -> Result<Weights, ModelError> {
    let mut used = BTreeSet::from([ROPE_FREQS.to_string()]);
    let weights = assemble::weights(config, &NAMES, &mut |name, shape| {
        used.insert(name.to_string());
        gguf.tensor(name, shape)
    })?;
    assemble::refuse_unused(gguf.name(), gguf.tensor_names(), &used, &config.architecture)?;
    Ok(weights)
}
