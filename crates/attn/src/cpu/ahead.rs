//! What a task reads next: the offsets of a block's keys, and a walk that asks for the coming block of a head while this one is worked on.
//!
//! Memory answers after a hundred nanoseconds and more, and the processor guesses only inside a 4 KiB page: without the walk, loads
//! and arithmetic take turns. It goes along many runs side by side, because the processor's guesses, made run by run, then add to it:
//! one run after the other leaves a fifth of the bandwidth unused. The last block of a task asks for the first one of the task that its
//! thread runs next.

use std::ops::Range;

use suanpan_base::DType;

use super::task::{Scratch, Task};
use super::vector::Vector;
use crate::plan::KEY_BLOCK;
use crate::run::Strides;

/// Bytes of a cache line.
pub(crate) const LINE_BYTES: usize = 64;
/// Runs that are asked for side by side: keys and values of a block of 16-bit rows of 128, a system page each.
const STREAMS: usize = 16;
/// Bytes of a run, at most: a system page, past which the processor does not guess.
const RUN_BYTES: usize = 4096;
/// Lines asked for without a look at where runs end.
const BURST: usize = 8;

/// Into the first-level cache, for rows that are multiplied where they lie.
pub(crate) const NEAR: bool = true;
/// Into the second-level cache, for rows that are packed first, beside a panel that fills the first.
pub(crate) const FAR: bool = false;

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

/// Keys or values of the walk.
#[derive(Clone, Copy)]
struct Side {
    start: *const u8,
    dtype: DType,
    /// Bytes of a row, and from token to token.
    row: usize,
    token: usize,
    /// Element offsets of the block's rows.
    offsets: *const usize,
}

impl Side {
    const NONE: Side =
        Side { start: std::ptr::null(), dtype: DType::F32, row: 0, token: 0, offsets: std::ptr::null() };
}

/// The walk over one head's block: runs of its keys, then of its values.
pub(crate) struct Ahead {
    k: Side,
    v: Side,
    /// Neighbouring keys of a page; a power of two.
    page: usize,
    /// Columns of the block, and the one that comes next, of keys or values.
    first: usize,
    end: usize,
    key: usize,
    values: bool,
    /// Runs of the page at hand: where the next one starts, bytes from one to the next, lines of each and of all.
    at: *const u8,
    step: usize,
    lines: usize,
    left: usize,
    /// The runs that are asked for side by side, `count` of them; behind them the same ones a line on.
    streams: [*const u8; STREAMS + BURST],
    count: usize,
    /// Whose turn it is, how far they are, and how far they go; 0 when the walk is over.
    turn: usize,
    offset: usize,
    bytes: usize,
}

impl Ahead {
    /// A walk over nothing.
    pub fn idle() -> Ahead {
        Ahead {
            k: Side::NONE,
            v: Side::NONE,
            page: 1,
            first: 0,
            end: 0,
            key: 0,
            values: false,
            at: std::ptr::null(),
            step: 0,
            lines: 0,
            left: 0,
            streams: [std::ptr::null(); STREAMS + BURST],
            count: 0,
            turn: 0,
            offset: 0,
            bytes: 0,
        }
    }

