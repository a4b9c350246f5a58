//! Which rank holds which tokens: runs of global positions a rank, for lengths of any remainder, without padding.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;

use suanpan_base::BadArgument;

use crate::mask::MaskSlices;

/// Most ranks of a plan: what a plan holds grows with their square.
pub const MAX_CP_SIZE: usize = 1024;

/// Positions `start, start + step, …`, `count` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// First position.
    pub start: usize,
    /// Distance of neighbours, at least 1.
    pub step: usize,
    /// Positions.
    pub count: usize,
}

impl Run {
    /// The positions of `range`.
    pub fn of(range: Range<usize>) -> Run {
        Run { start: range.start, step: 1, count: range.len() }
    }

    /// The position of number `i`.
    pub fn at(&self, i: usize) -> usize {
        self.start + i * self.step
    }

    /// From the first position to behind the last one.
    pub fn hull(&self) -> Range<usize> {
        if self.count == 0 { self.start..self.start } else { self.start..self.at(self.count - 1) + 1 }
    }

    /// Numbers `part` of the run.
    pub fn part(&self, part: Range<usize>) -> Run {
        Run { start: self.at(part.start), step: self.step, count: part.len() }
    }

    /// The positions inside `range`.
    pub fn within(&self, range: &Range<usize>) -> Run {
        let below = |end: usize| end.saturating_sub(self.start).div_ceil(self.step).min(self.count);
        let (a, b) = (below(range.start), below(range.end));
        self.part(a..b.max(a))
    }

    /// The number of `position` in the run.
    pub fn number(&self, position: usize) -> Option<usize> {
        let past = position.checked_sub(self.start)?;
        (past.is_multiple_of(self.step) && past / self.step < self.count).then_some(past / self.step)
    }

    /// All positions.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |i| self.at(i))
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.hull().start, self.hull().end)?;
        if self.step > 1 && self.count > 1 { write!(f, " by {}", self.step) } else { Ok(()) }
    }
}

/// How tokens are dealt to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Rank r holds the r-th of N ranges.
    Contiguous,
    /// Token t goes to rank t mod N (Striped Attention, arXiv 2311.09431).
    Stripe,
    /// 2N ranges of which rank r holds numbers r and 2N - 1 - r: the same causal work for each rank and step.
    Zigzag,
    /// Zigzag inside each document: the same causal work for each rank, whatever the documents.
    DocumentZigzag,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Layout; 4] = [Layout::Contiguous, Layout::Stripe, Layout::Zigzag, Layout::DocumentZigzag];
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layout::Contiguous => "contiguous",
            Layout::Stripe => "stripe",
            Layout::Zigzag => "zigzag",
            Layout::DocumentZigzag => "zigzag a document",
        })
    }
}

/// The tokens of every rank: in a rank's memory its runs lie one after another, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    layout: Layout,
    tokens: usize,
    ranks: Vec<Vec<Run>>,
}

impl Shards {
    /// Deals the tokens of `mask` to `cp_size` ranks. Ranks without a token are a normal case. With `block`, whole blocks of so many tokens
    /// are dealt, counted from the first token of each document (its last block may be short).
    pub fn new(
        layout: Layout,
        mask: &MaskSlices,
        cp_size: usize,
        block: Option<NonZeroUsize>,
    ) -> Result<Shards, BadArgument> {
        if !(1..=MAX_CP_SIZE).contains(&cp_size) {
            return Err(BadArgument::new("parallel plan", "cp_size", cp_size, format!("1 to {MAX_CP_SIZE}")));
        }
        let units = Units::of(mask, block);
        let mut ranks = vec![Vec::new(); cp_size];
        match layout {
            Layout::Contiguous => {
                for (rank, runs) in ranks.iter_mut().enumerate() {
                    runs.push(units.run(part_of(units.count(), cp_size, rank)));
                }
            }
            Layout::Stripe => {
                for (rank, runs) in ranks.iter_mut().enumerate() {
                    units.every(rank, cp_size, runs);
                }
            }
            Layout::Zigzag => deal_zigzag(&mut ranks, &units, 0..units.count(), 0),
            Layout::DocumentZigzag => {
                for (document, (&start, &n)) in mask.starts().iter().zip(mask.lengths()).enumerate() {
                    deal_zigzag(&mut ranks, &units, units.within(start..start + n), document);
                }
            }
        }
        for runs in &mut ranks {
            runs.retain(|run| run.count > 0);
        }
        Ok(Shards { layout, tokens: mask.tokens(), ranks })
    }

