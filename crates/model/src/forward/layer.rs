//! One transformer layer over the rows of a step.

use suanpan_attn::{self as attn, Args, Extras, KvScales, Plan, Strides, Workspace};
use suanpan_base::{Buf, BufMut, HeadShape};
use suanpan_cache::{Group, KvStorage};
use suanpan_ledger::AttnBooks;
use suanpan_ops::{self as ops, LinearInput, LinearOut, LinearWorkspace, RopeTable};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::weights::{Ffn, Gated, LayerWeights, Linear, Mlp, Values};

use super::arena::{AttnViews, FfnViews, Views};
use super::batch::StepBatch;
use super::experts::Choices;
use super::near;
use super::times::{Op, Watch};

/// What every layer of a step shares.
pub(super) struct Ctx<'a> {
    pub config: &'a ModelConfig,
    pub batch: &'a StepBatch,
    /// Pages of a sequence that queries read in 16 bits, where they read near tokens apart.
    pub sink_pages: usize,
    pub positions: &'a [u32],
    pub slots: &'a [u64],
    pub window_slots: &'a [u64],
    /// One table for each of the model's `ropes`.
    pub ropes: &'a [RopeTable],
    pub input: &'a mut LinearInput,
    pub linear: &'a mut LinearWorkspace,
    pub attn: &'a mut Workspace,
    pub choices: &'a mut Choices,
    pub watch: &'a mut Watch,
}

/// How a layer's queries read its keys.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    /// All tokens, or those that are not near.
    pub plan: &'a Plan,
    /// The layer of the storage that has the near ones, and their plan.
    pub near: Option<(usize, &'a Plan)>,
}

pub(super) fn out(data: &mut [f32], row_stride: usize) -> LinearOut<'_> {
    LinearOut { data, row_stride, add: false }
}

pub(super) fn add(data: &mut [f32], row_stride: usize) -> LinearOut<'_> {
    LinearOut { data, row_stride, add: true }
}

/// Adds the product's bias, if it has one, to rows of `out`.
pub(super) fn add_bias(linear: &Linear, out: &mut [f32]) {
    if let Some(bias) = &linear.bias {
        ops::add_bias(out, bias);
    }
}

/// Runs of elements that keys, and values, are rotated in: the same where values lie in keys.
fn rotated_dims(heads: HeadShape) -> (usize, usize) {
    let (keys, values) = (heads.head_dim_qk, heads.head_dim_v);
    let both = 1 << keys.trailing_zeros().min(values.trailing_zeros());
    if heads.values_in_keys { (both, both) } else { (keys, values) }
}

