//! Whole replies: waits for every choice of a request and puts its answer together.

use axum::response::Response;
use suanpan_engine::logprobs::PositionLogprobs;
use suanpan_engine::{FinishReason, RequestBooks, StopReason};

use crate::app::App;
use crate::books;
use crate::error::ApiError;
use crate::http::json;
use crate::logprobs;
use crate::prompt::Ready;
use crate::run::{Piece, Run};
use crate::wire::{self, ChatChoice, ChatReply, ChunkUsage, CompletionChoice, Frame, ReplyMessage};

/// What a response needs beside the choices themselves.
pub(crate) struct Heading {
    /// The response's own id.
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// The served name that the client used.
    pub model: String,
    /// Choices per prompt.
    pub n: usize,
    /// Alternatives per generated token, if log-probabilities were asked for.
    pub logprobs: Option<usize>,
    /// Whether `prompt_logprobs` was asked for (not only needed for `echo`).
    pub prompt_logprobs: bool,
    /// Whether token ids are returned.
    pub token_ids: bool,
}

#[derive(Default)]
struct Answer {
    text: String,
    tokens: Vec<u32>,
    logprobs: Vec<PositionLogprobs>,
    prompt: Vec<Option<PositionLogprobs>>,
    end: Option<(FinishReason, Option<StopReason>)>,
    books: RequestBooks,
}

impl Answer {
    fn finish_reason(&self) -> &'static str {
        self.end.as_ref().map_or(FinishReason::Abort.as_str(), |end| end.0.as_str())
    }

    fn stop_reason(&self) -> Option<wire::StopReason> {
        self.end.as_ref().and_then(|end| end.1.clone()).map(stop_reason)
    }
}

/// The engine's stop as the wire shows it.
pub(crate) fn stop_reason(reason: StopReason) -> wire::StopReason {
    match reason {
        StopReason::Token(id) => wire::StopReason::Token(id),
        StopReason::Text(text) => wire::StopReason::Text(text),
    }
}

async fn answers(mut run: Run) -> Result<Vec<Answer>, ApiError> {
    let mut answers: Vec<Answer> = (0..run.len()).map(|_| Answer::default()).collect();
    while let Some(next) = run.next().await {
        let (index, piece) = next?;
        let answer = &mut answers[index];
        match piece {
            Piece::Prompt(positions) => answer.prompt.extend(positions),
            Piece::Output { tokens, text, logprobs } => {
                answer.tokens.extend(tokens);
                answer.text.push_str(&text);
                answer.logprobs.extend(logprobs);
            }
            Piece::End { reason, stop_reason, books } => {
                answer.end = Some((reason, stop_reason));
                answer.books = books;
            }
        }
    }
    Ok(answers)
}

fn all_books(answers: &[Answer]) -> Vec<RequestBooks> {
    answers.iter().map(|a| a.books).collect()
}

/// A whole chat reply.
pub(crate) async fn chat(
    app: &App,
    run: Run,
    heading: &Heading,
    prompt: &Ready,
) -> Result<Response, ApiError> {
    let answers = answers(run).await?;
    let tokenizer = &app.model.tokenizer;
    let usage = books::usage(&all_books(&answers), heading.n);
    let first = answers.first().filter(|_| heading.prompt_logprobs);
    let prompt_logprobs = first.map(|a| logprobs::prompt(tokenizer, &a.prompt));
    let choice = |(index, a): (usize, Answer)| ChatChoice {
        index,
        logprobs: heading.logprobs.map(|_| logprobs::chat(tokenizer, &a.logprobs)),
        finish_reason: a.finish_reason(),
        stop_reason: a.stop_reason(),
        token_ids: heading.token_ids.then_some(a.tokens),
        message: ReplyMessage { role: "assistant", content: a.text, refusal: None },
    };
    let reply = ChatReply {
        id: &heading.id,
        object: "chat.completion",
        created: heading.created,
        model: &heading.model,
        choices: answers.into_iter().enumerate().map(choice).collect(),
        usage,
        prompt_logprobs,
        prompt_token_ids: heading.token_ids.then(|| prompt.ids.clone()),
    };
    json(&reply)
}

/// A whole text completion.
pub(crate) async fn completion(
    app: &App,
    run: Run,
    heading: &Heading,
    prompts: &[Ready],
    echo: bool,
) -> Result<Response, ApiError> {
    let answers = answers(run).await?;
    let drawn = answers.len() / prompts.len().max(1);
    let usage = books::usage(&all_books(&answers), drawn);
    let answers = if drawn > heading.n { likeliest(answers, drawn, heading.n) } else { answers };
    let choice = |(index, answer): (usize, Answer)| {
        completion_choice(app, heading, &prompts[index / heading.n], echo, index, answer)
    };
    let reply = Frame {
        id: &heading.id,
        object: "text_completion",
        created: heading.created,
        model: &heading.model,
        choices: answers.into_iter().enumerate().map(choice).collect::<Vec<_>>(),
        usage: Some(ChunkUsage::Known(usage)),
        prompt_token_ids: None,
    };
    json(&reply)
}

/// Of each `drawn` answers of one prompt the `n` with the highest mean log-probability of a token, the best first.
fn likeliest(answers: Vec<Answer>, drawn: usize, n: usize) -> Vec<Answer> {
    let mean = |answer: &Answer| {
        let sum: f64 = answer.logprobs.iter().map(|p| f64::from(p.token.logprob)).sum();
        sum / answer.logprobs.len().max(1) as f64
    };
    let mut answers = answers.into_iter().peekable();
    let mut kept = Vec::new();
    while answers.peek().is_some() {
        let mut of_prompt: Vec<Answer> = answers.by_ref().take(drawn).collect();
        of_prompt.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        kept.extend(of_prompt.into_iter().take(n));
    }
    kept
}

fn completion_choice(
    app: &App,
    heading: &Heading,
    prompt: &Ready,
    echo: bool,
    index: usize,
    answer: Answer,
) -> CompletionChoice {
    let tokenizer = &app.model.tokenizer;
    let lists = heading.logprobs.map(|top| {
        let (mut lists, mut offset) = match echo {
            true => logprobs::echoed(tokenizer, &prompt.ids, &prompt.text, &answer.prompt, top),
            false => Default::default(),
        };
        logprobs::append(tokenizer, &mut lists, &answer.logprobs, top, &mut offset);
        lists
    });
    CompletionChoice {
        index,
        logprobs: lists,
        finish_reason: Some(answer.finish_reason()),
        stop_reason: answer.stop_reason(),
        prompt_logprobs: heading.prompt_logprobs.then(|| logprobs::prompt(tokenizer, &answer.prompt)),
        prompt_token_ids: heading.token_ids.then(|| prompt.ids.clone()),
        token_ids: heading.token_ids.then_some(answer.tokens),
        text: if echo { format!("{}{}", prompt.text, answer.text) } else { answer.text },
    }
}
