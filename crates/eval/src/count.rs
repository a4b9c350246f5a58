//! Counting tokens without owning a tokenizer: whoever runs the evaluation lends one.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;

/// Counts the tokens of a text as the model under test would, or says how it differs.
pub trait Counter: Send + Sync {
    /// Tokens of `text`, without special tokens around it.
    fn count(&self, text: &str) -> usize;

    /// Tokens of a text that was put together from pieces of `by_pieces` tokens together, each beginning at a line or at the space before a
    /// word. Counts the text again, unless the counter knows that its pieces add up to no less than the whole.
    fn whole(&self, text: &str, by_pieces: usize) -> usize {
        let _ = by_pieces;
        self.count(text)
    }

    /// Tokens that a chat template puts around each turn. They are part of a task's length.
    fn turn_tokens(&self) -> usize {
        0
    }

    /// How it counts, for the report: "tokenizer of <model>", "endpoint", "bytes / 3.9 (calibrated)", "bytes".
    fn name(&self) -> String;
}

/// A counter's counts kept by piece: sentences and words come again and again, and a long prompt is counted by looking them up. What it
/// says of a whole text is the sum of its pieces, an upper bound for tokenizers that split before spaces and at line ends.
pub struct Pieces<C> {
    inner: C,
    known: Vec<Mutex<HashMap<Box<str>, u32>>>,
    hasher: RandomState,
}

/// Pieces that are kept: random numbers must not fill the memory.
const KEPT_PIECES: usize = 1 << 18;
/// Longest piece that is kept.
const KEPT_BYTES: usize = 400;
/// Locks, so that threads of one pack rarely meet.
const SHARDS: usize = 16;

impl<C: Counter> Pieces<C> {
    /// Keeps the counts of `inner`.
    pub fn new(inner: C) -> Self {
        Pieces { inner, known: (0..SHARDS).map(|_| Mutex::default()).collect(), hasher: RandomState::new() }
    }
}

impl<C: Counter> Counter for Pieces<C> {
    fn count(&self, text: &str) -> usize {
        if text.len() > KEPT_BYTES {
            return self.inner.count(text);
        }
        let shard = &self.known[self.hasher.hash_one(text) as usize % SHARDS];
        // A poisoned lock would only mean that another thread's counter panicked: the counts themselves stay true.
        if let Some(&n) = shard.lock().unwrap_or_else(|e| e.into_inner()).get(text) {
            return n as usize;
        }
        let n = self.inner.count(text);
        let mut shard = shard.lock().unwrap_or_else(|e| e.into_inner());
        if shard.len() < KEPT_PIECES / SHARDS {
            shard.insert(text.into(), n as u32);
        }
        n
    }

    fn whole(&self, _text: &str, by_pieces: usize) -> usize {
        by_pieces
    }

    fn turn_tokens(&self) -> usize {
        self.inner.turn_tokens()
    }

    fn name(&self) -> String {
        format!("{}, by pieces", self.inner.name())
    }
}

/// One token a byte: what `builtin:recall` reads, and the last resort elsewhere.
pub struct Bytes;

impl Counter for Bytes {
    fn count(&self, text: &str) -> usize {
        text.len()
    }

    fn whole(&self, text: &str, _by_pieces: usize) -> usize {
        text.len()
    }

    fn name(&self) -> String {
        "bytes".into()
    }
}
