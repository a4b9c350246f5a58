//! `builtin:chain` and `builtin:count`: exact at every length tried, with the stated margins, in every type of cache; each fault of a stack changes
//! the answers; and the exported folders are the same models.

mod common;

use std::sync::Arc;

use common::driver::{Driver, best, last};
use common::random::{reorder_cols, reorder_rows};
use common::words::{Outcome, ask, chain, changed, continued, count, ids, read, word_options};
use suanpan_base::DType;
use suanpan_model::chain::haystack::{Facts, Haystack, counting, haystack};
use suanpan_model::chain::{BEGIN, MIN_MARGIN, MIN_MARGIN_CODES, WINDOW, count as counting_model};
use suanpan_model::forward::{ExecOptions, Executor};
use suanpan_model::{LayerConfig, LoadOptions, Model, ModelConfig, Values, Weights, builtin, export, load};

const FACTS: Facts = Facts { singles: 3, neighbours: 4, lists: 2, values: 5, chains: 3, hops: 4 };
const TYPES: [DType; 6] = [DType::F32, DType::Bf16, DType::F16, DType::E4m3, DType::I8, DType::I4];

fn least_margin(kv_dtype: DType) -> f32 {
    if kv_dtype.is_code() { MIN_MARGIN_CODES } else { MIN_MARGIN }
}

/// Reads and asks `h` with `model`.
fn outcome(model: &Arc<Model>, h: &Haystack, opts: ExecOptions, chunk: usize) -> Outcome {
    let mut d = Driver::new(Arc::clone(model), opts, opts.max_model_len / opts.page_size + 8);
    d.poison(f32::NAN);
    let at = read(&mut d, &h.text, chunk);
    ask(&mut d, at, h)
}

#[test]
fn every_needle_list_and_chain_is_right_in_every_type_of_cache() {
    for (i, kv_dtype) in TYPES.into_iter().enumerate() {
        let (tokens, page_size, chunk) = [(700, 16, 512), (1000, 1, 512), (1501, 256, 100)][i % 3];
        let h = haystack(i as u64, tokens, FACTS).unwrap();
        let opts = ExecOptions { page_size, ..word_options(tokens + 64, kv_dtype) };
        let Outcome { right, margin, wrong } = outcome(&chain(), &h, opts, chunk);
        println!(
            "{tokens} tokens, {kv_dtype}, pages of {page_size}, steps of {chunk}: {right} right, margin {margin}"
        );
        assert_eq!(right, h.questions.len(), "{kv_dtype}: {wrong:?}");
        assert!(margin >= least_margin(kv_dtype), "{kv_dtype}: margin {margin}");
    }
}

#[test]
fn every_count_is_right_in_every_type_of_cache() {
    let h = counting(7, 3000, &[0, 1, 2, 3, 5, 17, 100, 499, 999, 1000]).unwrap();
    for kv_dtype in TYPES {
        let Outcome { right, margin, wrong } = outcome(&count(), &h, word_options(3100, kv_dtype), 512);
        println!("{kv_dtype}: {right} right, margin {margin}");
        assert_eq!(right, h.questions.len(), "{kv_dtype}: {wrong:?}");
        assert!(margin >= counting_model::MIN_MARGIN, "{kv_dtype}: margin {margin}");
    }
}

#[test]
fn questions_in_one_batch_are_answered_as_each_alone() {
    let texts = [1, 2].map(|seed| haystack(seed, 300, Facts { lists: 1, chains: 1, ..FACTS }).unwrap());
    let mut d = Driver::new(chain(), word_options(400, DType::F32), 60);
    let seqs = [0, 1].map(|i| read(&mut d, &texts[i].text, 37).0);
    for (q, other) in texts[0].questions.iter().zip(&texts[1].questions) {
        let prompts = [ids(&q.prompt), ids(&other.prompt)];
        let logits = d.step(&[last(seqs[0], &prompts[0]), last(seqs[1], &prompts[1])]);
        for (logits, q) in logits.iter().zip([q, other]) {
            assert_eq!(best(logits).0, ids(&q.answer)[0], "{:?}", q.kind);
        }
    }
}

