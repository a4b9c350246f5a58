//! SmolLM2-135M-Instruct Q4_1 against `transformers` on the dequantised weights: greedy text and first-token log-probabilities.
//!
//! The file is not committed: `scripts/fetch-smollm2` brings it, or SUANPAN_SMOLLM2 names it; without it the test says that it skipped.
//! The reference is made by bench/peers/transformers_reference.py.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::driver::{Driver, Extend, last, options};
use serde_json::Value;
use suanpan_model::forward::{ExecOptions, LogitRows};
use suanpan_model::{LoadOptions, Model, load};
use suanpan_ops::Precision;

fn model() -> Option<Arc<Model>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let default = root.join("../../.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = std::env::var_os("SUANPAN_SMOLLM2").map_or(default, PathBuf::from);
    if !path.exists() {
        eprintln!("SKIPPED: {} is not there (scripts/fetch-smollm2, or set SUANPAN_SMOLLM2)", path.display());
        return None;
    }
    Some(Arc::new(load(path.to_str().unwrap(), &LoadOptions::default(), &mut |_| {}).unwrap()))
}

fn reference() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/smollm2/reference.json");
    let all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    all["prompts"].as_array().unwrap().clone()
}

fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect()
}

fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn best(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().fold(f64::NEG_INFINITY, |m, x| m.max(f64::from(*x)));
    max + logits.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln()
}

/// Largest difference of the reference's twenty first-token log-probabilities.
fn first_token_error(prompt: &Value, logits: &[f32]) -> f64 {
    let all = log_sum_exp(logits);
    let top = &prompt["first_top20"];
    let pairs = ids(&top["ids"]).into_iter().zip(floats(&top["logprobs"]));
    pairs.map(|(id, want)| (f64::from(logits[id as usize]) - all - want).abs()).fold(0.0, f64::max)
}

/// Decodes all prompts at once and holds each against the reference up to its first near-tie, a step whose best two logits are closer
/// than `near_tie`. Gives the largest error of a first-token log-probability.
fn follow(model: &Arc<Model>, precision: Precision, near_tie: f64, steps: usize) -> f64 {
    let prompts = reference();
    let opts = ExecOptions { precision, max_tokens: 1024, max_seqs: 32, max_model_len: 1024, ..options() };
    let mut d = Driver::new(Arc::clone(model), opts, 32 * 64);
    let (mut next, mut worst): (Vec<u32>, f64) = (Vec::new(), 0.0);
    for prompt in &prompts {
        let seq = d.start();
        let logits = d.step(&[last(seq, &ids(&prompt["ids"]))]).remove(0);
        worst = worst.max(first_token_error(prompt, &logits));
        next.push(best(&logits));
    }
    let mut open: Vec<bool> = vec![true; prompts.len()];
    for step in 0..steps {
        for (i, prompt) in prompts.iter().enumerate() {
            let (want, margin) = (ids(&prompt["greedy"])[step], floats(&prompt["margins"])[step]);
            open[i] &= margin >= near_tie;
            assert!(
                !open[i] || next[i] == want,
                "prompt {i}, {precision:?}, token {step}: {} for {want}",
                next[i]
            );
        }
        let extends: Vec<_> = next
            .iter()
            .enumerate()
            .map(|(seq, token)| Extend { seq, tokens: std::slice::from_ref(token), logits: LogitRows::Last })
            .collect();
        next = d.step(&extends).iter().map(|logits| best(logits)).collect();
    }
    let compared = open.iter().filter(|o| **o).count();
    assert!(steps == 0 || compared * 2 > prompts.len(), "only {compared} prompts are compared to their end");
    worst
}

#[test]
fn greedy_texts_in_f32_are_those_of_transformers() {
    let Some(model) = model() else { return };
    let worst = follow(&model, Precision::F32, 1e-3, 64);
    println!("f32: first-token log-probabilities within {worst:.1e}");
    assert!(worst <= 1e-3, "first-token log-probability off by {worst}");
}

/// One digit loses "The capital of France is Paris." to another first token; two digits must not. A margin below 1e-2 counts as a
/// near-tie here: ten times the error of a log-probability.
#[test]
fn greedy_texts_with_activations_of_two_digits_are_those_of_transformers() {
    let Some(model) = model() else { return };
    let two = follow(&model, Precision::Int16, 1e-2, 64);
    let one = follow(&model, Precision::Int8, f64::INFINITY, 0);
    println!("first-token log-probabilities: int16 within {two:.1e}, int8 within {one:.1e}");
    assert!(two <= one / 100.0, "two digits are off by {two}, one by {one}");
}
