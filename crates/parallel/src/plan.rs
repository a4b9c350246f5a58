//! The plan: for every rank its buffers and its steps. Pure and printable; checker, threads and ledger read the same value.
//!
//! ```text
//! a step:  clear -> post sends and receives -> work on tiles -> wait for all of them -> move (copy, or add what arrived)
//! ```
//! What a step sends must not change in it; what it receives may not be read before its moves.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;

use suanpan_base::{BadArgument, HeadShape, order_free};

use crate::mask::MaskSlices;
use crate::shard::{Layout, Run, Shards};
use crate::tile::Tile;
use crate::ulysses::split_heads;
use crate::{gather, ulysses};

/// The name under which a plan is refused.
pub(crate) const OP: &str = "parallel plan";

/// Bytes of every number that travels: carriers are f32.
pub const CARRIER_BYTES: u64 = 4;

/// What a rank sends to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Keys and values travel from rank to rank (Ring Attention, arXiv 2310.01889); backward, their gradients follow and come home.
    Ring,
    /// Queries travel instead, and their results follow and come home: fewer bytes where few queries meet many keys, or heads are not grouped.
    RingQuery,
    /// Every rank gets the chunks of keys and values of which its queries see any; backward, it sends its part of their gradients back.
    AllGather,
    /// Every rank gets the very keys and values that its queries see, and no others: for windows, a halo.
    Halo,
    /// Every rank gets some heads of all tokens (DeepSpeed-Ulysses, arXiv 2309.14509).
    Ulysses,
    /// Ulysses inside groups of so many neighbouring ranks, a ring between groups (USP, arXiv 2405.07719).
    Hybrid(usize),
}

impl Scheme {
    /// Every scheme that fits any number of ranks.
    pub const ALL: [Scheme; 5] =
        [Scheme::Ring, Scheme::RingQuery, Scheme::AllGather, Scheme::Halo, Scheme::Ulysses];

    /// Ranks of a group that exchanges heads.
    pub fn ulysses_size(self, cp_size: usize) -> usize {
        match self {
            Scheme::Ulysses => cp_size,
            Scheme::Hybrid(size) => size,
            _ => 1,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scheme::Ring => "ring",
            Scheme::RingQuery => "ring by queries",
            Scheme::AllGather => "all-gather",
            Scheme::Halo => "halo",
            Scheme::Ulysses => "ulysses",
            Scheme::Hybrid(size) => return write!(f, "ring of ulysses groups of {size}"),
        })
    }
}

/// Which pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// q, k, v -> out, lse.
    Forward,
    /// q, k, v, out, lse, d_out -> dq, dk, dv.
    Backward,
}

/// What a buffer's rows are: `[tokens, heads, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// q.
    Query,
    /// k, then v.
    Kv,
    /// out, then lse: partial results, merged where they are added.
    Out,
    /// q, out, d_out, lse: what a query brings to its backward.
    QueryState,
    /// dq.
    DQuery,
    /// dk, then dv.
    DKv,
}

impl What {
    /// Widths of the rows that are summed apart in a token and head, with what they are summed by; `None`: nothing is summed.
    pub fn sums(self, heads: HeadShape) -> Option<Vec<usize>> {
        let (dqk, dv) = (heads.head_dim_qk, heads.head_dim_v);
        match self {
            What::Query | What::Kv | What::QueryState => None,
            What::Out => Some(vec![dv, 1]),
            What::DQuery => Some(vec![dqk]),
            What::DKv => Some(vec![dqk, dv]),
        }
    }

    /// Numbers (words of an `order_free` sum) a token and head.
    pub fn width(self, heads: HeadShape, order_free: bool) -> usize {
        let (dqk, dv) = (heads.head_dim_qk, heads.head_dim_v);
        match (self, self.sums(heads)) {
            (_, Some(sums)) if order_free => sums.into_iter().map(order_free::words).sum(),
            (What::Query | What::DQuery, _) => dqk,
            (What::Kv | What::DKv, _) => dqk + dv,
            (What::Out, _) => dv + 2,
            (What::QueryState, _) => dqk + 2 * dv + 1,
        }
    }

    /// Whether its heads are kv heads.
    pub fn of_keys(self) -> bool {
        matches!(self, What::Kv | What::DKv)
    }
}

/// Some tokens of one rank that travel together or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parcel {
    /// Whose they are.
    pub rank: usize,
    /// Their numbers in that rank's memory.
    pub tokens: Range<usize>,
}

/// Whose rows a buffer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holds {
    /// The tokens of one group of so many neighbouring ranks at a time (1, or the plan's Ulysses size), as they lie in its memory.
    Ranks(usize),
    /// These global positions, in order.
    Span(Range<usize>),
}

