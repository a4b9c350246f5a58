//! The backward kernel against the oracle, and what must not change a bit of it.

mod common;
use common::backward::*;
use common::random::{case, config};
use common::*;
use proptest::prelude::*;
use std::num::NonZeroUsize;
use suanpan_attn::{
    BackwardArgs, BackwardPlan, BackwardWorkspace, Extras, Isa, KvLayout, Limits, Machine, Problem, Scores,
    Strides, run_backward,
};
use suanpan_base::{Buf, BufMut, DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::BackwardBooks;

/// Around tiles of 96 rows and 384, 192 or 96 keys; either side empty or the longer one.
const LENGTHS: &[(usize, usize)] = &[
    (1, 1),
    (64, 128),
    (239, 1),
    (113, 203),
    (108, 256),
    (384, 256),
    (97, 385),
    (400, 390),
    (3, 513),
    (307, 256),
    (5, 800),
    (1, 1025),
    (96, 96),
    (2, 1),
    (0, 5),
    (4, 0),
    (0, 0),
];
const MASKS: [Mask; 6] = [
    Mask::FULL,
    Mask::CAUSAL,
    Mask::window(57),
    Mask { left: Some(130), right: Some(5), ..Mask::FULL },
    Mask { top_left: true, left: Some(40), ..Mask::CAUSAL },
    Mask::chunked(NonZeroUsize::new(100).unwrap()),
];
const TYPES: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::F32, DType::Bf16),
    (DType::Bf16, DType::Bf16),
    (DType::Bf16, DType::F32),
    (DType::F16, DType::F16),
];
const PAGES: [Option<usize>; 4] = [None, Some(16), Some(1), Some(70)];
const WIDTHS: [usize; 8] = [64, 128, 40, 80, 1, 96, 192, 256];
const GROUPS: [(usize, usize); 4] = [(2, 2), (6, 2), (5, 1), (3, 1)];

#[test]
fn lengths_heads_and_masks_agree_with_the_oracle() {
    let mut n = 0;
    for &(q, k) in LENGTHS {
        for (heads, kv_heads) in GROUPS {
            for mask in MASKS {
                let (q_dtype, kv_dtype) = TYPES[n % 5];
                let d = if q * k > 60_000 { [64, 40][n % 2] } else { WIDTHS[n % 7] };
                let mut c =
                    Case::new(HeadShape::new(heads, kv_heads, d), mask, &[(q, k)]).dtypes(q_dtype, kv_dtype);
                c.seed = n as u64 + 1;
                c.page_size = PAGES[n % 4];
                let x = Inputs::random(&c, n % 3 == 0);
                judge_gradients(&c, &x, &run_backward_case(&c, &x, &machine(2), POISONS[n % 3]));
                n += 1;
            }
        }
    }
}

#[test]
fn every_width_and_type_agrees_on_every_instruction_set() {
    for machine in machines() {
        for d in WIDTHS {
            for (i, (q_dtype, kv_dtype)) in TYPES.into_iter().enumerate() {
                let lengths = [(37, 150), (1, 131), (130, 100), (9, 9)];
                let mut c = Case::new(HeadShape::new(4, 2, d), MASKS[(i + d) % 6], &lengths)
                    .dtypes(q_dtype, kv_dtype);
                c.page_size = PAGES[(i + d) % 4];
                let x = Inputs::random(&c, i % 2 == 0);
                judge_gradients(&c, &x, &run_backward_case(&c, &x, &machine, f32::NAN));
            }
        }
    }
}

#[test]
fn keys_and_values_of_different_widths_up_to_the_widest() {
    for (dqk, dv) in [(192, 128), (576, 512), (576, 576), (3, 557), (64, 1), (1, 64), (33, 17)] {
        let heads = HeadShape::with_widths(4, 1, dqk, dv);
        let c = Case::new(heads, Mask::CAUSAL, &[(40, 200)]).dtypes(DType::F32, DType::Bf16);
        let x = Inputs::random(&c, true);
        judge_gradients(&c, &x, &run_backward_case(&c, &x, &machine(1), f32::NAN));
    }
}

