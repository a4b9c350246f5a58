//! Linear layers against f64, on every instruction set of the machine, over random shapes; poison, padding, batch and thread invariance.

mod common;

use common::Noise;
use proptest::prelude::*;
use suanpan_ops::{
    Isa, LinearInput, LinearOut, LinearWorkspace, Precision, Scales, Weight, WeightFormat, linear,
};

/// Random bytes of a `[rows, cols]` matrix whose scales are finite, signed and spread over a few powers of two.
fn random_matrix(format: WeightFormat, rows: usize, cols: usize, noise: &mut Noise) -> Vec<u8> {
    let bytes = format.row_bytes(cols).expect("whole blocks") * rows;
    let mut data: Vec<u8> = (0..bytes).map(|_| noise.bits() as u8).collect();
    let highs: &[usize] = match format {
        WeightFormat::F32 => &[3],
        WeightFormat::F16 | WeightFormat::Bf16 | WeightFormat::Q4_0 | WeightFormat::Q8_0 => &[1],
        WeightFormat::Q5_0 | WeightFormat::Iq4Nl | WeightFormat::Iq4Xs => &[1],
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => &[1, 3],
        WeightFormat::Q2K => &[81, 83],
        WeightFormat::Q3K => &[109],
        WeightFormat::Q6K => &[209],
        WeightFormat::Mxfp4 | WeightFormat::F8E4M3 => &[0],
    };
    if format == WeightFormat::Mxfp4 {
        // An exponent, not the top of a float.
        data.chunks_exact_mut(17).for_each(|block| block[0] = 120 + block[0] % 8);
        return data;
    }
    if format == WeightFormat::F8E4M3 {
        // Neither NaN.
        data.iter_mut().filter(|b| **b & 127 == 127).for_each(|b| *b ^= 1);
        return data;
    }
    let top = if matches!(format, WeightFormat::F32 | WeightFormat::Bf16) { 0x3c } else { 0x20 };
    for block in data.chunks_exact_mut(format.block_bytes()) {
        for at in highs {
            block[*at] = top | (block[*at] & 0x83);
        }
    }
    data
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|i| i.is_available())
}

/// One product with poisoned padding around the output's rows; returns the outputs, having checked that the padding is untouched.
fn product(
    isa: Isa,
    w: Weight<'_>,
    x: &[f32],
    rows: usize,
    precision: Precision,
    add: Option<f32>,
) -> Vec<f32> {
    let (n, stride) = (w.rows(), w.rows() + 3);
    let mut out = vec![f32::from_bits(0x7fc0_1234); rows * stride];
    if let Some(old) = add {
        out.chunks_mut(stride).for_each(|row| row[..n].fill(old));
    }
    let mut input = LinearInput::new(rows, w.cols(), precision);
    input.set(x, rows, w.cols());
    let mut ws = LinearWorkspace::with_isa(isa, rows, 2).unwrap();
    let to = LinearOut { data: &mut out, row_stride: stride, add: add.is_some() };
    linear(&mut [(w, to)], &input, &mut ws);
    for row in out.chunks(stride) {
        assert!(row[n..].iter().all(|v| v.to_bits() == 0x7fc0_1234), "padding was written");
    }
    out.chunks(stride).flat_map(|row| row[..n].iter().copied()).collect()
}

/// One digit of the input as the integer path sees it (per 32: max|x| / 127, ties to even), exactly, and what it leaves over.
fn digit(x: &[f32]) -> (Vec<f64>, Vec<f32>) {
    x.chunks(32)
        .flat_map(|group| {
            let max = group.iter().fold(0f32, |m, v| m.max(v.abs()));
            let (scale, inverse) = (max / 127.0, if max > 0.0 { 127.0 / max } else { 0.0 });
            group.iter().map(move |v| {
                let q = (v * inverse).round_ties_even();
                (f64::from(scale) * f64::from(q), (-q).mul_add(scale, *v))
            })
        })
        .unzip()
}

