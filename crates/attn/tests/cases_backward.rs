//! Public bug reports about gradients as black-box tests, each named by its symptom (case numbers in brackets).

mod common;
use common::backward::*;
use common::*;
use suanpan_attn::{BackwardArgs, BackwardWorkspace, Extras, run_backward};
use suanpan_base::{Buf, BufMut, DType, HeadShape, Mask};
use suanpan_ledger::BackwardBooks;

#[test]
fn rows_that_see_no_key_have_gradients() {
    // [C02] zeros for q and k, ones for d_out: of 4 queries over 2 keys two see nothing; then a chunk behind cached tokens.
    for (lens, v) in [((4, 2), vec![10.0, 20.0]), ((2, 5), vec![1.0, 2.0, 3.0, 4.0, 5.0])] {
        let c = Case::new(HeadShape::new(1, 1, 1), Mask::CAUSAL, &[lens]);
        let data = Data { q: vec![0.0; lens.0], k: vec![0.0; lens.1], v };
        let x = Inputs { data, d_out: vec![1.0; lens.0], d_lse: None };
        for m in machines() {
            let g = run_backward_case(&c, &x, &m, f32::NAN);
            judge_gradients(&c, &x, &g);
            let empty = lens.0.saturating_sub(lens.1);
            assert!(g.dq[..empty].iter().all(|&x| x == 0.0), "{m}: {:?}", g.dq);
            // Every row that sees a key hands its whole weight on.
            let all: f32 = g.dv.iter().sum();
            assert!((all - (lens.0 - empty) as f32).abs() < 1e-5, "{m}: {:?}", g.dv);
        }
    }
}

#[test]
fn gradients_of_lengths_zero_and_one_are_left_unwritten_or_crash() {
    // [C11] outputs start as NaN.
    for d in [64, 256] {
        for mask in [Mask::FULL, Mask::CAUSAL] {
            let heads = HeadShape::new(2, 1, d);
            let c = Case::new(heads, mask, &[(0, 4), (3, 3), (0, 2), (2, 0)]);
            let x = Inputs::random(&c, true);
            let none =
                [&[(1, 0), (0, 0), (1, 3)][..], &[(0, 0), (0, 0)], &[]].map(|l| Case::new(heads, mask, l));
            let one = Case::new(HeadShape::new(1, 1, d), mask, &[(1, 1)]);
            let single = Inputs::random(&one, false);
            for m in machines() {
                let g = run_backward_case(&c, &x, &m, f32::NAN);
                judge_gradients(&c, &x, &g);
                for keys in [0..4, 7..9] {
                    let row = keys.start * d..keys.end * d;
                    assert!(g.dk[row.clone()].iter().chain(&g.dv[row]).all(|&x| x == 0.0), "{m}");
                }
                for c in &none {
                    let x = Inputs::random(c, true);
                    judge_gradients(c, &x, &run_backward_case(c, &x, &m, f32::NAN));
                }
                let g = run_backward_case(&one, &single, &m, f32::NAN);
                // Its weight is exp(score - lse): one, but for the roundings of both.
                let roundings = 2f32.powi(-23) * (1.0 + g.lse[0].abs());
                let close = g.dv.iter().zip(&single.d_out).all(|(v, o)| (v - o).abs() <= roundings * o.abs());
                assert!(close, "{m}: {:?} for {:?}", g.dv, single.d_out);
                assert!(g.dq.iter().chain(&g.dk).all(|&x| x == 0.0), "{m}");
            }
        }
    }
}

#[test]
fn gradients_differ_from_run_to_run_under_load() {
    // [C13] there is no switch: 30 runs with 1, 4 and 16 workers beside a thread that keeps the machine busy.
    let c = Case::new(HeadShape::new(8, 8, 64), Mask::CAUSAL, &[(1024, 1024); 2]);
    let c = c.dtypes(DType::Bf16, DType::Bf16);
    let x = Inputs::random(&c, false);
    let first = run_backward_case(&c, &x, &machine(1), f32::NAN).bits();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                std::hint::black_box(normal(10_000, 1, DType::F32));
            }
        });
        let pools = [1, 4, 16].map(|threads| (threads, pool(threads)));
        let same = (0..30).all(|run| {
            let (threads, pool) = &pools[run % 3];
            pool.install(|| run_backward_case(&c, &x, &machine(*threads), f32::NAN)).bits() == first
        });
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(same);
    });
}

#[test]
fn an_upstream_gradient_of_stride_zero_is_read_as_if_it_were_dense() {
    // [C10] what `expand` makes of one row: every token and head reads the same one.
    let (heads, rows, keys, d) = (HeadShape::new(2, 1, 8), 3, 5, 8);
    let c = Case::new(heads, Mask::CAUSAL, &[(rows, keys)]);
    let row = normal(d, 5, DType::F32);
    let x = Inputs { data: Data::random(&c), d_out: row.repeat(rows * 2), d_lse: None };
    let dense = run_backward_case(&c, &x, &machine(1), f32::NAN);
    let plan = backward_plan(&c, &machine(1));
    let (mut dq, mut dk, mut dv) =
        (vec![f32::NAN; rows * 16], vec![f32::NAN; keys * 8], vec![f32::NAN; keys * 8]);
    let args = BackwardArgs {
        extras: Extras::default(),
        d_sinks: None,
        d_bias: None,
        q: Buf::F32(&x.data.q),
        q_strides: (16, 8),
        k: Buf::F32(&x.data.k),
        k_strides: (8, 8).into(),
        v: Buf::F32(&x.data.v),
        v_strides: (8, 8).into(),
        page_table: &[],
        page_table_stride: 0,
        out: Buf::F32(&dense.out),
        out_strides: (16, 8),
        lse: &dense.lse,
        d_out: Buf::F32(&row),
        d_out_strides: (0, 0),
        d_lse: None,
        dq: BufMut::F32(&mut dq),
        dq_strides: (16, 8),
        dk: BufMut::F32(&mut dk),
        dk_strides: (8, 8).into(),
        dv: BufMut::F32(&mut dv),
        dv_strides: (8, 8).into(),
    };
    let mut ws = BackwardWorkspace::for_plans(&[&plan]);
    run_backward(&plan, args, &mut ws, &mut [BackwardBooks::default()]).unwrap();
    assert_eq!((dq, dk, dv), (dense.dq, dense.dk, dense.dv));
}
