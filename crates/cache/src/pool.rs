//! Who holds which page: a fixed set of page records, reference counts as move-only handles, an O(1) free list.
//!
//! Does not know what a page stores (`storage`) or which tokens it stands for (`radix`).
//!
//! One mutex guards all records. A scheduler takes pages in bulk (one lock for a whole prompt), so an uncontended lock
//! is cheaper than per-page atomics, and every check sees one consistent instant.
//!
//! Freed pages are reused last in, first out. The pages in use therefore stay the few that were touched before: the
//! storage behind them is resident already and still in the CPU's caches, while a queue would walk through, and make
//! resident, the whole arena. A page that someone still reads after giving it back is also overwritten soonest, so such
//! a fault shows in tests instead of hiding until the queue comes round.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use suanpan_base::BadArgument;
use suanpan_base::error::checked_product;

use crate::books::CacheBooks;

/// Set in a page record while the prefix cache holds the page.
const CACHED: u32 = 1 << 31;
/// The references of a page record.
const COUNT: u32 = CACHED - 1;
/// Never a page: the id of a handle whose reference went back in bulk, and what a kernel can be given as an id that it
/// must not follow.
pub const NO_PAGE: u32 = u32::MAX;

/// Books that do not balance: which page or counter is at fault, what is recorded and what was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Imbalance {
    /// A page lies in the free list while somebody holds it.
    #[error("page {page} is free and has {references} references")]
    FreePageHeld {
        /// The page.
        page: u32,
        /// Its recorded references.
        references: u32,
    },
    /// A page lies in the free list twice.
    #[error("page {page} is in the free list twice")]
    FreeTwice {
        /// The page.
        page: u32,
    },
    /// A page that nobody holds is not in the free list.
    #[error("page {page} has no references and is not free")]
    Lost {
        /// The page.
        page: u32,
    },
    /// An id that is not of this pool.
    #[error("page {page} is not one of the pool's {num_pages} pages")]
    Unknown {
        /// The id.
        page: u32,
        /// Pages of the pool.
        num_pages: usize,
    },
    /// Recorded references differ from the holders that were found.
    #[error("page {page} has {recorded} references recorded and {found} holders found")]
    References {
        /// The page.
        page: u32,
        /// References in the page's record.
        recorded: u32,
        /// Holders found.
        found: u32,
    },
    /// A running counter differs from what the records add up to.
    #[error("counter {counter} says {kept}, the records add up to {recomputed}")]
    Counter {
        /// The counter's name.
        counter: &'static str,
        /// The counter.
        kept: usize,
        /// The sum over the records.
        recomputed: usize,
    },
    /// The prefix tree contradicts itself.
    #[error("prefix tree: node {node}: {fault}")]
    Tree {
        /// The tree's node.
        node: u32,
        /// What does not hold.
        fault: &'static str,
    },
}

/// All records of a pool; every number below is exact whenever the lock is free.
struct State {
    /// A page's references, with `CACHED` set while the prefix cache holds one of them.
    records: Vec<u32>,
    /// Pages nobody holds; the top is handed out next.
    free: Vec<u32>,
    /// Pages with at least one reference.
    held: usize,
    /// Pages with `CACHED` set.
    cached: usize,
    /// Pages whose one reference is the prefix cache's.
    idle: usize,
}

struct Shared {
    page_size: usize,
    num_pages: usize,
    state: Mutex<State>,
}

/// A fixed set of pages. Clones are the same pool; it may be used from any thread.
#[derive(Clone)]
pub struct PagePool(Arc<Shared>);

/// One reference to one page. Moves, never copies: a second reference is made by `share` and by nothing else, and the
/// page returns to the pool when its last handle is dropped. Giving a page back twice cannot be written.
pub struct PageHandle {
    pool: PagePool,
    id: u32,
}

/// The prefix cache's reference to a page; at most one a page.
pub(crate) struct CachedPage(PageHandle);