#[test]
fn many_query_heads_share_one_key_head() {
    // More rows a token than a query tile holds.
    let c = Case::new(HeadShape::new(130, 1, 24), Mask::CAUSAL, &[(7, 50), (3, 2)]);
    let x = Inputs::random(&c, true);
    judge_gradients(&c, &x, &run_backward_case(&c, &x, &machine(2), f32::NAN));
}

#[test]
fn scales_of_any_sign_and_peaked_scores() {
    for scale in [0.0, 1e-30, -0.3, 2.0, 8.0] {
        let c = Case::new(HeadShape::new(2, 1, 32), Mask::CAUSAL, &[(100, 130)]).scale(scale);
        let x = Inputs::random(&c, true);
        judge_gradients(&c, &x, &run_backward_case(&c, &x, &machine(2), f32::NAN));
    }
}

#[test]
fn huge_scores_give_finite_gradients() {
    // Scores of 1.4e11: one step of lse is 8192, and only the bound p <= 1 keeps the weights finite.
    let c = Case::new(HeadShape::new(1, 1, 8), Mask::CAUSAL, &[(9, 9)]);
    let mut x = Inputs::random(&c, false);
    x.data.q.iter_mut().for_each(|q| *q = 133_120.0);
    x.data.k.iter_mut().for_each(|k| *k = 133_120.0);
    for m in machines() {
        let g = run_backward_case(&c, &x, &m, f32::NAN);
        assert!(g.dv.iter().chain(&g.dq).chain(&g.dk).all(|x| x.is_finite()), "{m}");
    }
}

#[test]
fn rows_without_keys_give_zeros_and_leave_nothing_unwritten() {
    let c = Case::new(HeadShape::new(4, 2, 16), Mask::CAUSAL, &[(300, 100), (3, 0), (0, 7), (2, 400)]);
    let x = Inputs::random(&c, true);
    let g = run_backward_case(&c, &x, &machine(2), f32::NAN);
    judge_gradients(&c, &x, &g);
    assert!(g.dq[..200 * 64].iter().all(|&x| x == 0.0) && g.dq[200 * 64..201 * 64].iter().any(|&x| x != 0.0));
    assert!(g.dk[100 * 32..107 * 32].iter().chain(&g.dv[100 * 32..107 * 32]).all(|&x| x == 0.0));
}

#[test]
fn a_masked_nan_leaks_into_gradients_that_may_not_see_it() {
    for (rows, keys, bad) in [(40, 40, 29), (200, 200, 131)] {
        let c = Case::new(HeadShape::new(2, 1, 33), Mask::CAUSAL, &[(rows, keys)]);
        for (what, clean) in [("k", false), ("v", false), ("q", true), ("d_out", true)] {
            let mut x = Inputs::random(&c, true);
            match what {
                "k" => x.data.k[bad * 33] = f32::NAN,
                "v" => x.data.v[bad * 33] = f32::INFINITY,
                "q" => x.data.q[bad * 66] = f32::NAN,
                _ => x.d_out[bad * 66] = f32::NAN,
            }
            for m in machines() {
                let g = run_backward_case(&c, &x, &m, f32::NAN);
                for row in 0..rows {
                    // A bad key or value reaches the rows from it on, a bad row only itself (one of two heads).
                    let reached = if clean { row == bad } else { row >= bad };
                    let dq = &g.dq[row * 66..][..33];
                    assert_eq!(dq.iter().any(|x| x.is_nan()), reached, "{m} {what} dq of row {row}");
                }
                for key in 0..keys {
                    // Of keys, a bad row reaches those up to it. Rows that saw a bad key or value reach all their keys.
                    let dk = &g.dk[key * 33..][..33];
                    let reached = !clean || key <= bad;
                    assert_eq!(dk.iter().any(|x| x.is_nan()), reached, "{m} {what} dk of key {key}");
                }
            }
        }
    }
}

