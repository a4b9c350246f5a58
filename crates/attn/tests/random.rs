//! Random problems against the oracle. A failure prints its case as one line that reproduces it.

mod common;
use std::num::NonZeroUsize;

use common::*;
use proptest::prelude::*;
use suanpan_attn::{Isa, Machine, Scores};
use suanpan_base::{DType, HeadShape, Mask, ScaleGrain, SeqLen};

fn q_dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)]
}

fn kv() -> impl Strategy<Value = (DType, ScaleGrain)> {
    (0..DType::ALL.len(), 0..ScaleGrain::ALL.len()).prop_map(|(d, s)| (DType::ALL[d], ScaleGrain::ALL[s]))
}

/// The nearest problem that may be asked for.
fn allowed(c: Case) -> Case {
    let mut c = c;
    if !c.kv_dtype.is_code() || c.kv_scales == ScaleGrain::Page && c.page_size.is_none() {
        c.kv_scales = ScaleGrain::None;
    }
    if c.kv_dtype == DType::I4 {
        c.heads.head_dim_qk = c.heads.head_dim_qk.next_multiple_of(2);
        c.heads.head_dim_v = c.heads.head_dim_v.next_multiple_of(2);
    }
    c
}

fn side() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![Just(None), (0usize..4).prop_map(Some), (0usize..400).prop_map(Some)]
}

fn scores() -> impl Strategy<Value = Scores> {
    let softcap = prop_oneof![Just(None), (0.5f32..60.0).prop_map(Some)];
    (softcap, any::<bool>(), any::<bool>()).prop_map(|(softcap, alibi, sink)| Scores { softcap, alibi, sink })
}

fn mask() -> impl Strategy<Value = Mask> {
    let chunk = prop_oneof![Just(None), (1usize..300).prop_map(NonZeroUsize::new)];
    (side(), side(), chunk, any::<bool>()).prop_map(|(left, right, chunk, top_left)| Mask {
        left,
        right,
        chunk,
        top_left,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let heads = (1usize..4, 1usize..6, prop_oneof![1usize..100, Just(64), Just(128)], 1usize..140);
    let seqs = prop::collection::vec((0usize..50, 0usize..600), 0..4);
    let pages = prop_oneof![Just(None), (1usize..70).prop_map(Some)];
    (heads, (mask(), scores()), (q_dtype(), kv()), pages, seqs, 1u64..1000).prop_map(
        |((kv, group, dqk, dv), (mask, scores), (q_dtype, (kv_dtype, kv_scales)), page_size, seqs, seed)| {
            allowed(Case {
                heads: HeadShape {
                    num_q_heads: kv * group,
                    num_kv_heads: kv,
                    head_dim_qk: dqk,
                    head_dim_v: dv,
                },
                mask,
                scores,
                scale: None,
                q_dtype,
                kv_dtype,
                kv_scales,
                page_size,
                seqs: seqs.into_iter().map(|(q, k)| SeqLen::new(q, k)).collect(),
                seed,
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_problems_agree_with_the_oracle(c in case(), isa in 0usize..4, threads in 1usize..4) {
        let data = Data::random(&c);
        let machine = Machine::forced(Isa::ALL[isa], threads).unwrap_or(Machine::detect(threads));
        judge(&c, &data, &run_case(&c, &data, &machine, f32::NAN));
    }
}
