//! The two tile kernels: integer dots with a rescale per group, and f32 multiply-add, both with one weight row a lane.
//!
//! An output element is summed in one fixed order (columns ascending, one lane, no split), so its bits do not depend on how many
//! input rows, tiles or threads a call has.

use super::panel::{
    Dest, FloatTile, GROUP_FLOATS, IntTile, PANEL_FLOATS, PANEL_GROUPS, PANEL_QUANTS, PANEL_ROWS, TILE_ROWS,
};
use super::vector::{Kernels, Vector};
use crate::dequant::BlockFormat;
use crate::quantize::Group;

/// 1.5·2²³ as a float. An integer |i| < 2²² added to its *bits* gives the float 1.5·2²³ + i exactly, so that
/// fma(that, scale, −1.5·2²³·scale) is i·scale rounded once: the conversion of an integer sum costs nothing. The product
/// 1.5·2²³·scale is exact because scales have at most 19 significant bits. Sums of 32 products of 255·127 stay below 2²¹.
pub(crate) const MAGIC: f32 = 12_582_912.0;

/// Runs the tile shape of `rows` and `panels`.
///
/// # Safety
/// The machine has `V`'s instruction set, `rows` is a power of two ≤ `INT_ROWS`, `panels` ≤ `PANELS`, and the tile's pointers are
/// valid.
#[inline(always)]
pub(crate) unsafe fn int_any<V: Kernels, F: BlockFormat>(rows: usize, panels: usize, tile: &IntTile) {
    // SAFETY: the caller's promise; every arm covers `rows` × `panels` or, past the consts, cannot be reached.
    unsafe {
        match PANEL_ROWS / V::LANES {
            1 if panels == 1 || V::PANELS == 1 => int_rows::<V, F, 1>(rows, tile),
            1 if panels == 2 => int_rows::<V, F, 2>(rows, tile),
            1 => int_rows::<V, F, 3>(rows, tile),
            2 => int_rows::<V, F, 2>(rows, tile),
            _ => int_rows::<V, F, 4>(rows, tile),
        }
    }
}

/// As [`int_any`].
///
/// # Safety
/// As [`int_any`].
#[inline(always)]
unsafe fn int_rows<V: Kernels, F: BlockFormat, const NV: usize>(rows: usize, tile: &IntTile) {
    // SAFETY: as above.
    unsafe {
        match rows {
            1 => int_tile::<V, F, 1, NV>(tile),
            2 if V::INT_ROWS >= 2 => int_tile::<V, F, 2, NV>(tile),
            4 if V::INT_ROWS >= 4 => int_tile::<V, F, 4, NV>(tile),
            _ => unreachable!("integer tile of {rows} rows"),
        }
    }
}

/// Runs the tile shape of `rows` and `panels`.
///
/// # Safety
/// As [`int_any`], with `FLOAT_ROWS`.
#[inline(always)]
pub(crate) unsafe fn float_any<V: Kernels>(rows: usize, panels: usize, tile: &FloatTile) {
    // SAFETY: as above.
    unsafe {
        match PANEL_ROWS / V::LANES {
            1 if panels == 1 || V::PANELS == 1 => float_rows::<V, 1>(rows, tile),
            1 if panels == 2 => float_rows::<V, 2>(rows, tile),
            1 => float_rows::<V, 3>(rows, tile),
            2 => float_rows::<V, 2>(rows, tile),
            _ => float_rows::<V, 4>(rows, tile),
        }
    }
}

/// As [`float_any`].
///
/// # Safety
/// As [`float_any`].
#[inline(always)]
unsafe fn float_rows<V: Kernels, const NV: usize>(rows: usize, tile: &FloatTile) {
    // SAFETY: as above.
    unsafe {
        match rows {
            1 => float_tile::<V, 1, NV>(tile),
            2 if V::FLOAT_ROWS >= 2 => float_tile::<V, 2, NV>(tile),
            4 if V::FLOAT_ROWS >= 4 => float_tile::<V, 4, NV>(tile),
            8 if V::FLOAT_ROWS >= 8 => float_tile::<V, 8, NV>(tile),
            _ => unreachable!("float tile of {rows} rows"),
        }
    }
}

/// Panel and first row in the panel of vector `v`.
#[inline(always)]
const fn place<V: Vector>(v: usize) -> (usize, usize) {
    (v * V::LANES / PANEL_ROWS, v * V::LANES % PANEL_ROWS)
}

/// Whether the stored integers of a format use all eight bits.
#[inline(always)]
const fn is_wide<F: BlockFormat>() -> bool {
    matches!(F::OFFSET_LOG2, Some(7))
}

