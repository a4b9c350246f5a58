//! The proof that an endpoint reads what it is sent: canaries at five depths of the run's largest length, each in a request of its own,
//! and the endpoint's own count of the prompt. An endpoint that drops text makes the run invalid, not its score low.
//!
//! A weak model may fail to repeat a canary that it did read. So a lost canary is followed by a question that needs no skill: does another
//! canary at that place change the distribution of the first answer token?

use serde::{Deserialize, Serialize};

use crate::endpoint::{Ask, Clock, Endpoint, Exchange, Limits, Protocol};
use crate::item::{Prompt, Role, Turn};
use crate::rng::ItemRng;
use crate::task::Kit;

/// Where canaries stand.
pub const DEPTHS: [u32; 5] = [0, 25, 50, 75, 100];
/// Answer tokens of a probe.
const ANSWER_TOKENS: usize = 24;

/// What is known of one depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// The canary came back.
    Found,
    /// It did not, but another one there changes what the model is about to say.
    Felt,
    /// It did not, and another one there changes nothing.
    Blind,
    /// It did not, and the endpoint gives no distribution, or not the same one twice.
    Unknown,
}

/// What the probes found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// Tokens of the probes.
    pub length_tokens: usize,
    /// Depth in percent, and what was seen there.
    pub depths: Vec<(u32, Seen)>,
    /// Our count and the endpoint's, of the probe where they differ most; nothing where it does not say.
    pub counted: Option<(usize, u64)>,
    /// Tokens that the endpoint adds to a text, by the least difference seen.
    pub overhead_tokens: Option<i64>,
    /// Seconds a prompt token took, for the estimate of the run.
    pub seconds_per_prompt_token: Option<f64>,
    /// Why the endpoint is not believed.
    pub invalid: Option<String>,
    /// In words.
    pub verdict: String,
}

/// How to probe.
pub struct Probe<'a> {
    /// Who is asked.
    pub endpoint: &'a dyn Endpoint,
    /// Filler and counter.
    pub kit: &'a Kit<'a>,
    /// Protocol of the run.
    pub protocol: Protocol,
    /// Tokens of a probe's prompt and answer.
    pub length_tokens: usize,
    /// By what share the endpoint's count may lie under ours; nothing where our counter knows nothing of its tokens.
    pub tolerance: Option<f64>,
    /// Keeps caches out.
    pub salt: u64,
    /// Waits.
    pub limits: Limits,
}

/// Whether the endpoint's count says that text was dropped. A few tokens may merge at seams.
pub fn is_cut(ours: usize, theirs: u64, tolerance: Option<f64>) -> bool {
    tolerance.is_some_and(|t| (theirs as f64) < ours as f64 * (1.0 - t) - 16.0)
}

