//! The five products of a pair of tiles, in register tiles of 6 rows × N vectors.

use std::ops::Range;

use super::CHUNK_KEYS;
use super::ahead::Ahead;
use super::bend::bend_row;
use super::exact::pair_gradients;
use super::operands::{Operands, Rows};
use super::task::{Scratch, Task, Visit};
use crate::cpu::products::{Floats, Step};
use crate::cpu::seen::{Runs, bits_of};
use crate::cpu::softmax::Columns;
use crate::cpu::vector::{MAX_LANES, Vector};
use crate::plan::KEY_BLOCK;
use crate::workspace::TILE_ROWS;

/// Calls `f::<V, .., M>(..)` for the `M <= N` vectors that a panel has left.
macro_rules! by_vectors {
    ($vectors:expr, $most:ident, $f:ident::<$V:ident $(, $r:tt)*>($($arg:expr),* $(,)?)) => {
        match $vectors {
            1 => $f::<$V, $($r,)* 1>($($arg),*),
            2 if $most > 2 => $f::<$V, $($r,)* 2>($($arg),*),
            3 if $most > 3 => $f::<$V, $($r,)* 3>($($arg),*),
            _ => $f::<$V, $($r,)* $most>($($arg),*),
        }
    };
}

/// What the rows of a register tile see of the key tile: their hull, and the columns that all of them see.
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    to: usize,
    all_from: usize,
    all_to: usize,
}

/// Everything a query tile and a key tile do to each other: adds to dk and dv, and leaves their part of dq in scratch.
///
/// # Safety
/// As `Call::run_unit`, inside an instance of `V`, on loaded scratch. `finite_keys`, `finite_rows`: no NaN or infinity in K; in q and d_out.
#[inline(always)]
pub(crate) unsafe fn tile_gradients<V: Vector, S: Operands<V>, const N: usize>(
    t: &Task<'_>,
    w: &mut Scratch<'_>,
    visit: &Visit,
    ahead: &mut Ahead,
    (finite_keys, finite_rows): (bool, bool),
) {
    let (rows, keys) = (visit.rows.count, t.unit().keys);
    let (dqk, dv) = (t.call.heads.head_dim_qk, t.call.heads.head_dim_v);
    // SAFETY: forwarded; every pointer below stays inside its part of the slot.
    unsafe {
        look_back(w, rows, keys);
        if t.changes_scores() {
            scores::<V, S, N, true>(t, w, visit, ahead, keys);
        } else {
            scores::<V, S, N, false>(t, w, visit, ahead, keys);
        }
        clear_beside::<V, N>(w, rows, keys);
        if visit.by_bits {
            hide(w, rows, keys);
            if !(finite_keys && finite_rows) {
                return pair_gradients(t, w, visit);
            }
        }
        if S::DEPTH == 2 && finite_keys && finite_rows {
            S::seal(w, rows, keys);
            seen_key_gradients::<V, S, N>(w, ahead, keys, (w.p2, w.d_out2, w.v_stride), (w.dv, dv));
            seen_key_gradients::<V, S, N>(w, ahead, keys, (w.ds2, w.q2, w.qk_stride), (w.dk, dqk));
            return query_gradients::<V, S, N>(w, rows, keys, (w.ds_keys, w.k2), dqk, true);
        }
        key_gradients::<V, N>(w, ahead, rows, keys, (w.p, w.d_out, w.v_stride), (w.dv, dv), finite_rows);
        key_gradients::<V, N>(w, ahead, rows, keys, (w.ds, w.q, w.qk_stride), (w.dk, dqk), finite_rows);
        query_gradients::<V, Floats, N>(w, rows, keys, (w.ds, w.k), dqk, finite_keys);
    }
}

/// p and, in the units of finished scores, ds of a query tile and a key tile; what a row does not see is left as it is.
///
/// # Safety
/// As [`tile_gradients`].
#[inline(always)]
pub(crate) unsafe fn tile_score_gradients<V: Vector, S: Operands<V>, const N: usize>(
    t: &Task<'_>,
    w: &mut Scratch<'_>,
    visit: &Visit,
    ahead: &mut Ahead,
) {
    // SAFETY: forwarded.
    unsafe { scores::<V, S, N, true>(t, w, visit, ahead, t.unit().keys) };
}