/// Zero is stored as 2^shift: 2^shift · Σx, to be taken off the sum of group `g` before it starts.
#[inline(always)]
fn offset<V: Vector, F: BlockFormat>(meta: &Group, g: usize) -> i32 {
    match F::OFFSET_LOG2 {
        Some(shift) if !(is_wide::<F>() && V::WIDE_IS_SIGNED) => {
            let sum = if F::GROUP == 32 { meta.sum } else { meta.half_sums[g % 2] };
            sum << shift
        }
        _ => 0,
    }
}

/// What the minimum of group `g` is multiplied with: the sum of the inputs that meet it.
#[inline(always)]
fn scaled_sum<F: BlockFormat>(meta: &Group, g: usize) -> f32 {
    if F::GROUP == 32 { meta.scaled_sum } else { meta.scale * meta.half_sums[g % 2] as f32 }
}

/// What an integer sum of group `g` starts from.
#[inline(always)]
pub(super) fn first_int<V: Vector, F: BlockFormat>(meta: &Group, g: usize) -> i32 {
    let magic = if V::FUSED { MAGIC.to_bits().cast_signed() } else { 0 };
    magic - offset::<V, F>(meta, g)
}

/// `acc + Σ w·x` over the four bytes of each lane, for integers of the format.
///
/// # Safety
/// The machine has `V`'s instruction set.
#[inline(always)]
pub(super) unsafe fn dot<V: Vector, F: BlockFormat>(acc: V::Int, w: V::Int, x: V::Int) -> V::Int {
    // SAFETY: the caller's promise.
    unsafe { if is_wide::<F>() { V::dot_wide(acc, w, x) } else { V::dot(acc, w, x) } }
}

/// What turns the integer sums of a scale group into floats: a weight row a lane.
#[derive(Clone, Copy)]
pub(super) struct Scaled<V: Vector> {
    pub scale: V::Float,
    /// −1.5·2²³·scale.
    pub bias: V::Float,
    pub min: V::Float,
}

impl<V: Vector> Scaled<V> {
    /// `sum` and the products of group `g`, whose integers add to `int`. The one order of roundings that every path has.
    ///
    /// # Safety
    /// The machine has `V`'s instruction set.
    #[inline(always)]
    pub unsafe fn add_to<F: BlockFormat>(
        &self,
        sum: V::Float,
        int: V::Int,
        meta: &Group,
        g: usize,
    ) -> V::Float {
        // SAFETY: the caller's promise.
        unsafe {
            let scaled = if V::FUSED {
                V::mul_add(V::as_float(int), self.scale, self.bias)
            } else {
                V::mul(V::to_float(int), self.scale)
            };
            let sum = V::mul_add(scaled, V::splat_f(meta.scale), sum);
            if F::HAS_MIN { V::mul_add(self.min, V::splat_f(scaled_sum::<F>(meta, g)), sum) } else { sum }
        }
    }
}

/// `MR` input rows by `NV` vectors of weight rows, over all columns of the panels.
///
/// # Safety
/// As [`int_any`].
#[inline(always)]
unsafe fn int_tile<V: Vector, F: BlockFormat, const MR: usize, const NV: usize>(t: &IntTile) {
    let group_bytes = F::GROUP * PANEL_ROWS;
    // SAFETY: all reads stay inside the tile's panels and input rows, whose extents are `cols` columns and MR rows.
    unsafe {
        let mut sums = start::<V, MR, NV>(&t.dest);
        let quants: [*const u8; NV] = std::array::from_fn(|v| {
            let (p, r) = place::<V>(v);
            t.panel.quants.cast_const().add(p * PANEL_QUANTS + r * 4)
        });
        let groups: [*const f32; NV] = std::array::from_fn(|v| {
            let (p, r) = place::<V>(v);
            t.panel.groups.cast_const().add(p * PANEL_GROUPS + r)
        });
        for g in 0..t.cols / F::GROUP {
            // The digits of a group one after the other: each has a scale of its own, all share the weights.
            for digit in 0..t.digits {
                let first_x = t.x.wrapping_add(digit * t.digit_stride);
                let first_meta = t.meta.wrapping_add(digit * t.digit_stride / 32);
                let meta: [_; MR] =
                    std::array::from_fn(|m| first_meta.add(m * t.meta_stride + g * F::GROUP / 32));
                let mut ints: [[V::Int; NV]; MR] =
                    std::array::from_fn(|m| [V::splat(first_int::<V, F>(&*meta[m], g)); NV]);
                for quad in 0..F::GROUP / 4 {
                    let w: [V::Int; NV] = std::array::from_fn(|v| {
                        V::load(quants[v].add(g * group_bytes + quad * 4 * PANEL_ROWS))
                    });
                    for m in 0..MR {
                        let x = first_x
                            .add(m * t.x_stride + g * F::GROUP + quad * 4)
                            .cast::<i32>()
                            .read_unaligned();
                        let x = V::splat(x);
                        for v in 0..NV {
                            ints[m][v] = dot::<V, F>(ints[m][v], w[v], x);
                        }
                    }
                }
                for v in 0..NV {
                    let at = groups[v].add(g * GROUP_FLOATS);
                    let of = Scaled::<V> {
                        scale: V::load_f(at),
                        bias: V::load_f(at.add(PANEL_ROWS)),
                        min: if F::HAS_MIN { V::load_f(at.add(2 * PANEL_ROWS)) } else { V::splat_f(0.0) },
                    };
                    for m in 0..MR {
                        sums[m][v] = of.add_to::<F>(sums[m][v], ints[m][v], &*meta[m], g);
                    }
                }
            }
        }
        finish::<V, MR, NV>(&t.dest, sums);
    }
}

