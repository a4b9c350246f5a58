//! A mask over global positions, as slices: rectangles of (queries, keys) with a band, no two of which share a pair.
//!
//! Documents are packed one after another; position 0 is the first token of the first one. A slice never leaves its document.

use std::ops::Range;

use suanpan_base::{BadArgument, Mask};

/// Most tokens of one plan: positions are also counted in 32 bits (dropout).
const MAX_TOKENS: usize = u32::MAX as usize;

/// Key `k` is visible from query `q` when both lie in the ranges and `low <= k - q <= high`; `None` = unbounded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Number of the document.
    pub document: usize,
    /// Global position of the document's first token.
    pub document_start: usize,
    /// Global query positions.
    pub q: Range<usize>,
    /// Global key positions.
    pub k: Range<usize>,
    /// Least `k - q`.
    pub low: Option<i64>,
    /// Greatest `k - q`.
    pub high: Option<i64>,
}

impl Slice {
    /// The keys of this slice that query `q` sees; empty outside the slice.
    pub fn keys(&self, q: usize) -> Range<usize> {
        if !self.q.contains(&q) {
            return self.k.start..self.k.start;
        }
        let clip = |x: i64| x.clamp(self.k.start as i64, self.k.end as i64) as usize;
        let start = self.low.map_or(self.k.start, |low| clip((q as i64).saturating_add(low)));
        let end =
            self.high.map_or(self.k.end, |high| clip((q as i64).saturating_add(high).saturating_add(1)));
        start..end.max(start)
    }
}

/// Packed documents under one mask.
#[derive(Clone, Debug)]
pub struct MaskSlices {
    mask: Mask,
    lengths: Vec<usize>,
    /// First tokens of each document that have keys, and no query.
    cached: Vec<usize>,
    /// First token of each document, and the end of the last one.
    starts: Vec<usize>,
    slices: Vec<Slice>,
    /// First slice of each document, and the number of all.
    first: Vec<usize>,
}

impl MaskSlices {
    /// Every document of `lengths` tokens (0 is allowed) attends to itself under `mask`.
    pub fn packed(mask: Mask, lengths: &[usize]) -> Result<MaskSlices, BadArgument> {
        MaskSlices::extended(mask, lengths, &vec![0; lengths.len()])
    }

    /// The same, of documents whose first `cached` tokens are there already: their keys and values are seen, and their queries are nobody's
    /// business (rows of zeros, lse -inf). Layouts deal cached and new tokens alike.
    pub fn extended(mask: Mask, lengths: &[usize], cached: &[usize]) -> Result<MaskSlices, BadArgument> {
        if cached.len() != lengths.len() || cached.iter().zip(lengths).any(|(c, n)| c > n) {
            let asked = format!("{} numbers", cached.len());
            let supported = format!("one a document, at most its length: {}", lengths.len());
            return Err(BadArgument::new("parallel mask", "cached", asked, supported));
        }
        let tokens =
            lengths.iter().try_fold(0usize, |sum, n| sum.checked_add(*n).filter(|s| *s <= MAX_TOKENS));
        if tokens.is_none() {
            let asked = format!("{} documents", lengths.len());
            return Err(BadArgument::new(
                "parallel mask",
                "lengths",
                asked,
                "at most 2^32 - 1 tokens together",
            ));
        }
        let mut all = MaskSlices {
            mask,
            lengths: lengths.to_vec(),
            cached: cached.to_vec(),
            starts: vec![0],
            slices: vec![],
            first: vec![0],
        };
        for (document, &n) in lengths.iter().enumerate() {
            let start = all.starts[document];
            all.push_document(document, start..start + n);
            all.starts.push(start + n);
            all.first.push(all.slices.len());
        }
        Ok(all)
    }

    fn push_document(&mut self, document: usize, tokens: Range<usize>) {
        let signed = |x: usize| x.min(MAX_TOKENS) as i64;
        let (low, high) = (self.mask.left.map(|l| -signed(l)), self.mask.right.map(signed));
        let chunk = self.mask.chunk.map_or(tokens.len().max(1), |c| c.get().min(tokens.len().max(1)));
        let sinks = tokens.start..tokens.end.min(tokens.start.saturating_add(self.mask.sink_tokens));
        let new = tokens.start + self.cached[document];
        for start in tokens.clone().step_by(chunk) {
            let own = start..tokens.end.min(start + chunk);
            let queries = own.start.max(new)..own.end.max(new);
            let mut push = |k: Range<usize>, low: Option<i64>, high: Option<i64>| {
                if !k.is_empty() && !queries.is_empty() {
                    let (document_start, q) = (tokens.start, queries.clone());
                    self.slices.push(Slice { document, document_start, q, k, low, high });
                }
            };
            push(own.clone(), low, high);
            // Sink tokens of earlier chunks are seen whole; those of the row's own chunk are in its band unless the window ends before.
            push(sinks.start..sinks.end.min(start), None, None);
            if let Some(low) = low {
                push(start.max(sinks.start)..sinks.end.min(own.end), None, Some(low - 1));
            }
        }
    }

