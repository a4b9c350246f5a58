//! Whole runs on threads, forward and backward, against one rank and the f64 oracle; public bug reports as cases.

mod common;

use std::num::NonZeroUsize;

use common::{NAMES, Numbers, Whole, distance};
use suanpan_base::{HeadShape, Mask};
use suanpan_parallel::ulysses::split_heads;
use suanpan_parallel::{Attention, Bias, Layout, MaskSlices, ParallelPlan, Pass, Request, Scheme};

/// One rounding of a number to f32, relative.
const ROUNDING: f64 = 1.0 / (1u64 << 24) as f64;

/// The rule of every kernel here: at most twice the error of the plain way (one rank), plus one rounding of the result. Documents of a few
/// tokens on many ranks are all merges: what ranks cost at real lengths is [`error_does_not_grow_with_ranks`].
fn hold(whole: &Whole, n: usize, layout: Layout, scheme: Scheme) {
    hold_within(whole, n, layout, scheme, 2.0, ROUNDING);
}

fn hold_within(whole: &Whole, n: usize, layout: Layout, scheme: Scheme, times: f64, rounding: f64) {
    let oracle = whole.oracle();
    let (one, got) = (whole.run(1, Layout::Contiguous, Scheme::Ring), whole.run(n, layout, scheme));
    for (i, name) in NAMES.iter().enumerate() {
        let (error, base) = (distance(&got[i], &oracle[i]), distance(&one[i], &oracle[i]));
        let size: f64 = oracle[i].iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>().sqrt();
        assert!(
            error <= times * base + rounding * size,
            "{name}, {n} ranks, {layout}, {scheme}, {}: error {error:e}, one rank {base:e}, size {size:e}",
            whole.mask.mask()
        );
    }
}

#[test]
fn error_does_not_grow_with_ranks() {
    let whole = Whole::new(HeadShape::new(2, 1, 64), Mask::CAUSAL, &[1024], 8);
    let (oracle, one) = (whole.oracle(), whole.run(1, Layout::Contiguous, Scheme::Ring));
    let schemes = Scheme::ALL.into_iter().chain([Scheme::Hybrid(2)]);
    for (n, scheme) in schemes.flat_map(|s| [2, 4, 8, 32].map(|n| (n, s))) {
        let got = whole.run(n, Layout::Zigzag, scheme);
        let ratio = |i: usize| distance(&got[i], &oracle[i]) / distance(&one[i], &oracle[i]);
        let ratios: [f64; 5] = std::array::from_fn(ratio);
        println!("{scheme}, {n} ranks: {NAMES:?} {ratios:.2?}");
        for (name, ratio) in NAMES.iter().zip(ratios) {
            assert!(ratio <= 1.25, "{name}, {n} ranks, {scheme}: {ratio} times one rank's error");
        }
    }
}

/// Every bit the same, whoever computes what in whatever order.
#[test]
fn ranks_layouts_and_schemes_change_no_bit_in_the_invariant_mode() {
    let bits = |r: &[Vec<f32>; 5]| r.clone().map(|x| x.into_iter().map(f32::to_bits).collect::<Vec<_>>());
    for (mask, lengths) in [
        (Mask::CAUSAL, &[150][..]),
        (Mask::FULL, &[70]),
        (Mask::streaming(5, 40), &[90, 0, 37]),
        (Mask::chunked(NonZeroUsize::new(24).unwrap()), &[100, 7]),
    ] {
        let mut whole = Whole::new(HeadShape::new(6, 2, 16), mask, lengths, 31);
        whole.invariant_block = NonZeroUsize::new(16);
        whole.attention.dropout = Some((0.2, 5));
        let one = bits(&whole.run(1, Layout::Contiguous, Scheme::Ring));
        for (n, layout) in [2, 3, 4, 8].into_iter().flat_map(|n| Layout::ALL.map(|l| (n, l))) {
            let schemes = Scheme::ALL.into_iter().chain((n % 2 == 0).then_some(Scheme::Hybrid(2)));
            for scheme in schemes {
                assert!(bits(&whole.run(n, layout, scheme)) == one, "{mask}, {n} ranks, {layout}, {scheme}");
            }
        }
        hold(&whole, 4, Layout::Zigzag, Scheme::Hybrid(2));
    }
}

fn all_of(mask: Mask, lengths: &[usize]) {
    let whole = Whole::new(HeadShape::new(4, 2, 16), mask, lengths, 11);
    for n in [2, 3, 4, 8] {
        for layout in Layout::ALL {
            let hybrids = [2, 4].into_iter().filter(|size| n % size == 0).map(Scheme::Hybrid);
            for scheme in Scheme::ALL.into_iter().chain(hybrids) {
                hold(&whole, n, layout, scheme);
            }
        }
    }
}

