//! Masks in pieces, trees, blocks, bias, dropout, softcap and largest scores, each by hand or against what it must equal bit for bit.

mod common;
use common::backward::*;
use common::*;
use suanpan_attn::{
    Args, Bias, BiasStrides, BlockMask, DropoutKey, Extras, KvScales, Scores, Strides, TreeMask, Workspace,
    run,
};
use suanpan_base::{Buf, BufMut, HeadShape, Mask, SeqLen};
use suanpan_ledger::AttnBooks;

const PLAIN: Scores = Scores { softcap: None, bias: false, alibi: false, sink: false, dropout: None };

/// One head of width `d` (values `dv` wide), one sequence, with extras of the caller's making: out, lse and largest score, or the field
/// that was refused.
fn call(c: &Case, data: &Data, extras: Extras<'_>) -> Result<(Vec<f32>, Vec<f32>, f32), String> {
    let h = c.heads;
    let plan = c.plan(&machine(1));
    let (mut out, mut lse, mut max) =
        (vec![-7.0; c.total_q() * h.head_dim_v], vec![-7.0; c.total_q()], vec![-7.0]);
    let strides = |width: usize| Strides { token: width, head: width, page: 0 };
    let args = Args {
        extras,
        kv_scales: KvScales::default(),
        q: Buf::F32(&data.q),
        q_strides: (h.head_dim_qk, h.head_dim_qk),
        k: Buf::F32(&data.k),
        k_strides: strides(h.head_dim_qk),
        v: Buf::F32(&data.v),
        v_strides: strides(h.head_dim_v),
        page_table: &[],
        page_table_stride: 0,
        out: BufMut::F32(&mut out),
        out_strides: (h.head_dim_v, h.head_dim_v),
        lse: Some(&mut lse),
        max_scores: Some(&mut max),
    };
    let result = run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut [AttnBooks::default()]);
    assert!(result.is_ok() || out.iter().all(|&x| x == -7.0), "a refused call wrote");
    result.map_err(|e| e.field).map(|()| (out, lse, max[0]))
}

/// q = k = 0: uniform weights, so that out is the mean of the visible values; the value of key j is 2^j.
fn which_keys(c: &Case, extras: Extras<'_>) -> Vec<Vec<usize>> {
    let (q, k) = (c.total_q(), c.total_k());
    let values = (0..k).map(|j| 2f32.powi(j as i32)).collect();
    let data = Data { q: vec![0.0; q], k: vec![0.0; k], v: values };
    let (out, lse, _) = call(c, &data, extras).unwrap();
    let sums = out.iter().zip(&lse).map(|(o, l)| (o * l.exp()).round() as u64);
    sums.map(|sum| (0..k).filter(|j| sum >> j & 1 == 1).collect()).collect()
}

#[test]
fn sink_tokens_and_prefixes_by_hand() {
    let case = |mask, seqs| Case::new(HeadShape::new(1, 1, 1), mask, seqs);
    let streaming = case(Mask::streaming(2, 2), &[(3, 8)]);
    assert_eq!(
        which_keys(&streaming, Extras::default()),
        [vec![0, 1, 4, 5], vec![0, 1, 5, 6], vec![0, 1, 6, 7]]
    );
    let mut prefix = case(Mask::CAUSAL, &[(4, 4)]);
    prefix.seqs[0].prefix_len = 3;
    let all = [vec![0, 1, 2], vec![0, 1, 2], vec![0, 1, 2], vec![0, 1, 2, 3]];
    assert_eq!(which_keys(&prefix, Extras::default()), all);
}

