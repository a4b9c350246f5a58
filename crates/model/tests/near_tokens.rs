//! Recent tokens and sinks in 16 bits beside codes: which rows a query reads, what that gains, and that chunks change nothing.

mod common;

use common::driver::{Driver, all, last, options};
use common::random::{Random, config, model};
use suanpan_base::DType;
use suanpan_cache::NearTokens;
use suanpan_model::ModelConfig;
use suanpan_model::forward::ExecOptions;

const TOKENS: usize = 70;
const PAGE: usize = 4;

fn opts(kv_dtype: DType, sinks: usize, recent: usize) -> ExecOptions {
    let kv_near = NearTokens { sinks, recent };
    ExecOptions { kv_dtype, kv_near, page_size: PAGE, batch_invariant: true, ..options() }
}

fn tokens() -> Vec<u32> {
    Random(5).tokens(TOKENS + 1, config().vocab_size)
}

/// Layers that all look back to the first token.
fn without_windows() -> ModelConfig {
    let mut config = config();
    config.layers.iter_mut().for_each(|layer| layer.window = None);
    config
}

/// Logits of all positions.
fn logits(config: ModelConfig, opts: ExecOptions) -> Vec<f32> {
    let mut d = Driver::new(model(config, 1), opts, 100);
    d.poison(f32::NAN);
    let seq = d.start();
    d.step(&[all(seq, &tokens())]).remove(0)
}

/// Root mean square of the difference.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (sum / a.len() as f64).sqrt()
}

#[test]
fn the_more_tokens_are_near_the_less_is_lost_and_with_all_of_them_no_more_than_with_bf16() {
    let exact = logits(without_windows(), opts(DType::F32, 0, 0));
    let bf16 = distance(&logits(without_windows(), opts(DType::Bf16, 0, 0)), &exact);
    for dtype in [DType::I4, DType::E4m3, DType::I8] {
        let lost = |sinks, recent| distance(&logits(without_windows(), opts(dtype, sinks, recent)), &exact);
        let [none, some, more, whole] = [lost(0, 0), lost(0, 12), lost(8, 32), lost(8, 100)];
        assert!(none > some && some > more && more > whole, "{dtype}: {none:e} {some:e} {more:e} {whole:e}");
        assert!(whole < 1.5 * bf16, "{dtype}: {whole:e}, bf16 {bf16:e}");
    }
}

#[test]
fn chunks_change_no_bit_of_a_row_that_reads_near_tokens_apart() {
    for (dtype, sinks, recent) in [(DType::I4, 8, 12), (DType::E4m3, 0, 1), (DType::I8, 4, 30)] {
        let want = logits(config(), opts(dtype, sinks, recent));
        for chunk in [16, 3, 1] {
            let mut d = Driver::new(model(config(), 1), opts(dtype, sinks, recent), 100);
            d.poison(f32::NAN);
            let seq = d.start();
            let got = d.in_chunks(seq, &tokens(), chunk);
            let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && got.len() == want.len(), "{dtype}, {sinks} and {recent}, chunks of {chunk}");
        }
    }
}

/// Codes of near tokens and 16-bit rows of far ones may hold anything.
#[test]
fn a_query_reads_each_key_from_one_of_the_two_stores_only() {
    let (sinks, recent) = (8, 21);
    for dtype in [DType::I4, DType::I8, DType::E4m3] {
        let step = |poisoned: bool| {
            let mut d = Driver::new(model(without_windows(), 1), opts(dtype, sinks, recent), 100);
            let seq = d.start();
            d.step(&[last(seq, &tokens()[..TOKENS])]);
            if poisoned {
                // The next query stands at TOKENS.
                let near = |t: usize| t < sinks || t + recent > TOKENS;
                let layers: Vec<bool> = d.exec.kv_layers().iter().map(|l| l.near_of.is_some()).collect();
                for (layer, holds_near) in layers.into_iter().enumerate() {
                    let slot = |t: usize| u64::from(d.pages(seq)[t / PAGE]) * PAGE as u64 + (t % PAGE) as u64;
                    let unread = (0..TOKENS).filter(|&t| near(t) != holds_near);
                    let slots: Vec<u64> = unread.map(slot).collect();
                    let heads = d.exec.model().config.heads;
                    let rows = |width| vec![f32::NAN; slots.len() * heads.num_kv_heads * width];
                    let (k, v) = (rows(heads.head_dim_qk), rows(heads.head_dim_v));
                    d.kv.write(layer, &slots, &k, &v);
                }
            }
            d.step(&[last(seq, &tokens()[TOKENS..])]).remove(0)
        };
        let (want, got) = (step(false), step(true));
        assert!(got.iter().all(|x| x.is_finite()), "{dtype}: a row was read that is not the query's");
        assert_eq!(got, want, "{dtype}");
    }
}
