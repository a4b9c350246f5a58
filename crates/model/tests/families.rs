//! Every family and RoPE variant, from safetensors and GGUF, against `transformers`' logits at every position, and against the f64 oracle.
//!
//! Fixtures: scripts/make-family-fixtures.py. Prompts are shorter and longer than the windows, and within and past the original length.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::driver::{Driver, options};
use common::plain::{Bound, Setting};
use safetensors::SafeTensors;
use suanpan_base::DType;
use suanpan_model::forward::ExecOptions;
use suanpan_model::{LoadOptions, Model, load};
use suanpan_ops::Precision;

/// The bar: largest absolute difference from `transformers` in f32; logits are of a few units.
const TOLERANCE: f64 = 1e-4;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families")
}

fn open(name: &str) -> Arc<Model> {
    Arc::new(load(fixtures().join(name).to_str().unwrap(), &LoadOptions::default(), &mut |_| {}).unwrap())
}

/// Tokens and all-position logits of each prompt length.
fn references(name: &str) -> Vec<(Vec<u32>, Vec<f32>)> {
    let bytes = std::fs::read(fixtures().join("logits").join(format!("{name}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    let mut lengths: Vec<&str> = file.names().into_iter().filter_map(|n| n.strip_prefix("tokens")).collect();
    lengths.sort();
    let read = |n: &&str| {
        let tokens = words(&format!("tokens{n}")).into_iter().map(u32::from_le_bytes).collect();
        (tokens, words(&format!("logits{n}")).into_iter().map(f32::from_le_bytes).collect())
    };
    lengths.iter().map(read).collect()
}

/// Whole, in chunks and token by token. The longest sequence is the prompt itself: by that length `transformers` chooses, too.
fn check(file: &str, logits: &str) {
    let model = open(file);
    let references = references(logits);
    assert!(!references.is_empty());
    for (tokens, reference) in references {
        let length = tokens.len();
        let bound = Bound::new(&model, &tokens, Setting { length, ..Setting::default() });
        // Twice what plain arithmetic or the reference itself loses in f32, whichever is more.
        let lost =
            reference.iter().zip(&bound.exact).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        let bound = Bound { tolerance: bound.tolerance.max(2.0 * lost), ..bound };
        let opts = ExecOptions { page_size: 4, max_tokens: 128, max_model_len: length, ..options() };
        let mut d = Driver::new(model.clone(), opts, 512);
        d.poison(f32::NAN);
        for chunk in [length, 13, 1] {
            let seq = d.start();
            let got = d.in_chunks(seq, &tokens, chunk);
            let what = format!("{file}, {length} tokens in chunks of {chunk}");
            assert_eq!(got.len(), reference.len(), "{what}");
            let off = got.iter().zip(&reference).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
            assert!(off <= TOLERANCE, "{what}: {off:e} off transformers");
            bound.check(&what, 0, &got);
        }
    }
}

/// What a server runs by default on 16-bit files: keys and values in bf16, products of quantised weights by two 8-bit digits.
#[test]
fn by_default_every_family_is_nearer_to_f32_than_twice_what_transformers_loses_in_bf16() {
    let file = std::fs::read(fixtures().join("bf16-errors.json")).unwrap();
    let lost: BTreeMap<String, BTreeMap<String, f64>> = serde_json::from_slice(&file).unwrap();
    let mut worst = (0.0f64, String::new());
    for (name, lost) in &lost {
        let model = open(name);
        for (tokens, reference) in references(name) {
            let n = tokens.len();
            let opts = ExecOptions {
                precision: Precision::Int16,
                kv_dtype: DType::Bf16,
                page_size: 4,
                max_tokens: 128,
                max_model_len: n,
                ..options()
            };
            let mut d = Driver::new(model.clone(), opts, 512);
            for chunk in [n, 1] {
                let seq = d.start();
                let got = d.in_chunks(seq, &tokens, chunk);
                let off =
                    got.iter().zip(&reference).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
                let ratio = off / lost[&n.to_string()];
                println!(
                    "{name} {n} tokens in chunks of {chunk}: {off:.4} off, {ratio:.2} of transformers in bf16"
                );
                if ratio.is_nan() || ratio > worst.0 {
                    worst = (ratio, format!("{name}, {n} tokens in chunks of {chunk}"));
                }
            }
        }
    }
    assert!(lost.len() > 20 && worst.0 <= 2.0, "{worst:?}");
}

macro_rules! models {
    ($($test:ident: $file:literal, $logits:literal;)*) => {
        $(#[test]
        fn $test() {
            check($file, $logits);
        })*
    };
}

models! {
    qwen2_with_windows_from_a_layer_on: "qwen2", "qwen2";
    qwen2: "qwen2-full", "qwen2-full";
    qwen2_gguf: "qwen2-full.gguf", "qwen2-full";
    qwen3: "qwen3", "qwen3";
    qwen3_gguf: "qwen3.gguf", "qwen3";
    smollm3: "smollm3", "smollm3";
    smollm3_gguf: "smollm3.gguf", "smollm3";
    llama_with_biases: "llama-bias", "llama-bias";
    llama_with_biases_gguf: "llama-bias.gguf", "llama-bias";
    gemma2_with_both_caps: "gemma2", "gemma2";
    gemma2_gguf: "gemma2.gguf", "gemma2";
    gemma3: "gemma3", "gemma3";
    gemma3_gguf: "gemma3.gguf", "gemma3";
    gemma3_as_transformers_4_wrote_it: "gemma3-old", "gemma3-old";
    phi3_longrope_of_part_of_a_head: "phi3", "phi3";
    phi3_gguf: "phi3.gguf", "phi3";
    phi3_with_a_window_as_transformers_4_wrote_it: "phi3-old", "phi3-old";
    gpt_oss: "gpt-oss", "gpt-oss";
    gpt_oss_gguf: "gpt-oss.gguf", "gpt-oss";
    deepseek2_lite_with_keys_of_576_and_values_of_512: "deepseek2-lite", "deepseek2-lite";
    deepseek2_with_narrowed_queries: "deepseek2", "deepseek2";
    deepseek2_gguf: "deepseek2.gguf", "deepseek2";
    gpt_oss_with_experts_in_mxfp4_blocks: "gpt-oss-mxfp4", "gpt-oss-mxfp4";
    fp8_with_scales_a_block: "fp8-blocks", "fp8-blocks";
    fp8_with_scales_a_row: "fp8-rows", "fp8-rows";
    rope_linear: "rope-linear", "rope-linear";
    rope_linear_gguf: "rope-linear.gguf", "rope-linear";
    rope_dynamic: "rope-dynamic", "rope-dynamic";
    rope_yarn: "rope-yarn", "rope-yarn";
    rope_yarn_gguf: "rope-yarn.gguf", "rope-yarn";
    rope_yarn_with_both_mscales: "rope-yarn-mscale", "rope-yarn-mscale";
    rope_yarn_with_a_factor_of_its_own: "rope-yarn-factor", "rope-yarn-factor";
    rope_llama3_under_the_older_key: "rope-llama3", "rope-llama3";
}
