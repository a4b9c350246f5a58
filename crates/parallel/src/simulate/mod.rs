//! The simulator: discrete events over the very plan that runs. A rank is a program of jobs (clear and pack, tiles, unpack and add) and of
//! messages; kernels share processors, messages share each rank's link. No clock, no device: times follow from declared or measured constants.

pub mod model;
pub mod published;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use suanpan_base::BadArgument;

use crate::check::Checked;
use crate::plan::{OP, ParallelPlan, Pass, Region, Step, What, Work};

/// One direction of a link between two ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Microseconds before the first byte.
    pub message_us: f64,
    /// Bytes a microsecond (1,000 = 1 GB/s) that one rank sends, and receives, at most.
    pub bytes_per_us: f64,
}

/// What a machine needs for what: measured, or declared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// A tile, whatever its size.
    pub tile_us: f64,
    /// Rows of queries that a kernel works on together: fewer take as long.
    pub granule: usize,
    /// A visible pair of one query head, forward.
    pub forward_pair_us: f64,
    /// The same, backward.
    pub backward_pair_us: f64,
    /// A row (query token and head, or key token and head) of a tile, forward: loading, storing, merging.
    pub forward_row_us: f64,
    /// The same, backward.
    pub backward_row_us: f64,
    /// Bytes a microsecond that are cleared, packed, unpacked or added.
    pub carry_bytes_per_us: f64,
    /// What every step costs beside: launches.
    pub step_us: f64,
    /// Between neighbouring ranks of one node.
    pub near: Link,
    /// Between nodes.
    pub far: Link,
    /// Ranks of a node.
    pub node: usize,
    /// Ranks whose jobs run at once; ranks beyond wait for a processor.
    pub processors: usize,
    /// A message starts when its receiver is ready, too (NCCL, and MPI for long messages); else when it is sent.
    pub rendezvous: bool,
    /// Bytes of a travelling number: inputs (q, k, v), and what is summed (out, gradients). The plan's own carriers are f32.
    pub wire_bytes: (f64, f64),
}

impl Constants {
    /// One H200 a rank over NVLink (313 GB/s for ring send-receive, 140 us a small hop, as measured between two of them), attention at
    /// 600 / 450 TFLOP/s for heads of width `head_dim`, InfiniBand at 45 GB/s and 20 us between nodes of 8 (declared).
    pub fn h200(head_dim: usize) -> Constants {
        let pair = |flops: f64, rate: f64| flops * head_dim as f64 / rate;
        Constants {
            tile_us: 0.0,
            granule: 128,
            forward_pair_us: pair(4.0, 600e6),
            backward_pair_us: pair(10.0, 450e6),
            forward_row_us: 0.0,
            backward_row_us: 0.0,
            carry_bytes_per_us: 3.0e6,
            step_us: 5.0,
            near: Link { message_us: 140.0, bytes_per_us: 313e3 },
            far: Link { message_us: 20.0, bytes_per_us: 45e3 },
            node: 8,
            processors: usize::MAX,
            rendezvous: true,
            wire_bytes: (2.0, 4.0),
        }
    }

    fn check(&self) -> Result<(), BadArgument> {
        let positive = [
            ("carry_bytes_per_us", self.carry_bytes_per_us),
            ("near.bytes_per_us", self.near.bytes_per_us),
            ("far.bytes_per_us", self.far.bytes_per_us),
        ];
        let not_negative = [
            ("tile_us", self.tile_us),
            ("forward_pair_us", self.forward_pair_us),
            ("backward_pair_us", self.backward_pair_us),
            ("forward_row_us", self.forward_row_us),
            ("backward_row_us", self.backward_row_us),
            ("step_us", self.step_us),
            ("near.message_us", self.near.message_us),
            ("far.message_us", self.far.message_us),
            ("wire_bytes.0", self.wire_bytes.0),
            ("wire_bytes.1", self.wire_bytes.1),
        ];
        for (field, x) in positive {
            if x.is_nan() || x <= 0.0 {
                return Err(BadArgument::new(OP, field, x, "above 0"));
            }
        }
        for (field, x) in not_negative {
            if !x.is_finite() || x < 0.0 {
                return Err(BadArgument::new(OP, field, x, "0 or more"));
            }
        }
        for (field, x) in [("granule", self.granule), ("node", self.node), ("processors", self.processors)] {
            if x == 0 {
                return Err(BadArgument::new(OP, field, x, "at least 1"));
            }
        }
        Ok(())
    }

