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

/// A step whose best two logits are closer than this may go either way.
const NEAR_TIE: f64 = 1e-3;

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

/// Decodes all prompts at once and holds each against the reference, up to its first near-tie.
fn greedy_texts_are_those_of_transformers(precision: Precision) {
    let Some(model) = model() else { return };
    let prompts = reference();
    let opts = ExecOptions { precision, max_tokens: 1024, max_seqs: 32, max_model_len: 1024, ..options() };
    let mut d = Driver::new(model, opts, 32 * 64);
    let mut next: Vec<u32> = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let seq = d.start();
        let logits = d.step(&[last(seq, &ids(&prompt["ids"]))]).remove(0);
        let error = first_token_error(prompt, &logits);
        assert!(error <= 1e-3, "prompt {i}, {precision:?}: first-token log-probability off by {error}");
        next.push(best(&logits));
    }
    let mut open: Vec<bool> = vec![true; prompts.len()];
    let steps = ids(&prompts[0]["greedy"]).len();
    for step in 0..steps {
        for (i, prompt) in prompts.iter().enumerate() {
            let (want, margin) = (ids(&prompt["greedy"])[step], floats(&prompt["margins"])[step]);
            open[i] &= margin >= NEAR_TIE;
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
    assert!(
        open.iter().filter(|o| **o).count() * 2 > prompts.len(),
        "most prompts are compared to their end"
    );
}

#[test]
fn greedy_texts_in_f32_are_those_of_transformers() {
    greedy_texts_are_those_of_transformers(Precision::F32);
}

#[test]
fn greedy_texts_with_activations_of_two_digits_are_those_of_transformers() {
    greedy_texts_are_those_of_transformers(Precision::Int16);
}
