//! What happens to a row of scores between the products and the softmax: softcap and ALiBi, in powers of two.

use super::softmax::Columns;
use super::task::Task;
use super::vector::{MAX_LANES, Vector};

/// Changes the scores `s` (powers of two) of row `row` of a task's head over the block at `base`.
///
/// # Safety
/// As `Vector`; `s` holds columns `cols.from .. cols.to`.
#[inline(always)]
pub(crate) unsafe fn change_row<V: Vector>(
    t: &Task<'_>,
    row: usize,
    base: usize,
    s: *mut f32,
    cols: Columns,
) {
    let (centre, head) = t.centre_and_head(row);
    let slope = t.call.alibi_slopes.map_or(0.0, |slopes| slopes[head] * std::f32::consts::LOG2_E);
    // SAFETY: within the row of scores; LANES <= MAX_LANES.
    unsafe {
        let mut lanes = [0.0f32; MAX_LANES];
        let mut col = cols.from;
        while col < cols.to {
            let mut x = V::load(s.add(col));
            if let Some(cap) = t.call.softcap_log2 {
                x = x.div(V::splat(cap)).tanh().mul(V::splat(cap));
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
