//! The prefix cache by its symptoms: what would go wrong, and does not.

use suanpan_cache::{EvictionPolicy, PageHandle, PagePool, PageTable, PrefixCache};

const PAGE: usize = 16;

fn cache(num_pages: usize) -> (PagePool, PrefixCache) {
    let pool = PagePool::new(num_pages, PAGE).unwrap();
    let cache = PrefixCache::new(pool.clone(), true, EvictionPolicy::Lru);
    (pool, cache)
}

/// Tokens that differ from those of every other `seed`, from the first page on.
fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| seed * 1_000_000 + i).collect()
}

/// Runs a prompt to its end: looks up, computes the rest, publishes. None where it has to wait for pages. Returns the
/// table and the number of cached tokens.
fn run(pool: &PagePool, cache: &mut PrefixCache, tokens: &[u32]) -> Option<(PageTable, usize)> {
    let mut table = PageTable::new(pool);
    let cached = table.push_hit(cache.lookup(0, tokens));
    if let Err(short) = table.reserve(tokens.len()) {
        cache.evict(short.needed - short.free);
        table.reserve(tokens.len()).ok()?;
    }
    cache.insert(0, tokens, table.pages(), 0);
    pool.check().unwrap();
    cache.check().unwrap();
    Some((table, cached))
}

fn balanced(pool: &PagePool, cache: &PrefixCache, tables: &[&PageTable]) {
    let held = tables.iter().flat_map(|t| t.ids().iter().copied());
    pool.check_holders(held.chain(cache.ids())).unwrap();
    cache.check().unwrap();
    pool.books().check().unwrap();
}

fn ids(pages: &[PageHandle]) -> Vec<u32> {
    pages.iter().map(PageHandle::id).collect()
}

#[test]
fn one_token_is_always_left_to_compute() {
    let (pool, mut cache) = cache(8);
    let tokens = prompt(1, 48);
    drop(run(&pool, &mut cache, &tokens));
    assert_eq!(cache.lookup(0, &tokens).pages.len(), 2, "a whole hit would leave no token for logits");
    assert_eq!(cache.lookup(0, &[&tokens[..], &[7]].concat()).pages.len(), 3);
    assert_eq!(cache.lookup(0, &tokens[..17]).pages.len(), 1);
    assert_eq!(cache.lookup(0, &tokens[..16]).pages.len(), 0);
    assert_eq!(cache.lookup(0, &[]).pages.len(), 0);
}

#[test]
fn one_tenant_never_sees_the_pages_of_another() {
    let (pool, mut cache) = cache(8);
    let tokens = prompt(1, 33);
    let mut table = PageTable::new(&pool);
    table.reserve(33).unwrap();
    assert_eq!(cache.insert(7, &tokens, table.pages(), 0), 3);
    assert!(cache.lookup(8, &tokens).is_empty());
    assert_eq!(ids(&cache.lookup(7, &tokens).pages), table.ids()[..2]);
    assert_eq!(cache.insert(8, &tokens, table.pages(), 0), 0, "a page is published under one prefix only");
    assert!(cache.lookup(8, &tokens).is_empty());
}

#[test]
fn tokens_that_are_not_computed_are_not_published() {
    let (pool, mut cache) = cache(8);
    let mut table = PageTable::new(&pool);
    table.reserve(64).unwrap();
    assert_eq!(cache.insert(0, &prompt(1, 31), table.pages(), 0), 2);
    assert_eq!(cache.lookup(0, &prompt(1, 64)).tokens(PAGE), 31);
}

#[test]
fn duplicates_keep_the_page_that_was_there_first() {
    let (pool, mut cache) = cache(8);
    let tokens = prompt(1, 48);
    let (mut first, mut second) = (PageTable::new(&pool), PageTable::new(&pool));
    first.reserve(48).unwrap();
    second.reserve(48).unwrap();
    assert_eq!(cache.insert(0, &tokens[..32], first.pages(), 0), 2);
    assert_eq!(cache.insert(0, &tokens, second.pages(), 0), 1);
    let hit = cache.lookup(0, &prompt(1, 49));
    assert_eq!(ids(&hit.pages), [first.ids()[0], first.ids()[1], second.ids()[2]]);
    drop((hit, first, second));
    assert_eq!((cache.cached_pages(), pool.num_free()), (3, 5));
    balanced(&pool, &cache, &[]);
}

#[test]
fn a_switched_off_cache_keeps_nothing() {
    let pool = PagePool::new(4, PAGE).unwrap();
    let mut cache = PrefixCache::new(pool.clone(), false, EvictionPolicy::Lru);
    assert!(!cache.is_enabled());
    drop(run(&pool, &mut cache, &prompt(1, 48)));
    assert_eq!((cache.lookup(0, &prompt(1, 48)).pages.len(), pool.num_free()), (0, 4));
}

/// C17: the pages of a looked-up prefix must not be handed to another request of the same tick.
#[test]
fn c17_a_looked_up_page_is_not_taken_before_it_is_pinned() {
    for round in 0..200u32 {
        let (pool, mut cache) = cache(8);
        let prefix = prompt(1, 64);
        drop(run(&pool, &mut cache, &prefix));
        assert_eq!((pool.num_free(), cache.evictable_pages()), (4, 4));
        let a = [&prefix[..], &prompt(2, 16)].concat();
        let b = prompt(3, 80);
        let prefix_ids = ids(&cache.lookup(0, &prompt(1, 65)).pages);
        let order: [&[u32]; 2] = if round % 2 == 0 { [&a, &b] } else { [&b, &a] };
        let running: Vec<_> = order.map(|tokens| run(&pool, &mut cache, tokens)).into();
        // A needs one page beside its four, B five of the eight: both never fit at once, so the second waits.
        assert_eq!(running.iter().flatten().count(), 1);
        for (table, tokens) in running.iter().zip(order) {
            let Some((table, cached)) = table else { continue };
            let mut all = table.ids().to_vec();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), 5, "no page twice in one table");
            if tokens == a {
                assert_eq!((*cached, &table.ids()[..4]), (64, &prefix_ids[..]), "A reads its own prefix");
            }
        }
        let tables: Vec<_> = running.iter().flatten().map(|(t, _)| t).collect();
        balanced(&pool, &cache, &tables);
    }
}

