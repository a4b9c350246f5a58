//! The quantiser: every code is the nearest, errors are what they are said to be, and its output runs as it is.

mod common;
use common::*;
use suanpan_attn::quant::{Rows, quantize, scale_strides, scales_of};
use suanpan_attn::reference::{Spec, attention_f64};
use suanpan_attn::{Args, Extras, KvLayout, KvScales, Limits, Plan, Problem, Strides, Workspace, run};
use suanpan_base::{Buf, BufMut, DType, HeadShape, Mask, ScaleGrain, SeqLen};
use suanpan_ledger::AttnBooks;

const CODES: [DType; 4] = [DType::E4m3, DType::E5m2, DType::I8, DType::I4];

fn rows(x: &[f32]) -> Rows<'_> {
    Rows { x, num_kv_heads: 2, head_dim: 6, page_size: 3 }
}

/// Half the distance of the codes about `y`.
fn half_step(dtype: DType, y: f64) -> f64 {
    let float =
        |mantissa: i32, lowest: i32| 2f64.powi((y.abs().log2().floor() as i32).max(lowest) - mantissa - 1);
    match dtype {
        DType::E4m3 => float(3, -6),
        DType::E5m2 => float(2, -14),
        _ => 0.5,
    }
}

#[test]
fn every_code_is_the_nearest_one_under_its_groups_scale() {
    let x: Vec<f32> =
        normal(7 * 2 * 6, 5, DType::F32).iter().enumerate().map(|(i, x)| x * (1 + i / 12) as f32).collect();
    for dtype in CODES {
        for grain in ScaleGrain::ALL {
            let r = rows(&x);
            let scales = scales_of(&r, dtype, grain).unwrap();
            assert_eq!(
                scales.len(),
                [0, 1, 2, 14, 6][ScaleGrain::ALL.iter().position(|g| *g == grain).unwrap()]
            );
            let (codes, error) = quantize(&r, dtype, grain, &scales).unwrap();
            let s = scale_strides(grain, 2, 3);
            let (mut worst, mut lost, mut all) = (0.0f64, 0.0, 0.0);
            for (i, &x) in x.iter().enumerate() {
                let (token, head) = (i / 12, i / 6 % 2);
                let (page, slot) = if grain == ScaleGrain::None { (0, 0) } else { (token / 3, token % 3) };
                let scale =
                    scales.get(page * s.page + slot * s.token + head * s.head).map_or(1.0, |&s| f64::from(s));
                let distance = (f64::from(codes.buf().get(i)) * scale - f64::from(x)).abs();
                let most = half_step(dtype, f64::from(x) / scale) * scale;
                // Without scales the largest int4 is 7; x / scale itself is rounded.
                let saturated = grain == ScaleGrain::None && dtype == DType::I4 && x.abs() > 7.5;
                assert!(
                    saturated || distance <= most * (1.0 + 1e-6),
                    "{dtype} {grain} {i}: {x} off by {distance}"
                );
                (worst, lost, all) =
                    (worst.max(distance), lost + distance * distance, all + f64::from(x * x));
            }
            assert!((error.abs_max - worst).abs() < 1e-12 && (error.rms - (lost / 84.0).sqrt()).abs() < 1e-9);
            assert!((error.rms_relative - (lost / all).sqrt()).abs() < 1e-6, "{error}");
            assert!(grain == ScaleGrain::None || error.saturated == 0, "{dtype} {grain}: {error}");
        }
    }
}

#[test]
fn finer_scales_lose_less_and_uniform_data_a_twelfth_of_a_step() {
    let mut next = rng(3);
    let uniform: Vec<f32> =
        (0..600 * 12).map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect();
    // Tokens of very different sizes.
    let x: Vec<f32> = uniform.iter().enumerate().map(|(i, x)| x * [1.0, 10.0, 100.0][i / 12 % 3]).collect();
    for dtype in [DType::I8, DType::I4] {
        let error = |x: &[f32], grain| {
            let scales = scales_of(&rows(x), dtype, grain).unwrap();
            quantize(&rows(x), dtype, grain, &scales).unwrap().1
        };
        let grains = [ScaleGrain::Token, ScaleGrain::Page, ScaleGrain::Tensor];
        let [token, page, tensor] = grains.map(|grain| error(&x, grain));
        assert!(token.rms < page.rms && page.rms <= tensor.rms * 1.001, "{token} {page} {tensor}");
        let step = 1.0 / if dtype == DType::I8 { 127.0 } else { 7.0 };
        let (rms, expected) = (error(&uniform, ScaleGrain::Tensor).rms, step / 12f64.sqrt());
        assert!((rms / expected - 1.0).abs() < 0.03, "{dtype}: {rms} for {expected}");
    }
}

