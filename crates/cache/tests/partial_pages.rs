//! Pages of which a sequence has only the first tokens: lent by hits and forks, copied on write, kept by rank.

use suanpan_cache::{EvictionPolicy, PagePool, PageTable, PrefixCache};

const PAGE: usize = 16;

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| seed * 1_000_000 + i).collect()
}

fn table(pool: &PagePool, tokens: usize) -> PageTable {
    let mut table = PageTable::new(pool);
    table.reserve(tokens).unwrap();
    table
}

fn cache(num_pages: usize, policy: EvictionPolicy) -> (PagePool, PrefixCache) {
    let pool = PagePool::new(num_pages, PAGE).unwrap();
    (pool.clone(), PrefixCache::new(pool, true, policy))
}

/// The same prompt again: everything but its last token is there, wherever it ends in a page.
#[test]
fn a_prompt_sent_again_computes_one_token() {
    for len in [2, 15, 16, 17, 31, 32, 33, 40] {
        let (pool, mut cache) = cache(8, EvictionPolicy::Lru);
        let tokens = prompt(1, len);
        let first = table(&pool, len);
        assert_eq!(cache.insert(0, &tokens, first.pages(), 0), len.div_ceil(PAGE));
        let mut second = PageTable::new(&pool);
        assert_eq!(second.push_hit(cache.lookup(0, &tokens)), len - 1, "{len} tokens");
        second.reserve(len).unwrap();
        let copy = second.make_writable(len - 1).unwrap();
        // Position len - 1 begins a page of its own where the hit ends with one.
        assert_eq!(copy.is_some(), (len - 1) % PAGE != 0);
        if let Some(copy) = &copy {
            assert_eq!(
                (copy.from.id(), copy.to),
                (first.ids()[(len - 1) / PAGE], second.ids()[(len - 1) / PAGE])
            );
        }
        drop(copy);
        assert_eq!(cache.insert(0, &tokens, second.pages(), 0), 0);
        drop((first, second));
        assert_eq!(pool.books().idle_pages, len.div_ceil(PAGE), "the copy went back");
        cache.check().unwrap();
    }
}

/// Two prompts that part inside a page share what lies before.
#[test]
fn a_hit_ends_inside_a_page_where_prompts_part() {
    let (pool, mut cache) = cache(8, EvictionPolicy::Lru);
    let a = prompt(1, 48);
    let held = table(&pool, 48);
    cache.insert(0, &a, held.pages(), 0);
    for at in [3, 16, 20, 31, 47] {
        let mut b = a.clone();
        b[at] = 7;
        let hit = cache.lookup(0, &b);
        assert_eq!((hit.pages.len(), hit.tokens(PAGE)), (at / PAGE, at));
        if let Some(partial) = hit.partial {
            assert_eq!((partial.page.id(), partial.tokens), (held.ids()[at / PAGE], at % PAGE));
        }
    }
    assert!(cache.lookup(1, &a).is_empty(), "another namespace");
}

/// A page published when it was begun stands for more tokens as its owner fills it, and is never held twice.
#[test]
fn a_begun_page_grows_in_place() {
    let (pool, mut cache) = cache(4, EvictionPolicy::Lru);
    let tokens = prompt(1, 40);
    let mut owner = table(&pool, 20);
    assert_eq!(cache.insert(0, &tokens[..20], owner.pages(), 0), 2);
    let borrower = owner.fork(20);
    assert!(owner.make_writable(20).unwrap().is_none(), "the owner appends where it is");
    owner.reserve(40).unwrap();
    assert_eq!(cache.insert(0, &tokens[..25], owner.pages(), 0), 0);
    assert_eq!(cache.insert(0, &tokens, owner.pages(), 0), 1);
    assert_eq!((cache.cached_pages(), cache.lookup(0, &prompt(1, 41)).tokens(PAGE)), (3, 40));
    cache.check().unwrap();
    assert!(borrower.is_borrowed(1) && borrower.ids() == &owner.ids()[..2]);
    drop((owner, borrower));
    assert_eq!(cache.evict(usize::MAX), 3);
    assert_eq!(pool.num_free(), 4);
}

