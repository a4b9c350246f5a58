//! One task: a unit of the plan, looked at one kv head at a time; where that head's data lies and where its rows go.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use half::bf16;
use suanpan_base::{HeadShape, Mask, Seen, lse};

pub(crate) use super::buffer::{Dst, Src};
use super::kv_scales::Scales;
use super::seen::{Bits, Sight};
use super::vector::Vector;
use crate::dropout::Dropout;
use crate::extras::Extras;
use crate::plan::{DIRECT_TASK_ROWS, KEY_BLOCK, Plan, Unit};
use crate::run::{Args, Strides};
use crate::workspace::TILE_ROWS;
use crate::workspace::{SlotLayout, Workspace, padded};

/// A checked call: raw starts, strides and counters shared by all tasks.
pub(crate) struct Call<'a> {
    pub plan: &'a Plan,
    pub heads: HeadShape,
    pub mask: Mask,
    /// softmax_scale · log2(e), applied to finished dot products (which so stay exact where the data allows): powers of two.
    pub scale_log2: f32,
    /// Softcap in powers of two.
    pub softcap_log2: Option<f32>,
    pub extras: Extras<'a>,
    pub sight: Sight<'a>,
    pub dropout: Option<Dropout>,
    /// From those powers of two back to natural scores, without the rounding of `scale_log2`.
    log2_to_natural: f64,
    pub q: Src,
    q_strides: (usize, usize),
    pub k: Src,
    pub k_strides: Strides,
    pub v: Src,
    pub v_strides: Strides,
    pub scales: Scales,
    page_size: Option<usize>,
    page_table: &'a [u32],
    page_table_stride: usize,
    out: Dst,
    out_strides: (usize, usize),
    lse: Option<*mut f32>,
    max_scores: Option<&'a [AtomicU32]>,
    pub layout: SlotLayout,
    slots: *mut f32,
    slot_len: usize,
    partial_out: *mut f32,
    partial_width: usize,
    partial_lse: *mut f32,
    arrivals: &'a [AtomicU32],
    pub counts: &'a [[AtomicU64; 3]],
}

// SAFETY: inputs are only read; each task writes its own rows of out, lse and partials, and each worker its own slot.
unsafe impl Sync for Call<'_> {}

/// The largest scores as they are raised by all threads; -inf at first.
fn shared_maxima(max: &mut [f32]) -> &[AtomicU32] {
    max.fill(f32::NEG_INFINITY);
    // SAFETY: AtomicU32 has the size and alignment of f32, any bits are a value of it, and the borrow was exclusive.
    unsafe { std::slice::from_raw_parts(max.as_mut_ptr().cast(), max.len()) }
}

/// What a task's loops did.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counts {
    /// (row, visible key) pairs.
    pub pairs: u64,
    /// Keys loaded.
    pub keys: u64,
    /// Scales of keys loaded, and as many of values.
    pub scales: u64,
}

/// The tasks that nobody has taken yet, in order.
pub(crate) struct Queue {
    next: AtomicUsize,
    len: usize,
}

impl Queue {
    /// A queue of tasks `0 .. len`.
    pub fn new(len: usize) -> Queue {
        Queue { next: AtomicUsize::new(0), len }
    }

    /// The next task; each is handed out once.
    pub fn take(&self) -> Option<usize> {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.len).then_some(task)
    }
}

/// A task: its unit, the kv head looked at, and the scratch of the thread that runs it.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub call: &'a Call<'a>,
    pub unit: &'a Unit,
    pub kv_head: usize,
    pub slot: *mut f32,
    pub queue: &'a Queue,
}

/// Runs of keys that lie one after the other: (keys, first token of its page or of the buffer, page).
pub(crate) struct Runs<'a> {
    ids: &'a [u32],
    page_size: usize,
    slot: usize,
    left: usize,
}

impl Iterator for Runs<'_> {
    type Item = (usize, usize, usize);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let (id, rest) = self.ids.split_first().unwrap_or((&0, &[]));
        let run = ((self.page_size - self.slot).min(self.left), self.slot, *id as usize);
        (self.ids, self.slot, self.left) = (rest, 0, self.left - run.0);
        Some(run)
    }
}

