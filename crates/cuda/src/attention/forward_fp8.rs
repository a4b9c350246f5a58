//! Launch of `kernels/attention/forward_fp8.cu`: exact attention over q, k and v of 8 bits; o is bf16.
use super::decode::Pages;
use super::forward::{Forward, KeysValues, Paged, gcd};
use crate::driver::{Address, Gpu};
use crate::tensor_map::{TensorMap, encode_bytes};
use crate::{Dtype, Error};
use std::ffi::c_void;
use suanpan_base::Mask;

/// Everything one launch needs.
#[derive(Clone, Copy, Debug)]
pub struct ForwardFp8 {
    /// Shapes, lengths, mask and output, with `dtype` the output's (bf16); `q` and `kv` hold e4m3, strides in bytes. Full or
    /// causal over packed keys and values or pages, head dims 128 and 256.
    pub attention: Forward,
    /// q and k hold integers of 8 bits in two's complement (their products are exact) instead of e4m3; v is e4m3 always.
    pub int8_keys: bool,
    /// `[num_q_heads, total_q]` f32: what a row of q is multiplied by; none is 1.
    pub q_scales: Option<Address>,
    /// What packed k of a (sequence, kv head) is multiplied by, with the strides below; none is 1. Pages bring theirs: one a page and kv head, no token stride.
    pub k_scales: Option<Address>,
    /// As k's.
    pub v_scales: Option<Address>,
    /// Strides of k's and v's scales in elements, (sequence, kv head): 0 repeats a scale, (num_kv_heads, 1) is one a pair.
    pub kv_scale_strides: (u32, u32),
}

/// Mirrors `Fp8Scales` of the kernel.
#[repr(C)]
struct Scales {
    q: Address,
    k: Address,
    v: Address,
    outer_stride: i64,
    head_stride: i32,
}

/// The function for a mask, where there is one.
pub(crate) fn function(mask: Mask, pages: bool, int8_keys: bool) -> Option<&'static str> {
    Some(match (mask, pages, int8_keys) {
        (Mask::FULL, false, false) => "forward_fp8_full",
        (Mask::CAUSAL, false, false) => "forward_fp8_causal",
        (Mask::FULL, true, false) => "forward_fp8_full_pages",
        (Mask::CAUSAL, true, false) => "forward_fp8_causal_pages",
        (Mask::FULL, false, true) => "forward_int8_full",
        (Mask::CAUSAL, false, true) => "forward_int8_causal",
        (Mask::FULL, true, true) => "forward_int8_full_pages",
        (Mask::CAUSAL, true, true) => "forward_int8_causal_pages",
        _ => return None,
    })
}

impl ForwardFp8 {
    fn pages_map(&self, x: &Pages, p: &Paged, rows: u32) -> Result<TensorMap, Error> {
        let f = &self.attention;
        let dims = [f.head_dim, p.page_size, f.num_kv_heads, p.num_pages].map(u64::from);
        encode_bytes(x.address, &dims, &[x.token_stride, x.head_stride, x.page_stride], &[128, rows, 1, 1])
    }

    fn scales(&self) -> Result<Scales, Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        let q = self.q_scales.unwrap_or(0);
        let KeysValues::Paged(p) = self.attention.kv else {
            let (outer, head) = self.kv_scale_strides;
            let [k, v] = [self.k_scales, self.v_scales].map(|x| x.unwrap_or(0));
            return Ok(Scales { q, k, v, outer_stride: i64::from(outer), head_stride: head as i32 });
        };
        if self.k_scales.is_some() || self.v_scales.is_some() {
            return bad("k_scales, v_scales", "given".into(), "those of the pages beside pages");
        }
        let (k, v) = (p.k.scales, p.v.scales);
        let strides = |x: &super::decode::Scales| (x.page_stride, x.head_stride);
        if k.token_stride != 0 || v.token_stride != 0 {
            return bad("scales", "one a token".into(), "one a page and kv head");
        }
        if !k.is_none() && !v.is_none() && strides(&k) != strides(&v) {
            return bad("v.scales", format!("{:?}", strides(&v)), "the strides of k's scales");
        }
        let (outer, head) = if k.is_none() { strides(&v) } else { strides(&k) };
        if outer >= 1 << 40 || head >= 1 << 30 {
            return bad("scales", format!("strides {outer}, {head}"), "below 2^40 and 2^30");
        }
        Ok(Scales { q, k: k.address, v: v.address, outer_stride: outer as i64, head_stride: head as i32 })
    }

    /// Puts the kernel on the device's stream.
    ///
    /// # Safety
    /// As [`Forward::launch`]; the scales cover their shapes.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        let f = &self.attention;
        f.check()?;
        if ![128, 256].contains(&f.head_dim) || f.head_dim_v != f.head_dim {
            return bad(
                "head_dim",
                format!("{}, {} of values", f.head_dim, f.head_dim_v),
                "128 and 256 for e4m3",
            );
        }
        if f.dtype != Dtype::Bf16 {
            return bad("dtype", f.dtype.name().into(), "bf16 output for e4m3");
        }
        if !f.plain() {
            return bad("scores", format!("{:?}", f.scores), "plain scores for e4m3");
        }
        let Some(name) = function(f.mask, matches!(f.kv, KeysValues::Paged(_)), self.int8_keys) else {
            return bad("mask", format!("{}", f.mask), "full and causal for e4m3");
        };
        if f.total_q == 0 || f.batch == 0 {
            return Ok(());
        }
        let cubin = format!("forward_{}_e4m3", f.head_dim);
        let [num_wg, block_n, smem] = gpu.constants(&cubin, "forward_tiling")?;
        let map = |x: &super::Operand, tokens: u32, heads: u32, rows: u32| {
            let dims = [u64::from(f.head_dim), u64::from(tokens.max(1)), u64::from(heads)];
            encode_bytes(x.address, &dims, &[x.token_stride, x.head_stride], &[128, rows, 1])
        };
        let mut q = map(&f.q, f.total_q, f.num_q_heads, 64)?;
        let (mut k, mut v, box_rows) = match f.kv {
            KeysValues::Packed { k, v } => {
                // No keys: the maps point at q, and nothing is read through them.
                let (k, v) = if f.total_k == 0 { (f.q, f.q) } else { (k, v) };
                let map = |x| map(&x, f.total_k, f.num_kv_heads, block_n);
                (map(k)?, map(v)?, block_n)
            }
            KeysValues::Paged(p) => {
                let rows = gcd(block_n, p.page_size);
                (self.pages_map(&p.k, &p, rows)?, self.pages_map(&p.v, &p, rows)?, rows)
            }
        };
        let mut params = f.params(box_rows);
        let mut scales = self.scales()?;
        let kernel = gpu.kernel(&cubin, name, smem)?;
        let mut args: [*mut c_void; 5] = [
            (&raw mut q).cast(),
            (&raw mut k).cast(),
            (&raw mut v).cast(),
            (&raw mut params).cast(),
            (&raw mut scales).cast(),
        ];
        // SAFETY: the five values are the kernel's parameters in order; the caller vouches for the addresses.
        unsafe { gpu.launch(kernel, (f.blocks(gpu, num_wg), 1, 1), (num_wg + 1) * 128, smem, &mut args) }
    }
}
