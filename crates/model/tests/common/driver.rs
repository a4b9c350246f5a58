//! Drives an executor as an engine would: pages for each sequence, batches of extensions, books checked after every step.

use std::sync::Arc;

use suanpan_base::{Buf, DType};
use suanpan_cache::{KvStorage, LayerSet};
use suanpan_model::Model;
use suanpan_model::forward::{ExecOptions, Executor, LogitRows, MAX_LOGIT_ROWS, StepBatch, StepSeq};
use suanpan_ops::Precision;

use super::random::Random;

pub fn options() -> ExecOptions {
    ExecOptions {
        precision: Precision::F32,
        kv_dtype: DType::F32,
        kv_spared: LayerSet::NONE,
        kv_near: suanpan_cache::NearTokens::NONE,
        batch_invariant: false,
        threads: 2,
        max_tokens: 128,
        max_seqs: 8,
        max_model_len: 256,
        page_size: 16,
    }
}

pub struct Driver {
    pub exec: Executor,
    pub kv: KvStorage,
    pub batch: StepBatch,
    free: Vec<u32>,
    seqs: Vec<Seq>,
}

#[derive(Default)]
struct Seq {
    cached_len: usize,
    pages: Vec<u32>,
}

/// New tokens of one sequence.
pub struct Extend<'a> {
    pub seq: usize,
    pub tokens: &'a [u32],
    pub logits: LogitRows,
}

pub fn all(seq: usize, tokens: &[u32]) -> Extend<'_> {
    Extend { seq, tokens, logits: LogitRows::All }
}

pub fn last(seq: usize, tokens: &[u32]) -> Extend<'_> {
    Extend { seq, tokens, logits: LogitRows::Last }
}

impl Driver {
    /// Storage of `num_pages` pages, handed out in a random order.
    pub fn new(model: Arc<Model>, opts: ExecOptions, num_pages: usize) -> Driver {
        let exec = Executor::new(model, opts).unwrap();
        let kv = exec.kv_storage(num_pages, None).unwrap();
        let mut free: Vec<u32> = (0..num_pages as u32).collect();
        Random(99).shuffle(&mut free);
        Driver { exec, kv, batch: StepBatch::default(), free, seqs: Vec::new() }
    }

    /// Fills every slot of every layer with `x`.
    pub fn poison(&mut self, x: f32) {
        let slots: Vec<u64> = (0..(self.kv.num_pages() * self.kv.page_size()) as u64).collect();
        let heads = self.exec.model().config.heads;
        let k = vec![x; slots.len() * heads.num_kv_heads * heads.head_dim_qk];
        let v = vec![x; slots.len() * heads.num_kv_heads * (heads.kv_width() - heads.head_dim_qk)];
        for layer in 0..self.kv.num_layers() {
            self.kv.write(layer, &slots, &k, &v);
        }
    }

    /// A sequence that begins at `position`, its earlier tokens being whatever the storage holds.
    pub fn start_at(&mut self, position: usize) -> usize {
        self.seqs.push(Seq { cached_len: position, pages: Vec::new() });
        self.seqs.len() - 1
    }

    pub fn start(&mut self) -> usize {
        self.start_at(0)
    }

    pub fn set_pages(&mut self, seq: usize, pages: Vec<u32>) {
        self.seqs[seq].pages = pages;
    }

    /// Forgets the tokens from `len` on; their pages stay and are written again.
    pub fn cut(&mut self, seq: usize, len: usize) {
        self.seqs[seq].cached_len = len;
    }

    pub fn pages(&self, seq: usize) -> &[u32] {
        &self.seqs[seq].pages
    }

