//! The executor against a plain f64 transformer: whole prompts, chunks, decode, batches, pages, refusals.

mod common;

use common::driver::{Driver, all, last, options};
use common::plain::{Bound, Setting};
use common::random::{Random, config, model};
use suanpan_base::DType;
use suanpan_model::forward::{ExecOptions, Executor, LogitRows, StepSeq};
use suanpan_model::{LayerConfig, ModelConfig, RopeConfig, RopeScaling};
use suanpan_ops::RopeStyle;

const TOKENS: usize = 70;

fn tokens(seed: u64, n: usize) -> Vec<u32> {
    Random(seed).tokens(n, config().vocab_size)
}

#[test]
fn every_position_agrees_whole_in_chunks_and_token_by_token() {
    let (model, tokens) = (model(config(), 1), tokens(2, TOKENS));
    for kv_dtype in [DType::F32, DType::Bf16] {
        let bound =
            Bound::new(&model, &tokens, Setting { bf16_kv: kv_dtype == DType::Bf16, ..Setting::default() });
        for page_size in [1, 16] {
            let opts = ExecOptions { kv_dtype, page_size, ..options() };
            let mut d = Driver::new(model.clone(), opts, 1024 / page_size);
            d.poison(f32::NAN);
            for chunk in [TOKENS, 16, 3, 1] {
                let seq = d.start();
                let got = d.in_chunks(seq, &tokens, chunk);
                assert_eq!(got.len(), TOKENS * model.config.vocab_size);
                bound.check(&format!("{kv_dtype} pages of {page_size}, chunks of {chunk}"), 0, &got);
            }
        }
    }
}

#[test]
fn other_layouts_of_heads_and_layers_agree() {
    let plain = |f: &dyn Fn(&mut ModelConfig)| {
        let mut c = config();
        f(&mut c);
        c
    };
    let cases = [
        plain(&|c| c.rope_style = RopeStyle::Interleaved),
        plain(&|c| c.heads.num_kv_heads = 4),
        plain(&|c| c.heads.num_kv_heads = 1),
        plain(&|c| c.heads.head_dim_v = 24),
        plain(&|c| c.intermediate_size = 0),
        plain(&|c| c.softmax_scale = Some(0.7)),
        plain(&|c| c.layers.truncate(1)),
        plain(&|c| (c.heads.head_dim_qk, c.rotary_dim) = (10, 10)),
        plain(&|c| c.rotary_dim = 6),
        plain(&|c| (c.rotary_dim, c.rope_style) = (6, RopeStyle::Interleaved)),
        plain(&|c| (c.attn_softcap, c.logit_softcap) = (Some(3.0), Some(2.0))),
    ];
    let tokens = tokens(3, 40);
    for (i, config) in cases.into_iter().enumerate() {
        let model = model(config, 10 + i as u64);
        let bound = Bound::new(&model, &tokens, Setting::default());
        let mut d = Driver::new(model, options(), 32);
        let seq = d.start();
        let got = d.in_chunks(seq, &tokens, 33);
        bound.check(&format!("case {i}"), 0, &got);
    }
}

#[test]
fn a_sequence_gives_the_same_bits_alone_in_company_and_in_any_order() {
    let model = model(config(), 4);
    let prompts: Vec<Vec<u32>> =
        [17, 1, 40, 16, 9].iter().enumerate().map(|(i, &n)| tokens(20 + i as u64, n)).collect();
    let next = tokens(30, prompts.len());
    let run = |order: &[usize]| {
        let mut d = Driver::new(model.clone(), options(), 64);
        d.poison(f32::NAN);
        let ids: Vec<usize> = prompts.iter().map(|_| d.start()).collect();
        let first = d.step(&order.iter().map(|&i| all(ids[i], &prompts[i])).collect::<Vec<_>>());
        let second = d.step(&order.iter().map(|&i| last(ids[i], &next[i..=i])).collect::<Vec<_>>());
        let both = first.into_iter().zip(second).map(|(a, b)| [a, b].concat());
        order.iter().copied().zip(both).collect::<Vec<_>>()
    };
    let mut whole = run(&[0, 1, 2, 3, 4]);
    let mut permuted = run(&[3, 0, 4, 2, 1]);
    whole.sort_by_key(|x| x.0);
    permuted.sort_by_key(|x| x.0);
    for i in 0..prompts.len() {
        let alone = run(&[i]).remove(0);
        for (what, (_, got)) in [("in company", &whole[i]), ("permuted", &permuted[i])] {
            let same = got.iter().map(|x| x.to_bits()).eq(alone.1.iter().map(|x| x.to_bits()));
            assert!(same, "sequence {i} {what} differs from itself alone");
        }
    }
}

