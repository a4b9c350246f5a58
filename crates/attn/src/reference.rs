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

/// Attention of one sequence in f64.
///
/// `q` is `[seqlen_q, num_q_heads, head_dim_qk]`, `k` `[seqlen_k, num_kv_heads, head_dim_qk]`,
/// `v` `[seqlen_k, num_kv_heads, head_dim_v]`. Panics when a slice is shorter than its shape.
pub fn attention_f64(
    heads: HeadShape,
    mask: Mask,
    scale: f64,
    len: SeqLen,
    q: &[f64],
    k: &[f64],
    v: &[f64],
) -> Reference {
    let mut out = vec![0.0; len.seqlen_q * heads.num_q_heads * heads.head_dim_v];
    let mut lse = vec![f64::NEG_INFINITY; heads.num_q_heads * len.seqlen_q];
    for i in 0..len.seqlen_q {
        for h in 0..heads.num_q_heads {
            let o = &mut out[(i * heads.num_q_heads + h) * heads.head_dim_v..][..heads.head_dim_v];
            lse[h * len.seqlen_q + i] = attention_row_f64(heads, mask, scale, len, i, h, q, k, v, o);
        }
    }
    Reference { out, lse }
}

/// One row of [`attention_f64`]: query token `i`, query head `h`. Writes `o` (head_dim_v) and returns the lse.
#[rustfmt::skip]
pub fn attention_row_f64(
    heads: HeadShape, mask: Mask, scale: f64, len: SeqLen, i: usize, h: usize,
    q: &[f64], k: &[f64], v: &[f64], o: &mut [f64],
) -> f64 {
    let (dqk, dv, kv_head) = (heads.head_dim_qk, heads.head_dim_v, h / heads.group_size());
    let q_row = &q[(i * heads.num_q_heads + h) * dqk..][..dqk];
    let keys = mask.visible(len, i);
    let first = keys.start;
    let scores: Vec<f64> = keys
        .map(|j| {
            let k_row = &k[(j * heads.num_kv_heads + kv_head) * dqk..][..dqk];
            scale * q_row.iter().zip(k_row).map(|(a, b)| a * b).sum::<f64>()
        })
        .collect();
    o.fill(0.0);
    if scores.is_empty() {
        return f64::NEG_INFINITY;
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    for (j, s) in scores.iter().enumerate() {
        let p = (s - max).exp() / sum;
        let v_row = &v[((first + j) * heads.num_kv_heads + kv_head) * dv..][..dv];
        for (o, x) in o.iter_mut().zip(v_row) {
            *o += p * x;
        }
    }
    max + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_keys_by_hand() {
        let heads = HeadShape::new(1, 1, 1);
        let r = attention_f64(
            heads,
            Mask::FULL,
            1.0,
            SeqLen::new(1, 2),
            &[1.0],
            &[0.0, 3.0f64.ln()],
            &[4.0, 8.0],
        );
        assert!((r.out[0] - 7.0).abs() < 1e-12 && (r.lse[0] - 4.0f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn a_row_without_keys_is_zero_with_lse_minus_infinity() {
        let r = attention_f64(
            HeadShape::new(1, 1, 1),
            Mask::CAUSAL,
            1.0,
            SeqLen::new(2, 1),
            &[1.0, 1.0],
            &[0.0],
            &[5.0],
        );
        assert_eq!((r.out[0], r.lse[0], r.out[1]), (0.0, f64::NEG_INFINITY, 5.0));
    }
}
