//! The checker: proves a plan before anything runs, from the mask and the shards alone, or says where it is wrong.
//!
//! Every visible pair once; messages matched in order; nobody waits in a circle; nothing read before it is there, nothing rewritten while
//! somebody reads it; every result at home with all of its parts, each once; bytes as the ledger's formula. Steps are executed on names:
//! a buffer holds, for each (parcel, head), the set of tiles that were added to it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use suanpan_ledger::parallel::{self, Carriers};

use crate::flaw::Flaw;
use crate::plan::{Holds, ParallelPlan, Pass, Region, Scheme, Step, Transfer, What, Work, own};
use crate::ring;
use crate::shard::{Run, number};

/// A plan that passed [`check`]; only such a plan runs.
#[derive(Clone, Debug)]
pub struct Checked(Arc<ParallelPlan>);

impl Checked {
    /// The plan.
    pub fn plan(&self) -> &Arc<ParallelPlan> {
        &self.0
    }
}

/// Proves `plan`, or says the first thing that is wrong with it.
pub fn check(plan: ParallelPlan) -> Result<Checked, Flaw> {
    let facts = Facts::of(&plan)?;
    facts.pairs()?;
    matched(&plan)?;
    let mut machine = Machine::new(&facts);
    machine.run()?;
    machine.results()?;
    facts.bytes()?;
    Ok(Checked(Arc::new(plan)))
}

/// A tile with its place in the plan and the parcels whose tokens it touches.
struct Placed<'p> {
    rank: usize,
    step: usize,
    work: &'p Work,
    q_parcels: BTreeSet<usize>,
    k_parcels: BTreeSet<usize>,
}

/// A plan with what follows from its shards.
struct Facts<'p> {
    plan: &'p ParallelPlan,
    /// The parcel that each global position is in.
    parcel: Vec<u32>,
    /// All tiles, in order of rank and step.
    tiles: Vec<Placed<'p>>,
    /// First tile of each (rank, step).
    first: Vec<Vec<usize>>,
}

fn malformed(rank: usize, step: usize, what: impl Into<String>) -> Flaw {
    Flaw::Malformed { rank, step, what: what.into() }
}

