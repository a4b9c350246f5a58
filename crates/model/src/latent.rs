//! The products of latent attention, from the two ways in which files hold them, in the absorbed form: one pair of matrices a head.
//!
//! GGUF: the key's product transposed and the value's, `[heads, out, in]` each, kept as they lie. safetensors: both in one matrix, head after
//! head; the key's part is transposed once, when the model is loaded.

use crate::assemble::LayerStore;
use crate::config::{LatentConfig, ModelConfig};
use crate::error::ModelError;
use crate::weights::{Latent, Linear, Tensor};

/// Names of one container.
struct Names {
    q: &'static str,
    q_down: &'static str,
    q_norm: &'static str,
    q_up: &'static str,
    k: &'static str,
    norm: &'static str,
}

const GGUF: Names = Names {
    q: "attn_q.weight",
    q_down: "attn_q_a.weight",
    q_norm: "attn_q_a_norm.weight",
    q_up: "attn_q_b.weight",
    k: "attn_kv_a_mqa.weight",
    norm: "attn_kv_a_norm.weight",
};

const SAFETENSORS: Names = Names {
    q: "self_attn.q_proj.weight",
    q_down: "self_attn.q_a_proj.weight",
    q_norm: "self_attn.q_a_layernorm.weight",
    q_up: "self_attn.q_b_proj.weight",
    k: "self_attn.kv_a_proj_with_mqa.weight",
    norm: "self_attn.kv_a_layernorm.weight",
};

/// The products of a layer's attention but o: q, what makes the latent elements, and the rest.
pub(crate) fn weights(
    config: &ModelConfig,
    latent: LatentConfig,
    store: &mut LayerStore<'_>,
) -> Result<(Linear, Linear, Latent), ModelError> {
    let apart = store.has(GGUF.k);
    let names = if apart { GGUF } else { SAFETENSORS };
    let (hidden, heads, rank) = (config.hidden_size, config.heads.num_q_heads, config.heads.head_dim_v);
    let q_rows = heads * (latent.nope_dim + config.rotary_dim);
    let (q, q_down) = match latent.q_rank {
        None => (store.tensor(names.q, &[q_rows, hidden])?, None),
        Some(q_rank) => {
            let down = Linear::from(store.tensor(names.q_down, &[q_rank, hidden])?);
            let norm = store.vector(names.q_norm, q_rank)?;
            (store.tensor(names.q_up, &[q_rows, q_rank])?, Some((down, norm)))
        }
    };
    let k_rows = rank + config.rotary_dim;
    let whole = store.tensor(names.k, &[k_rows, hidden])?;
    let norm = store.vector(names.norm, rank)?;
    let (q_up, v_up) = if apart {
        let q_up = store.tensor("attn_k_b.weight", &[heads, rank, latent.nope_dim])?;
        let v_up = store.tensor("attn_v_b.weight", &[heads, latent.v_dim, rank])?;
        let each = |all: &Tensor, rows: usize| -> Result<Vec<Linear>, ModelError> {
            (0..heads).map(|h| Ok(Linear::from(part(all, h * rows..(h + 1) * rows)?))).collect()
        };
        (each(&q_up, rank)?, each(&v_up, latent.v_dim)?)
    } else {
        let rows = latent.nope_dim + latent.v_dim;
        let both = store.tensor("self_attn.kv_b_proj.weight", &[heads * rows, rank])?;
        let (mut q_up, mut v_up) = (Vec::with_capacity(heads), Vec::with_capacity(heads));
        for first in (0..heads).map(|h| h * rows) {
            let values = first + latent.nope_dim;
            q_up.push(part(&both, first..values)?.transposed(1)?.into());
            v_up.push(part(&both, values..first + rows)?.into());
        }
        (q_up, v_up)
    };
    let k_rope = part(&whole, rank..k_rows)?.into();
    Ok((q.into(), part(&whole, 0..rank)?.into(), Latent { q_down, k_rope, norm, q_up, v_up }))
}

fn part(whole: &Tensor, rows: std::ops::Range<usize>) -> Result<Tensor, ModelError> {
    whole.slice_rows(rows.clone()).ok_or_else(|| {
        let found = format!("a block of scales across row {} or {}", rows.start, rows.end);
        ModelError::bad("latent attention", "scales", found, "blocks within one head")
    })
}
