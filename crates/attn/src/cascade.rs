//! Attention of many requests over one shared prefix: their queries together over the prefix, each over its own suffix, one merge.
//!
//! ```text
//! K/V:   [ shared prefix ][ suffix of request 0 ]      out, lse = merge(all queries x prefix, queries of i x suffix i)
//!                         [ suffix of request 1 ]
//! ```
//! The prefix is read once a tile of queries instead of once a request (cascade inference, FlashInfer; Hydragen, arXiv 2402.05099). Exact:
//! both parts carry (o, lse) in f32. Deliberately only masks under which every query sees the whole prefix.

use rayon::prelude::*;
use suanpan_base::error::checked_product;
use suanpan_base::lse::merge_into;
use suanpan_base::{BadArgument, Buf, BufMut, DType, Mask, SeqLen};
use suanpan_ledger::AttnBooks;

use crate::cpu::detect::Machine;
use crate::cpu::task::Dst;
use crate::extras::Extras;
use crate::plan::{Limits, Plan};
use crate::problem::{KvLayout, Problem};
use crate::run::{Args, Strides, run};
use crate::scales::KvScales;
use crate::workspace::Workspace;

const OP: &str = "cascade attention";

fn refuse(
    field: impl Into<String>,
    asked: impl std::fmt::Display,
    supported: impl std::fmt::Display,
) -> BadArgument {
    BadArgument::new(OP, field, asked, supported)
}

/// The plans of both parts. Made once per problem; rescheduled per call without allocation.
#[derive(Clone, Debug)]
pub struct CascadePlan {
    problem: Problem,
    prefix: Plan,
    suffix: Plan,
}

/// Keys and values of one part, as in [`Args`].
#[derive(Clone, Copy, Debug)]
pub struct KvArgs<'a> {
    /// Keys.
    pub k: Buf<'a>,
    /// Strides of `k`.
    pub k_strides: Strides,
    /// Values.
    pub v: Buf<'a>,
    /// Strides of `v`.
    pub v_strides: Strides,
    /// Page ids: one row for the prefix, one a request for the suffixes. Empty when contiguous.
    pub page_table: &'a [u32],
    /// Ids from one row of `page_table` to the next.
    pub page_table_stride: usize,
    /// Scales of K and V.
    pub kv_scales: KvScales<'a>,
}

/// The buffers of one call.
#[derive(Debug)]
pub struct CascadeArgs<'a> {
    /// Queries of all requests `[total_q, num_q_heads, head_dim_qk]`, packed in schedule order.
    pub q: Buf<'a>,
    /// (token, head) strides of `q`.
    pub q_strides: (usize, usize),
    /// The shared prefix: one sequence.
    pub prefix: KvArgs<'a>,
    /// The suffixes, in schedule order.
    pub suffix: KvArgs<'a>,
    /// `[num_q_heads]`: sink logits, where the problem has sinks.
    pub sinks: Option<&'a [f32]>,
    /// Output `[total_q, num_q_heads, head_dim_v]`, of q's element type.
    pub out: BufMut<'a>,
    /// (token, head) strides of `out`; rows must not overlap.
    pub out_strides: (usize, usize),
    /// `[num_q_heads, total_q]`, natural log.
    pub lse: Option<&'a mut [f32]>,
}

/// Scratch of both parts: widened queries, both results in f32.
#[derive(Debug)]
pub struct CascadeWorkspace {
    ws: Workspace,
    q: Vec<f32>,
    out: [Vec<f32>; 2],
    lse: [Vec<f32>; 2],
}

impl CascadePlan {
    /// A plan for `problem` with room for schedules within `limits`, which count suffixes, and prefixes of up to `max_prefix_len` keys.
    ///
    /// Refuses by name what does not let every query see the whole prefix, or would have to know where it starts: windows, chunks, top-left
    /// alignment, sink tokens, trees, block masks, bias, ALiBi, dropout.
    pub fn new(
        problem: &Problem,
        machine: &Machine,
        limits: Limits,
        max_prefix_len: usize,
    ) -> Result<CascadePlan, BadArgument> {
        if problem.mask != Mask::FULL && problem.mask != Mask::CAUSAL {
            return Err(refuse("mask", problem.mask, "full, causal"));
        }
        for (field, there) in [
            ("tree", problem.tree),
            ("block_mask", problem.block_mask.is_some()),
            ("bias", problem.scores.bias),
            ("alibi", problem.scores.alibi),
            ("dropout", problem.scores.dropout.is_some()),
        ] {
            if there {
                return Err(refuse(field, "asked for", "softcap and sinks"));
            }
        }
        if problem.q_dtype.is_code() {
            return Err(refuse("q_dtype", problem.q_dtype, "f32, bf16, f16"));
        }
        let wide = Problem { q_dtype: DType::F32, ..*problem };
        let mut scores = wide.scores;
        scores.sink = false;
        let whole = Limits { max_seqs: 1, max_seqlen_k: max_prefix_len, ..limits };
        let prefix = Plan::new(&Problem { mask: Mask::FULL, scores, ..wide }, machine, whole)?;
        let suffix = Plan::new(&wide, machine, limits)?;
        let h = problem.heads;
        checked_product(
            OP,
            "max_total_q",
            &[limits.max_total_q, h.num_q_heads, h.head_dim_qk.max(h.head_dim_v), 8],
        )?;
        Ok(CascadePlan { problem: *problem, prefix, suffix })
    }

