//! Launch of `kernels/attention/append.cu`: new keys and values into the pages of a cache, of any type, keys turned where asked.
use super::Operand;
use super::decode::{KvType, Rotary};
use super::forward::Paged;
use super::token_rows;
use crate::Error;
use crate::driver::{Address, Gpu};
use std::ffi::c_void;

/// Everything one launch needs. Lengths and page ids are read on the device: a captured launch follows their changes.
#[derive(Clone, Copy, Debug)]
pub struct AppendRows {
    /// `[tokens, num_kv_heads, head_dim]` bf16: the last tokens of each sequence.
    pub k: Operand,
    /// As k.
    pub v: Operand,
    /// Where they go, k and v with the same strides; a token whose page is not below `num_pages` is written nowhere. Scales with a token stride
    /// of 0 stand already, positive and finite, and what is past the type's range under them becomes its largest number; the others are
    /// worked out and written: a row's largest size over the type's largest number.
    pub cache: Paged,
    /// Of the pages.
    pub kv_type: KvType,
    /// `[batch]` i32, the new tokens included.
    pub seqlens_k: Address,
    /// `[batch + 1]` i32; none: `tokens / batch` tokens a sequence.
    pub cu_seqlens_q: Option<Address>,
    /// Of all sequences.
    pub tokens: u32,
    /// Sequences.
    pub batch: u32,
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// 64, 128 or 256.
    pub head_dim: u32,
    /// Turns keys; positions count from a sequence's first key.
    pub rotary: Option<Rotary>,
}

/// Mirrors `AppendParams` of the kernel.
#[repr(C)]
struct Params {
    rows: [Address; 2],
    row_token_stride: [i64; 2],
    row_head_stride: [i64; 2],
    pages: [Address; 2],
    page_stride: i64,
    token_stride: i64,
    head_stride: i64,
    scales: [Address; 2],
    scale_page_stride: i64,
    scale_token_stride: i64,
    scale_head_stride: i64,
    seqlens_k: Address,
    cu_seqlens_q: Address,
    page_table: Address,
    cos: Address,
    sin: Address,
    tokens: i32,
    heads: i32,
    batch: i32,
    seqlen_q: i32,
    page_size: i32,
    table_row: i32,
    num_pages: i32,
    rotary: i32,
    interleaved: i32,
    parts: i32,
}

fn bad<T>(field: &'static str, asked: String, supported: &'static str) -> Result<T, Error> {
    Err(Error::Unsupported { field, asked, supported })
}

impl AppendRows {
    fn check(&self) -> Result<(), Error> {
        if self.cu_seqlens_q.is_none() && !self.tokens.is_multiple_of(self.batch.max(1)) {
            let asked = format!("{} of {} sequences", self.tokens, self.batch);
            return bad("tokens", asked, "as many for each sequence, or cu_seqlens_q");
        }
        for (field, x) in [("k", &self.k), ("v", &self.v)] {
            let strides = [x.token_stride, x.head_stride];
            if x.address == 0
                || !x.address.is_multiple_of(16)
                || strides.iter().any(|s| !s.is_multiple_of(8) || *s >= 1 << 40)
            {
                let asked = format!("{:#x}, strides {strides:?}", x.address);
                return bad(field, asked, "multiples of 16 bytes, strides under 2^40");
            }
        }
        if let Some(r) = self.rotary {
            r.check(self.head_dim)?;
        }
        Ok(())
    }

    /// Puts the kernel on the device's stream.
    ///
    /// # Safety
    /// Every address covers its shape until the stream has run the kernel, and no two new tokens share a place in the pages.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        self.check()?;
        let shape = (self.tokens, self.num_kv_heads, self.head_dim);
        let [page_stride, token_stride, head_stride] = self.cache.row_strides(self.kv_type, shape)?;
        if self.tokens == 0 || self.batch == 0 {
            return Ok(());
        }
        let of_rows = |n: u64| (2 * n) as i64;
        let (parts, blocks) = token_rows(gpu.num_sms, shape);
        let scales = self.cache.k.scales;
        let mut params = Params {
            rows: [self.k.address, self.v.address],
            row_token_stride: [of_rows(self.k.token_stride), of_rows(self.v.token_stride)],
            row_head_stride: [of_rows(self.k.head_stride), of_rows(self.v.head_stride)],
            pages: [self.cache.k.address, self.cache.v.address],
            page_stride,
            token_stride,
            head_stride,
            scales: [scales.address, self.cache.v.scales.address],
            scale_page_stride: scales.page_stride as i64,
            scale_token_stride: scales.token_stride as i64,
            scale_head_stride: scales.head_stride as i64,
            seqlens_k: self.seqlens_k,
            cu_seqlens_q: self.cu_seqlens_q.unwrap_or(0),
            page_table: self.cache.page_table,
            cos: self.rotary.map_or(0, |r| r.cos),
            sin: self.rotary.map_or(0, |r| r.sin),
            tokens: self.tokens as i32,
            heads: self.num_kv_heads as i32,
            batch: self.batch as i32,
            seqlen_q: (self.tokens / self.batch) as i32,
            page_size: self.cache.page_size as i32,
            table_row: self.cache.pages_max as i32,
            num_pages: self.cache.num_pages as i32,
            rotary: self.rotary.map_or(0, |r| r.dim as i32),
            interleaved: i32::from(self.rotary.is_some_and(|r| r.interleaved)),
            parts,
        };
        let kernel = gpu.kernel("append", &format!("append_{}_{}", self.head_dim, self.kv_type.name()), 0)?;
        let mut args: [*mut c_void; 1] = [(&raw mut params).cast()];
        // SAFETY: the value is the kernel's only parameter; the caller vouches for the addresses.
        unsafe { gpu.launch(kernel, (blocks, 1, 1), 256, 0, &mut args) }
    }
}
