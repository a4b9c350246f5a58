//! A forward over quantised pages: which sequences become bf16 rows together, and what that takes of the workspace.

use std::ops::Range;

use suanpan_attn::{Limits, Problem};
use suanpan_base::SeqLen;

/// Tokens that are unpacked at a time where more come: enough work for every processor, 128 MB of 8 heads of 128 each of K and V.
const TOKENS: usize = 1 << 16;

/// Keys of the widest tile divide this: rows before the first visible key are left out in steps of it, so that no tile holds any of them.
const STEP: usize = 128;

/// Most tokens of a group: a whole sequence fits.
pub(super) fn tokens_max(limits: Limits) -> usize {
    limits.max_seqlen_k.saturating_mul(limits.max_seqs).min(limits.max_seqlen_k.max(TOKENS))
}

/// Bytes of K and V of a group as bf16.
pub(super) fn bytes(p: &Problem, limits: Limits) -> usize {
    2 * tokens_max(limits)
        .saturating_mul(p.heads.num_kv_heads)
        .saturating_mul(p.heads.head_dim_qk + p.heads.head_dim_v)
}

/// Neighbours whose keys fit together, in order; one group of none where there are no sequences.
pub(super) fn groups(limits: Limits, seqs: &[SeqLen]) -> Vec<Range<usize>> {
    let (most, mut out, mut first, mut sum) = (tokens_max(limits), Vec::new(), 0, 0);
    for (i, s) in seqs.iter().enumerate() {
        if i > first && sum + s.seqlen_k > most {
            out.push(first..i);
            (first, sum) = (i, 0);
        }
        sum += s.seqlen_k;
    }
    out.push(first..seqs.len());
    out
}

/// The first key of a sequence that is unpacked.
pub(super) fn start(p: &Problem, len: SeqLen) -> usize {
    let hull = p.mask.visible_hull(len, 0..len.seqlen_q).run;
    if hull.is_empty() { len.seqlen_k } else { hull.start / STEP * STEP }
}

#[cfg(test)]
mod tests {
    use super::*;
    use suanpan_base::{HeadShape, Mask};

    #[test]
    fn every_sequence_is_in_one_group_and_every_group_fits() {
        let limits = Limits { max_seqs: 64, max_total_q: 1 << 16, max_seqlen_k: 100_000 };
        let of = |lens: &[usize]| {
            let seqs: Vec<SeqLen> = lens.iter().map(|&n| SeqLen::new(1, n)).collect();
            groups(limits, &seqs)
        };
        assert_eq!(of(&[100_000, 1, 99_999, 1, 50_000, 50_000]), [0..1, 1..3, 3..5, 5..6]);
        assert_eq!(of(&[0, 0, 0]), vec![0..3; 1]);
        assert_eq!(of(&[]), vec![0..0; 1]);
    }

    #[test]
    fn keys_before_a_window_are_left_out_in_whole_tiles() {
        let p = Problem::new(HeadShape::new(4, 2, 128), Mask::window(100));
        assert_eq!(start(&p, SeqLen::extend(1000, 10)), 896); // the first row is at 1,000 and sees 901 on
        assert_eq!(start(&Problem::new(p.heads, Mask::CAUSAL), SeqLen::extend(1000, 10)), 0);
        assert_eq!(start(&p, SeqLen::new(0, 50)), 50);
    }
}
