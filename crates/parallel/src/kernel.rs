//! A rank's arithmetic: tiles through `suanpan-attn`'s kernels, partial results merged through `base::lse`, gradients summed in f32.
//!
//! Every tile's plan is made before the first step, and so are scratch and workspace. The backward of a tile starts from the final out
//! and lse, both f32 and unrounded, so that its row constant D is the whole row's and no sum of parts.

use std::collections::HashMap;
use std::ops::Range;

use suanpan_attn::{
    Args, BackwardArgs, BackwardPlan, BackwardWorkspace, DropoutKey, Extras, KvScales, Limits, Machine, Plan,
    Problem, Scores, Strides, Workspace,
};
use suanpan_base::{BadArgument, Buf, BufMut, HeadShape, Mask, SeqLen, lse};
use suanpan_ledger::{AttnBooks, BackwardBooks};

use crate::plan::{OP, ParallelPlan, Pass, Region, What, Work};
use crate::tile::Tile;

/// What happens to scores, for every rank alike. What `suanpan-attn` can do beside this has no field here and so cannot be dropped in silence.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attention {
    /// Factor of q·k; `None` = 1/sqrt(head_dim_qk).
    pub softmax_scale: Option<f32>,
    /// `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Probability and seed. A weight's number follows from its document, head, and query and key within the document: the same ones are
    /// dropped for any ranks, layout and scheme, as in one call over packed documents.
    pub dropout: Option<(f32, u64)>,
}

impl Attention {
    fn problem(&self, heads: HeadShape, mask: Mask) -> Problem {
        let scores =
            Scores { softcap: self.softcap, dropout: self.dropout.map(|(p, _)| p), ..Scores::default() };
        Problem { scores, softmax_scale: self.softmax_scale, ..Problem::new(heads, mask) }
    }

    /// Refuses what a tile of the plan cannot do.
    pub(crate) fn check(&self, plan: &ParallelPlan) -> Result<(), BadArgument> {
        self.problem(plan.heads, plan.mask.mask()).check()?;
        let mut tiles = plan.ranks.iter().flat_map(|r| &r.steps).flat_map(|s| &s.work).map(|w| &w.tile);
        let strided = |t: &Tile| t.q.step > 1 && t.q.count > 1 || t.k.step > 1 && t.k.count > 1;
        if self.dropout.is_some() && tiles.any(strided) {
            let supported = "contiguous or zigzag layouts, or the ulysses scheme: numbers of neighbours must be neighbours";
            return Err(BadArgument::new(OP, "dropout", "in a stripe", supported));
        }
        Ok(())
    }
}

/// One rank's tensors, rows in the order of its shard; f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inputs {
    /// `[tokens, num_q_heads, head_dim_qk]`.
    pub q: Vec<f32>,
    /// `[tokens, num_kv_heads, head_dim_qk]`.
    pub k: Vec<f32>,
    /// `[tokens, num_kv_heads, head_dim_v]`.
    pub v: Vec<f32>,
    /// Backward: the forward's output `[tokens, num_q_heads, head_dim_v]`, unrounded. Forward: empty.
    pub out: Vec<f32>,
    /// Backward: the forward's `[tokens, num_q_heads]`. Forward: empty.
    pub lse: Vec<f32>,
    /// Backward: gradient of `out`. Forward: empty.
    pub d_out: Vec<f32>,
}

/// One rank's results, rows in the order of its shard; f32. Those of the other pass are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outputs {
    /// `[tokens, num_q_heads, head_dim_v]`.
    pub out: Vec<f32>,
    /// `[tokens, num_q_heads]`, natural; -inf where a query sees no key.
    pub lse: Vec<f32>,
    /// `[tokens, num_q_heads, head_dim_qk]`.
    pub dq: Vec<f32>,
    /// `[tokens, num_kv_heads, head_dim_qk]`.
    pub dk: Vec<f32>,
    /// `[tokens, num_kv_heads, head_dim_v]`.
    pub dv: Vec<f32>,
    /// Pairs times query heads that the kernels counted.
    pub pairs: u64,
    /// Bytes handed to other ranks, counted.
    pub sent_bytes: u64,
}

