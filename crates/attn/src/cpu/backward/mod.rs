//! The backward kernel: one key tile against every query tile that sees it, in five register-tiled products.
//!
//! ```text
//! key tile, packed once:  Kᵀ, Vᵀ in panels [width][64], K by rows      query tile (96 rows), copied:  q, d_out by rows
//!   p  = exp(scale · q·Kᵀ − lse)             [row][key]                 dv += pᵀ · d_out    over the tile's rows
//!   ds = scale · p · (d_out·Vᵀ − delta)      [row][key]                 dk += dsᵀ · q
//!                                                                       dq  = ds · K        added in order of key tiles
//! ```
//! Every sum runs over rows or keys in their own order, in tiles at absolute places: bits depend on nobody else.

mod ahead;
mod bend;
mod bias;
mod exact;
mod operands;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod products;
mod rows;
pub(crate) mod task;

use std::hint::spin_loop;
use std::sync::atomic::Ordering;

use suanpan_base::lse::EMPTY_LSE;

use super::seen::{Token, bits_of};
use super::task::Src;
use super::vector::{MAX_LANES, Vector};
use crate::backward::plan::BackwardSeq;
use crate::plan::KEY_BLOCK;
use crate::workspace::TILE_ROWS;
use ahead::Ahead;
use operands::Operands;
use rows::{add_rows, copy_rows, dots, write_rows};
use task::{Place, Scratch, Source, Task, TileRows, Visit, Work};

/// Keys of a panel of K (by rows) that stays in the first-level cache while query rows stream past it.
const CHUNK_KEYS: usize = 128;

/// Runs a task on the instance of its plan's machine.
///
/// # Safety
/// As `Call::run_unit` and `Call::prepare`; the machine was detected or checked on this processor.
pub(crate) unsafe fn run(t: &Task<'_>) {
    use super::detect::Isa;
    // SAFETY: forwarded; `Machine` only holds an instruction set that is available.
    unsafe {
        match t.call.plan.machine.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if t.call.plan.multiplies_pairs() => super::avx512::pairs::run_backward(t),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::avx512::run_backward(t),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => super::avx2::run_backward(t),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => super::neon::run_backward(t),
            _ => super::portable::run_backward(t),
        }
    }
}

/// The algorithm on vectors `V`, in register tiles `N` vectors wide.
///
/// # Safety
/// As `run`, inside an instance of `V`.
#[inline(always)]
pub(crate) unsafe fn run_with<V: Vector, S: Operands<V>, const N: usize>(t: &Task<'_>) {
    // SAFETY: forwarded.
    unsafe {
        match t.work {
            Work::Prepare { seq, tile, kv_head } => prepare::<V, S>(t, seq, tile, kv_head),
            Work::Keys(_) => keys::<V, S, N>(t),
            Work::Bias(_) => bias::key_tile::<V, S, N>(t),
        }
    }
}

/// Negated lse and delta of a query tile's rows; zeros into dq where no row of the tile sees a key.
#[inline(always)]
unsafe fn prepare<V: Vector, S: Operands<V>>(t: &Task<'_>, seq: usize, tile: usize, kv_head: usize) {
    let c = t.call;
    let rows = c.tile_rows(seq, tile, kv_head);
    let unseen = c.plan.hull(c.plan.seqs[seq].len, tile).is_empty();
    let mut row = 0;
    while row < rows.count {
        let count = V::LANES.min(rows.count - row);
        // SAFETY: `check` bounded every (token, head) row; row constants of a tile and kv head are this task's own.
        unsafe {
            // Rows past the last one repeat it.
            let (mut out, mut d_out) = ([0; MAX_LANES], [0; MAX_LANES]);
            for i in 0..MAX_LANES {
                let (token, head) = rows.token_and_head(row + i.min(count - 1));
                (out[i], d_out[i]) = (c.out.at(token, head), c.d_out.at(token, head));
            }
            let d = c.heads.head_dim_v;
            let deltas = match (c.out.src, c.d_out.src) {
                (Src::F32(a), Src::F32(b)) => dots::<V, f32>((a, &out), (b, &d_out), d),
                (Src::Bf16(a), Src::Bf16(b)) => S::bf16_dots((a, &out), (b, &d_out), d),
                (Src::F16(a), Src::F16(b)) => dots::<V, half::f16>((a, &out), (b, &d_out), d),
                _ => unreachable!("out and d_out have q's element type"),
            };
            let mut delta = [0.0f32; MAX_LANES];
            deltas.store(delta.as_mut_ptr());
            for i in 0..count {
                let (token, head) = rows.token_and_head(row + i);
                let place = head * c.plan.total_q + token;
                let lse = c.lse[place];
                // A row whose scores are all -inf has weights 0, like one without keys.
                let negated = if lse == EMPTY_LSE { f32::NEG_INFINITY } else { -lse };
                *c.row_lse.add(rows.first + row + i) = negated;
                *c.row_delta.add(rows.first + row + i) = delta[i] - c.d_lse.map_or(0.0, |d| d[place]);
                if unseen {
                    c.dq.zero_row(token, head, c.heads.head_dim_qk);
                }
            }
        }
        row += count;
    }
}

