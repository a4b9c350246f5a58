//! Which keys a query row may see, as intervals of key positions.
//!
//! Alignment is bottom-right unless top-left is asked for: the last query row stands on the last key. Row `i` of `seqlen_q` has the
//! centre `c = seqlen_k - seqlen_q + i` (top-left: `i`) and sees keys `c - left ..= c + right` of its chunk, clipped to
//! `0 .. seqlen_k`. Starts and ends never fall from one row to the next: every kernel relies on it.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;

use crate::shape::SeqLen;

/// Visibility by distance from the row's own position; `None` = unbounded on that side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Mask {
    /// Keys before the centre that stay visible (window W: `Some(W - 1)`).
    pub left: Option<usize>,
    /// Keys after the centre that stay visible (causal: `Some(0)`).
    pub right: Option<usize>,
    /// Chunked local attention: keys fall into chunks of this many positions, and a row sees only the chunk of its centre.
    pub chunk: Option<NonZeroUsize>,
    /// The first query row stands on the first key, instead of the last on the last.
    pub top_left: bool,
}

impl Mask {
    /// Every row sees every key.
    pub const FULL: Mask = Mask { left: None, right: None, chunk: None, top_left: false };
    /// Row `i` sees keys `0 ..= seqlen_k - seqlen_q + i`.
    pub const CAUSAL: Mask = Mask { right: Some(0), ..Mask::FULL };

    /// Causal with a window of `window` keys, the row's own included. `window` must be at least 1.
    pub const fn window(window: usize) -> Mask {
        assert!(window >= 1, "a window counts the current token");
        Mask { left: Some(window - 1), ..Mask::CAUSAL }
    }

    /// Causal inside chunks of `chunk` positions (Llama 4's chunked attention).
    pub const fn chunked(chunk: NonZeroUsize) -> Mask {
        Mask { chunk: Some(chunk), ..Mask::CAUSAL }
    }

    /// The key position that row `i` stands on. Signed: with seqlen_q > seqlen_k the first rows stand before key 0.
    pub fn centre(&self, len: SeqLen, i: usize) -> i64 {
        self.first_centre(len) + i as i64
    }

    fn first_centre(&self, len: SeqLen) -> i64 {
        if self.top_left { 0 } else { len.seqlen_k as i64 - len.seqlen_q as i64 }
    }

    /// Key positions visible to row `i`; empty (start = end) where there is none.
    pub fn visible(&self, len: SeqLen, i: usize) -> Range<usize> {
        let centre = self.centre(len, i);
        let clip = |x: i64| x.clamp(0, len.seqlen_k as i64) as usize;
        let signed = |x: usize| x.min(i64::MAX as usize) as i64;
        let mut start = self.left.map_or(0, |l| clip(centre.saturating_sub(signed(l))));
        let mut end =
            self.right.map_or(len.seqlen_k, |r| clip(centre.saturating_add(signed(r)).saturating_add(1)));
        if let Some(chunk) = self.chunk {
            let chunk = signed(chunk.get());
            let first = centre.div_euclid(chunk) * chunk;
            start = start.max(clip(first));
            end = end.min(clip(first.saturating_add(chunk)));
        }
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

    /// Visible (query, key) pairs of one sequence, exactly: in O(1), with chunks in O(seqlen_q).
    pub fn visible_pairs(&self, len: SeqLen) -> u64 {
        if self.chunk.is_some() {
            return (0..len.seqlen_q).map(|i| self.visible(len, i).len() as u64).sum();
        }
        let first = i128::from(self.first_centre(len));
        let ends = sum_clipped(len, self.right.map(|r| first + r as i128 + 1));
        let starts = sum_clipped(len, self.left.map(|l| first - l as i128));
        let ends = ends.unwrap_or(len.seqlen_q as u128 * len.seqlen_k as u128);
        (ends - starts.unwrap_or(0)) as u64
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.left, self.right) {
            (None, None) => f.write_str("full")?,
            (None, Some(0)) => f.write_str("causal")?,
            (Some(left), Some(0)) => write!(f, "window {}", left.saturating_add(1))?,
            (left, right) => {
                let side = |n: Option<usize>| n.map_or("all".to_string(), |n| n.to_string());
                write!(f, "{} keys left, {} right", side(left), side(right))?;
            }
        }
        if let Some(chunk) = self.chunk {
            write!(f, " in chunks of {chunk}")?;
        }
        f.write_str(if self.top_left { ", top-left aligned" } else { "" })
    }
}

/// Sum over rows `i` of `clamp(base + i, 0, seqlen_k)`, or None for an unbounded side.
fn sum_clipped(len: SeqLen, base: Option<i128>) -> Option<u128> {
    let base = base?;
    let (q, k) = (len.seqlen_q as i128, len.seqlen_k as i128);
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

    const CHUNKED: Mask = Mask::chunked(NonZeroUsize::new(3).unwrap());
    const MASKS: [Mask; 11] = [
        Mask::FULL,
        Mask::CAUSAL,
        Mask::window(1),
        Mask::window(3),
        Mask { left: Some(2), right: Some(2), ..Mask::FULL },
        Mask { right: Some(3), ..Mask::FULL },
        Mask { top_left: true, ..Mask::CAUSAL },
        Mask { top_left: true, left: Some(1), ..Mask::CAUSAL },
        CHUNKED,
        Mask { right: None, ..CHUNKED },
        Mask { left: Some(1), top_left: true, ..CHUNKED },
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
    fn top_left_and_chunks_by_hand() {
        let len = SeqLen::new(3, 5);
        let rows = |m: Mask| (0..3).map(|i| m.visible(len, i)).collect::<Vec<_>>();
        assert_eq!(rows(Mask { top_left: true, ..Mask::CAUSAL }), [0..1, 0..2, 0..3]);
        // Rows stand on keys 2, 3 and 4; chunks of three are 0..3 and 3..6.
        assert_eq!(rows(CHUNKED), [0..3, 3..4, 3..5]);
    }

    #[test]
    fn starts_and_ends_never_fall_from_row_to_row() {
        for mask in MASKS {
            for (q, k) in [(9, 4), (4, 9), (7, 7)] {
                let rows: Vec<_> = (0..q).map(|i| mask.visible(SeqLen::new(q, k), i)).collect();
                let rising = rows.windows(2).all(|w| w[0].start <= w[1].start && w[0].end <= w[1].end);
                assert!(rising, "{mask:?} {rows:?}");
            }
        }
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
            Mask { left: Some(usize::MAX), right: Some(usize::MAX), ..Mask::FULL }
                .visible(SeqLen::new(2, 3), 0),
            0..3
        );
    }
}
