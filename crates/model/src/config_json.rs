//! `config.json` and `generation_config.json` of a safetensors folder, as `transformers` writes them, to a config.
//!
//! A key that would change the numbers is honoured or refused by name; keys about training and printing are ignored.

use serde::Deserialize;
use serde_json::{Map, Value};
use suanpan_base::HeadShape;
use suanpan_ops::RopeStyle;

use crate::config::{LayerConfig, MAX_LAYERS, MAX_SIZE, ModelConfig, RopeConfig, RopeScaling};
use crate::error::ModelError;
use crate::rope;

/// Values of `model_type` that are supported.
pub const MODEL_TYPES: [&str; 2] = ["llama", "mistral"];
/// Values of `architectures` that are supported.
pub const ARCHITECTURES: [&str; 2] = ["LlamaForCausalLM", "MistralForCausalLM"];
/// Largest `config.json` that is read, in bytes.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// Keys that must be absent, null, or this value: features of other models which would change the numbers.
const REFUSED_UNLESS: [(&str, Off); 15] = [
    ("attention_bias", Off::False),
    ("mlp_bias", Off::False),
    ("qkv_bias", Off::False),
    ("quantization_config", Off::Null),
    ("compression_config", Off::Null),
    ("partial_rotary_factor", Off::One),
    ("attention_multiplier", Off::Null),
    ("embedding_multiplier", Off::One),
    ("residual_multiplier", Off::One),
    ("logits_scaling", Off::One),
    ("attn_logit_softcapping", Off::Null),
    ("final_logit_softcapping", Off::Null),
    ("num_local_experts", Off::Null),
    ("use_qk_norm", Off::False),
    ("no_rope_layers", Off::Null),
];

/// The value that means "not used".
#[derive(Clone, Copy)]
enum Off {
    Null,
    False,
    One,
}

impl Off {
    fn matches(self, value: &Value) -> bool {
        value.is_null()
            || match self {
                Off::Null => false,
                Off::False => value == &Value::Bool(false),
                Off::One => value.as_f64() == Some(1.0),
            }
    }

    fn describe(self) -> &'static str {
        match self {
            Off::Null => "null (off)",
            Off::False => "false (off)",
            Off::One => "1 (off)",
        }
    }
}

/// A JSON object with its file's name, read key by key.
struct Fields<'a> {
    file: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The value of `key`; null counts as absent.
    fn get<T: Deserialize<'a>>(&self, key: &str, supported: &str) -> Result<Option<T>, ModelError> {
        match self.map.get(key).filter(|v| !v.is_null()) {
            None => Ok(None),
            Some(value) => match T::deserialize(value) {
                Ok(x) => Ok(Some(x)),
                Err(_) => Err(self.bad(key, value, supported)),
            },
        }
    }

    fn bad(&self, key: &str, found: &Value, supported: &str) -> ModelError {
        // A hostile value may be long; the start of it is enough to find it.
        let found: String = found.to_string().chars().take(80).collect();
        ModelError::bad(self.file, key, found, supported)
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let supported = format!("an integer from 0 to {MAX_SIZE}");
        match self.get::<usize>(key, &supported)? {
            Some(n) if n > MAX_SIZE => Err(ModelError::bad(self.file, key, n, supported)),
            n => Ok(n),
        }
    }

    fn need<T>(&self, key: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::missing(self.file, key, "the config of every model of this family"))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.get(key, "a number")
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.get(key, "a string")
    }

    /// One token id or a list of them.
    fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Ids {
            One(u32),
            Many(Vec<u32>),
        }
        Ok(match self.get(key, "a token id or a list of them")? {
            None => Vec::new(),
            Some(Ids::One(id)) => vec![id],
            Some(Ids::Many(ids)) => ids,
        })
    }
}

/// Reads `bytes` as a JSON object.
fn object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, ModelError> {
    if bytes.len() > MAX_CONFIG_BYTES {
        let found = format!("{} bytes", bytes.len());
        return Err(ModelError::bad(file, "file length", found, format!("at most {MAX_CONFIG_BYTES} bytes")));
    }
    serde_json::from_slice(bytes).map_err(|e| ModelError::bad(file, "JSON", e, "a JSON object"))
}