    /// One step; the logits of each sequence, `[rows, vocab]` flat.
    pub fn step(&mut self, extends: &[Extend<'_>]) -> Vec<Vec<f32>> {
        let page_size = self.kv.page_size();
        self.batch.clear();
        for e in extends {
            let seq = &mut self.seqs[e.seq];
            let pages = (seq.cached_len + e.tokens.len()).div_ceil(page_size);
            while seq.pages.len() < pages {
                seq.pages.push(self.free.pop().expect("enough pages"));
            }
            self.batch.page_table_stride = self.batch.page_table_stride.max(pages);
        }
        for e in extends {
            let seq = &self.seqs[e.seq];
            let step = StepSeq { cached_len: seq.cached_len, extend_len: e.tokens.len(), logits: e.logits };
            self.batch.seqs.push(step);
            self.batch.tokens.extend_from_slice(e.tokens);
            let stride = self.batch.page_table_stride;
            let used = (seq.cached_len + e.tokens.len()).div_ceil(page_size);
            self.batch.page_table.extend_from_slice(&seq.pages[..used]);
            // Unused entries are hostile: they must never be looked at.
            self.batch.page_table.extend(std::iter::repeat_n(u32::MAX, stride - used));
        }
        self.exec.step(&self.batch, &mut self.kv).unwrap();
        for (i, seq) in self.batch.seqs.iter().enumerate() {
            assert_eq!(self.exec.books()[i], self.exec.predicted(seq), "books of sequence {i}: {seq:?}");
        }
        let mut from = 0;
        let mut out = Vec::new();
        for e in extends {
            self.seqs[e.seq].cached_len += e.tokens.len();
            let rows = e.logits.count(e.tokens.len());
            out.push(self.logits(from..from + rows));
            from += rows;
        }
        assert_eq!(from, self.exec.num_logit_rows());
        out
    }

    fn logits(&mut self, rows: std::ops::Range<usize>) -> Vec<f32> {
        let mut out = Vec::new();
        let mut from = rows.start;
        while from < rows.end {
            let to = (from + MAX_LOGIT_ROWS).min(rows.end);
            out.extend_from_slice(self.exec.logits(from..to));
            from = to;
        }
        out
    }

    /// Runs `tokens` in steps of `chunk` tokens; all positions' logits.
    pub fn in_chunks(&mut self, seq: usize, tokens: &[u32], chunk: usize) -> Vec<f32> {
        tokens.chunks(chunk).flat_map(|c| self.step(&[all(seq, c)]).remove(0)).collect()
    }

    /// All of a layer's keys, `[num_pages, num_kv_heads, page_size, head_dim_qk]`.
    pub fn keys(&self, layer: usize) -> Vec<f32> {
        self.gather(layer, self.kv.k(layer), self.kv.k_strides(layer))
    }

    /// All of a layer's values, `[num_pages, num_kv_heads, page_size, head_dim_v]`.
    pub fn values(&self, layer: usize) -> Vec<f32> {
        self.gather(layer, self.kv.v(layer), self.kv.v_strides(layer))
    }

    fn gather(&self, layer: usize, all: Buf<'_>, (token, head, page): (usize, usize, usize)) -> Vec<f32> {
        let heads = self.kv.layer(layer).heads.num_kv_heads;
        let rows = (0..self.kv.num_pages()).flat_map(|p| (0..heads).map(move |h| p * page + h * head));
        let slots = rows.flat_map(|start| (0..self.kv.page_size()).map(move |s| start + s * token));
        slots.flat_map(|start| (start..start + token).map(|i| all.get(i))).collect()
    }
}

/// Greedy continuation of `prompt`, up to but without the newline, and the smallest lead of a chosen token.
pub fn greedy(d: &mut Driver, seq: usize, prompt: &[u32], most: usize) -> (String, f32) {
    let mut logits = d.step(&[last(seq, prompt)]).remove(0);
    let (mut text, mut margin) = (String::new(), f32::INFINITY);
    loop {
        let (token, lead) = best(&logits);
        margin = margin.min(lead);
        if token == u32::from(b'\n') || text.len() == most {
            return (text, margin);
        }
        text.push(char::from_u32(token).unwrap_or('?'));
        logits = d.step(&[last(seq, &[token])]).remove(0);
    }
}

/// Index of the largest logit and its lead over the second.
pub fn best(logits: &[f32]) -> (u32, f32) {
    let top = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    let second = (0..logits.len()).filter(|&i| i != top).map(|i| logits[i]).fold(f32::NEG_INFINITY, f32::max);
    (top as u32, logits[top] - second)
}
