//! Continuous batching: requests in, tokens out, over one paged KV cache and one token budget per step.
//!
//! Knows no HTTP and no JSON. The scheduler has no clock, thread or device; the engine has no thread; only `handle` has both.

mod batch;
mod door;
mod handle;
pub mod logprobs;
mod options;
mod output;
pub mod params;
mod request;
mod rng;
mod runner;
pub mod sample;
pub mod scheduler;
mod sequence;
mod stats;
mod step;
pub mod stop;
mod stream;
mod tiers;

pub use door::Door;
pub use handle::{EngineHandle, HandleOptions, Shutdown, SubmitError};
pub use options::{DEFAULT_MAX_MODEL_LEN, EngineOptions, KvSizing, WindowSizing};
pub use params::SamplingParams;
pub use request::{Event, FinishReason, Request, RequestBooks, RequestError, RequestKey, StopReason};
pub use runner::StepModel;
pub use stats::{EngineStats, Totals};
pub use step::Engine;
pub use stream::{Stream, TimedOut};
pub use suanpan_cache::tier::folder_secret;
pub use tiers::LowerTiers;