#[test]
fn last_and_no_logits_leave_the_other_rows_as_they_are() {
    let (model, tokens) = (model(config(), 5), tokens(6, 30));
    let vocab = model.config.vocab_size;
    let mut d = Driver::new(model, options(), 32);
    let (a, b, c) = (d.start(), d.start(), d.start());
    let whole = d.step(&[all(a, &tokens)]).remove(0);
    let none = common::driver::Extend { seq: b, tokens: &tokens[..20], logits: LogitRows::None };
    let got = d.step(&[none, last(c, &tokens)]);
    assert_eq!((got[0].len(), got[1].as_slice()), (0, &whole[29 * vocab..]));
    let rest = d.step(&[all(b, &tokens[20..])]).remove(0);
    let off = rest.iter().zip(&whole[20 * vocab..]).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    assert!(off < 1e-3, "a chunk without logits lost its keys: {off}");
    let none = common::driver::Extend { seq: c, tokens: &tokens[..1], logits: LogitRows::None };
    assert!(d.step(&[none])[0].is_empty());
}

/// Case C16 of the public bug kinds: at lengths divisible by the page size one page too many was read, hidden on a fresh pool.
#[test]
fn stale_page_is_never_read_at_lengths_divisible_by_the_page_size() {
    let (model, tokens) = (model(config(), 7), tokens(8, 50));
    let vocab = model.config.vocab_size;
    let bound = Bound::new(&model, &tokens, Setting::default());
    let run = |page_size: usize, poison: f32| {
        let mut d = Driver::new(model.clone(), ExecOptions { page_size, ..options() }, 256 / page_size);
        d.poison(poison);
        let seq = d.start();
        let mut out = d.step(&[all(seq, &tokens[..10])]).remove(0);
        // Lengths 11 to 50, one by one: through 16, 32 and 48.
        for t in 10..tokens.len() {
            out.extend(d.step(&[last(seq, &tokens[t..=t])]).remove(0));
        }
        out
    };
    let contiguous = run(64, 0.0);
    assert_eq!(contiguous.len(), 50 * vocab);
    for poison in [0.0, f32::NAN, 1e30, f32::INFINITY] {
        let paged = run(16, poison);
        bound.check(&format!("pool filled with {poison}"), 0, &paged);
        for (i, (a, b)) in paged.iter().zip(&contiguous).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "pool filled with {poison}: length {}", i / vocab + 1);
        }
    }
}

#[test]
fn a_page_table_one_page_short_is_refused_not_read_past() {
    let mut d = Driver::new(model(config(), 9), options(), 16);
    let seq = d.start();
    let tokens = tokens(10, 33);
    d.step(&[last(seq, &tokens[..32])]);
    d.batch.tokens.truncate(1);
    d.batch.seqs[0] = StepSeq { cached_len: 32, extend_len: 1, logits: LogitRows::Last };
    let e = d.exec.step(&d.batch, &mut d.kv).unwrap_err().to_string();
    assert!(e.contains("page_table[0]") && e.contains("2 ids for 33 tokens"), "{e}");
}

