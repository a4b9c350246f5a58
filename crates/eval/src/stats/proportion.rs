//! Proportions: Wilson's interval, and the smallest difference that a run of this size could see.

use super::Interval;

/// Standard normal quantile of 97.5 %.
pub const Z95: f64 = 1.959_963_984_540_054;
/// Standard normal quantile of 80 % (the usual power).
const Z_POWER80: f64 = 0.841_621_233_572_914;

/// Wilson's 95 % interval of `hits` among `n`. Nothing is known without samples: 0 to 1.
///
/// E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
pub fn wilson(hits: f64, n: usize) -> Interval {
    if n == 0 {
        return Interval { value: f64::NAN, low: 0.0, high: 1.0 };
    }
    let n = n as f64;
    let (p, z2) = (hits / n, Z95 * Z95);
    let centre = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = Z95 / (1.0 + z2 / n) * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
    // At 0 and 1 the ends are exact; rounding must not move them past the value.
    Interval { value: p, low: (centre - half).clamp(0.0, p), high: (centre + half).clamp(p, 1.0) }
}

/// The smallest difference between two runs of `n` independent items each that a two-sided 5 % test finds with 80 % power, near score `p`.
pub fn detectable_difference(p: f64, n: usize) -> f64 {
    if n == 0 {
        return 1.0;
    }
    let p = p.clamp(0.0, 1.0);
    ((Z95 + Z_POWER80) * (2.0 * p * (1.0 - p) / n as f64).sqrt()).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wilson_gives_the_published_values() {
        // n=100, p=0.856: 0.774-0.912; n=500: 0.823-0.884.
        for (n, low, high) in [(100, 0.774, 0.912), (500, 0.823, 0.884)] {
            let got = wilson(0.856 * n as f64, n);
            assert!((got.low - low).abs() < 6e-4 && (got.high - high).abs() < 6e-4, "{n}: {got:?}");
        }
        let all = wilson(10.0, 10);
        assert!(all.high == 1.0 && (all.low - 0.7225).abs() < 1e-4, "{all:?}");
        assert_eq!(wilson(0.0, 0).high, 1.0);
    }

    #[test]
    fn more_items_see_smaller_differences() {
        let at = |n| detectable_difference(0.856, n);
        assert!((at(100) - 0.139).abs() < 1e-3, "{}", at(100));
        assert!((at(400) - at(100) / 2.0).abs() < 1e-12);
        assert_eq!(detectable_difference(0.5, 0), 1.0);
    }
}