/// The parts of a thread's slot.
pub(crate) struct Scratch<'s> {
    pub q: *mut f32,
    pub q_stride: usize,
    pub s: *mut f32,
    pub o: *mut f32,
    pub o_stride: usize,
    pub max: *mut f32,
    pub alpha: *mut f32,
    pub sum: *mut f32,
    /// Sums of weights as their products round them, by lanes; only in a plan that multiplies pairs.
    pub rounded: *mut f32,
    pub k: *mut f32,
    pub v: *mut f32,
    pub panel: *mut f32,
    pub zeros: *mut f32,
    pub merged: *mut f32,
    pub merged_lse: *mut f32,
    /// Scales of a block's keys (with the factor of q·k) and values.
    pub k_scales: *mut f32,
    pub v_scales: *mut f32,
    pub visible: &'s mut [Seen],
    /// Keys of the block at hand that each row sees, where the unit goes by bits (direct kernel: always).
    pub bits: &'s mut [Bits],
    /// Rows of the packed kernel see the bits of the block at hand; of the heads of their keys instead of the runs.
    pub by_bits: bool,
    pub in_head: bool,
    pub k_off: &'s mut [usize],
    pub v_off: &'s mut [usize],
    /// Offsets of the keys of the next block.
    pub k_next: &'s mut [usize],
    pub v_next: &'s mut [usize],
    /// Offsets of a block's rows in `k` and `v`, where the direct kernel widens them.
    pub k_wide: &'s mut [usize],
    pub v_wide: &'s mut [usize],
}

/// The sum of a row's weights.
#[derive(Clone, Copy)]
pub(crate) struct Weight {
    /// Of exact weights: what lse is made of.
    pub sum: f32,
    /// Of the weights that multiplied values: what outputs are divided by.
    pub divisor: f32,
}

impl Scratch<'_> {
    /// The weight of the row that stands at `at` in the slot.
    ///
    /// # Safety
    /// As `Vector`; the slot holds the row.
    #[inline(always)]
    pub unsafe fn weight<V: Vector>(&self, t: &Task<'_>, at: usize) -> Weight {
        // SAFETY: forwarded.
        unsafe {
            let sum = V::load(self.sum.add(at * V::LANES)).reduce_add();
            let divisor = if t.call.plan.multiplies_pairs() {
                V::load(self.rounded.add(at * V::LANES)).reduce_add()
            } else {
                sum
            };
            Weight { sum, divisor }
        }
    }

    /// Sets it to 0.
    ///
    /// # Safety
    /// As [`Scratch::weight`].
    #[inline(always)]
    pub unsafe fn clear_weight<V: Vector>(&self, t: &Task<'_>, at: usize) {
        // SAFETY: forwarded.
        unsafe {
            V::splat(0.0).store(self.sum.add(at * V::LANES));
            if t.call.plan.multiplies_pairs() {
                V::splat(0.0).store(self.rounded.add(at * V::LANES));
            }
        }
    }

    /// Puts the offsets of widened rows in the place of the call's own, or back.
    pub fn swap_wide(&mut self) {
        std::mem::swap(&mut self.k_off, &mut self.k_wide);
        std::mem::swap(&mut self.v_off, &mut self.v_wide);
    }

    /// Columns of the block at `base` that row `row` sees, where rows see runs.
    #[inline(always)]
    pub fn visible_columns(&self, row: usize, base: usize) -> Range<usize> {
        let clip = |key: usize| key.clamp(base, base + KEY_BLOCK) - base;
        let seen = &self.visible[row];
        if self.in_head { 0..clip(seen.head) } else { clip(seen.run.start)..clip(seen.run.end) }
    }
}

