//! Ulysses groups around a ring: every rank of a group gets some heads of all of the group's tokens, works on them in a ring with its peers in
//! other groups, and sends the results back. A group of one is a plain ring; a group of all, whose ring makes no hop, plain Ulysses.
//!
//! Heads are dealt in order, the first ranks one more where they do not divide; kv heads that several ranks need go to each of them, and
//! their gradients are summed at home. More ranks than heads leave ranks without work.

use std::ops::Range;

use suanpan_base::HeadShape;

use crate::plan::{Buffer, Holds, Move, ParallelPlan, Pass, Region, Step, Transfer, What, own};
use crate::ring::{Home, Ring};
use crate::shard::part_of;

/// (query heads, kv heads) of every rank. Whole groups while there are enough kv heads, query heads one by one else.
pub fn split_heads(heads: HeadShape, ranks: usize) -> Vec<(Range<usize>, Range<usize>)> {
    let group = heads.group_size();
    let of = |rank: usize| {
        if heads.num_kv_heads >= ranks {
            let kv = part_of(heads.num_kv_heads, ranks, rank);
            (kv.start * group..kv.end * group, kv)
        } else {
            let q = part_of(heads.num_q_heads, ranks, rank);
            let kv = if q.is_empty() { 0..0 } else { q.start / group..(q.end - 1) / group + 1 };
            (q, kv)
        }
    };
    (0..ranks).map(of).collect()
}

/// The calls of a rank: kv heads that serve equally many query heads together, else one by one; `alone`: query heads one by one.
pub(crate) fn calls(
    heads: HeadShape,
    (q, kv): &(Range<usize>, Range<usize>),
    alone: bool,
) -> Vec<(Range<usize>, Range<usize>)> {
    let group = heads.group_size();
    if q.is_empty() {
        Vec::new()
    } else if alone {
        q.clone().map(|h| (h..h + 1, h / group..h / group + 1)).collect()
    } else if q.len() == kv.len() * group || kv.len() == 1 {
        vec![(q.clone(), kv.clone())]
    } else {
        let of = |h: usize| (q.start.max(h * group)..q.end.min((h + 1) * group), h..h + 1);
        kv.clone().map(of).collect()
    }
}

/// Fills in the steps of every rank.
pub(crate) fn plan(plan: &mut ParallelPlan) {
    let ring = Ring::new(plan);
    let size = plan.ulysses_size();
    for rank in 0..plan.ranks.len() {
        let d_kv = (plan.pass == Pass::Backward).then_some(own::D_KV);
        let home = Home { q: own::Q, kv: own::KV, result: own::RESULT, d_kv };
        let steps = if size == 1 {
            ring.steps(plan, rank, home)
        } else {
            let group = push_buffers(plan, rank);
            let mut steps = vec![hand_out(plan, &group, rank)];
            steps.extend(ring.steps(plan, rank, group.clone()));
            steps[1].clears.splice(0..0, cleared(plan, &group, rank));
            steps.push(bring_home(plan, &group, rank));
            steps
        };
        plan.ranks[rank].steps = steps;
    }
    if plan.ranks.len() == 1 {
        return plan.why.push("one rank: nothing travels, whatever the scheme".into());
    }
    if size < plan.ranks.len() {
        plan.why.push(ring.say());
    }
    if size > 1 {
        say(plan, size);
    }
}

fn say(plan: &mut ParallelPlan, size: usize) {
    let split = &plan.split[..size];
    let counts = |of: fn(&(Range<usize>, Range<usize>)) -> usize| split.iter().map(of).collect::<Vec<_>>();
    let (q, kv) = (counts(|s| s.0.len()), counts(|s| s.1.len()));
    let copies: usize = kv.iter().sum::<usize>() - plan.heads.num_kv_heads.min(kv.iter().sum());
    plan.why.push(format!(
        "query heads {q:?}, kv heads {kv:?} a rank ({copies} kv heads sent twice); a group's tokens lie in one memory"
    ));
}