    /// Lays out a call: `prefix_len` shared keys, and each request's queries and own keys. A refusal keeps the old schedule.
    pub fn schedule(&mut self, prefix_len: usize, seqs: &[SeqLen]) -> Result<(), BadArgument> {
        if let Some((i, len)) = seqs.iter().enumerate().find(|(_, len)| len.prefix_len > 0) {
            return Err(refuse(
                format!("seqs[{i}].prefix_len"),
                len.prefix_len,
                "0: the shared prefix is the prefix",
            ));
        }
        let total_q = seqs.iter().fold(0usize, |sum, s| sum.saturating_add(s.seqlen_q));
        let whole = [SeqLen::new(total_q, prefix_len)];
        self.prefix.limits.check_lengths(OP, &whole)?;
        self.suffix.schedule(seqs)?;
        self.prefix.schedule(&whole)
    }

    /// What the ledger expects: of the prefix, and of each suffix.
    pub fn predicted(&self) -> (AttnBooks, impl Iterator<Item = AttnBooks>) {
        let of = |plan: &Plan, i: usize| plan.predicted(plan.seqs[i].len);
        let prefix = if self.prefix.seqs.is_empty() { AttnBooks::default() } else { of(&self.prefix, 0) };
        (prefix, (0..self.suffix.seqs.len()).map(move |i| of(&self.suffix, i)))
    }

    /// The plans of the prefix and of the suffixes, which say their kernels.
    pub fn parts(&self) -> (&Plan, &Plan) {
        (&self.prefix, &self.suffix)
    }
}

