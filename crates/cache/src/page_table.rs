//! The pages of one sequence in order, as the contiguous ids that kernels read.
//!
//! Owns one reference to each of its pages and returns them when dropped. Full pages are shared and never written again. The
//! last page may be borrowed: lent by a fork or by a partial hit, read as it is, and copied before the first write
//! (`make_writable`). The first pages may be gone, once no layer looks back so far (`give_back_before`). Copies no bytes itself.

use crate::pool::{NO_PAGE, PageHandle, PagePool};
use crate::radix::{Hit, PartialPage, WindowHit};

/// A reservation that the pool cannot honour. Nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of pages: {needed} more needed, {free} free")]
pub struct OutOfPages {
    /// Pages needed beyond those the table has.
    pub needed: usize,
    /// Pages that were free.
    pub free: usize,
}

/// One page to be copied before anything of the step is written. Holds its source until it is dropped, so that nobody else can
/// be given the page in between.
#[derive(Debug)]
pub struct PageCopy {
    /// The page to copy.
    pub from: PageHandle,
    /// Where to; held by the table that asked.
    pub to: u32,
}

/// Pages of one sequence: token position `p` lies in page `p / page_size`, at offset `p % page_size`.
#[derive(Debug)]
pub struct PageTable {
    pool: PagePool,
    /// The pages from index `first` on.
    pages: Vec<PageHandle>,
    /// How many pages in front are not held any more, but for those of `front`.
    first: usize,
    /// How many pages from index 0 on are never given back.
    sinks: usize,
    /// Those of them in front of `first`.
    front: Vec<PageHandle>,
    /// Pages in front of `first` that are kept all the same, with their index, in order.
    kept: Vec<(usize, PageHandle)>,
    /// Ids from page 0 on, contiguous for the kernels; [`NO_PAGE`] between `front` and `first`.
    ids: Vec<u32>,
    /// Index of the page that others may rely on behind what this table has of it: to be copied before it is written.
    borrowed: Option<usize>,
}

impl PageTable {
    /// An empty table over `pool`.
    pub fn new(pool: &PagePool) -> PageTable {
        PageTable::with_sinks(pool, 0)
    }

    /// An empty table over `pool` that keeps its first `sinks` pages whatever no token looks back to.
    pub fn with_sinks(pool: &PagePool, sinks: usize) -> PageTable {
        PageTable {
            pool: pool.clone(),
            pages: Vec::new(),
            first: 0,
            sinks,
            front: Vec::new(),
            kept: Vec::new(),
            ids: Vec::new(),
            borrowed: None,
        }
    }

    /// A table whose first pages are those of a hit's window; in front of them its sinks are held and nothing else.
    pub fn push_window(&mut self, hit: WindowHit) {
        assert!(self.ids.is_empty(), "a window begins a table");
        assert!(hit.sinks.len() == self.sinks.min(hit.first_page), "a window comes with its sinks");
        self.first = hit.first_page;
        self.ids.extend(hit.sinks.iter().map(PageHandle::id));
        self.ids.resize(hit.first_page, NO_PAGE);
        self.front = hit.sinks;
        let last = hit.pages.len();
        for (i, page) in hit.pages.into_iter().enumerate() {
            if hit.ends_inside && i + 1 == last { self.push_borrowed(page) } else { self.push_shared(page) }
        }
    }

    /// Gives back every page that ends at or before `position`, but for sinks: nothing looks back so far. Those of the pages `keep` stay held for
    /// the prefix cache, until `forget_kept`; kernels are not given their ids.
    pub fn give_back_before(&mut self, position: usize, keep: std::ops::Range<usize>) {
        let until = (position / self.pool.page_size()).min(self.ids.len());
        let gone = until.saturating_sub(self.first).min(self.pages.len());
        if gone == 0 {
            return;
        }
        let first = self.first;
        let sinks = self.sinks.saturating_sub(first).min(gone);
        self.front.extend(self.pages.drain(..sinks));
        self.first += sinks;
        let (first, gone) = (first + sinks, gone - sinks);
        self.ids[first..first + gone].fill(NO_PAGE);
        let (kept, back): (Vec<_>, Vec<_>) =
            self.pages.drain(..gone).enumerate().partition(|(i, _)| keep.contains(&(first + i)));
        self.kept.extend(kept.into_iter().map(|(i, page)| (first + i, page)));
        self.pool.release(back.into_iter().map(|(_, page)| page));
        self.first += gone;
        if self.borrowed.is_some_and(|page| page < self.first) {
            self.borrowed = None;
        }
    }

    /// Gives back the pages that `give_back_before` kept. True where there were any.
    pub fn forget_kept(&mut self) -> bool {
        let had = !self.kept.is_empty();
        self.pool.release(self.kept.drain(..).map(|(_, page)| page));
        had
    }

    /// The page at index `page`, if it is still held.
    pub fn page_at(&self, page: usize) -> Option<&PageHandle> {
        match page.checked_sub(self.first) {
            Some(at) => self.pages.get(at),
            None if page < self.front.len() => self.front.get(page),
            None => self.kept.iter().find(|(at, _)| *at == page).map(|(_, page)| page),
        }
    }