#[test]
fn what_is_past_the_range_saturates_and_is_counted() {
    let x = [0.0, 500.0, -500.0, f32::INFINITY, 449.0, 463.0, 1e-9, 7.4, 7.6, -127.6, 70_000.0, 1.0];
    for (dtype, saturated) in
        [(DType::E4m3, 4), (DType::E5m2, 2), (DType::I8, 7), (DType::I4, 8), (DType::F16, 2)]
    {
        let (codes, error) = quantize(&rows(&x), dtype, ScaleGrain::None, &[]).unwrap();
        assert_eq!(error.saturated, saturated, "{dtype}");
        assert!((0..12).all(|i| codes.buf().get(i).is_finite()), "{dtype}");
    }
    let x = [0.0; 12];
    let scales = scales_of(&rows(&x), DType::I8, ScaleGrain::Tensor).unwrap();
    assert_eq!(
        (&scales[..], quantize(&rows(&x), DType::I8, ScaleGrain::Tensor, &scales).unwrap().1),
        (&[1.0f32][..], Default::default())
    );
}

#[test]
fn what_cannot_be_quantised_is_refused_by_name() {
    let x = [1.0f32; 24];
    let field =
        |r: Rows<'_>, dtype, grain, scales: &[f32]| quantize(&r, dtype, grain, scales).unwrap_err().field;
    let r = rows(&x);
    assert_eq!(field(Rows { head_dim: 5, ..r }, DType::I8, ScaleGrain::None, &[]), "x length");
    assert_eq!(field(Rows { head_dim: 3, ..r }, DType::I4, ScaleGrain::None, &[]), "head_dim");
    assert_eq!(field(Rows { num_kv_heads: 0, ..r }, DType::I8, ScaleGrain::None, &[]), "num_kv_heads");
    assert_eq!(field(Rows { page_size: 0, ..r }, DType::I8, ScaleGrain::Page, &[]), "page_size");
    assert_eq!(field(r, DType::Bf16, ScaleGrain::Head, &[1.0; 2]), "scales");
    assert_eq!(field(r, DType::I8, ScaleGrain::Head, &[1.0; 3]), "scales length");
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(field(r, DType::I8, ScaleGrain::Head, &[1.0, bad]), "scales[1]");
    }
    let mut with_nan = x;
    with_nan[13] = f32::NAN;
    assert_eq!(field(rows(&with_nan), DType::I4, ScaleGrain::None, &[]), "x[13]");
    assert!(quantize(&rows(&with_nan), DType::E4m3, ScaleGrain::None, &[]).unwrap().0.buf().get(13).is_nan());
}

/// Quantised rows and their scales, as they come, in pages one after the other.
#[test]
fn what_the_quantiser_makes_runs_as_it_is() {
    let heads = HeadShape::new(4, 2, 64);
    let (len, page_size) = (SeqLen::extend(50, 3), 8);
    let tokens = len.seqlen_k.next_multiple_of(page_size);
    let (k, v) = (normal(tokens * 128, 1, DType::F32), normal(tokens * 128, 2, DType::F32));
    let q = normal(3 * 256, 3, DType::F32);
    for dtype in CODES {
        for grain in ScaleGrain::ALL {
            let store = |x: &[f32]| {
                let r = Rows { x, num_kv_heads: 2, head_dim: 64, page_size };
                let scales = scales_of(&r, dtype, grain).unwrap();
                let codes = quantize(&r, dtype, grain, &scales).unwrap().0;
                let strides = scale_strides(grain, 2, page_size);
                let wide: Vec<f64> = (0..x.len())
                    .map(|i| {
                        let (token, head) = (i / 128, i / 64 % 2);
                        let at = token / page_size * strides.page
                            + token % page_size * strides.token
                            + head * strides.head;
                        f64::from(codes.buf().get(i)) * scales.get(at).map_or(1.0, |&s| f64::from(s))
                    })
                    .collect();
                (codes, scales, wide)
            };
            let ((kc, ks, k64), (vc, vs, v64)) = (store(&k), store(&v));
            let problem = Problem {
                kv_dtype: dtype,
                kv_scales: grain,
                kv: KvLayout::Paged { page_size },
                ..Case::new(heads, Mask::CAUSAL, &[]).problem()
            };
            let limits = Limits { max_seqs: 1, max_total_q: 3, max_seqlen_k: len.seqlen_k };
            let mut plan = Plan::new(&problem, &machine(1), limits).unwrap();
            plan.schedule(&[len]).unwrap();
            let table: Vec<u32> = (0..tokens as u32 / page_size as u32).collect();
            let strides = Strides { token: 128, head: 64, page: page_size * 128 };
            let scale_strides = scale_strides(grain, 2, page_size);
            let mut out = vec![0.0; 3 * 256];
            let args = Args {
                kv_scales: KvScales {
                    k: Buf::F32(&ks),
                    k_strides: scale_strides,
                    v: Buf::F32(&vs),
                    v_strides: scale_strides,
                },
                extras: Extras::default(),
                max_scores: None,
                q: Buf::F32(&q),
                q_strides: (256, 64),
                k: kc.buf(),
                k_strides: strides,
                v: vc.buf(),
                v_strides: strides,
                page_table: &table,
                page_table_stride: table.len(),
                out: BufMut::F32(&mut out),
                out_strides: (256, 64),
                lse: None,
            };
            run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut [AttnBooks::default()]).unwrap();
            let q64: Vec<f64> = q.iter().map(|&x| f64::from(x)).collect();
            let want = attention_f64(&Spec::new(heads, Mask::CAUSAL, 0.125), len, &q64, &k64, &v64);
            let worst = out.iter().zip(&want.out).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < 2e-6, "{dtype} {grain}: {worst}");
        }
    }
}
