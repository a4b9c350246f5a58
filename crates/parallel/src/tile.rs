//! A tile: the part of a slice that one run of queries and one run of keys share, trimmed to the rows and keys that see each other.

use std::num::NonZeroUsize;
use std::ops::Range;

use suanpan_base::Mask;

use crate::mask::{MaskSlices, Slice};
use crate::shard::Run;

/// Queries and keys of one document with one step; number i of the queries sees number j of the keys when `low <= j - i <= high`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Number of the slice's document.
    pub document: usize,
    /// Global position of the document's first token.
    pub document_start: usize,
    /// Global query positions.
    pub q: Run,
    /// Global key positions; the same step as `q`.
    pub k: Run,
    /// Least `j - i`; `None` where no pair of the tile is below it.
    pub low: Option<i64>,
    /// Greatest `j - i`; `None` where no pair of the tile is above it.
    pub high: Option<i64>,
    /// Query heads.
    pub q_heads: Range<usize>,
    /// Key heads, of which each serves the same number of query heads.
    pub kv_heads: Range<usize>,
}

impl Tile {
    /// The pairs of `slice` with queries of `q` and keys of `k` (runs of one step); `None` where there are none.
    ///
    /// Every row of what comes out sees a key and every key is seen, so that the band becomes a mask aligned at the last row and key.
    pub fn cut(slice: &Slice, q: Run, k: Run, q_heads: Range<usize>, kv_heads: Range<usize>) -> Option<Tile> {
        let (q, k) = (q.within(&slice.q), k.within(&slice.k));
        if q.count == 0 || k.count == 0 {
            return None;
        }
        assert!(q.step == k.step || q.count == 1 || k.count == 1, "runs of one step");
        // A single token has no step of its own.
        let step = if q.count > 1 { q.step } else { k.step };
        let (q, k) = (Run { step, ..q }, Run { step, ..k });
        let (step, apart) = (step as i64, k.start as i64 - q.start as i64);
        let (nq, nk) = (q.count as i64, k.count as i64);
        // low <= apart + step (j - i) <= high. Unbounded sides become the widest distance of the tile.
        let low = slice.low.map_or(1 - nq, |low| -(apart - low).div_euclid(step)).max(1 - nq);
        let high = slice.high.map_or(nk - 1, |high| (high - apart).div_euclid(step)).min(nk - 1);
        // Row i reaches keys i + low ..= i + high.
        let rows = (-high).max(0)..(nk - low).min(nq);
        if low > high || rows.is_empty() {
            return None;
        }
        let keys = (rows.start + low).max(0)..(rows.end + high).min(nk);
        let (low, high) = (low + rows.start - keys.start, high + rows.start - keys.start);
        let (nq, nk) = (rows.end - rows.start, keys.end - keys.start);
        Some(Tile {
            document: slice.document,
            document_start: slice.document_start,
            q: q.part(rows.start as usize..rows.end as usize),
            k: k.part(keys.start as usize..keys.end as usize),
            low: Some(low).filter(|low| *low > 1 - nq),
            high: Some(high).filter(|high| *high < nk - 1),
            q_heads,
            kv_heads,
        })
    }

    /// All tiles of these queries and keys. With `block`, none leaves a block of so many tokens on either side, counted from the first token
    /// of its document: tiles then follow from the mask alone, whoever works on them.
    pub fn cut_all(
        mask: &MaskSlices,
        (q, k): (&[Run], &[Run]),
        heads: &[(Range<usize>, Range<usize>)],
        block: Option<NonZeroUsize>,
    ) -> Vec<Tile> {
        let mut tiles = Vec::new();
        for &q in q {
            for slice in mask.slices_within(&q.hull()) {
                for q in blocks(slice, q.within(&slice.q), block) {
                    for k in k.iter().flat_map(|k| blocks(slice, k.within(&slice.k), block)) {
                        for (q_heads, kv_heads) in heads {
                            tiles.extend(Tile::cut(slice, q, k, q_heads.clone(), kv_heads.clone()));
                        }
                    }
                }
            }
        }
        tiles
    }

    /// Whether any pair of these queries and keys is visible.
    pub fn any(mask: &MaskSlices, q: &[Run], k: &[Run]) -> bool {
        q.iter().any(|&q| {
            let slices = mask.slices_within(&q.hull());
            slices.iter().any(|slice| k.iter().any(|&k| Tile::cut(slice, q, k, 0..1, 0..1).is_some()))
        })
    }

    /// The band as a mask of a sequence of the tile's own lengths, aligned at the last row and key.
    pub fn mask(&self) -> Mask {
        let apart = self.k.count as i64 - self.q.count as i64;
        // Not negative: the last row sees the last key or one before it, and the last key is seen.
        let side = |x: i64| usize::try_from(x).expect("a trimmed tile");
        let left = self.low.map(|low| side(apart - low));
        let right = self.high.map(|high| side(high - apart));
        Mask { left, right, ..Mask::FULL }
    }

    /// The numbers of the keys that query number `i` sees.
    pub fn keys(&self, i: usize) -> Range<usize> {
        let clip = |x: i64| x.clamp(0, self.k.count as i64) as usize;
        let start = self.low.map_or(0, |low| clip(i as i64 + low));
        let end = self.high.map_or(self.k.count, |high| clip(i as i64 + high + 1));
        start..end.max(start)
    }

    /// Visible pairs of one head.
    pub fn pairs(&self) -> u64 {
        self.mask().visible_pairs(suanpan_base::SeqLen::new(self.q.count, self.k.count))
    }
}

/// A run of one document, cut where its blocks meet.
fn blocks(slice: &Slice, run: Run, block: Option<NonZeroUsize>) -> Vec<Run> {
    let Some(block) = block.map(NonZeroUsize::get).filter(|_| run.count > 0) else { return vec![run] };
    let (hull, origin) = (run.hull(), slice.document_start);
    let first = origin + (hull.start - origin) / block * block;
    (first..hull.end).step_by(block).map(|start| run.within(&(start..start + block))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use suanpan_base::SeqLen;

    #[test]
    fn a_tile_is_the_slice_pair_by_pair_and_so_is_its_mask() {
        let bands = [-5, -2, -1, 0, 1, 3].map(Some).into_iter().chain([None]);
        for (low, high) in bands.clone().flat_map(|a| bands.clone().map(move |b| (a, b))) {
            let slice = Slice { document: 0, document_start: 0, q: 1..10, k: 2..12, low, high };
            for (a, b, step) in (0..4).flat_map(|a| (0..6).flat_map(move |b| (1..4).map(move |s| (a, b, s))))
            {
                let (q, k) = (Run { start: a, step, count: 4 }, Run { start: b, step, count: 3 });
                let mut want: Vec<(usize, usize)> = Vec::new();
                for q in q.positions() {
                    want.extend(slice.keys(q).filter(|x| k.number(*x).is_some()).map(|k| (q, k)));
                }
                let tile = Tile::cut(&slice, q, k, 0..1, 0..1);
                let mut got = Vec::new();
                if let Some(t) = &tile {
                    let len = SeqLen::new(t.q.count, t.k.count);
                    for i in 0..t.q.count {
                        assert_eq!(t.mask().visible(len, i).run, t.keys(i), "{t:?}");
                        assert!(!t.keys(i).is_empty(), "{t:?}");
                        got.extend(t.keys(i).map(|j| (t.q.at(i), t.k.at(j))));
                    }
                }
                assert_eq!(got, want, "{slice:?} {q:?} {k:?} {tile:?}");
                assert_eq!(tile.map_or(0, |t| t.pairs()), want.len() as u64);
            }
        }
    }
}
