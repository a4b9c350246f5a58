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

/// Bytes that a token's rows take on their way, each for one head, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carriers {
    /// What a query brings: q; backward q, out, d_out, lse.
    pub q: u64,
    /// k and v.
    pub kv: u64,
    /// What a query gets: out and lse in two floats; backward dq.
    pub result: u64,
    /// What a key gets: backward dk and dv, forward nothing.
    pub d_kv: u64,
}

impl Carriers {
    /// Carriers of a pass. With `order_free`, what is summed travels as sums that do not depend on an order: four words a number, and two a row
    /// (out and its weights, dk and dv are rows of their own).
    pub fn of(heads: HeadShape, backward: bool, order_free: bool) -> Carriers {
        let (dqk, dv) = (heads.head_dim_qk as u64, heads.head_dim_v as u64);
        let summed = |numbers: u64, rows: u64| if order_free { 4 * numbers + 2 * rows } else { numbers };
        let (q, result, d_kv) = if backward {
            (dqk + 2 * dv + 1, summed(dqk, 1), summed(dqk + dv, 2))
        } else if order_free {
            (dqk, summed(dv + 1, 2), 0)
        } else {
            (dqk, dv + 2, 0)
        };
        Carriers { q: 4 * q, kv: 4 * (dqk + dv), result: 4 * result, d_kv: 4 * d_kv }
    }
}

/// Ring: the chunk of member `o` (`tokens[o]` tokens of `there` bytes) makes `hops[o]` hops, each from a member to the next one: as many as
/// the farthest one that needs it is away. What is summed for it (`back` bytes a token; 0 = nothing) makes as many: it starts at the first
/// member behind `o`, and the last hop brings it home.
pub fn ring_bytes(tokens: &[usize], hops: &[usize], there: u64, back: u64) -> Vec<u64> {
    let n = tokens.len();
    let mut sent = vec![0; n];
    for (origin, (&tokens, &hops)) in tokens.iter().zip(hops).enumerate() {
        for hop in 0..hops {
            sent[(origin + hop) % n] += tokens as u64 * there;
            sent[(origin + hop + 1) % n] += tokens as u64 * back;
        }
    }
    sent
}

/// All-gather and halo: rank `o` sends `tokens[rank][o]` of its tokens (`there` bytes each) to each other rank; `back` bytes a token come back.
pub fn gather_bytes(tokens: &[Vec<usize>], there: u64, back: u64) -> Vec<u64> {
    let mut sent = vec![0; tokens.len()];
    for (rank, tokens) in tokens.iter().enumerate() {
        for (origin, &count) in tokens.iter().enumerate().filter(|(o, _)| *o != rank) {
            sent[origin] += count as u64 * there;
            sent[rank] += count as u64 * back;
        }
    }
    sent
}

/// Ulysses among `size` neighbouring ranks at a time: rank `r` works on `split[r]` = (query heads, kv heads) of its group's tokens. Every rank
/// sends each other one of its group its tokens' share of what queries bring and of k and v, and gets their results back.
pub fn ulysses_bytes(
    carriers: Carriers,
    tokens: &[usize],
    split: &[(Range<usize>, Range<usize>)],
    size: usize,
) -> Vec<u64> {
    let mut sent = vec![0; tokens.len()];
    for (owner, &tokens) in tokens.iter().enumerate() {
        let group = owner / size * size..(owner / size + 1) * size;
        for worker in group.filter(|w| *w != owner) {
            let (q, kv) = (split[worker].0.len() as u64, split[worker].1.len() as u64);
            sent[owner] += tokens as u64 * (q * carriers.q + kv * carriers.kv);
            sent[worker] += tokens as u64 * (q * carriers.result + kv * carriers.d_kv);
        }
    }
    sent
}

