//! Which kernel takes a problem and a batch. Candidates in order of speed for the shape; each says over what it refuses.

use suanpan_attn::{KvLayout, Problem};
use suanpan_base::{BadArgument, DType, Mask, ScaleGrain, SeqLen};

use super::{Choice, Device, Kernel, OP, Slower};
use crate::attention::decode::KvType;
use crate::attention::{forward, forward_fp8};
use crate::shapes::{FORWARD, FORWARD_FP8, FORWARD_MORE, ForwardShape, Fp8Shape};

/// Tokens that a kernel counts.
pub(super) const TOKENS_MAX: usize = 1 << 30;

type Fits<T> = Result<T, BadArgument>;

fn refuse<T>(field: &str, asked: impl std::fmt::Display, supported: &str) -> Fits<T> {
    Err(BadArgument::new(OP, field, asked, supported))
}

/// Refuses what no kernel takes, whatever the lengths.
pub(super) fn check_any(p: &Problem) -> Fits<()> {
    if let KvLayout::Paged { page_size } = p.kv
        && !page_size.is_multiple_of(16)
    {
        return refuse("page_size", page_size, "multiples of 16 tokens");
    }
    if p.heads.values_in_keys {
        return refuse(
            "values_in_keys",
            true,
            "false: latent attention has a launch of its own (`decode_mla`)",
        );
    }
    if p.kv_scale_dtype != DType::F32 {
        return refuse("kv_scale_dtype", p.kv_scale_dtype, "f32 on this device");
    }
    if p.block_mask.is_some() {
        return refuse("block_mask", "given", "none on this device");
    }
    if p.mask.sink_tokens > 0 {
        return refuse("mask.sink_tokens", p.mask.sink_tokens, "0: no leading keys beside a window");
    }
    if p.scale().is_nan() || p.scale() <= 0.0 {
        return refuse("softmax_scale", p.scale(), "positive numbers");
    }
    if p.scores.dropout == Some(1.0) {
        return refuse("dropout", 1.0, "below 1 on this device");
    }
    let anyone = [forward_shape(p).err(), fp8_shape(p).err(), decode_type(p).err(), unpacked(p).err()];
    match anyone {
        [Some(forward), Some(fp8), Some(_), Some(unpacked)] => Err(match p.kv_dtype {
            DType::E4m3 => fp8,
            DType::I8 | DType::I4 => unpacked,
            _ => forward,
        }),
        _ => Ok(()),
    }
}

/// The build of the 16-bit forward for these heads and types.
fn forward_shape(p: &Problem) -> Fits<ForwardShape> {
    if ![DType::Bf16, DType::F16].contains(&p.q_dtype) {
        return refuse("q_dtype", p.q_dtype, "bf16, f16");
    }
    if p.kv_dtype != p.q_dtype {
        return refuse("kv_dtype", p.kv_dtype, "the queries' type in the 16-bit forward");
    }
    let dims = (p.heads.head_dim_qk as u32, p.heads.head_dim_v as u32);
    match FORWARD.iter().find(|s| (s.head_dim, s.head_dim_v) == dims) {
        Some(s) => Ok(*s),
        None => refuse(
            "head_dim_qk, head_dim_v",
            format!("{}, {}", dims.0, dims.1),
            "64, 96, 128, 192, 256 for both, 192 and 128",
        ),
    }
}

/// The build with bias and dropout for the same widths.
fn more_of(shape: ForwardShape) -> ForwardShape {
    let same = |s: &&ForwardShape| (s.head_dim, s.head_dim_v) == (shape.head_dim, shape.head_dim_v);
    FORWARD_MORE.iter().find(same).copied().unwrap_or(shape)
}

/// Nothing happens to scores beyond scale and mask.
fn plain(p: &Problem) -> bool {
    let s = &p.scores;
    !(s.bias || s.alibi || s.sink || s.dropout.is_some() || s.softcap.is_some_and(|c| c != 0.0) || p.tree)
}

