//! What the backward's products are made of: rows and keys as f32, or as pairs of bf16 for dot products of pairs.
//!
//! Pairs lie along head_dim for scores and their gradients (exact products), along rows for dk and dv and along keys for dq; weights and
//! gradients of scores are rounded to bf16 for those three, as plain attention at this precision does.

use half::bf16;

use super::rows::dots;
use super::task::{Scratch, Task};
use crate::cpu::pack::pack_k;
use crate::cpu::products::{Floats, Step};
use crate::cpu::vector::{MAX_LANES, Vector};

/// Rows of one side of a product.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    first: *const f32,
    /// Floats from row to row.
    pub stride: usize,
    /// Steps of a row.
    pub steps: usize,
}

impl Rows {
    /// Rows from `first` on.
    pub fn new(first: *const f32, stride: usize, steps: usize) -> Rows {
        Rows { first, stride, steps }
    }

    /// Row `row`; a raw address.
    #[inline(always)]
    pub fn at(&self, row: usize) -> *const f32 {
        self.first.wrapping_add(row * self.stride)
    }
}

/// bf16 rows where they are stored: the buffer, and where each of them starts.
pub(crate) type Stored<'a> = (*const bf16, &'a [usize; MAX_LANES]);

/// How the products take their operands.
///
/// # Safety
/// As [`Vector`]; scratch is that of a checked call.
pub(crate) unsafe trait Operands<V: Vector>: Step<V> {
    /// The query tile's rows of q, `d` wide, as scores take them.
    fn queries(w: &Scratch<'_>, d: usize) -> Rows;
    /// Its rows of d_out.
    fn out_gradients(w: &Scratch<'_>, d: usize) -> Rows;
    /// Packs the key tile's keys and values, whose rows are in `k` and `dv`.
    unsafe fn pack_keys<const N: usize>(t: &Task<'_>, w: &mut Scratch<'_>);
    /// Makes what else is made of a query tile's rows, padding included.
    unsafe fn pair_rows(t: &Task<'_>, w: &Scratch<'_>, rows: usize);
    /// Dot products of `LANES` pairs of bf16 rows, in the order in which products of tiles sum them (`rows::dots`).
    ///
    /// # Safety
    /// As `rows::dots`.
    unsafe fn bf16_dots(a: Stored<'_>, b: Stored<'_>, d: usize) -> V;
    /// Rounds p and ds for the products that follow.
    unsafe fn seal(w: &Scratch<'_>, rows: usize, keys: usize);
}

// SAFETY: nothing is made that is not there.
unsafe impl<V: Vector> Operands<V> for Floats {
    #[inline(always)]
    fn queries(w: &Scratch<'_>, d: usize) -> Rows {
        Rows::new(w.q, w.qk_stride, d)
    }

    #[inline(always)]
    fn out_gradients(w: &Scratch<'_>, d: usize) -> Rows {
        Rows::new(w.d_out, w.v_stride, d)
    }

    #[inline(always)]
    unsafe fn pack_keys<const N: usize>(t: &Task<'_>, w: &mut Scratch<'_>) {
        let (keys, panel) = (t.unit().keys, N * V::LANES);
        let (dqk, dv) = (t.call.heads.head_dim_qk, t.call.heads.head_dim_v);
        // SAFETY: the slot's parts hold a key tile.
        unsafe {
            for key in 0..keys {
                w.offsets[key] = key * w.v_stride;
            }
            pack_k::<V, f32>(w.dv, &w.offsets[..keys], (0, keys), dv, panel, w.zeros, w.v_panels);
            for key in 0..keys {
                w.offsets[key] = key * w.qk_stride;
            }
            pack_k::<V, f32>(w.k, &w.offsets[..keys], (0, keys), dqk, panel, w.zeros, w.k_panels);
        }
    }

    #[inline(always)]
    unsafe fn bf16_dots(a: Stored<'_>, b: Stored<'_>, d: usize) -> V {
        // SAFETY: forwarded.
        unsafe { dots::<V, bf16>(a, b, d) }
    }

    #[inline(always)]
    unsafe fn pair_rows(_: &Task<'_>, _: &Scratch<'_>, _: usize) {}

    #[inline(always)]
    unsafe fn seal(_: &Scratch<'_>, _: usize, _: usize) {}
}
