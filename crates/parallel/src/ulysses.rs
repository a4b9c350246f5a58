//! Ulysses: every rank gets some heads of all tokens, works on them alone, and sends the results back.
//!
//! Heads are dealt in order, the first ranks one more where they do not divide; kv heads that several ranks need go to each of them, and
//! their gradients are summed at home. More ranks than heads leave ranks without work.

use std::ops::Range;

use suanpan_base::HeadShape;

use crate::plan::{Buffer, Move, ParallelPlan, Pass, Region, Step, Transfer, What, Work, own};
use crate::shard::{Run, part_of};
use crate::tile::Tile;

/// (query heads, kv heads) of every rank. Whole groups while there are enough kv heads, query heads one by one else.
pub fn split_heads(heads: HeadShape, cp_size: usize) -> Vec<(Range<usize>, Range<usize>)> {
    let group = heads.group_size();
    let of = |rank: usize| {
        if heads.num_kv_heads >= cp_size {
            let kv = part_of(heads.num_kv_heads, cp_size, rank);
            (kv.start * group..kv.end * group, kv)
        } else {
            let q = part_of(heads.num_q_heads, cp_size, rank);
            let kv = if q.is_empty() { 0..0 } else { q.start / group..(q.end - 1) / group + 1 };
            (q, kv)
        }
    };
    (0..cp_size).map(of).collect()
}

/// The calls of a rank: kv heads that serve equally many query heads together, else one by one.
fn calls(heads: HeadShape, (q, kv): &(Range<usize>, Range<usize>)) -> Vec<(Range<usize>, Range<usize>)> {
    let group = heads.group_size();
    if q.is_empty() {
        Vec::new()
    } else if q.len() == kv.len() * group || kv.len() == 1 {
        vec![(q.clone(), kv.clone())]
    } else {
        let of = |h: usize| (q.start.max(h * group)..q.end.min((h + 1) * group), h..h + 1);
        kv.clone().map(of).collect()
    }
}

/// Buffers of all tokens under a rank's heads: queries, keys and values, results, gradients of keys and values.
struct Numbers {
    q: usize,
    kv: usize,
    result: usize,
    d_kv: Option<usize>,
}

/// Fills in the steps of every rank.
pub(crate) fn plan(plan: &mut ParallelPlan) {
    let n = plan.ranks.len();
    plan.split = split_heads(plan.heads, n);
    for rank in 0..n {
        let numbers = push_buffers(plan, rank);
        let mut steps = vec![hand_out(plan, &numbers, rank), work(plan, &numbers, rank)];
        steps.push(bring_home(plan, &numbers, rank));
        plan.ranks[rank].steps = steps;
    }
    let counts =
        |of: fn(&(Range<usize>, Range<usize>)) -> usize| plan.split.iter().map(of).collect::<Vec<_>>();
    let (q, kv) = (counts(|s| s.0.len()), counts(|s| s.1.len()));
    let copies: usize = kv.iter().sum::<usize>() - plan.heads.num_kv_heads.min(kv.iter().sum());
    plan.why.push(format!(
        "query heads {q:?}, kv heads {kv:?} a rank ({copies} kv heads sent twice); tokens in global order"
    ));
}

fn push_buffers(plan: &mut ParallelPlan, rank: usize) -> Numbers {
    let (q_heads, kv_heads) = plan.split[rank].clone();
    let backward = plan.pass == Pass::Backward;
    let buffers = &mut plan.ranks[rank].buffers;
    let mut push = |what: What| {
        let heads = if what.of_keys() { kv_heads.clone() } else { q_heads.clone() };
        buffers.push(Buffer { what, whole: true, heads });
        buffers.len() - 1
    };
    let q = push(if backward { What::QueryState } else { What::Query });
    let (kv, result) = (push(What::Kv), push(if backward { What::DQuery } else { What::Out }));
    Numbers { q, kv, result, d_kv: backward.then(|| push(What::DKv)) }
}

/// The regions of q and kv rows of rank `origin` under the heads of rank `worker`; without those that hold nothing.
fn pair(
    plan: &ParallelPlan,
    buffers: [usize; 2],
    origin: usize,
    worker: usize,
) -> impl Iterator<Item = Region> + use<> {
    let (q_heads, kv_heads) = plan.split[worker].clone();
    let empty = plan.shards.tokens(origin) == 0;
    let regions = [(buffers[0], q_heads), (buffers[1], kv_heads)];
    let region = move |(buffer, heads)| Region { buffer, origin, heads };
    regions.into_iter().map(region).filter(move |r: &Region| !empty && !r.heads.is_empty())
}

fn hand_out(plan: &ParallelPlan, numbers: &Numbers, rank: usize) -> Step {
    let mut step = Step::default();
    for peer in (0..plan.ranks.len()).filter(|&p| p != rank) {
        let own = pair(plan, [own::Q, own::KV], rank, peer);
        step.sends.extend(own.map(|region| Transfer { peer, region }));
        let theirs = pair(plan, [numbers.q, numbers.kv], peer, rank);
        step.recvs.extend(theirs.map(|region| Transfer { peer, region }));
    }
    for (from, into) in pair(plan, [own::Q, own::KV], rank, rank).zip([numbers.q, numbers.kv]) {
        step.moves.push(Move { from, into, add: false });
    }
    step
}

fn work(plan: &ParallelPlan, numbers: &Numbers, rank: usize) -> Step {
    let mut step = Step::default();
    for origin in 0..plan.ranks.len() {
        let results = [numbers.result, numbers.d_kv.unwrap_or(numbers.result)];
        let count = if numbers.d_kv.is_some() { 2 } else { 1 };
        step.clears.extend(pair(plan, results, origin, rank).take(count));
    }
    let all = [Run::of(0..plan.shards.all_tokens())];
    let tiles = Tile::cut_all(&plan.mask, &all, &all, &calls(plan.heads, &plan.split[rank]));
    step.work.extend(tiles.into_iter().map(|tile| Work {
        tile,
        q: numbers.q,
        kv: numbers.kv,
        result: numbers.result,
        d_kv: numbers.d_kv,
    }));
    step
}

fn bring_home(plan: &mut ParallelPlan, numbers: &Numbers, rank: usize) -> Step {
    let mut step = Step::default();
    let (d_kv, count) = (numbers.d_kv.unwrap_or(numbers.result), if numbers.d_kv.is_some() { 2 } else { 1 });
    for (from, into) in
        pair(plan, [numbers.result, d_kv], rank, rank).take(count).zip([own::RESULT, own::D_KV])
    {
        step.moves.push(Move { from, into, add: true });
    }
    for peer in (0..plan.ranks.len()).filter(|&p| p != rank) {
        let theirs = pair(plan, [numbers.result, d_kv], peer, rank).take(count);
        step.sends.extend(theirs.map(|region| Transfer { peer, region }));
        // Heads of outputs and dq come from one rank each; those of dk and dv may come from several and are summed.
        let arriving = plan.ranks[rank].buffers.len();
        let heads = plan.split[peer].1.clone();
        let mine = pair(plan, [own::RESULT, arriving], rank, peer).take(count);
        for region in mine {
            if region.buffer == arriving {
                plan.ranks[rank].buffers.push(Buffer { what: What::DKv, whole: false, heads: heads.clone() });
                step.moves.push(Move { from: region.clone(), into: own::D_KV, add: true });
            }
            step.recvs.push(Transfer { peer, region });
        }
    }
    step
}