    /// The tokens of `size` ranks from `first` on as they lie in one memory: in global order where their runs allow it, else rank by rank.
    pub fn group(&self, first: usize, size: usize) -> Vec<Run> {
        if size == self.cp_size() {
            return if self.tokens > 0 { vec![Run::of(0..self.tokens)] } else { Vec::new() };
        }
        let runs: Vec<Run> = self.ranks[first..first + size].concat();
        if runs.iter().any(|run| run.step > 1) || size == 1 {
            return runs;
        }
        joined(runs)
    }

    /// Whether neighbours in a rank's memory are not neighbours in the sequence.
    pub fn strided(&self) -> bool {
        self.ranks.iter().flatten().any(|run| run.step > 1 && run.count > 1)
    }

    /// How tokens were dealt.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Ranks.
    pub fn cp_size(&self) -> usize {
        self.ranks.len()
    }

    /// Tokens of all ranks.
    pub fn all_tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens of rank `rank`.
    pub fn tokens(&self, rank: usize) -> usize {
        self.runs(rank).iter().map(|run| run.count).sum()
    }

    /// Tokens of each rank.
    pub fn counts(&self) -> Vec<usize> {
        (0..self.cp_size()).map(|rank| self.tokens(rank)).collect()
    }

    /// Tokens of the rank that holds most.
    pub fn most(&self) -> usize {
        self.counts().into_iter().max().unwrap_or(0)
    }

    /// The runs of rank `rank`, none of them empty, in rising order.
    pub fn runs(&self, rank: usize) -> &[Run] {
        &self.ranks[rank]
    }

    /// Global positions of the tokens of rank `rank`, in the order of its memory.
    pub fn positions(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.runs(rank).iter().flat_map(|run| run.positions())
    }

    /// Where the token at global position `position` lies in the memory of rank `rank`.
    pub fn local(&self, rank: usize, position: usize) -> Option<usize> {
        number(self.runs(rank), position)
    }

    /// Rows of `width` elements of rank `rank`, taken out of rows of all tokens in global order.
    pub fn scatter(&self, rank: usize, whole: &[f32], width: usize) -> Vec<f32> {
        self.positions(rank).flat_map(|at| &whole[at * width..][..width]).copied().collect()
    }

    /// Puts rows of `width` elements of rank `rank` back into rows of all tokens in global order.
    pub fn gather(&self, rank: usize, rows: &[f32], width: usize, whole: &mut [f32]) {
        for (at, row) in self.positions(rank).zip(rows.chunks_exact(width.max(1))) {
            whole[at * width..][..width].copy_from_slice(row);
        }
    }
}

/// Part `i` of `parts` of `n` things: the first ones get one more where it does not divide.
pub fn part_of(n: usize, parts: usize, i: usize) -> Range<usize> {
    let start = |i: usize| i * (n / parts) + i.min(n % parts);
    start(i)..start(i + 1)
}

/// Runs of neighbours in global order, those that meet together.
pub(crate) fn joined(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_by_key(|run| run.start);
    let mut joined: Vec<Run> = Vec::new();
    for run in runs {
        // A single token has no step of its own.
        let run = if run.count == 1 { Run { step: 1, ..run } } else { run };
        match joined.last_mut() {
            Some(last) if last.hull().end == run.start => last.count += run.count,
            _ => joined.push(run),
        }
    }
    joined
}

/// The number of `position` in the memory that `runs` lie in, one after another.
pub fn number(runs: &[Run], position: usize) -> Option<usize> {
    let mut before = 0;
    for run in runs {
        if let Some(i) = run.number(position) {
            return Some(before + i);
        }
        before += run.count;
    }
    None
}

/// What is dealt: tokens, or blocks of them.
enum Units {
    Tokens(usize),
    /// First token of each block, and the end of the last one.
    Blocks(Vec<usize>),
}

impl Units {
    fn of(mask: &MaskSlices, block: Option<NonZeroUsize>) -> Units {
        let Some(block) = block else { return Units::Tokens(mask.tokens()) };
        let mut starts = Vec::new();
        for (&start, &n) in mask.starts().iter().zip(mask.lengths()) {
            starts.extend((start..start + n).step_by(block.get()));
        }
        starts.push(mask.tokens());
        Units::Blocks(starts)
    }

    fn count(&self) -> usize {
        match self {
            Units::Tokens(n) => *n,
            Units::Blocks(starts) => starts.len() - 1,
        }
    }

    /// Units `range` as one run.
    fn run(&self, range: Range<usize>) -> Run {
        match self {
            Units::Tokens(_) => Run::of(range),
            Units::Blocks(starts) => Run::of(starts[range.start]..starts[range.end]),
        }
    }

    /// Units `first`, `first + step`, and so on, as runs.
    fn every(&self, first: usize, step: usize, runs: &mut Vec<Run>) {
        match self {
            Units::Tokens(n) => {
                runs.push(Run { start: first.min(*n), step, count: n.saturating_sub(first).div_ceil(step) });
            }
            Units::Blocks(_) => {
                runs.extend((first..self.count()).step_by(step).map(|unit| self.run(unit..unit + 1)));
            }
        }
    }