/// A fuller page of another request takes the place of one that is only begun.
#[test]
fn a_fuller_page_replaces_a_begun_one() {
    let (pool, mut cache) = cache(8, EvictionPolicy::Lru);
    let tokens = prompt(1, 32);
    let (short, long) = (table(&pool, 20), table(&pool, 32));
    cache.insert(0, &tokens[..20], short.pages(), 0);
    assert_eq!(cache.insert(0, &tokens, long.pages(), 0), 1);
    assert_eq!(cache.cached_pages(), 2);
    assert_eq!(cache.insert(0, &tokens[..20], short.pages(), 0), 0, "it is covered");
    drop((short, long));
    assert_eq!((pool.num_free(), cache.lookup(0, &prompt(1, 33)).tokens(PAGE)), (6, 32));
    cache.check().unwrap();
}

/// C22: four branches of a 20-token prompt store its full page once; the partial one is copied by all but its owner, on write.
#[test]
fn c22_branches_never_write_one_page_together() {
    let pool = PagePool::new(16, PAGE).unwrap();
    let mut owner = table(&pool, 20);
    let mut branches: Vec<_> = (0..3).map(|_| owner.fork(20)).collect();
    assert_eq!(pool.books().active_pages, 2, "nothing is copied before it is written");
    let begun = owner.ids()[1];
    assert!(owner.make_writable(20).unwrap().is_none());
    for (i, branch) in branches.iter_mut().enumerate() {
        let copy = branch.make_writable(20).unwrap().expect("others rely on the page");
        assert_eq!(copy.from.id(), begun);
        assert_ne!(branch.ids()[1], begun);
        drop(copy);
        assert!(branch.make_writable(21).unwrap().is_none(), "once");
        assert_eq!(pool.books().active_pages, 3 + i);
    }
    let mut last = branches.pop().unwrap().fork(20);
    drop(owner);
    assert!(last.make_writable(20).unwrap().is_none(), "nobody else is left: no copy");
    drop((branches, last));
    assert_eq!(pool.num_free(), 16);
}

#[test]
fn a_copy_without_a_free_page_changes_nothing() {
    let pool = PagePool::new(2, PAGE).unwrap();
    let owner = table(&pool, 20);
    let mut branch = owner.fork(20);
    assert_eq!(branch.make_writable(20).unwrap_err().needed, 1);
    assert_eq!(branch.ids(), owner.ids());
    drop(owner);
    assert!(branch.make_writable(20).unwrap().is_none());
}

fn leaf_of_each(policy: EvictionPolicy, priorities: [i32; 3], lookups: &[u32]) -> [usize; 3] {
    let (pool, mut cache) = cache(6, policy);
    for seed in 0..3u32 {
        let held = table(&pool, 32);
        cache.insert(0, &prompt(seed, 32), held.pages(), priorities[seed as usize]);
    }
    for &seed in lookups {
        assert_eq!(cache.lookup(0, &prompt(seed, 33)).pages.len(), 2);
    }
    assert_eq!(cache.evict(3), 3);
    cache.check().unwrap();
    [0, 1, 2].map(|seed| cache.lookup(0, &prompt(seed, 33)).pages.len())
}

#[test]
fn each_policy_evicts_what_it_ranks_lowest() {
    let lookups = [0, 0, 0, 1, 1, 2];
    assert_eq!(leaf_of_each(EvictionPolicy::Lru, [0; 3], &lookups), [0, 1, 2]);
    assert_eq!(leaf_of_each(EvictionPolicy::Lfu, [0; 3], &lookups), [2, 1, 0]);
    assert_eq!(leaf_of_each(EvictionPolicy::Priority, [3, -1, 3], &lookups), [1, 0, 2]);
    assert!("fifo".parse::<EvictionPolicy>().unwrap_err().to_string().contains("lru, lfu, priority"));
}