#[test]
fn causal_on_any_ranks_layout_and_scheme() {
    all_of(Mask::CAUSAL, &[67]);
}

#[test]
fn full_on_any_ranks_layout_and_scheme() {
    all_of(Mask::FULL, &[53]);
}

#[test]
fn windows_and_sink_tokens_on_any_ranks_layout_and_scheme() {
    all_of(Mask::streaming(3, 9), &[61]);
}

#[test]
fn packed_documents_on_any_ranks_layout_and_scheme() {
    all_of(Mask::CAUSAL, &[17, 0, 1, 33, 2]);
}

#[test]
fn chunks_and_windows_to_both_sides_on_any_ranks_layout_and_scheme() {
    all_of(Mask::chunked(NonZeroUsize::new(9).unwrap()), &[40, 11]);
    all_of(Mask { left: Some(4), right: Some(3), ..Mask::FULL }, &[47]);
}

/// A halo sends the very tokens that a window reaches over its border, where all-gather sends chunks.
#[test]
fn a_halo_sends_a_window_and_no_more() {
    let mask = MaskSlices::packed(Mask::window(9), &[64]).unwrap();
    let heads = HeadShape::new(2, 1, 8);
    let (layout, cp_size, pass) = (Layout::Contiguous, 4, Pass::Forward);
    let sent = |scheme| {
        let request = Request { heads, mask: &mask, layout, cp_size, scheme, pass, invariant_block: None };
        let plan = suanpan_parallel::check(ParallelPlan::new(&request).unwrap()).unwrap();
        ((0..4).map(|r| plan.plan().sent_bytes(r)).collect::<Vec<_>>(), plan.plan().carrier_bytes(1))
    };
    let row = 16 * 4;
    assert_eq!(
        sent(Scheme::Halo),
        (vec![8 * row, 8 * row, 8 * row, 0], 8 * row),
        "a window of 9 reaches 8 back"
    );
    assert_eq!(sent(Scheme::AllGather).0, [16 * row, 16 * row, 16 * row, 0]);
}

/// Bias and learned sinks: the same for any ranks as in one call (prime-rl 2828 and 3397: dropped in silence).
#[test]
fn bias_and_learned_sinks_are_not_dropped() {
    let mut whole = Whole::new(HeadShape::new(4, 2, 16), Mask::CAUSAL, &[40, 21], 17);
    let n = whole.mask.tokens();
    let values = Numbers(3).floats(4 * n * n).into();
    whole.attention.bias = Some(Bias { values, head_stride: n * n, row_stride: n });
    whole.attention.sinks = Some([0.5, -2.0, f32::NEG_INFINITY, 3.0].into());
    let (_, one) = whole.run_with_sinks(1, Layout::Contiguous, Scheme::Ring);
    let want = whole.oracle_d_sinks();
    assert!(
        one.iter().zip(&want).all(|(a, b)| (f64::from(*a) - b).abs() <= 1e-4 * b.abs()),
        "{one:?} {want:?}"
    );
    assert!(one[2] == 0.0 && one[3].abs() > 1e-3, "{one:?}");
    for (n, layout) in
        [2, 4, 8].into_iter().flat_map(|n| [Layout::Contiguous, Layout::DocumentZigzag].map(|l| (n, l)))
    {
        for scheme in Scheme::ALL.into_iter().chain([Scheme::Hybrid(2)]) {
            hold(&whole, n, layout, scheme);
            let (_, d_sinks) = whole.run_with_sinks(n, layout, scheme);
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * (1.0 + b.abs());
            assert!(d_sinks.iter().zip(&one).all(near), "{n} {layout} {scheme}: {d_sinks:?} for {one:?}");
        }
    }
}

/// A cached prefix: new tokens see it, forward and backward, as in a call over everything whose other queries have no gradient.
#[test]
fn new_tokens_see_a_cached_prefix_on_any_ranks() {
    let (lengths, cached) = ([50, 0, 23], [37, 0, 0]);
    let mut whole = Whole::new(HeadShape::new(4, 2, 16), Mask::CAUSAL, &lengths, 13);
    let new = |row: usize| row >= cached[0];
    whole.d_out.chunks_exact_mut(64).take(cached[0]).for_each(|row| row.fill(0.0));
    let mut want = whole.oracle();
    want[0].chunks_exact_mut(64).take(cached[0]).for_each(|row| row.fill(0.0));
    want[1].chunks_exact_mut(4).take(cached[0]).for_each(|row| row.fill(f64::NEG_INFINITY));
    whole.mask = MaskSlices::extended(Mask::CAUSAL, &lengths, &cached).unwrap();
    assert_eq!(
        whole.mask.pairs(),
        (0..73).filter(|r| new(*r)).map(|r| if r < 50 { r + 1 } else { r - 49 }).sum::<usize>() as u64
    );
    let one = whole.run(1, Layout::Contiguous, Scheme::Ring);
    for (n, layout) in [2, 4, 8].into_iter().flat_map(|n| Layout::ALL.map(|l| (n, l))) {
        for scheme in Scheme::ALL.into_iter().chain([Scheme::Hybrid(2)]) {
            let got = whole.run(n, layout, scheme);
            for (i, name) in NAMES.iter().enumerate() {
                let size = want[i].iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>().sqrt();
                let (error, base) = (distance(&got[i], &want[i]), distance(&one[i], &want[i]));
                assert!(
                    error <= 2.0 * base + ROUNDING * size,
                    "{name}, {n}, {layout}, {scheme}: {error:e}, one {base:e}"
                );
            }
        }
    }
}

