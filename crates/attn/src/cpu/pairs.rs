//! bf16 multiplied as bf16, in pairs: neighbours along head_dim for q·Kᵀ, neighbouring keys for p·V. Sums stay f32.
//!
//! Products of two bf16 are exact, so scores are those of the f32 kernels but for the order of two additions. Weights are rounded to bf16 for
//! their products with V, as plain attention at this precision does; so are the weights in the sum that outputs are divided by, and the
//! rounding falls on what weights differ by, not on their sum. The lse comes from unrounded weights. Keys pair up by their absolute
//! place (2i with 2i + 1), whatever a tile or a decode sees, in both kernels: a row's bits do not depend on which of them it takes.

use half::bf16;

use super::ahead::{Ahead, LINE_BYTES, NEAR};
use super::direct::{DOT_LINES, Head, Rows, keep_sums, shrunk_sums};
use super::element::Elem;
use super::products::{Products, Step};
use super::seen::Runs;
use super::softmax::Columns;
use super::task::{Scratch, Src, Task};
use super::vector::{MAX_LANES, PairDots, Vector};
use crate::plan::KEY_BLOCK;
use crate::workspace::TILE_ROWS;

/// 1.0, twice.
const ONES: u32 = 0x3f80_3f80;

/// The packed kernel on pairs.
pub(crate) struct Pairs;

/// A bf16 of K or V in the direct kernel on pairs.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Bf16Pairs(bf16);

// SAFETY: forwards to the vector's own loads.
unsafe impl Elem for Bf16Pairs {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Bf16Pairs) -> V {
        // SAFETY: the same bytes.
        unsafe { V::load_bf16(p.cast()) }
    }
}

/// Row `row` of q in pairs, `step` floats from one to the next; an odd last element has a 0 beside it.
///
/// # Safety
/// As `Task::load_query`, for half as many steps, rounded up.
#[inline(always)]
unsafe fn load_query(t: &Task<'_>, row: usize, dst: *mut f32, step: usize) {
    let q = t.query_bits(row);
    for (i, pair) in q.chunks(2).enumerate() {
        let high = pair.get(1).map_or(0, |x| x.to_bits());
        let bits = u32::from(pair[0].to_bits()) | u32::from(high) << 16;
        // SAFETY: forwarded.
        unsafe { *dst.add(i * step) = f32::from_bits(bits) };
    }
}

/// Transposes one group of `LANES` rows of K into a panel `[pairs of d][panel]`.
///
/// # Safety
/// Rows hold `d` elements, `out` the lanes of the panel's rows.
#[inline(always)]
unsafe fn transpose_rows<V: PairDots>(
    rows: &[*const bf16; MAX_LANES],
    d: usize,
    out: *mut f32,
    panel: usize,
    mut each: impl FnMut(),
) {
    let width = 2 * V::LANES;
    let mut x = 0;
    while x < d {
        // SAFETY: columns x .. d of every row exist, and the same steps of the panel.
        unsafe {
            let mut square = [V::splat(0.0); MAX_LANES];
            for i in 0..V::LANES {
                let p = rows[i].add(x);
                square[i] = if x + width <= d { V::load_pairs(p) } else { V::load_pairs_partial(p, d - x) };
            }
            V::transpose(&mut square);
            each();
            let steps = (d - x).min(width).div_ceil(2);
            for i in 0..V::LANES {
                if i < steps {
                    square[i].store(out.add((x / 2 + i) * panel));
                }
            }
        }
        x += width;
    }
}

/// Packs the K rows at `offsets[lo..hi]` into panels `[pairs of d][panel]`; columns beside them in a touched group of lanes are zero.
///
/// # Safety
/// As `pack_k`.
#[inline(always)]
pub(crate) unsafe fn pack_k<V: PairDots>(
    k: *const bf16,
    offsets: &[usize],
    (lo, hi): (usize, usize),
    d: usize,
    panel: usize,
    zeros: *const bf16,
    dst: *mut f32,
) {
    let mut group = lo / V::LANES * V::LANES;
    while group < hi {
        let mut rows = [zeros; MAX_LANES];
        for i in 0..V::LANES {
            if (lo..hi).contains(&(group + i)) {
                // SAFETY: a checked offset.
                rows[i] = unsafe { k.add(offsets[group + i]) };
            }
        }
        // SAFETY: group < KEY_BLOCK, a multiple of the panel's width.
        unsafe {
            let out = dst.add(group / panel * panel * d.div_ceil(2) + group % panel);
            transpose_rows::<V>(&rows, d, out, panel, || ());
        }
        group += V::LANES;
    }
}

