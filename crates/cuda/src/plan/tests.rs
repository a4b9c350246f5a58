//! Plans are pure: which kernel, why, what is refused, without a device.

use suanpan_attn::{KvLayout, Limits, Problem, Scores};
use suanpan_base::{DType, HeadShape, Mask, ScaleGrain, SeqLen};

use super::{Device, Kernel, Plan, Slower};
use crate::attention::decode;

const LIMITS: Limits = Limits { max_seqs: 64, max_total_q: 1 << 16, max_seqlen_k: 1 << 17 };

fn paged(heads: HeadShape) -> Problem {
    let kv = KvLayout::Paged { page_size: 16 };
    Problem { q_dtype: DType::Bf16, kv_dtype: DType::Bf16, kv, ..Problem::new(heads, Mask::CAUSAL) }
}

fn plan(problem: &Problem, seqs: &[SeqLen], slower: Slower) -> Result<Plan, suanpan_base::BadArgument> {
    let mut plan = Plan::new(problem, Device::H200, LIMITS, slower)?;
    plan.schedule(seqs)?;
    Ok(plan)
}

#[test]
fn a_plan_says_which_kernel_and_why() {
    let p = paged(HeadShape::new(32, 8, 128));
    let decode = plan(&p, &[SeqLen::extend(32_767, 1); 16], Slower::Refuse).unwrap();
    assert!(matches!(decode.choice().unwrap().kernel, Kernel::Decode(decode::Plan::Clusters { .. })));
    let text = decode.to_string();
    assert!(text.contains("decode_cluster") && text.contains("reading K and V once bounds it"), "{text}");
    // 16 x 32k x 8 heads x 128 x 2 bytes of each of K and V.
    let entry = decode.predicted_device();
    assert_eq!(entry.device_read_bytes >> 20, 2048, "{entry:?}");

    let prefill = plan(&p, &[SeqLen::new(2048, 2048), SeqLen::extend(100, 1)], Slower::Refuse).unwrap();
    let text = prefill.to_string();
    assert!(text.contains("forward_features (forward.cu), tile 192 x 128, 2 stages"), "{text}");
    let contiguous = Problem { kv: KvLayout::Contiguous, ..p };
    let text = plan(&contiguous, &[SeqLen::new(512, 512)], Slower::Refuse).unwrap().to_string();
    assert!(text.contains("forward_causal (forward.cu)") && text.contains("many rows"), "{text}");
}

#[test]
fn a_short_chunk_packs_a_groups_heads_and_cuts_a_long_history() {
    let p = paged(HeadShape::new(32, 8, 128));
    let kernel =
        |p: &Problem, seqs: &[SeqLen]| plan(p, seqs, Slower::Refuse).unwrap().choice().unwrap().kernel;
    let of = |kernel| match kernel {
        Kernel::Forward { function, pack_gqa, splits, .. } => (function, pack_gqa, splits),
        other => panic!("{other}"),
    };
    // 8 heads x 2 tiles of (token, head): eight parts make 128 blocks of 132.
    assert_eq!(of(kernel(&p, &[SeqLen::extend(32_704, 64)])), ("forward_more", true, 8));
    // 176 tiles of 192 rows are two rounds of 132 blocks, 256 of 128 rows two shorter ones.
    let few_heads = paged(HeadShape::new(16, 4, 128));
    assert_eq!(of(kernel(&few_heads, &[SeqLen::extend(30_720, 2048)])), ("forward_more", false, 1));
    // 256 rows are two tiles of 128.
    assert_eq!(of(kernel(&p, &[SeqLen::extend(30_000, 64); 16])), ("forward_more", true, 1));
    // No history worth cutting, or bits that may not depend on the batch: whole.
    assert_eq!(of(kernel(&p, &[SeqLen::new(100, 200)])), ("forward_features", true, 1));
    let invariant = Problem { batch_invariant: true, ..p };
    assert_eq!(of(kernel(&invariant, &[SeqLen::extend(32_704, 64)])), ("forward_features", true, 1));
    // Heads with slopes of their own keep tiles of their own.
    let slopes = Problem { scores: Scores { alibi: true, ..Scores::default() }, ..p };
    assert!(!of(kernel(&slopes, &[SeqLen::extend(32_704, 64)])).1);
}