const PLAIN: Scores = Scores { softcap: None, bias: false, alibi: false, sink: false, dropout: None };

#[test]
fn changed_scores_agree_on_every_instruction_set() {
    let all = [
        Scores { softcap: Some(2.0), ..PLAIN },
        Scores { alibi: true, ..PLAIN },
        Scores { sink: true, ..PLAIN },
        Scores { bias: true, ..PLAIN },
        Scores { dropout: Some(0.25), ..PLAIN },
        Scores { softcap: Some(4.0), bias: true, alibi: true, sink: true, dropout: Some(0.1) },
    ];
    for (m, machine) in machines().into_iter().enumerate() {
        for (i, scores) in all.into_iter().enumerate() {
            // Every instruction set meets every score feature and every mask; half of their pairs.
            for (j, mask) in MASKS.into_iter().enumerate().filter(|(j, _)| (i + j + m).is_multiple_of(2)) {
                let lengths = [(37, 150), (1, 131), (9, 2), (130, 400), (0, 3), (5, 0)];
                let (q_dtype, kv_dtype) = TYPES[(i + j) % 5];
                let heads = HeadShape::new(6, 2, [64, 40, 128][j % 3]);
                let mut c =
                    Case::new(heads, mask, &lengths).dtypes(q_dtype, kv_dtype).scores(scores).scale(0.5);
                c.broadcast = [i % 2 == 0, j % 2 == 0, false, j == 5];
                let x = Inputs::random(&c, j % 2 == 0);
                judge_gradients(&c, &x, &run_backward_case(&c, &x, &machine, f32::NAN));
            }
        }
    }
}

#[test]
fn two_pieces_trees_and_block_masks_agree_on_every_instruction_set() {
    let two = [
        Mask::streaming(4, 57),
        Mask { sink_tokens: 500, left: Some(20), ..Mask::CAUSAL },
        Mask { sink_tokens: 3, ..Mask::chunked(NonZeroUsize::new(100).unwrap()) },
        Mask::CAUSAL,
    ];
    for (m, machine) in machines().into_iter().enumerate() {
        for (i, mask) in two.into_iter().enumerate() {
            for (j, shape) in
                [None, Some((1, 1)), Some((64, 64)), Some((5, 200)), Some((128, 384))].into_iter().enumerate()
            {
                for tree in [false, true]
                    .into_iter()
                    .filter(|&tree| (i + j + m + usize::from(tree)).is_multiple_of(3))
                {
                    let lengths = [(37, 150), (1, 131), (3, 3), (130, 1000), (97, 400)];
                    let (q_dtype, kv_dtype) = TYPES[(i + j) % 5];
                    let mut c = Case::new(HeadShape::new(6, 2, [40, 192][j % 2]), mask, &lengths)
                        .dtypes(q_dtype, kv_dtype);
                    c.seqs[0].prefix_len = 70;
                    c.seqs[3].prefix_len = 130 * j;
                    if let Some((rows, keys)) = shape {
                        c = c.blocks(rows, keys);
                    }
                    (c.tree, c.seed) = (tree, 2 + (i * 5 + j) as u64);
                    if j == 1 {
                        c = c.scores(Scores { softcap: Some(3.0), bias: true, sink: true, ..PLAIN });
                    }
                    let x = Inputs::random(&c, j % 2 == 0);
                    judge_gradients(&c, &x, &run_backward_case(&c, &x, &machine, f32::NAN));
                }
            }
        }
    }
}

const BATCH: [(usize, usize); 7] = [(1, 700), (200, 200), (3, 900), (0, 9), (64, 300), (5, 2), (1, 1)];

