//! The weights of `builtin:recall`, entry by entry. Each function fills one matrix, row = output feature.
//!
//! Residual stream (128 wide): `CODE` the token's own code, `ONE` the constant 1, `COPY` the codes at offsets 0 ..= 7,
//! `FOUND` 1 after the first layer and the retrieved code after the second, `PAD` 1 after the first layer. Every entry is
//! 0, +1 or -1, so the mean square is 1/4 before the first layer and exactly 1 after it.

use crate::matrix::Matrix;
use crate::weights::{LayerWeights, Tensor, Weights};

use super::{CODE_DIGITS, HEADS, HIDDEN, LOGIT_GAIN, MATCH_GAIN, NGRAM, OFFSET_PAIR, VOCAB_SIZE, WINDOW};

/// Name in errors.
const NAME: &str = "builtin:recall";
const CODE: usize = 0;
const ONE: usize = CODE + CODE_DIGITS;
const ONES: usize = 24;
const COPY: usize = ONE + ONES;
const FOUND: usize = COPY + WINDOW * CODE_DIGITS;
const PAD: usize = FOUND + CODE_DIGITS;
/// Element of a value head that carries the constant 1; the elements before it carry a code.
const V_ONE: usize = CODE_DIGITS;
/// Score of the right offset in the first layer, after the softmax scale. The next offset scores cos(pi/4) of it.
const OFFSET_GAIN: f32 = 128.0;
/// How much more the farthest matched token counts than the others: a window one short then drowns the match in noise,
/// where it would otherwise only make it one token shorter, and go unnoticed.
const FARTHEST_WEIGHT: f32 = 4.0;

const DIM: usize = HEADS.head_dim_qk;
/// 1 / softmax_scale: 8 for a head_dim of 64, exactly.
const UNSCALE: f32 = 8.0;

// FOUND and PAD end the stream; 8 heads copy 8 offsets and find 8 digits.
const _: () = assert!(PAD < HIDDEN && WINDOW == HEADS.num_q_heads && CODE_DIGITS == HEADS.num_q_heads);
const _: () = assert!(NGRAM * CODE_DIGITS <= DIM && OFFSET_PAIR < DIM / 2);

/// Digit `d` of the code of token `t`.
pub(super) fn digit(t: usize, d: usize) -> f32 {
    if t >> d & 1 == 1 { 1.0 } else { -1.0 }
}

