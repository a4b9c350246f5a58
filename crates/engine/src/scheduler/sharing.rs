//! Who shares pages with whom: choices forked from one prompt, prompts that wait for a neighbour's, copies under way.

use suanpan_base::BadArgument;

use suanpan_cache::PageTable;

use super::{OP, Scheduler, SeqSpec};
use crate::request::RequestKey;
use crate::sequence::Seq;

impl Scheduler {
    /// Refuses a fork whose prompt or namespace is not that of the request it names. One that has left is no fault: then the
    /// fork is a request like any other.
    pub(super) fn check_fork(&self, spec: &SeqSpec) -> Result<(), BadArgument> {
        let Some(origin) = spec.fork_of.and_then(|key| self.find(key)) else { return Ok(()) };
        if origin.namespace == spec.namespace && origin.tokens[..origin.prompt_len] == spec.prompt {
            return Ok(());
        }
        let supported = "a request of the same prompt and namespace";
        Err(BadArgument::new(OP, "fork_of", origin.key.0, supported))
    }

    pub(super) fn find(&self, key: RequestKey) -> Option<&Seq> {
        if let Some(at) = self.running_at(key) {
            return Some(&self.running[at]);
        }
        self.waiting.binary_search_by_key(&key, |s| s.key).ok().map(|at| &self.waiting[at])
    }

    /// To be called when the logits after the last prompt token of `key` are there and nothing is drawn yet: waiting forks of it
    /// begin to run, all of the prompt shared and nothing copied, as far as seats and pages allow. The others wait on, and will
    /// find the prompt in the prefix cache. The caller draws a token for each from the same logits.
    pub fn fork(&mut self, key: RequestKey) -> Vec<RequestKey> {
        let Some(at) = self.running_at(key).filter(|&at| !self.running[at].prompt_done) else {
            return Vec::new();
        };
        let origin = &mut self.running[at];
        if origin.tokens.len() > origin.prompt_len {
            return Vec::new();
        }
        origin.prompt_done = true;
        self.supply += 1;
        let mut forked = Vec::new();
        let mut next = 0;
        while next < self.waiting.len() && self.running.len() < self.opts.max_num_seqs {
            let seq = &self.waiting[next];
            // Each fork soon wants a page: for its copy of the last one, or behind it.
            let room = self.pool.books().available_pages();
            let room = self.window_books().map_or(room, |window| room.min(window.available_pages()));
            let fits = self.growing() < room;
            if seq.fork_of != Some(key) || seq.preemptions > 0 || !fits {
                next += 1;
                continue;
            }
            let Some(seq) = self.waiting.remove(next) else { break };
            forked.push(seq.key);
            self.seat_fork(seq, key);
        }
        forked
    }

    fn seat_fork(&mut self, mut seq: Seq, origin: RequestKey) {
        let Some(at) = self.running_at(origin) else { return };
        let prompt_len = seq.prompt_len;
        seq.pages = self.running[at].pages.fork(prompt_len);
        seq.window = self.running[at].window.as_ref().map(|table| table.fork(prompt_len));
        seq.computed = prompt_len;
        seq.prompt_done = true;
        seq.hit_tokens = prompt_len;
        seq.cached_tokens = Some(prompt_len);
        seq.reserved_tokens = prompt_len;
        seq.note_pages();
        self.totals.prefix_query_tokens += prompt_len as u64;
        self.totals.prefix_hit_tokens += prompt_len as u64;
        let place = self.running.partition_point(|s| s.key < seq.key);
        self.running.insert(place, seq);
    }

    /// Whole pages of a prompt that the prefix cache has.
    pub fn cached_pages_of(&self, namespace: u64, prompt: &[u32]) -> usize {
        self.prefix.peek(namespace, prompt)
    }

    /// Puts pages from elsewhere, behind the first `have` whole pages of a prompt, into the prefix cache: `fill` writes the bytes of
    /// each. Fewer, down to none, where the beginning is gone or pages are short. Returns how many.
    pub fn restore(
        &mut self,
        spec: &SeqSpec,
        have: usize,
        pages: &[Vec<u8>],
        mut fill: impl FnMut(u32, &[u8]),
    ) -> usize {
        let page_size = self.pool.page_size();
        let mut table = PageTable::new(&self.pool);
        let held = self.prefix.lookup(spec.namespace, &spec.prompt).pages;
        let from = held.len();
        if from < have {
            return 0;
        }
        held.into_iter().for_each(|page| table.push_shared(page));
        // Somebody may have computed some of them meanwhile.
        let pages = pages.get(from - have..).unwrap_or_default();
        let pages = &pages[..pages.len().min(self.pool.books().available_pages())];
        self.prefix.evict(pages.len().saturating_sub(self.pool.num_free()));
        let tokens = (from + pages.len()) * page_size;
        if pages.is_empty() || table.reserve(tokens).is_err() {
            return 0;
        }
        pages.iter().zip(&table.ids()[from..]).for_each(|(bytes, &page)| fill(page, bytes));
        self.supply += 1;
        self.prefix.insert(spec.namespace, &spec.prompt[..tokens], table.pages(), spec.cache_priority)
    }

    /// The copies of the last schedule are made; their sources may go.
    pub fn copied(&mut self) {
        if !self.copying.is_empty() {
            self.copying.clear();
            self.supply += 1;
        }
    }

    /// Whether somebody else's prompt under way will soon give most of what `seq` would have to compute itself: the one it is to
    /// be forked from, or one that begins alike. Waiting for it is bounded: that prompt has its pages or comes first, and a
    /// request that was overtaken often enough does not wait for strangers.
    pub(super) fn better_after_a_neighbour(&mut self, at: usize, hit_tokens: usize) -> bool {
        let seq = &self.waiting[at];
        if seq.preemptions == 0 && seq.fork_of.and_then(|key| self.find(key)).is_some_and(|s| !s.prompt_done)
        {
            return true;
        }
        if !seq.reuse_prefix || !self.prefix.is_enabled() || seq.overtaken >= self.opts.max_overtaken {
            return false;
        }
        let page_size = self.pool.page_size();
        let usable = seq.tokens.len() - 1;
        let neighbours = self.running.iter().enumerate().filter(|(_, s)| !s.published);
        let found = neighbours.filter(|(_, s)| s.namespace == seq.namespace).find_map(|(i, s)| {
            let same = s.tokens[..s.prompt_len]
                .iter()
                .zip(&seq.tokens[..usable])
                .take_while(|(a, b)| a == b)
                .count();
            let place = self.window_will_be_kept(s, same, page_size)?;
            let gain = place.saturating_sub(hit_tokens);
            (2 * gain >= seq.tokens.len() - hit_tokens).then_some((i, place))
        });
        let Some((i, place)) = found else { return false };
        let neighbour = &mut self.running[i];
        if self.window.is_some() && place + 1 < neighbour.prompt_len && neighbour.branch.is_none() {
            // Its window there has to be kept for the one that waits.
            neighbour.branch = Some(place);
        }
        true
    }
}
