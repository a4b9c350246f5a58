//! The plan: which kernel, tile and splits each sequence gets, by pure rules on shapes; nothing here reads data or clocks.
//!
//! A unit is one task: one query tile of one sequence over one range of keys, for one kv head or (direct kernel) several. Tiles depend
//! on (seqlen_q, heads) only and splits on (seqlen_q, visible keys) only, so a sequence's bits depend on nothing else in the batch.

use std::fmt;

use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, DType, Seen, SeqLen};
use suanpan_ledger::{AttnBooks, kernel};

use crate::cpu::detect::Machine;
use crate::cut::{Cut, SEGMENT_KEYS};
use crate::extras::Extras;
use crate::problem::{OP, Problem};

/// Rows (query tokens × group) up to which keys are dotted in place instead of packed.
pub const DIRECT_ROWS: usize = 12;
/// Most rows of a direct task, all its kv heads together.
pub(crate) const DIRECT_TASK_ROWS: usize = 96;
/// Direct tasks a thread below which heads are not put together.
const TASKS_A_THREAD: usize = 4;
/// Keys a block. Blocks and splits stand on absolute multiples of it, so that a row's sums do not depend on its tile.
pub const KEY_BLOCK: usize = 128;

/// Bounds of every later schedule; they size the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences a call.
    pub max_seqs: usize,
    /// Query tokens a call, all sequences together.
    pub max_total_q: usize,
    /// Keys a sequence.
    pub max_seqlen_k: usize,
}

impl Limits {
    /// Refuses counts that schedules hold in 32 bits, in the name of `op`.
    pub(crate) fn check(&self, op: &'static str) -> Result<(), BadArgument> {
        for (field, n) in [("max_seqs", self.max_seqs), ("max_total_q", self.max_total_q)] {
            if n > u32::MAX as usize {
                return Err(BadArgument::new(op, field, n, "at most 2^32 - 1"));
            }
        }
        Ok(())
    }

    /// Refuses a batch that does not fit, in the name of `op`.
    pub(crate) fn check_lengths(&self, op: &'static str, seqs: &[SeqLen]) -> Result<(), BadArgument> {
        if seqs.len() > self.max_seqs {
            let most = format!("at most max_seqs = {}", self.max_seqs);
            return Err(BadArgument::new(op, "seqs", seqs.len(), most));
        }
        let (mut total_q, mut total_k) = (0usize, 0usize);
        for (i, s) in seqs.iter().enumerate() {
            total_q = total_q.saturating_add(s.seqlen_q);
            total_k = total_k.saturating_add(s.seqlen_k);
            if s.seqlen_k > self.max_seqlen_k {
                let most = format!("at most max_seqlen_k = {}", self.max_seqlen_k);
                return Err(BadArgument::new(op, format!("seqs[{i}].seqlen_k"), s.seqlen_k, most));
            }
        }
        if total_q > self.max_total_q {
            let most = format!("at most max_total_q = {}", self.max_total_q);
            return Err(BadArgument::new(op, "total seqlen_q", total_q, most));
        }
        if total_k > isize::MAX as usize {
            return Err(BadArgument::new(op, "total seqlen_k", total_k, "below 2^63"));
        }
        Ok(())
    }
}

/// The kernel that a sequence runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Few rows: K rows dotted where they lie, V rows accumulated one by one; bound by memory.
    Direct,
    /// Many rows: K packed transposed, V widened, register-tiled products; bound by arithmetic.
    Packed,
}