/// What the rows of tile `tile` see; `None` when they see nothing.
#[inline(always)]
fn span(w: &Scratch<'_>, rows: usize, tile: usize) -> Option<Span> {
    let first = &w.visible[tile * TILE_ROWS];
    let last = &w.visible[(tile * TILE_ROWS + TILE_ROWS - 1).min(rows - 1)];
    let span = Span { from: first.start, to: last.end, all_from: last.start, all_to: first.end };
    (span.from < span.to).then_some(span)
}

/// p and ds for every tile and panel with a visible pair. Panels outside, so that one stays close while tiles stream.
#[inline(always)]
unsafe fn scores<V: Vector, S: Operands<V>, const N: usize, const CHANGED: bool>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    visit: &Visit,
    ahead: &mut Ahead,
    keys: usize,
) {
    let (c, panel, rows) = (t.call, N * V::LANES, visit.rows.count);
    let dropped = c.dropout.as_ref().map(|dropout| dropout.factor_kept());
    let (q, d_out) = (S::queries(w, c.heads.head_dim_qk), S::out_gradients(w, c.heads.head_dim_v));
    let mut left = 0;
    while left < keys {
        for gradients in [false, true] {
            for tile in 0..rows.div_ceil(TILE_ROWS) {
                let Some(span) = span(w, rows, tile) else { continue };
                if span.from >= left + panel || span.to <= left {
                    continue;
                }
                ahead.ask::<V>();
                let vectors = (span.to - left).min(panel).div_ceil(V::LANES);
                let masked = span.all_from > left || span.all_to < left + vectors * V::LANES;
                let row = tile * TILE_ROWS;
                // SAFETY: within the slot's parts.
                unsafe {
                    if gradients {
                        let panel_v = w.v_panels.add(left * d_out.steps);
                        if CHANGED {
                            by_vectors!(
                                vectors,
                                N,
                                bent_gradient_tile::<V, S>(
                                    w, row, d_out, panel_v, panel, left, dropped, masked
                                )
                            );
                            continue;
                        }
                        by_vectors!(
                            vectors,
                            N,
                            gradient_tile::<V, S>(w, row, d_out, panel_v, panel, left, c.scale, masked)
                        );
                    } else {
                        let panel_k = w.k_panels.add(left * q.steps);
                        if CHANGED {
                            by_vectors!(
                                vectors,
                                N,
                                score_tile::<V, S>(w, row, q, panel_k, panel, left, c.scale)
                            );
                            let (from, to) = (left, left + vectors * V::LANES);
                            for row in row..row + TILE_ROWS {
                                let seen = &w.visible[row];
                                let cols =
                                    Columns { from, to, lo: seen.start.max(from), hi: seen.end.min(to) };
                                if row < rows {
                                    bend_row::<V>(t, w, visit, row, cols);
                                } else {
                                    std::ptr::write_bytes(w.p.add(row * w.p_stride + from), 0, to - from);
                                    std::ptr::write_bytes(w.ds.add(row * w.p_stride + from), 0, to - from);
                                }
                            }
                            continue;
                        }
                        by_vectors!(
                            vectors,
                            N,
                            weight_tile::<V, S>(w, row, q, panel_k, panel, left, c.scale, masked)
                        );
                    }
                }
            }
        }
        left += panel;
    }
}

