//! Launch of `kernels/attention/decode_mla.cu`: decode of multi-head latent attention, one kv head of 576 elements whose first 512 are the
//! values. Not here: the projections around it.
use super::Operand;
use crate::driver::{Address, Gpu};
use crate::tensor_map::encode;
use crate::{Dtype, Error};
use std::ffi::c_void;

/// Elements of a key; its first [`VALUES`] are the value.
pub const KEYS: u32 = 576;
/// Elements of a value and of an output row.
pub const VALUES: u32 = 512;
/// Most parts of one sequence.
const PARTS_MAX: u32 = 64;

/// Everything one launch needs. Lengths and page tables are read on the device.
#[derive(Clone, Copy, Debug)]
pub struct MlaDecode {
    /// `[batch * seqlen_q, num_q_heads, 576]` bf16; the rows of a token follow each other, and the tokens.
    pub q: Operand,
    /// `[pages, page_size, 576]` bf16, a multiple of 16 bytes.
    pub kv: Address,
    /// Between pages, in elements.
    pub page_stride: u64,
    /// Between tokens, in elements.
    pub token_stride: u64,
    /// `[batch * seqlen_q, num_q_heads, 512]` bf16, contiguous.
    pub o: Address,
    /// `[num_q_heads, batch * seqlen_q]` f32, natural logarithm.
    pub lse: Address,
    /// `[batch]` i32, the queries' own tokens included.
    pub seqlens_k: Address,
    /// `[batch, pages_max]` i32.
    pub page_table: Address,
    /// `partial_bytes`; one per stream.
    pub partial: Address,
    /// Pages of kv.
    pub num_pages: u32,
    /// Tokens a page, a multiple of 16.
    pub page_size: u32,
    /// Row length of the page table.
    pub pages_max: u32,
    /// Sequences.
    pub batch: u32,
    /// Query tokens a sequence; each sees the keys up to its own.
    pub seqlen_q: u32,
    /// Query heads.
    pub num_q_heads: u32,
    /// Positive; of the scores.
    pub softmax_scale: f32,
}

/// How one launch is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaPlan {
    /// Of each sequence's keys; more than one are added up by a second kernel.
    pub parts: u32,
}

impl std::fmt::Display for MlaPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "latent, 64 rows a block, {} parts a sequence", self.parts)
    }
}

/// Mirrors `MlaParams` of the kernel.
#[repr(C)]
struct Params {
    o: Address,
    lse: Address,
    seqlens_k: Address,
    page_table: Address,
    partial: Address,
    batch: i32,
    seqlen_q: i32,
    num_q_heads: i32,
    page_size: i32,
    pages_max: i32,
    piece_rows: i32,
    parts: i32,
    scale_log2: f32,
}

impl MlaDecode {
    fn rows(&self) -> u32 {
        self.seqlen_q * self.num_q_heads
    }

    /// The layout for a device with `num_sms` multiprocessors, from shapes alone: a captured launch stays right when lengths change.
    pub fn plan(&self, num_sms: u32) -> MlaPlan {
        let units = (self.rows().div_ceil(64) * self.batch).max(1);
        let tiles = (u64::from(self.pages_max) * u64::from(self.page_size)).div_ceil(64);
        let useful = u32::try_from(tiles / 4).unwrap_or(u32::MAX).clamp(1, PARTS_MAX);
        MlaPlan { parts: (num_sms / units).clamp(1, useful) }
    }

    /// Bytes of `partial` under `plan`.
    pub fn partial_bytes(&self, plan: MlaPlan) -> u64 {
        let records = u64::from(self.batch) * u64::from(plan.parts) * u64::from(self.rows());
        if plan.parts == 1 { 0 } else { records * u64::from(VALUES + 4) * 4 }
    }

