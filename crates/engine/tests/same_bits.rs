//! One request, every way the cache can serve it, one answer: in batch-invariant mode tokens and logits have the same bits cold, warm,
//! evicted, preempted, reloaded from disk, in chunks of any size, in any company and forked; for every stored type.

mod common;

use std::path::PathBuf;

use common::*;
use suanpan_base::DType;
use suanpan_engine::{Engine, EngineOptions, LowerTiers, Request, RequestKey, SamplingParams};

const OUTPUTS: usize = 12;

/// Sampled, with the raw log-probabilities of twenty tokens at each step: they carry the bits of the logits.
fn params(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 2.0, seed: Some(seed), logprobs: Some(20), ..exactly(OUTPUTS) }
}

fn prompt() -> String {
    // Ends inside a page, and repeats nothing, so that every key matters.
    (0..301u32).map(|i| char::from(b'a' + (i.wrapping_mul(2_654_435_761) >> 24) as u8 % 26)).collect()
}

fn ask(seed: u64) -> Request {
    request(&prompt(), params(seed))
}

fn invariant(dtype: DType, pages: usize) -> EngineOptions {
    EngineOptions { batch_invariant: true, kv_cache_dtype: dtype, window_groups: false, ..options(pages) }
}

/// Everything that must not differ.
fn bits(answer: &Answer) -> (Vec<u32>, Vec<Vec<(u32, u32)>>) {
    let row = |p: &suanpan_engine::logprobs::PositionLogprobs| {
        p.top.iter().map(|t| (t.id, t.logprob.to_bits())).collect()
    };
    assert_eq!(answer.logprobs.len(), OUTPUTS);
    (answer.tokens.clone(), answer.logprobs.iter().map(row).collect())
}

fn other(i: usize, len: usize) -> Request {
    request(&"the quick brown fox jumps over it ".repeat(20)[i..i + len], exactly(9 + i % 5))
}

