//! Many requests over one shared prefix against the oracle on whole sequences, and what the prefix costs.

mod common;
use common::*;
use suanpan_attn::{
    CascadeArgs, CascadePlan, CascadeWorkspace, KvArgs, KvLayout, KvScales, Limits, Problem, Scores, Strides,
    run_cascade,
};
use suanpan_base::{DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::AttnBooks;

const SCORES: Scores = Scores { softcap: None, bias: false, alibi: false, sink: false, dropout: None };

/// The case's data with the first `prefix` keys of every sequence replaced by those of the first one: prefix, suffixes, whole.
fn share(c: &Case, data: &Data, prefix: usize) -> (Data, Data, Data) {
    let h = c.heads;
    let (mut whole, mut suffix) = (data.clone(), Data { q: data.q.clone(), k: vec![], v: vec![] });
    let (mut head, mut k0) = (Data { q: vec![], k: vec![], v: vec![] }, 0);
    for (i, s) in c.seqs.iter().enumerate() {
        for (width, whole, suffix, head) in [
            (h.num_kv_heads * h.head_dim_qk, &mut whole.k, &mut suffix.k, &mut head.k),
            (h.num_kv_heads * h.head_dim_v, &mut whole.v, &mut suffix.v, &mut head.v),
        ] {
            if i == 0 {
                head.extend_from_slice(&whole[..prefix * width]);
            }
            let all = &mut whole[k0 * width..(k0 + s.seqlen_k) * width];
            all[..prefix * width].copy_from_slice(head);
            suffix.extend_from_slice(&all[prefix * width..]);
        }
        k0 += s.seqlen_k;
    }
    (head, suffix, whole)
}

/// Runs `c`, whose sequences all start with the same `prefix` keys, as a cascade; judges it and returns it.
fn check(c: &Case, prefix: usize) -> Outcome {
    let h = c.heads;
    let (head, suffix, whole) = share(c, &Data::random(c), prefix);
    let suffixes: Vec<SeqLen> = c.seqs.iter().map(|s| SeqLen::new(s.seqlen_q, s.seqlen_k - prefix)).collect();
    let limits = Limits {
        max_seqs: c.seqs.len(),
        max_total_q: c.total_q(),
        max_seqlen_k: suffixes.iter().map(|s| s.seqlen_k).max().unwrap_or(0),
    };
    let mut plan = CascadePlan::new(&c.problem(), &machine(2), limits, prefix).unwrap();
    plan.schedule(prefix, &suffixes).unwrap();
    let mut ws = CascadeWorkspace::for_plan(&plan);
    let q = Flat::of(&whole.q, c.q_dtype);
    let flats = [&head.k, &head.v, &suffix.k, &suffix.v].map(|x| Flat::of(x, c.kv_dtype));
    let strides = |d: usize| Strides { token: h.num_kv_heads * d, head: d, page: 0 };
    let kv = |i: usize| KvArgs {
        k: flats[i].buf(),
        k_strides: strides(h.head_dim_qk),
        v: flats[i + 1].buf(),
        v_strides: strides(h.head_dim_v),
        page_table: &[],
        page_table_stride: 0,
        kv_scales: KvScales::default(),
    };
    let mut out = Flat::filled(c.total_q() * h.num_q_heads * h.head_dim_v, f32::NAN, c.q_dtype);
    let mut lse = vec![f32::NAN; c.total_q() * h.num_q_heads];
    let sinks = c.sinks();
    let args = CascadeArgs {
        q: q.buf(),
        q_strides: (h.num_q_heads * h.head_dim_qk, h.head_dim_qk),
        prefix: kv(0),
        suffix: kv(2),
        sinks: c.scores.sink.then_some(&sinks[..]),
        out: out.buf_mut(),
        out_strides: (h.num_q_heads * h.head_dim_v, h.head_dim_v),
        lse: Some(&mut lse),
    };
    let (mut prefix_books, mut books) = (AttnBooks::default(), vec![AttnBooks::default(); c.seqs.len()]);
    run_cascade(&plan, args, &mut ws, &mut prefix_books, &mut books).unwrap();
    let (predicted, rest) = plan.predicted();
    assert_eq!((prefix_books, &books[..]), (predicted, &rest.collect::<Vec<_>>()[..]), "{c:?}");
    let outcome = Outcome { out: out.to_f32(), lse, max_scores: vec![], books };
    judge(c, &whole, &outcome);
    outcome
}

#[test]
fn a_shared_prefix_changes_what_a_request_sees() {
    for mask in [Mask::CAUSAL, Mask::FULL] {
        for (q_dtype, kv_dtype) in
            [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::F16, DType::F32)]
        {
            for scores in [SCORES, Scores { softcap: Some(5.0), sink: true, ..SCORES }] {
                for prefix in [1, 200, 1500] {
                    let lens = [(1, 1), (1, 40), (3, 3), (20, 33), (0, 2), (1, 300)];
                    let lens = lens.map(|(q, k)| (q, k + prefix));
                    let c = Case::new(HeadShape::new(6, 2, 40), mask, &lens).dtypes(q_dtype, kv_dtype);
                    check(&c.scores(scores), prefix);
                }
            }
        }
    }
    // Nobody; and a prefix of nothing.
    check(&Case::new(HeadShape::new(2, 1, 8), Mask::CAUSAL, &[(2, 5), (1, 1)]), 0);
}

