//! Who answers: any OpenAI-compatible server over HTTP, or whatever implements [`Endpoint`] (the command line lends our engine).
//!
//! An exchange is raw: what was read when, before anything was parsed. Every reading of it (TTFT, TPOT, a peer's "ITL") is computed
//! later, in `stats::serving`, from the same stamps. One thread carries one request: no executor stands between socket and clock.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::item::{Answer, Prompt};

pub mod body;
pub mod delta;
pub mod openai;
pub mod response;
pub mod socket;
pub mod sse;

pub use openai::{HttpEndpoint, HttpOptions};

/// The clock of one session of a run: microseconds since it began.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Default for Clock {
    fn default() -> Self {
        Clock { start: Instant::now() }
    }
}

impl Clock {
    /// Now, in microseconds.
    pub fn now_us(&self) -> u64 {
        self.us(Instant::now())
    }

    /// An instant, in microseconds; 0 for what lies before the start.
    pub fn us(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_micros() as u64
    }

    /// The instant of so many microseconds.
    pub fn instant(&self, us: u64) -> Instant {
        self.start + Duration::from_micros(us)
    }
}

/// How prompts are spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// Turns, put into the model's template by the endpoint.
    #[default]
    Chat,
    /// The text of the turns and the answer's lead-in, one after another: base models, and models without a template.
    Completion,
}

impl Protocol {
    /// As conditions name it.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Chat => "chat",
            Protocol::Completion => "completion",
        }
    }
}

/// How long and how much an endpoint may take. Whatever it does, a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// From the first byte of a connection to the last of the answer.
    pub total: Duration,
    /// To resolve a name, connect, and greet with TLS.
    pub connect: Duration,
    /// Between two bytes of the answer once its head is there.
    pub idle: Duration,
    /// Bytes of an answer's body.
    pub body_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            total: Duration::from_secs(600),
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(300),
            body_bytes: 64 << 20,
        }
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// What is said.
    pub prompt: &'a Prompt,
    /// How.
    pub protocol: Protocol,
    /// Answer tokens at most.
    pub max_tokens: usize,
    /// Texts that end the answer.
    pub stop: &'a [String],
    /// Go on past the model's end token, so that load tests have the lengths they were given.
    pub ignore_eos: bool,
    /// Ask for the distribution of the first answer token (read-proof).
    pub logprobs: bool,
    /// Waits.
    pub limits: Limits,
}

/// What a piece of a stream carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Carries {
    /// Nothing that counts as output: a role, an empty delta, a finish reason, usage.
    #[serde(rename = "-")]
    Nothing,
    /// Answer text.
    #[serde(rename = "a")]
    Answer,
    /// Reasoning.
    #[serde(rename = "r")]
    Reasoning,
    /// A piece of a tool call.
    #[serde(rename = "t")]
    Tool,
}

/// One piece of a stream, as it came: time of the socket read that completed it, what it carried, bytes of text, tokens if known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chunk(pub u64, pub Carries, pub u32, pub Option<f64>);

impl Chunk {
    /// Whether it carried output.
    pub fn is_output(&self) -> bool {
        self.1 != Carries::Nothing
    }
}

/// Where the number of tokens of each chunk comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokensBy {
    /// The server said so with each chunk.
    Server,
    /// The counter's count of the text so far, scaled to the server's total.
    Counter,
    /// One a chunk: nothing else is known.
    #[default]
    Chunks,
}

/// What the endpoint says it took. Unknown stays unknown: a server that does not tell cached tokens has no cached share of 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt, template included.
    pub prompt_tokens: Option<u64>,
    /// Tokens of the answer.
    pub completion_tokens: Option<u64>,
    /// Prompt tokens from a prefix cache.
    pub cached_tokens: Option<u64>,
    /// Answer tokens that were reasoning.
    pub reasoning_tokens: Option<u64>,
    /// Our server's books.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ledger: Option<serde_json::Value>,
}

/// How an exchange failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The name does not resolve.
    Resolve,
    /// Nobody accepts the connection.
    Connect,
    /// TLS failed: certificate, version, or no TLS at all.
    Tls,
    /// A wait ended without what was waited for.
    Timeout,
    /// A status other than 200.
    Status,
    /// 429 or 503: come back later.
    Busy,
    /// The answer is longer than its limit.
    TooLong,
    /// The connection closed before the answer was complete.
    Disconnected,
    /// Not HTTP, not JSON, not the fields of a completion.
    Malformed,
    /// HTML or another type where JSON or an event stream belongs.
    ContentType,
    /// An error inside a stream that had begun with 200.
    InBand,
    /// The context does not hold the prompt.
    Overflow,
    /// The engine in this process failed.
    Engine,
}

/// One line that says what happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{line}")]
pub struct Fault {
    /// Kind.
    pub kind: FaultKind,
    /// For a person: what was expected, what came.
    pub line: String,
    /// When to come back, if the endpoint said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u64>,
}

impl Fault {
    /// A fault in words; at most 400 bytes are kept.
    pub fn new(kind: FaultKind, line: impl Into<String>) -> Fault {
        let mut line: String = line.into().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        if line.len() > 400 {
            let end = (0..=400).rev().find(|&i| line.is_char_boundary(i)).unwrap_or(0);
            line.truncate(end);
            line.push('…');
        }
        Fault { kind, line, retry_after_s: None }
    }
}

/// One request and all that came back, in microseconds of the session's clock.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// Before the connection was opened.
    pub sent_us: u64,
    /// The connection stands (TLS included).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected_us: Option<u64>,
    /// The head of the answer was complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_us: Option<u64>,
    /// The last byte, or the fault.
    pub end_us: u64,
    /// Status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The answer came in pieces.
    pub streamed: bool,
    /// The pieces.
    pub chunks: Vec<Chunk>,
    /// How their tokens are known.
    pub tokens_by: TokensBy,
    /// Usage.
    pub usage: Usage,
    /// Answer.
    pub answer: Answer,
    /// Log-probabilities of the first answer token's candidates, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_logprobs: Option<serde_json::Value>,
    /// What failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
}

/// What an endpoint says about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// `suanpan`, `vllm` or `openai`: decides which extra fields it is sent.
    pub kind: String,
    /// Longest prompt and answer together.
    pub max_model_len: Option<usize>,
    /// Conditions by name (see `conditions`).
    pub conditions: serde_json::Map<String, serde_json::Value>,
}

/// Somebody who answers.
pub trait Endpoint: Send + Sync {
    /// Its address or name, for people.
    fn name(&self) -> String;

    /// What it says about itself; a fault when it does not answer at all.
    fn known(&self) -> Result<Known, Fault>;

    /// Carries one request to its end. Never waits longer than the limits.
    fn ask(&self, ask: &Ask<'_>, clock: &Clock) -> Exchange;
}
