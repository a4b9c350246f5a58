//! Pages in host memory and on disk, as the engine uses them: prompts whose beginning is worth loading wait for it outside the scheduler, finished pages
//! are stored behind the step.
//!
//! Decides by measured times alone. Whatever goes wrong with a page means that its tokens are computed, as if it had never been stored.

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use suanpan_cache::tier::{
    Choice, DiskStore, Fetch, Hasher, Layout, MemoryStore, Pace, PageName, Store, Tier, TierBooks,
    TierOptions,
};
use suanpan_cache::{Group, LayerShape};
use suanpan_model::ModelError;
use suanpan_model::forward::{LogitRows, StepBatch, StepSeq};

use crate::request::RequestKey;
use crate::runner::StepModel;
use crate::scheduler::{Scheduler, SeqSpec};

/// Fewer tokens than this are never loaded or stored.
const MIN_TOKENS: usize = 64;
/// Tokens of the probe: its keys and values stand for the model, its time for computing.
const PROBE_TOKENS: usize = 64;
/// Decisions against a load after which one page is read to see whether the store is still so slow.
const PROBE_EVERY: u32 = 16;
/// How long a step may wait where there is nothing else to do.
const IDLE_WAIT: Duration = Duration::from_micros(200);

/// Seconds since the first call.
fn clock() -> f64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

/// Where pages are kept below the pool, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LowerTiers {
    /// A folder of its own, if pages are to be kept on disk.
    pub folder: Option<std::path::PathBuf>,
    /// Bytes kept there.
    pub disk_bytes: u64,
    /// Bytes kept in host memory, in front of the folder or without one; 0 is none.
    pub host_bytes: u64,
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
    /// Those of `pages` that lie in host memory.
    near: usize,
    since: Instant,
    deadline: Instant,
}

/// The tier and who waits for it.
pub(crate) struct Tiers {
    tier: Tier,
    held: Vec<Held>,
    compute: Pace,
    /// Loading pages from host memory, and from the rest.
    near: Pace,
    far: Pace,
    /// Decisions against a load since the store was last measured.
    passed_over: u32,
    probe: Option<Fetch>,
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
        options: &LowerTiers,
    ) -> Result<Tiers, ModelError> {
        let (model, seconds) = probe(runner, vocab_size, page_size, room)?;
        let layout = Layout::new(&model, layers, page_size)?;
        let folder = options.folder.as_deref().unwrap_or(Path::new("host memory"));
        let below = match &options.folder {
            Some(folder) => {
                let store = DiskStore::open(folder).map_err(|e| cannot(folder, &e))?;
                Some(Box::new(store) as Box<dyn Store>)
            }
            None => None,
        };
        let store = match below {
            Some(below) if options.host_bytes == 0 => below,
            below => Box::new(MemoryStore::new(options.host_bytes, below)),
        };
        let capacity_bytes = if options.folder.is_some() { options.disk_bytes } else { options.host_bytes };
        let limits = TierOptions { capacity_bytes, staging_bytes: options.staging_bytes, seconds: clock };
        let mut tiers = Tiers::over(layout, store, limits).map_err(|e| cannot(folder, &e))?;
        tiers.compute.enter(1.0, seconds);
        Ok(tiers)
    }

    /// Over any store, its reading measured once: a slow one is known before it is first chosen.
    pub fn over(layout: Layout, store: Box<dyn Store>, limits: TierOptions) -> std::io::Result<Tiers> {
        let tier = Tier::new(layout, store, limits)?;
        let mut far = Pace::default();
        far.enter(1.0, tier.measure_read().unwrap_or(f64::INFINITY));
        let (held, passed_over, probe) = (Vec::new(), 0, None);
        Ok(Tiers { tier, held, compute: Pace::default(), near: Pace::default(), far, passed_over, probe })
    }

    /// What loading these pages should take, so many of them from host memory; None where that was never measured.
    fn predict_load(&self, pages: usize, near: usize) -> Option<f64> {
        // Memory that was never measured is taken for free: trying it costs least.
        let of_near = self.near.predict(near as f64).unwrap_or(0.0);
        let far = pages - near;
        let of_far = if far == 0 { Some(0.0) } else { self.far.predict(far as f64) };
        Some(of_near + of_far?)
    }

    /// Enters what loading pages took, so many of them from host memory.
    fn loaded(&mut self, pages: usize, near: usize, seconds: f64) {
        if pages == near {
            return self.near.enter(pages as f64, seconds);
        }
        let of_near = self.near.predict(near as f64).unwrap_or(0.0);
        self.far.enter((pages - near) as f64, (seconds - of_near).max(0.0));
    }

    /// A store that is passed over again and again is measured now and then, on one page that nobody waits for: it may have become
    /// faster.
    fn measure_again(&mut self, name: &PageName) {
        self.passed_over += 1;
        if self.passed_over >= PROBE_EVERY && self.probe.is_none() {
            self.passed_over = 0;
            self.probe = self.tier.fetch(vec![name.clone()]);
        }
    }

    fn take_probe(&mut self) {
        let Some(fetch) = &self.probe else { return };
        if let Some(fetched) = fetch.poll() {
            if !fetched.pages.is_empty() {
                self.far.enter(1.0, fetched.read_seconds);
            }
            self.probe = None;
        }
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
        let near = self.tier.near(&names[have..have + pages]);
        let Choice::Load { deadline_s } = Choice::of(self.predict_load(pages, near), recompute) else {
            if near < pages {
                self.measure_again(&names[have + pages - 1]);
            }
            return Some(spec);
        };
        let Some(fetch) = self.tier.fetch(names[have..have + pages].to_vec()) else { return Some(spec) };
        let since = Instant::now();
        let deadline = since + Duration::from_secs_f64(deadline_s.min(3600.0));
        self.held.push(Held { spec, forks: Vec::new(), fetch, have, pages, near, since, deadline });
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
        self.take_probe();
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
                        let near = held.near.min(fetched.pages.len());
                        self.loaded(fetched.pages.len(), near, held.since.elapsed().as_secs_f64());
                    }
                    let spec = &held.spec;
                    scheduler.restore(spec, held.have, &fetched.pages, |page, bytes| {
                        runner.page_mut(Group::Full, page).copy_from_slice(bytes);
                    });
                }
                // At least so slow: the next decision knows.
                None => self.loaded(held.pages, held.near, held.since.elapsed().as_secs_f64() * 2.0),
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

#[cfg(test)]
#[path = "tiers_tests.rs"]
mod tests;