#[test]
fn bad_batches_are_refused_by_name_and_change_nothing() {
    let mut d = Driver::new(model(config(), 11), options(), 16);
    let seq = d.start();
    let tokens = tokens(12, 20);
    d.step(&[all(seq, &tokens)]);
    let before = d.keys(0);
    let good = d.batch.clone();
    type Spoil = fn(&mut suanpan_model::forward::StepBatch);
    let cases: [(&str, Spoil); 12] = [
        ("tokens[3]", |b| b.tokens[3] = 96),
        ("tokens", |b| b.tokens.push(1)),
        ("tokens", |b| b.tokens.clear()),
        ("tokens", |b| b.tokens = vec![1; 129]),
        ("seqs[0].extend_len", |b| b.seqs[0].extend_len = 0),
        ("seqs[0]", |b| b.seqs[0].cached_len = 250),
        ("seqs[0]", |b| b.seqs[0].cached_len = usize::MAX),
        ("seqs", |b| b.seqs = vec![b.seqs[0]; 9]),
        ("page_table", |b| b.page_table.truncate(1)),
        ("page_table", |b| b.page_table_stride = usize::MAX),
        ("page_table[0]", |b| b.seqs[0].cached_len = 13),
        ("page_table[0][1]", |b| b.page_table[1] = 16),
    ];
    for (field, spoil) in cases {
        d.batch = good.clone();
        spoil(&mut d.batch);
        let e = d.exec.step(&d.batch, &mut d.kv).unwrap_err();
        assert_eq!(e.field(), Some(field), "{e}");
    }
    assert_eq!(before, d.keys(0));
}

#[test]
fn options_and_storage_that_do_not_fit_are_refused_by_name() {
    let model = model(config(), 13);
    let field =
        |opts: ExecOptions| Executor::new(model.clone(), opts).err().map(|e| e.field().unwrap().to_owned());
    let o = options();
    assert_eq!(field(o), None);
    assert_eq!(field(ExecOptions { threads: 0, ..o }).as_deref(), Some("threads"));
    assert_eq!(field(ExecOptions { max_tokens: 0, ..o }).as_deref(), Some("max_tokens"));
    assert_eq!(field(ExecOptions { max_seqs: 0, ..o }).as_deref(), Some("max_seqs"));
    assert_eq!(field(ExecOptions { page_size: 0, ..o }).as_deref(), Some("page_size"));
    assert_eq!(field(ExecOptions { max_model_len: (1 << 20) + 1, ..o }).as_deref(), Some("max_model_len"));
    let mut d = Driver::new(model.clone(), o, 4);
    let other = Executor::new(model, ExecOptions { kv_dtype: DType::Bf16, ..o }).unwrap();
    d.kv = other.kv_storage(4, None).unwrap();
    d.batch.tokens = vec![1];
    d.batch.seqs = vec![StepSeq { cached_len: 0, extend_len: 1, logits: LogitRows::Last }];
    (d.batch.page_table, d.batch.page_table_stride) = (vec![0], 1);
    assert_eq!(d.exec.step(&d.batch, &mut d.kv).unwrap_err().field(), Some("kv"));
}

/// Far positions: an angle computed in f32 is off by a fraction of a turn here.
#[test]
fn rotary_positions_stay_right_at_a_million_tokens_with_llama3_scaling() {
    let window = 6;
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192.0,
    };
    let config = ModelConfig {
        ropes: vec![RopeConfig { theta: 500_000.0, scaling, attention_factor: 1.0 }],
        layers: vec![LayerConfig { window: Some(window), rope: Some(0) }; 3],
        ..config()
    };
    let (model, tokens) = (model(config, 14), tokens(15, 24));
    for start in [131_000, 1_048_504] {
        let set = Setting { start, zero_keys: window - 1, ..Setting::default() };
        let bound = Bound::new(&model, &tokens, set);
        let opts = ExecOptions { max_model_len: 1 << 20, ..options() };
        let mut d = Driver::new(model.clone(), opts, 8);
        for chunk in [24, 5] {
            let seq = d.start_at(start);
            // Everything before `start` is the same zeroed page; the window hides all but its last tokens.
            d.set_pages(seq, vec![0; start / opts.page_size]);
            let got = d.in_chunks(seq, &tokens, chunk);
            bound.check(&format!("from position {start} in chunks of {chunk}"), 0, &got);
        }
    }
}
