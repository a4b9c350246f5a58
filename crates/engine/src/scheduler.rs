//! Who computes what in the next step: one token budget, decodes first, then prompt chunks, then new requests.
//!
//! Pure state: no clock, no thread, no device. It runs unchanged in the server, in a simulator and under property tests.
//!
//! Why nothing waits for ever and nothing thrashes:
//! - A request is accepted only if it fits into the empty pool alone.
//! - Out of pages: first idle prefix pages go, then the youngest running request that is not protected. The oldest running
//!   request is never preempted, so some request always gets on.
//! - Each preemption makes the next admission ask for a larger share of what the request may still need; after
//!   `max_preemptions` all of it is reserved and the request is protected. Preemptions are at most `max_preemptions` a request.
//! - If only protected requests are left beside one that needs a page, that one stalls until one of them ends; they need
//!   nothing more, so they end. Nobody is admitted meanwhile.
//! - A waiting request that does not fit lets younger ones pass, `max_overtaken` of them; then it blocks the queue behind it.

use std::collections::VecDeque;

use suanpan_base::BadArgument;
use suanpan_cache::{CacheBooks, EvictionPolicy, Group, Imbalance, PageCopy, PagePool, PrefixCache};

use crate::request::{Event, RequestKey};
use crate::sequence::Seq;
pub use crate::sequence::{Closed, SeqSpec};

mod admit;
mod room;
mod sharing;
mod windows;

pub use admit::check_fits;
use room::Room;
pub use windows::WindowGroup;

const OP: &str = "scheduler";

/// Waiting requests looked at in one step; those behind wait for the next.
const ADMISSION_SCAN: usize = 64;

/// Limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Requests that hold pages at once.
    pub max_num_seqs: usize,
    /// Tokens a step, decodes and prompt chunks together.
    pub max_num_batched_tokens: usize,
    /// Most prompt tokens of one request in a step; 0 is no limit but the budget.
    pub long_prefill_token_threshold: usize,
    /// Preemptions after which a request is protected; at least 1.
    pub max_preemptions: u32,
    /// Younger requests that may pass one that does not fit.
    pub max_overtaken: u32,
    /// Which cached prefixes go first.
    pub eviction: EvictionPolicy,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        SchedulerOptions {
            max_num_seqs: 32,
            max_num_batched_tokens: 512,
            long_prefill_token_threshold: 0,
            max_preemptions: 2,
            max_overtaken: 32,
            eviction: EvictionPolicy::Lru,
        }
    }
}

/// Part of one step: `extend_len` tokens of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The request.
    pub key: RequestKey,
    /// Tokens computed before.
    pub cached_len: usize,
    /// Tokens of this step.
    pub extend_len: usize,
    /// It reaches the last known token: the next token can be drawn.
    pub completes: bool,
}

/// A request that got its pages in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The request.
    pub key: RequestKey,
    /// Tokens the prefix cache gave.
    pub hit_tokens: usize,
}

/// How far a running request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Prompt tokens the prefix cache gave at first admission.
    pub cached_tokens: usize,
    /// Tokens whose keys and values are in its pages.
    pub computed_tokens: usize,
    /// Prompt and output tokens so far.
    pub known_tokens: usize,
}

impl Progress {
    /// As an event.
    pub fn event(self, key: RequestKey) -> Event {
        let Progress { cached_tokens, computed_tokens, known_tokens } = self;
        Event::Prefill { key, cached_tokens, computed_tokens, known_tokens }
    }
}

/// The plan of one step. Made once, refilled each step.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// What to compute.
    pub chunks: Vec<Chunk>,
    /// Who was admitted.
    pub admitted: Vec<Admission>,
    /// Who lost its pages.
    pub preempted: Vec<RequestKey>,
    /// Pages to copy, (from, to), before anything is computed; then [`Scheduler::copied`].
    pub copies: Vec<(u32, u32)>,
    /// The same of the layers with a window, where they have pages of their own.
    pub window_copies: Vec<(u32, u32)>,
    /// How many running requests wait for a page.
    pub stalled: usize,
}