impl<'p> Facts<'p> {
    fn of(plan: &'p ParallelPlan) -> Result<Facts<'p>, Flaw> {
        if plan.ranks.len() != plan.shards.cp_size() {
            return Err(malformed(0, 0, "as many rank plans as ranks"));
        }
        let parcel = parcels(plan)?;
        let mut facts = Facts { plan, parcel, tiles: Vec::new(), first: Vec::new() };
        for (rank, steps) in plan.ranks.iter().enumerate() {
            facts.first.push(Vec::new());
            for (t, step) in steps.steps.iter().enumerate() {
                let first = facts.tiles.len();
                facts.first[rank].push(first);
                facts.well_formed(rank, t, step)?;
                for work in &step.work {
                    let parcels = |run: Run| run.positions().map(|at| facts.parcel[at] as usize).collect();
                    let (q_parcels, k_parcels) = (parcels(work.tile.q), parcels(work.tile.k));
                    facts.tiles.push(Placed { rank, step: t, work, q_parcels, k_parcels });
                }
            }
        }
        Ok(facts)
    }

    /// Numbers in range, kinds that fit.
    fn well_formed(&self, rank: usize, t: usize, step: &Step) -> Result<(), Flaw> {
        let (plan, n) = (self.plan, self.plan.ranks.len());
        let buffers = &plan.ranks[rank].buffers;
        let moved = step.moves.iter().map(|m| &m.from);
        let transfers = || step.sends.iter().chain(&step.recvs);
        for r in transfers().map(|x| &x.region).chain(&step.clears).chain(moved) {
            let Some(buffer) = buffers.get(r.buffer) else {
                return Err(malformed(rank, t, "no such buffer"));
            };
            let heads = r.heads.start >= buffer.heads.start && r.heads.end <= buffer.heads.end;
            if !heads || r.parcels.end > plan.parcels.len() || !self.fits(&buffer.holds, &r.parcels) {
                return Err(malformed(rank, t, format!("buffer {} has no region {r:?}", r.buffer)));
            }
        }
        if transfers().any(|x| x.peer >= n || x.peer == rank) {
            return Err(malformed(rank, t, "a message to itself or to no rank"));
        }
        for m in &step.moves {
            let fits = buffers.get(m.into).is_some_and(|b| b.what == buffers[m.from.buffer].what);
            if !fits || m.into == m.from.buffer {
                return Err(malformed(rank, t, "a move between buffers of two kinds"));
            }
        }
        step.work.iter().try_for_each(|work| self.work_is_well_formed(rank, t, work))
    }

    /// Whether a buffer can hold these parcels at once.
    fn fits(&self, holds: &Holds, parcels: &Range<usize>) -> bool {
        let of = |p: usize| &self.plan.parcels[p];
        match holds {
            _ if parcels.is_empty() => false,
            Holds::Ranks(size) => of(parcels.start).rank / size == of(parcels.end - 1).rank / size,
            Holds::Span(span) => parcels
                .clone()
                .flat_map(|p| self.plan.runs(p))
                .all(|run| span.start <= run.hull().start && run.hull().end <= span.end),
        }
    }

    /// Whether a kernel can walk through the run's rows: they are apart by one step in the buffer.
    fn walks(&self, holds: &Holds, run: Run) -> bool {
        let Holds::Ranks(size) = holds else { return true };
        let rank = self.plan.parcels[self.parcel[run.start] as usize].rank;
        let memory = self.plan.shards.group(rank / size * size, *size);
        let at = |i: usize| number(&memory, run.at(i));
        at(0).zip(at(run.count - 1)).is_some_and(|(first, last)| last - first == run.count - 1)
    }

    fn work_is_well_formed(&self, rank: usize, t: usize, work: &Work) -> Result<(), Flaw> {
        let (heads, tile) = (self.plan.heads, &work.tile);
        let what = |buffer: usize| self.plan.ranks[rank].buffers.get(buffer).map(|b| b.what);
        let kinds = match self.plan.pass {
            Pass::Forward => [What::Query, What::Out],
            Pass::Backward => [What::QueryState, What::DQuery],
        };
        let d_kv = (self.plan.pass == Pass::Backward).then_some(What::DKv);
        if [what(work.q), what(work.result), what(work.kv)]
            != [Some(kinds[0]), Some(kinds[1]), Some(What::Kv)]
            || work.d_kv.and_then(what) != d_kv
        {
            return Err(malformed(rank, t, "a kernel over buffers of the wrong kind"));
        }
        let (q, kv) = (&tile.q_heads, &tile.kv_heads);
        let groups = !q.is_empty() && !kv.is_empty() && q.len().is_multiple_of(kv.len());
        let right = |h: usize| kv.start + (h - q.start) / (q.len() / kv.len()) == h / heads.group_size();
        if !groups || q.end > heads.num_q_heads || !q.clone().all(right) {
            return Err(malformed(rank, t, format!("query heads {q:?} over kv heads {kv:?}")));
        }
        let inside = |run: Run| run.count > 0 && run.step > 0 && run.hull().end <= self.parcel.len();
        if !inside(tile.q) || !inside(tile.k) {
            return Err(malformed(rank, t, "a tile outside of all tokens"));
        }
        let holds = |buffer: usize| &self.plan.ranks[rank].buffers[buffer].holds;
        if !self.walks(holds(work.q), tile.q) || !self.walks(holds(work.kv), tile.k) {
            return Err(malformed(rank, t, "a tile of rows that do not follow each other"));
        }
        Ok(())
    }

    /// Every visible (query, key) pair of every head in exactly one tile, and no other pair.
    fn pairs(&self) -> Result<(), Flaw> {
        let mask = &self.plan.mask;
        let mut rows: Vec<Vec<(usize, Run)>> = vec![Vec::new(); self.parcel.len()];
        for (number, placed) in self.tiles.iter().enumerate() {
            let tile = &placed.work.tile;
            for (i, query) in tile.q.positions().enumerate() {
                let keys = tile.k.part(tile.keys(i));
                let inside =
                    |seen: Range<usize>| seen.start <= keys.hull().start && keys.hull().end <= seen.end;
                if keys.count > 0 && !mask.keys(query).any(inside) {
                    return Err(Flaw::Hidden { rank: placed.rank, step: placed.step, query });
                }
                rows[query].push((number, keys));
            }
        }
        for (query, row) in rows.iter().enumerate() {
            let visible: usize = mask.keys(query).map(|keys| keys.len()).sum();
            // Heads between two borders of tiles are worked on by the same tiles.
            let mut borders = BTreeSet::from([0, self.plan.heads.num_q_heads]);
            for (number, _) in row {
                let heads = &self.tiles[*number].work.tile.q_heads;
                borders.extend([heads.start, heads.end]);
            }
            for head in borders.into_iter().filter(|h| *h < self.plan.heads.num_q_heads) {
                let of_head =
                    |(number, _): &&(usize, Run)| self.tiles[*number].work.tile.q_heads.contains(&head);
                let mut runs: Vec<Run> = row.iter().filter(of_head).map(|(_, run)| *run).collect();
                runs.sort_by_key(|run| run.start);
                if let Some(key) = shared(&runs) {
                    return Err(Flaw::Twice { query, head, key });
                }
                let worked = runs.iter().map(|run| run.count).sum();
                if worked != visible {
                    return Err(Flaw::Missed { query, head, worked, visible });
                }
            }
        }
        Ok(())
    }

    /// `[rank][origin]`: how many keys of `origin` some query of `rank` sees, looked up in the mask row by row.
    fn seen(&self) -> Vec<Vec<usize>> {
        let (plan, n) = (self.plan, self.plan.ranks.len());
        let of = |rank: usize| {
            let mut change = vec![0i64; self.parcel.len() + 1];
            for keys in plan.shards.positions(rank).flat_map(|query| plan.mask.keys(query)) {
                change[keys.start] += 1;
                change[keys.end] -= 1;
            }
            let (mut depth, mut seen) = (0, vec![0; n]);
            for (at, change) in change.into_iter().enumerate().take(self.parcel.len()) {
                depth += change;
                seen[plan.parcels[self.parcel[at] as usize].rank] += usize::from(depth > 0);
            }
            seen
        };
        (0..n).map(of).collect()
    }

    /// Bytes sent, rank by rank, against the ledger's formula.
    fn bytes(&self) -> Result<(), Flaw> {
        let (plan, n, size) = (self.plan, self.plan.ranks.len(), self.plan.ulysses_size());
        let (seen, tokens) = (self.seen(), plan.shards.counts());
        let c = Carriers::of(plan.heads, plan.pass == Pass::Backward, plan.order_free());
        let (q, kv) = (plan.heads.num_q_heads as u64, plan.heads.num_kv_heads as u64);
        let needs = |rank: usize, origin: usize| seen[rank][origin] > 0;
        let group = |g: usize| g * size..(g + 1) * size;
        let meets = |a: usize, b: usize| group(a).any(|rank| group(b).any(|origin| needs(rank, origin)));
        let ledger = match plan.scheme {
            Scheme::RingQuery => {
                let hops = ring::hops(n, |at, origin| needs(origin, at));
                parallel::ring_bytes(&tokens, &hops, q * c.q, q * c.result)
            }
            Scheme::AllGather => {
                let whole = |rank: usize| (0..n).map(move |o| (rank, o));
                let chunks = |(rank, o)| if needs(rank, o) { tokens[o] } else { 0 };
                let chunks: Vec<Vec<usize>> = (0..n).map(|r| whole(r).map(chunks).collect()).collect();
                parallel::gather_bytes(&chunks, kv * c.kv, kv * c.d_kv)
            }
            Scheme::Halo => parallel::gather_bytes(&seen, kv * c.kv, kv * c.d_kv),
            Scheme::Ring | Scheme::Ulysses | Scheme::Hybrid(_) => {
                let hops = ring::hops(n / size, meets);
                parallel::hybrid_bytes(c, &tokens, &plan.split, size, &hops)
            }
        };
        for (rank, ledger) in ledger.into_iter().enumerate() {
            let planned = plan.sent_bytes(rank);
            if planned != ledger {
                return Err(Flaw::Bytes { rank, planned, ledger });
            }
        }
        Ok(())
    }

    /// The regions that a tile's kernel touches: (q, kv, result and d_kv).
    fn regions(&self, placed: &Placed<'_>) -> (Vec<Region>, Vec<Region>) {
        let (work, tile) = (placed.work, &placed.work.tile);
        let of = |buffer: usize, parcels: &BTreeSet<usize>, heads: &Range<usize>| -> Vec<Region> {
            parcels.iter().map(|&p| Region { buffer, parcels: p..p + 1, heads: heads.clone() }).collect()
        };
        let mut reads = of(work.q, &placed.q_parcels, &tile.q_heads);
        reads.extend(of(work.kv, &placed.k_parcels, &tile.kv_heads));
        let mut writes = of(work.result, &placed.q_parcels, &tile.q_heads);
        writes.extend(work.d_kv.iter().flat_map(|&b| of(b, &placed.k_parcels, &tile.kv_heads)));
        (reads, writes)
    }
}

/// The parcel of every global position; refuses parcels that are not all tokens, each once, rank by rank.
fn parcels(plan: &ParallelPlan) -> Result<Vec<u32>, Flaw> {
    let mut of = vec![u32::MAX; plan.shards.all_tokens()];
    let sorted = plan.parcels.is_sorted_by_key(|p| p.rank);
    for number in 0..plan.parcels.len() {
        let parcel = &plan.parcels[number];
        if parcel.rank >= plan.ranks.len() || parcel.tokens.end > plan.shards.tokens(parcel.rank) {
            return Err(malformed(parcel.rank, 0, "a parcel of tokens that are not there"));
        }
        for at in plan.runs(number).into_iter().flat_map(Run::positions) {
            if of[at] != u32::MAX {
                return Err(malformed(parcel.rank, 0, format!("position {at} in two parcels")));
            }
            of[at] = number as u32;
        }
    }
    match of.iter().position(|p| *p == u32::MAX) {
        None if sorted => Ok(of),
        None => Err(malformed(0, 0, "parcels not in order of ranks")),
        Some(at) => Err(malformed(0, 0, format!("position {at} in no parcel"))),
    }
}

/// Every (parcel, head) of a region.
fn places(parcels: &Range<usize>, heads: &Range<usize>) -> Vec<(usize, usize)> {
    parcels.clone().flat_map(|p| heads.clone().map(move |h| (p, h))).collect()
}

/// A position that two of these runs share. Sorted by their starts.
fn shared(runs: &[Run]) -> Option<usize> {
    for (i, a) in runs.iter().enumerate().filter(|(_, a)| a.count > 0) {
        for b in runs[i + 1..].iter().filter(|b| b.count > 0).take_while(|b| b.start < a.hull().end) {
            // Runs of one step meet at the later start or nowhere; others are looked through.
            let at = if a.step == b.step || b.count == 1 {
                a.number(b.start).map(|_| b.start)
            } else {
                b.positions().find(|at| a.number(*at).is_some())
            };
            if at.is_some() {
                return at;
            }
        }
    }
    None
}

/// A message: what its rows are, and which.
type Message<'p> = (What, &'p Region);