/// Packs the V rows at `offsets[lo..hi]` into panels `[KEY_BLOCK / 2][width]` of pairs of keys, `N` vectors wide but for a narrower last
/// one; a key beside them has a row of zeros. Returns true when every value is finite.
///
/// # Safety
/// As `pack_v`; `zeros` holds a row.
#[inline(always)]
unsafe fn pack_v<V: PairDots, const N: usize>(
    v: *const bf16,
    offsets: &[usize],
    (lo, hi): (usize, usize),
    d: usize,
    zeros: *const bf16,
    dst: *mut f32,
) -> bool {
    // SAFETY: as Vector.
    let zero = unsafe { V::splat(0.0) };
    let (mut taint, mut left) = (zero, 0);
    let columns = d.next_multiple_of(V::LANES);
    while left < columns {
        let width = (columns - left).min(N * V::LANES);
        for pair in lo / 2..hi.div_ceil(2) {
            let row = |key: usize| {
                // SAFETY: a checked offset.
                if (lo..hi).contains(&key) { unsafe { v.add(offsets[key]) } } else { zeros }
            };
            let (a, b) = (row(2 * pair), row(2 * pair + 1));
            let mut x = left;
            while x < left + width {
                // SAFETY: columns x .. d of both rows exist, and the same columns of the panel.
                unsafe {
                    let load = |p: *const bf16| {
                        if x + 2 * V::LANES <= d {
                            V::load_pairs(p.add(x))
                        } else {
                            V::load_pairs_partial(p.add(x), d - x)
                        }
                    };
                    let (first, second) = V::interleave(load(a), load(b));
                    let to = dst.add(left * (KEY_BLOCK / 2) + pair * width + (x - left));
                    first.store(to);
                    // 0 · x is 0 for finite x and NaN otherwise.
                    taint = first.dot_pairs(zero, taint);
                    if x + V::LANES < left + width {
                        second.store(to.add(V::LANES));
                        taint = second.dot_pairs(zero, taint);
                    }
                }
                x += 2 * V::LANES;
            }
        }
        left += width;
    }
    // SAFETY: as Vector.
    unsafe { taint.reduce_add() == 0.0 }
}

/// Rounds the weights `cols` of the row at `s` to bf16, in place: weight `i` becomes half `i` of the row, zeros beside `cols` up to whole
/// pairs of vectors. Adds them to the row's rounded sum.
///
/// # Safety
/// As `Products::seal`.
#[inline(always)]
unsafe fn seal_row<V: PairDots>(w: &Scratch<'_>, row: usize, s: *mut f32, cols: Columns, alpha: f32) {
    let width = 2 * V::LANES;
    // SAFETY: a row of s holds whole pairs of vectors; reads stay ahead of writes.
    unsafe {
        let from = cols.from / width * width;
        if from < cols.from {
            V::splat(0.0).store(s.add(from));
        }
        if !cols.to.is_multiple_of(width) {
            V::splat(0.0).store(s.add(cols.to));
        }
        let rounded = w.rounded.add(row * V::LANES);
        let mut sum = V::load(rounded).mul(V::splat(alpha));
        let mut col = from;
        while col < cols.to {
            let pairs = V::narrow(V::load(s.add(col)), V::load(s.add(col + V::LANES)));
            pairs.store(s.add(col / 2));
            sum = pairs.dot_pairs(V::splat(f32::from_bits(ONES)), sum);
            col += width;
        }
        sum.store(rounded);
    }
}

// SAFETY: forwards to `PairDots`.
unsafe impl<V: PairDots> Step<V> for Pairs {
    const DEPTH: usize = 2;

    #[inline(always)]
    unsafe fn multiply_add(a: V, b: V, c: V) -> V {
        // SAFETY: forwarded.
        unsafe { a.dot_pairs(b, c) }
    }
}

// SAFETY: forwards to `PairDots`.
unsafe impl<V: PairDots> Products<V> for Pairs {
    #[inline(always)]
    unsafe fn load_query(t: &Task<'_>, row: usize, dst: *mut f32) {
        // SAFETY: forwarded.
        unsafe { load_query(t, row, dst, TILE_ROWS) }
    }

