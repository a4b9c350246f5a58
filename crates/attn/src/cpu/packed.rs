//! The kernel for many rows: a tile of query rows against packed blocks of keys and values.
//!
//! ```text
//! rows of the tile, 6 at a time          one block of 128 keys
//!   q [tile][d][6]   x   K panels [d][N vectors]   ->  s [row][128]   (K panel stays in the first-level cache)
//!   softmax of each row over its visible columns
//!   s [row][128]     x   V panels [128][N vectors] ->  o [row][head_dim_v], scaled by alpha on the way
//! ```
//! Blocks stand on absolute multiples of 128 keys and lanes on absolute columns, so that a row's sums do not depend on its tile.

use suanpan_base::Seen;

use super::ahead::{Ahead, FAR, columns, fill_offsets};
use super::kv_scales::{fill, scale_weights};
use super::products::Products;
use super::scores::{change_row, drop_row};
use super::seen::{Bits, Runs, bits_of, hide, hull};
use super::segment;
use super::softmax::{Columns, softmax_row};
use super::task::{Counts, Scratch, Task};
use super::vector::Vector;
use crate::plan::KEY_BLOCK;
use crate::workspace::TILE_ROWS;

/// A tile's rows over one block: visible hull and the rows' common part, in block columns.
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    to: usize,
    all_visible: bool,
}

/// Runs a task.
///
/// # Safety
/// As `Call::run_task`, inside an instance of `V`.
#[inline(always)]
pub(crate) unsafe fn run<V: Vector, P: Products<V>, const N: usize>(t: &Task<'_>) -> (Counts, Option<usize>) {
    // SAFETY: forwarded; every pointer below stays inside its part of the slot.
    unsafe {
        let mut w = t.scratch();
        start::<V, P>(t, &mut w);
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
            ahead.after(t, (0, base), next.as_ref(), &w);
            if look_up(t, &mut w, base) {
                let scales = fill::<V>(t, &w, base);
                counts.scales += scales.runs;
                let finite = P::load_block::<N>(t, &w, columns(t, base)) && scales.finite;
                counts.keys += t.pieces(base).map(|piece| piece.len() as u64).iter().sum::<u64>();
                scores::<V, P, N>(t, &w, &mut ahead, base);
                counts.pairs += outputs::<V, P, N>(t, &w, &mut ahead, base, finite);
            }
            std::mem::swap(&mut w.k_off, &mut w.k_next);
            std::mem::swap(&mut w.v_off, &mut w.v_next);
            if t.closes_segment(base, block) {
                segment::close::<V>(t, &w, 0);
            }
        }
        finish::<V>(t, &w);
        (counts, next_task)
    }
}

/// Packs the queries (zeros in padding rows), clears the state and looks up what each row sees.
#[inline(always)]
unsafe fn start<V: Vector, P: Products<V>>(t: &Task<'_>, w: &mut Scratch<'_>) {
    let (rows, padded) = (t.rows(), t.rows().next_multiple_of(TILE_ROWS));
    let steps = t.call.heads.head_dim_qk.div_ceil(P::DEPTH);
    // SAFETY: the slot's parts hold `padded` rows.
    unsafe {
        for row in 0..padded {
            let dst = w.q.add(row / TILE_ROWS * TILE_ROWS * steps + row % TILE_ROWS);
            if row < rows {
                P::load_query(t, row, dst);
                w.visible[row] = t.visible(row);
            } else {
                (0..steps).for_each(|i| *dst.add(i * TILE_ROWS) = 0.0);
                // An empty range where the last real row ends keeps starts and ends in order.
                let Seen { head, run } = w.visible[rows - 1].clone();
                w.visible[row] = Seen { head, run: run.end..run.end };
            }
            *w.max.add(row) = f32::NEG_INFINITY;
        }
        t.start_segments(w, 0);
        std::ptr::write_bytes(w.sum, 0, padded * V::LANES);
        if t.call.plan.multiplies_pairs() {
            std::ptr::write_bytes(w.rounded, 0, padded * V::LANES);
        }
        std::ptr::write_bytes(w.o, 0, padded * w.o_stride);
        // One row of zero bytes serves all element types, of keys and of values.
        std::ptr::write_bytes(w.zeros, 0, t.call.heads.head_dim_qk.max(t.call.heads.head_dim_v));
    }
}