/// One query tile of one sequence over one key range, for some kv heads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unit {
    pub seq: u32,
    pub splits: u32,
    /// Rank of this unit among the splits of its tile.
    pub split: u32,
    /// Query tokens of the tile, within the sequence.
    pub token: usize,
    pub tokens: usize,
    pub kv_head: usize,
    pub kv_heads: usize,
    /// Keys `head_start .. head_end` and, behind them and apart, `key_start .. key_end`.
    pub head_start: usize,
    pub head_end: usize,
    pub key_start: usize,
    pub key_end: usize,
    /// Some row sees other keys than a clipped run of them: rows are looked up bit by bit.
    pub by_bits: bool,
    /// The task takes its keys segment by segment and merges them on the way.
    pub segmented: bool,
    /// First partial row of the tile (only with `splits > 1`).
    pub partial: usize,
    /// Arrival counter of the tile times num_kv_heads.
    pub arrival: usize,
    cost: u64,
}

/// A sequence with its place in the packed query and key buffers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seq {
    pub len: SeqLen,
    pub q_start: usize,
    pub k_start: usize,
}

/// Kernel, tiles and splits for a batch of sequences. Made once per problem; rescheduled per call without allocation.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) problem: Problem,
    pub(crate) machine: Machine,
    pub(crate) limits: Limits,
    pub(crate) seqs: Vec<Seq>,
    pub(crate) units: Vec<Unit>,
    pub(crate) total_q: usize,
    pub(crate) total_k: usize,
    pub(crate) arrivals: usize,
}

impl Plan {
    /// A plan for `problem` on `machine` with room for schedules within `limits`. Refuses unsupported shapes and sizes by name.
    pub fn new(problem: &Problem, machine: &Machine, limits: Limits) -> Result<Plan, BadArgument> {
        problem.check()?;
        limits.check(OP)?;
        let plan = Plan {
            problem: *problem,
            machine: *machine,
            limits,
            seqs: Vec::new(),
            units: Vec::new(),
            total_q: 0,
            total_k: 0,
            arrivals: 0,
        };
        plan.check_sizes()?;
        let units = plan.max_units();
        Ok(Plan { seqs: Vec::with_capacity(limits.max_seqs), units: Vec::with_capacity(units), ..plan })
    }

    /// What the plan is for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Whether queries, keys, values and weights are multiplied as pairs of bf16 (sums are f32). Dropout keeps weights in f32: what it
    /// drops is still part of the sum that outputs are divided by.
    pub fn multiplies_pairs(&self) -> bool {
        let p = &self.problem;
        let all_bf16 = p.q_dtype == DType::Bf16 && p.kv_dtype == DType::Bf16;
        self.machine.bf16_dots() && all_bf16 && p.scores.dropout.is_none()
    }

    /// Products that later code multiplies without checks.
    fn check_sizes(&self) -> Result<(), BadArgument> {
        let h = self.problem.heads;
        let width = h.head_dim_qk + h.head_dim_v;
        let l = self.limits;
        let (splits, tokens) = (self.most_splits(), Cut::tokens(self.problem.batch_invariant));
        checked_product(OP, "max_total_q", &[l.max_total_q, h.num_q_heads, width, 4, splits, 2])?;
        checked_product(OP, "max_seqs", &[l.max_seqs, splits, 2, h.num_q_heads, tokens, width, 4])?;
        checked_product(OP, "max_seqs", &[l.max_seqs, 1 + splits, h.num_kv_heads, size_of::<Unit>()])?;
        checked_product(OP, "max_seqlen_k", &[l.max_seqlen_k, h.num_kv_heads, width, 4])?;
        Ok(())
    }

    /// Query tokens of a full tile: a pure rule on the heads.
    fn full_tile(&self) -> usize {
        let h = self.problem.heads;
        // Rows whose q, scores and o stay in a 1–2 MiB second-level cache beside one block of K and V.
        let rows = match h.head_dim_qk.max(h.head_dim_v) {
            0..=128 => 384,
            129..=256 => 192,
            _ => 96,
        };
        (rows / h.group_size()).max(1)
    }

    /// Query tokens a tile of a sequence of this length: the whole sequence where it fits, else full tiles.
    pub fn tile_q_for(&self, len: SeqLen) -> usize {
        len.seqlen_q.clamp(1, self.full_tile())
    }