#[test]
fn a_branch_of_a_draft_sees_its_neighbour() {
    // Tokens 3.. are a tree: 0 -> {1, 2}, 1 -> 3. Context: keys 0..3.
    let c = Case { tree: true, ..Case::new(HeadShape::new(1, 1, 1), Mask::CAUSAL, &[(4, 7)]) };
    let bits = [0b0001, 0b0011, 0b0101, 0b1011];
    let tree = Extras { tree: Some(TreeMask { bits: &bits, row_words: 1 }), ..Extras::default() };
    let want = [vec![0, 1, 2, 3], vec![0, 1, 2, 3, 4], vec![0, 1, 2, 3, 5], vec![0, 1, 2, 3, 4, 6]];
    assert_eq!(which_keys(&c, tree), want);
    // A chain is the causal mask, bit for bit, in both kernels and across a block of 128 keys.
    for rows in [5, 70] {
        let len = [(rows, 200)];
        let causal = Case::new(HeadShape::new(2, 1, 64), Mask::CAUSAL, &len);
        let chain = Case { tree: true, ..Case::new(HeadShape::new(2, 1, 64), Mask::FULL, &len) };
        let data = Data::random(&causal);
        let bits: Vec<u64> = (0..rows)
            .flat_map(|i| [u64::MAX >> (63 - i.min(63)), if i < 64 { 0 } else { u64::MAX >> (127 - i) }])
            .collect();
        let extras = Extras { tree: Some(TreeMask { bits: &bits, row_words: 2 }), ..Extras::default() };
        assert_eq!(
            run_with(&chain, &data, extras),
            run_with(&causal, &data, Extras::default()),
            "{rows} rows"
        );
    }
}

/// The bits of out of a two-headed case.
fn run_with(c: &Case, data: &Data, extras: Extras<'_>) -> Vec<u32> {
    let h = c.heads;
    let plan = c.plan(&machine(2));
    let mut out = vec![0.0; c.total_q() * h.num_q_heads * h.head_dim_v];
    let strides = Strides { token: h.num_kv_heads * h.head_dim_v, head: h.head_dim_v, page: 0 };
    let rows = (h.num_q_heads * h.head_dim_v, h.head_dim_v);
    let args = Args {
        extras,
        kv_scales: KvScales::default(),
        q: Buf::F32(&data.q),
        q_strides: rows,
        k: Buf::F32(&data.k),
        k_strides: strides,
        v: Buf::F32(&data.v),
        v_strides: strides,
        page_table: &[],
        page_table_stride: 0,
        out: BufMut::F32(&mut out),
        out_strides: rows,
        lse: None,
        max_scores: None,
    };
    run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut vec![AttnBooks::default(); c.seqs.len()])
        .unwrap();
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_block_mask_that_hides_nothing_changes_a_bit() {
    for (rows, keys) in [(3, 700), (200, 700)] {
        for mask in [Mask::CAUSAL, Mask::window(300)] {
            let plain = Case::new(HeadShape::new(2, 1, 64), mask, &[(rows, keys)]);
            let data = Data::random(&plain);
            let blocks = BlockMask { bits: &[u64::MAX; 64], row_words: 1, head_words: 0, seq_words: 0 };
            let extras = Extras { blocks: Some(blocks), ..Extras::default() };
            let masked = plain.clone().blocks(64, 64);
            assert_eq!(run_with(&masked, &data, extras), run_with(&plain, &data, Extras::default()));
        }
    }
}

#[test]
fn a_bias_of_zeros_changes_a_bit_and_one_of_minus_infinity_leaves_weight() {
    // One split: a merge would see the last bit of lse, which changed scores round elsewhere.
    for rows in [3, 40] {
        let plain = Case::new(HeadShape::new(2, 1, 64), Mask::CAUSAL, &[(rows, 250)]);
        let data = Data::random(&plain);
        let biased = plain.clone().scores(Scores { bias: true, ..PLAIN });
        let extras = |values| Extras {
            bias: Some(Bias { values, strides: BiasStrides { key: 1, ..BiasStrides::default() } }),
            ..Extras::default()
        };
        let all = run_with(&plain, &data, Extras::default());
        assert_eq!(run_with(&biased, &data, extras(&[0.0; 250])), all);
        let mut hidden = [0.0; 250];
        hidden[..200].fill(f32::NEG_INFINITY);
        let mut far = data.clone();
        far.k[..200 * 64].iter_mut().for_each(|k| *k = 1e3 - *k);
        assert_eq!(run_with(&biased, &far, extras(&hidden)), run_with(&biased, &data, extras(&hidden)));
        assert_ne!(run_with(&plain, &far, Extras::default()), all);
    }
}

