//! From one row of logits to one token: bias, masks, penalties, temperature, min-p, top-k, top-p, and a counter-based draw.
//!
//! A draw depends on the logits, the request's own history, its seed and the index of the output token; never on the batch, on
//! time, or on the order in which a selection happened to leave its candidates. No full sort: a threshold is selected in O(V)
//! and the kept tokens are walked in id order.

use std::cmp::Ordering;
use std::collections::HashMap;

use crate::params::SamplingParams;
use crate::rng;

/// Logits that no token can be drawn from. The request fails; its neighbours do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogitFault {
    /// A NaN or +∞ among the logits.
    #[error("the model produced logits that are NaN or +inf")]
    NotFinite,
    /// Every token is ruled out.
    #[error("no token can be sampled: every logit is -inf (check logit_bias and allowed_token_ids)")]
    NoCandidate,
    /// A token id past the row.
    #[error("token {0} has no logit")]
    NoSuchToken(u32),
}

/// The highest logit; refuses rows with NaN or +∞, and rows of −∞ only.
pub(crate) fn highest(logits: &[f32]) -> Result<f32, LogitFault> {
    let mut max = f32::NEG_INFINITY;
    let mut finite = true;
    for &l in logits {
        finite &= l < f32::INFINITY; // false for NaN too
        max = if l > max { l } else { max };
    }
    match (finite, max > f32::NEG_INFINITY) {
        (false, _) => Err(LogitFault::NotFinite),
        (true, false) => Err(LogitFault::NoCandidate),
        (true, true) => Ok(max),
    }
}

/// Lowest id among the highest logits.
fn argmax(logits: &[f32]) -> Result<u32, LogitFault> {
    let max = highest(logits)?;
    let at = logits.iter().position(|&l| l == max);
    Ok(at.expect("the maximum is one of the logits") as u32)
}

/// Buffers one engine reuses for every draw.
#[derive(Debug, Default)]
pub struct Scratch {
    adjusted: Vec<f32>,
    candidates: Vec<(f32, u32)>,
    weights: Vec<(u32, f32)>,
}

/// What one request needs to draw its tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    greedy: bool,
    temperature: f32,
    top_p: f64,
    top_k: usize,
    min_p: f64,
    presence: f32,
    frequency: f32,
    repetition: f32,
    bias: Vec<(u32, f32)>,
    allowed: Option<Vec<u32>>,
    /// Tokens that would end the output, ruled out until `min_tokens`.
    ends: Vec<u32>,
    min_tokens: usize,
    seed: u64,
    /// Occurrences in the output so far; empty unless a penalty needs it.
    generated: HashMap<u32, u32>,
    /// Distinct prompt tokens; empty unless the repetition penalty needs them.
    prompt: Vec<u32>,
}

impl Sampler {
    /// A sampler for one request. `ends` are the tokens that end its output; `own_seed` is used when it brings no seed.
    pub fn new(params: &SamplingParams, prompt: &[u32], ends: &[u32], own_seed: u64) -> Self {
        let mut distinct = Vec::new();
        if params.repetition_penalty != 1.0 {
            distinct.extend_from_slice(prompt);
            distinct.sort_unstable();
            distinct.dedup();
        }
        Sampler {
            greedy: params.is_greedy(),
            temperature: params.temperature as f32,
            top_p: params.top_p,
            top_k: usize::try_from(params.top_k).unwrap_or(0),
            min_p: params.min_p,
            presence: params.presence_penalty as f32,
            frequency: params.frequency_penalty as f32,
            repetition: params.repetition_penalty as f32,
            bias: params.logit_bias.iter().map(|&(id, b)| (id, b as f32)).collect(),
            allowed: params.allowed_token_ids.clone(),
            ends: ends.to_vec(),
            min_tokens: params.min_tokens,
            seed: params.seed.unwrap_or(own_seed),
            generated: HashMap::new(),
            prompt: distinct,
        }
    }

    /// Draws output token number `index` (0 is the first).
    pub fn sample(&self, logits: &[f32], index: usize, scratch: &mut Scratch) -> Result<u32, LogitFault> {
        highest(logits)?;
        let Scratch { adjusted, candidates, weights } = scratch;
        let logits = if self.leaves_logits_alone(index) {
            logits
        } else {
            self.adjust(logits, index, adjusted);
            adjusted.as_slice()
        };
        if self.greedy {
            return argmax(logits);
        }
        let max = highest(logits)?;
        let threshold = self.threshold(logits, max, candidates);
        let u = rng::uniform(self.seed, index as u64);
        Ok(self.draw(logits, max, threshold, u, weights))
    }

    /// Records a token of the output, for the penalties.
    pub fn accept(&mut self, token: u32) {
        if self.penalises() {
            *self.generated.entry(token).or_insert(0) += 1;
        }
    }

