//! A rank's memory: its buffers, by the plan's numbers, and what is carried between them and messages. No arithmetic but sums.

use std::ops::Range;

use suanpan_base::{lse, order_free};

use crate::plan::{Buffer, Holds, Move, ParallelPlan, Pass, Region, What};
use crate::shard::{Run, number};

/// All buffers of one rank.
pub(crate) struct Memory<'p> {
    plan: &'p ParallelPlan,
    rank: usize,
    /// `[tokens, heads, width]` each.
    pub buffers: Vec<Vec<f32>>,
    /// The first rank of the group whose tokens a buffer holds.
    groups: Vec<usize>,
    /// Where each global position lies in the memory of its Ulysses group; empty where groups are single ranks.
    group_rows: Vec<u32>,
}

impl<'p> Memory<'p> {
    /// All memory of the rank, poisoned but for its own buffers: `inputs` and cleared results.
    pub fn new(plan: &'p ParallelPlan, rank: usize, inputs: [Vec<f32>; 2]) -> Memory<'p> {
        let buffers = &plan.ranks[rank].buffers;
        let numbers = |b: &Buffer| plan.rows(b) * plan.width(b.what);
        let mut memory = Memory {
            plan,
            rank,
            buffers: buffers.iter().map(|b| vec![f32::NAN; numbers(b)]).collect(),
            groups: vec![rank; buffers.len()],
            group_rows: group_rows(plan),
        };
        for (number, input) in inputs.iter().enumerate() {
            memory.buffers[number][..input.len()].copy_from_slice(input);
        }
        for number in inputs.len()..if plan.pass == Pass::Backward { 4 } else { 3 } {
            memory.clear(&memory.own(number));
        }
        memory
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().map(|b| size_of_val(b.as_slice()) as u64).sum()
    }

    fn buffer(&self, number: usize) -> &'p Buffer {
        &self.plan.ranks[self.rank].buffers[number]
    }

    /// The rank's own tokens in a buffer.
    fn own(&self, buffer: usize) -> Region {
        let parcels = self.plan.parcels_of(self.rank..self.rank + 1);
        Region { buffer, parcels, heads: self.buffer(buffer).heads.clone() }
    }

    /// Numbers of a row of a buffer.
    pub fn width(&self, buffer: usize) -> usize {
        self.plan.width(self.buffer(buffer).what)
    }

    /// Calls `row` with the number of every row (token) of a parcel in a buffer, in the order of its tokens.
    fn rows(&self, holds: &Holds, parcel: usize, mut row: impl FnMut(usize)) {
        let positions = || self.plan.runs(parcel).into_iter().flat_map(Run::positions);
        match holds {
            Holds::Ranks(1) => self.plan.parcels[parcel].tokens.clone().for_each(row),
            Holds::Ranks(_) => positions().for_each(|at| row(self.group_rows[at] as usize)),
            Holds::Span(span) => positions().for_each(|at| row(at - span.start)),
        }
    }

