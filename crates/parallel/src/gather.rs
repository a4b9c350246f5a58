//! All-gather and halo: every rank gets the keys and values that its queries see, once, and works on them together; backward, their gradients
//! go home. All-gather sends whole chunks, of which somebody sees any; a halo sends the very tokens that are seen.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::plan::{
    Buffer, Holds, Move, ParallelPlan, Parcel, Pass, Region, Scheme, Step, Transfer, What, Work, own,
};
use crate::shard::{Run, joined};
use crate::tile::Tile;

/// Who needs which parcels: `[rank][parcel]`.
type Needs = Vec<Vec<bool>>;

/// Fills in the steps of every rank.
pub(crate) fn plan(plan: &mut ParallelPlan) {
    let (n, halo) = (plan.ranks.len(), plan.scheme == Scheme::Halo);
    let needs = if halo { cut_parcels(plan) } else { whole_chunks(plan) };
    for rank in 0..n {
        // A halo's own keys stay where they are, and are worked on while others' arrive.
        let mut gathered = needs[rank].clone();
        let own = plan.parcels_of(rank..rank + 1);
        gathered[own].iter_mut().filter(|_| halo).for_each(|needed| *needed = false);
        let mut steps = vec![exchange(plan, &needs, &gathered, rank), work(plan, &gathered, rank)];
        if plan.pass == Pass::Backward {
            steps.push(bring_home(plan, &needs, &gathered, rank));
        }
        plan.ranks[rank].steps = steps;
    }
    let sent = |rank: usize| -> usize {
        let others = (0..plan.parcels.len()).filter(|&p| needs[rank][p] && plan.parcels[p].rank != rank);
        others.map(|p| plan.parcels[p].tokens.len()).sum()
    };
    let (sent, all) = ((0..n).map(sent).sum::<usize>(), (n - 1) * plan.shards.all_tokens());
    plan.why.push(format!("keys of {sent} of {all} tokens sent: the others are seen by nobody there"));
    plan.why.push(if halo {
        "each rank works on its own keys while others' arrive".into()
    } else {
        "keys lie in global order: one tile a document and run of queries, nothing to merge in between".into()
    });
}

fn whole_chunks(plan: &ParallelPlan) -> Needs {
    let n = plan.ranks.len();
    let any = |rank: usize, o: usize| Tile::any(&plan.mask, plan.shards.runs(rank), plan.shards.runs(o));
    (0..n).map(|rank| plan.parcels.iter().map(|p| any(rank, p.rank)).collect()).collect()
}

/// Numbers of the tokens of rank `origin` that queries of rank `rank` see, as ranges that do not meet.
fn seen(plan: &ParallelPlan, rank: usize, origin: usize) -> Vec<Range<usize>> {
    let runs = (plan.shards.runs(rank), plan.shards.runs(origin));
    let tiles = Tile::cut_all(&plan.mask, runs, &[(0..1, 0..1)], None);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for tile in tiles {
        let first = plan.shards.local(origin, tile.k.start).expect("cut out of its runs");
        ranges.push(first..first + tile.k.count);
    }
    ranges.sort_by_key(|r| r.start);
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// Cuts every rank's tokens where what others see of them begins and ends.
fn cut_parcels(plan: &mut ParallelPlan) -> Needs {
    let n = plan.ranks.len();
    let mut needs: Needs = vec![Vec::new(); n];
    let mut parcels = Vec::new();
    for origin in 0..n {
        let seen: Vec<_> = (0..n).map(|rank| seen(plan, rank, origin)).collect();
        let mut cuts = BTreeSet::from([0, plan.shards.tokens(origin)]);
        cuts.extend(seen.iter().flatten().flat_map(|r| [r.start, r.end]));
        let cuts: Vec<usize> = cuts.into_iter().collect();
        for tokens in cuts.windows(2).map(|w| w[0]..w[1]) {
            for (needs, seen) in needs.iter_mut().zip(&seen) {
                needs.push(seen.iter().any(|r| r.contains(&tokens.start)));
            }
            parcels.push(Parcel { rank: origin, tokens });
        }
    }
    plan.parcels = parcels;
    needs
}

/// The needed parcels of rank `origin`, neighbours together.
fn needed(plan: &ParallelPlan, needs: &[bool], origin: usize) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for parcel in plan.parcels_of(origin..origin + 1).filter(|&p| needs[p]) {
        match joined.last_mut() {
            Some(last) if last.end == parcel => last.end += 1,
            _ => joined.push(parcel..parcel + 1),
        }
    }
    joined
}

fn push(plan: &mut ParallelPlan, rank: usize, what: What, holds: Holds) -> usize {
    let heads = plan.all_heads(what);
    plan.ranks[rank].buffers.push(Buffer { what, holds, heads });
    plan.ranks[rank].buffers.len() - 1
}