/// R rows × M vectors of a product, `steps` deep. a is read by rows (`a_stride` from row to row, steps side by side) or by
/// columns (rows side by side, `a_stride` from step to step); b is `b_stride` floats from step to step.
#[inline(always)]
unsafe fn product<V: Vector, S: Step<V>, const R: usize, const M: usize, const BY_ROWS: bool>(
    mut a: *const f32,
    a_stride: usize,
    mut b: *const f32,
    b_stride: usize,
    steps: usize,
) -> [[V; M]; R] {
    // SAFETY: the caller's tiles.
    unsafe {
        let mut acc = [[V::splat(0.0); M]; R];
        for _ in 0..steps {
            let mut x = [V::splat(0.0); M];
            for m in 0..M {
                x[m] = V::load(b.add(m * V::LANES));
            }
            for r in 0..R {
                let y = V::splat(*a.add(if BY_ROWS { r * a_stride } else { r }));
                for m in 0..M {
                    acc[r][m] = S::multiply_add(y, x[m], acc[r][m]);
                }
            }
            a = a.add(if BY_ROWS { 1 } else { a_stride });
            b = b.add(b_stride);
        }
        acc
    }
}

/// 6 rows × M vectors of p.
#[inline(always)]
unsafe fn weight_tile<V: Vector, S: Step<V>, const M: usize>(
    w: &Scratch<'_>,
    row: usize,
    a: Rows,
    k: *const f32,
    panel: usize,
    left: usize,
    scale: f32,
    masked: bool,
) {
    // SAFETY: within the slot's parts.
    unsafe {
        let mut acc = product::<V, S, TILE_ROWS, M, true>(a.at(row), a.stride, k, panel, a.steps);
        let (scale, zero, lowest) = (V::splat(scale), V::splat(0.0), V::splat(f32::NEG_INFINITY));
        let to_log2 = V::splat(std::f32::consts::LOG2_E);
        for r in 0..TILE_ROWS {
            let lse = V::splat(*w.lse.add(row + r));
            for m in 0..M {
                // The difference first, in the units of lse, then powers of two: what rounds is small where weights are large.
                // A weight is at most 1 however lse was rounded. The bound stands first: NaN comes through.
                acc[r][m] = zero.min(acc[r][m].fma(scale, lse)).mul(to_log2);
            }
            if masked {
                let seen = &w.visible[row + r];
                for m in 0..M {
                    let (lo, hi) = within(seen, left + m * V::LANES);
                    acc[r][m] = acc[r][m].select(lo, hi, lowest);
                }
            }
            for m in 0..M {
                acc[r][m].exp2().store(w.p.add((row + r) * w.p_stride + left + m * V::LANES));
            }
        }
    }
}

/// 6 rows × M vectors of ds, from p.
#[inline(always)]
unsafe fn gradient_tile<V: Vector, S: Step<V>, const M: usize>(
    w: &Scratch<'_>,
    row: usize,
    a: Rows,
    v: *const f32,
    panel: usize,
    left: usize,
    scale: f32,
    masked: bool,
) {
    // SAFETY: within the slot's parts.
    unsafe {
        let acc = product::<V, S, TILE_ROWS, M, true>(a.at(row), a.stride, v, panel, a.steps);
        let (scale, zero) = (V::splat(scale), V::splat(0.0));
        for r in 0..TILE_ROWS {
            let delta = V::splat(*w.delta.add(row + r));
            for m in 0..M {
                let at = (row + r) * w.p_stride + left + m * V::LANES;
                let p = V::load(w.p.add(at));
                let mut ds = acc[r][m].sub(delta).mul(p.mul(scale));
                if masked {
                    let (lo, hi) = within(&w.visible[row + r], left + m * V::LANES);
                    ds = ds.select(lo, hi, zero);
                }
                ds.store(w.ds.add(at));
            }
        }
    }
}

/// 6 rows × M vectors of plain scores, into p.
#[inline(always)]
unsafe fn score_tile<V: Vector, S: Step<V>, const M: usize>(
    w: &Scratch<'_>,
    row: usize,
    a: Rows,
    k: *const f32,
    panel: usize,
    left: usize,
    scale: f32,
) {
    // SAFETY: within the slot's parts.
    unsafe {
        let acc = product::<V, S, TILE_ROWS, M, true>(a.at(row), a.stride, k, panel, a.steps);
        for r in 0..TILE_ROWS {
            for m in 0..M {
                let at = (row + r) * w.p_stride + left + m * V::LANES;
                acc[r][m].mul(V::splat(scale)).store(w.p.add(at));
            }
        }
    }
}

