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

/// How `kernels/common/token_rows.cuh` shares out the rows of K and V of `tokens` tokens: parts of a token, and blocks of 256 threads.
fn token_rows(num_sms: u32, (tokens, num_kv_heads, head_dim): (u32, u32, u32)) -> (i32, u32) {
    let rows_a_warp = 32 / (head_dim / 8);
    let (most, warps) = ((2 * num_kv_heads).div_ceil(rows_a_warp), num_sms * 64);
    let parts = (warps / tokens.max(1)).clamp(1, most);
    let units = u64::from(tokens) * u64::from(parts);
    (parts as i32, units.div_ceil(8).min(u64::from(num_sms) * 8) as u32)
}
