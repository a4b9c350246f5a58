//! The engine on the embedded model: whatever is batched, chunked, cached, preempted or aborted around it, a request's answer is
//! the one it gives alone.

mod common;

use std::collections::HashMap;

use common::*;
use suanpan_base::{DType, Mask, SeqLen};
use suanpan_engine::{Event, FinishReason, Request, SamplingParams};
use suanpan_ledger::kernel;
use suanpan_model::LayerConfig;
use suanpan_model::recall::{Haystack, haystack};

/// A text that repeats itself, so that the copier goes on for ever with margin.
fn loopy(seed: usize, len: usize) -> String {
    let period = 9 + seed % 5;
    (0..len).map(|i| char::from(b'a' + ((i % period) * (seed + 3) % 23) as u8)).collect()
}

fn straw() -> &'static Haystack {
    static STRAW: std::sync::OnceLock<Haystack> = std::sync::OnceLock::new();
    STRAW.get_or_init(|| haystack(3, 1500, 8).unwrap())
}

fn asking(i: usize, params: SamplingParams) -> Request {
    request(&format!("{}{}", straw().text, straw().question(i)), params)
}

#[test]
fn facts_are_recalled_alone_and_together() {
    let ask = |i| asking(i, SamplingParams::greedy(40));
    let answers = run(&mut engine(options(1024)), (0..8).map(ask).collect());
    for (i, answer) in answers.iter().enumerate() {
        assert_eq!(answer.text, straw().answer(i), "fact {i}");
        assert_eq!(answer.end, Some((FinishReason::Stop, None)));
        let alone = run_alone(options(1024), ask(i));
        assert_eq!((&alone.text, &alone.tokens), (&answer.text, &answer.tokens));
    }
    assert!(answers[1..].iter().all(|a| a.books.cached_tokens >= 1400), "the text was computed once");
    assert_eq!(answers[0].books.cached_tokens, 0);
}

#[test]
fn chunk_size_page_size_and_warmth_change_no_text() {
    let ask = || vec![asking(2, exactly(30)), asking(5, exactly(30))];
    let reference = run(&mut engine(options(1024)), ask());
    for (chunk, page_size) in [(1, 16), (16, 16), (64, 8), (4096, 32)] {
        let opts = suanpan_engine::EngineOptions {
            max_num_batched_tokens: chunk.max(2),
            long_prefill_token_threshold: chunk,
            max_num_seqs: 2,
            page_size,
            ..options(16 * 1024 / page_size)
        };
        let mut engine = engine(opts);
        for warm in [false, true] {
            let answers = run(&mut engine, ask());
            for (a, r) in answers.iter().zip(&reference) {
                assert_eq!(
                    (&a.text, &a.tokens),
                    (&r.text, &r.tokens),
                    "chunk {chunk}, page {page_size}, warm {warm}"
                );
                assert_eq!(a.books.cached_tokens > 0, warm || a.books.cached_tokens > 0);
            }
            assert_eq!(warm, answers[0].books.cached_tokens > 0);
        }
    }
}

#[test]
fn a_page_boundary_reads_no_stale_token() {
    let mut engine = engine(options(12));
    // Fill every slot of the pool with another text, then cross lengths 16, 32 and 48.
    run(&mut engine, vec![request(&loopy(1, 180), exactly(10))]);
    engine.clear_prefix_cache();
    let prompt = loopy(2, 10);
    let long = loopy(2, 60);
    let answer = run(&mut engine, vec![request(&long[..30], exactly(30))]).remove(0);
    assert_eq!(answer.text, long[30..]);
    let recycled = run(&mut engine, vec![request(&prompt, exactly(40))]).remove(0);
    let fresh = run_alone(options(12), request(&prompt, exactly(40)));
    assert_eq!(recycled.tokens, fresh.tokens);
}

/// C28: two requests of 9 pages each in a pool of 12.
fn preempted_equals_solo(params: &dyn Fn() -> SamplingParams, chunk: usize) {
    let opts = || suanpan_engine::EngineOptions { max_num_batched_tokens: chunk, ..options(12) };
    let ask = |seed| request(&loopy(seed, 20), params());
    let mut engine = engine(opts());
    let answers = run(&mut engine, vec![ask(1), ask(2)]);
    let preemptions = engine.stats().preemptions;
    assert!((1..=4).contains(&preemptions), "{preemptions} preemptions");
    for (i, answer) in answers.iter().enumerate() {
        let alone = run_alone(opts(), ask(i + 1));
        assert_eq!(answer.tokens.len(), 120);
        assert_eq!((&answer.text, &answer.tokens), (&alone.text, &alone.tokens), "request {i}");
        assert_eq!((answer.books.prompt_tokens, answer.books.output_tokens), (20, 120));
        assert_eq!(answer.reason(), FinishReason::Length);
    }
}

#[test]
fn greedy_output_survives_preemption() {
    preempted_equals_solo(&|| exactly(120), 64);
    preempted_equals_solo(&|| exactly(120), 16);
}