    /// How a tile with this hull, of a sequence of `seqlen_q` query tokens, is cut into splits.
    fn cut(&self, hull: &Seen, seqlen_q: usize) -> Cut {
        if self.problem.batch_invariant {
            Cut::segments(hull, seqlen_q)
        } else {
            Cut::balanced(hull, seqlen_q)
        }
    }

    /// The kernel that a sequence of this length runs. In a batch-invariant plan the direct one sums dot products in the packed one's order.
    pub fn kernel_for(&self, len: SeqLen) -> Kernel {
        if len.seqlen_q * self.problem.heads.group_size() <= DIRECT_ROWS {
            Kernel::Direct
        } else {
            Kernel::Packed
        }
    }

    /// Key splits of a sequence of this length: 1 unless one tile of few tokens sees many keys.
    pub fn splits_for(&self, len: SeqLen) -> usize {
        if len.seqlen_q == 0 || len.seqlen_q > self.full_tile() {
            return 1;
        }
        self.cut(&self.problem.mask.visible_hull(len, 0..len.seqlen_q), len.seqlen_q).count
    }

    /// What the ledger expects one call of a sequence of this length to compute and read. With a tree or block mask this is a bound from
    /// above; [`Plan::predicted_with`] looks at the bits.
    pub fn predicted(&self, len: SeqLen) -> AttnBooks {
        let p = &self.problem;
        let mut books = kernel::attention_books(p.heads, p.mask, len, p.kv_dtype, self.tile_q_for(len));
        books.kv_read_bytes += crate::scales::predicted_bytes(self, len);
        books
    }

    /// What the ledger expects the call to compute and read for sequence `seq` of the schedule, under the call's tree and block masks.
    /// Looks at every pair, one by one. Panics when `extras` do not fit the problem.
    pub fn predicted_with(&self, seq: usize, extras: &Extras<'_>) -> AttnBooks {
        let (p, Seq { len, q_start, .. }) = (&self.problem, self.seqs[seq]);
        let seen = |head: usize, row: usize, key: usize| extras.sees(p, (seq, len, q_start), head, row, key);
        let tile = (self.tile_q_for(len), KEY_BLOCK);
        let scale_bytes = p.kv_scale_dtype.bytes_of(1);
        let stored = (p.kv_dtype, p.kv_scales, crate::scales::page_size_of(p), scale_bytes);
        kernel::attention_books_seen(p.heads, p.mask, len, stored, tile, seen)
    }

    /// Lays out a batch. Nothing is allocated within the limits; past them it is a refusal and the plan keeps its old schedule.
    pub fn schedule(&mut self, seqs: &[SeqLen]) -> Result<(), BadArgument> {
        self.limits.check_lengths(OP, seqs)?;
        self.seqs.clear();
        self.units.clear();
        (self.total_q, self.total_k, self.arrivals) = (0, 0, 0);
        let mut partial = 0;
        for (i, &len) in seqs.iter().enumerate() {
            self.seqs.push(Seq { len, q_start: self.total_q, k_start: self.total_k });
            self.total_q += len.seqlen_q;
            self.total_k += len.seqlen_k;
            self.push_units(i as u32, len, &mut partial);
        }
        // Heavy units first: the last ones to finish are small.
        self.units.sort_unstable_by_key(|u| (std::cmp::Reverse(u.cost), u.seq, u.token, u.split, u.kv_head));
        Ok(())
    }

    /// kv heads of a task. Heads of one page lie side by side: a direct task that takes them together reads long runs of memory.
    /// No row's sums depend on it, so it may follow the number of threads.
    fn heads_together(&self, len: SeqLen, splits: usize) -> usize {
        if self.kernel_for(len) == Kernel::Packed {
            return 1;
        }
        let h = self.problem.heads;
        let rows = (len.seqlen_q * h.group_size()).max(1);
        let most = (DIRECT_TASK_ROWS / rows).clamp(1, h.num_kv_heads);
        let tasks = (TASKS_A_THREAD * self.machine.threads()).div_ceil(splits).clamp(1, h.num_kv_heads);
        h.num_kv_heads.div_ceil(tasks).clamp(1, most)
    }

