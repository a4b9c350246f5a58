//! Ranks that are processes under MPI. Every wait polls, answers other ranks' questions meanwhile, and has a deadline.
//!
//! A wait that runs out asks the rank it waits for where it is; who answers "waiting for another" passes the question on, and who does not
//! answer, or answers that it is not waiting, is lost. All ranks are told, so that every wait everywhere fails with the same name. MPI promises
//! no progress outside its calls: [`Transport::progress`] is called between tiles.

mod raw;
mod supervise;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::traits::Communicator;
use suanpan_base::BadArgument;

use crate::launch::Launch;
use crate::plan::OP;
use crate::transport::{Fault, FaultKind, Transport};
pub use supervise::supervise;

use raw::{Channel, MAX_NUMBERS, Pending, Refused, WORDS};

/// "Where are you?"
const ASK: i32 = 0;
/// The answer: step, and the rank waited for or [`BUSY`].
const STATE: i32 = 1;
/// Somebody is lost: who, in which step, and whether it died.
const LOST: i32 = 2;
/// The sender is through with its n-th plan.
const DONE: i32 = 3;
/// The sender knows of the loss and is about to end.
const LEAVING: i32 = 4;
/// Not waiting.
const BUSY: i32 = -1;

/// Polls before a wait begins to sleep between them: another rank may need this processor.
const SPINS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(20);

/// One rank's end of all messages.
pub struct Mpi {
    data: Channel,
    control: Channel,
    rank: usize,
    size: usize,
    timeout: Duration,
    step: usize,
    waits_for: Option<usize>,
    lost: Option<(usize, usize, FaultKind)>,
    sends: Vec<(usize, Pending<f32>)>,
    recvs: Vec<VecDeque<Pending<f32>>>,
    told: Vec<Pending<i32>>,
    answers: Vec<Option<(usize, i32)>>,
    /// Plans that each rank, and this one, is through with.
    done: Vec<i32>,
    plans: i32,
    leaving: Vec<bool>,
    // Last: MPI ends after its communicators.
    _universe: Universe,
}