/// One key tile against its query tiles; writes its rows of dk and dv.
#[inline(always)]
unsafe fn keys<V: Vector, S: Operands<V>, const N: usize>(t: &Task<'_>) {
    let (c, unit) = (t.call, t.unit());
    let len = c.plan.seqs[unit.seq as usize].len;
    // SAFETY: the slot's parts hold a key tile and a query tile; offsets are checked rows.
    unsafe {
        let mut w = t.scratch();
        let (mut loaded, mut finite_keys, mut pairs, mut rows) = (false, true, 0, 0);
        let tiles = len.seqlen_q.div_ceil(c.plan.tile_q());
        for tile in 0..tiles {
            let Some(visit) = t.visit(tile) else { continue };
            let seen = look_up(t, &mut w, &visit);
            if seen == 0 {
                // Bits hide the whole pair of tiles; sums of dq still go on in turn.
                std::ptr::write_bytes(w.dq, 0, visit.rows.count * w.qk_stride);
                add_in_turn::<V>(t, &w, &visit);
                continue;
            }
            if !loaded {
                finite_keys = load_keys::<V, S, N>(t, &mut w);
                clear(&w, unit.keys);
                loaded = true;
            }
            pairs += seen;
            rows += visit.rows.count;
            let finite_rows = load_queries::<V, S>(t, &mut w, &visit);
            let next = if tile + 1 < tiles { t.visit(tile + 1) } else { None };
            let mut ahead = Ahead::new(c, &visit, next.as_ref());
            products::tile_gradients::<V, S, N>(t, &mut w, &visit, &mut ahead, (finite_keys, finite_rows));
            add_in_turn::<V>(t, &w, &visit);
        }
        if !loaded {
            // Nobody sees these keys.
            clear(&w, unit.keys);
        }
        write_rows::<V>(
            &c.dk,
            unit.keys,
            |key| t.key_row(&c.dk, key),
            c.heads.head_dim_qk,
            w.dk,
            w.qk_stride,
        );
        write_rows::<V>(&c.dv, unit.keys, |key| t.key_row(&c.dv, key), c.heads.head_dim_v, w.dv, w.v_stride);
        let counters = &c.counters[unit.seq as usize];
        counters.pairs.fetch_add(pairs, Ordering::Relaxed);
        counters.keys.fetch_add(if loaded { unit.keys as u64 } else { 0 }, Ordering::Relaxed);
        counters.rows.fetch_add(rows as u64, Ordering::Relaxed);
    }
}

/// Zeros into the sums of dk and dv.
#[inline(always)]
unsafe fn clear(w: &Scratch<'_>, keys: usize) {
    let rows = keys.next_multiple_of(TILE_ROWS);
    // SAFETY: the slot's parts hold a key tile.
    unsafe {
        std::ptr::write_bytes(w.dk, 0, rows * w.qk_stride);
        std::ptr::write_bytes(w.dv, 0, rows * w.v_stride);
    }
}

/// Packs the tile's keys and values. Returns true when every key is finite.
///
/// Rows are copied before they are transposed: a copy walks memory in its own order, and so is not kept waiting by it.
#[inline(always)]
unsafe fn load_keys<V: Vector, S: Operands<V>, const N: usize>(t: &Task<'_>, w: &mut Scratch<'_>) -> bool {
    let (c, keys) = (t.call, t.unit().keys);
    let (dqk, dv) = (c.heads.head_dim_qk, c.heads.head_dim_v);
    // SAFETY: forwarded; dv is scratch until it is cleared.
    unsafe {
        std::ptr::write_bytes(w.zeros, 0, dqk.max(dv));
        place_keys(t, &c.v, w.offsets);
        copy_rows::<V>(c.v.src, &w.offsets[..keys], dv, w.dv, w.v_stride);
        place_keys(t, &c.k, w.offsets);
        let finite = copy_rows::<V>(c.k.src, &w.offsets[..keys], dqk, w.k, w.qk_stride);
        S::pack_keys::<N>(t, w);
        finite
    }
}

/// Where the rows of a key tile start.
#[inline(always)]
fn place_keys(t: &Task<'_>, source: &Source, offsets: &mut [usize]) {
    for (key, offset) in offsets[..t.unit().keys].iter_mut().enumerate() {
        *offset = t.key_row(source, key);
    }
}

