//! One sequence over many ranks: a pure plan says who works on what and who sends what to whom; a checker proves it; threads run it.
//!
//! ```text
//! MaskSlices + Layout + cp_size + Scheme -> ParallelPlan -> check -> run_threads -> outputs of every rank, or who was lost where
//! ```
//! Deliberately no projections, no cache, no clock in the plan. Positions are global everywhere; a rank without tokens is a normal case.

pub mod attention;
pub mod check;
pub mod choose;
pub mod decode;
pub mod flaw;
mod gather;
mod kernel;
pub mod launch;
pub mod mask;
mod memory;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod plan;
mod ring;
pub mod run;
pub mod shard;
pub mod simulate;
mod threads;
pub mod tile;
pub mod transport;
pub mod ulysses;

pub use attention::{Attention, Bias, Inputs, Outputs, Times};
pub use check::{Checked, check};
pub use flaw::Flaw;
pub use mask::MaskSlices;
pub use plan::{ParallelPlan, Pass, Request, Scheme};
pub use run::{Options, run_rank, run_threads};
pub use shard::{Layout, Shards};
pub use transport::{Fault, FaultKind, Transport};
