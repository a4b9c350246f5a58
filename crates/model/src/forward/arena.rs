//! The activations of a step: one aligned allocation, planned once from the model and the limits, cut into named rows.

use bytemuck::{Pod, Zeroable};
use suanpan_base::BadArgument;
use suanpan_base::error::checked_product;

use crate::config::ModelConfig;

/// One cache line: the unit in which buffers are placed.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

const LINE: usize = 16;

/// Elements of each buffer, rounded up to whole lines.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: usize,
    q: usize,
    k: usize,
    v: usize,
    out: usize,
    inter: usize,
    /// Where heads are latent: unabsorbed queries, or heads' outputs, and what is gathered of them.
    raw: usize,
    gathered_heads: usize,
    /// Where the layers have experts: rows of one of them, as wide as the stream.
    gathered: usize,
    /// The same: a number an expert.
    router: usize,
    /// Where near tokens are read apart: their part of `out`, and the lse of both parts.
    near_out: usize,
    near_lse: usize,
    logits: usize,
}

/// All activation buffers of an executor.
pub(super) struct Arena {
    data: Vec<Line>,
    sizes: Sizes,
}

/// The buffers at one moment. Attention's and the MLP's rows share memory: they are never alive together.
pub(super) struct Views<'a> {
    /// Residual stream, `[rows, hidden_size]`.
    pub x: &'a mut [f32],
    /// Normalised rows, `[rows, hidden_size]`; after a step the rows that get logits.
    pub h: &'a mut [f32],
    /// `[logit rows, vocab_size]`.
    pub logits: &'a mut [f32],
    scratch: &'a mut [f32],
    sizes: Sizes,
}

/// Buffers of attention: `[rows, heads * head_dim]` each.
pub(super) struct AttnViews<'a> {
    pub q: &'a mut [f32],
    pub k: &'a mut [f32],
    /// Where heads are latent: rows of the latent elements.
    pub v: &'a mut [f32],
    pub out: &'a mut [f32],
    /// Where heads are latent: their queries before they are absorbed, then their outputs, `[rows, heads * width]`.
    pub raw: &'a mut [f32],
    /// The same: one part of every row, side by side.
    pub gathered: &'a mut [f32],
    /// Where near tokens are read apart: what queries find there.
    pub near_out: &'a mut [f32],
    /// The same: `[num_q_heads, rows]` of what lies far, then of what is near.
    pub lse: [&'a mut [f32]; 2],
}

/// Buffers of the MLP: `[rows, its width]` each.
pub(super) struct FfnViews<'a> {
    pub gate: &'a mut [f32],
    pub up: &'a mut [f32],
    /// `activation(gate, up)`.
    pub act: &'a mut [f32],
}

/// Buffers of a choice of experts.
pub(super) struct ExpertViews<'a> {
    /// Residual stream, `[rows, hidden_size]`.
    pub x: &'a mut [f32],
    /// Normalised rows, `[rows, hidden_size]`.
    pub h: &'a [f32],
    /// `[rows, experts]`.
    pub router: &'a mut [f32],
    /// Rows of one expert: its input, then its output, `[rows, hidden_size]`.
    pub gathered: &'a mut [f32],
    /// `[rows, an MLP's width]` each, as [`FfnViews`].
    pub gate: &'a mut [f32],
    pub up: &'a mut [f32],
    pub act: &'a mut [f32],
}

