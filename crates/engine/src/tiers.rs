//! Pages on disk, as the engine uses them: prompts whose beginning is worth loading wait for it outside the scheduler, finished pages
//! are stored behind the step.
//!
//! Decides by measured times alone. Whatever goes wrong with a page means that its tokens are computed, as if it had never been stored.

use std::path::Path;
use std::time::{Duration, Instant};

use suanpan_cache::{Group, LayerShape};
use suanpan_cache::tier::{
    Choice, DiskStore, Fetch, Hasher, Layout, Pace, PageName, Store, Tier, TierBooks, TierOptions,
};
use suanpan_model::ModelError;
use suanpan_model::forward::{LogitRows, StepBatch, StepSeq};

use crate::request::RequestKey;
use crate::runner::StepModel;
use crate::scheduler::{Scheduler, SeqSpec};

/// Fewer tokens than this are never loaded or stored.
const MIN_TOKENS: usize = 64;
/// Tokens of the probe: its keys and values stand for the model, its time for computing.
const PROBE_TOKENS: usize = 64;
/// How long a step may wait where there is nothing else to do.
const IDLE_WAIT: Duration = Duration::from_micros(200);

/// Where pages are kept below the pool, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// A folder of its own.
    pub folder: std::path::PathBuf,
    /// Bytes kept there.
    pub capacity_bytes: u64,
    /// Bytes of pages in host memory on their way.
    pub staging_bytes: u64,
}

/// A prompt that waits for pages.
struct Held {
    spec: SeqSpec,
    /// Choices to be forked from it.
    forks: Vec<SeqSpec>,
    fetch: Fetch,
    /// Whole pages that need no fetching.
    have: usize,
    pages: usize,
    since: Instant,
    deadline: Instant,
}

/// The tier and who waits for it.
pub(crate) struct Tiers {
    tier: Tier,
    held: Vec<Held>,
    compute: Pace,
    load: Pace,
}

/// What a model on this machine writes for a fixed prompt: a digest of its keys and values, and the seconds a token took.
fn probe(
    runner: &mut dyn StepModel,
    vocab_size: usize,
    page_size: usize,
    room: usize,
) -> Result<([u8; 32], f64), ModelError> {
    let tokens = PROBE_TOKENS.min(room);
    let pages = tokens.div_ceil(page_size);
    let batch = StepBatch {
        tokens: (0..tokens).map(|i| (i.wrapping_mul(2_654_435_761) % vocab_size) as u32).collect(),
        seqs: vec![StepSeq { cached_len: 0, extend_len: tokens, logits: LogitRows::None }],
        page_table: (0..pages as u32).collect(),
        page_table_stride: pages,
        ..StepBatch::default()
    };
    // The first run brings weights and code into memory; the second is what a step takes.
    runner.step(&batch)?;
    let start = Instant::now();
    runner.step(&batch)?;
    let seconds = start.elapsed().as_secs_f64() / tokens as f64;
    let mut digest = Hasher::new();
    for page in 0..(tokens / page_size).max(1) as u32 {
        digest.update(runner.page(Group::Full, page));
    }
    Ok((*digest.finalize().as_bytes(), seconds))
}

impl Tiers {
    /// Opens the folder for the model that `runner` runs. Nothing may be in the pool yet.
    pub fn open(
        runner: &mut dyn StepModel,
        layers: &[LayerShape],
        (vocab_size, page_size, room): (usize, usize, usize),
        options: &DiskOptions,
    ) -> Result<Tiers, ModelError> {
        let (model, seconds) = probe(runner, vocab_size, page_size, room)?;
        let layout = Layout::new(&model, layers, page_size)?;
        let store = DiskStore::open(&options.folder).map_err(|e| cannot(&options.folder, &e))?;
        let limits =
            TierOptions { capacity_bytes: options.capacity_bytes, staging_bytes: options.staging_bytes };
        let mut tiers =
            Tiers::over(layout, Box::new(store), limits).map_err(|e| cannot(&options.folder, &e))?;
        tiers.compute.enter(1.0, seconds);
        Ok(tiers)
    }

    /// Over any store, nothing measured yet.
    pub fn over(layout: Layout, store: Box<dyn Store>, limits: TierOptions) -> std::io::Result<Tiers> {
        let tier = Tier::new(layout, store, limits)?;
        Ok(Tiers { tier, held: Vec::new(), compute: Pace::default(), load: Pace::default() })
    }

    /// Enters what a step of mostly prompt tokens took.
    pub fn measured(&mut self, tokens: usize, time: Duration) {
        if tokens >= PROBE_TOKENS / 2 {
            self.compute.enter(tokens as f64, time.as_secs_f64());
        }
    }

