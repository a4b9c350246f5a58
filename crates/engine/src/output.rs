//! The output side of one request: sampler, text, stops, log-probabilities and books, from its first token to its last.

use suanpan_ledger::AttnBooks;
use suanpan_model::Tokenizer;
use suanpan_model::tokenizer::Detokenizer;

use crate::logprobs::{PositionLogprobs, raw_logprobs};
use crate::request::{FinishReason, Request, RequestBooks, StopReason};
use crate::sample::{LogitFault, Sampler, Scratch};
use crate::scheduler::Closed;
use crate::stop::StopMatcher;

/// How an output ended.
pub(crate) type End = (FinishReason, Option<StopReason>);

/// What one drawn token brings.
pub(crate) struct Drawn {
    pub token: u32,
    /// Text that became final.
    pub text: String,
    pub logprobs: Option<PositionLogprobs>,
    pub end: Option<End>,
}

/// One request between submission and end, without its tokens and pages (the scheduler has those).
pub(crate) struct Output {
    prompt: Vec<u32>,
    max_outputs: usize,
    outputs: usize,
    min_tokens: usize,
    sampler: Sampler,
    /// Empty when end tokens are ignored.
    eos: Vec<u32>,
    stop_token_ids: Vec<u32>,
    stop_strings: Vec<String>,
    include_stop: bool,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    prompt_text: Detokenizer,
    /// Prompt positions whose log-probability has been reported.
    scored: usize,
    counted: AttnBooks,
    predicted: AttnBooks,
    computed_tokens: usize,
}

impl Output {
    /// `max_outputs` is what the door left of `max_tokens`; `own_seed` serves requests without a seed.
    pub fn new(
        request: &Request,
        max_outputs: usize,
        eos: &[u32],
        tokenizer: &Tokenizer,
        own_seed: u64,
    ) -> Output {
        let params = &request.params;
        let eos = if params.ignore_eos { Vec::new() } else { eos.to_vec() };
        let ends: Vec<u32> = eos.iter().chain(&params.stop_token_ids).copied().collect();
        let scores = params.prompt_logprobs.is_some();
        let detokenizer = Detokenizer::new(tokenizer, params.skip_special_tokens);
        Output {
            prompt: if scores { request.prompt.clone() } else { Vec::new() },
            max_outputs,
            outputs: 0,
            min_tokens: params.min_tokens,
            sampler: Sampler::new(params, &request.prompt, &ends, own_seed),
            eos,
            stop_token_ids: params.stop_token_ids.clone(),
            stop_strings: params.stop.clone(),
            include_stop: params.include_stop_str_in_output,
            stops: StopMatcher::new(&params.stop, params.include_stop_str_in_output),
            logprobs: params.logprobs,
            prompt_logprobs: params.prompt_logprobs,
            prompt_text: detokenizer.clone(),
            detokenizer,
            scored: 0,
            counted: AttnBooks::default(),
            predicted: AttnBooks::default(),
            computed_tokens: 0,
        }
    }

    /// Adds one chunk to the books.
    pub fn book(&mut self, tokens: usize, counted: AttnBooks, predicted: AttnBooks) {
        self.computed_tokens += tokens;
        self.counted += counted;
        self.predicted += predicted;
    }

    /// True when the prompt is only scored.
    pub fn draws_nothing(&self) -> bool {
        self.max_outputs == 0
    }

    /// Whether some position below `end` of the prompt is still to be scored from the logits of the one before it.
    pub fn wants_scores(&self, end: usize) -> bool {
        self.scored < self.prompt.len() && self.scored <= end
    }

    /// The first prompt position has no score; `Some(None)` the first time it is passed.
    pub fn score_first(&mut self) -> Option<Option<PositionLogprobs>> {
        if self.scored > 0 || self.prompt.is_empty() {
            return None;
        }
        self.prompt_text.push(self.prompt[0]);
        self.scored = 1;
        Some(None)
    }

    /// Scores the prompt token after `position` from the logits at `position`, if it is the next in order.
    pub fn score(&mut self, position: usize, logits: &[f32]) -> Result<Option<PositionLogprobs>, LogitFault> {
        let Some(n) = self.prompt_logprobs.filter(|_| position + 1 == self.scored) else { return Ok(None) };
        let Some(&id) = self.prompt.get(position + 1) else { return Ok(None) };
        let (token, top) = raw_logprobs(logits, id, n)?;
        self.scored += 1;
        Ok(Some(PositionLogprobs { token, top, text: self.prompt_text.push(id) }))
    }

    /// Output tokens so far.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Draws the next token and what follows from it.
    pub fn draw(&mut self, logits: &[f32], scratch: &mut Scratch) -> Result<Drawn, LogitFault> {
        let token = self.sampler.sample(logits, self.outputs, scratch)?;
        let reported = self.logprobs.map(|n| raw_logprobs(logits, token, n)).transpose()?;
        self.sampler.accept(token);
        self.outputs += 1;
        let mut end = self.end_by_token(token);
        let mut piece =
            if end.is_some() && !self.include_stop { String::new() } else { self.detokenizer.push(token) };
        if end.is_none() && self.outputs >= self.max_outputs {
            end = Some((FinishReason::Length, None));
        }
        if end.is_some() {
            piece += &self.detokenizer.flush();
        }
        let own_text = if reported.is_some() { piece.clone() } else { String::new() };
        let text = self.release(piece, &mut end);
        let logprobs = reported.map(|(token, top)| PositionLogprobs { token, top, text: own_text });
        Ok(Drawn { token, text, logprobs, end })
    }

    fn end_by_token(&self, token: u32) -> Option<End> {
        if self.eos.contains(&token) {
            return Some((FinishReason::Stop, None));
        }
        self.stop_token_ids.contains(&token).then_some((FinishReason::Stop, Some(StopReason::Token(token))))
    }

    /// Passes text through the stop strings; a completed one overrides how the output ends.
    fn release(&mut self, piece: String, end: &mut Option<End>) -> String {
        if self.outputs <= self.min_tokens {
            return piece; // like end tokens, stop strings have no effect before min_tokens
        }
        let released = self.stops.push(&piece);
        if let Some(index) = released.stopped_by {
            *end = Some((FinishReason::Stop, Some(StopReason::Text(self.stop_strings[index].clone()))));
            return released.text;
        }
        if end.is_some() { released.text + &self.stops.flush() } else { released.text }
    }

    /// The books of the request, when it has left the scheduler.
    pub fn close(self, closed: &Closed) -> RequestBooks {
        RequestBooks {
            prompt_tokens: closed.prompt_len,
            output_tokens: self.outputs,
            cached_tokens: closed.cached_tokens,
            preemptions: closed.preemptions,
            computed_tokens: self.computed_tokens,
            computed_tokens_predicted: closed.computed_tokens_predicted,
            pages_peak: closed.pages_peak,
            pages_predicted: closed.pages_predicted,
            counted: self.counted,
            predicted: self.predicted,
        }
    }
}