/// Ring of groups of `size` neighbouring ranks, [`ulysses_bytes`] inside each: member `u` of a group exchanges its kv heads with member `u` of
/// the next one. `hops` are a group's.
pub fn hybrid_bytes(
    carriers: Carriers,
    tokens: &[usize],
    split: &[(Range<usize>, Range<usize>)],
    size: usize,
    hops: &[usize],
) -> Vec<u64> {
    let mut sent = ulysses_bytes(carriers, tokens, split, size);
    let groups: Vec<usize> = tokens.chunks(size).map(|group| group.iter().sum()).collect();
    for member in 0..size {
        let kv = split[member].1.len() as u64;
        let ring = ring_bytes(&groups, hops, kv * carriers.kv, kv * carriers.d_kv);
        ring.iter().enumerate().for_each(|(group, bytes)| sent[group * size + member] += bytes);
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
            let (tokens, hops, seen) = (vec![1024; n], vec![n - 1; n], vec![vec![1024; n]; n]);
            for backward in [false, true] {
                let c = Carriers::of(HEADS, backward, false);
                let ring = ring_bytes(&tokens, &hops, 8 * c.kv, 8 * c.d_kv);
                assert_eq!(ring, gather_bytes(&seen, 8 * c.kv, 8 * c.d_kv));
                assert_eq!(ring, vec![full_exchange_bytes(HEADS, 1024 * n, n, backward, 4); n]);
            }
        }
    }

    fn split(n: usize) -> Vec<(Range<usize>, Range<usize>)> {
        (0..n).map(|r| (r * 64 / n..(r + 1) * 64 / n, r * 8 / n..(r + 1) * 8 / n)).collect()
    }

    #[test]
    fn a_ring_of_grouped_heads_sends_less_than_ulysses_up_to_eight_ranks() {
        // N H_kv / (H_q + H_kv') with 64 query and 8 kv heads: 0.22 at 2 ranks, 0.89 at 8.
        let c = Carriers::of(HEADS, false, false);
        for (n, want) in [(2usize, 0.22), (8, 0.89)] {
            let ulysses = ulysses_bytes(c, &vec![1024; n], &split(n), n)[0] as f64;
            let ring = ring_bytes(&vec![1024; n], &vec![n - 1; n], 8 * c.kv, 0)[0] as f64;
            // lse travels beside each output: two numbers in 128.
            assert!((ring / ulysses - want).abs() < 0.02, "{n}: {}", ring / ulysses);
        }
    }

    #[test]
    fn a_hybrid_is_its_two_ends() {
        let c = Carriers::of(HEADS, true, false);
        let tokens = [5, 6, 7, 8];
        let ring = ring_bytes(&tokens, &[3; 4], 8 * c.kv, 8 * c.d_kv);
        let alone = vec![(0..64, 0..8); 4];
        assert_eq!(hybrid_bytes(c, &tokens, &alone, 1, &[3; 4]), ring);
        assert_eq!(hybrid_bytes(c, &tokens, &split(4), 4, &[0]), ulysses_bytes(c, &tokens, &split(4), 4));
        // Two groups of two: half the heads make one hop.
        let two: Vec<_> = [split(2), split(2)].concat();
        let inside = ulysses_bytes(c, &tokens, &two, 2);
        let hybrid = hybrid_bytes(c, &tokens, &two, 2, &[1, 1]);
        assert_eq!(hybrid[0] - inside[0], 11 * 4 * c.kv + 15 * 4 * c.d_kv);
    }

    #[test]
    fn a_chunk_stops_where_nobody_behind_needs_it() {
        let c = Carriers::of(HeadShape::new(2, 1, 4), true, false);
        // Causal, contiguous: rank 0's chunk goes all the way round, the last one's stays.
        assert_eq!(ring_bytes(&[3, 3, 2], &[2, 1, 0], c.kv, 0), [96, 192, 0]);
        assert_eq!(ring_bytes(&[3, 3, 2], &[2, 1, 0], c.kv, c.d_kv), [96, 96 + 96 + 96, 192]);
    }
}
