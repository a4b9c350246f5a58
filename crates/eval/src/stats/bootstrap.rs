//! Bootstrap intervals of means: whole clusters are drawn (items that share a haystack stand or fall together), each task apart.

use std::collections::BTreeMap;

use super::{Interval, proportion};
use crate::rng::ItemRng;

/// Draws of a bootstrap.
pub const DRAWS: usize = 2000;

/// One scored item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// Stratum: the task.
    pub stratum: usize,
    /// Items of one cluster are drawn together.
    pub cluster: u64,
    /// 0 ..= 1.
    pub score: f64,
}

/// Sum and number of the items of each cluster, stratum by stratum.
fn clusters(items: &[Scored]) -> Vec<Vec<(f64, usize)>> {
    let mut strata: BTreeMap<usize, BTreeMap<u64, (f64, usize)>> = BTreeMap::new();
    for item in items {
        let c = strata.entry(item.stratum).or_default().entry(item.cluster).or_default();
        c.0 += item.score;
        c.1 += 1;
    }
    strata.into_values().map(|s| s.into_values().collect()).collect()
}

/// Mean over strata of their means: what "the average of 13 tasks" is.
fn mean_of_means(strata: &[Vec<(f64, usize)>]) -> f64 {
    let mean = |s: &Vec<(f64, usize)>| {
        let (sum, n) = s.iter().fold((0.0, 0), |(a, b), (x, n)| (a + x, b + n));
        sum / n.max(1) as f64
    };
    strata.iter().map(mean).sum::<f64>() / strata.len().max(1) as f64
}

/// Number at share `q` of a sorted list, linear between neighbours.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    super::percentile::linear(sorted, q * 100.0)
}

/// The mean of the strata's means with its 95 % interval.
///
/// Where all scores are equal a bootstrap sees no spread at all; so the interval is never narrower than Wilson's for the number of
/// clusters: 5 right answers of 5 are not "100 % for certain".
pub fn mean(items: &[Scored], label: &str) -> Interval {
    let strata = clusters(items);
    let n: usize = strata.iter().map(Vec::len).sum();
    if n == 0 {
        return proportion::wilson(0.0, 0);
    }
    let value = mean_of_means(&strata);
    let wilson = proportion::wilson(value * n as f64, n);
    let mut rng = ItemRng::new(0, label, n, 0, "bootstrap");
    let mut drawn: Vec<f64> = (0..DRAWS)
        .map(|_| {
            let one = |s: &Vec<(f64, usize)>| (0..s.len()).map(|_| *rng.pick(s)).collect::<Vec<_>>();
            mean_of_means(&strata.iter().map(one).collect::<Vec<_>>())
        })
        .collect();
    drawn.sort_by(f64::total_cmp);
    let binary = items.iter().all(|i| i.score == 0.0 || i.score == 1.0);
    let (low, high) = (quantile(&drawn, 0.025), quantile(&drawn, 0.975));
    if binary && strata.len() == 1 && n == items.len() {
        return Interval { value, ..wilson };
    }
    Interval { value, low: low.min(wilson.low), high: high.max(wilson.high) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(n: u64, per_cluster: u64, score: impl Fn(u64) -> f64) -> Vec<Scored> {
        (0..n)
            .map(|i| Scored { stratum: 0, cluster: i / per_cluster, score: score(i / per_cluster) })
            .collect()
    }

    #[test]
    fn items_of_one_haystack_count_once() {
        let alone = mean(&items(100, 1, |i| f64::from(i % 2 == 0)), "a");
        let fours = mean(&items(400, 4, |i| f64::from(i % 2 == 0)), "a");
        assert_eq!(alone.value, fours.value);
        let (a, b) = (alone.high - alone.low, fours.high - fours.low);
        assert!((a - b).abs() < 0.03, "400 answers on 100 haystacks are not 400 experiments: {a} {b}");
    }

    #[test]
    fn five_right_of_five_are_not_certain() {
        let got = mean(&items(5, 1, |_| 1.0), "a");
        assert!(got.value == 1.0 && got.high == 1.0 && got.low < 0.6, "{got:?}");
    }

    #[test]
    fn the_interval_covers_the_truth_as_often_as_it_says() {
        let mut covered = 0;
        for trial in 0..200 {
            let mut rng = ItemRng::new(trial, "coverage", 0, 0, "");
            // Scores in quarters, mean 0.5; two tasks.
            let draw = |stratum| (0..40u64).map(move |c| (stratum, c));
            let items: Vec<Scored> = draw(0)
                .chain(draw(1))
                .map(|(stratum, cluster)| Scored { stratum, cluster, score: rng.below(5) as f64 / 4.0 })
                .collect();
            let got = mean(&items, "coverage");
            covered += usize::from(got.low <= 0.5 && 0.5 <= got.high);
        }
        assert!(covered >= 184, "{covered} of 200");
    }
}
