//! Ledger 3: bytes that one attention layer sends between ranks, for shards of any lengths.
//!
//! A key and value row, a query row, an output row and their gradients all travel as `bytes` a number. Every function returns bytes sent,
//! rank by rank; what is sent is received. `heads` of a kv row count `kv_width` numbers each.

use std::ops::Range;

use suanpan_base::HeadShape;

/// Numbers of a token's keys and values, `heads` of them.
const fn kv_numbers(heads: HeadShape, count: usize) -> u64 {
    (count * (heads.head_dim_qk + heads.head_dim_v)) as u64
}

/// Ring, by keys and values: the chunk of rank `o` (`tokens[o]` tokens) makes `hops[o]` hops, each from a rank to the next one: as many as
/// the farthest rank that needs it is away. With `backward`, the chunk's gradients make as many: they start at the first rank behind `o`
/// and the last hop brings them home.
pub fn ring_bytes(
    heads: HeadShape,
    tokens: &[usize],
    hops: &[usize],
    backward: bool,
    bytes: u64,
) -> Vec<u64> {
    let n = tokens.len();
    let mut sent = vec![0; n];
    for (origin, (&tokens, &hops)) in tokens.iter().zip(hops).enumerate() {
        let chunk = tokens as u64 * kv_numbers(heads, heads.num_kv_heads) * bytes;
        for hop in 0..hops {
            sent[(origin + hop) % n] += chunk;
            sent[(origin + hop + 1) % n] += if backward { chunk } else { 0 };
        }
    }
    sent
}

/// All-gather: rank `o` sends its chunk to every other rank that needs it (`needs[rank][o]`); with `backward` each of them sends its part of
/// the chunk's gradients back.
pub fn all_gather_bytes(
    heads: HeadShape,
    tokens: &[usize],
    needs: &[Vec<bool>],
    backward: bool,
    bytes: u64,
) -> Vec<u64> {
    let mut sent = vec![0; tokens.len()];
    for (rank, needs) in needs.iter().enumerate() {
        for origin in (0..tokens.len()).filter(|&o| o != rank && needs[o]) {
            let chunk = tokens[origin] as u64 * kv_numbers(heads, heads.num_kv_heads) * bytes;
            sent[origin] += chunk;
            sent[rank] += if backward { chunk } else { 0 };
        }
    }
    sent
}

/// Ulysses: rank `r` works on `split[r]` = (query heads, kv heads) of all tokens. Every rank sends each other one its tokens' share of q, k
/// and v, and gets (out, lse) back; backward, q, out, d_out, lse, k and v go out and dq, dk and dv come back.
pub fn ulysses_bytes(
    heads: HeadShape,
    tokens: &[usize],
    split: &[(Range<usize>, Range<usize>)],
    backward: bool,
    bytes: u64,
) -> Vec<u64> {
    let (dqk, dv) = (heads.head_dim_qk as u64, heads.head_dim_v as u64);
    let (there, back) = if backward { (dqk + 2 * dv + 1, dqk) } else { (dqk, dv + 1) };
    let mut sent = vec![0; tokens.len()];
    for (owner, &tokens) in tokens.iter().enumerate() {
        for (worker, (q_heads, kv_heads)) in split.iter().enumerate().filter(|(w, _)| *w != owner) {
            let kv = kv_numbers(heads, kv_heads.len());
            let q = q_heads.len() as u64;
            sent[owner] += tokens as u64 * (q * there + kv) * bytes;
            sent[worker] += tokens as u64 * (q * back + if backward { kv } else { 0 }) * bytes;
        }
    }
    sent
}

/// What equal shards and a mask under which every rank needs every chunk come to: `2 S H_kv d (N - 1) / N` numbers a rank, once forward and
/// twice backward, for ring and all-gather alike (`tokens` = S; widths of keys and values may differ).
pub fn full_exchange_bytes(
    heads: HeadShape,
    tokens: usize,
    cp_size: usize,
    backward: bool,
    bytes: u64,
) -> u64 {
    let times = if backward { 2 } else { 1 };
    times * tokens as u64 * kv_numbers(heads, heads.num_kv_heads) * (cp_size as u64 - 1) / cp_size as u64
        * bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: HeadShape = HeadShape::new(64, 8, 128);

    #[test]
    fn ring_and_all_gather_send_the_same_when_all_need_all() {
        for n in [1, 2, 4, 8] {
            let (tokens, hops, needs) = (vec![1024; n], vec![n - 1; n], vec![vec![true; n]; n]);
            for backward in [false, true] {
                let ring = ring_bytes(HEADS, &tokens, &hops, backward, 2);
                assert_eq!(ring, all_gather_bytes(HEADS, &tokens, &needs, backward, 2));
                assert_eq!(ring, vec![full_exchange_bytes(HEADS, 1024 * n, n, backward, 2); n]);
            }
        }
    }

    #[test]
    fn a_ring_of_grouped_heads_sends_less_than_ulysses_up_to_eight_ranks() {
        // N H_kv / (H_q + H_kv') with 64 query and 8 kv heads: 0.22 at 2 ranks, 0.89 at 8.
        for (n, want) in [(2usize, 0.22), (8, 0.89)] {
            let split: Vec<_> =
                (0..n).map(|r| (r * 64 / n..(r + 1) * 64 / n, r * 8 / n..(r + 1) * 8 / n)).collect();
            let ulysses = ulysses_bytes(HEADS, &vec![1024; n], &split, false, 2)[0] as f64;
            let ring = ring_bytes(HEADS, &vec![1024; n], &vec![n - 1; n], false, 2)[0] as f64;
            // lse travels beside each output: one number in 128.
            assert!((ring / ulysses - want).abs() < 0.01, "{n}: {}", ring / ulysses);
        }
    }

    #[test]
    fn a_chunk_stops_where_nobody_behind_needs_it() {
        let heads = HeadShape::new(2, 1, 4);
        // Causal, contiguous: rank 0's chunk goes all the way round, the last one's stays.
        assert_eq!(ring_bytes(heads, &[3, 3, 2], &[2, 1, 0], false, 4), [96, 192, 0]);
        assert_eq!(ring_bytes(heads, &[3, 3, 2], &[2, 1, 0], true, 4), [96, 96 + 96 + 96, 192]);
    }
}
