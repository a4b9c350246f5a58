//! Random operations on requests whose layers have two groups of pages: everything, and a last window. Every slot of both pools has a
//! content, which is compared wherever somebody relies on it; the books of both are checked after each operation.

use suanpan_cache::{EvictionPolicy, Group, PageCopy, PagePool, PageTable, PrefixCache};

const PAGE: usize = 3;

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

struct Running {
    namespace: u64,
    tokens: Vec<u32>,
    computed: usize,
    branch: Option<usize>,
    full: PageTable,
    window: PageTable,
}

#[derive(Debug, Default)]
struct Seen {
    hits: usize,
    whole_hits: usize,
    shortened: usize,
    branches: usize,
    copies: usize,
    given_back: usize,
    refused: usize,
    evicted: usize,
    evicted_windows: usize,
}

struct World {
    pools: [PagePool; 2],
    window: usize,
    /// Pages of a sequence that stay in sight.
    sinks: usize,
    cache: PrefixCache,
    running: Vec<Running>,
    contents: [Vec<u32>; 2],
    seen: Seen,
}

impl World {
    fn new(
        pages: usize,
        window_pages: usize,
        (window, sinks): (usize, usize),
        policy: EvictionPolicy,
    ) -> World {
        let pools = [pages, window_pages].map(|n| PagePool::new(n, PAGE).unwrap());
        let cache = PrefixCache::new(pools[0].clone(), true, policy);
        let cache = cache.with_windows(pools[1].clone(), window, sinks);
        let contents = [pages, window_pages].map(|n| vec![u32::MAX; n * PAGE]);
        World { pools, window, sinks, cache, running: vec![], contents, seen: Seen::default() }
    }

    fn apply(&mut self, random: &mut Random) {
        let (count, i, n) = (self.running.len(), random.below(64), random.below(24));
        match random.below(20) {
            0..=4 if count < 5 => {
                let tokens: Vec<u32> = (0..random.below(26)).map(|_| random.below(2) as u32).collect();
                let namespace = random.below(2) as u64;
                self.admit(namespace, tokens);
            }
            5..=9 if count > 0 => self.compute(i % count, n),
            10..=12 if count > 0 => self.publish(i % count, random.below(3) as i32 - 1),
            13 if count > 0 && count < 5 => self.fork(i % count),
            14..=15 if count > 0 => drop(self.running.swap_remove(i % count)),
            16 => {
                let idle = self.pools[0].books().idle_pages;
                assert_eq!(self.cache.evict(n % 5), idle.min(n % 5));
                self.seen.evicted += idle.min(n % 5);
            }
            17 => {
                let (idle, windows) = (self.pools[1].books().idle_pages, self.cache.num_windows());
                assert!(self.cache.evict_windows(n % 5) >= idle.min(n % 5), "every idle page can be freed");
                self.seen.evicted_windows += windows - self.cache.num_windows();
            }
            18 if count > 0 => {
                let Running { namespace, tokens, .. } = self.running.swap_remove(i % count);
                self.admit(namespace, tokens);
            }
            19 if random.below(300) == 0 => self.cache.clear(),
            _ => {}
        }
        self.check();
    }

    /// Finds what is cached and takes pages for the rest, of the window group as for a first chunk.
    fn admit(&mut self, namespace: u64, tokens: Vec<u32>) {
        let mut hit = self.cache.lookup(namespace, &tokens);
        let (window, branch) = (std::mem::take(&mut hit.window), hit.branch);
        let mut r = Running {
            namespace,
            computed: 0,
            branch: None,
            full: PageTable::new(&self.pools[0]),
            window: PageTable::with_sinks(&self.pools[1], self.sinks),
            tokens,
        };
        r.computed = r.full.push_hit(hit);
        r.window.push_window(window);
        self.seen.hits += usize::from(r.computed > 0);
        self.seen.whole_hits += usize::from(r.computed > 0 && r.computed + 1 == r.tokens.len());
        self.seen.shortened += usize::from(branch > r.computed);
        r.branch = (branch > r.computed).then_some(branch);
        self.running.push(r);
        let last = self.running.len() - 1;
        let wanted = self.running[last].tokens.len();
        if let Err(short) = self.running[last].full.reserve(wanted) {
            self.cache.evict(short.needed - short.free);
        }
        if self.running[last].full.reserve(wanted).is_err() {
            self.seen.refused += 1;
            self.running.pop();
        }
    }

