//! Text to hide facts in, and the words that tasks are made of.

pub mod files;
pub mod prose;
pub mod words;

pub use files::Files;
pub use prose::Prose;