#[test]
fn the_prefix_is_read_once_a_request() {
    let heads = HeadShape::new(8, 2, 64);
    let prefix = 4000;
    let lens: Vec<(usize, usize)> = (0..32).map(|i| (1, prefix + 1 + i)).collect();
    let c = Case::new(heads, Mask::CAUSAL, &lens).dtypes(DType::F32, DType::Bf16);
    let limits = Limits { max_seqs: 32, max_total_q: 32, max_seqlen_k: 64 };
    let mut plan = CascadePlan::new(&c.problem(), &machine(2), limits, prefix).unwrap();
    plan.schedule(prefix, &(0..32).map(|i| SeqLen::new(1, 1 + i)).collect::<Vec<_>>()).unwrap();
    let apart: u64 = c.seqs.iter().map(|len| c.plan(&machine(2)).predicted(*len).kv_read_bytes).sum();
    let (once, rest) = plan.predicted();
    assert_eq!(once.kv_read_bytes, 4000 * 2 * 128 * 2);
    assert_eq!(rest.map(|b| b.kv_read_bytes).sum::<u64>() + 32 * once.kv_read_bytes, apart);
}

#[test]
fn what_hides_a_part_of_the_prefix_is_refused_by_name() {
    let problem = Problem::new(HeadShape::new(2, 1, 8), Mask::CAUSAL);
    let limits = Limits { max_seqs: 2, max_total_q: 4, max_seqlen_k: 9 };
    let refused = |p: Problem| CascadePlan::new(&p, &machine(1), limits, 9).err().map(|e| e.field);
    assert_eq!(refused(problem), None);
    let paged = Problem { kv: KvLayout::Paged { page_size: 4 }, ..problem };
    assert_eq!(refused(paged), None);
    assert_eq!(refused(Problem { mask: Mask::window(4), ..problem }).as_deref(), Some("mask"));
    assert_eq!(refused(Problem { mask: Mask::streaming(1, 4), ..problem }).as_deref(), Some("mask"));
    assert_eq!(refused(Problem { tree: true, ..problem }).as_deref(), Some("tree"));
    for (scores, field) in [
        (Scores { alibi: true, ..SCORES }, "alibi"),
        (Scores { bias: true, ..SCORES }, "bias"),
        (Scores { dropout: Some(0.5), ..SCORES }, "dropout"),
    ] {
        assert_eq!(refused(Problem { scores, ..problem }).as_deref(), Some(field));
    }
    let mut plan = CascadePlan::new(&problem, &machine(1), limits, 9).unwrap();
    plan.schedule(5, &[SeqLen::new(2, 3)]).unwrap();
    let before = (plan.parts().0.to_string(), plan.parts().1.to_string());
    assert_eq!(plan.schedule(10, &[SeqLen::new(1, 1)]).unwrap_err().field, "seqs[0].seqlen_k");
    assert_eq!(plan.schedule(5, &[SeqLen::new(1, 10)]).unwrap_err().field, "seqs[0].seqlen_k");
    assert_eq!(
        plan.schedule(9, &[SeqLen::new(1, 1).with_prefix(1)]).unwrap_err().field,
        "seqs[0].prefix_len"
    );
    assert_eq!((plan.parts().0.to_string(), plan.parts().1.to_string()), before);
}
