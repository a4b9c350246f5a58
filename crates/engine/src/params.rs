//! What a client may ask of sampling, with vLLM's names and ranges; everything outside a range is refused by field.
//!
//! Knows no HTTP and no model: only the vocabulary size is needed to judge a request.

use std::fmt::Display;

use suanpan_base::BadArgument;

/// Temperatures below this are greedy (vLLM's `_SAMPLING_EPS`).
pub const GREEDY_BELOW: f64 = 1e-5;
/// Highest temperature accepted: past it every vocabulary is uniform to within f32.
pub const MAX_TEMPERATURE: f64 = 100.0;
/// Most alternatives reported per position.
pub const MAX_LOGPROBS: usize = 20;
/// Most (position, alternative) pairs reported for one prompt: bounds the memory one request can ask for.
pub const MAX_PROMPT_LOGPROB_ENTRIES: usize = 1 << 20;
/// Most stop strings in one request.
pub const MAX_STOPS: usize = 16;
/// Longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;
/// Most entries of `logit_bias`, `stop_token_ids` and `allowed_token_ids`.
pub const MAX_TOKEN_IDS: usize = 4096;
/// Bounds of `repetition_penalty`.
pub const REPETITION_PENALTY: std::ops::RangeInclusive<f64> = 0.01..=100.0;

/// How one request is sampled. `Default` is plain sampling at temperature 1 up to the context limit.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 (or below 1e-5) is greedy; at most [`MAX_TEMPERATURE`].
    pub temperature: f64,
    /// Keep the smallest set of most probable tokens whose mass reaches `top_p`; in (0, 1], 1 is off.
    pub top_p: f64,
    /// Keep the `top_k` most probable tokens; −1 and 0 are off.
    pub top_k: i64,
    /// Drop tokens less probable than `min_p` times the most probable; in [0, 1], 0 is off.
    pub min_p: f64,
    /// Subtracted once from the logit of every token generated so far; in [−2, 2].
    pub presence_penalty: f64,
    /// Subtracted from the logit of a generated token once per occurrence; in [−2, 2].
    pub frequency_penalty: f64,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; in [0.01, 100], 1 is off.
    pub repetition_penalty: f64,
    /// Draws depend on (seed, index of the output token) only. Without a seed each request gets one of its own.
    pub seed: Option<u64>,
    /// Output tokens at most; `None` is up to the context limit. 0 scores the prompt only and needs `prompt_logprobs`.
    pub max_tokens: Option<usize>,
    /// No end token, stop token or stop string ends the output before this many tokens.
    pub min_tokens: usize,
    /// The output ends before the first of these to be completed.
    pub stop: Vec<String>,
    /// The output ends with any of these tokens.
    pub stop_token_ids: Vec<u32>,
    /// Keep the stop string (or stop token's text) in the output.
    pub include_stop_str_in_output: bool,
    /// The model's end tokens do not end the output.
    pub ignore_eos: bool,
    /// Report the chosen token's log-probability and this many alternatives, from the raw logits.
    pub logprobs: Option<usize>,
    /// The same for every prompt token but the first.
    pub prompt_logprobs: Option<usize>,
    /// Added to single logits; each in [−100, 100].
    pub logit_bias: Vec<(u32, f64)>,
    /// Only these tokens may be sampled.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Leave control tokens out of the text.
    pub skip_special_tokens: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop_str_in_output: false,
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            skip_special_tokens: true,
        }
    }
}

fn refuse<T>(
    field: impl Into<String>,
    asked: impl Display,
    supported: impl Display,
) -> Result<T, BadArgument> {
    Err(BadArgument::new("sampling parameters", field, asked, supported))
}

fn in_range(field: &str, value: f64, range: std::ops::RangeInclusive<f64>) -> Result<(), BadArgument> {
    if range.contains(&value) {
        return Ok(());
    }
    refuse(field, value, format!("{} to {}", range.start(), range.end()))
}

