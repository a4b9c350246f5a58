//! Numbers with what they can carry: intervals, tests on the same items, percentiles with their floors, readings of one raw log.

pub mod bootstrap;
pub mod cost;
pub mod effective;
pub mod paired;
pub mod percentile;
pub mod proportion;
pub mod serving;

use serde::{Deserialize, Serialize};

/// A value with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The value.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}
