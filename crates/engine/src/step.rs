//! The engine: submit, step, abort. One step is plan, batch, model, sample, events.
//!
//! Has no thread and waits for nothing; `handle` drives it. The only clock it reads measures its own steps, and decides nothing.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Instant;

use suanpan_base::BadArgument;
use suanpan_cache::memory::HostMemory;
use suanpan_cache::{Group, Imbalance, LayerShape, PagePool};
use suanpan_model::forward::{LogitRows, StepBatch};
use suanpan_model::{Model, ModelError};

use crate::batch::{self, Row};
use crate::door::Door;
use crate::options::{EngineOptions, KvSizing};
use crate::output::{End, Output};
use crate::request::{Event, FinishReason, Request, RequestError, RequestKey};
use crate::rng;
use crate::runner::{MAX_LOGIT_ROWS, Resident, StepModel};
use crate::sample::{LogitFault, Scratch};
use crate::scheduler::{Chunk, Closed, Schedule, Scheduler, SeqSpec, WindowGroup};
use crate::stats::{EngineStats, Totals};
use crate::tiers::{LowerTiers, Tiers};

/// Why a whole step failed.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Refused(#[from] BadArgument),
    #[error("the page books do not balance: {0}")]
    Imbalance(#[from] Imbalance),
    #[error("requests wait and nothing can be scheduled")]
    Stuck,
}

/// Continuous batching over one model and one KV cache.
pub struct Engine {
    model: Arc<Model>,
    runner: Box<dyn StepModel>,
    scheduler: Scheduler,
    door: Door,
    sizing: KvSizing,
    report: String,
    seed: u64,
    next_key: u64,
    outputs: HashMap<RequestKey, Output>,
    schedule: Schedule,
    batch: StepBatch,
    rows: Vec<Row>,
    scratch: Scratch,
    totals: Totals,
    failure: Option<String>,
    tiers: Option<Tiers>,
    /// What a page holds; empty over a runner of the caller's.
    layers: Vec<LayerShape>,
    max_step_tokens: usize,
}

impl Engine {
    /// An engine that runs `model` in this process. Every buffer is planned here; sizes that cannot be are refused.
    pub fn new(model: Arc<Model>, options: EngineOptions) -> Result<Engine, ModelError> {
        let sizing = options.size_kv(&model.config, HostMemory::detect())?;
        let resident = Resident::new(&model, &options, &sizing)?;
        let report = format!("{sizing}; {}", resident.describe());
        let layers = resident.kv_layers();
        let mut engine = Engine::with_runner(model, Box::new(resident), options, sizing)?;
        engine.layers = layers;
        engine.report = report;
        Ok(engine)
    }

    /// The same over another [`StepModel`]: a simulator, or one that injects faults. `model` gives tokenizer and end tokens.
    pub fn with_runner(
        model: Arc<Model>,
        runner: Box<dyn StepModel>,
        options: EngineOptions,
        sizing: KvSizing,
    ) -> Result<Engine, ModelError> {
        let pool = PagePool::new(sizing.num_pages, sizing.page_size)?;
        let mut scheduler = Scheduler::new(pool, options.enable_prefix_caching, options.scheduler())?;
        if let Some(window) = sizing.window {
            let pool = PagePool::new(window.num_pages, sizing.page_size)?;
            scheduler =
                scheduler.with_windows(WindowGroup { pool, window: window.window, sinks: window.sinks })?;
        }
        Ok(Engine {
            door: Door { vocab_size: model.config.vocab_size, max_model_len: sizing.max_model_len },
            seed: options.seed.unwrap_or_else(|| RandomState::new().hash_one("request seeds")),
            report: sizing.to_string(),
            model,
            runner,
            scheduler,
            sizing,
            next_key: 0,
            outputs: HashMap::new(),
            schedule: Schedule::default(),
            batch: StepBatch::default(),
            rows: Vec::new(),
            scratch: Scratch::default(),
            totals: Totals::default(),
            failure: None,
            tiers: None,
            layers: Vec::new(),
            max_step_tokens: options.max_num_batched_tokens,
        })
    }

    /// Keeps pages below the pool, in host memory or in a folder that survives the process. To be called before the first request.
    pub fn with_lower_tiers(mut self, options: &LowerTiers) -> Result<Engine, ModelError> {
        if self.sizing.window.is_some() {
            let supported = "false: pages on disk hold all layers of their tokens";
            return Err(BadArgument::new("engine", "window_groups", true, supported).into());
        }
        let room = self.sizing.tokens().min(self.max_step_tokens);
        let sizes = (self.door.vocab_size, self.sizing.page_size, room);
        let tiers = Tiers::open(self.runner.as_mut(), &self.layers, sizes, options)?;
        if let Some(folder) = &options.folder {
            self.report += &format!("; disk: {} pages in {}", tiers.books().objects, folder.display());
        }
        if options.host_bytes > 0 {
            self.report += &format!("; host memory: {} MiB", options.host_bytes >> 20);
        }
        self.tiers = Some(tiers);
        Ok(self)
    }

