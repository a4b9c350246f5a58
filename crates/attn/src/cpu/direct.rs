//! The kernel for few rows: K rows dotted where they lie, V rows accumulated one by one; every byte of K and V is loaded once.
//!
//! Up to four rows share each load. bf16 rows are widened by a shift (even elements) and a mask (odd ones), so q and o are held
//! in that order. A task works block by block and, inside a block, head by head; while it works on one block it asks for the next
//! one of all its heads, a few rows at a time, in the order in which pages hold them: that keeps memory busy all along.

use super::softmax::{Columns, softmax_row};
use super::task::{Counts, Scratch, Task};
use super::vector::{Elem, Vector};
use crate::plan::KEY_BLOCK;

/// Rows that share a load of K or V.
const GROUP: usize = 4;
/// Keys dotted at once, so that their reductions go together.
const DOT_KEYS: usize = 4;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// One head of a task: where its data starts and where its rows stand in the slot.
#[derive(Clone, Copy)]
struct Head<E> {
    k: *const E,
    v: *const E,
    /// First row in the slot's q, o, max, alpha and sum.
    row: usize,
}

/// Runs a task of at most `DIRECT_ROWS` rows a head. Returns what it did and the task to run next, whose first block it has asked for.
///
/// # Safety
/// As `Call::run_task`, inside an instance of `V`; `k` and `v` are the call's.
#[inline(always)]
pub(crate) unsafe fn run<V: Vector, E: Elem + Default, const N: usize>(
    t: &Task<'_>,
    k: *const E,
    v: *const E,
) -> (Counts, Option<usize>) {
    // SAFETY: forwarded; every pointer below stays inside its part of the slot.
    unsafe {
        let mut w = t.scratch();
        for head in 0..t.unit.kv_heads {
            start::<V, E>(&t.of_head(head), &mut w, head * t.rows());
        }
        let (mut counts, mut next_task) = (Counts::default(), None);
        let mut base = first_block(t);
        fill_offsets(t, base, columns(t, base), w.k_off, w.v_off);
        while base < t.unit.key_end {
            let (lo, hi) = columns(t, base);
            let next = base + KEY_BLOCK;
            let mut ahead = if next < t.unit.key_end {
                Ahead::new(t, (k, v), next, &mut w)
            } else {
                next_task = t.queue.take();
                match next_task.map(|task| t.other(task)) {
                    Some(other) => Ahead::new(&other, (k, v), first_block(&other), &mut w),
                    None => Ahead::nothing(t, (k, v)),
                }
            };
            for head in 0..t.unit.kv_heads {
                let (k_head, v_head) = t.head_strides();
                let h = Head { k: k.add(head * k_head), v: v.add(head * v_head), row: head * t.rows() };
                counts.keys += (hi - lo) as u64;
                counts.pairs += head_over_block::<V, E, N>(t, &w, h, &mut ahead, base);
            }
            std::mem::swap(&mut w.k_off, &mut w.k_next);
            std::mem::swap(&mut w.v_off, &mut w.v_next);
            base = next;
        }
        for head in 0..t.unit.kv_heads {
            finish::<V, E>(&t.of_head(head), &w, head * t.rows());
        }
        // A task without keys has no last block.
        (counts, if t.unit.key_start < t.unit.key_end { next_task } else { t.queue.take() })
    }
}

/// The position of the task's first block.
#[inline(always)]
fn first_block(t: &Task<'_>) -> usize {
    t.unit.key_start / KEY_BLOCK * KEY_BLOCK
}

/// The task's keys in the block at `base`, as columns.
#[inline(always)]
fn columns(t: &Task<'_>, base: usize) -> (usize, usize) {
    let clip = |key: usize| key.clamp(base, base + KEY_BLOCK) - base;
    (clip(t.unit.key_start), clip(t.unit.key_end))
}

/// Offsets of the columns `lo .. hi` of the block at `base`. Columns beside them stand for the nearest key, so that keys are dotted
/// four at a time without ends; nobody looks at those scores.
#[inline(always)]
fn fill_offsets(
    t: &Task<'_>,
    base: usize,
    (lo, hi): (usize, usize),
    k_off: &mut [usize],
    v_off: &mut [usize],
) {
    if lo == hi {
        return;
    }
    t.fill_offsets(base + lo..base + hi, &mut k_off[lo..hi], &mut v_off[lo..hi]);
    let (first, last) = (k_off[lo], k_off[hi - 1]);
    k_off[..lo].fill(first);
    k_off[hi..].fill(last);
}

