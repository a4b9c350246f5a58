//! Exact attention: a problem becomes a plan (pure, printable), a plan runs over a workspace; an f64 oracle checks it.
//!
//! ```text
//! Problem + Machine + Limits -> Plan::new -> schedule(lengths) -> run(plan, args, workspace, books)
//! ```
//! Gradients go the same way: `BackwardPlan`, `run_backward`. Deliberately no positions, no projections and no cache policy: K and V
//! arrive written, contiguous or paged.

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod backward;
pub mod cascade;
mod check;
pub mod cpu;
mod cut;
pub mod dropout;
pub mod extras;
pub mod plan;
pub mod problem;
pub mod quant;
pub mod reference;
pub mod run;
pub mod scales;
pub mod workspace;

pub use backward::{BackwardArgs, BackwardPlan, BackwardWorkspace, run_backward};
pub use cascade::{CascadeArgs, CascadePlan, CascadeWorkspace, KvArgs, run_cascade};
pub use cpu::detect::{Isa, Machine};
pub use extras::{Bias, BiasStrides, BlockMask, DropoutKey, Extras, TreeMask};
pub use plan::{Kernel, Limits, Plan};
pub use problem::{BlockShape, KvLayout, Problem, Scores};
pub use run::{Args, Strides, run};
pub use scales::KvScales;
pub use workspace::Workspace;