impl PagePool {
    /// A pool of `num_pages` free pages of `page_size` tokens. Refused: zero sizes, ids past 32 bits, records that do
    /// not fit in memory.
    pub fn new(num_pages: usize, page_size: usize) -> Result<PagePool, BadArgument> {
        const OP: &str = "page pool";
        if page_size == 0 {
            return Err(BadArgument::new(OP, "page_size", page_size, "at least 1 token"));
        }
        let max_pages = NO_PAGE as usize;
        if num_pages == 0 || num_pages > max_pages {
            return Err(BadArgument::new(OP, "num_pages", num_pages, format!("1 ..= {max_pages}")));
        }
        checked_product(OP, "num_pages * page_size", &[num_pages, page_size])?;
        let (mut records, mut free) = (Vec::new(), Vec::new());
        let room = records.try_reserve_exact(num_pages).and_then(|()| free.try_reserve_exact(num_pages));
        if room.is_err() {
            let asked = format!("{num_pages} ({} bytes of records)", num_pages as u64 * 8);
            return Err(BadArgument::new(OP, "num_pages", asked, "records that fit in free memory"));
        }
        records.resize(num_pages, 0);
        // Page 0 on top: a fresh pool hands out rising, adjacent pages.
        free.extend((0..num_pages as u32).rev());
        let state = Mutex::new(State { records, free, held: 0, cached: 0, idle: 0 });
        Ok(PagePool(Arc::new(Shared { page_size, num_pages, state })))
    }

    /// Takes one free page, or None when there is none.
    pub fn alloc(&self) -> Option<PageHandle> {
        let id = self.lock().take()?;
        Some(PageHandle { pool: self.clone(), id })
    }

    /// Takes `count` free pages under one lock and appends them to `out`: all of them, or none and the number free.
    pub(crate) fn alloc_into(&self, count: usize, out: &mut Vec<PageHandle>) -> Result<(), usize> {
        let mut state = self.lock();
        if state.free.len() < count {
            return Err(state.free.len());
        }
        out.reserve(count);
        let ids = (0..count).map_while(|_| state.take());
        out.extend(ids.map(|id| PageHandle { pool: self.clone(), id }));
        Ok(())
    }