/// All rows of one head over the block at `base`. Returns the (row, key) pairs.
#[inline(always)]
unsafe fn head_over_block<V: Vector, E: Elem + Default, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead<E>,
    base: usize,
) -> u64 {
    let (mut row, mut pairs) = (0, 0);
    while row < t.rows() {
        let n = sharing(w, row, t.rows(), base);
        let seen = w.visible_columns(row, base);
        pairs += (n * seen.len()) as u64;
        let cols = (seen.start, seen.end);
        let at = Head { row: h.row + row, ..h };
        // SAFETY: forwarded.
        unsafe {
            match n {
                1 => rows_over_block::<V, E, 1, N>(t, w, at, ahead, cols),
                2 => rows_over_block::<V, E, 2, N>(t, w, at, ahead, cols),
                3 => rows_over_block::<V, E, 3, N>(t, w, at, ahead, cols),
                _ => rows_over_block::<V, E, GROUP, N>(t, w, at, ahead, cols),
            }
        }
        row += n;
    }
    pairs
}

/// The walk over the block that comes next, of this task or of the next one, in the order in which pages hold it: a run of keys of one
/// head, its values, the next head, the next run.
struct Ahead<E> {
    /// Where each head's keys and values start.
    starts: (*const E, *const E),
    strides: (usize, usize),
    widths: (usize, usize),
    heads: usize,
    /// Keys whose rows lie one after the other.
    run: usize,
    /// The run that comes next, as columns `key .. end`: its first key, head, keys or values.
    key: usize,
    end: usize,
    head: usize,
    values: bool,
    /// The run at hand: where it goes on, and its bytes left.
    at: *const u8,
    left: usize,
}

impl<E: Elem> Ahead<E> {
    /// The walk over the block at `base` of task `t`; fills in the offsets of its keys.
    #[inline(always)]
    fn new(t: &Task<'_>, starts: (*const E, *const E), base: usize, w: &mut Scratch<'_>) -> Ahead<E> {
        let (key, end) = columns(t, base);
        fill_offsets(t, base, (key, end), w.k_next, w.v_next);
        Ahead { key, end, heads: t.unit.kv_heads, run: t.run_of_rows(), ..Ahead::nothing(t, starts) }
    }

    /// A walk that is over.
    #[inline(always)]
    fn nothing(t: &Task<'_>, starts: (*const E, *const E)) -> Ahead<E> {
        let widths = (t.call.heads.head_dim_qk, t.call.heads.head_dim_v);
        let strides = t.head_strides();
        let at = starts.0.cast();
        Ahead {
            starts,
            strides,
            widths,
            heads: 0,
            run: 1,
            key: 0,
            end: 0,
            head: 0,
            values: false,
            at,
            left: 0,
        }
    }

    /// Lines to ask for with each `DOT_KEYS` keys, once while dotting and once while adding values: so all of the next block.
    #[inline(always)]
    fn lines(&self) -> usize {
        (DOT_KEYS * (self.widths.0 + self.widths.1) * size_of::<E>()).div_ceil(2 * LINE_BYTES)
    }

    /// Asks for the next few cache lines.
    #[inline(always)]
    unsafe fn ask<V: Vector>(&mut self, w: &Scratch<'_>, lines: usize) {
        let mut lines = lines;
        while lines > 0 {
            if self.left == 0 && !self.turn(w) {
                return;
            }
            let n = lines.min(self.left);
            for _ in 0..n {
                // SAFETY: a prefetch never faults.
                unsafe { V::prefetch(self.at) };
                self.at = self.at.wrapping_add(LINE_BYTES);
            }
            self.left -= n;
            lines -= n;
        }
    }

    /// Goes to the next run; false at the end of the block.
    #[inline(always)]
    fn turn(&mut self, w: &Scratch<'_>) -> bool {
        if self.key >= self.end {
            return false;
        }
        let keys = (self.run - self.key % self.run).min(self.end - self.key);
        let (start, offset, width) = if self.values {
            (self.starts.1, w.v_next[self.key] + self.head * self.strides.1, self.widths.1)
        } else {
            (self.starts.0, w.k_next[self.key] + self.head * self.strides.0, self.widths.0)
        };
        self.at = start.wrapping_add(offset).cast();
        self.left = (keys * width * size_of::<E>()).div_ceil(LINE_BYTES);
        self.head += usize::from(self.values);
        self.values = !self.values;
        if self.head == self.heads {
            self.head = 0;
            self.key += keys;
        }
        true
    }
}

/// Where element `i` of a row stands in the order of `load_pair`.
#[inline(always)]
fn place<V: Vector, E: Elem>(i: usize) -> usize {
    let pair = 2 * V::LANES;
    if E::INTERLEAVED { i / pair * pair + i % 2 * V::LANES + i % pair / 2 } else { i }
}

