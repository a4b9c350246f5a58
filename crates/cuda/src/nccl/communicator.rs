//! One rank's end of a communicator: groups of messages and all-gathers on one stream, each followed to its end or its deadline.
use super::Error;
use super::library::{BYTES, Code, Config, Handle, IN_PROGRESS, Library, SUCCESS, UniqueId};
use crate::driver::{Address, Gpu};
use cudarc::driver::{CudaStream, sys};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Polls before a wait begins to sleep between them.
const SPINS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(20);

/// Which rank of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// From 0 on.
    pub rank: usize,
    /// Ranks of the communicator.
    pub world: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the peer.
    Send,
    /// From the peer.
    Recv,
}

/// One message of a group. Messages of a pair of ranks arrive in the order they stand in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// To or from the peer.
    pub way: Way,
    /// A rank; its own self, too.
    pub peer: usize,
    /// Of the first byte.
    pub address: Address,
    /// The message's size.
    pub bytes: usize,
}

/// One rank's end of a communicator. Dropped before [`finish`](Communicator::finish) it is aborted, and other ranks' waits fail.
pub struct Communicator {
    library: Library,
    /// Null once it is aborted or destroyed.
    comm: Handle,
    place: Place,
    timeout: Duration,
    stream: Handle,
    /// Keeps `stream` alive.
    _owner: Option<Arc<CudaStream>>,
}