/// Decides how rows are looked up in the block at `base`: by their runs, behind all their heads; by their heads, before all their runs; else
/// by bits, which it fills in (none in padding rows). Returns false where bits hide the whole block.
fn look_up(t: &Task<'_>, w: &mut Scratch<'_>, base: usize) -> bool {
    let narrowed = t.call.sight.narrowed();
    let beside_heads = !t.unit.by_bits || base >= w.visible[t.rows() - 1].head;
    let before_runs = w.visible[0].run.start >= base + KEY_BLOCK;
    w.by_bits = narrowed || !beside_heads && !before_runs;
    w.in_head = !w.by_bits && !beside_heads;
    if !w.by_bits {
        return true;
    }
    let [head, run] = t.pieces(base);
    let pieces = bits_of(&head) | bits_of(&run);
    let (rows, padded) = (t.rows(), t.rows().next_multiple_of(TILE_ROWS));
    let mut some = 0;
    for row in 0..rows {
        w.bits[row] = t.row_bits(row, base, pieces);
        some |= w.bits[row];
    }
    w.bits[rows..padded].fill(0);
    some != 0 || !narrowed
}

/// The columns of the block at `base` that the rows of tile `tile` see; `None` when they see none.
#[inline(always)]
fn span(t: &Task<'_>, w: &Scratch<'_>, tile: usize, base: usize) -> Option<Span> {
    let (first, last) = (tile * TILE_ROWS, (tile * TILE_ROWS + TILE_ROWS - 1).min(t.rows() - 1));
    if w.by_bits {
        let rows = &w.bits[first..=last];
        let some = rows.iter().fold(0, |some, bits| some | bits);
        let all_visible = rows.iter().all(|&bits| bits == Bits::MAX);
        return (some != 0).then(|| Span { from: hull(some).start, to: hull(some).end, all_visible });
    }
    let (upper, lower) = (w.visible_columns(first, base), w.visible_columns(last, base));
    let (from, to) = (upper.start, lower.end);
    let all_visible = lower.start == 0 && upper.end == KEY_BLOCK;
    (from < to).then_some(Span { from, to, all_visible })
}

/// s = q·Kᵀ for every tile and panel with a visible pair. Panels outside, so that one stays close while tiles stream.
#[inline(always)]
unsafe fn scores<V: Vector, P: Products<V>, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    ahead: &mut Ahead,
    base: usize,
) {
    let (rows, panel) = (t.rows(), N * V::LANES);
    let steps = t.call.heads.head_dim_qk.div_ceil(P::DEPTH);
    let lines = ahead.lines(2 * (KEY_BLOCK / panel) * rows.div_ceil(TILE_ROWS));
    let mut left = 0;
    while left < KEY_BLOCK {
        for tile in 0..rows.div_ceil(TILE_ROWS) {
            let Some(span) = span(t, w, tile, base) else { continue };
            if span.from >= left + panel || span.to <= left {
                continue;
            }
            ahead.ask::<V, FAR>(lines);
            // SAFETY: within the slot's parts.
            unsafe {
                let q = w.q.add(tile * TILE_ROWS * steps);
                let k = w.k.add(left * steps);
                let s = w.s.add(tile * TILE_ROWS * KEY_BLOCK + left);
                let scales = w.k_scales.add(left);
                match (span.to - left).min(panel).div_ceil(V::LANES) {
                    1 => score_tile::<V, P, 1>(q, k, panel, steps, s, scales),
                    2 if N > 2 => score_tile::<V, P, 2>(q, k, panel, steps, s, scales),
                    3 if N > 3 => score_tile::<V, P, 3>(q, k, panel, steps, s, scales),
                    _ => score_tile::<V, P, N>(q, k, panel, steps, s, scales),
                }
            }
        }
        left += panel;
    }
}

