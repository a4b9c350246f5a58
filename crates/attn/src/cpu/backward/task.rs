//! One backward task: where its rows lie, what it may touch, and the scratch of the thread that runs it.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;
use suanpan_base::{Buf, BufMut, HeadShape, Mask};

use crate::backward::plan::{BackwardPlan, BackwardUnit};
use crate::backward::run::BackwardArgs;
use crate::backward::workspace::{BackwardWorkspace, Counters, SlotLayout, TILE_BLOCKS};
use crate::cpu::seen::{Bits, Sight};
use crate::cpu::task::{Dst, Src};
use crate::dropout::Dropout;
use crate::extras::Extras;
use crate::run::Strides;
use crate::workspace::TILE_ROWS;

/// A strided buffer that is read.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    pub src: Src,
    strides: Strides,
}

/// A strided buffer that is written.
#[derive(Clone, Copy)]
pub(crate) struct Sink {
    pub dst: Dst,
    strides: Strides,
}

/// Where rows start.
pub(crate) trait Place {
    fn strides(&self) -> &Strides;

    /// The first element of the row of token `token` (of all sequences, or of the first page) and head `head`.
    #[inline(always)]
    fn at(&self, token: usize, head: usize) -> usize {
        token * self.strides().token + head * self.strides().head
    }
}

impl Place for Source {
    fn strides(&self) -> &Strides {
        &self.strides
    }
}

impl Place for Sink {
    fn strides(&self) -> &Strides {
        &self.strides
    }
}

impl Source {
    fn new(buf: Buf<'_>, strides: impl Into<Strides>) -> Source {
        Source { src: Src::of(buf), strides: strides.into() }
    }
}

impl Sink {
    fn new(buf: BufMut<'_>, strides: impl Into<Strides>) -> Sink {
        Sink { dst: Dst::of(buf), strides: strides.into() }
    }

    /// Fills a row with zeros.
    ///
    /// # Safety
    /// A checked row that nobody else touches.
    pub unsafe fn zero_row(&self, token: usize, head: usize, width: usize) {
        let at = self.at(token, head);
        // SAFETY: forwarded; zero bytes are 0.0 in all types.
        unsafe {
            match self.dst {
                Dst::F32(p) => std::ptr::write_bytes(p.add(at), 0, width),
                Dst::Bf16(p) => std::ptr::write_bytes::<bf16>(p.add(at), 0, width),
                Dst::F16(p) => std::ptr::write_bytes(p.add(at), 0, width),
            }
        }
    }
}

/// A checked call: raw starts, strides and counters shared by all tasks.
pub(crate) struct Call<'a> {
    pub plan: &'a BackwardPlan,
    pub heads: HeadShape,
    pub mask: Mask,
    /// softmax_scale, applied to finished dot products.
    pub scale: f32,
    pub q: Source,
    pub k: Source,
    pub v: Source,
    page_size: Option<usize>,
    page_table: &'a [u32],
    page_table_stride: usize,
    pub out: Source,
    pub d_out: Source,
    pub extras: Extras<'a>,
    pub sight: Sight<'a>,
    pub dropout: Option<Dropout>,
    pub d_bias: Option<*mut f32>,
    pub lse: &'a [f32],
    pub d_lse: Option<&'a [f32]>,
    pub dq: Sink,
    pub dk: Sink,
    pub dv: Sink,
    /// Negated lse and delta of every row: `[kv_head][token][group]`.
    pub row_lse: *mut f32,
    pub row_delta: *mut f32,
    /// Sums of dq where dq is too narrow to hold them: rows in the same order, `sums_width` floats each.
    pub sums: *mut f32,
    pub sums_width: usize,
    layout: SlotLayout,
    slots: *mut f32,
    slot_len: usize,
    pub turns: &'a [AtomicU32],
    pub counters: &'a [Counters],
}

// SAFETY: inputs are only read; a task writes row constants or dk and dv of its own rows, dq and sums in its turn, and its worker's slot.
unsafe impl Sync for Call<'_> {}

/// What a task does.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    /// Row constants of one query tile and kv head.
    Prepare { seq: usize, tile: usize, kv_head: usize },
    /// One key tile.
    Keys(BackwardUnit),
    /// One key tile, for the gradient of the bias.
    Bias(BackwardUnit),
}

/// A task and the scratch of the thread that runs it.
pub(crate) struct Task<'a> {
    pub call: &'a Call<'a>,
    pub work: Work,
    slot: *mut f32,
}

/// The rows of a query tile and kv head: query tokens × group, group fastest.
#[derive(Clone, Copy)]
pub(crate) struct TileRows {
    /// Its first row in the order of row constants.
    pub first: usize,
    pub count: usize,
    token: usize,
    kv_head: usize,
    group: usize,
}

