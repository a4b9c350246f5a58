//! The plan: for every rank its buffers and its steps. Pure and printable; checker, threads and ledger read the same value.
//!
//! ```text
//! a step:  clear -> post sends and receives -> work on tiles -> wait for all of them -> move (copy, or add what arrived)
//! ```
//! What a step sends must not change in it; what it receives may not be read before its moves.

use std::fmt;
use std::ops::Range;

use suanpan_base::{BadArgument, HeadShape};

use crate::mask::MaskSlices;
use crate::shard::{Layout, Shards};
use crate::tile::Tile;
use crate::{gather, ring, ulysses};

/// The name under which a plan is refused.
pub(crate) const OP: &str = "parallel plan";

/// Bytes of every number that travels: carriers are f32.
pub const CARRIER_BYTES: u64 = 4;

/// What a rank sends to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Keys and values travel from rank to rank (Ring Attention, arXiv 2310.01889); backward, their gradients follow and come home.
    Ring,
    /// Every rank gets the keys and values that its queries see; backward, it sends its part of their gradients back.
    AllGather,
    /// Every rank gets some heads of all tokens (DeepSpeed-Ulysses, arXiv 2309.14509).
    Ulysses,
}

impl Scheme {
    /// Every scheme.
    pub const ALL: [Scheme; 3] = [Scheme::Ring, Scheme::AllGather, Scheme::Ulysses];
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scheme::Ring => "ring",
            Scheme::AllGather => "all-gather",
            Scheme::Ulysses => "ulysses",
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
    /// Numbers a token and head.
    pub fn width(self, heads: HeadShape) -> usize {
        let (dqk, dv) = (heads.head_dim_qk, heads.head_dim_v);
        match self {
            What::Query | What::DQuery => dqk,
            What::Kv | What::DKv => dqk + dv,
            What::Out => dv + 1,
            What::QueryState => dqk + 2 * dv + 1,
        }
    }

    /// Whether its heads are kv heads.
    pub fn of_keys(self) -> bool {
        matches!(self, What::Kv | What::DKv)
    }
}

/// One buffer of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// What its rows are.
    pub what: What,
    /// It holds all tokens in global order; else the tokens of one rank at a time, as they lie in that rank's memory.
    pub whole: bool,
    /// The heads it holds.
    pub heads: Range<usize>,
}

/// Rows of a buffer: the tokens of one rank under some heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Number of the buffer.
    pub buffer: usize,
    /// The rank whose tokens they are.
    pub origin: usize,
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
        let shards = Shards::new(request.layout, request.mask, request.cp_size)?;
        let mut plan = ParallelPlan {
            heads: request.heads,
            mask: request.mask.clone(),
            split: vec![(0..request.heads.num_q_heads, 0..request.heads.num_kv_heads); shards.cp_size()],
            shards,
            scheme: request.scheme,
            pass: request.pass,
            ranks: Vec::new(),
            why: Vec::new(),
        };
        plan.ranks = (0..request.cp_size).map(|_| plan.own_buffers()).collect();
        match request.scheme {
            _ if request.cp_size == 1 => ring::plan(&mut plan),
            Scheme::Ring => ring::plan(&mut plan),
            Scheme::AllGather => gather::plan(&mut plan),
            Scheme::Ulysses => ulysses::plan(&mut plan),
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
            rank.buffers.push(Buffer { what, whole: false, heads: self.all_heads(what) });
        }
        rank
    }

    /// All heads of rows of this kind.
    pub fn all_heads(&self, what: What) -> Range<usize> {
        0..if what.of_keys() { self.heads.num_kv_heads } else { self.heads.num_q_heads }
    }

    /// Whether rank `rank` has a query that sees a key of rank `origin`.
    pub fn needs(&self, rank: usize, origin: usize) -> bool {
        Tile::any(&self.mask, self.shards.runs(rank), self.shards.runs(origin))
    }

    /// Rows (tokens × heads) of a buffer: what it must hold at most.
    pub fn rows(&self, buffer: &Buffer) -> usize {
        let tokens = if buffer.whole { self.shards.all_tokens() } else { self.shards.most() };
        tokens * buffer.heads.len()
    }

    /// Bytes of a rank's buffers beside its own.
    pub fn carrier_bytes(&self, rank: usize) -> u64 {
        let own = if self.pass == Pass::Backward { 4 } else { 3 };
        let numbers = |b: &Buffer| self.rows(b) * b.what.width(self.heads);
        self.ranks[rank].buffers[own..].iter().map(|b| numbers(b) as u64 * CARRIER_BYTES).sum()
    }

    /// Bytes of a message.
    pub fn bytes(&self, rank: usize, region: &Region) -> u64 {
        let what = self.ranks[rank].buffers[region.buffer].what;
        (self.shards.tokens(region.origin) * region.heads.len() * what.width(self.heads)) as u64
            * CARRIER_BYTES
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
                        write!(
                            f,
                            " {word} {what:?} of {} (rank {}, buffer {});",
                            x.region.origin, x.peer, x.region.buffer
                        )?;
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