#[test]
fn what_no_kernel_takes_is_refused_by_name() {
    let p = paged(HeadShape::new(8, 2, 128));
    let field = |p: Problem| Plan::new(&p, Device::H200, LIMITS, Slower::Allow).unwrap_err().field;
    assert_eq!(field(Problem { kv: KvLayout::Paged { page_size: 24 }, ..p }), "page_size");
    assert_eq!(field(Problem { heads: HeadShape::new(8, 2, 80), ..p }), "head_dim_qk, head_dim_v");
    assert_eq!(field(Problem { q_dtype: DType::F32, ..p }), "q_dtype");
    assert_eq!(field(Problem { mask: Mask::streaming(4, 100), ..p }), "mask.sink_tokens");
    assert_eq!(field(Problem { softmax_scale: Some(-1.0), ..p }), "softmax_scale");
    assert_eq!(field(Problem { kv_scales: ScaleGrain::Head, ..p }), "kv_scales");
    let bf16_scales =
        Problem { kv_dtype: DType::I8, kv_scales: ScaleGrain::Token, kv_scale_dtype: DType::Bf16, ..p };
    assert_eq!(field(bf16_scales), "kv_scale_dtype");
    assert_eq!(field(Problem { heads: HeadShape::latent(16, 128, 128), ..p }), "values_in_keys");
    let prefix = SeqLen::new(300, 300).with_prefix(10);
    assert_eq!(plan(&p, &[prefix], Slower::Allow).unwrap_err().field, "seqs[0].prefix_len");
}

#[test]
fn a_slower_kernel_runs_only_where_it_is_allowed_and_is_named() {
    let contiguous = Problem { kv: KvLayout::Contiguous, ..paged(HeadShape::new(32, 8, 128)) };
    let one = [SeqLen::extend(4095, 1)];
    let refused = plan(&contiguous, &one, Slower::Refuse).unwrap_err();
    assert_eq!((refused.field.as_str(), refused.asked.as_str()), ("kv", "contiguous"));
    assert!(refused.supported.contains("Slower::Allow sends it to forward_more"), "{refused}");
    let text = plan(&contiguous, &one, Slower::Allow).unwrap().to_string();
    assert!(text.contains("slower than decode, which refused kv = contiguous"), "{text}");
    // Nothing is faster than the forward where its bits are asked for.
    let invariant = Problem { batch_invariant: true, ..paged(HeadShape::new(32, 8, 128)) };
    assert!(plan(&invariant, &one, Slower::Refuse).unwrap().to_string().contains("batch-invariant"));
    // No kernel takes codes that lie in no pages, whatever is allowed.
    let codes = Problem {
        kv_dtype: DType::I8,
        kv_scales: ScaleGrain::Token,
        kv: KvLayout::Contiguous,
        ..paged(HeadShape::new(32, 8, 128))
    };
    assert_eq!(plan(&codes, &one, Slower::Allow).unwrap_err().field, "kv");
}

#[test]
fn bias_and_dropout_have_a_build_of_their_own_and_fp8_rounds_q_first() {
    let scores = Scores { bias: true, dropout: Some(0.1), ..Scores::default() };
    let p = Problem { scores, kv: KvLayout::Contiguous, ..paged(HeadShape::new(8, 8, 64)) };
    let text = plan(&p, &[SeqLen::new(512, 512)], Slower::Refuse).unwrap().to_string();
    assert!(text.contains("forward_more (forward.cu), tile 128 x 128"), "{text}");
    let fp8 = Problem { kv_dtype: DType::E4m3, kv: KvLayout::Contiguous, ..paged(HeadShape::new(8, 8, 256)) };
    let planned = plan(&fp8, &[SeqLen::new(512, 512)], Slower::Refuse).unwrap();
    assert!(planned.to_string().contains("quantise_q, forward_fp8_causal"), "{planned}");
    assert!(planned.workspace_bytes() > (1 << 16) * 8 * 256);
}

