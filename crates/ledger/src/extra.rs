//! Ledger 1: memory that a tiled attention call needs beside its inputs and outputs. Nothing in it grows with seqlen_q · seqlen_k.

use suanpan_base::{DType, HeadShape};

/// Bytes of a float.
const FLOAT: u64 = 4;
/// Floats of a cache line.
const LINE: u64 = 16;
/// Words of state a row of a forward tile: maximum, factor, a line of partial sums, what it sees (a `Seen`) and of a block (128 bits).
const FORWARD_ROW: u64 = 2 + LINE + 8 + 4;
/// Words of state a row of a backward tile: lse, delta, what it sees, as a range and as three blocks' bits.
const BACKWARD_ROW: u64 = 2 + 4 + 12;
/// Bytes of one task of a forward schedule, and of a backward one.
const FORWARD_TASK: u64 = 136;
const BACKWARD_TASK: u64 = 32;

/// How a tiled kernel cuts one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Tiling {
    /// Threads, each with a slot of its own.
    pub threads: u64,
    /// Rows (query tokens × group) of a query tile.
    pub tile_rows: u64,
    /// Keys of a key block (forward) or key tile (backward).
    pub tile_keys: u64,
    /// Numbers that share a float's place in q, K and V: 1, or 2 where bf16 is multiplied as such.
    pub depth: u64,
    /// Query tokens × splits of keys whose partial results a forward keeps at most; 0 where it never splits keys.
    pub partial_tokens: u64,
    /// Query tokens of the sequence.
    pub seqlen_q: u64,
    /// Keys of the sequence.
    pub seqlen_k: u64,
}

/// Bytes that a forward call needs beside q, k, v, out and lse:
///
/// ```text
/// threads · 4 · (rows · (head_dim_qk / depth + head_dim_v + block + 14 + 16 depth) + block · (head_dim_qk + head_dim_v) / depth)
///   + partial_tokens · num_q_heads · 4 · (head_dim_v + 1) + tasks · 136
/// ```
/// rows of a tile with their scores, one block of K and V in f32 or pairs of bf16, partial results of split keys, and the list of tasks: a query tile and
/// kv head each.
pub const fn forward_extra_bytes(heads: HeadShape, t: Tiling) -> u64 {
    let (dqk, dv) = (heads.head_dim_qk as u64, heads.head_dim_v as u64);
    // Pairs have a second sum a row: of rounded weights.
    let row = dqk / t.depth + dv + t.tile_keys + FORWARD_ROW + (t.depth - 1) * LINE;
    let slot = t.tile_rows * row + t.tile_keys * (dqk + dv) / t.depth;
    let tiles = (t.seqlen_q * heads.group_size() as u64).div_ceil(t.tile_rows);
    let partials = t.partial_tokens * heads.num_q_heads as u64 * FLOAT * (dv + 1);
    t.threads * FLOAT * slot + partials + tiles * heads.num_kv_heads as u64 * FORWARD_TASK
}

/// Bytes that a backward call needs beside its inputs and gradients; `w(d)` is d padded to an odd number of cache lines:
///
/// ```text
/// threads · 4 · (keys · (head_dim_qk + head_dim_v + 2 w(head_dim_qk) + w(head_dim_v))
///                + rows · (2 w(head_dim_qk) + w(head_dim_v) + 2 w(keys + 16) + 18)
///                + (depth 2) keys / 2 · w(head_dim_qk) + rows · (3 / 2 (w(head_dim_qk) + w(head_dim_v)) + 2 w(keys + 16)))
///   + seqlen_q · num_q_heads · (8, and 4 head_dim_qk where dq is narrower than f32) + tasks · 32
/// ```
/// K by rows and, as V, transposed, dk and dv; q, d_out and dq of a tile, probabilities and their gradients; all of them but K's
/// transpose again as pairs where bf16 is multiplied as such; lse and delta of every row; sums of dq; and the list of tasks: a key tile and kv head each.
pub const fn backward_extra_bytes(heads: HeadShape, q_dtype: DType, t: Tiling) -> u64 {
    let (dqk, dv) = (heads.head_dim_qk as u64, heads.head_dim_v as u64);
    let keys = t.tile_keys * (dqk + dv + 2 * odd_lines(dqk) + odd_lines(dv));
    let scores = 2 * odd_lines(t.tile_keys + LINE);
    let rows = t.tile_rows * (2 * odd_lines(dqk) + odd_lines(dv) + scores + BACKWARD_ROW);
    let of_pairs =
        t.tile_keys * odd_lines(dqk) / 2 + t.tile_rows * (3 * (odd_lines(dqk) + odd_lines(dv)) / 2 + scores);
    let pairs = (t.depth - 1) * of_pairs;
    let sums = if matches!(q_dtype, DType::F32) { 0 } else { FLOAT * dqk };
    let of_rows = t.seqlen_q * heads.num_q_heads as u64 * (2 * FLOAT + sums);
    let tasks = t.seqlen_k.div_ceil(t.tile_keys) * heads.num_kv_heads as u64;
    t.threads * FLOAT * (keys + rows + pairs) + of_rows + tasks * BACKWARD_TASK
}

/// A width in floats, padded to an odd number of cache lines.
const fn odd_lines(width: u64) -> u64 {
    (width.div_ceil(LINE) | 1) * LINE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extra_memory_does_not_grow_with_the_square_of_the_length() {
        let heads = HeadShape::new(8, 8, 128);
        let at = |n: u64| Tiling {
            threads: 2,
            tile_rows: 384,
            tile_keys: 128,
            depth: 1,
            partial_tokens: 0,
            seqlen_q: n,
            seqlen_k: n,
        };
        let bytes = |n| forward_extra_bytes(heads, at(n));
        assert_eq!(bytes(384), 2 * 4 * (384 * (256 + 128 + 30) + 128 * 256) + 8 * 136);
        assert_eq!(bytes(384 * 100) - bytes(384), 99 * 8 * 136);
        let pairs = forward_extra_bytes(heads, Tiling { depth: 2, ..at(384) });
        assert_eq!(pairs, 2 * 4 * (384 * (64 + 128 + 128 + 46) + 128 * 128) + 8 * 136);
        let backward = |n| backward_extra_bytes(heads, DType::Bf16, at(n));
        // A row: lse, delta and its sums of dq; a key tile: one task.
        assert_eq!(backward(2 * 384) - backward(384), 384 * 8 * (8 + 512) + 3 * 8 * 32);
    }
}
