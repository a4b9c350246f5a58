//! Counting tokens without owning a tokenizer: whoever runs the evaluation lends one.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
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

    /// How it counts, for the report: "tokenizer of SmolLM2", "endpoint", "bytes / 3.9 (calibrated)", "bytes".
    fn name(&self) -> String;
}

/// A counter's counts kept by piece: sentences and words come again and again, and a long prompt is counted by looking them up. What it
/// says of a whole text is the sum of its pieces, an upper bound for tokenizers that split before spaces and at line ends.
pub struct Pieces<C> {
    inner: C,
    /// By the piece's keyed 64-bit hash: among some 2^18 pieces two are equal by accident once in 2^28 runs.
    known: Vec<Mutex<HashMap<u64, u32, BuildHasherDefault<AsIs>>>>,
    hasher: RandomState,
}

/// Pieces that are kept: random numbers must not fill the memory.
const KEPT_PIECES: usize = 1 << 18;
/// Longest piece that is kept.
const KEPT_BYTES: usize = 400;
/// Locks, so that threads of one pack rarely meet.
const SHARDS: usize = 16;

/// The hash of what is a hash already.
#[derive(Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only whole numbers are hashed")
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

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
        let hash = self.hasher.hash_one(text);
        let shard = &self.known[hash as usize % SHARDS];
        // A poisoned lock would only mean that another thread's counter panicked: the counts themselves stay true.
        if let Some(&n) = shard.lock().unwrap_or_else(|e| e.into_inner()).get(&hash) {
            return n as usize;
        }
        let n = self.inner.count(text);
        let mut shard = shard.lock().unwrap_or_else(|e| e.into_inner());
        if shard.len() < KEPT_PIECES / SHARDS {
            shard.insert(hash, n as u32);
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