/// Buffers of the group's tokens under a rank's heads.
fn push_buffers(plan: &mut ParallelPlan, rank: usize) -> Home {
    let (q_heads, kv_heads) = plan.split[rank].clone();
    let backward = plan.pass == Pass::Backward;
    let holds = Holds::Ranks(plan.ulysses_size());
    let buffers = &mut plan.ranks[rank].buffers;
    let mut push = |what: What| {
        let heads = if what.of_keys() { kv_heads.clone() } else { q_heads.clone() };
        buffers.push(Buffer { what, holds: holds.clone(), heads });
        buffers.len() - 1
    };
    let q = push(if backward { What::QueryState } else { What::Query });
    let (kv, result) = (push(What::Kv), push(if backward { What::DQuery } else { What::Out }));
    Home { q, kv, result, d_kv: backward.then(|| push(What::DKv)) }
}

/// The ranks of a rank's group.
fn group(plan: &ParallelPlan, rank: usize) -> Range<usize> {
    let size = plan.ulysses_size();
    rank / size * size..(rank / size + 1) * size
}

/// The regions of rank `origin`'s rows of queries and of keys under the heads of rank `worker`; without those that hold nothing.
fn pair(
    plan: &ParallelPlan,
    buffers: [Option<usize>; 2],
    origin: usize,
    worker: usize,
) -> impl Iterator<Item = Region> + use<> {
    let (q_heads, kv_heads) = plan.split[worker].clone();
    let (parcels, empty) = (plan.parcels_of(origin..origin + 1), plan.shards.tokens(origin) == 0);
    let regions = [(buffers[0], q_heads), (buffers[1], kv_heads)];
    let region = move |(buffer, heads): (Option<usize>, Range<usize>)| {
        let region = Region { buffer: buffer?, parcels: parcels.clone(), heads };
        (!empty && !region.heads.is_empty()).then_some(region)
    };
    regions.into_iter().filter_map(region)
}

fn hand_out(plan: &ParallelPlan, home: &Home, rank: usize) -> Step {
    let mut step = Step::default();
    let (mine, theirs) = ([Some(own::Q), Some(own::KV)], [Some(home.q), Some(home.kv)]);
    for peer in group(plan, rank).filter(|&p| p != rank) {
        step.sends.extend(pair(plan, mine, rank, peer).map(|region| Transfer { peer, region }));
        step.recvs.extend(pair(plan, theirs, peer, rank).map(|region| Transfer { peer, region }));
    }
    for (from, into) in pair(plan, mine, rank, rank).zip([home.q, home.kv]) {
        step.moves.push(Move { from, into, add: false });
    }
    step
}

/// The results of the group's tokens, before anything is added to them.
fn cleared(plan: &ParallelPlan, home: &Home, rank: usize) -> Vec<Region> {
    let results = [Some(home.result), home.d_kv];
    group(plan, rank).flat_map(|origin| pair(plan, results, origin, rank)).collect()
}

fn bring_home(plan: &mut ParallelPlan, home: &Home, rank: usize) -> Step {
    let mut step = Step::default();
    let results = [Some(home.result), home.d_kv];
    for (from, into) in pair(plan, results, rank, rank).zip([own::RESULT, own::D_KV]) {
        step.moves.push(Move { from, into, add: true });
    }
    for peer in group(plan, rank).filter(|&p| p != rank) {
        step.sends.extend(pair(plan, results, peer, rank).map(|region| Transfer { peer, region }));
        // Heads of outputs and dq come from one rank each; those of dk and dv may come from several and are summed.
        let arriving = plan.ranks[rank].buffers.len();
        let mine = [Some(own::RESULT), home.d_kv.map(|_| arriving)];
        for region in pair(plan, mine, rank, peer) {
            if region.buffer == arriving {
                let (heads, holds) = (region.heads.clone(), Holds::Ranks(1));
                plan.ranks[rank].buffers.push(Buffer { what: What::DKv, holds, heads });
                step.moves.push(Move { from: region.clone(), into: own::D_KV, add: true });
            }
            step.recvs.push(Transfer { peer, region });
        }
    }
    step
}