    /// What this engine accepts.
    pub fn door(&self) -> Door {
        self.door
    }

    /// Size of its KV cache.
    pub fn kv_sizing(&self) -> &KvSizing {
        &self.sizing
    }

    /// Sizes, memory and kernels in words, for the start report.
    pub fn report(&self) -> &str {
        &self.report
    }

    /// Queues a request. Refused requests leave no trace.
    pub fn submit(&mut self, request: Request) -> Result<RequestKey, BadArgument> {
        let key = RequestKey(self.next_key);
        self.submit_as(key, request)?;
        Ok(key)
    }

    /// Queues a request under a key of the caller's, above every earlier one.
    pub(crate) fn submit_as(&mut self, key: RequestKey, request: Request) -> Result<(), BadArgument> {
        let max_total = self.door.check(&request)?;
        let max_outputs = max_total - request.prompt.len();
        let config = &self.model.config;
        let own_seed = rng::derive(self.seed, key.0);
        let output =
            Output::new(&request, max_outputs, &config.eos_token_ids, &self.model.tokenizer, own_seed);
        let reuse_prefix = request.params.prompt_logprobs.is_none();
        let Request { prompt, namespace, cache_priority, .. } = request;
        // A choice that draws nothing, or whose prompt is to be scored, has to see the prompt itself.
        let fork_of = request.fork_of.filter(|_| reuse_prefix && max_outputs > 0);
        let spec = SeqSpec { key, namespace, prompt, max_total, reuse_prefix, fork_of, cache_priority };
        self.scheduler.check_submit(&spec)?;
        let spec = match &mut self.tiers {
            Some(tiers) => tiers.hold(spec, &self.scheduler),
            None => Some(spec),
        };
        spec.map_or(Ok(()), |spec| self.scheduler.submit(spec))?;
        self.outputs.insert(key, output);
        self.next_key = key.0 + 1;
        Ok(())
    }

    /// Takes a request out, wherever it is; its pages are back when this returns. Gives its last event.
    pub fn abort(&mut self, key: RequestKey) -> Option<Event> {
        let closed = match self.scheduler.abort(key) {
            Some(closed) => closed,
            None => self.abort_held(key)?,
        };
        let books = self.outputs.remove(&key)?.close(&closed);
        self.totals.aborted += 1;
        Some(Event::Finished { key, reason: FinishReason::Abort, stop_reason: None, books })
    }

    /// Whether a step would do anything.
    pub fn has_work(&self) -> bool {
        self.failure.is_none() && (self.scheduler.has_work() || self.num_held() > 0)
    }

    /// Why the engine stopped for good, if it did.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Numbers of this moment and totals since the start.
    pub fn stats(&self) -> EngineStats {
        let mut stats = EngineStats::new(&self.scheduler, self.totals);
        stats.waiting += self.num_held();
        stats.tier = self.tiers.as_ref().map(Tiers::books).unwrap_or_default();
        stats
    }

    /// Recounts every reference to every page, in O(pages).
    pub fn check(&self) -> Result<(), Imbalance> {
        self.scheduler.check()
    }

    /// Forgets every cached prefix.
    pub fn clear_prefix_cache(&mut self) {
        self.scheduler.clear_prefix_cache();
    }

    /// One step. If the model fails or the books do not balance, every request gets `Failed` and the engine stops for good.
    pub fn step(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        if !self.has_work() {
            return events;
        }
        let start = Instant::now();
        if let Err(error) = self.try_step(&mut events) {
            self.fail(&error.to_string(), &mut events);
        }
        self.totals.step_took(start.elapsed());
        events
    }

