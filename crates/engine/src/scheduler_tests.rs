//! The scheduler under random load, against a stand-in for the KV cache that knows which prefix each slot was written for.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::rng;

/// What a slot should hold: a digest of namespace and all tokens up to its position.
fn digests(namespace: u64, tokens: &[u32]) -> Vec<u64> {
    let step = |state: &mut u64, &t: &u32| {
        *state = rng::derive(*state, u64::from(t));
        Some(*state)
    };
    tokens.iter().scan(rng::derive(namespace, 77), step).collect()
}

/// The token a deterministic model would draw after `tokens`.
fn next_token(namespace: u64, tokens: &[u32]) -> u32 {
    (digests(namespace, tokens)[tokens.len() - 1] % 5) as u32
}

fn solo(namespace: u64, prompt: &[u32], outputs: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    (0..outputs).for_each(|_| tokens.push(next_token(namespace, &tokens)));
    tokens
}

pub(super) struct Sim {
    pub scheduler: Scheduler,
    schedule: Schedule,
    slots: Vec<u64>,
    /// The same of layers with a window.
    window_slots: Vec<u64>,
    specs: HashMap<RequestKey, SeqSpec>,
    pub done: HashMap<RequestKey, Closed>,
    aborted: usize,
    counted: HashMap<RequestKey, usize>,
    steps: usize,
    copies: usize,
    forks: usize,
    next_key: u64,
}

impl Sim {
    fn new(pages: usize, page_size: usize, opts: SchedulerOptions) -> Sim {
        let pool = PagePool::new(pages, page_size).unwrap();
        Sim {
            scheduler: Scheduler::new(pool, true, opts).unwrap(),
            schedule: Schedule::default(),
            slots: vec![0xbad; pages * page_size],
            window_slots: Vec::new(),
            specs: HashMap::new(),
            done: HashMap::new(),
            aborted: 0,
            counted: HashMap::new(),
            steps: 0,
            copies: 0,
            forks: 0,
            next_key: 0,
        }
    }

    /// The same with layers that look back `window` tokens and have `window_pages` pages of their own.
    pub fn windowed(
        pages: usize,
        (window_pages, window): (usize, usize),
        page_size: usize,
        opts: SchedulerOptions,
    ) -> Sim {
        let sim = Sim::new(pages, page_size, opts);
        let pool = PagePool::new(window_pages, page_size).unwrap();
        Sim {
            scheduler: sim.scheduler.with_windows(WindowGroup { pool, window, sinks: 0 }).unwrap(),
            window_slots: vec![0xbad; window_pages * page_size],
            ..sim
        }
    }

    pub fn submit(&mut self, namespace: u64, prompt: &[u32], outputs: usize) -> RequestKey {
        self.submit_fork(namespace, prompt, outputs, None)
    }

    fn submit_fork(
        &mut self,
        namespace: u64,
        prompt: &[u32],
        outputs: usize,
        fork_of: Option<RequestKey>,
    ) -> RequestKey {
        let key = RequestKey(self.next_key);
        self.next_key += 1;
        let spec = SeqSpec {
            key,
            namespace,
            prompt: prompt.to_vec(),
            max_total: prompt.len() + outputs,
            reuse_prefix: true,
            fork_of,
            cache_priority: (key.0 % 3) as i32,
        };
        self.specs.insert(key, spec.clone());
        self.scheduler.submit(spec).unwrap();
        key
    }

    fn abort(&mut self, key: RequestKey) {
        self.aborted += usize::from(self.scheduler.abort(key).is_some());
        self.scheduler.check().unwrap();
    }

    pub fn step(&mut self) {
        self.steps += 1;
        assert!(self.steps < 20_000, "no progress");
        let mut schedule = std::mem::take(&mut self.schedule);
        self.scheduler.schedule(&mut schedule);
        self.scheduler.check().unwrap();
        let opts = self.scheduler.opts;
        assert!(schedule.num_tokens() <= opts.max_num_batched_tokens);
        assert!(self.scheduler.running.len() <= opts.max_num_seqs);
        assert!(!schedule.chunks.is_empty() || !self.scheduler.has_work(), "work, and nothing scheduled");
        let page_size = self.scheduler.pool.page_size();
        for &(from, to) in &schedule.copies {
            let from = from as usize * page_size;
            self.slots.copy_within(from..from + page_size, to as usize * page_size);
        }
        for &(from, to) in &schedule.window_copies {
            let from = from as usize * page_size;
            self.window_slots.copy_within(from..from + page_size, to as usize * page_size);
        }
        self.copies += schedule.copies.len();
        self.scheduler.copied();
        for chunk in &schedule.chunks {
            self.compute(chunk);
        }
        self.check_slots();
        for chunk in &schedule.chunks {
            self.scheduler.computed(chunk);
            if chunk.completes {
                let forks = self.scheduler.fork(chunk.key);
                self.forks += forks.len();
                std::iter::once(chunk.key).chain(forks).for_each(|key| self.draw(key));
            }
            self.scheduler.publish_prompt(chunk.key);
        }
        self.scheduler.check().unwrap();
        self.schedule = schedule;
    }

