//! The kernel for few rows: K rows dotted where they lie, V rows accumulated one by one; every byte of K and V is loaded once.
//!
//! Up to four rows share each load. bf16 rows are widened by a shift (even elements) and a mask (odd ones), so q and o are held
//! in that order. A task works block by block and, inside a block, head by head; while it works on one head's block it asks for the
//! next head's, a few lines at a time: that keeps memory busy all along.

use std::ops::Range;

use super::ahead::{Ahead, LINE_BYTES, NEAR, columns, fill_offsets};
use super::element::{Elem, InPlace};
use super::kv_scales::{ask, fill, scale_weights};
use super::ordered::ordered_dots;
use super::scores::{change_row, drop_row};
use super::seen::{Bits, Runs, bits_of, hide, hull};
use super::segment;
use super::softmax::{Columns, softmax_row};
use super::task::{Counts, Scratch, Task};
use super::vector::Vector;
use super::widen::widen_block;
use crate::plan::KEY_BLOCK;

/// Rows that share a load of K or V.
const GROUP: usize = 4;
/// Keys dotted at once, so that their reductions go together.
const DOT_KEYS: usize = 4;
/// Of eight cache lines of the next block, this many are asked for while dotting, which takes about that part of the time.
pub(crate) const DOT_LINES: usize = 5;

/// One head of a task: where its data starts and where its rows stand in the slot.
#[derive(Clone, Copy)]
pub(crate) struct Head<E> {
    pub k: *const E,
    pub v: *const E,
    /// First row in the slot's q, o, max, alpha and sum.
    pub row: usize,
}

/// Where a task's rows of K and V are.
#[derive(Clone, Copy)]
pub(crate) enum Kv<E> {
    /// The call's own buffers.
    InPlace(*const E, *const E),
    /// The slot, into which each block is widened first.
    Widened,
}