/// One buffer of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// What its rows are.
    pub what: What,
    /// Whose.
    pub holds: Holds,
    /// The heads it holds.
    pub heads: Range<usize>,
}

/// Rows of a buffer: the tokens of some parcels under some heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Number of the buffer.
    pub buffer: usize,
    /// Numbers of the parcels.
    pub parcels: Range<usize>,
    /// Heads.
    pub heads: Range<usize>,
}

/// A message: sent from, or received into, a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The other rank.
    pub peer: usize,
    /// Where it lies here.
    pub region: Region,
}

/// A region copied or added to another buffer of the rank, same tokens and heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// From where.
    pub from: Region,
    /// Number of the other buffer.
    pub into: usize,
    /// Added (partial outputs: merged), not copied.
    pub add: bool,
}

/// A tile with the buffers that its kernel reads and adds to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// What is computed.
    pub tile: Tile,
    /// Query or QueryState.
    pub q: usize,
    /// Kv.
    pub kv: usize,
    /// Out or DQuery.
    pub result: usize,
    /// DKv; backward only.
    pub d_kv: Option<usize>,
}

/// One step of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Regions set to nothing first: zeros; outputs to (0, -inf).
    pub clears: Vec<Region>,
    /// Sent, in this order.
    pub sends: Vec<Transfer>,
    /// Received, in this order.
    pub recvs: Vec<Transfer>,
    /// Computed meanwhile.
    pub work: Vec<Work>,
    /// Done last, in this order.
    pub moves: Vec<Move>,
}

/// What one rank does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankPlan {
    /// Its buffers; the first ones are [`own`]'s.
    pub buffers: Vec<Buffer>,
    /// Its steps. Step numbers mean the same step on every rank.
    pub steps: Vec<Step>,
}

/// Numbers of the buffers that every rank has: its own tokens under all heads.
pub mod own {
    /// Query (forward) or QueryState (backward); filled before the first step.
    pub const Q: usize = 0;
    /// Kv; filled before the first step.
    pub const KV: usize = 1;
    /// Out or DQuery; cleared before the first step, the rank's result after the last one.
    pub const RESULT: usize = 2;
    /// DKv (backward); cleared before the first step, the rank's result after the last one.
    pub const D_KV: usize = 3;
}

/// What is asked of the planner.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Who sees whom.
    pub mask: &'a MaskSlices,
    /// Who holds what.
    pub layout: Layout,
    /// Ranks.
    pub cp_size: usize,
    /// What travels.
    pub scheme: Scheme,
    /// Which pass.
    pub pass: Pass,
    /// N-invariant mode: the same bits for any ranks, layout and scheme. Tiles are blocks of so many tokens, shards are dealt in whole blocks,
    /// and what is summed is summed in an order-free way. Bits depend on this number.
    pub invariant_block: Option<NonZeroUsize>,
}

/// Steps of every rank.
#[derive(Clone, Debug)]
pub struct ParallelPlan {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Who sees whom.
    pub mask: MaskSlices,
    /// Who holds what.
    pub shards: Shards,
    /// What travels.
    pub scheme: Scheme,
    /// Which pass.
    pub pass: Pass,
    /// N-invariant mode, and its block.
    pub invariant_block: Option<NonZeroUsize>,
    /// The parcels, rank by rank.
    pub parcels: Vec<Parcel>,
    /// (query heads, kv heads) that each rank works on.
    pub split: Vec<(Range<usize>, Range<usize>)>,
    /// What each rank does.
    pub ranks: Vec<RankPlan>,
    /// Why it is so, line by line.
    pub why: Vec<String>,
}

impl ParallelPlan {
    /// Plans one attention layer. Refuses by name what it cannot do.
    pub fn new(request: &Request<'_>) -> Result<ParallelPlan, BadArgument> {
        request.heads.check(OP)?;
        if request.heads.values_in_keys {
            return Err(BadArgument::new(OP, "values_in_keys", true, "false: keys and values travel apart"));
        }
        let (n, size) = (request.cp_size, request.scheme.ulysses_size(request.cp_size));
        if size == 0 || !n.is_multiple_of(size) {
            let supported = format!("a divisor of cp_size, which is {n}");
            return Err(BadArgument::new(OP, "ulysses_size", size, supported));
        }
        let shards = Shards::new(request.layout, request.mask, n, request.invariant_block)?;
        let whole = |rank: usize| Parcel { rank, tokens: 0..shards.tokens(rank) };
        let mut plan = ParallelPlan {
            heads: request.heads,
            mask: request.mask.clone(),
            split: (0..n).map(|rank| split_heads(request.heads, size)[rank % size].clone()).collect(),
            parcels: (0..n).map(whole).filter(|p| !p.tokens.is_empty()).collect(),
            shards,
            scheme: request.scheme,
            pass: request.pass,
            invariant_block: request.invariant_block,
            ranks: Vec::new(),
            why: Vec::new(),
        };
        plan.ranks = (0..n).map(|_| plan.own_buffers()).collect();
        match request.scheme {
            Scheme::AllGather | Scheme::Halo if n > 1 => gather::plan(&mut plan),
            _ => ulysses::plan(&mut plan),
        }
        plan.say_balance();
        Ok(plan)
    }