/// Messages of each pair of ranks, in order: both ends know of the same ones.
fn matched(plan: &ParallelPlan) -> Result<(), Flaw> {
    let mut ends: BTreeMap<(usize, usize), [Vec<Message<'_>>; 2]> = BTreeMap::new();
    for (rank, steps) in plan.ranks.iter().enumerate() {
        let what = |x: &Transfer| steps.buffers[x.region.buffer].what;
        for step in &steps.steps {
            step.sends
                .iter()
                .for_each(|x| ends.entry((rank, x.peer)).or_default()[0].push((what(x), &x.region)));
            step.recvs
                .iter()
                .for_each(|x| ends.entry((x.peer, rank)).or_default()[1].push((what(x), &x.region)));
        }
    }
    let same =
        |a: &Message<'_>, b: &Message<'_>| (a.0, &a.1.parcels, &a.1.heads) == (b.0, &b.1.parcels, &b.1.heads);
    for ((from, to), [sent, expected]) in ends {
        for number in 0..sent.len().max(expected.len()) {
            let (sent, expected) = (sent.get(number), expected.get(number));
            if !sent.zip(expected).is_some_and(|(a, b)| same(a, b)) {
                let name = |end: Option<&Message<'_>>| {
                    let of = |(what, r): &Message<'_>| {
                        format!("{what:?} of parcels {:?}, heads {:?}", r.parcels, r.heads)
                    };
                    end.map_or("nothing".to_string(), of)
                };
                let (sent, expected) = (name(sent), name(expected));
                return Err(Flaw::Unmatched { from, to, number, sent, expected });
            }
        }
    }
    Ok(())
}

