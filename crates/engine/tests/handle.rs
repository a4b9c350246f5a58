//! The engine on its own thread: dropped streams, full queues, panics, failures, shutdown.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use common::*;
use suanpan_base::BadArgument;
use suanpan_cache::Group;
use suanpan_engine::{
    EngineHandle, Event, FinishReason, HandleOptions, RequestError, Shutdown, StepModel, Stream, SubmitError,
};
use suanpan_ledger::AttnBooks;
use suanpan_model::ModelError;
use suanpan_model::forward::{StepBatch, StepSeq};

const WAIT: Duration = Duration::from_secs(20);

fn spawn(runner: Box<dyn StepModel>, max_requests: usize) -> EngineHandle {
    EngineHandle::spawn(scripted(options(64), runner), HandleOptions { max_requests }).unwrap()
}

fn echoing() -> Box<dyn StepModel> {
    Scripted::boxed(|token, _| one_hot(token))
}

fn collect(mut stream: Stream) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = stream.recv_timeout(WAIT).expect("in time") {
        answer.take(event);
    }
    answer
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WAIT, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits inside a step until told to go on; then does as the fault says.
struct Gated {
    inner: Box<dyn StepModel>,
    open: Arc<AtomicBool>,
    fault: Fault,
}

#[derive(Clone, Copy)]
enum Fault {
    None,
    Panic,
    Error,
}

impl StepModel for Gated {
    fn copy_pages(&mut self, group: Group, copies: &[(u32, u32)]) -> Result<(), ModelError> {
        self.inner.copy_pages(group, copies)
    }

    fn page(&self, group: Group, page: u32) -> &[u8] {
        self.inner.page(group, page)
    }

    fn page_mut(&mut self, group: Group, page: u32) -> &mut [u8] {
        self.inner.page_mut(group, page)
    }

    fn step(&mut self, batch: &StepBatch) -> Result<(), ModelError> {
        while !self.open.load(Ordering::Acquire) {
            thread::yield_now();
        }
        match self.fault {
            Fault::None => self.inner.step(batch),
            Fault::Panic => panic!("a kernel went wrong"),
            Fault::Error => Err(BadArgument::new("step", "device", "gone", "a device").into()),
        }
    }

    fn logits(&mut self, rows: std::ops::Range<usize>) -> &[f32] {
        self.inner.logits(rows)
    }

    fn books(&self) -> &[AttnBooks] {
        self.inner.books()
    }

    fn predicted(&self, seq: &StepSeq) -> AttnBooks {
        self.inner.predicted(seq)
    }
}

fn gated(fault: Fault, max_requests: usize) -> (EngineHandle, Arc<AtomicBool>) {
    let open = Arc::new(AtomicBool::new(false));
    let runner = Box::new(Gated { inner: echoing(), open: Arc::clone(&open), fault });
    (spawn(runner, max_requests), open)
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut cx = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn many_threads_and_tasks_get_their_own_answers() {
    let handle = spawn(echoing(), 1024);
    thread::scope(|scope| {
        for i in 0..12u8 {
            let handle = &handle;
            scope.spawn(move || {
                let text = char::from(b'a' + i).to_string();
                let mut stream = handle.submit(request(&text.repeat(3), exactly(40))).unwrap();
                let answer = if i % 2 == 0 {
                    collect(stream)
                } else {
                    let mut answer = Answer::default();
                    block_on(async {
                        while let Some(event) = stream.next().await {
                            answer.take(event)
                        }
                    });
                    answer
                };
                assert_eq!(answer.text, text.repeat(40));
            });
        }
    });
    let stats = handle.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_held), (0, 0, 0));
    assert_eq!((stats.totals.finished_length, stats.totals.generation_tokens), (12, 480));
    assert!(stats.totals.steps >= 40 && stats.totals.step_us >= stats.totals.model_us);
}

#[test]
fn a_dropped_stream_gives_its_pages_back_within_one_step() {
    let (handle, open) = gated(Fault::None, 64);
    let streams: Vec<Stream> = (0..4).map(|_| handle.submit(request("abc", exactly(900))).unwrap()).collect();
    drop(streams);
    open.store(true, Ordering::Release);
    until("all are taken back", || handle.stats().totals.aborted == 4);
    let after = handle.stats();
    assert!(after.totals.steps <= 1, "at most the step under way: {} steps", after.totals.steps);
    assert_eq!((after.pages_held, after.pages_free + after.pages_cached), (0, 64));
    assert_eq!((after.running, after.waiting), (0, 0));
}