impl Schedule {
    /// Tokens of the step.
    pub fn num_tokens(&self) -> usize {
        self.chunks.iter().map(|c| c.extend_len).sum()
    }

    fn clear(&mut self) {
        self.chunks.clear();
        self.admitted.clear();
        self.preempted.clear();
        self.copies.clear();
        self.window_copies.clear();
        self.stalled = 0;
    }
}

/// Totals since the scheduler was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerTotals {
    /// Requests that lost their pages, each time counted.
    pub preemptions: u64,
    /// Tokens looked up in the prefix cache at first admissions.
    pub prefix_query_tokens: u64,
    /// Tokens it gave.
    pub prefix_hit_tokens: u64,
    /// Tokens of preempted requests whose computation was thrown away.
    pub lost_tokens: u64,
}

/// The state machine.
pub struct Scheduler {
    opts: SchedulerOptions,
    pool: PagePool,
    window: Option<WindowGroup>,
    prefix: PrefixCache,
    /// In order of arrival.
    running: Vec<Seq>,
    /// In order of arrival.
    waiting: VecDeque<Seq>,
    /// Copies of the schedule under way: they keep their sources from being handed out.
    copying: Vec<(Group, PageCopy)>,
    /// Rises whenever pages come back or become shareable; a request that did not fit is not tried again before.
    supply: u64,
    totals: SchedulerTotals,
}

impl Scheduler {
    /// A scheduler over an empty pool.
    pub fn new(
        pool: PagePool,
        enable_prefix_caching: bool,
        opts: SchedulerOptions,
    ) -> Result<Self, BadArgument> {
        let bad = |field, asked, supported: &str| Err(BadArgument::new(OP, field, asked, supported));
        if opts.max_num_seqs == 0 {
            return bad("max_num_seqs", 0, "at least 1");
        }
        if opts.max_num_batched_tokens < opts.max_num_seqs {
            let supported = format!("at least max_num_seqs = {}, one token for each", opts.max_num_seqs);
            return bad("max_num_batched_tokens", opts.max_num_batched_tokens, &supported);
        }
        if opts.max_preemptions == 0 {
            return bad("max_preemptions", 0, "at least 1");
        }
        let prefix = PrefixCache::new(pool.clone(), enable_prefix_caching, opts.eviction);
        Ok(Scheduler {
            opts,
            pool,
            window: None,
            prefix,
            running: Vec::with_capacity(opts.max_num_seqs),
            waiting: VecDeque::new(),
            copying: Vec::new(),
            supply: 0,
            totals: SchedulerTotals::default(),
        })
    }

    /// Queues a request. Refused: one that could not run even alone, and keys in use.
    pub fn submit(&mut self, spec: SeqSpec) -> Result<(), BadArgument> {
        self.check_submit(&spec)?;
        // One that was held back for its pages comes later than its key says.
        let place = self.waiting.partition_point(|s| s.key < spec.key);
        let seq = Seq::new(spec, &self.pool, self.window.as_ref());
        self.waiting.insert(place, seq);
        Ok(())
    }

    /// What [`Scheduler::submit`] would refuse.
    pub fn check_submit(&self, spec: &SeqSpec) -> Result<(), BadArgument> {
        check_fits(spec.prompt.len(), spec.max_total, &self.pool)?;
        if let Some(group) = &self.window {
            group.check_fits(spec.prompt.len().max(spec.max_total.saturating_sub(1)))?;
        }
        self.check_fork(spec)?;
        if self.find(spec.key).is_some() {
            return Err(BadArgument::new(OP, "key", spec.key.0, "a key that no request has"));
        }
        Ok(())
    }

    /// The end of a request that was never submitted.
    pub fn close_unseen(&self, spec: SeqSpec) -> Closed {
        Seq::new(spec, &self.pool, self.window.as_ref()).close(self.pool.page_size(), false)
    }