/// What a buffer holds: for each (parcel, head) the tiles added to it.
type Content = BTreeMap<(usize, usize), BTreeSet<usize>>;

/// Executes a plan on names. Messages wait for their receiver, as on a network without room for them.
struct Machine<'f, 'p> {
    facts: &'f Facts<'p>,
    buffers: Vec<Vec<Content>>,
    /// Next step of each rank, and whether its messages are posted.
    at: Vec<(usize, bool)>,
    /// Messages under way, by (from, to).
    queues: Vec<VecDeque<Vec<BTreeSet<usize>>>>,
    /// Messages sent, and receives posted, by (from, to).
    sent: Vec<usize>,
    posted: Vec<usize>,
}

impl<'f, 'p> Machine<'f, 'p> {
    fn new(facts: &'f Facts<'p>) -> Machine<'f, 'p> {
        let (plan, n) = (facts.plan, facts.plan.ranks.len());
        let own = if plan.pass == Pass::Backward { own::D_KV } else { own::RESULT };
        let fill = |rank: usize, number: usize| -> Content {
            let heads = plan.ranks[rank].buffers[number].heads.clone();
            let all = places(&plan.parcels_of(rank..rank + 1), &heads);
            if number <= own {
                all.into_iter().map(|at| (at, BTreeSet::new())).collect()
            } else {
                Content::new()
            }
        };
        let of = |rank: usize| (0..plan.ranks[rank].buffers.len()).map(|b| fill(rank, b)).collect();
        let pairs = n * n;
        Machine {
            facts,
            buffers: (0..n).map(of).collect(),
            at: vec![(0, false); n],
            queues: vec![VecDeque::new(); pairs],
            sent: vec![0; pairs],
            posted: vec![0; pairs],
        }
    }

