//! The backward's operands as pairs of bf16.
//!
//! ```text
//! scores, d_out·Vᵀ   q, d_out by rows, pairs along head_dim          Kᵀ, Vᵀ in panels [pairs of width][64]
//! dv, dk             p2, ds2 [pairs of rows][key]                    d_out2, q2 [pairs of rows][column]
//! dq                 ds by rows, pairs along keys                    k2 [pairs of keys][column]
//! ```

use super::operands::{Operands, Rows, Stored};
use super::task::{Scratch, Task};
use crate::cpu::pairs::{Pairs, pack_k};
use crate::cpu::vector::{MAX_LANES, PairDots};
use crate::workspace::TILE_ROWS;

/// Rounds rows of `d` floats (zeros up to `2 * LANES` of them after) to bf16, in pairs along the row: exact where they were bf16.
#[inline(always)]
unsafe fn along<V: PairDots>(
    src: *const f32,
    stride: usize,
    rows: usize,
    d: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    for row in 0..rows {
        let mut x = 0;
        while x < d {
            // SAFETY: rows of whole vectors; a second vector past the row's end is read only where the row has one.
            unsafe {
                let from = src.add(row * stride + x);
                let second = if x + V::LANES < d { V::load(from.add(V::LANES)) } else { V::splat(0.0) };
                V::narrow(V::load(from), second).store(dst.add(row * dst_stride + x / 2));
            }
            x += 2 * V::LANES;
        }
    }
}

/// Rounds rows `2i` and `2i + 1` to bf16, side by side: row `i` of `dst`, columns `from .. to` in whole vectors.
#[inline(always)]
unsafe fn across<V: PairDots>(
    src: *const f32,
    stride: usize,
    pairs: std::ops::Range<usize>,
    (from, to): (usize, usize),
    dst: *mut f32,
) {
    for pair in pairs {
        let mut x = from;
        while x < to {
            // SAFETY: within the slot's parts.
            unsafe {
                let a = V::load(src.add(2 * pair * stride + x));
                let b = V::load(src.add((2 * pair + 1) * stride + x));
                V::beside(a, b).store(dst.add(pair * stride + x));
            }
            x += V::LANES;
        }
    }
}

/// Pairs of columns `x .. x + 2 * LANES` of the rows, a vector each; zeros from `d` on. No closure: it would not carry the instruction set.
#[inline(always)]
unsafe fn columns<V: PairDots>((rows, places): Stored<'_>, x: usize, d: usize) -> [V; MAX_LANES] {
    // SAFETY: forwarded.
    unsafe {
        let mut square = [V::splat(0.0); MAX_LANES];
        for i in 0..V::LANES {
            let p = rows.add(places[i] + x);
            square[i] =
                if x + 2 * V::LANES <= d { V::load_pairs(p) } else { V::load_pairs_partial(p, d - x) };
        }
        V::transpose(&mut square);
        square
    }
}

// SAFETY: forwards to `PairDots`, within the slot's parts.
unsafe impl<V: PairDots> Operands<V> for Pairs {
    #[inline(always)]
    fn queries(w: &Scratch<'_>, d: usize) -> Rows {
        Rows::new(w.q_pairs, w.qk_stride, d.div_ceil(2))
    }

    #[inline(always)]
    fn out_gradients(w: &Scratch<'_>, d: usize) -> Rows {
        Rows::new(w.d_out_pairs, w.v_stride, d.div_ceil(2))
    }