/// [C14] Identity values show the mask of the forward; one-hot gradients show that of the backward.
#[test]
fn dropout_masks_differ_between_passes() {
    let n = 96;
    let heads = HeadShape::with_widths(1, 1, 8, n);
    for rows in [n, 7] {
        let case =
            |p| Case::new(heads, Mask::FULL, &[(rows, n)]).scores(Scores { dropout: Some(p), ..PLAIN });
        let one_hot = |rows: usize| -> Vec<f32> {
            (0..rows * n).map(|at| if at / n == at % n { 1.0 } else { 0.0 }).collect()
        };
        let data = Data { q: vec![0.0; rows * 8], k: vec![0.0; n * 8], v: one_hot(n) };
        let inputs = Inputs { data: data.clone(), d_out: one_hot(rows), d_lse: None };
        let mut c = case(0.5);
        c.seed = 1234;
        let mut first = None;
        for m in machines() {
            let g = run_backward_case(&c, &inputs, &m, f32::NAN);
            let kept: Vec<bool> = g.out.iter().map(|&o| o != 0.0).collect();
            let back: Vec<bool> = (0..rows * n).map(|at| g.dv[at % n * n + at / n] != 0.0).collect();
            assert_eq!(kept, back, "{m}");
            assert_eq!(*first.get_or_insert(kept.clone()), kept, "{m}");
            let share = kept.iter().filter(|&&k| k).count() as f64 / kept.len() as f64;
            assert!((share - 0.5).abs() < 2.5 / (kept.len() as f64).sqrt(), "{share}");
            // Another seed drops other weights.
            let other = run_case(&Case { seed: 1235, ..c.clone() }, &data, &m, f32::NAN);
            assert!(kept.iter().zip(&other.out).any(|(&k, &o)| k != (o != 0.0)), "{m}");
        }
        let plain = run_case(&Case::new(heads, Mask::FULL, &[(rows, n)]), &data, &machine(2), f32::NAN);
        let none = run_case(&case(0.0), &data, &machine(2), f32::NAN);
        assert_eq!((none.out, &none.lse), (plain.out, &plain.lse));
        let all = run_backward_case(&case(1.0), &inputs, &machine(2), f32::NAN);
        assert!([&all.out, &all.dq, &all.dk, &all.dv].into_iter().flatten().all(|&x| x == 0.0));
        assert_eq!(all.lse, plain.lse);
    }
}

/// [C08] (b) 2.939 would be a softcap without its derivative. (c) 0 is no cap at all.
#[test]
fn a_softcap_loses_its_derivative() {
    let c = Case::new(HeadShape::new(1, 1, 1), Mask::FULL, &[(1, 2)]).scale(1.0);
    let capped = c.clone().scores(Scores { softcap: Some(2.0), ..PLAIN });
    let x = Inputs {
        data: Data { q: vec![1.0], k: vec![0.0, 2.0], v: vec![0.0, 10.0] },
        d_out: vec![1.0],
        d_lse: None,
    };
    let close = |got: f32, want: f32| assert!((got - want).abs() < 1e-5, "{got} for {want}");
    for m in machines() {
        let g = run_backward_case(&capped, &x, &m, f32::NAN);
        close(g.dq[0], 1.23434);
        close(g.dk[0], -1.46954);
        close(g.dk[1], 0.61717);
        let off =
            run_backward_case(&c.clone().scores(Scores { softcap: Some(0.0), ..PLAIN }), &x, &m, f32::NAN);
        assert_eq!(off.bits(), run_backward_case(&c, &x, &m, f32::NAN).bits());
    }
}

#[test]
fn the_largest_score_is_that_of_a_hidden_key_or_a_sink() {
    for (rows, keys) in [(2, 5), (40, 300), (1, 4000)] {
        let c = Case::new(HeadShape::new(6, 2, 16), Mask::CAUSAL, &[(rows, keys), (0, 9), (3, 3)]);
        let c = c.scores(Scores { sink: true, ..PLAIN });
        let data = Data::random(&c);
        for m in machines() {
            let got = run_case(&c, &data, &m, f32::NAN).max_scores;
            for (head, got) in got.iter().enumerate() {
                let mut want = f64::NEG_INFINITY;
                let (mut q0, mut k0) = (0, 0);
                for len in &c.seqs {
                    for i in 0..len.seqlen_q {
                        for j in c.mask.visible(*len, i).keys() {
                            let q = &data.q[((q0 + i) * 6 + head) * 16..][..16];
                            let k = &data.k[((k0 + j) * 2 + head / 3) * 16..][..16];
                            let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                            want = want.max(dot / 4.0);
                        }
                    }
                    (q0, k0) = (q0 + len.seqlen_q, k0 + len.seqlen_k);
                }
                assert!(
                    (f64::from(*got) - want).abs() < 1e-6 * want.abs().max(1.0),
                    "{m} head {head}: {got} for {want}"
                );
            }
        }
    }
    let empty = Case::new(HeadShape::new(1, 1, 4), Mask::CAUSAL, &[(2, 0)]);
    assert_eq!(run_case(&empty, &Data::random(&empty), &machine(1), 0.0).max_scores, [f32::NEG_INFINITY]);
}

