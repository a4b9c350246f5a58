//! What the engine needs of a model: run a batch, give logits, count. The one real implementation is executor and KV storage.

use std::ops::Range;
use std::sync::Arc;

use suanpan_cache::{Group, KvStorage, LayerShape};
use suanpan_ledger::AttnBooks;
use suanpan_model::forward::{ExecOptions, Executor, StepBatch, StepSeq};
use suanpan_model::{Model, ModelError};

use crate::options::{EngineOptions, KvSizing};

/// Most logit rows asked for at once.
pub(crate) const MAX_LOGIT_ROWS: usize = suanpan_model::forward::MAX_LOGIT_ROWS;

/// Runs steps over a KV cache of its own. Simulators and fault-injection tests bring theirs.
pub trait StepModel: Send {
    /// Copies the pages `(from, to)` of a group of layers, in order, before the next step writes.
    fn copy_pages(&mut self, group: Group, copies: &[(u32, u32)]) -> Result<(), ModelError>;
    /// The bytes of a page, all layers of its group.
    fn page(&self, group: Group, page: u32) -> &[u8];
    /// The same, to be filled with a page of the same layout.
    fn page_mut(&mut self, group: Group, page: u32) -> &mut [u8];
    /// Computes the batch's new tokens.
    fn step(&mut self, batch: &StepBatch) -> Result<(), ModelError>;
    /// Logits `[rows, vocab_size]` of some logit rows of the last step; at most 64 at once.
    fn logits(&mut self, rows: Range<usize>) -> &[f32];
    /// Attention counted in the last step, one entry for each sequence.
    fn books(&self) -> &[AttnBooks];
    /// Attention predicted for one sequence of a step.
    fn predicted(&self, seq: &StepSeq) -> AttnBooks;
}

/// A model in this process with its KV cache.
pub(crate) struct Resident {
    executor: Executor,
    storage: KvStorage,
}

impl Resident {
    pub fn new(
        model: &Arc<Model>,
        options: &EngineOptions,
        sizing: &KvSizing,
    ) -> Result<Resident, ModelError> {
        let exec = ExecOptions {
            precision: options.precision,
            kv_dtype: options.kv_cache_dtype,
            kv_spared: options.kv_cache_dtype_skip_layers,
            kv_near: options.kv_cache_near,
            batch_invariant: options.batch_invariant,
            threads: options.resolved_threads(),
            max_tokens: options.max_num_batched_tokens,
            max_seqs: options.max_num_seqs,
            max_model_len: sizing.max_model_len,
            page_size: sizing.page_size,
        };
        let executor = Executor::new(Arc::clone(model), exec)?;
        let window_pages = sizing.window.map(|w| w.num_pages);
        let storage = executor.kv_storage(sizing.num_pages, window_pages)?;
        Ok(Resident { executor, storage })
    }

    /// What a page holds.
    pub fn kv_layers(&self) -> Vec<LayerShape> {
        self.executor.kv_layers().iter().map(|layer| layer.shape).collect()
    }

    /// Activation memory and the attention plans, for the start report.
    pub fn describe(&self) -> String {
        let plans: Vec<String> = self.executor.plans().map(|p| p.to_string().trim_end().to_owned()).collect();
        format!(
            "activations {:.1} MiB; {}",
            self.executor.arena_bytes() as f64 / (1 << 20) as f64,
            plans.join("; ")
        )
    }
}

impl StepModel for Resident {
    fn copy_pages(&mut self, group: Group, copies: &[(u32, u32)]) -> Result<(), ModelError> {
        copies.iter().for_each(|&(from, to)| self.storage.copy_page(group, from, to));
        Ok(())
    }

    fn page(&self, group: Group, page: u32) -> &[u8] {
        self.storage.page(group, page)
    }

    fn page_mut(&mut self, group: Group, page: u32) -> &mut [u8] {
        self.storage.page_mut(group, page)
    }

    fn step(&mut self, batch: &StepBatch) -> Result<(), ModelError> {
        self.executor.step(batch, &mut self.storage)
    }

    fn logits(&mut self, rows: Range<usize>) -> &[f32] {
        self.executor.logits(rows)
    }

    fn books(&self) -> &[AttnBooks] {
        self.executor.books()
    }

    fn predicted(&self, seq: &StepSeq) -> AttnBooks {
        self.executor.predicted(seq)
    }
}