    #[inline(always)]
    unsafe fn pack_keys<const N: usize>(t: &Task<'_>, w: &mut Scratch<'_>) {
        let (keys, panel) = (t.unit().keys, N * V::LANES);
        let (dqk, dv) = (t.call.heads.head_dim_qk, t.call.heads.head_dim_v);
        // SAFETY: the slot's parts hold a key tile; dv holds values and dk nothing until both are cleared: they take rows of pairs here.
        unsafe {
            let zeros = w.zeros.cast_const().cast();
            along::<V>(w.dv, w.v_stride, keys, dv, w.dv, w.v_stride);
            (0..keys).for_each(|key| w.offsets[key] = key * w.v_stride * 2);
            let offsets = &w.offsets[..keys];
            pack_k::<V>(w.dv.cast_const().cast(), offsets, (0, keys), dv, panel, zeros, w.v_panels);
            along::<V>(w.k, w.qk_stride, keys, dqk, w.dk, w.qk_stride);
            (0..keys).for_each(|key| w.offsets[key] = key * w.qk_stride * 2);
            let offsets = &w.offsets[..keys];
            pack_k::<V>(w.dk.cast_const().cast(), offsets, (0, keys), dqk, panel, zeros, w.k_panels);
            if !keys.is_multiple_of(2) {
                std::ptr::write_bytes(w.k.add(keys * w.qk_stride), 0, w.qk_stride);
            }
            across::<V>(w.k, w.qk_stride, 0..keys.div_ceil(2), (0, dqk), w.k2);
        }
    }

    #[inline(always)]
    unsafe fn bf16_dots(a: Stored<'_>, b: Stored<'_>, d: usize) -> V {
        // SAFETY: forwarded.
        unsafe {
            let mut sum = V::splat(0.0);
            let mut x = 0;
            while x < d {
                let (a, b) = (columns::<V>(a, x, d), columns::<V>(b, x, d));
                for i in 0..V::LANES {
                    sum = b[i].dot_pairs(a[i], sum);
                }
                x += 2 * V::LANES;
            }
            sum
        }
    }

    #[inline(always)]
    unsafe fn pair_rows(t: &Task<'_>, w: &Scratch<'_>, rows: usize) {
        let (dqk, dv) = (t.call.heads.head_dim_qk, t.call.heads.head_dim_v);
        // SAFETY: the slot's parts hold a query tile.
        unsafe {
            along::<V>(w.q, w.qk_stride, rows, dqk, w.q_pairs, w.qk_stride);
            along::<V>(w.d_out, w.v_stride, rows, dv, w.d_out_pairs, w.v_stride);
            across::<V>(w.q, w.qk_stride, 0..rows / 2, (0, dqk), w.q2);
            across::<V>(w.d_out, w.v_stride, 0..rows / 2, (0, dv), w.d_out2);
        }
    }

    #[inline(always)]
    unsafe fn seal(w: &Scratch<'_>, rows: usize, keys: usize) {
        let width = 2 * V::LANES;
        for tile in 0..rows.div_ceil(TILE_ROWS) {
            // Rows of a register tile were made over the same columns; what one of them does not see is 0.
            let first = tile * TILE_ROWS;
            let last = (first + TILE_ROWS - 1).min(rows - 1);
            let (from, to) = (w.visible[first].start, w.visible[last].end);
            if from >= to {
                continue;
            }
            // A group of 6 keys may begin before what the tile sees and end past it.
            let from = from / TILE_ROWS * TILE_ROWS / width * width;
            let to = (to.div_ceil(TILE_ROWS) * TILE_ROWS)
                .min(keys.next_multiple_of(TILE_ROWS))
                .next_multiple_of(width);
            // SAFETY: within the slot's parts: rows of p hold whole pairs of vectors past the last key.
            unsafe {
                let pairs = first / 2..(first + TILE_ROWS) / 2;
                across::<V>(w.p, w.p_stride, pairs.clone(), (from, to), w.p2);
                across::<V>(w.ds, w.p_stride, pairs, (from, to), w.ds2);
                let (ds, narrow) =
                    (w.ds.add(first * w.p_stride + from), w.ds_keys.add(first * w.p_stride + from / 2));
                along::<V>(ds, w.p_stride, TILE_ROWS, to - from, narrow, w.p_stride);
            }
        }
    }
}