    #[inline(always)]
    unsafe fn load_block<const N: usize>(t: &Task<'_>, w: &Scratch<'_>, cols: (usize, usize)) -> bool {
        let (Src::Bf16(k), Src::Bf16(v)) = (t.call.k, t.call.v) else {
            unreachable!("a plan multiplies pairs of bf16 only")
        };
        let (d, zeros) = (t.call.heads, w.zeros.cast_const().cast());
        // SAFETY: checked offsets; the slot's parts hold a block.
        unsafe {
            pack_k::<V>(k, w.k_off, cols, d.head_dim_qk, N * V::LANES, zeros, w.k);
            pack_v::<V, N>(v, w.v_off, cols, d.head_dim_v, zeros, w.v)
        }
    }

    #[inline(always)]
    unsafe fn seal(w: &Scratch<'_>, row: usize, s: *mut f32, cols: Columns, alpha: f32) {
        // SAFETY: forwarded.
        unsafe { seal_row::<V>(w, row, s, cols, alpha) }
    }

    #[inline(always)]
    unsafe fn output_row(w: &Scratch<'_>, v: *const f32, width: usize, row: usize, left: usize, seen: Runs) {
        // SAFETY: within the slot's parts.
        unsafe {
            let alpha = V::splat(*w.alpha.add(row));
            let mut x = 0;
            while x < width {
                let o = w.o.add(row * w.o_stride + left + x);
                let mut acc = V::load(o).mul(alpha);
                for pair in 0..KEY_BLOCK / 2 {
                    let mask = match seen.0 >> (2 * pair) & 3 {
                        0 => continue,
                        1 => 0x0000_ffff,
                        2 => 0xffff_0000,
                        _ => 0xffff_ffff,
                    };
                    let p = V::splat(*w.s.add(row * KEY_BLOCK + pair));
                    acc = p.dot_pairs(V::load(v.add(pair * width + x)).and_bits(mask), acc);
                }
                acc.store(o);
                x += V::LANES;
            }
        }
    }
}

// SAFETY: forwards to the functions below.
unsafe impl<V: PairDots> Rows<V> for Bf16Pairs {
    #[inline(always)]
    unsafe fn start_row(t: &Task<'_>, w: &Scratch<'_>, row: usize, at: usize) {
        // SAFETY: the slot's parts hold DIRECT_TASK_ROWS rows of padded widths; zeros holds one row of values.
        unsafe {
            load_query(t, row, w.q.add(at * w.q_stride), 1);
            std::ptr::write_bytes(w.rounded.add(at * V::LANES), 0, V::LANES);
            std::ptr::write_bytes(w.zeros, 0, t.call.heads.head_dim_qk.max(t.call.heads.head_dim_v));
        }
    }

    #[inline(always)]
    fn place(i: usize) -> usize {
        let width = 2 * V::LANES;
        i / width * width + V::cheap_place(i % width)
    }

    #[inline(always)]
    unsafe fn dots<const R: usize, const N: usize>(
        t: &Task<'_>,
        w: &Scratch<'_>,
        h: Head<Bf16Pairs>,
        ahead: &mut Ahead,
        cols: Columns,
    ) {
        let d = t.call.heads.head_dim_qk;
        let panel = N * V::LANES;
        // SAFETY: checked offsets, also beside the task's keys; the slot's panel holds the pairs of a block's keys.
        unsafe {
            let mut col = cols.from;
            while col < cols.to {
                let groups = ((cols.to - col) / V::LANES).min(N);
                for g in 0..groups {
                    let first = col + g * V::LANES;
                    let mut rows = [h.k.cast(); MAX_LANES];
                    for i in 0..V::LANES {
                        rows[i] = h.k.add(*w.k_off.get_unchecked(first + i)).cast();
                    }
                    let to = w.panel.add(g * V::LANES);
                    transpose_rows::<V>(&rows, d, to, panel, || {
                        ahead.ask::<V, NEAR>(lines(2 * V::LANES * V::LANES));
                    });
                }
                match groups {
                    1 => multiply::<V, R, N, 1>(w, h, ahead, col, d),
                    2 if N > 2 => multiply::<V, R, N, 2>(w, h, ahead, col, d),
                    3 if N > 3 => multiply::<V, R, N, 3>(w, h, ahead, col, d),
                    _ => multiply::<V, R, N, N>(w, h, ahead, col, d),
                }
                col += groups * V::LANES;
            }
        }
    }

    #[inline(always)]
    unsafe fn seal(w: &Scratch<'_>, row: usize, s: *mut f32, cols: Columns, alpha: f32) {
        // SAFETY: forwarded.
        unsafe { seal_row::<V>(w, row, s, cols, alpha) }
    }

