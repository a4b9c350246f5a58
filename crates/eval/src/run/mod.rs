//! A run: every question of a pack to an endpoint, under a load, each exchange logged raw, resumable at any request.
//!
//! Threads carry requests; nothing here is asynchronous, so that no executor stands between a socket and its time stamp. Prompts are built
//! just before they are needed and dropped when answered: memory is that of the requests in flight.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::EvalError;
use crate::endpoint::{Clock, Endpoint, FaultKind, Limits};
use crate::item::{Cell, Item};
use crate::load::{self, Load};
use crate::task::{Kit, Task};

pub mod converse;
pub mod log;
pub mod proof;
pub mod spec;

use converse::Conversation;
use log::{Done, Log, Outcome, Row};
use spec::Spec;

/// Requests without an answer in a row after which the run stops.
const FAULTS_IN_A_ROW: usize = 5;
/// Tokens of prompts that are built ahead of an open load, and the number of prompts: enough to follow a burst, few where they are long.
const BUILT_AHEAD_TOKENS: usize = 2 << 20;
const BUILT_AHEAD: std::ops::RangeInclusive<usize> = 2..=256;
/// Below this a sleep may overshoot: the rest is waited for without sleeping.
const SPIN: Duration = Duration::from_micros(300);

/// What a run needs.
pub struct Runner<'a> {
    /// What is asked.
    pub spec: &'a Spec,
    /// The spec's tasks, in its order.
    pub tasks: &'a [&'static dyn Task],
    /// Seed, counter and filler.
    pub kit: &'a Kit<'a>,
    /// Who is asked.
    pub endpoint: &'a dyn Endpoint,
    /// Waits of one request.
    pub limits: Limits,
    /// By what share the endpoint's count may lie under ours; nothing where our counter knows nothing of its tokens.
    pub tolerance: Option<f64>,
}

/// How a run goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Items done, earlier sessions included.
    pub done: usize,
    /// Items in all.
    pub of: usize,
    /// Items of this session that failed.
    pub failed: usize,
}

/// How a session ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Items asked in this session.
    pub asked: usize,
    /// Of these without an answer.
    pub failed: usize,
    /// The first fault, in words.
    pub first_fault: Option<String>,
    /// The session stopped before its end.
    pub stopped: bool,
}

/// What the threads of a session share.
pub(crate) struct Session<'a> {
    pub runner: &'a Runner<'a>,
    pub log: &'a Log,
    pub clock: Clock,
    pub number: u32,
    pub salt: u64,
    todo: Mutex<VecDeque<Cell>>,
    stop: AtomicBool,
    asked: AtomicUsize,
    failed: AtomicUsize,
    in_a_row: AtomicUsize,
    first_fault: Mutex<Option<String>>,
    error: Mutex<Option<EvalError>>,
    earlier: usize,
    progress: &'a (dyn Fn(Progress) + Sync),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A place among the requests in flight; dropping it gives it back.
pub(crate) struct Place<'a>(&'a (Mutex<usize>, Condvar));

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *lock(&self.0.0) -= 1;
        self.0.1.notify_one();
    }
}

/// Whether the session is about to end.
pub(crate) fn is_stopping(session: &Session<'_>) -> bool {
    session.stop.load(Ordering::Relaxed)
}

impl Runner<'_> {
    fn task(&self, name: &str) -> Option<&'static dyn Task> {
        self.spec.tasks.iter().position(|t| t == name).and_then(|i| self.tasks.get(i)).copied()
    }

    /// The question of a cell, built for the length less the reserve.
    pub fn item(&self, cell: &Cell) -> Result<(Item, &'static dyn Task), EvalError> {
        let task = self
            .task(&cell.task)
            .ok_or_else(|| EvalError::bad("tasks", &cell.task, self.spec.tasks.join(", ")))?;
        let built = Cell { length_tokens: self.spec.built_tokens(cell.length_tokens), ..cell.clone() };
        Ok((task.item(self.kit, &built)?, task))
    }

    /// Asks what is not done yet.
    ///
    /// Errors: a question that cannot be built, or a log that cannot be written. Faults of the endpoint are rows, not errors.
    pub fn run(
        &self,
        log: &Log,
        done: &Done,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Ended, EvalError> {
        let cells = self.spec.cells();
        let todo: VecDeque<Cell> = cells.iter().filter(|c| !done.contains_key(*c)).cloned().collect();
        let header = log.header();
        let session = Session {
            runner: self,
            log,
            clock: Clock::default(),
            number: header.sessions.len().saturating_sub(1) as u32,
            salt: header.salt,
            earlier: cells.len() - todo.len(),
            todo: Mutex::new(todo),
            stop: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            in_a_row: AtomicUsize::new(0),
            first_fault: Mutex::new(None),
            error: Mutex::new(None),
            progress,
        };
        match self.spec.load {
            Load::Closed { concurrency } => session.closed(concurrency),
            Load::Open { rate, arrivals, most_in_flight } => {
                let n = lock(&session.todo).len();
                // A run that goes on draws the arrivals of what is left: its sessions are measured apart.
                let times = load::schedule(self.spec.seed ^ u64::from(session.number), rate, arrivals, n);
                session.open(&times, most_in_flight);
            }
        }
        if let Some(error) = lock(&session.error).take() {
            return Err(error);
        }
        let first_fault = lock(&session.first_fault).take();
        Ok(Ended {
            asked: session.asked.load(Ordering::Relaxed),
            failed: session.failed.load(Ordering::Relaxed),
            first_fault,
            stopped: session.stop.load(Ordering::Relaxed),
        })
    }
}

