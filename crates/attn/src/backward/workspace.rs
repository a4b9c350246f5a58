//! Scratch memory of a backward run: one slot a thread, lse and delta of every row, sums of dq in f32 where q is narrower, counters.

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::plan::BackwardPlan;
use crate::cpu::seen::Bits;
use crate::workspace::{Floats, LINE, TILE_ROWS};

/// Blocks of 128 keys of the widest key tile.
pub(crate) const TILE_BLOCKS: usize = 3;

/// How many floats and counters a plan needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sizes {
    pub threads: usize,
    /// Floats of one thread's slot.
    pub slot: usize,
    /// Rows (query tokens × query heads), each with its lse and its delta.
    pub rows: usize,
    /// Floats of the sums of dq; 0 where dq holds them itself.
    pub sums: usize,
    /// Turns: one a query tile and kv head.
    pub turns: usize,
    pub seqs: usize,
    /// Page ids, in order, to find one that stands twice.
    pub pages: usize,
}

/// A row width in floats: whole cache lines, an odd number of them, so that rows spread over all sets of a cache.
pub(crate) const fn odd_lines(width: usize) -> usize {
    (width.div_ceil(LINE) | 1) * LINE
}

/// Offsets, in floats, of the parts of one thread's slot. Every part starts on a cache line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLayout {
    /// Keys and values, transposed: panels `[width][panel]`.
    pub k_panels: usize,
    pub v_panels: usize,
    /// Keys by rows.
    pub k: usize,
    pub dk: usize,
    pub dv: usize,
    /// A query tile, by rows.
    pub q: usize,
    pub d_out: usize,
    pub dq: usize,
    /// Probabilities and gradients of scores, `[row][tile_k]`.
    pub p: usize,
    pub ds: usize,
    /// The operands of a plan that multiplies pairs: rows along their width; pairs of rows, of keys; p and ds in pairs of rows, ds in pairs of
    /// keys.
    pub q_pairs: usize,
    pub d_out_pairs: usize,
    pub q2: usize,
    pub d_out2: usize,
    pub k2: usize,
    pub p2: usize,
    pub ds2: usize,
    pub ds_keys: usize,
    /// Negated lse and delta of the tile's rows.
    pub lse: usize,
    pub delta: usize,
    pub zeros: usize,
    /// usize pairs: visible key range a row.
    pub visible: usize,
    /// `[Bits; TILE_BLOCKS]`: visible keys a row, where rows do not see runs.
    pub bits: usize,
    /// usize pairs: the rows that see a group of keys.
    pub seen_by: usize,
    /// usize: element offsets of rows of K, V or q.
    pub offsets: usize,
    pub end: usize,
    /// Floats from row to row: of K, q, dk and dq; of d_out and dv; of p and ds.
    pub qk_stride: usize,
    pub v_stride: usize,
    pub p_stride: usize,
}

impl SlotLayout {
    pub fn of(plan: &BackwardPlan) -> SlotLayout {
        let h = plan.problem.heads;
        let rows = plan.max_tile_rows().next_multiple_of(TILE_ROWS);
        let keys = plan.tile_k();
        // Panels are up to 64 keys wide.
        let panels = keys.next_multiple_of(64);
        let (qk_stride, v_stride) = (odd_lines(h.head_dim_qk), odd_lines(h.head_dim_v));
        // A line past the tile's keys takes the zeros beside a row's visible keys.
        let p_stride = odd_lines(keys + LINE);
        let pairs = usize::from(plan.multiplies_pairs());
        let words = size_of::<usize>() / size_of::<f32>();
        let mut end = 0;
        let mut part = |floats: usize| {
            let start = end;
            end += floats.next_multiple_of(LINE);
            start
        };
        SlotLayout {
            k_panels: part(panels * h.head_dim_qk),
            v_panels: part(panels * h.head_dim_v),
            k: part(keys * qk_stride),
            dk: part(keys * qk_stride),
            dv: part(keys * v_stride),
            q: part(rows * qk_stride),
            d_out: part(rows * v_stride),
            dq: part(rows * qk_stride),
            p: part(rows * p_stride),
            ds: part(rows * p_stride),
            q_pairs: part(pairs * rows * qk_stride),
            d_out_pairs: part(pairs * rows * v_stride),
            q2: part(pairs * rows / 2 * qk_stride),
            d_out2: part(pairs * rows / 2 * v_stride),
            k2: part(pairs * keys.div_ceil(2) * qk_stride),
            p2: part(pairs * rows / 2 * p_stride),
            ds2: part(pairs * rows / 2 * p_stride),
            ds_keys: part(pairs * rows * p_stride),
            lse: part(rows),
            delta: part(rows),
            zeros: part(h.head_dim_qk.max(h.head_dim_v) + LINE),
            visible: part(rows * 2 * words),
            bits: part(rows * TILE_BLOCKS * size_of::<Bits>() / size_of::<f32>()),
            seen_by: part(keys.div_ceil(TILE_ROWS) * 2 * words),
            offsets: part(rows.max(keys) * words),
            // One line between slots keeps neighbours' prefetches apart.
            end: part(LINE),
            qk_stride,
            v_stride,
            p_stride,
        }
    }
}

