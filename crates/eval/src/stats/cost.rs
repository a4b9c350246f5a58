//! What a run cost: from prices that the caller gives. No price is baked in.

use serde::{Deserialize, Serialize};

/// Prices, each optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prices {
    /// Of one accelerator (or machine) for an hour.
    pub per_hour: Option<f64>,
    /// How many of them.
    pub devices: Option<f64>,
    /// Of a million prompt tokens.
    pub input_per_million: Option<f64>,
    /// Of a million prompt tokens from a cache; as fresh ones where absent.
    pub cached_per_million: Option<f64>,
    /// Of a million answer tokens.
    pub output_per_million: Option<f64>,
}

/// Tokens and time of a run, or of a part of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Prompt tokens, cached ones included.
    pub input_tokens: f64,
    /// Of these from a cache, where the server says so.
    pub cached_tokens: f64,
    /// Answer tokens.
    pub output_tokens: f64,
    /// Seconds.
    pub seconds: f64,
    /// Sum of scores.
    pub correct: f64,
}

/// Money.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// `hours` or `tokens`: which prices made it.
    pub by: String,
    /// Of the run.
    pub total: f64,
    /// Of one correct answer; nothing if there is none.
    pub per_correct_answer: Option<f64>,
    /// Of a million tokens of each kind, self-hosted: the whole price over that kind's throughput.
    pub per_million_output: Option<f64>,
    /// See `per_million_output`.
    pub per_million_input: Option<f64>,
    /// See `per_million_output`.
    pub per_million_total: Option<f64>,
}

/// Costs by each kind of price that was given.
pub fn costs(prices: &Prices, work: &Work) -> Vec<Cost> {
    let mut all = Vec::new();
    let per_correct = |total: f64| (work.correct > 0.0).then(|| total / work.correct);
    if let Some(per_hour) = prices.per_hour {
        let rate = per_hour * prices.devices.unwrap_or(1.0) / 3600.0;
        let total = rate * work.seconds;
        let million = |tokens: f64| (tokens > 0.0).then(|| total / tokens * 1e6);
        all.push(Cost {
            by: "hours".into(),
            total,
            per_correct_answer: per_correct(total),
            per_million_output: million(work.output_tokens),
            per_million_input: million(work.input_tokens),
            per_million_total: million(work.input_tokens + work.output_tokens),
        });
    }
    if prices.input_per_million.is_some() || prices.output_per_million.is_some() {
        let input = prices.input_per_million.unwrap_or(0.0);
        let cached = prices.cached_per_million.unwrap_or(input);
        let fresh_tokens = (work.input_tokens - work.cached_tokens).max(0.0);
        let total = (fresh_tokens * input
            + work.cached_tokens * cached
            + work.output_tokens * prices.output_per_million.unwrap_or(0.0))
            / 1e6;
        all.push(Cost {
            by: "tokens".into(),
            total,
            per_correct_answer: per_correct(total),
            ..Cost::default()
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_and_tokens_are_priced_apart() {
        let prices = Prices {
            per_hour: Some(3.6),
            devices: Some(2.0),
            input_per_million: Some(1.0),
            cached_per_million: Some(0.1),
            output_per_million: Some(4.0),
        };
        let work =
            Work { input_tokens: 3e6, cached_tokens: 1e6, output_tokens: 1e6, seconds: 1000.0, correct: 4.0 };
        let got = costs(&prices, &work);
        assert!((got[0].total - 2.0).abs() < 1e-12 && got[0].per_correct_answer == Some(0.5));
        // $/M output = price × devices / (3600 × tokens/s) × 1e6.
        assert!((got[0].per_million_output.unwrap() - 3.6 * 2.0 / (3600.0 * 1000.0) * 1e6).abs() < 1e-12);
        assert!((got[1].total - (2.0 + 0.1 + 4.0)).abs() < 1e-12);
        assert!(costs(&Prices::default(), &work).is_empty());
    }
}