    /// Appends one more reference to each page of `pages` to `out`, under one lock.
    pub(crate) fn share_into<'a>(
        &self,
        pages: impl Iterator<Item = &'a CachedPage>,
        out: &mut Vec<PageHandle>,
    ) {
        let mut state = self.lock();
        for page in pages {
            state.add(page.0.id);
            out.push(PageHandle { pool: self.clone(), id: page.0.id });
        }
    }

    /// Gives back many references under one lock. The first page given ends on top of the free list, so that the next
    /// holder gets the pages in the order in which they were held.
    pub(crate) fn release(&self, pages: impl DoubleEndedIterator<Item = PageHandle>) {
        let mut state = self.lock();
        for mut page in pages.rev() {
            state.release(std::mem::replace(&mut page.id, NO_PAGE));
        }
    }

    /// Pages nobody holds.
    pub fn num_free(&self) -> usize {
        self.lock().free.len()
    }

    /// Pages of the pool.
    pub fn num_pages(&self) -> usize {
        self.0.num_pages
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.0.page_size
    }

    /// Whether `other` is this very pool.
    pub fn is_same(&self, other: &PagePool) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Page counts by holder, in O(1): the numbers to report, and to test after each step (`CacheBooks::check`).
    pub fn books(&self) -> CacheBooks {
        let state = self.lock();
        CacheBooks {
            page_size: self.0.page_size,
            total_pages: self.0.num_pages,
            free_pages: state.free.len(),
            active_pages: state.held - state.idle,
            idle_pages: state.idle,
            cached_pages: state.cached,
        }
    }

    /// Recomputes the whole balance from the records, in O(pages): each page is free exactly once or held by at least
    /// one reference, and every running counter equals its sum.
    pub fn check(&self) -> Result<(), Imbalance> {
        self.lock().check(self.0.num_pages)
    }

    /// `check`, and each page's references equal the times its id occurs in `holders` (every handle that exists).
    pub fn check_holders(&self, holders: impl IntoIterator<Item = u32>) -> Result<(), Imbalance> {
        let num_pages = self.0.num_pages;
        let mut found = vec![0u32; num_pages];
        for page in holders {
            *found.get_mut(page as usize).ok_or(Imbalance::Unknown { page, num_pages })? += 1;
        }
        let state = self.lock();
        state.check(num_pages)?;
        for (page, (&record, &found)) in state.records.iter().zip(&found).enumerate() {
            let (page, recorded) = (page as u32, record & COUNT);
            if recorded != found {
                return Err(Imbalance::References { page, recorded, found });
            }
        }
        Ok(())
    }

    /// How many pages at the end of `pages` only the prefix cache holds, counted up to `max`.
    pub(crate) fn idle_suffix(&self, pages: &[CachedPage], max: usize) -> usize {
        let state = self.lock();
        pages.iter().rev().take(max).take_while(|p| state.is_idle(p.0.id)).count()
    }

    /// How many pages at the end of `pages` somebody besides the prefix cache holds.
    pub(crate) fn busy_suffix(&self, pages: &[CachedPage]) -> usize {
        let state = self.lock();
        pages.iter().rev().take_while(|p| !state.is_idle(p.0.id)).count()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave a record half written: each change below asserts first and then only assigns.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_idle(&self, id: u32) -> bool {
        self.records[id as usize] == CACHED | 1
    }

    fn take(&mut self) -> Option<u32> {
        let id = self.free.pop()?;
        debug_assert_eq!(self.records[id as usize], 0, "page {id} was free");
        self.records[id as usize] = 1;
        self.held += 1;
        Some(id)
    }

    fn add(&mut self, id: u32) {
        let record = self.records[id as usize];
        // Only handles leaked on purpose (mem::forget) can come this far; wrapping would free a page in use.
        assert!(record & COUNT < COUNT, "page {id} has too many references");
        self.idle -= usize::from(self.is_idle(id));
        self.records[id as usize] = record + 1;
    }

    fn release(&mut self, id: u32) {
        let record = self.records[id as usize];
        assert!(record & COUNT >= 1, "page {id} is given back while free");
        self.records[id as usize] = record - 1;
        if record == 1 {
            self.held -= 1;
            self.free.push(id);
        }
        self.idle += usize::from(self.is_idle(id));
    }

    fn check(&self, num_pages: usize) -> Result<(), Imbalance> {
        let mut in_free = vec![false; num_pages];
        for &page in &self.free {
            match in_free.get_mut(page as usize) {
                None => return Err(Imbalance::Unknown { page, num_pages }),
                Some(seen) if *seen => return Err(Imbalance::FreeTwice { page }),
                Some(seen) => *seen = true,
            }
        }
        let (mut held, mut cached, mut idle) = (0, 0, 0);
        for (page, (&record, &is_free)) in self.records.iter().zip(&in_free).enumerate() {
            let page = page as u32;
            match (record & COUNT, is_free) {
                (0, false) => return Err(Imbalance::Lost { page }),
                (references, true) if record != 0 => {
                    return Err(Imbalance::FreePageHeld { page, references });
                }
                _ => {}
            }
            held += usize::from(record != 0);
            cached += usize::from(record & CACHED != 0);
            idle += usize::from(record == CACHED | 1);
        }
        for (counter, kept, recomputed) in [
            ("free_pages", self.free.len(), num_pages - held),
            ("held_pages", self.held, held),
            ("cached_pages", self.cached, cached),
            ("idle_pages", self.idle, idle),
        ] {
            if kept != recomputed {
                return Err(Imbalance::Counter { counter, kept, recomputed });
            }
        }
        Ok(())
    }
}