    /// Plans the next step into `out`. Every chunk must then be computed and confirmed by [`Scheduler::computed`].
    pub fn schedule(&mut self, out: &mut Schedule) {
        out.clear();
        self.copied();
        let mut budget = self.opts.max_num_batched_tokens;
        self.schedule_decodes(&mut budget, out);
        self.schedule_prompts(&mut budget, out);
        if out.preempted.is_empty() && out.stalled == 0 {
            self.admit(&mut budget, out);
        }
        // Requests that share windows can all wait for one another: then the youngest gives way, protected or not.
        while out.chunks.is_empty() && self.running.len() > 1 {
            self.preempt(self.running.len() - 1, out);
            out.stalled = 0;
            self.schedule_decodes(&mut budget, out);
            self.schedule_prompts(&mut budget, out);
        }
        for (group, copy) in &self.copying {
            let copies = if *group == Group::Full { &mut out.copies } else { &mut out.window_copies };
            copies.push((copy.from.id(), copy.to));
        }
    }

    /// Confirms that a chunk's keys and values are in its pages.
    pub fn computed(&mut self, chunk: &Chunk) {
        if let Some(at) = self.running_at(chunk.key) {
            self.running[at].computed += chunk.extend_len;
        }
    }

    /// Makes a prompt that is complete visible to the prefix cache. Called once its logits have been looked at: what a broken
    /// prompt left in its pages must not reach others. True the first time.
    pub fn publish_prompt(&mut self, key: RequestKey) -> bool {
        let Some(at) = self.running_at(key) else { return false };
        let seq = &mut self.running[at];
        if !seq.published && seq.computed >= seq.prompt_len {
            seq.published = true;
            seq.prompt_done = true;
            let prompt = &seq.tokens[..seq.prompt_len];
            self.prefix.insert(seq.namespace, prompt, seq.pages.pages(), seq.cache_priority);
            if seq.preemptions < self.opts.max_preemptions {
                let prompt_len = seq.prompt_len;
                self.publish_windows(at, prompt_len);
                self.give_back(at);
            }
            self.supply += 1;
            return true;
        }
        false
    }

    /// Adds a drawn token to a running request.
    pub fn push_token(&mut self, key: RequestKey, token: u32) {
        if let Some(at) = self.running_at(key) {
            self.running[at].tokens.push(token);
        }
    }

    /// Ends a request whose output is complete; its pages stay in the prefix cache until they are needed.
    pub fn finish(&mut self, key: RequestKey) -> Option<Closed> {
        let at = self.running_at(key)?;
        self.publish(at);
        Some(self.close_running(at, true))
    }

    /// Takes a request out wherever it is: queued, in the middle of a prompt, decoding. Nothing it computed is published.
    pub fn abort(&mut self, key: RequestKey) -> Option<Closed> {
        if let Some(at) = self.running_at(key) {
            return Some(self.close_running(at, false));
        }
        let at = self.waiting.binary_search_by_key(&key, |s| s.key).ok()?;
        self.supply += 1;
        Some(self.waiting.remove(at)?.close(self.pool.page_size(), false))
    }

    /// Prompt and output tokens so far of a running request.
    pub fn tokens(&self, key: RequestKey) -> Option<&[u32]> {
        self.running_at(key).map(|at| self.running[at].tokens.as_slice())
    }

    /// Page ids of a running request.
    pub fn page_ids(&self, key: RequestKey) -> Option<&[u32]> {
        self.running_at(key).map(|at| self.running[at].pages.ids())
    }

    /// How far a running request is.
    pub fn progress(&self, key: RequestKey) -> Option<Progress> {
        let seq = &self.running[self.running_at(key)?];
        let cached_tokens = seq.cached_tokens.unwrap_or(0);
        Some(Progress { cached_tokens, computed_tokens: seq.computed, known_tokens: seq.tokens.len() })
    }

    /// The namespace of a running request.
    pub fn namespace(&self, key: RequestKey) -> Option<u64> {
        self.running_at(key).map(|at| self.running[at].namespace)
    }

