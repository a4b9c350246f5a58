//! `config.json` and `generation_config.json` of a safetensors folder, as `transformers` writes them, to a config.
//!
//! A key that would change the numbers is honoured or refused by name; keys about training and printing are ignored.

mod experts;
mod fields;
mod latent;
mod layers;
mod rope;

use serde_json::{Map, Value};
use suanpan_ops::Activation;

use crate::config::{Biases, MAX_SIZE, ModelConfig, RopeScaling};
use crate::error::ModelError;
use crate::family::{self, BiasRule, Cap, Experts, Family};
use fields::Fields;

/// Largest `config.json` that is read, in bytes.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;

/// Keys that must be absent, null, or this value: features of other models which would change the numbers.
const REFUSED_UNLESS: [(&str, Off); 9] = [
    ("qkv_bias", Off::False),
    ("compression_config", Off::Null),
    ("attention_multiplier", Off::Null),
    ("embedding_multiplier", Off::One),
    ("residual_multiplier", Off::One),
    ("logits_scaling", Off::One),
    ("use_qk_norm", Off::False),
    ("use_bidirectional_attention", Off::False),
    ("layer_norm_eps", Off::Null),
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
    let family = family::by_model_type(model_type).ok_or_else(|| {
        ModelError::bad(file, "model_type", format!("{model_type:?}"), family::names(|f| f.model_types))
    })?;
    refuse_unsupported(&fields, family)?;
    let hidden_size = fields.need("hidden_size", fields.size("hidden_size")?)?;
    let latent::Heads { shape: heads, latent, rope_dim, scale } =
        latent::heads(&fields, family, hidden_size)?;
    let claimed = fields.size("max_position_embeddings")?.unwrap_or(2048);
    let rope::Ropes { ropes, rotary_dim } = rope::ropes(&fields, family, rope_dim, claimed)?;
    let local = ropes.len() - 1;
    let intermediate_size = fields.need("intermediate_size", fields.size("intermediate_size")?)?;
    let config = ModelConfig {
        name: name.into(),
        architecture: model_type.into(),
        family,
        vocab_size: fields.need("vocab_size", fields.size("vocab_size")?)?,
        hidden_size,
        intermediate_size,
        experts: experts::experts(&fields, family, intermediate_size)?,
        heads,
        latent,
        softmax_scale: softmax_scale(&fields, family)?.or(scale),
        attn_softcap: cap(&fields, family, family.attn_cap, "attn_logit_softcapping")?,
        logit_softcap: cap(&fields, family, family.logit_cap, "final_logit_softcapping")?,
        fp8_block: fp8_block(&fields, family)?,
        biases: biases(&fields, family)?,
        rms_norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        max_position_embeddings: ropes
            .iter()
            .map(|r| extended_len(&r.scaling, claimed))
            .max()
            .unwrap_or(claimed),
        layers: layers::layers(&fields, family, local)?,
        ropes,
        rotary_dim,
        rope_style: family.rope,
        bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_token_ids: fields.token_ids("eos_token_id")?,
        add_bos: false,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(family.tied),
    };
    config.check().map_err(|e| ModelError::bad(file, e.field, e.asked, e.supported))?;
    Ok(config)
}

/// The length with the scaling: files with "dynamic" and "yarn" give the one before it. (With "linear" some give one, some the other; the
/// smaller claim is taken.)
pub(crate) fn extended_len(scaling: &RopeScaling, claimed: usize) -> usize {
    match *scaling {
        RopeScaling::Dynamic { factor, original } | RopeScaling::Yarn { factor, original, .. } => {
            claimed.max((factor * original).min(MAX_SIZE as f64) as usize)
        }
        _ => claimed,
    }
}

/// The scores' factor, which only Gemma models name: by a number whose root divides.
fn softmax_scale(fields: &Fields, family: &Family) -> Result<Option<f32>, ModelError> {
    const KEY: &str = "query_pre_attn_scalar";
    match fields.number(KEY)? {
        Some(found) if !family.scaled_embedding => {
            Err(ModelError::bad(fields.file, KEY, found, format!("null for {} models", family.name)))
        }
        number => Ok(number.map(|n| n.powf(-0.5) as f32)),
    }
}

