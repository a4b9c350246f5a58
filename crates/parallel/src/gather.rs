//! All-gather: every rank gets the chunks that its queries see, once, and works on them together; backward, their gradients go home.

use crate::plan::{Buffer, Move, ParallelPlan, Pass, Region, Step, Transfer, What, Work, own};
use crate::shard::{Layout, Run};
use crate::tile::Tile;

/// Fills in the steps of every rank.
pub(crate) fn plan(plan: &mut ParallelPlan) {
    let n = plan.ranks.len();
    let needs: Vec<Vec<bool>> = (0..n).map(|r| (0..n).map(|o| plan.needs(r, o)).collect()).collect();
    for rank in 0..n {
        let steps = match plan.pass {
            Pass::Forward => vec![exchange(plan, &needs, rank), work(plan, &needs, rank)],
            Pass::Backward => {
                vec![exchange(plan, &needs, rank), work(plan, &needs, rank), bring_home(plan, &needs, rank)]
            }
        };
        plan.ranks[rank].steps = steps;
    }
    let sent: usize = (0..n).map(|r| (0..n).filter(|&o| o != r && needs[r][o]).count()).sum();
    plan.why.push(format!("{sent} of {} chunks sent: the others are seen by nobody there", n * (n - 1)));
    plan.why.push(
        "keys lie in global order: one tile a document and run of queries, nothing to merge in between"
            .into(),
    );
}

fn push(plan: &mut ParallelPlan, rank: usize, what: What, whole: bool) -> usize {
    let heads = plan.all_heads(what);
    plan.ranks[rank].buffers.push(Buffer { what, whole, heads });
    plan.ranks[rank].buffers.len() - 1
}

fn region(plan: &ParallelPlan, buffer: usize, origin: usize) -> Region {
    Region { buffer, origin, heads: plan.all_heads(What::Kv) }
}

/// The number of the buffer with all keys and values: the first one behind a rank's own. Their gradients lie in the next one.
fn whole_kv(plan: &ParallelPlan) -> usize {
    if plan.pass == Pass::Backward { own::D_KV + 1 } else { own::RESULT + 1 }
}

fn exchange(plan: &mut ParallelPlan, needs: &[Vec<bool>], rank: usize) -> Step {
    let all = push(plan, rank, What::Kv, true);
    let others = |rank: usize| (0..needs.len()).filter(move |&o| o != rank);
    let mut step = Step::default();
    for peer in others(rank).filter(|&peer| needs[peer][rank]) {
        step.sends.push(Transfer { peer, region: region(plan, own::KV, rank) });
    }
    for origin in others(rank).filter(|&origin| needs[rank][origin]) {
        step.recvs.push(Transfer { peer: origin, region: region(plan, all, origin) });
    }
    if needs[rank][rank] {
        step.moves.push(Move { from: region(plan, own::KV, rank), into: all, add: false });
    }
    step
}

fn work(plan: &mut ParallelPlan, needs: &[Vec<bool>], rank: usize) -> Step {
    let kv = whole_kv(plan);
    let d_kv = (plan.pass == Pass::Backward).then(|| push(plan, rank, What::DKv, true));
    let origins = (0..needs.len()).filter(|&o| needs[rank][o]);
    let mut step = Step::default();
    step.clears.extend(
        d_kv.into_iter().flat_map(|b| origins.clone().map(move |o| (b, o))).map(|(b, o)| region(plan, b, o)),
    );
    // Queries of a stripe see keys by the same step only: one run of keys a rank.
    let keys: Vec<Run> = if plan.shards.layout() == Layout::Stripe {
        origins.flat_map(|o| plan.shards.runs(o)).copied().collect()
    } else {
        vec![Run::of(0..plan.shards.all_tokens())]
    };
    let heads = [plan.split[rank].clone()];
    let tiles = Tile::cut_all(&plan.mask, plan.shards.runs(rank), &keys, &heads);
    step.work.extend(tiles.into_iter().map(|tile| Work { tile, q: own::Q, kv, result: own::RESULT, d_kv }));
    step
}

fn bring_home(plan: &mut ParallelPlan, needs: &[Vec<bool>], rank: usize) -> Step {
    let all = whole_kv(plan) + 1;
    let mut step = Step::default();
    for origin in (0..needs.len()).filter(|&o| needs[rank][o]) {
        let from = region(plan, all, origin);
        if origin == rank {
            step.moves.push(Move { from, into: own::D_KV, add: true });
        } else {
            step.sends.push(Transfer { peer: origin, region: from });
        }
    }
    for peer in (0..needs.len()).filter(|&peer| peer != rank && needs[peer][rank]) {
        let arriving = push(plan, rank, What::DKv, false);
        let from = region(plan, arriving, rank);
        step.recvs.push(Transfer { peer, region: from.clone() });
        step.moves.push(Move { from, into: own::D_KV, add: true });
    }
    step
}
