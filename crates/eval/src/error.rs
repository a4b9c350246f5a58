//! What can go wrong before, around and after a question; a wrong answer is not an error.

/// A run, a pack or a file that cannot be honoured.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// An option or a field outside what is supported.
    #[error("{field} = {asked}: supported: {supported}")]
    Bad {
        /// The field, by its public name.
        field: String,
        /// What was asked.
        asked: String,
        /// What is supported instead.
        supported: String,
    },
    /// No prompt of this task fits the length: the parts that may not be cut are longer.
    #[error("{task} at {length_tokens} tokens: needs at least {least_tokens}")]
    TooShort {
        /// Task.
        task: String,
        /// Asked, in tokens of the counter, answer included.
        length_tokens: usize,
        /// The least that would hold.
        least_tokens: usize,
    },
    /// A file that does not read as what it should be.
    #[error("{path}:{line}: {why}")]
    File {
        /// Path.
        path: String,
        /// Line or row, from 1; 0 for the file as a whole.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// Path.
        path: String,
        /// Why.
        source: std::io::Error,
    },
}

impl EvalError {
    /// A refusal of `field`.
    pub fn bad(
        field: impl Into<String>,
        asked: impl std::fmt::Display,
        supported: impl std::fmt::Display,
    ) -> Self {
        EvalError::Bad { field: field.into(), asked: asked.to_string(), supported: supported.to_string() }
    }
}
