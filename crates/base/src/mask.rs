//! Which keys a query row may see, as intervals of key positions.
//!
//! Alignment is bottom-right unless top-left is asked for: the last query row stands on the last key. Row `i` of `seqlen_q` has the
//! centre `c = seqlen_k - seqlen_q + i` (top-left: `i`) and sees keys `c - left ..= c + right` of its chunk, clipped to
//! `0 .. seqlen_k`. Starts and ends never fall from one row to the next: every kernel relies on it. Sink tokens and a prefix add the
//! first keys of a sequence, apart from that interval or grown together with it.

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
    /// The first keys of a sequence, which every row sees that they are not to the right of, whatever its window or chunk
    /// (StreamingLLM, arXiv 2309.17453).
    pub sink_tokens: usize,
}

/// The keys that one row sees, or that the rows of a tile see together: `0 .. head`, and `run`.
///
/// Two pieces stay apart (`head < run.start`); where they touch there is one run and no head. Empty = both empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seen {
    /// End of the leading keys.
    pub head: usize,
    /// The other keys.
    pub run: Range<usize>,
}

impl Seen {
    /// `0 .. head` together with `run`.
    pub fn new(head: usize, run: Range<usize>) -> Seen {
        if head > 0 && head >= run.start {
            Seen { head: 0, run: 0..run.end.max(head) }
        } else {
            Seen { head, run }
        }
    }

    /// Keys seen.
    pub fn len(&self) -> usize {
        self.head + self.run.len()
    }

    /// No key is seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether key `key` is seen.
    pub fn contains(&self, key: usize) -> bool {
        key < self.head || self.run.contains(&key)
    }

    /// Both pieces, in order; either may be empty.
    pub fn pieces(&self) -> [Range<usize>; 2] {
        [0..self.head, self.run.clone()]
    }

    /// Every key seen, in order.
    pub fn keys(&self) -> impl Iterator<Item = usize> + Clone {
        (0..self.head).chain(self.run.clone())
    }

    /// The tiles of `tile` keys with a key seen, in two ranges that do not meet.
    pub fn tiles(&self, tile: usize) -> [Range<usize>; 2] {
        let head = self.head.div_ceil(tile);
        let end = self.run.end.div_ceil(tile);
        let start = (self.run.start / tile).max(head).min(end);
        [0..head, if self.run.is_empty() { head..head } else { start..end }]
    }

    /// The part inside `keys`, as pieces.
    pub fn within(&self, keys: &Range<usize>) -> [Range<usize>; 2] {
        let start = self.run.start.clamp(keys.start, keys.end);
        [keys.start..self.head.clamp(keys.start, keys.end), start..self.run.end.clamp(start, keys.end)]
    }
}

impl Mask {
    /// Every row sees every key.
    pub const FULL: Mask = Mask { left: None, right: None, chunk: None, top_left: false, sink_tokens: 0 };
    /// Row `i` sees keys `0 ..= seqlen_k - seqlen_q + i`.
    pub const CAUSAL: Mask = Mask { right: Some(0), ..Mask::FULL };

    /// Causal with a window of `window` keys, the row's own included. `window` must be at least 1.
    pub const fn window(window: usize) -> Mask {
        assert!(window >= 1, "a window counts the current token");
        Mask { left: Some(window - 1), ..Mask::CAUSAL }
    }

