//! Launch of `kernels/attention/decode.cu`: bf16, all (sequence, tile) pairs as one line.
use super::decode::{Decode, KvType, Pages, Scores};
use crate::driver::{Address, Gpu};
use crate::tensor_map::encode;
use crate::{Dtype, Error};
use std::ffi::c_void;

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
    causal: i32,
    wide: i32,
    lse_row: i32,
    shared: i32,
}

/// Whether this kernel can run `d`.
pub(super) fn can(d: &Decode) -> bool {
    let f = &d.fused;
    let plain = d.scores == Scores::default()
        && f.append.is_none()
        && f.rotary.is_none()
        && f.prior.is_none()
        && f.table_row == 0;
    d.kv_type == KvType::Bf16 && plain && !d.batch_invariant
}

/// Parts of one unit are merged in groups of eight, at most 32 groups.
const PARTS_MAX: u32 = 256;

/// One block for each kv head of each part of the work, as many parts as fit the device side by side.
fn blocks(d: &Decode, num_sms: u32) -> u32 {
    (num_sms / d.num_kv_heads).clamp(1, PARTS_MAX) * d.num_kv_heads
}

/// Each block leaves at most three partial results.
pub(super) fn partial_bytes(d: &Decode, num_sms: u32) -> u64 {
    3 * u64::from(blocks(d, num_sms)) * u64::from(d.rows()) * u64::from(d.head_dim + 4) * 4
}

/// # Safety
/// As `Decode::launch`.
pub(super) unsafe fn launch(d: &Decode, gpu: &Gpu) -> Result<(), Error> {
    if !can(d) {
        let asked = format!(
            "{} K and V, {:?}, {:?}, batch_invariant {}",
            d.kv_type.name(),
            d.scores,
            d.fused,
            d.batch_invariant
        );
        let supported =
            "bf16, plain scores, no append, rotary, prior or longer table rows, no invariance on this plan";
        return Err(Error::Unsupported { field: "plan", asked, supported });
    }
    d.k.without_scales("k.scales")?;
    d.v.without_scales("v.scales")?;
    let (dim, group) = (u64::from(d.head_dim), d.num_q_heads / d.num_kv_heads);
    let piece_rows = if d.page_size.is_multiple_of(64) { 64 } else { 16 };
    let tokens = u64::from(d.batch) * u64::from(d.seqlen_q);
    let q_dims = [dim, u64::from(d.num_q_heads), tokens];
    let q_strides = [d.q.head_stride, d.q.token_stride];
    let mut q = encode(Dtype::Bf16, d.q.address, &q_dims, &q_strides, &[64, group, d.seqlen_q])?;
    let map = |x: &Pages| {
        let dims = [dim, u64::from(d.page_size), u64::from(d.num_kv_heads), u64::from(d.num_pages)];
        let strides = [x.token_stride, x.head_stride, x.page_stride];
        encode(Dtype::Bf16, x.address, &dims, &strides, &[64, piece_rows, 1, 1])
    };
    let (mut k, mut v) = (map(&d.k)?, map(&d.v)?);
    let mut params = Params {
        o: d.o,
        lse: d.lse,
        seqlens_k: d.seqlens_k,
        page_table: d.page_table,
        partial: d.partial,
        batch: d.batch as i32,
        seqlen_q: d.seqlen_q as i32,
        num_kv_heads: d.num_kv_heads as i32,
        group_size: group as i32,
        page_size: d.page_size as i32,
        pages_max: d.pages_max as i32,
        piece_rows: piece_rows as i32,
        scale_log2: d.softmax_scale * std::f32::consts::LOG2_E,
        causal: i32::from(!d.fused.all_keys),
        wide: i32::from(d.fused.wide),
        lse_row: d.lse_row() as i32,
        shared: i32::from(d.fused.shared_pages),
    };
    let cubin = format!("decode_{}_bf16", d.head_dim);
    let [_, smem] = gpu.constants(&cubin, "decode_tiling")?;
    let kernel = gpu.kernel(&cubin, "decode", smem)?;
    let mut args: [*mut c_void; 4] =
        [(&raw mut q).cast(), (&raw mut k).cast(), (&raw mut v).cast(), (&raw mut params).cast()];
    // SAFETY: the four values are the kernel's parameters in order; the caller vouches for the addresses.
    unsafe { gpu.launch(kernel, (blocks(d, gpu.num_sms), 1, 1), 256, smem, &mut args) }
}
