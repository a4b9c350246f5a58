//! What one step is asked to do, and the refusals that come before anything is touched.

use suanpan_base::{BadArgument, DType, SeqLen};
use suanpan_cache::{LayerSet, NearTokens};
use suanpan_ops::Precision;

const OP: &str = "step";

/// Which positions of a sequence's new tokens get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a chunk of a prompt that does not end it.
    None,
    /// The last new token only.
    Last,
    /// Every new token.
    All,
}

impl LogitRows {
    /// Rows out of `extend_len`.
    pub fn count(self, extend_len: usize) -> usize {
        match self {
            LogitRows::None => 0,
            LogitRows::Last => extend_len.min(1),
            LogitRows::All => extend_len,
        }
    }
}

/// One sequence of a step: `cached_len` tokens already in the cache, `extend_len` new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSeq {
    /// Tokens whose keys and values are in the cache.
    pub cached_len: usize,
    /// New tokens, at positions `cached_len ..`; at least 1.
    pub extend_len: usize,
    /// Which of the new tokens get logits.
    pub logits: LogitRows,
}

impl StepSeq {
    /// The lengths as attention names them.
    pub fn len(&self) -> SeqLen {
        SeqLen::extend(self.cached_len, self.extend_len)
    }
}

/// The input of one step. Made once, cleared and filled for each step.
#[derive(Clone, Debug, Default)]
pub struct StepBatch {
    /// New tokens of all sequences, one sequence after the other.
    pub tokens: Vec<u32>,
    /// The sequences, in the order of their tokens.
    pub seqs: Vec<StepSeq>,
    /// Page ids, `[seqs, page_table_stride]`; a row's unused entries are never read.
    pub page_table: Vec<u32>,
    /// Page ids of the layers with a window, `[seqs, page_table_stride]`, where the storage has pages of their own for them. Entries
    /// of pages that no new token looks back to are never read.
    pub window_table: Vec<u32>,
    /// Entries of a row of `page_table` and of `window_table`.
    pub page_table_stride: usize,
}

impl StepBatch {
    /// Empties the batch, keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.seqs.clear();
        self.page_table.clear();
        self.window_table.clear();
        self.page_table_stride = 0;
    }

    /// Sum of the logit rows of all sequences.
    pub fn num_logit_rows(&self) -> usize {
        self.seqs.iter().map(|s| s.logits.count(s.extend_len)).sum()
    }
}

/// How to run a model, and the limits that its buffers are planned for.
#[derive(Clone, Copy, Debug)]
pub struct ExecOptions {
    /// How weights are multiplied.
    pub precision: Precision,
    /// Element type of stored keys and values.
    pub kv_dtype: DType,
    /// Layers that store bf16 instead, where `kv_dtype` has fewer bits.
    pub kv_spared: LayerSet,
    /// Tokens that all other layers without a window read in bf16 all the same, where `kv_dtype` has fewer bits.
    pub kv_near: NearTokens,
    /// A row's bits depend on its own keys alone: not on chunks, on the batch, or on what was cached.
    pub batch_invariant: bool,
    /// Threads of the executor's own pool.
    pub threads: usize,
    /// Most new tokens in a step, over all sequences.
    pub max_tokens: usize,
    /// Most sequences in a step.
    pub max_seqs: usize,
    /// Longest sequence, cached and new tokens together.
    pub max_model_len: usize,
    /// Tokens of a page.
    pub page_size: usize,
}

/// Most threads an executor may ask for.
const MAX_THREADS: usize = 1024;

impl ExecOptions {
    /// Refuses zero limits, and sequences longer than the model's positions.
    pub(super) fn check(&self, max_position_embeddings: usize) -> Result<(), BadArgument> {
        const OP: &str = "executor";
        let fields = [
            ("threads", self.threads, MAX_THREADS),
            ("max_tokens", self.max_tokens, 1 << 24),
            ("max_seqs", self.max_seqs, 1 << 20),
            ("max_model_len", self.max_model_len, max_position_embeddings),
            ("page_size", self.page_size, 1 << 20),
        ];
        for (field, n, most) in fields {
            if n == 0 || n > most {
                return Err(BadArgument::new(OP, field, n, format!("1 to {most}")));
            }
        }
        Ok(())
    }
}

/// Limits that a batch is checked against.
pub(super) struct Limits<'a> {
    pub opts: &'a ExecOptions,
    pub vocab_size: usize,
    pub num_pages: usize,
    /// Pages of the layers with a window, and how far they look back, where they have their own.
    pub window: Option<(usize, usize)>,
}

