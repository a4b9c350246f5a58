//! Percentiles by linear interpolation (numpy's default), and what a sample of this size can certify of them.

use serde::{Deserialize, Serialize};

/// Percentiles that reports print.
pub const PRINTED: [f64; 6] = [50.0, 75.0, 90.0, 95.0, 99.0, 99.9];
/// How sure a certified bound is.
const CONFIDENCE: f64 = 0.99;

/// Percentile `p` (0 ..= 100) of a sorted list; NaN of an empty one.
pub fn linear(sorted: &[f64], p: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = (p / 100.0).clamp(0.0, 1.0) * last as f64;
    let (below, share) = (at.floor() as usize, at.fract());
    if share == 0.0 {
        return sorted[below];
    }
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * share
}

/// The most samples that may lie over a limit while percentile `p` is still under it at 99 % confidence; `None` if `n` is too small for
/// one. MLPerf's early stopping: the largest t ≥ 1 with P(Binomial(n, 1 − p) ≤ t) ≤ 1 %.
pub fn most_over(n: usize, p: f64) -> Option<usize> {
    let over = 1.0 - p / 100.0;
    let (log_over, log_under) = (over.ln(), (-over).ln_1p());
    let mut log_term = n as f64 * log_under;
    let mut sum = log_term.exp();
    let mut found = None;
    for t in 1..=n {
        log_term += ((n - t + 1) as f64 / t as f64).ln() + log_over - log_under;
        sum += log_term.exp();
        if sum > 1.0 - CONFIDENCE {
            break;
        }
        found = Some(t);
    }
    found
}

/// The least number of samples that certifies percentile `p`.
pub fn floor(p: f64) -> usize {
    let mut high = 2;
    while most_over(high, p).is_none() {
        high *= 2;
    }
    let mut low = high / 2;
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        if most_over(middle, p).is_some() { high = middle } else { low = middle }
    }
    high
}

/// A percentile with what is certain of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentile {
    /// 0 to 100.
    pub p: f64,
    /// Linear interpolation.
    pub value: f64,
    /// At 99 % confidence the percentile is not above this; nothing below the floor.
    pub certified: Option<f64>,
}

/// A distribution, summed up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Samples.
    pub n: usize,
    /// Mean.
    pub mean: f64,
    /// Population standard deviation.
    pub std: f64,
    /// Least.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// [`PRINTED`].
    pub percentiles: Vec<Percentile>,
}

impl Summary {
    /// Of samples in any order; nothing of none.
    pub fn of(mut samples: Vec<f64>) -> Option<Summary> {
        samples.retain(|x| x.is_finite());
        samples.sort_by(f64::total_cmp);
        let n = samples.len();
        let (&min, &max) = (samples.first()?, samples.last()?);
        let mean = samples.iter().sum::<f64>() / n as f64;
        let std = (samples.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n as f64).sqrt();
        let one = |p| Percentile {
            p,
            value: linear(&samples, p),
            certified: most_over(n, p).map(|t| samples[n - t]),
        };
        Some(Summary { n, mean, std, min, max, percentiles: PRINTED.map(one).to_vec() })
    }

    /// One of [`PRINTED`].
    pub fn p(&self, p: f64) -> Option<&Percentile> {
        self.percentiles.iter().find(|x| x.p == p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolation_is_numpys() {
        let x = [1.0, 2.0, 4.0, 8.0];
        for (p, want) in [(0.0, 1.0), (25.0, 1.75), (50.0, 3.0), (90.0, 6.8), (99.0, 7.88), (100.0, 8.0)] {
            assert!((linear(&x, p) - want).abs() < 1e-12, "{p}");
        }
        assert!(linear(&[], 50.0).is_nan());
    }

    #[test]
    fn floors_are_those_of_early_stopping() {
        let floors: Vec<usize> = PRINTED.iter().map(|&p| floor(p)).collect();
        assert_eq!(floors[..5], [11, 24, 64, 130, 662]);
        assert!((6630..6642).contains(&floors[5]), "{}", floors[5]);
        assert_eq!((most_over(661, 99.0), most_over(662, 99.0)), (None, Some(1)));
    }

    #[test]
    fn a_certified_bound_is_wrong_at_most_one_time_in_a_hundred() {
        // Uniform draws: the true 90th percentile is 0.9.
        let wrong = (0..1000u32)
            .filter(|&trial| {
                let mut rng = crate::rng::ItemRng::new(1, "certified", 0, trial, "");
                let s = Summary::of((0..64).map(|_| rng.unit()).collect()).unwrap();
                s.p(90.0).unwrap().certified.unwrap() < 0.9
            })
            .count();
        assert!(wrong <= 20, "{wrong} of 1000");
    }
}