fn regions(
    plan: &ParallelPlan,
    buffer: usize,
    needs: &[bool],
    origin: usize,
) -> impl Iterator<Item = Region> + use<> {
    let heads = plan.all_heads(What::Kv);
    needed(plan, needs, origin).into_iter().map(move |parcels| Region {
        buffer,
        parcels,
        heads: heads.clone(),
    })
}

/// From the first to the last position that a rank needs.
fn span(plan: &ParallelPlan, needs: &[bool]) -> Range<usize> {
    let needed = || (0..plan.parcels.len()).filter(|&p| needs[p]).flat_map(|p| plan.runs(p));
    let start = needed().map(|run| run.hull().start).min().unwrap_or(0);
    start..needed().map(|run| run.hull().end).max().unwrap_or(start)
}

/// The number of the buffer with gathered keys and values: the first one behind a rank's own. Their gradients lie in the next one.
fn gathered(plan: &ParallelPlan) -> usize {
    if plan.pass == Pass::Backward { own::D_KV + 1 } else { own::RESULT + 1 }
}

fn exchange(plan: &mut ParallelPlan, needs: &Needs, gather: &[bool], rank: usize) -> Step {
    let span = span(plan, gather);
    let all = push(plan, rank, What::Kv, Holds::Span(span));
    let mut step = Step::default();
    for peer in (0..needs.len()).filter(|&o| o != rank) {
        let mine = regions(plan, own::KV, &needs[peer], rank);
        step.sends.extend(mine.map(|region| Transfer { peer, region }));
        let theirs = regions(plan, all, gather, peer);
        step.recvs.extend(theirs.map(|region| Transfer { peer, region }));
    }
    let own = regions(plan, own::KV, gather, rank);
    step.moves.extend(own.map(|from| Move { from, into: all, add: false }));
    if plan.scheme == Scheme::Halo {
        let d_kv = (plan.pass == Pass::Backward).then_some(own::D_KV);
        let keys = plan.shards.runs(rank).to_vec();
        step.work = tiles(plan, rank, &keys, own::KV, d_kv);
    }
    step
}

fn tiles(plan: &ParallelPlan, rank: usize, keys: &[Run], kv: usize, d_kv: Option<usize>) -> Vec<Work> {
    let runs = (plan.shards.runs(rank), keys);
    let tiles = Tile::cut_all(&plan.mask, runs, &plan.calls(rank), plan.invariant_block);
    tiles.into_iter().map(|tile| Work { tile, q: own::Q, kv, result: own::RESULT, d_kv }).collect()
}

/// The keys that were gathered, neighbours together.
fn keys(plan: &ParallelPlan, gather: &[bool]) -> Vec<Run> {
    let runs: Vec<Run> = (0..gather.len()).filter(|&p| gather[p]).flat_map(|p| plan.runs(p)).collect();
    // Queries of a stripe see keys by the same step only: one run of keys a rank.
    if plan.shards.strided() { runs } else { joined(runs) }
}

fn work(plan: &mut ParallelPlan, gather: &[bool], rank: usize) -> Step {
    let kv = gathered(plan);
    let holds = plan.ranks[rank].buffers[kv].holds.clone();
    let d_kv = (plan.pass == Pass::Backward).then(|| push(plan, rank, What::DKv, holds));
    let mut step = Step::default();
    if let Some(buffer) = d_kv {
        let all = (0..plan.ranks.len()).flat_map(|o| regions(plan, buffer, gather, o));
        step.clears.extend(all);
    }
    step.work = tiles(plan, rank, &keys(plan, gather), kv, d_kv);
    step
}

fn bring_home(plan: &mut ParallelPlan, needs: &Needs, gather: &[bool], rank: usize) -> Step {
    let all = gathered(plan) + 1;
    let mut step = Step::default();
    for origin in 0..needs.len() {
        for from in regions(plan, all, gather, origin) {
            if origin == rank {
                step.moves.push(Move { from, into: own::D_KV, add: true });
            } else {
                step.sends.push(Transfer { peer: origin, region: from });
            }
        }
    }
    for peer in (0..needs.len()).filter(|&peer| peer != rank) {
        // Gradients of a peer arrive apart: all peers' may be under way at once.
        if needed(plan, &needs[peer], rank).is_empty() {
            continue;
        }
        let arriving = push(plan, rank, What::DKv, Holds::Ranks(1));
        for from in regions(plan, arriving, &needs[peer], rank) {
            step.recvs.push(Transfer { peer, region: from.clone() });
            step.moves.push(Move { from, into: own::D_KV, add: true });
        }
    }
    step
}
