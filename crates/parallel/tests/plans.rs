//! The planner against the checker: random plans pass, and a plan spoiled in any way does not.

mod common;

use std::num::NonZeroUsize;

use common::Numbers;
use suanpan_base::{HeadShape, Mask};
use suanpan_parallel::plan::{Holds, own};
use suanpan_parallel::simulate::Constants;
use suanpan_parallel::{Flaw, Layout, MaskSlices, ParallelPlan, Pass, Request, Scheme, check};

fn pick<T: Clone>(x: &mut Numbers, of: &[T]) -> T {
    of[x.below(of.len())].clone()
}

/// Any plan of up to 11 ranks and a few dozen tokens.
fn random_plan(x: &mut Numbers) -> ParallelPlan {
    let documents = pick(x, &[1, 1, 2, 3, 6]);
    let lengths: Vec<usize> = (0..documents).map(|_| pick(x, &[0, 1, 2, 3, 5, 8, 13, 21])).collect();
    let chunk = NonZeroUsize::new(1 + x.below(7)).unwrap();
    let window = 1 + x.below(9);
    let masks = [
        Mask::FULL,
        Mask::CAUSAL,
        Mask::CAUSAL,
        Mask::window(window),
        Mask::streaming(1 + x.below(4), window),
        Mask::chunked(chunk),
        Mask { left: Some(x.below(5)), right: Some(x.below(5)), ..Mask::FULL },
        Mask { right: Some(x.below(3)), chunk: Some(chunk), sink_tokens: x.below(3), ..Mask::FULL },
    ];
    let mask = MaskSlices::packed(pick(x, &masks), &lengths).unwrap();
    let (kv, group) = (1 + x.below(5), 1 + x.below(4));
    let (cp_size, block) = (1 + x.below(12), NonZeroUsize::new(1 + x.below(6)));
    let sizes = (1..=cp_size).filter(|size| cp_size.is_multiple_of(*size));
    let mut schemes: Vec<Scheme> = sizes.map(Scheme::Hybrid).collect();
    schemes.extend(Scheme::ALL);
    let request = Request {
        heads: HeadShape::with_widths(kv * group, kv, 1 + x.below(3), 1 + x.below(3)),
        mask: &mask,
        layout: pick(x, &Layout::ALL),
        cp_size,
        scheme: pick(x, &schemes),
        pass: pick(x, &[Pass::Forward, Pass::Backward]),
        invariant_block: pick(x, &[None, None, block]),
    };
    ParallelPlan::new(&request).unwrap()
}

#[test]
fn ten_thousand_random_plans_pass_the_checker() {
    let mut x = Numbers(7);
    for number in 0..10_000 {
        let plan = random_plan(&mut x);
        if let Err(flaw) = check(plan.clone()) {
            panic!("plan {number}: {flaw}\n{plan}");
        }
    }
}

fn plan(scheme: Scheme, pass: Pass) -> ParallelPlan {
    let mask = MaskSlices::packed(Mask::CAUSAL, &[24]).unwrap();
    let heads = HeadShape::new(4, 2, 8);
    ParallelPlan::new(&Request {
        heads,
        mask: &mask,
        layout: Layout::Zigzag,
        cp_size: 4,
        scheme,
        pass,
        invariant_block: None,
    })
    .unwrap()
}

/// Spoils the ring's backward and returns what the checker says.
fn spoiled(spoil: impl FnOnce(&mut ParallelPlan)) -> Flaw {
    let mut plan = plan(Scheme::Ring, Pass::Backward);
    spoil(&mut plan);
    check(plan).expect_err("a spoiled plan")
}