    fn push_units(&mut self, seq: u32, len: SeqLen, partial: &mut usize) {
        let (tile, splits) = (self.tile_q_for(len), self.splits_for(len));
        let heads = self.problem.heads;
        let together = self.heads_together(len, splits);
        let mut token = 0;
        while token < len.seqlen_q {
            let tokens = tile.min(len.seqlen_q - token);
            let hull = self.problem.mask.visible_hull(len, token..token + tokens);
            // Rows before the last one see a head where it does, or have it in their run.
            let apart = self.problem.mask.visible(len, token + tokens - 1).head > 0;
            let by_bits = apart || self.problem.tree || self.problem.block_mask.is_some();
            let cut = if splits > 1 { self.cut(&hull, len.seqlen_q) } else { Cut::WHOLE };
            let segmented = self.problem.batch_invariant && splits == 1;
            for (split, kv_head) in (0..splits).flat_map(|s| heads_of(s, heads.num_kv_heads, together)) {
                let [head, keys] = cut.pieces(&hull, split);
                let kv_heads = together.min(heads.num_kv_heads - kv_head);
                self.units.push(Unit {
                    seq,
                    splits: splits as u32,
                    split: split as u32,
                    token,
                    tokens,
                    kv_head,
                    kv_heads,
                    head_start: head.start,
                    head_end: head.end,
                    key_start: keys.start,
                    key_end: keys.end,
                    by_bits,
                    segmented,
                    partial: *partial,
                    arrival: self.arrivals,
                    cost: ((head.len() + keys.len()) * tokens * kv_heads) as u64,
                });
            }
            if splits > 1 {
                *partial += splits * tokens * heads.num_q_heads;
                self.arrivals += heads.num_kv_heads;
            }
            token += tokens;
        }
    }

    /// Rows of the widest tile: query tokens × group.
    pub(crate) fn max_tile_rows(&self) -> usize {
        self.full_tile().min(self.limits.max_total_q.max(1)) * self.problem.heads.group_size()
    }

    fn max_units(&self) -> usize {
        let l = self.limits;
        let tiles =
            l.max_total_q / self.full_tile() + l.max_seqs.min(l.max_total_q) * (1 + self.most_splits());
        tiles * self.problem.heads.num_kv_heads
    }

    /// Most splits that any sequence within the limits can get.
    fn most_splits(&self) -> usize {
        Cut::most(self.limits.max_seqlen_k, self.problem.batch_invariant)
    }

    /// Partial (o, lse) rows that a schedule within the limits can need.
    pub(crate) fn max_partial_rows(&self) -> usize {
        let (l, splits) = (self.limits, self.most_splits());
        if splits == 1 {
            return 0;
        }
        (l.max_total_q * splits).min(l.max_seqs * Cut::tokens(self.problem.batch_invariant))
            * self.problem.heads.num_q_heads
    }

    /// Arrival counters that a schedule within the limits can need.
    pub(crate) fn max_arrivals(&self) -> usize {
        self.limits.max_seqs.min(self.limits.max_total_q) * self.problem.heads.num_kv_heads
    }

    /// Bytes of the workspace that this plan alone needs.
    pub fn workspace_bytes(&self) -> usize {
        crate::workspace::Sizes::of(self).bytes()
    }
}

