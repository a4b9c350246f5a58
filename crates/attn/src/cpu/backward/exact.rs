//! A pair of tiles with a NaN or an infinity where rows see keys bit by bit: pair by pair, so that nothing reaches who may not see it.

use super::task::{Scratch, Task, Visit};
use crate::cpu::seen::Runs;
use crate::plan::KEY_BLOCK;
use crate::workspace::TILE_ROWS;

/// dv += p·d_out, dk += ds·q and dq = sum of ds·k over exactly the visible pairs.
///
/// # Safety
/// As `tile_gradients`, on finished p and ds.
pub(crate) unsafe fn pair_gradients(t: &Task<'_>, w: &Scratch<'_>, visit: &Visit) {
    let (dqk, dv) = (t.call.heads.head_dim_qk, t.call.heads.head_dim_v);
    let rows = visit.rows.count;
    // SAFETY: rows and keys of the tiles, within the slot's parts.
    unsafe {
        std::ptr::write_bytes(w.dq, 0, rows.next_multiple_of(TILE_ROWS) * w.qk_stride);
        for row in 0..rows {
            for (block, &bits) in w.bits[row].iter().enumerate() {
                for key in Runs(bits).flatten() {
                    let key = block * KEY_BLOCK + key;
                    let (p, ds) = (*w.p.add(row * w.p_stride + key), *w.ds.add(row * w.p_stride + key));
                    add(w.dv.add(key * w.v_stride), p, w.d_out.add(row * w.v_stride), dv);
                    add(w.dk.add(key * w.qk_stride), ds, w.q.add(row * w.qk_stride), dqk);
                    add(w.dq.add(row * w.qk_stride), ds, w.k.add(key * w.qk_stride), dqk);
                }
            }
        }
    }
}

/// sum += factor·x, `d` elements of each.
unsafe fn add(sum: *mut f32, factor: f32, x: *const f32, d: usize) {
    for i in 0..d {
        // SAFETY: forwarded.
        unsafe { *sum.add(i) += factor * *x.add(i) };
    }
}