// SAFETY: NCCL lets any one thread at a time use a communicator, and `&mut self` is one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins the communicator of `id` as `place`, with messages on `stream`, a stream of `gpu`. Returns when all ranks have joined; every wait, this one
    /// too, ends after `timeout`, but [`abort`](Communicator::abort)'s own.
    pub fn join(
        library: &Library,
        gpu: &Gpu,
        stream: &Arc<CudaStream>,
        (id, place): (UniqueId, Place),
        timeout: Duration,
    ) -> Result<Communicator, crate::Error> {
        gpu.context.bind_to_thread().map_err(crate::driver::call("cuCtxSetCurrent"))?;
        let mut joined = Communicator::start(library, stream.cu_stream().cast(), (id, place), timeout)?;
        joined._owner = Some(stream.clone());
        Ok(joined)
    }

    fn start(
        library: &Library,
        stream: Handle,
        (id, place): (UniqueId, Place),
        timeout: Duration,
    ) -> Result<Communicator, Error> {
        let Place { rank, world } = place;
        if rank >= world || i32::try_from(world).is_err() {
            let supported = "a rank below the number of ranks, which is below 2^31".into();
            return Err(Error::Unsupported { field: "place", asked: place.to_string(), supported });
        }
        let (library, comm) = (library.clone(), std::ptr::null_mut());
        let mut joining = Communicator { library, comm, place, timeout, stream, _owner: None };
        let mut config = Config::non_blocking();
        let init = joining.library.functions.init_rank;
        // SAFETY: the call fills the handle and copies the configuration.
        let code = unsafe { init(&mut joining.comm, world as i32, id, rank as i32, &mut config) };
        joining.check("ncclCommInitRankConfig", code)?;
        joining.settle("ncclCommInitRankConfig", &[])?;
        Ok(joining)
    }

    /// From now on every wait but [`abort`](Communicator::abort)'s own ends after `timeout`.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// This rank's place.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Puts `messages` on the stream as one group: none of them waits for another, so ranks may send to each other in any order. Returns when the
    /// group is on the stream, not when it has run: see [`wait`](Communicator::wait).
    ///
    /// # Safety
    /// The addresses are device memory of so many bytes each; nothing writes what is sent, and nothing uses what is received, until the stream has
    /// run the group.
    pub unsafe fn exchange(&mut self, messages: &[Message]) -> Result<(), Error> {
        self.alive("exchange")?;
        self.check_messages(messages)?;
        let f = self.library.functions;
        // SAFETY: the call begins a group of this thread, which ends below. Without one, each message would wait for its peer alone.
        let started = unsafe { (f.group_start)() };
        self.check("ncclGroupStart", started)?;
        // SAFETY: the caller vouches for the memory; the communicator and stream are alive.
        let put = |m: &Message| unsafe {
            let (peer, comm, stream) = (m.peer as i32, self.comm, self.stream);
            match m.way {
                Way::Send => (f.send)(m.address as *const c_void, m.bytes, BYTES, peer, comm, stream),
                Way::Recv => (f.recv)(m.address as *mut c_void, m.bytes, BYTES, peer, comm, stream),
            }
        };
        let refused = |code: Code| code != SUCCESS && code != IN_PROGRESS;
        let first = messages.iter().map(put).find(|code| refused(*code));
        // SAFETY: ends the group, whatever happened in it.
        let ended = unsafe { (f.group_end)() };
        let codes =
            first.map(|code| ("ncclSend or ncclRecv", code)).into_iter().chain([("ncclGroupEnd", ended)]);
        for (call, code) in codes {
            self.check(call, code)?;
        }
        let peers: Vec<usize> = messages.iter().map(|m| m.peer).collect();
        self.settle("exchange", &peers)
    }

    /// Puts on the stream: every rank's `bytes` at `from` come to every rank's `to`, rank by rank. Returns as [`exchange`](Communicator::exchange) does.
    ///
    /// # Safety
    /// `from` has `bytes` bytes and `to` as many for each rank; both as in [`exchange`](Communicator::exchange).
    pub unsafe fn all_gather(&mut self, from: Address, to: Address, bytes: usize) -> Result<(), Error> {
        self.alive("all_gather")?;
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the caller vouches for the memory; the communicator and stream are alive.
        let code =
            unsafe { (self.library.functions.all_gather)(from, to, bytes, BYTES, self.comm, self.stream) };
        self.check("ncclAllGather", code)?;
        self.settle("all_gather", &[])
    }

    /// Waits until the stream has run all that was put on it. Fails when NCCL sees a fault (a peer that is gone), or after the deadline; then the
    /// communicator is aborted, and what should have been received may hold anything.
    pub fn wait(&mut self) -> Result<(), crate::Error> {
        if let Some(owner) = &self._owner {
            // Another thread than `join`'s may ask.
            owner.context().bind_to_thread().map_err(crate::driver::call("cuCtxSetCurrent"))?;
        }
        let stream = self.stream;
        self.wait_until("wait", &[], || {
            // SAFETY: the stream is alive: `_owner` holds it.
            match unsafe { sys::cuStreamQuery(stream.cast()) } {
                sys::CUresult::CUDA_SUCCESS => Ok(true),
                sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                other => other.result().map(|()| true).map_err(crate::driver::call("cuStreamQuery")),
            }
        })
    }

    /// Leaves in order: what is on the stream is run first. All ranks call it.
    pub fn finish(mut self) -> Result<(), Error> {
        self.alive("finish")?;
        // SAFETY: the communicator is alive, and gets no work after this.
        let code = unsafe { (self.library.functions.finalize)(self.comm) };
        self.check("ncclCommFinalize", code)?;
        self.settle("ncclCommFinalize", &[])?;
        let comm = std::mem::replace(&mut self.comm, std::ptr::null_mut());
        // SAFETY: the handle is used for the last time.
        match unsafe { (self.library.functions.destroy)(comm) } {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.failed("ncclCommDestroy", code)),
        }
    }

    /// Gives up: kernels of this communicator end on the device, other ranks find out by their deadlines. Returns when NCCL does, which this layer
    /// does not bound: NCCL may wait for work that stands before its own on the stream.
    pub fn abort(&mut self) {
        let comm = std::mem::replace(&mut self.comm, std::ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: the handle is used for the last time. What NCCL says to it changes nothing.
            let _ = unsafe { (self.library.functions.abort)(comm) };
        }
    }

    fn alive(&self, call: &'static str) -> Result<(), Error> {
        if self.comm.is_null() { Err(Error::Aborted { place: self.place, call }) } else { Ok(()) }
    }

    /// NCCL takes a message to a rank's own self only beside its receipt, in the same group.
    fn check_messages(&self, messages: &[Message]) -> Result<(), Error> {
        let Place { rank, world } = self.place;
        let bad = |field, asked, supported| Err(Error::Unsupported { field, asked, supported });
        if let Some(message) = messages.iter().find(|m| m.peer >= world) {
            return bad("peer", message.peer.to_string(), format!("below {world}"));
        }
        let mine = |way: Way| -> Vec<usize> {
            messages.iter().filter(|m| m.peer == rank && m.way == way).map(|m| m.bytes).collect()
        };
        let (sent, received) = (mine(Way::Send), mine(Way::Recv));
        if sent != received {
            let asked = format!("{sent:?} bytes sent to itself, {received:?} received");
            return bad("messages", asked, "equal numbers, in one order".into());
        }
        Ok(())
    }

    /// Takes "done" and "under way"; anything else aborts.
    fn check(&mut self, call: &'static str, code: Code) -> Result<(), Error> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        let error = self.failed(call, code);
        self.abort();
        Err(error)
    }

    fn failed(&self, call: &'static str, code: Code) -> Error {
        Error::Failed { place: self.place, call, reason: self.library.reason(code, self.comm) }
    }

    /// Waits until NCCL's threads are through with `call`.
    fn settle(&mut self, call: &'static str, peers: &[usize]) -> Result<(), Error> {
        self.wait_until(call, peers, || Ok(true))
    }

    /// Waits until NCCL is through with what it was asked, and `done`.
    fn wait_until<E: From<Error>>(
        &mut self,
        call: &'static str,
        peers: &[usize],
        mut done: impl FnMut() -> Result<bool, E>,
    ) -> Result<(), E> {
        self.alive(call)?;
        let began = Instant::now();
        let mut polls = 0;
        loop {
            let mut state = SUCCESS;
            // SAFETY: the communicator is alive; the call only fills `state`.
            let code = unsafe { (self.library.functions.async_error)(self.comm, &mut state) };
            self.check(call, code)?;
            self.check(call, state)?;
            if state == SUCCESS && done().inspect_err(|_| self.abort())? {
                return Ok(());
            }
            if began.elapsed() >= self.timeout {
                self.abort();
                let peers = match peers {
                    [] => "all ranks".into(),
                    peers => format!("ranks {peers:?}"),
                };
                return Err(Error::TimedOut { place: self.place, call, peers, timeout: self.timeout }.into());
            }
            polls += 1;
            if polls > SPINS {
                std::thread::sleep(PAUSE);
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

#[cfg(test)]
mod tests;