    fn penalises(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0 || self.repetition != 1.0
    }

    fn leaves_logits_alone(&self, index: usize) -> bool {
        !self.penalises() && self.bias.is_empty() && self.allowed.is_none() && index >= self.min_tokens
    }

    /// Masks, bias and penalties, in vLLM's order.
    fn adjust(&self, logits: &[f32], index: usize, out: &mut Vec<f32>) {
        out.clear();
        match &self.allowed {
            None => out.extend_from_slice(logits),
            Some(allowed) => {
                out.resize(logits.len(), f32::NEG_INFINITY);
                allowed.iter().for_each(|&id| out[id as usize] = logits[id as usize]);
            }
        }
        self.bias.iter().for_each(|&(id, bias)| out[id as usize] += bias);
        if index < self.min_tokens {
            self.ends.iter().for_each(|&id| out[id as usize] = f32::NEG_INFINITY);
        }
        if self.repetition != 1.0 {
            let fresh = self.generated.keys().filter(|id| self.prompt.binary_search(id).is_err());
            for &id in self.prompt.iter().chain(fresh) {
                let l = &mut out[id as usize];
                *l = if *l > 0.0 { *l / self.repetition } else { *l * self.repetition };
            }
        }
        for (&id, &count) in &self.generated {
            out[id as usize] -= self.frequency * count as f32 + self.presence;
        }
    }

    /// The least token that is kept, in the order (higher logit, lower id): min-p, then top-k, then top-p of what is left.
    fn threshold(&self, logits: &[f32], max: f32, candidates: &mut Vec<(f32, u32)>) -> (f32, u32) {
        let floor = if self.min_p > 0.0 {
            max + self.temperature * self.min_p.ln() as f32
        } else {
            f32::NEG_INFINITY
        };
        let floor = floor.min(max);
        if self.top_k == 0 && self.top_p >= 1.0 {
            return (floor, u32::MAX);
        }
        candidates.clear();
        let ids = 0u32..;
        candidates
            .extend(logits.iter().copied().zip(ids).filter(|&(l, _)| l >= floor && l > f32::NEG_INFINITY));
        if self.top_k > 0 && self.top_k < candidates.len() {
            candidates.select_nth_unstable_by(self.top_k - 1, descending);
            candidates.truncate(self.top_k);
        }
        let last = if self.top_p < 1.0 {
            let weight = |l: f32| f64::from(((l - max) / self.temperature).exp());
            nucleus_end(candidates, self.top_p, weight)
        } else {
            candidates.iter().copied().max_by(descending)
        };
        last.unwrap_or((floor, u32::MAX))
    }

    /// Walks the kept tokens in id order to the point `u` of their total weight.
    fn draw(
        &self,
        logits: &[f32],
        max: f32,
        (least, last_id): (f32, u32),
        u: f64,
        weights: &mut Vec<(u32, f32)>,
    ) -> u32 {
        weights.clear();
        let mut total = 0.0f64;
        for (id, &l) in logits.iter().enumerate() {
            if l > least || (l == least && id as u32 <= last_id) {
                let w = ((l - max) / self.temperature).exp();
                total += f64::from(w);
                weights.push((id as u32, w));
            }
        }
        let mut left = u * total;
        let mut drawn = None;
        for &(id, w) in weights.iter().filter(|&&(_, w)| w > 0.0) {
            drawn = Some(id);
            left -= f64::from(w);
            if left < 0.0 {
                break;
            }
        }
        drawn.expect("the highest logit has weight 1 and is always kept")
    }
}

/// Higher logit first, lower id first among equals: a total order because NaN has been refused.
fn descending(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The last member of the smallest set of best candidates whose weight reaches `top_p` of the whole. Expected O(n): halves by
/// selection, keeping the half in which the running weight passes the goal.
fn nucleus_end(candidates: &mut [(f32, u32)], top_p: f64, weight: impl Fn(f32) -> f64) -> Option<(f32, u32)> {
    const SORT_BELOW: usize = 64;
    let goal = top_p * candidates.iter().map(|&(l, _)| weight(l)).sum::<f64>();
    let (mut low, mut high, mut before) = (0, candidates.len(), 0.0);
    while high - low > SORT_BELOW {
        let half = (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(half, descending);
        let mass: f64 = candidates[low..low + half].iter().map(|&(l, _)| weight(l)).sum();
        if before + mass >= goal {
            high = low + half;
        } else {
            before += mass;
            low += half;
        }
    }
    candidates[low..high].sort_unstable_by(descending);
    let passes = |&&(l, _): &&(f32, u32)| {
        before += weight(l);
        before >= goal
    };
    let window = &candidates[low..high];
    window.iter().find(passes).or(window.last()).copied()
}

#[cfg(test)]
#[path = "sample_tests.rs"]
mod tests;
