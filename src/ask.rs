//! One request to a running engine, timed from the caller's side: text, latencies, books.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use suanpan_engine::{EngineHandle, Event, FinishReason, Request, RequestBooks};

/// What came back.
pub struct Answer {
    /// The whole text.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// What it cost.
    pub books: RequestBooks,
    /// From submission to the first output token.
    pub ttft: Duration,
    /// From submission to the end.
    pub end_to_end: Duration,
}

impl Answer {
    /// Time per output token after the first (end-to-end − TTFT over outputs − 1); none for a single token.
    pub fn tpot(&self) -> Option<Duration> {
        let rest = u32::try_from(self.books.output_tokens.checked_sub(1)?).ok()?;
        (self.end_to_end - self.ttft).checked_div(rest)
    }
}

/// What a caller may show while it waits.
pub enum Progress<'a> {
    /// Prompt tokens in the cache, of so many.
    Prefill { computed: usize, known: usize },
    /// Text that became final.
    Text(&'a str),
}

/// Submits `request` and waits for its end.
pub fn ask(
    engine: &EngineHandle,
    request: Request,
    mut show: impl FnMut(Progress<'_>),
) -> anyhow::Result<Answer> {
    let start = Instant::now();
    let mut stream = engine.submit(request)?;
    let (mut text, mut ttft) = (String::new(), None);
    while let Some(event) = stream.recv() {
        match event {
            Event::Prefill { computed_tokens, known_tokens, .. } => {
                show(Progress::Prefill { computed: computed_tokens, known: known_tokens });
            }
            Event::PromptLogprobs { .. } => {}
            Event::Token { text: piece, tokens, .. } => {
                if !tokens.is_empty() {
                    ttft.get_or_insert_with(|| start.elapsed());
                }
                show(Progress::Text(&piece));
                text.push_str(&piece);
            }
            Event::Finished { reason, books, .. } => {
                let end_to_end = start.elapsed();
                return Ok(Answer { text, reason, books, ttft: ttft.unwrap_or(end_to_end), end_to_end });
            }
            Event::Failed { error, .. } => bail!(error),
        }
    }
    None.context("the engine stopped before the answer was complete")
}
