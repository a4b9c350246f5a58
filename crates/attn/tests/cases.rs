//! Public bug reports as black-box tests, each named by its symptom (case numbers in brackets).

mod common;
use common::*;
use half::bf16;
use suanpan_attn::{Args, Extras, KvScales, Limits, Plan, Scores, Strides, Workspace, run};
use suanpan_base::{Buf, BufMut, DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::AttnBooks;

const F32: (DType, DType) = (DType::F32, DType::F32);
const BF16: (DType, DType) = (DType::Bf16, DType::Bf16);

/// Every layout that a case is repeated on.
fn layouts(c: &Case) -> Vec<Case> {
    [None, Some(1), Some(16), Some(64)].map(|page_size| Case { page_size, ..c.clone() }).to_vec()
}

fn close(got: f32, want: f64, tolerance: f64, what: &str) {
    assert!((f64::from(got) - want).abs() <= tolerance, "{what}: {got} for {want}");
}

#[test]
fn scores_below_a_large_negative_constant_lose_their_weight() {
    // [C01] -90000 and -90600: any finite stand-in for -inf would win over real keys. Later keys are far better and masked for row 0.
    for rows in [2, 12] {
        // Two rows run the in-place kernel, twelve the packed one.
        let c = Case::new(HeadShape::new(1, 1, 2), Mask::CAUSAL, &[(rows, rows + 1)]).scale(1.0);
        let mut data = Data {
            q: [300.0, 0.0].repeat(rows),
            k: vec![-300.0, 0.0, -302.0, 0.0],
            v: vec![1.0, 1.0, 5.0, 5.0],
        };
        data.k.extend([300.0, 0.0].repeat(rows - 1));
        data.v.extend([1000.0].repeat(2 * (rows - 1)));
        for c in layouts(&c) {
            for m in machines() {
                let r = run_case(&c, &data, &m, f32::NAN);
                assert_eq!(r.out[..2], [1.0, 1.0], "{m}: {c:?}");
                close(r.lse[0], -90000.0, 0.01, "lse");
                r.out[2..].iter().for_each(|&x| close(x, 1000.0, 1e-3, "later rows"));
            }
        }
    }
}

#[test]
fn splits_of_scores_below_a_large_negative_constant_lose_their_weight() {
    // [C01, split] the one key that counts stands in the first, a middle or the last of three splits; the others' weight is exp(-600).
    for best in [0, 300, 699] {
        let c = Case::new(HeadShape::new(1, 1, 2), Mask::CAUSAL, &[(1, 700)]).scale(1.0);
        let mut data = Data { q: vec![300.0, 0.0], k: [-302.0, 0.0].repeat(700), v: [5.0, 5.0].repeat(700) };
        data.k[2 * best] = -300.0;
        data.v[2 * best..][..2].fill(1.0);
        for c in layouts(&c) {
            for m in machines() {
                assert_eq!(c.plan(&m).splits_for(c.seqs[0]), 3);
                let r = run_case(&c, &data, &m, f32::NAN);
                assert_eq!(r.out, [1.0, 1.0], "{m}: {c:?}");
                close(r.lse[0], -90000.0, 0.01, "lse");
            }
        }
    }
}

#[test]
fn one_huge_key_gives_nan_instead_of_its_value() {
    // [C01, second run]
    let c = Case::new(HeadShape::new(1, 1, 64), Mask::CAUSAL, &[(1, 1)]).dtypes(BF16.0, BF16.1);
    for c in layouts(&c) {
        let data = Data { q: vec![133_120.0; 64], k: vec![133_120.0; 64], v: vec![133_120.0; 64] };
        for m in machines() {
            let r = run_case(&c, &data, &m, f32::NAN);
            assert!(r.out.iter().all(|&x| x == 133_120.0), "{m}: {:?}", r.out);
            close(r.lse[0], 1.417_67e11, 1e7, "lse");
        }
    }
}

#[test]
fn causal_alignment_starts_at_the_wrong_corner_when_lengths_differ() {
    // [C02] zeros for q and k: uniform weights.
    let run_both = |lens: (usize, usize), v: &[f32]| {
        let c = Case::new(HeadShape::new(1, 1, 1), Mask::CAUSAL, &[lens]);
        let data = Data { q: vec![0.0; lens.0], k: vec![0.0; lens.1], v: v.to_vec() };
        let all: Vec<_> = layouts(&c)
            .iter()
            .flat_map(|c| {
                machines().into_iter().map(|m| run_case(c, &data, &m, f32::NAN)).collect::<Vec<_>>()
            })
            .collect();
        all.iter().for_each(|r| assert_eq!(r, &all[0]));
        all[0].clone()
    };
    let a = run_both((4, 2), &[10.0, 20.0]);
    assert_eq!(a.out, [0.0, 0.0, 10.0, 15.0]);
    assert_eq!(a.lse[..3], [f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0]);
    close(a.lse[3], 2f64.ln(), 1e-6, "lse");
    let b = run_both((2, 5), &[1.0, 2.0, 3.0, 4.0, 5.0]);
    close(b.out[0], 2.5, 1e-6, "first row");
    close(b.out[1], 3.0, 1e-6, "second row");
    close(b.lse[0], 4f64.ln(), 1e-6, "lse");
    close(b.lse[1], 5f64.ln(), 1e-6, "lse");
}

#[test]
fn garbage_in_unused_cache_slots_reaches_the_output() {
    // [C04] lengths 5 and 16, page size 16; decode and a chunk of 3; the poison stands in every slot past the valid length.
    for (q_dtype, kv_dtype) in [F32, BF16, (DType::F32, DType::Bf16)] {
        for rows in [1, 3] {
            for heads in [HeadShape::new(4, 2, 64), HeadShape::new(16, 1, 40)] {
                let c = Case::new(heads, Mask::CAUSAL, &[(rows, 5), (rows, 16)]).dtypes(q_dtype, kv_dtype);
                let data = Data::random(&c);
                for m in machines() {
                    let clean = run_case(&c, &data, &m, 0.0);
                    judge(&c, &data, &clean);
                    for poison in POISONS {
                        assert_eq!(run_case(&c.clone().paged(16), &data, &m, poison), clean, "{m} {poison}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_masked_nan_value_leaks_into_rows_that_may_not_see_it() {
    // A key in the future holds NaN and infinity in V: earlier rows stay clean, later ones do not.
    for heads in [HeadShape::new(1, 1, 64), HeadShape::new(4, 1, 33)] {
        for (rows, keys, bad) in [(40, 40, 29), (3, 40, 38), (200, 200, 131)] {
            let c = Case::new(heads, Mask::CAUSAL, &[(rows, keys)]);
            let mut data = Data::random(&c);
            data.v[bad * heads.head_dim_v] = f32::NAN;
            data.v[bad * heads.head_dim_v + 1] = f32::INFINITY;
            for m in machines() {
                let r = run_case(&c, &data, &m, f32::NAN);
                for row in 0..rows {
                    let sees = row + keys - rows >= bad;
                    let at = row * heads.num_q_heads * heads.head_dim_v;
                    assert_eq!(!r.out[at].is_finite(), sees, "{m} row {row} of {rows}");
                    assert_eq!(!r.out[at + 1].is_finite(), sees, "{m} row {row} of {rows}");
                    assert!(r.out[at + 2].is_finite(), "{m} row {row} of {rows}");
                }
            }
        }
    }
}

#[test]
fn a_nan_in_a_visible_key_is_hidden_behind_a_number() {
    for rows in [1, 20] {
        let c = Case::new(HeadShape::new(1, 1, 64), Mask::FULL, &[(rows, 50)]);
        let mut data = Data::random(&c);
        data.k[7 * 64 + 3] = f32::NAN;
        for m in machines() {
            let r = run_case(&c, &data, &m, f32::NAN);
            assert!(r.out.iter().chain(&r.lse).all(|x| x.is_nan()), "{m}");
        }
    }
}

#[test]
fn scale_or_keys_taken_from_a_padded_width() {
    // [C05 a]
    for (d, k0, want) in
        [(80, 0.1, 0.70980), (40, 0.125, 0.68795), (96, 0.125, 0.77290), (192, 0.125, 0.84967)]
    {
        for rows in [1, 9] {
            let mut c = Case::new(HeadShape::new(1, 1, d), Mask::FULL, &[(rows, 2)]);
            for page in [None, Some(16)] {
                c.page_size = page;
                let mut k = vec![k0; d];
                k.resize(2 * d, 0.0);
                let mut v = vec![1.0; d];
                v.resize(2 * d, 0.0);
                for m in machines() {
                    let r = run_case(
                        &c,
                        &Data { q: vec![1.0; rows * d], k: k.clone(), v: v.clone() },
                        &m,
                        f32::NAN,
                    );
                    r.out.iter().for_each(|&x| close(x, want, 1e-5, "padded scale"));
                }
            }
        }
    }
    // [C05 b] 77 keys of logit -5: padded keys of logit 0 would swamp them.
    for rows in [1, 11] {
        let c = Case::new(HeadShape::new(1, 1, 1), Mask::FULL, &[(rows, 77)]).scale(1.0);
        for c in layouts(&c) {
            let data = Data { q: vec![-5.0; rows], k: vec![1.0; 77], v: vec![1.0; 77] };
            for m in machines() {
                let r = run_case(&c, &data, &m, 0.0);
                r.out.iter().for_each(|&x| close(x, 1.0, 1e-6, "padded keys"));
                r.lse.iter().for_each(|&x| close(x, -0.656_20, 1e-5, "lse"));
            }
        }
    }
    let wide = Case::new(HeadShape::new(1, 1, 577), Mask::FULL, &[]);
    let e = Plan::new(&wide.problem(), &machine(1), wide.limits()).unwrap_err();
    assert!(e.field == "head_dim_qk" && e.supported.contains("576"), "{e}");
}

#[test]
fn the_sum_of_weights_stops_growing_with_length() {
    // [C07]
    for n in [256usize, 2048, 4096, 8192, 131_072] {
        for rows in [1, 10] {
            let c =
                Case::new(HeadShape::new(1, 1, 8), Mask::FULL, &[(rows, n)]).dtypes(BF16.0, BF16.1).paged(64);
            let mut data = Data { q: vec![0.0; rows * 8], k: vec![0.0; n * 8], v: vec![1.0; n * 8] };
            for half in [false, true] {
                if half {
                    data.v[n * 4..].fill(0.0);
                }
                let r = run_case(&c, &data, &machine(2), f32::NAN);
                r.out.iter().for_each(|&x| assert_eq!(x, if half { 0.5 } else { 1.0 }, "{n}"));
                r.lse.iter().for_each(|&x| close(x, (n as f64).ln(), 1e-6 * 12.0, "lse"));
            }
        }
    }
}

#[test]
fn the_second_sequence_or_head_is_wrong_under_strides_and_splits() {
    // [C10] key lengths 1000 and 37, 1 and 3 queries, 4 heads, dim 64; in a batch and alone.
    for rows in [1, 3] {
        let heads = HeadShape::new(4, 4, 64);
        let batch = Case::new(heads, Mask::CAUSAL, &[(rows, 1000), (rows, 37)]);
        let data = Data::random(&batch);
        for c in layouts(&batch) {
            for m in machines() {
                let r = run_case(&c, &data, &m, f32::NAN);
                judge(&c, &data, &r);
                for (i, (q0, k0)) in [(0, 0), (rows, 1000)].into_iter().enumerate() {
                    let len = c.seqs[i];
                    let alone = Case { seqs: vec![len], ..c.clone() };
                    let part = Data {
                        q: data.q[q0 * 256..(q0 + rows) * 256].to_vec(),
                        k: data.k[k0 * 256..(k0 + len.seqlen_k) * 256].to_vec(),
                        v: data.v[k0 * 256..(k0 + len.seqlen_k) * 256].to_vec(),
                    };
                    let solo = run_case(&alone, &part, &m, f32::NAN);
                    assert_eq!(solo.out, r.out[q0 * 256..(q0 + rows) * 256], "{m}: {c:?}");
                }
            }
        }
    }
}

#[test]
fn a_transposed_view_is_read_as_if_it_were_dense() {
    // [C10] (heads, tokens, d) instead of (tokens, heads, d), on the same numbers.
    let (heads, n) = (HeadShape::new(4, 2, 24), 50);
    let c = Case::new(heads, Mask::CAUSAL, &[(n, n)]);
    let data = Data::random(&c);
    let turn = |x: &[f32], h: usize| -> Vec<f32> {
        (0..h).flat_map(|g| (0..n).flat_map(move |t| x[(t * h + g) * 24..][..24].to_vec())).collect()
    };
    let (q, k, v) = (turn(&data.q, 4), turn(&data.k, 2), turn(&data.v, 2));
    let plan = c.plan(&machine(2));
    let (mut out, mut books) = (vec![f32::NAN; n * 4 * 24], [AttnBooks::default()]);
    let s = Strides { token: 24, head: n * 24, page: 0 };
    let args = Args {
        kv_scales: KvScales::default(),
        extras: Extras::default(),
        q: Buf::F32(&q),
        q_strides: (24, n * 24),
        k: Buf::F32(&k),
        k_strides: s,
        v: Buf::F32(&v),
        v_strides: s,
        page_table: &[],
        page_table_stride: 0,
        out: BufMut::F32(&mut out),
        out_strides: (24, n * 24),
        lse: None,
        max_scores: None,
    };
    run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut books).unwrap();
    assert_eq!(out, turn(&run_case(&c, &data, &machine(2), f32::NAN).out, 4));
}

#[test]
fn lengths_zero_and_one_inside_a_batch_crash_or_divide_by_zero() {
    // [C11]
    for d in [64, 256] {
        for mask in [Mask::FULL, Mask::CAUSAL] {
            let heads = HeadShape::new(2, 1, d);
            for lengths in
                [&[(0, 4), (3, 3), (0, 2), (2, 0)][..], &[(1, 0), (0, 0), (1, 3)], &[(0, 0), (0, 0)], &[]]
            {
                for c in layouts(&Case::new(heads, mask, lengths)) {
                    let data = Data::random(&c);
                    for m in machines() {
                        let r = run_case(&c, &data, &m, f32::NAN);
                        judge(&c, &data, &r);
                    }
                }
            }
            let c = Case::new(heads, mask, &[(0, 4), (3, 3), (0, 2), (2, 0)]);
            let r = run_case(&c, &Data::random(&c), &machine(1), f32::NAN);
            assert!(r.out[3 * 2 * d..].iter().all(|&x| x == 0.0));
            for head in 0..2 {
                assert_eq!(r.lse[head * 5 + 3..head * 5 + 5], [f32::NEG_INFINITY; 2]);
            }
            let one = Case::new(HeadShape::new(1, 1, d), mask, &[(1, 1)]);
            let data = Data::random(&one);
            assert_eq!(run_case(&one, &data, &machine(1), f32::NAN).out, data.v);
        }
    }
}

/// A paged decode call over one sequence of `seqlen_k` keys with the given table; page size 16, 4 pages of storage.
fn paged_call(seqlen_k: usize, table: &[u32], stride: usize) -> Result<Vec<f32>, suanpan_base::BadArgument> {
    let c = Case::new(HeadShape::new(1, 1, 8), Mask::window(20), &[(1, seqlen_k)]).paged(16);
    let plan = c.plan(&machine(1));
    let kv = vec![bf16::ONE.to_f32(); 4 * 16 * 8];
    let (q, mut out, mut books) = (vec![0.0; 8], vec![-3.0; 8], [AttnBooks::default()]);
    let s = Strides { token: 8, head: 128, page: 128 };
    let args = Args {
        kv_scales: KvScales::default(),
        extras: Extras::default(),
        q: Buf::F32(&q),
        q_strides: (8, 8),
        k: Buf::F32(&kv),
        k_strides: s,
        v: Buf::F32(&kv),
        v_strides: s,
        page_table: table,
        page_table_stride: stride,
        out: BufMut::F32(&mut out),
        out_strides: (8, 8),
        lse: None,
        max_scores: None,
    };
    let result = run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut books);
    if result.is_err() {
        assert!(
            out.iter().all(|&x| x == -3.0) && books[0] == AttnBooks::default(),
            "a refused call left traces"
        );
    }
    result.map(|()| out)
}

#[test]
fn one_page_too_many_is_read_past_the_end_of_the_table() {
    // [C16] two columns, length 33.
    assert_eq!(paged_call(32, &[3, 1], 2).unwrap(), [1.0; 8]);
    let e = paged_call(33, &[3, 1], 2).unwrap_err();
    assert!(e.field == "seqs[0].seqlen_k" && e.asked == "33" && e.supported.contains("32 tokens"), "{e}");
    let e = paged_call(33, &[3, 1], 3).unwrap_err();
    assert_eq!((e.field.as_str(), e.asked.as_str()), ("page_table length", "2"));
}

#[test]
fn page_ids_past_the_storage_are_followed() {
    let e = paged_call(33, &[0, 1, 4], 3).unwrap_err();
    assert!(e.field == "page_table[0][2]" && e.asked == "4" && e.supported.contains("below 4"), "{e}");
    assert!(paged_call(33, &[0, u32::MAX, 1], 3).is_err());
    // Left of the window (keys 13 .. 33 need pages 0, 1, 2; at 48 keys page 0 is free).
    assert_eq!(paged_call(48, &[u32::MAX, 2, 3], 3).unwrap(), [1.0; 8]);
    assert!(paged_call(35, &[u32::MAX, 2, 3], 3).is_err());
}

#[test]
fn buffers_shorter_than_their_strides_are_read_past_the_end() {
    let c = Case::new(HeadShape::new(2, 1, 8), Mask::CAUSAL, &[(2, 5)]);
    let plan = c.plan(&machine(1));
    let call = |edit: &dyn Fn(&mut [usize; 8])| {
        // lengths of q, k, v, out; token strides of q, k, v, out.
        let mut n = [32, 40, 40, 32, 16, 8, 8, 16];
        edit(&mut n);
        let (q, k, v) = (vec![0.0; n[0]], vec![0.0; n[1]], vec![0.0; n[2]]);
        let (mut out, mut books) = (vec![0.0; n[3]], [AttnBooks::default()]);
        let args = Args {
            kv_scales: KvScales::default(),
            extras: Extras::default(),
            q: Buf::F32(&q),
            q_strides: (n[4], 8),
            k: Buf::F32(&k),
            k_strides: Strides { token: n[5], head: 8, page: 0 },
            v: Buf::F32(&v),
            v_strides: Strides { token: n[6], head: 8, page: 0 },
            page_table: &[],
            page_table_stride: 0,
            out: BufMut::F32(&mut out),
            out_strides: (n[7], 8),
            lse: None,
            max_scores: None,
        };
        run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut books).map_err(|e| e.field)
    };
    assert_eq!(call(&|_| ()), Ok(()));
    for (at, field) in ["q length", "k length", "v length", "out length"].into_iter().enumerate() {
        assert_eq!(call(&|n| n[at] -= 1), Err(field.to_string()));
    }
    // A token stride that overflows or points past the end: by whichever name notices first.
    for (at, field) in [(4, "q"), (5, "k"), (6, "v"), (7, "out")] {
        for stride in [usize::MAX, usize::MAX / 2] {
            let refused = call(&|n| n[at] = stride).unwrap_err();
            assert!(refused.starts_with(field), "{refused} for {field}");
        }
    }
    // Output rows that overlap would be written by two threads.
    assert_eq!(call(&|n| n[7] = 15), Err("out strides".to_string()));
}

#[test]
fn a_schedule_past_the_limits_is_refused_and_changes_nothing() {
    let c = Case::new(HeadShape::new(1, 1, 8), Mask::CAUSAL, &[]);
    let limits = Limits { max_seqs: 2, max_total_q: 10, max_seqlen_k: 100 };
    let mut plan = Plan::new(&c.problem(), &machine(1), limits).unwrap();
    plan.schedule(&[SeqLen::new(4, 50)]).unwrap();
    let before = plan.to_string();
    let refused = |plan: &mut Plan, seqs: &[SeqLen]| plan.schedule(seqs).unwrap_err().field;
    assert_eq!(refused(&mut plan, &[SeqLen::new(1, 1); 3]), "seqs");
    assert_eq!(refused(&mut plan, &[SeqLen::new(6, 6); 2]), "total seqlen_q");
    assert_eq!(refused(&mut plan, &[SeqLen::new(1, 101)]), "seqs[0].seqlen_k");
    assert_eq!(plan.to_string(), before);
    assert!(before.contains("Direct") && before.contains("tile_q 4"), "{before}");
    let huge = Limits { max_seqs: 1, max_total_q: usize::MAX / 2, max_seqlen_k: 1 };
    assert_eq!(Plan::new(&c.problem(), &machine(1), huge).unwrap_err().field, "max_total_q");
}

#[test]
fn numbers_of_heads_that_do_not_fit_the_problem_are_refused_by_name() {
    let refused = |scores: Scores, slopes: Option<&[f32]>, sinks: Option<&[f32]>| -> Option<String> {
        let c = Case::new(HeadShape::new(2, 1, 8), Mask::CAUSAL, &[(3, 3)]).scores(scores);
        let data = Data::random(&c);
        let plan = c.plan(&machine(1));
        let mut out = vec![-7.0; 48];
        let strides = Strides { token: 8, head: 8, page: 0 };
        let args = Args {
            kv_scales: KvScales::default(),
            extras: Extras { alibi_slopes: slopes, sinks, ..Extras::default() },
            q: Buf::F32(&data.q),
            q_strides: (16, 8),
            k: Buf::F32(&data.k),
            k_strides: strides,
            v: Buf::F32(&data.v),
            v_strides: strides,
            page_table: &[],
            page_table_stride: 0,
            out: BufMut::F32(&mut out),
            out_strides: (16, 8),
            lse: None,
            max_scores: None,
        };
        let result = run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut [AttnBooks::default()]);
        assert!(result.is_ok() || out.iter().all(|&x| x == -7.0), "a refused call wrote");
        result.err().map(|e| e.field)
    };
    let (alibi, sink) =
        (Scores { alibi: true, ..Scores::default() }, Scores { sink: true, ..Scores::default() });
    let none = Scores::default();
    assert_eq!(refused(alibi, Some(&[0.5, 0.25]), None), None);
    assert_eq!(refused(sink, None, Some(&[f32::NEG_INFINITY, 1.0])), None);
    assert_eq!(refused(alibi, None, None).as_deref(), Some("alibi_slopes length"));
    assert_eq!(refused(alibi, Some(&[0.5]), None).as_deref(), Some("alibi_slopes length"));
    assert_eq!(refused(none, Some(&[0.5, 0.5]), None).as_deref(), Some("alibi_slopes length"));
    assert_eq!(refused(none, None, Some(&[])).as_deref(), Some("sinks length"));
    assert_eq!(refused(alibi, Some(&[0.5, f32::INFINITY]), None).as_deref(), Some("alibi_slopes[1]"));
    // Finite, but not in the powers of two that the kernels compute in.
    assert_eq!(refused(alibi, Some(&[f32::MAX, 0.5]), None).as_deref(), Some("alibi_slopes[0]"));
    assert_eq!(refused(sink, None, Some(&[f32::NAN, 0.0])).as_deref(), Some("sinks[0]"));
    assert_eq!(refused(sink, None, Some(&[0.0, f32::INFINITY])).as_deref(), Some("sinks[1]"));
}

#[test]
fn the_largest_softcap_taken_turns_scores_into_nan() {
    for rows in [1, 20] {
        let scores = Scores { softcap: Some(2.3e38), ..Scores::default() };
        let c = Case::new(HeadShape::new(1, 1, 16), Mask::CAUSAL, &[(rows, 40)]).scores(scores);
        let data = Data::random(&c);
        for m in machines() {
            let r = run_case(&c, &data, &m, f32::NAN);
            assert!(r.out.iter().chain(&r.lse).all(|x| x.is_finite()), "{m}");
        }
    }
}

#[test]
fn a_softcap_after_the_mask_lets_masked_keys_back_in() {
    // [C08] (a) a cap that ran after masking would give row 0 a share of the future key: 26.89.
    let capped = |cap| Scores { softcap: Some(cap), ..Scores::default() };
    let masked = Case::new(HeadShape::new(1, 1, 1), Mask::CAUSAL, &[(2, 2)]).scores(capped(1.0));
    let data = Data { q: vec![0.0; 2], k: vec![0.0; 2], v: vec![0.0, 100.0] };
    // (b) 8.808 would be no cap at all.
    let bent = Case::new(HeadShape::new(1, 1, 1), Mask::FULL, &[(1, 2)]).scores(capped(2.0)).scale(1.0);
    let bent_data = Data { q: vec![1.0], k: vec![0.0, 2.0], v: vec![0.0, 10.0] };
    for m in machines() {
        for c in layouts(&masked) {
            assert_eq!(run_case(&c, &data, &m, f32::NAN).out, [0.0, 50.0], "{m}: {c:?}");
        }
        for c in layouts(&bent) {
            let r = run_case(&c, &bent_data, &m, f32::NAN);
            close(r.out[0], 8.21007, 1e-5, "out");
            close(r.lse[0], 1.72041, 1e-5, "lse");
        }
    }
}