/// Rows of sequence `i` of a batch result, as bits.
fn bits_of(c: &Case, g: &Gradients, i: usize) -> [Vec<u32>; 3] {
    let h = c.heads;
    let (q0, k0) = c.seqs[..i].iter().fold((0, 0), |(q, k), s: &SeqLen| (q + s.seqlen_q, k + s.seqlen_k));
    let s = c.seqs[i];
    let part = |x: &[f32], start: usize, count: usize, row: usize| -> Vec<u32> {
        x[start * row..(start + count) * row].iter().map(|x| x.to_bits()).collect()
    };
    [
        part(&g.dq, q0, s.seqlen_q, h.num_q_heads * h.head_dim_qk),
        part(&g.dk, k0, s.seqlen_k, h.num_kv_heads * h.head_dim_qk),
        part(&g.dv, k0, s.seqlen_k, h.num_kv_heads * h.head_dim_v),
    ]
}

/// The data of `c` with only some of its sequences, in another order.
fn reorder(c: &Case, x: &Inputs, order: &[usize]) -> (Case, Inputs) {
    let h = c.heads;
    let take = |x: &[f32], width: usize, len: fn(&SeqLen) -> usize| -> Vec<f32> {
        let start = |i: usize| c.seqs[..i].iter().map(len).sum::<usize>() * width;
        order.iter().flat_map(|&i| x[start(i)..start(i + 1)].to_vec()).collect()
    };
    let data = Data {
        q: take(&x.data.q, h.num_q_heads * h.head_dim_qk, |s| s.seqlen_q),
        k: take(&x.data.k, h.num_kv_heads * h.head_dim_qk, |s| s.seqlen_k),
        v: take(&x.data.v, h.num_kv_heads * h.head_dim_v, |s| s.seqlen_k),
    };
    let d_out = take(&x.d_out, h.num_q_heads * h.head_dim_v, |s| s.seqlen_q);
    (
        Case { seqs: order.iter().map(|&i| c.seqs[i]).collect(), ..c.clone() },
        Inputs { data, d_out, d_lse: None },
    )
}

#[test]
fn permuting_a_batch_changes_no_bit_of_a_sequence() {
    for mask in [Mask::CAUSAL, Mask::window(100)] {
        for dtype in DType::UNSCALED {
            let c = Case::new(HeadShape::new(6, 2, 64), mask, &BATCH).dtypes(dtype, dtype);
            let x = Inputs::random(&c, false);
            let first = run_backward_case(&c, &x, &machine(2), f32::NAN);
            let order = [6, 2, 0, 5, 1, 4, 3];
            let (moved, moved_x) = reorder(&c, &x, &order);
            let second = run_backward_case(&moved, &moved_x, &machine(2), f32::INFINITY);
            for (at, &i) in order.iter().enumerate() {
                assert_eq!(bits_of(&c, &first, i), bits_of(&moved, &second, at), "sequence {i}");
                let (alone, alone_x) = reorder(&c, &x, &[i]);
                let solo = run_backward_case(&alone, &alone_x, &machine(1), f32::NAN);
                assert_eq!(bits_of(&c, &first, i), bits_of(&alone, &solo, 0), "sequence {i} alone");
            }
        }
    }
}

#[test]
fn threads_and_repetition_change_no_bit() {
    // One head: tasks of neighbouring key tiles run at once and take turns at dq.
    for (heads, mask) in [(HeadShape::new(1, 1, 32), Mask::CAUSAL), (HeadShape::new(4, 2, 80), Mask::FULL)] {
        for dtype in DType::UNSCALED {
            let c = Case::new(heads, mask, &[(700, 2000), (50, 900)]).dtypes(dtype, dtype);
            let x = Inputs::random(&c, true);
            let first = run_backward_case(&c, &x, &machine(1), f32::NAN);
            for threads in [1, 2, 3, 7] {
                for _ in 0..3 {
                    let g = pool(threads).install(|| run_backward_case(&c, &x, &machine(threads), f32::NAN));
                    assert!(g.bits() == first.bits(), "{threads} threads: {c:?}");
                }
            }
            // More workers than threads of the pool.
            let g = pool(1).install(|| run_backward_case(&c, &x, &machine(5), f32::NAN));
            assert!(g.bits() == first.bits(), "five workers on one thread");
        }
    }
}

