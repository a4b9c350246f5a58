//! Whole models from files against `transformers`' logits, and against the f64 oracle by the error rule.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::driver::{Driver, options};
use common::plain::{Bound, Setting};
use safetensors::SafeTensors;
use suanpan_base::DType;
use suanpan_model::forward::ExecOptions;
use suanpan_model::{LoadOptions, Model, load};
use suanpan_ops::Precision;

/// `transformers` runs in f32 with angles in f32, so it is itself this far from the exact result, relative to the largest logit.
const REFERENCE_ERROR: f64 = 1e-4;

const FOLDERS: [&str; 4] = ["tied", "sharded", "llama3-rope", "window"];
/// A GGUF file and the logits that belong to its exact weights.
const GGUFS: [(&str, &str); 7] = [
    ("tied-f16", "tied-f16"),
    ("tied-q8_0", "tied-q8_0"),
    ("tied-q4_0", "tied-q4_0"),
    ("tied-q4_1", "tied-q4_1"),
    ("sharded-bf16", "sharded"),
    ("llama3-rope-f16", "llama3-rope"),
    ("kquants", "kquants"),
];

fn fixtures() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures"))
}

fn open(name: &str) -> Arc<Model> {
    let path = fixtures().join(name);
    Arc::new(load(path.to_str().unwrap(), &LoadOptions::default(), &mut |_| {}).unwrap())
}

fn reference(name: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = std::fs::read(fixtures().join("logits").join(format!("{name}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    let tokens = words("tokens").into_iter().map(u32::from_le_bytes).collect();
    (tokens, words("logits").into_iter().map(f32::from_le_bytes).collect())
}

fn largest_difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)
}

/// All positions, whole and in several chunkings, against the reference and the oracle.
fn check(file: &str, logits: &str) {
    let model = open(file);
    let (tokens, reference) = reference(logits);
    let largest = reference.iter().fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
    let bound = Bound::new(&model, &tokens, Setting::default());
    for page_size in [1, 16] {
        let opts = ExecOptions { page_size, max_tokens: 256, ..options() };
        let mut d = Driver::new(model.clone(), opts, 1024 / page_size);
        d.poison(f32::NAN);
        for chunk in [tokens.len(), 16, 3, 1] {
            let seq = d.start();
            let got = d.in_chunks(seq, &tokens, chunk);
            let what = format!("{file}, pages of {page_size}, chunks of {chunk}");
            let off = largest_difference(&got, &reference);
            assert!(
                off <= REFERENCE_ERROR * largest,
                "{what}: {off:e} off transformers, largest logit {largest}"
            );
            bound.check(&what, 0, &got);
        }
    }
}

#[test]
fn safetensors_models_agree_with_transformers_at_every_position() {
    for name in FOLDERS {
        check(name, name);
    }
}

#[test]
fn gguf_models_agree_with_transformers_at_every_position() {
    for (file, logits) in GGUFS {
        check(&format!("{file}.gguf"), logits);
    }
}

#[test]
fn gguf_twins_give_the_logits_of_their_safetensors() {
    for (gguf, folder) in [("sharded-bf16.gguf", "sharded"), ("llama3-rope-f16.gguf", "llama3-rope")] {
        let (tokens, reference) = reference(folder);
        let run = |name: &str| {
            let mut d = Driver::new(open(name), ExecOptions { max_tokens: 256, ..options() }, 16);
            let seq = d.start();
            d.in_chunks(seq, &tokens, tokens.len())
        };
        let largest = reference.iter().fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
        // Same weights, other order of the rotary pairs: sums are taken in another order.
        let off = largest_difference(&run(gguf), &run(folder));
        assert!(off <= 1e-5 * largest, "{gguf}: {off:e} off {folder}, largest logit {largest}");
    }
}

/// Activations of one 8-bit digit: an error of the activations' rounding, a few percent in these small models. A second digit has
/// steps 254 times as small, and so must take at least 99 % of that error away.
#[test]
fn int8_activations_and_bf16_keys_stay_within_a_few_percent_and_a_second_digit_takes_the_error_away() {
    for (file, logits) in GGUFS {
        let (tokens, reference) = reference(logits);
        let scale = (reference.iter().map(|x| f64::from(x * x)).sum::<f64>() / reference.len() as f64).sqrt();
        let error = |precision: Precision, kv_dtype: DType| {
            let opts = ExecOptions { precision, kv_dtype, max_tokens: 256, ..options() };
            let mut d = Driver::new(open(&format!("{file}.gguf")), opts, 64);
            let seq = d.start();
            let got = d.in_chunks(seq, &tokens, tokens.len());
            let squares: f64 = got.iter().zip(&reference).map(|(a, b)| f64::from((a - b) * (a - b))).sum();
            (squares / reference.len() as f64).sqrt() / scale
        };
        let (float, one) = (error(Precision::F32, DType::F32), error(Precision::Int8, DType::F32));
        let (two, bf16_keys) = (error(Precision::Int16, DType::F32), error(Precision::F32, DType::Bf16));
        println!(
            "{file}: share of the logits' rms: f32 {float:.1e}, int8 {one:.1e}, int16 {two:.1e}, bf16 keys {bf16_keys:.1e}"
        );
        assert!(one <= 0.05 && bf16_keys <= 0.05, "{file}: int8 {one}, bf16 keys {bf16_keys}");
        // A model without quantised weights multiplies floats in every precision.
        assert!(two <= float + one / 100.0, "{file}: int16 {two}, int8 {one}, f32 {float}");
    }
}
