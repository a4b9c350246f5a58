//! The ring: chunks of keys and values (or of queries) go from member to member as far as somebody meets them; what is summed for them follows
//! and comes home.
//!
//! A member is a rank, or one of a Ulysses group's with its heads. Step t of member m works on the chunk of member m - t. What is summed for a
//! chunk starts at the first member behind its home, one step behind the chunk, and the last member that needs the chunk sends it home: as
//! many hops as the chunk makes, not one more. By keys that is their gradients, backward; by queries their results, in both passes.

use std::ops::Range;

use crate::plan::{Buffer, Holds, Move, ParallelPlan, Pass, Region, Scheme, Step, Transfer, What, Work};
use crate::shard::Run;
use crate::tile::Tile;

/// The buffers that a member brings: its own, or its Ulysses group's.
#[derive(Clone)]
pub(crate) struct Home {
    pub q: usize,
    pub kv: usize,
    pub result: usize,
    pub d_kv: Option<usize>,
}

/// Buffers behind the member's own: two for chunks; two for sums on their way, one for those that arrive, one for those that come home.
struct Numbers {
    home: Home,
    chunk: [usize; 2],
    partial: [usize; 2],
    arriving: usize,
    back: usize,
}

/// What travels, among whom.
pub(crate) struct Ring {
    /// Ranks of a Ulysses group; 1 = every rank is a member.
    size: usize,
    by_query: bool,
    /// Hops of each member's chunk.
    hops: Vec<usize>,
    /// Each member's tokens as they lie in its memory.
    runs: Vec<Vec<Run>>,
}

/// How many hops the chunk of each member makes: to the farthest one that needs it.
pub(crate) fn hops(n: usize, needs: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    (0..n).map(|o| (1..n).rev().find(|t| needs((o + t) % n, o)).unwrap_or(0)).collect()
}

impl Ring {
    pub fn new(plan: &ParallelPlan) -> Ring {
        let size = plan.ulysses_size();
        let members = plan.ranks.len() / size;
        let runs: Vec<_> = (0..members).map(|m| plan.shards.group(m * size, size)).collect();
        let by_query = plan.scheme == Scheme::RingQuery;
        let sees = |q: usize, k: usize| Tile::any(&plan.mask, &runs[q], &runs[k]);
        let hops = hops(members, |at, o| if by_query { sees(o, at) } else { sees(at, o) });
        Ring { size, by_query, hops, runs }
    }

    /// Why the ring is as it is.
    pub fn say(&self) -> String {
        let n = self.hops.len();
        let saved: usize = self.hops.iter().map(|h| n - 1 - h).sum();
        format!(
            "chunks of {} make {:?} hops: to the farthest that meets them; {saved} of {} hops saved",
            if self.by_query { "queries" } else { "keys" },
            self.hops,
            n * (n - 1)
        )
    }

    fn farthest(&self) -> usize {
        self.hops.iter().copied().max().unwrap_or(0)
    }

    /// Whether something is summed for what travels.
    fn sums(&self, plan: &ParallelPlan) -> bool {
        self.by_query || plan.pass == Pass::Backward
    }

    /// The steps of rank `rank`, whose member brings `home`.
    pub fn steps(&self, plan: &mut ParallelPlan, rank: usize, home: Home) -> Vec<Step> {
        let sums = self.sums(plan);
        let numbers = self.push_buffers(plan, rank, home);
        let steps = self.farthest() + 1 + usize::from(sums && self.farthest() > 0);
        let turn = |t: usize| {
            let mut step = Step::default();
            let at = Turn { ring: self, plan, numbers: &numbers, rank, t };
            at.chunks(&mut step);
            if sums {
                at.sums(&mut step);
            }
            step
        };
        (0..steps).map(turn).collect()
    }

    fn push_buffers(&self, plan: &mut ParallelPlan, rank: usize, home: Home) -> Numbers {
        let sums = self.sums(plan);
        let (q_heads, kv_heads) = plan.split[rank].clone();
        let heads = if self.by_query { q_heads } else { kv_heads };
        let buffers = &mut plan.ranks[rank].buffers;
        let (chunk, sum) = if self.by_query {
            (buffers[home.q].what, buffers[home.result].what)
        } else {
            (What::Kv, What::DKv)
        };
        let first = buffers.len();
        // A ring of no hop needs no buffer.
        let mut push = |what, count: usize| {
            for _ in 0..if self.farthest() > 0 { count } else { 0 } {
                buffers.push(Buffer { what, holds: Holds::Ranks(self.size), heads: heads.clone() });
            }
        };
        push(chunk, 2);
        push(sum, if sums { 4 } else { 0 });
        let [a, b, c, d, arriving, back] = std::array::from_fn(|i| first + i);
        Numbers { home, chunk: [a, b], partial: [c, d], arriving, back }
    }
}

