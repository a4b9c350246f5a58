//! Ledger 1: what one attention call should compute and move, plain and tiled.
//!
//! Plain attention materialises scores and probabilities ([num_q_heads, seqlen_q, seqlen_k] each) in device memory;
//! tiled attention (FlashAttention, arXiv 2205.14135, section 3.2) reads K and V once per query tile and writes only o and lse.

use std::ops::Range;

use suanpan_base::{DType, HeadShape, Mask, ScaleGrain, SeqLen};

use crate::entry::{AttnBooks, BackwardBooks, Entry};

/// Forward FLOPs of `pairs` visible pairs (already summed over query heads): QKᵀ and P·V, two each per element.
pub const fn forward_flops(pairs: u64, heads: HeadShape) -> u64 {
    2 * pairs * (heads.head_dim_qk + heads.head_dim_v) as u64
}

/// Key and value bytes of `tokens` tokens of one layer.
pub const fn kv_write_bytes(heads: HeadShape, tokens: usize, kv_dtype: DType) -> u64 {
    kv_dtype.bytes_of(tokens * heads.num_kv_heads * heads.kv_width()) as u64
}

/// Bytes of one scale of a key and of its partner of the value; of the key's alone where it holds the value. A scale has `scale_bytes`.
pub const fn scale_pair_bytes(heads: HeadShape, scale_bytes: usize) -> u64 {
    scale_bytes as u64 * if heads.values_in_keys { 1 } else { 2 }
}

/// Bytes of the scales that the walk of [`attention_books`] reads: keys go by in blocks that stand on multiples of `key_block`, and each run
/// of keys of a block that share a scale reads it once, for each tile and kv head.
///
/// `page_size` counts only where scales belong to pages; pages start at the sequence's first key. A scale has `scale_bytes`.
pub fn scale_read_bytes(
    heads: HeadShape,
    mask: Mask,
    len: SeqLen,
    (scales, page_size, scale_bytes): (ScaleGrain, usize, usize),
    (tile_q, key_block): (usize, usize),
) -> u64 {
    assert!(tile_q >= 1 && key_block >= 1, "a tile holds at least one token");
    let mut pairs = 0u64;
    for row in (0..len.seqlen_q).step_by(tile_q) {
        let hull = mask.visible_hull(len, row..(row + tile_q).min(len.seqlen_q));
        for mut keys in hull.pieces() {
            while !keys.is_empty() {
                let end = (keys.start / key_block * key_block + key_block).min(keys.end);
                pairs += scale_runs(scales, page_size, keys.start..end);
                keys.start = end;
            }
        }
    }
    pairs * heads.num_kv_heads as u64 * scale_pair_bytes(heads, scale_bytes)
}

/// Runs of the keys `keys` of a block that share a scale.
pub fn scale_runs(scales: ScaleGrain, page_size: usize, keys: Range<usize>) -> u64 {
    match scales {
        _ if keys.is_empty() => 0,
        ScaleGrain::None => 0,
        ScaleGrain::Tensor | ScaleGrain::Head => 1,
        ScaleGrain::Token => keys.len() as u64,
        ScaleGrain::Page => ((keys.end - 1) / page_size - keys.start / page_size + 1) as u64,
    }
}

/// Books of one sequence in one call of a kernel that walks queries in tiles of `tile_q` tokens.
///
/// Each tile loads the keys and values that at least one of its rows can see, once per kv head (the query heads of a
/// group share the load). `kv_write_bytes` is 0: appending to the cache is not the kernel's.
pub fn attention_books(
    heads: HeadShape,
    mask: Mask,
    len: SeqLen,
    kv_dtype: DType,
    tile_q: usize,
) -> AttnBooks {
    assert!(tile_q >= 1, "a query tile holds at least one token");
    let pairs = mask.visible_pairs(len) * heads.num_q_heads as u64;
    let mut keys_loaded = 0u64;
    let mut row = 0;
    while row < len.seqlen_q {
        let end = (row + tile_q).min(len.seqlen_q);
        keys_loaded += mask.visible_hull(len, row..end).len() as u64;
        row = end;
    }
    let per_key = kv_write_bytes(heads, 1, kv_dtype);
    AttnBooks {
        pairs,
        flops: forward_flops(pairs, heads),
        kv_read_bytes: keys_loaded * per_key,
        kv_write_bytes: 0,
    }
}

