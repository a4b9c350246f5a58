//! The oracle: plain attention in f64 over contiguous slices, written to be read, never to be fast.

use suanpan_base::{HeadShape, Mask, SeqLen};

/// Output and lse of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// `[seqlen_q, num_q_heads, head_dim_v]`.
    pub out: Vec<f64>,
    /// `[num_q_heads, seqlen_q]`, natural log; -inf where a row sees no key.
    pub lse: Vec<f64>,
}

/// What is asked, in f64: `scale · q·k -> softcap -> + ALiBi -> mask`, and the sink joins the denominator.
#[derive(Clone, Copy, Debug)]
pub struct Spec<'a> {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Which keys a row sees.
    pub mask: Mask,
    /// Factor of q·k.
    pub scale: f64,
    /// `cap · tanh(score / cap)`.
    pub softcap: Option<f64>,
    /// `[num_q_heads]`: a key at distance x from the row's own position loses `slope · x`.
    pub alibi_slopes: Option<&'a [f64]>,
    /// `[num_q_heads]`: a logit without a value.
    pub sinks: Option<&'a [f64]>,
}

impl Spec<'_> {
    /// Scale and mask alone.
    pub fn new(heads: HeadShape, mask: Mask, scale: f64) -> Spec<'static> {
        Spec { heads, mask, scale, softcap: None, alibi_slopes: None, sinks: None }
    }

    /// The score of a dot product of row `i`, head `h`, with key `j`.
    pub fn score(&self, len: SeqLen, i: usize, h: usize, j: usize, dot: f64) -> f64 {
        let scaled = self.scale * dot;
        let capped = self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        let distance = (self.mask.centre(len, i) - j as i64).abs() as f64;
        capped - self.alibi_slopes.map_or(0.0, |slopes| slopes[h] * distance)
    }
}

/// Attention of one sequence in f64.
///
/// `q` is `[seqlen_q, num_q_heads, head_dim_qk]`, `k` `[seqlen_k, num_kv_heads, head_dim_qk]`,
/// `v` `[seqlen_k, num_kv_heads, head_dim_v]`. Panics when a slice is shorter than its shape.
pub fn attention_f64(spec: &Spec<'_>, len: SeqLen, q: &[f64], k: &[f64], v: &[f64]) -> Reference {
    let heads = spec.heads;
    let mut out = vec![0.0; len.seqlen_q * heads.num_q_heads * heads.head_dim_v];
    let mut lse = vec![f64::NEG_INFINITY; heads.num_q_heads * len.seqlen_q];
    for i in 0..len.seqlen_q {
        for h in 0..heads.num_q_heads {
            let o = &mut out[(i * heads.num_q_heads + h) * heads.head_dim_v..][..heads.head_dim_v];
            lse[h * len.seqlen_q + i] = attention_row_f64(spec, len, i, h, q, k, v, o);
        }
    }
    Reference { out, lse }
}

/// One row of [`attention_f64`]: query token `i`, query head `h`. Writes `o` (head_dim_v) and returns the lse.
#[rustfmt::skip]
pub fn attention_row_f64(
    spec: &Spec<'_>, len: SeqLen, i: usize, h: usize, q: &[f64], k: &[f64], v: &[f64], o: &mut [f64],
) -> f64 {
    let heads = spec.heads;
    let (dqk, dv, kv_head) = (heads.head_dim_qk, heads.head_dim_v, h / heads.group_size());
    let q_row = &q[(i * heads.num_q_heads + h) * dqk..][..dqk];
    let keys = spec.mask.visible(len, i);
    let first = keys.start;
    let scores: Vec<f64> = keys
        .map(|j| {
            let k_row = &k[(j * heads.num_kv_heads + kv_head) * dqk..][..dqk];
            spec.score(len, i, h, j, q_row.iter().zip(k_row).map(|(a, b)| a * b).sum())
        })
        .collect();
    o.fill(0.0);
    let sink = spec.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[h]);
    let max = scores.iter().copied().fold(sink, f64::max);
    if scores.is_empty() {
        return sink;
    }
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + if sink == f64::NEG_INFINITY { 0.0 } else { (sink - max).exp() };
    for (j, s) in scores.iter().enumerate() {
        let p = (s - max).exp() / sum;
        let v_row = &v[((first + j) * heads.num_kv_heads + kv_head) * dv..][..dv];
        for (o, x) in o.iter_mut().zip(v_row) {
            *o += p * x;
        }
    }
    max + sum.ln()
}