    /// Reads what should be cached, writes what is new, as the executor would.
    fn compute(&mut self, chunk: &Chunk) {
        let spec = &self.specs[&chunk.key];
        let at = self.scheduler.running_at(chunk.key).unwrap();
        let seq = &self.scheduler.running[at];
        let digests = digests(spec.namespace, &seq.tokens);
        for (position, &digest) in digests.iter().enumerate().take(chunk.cached_len) {
            assert_eq!(
                self.slots[seq.pages.slot(position) as usize],
                digest,
                "{chunk:?}: stale slot {position}"
            );
        }
        for position in chunk.cached_len..chunk.cached_len + chunk.extend_len {
            assert!(
                !seq.pages.is_borrowed(position / self.scheduler.pool.page_size()),
                "{chunk:?} writes a borrowed page"
            );
            self.slots[seq.pages.slot(position) as usize] = digests[position];
        }
        if let (Some(table), Some(group)) = (&seq.window, &self.scheduler.window) {
            let first = (chunk.cached_len + 1).saturating_sub(group.window);
            for (position, &digest) in digests.iter().enumerate().take(chunk.cached_len).skip(first) {
                let held = self.window_slots[table.slot(position) as usize];
                assert_eq!(held, digest, "{chunk:?}: stale window slot {position}");
            }
            for position in chunk.cached_len..chunk.cached_len + chunk.extend_len {
                assert!(
                    !table.is_borrowed(position / group.pool.page_size()),
                    "{chunk:?} writes a borrowed page"
                );
                self.window_slots[table.slot(position) as usize] = digests[position];
            }
        }
        *self.counted.entry(chunk.key).or_insert(0) += chunk.extend_len;
    }

    /// Nobody's tokens were overwritten by what the step wrote.
    fn check_slots(&self) {
        for seq in &self.scheduler.running {
            let digests = digests(seq.namespace, &seq.tokens);
            for (position, &digest) in digests.iter().enumerate().take(seq.computed) {
                let held = self.slots[seq.pages.slot(position) as usize];
                assert_eq!(held, digest, "{:?}: position {position} was overwritten", seq.key);
            }
            let (Some(table), Some(group)) = (&seq.window, &self.scheduler.window) else { continue };
            let first = (seq.computed + 1).saturating_sub(group.window);
            for (position, &digest) in digests.iter().enumerate().take(seq.computed).skip(first) {
                let held = self.window_slots[table.slot(position) as usize];
                assert_eq!(held, digest, "{:?}: window position {position} was overwritten", seq.key);
            }
        }
    }

    fn draw(&mut self, key: RequestKey) {
        let spec = &self.specs[&key];
        let tokens = self.scheduler.tokens(key).unwrap();
        if tokens.len() < spec.max_total {
            let token = next_token(spec.namespace, tokens);
            self.scheduler.push_token(key, token);
        }
        if self.scheduler.tokens(key).unwrap().len() == spec.max_total {
            let closed = self.scheduler.finish(key).unwrap();
            self.done.insert(key, closed);
        }
    }

    pub fn run_dry(&mut self) {
        while self.scheduler.has_work() {
            self.step();
        }
    }

    /// Everything is back, every output is its solo output, every book balances.
    pub fn settle(&mut self) {
        self.run_dry();
        let books = self.scheduler.books();
        assert_eq!((books.active_pages, books.free_pages + books.idle_pages), (0, books.total_pages));
        let window = self.scheduler.window_books();
        assert!(window.is_none_or(|b| b.active_pages == 0 && b.free_pages + b.idle_pages == b.total_pages));
        assert_eq!(self.done.len() + self.aborted, self.specs.len());
        for (key, closed) in &self.done {
            let spec = &self.specs[key];
            let outputs = spec.max_total - spec.prompt.len();
            assert_eq!(closed.tokens, solo(spec.namespace, &spec.prompt, outputs), "{key:?}");
            assert_eq!(closed.pages_peak, closed.pages_predicted, "{key:?}");
            assert_eq!(
                self.counted.get(key).copied().unwrap_or(0),
                closed.computed_tokens_predicted,
                "{key:?}"
            );
        }
        self.scheduler.clear_prefix_cache();
        assert_eq!(self.scheduler.books().free_pages, books.total_pages);
        assert!(self.scheduler.window_books().is_none_or(|b| b.free_pages == b.total_pages));
        self.scheduler.check().unwrap();
    }
}