/// Lengths of buffers and strides of one small call, to be spoiled one at a time.
struct Small {
    lens: [usize; 8],
    tokens: [usize; 8],
    lse: usize,
    d_lse: usize,
    books: usize,
    out_dtype: DType,
}

/// Runs a call of 2 queries and 5 keys, 2 heads over 1, width 8. A refused call must leave no trace.
fn small(edit: impl Fn(&mut Small)) -> Result<(), String> {
    let c = Case::new(HeadShape::new(2, 1, 8), Mask::CAUSAL, &[(2, 5)]);
    let plan = backward_plan(&c, &machine(1));
    let mut s = Small {
        lens: [32, 40, 40, 32, 32, 32, 40, 40],
        tokens: [16, 8, 8, 16, 16, 16, 8, 8],
        lse: 4,
        d_lse: 4,
        books: 1,
        out_dtype: DType::F32,
    };
    edit(&mut s);
    let inputs: Vec<Vec<f32>> = s.lens[..5].iter().map(|&n| vec![0.0; n]).collect();
    let out = Flat::of(&inputs[3], s.out_dtype);
    let mut outputs: Vec<Vec<f32>> = s.lens[5..].iter().map(|&n| vec![-3.0; n]).collect();
    let [dq, dk, dv] = &mut outputs[..] else { unreachable!() };
    let (lse, d_lse) = (vec![0.0; s.lse], vec![0.0; s.d_lse]);
    let mut books = vec![BackwardBooks::default(); s.books];
    let args = BackwardArgs {
        extras: Extras::default(),
        d_sinks: None,
        d_bias: None,
        q: Buf::F32(&inputs[0]),
        q_strides: (s.tokens[0], 8),
        k: Buf::F32(&inputs[1]),
        k_strides: (s.tokens[1], 8).into(),
        v: Buf::F32(&inputs[2]),
        v_strides: (s.tokens[2], 8).into(),
        page_table: &[],
        page_table_stride: 0,
        out: out.buf(),
        out_strides: (s.tokens[3], 8),
        lse: &lse,
        d_out: Buf::F32(&inputs[4]),
        d_out_strides: (s.tokens[4], 8),
        d_lse: Some(&d_lse),
        dq: BufMut::F32(dq),
        dq_strides: (s.tokens[5], 8),
        dk: BufMut::F32(dk),
        dk_strides: (s.tokens[6], 8).into(),
        dv: BufMut::F32(dv),
        dv_strides: (s.tokens[7], 8).into(),
    };
    let result = run_backward(&plan, args, &mut BackwardWorkspace::for_plans(&[&plan]), &mut books);
    if result.is_err() {
        assert!(outputs.iter().flatten().all(|&x| x == -3.0), "a refused call left traces");
        assert!(books.iter().all(|b| *b == BackwardBooks::default()), "a refused call left traces");
    }
    result.map_err(|e| e.field)
}

#[test]
fn bad_arguments_are_refused_by_name() {
    assert_eq!(small(|_| ()), Ok(()));
    for (at, field) in ["q", "k", "v", "out", "d_out", "dq", "dk", "dv"].into_iter().enumerate() {
        assert_eq!(small(|s| s.lens[at] -= 1), Err(format!("{field} length")));
        for stride in [usize::MAX, usize::MAX / 2] {
            let refused = small(|s| s.tokens[at] = stride).unwrap_err();
            assert!(refused.starts_with(field), "{refused} for {field}");
        }
        if at >= 5 {
            // Rows that overlap would be written by two threads.
            assert_eq!(
                small(|s| s.tokens[at] = if at == 5 { 15 } else { 7 }),
                Err(format!("{field} strides"))
            );
        }
    }
    assert_eq!(small(|s| s.lse = 3), Err("lse length".into()));
    assert_eq!(small(|s| s.d_lse = 5), Err("d_lse length".into()));
    assert_eq!(small(|s| s.books = 2), Err("books".into()));
    assert_eq!(small(|s| s.out_dtype = DType::Bf16), Err("out dtype".into()));
}

