//! Root-mean-square normalisation.

use rayon::prelude::*;

use crate::isa::{Isa, per_isa};

/// Partial sums of one row: fixed, so that every vector width adds in the same order.
const LANES: usize = 16;
/// Elements below which a call stays on the caller's thread: waking another costs more than the work.
pub(crate) const PARALLEL_ELEMS: usize = 32 * 1024;

/// 1 / sqrt(mean(x²) + eps) of one row.
#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mut sums = [0f32; LANES];
    let (body, tail) = x.as_chunks::<LANES>();
    for x in body {
        for (s, v) in sums.iter_mut().zip(x) {
            *s += v * v;
        }
    }
    for (s, v) in sums.iter_mut().zip(tail) {
        *s += v * v;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    1.0 / (sums[0] / x.len() as f32 + eps).sqrt()
}

per_isa! {
    fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let cols = weight.len();
        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
            let inv = inverse_rms(x, eps);
            for i in 0..cols {
                out[i] = x[i] * inv * weight[i];
            }
        }
    }
}

per_isa! {
    fn norm_rows_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
        for x in x.chunks_exact_mut(weight.len()) {
            let inv = inverse_rms(x, eps);
            for (x, w) in x.iter_mut().zip(weight) {
                *x = *x * inv * w;
            }
        }
    }
}

/// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) · weight`, all `[rows, cols]`, `weight` `[cols]`.
///
/// # Panics
/// When a length does not match `rows` and `cols`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32], rows: usize, cols: usize) {
    assert_eq!(weight.len(), cols, "rms_norm: weight");
    assert_eq!(Some(x.len()), rows.checked_mul(cols), "rms_norm: x");
    assert_eq!(out.len(), x.len(), "rms_norm: out");
    if x.is_empty() {
        return;
    }
    let isa = Isa::best();
    if x.len() < PARALLEL_ELEMS {
        return norm_rows(isa, x, weight, eps, out);
    }
    let part = (PARALLEL_ELEMS / 4 / cols).max(1) * cols;
    x.par_chunks(part).zip(out.par_chunks_mut(part)).for_each(|(x, out)| norm_rows(isa, x, weight, eps, out));
}

/// [`rms_norm`] of `x` `[rows, weight.len()]` in place: of whole rows, or of each head of a row.
///
/// # Panics
/// When `x` is not whole rows of `weight.len()`.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let cols = weight.len();
    assert!(cols > 0 && x.len().is_multiple_of(cols), "rms_norm_in_place: x");
    let isa = Isa::best();
    if x.len() < PARALLEL_ELEMS {
        return norm_rows_in_place(isa, x, weight, eps);
    }
    let part = (PARALLEL_ELEMS / 4 / cols).max(1) * cols;
    x.par_chunks_mut(part).for_each(|x| norm_rows_in_place(isa, x, weight, eps));
}
