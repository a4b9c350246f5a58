//! What a transport must do for a plan to run on it, and what it returns when a rank is lost.

use std::time::Duration;

/// One rank's end of the messages. Calls come in the order of a step: `begin`, then every `send` and `expect`, then `progress` now and then
/// while kernels run, then `recv` in the order of `expect`, then `sent`. Messages of a pair of ranks arrive in the order they are sent in.
///
/// Every wait has a deadline; once a rank is lost, every call returns its [`Fault`]. A transport over a network of devices may hold back what
/// `send` and `expect` hand in until the first `progress` or `recv`, and start it as one group.
pub trait Transport {
    /// Memory that a message lies in, on the host or on a device.
    type Message;

    /// Most numbers of one message; `run_rank` refuses plans with longer ones.
    const MAX_NUMBERS: usize = usize::MAX;

    /// The rank begins step `step`.
    fn begin(&mut self, step: usize) -> Result<(), Fault>;
    /// Starts a message to `peer`. Does not wait.
    fn send(&mut self, peer: usize, message: Self::Message) -> Result<(), Fault>;
    /// Makes room for the next message from `peer`, of so many numbers. Does not wait.
    fn expect(&mut self, peer: usize, numbers: usize) -> Result<(), Fault>;
    /// Lets messages move on where the transport has no thread of its own for it.
    fn progress(&mut self);
    /// The next message from `peer`.
    fn recv(&mut self, peer: usize) -> Result<Self::Message, Fault>;
    /// Waits until all that was sent in this step has left its memory.
    fn sent(&mut self) -> Result<(), Fault>;
    /// The rank is through with its `steps` steps; returns when all ranks are.
    fn finish(&mut self, steps: usize) -> Result<(), Fault>;
}

/// How a rank was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// It did not answer in time.
    TimedOut,
    /// Its thread ended before its work did.
    Died,
}

/// What a rank returns when it, or another one, was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "rank {rank}, step {step}: waited for rank {peer}; rank {lost} was lost in its step {lost_step} ({kind:?}, time-out {timeout:?})"
)]
pub struct Fault {
    /// Who says so.
    pub rank: usize,
    /// In which step; one past the last is the wait for all others' ends.
    pub step: usize,
    /// Whom it waited for.
    pub peer: usize,
    /// Who was lost.
    pub lost: usize,
    /// In which step that one was.
    pub lost_step: usize,
    /// How it was lost.
    pub kind: FaultKind,
    /// The deadline of every wait.
    pub timeout: Duration,
}