    /// While head `head` of the task's block at `base` is worked on: goes over its next head or, after the last one, over the first head of
    /// block `next`, whose offsets stand in `k_next` and `v_next`.
    #[inline(always)]
    pub fn after(
        &mut self,
        t: &Task<'_>,
        (head, base): (usize, usize),
        next: Option<&(Task<'_>, usize)>,
        w: &Scratch<'_>,
    ) {
        if head + 1 < t.unit.kv_heads {
            self.over(t, (head + 1, base), w.k_off, w.v_off);
        } else if let Some((next, base)) = next {
            self.over(next, (0, *base), w.k_next, w.v_next);
        } else {
            self.bytes = 0;
        }
    }

    /// Goes over the block at `base` of head `head` of a task. The offsets stay where they are until the walk goes elsewhere.
    fn over(&mut self, t: &Task<'_>, (head, base): (usize, usize), k_off: &[usize], v_off: &[usize]) {
        let (h, dtype) = (t.call.heads, t.call.plan.problem.kv_dtype);
        let side = |start: *const u8, width: usize, strides: Strides, offsets: &[usize]| Side {
            start: start.wrapping_add(dtype.bytes_of(head * strides.head)),
            dtype,
            row: dtype.bytes_of(width),
            token: dtype.bytes_of(strides.token),
            offsets: offsets.as_ptr(),
        };
        self.k = side(t.call.k.start(), h.head_dim_qk, t.call.k_strides, k_off);
        // Values that lie in keys come with them.
        let v_width = if h.values_in_keys { 0 } else { h.head_dim_v };
        self.v = side(t.call.v.start(), v_width, t.call.v_strides, v_off);
        self.page = t.run_of_rows();
        (self.first, self.end) = columns(t, base);
        (self.key, self.values, self.left) = (self.first, false, 0);
        self.gather();
    }

    /// Lines to ask for at each of `steps` steps, to have asked for all of a whole block at their end.
    #[inline(always)]
    pub fn lines(&self, steps: usize) -> usize {
        (KEY_BLOCK * (self.k.row + self.v.row)).div_ceil(LINE_BYTES * steps.max(1))
    }

    /// Asks for the next few cache lines, `NEAR` or `FAR`.
    #[inline(always)]
    pub fn ask<V: Vector, const HOW: bool>(&mut self, lines: usize) {
        let mut left = lines;
        while left > 0 && self.offset < self.bytes {
            let n = left.min(BURST);
            for i in 0..n {
                // SAFETY: turn < count <= STREAMS and i < BURST.
                let stream = unsafe { *self.streams.get_unchecked(self.turn + i) };
                fetch::<V, HOW>(stream.wrapping_add(self.offset));
            }
            self.turn += n;
            while self.turn >= self.count {
                self.turn -= self.count;
                self.offset += LINE_BYTES;
            }
            if self.offset >= self.bytes {
                self.turn_over::<V, HOW>();
            }
            left -= n;
        }
    }

    /// Goes on with the next runs, of which as many lines are asked for as were past the end of the last ones.
    #[inline(never)]
    fn turn_over<V: Vector, const HOW: bool>(&mut self) {
        let mut past = (self.offset - self.bytes) / LINE_BYTES * self.count + self.turn;
        self.gather();
        while past > 0 && self.offset < self.bytes {
            fetch::<V, HOW>(self.streams[self.turn].wrapping_add(self.offset));
            self.turn += 1;
            if self.turn == self.count {
                (self.turn, self.offset) = (0, self.offset + LINE_BYTES);
                if self.offset == self.bytes {
                    self.gather();
                }
            }
            past -= 1;
        }
    }

    /// The next runs of one length, up to `STREAMS` of them.
    fn gather(&mut self) {
        (self.count, self.turn, self.offset, self.bytes) = (0, 0, 0, 0);
        while self.count < STREAMS && (self.left > 0 || self.next_page()) {
            let lines = self.lines.min(self.left);
            if self.count > 0 && lines * LINE_BYTES != self.bytes {
                break;
            }
            self.bytes = lines * LINE_BYTES;
            self.streams[self.count] = self.at;
            self.count += 1;
            self.at = self.at.wrapping_add(self.step);
            self.left -= lines;
        }
        for i in self.count..if self.count > 0 { self.count + BURST } else { 0 } {
            self.streams[i] = self.streams[i - self.count].wrapping_add(LINE_BYTES);
        }
    }

    /// Goes to the next page of keys or values; false at the end of the block.
    fn next_page(&mut self) -> bool {
        if self.key >= self.end && !self.values && self.v.row > 0 {
            (self.key, self.values) = (self.first, true);
        }
        if self.key >= self.end {
            return false;
        }
        let side = if self.values { self.v } else { self.k };
        // A power of two: a division here costs more than the lines that it asks for.
        let keys = (self.page - (self.key & (self.page - 1))).min(self.end - self.key);
        // SAFETY: the offsets of a whole block stand there.
        let offset = unsafe { *side.offsets.add(self.key) };
        self.at = side.start.wrapping_add(side.dtype.bytes_of(offset));
        self.key += keys;
        if side.token == side.row {
            (self.step, self.lines) = (RUN_BYTES, RUN_BYTES / LINE_BYTES);
            self.left = (keys * side.row).div_ceil(LINE_BYTES);
        } else {
            (self.step, self.lines) = (side.token, side.row.div_ceil(LINE_BYTES));
            self.left = keys * self.lines;
        }
        true
    }
}

/// Asks for one line.
#[inline(always)]
fn fetch<V: Vector, const HOW: bool>(line: *const u8) {
    // SAFETY: a prefetch never faults.
    unsafe { if HOW == NEAR { V::prefetch_near(line) } else { V::prefetch(line) } }
}
