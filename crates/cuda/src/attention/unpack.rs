//! Launch of `kernels/attention/unpack.cu`: quantised pages as bf16 rows one after another, for the 16-bit forward.
use super::decode::KvType;
use super::forward::Paged;
use super::token_rows;
use crate::Error;
use crate::driver::{Address, Gpu};
use std::ffi::c_void;

/// Everything one launch needs.
#[derive(Clone, Copy, Debug)]
pub struct Unpack {
    /// Quantised keys and values with their scales, k and v with the same strides; a token whose page is not below `num_pages` is left out.
    pub cache: Paged,
    /// Of the pages: not bf16.
    pub kv_type: KvType,
    /// `[tokens, num_kv_heads, head_dim]` bf16, contiguous: where keys go.
    pub k: Address,
    /// As k.
    pub v: Address,
    /// `[batch + 1]` i32.
    pub cu_seqlens_k: Address,
    /// `[batch]` i32: the first token of each sequence that is written.
    pub starts: Address,
    /// Of all sequences.
    pub tokens: u32,
    /// Sequences.
    pub batch: u32,
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// 64, 128 or 256.
    pub head_dim: u32,
}

/// Mirrors `UnpackParams` of the kernel.
#[repr(C)]
struct Params {
    pages: [Address; 2],
    page_stride: i64,
    token_stride: i64,
    head_stride: i64,
    scales: [Address; 2],
    scale_page_stride: i64,
    scale_token_stride: i64,
    scale_head_stride: i64,
    rows: [Address; 2],
    cu_seqlens_k: Address,
    starts: Address,
    page_table: Address,
    tokens: i32,
    heads: i32,
    batch: i32,
    page_size: i32,
    table_row: i32,
    num_pages: i32,
    parts: i32,
}

impl Unpack {
    /// Puts the kernel on the device's stream.
    ///
    /// # Safety
    /// Every address covers its shape until the stream has run the kernel.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        if self.kv_type == KvType::Bf16 {
            let supported = "e4m3, int8, int4";
            return Err(Error::Unsupported { field: "kv_type", asked: "bf16".into(), supported });
        }
        let shape = (self.tokens, self.num_kv_heads, self.head_dim);
        let [page_stride, token_stride, head_stride] = self.cache.row_strides(self.kv_type, shape)?;
        if self.tokens == 0 || self.batch == 0 {
            return Ok(());
        }
        let (parts, blocks) = token_rows(gpu.num_sms, shape);
        let scales = self.cache.k.scales;
        let mut params = Params {
            pages: [self.cache.k.address, self.cache.v.address],
            page_stride,
            token_stride,
            head_stride,
            scales: [scales.address, self.cache.v.scales.address],
            scale_page_stride: scales.page_stride as i64,
            scale_token_stride: scales.token_stride as i64,
            scale_head_stride: scales.head_stride as i64,
            rows: [self.k, self.v],
            cu_seqlens_k: self.cu_seqlens_k,
            starts: self.starts,
            page_table: self.cache.page_table,
            tokens: self.tokens as i32,
            heads: self.num_kv_heads as i32,
            batch: self.batch as i32,
            page_size: self.cache.page_size as i32,
            table_row: self.cache.pages_max as i32,
            num_pages: self.cache.num_pages as i32,
            parts,
        };
        let kernel = gpu.kernel("unpack", &format!("unpack_{}_{}", self.head_dim, self.kv_type.name()), 0)?;
        let mut args: [*mut c_void; 1] = [(&raw mut params).cast()];
        // SAFETY: the value is the kernel's only parameter; the caller vouches for the addresses.
        unsafe { gpu.launch(kernel, (blocks, 1, 1), 256, 0, &mut args) }
    }
}
