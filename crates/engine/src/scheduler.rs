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
use suanpan_cache::{
    CacheBooks, EvictionPolicy, Hit, Imbalance, OutOfPages, PageCopy, PagePool, PrefixCache,
};

use crate::request::{Event, RequestKey};
use crate::sequence::Seq;
pub use crate::sequence::{Closed, SeqSpec};

mod sharing;

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
    prefix: PrefixCache,
    /// In order of arrival.
    running: Vec<Seq>,
    /// In order of arrival.
    waiting: VecDeque<Seq>,
    /// Copies of the schedule under way: they keep their sources from being handed out.
    copying: Vec<PageCopy>,
    /// Rises whenever pages come back or become shareable; a request that did not fit is not tried again before.
    supply: u64,
    totals: SchedulerTotals,
}

/// What became of a running request's need for a page.
enum Room {
    Reserved,
    /// It was itself the youngest that could go.
    GaveWay,
    Stalled,
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
        self.waiting.insert(place, Seq::new(spec, &self.pool));
        Ok(())
    }

    /// What [`Scheduler::submit`] would refuse.
    pub fn check_submit(&self, spec: &SeqSpec) -> Result<(), BadArgument> {
        check_fits(spec.prompt.len(), spec.max_total, &self.pool)?;
        self.check_fork(spec)?;
        if self.find(spec.key).is_some() {
            return Err(BadArgument::new(OP, "key", spec.key.0, "a key that no request has"));
        }
        Ok(())
    }

    /// The end of a request that was never submitted.
    pub fn close_unseen(&self, spec: SeqSpec) -> Closed {
        Seq::new(spec, &self.pool).close(self.pool.page_size(), false)
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
        out.copies.extend(self.copying.iter().map(|copy| (copy.from.id(), copy.to)));
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
        let books = self.pool.books();
        books.check()?;
        let held = self.running.iter().map(|s| s.pages.ids().len()).sum::<usize>() + self.copying.len();
        if books.active_pages > held {
            let (kept, recomputed) = (books.active_pages, held);
            return Err(Imbalance::Counter { counter: "active_pages (upper bound)", kept, recomputed });
        }
        Ok(())
    }

    /// O(pages): every reference to every page is accounted for by a running request or the prefix cache.
    pub fn check(&self) -> Result<(), Imbalance> {
        let held = self.running.iter().flat_map(|s| s.pages.ids().iter().copied());
        let held = held.chain(self.copying.iter().map(|copy| copy.from.id()));
        self.pool.check_holders(held.chain(self.prefix.ids()))?;
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
        for seq in self.running.iter().filter(|s| s.gap() > 1) {
            if *budget == 0 {
                break;
            }
            push_chunk(seq, chunk_len(seq, *budget, threshold), budget, out);
        }
    }

    /// Pages for the next token of the running request at `at`.
    fn make_room(&mut self, at: usize, out: &mut Schedule) -> Room {
        loop {
            let Err(short) = self.prepare(at) else { return Room::Reserved };
            if self.prefix.evict(short.needed - short.free) > 0 {
                continue;
            }
            let may_go = |s: &Seq| s.preemptions < self.opts.max_preemptions;
            match (at.max(1)..self.running.len()).rev().find(|&i| may_go(&self.running[i])) {
                Some(victim) => {
                    self.preempt(victim, out);
                    if victim == at {
                        return Room::GaveWay;
                    }
                }
                None => return Room::Stalled,
            }
        }
    }

    /// Makes the next token of the running request at `at` writable: a page for it, and one of its own.
    fn prepare(&mut self, at: usize) -> Result<(), OutOfPages> {
        let seq = &mut self.running[at];
        seq.pages.reserve(seq.tokens.len())?;
        self.copying.extend(seq.pages.make_writable(seq.computed)?);
        seq.note_pages();
        Ok(())
    }

    /// Takes the pages of a running request; it keeps its tokens and waits at its place in the order of arrival.
    fn preempt(&mut self, at: usize, out: &mut Schedule) {
        self.publish(at);
        let mut seq = self.running.remove(at);
        seq.pages.truncate_to(0);
        seq.lost_tokens += seq.computed;
        self.totals.lost_tokens += seq.computed as u64;
        seq.computed = 0;
        seq.published = false;
        seq.preemptions += 1;
        seq.blocked_at = None;
        self.totals.preemptions += 1;
        self.supply += 1;
        out.preempted.push(seq.key);
        let place = self.waiting.partition_point(|s| s.key < seq.key);
        self.waiting.insert(place, seq);
    }

    /// New and preempted requests, oldest first; one that does not fit lets younger ones pass, up to a limit.
    fn admit(&mut self, budget: &mut usize, out: &mut Schedule) {
        let mut at = 0;
        let threshold = self.opts.long_prefill_token_threshold;
        while at < self.waiting.len().min(ADMISSION_SCAN)
            && self.running.len() < self.opts.max_num_seqs
            && *budget > 0
        {
            if !self.try_admit(at, out) {
                if self.waiting[at].overtaken >= self.opts.max_overtaken {
                    return;
                }
                at += 1;
                continue;
            }
            let Some(seq) = self.waiting.remove(at) else { return };
            self.waiting.iter_mut().take(at).for_each(|older| older.overtaken += 1);
            push_chunk(&seq, chunk_len(&seq, *budget, threshold), budget, out);
            let place = self.running.partition_point(|s| s.key < seq.key);
            self.running.insert(place, seq);
        }
    }

    /// Gives the waiting request at `at` its pages, if they are there. Prefix hits are pinned before anything is evicted.
    fn try_admit(&mut self, at: usize, out: &mut Schedule) -> bool {
        let seq = &self.waiting[at];
        if seq.blocked_at == Some(self.supply) {
            return false;
        }
        let mut hit =
            if seq.reuse_prefix { self.prefix.lookup(seq.namespace, &seq.tokens) } else { Hit::default() };
        if !self.fits(seq, &hit) {
            // A page held only to be copied may be the very one that is missing.
            hit.partial = None;
        }
        if !self.fits(seq, &hit) || self.better_after_a_neighbour(seq, hit.tokens(self.pool.page_size())) {
            self.waiting[at].blocked_at = Some(self.supply);
            return false;
        }
        let protected = seq.preemptions >= self.opts.max_preemptions;
        let reserve = if protected { seq.most_tokens() } else { seq.tokens.len() };
        let missing = reserve.div_ceil(self.pool.page_size()) - hit.pages.len();
        self.prefix.evict(missing.saturating_sub(self.pool.num_free()));
        let seq = &mut self.waiting[at];
        let hit_tokens = seq.pages.push_hit(hit);
        let copied = seq.pages.reserve(reserve).and_then(|()| seq.pages.make_writable(hit_tokens));
        let Ok(copied) = copied else {
            // The books promised the pages; if they are wrong `check` says so, and the request waits unharmed.
            seq.pages.truncate_to(0);
            return false;
        };
        self.copying.extend(copied);
        seq.computed = hit_tokens;
        seq.hit_tokens += hit_tokens;
        seq.reserved_tokens = seq.reserved_tokens.max(reserve);
        seq.note_pages();
        if seq.cached_tokens.is_none() {
            seq.cached_tokens = Some(hit_tokens);
            self.totals.prefix_query_tokens += if seq.reuse_prefix { seq.prompt_len as u64 } else { 0 };
            self.totals.prefix_hit_tokens += hit_tokens as u64;
        }
        out.admitted.push(Admission { key: seq.key, hit_tokens });
        true
    }

    /// Whether a waiting request would find its pages beside what `hit` pins.
    fn fits(&self, seq: &Seq, hit: &Hit) -> bool {
        let wanted = seq.wanted_tokens(self.opts.max_preemptions).div_ceil(self.pool.page_size());
        wanted - hit.pages.len() + self.growing() <= self.pool.books().available_pages()
    }

    /// Each of these running requests may soon want one page more; admitting into those would only cause a preemption.
    fn growing(&self) -> usize {
        self.running.iter().filter(|s| s.preemptions < self.opts.max_preemptions).count()
    }

    /// Makes what a running request has computed visible to the prefix cache.
    fn publish(&mut self, at: usize) {
        let seq = &self.running[at];
        if seq.computed >= seq.prompt_len {
            let done = &seq.tokens[..seq.computed];
            self.prefix.insert(seq.namespace, done, seq.pages.pages(), seq.cache_priority);
        }
    }

    fn close_running(&mut self, at: usize, complete: bool) -> Closed {
        self.supply += 1;
        self.running.remove(at).close(self.pool.page_size(), complete)
    }
}

/// Refuses a request that could not run even with every page to itself, with both numbers.
pub fn check_fits(prompt_len: usize, max_total: usize, pool: &PagePool) -> Result<(), BadArgument> {
    if prompt_len == 0 {
        return Err(BadArgument::new("request", "prompt", "0 tokens", "at least 1 token"));
    }
    let capacity = pool.num_pages() * pool.page_size();
    // The last token drawn is never computed.
    let held = prompt_len.max(max_total.saturating_sub(1));
    if held > capacity || max_total < prompt_len {
        let asked = format!("{prompt_len} prompt + {} output tokens", max_total.saturating_sub(prompt_len));
        let supported = format!(
            "at most {} tokens in all: the KV cache has {} pages of {}",
            capacity + 1,
            pool.num_pages(),
            pool.page_size()
        );
        return Err(BadArgument::new("request", "max_tokens", asked, supported));
    }
    Ok(())
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