fn serve(engine: &mut Engine) -> Answer {
    run(engine, vec![ask(1)]).remove(0)
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        Folder(std::env::temp_dir().join(format!("suanpan-bits-{name}-{}", std::process::id())))
    }

    fn options(&self) -> LowerTiers {
        LowerTiers {
            folder: Some(self.0.clone()),
            disk_bytes: 1 << 30,
            host_bytes: 0,
            staging_bytes: 1 << 28,
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

#[test]
fn c26_cold_warm_evicted_chunked_and_batched_have_the_same_bits() {
    for dtype in [DType::Bf16, DType::F16, DType::E4m3, DType::I8, DType::I4] {
        let mut engine = engine(invariant(dtype, 64));
        let cold = serve(&mut engine);
        let want = bits(&cold);
        assert_eq!(cold.books.cached_tokens, 0);
        let same = |what: &str, answer: &Answer| assert_eq!(bits(answer), want, "{dtype}: {what}");
        let warm = serve(&mut engine);
        assert_eq!(warm.books.cached_tokens, 300, "all but the last token");
        same("warm", &warm);
        // Half of the prefix is evicted by others, then all of it.
        run(&mut engine, (0..2).map(|i| other(i, 400)).collect());
        same("evicted", &serve(&mut engine));
        engine.clear_prefix_cache();
        same("forgotten", &serve(&mut engine));
        for chunk in [1, 16, 64, 512] {
            let opts = EngineOptions {
                max_num_batched_tokens: chunk.max(8),
                long_prefill_token_threshold: chunk,
                ..invariant(dtype, 64)
            };
            let mut engine = common::engine(opts);
            same("in chunks", &serve(&mut engine));
            same("in chunks, warm", &serve(&mut engine));
        }
        let mut batch = vec![ask(1)];
        batch.splice(0..0, (0..3).map(|i| other(i, 30 + 11 * i)));
        let mut engine = common::engine(invariant(dtype, 200));
        same("batched", &run(&mut engine, batch)[3]);
    }
}

/// C22: choices forked from one prompt are the single runs of their seeds, also where the pool is too small for all of them.
#[test]
fn c22_forked_and_preempted_choices_have_the_bits_of_single_runs() {
    for dtype in [DType::Bf16, DType::I8] {
        let single: Vec<_> = (0..4).map(|seed| bits(&run_alone(invariant(dtype, 64), ask(seed)))).collect();
        for pages in [200, 21] {
            let mut engine = engine(invariant(dtype, pages));
            let forked = (0..4)
                .map(|seed| Request { fork_of: (seed > 0).then_some(RequestKey(0)), ..ask(seed) })
                .collect();
            let answers = run(&mut engine, forked);
            for (answer, want) in answers.iter().zip(&single) {
                assert_eq!(bits(answer), *want, "{dtype}, {pages} pages");
            }
            if pages == 200 {
                assert_eq!(answers[3].books.cached_tokens, 301);
                let computed: usize = answers.iter().map(|a| a.books.computed_tokens).sum();
                assert_eq!(computed, 301 + 4 * (OUTPUTS - 1), "the prompt was computed once");
            } else {
                assert!(engine.stats().preemptions > 0, "{pages} pages preempt");
            }
        }
    }
}

/// Reloaded from disk by a new engine: the same bits, and nearly nothing computed. Damaged, or of another type: computed, the same bits.
#[test]
fn c23_pages_reloaded_from_disk_have_the_same_bits() {
    for dtype in [DType::Bf16, DType::I8] {
        let folder = Folder::new(dtype.name());
        let open = |dtype| engine(invariant(dtype, 64)).with_lower_tiers(&folder.options()).unwrap();
        let mut first = open(dtype);
        let want = bits(&serve(&mut first));
        let written = || first.stats().tier.pages_written;
        while written() < 18 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        drop(first);
        let mut second = open(dtype);
        let reloaded = serve(&mut second);
        assert_eq!(bits(&reloaded), want, "{dtype}: reloaded");
        assert_eq!((reloaded.books.cached_tokens, second.stats().tier.pages_loaded), (288, 18), "{dtype}");
        assert_eq!(second.stats().tier.staged_bytes, 0);
        drop(second);
        let mut other = open(if dtype == DType::I8 { DType::I4 } else { DType::F16 });
        assert_eq!(serve(&mut other).books.cached_tokens, 0, "another type's pages are not found");
        drop(other);
        for (i, entry) in std::fs::read_dir(&folder.0).unwrap().enumerate() {
            let path = entry.unwrap().path();
            let mut bytes = std::fs::read(&path).unwrap();
            let at = i * 7919 % bytes.len();
            bytes[at] ^= 1 << (i % 8);
            std::fs::write(&path, bytes).unwrap();
        }
        let mut third = open(dtype);
        let recomputed = serve(&mut third);
        assert_eq!(bits(&recomputed), want, "{dtype}: damaged");
        assert_eq!((recomputed.books.cached_tokens, third.stats().tier.pages_loaded), (0, 0));
        assert!(third.stats().tier.faults > 0);
    }
}

/// From host memory, after the pool has forgotten them: the same bits, and nearly nothing computed.
#[test]
fn pages_reloaded_from_host_memory_have_the_same_bits() {
    for dtype in [DType::Bf16, DType::I8] {
        let host = LowerTiers { folder: None, disk_bytes: 0, host_bytes: 1 << 28, staging_bytes: 1 << 28 };
        let mut engine = engine(invariant(dtype, 64)).with_lower_tiers(&host).unwrap();
        let want = bits(&serve(&mut engine));
        while engine.stats().tier.pages_written < 18 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        engine.clear_prefix_cache();
        let reloaded = serve(&mut engine);
        assert_eq!(bits(&reloaded), want, "{dtype}");
        assert_eq!((reloaded.books.cached_tokens, engine.stats().tier.pages_loaded), (288, 18), "{dtype}");
    }
}

/// A request taken back while its pages are on their way frees all copies, and those that waited for it go on.
#[test]
fn c20_an_abort_while_pages_are_loaded_frees_every_copy() {
    let folder = Folder::new("abort");
    let mut engine = engine(invariant(DType::Bf16, 64)).with_lower_tiers(&folder.options()).unwrap();
    let want = bits(&serve(&mut engine));
    while engine.stats().tier.pages_written < 18 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for round in 0..20 {
        engine.clear_prefix_cache();
        let first = engine.submit(ask(1)).unwrap();
        let fork = engine.submit(Request { fork_of: Some(first), ..ask(1) }).unwrap();
        (0..round % 4).for_each(|_| drop(engine.step()));
        assert!(engine.abort(first).is_some());
        let mut answers = std::collections::HashMap::new();
        drive(&mut engine, &mut answers);
        if round % 4 == 0 {
            assert_eq!(bits(&answers[&fork]), want);
        }
        let start = std::time::Instant::now();
        while engine.stats().tier.staged_bytes > 0 {
            assert!(start.elapsed().as_secs() < 20, "a copy is left");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// C23: the same prompt three times in each type, then to the context limit.
#[test]
fn c23_every_stored_type_answers_again_and_ends_at_the_limit() {
    for dtype in [DType::F16, DType::E4m3, DType::I8, DType::I4] {
        let opts = EngineOptions { kv_cache_dtype: dtype, max_model_len: Some(320), ..options(24) };
        let mut engine = engine(opts);
        let answers: Vec<_> = (0..3).map(|_| serve(&mut engine)).collect();
        assert!(answers.iter().all(|a| a.tokens.len() == OUTPUTS && a.error.is_none()));
        assert_eq!(answers[1].tokens, answers[2].tokens, "{dtype}");
        let long = SamplingParams { max_tokens: None, ignore_eos: true, ..SamplingParams::greedy(1) };
        let limit = run(&mut engine, vec![request(&prompt(), long)]).remove(0);
        assert_eq!((limit.reason(), limit.tokens.len()), (suanpan_engine::FinishReason::Length, 320 - 301));
    }
}

#[test]
fn spared_layers_keep_bf16_and_types_without_scales_are_refused() {
    let pages = |spare: &str| {
        let kv_cache_dtype_skip_layers = spare.parse().unwrap();
        let opts = EngineOptions { kv_cache_dtype_skip_layers, ..invariant(DType::I4, 64) };
        Engine::new(model(), opts).map(|e| e.kv_sizing().bytes_per_page)
    };
    let all = engine(invariant(DType::I4, 64)).kv_sizing().bytes_per_page;
    assert!(pages("0").unwrap() > all);
    assert!(pages("200").err().unwrap().to_string().contains("200"));
    let refused = Engine::new(model(), invariant(DType::E5m2, 64)).err().unwrap().to_string();
    assert!(refused.contains("fp8_e5m2"), "{refused}");
}