fn at_most(field: &str, count: usize, max: usize, unit: &str) -> Result<(), BadArgument> {
    if count <= max {
        return Ok(());
    }
    refuse(field, format!("{count} {unit}"), format!("at most {max} {unit}"))
}

impl SamplingParams {
    /// Greedy decoding with at most `max_tokens` output tokens.
    pub fn greedy(max_tokens: usize) -> Self {
        SamplingParams { temperature: 0.0, max_tokens: Some(max_tokens), ..SamplingParams::default() }
    }

    /// True when the most probable token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Checks every field against its range and the vocabulary; NaN and infinities are outside every range.
    pub fn validate(&self, vocab_size: usize) -> Result<(), BadArgument> {
        self.validate_numbers()?;
        self.validate_lengths()?;
        self.validate_ids(vocab_size)
    }

    fn validate_numbers(&self) -> Result<(), BadArgument> {
        in_range("temperature", self.temperature, 0.0..=MAX_TEMPERATURE)?;
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", self.top_p, "above 0, up to 1");
        }
        if !(-1..=i64::from(i32::MAX)).contains(&self.top_k) {
            return refuse("top_k", self.top_k, "-1 or 0 (off), or 1 to 2147483647");
        }
        in_range("min_p", self.min_p, 0.0..=1.0)?;
        in_range("presence_penalty", self.presence_penalty, -2.0..=2.0)?;
        in_range("frequency_penalty", self.frequency_penalty, -2.0..=2.0)?;
        in_range("repetition_penalty", self.repetition_penalty, REPETITION_PENALTY)
    }

    fn validate_lengths(&self) -> Result<(), BadArgument> {
        if self.max_tokens == Some(0) && self.prompt_logprobs.is_none() {
            return refuse(
                "max_tokens",
                0,
                "at least 1 (0 only scores a prompt: with prompt_logprobs or echo and logprobs)",
            );
        }
        if self.max_tokens.is_some_and(|max| self.min_tokens > max) {
            let max = self.max_tokens.unwrap_or_default();
            return refuse("min_tokens", self.min_tokens, format!("at most max_tokens = {max}"));
        }
        at_most("logprobs", self.logprobs.unwrap_or(0), MAX_LOGPROBS, "alternatives")?;
        at_most("prompt_logprobs", self.prompt_logprobs.unwrap_or(0), MAX_LOGPROBS, "alternatives")?;
        at_most("stop", self.stop.len(), MAX_STOPS, "strings")?;
        for stop in &self.stop {
            if stop.is_empty() {
                return refuse("stop", "an empty string", "strings of at least one character");
            }
            at_most("stop", stop.len(), MAX_STOP_BYTES, "bytes a string")?;
        }
        Ok(())
    }

    fn validate_ids(&self, vocab_size: usize) -> Result<(), BadArgument> {
        let within = |field: &str, id: u32| {
            if (id as usize) < vocab_size {
                return Ok(());
            }
            refuse(field, id, format!("token ids below the vocabulary size {vocab_size}"))
        };
        at_most("logit_bias", self.logit_bias.len(), MAX_TOKEN_IDS, "entries")?;
        for &(id, bias) in &self.logit_bias {
            within("logit_bias", id)?;
            in_range("logit_bias", bias, -100.0..=100.0)?;
        }
        at_most("stop_token_ids", self.stop_token_ids.len(), MAX_TOKEN_IDS, "ids")?;
        self.stop_token_ids.iter().try_for_each(|&id| within("stop_token_ids", id))?;
        if let Some(allowed) = &self.allowed_token_ids {
            if allowed.is_empty() {
                return refuse("allowed_token_ids", "[]", "at least one id");
            }
            at_most("allowed_token_ids", allowed.len(), MAX_TOKEN_IDS, "ids")?;
            allowed.iter().try_for_each(|&id| within("allowed_token_ids", id))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut SamplingParams);

    fn field_refused(change: Change) -> String {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.validate(100).expect_err("must be refused").field
    }

    #[test]
    fn defaults_and_range_ends_are_accepted() {
        let accepted: [Change; 12] = [
            |_| (),
            |p| p.temperature = 0.0,
            |p| p.temperature = MAX_TEMPERATURE,
            |p| p.top_p = 1e-9,
            |p| p.top_k = -1,
            |p| p.top_k = i64::from(i32::MAX),
            |p| p.min_p = 1.0,
            |p| (p.presence_penalty, p.frequency_penalty) = (-2.0, 2.0),
            |p| (p.logit_bias, p.stop_token_ids) = (vec![(99, -100.0)], vec![99]),
            |p| (p.max_tokens, p.prompt_logprobs) = (Some(0), Some(0)),
            |p| (p.logprobs, p.seed) = (Some(20), Some(u64::MAX)),
            |p| p.stop = vec!["x".into(); 16],
        ];
        for (i, change) in accepted.iter().enumerate() {
            let mut params = SamplingParams::default();
            change(&mut params);
            assert_eq!(params.validate(100), Ok(()), "case {i}");
        }
    }

    #[test]
    fn hostile_numbers_are_refused_by_field() {
        let refused: [(&str, Change); 33] = [
            ("temperature", |p| p.temperature = 1e308),
            ("temperature", |p| p.temperature = 999_999.0),
            ("temperature", |p| p.temperature = -1.0),
            ("temperature", |p| p.temperature = f64::NAN),
            ("temperature", |p| p.temperature = f64::INFINITY),
            ("top_p", |p| p.top_p = 0.0),
            ("top_p", |p| p.top_p = -1.0),
            ("top_p", |p| p.top_p = 2.0),
            ("top_p", |p| p.top_p = f64::NAN),
            ("top_k", |p| p.top_k = -5),
            ("top_k", |p| p.top_k = 1 << 31),
            ("min_p", |p| p.min_p = 2.0),
            ("min_p", |p| p.min_p = -0.1),
            ("min_p", |p| p.min_p = f64::NAN),
            ("presence_penalty", |p| p.presence_penalty = -32.0),
            ("frequency_penalty", |p| p.frequency_penalty = 2_147_483_647.0),
            ("frequency_penalty", |p| p.frequency_penalty = f64::NEG_INFINITY),
            ("repetition_penalty", |p| p.repetition_penalty = 0.0),
            ("repetition_penalty", |p| p.repetition_penalty = -1.0),
            ("repetition_penalty", |p| p.repetition_penalty = f64::NAN),
            ("max_tokens", |p| p.max_tokens = Some(0)),
            ("min_tokens", |p| (p.min_tokens, p.max_tokens) = (3, Some(2))),
            ("logprobs", |p| p.logprobs = Some(21)),
            ("prompt_logprobs", |p| p.prompt_logprobs = Some(usize::MAX)),
            ("stop", |p| p.stop = vec![String::new()]),
            ("stop", |p| p.stop = vec!["x".into(); 17]),
            ("stop", |p| p.stop = vec!["x".repeat(MAX_STOP_BYTES + 1)]),
            ("logit_bias", |p| p.logit_bias = vec![(100, 5.0)]),
            ("logit_bias", |p| p.logit_bias = vec![(1, 100.5)]),
            ("logit_bias", |p| p.logit_bias = vec![(1, f64::NAN)]),
            ("stop_token_ids", |p| p.stop_token_ids = vec![101]),
            ("allowed_token_ids", |p| p.allowed_token_ids = Some(vec![])),
            ("allowed_token_ids", |p| p.allowed_token_ids = Some(vec![u32::MAX])),
        ];
        for (i, (field, change)) in refused.into_iter().enumerate() {
            assert_eq!(field_refused(change), field, "case {i}");
        }
    }
}
