//! Event streams: one `data:` line per chunk, comments while nothing happens, `data: [DONE]` at the end.
//!
//! A task owns the choices and feeds the connection. When the connection goes, the task ends at once and the choices with
//! it, also before the first token.

use std::collections::BTreeSet;
use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use suanpan_engine::RequestBooks;
use suanpan_engine::logprobs::PositionLogprobs;
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use crate::app::App;
use crate::books;
use crate::collect::{Heading, stop_reason};
use crate::error::ApiError;
use crate::logprobs;
use crate::prompt::Ready;
use crate::run::{Piece, Run};
use crate::wire::{
    self, ChunkChoice, ChunkUsage, CompletionChoice, CompletionLogprobs, Delta, Frame, PromptDetails, Usage,
};

/// Chunks that may wait for a slow client before the task waits with them.
const CHUNKS_AHEAD: usize = 32;

/// Which usage a stream carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UsageMode {
    /// A last chunk with the usage.
    pub include: bool,
    /// The usage so far in every chunk.
    pub continuous: bool,
}

/// How a route spells its chunks.
pub(crate) trait Spelling: Send + Sync + 'static {
    /// One choice of a chunk.
    type Choice: Serialize + Send + Sync;
    /// `object` of every chunk.
    const OBJECT: &'static str;
    /// What choice `index` says before its first token, if anything.
    fn open(&mut self, index: usize) -> Option<Self::Choice>;
    /// New output; None if there is nothing to show yet.
    fn output(
        &mut self,
        app: &App,
        index: usize,
        tokens: Vec<u32>,
        text: String,
        logprobs: &[PositionLogprobs],
    ) -> Option<Self::Choice>;
    /// The end of choice `index`.
    fn end(&mut self, index: usize, reason: &'static str, stop: Option<wire::StopReason>) -> Self::Choice;
}

/// Starts the stream of `run`.
pub(crate) fn respond<S: Spelling>(
    app: &App,
    run: Run,
    heading: Heading,
    prompts: Vec<Ready>,
    mode: UsageMode,
    spelling: S,
) -> Response {
    let (sender, receiver) = mpsc::channel(CHUNKS_AHEAD);
    let books = vec![RequestBooks::default(); run.len()];
    let generated = 0;
    let writer = Writer { app: app.clone(), sender, heading, prompts, mode, spelling, books, generated };
    tokio::spawn(writer.write(run));
    let body = Body::from_stream(ReceiverStream::new(receiver).map(Ok::<Bytes, Infallible>));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Proxies that buffer would hold the tokens back.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}

/// The client is gone.
struct Gone;

struct Writer<S> {
    app: App,
    sender: Sender<Bytes>,
    heading: Heading,
    prompts: Vec<Ready>,
    mode: UsageMode,
    spelling: S,
    books: Vec<RequestBooks>,
    generated: u64,
}

impl<S: Spelling> Writer<S> {
    async fn write(mut self, run: Run) {
        if let Ok(Err(error)) = self.all(run).await {
            // The status line is long gone: the error is the last event.
            let _gone = self.send(format!("data: {}\n\n", error.to_json())).await;
        }
    }

    /// Outer error: nobody listens. Inner error: the stream ends with it.
    async fn all(&mut self, mut run: Run) -> Result<Result<(), ApiError>, Gone> {
        for index in 0..run.len() {
            if let Some(choice) = self.spelling.open(index) {
                self.chunk(vec![choice], index == 0).await?;
            }
        }
        while let Some(next) = self.next(&mut run).await? {
            let (index, piece) = match next {
                Ok(next) => next,
                Err(error) => return Ok(Err(error)),
            };
            if let Some(choice) = self.choice(index, piece) {
                self.chunk(vec![choice], false).await?;
            }
        }
        if self.mode.include {
            let usage = ChunkUsage::Known(books::usage(&self.books, self.heading.n));
            let frame = self.frame(Vec::new(), Some(usage), false);
            self.event(&frame).await?;
        }
        self.send("data: [DONE]\n\n".into()).await.map(Ok)
    }

    /// The next piece, with comments in the meantime.
    async fn next(&self, run: &mut Run) -> Result<Option<Result<(usize, Piece), ApiError>>, Gone> {
        loop {
            tokio::select! {
                biased;
                () = self.sender.closed() => return Err(Gone),
                next = run.next() => return Ok(next),
                () = tokio::time::sleep(self.app.options.keep_alive) => self.send(": keep-alive\n\n".into()).await?,
            }
        }
    }

    fn choice(&mut self, index: usize, piece: Piece) -> Option<S::Choice> {
        match piece {
            Piece::Prompt(_) => None,
            Piece::Output { tokens, text, logprobs } => {
                self.generated += tokens.len() as u64;
                self.spelling.output(&self.app, index, tokens, text, &logprobs)
            }
            Piece::End { reason, stop_reason: stop, books } => {
                self.books[index] = books;
                Some(self.spelling.end(index, reason.as_str(), stop.map(stop_reason)))
            }
        }
    }

    async fn chunk(&mut self, choices: Vec<S::Choice>, first: bool) -> Result<(), Gone> {
        let usage = match self.mode {
            UsageMode { continuous: true, .. } => Some(ChunkUsage::Known(self.usage_so_far())),
            UsageMode { include: true, .. } => Some(ChunkUsage::Later(())),
            _ => None,
        };
        let frame = self.frame(choices, usage, first);
        self.event(&frame).await
    }