/// 6 rows × M vectors of scores.
#[inline(always)]
unsafe fn score_tile<V: Vector, P: Products<V>, const M: usize>(
    mut q: *const f32,
    mut k: *const f32,
    k_stride: usize,
    steps: usize,
    s: *mut f32,
    scales: *const f32,
) {
    // SAFETY: q holds [steps][6], k [steps][k_stride], s 6 rows of KEY_BLOCK, scales M vectors.
    unsafe {
        let mut acc = [[V::splat(0.0); M]; TILE_ROWS];
        for _ in 0..steps {
            let mut b = [V::splat(0.0); M];
            for m in 0..M {
                b[m] = V::load(k.add(m * V::LANES));
            }
            for r in 0..TILE_ROWS {
                let a = V::splat(*q.add(r));
                for m in 0..M {
                    acc[r][m] = P::multiply_add(a, b[m], acc[r][m]);
                }
            }
            q = q.add(TILE_ROWS);
            k = k.add(k_stride);
        }
        let mut scale = [V::splat(0.0); M];
        for m in 0..M {
            scale[m] = V::load(scales.add(m * V::LANES));
        }
        for r in 0..TILE_ROWS {
            for m in 0..M {
                acc[r][m].mul(scale[m]).store(s.add(r * KEY_BLOCK + m * V::LANES));
            }
        }
    }
}

/// Weights of every row over the block, then o = alpha·o + p·V for every tile and panel. Returns the (row, key) pairs.
///
/// A tile's weights are made just before its first panel uses them. `finite`: no value of the block is NaN or infinite.
#[inline(always)]
unsafe fn outputs<V: Vector, P: Products<V>, const N: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    ahead: &mut Ahead,
    base: usize,
    finite: bool,
) -> u64 {
    let (rows, panel) = (t.rows(), N * V::LANES);
    let columns = t.call.heads.head_dim_v.next_multiple_of(V::LANES);
    let lines = ahead.lines(2 * columns.div_ceil(panel) * rows.div_ceil(TILE_ROWS));
    let (mut left, mut pairs) = (0, 0);
    while left < columns {
        let width = (columns - left).min(panel);
        for tile in 0..rows.div_ceil(TILE_ROWS) {
            let Some(span) = span(t, w, tile, base) else { continue };
            ahead.ask::<V, FAR>(lines);
            // SAFETY: within the slot's parts.
            unsafe {
                if left == 0 {
                    pairs += weights::<V, P>(t, w, base, tile, span);
                }
                let v = w.v.add(left * (KEY_BLOCK / P::DEPTH));
                if !finite && !span.all_visible {
                    // A weight of 0 must not let a value that this row may not see through: 0 · NaN is NaN.
                    for row in tile * TILE_ROWS..(tile + 1) * TILE_ROWS {
                        let seen = row_runs(w, row, base);
                        P::output_row(w, v, width, row, left, seen);
                    }
                    continue;
                }
                match width / V::LANES {
                    1 => output_tile::<V, P, 1>(w, v, tile, left, span),
                    2 if N > 2 => output_tile::<V, P, 2>(w, v, tile, left, span),
                    3 if N > 3 => output_tile::<V, P, 3>(w, v, tile, left, span),
                    _ => output_tile::<V, P, N>(w, v, tile, left, span),
                }
            }
        }
        left += panel;
    }
    pairs
}