/// As [`int_tile`], in f32.
///
/// # Safety
/// As [`float_any`].
#[inline(always)]
unsafe fn float_tile<V: Vector, const MR: usize, const NV: usize>(t: &FloatTile) {
    // SAFETY: all reads stay inside the tile's panels and input rows, whose extents are `cols` columns and MR rows.
    unsafe {
        let mut sums = start::<V, MR, NV>(&t.dest);
        let panels: [*const f32; NV] = std::array::from_fn(|v| {
            let (p, r) = place::<V>(v);
            t.panel.add(p * PANEL_FLOATS + r)
        });
        for k in 0..t.cols {
            let w: [V::Float; NV] = std::array::from_fn(|v| V::load_f(panels[v].add(k * PANEL_ROWS)));
            for m in 0..MR {
                let x = V::splat_f(*t.x.add(m * t.x_stride + k));
                for v in 0..NV {
                    sums[m][v] = V::mul_add(w[v], x, sums[m][v]);
                }
            }
        }
        finish::<V, MR, NV>(&t.dest, sums);
    }
}

/// Sums so far.
///
/// # Safety
/// `acc` holds MR rows when `resume`.
#[inline(always)]
unsafe fn start<V: Vector, const MR: usize, const NV: usize>(d: &Dest) -> [[V::Float; NV]; MR] {
    // SAFETY: the caller's promise.
    unsafe {
        if d.resume {
            std::array::from_fn(|m| {
                std::array::from_fn(|v| V::load_f(d.acc.add(m * TILE_ROWS + v * V::LANES)))
            })
        } else {
            [[V::splat_f(0.0); NV]; MR]
        }
    }
}

/// Sums to `out`, or to `acc` while columns are missing. A tile narrower than its vectors goes through `acc`.
///
/// # Safety
/// `acc` holds MR rows; `out` holds MR rows of `cols` elements when `finish`.
#[inline(always)]
pub(super) unsafe fn finish<V: Vector, const MR: usize, const NV: usize>(
    d: &Dest,
    sums: [[V::Float; NV]; MR],
) {
    let whole = d.cols >= NV * V::LANES;
    // Each branch is a plain double loop of constant length: only then do the sums live in registers.
    // SAFETY: the caller's promise.
    unsafe {
        if !(d.finish && whole) {
            for m in 0..MR {
                for v in 0..NV {
                    V::store_f(d.acc.add(m * TILE_ROWS + v * V::LANES), sums[m][v]);
                }
            }
        } else if d.add {
            for m in 0..MR {
                for v in 0..NV {
                    let at = d.out.add(m * d.out_stride + v * V::LANES);
                    V::store_f(at, V::add(V::load_f(at), sums[m][v]));
                }
            }
        } else {
            for m in 0..MR {
                for v in 0..NV {
                    V::store_f(d.out.add(m * d.out_stride + v * V::LANES), sums[m][v]);
                }
            }
        }
        if d.finish && !whole {
            finish_narrow(d, MR);
        }
    }
}

/// The last tile of a weight: `rows` rows of partial sums to `out`, `cols` of each.
///
/// # Safety
/// As [`finish`].
#[cold]
unsafe fn finish_narrow(d: &Dest, rows: usize) {
    for m in 0..rows {
        for n in 0..d.cols {
            // SAFETY: the caller's promise.
            unsafe {
                let (sum, out) = (*d.acc.add(m * TILE_ROWS + n), d.out.add(m * d.out_stride + n));
                *out = if d.add { *out + sum } else { sum };
            }
        }
    }
}