#[test]
fn extras_that_do_not_fit_the_problem_are_refused_by_name() {
    let plain = Case::new(HeadShape::new(1, 1, 8), Mask::CAUSAL, &[(3, 70)]);
    let refused = |c: &Case, extras: Extras<'_>| call(c, &Data::random(c), extras).err();
    let none = Extras::default();
    let tree = Case { tree: true, ..plain.clone() };
    let with_tree = |bits, row_words| Extras { tree: Some(TreeMask { bits, row_words }), ..none };
    assert_eq!(refused(&tree, with_tree(&[0; 3], 1)), None);
    assert_eq!(refused(&tree, none).as_deref(), Some("tree"));
    assert_eq!(refused(&plain, with_tree(&[0; 3], 1)).as_deref(), Some("tree"));
    assert_eq!(refused(&tree, with_tree(&[0; 2], 1)).as_deref(), Some("tree length"));
    assert_eq!(refused(&tree, with_tree(&[0; 3], 0)).as_deref(), Some("tree row_words"));
    let long = Case { seqs: vec![SeqLen::new(5, 4)], ..tree };
    assert_eq!(refused(&long, with_tree(&[0; 5], 1)).as_deref(), Some("seqs[0].seqlen_q"));

    let blocks = plain.clone().blocks(2, 1);
    let with_blocks = |bits, row_words| Extras {
        blocks: Some(BlockMask { bits, row_words, head_words: 0, seq_words: 0 }),
        ..none
    };
    assert_eq!(refused(&blocks, with_blocks(&[1; 4], 2)), None);
    assert_eq!(refused(&blocks, none).as_deref(), Some("blocks"));
    assert_eq!(refused(&plain, with_blocks(&[1; 4], 2)).as_deref(), Some("blocks"));
    assert_eq!(refused(&blocks, with_blocks(&[1; 4], 1)).as_deref(), Some("blocks row_words"));
    assert_eq!(refused(&blocks, with_blocks(&[1; 3], 2)).as_deref(), Some("blocks length"));
    assert_eq!(refused(&blocks, with_blocks(&[1; 4], usize::MAX)).as_deref(), Some("blocks length"));

    let biased = plain.clone().scores(Scores { bias: true, ..PLAIN });
    let with_bias = |values, row, key| Extras {
        bias: Some(Bias { values, strides: BiasStrides { row, key, ..BiasStrides::default() } }),
        ..none
    };
    assert_eq!(refused(&biased, with_bias(&[0.0; 210], 70, 1)), None);
    assert_eq!(refused(&biased, none).as_deref(), Some("bias"));
    assert_eq!(refused(&plain, with_bias(&[0.0; 210], 70, 1)).as_deref(), Some("bias"));
    assert_eq!(refused(&biased, with_bias(&[0.0; 209], 70, 1)).as_deref(), Some("bias length"));
    assert_eq!(refused(&biased, with_bias(&[0.0; 209], usize::MAX, 1)).as_deref(), Some("bias strides"));
    assert_eq!(refused(&biased, with_bias(&[0.0; 999], 140, 2)).as_deref(), Some("bias key stride"));

    let dropped = plain.clone().scores(Scores { dropout: Some(0.5), ..PLAIN });
    let with_key = |key| Extras { dropout: Some(key), ..none };
    assert_eq!(refused(&dropped, with_key(DropoutKey::default())), None);
    assert_eq!(refused(&dropped, none).as_deref(), Some("dropout"));
    let past = DropoutKey { first_key: u32::MAX - 69, ..DropoutKey::default() };
    assert_eq!(refused(&dropped, with_key(past)).as_deref(), Some("dropout first_key"));
}
