//! Launch of `kernels/attention/decode_cluster.cu`: clusters of blocks a kv head, splits at absolute positions.
use super::decode::{Decode, Fused, KvType, Plan};
use crate::Error;
use crate::driver::{Address, Gpu};
use std::ffi::c_void;

/// Mirrors `ClusterParams` of the kernel.
#[repr(C)]
struct Params {
    seqlens_k: Address,
    page_table: Address,
    batch: i32,
    seqlen_q: i32,
    page_size: i32,
    page_inverse: u32,
    pages_max: i32,
    parts: i32,
    line: i32,
    left: i32,
    k: Address,
    v: Address,
    page_stride: i64,
    token_stride: i64,
    head_stride: i64,
    k_scale: Address,
    v_scale: Address,
    scale_page_stride: i64,
    scale_token_stride: i64,
    scale_head_stride: i64,
    q: Address,
    q_token_stride: i64,
    q_head_stride: i64,
    num_kv_heads: i32,
    group_size: i32,
    group_inverse: i32,
    scale: f32,
    softcap: f32,
    causal: i32,
    o: Address,
    lse: Address,
    partial: Address,
    slopes: Address,
    sinks: Address,
    prior_o: Address,
    prior_lse: Address,
    wide: i32,
    rotary: i32,
    interleaved: i32,
    lse_row: i32,
    table_row: i32,
    shared: i32,
    k_new: Address,
    v_new: Address,
    cos: Address,
    sin: Address,
}

/// Up to as many keys a sequence one cluster a head is the fastest: beyond, merging costs less than idle processors (measured:
/// docs/cuda-attn-notes.md).
const FEW_KEYS: u64 = 8192;

/// Most blocks a cluster can have.
const RANKS_MAX: u32 = 16;

/// Rows of one unit: the columns of one or two products.
fn unit_rows(d: &Decode) -> u32 {
    // Always the same where no bit may depend on how many query tokens come together.
    if d.rows() <= 8 && !d.batch_invariant { 8 } else { 16 }
}

fn units(d: &Decode) -> u32 {
    // Further query tokens must not change where a sequence is cut if no bit may depend on them.
    d.num_kv_heads * if d.batch_invariant { 1 } else { d.rows().div_ceil(unit_rows(d)) }
}

/// The layout for a device with `num_sms` multiprocessors, from measurements on an H200 (docs/cuda-attn-notes.md).
pub(super) fn layout(d: &Decode, num_sms: u32) -> Plan {
    let units = units(d);
    // Clusters of 16, 8 and 4 blocks fit 7, 15 and 30 times on 132 processors, which lie in groups of 16 to 18 and a smaller one.
    let parts = |ranks: u32| match ranks {
        16 => num_sms * 7 / 132 / units,
        8 => num_sms * 15 / 132 / units,
        4 => num_sms * 30 / 132 / units,
        _ => num_sms / ranks / units,
    };
    if d.batch > 2 && !d.batch_invariant {
        // Many sequences: no processor may idle, and most sequences lie in one part.
        let ranks = match units {
            1 if d.batch < 32 => 8,
            _ if units == 1 || d.kv_type != KvType::Bf16 => 2,
            _ => 1,
        };
        return Plan::Clusters { ranks, parts: parts(ranks).max(1), line: true };
    }
    // Few keys: the largest clusters that fit once a head, and about two fifths of the processors: more would merge slower. Many
    // keys: nearly all processors.
    let few = u64::from(d.pages_max) * u64::from(d.page_size) <= FEW_KEYS;
    let fits = |r: u32| parts(r) > 0 && (few || parts(r) * units * r * 5 >= num_sms * 4);
    let ranks = [16, 8, 4, 2].into_iter().find(|r| fits(*r)).unwrap_or(1);
    let wanted = if few { (num_sms * 2 / 5).div_ceil(units * ranks) } else { parts(ranks) };
    Plan::Clusters { ranks, parts: wanted.min(parts(ranks)).max(1), line: false }
}

pub(super) fn partial_bytes(d: &Decode, parts: u32, line: bool) -> u64 {
    let record = u64::from(unit_rows(d)) * u64::from(d.head_dim) * 8;
    let records = if line { 2 * parts } else { d.batch * parts.saturating_sub(1) };
    u64::from(d.num_kv_heads * d.rows().div_ceil(unit_rows(d))) * u64::from(records) * record
}

/// What only this kernel refuses. Strides of q in bytes: tokens, heads.
fn check(d: &Decode, ranks: u32, parts: u32, line: bool) -> Result<[u64; 2], Error> {
    let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
    if !ranks.is_power_of_two() || ranks > RANKS_MAX || !(1..=1024).contains(&parts) {
        return bad("plan", format!("{ranks} ranks, {parts} parts"), "1, 2, 4, 8, 16 ranks, 1 to 1024 parts");
    }
    if line && d.batch_invariant {
        return bad("plan", "one line".into(), "splits at absolute positions where batch_invariant is asked");
    }
    let q_strides = [d.q.token_stride * 2, d.q.head_stride * 2];
    if !d.q.address.is_multiple_of(16) || q_strides.iter().any(|s| !s.is_multiple_of(16) || *s >= 1 << 40) {
        return bad("q", format!("{:#x}, strides {q_strides:?} bytes", d.q.address), "multiples of 16 bytes");
    }
    Ok(q_strides)
}