    /// Ranges of numbers of a region's tokens, in order; neighbours in memory are one.
    fn spans(&self, r: &Region) -> Vec<Range<usize>> {
        let buffer = self.buffer(r.buffer);
        let (width, heads) = (self.width(r.buffer), buffer.heads.len());
        let first = (r.heads.start - buffer.heads.start) * width;
        let mut spans: Vec<Range<usize>> = Vec::new();
        for parcel in r.parcels.clone() {
            self.rows(&buffer.holds, parcel, |row| {
                let start = row * heads * width + first;
                let end = start + r.heads.len() * width;
                match spans.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => spans.push(start..end),
                }
            });
        }
        spans
    }

    /// Notes whose tokens a buffer holds from now on.
    fn hold(&mut self, r: &Region) {
        if let (Holds::Ranks(size), Some(parcel)) =
            (&self.buffer(r.buffer).holds, self.plan.parcels.get(r.parcels.start))
        {
            self.groups[r.buffer] = parcel.rank / size * size;
        }
    }

    /// The numbers of a region, packed.
    pub fn pack(&self, r: &Region) -> Vec<f32> {
        let (spans, buffer) = (self.spans(r), &self.buffers[r.buffer]);
        let mut packed = Vec::with_capacity(spans.iter().map(Range::len).sum());
        spans.into_iter().for_each(|span| packed.extend_from_slice(&buffer[span]));
        packed
    }

    /// Puts packed numbers into a region.
    pub fn unpack(&mut self, r: &Region, message: &[f32]) {
        self.hold(r);
        let mut rest = message;
        for span in self.spans(r) {
            let (now, later) = rest.split_at(span.len());
            self.buffers[r.buffer][span].copy_from_slice(now);
            rest = later;
        }
    }

    fn fill(&mut self, r: &Region, row: impl Fn(&mut [f32])) {
        self.hold(r);
        let width = self.width(r.buffer);
        for span in self.spans(r) {
            self.buffers[r.buffer][span].chunks_exact_mut(width).for_each(&row);
        }
    }

    /// NaN everywhere: whoever reads it before its message is there, shows it.
    pub fn poison(&mut self, r: &Region) {
        self.fill(r, |row| row.fill(f32::NAN));
    }

    /// Sets a region to nothing.
    pub fn clear(&mut self, r: &Region) {
        let (plan, what) = (self.plan, self.buffer(r.buffer).what);
        let sums = what.sums(plan.heads).filter(|_| plan.order_free());
        let dv = plan.heads.head_dim_v;
        self.fill(r, |row| match &sums {
            Some(sums) => each_sum(row, sums).for_each(|(_, row)| order_free::clear(row)),
            None => {
                row.fill(0.0);
                if what == What::Out {
                    row[dv] = lse::EMPTY_LSE;
                }
            }
        });
    }

    /// Copies or adds a region to another buffer.
    pub fn shift(&mut self, m: &Move) {
        let (numbers, into) = (self.pack(&m.from), Region { buffer: m.into, ..m.from.clone() });
        if !m.add {
            return self.unpack(&into, &numbers);
        }
        let (what, width, heads) = (self.buffer(m.into).what, self.width(m.into), self.plan.heads);
        let sums = what.sums(heads).filter(|_| self.plan.order_free());
        let mut rest = numbers.chunks_exact(width);
        for span in self.spans(&into) {
            for (row, other) in self.buffers[m.into][span].chunks_exact_mut(width).zip(&mut rest) {
                match &sums {
                    Some(sums) => {
                        each_sum(row, sums)
                            .for_each(|(at, row)| order_free::merge(row, &other[at..][..row.len()]));
                    }
                    None if what == What::Out => {
                        let (out, pair) = row.split_at_mut(heads.head_dim_v);
                        let (other, lse) = other.split_at(heads.head_dim_v);
                        lse::merge_pair_into(out, pair, other, [lse[0], lse[1]]);
                    }
                    None => row.iter_mut().zip(other).for_each(|(a, b)| *a += b),
                }
            }
        }
    }

    /// The rank's result buffer `number` as plain numbers: out and lse, dq, or dk and dv.
    pub fn result(&self, number: usize) -> Vec<f32> {
        let (packed, plan, what) = (self.pack(&self.own(number)), self.plan, self.buffer(number).what);
        let (dv, width) = (plan.heads.head_dim_v, self.width(number));
        let sums = what.sums(plan.heads).filter(|_| plan.order_free());
        let Some(sums) = sums else {
            if what != What::Out {
                return packed;
            }
            return packed.chunks_exact(width).flat_map(|row| &row[..dv + 1]).copied().collect();
        };
        let plain: usize = sums.iter().sum();
        let mut numbers = vec![0.0; packed.len() / width * plain];
        for (row, numbers) in packed.chunks_exact(width).zip(numbers.chunks_exact_mut(plain)) {
            if what == What::Out {
                let (out, weight) = row.split_at(order_free::words(dv));
                let lse = lse::order_free_result(out, weight, &mut numbers[..dv]);
                numbers[dv] = lse;
                continue;
            }
            let (mut from, mut into) = (0, 0);
            for &width in &sums {
                order_free::write(&row[from..][..order_free::words(width)], &mut numbers[into..][..width]);
                (from, into) = (from + order_free::words(width), into + width);
            }
        }
        numbers
    }

    /// Where rows of a run under some heads lie: first number, distance of tokens, distance of heads.
    pub fn place(&self, buffer: usize, run: Run, heads: &Range<usize>) -> [usize; 3] {
        let b = self.buffer(buffer);
        let (head, token) = (self.width(buffer), self.width(buffer) * b.heads.len());
        let (first, step) = match &b.holds {
            Holds::Span(span) => (run.start - span.start, run.step),
            Holds::Ranks(1) => {
                let runs = self.plan.shards.runs(self.groups[buffer]);
                (number(runs, run.start).expect("a checked plan"), 1)
            }
            Holds::Ranks(_) => (self.group_rows[run.start] as usize, 1),
        };
        [first * token + (heads.start - b.heads.start) * head, step * token, head]
    }
}

/// The sums that stand side by side in a row, each with its first word.
fn each_sum<'r>(row: &'r mut [f32], widths: &[usize]) -> impl Iterator<Item = (usize, &'r mut [f32])> {
    let (mut rest, mut at) = (row, 0);
    widths.iter().map(|w| order_free::words(*w)).collect::<Vec<_>>().into_iter().map(move |words| {
        let (now, later) = std::mem::take(&mut rest).split_at_mut(words);
        rest = later;
        at += words;
        (at - words, now)
    })
}

fn group_rows(plan: &ParallelPlan) -> Vec<u32> {
    let size = plan.ulysses_size();
    if size == 1 {
        return Vec::new();
    }
    let mut rows = vec![0; plan.shards.all_tokens()];
    for first in (0..plan.ranks.len()).step_by(size) {
        let positions = plan.shards.group(first, size).into_iter().flat_map(Run::positions);
        positions.enumerate().for_each(|(row, at)| rows[at] = row as u32);
    }
    rows
}
