//! What the checker can find wrong with a plan, each by rank, step and place.

use crate::plan::What;

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    /// A number that names no rank, buffer or head, or rows of the wrong kind.
    #[error("rank {rank}, step {step}: {what}")]
    Malformed {
        /// Whose step.
        rank: usize,
        /// Which step.
        step: usize,
        /// What does not fit.
        what: String,
    },
    /// A tile with a pair that the mask hides.
    #[error("rank {rank}, step {step}: query {query} may not see all keys of the tile")]
    Hidden {
        /// Whose step.
        rank: usize,
        /// Which step.
        step: usize,
        /// Global position.
        query: usize,
    },
    /// A pair that two tiles hold.
    #[error("query {query}, head {head}: key {key} is worked on twice")]
    Twice {
        /// Global position.
        query: usize,
        /// Query head.
        head: usize,
        /// Global position.
        key: usize,
    },
    /// Pairs that no tile holds.
    #[error("query {query}, head {head}: {worked} keys worked on, {visible} visible")]
    Missed {
        /// Global position.
        query: usize,
        /// Query head.
        head: usize,
        /// Keys in tiles.
        worked: usize,
        /// Keys under the mask.
        visible: usize,
    },
    /// Message number `number` from one rank to another is not what the other expects, or only one of them knows of it.
    #[error("message {number} from rank {from} to rank {to}: sent {sent}, expected {expected}")]
    Unmatched {
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// In order, from 0.
        number: usize,
        /// What the sender sends.
        sent: String,
        /// What the receiver expects.
        expected: String,
    },
    /// Ranks that wait for each other for ever, with their steps.
    #[error("ranks wait in a circle: (rank, step) {0:?}")]
    CyclicWait(Vec<(usize, usize)>),
    /// A region is written while a message or a kernel of the same step may read or write it.
    #[error("rank {rank}, step {step}: buffer {buffer} is rewritten while in use")]
    Rewritten {
        /// Whose step.
        rank: usize,
        /// Which step.
        step: usize,
        /// Number of the buffer.
        buffer: usize,
    },
    /// Something is read, or added to, that is not there.
    #[error("rank {rank}, step {step}: buffer {buffer} does not hold head {head} of parcel {parcel}")]
    Absent {
        /// Whose step.
        rank: usize,
        /// Which step.
        step: usize,
        /// Number of the buffer.
        buffer: usize,
        /// Whose tokens.
        parcel: usize,
        /// Which head.
        head: usize,
    },
    /// A part of a result is added twice.
    #[error("rank {rank}, step {step}: a part of parcel {parcel}'s result is added twice to buffer {buffer}")]
    AddedTwice {
        /// Whose step.
        rank: usize,
        /// Which step.
        step: usize,
        /// Number of the buffer.
        buffer: usize,
        /// Whose result.
        parcel: usize,
    },
    /// A result lacks parts, or has foreign ones, after the last step.
    #[error(
        "rank {rank}: head {head} of its {what:?} has {have} parts at the end, {want} were computed for it"
    )]
    Incomplete {
        /// Whose result.
        rank: usize,
        /// Which result.
        what: What,
        /// Which head.
        head: usize,
        /// Parts there.
        have: usize,
        /// Parts computed.
        want: usize,
    },
    /// A rank sends other than the ledger says.
    #[error("rank {rank} sends {planned} bytes; the ledger says {ledger}")]
    Bytes {
        /// Whose books.
        rank: usize,
        /// In the plan.
        planned: u64,
        /// By the formula.
        ledger: u64,
    },
}