/// C19: when the head of a prefix is gone, nothing behind it counts as a hit, and its page resolves to nobody.
#[test]
fn c19_a_hit_is_never_counted_past_an_evicted_page() {
    let (pool, mut cache) = cache(6);
    let tokens = prompt(1, 48);
    let (table, cached) = run(&pool, &mut cache, &tokens).unwrap();
    let [a, b, c] = table.ids().try_into().unwrap();
    assert_eq!(cached, 0);
    drop(table);
    // Only ends go: evicting one page takes c, and the hit ends where the tree does.
    assert_eq!(cache.evict(1), 1);
    assert_eq!(pool.alloc().unwrap().id(), c);
    assert_eq!(ids(&cache.lookup(0, &prompt(1, 49)).pages), [a, b]);
    // a can only go when b is gone.
    assert_eq!(cache.evict(2), 2);
    assert_eq!(cache.lookup(0, &tokens).pages.len(), 0);
    // Another prefix now lives in a's page.
    let (other, cached) = run(&pool, &mut cache, &prompt(2, 48)).unwrap();
    assert!(cached == 0 && other.ids().contains(&a));
    let (again, cached) = run(&pool, &mut cache, &tokens).unwrap();
    assert_eq!(cached, 0, "the old prefix no longer resolves");
    balanced(&pool, &cache, &[&other, &again]);
}

/// C19, with somebody holding the tail only: the head may not be freed and leave the tail behind it reachable.
#[test]
fn c19_evicting_above_a_held_page_forgets_the_held_page() {
    let (pool, mut cache) = cache(6);
    drop(run(&pool, &mut cache, &prompt(1, 48)));
    let tail = cache.lookup(0, &prompt(1, 49)).pages.pop().unwrap();
    assert_eq!(cache.evictable_pages(), 2);
    assert_eq!(cache.evict(usize::MAX), 2);
    assert_eq!((cache.cached_pages(), cache.lookup(0, &prompt(1, 49)).pages.len()), (0, 0));
    pool.check_holders([tail.id()]).unwrap();
    cache.check().unwrap();
}

/// C20: an aborted prefill leaves complete pages as hits, no page in filling, and no leak; 50 rounds in a small pool.
#[test]
fn c20_abort_in_a_chunked_prefill_returns_everything() {
    let (pool, mut cache) = cache(40);
    let (prompt_a, chunk) = (prompt(1, 400), 64);
    let mut other = PageTable::new(&pool);
    for round in 0..50 {
        other.reserve(round % 48 + 1).unwrap();
        let mut table = PageTable::new(&pool);
        let mut computed = table.push_hit(cache.lookup(0, &prompt_a));
        // Two chunks, reserved as they come; the client leaves in the middle of the third.
        for _ in 0..2 {
            let end = (computed + chunk + 5).min(prompt_a.len());
            if let Err(short) = table.reserve(end) {
                cache.evict(short.needed - short.free);
                table.reserve(end).unwrap();
            }
            computed = end;
            cache.insert(0, &prompt_a[..computed], table.pages(), 0);
            balanced(&pool, &cache, &[&table, &other]);
        }
        drop(table);
        let hit = cache.lookup(0, &prompt_a).pages.len() * PAGE;
        assert_eq!(hit, (computed / PAGE * PAGE).min((prompt_a.len() - 1) / PAGE * PAGE));
        balanced(&pool, &cache, &[&other]);
        if round % 7 == 6 {
            cache.evict(usize::MAX);
            other.truncate_to(0);
            assert_eq!(pool.num_free(), 40);
        }
    }
}

#[test]
fn the_least_recently_used_prefix_goes_first_and_shared_heads_last() {
    let (pool, mut cache) = cache(16);
    let head = prompt(9, 32);
    let branch = |n: u32| [&head[..], &prompt(n, 16)].concat();
    for n in 1..=3 {
        drop(run(&pool, &mut cache, &branch(n)));
    }
    assert_eq!(cache.cached_pages(), 5);
    let found =
        |cache: &mut PrefixCache, n: u32| cache.lookup(0, &[&branch(n)[..], &[0]].concat()).pages.len();
    assert_eq!(found(&mut cache, 1), 3);
    assert_eq!(cache.evict(1), 1);
    let hits = [1, 2, 3].map(|n| found(&mut cache, n));
    assert_eq!(hits, [3, 2, 3], "2 was used least recently; the head stays for the others");
    assert_eq!(cache.evict(2), 2);
    assert_eq!([1, 2, 3].map(|n| found(&mut cache, n)), [2, 2, 2]);
    assert_eq!(cache.evict(usize::MAX), 2);
    assert_eq!(pool.num_free(), 16);
}

#[test]
fn clearing_frees_idle_pages_and_leaves_held_ones_to_their_holders() {
    let (pool, mut cache) = cache(8);
    drop(run(&pool, &mut cache, &prompt(1, 48)));
    let (table, _) = run(&pool, &mut cache, &prompt(2, 48)).unwrap();
    cache.clear();
    assert_eq!((pool.num_free(), cache.cached_pages()), (5, 0));
    balanced(&pool, &cache, &[&table]);
    assert_eq!(cache.insert(0, &prompt(2, 48), table.pages(), 0), 3, "and they can be published again");
}