/// Whether tiles of (token, head of a group) are a tenth fewer than a head's own: few query tokens a sequence.
fn packs(p: &Problem, seqs: &[SeqLen], shape: ForwardShape) -> bool {
    let (group, rows) = (p.heads.group_size(), 64 * shape.warpgroups as usize);
    let differs = p.scores.alibi || p.scores.sink || p.scores.bias || p.scores.dropout.is_some();
    let tiles = |heads: usize| seqs.iter().map(|s| (s.seqlen_q * heads).div_ceil(rows)).sum::<usize>();
    !differs && forward::can_pack(group as u32) && 10 * tiles(group) <= 9 * group * tiles(1)
}

pub(super) fn fp8_shape(p: &Problem) -> Fits<Fp8Shape> {
    if p.q_dtype != DType::Bf16 || p.kv_dtype != DType::E4m3 {
        return refuse(
            "q_dtype, kv_dtype",
            format!("{}, {}", p.q_dtype, p.kv_dtype),
            "bf16 queries of e4m3 keys",
        );
    }
    if p.kv_scales == ScaleGrain::Token {
        return refuse("kv_scales", p.kv_scales, "none, one a tensor, head or page in the e4m3 forward");
    }
    if ![Mask::FULL, Mask::CAUSAL].contains(&p.mask) || !plain(p) {
        return refuse("mask, scores", format!("{}{}", p.mask, p.scores), "full and causal, plain scores");
    }
    let (d, v) = (p.heads.head_dim_qk as u32, p.heads.head_dim_v as u32);
    match FORWARD_FP8.iter().find(|s| s.head_dim == d && d == v) {
        Some(s) => Ok(*s),
        None => refuse("head_dim_qk, head_dim_v", format!("{d}, {v}"), "128 and 256 for both"),
    }
}

/// The problem of the 16-bit forward once quantised pages have become bf16 rows, and their type.
pub(super) fn unpacked(p: &Problem) -> Fits<(Problem, KvType)> {
    let kv_type = match p.kv_dtype {
        DType::E4m3 => KvType::E4m3,
        DType::I8 => KvType::Int8,
        DType::I4 => KvType::Int4,
        other => return refuse("kv_dtype", other, "fp8_e4m3, int8, int4 to be unpacked"),
    };
    if p.q_dtype != DType::Bf16 {
        return refuse("q_dtype", p.q_dtype, "bf16 beside quantised keys");
    }
    if p.kv_scales == ScaleGrain::None {
        return refuse("kv_scales", p.kv_scales, "one a tensor, head, token or page of quantised numbers");
    }
    if p.kv == KvLayout::Contiguous {
        return refuse("kv", p.kv, "pages of quantised numbers");
    }
    let (d, v) = (p.heads.head_dim_qk, p.heads.head_dim_v);
    if ![64, 128, 256].contains(&d) || d != v {
        return refuse("head_dim_qk, head_dim_v", format!("{d}, {v}"), "64, 128, 256 for both");
    }
    let (kv_dtype, kv_scales, kv) = (DType::Bf16, ScaleGrain::None, KvLayout::Contiguous);
    Ok((Problem { kv_dtype, kv_scales, kv, ..*p }, kv_type))
}

/// The stored type as decode names it; refuses what decode takes at no length.
pub(super) fn decode_type(p: &Problem) -> Fits<KvType> {
    if p.q_dtype != DType::Bf16 {
        return refuse("q_dtype", p.q_dtype, "bf16 in decode");
    }
    let kv = match p.kv_dtype {
        DType::Bf16 => KvType::Bf16,
        DType::E4m3 => KvType::E4m3,
        DType::I8 => KvType::Int8,
        DType::I4 => KvType::Int4,
        other => return refuse("kv_dtype", other, "bf16, fp8_e4m3, int8, int4 in decode"),
    };
    if kv != KvType::Bf16 && p.kv_scales == ScaleGrain::None {
        return refuse("kv_scales", p.kv_scales, "one a tensor, head, token or page of quantised numbers");
    }
    if p.kv == KvLayout::Contiguous {
        return refuse("kv", p.kv, "pages in decode");
    }
    let (d, v) = (p.heads.head_dim_qk, p.heads.head_dim_v);
    if ![64, 128, 256].contains(&d) || d != v {
        return refuse("head_dim_qk, head_dim_v", format!("{d}, {v}"), "64, 128, 256 for both in decode");
    }
    if p.scores.bias || p.scores.dropout.is_some() || p.tree {
        return refuse(
            "scores",
            format!("{}, tree {}", p.scores, p.tree),
            "softcap, ALiBi and sinks in decode",
        );
    }
    if p.batch_invariant {
        return refuse("batch_invariant", true, "false in decode: prefill's bits are the forward's");
    }
    Ok(kv)
}

