//! How the keys of a query tile are cut into splits: evenly, or at absolute positions where bits may not depend on the batch.

use std::ops::Range;

use suanpan_base::Seen;

use crate::plan::KEY_BLOCK;

/// Fewest keys worth a split of their own.
pub const SPLIT_KEYS: usize = 256;
/// Most splits of one query tile.
pub const MAX_SPLITS: usize = 16;
/// Bound of seqlen_q × splits: partial results stay small.
const SPLIT_TOKENS: usize = 64;
/// Keys of a segment: in a batch-invariant plan, what is summed before it is merged, at absolute multiples of it and for every row alike.
pub const SEGMENT_KEYS: usize = 1024;
/// Bound of seqlen_q × segments up to which segments are tasks of their own.
const SEGMENT_TOKENS: usize = 512;

/// `count` ranges of `len` keys from `base`, an aligned position at or before the first key.
pub(crate) struct Cut {
    base: usize,
    len: usize,
    pub count: usize,
    segments: bool,
}

impl Cut {
    /// No cut.
    pub const WHOLE: Cut = Cut { base: 0, len: usize::MAX, count: 1, segments: false };

    /// Splits of a tile of `tokens` query tokens, as many as are worth it: at least `SPLIT_KEYS` keys each. The head goes with the first.
    pub fn balanced(hull: &Seen, tokens: usize) -> Cut {
        let most = (SPLIT_TOKENS / tokens.max(1)).clamp(1, MAX_SPLITS);
        let run = &hull.run;
        let base = run.start - run.start % KEY_BLOCK;
        let keys = run.end.max(base) - base;
        let wanted = keys.div_ceil(SPLIT_KEYS).clamp(1, most);
        let len = keys.div_ceil(wanted).next_multiple_of(KEY_BLOCK).max(KEY_BLOCK);
        // Rounded-up ranges may need fewer.
        Cut { base, len, count: keys.div_ceil(len).max(1), segments: false }
    }

    /// The segments of a tile of `tokens` query tokens, or all of them together where their partial results would be too many.
    pub fn segments(hull: &Seen, tokens: usize) -> Cut {
        let first = if hull.head > 0 { 0 } else { hull.run.start / SEGMENT_KEYS };
        let end = hull.run.end.max(hull.head).div_ceil(SEGMENT_KEYS);
        let count = end.saturating_sub(first).max(1);
        if tokens * count > SEGMENT_TOKENS {
            return Cut::WHOLE;
        }
        Cut { base: first * SEGMENT_KEYS, len: SEGMENT_KEYS, count, segments: true }
    }

    /// Most splits of a tile that sees at most `keys` keys.
    pub fn most(keys: usize, segments: bool) -> usize {
        if segments {
            keys.div_ceil(SEGMENT_KEYS).clamp(1, SEGMENT_TOKENS)
        } else {
            keys.div_ceil(SPLIT_KEYS).clamp(1, MAX_SPLITS)
        }
    }

    /// Bound of query tokens times splits.
    pub fn tokens(segments: bool) -> usize {
        if segments { SEGMENT_TOKENS } else { SPLIT_TOKENS }
    }

    /// The keys of `hull` in split `i`: of its head and of its run.
    pub fn pieces(&self, hull: &Seen, i: usize) -> [Range<usize>; 2] {
        let at = |i: usize| self.base.saturating_add(i.saturating_mul(self.len));
        let clip = |range: Range<usize>| {
            at(i).clamp(range.start, range.end)..at(i + 1).clamp(range.start, range.end)
        };
        let head = if self.segments { clip(0..hull.head) } else { 0..if i == 0 { hull.head } else { 0 } };
        [head, clip(hull.run.clone())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_cover_the_visible_keys_once_at_aligned_places() {
        for (start, end) in [(0, 1), (0, 256), (5, 700), (130, 32_768), (1000, 1001), (77, 1 << 20), (9, 9)] {
            for tokens in [1, 20, 64, 600] {
                for head in [0, 4, 2000] {
                    let hull = Seen::new(head, start..end);
                    for cut in [Cut::balanced(&hull, tokens), Cut::segments(&hull, tokens), Cut::WHOLE] {
                        let bound = Cut::tokens(cut.segments).max(tokens);
                        assert!(cut.count >= 1 && cut.count * tokens <= bound, "{hull:?} {tokens}");
                        let (mut at, mut head_at) = (hull.run.start, 0);
                        for i in 0..cut.count {
                            let [head, run] = cut.pieces(&hull, i);
                            assert!(head.is_empty() || head.start == head_at, "{hull:?} split {i}");
                            head_at = head_at.max(head.end);
                            assert_eq!(run.start, at, "{hull:?} split {i} of {}", cut.count);
                            assert!(
                                run.is_empty()
                                    || i == 0
                                    || at == hull.run.start
                                    || run.start.is_multiple_of(KEY_BLOCK)
                            );
                            let segment = |key: usize| key / SEGMENT_KEYS;
                            let one = run.is_empty() || segment(run.start) == segment(run.end - 1);
                            assert!(!cut.segments || one, "{hull:?} split {i}");
                            at = run.end;
                        }
                        assert_eq!((head_at, at), (hull.head, hull.run.end), "{hull:?} {tokens}");
                    }
                }
            }
        }
    }
}
