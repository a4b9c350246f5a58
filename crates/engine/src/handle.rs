//! The engine on a thread of its own, and the handle through which any number of threads and tasks use it.
//!
//! No global state: a handle is one engine; dropping its last clone stops it. A request ends when its stream is dropped.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use suanpan_base::BadArgument;

use crate::door::Door;
use crate::options::KvSizing;
use crate::request::{Event, Request, RequestError, RequestKey};
use crate::stats::EngineStats;
use crate::step::Engine;
use crate::stream::{self, Sender, Stream};

/// How a handle admits requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandleOptions {
    /// Requests that may be unfinished at once, running and waiting; further ones are told to come back later.
    pub max_requests: usize,
}

impl Default for HandleOptions {
    fn default() -> Self {
        HandleOptions { max_requests: 1024 }
    }
}

/// What becomes of unfinished requests at shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// They are finished first; new ones are refused.
    Finish,
    /// They fail now.
    Now,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// It can never be served as asked.
    #[error(transparent)]
    Refused(#[from] BadArgument),
    /// Too many requests are unfinished; later it may be taken.
    #[error("{unfinished} requests are unfinished; at most {limit} are taken")]
    Busy {
        /// Unfinished requests.
        unfinished: usize,
        /// Most that are taken.
        limit: usize,
    },
    /// The engine has stopped or is about to.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

/// What clients want from the engine thread.
#[derive(Default)]
struct Inbox {
    submitted: VecDeque<(RequestKey, Request, Sender)>,
    taken_back: Vec<RequestKey>,
    next_key: u64,
    /// Requests submitted whose sender still exists.
    unfinished: usize,
    shutdown: Option<Shutdown>,
    /// The engine thread has ended, and why.
    ended: Option<String>,
    stats: EngineStats,
}

#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    work: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stops the engine when the last handle is gone.
struct Owner {
    shared: Arc<Shared>,
    door: Door,
    sizing: KvSizing,
    report: String,
    options: HandleOptions,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.lock().shutdown = Some(Shutdown::Now);
        self.shared.work.notify_all();
    }
}

/// One engine, usable from everywhere. Clones are the same engine.
#[derive(Clone)]
pub struct EngineHandle(Arc<Owner>);

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Starts the engine's thread.
    pub fn spawn(engine: Engine, options: HandleOptions) -> std::io::Result<EngineHandle> {
        let shared = Arc::new(Shared::default());
        shared.lock().stats = engine.stats();
        let (door, sizing, report) = (engine.door(), engine.kv_sizing().clone(), engine.report().to_owned());
        let its = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("suanpan-engine".into()).spawn(move || run(engine, &its))?;
        let thread = Mutex::new(Some(thread));
        Ok(EngineHandle(Arc::new(Owner { shared, door, sizing, report, options, thread })))
    }

    /// Checks and queues a request; its events come through the stream.
    pub fn submit(&self, request: Request) -> Result<Stream, SubmitError> {
        self.0.door.check(&request)?;
        let mut inbox = self.0.shared.lock();
        if let Some(why) = &inbox.ended {
            return Err(SubmitError::Stopped(why.clone()));
        }
        if inbox.shutdown.is_some() {
            return Err(SubmitError::Stopped("it is shutting down".into()));
        }
        let limit = self.0.options.max_requests;
        if inbox.unfinished >= limit {
            return Err(SubmitError::Busy { unfinished: inbox.unfinished, limit });
        }
        let key = RequestKey(inbox.next_key);
        let shared = Arc::clone(&self.0.shared);
        let take_back = move |key| {
            let mut inbox = shared.lock();
            if inbox.ended.is_none() {
                inbox.taken_back.push(key);
                drop(inbox);
                shared.work.notify_all();
            }
        };
        let (sender, stream) = stream::channel(key, take_back);
        inbox.next_key += 1;
        inbox.unfinished += 1;
        inbox.submitted.push_back((key, request, sender));
        drop(inbox);
        self.0.shared.work.notify_all();
        Ok(stream)
    }

    /// What the engine accepts.
    pub fn door(&self) -> Door {
        self.0.door
    }

    /// Size of its KV cache.
    pub fn kv_sizing(&self) -> &KvSizing {
        &self.0.sizing
    }

    /// Sizes, memory and kernels in words.
    pub fn report(&self) -> &str {
        &self.0.report
    }

    /// Numbers as of the last step; requests not yet seen by the engine count as waiting.
    pub fn stats(&self) -> EngineStats {
        let inbox = self.0.shared.lock();
        let waiting = inbox.stats.waiting + inbox.submitted.len();
        EngineStats { waiting, ..inbox.stats }
    }

    /// Whether the engine thread still runs.
    pub fn is_alive(&self) -> bool {
        self.0.shared.lock().ended.is_none()
    }

    /// Stops the engine and waits for it. Requests are refused from now on.
    pub fn shutdown(&self, how: Shutdown) {
        self.0.shared.lock().shutdown = Some(how);
        self.0.shared.work.notify_all();
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread catches its own panics; there is nothing to learn from how it ended.
            drop(thread.join());
        }
    }
}