/// One rank's part of one step.
struct Turn<'a> {
    ring: &'a Ring,
    plan: &'a ParallelPlan,
    numbers: &'a Numbers,
    rank: usize,
    t: usize,
}

impl Turn<'_> {
    fn n(&self) -> usize {
        self.ring.hops.len()
    }

    fn member(&self) -> usize {
        self.rank / self.ring.size
    }

    /// The member whose chunk step `t` works on.
    fn origin(&self, t: usize) -> usize {
        (self.member() + self.n() * (t / self.n() + 1) - t) % self.n()
    }

    /// The rank with this one's heads in another member.
    fn peer(&self, member: usize) -> usize {
        member % self.n() * self.ring.size + self.rank % self.ring.size
    }

    fn heads(&self) -> Range<usize> {
        let (q, kv) = self.plan.split[self.rank].clone();
        if self.ring.by_query { q } else { kv }
    }

    fn region(&self, buffer: usize, member: usize) -> Region {
        let size = self.ring.size;
        let parcels = self.plan.parcels_of(member * size..(member + 1) * size);
        Region { buffer, parcels, heads: self.heads() }
    }

    /// The buffer that holds the chunk of step `t`.
    fn chunk(&self, t: usize) -> usize {
        let home = &self.numbers.home;
        match t {
            0 if self.ring.by_query => home.q,
            0 => home.kv,
            _ => self.numbers.chunk[t % 2],
        }
    }

    /// The buffer of sums for the chunk of step `t`.
    fn partial(&self, t: usize) -> usize {
        if t == 0 { self.home_sums().expect("there are sums") } else { self.numbers.partial[t % 2] }
    }

    fn home_sums(&self) -> Option<usize> {
        let home = &self.numbers.home;
        if self.ring.by_query { Some(home.result) } else { home.d_kv }
    }

    /// What happens to chunks in this step.
    fn chunks(&self, step: &mut Step) {
        let (n, t, hops) = (self.n(), self.t, &self.ring.hops);
        let busy = !self.heads().is_empty();
        if busy && t < n && t < hops[self.origin(t)] {
            let region = self.region(self.chunk(t), self.origin(t));
            step.sends.push(Transfer { peer: self.peer(self.member() + 1), region });
        }
        if busy && t + 1 < n && t < hops[self.origin(t + 1)] {
            let region = self.region(self.chunk(t + 1), self.origin(t + 1));
            step.recvs.push(Transfer { peer: self.peer(self.member() + n - 1), region });
        }
        if t < n && t <= hops[self.origin(t)] {
            self.work(step);
        }
    }

    fn work(&self, step: &mut Step) {
        let (plan, home) = (self.plan, &self.numbers.home);
        let (own, other) = (&self.ring.runs[self.member()], &self.ring.runs[self.origin(self.t)]);
        let runs = if self.ring.by_query { (&other[..], &own[..]) } else { (&own[..], &other[..]) };
        let tiles = Tile::cut_all(&plan.mask, runs, &plan.calls(self.rank), plan.invariant_block);
        let chunk = self.chunk(self.t);
        let d_kv = home.d_kv.map(|own| if self.ring.by_query { own } else { self.partial(self.t) });
        let (q, kv, result) = if self.ring.by_query {
            (chunk, home.kv, self.partial(self.t))
        } else {
            (home.q, chunk, home.result)
        };
        step.work.extend(tiles.into_iter().map(|tile| Work { tile, q, kv, result, d_kv }));
    }

    /// What happens in this step to what is summed for chunks.
    fn sums(&self, step: &mut Step) {
        let (n, t, hops) = (self.n(), self.t, &self.ring.hops);
        if self.heads().is_empty() {
            return;
        }
        if t >= 2 && t - 1 < n && t - 1 <= hops[self.origin(t - 1)] {
            let origin = self.origin(t - 1);
            let peer = if t <= hops[origin] { self.member() + 1 } else { origin };
            let region = self.region(self.partial(t - 1), origin);
            step.sends.push(Transfer { peer: self.peer(peer), region });
        }
        if (1..n).contains(&t) && t <= hops[self.origin(t)] {
            step.clears.push(self.region(self.partial(t), self.origin(t)));
            if t >= 2 {
                let from = self.region(self.numbers.arriving, self.origin(t));
                step.recvs.push(Transfer { peer: self.peer(self.member() + n - 1), region: from.clone() });
                step.moves.push(Move { from, into: self.partial(t), add: true });
            }
        }
        let own = hops[self.member()];
        if own > 0 && t == own + 1 {
            let from = self.region(self.numbers.back, self.member());
            step.recvs.push(Transfer { peer: self.peer(self.member() + own), region: from.clone() });
            let into = self.home_sums().expect("there are sums");
            step.moves.push(Move { from, into, add: true });
        }
    }
}