#[test]
fn ranks_without_a_token_are_normal() {
    all_of(Mask::CAUSAL, &[3]);
    all_of(Mask::CAUSAL, &[0]);
}

/// Lengths that do not divide: q = k = 0 and v = position under a causal mask give i / 2 (EasyContext 47, ring-flash-attention 39).
#[test]
fn lengths_that_do_not_divide_keep_the_order_of_tokens() {
    for tokens in [2999, 8, 7, 3, 1] {
        let mut whole = Whole::new(HeadShape::new(1, 1, 4), Mask::CAUSAL, &[tokens], 5);
        whole.q.fill(0.0);
        whole.k.fill(0.0);
        whole.v = (0..tokens).flat_map(|j| [j as f32; 4]).collect();
        for (layout, scheme) in [(Layout::Contiguous, Scheme::Ring), (Layout::Zigzag, Scheme::Ring)] {
            let out = &whole.run(4, layout, scheme)[0];
            for (i, row) in out.chunks_exact(4).enumerate() {
                let want = i as f32 / 2.0;
                assert!(
                    row.iter().all(|x| (x - want).abs() <= 1e-6 * want.max(1.0)),
                    "{tokens} {layout}: {row:?} at {i}"
                );
            }
        }
    }
}

/// Packed sequences of odd lengths lose their last token (TransformerEngine 1930, ring-flash-attention 46).
#[test]
fn packed_sequences_keep_their_last_token() {
    for lengths in [[5, 9, 2], [1, 1, 6], [0, 4, 4]] {
        let whole = Whole::new(HeadShape::new(2, 1, 8), Mask::CAUSAL, &lengths, 9);
        for n in [2, 4] {
            for (layout, scheme) in Layout::ALL.into_iter().flat_map(|l| Scheme::ALL.map(|s| (l, s))) {
                hold(&whole, n, layout, scheme);
            }
        }
    }
}

/// Heads that do not divide, and gradients times the number of ranks (DeepSpeed 6392, 8316 and 5248, verl 1226).
#[test]
fn heads_that_do_not_divide_are_dealt_in_order_and_gradients_are_not_multiplied() {
    let counts =
        |q, kv| split_heads(HeadShape::new(q, kv, 8), 4).iter().map(|s| s.0.len()).collect::<Vec<_>>();
    assert_eq!(counts(12, 12), [3, 3, 3, 3]);
    assert_eq!(counts(7, 7), [2, 2, 2, 1]);
    assert_eq!(counts(12, 2), [3, 3, 3, 3]);
    assert_eq!(counts(2, 1), [1, 1, 0, 0]);
    let run = |q, kv| {
        let whole = Whole::new(HeadShape::new(q, kv, 8), Mask::CAUSAL, &[21], 2);
        hold(&whole, 4, Layout::Zigzag, Scheme::Ulysses);
        whole.run(4, Layout::Zigzag, Scheme::Ulysses)
    };
    let first = run(12, 12);
    for (q, kv) in [(7, 7), (12, 2), (12, 3), (8, 1), (2, 1)] {
        run(q, kv);
    }
    assert_eq!(first, run(12, 12), "another model in between changes no bit");
}

#[test]
fn dropout_softcap_and_scale_are_the_same_for_any_ranks() {
    for (layout, scheme) in [
        (Layout::Contiguous, Scheme::Ring),
        (Layout::Zigzag, Scheme::Ring),
        (Layout::DocumentZigzag, Scheme::AllGather),
        (Layout::Stripe, Scheme::Ulysses),
    ] {
        let mut whole = Whole::new(HeadShape::with_widths(4, 2, 12, 8), Mask::CAUSAL, &[19, 30], 4);
        whole.attention = Attention {
            softmax_scale: Some(0.4),
            softcap: Some(2.0),
            dropout: Some((0.3, 99)),
            ..Attention::default()
        };
        for n in [2, 3, 8] {
            hold(&whole, n, layout, scheme);
        }
    }
}