    /// A causal window that keeps the first `sink_tokens` keys in sight (StreamingLLM).
    pub const fn streaming(sink_tokens: usize, window: usize) -> Mask {
        Mask { sink_tokens, ..Mask::window(window) }
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

    /// Keys that row `i` sees: its interval, the sink tokens that do not lie to the right of it, and the sequence's prefix.
    pub fn visible(&self, len: SeqLen, i: usize) -> Seen {
        let run = self.interval(len, i);
        Seen::new(self.sink_tokens.min(run.end).max(len.prefix_len.min(len.seqlen_k)), run)
    }

    /// The keys within reach of row `i` by distance and chunk.
    fn interval(&self, len: SeqLen, i: usize) -> Range<usize> {
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

    /// Keys that at least one row of `rows` sees (a hull: the rows' runs overlap or touch unless empty).
    pub fn visible_hull(&self, len: SeqLen, rows: Range<usize>) -> Seen {
        if rows.is_empty() {
            return Seen::default();
        }
        let first = self.visible(len, rows.start);
        let last = self.visible(len, rows.end - 1);
        // Starts and ends both grow with the row, so the hull is first.start .. last.end; an all-empty hull collapses.
        let start = first.run.start.min(last.run.end);
        Seen::new(last.head, start..last.run.end)
    }

    /// Whether some row may see two pieces of keys instead of one.
    pub fn has_heads(&self, len: SeqLen) -> bool {
        self.sink_tokens > 0 || len.prefix_len > 0
    }

    /// Visible (query, key) pairs of one sequence, exactly: in O(1); with chunks, sink tokens or a prefix in O(seqlen_q).
    pub fn visible_pairs(&self, len: SeqLen) -> u64 {
        if self.chunk.is_some() || self.has_heads(len) {
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
        if self.sink_tokens > 0 {
            write!(f, " with {} sink tokens", self.sink_tokens)?;
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
    const MASKS: [Mask; 15] = [
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
        Mask::streaming(2, 3),
        Mask { sink_tokens: 1, ..CHUNKED },
        Mask { sink_tokens: 2, top_left: true, ..Mask::window(2) },
        Mask { sink_tokens: 3, left: Some(1), right: Some(1), ..Mask::FULL },
    ];

    /// Lengths up to 8 with prefixes of 0, 1 and 3 keys.
    fn lengths() -> impl Iterator<Item = SeqLen> {
        let both = (0..9).flat_map(|q| (0..9).map(move |k| SeqLen::new(q, k)));
        both.flat_map(|len| [0, 1, 3].map(|prefix| len.with_prefix(prefix)))
    }

    /// The definition, key by key.
    fn sees(mask: Mask, len: SeqLen, i: usize, key: usize) -> bool {
        let (centre, key) = (mask.centre(len, i), key as i64);
        let reach = |n: Option<usize>| n.map_or(i64::MAX, |n| n as i64);
        let near = centre - key <= reach(mask.left);
        let chunk = mask.chunk.map_or(i64::MAX, |c| c.get() as i64);
        let same_chunk = mask.chunk.is_none() || centre.div_euclid(chunk) == key.div_euclid(chunk);
        // A sink is cut by the row's own reach to the right, and so by the end of its chunk.
        let not_right = key - centre <= reach(mask.right);
        let before_chunk_end = mask.chunk.is_none() || key.div_euclid(chunk) <= centre.div_euclid(chunk);
        let sink = key < mask.sink_tokens as i64;
        not_right && (near && same_chunk || sink && before_chunk_end) || key < len.prefix_len as i64
    }

    #[test]
    fn visible_keys_are_the_definition_key_by_key() {
        for mask in MASKS {
            for len in lengths() {
                for i in 0..len.seqlen_q {
                    let seen = mask.visible(len, i);
                    let want: Vec<usize> = (0..len.seqlen_k).filter(|&key| sees(mask, len, i, key)).collect();
                    assert_eq!(seen.keys().collect::<Vec<_>>(), want, "{mask} {len:?} row {i}: {seen:?}");
                    assert!(seen.head == 0 || seen.head < seen.run.start, "{seen:?}");
                }
            }
        }
    }

    #[test]
    fn closed_form_pairs_equal_the_count_over_rows() {
        for mask in MASKS {
            for len in lengths() {
                let counted: usize = (0..len.seqlen_q).map(|i| mask.visible(len, i).len()).sum();
                assert_eq!(mask.visible_pairs(len), counted as u64, "{mask:?} {len:?}");
            }
        }
    }

    #[test]
    fn causal_is_bottom_right_aligned() {
        let len = SeqLen::new(4, 2);
        let rows: Vec<_> = (0..4).map(|i| Mask::CAUSAL.visible(len, i).len()).collect();
        assert_eq!(rows, [0, 0, 1, 2]);
        assert_eq!(Mask::CAUSAL.visible(SeqLen::new(2, 5), 0).run, 0..4);
    }

    #[test]
    fn top_left_and_chunks_by_hand() {
        let len = SeqLen::new(3, 5);
        let rows = |m: Mask| (0..3).map(|i| m.visible(len, i).run).collect::<Vec<_>>();
        assert_eq!(rows(Mask { top_left: true, ..Mask::CAUSAL }), [0..1, 0..2, 0..3]);
        // Rows stand on keys 2, 3 and 4; chunks of three are 0..3 and 3..6.
        assert_eq!(rows(CHUNKED), [0..3, 3..4, 3..5]);
    }

    #[test]
    fn starts_and_ends_never_fall_from_row_to_row() {
        for mask in MASKS {
            for len in lengths() {
                let rows: Vec<_> = (0..len.seqlen_q).map(|i| mask.visible(len, i).run).collect();
                let rising = rows.windows(2).all(|w| w[0].start <= w[1].start && w[0].end <= w[1].end);
                assert!(rising, "{mask:?} {rows:?}");
            }
        }
    }

    #[test]
    fn hull_covers_exactly_the_union_of_rows() {
        for mask in MASKS {
            for len in lengths() {
                for (a, b) in (0..len.seqlen_q).flat_map(|a| (a + 1..=len.seqlen_q).map(move |b| (a, b))) {
                    let hull = mask.visible_hull(len, a..b);
                    let union: std::collections::BTreeSet<usize> =
                        (a..b).flat_map(|i| mask.visible(len, i).keys().collect::<Vec<_>>()).collect();
                    assert!(
                        union.iter().all(|&key| hull.contains(key)),
                        "{mask:?} {len:?} {a}..{b}: {hull:?}"
                    );
                    // Only rows before the first key or past the last one leave a gap in the hull.
                    assert!(
                        hull.len() - union.len() <= b - a,
                        "{mask:?} {len:?} {a}..{b}: {hull:?} for {union:?}"
                    );
                    assert_eq!(hull.is_empty(), union.is_empty(), "{mask:?} {len:?} {a}..{b}: {hull:?}");
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
                .visible(SeqLen::new(2, 3), 0)
                .run,
            0..3
        );
    }
}