/// The same where bits narrow the mask: `seen(query head, row, key)` says which of the mask's pairs count. Keys are loaded in blocks of
/// `tile.1` that stand on multiples of it; a tile of `tile.0` tokens loads those in which the kv head's rows see a key, and their scales.
/// O(pairs).
pub fn attention_books_seen(
    heads: HeadShape,
    mask: Mask,
    len: SeqLen,
    (kv_dtype, scales, page_size, scale_bytes): (DType, ScaleGrain, usize, usize),
    (tile_q, key_block): (usize, usize),
    seen: impl Fn(usize, usize, usize) -> bool,
) -> AttnBooks {
    assert!(tile_q >= 1 && key_block >= 1, "a tile holds at least one token");
    let group = heads.group_size();
    let (mut pairs, mut keys_loaded, mut scale_pairs) = (0u64, 0u64, 0u64);
    for (start, kv_head) in
        (0..len.seqlen_q).step_by(tile_q).flat_map(|s| (0..heads.num_kv_heads).map(move |h| (s, h)))
    {
        let rows = start..(start + tile_q).min(len.seqlen_q);
        let hull = mask.visible_hull(len, rows.clone());
        let mut touched = vec![false; len.seqlen_k.div_ceil(key_block)];
        for (row, head) in
            rows.flat_map(|row| (kv_head * group..(kv_head + 1) * group).map(move |h| (row, h)))
        {
            for key in mask.visible(len, row).keys().filter(|&key| seen(head, row, key)) {
                pairs += 1;
                touched[key / key_block] = true;
            }
        }
        for block in (0..touched.len()).filter(|&block| touched[block]) {
            for keys in hull.within(&(block * key_block..(block + 1) * key_block)) {
                keys_loaded += keys.len() as u64;
                scale_pairs += scale_runs(scales, page_size, keys);
            }
        }
    }
    let per_key = kv_write_bytes(heads, 1, kv_dtype) / heads.num_kv_heads as u64;
    AttnBooks {
        pairs,
        flops: forward_flops(pairs, heads),
        kv_read_bytes: keys_loaded * per_key + scale_pairs * scale_pair_bytes(heads, scale_bytes),
        kv_write_bytes: 0,
    }
}

/// Backward FLOPs of `pairs` visible pairs (already summed over query heads): five products, of which scores, dQ and dK are
/// head_dim_qk deep and dP and dV head_dim_v (FlashAttention-2, arXiv 2307.08691, algorithm 2).
pub const fn backward_flops(pairs: u64, heads: HeadShape) -> u64 {
    2 * pairs * (3 * heads.head_dim_qk + 2 * heads.head_dim_v) as u64
}

/// Books of one sequence in one backward call that walks keys in tiles of `tile_k` tokens and, for each, queries in tiles of
/// `tile_q` tokens. A key tile that no query tile sees loads nothing.
pub fn backward_books(
    heads: HeadShape,
    mask: Mask,
    len: SeqLen,
    (q_dtype, kv_dtype): (DType, DType),
    tile_q: usize,
    tile_k: usize,
) -> BackwardBooks {
    assert!(tile_q >= 1 && tile_k >= 1, "a tile holds at least one token");
    let pairs = mask.visible_pairs(len) * heads.num_q_heads as u64;
    let mut touched = vec![false; len.seqlen_k.div_ceil(tile_k)];
    let mut tokens_loaded = 0u64;
    for start in (0..len.seqlen_q).step_by(tile_q) {
        let end = (start + tile_q).min(len.seqlen_q);
        let hull = mask.visible_hull(len, start..end);
        for tile in hull.tiles(tile_k).into_iter().flatten() {
            touched[tile] = true;
            tokens_loaded += (end - start) as u64;
        }
    }
    let keys = |tile: usize| tile_k.min(len.seqlen_k - tile * tile_k) as u64;
    let keys_loaded: u64 = (0..touched.len()).filter(|&tile| touched[tile]).map(keys).sum();
    let q_bytes = q_dtype.bytes_of(heads.num_q_heads * (heads.head_dim_qk + heads.head_dim_v));
    BackwardBooks {
        pairs,
        flops: backward_flops(pairs, heads),
        kv_read_bytes: keys_loaded * kv_write_bytes(heads, 1, kv_dtype),
        q_read_bytes: tokens_loaded * q_bytes as u64,
    }
}

