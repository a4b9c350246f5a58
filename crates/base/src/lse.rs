//! The definition of a partial attention result (o, lse) and of its merge; every split, cascade and ring step uses this one.
//!
//! `lse` is the **natural** log of the sum of exp(score) over the keys seen so far; `o` is already normalised by that sum.
//! Empty row: `lse = -inf`, `o = 0`. Merge (FlashAttention-2, section 3.1; Flash-Decoding):
//! `lse = log(exp(a) + exp(b))`, `o = o_a * exp(a - lse) + o_b * exp(b - lse)`.

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

#[cfg(test)]
mod tests {
    use super::*;

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
