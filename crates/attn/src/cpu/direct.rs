//! The kernel for few rows: K rows dotted where they lie, V rows accumulated one by one; every byte of K and V is loaded once.
//!
//! Up to four rows share each load. bf16 rows are widened by a shift (even elements) and a mask (odd ones), so q and o are held
//! in that order.

use super::softmax::{Columns, softmax_row};
use super::task::{Counts, Scratch, Task};
use super::vector::{Elem, Vector};
use crate::plan::KEY_BLOCK;

/// Rows that share a load of K or V.
const GROUP: usize = 4;
/// Keys dotted at once, so that their reductions go together.
const DOT_KEYS: usize = 4;

/// Runs a task of at most `DIRECT_ROWS` rows.
///
/// # Safety
/// As `Call::run_task`, inside an instance of `V`; `k` and `v` are the call's.
#[inline(always)]
pub(crate) unsafe fn run<V: Vector, E: Elem + Default, const N: usize>(
    t: &Task<'_>,
    k: *const E,
    v: *const E,
) -> Counts {
    // SAFETY: forwarded; every pointer below stays inside its part of the slot.
    unsafe {
        let mut w = t.scratch();
        start::<V, E>(t, &mut w);
        let mut counts = Counts::default();
        let (first, end) = (t.unit.key_start, t.unit.key_end);
        let mut base = first / KEY_BLOCK * KEY_BLOCK;
        let columns = |base: usize| {
            (first.clamp(base, base + KEY_BLOCK) - base, end.clamp(base, base + KEY_BLOCK) - base)
        };
        let (lo, hi) = columns(base);
        t.fill_offsets(base + lo..base + hi, &mut w.k_off[lo..], &mut w.v_off[lo..]);
        while base < end {
            let here = columns(base);
            // The next block's rows are asked for while this one is worked on; pages make them hard to guess for the processor.
            let next = base + KEY_BLOCK;
            w.ahead = 0;
            if next < end {
                w.ahead = columns(next).1;
                t.fill_offsets(next..next + w.ahead, w.k_next, w.v_next);
            }
            counts.keys += (here.1 - here.0) as u64;
            let mut row = 0;
            while row < t.rows() {
                let n = sharing(&w, row, t.rows(), base);
                let seen = w.visible_columns(row, base);
                counts.pairs += (n * seen.len()) as u64;
                let cols = (seen.start, seen.end);
                match n {
                    1 => rows_over_block::<V, E, 1, N>(t, &w, k, v, row, cols),
                    2 => rows_over_block::<V, E, 2, N>(t, &w, k, v, row, cols),
                    3 => rows_over_block::<V, E, 3, N>(t, &w, k, v, row, cols),
                    _ => rows_over_block::<V, E, GROUP, N>(t, &w, k, v, row, cols),
                }
                row += n;
            }
            std::mem::swap(&mut w.k_off, &mut w.k_next);
            std::mem::swap(&mut w.v_off, &mut w.v_next);
            base = next;
        }
        finish::<V, E>(t, &w);
        counts
    }
}

/// Where element `i` of a row stands in the order of `load_pair`.
#[inline(always)]
fn place<V: Vector, E: Elem>(i: usize) -> usize {
    let pair = 2 * V::LANES;
    if E::INTERLEAVED { i / pair * pair + i % 2 * V::LANES + i % pair / 2 } else { i }
}

