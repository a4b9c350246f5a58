//! What happens to scores, and one rank's tensors: what goes in and what comes out.

use std::sync::Arc;
use std::time::Duration;

use suanpan_attn::{Problem, Scores};
use suanpan_base::{BadArgument, HeadShape, Mask};

use crate::plan::{OP, ParallelPlan, Pass};

/// Numbers added to scores, by global positions. A rank reads those of its own tiles only, so only these need to be right in its process.
#[derive(Clone, Debug, PartialEq)]
pub struct Bias {
    /// Number of (head h, query q, key k): `h * head_stride + q * row_stride + k`.
    pub values: Arc<[f32]>,
    /// From query head to query head; 0 = one for all.
    pub head_stride: usize,
    /// From query to query; 0 = one for all.
    pub row_stride: usize,
}

/// What happens to scores, for every rank alike. What `suanpan-attn` can do beside this has no field here and so cannot be dropped in silence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attention {
    /// Factor of q·k; `None` = 1/sqrt(head_dim_qk).
    pub softmax_scale: Option<f32>,
    /// `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Probability and seed. A weight's number follows from its document, head, and query and key within the document: the same ones are
    /// dropped for any ranks, layout and scheme, as in one call over packed documents.
    pub dropout: Option<(f32, u64)>,
    /// An additive bias; its gradient is not offered.
    pub bias: Option<Bias>,
    /// `[num_q_heads]`: logits of learned sinks, which join every row once, after its last merge.
    pub sinks: Option<Arc<[f32]>>,
}

impl Attention {
    /// A tile's problem. Sinks stay outside: no tile is a row's last.
    pub(crate) fn problem(&self, heads: HeadShape, mask: Mask, batch_invariant: bool) -> Problem {
        let scores = Scores {
            softcap: self.softcap,
            dropout: self.dropout.map(|(p, _)| p),
            bias: self.bias.is_some(),
            ..Scores::default()
        };
        Problem { scores, softmax_scale: self.softmax_scale, batch_invariant, ..Problem::new(heads, mask) }
    }

    /// Refuses what a tile of the plan cannot do.
    pub(crate) fn check(&self, plan: &ParallelPlan) -> Result<(), BadArgument> {
        self.problem(plan.heads, plan.mask.mask(), plan.order_free()).check()?;
        let tiles = || plan.ranks.iter().flat_map(|r| &r.steps).flat_map(|s| &s.work).map(|w| &w.tile);
        let keys = tiles().any(|t| t.k.step > 1 && t.k.count > 1);
        let supported = "layouts or schemes under which neighbours in a tile are neighbours in the sequence: not a stripe (ulysses, or the N-invariant mode, deal with it)";
        if self.dropout.is_some() && (keys || tiles().any(|t| t.q.step > 1 && t.q.count > 1)) {
            return Err(BadArgument::new(OP, "dropout", "in a stripe", supported));
        }
        if let Some(bias) = &self.bias {
            let (s, heads) = (plan.shards.all_tokens(), plan.heads.num_q_heads);
            let last = |count: usize, stride: usize| count.saturating_sub(1).checked_mul(stride);
            let extent = last(heads, bias.head_stride)
                .zip(last(s, bias.row_stride))
                .and_then(|(h, r)| h.checked_add(r)?.checked_add(s));
            if extent.is_none_or(|e| e > bias.values.len()) {
                let supported = format!("strides within its {} numbers", bias.values.len());
                return Err(BadArgument::new(OP, "bias", format!("{heads} heads, {s} tokens"), supported));
            }
            if keys {
                return Err(BadArgument::new(OP, "bias", "in a stripe", supported));
            }
        }
        if self.sinks.is_some() && plan.order_free() && plan.pass == Pass::Backward {
            let supported = "none: their gradient is summed rank by rank, in an order that N decides";
            return Err(BadArgument::new(OP, "sinks", "in an N-invariant backward", supported));
        }
        self.check_sinks(plan.heads)
    }

    /// Refuses sinks that are not one number a query head.
    pub(crate) fn check_sinks(&self, heads: HeadShape) -> Result<(), BadArgument> {
        let Some(sinks) = &self.sinks else { return Ok(()) };
        if sinks.len() != heads.num_q_heads || sinks.iter().any(|s| s.is_nan() || *s == f32::INFINITY) {
            let supported = format!("{} numbers below infinity", heads.num_q_heads);
            return Err(BadArgument::new(OP, "sinks", format!("{} numbers", sinks.len()), supported));
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

impl Inputs {
    /// Refuses lengths other than the plan's.
    pub(crate) fn check(&self, plan: &ParallelPlan, rank: usize) -> Result<(), BadArgument> {
        let h = plan.heads;
        let (q, kv) = (plan.shards.tokens(rank) * h.num_q_heads, plan.shards.tokens(rank) * h.num_kv_heads);
        let there = |n: usize| if plan.pass == Pass::Backward { n } else { 0 };
        for (field, have, want) in [
            ("q", self.q.len(), q * h.head_dim_qk),
            ("k", self.k.len(), kv * h.head_dim_qk),
            ("v", self.v.len(), kv * h.head_dim_v),
            ("out", self.out.len(), there(q * h.head_dim_v)),
            ("lse", self.lse.len(), there(q)),
            ("d_out", self.d_out.len(), there(q * h.head_dim_v)),
        ] {
            if have != want {
                let field = format!("inputs[{rank}].{field} length");
                return Err(BadArgument::new(OP, field, have, format!("{want}, as planned")));
            }
        }
        Ok(())
    }
}

/// Where a rank's time went.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// In kernels.
    pub work: Duration,
    /// Waiting for messages, or for room to send them.
    pub wait: Duration,
    /// Clearing, packing, unpacking, adding.
    pub carry: Duration,
    /// All steps together, from the first one's begin to the last one's end.
    pub all: Duration,
}

/// One rank's results, rows in the order of its shard; f32. Those of the other pass are empty.
#[derive(Clone, Debug, Default)]
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
    /// `[num_q_heads]`: this rank's part of the gradient of the sinks; the gradient is the sum over ranks. Empty without sinks.
    pub d_sinks: Vec<f32>,
    /// Pairs times query heads that the kernels counted.
    pub pairs: u64,
    /// Bytes handed to other ranks, counted.
    pub sent_bytes: u64,
    /// Bytes of the rank's buffers, counted.
    pub buffer_bytes: u64,
    /// Where the time went.
    pub times: Times,
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
pub(crate) fn split<const N: usize>(all: &[f32], widths: [usize; N]) -> [Vec<f32>; N] {
    let width: usize = widths.iter().sum();
    let mut parts = widths.map(|w| Vec::with_capacity(all.len() / width * w));
    for row in all.chunks_exact(width) {
        let mut at = 0;
        for (part, w) in parts.iter_mut().zip(widths) {
            part.extend_from_slice(&row[at..at + w]);
            at += w;
        }
    }
    parts
}
