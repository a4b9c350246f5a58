//! Judging answers: what the public evaluations of the same names do, and beside it what should be done. No task's text is known here.

pub mod retrieval;
pub mod text;
