//! Runs a model: one step takes new tokens of several sequences through all layers over a paged KV cache.
//!
//! Decides nothing about requests: which tokens run, which pages they own and what is sampled is the caller's.

mod arena;
mod batch;
mod executor;
mod experts;
mod latent;
mod layer;
mod near;
mod rows;
mod times;

pub use batch::{ExecOptions, LogitRows, StepBatch, StepSeq};
pub use executor::{Executor, MAX_LOGIT_ROWS};
pub use near::{KvLayer, kv_layers};
pub use times::{Op, OpTimes};