/// # Safety
/// As `Decode::launch`.
pub(super) unsafe fn launch(d: &Decode, gpu: &Gpu, ranks: u32, parts: u32, line: bool) -> Result<(), Error> {
    let q_strides = check(d, ranks, parts, line)?;
    let [page_stride, token_stride, head_stride] = d.k.same_strides(&d.v, d.kv_type)?;
    let group = d.num_q_heads / d.num_kv_heads;
    let Fused { append, rotary, prior, wide, .. } = d.fused;
    let mut params = Params {
        seqlens_k: d.seqlens_k,
        page_table: d.page_table,
        batch: d.batch as i32,
        seqlen_q: d.seqlen_q as i32,
        page_size: d.page_size as i32,
        page_inverse: u32::try_from((1u64 << 32) / u64::from(d.page_size / 16)).unwrap_or(u32::MAX),
        pages_max: d.pages_max as i32,
        parts: parts as i32,
        line: i32::from(line),
        left: d.scores.left.map_or(-1, |n| n.min(i32::MAX as u32) as i32),
        k: d.k.address,
        v: d.v.address,
        page_stride,
        token_stride,
        head_stride,
        k_scale: d.k.scales.address,
        v_scale: d.v.scales.address,
        scale_page_stride: d.k.scales.page_stride as i64,
        scale_token_stride: d.k.scales.token_stride as i64,
        scale_head_stride: d.k.scales.head_stride as i64,
        q: d.q.address,
        q_token_stride: q_strides[0] as i64,
        q_head_stride: q_strides[1] as i64,
        num_kv_heads: d.num_kv_heads as i32,
        group_size: group as i32,
        group_inverse: (65536 / group + 1) as i32,
        scale: d.softmax_scale,
        softcap: d.scores.softcap.unwrap_or(0.0),
        causal: i32::from(!d.fused.all_keys),
        o: d.o,
        lse: d.lse,
        partial: d.partial,
        slopes: d.scores.slopes.unwrap_or(0),
        sinks: d.scores.sinks.unwrap_or(0),
        prior_o: prior.map_or(0, |x| x.o),
        prior_lse: prior.map_or(0, |x| x.lse),
        wide: i32::from(wide),
        rotary: rotary.map_or(0, |x| x.dim as i32),
        interleaved: i32::from(rotary.is_some_and(|x| x.interleaved)),
        lse_row: d.lse_row() as i32,
        table_row: d.fused.table_row.max(d.pages_max) as i32,
        shared: i32::from(d.fused.shared_pages),
        k_new: append.map_or(0, |x| x.k),
        v_new: append.map_or(0, |x| x.v),
        cos: rotary.map_or(0, |x| x.cos),
        sin: rotary.map_or(0, |x| x.sin),
    };
    let cubin = format!("decode_cluster_{}_{}", d.head_dim, d.kv_type.name());
    let tiling: [u32; 8] = gpu.constants(&cubin, "decode_cluster_tiling")?;
    let extra = d.scores != Default::default() || !d.fused.is_plain();
    let (rows, line) = (unit_rows(d), if line && !extra { "_line" } else { "" });
    let function = format!("decode_{rows}{line}{}", if extra { "_extra" } else { "" });
    let at = 2 * usize::from(rows == 16) + 4 * usize::from(extra);
    let (smem, threads) = (tiling[at], tiling[at + 1]);
    let kernel = gpu.kernel(&cubin, &function, smem)?;
    let grid = (ranks * parts, d.num_kv_heads, d.rows().div_ceil(unit_rows(d)));
    let mut args: [*mut c_void; 1] = [(&raw mut params).cast()];
    // SAFETY: the value is the kernel's only parameter; the caller vouches for the addresses.
    unsafe { gpu.launch_clusters(kernel, grid, ranks, threads, smem, &mut args) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Operand;
    use crate::attention::decode::{Pages, Scales};

    fn asked(heads: (u32, u32), head_dim: u32, batch: u32, keys: u32) -> Decode {
        let scales = Scales::default();
        let pages = Pages { address: 0, page_stride: 0, token_stride: 0, head_stride: 0, scales };
        Decode {
            q: Operand { address: 0, token_stride: 0, head_stride: 0 },
            k: pages,
            v: pages,
            kv_type: KvType::Bf16,
            o: 0,
            lse: 0,
            seqlens_k: 0,
            page_table: 0,
            partial: 0,
            num_pages: 1,
            page_size: 16,
            pages_max: keys / 16,
            batch,
            seqlen_q: 1,
            num_q_heads: heads.0,
            num_kv_heads: heads.1,
            head_dim,
            softmax_scale: 1.0,
            scores: Default::default(),
            fused: Fused::default(),
            batch_invariant: false,
        }
    }

    #[test]
    fn layouts_are_those_that_were_measured_fastest() {
        let clusters = |ranks, parts, line| Plan::Clusters { ranks, parts, line };
        for (heads, dim, batch, keys, plan) in [
            ((32, 8), 128, 1, 1024, clusters(8, 1, false)),
            ((32, 8), 128, 1, 131_072, clusters(2, 8, false)),
            ((32, 8), 128, 16, 32_768, clusters(1, 16, true)),
            ((32, 8), 128, 128, 4096, clusters(1, 16, true)),
            ((16, 1), 256, 1, 8192, clusters(16, 4, false)),
            ((16, 1), 256, 1, 131_072, clusters(16, 7, false)),
            ((16, 1), 256, 16, 32_768, clusters(8, 15, true)),
            ((16, 1), 256, 128, 4096, clusters(2, 66, true)),
            ((64, 2), 128, 16, 4096, Plan::Line),
        ] {
            assert_eq!(
                asked(heads, dim, batch, keys).plan(132),
                plan,
                "{heads:?} d {dim} B {batch} {keys} keys"
            );
        }
    }

    #[test]
    fn a_batch_invariant_layout_knows_no_batch() {
        let alone = Decode { batch_invariant: true, ..asked((32, 8), 128, 1, 4096) };
        for batch in [2, 3, 64, 1000] {
            assert_eq!(Decode { batch, ..alone }.plan(132), alone.plan(132));
        }
    }
}