/// (split, first kv head) of the tasks of one split.
fn heads_of(split: usize, num_kv_heads: usize, together: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..num_kv_heads).step_by(together).map(move |head| (split, head))
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.problem;
        let h = p.heads;
        let narrowed = match (p.tree, p.block_mask) {
            (false, None) => String::new(),
            (true, None) => " narrowed by a tree".to_string(),
            (tree, Some(b)) => format!(
                " narrowed by blocks of {} x {}{}",
                b.rows,
                b.keys,
                if tree { " and a tree" } else { "" }
            ),
        };
        writeln!(
            f,
            "attention: {} query heads over {} kv heads, head_dim {}/{}{}, q {}, kv {} ({}), {}{narrowed}{}, {}; {}",
            h.num_q_heads,
            h.num_kv_heads,
            h.head_dim_qk,
            h.head_dim_v,
            if h.values_in_keys { " (values in keys, loaded once)" } else { "" },
            p.q_dtype,
            p.kv_dtype,
            p.kv_scales,
            p.mask,
            p.scores,
            p.kv,
            self.machine
        )?;
        for s in &self.seqs {
            let (kernel, tile, splits) =
                (self.kernel_for(s.len), self.tile_q_for(s.len), self.splits_for(s.len));
            let rows = s.len.seqlen_q * h.group_size();
            let why = match kernel {
                _ if p.batch_invariant => {
                    format!("batch-invariant: merged by segments of {SEGMENT_KEYS} keys")
                }
                Kernel::Direct => format!("{rows} rows <= {DIRECT_ROWS}: reading K and V once bounds it"),
                Kernel::Packed => format!("{rows} rows > {DIRECT_ROWS}: packing K is paid back by reuse"),
            };
            let split_why = if splits > 1 && !p.batch_invariant {
                ", one tile alone would leave threads idle"
            } else {
                ""
            };
            writeln!(
                f,
                "  q {} k {}: {kernel:?}, tile_q {tile}, splits {splits} ({why}{split_why})",
                s.len.seqlen_q, s.len.seqlen_k
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use suanpan_base::{DType, HeadShape, Mask};

    fn plan(heads: HeadShape, mask: Mask) -> Plan {
        let (q_dtype, kv_dtype) = (DType::F32, DType::Bf16);
        let problem = Problem { q_dtype, kv_dtype, ..Problem::new(heads, mask) };
        let limits = Limits { max_seqs: 4, max_total_q: 4096, max_seqlen_k: 1 << 20 };
        Plan::new(&problem, &Machine::detect(2), limits).unwrap()
    }

    #[test]
    fn every_schedule_within_the_limits_fits_what_was_reserved() {
        for heads in [HeadShape::new(8, 8, 64), HeadShape::new(32, 1, 128), HeadShape::new(512, 1, 64)] {
            let mut p = plan(heads, Mask::CAUSAL);
            let capacity = p.units.capacity();
            for lens in [
                [(1, 1 << 20); 4],
                [(1024, 5000); 4],
                [(64, 9000); 4],
                [(3000, 3000), (5, 1 << 20), (0, 7), (20, 1)],
            ] {
                p.schedule(&lens.map(|(q, k)| SeqLen::new(q, k))).unwrap();
                assert_eq!(p.units.capacity(), capacity, "the list of units grew");
                let last = p
                    .units
                    .iter()
                    .filter(|u| u.splits > 1)
                    .map(|u| u.partial + u.splits as usize * u.tokens * heads.num_q_heads);
                assert!(last.max().unwrap_or(0) <= p.max_partial_rows());
                assert!(p.arrivals <= p.max_arrivals());
            }
        }
    }

    #[test]
    fn a_plan_says_which_kernel_and_why() {
        let mut p = plan(HeadShape::new(32, 8, 128), Mask::CAUSAL);
        p.schedule(&[SeqLen::extend(32_767, 1), SeqLen::new(512, 512)]).unwrap();
        let text = p.to_string();
        assert!(text.contains("q 1 k 32768: Direct, tile_q 1, splits 16"), "{text}");
        assert!(text.contains("q 512 k 512: Packed, tile_q 96, splits 1"), "{text}");
    }
}
