//! One request, what it sends back, and its books.

use serde::Serialize;
use suanpan_base::BadArgument;
use suanpan_ledger::AttnBooks;

use crate::logprobs::PositionLogprobs;
use crate::params::SamplingParams;
use crate::sample::LogitFault;

/// Names one request inside one engine. Keys rise with arrival, so their order is the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct RequestKey(pub u64);

/// What to generate from. A request names itself for logs only: two with the same `id` do not disturb each other.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The client's or server's name for it.
    pub id: String,
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// How to sample.
    pub params: SamplingParams,
    /// Only requests of the same namespace share cached prefixes.
    pub namespace: u64,
    /// An earlier request of the same prompt and namespace, of which this one is another choice: the prompt is computed once and
    /// its pages are shared.
    pub fork_of: Option<RequestKey>,
    /// The prefixes of requests with a higher number stay in the cache longer, under the eviction policy `priority`.
    pub cache_priority: i32,
}

/// Why the output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the context limit.
    Length,
    /// The client took it back.
    Abort,
}

impl FinishReason {
    /// As OpenAI and vLLM spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
        }
    }
}

/// Which stop ended the output; the model's own end token gives none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// One of `stop_token_ids`.
    Token(u32),
    /// One of `stop`.
    Text(String),
}

/// Why a request got no (further) answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Its logits could not be sampled from; other requests go on.
    #[error("output token {index}: {fault}")]
    Logits {
        /// Which output token was to be drawn (0 is the first).
        index: usize,
        /// What is wrong with the logits.
        fault: LogitFault,
    },
    /// The engine failed and has stopped.
    #[error("the engine has failed: {0}")]
    Engine(String),
    /// The request was refused. Only an engine driven without checking first says this.
    #[error(transparent)]
    Refused(#[from] BadArgument),
}

/// What a step tells about one request. After `Finished` or `Failed` nothing more comes for that key.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt went further: sent when it is admitted, after each chunk, and again when it resumes.
    Prefill {
        /// The request.
        key: RequestKey,
        /// Prompt tokens that came from the prefix cache.
        cached_tokens: usize,
        /// Tokens whose keys and values are in the cache now.
        computed_tokens: usize,
        /// Tokens to compute before the next output token.
        known_tokens: usize,
    },
    /// Log-probabilities of the prompt tokens from `first_position` on; the first prompt token has none.
    PromptLogprobs {
        /// The request.
        key: RequestKey,
        /// Position of `positions[0]` in the prompt.
        first_position: usize,
        /// One entry per prompt token, `None` for position 0.
        positions: Vec<Option<PositionLogprobs>>,
    },
    /// Output tokens. `text` may lag behind `tokens` (a character or a possible stop string is still open).
    Token {
        /// The request.
        key: RequestKey,
        /// Tokens drawn since the last event; an end token is among them.
        tokens: Vec<u32>,
        /// Text that became final.
        text: String,
        /// One entry per token, if asked for.
        logprobs: Vec<PositionLogprobs>,
    },
    /// The output is complete.
    Finished {
        /// The request.
        key: RequestKey,
        /// Why it ended.
        reason: FinishReason,
        /// Which stop ended it.
        stop_reason: Option<StopReason>,
        /// What it cost.
        books: RequestBooks,
    },
    /// The request failed.
    Failed {
        /// The request.
        key: RequestKey,
        /// Why.
        error: RequestError,
    },
}

impl Event {
    /// The request it is about.
    pub fn key(&self) -> RequestKey {
        match self {
            Event::Prefill { key, .. }
            | Event::PromptLogprobs { key, .. }
            | Event::Token { key, .. }
            | Event::Finished { key, .. }
            | Event::Failed { key, .. } => *key,
        }
    }

    /// Nothing comes after it.
    pub fn is_last(&self) -> bool {
        matches!(self, Event::Finished { .. } | Event::Failed { .. })
    }
}

/// What one request took, entered twice: counted where the work was done, predicted from lengths alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestBooks {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens drawn, an end token included.
    pub output_tokens: usize,
    /// Prompt tokens found in the prefix cache at first admission.
    pub cached_tokens: usize,
    /// Times it lost its pages and was computed again.
    pub preemptions: u32,
    /// Tokens that went through the model, counted from the batches.
    pub computed_tokens: usize,
    /// Tokens that had to: prompt + output − 1, plus what preemptions lost, less what the prefix cache gave.
    pub computed_tokens_predicted: usize,
    /// Most pages its page table held at once, shared ones included.
    pub pages_peak: usize,
    /// Pages that its lengths and its reservation need.
    pub pages_predicted: usize,
    /// Attention, counted by the loops that ran.
    pub counted: AttnBooks,
    /// Attention, from plan and ledger.
    pub predicted: AttnBooks,
}

impl RequestBooks {
    /// Whether every counted number equals its prediction.
    pub fn agree(&self) -> bool {
        self.counted == self.predicted
            && self.pages_peak == self.pages_predicted
            && self.computed_tokens == self.computed_tokens_predicted
    }
}
