//! Which weights dropout keeps: a counter-based generator, keyed by where a weight stands and by nothing else.
//!
//! Philox 4x32-10 (Salmon et al., SC 2011): counter (key / 4, query token, query head, sequence), key = the seed; output `key % 4` is the
//! weight's number, and a weight stays when it is at least probability · 2^32. Tiles, splits, threads and shards change nothing.

use crate::extras::DropoutKey;

const ROUNDS: usize = 10;
const MULTIPLIERS: (u64, u64) = (0xD251_1F53, 0xCD9E_8D57);
/// The low half of a 64-bit lane.
const LOW: u64 = 0xFFFF_FFFF;
const WEYL: (u32, u32) = (0x9E37_79B9, 0xBB67_AE85);

/// Dropout of one call: probability and key.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    key: DropoutKey,
    /// Weights whose number is below it are dropped.
    below: u32,
    /// All weights are dropped, whatever their numbers.
    all: bool,
    /// Factor of the weights that stay: 1 / (1 - probability).
    factor: f32,
}

impl Dropout {
    /// Dropout with probability `p` in 0 ..= 1.
    pub fn new(p: f32, key: DropoutKey) -> Dropout {
        let p = f64::from(p);
        let factor = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        let below = (p * 2f64.powi(32)).round();
        Dropout { key, below: below as u32, all: below >= 2f64.powi(32), factor: factor as f32 }
    }

    /// The factor of weights that stay.
    pub(crate) fn factor_kept(&self) -> f32 {
        self.factor
    }

    /// What a weight is multiplied by: 0, or 1 / (1 - probability). `seq`, `head`, `row` and `key` are counted within the call; `row` and
    /// `key` within the sequence.
    pub fn factor(&self, seq: usize, head: usize, row: usize, key: usize) -> f32 {
        let key = self.key.first_key + key as u32;
        let number = self.numbers::<1>(seq, head, row, key / 4)[(key % 4) as usize][0];
        if number < self.below || self.all { 0.0 } else { self.factor }
    }

    /// Numbers of `L` groups of four keys from group `group` on: `[key % 4][group]`.
    #[inline(always)]
    fn numbers<const L: usize>(&self, seq: usize, head: usize, row: usize, group: u32) -> [[u32; L]; 4] {
        // 64-bit lanes: what a processor multiplies whole.
        let (mut a, mut c) = ([0u64; L], [u64::from(self.key.first_head + head as u32); L]);
        let mut b = [u64::from(self.key.first_row + row as u32); L];
        let mut d = [u64::from(self.key.first_seq + seq as u32); L];
        for i in 0..L {
            a[i] = u64::from(group.wrapping_add(i as u32));
        }
        let (mut k0, mut k1) = (self.key.seed as u32, (self.key.seed >> 32) as u32);
        for _ in 0..ROUNDS {
            for i in 0..L {
                let (x, y) = ((a[i] & LOW) * MULTIPLIERS.0, (c[i] & LOW) * MULTIPLIERS.1);
                a[i] = (y >> 32) ^ b[i] ^ u64::from(k0);
                c[i] = (x >> 32) ^ d[i] ^ u64::from(k1);
                b[i] = y & LOW;
                d[i] = x & LOW;
            }
            (k0, k1) = (k0.wrapping_add(WEYL.0), k1.wrapping_add(WEYL.1));
        }
        let mut numbers = [[0u32; L]; 4];
        for i in 0..L {
            numbers[0][i] = a[i] as u32;
            numbers[1][i] = b[i] as u32;
            numbers[2][i] = c[i] as u32;
            numbers[3][i] = d[i] as u32;
        }
        numbers
    }

    /// Multiplies the weights of a row's keys `first .. first + weights.len()` by their factors.
    #[inline(always)]
    pub(crate) fn apply(&self, (seq, head, row): (usize, usize, usize), first: usize, weights: &mut [f32]) {
        const GROUPS: usize = 8;
        let first = self.key.first_key + first as u32;
        let mut at = 0;
        while at < weights.len() {
            let key = first + at as u32;
            let numbers = self.numbers::<GROUPS>(seq, head, row, key / 4);
            // In the order of keys, so that whole vectors of weights meet their numbers.
            let mut ordered = [0u32; 4 * GROUPS];
            for (group, four) in ordered.chunks_exact_mut(4).enumerate() {
                for (number, of) in four.iter_mut().zip(&numbers) {
                    *number = of[group];
                }
            }
            let skip = (key % 4) as usize;
            let count = (4 * GROUPS - skip).min(weights.len() - at);
            for (w, &number) in weights[at..at + count].iter_mut().zip(&ordered[skip..]) {
                *w = if number < self.below || self.all { 0.0 } else { *w * self.factor };
            }
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published test vectors of Philox 4x32-10 (Random123, kat_vectors).
    #[test]
    fn philox_gives_its_published_numbers() {
        let generate = |counter: [u32; 4], seed: u64| {
            let key = DropoutKey {
                seed,
                first_seq: counter[3],
                first_head: counter[2],
                first_row: counter[1],
                first_key: 0,
            };
            Dropout::new(0.5, key).numbers::<1>(0, 0, 0, counter[0]).map(|x| x[0])
        };
        assert_eq!(generate([0; 4], 0), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(generate([u32::MAX; 4], u64::MAX), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        assert_eq!(
            generate([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], 0x299F_31D0_A409_3822),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }

    #[test]
    fn a_row_at_once_is_the_definition_and_shards_are_parts_of_the_whole() {
        let whole = Dropout::new(0.3, DropoutKey { seed: 9, ..DropoutKey::default() });
        let shard = DropoutKey { seed: 9, first_seq: 2, first_head: 5, first_row: 70, first_key: 13 };
        let shard = Dropout::new(0.3, shard);
        for (first, n) in [(0, 300), (1, 64), (3, 130), (129, 7)] {
            let mut weights = vec![1.0; n];
            shard.apply((1, 2, 3), first, &mut weights);
            for (i, w) in weights.iter().enumerate() {
                assert_eq!(*w, shard.factor(1, 2, 3, first + i));
                assert_eq!(*w, whole.factor(3, 7, 73, 13 + first + i));
            }
        }
    }

    #[test]
    fn the_share_of_dropped_weights_is_the_probability() {
        for p in [0.0f32, 0.1, 0.5, 0.9, 1.0] {
            let d = Dropout::new(p, DropoutKey { seed: 1234, ..DropoutKey::default() });
            let mut weights = vec![1.0; 100_000];
            d.apply((0, 0, 0), 0, &mut weights);
            let dropped = weights.iter().filter(|w| **w == 0.0).count() as f64 / 1e5;
            // Five standard deviations.
            assert!(
                (dropped - f64::from(p)).abs()
                    <= 5.0 * (0.25f64 / 1e5).sqrt() * f64::from(u8::from(p % 1.0 > 0.0)),
                "{p}: {dropped}"
            );
            assert!(p == 1.0 || weights.iter().all(|w| *w == 0.0 || (*w - 1.0 / (1.0 - p)).abs() < 1e-6 * w));
        }
    }
}