impl TileRows {
    /// Query token of the tile and query head of row `row`.
    #[inline(always)]
    pub fn tile_token_and_head(&self, row: usize) -> (usize, usize) {
        (row / self.group, self.kv_head * self.group + row % self.group)
    }

    /// Token (of all sequences) and query head of row `row`.
    #[inline(always)]
    pub fn token_and_head(&self, row: usize) -> (usize, usize) {
        (self.token + row / self.group, self.kv_head * self.group + row % self.group)
    }

    /// As many rows, numbered from 0 as tokens of one head.
    pub fn counted(&self) -> TileRows {
        TileRows { token: 0, kv_head: 0, group: 1, ..*self }
    }
}

/// A query tile as its key tile meets it.
pub(crate) struct Visit {
    pub rows: TileRows,
    /// First query token within the sequence.
    pub token: usize,
    pub turn: usize,
    /// Rows see other keys than runs of them.
    pub by_bits: bool,
    /// Key tiles that add to these rows of dq before this one.
    pub rank: u32,
    /// No key tile comes after this one.
    pub last: bool,
}

/// The parts of a thread's slot.
pub(crate) struct Scratch<'s> {
    pub k_panels: *mut f32,
    pub v_panels: *mut f32,
    pub k: *mut f32,
    pub dk: *mut f32,
    pub dv: *mut f32,
    pub q: *mut f32,
    pub d_out: *mut f32,
    pub dq: *mut f32,
    pub p: *mut f32,
    pub ds: *mut f32,
    /// The operands of a plan that multiplies pairs (`pairs`).
    pub q_pairs: *mut f32,
    pub d_out_pairs: *mut f32,
    pub q2: *mut f32,
    pub d_out2: *mut f32,
    pub k2: *mut f32,
    pub p2: *mut f32,
    pub ds2: *mut f32,
    pub ds_keys: *mut f32,
    pub lse: *mut f32,
    pub delta: *mut f32,
    pub zeros: *mut f32,
    /// Columns of the key tile that each row sees.
    pub visible: &'s mut [Range<usize>],
    /// The same as bits, where the visit goes by bits.
    pub bits: &'s mut [[Bits; TILE_BLOCKS]],
    /// Rows of the query tile that see each group of keys.
    pub seen_by: &'s mut [Range<usize>],
    pub offsets: &'s mut [usize],
    pub qk_stride: usize,
    pub v_stride: usize,
    pub p_stride: usize,
}