#[test]
fn seeded_sampling_with_penalties_survives_preemption() {
    let params = || SamplingParams {
        temperature: 6.0,
        presence_penalty: 1.5,
        repetition_penalty: 1.1,
        seed: Some(42),
        ..exactly(120)
    };
    preempted_equals_solo(&params, 64);
    preempted_equals_solo(&params, 16);
}

#[test]
fn a_seed_gives_the_same_text_in_any_company() {
    let params = |seed| SamplingParams { temperature: 8.0, top_p: 0.95, seed, ..exactly(40) };
    let ask = |seed| request(&loopy(3, 50), params(seed));
    let alone = run_alone(options(256), ask(Some(7)));
    let mut crowd: Vec<Request> =
        (0..5).map(|i| request(&loopy(4 + i, 30 + 7 * i), params(Some(i as u64)))).collect();
    crowd.insert(2, ask(Some(7)));
    let answers = run(&mut engine(options(256)), crowd);
    assert_eq!(answers[2].tokens, alone.tokens);
    let unseeded = run(&mut engine(options(256)), vec![ask(None), ask(None), ask(Some(8))]);
    assert_ne!(unseeded[0].tokens, unseeded[1].tokens, "requests without a seed have their own");
    assert_ne!(unseeded[2].tokens, alone.tokens);
}

#[test]
fn an_abort_in_the_middle_of_a_prompt_leaves_nothing_behind() {
    // The text is 400 tokens; with the second request under way the pool is nearly full.
    let straw = haystack(5, 400, 3).unwrap();
    let prompt = format!("{}{}", straw.text, straw.question(1));
    let longer = format!("{}{}", straw.text, straw.question(2));
    let mut engine = engine(options(64));
    for round in 0..50 {
        engine.clear_prefix_cache();
        assert_eq!(engine.stats().pages_free, 64);
        let other = engine.submit(request(&loopy(round, 30), exactly(60))).unwrap();
        let key = engine.submit(request(&prompt, exactly(8))).unwrap();
        let mut answers: HashMap<_, Answer> = HashMap::new();
        for _ in 0..round % 6 {
            engine.step().into_iter().for_each(|e| answers.entry(e.key()).or_default().take(e));
        }
        let aborted = engine.abort(key).expect("it is unfinished");
        assert!(
            matches!(aborted, Event::Finished { reason: FinishReason::Abort, books, .. } if books.agree()),
            "{aborted:?}"
        );
        assert_eq!(engine.abort(key), None);
        let again = engine.submit(request(&prompt, SamplingParams::greedy(40))).unwrap();
        let second = engine.submit(request(&longer, SamplingParams::greedy(40))).unwrap();
        drive(&mut engine, &mut answers);
        assert_eq!(answers[&again].text, straw.answer(1), "round {round}");
        assert_eq!(answers[&second].text, straw.answer(2), "round {round}");
        assert_eq!(answers[&again].books.cached_tokens, 0, "a prompt that was not finished is no hit");
        assert_eq!(answers[&other].tokens.len(), 60);
    }
}

#[test]
fn prompt_logprobs_do_not_depend_on_what_is_cached() {
    let scoring = |text: &str| {
        let params = SamplingParams { prompt_logprobs: Some(1), logprobs: Some(1), ..exactly(1) };
        request(text, params)
    };
    let long = loopy(5, 60);
    let text = &long[..48];
    let chunked = || suanpan_engine::EngineOptions { max_num_batched_tokens: 16, ..options(64) };
    let cold = run_alone(chunked(), scoring(text));
    assert_eq!(cold.prompt.len(), 48);
    assert!(cold.prompt[0].is_none() && cold.prompt[1..].iter().all(Option::is_some));
    let joined: String = cold.prompt.iter().flatten().map(|p| p.text.as_str()).collect();
    assert_eq!(joined, text[1..], "texts line up");
    for first in [&long[..32], &long[..]] {
        let mut engine = engine(chunked());
        run(&mut engine, vec![request(first, exactly(1)), scoring(first)]);
        for answer in run(&mut engine, vec![scoring(text), scoring(text)]) {
            for (a, b) in answer.prompt.iter().zip(&cold.prompt).skip(1) {
                let (a, b) = (a.as_ref().unwrap(), b.as_ref().unwrap());
                assert_eq!(a.token.id, b.token.id);
                assert!((a.token.logprob - b.token.logprob).abs() < 1e-3, "{a:?} {b:?}");
            }
            assert!(answer.logprobs[0].token.logprob.is_finite());
        }
    }
}

#[test]
fn scoring_alone_draws_nothing() {
    let params =
        SamplingParams { prompt_logprobs: Some(3), max_tokens: Some(0), ..SamplingParams::greedy(0) };
    for len in [1, 2, 65, 150] {
        let answer = run_alone(options(16), request(&loopy(6, len), params.clone()));
        assert_eq!((answer.prompt.len(), answer.tokens.len()), (len, 0));
        assert_eq!(answer.reason(), FinishReason::Length);
        assert!(answer.prompt[1..].iter().flatten().all(|p| p.top.len() == 3));
    }
}

