//! The plan of a backward call: tiles of queries and keys, and an order of tasks in which sums of dq can be ordered.
//!
//! A unit is one task: one key tile of one sequence and kv head, against every query tile that sees it. It owns its rows of dk and dv.
//! dq is summed over key tiles in their order: a task waits, for each query tile, until the key tile before it has added its part.
//! Units of one head stand in the queue in that order, so whoever is waited for is already running.

use std::fmt;
use std::ops::Range;

use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, DType, Seen, SeqLen};
use suanpan_ledger::{BackwardBooks, kernel};

use crate::cpu::detect::Machine;
use crate::extras::Extras;
use crate::plan::Limits;
use crate::problem::Problem;

/// The name under which this file refuses a request.
const OP: &str = "attention backward plan";

/// Rows (query tokens × group) of a query tile: whole register tiles of 6 rows, and one panel of 96 rows × 64 columns of q or d_out
/// (24 KiB) stays in the first-level cache while the products for dk and dv stream past it.
const TILE_ROWS_Q: usize = 96;

/// One key tile of one sequence and kv head.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BackwardUnit {
    pub seq: u32,
    pub kv_head: u32,
    pub key_start: usize,
    pub keys: usize,
    /// (query, key) pairs of this tile and of all later ones of its head, about: falls from tile to tile.
    remaining: u64,
}

impl BackwardUnit {
    /// Keys `keys` of sequence `seq` under kv head `kv_head`.
    pub fn new(seq: usize, kv_head: usize, keys: Range<usize>) -> BackwardUnit {
        let (seq, kv_head) = (seq as u32, kv_head as u32);
        BackwardUnit { seq, kv_head, key_start: keys.start, keys: keys.len(), remaining: 0 }
    }
}

/// A sequence with its place in the packed buffers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BackwardSeq {
    pub len: SeqLen,
    pub q_start: usize,
    pub k_start: usize,
    /// Query tiles of all sequences before it.
    pub first_tile: usize,
}

/// Tiles and order of tasks for a batch of sequences. Made once per problem; rescheduled per call without allocation.
#[derive(Clone, Debug)]
pub struct BackwardPlan {
    pub(crate) problem: Problem,
    pub(crate) machine: Machine,
    pub(crate) limits: Limits,
    /// The gradient of the bias is wanted.
    pub(crate) d_bias: bool,
    pub(crate) seqs: Vec<BackwardSeq>,
    pub(crate) units: Vec<BackwardUnit>,
    /// (sequence, query tile), in order.
    pub(crate) tiles: Vec<(u32, u32)>,
    pub(crate) total_q: usize,
    pub(crate) total_k: usize,
}

impl BackwardPlan {
    /// A plan for `problem` on `machine` with room for schedules within `limits`. Refuses unsupported shapes and sizes by name.
    pub fn new(problem: &Problem, machine: &Machine, limits: Limits) -> Result<BackwardPlan, BadArgument> {
        problem.check()?;
        for (field, dtype) in [("q_dtype", problem.q_dtype), ("kv_dtype", problem.kv_dtype)] {
            if dtype.is_code() {
                return Err(BadArgument::new(OP, field, dtype, "f32, bf16, f16"));
            }
        }
        if problem.heads.values_in_keys {
            let supported = "false: the absorbed form is for inference; train on its keys and values apart";
            return Err(BadArgument::new(OP, "values_in_keys", true, supported));
        }
        limits.check(OP)?;
        let mut plan = BackwardPlan {
            problem: *problem,
            machine: *machine,
            limits,
            d_bias: false,
            seqs: Vec::new(),
            units: Vec::new(),
            tiles: Vec::new(),
            total_q: 0,
            total_k: 0,
        };
        plan.check_sizes()?;
        plan.seqs.reserve_exact(limits.max_seqs);
        plan.tiles.reserve_exact(plan.max_tiles());
        plan.units.reserve_exact(plan.max_units());
        Ok(plan)
    }

    /// The same plan, with the gradient of the bias: a second pass that makes scores and d_out·v again (two products more on five), and
    /// so needs no memory for sums over what the bias is broadcast to. Refuses a problem without a bias.
    pub fn with_d_bias(self) -> Result<BackwardPlan, BadArgument> {
        if !self.problem.scores.bias {
            return Err(BadArgument::new(OP, "d_bias", "wanted", "a problem with a bias"));
        }
        Ok(BackwardPlan { d_bias: true, ..self })
    }