    fn own_buffers(&self) -> RankPlan {
        let backward = self.pass == Pass::Backward;
        let mut rank = RankPlan::default();
        let whats = if backward {
            vec![What::QueryState, What::Kv, What::DQuery, What::DKv]
        } else {
            vec![What::Query, What::Kv, What::Out]
        };
        for what in whats {
            rank.buffers.push(Buffer { what, holds: Holds::Ranks(1), heads: self.all_heads(what) });
        }
        rank
    }

    /// All heads of rows of this kind.
    pub fn all_heads(&self, what: What) -> Range<usize> {
        0..if what.of_keys() { self.heads.num_kv_heads } else { self.heads.num_q_heads }
    }

    /// Whether what is summed is summed in an order-free way.
    pub fn order_free(&self) -> bool {
        self.invariant_block.is_some()
    }

    /// Ranks of a group that exchanges heads.
    pub fn ulysses_size(&self) -> usize {
        self.scheme.ulysses_size(self.ranks.len())
    }

    /// Numbers a token and head of rows of this kind.
    pub fn width(&self, what: What) -> usize {
        what.width(self.heads, self.order_free())
    }

    /// The numbers of the parcels of these ranks.
    pub fn parcels_of(&self, ranks: Range<usize>) -> Range<usize> {
        let first = |rank: usize| self.parcels.partition_point(|p| p.rank < rank);
        first(ranks.start)..first(ranks.end)
    }

    /// Global positions of a parcel's tokens, as runs.
    pub fn runs(&self, parcel: usize) -> Vec<Run> {
        let Parcel { rank, tokens } = &self.parcels[parcel];
        let (mut before, mut runs) = (0, Vec::new());
        for run in self.shards.runs(*rank) {
            let clip = |at: usize| at.clamp(before, before + run.count) - before;
            let part = clip(tokens.start)..clip(tokens.end);
            runs.extend((!part.is_empty()).then(|| run.part(part)));
            before += run.count;
        }
        runs
    }

    /// Tokens of some parcels.
    pub fn tokens(&self, parcels: Range<usize>) -> usize {
        self.parcels[parcels].iter().map(|p| p.tokens.len()).sum()
    }

    /// The calls that a rank's kernels make for these heads: in an order-free backward one a query head, so that no sum over a group's heads
    /// depends on who works on which.
    pub(crate) fn calls(&self, rank: usize) -> Vec<(Range<usize>, Range<usize>)> {
        let alone = self.order_free() && self.pass == Pass::Backward;
        ulysses::calls(self.heads, &self.split[rank], alone)
    }

    /// Rows (tokens × heads) of a buffer: what it must hold at most.
    pub fn rows(&self, buffer: &Buffer) -> usize {
        let tokens = match &buffer.holds {
            Holds::Span(span) => span.len(),
            Holds::Ranks(size) => {
                let group = |first| (first..first + size).map(|r| self.shards.tokens(r)).sum();
                (0..self.ranks.len()).step_by(*size).map(group).max().unwrap_or(0)
            }
        };
        tokens * buffer.heads.len()
    }

    /// Bytes of a rank's buffers, its own ones and all others.
    pub fn buffer_bytes(&self, rank: usize) -> u64 {
        self.ranks[rank].buffers.iter().map(|b| self.bytes_of(b)).sum()
    }

    fn bytes_of(&self, buffer: &Buffer) -> u64 {
        (self.rows(buffer) * self.width(buffer.what)) as u64 * CARRIER_BYTES
    }

    /// Bytes of a rank's buffers beside its own.
    pub fn carrier_bytes(&self, rank: usize) -> u64 {
        let own = if self.pass == Pass::Backward { 4 } else { 3 };
        self.ranks[rank].buffers[own..].iter().map(|b| self.bytes_of(b)).sum()
    }

    /// Numbers of a message.
    pub fn message_len(&self, rank: usize, region: &Region) -> usize {
        let what = self.ranks[rank].buffers[region.buffer].what;
        self.tokens(region.parcels.clone()) * region.heads.len() * self.width(what)
    }