/// How rows of an element type meet queries and weights.
///
/// # Safety
/// As [`Vector`]; `h` and the columns are a checked task's.
pub(crate) unsafe trait Rows<V: Vector>: Elem {
    /// Lays out query row `row` of the task, which stands at `at` in the slot.
    unsafe fn start_row(t: &Task<'_>, w: &Scratch<'_>, row: usize, at: usize);
    /// Where element `i` of an output stands in its row.
    fn place(i: usize) -> usize;
    /// s = scale·q·k for R rows and the block's keys.
    unsafe fn dots<const R: usize, const N: usize>(
        t: &Task<'_>,
        w: &Scratch<'_>,
        h: Head<Self>,
        ahead: &mut Ahead,
        cols: Columns,
    );
    /// Makes the finished weights `cols` of the row at `s`, which stands at `at` in the slot, ready for their products; sums so far shrank by
    /// `alpha`.
    #[inline(always)]
    unsafe fn seal(_: &Scratch<'_>, _at: usize, _s: *mut f32, _: Columns, _alpha: f32) {}
    /// o = alpha·o + p·v for R rows and keys `keys` of the block.
    unsafe fn values<const R: usize, const N: usize>(
        t: &Task<'_>,
        w: &Scratch<'_>,
        h: Head<Self>,
        ahead: &mut Ahead,
        keys: (usize, usize),
    );
}

// SAFETY: forwards to the functions below.
unsafe impl<V: Vector, E: InPlace> Rows<V> for E {
    #[inline(always)]
    unsafe fn start_row(t: &Task<'_>, w: &Scratch<'_>, row: usize, at: usize) {
        // SAFETY: the slot's parts hold DIRECT_TASK_ROWS rows of padded widths; zeros holds one row.
        unsafe {
            let q = w.q.add(at * w.q_stride);
            std::ptr::write_bytes(q, 0, w.q_stride);
            t.load_query(row, w.zeros, 1);
            let ordered = t.call.plan.problem.batch_invariant;
            for i in 0..t.call.heads.head_dim_qk {
                *q.add(if ordered { i } else { place::<V, E>(i) }) = *w.zeros.add(i);
            }
        }
    }
    #[inline(always)]
    fn place(i: usize) -> usize {
        place::<V, E>(i)
    }
    #[inline(always)]
    unsafe fn dots<const R: usize, const N: usize>(
        t: &Task<'_>,
        w: &Scratch<'_>,
        h: Head<E>,
        ahead: &mut Ahead,
        cols: Columns,
    ) {
        // SAFETY: forwarded.
        unsafe {
            if t.call.plan.problem.batch_invariant {
                ordered_dots::<V, E, R, N>(t, w, h, ahead, cols);
            } else if t.call.heads.head_dim_qk.is_multiple_of(2 * V::LANES) {
                dot_block::<V, E, R, false>(t, w, h, ahead, cols);
            } else {
                dot_block::<V, E, R, true>(t, w, h, ahead, cols);
            }
        }
    }
    #[inline(always)]
    unsafe fn values<const R: usize, const N: usize>(
        t: &Task<'_>,
        w: &Scratch<'_>,
        h: Head<E>,
        ahead: &mut Ahead,
        keys: (usize, usize),
    ) {
        // SAFETY: forwarded.
        unsafe { add_values::<V, E, R, N>(t, w, h, ahead, keys) }
    }
}

/// Runs a task of at most `DIRECT_ROWS` rows a head. Returns what it did and the task to run next, whose first block it has asked for.
///
/// # Safety
/// As `Call::run_task`, inside an instance of `V`; `kv` are the call's.
#[inline(always)]
pub(crate) unsafe fn run<V: Vector, E: Rows<V>, const N: usize>(
    t: &Task<'_>,
    kv: Kv<E>,
) -> (Counts, Option<usize>) {
    // SAFETY: forwarded; every pointer below stays inside its part of the slot.
    unsafe {
        let mut w = t.scratch();
        for head in 0..t.unit.kv_heads {
            start::<V, E>(&t.of_head(head), &mut w, head * t.rows());
            t.start_segments(&w, head * t.rows());
        }
        let (mut counts, mut block) = (Counts::default(), t.first_block());
        let mut next_task = if block.is_none() { t.queue.take() } else { None };
        if let Some(base) = block {
            fill_offsets(t, base, w.k_off, w.v_off);
        }
        let mut ahead = Ahead::idle();
        while let Some(base) = block {
            block = t.block_from(base + KEY_BLOCK);
            let next;
            (next_task, next) = t.after(block);
            if let Some((next, base)) = &next {
                fill_offsets(next, *base, w.k_next, w.v_next);
            }
            for head in 0..t.unit.kv_heads {
                ahead.after(t, (head, base), next.as_ref(), &w);
                if let Some((next, base)) = next.filter(|(next, _)| head < next.unit.kv_heads) {
                    ask::<V>(&next.of_head(head), base);
                }
                let at = t.of_head(head);
                let row = head * t.rows();
                let scales = fill::<V>(&at, &w, base).runs;
                let (pairs, keys) = match kv {
                    Kv::InPlace(k, v) => {
                        let (k_head, v_head) = t.head_strides();
                        let h = Head { k: E::at(k, head * k_head), v: E::at(v, head * v_head), row };
                        head_over_block::<V, E, N>(&at, &mut w, h, &mut ahead, base)
                    }
                    Kv::Widened => {
                        widen_block::<V>(t, &mut w, head, columns(t, base));
                        let h = Head { k: w.k.cast_const().cast(), v: w.v.cast_const().cast(), row };
                        let counted = head_over_block::<V, E, N>(&at, &mut w, h, &mut ahead, base);
                        w.swap_wide();
                        counted
                    }
                };
                counts.pairs += pairs;
                counts.keys += keys;
                counts.scales += if keys > 0 { scales } else { 0 };
            }
            std::mem::swap(&mut w.k_off, &mut w.k_next);
            std::mem::swap(&mut w.v_off, &mut w.v_next);
            if t.closes_segment(base, block) {
                for head in 0..t.unit.kv_heads {
                    segment::close::<V>(&t.of_head(head), &w, head * t.rows());
                }
            }
        }
        for head in 0..t.unit.kv_heads {
            finish::<V, E>(&t.of_head(head), &w, head * t.rows());
        }
        (counts, next_task)
    }
}

/// All rows of one head over the block at `base`. Returns the (row, key) pairs and the keys loaded.
#[inline(always)]
unsafe fn head_over_block<V: Vector, E: Rows<V>, const N: usize>(
    t: &Task<'_>,
    w: &mut Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
    base: usize,
) -> (u64, u64) {
    let [head, run] = t.pieces(base).map(|piece| bits_of(&piece));
    for row in 0..t.rows() {
        w.bits[row] = if t.unit.by_bits {
            t.row_bits(row, base, head | run)
        } else {
            bits_of(&w.visible_columns(row, base))
        };
    }
    let (mut row, mut pairs) = (0, 0);
    while row < t.rows() {
        let n = sharing(w, row, t.rows());
        let bits = w.bits[row];
        pairs += n as u64 * u64::from(bits.count_ones());
        let at = Head { row: h.row + row, ..h };
        // SAFETY: forwarded.
        unsafe {
            match n {
                1 => rows_over_block::<V, E, 1, N>(t, w, at, ahead, (base, row), bits),
                2 => rows_over_block::<V, E, 2, N>(t, w, at, ahead, (base, row), bits),
                3 => rows_over_block::<V, E, 3, N>(t, w, at, ahead, (base, row), bits),
                _ => rows_over_block::<V, E, GROUP, N>(t, w, at, ahead, (base, row), bits),
            }
        }
        row += n;
    }
    let loaded = !t.call.sight.narrowed() || pairs > 0;
    (pairs, if loaded { u64::from((head | run).count_ones()) } else { 0 })
}

/// Where element `i` of a row stands in the order of `load_pair`.
#[inline(always)]
fn place<V: Vector, E: InPlace>(i: usize) -> usize {
    let pair = 2 * V::LANES;
    if E::INTERLEAVED { i / pair * pair + i % 2 * V::LANES + i % pair / 2 } else { i }
}

#[inline(always)]
unsafe fn start<V: Vector, E: Rows<V>>(t: &Task<'_>, w: &mut Scratch<'_>, first: usize) {
    for row in 0..t.rows() {
        // SAFETY: the slot's parts hold DIRECT_TASK_ROWS rows of padded widths.
        unsafe {
            E::start_row(t, w, row, first + row);
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

/// Rows from `row` that share their loads: up to `GROUP` that see the same keys. Rows that see less than their neighbours
/// go alone, over exactly their own keys: a weight of 0 would not keep a NaN in V out.
#[inline(always)]
fn sharing(w: &Scratch<'_>, row: usize, rows: usize) -> usize {
    let most = (rows - row).min(GROUP);
    if (1..most).all(|i| w.bits[row + i] == w.bits[row]) { most } else { 1 }
}

/// Scores, weights and outputs of R rows from `h.row` (in the slot; `row` of the head) over the keys `bits` that all of them see.
#[inline(always)]
unsafe fn rows_over_block<V: Vector, E: Rows<V>, const R: usize, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
    (base, row): (usize, usize),
    bits: Bits,
) {
    let Range { start: lo, end: hi } = hull(bits);
    if lo >= hi {
        return;
    }
    let holes = bits.count_ones() as usize != hi - lo;
    // SAFETY: forwarded.
    unsafe {
        let cols = Columns { from: lo / V::LANES * V::LANES, to: hi.next_multiple_of(V::LANES), lo, hi };
        E::dots::<R, N>(t, w, h, ahead, cols);
        for r in 0..R {
            let at = h.row + r;
            let (s, sum, max) = (w.s.add(r * KEY_BLOCK), w.sum.add(at * V::LANES), &mut *w.max.add(at));
            if t.call.plan.problem.scores.change_scores() {
                change_row::<V>(t, row + r, base, s, cols);
            }
            if holes {
                hide(s, (lo, hi), bits);
            }
            *w.alpha.add(at) = if hi - lo == KEY_BLOCK {
                softmax_row::<V, false>(s, cols, max, sum)
            } else {
                softmax_row::<V, true>(s, cols, max, sum)
            };
            drop_row(t, row + r, base, s, (lo, hi));
            if t.call.scales.any() {
                scale_weights::<V>(w, s, cols);
            }
            E::seal(w, at, s, cols, *w.alpha.add(at));
        }
        for run in Runs(bits) {
            E::values::<R, N>(t, w, h, ahead, (run.start, run.end));
            if holes {
                // Sums shrink once a block.
                (0..R).for_each(|r| *w.alpha.add(h.row + r) = 1.0);
            }
        }
    }
}

/// s = scale·q·k for R rows and the block's keys.
#[inline(always)]
unsafe fn dot_block<V: Vector, E: InPlace, const R: usize, const TAIL: bool>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
    cols: Columns,
) {
    let d = t.call.heads.head_dim_qk;
    // SAFETY: checked offsets, also beside the task's keys; within the slot's parts.
    unsafe {
        let q = w.q.add(h.row * w.q_stride);
        let mut col = cols.from;
        while col < cols.to {
            let mut sums = [[V::splat(0.0); 4]; R];
            for g in 0..V::LANES / DOT_KEYS {
                let first = col + g * DOT_KEYS;
                if first >= cols.hi {
                    break;
                }
                let rows = std::array::from_fn(|i| h.k.add(*w.k_off.get_unchecked(first + i)));
                let acc = dot::<V, E, R, TAIL>(w, ahead, q, rows, d);
                for r in 0..R {
                    sums[r][g] = V::fold4(acc[r]);
                }
            }
            for r in 0..R {
                V::join(sums[r]).mul(V::load(w.k_scales.add(col))).store(w.s.add(r * KEY_BLOCK + col));
            }
            col += V::LANES;
        }
    }
}

/// Lane-wise partial dot products of R query rows with `DOT_KEYS` key rows; without `TAIL` rows are whole pairs of vectors.
#[inline(always)]
unsafe fn dot<V: Vector, E: InPlace, const R: usize, const TAIL: bool>(
    w: &Scratch<'_>,
    ahead: &mut Ahead,
    q: *const f32,
    k: [*const E; DOT_KEYS],
    d: usize,
) -> [[V; DOT_KEYS]; R] {
    let pair = 2 * V::LANES;
    // A pair of vectors of four keys, and as much of their values.
    let lines = (pair * DOT_KEYS * 2 * size_of::<E>() / LINE_BYTES * DOT_LINES).div_ceil(8);
    // SAFETY: q rows are padded to whole pairs, k rows hold d elements.
    unsafe {
        let mut acc = [[V::splat(0.0); DOT_KEYS]; R];
        let mut x = 0;
        while x + pair <= d {
            ahead.ask::<V, NEAR>(lines);
            dot_pair::<V, E, R, false>(&mut acc, q.add(x), w.q_stride, k, x, pair);
            x += pair;
        }
        if TAIL {
            ahead.ask::<V, NEAR>(lines);
            dot_pair::<V, E, R, true>(&mut acc, q.add(x), w.q_stride, k, x, d - x);
        }
        acc
    }
}

/// One pair of vectors of every dot product; with `PARTIAL` only `width` elements of it exist in k.
#[inline(always)]
unsafe fn dot_pair<V: Vector, E: InPlace, const R: usize, const PARTIAL: bool>(
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
unsafe fn add_values<V: Vector, E: InPlace, const R: usize, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
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
unsafe fn value_columns<V: Vector, E: InPlace, const R: usize, const P: usize, const PARTIAL: bool>(
    w: &Scratch<'_>,
    h: Head<E>,
    ahead: &mut Ahead,
    (lo, hi): (usize, usize),
    x: usize,
    width: usize,
) {
    let pair = 2 * V::LANES;
    // SAFETY: checked offsets; within the slot's parts.
    unsafe {
        let s = w.s;
        // Of two keys' columns, and as much of their keys.
        let lines = (P * pair * 2 * 2 * size_of::<E>() / LINE_BYTES * (8 - DOT_LINES)).div_ceil(8);
        let mut acc = shrunk_sums::<V, R, P>(w, h.row, x);
        for key in lo..hi {
            let p = h.v.add(*w.v_off.get_unchecked(key) + x);
            if key % 2 == 0 {
                ahead.ask::<V, NEAR>(lines);
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
        keep_sums(w, h.row, x, &acc);
    }
}

/// Columns `x ..` of R rows of o from row `row` of the slot, P pairs of vectors each, times the rows' alphas.
///
/// # Safety
/// As `Vector`; the rows are padded to whole pairs.
#[inline(always)]
pub(crate) unsafe fn shrunk_sums<V: Vector, const R: usize, const P: usize>(
    w: &Scratch<'_>,
    row: usize,
    x: usize,
) -> [[(V, V); P]; R] {
    // SAFETY: forwarded.
    unsafe {
        let mut acc = [[(V::splat(0.0), V::splat(0.0)); P]; R];
        for r in 0..R {
            let a = V::splat(*w.alpha.add(row + r));
            for i in 0..P {
                let p = w.o.add((row + r) * w.o_stride + x + i * 2 * V::LANES);
                acc[r][i] = (V::load(p).mul(a), V::load(p.add(V::LANES)).mul(a));
            }
        }
        acc
    }
}

/// Puts them back.
///
/// # Safety
/// As [`shrunk_sums`].
#[inline(always)]
pub(crate) unsafe fn keep_sums<V: Vector, const R: usize, const P: usize>(
    w: &Scratch<'_>,
    row: usize,
    x: usize,
    acc: &[[(V, V); P]; R],
) {
    for r in 0..R {
        for i in 0..P {
            // SAFETY: forwarded.
            unsafe {
                let p = w.o.add((row + r) * w.o_stride + x + i * 2 * V::LANES);
                acc[r][i].0.store(p);
                acc[r][i].1.store(p.add(V::LANES));
            }
        }
    }
}

/// Hands every row to its place, in the order of the output.
#[inline(always)]
unsafe fn finish<V: Vector, E: Rows<V>>(t: &Task<'_>, w: &Scratch<'_>, first: usize) {
    let d = t.call.heads.head_dim_v;
    for row in 0..t.rows() {
        // SAFETY: the slot's score part holds a row of KEY_BLOCK * DIRECT_ROWS floats, more than any width.
        unsafe {
            let ordered = std::slice::from_raw_parts_mut(w.s, d);
            let at = first + row;
            let o = if t.unit.segmented { w.merged } else { w.o };
            for i in 0..d {
                ordered[i] = *o.add(at * w.o_stride + E::place(i));
            }
            if t.unit.segmented {
                t.write(row, ordered, *w.merged_lse.add(at));
                continue;
            }
            t.emit(row, ordered, *w.max.add(at), w.weight::<V>(t, at));
        }
    }
}
