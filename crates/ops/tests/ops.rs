//! Norm, rotary embedding, activation and residual add against f64.

mod common;

use common::Noise;
use proptest::prelude::*;
use suanpan_ops::{
    Activation, RopeStyle, RopeTable, add_bias, add_into, gated, rms_norm, rms_norm_in_place, rope, softcap,
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rms_norm_is_that_of_f64(rows in 1usize..=300, cols in 1usize..=700, scale in 1e-3f32..1e3, seed in any::<u64>()) {
        let mut noise = Noise(seed);
        let x: Vec<f32> = (0..rows * cols).map(|_| noise.unit() * scale).collect();
        let weight: Vec<f32> = (0..cols).map(|_| noise.unit()).collect();
        let mut out = vec![f32::NAN; x.len()];
        rms_norm(&x, &weight, 1e-5, &mut out, rows, cols);
        for (x, out) in x.chunks(cols).zip(out.chunks(cols)) {
            let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / cols as f64;
            let inv = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
            for i in 0..cols {
                let want = f64::from(x[i]) * inv * f64::from(weight[i]);
                prop_assert!((f64::from(out[i]) - want).abs() <= 1e-6 * want.abs() + 1e-30, "{} for {want}", out[i]);
            }
        }
    }

    #[test]
    fn rope_is_that_of_f64_in_both_styles(
        tokens in 1usize..=80, heads in 1usize..=9, pairs in 1usize..=96, rest in 0usize..=7,
        max in 1usize..=200_000, interleaved in any::<bool>(), seed in any::<u64>(),
    ) {
        let mut noise = Noise(seed);
        let head_dim = 2 * pairs + rest;
        let style = if interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
        let inv_freq: Vec<f64> = (0..pairs).map(|i| 10_000f64.powf(-(i as f64) / pairs as f64)).collect();
        let table = RopeTable::new(&inv_freq, 1.25, max);
        let mut positions: Vec<u32> = (0..tokens).map(|_| (noise.bits() % max as u64) as u32).collect();
        positions[0] = max as u32 - 1;
        let before: Vec<f32> = (0..tokens * heads * head_dim).map(|_| noise.unit()).collect();
        let mut after = before.clone();
        rope(&mut after, heads, head_dim, &positions, &table, style);
        for (h, (x, got)) in before.chunks(head_dim).zip(after.chunks(head_dim)).enumerate() {
            let position = f64::from(positions[h / heads]);
            for i in 0..pairs {
                let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
                let (sin, cos) = (position * inv_freq[i]).sin_cos();
                let (xa, xb) = (f64::from(x[a]), f64::from(x[b]));
                let want = (1.25 * (xa * cos - xb * sin), 1.25 * (xb * cos + xa * sin));
                let error = (f64::from(got[a]) - want.0).abs().max((f64::from(got[b]) - want.1).abs());
                prop_assert!(error < 5e-7, "position {position} pair {i}: {error}");
            }
            prop_assert_eq!(&got[2 * pairs..], &x[2 * pairs..]);
        }
    }

    #[test]
    fn gated_activations_are_those_of_f64(len in 0usize..=70_000, scale in 0.01f32..60.0, seed in any::<u64>()) {
        let mut noise = Noise(seed);
        let gate: Vec<f32> = (0..len).map(|_| noise.unit() * scale).collect();
        let up: Vec<f32> = (0..len).map(|_| noise.unit()).collect();
        let mut out = vec![f32::NAN; len];
        let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        for activation in [Activation::Silu, Activation::GeluTanh, clamped] {
            gated(activation, &gate, &up, &mut out);
            for i in 0..len {
                let (g, u) = (f64::from(gate[i]), f64::from(up[i]));
                let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
                let (arg, want) = match activation {
                    Activation::Silu => (g, g * sigmoid(g) * u),
                    Activation::GeluTanh => {
                        let z = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                        (z, g * sigmoid(z) * u)
                    }
                    Activation::ClampedSwiglu { .. } => {
                        let g = g.min(7.0);
                        (1.702 * g, g * sigmoid(1.702f64 * g) * (u.clamp(-7.0, 7.0) + 1.0))
                    }
                };
                // An exponential's relative error is the absolute one of its argument, and that is rounded; SiLU's is the gate itself.
                let (tolerance, least) = match activation {
                    Activation::Silu => (8e-7, 1e-37),
                    _ => (8e-7 + 3e-7 * arg.abs().min(100.0), 1e-36),
                };
                prop_assert!(
                    (f64::from(out[i]) - want).abs() <= tolerance * want.abs() + least,
                    "{activation:?} {g} {u}: {} for {want}", out[i]
                );
            }
        }
    }

    #[test]
    fn softcap_is_that_of_f64_and_saturates(cap in 0.1f32..100.0, scale in 0.01f32..1000.0, seed in any::<u64>()) {
        let mut noise = Noise(seed);
        let before: Vec<f32> = (0..300).map(|_| noise.unit() * scale).collect();
        let mut x = before.clone();
        softcap(&mut x, cap);
        for (x, b) in x.iter().zip(before) {
            let want = f64::from(cap) * (f64::from(b) / f64::from(cap)).tanh();
            prop_assert!((f64::from(*x) - want).abs() <= 1e-6 * f64::from(cap), "{b}: {x} for {want}");
        }
    }

    #[test]
    fn a_norm_in_place_has_the_bits_of_one_out_of_place(rows in 1usize..=200, cols in 1usize..=300, seed in any::<u64>()) {
        let mut noise = Noise(seed);
        let mut x: Vec<f32> = (0..rows * cols).map(|_| noise.unit()).collect();
        let weight: Vec<f32> = (0..cols).map(|_| noise.unit()).collect();
        let mut out = vec![f32::NAN; x.len()];
        rms_norm(&x, &weight, 1e-5, &mut out, rows, cols);
        rms_norm_in_place(&mut x, &weight, 1e-5);
        prop_assert!(x.iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn a_bias_is_added_to_every_row() {
    let mut out = vec![1.0; 6];
    add_bias(&mut out, &[0.0, 1.0, 2.0]);
    assert_eq!(out, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
}

#[test]
fn silu_of_extreme_values_neither_overflows_nor_hides_a_nan() {
    let gate = [f32::INFINITY, 1e30, 100.0, 88.75, -88.75, -100.0, -1e30, f32::NAN, 0.0, -0.0];
    let mut out = [0.0; 10];
    gated(Activation::Silu, &gate, &[1.0; 10], &mut out);
    assert_eq!(&out[..3], &[f32::INFINITY, 1e30, 100.0]);
    assert!((out[3] - 88.75).abs() < 1e-4);
    for v in &out[4..7] {
        assert!(v.abs() < 1e-30, "{out:?}");
    }
    assert!(out[7].is_nan());
    assert_eq!(&out[8..], &[0.0, 0.0]);
}

#[test]
fn nan_in_one_row_does_not_reach_another_row_of_the_norm() {
    let mut x = vec![1.0f32; 3 * 40];
    x[45] = f32::NAN;
    let mut out = vec![0.0; x.len()];
    rms_norm(&x, &[1.0; 40], 0.0, &mut out, 3, 40);
    assert!(out[40..80].iter().all(|v| v.is_nan()));
    assert!(out[..40].iter().chain(&out[80..]).all(|v| *v == 1.0));
}

#[test]
fn add_into_adds_every_element_once() {
    for len in [0, 1, 15, 17, 40_000] {
        let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let mut out = vec![0.5; len];
        add_into(&mut out, &x);
        assert!(out.iter().enumerate().all(|(i, v)| *v == i as f32 + 0.5), "{len}");
    }
}

#[test]
#[should_panic(expected = "position 8 of 8")]
fn a_position_past_the_table_is_refused() {
    let table = RopeTable::new(&[1.0], 1.0, 8);
    rope(&mut [0.0; 2], 1, 2, &[8], &table, RopeStyle::Half);
}

#[test]
fn a_table_for_a_million_positions_is_small() {
    let inv_freq = vec![1.0; 64];
    assert!(RopeTable::new(&inv_freq, 1.0, 1 << 20).bytes() < 3 << 20);
}
