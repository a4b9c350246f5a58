//! Launch of `kernels/attention/forward.cu`: exact attention of packed sequences over contiguous K and V.
use super::Operand;
use crate::driver::{Address, Gpu};
use crate::tensor_map::encode;
use crate::{Dtype, Error};
use std::ffi::c_void;

/// Everything one launch needs. Lengths come from the prefix sums, or are uniform where those are `None`.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// `[total_q, num_q_heads, head_dim]`.
    pub q: Operand,
    /// `[total_k, num_kv_heads, head_dim]`.
    pub k: Operand,
    /// `[total_k, num_kv_heads, head_dim]`.
    pub v: Operand,
    /// `[total_q, num_q_heads, head_dim]`.
    pub o: Operand,
    /// `[num_q_heads, total_q]` f32, natural logarithm.
    pub lse: Address,
    /// 8 bytes, zero before the first launch; one per stream.
    pub counter: Address,
    /// `[batch + 1]` i32.
    pub cu_seqlens_q: Option<Address>,
    /// The same for keys.
    pub cu_seqlens_k: Option<Address>,
    /// Query tokens of all sequences.
    pub total_q: u32,
    /// Key tokens of all sequences.
    pub total_k: u32,
    /// Sequences.
    pub batch: u32,
    /// The longest query length; every one where there are no prefix sums.
    pub seqlen_q_max: u32,
    /// The same for keys.
    pub seqlen_k_max: u32,
    /// A multiple of num_kv_heads.
    pub num_q_heads: u32,
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// Elements a head.
    pub head_dim: u32,
    /// Of q, k, v and o.
    pub dtype: Dtype,
    /// Bottom-right aligned: row i of seqlen_q sees keys 0..=seqlen_k - seqlen_q + i.
    pub causal: bool,
    /// Positive; usually 1 / sqrt(head_dim).
    pub softmax_scale: f32,
}

/// Mirrors `ForwardParams` of the kernel.
#[repr(C)]
struct Params {
    lse: Address,
    o: Address,
    cu_q: Address,
    cu_k: Address,
    counter: Address,
    o_token_stride: i64,
    o_head_stride: i64,
    total_q: i32,
    batch: i32,
    num_kv_heads: i32,
    group_size: i32,
    seqlen_q_max: i32,
    seqlen_k_max: i32,
    units_per_section: i32,
    scale: f32,
    scale_log2: f32,
}

/// K and V of the sequences in flight should fit well inside the 50 MB L2.
const L2_SECTION_BYTES: u64 = 24 << 20;

impl Forward {
    fn check(&self) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if ![64, 96, 128, 192, 256].contains(&self.head_dim) {
            return bad("head_dim", self.head_dim.to_string(), "64, 96, 128, 192, 256");
        }
        if self.num_kv_heads == 0 || !self.num_q_heads.is_multiple_of(self.num_kv_heads) {
            let asked = format!("{} query heads on {} kv heads", self.num_q_heads, self.num_kv_heads);
            return bad("num_q_heads", asked, "a multiple of num_kv_heads");
        }
        if !(self.softmax_scale > 0.0 && self.softmax_scale.is_finite()) {
            return bad("softmax_scale", self.softmax_scale.to_string(), "positive and finite");
        }
        let tiles =
            u64::from(self.seqlen_q_max.div_ceil(64)) * u64::from(self.batch) * u64::from(self.num_q_heads);
        if self.total_q.max(self.total_k) > 1 << 30 || tiles > 1 << 30 {
            return bad(
                "total_q, total_k",
                format!("{}, {}", self.total_q, self.total_k),
                "up to 2^30 tokens and tiles",
            );
        }
        Ok(())
    }

    /// Puts the kernel on the device's stream.
    ///
    /// # Safety
    /// The operands cover their shapes, the prefix sums are ascending and end at total_q and total_k, and all of it
    /// stays valid until the stream has run the kernel. `o` and `lse` overlap nothing.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        self.check()?;
        if self.total_q == 0 || self.batch == 0 {
            return Ok(());
        }
        let dim = u64::from(self.head_dim);
        let cubin = format!("forward_{}_{}", self.head_dim, self.dtype.name());
        let [num_wg, block_n, smem] = gpu.constants(&cubin, "forward_tiling")?;
        let map = |x: &Operand, tokens: u32, heads: u32, rows: u32| {
            // A tensor without tokens still needs a valid map; nothing is read through it.
            let dims = [dim, u64::from(tokens.max(1)), u64::from(heads)];
            encode(self.dtype, x.address, &dims, &[x.token_stride, x.head_stride], &[64, rows, 1])
        };
        let mut q = map(&self.q, self.total_q, self.num_q_heads, 64)?;
        let mut o = map(&self.o, self.total_q, self.num_q_heads, 64)?;
        // No keys: the maps point at q, and nothing is read through them.
        let (k, v) = if self.total_k == 0 { (self.q, self.q) } else { (self.k, self.v) };
        let mut k = map(&k, self.total_k, self.num_kv_heads, block_n)?;
        let mut v = map(&v, self.total_k, self.num_kv_heads, block_n)?;
        let unit_bytes = (u64::from(self.seqlen_k_max) * dim * 4).max(1);
        let units = u64::from(self.batch * self.num_kv_heads);
        let sections = units.div_ceil((L2_SECTION_BYTES / unit_bytes).clamp(1, units.max(1)));
        let units_per_section = units.div_ceil(sections.max(1)).max(1); // even sections: a short last one ends unevenly
        let mut params = Params {
            lse: self.lse,
            o: self.o.address,
            cu_q: self.cu_seqlens_q.unwrap_or(0),
            cu_k: self.cu_seqlens_k.unwrap_or(0),
            counter: self.counter,
            o_token_stride: self.o.token_stride as i64,
            o_head_stride: self.o.head_stride as i64,
            total_q: self.total_q as i32,
            batch: self.batch as i32,
            num_kv_heads: self.num_kv_heads as i32,
            group_size: (self.num_q_heads / self.num_kv_heads) as i32,
            seqlen_q_max: self.seqlen_q_max as i32,
            seqlen_k_max: self.seqlen_k_max as i32,
            units_per_section: units_per_section as i32,
            scale: self.softmax_scale,
            scale_log2: self.softmax_scale * std::f32::consts::LOG2_E,
        };
        let kernel = gpu.kernel(&cubin, if self.causal { "forward_causal" } else { "forward_full" }, smem)?;
        let tiles = self.seqlen_q_max.div_ceil(num_wg * 64) * self.batch * self.num_q_heads;
        let mut args: [*mut c_void; 5] = [
            (&raw mut q).cast(),
            (&raw mut k).cast(),
            (&raw mut v).cast(),
            (&raw mut o).cast(),
            (&raw mut params).cast(),
        ];
        // SAFETY: the five values are the kernel's parameters in order; the caller vouches for the addresses.
        unsafe { gpu.launch(kernel, (tiles.min(gpu.num_sms), 1, 1), (num_wg + 1) * 128, smem, &mut args) }
    }
}