/// A cap under `key`; null is none.
fn cap(fields: &Fields, family: &Family, rule: Cap, key: &str) -> Result<Option<f32>, ModelError> {
    match (rule, fields.number(key)?) {
        (Cap::No, Some(found)) => {
            Err(ModelError::bad(fields.file, key, found, format!("null for {} models", family.name)))
        }
        (Cap::Default(default), None) if !fields.map.contains_key(key) => Ok(Some(default as f32)),
        (_, number) => Ok(number.map(|x| x as f32)),
    }
}

fn biases(fields: &Fields, family: &Family) -> Result<Biases, ModelError> {
    let attention = fields.flag("attention_bias")?;
    let mlp = fields.flag("mlp_bias")?.unwrap_or(false);
    match (family.bias, attention) {
        (BiasRule::Configured, asked) => {
            // gpt-oss has them where its config does not say.
            let on = asked.unwrap_or(family.sinks);
            Ok(Biases { qkv: on, o: on, mlp })
        }
        (BiasRule::Never, Some(true)) => {
            let supported = format!("false: {} models have none", family.name);
            Err(ModelError::bad(fields.file, "attention_bias", true, supported))
        }
        (BiasRule::Never, _) => Ok(Biases { mlp, ..Biases::default() }),
        (BiasRule::Qkv, _) => Ok(Biases { qkv: true, o: false, mlp }),
    }
}

/// Blocks of FP8 scales. Refuses weights quantised in any other way; how activations were to be rounded is not heeded.
fn fp8_block(fields: &Fields, family: &Family) -> Result<Option<[usize; 2]>, ModelError> {
    const KEY: &str = "quantization_config";
    let Some(map) = fields.object(KEY)? else { return Ok(None) };
    let inner = Fields { file: fields.file, map };
    let method = inner.text("quant_method")?.unwrap_or("none");
    match method {
        "mxfp4" if family.experts == Experts::OverChosen => Ok(None),
        "fp8" => {
            let block = inner.get::<[usize; 2]>("weight_block_size", "two sizes")?;
            if let Some(found) = block.filter(|b| b.iter().any(|n| !(1..=MAX_SIZE).contains(n))) {
                return Err(ModelError::bad(
                    fields.file,
                    "weight_block_size",
                    format!("{found:?}"),
                    "sizes of at least 1",
                ));
            }
            Ok(block)
        }
        "compressed-tensors" if inner.text("format")? == Some("float-quantized") => Ok(None),
        _ => {
            let found = format!("quant_method {method:?}");
            let supported =
                "null, fp8, compressed-tensors of format float-quantized, or mxfp4 experts of gpt-oss";
            Err(ModelError::bad(fields.file, KEY, found, supported))
        }
    }
}

fn refuse_unsupported(fields: &Fields, family: &Family) -> Result<(), ModelError> {
    if let Some(list) = fields.get::<Vec<&str>>("architectures", "a list of names")?
        && !list.iter().any(|a| family.classes.contains(a))
    {
        let supported = family::names(|f| f.classes);
        return Err(ModelError::bad(fields.file, "architectures", format!("{list:?}"), supported));
    }
    for (key, off) in REFUSED_UNLESS {
        if let Some(value) = fields.map.get(key).filter(|v| !off.matches(v)) {
            return Err(fields.bad(key, value, off.describe()));
        }
    }
    let supported: &[&str] = match family.activation {
        Activation::GeluTanh => &["gelu_pytorch_tanh"],
        Activation::Silu | Activation::ClampedSwiglu { .. } => &["silu", "swish"],
    };
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(found) = fields.text(key)?.filter(|act| !supported.contains(act)) {
            return Err(ModelError::bad(fields.file, key, format!("{found:?}"), supported.join(", ")));
        }
    }
    Ok(())
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
