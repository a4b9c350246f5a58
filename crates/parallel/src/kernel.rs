//! A rank's arithmetic: tiles through `suanpan-attn`'s kernels, partial results merged through `base::lse`, gradients summed in f32.
//!
//! Every tile's plan is made before the first step, and so are scratch and workspace. The backward of a tile starts from the final out
//! and lse, both f32 and unrounded, so that its row constant D is the whole row's and no sum of parts.

use std::collections::HashMap;
use std::ops::Range;

use suanpan_attn::{
    Args, BackwardArgs, BackwardPlan, BackwardWorkspace, BiasStrides, DropoutKey, Extras, KvScales, Limits,
    Machine, Plan, Strides, Workspace,
};
use suanpan_base::{BadArgument, Buf, BufMut, HeadShape, Mask, SeqLen, lse, order_free};
use suanpan_ledger::{AttnBooks, BackwardBooks};

use crate::attention::Attention;
use crate::memory::Memory;
use crate::plan::{ParallelPlan, Pass, Work};
use crate::shard::Run;
use crate::tile::Tile;

/// Kernels of one rank: one plan a kind of tile, one workspace for all.
struct Kernels {
    forward: Vec<Plan>,
    backward: Vec<BackwardPlan>,
    ws: Workspace,
    backward_ws: BackwardWorkspace,
    /// Which plan a kind of tile runs.
    of: HashMap<Key, usize>,
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

/// A kind of tile: mask, query heads, kv heads, and whether it has few queries.
type Key = (Mask, usize, usize, bool);

/// Up to so many queries the kernels would cut keys into splits, to have work for many threads, and merge them in f32. A rank has one thread: such
/// tiles run batch-invariant instead, which cuts at 1,024 keys and keeps lse as good as a long tile's.
const FEW_QUERIES: usize = 32;

fn key(tile: &Tile) -> Key {
    (tile.mask(), tile.q_heads.len(), tile.kv_heads.len(), tile.q.count <= FEW_QUERIES)
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
        for (key @ (mask, q_heads, kv_heads, few), (max_total_q, max_seqlen_k)) in limits {
            let heads = HeadShape::with_widths(q_heads, kv_heads, h.head_dim_qk, h.head_dim_v);
            let (problem, limits) = (
                attention.problem(heads, mask, few || plan.order_free()),
                Limits { max_seqs: 1, max_total_q, max_seqlen_k },
            );
            of.insert(key, forward.len() + backward.len());
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

/// Where a tile's rows lie in a buffer.
struct Rows {
    first: usize,
    token: usize,
    head: usize,
}

/// The arithmetic of one rank: its memory and its kernels.
pub(crate) struct Worker<'p> {
    plan: &'p ParallelPlan,
    pub memory: Memory<'p>,
    attention: &'p Attention,
    kernels: Kernels,
    /// Pairs times query heads, counted by the kernels.
    pub pairs: u64,
}

impl<'p> Worker<'p> {
    /// All memory of the rank, poisoned but for its own buffers: `inputs` and cleared results.
    pub fn new(
        plan: &'p ParallelPlan,
        rank: usize,
        attention: &'p Attention,
        inputs: [Vec<f32>; 2],
    ) -> Result<Worker<'p>, BadArgument> {
        let kernels = Kernels::new(plan, rank, attention)?;
        Ok(Worker { plan, memory: Memory::new(plan, rank, inputs), attention, kernels, pairs: 0 })
    }

    fn rows(&self, number: usize, run: Run, heads: &Range<usize>) -> Rows {
        let [first, token, head] = self.memory.place(number, run, heads);
        Rows { first, token, head }
    }

    fn extras(&self, tile: &Tile) -> Extras<'p> {
        let dropout = self.attention.dropout.map(|(_, seed)| DropoutKey {
            seed,
            first_seq: tile.document as u32,
            first_head: tile.q_heads.start as u32,
            first_row: (tile.q.start - tile.document_start) as u32,
            first_key: (tile.k.start - tile.document_start) as u32,
        });
        let bias = self.attention.bias.as_ref().map(|bias| {
            let strides =
                BiasStrides { seq: 0, head: bias.head_stride, row: bias.row_stride * tile.q.step, key: 1 };
            let first = tile.q_heads.start * bias.head_stride + tile.q.start * bias.row_stride + tile.k.start;
            suanpan_attn::Bias { values: &bias.values[first..], strides }
        });
        Extras { dropout, bias, ..Extras::default() }
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
            q: Buf::F32(&self.memory.buffers[work.q][q.first..]),
            q_strides: (q.token, q.head),
            k: Buf::F32(&self.memory.buffers[work.kv][kv.first..]),
            k_strides: Strides::from((kv.token, kv.head)),
            v: Buf::F32(&self.memory.buffers[work.kv][kv.first + h.head_dim_qk..]),
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
        let (width, order_free) = (self.memory.width(work.result), self.plan.order_free());
        for (i, head) in (0..nq).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            let at = result.first + i * result.token + head * result.head;
            let row = &mut self.memory.buffers[work.result][at..][..width];
            let other = &scratch.rows[(i * heads + head) * dv..][..dv];
            let other_lse = scratch.lse[head * nq + i];
            if order_free {
                let (out, weight) = row.split_at_mut(order_free::words(dv));
                lse::add_order_free(out, weight, other, other_lse);
            } else {
                let (out, pair) = row.split_at_mut(dv);
                lse::merge_pair_into(out, pair, other, [other_lse, 0.0]);
            }
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
        let state = &self.memory.buffers[work.q][q.first..];
        for (i, head) in (0..nq).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            scratch.lse[head * nq + i] = state[i * q.token + head * q.head + dqk + 2 * dv];
        }
        let mut books = [BackwardBooks::default()];
        let args = BackwardArgs {
            q: Buf::F32(state),
            q_strides: (q.token, q.head),
            k: Buf::F32(&self.memory.buffers[work.kv][kv.first..]),
            k_strides: Strides::from((kv.token, kv.head)),
            v: Buf::F32(&self.memory.buffers[work.kv][kv.first + dqk..]),
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
        self.add(work.result, &at, 0, (nq, heads, dqk), |s| &s.rows);
        let d_kv = work.d_kv.expect("a checked plan");
        let at = self.rows(d_kv, tile.k, &tile.kv_heads);
        self.add(d_kv, &at, 0, (nk, kv_heads, dqk), |s| &s.dk);
        let from = if self.plan.order_free() { order_free::words(dqk) } else { dqk };
        self.add(d_kv, &at, from, (nk, kv_heads, dv), |s| &s.dv);
        Ok(())
    }

    /// Adds `[tokens, heads, width]` numbers of the scratch to the rows at `at`, from word `from` of each on.
    fn add(
        &mut self,
        buffer: usize,
        at: &Rows,
        from: usize,
        (tokens, heads, width): (usize, usize, usize),
        numbers: impl Fn(&Scratch) -> &Vec<f32>,
    ) {
        let (order_free, numbers) = (self.plan.order_free(), numbers(&self.kernels.scratch));
        let words = if order_free { order_free::words(width) } else { width };
        for (i, head) in (0..tokens).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            let first = at.first + i * at.token + head * at.head + from;
            let row = &mut self.memory.buffers[buffer][first..][..words];
            let other = &numbers[(i * heads + head) * width..][..width];
            if order_free {
                order_free::add(row, other, 1.0, 0);
            } else {
                row.iter_mut().zip(other).for_each(|(a, b)| *a += b);
            }
        }
    }
}