impl Probe<'_> {
    /// A canary's name and value: letters and digits that no filler has.
    fn canary(&self, depth: u32, which: u32) -> (String, String) {
        let mut rng = ItemRng::new(self.salt, "canary", depth as usize, which, "words");
        let mut word = |n: usize, from: &[u8]| -> String {
            (0..n).map(|_| char::from(from[rng.below(from.len())])).collect()
        };
        let key = format!("canary-{}", word(8, b"bcdfghjkmnpqrstvwxz"));
        (key, word(7, b"23456789"))
    }

    fn prompt(&self, depth: u32, which: u32) -> (Prompt, String) {
        let (key, _) = self.canary(depth, 0);
        let value = self.canary(depth, which).1;
        let head = format!("[{:016x}]\n", self.salt ^ u64::from(depth) << 8);
        let canary = format!("{key}: {value}\n");
        let ask = format!(
            "\nThe text above holds one line with the name of a canary, a colon and a number. Answer with the number that follows the name, and nothing else.\n{key}:"
        );
        let budget = self.length_tokens.saturating_sub(
            ANSWER_TOKENS + [&head, &canary, &ask].iter().map(|t| self.kit.counter.count(t)).sum::<usize>(),
        );
        let filler = filler(self.kit, budget);
        let at = filler.len() * depth as usize / 100;
        // A canary stands between two lines.
        let at = if depth == 100 { filler.len() } else { filler[..at].rfind('\n').map_or(0, |i| i + 1) };
        let text = [&head, &filler[..at], &canary, &filler[at..], &ask].concat();
        (Prompt { turns: vec![Turn::text(Role::User, text)], ..Prompt::default() }, value)
    }

    fn ask(&self, prompt: &Prompt, logprobs: bool, clock: &Clock) -> Exchange {
        self.endpoint.ask(
            &Ask {
                prompt,
                protocol: self.protocol,
                max_tokens: if logprobs { 1 } else { ANSWER_TOKENS },
                stop: &[],
                ignore_eos: false,
                logprobs,
                limits: self.limits,
            },
            clock,
        )
    }

    /// Whether what stands at `depth` moves the first token's distribution.
    fn felt(&self, depth: u32, clock: &Clock) -> Seen {
        let ask = |which| self.ask(&self.prompt(depth, which).0, true, clock).first_logprobs;
        match (ask(0), ask(0), ask(1)) {
            // Whoever gives two answers to one question proves nothing by a third.
            (Some(a), Some(again), Some(_)) if a != again => Seen::Unknown,
            (Some(a), Some(_), Some(b)) if a != b => Seen::Felt,
            (Some(_), Some(_), Some(_)) => Seen::Blind,
            _ => Seen::Unknown,
        }
    }

    /// Makes the proof. A fault of the endpoint makes it invalid.
    pub fn run(&self, clock: &Clock, mut tick: impl FnMut(usize)) -> Proof {
        let mut proof = Proof {
            length_tokens: self.length_tokens,
            depths: Vec::new(),
            counted: None,
            overhead_tokens: None,
            seconds_per_prompt_token: None,
            invalid: None,
            verdict: String::new(),
        };
        for (i, depth) in DEPTHS.into_iter().enumerate() {
            let (prompt, value) = self.prompt(depth, 0);
            let ours = self.kit.counter.count(&crate::endpoint::body::raw_text(&prompt));
            let exchange = self.ask(&prompt, false, clock);
            if let Some(fault) = &exchange.fault {
                proof.invalid = Some(format!("the probe at {depth} % failed: {fault}"));
                break;
            }
            if let Some(theirs) = exchange.usage.prompt_tokens {
                let short = |(a, b): (usize, u64)| a as i64 - b as i64;
                if proof.counted.is_none_or(|c| short((ours, theirs)) > short(c)) {
                    proof.counted = Some((ours, theirs));
                }
                let over = theirs as i64 - ours as i64;
                proof.overhead_tokens = Some(proof.overhead_tokens.map_or(over, |o| o.min(over)));
            }
            let first = exchange.chunks.iter().find(|c| c.is_output()).map_or(exchange.end_us, |c| c.0);
            let taken = first.saturating_sub(exchange.sent_us) as f64 / 1e6 / ours.max(1) as f64;
            proof.seconds_per_prompt_token =
                Some(proof.seconds_per_prompt_token.map_or(taken, |t| t.max(taken)));
            let found = exchange.answer.text.contains(&value) || exchange.answer.reasoning.contains(&value);
            // Text that the endpoint's own count already misses needs no second question.
            let cut = proof.counted.is_some_and(|(ours, theirs)| is_cut(ours, theirs, self.tolerance));
            let seen = match (found, cut) {
                (true, _) => Seen::Found,
                (false, true) => Seen::Unknown,
                (false, false) => self.felt(depth, clock),
            };
            proof.depths.push((depth, seen));
            tick(i + 1);
        }
        self.judge(&mut proof);
        proof
    }

    fn judge(&self, proof: &mut Proof) {
        let at = |what: Seen| {
            let list = proof.depths.iter().filter(|(_, s)| *s == what).map(|(d, _)| format!("{d} %"));
            list.collect::<Vec<_>>().join(", ")
        };
        let (found, felt, blind, unknown) =
            (at(Seen::Found), at(Seen::Felt), at(Seen::Blind), at(Seen::Unknown));
        let read = !(found.is_empty() && felt.is_empty());
        if let Some((ours, theirs)) = proof.counted
            && is_cut(ours, theirs, self.tolerance)
        {
            let line = format!(
                "the endpoint counted {theirs} prompt tokens where {ours} were sent: the prompt was cut"
            );
            proof.invalid.get_or_insert(line);
        } else if !blind.is_empty() && read {
            let line = format!("what stands at {blind} of the prompt has no influence on the answer");
            proof.invalid.get_or_insert(line);
        } else if !(blind.is_empty() && unknown.is_empty())
            && (self.tolerance.is_none() || proof.counted.is_none())
        {
            let line = format!(
                "not proven that the whole prompt is read: canaries lost at {}, and no count of prompt tokens to hold against ours",
                [blind.as_str(), unknown.as_str()]
                    .iter()
                    .filter(|s| !s.is_empty())
                    .copied()
                    .collect::<Vec<_>>()
                    .join(", ")
            );
            proof.invalid.get_or_insert(line);
        }
        proof.verdict = match &proof.invalid {
            Some(why) => format!("invalid: {why}"),
            None if blind.is_empty() && unknown.is_empty() && felt.is_empty() => {
                "read: every canary came back".into()
            }
            None if blind.is_empty() && unknown.is_empty() => {
                format!("read: canaries came back or were felt at every depth (felt only at {felt})")
            }
            None => "counted: the endpoint's count of prompt tokens is ours; canaries were lost by the model"
                .into(),
        };
    }
}

/// Lines of the haystack of at most `budget_tokens`.
fn filler(kit: &Kit<'_>, budget_tokens: usize) -> String {
    let (mut text, mut tokens, mut i) = (String::new(), 0, 0u64);
    loop {
        let sentence = kit.haystack.sentence(i);
        tokens += kit.counter.count(sentence) + 1;
        if tokens > budget_tokens {
            return text;
        }
        text.push_str(sentence);
        text.push('\n');
        i += 1;
    }
}
