//! The pages of one sequence in order, as the contiguous ids that kernels read.
//!
//! Owns one reference to each of its pages and returns them when dropped. Full pages are shared and never written again. The
//! last page may be borrowed: lent by a fork or by a partial hit, read as it is, and copied before the first write
//! (`make_writable`). Copies no bytes itself.

use crate::pool::{PageHandle, PagePool};
use crate::radix::{Hit, PartialPage};

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
    pages: Vec<PageHandle>,
    /// `pages[i].id()`, contiguous for the kernels.
    ids: Vec<u32>,
    /// Index of the page that others may rely on behind what this table has of it: to be copied before it is written.
    borrowed: Option<usize>,
}

impl PageTable {
    /// An empty table over `pool`.
    pub fn new(pool: &PagePool) -> PageTable {
        PageTable { pool: pool.clone(), pages: Vec::new(), ids: Vec::new(), borrowed: None }
    }

    /// Makes room for `tokens` tokens in all, counted from position 0. All or nothing.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), OutOfPages> {
        let pages = tokens.div_ceil(self.pool.page_size());
        let needed = pages.saturating_sub(self.pages.len());
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
        self.borrowed = Some(self.pages.len() - 1);
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
        Ok(Some(PageCopy { from: std::mem::replace(&mut self.pages[page], own), to }))
    }

    /// Page ids in token order.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The pages' handles in token order, for the prefix cache to share.
    pub fn pages(&self) -> &[PageHandle] {
        &self.pages
    }

    /// Tokens that the reserved pages hold.
    pub fn capacity_tokens(&self) -> usize {
        self.pages.len() * self.pool.page_size()
    }

    /// Where the token at `position` lies: page id · page_size + offset. Panics past `capacity_tokens`: a position
    /// without a page has no slot, and none is invented.
    pub fn slot(&self, position: usize) -> u64 {
        let page_size = self.pool.page_size();
        let page = position / page_size;
        assert!(page < self.ids.len(), "position {position} of {} reserved tokens", self.capacity_tokens());
        u64::from(self.ids[page]) * page_size as u64 + (position % page_size) as u64
    }

    /// Whether somebody else holds the page at index `page` too. Panics past the end.
    pub fn is_shared(&self, page: usize) -> bool {
        self.pages[page].refcount() > 1
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
        self.pool.release(self.pages.drain(keep..));
        // A page borrowed further in front is not written yet, nor is anything behind it.
        if self.borrowed.is_none_or(|page| page >= keep) {
            self.borrowed = (!tokens.is_multiple_of(page_size)).then(|| keep - 1);
        }
    }

    /// A table of the first `tokens` tokens. It shares all pages that hold them; the last one, where they end inside it, is
    /// borrowed: the new holder copies it before its first write, while this table goes on writing in place.
    pub fn fork(&self, tokens: usize) -> PageTable {
        let page_size = self.pool.page_size();
        let held = tokens.div_ceil(page_size).min(self.pages.len());
        let pages = self.pages[..held].iter().map(PageHandle::share).collect();
        let borrowed = (tokens < held * page_size).then(|| held - 1);
        PageTable { pool: self.pool.clone(), pages, ids: self.ids[..held].to_vec(), borrowed }
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        self.truncate_to(0);
    }
}
