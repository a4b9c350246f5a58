//! The executor: buffers and plans made once from the model and the limits, then steps that allocate nothing.

use std::ops::Range;
use std::sync::Arc;

use rayon::ThreadPool;
use suanpan_attn::{KvLayout, Limits, Machine, Plan, Problem, Scores, Workspace};
use suanpan_base::{BadArgument, DType, Mask, ScaleGrain, SeqLen};
use suanpan_cache::{Group, KvStorage, LayerShape, quant};
use suanpan_ledger::AttnBooks;
use suanpan_ops::{self as ops, LinearInput, LinearOut, LinearWorkspace, Precision, RopeTable};

use crate::config::{ModelConfig, RopeConfig};
use crate::error::ModelError;
use crate::load::Model;
use crate::rope;
use crate::weights::Weights;

use super::arena::Arena;
use super::batch::{self, ExecOptions, StepBatch, StepSeq};
use super::experts::Choices;
use super::layer::{Ctx, Parts};
use super::near::{self, KvLayer};
use super::rows;
use super::times::{Op, OpTimes, Watch};

/// Most rows of logits that [`Executor::logits`] computes in one call.
pub const MAX_LOGIT_ROWS: usize = 64;

/// Runs one model. See [`Executor::step`].
pub struct Executor {
    pool: Arc<ThreadPool>,
    core: Core,
}

/// Which tokens a plan's queries look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// All that the mask shows.
    Whole,
    /// Those that are not near.
    Far,
}

/// Everything but the pool, so that a step can run inside it.
struct Core {
    model: Arc<Model>,
    opts: ExecOptions,
    arena: Arena,
    /// One plan for each part of the tokens, mask and stored type that occur.
    plans: Vec<((Part, Mask, DType), Plan)>,
    /// Which plan a layer of the storage uses: the model's layers, then those of near tokens.
    layer_plans: Vec<usize>,
    /// The storage's layers.
    kv_layers: Vec<KvLayer>,
    /// Where in the storage a model's layer has its near tokens.
    near_at: Vec<Option<usize>>,
    attn: Workspace,
    input: LinearInput,
    linear: LinearWorkspace,
    ropes: Vec<RopeTable>,
    choices: Choices,
    lens: Vec<SeqLen>,
    /// The same without near tokens.
    far_lens: Vec<SeqLen>,
    positions: Vec<u32>,
    slots: Vec<u64>,
    /// The same in the pages of layers with a window, where they have their own.
    window_slots: Vec<u64>,
    books: Vec<AttnBooks>,
    logit_rows: usize,
    watch: Watch,
}

impl Executor {
    /// Plans every buffer for steps within `opts`. Refuses options that the model or a kernel cannot honour.
    pub fn new(model: Arc<Model>, opts: ExecOptions) -> Result<Executor, ModelError> {
        opts.check(model.config.max_position_embeddings)?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(opts.threads)
            .thread_name(|i| format!("suanpan-{i}"))
            .build()
            .map_err(|e| {
                BadArgument::new("executor", "threads", format!("{} ({e})", opts.threads), "fewer threads")
            })?;
        let core = pool.install(|| Core::new(model, opts))?;
        Ok(Executor { pool: Arc::new(pool), core })
    }

    /// The executor's threads. A caller that runs its whole loop inside (`pool().install`) saves a hand-over at each step,
    /// and with it the only memory a step may ask for: the pool's own queue, one block in 63 hand-overs from outside.
    /// (A worker also registers with the queues once in its life, when it first takes another's job.)
    pub fn pool(&self) -> Arc<ThreadPool> {
        Arc::clone(&self.pool)
    }

    /// The model it runs.
    pub fn model(&self) -> &Arc<Model> {
        &self.core.model
    }

    /// The options it was planned for.
    pub fn options(&self) -> &ExecOptions {
        &self.core.opts
    }

    /// The layers of the storage that [`Executor::step`] takes.
    pub fn kv_layers(&self) -> &[KvLayer] {
        &self.core.kv_layers
    }

    /// Storage for [`Executor::step`]: layers with a window have pages of their own where `window_pages` says how many.
    pub fn kv_storage(
        &self,
        num_pages: usize,
        window_pages: Option<usize>,
    ) -> Result<KvStorage, BadArgument> {
        let own = |layer: &KvLayer| window_pages.is_some() && layer.windowed;
        let group = |layer: &KvLayer| if own(layer) { Group::Window } else { Group::Full };
        let layers: Vec<_> = self.kv_layers().iter().map(|layer| (layer.shape, group(layer))).collect();
        KvStorage::grouped(&layers, num_pages, window_pages, self.options().page_size)
    }