/// The engine thread: serves until told to stop, until the engine fails, or until something panics; then tells everybody.
fn run(mut engine: Engine, shared: &Shared) {
    let mut senders = HashMap::new();
    let served = catch_unwind(AssertUnwindSafe(|| serve(&mut engine, shared, &mut senders)));
    let why = served.unwrap_or_else(|panic| format!("it panicked: {}", panic_message(panic.as_ref())));
    let mut inbox = shared.lock();
    inbox.ended = Some(why.clone());
    inbox.unfinished = 0;
    inbox.taken_back.clear();
    let late: Vec<_> = inbox.submitted.drain(..).map(|(key, _, sender)| (key, sender)).collect();
    inbox.stats.running = 0;
    inbox.stats.waiting = 0;
    drop(inbox);
    for (key, sender) in senders.drain().chain(late) {
        sender.send(Event::Failed { key, error: RequestError::Engine(why.clone()) });
    }
}

/// Returns why it stopped.
fn serve(engine: &mut Engine, shared: &Shared, senders: &mut HashMap<RequestKey, Sender>) -> String {
    loop {
        let idle = |inbox: &mut Inbox| {
            inbox.submitted.is_empty()
                && inbox.taken_back.is_empty()
                && inbox.shutdown.is_none()
                && !engine.has_work()
        };
        let mut inbox = shared.work.wait_while(shared.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        let submitted = std::mem::take(&mut inbox.submitted);
        let taken_back = std::mem::take(&mut inbox.taken_back);
        let shutdown = inbox.shutdown;
        drop(inbox);
        for (key, request, sender) in submitted {
            match engine.submit_as(key, request) {
                Ok(()) => drop(senders.insert(key, sender)),
                Err(refused) => {
                    sender.send(Event::Failed { key, error: refused.into() });
                    shared.lock().unfinished -= 1;
                }
            }
        }
        for key in taken_back {
            engine.abort(key);
            shared.lock().unfinished -= usize::from(senders.remove(&key).is_some());
        }
        publish(engine, shared);
        match shutdown {
            Some(Shutdown::Now) => return "it was shut down".into(),
            Some(Shutdown::Finish) if !engine.has_work() => return "it was shut down".into(),
            _ => {}
        }
        let start = Instant::now();
        let events = engine.step();
        publish(engine, shared); // before the events: whoever sees an end sees its pages back
        for event in events {
            deliver(event, start, shared, senders);
        }
        if let Some(failure) = engine.failure() {
            return failure.to_owned();
        }
    }
}

fn publish(engine: &Engine, shared: &Shared) {
    shared.lock().stats = engine.stats();
}

fn deliver(event: Event, step_start: Instant, shared: &Shared, senders: &mut HashMap<RequestKey, Sender>) {
    let (key, is_last) = (event.key(), event.is_last());
    if is_last {
        // Before the client can see the end, so that its next request finds the place free.
        shared.lock().unfinished -= usize::from(senders.contains_key(&key));
    }
    if let Some(sender) = senders.get(&key) {
        if matches!(event, Event::Prefill { .. }) {
            sender.admitted(step_start);
        }
        sender.send(event);
    }
    if is_last {
        senders.remove(&key);
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message").to_owned()
}