    /// Bytes of a message.
    pub fn bytes(&self, rank: usize, region: &Region) -> u64 {
        self.message_len(rank, region) as u64 * CARRIER_BYTES
    }

    /// Bytes that a rank sends.
    pub fn sent_bytes(&self, rank: usize) -> u64 {
        let sends = self.ranks[rank].steps.iter().flat_map(|s| &s.sends);
        sends.map(|send| self.bytes(rank, &send.region)).sum()
    }

    /// Visible pairs, times query heads, that a rank works on.
    pub fn pairs(&self, rank: usize) -> u64 {
        let work = self.ranks[rank].steps.iter().flat_map(|s| &s.work);
        work.map(|w| w.tile.pairs() * w.tile.q_heads.len() as u64).sum()
    }

    /// Work of the busiest rank over the mean: 1 = even. Counts whole passes, as if no step waited for another rank's.
    pub fn imbalance(&self) -> f64 {
        let pairs: Vec<u64> = (0..self.ranks.len()).map(|r| self.pairs(r)).collect();
        let sum: u64 = pairs.iter().sum();
        let most = pairs.iter().copied().max().unwrap_or(0);
        if sum == 0 { 1.0 } else { most as f64 * pairs.len() as f64 / sum as f64 }
    }

    /// Sum over steps of the busiest rank's pairs, over the mean rank's whole work: what waiting for each other costs in every step.
    pub fn step_imbalance(&self) -> f64 {
        let steps = self.ranks.iter().map(|r| r.steps.len()).max().unwrap_or(0);
        let pairs = |rank: &RankPlan, t: usize| -> u64 {
            rank.steps
                .get(t)
                .map_or(0, |s| s.work.iter().map(|w| w.tile.pairs() * w.tile.q_heads.len() as u64).sum())
        };
        let busiest: u64 =
            (0..steps).map(|t| self.ranks.iter().map(|r| pairs(r, t)).max().unwrap_or(0)).sum();
        let sum: u64 = (0..self.ranks.len()).map(|r| self.pairs(r)).sum();
        if sum == 0 { 1.0 } else { busiest as f64 * self.ranks.len() as f64 / sum as f64 }
    }

    fn say_balance(&mut self) {
        self.why.push(format!(
            "work of the busiest rank: {:.3} of the mean; of the busiest rank of each step: {:.3}",
            self.imbalance(),
            self.step_imbalance()
        ));
        let idle = (0..self.ranks.len()).filter(|&r| self.pairs(r) == 0).count();
        if idle > 0 {
            self.why
                .push(format!("{idle} ranks see no pair: they pass on what others need and compute nothing"));
        }
    }
}

impl fmt::Display for ParallelPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = if self.pass == Pass::Forward { "forward" } else { "backward" };
        writeln!(
            f,
            "parallel {pass}: {}, {} ranks, {}, {} tokens in {} documents, {}; {} query heads over {} kv heads",
            self.scheme,
            self.ranks.len(),
            self.shards.layout(),
            self.mask.tokens(),
            self.mask.lengths().len(),
            self.mask.mask(),
            self.heads.num_q_heads,
            self.heads.num_kv_heads
        )?;
        if let Some(block) = self.invariant_block {
            writeln!(
                f,
                "  the same bits for any ranks, layout and scheme: blocks of {block} tokens, order-free sums"
            )?;
        }
        for line in &self.why {
            writeln!(f, "  {line}")?;
        }
        for (rank, plan) in self.ranks.iter().enumerate() {
            writeln!(
                f,
                "  rank {rank}: {} tokens, {} pairs, sends {} bytes, holds {} bytes of carriers",
                self.shards.tokens(rank),
                self.pairs(rank),
                self.sent_bytes(rank),
                self.carrier_bytes(rank)
            )?;
            for (t, step) in plan.steps.iter().enumerate() {
                write!(f, "    step {t}:")?;
                for (word, transfers) in [("send", &step.sends), ("receive", &step.recvs)] {
                    for x in transfers {
                        let what = plan.buffers[x.region.buffer].what;
                        let of = &self.parcels[x.region.parcels.start].rank;
                        write!(f, " {word} {what:?} of {of} (rank {}, buffer {});", x.peer, x.region.buffer)?;
                    }
                }
                for w in &step.work {
                    write!(f, " q {} x k {} ({});", w.tile.q, w.tile.k, w.tile.mask())?;
                }
                let idle = step.work.is_empty() && step.sends.is_empty() && step.recvs.is_empty();
                writeln!(f, "{}", if idle { " nothing" } else { "" })?;
            }
        }
        Ok(())
    }
}