/// The query tokens that every sequence has, where decode's 64 rows hold them.
fn decode_tokens(p: &Problem, seqs: &[SeqLen]) -> Option<usize> {
    let n = seqs.first()?.seqlen_q;
    let few = n > 0 && n * p.heads.group_size() <= 64;
    (few && seqs.iter().all(|s| s.seqlen_q == n && s.seqlen_k >= n)).then_some(n)
}

fn decode(p: &Problem, seqs: &[SeqLen], tokens: usize, device: Device, pages_max: usize) -> Fits<Kernel> {
    decode_type(p)?;
    let m = p.mask;
    let plain_window = m.right == Some(0) && m.chunk.is_none() && !m.top_left;
    if !(plain_window || (m == Mask::FULL && tokens == 1)) {
        return refuse("mask", m, "causal and causal windows in decode");
    }
    Ok(Kernel::Decode(super::run::decode_shape(p, seqs.len(), tokens, pages_max).plan(device.num_sms)))
}

/// The 16-bit forward: packed where few tokens come, its keys in parts where that is faster than few blocks.
fn forward_kernel(p: &Problem, seqs: &[SeqLen], device: Device, shape: ForwardShape) -> Kernel {
    let more = more_of(shape);
    let pack = |shape: ForwardShape| packs(p, seqs, shape);
    // Rows of work of the block that has most: tiles in a row, each some key tiles' time and four for its start and end. The build that
    // knows parts is a tenth slower.
    let cost = |shape: ForwardShape, splits: usize| {
        let (rows, heads) =
            (64 * shape.warpgroups as usize, if pack(shape) { p.heads.group_size() } else { 1 });
        let of = |s: &SeqLen| (s.seqlen_q * heads).div_ceil(rows) * p.heads.num_q_heads / heads;
        let tiles = seqs.iter().map(of).sum::<usize>() * splits;
        let hull = |s: &SeqLen| p.mask.visible_hull(*s, 0..s.seqlen_q).len();
        let key_tiles = seqs.iter().map(hull).max().unwrap_or(0) as f64 / f64::from(shape.keys);
        let waves = tiles.div_ceil(device.num_sms as usize);
        let time = waves as f64 * (key_tiles / splits as f64 + 4.0) * (rows * shape.keys as usize) as f64;
        (time, tiles, key_tiles)
    };
    let whole = cost(if has_more(p) { more } else { shape }, 1).0;
    let mut best = (0.85 * whole, None);
    for splits in 1..=if p.batch_invariant { 0 } else { forward::SPLITS_MAX } {
        let (time, tiles, key_tiles) = cost(more, splits as usize);
        // Measured over long histories only.
        let fits = splits == 1 && key_tiles >= 32.0
            || splits > 1
                && tiles <= (TILES_A_PROCESSOR * device.num_sms) as usize
                && key_tiles >= 4.0 * f64::from(splits);
        if fits && 1.1 * time < best.0 {
            best = (1.1 * time, Some(splits));
        }
    }
    let takes_more = has_more(p) || best.1.is_some();
    let shape = if takes_more { more } else { shape };
    let pack_gqa = pack(shape);
    let plain = plain(p) && p.kv == KvLayout::Contiguous && !pack_gqa;
    let function = forward::function(p.mask, takes_more, plain);
    Kernel::Forward { shape, function, pack_gqa, splits: best.1.unwrap_or(1), unpacks: None }
}

/// The same over pages that are unpacked first. Groups of sequences that come one after another do not share the memory of parts: `whole`
/// says that there is one group.
fn unpacking_kernel(p: &Problem, seqs: &[SeqLen], (device, whole): (Device, bool)) -> Fits<Kernel> {
    let (sixteen, kv_type) = unpacked(p)?;
    let parts = Problem { batch_invariant: p.batch_invariant || !whole, ..sixteen };
    let mut kernel = forward_kernel(&parts, seqs, device, forward_shape(&sixteen)?);
    if let Kernel::Forward { unpacks, .. } = &mut kernel {
        *unpacks = Some(kv_type);
    }
    Ok(kernel)
}