#[test]
fn plans_that_cannot_be_kept_are_refused_by_name() {
    let c = Case::new(HeadShape::new(1, 1, 8), Mask::CAUSAL, &[(4, 50)]);
    let limits = Limits { max_seqs: 2, max_total_q: 10, max_seqlen_k: 100 };
    let refused = |c: &Case, limits| BackwardPlan::new(&c.problem(), &machine(1), limits).unwrap_err().field;
    assert_eq!(refused(&Case { heads: HeadShape::latent(1, 8, 8), ..c.clone() }, limits), "values_in_keys");
    assert_eq!(refused(&c.clone().dtypes(DType::F32, DType::I8), limits), "kv_dtype");
    let sure = Scores { dropout: Some(1.5), ..Scores::default() };
    assert_eq!(refused(&c.clone().scores(sure), limits), "dropout");
    assert_eq!(refused(&c, Limits { max_total_q: usize::MAX / 2, ..limits }), "max_total_q");
    assert_eq!(refused(&Case { heads: HeadShape::new(1, 1, 577), ..c.clone() }, limits), "head_dim_qk");
    let mut plan = BackwardPlan::new(&c.problem(), &machine(1), limits).unwrap();
    plan.schedule(&[SeqLen::new(4, 50)]).unwrap();
    let before = plan.to_string();
    let mut refused = |seqs: &[SeqLen]| plan.schedule(seqs).unwrap_err().field;
    assert_eq!(refused(&[SeqLen::new(1, 1); 3]), "seqs");
    assert_eq!(refused(&[SeqLen::new(6, 6); 2]), "total seqlen_q");
    assert_eq!(refused(&[SeqLen::new(1, 101)]), "seqs[0].seqlen_k");
    assert_eq!(plan.to_string(), before);
    // A workspace that was made for less.
    let mut wide =
        BackwardPlan::new(&c.problem(), &machine(1), Limits { max_total_q: 100, ..limits }).unwrap();
    wide.schedule(&[SeqLen::new(0, 0)]).unwrap();
    let args = BackwardArgs {
        extras: Extras::default(),
        d_sinks: None,
        d_bias: None,
        q: Buf::F32(&[]),
        q_strides: (8, 8),
        k: Buf::F32(&[]),
        k_strides: (8, 8).into(),
        v: Buf::F32(&[]),
        v_strides: (8, 8).into(),
        page_table: &[],
        page_table_stride: 0,
        out: Buf::F32(&[]),
        out_strides: (8, 8),
        lse: &[],
        d_out: Buf::F32(&[]),
        d_out_strides: (8, 8),
        d_lse: None,
        dq: BufMut::F32(&mut []),
        dq_strides: (8, 8),
        dk: BufMut::F32(&mut []),
        dk_strides: (8, 8).into(),
        dv: BufMut::F32(&mut []),
        dv_strides: (8, 8).into(),
    };
    let mut books = [BackwardBooks::default()];
    let e = run_backward(&wide, args, &mut BackwardWorkspace::for_plans(&[&plan]), &mut books).unwrap_err();
    assert!(e.field.starts_with("workspace"), "{e}");
}

proptest! {
    #![proptest_config(config(60))]
    #[test]
    fn random_problems_agree_with_the_oracle(c in case((90, 500)), isa in 0usize..4, threads in 1usize..4, with_lse: bool) {
        // The backward knows types without scales.
        let trained = |d: DType| if d.is_code() { DType::F32 } else { d };
        let (q_dtype, kv_dtype) = (trained(c.q_dtype), trained(c.kv_dtype));
        let heads = suanpan_base::HeadShape { values_in_keys: false, ..c.heads };
        let c = Case { heads, q_dtype, kv_dtype, kv_scales: suanpan_base::ScaleGrain::None, ..c };
        let x = Inputs::random(&c, with_lse);
        let machine = Machine::forced(Isa::ALL[isa], threads).unwrap_or(Machine::detect(threads));
        judge_gradients(&c, &x, &run_backward_case(&c, &x, &machine, f32::NAN));
    }
}

