//! The choices of one request while they run: submission, their merged events, their times, their end.
//!
//! Everything is owned: dropping a [`Run`] (the client is gone, the handler was cancelled) drops the engine's streams,
//! and the engine gives the pages back within a step.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use suanpan_engine::logprobs::PositionLogprobs;
use suanpan_engine::{
    Event, FinishReason, Request, RequestBooks, RequestError, SamplingParams, StopReason, Stream, SubmitError,
};

use crate::app::App;
use crate::books;
use crate::error::ApiError;
use crate::metrics::Done;

/// What to run: every prompt `n` times.
pub(crate) struct Work {
    /// Token ids and checked parameters, prompt by prompt.
    pub prompts: Vec<(Vec<u32>, SamplingParams)>,
    /// Choices per prompt.
    pub n: usize,
    /// Prefix-cache namespace.
    pub namespace: u64,
    /// How long its prefixes stay cached, beside others'.
    pub cache_priority: i32,
    /// The request's name in the log.
    pub label: String,
    /// The route, for the log.
    pub route: &'static str,
}

/// What a choice has to say.
pub(crate) enum Piece {
    /// Log-probabilities of more prompt tokens.
    Prompt(Vec<Option<PositionLogprobs>>),
    /// More output.
    Output {
        /// Tokens.
        tokens: Vec<u32>,
        /// Text that became final.
        text: String,
        /// One entry per token, if asked for.
        logprobs: Vec<PositionLogprobs>,
    },
    /// The end of the choice.
    End {
        /// Why.
        reason: FinishReason,
        /// Which stop, if one of the request's.
        stop_reason: Option<StopReason>,
        /// What it cost.
        books: RequestBooks,
    },
}

/// Running choices. Index = prompt × n + choice.
pub(crate) struct Run {
    choices: Vec<Choice>,
    turn: usize,
}

struct Choice {
    stream: Option<Stream>,
    ticket: Ticket,
}

impl Run {
    /// Submits every choice, or none: a refusal takes back those already submitted.
    pub fn start(app: &App, work: &Work) -> Result<Run, ApiError> {
        app.ensure_alive()?;
        let count = work.prompts.len() * work.n;
        if count > app.facts.max_requests {
            let most = app.facts.max_requests;
            return Err(ApiError::bad_field(
                "n",
                format!("{count} choices never fit: at most {most} at once."),
            ));
        }
        let mut streams = Vec::with_capacity(count);
        for (prompt, params) in &work.prompts {
            let mut first = None;
            for i in 0..work.n {
                let index = streams.len();
                let seed = params.seed.map(|s| s.wrapping_add(i as u64));
                let request = Request {
                    id: format!("{}#{index}", work.label),
                    prompt: prompt.clone(),
                    params: SamplingParams { seed, ..params.clone() },
                    namespace: work.namespace,
                    fork_of: first,
                    cache_priority: work.cache_priority,
                };
                let stream = app.engine.submit(request).map_err(refusal)?;
                first = first.or(Some(stream.key()));
                streams.push((stream, prompt.len(), params));
            }
        }
        app.metrics.asked(work.n);
        let choice = |(index, (stream, prompt_tokens, params)): (usize, (Stream, usize, &SamplingParams))| {
            Choice { stream: Some(stream), ticket: Ticket::new(app, work, index, prompt_tokens, params) }
        };
        let choices = streams.into_iter().enumerate().map(choice).collect();
        Ok(Run { choices, turn: 0 })
    }

    /// Number of choices.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// The next piece of any choice, fairly in turn; None when all have ended. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<(usize, Piece), ApiError>> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(usize, Piece), ApiError>>> {
        let count = self.choices.len();
        let mut open = false;
        for step in 0..count {
            let index = (self.turn + step) % count;
            match self.choices[index].poll(cx) {
                Poll::Ready(Some(result)) => {
                    self.turn = index + 1;
                    return Poll::Ready(Some(result.map(|piece| (index, piece))));
                }
                Poll::Ready(None) => {}
                Poll::Pending => open = true,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }
}

impl Choice {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, ApiError>>> {
        loop {
            let Some(stream) = &mut self.stream else { return Poll::Ready(None) };
            let event = match stream.poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(event) => event,
            };
            let piece = match event {
                Some(Event::Prefill { cached_tokens, .. }) => {
                    let at = stream.admitted_at();
                    self.ticket.admitted(at, cached_tokens);
                    continue;
                }
                Some(Event::PromptLogprobs { positions, .. }) => Ok(Piece::Prompt(positions)),
                Some(Event::Token { tokens, text, logprobs, .. }) => {
                    self.ticket.tokens(tokens.len());
                    Ok(Piece::Output { tokens, text, logprobs })
                }
                Some(Event::Finished { reason, stop_reason, books, .. }) => {
                    self.stream = None;
                    self.ticket.finish(reason.as_str(), Some(&books));
                    Ok(Piece::End { reason, stop_reason, books })
                }
                Some(Event::Failed { error, .. }) => Err(self.fail(error)),
                None => Err(self.fail(RequestError::Engine("it ended without an answer".into()))),
            };
            return Poll::Ready(Some(piece));
        }
    }