impl<'a> Call<'a> {
    /// Borrows the workspace for one call and clears the counters that it will use.
    pub fn new(plan: &'a BackwardPlan, args: BackwardArgs<'a>, ws: &'a mut BackwardWorkspace) -> Call<'a> {
        let (slots, row_lse, sums) = ws.starts();
        let heads = plan.problem.heads;
        let turns = &ws.turns[..plan.tiles.len() * heads.num_kv_heads];
        let counters = &ws.counters[..plan.seqs.len()];
        turns.iter().for_each(|t| t.store(0, Ordering::Relaxed));
        for c in counters {
            for n in [&c.pairs, &c.bias_pairs, &c.keys, &c.rows] {
                n.store(0, Ordering::Relaxed);
            }
        }
        Call {
            plan,
            heads,
            mask: plan.problem.mask,
            scale: plan.problem.scale(),
            q: Source::new(args.q, args.q_strides),
            k: Source::new(args.k, args.k_strides),
            v: Source::new(args.v, args.v_strides),
            page_size: plan.problem.kv.page_size(),
            page_table: args.page_table,
            page_table_stride: args.page_table_stride,
            out: Source::new(args.out, args.out_strides),
            d_out: Source::new(args.d_out, args.d_out_strides),
            extras: args.extras,
            sight: Sight::new(&plan.problem, &args.extras),
            dropout: plan
                .problem
                .scores
                .dropout
                .zip(args.extras.dropout)
                .map(|(p, key)| Dropout::new(p, key)),
            d_bias: args.d_bias.map(|x| x.as_mut_ptr()),
            lse: args.lse,
            d_lse: args.d_lse,
            dq: Sink::new(args.dq, args.dq_strides),
            dk: Sink::new(args.dk, args.dk_strides),
            dv: Sink::new(args.dv, args.dv_strides),
            row_lse,
            // SAFETY: the part holds two floats a row.
            row_delta: unsafe { row_lse.add(ws.sizes.rows) },
            sums,
            sums_width: heads.head_dim_qk.next_multiple_of(crate::workspace::LINE),
            layout: SlotLayout::of(plan),
            slots,
            slot_len: ws.sizes.slot,
            turns,
            counters,
        }
    }

    /// Finds the row constants of query tile `tile` (of all sequences) under kv head `kv_head`.
    ///
    /// # Safety
    /// `check` accepted the call; each pair is prepared once and before any unit runs.
    pub unsafe fn prepare(&self, tile: usize, kv_head: usize) {
        let (seq, tile) = self.plan.tiles[tile];
        let work = Work::Prepare { seq: seq as usize, tile: tile as usize, kv_head };
        // SAFETY: forwarded; the slot is not used.
        unsafe { super::run(&Task { call: self, work, slot: self.slots }) }
    }

    /// Runs unit `unit` in worker `worker`'s slot.
    ///
    /// # Safety
    /// `check` accepted the call; rows are prepared; no other thread runs this unit or uses this worker's slot; units are started in
    /// order, each by a thread that finishes it.
    pub unsafe fn run_unit(&self, unit: usize, worker: usize) {
        // SAFETY: the workspace holds `threads` slots of `slot_len` floats and `worker < threads`.
        let slot = unsafe { self.slots.add(worker * self.slot_len) };
        // SAFETY: forwarded.
        unsafe { super::run(&Task { call: self, work: Work::Keys(self.plan.units[unit]), slot }) }
    }

    /// Independent parts of the gradient of the bias; 0 where it is not wanted.
    pub fn bias_parts(&self) -> usize {
        let Some(bias) = self.extras.bias.filter(|_| self.d_bias.is_some()) else { return 0 };
        let all = |stride: usize, count: usize| if stride == 0 { 1 } else { count };
        let tiles = self.plan.limits.max_seqlen_k.div_ceil(self.plan.tile_k());
        all(bias.strides.seq, self.plan.seqs.len())
            * all(bias.strides.head, self.heads.num_kv_heads)
            * all(bias.strides.key, tiles)
    }

    /// Runs part `part`: the sequences, kv heads and key tiles that share its numbers, one after another.
    ///
    /// # Safety
    /// `check` accepted the call; rows are prepared; no other thread runs this part or uses this worker's slot.
    pub unsafe fn run_bias(&self, part: usize, worker: usize) {
        let strides = self.extras.bias.map_or_else(Default::default, |bias| bias.strides);
        let tile_k = self.plan.tile_k();
        let tiles = self.plan.limits.max_seqlen_k.div_ceil(tile_k);
        let kv_heads = self.heads.num_kv_heads;
        // The part's own index along each dimension that is not broadcast, all of the others.
        let mut rest = part;
        let mut own = |stride: usize, count: usize| {
            if stride == 0 {
                return 0..count;
            }
            let at = rest % count;
            rest /= count;
            at..at + 1
        };
        let (seqs, heads) = (own(strides.seq, self.plan.seqs.len()), own(strides.head, kv_heads));
        let key_tiles = own(strides.key, tiles);
        // SAFETY: the workspace holds `threads` slots of `slot_len` floats and `worker < threads`.
        let slot = unsafe { self.slots.add(worker * self.slot_len) };
        for zero in [true, false] {
            for (seq, head) in seqs.clone().flat_map(|seq| heads.clone().map(move |head| (seq, head))) {
                let keys = self.plan.seqs[seq].len.seqlen_k;
                for tile in key_tiles.start..key_tiles.end.min(keys.div_ceil(tile_k)) {
                    let key_start = tile * tile_k;
                    let unit = BackwardUnit::new(seq, head, key_start..keys.min(key_start + tile_k));
                    let t = Task { call: self, work: Work::Bias(unit), slot };
                    // SAFETY: forwarded; the numbers of these pairs are this part's own.
                    unsafe { if zero { t.zero_bias() } else { super::run(&t) } }
                }
            }
        }
    }

    /// The gradient of head `head`'s sink: minus the sum, over all rows in their order, of the sink's weight times delta. Rows are prepared.
    pub fn d_sink(&self, head: usize) -> f32 {
        let Some(sink) = self.extras.sinks.map(|sinks| sinks[head]).filter(|s| *s > f32::NEG_INFINITY) else {
            return 0.0;
        };
        let group = self.heads.group_size();
        let first = head / group * self.plan.total_q * group + head % group;
        let mut sum = 0.0f64;
        for token in 0..self.plan.total_q {
            // SAFETY: row constants of all tokens and heads were written before; nobody writes them now.
            let delta = unsafe { *self.row_delta.add(first + token * group) };
            let lse = self.lse[head * self.plan.total_q + token];
            sum -= f64::from(sink - lse).exp().min(1.0) * f64::from(delta);
        }
        sum as f32
    }

    /// The rows of query tile `tile` of sequence `seq` under a kv head.
    pub fn tile_rows(&self, seq: usize, tile: usize, kv_head: usize) -> TileRows {
        let (s, group) = (&self.plan.seqs[seq], self.heads.group_size());
        let start = tile * self.plan.tile_q();
        let tokens = self.plan.tile_q().min(s.len.seqlen_q - start);
        let token = s.q_start + start;
        let first = (kv_head * self.plan.total_q + token) * group;
        TileRows { first, count: tokens * group, token, kv_head, group }
    }
}

impl Task<'_> {
    /// The key tile of a `Work::Keys` or `Work::Bias`.
    pub fn unit(&self) -> &BackwardUnit {
        match &self.work {
            Work::Keys(unit) | Work::Bias(unit) => unit,
            Work::Prepare { .. } => unreachable!("only key tiles have a unit"),
        }
    }

