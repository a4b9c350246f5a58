//! Accounting: what should move and be computed, as pure arithmetic over shapes.
//!
//! Reads no clock and no device. What a run did move is counted by the rooms that move it; `reconcile` compares the two.

pub mod cache;
pub mod entry;
pub mod extra;
pub mod kernel;
pub mod machine;
pub mod parallel;
pub mod reconcile;
pub mod report;
pub mod shapes;

pub use entry::{AttnBooks, BackwardBooks, Entry};
pub use reconcile::reconcile;