/// Two sequences of 5 and 3 keys on pages of 4, one head of width 8: edits the table and strides, expects the field that is refused.
fn paged_call(edit: impl FnOnce(&mut Vec<u32>, &mut [Strides; 4])) -> Result<(), String> {
    let problem =
        Problem { kv: KvLayout::Paged { page_size: 4 }, ..Problem::new(HeadShape::new(1, 1, 8), Mask::FULL) };
    let limits = Limits { max_seqs: 2, max_total_q: 2, max_seqlen_k: 8 };
    let mut plan = BackwardPlan::new(&problem, &machine(1), limits).unwrap();
    plan.schedule(&[SeqLen::new(1, 5), SeqLen::new(1, 3)]).unwrap();
    let (mut table, mut strides) = (vec![2, 0, 1, u32::MAX], [Strides { token: 8, head: 8, page: 32 }; 4]);
    edit(&mut table, &mut strides);
    let (q, kv, lse) = ([0.5; 16], [0.25; 96], [1.0; 2]);
    let (mut dq, mut dk, mut dv) = ([-3.0; 16], [-3.0; 96], [-3.0; 96]);
    let [k_strides, v_strides, dk_strides, dv_strides] = strides;
    let args = BackwardArgs {
        extras: Extras::default(),
        d_sinks: None,
        d_bias: None,
        q: Buf::F32(&q),
        q_strides: (8, 8),
        k: Buf::F32(&kv),
        k_strides,
        v: Buf::F32(&kv),
        v_strides,
        page_table: &table,
        page_table_stride: 2,
        out: Buf::F32(&q),
        out_strides: (8, 8),
        lse: &lse,
        d_out: Buf::F32(&q),
        d_out_strides: (8, 8),
        d_lse: None,
        dq: BufMut::F32(&mut dq),
        dq_strides: (8, 8),
        dk: BufMut::F32(&mut dk),
        dk_strides,
        dv: BufMut::F32(&mut dv),
        dv_strides,
    };
    let mut books = [BackwardBooks::default(); 2];
    let result = run_backward(&plan, args, &mut BackwardWorkspace::for_plans(&[&plan]), &mut books);
    let untouched = [&dq[..], &dk, &dv].concat().iter().all(|&x| x == -3.0);
    assert_eq!(result.is_err(), untouched, "a refused call left traces, or a good one none");
    result.map_err(|e| e.field)
}

#[test]
fn a_page_that_two_sequences_would_write_is_refused_by_name() {
    assert_eq!(paged_call(|_, _| ()), Ok(()));
    assert_eq!(paged_call(|table, _| table[2] = 0), Err("page_table".into()));
    assert_eq!(paged_call(|table, _| table[1] = 2), Err("page_table".into()));
    assert_eq!(paged_call(|table, _| table[2] = 3), Err("page_table[1][0]".into()));
    assert_eq!(paged_call(|table, _| table.truncate(2)), Err("page_table length".into()));
    // What a sequence does not need is nobody's business.
    assert_eq!(paged_call(|table, _| table[3] = 0), Ok(()));
    for (side, field) in [(2, "dk strides"), (3, "dv strides")] {
        assert_eq!(paged_call(|_, s| s[side].page = 31), Err(field.into()));
        assert_eq!(paged_call(|_, s| s[side].token = 7), Err(field.into()));
    }
    // Keys that are only read may overlap.
    assert_eq!(paged_call(|_, s| s[0].token = 7), Ok(()));
    assert_eq!(paged_call(|_, s| s[1].head = usize::MAX), Ok(()), "one head has no next one");
    assert_eq!(paged_call(|_, s| s[1].token = usize::MAX / 2), Err("v strides".into()));
}
