//! Experts of a config.json, by the family's rule.

use serde_json::Value;

use super::fields::Fields;
use crate::config::ExpertsConfig;
use crate::error::ModelError;
use crate::family::{Experts, Family};

/// Reads them. `inter`: the file's `intermediate_size`.
pub(super) fn experts(
    fields: &Fields,
    family: &Family,
    inter: usize,
) -> Result<Option<ExpertsConfig>, ModelError> {
    match family.experts {
        Experts::No => {
            for key in ["num_local_experts", "n_routed_experts"] {
                if let Some(n) = fields.size(key)? {
                    let supported = format!("null: {} models have no experts", family.name);
                    return Err(ModelError::bad(fields.file, key, n, supported));
                }
            }
            Ok(None)
        }
        Experts::OverChosen => over_chosen(fields, inter).map(Some),
        Experts::OverAll => over_all(fields),
    }
}

/// gpt-oss.
fn over_chosen(fields: &Fields, inter: usize) -> Result<ExpertsConfig, ModelError> {
    for (key, value) in [("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)] {
        if let Some(found) = fields.number(key)?.filter(|&x| x != value) {
            return Err(ModelError::bad(fields.file, key, found, value));
        }
    }
    let count = fields.need("num_local_experts", fields.size("num_local_experts")?)?;
    let per_token = fields.size("num_experts_per_tok")?.or(fields.size("experts_per_token")?);
    Ok(ExpertsConfig::new(count, fields.need("num_experts_per_tok", per_token)?, inter))
}

/// DeepSeek-V2. Without `n_routed_experts` every layer has one MLP.
fn over_all(fields: &Fields) -> Result<Option<ExpertsConfig>, ModelError> {
    let supported: [(&str, &[Value]); 4] = [
        ("scoring_func", &["softmax".into()]),
        // Old files spell it so.
        ("topk_method", &["greedy".into(), "gready".into()]),
        ("norm_topk_prob", &[false.into()]),
        ("moe_layer_freq", &[1.into()]),
    ];
    for (key, values) in supported {
        if let Some(found) = fields.map.get(key).filter(|v| !v.is_null() && !values.contains(v)) {
            return Err(fields.bad(key, found, &format!("null or {}", values[0])));
        }
    }
    let Some(count) = fields.size("n_routed_experts")? else { return Ok(None) };
    let need = |key: &str| fields.need(key, fields.size(key)?);
    let width = need("moe_intermediate_size")?;
    Ok(Some(ExpertsConfig {
        shared_width: fields.size("n_shared_experts")?.unwrap_or(0).saturating_mul(width),
        dense_layers: fields.size("first_k_dense_replace")?.unwrap_or(0),
        scale: fields.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        ..ExpertsConfig::new(count, need("num_experts_per_tok")?, width)
    }))
}
