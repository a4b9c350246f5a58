//! Load or recompute: the faster of the two as far as it is known, and recompute where it is not.
//!
//! No clock: times come from whoever measured them.

/// What a call of one kind takes, from what earlier ones took: a running mean in which the last few count most.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    seconds_per_unit: Option<f64>,
}

/// Weight of the newest measurement.
const NEWEST: f64 = 0.3;

impl Pace {
    /// Enters that `units` took `seconds`.
    pub fn enter(&mut self, units: f64, seconds: f64) {
        if units > 0.0 && seconds.is_finite() && seconds >= 0.0 {
            let now = seconds / units;
            self.seconds_per_unit =
                Some(self.seconds_per_unit.map_or(now, |before| before + NEWEST * (now - before)));
        }
    }

    /// What `units` should take; None before the first measurement.
    pub fn predict(&self, units: f64) -> Option<f64> {
        Some(self.seconds_per_unit? * units)
    }
}

/// What to do about pages that lie in a tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// Fetch them; what has not come after so many seconds is computed.
    Load {
        /// Seconds that computing them would take.
        deadline_s: f64,
    },
    /// Compute their tokens.
    Recompute,
}

/// A load must be faster by this much: a wrong guess then costs less than it may gain.
const MARGIN: f64 = 0.8;

impl Choice {
    /// The faster by prediction. A tier that was never measured is tried once a recompute is known; a recompute that is not
    /// known yet is measured first.
    pub fn of(load_s: Option<f64>, recompute_s: Option<f64>) -> Choice {
        match (load_s, recompute_s) {
            (_, None) => Choice::Recompute,
            (Some(load), Some(recompute)) if load > recompute * MARGIN => Choice::Recompute,
            (_, Some(recompute)) => Choice::Load { deadline_s: recompute },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiers of any speed with times that scatter by a fifth: after the first few, the chosen one is the faster in 95 of 100.
    #[test]
    fn the_faster_of_load_and_recompute_is_chosen() {
        let mut x = 1u64;
        let mut random = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 40) as f64 / (1u64 << 24) as f64
        };
        let (mut right, mut all, mut slow_chosen) = (0, 0, 0);
        for disk in [1e-5, 1e-4, 1e-3, 3e-2, 0.3] {
            let (mut load, mut compute) = (Pace::default(), Pace::default());
            for round in 0..400 {
                let pages = 16.0 + (random() * 500.0).floor();
                let scatter = |r: f64| 0.9 + 0.2 * r;
                let (load_s, compute_s) =
                    (pages * disk * scatter(random()), pages * 1e-2 * scatter(random()));
                let choice = Choice::of(load.predict(pages), compute.predict(pages));
                match choice {
                    Choice::Load { .. } => load.enter(pages, load_s),
                    Choice::Recompute => compute.enter(pages, compute_s),
                }
                if round >= 4 {
                    all += 1;
                    let loaded = choice != Choice::Recompute;
                    right += usize::from(loaded == (load_s < compute_s));
                    slow_chosen += usize::from(loaded && disk > 1e-2);
                }
            }
        }
        assert!(right * 100 >= all * 95 && slow_chosen == 0, "{right} of {all}, {slow_chosen}");
    }
}
