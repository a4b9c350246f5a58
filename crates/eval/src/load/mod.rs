//! When requests are sent: closed (so many users, each waits for its answer) or open (a schedule that does not care how the server does).
//!
//! An open schedule is drawn before the run and never stretched: a late answer must not delay the next question, or the longest waits
//! would go unmeasured (coordinated omission).

use serde::{Deserialize, Serialize};

use crate::EvalError;
use crate::rng::ItemRng;

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "model")]
pub enum Load {
    /// Users that each send their next request when the last one ended.
    Closed {
        /// How many.
        concurrency: usize,
    },
    /// Arrivals of a rate.
    Open {
        /// Requests a second.
        rate: f64,
        /// How they are spaced.
        arrivals: Arrivals,
        /// Requests in flight at most; waiting for a place counts as waiting.
        most_in_flight: usize,
    },
}

/// Gaps between arrivals, all of mean 1 / rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// Exponential gaps.
    Poisson,
    /// Gamma gaps of this shape (burstiness as vLLM has it: below 1 in bursts, above 1 more even).
    Gamma(f64),
    /// Equal gaps.
    Constant,
}

impl Arrivals {
    /// Reads `poisson`, `constant` or `gamma:SHAPE`.
    pub fn parse(text: &str) -> Result<Arrivals, EvalError> {
        let bad =
            || EvalError::bad("arrivals", text, "poisson, constant, gamma:SHAPE with a shape in (0, 1000]");
        match text.split_once(':') {
            None if text == "poisson" => Ok(Arrivals::Poisson),
            None if text == "constant" => Ok(Arrivals::Constant),
            Some(("gamma", shape)) => {
                let shape: f64 = shape.parse().map_err(|_| bad())?;
                if shape > 0.0 && shape <= 1000.0 { Ok(Arrivals::Gamma(shape)) } else { Err(bad()) }
            }
            _ => Err(bad()),
        }
    }
}

/// A draw from the gamma distribution of `shape` and mean 1.
///
/// Marsaglia and Tsang, A simple method for generating gamma variables, ACM TOMS 26 (2000); below 1 by their power of a uniform.
fn gamma(rng: &mut ItemRng, shape: f64) -> f64 {
    if shape < 1.0 {
        let boost = (1.0 - rng.unit()).powf(1.0 / shape);
        return gamma(rng, shape + 1.0) * (shape + 1.0) / shape * boost;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let (u1, u2) = (1.0 - rng.unit(), rng.unit());
        let x = (-2.0 * u1.ln()).sqrt() * (std::f64::consts::TAU * u2).cos();
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && (1.0 - rng.unit()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v / shape;
        }
    }
}

/// Times of `n` arrivals in microseconds from the start; the first comes after the first gap.
pub fn schedule(seed: u64, rate: f64, arrivals: Arrivals, n: usize) -> Vec<u64> {
    let mut rng = ItemRng::new(seed, "arrivals", n, 0, "load");
    let mut at = 0.0;
    (0..n)
        .map(|_| {
            at += match arrivals {
                Arrivals::Constant => 1.0,
                Arrivals::Poisson => -(1.0 - rng.unit()).ln(),
                Arrivals::Gamma(shape) => gamma(&mut rng, shape),
            } / rate;
            (at * 1e6) as u64
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_have_the_mean_and_spread_of_their_law() {
        // Variance of a gamma gap over its squared mean: 1 / shape. Poisson: 1. Constant: 0.
        let laws = [
            (Arrivals::Poisson, 1.0),
            (Arrivals::Gamma(0.25), 4.0),
            (Arrivals::Gamma(4.0), 0.25),
            (Arrivals::Constant, 0.0),
        ];
        for (law, want) in laws {
            let times = schedule(3, 50.0, law, 40_000);
            let gaps: Vec<f64> = std::iter::once(0)
                .chain(times.iter().copied())
                .zip(&times)
                .map(|(a, b)| (*b as f64 - a as f64) / 1e6)
                .collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let var = gaps.iter().map(|g| (g - mean) * (g - mean)).sum::<f64>() / gaps.len() as f64;
            assert!((mean * 50.0 - 1.0).abs() < 0.04, "{law:?} mean {mean}");
            assert!(
                (var / (mean * mean) - want).abs() < 0.12 * want + 1e-6,
                "{law:?} {}",
                var / (mean * mean)
            );
        }
        assert_eq!(schedule(3, 50.0, Arrivals::Poisson, 9), schedule(3, 50.0, Arrivals::Poisson, 9));
    }

    #[test]
    fn unknown_arrivals_are_refused() {
        for text in ["gamma", "gamma:0", "gamma:x", "gamma:1e9", "uniform", ""] {
            assert!(Arrivals::parse(text).is_err(), "{text}");
        }
        assert_eq!(Arrivals::parse("gamma:0.5").unwrap(), Arrivals::Gamma(0.5));
    }
}