    fn link(&self, from: usize, to: usize) -> Link {
        if from / self.node == to / self.node { self.near } else { self.far }
    }

    /// A tile's time.
    pub fn work_us(&self, pass: Pass, work: &Work) -> f64 {
        let (tile, heads) = (&work.tile, work.tile.q_heads.len() as f64);
        let (pair, row) = match pass {
            Pass::Forward => (self.forward_pair_us, self.forward_row_us),
            Pass::Backward => (self.backward_pair_us, self.backward_row_us),
        };
        let rows = tile.q.count as f64 * heads + (tile.k.count * tile.kv_heads.len()) as f64;
        let padded = tile.q.count.next_multiple_of(self.granule) as f64 / tile.q.count as f64;
        self.tile_us + tile.pairs() as f64 * heads * padded * pair + rows * row
    }

    fn wire(&self, what: What) -> f64 {
        match what {
            What::Query | What::Kv | What::QueryState => self.wire_bytes.0,
            What::Out | What::DQuery | What::DKv => self.wire_bytes.1,
        }
    }
}

/// Where a rank's time goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankTime {
    /// In kernels.
    pub work_us: f64,
    /// Clearing, packing, unpacking, adding.
    pub carry_us: f64,
    /// Waiting for messages.
    pub exposed_us: f64,
    /// The end of its last step.
    pub end_us: f64,
    /// Bytes sent, as they travel.
    pub sent_bytes: f64,
}

/// What a plan needs under these constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// The end of the last rank.
    pub us: f64,
    /// Every rank.
    pub ranks: Vec<RankTime>,
}

impl Forecast {
    /// Waiting of the rank that waits longest.
    pub fn exposed_us(&self) -> f64 {
        self.ranks.iter().map(|r| r.exposed_us).fold(0.0, f64::max)
    }
}

/// Runs a checked plan on events.
pub fn simulate(checked: &Checked, constants: &Constants) -> Result<Forecast, BadArgument> {
    simulate_plan(checked.plan(), constants)
}

/// The same for a plan that is too large to be proved, as it comes from the planner: a million tokens on hundreds of ranks.
pub fn simulate_plan(plan: &ParallelPlan, constants: &Constants) -> Result<Forecast, BadArgument> {
    constants.check()?;
    let n = plan.ranks.len();
    let mut events = Events {
        plan,
        constants,
        heap: BinaryHeap::new(),
        number: 0,
        ranks: vec![Rank::default(); n],
        pairs: HashMap::new(),
        free: constants.processors,
        queue: VecDeque::new(),
        out_free: vec![0.0; n],
        in_free: vec![0.0; n],
    };
    (0..n).for_each(|rank| events.begin(rank, 0.0));
    while let Some(Reverse(event)) = events.heap.pop() {
        events.handle(event);
    }
    let ranks: Vec<RankTime> = events.ranks.iter().map(|r| r.time).collect();
    Ok(Forecast { us: ranks.iter().map(|r| r.end_us).fold(0.0, f64::max), ranks })
}

/// Where a rank stands in its step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Stage {
    #[default]
    Pack,
    Tile(usize),
    Wait,
    Unpack,
    Done,
}

