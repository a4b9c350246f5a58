//! The online softmax of one row over one block of scores: running maximum, weights in place, running sum by lanes.

use super::vector::Vector;

/// Columns of a block of scores: whole vectors `from .. to`, of which `lo .. hi` are visible.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    pub from: usize,
    pub to: usize,
    pub lo: usize,
    pub hi: usize,
}

/// Turns the scores `s` (in powers of two) into weights against the running maximum and returns the factor by which earlier sums shrink.
///
/// `MASKED`: columns outside `lo .. hi` count as -inf whatever their bytes, and get weight 0. A maximum that does not grow
/// costs no reduction and no rescale. The maximum starts at -inf and `sum` (one vector) at 0.
///
/// # Safety
/// As `Vector`; `s` holds columns `from .. to`, `sum` one vector.
#[inline(always)]
pub(crate) unsafe fn softmax_row<V: Vector, const MASKED: bool>(
    s: *mut f32,
    cols: Columns,
    max: &mut f32,
    sum: *mut f32,
) -> f32 {
    // SAFETY: forwarded.
    unsafe {
        let lowest = V::splat(f32::NEG_INFINITY);
        let mut top = lowest;
        let mut col = cols.from;
        while col < cols.to {
            // The running maximum stands second: a NaN score does not enter it and stays NaN as a weight.
            top = score::<V, MASKED>(s, col, cols).max(top);
            col += V::LANES;
        }
        let mut alpha = 1.0;
        if top.any_gt(V::splat(*max)) {
            let grown = top.reduce_max().max(*max);
            let mut lane = [0.0f32; super::vector::MAX_LANES];
            V::splat(*max - grown).exp2().store(lane.as_mut_ptr());
            (alpha, *max) = (lane[0], grown);
        }
        // A row that has seen only -inf: subtract 0, so that weights are 0 and not NaN.
        let base = V::splat(if *max == f32::NEG_INFINITY { 0.0 } else { *max });
        let mut total = V::load(sum).mul(V::splat(alpha));
        let mut col = cols.from;
        while col < cols.to {
            let p = score::<V, MASKED>(s, col, cols).sub(base).exp2();
            p.store(s.add(col));
            total = total.add(p);
            col += V::LANES;
        }
        total.store(sum);
        alpha
    }
}

/// The vector of scores at column `col`; masked columns are -inf.
///
/// # Safety
/// As `softmax_row`.
#[inline(always)]
unsafe fn score<V: Vector, const MASKED: bool>(s: *const f32, col: usize, cols: Columns) -> V {
    // SAFETY: forwarded.
    unsafe {
        let x = V::load(s.add(col));
        if MASKED {
            let (lo, hi) = (cols.lo.saturating_sub(col), cols.hi.saturating_sub(col));
            return x.select(lo, hi, V::splat(f32::NEG_INFINITY));
        }
        x
    }
}
