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

/// A number, or a yes, for each query head, query token and key.
pub type OfPair<'a, T> = Option<&'a dyn Fn(usize, usize, usize) -> T>;

/// What is asked, in f64: `scale · q·k -> softcap -> + bias, ALiBi -> mask`, the sink joins the denominator, and dropout multiplies weights.
#[derive(Clone, Copy)]
pub struct Spec<'a> {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Which keys a row sees.
    pub mask: Mask,
    /// Pairs of the mask that are hidden all the same.
    pub hidden: OfPair<'a, bool>,
    /// Factor of q·k.
    pub scale: f64,
    /// `cap · tanh(score / cap)`.
    pub softcap: Option<f64>,
    /// A number added to each score.
    pub bias: OfPair<'a, f64>,
    /// `[num_q_heads]`: a key at distance x from the row's own position loses `slope · x`.
    pub alibi_slopes: Option<&'a [f64]>,
    /// `[num_q_heads]`: a logit without a value.
    pub sinks: Option<&'a [f64]>,
    /// What each weight is multiplied by before it meets its value; lse does not see it.
    pub dropout: OfPair<'a, f64>,
}

impl Spec<'_> {
    /// Scale and mask alone.
    pub fn new(heads: HeadShape, mask: Mask, scale: f64) -> Spec<'static> {
        Spec {
            heads,
            mask,
            hidden: None,
            scale,
            softcap: None,
            bias: None,
            alibi_slopes: None,
            sinks: None,
            dropout: None,
        }
    }

    /// The keys that row `i` sees under head `h`.
    pub fn keys(&self, len: SeqLen, i: usize, h: usize) -> Vec<usize> {
        self.mask
            .visible(len, i)
            .keys()
            .filter(|&j| self.hidden.is_none_or(|hidden| !hidden(h, i, j)))
            .collect()
    }

    /// The score of a dot product of row `i`, head `h`, with key `j`.
    pub fn score(&self, len: SeqLen, i: usize, h: usize, j: usize, dot: f64) -> f64 {
        let scaled = self.scale * dot;
        let capped = self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        let distance = (self.mask.centre(len, i) - j as i64).abs() as f64;
        let biased = capped + self.bias.map_or(0.0, |bias| bias(h, i, j));
        biased - self.alibi_slopes.map_or(0.0, |slopes| slopes[h] * distance)
    }

    /// The factor of the weight of row `i`, head `h`, at key `j`.
    fn kept(&self, i: usize, h: usize, j: usize) -> f64 {
        self.dropout.map_or(1.0, |dropout| dropout(h, i, j))
    }
}

/// Weights of scores beside a sink (-inf for none), and the lse.
fn softmax(scores: &[f64], sink: f64) -> (Vec<f64>, f64) {
    let max = scores.iter().copied().fold(sink, f64::max);
    if scores.is_empty() || max == f64::NEG_INFINITY {
        // Nothing but -inf: no weight at all, unless a NaN hides among the scores, which no maximum takes up.
        let weight = if scores.iter().any(|s| s.is_nan()) { f64::NAN } else { 0.0 };
        return (vec![weight; scores.len()], if weight == 0.0 { sink } else { weight });
    }
    let e: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum = e.iter().sum::<f64>() + if sink == f64::NEG_INFINITY { 0.0 } else { (sink - max).exp() };
    (e.iter().map(|e| e / sum).collect(), max + sum.ln())
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
    let keys = spec.keys(len, i, h);
    let scores: Vec<f64> = keys
        .iter()
        .map(|&j| {
            let k_row = &k[(j * heads.num_kv_heads + kv_head) * dqk..][..dqk];
            spec.score(len, i, h, j, q_row.iter().zip(k_row).map(|(a, b)| a * b).sum())
        })
        .collect();
    o.fill(0.0);
    let (weights, lse) = softmax(&scores, spec.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[h]));
    for (&j, p) in keys.iter().zip(weights) {
        let p = p * spec.kept(i, h, j);
        let v_row = &v[(j * heads.num_kv_heads + kv_head) * dv..][..dv];
        for (o, x) in o.iter_mut().zip(v_row) {
            *o += p * x;
        }
    }
    lse
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
    /// `[num_q_heads, seqlen_q, seqlen_k]`: of an additive bias that is a number a pair.
    pub d_bias: Vec<f64>,
    /// `[num_q_heads]`.
    pub d_sinks: Vec<f64>,
}