/// Exact values of the input as a product of `precision` with a weight of `format` sees it.
fn seen(x: &[f32], precision: Precision, format: WeightFormat) -> Vec<f64> {
    if !format.is_quantised() || precision == Precision::F32 {
        return x.iter().map(|v| f64::from(*v)).collect();
    }
    let (first, left) = digit(x);
    match precision {
        Precision::Int16 => first.iter().zip(digit(&left).0).map(|(a, b)| a + b).collect(),
        _ => first,
    }
}

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Int8, Precision::Int16];

/// Every output within `tolerance` of Σ|w·x| of the f64 product of the weight with `x`.
fn check(w: Weight<'_>, x: &[f64], old: f64, got: &[f32], tolerance: f64, what: &str) {
    let (n, k) = (w.rows(), w.cols());
    let mut row = vec![0f32; k];
    for j in 0..n {
        w.dequantize_row(j, &mut row);
        for (m, x) in x.chunks(k).enumerate() {
            let terms = row.iter().zip(x).map(|(w, x)| f64::from(*w) * x);
            let (sum, size) = terms.fold((old, old.abs()), |(s, a), t| (s + t, a + t.abs()));
            let error = (f64::from(got[m * n + j]) - sum).abs();
            assert!(error <= tolerance * size, "{what}: row {m}, out {j}: {} for {sum}", got[m * n + j]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn products_of_every_format_and_instruction_set_are_those_of_f64(
        format in proptest::sample::select(WeightFormat::ALL.to_vec()),
        rows in prop_oneof![1usize..=9, 10usize..=70],
        n in 1usize..=70,
        blocks in 1usize..=4,
        ragged in 0usize..=37,
        precision in proptest::sample::select(PRECISIONS.to_vec()),
        add in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut noise = Noise(seed);
        let k = match format.block_elems() {
            1 => 96 * blocks + ragged,
            32 => 32 * (blocks * 9 + ragged % 9),
            elems => elems * blocks,
        };
        let data = random_matrix(format, n, k, &mut noise);
        let w = Weight::new(format, n, k, &data).unwrap();
        let x: Vec<f32> = (0..rows * k).map(|_| noise.unit()).collect();
        let int = precision.digits() > 0 && format.is_quantised();
        let seen = seen(&x, precision, format);
        let old = add.then_some(0.75f32);
        let mut fused: Option<Vec<u32>> = None;
        for isa in isas() {
            let got = product(isa, w, &x, rows, precision, old);
            // Rounding of at most k sums, and in the integer path of the minimum's share beside them.
            let tolerance = f64::from(f32::EPSILON) * if int { 16.0 } else { 4.0 + (k as f64).sqrt() };
            let what = format!("{format} {precision:?} {} [{rows}, {k}] to {n}", isa.name());
            check(w, &seen, f64::from(old.unwrap_or(0.0)), &got, tolerance, &what);
            if isa != Isa::Portable {
                let bits: Vec<u32> = got.iter().map(|v| v.to_bits()).collect();
                prop_assert_eq!(fused.get_or_insert_with(|| bits.clone()), &bits, "{}", what);
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_in_any_batch_beside_any_job_and_on_any_number_of_threads(
        format in proptest::sample::select(WeightFormat::ALL.to_vec()),
        rows in 2usize..=40,
        n in 17usize..=200,
        threads in 1usize..=5,
        precision in proptest::sample::select(PRECISIONS.to_vec()),
        seed in any::<u64>(),
    ) {
        let mut noise = Noise(seed);
        let k = 768;
        let data = random_matrix(format, n, k, &mut noise);
        let other = random_matrix(WeightFormat::Q8_0, 33, k, &mut noise);
        let w = Weight::new(format, n, k, &data).unwrap();
        let beside = Weight::new(WeightFormat::Q8_0, 33, k, &other).unwrap();
        let x: Vec<f32> = (0..rows * k).map(|_| noise.unit()).collect();
        for isa in isas() {
            let (mut out, mut out_beside) = (vec![f32::NAN; rows * n], vec![f32::NAN; rows * 33]);
            let mut input = LinearInput::new(rows, k, precision);
            input.set(&x, rows, k);
            let mut ws = LinearWorkspace::with_isa(isa, rows, threads).unwrap();
            let mut jobs = [
                (beside, LinearOut { data: &mut out_beside, row_stride: 33, add: false }),
                (w, LinearOut { data: &mut out, row_stride: n, add: false }),
            ];
            linear(&mut jobs, &input, &mut ws);
            for m in (0..rows).step_by(rows / 2) {
                let alone = product(isa, w, &x[m * k..(m + 1) * k], 1, precision, None);
                let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&alone), bits(&out[m * n..(m + 1) * n]), "{} {}", format, isa.name());
            }
        }
    }
}

#[test]
fn long_rows_and_many_input_rows_are_cut_into_chunks_without_a_trace() {
    let mut noise = Noise(3);
    for (format, k) in [(WeightFormat::Q4_1, 2592), (WeightFormat::Q6K, 2560), (WeightFormat::F16, 1001)] {
        for precision in PRECISIONS {
            let (rows, n) = (700, 35);
            let data = random_matrix(format, n, k, &mut noise);
            let w = Weight::new(format, n, k, &data).unwrap();
            let x: Vec<f32> = (0..rows * k).map(|_| noise.unit()).collect();
            let got = product(Isa::best(), w, &x, rows, precision, None);
            for m in [0, 1, 349, 350, 511, 512, 699] {
                let row = &x[m * k..(m + 1) * k];
                check(
                    w,
                    &seen(row, precision, format),
                    0.0,
                    &got[m * n..(m + 1) * n],
                    1e-5,
                    &format!("{format} {precision:?} row {m}"),
                );
            }
        }
    }
}

#[test]
fn more_jobs_than_one_region_holds_are_all_done() {
    let mut noise = Noise(4);
    let k = 64;
    let data: Vec<_> = (1..=19).map(|n| random_matrix(WeightFormat::Q4_0, n, k, &mut noise)).collect();
    let x: Vec<f32> = (0..k).map(|_| noise.unit()).collect();
    let mut outs: Vec<_> = (1..=19).map(|n| vec![f32::NAN; n]).collect();
    let mut input = LinearInput::quantised_only(1, k, Precision::Int8);
    input.set(&x, 1, k);
    let weight = |i: usize| Weight::new(WeightFormat::Q4_0, i + 1, k, &data[i]).unwrap();
    let mut jobs: Vec<_> = outs
        .iter_mut()
        .enumerate()
        .map(|(i, out)| (weight(i), LinearOut { data: out, row_stride: i + 1, add: false }))
        .collect();
    linear(&mut jobs, &input, &mut LinearWorkspace::new(1, 2));
    for (i, out) in outs.iter().enumerate() {
        check(weight(i), &seen(&x, Precision::Int8, WeightFormat::Q4_0), 0.0, out, 1e-6, "job");
    }
}

#[test]
fn nan_or_infinity_in_one_row_makes_that_row_nan_and_no_other() {
    let mut noise = Noise(5);
    let (k, n, rows) = (288, 40, 11);
    for format in WeightFormat::ALL.into_iter().filter(|f| f.block_elems() <= 32) {
        for precision in PRECISIONS {
            let data = random_matrix(format, n, k, &mut noise);
            let w = Weight::new(format, n, k, &data).unwrap();
            let clean: Vec<f32> = (0..rows * k).map(|_| noise.unit()).collect();
            for isa in isas() {
                let want = product(isa, w, &clean, rows, precision, None);
                for bad in [f32::NAN, f32::INFINITY] {
                    let mut x = clean.clone();
                    x[5 * k + 77] = bad;
                    let got = product(isa, w, &x, rows, precision, None);
                    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                        let what = format!("{format} {precision:?} {} out {i}", isa.name());
                        if i / n == 5 {
                            assert!(!g.is_finite(), "{what}");
                        } else {
                            assert_eq!(g.to_bits(), w.to_bits(), "{what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn inputs_of_any_magnitude_quantise_without_overflow() {
    let mut noise = Noise(6);
    let k = 32;
    let data = random_matrix(WeightFormat::Q8_0, 16, k, &mut noise);
    let w = Weight::new(WeightFormat::Q8_0, 16, k, &data).unwrap();
    for scale in [0.0, 1e-45, 1e-38, 3e-37, 1e-30, 1.0, 1e30] {
        let x: Vec<f32> = (0..k).map(|_| noise.unit() * scale).collect();
        for isa in isas() {
            let got = product(isa, w, &x, 1, Precision::Int8, None);
            let exact: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            let size: f64 = exact.iter().map(|v| v.abs()).sum();
            let mut row = vec![0.0; k];
            for (j, g) in got.iter().enumerate() {
                w.dequantize_row(j, &mut row);
                let top = row.iter().fold(0f32, |t, v| t.max(v.abs()));
                let want: f64 = row.iter().zip(&exact).map(|(w, x)| f64::from(*w) * x).sum();
                // Half a step of 1/127 an element, and zero below the smallest scale that has an inverse.
                let bound = f64::from(top) * (size / 30.0 + 32.0 * 4e-37);
                assert!((f64::from(*g) - want).abs() <= bound, "{scale} {}: {g} for {want}", isa.name());
            }
        }
    }
}

#[test]
fn two_digits_are_as_good_as_floats_where_one_is_off_by_a_percent() {
    let mut noise = Noise(8);
    let (n, k) = (64, 576);
    let data = random_matrix(WeightFormat::Q4_1, n, k, &mut noise);
    let w = Weight::new(WeightFormat::Q4_1, n, k, &data).unwrap();
    let x: Vec<f32> = (0..k).map(|_| noise.unit()).collect();
    let exact = seen(&x, Precision::F32, WeightFormat::Q4_1);
    let mut row = vec![0f32; k];
    let error = |precision: Precision, row: &mut [f32]| {
        let got = product(Isa::best(), w, &x, 1, precision, None);
        let mut worst = 0f64;
        for (j, g) in got.iter().enumerate() {
            w.dequantize_row(j, row);
            let terms = row.iter().zip(&exact).map(|(w, x)| f64::from(*w) * x);
            let (sum, size) = terms.fold((0.0, 0.0), |(s, a): (f64, f64), t| (s + t, a + t.abs()));
            worst = worst.max((f64::from(*g) - sum).abs() / size);
        }
        worst
    };
    let [float, one, two] = PRECISIONS.map(|p| error(p, &mut row));
    assert!(one > 1e-4 && two < one / 100.0 && two < 3e-6 && float < 3e-6, "{float:e} {one:e} {two:e}");
}

#[test]
fn zero_rows_and_zero_outputs_are_no_work() {
    let mut ws = LinearWorkspace::new(4, 2);
    let mut input = LinearInput::new(4, 32, Precision::Int8);
    input.set(&[], 0, 32);
    let mut out = [5.0; 8];
    let w = Weight::new(WeightFormat::Q8_0, 8, 32, &[0; 8 * 34]).unwrap();
    linear(&mut [(w, LinearOut { data: &mut out, row_stride: 8, add: false })], &input, &mut ws);
    assert_eq!(out, [5.0; 8]);
    input.set(&[1.0; 32], 1, 32);
    let none = Weight::new(WeightFormat::Q8_0, 0, 32, &[]).unwrap();
    linear(&mut [(none, LinearOut { data: &mut [], row_stride: 0, add: false })], &input, &mut ws);
    linear(&mut [(w, LinearOut { data: &mut out, row_stride: 8, add: false })], &input, &mut ws);
    assert_eq!(out, [0.0; 8]);
}

#[test]
#[should_panic(expected = "columns of the weight")]
fn a_weight_of_another_width_is_refused() {
    let mut input = LinearInput::new(1, 64, Precision::Int8);
    input.set(&[0.0; 64], 1, 64);
    let w = Weight::new(WeightFormat::Q8_0, 1, 32, &[0; 34]).unwrap();
    let out = LinearOut { data: &mut [0.0], row_stride: 1, add: false };
    linear(&mut [(w, out)], &input, &mut LinearWorkspace::new(1, 1));
}

#[test]
#[should_panic(expected = "out holds 3")]
fn an_output_that_is_too_short_is_refused() {
    let mut input = LinearInput::new(2, 32, Precision::Int8);
    input.set(&[0.0; 64], 2, 32);
    let w = Weight::new(WeightFormat::Q8_0, 2, 32, &[0; 68]).unwrap();
    let out = LinearOut { data: &mut [0.0; 3], row_stride: 2, add: false };
    linear(&mut [(w, out)], &input, &mut LinearWorkspace::new(2, 1));
}

#[test]
#[should_panic(expected = "F16 needs the input in f32")]
fn a_float_weight_on_an_input_without_floats_is_refused() {
    let mut input = LinearInput::quantised_only(1, 32, Precision::Int8);
    input.set(&[0.0; 32], 1, 32);
    let w = Weight::new(WeightFormat::F16, 1, 32, &[0; 64]).unwrap();
    let out = LinearOut { data: &mut [0.0], row_stride: 1, add: false };
    linear(&mut [(w, out)], &input, &mut LinearWorkspace::new(1, 1));
}

#[test]
fn scaled_products_are_those_of_f64_for_blocks_rows_and_whole_matrices() {
    let mut noise = Noise(5);
    for (format, n, k, block) in [
        (WeightFormat::F8E4M3, 70, 300, (16, 128)),
        (WeightFormat::F8E4M3, 49, 130, (128, 128)),
        (WeightFormat::F8E4M3, 33, 64, (1, 64)),
        (WeightFormat::F8E4M3, 20, 40, (20, 40)),
        (WeightFormat::F8E4M3, 40, 77, (3, 5)),
        (WeightFormat::Bf16, 17, 96, (8, 32)),
    ] {
        let data = random_matrix(format, n, k, &mut noise);
        let scales: Vec<f32> =
            (0..n.div_ceil(block.0) * k.div_ceil(block.1)).map(|_| 0.01 + noise.unit().abs()).collect();
        let w = Weight::new(format, n, k, &data).unwrap();
        let scaled = Scales { data: &scales, block_rows: block.0, block_cols: block.1 };
        let bad = Scales { data: &scales[1..], ..scaled };
        assert_eq!(w.with_scales(bad).unwrap_err().field, "scales");
        let w = w.with_scales(scaled).unwrap();
        let mut plain = vec![0f32; k];
        let mut row = vec![0f32; k];
        for r in 0..n {
            Weight::new(format, n, k, &data).unwrap().dequantize_row(r, &mut plain);
            w.dequantize_row(r, &mut row);
            for c in 0..k {
                let scale = scales[r / block.0 * k.div_ceil(block.1) + c / block.1];
                assert_eq!(row[c].to_bits(), (plain[c] * scale).to_bits(), "{format} {block:?} at {r}, {c}");
            }
        }
        for rows in [1, 9] {
            let x: Vec<f32> = (0..rows * k).map(|_| noise.unit()).collect();
            let exact: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            for isa in isas() {
                let got = product(isa, w, &x, rows, Precision::Int8, None);
                check(w, &exact, 0.0, &got, 1e-6, &format!("{format}, blocks of {block:?}, {isa:?}"));
            }
        }
    }
}
