//! Messages between devices through NCCL: found at run time, never waited for without a deadline, given up as a whole when a rank is lost.
//!
//! [`Library`] is a table of functions from a file of its own choice, because the wheels that bring NCCL hold `libnccl.so.2` alone and no loader path
//! names them. [`Communicator`] puts groups of messages on a stream. Not here: who sends what to whom (`suanpan-parallel` plans it), and how ranks
//! come to know the [`UniqueId`] of their job.
//!
//! Every call into NCCL is non-blocking: it may go on in the background, so each is followed until it is through, fails, or its time is up. After a
//! failure the communicator is aborted, which ends its kernels on the device, and refuses all further work.
mod communicator;
mod library;

pub use communicator::{Communicator, Message, Place, Way};
pub use library::{ENV, Library, UniqueId, Version};

use std::time::Duration;

/// What loading NCCL or talking over it can fail with. The messages say what the fields are.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No file could be loaded.
    #[error("no NCCL ({tried}); name its libnccl.so.2 by {ENV}")]
    NoLibrary { tried: String },
    /// The file is something else.
    #[error("{file} has no {symbol}: not NCCL, or one before {least}", least = Version::LEAST)]
    NoSymbol { file: String, symbol: &'static str },
    /// Older than what the structs here are of.
    #[error("{file} is NCCL {version}; supported: {least} and later", least = Version::LEAST)]
    TooOld { file: String, version: Version },
    /// An argument that NCCL would answer with a hang or a crash; nothing was started.
    #[error("{field}: {asked} asked; supported: {supported}")]
    Unsupported { field: &'static str, asked: String, supported: String },
    /// NCCL refused or failed; the communicator is aborted.
    #[error("{place}: {call} failed: {reason}")]
    Failed { place: Place, call: &'static str, reason: String },
    /// A call was not through in time: some rank did not come, or its device stands still. The communicator is aborted.
    #[error("{place}: {call} with {peers} was not through within {timeout:?}")]
    TimedOut { place: Place, call: &'static str, peers: String, timeout: Duration },
    /// The communicator was aborted before.
    #[error("{place}: {call} after the communicator was aborted")]
    Aborted { place: Place, call: &'static str },
}
