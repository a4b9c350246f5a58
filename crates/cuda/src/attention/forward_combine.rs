//! Launch of `kernels/attention/forward_combine.cu`: o and lse of all keys from those of their parts.
use super::forward::{Forward, Splits};
use crate::driver::{Address, Gpu};
use crate::{Dtype, Error};
use std::ffi::c_void;

/// Mirrors `CombineParams` of `kernels/attention/forward_combine.cu`.
#[repr(C)]
struct Combine {
    partial_o: Address,
    partial_lse: Address,
    o: Address,
    lse: Address,
    o_token_stride: i64,
    o_head_stride: i64,
    splits: i32,
    heads: i32,
    total_q: i32,
    head_dim_v: i32,
    fp16: i32,
}

impl Forward {
    /// o and lse of the parts.
    pub(super) fn partials(&self, splits: Splits) -> (Address, Address) {
        let rows = u64::from(self.total_q) * u64::from(self.num_q_heads) * u64::from(splits.count);
        (splits.partial, splits.partial + rows * u64::from(self.head_dim_v) * 4)
    }

    /// # Safety
    /// As [`Forward::launch`].
    pub(super) unsafe fn combine(&self, gpu: &Gpu, splits: Splits) -> Result<(), Error> {
        let (partial_o, partial_lse) = self.partials(splits);
        let mut params = Combine {
            partial_o,
            partial_lse,
            o: self.o.address,
            lse: self.lse,
            o_token_stride: self.o.token_stride as i64,
            o_head_stride: self.o.head_stride as i64,
            splits: splits.count as i32,
            heads: self.num_q_heads as i32,
            total_q: self.total_q as i32,
            head_dim_v: self.head_dim_v as i32,
            fp16: i32::from(self.dtype == Dtype::Fp16),
        };
        let rows = u64::from(self.total_q) * u64::from(self.num_q_heads);
        let kernel = gpu.kernel("combine", "forward_combine", 0)?;
        let mut args: [*mut c_void; 1] = [(&raw mut params).cast()];
        // SAFETY: the value is the kernel's only parameter; a block has 8 rows of 32 threads.
        unsafe { gpu.launch(kernel, (rows.div_ceil(8) as u32, 1, 1), 256, 0, &mut args) }
    }
}
