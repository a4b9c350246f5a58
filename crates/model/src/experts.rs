//! The experts of a layer, from the ways in which files hold them, as one gated MLP each.
//!
//! GGUF: `[experts, out, in]` a role, kept as they lie. safetensors of DeepSeek-V2: tensors of their own. safetensors of gpt-oss: gate and up
//! in turn, in floats as `[experts, in, out]`, or as MXFP4 blocks beside their scales; both are put into rows once, when the model is loaded.

use suanpan_ops::WeightFormat;

use crate::assemble::LayerStore;
use crate::config::ExpertsConfig;
use crate::error::ModelError;
use crate::weights::{Gated, Linear, Mlp, Tensor};

/// Elements and bytes of an MXFP4 block without its scale.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 16;

/// A choice of experts and what every token uses beside them; `bias`: of the latter.
pub(crate) fn beside_shared(
    facts: ExpertsConfig,
    hidden: usize,
    bias: bool,
    store: &mut LayerStore<'_>,
) -> Result<Mlp, ModelError> {
    let router = store.linear(store.names.router, [facts.count, hidden], false)?;
    let stacked = store.has("ffn_gate_exps.weight");
    let experts = if stacked { stacks(facts, hidden, false, store)? } else { apart(facts, hidden, store)? };
    let mut role = |role: &str, rows: usize, cols: usize| {
        let name = match stacked {
            true => format!("ffn_{role}_shexp.weight"),
            false => format!("mlp.shared_experts.{role}_proj.weight"),
        };
        store.linear(&name, [rows, cols], bias)
    };
    let shared = match facts.shared_width {
        0 => None,
        n => Some(Box::new(Gated {
            gate: role("gate", n, hidden)?,
            up: role("up", n, hidden)?,
            down: role("down", hidden, n)?,
        })),
    };
    Ok(Mlp::Experts { router, experts, shared })
}

/// Experts in tensors of their own.
fn apart(facts: ExpertsConfig, hidden: usize, store: &mut LayerStore<'_>) -> Result<Vec<Gated>, ModelError> {
    let expert = |e: usize| {
        let mut role = |role: &str, rows: usize, cols: usize| {
            let name = format!("mlp.experts.{e}.{role}_proj.weight");
            store.linear(&name, [rows, cols], false)
        };
        Ok(Gated {
            gate: role("gate", facts.width, hidden)?,
            up: role("up", facts.width, hidden)?,
            down: role("down", hidden, facts.width)?,
        })
    };
    (0..facts.count).map(expert).collect()
}

/// Experts in one tensor a role, `[experts, out, in]`, with or without biases `[experts, out]`.
fn stacks(
    facts: ExpertsConfig,
    hidden: usize,
    bias: bool,
    store: &mut LayerStore<'_>,
) -> Result<Vec<Gated>, ModelError> {
    let (count, width) = (facts.count, facts.width);
    let mut role = |role: &str, rows: usize, cols: usize| {
        let all = store.tensor(&format!("ffn_{role}_exps.weight"), &[count, rows, cols])?;
        let name = format!("ffn_{role}_exps.bias");
        let bias = if bias { Some(store.tensor(&name, &[count, rows])?.to_f32()) } else { None };
        Ok::<_, ModelError>((0..count).map(move |e| Linear {
            weight: all.slice_rows(e * rows..(e + 1) * rows).expect("experts have no scales beside them"),
            bias: bias.as_ref().map(|b| b[e * rows..(e + 1) * rows].to_vec()),
        }))
    };
    let (gate, up, down) =
        (role("gate", width, hidden)?, role("up", width, hidden)?, role("down", hidden, width)?);
    Ok(gate.zip(up).zip(down).map(|((gate, up), down)| Gated { gate, up, down }).collect())
}

/// A choice of experts whose products, and whose router, have biases.
pub(crate) fn with_biases(
    facts: ExpertsConfig,
    hidden: usize,
    store: &mut LayerStore<'_>,
) -> Result<Mlp, ModelError> {
    let router = store.linear(store.names.router, [facts.count, hidden], true)?;
    let experts = if store.has("ffn_gate_exps.weight") {
        stacks(facts, hidden, true, store)?
    } else {
        in_turn(facts, hidden, store)?
    };
    Ok(Mlp::Experts { router, experts, shared: None })
}

/// Experts of gpt-oss in safetensors: rows of gate and up in turn.
fn in_turn(
    facts: ExpertsConfig,
    hidden: usize,
    store: &mut LayerStore<'_>,
) -> Result<Vec<Gated>, ModelError> {
    let (count, inter) = (facts.count, facts.width);
    let up_bias = store.tensor("mlp.experts.gate_up_proj_bias", &[count, 2 * inter])?.to_f32();
    let down_bias = store.tensor("mlp.experts.down_proj_bias", &[count, hidden])?.to_f32();
    let gate_up = rows_of("gate_up_proj", count, 2 * inter, hidden, store)?;
    let down = rows_of("down_proj", count, hidden, inter, store)?;
    let expert = |e: usize| -> Result<Gated, ModelError> {
        let bias = |first: usize| {
            let mine = &up_bias[e * 2 * inter..(e + 1) * 2 * inter];
            Some(mine.iter().skip(first).step_by(2).copied().collect())
        };
        let first = e * 2 * inter;
        let part = |first: usize| gate_up.every_second_row(first, inter);
        Ok(Gated {
            gate: Linear { weight: part(first)?, bias: bias(0) },
            up: Linear { weight: part(first + 1)?, bias: bias(1) },
            down: Linear {
                weight: down
                    .slice_rows(e * hidden..(e + 1) * hidden)
                    .expect("experts have no scales beside them"),
                bias: Some(down_bias[e * hidden..(e + 1) * hidden].to_vec()),
            },
        })
    };
    (0..count).map(expert).collect()
}

/// `[count · rows, cols]` of one product of all experts.
fn rows_of(
    role: &str,
    count: usize,
    rows: usize,
    cols: usize,
    store: &mut LayerStore<'_>,
) -> Result<Tensor, ModelError> {
    let name = format!("mlp.experts.{role}");
    if !store.has(&format!("{name}_blocks")) {
        return store.tensor(&name, &[count, cols, rows])?.transposed(count);
    }
    let blocks = cols.div_ceil(BLOCK);
    let digits = store.bytes(&format!("{name}_blocks"), &[count, rows, blocks, BLOCK_BYTES])?;
    let scales = store.bytes(&format!("{name}_scales"), &[count, rows, blocks])?;
    let mut out = Vec::with_capacity(scales.len() * (1 + BLOCK_BYTES));
    for (scale, block) in scales.iter().zip(digits.chunks_exact(BLOCK_BYTES)) {
        out.push(*scale);
        // Two neighbours a byte here, elements 16 apart in a GGUF block.
        let digit = |i: usize| block[i / 2] >> (i % 2 * 4) & 15;
        out.extend((0..BLOCK_BYTES).map(|i| digit(i) | digit(i + BLOCK_BYTES) << 4));
    }
    Tensor::from_bytes(&name, out, WeightFormat::Mxfp4, count * rows, cols)
}
