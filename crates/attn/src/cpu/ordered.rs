//! Dot products of the direct kernel in a batch-invariant plan: each summed from its first element to its last, as the packed kernel sums it.
//!
//! Lanes are keys, so rows are transposed as they are loaded. Two groups of keys go together, because the sums of one alone would wait for each
//! other; bf16 rows are transposed as pairs and widened after it, which halves the transposition.

use super::ahead::{Ahead, LINE_BYTES};
use super::direct::{DOT_LINES, Head};
use super::element::InPlace;
use super::softmax::Columns;
use super::task::{Scratch, Task};
use super::vector::{MAX_LANES, Vector};
use crate::plan::KEY_BLOCK;

/// s = scale·q·k for R rows and the block's keys.
///
/// # Safety
/// As `Rows::dots`.
#[inline(always)]
pub(crate) unsafe fn ordered_dots<V: Vector, E: InPlace, const R: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
    cols: Columns,
) {
    let d = t.call.heads.head_dim_qk;
    let step = V::LANES * E::PER_LANE;
    // Two squares of keys, and as much of their values.
    let lines = (2 * V::LANES * step * 2 * size_of::<E>() / LINE_BYTES * DOT_LINES).div_ceil(8);
    // SAFETY: checked offsets, also beside the task's keys; within the slot's parts.
    unsafe {
        let q = w.q.add(h.row * w.q_stride).cast_const();
        let mut col = cols.from;
        while col < cols.to {
            // Where one group is left it goes twice. (No closures below: they would not carry the instruction set.)
            let groups = [col, if col + V::LANES < cols.to { col + V::LANES } else { col }];
            let mut acc = [[V::splat(0.0); R]; 2];
            let mut x = 0;
            while x + step <= d {
                ahead.ask::<V>(lines);
                let squares =
                    [key_square::<V, E>(w, h, groups[0], x), key_square::<V, E>(w, h, groups[1], x)];
                for j in 0..V::LANES {
                    let keys = [E::widen_lanes(squares[0][j]), E::widen_lanes(squares[1][j])];
                    for i in 0..E::PER_LANE {
                        let q = q.add(x + j * E::PER_LANE + i);
                        for r in 0..R {
                            let q = V::splat(*q.add(r * w.q_stride));
                            acc[0][r] = q.fma(keys[0][i], acc[0][r]);
                            acc[1][r] = q.fma(keys[1][i], acc[1][r]);
                        }
                    }
                }
                x += step;
            }
            while x < d {
                let squares = [
                    last_columns::<V, E>(w, h, groups[0], (x, d)),
                    last_columns::<V, E>(w, h, groups[1], (x, d)),
                ];
                for j in 0..V::LANES.min(d - x) {
                    for r in 0..R {
                        let q = V::splat(*q.add(r * w.q_stride + x + j));
                        acc[0][r] = q.fma(squares[0][j], acc[0][r]);
                        acc[1][r] = q.fma(squares[1][j], acc[1][r]);
                    }
                }
                x += V::LANES;
            }
            for (acc, first) in acc.iter().zip(groups) {
                let scale = V::load(w.k_scales.add(first));
                for r in 0..R {
                    acc[r].mul(scale).store(w.s.add(r * KEY_BLOCK + first));
                }
            }
            col += 2 * V::LANES;
        }
    }
}

/// Lanes of elements from `x` on of the `LANES` keys from column `first`, transposed: lanes are keys.
#[inline(always)]
unsafe fn key_square<V: Vector, E: InPlace>(
    w: &Scratch<'_>,
    h: Head<E>,
    first: usize,
    x: usize,
) -> [V; MAX_LANES] {
    // SAFETY: forwarded; the elements of LANES lanes exist in every row.
    unsafe {
        let mut square = [V::splat(0.0); MAX_LANES];
        for i in 0..V::LANES {
            square[i] = V::load(E::at(h.k, *w.k_off.get_unchecked(first + i) + x).cast());
        }
        V::transpose(&mut square);
        square
    }
}

/// The same, widened, for up to `LANES` elements `x ..` of rows of `d`.
#[inline(always)]
unsafe fn last_columns<V: Vector, E: InPlace>(
    w: &Scratch<'_>,
    h: Head<E>,
    first: usize,
    (x, d): (usize, usize),
) -> [V; MAX_LANES] {
    // SAFETY: forwarded.
    unsafe {
        let mut square = [V::splat(0.0); MAX_LANES];
        for i in 0..V::LANES {
            let p = E::at(h.k, *w.k_off.get_unchecked(first + i) + x);
            square[i] = if x + V::LANES <= d { E::load(p) } else { E::load_partial(p, d - x) };
        }
        V::transpose(&mut square);
        square
    }
}
