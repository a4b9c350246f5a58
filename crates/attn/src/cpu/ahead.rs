//! What a task reads next: the offsets of a block's keys, and a walk that asks for the coming block while this one is worked on.
//!
//! Memory answers after a hundred nanoseconds and more, and the processor guesses only inside a 4 KiB page: without the walk, loads
//! and arithmetic take turns. The last block of a task asks for the first block of the task that its thread runs next.

use std::ops::Range;

use suanpan_base::DType;

use super::task::{Scratch, Task};
use super::vector::Vector;
use crate::plan::KEY_BLOCK;

/// Bytes of a cache line.
pub(crate) const LINE_BYTES: usize = 64;

/// The task's keys in the block at `base`, as columns from the first to the last.
#[inline(always)]
pub(crate) fn columns(t: &Task<'_>, base: usize) -> (usize, usize) {
    let [head, run] = t.pieces(base);
    if head.is_empty() {
        (run.start, run.end)
    } else {
        (head.start, if run.is_empty() { head.end } else { run.end })
    }
}

/// Offsets of the task's keys in the block at `base`. Columns beside them stand for another of its keys, so that keys are dotted
/// four at a time without ends; nobody looks at those scores, and no page without keys of the task is touched.
#[inline(always)]
pub(crate) fn fill_offsets(t: &Task<'_>, base: usize, k_off: &mut [usize], v_off: &mut [usize]) {
    let mut done = 0;
    for piece in t.pieces(base).into_iter().filter(|piece| !piece.is_empty()) {
        let Range { start, end } = piece;
        t.fill_offsets(base + start..base + end, &mut k_off[start..end], &mut v_off[start..end]);
        let (k, v) = (k_off[start], v_off[start]);
        k_off[done..start].fill(k);
        v_off[done..start].fill(v);
        done = end;
    }
    if done > 0 {
        let last = k_off[done - 1];
        k_off[done..].fill(last);
    }
}

/// Keys or values of the walk: where the first head's element 0 is; element type; bytes of a row, and from head to head.
#[derive(Clone, Copy)]
struct Side {
    start: *const u8,
    dtype: DType,
    row: usize,
    head: usize,
}

/// The walk, in the order in which pages hold a block: a run of keys of one head, its values, the next head, the next run.
pub(crate) struct Ahead {
    k: Side,
    v: Side,
    heads: usize,
    /// Keys whose rows lie one after the other; a power of two.
    run: usize,
    /// The run that comes next, as columns `key .. end`: its first key, head, keys or values.
    key: usize,
    end: usize,
    head: usize,
    values: bool,
    /// The run at hand: where it goes on, and its lines left.
    at: *const u8,
    left: usize,
}

impl Ahead {
    /// The walk over block `next` of a task; over nothing where there is none. Fills in `k_next` and `v_next`.
    #[inline(always)]
    pub fn over(t: &Task<'_>, next: Option<(Task<'_>, usize)>, w: &mut Scratch<'_>) -> Ahead {
        match next {
            Some((task, base)) => Ahead::new(&task, base, w),
            None => Ahead { end: 0, ..Ahead::new(t, t.unit.key_end, w) },
        }
    }

    #[inline(always)]
    fn new(t: &Task<'_>, base: usize, w: &mut Scratch<'_>) -> Ahead {
        fill_offsets(t, base, w.k_next, w.v_next);
        let (key, end) = columns(t, base);
        let strides = t.head_strides();
        let dtype = t.call.plan.problem.kv_dtype;
        let side = |start: *const u8, width: usize, head: usize| Side {
            start,
            dtype,
            row: dtype.bytes_of(width),
            head: dtype.bytes_of(head),
        };
        // Where the heads of a token lie side by side, they are one long row.
        let h = t.call.heads;
        let side_by_side = strides.0 == h.head_dim_qk && (h.values_in_keys || strides.1 == h.head_dim_v);
        let (heads, wide) = if side_by_side { (1, t.unit.kv_heads) } else { (t.unit.kv_heads, 1) };
        let k = side(t.call.k.start(), wide * h.head_dim_qk, strides.0);
        // Values that lie in keys come with them.
        let v_width = if h.values_in_keys { 0 } else { wide * h.head_dim_v };
        let v = side(t.call.v.start(), v_width, strides.1);
        let run = t.run_of_rows(wide);
        Ahead { k, v, heads, run, key, end, head: 0, values: false, at: k.start, left: 0 }
    }

    /// Lines to ask for at each of `steps` steps, to have asked for all of a whole block at their end.
    #[inline(always)]
    pub fn lines(&self, steps: usize) -> usize {
        (self.heads * KEY_BLOCK * (self.k.row + self.v.row)).div_ceil(LINE_BYTES * steps.max(1))
    }

    /// Asks for the next few cache lines.
    #[inline(always)]
    pub fn ask<V: Vector>(&mut self, w: &Scratch<'_>, lines: usize) {
        if self.left < lines {
            return self.ask_across_runs::<V>(w, lines);
        }
        for line in 0..lines {
            // SAFETY: a prefetch never faults.
            unsafe { V::prefetch(self.at.wrapping_add(line * LINE_BYTES)) };
        }
        self.at = self.at.wrapping_add(lines * LINE_BYTES);
        self.left -= lines;
    }

    #[inline(never)]
    fn ask_across_runs<V: Vector>(&mut self, w: &Scratch<'_>, mut lines: usize) {
        while lines > 0 {
            if self.left == 0 {
                // A side without rows of its own leaves nothing to ask for.
                if !self.turn(w) {
                    return;
                }
                continue;
            }
            // SAFETY: a prefetch never faults.
            unsafe { V::prefetch(self.at) };
            self.at = self.at.wrapping_add(LINE_BYTES);
            self.left -= 1;
            lines -= 1;
        }
    }

    /// Goes to the next run; false at the end of the block.
    fn turn(&mut self, w: &Scratch<'_>) -> bool {
        if self.key >= self.end {
            return false;
        }
        // A power of two: a division here costs more than the lines that it asks for.
        let keys = (self.run - (self.key & (self.run - 1))).min(self.end - self.key);
        let (side, offsets) = if self.values { (self.v, &w.v_next) } else { (self.k, &w.k_next) };
        self.at = side.start.wrapping_add(side.dtype.bytes_of(offsets[self.key]) + self.head * side.head);
        self.left = (keys * side.row).div_ceil(LINE_BYTES);
        self.head += usize::from(self.values);
        self.values = !self.values;
        if self.head == self.heads {
            self.head = 0;
            self.key += keys;
        }
        true
    }
}
