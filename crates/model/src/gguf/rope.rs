//! Rotary positions of a GGUF file: scaling by metadata, or by tensors of divisors.

use super::model::Keys;
use crate::config::{RopeConfig, RopeScaling};
use crate::error::ModelError;
use crate::rope::yarn_attention_factor;

/// Divisors of Llama 3's scaling.
const FREQS: &str = "rope_freqs.weight";
/// Divisors of LongRoPE up to and past the original length.
const SHORT: &str = "rope_factors_short.weight";
const LONG: &str = "rope_factors_long.weight";
/// A tenth of YaRN's scale of the scores.
pub(super) const YARN_ALL_DIM: &str = "rope.scaling.yarn_log_multiplier";
/// Every tensor that is about positions.
pub(super) const TENSORS: [&str; 3] = [FREQS, SHORT, LONG];

/// Positions of global layers, then those of window layers where the family has two kinds. `claimed`: the file's context length.
pub(super) fn ropes(keys: &Keys, rotary_dim: usize, claimed: usize) -> Result<Vec<RopeConfig>, ModelError> {
    let theta = keys.number("rope.freq_base")?.unwrap_or(keys.family.theta);
    let mut ropes = vec![global(keys, theta, rotary_dim, claimed)?];
    if let Some(default) = keys.family.local_theta {
        ropes.push(RopeConfig::plain(keys.number("rope.freq_base_swa")?.unwrap_or(default)));
    }
    Ok(ropes)
}

fn factors(keys: &Keys, name: &str, rotary_dim: usize) -> Result<Option<Vec<f64>>, ModelError> {
    if keys.gguf.tensor_info(name).is_none() {
        return Ok(None);
    }
    let factors = keys.gguf.tensor(name, &[rotary_dim / 2])?.to_f32();
    Ok(Some(factors.into_iter().map(f64::from).collect()))
}

fn global(keys: &Keys, theta: f64, rotary_dim: usize, claimed: usize) -> Result<RopeConfig, ModelError> {
    const ORIGINAL: &str = "rope.scaling.original_context_length";
    const TYPE: &str = "rope.scaling.type";
    let plain = RopeConfig::plain(theta);
    let original = keys.number(ORIGINAL)?.unwrap_or(claimed as f64);
    let given = keys.number("rope.scaling.attn_factor")?;
    let divisor = keys.number("rope.scaling.factor")?;
    let (short, long) = (factors(keys, SHORT, rotary_dim)?, factors(keys, LONG, rotary_dim)?);
    let freqs = factors(keys, FREQS, rotary_dim)?;
    let key = keys.key(TYPE);
    let kind = keys.gguf.string(&key)?.unwrap_or("none");
    if let Some((short, long)) = short.zip(long) {
        // The converter computes the factor; without it cosines are not scaled.
        let scaling = RopeScaling::LongRope { short, long, original };
        return Ok(RopeConfig { theta, scaling, attention_factor: given.unwrap_or(1.0) });
    }
    let need = || {
        divisor.ok_or_else(|| {
            ModelError::missing(
                keys.gguf.name(),
                format!("metadata {}", keys.key("rope.scaling.factor")),
                kind.to_string(),
            )
        })
    };
    let scaling = match (kind, freqs) {
        ("none" | "linear", Some(freqs)) if divisor.is_none_or(|f| f == 1.0) => RopeScaling::Factors(freqs),
        ("none", None) => match keys.number("rope.scale_linear")?.filter(|&f| f != 1.0) {
            Some(factor) => RopeScaling::Linear { factor },
            None => RopeScaling::Default,
        },
        ("linear", None) => RopeScaling::Linear { factor: need()? },
        ("yarn", None) => {
            let factor = need()?;
            let number =
                |name: &str, default: f64| Ok::<_, ModelError>(keys.number(name)?.unwrap_or(default));
            let scaling = RopeScaling::Yarn {
                factor,
                original,
                beta_fast: number("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: number("rope.scaling.yarn_beta_slow", 1.0)?,
                // gpt-oss leaves the ends of the ramp where they fall; its files do not say so.
                truncate: !keys.family.sinks,
            };
            // Where the scores are scaled instead, cosines are not (files have no second scale for them).
            let whole = keys.number(YARN_ALL_DIM)?.is_some_and(|m| m != 0.0);
            let by_formula = if whole { 1.0 } else { yarn_attention_factor(None, factor, None, None) };
            // A factor of the file's multiplies the one by the formula.
            let attention_factor = by_formula * given.unwrap_or(1.0);
            return Ok(RopeConfig { theta, scaling, attention_factor });
        }
        (kind, freqs) => {
            let with = if freqs.is_some() { format!(" beside a tensor {FREQS}") } else { String::new() };
            let supported =
                format!("none (with or without a tensor {FREQS}), linear, yarn, longrope with its tensors");
            return Err(keys.bad(TYPE, format!("{kind:?}{with}"), supported));
        }
    };
    Ok(RopeConfig { scaling, ..plain })
}
