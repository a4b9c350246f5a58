//! C16: a page too many, or the stale tokens of one, where a sequence ends on a page.

mod common;

use std::sync::Arc;

use common::driver::{Driver, all, last, options};
use suanpan_base::DType;
use suanpan_model::forward::{ExecOptions, LogitRows, StepSeq};
use suanpan_model::{LoadOptions, Model, load};

fn open(name: &str) -> Arc<Model> {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    Arc::new(load(&path, &LoadOptions::default(), &mut |_| {}).unwrap())
}

fn opts(dtype: DType) -> ExecOptions {
    ExecOptions { kv_dtype: dtype, batch_invariant: true, max_model_len: 64, ..options() }
}

/// A prompt of 10 tokens, then one at a time through lengths 16, 32 and 48, in a pool full of large numbers: each step's logits have the
/// bits of a pool in which the sequence lies in one page after the other and nothing else was ever written.
#[test]
fn c16_steps_through_page_boundaries_read_no_stale_token() {
    let tokens: Vec<u32> = (0..50u32).map(|i| (i * 7 + 3) % 60).collect();
    for (name, dtype) in
        [("window", DType::F32), ("families/qwen3", DType::Bf16), ("families/qwen3", DType::I8)]
    {
        let model = open(name);
        let steps = |poison: Option<f32>| {
            let mut d = Driver::new(Arc::clone(&model), opts(dtype), 8);
            if let Some(x) = poison {
                d.poison(x);
            }
            let seq = d.start();
            if poison.is_none() {
                d.set_pages(seq, (0..8).collect());
            }
            let mut logits = d.step(&[all(seq, &tokens[..10])]);
            logits.extend(tokens[10..].iter().flat_map(|token| d.step(&[last(seq, &[*token])])));
            logits
        };
        let plain = steps(None);
        assert!(plain.iter().flatten().all(|x| x.is_finite()));
        for poison in [6e4, f32::NAN] {
            let stale = steps(Some(poison));
            for (step, (a, b)) in plain.iter().zip(&stale).enumerate() {
                let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{name}, {dtype}, poison {poison}: step {step}");
            }
        }
    }
}

/// Length 33 in a table of two columns, and a full table and one more token, are refused by name, never read past the table; so is a
/// table of a group that the storage does not have, or lacks where it has one.
#[test]
fn c16_a_length_past_the_page_table_is_refused() {
    let model = open("families/qwen3");
    let mut d = Driver::new(model, opts(DType::F32), 8);
    let mut refused = |cached_len: usize, extend_len: usize, window_table: Vec<u32>| {
        d.batch.clear();
        d.batch.page_table_stride = 2;
        d.batch.page_table.extend([0, 1]);
        d.batch.window_table = window_table;
        d.batch.tokens.extend(vec![1; extend_len]);
        d.batch.seqs.push(StepSeq { cached_len, extend_len, logits: LogitRows::Last });
        d.exec.step(&d.batch, &mut d.kv).err().map(|e| e.to_string())
    };
    for (cached, new) in [(0, 33), (32, 1)] {
        let e = refused(cached, new, vec![]).expect("refused");
        assert!(e.contains("page_table[0]") && e.contains("33"), "{e}");
    }
    assert!(refused(0, 3, vec![0, 1]).expect("refused").contains("window_table"));
    assert_eq!(refused(0, 3, vec![]), None);

    let mut d = Driver::new(open("families/gemma3"), ExecOptions { page_size: 4, ..opts(DType::F32) }, 8);
    d.kv = d.exec.kv_storage(8, Some(6)).unwrap();
    let mut step = |window_table: Vec<u32>| {
        d.batch.clear();
        d.batch.page_table_stride = 6;
        d.batch.page_table.extend(0..6);
        d.batch.window_table = window_table;
        d.batch.tokens.push(1);
        // Window 8: the token at 20 sees keys from 13 on, so from page 3 on.
        d.batch.seqs.push(StepSeq { cached_len: 20, extend_len: 1, logits: LogitRows::Last });
        d.exec.step(&d.batch, &mut d.kv).err().map(|e| e.to_string())
    };
    let none = u32::MAX;
    assert_eq!(step(vec![none, none, none, 0, 1, 2]), None, "pages left of the window may be gone");
    let e = step(vec![none, none, none, none, 1, 2]).expect("refused");
    assert!(e.contains("window_table[0][3]"), "{e}");
    assert!(step(vec![none, none, none, 0, 1, 6]).expect("refused").contains("window_table[0][5]"));
    assert!(step(vec![]).expect("refused").contains("window_table"));
}
