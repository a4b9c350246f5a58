//! Launch of `kernels/attention/quantise.cu`: bf16 rows to e4m3 or 8-bit integers, with one scale a row or a (sequence, kv head), rotated where asked.
use super::Operand;
use crate::Error;
use crate::driver::{Address, Gpu};
use std::ffi::c_void;

/// What a scale is shared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grain {
    /// Nothing: `scales` is `[heads, tokens]`. What the e4m3 forward takes of queries.
    Row,
    /// The rows of a sequence and of `group_size` heads: `scales` is `[batch, heads / group_size]`.
    Sequence {
        /// Heads that share a scale.
        group_size: u32,
        /// `[batch + 1]` i32.
        cu_seqlens: Address,
        /// Sequences.
        batch: u32,
    },
}

/// Everything one launch needs.
#[derive(Clone, Copy, Debug)]
pub struct Quantise {
    /// `[tokens, heads, head_dim]` bf16.
    pub x: Operand,
    /// `[tokens, heads, head_dim]` e4m3 or 8-bit integers, contiguous.
    pub codes: Address,
    /// f32, of the grain's shape: what codes are multiplied by.
    pub scales: Address,
    /// What a scale is shared by.
    pub grain: Grain,
    /// Of all sequences.
    pub tokens: u32,
    /// Of x.
    pub heads: u32,
    /// 64, 128 or 256.
    pub head_dim: u32,
    /// Turn every row by the Hadamard matrix first: q and k alike, or products change.
    pub rotate: bool,
    /// Codes are integers from -127 to 127 instead of e4m3.
    pub int8: bool,
}

/// Mirrors `QuantiseParams` of the kernel.
#[repr(C)]
struct Params {
    x: Address,
    codes: Address,
    scales: Address,
    cu_seqlens: Address,
    token_stride: i64,
    head_stride: i64,
    tokens: i32,
    heads: i32,
    group_size: i32,
    batch: i32,
    rotate: i32,
    int8: i32,
}

impl Quantise {
    /// Puts the kernels on the device's stream.
    ///
    /// # Safety
    /// The addresses cover their shapes until the stream has run the kernels.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if ![64, 128, 256].contains(&self.head_dim) {
            return bad("head_dim", self.head_dim.to_string(), "64, 128, 256");
        }
        let (group_size, cu_seqlens, batch) = match self.grain {
            Grain::Row => (1, 0, 1),
            Grain::Sequence { group_size, cu_seqlens, batch } => (group_size, cu_seqlens, batch),
        };
        if group_size == 0 || !self.heads.is_multiple_of(group_size) {
            let asked = format!("{group_size} in {} heads", self.heads);
            return bad("group_size", asked, "a divisor of heads");
        }
        if self.tokens == 0 || batch == 0 {
            return Ok(());
        }
        let mut params = Params {
            x: self.x.address,
            codes: self.codes,
            scales: self.scales,
            cu_seqlens,
            token_stride: self.x.token_stride as i64,
            head_stride: self.x.head_stride as i64,
            tokens: self.tokens as i32,
            heads: self.heads as i32,
            group_size: group_size as i32,
            batch: batch as i32,
            rotate: i32::from(self.rotate),
            int8: i32::from(self.int8),
        };
        let grid = (gpu.num_sms * 8, 1, 1);
        let mut args: [*mut c_void; 1] = [(&raw mut params).cast()];
        let dim = self.head_dim;
        if self.grain == Grain::Row {
            let rows = gpu.kernel("quantise", &format!("rows_{dim}"), 0)?;
            // SAFETY: the value is the kernel's parameter; the caller vouches for the addresses.
            return unsafe { gpu.launch(rows, grid, 256, 0, &mut args) };
        }
        let mut n = (batch * (self.heads / group_size)) as i32;
        let mut scales = self.scales;
        let mut top = if self.int8 { 127f32 } else { 448.0 };
        let mut scale_args: [*mut c_void; 3] =
            [(&raw mut scales).cast(), (&raw mut n).cast(), (&raw mut top).cast()];
        let largest = gpu.kernel("quantise", &format!("largest_{dim}"), 0)?;
        let codes = gpu.kernel("quantise", &format!("codes_{dim}"), 0)?;
        let finish = gpu.kernel("quantise", "scales_of_largest", 0)?;
        // SAFETY: the values are the kernels' parameters in order; the caller vouches for the addresses.
        unsafe {
            gpu.fill(scales, n as u64, 0)?;
            gpu.launch(largest, grid, 256, 0, &mut args)?;
            gpu.launch(codes, grid, 256, 0, &mut args)?;
            gpu.launch(finish, (1, 1, 1), 256, 0, &mut scale_args)
        }
    }
}