#[inline(always)]
unsafe fn start<V: Vector, E: Elem>(t: &Task<'_>, w: &mut Scratch<'_>, first: usize) {
    let d = t.call.heads.head_dim_qk;
    for row in 0..t.rows() {
        // SAFETY: the slot's parts hold DIRECT_TASK_ROWS rows of padded widths; zeros holds one row.
        unsafe {
            let q = w.q.add((first + row) * w.q_stride);
            std::ptr::write_bytes(q, 0, w.q_stride);
            t.load_query(row, w.zeros, 1);
            for i in 0..d {
                *q.add(place::<V, E>(i)) = *w.zeros.add(i);
            }
            *w.max.add(first + row) = f32::NEG_INFINITY;
            w.visible[row] = t.visible(row);
        }
    }
    // SAFETY: as above.
    unsafe {
        std::ptr::write_bytes(w.sum.add(first * V::LANES), 0, t.rows() * V::LANES);
        std::ptr::write_bytes(w.o.add(first * w.o_stride), 0, t.rows() * w.o_stride);
    }
}

/// Rows from `row` that share their loads: up to `GROUP` with the same visible columns. Rows that see less than their neighbours
/// go alone, over exactly their own keys: a weight of 0 would not keep a NaN in V out.
#[inline(always)]
fn sharing(w: &Scratch<'_>, row: usize, rows: usize, base: usize) -> usize {
    let most = (rows - row).min(GROUP);
    let seen = w.visible_columns(row, base);
    if (1..most).all(|i| w.visible_columns(row + i, base) == seen) { most } else { 1 }
}

/// Scores, weights and outputs of R rows from `h.row` over the columns that all of them see.
#[inline(always)]
unsafe fn rows_over_block<V: Vector, E: Elem + Default, const R: usize, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead<E>,
    (lo, hi): (usize, usize),
) {
    if lo >= hi {
        return;
    }
    // SAFETY: forwarded.
    unsafe {
        let cols = Columns { from: lo / V::LANES * V::LANES, to: hi.next_multiple_of(V::LANES), lo, hi };
        if t.call.heads.head_dim_qk.is_multiple_of(2 * V::LANES) {
            dot_block::<V, E, R, false>(t, w, h, ahead, cols);
        } else {
            dot_block::<V, E, R, true>(t, w, h, ahead, cols);
        }
        for r in 0..R {
            let row = h.row + r;
            let (s, sum, max) = (w.s.add(r * KEY_BLOCK), w.sum.add(row * V::LANES), &mut *w.max.add(row));
            *w.alpha.add(row) = if hi - lo == KEY_BLOCK {
                softmax_row::<V, false>(s, cols, max, sum)
            } else {
                softmax_row::<V, true>(s, cols, max, sum)
            };
        }
        add_values::<V, E, R, N>(t, w, h, ahead, (lo, hi));
    }
}

/// s = scale·q·k for R rows and the block's keys.
#[inline(always)]
unsafe fn dot_block<V: Vector, E: Elem + Default, const R: usize, const TAIL: bool>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead<E>,
    cols: Columns,
) {
    let d = t.call.heads.head_dim_qk;
    let scale = t.call.scale_log2;
    // SAFETY: checked offsets, also beside the task's keys; within the slot's parts.
    unsafe {
        let q = w.q.add(h.row * w.q_stride);
        let lines = ahead.lines();
        let mut col = cols.from;
        while col < cols.to {
            let mut sums = [[V::splat(0.0); 4]; R];
            for g in 0..V::LANES / DOT_KEYS {
                let first = col + g * DOT_KEYS;
                if first >= cols.hi {
                    break;
                }
                let rows = std::array::from_fn(|i| h.k.add(*w.k_off.get_unchecked(first + i)));
                ahead.ask::<V>(w, lines);
                let acc = dot::<V, E, R, TAIL>(q, w.q_stride, rows, d);
                for r in 0..R {
                    sums[r][g] = V::fold4(acc[r]);
                }
            }
            for r in 0..R {
                V::join(sums[r]).mul(V::splat(scale)).store(w.s.add(r * KEY_BLOCK + col));
            }
            col += V::LANES;
        }
    }
}

/// Lane-wise partial dot products of R query rows with `DOT_KEYS` key rows; without `TAIL` rows are whole pairs of vectors.
#[inline(always)]
unsafe fn dot<V: Vector, E: Elem + Default, const R: usize, const TAIL: bool>(
    q: *const f32,
    q_stride: usize,
    k: [*const E; DOT_KEYS],
    d: usize,
) -> [[V; DOT_KEYS]; R] {
    let pair = 2 * V::LANES;
    // SAFETY: q rows are padded to whole pairs, k rows hold d elements.
    unsafe {
        let mut acc = [[V::splat(0.0); DOT_KEYS]; R];
        let mut x = 0;
        while x + pair <= d {
            dot_pair::<V, E, R, false>(&mut acc, q.add(x), q_stride, k, x, pair);
            x += pair;
        }
        if TAIL {
            dot_pair::<V, E, R, true>(&mut acc, q.add(x), q_stride, k, x, d - x);
        }
        acc
    }
}