#[test]
fn every_spoiled_plan_is_caught() {
    let flaw = spoiled(|p| {
        p.ranks[1].steps[1].work.pop();
    });
    assert!(matches!(flaw, Flaw::Missed { .. }), "a tile left out: {flaw}");
    let flaw = spoiled(|p| {
        let work = p.ranks[1].steps[1].work[0].clone();
        p.ranks[1].steps[1].work.push(work);
    });
    assert!(matches!(flaw, Flaw::Twice { .. }), "a tile twice: {flaw}");
    let flaw = spoiled(|p| p.ranks[2].steps[0].work.iter_mut().for_each(|w| w.tile.high = None));
    assert!(matches!(flaw, Flaw::Hidden { .. }), "a mask dropped: {flaw}");
    let flaw = spoiled(|p| {
        p.ranks[0].steps[1].sends.remove(0);
    });
    assert!(matches!(flaw, Flaw::Unmatched { .. }), "a message not sent: {flaw}");
    let flaw = spoiled(|p| p.ranks[0].steps[2].sends.swap(0, 1));
    assert!(matches!(flaw, Flaw::Unmatched { .. }), "messages in another order: {flaw}");
    let flaw = spoiled(|p| p.ranks[3].steps[1].sends[0].peer = 2);
    assert!(matches!(flaw, Flaw::Unmatched { .. }), "a message to another rank: {flaw}");
    let flaw = spoiled(|p| {
        // Every rank waits for its chunk a step before its neighbour sends it.
        for rank in &mut p.ranks {
            let late = std::mem::take(&mut rank.steps[0].sends);
            rank.steps[1].sends.splice(0..0, late);
        }
    });
    assert!(matches!(flaw, Flaw::CyclicWait(ref ranks) if ranks.len() == 4), "a circle: {flaw}");
    let flaw = spoiled(|p| p.ranks[1].steps[1].recvs[0].region.buffer = p.ranks[1].steps[1].work[0].kv);
    assert!(matches!(flaw, Flaw::Rewritten { rank: 1, step: 1, .. }), "received into keys in use: {flaw}");
    let flaw = spoiled(|p| {
        let sent = p.ranks[1].steps[2].sends[1].region.clone();
        p.ranks[1].steps[2].clears.push(sent);
    });
    assert!(matches!(flaw, Flaw::Rewritten { rank: 1, step: 2, .. }), "cleared while sent: {flaw}");
    let flaw = spoiled(|p| p.ranks[1].steps[1].work[0].kv = own::KV);
    assert!(matches!(flaw, Flaw::Absent { rank: 1, step: 1, buffer: own::KV, .. }), "stale keys: {flaw}");
    let flaw = spoiled(|p| {
        p.ranks[1].steps[2].moves.pop();
    });
    assert!(matches!(flaw, Flaw::Incomplete { .. }), "gradients not added: {flaw}");
    let flaw = spoiled(|p| {
        let again = p.ranks[1].steps[2].moves[0].clone();
        p.ranks[1].steps[2].moves.push(again);
    });
    assert!(matches!(flaw, Flaw::AddedTwice { rank: 1, step: 2, .. }), "gradients added twice: {flaw}");
    let flaw = spoiled(|p| {
        p.ranks[1].steps[2].clears.pop();
    });
    assert!(matches!(flaw, Flaw::Absent { .. } | Flaw::AddedTwice { .. }), "sums not cleared: {flaw}");
    let flaw = spoiled(|p| p.ranks[0].steps[0].work[0].tile.kv_heads = 0..1);
    assert!(matches!(flaw, Flaw::Malformed { .. }), "query heads over the wrong kv head: {flaw}");
    let flaw = spoiled(|p| p.ranks[0].steps[0].sends[0].region.buffer = 99);
    assert!(matches!(flaw, Flaw::Malformed { .. }), "no such buffer: {flaw}");
}