    /// Writes the next tokens in both groups, after what has to be copied; window pages that no token looks back to go first.
    fn compute(&mut self, i: usize, most: usize) {
        let r = &mut self.running[i];
        let keep = r.branch.map_or(0..0, |b| b.saturating_sub(self.window) / PAGE..b / PAGE);
        let before = r.window.held_ids().count();
        r.window.give_back_before((r.computed + 1).saturating_sub(self.window), keep);
        self.seen.given_back += before - r.window.held_ids().count();
        let end = r.tokens.len().min(r.computed + most);
        if let Err(short) = r.window.reserve(end) {
            self.cache.evict_windows(short.needed - short.free);
        }
        let end = if r.window.reserve(end).is_ok() { end } else { r.window.capacity_tokens().min(end) };
        if end <= r.computed {
            return;
        }
        for (group, table) in [&mut r.full, &mut r.window].into_iter().enumerate() {
            match table.make_writable(r.computed) {
                Ok(None) => {}
                Ok(Some(PageCopy { from, to })) => {
                    self.seen.copies += 1;
                    let at = |page: u32| page as usize * PAGE;
                    self.contents[group].copy_within(at(from.id())..at(from.id() + 1), at(to));
                }
                Err(_) => return,
            }
        }
        for position in r.computed..end {
            self.contents[0][r.full.slot(position) as usize] = r.tokens[position];
            self.contents[1][r.window.slot(position) as usize] = r.tokens[position];
        }
        r.computed = end;
    }

    /// What was just published is found again, to the token.
    fn publish(&mut self, i: usize, priority: i32) {
        let r = &mut self.running[i];
        let done = &r.tokens[..r.computed];
        self.cache.insert(r.namespace, done, r.full.pages(), priority);
        let before = self.cache.num_windows();
        let branch = r.branch.take().filter(|&b| b <= r.computed);
        let ends: Vec<usize> = branch.into_iter().chain([r.computed]).collect();
        self.cache.insert_windows(r.namespace, done, &ends, &r.window, priority);
        self.seen.branches += usize::from(self.cache.num_windows() > before + 1);
        r.window.forget_kept();
        // Where a step that then found no page had given back what the last token alone looks back to, the end itself is found only.
        let whole = r.window.page_at(r.computed.saturating_sub(self.window) / PAGE).is_some();
        if r.computed > 0 && whole {
            let (namespace, done) = (r.namespace, done.to_vec());
            let hit = self.cache.lookup(namespace, &done);
            assert_eq!(hit.tokens(PAGE), done.len() - 1, "published, and not found");
        }
    }

    fn fork(&mut self, i: usize) {
        let r = &self.running[i];
        let (full, window) = (r.full.fork(r.computed), r.window.fork(r.computed));
        let tokens = r.tokens[..r.computed].iter().copied().chain([5, 5, 5]).collect();
        let mut fork =
            Running { namespace: r.namespace, tokens, computed: r.computed, branch: None, full, window };
        if fork.full.reserve(fork.tokens.len()).is_ok() {
            self.running.push(fork);
        }
    }

    fn check(&self) {
        for (group, pool) in Group::ALL.into_iter().zip(&self.pools) {
            let table = |r: &Running| -> Vec<u32> {
                if group == Group::Full { r.full.held_ids().collect() } else { r.window.held_ids().collect() }
            };
            let cached: Vec<u32> = match group {
                Group::Full => self.cache.ids().collect(),
                Group::Window => self.cache.window_ids().collect(),
            };
            pool.check_holders(self.running.iter().flat_map(table).chain(cached)).unwrap();
            pool.books().check().unwrap();
        }
        self.cache.check().unwrap();
        for r in &self.running {
            for position in 0..r.computed {
                assert_eq!(self.contents[0][r.full.slot(position) as usize], r.tokens[position]);
            }
            let first = (r.computed + 1).saturating_sub(self.window);
            for position in (0..first.min(self.sinks * PAGE)).chain(first..r.computed) {
                let held = self.contents[1][r.window.slot(position) as usize];
                assert_eq!(held, r.tokens[position], "window position {position} of {}", r.computed);
            }
        }
    }

    fn finish(mut self) {
        self.running.clear();
        self.cache.evict_windows(usize::MAX);
        // A window of one token needs no page where a page begins; such units go with the tokens they end in.
        assert!(self.window == 1 && self.sinks == 0 || self.cache.num_windows() == 0);
        self.cache.evict(usize::MAX);
        assert_eq!(self.cache.num_windows(), 0);
        for pool in &self.pools {
            assert_eq!(pool.num_free(), pool.num_pages());
            pool.check_holders([]).unwrap();
        }
        self.cache.check().unwrap();
    }
}

/// 300,000 operations by default; SUANPAN_CACHE_OPS asks for another number.
#[test]
fn long_run_of_random_operations_on_windows_leaks_nothing_and_finds_what_was_published() {
    let ops = std::env::var("SUANPAN_CACHE_OPS").ok().and_then(|s| s.parse().ok()).unwrap_or(300_000usize);
    let mut random = Random(3);
    for (policy, window) in EvictionPolicy::ALL.into_iter().zip([(5, 0), (1, 2), (9, 1)]) {
        let mut world = World::new(30, 24, window, policy);
        (0..ops / 3).for_each(|_| world.apply(&mut random));
        let s = &world.seen;
        let common =
            [s.hits, s.whole_hits, s.shortened, s.copies, s.given_back, s.evicted, s.evicted_windows];
        assert!(common.iter().all(|&n| n > ops / 3000) && s.branches > 0 && s.refused > 0, "{s:?}");
        world.finish();
    }
}