impl PageHandle {
    /// The page's id, below `num_pages`.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// A second reference to the same page.
    pub fn share(&self) -> PageHandle {
        self.pool.lock().add(self.id);
        PageHandle { pool: self.pool.clone(), id: self.id }
    }

    /// References to the page, this one included.
    pub fn refcount(&self) -> u32 {
        self.pool.lock().records[self.id as usize] & COUNT
    }

    /// The pool the page is of.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// The prefix cache's own reference. None when the cache has one already: a page stands for one prefix only.
    pub(crate) fn publish(&self) -> Option<CachedPage> {
        let mut state = self.pool.lock();
        if state.records[self.id as usize] & CACHED != 0 {
            return None;
        }
        state.add(self.id);
        state.records[self.id as usize] |= CACHED;
        state.cached += 1;
        Some(CachedPage(PageHandle { pool: self.pool.clone(), id: self.id }))
    }
}

impl Drop for PageHandle {
    fn drop(&mut self) {
        if self.id != NO_PAGE {
            self.pool.lock().release(self.id);
        }
    }
}

impl CachedPage {
    /// The page's id.
    pub(crate) fn id(&self) -> u32 {
        self.0.id
    }

    /// A reference for somebody else.
    pub(crate) fn share(&self) -> PageHandle {
        self.0.share()
    }
}

impl Drop for CachedPage {
    fn drop(&mut self) {
        // The reference itself goes with the inner handle, right after this.
        let mut state = self.0.pool.lock();
        state.idle -= usize::from(state.is_idle(self.0.id));
        state.records[self.0.id as usize] &= COUNT;
        state.cached -= 1;
    }
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PagePool").field(&self.books()).finish()
    }
}

impl fmt::Debug for PageHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageHandle({})", self.id)
    }
}

impl fmt::Debug for CachedPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CachedPage({})", self.0.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three pages: 0 held twice, 1 held by the prefix cache alone, 2 free.
    fn state() -> State {
        State { records: vec![2, CACHED | 1, 0], free: vec![2], held: 2, cached: 1, idle: 1 }
    }

    #[test]
    fn each_kind_of_imbalance_is_found_and_named() {
        let broken = |change: fn(&mut State)| {
            let mut state = state();
            change(&mut state);
            state.check(3)
        };
        assert_eq!(broken(|_| ()), Ok(()));
        assert_eq!(broken(|s| s.free = vec![2, 2]), Err(Imbalance::FreeTwice { page: 2 }));
        assert_eq!(broken(|s| s.free = vec![]), Err(Imbalance::Lost { page: 2 }));
        assert_eq!(broken(|s| s.free = vec![0, 2]), Err(Imbalance::FreePageHeld { page: 0, references: 2 }));
        assert_eq!(broken(|s| s.free = vec![7]), Err(Imbalance::Unknown { page: 7, num_pages: 3 }));
        for (counter, change) in [
            ("held_pages", (|s| s.held = 1) as fn(&mut State)),
            ("cached_pages", |s| s.cached = 2),
            ("idle_pages", |s| s.idle = 0),
        ] {
            match broken(change) {
                Err(Imbalance::Counter { counter: found, .. }) => assert_eq!(found, counter),
                other => panic!("{counter}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_leaked_handle_is_found_by_its_page() {
        let pool = PagePool::new(4, 16).unwrap();
        let kept = pool.alloc().unwrap();
        let leaked = pool.alloc().unwrap();
        let page = leaked.id();
        std::mem::forget(leaked);
        assert_eq!(pool.check(), Ok(()), "a held page is in order for as long as somebody may hold it");
        let wrong = Err(Imbalance::References { page, recorded: 1, found: 0 });
        assert_eq!(pool.check_holders([kept.id()]), wrong);
        let unknown = Err(Imbalance::Unknown { page: 4, num_pages: 4 });
        assert_eq!(pool.check_holders([kept.id(), 4]), unknown);
    }
}