    /// Bytes of the activations, planned once.
    pub fn arena_bytes(&self) -> usize {
        self.core.arena.bytes()
    }

    /// The attention plans in words: kernel, tiles, splits and why.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.core.plans.iter().map(|(_, plan)| plan)
    }

    /// Runs the batch's new tokens through all layers; their keys and values go to the pages of the page table.
    ///
    /// A refused batch has changed nothing. After `Ok`, [`Executor::logits`] and [`Executor::books`] speak of this step.
    pub fn step(&mut self, batch: &StepBatch, kv: &mut KvStorage) -> Result<(), ModelError> {
        let Executor { pool, core } = self;
        core.check(batch, kv)?;
        pool.install(|| core.step(batch, kv))
    }

    /// Rows of the last step that have logits: sequence after sequence, position after position.
    pub fn num_logit_rows(&self) -> usize {
        self.core.logit_rows
    }

    /// Logits `[rows.len(), vocab_size]` of some of the last step's logit rows, computed now.
    ///
    /// Panics when `rows` passes [`Executor::num_logit_rows`] or asks for more than [`MAX_LOGIT_ROWS`]: the caller cuts.
    pub fn logits(&mut self, rows: Range<usize>) -> &[f32] {
        assert!(
            rows.start <= rows.end && rows.end <= self.core.logit_rows,
            "rows {rows:?} of {}",
            self.core.logit_rows
        );
        assert!(
            rows.len() <= MAX_LOGIT_ROWS,
            "{} rows of logits at once; at most {MAX_LOGIT_ROWS}",
            rows.len()
        );
        let Executor { pool, core } = self;
        let n = rows.len() * core.model.config.vocab_size;
        if n > 0 {
            pool.install(|| core.lm_head(rows));
        }
        &core.arena.views().logits[..n]
    }

    /// What attention did in the last step, counted, one entry for each sequence, summed over layers.
    pub fn books(&self) -> &[AttnBooks] {
        &self.core.books
    }

    /// What attention should do for `seq` in one step, summed over layers: from the plans and the ledger.
    pub fn predicted(&self, seq: &StepSeq) -> AttnBooks {
        let core = &self.core;
        let heads = core.model.config.heads;
        let far = core.opts.kv_near.far(seq.len());
        let layer = |&p: &usize| {
            let ((part, _, dtype), plan) = &core.plans[p];
            let kv_write_bytes = LayerShape { heads, dtype: *dtype }.bytes(seq.extend_len);
            let len = if *part == Part::Far { far } else { seq.len() };
            AttnBooks { kv_write_bytes, ..plan.predicted(len) }
        };
        core.layer_plans.iter().map(layer).sum()
    }

    /// Starts (from zero) or stops timing each kind of operation.
    pub fn time_ops(&mut self, on: bool) {
        self.core.watch.enable(on);
    }

    /// Times since timing was started; `None` while off.
    pub fn op_times(&self) -> Option<OpTimes> {
        self.core.watch.times()
    }
}

impl Core {
    fn new(model: Arc<Model>, opts: ExecOptions) -> Result<Core, ModelError> {
        let config = &model.config;
        let heads = config.heads;
        let machine = Machine::detect(opts.threads);
        let limits = Limits {
            max_seqs: opts.max_seqs,
            max_total_q: opts.max_tokens,
            max_seqlen_k: opts.max_model_len,
        };
        opts.kv_spared.check(config.layers.len())?;
        opts.kv_near.check("executor", opts.kv_dtype, opts.page_size)?;
        let kv_layers = near::kv_layers(config, opts.kv_dtype, opts.kv_spared, opts.kv_near);
        let near_at = near::places(&kv_layers, config.layers.len());
        let (plans, layer_plans) = plans(config, &opts, (&kv_layers, &near_at), &machine, limits)?;
        let attn = Workspace::for_plans(&plans.iter().map(|(_, p)| p).collect::<Vec<_>>());
        let latent = config.latent.map_or(0, |l| l.nope_dim.max(heads.head_dim_v).max(l.q_rank.unwrap_or(0)));
        let max_cols = config.hidden_size.max(config.o_cols()).max(config.widest_mlp()).max(latent);
        let max_rows = opts.max_tokens.max(MAX_LOGIT_ROWS);
        // Positions that depend on a length take the longest sequence's: one choice for every key in the cache.
        let table = |rope: &RopeConfig| {
            let inv_freq = rope::inv_freq(rope, config.rotary_dim, opts.max_model_len);
            RopeTable::new(&inv_freq, rope.attention_factor, opts.max_model_len)
        };
        Ok(Core {
            arena: Arena::new(
                config,
                opts.max_tokens,
                MAX_LOGIT_ROWS.min(opts.max_tokens),
                kv_layers.len() > config.layers.len(),
            )?,
            attn,
            plans,
            layer_plans,
            kv_layers,
            near_at,
            input: linear_input(&model.weights, max_rows, max_cols, opts.precision),
            linear: LinearWorkspace::new(max_rows, opts.threads),
            ropes: config.ropes.iter().map(table).collect(),
            choices: Choices::new(opts.max_tokens, config.experts, config.family.experts),
            lens: Vec::with_capacity(opts.max_seqs),
            far_lens: Vec::with_capacity(opts.max_seqs),
            positions: Vec::with_capacity(opts.max_tokens),
            slots: Vec::with_capacity(opts.max_tokens),
            window_slots: Vec::with_capacity(opts.max_tokens),
            books: Vec::with_capacity(opts.max_seqs),
            logit_rows: 0,
            watch: Watch::default(),
            model,
            opts,
        })
    }

