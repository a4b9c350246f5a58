//! Scratch memory of a run: one slot a thread, partial results of split tiles, counters. Allocated once, never grown by a run.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use suanpan_base::Seen;

use crate::cpu::seen::Bits;
use crate::plan::{DIRECT_TASK_ROWS, KEY_BLOCK, Plan};

/// Rows of a register tile; packed rows come in multiples of it.
pub(crate) const TILE_ROWS: usize = 6;
/// Widths are padded to this many floats: two vectors of the widest instruction set.
const WIDTH_PAD: usize = 32;
/// Floats a cache line.
pub(crate) const LINE: usize = 16;

/// How many floats, rows and counters a plan needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sizes {
    pub threads: usize,
    /// Floats of one thread's slot.
    pub slot: usize,
    /// Floats of all partial outputs.
    pub partial_out: usize,
    pub partial_rows: usize,
    pub arrivals: usize,
    pub seqs: usize,
}

/// Offsets, in floats, of the parts of one thread's slot. Every part starts on a cache line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLayout {
    pub q: usize,
    pub s: usize,
    pub o: usize,
    pub max: usize,
    pub alpha: usize,
    pub sum: usize,
    /// Sums of rounded weights, in a plan that multiplies pairs.
    pub rounded: usize,
    pub k: usize,
    pub v: usize,
    /// Transposed keys of the direct kernel's ordered dots, in a batch-invariant plan, where k may hold widened rows; k itself in one that multiplies
    /// pairs.
    pub panel: usize,
    pub zeros: usize,
    /// Merged outputs and lse of the segments behind, in a batch-invariant plan.
    pub merged: usize,
    pub merged_lse: usize,
    /// Scales of a block's keys, then of its values.
    pub scales: usize,
    /// `Seen`: visible keys a row.
    pub visible: usize,
    /// `Bits`: visible keys of the block at hand a row.
    pub bits: usize,
    /// usize: element offsets of the K rows and V rows of a block, then of the next one, then of a widened one.
    pub offsets: usize,
    pub end: usize,
}

/// A padded row width.
pub(crate) const fn padded(width: usize) -> usize {
    width.next_multiple_of(WIDTH_PAD)
}

impl SlotLayout {
    pub fn of(plan: &Plan) -> SlotLayout {
        let h = plan.problem.heads;
        let (dqk, dv) = (padded(h.head_dim_qk), padded(h.head_dim_v));
        let rows = plan.max_tile_rows().max(DIRECT_TASK_ROWS).next_multiple_of(TILE_ROWS);
        let (segments, pairs) = (plan.problem.batch_invariant, plan.multiplies_pairs());
        // Pairs of numbers take the place of one.
        let depth = if pairs { 2 } else { 1 };
        let words = size_of::<usize>() / size_of::<f32>();
        let mut end = 0;
        let mut part = |floats: usize| {
            let start = end;
            end += floats.next_multiple_of(LINE);
            start
        };
        let mut layout = SlotLayout {
            q: part(rows * dqk / depth),
            s: part(rows * KEY_BLOCK),
            o: part(rows * dv),
            max: part(rows),
            alpha: part(rows),
            sum: part(rows * LINE),
            rounded: part(if pairs { rows * LINE } else { 0 }),
            k: part(KEY_BLOCK * dqk / depth),
            v: part(KEY_BLOCK * dv / depth),
            panel: part(if segments && !pairs { KEY_BLOCK * dqk } else { 0 }),
            zeros: part(dqk.max(dv)),
            merged: part(if segments { rows * dv } else { 0 }),
            merged_lse: part(if segments { rows } else { 0 }),
            scales: part(2 * KEY_BLOCK),
            visible: part(rows * size_of::<Seen>() / size_of::<f32>()),
            bits: part(rows * size_of::<Bits>() / size_of::<f32>()),
            offsets: part(6 * KEY_BLOCK * words),
            // One line between slots keeps neighbours' prefetches apart.
            end: part(LINE),
        };
        if pairs {
            // Nothing is widened, so k is free for it.
            layout.panel = layout.k;
        }
        layout
    }
}