    /// The books with the second pass, where it is wanted: it loads what the first one loaded.
    fn with_second_pass(&self, first: BackwardBooks) -> BackwardBooks {
        if !self.d_bias {
            return first;
        }
        BackwardBooks {
            pairs: first.pairs,
            flops: first.flops + kernel::forward_flops(first.pairs, self.problem.heads),
            kv_read_bytes: 2 * first.kv_read_bytes,
            q_read_bytes: 2 * first.q_read_bytes,
        }
    }

    /// What the plan is for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Products that later code multiplies without checks.
    fn check_sizes(&self) -> Result<(), BadArgument> {
        let (h, l) = (self.problem.heads, self.limits);
        let width = h.head_dim_qk + h.head_dim_v + 64;
        checked_product(OP, "max_total_q", &[l.max_total_q, h.num_q_heads, width, 8])?;
        let tiles = l.max_seqlen_k.div_ceil(self.tile_k());
        checked_product(OP, "max_seqs", &[l.max_seqs, tiles, h.num_kv_heads, size_of::<BackwardUnit>()])?;
        checked_product(OP, "max_seqs", &[l.max_seqs, h.num_q_heads, 64])?;
        checked_product(OP, "max_seqs", &[l.max_seqs, l.max_seqlen_k, size_of::<u32>()])?;
        checked_product(OP, "max_seqlen_k", &[l.max_seqlen_k, h.num_kv_heads, width, 8])?;
        Ok(())
    }

    /// Query tokens of a full tile: a pure rule on the heads.
    pub fn tile_q(&self) -> usize {
        (TILE_ROWS_Q / self.problem.heads.group_size()).max(1)
    }

    /// Keys of a full tile: a pure rule on the heads, in multiples of 6 (rows of a register tile of dk and dv).
    pub fn tile_k(&self) -> usize {
        let h = self.problem.heads;
        // K twice (transposed and by rows), V, dk and dv of a tile, 1 MiB at most, beside a query tile in a 2 MiB second-level cache.
        match h.head_dim_qk.max(h.head_dim_v) {
            0..=128 => 384,
            129..=256 => 192,
            _ => 96,
        }
    }

    /// What the ledger expects one call of a sequence of this length to compute and read; with a tree or block mask a bound from above.
    pub fn predicted(&self, len: SeqLen) -> BackwardBooks {
        let p = &self.problem;
        let types = (p.q_dtype, p.kv_dtype);
        self.with_second_pass(kernel::backward_books(
            p.heads,
            p.mask,
            len,
            types,
            self.tile_q(),
            self.tile_k(),
        ))
    }

    /// The same for sequence `seq` of the schedule under the call's tree and block masks, pair by pair. Panics when `extras` do not fit.
    pub fn predicted_with(&self, seq: usize, extras: &Extras<'_>) -> BackwardBooks {
        let (p, BackwardSeq { len, q_start, .. }) = (&self.problem, self.seqs[seq]);
        let tiles = (self.tile_q(), self.tile_k());
        let seen = |head: usize, row: usize, key: usize| extras.sees(p, (seq, len, q_start), head, row, key);
        let types = (p.q_dtype, p.kv_dtype);
        self.with_second_pass(kernel::backward_books_seen(p.heads, p.mask, len, types, tiles, seen))
    }

    /// Lays out a batch. Nothing is allocated within the limits; past them it is a refusal and the plan keeps its old schedule.
    pub fn schedule(&mut self, seqs: &[SeqLen]) -> Result<(), BadArgument> {
        self.limits.check_lengths(OP, seqs)?;
        self.seqs.clear();
        self.units.clear();
        self.tiles.clear();
        (self.total_q, self.total_k) = (0, 0);
        for (i, &len) in seqs.iter().enumerate() {
            let (q_start, k_start, first_tile) = (self.total_q, self.total_k, self.tiles.len());
            self.seqs.push(BackwardSeq { len, q_start, k_start, first_tile });
            self.total_q += len.seqlen_q;
            self.total_k += len.seqlen_k;
            let tiles = len.seqlen_q.div_ceil(self.tile_q());
            self.tiles.extend((0..tiles).map(|tile| (i as u32, tile as u32)));
            self.push_units(i as u32, len);
        }
        // Long chains first; along a chain the rest shrinks, or stays and the position decides: the order that sums of dq need.
        self.units.sort_unstable_by_key(|u| (std::cmp::Reverse(u.remaining), u.key_start, u.seq, u.kv_head));
        Ok(())
    }

