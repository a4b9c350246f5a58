//! What a scheduled call should compute and move: the ledger's closed forms, with the tiles of the chosen kernel.

use suanpan_attn::KvLayout;
use suanpan_base::{ScaleGrain, SeqLen};
use suanpan_ledger::{AttnBooks, Entry, kernel};

use super::{Kernel, Plan};
use crate::attention::forward::L2_SECTION_BYTES;

/// Query tokens of a tile that loads K and V once.
fn tile_q(plan: &Plan, len: SeqLen) -> usize {
    match plan.choice.as_ref().map(|c| c.kernel) {
        Some(Kernel::Forward { shape, .. }) => 64 * shape.warpgroups as usize,
        Some(Kernel::ForwardFp8 { shape, .. }) => 64 * shape.warpgroups as usize,
        _ => len.seqlen_q.max(1),
    }
}

/// Tiles of different query heads load for themselves, but decode's, which hold a whole group.
fn loads_a_group(plan: &Plan) -> u64 {
    match plan.choice.as_ref().map(|c| c.kernel) {
        Some(Kernel::Decode(_)) | None => 1,
        Some(_) => plan.problem.heads.group_size() as u64,
    }
}

pub(super) fn predicted(plan: &Plan, len: SeqLen) -> AttnBooks {
    let p = &plan.problem;
    let books = kernel::attention_books(p.heads, p.mask, len, p.kv_dtype, tile_q(plan, len));
    AttnBooks { kv_read_bytes: books.kv_read_bytes * loads_a_group(plan), ..books }
}

/// Times that K and V of one sequence and kv head come from memory: once while they fit in the L2 beside those of their section; else
/// once a round of blocks, which go through them together.
fn passes(plan: &Plan, len: SeqLen) -> u64 {
    let h = plan.problem.heads;
    let one = h.head_dim_qk + h.head_dim_v;
    let unit_bytes = plan.problem.kv_dtype.bytes_of(len.seqlen_k * one) as u64;
    if unit_bytes <= L2_SECTION_BYTES || loads_a_group(plan) == 1 && tile_q(plan, len) >= len.seqlen_q {
        return 1;
    }
    let tiles = len.seqlen_q.div_ceil(tile_q(plan, len)) as u64 * loads_a_group(plan);
    tiles.div_ceil(u64::from(plan.device.num_sms)).max(1)
}

/// Bytes through device memory: q, o, lse, page ids and scales once, K and V that some row sees `passes` times.
pub(super) fn device(plan: &Plan) -> Entry {
    let p = &plan.problem;
    let mut sum = Entry::default();
    for &len in &plan.seqs {
        let hull = p.mask.visible_hull(len, 0..len.seqlen_q);
        let mut entry = kernel::once(p.heads, hull.len(), len, (p.q_dtype, p.kv_dtype));
        entry.device_read_bytes +=
            (passes(plan, len) - 1) * kernel::kv_write_bytes(p.heads, hull.len(), p.kv_dtype);
        if let KvLayout::Paged { page_size } = p.kv {
            entry.device_read_bytes += 4 * hull.len().div_ceil(page_size) as u64;
        }
        if p.kv_scales == ScaleGrain::Token {
            let pair = kernel::scale_pair_bytes(p.heads, p.kv_scale_dtype.bytes_of(1));
            entry.device_read_bytes += pair * (hull.len() * p.heads.num_kv_heads) as u64;
        }
        entry.flops = predicted(plan, len).flops;
        if let Some(Kernel::ForwardFp8 { .. }) = plan.choice.as_ref().map(|c| c.kernel) {
            // q is read twice in 16 bits, for its maximum and to be rounded, and written and read in 8.
            let rows = (len.seqlen_q * p.heads.num_q_heads * p.heads.head_dim_qk) as u64;
            entry.device_read_bytes += 3 * rows;
            entry.device_write_bytes += rows;
        }
        sum += entry;
    }
    sum
}
