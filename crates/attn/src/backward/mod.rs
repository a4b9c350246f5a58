//! The gradients of attention: scores are recomputed from q, k and lse; a problem becomes a plan, the plan runs over a workspace.
//!
//! ```text
//! p  = exp(scale · q·k − lse)              delta = rowsum(d_out · out) − d_lse
//! ds = scale · p · (d_out·v − delta)       dv = pᵀ · d_out     dk = dsᵀ · q     dq = ds · k
//! ```
//! (FlashAttention-2, arXiv 2307.08691, section 3.2.) K, V and their gradients lie contiguous or in pages.

pub(crate) mod check;
mod pages;
pub mod plan;
pub mod run;
pub mod workspace;

pub use plan::BackwardPlan;
pub use run::{BackwardArgs, run_backward};
pub use workspace::BackwardWorkspace;
