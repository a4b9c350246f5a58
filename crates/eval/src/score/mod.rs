//! Judging answers: what the public evaluations of the same names do, and beside it what should be done. No task's text is known here.

pub mod edit;
pub mod number;
pub mod ratio;
pub mod retrieval;
pub mod sets;
pub mod text;