/// Sign of element `d` in the keys (and queries) of kv head `g`: a query that meets another group's keys matches nothing.
/// Both elements of a rotary pair share a sign, because only then does the sign survive the rotation.
fn key_sign(g: usize, d: usize) -> f32 {
    let pair = d % (DIM / 2);
    if g == 0 || (pair * 5 + pair / 3).is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// Sign of element `d` in the values of kv head `g`, undone in the output projection.
fn value_sign(g: usize, d: usize) -> f32 {
    if (d + g).is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// The kv head that query head `h` reads.
fn group(h: usize) -> usize {
    h / HEADS.group_size()
}

/// All weights of the model.
pub(super) fn weights() -> Weights {
    Weights {
        embed: embed(),
        layers: vec![window_layer(), global_layer()],
        final_norm: vec![1.0; HIDDEN],
        lm_head: lm_head(),
    }
}

fn embed() -> Tensor {
    let mut m = Matrix::zeros(VOCAB_SIZE, HIDDEN);
    for t in 0..VOCAB_SIZE {
        for d in 0..CODE_DIGITS {
            m.set(t, CODE + d, digit(t, d));
        }
        for c in ONE..ONE + ONES {
            m.set(t, c, 1.0);
        }
    }
    m.tensor(NAME)
}

/// Head `j` copies the code at offset `j` into its part of `COPY`; each head fills four constants of `FOUND` and `PAD`.
fn window_layer() -> LayerWeights {
    let (kv_heads, q_heads) = (HEADS.num_kv_heads, HEADS.num_q_heads);
    let mut q = Matrix::zeros(q_heads * DIM, HIDDEN);
    let mut k = Matrix::zeros(kv_heads * DIM, HIDDEN);
    let mut v = Matrix::zeros(kv_heads * DIM, HIDDEN);
    let mut o = Matrix::zeros(HIDDEN, q_heads * DIM);
    for g in 0..kv_heads {
        k.set(g * DIM + OFFSET_PAIR, ONE, key_sign(g, OFFSET_PAIR));
        for d in 0..CODE_DIGITS {
            v.set(g * DIM + d, CODE + d, value_sign(g, d));
        }
        v.set(g * DIM + V_ONE, ONE + 1, value_sign(g, V_ONE));
    }
    for h in 0..q_heads {
        let g = group(h);
        // Rotated, q.k = gain * cos((i - p - h) * pi/4) for a query at i and a key at p.
        let angle = -(h as f64) * std::f64::consts::FRAC_PI_4;
        let gain = OFFSET_GAIN * UNSCALE * key_sign(g, OFFSET_PAIR);
        q.set(h * DIM + OFFSET_PAIR, ONE + 2, gain * angle.cos() as f32);
        q.set(h * DIM + OFFSET_PAIR + DIM / 2, ONE + 2, gain * angle.sin() as f32);
        for d in 0..CODE_DIGITS {
            o.set(COPY + h * CODE_DIGITS + d, h * DIM + d, value_sign(g, d));
        }
        for row in (FOUND..HIDDEN).filter(|row| row % q_heads == h) {
            o.set(row, h * DIM + V_ONE, value_sign(g, V_ONE));
        }
    }
    // The mean square of the embedding is 1/4: half of the normalised stream is the stream.
    let norm = vec![0.5; HIDDEN];
    Matrix::attention(NAME, norm, [q, k, v, o])
}

/// Every head matches the last `NGRAM` codes against the codes before each key; head `h` brings digit `h` of the key's own code.
fn global_layer() -> LayerWeights {
    let (kv_heads, q_heads) = (HEADS.num_kv_heads, HEADS.num_q_heads);
    let mut q = Matrix::zeros(q_heads * DIM, HIDDEN);
    let mut k = Matrix::zeros(kv_heads * DIM, HIDDEN);
    let mut v = Matrix::zeros(kv_heads * DIM, HIDDEN);
    let mut o = Matrix::zeros(HIDDEN, q_heads * DIM);
    for m in 0..NGRAM * CODE_DIGITS {
        for g in 0..kv_heads {
            k.set(g * DIM + m, COPY + CODE_DIGITS + m, key_sign(g, m));
        }
        for h in 0..q_heads {
            let weight = if m / CODE_DIGITS == NGRAM - 1 { FARTHEST_WEIGHT } else { 1.0 };
            q.set(h * DIM + m, COPY + m, weight * MATCH_GAIN * UNSCALE * key_sign(group(h), m));
        }
    }
    for g in 0..kv_heads {
        for d in 0..CODE_DIGITS {
            v.set(g * DIM + d, COPY + d, value_sign(g, d));
        }
        v.set(g * DIM + V_ONE, ONE, value_sign(g, V_ONE));
    }
    for h in 0..q_heads {
        // The digit replaces the 1 that stands in FOUND, so that the mean square stays 1.
        o.set(FOUND + h, h * DIM + h, value_sign(group(h), h));
        o.set(FOUND + h, h * DIM + V_ONE, -value_sign(group(h), V_ONE));
    }
    let norm = vec![1.0; HIDDEN];
    Matrix::attention(NAME, norm, [q, k, v, o])
}

fn lm_head() -> Tensor {
    let mut m = Matrix::zeros(VOCAB_SIZE, HIDDEN);
    for t in 0..VOCAB_SIZE {
        for d in 0..CODE_DIGITS {
            m.set(t, FOUND + d, LOGIT_GAIN * digit(t, d));
        }
    }
    m.tensor(NAME)
}