#[derive(Clone, Copy, Debug, Default)]
struct Rank {
    step: usize,
    stage: Stage,
    /// Sends of this step that are under way.
    sending: usize,
    /// Since when it waits.
    since: f64,
    time: RankTime,
}

/// Messages from one rank to another.
#[derive(Clone, Debug, Default)]
struct Pair {
    /// Sent and not started: bytes.
    sent: VecDeque<f64>,
    /// Receives posted and not matched.
    posted: usize,
    arrived: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Happens {
    Job { rank: usize },
    Arrival { from: usize, to: usize },
}

/// Ordered by time, then by the order in which they were foreseen.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    us: f64,
    number: u64,
    what: Happens,
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Event) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Event) -> std::cmp::Ordering {
        self.us.total_cmp(&other.us).then(self.number.cmp(&other.number))
    }
}

struct Events<'a> {
    plan: &'a ParallelPlan,
    constants: &'a Constants,
    heap: BinaryHeap<Reverse<Event>>,
    number: u64,
    ranks: Vec<Rank>,
    pairs: HashMap<(usize, usize), Pair>,
    /// Processors without a job, and jobs (rank, length) without a processor.
    free: usize,
    queue: VecDeque<(usize, f64)>,
    out_free: Vec<f64>,
    in_free: Vec<f64>,
}