impl Ctx<'_> {
    /// Attention of layer `index` up to, but without, the output projection: fills the `out` rows of the arena.
    pub(super) fn attend(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        parts: Parts<'_>,
        views: &mut Views<'_>,
        kv: &mut KvStorage,
        books: &mut [AttnBooks],
    ) -> Result<(), ModelError> {
        let (config, rows) = (self.config, self.batch.tokens.len());
        let heads = config.heads;
        let (q_cols, k_cols) =
            (heads.num_q_heads * heads.head_dim_qk, heads.num_kv_heads * heads.head_dim_qk);
        self.norm(&weights.attn_norm, rows, views);
        self.watch.mark(Op::Norm);
        let rope = config.layers[index].rope.map(|rope| &self.ropes[rope]);
        match &weights.v {
            Values::Own(v) => self.qkv(weights, v, rope, rows, views),
            Values::InKeys(latent) => self.latent_qk(weights, latent, rope, rows, views),
        }
        let AttnViews { q, k, v, out: o, near_out, lse, .. } = views.attn();
        let v_cols = if heads.values_in_keys { 0 } else { heads.num_kv_heads * heads.head_dim_v };
        let (q, k, v) = (&mut q[..rows * q_cols], &mut k[..rows * k_cols], &mut v[..rows * v_cols]);
        // Codes have one scale a row: a column that stands out would take their few digits from all others. Rotated, no column does,
        // and products of rotated rows are what they were.
        let rotated = kv.layer(index).dtype.is_code().then(|| rotated_dims(heads));
        if let Some((keys, values)) = rotated {
            ops::hadamard(q, keys);
            ops::hadamard(k, keys);
            ops::hadamard(v, values);
        }
        for at in std::iter::once(index).chain(parts.near.map(|(at, _)| at)) {
            let slots = if kv.group(at) == Group::Full { self.slots } else { self.window_slots };
            let written = kv.write(at, slots, k, v);
            for (books, seq) in books.iter_mut().zip(&self.batch.seqs) {
                books.kv_write_bytes += written / rows as u64 * seq.extend_len as u64;
            }
        }
        self.watch.mark(Op::Write);
        let n = rows * heads.num_q_heads;
        let o = &mut o[..n * heads.head_dim_v];
        let sinks = weights.sinks.as_deref();
        match parts.near {
            None => self.read(parts.plan, (kv, index, 0), (sinks, q), (o, None), books)?,
            Some((at, near)) => {
                let [far_lse, near_lse] = lse.map(|lse| &mut lse[..n]);
                let near_out = &mut near_out[..n * heads.head_dim_v];
                let skip = self.sink_pages;
                self.read(parts.plan, (kv, index, skip), (None, q), (o, Some(far_lse)), books)?;
                self.read(near, (kv, at, 0), (sinks, q), (near_out, Some(near_lse)), books)?;
                near::merge(heads, (o, far_lse), (near_out, near_lse));
            }
        }
        if let Some((_, values)) = rotated {
            // Sums of rotated values, turned back.
            ops::hadamard(o, values);
        }
        self.watch.mark(Op::Attn);
        Ok(())
    }

    /// What `plan`'s queries find in layer `at` of the storage, whose first `skip` pages of a sequence are left out.
    fn read(
        &mut self,
        plan: &Plan,
        (kv, at, skip): (&KvStorage, usize, usize),
        (sinks, q): (Option<&[f32]>, &[f32]),
        (out, lse): (&mut [f32], Option<&mut [f32]>),
        books: &mut [AttnBooks],
    ) -> Result<(), ModelError> {
        let heads = self.config.heads;
        let (q_cols, o_cols) = (heads.num_q_heads * heads.head_dim_qk, heads.num_q_heads * heads.head_dim_v);
        let table = match kv.group(at) {
            Group::Full => &self.batch.page_table,
            Group::Window => &self.batch.window_table,
        };
        let strides = |(token, head, page): (usize, usize, usize)| Strides { token, head, page };
        let args = Args {
            kv_scales: KvScales {
                k: kv.k_scales(at),
                k_strides: strides(kv.scale_strides(at)),
                v: kv.v_scales(at),
                v_strides: strides(kv.scale_strides(at)),
            },
            extras: Extras { sinks, ..Extras::default() },
            q: Buf::F32(q),
            q_strides: (q_cols, heads.head_dim_qk),
            k: kv.k(at),
            k_strides: strides(kv.k_strides(at)),
            v: kv.v(at),
            v_strides: strides(kv.v_strides(at)),
            page_table: &table[skip.min(table.len())..],
            page_table_stride: self.batch.page_table_stride,
            out: BufMut::F32(out),
            out_strides: (o_cols, heads.head_dim_v),
            lse,
            max_scores: None,
        };
        Ok(attn::run(plan, args, self.attn, books)?)
    }

    /// Queries, keys and values of the input, normalised and rotated as the layer has it.
    fn qkv(
        &mut self,
        weights: &LayerWeights,
        values: &Linear,
        rope: Option<&RopeTable>,
        rows: usize,
        views: &mut Views<'_>,
    ) {
        let (q_cols, k_cols) = (weights.q.weight.rows(), weights.k.weight.rows());
        let v_cols = values.weight.rows();
        let AttnViews { q, k, v, .. } = views.attn();
        let (q, k, v) = (&mut q[..rows * q_cols], &mut k[..rows * k_cols], &mut v[..rows * v_cols]);
        let mut jobs = [
            (weights.q.weight.weight(), out(q, q_cols)),
            (weights.k.weight.weight(), out(k, k_cols)),
            (values.weight.weight(), out(v, v_cols)),
        ];
        ops::linear(&mut jobs, self.input, self.linear);
        add_bias(&weights.q, q);
        add_bias(&weights.k, k);
        add_bias(values, v);
        self.watch.mark(Op::Qkv);
        if let Some([q_norm, k_norm]) = &weights.qk_norms {
            ops::rms_norm_in_place(q, q_norm, self.config.rms_norm_eps);
            ops::rms_norm_in_place(k, k_norm, self.config.rms_norm_eps);
            self.watch.mark(Op::Norm);
        }
        if let Some(rope) = rope {
            self.rotate(rope, q, k);
            self.watch.mark(Op::Rope);
        }
    }

    /// Takes the normalised first `rows` rows of `x` as the input of the next products.
    fn norm(&mut self, weight: &[f32], rows: usize, views: &mut Views<'_>) {
        let n = rows * weight.len();
        ops::rms_norm(&views.x[..n], weight, self.config.rms_norm_eps, &mut views.h[..n], rows, weight.len());
        self.input.set(&views.h[..n], rows, weight.len());
    }

    fn rotate(&self, table: &RopeTable, q: &mut [f32], k: &mut [f32]) {
        let heads = self.config.heads;
        let (dim, style) = (heads.head_dim_qk, self.config.rope_style);
        ops::rope(q, heads.num_q_heads, dim, self.positions, table, style);
        ops::rope(k, heads.num_kv_heads, dim, self.positions, table, style);
    }

    /// Output projection and MLP over the first `rows` rows of `x` and of attention's `out`.
    pub(super) fn project(&mut self, weights: &LayerWeights, rows: usize, views: &mut Views<'_>) {
        let o_cols = self.config.o_cols();
        let AttnViews { out: o, raw, gathered, .. } = views.attn();
        let o = match &weights.v {
            Values::Own(_) => &o[..rows * o_cols],
            Values::InKeys(latent) => self.latent_out(latent, rows, o, (raw, gathered)),
        };
        self.input.set(o, rows, o_cols);
        self.residual(&weights.o, weights.post_attn_norm.as_deref(), rows, views);
        self.watch.mark(Op::O);
        let Some(ffn) = &weights.ffn else { return };
        self.norm(&ffn.norm, rows, views);
        self.watch.mark(Op::Norm);
        match &ffn.mlp {
            Mlp::Dense(gated) => self.mlp(ffn, gated, rows, views),
            Mlp::Experts { router, experts, shared } => {
                self.experts(router, (experts, shared.as_deref()), rows, views)
            }
        }
    }

    /// Adds the product of the input to the first `rows` rows of the residual stream, normalised before where there is a norm.
    fn residual(&mut self, linear: &Linear, post_norm: Option<&[f32]>, rows: usize, views: &mut Views<'_>) {
        let hidden = self.config.hidden_size;
        let (x, h) = (&mut views.x[..rows * hidden], &mut views.h[..rows * hidden]);
        let to = if post_norm.is_some() { out(h, hidden) } else { add(x, hidden) };
        ops::linear(&mut [(linear.weight.weight(), to)], self.input, self.linear);
        match post_norm {
            None => add_bias(linear, x),
            Some(norm) => {
                add_bias(linear, h);
                ops::rms_norm_in_place(h, norm, self.config.rms_norm_eps);
                ops::add_into(x, h);
            }
        }
    }

    fn mlp(&mut self, ffn: &Ffn, gated: &Gated, rows: usize, views: &mut Views<'_>) {
        let FfnViews { gate, up, act } = views.ffn();
        self.gated(gated, rows, gate, up, act);
        self.residual(&gated.down, ffn.post_norm.as_deref(), rows, views);
        self.watch.mark(Op::Down);
    }

    /// Gate, up and activation of the input; leaves the result, `[rows, the MLP's width]`, as the next input.
    pub(super) fn gated(
        &mut self,
        gated: &Gated,
        rows: usize,
        gate: &mut [f32],
        up: &mut [f32],
        act: &mut [f32],
    ) {
        let inter = gated.gate.weight.rows();
        let (gate, up, act) = (&mut gate[..rows * inter], &mut up[..rows * inter], &mut act[..rows * inter]);
        let mut jobs =
            [(gated.gate.weight.weight(), out(gate, inter)), (gated.up.weight.weight(), out(up, inter))];
        ops::linear(&mut jobs, self.input, self.linear);
        add_bias(&gated.gate, gate);
        add_bias(&gated.up, up);
        self.watch.mark(Op::GateUp);
        ops::gated(self.config.family.activation, gate, up, act);
        self.input.set(act, rows, inter);
        self.watch.mark(Op::Silu);
    }
}
