//! Waiting requests that get their pages: who comes first, who fits.

use suanpan_base::BadArgument;
use suanpan_cache::{Group, Hit, OutOfPages, PageCopy, PagePool};

use super::{ADMISSION_SCAN, Admission, Schedule, Scheduler, chunk_len, push_chunk};
use crate::sequence::Seq;

impl Scheduler {
    /// New and preempted requests, oldest first; one that does not fit lets younger ones pass, up to a limit.
    pub(super) fn admit(&mut self, budget: &mut usize, out: &mut Schedule) {
        let mut at = 0;
        let threshold = self.opts.long_prefill_token_threshold;
        while at < self.waiting.len().min(ADMISSION_SCAN)
            && self.running.len() < self.opts.max_num_seqs
            && *budget > 0
        {
            if !self.try_admit(at, out) {
                if self.waiting[at].overtaken >= self.opts.max_overtaken {
                    return;
                }
                at += 1;
                continue;
            }
            let Some(seq) = self.waiting.remove(at) else { return };
            self.waiting.iter_mut().take(at).for_each(|older| older.overtaken += 1);
            let place = self.running.partition_point(|s| s.key < seq.key);
            self.running.insert(place, seq);
            let wanted = chunk_len(&self.running[place], *budget, threshold);
            let extend_len = self.window_room(place, wanted);
            push_chunk(&self.running[place], extend_len, budget, out);
        }
    }

    /// Gives the waiting request at `at` its pages, if they are there. Prefix hits are pinned before anything is evicted.
    fn try_admit(&mut self, at: usize, out: &mut Schedule) -> bool {
        let seq = &self.waiting[at];
        if seq.blocked_at == Some(self.supply) {
            return false;
        }
        let mut hit =
            if seq.reuse_prefix { self.prefix.lookup(seq.namespace, &seq.tokens) } else { Hit::default() };
        if !self.fits(seq, &hit) {
            // A page held only to be copied may be the very one that is missing; a window that ends inside it goes with it.
            match self.window {
                None => hit.partial = None,
                Some(_) if self.running.is_empty() => hit = Hit::default(),
                Some(_) => {}
            }
        }
        let page_size = self.pool.page_size();
        if !self.fits(seq, &hit) || self.better_after_a_neighbour(at, hit.tokens(page_size)) {
            self.waiting[at].blocked_at = Some(self.supply);
            return false;
        }
        let seq = &self.waiting[at];
        let protected = seq.preemptions >= self.opts.max_preemptions;
        let reserve = if protected { seq.most_tokens() } else { seq.tokens.len() };
        let missing = reserve.div_ceil(page_size) - hit.pages.len();
        let window_missing = self.window_pages_for(reserve, hit.tokens(page_size));
        self.prefix.evict(missing.saturating_sub(self.pool.num_free()));
        if let Some(group) = &self.window {
            self.prefix.evict_windows(window_missing.saturating_sub(group.pool.num_free()));
        }
        let branch = hit.branch;
        let (hit_tokens, copied) = self.give_pages(at, hit, reserve);
        let Ok(copied) = copied else {
            // The books promised the pages; if they are wrong `check` says so, and the request waits unharmed.
            self.waiting[at].drop_pages();
            return false;
        };
        self.copying.extend(copied);
        let seq = &mut self.waiting[at];
        seq.branch = (branch > hit_tokens).then_some(branch);
        seq.computed = hit_tokens;
        seq.hit_tokens += hit_tokens;
        seq.reserved_tokens = seq.reserved_tokens.max(reserve);
        seq.note_pages();
        if seq.cached_tokens.is_none() {
            seq.cached_tokens = Some(hit_tokens);
            self.totals.prefix_query_tokens += if seq.reuse_prefix { seq.prompt_len as u64 } else { 0 };
            self.totals.prefix_hit_tokens += hit_tokens as u64;
        }
        out.admitted.push(Admission { key: seq.key, hit_tokens });
        true
    }

    /// Gives the waiting request at `at` what was found for it and pages for the rest of `reserve` tokens. The tokens found, and what
    /// to copy.
    fn give_pages(
        &mut self,
        at: usize,
        mut hit: Hit,
        reserve: usize,
    ) -> (usize, Result<Vec<(Group, PageCopy)>, OutOfPages>) {
        let window_hit = std::mem::take(&mut hit.window);
        let page_size = self.pool.page_size();
        let window_reserve = self.window.as_ref().map(|g| g.reach(reserve, hit.tokens(page_size), page_size));
        let seq = &mut self.waiting[at];
        let hit_tokens = seq.pages.push_hit(hit);
        let mut copies = Vec::new();
        let give = || {
            seq.pages.reserve(reserve)?;
            copies.extend(seq.pages.make_writable(hit_tokens)?.map(|copy| (Group::Full, copy)));
            if let (Some(table), Some(tokens)) = (&mut seq.window, window_reserve) {
                table.push_window(window_hit);
                table.reserve(tokens)?;
                copies.extend(table.make_writable(hit_tokens)?.map(|copy| (Group::Window, copy)));
            }
            Ok(())
        };
        let given = give();
        (hit_tokens, given.map(|()| copies))
    }

    /// Whether a waiting request would find its pages beside what `hit` pins.
    fn fits(&self, seq: &Seq, hit: &Hit) -> bool {
        let page_size = self.pool.page_size();
        let tokens = seq.wanted_tokens(self.opts.max_preemptions);
        let full = tokens.div_ceil(page_size) - hit.pages.len();
        let window = self.window_pages_for(tokens, hit.tokens(page_size));
        let fits = |pages: usize, pool: &PagePool| pages + self.growing() <= pool.books().available_pages();
        fits(full, &self.pool) && self.window.as_ref().is_none_or(|group| fits(window, &group.pool))
    }

    /// Each of these running requests may soon want one page more; admitting into those would only cause a preemption.
    pub(super) fn growing(&self) -> usize {
        self.running.iter().filter(|s| s.preemptions < self.opts.max_preemptions).count()
    }
}

/// Refuses a request that could not run even with every page to itself, with both numbers.
pub fn check_fits(prompt_len: usize, max_total: usize, pool: &PagePool) -> Result<(), BadArgument> {
    if prompt_len == 0 {
        return Err(BadArgument::new("request", "prompt", "0 tokens", "at least 1 token"));
    }
    let capacity = pool.num_pages() * pool.page_size();
    // The last token drawn is never computed.
    let held = prompt_len.max(max_total.saturating_sub(1));
    if held > capacity || max_total < prompt_len {
        let asked = format!("{prompt_len} prompt + {} output tokens", max_total.saturating_sub(prompt_len));
        let supported = format!(
            "at most {} tokens in all: the KV cache has {} pages of {}",
            capacity + 1,
            pool.num_pages(),
            pool.page_size()
        );
        return Err(BadArgument::new("request", "max_tokens", asked, supported));
    }
    Ok(())
}