pub(super) fn opts(max_num_seqs: usize, max_num_batched_tokens: usize) -> SchedulerOptions {
    SchedulerOptions { max_num_seqs, max_num_batched_tokens, ..SchedulerOptions::default() }
}

#[derive(Clone, Debug)]
struct Arrival {
    after_steps: usize,
    namespace: u64,
    prompt: Vec<u32>,
    outputs: usize,
    abort_after: Option<usize>,
    choices: usize,
}

fn arrivals(capacity: usize) -> impl Strategy<Value = Vec<Arrival>> {
    let prompt = (0..3u32, 1..capacity, 0..3usize).prop_map(|(family, len, own)| {
        let tail = len.saturating_sub(own);
        (0..len)
            .map(|i| if i < tail { (i as u32 * 7 + family) % 5 } else { own as u32 + family })
            .collect::<Vec<u32>>()
    });
    let one = (
        0..4usize,
        0..2u64,
        prompt,
        any::<prop::sample::Index>(),
        prop::option::weighted(0.3, 0..12usize),
        1..4usize,
    );
    let one = one.prop_map(move |(after_steps, namespace, prompt, outputs, abort_after, choices)| {
        let most = capacity + 1 - prompt.len();
        Arrival { after_steps, namespace, outputs: outputs.index(most) + 1, prompt, abort_after, choices }
    });
    prop::collection::vec(one, 1..24)
}