    /// Keeps a request back where loading its beginning is the faster way; gives it back where it is to be scheduled now.
    pub fn hold(&mut self, spec: SeqSpec, scheduler: &Scheduler) -> Option<SeqSpec> {
        if let Some(held) = self.held.iter_mut().find(|h| Some(h.spec.key) == spec.fork_of) {
            held.forks.push(spec);
            return None;
        }
        let page_size = self.tier.layout().page_size;
        let usable = &spec.prompt[..spec.prompt.len().saturating_sub(1)];
        if !spec.reuse_prefix || usable.len() < MIN_TOKENS {
            return Some(spec);
        }
        let have = scheduler.cached_pages_of(spec.namespace, &spec.prompt);
        let names = self.tier.layout().names(spec.namespace, usable);
        let room = scheduler.books().available_pages();
        let pages =
            self.tier.stored(names.get(have..).unwrap_or_default()).min(room.saturating_sub(have + 1));
        if pages * page_size < MIN_TOKENS {
            return Some(spec);
        }
        let recompute = self.compute.predict((pages * page_size) as f64);
        let Choice::Load { deadline_s } = Choice::of(self.load.predict(pages as f64), recompute) else {
            return Some(spec);
        };
        let Some(fetch) = self.tier.fetch(names[have..have + pages].to_vec()) else { return Some(spec) };
        let since = Instant::now();
        let deadline = since + Duration::from_secs_f64(deadline_s.min(3600.0));
        self.held.push(Held { spec, forks: Vec::new(), fetch, have, pages, since, deadline });
        None
    }

    /// Takes a held request out; dropping it abandons its fetch. Its forks go on without it.
    pub fn abort(&mut self, key: RequestKey) -> Option<(SeqSpec, Vec<SeqSpec>)> {
        if let Some(at) = self.held.iter().position(|h| h.spec.key == key) {
            let held = self.held.swap_remove(at);
            return Some((held.spec, held.forks));
        }
        let held = self.held.iter_mut().find(|h| h.forks.iter().any(|f| f.key == key))?;
        let at = held.forks.iter().position(|f| f.key == key)?;
        Some((held.forks.swap_remove(at), Vec::new()))
    }

    /// Requests held back.
    pub fn num_held(&self) -> usize {
        self.held.iter().map(|h| 1 + h.forks.len()).sum()
    }

    /// Requests whose pages came, or came not in time; what came is in the prefix cache now. Waits a little where `idle`.
    pub fn ready(
        &mut self,
        scheduler: &mut Scheduler,
        runner: &mut dyn StepModel,
        idle: bool,
    ) -> Vec<SeqSpec> {
        let mut ready = Vec::new();
        let mut at = 0;
        while at < self.held.len() {
            let held = &self.held[at];
            let fetched = held.fetch.poll();
            let late = Instant::now() >= held.deadline;
            if fetched.is_none() && !late {
                at += 1;
                continue;
            }
            let held = self.held.swap_remove(at);
            match fetched {
                Some(fetched) => {
                    if !fetched.pages.is_empty() {
                        // From the asking on: what stood before it in the queue is part of what a load takes.
                        self.load.enter(fetched.pages.len() as f64, held.since.elapsed().as_secs_f64());
                    }
                    let spec = &held.spec;
                    scheduler.restore(spec, held.have, &fetched.pages, |page, bytes| {
                        runner.page_mut(Group::Full, page).copy_from_slice(bytes);
                    });
                }
                // At least so slow: the next decision knows.
                None => self.load.enter(held.pages as f64, held.since.elapsed().as_secs_f64() * 2.0),
            }
            ready.push(held.spec);
            ready.extend(held.forks);
        }
        if idle && ready.is_empty() && !self.held.is_empty() {
            std::thread::sleep(IDLE_WAIT);
        }
        ready.sort_unstable_by_key(|spec| spec.key);
        ready
    }

    /// Stores the whole pages of a running request that are computed and not stored yet.
    pub fn store(&self, key: RequestKey, scheduler: &Scheduler, runner: &dyn StepModel) {
        let (Some(progress), Some(tokens), Some(ids)) =
            (scheduler.progress(key), scheduler.tokens(key), scheduler.page_ids(key))
        else {
            return;
        };
        let Some(namespace) = scheduler.namespace(key).filter(|_| progress.computed_tokens >= MIN_TOKENS)
        else {
            return;
        };
        let names: Vec<PageName> = self.tier.layout().names(namespace, &tokens[..progress.computed_tokens]);
        for (name, &page) in names.iter().zip(ids) {
            self.tier.store(name, runner.page(Group::Full, page));
        }
    }

    /// What the tier holds and has done.
    pub fn books(&self) -> TierBooks {
        self.tier.books()
    }
}

fn cannot(folder: &Path, error: &std::io::Error) -> ModelError {
    let asked = format!("{} ({error})", folder.display());
    suanpan_base::BadArgument::new("engine", "kv_disk_path", asked, "a folder that can be read and written")
        .into()
}