#[test]
fn a_full_queue_says_busy_and_a_free_place_is_free_at_once() {
    let (handle, open) = gated(Fault::None, 3);
    let streams: Vec<Stream> = (0..3).map(|_| handle.submit(request("abc", exactly(2))).unwrap()).collect();
    let busy = handle.submit(request("abc", exactly(2))).unwrap_err();
    assert_eq!(busy, SubmitError::Busy { unfinished: 3, limit: 3 });
    let bad = handle.submit(request("", exactly(2))).unwrap_err();
    assert!(
        matches!(bad, SubmitError::Refused(e) if e.field == "prompt"),
        "bad requests are refused even when busy"
    );
    open.store(true, Ordering::Release);
    streams.into_iter().for_each(|s| assert_eq!(collect(s).reason(), FinishReason::Length));
    collect(handle.submit(request("abc", exactly(2))).unwrap());
}

fn everybody_is_told(fault: Fault, message: &str) {
    let (handle, open) = gated(fault, 64);
    let streams: Vec<Stream> = (0..12).map(|_| handle.submit(request("abc", exactly(5))).unwrap()).collect();
    open.store(true, Ordering::Release);
    for stream in streams {
        match collect(stream).error {
            Some(RequestError::Engine(why)) => assert!(why.contains(message), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    until("it is dead", || !handle.is_alive());
    assert!(
        matches!(handle.submit(request("abc", exactly(5))), Err(SubmitError::Stopped(why)) if why.contains(message))
    );
    handle.shutdown(Shutdown::Finish);
}

#[test]
fn a_panic_in_a_step_fails_every_request_and_ends_the_engine() {
    everybody_is_told(Fault::Panic, "a kernel went wrong");
}

#[test]
fn a_failing_step_fails_every_request_and_ends_the_engine() {
    everybody_is_told(Fault::Error, "device");
}

#[test]
fn shutdown_finishes_or_fails_what_is_open() {
    let (handle, open) = gated(Fault::None, 64);
    let stream = handle.submit(request("abc", exactly(30))).unwrap();
    open.store(true, Ordering::Release);
    handle.shutdown(Shutdown::Finish);
    assert_eq!(collect(stream).tokens.len(), 30);
    assert!(!handle.is_alive());
    assert!(matches!(handle.submit(request("abc", exactly(3))), Err(SubmitError::Stopped(_))));

    let (handle, open) = gated(Fault::None, 64);
    let stream = handle.submit(request("abc", exactly(900))).unwrap();
    open.store(true, Ordering::Release);
    handle.shutdown(Shutdown::Now);
    assert!(matches!(collect(stream).error, Some(RequestError::Engine(_))));
}

#[test]
fn dropping_the_last_handle_stops_the_engine() {
    let handle = spawn(echoing(), 64);
    let mut stream = handle.clone().submit(request("abc", exactly(1000))).unwrap();
    assert!(matches!(stream.recv_timeout(WAIT), Ok(Some(Event::Prefill { .. }))));
    drop(handle);
    let mut last = None;
    while let Some(event) = stream.recv_timeout(WAIT).expect("in time") {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed { .. } | Event::Finished { .. })), "{last:?}");
}

#[test]
fn ten_thousand_clients_that_leave_at_once_leave_nothing() {
    let handle = spawn(echoing(), 64);
    for i in 0..10_000 {
        // A full queue is no reason to give up: all ten thousand are to be taken.
        let stream = loop {
            match handle.submit(request("abcdefgh", exactly(1 + i % 40))) {
                Ok(stream) => break stream,
                Err(SubmitError::Busy { .. }) => thread::yield_now(),
                Err(other) => panic!("{other}"),
            }
        };
        drop(stream);
    }
    until("idle", || handle.stats().running + handle.stats().waiting == 0);
    let stats = handle.stats();
    assert_eq!(stats.totals.aborted + stats.totals.finished_length, 10_000);
    assert_eq!((stats.pages_held, stats.pages_free + stats.pages_cached), (0, 64));
    assert_eq!(collect(handle.submit(request("abc", exactly(3))).unwrap()).text, "ccc");
}
