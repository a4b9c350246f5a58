//! Segments of a batch-invariant plan inside one task: each is summed on its own and merged into those behind it, as splits are.

use suanpan_base::lse::{EMPTY_LSE, merge_into};

use super::task::{Scratch, Task};
use super::vector::Vector;
use crate::cut::SEGMENT_KEYS;

impl Task<'_> {
    /// Whether a segment ends with the block at `base`, after which comes `next`.
    #[inline(always)]
    pub fn closes_segment(&self, base: usize, next: Option<usize>) -> bool {
        self.unit.segmented && next.is_none_or(|next| next / SEGMENT_KEYS != base / SEGMENT_KEYS)
    }

    /// Clears what is merged of the task's head, whose rows start at `first` in the slot.
    ///
    /// # Safety
    /// As `Call::run_task`.
    pub unsafe fn start_segments(&self, w: &Scratch<'_>, first: usize) {
        if !self.unit.segmented {
            return;
        }
        for row in first..first + self.rows() {
            // SAFETY: the slot of a batch-invariant plan holds as many merged rows as rows.
            unsafe {
                *w.merged_lse.add(row) = EMPTY_LSE;
                std::ptr::write_bytes(w.merged.add(row * w.o_stride), 0, w.o_stride);
            }
        }
    }
}

/// Merges the segment of every row of the task's head, whose rows start at `first` in the slot, and clears it for the next one.
///
/// # Safety
/// As `Call::run_task`, inside an instance of `V`.
#[inline(always)]
pub(crate) unsafe fn close<V: Vector>(t: &Task<'_>, w: &Scratch<'_>, first: usize) {
    for row in 0..t.rows() {
        let at = first + row;
        // SAFETY: within the slot's parts.
        unsafe {
            // Whole padded rows: the order of elements within one is the kernel's.
            let o = std::slice::from_raw_parts_mut(w.o.add(at * w.o_stride), w.o_stride);
            let merged = std::slice::from_raw_parts_mut(w.merged.add(at * w.o_stride), w.o_stride);
            let lse = t.settle(row, o, *w.max.add(at), w.weight::<V>(t, at));
            merge_into(merged, &mut *w.merged_lse.add(at), o, lse);
            o.fill(0.0);
            *w.max.add(at) = f32::NEG_INFINITY;
            w.clear_weight::<V>(t, at);
        }
    }
}