    fn usage_so_far(&self) -> Usage {
        let prompt_tokens = self.prompts.iter().map(|p| p.ids.len() as u64).sum();
        Usage {
            prompt_tokens,
            completion_tokens: self.generated,
            total_tokens: prompt_tokens + self.generated,
            prompt_tokens_details: PromptDetails::default(),
            ledger: None,
        }
    }

    fn frame(&self, choices: Vec<S::Choice>, usage: Option<ChunkUsage>, first: bool) -> Frame<'_, S::Choice> {
        let ids = self.prompts.first().filter(|_| first && self.heading.token_ids);
        Frame {
            id: &self.heading.id,
            object: S::OBJECT,
            created: self.heading.created,
            model: &self.heading.model,
            choices,
            usage,
            prompt_token_ids: ids.map(|p| p.ids.as_slice()),
        }
    }

    async fn event(&self, frame: &Frame<'_, S::Choice>) -> Result<(), Gone> {
        let text = match serde_json::to_string(frame) {
            Ok(text) => text,
            Err(e) => ApiError::internal(e.to_string()).to_json(),
        };
        self.send(format!("data: {text}\n\n")).await
    }

    async fn send(&self, text: String) -> Result<(), Gone> {
        self.sender.send(text.into()).await.map_err(|_closed| Gone)
    }
}

/// `chat.completion.chunk`.
pub(crate) struct ChatSpelling {
    /// Whether log-probabilities were asked for.
    pub logprobs: bool,
    /// Whether token ids were asked for.
    pub token_ids: bool,
}

impl Spelling for ChatSpelling {
    type Choice = ChunkChoice;
    const OBJECT: &'static str = "chat.completion.chunk";

    fn open(&mut self, index: usize) -> Option<ChunkChoice> {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
        Some(ChunkChoice { index, delta, ..ChunkChoice::default() })
    }

    fn output(
        &mut self,
        app: &App,
        index: usize,
        tokens: Vec<u32>,
        text: String,
        logprobs: &[PositionLogprobs],
    ) -> Option<ChunkChoice> {
        if text.is_empty() && !self.logprobs && !self.token_ids {
            return None;
        }
        Some(ChunkChoice {
            index,
            delta: Delta { role: None, content: Some(text) },
            logprobs: self.logprobs.then(|| logprobs::chat(&app.model.tokenizer, logprobs)),
            token_ids: self.token_ids.then_some(tokens),
            ..ChunkChoice::default()
        })
    }

    fn end(
        &mut self,
        index: usize,
        reason: &'static str,
        stop_reason: Option<wire::StopReason>,
    ) -> ChunkChoice {
        ChunkChoice { index, finish_reason: Some(reason), stop_reason, ..ChunkChoice::default() }
    }
}

/// `text_completion`, streamed.
pub(crate) struct CompletionSpelling {
    /// Alternatives per token, if log-probabilities were asked for.
    pub logprobs: Option<usize>,
    /// Whether token ids were asked for.
    pub token_ids: bool,
    /// What each choice says first (`echo`), choice by choice; empty = nothing.
    pub echo: Vec<String>,
    /// Ids of each choice's prompt, choice by choice, if asked for.
    pub prompt_ids: Vec<Vec<u32>>,
    /// Where each choice's next token starts, in characters.
    pub offsets: Vec<usize>,
    /// Choices whose prompt ids were sent.
    pub opened: BTreeSet<usize>,
}

impl CompletionSpelling {
    fn prompt_ids(&mut self, index: usize) -> Option<Vec<u32>> {
        (self.token_ids && self.opened.insert(index)).then(|| std::mem::take(&mut self.prompt_ids[index]))
    }
}

impl Spelling for CompletionSpelling {
    type Choice = CompletionChoice;
    const OBJECT: &'static str = "text_completion";

    fn open(&mut self, index: usize) -> Option<CompletionChoice> {
        let text = self.echo.get_mut(index).map(std::mem::take)?;
        let prompt_token_ids = self.prompt_ids(index);
        Some(CompletionChoice { index, text, prompt_token_ids, ..CompletionChoice::default() })
    }

    fn output(
        &mut self,
        app: &App,
        index: usize,
        tokens: Vec<u32>,
        text: String,
        logprobs: &[PositionLogprobs],
    ) -> Option<CompletionChoice> {
        if text.is_empty() && self.logprobs.is_none() && !self.token_ids {
            return None;
        }
        let lists = self.logprobs.map(|top| {
            let mut lists = CompletionLogprobs::default();
            logprobs::append(&app.model.tokenizer, &mut lists, logprobs, top, &mut self.offsets[index]);
            lists
        });
        Some(CompletionChoice {
            index,
            text,
            logprobs: lists,
            prompt_token_ids: self.prompt_ids(index),
            token_ids: self.token_ids.then_some(tokens),
            ..CompletionChoice::default()
        })
    }

    fn end(
        &mut self,
        index: usize,
        reason: &'static str,
        stop: Option<wire::StopReason>,
    ) -> CompletionChoice {
        CompletionChoice {
            index,
            finish_reason: Some(reason),
            stop_reason: stop,
            ..CompletionChoice::default()
        }
    }
}
