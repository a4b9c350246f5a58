//! Accounting: what should move and be computed, as pure arithmetic over shapes.
//!
//! Reads no clock and no device. What a run did move is counted by the rooms that move it; `reconcile` compares the two.

pub mod entry;
pub mod kernel;

pub use entry::{AttnBooks, Entry};