#[test]
fn what_is_not_there_is_an_empty_answer_and_a_chain_ends_where_it_ends() {
    let text = " river stone bababa: bababe. paper bababe: bababi. river bababu: bababa. copper";
    let mut d = Driver::new(chain(), word_options(200, DType::F32), 20);
    let (seq, len) = read(&mut d, text, 512);
    for (question, answer) in [
        (" bababu?", " bababa"),
        (" bababu?2", " bababe"),
        (" bababu?3", " bababi"),
        (" bababu?4", " bababi"),
        (" bababu?5", ""),
        (" dadada?", ""),
        (" dadada?3", ""),
    ] {
        d.cut(seq, len);
        let (got, margin) = continued(&mut d, seq, question, 9);
        assert_eq!(got, answer, "{question}");
        assert!(margin >= MIN_MARGIN, "{question}: {margin}");
    }
}

/// 2^20 tokens, most of them the same few pages named again and again: keys without positions do not know the difference.
#[test]
fn a_million_tokens_of_words() {
    let (total, page_size, tokens) = (1usize << 20, 16, 1023);
    let h = haystack(2, tokens, Facts { singles: 1, neighbours: 1, lists: 1, values: 3, chains: 1, hops: 4 })
        .unwrap();
    let noise =
        haystack(3, tokens, Facts { singles: 0, neighbours: 0, lists: 0, chains: 0, ..FACTS }).unwrap();
    for kv_dtype in [DType::F32, DType::I4] {
        let opts = word_options(total, kv_dtype);
        let mut d = Driver::new(chain(), opts, 3 * 1024 / page_size);
        let (facts, _) = read(&mut d, &h.text, 512);
        let (rest, _) = read(&mut d, &noise.text, 512);
        let start = total - 64;
        let mut pages = d.pages(facts).to_vec();
        // Not the page of the second begin token: there is one.
        let noise_pages = d.pages(rest)[1..].to_vec();
        pages.extend(noise_pages.iter().cycle().take(start / page_size - pages.len()));
        let seq = d.start_at(start);
        d.set_pages(seq, pages);
        let got = ask(&mut d, (seq, start), &h);
        println!("{total} tokens, {kv_dtype}: {} right, margin {}", got.right, got.margin);
        assert_eq!(got.right, h.questions.len(), "{kv_dtype}: {:?}", got.wrong);
        assert!(got.margin >= least_margin(kv_dtype), "{kv_dtype}: margin {}", got.margin);
    }
}

/// Answers right of the chain model under `change`, of as many as there are questions.
fn right_after(change: impl FnOnce(&mut ModelConfig, &mut Weights)) -> (usize, usize) {
    let h = haystack(5, 500, Facts { lists: 2, values: 3, ..FACTS }).unwrap();
    let got = outcome(&changed(&chain(), change), &h, word_options(600, DType::F32), 512);
    (got.right, h.questions.len())
}

fn none_right(what: &str, change: impl FnOnce(&mut ModelConfig, &mut Weights)) {
    assert_eq!(right_after(change).0, 0, "{what}");
}

#[test]
fn a_window_off_by_one_changes_every_answer() {
    let (right, all) = right_after(|_, _| {});
    assert_eq!(right, all);
    for window in [Some(WINDOW - 1), Some(WINDOW + 1), None] {
        none_right(&format!("window {window:?}"), |c, _| c.layers[0].window = window);
    }
}

#[test]
fn positions_on_the_wrong_layer_or_wrongly_paired_change_every_answer() {
    let layer = |window, rope| LayerConfig { window, rope };
    none_right("no positions in the window", |c, _| c.layers[0] = layer(Some(WINDOW), None));
    none_right("positions in the first hop", |c, _| c.layers[3] = layer(None, Some(0)));
    none_right("interleaved pairs", |c, _| c.rope_style = suanpan_ops::RopeStyle::Interleaved);
}

#[test]
fn a_wrong_head_mapping_changes_answers_in_every_layer() {
    for layer in 0..7 {
        let swap_kv = |w: &mut Weights| {
            let l = &mut w.layers[layer];
            l.k.weight = reorder_rows(&l.k.weight, 64, &[1, 0]);
            let Values::Own(v) = &mut l.v else { panic!("the constructed model has values of its own") };
            v.weight = reorder_rows(&v.weight, 64, &[1, 0]);
        };
        // Query heads dealt to the kv heads in turn, as if the kv head of h were h % 2 and not h / 2.
        let deal = |w: &mut Weights| {
            let l = &mut w.layers[layer];
            l.q.weight = reorder_rows(&l.q.weight, 64, &[0, 2, 1, 3]);
            l.o.weight = reorder_cols(&l.o.weight, 64, &[0, 2, 1, 3]);
        };
        let faults: [&dyn Fn(&mut Weights); 2] = [&swap_kv, &deal];
        for (i, fault) in faults.into_iter().enumerate() {
            let (right, all) = right_after(|_, w| fault(w));
            // Only lists need the second and third layer, only chains the last three, everything needs the others.
            let most = match layer {
                1 | 2 => all - 2,
                4..=6 => all - 3,
                _ => 0,
            };
            assert!(right <= most, "layer {layer}, fault {i}: {right} of {all} right");
        }
    }
}

