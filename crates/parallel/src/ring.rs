//! The ring: chunks of keys and values go from rank to rank as far as somebody sees them; backward, their gradients follow and come home.
//!
//! Step t of rank r works on the chunk of rank r - t. Gradients of a chunk start at the first rank behind its home, one step behind the
//! chunk, and the last rank that needs the chunk sends them home: as many hops as the chunk makes, not one more.

use crate::plan::{Buffer, Move, ParallelPlan, Pass, Region, Step, Transfer, What, Work, own};
use crate::tile::Tile;

/// Buffers behind the rank's own: two for chunks; backward two for gradients on their way, one for those that arrive, one for those that
/// come home.
struct Numbers {
    kv: [usize; 2],
    partial: [usize; 2],
    arriving: usize,
    home: usize,
}

impl Numbers {
    /// The buffer that holds the chunk of step `t`.
    fn kv(&self, t: usize) -> usize {
        if t == 0 { own::KV } else { self.kv[t % 2] }
    }

    /// The buffer that gathers the gradients of the chunk of step `t`.
    fn d_kv(&self, t: usize) -> usize {
        if t == 0 { own::D_KV } else { self.partial[t % 2] }
    }
}

/// How many hops the chunk of each rank makes: to the farthest rank that needs it.
pub(crate) fn hops(n: usize, needs: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    (0..n).map(|o| (1..n).rev().find(|t| needs((o + t) % n, o)).unwrap_or(0)).collect()
}

/// Fills in the steps of every rank.
pub(crate) fn plan(plan: &mut ParallelPlan) {
    let n = plan.ranks.len();
    let hops = hops(n, |rank, origin| plan.needs(rank, origin));
    let farthest = hops.iter().copied().max().unwrap_or(0);
    let backward = plan.pass == Pass::Backward;
    let steps = farthest + 1 + usize::from(backward && farthest > 0);
    for rank in 0..n {
        let numbers = push_buffers(plan, rank, farthest);
        for t in 0..steps {
            let mut step = Step::default();
            chunks(plan, &hops, &numbers, (rank, t), &mut step);
            if backward {
                gradients(plan, &hops, &numbers, (rank, t), &mut step);
            }
            plan.ranks[rank].steps.push(step);
        }
    }
    say(plan, &hops);
}

fn say(plan: &mut ParallelPlan, hops: &[usize]) {
    let n = hops.len();
    if n == 1 {
        return plan.why.push("one rank: nothing travels, whatever the scheme".into());
    }
    let saved: usize = hops.iter().map(|h| n - 1 - h).sum();
    plan.why.push(format!(
        "chunks make {hops:?} hops: to the farthest rank that sees them; {saved} of {} hops saved",
        n * (n - 1)
    ));
}

fn push_buffers(plan: &mut ParallelPlan, rank: usize, farthest: usize) -> Numbers {
    let heads = plan.all_heads(What::Kv);
    let buffers = &mut plan.ranks[rank].buffers;
    let first = buffers.len();
    // A ring of no hop needs no buffer.
    let mut push = |what, count: usize| {
        for _ in 0..if farthest > 0 { count } else { 0 } {
            buffers.push(Buffer { what, whole: false, heads: heads.clone() });
        }
    };
    push(What::Kv, 2);
    if plan.pass == Pass::Backward {
        push(What::DKv, 4);
    }
    Numbers { kv: [first, first + 1], partial: [first + 2, first + 3], arriving: first + 4, home: first + 5 }
}

/// What happens to chunks of keys and values in step `t`.
fn chunks(
    plan: &ParallelPlan,
    hops: &[usize],
    numbers: &Numbers,
    (rank, t): (usize, usize),
    step: &mut Step,
) {
    let n = hops.len();
    let origin = |t: usize| (rank + n * (t / n + 1) - t) % n;
    let region =
        |t: usize| Region { buffer: numbers.kv(t), origin: origin(t), heads: plan.all_heads(What::Kv) };
    if t < n && t < hops[origin(t)] {
        step.sends.push(Transfer { peer: (rank + 1) % n, region: region(t) });
    }
    if t + 1 < n && t < hops[origin(t + 1)] {
        step.recvs.push(Transfer { peer: (rank + n - 1) % n, region: region(t + 1) });
    }
    if t < n && t <= hops[origin(t)] {
        let heads = [plan.split[rank].clone()];
        let tiles = Tile::cut_all(&plan.mask, plan.shards.runs(rank), plan.shards.runs(origin(t)), &heads);
        let d_kv = (plan.pass == Pass::Backward).then(|| numbers.d_kv(t));
        step.work.extend(tiles.into_iter().map(|tile| Work {
            tile,
            q: own::Q,
            kv: numbers.kv(t),
            result: own::RESULT,
            d_kv,
        }));
    }
}

/// What happens to their gradients in step `t`.
fn gradients(
    plan: &ParallelPlan,
    hops: &[usize],
    numbers: &Numbers,
    (rank, t): (usize, usize),
    step: &mut Step,
) {
    let n = hops.len();
    let origin = |t: usize| (rank + n * (t / n + 1) - t) % n;
    let heads = || plan.all_heads(What::DKv);
    if t >= 2 && t - 1 < n && t - 1 <= hops[origin(t - 1)] {
        let (origin, hops) = (origin(t - 1), hops[origin(t - 1)]);
        let peer = if t <= hops { (rank + 1) % n } else { origin };
        let region = Region { buffer: numbers.d_kv(t - 1), origin, heads: heads() };
        step.sends.push(Transfer { peer, region });
    }
    if (1..n).contains(&t) && t <= hops[origin(t)] {
        let origin = origin(t);
        step.clears.push(Region { buffer: numbers.d_kv(t), origin, heads: heads() });
        if t >= 2 {
            let from = Region { buffer: numbers.arriving, origin, heads: heads() };
            step.recvs.push(Transfer { peer: (rank + n - 1) % n, region: from.clone() });
            step.moves.push(Move { from, into: numbers.d_kv(t), add: true });
        }
    }
    if hops[rank] > 0 && t == hops[rank] + 1 {
        let from = Region { buffer: numbers.home, origin: rank, heads: heads() };
        step.recvs.push(Transfer { peer: (rank + hops[rank]) % n, region: from.clone() });
        step.moves.push(Move { from, into: own::D_KV, add: true });
    }
}
