//! Log-probabilities of one position, from the raw logits: before temperature, penalties, bias and masks (vLLM's default mode).

use crate::sample::{LogitFault, highest};

/// The lowest log-probability reported: JSON has no −inf, and a token the model rules out still needs a number (vLLM's value).
pub const LOGPROB_FLOOR: f32 = -9999.0;

/// One token with its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Natural log of its probability; never below [`LOGPROB_FLOOR`], always finite.
    pub logprob: f32,
    /// 1 for the most probable token; equals share the better rank.
    pub rank: usize,
}

/// The reported probabilities of one position.
#[derive(Clone, Debug, PartialEq)]
pub struct PositionLogprobs {
    /// The token that is there.
    pub token: TokenLogprob,
    /// The text this token added: concatenated over positions it is the whole text, so offsets are prefix sums.
    pub text: String,
    /// The most probable tokens, best first; as many as asked.
    pub top: Vec<TokenLogprob>,
}

/// Log-probability of `chosen` and the `n` most probable tokens. O(vocabulary · log n) at worst.
pub fn raw_logprobs(
    logits: &[f32],
    chosen: u32,
    n: usize,
) -> Result<(TokenLogprob, Vec<TokenLogprob>), LogitFault> {
    let max = highest(logits)?;
    let sum: f64 = logits.iter().map(|&l| f64::from((l - max).exp())).sum();
    let log_sum = f64::from(max) + sum.ln();
    let chosen_logit = *logits.get(chosen as usize).ok_or(LogitFault::NoSuchToken(chosen))?;
    let entry = |id: u32, logit: f32, rank: usize| {
        let logprob = ((f64::from(logit) - log_sum) as f32).max(LOGPROB_FLOOR);
        TokenLogprob { id, logprob, rank }
    };
    let rank = 1 + logits.iter().filter(|&&l| l > chosen_logit).count();
    let best = top_n(logits, n);
    let mut top: Vec<TokenLogprob> = Vec::with_capacity(best.len());
    for (i, &(logit, id)) in best.iter().enumerate() {
        let tied = i > 0 && best[i - 1].0 == logit;
        let rank = if tied { top[i - 1].rank } else { i + 1 };
        top.push(entry(id, logit, rank));
    }
    Ok((entry(chosen, chosen_logit, rank), top))
}

/// The `n` highest logits with their ids, highest first, lower id first among equals.
fn top_n(logits: &[f32], n: usize) -> Vec<(f32, u32)> {
    let mut best: Vec<(f32, u32)> = Vec::with_capacity(n + 1);
    for (id, &logit) in logits.iter().enumerate() {
        let full = best.len() == n;
        if n == 0 || (full && logit <= best[n - 1].0) {
            continue;
        }
        let at = best.partition_point(|&(other, _)| other >= logit);
        best.insert(at, (logit, id as u32));
        best.truncate(n);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_match_a_plain_f64_softmax() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 7919 % 1000) as f32) / 37.0 - 9.0).collect();
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let (token, top) = raw_logprobs(&logits, 17, 5).unwrap();
        assert!((f64::from(token.logprob) - (f64::from(logits[17]) - sum.ln())).abs() < 1e-5);
        let mut order: Vec<u32> = (0..1000).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        assert_eq!(top.iter().map(|t| t.id).collect::<Vec<_>>(), order[..5]);
        assert_eq!(top.iter().map(|t| t.rank).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert_eq!(order[token.rank - 1], 17);
    }

    #[test]
    fn impossible_tokens_get_the_floor_and_nothing_is_infinite() {
        let mut logits = vec![f32::NEG_INFINITY; 50];
        logits[3] = 2.0;
        let (token, top) = raw_logprobs(&logits, 7, 5).unwrap();
        assert_eq!(token.logprob, LOGPROB_FLOOR);
        assert_eq!((top[0].id, top[0].logprob), (3, 0.0));
        assert!(top.iter().all(|t| t.logprob.is_finite()));
        assert_eq!(top.iter().map(|t| t.rank).collect::<Vec<_>>(), [1, 2, 2, 2, 2]);
    }

    #[test]
    fn nan_logits_are_a_fault() {
        assert_eq!(raw_logprobs(&[0.0, f32::NAN], 0, 1), Err(LogitFault::NotFinite));
        assert_eq!(raw_logprobs(&[0.0, 1.0], 2, 1), Err(LogitFault::NoSuchToken(2)));
    }
}