/// Rows side by side: row i of the result is row i of each part, in order.
pub(crate) fn interleave(parts: &[(&[f32], usize)]) -> Vec<f32> {
    let rows = parts.iter().map(|(p, width)| p.len() / width.max(&1)).max().unwrap_or(0);
    let mut all = Vec::with_capacity(parts.iter().map(|(p, _)| p.len()).sum());
    for row in 0..rows {
        parts.iter().for_each(|(p, width)| all.extend_from_slice(&p[row * width..][..*width]));
    }
    all
}

/// The reverse of [`interleave`].
pub(crate) fn split(all: &[f32], widths: &[usize]) -> Vec<Vec<f32>> {
    let width: usize = widths.iter().sum();
    let mut parts: Vec<Vec<f32>> = widths.iter().map(|w| Vec::with_capacity(all.len() / width * w)).collect();
    for row in all.chunks_exact(width) {
        let mut at = 0;
        for (part, w) in parts.iter_mut().zip(widths) {
            part.extend_from_slice(&row[at..at + w]);
            at += w;
        }
    }
    parts
}

/// Kernels of one rank: one plan a kind of tile, one workspace for all.
struct Kernels {
    forward: Vec<Plan>,
    backward: Vec<BackwardPlan>,
    ws: Workspace,
    backward_ws: BackwardWorkspace,
    /// Which plan a kind of tile runs.
    of: HashMap<(Mask, usize, usize), usize>,
    scratch: Scratch,
}

/// A tile's results before they are added.
#[derive(Default)]
struct Scratch {
    rows: Vec<f32>,
    lse: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

fn key(tile: &Tile) -> (Mask, usize, usize) {
    (tile.mask(), tile.q_heads.len(), tile.kv_heads.len())
}

impl Kernels {
    fn new(plan: &ParallelPlan, rank: usize, attention: &Attention) -> Result<Kernels, BadArgument> {
        let (h, mut limits) = (plan.heads, HashMap::new());
        let mut scratch = Scratch::default();
        let grow = |v: &mut Vec<f32>, n: usize| v.resize(v.len().max(n), f32::NAN);
        for tile in plan.ranks[rank].steps.iter().flat_map(|s| &s.work).map(|w| &w.tile) {
            let most: &mut (usize, usize) = limits.entry(key(tile)).or_default();
            *most = (most.0.max(tile.q.count), most.1.max(tile.k.count));
            let (q_rows, k_rows) = (tile.q.count * tile.q_heads.len(), tile.k.count * tile.kv_heads.len());
            grow(&mut scratch.rows, q_rows * h.head_dim_v.max(h.head_dim_qk));
            grow(&mut scratch.lse, q_rows);
            if plan.pass == Pass::Backward {
                grow(&mut scratch.dk, k_rows * h.head_dim_qk);
                grow(&mut scratch.dv, k_rows * h.head_dim_v);
            }
        }
        // One thread a rank: ranks are what runs at once.
        let (machine, mut of) = (Machine::detect(1), HashMap::new());
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        for ((mask, q_heads, kv_heads), (max_total_q, max_seqlen_k)) in limits {
            let heads = HeadShape::with_widths(q_heads, kv_heads, h.head_dim_qk, h.head_dim_v);
            let (problem, limits) =
                (attention.problem(heads, mask), Limits { max_seqs: 1, max_total_q, max_seqlen_k });
            of.insert((mask, q_heads, kv_heads), forward.len() + backward.len());
            match plan.pass {
                Pass::Forward => forward.push(Plan::new(&problem, &machine, limits)?),
                Pass::Backward => backward.push(BackwardPlan::new(&problem, &machine, limits)?),
            }
        }
        let ws = Workspace::for_plans(&forward.iter().collect::<Vec<_>>());
        let backward_ws = BackwardWorkspace::for_plans(&backward.iter().collect::<Vec<_>>());
        Ok(Kernels { forward, backward, ws, backward_ws, of, scratch })
    }
}

/// The memory of one rank: its buffers, by the plan's numbers, and its kernels.
pub(crate) struct Memory<'p> {
    plan: &'p ParallelPlan,
    rank: usize,
    attention: Attention,
    /// `[tokens, heads, width]` each.
    buffers: Vec<Vec<f32>>,
    /// The rank whose tokens a buffer holds that is not whole.
    origins: Vec<usize>,
    kernels: Kernels,
    /// Pairs times query heads, counted by the kernels.
    pub pairs: u64,
}

