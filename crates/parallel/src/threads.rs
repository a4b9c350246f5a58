//! Messages between ranks that are threads of one process: one board with a lock, on which every wait has a deadline.
//!
//! The board knows who waits for whom. A wait that runs out blames the end of that chain: the rank that waits for nobody. From then on
//! every wait of every rank fails at once, so all of them return within the time-out of the first, and one step's computing.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::transport::{Fault, FaultKind, Transport};

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Working,
    Waiting { peer: usize },
    Done,
}

struct State<T> {
    queues: Vec<VecDeque<Vec<f32>>>,
    places: Vec<(usize, Place)>,
    lost: Option<(usize, usize, FaultKind)>,
    reports: Vec<Option<Result<T, Fault>>>,
}

/// Messages, places and reports of all ranks; `T` is what a rank reports.
pub(crate) struct Board<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    ranks: usize,
    timeout: Duration,
}

impl<T> Board<T> {
    pub fn new(ranks: usize, timeout: Duration) -> Board<T> {
        let state = State {
            queues: (0..ranks * ranks).map(|_| VecDeque::new()).collect(),
            places: vec![(0, Place::Working); ranks],
            lost: None,
            reports: (0..ranks).map(|_| None).collect(),
        };
        Board { state: Mutex::new(state), changed: Condvar::new(), ranks, timeout }
    }

    /// No code under the lock can leave the state half changed, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fault(&self, state: &State<T>, rank: usize, peer: usize) -> Option<Fault> {
        let (lost, lost_step, kind) = state.lost?;
        let step = state.places[rank].0;
        Some(Fault { rank, step, peer, lost, lost_step, kind, timeout: self.timeout })
    }

    fn lose(&self, state: &mut State<T>, lost: usize, kind: FaultKind) {
        if state.lost.is_none() {
            state.lost = Some((lost, state.places[lost].0, kind));
        }
        self.changed.notify_all();
    }

    /// Rank `rank` begins step `step`. Fails when somebody was lost.
    pub fn begin(&self, rank: usize, step: usize) -> Result<(), Fault> {
        let mut state = self.lock();
        state.places[rank] = (step, Place::Working);
        self.fault(&state, rank, rank).map_or(Ok(()), Err)
    }

    /// Hands a message over. Never waits.
    pub fn send(&self, from: usize, to: usize, message: Vec<f32>) {
        self.lock().queues[from * self.ranks + to].push_back(message);
        self.changed.notify_all();
    }

    /// The next message from `peer` to `rank`.
    pub fn recv(&self, rank: usize, peer: usize) -> Result<Vec<f32>, Fault> {
        let at = peer * self.ranks + rank;
        self.wait(rank, |state| match state.queues[at].pop_front() {
            Some(message) => Ok(message),
            None => Err(peer),
        })
    }

    /// Rank `rank` is through with its steps; returns when all are. A rank that ends early must not leave others to wait for ever.
    pub fn finish(&self, rank: usize, step: usize) -> Result<(), Fault> {
        self.lock().places[rank] = (step, Place::Done);
        self.changed.notify_all();
        self.wait(rank, |state| match state.places.iter().position(|(_, place)| *place != Place::Done) {
            None => Ok(()),
            Some(peer) => Err(peer),
        })
    }

    /// Waits until `ready` has something; `Err(peer)` = not yet, because of `peer`.
    fn wait<R>(
        &self,
        rank: usize,
        mut ready: impl FnMut(&mut State<T>) -> Result<R, usize>,
    ) -> Result<R, Fault> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.lock();
        let done = state.places[rank].1 == Place::Done;
        loop {
            // What is there counts first: all may be done when one of them is lost.
            let peer = match ready(&mut state) {
                Ok(found) => {
                    if !done {
                        state.places[rank].1 = Place::Working;
                    }
                    return Ok(found);
                }
                Err(peer) => peer,
            };
            if let Some(fault) = self.fault(&state, rank, peer) {
                return Err(fault);
            }
            if !done {
                state.places[rank].1 = Place::Waiting { peer };
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let lost = end_of_chain(&state.places, peer);
                self.lose(&mut state, lost, FaultKind::TimedOut);
                continue;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The thread of `rank` ended without a report.
    pub fn died(&self, rank: usize) {
        let mut state = self.lock();
        self.lose(&mut state, rank, FaultKind::Died);
        let fault = self.fault(&state, rank, rank);
        state.reports[rank] = fault.map(Err);
    }

    /// Puts down what a rank returns.
    pub fn report(&self, rank: usize, report: Result<T, Fault>) {
        self.lock().reports[rank] = Some(report);
        self.changed.notify_all();
    }

    /// All reports. Once a rank was lost, whoever has not reported one time-out later counts as lost, too, and is not waited for.
    pub fn reports(&self) -> Vec<Result<T, Fault>> {
        let mut state = self.lock();
        let mut deadline = None;
        loop {
            let missing = |state: &State<T>| state.reports.iter().filter(|r| r.is_none()).count();
            let alone = |state: &State<T>| {
                missing(state) == 1
                    && state.lost.is_some_and(|(lost, _, kind)| {
                        kind == FaultKind::TimedOut && state.reports[lost].is_none()
                    })
            };
            let out = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if missing(&state) == 0 || alone(&state) || out {
                break;
            }
            if state.lost.is_some() && deadline.is_none() {
                deadline = Some(Instant::now() + self.timeout);
            }
            let pause = self.timeout.min(Duration::from_millis(100));
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        let silent = |state: &State<T>, rank: usize| {
            let (step, timeout) = (state.places[rank].0, self.timeout);
            Fault { rank, step, peer: rank, lost: rank, lost_step: step, kind: FaultKind::TimedOut, timeout }
        };
        (0..self.ranks).map(|r| state.reports[r].take().unwrap_or_else(|| Err(silent(&state, r)))).collect()
    }
}

/// From `peer` along who waits for whom, to a rank that waits for nobody (or, in a circle, back to `peer`).
fn end_of_chain(places: &[(usize, Place)], peer: usize) -> usize {
    let mut at = peer;
    for _ in 0..places.len() {
        match places[at].1 {
            Place::Waiting { peer } => at = peer,
            Place::Working | Place::Done => return at,
        }
    }
    peer
}

/// A rank's end of the board.
pub(crate) struct Thread<T> {
    pub board: Arc<Board<T>>,
    pub rank: usize,
}

impl<T> Transport for Thread<T> {
    type Message = Vec<f32>;

    fn begin(&mut self, step: usize) -> Result<(), Fault> {
        self.board.begin(self.rank, step)
    }

    fn send(&mut self, peer: usize, message: Vec<f32>) -> Result<(), Fault> {
        self.board.send(self.rank, peer, message);
        Ok(())
    }

    // Messages lie on the board until they are asked for: there is nothing to prepare, to start or to drive.
    fn expect(&mut self, _peer: usize, _numbers: usize) -> Result<(), Fault> {
        Ok(())
    }

    fn progress(&mut self) {}

    fn recv(&mut self, peer: usize) -> Result<Vec<f32>, Fault> {
        self.board.recv(self.rank, peer)
    }

    fn sent(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn finish(&mut self, step: usize) -> Result<(), Fault> {
        self.board.finish(self.rank, step)
    }
}