    fn fail(&mut self, error: RequestError) -> ApiError {
        self.stream = None;
        self.ticket.finish("error", None);
        failure(error)
    }
}

/// Why the engine took no request, as a client sees it.
fn refusal(error: SubmitError) -> ApiError {
    match error {
        SubmitError::Refused(refused) => refused.into(),
        SubmitError::Busy { unfinished, limit } => ApiError::queue_full(unfinished, limit),
        SubmitError::Stopped(_) => ApiError::unavailable(error.to_string()),
    }
}

/// A failure of the engine as a client sees it.
fn failure(error: RequestError) -> ApiError {
    match error {
        RequestError::Refused(refused) => refused.into(),
        RequestError::Engine(_) => ApiError::unavailable(error.to_string()),
        RequestError::Logits { .. } => ApiError::internal(error.to_string()),
    }
}

/// The times of one choice, and its line in the log: written once, also when the choice is dropped half-way.
struct Ticket {
    app: App,
    label: String,
    route: &'static str,
    index: usize,
    prompt_tokens: usize,
    max_tokens: usize,
    output_tokens: usize,
    cached_tokens: usize,
    arrived: Instant,
    admitted: Option<Instant>,
    first: Option<Instant>,
    last: Instant,
    written: bool,
}

impl Ticket {
    fn new(app: &App, work: &Work, index: usize, prompt_tokens: usize, params: &SamplingParams) -> Ticket {
        let now = Instant::now();
        Ticket {
            app: app.clone(),
            label: work.label.clone(),
            route: work.route,
            index,
            prompt_tokens,
            max_tokens: params.max_tokens.unwrap_or(0),
            output_tokens: 0,
            cached_tokens: 0,
            arrived: now,
            admitted: None,
            first: None,
            last: now,
            written: false,
        }
    }

    /// The event arrives when the first step is over; `at` is when that step began.
    fn admitted(&mut self, at: Option<Instant>, cached_tokens: usize) {
        if self.admitted.is_none() {
            self.admitted = at;
            self.cached_tokens = cached_tokens;
        }
    }

    fn tokens(&mut self, count: usize) {
        let now = Instant::now();
        if count == 0 {
            return;
        }
        match self.first {
            None => {
                self.first = Some(now);
                self.app.metrics.first_token(now - self.arrived);
            }
            Some(_) => self.app.metrics.next_token(now - self.last),
        }
        self.output_tokens += count;
        self.last = now;
    }

    fn finish(&mut self, reason: &'static str, books: Option<&RequestBooks>) {
        if std::mem::replace(&mut self.written, true) {
            return;
        }
        let now = Instant::now();
        let admitted = self.admitted.unwrap_or(now);
        let mut done = Done {
            reason,
            prompt_tokens: self.prompt_tokens as u64,
            output_tokens: self.output_tokens as u64,
            max_tokens: self.max_tokens as u64,
            queue: admitted.saturating_duration_since(self.arrived),
            prefill: self.first.map(|first| first.saturating_duration_since(admitted)),
            decode: self.first.map_or(Duration::ZERO, |first| self.last - first),
            total: now - self.arrived,
            ..Done::default()
        };
        if let Some(b) = books {
            let (counted, predicted) = (books::counted(b), books::predicted(b));
            done.attention_flops = [counted.attention_flops, predicted.attention_flops];
            done.kv_read_bytes = [counted.kv_read_bytes, predicted.kv_read_bytes];
            done.kv_write_bytes = [counted.kv_write_bytes, predicted.kv_write_bytes];
            done.books_agree = Some(b.agree());
        }
        self.app.metrics.done(&done);
        if self.app.options.log_requests {
            self.log(&done, books.map_or(0, |b| b.preemptions));
        }
    }

    fn log(&self, done: &Done, preemptions: u32) {
        tracing::info!(
            target: "suanpan::request",
            id = self.label,
            choice = self.index,
            route = self.route,
            cause = done.reason,
            prompt_tokens = self.prompt_tokens,
            output_tokens = self.output_tokens,
            cached_tokens = self.cached_tokens,
            preemptions,
            wait_ms = done.queue.as_millis() as u64,
            prefill_ms = done.prefill.map_or(0, |d| d.as_millis() as u64),
            decode_ms = done.decode.as_millis() as u64,
            books_agree = done.books_agree,
            "request finished"
        );
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.finish("abort", None);
    }
}