/// 6 rows × M vectors of ds, from `weight · slope` in its place; `kept` is the factor of weights that dropout kept.
#[inline(always)]
unsafe fn bent_gradient_tile<V: Vector, S: Step<V>, const M: usize>(
    w: &Scratch<'_>,
    row: usize,
    a: Rows,
    v: *const f32,
    panel: usize,
    left: usize,
    kept: Option<f32>,
    masked: bool,
) {
    // SAFETY: within the slot's parts.
    unsafe {
        let acc = product::<V, S, TILE_ROWS, M, true>(a.at(row), a.stride, v, panel, a.steps);
        let zero = V::splat(0.0);
        for r in 0..TILE_ROWS {
            let delta = V::splat(*w.delta.add(row + r));
            for m in 0..M {
                let at = (row + r) * w.p_stride + left + m * V::LANES;
                let mut dp = acc[r][m];
                if let Some(kept) = kept {
                    // Dropped where p is 0; where it is 0 for another reason, the weight in ds is 0 too.
                    dp = zero.if_less(V::load(w.p.add(at)), dp.mul(V::splat(kept)), zero);
                }
                let mut ds = dp.sub(delta).mul(V::load(w.ds.add(at)));
                if masked {
                    let (lo, hi) = within(&w.visible[row + r], left + m * V::LANES);
                    ds = ds.select(lo, hi, zero);
                }
                ds.store(w.ds.add(at));
            }
        }
    }
}

/// The seen columns, counted from column `left`.
#[inline(always)]
fn within(seen: &Range<usize>, left: usize) -> (usize, usize) {
    (seen.start.saturating_sub(left), seen.end.saturating_sub(left))
}

/// Zeros in p and ds beside the columns that `scores` computed: a group of 6 keys may reach over their edge.
#[inline(always)]
unsafe fn clear_beside<V: Vector, const N: usize>(w: &Scratch<'_>, rows: usize, keys: usize) {
    let panel = N * V::LANES;
    for tile in 0..rows.div_ceil(TILE_ROWS) {
        let Some(span) = span(w, rows, tile) else { continue };
        let from = span.from / panel * panel;
        let last = (span.to - 1) / panel * panel;
        let to = last + (span.to - last).next_multiple_of(V::LANES);
        if from == 0 && to >= keys.next_multiple_of(TILE_ROWS) {
            continue;
        }
        for row in tile * TILE_ROWS..(tile + 1) * TILE_ROWS {
            for x in [w.p, w.ds] {
                // SAFETY: rows hold a line more than the tile's keys.
                unsafe {
                    let x = x.add(row * w.p_stride);
                    if from > 0 {
                        std::ptr::write_bytes(x.add(from - from.min(MAX_LANES)), 0, from.min(MAX_LANES));
                    }
                    std::ptr::write_bytes(x.add(to), 0, MAX_LANES);
                }
            }
        }
    }
}