    fn try_step(&mut self, events: &mut Vec<Event>) -> Result<(), StepError> {
        self.take_ready()?;
        self.scheduler.schedule(&mut self.schedule);
        self.announce(events);
        if self.schedule.chunks.is_empty() {
            if self.num_held() > 0 && !self.scheduler.has_work() {
                return Ok(());
            }
            return Err(StepError::Stuck);
        }
        self.fill_batch(events);
        let start = Instant::now();
        self.runner.copy_pages(Group::Full, &self.schedule.copies)?;
        self.runner.copy_pages(Group::Window, &self.schedule.window_copies)?;
        self.scheduler.copied();
        self.runner.step(&self.batch)?;
        self.totals.model_took(start.elapsed(), self.batch.tokens.len());
        if let Some(tiers) = &mut self.tiers {
            tiers.measured(self.batch.tokens.len(), start.elapsed());
        }
        let chunks = std::mem::take(&mut self.schedule.chunks);
        self.book(&chunks);
        self.read_logits(&chunks, events);
        for chunk in &chunks {
            if self.scheduler.publish_prompt(chunk.key) {
                self.store_pages(chunk.key);
            }
        }
        self.end_scorings(&chunks, events);
        self.report_prefill(&chunks, events);
        self.schedule.chunks = chunks;
        // Recounting everything is for tests; the counters alone catch a leak once the engine is idle.
        if cfg!(debug_assertions) {
            self.scheduler.check()?
        } else {
            self.scheduler.check_cheaply()?
        }
        Ok(())
    }

    /// Tells who was admitted, and logs who lost its pages.
    fn announce(&mut self, events: &mut Vec<Event>) {
        for &key in &self.schedule.preempted {
            tracing::debug!(key = key.0, "preempted: out of pages");
        }
        for admission in &self.schedule.admitted {
            let Some(progress) = self.scheduler.progress(admission.key) else { continue };
            events.push(progress.event(admission.key));
        }
    }

    fn fill_batch(&mut self, events: &mut Vec<Event>) {
        let Engine { scheduler, schedule, batch, rows, outputs, sizing, .. } = self;
        batch::fill(batch, rows, &schedule.chunks, scheduler, sizing.page_size, |chunk| {
            let Some(output) = outputs.get_mut(&chunk.key) else { return LogitRows::None };
            if let Some(first) = output.score_first() {
                events.push(Event::PromptLogprobs {
                    key: chunk.key,
                    first_position: 0,
                    positions: vec![first],
                });
            }
            if output.wants_scores(chunk.cached_len + chunk.extend_len) {
                LogitRows::All
            } else if chunk.completes && !output.draws_nothing() {
                LogitRows::Last
            } else {
                LogitRows::None
            }
        });
    }

    /// Enters each chunk twice: what the kernels counted, and what plan and ledger predict.
    fn book(&mut self, chunks: &[Chunk]) {
        for (i, chunk) in chunks.iter().enumerate() {
            let counted = self.runner.books().get(i).copied().unwrap_or_default();
            let predicted = self.runner.predicted(&self.batch.seqs[i]);
            if let Some(output) = self.outputs.get_mut(&chunk.key) {
                output.book(chunk.extend_len, counted, predicted);
            }
            self.scheduler.computed(chunk);
        }
    }

    /// Scores prompts and draws tokens, a block of rows at a time.
    fn read_logits(&mut self, chunks: &[Chunk], events: &mut Vec<Event>) {
        let vocab = self.door.vocab_size;
        let rows = std::mem::take(&mut self.rows);
        for (block, tasks) in rows.chunks(MAX_LOGIT_ROWS).enumerate() {
            let first = block * MAX_LOGIT_ROWS;
            let Engine { runner, outputs, scratch, scheduler, .. } = &mut *self;
            let logits = runner.logits(first..first + tasks.len());
            let mut drawn = Vec::new();
            for (row, logits) in tasks.iter().zip(logits.chunks_exact(vocab)) {
                let chunk = &chunks[row.chunk];
                let Some(output) = outputs.get_mut(&chunk.key) else { continue };
                if let Err(fault) = score_row(output, chunk.key, row.position, logits, events) {
                    drawn.push((chunk.key, Err(fault)));
                    continue;
                }
                if !chunk.completes || row.position + 1 != chunk.cached_len + chunk.extend_len {
                    continue;
                }
                let forks = if output.draws_nothing() { Vec::new() } else { scheduler.fork(chunk.key) };
                for key in std::iter::once(chunk.key).chain(forks) {
                    let Some(output) = outputs.get_mut(&key).filter(|o| !o.draws_nothing()) else { continue };
                    if key != chunk.key {
                        events.extend(scheduler.progress(key).map(|progress| progress.event(key)));
                    }
                    drawn.push((key, draw_row(output, key, logits, scratch, events)));
                }
            }
            for (key, result) in drawn {
                match result {
                    Ok((token, end)) => self.drew(key, token, end, events),
                    Err(fault) => self.fail_one(key, fault, events),
                }
            }
        }
        self.rows = rows;
    }

    fn drew(&mut self, key: RequestKey, token: u32, end: Option<End>, events: &mut Vec<Event>) {
        self.totals.generation_tokens += 1;
        self.scheduler.push_token(key, token);
        if let Some(end) = end {
            self.finish(key, end, events);
        }
    }