fn load() -> impl Strategy<Value = (usize, usize, SchedulerOptions, Vec<Arrival>)> {
    let eviction = prop::sample::select(&EvictionPolicy::ALL);
    let sizes = (2..14usize, 1..7usize, 1..6usize, 0..20usize, 0..6usize, 1..4u32, 0..5u32, eviction);
    sizes.prop_flat_map(
        |(pages, page_size, seqs, extra, threshold, max_preemptions, max_overtaken, eviction)| {
            let opts = SchedulerOptions {
                max_num_seqs: seqs,
                max_num_batched_tokens: seqs + extra,
                long_prefill_token_threshold: threshold,
                max_preemptions,
                max_overtaken,
                eviction,
            };
            arrivals(pages * page_size).prop_map(move |a| (pages, page_size, opts, a))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn random_load_finishes_balanced_and_as_if_alone((pages, page_size, opts, arrivals) in load()) {
        let sim = random_load(Sim::new(pages, page_size, opts), &arrivals);
        prop_assert!(sim.done.values().all(|closed| closed.preemptions <= opts.max_preemptions));
        let preemptions = sim.scheduler.totals().preemptions;
        prop_assert!(preemptions <= u64::from(opts.max_preemptions) * sim.specs.len() as u64);
    }

    /// The same with layers that look back a window and have pages of their own, from barely enough for one request on.
    #[test]
    fn random_load_with_windows_finishes_balanced_and_as_if_alone(
        (pages, page_size, opts, arrivals) in load(), window in 1..20usize, more in 0..12usize,
    ) {
        let window_pages = window.div_ceil(page_size) + 4 + more;
        random_load(Sim::windowed(pages, (window_pages, window), page_size, opts), &arrivals);
    }
}

fn random_load(mut sim: Sim, arrivals: &[Arrival]) -> Sim {
    let mut aborts: Vec<(usize, RequestKey)> = Vec::new();
    for arrival in arrivals {
        for _ in 0..arrival.after_steps {
            sim.step();
            let now = sim.steps;
            aborts.iter().filter(|(at, _)| *at == now).for_each(|(_, key)| sim.abort(*key));
        }
        let key = sim.submit(arrival.namespace, &arrival.prompt, arrival.outputs);
        if let Some(steps) = arrival.abort_after {
            aborts.push((sim.steps + steps, key));
        }
        for _ in 1..arrival.choices {
            sim.submit_fork(arrival.namespace, &arrival.prompt, arrival.outputs, Some(key));
        }
    }
    sim.settle();
    sim
}

#[test]
fn preempted_requests_resume_with_prompt_and_output() {
    let mut sim = Sim::new(12, 16, opts(8, 64));
    let prompts: Vec<Vec<u32>> = (0..2).map(|r| (0..20).map(|i| (i * 3 + r) % 5).collect()).collect();
    for prompt in &prompts {
        sim.submit(0, prompt, 120);
    }
    sim.settle();
    let preemptions = sim.scheduler.totals().preemptions;
    assert!((1..=4).contains(&preemptions), "{preemptions}");
}

#[test]
fn eight_requests_of_sixty_percent_do_not_thrash() {
    let mut sim = Sim::new(20, 4, opts(8, 32));
    for r in 0..8 {
        sim.submit(r, &[r as u32; 16], 33);
    }
    let oldest = RequestKey(0);
    sim.settle();
    assert!(sim.scheduler.totals().preemptions < 16);
    assert_eq!(sim.done[&oldest].preemptions, 0, "the oldest is never evicted");
}

#[test]
fn a_blocked_head_lets_smaller_ones_pass_but_not_for_ever() {
    let mut sim = Sim::new(10, 4, SchedulerOptions { max_overtaken: 5, ..opts(4, 16) });
    sim.submit(0, &[1; 8], 20);
    sim.step();
    let head = sim.submit(1, &[2; 36], 4);
    let mut passed = 0;
    for i in 0..400 {
        if i % 2 == 0 {
            sim.submit(2 + i, &[3; 4], 2);
        }
        sim.step();
        passed = passed.max(sim.done.len());
        if sim.scheduler.progress(head).is_some() {
            assert!(passed >= 3, "smaller requests ran while the head was blocked");
            sim.settle();
            return;
        }
    }
    panic!("the head waits for ever");
}

#[test]
fn decodes_come_before_prompt_chunks_in_one_budget() {
    let mut sim = Sim::new(64, 4, opts(4, 8));
    sim.submit(0, &[1; 4], 20);
    sim.step();
    sim.submit(1, &[2; 40], 2);
    sim.step();
    sim.step();
    let lens: Vec<(usize, usize)> =
        sim.schedule.chunks.iter().map(|c| (c.cached_len, c.extend_len)).collect();
    assert_eq!(lens, [(5, 1), (7, 7)]);
    sim.settle();
}

#[test]
fn a_prompt_under_way_is_awaited_by_one_that_shares_it() {
    let mut sim = Sim::new(64, 4, opts(4, 8));
    let prompt: Vec<u32> = (0..41).map(|i| i % 5).collect();
    let (first, second) = (sim.submit(0, &prompt, 3), sim.submit(0, &prompt, 3));
    sim.settle();
    assert_eq!(sim.done[&first].cached_tokens, 0);
    assert_eq!(sim.done[&second].cached_tokens, 40);
    assert_eq!(sim.counted[&second], 1 + 2);
}

#[test]
fn nothing_of_an_aborted_prompt_is_ever_a_hit() {
    let mut sim = Sim::new(30, 16, opts(4, 64));
    let other = sim.submit(9, &[4; 30], 100);
    let prompt: Vec<u32> = (0..400).map(|i| i % 5).collect();
    let longer: Vec<u32> = prompt.iter().copied().chain([3; 9]).collect();
    for round in 0..50 {
        sim.scheduler.clear_prefix_cache();
        let key = sim.submit(0, &prompt, 4);
        (0..round % 6).for_each(|_| sim.step());
        sim.abort(key);
        for (text, most_cached) in [(&prompt, 0), (&longer, 400)] {
            let again = sim.submit(0, text, 1);
            while !sim.done.contains_key(&again) {
                sim.step();
            }
            assert!(sim.done[&again].cached_tokens <= most_cached, "round {round}");
        }
    }
    sim.run_dry();
    assert!(sim.done.contains_key(&other));
    sim.settle();
}

#[test]
fn a_cached_page_looked_up_is_pinned_before_anything_is_evicted() {
    for b_first in [false, true] {
        for jitter in 0..4 {
            let mut sim = Sim::new(8, 16, opts(4, 256));
            let prefix: Vec<u32> = (0..64).map(|i| i % 5).collect();
            sim.submit(0, &prefix, 1);
            sim.run_dry();
            let a: Vec<u32> = prefix.iter().copied().chain([1; 16]).collect();
            let b = vec![2u32; 80];
            let order: [&[u32]; 2] = if b_first { [&b, &a] } else { [&a, &b] };
            sim.submit(0, order[0], 4);
            (0..jitter).for_each(|_| sim.step());
            sim.submit(0, order[1], 4);
            sim.settle();
        }
    }
}

#[test]
fn a_request_that_can_never_fit_is_refused_with_both_numbers() {
    let mut sim = Sim::new(4, 16, opts(2, 64));
    let spec = |prompt: usize, outputs| SeqSpec {
        key: RequestKey(0),
        namespace: 0,
        prompt: vec![0; prompt],
        max_total: prompt + outputs,
        reuse_prefix: true,
        fork_of: None,
        cache_priority: 0,
    };
    let refused = sim.scheduler.submit(spec(50, 16)).unwrap_err();
    assert!(refused.asked.contains("50 prompt + 16 output") && refused.supported.contains("65"), "{refused}");
    assert_eq!(sim.scheduler.submit(spec(0, 4)).unwrap_err().field, "prompt");
    sim.scheduler.submit(spec(50, 15)).unwrap();
}

#[test]
fn impossible_limits_are_refused() {
    let pool = PagePool::new(4, 4).unwrap();
    let field = |o| Scheduler::new(pool.clone(), true, o).err().map(|e| e.field);
    assert_eq!(field(opts(0, 4)).as_deref(), Some("max_num_seqs"));
    assert_eq!(field(opts(5, 4)).as_deref(), Some("max_num_batched_tokens"));
    assert_eq!(
        field(SchedulerOptions { max_preemptions: 0, ..opts(1, 4) }).as_deref(),
        Some("max_preemptions")
    );
    assert_eq!(field(opts(4, 4)), None);
}

/// C22: four choices of a 20-token prompt compute it once, store its full page once and copy the partial one on write.
#[test]
fn c22_choices_share_the_prompt_and_copy_only_the_last_page() {
    let mut sim = Sim::new(64, 16, opts(8, 64));
    let prompt: Vec<u32> = (0..20).map(|i| i % 5).collect();
    let first = sim.submit(0, &prompt, 6);
    let others: Vec<_> = (0..3).map(|_| sim.submit_fork(0, &prompt, 6, Some(first))).collect();
    sim.step();
    assert_eq!((sim.forks, sim.copies, sim.scheduler.books().active_pages), (3, 0, 2));
    sim.step();
    assert_eq!((sim.copies, sim.scheduler.books().active_pages), (3, 5), "the owner writes in place");
    sim.settle();
    for key in others {
        assert_eq!((sim.done[&key].cached_tokens, sim.counted[&key]), (20, 5));
    }
    let refused = SeqSpec {
        key: RequestKey(99),
        prompt: vec![1; 3],
        fork_of: Some(RequestKey(98)),
        ..sim.specs[&first].clone()
    };
    sim.scheduler.submit(SeqSpec { key: RequestKey(98), ..refused.clone() }).unwrap();
    sim.scheduler.submit(SeqSpec { prompt: vec![2; 3], ..refused.clone() }).unwrap_err();
    assert!(sim.scheduler.abort(RequestKey(98)).is_some());
}

/// C22 under a pool that forces preemption: choices still end as if alone, and everything comes back.
#[test]
fn choices_survive_preemption_and_the_end_of_the_first() {
    for abort_first in [false, true] {
        let mut sim = Sim::new(9, 4, opts(8, 64));
        let prompt: Vec<u32> = (0..10).map(|i| i % 5).collect();
        let first = sim.submit(0, &prompt, 16);
        for _ in 0..3 {
            sim.submit_fork(0, &prompt, 16, Some(first));
        }
        sim.step();
        if abort_first {
            sim.abort(first);
        }
        sim.settle();
        assert!(sim.scheduler.totals().preemptions > 0 && sim.forks > 0);
    }
}

/// A pool exactly as large as the prompt: its own cached copy must not keep it waiting.
#[test]
fn a_partial_hit_never_takes_the_last_page_a_request_needs() {
    let mut sim = Sim::new(4, 4, opts(2, 64));
    let prompt: Vec<u32> = (0..14).map(|i| i % 5).collect();
    sim.submit(0, &prompt, 3);
    sim.run_dry();
    let mut other = prompt.clone();
    other[2] = 4;
    let key = sim.submit(0, &other, 3);
    sim.settle();
    assert_eq!(sim.done[&key].cached_tokens, 0);
}
