//! The pages of one sequence in order, as the contiguous ids that kernels read.
//!
//! Owns one reference to each of its pages and returns them when dropped. Does not write pages: a page that others hold
//! too (`is_shared`) must be complete, because nothing here copies on write.

use crate::pool::{PageHandle, PagePool};

/// A reservation that the pool cannot honour. Nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of pages: {needed} more needed, {free} free")]
pub struct OutOfPages {
    /// Pages needed beyond those the table has.
    pub needed: usize,
    /// Pages that were free.
    pub free: usize,
}

/// Pages of one sequence: token position `p` lies in page `p / page_size`, at offset `p % page_size`.
#[derive(Debug)]
pub struct PageTable {
    pool: PagePool,
    pages: Vec<PageHandle>,
    /// `pages[i].id()`, contiguous for the kernels.
    ids: Vec<u32>,
}

impl PageTable {
    /// An empty table over `pool`.
    pub fn new(pool: &PagePool) -> PageTable {
        PageTable { pool: pool.clone(), pages: Vec::new(), ids: Vec::new() }
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

    /// Whether somebody else holds the page at index `page` too; such a page must not be written. Panics past the end.
    pub fn is_shared(&self, page: usize) -> bool {
        self.pages[page].refcount() > 1
    }

    /// Gives back every page past the one that holds token `tokens - 1`.
    pub fn truncate_to(&mut self, tokens: usize) {
        let keep = tokens.div_ceil(self.pool.page_size());
        if keep < self.pages.len() {
            self.ids.truncate(keep);
            self.pool.release(self.pages.drain(keep..));
        }
    }

    /// A table that shares the pages which the first `tokens` tokens fill completely. The tokens past its
    /// `capacity_tokens` lie in a page that both would write, so the new holder must make its own.
    pub fn fork(&self, tokens: usize) -> PageTable {
        let full = (tokens / self.pool.page_size()).min(self.pages.len());
        let pages = self.pages[..full].iter().map(PageHandle::share).collect();
        PageTable { pool: self.pool.clone(), pages, ids: self.ids[..full].to_vec() }
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        self.truncate_to(0);
    }
}