    fn push_units(&mut self, seq: u32, len: SeqLen) {
        let (tile_k, mut remaining) = (self.tile_k(), 0);
        for tile in (0..len.seqlen_k.div_ceil(tile_k)).rev() {
            let key_start = tile * tile_k;
            let keys = tile_k.min(len.seqlen_k - key_start);
            // Heads are short and seen by nearly everybody.
            let in_head =
                len.seqlen_q > 0 && key_start < self.problem.mask.visible(len, len.seqlen_q - 1).head;
            let rows = self.rows_that_see(len, key_start..key_start + keys).len();
            remaining += (if in_head { len.seqlen_q } else { rows } * keys) as u64;
            for kv_head in 0..self.problem.heads.num_kv_heads as u32 {
                self.units.push(BackwardUnit { seq, kv_head, key_start, keys, remaining });
            }
        }
    }

    /// Query tokens of a sequence whose run reaches a key of `keys`; starts and ends of visible ranges grow with the token.
    fn rows_that_see(&self, len: SeqLen, keys: Range<usize>) -> Range<usize> {
        let first = |stop: &dyn Fn(Range<usize>) -> bool| {
            let (mut low, mut high) = (0, len.seqlen_q);
            while low < high {
                let middle = low + (high - low) / 2;
                if stop(self.problem.mask.visible(len, middle).run) {
                    high = middle;
                } else {
                    low = middle + 1;
                }
            }
            low
        };
        let start = first(&|seen| seen.end > keys.start);
        start..first(&|seen| seen.start >= keys.end).max(start)
    }

    /// Keys that query tile `tile` of a sequence of this length may see (its hull).
    pub(crate) fn hull(&self, len: SeqLen, tile: usize) -> Seen {
        let start = tile * self.tile_q();
        self.problem.mask.visible_hull(len, start..(start + self.tile_q()).min(len.seqlen_q))
    }

    /// Whether rows of query tile `tile` see other keys than runs of them.
    pub(crate) fn by_bits(&self, len: SeqLen, tile: usize) -> bool {
        let last = ((tile + 1) * self.tile_q()).min(len.seqlen_q) - 1;
        let p = &self.problem;
        p.tree || p.block_mask.is_some() || p.mask.visible(len, last).head > 0
    }

    /// Rows of the widest query tile: query tokens × group.
    pub(crate) fn max_tile_rows(&self) -> usize {
        self.tile_q().min(self.limits.max_total_q.max(1)) * self.problem.heads.group_size()
    }

    /// Query tiles that a schedule within the limits can need.
    pub(crate) fn max_tiles(&self) -> usize {
        self.limits.max_total_q / self.tile_q() + self.limits.max_seqs.min(self.limits.max_total_q)
    }

    fn max_units(&self) -> usize {
        let tiles = self.limits.max_seqlen_k.div_ceil(self.tile_k());
        self.limits.max_seqs * tiles * self.problem.heads.num_kv_heads
    }

    /// Pages that a schedule within the limits can name; 0 when contiguous.
    pub(crate) fn max_pages(&self) -> usize {
        let pages = |page_size| self.limits.max_seqs * self.limits.max_seqlen_k.div_ceil(page_size);
        self.problem.kv.page_size().map_or(0, pages)
    }

    /// Whether queries, keys, values and their gradients are multiplied as pairs of bf16 (sums are f32), weights and gradients of scores
    /// rounded to bf16 for the products after them. Narrow heads stay with f32: at width 1 a gradient of two numbers missed the rule of the
    /// tests by a third. Where between 2 and 32 that ends was not tried.
    pub fn multiplies_pairs(&self) -> bool {
        const LEAST_WIDTH: usize = 32;
        let h = self.problem.heads;
        if h.head_dim_qk.min(h.head_dim_v) < LEAST_WIDTH {
            return false;
        }
        let all_bf16 = self.problem.q_dtype == DType::Bf16 && self.problem.kv_dtype == DType::Bf16;
        self.machine.bf16_dots() && all_bf16
    }

    /// Whether dq is summed in the workspace: narrower elements cannot hold sums.
    pub(crate) fn sums_apart(&self) -> bool {
        self.problem.q_dtype != DType::F32
    }