impl CascadeWorkspace {
    /// Room for `plan`.
    pub fn for_plan(plan: &CascadePlan) -> CascadeWorkspace {
        let h = plan.problem.heads;
        let rows = plan.suffix.limits.max_total_q * h.num_q_heads;
        CascadeWorkspace {
            ws: Workspace::for_plans(&[&plan.prefix, &plan.suffix]),
            q: vec![0.0; rows * h.head_dim_qk],
            out: [vec![0.0; rows * h.head_dim_v], vec![0.0; rows * h.head_dim_v]],
            lse: [vec![0.0; rows], vec![0.0; rows]],
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let floats = |x: &[Vec<f32>; 2]| x.iter().map(Vec::len).sum::<usize>();
        self.ws.bytes() + (self.q.len() + floats(&self.out) + floats(&self.lse)) * size_of::<f32>()
    }
}

/// Runs the plan's current schedule. Adds to `prefix_books` and to `books[i]` what was counted of the prefix and of suffix `i`.
///
/// Call it from inside a rayon pool. A refused call has touched neither `out` nor `lse`.
pub fn run_cascade(
    plan: &CascadePlan,
    args: CascadeArgs<'_>,
    ws: &mut CascadeWorkspace,
    prefix_books: &mut AttnBooks,
    books: &mut [AttnBooks],
) -> Result<(), BadArgument> {
    let (p, total_q) = (&plan.problem, plan.suffix.total_q);
    let h = p.heads;
    let (q_width, o_width) = (h.num_q_heads * h.head_dim_qk, h.num_q_heads * h.head_dim_v);
    check(plan, &args, ws)?;
    widen(&args, total_q, (h.num_q_heads, h.head_dim_qk), &mut ws.q);
    let CascadeWorkspace { ws: scratch, q, out, lse } = ws;
    let mut counted = [AttnBooks::default()];
    let parts = [(&plan.prefix, &args.prefix, None), (&plan.suffix, &args.suffix, args.sinks)];
    for (i, ((part, kv, sinks), (out, lse))) in
        parts.into_iter().zip(out.iter_mut().zip(lse.iter_mut())).enumerate()
    {
        let args = Args {
            q: Buf::F32(&q[..total_q * q_width]),
            q_strides: (q_width, h.head_dim_qk),
            k: kv.k,
            k_strides: kv.k_strides,
            v: kv.v,
            v_strides: kv.v_strides,
            page_table: kv.page_table,
            page_table_stride: kv.page_table_stride,
            kv_scales: kv.kv_scales,
            extras: Extras { sinks, ..Extras::default() },
            out: BufMut::F32(&mut out[..total_q * o_width]),
            out_strides: (o_width, h.head_dim_v),
            lse: Some(&mut lse[..total_q * h.num_q_heads]),
            max_scores: None,
        };
        let books = if i == 0 { &mut counted[..part.seqs.len()] } else { &mut *books };
        run(part, args, scratch, books)
            .map_err(|e| BadArgument { field: format!("{} {}", ["prefix", "suffix"][i], e.field), ..e })?;
    }
    *prefix_books += counted[0];
    merge(plan, args, out, lse);
    Ok(())
}

/// What `run` does not see: the call's own queries and outputs, and the workspace.
fn check(plan: &CascadePlan, args: &CascadeArgs<'_>, ws: &CascadeWorkspace) -> Result<(), BadArgument> {
    let (p, n) = (&plan.problem, plan.suffix.total_q);
    let h = p.heads;
    for (field, got) in [("q dtype", args.q.dtype()), ("out dtype", args.out.dtype())] {
        if got != p.q_dtype {
            return Err(refuse(field, got, format!("{}, as planned", p.q_dtype)));
        }
    }
    crate::check::check_rows("q", args.q.len(), args.q_strides, n, h.num_q_heads, h.head_dim_qk)?;
    crate::check::check_rows("out", args.out.len(), args.out_strides, n, h.num_q_heads, h.head_dim_v)?;
    crate::check::check_disjoint(args.out_strides, n, h.num_q_heads, h.head_dim_v)?;
    if let Some(lse) = &args.lse
        && lse.len() != n * h.num_q_heads
    {
        return Err(refuse(
            "lse length",
            lse.len(),
            format!("num_q_heads x total_q = {}", n * h.num_q_heads),
        ));
    }
    if ws.lse[0].len() < n * h.num_q_heads || ws.q.len() < n * h.num_q_heads * h.head_dim_qk {
        return Err(refuse(
            "workspace",
            ws.lse[0].len(),
            format!("made for this plan: {} rows", n * h.num_q_heads),
        ));
    }
    if let KvLayout::Contiguous = p.kv
        && !(args.prefix.page_table.is_empty() && args.suffix.page_table.is_empty())
    {
        return Err(refuse("page_table", "given", "none for contiguous keys and values"));
    }
    Ok(())
}

/// Dense f32 copies of the queries.
fn widen(args: &CascadeArgs<'_>, tokens: usize, (heads, d): (usize, usize), to: &mut [f32]) {
    for (row, to) in to.chunks_exact_mut(d).take(tokens * heads).enumerate() {
        let at = row / heads * args.q_strides.0 + row % heads * args.q_strides.1;
        to.iter_mut().enumerate().for_each(|(i, to)| *to = args.q.get(at + i));
    }
}

/// Outputs as they are written by several threads, each its own rows.
struct Outputs {
    out: Dst,
    strides: (usize, usize),
    lse: Option<*mut f32>,
}

// SAFETY: `merge` hands every row to one thread, and `check` found rows apart.
unsafe impl Sync for Outputs {}

/// The prefix's state and the suffix's state of every row become its result; the first one's memory is merged into.
fn merge(plan: &CascadePlan, args: CascadeArgs<'_>, out: &mut [Vec<f32>; 2], lse: &[Vec<f32>; 2]) {
    let (h, total_q) = (plan.problem.heads, plan.suffix.total_q);
    let width = h.num_q_heads * h.head_dim_v;
    let to = Outputs {
        out: Dst::of(args.out),
        strides: args.out_strides,
        lse: args.lse.map(|lse| lse.as_mut_ptr()),
    };
    let [prefix, suffix] = out;
    let tokens = prefix.par_chunks_exact_mut(width).zip(suffix.par_chunks_exact(width)).take(total_q);
    tokens.enumerate().for_each(|(token, (prefix, suffix))| {
        let to = &to;
        let rows = prefix.chunks_exact_mut(h.head_dim_v).zip(suffix.chunks_exact(h.head_dim_v));
        for (head, (o, other)) in rows.enumerate() {
            let place = head * total_q + token;
            let mut merged = lse[0][place];
            merge_into(o, &mut merged, other, lse[1][place]);
            // SAFETY: `check` bounded every row of out and lse; this row is this thread's own.
            unsafe {
                to.out.write(token * to.strides.0 + head * to.strides.1, o.iter().copied());
                if let Some(lse) = to.lse {
                    *lse.add(place) = merged;
                }
            }
        }
    });
}