impl Arena {
    /// Buffers for steps of at most `max_tokens` rows and `logit_rows` rows of logits at once.
    pub(super) fn new(
        config: &ModelConfig,
        max_tokens: usize,
        logit_rows: usize,
        near: bool,
    ) -> Result<Arena, BadArgument> {
        let lines = |field: &str, rows: usize, cols: usize| {
            checked_product("executor", field, &[rows, cols, size_of::<f32>()])
                .map(|bytes| (bytes / size_of::<f32>()).next_multiple_of(LINE))
        };
        let heads = config.heads;
        let (raw, gathered_heads) = config.latent.map_or((0, 0), |l| {
            let (n, rotated) = (heads.num_q_heads, config.rotary_dim);
            let widest = (n * rotated).max(l.nope_dim).max(heads.head_dim_v).max(l.q_rank.unwrap_or(0));
            (n * (l.nope_dim + rotated).max(l.v_dim), widest)
        });
        let q_rows = |width: usize| lines("num_q_heads", max_tokens, heads.num_q_heads * width);
        let sizes = Sizes {
            hidden: lines("hidden_size", max_tokens, config.hidden_size)?,
            q: q_rows(heads.head_dim_qk)?,
            k: lines("num_kv_heads", max_tokens, heads.num_kv_heads * heads.head_dim_qk)?,
            v: lines("num_kv_heads", max_tokens, heads.num_kv_heads * heads.head_dim_v)?,
            out: q_rows(heads.head_dim_v)?,
            raw: lines("qk_nope_head_dim", max_tokens, raw)?,
            gathered_heads: lines("qk_rope_head_dim", max_tokens, gathered_heads)?,
            inter: lines("intermediate_size", max_tokens, config.widest_mlp())?,
            gathered: match config.experts {
                Some(_) => lines("hidden_size", max_tokens, config.hidden_size)?,
                None => 0,
            },
            router: lines("num_experts", max_tokens, config.experts.map_or(0, |e| e.count))?,
            near_out: if near { q_rows(heads.head_dim_v)? } else { 0 },
            near_lse: if near { q_rows(1)? } else { 0 },
            logits: lines("vocab_size", logit_rows, config.vocab_size)?,
        };
        let total = 2 * sizes.hidden + sizes.logits + sizes.scratch();
        // Zeroed by the system: a page becomes resident when a step first writes it.
        Ok(Arena { data: bytemuck::allocation::zeroed_vec(total / LINE), sizes })
    }

    /// Bytes of the whole arena.
    pub(super) fn bytes(&self) -> usize {
        self.data.len() * size_of::<Line>()
    }

    /// All buffers.
    pub(super) fn views(&mut self) -> Views<'_> {
        let sizes = self.sizes;
        let all: &mut [f32] = bytemuck::cast_slice_mut(&mut self.data);
        let (x, rest) = all.split_at_mut(sizes.hidden);
        let (h, rest) = rest.split_at_mut(sizes.hidden);
        let (scratch, logits) = rest.split_at_mut(sizes.scratch());
        Views { x, h, logits, scratch, sizes }
    }
}

impl Sizes {
    fn scratch(&self) -> usize {
        let attention = self.q + self.k + self.v + self.out + self.raw + self.gathered_heads;
        let attention = attention + self.near_out + 2 * self.near_lse;
        attention.max(3 * self.inter + self.gathered + self.router)
    }
}

impl Views<'_> {
    /// The scratch rows as attention's buffers.
    pub(super) fn attn(&mut self) -> AttnViews<'_> {
        let (q, rest) = self.scratch.split_at_mut(self.sizes.q);
        let (k, rest) = rest.split_at_mut(self.sizes.k);
        let (v, rest) = rest.split_at_mut(self.sizes.v);
        let (out, rest) = rest.split_at_mut(self.sizes.out);
        let (raw, rest) = rest.split_at_mut(self.sizes.raw);
        let (gathered, rest) = rest.split_at_mut(self.sizes.gathered_heads);
        let (near_out, rest) = rest.split_at_mut(self.sizes.near_out);
        let (far, near) = rest[..2 * self.sizes.near_lse].split_at_mut(self.sizes.near_lse);
        AttnViews { q, k, v, out, raw, gathered, near_out, lse: [far, near] }
    }

    /// The scratch rows as the MLP's buffers.
    pub(super) fn ffn(&mut self) -> FfnViews<'_> {
        let (gate, rest) = self.scratch.split_at_mut(self.sizes.inter);
        let (up, act) = rest.split_at_mut(self.sizes.inter);
        FfnViews { gate, up, act: &mut act[..self.sizes.inter] }
    }

    /// The scratch rows as the buffers of experts.
    pub(super) fn experts(&mut self) -> ExpertViews<'_> {
        let sizes = self.sizes;
        let (gate, rest) = self.scratch.split_at_mut(sizes.inter);
        let (up, rest) = rest.split_at_mut(sizes.inter);
        let (act, rest) = rest.split_at_mut(sizes.inter);
        let (gathered, rest) = rest.split_at_mut(sizes.gathered);
        ExpertViews { x: self.x, h: self.h, router: &mut rest[..sizes.router], gathered, gate, up, act }
    }
}
