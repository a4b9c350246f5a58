//! Numbers an operator watches: queue, pages, tokens, step times. All but the step times are exact.

use std::time::Duration;

use serde::Serialize;
use suanpan_cache::tier::TierBooks;

use crate::request::{FinishReason, RequestBooks};
use crate::scheduler::Scheduler;

/// Totals since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Steps.
    pub steps: u64,
    /// Time in steps, in all.
    pub step_us: u64,
    /// The longest step.
    pub step_us_max: u64,
    /// Part of `step_us` spent in the model's layers; the rest is planning, logits, sampling and text.
    pub model_us: u64,
    /// Tokens that went through the model.
    pub computed_tokens: u64,
    /// Prompt tokens of finished requests.
    pub prompt_tokens: u64,
    /// Tokens drawn.
    pub generation_tokens: u64,
    /// Requests that ended with an end token, stop token or stop string.
    pub finished_stop: u64,
    /// Requests that ended at a limit.
    pub finished_length: u64,
    /// Requests taken back.
    pub aborted: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Finished requests whose books did not agree. Anything but 0 is a fault.
    pub books_disagree: u64,
}

impl Totals {
    pub(crate) fn step_took(&mut self, time: Duration) {
        let us = micros(time);
        self.steps += 1;
        self.step_us += us;
        self.step_us_max = self.step_us_max.max(us);
    }

    pub(crate) fn model_took(&mut self, time: Duration, tokens: usize) {
        self.model_us += micros(time);
        self.computed_tokens += tokens as u64;
    }

    pub(crate) fn finished(&mut self, reason: FinishReason, books: &RequestBooks) {
        self.prompt_tokens += books.prompt_tokens as u64;
        self.books_disagree += u64::from(!books.agree());
        match reason {
            FinishReason::Stop => self.finished_stop += 1,
            FinishReason::Length => self.finished_length += 1,
            FinishReason::Abort => self.aborted += 1,
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A snapshot of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct EngineStats {
    /// Requests that hold pages.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Pages of the pool.
    pub pages_total: usize,
    /// Pages nobody holds.
    pub pages_free: usize,
    /// Pages that running requests hold.
    pub pages_held: usize,
    /// Pages that only the prefix cache holds.
    pub pages_cached: usize,
    /// Pages of the layers with a window, where they have their own; 0 else.
    pub window_pages_total: usize,
    /// Those nobody holds.
    pub window_pages_free: usize,
    /// Those that running requests hold.
    pub window_pages_held: usize,
    /// Those that only the prefix cache holds.
    pub window_pages_cached: usize,
    /// Share of the pool that running requests hold, 0 to 1.
    pub kv_usage: f64,
    /// Prompt tokens looked up in the prefix cache, in all.
    pub prefix_query_tokens: u64,
    /// Prompt tokens found there, in all.
    pub prefix_hit_tokens: u64,
    /// Times a request lost its pages, in all.
    pub preemptions: u64,
    /// Tokens whose computation preemptions threw away, in all.
    pub lost_tokens: u64,
    /// The tier below the pool; zeros where there is none.
    pub tier: TierBooks,
    /// Totals of the step loop.
    pub totals: Totals,
}

impl EngineStats {
    pub(crate) fn new(scheduler: &Scheduler, totals: Totals) -> EngineStats {
        let books = scheduler.books();
        let sums = scheduler.totals();
        let window = scheduler.window_books();
        let of_window = |pages: fn(&suanpan_cache::CacheBooks) -> usize| window.as_ref().map_or(0, pages);
        EngineStats {
            running: scheduler.num_running(),
            waiting: scheduler.num_waiting(),
            pages_total: books.total_pages,
            pages_free: books.free_pages,
            pages_held: books.active_pages,
            pages_cached: books.idle_pages,
            window_pages_total: of_window(|b| b.total_pages),
            window_pages_free: of_window(|b| b.free_pages),
            window_pages_held: of_window(|b| b.active_pages),
            window_pages_cached: of_window(|b| b.idle_pages),
            kv_usage: window.map_or(books.usage(), |w| books.usage().max(w.usage())),
            prefix_query_tokens: sums.prefix_query_tokens,
            prefix_hit_tokens: sums.prefix_hit_tokens,
            preemptions: sums.preemptions,
            lost_tokens: sums.lost_tokens,
            tier: TierBooks::default(),
            totals,
        }
    }
}