    fn check(&self, batch: &StepBatch, kv: &KvStorage) -> Result<(), ModelError> {
        let config = &self.model.config;
        let near = self.opts.kv_near.is_some().then_some(self.opts.kv_near.recent);
        let window = config.layers.iter().filter_map(|layer| layer.window).chain(near).max();
        let limits = batch::Limits {
            opts: &self.opts,
            vocab_size: config.vocab_size,
            num_pages: kv.num_pages(),
            window: kv.window_pages().zip(window),
        };
        batch::check(batch, &limits)?;
        let fits = kv.num_layers() == self.kv_layers.len()
            && kv.page_size() == self.opts.page_size
            && self.kv_layers.iter().enumerate().all(|(i, layer)| {
                kv.layer(i) == layer.shape && (kv.group(i) == Group::Full || layer.windowed)
            });
        if !fits {
            let asked = format!("{} layers of pages of {} tokens", kv.num_layers(), kv.page_size());
            return Err(BadArgument::new("step", "kv", asked, "storage made by kv_storage()").into());
        }
        Ok(())
    }

    /// Positions, slots and plans of this step.
    fn prepare(&mut self, batch: &StepBatch) -> Result<(), ModelError> {
        let page_size = self.opts.page_size;
        self.lens.clear();
        self.far_lens.clear();
        self.positions.clear();
        self.slots.clear();
        self.window_slots.clear();
        self.books.clear();
        for (i, seq) in batch.seqs.iter().enumerate() {
            let row = i * batch.page_table_stride;
            self.lens.push(seq.len());
            self.far_lens.push(self.opts.kv_near.far(seq.len()));
            self.books.push(AttnBooks::default());
            for position in seq.cached_len..seq.cached_len + seq.extend_len {
                let slot = |table: &[u32]| {
                    let page = u64::from(table[row + position / page_size]);
                    page * page_size as u64 + (position % page_size) as u64
                };
                self.positions.push(position as u32);
                self.slots.push(slot(&batch.page_table));
                if !batch.window_table.is_empty() {
                    self.window_slots.push(slot(&batch.window_table));
                }
            }
        }
        for ((part, ..), plan) in &mut self.plans {
            plan.schedule(if *part == Part::Far { &self.far_lens } else { &self.lens })?;
        }
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, kv: &mut KvStorage) -> Result<(), ModelError> {
        self.logit_rows = 0;
        self.watch.start();
        self.prepare(batch)?;
        self.watch.mark(Op::Attn);
        let Core { model, arena, plans, layer_plans, near_at, books, .. } = self;
        let plan = |layer: usize| &plans[layer_plans[layer]].1;
        let (config, weights) = (&model.config, &model.weights);
        let (rows, hidden) = (batch.tokens.len(), config.hidden_size);
        let mut views = arena.views();
        ops::embed(weights.embed.weight(), &batch.tokens, &mut views.x[..rows * hidden])?;
        if config.family.scaled_embedding {
            ops::scale(&mut views.x[..rows * hidden], (hidden as f32).sqrt());
        }
        self.watch.mark(Op::Embed);
        let mut ctx = Ctx {
            config,
            batch,
            sink_pages: self.opts.kv_near.sinks / self.opts.page_size,
            positions: &self.positions,
            slots: &self.slots,
            window_slots: &self.window_slots,
            ropes: &self.ropes,
            input: &mut self.input,
            linear: &mut self.linear,
            attn: &mut self.attn,
            choices: &mut self.choices,
            watch: &mut self.watch,
        };
        let last = config.layers.len() - 1;
        let mut live = rows;
        for (i, layer) in weights.layers.iter().enumerate() {
            let near = near_at[i].map(|at| (at, plan(at)));
            ctx.attend(i, layer, Parts { plan: plan(i), near }, &mut views, kv, books)?;
            if i == last {
                // Nobody reads the other rows after this layer's attention.
                let o_cols = config.heads.num_q_heads * config.heads.head_dim_v;
                rows::compact_logit_rows(&batch.seqs, views.attn().out, o_cols);
                live = rows::compact_logit_rows(&batch.seqs, views.x, hidden);
            }
            if live > 0 {
                ctx.project(layer, live, &mut views);
            }
        }
        if live > 0 {
            let n = live * hidden;
            let eps = config.rms_norm_eps;
            ops::rms_norm(&views.x[..n], &weights.final_norm, eps, &mut views.h[..n], live, hidden);
            self.watch.mark(Op::Norm);
        }
        self.logit_rows = live;
        Ok(())
    }

