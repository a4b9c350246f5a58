//! Which keys a query row may see, as intervals of key positions.
//!
//! Alignment is bottom-right: the last query row stands on the last key. Row `i` of `seqlen_q` has the centre
//! `c = seqlen_k - seqlen_q + i` and sees keys `c - left ..= c + right`, clipped to `0 .. seqlen_k`.

use std::fmt;
use std::ops::Range;

use crate::shape::SeqLen;

/// Visibility by distance from the row's own position; `None` = unbounded on that side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Mask {
    /// Keys before the centre that stay visible (window W: `Some(W - 1)`).
    pub left: Option<usize>,
    /// Keys after the centre that stay visible (causal: `Some(0)`).
    pub right: Option<usize>,
}

impl Mask {
    /// Every row sees every key.
    pub const FULL: Mask = Mask { left: None, right: None };
    /// Row `i` sees keys `0 ..= seqlen_k - seqlen_q + i`.
    pub const CAUSAL: Mask = Mask { left: None, right: Some(0) };

    /// Causal with a window of `window` keys, the row's own included. `window` must be at least 1.
    pub const fn window(window: usize) -> Mask {
        assert!(window >= 1, "a window counts the current token");
        Mask { left: Some(window - 1), right: Some(0) }
    }

    /// Key positions visible to row `i`; empty (start = end) where there is none.
    pub fn visible(&self, len: SeqLen, i: usize) -> Range<usize> {
        // Signed: with seqlen_q > seqlen_k the first rows stand before key 0.
        let centre = len.seqlen_k as i64 - len.seqlen_q as i64 + i as i64;
        let clip = |x: i64| x.clamp(0, len.seqlen_k as i64) as usize;
        let start = self.left.map_or(0, |l| clip(centre.saturating_sub(l.min(i64::MAX as usize) as i64)));
        let end = self.right.map_or(len.seqlen_k, |r| {
            clip(centre.saturating_add(r.min(i64::MAX as usize) as i64).saturating_add(1))
        });
        start.min(end)..end
    }

    /// Key positions visible to at least one row of `rows` (a hull: the rows' intervals overlap or touch unless empty).
    pub fn visible_hull(&self, len: SeqLen, rows: Range<usize>) -> Range<usize> {
        if rows.is_empty() {
            return 0..0;
        }
        let first = self.visible(len, rows.start);
        let last = self.visible(len, rows.end - 1);
        // Starts and ends both grow with the row, so the hull is first.start .. last.end; an all-empty hull collapses.
        let start = first.start.min(last.end);
        start..last.end
    }

    /// Visible (query, key) pairs of one sequence, exactly, in O(1).
    pub fn visible_pairs(&self, len: SeqLen) -> u64 {
        let ends = sum_clipped(len, self.right.map(|r| r as i128 + 1));
        let starts = sum_clipped(len, self.left.map(|l| -(l as i128)));
        let ends = ends.unwrap_or(len.seqlen_q as u128 * len.seqlen_k as u128);
        (ends - starts.unwrap_or(0)) as u64
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.left, self.right) {
            (None, None) => f.write_str("full"),
            (None, Some(0)) => f.write_str("causal"),
            (Some(left), Some(0)) => write!(f, "window {}", left.saturating_add(1)),
            (left, right) => {
                let side = |n: Option<usize>| n.map_or("all".to_string(), |n| n.to_string());
                write!(f, "{} keys left, {} right", side(left), side(right))
            }
        }
    }
}

/// Sum over rows of `clamp(centre + shift, 0, seqlen_k)`, or None for an unbounded side.
fn sum_clipped(len: SeqLen, shift: Option<i128>) -> Option<u128> {
    let shift = shift?;
    let (q, k) = (len.seqlen_q as i128, len.seqlen_k as i128);
    // Row i contributes clamp(base + i, 0, k), base = k - q + shift.
    let base = k - q + shift;
    // Rows with base + i <= 0 give 0; rows with base + i >= k give k; between them an arithmetic series.
    let first_pos = (1 - base).clamp(0, q);
    let first_full = (k - base).clamp(first_pos, q);
    let n = first_full - first_pos;
    let series = n * (base + first_pos) + n * (n - 1) / 2;
    Some((series + (q - first_full) * k) as u128)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASKS: [Mask; 6] = [
        Mask::FULL,
        Mask::CAUSAL,
        Mask::window(1),
        Mask::window(3),
        Mask { left: Some(2), right: Some(2) },
        Mask { left: None, right: Some(3) },
    ];

    #[test]
    fn closed_form_pairs_equal_the_count_over_rows() {
        for mask in MASKS {
            for q in 0..9 {
                for k in 0..9 {
                    let len = SeqLen::new(q, k);
                    let counted: usize = (0..q).map(|i| mask.visible(len, i).len()).sum();
                    assert_eq!(mask.visible_pairs(len), counted as u64, "{mask:?} q {q} k {k}");
                }
            }
        }
    }

    #[test]
    fn causal_is_bottom_right_aligned() {
        let len = SeqLen::new(4, 2);
        let rows: Vec<_> = (0..4).map(|i| Mask::CAUSAL.visible(len, i).len()).collect();
        assert_eq!(rows, [0, 0, 1, 2]);
        assert_eq!(Mask::CAUSAL.visible(SeqLen::new(2, 5), 0), 0..4);
    }

    #[test]
    fn hull_covers_exactly_the_union_of_rows() {
        for mask in MASKS {
            for q in 1..7 {
                for k in 0..7 {
                    let len = SeqLen::new(q, k);
                    for a in 0..q {
                        for b in a + 1..=q {
                            let hull = mask.visible_hull(len, a..b);
                            let rows: Vec<_> =
                                (a..b).map(|i| mask.visible(len, i)).filter(|r| !r.is_empty()).collect();
                            let lo = rows.iter().map(|r| r.start).min();
                            let hi = rows.iter().map(|r| r.end).max();
                            match (lo, hi) {
                                (Some(lo), Some(hi)) => assert!(
                                    hull.end == hi && hull.start <= lo && lo - hull.start <= b - a,
                                    "{mask:?} {len:?} {a}..{b}: {hull:?} for {lo}..{hi}"
                                ),
                                _ => assert!(hull.is_empty(), "{mask:?} {len:?} {a}..{b}: {hull:?}"),
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn huge_lengths_do_not_wrap() {
        let n = 1usize << 31;
        assert_eq!(Mask::CAUSAL.visible_pairs(SeqLen::new(n, n)), (n as u64) * (n as u64 + 1) / 2);
        assert_eq!(
            Mask { left: Some(usize::MAX), right: Some(usize::MAX) }.visible(SeqLen::new(2, 3), 0),
            0..3
        );
    }
}
