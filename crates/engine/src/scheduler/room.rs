//! Pages for running requests: for the next token, or by taking those of a younger one.

use suanpan_cache::{Group, OutOfPages};

use super::{Schedule, Scheduler};
use crate::sequence::Seq;

/// What became of a running request's need for a page.
pub(super) enum Room {
    Reserved,
    /// It was itself the youngest that could go.
    GaveWay,
    Stalled,
}

impl Scheduler {
    /// Pages for the next token of the running request at `at`.
    pub(super) fn make_room(&mut self, at: usize, out: &mut Schedule) -> Room {
        loop {
            let Err((group, short)) = self.prepare(at) else { return Room::Reserved };
            if self.evict(group, short.needed - short.free) > 0 || self.forget_branch(at) {
                continue;
            }
            let may_go = |s: &Seq| s.preemptions < self.opts.max_preemptions;
            match (at.max(1)..self.running.len()).rev().find(|&i| may_go(&self.running[i])) {
                Some(victim) => {
                    self.preempt(victim, out);
                    if victim == at {
                        return Room::GaveWay;
                    }
                }
                None => return Room::Stalled,
            }
        }
    }

    /// Makes the next token of the running request at `at` writable: a page for it in each group, and one of its own.
    fn prepare(&mut self, at: usize) -> Result<(), (Group, OutOfPages)> {
        self.give_back(at);
        let seq = &mut self.running[at];
        let tokens = seq.tokens.len();
        seq.pages.reserve(tokens).map_err(|short| (Group::Full, short))?;
        if let Some(window) = &mut seq.window {
            window.reserve(tokens).map_err(|short| (Group::Window, short))?;
            let copy = window.make_writable(seq.computed).map_err(|short| (Group::Window, short))?;
            self.copying.extend(copy.map(|copy| (Group::Window, copy)));
        }
        let copy = seq.pages.make_writable(seq.computed).map_err(|short| (Group::Full, short))?;
        self.copying.extend(copy.map(|copy| (Group::Full, copy)));
        seq.note_pages();
        Ok(())
    }

    /// Frees idle pages of a group; how many.
    pub(super) fn evict(&mut self, group: Group, pages: usize) -> usize {
        match group {
            Group::Full => self.prefix.evict(pages),
            Group::Window => self.prefix.evict_windows(pages),
        }
    }

    /// Takes the pages of a running request; it keeps its tokens and waits at its place in the order of arrival.
    pub(super) fn preempt(&mut self, at: usize, out: &mut Schedule) {
        self.publish(at);
        let mut seq = self.running.remove(at);
        seq.drop_pages();
        seq.lost_tokens += seq.computed;
        self.totals.lost_tokens += seq.computed as u64;
        seq.computed = 0;
        seq.published = false;
        seq.preemptions += 1;
        seq.blocked_at = None;
        self.totals.preemptions += 1;
        self.supply += 1;
        out.preempted.push(seq.key);
        let place = self.waiting.partition_point(|s| s.key < seq.key);
        self.waiting.insert(place, seq);
    }
}
