//! What a scheduled call should compute and move: the ledger's closed forms, with the tiles of the chosen kernel.

use suanpan_attn::KvLayout;
use suanpan_base::{DType, ScaleGrain, SeqLen};
use suanpan_ledger::{AttnBooks, Entry, kernel};

use super::{Kernel, Plan};

/// Query tokens of a tile that loads K and V once.
fn tile_q(plan: &Plan, len: SeqLen) -> usize {
    match plan.choice.as_ref().map(|c| c.kernel) {
        Some(Kernel::Forward { shape, pack_gqa, .. }) => {
            let heads = if pack_gqa { plan.problem.heads.group_size() } else { 1 };
            64 * shape.warpgroups as usize / heads
        }
        Some(Kernel::ForwardFp8 { shape, .. }) => 64 * shape.warpgroups as usize,
        _ => len.seqlen_q.max(1),
    }
}

/// Tiles of different query heads load for themselves, but decode's, which hold a whole group.
fn loads_a_group(plan: &Plan) -> u64 {
    match plan.choice.as_ref().map(|c| c.kernel) {
        Some(Kernel::Decode(_) | Kernel::Forward { pack_gqa: true, .. }) | None => 1,
        Some(_) => plan.problem.heads.group_size() as u64,
    }
}

/// What tiles load: quantised pages may have become bf16 rows before.
fn loaded(plan: &Plan) -> DType {
    match plan.choice.as_ref().map(|c| c.kernel) {
        Some(Kernel::Forward { unpacks: Some(_), .. }) => DType::Bf16,
        _ => plan.problem.kv_dtype,
    }
}

pub(super) fn predicted(plan: &Plan, len: SeqLen) -> AttnBooks {
    let p = &plan.problem;
    let books = kernel::attention_books(p.heads, p.mask, len, loaded(plan), tile_q(plan, len));
    AttnBooks { kv_read_bytes: books.kv_read_bytes * loads_a_group(plan), ..books }
}

/// How often K and V of one sequence and kv head come from memory again, as a share of them; counted on one H200 for up to 32 MB of them
/// (docs/cuda-attn-notes.md). Longer ones are read far more often, as blocks drift apart.
///
/// Where later rows see more, the shortest quarter of the tiles comes last and reads its keys again. Else tiles of one head that fall into
/// different rounds of blocks share a reading while it stays in the L2: all of it up to 4 MB, nothing from 24 MB on.
fn reread(plan: &Plan, len: SeqLen) -> f64 {
    let (p, tile, loads) = (&plan.problem, tile_q(plan, len), loads_a_group(plan) as usize);
    let tiles = len.seqlen_q.div_ceil(tile);
    let tiles_a_head = plan.seqs.iter().map(|s| s.seqlen_q.div_ceil(tile)).sum::<usize>();
    let all = tiles_a_head * p.heads.num_kv_heads * loads;
    let sms = plan.device.num_sms as usize;
    let decodes = matches!(plan.choice.as_ref().map(|c| c.kernel), Some(Kernel::Decode(_)) | None);
    if decodes || all <= sms || len.seqlen_k == 0 || p.mask.left.is_some() || p.mask.chunk.is_some() {
        return 0.0;
    }
    if p.mask.right.is_some() {
        let most = |of: fn(&SeqLen) -> usize| plan.seqs.iter().map(of).max().unwrap_or(0);
        let deferred = 2 * most(|s| s.seqlen_q) > most(|s| s.seqlen_k);
        let short = if deferred { tiles / 4 } else { 0 };
        let seen = len.seqlen_k.saturating_sub(len.seqlen_q) + short * tile;
        return if short > 0 { (seen as f64 / len.seqlen_k as f64).min(1.0) } else { 0.0 };
    }
    let row = loaded(plan).bytes_of(p.heads.head_dim_qk + p.heads.head_dim_v);
    let megabytes = (len.seqlen_k * row) as f64 / f64::from(1 << 20);
    let lost = ((megabytes - 4.0) / 20.0).clamp(0.0, 1.0);
    lost * (tiles * loads) as f64 / sms as f64
}

/// Bytes through device memory: q, o, lse, page ids and scales once, K and V that some row sees once and their `reread` share again.
pub(super) fn device(plan: &Plan) -> Entry {
    let p = &plan.problem;
    let mut sum = Entry::default();
    for &len in &plan.seqs {
        let hull = p.mask.visible_hull(len, 0..len.seqlen_q);
        let mut entry = kernel::once(p.heads, hull.len(), len, (p.q_dtype, p.kv_dtype));
        let kv = kernel::kv_write_bytes(p.heads, hull.len(), loaded(plan));
        if loaded(plan) != p.kv_dtype {
            // The rows are written once and read as any others.
            entry.device_write_bytes += kv;
            entry.device_read_bytes += kv;
        }
        entry.device_read_bytes += (reread(plan, len) * kv as f64) as u64;
        if let KvLayout::Paged { page_size } = p.kv {
            entry.device_read_bytes += 4 * hull.len().div_ceil(page_size) as u64;
        }
        if p.kv_scales == ScaleGrain::Token {
            let pair = kernel::scale_pair_bytes(p.heads, p.kv_scale_dtype.bytes_of(1));
            entry.device_read_bytes += pair * (hull.len() * p.heads.num_kv_heads) as u64;
        }
        entry.flops = predicted(plan, len).flops;
        if let Some(Kernel::ForwardFp8 { .. }) = plan.choice.as_ref().map(|c| c.kernel) {
            // q is read in 16 bits, written in 8 beside a scale a row, and read so.
            let rows = (len.seqlen_q * p.heads.num_q_heads) as u64;
            let eight = rows * (p.heads.head_dim_qk as u64 + 4);
            entry.device_read_bytes += eight;
            entry.device_write_bytes += eight;
        }
        sum += entry;
    }
    sum
}
