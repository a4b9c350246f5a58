//! Counting tokens without owning a tokenizer: whoever runs the evaluation lends one.

/// Counts the tokens of a text as the model under test would, or says how it differs.
pub trait Counter: Send + Sync {
    /// Tokens of `text`, without special tokens around it.
    fn count(&self, text: &str) -> usize;

    /// How it counts, for the report: "tokenizer of <model>", "endpoint", "bytes / 3.9 (calibrated)", "bytes".
    fn name(&self) -> String;
}

/// One token a byte: what `builtin:recall` reads, and the last resort elsewhere.
pub struct Bytes;

impl Counter for Bytes {
    fn count(&self, text: &str) -> usize {
        text.len()
    }

    fn name(&self) -> String {
        "bytes".into()
    }
}