#[inline(always)]
unsafe fn start<V: Vector, E: Elem>(t: &Task<'_>, w: &mut Scratch<'_>) {
    let d = t.call.heads.head_dim_qk;
    for row in 0..t.rows() {
        // SAFETY: the slot's parts hold DIRECT_ROWS rows of padded widths; zeros holds one row.
        unsafe {
            let q = w.q.add(row * w.q_stride);
            std::ptr::write_bytes(q, 0, w.q_stride);
            t.load_query(row, w.zeros, 1);
            for i in 0..d {
                *q.add(place::<V, E>(i)) = *w.zeros.add(i);
            }
            *w.max.add(row) = f32::NEG_INFINITY;
            w.visible[row] = t.visible(row);
        }
    }
    // SAFETY: as above.
    unsafe {
        std::ptr::write_bytes(w.sum, 0, t.rows() * V::LANES);
        std::ptr::write_bytes(w.o, 0, t.rows() * w.o_stride);
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

/// Scores, weights and outputs of rows `row .. row + R` over the columns that all of them see.
#[inline(always)]
unsafe fn rows_over_block<V: Vector, E: Elem + Default, const R: usize, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    k: *const E,
    v: *const E,
    row: usize,
    (lo, hi): (usize, usize),
) {
    if lo >= hi {
        return;
    }
    // SAFETY: forwarded.
    unsafe {
        dot_block::<V, E, R>(t, w, (k, v), row, (lo, hi));
        let cols = Columns { from: lo / V::LANES * V::LANES, to: hi.next_multiple_of(V::LANES), lo, hi };
        for r in row..row + R {
            let (s, sum, max) = (w.s.add(r * KEY_BLOCK), w.sum.add(r * V::LANES), &mut *w.max.add(r));
            scale_row::<V>(s, cols.from, cols.to, t.call.scale_log2);
            *w.alpha.add(r) = if hi - lo == KEY_BLOCK {
                softmax_row::<V, false>(s, cols, max, sum)
            } else {
                softmax_row::<V, true>(s, cols, max, sum)
            };
        }
        add_values::<V, E, R, N>(t, w, (k, v), row, (lo, hi));
    }
}

/// Asks for the cache lines of a row of `d` elements.
#[inline(always)]
unsafe fn ask_row<V: Vector, E: Elem>(row: *const E, d: usize) {
    let mut x = 0;
    while x < d {
        // SAFETY: elements of a checked row.
        unsafe { V::prefetch(row.add(x).cast()) };
        x += 64 / size_of::<E>();
    }
}

/// s = scale·s over whole vectors.
#[inline(always)]
unsafe fn scale_row<V: Vector>(s: *mut f32, from: usize, to: usize, scale: f32) {
    // SAFETY: within a row of scores.
    unsafe {
        let mut col = from;
        while col < to {
            V::load(s.add(col)).mul(V::splat(scale)).store(s.add(col));
            col += V::LANES;
        }
    }
}

/// s = q·k for R rows and the block's keys.
#[inline(always)]
unsafe fn dot_block<V: Vector, E: Elem + Default, const R: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    (k, v): (*const E, *const E),
    row: usize,
    (lo, hi): (usize, usize),
) {
    let d = t.call.heads.head_dim_qk;
    // SAFETY: checked offsets; within the slot's parts.
    unsafe {
        let q = w.q.add(row * w.q_stride);
        let s = w.s.add(row * KEY_BLOCK);
        let mut key = lo;
        while key < hi {
            let n = (hi - key).min(DOT_KEYS);
            // Past the last key the last one is dotted again, and not stored.
            let mut rows = [k; DOT_KEYS];
            for i in 0..DOT_KEYS {
                rows[i] = k.add(w.k_off[key + i.min(n - 1)]);
            }
            if row == 0 {
                for i in 0..n {
                    ask_row::<V, E>(v.add(w.v_off[key + i]), t.call.heads.head_dim_v);
                }
            }
            let acc = dot::<V, E, R>(q, w.q_stride, rows, d);
            for r in 0..R {
                let at = s.add(r * KEY_BLOCK + key);
                if n == DOT_KEYS {
                    V::reduce_add4(acc[r], at);
                } else {
                    let mut four = [0.0; DOT_KEYS];
                    V::reduce_add4(acc[r], four.as_mut_ptr());
                    std::ptr::copy_nonoverlapping(four.as_ptr(), at, n);
                }
            }
            key += n;
        }
    }
}

/// Lane-wise partial dot products of R query rows with `DOT_KEYS` key rows.
#[inline(always)]
unsafe fn dot<V: Vector, E: Elem + Default, const R: usize>(
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
        if x < d {
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
    kv: (*const E, *const E),
    row: usize,
    (lo, hi): (usize, usize),
) {
    let (d, pair) = (t.call.heads.head_dim_v, 2 * V::LANES);
    let mut x = 0;
    while x < d {
        // SAFETY: forwarded; o rows are padded to whole pairs.
        unsafe {
            if x + pair > d {
                value_columns::<V, E, R, 1, true>(w, kv, row, (lo, hi), x, d - x);
                x += pair;
            } else if N >= 4 && x + 2 * pair <= d {
                value_columns::<V, E, R, 2, false>(w, kv, row, (lo, hi), x, 2 * pair);
                x += 2 * pair;
            } else {
                value_columns::<V, E, R, 1, false>(w, kv, row, (lo, hi), x, pair);
                x += pair;
            }
        }
    }
}

/// Columns `x ..` of P pairs of vectors; with `PARTIAL` only `width` of them exist in v.
#[inline(always)]
unsafe fn value_columns<V: Vector, E: Elem + Default, const R: usize, const P: usize, const PARTIAL: bool>(
    w: &Scratch<'_>,
    (k, v): (*const E, *const E),
    row: usize,
    (lo, hi): (usize, usize),
    x: usize,
    width: usize,
) {
    let pair = 2 * V::LANES;
    // SAFETY: checked offsets; within the slot's parts.
    unsafe {
        let o = w.o.add(row * w.o_stride + x);
        let s = w.s.add(row * KEY_BLOCK);
        let mut acc = [[(V::splat(0.0), V::splat(0.0)); P]; R];
        for r in 0..R {
            let a = V::splat(*w.alpha.add(row + r));
            for i in 0..P {
                let p = o.add(r * w.o_stride + i * pair);
                acc[r][i] = (V::load(p).mul(a), V::load(p.add(V::LANES)).mul(a));
            }
        }
        // Each pass over the columns asks for the same columns of the next block's keys.
        let ahead = if row == 0 { w.ahead } else { 0 };
        for key in lo..hi {
            let p = v.add(*w.v_off.get_unchecked(key) + x);
            if key < ahead {
                let mut ask = 0;
                while ask < P * pair {
                    V::prefetch(k.wrapping_add(*w.k_next.get_unchecked(key) + x + ask).cast());
                    ask += 64 / size_of::<E>();
                }
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
unsafe fn finish<V: Vector, E: Elem>(t: &Task<'_>, w: &Scratch<'_>) {
    let d = t.call.heads.head_dim_v;
    for row in 0..t.rows() {
        // SAFETY: the slot's score part holds a row of KEY_BLOCK * DIRECT_ROWS floats, more than any width.
        unsafe {
            let ordered = std::slice::from_raw_parts_mut(w.s, d);
            for i in 0..d {
                ordered[i] = *w.o.add(row * w.o_stride + place::<V, E>(i));
            }
            t.emit(row, ordered, *w.max.add(row), V::load(w.sum.add(row * V::LANES)).reduce_add());
        }
    }
}