fn has_more(p: &Problem) -> bool {
    p.scores.bias || p.scores.dropout.is_some()
}

/// Most tiles with parts of the keys, which bounds the memory of their results.
const TILES_A_PROCESSOR: u32 = 4;

/// Most bytes of parts of any schedule.
pub(super) fn forward_partial_bytes(p: &Problem, device: Device, max_total_q: usize) -> u64 {
    let sixteen = unpacked(p).map_or(*p, |x| x.0);
    let Ok(shape) = forward_shape(&sixteen) else { return 0 };
    if p.batch_invariant {
        return 0;
    }
    let tiles = u64::from(TILES_A_PROCESSOR * device.num_sms * 64 * more_of(shape).warpgroups);
    let rows = tiles.min(u64::from(forward::SPLITS_MAX) * (max_total_q * p.heads.num_q_heads) as u64);
    forward::partial_bytes(1, rows, shape.head_dim_v)
}

/// The kernel for `seqs`.
pub(super) fn choose(
    p: &Problem,
    seqs: &[SeqLen],
    (device, whole): (Device, bool),
    pages_max: usize,
    slower: Slower,
) -> Fits<Choice> {
    if let Some((i, s)) = seqs.iter().enumerate().find(|(_, s)| s.prefix_len > 0) {
        return refuse(&format!("seqs[{i}].prefix_len"), s.prefix_len, "0 on this device");
    }
    let mut refused = None; // a faster kernel, and over what
    if let Some(tokens) = decode_tokens(p, seqs).filter(|_| !p.batch_invariant) {
        match decode(p, seqs, tokens, device, pages_max) {
            Ok(kernel) => {
                let why = "at most 64 rows a kv head: reading K and V once bounds it";
                return Ok(Choice { kernel, why, gave_up: None });
            }
            Err(e) => refused = Some(("decode", e)),
        }
    }
    if p.kv_dtype == DType::E4m3
        && refused.is_none()
        && let Err(e) = fp8_shape(p)
    {
        refused = Some(("the e4m3 forward", e));
    }
    let (kernel, why) = match many_rows(p, seqs, (device, whole)) {
        Ok(found) => found,
        Err(last) => return Err(refused.map_or(last, |r| r.1)),
    };
    match (refused, slower) {
        (None, _) => Ok(Choice { kernel, why, gave_up: None }),
        (Some((name, e)), Slower::Allow) => {
            let gave_up =
                format!("{name}, which refused {} = {} (it takes {})", e.field, e.asked, e.supported);
            Ok(Choice { kernel, why, gave_up: Some(gave_up) })
        }
        (Some((_, e)), Slower::Refuse) => {
            let supported = format!("{}; Slower::Allow sends it to {kernel}", e.supported);
            Err(BadArgument { supported, ..e })
        }
    }
}

/// The kernel where arithmetic bounds it, and why.
fn many_rows(p: &Problem, seqs: &[SeqLen], (device, whole): (Device, bool)) -> Fits<(Kernel, &'static str)> {
    if let Ok(shape) = fp8_shape(p) {
        let pages = p.kv != KvLayout::Contiguous;
        let function = forward_fp8::function(p.mask, pages, false).unwrap_or("forward_fp8_causal");
        return Ok((Kernel::ForwardFp8 { shape, function }, "e4m3 keys: products at twice the 16-bit rate"));
    }
    if matches!(p.kv_dtype, DType::E4m3 | DType::I8 | DType::I4) {
        let kernel = unpacking_kernel(p, seqs, (device, whole))?;
        return Ok((kernel, "many rows of quantised keys: arithmetic bounds it, each key is unpacked once"));
    }
    let shape = forward_shape(p)?;
    let why = if p.batch_invariant && decode_tokens(p, seqs).is_some() {
        "batch-invariant: a row has its prefill's bits only in prefill's kernel"
    } else {
        "many rows: arithmetic bounds it"
    };
    Ok((forward_kernel(p, seqs, device, shape), why))
}
