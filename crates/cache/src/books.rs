//! The cache's own books: how many pages are free, in use, or kept only for reuse, and what that is in tokens and bytes.

use serde::Serialize;

use crate::pool::Imbalance;

/// Page counts of one instant. Each page is exactly one of free, active and idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CacheBooks {
    /// Tokens of a page.
    pub page_size: usize,
    /// Pages of the pool.
    pub total_pages: usize,
    /// Pages nobody holds.
    pub free_pages: usize,
    /// Pages that at least one holder besides the prefix cache holds.
    pub active_pages: usize,
    /// Pages that only the prefix cache holds: all of them can be evicted.
    pub idle_pages: usize,
    /// Pages the prefix cache holds, active ones included.
    pub cached_pages: usize,
}

impl CacheBooks {
    /// free + active + idle = total, and the cache holds its idle pages and at most the active ones besides. O(1).
    pub fn check(&self) -> Result<(), Imbalance> {
        let sum = self.free_pages + self.active_pages + self.idle_pages;
        if sum != self.total_pages {
            return Err(Imbalance::Counter {
                counter: "total_pages",
                kept: self.total_pages,
                recomputed: sum,
            });
        }
        let cached = self.cached_pages.clamp(self.idle_pages, self.idle_pages + self.active_pages);
        if cached != self.cached_pages {
            return Err(Imbalance::Counter {
                counter: "cached_pages",
                kept: self.cached_pages,
                recomputed: cached,
            });
        }
        Ok(())
    }

    /// Pages a request can get: free ones, and idle ones after eviction.
    pub fn available_pages(&self) -> usize {
        self.free_pages + self.idle_pages
    }

    /// Share of the pool that running requests hold, 0 ..= 1.
    pub fn usage(&self) -> f64 {
        self.active_pages as f64 / self.total_pages as f64
    }

    /// Tokens that `pages` pages hold.
    pub fn tokens(&self, pages: usize) -> usize {
        pages * self.page_size
    }

    /// Bytes of `pages` pages of `bytes_per_page` (`KvStorage::bytes_per_page`).
    pub fn bytes(pages: usize, bytes_per_page: usize) -> u64 {
        pages as u64 * bytes_per_page as u64
    }
}