/// [`backward_books`] where bits narrow the mask, as for [`attention_books_seen`]. A pair of tiles without a visible pair loads nothing.
pub fn backward_books_seen(
    heads: HeadShape,
    mask: Mask,
    len: SeqLen,
    (q_dtype, kv_dtype): (DType, DType),
    (tile_q, tile_k): (usize, usize),
    seen: impl Fn(usize, usize, usize) -> bool,
) -> BackwardBooks {
    assert!(tile_q >= 1 && tile_k >= 1, "a tile holds at least one token");
    let (group, tiles_k) = (heads.group_size(), len.seqlen_k.div_ceil(tile_k));
    let (mut pairs, mut tokens_loaded, mut keys_loaded) = (0u64, 0u64, 0u64);
    for kv_head in 0..heads.num_kv_heads {
        let mut loaded = vec![false; tiles_k];
        for start in (0..len.seqlen_q).step_by(tile_q) {
            let rows = start..(start + tile_q).min(len.seqlen_q);
            let mut touched = vec![false; tiles_k];
            for (row, head) in
                rows.clone().flat_map(|r| (kv_head * group..(kv_head + 1) * group).map(move |h| (r, h)))
            {
                for key in mask.visible(len, row).keys().filter(|&key| seen(head, row, key)) {
                    pairs += 1;
                    touched[key / tile_k] = true;
                    loaded[key / tile_k] = true;
                }
            }
            tokens_loaded += (touched.iter().filter(|t| **t).count() * rows.len() * group) as u64;
        }
        let keys = |tile: usize| tile_k.min(len.seqlen_k - tile * tile_k) as u64;
        keys_loaded += (0..tiles_k).filter(|&tile| loaded[tile]).map(keys).sum::<u64>();
    }
    BackwardBooks {
        pairs,
        flops: backward_flops(pairs, heads),
        kv_read_bytes: keys_loaded * kv_write_bytes(heads, 1, kv_dtype) / heads.num_kv_heads as u64,
        q_read_bytes: tokens_loaded * q_dtype.bytes_of(heads.head_dim_qk + heads.head_dim_v) as u64,
    }
}

/// Entry of one sequence under tiled attention: K and V per tile, q once, o once, lse in f32.
pub fn tiled(heads: HeadShape, mask: Mask, len: SeqLen, dtype: DType, tile_q: usize) -> Entry {
    let books = attention_books(heads, mask, len, dtype, tile_q);
    let q_rows = (len.seqlen_q * heads.num_q_heads) as u64;
    Entry {
        flops: books.flops,
        device_read_bytes: books.kv_read_bytes + q_rows * dtype.bytes_of(heads.head_dim_qk) as u64,
        device_write_bytes: q_rows * (dtype.bytes_of(heads.head_dim_v) + 4) as u64,
        link_bytes: 0,
    }
}

/// Entry of one sequence where a cache behind the tiles holds what they share: `keys` keys and values, q, o and lse once each.
pub fn once(heads: HeadShape, keys: usize, len: SeqLen, (q_dtype, kv_dtype): (DType, DType)) -> Entry {
    let q_rows = len.seqlen_q * heads.num_q_heads;
    let q_bytes = q_dtype.bytes_of(q_rows * heads.head_dim_qk) as u64;
    Entry {
        flops: 0,
        device_read_bytes: kv_write_bytes(heads, keys, kv_dtype) + q_bytes,
        device_write_bytes: (q_dtype.bytes_of(q_rows * heads.head_dim_v) + 4 * q_rows) as u64,
        link_bytes: 0,
    }
}

/// What plain attention puts into device memory for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Plain {
    /// Elements of the score matrix, all heads.
    pub scores: u64,
    /// Bytes of one copy of it in the call's element type.
    pub score_copy_bytes: u64,
    /// The whole call: scores written, read and rewritten as probabilities, read again for P·V.
    pub entry: Entry,
}

