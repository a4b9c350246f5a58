//! Heads of a config.json: plain ones, or those of latent attention with the factor of their scores.

use serde_json::Map;
use suanpan_base::HeadShape;

use super::fields::Fields;
use crate::config::LatentConfig;
use crate::error::ModelError;
use crate::family::Family;
use crate::rope::mscale;

/// Heads as the cache sees them, what is behind them, and the width that positions are for.
pub(super) struct Heads {
    pub shape: HeadShape,
    pub latent: Option<LatentConfig>,
    pub rope_dim: usize,
    /// The factor of the scores where heads are latent: that of the unabsorbed width.
    pub scale: Option<f32>,
}

/// Reads them.
pub(super) fn heads(fields: &Fields, family: &Family, hidden_size: usize) -> Result<Heads, ModelError> {
    let num_q_heads = fields.need("num_attention_heads", fields.size("num_attention_heads")?)?;
    let num_kv_heads = fields.size("num_key_value_heads")?.unwrap_or(num_q_heads);
    if family.latent {
        return latent(fields, num_q_heads, num_kv_heads);
    }
    let head_dim = match fields.size("head_dim")? {
        Some(d) => d,
        None if num_q_heads > 0 && hidden_size.is_multiple_of(num_q_heads) => hidden_size / num_q_heads,
        None => {
            let found = format!("{num_q_heads}, with hidden_size {hidden_size} and no head_dim");
            return Err(ModelError::bad(
                fields.file,
                "num_attention_heads",
                found,
                "a divisor of hidden_size",
            ));
        }
    };
    let shape = HeadShape::new(num_q_heads, num_kv_heads, head_dim);
    Ok(Heads { shape, latent: None, rope_dim: head_dim, scale: None })
}

fn latent(fields: &Fields, num_q_heads: usize, num_kv_heads: usize) -> Result<Heads, ModelError> {
    if num_kv_heads != num_q_heads {
        let supported =
            format!("num_attention_heads = {num_q_heads}: each has its part of the latent vector");
        return Err(ModelError::bad(fields.file, "num_key_value_heads", num_kv_heads, supported));
    }
    let need = |key: &str| fields.need(key, fields.size(key)?);
    let (rank, rope_dim) = (need("kv_lora_rank")?, need("qk_rope_head_dim")?);
    let latent = LatentConfig {
        nope_dim: need("qk_nope_head_dim")?,
        v_dim: need("v_head_dim")?,
        q_rank: fields.size("q_lora_rank")?,
    };
    let width = (latent.nope_dim + rope_dim) as f64;
    let scale = width.powf(-0.5) * score_factor(fields)?;
    let shape = HeadShape::latent(num_q_heads, rank + rope_dim, rank);
    Ok(Heads { shape, latent: Some(latent), rope_dim, scale: Some(scale as f32) })
}

/// What a scaling of the positions puts on the scores: the square of its factor for all dimensions, where the file names one.
fn score_factor(fields: &Fields) -> Result<f64, ModelError> {
    let empty = Map::new();
    let map = match fields.object("rope_parameters")? {
        Some(map) => map,
        None => fields.object("rope_scaling")?.unwrap_or(&empty),
    };
    let inner = Fields { file: fields.file, map };
    let kind = inner.text("rope_type")?.or(inner.text("type")?).unwrap_or("default");
    // As the reference does, 0 counts as not given.
    match inner.number("mscale_all_dim")?.filter(|&m| m != 0.0 && kind != "default") {
        None => Ok(1.0),
        Some(m) => Ok(mscale(inner.need("factor", inner.number("factor")?)?, m).powi(2)),
    }
}