impl<'a> Call<'a> {
    /// Borrows the workspace for one call and clears the counters that it will use.
    pub fn new(plan: &'a Plan, args: Args<'a>, ws: &'a mut Workspace) -> Call<'a> {
        let (slots, partial_out, partial_lse) = ws.starts();
        let heads = plan.problem.heads;
        let arrivals = &ws.arrivals[..plan.arrivals];
        let counts = &ws.counts[..plan.seqs.len()];
        arrivals.iter().for_each(|a| a.store(0, Ordering::Relaxed));
        counts.iter().flatten().for_each(|n| n.store(0, Ordering::Relaxed));
        let scale = f64::from(plan.problem.scale());
        let scale_log2 = (scale * std::f64::consts::LOG2_E) as f32;
        Call {
            plan,
            heads,
            mask: plan.problem.mask,
            scale_log2,
            softcap_log2: plan.problem.scores.cap().map(|cap| cap * std::f32::consts::LOG2_E),
            extras: args.extras,
            sight: Sight::new(&plan.problem, &args.extras),
            dropout: plan
                .problem
                .scores
                .dropout
                .zip(args.extras.dropout)
                .map(|(p, key)| Dropout::new(p, key)),
            log2_to_natural: if plan.problem.scores.change_scores() {
                std::f64::consts::LN_2
            } else if scale_log2 == 0.0 {
                // A scale of 0 (or one that rounds to it) leaves every score 0.
                0.0
            } else {
                scale / f64::from(scale_log2)
            },
            q: Src::of(args.q),
            q_strides: args.q_strides,
            k: Src::of(args.k),
            k_strides: args.k_strides,
            v: Src::of(args.v),
            v_strides: args.v_strides,
            scales: Scales::new(plan, &args.kv_scales),
            page_size: plan.problem.kv.page_size(),
            page_table: args.page_table,
            page_table_stride: args.page_table_stride,
            out: Dst::of(args.out),
            out_strides: args.out_strides,
            lse: args.lse.map(|x| x.as_mut_ptr()),
            max_scores: args.max_scores.map(shared_maxima),
            layout: SlotLayout::of(plan),
            slots,
            slot_len: ws.sizes.slot,
            partial_out,
            partial_width: heads.head_dim_v.next_multiple_of(16),
            partial_lse,
            arrivals,
            counts,
        }
    }

    /// Runs task `task` in worker `worker`'s slot. Returns the task that it took from the queue as the next one.
    ///
    /// # Safety
    /// `check` accepted the call; no other thread runs this task or uses this worker's slot.
    pub unsafe fn run_task(&self, task: usize, worker: usize, queue: &Queue) -> Option<usize> {
        let unit = &self.plan.units[task];
        // SAFETY: the workspace holds `threads` slots of `slot_len` floats and `worker < threads`.
        let slot = unsafe { self.slots.add(worker * self.slot_len) };
        let t = Task { call: self, unit, kv_head: unit.kv_head, slot, queue };
        // SAFETY: forwarded.
        let (counts, next) = unsafe { super::run_task(&t) };
        let counted = [counts.pairs, counts.keys, counts.scales];
        for (total, n) in self.counts[unit.seq as usize].iter().zip(counted) {
            total.fetch_add(n, Ordering::Relaxed);
        }
        if unit.splits > 1 {
            for head in 0..unit.kv_heads {
                // SAFETY: forwarded.
                unsafe { t.of_head(head).arrive() };
            }
        }
        next
    }
}

impl<'a> Task<'a> {
    /// The same task, looking at its kv head `head`.
    pub fn of_head(&self, head: usize) -> Task<'a> {
        Task { kv_head: self.unit.kv_head + head, ..*self }
    }