    /// Requests whose prompt is only scored end with it.
    fn end_scorings(&mut self, chunks: &[Chunk], events: &mut Vec<Event>) {
        for chunk in chunks.iter().filter(|c| c.completes) {
            if self.outputs.get(&chunk.key).is_some_and(Output::draws_nothing) {
                self.finish(chunk.key, (FinishReason::Length, None), events);
            }
        }
    }

    fn finish(&mut self, key: RequestKey, (reason, stop_reason): End, events: &mut Vec<Event>) {
        self.store_pages(key);
        let Some(closed) = self.scheduler.finish(key) else { return };
        let Some(output) = self.outputs.remove(&key) else { return };
        let books = output.close(&closed);
        self.totals.finished(reason, &books);
        if !books.agree() {
            tracing::warn!(key = key.0, ?books, "the books of a request do not agree");
        }
        events.push(Event::Finished { key, reason, stop_reason, books });
    }

    fn fail_one(&mut self, key: RequestKey, fault: LogitFault, events: &mut Vec<Event>) {
        let Some(output) = self.outputs.remove(&key) else { return };
        self.scheduler.abort(key);
        self.totals.failed += 1;
        events.push(Event::Failed { key, error: RequestError::Logits { index: output.outputs(), fault } });
    }

    /// Requests held back for pages on disk.
    fn num_held(&self) -> usize {
        self.tiers.as_ref().map_or(0, Tiers::num_held)
    }

    /// Takes a held request out, its fetch with it; choices that waited for it go on by themselves.
    fn abort_held(&mut self, key: RequestKey) -> Option<Closed> {
        let (spec, forks) = self.tiers.as_mut()?.abort(key)?;
        for fork in forks {
            // They were judged when they came.
            self.scheduler.submit(fork).ok();
        }
        Some(self.scheduler.close_unseen(spec))
    }

    /// Passes on requests whose pages came from disk, or did not come in time.
    fn take_ready(&mut self) -> Result<(), StepError> {
        let Some(tiers) = &mut self.tiers else { return Ok(()) };
        let idle = !self.scheduler.has_work();
        for spec in tiers.ready(&mut self.scheduler, self.runner.as_mut(), idle) {
            self.scheduler.submit(spec)?;
        }
        Ok(())
    }

    fn store_pages(&self, key: RequestKey) {
        if let Some(tiers) = &self.tiers {
            tiers.store(key, &self.scheduler, self.runner.as_ref());
        }
    }

    fn report_prefill(&mut self, chunks: &[Chunk], events: &mut Vec<Event>) {
        for chunk in chunks.iter().filter(|c| !c.completes) {
            if let Some(progress) = self.scheduler.progress(chunk.key) {
                events.push(progress.event(chunk.key));
            }
        }
    }

    /// Ends every request with `Failed`.
    fn fail(&mut self, message: &str, events: &mut Vec<Event>) {
        tracing::error!("engine failed: {message}");
        self.failure = Some(message.to_owned());
        let mut keys: Vec<RequestKey> = self.outputs.drain().map(|(key, _)| key).collect();
        keys.sort_unstable();
        for key in keys {
            if self.scheduler.abort(key).is_none() {
                self.abort_held(key);
            }
            self.totals.failed += 1;
            events.push(Event::Failed { key, error: RequestError::Engine(message.to_owned()) });
        }
    }
}

/// Scores the prompt token after `position`, if it is to be scored.
fn score_row(
    output: &mut Output,
    key: RequestKey,
    position: usize,
    logits: &[f32],
    events: &mut Vec<Event>,
) -> Result<(), LogitFault> {
    let Some(score) = output.score(position, logits)? else { return Ok(()) };
    match events.last_mut() {
        Some(Event::PromptLogprobs { key: last, positions, .. }) if *last == key => {
            positions.push(Some(score))
        }
        _ => {
            let positions = vec![Some(score)];
            events.push(Event::PromptLogprobs { key, first_position: position + 1, positions });
        }
    }
    Ok(())
}

/// Draws the next token and tells about it.
fn draw_row(
    output: &mut Output,
    key: RequestKey,
    logits: &[f32],
    scratch: &mut Scratch,
    events: &mut Vec<Event>,
) -> Result<(u32, Option<End>), LogitFault> {
    let drawn = output.draw(logits, scratch)?;
    let logprobs = drawn.logprobs.into_iter().collect();
    events.push(Event::Token { key, tokens: vec![drawn.token], text: drawn.text, logprobs });
    Ok((drawn.token, drawn.end))
}
