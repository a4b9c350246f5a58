//! What happens to a row of scores between the products and the softmax: softcap, bias and ALiBi, in powers of two.

use std::f32::consts::LOG2_E;

use super::softmax::Columns;
use super::task::Task;
use super::vector::{MAX_LANES, Vector};

/// Changes the scores `s` (powers of two) of row `row` of a task's head over the block at `base`.
///
/// # Safety
/// As `Vector`; `s` holds columns `cols.from .. cols.to`; keys `cols.lo .. cols.hi` of the block exist.
#[inline(always)]
pub(crate) unsafe fn change_row<V: Vector>(
    t: &Task<'_>,
    row: usize,
    base: usize,
    s: *mut f32,
    cols: Columns,
) {
    let (seq, head, token) = t.place_of_row(row);
    let centre = t.call.mask.centre(t.call.plan.seqs[seq].len, token);
    let slope = t.call.extras.alibi_slopes.map_or(0.0, |slopes| slopes[head] * LOG2_E);
    // SAFETY: within the row of scores; LANES <= MAX_LANES; `check` bounded the bias of every key that exists.
    unsafe {
        let mut lanes = [0.0f32; MAX_LANES];
        let mut col = cols.from;
        while col < cols.to {
            let mut x = V::load(s.add(col));
            if let Some(cap) = t.call.softcap_log2 {
                x = x.div(V::splat(cap)).tanh().mul(V::splat(cap));
            }
            if let Some(bias) = &t.call.extras.bias {
                let first = bias.values.as_ptr().add(bias.strides.at(seq, head, token, base));
                x = bias_at::<V>(first, bias.strides.key, col, cols).fma(V::splat(LOG2_E), x);
            }
            if slope != 0.0 {
                for (lane, distance) in lanes.iter_mut().enumerate() {
                    *distance = (centre - (base + col + lane) as i64).unsigned_abs() as f32;
                }
                x = V::splat(-slope).fma(V::load(lanes.as_ptr()), x);
            }
            x.store(s.add(col));
            col += V::LANES;
        }
    }
}

/// The bias of a vector of columns, 0 beside `cols.lo .. cols.hi`; `first` is that of column 0, a key's number `stride` (0 or 1) apart from
/// its neighbour's.
///
/// # Safety
/// As `Vector`; columns `cols.lo .. cols.hi` have a number.
#[inline(always)]
pub(crate) unsafe fn bias_at<V: Vector>(first: *const f32, stride: usize, col: usize, cols: Columns) -> V {
    // SAFETY: forwarded; only columns that exist are loaded.
    unsafe {
        if stride == 0 {
            return V::splat(*first);
        }
        if col >= cols.lo && col + V::LANES <= cols.hi {
            return V::load(first.add(col));
        }
        let mut lanes = [0.0f32; MAX_LANES];
        for at in col.max(cols.lo)..(col + V::LANES).min(cols.hi) {
            lanes[at - col] = *first.add(at);
        }
        V::load(lanes.as_ptr())
    }
}

/// Drops weights `lo .. hi` of row `row` of a task's head over the block at `base`, where the call drops any.
///
/// # Safety
/// `p` holds these columns.
#[inline(always)]
pub(crate) unsafe fn drop_row(t: &Task<'_>, row: usize, base: usize, p: *mut f32, (lo, hi): (usize, usize)) {
    if let Some(dropout) = &t.call.dropout {
        let (seq, head, token) = t.place_of_row(row);
        // SAFETY: forwarded.
        let weights = unsafe { std::slice::from_raw_parts_mut(p.add(lo), hi - lo) };
        dropout.apply((seq, head, token), base + lo, weights);
    }
}