/// Where a tile's rows lie in a buffer.
struct Rows {
    first: usize,
    token: usize,
    head: usize,
}

impl<'p> Memory<'p> {
    /// All memory of the rank, poisoned but for its own buffers: `inputs` and cleared results.
    pub fn new(
        plan: &'p ParallelPlan,
        rank: usize,
        attention: &Attention,
        inputs: [Vec<f32>; 2],
    ) -> Result<Memory<'p>, BadArgument> {
        let buffers = &plan.ranks[rank].buffers;
        let numbers = |b: &crate::plan::Buffer| plan.rows(b) * b.what.width(plan.heads);
        let mut memory = Memory {
            plan,
            rank,
            attention: *attention,
            buffers: buffers.iter().map(|b| vec![f32::NAN; numbers(b)]).collect(),
            origins: vec![rank; buffers.len()],
            kernels: Kernels::new(plan, rank, attention)?,
            pairs: 0,
        };
        for (number, input) in inputs.iter().enumerate() {
            memory.buffers[number][..input.len()].copy_from_slice(input);
        }
        for number in inputs.len()..if plan.pass == Pass::Backward { 4 } else { 3 } {
            memory.clear(&Region { buffer: number, origin: rank, heads: buffers[number].heads.clone() });
        }
        Ok(memory)
    }

    fn what(&self, buffer: usize) -> What {
        self.plan.ranks[self.rank].buffers[buffer].what
    }

    fn width(&self, buffer: usize) -> usize {
        self.what(buffer).width(self.plan.heads)
    }

    /// Ranges of numbers of a region's tokens, token by token.
    fn spans(&self, r: &Region) -> Vec<Range<usize>> {
        let buffer = &self.plan.ranks[self.rank].buffers[r.buffer];
        let (width, heads) = (self.width(r.buffer), buffer.heads.len());
        let first = (r.heads.start - buffer.heads.start) * width;
        let span =
            |row: usize| row * heads * width + first..row * heads * width + first + r.heads.len() * width;
        if buffer.whole {
            self.plan.shards.positions(r.origin).map(span).collect()
        } else {
            (0..self.plan.shards.tokens(r.origin)).map(span).collect()
        }
    }

    /// The numbers of a region, packed.
    pub fn pack(&self, r: &Region) -> Vec<f32> {
        self.spans(r).into_iter().flat_map(|span| &self.buffers[r.buffer][span]).copied().collect()
    }

    /// Puts packed numbers into a region.
    pub fn unpack(&mut self, r: &Region, message: &[f32]) {
        self.origins[r.buffer] = r.origin;
        let mut rest = message;
        for span in self.spans(r) {
            let (now, later) = rest.split_at(span.len());
            self.buffers[r.buffer][span].copy_from_slice(now);
            rest = later;
        }
    }

    fn fill(&mut self, r: &Region, row: impl Fn(&mut [f32])) {
        self.origins[r.buffer] = r.origin;
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
        let out = self.what(r.buffer) == What::Out;
        self.fill(r, |row| {
            row.fill(0.0);
            if let (true, Some(last)) = (out, row.last_mut()) {
                *last = lse::EMPTY_LSE;
            }
        });
    }

    /// Copies or adds a region to another buffer.
    pub fn shift(&mut self, m: &crate::plan::Move) {
        let (numbers, into) = (self.pack(&m.from), Region { buffer: m.into, ..m.from.clone() });
        if !m.add {
            return self.unpack(&into, &numbers);
        }
        let (out, width) = (self.what(m.into) == What::Out, self.width(m.into));
        let mut rest = numbers.chunks_exact(width);
        for span in self.spans(&into) {
            for (row, other) in self.buffers[m.into][span].chunks_exact_mut(width).zip(&mut rest) {
                add_row(out, row, other);
            }
        }
    }

    /// The rank's result buffer `number`, packed.
    pub fn result(&self, number: usize) -> Vec<f32> {
        let heads = self.plan.ranks[self.rank].buffers[number].heads.clone();
        self.pack(&Region { buffer: number, origin: self.rank, heads })
    }

    fn rows(&self, number: usize, run: crate::shard::Run, heads: &Range<usize>) -> Rows {
        let buffer = &self.plan.ranks[self.rank].buffers[number];
        let (head, row) = (self.width(number), self.width(number) * buffer.heads.len());
        let local = || self.plan.shards.local(self.origins[number], run.start).expect("a checked plan");
        let (first, step) = if buffer.whole { (run.start, run.step) } else { (local(), 1) };
        Rows { first: first * row + (heads.start - buffer.heads.start) * head, token: step * row, head }
    }

    fn extras(&self, tile: &Tile) -> Extras<'static> {
        let dropout = self.attention.dropout.map(|(_, seed)| DropoutKey {
            seed,
            first_seq: tile.document as u32,
            first_head: tile.q_heads.start as u32,
            first_row: (tile.q.start - tile.document_start) as u32,
            first_key: (tile.k.start - tile.document_start) as u32,
        });
        Extras { dropout, ..Extras::default() }
    }

    /// Computes a tile and adds it to its results.
    pub fn work(&mut self, work: &Work) -> Result<(), BadArgument> {
        match self.plan.pass {
            Pass::Forward => self.forward(work),
            Pass::Backward => self.backward(work),
        }
    }

    fn forward(&mut self, work: &Work) -> Result<(), BadArgument> {
        let (tile, h) = (&work.tile, self.plan.heads);
        let (nq, heads, dv) = (tile.q.count, tile.q_heads.len(), h.head_dim_v);
        let q = self.rows(work.q, tile.q, &tile.q_heads);
        let kv = self.rows(work.kv, tile.k, &tile.kv_heads);
        let result = self.rows(work.result, tile.q, &tile.q_heads);
        let extras = self.extras(tile);
        let Kernels { forward, ws, of, scratch, .. } = &mut self.kernels;
        let plan = &mut forward[of[&key(tile)]];
        plan.schedule(&[SeqLen::new(nq, tile.k.count)])?;
        let mut books = [AttnBooks::default()];
        let args = Args {
            q: Buf::F32(&self.buffers[work.q][q.first..]),
            q_strides: (q.token, q.head),
            k: Buf::F32(&self.buffers[work.kv][kv.first..]),
            k_strides: Strides::from((kv.token, kv.head)),
            v: Buf::F32(&self.buffers[work.kv][kv.first + h.head_dim_qk..]),
            v_strides: Strides::from((kv.token, kv.head)),
            page_table: &[],
            page_table_stride: 0,
            kv_scales: KvScales::default(),
            extras,
            out: BufMut::F32(&mut scratch.rows[..nq * heads * dv]),
            out_strides: (heads * dv, dv),
            lse: Some(&mut scratch.lse[..heads * nq]),
            max_scores: None,
        };
        suanpan_attn::run(plan, args, ws, &mut books)?;
        self.pairs += books[0].pairs;
        for (i, head) in (0..nq).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            let row = &mut self.buffers[work.result][result.first + i * result.token + head * result.head..]
                [..dv + 1];
            let (out, last) = row.split_at_mut(dv);
            let other = &scratch.rows[(i * heads + head) * dv..][..dv];
            lse::merge_into(out, &mut last[0], other, scratch.lse[head * nq + i]);
        }
        Ok(())
    }

    fn backward(&mut self, work: &Work) -> Result<(), BadArgument> {
        let (tile, h) = (&work.tile, self.plan.heads);
        let (nq, heads, dqk, dv) = (tile.q.count, tile.q_heads.len(), h.head_dim_qk, h.head_dim_v);
        let (nk, kv_heads) = (tile.k.count, tile.kv_heads.len());
        let q = self.rows(work.q, tile.q, &tile.q_heads);
        let kv = self.rows(work.kv, tile.k, &tile.kv_heads);
        let extras = self.extras(tile);
        let Kernels { backward, backward_ws, of, scratch, .. } = &mut self.kernels;
        let plan = &mut backward[of[&key(tile)]];
        plan.schedule(&[SeqLen::new(nq, nk)])?;
        let state = &self.buffers[work.q][q.first..];
        for (i, head) in (0..nq).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            scratch.lse[head * nq + i] = state[i * q.token + head * q.head + dqk + 2 * dv];
        }
        let mut books = [BackwardBooks::default()];
        let args = BackwardArgs {
            q: Buf::F32(state),
            q_strides: (q.token, q.head),
            k: Buf::F32(&self.buffers[work.kv][kv.first..]),
            k_strides: Strides::from((kv.token, kv.head)),
            v: Buf::F32(&self.buffers[work.kv][kv.first + dqk..]),
            v_strides: Strides::from((kv.token, kv.head)),
            page_table: &[],
            page_table_stride: 0,
            out: Buf::F32(&state[dqk..]),
            out_strides: (q.token, q.head),
            lse: &scratch.lse[..heads * nq],
            d_out: Buf::F32(&state[dqk + dv..]),
            d_out_strides: (q.token, q.head),
            d_lse: None,
            extras,
            d_sinks: None,
            d_bias: None,
            dq: BufMut::F32(&mut scratch.rows[..nq * heads * dqk]),
            dq_strides: (heads * dqk, dqk),
            dk: BufMut::F32(&mut scratch.dk[..nk * kv_heads * dqk]),
            dk_strides: Strides::from((kv_heads * dqk, dqk)),
            dv: BufMut::F32(&mut scratch.dv[..nk * kv_heads * dv]),
            dv_strides: Strides::from((kv_heads * dv, dv)),
        };
        suanpan_attn::run_backward(plan, args, backward_ws, &mut books)?;
        self.pairs += books[0].pairs;
        let at = self.rows(work.result, tile.q, &tile.q_heads);
        add_rows(&mut self.buffers[work.result], &at, 0, (nq, heads, dqk), &self.kernels.scratch.rows);
        let d_kv = work.d_kv.expect("a checked plan");
        let at = self.rows(d_kv, tile.k, &tile.kv_heads);
        add_rows(&mut self.buffers[d_kv], &at, 0, (nk, kv_heads, dqk), &self.kernels.scratch.dk);
        add_rows(&mut self.buffers[d_kv], &at, dqk, (nk, kv_heads, dv), &self.kernels.scratch.dv);
        Ok(())
    }
}

/// Adds one row to another: partial outputs by their lse, everything else number by number.
fn add_row(out: bool, row: &mut [f32], other: &[f32]) {
    if out {
        let last = row.len() - 1;
        let (o, l) = row.split_at_mut(last);
        lse::merge_into(o, &mut l[0], &other[..last], other[last]);
    } else {
        row.iter_mut().zip(other).for_each(|(a, b)| *a += b);
    }
}

/// Adds `[tokens, heads, width]` numbers to the rows at `at`, from element `from` of each on.
fn add_rows(
    buffer: &mut [f32],
    at: &Rows,
    from: usize,
    (tokens, heads, width): (usize, usize, usize),
    numbers: &[f32],
) {
    for (i, head) in (0..tokens).flat_map(|i| (0..heads).map(move |head| (i, head))) {
        let row = &mut buffer[at.first + i * at.token + head * at.head + from..][..width];
        add_row(false, row, &numbers[(i * heads + head) * width..][..width]);
    }
}