#[test]
fn keys_that_are_lost_change_the_answers_and_the_counts() {
    // As after a split of keys that was not merged: rows in the second half do not see the first.
    for layer in [1, 3] {
        let (right, all) = right_after(|c, _| c.layers[layer].window = Some(250));
        assert!(right < all, "layer {layer}: {right} of {all}");
    }
    let h = counting(1, 400, &[20, 40, 60]).unwrap();
    let cut = changed(&count(), |c, _| c.layers[1].window = Some(300));
    assert_eq!(outcome(&cut, &h, word_options(500, DType::F32), 512).right, 0);
}

#[test]
fn a_page_of_another_place_changes_exactly_its_answer() {
    let h = haystack(6, 1000, Facts { singles: 8, neighbours: 0, lists: 0, chains: 0, ..FACTS }).unwrap();
    let mut d = Driver::new(chain(), word_options(1100, DType::F32), 80);
    let at = read(&mut d, &h.text, 512);
    assert_eq!(ask(&mut d, at, &h).right, 8);
    // The value of the third question's fact: begin token, key, colon, value.
    let page = (h.questions[2].depths[0] + 3) / 16;
    let mut pages = d.pages(at.0).to_vec();
    pages[page] = pages[page - 1];
    d.set_pages(at.0, pages);
    let got = ask(&mut d, at, &h);
    assert!(got.wrong.iter().any(|(q, _)| *q == h.questions[2]), "{:?}", got.wrong);
    assert!((5..8).contains(&got.right), "{got:?}");
}

#[test]
fn an_exported_folder_is_the_same_model_bit_for_bit() {
    for spec in ["builtin:recall", "builtin:chain:hops=2", "builtin:count"] {
        let folder = std::env::temp_dir().join(format!(
            "suanpan-export-{}-{}",
            std::process::id(),
            spec.replace(':', "-")
        ));
        let files = export::export(spec, &folder).unwrap();
        assert!(files.iter().all(|f| folder.join(f.name).metadata().unwrap().len() == f.bytes), "{files:?}");
        assert!(export::export(spec, &folder).is_err(), "a folder with files in it");
        let own = Arc::new(builtin::load(spec).unwrap());
        let read = Arc::new(load(folder.to_str().unwrap(), &LoadOptions::default(), &mut |_| ()).unwrap());
        std::fs::remove_dir_all(&folder).unwrap();
        let text = " river bababa: bababe. stone bababe: bababi. bababa?2";
        let tokens = own.tokenizer.encode(text, true).unwrap();
        assert_eq!(tokens, read.tokenizer.encode(text, true).unwrap(), "{spec}");
        assert_eq!(own.config.eos_token_ids, read.config.eos_token_ids);
        assert_eq!(own.config.max_position_embeddings, read.config.max_position_embeddings);
        let logits = [own, read].map(|model| {
            let mut d = Driver::new(model, word_options(128, DType::Bf16), 16);
            let seq = d.start();
            d.in_chunks(seq, &tokens, 7)
        });
        assert!(logits[0] == logits[1], "{spec}");
    }
    assert!(export::export("builtin:other", &std::env::temp_dir()).is_err());
}

#[test]
fn the_begin_token_comes_first_in_a_chat_and_in_a_text() {
    let model = chain();
    assert_eq!(model.tokenizer.encode(" river", true).unwrap()[0], BEGIN);
    let messages = serde_json::json!([{"role": "user", "content": " bababa: bababe. bababa?"}]);
    let template = model.chat_template.as_ref().unwrap();
    let tokens = template.encode(&model.tokenizer, &messages, true, None, &serde_json::Map::new()).unwrap();
    assert_eq!(tokens, model.tokenizer.encode(" bababa: bababe. bababa?", true).unwrap());
    assert!(Executor::new(model, word_options(64, DType::F32)).is_ok());
}