    fn lm_head(&mut self, rows: Range<usize>) {
        let config = &self.model.config;
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        self.watch.start();
        let views = self.arena.views();
        self.input.set(&views.h[rows.start * hidden..rows.end * hidden], rows.len(), hidden);
        let n = rows.len() * vocab;
        let out = LinearOut { data: &mut *views.logits, row_stride: vocab, add: false };
        ops::linear(&mut [(self.model.weights.lm_head.weight(), out)], &self.input, &mut self.linear);
        if let Some(cap) = config.logit_softcap {
            ops::softcap(&mut views.logits[..n], cap);
        }
        self.watch.mark(Op::LmHead);
    }
}

/// The plans that occur, and which one each layer of the storage uses.
#[allow(clippy::type_complexity, reason = "what the caller keeps, by name")]
fn plans(
    config: &ModelConfig,
    opts: &ExecOptions,
    (kv_layers, near_at): (&[KvLayer], &[Option<usize>]),
    machine: &Machine,
    limits: Limits,
) -> Result<(Vec<((Part, Mask, DType), Plan)>, Vec<usize>), BadArgument> {
    let mut plans: Vec<((Part, Mask, DType), Plan)> = Vec::new();
    let mut layer_plans = Vec::with_capacity(kv_layers.len());
    for (i, layer) in kv_layers.iter().enumerate() {
        let (part, mask) = match config.layers.get(i) {
            None => (Part::Whole, opts.kv_near.mask()),
            Some(_) if near_at[i].is_some() => (Part::Far, Mask::CAUSAL),
            Some(own) => (Part::Whole, own.window.map_or(Mask::CAUSAL, Mask::window)),
        };
        let key = (part, mask, layer.shape.dtype);
        let known = plans.iter().position(|(k, _)| *k == key);
        let index = known.unwrap_or(plans.len());
        if known.is_none() {
            let problem = Problem {
                softmax_scale: config.softmax_scale,
                // A family has sinks in all layers or in none.
                scores: Scores {
                    softcap: config.attn_softcap,
                    sink: config.family.sinks && part != Part::Far,
                    ..Scores::default()
                },
                kv_dtype: key.2,
                kv_scales: if key.2.is_code() { ScaleGrain::Token } else { ScaleGrain::None },
                kv_scale_dtype: quant::SCALE_DTYPE,
                batch_invariant: opts.batch_invariant,
                kv: KvLayout::Paged { page_size: opts.page_size },
                ..Problem::new(config.heads, mask)
            };
            plans.push((key, Plan::new(&problem, machine, limits)?));
        }
        layer_plans.push(index);
    }
    Ok((plans, layer_plans))
}

/// Room for the inputs of every product. Where no weight needs them in f32, they are held as integers only.
fn linear_input(weights: &Weights, max_rows: usize, max_cols: usize, precision: Precision) -> LinearInput {
    // The embedding is looked up, not multiplied, unless it is the head.
    let multiplied = weights.tensors().skip(1).map(|(_, t)| t).chain([&weights.lm_head]);
    if precision.digits() > 0 && multiplied.into_iter().all(|t| t.format().is_quantised()) {
        return LinearInput::quantised_only(max_rows, max_cols, precision);
    }
    LinearInput::new(max_rows, max_cols, precision)
}
