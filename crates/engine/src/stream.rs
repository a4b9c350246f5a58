//! The events of one request on their way to its client: readable by a blocked thread or by an async task.
//!
//! Not bounded by blocking, because a slow client must not stop the engine: when a client falls behind, its token events are
//! joined, so what waits is at most one event's overhead beyond the output itself, which `max_tokens` bounds.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::request::{Event, RequestKey};

/// Events that may wait one by one before token events are joined.
const JOIN_PAST: usize = 256;

/// No event came in the time given; the request goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no event in time")]
pub struct TimedOut;

#[derive(Default)]
struct State {
    queue: VecDeque<Event>,
    /// The sender is gone: what is queued is all.
    ended: bool,
    /// When the step began that first ran the request.
    admitted: Option<Instant>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Channel {
    state: Mutex<State>,
    ready: Condvar,
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, f: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        f(&mut state);
        let waker = state.waker.take();
        drop(state);
        self.ready.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The engine's end.
pub(crate) struct Sender(Arc<Channel>);

impl Sender {
    /// Notes when the request first ran; later notes change nothing.
    pub fn admitted(&self, at: Instant) {
        self.0.lock().admitted.get_or_insert(at);
    }

    pub fn send(&self, event: Event) {
        self.0.change(|state| match (state.queue.len() >= JOIN_PAST, state.queue.back_mut(), event) {
            (
                true,
                Some(Event::Token { tokens, text, logprobs, .. }),
                Event::Token { tokens: t, text: s, logprobs: l, .. },
            ) => {
                tokens.extend(t);
                text.push_str(&s);
                logprobs.extend(l);
            }
            (_, _, event) => state.queue.push_back(event),
        });
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.0.change(|state| state.ended = true);
    }
}

/// The client's end. Dropping it takes the request back: its pages are free within one step.
pub struct Stream {
    key: RequestKey,
    channel: Arc<Channel>,
    /// Called when the stream is dropped.
    on_drop: Option<Box<dyn FnOnce(RequestKey) + Send + Sync>>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("key", &self.key).finish_non_exhaustive()
    }
}

/// Both ends of a new stream.
pub(crate) fn channel(
    key: RequestKey,
    on_drop: impl FnOnce(RequestKey) + Send + Sync + 'static,
) -> (Sender, Stream) {
    let channel = Arc::new(Channel::default());
    let stream = Stream { key, channel: Arc::clone(&channel), on_drop: Some(Box::new(on_drop)) };
    (Sender(channel), stream)
}

impl Stream {
    /// The request's key.
    pub fn key(&self) -> RequestKey {
        self.key
    }

    /// When the step began that first ran the request; `None` while it waits.
    pub fn admitted_at(&self) -> Option<Instant> {
        self.channel.lock().admitted
    }

    /// Waits for the next event on this thread; `None` after the last.
    pub fn recv(&mut self) -> Option<Event> {
        let waiting = |state: &mut State| state.queue.is_empty() && !state.ended;
        let ready = self.channel.ready.wait_while(self.channel.lock(), waiting);
        ready.unwrap_or_else(PoisonError::into_inner).queue.pop_front()
    }

    /// As [`Stream::recv`], at most for `timeout`.
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Event>, TimedOut> {
        let deadline = Instant::now() + timeout;
        let mut state = self.channel.lock();
        loop {
            if let Some(event) = state.queue.pop_front() {
                return Ok(Some(event));
            }
            if state.ended {
                return Ok(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TimedOut);
            }
            state = self.channel.ready.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The next event if there is one now.
    pub fn try_recv(&mut self) -> Option<Event> {
        self.channel.lock().queue.pop_front()
    }

    /// The next event for an async task, in the shape of `futures::Stream::poll_next`; `None` after the last.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.channel.lock();
        match (state.queue.pop_front(), state.ended) {
            (Some(event), _) => Poll::Ready(Some(event)),
            (None, true) => Poll::Ready(None),
            (None, false) => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Waits for the next event in an async task; `None` after the last. Cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(on_drop) = self.on_drop.take() {
            on_drop(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    struct Counter(AtomicU32);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn token(n: u32) -> Event {
        Event::Token { key: RequestKey(7), tokens: vec![n], text: n.to_string(), logprobs: vec![] }
    }

    #[test]
    fn an_async_reader_is_woken_for_events_and_for_the_end() {
        let (sender, mut stream) = channel(RequestKey(7), |_| ());
        let wakes = Arc::new(Counter(AtomicU32::new(0)));
        let waker = Waker::from(Arc::clone(&wakes));
        let mut cx = Context::from_waker(&waker);
        assert!(stream.poll_next(&mut cx).is_pending());
        sender.send(token(1));
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert_eq!(stream.poll_next(&mut cx), Poll::Ready(Some(token(1))));
        assert!(stream.poll_next(&mut cx).is_pending());
        drop(sender);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        assert_eq!(stream.poll_next(&mut cx), Poll::Ready(None));
    }

    #[test]
    fn a_blocked_reader_sees_every_event_in_order() {
        let (sender, mut stream) = channel(RequestKey(7), |_| ());
        let writer = std::thread::spawn(move || (0..1000).for_each(|n| sender.send(token(n))));
        let mut tokens = Vec::new();
        while let Some(event) = stream.recv() {
            let Event::Token { tokens: t, .. } = event else { panic!("only tokens were sent") };
            tokens.extend(t);
        }
        writer.join().unwrap();
        assert_eq!(tokens, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn a_slow_client_costs_its_output_and_no_more() {
        let (sender, mut stream) = channel(RequestKey(7), |_| ());
        (0..10_000).for_each(|n| sender.send(token(n)));
        assert!(stream.channel.lock().queue.len() <= JOIN_PAST);
        let mut text = String::new();
        while let Some(Event::Token { text: t, .. }) = stream.try_recv() {
            text += &t;
        }
        assert_eq!(text, (0..10_000).map(|n| n.to_string()).collect::<String>());
        assert_eq!(stream.recv_timeout(Duration::from_millis(5)), Err(TimedOut));
    }

    #[test]
    fn dropping_the_stream_takes_the_request_back() {
        let gone = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&gone);
        let (_sender, stream) =
            channel(RequestKey(7), move |key| seen.store(key.0 as u32, Ordering::Relaxed));
        drop(stream);
        assert_eq!(gone.load(Ordering::Relaxed), 7);
    }
}