impl Mpi {
    /// Joins the job that `launch` describes. `timeout` is the deadline of every wait.
    pub fn start(launch: &Launch, timeout: Duration) -> Result<Mpi, BadArgument> {
        let (universe, _) = mpi::initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| BadArgument::new(OP, "mpi", "a second start", "one start a process"))?;
        let world = universe.world();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if (rank, size) != (launch.rank, launch.world) {
            let asked = format!("rank {} of {} by {}", launch.rank, launch.world, launch.launcher);
            let supported =
                format!("what MPI says, rank {rank} of {size}: start with mpirun or srun --mpi=pmix");
            return Err(BadArgument::new(OP, "launch", asked, supported));
        }
        Ok(Mpi {
            data: Channel::new(&universe),
            control: Channel::new(&universe),
            rank,
            size,
            timeout,
            step: 0,
            waits_for: None,
            lost: None,
            sends: Vec::new(),
            recvs: (0..size).map(|_| VecDeque::new()).collect(),
            told: Vec::new(),
            answers: vec![None; size],
            done: vec![0; size],
            plans: 0,
            leaving: vec![false; size],
            _universe: universe,
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the job.
    pub fn size(&self) -> usize {
        self.size
    }

    /// After a fault, when it has been reported: lets all others report it, too, within one time-out, and then ends the whole job with exit
    /// status `status`. Whoever is frozen is ended with it.
    pub fn leave(mut self, status: i32) -> ! {
        let others = self.others();
        others.iter().for_each(|&peer| self.tell(peer, [LEAVING, 0, 0, 0]));
        let (deadline, lost) = (Instant::now() + self.timeout, self.lost.map(|l| l.0));
        while Instant::now() < deadline && others.iter().any(|&r| Some(r) != lost && !self.leaving[r]) {
            self.serve();
            std::thread::sleep(PAUSE);
        }
        self.control.abort(status)
    }

    fn others(&self) -> Vec<usize> {
        (0..self.size).filter(|peer| *peer != self.rank).collect()
    }

    fn tell(&mut self, peer: usize, words: [i32; WORDS]) {
        // A refusal means that the peer is gone: whoever waits for it finds out.
        if let Ok(pending) = self.control.tell(peer, words) {
            self.told.push(pending);
        }
    }

    /// Reads what others ask and say.
    fn serve(&mut self) {
        while let Ok(Some((from, [kind, a, b, c]))) = self.control.told() {
            match kind {
                ASK => {
                    let waits_for = self.waits_for.map_or(BUSY, |peer| peer as i32);
                    self.tell(from, [STATE, self.step as i32, waits_for, 0]);
                }
                STATE => self.answers[from] = Some((a as usize, b)),
                LOST if self.lost.is_none() => {
                    let kind = if c == 1 { FaultKind::Died } else { FaultKind::TimedOut };
                    self.lost = Some((a as usize, b as usize, kind));
                }
                DONE => self.done[from] = a,
                LEAVING => self.leaving[from] = true,
                _ => {}
            }
        }
        self.told.retain_mut(|pending| pending.test() == Ok(false));
    }

    fn fault(&self, peer: usize) -> Result<(), Fault> {
        let Some((lost, lost_step, kind)) = self.lost else { return Ok(()) };
        let (rank, step, timeout) = (self.rank, self.step, self.timeout);
        Err(Fault { rank, step, peer, lost, lost_step, kind, timeout })
    }

    fn lose(&mut self, lost: usize, lost_step: usize, kind: FaultKind) {
        if self.lost.is_none() {
            self.lost = Some((lost, lost_step, kind));
            let died = i32::from(kind == FaultKind::Died);
            for peer in self.others() {
                self.tell(peer, [LOST, lost as i32, lost_step as i32, died]);
            }
        }
    }

    /// Waits until `ready` has something, because of `peer`.
    fn wait<R>(
        &mut self,
        peer: usize,
        mut ready: impl FnMut(&mut Mpi) -> Result<Option<R>, Refused>,
    ) -> Result<R, Fault> {
        let deadline = Instant::now() + self.timeout;
        let mut polls = 0;
        loop {
            match ready(self) {
                Ok(Some(found)) => {
                    self.waits_for = None;
                    return Ok(found);
                }
                Ok(None) => {}
                Err(Refused(_)) => self.lose(peer, self.step, FaultKind::Died),
            }
            self.waits_for = Some(peer);
            self.serve();
            self.fault(peer)?;
            if Instant::now() >= deadline {
                let (lost, step) = self.follow(peer);
                self.lose(lost, step, FaultKind::TimedOut);
            }
            polls += 1;
            if polls > SPINS {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// From `peer` along who waits for whom, to a rank that does not answer or does not wait; with the step that it was last known in.
    fn follow(&mut self, peer: usize) -> (usize, usize) {
        let (mut at, mut step) = (peer, self.step);
        let patience = (self.timeout / 4).max(Duration::from_millis(50));
        for _ in 0..self.size {
            self.answers[at] = None;
            self.tell(at, [ASK, 0, 0, 0]);
            let deadline = Instant::now() + patience;
            while self.answers[at].is_none() && self.lost.is_none() && Instant::now() < deadline {
                self.serve();
                std::thread::sleep(PAUSE);
            }
            match self.answers[at] {
                Some((its, BUSY)) => return (at, its),
                Some((its, next)) if next as usize != self.rank => (at, step) = (next as usize, its),
                Some((its, _)) => return (at, its),
                None => return (at, step),
            }
        }
        (peer, step)
    }
}

impl Transport for Mpi {
    type Message = Vec<f32>;

    const MAX_NUMBERS: usize = MAX_NUMBERS;

    fn begin(&mut self, step: usize) -> Result<(), Fault> {
        self.step = step;
        self.waits_for = None;
        self.serve();
        self.fault(self.rank)
    }

    fn send(&mut self, peer: usize, message: Vec<f32>) -> Result<(), Fault> {
        match self.data.send(peer, message) {
            Ok(pending) => self.sends.push((peer, pending)),
            Err(Refused(_)) => self.lose(peer, self.step, FaultKind::Died),
        }
        self.fault(peer)
    }

    fn expect(&mut self, peer: usize, numbers: usize) -> Result<(), Fault> {
        match self.data.expect(peer, numbers) {
            Ok(pending) => self.recvs[peer].push_back(pending),
            Err(Refused(_)) => self.lose(peer, self.step, FaultKind::Died),
        }
        self.fault(peer)
    }

    fn progress(&mut self) {
        self.serve();
        // A test drives the library; what it refuses shows again where it is waited for.
        for pending in self.recvs.iter_mut().flatten() {
            let _ = pending.test();
        }
        for (_, pending) in &mut self.sends {
            let _ = pending.test();
        }
    }

    fn recv(&mut self, peer: usize) -> Result<Vec<f32>, Fault> {
        let mut pending = self.recvs[peer].pop_front().expect("expected before");
        self.wait(peer, |_| pending.test().map(|ended| ended.then_some(())))?;
        Ok(pending.take())
    }

    fn sent(&mut self) -> Result<(), Fault> {
        while let Some((peer, mut pending)) = self.sends.pop() {
            self.wait(peer, |_| pending.test().map(|ended| ended.then_some(())))?;
        }
        Ok(())
    }

    fn finish(&mut self, steps: usize) -> Result<(), Fault> {
        self.step = steps;
        self.plans += 1;
        let plans = self.plans;
        self.others().into_iter().for_each(|peer| self.tell(peer, [DONE, plans, 0, 0]));
        self.done[self.rank] = plans;
        while let Some(peer) = self.done.iter().position(|done| *done < plans) {
            self.wait(peer, |mpi| Ok((mpi.done[peer] >= plans).then_some(())))?;
        }
        Ok(())
    }
}