/// The softmax of a tile's rows over the block. Returns the (row, key) pairs that real rows saw.
#[inline(always)]
unsafe fn weights<V: Vector, P: Products<V>>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    base: usize,
    tile: usize,
    span: Span,
) -> u64 {
    let (from, to) = (span.from / V::LANES * V::LANES, span.to.next_multiple_of(V::LANES));
    let (rows, change) = (t.rows(), t.call.plan.problem.scores.change_scores());
    let mut pairs = 0;
    for row in tile * TILE_ROWS..(tile + 1) * TILE_ROWS {
        let by_bits = w.by_bits;
        let seen = if by_bits { hull(w.bits[row]) } else { w.visible_columns(row, base) };
        // SAFETY: within the slot's parts.
        unsafe {
            let (s, sum, max) = (w.s.add(row * KEY_BLOCK), w.sum.add(row * V::LANES), &mut *w.max.add(row));
            let cols = Columns { from, to, lo: seen.start, hi: seen.end };
            if change && row < rows {
                change_row::<V>(t, row, base, s, cols);
            }
            if by_bits && !span.all_visible {
                hide(s, (from, to), w.bits[row]);
            }
            *w.alpha.add(row) = if span.all_visible || by_bits {
                softmax_row::<V, false>(s, cols, max, sum)
            } else {
                softmax_row::<V, true>(s, cols, max, sum)
            };
            if row < rows {
                drop_row(t, row, base, s, (seen.start, seen.end));
            }
            if t.call.scales.any() {
                scale_weights::<V>(w, s, cols);
            }
            P::seal(w, row, s, cols, *w.alpha.add(row));
        }
        if row < rows {
            pairs += if by_bits { u64::from(w.bits[row].count_ones()) } else { seen.len() as u64 };
        }
    }
    pairs
}

/// The keys of the block at `base` that row `row` sees, in runs.
#[inline(always)]
fn row_runs(w: &Scratch<'_>, row: usize, base: usize) -> Runs {
    Runs(if w.by_bits { w.bits[row] } else { bits_of(&w.visible_columns(row, base)) })
}

/// 6 rows × M vectors of outputs.
#[inline(always)]
unsafe fn output_tile<V: Vector, P: Products<V>, const M: usize>(
    w: &Scratch<'_>,
    v: *const f32,
    tile: usize,
    left: usize,
    span: Span,
) {
    // SAFETY: within the slot's parts.
    unsafe {
        let o = w.o.add(tile * TILE_ROWS * w.o_stride + left);
        let alpha = w.alpha.add(tile * TILE_ROWS);
        let mut acc = [[V::splat(0.0); M]; TILE_ROWS];
        for r in 0..TILE_ROWS {
            let a = V::splat(*alpha.add(r));
            for m in 0..M {
                acc[r][m] = V::load(o.add(r * w.o_stride + m * V::LANES)).mul(a);
            }
        }
        // The next tile's rows of o lie too far apart for the processor to guess; one past the last tile is still in the slot.
        for r in 0..TILE_ROWS {
            for m in 0..M {
                V::prefetch_near(o.add((TILE_ROWS + r) * w.o_stride + m * V::LANES).cast());
            }
        }
        let (first, end) = (span.from / P::DEPTH, span.to.div_ceil(P::DEPTH));
        let mut p = w.s.add(tile * TILE_ROWS * KEY_BLOCK + first).cast_const();
        let mut v = v.add(first * M * V::LANES);
        for _ in first..end {
            let mut b = [V::splat(0.0); M];
            for m in 0..M {
                b[m] = V::load(v.add(m * V::LANES));
            }
            for r in 0..TILE_ROWS {
                let a = V::splat(*p.add(r * KEY_BLOCK));
                for m in 0..M {
                    acc[r][m] = P::multiply_add(a, b[m], acc[r][m]);
                }
            }
            p = p.add(1);
            v = v.add(M * V::LANES);
        }
        for r in 0..TILE_ROWS {
            for m in 0..M {
                acc[r][m].store(o.add(r * w.o_stride + m * V::LANES));
            }
        }
    }
}

/// Hands every row to its place.
#[inline(always)]
unsafe fn finish<V: Vector>(t: &Task<'_>, w: &Scratch<'_>) {
    let d = t.call.heads.head_dim_v;
    for row in 0..t.rows() {
        // SAFETY: within the slot's parts.
        unsafe {
            if t.unit.segmented {
                let o = std::slice::from_raw_parts(w.merged.add(row * w.o_stride), d);
                t.write(row, o, *w.merged_lse.add(row));
            } else {
                let o = std::slice::from_raw_parts_mut(w.o.add(row * w.o_stride), d);
                t.emit(row, o, *w.max.add(row), w.weight::<V>(t, row));
            }
        }
    }
}
