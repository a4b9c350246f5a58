//! At 65,536 tokens, forward and backward need as much memory beside their inputs and outputs as the ledger's formulas say, within 5 %.

#[path = "common/counting.rs"]
mod counting;
use std::sync::atomic::Ordering;

use counting::{BYTES, PEAK};
use suanpan_attn::{
    Args, BackwardArgs, BackwardPlan, BackwardWorkspace, Extras, KvScales, Limits, Machine, Plan, Problem,
    Strides, Workspace, run, run_backward,
};
use suanpan_base::{Buf, BufMut, DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::extra::{Tiling, backward_extra_bytes, forward_extra_bytes};
use suanpan_ledger::{AttnBooks, BackwardBooks};

const TOKENS: usize = 65_536;
const THREADS: usize = 2;
/// A window, so that the test does not take minutes; nothing that is allocated depends on it.
const MASK: Mask = Mask::window(64);

/// The most bytes that `work` held beyond what was held before.
fn peak_of(work: impl FnOnce()) -> usize {
    let before = BYTES.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    PEAK.load(Ordering::Relaxed) - before
}

fn within_five_percent(measured: usize, formula: u64, what: &str) {
    let ratio = measured as f64 / formula as f64;
    assert!((0.95..=1.05).contains(&ratio), "{what}: {measured} bytes held, formula {formula} ({ratio:.3})");
}

fn tiling(tile_rows: usize, tile_keys: usize, depth: u64) -> Tiling {
    let [threads, tile_rows, tile_keys, n] = [THREADS, tile_rows, tile_keys, TOKENS].map(|x| x as u64);
    // A forward plan splits keys for up to 64 query tokens × splits (its printed rule).
    Tiling { threads, tile_rows, tile_keys, depth, partial_tokens: 64, seqlen_q: n, seqlen_k: n }
}

const LIMITS: Limits = Limits { max_seqs: 1, max_total_q: TOKENS, max_seqlen_k: TOKENS };

fn forward(heads: HeadShape) {
    let q = vec![half::bf16::ONE; TOKENS * heads.num_q_heads * heads.head_dim_qk];
    let kv = vec![half::bf16::ONE; TOKENS * heads.num_kv_heads * heads.head_dim_qk];
    let mut out = vec![half::bf16::ONE; TOKENS * heads.num_q_heads * heads.head_dim_v];
    let (mut rows, mut depth) = (0, 1);
    let measured = peak_of(|| {
        let problem = Problem { q_dtype: DType::Bf16, kv_dtype: DType::Bf16, ..Problem::new(heads, MASK) };
        let mut plan = Plan::new(&problem, &Machine::detect(THREADS), LIMITS).unwrap();
        let len = SeqLen::new(TOKENS, TOKENS);
        plan.schedule(&[len]).unwrap();
        rows = plan.tile_q_for(len) * heads.group_size();
        depth = if plan.multiplies_pairs() { 2 } else { 1 };
        let mut ws = Workspace::for_plans(&[&plan]);
        let strides =
            Strides { token: heads.num_kv_heads * heads.head_dim_qk, head: heads.head_dim_qk, page: 0 };
        let args = Args {
            kv_scales: KvScales::default(),
            extras: Extras::default(),
            q: Buf::Bf16(&q),
            q_strides: (heads.num_q_heads * heads.head_dim_qk, heads.head_dim_qk),
            k: Buf::Bf16(&kv),
            k_strides: strides,
            v: Buf::Bf16(if heads.values_in_keys { &[] } else { &kv }),
            v_strides: strides,
            page_table: &[],
            page_table_stride: 0,
            out: BufMut::Bf16(&mut out),
            out_strides: (heads.num_q_heads * heads.head_dim_v, heads.head_dim_v),
            lse: None,
            max_scores: None,
        };
        run(&plan, args, &mut ws, &mut [AttnBooks::default()]).unwrap();
    });
    let formula = forward_extra_bytes(heads, tiling(rows, 128, depth));
    within_five_percent(measured, formula, &format!("forward {heads:?}"));
}

#[rustfmt::skip]
fn backward(heads: HeadShape, narrow: bool) {
    let (n, d) = (TOKENS * heads.num_q_heads, heads.head_dim_qk);
    let q_dtype = if narrow { DType::Bf16 } else { DType::F32 };
    let (wide, short) = (vec![1.0f32; if narrow { 0 } else { n * d }], vec![half::bf16::ONE; if narrow { n * d } else { 0 }]);
    let read = || if narrow { Buf::Bf16(&short) } else { Buf::F32(&wide) };
    let mut grads = [(); 3].map(|()| (wide.clone(), short.clone()));
    let lse = vec![1.0f32; n];
    let (mut tiles, mut depth) = ((0, 0), 1);
    let measured = peak_of(|| {
        let problem = Problem { q_dtype, kv_dtype: q_dtype, ..Problem::new(heads, MASK) };
        let mut plan = BackwardPlan::new(&problem, &Machine::detect(THREADS), LIMITS).unwrap();
        plan.schedule(&[SeqLen::new(TOKENS, TOKENS)]).unwrap();
        depth = if plan.multiplies_pairs() { 2 } else { 1 };
        tiles = (plan.tile_q() * heads.group_size(), plan.tile_k());
        let mut ws = BackwardWorkspace::for_plans(&[&plan]);
        let [dq, dk, dv] = grads.each_mut().map(|(w, s)| if narrow { BufMut::Bf16(s) } else { BufMut::F32(w) });
        let s = (heads.num_q_heads * d, d);
        let args = BackwardArgs {
            q: read(), q_strides: s, k: read(), k_strides: s.into(), v: read(), v_strides: s.into(),
page_table: &[],
page_table_stride: 0, out: read(), out_strides: s,
            lse: &lse, d_out: read(), d_out_strides: s, d_lse: None, extras: Extras::default(), d_sinks: None, d_bias: None,
            dq, dq_strides: s, dk, dk_strides: s.into(), dv, dv_strides: s.into(),
        };
        run_backward(&plan, args, &mut ws, &mut [BackwardBooks::default()]).unwrap();
    });
    let formula = backward_extra_bytes(heads, q_dtype, tiling(tiles.0, tiles.1, depth));
    within_five_percent(measured, formula, &format!("backward {heads:?} {q_dtype}"));
}

#[test]
fn extra_memory_at_65536_tokens_is_the_ledgers_within_five_percent() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().unwrap();
    // Threads allocate a little when they first work.
    pool.install(|| rayon::join(|| (), || ()));
    pool.install(|| {
        for heads in [HeadShape::new(2, 2, 64), HeadShape::new(4, 1, 128), HeadShape::new(1, 1, 256)] {
            forward(heads);
        }
        forward(HeadShape::latent(2, 576, 512));
        for (heads, narrow) in [
            (HeadShape::new(2, 2, 64), false),
            (HeadShape::new(2, 2, 128), true),
            (HeadShape::new(1, 1, 256), false),
        ] {
            backward(heads, narrow);
        }
    });
}