#[test]
fn reads_of_k_and_v_grow_past_the_l2_and_by_the_deferred_quarter() {
    let reads = |mask: Mask, (q, k): (usize, usize)| {
        let p = Problem { mask, kv: KvLayout::Contiguous, ..paged(HeadShape::new(16, 16, 128)) };
        let limits = Limits { max_seqs: 1, max_total_q: q, max_seqlen_k: k };
        let mut plan = Plan::new(&p, Device::H200, limits, Slower::Refuse).unwrap();
        plan.schedule(&[SeqLen::new(q, k)]).unwrap();
        let once = (q + 2 * k) * 16 * 128 * 2;
        (plan.predicted_device().device_read_bytes as f64 - once as f64) / (2 * k * 16 * 128 * 2) as f64
    };
    let near = |x: f64, want: f64| assert!((x - want).abs() < 1e-3, "{x} {want}");
    near(reads(Mask::FULL, (8192, 8192)), 0.0);
    // 16 MB a head, 171 tiles on 132 processors: 0.6 of 1.3 readings.
    near(reads(Mask::FULL, (32_768, 32_768)), 0.6 * 171.0 / 132.0);
    // 42 of 171 tiles of 192 rows.
    near(reads(Mask::CAUSAL, (32_768, 32_768)), 42.0 * 192.0 / 32_768.0);
    // Behind a long history no tile is short: none is deferred.
    near(reads(Mask::CAUSAL, (2048, 32_768)), 0.0);
}

#[test]
fn many_rows_of_quantised_pages_are_unpacked_and_few_are_not() {
    let p =
        Problem { kv_dtype: DType::I8, kv_scales: ScaleGrain::Token, ..paged(HeadShape::new(32, 8, 128)) };
    let prefill = plan(&p, &[SeqLen::new(2048, 2048), SeqLen::extend(100, 1)], Slower::Refuse).unwrap();
    let text = prefill.to_string();
    assert!(text.contains("unpack (int8 to bf16), forward_causal (forward.cu)"), "{text}");
    let decode = plan(&p, &[SeqLen::extend(2048, 1); 3], Slower::Refuse).unwrap().to_string();
    assert!(decode.contains("decode_cluster") && !decode.contains("unpack"), "{decode}");
    // The e4m3 forward would be faster, and takes no scale a token.
    let e4m3 = Problem { kv_dtype: DType::E4m3, ..p };
    let refused = plan(&e4m3, &[SeqLen::new(512, 512)], Slower::Refuse).unwrap_err();
    assert!(refused.field == "kv_scales" && refused.supported.contains("unpack (e4m3 to bf16)"), "{refused}");
    let allowed = plan(&e4m3, &[SeqLen::new(512, 512)], Slower::Allow).unwrap().to_string();
    assert!(allowed.contains("slower than the e4m3 forward, which refused kv_scales"), "{allowed}");
    // One sequence of the longest kind, not 64 of them.
    let row = 2 * 2 * 8 * 128;
    assert!(prefill.workspace_bytes() < (row * (1 << 17)) + (300 << 20), "{}", prefill.workspace_bytes());
}

#[test]
fn a_batch_invariant_row_of_e4m3_does_not_get_a_scale_that_its_neighbours_make() {
    let p = Problem {
        kv_dtype: DType::E4m3,
        kv_scales: ScaleGrain::Head,
        batch_invariant: true,
        ..paged(HeadShape::new(32, 8, 128))
    };
    // A scale a row: prefill and decode are one kernel, which knows of no neighbour. The bits are the device suite's `invariant`.
    for lens in [&[SeqLen::new(512, 512)][..], &[SeqLen::extend(100, 1); 3]] {
        let text = plan(&p, lens, Slower::Refuse).unwrap().to_string();
        assert!(text.contains("quantise_q, forward_fp8_causal_pages"), "{text}");
    }
    let rows = Problem { kv: KvLayout::Contiguous, ..p };
    let limits = Limits { max_seqs: 1, max_total_q: 1000, max_seqlen_k: 64 };
    let bytes = Plan::new(&rows, Device::H200, limits, Slower::Refuse).unwrap().workspace_bytes();
    assert!(bytes >= 1000 * 32 * (128 + 4), "{bytes}");
}