#[test]
fn a_chunk_sent_for_nobody_is_not_the_ledgers() {
    // Causal and contiguous: nobody needs the last rank's chunk. All-gather, one message too many.
    let mask = MaskSlices::packed(Mask::CAUSAL, &[24]).unwrap();
    let heads = HeadShape::new(4, 2, 8);
    let (layout, scheme, pass) = (Layout::Contiguous, Scheme::AllGather, Pass::Forward);
    let mut plan = ParallelPlan::new(&Request {
        heads,
        mask: &mask,
        layout,
        cp_size: 3,
        scheme,
        pass,
        invariant_block: None,
    })
    .unwrap();
    let mut send = plan.ranks[0].steps[0].sends[0].clone();
    (send.peer, send.region.parcels) = (0, 2..3);
    plan.ranks[2].steps[0].sends.push(send);
    let mut recv = plan.ranks[1].steps[0].recvs[0].clone();
    (recv.peer, recv.region.parcels) = (2, 2..3);
    plan.ranks[0].steps[0].recvs.push(recv);
    plan.ranks[0].buffers[3].holds = Holds::Span(0..24);
    let flaw = check(plan).expect_err("a chunk too many");
    assert!(matches!(flaw, Flaw::Bytes { rank: 2, ledger: 0, .. }), "{flaw}");
}

#[test]
fn zigzag_is_even_and_contiguous_is_not() {
    let mask = MaskSlices::packed(Mask::CAUSAL, &[4096]).unwrap();
    let heads = HeadShape::new(1, 1, 8);
    let plan = |layout| {
        let (scheme, pass) = (Scheme::Ring, Pass::Forward);
        ParallelPlan::new(&Request {
            heads,
            mask: &mask,
            layout,
            cp_size: 8,
            scheme,
            pass,
            invariant_block: None,
        })
        .unwrap()
    };
    // Step by step the ring waits for its busiest rank: one half block, then N - 1 whole ones, where N / 2 are the mean.
    assert!((plan(Layout::Contiguous).step_imbalance() - 15.0 / 8.0).abs() < 0.01);
    assert!(plan(Layout::Zigzag).step_imbalance() < 1.01);
    assert!(plan(Layout::Stripe).step_imbalance() < 1.01);
    let text = plan(Layout::Contiguous).to_string();
    assert!(
        text.contains("chunks of keys make [7, 6, 5, 4, 3, 2, 1, 0] hops")
            && text.contains("28 of 56 hops saved"),
        "{text}"
    );
}

#[test]
fn packed_documents_are_even_under_document_zigzag() {
    // 64k tokens, documents of 100 to 20,000: lengths with a heavy tail, as in packed training batches.
    let (mut x, mut lengths) = (Numbers(3), Vec::new());
    while lengths.iter().sum::<usize>() < 65_536 {
        let n = (100.0 * 200f64.powf(x.below(1000) as f64 / 1000.0)) as usize;
        lengths.push(n.min(65_536 - lengths.iter().sum::<usize>()));
    }
    let mask = MaskSlices::packed(Mask::CAUSAL, &lengths).unwrap();
    let heads = HeadShape::new(1, 1, 8);
    // What kernels take for tiles: a call 5 us, a pair 2 ns, a row 0.19 us, as measured on one core (docs/parallel.md).
    let constants = Constants {
        tile_us: 5.0,
        forward_pair_us: 2e-3,
        forward_row_us: 0.19,
        granule: 1,
        ..Constants::h200(64)
    };
    let work = |plan: &ParallelPlan| -> f64 {
        let all = plan.ranks.iter().flat_map(|r| &r.steps).flat_map(|s| &s.work);
        all.map(|w| constants.work_us(Pass::Forward, w)).sum()
    };
    let plan = |cp_size, scheme| {
        let (layout, pass) = (Layout::DocumentZigzag, Pass::Forward);
        let request = Request { heads, mask: &mask, layout, cp_size, scheme, pass, invariant_block: None };
        ParallelPlan::new(&request).unwrap()
    };
    let one = work(&plan(1, Scheme::Ring));
    for scheme in [Scheme::Ring, Scheme::AllGather, Scheme::Halo] {
        let plan = plan(8, scheme);
        println!("{scheme}: imbalance {:.4}, work {:.4}", plan.imbalance(), work(&plan) / one);
        assert!(plan.imbalance() <= 1.05, "{scheme}: {}", plan.imbalance());
        let pairs: u64 = (0..8).map(|rank| plan.pairs(rank)).sum();
        assert_eq!(pairs, mask.pairs(), "no pair is worked on for nothing");
        let counts = plan.shards.counts();
        assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= lengths.len(), "{counts:?}");
    }
}