/// Gradients of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceGradients {
    /// `[seqlen_q, num_q_heads, head_dim_qk]`.
    pub dq: Vec<f64>,
    /// `[seqlen_k, num_kv_heads, head_dim_qk]`.
    pub dk: Vec<f64>,
    /// `[seqlen_k, num_kv_heads, head_dim_v]`.
    pub dv: Vec<f64>,
}

/// Gradients of a loss with respect to q, k and v in f64, from its gradients with respect to out and (optionally) lse.
///
/// Shapes as [`attention_f64`]; `d_out` is `[seqlen_q, num_q_heads, head_dim_v]`, `d_lse` `[num_q_heads, seqlen_q]`. A row that sees no
/// key gives and gets nothing. Panics when a slice is shorter than its shape.
#[rustfmt::skip]
pub fn attention_backward_f64(
    heads: HeadShape, mask: Mask, scale: f64, len: SeqLen,
    q: &[f64], k: &[f64], v: &[f64], d_out: &[f64], d_lse: Option<&[f64]>,
) -> ReferenceGradients {
    let (dqk, dv_width, kv_heads) = (heads.head_dim_qk, heads.head_dim_v, heads.num_kv_heads);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let add = |sum: &mut [f64], factor: f64, x: &[f64]| sum.iter_mut().zip(x).for_each(|(s, x)| *s += factor * x);
    let mut dq = vec![0.0; len.seqlen_q * heads.num_q_heads * dqk];
    let mut dk = vec![0.0; len.seqlen_k * kv_heads * dqk];
    let mut dv = vec![0.0; len.seqlen_k * kv_heads * dv_width];
    for (i, h) in (0..len.seqlen_q).flat_map(|i| (0..heads.num_q_heads).map(move |h| (i, h))) {
        let keys = mask.visible(len, i);
        if keys.is_empty() {
            continue;
        }
        let (row, kv_head) = (i * heads.num_q_heads + h, h / heads.group_size());
        let q_row = &q[row * dqk..][..dqk];
        let d_out_row = &d_out[row * dv_width..][..dv_width];
        let k_row = |j: usize| (j * kv_heads + kv_head) * dqk..(j * kv_heads + kv_head + 1) * dqk;
        let v_row = |j: usize| (j * kv_heads + kv_head) * dv_width..(j * kv_heads + kv_head + 1) * dv_width;
        let scores: Vec<f64> = keys.clone().map(|j| scale * dot(q_row, &k[k_row(j)])).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
        let dp: Vec<f64> = keys.clone().map(|j| dot(d_out_row, &v[v_row(j)])).collect();
        // The softmax's own gradient: ds = p (dp - sum p dp); lse's is p.
        let delta = dot(&p, &dp) - d_lse.map_or(0.0, |d| d[h * len.seqlen_q + i]);
        for ((j, p), dp) in keys.zip(&p).zip(&dp) {
            let ds = scale * p * (dp - delta);
            add(&mut dv[v_row(j)], *p, d_out_row);
            add(&mut dk[k_row(j)], ds, q_row);
            add(&mut dq[row * dqk..][..dqk], ds, &k[k_row(j)]);
        }
    }
    ReferenceGradients { dq, dk, dv }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_keys_by_hand() {
        let spec = Spec::new(HeadShape::new(1, 1, 1), Mask::FULL, 1.0);
        let r = attention_f64(&spec, SeqLen::new(1, 2), &[1.0], &[0.0, 3.0f64.ln()], &[4.0, 8.0]);
        assert!((r.out[0] - 7.0).abs() < 1e-12 && (r.lse[0] - 4.0f64.ln()).abs() < 1e-12);
    }

    /// Every gradient by central differences of `sum(w_out · out) + sum(w_lse · lse)`.
    #[test]
    fn gradients_agree_with_finite_differences() {
        let shape =
            |q, kv, dqk, dv| HeadShape { num_q_heads: q, num_kv_heads: kv, head_dim_qk: dqk, head_dim_v: dv };
        let window = Mask { left: Some(1), right: Some(1), ..Mask::FULL };
        let chunked = Mask::chunked(std::num::NonZeroUsize::new(2).unwrap());
        let top_left = Mask { top_left: true, ..Mask::CAUSAL };
        for (mask, heads, len) in [
            (Mask::FULL, shape(2, 2, 3, 3), (3, 4)),
            (Mask::CAUSAL, shape(4, 2, 3, 2), (4, 4)),
            (Mask::CAUSAL, shape(3, 1, 2, 5), (5, 2)),
            (Mask::CAUSAL, shape(2, 1, 4, 1), (2, 6)),
            (Mask::window(2), shape(2, 2, 1, 3), (5, 7)),
            (window, shape(4, 1, 3, 3), (6, 3)),
            (chunked, shape(2, 1, 3, 2), (5, 5)),
            (top_left, shape(2, 2, 2, 3), (3, 5)),
            (Mask::FULL, shape(1, 1, 2, 2), (2, 0)),
        ] {
            let len = SeqLen::new(len.0, len.1);
            let mut x = 0.37f64;
            let mut numbers = |n: usize| -> Vec<f64> {
                (0..n)
                    .map(|_| {
                        x = (x * 997.13).fract();
                        2.0 * x - 1.0
                    })
                    .collect()
            };
            let rows = len.seqlen_q * heads.num_q_heads;
            let mut inputs = [
                numbers(rows * heads.head_dim_qk),
                numbers(len.seqlen_k * heads.num_kv_heads * heads.head_dim_qk),
                numbers(len.seqlen_k * heads.num_kv_heads * heads.head_dim_v),
            ];
            let (w_out, w_lse) = (numbers(rows * heads.head_dim_v), numbers(rows));
            let loss = |x: &[Vec<f64>; 3]| -> f64 {
                let r = attention_f64(&Spec::new(heads, mask, 0.7), len, &x[0], &x[1], &x[2]);
                let out: f64 = r.out.iter().zip(&w_out).map(|(o, w)| o * w).sum();
                out + r.lse.iter().zip(&w_lse).filter(|(l, _)| l.is_finite()).map(|(l, w)| l * w).sum::<f64>()
            };
            let [q, k, v] = &inputs;
            let g = attention_backward_f64(heads, mask, 0.7, len, q, k, v, &w_out, Some(&w_lse));
            for (which, gradient) in [g.dq, g.dk, g.dv].iter().enumerate() {
                for at in 0..gradient.len() {
                    const STEP: f64 = 1e-5;
                    let x = inputs[which][at];
                    inputs[which][at] = x + STEP;
                    let above = loss(&inputs);
                    inputs[which][at] = x - STEP;
                    let below = loss(&inputs);
                    inputs[which][at] = x;
                    let slope = (above - below) / (2.0 * STEP);
                    // Truncation is STEP² times a third derivative of order 1; rounding 1e-16 / STEP.
                    let error = (slope - gradient[at]).abs();
                    assert!(
                        error < 1e-8,
                        "{mask} {heads:?} {len:?} input {which} at {at}: {} for {slope}",
                        gradient[at]
                    );
                }
            }
        }
    }

    #[test]
    fn softcap_alibi_and_sink_by_hand() {
        let plain = Spec::new(HeadShape::new(1, 1, 1), Mask::FULL, 1.0);
        let spec = Spec { softcap: Some(2.0), alibi_slopes: Some(&[0.5]), sinks: Some(&[0.25]), ..plain };
        // The one row stands on key 1; key 0 is one step away.
        let r = attention_f64(&spec, SeqLen::new(1, 2), &[1.0], &[3.0, -1.0], &[4.0, 8.0]);
        let (a, b) = (2.0 * 1.5f64.tanh() - 0.5, 2.0 * (-0.5f64).tanh());
        let sum = a.exp() + b.exp() + 0.25f64.exp();
        assert!((r.out[0] - (4.0 * a.exp() + 8.0 * b.exp()) / sum).abs() < 1e-12);
        assert!((r.lse[0] - sum.ln()).abs() < 1e-12);
    }

    #[test]
    fn a_row_without_keys_is_zero_with_lse_minus_infinity() {
        let spec = Spec::new(HeadShape::new(1, 1, 1), Mask::CAUSAL, 1.0);
        let r = attention_f64(&spec, SeqLen::new(2, 1), &[1.0, 1.0], &[0.0], &[5.0]);
        assert_eq!((r.out[0], r.lse[0], r.out[1]), (0.0, f64::NEG_INFINITY, 5.0));
    }
}