    /// Bytes of the workspace that this plan alone needs.
    pub fn workspace_bytes(&self) -> usize {
        super::workspace::Sizes::of(self).bytes()
    }
}

impl fmt::Display for BackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.problem;
        let h = p.heads;
        writeln!(
            f,
            "attention backward: {} query heads over {} kv heads, head_dim {}/{}, q {}, kv {}, {}{}, {}; {}",
            h.num_q_heads,
            h.num_kv_heads,
            h.head_dim_qk,
            h.head_dim_v,
            p.q_dtype,
            p.kv_dtype,
            p.mask,
            p.scores,
            p.kv,
            self.machine
        )?;
        let place = if self.sums_apart() { "f32 sums in the workspace" } else { "place" };
        writeln!(
            f,
            "  tile_q {} x tile_k {}: five products a pair of tiles; dq added in order of keys in {place}",
            self.tile_q(),
            self.tile_k()
        )?;
        if self.d_bias {
            writeln!(
                f,
                "  a second pass for the bias: scores and d_out·v again, summed where they are broadcast to"
            )?;
        }
        for s in &self.seqs {
            let tiles = s.len.seqlen_k.div_ceil(self.tile_k()) * h.num_kv_heads;
            writeln!(f, "  q {} k {}: {tiles} tasks", s.len.seqlen_q, s.len.seqlen_k)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use suanpan_base::{HeadShape, Mask};

    fn plan(heads: HeadShape, mask: Mask) -> BackwardPlan {
        let (q_dtype, kv_dtype) = (DType::Bf16, DType::Bf16);
        let problem = Problem { q_dtype, kv_dtype, ..Problem::new(heads, mask) };
        let limits = Limits { max_seqs: 4, max_total_q: 9000, max_seqlen_k: 5000 };
        BackwardPlan::new(&problem, &Machine::detect(2), limits).unwrap()
    }

    #[test]
    fn tiles_of_a_head_stand_in_order_of_keys_and_cover_them_once() {
        for mask in [Mask::FULL, Mask::CAUSAL, Mask::window(100), Mask { left: Some(900), ..Mask::FULL }] {
            let mut p = plan(HeadShape::new(4, 2, 64), mask);
            let lens = [(3000, 3000), (10, 5000), (0, 700), (5000, 1)].map(|(q, k)| SeqLen::new(q, k));
            p.schedule(&lens).unwrap();
            assert_eq!(p.units.capacity(), p.max_units(), "the list of units grew");
            assert_eq!(p.tiles.capacity(), p.max_tiles(), "the list of tiles grew");
            for (seq, len) in lens.iter().enumerate() {
                for kv_head in 0..2 {
                    let of_head = |u: &&BackwardUnit| (u.seq, u.kv_head) == (seq as u32, kv_head);
                    let mut at = 0;
                    for u in p.units.iter().filter(of_head) {
                        assert_eq!(u.key_start, at, "{mask}");
                        at += u.keys;
                    }
                    assert_eq!(at, len.seqlen_k);
                }
            }
        }
    }

    #[test]
    fn rows_that_see_a_key_tile_are_found_by_bisection() {
        for mask in
            [Mask::FULL, Mask::CAUSAL, Mask::window(3), Mask { left: Some(2), right: Some(1), ..Mask::FULL }]
        {
            let p = plan(HeadShape::new(1, 1, 8), mask);
            for (q, k) in [(9, 9), (4, 9), (9, 4), (1, 1), (5, 0)] {
                let len = SeqLen::new(q, k);
                for keys in (0..k).flat_map(|a| (a + 1..=k).map(move |b| a..b)) {
                    let rows = p.rows_that_see(len, keys.clone());
                    for i in 0..q {
                        let seen = mask.visible(len, i).run;
                        let sees = !seen.is_empty() && seen.start < keys.end && seen.end > keys.start;
                        assert_eq!(rows.contains(&i), sees, "{mask} {len:?} {keys:?} row {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_plan_says_its_tiles() {
        let mut p = plan(HeadShape::new(8, 2, 128), Mask::CAUSAL);
        p.schedule(&[SeqLen::new(1000, 1000)]).unwrap();
        let text = p.to_string();
        assert!(text.contains("tile_q 24 x tile_k 384") && text.contains("q 1000 k 1000: 6 tasks"), "{text}");
        assert!(text.contains("f32 sums in the workspace"), "{text}");
    }
}
