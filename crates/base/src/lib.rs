//! The vocabulary every other room shares: element types, lengths, masks, the (o, lse) merge, typed errors.
//!
//! No I/O, no threads, no clock, no device. Nothing here knows a model, a page or a kernel.

pub mod codes;
pub mod dtype;
pub mod error;
pub mod lse;
pub mod mask;
pub mod order_free;
pub mod shape;

pub use dtype::{Buf, BufMut, DType, ScaleGrain};
pub use error::BadArgument;
pub use mask::{Mask, Seen};
pub use shape::{HeadShape, SeqLen};
