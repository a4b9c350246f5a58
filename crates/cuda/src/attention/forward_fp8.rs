//! Launch of `kernels/attention/forward_fp8.cu`: exact attention over e4m3 q, k and v; o is bf16.
use super::forward::{Forward, KeysValues};
use crate::driver::{Address, Gpu};
use crate::tensor_map::encode_bytes;
use crate::{Dtype, Error};
use std::ffi::c_void;

/// Everything one launch needs.
#[derive(Clone, Copy, Debug)]
pub struct ForwardFp8 {
    /// Shapes, lengths, mask and output, with `dtype` the output's (bf16); `q` and `kv` hold e4m3, strides in bytes. Full or
    /// causal over packed keys and values, head dims 128 and 256.
    pub attention: Forward,
    /// `[batch, num_kv_heads]` f32: what q's elements of the heads on that kv head are multiplied by; none is 1.
    pub q_scales: Option<Address>,
    /// The same for k, with the strides below.
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
    batch_stride: i32,
    head_stride: i32,
}

impl ForwardFp8 {
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
        let name = match f.kernel_name() {
            "forward_full" => "forward_fp8_full",
            "forward_causal" => "forward_fp8_causal",
            _ => {
                return bad(
                    "mask, scores, kv",
                    format!("{}", f.mask),
                    "full and causal over packed keys for e4m3",
                );
            }
        };
        let KeysValues::Packed { k, v } = f.kv else {
            return bad("kv", "pages".into(), "packed keys for e4m3");
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
        // No keys: the maps point at q, and nothing is read through them.
        let (k, v) = if f.total_k == 0 { (f.q, f.q) } else { (k, v) };
        let mut k = map(&k, f.total_k, f.num_kv_heads, block_n)?;
        let mut v = map(&v, f.total_k, f.num_kv_heads, block_n)?;
        let mut params = f.params(block_n);
        let [q_scales, k_scales, v_scales] =
            [self.q_scales, self.k_scales, self.v_scales].map(|x| x.unwrap_or(0));
        let mut scales = Scales {
            q: q_scales,
            k: k_scales,
            v: v_scales,
            batch_stride: self.kv_scale_strides.0 as i32,
            head_stride: self.kv_scale_strides.1 as i32,
        };
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
