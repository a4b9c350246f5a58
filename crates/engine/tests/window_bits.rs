//! Models whose layers have windows, with pages of their own for those layers: one request, every way the cache can serve it, one
//! answer, the bits of which are those of the same model with all layers' pages in one pool.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::*;
use suanpan_base::DType;
use suanpan_cache::NearTokens;
use suanpan_engine::{Engine, EngineOptions, Request, RequestKey, SamplingParams};
use suanpan_model::{LoadOptions, Model, load};

const OUTPUTS: usize = 40;
const PROMPT: usize = 149;

/// Windows of 8 tokens; a layer that sees everything beside one with a window, or windows in all layers.
const MODELS: [&str; 4] = ["families/gemma3", "families/gemma2", "families/gpt-oss", "window"];

fn open(name: &str) -> Arc<Model> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(name);
    Arc::new(load(path.to_str().unwrap(), &LoadOptions::default(), &mut |_| {}).unwrap())
}

fn opts(dtype: DType, pages: usize) -> EngineOptions {
    EngineOptions {
        batch_invariant: true,
        kv_cache_dtype: dtype,
        page_size: 4,
        max_model_len: Some(240),
        ..options(pages)
    }
}

fn ask(seed: u64, tail: u32) -> Request {
    let prompt = (0..PROMPT as u32)
        .map(|i| if i > 130 { (i * tail) % 60 } else { (i.wrapping_mul(2_654_435_761) >> 20) % 60 });
    let params =
        SamplingParams { temperature: 2.0, seed: Some(seed), logprobs: Some(20), ..exactly(OUTPUTS) };
    Request { id: "test".into(), prompt: prompt.collect(), params, ..Request::default() }
}

fn bits(answer: &Answer) -> (Vec<u32>, Vec<Vec<(u32, u32)>>) {
    let row = |p: &suanpan_engine::logprobs::PositionLogprobs| {
        p.top.iter().map(|t| (t.id, t.logprob.to_bits())).collect()
    };
    assert_eq!(answer.logprobs.len(), OUTPUTS);
    (answer.tokens.clone(), answer.logprobs.iter().map(row).collect())
}

fn serve(engine: &mut Engine) -> Answer {
    run(engine, vec![ask(1, 1)]).remove(0)
}

#[test]
fn c26_a_window_model_has_the_same_bits_cold_warm_evicted_chunked_batched_and_forked() {
    for name in MODELS {
        for dtype in [DType::Bf16, DType::I8] {
            same_bits_on_every_way(name, |pages| opts(dtype, pages));
        }
    }
}

/// Near tokens in 16 bits lie in pages of a window: of models that have windows themselves (wider or narrower ones), and of one that has none.
#[test]
fn codes_with_near_tokens_in_16_bits_have_the_same_bits_cold_warm_evicted_chunked_batched_and_forked() {
    for (name, dtype, (sinks, recent)) in [
        ("families/qwen3", DType::I4, (4, 11)),
        ("families/qwen3", DType::E4m3, (0, 8)),
        ("families/gemma3", DType::I8, (8, 5)),
        ("families/gpt-oss", DType::I4, (4, 12)),
    ] {
        let kv_cache_near = NearTokens { sinks, recent };
        same_bits_on_every_way(name, |pages| EngineOptions { kv_cache_near, ..opts(dtype, pages) });
    }
}

