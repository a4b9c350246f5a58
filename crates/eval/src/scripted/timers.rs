//! Servers with known times: a role before the first token, bundles of tokens, drawn delays, one stall.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::json;

use super::minds::all_text;
use super::server::{Asked, Script, Step, done, ends, event, stream_head, text_chunk, wait_until};

/// When tokens come.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// From the request to the first token.
    pub first: Duration,
    /// Between tokens.
    pub gap: Duration,
    /// Tokens.
    pub tokens: u32,
    /// Tokens of a chunk.
    pub bundle: u32,
    /// An event with a role at once.
    pub role_first: bool,
}

impl Pace {
    /// The steps of one answer. Every token is four bytes. A bundle is sent when its last token is there.
    pub fn steps(&self, asked: &Asked) -> Vec<Step> {
        let chat = asked.is_chat();
        let mut steps = vec![Step::Send(stream_head())];
        if self.role_first {
            let role = json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]});
            steps.push(Step::Send(event(&role)));
        }
        let mut sent = 0;
        while sent < self.tokens {
            let n = self.bundle.min(self.tokens - sent);
            sent += n;
            steps.push(Step::Until(self.first + self.gap * (sent - 1)));
            steps.push(Step::Send(event(&text_chunk(chat, &"abc ".repeat(n as usize)))));
        }
        let tokens = u64::from(self.tokens);
        steps.extend(ends(chat, "stop", all_text(asked).len() as u64, tokens).map(|e| Step::Send(event(&e))));
        steps.push(Step::Send(done()));
        steps
    }
}

impl Script for Pace {
    fn steps(&self, asked: &Asked) -> Vec<Step> {
        Pace::steps(self, asked)
    }
}

/// The i-th request of n waits for the (i + ½)/n quantile of an exponential distribution over a floor; the order is mixed.
#[derive(Clone, Copy, Debug)]
pub struct Drawn {
    /// Requests.
    pub n: usize,
    /// Shortest delay.
    pub floor: Duration,
    /// Mean of what comes on top.
    pub mean: Duration,
}

impl Drawn {
    /// Delay of a request. `n` must have no factor 7919, so that each quantile comes once.
    pub fn delay(&self, number: usize) -> Duration {
        let place = number.wrapping_mul(7919) % self.n;
        let quantile = (place as f64 + 0.5) / self.n as f64;
        self.floor + self.mean.mul_f64(-(1.0 - quantile).ln())
    }
}

impl Script for Drawn {
    fn steps(&self, asked: &Asked) -> Vec<Step> {
        let pace = Pace {
            first: self.delay(asked.number),
            gap: Duration::ZERO,
            tokens: 1,
            bundle: 1,
            role_first: false,
        };
        Pace::steps(&pace, asked)
    }
}

/// Answers at once, but one request at a time, and the `at`-th only after a stall.
pub struct Stall {
    /// Which request stalls.
    pub at: usize,
    /// For how long.
    pub time: Duration,
    /// One at a time.
    pub turn: Mutex<()>,
}

impl Script for Stall {
    fn steps(&self, asked: &Asked) -> Vec<Step> {
        let turn = self.turn.lock();
        if asked.number == self.at {
            wait_until(Instant::now() + self.time);
        }
        drop(turn);
        let pace =
            Pace { first: Duration::ZERO, gap: Duration::ZERO, tokens: 1, bundle: 1, role_first: false };
        Pace::steps(&pace, asked)
    }
}
