//! `builtin:recall`: exact at every length tried, with the stated margin; and each fault of a stack changes its text.

mod common;

use std::sync::Arc;

use common::driver::{Driver, greedy, options};
use common::random::{reorder_cols, reorder_rows, wrap};
use suanpan_base::DType;
use suanpan_model::forward::{ExecOptions, LogitRows};
use suanpan_model::recall::{self, Haystack, MIN_MARGIN, WINDOW, haystack};
use suanpan_model::{LayerConfig, Model, ModelConfig, Values, Weights};

fn model() -> Arc<Model> {
    wrap(recall::config(), recall::weights())
}

/// The same weights where the second layer sees 8 keys: writes the same keys and values at a cost linear in the length,
/// because no key and no value depends on what the second layer finds.
fn filler() -> Arc<Model> {
    let mut config = recall::config();
    config.layers[1].window = Some(WINDOW);
    wrap(config, recall::weights())
}

fn recall_options(tokens: usize, kv_dtype: DType) -> ExecOptions {
    ExecOptions { kv_dtype, max_tokens: 512, max_model_len: tokens, ..options() }
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Reads `h` into a new sequence of `d`.
fn read(d: &mut Driver, h: &Haystack) -> usize {
    let seq = d.start();
    for chunk in h.tokens().chunks(512) {
        d.step(&[common::driver::Extend { seq, tokens: chunk, logits: LogitRows::None }]);
    }
    seq
}

/// Asks every question; how many answers were right, and the smallest margin.
fn ask(d: &mut Driver, seq: usize, h: &Haystack) -> (usize, f32) {
    let (mut right, mut margin) = (0, f32::INFINITY);
    for i in 0..h.facts.len() {
        d.cut(seq, h.text.len());
        let (text, lead) = greedy(d, seq, &bytes(&h.question(i)), 40);
        right += usize::from(text == h.answer(i));
        margin = margin.min(lead);
    }
    (right, margin)
}

#[test]
fn every_answer_is_right_at_several_lengths_pages_and_cache_types() {
    for (tokens, facts, kv_dtype, page_size) in [
        (1000, 8, DType::F32, 16),
        (1000, 8, DType::Bf16, 1),
        (4096, 20, DType::F32, 256),
        (6001, 20, DType::Bf16, 16),
        (8192, 20, DType::F32, 16),
    ] {
        let h = haystack(tokens as u64, tokens, facts).unwrap();
        let opts = ExecOptions { page_size, ..recall_options(tokens + 64, kv_dtype) };
        let mut d = Driver::new(model(), opts, tokens / page_size + 70);
        d.poison(f32::NAN);
        let seq = read(&mut d, &h);
        let (right, margin) = ask(&mut d, seq, &h);
        println!("{tokens} tokens, {kv_dtype}, pages of {page_size}: {right} of {facts}, margin {margin}");
        assert_eq!(right, facts, "{tokens} tokens, {kv_dtype}, pages of {page_size}");
        assert!(margin >= MIN_MARGIN, "{tokens} tokens, {kv_dtype}: margin {margin}");
    }
}

#[test]
fn sixty_five_thousand_tokens_in_both_cache_types() {
    let (tokens, facts) = (65_536, 8);
    for kv_dtype in [DType::F32, DType::Bf16] {
        let h = haystack(1, tokens, facts).unwrap();
        let opts = recall_options(tokens + 64, kv_dtype);
        let mut d = Driver::new(filler(), opts, tokens / 16 + 8);
        let seq = read(&mut d, &h);
        d.exec = suanpan_model::forward::Executor::new(model(), opts).unwrap();
        let (right, margin) = ask(&mut d, seq, &h);
        println!("{tokens} tokens, {kv_dtype}: {right} of {facts}, margin {margin}");
        assert!(right == facts && margin >= MIN_MARGIN, "{kv_dtype}: {right} right, margin {margin}");
    }
}

/// 2^20 tokens, most of them the same few pages named again and again: keys without positions do not know the difference.
#[test]
fn a_million_tokens_in_both_cache_types() {
    let (total, page_size, filler_tokens) = (1usize << 20, 16, 4096);
    for kv_dtype in [DType::F32, DType::Bf16] {
        // Facts within 4,096 tokens; then the pages of a second text without facts, over and over.
        let (h, noise) = (haystack(2, filler_tokens, 6).unwrap(), haystack(3, filler_tokens, 0).unwrap());
        let opts = recall_options(total, kv_dtype);
        let mut d = Driver::new(filler(), opts, 3 * filler_tokens / page_size);
        let (facts, rest) = (read(&mut d, &h), read(&mut d, &noise));
        d.exec = suanpan_model::forward::Executor::new(model(), opts).unwrap();
        // The questions and answers run at positions up to 2^20, behind the repeated text.
        let start = total - 64;
        let mut pages = d.pages(rest).to_vec();
        pages.extend_from_slice(d.pages(facts));
        let noise_pages = d.pages(rest).to_vec();
        pages.extend(noise_pages.iter().cycle().take(start / page_size - pages.len()));
        let seq = d.start_at(start);
        d.set_pages(seq, pages);
        let mut least = f32::INFINITY;
        for i in [0, 5] {
            d.cut(seq, start);
            let (text, margin) = greedy(&mut d, seq, &bytes(&h.question(i)), 40);
            assert_eq!(text, h.answer(i), "{kv_dtype}");
            least = least.min(margin);
        }
        println!("{total} tokens, {kv_dtype}: margin {least}");
        assert!(least >= MIN_MARGIN, "{kv_dtype}: margin {least}");
    }
}

#[test]
fn stored_keys_and_values_are_exact_in_bf16() {
    let h = haystack(4, 600, 4).unwrap();
    let mut d = Driver::new(model(), recall_options(700, DType::F32), 44);
    read(&mut d, &h);
    for page in 1..37 {
        let page_elems = 2 * 16 * 64;
        // The first tokens have no 7 predecessors; all others store -1, 0 and 1 only.
        let id = d.pages(0)[page] as usize;
        for (what, all) in
            [("keys", d.keys(1)), ("values", d.values(1)), ("first layer's values", d.values(0))]
        {
            let exact = all[id * page_elems..][..page_elems].iter().all(|x| [-1.0, 0.0, 1.0].contains(x));
            assert!(exact, "{what} of page {page}");
        }
    }
}

/// Answers right under `change`, of 10 at 1,500 tokens.
fn right_after(change: impl FnOnce(&mut ModelConfig, &mut Weights)) -> usize {
    let (mut config, mut weights) = (recall::config(), recall::weights());
    change(&mut config, &mut weights);
    let h = haystack(5, 1500, 10).unwrap();
    let mut d = Driver::new(wrap(config, weights), recall_options(1600, DType::F32), 110);
    let seq = read(&mut d, &h);
    ask(&mut d, seq, &h).0
}

#[test]
fn nothing_wrong_means_every_answer_right() {
    assert_eq!(right_after(|_, _| {}), 10);
}

#[test]
fn a_window_off_by_one_changes_the_text() {
    for window in [Some(WINDOW - 1), Some(WINDOW + 1), None] {
        assert_eq!(right_after(|c, _| c.layers[0].window = window), 0, "window {window:?}");
    }
    // The global layer must see everything.
    assert!(right_after(|c, _| c.layers[1].window = Some(400)) < 5);
}

#[test]
fn positions_on_the_wrong_layer_change_the_text() {
    let layer = |window, rope| LayerConfig { window, rope };
    assert_eq!(right_after(|c, _| c.layers[0] = layer(Some(WINDOW), None)), 0);
    assert_eq!(right_after(|c, _| c.layers[1] = layer(None, Some(0))), 0);
}

#[test]
fn a_wrong_rotary_pairing_changes_the_text() {
    assert_eq!(right_after(|c, _| c.rope_style = suanpan_ops::RopeStyle::Interleaved), 0);
}

#[test]
fn a_wrong_head_mapping_changes_the_text() {
    // Query heads dealt out to the kv heads in turn, as if the kv head of h were h % 2 and not h / 4.
    let order = [0, 2, 4, 6, 1, 3, 5, 7];
    for layer in 0..2 {
        let right = right_after(|_, w| {
            let l = &mut w.layers[layer];
            l.q.weight = reorder_rows(&l.q.weight, 64, &order);
            l.o.weight = reorder_cols(&l.o.weight, 64, &order);
        });
        assert_eq!(right, 0, "layer {layer}");
        // The kv heads swapped.
        let right = right_after(|_, w| {
            let l = &mut w.layers[layer];
            l.k.weight = reorder_rows(&l.k.weight, 64, &[1, 0]);
            let Values::Own(v) = &mut l.v else { panic!("the constructed model has values of its own") };
            v.weight = reorder_rows(&v.weight, 64, &[1, 0]);
        });
        assert_eq!(right, 0, "layer {layer}");
    }
}

#[test]
fn queries_one_position_off_change_the_text() {
    // Within a group, head j asks for offset j + 1: as if its position were one too small.
    assert_eq!(
        right_after(|_, w| {
            let q = &mut w.layers[0].q.weight;
            *q = reorder_rows(q, 64, &[1, 2, 3, 3, 5, 6, 7, 7]);
        }),
        0
    );
}

#[test]
fn a_wrong_page_changes_the_text() {
    let h = haystack(6, 1504, 10).unwrap();
    let ask_after = |change: &dyn Fn(&mut Driver, usize)| {
        let mut d = Driver::new(model(), recall_options(1700, DType::F32), 120);
        let seq = read(&mut d, &h);
        change(&mut d, seq);
        let mut right = 0;
        for i in 0..h.facts.len() {
            d.cut(seq, h.text.len());
            right += usize::from(greedy(&mut d, seq, &bytes(&h.question(i)), 40).0 == h.answer(i));
        }
        right
    };
    assert_eq!(ask_after(&|_, _| {}), 10);
    // The page that holds the third fact's value is another sequence's.
    let page = (h.facts[2].depth + 12) / 16;
    let lost = ask_after(&|d, seq| {
        let mut pages = d.pages(seq).to_vec();
        pages[page] = pages[0];
        d.set_pages(seq, pages);
    });
    assert_eq!(lost, 9);
}