impl Events<'_> {
    fn push(&mut self, us: f64, what: Happens) {
        self.number += 1;
        self.heap.push(Reverse(Event { us, number: self.number, what }));
    }

    fn job(&mut self, rank: usize, now: f64, us: f64) {
        if self.free == 0 {
            return self.queue.push_back((rank, us));
        }
        self.free -= 1;
        self.push(now + us, Happens::Job { rank });
    }

    fn handle(&mut self, event: Event) {
        match event.what {
            Happens::Job { rank } => {
                self.free += 1;
                if let Some((next, us)) = self.queue.pop_front() {
                    self.job(next, event.us, us);
                }
                self.after_job(rank, event.us);
            }
            Happens::Arrival { from, to } => {
                self.pairs.entry((from, to)).or_default().arrived += 1;
                self.ranks[from].sending -= 1;
                for rank in [from, to] {
                    if self.ranks[rank].stage == Stage::Wait {
                        self.end_wait(rank, event.us);
                    }
                }
            }
        }
    }

    fn bytes(&self, rank: usize, region: &Region) -> f64 {
        let what = self.plan.ranks[rank].buffers[region.buffer].what;
        self.plan.message_len(rank, region) as f64 * self.constants.wire(what)
    }

    fn carry(&self, rank: usize, regions: &mut dyn Iterator<Item = &Region>) -> f64 {
        regions.map(|r| self.bytes(rank, r)).sum::<f64>() / self.constants.carry_bytes_per_us
    }

    fn step(&self, rank: usize) -> Option<&Step> {
        self.plan.ranks[rank].steps.get(self.ranks[rank].step)
    }

    fn begin(&mut self, rank: usize, now: f64) {
        let Some(step) = self.step(rank) else {
            self.ranks[rank].stage = Stage::Done;
            self.ranks[rank].time.end_us = now;
            return;
        };
        let regions = &mut step.clears.iter().chain(step.sends.iter().map(|s| &s.region));
        let us = self.constants.step_us + self.carry(rank, regions);
        self.ranks[rank].stage = Stage::Pack;
        self.ranks[rank].time.carry_us += us;
        self.job(rank, now, us);
    }

    fn after_job(&mut self, rank: usize, now: f64) {
        match self.ranks[rank].stage {
            Stage::Pack => {
                self.post(rank, now);
                self.tile(rank, 0, now);
            }
            Stage::Tile(i) => self.tile(rank, i + 1, now),
            Stage::Unpack => {
                self.ranks[rank].step += 1;
                self.begin(rank, now);
            }
            Stage::Wait | Stage::Done => unreachable!("no job runs"),
        }
    }

    fn tile(&mut self, rank: usize, i: usize, now: f64) {
        let work = self.step(rank).and_then(|step| step.work.get(i));
        let Some(us) = work.map(|w| self.constants.work_us(self.plan.pass, w)) else {
            (self.ranks[rank].stage, self.ranks[rank].since) = (Stage::Wait, now);
            return self.end_wait(rank, now);
        };
        self.ranks[rank].stage = Stage::Tile(i);
        self.ranks[rank].time.work_us += us;
        self.job(rank, now, us);
    }

    fn post(&mut self, rank: usize, now: f64) {
        let plan = self.plan;
        let step = &plan.ranks[rank].steps[self.ranks[rank].step];
        for recv in &step.recvs {
            self.pairs.entry((recv.peer, rank)).or_default().posted += 1;
            self.start(recv.peer, rank, now);
        }
        for send in &step.sends {
            let bytes = self.bytes(rank, &send.region);
            self.ranks[rank].sending += 1;
            self.ranks[rank].time.sent_bytes += bytes;
            self.pairs.entry((rank, send.peer)).or_default().sent.push_back(bytes);
            self.start(rank, send.peer, now);
        }
    }

    /// Starts the messages of a pair that both ends are ready for.
    fn start(&mut self, from: usize, to: usize, now: f64) {
        let link = self.constants.link(from, to);
        loop {
            let pair = self.pairs.entry((from, to)).or_default();
            if pair.sent.is_empty() || self.constants.rendezvous && pair.posted == 0 {
                return;
            }
            pair.posted = pair.posted.saturating_sub(1);
            let bytes = pair.sent.pop_front().expect("looked");
            let begun = now.max(self.out_free[from]).max(self.in_free[to]);
            let through = begun + bytes / link.bytes_per_us;
            (self.out_free[from], self.in_free[to]) = (through, through);
            self.push(through + link.message_us, Happens::Arrival { from, to });
        }
    }

    /// Ends a rank's wait when all that it expects is there and all that it sent has left.
    fn end_wait(&mut self, rank: usize, now: f64) {
        let plan = self.plan;
        let step = &plan.ranks[rank].steps[self.ranks[rank].step];
        let mut expected: HashMap<usize, usize> = HashMap::new();
        step.recvs.iter().for_each(|r| *expected.entry(r.peer).or_default() += 1);
        let arrived = |peer: &usize| self.pairs.get(&(*peer, rank)).map_or(0, |p| p.arrived);
        if self.ranks[rank].sending > 0 || expected.iter().any(|(peer, count)| arrived(peer) < *count) {
            return;
        }
        for (peer, count) in expected {
            self.pairs.entry((peer, rank)).or_default().arrived -= count;
        }
        let regions = &mut step.recvs.iter().map(|r| &r.region).chain(step.moves.iter().map(|m| &m.from));
        let us = self.carry(rank, regions);
        let state = &mut self.ranks[rank];
        state.stage = Stage::Unpack;
        state.time.exposed_us += now - state.since;
        state.time.carry_us += us;
        self.job(rank, now, us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::MaskSlices;
    use crate::plan::{Request, Scheme};
    use crate::shard::Layout;
    use suanpan_base::{HeadShape, Mask};

    const HEADS: HeadShape = HeadShape::new(8, 2, 64);

    fn plan(scheme: Scheme, layout: Layout, cp_size: usize, pass: Pass) -> Checked {
        let mask = MaskSlices::packed(Mask::CAUSAL, &[4096]).unwrap();
        let request =
            Request { heads: HEADS, mask: &mask, layout, cp_size, scheme, pass, invariant_block: None };
        crate::check::check(ParallelPlan::new(&request).unwrap()).unwrap()
    }

    /// Only pairs cost anything: 1 us for 1,000 of them.
    fn pairs_only() -> Constants {
        Constants {
            tile_us: 0.0,
            granule: 1,
            forward_pair_us: 1e-3,
            backward_pair_us: 2.5e-3,
            carry_bytes_per_us: f64::INFINITY,
            step_us: 0.0,
            near: Link { message_us: 0.0, bytes_per_us: f64::INFINITY },
            ..Constants::h200(64)
        }
    }

    #[test]
    fn time_is_the_busiest_rank_step_by_step_when_messages_are_free() {
        for (layout, scheme) in [(Layout::Contiguous, Scheme::Ring), (Layout::Zigzag, Scheme::Ring)] {
            let checked = plan(scheme, layout, 4, Pass::Forward);
            let forecast = simulate(&checked, &pairs_only()).unwrap();
            let busiest = (0..4).map(|r| checked.plan().pairs(r)).max().unwrap() as f64 * 1e-3;
            assert!(forecast.us >= busiest - 1e-6, "{layout}: {} {busiest}", forecast.us);
            assert!(forecast.us <= busiest * 1.01, "{layout}: {} {busiest}", forecast.us);
            for (rank, time) in forecast.ranks.iter().enumerate() {
                assert!((time.work_us - checked.plan().pairs(rank) as f64 * 1e-3).abs() < 1e-3);
                let sum = time.work_us + time.carry_us + time.exposed_us;
                assert!((sum - time.end_us).abs() < 1e-6 * time.end_us.max(1.0), "{time:?}");
            }
        }
    }

    #[test]
    fn a_slow_link_shows_as_waiting_and_one_processor_as_all_work() {
        let checked = plan(Scheme::Ring, Layout::Zigzag, 4, Pass::Backward);
        let free = simulate(&checked, &pairs_only()).unwrap();
        let slow = Link { message_us: 0.0, bytes_per_us: 10.0 };
        let slow = simulate(&checked, &Constants { near: slow, ..pairs_only() }).unwrap();
        let bytes = (0..4).map(|r| slow.ranks[r].sent_bytes).fold(0.0, f64::max);
        assert!(slow.us >= 0.999 * bytes / 10.0 && slow.exposed_us() > free.us, "{slow:?}");
        let one = simulate(&checked, &Constants { processors: 1, ..pairs_only() }).unwrap();
        let all: f64 = (0..4).map(|r| checked.plan().pairs(r) as f64 * 2.5e-3).sum();
        assert!((one.us - all).abs() < 1e-6 * all, "{} {all}", one.us);
    }

    #[test]
    fn every_scheme_and_pass_comes_to_its_end() {
        let schemes = Scheme::ALL.into_iter().chain([Scheme::Hybrid(2)]);
        for (scheme, pass) in schemes.flat_map(|s| [Pass::Forward, Pass::Backward].map(|p| (s, p))) {
            let checked = plan(scheme, Layout::Zigzag, 8, pass);
            for processors in [1, 3, usize::MAX] {
                let constants = Constants { processors, wire_bytes: (4.0, 4.0), ..Constants::h200(64) };
                let forecast = simulate(&checked, &constants).unwrap();
                for (rank, time) in forecast.ranks.iter().enumerate() {
                    assert!(time.end_us > 0.0, "{scheme} {pass:?}: rank {rank} never ended");
                    assert_eq!(time.sent_bytes, checked.plan().sent_bytes(rank) as f64);
                }
            }
        }
    }

    #[test]
    fn constants_that_are_none_are_refused_by_name() {
        let checked = plan(Scheme::Ring, Layout::Zigzag, 2, Pass::Forward);
        let field = |c: Constants| simulate(&checked, &c).unwrap_err().field;
        let base = Constants::h200(64);
        assert_eq!(field(Constants { node: 0, ..base }), "node");
        assert_eq!(field(Constants { step_us: f64::NAN, ..base }), "step_us");
        assert_eq!(
            field(Constants { near: Link { bytes_per_us: 0.0, ..base.near }, ..base }),
            "near.bytes_per_us"
        );
    }
}
