//! Page ownership from outside: refusals, reuse order, sharing, and many threads at once.

use std::sync::Barrier;
use std::thread;

use suanpan_cache::{OutOfPages, PageHandle, PagePool, PageTable, PrefixCache};

fn assert_send_sync<T: Send + Sync>() {}

#[test]
fn pool_and_handles_cross_threads() {
    assert_send_sync::<PagePool>();
    assert_send_sync::<PageHandle>();
    assert_send_sync::<PageTable>();
    assert_send_sync::<PrefixCache>();
}

#[test]
fn impossible_pools_are_refused_by_field() {
    let field = |pages, size| PagePool::new(pages, size).unwrap_err().field;
    assert_eq!(field(0, 16), "num_pages");
    assert_eq!(field(4, 0), "page_size");
    assert_eq!(field(1 << 33, 16), "num_pages");
    assert_eq!(field(1 << 31, 1 << 33), "num_pages * page_size");
}

#[test]
fn the_last_reference_returns_the_page_and_it_is_the_next_to_be_reused() {
    let pool = PagePool::new(3, 16).unwrap();
    let first = pool.alloc().unwrap();
    let second = first.share();
    assert_eq!((first.id(), second.id(), first.refcount()), (0, 0, 2));
    drop(first);
    assert_eq!((pool.num_free(), second.refcount()), (2, 1));
    let other = pool.alloc().unwrap();
    assert_eq!(other.id(), 1);
    drop(second);
    assert_eq!(pool.alloc().unwrap().id(), 0);
    assert_eq!(pool.check(), Ok(()));
}

#[test]
fn reserving_is_all_or_nothing_and_says_what_is_missing() {
    let pool = PagePool::new(4, 16).unwrap();
    let mut table = PageTable::new(&pool);
    table.reserve(17).unwrap();
    assert_eq!((table.ids(), table.capacity_tokens()), ([0, 1].as_slice(), 32));
    assert_eq!(table.reserve(65), Err(OutOfPages { needed: 3, free: 2 }));
    assert_eq!((table.ids().len(), pool.num_free()), (2, 2));
    table.reserve(32).unwrap();
    table.reserve(64).unwrap();
    assert_eq!(table.ids(), [0, 1, 2, 3]);
    table.truncate_to(32);
    assert_eq!((table.ids(), pool.num_free()), ([0, 1].as_slice(), 2));
    drop(table);
    let mut again = PageTable::new(&pool);
    again.reserve(64).unwrap();
    assert_eq!(again.ids(), [0, 1, 2, 3], "pages come back in the order in which they were held");
}

#[test]
#[should_panic(expected = "position 32 of 32 reserved tokens")]
fn a_position_at_the_page_boundary_past_the_table_has_no_slot() {
    let pool = PagePool::new(4, 16).unwrap();
    let mut table = PageTable::new(&pool);
    table.reserve(32).unwrap();
    assert_eq!(table.slot(31), 31);
    table.slot(32);
}

#[test]
#[should_panic(expected = "pages of its own pool")]
fn a_page_of_another_pool_is_not_taken() {
    let (a, b) = (PagePool::new(1, 16).unwrap(), PagePool::new(1, 16).unwrap());
    PageTable::new(&a).push_shared(b.alloc().unwrap());
}

/// Threads take, share, pass on and drop pages while another one checks the whole balance again and again.
#[test]
fn threads_hammering_one_pool_never_unbalance_it() {
    const THREADS: usize = 4;
    let pool = PagePool::new(32, 16).unwrap();
    let barrier = Barrier::new(THREADS + 1);
    let hammer = |seed: usize| {
        let (mut held, mut tables) = (Vec::new(), Vec::new());
        barrier.wait();
        let mut x = (seed as u32).wrapping_mul(2_654_435_761);
        for _ in 0..20_000 {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            match x % 6 {
                0 => held.extend(pool.alloc()),
                1 if !held.is_empty() && held.len() < 16 => {
                    let share = held[x as usize / 8 % held.len()].share();
                    held.push(share);
                }
                2 if !held.is_empty() => drop(held.swap_remove(x as usize / 8 % held.len())),
                3 => {
                    let mut table = PageTable::new(&pool);
                    if table.reserve(x as usize / 8 % 64).is_ok() {
                        tables.push(table);
                    }
                }
                4 if !tables.is_empty() => drop(tables.swap_remove(x as usize / 8 % tables.len())),
                5 if !tables.is_empty() && held.len() < 16 => {
                    let table = &tables[x as usize / 8 % tables.len()];
                    held.extend(table.pages().first().map(PageHandle::share));
                }
                _ => held.truncate(12),
            }
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS).map(|t| scope.spawn(move || hammer(t + 1))).collect();
        barrier.wait();
        while !workers.iter().all(|w| w.is_finished()) {
            pool.check().unwrap();
            pool.books().check().unwrap();
        }
    });
    assert_eq!(pool.num_free(), 32);
    pool.check_holders([]).unwrap();
}
