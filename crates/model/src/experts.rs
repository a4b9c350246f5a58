//! The experts of a layer, from the three ways in which files hold them, as one gated MLP each.
//!
//! GGUF: `[experts, out, in]` a role, kept as they lie. safetensors of gpt-oss: gate and up in turn, in floats as `[experts, in, out]`, or
//! as MXFP4 blocks beside their scales; both are put into rows once, when the model is loaded.

use suanpan_ops::WeightFormat;

use crate::assemble::LayerStore;
use crate::error::ModelError;
use crate::weights::{Gated, Linear, Tensor};

/// Elements and bytes of an MXFP4 block without its scale.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 16;

/// `count` experts of widths `hidden` and `inter`.
pub(crate) fn weights(
    count: usize,
    hidden: usize,
    inter: usize,
    store: &mut LayerStore<'_>,
) -> Result<Vec<Gated>, ModelError> {
    if store.has("ffn_gate_exps.weight") {
        let mut role = |role: &str, rows: usize, cols: usize| {
            let all = store.tensor(&format!("ffn_{role}_exps.weight"), &[count, rows, cols])?;
            let bias = store.tensor(&format!("ffn_{role}_exps.bias"), &[count, rows])?.to_f32();
            Ok::<_, ModelError>((0..count).map(move |e| Linear {
                weight: all.slice_rows(e * rows..(e + 1) * rows).expect("experts have no scales beside them"),
                bias: Some(bias[e * rows..(e + 1) * rows].to_vec()),
            }))
        };
        let (gate, up, down) =
            (role("gate", inter, hidden)?, role("up", inter, hidden)?, role("down", hidden, inter)?);
        return Ok(gate.zip(up).zip(down).map(|((gate, up), down)| Gated { gate, up, down }).collect());
    }
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
