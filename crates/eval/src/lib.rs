//! Evidence: a maximum length is not a capability. Tasks with known answers, scorers that prove themselves, runs against any
//! endpoint with their complete conditions, reports.
//!
//! The path of one measured answer: [`task::Task::item`] → an endpoint → [`task::Task::score`] → statistics → report. Tasks know no
//! endpoint and endpoints know no task: [`item`] is what passes between them.

pub mod compare;
pub mod conditions;
pub mod corpus;
pub mod count;
pub mod endpoint;
pub mod error;
pub mod item;
pub mod load;
pub mod loaders;
pub mod pack;
pub mod report;
pub mod rng;
pub mod run;
pub mod score;
pub mod scripted;
pub mod stats;
pub mod task;
pub mod tasks;

pub use error::EvalError;
