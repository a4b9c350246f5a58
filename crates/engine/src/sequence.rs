//! What the scheduler knows of one request: its tokens, how many of them are computed, and the pages it owns.
//!
//! Knows neither sampling nor text. Dropping a sequence returns its pages.

use suanpan_cache::{PagePool, PageTable};

use crate::request::RequestKey;
use crate::scheduler::WindowGroup;

/// A request as the scheduler sees it.
#[derive(Clone, Debug)]
pub struct SeqSpec {
    /// Its name, and its place in the order of arrival.
    pub key: RequestKey,
    /// Prefix-cache namespace.
    pub namespace: u64,
    /// Prompt tokens; at least one.
    pub prompt: Vec<u32>,
    /// Prompt and output tokens at most, in all.
    pub max_total: usize,
    /// Whether the prefix cache may stand in for the start of the prompt (not when every position is to be scored).
    pub reuse_prefix: bool,
    /// A request of the same prompt whose pages it takes over when that prompt is complete (one of several choices).
    pub fork_of: Option<RequestKey>,
    /// Cached prefixes of a higher priority are kept longer, under that policy.
    pub cache_priority: i32,
}

/// One request between submission and end.
#[derive(Debug)]
pub(crate) struct Seq {
    pub key: RequestKey,
    pub namespace: u64,
    /// Prompt, then output.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub max_total: usize,
    pub reuse_prefix: bool,
    pub fork_of: Option<RequestKey>,
    pub cache_priority: i32,
    /// Tokens whose keys and values are in `pages`.
    pub computed: usize,
    pub pages: PageTable,
    /// Pages of the layers with a window, where they have their own.
    pub window: Option<PageTable>,
    /// Where in its tokens other prompts were seen to part from this one: the window there is kept for them.
    pub branch: Option<usize>,
    /// The prompt's pages are in the prefix cache.
    pub published: bool,
    /// The prompt was computed once: nobody waits any more to be forked from it.
    pub prompt_done: bool,
    pub preemptions: u32,
    /// Younger requests admitted past this one while it waited.
    pub overtaken: u32,
    /// The supply of pages (see the scheduler) at which it last did not fit.
    pub blocked_at: Option<u64>,
    /// Tokens found in the prefix cache at first admission.
    pub cached_tokens: Option<usize>,
    /// Tokens the prefix cache gave, over all admissions.
    pub hit_tokens: usize,
    /// Tokens whose computation preemptions threw away.
    pub lost_tokens: usize,
    pub pages_peak: usize,
    /// Most tokens that an admission reserved room for.
    pub reserved_tokens: usize,
}

/// What remains of a sequence when it leaves the scheduler; its pages are back already.
#[derive(Clone, Debug)]
pub struct Closed {
    /// Prompt, then output.
    pub tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt_len: usize,
    /// Prompt tokens found in the prefix cache at first admission.
    pub cached_tokens: usize,
    /// Times it was preempted.
    pub preemptions: u32,
    /// Tokens that had to go through the model.
    pub computed_tokens_predicted: usize,
    /// Most pages held.
    pub pages_peak: usize,
    /// Most pages needed.
    pub pages_predicted: usize,
}

impl Seq {
    pub fn new(spec: SeqSpec, pool: &PagePool, window: Option<&WindowGroup>) -> Seq {
        Seq {
            key: spec.key,
            namespace: spec.namespace,
            prompt_len: spec.prompt.len(),
            tokens: spec.prompt,
            max_total: spec.max_total,
            reuse_prefix: spec.reuse_prefix,
            fork_of: spec.fork_of,
            cache_priority: spec.cache_priority,
            computed: 0,
            pages: PageTable::new(pool),
            window: window.map(WindowGroup::table),
            branch: None,
            published: false,
            prompt_done: false,
            preemptions: 0,
            overtaken: 0,
            blocked_at: None,
            cached_tokens: None,
            hit_tokens: 0,
            lost_tokens: 0,
            pages_peak: 0,
            reserved_tokens: 0,
        }
    }

    /// Known tokens that are not computed yet.
    pub fn gap(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Tokens whose keys and values are needed if it runs to its limit: the last token drawn is never computed.
    pub fn most_tokens(&self) -> usize {
        self.tokens.len().max(self.max_total.saturating_sub(1))
    }

    /// Room that an admission asks for: at first what is known; after each preemption a larger share of what may come, and at
    /// `max_preemptions` all of it, so that the last run cannot be cut short.
    pub fn wanted_tokens(&self, max_preemptions: u32) -> usize {
        if self.preemptions == 0 {
            return self.tokens.len();
        }
        let share = self.preemptions.min(max_preemptions) as usize;
        let may_come = self.most_tokens() - self.tokens.len();
        self.tokens.len() + (may_come * share).div_ceil(max_preemptions.max(1) as usize)
    }

    /// Gives all pages back.
    pub fn drop_pages(&mut self) {
        self.pages.truncate_to(0);
        if let Some(window) = &mut self.window {
            window.truncate_to(0);
        }
    }

    pub fn note_pages(&mut self) {
        self.pages_peak = self.pages_peak.max(self.pages.ids().len());
    }

    /// Gives the pages back. `complete`: the output came to its end, so the lengths alone say what was to be computed.
    pub fn close(self, page_size: usize, complete: bool) -> Closed {
        let known_computed = self.tokens.len().saturating_sub(1).max(self.prompt_len);
        let final_computed = if complete { known_computed } else { self.computed };
        let held = if self.cached_tokens.is_some() { known_computed.max(self.reserved_tokens) } else { 0 };
        Closed {
            prompt_len: self.prompt_len,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            preemptions: self.preemptions,
            computed_tokens_predicted: final_computed + self.lost_tokens - self.hit_tokens,
            pages_peak: self.pages_peak,
            pages_predicted: held.div_ceil(page_size),
            tokens: self.tokens,
        }
    }
}
