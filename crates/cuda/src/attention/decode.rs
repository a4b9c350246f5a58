//! Launch of `kernels/attention/decode.cu`: a few query rows per sequence over a paged bf16 KV cache.
use super::Operand;
use crate::driver::{Address, Gpu};
use crate::tensor_map::encode;
use crate::{Dtype, Error};
use std::ffi::c_void;

/// A paged K or V cache: [pages, page_size, num_kv_heads, head_dim], strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// Of the first element, a multiple of 16 bytes.
    pub address: Address,
    /// Between pages, in elements.
    pub page_stride: u64,
    /// Between tokens, in elements.
    pub token_stride: u64,
    /// Between heads, in elements.
    pub head_stride: u64,
}

/// Everything one launch needs. Lengths and page tables are read on the device: a captured launch follows their changes.
#[derive(Clone, Copy, Debug)]
pub struct Decode {
    /// `[batch * seqlen_q, num_q_heads, head_dim]`.
    pub q: Operand,
    /// As many heads as v; rows as long as q's.
    pub k: Pages,
    /// As k.
    pub v: Pages,
    /// `[batch * seqlen_q, num_q_heads, head_dim]`, contiguous.
    pub o: Address,
    /// `[num_q_heads, batch * seqlen_q]` f32, natural logarithm.
    pub lse: Address,
    /// `[batch]` i32, the queries' own tokens included.
    pub seqlens_k: Address,
    /// `[batch, pages_max]` i32.
    pub page_table: Address,
    /// `partial_bytes`, all bits one before the first launch, left so; one per stream.
    pub partial: Address,
    /// Pages of each of k and v.
    pub num_pages: u32,
    /// Tokens a page, a multiple of 16.
    pub page_size: u32,
    /// Row length of the page table.
    pub pages_max: u32,
    /// Sequences.
    pub batch: u32,
    /// Query tokens a sequence; with the group size at most 64 rows.
    pub seqlen_q: u32,
    /// A multiple of num_kv_heads.
    pub num_q_heads: u32,
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// Elements a head.
    pub head_dim: u32,
    /// Positive; usually 1 / sqrt(head_dim).
    pub softmax_scale: f32,
}

/// Mirrors `DecodeParams` of the kernel.
#[repr(C)]
struct Params {
    o: Address,
    lse: Address,
    seqlens_k: Address,
    page_table: Address,
    partial: Address,
    batch: i32,
    seqlen_q: i32,
    num_kv_heads: i32,
    group_size: i32,
    page_size: i32,
    pages_max: i32,
    piece_rows: i32,
    scale_log2: f32,
}

/// Rows of one unit: the query tokens of a sequence times the heads that share a kv head.
const ROWS_MAX: u32 = 64;

/// Parts of one unit are merged in groups of eight, at most 32 groups.
const PARTS_MAX: u32 = 256;

impl Decode {
    fn rows(&self) -> u32 {
        self.seqlen_q * (self.num_q_heads / self.num_kv_heads.max(1))
    }

    /// One block for each kv head of each part of the work, as many parts as fit the device side by side.
    fn blocks(&self, num_sms: u32) -> u32 {
        (num_sms / self.num_kv_heads).clamp(1, PARTS_MAX) * self.num_kv_heads
    }

    /// Bytes of `partial` on a device with `num_sms` multiprocessors: each block leaves at most three partial results.
    pub fn partial_bytes(&self, num_sms: u32) -> u64 {
        3 * u64::from(self.blocks(num_sms)) * u64::from(self.rows()) * u64::from(self.head_dim + 4) * 4
    }

    fn check(&self) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if ![64, 128, 256].contains(&self.head_dim) {
            return bad("head_dim", self.head_dim.to_string(), "64, 128, 256");
        }
        if self.num_kv_heads == 0 || !self.num_q_heads.is_multiple_of(self.num_kv_heads) {
            let asked = format!("{} query heads on {} kv heads", self.num_q_heads, self.num_kv_heads);
            return bad("num_q_heads", asked, "a multiple of num_kv_heads");
        }
        if self.rows() == 0 || self.rows() > ROWS_MAX {
            return bad("seqlen_q * group_size", self.rows().to_string(), "1 to 64 rows");
        }
        if self.page_size == 0 || !self.page_size.is_multiple_of(16) {
            return bad("page_size", self.page_size.to_string(), "multiples of 16 tokens");
        }
        if !(self.softmax_scale > 0.0 && self.softmax_scale.is_finite()) {
            return bad("softmax_scale", self.softmax_scale.to_string(), "positive and finite");
        }
        Ok(())
    }

    /// Puts the kernel on the device's stream.
    ///
    /// # Safety
    /// Every address covers its shape until the stream has run the kernel; every page id that a sequence's length
    /// reaches is below `num_pages`; lengths are at most `pages_max * page_size`.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        self.check()?;
        if self.batch == 0 {
            return Ok(());
        }
        let (dim, group) = (u64::from(self.head_dim), self.num_q_heads / self.num_kv_heads);
        let piece_rows = if self.page_size.is_multiple_of(64) { 64 } else { 16 };
        let tokens = u64::from(self.batch) * u64::from(self.seqlen_q);
        let q_dims = [dim, u64::from(self.num_q_heads), tokens];
        let q_strides = [self.q.head_stride, self.q.token_stride];
        let mut q = encode(Dtype::Bf16, self.q.address, &q_dims, &q_strides, &[64, group, self.seqlen_q])?;
        let map = |x: &Pages| {
            let dims =
                [dim, u64::from(self.page_size), u64::from(self.num_kv_heads), u64::from(self.num_pages)];
            let strides = [x.token_stride, x.head_stride, x.page_stride];
            encode(Dtype::Bf16, x.address, &dims, &strides, &[64, piece_rows, 1, 1])
        };
        let (mut k, mut v) = (map(&self.k)?, map(&self.v)?);
        let mut params = Params {
            o: self.o,
            lse: self.lse,
            seqlens_k: self.seqlens_k,
            page_table: self.page_table,
            partial: self.partial,
            batch: self.batch as i32,
            seqlen_q: self.seqlen_q as i32,
            num_kv_heads: self.num_kv_heads as i32,
            group_size: group as i32,
            page_size: self.page_size as i32,
            pages_max: self.pages_max as i32,
            piece_rows: piece_rows as i32,
            scale_log2: self.softmax_scale * std::f32::consts::LOG2_E,
        };
        let cubin = format!("decode_{}_bf16", self.head_dim);
        let [_, smem] = gpu.constants(&cubin, "decode_tiling")?;
        let kernel = gpu.kernel(&cubin, "decode", smem)?;
        let mut args: [*mut c_void; 4] =
            [(&raw mut q).cast(), (&raw mut k).cast(), (&raw mut v).cast(), (&raw mut params).cast()];
        // SAFETY: the four values are the kernel's parameters in order; the caller vouches for the addresses.
        unsafe { gpu.launch(kernel, (self.blocks(gpu.num_sms), 1, 1), 256, smem, &mut args) }
    }
}
