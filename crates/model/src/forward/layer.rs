//! One transformer layer over the rows of a step.

use suanpan_attn::{self as attn, Args, Extras, KvScales, Plan, Strides, Workspace};
use suanpan_base::{Buf, BufMut};
use suanpan_cache::KvStorage;
use suanpan_ledger::AttnBooks;
use suanpan_ops::{self as ops, LinearInput, LinearOut, LinearWorkspace, RopeTable};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::weights::{Ffn, LayerWeights};

use super::arena::{AttnViews, FfnViews, Views};
use super::batch::StepBatch;
use super::times::{Op, Watch};

/// What every layer of a step shares.
pub(super) struct Ctx<'a> {
    pub config: &'a ModelConfig,
    pub batch: &'a StepBatch,
    pub positions: &'a [u32],
    pub slots: &'a [u64],
    pub rope: &'a RopeTable,
    pub input: &'a mut LinearInput,
    pub linear: &'a mut LinearWorkspace,
    pub attn: &'a mut Workspace,
    pub watch: &'a mut Watch,
}

fn out(data: &mut [f32], row_stride: usize) -> LinearOut<'_> {
    LinearOut { data, row_stride, add: false }
}

fn add(data: &mut [f32], row_stride: usize) -> LinearOut<'_> {
    LinearOut { data, row_stride, add: true }
}

impl Ctx<'_> {
    /// Attention of layer `index` up to, but without, the output projection: fills the `out` rows of the arena.
    pub(super) fn attend(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        plan: &Plan,
        views: &mut Views<'_>,
        kv: &mut KvStorage,
        books: &mut [AttnBooks],
    ) -> Result<(), ModelError> {
        let (config, rows) = (self.config, self.batch.tokens.len());
        let heads = config.heads;
        let (q_cols, k_cols) =
            (heads.num_q_heads * heads.head_dim_qk, heads.num_kv_heads * heads.head_dim_qk);
        let v_cols = heads.num_kv_heads * heads.head_dim_v;
        self.norm(&weights.attn_norm, rows, views);
        self.watch.mark(Op::Norm);
        let AttnViews { q, k, v, out: o } = views.attn();
        let (q, k, v) = (&mut q[..rows * q_cols], &mut k[..rows * k_cols], &mut v[..rows * v_cols]);
        let mut jobs = [
            (weights.q.weight(), out(q, q_cols)),
            (weights.k.weight(), out(k, k_cols)),
            (weights.v.weight(), out(v, v_cols)),
        ];
        ops::linear(&mut jobs, self.input, self.linear);
        self.watch.mark(Op::Qkv);
        if config.layers[index].rope {
            self.rotate(q, k);
            self.watch.mark(Op::Rope);
        }
        let written = kv.write(index, self.slots, k, v);
        for (books, seq) in books.iter_mut().zip(&self.batch.seqs) {
            books.kv_write_bytes += written / rows as u64 * seq.extend_len as u64;
        }
        self.watch.mark(Op::Write);
        let o_cols = heads.num_q_heads * heads.head_dim_v;
        let strides = |(token, head, page): (usize, usize, usize)| Strides { token, head, page };
        let args = Args {
            kv_scales: KvScales {
                k: kv.k_scales(index),
                k_strides: strides(kv.scale_strides(index)),
                v: kv.v_scales(index),
                v_strides: strides(kv.scale_strides(index)),
            },
            extras: Extras::default(),
            q: Buf::F32(q),
            q_strides: (q_cols, heads.head_dim_qk),
            k: kv.k(index),
            k_strides: strides(kv.k_strides(index)),
            v: kv.v(index),
            v_strides: strides(kv.v_strides(index)),
            page_table: &self.batch.page_table,
            page_table_stride: self.batch.page_table_stride,
            out: BufMut::F32(&mut o[..rows * o_cols]),
            out_strides: (o_cols, heads.head_dim_v),
            lse: None,
            max_scores: None,
        };
        attn::run(plan, args, self.attn, books)?;
        self.watch.mark(Op::Attn);
        Ok(())
    }

    /// Takes the normalised first `rows` rows of `x` as the input of the next products.
    fn norm(&mut self, weight: &[f32], rows: usize, views: &mut Views<'_>) {
        let n = rows * weight.len();
        ops::rms_norm(&views.x[..n], weight, self.config.rms_norm_eps, &mut views.h[..n], rows, weight.len());
        self.input.set(&views.h[..n], rows, weight.len());
    }

    fn rotate(&self, q: &mut [f32], k: &mut [f32]) {
        let heads = self.config.heads;
        let (dim, style, table) = (heads.head_dim_qk, self.config.rope_style, self.rope);
        ops::rope(q, heads.num_q_heads, dim, self.positions, table, style);
        ops::rope(k, heads.num_kv_heads, dim, self.positions, table, style);
    }

    /// Output projection and MLP over the first `rows` rows of `x` and of attention's `out`.
    pub(super) fn project(&mut self, weights: &LayerWeights, rows: usize, views: &mut Views<'_>) {
        let heads = self.config.heads;
        let hidden = self.config.hidden_size;
        let o_cols = heads.num_q_heads * heads.head_dim_v;
        self.input.set(&views.attn().out[..rows * o_cols], rows, o_cols);
        ops::linear(&mut [(weights.o.weight(), add(views.x, hidden))], self.input, self.linear);
        self.watch.mark(Op::O);
        if let Some(ffn) = &weights.ffn {
            self.mlp(ffn, rows, views);
        }
    }

    fn mlp(&mut self, ffn: &Ffn, rows: usize, views: &mut Views<'_>) {
        let (hidden, inter) = (self.config.hidden_size, self.config.intermediate_size);
        self.norm(&ffn.norm, rows, views);
        self.watch.mark(Op::Norm);
        let FfnViews { gate, up, act } = views.ffn(rows * inter);
        let mut jobs = [(ffn.gate.weight(), out(gate, inter)), (ffn.up.weight(), out(up, inter))];
        ops::linear(&mut jobs, self.input, self.linear);
        self.watch.mark(Op::GateUp);
        ops::silu_mul(gate, up, act);
        self.input.set(act, rows, inter);
        self.watch.mark(Op::Silu);
        ops::linear(&mut [(ffn.down.weight(), add(views.x, hidden))], self.input, self.linear);
        self.watch.mark(Op::Down);
    }
}