/// The columns of the key tile that each row sees. Returns the (row, key) pairs.
#[inline(always)]
fn look_up(t: &Task<'_>, w: &mut Scratch<'_>, visit: &Visit) -> u64 {
    let unit = t.unit();
    let (seq, group) = (unit.seq as usize, t.call.heads.group_size());
    let BackwardSeq { len, q_start, .. } = t.call.plan.seqs[seq];
    let padded = visit.rows.count.next_multiple_of(TILE_ROWS);
    w.visible[visit.rows.count..padded].fill(0..0);
    let mut pairs = 0;
    if visit.by_bits {
        for row in 0..visit.rows.count {
            let (i, head) = visit.rows.tile_token_and_head(row);
            let token = Token { len, seq, q_start, token: visit.token + i };
            for (block, bits) in w.bits[row].iter_mut().enumerate() {
                let left = block * KEY_BLOCK;
                let keys = bits_of(&(0..unit.keys.saturating_sub(left).min(KEY_BLOCK)));
                *bits =
                    if keys == 0 { 0 } else { t.call.sight.bits(token, head, unit.key_start + left) & keys };
                pairs += u64::from(bits.count_ones());
            }
            // Products run over the whole tile; what a row does not see is taken out of p and ds.
            w.visible[row] = 0..unit.keys;
        }
        return pairs;
    }
    let clip = |key: usize| key.clamp(unit.key_start, unit.key_start + unit.keys) - unit.key_start;
    for (i, rows) in w.visible[..visit.rows.count].chunks_mut(group).enumerate() {
        let seen = t.call.mask.visible(len, visit.token + i).run;
        let seen = clip(seen.start)..clip(seen.end);
        pairs += (seen.len() * rows.len()) as u64;
        rows.fill(seen);
    }
    pairs
}

/// Copies a query tile's rows of q and d_out, their lse and delta. Returns true when every element is finite.
#[inline(always)]
unsafe fn load_queries<V: Vector, S: Operands<V>>(t: &Task<'_>, w: &mut Scratch<'_>, visit: &Visit) -> bool {
    let (c, rows) = (t.call, &visit.rows);
    let (dqk, dv) = (c.heads.head_dim_qk, c.heads.head_dim_v);
    let padding = rows.count.next_multiple_of(TILE_ROWS) - rows.count;
    // SAFETY: forwarded.
    unsafe {
        let offsets = &mut w.offsets[..rows.count];
        place_rows(&c.q, rows, offsets);
        let mut finite = copy_rows::<V>(c.q.src, offsets, dqk, w.q, w.qk_stride);
        place_rows(&c.d_out, rows, offsets);
        finite &= copy_rows::<V>(c.d_out.src, offsets, dv, w.d_out, w.v_stride);
        std::ptr::copy_nonoverlapping(c.row_lse.add(rows.first), w.lse, rows.count);
        std::ptr::copy_nonoverlapping(c.row_delta.add(rows.first), w.delta, rows.count);
        // Rows beside the tile: whatever their bytes, p is 0.
        std::ptr::write_bytes(w.q.add(rows.count * w.qk_stride), 0, padding * w.qk_stride);
        std::ptr::write_bytes(w.d_out.add(rows.count * w.v_stride), 0, padding * w.v_stride);
        for row in rows.count..rows.count + padding {
            *w.lse.add(row) = f32::NEG_INFINITY;
            *w.delta.add(row) = 0.0;
        }
        S::pair_rows(t, w, rows.count + padding);
        finite
    }
}

/// Where the rows of a query tile start.
#[inline(always)]
fn place_rows(source: &Source, rows: &TileRows, offsets: &mut [usize]) {
    for (row, offset) in offsets.iter_mut().enumerate() {
        let (token, head) = rows.token_and_head(row);
        *offset = source.at(token, head);
    }
}

/// Adds the tile's part of dq when all key tiles before it have added theirs.
#[inline(always)]
unsafe fn add_in_turn<V: Vector>(t: &Task<'_>, w: &Scratch<'_>, visit: &Visit) {
    let turn = &t.call.turns[visit.turn];
    let mut spins = 0u32;
    while turn.load(Ordering::Acquire) != visit.rank {
        // Who is waited for runs already; on a crowded machine it may need this processor.
        spins += 1;
        if spins.is_multiple_of(256) {
            std::thread::yield_now();
        } else {
            spin_loop();
        }
    }
    // SAFETY: it is this task's turn to touch the tile's rows of dq.
    unsafe { add_rows::<V>(t.call, w, visit) };
    turn.store(visit.rank + 1, Ordering::Release);
}