    fn step(&self, rank: usize) -> Option<&'p Step> {
        self.facts.plan.ranks[rank].steps.get(self.at[rank].0)
    }

    /// Runs all ranks to their ends.
    fn run(&mut self) -> Result<(), Flaw> {
        let n = self.at.len();
        loop {
            let mut moved = false;
            for rank in 0..n {
                while let Some(step) = self.step(rank) {
                    if !self.at[rank].1 {
                        self.post(rank, step)?;
                        moved = true;
                    }
                    if !self.can_end(rank, step) {
                        break;
                    }
                    self.end(rank, step)?;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let stuck: Vec<_> = (0..n).filter(|&r| self.step(r).is_some()).map(|r| (r, self.at[r].0)).collect();
        if stuck.is_empty() { Ok(()) } else { Err(Flaw::CyclicWait(stuck)) }
    }

    fn read(&self, rank: usize, r: &Region) -> Result<Vec<BTreeSet<usize>>, Flaw> {
        let (step, content) = (self.at[rank].0, &self.buffers[rank][r.buffer]);
        let absent = |(parcel, head)| Flaw::Absent { rank, step, buffer: r.buffer, parcel, head };
        let of = |at| content.get(&at).cloned().ok_or_else(|| absent(at));
        places(&r.parcels, &r.heads).into_iter().map(of).collect()
    }

    fn write(&mut self, rank: usize, r: &Region, values: Vec<BTreeSet<usize>>) {
        let plan = self.facts.plan;
        let content = &mut self.buffers[rank][r.buffer];
        if let Holds::Ranks(size) = plan.ranks[rank].buffers[r.buffer].holds {
            // Another group's tokens: what was there is gone.
            let group = |parcel: usize| plan.parcels[parcel].rank / size;
            let other = |p: usize| r.parcels.clone().next().is_some_and(|first| group(first) != group(p));
            if content.keys().next().is_some_and(|(parcel, _)| other(*parcel)) {
                content.clear();
            }
        }
        content.extend(places(&r.parcels, &r.heads).into_iter().zip(values));
    }

    fn add(&mut self, rank: usize, r: &Region, values: &[BTreeSet<usize>]) -> Result<(), Flaw> {
        let step = self.at[rank].0;
        self.read(rank, r)?;
        for (at, value) in places(&r.parcels, &r.heads).into_iter().zip(values) {
            let into = self.buffers[rank][r.buffer].get_mut(&at).expect("read above");
            if !into.is_disjoint(value) {
                return Err(Flaw::AddedTwice { rank, step, buffer: r.buffer, parcel: at.0 });
            }
            into.extend(value);
        }
        Ok(())
    }

    /// A step up to its wait: nothing that others may still be reading or writing is touched.
    fn post(&mut self, rank: usize, step: &Step) -> Result<(), Flaw> {
        let (facts, t, n) = (self.facts, self.at[rank].0, self.at.len());
        let first = facts.first[rank][t];
        self.in_use(rank, t, step)?;
        for send in &step.sends {
            let values = self.read(rank, &send.region)?;
            self.queues[rank * n + send.peer].push_back(values);
            self.sent[rank * n + send.peer] += 1;
        }
        for recv in &step.recvs {
            self.posted[recv.peer * n + rank] += 1;
            // Poison: what was there is gone.
            let content = &mut self.buffers[rank][recv.region.buffer];
            places(&recv.region.parcels, &recv.region.heads).iter().for_each(|at| drop(content.remove(at)));
        }
        for clear in &step.clears {
            self.write(rank, clear, vec![BTreeSet::new(); clear.parcels.len() * clear.heads.len()]);
        }
        for number in first..first + step.work.len() {
            let (reads, writes) = facts.regions(&facts.tiles[number]);
            reads.iter().try_for_each(|r| self.read(rank, r).map(drop))?;
            writes
                .iter()
                .try_for_each(|w| self.add(rank, w, &vec![BTreeSet::from([number]); w.heads.len()]))?;
        }
        self.at[rank].1 = true;
        Ok(())
    }

    /// Refuses a step whose receives write what it uses otherwise, or that changes what it sends.
    fn in_use(&self, rank: usize, t: usize, step: &Step) -> Result<(), Flaw> {
        let facts = self.facts;
        let tiles = &facts.tiles[facts.first[rank][t]..][..step.work.len()];
        let (mut reads, mut writes) = (Vec::new(), step.clears.clone());
        for placed in tiles {
            let (r, w) = facts.regions(placed);
            reads.extend(r);
            writes.extend(w);
        }
        let meet = |a: &Region, b: &Region| {
            let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
            let group = |r: &Region, size: usize| facts.plan.parcels[r.parcels.start].rank / size;
            let apart = match facts.plan.ranks[rank].buffers[a.buffer].holds {
                Holds::Ranks(size) => group(a, size) != group(b, size),
                Holds::Span(_) => false,
            };
            a.buffer == b.buffer && (apart || overlap(&a.parcels, &b.parcels) && overlap(&a.heads, &b.heads))
        };
        let into = |m: &crate::plan::Move| Region { buffer: m.into, ..m.from.clone() };
        let moved: Vec<Region> = step.moves.iter().map(into).collect();
        let sends = || step.sends.iter().map(|s| &s.region);
        for (i, recv) in step.recvs.iter().enumerate() {
            let others = step.recvs[i + 1..].iter().map(|r| &r.region);
            let mut all = others.chain(sends()).chain(&reads).chain(&writes).chain(&moved);
            if all.any(|r| meet(r, &recv.region)) {
                return Err(Flaw::Rewritten { rank, step: t, buffer: recv.region.buffer });
            }
        }
        match sends().chain(&reads).find(|r| writes.iter().any(|w| meet(r, w))) {
            Some(r) => Err(Flaw::Rewritten { rank, step: t, buffer: r.buffer }),
            None => Ok(()),
        }
    }

    /// All that was expected is there, and whoever gets something expects it.
    fn can_end(&self, rank: usize, step: &Step) -> bool {
        let n = self.at.len();
        let expected = |peer: usize| step.recvs.iter().filter(|r| r.peer == peer).count();
        let arrived = step.recvs.iter().all(|r| self.queues[r.peer * n + rank].len() >= expected(r.peer));
        arrived && step.sends.iter().all(|s| self.posted[rank * n + s.peer] >= self.sent[rank * n + s.peer])
    }

    fn end(&mut self, rank: usize, step: &Step) -> Result<(), Flaw> {
        let n = self.at.len();
        for recv in &step.recvs {
            let values = self.queues[recv.peer * n + rank].pop_front().expect("can_end looked");
            self.write(rank, &recv.region, values);
        }
        for m in &step.moves {
            let (values, into) = (self.read(rank, &m.from)?, Region { buffer: m.into, ..m.from.clone() });
            if m.add {
                self.add(rank, &into, &values)?;
            } else {
                self.write(rank, &into, values);
            }
        }
        self.at[rank] = (self.at[rank].0 + 1, false);
        Ok(())
    }

    /// Every rank's results have all that was computed for them, wherever it was computed.
    fn results(&self) -> Result<(), Flaw> {
        let plan = self.facts.plan;
        for rank in (0..plan.ranks.len()).filter(|&r| plan.shards.tokens(r) > 0) {
            let mut results = vec![own::RESULT];
            results.extend((plan.pass == Pass::Backward).then_some(own::D_KV));
            for buffer in results {
                let what = plan.ranks[rank].buffers[buffer].what;
                for (parcel, head) in places(&plan.parcels_of(rank..rank + 1), &plan.all_heads(what)) {
                    let mine = |(_, p): &(usize, &Placed<'_>)| {
                        let (tile, keys) = (&p.work.tile, what.of_keys());
                        let heads = if keys { &tile.kv_heads } else { &tile.q_heads };
                        heads.contains(&head)
                            && if keys { &p.k_parcels } else { &p.q_parcels }.contains(&parcel)
                    };
                    let want: BTreeSet<usize> =
                        self.facts.tiles.iter().enumerate().filter(mine).map(|(number, _)| number).collect();
                    let none = BTreeSet::new();
                    let have = self.buffers[rank][buffer].get(&(parcel, head)).unwrap_or(&none);
                    if *have != want {
                        let (have, want) = (have.len(), want.len());
                        return Err(Flaw::Incomplete { rank, what, head, have, want });
                    }
                }
            }
        }
        Ok(())
    }
}
