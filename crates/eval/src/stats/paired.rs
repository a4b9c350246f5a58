//! Two runs on the same items: McNemar's exact test where answers are right or wrong, a paired bootstrap where scores are shares.

use serde::{Deserialize, Serialize};

use super::Interval;
use super::percentile::linear;
use crate::rng::ItemRng;

/// What two runs differ by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Paired {
    /// Items that both have.
    pub n: usize,
    /// Mean of B less mean of A, with its 95 % interval (paired bootstrap over items).
    pub difference: Interval,
    /// Items that only A, and only B, has right (score 1).
    pub only_a: usize,
    /// See `only_a`.
    pub only_b: usize,
    /// Two-sided p of McNemar's exact test, where all scores are 0 or 1.
    pub mcnemar_p: Option<f64>,
}

/// Two-sided exact p of `only_a` against `only_b` under a fair coin.
pub fn mcnemar(only_a: usize, only_b: usize) -> f64 {
    let (n, least) = (only_a + only_b, only_a.min(only_b));
    if n == 0 {
        return 1.0;
    }
    // Sum of binomial probabilities in logs: n may be thousands.
    let mut log_term = -(n as f64) * std::f64::consts::LN_2;
    let mut tail = log_term.exp();
    for k in 1..=least {
        log_term += ((n - k + 1) as f64 / k as f64).ln();
        tail += log_term.exp();
    }
    (2.0 * tail).min(1.0)
}

/// Compares scores of the same items, (A, B) each.
pub fn compare(pairs: &[(f64, f64)], label: &str) -> Paired {
    let n = pairs.len();
    let mean = |sum: f64| if n == 0 { f64::NAN } else { sum / n as f64 };
    let value = mean(pairs.iter().map(|(a, b)| b - a).sum());
    let mut rng = ItemRng::new(0, label, n, 0, "paired");
    let mut drawn: Vec<f64> = if n == 0 {
        vec![f64::NAN]
    } else {
        let one = |rng: &mut ItemRng| mean((0..n).map(|_| pairs[rng.below(n)]).map(|(a, b)| b - a).sum());
        (0..super::bootstrap::DRAWS).map(|_| one(&mut rng)).collect()
    };
    drawn.sort_by(f64::total_cmp);
    let binary = pairs.iter().all(|&(a, b)| [a, b].iter().all(|&x| x == 0.0 || x == 1.0));
    let only = |f: fn(&(f64, f64)) -> bool| pairs.iter().filter(|p| f(p)).count();
    let (only_a, only_b) = (only(|p| p.0 == 1.0 && p.1 < 1.0), only(|p| p.1 == 1.0 && p.0 < 1.0));
    Paired {
        n,
        difference: Interval { value, low: linear(&drawn, 2.5), high: linear(&drawn, 97.5) },
        only_a,
        only_b,
        mcnemar_p: (binary && n > 0).then(|| mcnemar(only_a, only_b)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mcnemar_is_the_exact_binomial() {
        // 1 against 8: 2 · (1 + 9) / 2^9.
        assert!((mcnemar(1, 8) - 20.0 / 512.0).abs() < 1e-12);
        assert_eq!(mcnemar(0, 0), 1.0);
        assert_eq!(mcnemar(5, 5), 1.0);
        assert!(mcnemar(2000, 2300) < 1e-4 && mcnemar(2000, 2300) > 0.0);
    }

    #[test]
    fn pairing_sees_what_two_intervals_hide() {
        // B loses 6 of 100 items and gains none: both means lie inside each other's Wilson interval.
        let pairs: Vec<(f64, f64)> = (0..100).map(|i| (f64::from(i < 80), f64::from(i < 74))).collect();
        let got = compare(&pairs, "t");
        assert!(got.mcnemar_p.unwrap() < 0.05 && got.difference.high < 0.0, "{got:?}");
        assert_eq!((got.only_a, got.only_b), (6, 0));
        let wilson = crate::stats::proportion::wilson(80.0, 100);
        assert!(wilson.low < 0.74);
    }
}
