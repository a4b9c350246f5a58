//! What the engine's integration tests share: the embedded model, a scripted one, and a driver that collects outputs.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use suanpan_cache::Group;
use suanpan_engine::logprobs::PositionLogprobs;
use suanpan_engine::{
    Engine, EngineOptions, Event, FinishReason, KvSizing, Request, RequestBooks, RequestError, RequestKey,
    SamplingParams, StepModel, StopReason,
};
use suanpan_ledger::AttnBooks;
use suanpan_model::forward::{StepBatch, StepSeq};
use suanpan_model::{LoadOptions, Model, ModelError, load};

pub fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let make = || Arc::new(load("builtin:recall", &LoadOptions::default(), &mut |_| ()).unwrap());
    Arc::clone(MODEL.get_or_init(make))
}

/// Small limits: quick to plan, and pools run out.
pub fn options(pages: usize) -> EngineOptions {
    EngineOptions {
        num_pages_override: Some(pages),
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        threads: 2,
        seed: Some(1),
        ..EngineOptions::default()
    }
}

pub fn engine(options: EngineOptions) -> Engine {
    Engine::new(model(), options).unwrap()
}

pub fn tokens(text: &str) -> Vec<u32> {
    model().tokenizer.encode(text, true).unwrap()
}

pub fn request(prompt: &str, params: SamplingParams) -> Request {
    Request { id: "test".into(), prompt: tokens(prompt), params, ..Request::default() }
}

/// Greedy, past end tokens, exactly `n` tokens.
pub fn exactly(n: usize) -> SamplingParams {
    SamplingParams { ignore_eos: true, ..SamplingParams::greedy(n) }
}

/// Everything one request sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<PositionLogprobs>,
    pub prompt: Vec<Option<PositionLogprobs>>,
    pub end: Option<(FinishReason, Option<StopReason>)>,
    pub books: RequestBooks,
    pub error: Option<RequestError>,
}

impl Answer {
    pub fn take(&mut self, event: Event) {
        assert!(self.end.is_none() && self.error.is_none(), "an event after the last: {event:?}");
        match event {
            Event::Prefill { cached_tokens, computed_tokens, known_tokens, .. } => {
                assert!(
                    cached_tokens <= computed_tokens.max(cached_tokens) && computed_tokens <= known_tokens
                );
            }
            Event::PromptLogprobs { first_position, positions, .. } => {
                assert_eq!(first_position, self.prompt.len());
                self.prompt.extend(positions);
            }
            Event::Token { tokens, text, logprobs, .. } => {
                self.tokens.extend(tokens);
                self.text += &text;
                self.logprobs.extend(logprobs);
            }
            Event::Finished { reason, stop_reason, books, .. } => {
                assert!(books.agree(), "{books:?}");
                self.end = Some((reason, stop_reason));
                self.books = books;
            }
            Event::Failed { error, .. } => self.error = Some(error),
        }
    }

    pub fn reason(&self) -> FinishReason {
        self.end.as_ref().expect("finished").0
    }
}

/// Runs all requests at once to their ends; answers in order of `requests`.
pub fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Answer> {
    let keys: Vec<RequestKey> = requests.into_iter().map(|r| engine.submit(r).unwrap()).collect();
    let mut answers: HashMap<RequestKey, Answer> = HashMap::new();
    drive(engine, &mut answers);
    keys.iter().map(|key| answers.remove(key).expect("answered")).collect()
}

pub fn drive(engine: &mut Engine, answers: &mut HashMap<RequestKey, Answer>) {
    let mut steps = 0;
    while engine.has_work() {
        engine.step().into_iter().for_each(|e| answers.entry(e.key()).or_default().take(e));
        steps += 1;
        assert!(steps < 100_000, "no end");
    }
    assert_idle(engine);
}

pub fn assert_idle(engine: &Engine) {
    engine.check().unwrap();
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_held), (0, 0, 0));
    assert_eq!(stats.pages_free + stats.pages_cached, stats.pages_total);
    assert_eq!(stats.totals.books_disagree, 0);
}

pub fn run_alone(options: EngineOptions, request: Request) -> Answer {
    run(&mut engine(options), vec![request]).remove(0)
}

/// A model without weights: `next(tokens so far of the step's sequence)` gives the row of logits. It sees the new tokens only.
pub struct Scripted<F> {
    next: F,
    batch: StepBatch,
    logits: Vec<f32>,
    books: Vec<AttnBooks>,
}

impl<F: FnMut(u32, usize) -> Vec<f32> + Send + 'static> Scripted<F> {
    /// `next(token, position)` gives the logits after the token at that position.
    pub fn boxed(next: F) -> Box<dyn StepModel> {
        Box::new(Scripted { next, batch: StepBatch::default(), logits: Vec::new(), books: Vec::new() })
    }
}

impl<F: FnMut(u32, usize) -> Vec<f32> + Send> StepModel for Scripted<F> {
    fn copy_pages(&mut self, _: Group, _: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(())
    }

    fn page(&self, _: Group, _: u32) -> &[u8] {
        &[]
    }

    fn page_mut(&mut self, _: Group, _: u32) -> &mut [u8] {
        &mut []
    }

    fn step(&mut self, batch: &StepBatch) -> Result<(), ModelError> {
        self.batch.clone_from(batch);
        self.books = batch.seqs.iter().map(|s| self.predicted(s)).collect();
        Ok(())
    }

    fn logits(&mut self, rows: Range<usize>) -> &[f32] {
        let mut all = Vec::new();
        let mut first = 0;
        for seq in &self.batch.seqs {
            let end = first + seq.extend_len;
            let from = end - seq.logits.count(seq.extend_len);
            all.extend((from..end).map(|i| (self.batch.tokens[i], seq.cached_len + i - first)));
            first = end;
        }
        self.logits.clear();
        for &(token, position) in &all[rows] {
            self.logits.extend((self.next)(token, position));
        }
        &self.logits
    }

    fn books(&self) -> &[AttnBooks] {
        &self.books
    }

    fn predicted(&self, seq: &StepSeq) -> AttnBooks {
        AttnBooks { pairs: (seq.cached_len * seq.extend_len) as u64, ..AttnBooks::default() }
    }
}

/// Logits of 256 bytes in which `token` stands out.
pub fn one_hot(token: u32) -> Vec<f32> {
    let mut row = vec![0.0; 256];
    row[token as usize] = 30.0;
    row
}

pub fn scripted(options: EngineOptions, runner: Box<dyn StepModel>) -> Engine {
    let pages = options.num_pages_override.unwrap();
    let sizing = KvSizing {
        num_pages: pages,
        page_size: options.page_size,
        bytes_per_page: 1,
        window: None,
        max_model_len: options.max_model_len.unwrap_or(pages * options.page_size),
        reason: "scripted".into(),
    };
    Engine::with_runner(model(), runner, options, sizing).unwrap()
}

/// A scripted engine whose model says the bytes of `text` one after the other, whatever the prompt.
pub fn speaking(options: EngineOptions, prompt_len: usize, text: &'static str) -> Engine {
    let next = move |_, position: usize| {
        let said = (position + 1).checked_sub(prompt_len);
        one_hot(said.and_then(|i| text.as_bytes().get(i)).map_or(u32::from(b'\n'), |&b| u32::from(b)))
    };
    scripted(options, Scripted::boxed(next))
}