    #[inline(always)]
    unsafe fn values<const R: usize, const N: usize>(
        t: &Task<'_>,
        w: &Scratch<'_>,
        h: Head<Bf16Pairs>,
        ahead: &mut Ahead,
        keys: (usize, usize),
    ) {
        let (d, width) = (t.call.heads.head_dim_v, 2 * V::LANES);
        let mut x = 0;
        while x < d {
            // SAFETY: forwarded; o rows are padded to whole pairs of vectors.
            unsafe {
                if x + width > d {
                    value_columns::<V, R, 1, true>(w, h, ahead, keys, x, d - x);
                    x += width;
                } else if N >= 4 && x + 2 * width <= d {
                    value_columns::<V, R, 2, false>(w, h, ahead, keys, x, 2 * width);
                    x += 2 * width;
                } else {
                    value_columns::<V, R, 1, false>(w, h, ahead, keys, x, width);
                    x += width;
                }
            }
        }
    }
}

/// Lines to ask for beside `elements` elements of keys, half of them while transposing and half while multiplying.
#[inline(always)]
fn lines(elements: usize) -> usize {
    (elements * 2 * size_of::<bf16>() / LINE_BYTES * DOT_LINES).div_ceil(16)
}

/// The scores of R rows over M groups of the panel.
#[inline(always)]
unsafe fn multiply<V: PairDots, const R: usize, const N: usize, const M: usize>(
    w: &Scratch<'_>,
    h: Head<Bf16Pairs>,
    ahead: &mut Ahead,
    col: usize,
    d: usize,
) {
    let panel = N * V::LANES;
    // SAFETY: as `Rows::dots`.
    unsafe {
        let q = w.q.add(h.row * w.q_stride).cast_const();
        let mut k = w.panel.cast_const();
        let mut acc = [[V::splat(0.0); M]; R];
        for step in 0..d.div_ceil(2) {
            if step.is_multiple_of(4) {
                ahead.ask::<V, NEAR>(lines(4 * 2 * M * V::LANES));
            }
            let mut keys = [V::splat(0.0); M];
            for m in 0..M {
                keys[m] = V::load(k.add(m * V::LANES));
            }
            for r in 0..R {
                let q = V::splat(*q.add(r * w.q_stride + step));
                for m in 0..M {
                    acc[r][m] = q.dot_pairs(keys[m], acc[r][m]);
                }
            }
            k = k.add(panel);
        }
        for m in 0..M {
            let scale = V::load(w.k_scales.add(col + m * V::LANES));
            for r in 0..R {
                acc[r][m].mul(scale).store(w.s.add(r * KEY_BLOCK + col + m * V::LANES));
            }
        }
    }
}

/// Columns `x ..` of P pairs of vectors; with `PARTIAL` only `width` of them exist in v.
#[inline(always)]
unsafe fn value_columns<V: PairDots, const R: usize, const P: usize, const PARTIAL: bool>(
    w: &Scratch<'_>,
    h: Head<Bf16Pairs>,
    ahead: &mut Ahead,
    (lo, hi): (usize, usize),
    x: usize,
    width: usize,
) {
    let pair = 2 * V::LANES;
    // SAFETY: checked offsets; within the slot's parts; a row of zeros stands for a key beside lo .. hi.
    unsafe {
        // Of two keys' columns, and as much of their keys.
        let lines = (P * pair * 2 * 2 * size_of::<bf16>() / LINE_BYTES * (8 - DOT_LINES)).div_ceil(8);
        let mut acc = shrunk_sums::<V, R, P>(w, h.row, x);
        let zeros = w.zeros.cast_const().cast::<bf16>();
        let row = |key: usize| {
            if key < lo || key >= hi {
                return zeros;
            }
            h.v.add(*w.v_off.get_unchecked(key) + x).cast::<bf16>()
        };
        for keys in lo / 2..hi.div_ceil(2) {
            let (a, b) = (row(2 * keys), row(2 * keys + 1));
            ahead.ask::<V, NEAR>(lines);
            let mut values = [(V::splat(0.0), V::splat(0.0)); P];
            for i in 0..P {
                values[i] = if PARTIAL {
                    V::interleave_cheaply(V::load_pairs_partial(a, width), V::load_pairs_partial(b, width))
                } else {
                    V::interleave_cheaply(V::load_pairs(a.add(i * pair)), V::load_pairs(b.add(i * pair)))
                };
            }
            for r in 0..R {
                let p = V::splat(*w.s.add(r * KEY_BLOCK + keys));
                for i in 0..P {
                    acc[r][i] =
                        (p.dot_pairs(values[i].0, acc[r][i].0), p.dot_pairs(values[i].1, acc[r][i].1));
                }
            }
        }
        keep_sums(w, h.row, x, &acc);
    }
}