/// Refuses a batch by the field at fault. Nothing has been written when this returns an error.
pub(super) fn check(batch: &StepBatch, limits: &Limits) -> Result<(), BadArgument> {
    let refuse =
        |field: String, asked: String, supported: String| Err(BadArgument::new(OP, field, asked, supported));
    let opts = limits.opts;
    if batch.seqs.len() > opts.max_seqs {
        return refuse(
            "seqs".into(),
            batch.seqs.len().to_string(),
            format!("at most max_seqs = {}", opts.max_seqs),
        );
    }
    if batch.tokens.is_empty() || batch.tokens.len() > opts.max_tokens {
        let supported = format!("1 to max_tokens = {}", opts.max_tokens);
        return refuse("tokens".into(), batch.tokens.len().to_string(), supported);
    }
    let table_len = batch.seqs.len().checked_mul(batch.page_table_stride);
    if table_len.is_none_or(|n| n > batch.page_table.len()) {
        let asked = format!("{} ids", batch.page_table.len());
        let supported = format!("{} rows of {} ids", batch.seqs.len(), batch.page_table_stride);
        return refuse("page_table".into(), asked, supported);
    }
    if limits.window.is_some() && table_len.is_none_or(|n| n > batch.window_table.len()) {
        let asked = format!("{} ids", batch.window_table.len());
        let supported = format!("{} rows of {} ids", batch.seqs.len(), batch.page_table_stride);
        return refuse("window_table".into(), asked, supported);
    }
    if limits.window.is_none() && !batch.window_table.is_empty() {
        let asked = format!("{} ids", batch.window_table.len());
        return refuse("window_table".into(), asked, "none: all layers share their pages".into());
    }
    let mut tokens = 0usize;
    for (i, seq) in batch.seqs.iter().enumerate() {
        let row = &batch.page_table[i * batch.page_table_stride..][..batch.page_table_stride];
        check_seq(i, seq, row, limits)?;
        if let Some((num_pages, window)) = limits.window {
            let row = &batch.window_table[i * batch.page_table_stride..][..batch.page_table_stride];
            // The first new token looks back so far.
            let first = (seq.cached_len + 1).saturating_sub(window) / opts.page_size;
            let pages = (seq.cached_len + seq.extend_len).div_ceil(opts.page_size);
            let sinks = (opts.kv_near.sinks / opts.page_size).min(first);
            check_ids(("window_table", i), row, 0..sinks, num_pages)?;
            check_ids(("window_table", i), row, first..pages, num_pages)?;
        }
        tokens = tokens.saturating_add(seq.extend_len);
    }
    if tokens != batch.tokens.len() {
        let supported = format!("the sum of extend_len = {tokens}");
        return refuse("tokens".into(), batch.tokens.len().to_string(), supported);
    }
    if let Some(i) = batch.tokens.iter().position(|&t| t as usize >= limits.vocab_size) {
        let supported = format!("below vocab_size = {}", limits.vocab_size);
        return refuse(format!("tokens[{i}]"), batch.tokens[i].to_string(), supported);
    }
    Ok(())
}

fn check_seq(i: usize, seq: &StepSeq, row: &[u32], limits: &Limits) -> Result<(), BadArgument> {
    let opts = limits.opts;
    if seq.extend_len == 0 {
        return Err(BadArgument::new(OP, format!("seqs[{i}].extend_len"), 0, "at least 1"));
    }
    let seqlen_k = seq.cached_len.saturating_add(seq.extend_len);
    if seqlen_k > opts.max_model_len {
        let asked = format!("{} cached + {} new tokens", seq.cached_len, seq.extend_len);
        let supported = format!("at most max_model_len = {}", opts.max_model_len);
        return Err(BadArgument::new(OP, format!("seqs[{i}]"), asked, supported));
    }
    let pages = seqlen_k.div_ceil(opts.page_size);
    if pages > row.len() {
        let asked = format!("{} ids for {seqlen_k} tokens", row.len());
        let supported = format!("at least {pages} ids of {} tokens", opts.page_size);
        return Err(BadArgument::new(OP, format!("page_table[{i}]"), asked, supported));
    }
    check_ids(("page_table", i), row, 0..pages, limits.num_pages)
}

/// Refuses ids of pages that are read or written and that the storage does not have.
fn check_ids(
    (table, i): (&str, usize),
    row: &[u32],
    mut read: std::ops::Range<usize>,
    num_pages: usize,
) -> Result<(), BadArgument> {
    match read.find(|&p| row[p] as usize >= num_pages) {
        Some(p) => {
            let supported = format!("below num_pages = {num_pages}");
            Err(BadArgument::new(OP, format!("{table}[{i}][{p}]"), row[p], supported))
        }
        None => Ok(()),
    }
}