    /// The mask inside a document.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// Tokens of each document.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Global position of the first token of each document.
    pub fn starts(&self) -> &[usize] {
        &self.starts[..self.lengths.len()]
    }

    /// Tokens of all documents.
    pub fn tokens(&self) -> usize {
        self.starts[self.lengths.len()]
    }

    /// All slices, document by document.
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// The slices of the documents that have a token in `tokens`.
    pub fn slices_within(&self, tokens: &Range<usize>) -> &[Slice] {
        if tokens.is_empty() {
            return &[];
        }
        let document =
            |token: usize| self.starts.partition_point(|s| *s <= token).clamp(1, self.lengths.len()) - 1;
        &self.slices[self.first[document(tokens.start)]..self.first[document(tokens.end - 1) + 1]]
    }

    /// The keys that query `q` sees, as ranges that do not meet; some may be empty.
    pub fn keys(&self, q: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        self.slices_within(&(q..q + 1)).iter().map(move |s| s.keys(q))
    }

    /// Visible pairs of one head.
    pub fn pairs(&self) -> u64 {
        let of = |(n, cached): (&usize, &usize)| {
            self.mask.visible_pairs(suanpan_base::SeqLen::new(*n - *cached, *n))
        };
        self.lengths.iter().zip(&self.cached).map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;
    use suanpan_base::SeqLen;

    #[test]
    fn cached_tokens_are_seen_and_see_nobody() {
        for mask in [Mask::CAUSAL, Mask::streaming(2, 3), Mask::chunked(NonZeroUsize::new(4).unwrap())] {
            let (lengths, cached) = ([9, 5, 4], [6, 0, 4]);
            let m = MaskSlices::extended(mask, &lengths, &cached).unwrap();
            let mut pairs = 0;
            for (document, (&start, &n)) in m.starts().iter().zip(&lengths).enumerate() {
                for i in 0..n {
                    let seen = mask.visible(SeqLen::new(n, n), i);
                    let sees = |_: &usize| i >= cached[document];
                    let want: Vec<usize> = seen.keys().map(|j| start + j).filter(sees).collect();
                    let mut got: Vec<usize> = m.keys(start + i).flatten().collect();
                    got.sort_unstable();
                    assert_eq!(got, want, "{mask} row {i} of {n}");
                    pairs += got.len() as u64;
                }
            }
            assert_eq!(pairs, m.pairs(), "{mask}");
        }
    }

    #[test]
    fn slices_are_the_mask_key_by_key() {
        let chunk = NonZeroUsize::new(3);
        let masks = [
            Mask::FULL,
            Mask::CAUSAL,
            Mask::window(2),
            Mask { left: Some(2), right: Some(1), ..Mask::FULL },
            Mask::chunked(chunk.unwrap()),
            Mask { left: Some(1), right: None, chunk, ..Mask::FULL },
            Mask::streaming(2, 3),
            Mask { sink_tokens: 4, chunk, ..Mask::window(2) },
            Mask { sink_tokens: 1, ..Mask::CAUSAL },
        ];
        for mask in masks {
            let m = MaskSlices::packed(mask, &[5, 0, 9, 1]).unwrap();
            let mut pairs = 0;
            for (&start, &n) in m.starts().iter().zip(m.lengths()) {
                for i in 0..n {
                    let want: Vec<usize> =
                        mask.visible(SeqLen::new(n, n), i).keys().map(|j| start + j).collect();
                    let mut got: Vec<usize> = m.keys(start + i).flatten().collect();
                    got.sort_unstable();
                    assert_eq!(got, want, "{mask} row {i} of {n}");
                    pairs += got.len() as u64;
                }
            }
            assert_eq!(pairs, m.pairs(), "{mask}");
        }
        assert!(MaskSlices::packed(Mask::FULL, &[usize::MAX, 2]).is_err());
        assert_eq!(MaskSlices::extended(Mask::FULL, &[3], &[4]).unwrap_err().field, "cached");
    }
}