/// One pair of vectors of every dot product; with `PARTIAL` only `width` elements of it exist in k.
#[inline(always)]
unsafe fn dot_pair<V: Vector, E: Elem + Default, const R: usize, const PARTIAL: bool>(
    acc: &mut [[V; DOT_KEYS]; R],
    q: *const f32,
    q_stride: usize,
    k: [*const E; DOT_KEYS],
    x: usize,
    width: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        let mut a = [(V::splat(0.0), V::splat(0.0)); R];
        for r in 0..R {
            let p = q.add(r * q_stride);
            a[r] = (V::load(p), V::load(p.add(V::LANES)));
        }
        for i in 0..DOT_KEYS {
            let p = k[i].add(x);
            let (b0, b1) = if PARTIAL { E::load_pair_partial::<V>(p, width) } else { E::load_pair::<V>(p) };
            for r in 0..R {
                acc[r][i] = a[r].0.fma(b0, acc[r][i]);
                acc[r][i] = a[r].1.fma(b1, acc[r][i]);
            }
        }
    }
}

/// o = alpha·o + p·v for R rows and keys `lo..hi` of the block, N vectors of columns at a time.
#[inline(always)]
unsafe fn add_values<V: Vector, E: Elem + Default, const R: usize, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead<E>,
    (lo, hi): (usize, usize),
) {
    let (d, pair) = (t.call.heads.head_dim_v, 2 * V::LANES);
    let mut x = 0;
    while x < d {
        // SAFETY: forwarded; o rows are padded to whole pairs.
        unsafe {
            if x + pair > d {
                value_columns::<V, E, R, 1, true>(w, h, ahead, (lo, hi), x, d - x);
                x += pair;
            } else if N >= 4 && x + 2 * pair <= d {
                value_columns::<V, E, R, 2, false>(w, h, ahead, (lo, hi), x, 2 * pair);
                x += 2 * pair;
            } else {
                value_columns::<V, E, R, 1, false>(w, h, ahead, (lo, hi), x, pair);
                x += pair;
            }
        }
    }
}

/// Columns `x ..` of P pairs of vectors; with `PARTIAL` only `width` of them exist in v.
#[inline(always)]
unsafe fn value_columns<V: Vector, E: Elem + Default, const R: usize, const P: usize, const PARTIAL: bool>(
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead<E>,
    (lo, hi): (usize, usize),
    x: usize,
    width: usize,
) {
    let pair = 2 * V::LANES;
    // SAFETY: checked offsets; within the slot's parts.
    unsafe {
        let o = w.o.add(h.row * w.o_stride + x);
        let s = w.s;
        let lines = ahead.lines();
        let mut acc = [[(V::splat(0.0), V::splat(0.0)); P]; R];
        for r in 0..R {
            let a = V::splat(*w.alpha.add(h.row + r));
            for i in 0..P {
                let p = o.add(r * w.o_stride + i * pair);
                acc[r][i] = (V::load(p).mul(a), V::load(p.add(V::LANES)).mul(a));
            }
        }
        for key in lo..hi {
            let p = h.v.add(*w.v_off.get_unchecked(key) + x);
            if x == 0 && key % DOT_KEYS == 0 {
                ahead.ask::<V>(w, lines);
            }
            let mut b = [(V::splat(0.0), V::splat(0.0)); P];
            for i in 0..P {
                b[i] = if PARTIAL { E::load_pair_partial(p, width) } else { E::load_pair(p.add(i * pair)) };
            }
            for r in 0..R {
                let a = V::splat(*s.add(r * KEY_BLOCK + key));
                for i in 0..P {
                    acc[r][i] = (a.fma(b[i].0, acc[r][i].0), a.fma(b[i].1, acc[r][i].1));
                }
            }
        }
        for r in 0..R {
            for i in 0..P {
                let p = o.add(r * w.o_stride + i * pair);
                acc[r][i].0.store(p);
                acc[r][i].1.store(p.add(V::LANES));
            }
        }
    }
}

/// Hands every row to its place, in the order of the output.
#[inline(always)]
unsafe fn finish<V: Vector, E: Elem>(t: &Task<'_>, w: &Scratch<'_>, first: usize) {
    let d = t.call.heads.head_dim_v;
    for row in 0..t.rows() {
        // SAFETY: the slot's score part holds a row of KEY_BLOCK * DIRECT_ROWS floats, more than any width.
        unsafe {
            let ordered = std::slice::from_raw_parts_mut(w.s, d);
            for i in 0..d {
                ordered[i] = *w.o.add((first + row) * w.o_stride + place::<V, E>(i));
            }
            let at = first + row;
            t.emit(row, ordered, *w.max.add(at), V::load(w.sum.add(at * V::LANES)).reduce_add());
        }
    }
}
