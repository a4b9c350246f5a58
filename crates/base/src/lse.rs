//! The definition of a partial attention result (o, lse) and of its merge; every split, cascade and ring step uses this one.
//!
//! `lse` is the **natural** log of the sum of exp(score) over the keys seen so far; `o` is already normalised by that sum.
//! Empty row: `lse = -inf`, `o = 0`. Merge (FlashAttention-2, section 3.1; Flash-Decoding):
//! `lse = log(exp(a) + exp(b))`, `o = o_a * exp(a - lse) + o_b * exp(b - lse)`.

use crate::order_free;

/// lse of a row that saw no key.
pub const EMPTY_LSE: f32 = f32::NEG_INFINITY;

/// Weights of two partial rows and the merged lse: `(lse, weight_a, weight_b)`.
///
/// Two empty rows stay empty with weights 0, so that a merge never makes NaN out of -inf - -inf.
pub fn merge_weights(lse_a: f32, lse_b: f32) -> (f32, f32, f32) {
    let max = lse_a.max(lse_b);
    if max == EMPTY_LSE {
        return (EMPTY_LSE, 0.0, 0.0);
    }
    let (ea, eb) = ((lse_a - max).exp(), (lse_b - max).exp());
    let sum = ea + eb;
    (max + sum.ln(), ea / sum, eb / sum)
}

/// Merges the partial row `(other, other_lse)` into `(out, lse)`. `out` and `other` hold head_dim_v elements.
pub fn merge_into(out: &mut [f32], lse: &mut f32, other: &[f32], other_lse: f32) {
    assert_eq!(out.len(), other.len(), "rows of one merge have one width");
    let (merged, wa, wb) = merge_weights(*lse, other_lse);
    for (o, &x) in out.iter_mut().zip(other) {
        // A zero weight must not let the other side's bytes through (0 * NaN is NaN).
        let a = if wa == 0.0 { 0.0 } else { *o * wa };
        let b = if wb == 0.0 { 0.0 } else { x * wb };
        *o = a + b;
    }
    *lse = merged;
}

/// Merges the partial row `(other, other_lse)` into `(out, lse)` where many merges follow each other: an lse is the sum of two floats, high
/// and low, so that merging rounds it no more than the kernels do, and weights are taken in f64.
pub fn merge_pair_into(out: &mut [f32], lse: &mut [f32], other: &[f32], other_lse: [f32; 2]) {
    assert_eq!(out.len(), other.len(), "rows of one merge have one width");
    let wide = |pair: &[f32]| f64::from(pair[0]) + f64::from(pair[1]);
    let (a, b) = (wide(lse), wide(&other_lse));
    let max = a.max(b);
    if max == f64::NEG_INFINITY {
        out.fill(0.0);
        return;
    }
    let (ea, eb) = ((a - max).exp(), (b - max).exp());
    let (sum, merged) = (ea + eb, max + (ea + eb).ln());
    for (o, &x) in out.iter_mut().zip(other) {
        let a = if ea == 0.0 { 0.0 } else { f64::from(*o) * ea };
        let b = if eb == 0.0 { 0.0 } else { f64::from(x) * eb };
        *o = ((a + b) / sum) as f32;
    }
    lse[0] = merged as f32;
    lse[1] = if lse[0].is_finite() { (merged - f64::from(lse[0])) as f32 } else { 0.0 };
}

/// Adds a partial row to sums that do not depend on the order of parts: `numerators` (a row of [`order_free`] of the output's width) gets
/// `o · exp(lse)`, `denominator` (of one number) gets `exp(lse)`.
pub fn add_order_free(numerators: &mut [f32], denominator: &mut [f32], out: &[f32], lse: f32) {
    if lse == EMPTY_LSE {
        return;
    }
    let log2 = f64::from(lse) * std::f64::consts::LOG2_E;
    let exponent = log2.floor();
    let factor = (log2 - exponent).exp2();
    order_free::add(numerators, out, factor, exponent as i64);
    order_free::add(denominator, &[1.0], factor, exponent as i64);
}

/// What the sums of [`add_order_free`] come to: writes the output, returns lse.
pub fn order_free_result(numerators: &[f32], denominator: &[f32], out: &mut [f32]) -> f32 {
    let (Some(down), Some(sum)) = (order_free::exponent(denominator), order_free::sums(denominator).next())
    else {
        out.fill(0.0);
        return EMPTY_LSE;
    };
    let up = order_free::exponent(numerators).unwrap_or(down);
    for (o, number) in out.iter_mut().zip(order_free::sums(numerators)) {
        *o = order_free::times_power(number / sum, up - down) as f32;
    }
    (sum.ln() + down as f64 * std::f64::consts::LN_2) as f32
}