    /// The units of a document's tokens.
    fn within(&self, tokens: Range<usize>) -> Range<usize> {
        match self {
            Units::Tokens(_) => tokens,
            Units::Blocks(starts) => {
                // The end of the last block is no block's start, but stands where one would.
                let at = |token: usize| starts.partition_point(|start| *start < token).min(self.count());
                at(tokens.start)..at(tokens.end)
            }
        }
    }
}

/// Zigzag over these units. Which ranges get one more turns with `turn`, so that no rank gets all of them.
fn deal_zigzag(ranks: &mut [Vec<Run>], units: &Units, range: Range<usize>, turn: usize) {
    let (n, chunks) = (ranks.len(), 2 * ranks.len());
    let mut at = range.start;
    for chunk in 0..chunks {
        let owner = if chunk < n { chunk } else { chunks - 1 - chunk };
        let more = (chunk + turn * (range.len() % chunks)) % chunks < range.len() % chunks;
        let count = range.len() / chunks + usize::from(more);
        ranks[owner].push(units.run(at..at + count));
        at += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use suanpan_base::Mask;

    #[test]
    fn every_token_has_one_owner_and_one_place() {
        let blocks = [None, NonZeroUsize::new(1), NonZeroUsize::new(4)];
        for (layout, block) in Layout::ALL.into_iter().flat_map(|l| blocks.map(|b| (l, b))) {
            for n in [1, 2, 3, 4, 8, 11] {
                for lengths in
                    [&[2999][..], &[8], &[7], &[3], &[1], &[0], &[5, 9, 2], &[1, 1, 6], &[0, 4, 4], &[]]
                {
                    let mask = MaskSlices::packed(Mask::CAUSAL, lengths).unwrap();
                    let shards = Shards::new(layout, &mask, n, block).unwrap();
                    let mut seen = vec![0; mask.tokens()];
                    for rank in 0..n {
                        let positions: Vec<usize> = shards.positions(rank).collect();
                        assert!(positions.is_sorted(), "{layout} {n}");
                        for (i, &at) in positions.iter().enumerate() {
                            seen[at] += 1;
                            assert_eq!(shards.local(rank, at), Some(i));
                        }
                    }
                    assert!(seen.iter().all(|s| *s == 1), "{layout} {n} {lengths:?}");
                }
            }
        }
    }

    #[test]
    fn blocks_stay_whole() {
        let mask = MaskSlices::packed(Mask::CAUSAL, &[10, 0, 3, 9]).unwrap();
        let block = NonZeroUsize::new(4);
        // Blocks 0..4, 4..8, 8..10 | 10..13 | 13..17, 17..21, 21..22.
        for layout in Layout::ALL {
            let shards = Shards::new(layout, &mask, 2, block).unwrap();
            for blocks in [0..4, 4..8, 8..10, 10..13, 13..17, 17..21, 21..22] {
                let owners = |at: usize| (0..2).position(|r| shards.local(r, at).is_some());
                assert!(blocks.clone().all(|at| owners(at) == owners(blocks.start)), "{layout} {blocks:?}");
            }
        }
    }

    #[test]
    fn a_group_of_ranks_lies_in_global_order() {
        let mask = MaskSlices::packed(Mask::CAUSAL, &[16]).unwrap();
        let zigzag = Shards::new(Layout::Zigzag, &mask, 4, None).unwrap();
        assert_eq!(zigzag.group(0, 2), [Run::of(0..4), Run::of(12..16)]);
        assert_eq!(zigzag.group(0, 4), [Run::of(0..16)]);
        let stripe = Shards::new(Layout::Stripe, &mask, 4, None).unwrap();
        assert_eq!(
            stripe.group(2, 2),
            [Run { start: 2, step: 4, count: 4 }, Run { start: 3, step: 4, count: 4 }]
        );
        assert_eq!(stripe.group(0, 4), [Run::of(0..16)]);
    }

    #[test]
    fn lengths_that_do_not_divide_differ_by_one() {
        let mask = MaskSlices::packed(Mask::CAUSAL, &[2999]).unwrap();
        let counts = |layout| Shards::new(layout, &mask, 4, None).unwrap().counts();
        assert_eq!(counts(Layout::Contiguous), [750, 750, 750, 749]);
        assert_eq!(counts(Layout::Stripe), [750, 750, 750, 749]);
        assert_eq!(counts(Layout::Zigzag), [749, 750, 750, 750]);
        let none = Shards::new(Layout::Zigzag, &mask, 0, None).unwrap_err();
        assert_eq!(none.field, "cp_size");
    }
}
