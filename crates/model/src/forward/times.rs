//! Where a step's time goes, by kind of operation. Off by default: then a step reads no clock.

use std::fmt;
use std::time::{Duration, Instant};

/// Kinds of operation in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Token ids to rows.
    Embed,
    /// RMS norms, and packing or quantising their result for the products that follow.
    Norm,
    /// Query, key and value products.
    Qkv,
    /// Rotary positions.
    Rope,
    /// Appending keys and values to the cache.
    Write,
    /// Attention, its plan for the step included.
    Attn,
    /// Output projection.
    O,
    /// Gate and up products.
    GateUp,
    /// The gate's activation.
    Silu,
    /// Down product.
    Down,
    /// Output head.
    LmHead,
}

impl Op {
    /// Every kind, in the order of a step.
    pub const ALL: [Op; 11] = [
        Op::Embed,
        Op::Norm,
        Op::Qkv,
        Op::Rope,
        Op::Write,
        Op::Attn,
        Op::O,
        Op::GateUp,
        Op::Silu,
        Op::Down,
        Op::LmHead,
    ];
}

/// Time spent so far, by kind of operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpTimes {
    spent: [Duration; Op::ALL.len()],
}

impl OpTimes {
    /// Time spent in `op`.
    pub fn get(&self, op: Op) -> Duration {
        self.spent[op as usize]
    }

    /// Time spent in all operations.
    pub fn total(&self) -> Duration {
        self.spent.iter().sum()
    }
}

impl fmt::Display for OpTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.total().as_secs_f64();
        for op in Op::ALL {
            let t = self.get(op).as_secs_f64();
            let share = if total > 0.0 { 100.0 * t / total } else { 0.0 };
            write!(f, "{}{op:?} {:.2} ms ({share:.1} %)", if op == Op::Embed { "" } else { ", " }, t * 1e3)?;
        }
        Ok(())
    }
}

/// A stopwatch that may be off.
#[derive(Default)]
pub(super) struct Watch {
    on: Option<(OpTimes, Instant)>,
}

impl Watch {
    /// Starts counting from zero, or stops counting.
    pub(super) fn enable(&mut self, on: bool) {
        self.on = on.then(|| (OpTimes::default(), Instant::now()));
    }

    /// Begins a stretch of operations.
    pub(super) fn start(&mut self) {
        if let Some((_, last)) = &mut self.on {
            *last = Instant::now();
        }
    }

    /// Books the time since the last mark to `op`.
    pub(super) fn mark(&mut self, op: Op) {
        if let Some((times, last)) = &mut self.on {
            let now = Instant::now();
            times.spent[op as usize] += now - *last;
            *last = now;
        }
    }

    pub(super) fn times(&self) -> Option<OpTimes> {
        self.on.map(|(times, _)| times)
    }
}