    /// Makes room for `tokens` tokens in all, counted from position 0. All or nothing.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), OutOfPages> {
        let pages = tokens.div_ceil(self.pool.page_size());
        let needed = pages.saturating_sub(self.ids.len());
        if needed == 0 {
            return Ok(());
        }
        let had = self.pages.len();
        self.pool.alloc_into(needed, &mut self.pages).map_err(|free| OutOfPages { needed, free })?;
        self.ids.extend(self.pages[had..].iter().map(PageHandle::id));
        Ok(())
    }

    /// Appends a page that is complete already, for example one found in the prefix cache. Panics on a page of another
    /// pool.
    pub fn push_shared(&mut self, page: PageHandle) {
        assert!(self.pool.is_same(page.pool()), "a page table holds pages of its own pool");
        self.ids.push(page.id());
        self.pages.push(page);
    }

    /// Appends a page of which only the first tokens are this sequence's: it is read as it is and copied before it is written.
    pub fn push_borrowed(&mut self, page: PageHandle) {
        self.push_shared(page);
        self.borrowed = Some(self.ids.len() - 1);
    }

    /// Appends what a look-up found. Returns its tokens.
    pub fn push_hit(&mut self, hit: Hit) -> usize {
        let tokens = hit.tokens(self.pool.page_size());
        hit.pages.into_iter().for_each(|page| self.push_shared(page));
        if let Some(PartialPage { page, .. }) = hit.partial {
            self.push_borrowed(page);
        }
        tokens
    }

    /// Makes sure that the token at `position` and those behind it may be written: where its page is borrowed and somebody
    /// else still holds it, the table gets a page of its own and says what to copy. Nothing changes when no page is free.
    pub fn make_writable(&mut self, position: usize) -> Result<Option<PageCopy>, OutOfPages> {
        let page = position / self.pool.page_size();
        if self.borrowed != Some(page) {
            return Ok(None);
        }
        if !self.is_shared(page) {
            self.borrowed = None;
            return Ok(None);
        }
        let own = self.pool.alloc().ok_or(OutOfPages { needed: 1, free: 0 })?;
        let to = own.id();
        self.ids[page] = to;
        self.borrowed = None;
        Ok(Some(PageCopy { from: std::mem::replace(&mut self.pages[page - self.first], own), to }))
    }

    /// Page ids in token order; an id no pool has where the page was given back.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The held pages' handles in token order, for the prefix cache to share: all of them, where none was given back.
    pub fn pages(&self) -> &[PageHandle] {
        &self.pages
    }

    /// Ids of all pages held, those kept for the prefix cache included (for `PagePool::check_holders`).
    pub fn held_ids(&self) -> impl Iterator<Item = u32> + '_ {
        let front = self.front.iter().chain(self.kept.iter().map(|(_, page)| page));
        self.pages.iter().chain(front).map(PageHandle::id)
    }

    /// Tokens that the reserved pages hold.
    pub fn capacity_tokens(&self) -> usize {
        self.ids.len() * self.pool.page_size()
    }

    /// Where the token at `position` lies: page id · page_size + offset. Panics past `capacity_tokens`: a position
    /// without a page has no slot, and none is invented.
    pub fn slot(&self, position: usize) -> u64 {
        let page_size = self.pool.page_size();
        let page = position / page_size;
        assert!(page < self.ids.len(), "position {position} of {} reserved tokens", self.capacity_tokens());
        assert!(page >= self.first || page < self.front.len(), "position {position} was given back");
        u64::from(self.ids[page]) * page_size as u64 + (position % page_size) as u64
    }

    /// Whether somebody else holds the page at index `page` too. Panics past the end and where it was given back.
    pub fn is_shared(&self, page: usize) -> bool {
        self.pages[page - self.first].refcount() > 1
    }

    /// Whether the page at index `page` must be copied before it is written, if somebody else holds it.
    pub fn is_borrowed(&self, page: usize) -> bool {
        self.borrowed == Some(page)
    }

    /// Gives back every page past the one that holds token `tokens - 1`. What is left of that page counts as borrowed: the
    /// tokens cut off may have been shared.
    pub fn truncate_to(&mut self, tokens: usize) {
        let page_size = self.pool.page_size();
        let keep = tokens.div_ceil(page_size);
        if tokens >= self.capacity_tokens() {
            return;
        }
        self.ids.truncate(keep);
        self.pool.release(self.pages.drain(keep.saturating_sub(self.first)..));
        if keep <= self.first {
            self.first = keep;
            self.forget_kept();
            self.pool.release(self.front.drain(keep.min(self.front.len())..));
            self.join_front();
        }
        // A page borrowed further in front is not written yet, nor is anything behind it.
        if self.borrowed.is_none_or(|page| page >= keep) {
            self.borrowed = (!tokens.is_multiple_of(page_size) && keep > self.first).then(|| keep - 1);
        }
    }

    /// A table of the first `tokens` tokens. It shares all pages that hold them; the last one, where they end inside it, is
    /// borrowed: the new holder copies it before its first write, while this table goes on writing in place.
    pub fn fork(&self, tokens: usize) -> PageTable {
        let page_size = self.pool.page_size();
        let held = tokens.div_ceil(page_size).min(self.ids.len());
        let first = self.first.min(held);
        let share = |pages: &[PageHandle]| pages.iter().map(PageHandle::share).collect();
        let mut fork = PageTable::with_sinks(&self.pool, self.sinks);
        fork.pages = share(&self.pages[..held - first]);
        fork.first = first;
        fork.front = share(&self.front[..held.min(self.front.len())]);
        fork.ids = self.ids[..held].to_vec();
        fork.join_front();
        fork.borrowed = (tokens < held * page_size && fork.first < held).then(|| held - 1);
        fork
    }

    /// Where the table ends with its front, those pages are pages like any other.
    fn join_front(&mut self) {
        if self.pages.is_empty() && self.front.len() == self.first {
            self.pages = std::mem::take(&mut self.front);
            self.first = 0;
        }
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        self.truncate_to(0);
    }
}
