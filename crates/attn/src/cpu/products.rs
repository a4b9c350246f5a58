//! How the packed kernel multiplies: what a lane of its panels holds, and what one step of its loops does. Here as f32; `pairs` has bf16.

use super::element::Elem;
use super::pack::{pack_k, pack_v};
use super::seen::Runs;
use super::softmax::Columns;
use super::task::{Scratch, Src, Task};
use super::vector::Vector;
use crate::plan::KEY_BLOCK;
use crate::workspace::TILE_ROWS;

/// What one step of a product does.
///
/// # Safety
/// As [`Vector`].
pub(crate) unsafe trait Step<V: Vector> {
    /// Numbers that one step takes.
    const DEPTH: usize;
    /// `a * b + c`, over a step.
    unsafe fn multiply_add(a: V, b: V, c: V) -> V;
}

/// Panels of K are `[steps of head_dim_qk][keys]`, of V `[steps of the block][columns]`, of q `[steps][rows of a register tile]`.
///
/// # Safety
/// As [`Vector`]; tasks and scratch are those of a checked call.
pub(crate) unsafe trait Products<V: Vector>: Step<V> {
    /// Row `row` of q into its place in a register tile; `dst` is step 0 of it.
    unsafe fn load_query(t: &Task<'_>, row: usize, dst: *mut f32);
    /// Packs the keys of columns `cols` and their values. Returns true when every value is finite.
    unsafe fn load_block<const N: usize>(t: &Task<'_>, w: &Scratch<'_>, cols: (usize, usize)) -> bool;
    /// Makes the finished weights `cols` of row `row`, at `s`, ready for their products; sums so far shrank by `alpha`.
    unsafe fn seal(w: &Scratch<'_>, row: usize, s: *mut f32, cols: Columns, alpha: f32);
    /// One row of outputs, columns `left .. left + width`, over exactly the keys that it sees.
    unsafe fn output_row(w: &Scratch<'_>, v: *const f32, width: usize, row: usize, left: usize, seen: Runs);
}

/// Everything is widened to f32.
pub(crate) struct Floats;

// SAFETY: forwards to `Vector`.
unsafe impl<V: Vector> Step<V> for Floats {
    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn multiply_add(a: V, b: V, c: V) -> V {
        // SAFETY: forwarded.
        unsafe { a.fma(b, c) }
    }
}

// SAFETY: forwards to `Vector`.
unsafe impl<V: Vector> Products<V> for Floats {
    #[inline(always)]
    unsafe fn load_query(t: &Task<'_>, row: usize, dst: *mut f32) {
        // SAFETY: forwarded.
        unsafe { t.load_query(row, dst, TILE_ROWS) }
    }

    #[inline(always)]
    unsafe fn load_block<const N: usize>(t: &Task<'_>, w: &Scratch<'_>, cols: (usize, usize)) -> bool {
        // SAFETY: checked offsets; the slot's parts hold a block.
        unsafe {
            match t.call.k {
                Src::F32(k) => pack_k_block::<V, f32, N>(t, w, k, cols),
                Src::Bf16(k) => pack_k_block::<V, half::bf16, N>(t, w, k, cols),
                Src::F16(k) => pack_k_block::<V, half::f16, N>(t, w, k, cols),
                Src::E4m3(k) => pack_k_block::<V, _, N>(t, w, k, cols),
                Src::E5m2(k) => pack_k_block::<V, _, N>(t, w, k, cols),
                Src::I8(k) => pack_k_block::<V, i8, N>(t, w, k, cols),
                Src::I4(k) => pack_k_block::<V, _, N>(t, w, k, cols),
            }
            let d = t.call.heads.head_dim_v;
            match t.call.v {
                Src::F32(v) => pack_v::<V, f32, N>(v, w.v_off, cols, d, w.v),
                Src::Bf16(v) => pack_v::<V, half::bf16, N>(v, w.v_off, cols, d, w.v),
                Src::F16(v) => pack_v::<V, half::f16, N>(v, w.v_off, cols, d, w.v),
                Src::E4m3(v) => pack_v::<V, _, N>(v, w.v_off, cols, d, w.v),
                Src::E5m2(v) => pack_v::<V, _, N>(v, w.v_off, cols, d, w.v),
                Src::I8(v) => pack_v::<V, i8, N>(v, w.v_off, cols, d, w.v),
                Src::I4(v) => pack_v::<V, _, N>(v, w.v_off, cols, d, w.v),
            }
        }
    }

    #[inline(always)]
    unsafe fn seal(_: &Scratch<'_>, _: usize, _: *mut f32, _: Columns, _: f32) {}

    #[inline(always)]
    unsafe fn output_row(w: &Scratch<'_>, v: *const f32, width: usize, row: usize, left: usize, seen: Runs) {
        // SAFETY: within the slot's parts.
        unsafe {
            let alpha = V::splat(*w.alpha.add(row));
            let mut x = 0;
            while x < width {
                let o = w.o.add(row * w.o_stride + left + x);
                let mut acc = V::load(o).mul(alpha);
                for key in Runs(seen.0).flatten() {
                    acc = V::splat(*w.s.add(row * KEY_BLOCK + key)).fma(V::load(v.add(key * width + x)), acc);
                }
                acc.store(o);
                x += V::LANES;
            }
        }
    }
}

#[inline(always)]
unsafe fn pack_k_block<V: Vector, E: Elem, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    k: *const E,
    cols: (usize, usize),
) {
    let d = t.call.heads.head_dim_qk;
    // SAFETY: forwarded.
    unsafe { pack_k::<V, E>(k, w.k_off, cols, d, N * V::LANES, w.zeros.cast(), w.k) }
}