#[test]
fn max_tokens_is_exact_and_an_end_token_first_gives_no_text() {
    let mut engine = engine(options(64));
    for n in [1, 5, 20] {
        let answer = run(&mut engine, vec![request(&loopy(7, 40), exactly(n))]).remove(0);
        assert_eq!((answer.tokens.len(), answer.books.output_tokens, answer.text.len()), (n, n, n));
    }
    // The copied text continues with a newline, the model's end token.
    let prompt = "abcdefghijk\nlmnop abcdefghijk";
    let answer = run(&mut engine, vec![request(prompt, SamplingParams::greedy(9))]).remove(0);
    assert_eq!(
        (answer.text.as_str(), answer.reason(), answer.tokens.as_slice()),
        ("", FinishReason::Stop, &[10][..])
    );
    let held = run(
        &mut engine,
        vec![request(prompt, SamplingParams { min_tokens: 3, ..SamplingParams::greedy(9) })],
    )
    .remove(0);
    assert!(held.tokens.len() >= 3 && held.tokens[..3].iter().all(|&t| t != 10), "{held:?}");
}

#[test]
fn a_bad_request_is_refused_and_harms_nobody() {
    let mut engine = engine(options(128));
    let vocab = engine.door().vocab_size as u32;
    let healthy = engine.submit(request(&loopy(1, 30), exactly(50))).unwrap();
    let with = |prompt: Vec<u32>, params| Request { prompt, params, ..Request::default() };
    let greedy = || SamplingParams::greedy(4);
    let bad = [
        ("prompt", with(vec![], greedy())),
        ("prompt", with(vec![1, vocab], greedy())),
        ("prompt", with(vec![u32::MAX], greedy())),
        ("prompt", with(vec![1; 5000], greedy())),
        ("max_tokens", with(vec![1; 2000], SamplingParams::greedy(2000))),
        ("logit_bias", with(vec![1], SamplingParams { logit_bias: vec![(vocab, 5.0)], ..greedy() })),
        ("stop_token_ids", with(vec![1], SamplingParams { stop_token_ids: vec![vocab + 1], ..greedy() })),
        ("stop", with(vec![1], SamplingParams { stop: vec![String::new()], ..greedy() })),
    ];
    let mut answers = HashMap::new();
    for (field, request) in bad {
        assert_eq!(engine.submit(request).unwrap_err().field, field);
        engine
            .step()
            .into_iter()
            .for_each(|e| answers.entry(e.key()).or_insert_with(Answer::default).take(e));
    }
    drive(&mut engine, &mut answers);
    assert_eq!(answers.len(), 1);
    assert_eq!(answers[&healthy].tokens.len(), 50);
}

#[test]
fn attention_is_booked_to_the_closed_form_whatever_the_chunks() {
    let config = &model().config;
    for (chunk, prompt, outputs) in [(1, 50, 7), (16, 100, 1), (64, 131, 20), (4096, 200, 3)] {
        let opts = suanpan_engine::EngineOptions { max_num_batched_tokens: chunk.max(8), ..options(64) };
        let opts = suanpan_engine::EngineOptions { long_prefill_token_threshold: chunk, ..opts };
        let books = run_alone(opts, request(&loopy(9, prompt), exactly(outputs))).books;
        let computed = prompt + outputs - 1;
        let len = SeqLen::new(computed, computed);
        let pairs = |l: &LayerConfig| l.window.map_or(Mask::CAUSAL, Mask::window).visible_pairs(len);
        let pairs = config.layers.iter().map(pairs).sum::<u64>() * config.heads.num_q_heads as u64;
        let written =
            kernel::kv_write_bytes(config.heads, computed, DType::Bf16) * config.layers.len() as u64;
        assert_eq!((books.counted.pairs, books.counted.kv_write_bytes), (pairs, written), "chunk {chunk}");
        assert_eq!(books.counted.flops, kernel::forward_flops(pairs, config.heads));
        assert_eq!((books.computed_tokens, books.pages_peak), (computed, computed.div_ceil(16)));
    }
}

#[test]
fn namespaces_share_no_prefix() {
    let mut engine = engine(options(64));
    let ask = |namespace| Request { namespace, ..request(&loopy(8, 100), exactly(2)) };
    let answers: Vec<Answer> = [0, 1, 0, 1].map(|n| run(&mut engine, vec![ask(n)]).remove(0)).into();
    let cached: Vec<usize> = answers.iter().map(|a| a.books.cached_tokens).collect();
    assert_eq!(cached, [0, 0, 99, 99]);
    let mut off =
        common::engine(suanpan_engine::EngineOptions { enable_prefix_caching: false, ..options(64) });
    assert!([0, 0].iter().all(|&n| run(&mut off, vec![ask(n)])[0].books.cached_tokens == 0));
}
