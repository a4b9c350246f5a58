//! Attention kernels, one file per kernel source in `kernels/attention`.
pub mod append;
pub mod decode;
pub mod decode_cascade;
mod decode_cluster;
mod decode_line;
pub mod decode_mla;
pub mod forward;
mod forward_combine;
pub mod forward_fp8;
mod forward_params;
pub mod quantise;
pub mod unpack;

use crate::driver::Address;

/// A [tokens, heads, head_dim] operand: head_dim is contiguous, the other strides are in elements.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Of the first element, a multiple of 16 bytes.
    pub address: Address,
    /// Between tokens, in elements.
    pub token_stride: u64,
    /// Between heads, in elements.
    pub head_stride: u64,
}