    /// Requests that hold pages.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether a step would do anything.
    pub fn has_work(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    /// Totals so far.
    pub fn totals(&self) -> SchedulerTotals {
        self.totals
    }

    /// Pages by holder.
    pub fn books(&self) -> CacheBooks {
        self.pool.books()
    }

    /// Forgets every cached prefix; pages nobody else holds become free.
    pub fn clear_prefix_cache(&mut self) {
        self.prefix.clear();
        self.supply += 1;
    }

    /// O(requests): the pool's counters add up, and it holds no active page when nobody runs.
    pub fn check_cheaply(&self) -> Result<(), Imbalance> {
        let bounded = |books: CacheBooks, held: usize| {
            books.check()?;
            if books.active_pages > held + self.copying.len() {
                let (kept, recomputed) = (books.active_pages, held + self.copying.len());
                return Err(Imbalance::Counter { counter: "active_pages (upper bound)", kept, recomputed });
            }
            Ok(())
        };
        bounded(self.pool.books(), self.running.iter().map(|s| s.pages.ids().len()).sum())?;
        self.window.as_ref().map_or(Ok(()), |group| {
            let held =
                self.running.iter().flat_map(|s| &s.window).map(|table| table.held_ids().count()).sum();
            bounded(group.pool.books(), held)
        })
    }

    /// O(pages): every reference to every page is accounted for by a running request or the prefix cache.
    pub fn check(&self) -> Result<(), Imbalance> {
        let copying = |of: Group| {
            self.copying.iter().filter(move |(group, _)| *group == of).map(|(_, copy)| copy.from.id())
        };
        let held = self.running.iter().flat_map(|s| s.pages.ids().iter().copied());
        self.pool.check_holders(held.chain(copying(Group::Full)).chain(self.prefix.ids()))?;
        if let Some(group) = &self.window {
            let held = self.running.iter().flat_map(|s| &s.window).flat_map(|table| table.held_ids());
            let held = held.chain(copying(Group::Window)).chain(self.prefix.window_ids());
            group.pool.check_holders(held)?;
        }
        self.prefix.check()?;
        self.check_cheaply()
    }

    fn running_at(&self, key: RequestKey) -> Option<usize> {
        self.running.binary_search_by_key(&key, |s| s.key).ok()
    }

    /// Decodes, in order of arrival: requests with exactly one token to compute.
    fn schedule_decodes(&mut self, budget: &mut usize, out: &mut Schedule) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            if self.running[at].gap() != 1 {
                at += 1;
                continue;
            }
            match self.make_room(at, out) {
                Room::Reserved => {
                    push_chunk(&self.running[at], 1, budget, out);
                    at += 1;
                }
                Room::Stalled => {
                    out.stalled += 1;
                    at += 1;
                }
                Room::GaveWay => {} // the next request is at this index now
            }
        }
    }

    /// Prompts (and recomputations) under way, in order of arrival. Their pages were reserved at admission.
    fn schedule_prompts(&mut self, budget: &mut usize, out: &mut Schedule) {
        let threshold = self.opts.long_prefill_token_threshold;
        for at in 0..self.running.len() {
            if *budget == 0 {
                break;
            }
            if self.running[at].gap() == 1 {
                continue;
            }
            let wanted = chunk_len(&self.running[at], *budget, threshold);
            match self.window_room(at, wanted) {
                0 => out.stalled += 1,
                extend_len => push_chunk(&self.running[at], extend_len, budget, out),
            }
        }
    }

    /// Makes what a running request has computed visible to the prefix cache.
    fn publish(&mut self, at: usize) {
        let seq = &self.running[at];
        if seq.computed >= seq.prompt_len {
            let done = &seq.tokens[..seq.computed];
            self.prefix.insert(seq.namespace, done, seq.pages.pages(), seq.cache_priority);
            let computed = seq.computed;
            self.publish_windows(at, computed);
        }
    }

    fn close_running(&mut self, at: usize, complete: bool) -> Closed {
        self.supply += 1;
        self.running.remove(at).close(self.pool.page_size(), complete)
    }
}

fn chunk_len(seq: &Seq, budget: usize, threshold: usize) -> usize {
    let limit = if threshold == 0 { budget } else { budget.min(threshold) };
    seq.gap().min(limit)
}

fn push_chunk(seq: &Seq, extend_len: usize, budget: &mut usize, out: &mut Schedule) {
    *budget -= extend_len;
    let completes = extend_len == seq.gap();
    out.chunks.push(Chunk { key: seq.key, cached_len: seq.computed, extend_len, completes });
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "window_tests.rs"]
mod window_tests;
