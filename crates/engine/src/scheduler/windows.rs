//! Pages of layers that look back a window only: given back as soon as no token looks so far, taken a chunk at a time.
//!
//! Why a prompt under way never waits for such pages: it has, from its admission, as many of its own behind the hit as a window spans
//! and two more. When it has filled them, those in front of its window are nobody else's, and each one given back is the next taken.
//! They are published when the prompt is complete; from then on it grows like any other. A protected request publishes them at its
//! end only, and so needs nobody's pages.

use suanpan_base::BadArgument;
use suanpan_cache::{CacheBooks, PagePool, PageTable};

use super::{OP, Scheduler};
use crate::sequence::Seq;

/// Pages for the layers with a window.
#[derive(Clone, Debug)]
pub struct WindowGroup {
    /// The pages.
    pub pool: PagePool,
    /// How far the widest of the layers looks back, the current token included.
    pub window: usize,
    /// First tokens of a sequence that stay in its sight, in whole pages.
    pub sinks: usize,
}

impl WindowGroup {
    /// Tokens, from the first on, that a request of `tokens` tokens is given pages for when `hit` of them are found.
    pub(super) fn reach(&self, tokens: usize, hit: usize, page_size: usize) -> usize {
        tokens.min(hit.saturating_add(self.window).saturating_add(self.sinks + 2 * page_size))
    }

    /// A request's table over these pages.
    pub(crate) fn table(&self) -> PageTable {
        PageTable::with_sinks(&self.pool, self.sinks / self.pool.page_size())
    }

    /// Refuses a request that could not run even with every page to itself.
    pub(super) fn check_fits(&self, tokens: usize) -> Result<(), BadArgument> {
        let page_size = self.pool.page_size();
        // Behind a hit that ends inside a page.
        let needed = (self.reach(tokens, 0, page_size) + page_size).min(tokens).div_ceil(page_size);
        if needed <= self.pool.num_pages() {
            return Ok(());
        }
        let supported = format!(
            "at most {} pages of the layers with a window of {}: the KV cache has so many",
            self.pool.num_pages(),
            self.window
        );
        Err(BadArgument::new("request", "max_tokens", format!("{needed} pages of {page_size}"), supported))
    }
}

impl Scheduler {
    /// The same with pages of their own for layers with a window.
    pub fn with_windows(self, group: WindowGroup) -> Result<Scheduler, BadArgument> {
        if group.pool.page_size() != self.pool.page_size() {
            let supported = format!("{}, as the other layers' pages", self.pool.page_size());
            return Err(BadArgument::new(OP, "page_size", group.pool.page_size(), supported));
        }
        let prefix =
            self.prefix.with_windows(group.pool.clone(), group.window, group.sinks / self.pool.page_size());
        Ok(Scheduler { prefix, window: Some(group), ..self })
    }

    /// Pages of the layers with a window by holder, where they have their own.
    pub fn window_books(&self) -> Option<CacheBooks> {
        self.window.as_ref().map(|group| group.pool.books())
    }

    /// Page ids of the layers with a window of a running request; an id that no pool has where a page was given back.
    pub fn window_ids(&self, key: crate::request::RequestKey) -> Option<&[u32]> {
        Some(self.running[self.running_at(key)?].window.as_ref()?.ids())
    }

    /// Pages that a request of `tokens` tokens must be given for layers with a window when `hit` tokens are found.
    pub(super) fn window_pages_for(&self, tokens: usize, hit: usize) -> usize {
        let page_size = self.pool.page_size();
        let reach = self.window.as_ref().map(|group| group.reach(tokens, hit, page_size));
        reach.map_or(0, |reach| reach.div_ceil(page_size) - hit / page_size)
    }

    fn is_protected(&self, seq: &Seq) -> bool {
        seq.preemptions >= self.opts.max_preemptions
    }

    /// Gives back what no token to come looks back to. One that is protected does so only when it needs a page, so that the page it
    /// gives is the one it takes.
    pub(super) fn give_back(&mut self, at: usize) {
        let Some(group) = &self.window else { return };
        let (window, page_size) = (group.window, self.pool.page_size());
        let protected = self.is_protected(&self.running[at]);
        let seq = &mut self.running[at];
        let Some(table) = &mut seq.window else { return };
        if protected && table.capacity_tokens() >= seq.tokens.len() {
            return;
        }
        let keep = seq.branch.map_or(0..0, |end| end.saturating_sub(window) / page_size..end / page_size);
        table.give_back_before((seq.computed + 1).saturating_sub(window), keep);
    }

    /// Gives up the place where others parted from the running request at `at`. True where that gave pages back.
    pub(super) fn forget_branch(&mut self, at: usize) -> bool {
        let seq = &mut self.running[at];
        seq.branch = None;
        seq.window.as_mut().is_some_and(|table| table.forget_kept())
    }

    /// Pages of the layers with a window for the next `tokens` tokens of the running request at `at`, or for as many as there are
    /// pages for: at least one token of a prompt under way.
    pub(super) fn window_room(&mut self, at: usize, tokens: usize) -> usize {
        self.give_back(at);
        let Some(group) = &self.window else { return tokens };
        let (pool, page_size) = (group.pool.clone(), self.pool.page_size());
        let mut end = self.running[at].computed + tokens;
        loop {
            let seq = &mut self.running[at];
            let Some(table) = &mut seq.window else { return tokens };
            let Err(short) = table.reserve(end) else {
                seq.note_pages();
                return end.saturating_sub(seq.computed);
            };
            let most = table.capacity_tokens() + pool.num_free() * page_size;
            if self.prefix.evict_windows(short.needed - short.free) == 0 && !self.forget_branch(at) {
                end = end.min(most);
            }
        }
    }

    /// Makes the windows of the running request at `at` visible to the prefix cache: at the end of what it computed, and where others
    /// were seen to part from it.
    pub(super) fn publish_windows(&mut self, at: usize, tokens: usize) {
        let seq = &mut self.running[at];
        let Some(table) = &seq.window else { return };
        let ends: Vec<usize> = seq.branch.take().into_iter().chain([tokens]).collect();
        self.prefix.insert_windows(seq.namespace, &seq.tokens[..tokens], &ends, table, seq.cache_priority);
        if let Some(table) = &mut seq.window {
            table.forget_kept();
        }
    }

    /// Tokens, in whole pages, of a prompt under way that another one, alike in `same` of them, will find when it is complete. Of layers
    /// with a window that takes the window there: at its end, anywhere in a prompt no longer than a window, or at one place that it
    /// was asked to keep or has not passed yet.
    pub(super) fn window_will_be_kept(&self, seq: &Seq, same: usize, page_size: usize) -> Option<usize> {
        let whole = same / page_size * page_size;
        let Some(group) = &self.window else { return Some(whole) };
        if seq.prompt_len <= group.window || same + 1 >= seq.prompt_len {
            return Some(whole);
        }
        match seq.branch {
            Some(place) => (place <= same).then_some(place),
            None => (seq.computed <= whole && !self.is_protected(seq)).then_some(whole),
        }
    }
}