#[test]
fn what_a_plan_or_a_run_cannot_do_is_refused_by_name() {
    let mask = MaskSlices::packed(Mask::CAUSAL, &[8]).unwrap();
    let heads = HeadShape::new(2, 1, 8);
    let request = |layout, cp_size, heads| {
        ParallelPlan::new(&Request {
            heads,
            mask: &mask,
            layout,
            cp_size,
            scheme: Scheme::Ring,
            pass: Pass::Forward,
            invariant_block: None,
        })
    };
    assert_eq!(request(Layout::Zigzag, 0, heads).unwrap_err().field, "cp_size");
    assert_eq!(request(Layout::Zigzag, 2, HeadShape::new(3, 2, 8)).unwrap_err().field, "num_kv_heads");
    assert_eq!(request(Layout::Zigzag, 2, HeadShape::latent(2, 8, 4)).unwrap_err().field, "values_in_keys");
    let stripe = suanpan_parallel::check(request(Layout::Stripe, 2, heads).unwrap()).unwrap();
    let run = |attention: Attention, inputs| {
        suanpan_parallel::run_threads(&stripe, &attention, inputs, &Default::default()).unwrap_err().field
    };
    let whole = Whole::new(heads, Mask::CAUSAL, &[8], 1);
    let input = |rank| suanpan_parallel::Inputs {
        q: stripe.plan().shards.scatter(rank, &whole.q, 16),
        k: stripe.plan().shards.scatter(rank, &whole.k, 8),
        v: stripe.plan().shards.scatter(rank, &whole.v, 8),
        ..Default::default()
    };
    assert_eq!(run(Attention::default(), vec![]), "inputs");
    let mut short = vec![input(0), input(1)];
    short[1].v.pop();
    assert_eq!(run(Attention::default(), short), "inputs[1].v length");
    let dropout = Attention { dropout: Some((0.5, 1)), ..Attention::default() };
    assert_eq!(run(dropout, vec![input(0), input(1)]), "dropout");
}

/// Tiny documents on many ranks: one rank's error is a rounding or none, so single plans are held to being right at all, and all of them together
/// to the rule. `SUANPAN_RANDOM_PLANS` = how many, 500 by default: the same ones in the same order.
#[test]
fn random_plans_run_on_threads() {
    let (mut all, mut base) = ([0f64; 5], [0f64; 5]);
    let count = std::env::var("SUANPAN_RANDOM_PLANS").map_or(500, |n| n.parse().expect("a number of plans"));
    let mut x = Numbers(21);
    for seed in 0..count {
        let lengths: Vec<usize> = (0..1 + x.below(3)).map(|_| x.below(30)).collect();
        let chunk = NonZeroUsize::new(1 + x.below(9)).unwrap();
        let masks = [
            Mask::FULL,
            Mask::CAUSAL,
            Mask::window(1 + x.below(8)),
            Mask::streaming(2, 1 + x.below(5)),
            Mask::chunked(chunk),
        ];
        let (kv, group) = (1 + x.below(3), 1 + x.below(3));
        let mut whole = Whole::new(HeadShape::new(kv * group, kv, 8), masks[x.below(5)], &lengths, seed);
        let n = 1 + x.below(6);
        let sizes: Vec<usize> = (1..=n).filter(|size| n.is_multiple_of(*size)).collect();
        let schemes = Scheme::ALL.into_iter().chain([Scheme::Hybrid(sizes[x.below(sizes.len())])]);
        let (scheme, layout) = (schemes.collect::<Vec<_>>()[x.below(6)], Layout::ALL[x.below(4)]);
        whole.invariant_block = NonZeroUsize::new(x.below(8)).filter(|b| b.get() > 4);
        let oracle = whole.oracle();
        let (one, got) = (whole.run(1, Layout::Contiguous, Scheme::Ring), whole.run(n, layout, scheme));
        for (i, want) in oracle.iter().enumerate() {
            let size = want.iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>().sqrt().max(1e-3);
            let error = distance(&got[i], want) / size;
            assert!(error < 1e-5, "plan {seed}: {}, {n} ranks, {layout}, {scheme}: {error:e}", NAMES[i]);
            all[i] += error * error;
            base[i] += (distance(&one[i], want) / size).powi(2);
        }
    }
    for (name, (all, base)) in NAMES.iter().zip(all.iter().zip(&base)) {
        let (all, base) = ((all / count as f64).sqrt(), (base / count as f64).sqrt());
        println!("{name}: {all:e}, one rank {base:e}");
        assert!(all <= 2.0 * base + ROUNDING, "{name}: {all:e}, one rank {base:e}");
    }
}