/// Plain attention: every score is computed and stored, masked ones included.
pub fn plain(heads: HeadShape, len: SeqLen, dtype: DType) -> Plain {
    let scores = heads.num_q_heads as u64 * len.seqlen_q as u64 * len.seqlen_k as u64;
    let copy = dtype.bytes_of(scores as usize) as u64;
    let q_rows = (len.seqlen_q * heads.num_q_heads) as u64;
    let kv = kv_write_bytes(heads, len.seqlen_k, dtype);
    let q_bytes = q_rows * dtype.bytes_of(heads.head_dim_qk) as u64;
    let o_bytes = q_rows * dtype.bytes_of(heads.head_dim_v) as u64;
    let entry = Entry {
        flops: forward_flops(scores, heads),
        device_read_bytes: q_bytes + kv + 2 * copy,
        device_write_bytes: 2 * copy + o_bytes,
        link_bytes: 0,
    };
    Plain { scores, score_copy_bytes: copy, entry }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_16k_is_half_a_gib_a_copy() {
        let p = plain(HeadShape::new(1, 1, 128), SeqLen::new(16384, 16384), DType::Bf16);
        assert_eq!((p.scores, p.score_copy_bytes), (268_435_456, 512 << 20));
    }

    #[test]
    fn tiles_load_only_what_a_row_of_theirs_can_see() {
        let heads = HeadShape::new(4, 2, 8);
        let len = SeqLen::new(4, 4);
        let causal = attention_books(heads, Mask::CAUSAL, len, DType::F32, 2);
        assert_eq!(causal.pairs, 10 * 4);
        assert_eq!(causal.flops, 4 * 10 * 4 * 8);
        assert_eq!(causal.kv_read_bytes, (2 + 4) * 2 * 16 * 4);
        let window = attention_books(heads, Mask::window(1), len, DType::F32, 1);
        assert_eq!(window.kv_read_bytes, 4 * 2 * 16 * 4);
    }

    #[test]
    fn backward_is_five_products_and_loads_what_tiles_see() {
        let heads = HeadShape::new(4, 2, 8);
        let len = SeqLen::new(4, 4);
        let books = backward_books(heads, Mask::CAUSAL, len, (DType::F32, DType::Bf16), 2, 2);
        assert_eq!(2 * books.flops, 5 * attention_books(heads, Mask::CAUSAL, len, DType::F32, 2).flops);
        assert_eq!(books.kv_read_bytes, 4 * 2 * 16 * 2);
        // The first query tile meets one key tile, the second two.
        assert_eq!(books.q_read_bytes, (2 + 4) * 4 * 16 * 4);
        let unseen =
            backward_books(heads, Mask::window(1), SeqLen::new(1, 9), (DType::F32, DType::F32), 2, 2);
        assert_eq!(unseen.kv_read_bytes, 2 * 16 * 4);
    }

    #[test]
    fn int4_is_half_a_byte_and_scales_are_read_once_a_run() {
        let heads = HeadShape::new(4, 2, 8);
        let len = SeqLen::new(4, 20);
        let books = attention_books(heads, Mask::FULL, len, DType::I4, 4);
        assert_eq!(books.kv_read_bytes, 20 * 2 * 16 / 2);
        let bytes = |mask, scales, tile| scale_read_bytes(heads, mask, len, (scales, 16, 4), (tile, 12));
        // Two blocks of 12 keys; page 0 lies in both.
        assert_eq!(ScaleGrain::ALL.map(|s| bytes(Mask::FULL, s, 4)), [0, 2 * 16, 2 * 16, 20 * 16, 3 * 16]);
        assert_eq!(bytes(Mask::FULL, ScaleGrain::Page, 2), 2 * 3 * 16);
        // A window that sees keys 16 .. 20 reads the second page's scales alone.
        assert_eq!(bytes(Mask::window(1), ScaleGrain::Page, 4), 16);
    }

    #[test]
    fn decode_reads_each_key_once_for_the_whole_group() {
        let books =
            attention_books(HeadShape::new(32, 8, 128), Mask::CAUSAL, SeqLen::extend(99, 1), DType::Bf16, 64);
        assert_eq!(books.kv_read_bytes, 100 * 8 * 256 * 2);
    }
}