impl Sizes {
    pub fn of(plan: &BackwardPlan) -> Sizes {
        let h = plan.problem.heads;
        let rows = plan.limits.max_total_q * h.num_q_heads;
        Sizes {
            threads: plan.machine.threads(),
            slot: SlotLayout::of(plan).end + LINE,
            rows,
            sums: if plan.sums_apart() { rows * h.head_dim_qk.next_multiple_of(LINE) } else { 0 },
            turns: plan.max_tiles() * h.num_kv_heads,
            seqs: plan.limits.max_seqs,
            pages: plan.max_pages(),
        }
    }

    fn max(self, b: Sizes) -> Sizes {
        Sizes {
            threads: self.threads.max(b.threads),
            slot: self.slot.max(b.slot),
            rows: self.rows.max(b.rows),
            sums: self.sums.max(b.sums),
            turns: self.turns.max(b.turns),
            seqs: self.seqs.max(b.seqs),
            pages: self.pages.max(b.pages),
        }
    }

    pub fn bytes(&self) -> usize {
        let floats = self.threads * self.slot + 2 * self.rows + self.sums;
        floats * size_of::<f32>()
            + (self.turns + self.pages) * size_of::<u32>()
            + self.seqs * size_of::<Counters>()
    }

    /// The first need of `other` that `self` does not meet: (field, needed, held).
    pub fn lacks(&self, other: &Sizes) -> Option<(&'static str, usize, usize)> {
        let pairs = [
            ("threads", other.threads, self.threads),
            ("slot floats", other.slot, self.slot),
            ("rows", other.rows, self.rows),
            ("floats of dq sums", other.sums, self.sums),
            ("turns", other.turns, self.turns),
            ("sequences", other.seqs, self.seqs),
            ("pages", other.pages, self.pages),
        ];
        pairs.into_iter().find(|(_, need, have)| need > have)
    }
}

/// What the running call did for one sequence.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// (row, visible key) pairs.
    pub pairs: AtomicU64,
    /// The same in the pass for the bias.
    pub bias_pairs: AtomicU64,
    /// Keys loaded.
    pub keys: AtomicU64,
    /// Rows of q and d_out loaded.
    pub rows: AtomicU64,
}

/// Scratch for every plan it was made for; one run at a time.
pub struct BackwardWorkspace {
    pub(crate) sizes: Sizes,
    slots: Floats,
    rows: Floats,
    sums: Floats,
    /// Key tiles that have added their part of dq, a query tile and kv head.
    pub(crate) turns: Box<[AtomicU32]>,
    pub(crate) counters: Box<[Counters]>,
    pub(crate) pages: Box<[u32]>,
}

impl std::fmt::Debug for BackwardWorkspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackwardWorkspace").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl BackwardWorkspace {
    /// Room for any one of `plans` at a time.
    pub fn for_plans(plans: &[&BackwardPlan]) -> BackwardWorkspace {
        let sizes = plans.iter().map(|p| Sizes::of(p)).fold(Sizes::default(), Sizes::max);
        BackwardWorkspace {
            sizes,
            slots: Floats::new(sizes.threads * sizes.slot),
            rows: Floats::new(2 * sizes.rows),
            sums: Floats::new(sizes.sums),
            turns: (0..sizes.turns).map(|_| AtomicU32::new(0)).collect(),
            counters: (0..sizes.seqs).map(|_| Counters::default()).collect(),
            pages: vec![0; sizes.pages].into(),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.sizes.bytes()
    }

    /// Starts of: thread slots, lse of rows (deltas lie `sizes.rows` further), sums of dq.
    pub(crate) fn starts(&mut self) -> (*mut f32, *mut f32, *mut f32) {
        (self.slots.start(), self.rows.start(), self.sums.start())
    }
}
