//! OpenAI's HTTP API over the engine: routes, strict JSON, event streams, keys, metrics, the built-in page.
//!
//! The only room that knows HTTP and JSON. It schedules nothing, samples nothing and loads no model.

pub mod app;
pub mod auth;
mod books;
pub mod capabilities;
mod collect;
pub mod error;
mod http;
mod logprobs;
mod metrics;
mod prompt;
mod routes;
mod run;
pub mod serve;
mod stream;
pub mod wire;

pub use app::{App, EngineFacts, ServerOptions};
pub use auth::Keys;
pub use capabilities::Capability;
pub use error::ApiError;
pub use routes::router;
pub use serve::{Ending, run_until_signal, serve};