impl Sizes {
    pub fn of(plan: &Plan) -> Sizes {
        let rows = plan.max_partial_rows();
        Sizes {
            threads: plan.machine.threads(),
            slot: SlotLayout::of(plan).end + LINE,
            partial_out: rows * plan.problem.heads.head_dim_v.next_multiple_of(LINE),
            partial_rows: rows,
            arrivals: if rows == 0 { 0 } else { plan.max_arrivals() },
            seqs: plan.limits.max_seqs,
        }
    }

    fn max(self, b: Sizes) -> Sizes {
        Sizes {
            threads: self.threads.max(b.threads),
            slot: self.slot.max(b.slot),
            partial_out: self.partial_out.max(b.partial_out),
            partial_rows: self.partial_rows.max(b.partial_rows),
            arrivals: self.arrivals.max(b.arrivals),
            seqs: self.seqs.max(b.seqs),
        }
    }

    pub fn bytes(&self) -> usize {
        let floats = self.threads * self.slot + self.partial_out + self.partial_rows;
        floats * size_of::<f32>()
            + self.arrivals * size_of::<AtomicU32>()
            + self.seqs * 3 * size_of::<AtomicU64>()
    }

    /// The first need of `other` that `self` does not meet: (field, needed, held).
    pub fn lacks(&self, other: &Sizes) -> Option<(&'static str, usize, usize)> {
        let pairs = [
            ("threads", other.threads, self.threads),
            ("slot floats", other.slot, self.slot),
            ("partial floats", other.partial_out, self.partial_out),
            ("partial rows", other.partial_rows, self.partial_rows),
            ("arrival counters", other.arrivals, self.arrivals),
            ("sequences", other.seqs, self.seqs),
        ];
        pairs.into_iter().find(|(_, need, have)| need > have)
    }
}

/// Zeroed floats on a cache-line boundary; the operating system makes pages resident as they are touched.
pub(crate) struct Floats {
    start: NonNull<f32>,
    layout: Layout,
}

// SAFETY: a uniquely owned block of plain floats.
unsafe impl Send for Floats {}
// SAFETY: shared references give no access to the floats; run hands out disjoint parts under `&mut Workspace`.
unsafe impl Sync for Floats {}

impl Floats {
    pub fn new(len: usize) -> Floats {
        let bytes = len.max(LINE) * size_of::<f32>();
        let layout = Layout::from_size_align(bytes, 128).expect("plan sizes are checked products");
        // SAFETY: the size is not zero.
        let raw = unsafe { alloc_zeroed(layout) }.cast::<f32>();
        match NonNull::new(raw) {
            Some(start) => Floats { start, layout },
            None => handle_alloc_error(layout),
        }
    }

    /// The first of the floats.
    pub fn start(&mut self) -> *mut f32 {
        self.start.as_ptr()
    }
}

impl Drop for Floats {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr().cast(), self.layout) }
    }
}

/// Scratch for every plan it was made for; one run at a time.
pub struct Workspace {
    pub(crate) sizes: Sizes,
    slots: Floats,
    partial_out: Floats,
    partial_lse: Floats,
    pub(crate) arrivals: Box<[AtomicU32]>,
    /// Row-key pairs, keys and scales loaded of each sequence of the running call.
    pub(crate) counts: Box<[[AtomicU64; 3]]>,
}

impl std::fmt::Debug for Workspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspace").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl Workspace {
    /// Room for any one of `plans` at a time.
    pub fn for_plans(plans: &[&Plan]) -> Workspace {
        let sizes = plans.iter().map(|p| Sizes::of(p)).fold(Sizes::default(), Sizes::max);
        Workspace {
            sizes,
            slots: Floats::new(sizes.threads * sizes.slot),
            partial_out: Floats::new(sizes.partial_out),
            partial_lse: Floats::new(sizes.partial_rows),
            arrivals: (0..sizes.arrivals).map(|_| AtomicU32::new(0)).collect(),
            counts: (0..sizes.seqs).map(|_| Default::default()).collect(),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.sizes.bytes()
    }

    /// Starts of: thread slots, partial outputs, partial lse.
    pub(crate) fn starts(&mut self) -> (*mut f32, *mut f32, *mut f32) {
        (self.slots.start(), self.partial_out.start(), self.partial_lse.start())
    }
}