impl Session<'_> {
    fn next(&self) -> Option<Cell> {
        if self.stop.load(Ordering::Relaxed) { None } else { lock(&self.todo).pop_front() }
    }

    fn fail(&self, error: EvalError) {
        lock(&self.error).get_or_insert(error);
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Users that each wait for their answer.
    fn closed(&self, concurrency: usize) {
        std::thread::scope(|scope| {
            for _ in 0..concurrency {
                scope.spawn(|| {
                    while let Some(cell) = self.next() {
                        match self.runner.item(&cell) {
                            Ok((item, task)) => self.converse(&cell, &item, task, None, None),
                            Err(e) => self.fail(e),
                        }
                    }
                });
            }
        });
    }

    /// A schedule that waits for nobody.
    fn open(&self, times: &[u64], most_in_flight: usize) {
        let longest = self.runner.spec.lengths.iter().max().copied().unwrap_or(1);
        let ahead = (BUILT_AHEAD_TOKENS / longest.max(1)).clamp(*BUILT_AHEAD.start(), *BUILT_AHEAD.end());
        let (sender, receiver) = sync_channel(ahead);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while let Some(cell) = self.next() {
                    match self.runner.item(&cell) {
                        Ok((item, task)) => {
                            if sender.send((cell, item, task)).is_err() {
                                return;
                            }
                        }
                        Err(e) => return self.fail(e),
                    }
                }
            });
            self.dispatch(times, most_in_flight, &receiver);
        });
    }

    fn dispatch(
        &self,
        times: &[u64],
        most_in_flight: usize,
        built: &Receiver<(Cell, Item, &'static dyn Task)>,
    ) {
        let in_flight = (Mutex::new(0usize), Condvar::new());
        // The first prompts are built before the clock of the schedule starts.
        let mut next = built.recv().ok();
        let start_us = self.clock.now_us();
        // Until when the dispatcher was held up by the requests in flight: what was scheduled before waited for a place, not for the client.
        let mut held_until_us = 0;
        std::thread::scope(|scope| {
            for &time_us in times {
                let Some((cell, item, task)) = next.take().or_else(|| built.recv().ok()) else { break };
                if self.stop.load(Ordering::Relaxed) {
                    break;
                }
                let at_us = start_us + time_us;
                sleep_until(self.clock.instant(at_us));
                let awake_us = self.clock.now_us();
                let mut places = lock(&in_flight.0);
                let held = *places >= most_in_flight;
                while *places >= most_in_flight {
                    places = in_flight.1.wait(places).unwrap_or_else(PoisonError::into_inner);
                }
                *places += 1;
                drop(places);
                let placed_us = self.clock.now_us();
                let since_us = if held_until_us > at_us { at_us } else { awake_us };
                let queued_us = if held || held_until_us > at_us { placed_us - since_us } else { 0 };
                if queued_us > 0 {
                    held_until_us = placed_us;
                }
                let place = Place(&in_flight);
                scope.spawn(move || {
                    self.converse(&cell, &item, task, Some((at_us, queued_us)), Some(place));
                });
            }
        });
    }

    fn converse(
        &self,
        cell: &Cell,
        item: &Item,
        task: &'static dyn Task,
        scheduled: Option<(u64, u64)>,
        place: Option<Place<'_>>,
    ) {
        let place = std::cell::Cell::new(place);
        let conversation = Conversation { session: self, cell, item, task, scheduled, place };
        match conversation.run() {
            Ok(last) => self.count(&last),
            Err(e) => self.fail(e),
        }
    }

    /// Counts an item that is done; stops a run that gets nothing but faults.
    fn count(&self, last: &Row) {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(fault) = &last.exchange.fault {
            lock(&self.first_fault).get_or_insert(fault.line.clone());
        }
        if last.outcome == Outcome::Failed {
            self.failed.fetch_add(1, Ordering::Relaxed);
            // A server that refuses under an open load is measured, not given up.
            let busy = last.exchange.fault.as_ref().is_some_and(|f| f.kind == FaultKind::Busy);
            let open = matches!(self.runner.spec.load, Load::Open { .. });
            if !(busy && open) && self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1 >= FAULTS_IN_A_ROW {
                self.stop.store(true, Ordering::Relaxed);
            }
        } else {
            self.in_a_row.store(0, Ordering::Relaxed);
        }
        (self.progress)(Progress {
            done: self.earlier + asked,
            of: self.earlier + asked + lock(&self.todo).len(),
            failed: self.failed.load(Ordering::Relaxed),
        });
    }
}

/// Sleeps to an instant, the last part without sleeping: a sleep may overshoot by more than a request takes to be sent.
fn sleep_until(at: Instant) {
    let left = at.saturating_duration_since(Instant::now());
    if left > SPIN {
        std::thread::sleep(left - SPIN);
    }
    while Instant::now() < at {
        std::hint::spin_loop();
    }
}
