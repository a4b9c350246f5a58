//! A choice of experts in place of one MLP: route, gather each expert's rows, multiply, add what comes back with its weight.
//!
//! A row's sum is taken in the order of the experts, so its bits do not depend on the rest of the batch.

use suanpan_ops as ops;

use crate::config::ExpertsConfig;
use crate::family::Experts;
use crate::weights::{Gated, Linear};

use super::arena::{ExpertViews, Views};
use super::layer::{Ctx, add, add_bias, out};
use super::times::Op;

/// One expert of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    expert: u32,
    row: u32,
    weight: f32,
}

/// The choices of a step's rows; memory for the most that a step can have.
#[derive(Debug)]
pub(super) struct Choices {
    list: Vec<Choice>,
    per_token: usize,
    rule: Experts,
    /// Factor of the weights.
    scale: f32,
}

impl Choices {
    /// Room for `max_tokens` rows of the experts of `facts`, weighed by `rule`.
    pub(super) fn new(max_tokens: usize, facts: Option<ExpertsConfig>, rule: Experts) -> Choices {
        let (per_token, scale) = facts.map_or((0, 1.0), |e| (e.per_token, e.scale));
        Choices { list: Vec::with_capacity(max_tokens * per_token), per_token, rule, scale }
    }

    /// Chooses for each row of `logits` `[rows, experts]` the greatest ones (the first of equals), weighed by the softmax over them or over
    /// all; sorted by expert. Overwrites the logits.
    fn choose(&mut self, logits: &mut [f32], experts: usize) {
        self.list.clear();
        for (row, logits) in logits.chunks_exact_mut(experts).enumerate() {
            let first = self.list.len();
            let top = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
            let all = logits.iter().fold(0.0, |sum, x| sum + (x - top).exp());
            for _ in 0..self.per_token {
                // Taken ones and NaN are never greater; a row of NaN takes the first expert and stays NaN.
                let mut best = 0;
                for e in 1..experts {
                    if logits[e] > logits[best] || logits[best].is_nan() {
                        best = e;
                    }
                }
                self.list.push(Choice { expert: best as u32, row: row as u32, weight: logits[best] });
                logits[best] = f32::NEG_INFINITY;
            }
            let max = self.list[first].weight;
            let mut sum = 0.0;
            for choice in &mut self.list[first..] {
                choice.weight = (choice.weight - max).exp();
                sum += choice.weight;
            }
            let sum = if self.rule == Experts::OverAll { all } else { sum };
            self.list[first..].iter_mut().for_each(|c| c.weight *= self.scale / sum);
        }
        self.list.sort_unstable_by_key(|c| (c.expert, c.row));
    }
}

impl Ctx<'_> {
    /// Adds the experts' outputs for the normalised rows, which are the input, to the residual stream.
    pub(super) fn experts(
        &mut self,
        router: &Linear,
        (experts, shared): (&[Gated], Option<&Gated>),
        rows: usize,
        views: &mut Views<'_>,
    ) {
        let hidden = self.config.hidden_size;
        let ExpertViews { x, h, router: logits, gathered, gate, up, act } = views.experts();
        let logits = &mut logits[..rows * experts.len()];
        ops::linear(&mut [(router.weight.weight(), out(logits, experts.len()))], self.input, self.linear);
        add_bias(router, logits);
        self.choices.choose(logits, experts.len());
        self.watch.mark(Op::GateUp);
        let mut start = 0;
        while let Some(&Choice { expert, .. }) = self.choices.list.get(start) {
            let n = self.choices.list[start..].iter().take_while(|c| c.expert == expert).count();
            let gathered = &mut gathered[..n * hidden];
            for (to, choice) in gathered.chunks_exact_mut(hidden).zip(&self.choices.list[start..]) {
                to.copy_from_slice(&h[choice.row as usize * hidden..][..hidden]);
            }
            self.input.set(gathered, n, hidden);
            let expert = &experts[expert as usize];
            self.gated(expert, n, gate, up, act);
            ops::linear(&mut [(expert.down.weight.weight(), out(gathered, hidden))], self.input, self.linear);
            add_bias(&expert.down, gathered);
            for (from, choice) in gathered.chunks_exact(hidden).zip(&self.choices.list[start..]) {
                let x = &mut x[choice.row as usize * hidden..][..hidden];
                x.iter_mut().zip(from).for_each(|(x, y)| *x += choice.weight * y);
            }
            self.watch.mark(Op::Down);
            start += n;
        }
        if let Some(shared) = shared {
            self.input.set(&h[..rows * hidden], rows, hidden);
            self.gated(shared, rows, gate, up, act);
            let x = &mut x[..rows * hidden];
            ops::linear(&mut [(shared.down.weight.weight(), add(x, hidden))], self.input, self.linear);
            add_bias(&shared.down, x);
            self.watch.mark(Op::Down);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(logits: &[f32], experts: usize, per_token: usize) -> Vec<(u32, u32, f32)> {
        by_rule(logits, ExpertsConfig::new(experts, per_token, 1), Experts::OverChosen)
    }

    fn by_rule(logits: &[f32], facts: ExpertsConfig, rule: Experts) -> Vec<(u32, u32, f32)> {
        let experts = facts.count;
        let mut choices = Choices::new(logits.len() / experts, Some(facts), rule);
        choices.choose(&mut logits.to_vec(), experts);
        choices.list.iter().map(|c| (c.expert, c.row, c.weight)).collect()
    }

    #[test]
    fn each_row_takes_its_greatest_experts_with_weights_that_add_to_one() {
        let got = choose(&[0.0, 3.0, 3.0, -1.0, 9.0, 1.0, 0.0, 9.0], 4, 2);
        let at = |e, r| got.iter().find(|c| (c.0, c.1) == (e, r)).map(|c| c.2);
        assert_eq!(got.iter().map(|c| (c.0, c.1)).collect::<Vec<_>>(), [(0, 1), (1, 0), (2, 0), (3, 1)]);
        assert_eq!((at(1, 0), at(2, 0)), (Some(0.5), Some(0.5)));
    }

    #[test]
    fn weights_over_all_experts_are_their_share_times_the_factor() {
        let facts = ExpertsConfig { scale: 2.0, ..ExpertsConfig::new(4, 2, 1) };
        let got = by_rule(&[0.0, 3.0f32.ln(), 2.0f32.ln(), 2.0f32.ln()], facts, Experts::OverAll);
        let want = [(1, 0, 0.75), (2, 0, 0.5)];
        for (got, want) in got.iter().zip(want) {
            assert!((got.0, got.1) == (want.0, want.1) && (got.2 - want.2).abs() < 1e-6, "{got:?}");
        }
    }

    #[test]
    fn a_row_of_nan_stays_one_row_of_nan() {
        let got = choose(&[f32::NAN, f32::NAN, 1.0, 2.0], 2, 1);
        assert!(got.iter().find(|c| c.1 == 0).unwrap().2.is_nan());
        assert_eq!(got.iter().find(|c| c.1 == 1).unwrap(), &(1, 1, 1.0));
        assert_eq!(choose(&[f32::NAN, f32::NAN], 2, 2).len(), 2);
    }
}
