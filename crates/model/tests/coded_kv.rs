//! K and V in codes, rotated before they are rounded: logits stay near those of floats in every family, also where values lie in keys.

mod common;

use std::sync::Arc;

use common::driver::{Driver, all, last, options};
use suanpan_base::DType;
use suanpan_model::forward::ExecOptions;
use suanpan_model::{LoadOptions, load};

/// Logits after a prompt of 20 tokens and of 20 more, one at a time.
fn logits(name: &str, dtype: DType) -> Vec<Vec<f32>> {
    let path = format!("{}/tests/fixtures/families/{name}", env!("CARGO_MANIFEST_DIR"));
    let model = Arc::new(load(&path, &LoadOptions::default(), &mut |_| {}).unwrap());
    let options = ExecOptions { kv_dtype: dtype, max_model_len: 64, ..options() };
    let mut d = Driver::new(model, options, 8);
    let tokens: Vec<u32> = (0..40u32).map(|i| (i * 7 + 3) % 60).collect();
    let seq = d.start();
    let mut rows = d.step(&[all(seq, &tokens[..20])]);
    rows.extend(tokens[20..].iter().flat_map(|token| d.step(&[last(seq, &[*token])])));
    rows
}

/// Relative error of a row.
fn error(exact: &[f32], coded: &[f32]) -> f32 {
    let square = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>();
    (square(&mut exact.iter().zip(coded).map(|(a, b)| a - b)) / square(&mut exact.iter().copied())).sqrt()
}

#[test]
fn logits_over_codes_stay_near_those_over_floats() {
    for name in ["qwen3", "gemma3", "deepseek2-lite", "deepseek2"] {
        let exact = logits(name, DType::F32);
        for (dtype, most) in [(DType::I8, 0.03), (DType::E4m3, 0.1), (DType::I4, 0.5)] {
            let coded = logits(name, dtype);
            let mut errors: Vec<f32> = exact.iter().zip(&coded).map(|(a, b)| error(a, b)).collect();
            errors.sort_by(f32::total_cmp);
            // Of the rows in the middle: where another expert is taken by a hair, a row may be anything.
            let middle = errors[errors.len() / 2];
            println!("{name} {dtype}: middle {middle:.4}, largest {:.4}", errors[errors.len() - 1]);
            assert!(middle > 0.0 && middle < most, "{name}, {dtype}: {middle} of {most}");
        }
    }
}
