//! Dot products of the direct kernel in a batch-invariant plan: each summed from its first element to its last, as the packed kernel sums it.
//!
//! Lanes are keys, so rows are transposed as they are loaded, into a panel of `N` groups of keys in the slot; products of all rows with it come
//! after. The transposition is bound by shuffles and the products by multiply-adds, so that the end of one runs beside the start of the other. bf16
//! rows are transposed as pairs and widened after it, which halves the transposition.

use super::ahead::{Ahead, LINE_BYTES, NEAR};
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
pub(crate) unsafe fn ordered_dots<V: Vector, E: InPlace, const R: usize, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
    cols: Columns,
) {
    let d = t.call.heads.head_dim_qk;
    // SAFETY: checked offsets, also beside the task's keys; the slot's panel holds d rows of a block's keys.
    unsafe {
        let mut col = cols.from;
        while col < cols.to {
            let groups = ((cols.to - col) / V::LANES).min(N);
            for g in 0..groups {
                transpose_keys::<V, E, N>(w, h, ahead, (col, g), d);
            }
            match groups {
                1 => multiply::<V, E, R, N, 1>(w, h, ahead, col, d),
                2 if N > 2 => multiply::<V, E, R, N, 2>(w, h, ahead, col, d),
                3 if N > 3 => multiply::<V, E, R, N, 3>(w, h, ahead, col, d),
                _ => multiply::<V, E, R, N, N>(w, h, ahead, col, d),
            }
            col += groups * V::LANES;
        }
    }
}

/// Lines to ask for beside `elements` elements of keys, half of them while transposing and half while multiplying.
#[inline(always)]
fn lines<E>(elements: usize) -> usize {
    (elements * 2 * size_of::<E>() / LINE_BYTES * DOT_LINES).div_ceil(16)
}

/// Writes group `g` of the panel from column `col`: `[d / PER_LANE][N * LANES]` lanes of elements, those of the last, shorter step widened.
#[inline(always)]
unsafe fn transpose_keys<V: Vector, E: InPlace, const N: usize>(
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
    (col, g): (usize, usize),
    d: usize,
) {
    let (first, step, panel) = (col + g * V::LANES, V::LANES * E::PER_LANE, N * V::LANES);
    // SAFETY: forwarded; elements of whole steps exist in every row.
    unsafe {
        let mut to = w.panel.add(g * V::LANES);
        let mut x = 0;
        while x < d {
            let mut square = [V::splat(0.0); MAX_LANES];
            let whole = x + step <= d;
            for i in 0..V::LANES {
                let p = E::at(h.k, *w.k_off.get_unchecked(first + i) + x);
                square[i] = match whole {
                    true => V::load(p.cast()),
                    false if x + V::LANES <= d => E::load(p),
                    false => E::load_partial(p, d - x),
                };
            }
            V::transpose(&mut square);
            ahead.ask::<V, NEAR>(lines::<E>(V::LANES * step));
            let rows = if whole { V::LANES } else { V::LANES.min(d - x) };
            for j in 0..V::LANES {
                if j < rows {
                    square[j].store(to.add(j * panel));
                }
            }
            to = to.add(rows * panel);
            x += if whole { step } else { rows };
        }
    }
}

/// The scores of R rows over M groups of the panel.
#[inline(always)]
unsafe fn multiply<V: Vector, E: InPlace, const R: usize, const N: usize, const M: usize>(
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
    col: usize,
    d: usize,
) {
    let panel = N * V::LANES;
    let whole = d / (V::LANES * E::PER_LANE) * V::LANES * E::PER_LANE;
    // SAFETY: as `ordered_dots`.
    unsafe {
        let q = w.q.add(h.row * w.q_stride).cast_const();
        let mut k = w.panel.cast_const();
        let mut acc = [[V::splat(0.0); M]; R];
        let mut x = 0;
        while x < whole {
            ahead.ask::<V, NEAR>(lines::<E>(M * V::LANES * E::PER_LANE));
            let mut keys = [[V::splat(0.0); 2]; M];
            for m in 0..M {
                keys[m] = E::widen_lanes(V::load(k.add(m * V::LANES)));
            }
            for i in 0..E::PER_LANE {
                for r in 0..R {
                    let q = V::splat(*q.add(r * w.q_stride + x + i));
                    for m in 0..M {
                        acc[r][m] = q.fma(keys[m][i], acc[r][m]);
                    }
                }
            }
            k = k.add(panel);
            x += E::PER_LANE;
        }
        while x < d {
            for r in 0..R {
                let q = V::splat(*q.add(r * w.q_stride + x));
                for m in 0..M {
                    acc[r][m] = q.fma(V::load(k.add(m * V::LANES)), acc[r][m]);
                }
            }
            k = k.add(panel);
            x += 1;
        }
        for m in 0..M {
            let scale = V::load(w.k_scales.add(col + m * V::LANES));
            for r in 0..R {
                acc[r][m].mul(scale).store(w.s.add(r * KEY_BLOCK + col + m * V::LANES));
            }
        }
    }
}