/// Reads a `config.json`. `name` is the model's name for people.
pub fn config(file: &str, bytes: &[u8], name: &str) -> Result<ModelConfig, ModelError> {
    let map = object(file, bytes)?;
    let fields = Fields { file, map: &map };
    let model_type = fields.need("model_type", fields.text("model_type")?)?;
    if !MODEL_TYPES.contains(&model_type) {
        return Err(ModelError::bad(file, "model_type", format!("{model_type:?}"), MODEL_TYPES.join(", ")));
    }
    refuse_unsupported(&fields)?;
    let hidden_size = fields.need("hidden_size", fields.size("hidden_size")?)?;
    let num_q_heads = fields.need("num_attention_heads", fields.size("num_attention_heads")?)?;
    let num_kv_heads = fields.size("num_key_value_heads")?.unwrap_or(num_q_heads);
    let head_dim = match fields.size("head_dim")? {
        Some(d) => d,
        None if num_q_heads > 0 && hidden_size.is_multiple_of(num_q_heads) => hidden_size / num_q_heads,
        None => {
            let found = format!("{num_q_heads}, with hidden_size {hidden_size} and no head_dim");
            return Err(ModelError::bad(file, "num_attention_heads", found, "a divisor of hidden_size"));
        }
    };
    let config = ModelConfig {
        name: name.into(),
        architecture: model_type.into(),
        vocab_size: fields.need("vocab_size", fields.size("vocab_size")?)?,
        hidden_size,
        intermediate_size: fields.need("intermediate_size", fields.size("intermediate_size")?)?,
        heads: HeadShape::new(num_q_heads, num_kv_heads, head_dim),
        softmax_scale: None,
        rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope: rope_config(&fields)?,
        rope_style: RopeStyle::Half,
        layers: layers(&fields)?,
        max_position_embeddings: fields.size("max_position_embeddings")?.unwrap_or(2048),
        bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_token_ids: fields.token_ids("eos_token_id")?,
        add_bos: false,
        tie_word_embeddings: fields.get("tie_word_embeddings", "true or false")?.unwrap_or(false),
    };
    rope::check(&config.rope, head_dim).map_err(|e| ModelError::bad(file, e.field, e.asked, e.supported))?;
    config.check().map_err(|e| ModelError::bad(file, e.field, e.asked, e.supported))?;
    Ok(config)
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ModelError> {
    if let Some(list) = fields.get::<Vec<&str>>("architectures", "a list of names")?
        && !list.iter().any(|a| ARCHITECTURES.contains(a))
    {
        return Err(ModelError::bad(
            fields.file,
            "architectures",
            format!("{list:?}"),
            ARCHITECTURES.join(", "),
        ));
    }
    for (key, off) in REFUSED_UNLESS {
        if let Some(value) = fields.map.get(key).filter(|v| !off.matches(v)) {
            return Err(fields.bad(key, value, off.describe()));
        }
    }
    match fields.text("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Err(ModelError::bad(fields.file, "hidden_act", format!("{other:?}"), "silu")),
    }
}

/// Which layers have a window: `layer_types` decides, else `sliding_window` holds for all unless `use_sliding_window` is false.
fn layers(fields: &Fields) -> Result<Vec<LayerConfig>, ModelError> {
    let count = fields.need("num_hidden_layers", fields.size("num_hidden_layers")?)?;
    if count == 0 || count > MAX_LAYERS {
        return Err(ModelError::bad(fields.file, "num_hidden_layers", count, format!("1 to {MAX_LAYERS}")));
    }
    let used = fields.get("use_sliding_window", "true or false")?.unwrap_or(true);
    let window = fields.size("sliding_window")?.filter(|_| used);
    if window == Some(0) {
        return Err(ModelError::bad(fields.file, "sliding_window", 0, "null, or at least 1"));
    }
    let Some(types) = fields.get::<Vec<&str>>("layer_types", "a list of layer types")? else {
        return Ok(vec![LayerConfig { window, rope: true }; count]);
    };
    if types.len() != count {
        let found = format!("{} entries", types.len());
        return Err(ModelError::bad(
            fields.file,
            "layer_types",
            found,
            format!("num_hidden_layers = {count}"),
        ));
    }
    types
        .iter()
        .map(|&kind| match (kind, window) {
            ("full_attention", _) => Ok(LayerConfig { window: None, rope: true }),
            ("sliding_attention", Some(_)) => Ok(LayerConfig { window, rope: true }),
            ("sliding_attention", None) => {
                Err(ModelError::missing(fields.file, "sliding_window", "a layer of type sliding_attention"))
            }
            _ => {
                let found = format!("{kind:?}");
                Err(ModelError::bad(fields.file, "layer_types", found, "full_attention, sliding_attention"))
            }
        })
        .collect()
}

/// Rotary positions: `rope_parameters` (transformers 5), else `rope_theta` beside `rope_scaling` (before).
fn rope_config(fields: &Fields) -> Result<RopeConfig, ModelError> {
    const OBJECT: &str = "an object";
    let mut theta = fields.number("rope_theta")?;
    let (key, inner) = match fields.get::<Map<String, Value>>("rope_parameters", OBJECT)? {
        Some(map) => ("rope_parameters", map),
        None => ("rope_scaling", fields.get("rope_scaling", OBJECT)?.unwrap_or_default()),
    };
    let inner = Fields { file: fields.file, map: &inner };
    theta = inner.number("rope_theta")?.or(theta);
    let kind = inner.text("rope_type")?.or(inner.text("type")?);
    let scaling = match kind {
        None if inner.map.keys().all(|k| k == "rope_theta") => RopeScaling::Default,
        None => {
            return Err(ModelError::missing(fields.file, format!("{key}.rope_type"), rope::SUPPORTED_TYPES));
        }
        Some("default") => RopeScaling::Default,
        Some("llama3") => {
            let number = |name: &str| {
                let value = inner.number(name)?;
                value.ok_or_else(|| {
                    ModelError::missing(fields.file, format!("{key}.{name}"), "rope_type llama3")
                })
            };
            RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: number("original_max_position_embeddings")?,
            }
        }
        Some(other) => {
            let field = format!("{key}.rope_type");
            return Err(ModelError::bad(fields.file, field, format!("{other:?}"), rope::SUPPORTED_TYPES));
        }
    };
    let partial = inner.number("partial_rotary_factor")?.filter(|&x| x != 1.0);
    if let Some(found) = partial {
        return Err(ModelError::bad(fields.file, format!("{key}.partial_rotary_factor"), found, "1 (off)"));
    }
    Ok(RopeConfig { scaling, ..RopeConfig::plain(theta.unwrap_or(10_000.0)) })
}

/// Applies a `generation_config.json`: its end tokens replace the config's, as in `transformers`.
pub fn apply_generation_config(config: &mut ModelConfig, file: &str, bytes: &[u8]) -> Result<(), ModelError> {
    let map = object(file, bytes)?;
    let fields = Fields { file, map: &map };
    let eos = fields.token_ids("eos_token_id")?;
    if !eos.is_empty() {
        config.eos_token_ids = eos;
    }
    config.check().map_err(|e| ModelError::bad(file, e.field, e.asked, e.supported))
}
