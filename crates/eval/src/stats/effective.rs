//! Effective length: the longest length whose lower bound clears a threshold, and whose every shorter one does, too.

use serde::{Deserialize, Serialize};

use super::Interval;

/// RULER's threshold: what Llama-2-7B reaches at 4k.
pub const ABSOLUTE: f64 = 0.856;
/// Share of the own base score.
pub const RELATIVE: f64 = 0.85;

/// A claim about length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effective {
    /// `absolute` (85.6) or `relative` (85 % of the base).
    pub kind: String,
    /// Threshold, 0 ..= 1.
    pub threshold: f64,
    /// Largest length whose lower bound and all shorter ones' clear it; nothing if not even the shortest does.
    pub certified_tokens: Option<usize>,
    /// The same by the plain value, as others print it.
    pub plain_tokens: Option<usize>,
}

fn longest(lengths: &[(usize, Interval)], clears: impl Fn(&Interval) -> bool) -> Option<usize> {
    lengths.iter().take_while(|(_, s)| clears(s)).last().map(|(length, _)| *length)
}

/// From scores by length, shortest first. The base of the relative claim is the shortest length's value.
pub fn lengths(scores: &[(usize, Interval)]) -> Vec<Effective> {
    let of = |kind: &str, threshold: f64| Effective {
        kind: kind.into(),
        threshold,
        certified_tokens: longest(scores, |s| s.low >= threshold),
        plain_tokens: longest(scores, |s| s.value >= threshold),
    };
    let mut all = vec![of("absolute", ABSOLUTE)];
    if let Some((_, base)) = scores.first().filter(|(_, s)| s.value > 0.0) {
        all.push(of("relative", RELATIVE * base.value));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lucky_longer_length_does_not_count() {
        let s = |value: f64, half: f64| Interval { value, low: value - half, high: value + half };
        let got = lengths(&[(4096, s(0.95, 0.05)), (8192, s(0.87, 0.05)), (16384, s(0.93, 0.05))]);
        assert_eq!(got[0].certified_tokens, Some(4096));
        assert_eq!(got[0].plain_tokens, Some(16384));
        assert_eq!(got[1].certified_tokens, Some(16384));
        assert!(lengths(&[(512, s(0.0, 0.0))]).len() == 1);
    }
}
