//! Drives the word-level models: reads a text, asks its questions one by one, and keeps the smallest lead of a chosen token.

use std::sync::{Arc, LazyLock};

use suanpan_base::DType;
use suanpan_model::chain::haystack::{Haystack, Question};
use suanpan_model::chain::{BEGIN, END};
use suanpan_model::forward::{ExecOptions, LogitRows};
use suanpan_model::{Model, ModelConfig, Tokenizer, Weights, builtin};

use super::driver::{Driver, Extend, best, last, options};
use super::random::wrap;

static CHAIN: LazyLock<Arc<Model>> = LazyLock::new(|| Arc::new(builtin::load("builtin:chain").unwrap()));
static COUNT: LazyLock<Arc<Model>> = LazyLock::new(|| Arc::new(builtin::load("builtin:count").unwrap()));

fn tokenizer() -> &'static Tokenizer {
    &CHAIN.tokenizer
}

/// `builtin:chain`.
pub fn chain() -> Arc<Model> {
    Arc::clone(&CHAIN)
}

/// `builtin:count`.
pub fn count() -> Arc<Model> {
    Arc::clone(&COUNT)
}

/// A model after a change.
pub fn changed(model: &Model, change: impl FnOnce(&mut ModelConfig, &mut Weights)) -> Arc<Model> {
    let (mut config, mut weights) = (model.config.clone(), model.weights.clone());
    change(&mut config, &mut weights);
    wrap(config, weights)
}

pub fn word_options(tokens: usize, kv_dtype: DType) -> ExecOptions {
    ExecOptions { kv_dtype, max_tokens: 512, max_model_len: tokens, ..options() }
}

/// The tokens of a text, without the begin token.
pub fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode(text, false).unwrap()
}

/// Reads the begin token and `text` into a new sequence of `d`, `chunk` tokens a step; the sequence and its length.
pub fn read(d: &mut Driver, text: &str, chunk: usize) -> (usize, usize) {
    let seq = d.start();
    let tokens = [&[BEGIN], ids(text).as_slice()].concat();
    for tokens in tokens.chunks(chunk) {
        d.step(&[Extend { seq, tokens, logits: LogitRows::None }]);
    }
    (seq, tokens.len())
}

/// Greedy continuation of `prompt`, up to but without the end token, and the smallest lead of a chosen token.
pub fn continued(d: &mut Driver, seq: usize, prompt: &str, most: usize) -> (String, f32) {
    let mut logits = d.step(&[last(seq, &ids(prompt))]).remove(0);
    let (mut tokens, mut margin) = (Vec::new(), f32::INFINITY);
    loop {
        let (token, lead) = best(&logits);
        margin = margin.min(lead);
        if token == END || tokens.len() == most {
            return (tokenizer().decode(&tokens, false), margin);
        }
        tokens.push(token);
        logits = d.step(&[last(seq, &[token])]).remove(0);
    }
}

/// What became of the questions of a text.
#[derive(Debug)]
pub struct Outcome {
    pub right: usize,
    pub margin: f32,
    pub wrong: Vec<(Question, String)>,
}

/// Asks every question behind the `len` tokens of `seq`.
pub fn ask(d: &mut Driver, (seq, len): (usize, usize), h: &Haystack) -> Outcome {
    let mut outcome = Outcome { right: 0, margin: f32::INFINITY, wrong: Vec::new() };
    for q in &h.questions {
        d.cut(seq, len);
        let (text, margin) = continued(d, seq, &q.prompt, 12);
        outcome.margin = outcome.margin.min(margin);
        if text == q.answer {
            outcome.right += 1;
        } else {
            outcome.wrong.push((q.clone(), text));
        }
    }
    outcome
}
