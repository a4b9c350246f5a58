//! Counter-based random numbers: a draw is a pure function of (seed, position), so nothing that happens to a batch can move it.

/// SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection whose output bits each depend on all input bits.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The seed of a stream derived from `seed`: streams of one seed are unrelated, and no two of them are equal.
pub const fn derive(seed: u64, stream: u64) -> u64 {
    mix(mix(seed.wrapping_add(GOLDEN)) ^ stream.wrapping_mul(GOLDEN))
}

/// A uniform number in [0, 1) with 53 bits, for `position` of the sequence seeded with `seed`.
pub const fn uniform(seed: u64, position: u64) -> f64 {
    (derive(seed, position) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_seed_and_position_only() {
        assert_eq!(uniform(7, 3).to_bits(), uniform(7, 3).to_bits());
        assert_ne!(uniform(7, 3), uniform(7, 4));
        assert_ne!(uniform(7, 3), uniform(8, 3));
    }

    #[test]
    fn draws_are_uniform_along_positions_and_along_seeds() {
        for along_seed in [false, true] {
            let mut bins = [0u32; 16];
            for i in 0..32_000u64 {
                let u = if along_seed { uniform(i, 5) } else { uniform(5, i) };
                assert!((0.0..1.0).contains(&u));
                bins[(u * 16.0) as usize] += 1;
            }
            // Chi-square with 15 degrees of freedom: 37.7 is the 0.1 % point.
            let chi: f64 = bins.iter().map(|&n| (n as f64 - 2000.0).powi(2) / 2000.0).sum();
            assert!(chi < 37.7, "chi-square {chi}");
        }
    }

    #[test]
    fn neighbouring_streams_do_not_share_draws() {
        let (a, b) = (derive(1, 1), derive(1, 2));
        assert!((0..1000).all(|p| uniform(a, p) != uniform(b, p)));
    }
}
