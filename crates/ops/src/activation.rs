//! Gated activations, the residual add, biases and caps, elementwise.

use rayon::prelude::*;

use crate::isa::{Isa, per_isa};
use crate::norm::PARALLEL_ELEMS;

/// `exp(x)` within 2 units in the last place for finite `x`; 0 below −87.3 (where the true value leaves the normal range),
/// infinity above 88.7, NaN for NaN.
///
/// exp(x) = 2^n · e^r with n = round(x / ln 2), |r| ≤ ln 2 / 2, and a degree-6 Taylor-like polynomial for e^r.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23: adding it leaves the nearest integer in the low mantissa bits
    const LN2_HIGH: f32 = 0.693_359_4; // ln 2 in two parts, the first with few bits so that n · LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // `min` and `max` drop a NaN operand; comparisons written this way keep it.
    let x = if x > 88.8 { 88.8 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    // 2^n in two factors, so that neither leaves the exponent range for any clamped x.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = n >> 1;
    let two = |e: i32| f32::from_bits(((e + 127) << 23).cast_unsigned());
    p * two(half) * two(n - half)
}

/// The function on the gate of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `g / (1 + exp(−g)) · u`.
    Silu,
    /// `gelu(g) · u` with the tanh approximation: `g / (1 + exp(−2 √(2/π) (g + 0.044715 g³)))`.
    GeluTanh,
    /// `g / (1 + exp(−alpha g)) · (u + 1)` with `g` cut above and `u` on both sides at `limit` (gpt-oss).
    ClampedSwiglu {
        /// Gain inside the sigmoid.
        alpha: f32,
        /// Where gate and up are cut.
        limit: f32,
    },
}

per_isa! {
    fn silu_part(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = g / (1.0 + exp(-g)) * u;
        }
    }
}

per_isa! {
    fn gelu_part(gate: &[f32], up: &[f32], out: &mut [f32]) {
        const TWICE: f32 = 1.595_769_2; // 2 √(2/π)
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = g / (1.0 + exp(-TWICE * (g + 0.044_715 * g * g * g))) * u;
        }
    }
}

per_isa! {
    fn clamped_part(gate: &[f32], up: &[f32], out: &mut [f32], alpha: f32, limit: f32) {
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            // Comparisons written this way keep a NaN.
            let g = if g > limit { limit } else { g };
            let u = if u > limit { limit } else { u };
            let u = if u < -limit { -limit } else { u };
            *o = g / (1.0 + exp(-alpha * g)) * (u + 1.0);
        }
    }
}

per_isa! {
    fn softcap_part(x: &mut [f32], cap: f32) {
        let twice = 2.0 / cap;
        for x in x.iter_mut() {
            *x = cap - 2.0 * cap / (1.0 + exp(twice * *x));
        }
    }
}

per_isa! {
    fn add_part(x: &[f32], out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o += x;
        }
    }
}

/// `out[i] = activation(gate[i], up[i])`; equal lengths.
///
/// # Panics
/// When the lengths differ.
pub fn gated(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert_eq!(gate.len(), up.len(), "gated: up");
    assert_eq!(gate.len(), out.len(), "gated: out");
    let isa = Isa::best();
    let run = |gate: &[f32], up: &[f32], out: &mut [f32]| match activation {
        Activation::Silu => silu_part(isa, gate, up, out),
        Activation::GeluTanh => gelu_part(isa, gate, up, out),
        Activation::ClampedSwiglu { alpha, limit } => clamped_part(isa, gate, up, out, alpha, limit),
    };
    if out.len() < PARALLEL_ELEMS {
        return run(gate, up, out);
    }
    const PART: usize = PARALLEL_ELEMS / 4;
    (gate.par_chunks(PART), up.par_chunks(PART), out.par_chunks_mut(PART))
        .into_par_iter()
        .for_each(|(gate, up, out)| run(gate, up, out));
}

/// `x[i] = cap · tanh(x[i] / cap)`, within a few roundings of `cap`.
pub fn softcap(x: &mut [f32], cap: f32) {
    let isa = Isa::best();
    if x.len() < PARALLEL_ELEMS {
        return softcap_part(isa, x, cap);
    }
    x.par_chunks_mut(PARALLEL_ELEMS / 4).for_each(|x| softcap_part(isa, x, cap));
}

/// `x[i] *= factor`.
pub fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// Adds `bias` to each row of `out`, `[rows, bias.len()]`.
///
/// # Panics
/// When `out` is not whole rows.
pub fn add_bias(out: &mut [f32], bias: &[f32]) {
    assert!(out.len().is_multiple_of(bias.len().max(1)), "add_bias: out");
    let isa = Isa::best();
    out.chunks_exact_mut(bias.len().max(1)).for_each(|row| add_part(isa, bias, row));
}

/// `out[i] += x[i]`; equal lengths.
///
/// # Panics
/// When the lengths differ.
pub fn add_into(out: &mut [f32], x: &[f32]) {
    assert_eq!(x.len(), out.len(), "add_into: out");
    let isa = Isa::best();
    if out.len() < PARALLEL_ELEMS {
        return add_part(isa, x, out);
    }
    const PART: usize = PARALLEL_ELEMS / 2;
    x.par_chunks(PART).zip(out.par_chunks_mut(PART)).for_each(|(x, out)| add_part(isa, x, out));
}