    /// Whether scores are bent, biased or dropped on their way.
    pub fn changes_scores(&self) -> bool {
        let scores = &self.call.plan.problem.scores;
        scores.change_scores() || scores.dropout.is_some()
    }

    /// The element at which key `key` of the tile starts in a buffer of keys or values.
    #[inline(always)]
    pub fn key_row(&self, place: &impl Place, key: usize) -> usize {
        let (c, unit) = (self.call, self.unit());
        let (seq, head, key) = (unit.seq as usize, unit.kv_head as usize, unit.key_start + key);
        let Some(page_size) = c.page_size else {
            return place.at(c.plan.seqs[seq].k_start + key, head);
        };
        let page = c.page_table[seq * c.page_table_stride + key / page_size] as usize;
        page * place.strides().page + place.at(key % page_size, head)
    }

    /// Query tile `tile` as this key tile meets it; `None` where they do not see each other.
    pub fn visit(&self, tile: usize) -> Option<Visit> {
        let (c, unit) = (self.call, self.unit());
        let seq = &c.plan.seqs[unit.seq as usize];
        let at = unit.key_start / c.plan.tile_k();
        let [head, run] = c.plan.hull(seq.len, tile).tiles(c.plan.tile_k());
        let rank = if head.contains(&at) {
            at
        } else if run.contains(&at) {
            head.len() + at - run.start
        } else {
            return None;
        };
        let kv_head = unit.kv_head as usize;
        Some(Visit {
            rows: c.tile_rows(unit.seq as usize, tile, kv_head),
            token: tile * c.plan.tile_q(),
            turn: (seq.first_tile + tile) * c.heads.num_kv_heads + kv_head,
            by_bits: c.plan.by_bits(seq.len, tile),
            rank: rank as u32,
            last: rank + 1 == head.len() + run.len(),
        })
    }

    /// The parts of the slot.
    ///
    /// # Safety
    /// One call at a time: the parts are handed out mutably.
    pub unsafe fn scratch(&self) -> Scratch<'_> {
        let (l, slot) = (&self.call.layout, self.slot);
        let rows = self.call.plan.max_tile_rows().next_multiple_of(TILE_ROWS);
        let offsets = rows.max(self.call.plan.tile_k());
        let groups = self.call.plan.tile_k().div_ceil(TILE_ROWS);
        // SAFETY: the slot was laid out by the same plan; zeroed floats are valid ranges and offsets, parts do not overlap.
        unsafe {
            Scratch {
                k_panels: slot.add(l.k_panels),
                v_panels: slot.add(l.v_panels),
                k: slot.add(l.k),
                dk: slot.add(l.dk),
                dv: slot.add(l.dv),
                q: slot.add(l.q),
                d_out: slot.add(l.d_out),
                dq: slot.add(l.dq),
                p: slot.add(l.p),
                ds: slot.add(l.ds),
                q_pairs: slot.add(l.q_pairs),
                d_out_pairs: slot.add(l.d_out_pairs),
                q2: slot.add(l.q2),
                d_out2: slot.add(l.d_out2),
                k2: slot.add(l.k2),
                p2: slot.add(l.p2),
                ds2: slot.add(l.ds2),
                ds_keys: slot.add(l.ds_keys),
                lse: slot.add(l.lse),
                delta: slot.add(l.delta),
                zeros: slot.add(l.zeros),
                visible: std::slice::from_raw_parts_mut(slot.add(l.visible).cast(), rows),
                bits: std::slice::from_raw_parts_mut(slot.add(l.bits).cast(), rows),
                seen_by: std::slice::from_raw_parts_mut(slot.add(l.seen_by).cast(), groups),
                offsets: std::slice::from_raw_parts_mut(slot.add(l.offsets).cast(), offsets),
                qk_stride: l.qk_stride,
                v_stride: l.v_stride,
                p_stride: l.p_stride,
            }
        }
    }
}
