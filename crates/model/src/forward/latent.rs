//! Latent attention around the kernel, in the absorbed form: queries go to the latent space before, outputs come back after it.
//!
//! The same for prefill and decode, so that chunks cannot disagree; a long prompt pays for the wider heads (DeepSeek-V2, arXiv 2405.04434,
//! section 2.1.2).

use suanpan_ops::{self as ops, RopeTable};

use crate::weights::{Latent, LayerWeights};

use super::arena::{AttnViews, Views};
use super::layer::{Ctx, add_bias, out};
use super::times::Op;

/// Columns `first ..` of every row of `from`, `cols` of them, to every row of `to`; rows of `stride` elements.
fn gather(to: &mut [f32], cols: usize, from: &[f32], stride: usize, first: usize) {
    for (to, from) in to.chunks_exact_mut(cols).zip(from.chunks_exact(stride)) {
        to.copy_from_slice(&from[first..first + cols]);
    }
}

/// The way back: rows of `cols` elements to columns `first ..` of the rows of `to`.
fn scatter(to: &mut [f32], stride: usize, first: usize, from: &[f32], cols: usize) {
    for (to, from) in to.chunks_exact_mut(stride).zip(from.chunks_exact(cols)) {
        to[first..first + cols].copy_from_slice(from);
    }
}

impl Ctx<'_> {
    /// Absorbed queries `[rows, heads, latent + rotated]` and keys `[rows, latent + rotated]` of the input.
    pub(super) fn latent_qk(
        &mut self,
        weights: &LayerWeights,
        latent: &Latent,
        rope: Option<&RopeTable>,
        rows: usize,
        views: &mut Views<'_>,
    ) {
        let (config, eps) = (self.config, self.config.rms_norm_eps);
        let (heads, rotated) = (config.heads.num_q_heads, config.rotary_dim);
        let (rank, width) = (config.heads.head_dim_v, config.heads.head_dim_qk);
        let AttnViews { q, k, v, raw, gathered, .. } = views.attn();
        let (k, v) = (&mut k[..rows * width], &mut v[..rows * rank]);
        let part = &mut gathered[..rows * rotated];
        let mut jobs =
            [(weights.k.weight.weight(), out(v, rank)), (latent.k_rope.weight.weight(), out(part, rotated))];
        ops::linear(&mut jobs, self.input, self.linear);
        ops::rms_norm_in_place(v, &latent.norm, eps);
        self.rotate_one(rope, 1, part);
        scatter(k, width, 0, v, rank);
        scatter(k, width, rank, part, rotated);
        if let Some((down, norm)) = &latent.q_down {
            let q_rank = norm.len();
            let lower = &mut gathered[..rows * q_rank];
            ops::linear(&mut [(down.weight.weight(), out(lower, q_rank))], self.input, self.linear);
            add_bias(down, lower);
            ops::rms_norm_in_place(lower, norm, eps);
            self.input.set(lower, rows, q_rank);
        }
        let (raw_cols, q_cols) = (weights.q.weight.rows(), heads * width);
        let raw = &mut raw[..rows * raw_cols];
        ops::linear(&mut [(weights.q.weight.weight(), out(raw, raw_cols))], self.input, self.linear);
        let head = raw_cols / heads;
        let nope = head - rotated;
        let part = &mut gathered[..rows * heads * rotated];
        gather(part, rotated, raw, head, nope);
        self.rotate_one(rope, heads, part);
        let q = &mut q[..rows * q_cols];
        scatter(q, width, rank, part, rotated);
        for (h, up) in latent.q_up.iter().enumerate() {
            let part = &mut gathered[..rows * nope];
            gather(part, nope, raw, raw_cols, h * head);
            self.input.set(part, rows, nope);
            ops::linear(
                &mut [(up.weight.weight(), out(&mut q[h * width..], q_cols))],
                self.input,
                self.linear,
            );
        }
        self.watch.mark(Op::Qkv);
    }

    /// Heads' outputs `[rows, heads, v_dim]` from what attention gave in the latent space, `[rows, heads, latent]`.
    pub(super) fn latent_out<'b>(
        &mut self,
        latent: &Latent,
        rows: usize,
        o: &[f32],
        (raw, gathered): (&'b mut [f32], &mut [f32]),
    ) -> &'b [f32] {
        let (rank, heads) = (self.config.heads.head_dim_v, self.config.heads.num_q_heads);
        let cols = self.config.o_cols();
        let raw = &mut raw[..rows * cols];
        for (h, up) in latent.v_up.iter().enumerate() {
            let part = &mut gathered[..rows * rank];
            gather(part, rank, &o[..rows * heads * rank], heads * rank, h * rank);
            self.input.set(part, rows, rank);
            let to = &mut raw[h * up.weight.rows()..];
            ops::linear(&mut [(up.weight.weight(), out(to, cols))], self.input, self.linear);
        }
        raw
    }

    /// Rotates parts of heads that lie side by side.
    fn rotate_one(&self, rope: Option<&RopeTable>, heads: usize, part: &mut [f32]) {
        if let Some(rope) = rope {
            ops::rope(part, heads, self.config.rotary_dim, self.positions, rope, self.config.rope_style);
        }
    }
}
