//! Rows rotated by a Hadamard matrix: what stands out in one column is spread over all, products of two rotated rows stay what they were.
//!
//! Decides nothing about what is rotated, and stores no matrix.

use rayon::prelude::*;

use crate::isa::{Isa, per_isa};
use crate::norm::PARALLEL_ELEMS;

per_isa! {
    fn rotate_rows(x: &mut [f32], block: usize) {
        let scale = 1.0 / (block as f32).sqrt();
        for x in x.chunks_exact_mut(block) {
            let mut half = 1;
            while half < block {
                for pair in x.chunks_exact_mut(2 * half) {
                    let (low, high) = pair.split_at_mut(half);
                    for (a, b) in low.iter_mut().zip(high) {
                        (*a, *b) = (*a + *b, *a - *b);
                    }
                }
                half *= 2;
            }
            for x in x {
                *x *= scale;
            }
        }
    }
}

/// Multiplies each run of `dim` elements of `x` by an orthogonal symmetric matrix in place: blocks of the largest power of two that
/// divides `dim`, each a normalised Hadamard matrix (Sylvester's). Doing it twice gives back the rows, up to rounding; `(Hq)·(Hk) = q·k`.
/// Each row's bits depend on that row alone.
///
/// # Panics
/// If `x` is not whole rows of `dim`.
pub fn hadamard(x: &mut [f32], dim: usize) {
    assert!(dim > 0 && x.len().is_multiple_of(dim), "{} elements in rows of {dim}", x.len());
    let (isa, block) = (Isa::best(), 1 << dim.trailing_zeros());
    if x.len() < PARALLEL_ELEMS {
        return rotate_rows(isa, x, block);
    }
    let part = (PARALLEL_ELEMS / 4).div_ceil(dim) * dim;
    x.par_chunks_mut(part).for_each(|x| rotate_rows(isa, x, block));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed;
        (0..n)
            .map(|_| {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                x as i32 as f32 / i32::MAX as f32
            })
            .collect()
    }

    #[test]
    fn products_stay_and_twice_gives_back_the_rows() {
        for dim in [1, 2, 16, 64, 80, 96, 128, 256] {
            let (q, k) = (rows(dim * 3, 1), rows(dim * 3, 2));
            let (mut hq, mut hk) = (q.clone(), k.clone());
            hadamard(&mut hq, dim);
            hadamard(&mut hk, dim);
            for row in 0..3 {
                let dot = |a: &[f32], b: &[f32]| -> f64 {
                    let rows = a[row * dim..][..dim].iter().zip(&b[row * dim..][..dim]);
                    rows.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                };
                assert!((dot(&q, &k) - dot(&hq, &hk)).abs() < 1e-5, "{dim}");
            }
            hadamard(&mut hk, dim);
            assert!(k.iter().zip(&hk).all(|(a, b)| (a - b).abs() < 1e-6), "{dim}");
        }
    }

    #[test]
    fn one_column_that_stands_out_is_spread_over_all_of_its_block() {
        let mut x = vec![0.0; 64];
        x[5] = 8.0;
        hadamard(&mut x, 64);
        assert!(x.iter().all(|x| x.abs() == 1.0));
    }

    #[test]
    fn many_rows_have_the_bits_of_single_rows() {
        let x = rows(64 * 2000, 7);
        let mut all = x.clone();
        hadamard(&mut all, 64);
        for (row, got) in x.chunks(64).zip(all.chunks(64)) {
            let mut one = row.to_vec();
            hadamard(&mut one, 64);
            assert_eq!(one, got);
        }
    }
}
