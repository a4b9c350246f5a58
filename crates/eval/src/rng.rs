//! Random numbers that belong to one item: (pack seed, task, length, index) → a stream that no other item shares and that is equal on
//! every machine. Never one seed for every sample's shuffle: that made one depth out of a whole length (docs/evidence.md).

/// A stream of a keyed BLAKE3 in extendable-output mode.
pub struct ItemRng {
    reader: blake3::OutputReader,
    /// One block of output: asking the reader for eight bytes at a time computes each block eight times.
    block: [u8; 64],
    used: usize,
}

impl ItemRng {
    /// The stream of one item; `purpose` keeps streams of one item apart ("facts", "filler").
    pub fn new(seed: u64, task: &str, length_tokens: usize, index: u32, purpose: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("suanpan eval item stream v1");
        hasher.update(&seed.to_le_bytes());
        for part in [task, purpose] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.update(&(length_tokens as u64).to_le_bytes());
        hasher.update(&index.to_le_bytes());
        ItemRng { reader: hasher.finalize_xof(), block: [0; 64], used: 64 }
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        if self.used == self.block.len() {
            self.reader.fill(&mut self.block);
            self.used = 0;
        }
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.block[self.used..self.used + 8]);
        self.used += 8;
        u64::from_le_bytes(bytes)
    }

    /// Uniform in `0 .. n` without bias: draws that would favour small numbers are thrown away. `n` ≥ 1.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "an empty range has no number");
        let n = n as u64;
        let past_fair = u64::MAX - u64::MAX % n;
        loop {
            let x = self.next_u64();
            if x < past_fair {
                return (x % n) as usize;
            }
        }
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of `all`, which is not empty.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// `count` different numbers below `n`, in random order (Floyd's algorithm, then a shuffle). `count` ≤ `n`.
    pub fn distinct(&mut self, count: usize, n: usize) -> Vec<usize> {
        assert!(count <= n, "{count} different numbers below {n}");
        let mut seen = std::collections::HashSet::with_capacity(count);
        let mut all = Vec::with_capacity(count);
        for top in n - count..n {
            let x = self.below(top + 1);
            let chosen = if seen.insert(x) { x } else { top };
            seen.insert(chosen);
            all.push(chosen);
        }
        self.shuffle(&mut all);
        all
    }

    /// One word of a list, which is not empty.
    pub fn word(&mut self, all: &[&'static str]) -> &'static str {
        all[self.below(all.len())]
    }

    /// A uniform order (Fisher-Yates).
    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_do_not_share_a_stream() {
        let first =
            |seed, task, length, index, purpose| ItemRng::new(seed, task, length, index, purpose).next_u64();
        let base = first(1, "a", 10, 0, "x");
        assert_eq!(base, first(1, "a", 10, 0, "x"));
        for other in [
            first(2, "a", 10, 0, "x"),
            first(1, "b", 10, 0, "x"),
            first(1, "a", 11, 0, "x"),
            first(1, "a", 10, 1, "x"),
            first(1, "a", 10, 0, "y"),
            first(1, "ax", 10, 0, ""),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn distinct_numbers_are_distinct_and_below() {
        let mut rng = ItemRng::new(1, "a", 10, 0, "x");
        for (count, n) in [(0, 0), (0, 5), (5, 5), (3, 100), (99, 100)] {
            let all = rng.distinct(count, n);
            let set: std::collections::HashSet<_> = all.iter().collect();
            assert!(set.len() == count && all.iter().all(|&x| x < n));
        }
    }

    #[test]
    fn the_stream_is_the_same_on_every_machine() {
        // Written down once: packs are named by their seed, so this may never change without a new generator version.
        assert_eq!(ItemRng::new(7, "niah_single_1", 4096, 3, "facts").next_u64(), EXPECTED);
    }

    const EXPECTED: u64 = 2388181685480310439;
}