    fn check(&self, plan: MlaPlan) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if self.num_q_heads == 0 || self.seqlen_q == 0 || self.rows() > 1 << 20 {
            let asked = format!("{} query heads, {} tokens", self.num_q_heads, self.seqlen_q);
            return bad("num_q_heads", asked, "1 to 2^20 rows a sequence");
        }
        if self.page_size == 0 || !self.page_size.is_multiple_of(16) {
            return bad("page_size", self.page_size.to_string(), "multiples of 16 tokens");
        }
        if self.q.token_stride != self.q.head_stride * u64::from(self.num_q_heads) {
            let asked = format!("strides {} and {}", self.q.token_stride, self.q.head_stride);
            return bad("q", asked, "tokens that follow each other like their heads");
        }
        if self.batch > 65_535 || self.rows().div_ceil(64) > 65_535 {
            return bad("batch", self.batch.to_string(), "at most 65,535 sequences");
        }
        if !(1..=PARTS_MAX).contains(&plan.parts) {
            return bad("plan", format!("{} parts", plan.parts), "1 to 64 parts");
        }
        let scale = self.softmax_scale;
        if !(scale > 0.0 && (scale * std::f32::consts::LOG2_E).is_finite()) {
            return bad("softmax_scale", scale.to_string(), "positive and finite");
        }
        Ok(())
    }

    /// Puts the kernels of `plan` on the device's stream.
    ///
    /// # Safety
    /// Every address covers its shape until the stream has run the kernels; every page id that a sequence's length reaches is below
    /// `num_pages`; lengths are at most `pages_max * page_size`.
    pub unsafe fn launch(&self, gpu: &Gpu, plan: MlaPlan) -> Result<(), Error> {
        self.check(plan)?;
        if self.batch == 0 {
            return Ok(());
        }
        let piece_rows = if self.page_size.is_multiple_of(64) { 64 } else { 16 };
        let q_rows = u64::from(self.batch) * u64::from(self.rows());
        let dim = u64::from(KEYS);
        let head_stride = self.q.head_stride;
        let mut q = encode(
            Dtype::Bf16,
            self.q.address,
            &[dim, q_rows, 1],
            &[head_stride, head_stride * q_rows],
            &[64, 64, 1],
        )?;
        let kv_dims = [dim, u64::from(self.page_size), u64::from(self.num_pages)];
        let kv_strides = [self.token_stride, self.page_stride];
        let mut kv = encode(Dtype::Bf16, self.kv, &kv_dims, &kv_strides, &[64, piece_rows, 1])?;
        let mut params = Params {
            o: self.o,
            lse: self.lse,
            seqlens_k: self.seqlens_k,
            page_table: self.page_table,
            partial: self.partial,
            batch: self.batch as i32,
            seqlen_q: self.seqlen_q as i32,
            num_q_heads: self.num_q_heads as i32,
            page_size: self.page_size as i32,
            pages_max: self.pages_max as i32,
            piece_rows: piece_rows as i32,
            parts: plan.parts as i32,
            scale_log2: self.softmax_scale * std::f32::consts::LOG2_E,
        };
        let [rows, smem]: [u32; 2] = gpu.constants("decode_mla", "decode_mla_tiling")?;
        let kernel = gpu.kernel("decode_mla", "decode_mla", smem)?;
        let grid = (plan.parts, self.rows().div_ceil(rows), self.batch);
        let mut args: [*mut c_void; 3] =
            [(&raw mut q).cast(), (&raw mut kv).cast(), (&raw mut params).cast()];
        // SAFETY: the three values are the kernel's parameters in order; the caller vouches for the addresses.
        unsafe { gpu.launch(kernel, grid, 384, smem, &mut args) }?;
        if plan.parts > 1 {
            let merge = gpu.kernel("decode_mla", "decode_mla_merge", 0)?;
            let mut args: [*mut c_void; 1] = [(&raw mut params).cast()];
            // SAFETY: as above; it reads what the kernel before it has written.
            unsafe { gpu.launch(merge, (self.rows(), self.batch, 1), VALUES / 4, 0, &mut args) }?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fill_the_device_and_never_starve() {
        let asked = |batch, heads, keys: u32| MlaDecode {
            q: Operand { address: 0, token_stride: 0, head_stride: 0 },
            kv: 0,
            page_stride: 0,
            token_stride: 0,
            o: 0,
            lse: 0,
            seqlens_k: 0,
            page_table: 0,
            partial: 0,
            num_pages: 1,
            page_size: 64,
            pages_max: keys / 64,
            batch,
            seqlen_q: 1,
            num_q_heads: heads,
            softmax_scale: 1.0,
        };
        for (batch, heads, keys, parts) in [
            (1, 128, 32_768, 64),
            (1, 128, 512, 2),
            (16, 128, 32_768, 4),
            (128, 128, 4096, 1),
            (8, 16, 64, 1),
        ] {
            assert_eq!(asked(batch, heads, keys).plan(132).parts, parts, "{batch} {heads} {keys}");
        }
    }
}