    /// Another task of the same call, to look at its data.
    pub fn other(&self, task: usize) -> Task<'a> {
        let unit = &self.call.plan.units[task];
        Task { unit, kv_head: unit.kv_head, ..*self }
    }

    /// The block that this thread looks at after one of this task: the task's own block `next` or, where it has none, the first block of the
    /// task that is taken from the queue, which stands first.
    #[inline(always)]
    pub fn after(&self, next: Option<usize>) -> (Option<usize>, Option<(Task<'a>, usize)>) {
        if let Some(base) = next {
            return (None, Some((*self, base)));
        }
        let task = self.queue.take();
        let other = task.map(|task| self.other(task));
        (task, other.and_then(|other| Some((other, other.first_block()?))))
    }

    /// Elements from one kv head to the next of K and of V.
    pub fn head_strides(&self) -> (usize, usize) {
        (self.call.k_strides.head, self.call.v_strides.head)
    }

    /// Neighbouring keys that surely lie in one page, from any multiple of it on: the largest power of two in the page size. (Blocks start
    /// at multiples of 128 keys.)
    pub fn run_of_rows(&self) -> usize {
        self.call.page_size.map_or(KEY_BLOCK, |p| (p & p.wrapping_neg()).min(KEY_BLOCK))
    }

    /// The parts of the slot.
    ///
    /// # Safety
    /// One call at a time: the parts are handed out mutably.
    pub unsafe fn scratch(&self) -> Scratch<'_> {
        let (l, slot, heads) = (&self.call.layout, self.slot, self.call.heads);
        let rows = self.rows().max(DIRECT_TASK_ROWS).next_multiple_of(TILE_ROWS);
        // SAFETY: the slot was laid out by the same plan; zeroed floats are valid ranges and offsets, parts do not overlap.
        unsafe {
            let offsets: *mut usize = slot.add(l.offsets).cast();
            Scratch {
                q: slot.add(l.q),
                q_stride: padded(heads.head_dim_qk) / if self.call.plan.multiplies_pairs() { 2 } else { 1 },
                s: slot.add(l.s),
                o: slot.add(l.o),
                o_stride: padded(heads.head_dim_v),
                max: slot.add(l.max),
                alpha: slot.add(l.alpha),
                sum: slot.add(l.sum),
                rounded: slot.add(l.rounded),
                k: slot.add(l.k),
                v: slot.add(l.v),
                panel: slot.add(l.panel),
                zeros: slot.add(l.zeros),
                merged: slot.add(l.merged),
                merged_lse: slot.add(l.merged_lse),
                k_scales: slot.add(l.scales),
                v_scales: slot.add(l.scales + KEY_BLOCK),
                visible: std::slice::from_raw_parts_mut(slot.add(l.visible).cast(), rows),
                by_bits: false,
                in_head: false,
                bits: std::slice::from_raw_parts_mut(slot.add(l.bits).cast(), rows),
                k_off: std::slice::from_raw_parts_mut(offsets, KEY_BLOCK),
                v_off: std::slice::from_raw_parts_mut(offsets.add(KEY_BLOCK), KEY_BLOCK),
                k_next: std::slice::from_raw_parts_mut(offsets.add(2 * KEY_BLOCK), KEY_BLOCK),
                v_next: std::slice::from_raw_parts_mut(offsets.add(3 * KEY_BLOCK), KEY_BLOCK),
                k_wide: std::slice::from_raw_parts_mut(offsets.add(4 * KEY_BLOCK), KEY_BLOCK),
                v_wide: std::slice::from_raw_parts_mut(offsets.add(5 * KEY_BLOCK), KEY_BLOCK),
            }
        }
    }

    /// Rows of the task: query tokens × group, group fastest.
    pub fn rows(&self) -> usize {
        self.unit.tokens * self.call.heads.group_size()
    }

    /// Keys that row `row` sees; where rows see runs, within this task's range.
    pub fn visible(&self, row: usize) -> Seen {
        let token = self.unit.token + row / self.call.heads.group_size();
        let all = self.call.mask.visible(self.call.plan.seqs[self.unit.seq as usize].len, token);
        if self.unit.by_bits {
            return all;
        }
        let start = all.run.start.clamp(self.unit.key_start, self.unit.key_end);
        Seen { head: 0, run: start..all.run.end.clamp(start, self.unit.key_end) }
    }

    fn token_and_head(&self, row: usize) -> (usize, usize) {
        let group = self.call.heads.group_size();
        let q_start = self.call.plan.seqs[self.unit.seq as usize].q_start;
        (q_start + self.unit.token + row / group, self.kv_head * group + row % group)
    }

    /// Sequence, query head and query token (within the sequence) of row `row`.
    pub fn place_of_row(&self, row: usize) -> (usize, usize, usize) {
        let group = self.call.heads.group_size();
        (self.unit.seq as usize, self.kv_head * group + row % group, self.unit.token + row / group)
    }

    /// Row `row` of queries that are bf16.
    pub fn query_bits(&self, row: usize) -> &[bf16] {
        let (token, head) = self.token_and_head(row);
        let at = token * self.call.q_strides.0 + head * self.call.q_strides.1;
        let Src::Bf16(q) = self.call.q else { unreachable!("a plan multiplies pairs of bf16 only") };
        // SAFETY: `check` bounded every (token, head) row of q.
        unsafe { std::slice::from_raw_parts(q.add(at), self.call.heads.head_dim_qk) }
    }

    /// Copies row `row` of the queries to `dst` (head_dim_qk floats, `step` apart).
    ///
    /// # Safety
    /// `dst` has room for `(head_dim_qk - 1) * step + 1` floats.
    pub unsafe fn load_query(&self, row: usize, dst: *mut f32, step: usize) {
        let (token, head) = self.token_and_head(row);
        let at = token * self.call.q_strides.0 + head * self.call.q_strides.1;
        for i in 0..self.call.heads.head_dim_qk {
            // SAFETY: `check` bounded every (token, head) row of q; dst by contract.
            unsafe {
                let x = match self.call.q {
                    Src::F32(p) => *p.add(at + i),
                    Src::Bf16(p) => (*p.add(at + i)).to_f32(),
                    Src::F16(p) => (*p.add(at + i)).to_f32(),
                    _ => unreachable!("queries of this type were refused"),
                };
                *dst.add(i * step) = x;
            }
        }
    }

    /// The runs of neighbours in memory that make up the keys `keys`.
    pub fn runs(&self, keys: Range<usize>) -> Runs<'a> {
        let (c, seq) = (self.call, self.unit.seq as usize);
        let Some(page_size) = c.page_size else {
            let slot = c.plan.seqs[seq].k_start + keys.start;
            return Runs { ids: &[], page_size: usize::MAX, slot, left: keys.len() };
        };
        let ids = &c.page_table[seq * c.page_table_stride + keys.start / page_size..];
        Runs { ids, page_size, slot: keys.start % page_size, left: keys.len() }
    }

    /// Element offsets of the K and V rows of keys `keys`, in order.
    pub fn fill_offsets(&self, keys: Range<usize>, k_off: &mut [usize], v_off: &mut [usize]) {
        let c = self.call;
        let (k_head, v_head) = (self.kv_head * c.k_strides.head, self.kv_head * c.v_strides.head);
        let Some(page_size) = c.page_size else {
            let first = c.plan.seqs[self.unit.seq as usize].k_start + keys.start;
            for i in 0..keys.len() {
                k_off[i] = (first + i) * c.k_strides.token + k_head;
                v_off[i] = (first + i) * c.v_strides.token + v_head;
            }
            return;
        };
        let table = &c.page_table[self.unit.seq as usize * c.page_table_stride..];
        let (mut page, mut slot) = (keys.start / page_size, keys.start % page_size);
        let mut i = 0;
        while i < keys.len() {
            let run = (page_size - slot).min(keys.len() - i);
            let id = table[page] as usize;
            let k_base = id * c.k_strides.page + slot * c.k_strides.token + k_head;
            let v_base = id * c.v_strides.page + slot * c.v_strides.token + v_head;
            let rows = k_off[i..i + run].iter_mut().zip(&mut v_off[i..i + run]);
            for (j, (k, v)) in rows.enumerate() {
                *k = k_base + j * c.k_strides.token;
                *v = v_base + j * c.v_strides.token;
            }
            i += run;
            (page, slot) = (page + 1, 0);
        }
    }

    /// Normalises a row's `o` in place, by its weight, and returns its lse; `max` is in powers of two.
    pub fn settle(&self, row: usize, o: &mut [f32], max: f32, Weight { sum, divisor }: Weight) -> f32 {
        self.note_max(row, max);
        if sum == 0.0 {
            o.fill(0.0);
            return lse::EMPTY_LSE;
        }
        let inverse = 1.0 / divisor;
        o.iter_mut().for_each(|x| *x *= inverse);
        // The maximum goes back by the factor that was really used, so that its rounding to f32 cancels.
        (f64::from(max) * self.call.log2_to_natural + f64::from(sum).ln()) as f32
    }

    /// Takes a finished row: `o` unnormalised, with its weight, `max` in powers of two. Normalises `o` in place.
    ///
    /// # Safety
    /// As `Call::run_task`; `row < self.rows()`.
    pub unsafe fn emit(&self, row: usize, o: &mut [f32], max: f32, weight: Weight) {
        let lse = self.settle(row, o, max, weight);
        // SAFETY: forwarded.
        unsafe {
            if self.unit.splits > 1 {
                let at = self.partial_row(row, self.unit.split as usize);
                let width = self.call.partial_width;
                std::ptr::copy_nonoverlapping(o.as_ptr(), self.call.partial_out.add(at * width), o.len());
                *self.call.partial_lse.add(at) = lse;
            } else {
                self.write(row, o, lse);
            }
        }
    }

    /// Raises the head's largest score.
    fn note_max(&self, row: usize, max: f32) {
        let Some(maxima) = self.call.max_scores else { return };
        let natural = (f64::from(max) * self.call.log2_to_natural) as f32;
        if max > f32::NEG_INFINITY {
            let larger = |old: u32| (natural > f32::from_bits(old)).then_some(natural.to_bits());
            // Nobody reads it before the call ends; an error means that it is larger already.
            let _ =
                maxima[self.place_of_row(row).1].fetch_update(Ordering::Relaxed, Ordering::Relaxed, larger);
        }
    }

    fn partial_row(&self, row: usize, split: usize) -> usize {
        let rows = self.rows();
        let per_tile = self.unit.splits as usize * rows;
        self.unit.partial + self.kv_head * per_tile + split * rows + row
    }

    /// Writes a final row to out and lse; the head's sink joins here, once.
    ///
    /// # Safety
    /// As [`Task::emit`].
    pub unsafe fn write(&self, row: usize, o: &[f32], lse: f32) {
        let (token, head) = self.token_and_head(row);
        let at = token * self.call.out_strides.0 + head * self.call.out_strides.1;
        let (lse, weight) = self.call.extras.sinks.map_or((lse, 1.0), |sinks| {
            let (lse, weight, _) = lse::merge_weights(lse, sinks[head]);
            (lse, weight)
        });
        // A weight of 0 lets no byte of a row through that the sink outweighs.
        // Adding 0 makes one zero of both: a sum over merges and a sum without one may differ in its sign.
        let weighted = |x: f32| if weight == 0.0 { 0.0 } else { x * weight + 0.0 };
        // SAFETY: `check` bounded every (token, head) row of out and lse, and no two rows overlap.
        unsafe {
            self.call.out.write(at, o.iter().map(|&x| weighted(x)));
            if let Some(p) = self.call.lse {
                *p.add(head * self.call.plan.total_q + token) = lse;
            }
        }
    }

    /// Counts this split as done; the last one of its tile merges all of them, in order of keys.
    unsafe fn arrive(&self) {
        let counter = &self.call.arrivals[self.unit.arrival + self.kv_head];
        if counter.fetch_add(1, Ordering::AcqRel) + 1 < self.unit.splits {
            return;
        }
        let (dv, width) = (self.call.heads.head_dim_v, self.call.partial_width);
        for row in 0..self.rows() {
            let first = self.partial_row(row, 0);
            // SAFETY: every split of this tile has arrived (acquire), so its partial rows are written and nobody writes them.
            unsafe {
                let out = std::slice::from_raw_parts_mut(self.call.partial_out.add(first * width), dv);
                let mut total = *self.call.partial_lse.add(first);
                for split in 1..self.unit.splits as usize {
                    let at = self.partial_row(row, split);
                    let other = std::slice::from_raw_parts(self.call.partial_out.add(at * width), dv);
                    lse::merge_into(out, &mut total, other, *self.call.partial_lse.add(at));
                }
                self.write(row, out, total);
            }
        }
    }
}