/// Of one model: every way the cache can serve it with pages of their own for windows gives the bits of one pool for all layers.
fn same_bits_on_every_way(name: &str, opts: impl Fn(usize) -> EngineOptions) {
    let model = open(name);
    let engine = |opts| Engine::new(Arc::clone(&model), opts).unwrap();
    let asked = opts(100);
    let (dtype, near) = (asked.kv_cache_dtype, asked.kv_cache_near);
    let mut plain = engine(EngineOptions { window_groups: false, ..asked });
    assert_eq!(plain.kv_sizing().window, None);
    let want = bits(&serve(&mut plain));
    let same =
        |what: &str, answer: &Answer| assert_eq!(bits(answer), want, "{name}, {dtype}, {near:?}: {what}");
    let mut grouped = engine(EngineOptions { window_pages: Some(40), ..asked });
    let window = model.config.layers.iter().filter_map(|l| l.window).chain([near.recent]).max().unwrap();
    assert_eq!(grouped.kv_sizing().window.map(|w| (w.window, w.num_pages)), Some((window, 40)));
    let cold = serve(&mut grouped);
    same("cold", &cold);
    assert_eq!(cold.books.cached_tokens, 0);
    let warm = serve(&mut grouped);
    same("warm", &warm);
    assert_eq!(warm.books.cached_tokens, PROMPT - 1, "{name}: all but the last token");
    // Others need the windows' pages, then everything.
    run(&mut grouped, (2..8).map(|tail| ask(tail, tail as u32)).collect());
    same("evicted", &serve(&mut grouped));
    grouped.clear_prefix_cache();
    same("forgotten", &serve(&mut grouped));
    let stats = grouped.stats();
    assert_eq!(stats.window_pages_free + stats.window_pages_cached, stats.window_pages_total);
    for chunk in [1, 16, 64, 512] {
        let limits = EngineOptions {
            max_num_batched_tokens: chunk.max(8),
            long_prefill_token_threshold: chunk,
            window_pages: Some(24),
            ..asked
        };
        let mut engine = engine(limits);
        same("in chunks", &serve(&mut engine));
        same("in chunks, warm", &serve(&mut engine));
    }
    let forked = (0..4).map(|i| Request { fork_of: (i > 0).then_some(RequestKey(0)), ..ask(1 + i, 1) });
    let mut engine = engine(EngineOptions { window_pages: Some(24), ..asked });
    same("forked", &run(&mut engine, forked.collect())[0]);
}

/// A pool for few windows and few pages: requests lose their pages and are computed again, with the same bits.
#[test]
fn a_window_model_preempted_has_the_bits_of_single_runs() {
    for name in ["families/gemma3", "window"] {
        let model = open(name);
        let alone = |i: u64| {
            let mut engine = Engine::new(Arc::clone(&model), opts(DType::Bf16, 100)).unwrap();
            bits(&run(&mut engine, vec![ask(i, i as u32)]).remove(0))
        };
        let want: Vec<_> = (0..5).map(alone).collect();
        let limits = EngineOptions { window_pages: Some(14), ..opts(DType::Bf16, 110) };
        let mut engine = Engine::new(Arc::clone(&model), limits).unwrap();
        for _ in 0..2 {
            let answers = run(&mut engine, (0..5).map(|i| ask(i, i as u32)).collect());
            for (answer, want) in answers.iter().zip(&want) {
                assert_eq!(bits(answer), *want, "{name}");
            }
        }
    }
}

#[test]
fn window_pages_are_sized_by_the_window_and_refused_below_one() {
    let sizing = |change: fn(&mut EngineOptions)| {
        let mut opts = opts(DType::Bf16, 100);
        change(&mut opts);
        opts.size_kv(&open("families/gemma3").config, suanpan_cache::memory::HostMemory::default())
    };
    let plain = sizing(|o| o.window_groups = false).unwrap();
    let grouped = sizing(|_| ()).unwrap();
    let window = grouped.window.unwrap();
    // Two windows of each of 8 requests, and a chunk.
    assert_eq!((window.num_pages, window.num_layers), (100, 1));
    assert_eq!(grouped.bytes_per_page + window.bytes_per_page, plain.bytes_per_page);
    let long = sizing(|o| o.num_pages_override = Some(4000)).unwrap();
    assert_eq!(long.window.unwrap().num_pages, 2 * 8 * 6 + 16);
    assert!(long.bytes() < 4000 * plain.bytes_per_page * 6 / 10);
    let bytes = sizing(|o| (o.num_pages_override, o.kv_cache_memory_bytes) = (None, Some(1 << 20))).unwrap();
    assert!(bytes.bytes() <= 1 << 20 && bytes.bytes() > (1 << 20) - 2 * plain.bytes_per_page);
    let few = sizing(|o| o.window_pages = Some(5)).unwrap_err();
    assert!(few.field == "kv_window_pages" && few.supported.contains('6'), "{few}");
    let short = sizing(|o| o.max_model_len = Some(20)).unwrap();
    assert_eq!(short.window, None, "no request is longer than the window");
}