/// The row with a sink joined: a key of logit `sink` and value 0, once, after the last merge.
pub fn join_sink(out: &mut [f32], lse: &mut f32, sink: f32) {
    let (joined, stays, _) = merge_weights(*lse, sink);
    out.iter_mut().for_each(|o| *o = if stays == 0.0 { 0.0 } else { *o * stays });
    *lse = joined;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_merges_round_lse_like_one() {
        // Parts of one key each: the exact lse is ln(sum of exp).
        let scores: Vec<f32> = (0..100).map(|i| ((i * 37) % 100) as f32 / 17.0).collect();
        let exact = scores.iter().map(|s| f64::from(*s).exp()).sum::<f64>().ln();
        let (mut o, mut pair) = (vec![0.0], vec![EMPTY_LSE, 0.0]);
        scores.iter().for_each(|&s| merge_pair_into(&mut o, &mut pair, &[1.0], [s, 0.0]));
        assert!((f64::from(pair[0]) + f64::from(pair[1]) - exact).abs() < 1e-12);
        assert_eq!(o, [1.0]);
        merge_pair_into(&mut o, &mut pair, &[f32::NAN], [EMPTY_LSE, 0.0]);
        assert_eq!(o, [1.0], "an empty row lets nothing through");
        let (mut o, mut pair) = (vec![f32::NAN], vec![EMPTY_LSE, 0.0]);
        merge_pair_into(&mut o, &mut pair, &[f32::NAN], [EMPTY_LSE, 0.0]);
        assert_eq!((o[0], pair[0]), (0.0, EMPTY_LSE));
    }

    #[test]
    fn order_free_parts_are_one_softmax_in_any_order() {
        let parts: Vec<([f32; 2], f32)> = (0..9)
            .map(|i| ([i as f32 - 3.0, 1.0 / (i + 1) as f32], (i * 5 % 9) as f32 * 3.0 - 9.0))
            .collect();
        let run = |parts: &[([f32; 2], f32)]| {
            let (mut n, mut d) = (vec![0.0; order_free::words(2)], vec![0.0; order_free::words(1)]);
            order_free::clear(&mut n);
            order_free::clear(&mut d);
            add_order_free(&mut n, &mut d, &[f32::NAN; 2], EMPTY_LSE);
            parts.iter().for_each(|(o, l)| add_order_free(&mut n, &mut d, o, *l));
            let mut out = [7.0; 2];
            let lse = order_free_result(&n, &d, &mut out);
            (out, lse)
        };
        let sum: f64 = parts.iter().map(|(_, l)| f64::from(*l).exp()).sum();
        let want =
            |i: usize| parts.iter().map(|(o, l)| f64::from(o[i]) * f64::from(*l).exp()).sum::<f64>() / sum;
        let (out, lse) = run(&parts);
        assert!((f64::from(lse) - sum.ln()).abs() < 1e-6);
        (0..2).for_each(|i| assert!((f64::from(out[i]) - want(i)).abs() < 1e-6, "{out:?}"));
        let reversed: Vec<_> = parts.iter().rev().copied().collect();
        assert_eq!(run(&reversed), (out, lse));
        assert_eq!(run(&[]), ([0.0; 2], EMPTY_LSE));
        // A far larger lse leaves nothing of the rest.
        assert_eq!(run(&[parts[0], ([2.0, 3.0], 1.4e11)]), ([2.0, 3.0], 1.4e11));
    }

    #[test]
    fn a_sink_takes_its_share() {
        let (mut o, mut lse) = (vec![4.0], 0.0);
        join_sink(&mut o, &mut lse, 0.0);
        assert_eq!((o[0], lse), (2.0, std::f32::consts::LN_2));
        let (mut o, mut lse) = (vec![4.0], 1.0);
        join_sink(&mut o, &mut lse, EMPTY_LSE);
        assert_eq!((o[0], lse), (4.0, 1.0));
    }

    #[test]
    fn empty_rows_are_neutral_on_both_sides() {
        let (mut o, mut lse) = (vec![3.0, 4.0], 1.5);
        merge_into(&mut o, &mut lse, &[f32::NAN, 0.0], EMPTY_LSE);
        assert_eq!((o.as_slice(), lse), ([3.0, 4.0].as_slice(), 1.5));
        let (mut o, mut lse) = (vec![f32::NAN, 0.0], EMPTY_LSE);
        merge_into(&mut o, &mut lse, &[3.0, 4.0], 1.5);
        assert_eq!((o.as_slice(), lse), ([3.0, 4.0].as_slice(), 1.5));
        let (mut o, mut lse) = (vec![7.0], EMPTY_LSE);
        merge_into(&mut o, &mut lse, &[9.0], EMPTY_LSE);
        assert_eq!((o[0], lse), (0.0, EMPTY_LSE));
    }

    #[test]
    fn extreme_lse_values_stay_finite() {
        let (mut o, mut lse) = (vec![1.0], -90000.0);
        merge_into(&mut o, &mut lse, &[5.0], -90600.0);
        assert_eq!((o[0], lse), (1.0, -90000.0));
        let (l, a, b) = merge_weights(1.417_67e11, 1.417_67e11);
        assert!(l.is_finite() && a == 0.5 && b == 0.5);
    }

    #[test]
    fn merging_equals_one_softmax_over_both_halves() {
        let (scores, values) = ([0.3f32, -1.2, 2.0, 0.7], [1.0f32, 2.0, 3.0, 4.0]);
        let part = |r: std::ops::Range<usize>| {
            let sum: f32 = scores[r.clone()].iter().map(|s| s.exp()).sum();
            let o: f32 = r.map(|i| scores[i].exp() * values[i]).sum::<f32>() / sum;
            (o, sum.ln())
        };
        let (whole, (a, la), (b, lb)) = (part(0..4), part(0..1), part(1..4));
        let (mut o, mut lse) = (vec![a], la);
        merge_into(&mut o, &mut lse, &[b], lb);
        assert!((o[0] - whole.0).abs() < 1e-6 && (lse - whole.1).abs() < 1e-6);
    }
}