/// Gradients of a loss with respect to q, k, v, bias and sinks in f64, from its gradients with respect to out and (optionally) lse.
///
/// Shapes as [`attention_f64`]; `d_out` is `[seqlen_q, num_q_heads, head_dim_v]`, `d_lse` `[num_q_heads, seqlen_q]`. A row that sees no
/// key gives and gets nothing. Panics when a slice is shorter than its shape.
#[rustfmt::skip]
pub fn attention_backward_f64(
    spec: &Spec<'_>, len: SeqLen, q: &[f64], k: &[f64], v: &[f64], d_out: &[f64], d_lse: Option<&[f64]>,
) -> ReferenceGradients {
    let heads = spec.heads;
    let (dqk, dv_width, kv_heads) = (heads.head_dim_qk, heads.head_dim_v, heads.num_kv_heads);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let add = |sum: &mut [f64], factor: f64, x: &[f64]| sum.iter_mut().zip(x).for_each(|(s, x)| *s += factor * x);
    let mut dq = vec![0.0; len.seqlen_q * heads.num_q_heads * dqk];
    let mut dk = vec![0.0; len.seqlen_k * kv_heads * dqk];
    let mut dv = vec![0.0; len.seqlen_k * kv_heads * dv_width];
    let mut d_bias = vec![0.0; heads.num_q_heads * len.seqlen_q * len.seqlen_k];
    let mut d_sinks = vec![0.0; heads.num_q_heads];
    for (i, h) in (0..len.seqlen_q).flat_map(|i| (0..heads.num_q_heads).map(move |h| (i, h))) {
        let keys = spec.keys(len, i, h);
        let (row, kv_head) = (i * heads.num_q_heads + h, h / heads.group_size());
        let q_row = &q[row * dqk..][..dqk];
        let d_out_row = &d_out[row * dv_width..][..dv_width];
        let k_row = |j: usize| (j * kv_heads + kv_head) * dqk..(j * kv_heads + kv_head + 1) * dqk;
        let v_row = |j: usize| (j * kv_heads + kv_head) * dv_width..(j * kv_heads + kv_head + 1) * dv_width;
        let dots: Vec<f64> = keys.iter().map(|&j| dot(q_row, &k[k_row(j)])).collect();
        let scores: Vec<f64> = keys.iter().zip(&dots).map(|(&j, dot)| spec.score(len, i, h, j, *dot)).collect();
        let sink = spec.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[h]);
        let (p, lse) = softmax(&scores, sink);
        let dp: Vec<f64> = keys.iter().map(|&j| spec.kept(i, h, j) * dot(d_out_row, &v[v_row(j)])).collect();
        // The softmax's own gradient: ds = p (dp - sum p dp); lse's is p.
        let delta = dot(&p, &dp) - d_lse.map_or(0.0, |d| d[h * len.seqlen_q + i]);
        if sink > f64::NEG_INFINITY {
            d_sinks[h] -= (sink - lse).exp() * delta;
        }
        for (at, &j) in keys.iter().enumerate() {
            let ds = p[at] * (dp[at] - delta);
            d_bias[(h * len.seqlen_q + i) * len.seqlen_k + j] = ds;
            // d/dx cap tanh(x / cap) = 1 - tanh²(x / cap).
            let bend = spec.softcap.map_or(1.0, |cap| 1.0 - (spec.scale * dots[at] / cap).tanh().powi(2));
            let ds = ds * bend * spec.scale;
            add(&mut dv[v_row(j)], p[at] * spec.kept(i, h, j), d_out_row);
            add(&mut dk[k_row(j)], ds, q_row);
            add(&mut dq[row * dqk..][..dqk], ds, &k[k_row(j)]);
        }
    }
    ReferenceGradients { dq, dk, dv, d_bias, d_sinks }
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
        let shape = HeadShape::with_widths;
        let window = Mask { left: Some(1), right: Some(1), ..Mask::FULL };
        let chunked = Mask::chunked(std::num::NonZeroUsize::new(2).unwrap());
        let top_left = Mask { top_left: true, ..Mask::CAUSAL };
        for (n, (mask, heads, len)) in [
            (Mask::FULL, shape(2, 2, 3, 3), (3, 4)),
            (Mask::CAUSAL, shape(4, 2, 3, 2), (4, 4)),
            (Mask::CAUSAL, shape(3, 1, 2, 5), (5, 2)),
            (Mask::CAUSAL, shape(2, 1, 4, 1), (2, 6)),
            (Mask::window(2), shape(2, 2, 1, 3), (5, 7)),
            (window, shape(4, 1, 3, 3), (6, 3)),
            (chunked, shape(2, 1, 3, 2), (5, 5)),
            (top_left, shape(2, 2, 2, 3), (3, 5)),
            (Mask::streaming(1, 2), shape(2, 1, 2, 2), (4, 6)),
            (Mask::FULL, shape(1, 1, 2, 2), (2, 0)),
        ]
        .into_iter()
        .enumerate()
        {
            for features in 0..2 {
                finite_differences(n, mask, heads, SeqLen::new(len.0, len.1), features == 1);
            }
        }
    }

    /// All gradients of one problem: plain, or with every feature that has or bends one.
    fn finite_differences(n: usize, mask: Mask, heads: HeadShape, len: SeqLen, features: bool) {
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
            numbers(rows * len.seqlen_k),
            numbers(heads.num_q_heads),
        ];
        let (w_out, w_lse) = (numbers(rows * heads.head_dim_v), numbers(rows));
        let slopes: Vec<f64> = (0..heads.num_q_heads).map(|h| 0.3 * h as f64).collect();
        let hidden = |h: usize, i: usize, j: usize| (h + 2 * i + 3 * j + n).is_multiple_of(5);
        let dropout = |h: usize, i: usize, j: usize| if (h + i + j).is_multiple_of(3) { 0.0 } else { 1.5 };
        let at = |h: usize, i: usize, j: usize| (h * len.seqlen_q + i) * len.seqlen_k + j;
        let with_spec = |x: &[Vec<f64>; 5], look: &mut dyn FnMut(&Spec<'_>)| {
            let plain = Spec::new(heads, mask, 0.7);
            let bias = |h: usize, i: usize, j: usize| x[3][at(h, i, j)];
            look(&if features {
                Spec {
                    hidden: Some(&hidden),
                    softcap: Some(0.8),
                    bias: Some(&bias),
                    alibi_slopes: Some(&slopes),
                    sinks: Some(&x[4]),
                    dropout: Some(&dropout),
                    ..plain
                }
            } else {
                plain
            });
        };
        let loss = |x: &[Vec<f64>; 5]| -> f64 {
            let mut total = 0.0;
            with_spec(x, &mut |spec| {
                let r = attention_f64(spec, len, &x[0], &x[1], &x[2]);
                total = r.out.iter().zip(&w_out).map(|(o, w)| o * w).sum::<f64>();
                total +=
                    r.lse.iter().zip(&w_lse).filter(|(l, _)| l.is_finite()).map(|(l, w)| l * w).sum::<f64>();
            });
            total
        };
        let mut gradients = None;
        with_spec(&inputs, &mut |spec| {
            let [q, k, v, ..] = &inputs;
            gradients = Some(attention_backward_f64(spec, len, q, k, v, &w_out, Some(&w_lse)));
        });
        let g = gradients.unwrap();
        let count = if features { 5 } else { 3 };
        for (which, gradient) in [g.dq, g.dk, g.dv, g.d_bias, g.d_sinks].iter().enumerate().take(count) {
            compare(&mut inputs, which, gradient, &loss, &format!("{mask} {heads:?} {len:?}"));
        }
    }

    /// One gradient against central differences of `loss`.
    fn compare(
        inputs: &mut [Vec<f64>; 5],
        which: usize,
        gradient: &[f64],
        loss: &impl Fn(&[Vec<f64>; 5]) -> f64,
        what: &str,
    ) {
        const STEP: f64 = 1e-5;
        for (at, g) in gradient.iter().enumerate() {
            let x = inputs[which][at];
            inputs[which][at] = x + STEP;
            let above = loss(inputs);
            inputs[which][at] = x - STEP;
            let below = loss(inputs);
            inputs[which][at] = x;
            let slope = (above - below) / (2.0 * STEP);
            // Truncation is STEP² times a third derivative of order 1; rounding 1e-16 / STEP.
            assert!((slope - g).abs() < 1e-8, "{what} input {which} at {at}: {g} for {slope}");
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