/// c += aᵀ·b over the tile's rows, for every group of 6 keys: (p, d_out) gives dv, (ds, q) gives dk.
#[inline(always)]
unsafe fn key_gradients<V: Vector, const N: usize>(
    w: &Scratch<'_>,
    ahead: &mut Ahead,
    rows: usize,
    keys: usize,
    (a, b, stride): (*const f32, *const f32, usize),
    (c, d): (*mut f32, usize),
    finite: bool,
) {
    let panel = N * V::LANES;
    let mut left = 0;
    while left < d {
        let vectors = (d - left).min(panel).div_ceil(V::LANES);
        for group in 0..keys.div_ceil(TILE_ROWS) {
            let (key, seen) = (group * TILE_ROWS, &w.seen_by[group]);
            ahead.ask::<V>();
            // SAFETY: within the slot's parts.
            unsafe {
                let (a, b, c) = (a.add(key), b.add(left), c.add(key * stride + left));
                if finite || all_see(w, seen, key..(key + TILE_ROWS).min(keys)) {
                    let a = a.add(seen.start * w.p_stride);
                    let b = b.add(seen.start * stride);
                    let steps = seen.len();
                    by_vectors!(
                        vectors,
                        N,
                        add_product::<V, Floats, false, TILE_ROWS>(
                            a, w.p_stride, b, stride, steps, c, stride
                        )
                    );
                    continue;
                }
                // A weight of 0 must not let a row through that may not see the key: 0 · NaN is NaN.
                for i in 0..TILE_ROWS.min(keys - key) {
                    let seen = rows_that_see(w, rows, key + i..key + i + 1, seen.start..seen.start);
                    let (a, c) = (a.add(seen.start * w.p_stride + i), c.add(i * stride));
                    let b = b.add(seen.start * stride);
                    let steps = seen.len();
                    by_vectors!(
                        vectors,
                        N,
                        add_product::<V, Floats, false, 1>(a, w.p_stride, b, stride, steps, c, stride)
                    );
                }
            }
        }
        left += panel;
    }
}

/// The same where everything is finite, in steps of pairs of rows: the partner of a row that sees the keys has weight 0 where it does not.
#[inline(always)]
unsafe fn seen_key_gradients<V: Vector, S: Step<V>, const N: usize>(
    w: &Scratch<'_>,
    ahead: &mut Ahead,
    keys: usize,
    (a, b, stride): (*const f32, *const f32, usize),
    (c, d): (*mut f32, usize),
) {
    let panel = N * V::LANES;
    let mut left = 0;
    while left < d {
        let vectors = (d - left).min(panel).div_ceil(V::LANES);
        for group in 0..keys.div_ceil(TILE_ROWS) {
            let (key, seen) = (group * TILE_ROWS, &w.seen_by[group]);
            ahead.ask::<V>();
            if seen.is_empty() {
                continue;
            }
            let (first, end) = (seen.start / S::DEPTH, seen.end.div_ceil(S::DEPTH));
            // SAFETY: within the slot's parts.
            unsafe {
                let (a, b) = (a.add(first * w.p_stride + key), b.add(first * stride + left));
                let (c, steps) = (c.add(key * stride + left), end - first);
                by_vectors!(
                    vectors,
                    N,
                    add_product::<V, S, false, TILE_ROWS>(a, w.p_stride, b, stride, steps, c, stride)
                );
            }
        }
        left += panel;
    }
}

/// Zeros in p and ds where a row's bits say that it does not see the key.
fn hide(w: &Scratch<'_>, rows: usize, keys: usize) {
    for row in 0..rows {
        for (block, &bits) in w.bits[row].iter().enumerate() {
            let left = block * KEY_BLOCK;
            for col in Runs(!bits & bits_of(&(0..keys.saturating_sub(left).min(KEY_BLOCK)))).flatten() {
                for x in [w.p, w.ds] {
                    // SAFETY: a column of the key tile, in a row of the query tile.
                    unsafe { *x.add(row * w.p_stride + left + col) = 0.0 };
                }
            }
        }
    }
}

/// Looks up which rows see each group of 6 keys.
#[inline(always)]
fn look_back(w: &mut Scratch<'_>, rows: usize, keys: usize) {
    let mut seen = 0..0;
    for group in 0..keys.div_ceil(TILE_ROWS) {
        let key = group * TILE_ROWS;
        seen = rows_that_see(w, rows, key..(key + TILE_ROWS).min(keys), seen);
        w.seen_by[group] = seen.clone();
    }
}

/// Rows that see at least one of `keys`, walking on from bounds that are not past them (those of keys before): starts and ends of what
/// rows see grow with the row, and so do starts and ends of which rows see a key.
#[inline(always)]
fn rows_that_see(w: &Scratch<'_>, rows: usize, keys: Range<usize>, before: Range<usize>) -> Range<usize> {
    let Range { mut start, mut end } = before;
    while start < rows && w.visible[start].end <= keys.start {
        start += 1;
    }
    end = end.max(start);
    while end < rows && w.visible[end].start < keys.end {
        end += 1;
    }
    start..end
}

/// Whether every row of `rows` sees all of `keys`.
#[inline(always)]
fn all_see(w: &Scratch<'_>, rows: &Range<usize>, keys: Range<usize>) -> bool {
    rows.is_empty() || w.visible[rows.end - 1].start <= keys.start && w.visible[rows.start].end >= keys.end
}

/// The part of dq of every tile of rows: ds·K, in chunks of keys.
#[inline(always)]
unsafe fn query_gradients<V: Vector, S: Step<V>, const N: usize>(
    w: &Scratch<'_>,
    rows: usize,
    keys: usize,
    (ds, k): (*const f32, *const f32),
    d: usize,
    finite: bool,
) {
    let (panel, stride) = (N * V::LANES, w.qk_stride);
    // SAFETY: within the slot's parts.
    unsafe { std::ptr::write_bytes(w.dq, 0, rows.next_multiple_of(TILE_ROWS) * stride) };
    let mut chunk = 0;
    while chunk < keys {
        let mut left = 0;
        while left < d {
            let vectors = (d - left).min(panel).div_ceil(V::LANES);
            for tile in 0..rows.div_ceil(TILE_ROWS) {
                let Some(span) = span(w, rows, tile) else { continue };
                let all_visible = (span.from, span.to) == (span.all_from, span.all_to);
                // SAFETY: within the slot's parts.
                unsafe {
                    if finite || all_visible {
                        let row = tile * TILE_ROWS;
                        let (from, to) = (span.from.max(chunk), span.to.min(chunk + CHUNK_KEYS));
                        if from >= to {
                            continue;
                        }
                        let (from, steps) = (from / S::DEPTH, to.div_ceil(S::DEPTH) - from / S::DEPTH);
                        let a = ds.add(row * w.p_stride + from);
                        let b = k.add(from * stride + left);
                        let c = w.dq.add(row * stride + left);
                        by_vectors!(
                            vectors,
                            N,
                            add_product::<V, S, true, TILE_ROWS>(a, w.p_stride, b, stride, steps, c, stride)
                        );
                        continue;
                    }
                    for row in tile * TILE_ROWS..((tile + 1) * TILE_ROWS).min(rows) {
                        // Exactly the keys that the row sees: 0 · NaN is NaN.
                        let seen = &w.visible[row];
                        let (from, to) = (seen.start.max(chunk), seen.end.min(chunk + CHUNK_KEYS));
                        let steps = to.saturating_sub(from);
                        let a = w.ds.add(row * w.p_stride + from);
                        let b = w.k.add(from * stride + left);
                        let c = w.dq.add(row * stride + left);
                        by_vectors!(
                            vectors,
                            N,
                            add_product::<V, Floats, true, 1>(a, w.p_stride, b, stride, steps, c, stride)
                        );
                    }
                }
            }
            left += panel;
        }
        chunk += CHUNK_KEYS;
    }
}

/// c += a·b; a lies by rows or (`BY_ROWS` false) by columns.
#[inline(always)]
unsafe fn add_product<V: Vector, S: Step<V>, const BY_ROWS: bool, const R: usize, const M: usize>(
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
    steps: usize,
    c: *mut f32,
    c_stride: usize,
) {
    // SAFETY: the caller's tiles.
    unsafe {
        let acc = product::<V, S, R, M, BY_ROWS>(a, a_stride, b, b_stride, steps);
        add_tile(c, c_stride, &acc);
    }
}

#[inline(always)]
unsafe fn add_tile<V: Vector, const R: usize, const M: usize>(c: *mut f32, stride: usize, acc: &[[V; M]; R]) {
    for r in 0..R {
        for m in 0..M {
            // SAFETY: the caller's tile.
            unsafe {
                let at = c.add(r * stride + m * V::LANES);
                V::load(at).add(acc[r][m]).store(at);
            }
        }
    }
}
