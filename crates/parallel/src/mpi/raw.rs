//! A thin layer over MPI's non-blocking calls: requests that own their memory. Deliberately no policy: no waits, no deadlines.

use mpi::environment::Universe;
use mpi::ffi::{
    MPI_Comm, MPI_Comm_set_errhandler, MPI_Iprobe, MPI_Irecv, MPI_Isend, MPI_Recv, MPI_Request, MPI_Status,
    MPI_Test, RSMPI_ANY_SOURCE, RSMPI_ERRORS_RETURN, RSMPI_FLOAT, RSMPI_INT32_T, RSMPI_REQUEST_NULL,
    RSMPI_STATUS_IGNORE,
};
use mpi::raw::AsRaw;
use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;

/// Most numbers of one message: MPI counts in `i32`.
pub const MAX_NUMBERS: usize = i32::MAX as usize;
/// All messages of a communicator have one tag: their order is their name.
const TAG: i32 = 0;
/// Words of a control message.
pub const WORDS: usize = 4;

/// MPI refused a call; with its error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused(pub i32);

fn done(code: i32) -> Result<(), Refused> {
    if code == 0 { Ok(()) } else { Err(Refused(code)) }
}

/// A message under way, with the memory it is read from or written to. While it is, the memory may not be freed: dropped before its end, it is
/// left to MPI for good (a rank was lost, and the process ends).
pub struct Pending<T> {
    request: MPI_Request,
    buffer: Vec<T>,
    ended: bool,
}

impl<T> Pending<T> {
    /// Whether the message has left, or arrived.
    pub fn test(&mut self) -> Result<bool, Refused> {
        if self.ended {
            return Ok(true);
        }
        let mut flag = 0;
        // SAFETY: the request was made by MPI_Isend or MPI_Irecv and has not ended; a status is not wanted.
        done(unsafe { MPI_Test(&mut self.request, &mut flag, RSMPI_STATUS_IGNORE) })?;
        self.ended = flag != 0;
        Ok(self.ended)
    }

    /// The memory of a message that has ended; empty of one that has not.
    pub fn take(mut self) -> Vec<T> {
        if self.ended { std::mem::take(&mut self.buffer) } else { Vec::new() }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if !self.ended {
            std::mem::forget(std::mem::take(&mut self.buffer));
        }
    }
}

/// A communicator of which calls return errors instead of ending the process.
pub struct Channel(SimpleCommunicator);

impl Channel {
    /// A channel over all processes of the job, apart from all others.
    pub fn new(universe: &Universe) -> Channel {
        let own = universe.world().duplicate();
        // SAFETY: a live communicator and a predefined handler.
        unsafe { MPI_Comm_set_errhandler(own.as_raw(), RSMPI_ERRORS_RETURN) };
        Channel(own)
    }

    fn raw(&self) -> MPI_Comm {
        self.0.as_raw()
    }

    /// Ends every process of the job with this exit status.
    pub fn abort(&self, status: i32) -> ! {
        self.0.abort(status)
    }

    /// Starts a message of numbers.
    pub fn send(&self, peer: usize, buffer: Vec<f32>) -> Result<Pending<f32>, Refused> {
        // SAFETY: the memory is the request's own and does not move while it is under way; lengths were checked by the planner's caller.
        self.start(buffer, |buffer, request| unsafe {
            let count = buffer.len() as i32;
            MPI_Isend(buffer.as_ptr().cast(), count, RSMPI_FLOAT, peer as i32, TAG, self.raw(), request)
        })
    }

    /// Makes room for a message of `numbers` numbers.
    pub fn expect(&self, peer: usize, numbers: usize) -> Result<Pending<f32>, Refused> {
        // SAFETY: as in `send`; MPI writes within the count.
        self.start(vec![f32::NAN; numbers], |buffer, request| unsafe {
            let count = buffer.len() as i32;
            MPI_Irecv(buffer.as_mut_ptr().cast(), count, RSMPI_FLOAT, peer as i32, TAG, self.raw(), request)
        })
    }

    /// Starts a control message.
    pub fn tell(&self, peer: usize, words: [i32; WORDS]) -> Result<Pending<i32>, Refused> {
        // SAFETY: as in `send`.
        self.start(words.to_vec(), |buffer, request| unsafe {
            let count = buffer.len() as i32;
            MPI_Isend(buffer.as_ptr().cast(), count, RSMPI_INT32_T, peer as i32, TAG, self.raw(), request)
        })
    }

    fn start<T>(
        &self,
        buffer: Vec<T>,
        call: impl FnOnce(&mut Vec<T>, &mut MPI_Request) -> i32,
    ) -> Result<Pending<T>, Refused> {
        // SAFETY: a constant of the library.
        let request = unsafe { RSMPI_REQUEST_NULL };
        let mut pending = Pending { request, buffer, ended: false };
        let code = call(&mut pending.buffer, &mut pending.request);
        if code != 0 {
            pending.ended = true;
        }
        done(code).map(|()| pending)
    }

    /// A control message that has arrived, and who sent it.
    pub fn told(&self) -> Result<Option<(usize, [i32; WORDS])>, Refused> {
        let (mut flag, mut words) = (0, [0i32; WORDS]);
        // SAFETY: a status is plain memory that MPI fills in.
        let mut status: MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: a live communicator; flag and status are ours.
        done(unsafe { MPI_Iprobe(RSMPI_ANY_SOURCE, TAG, self.raw(), &mut flag, &mut status) })?;
        if flag == 0 {
            return Ok(None);
        }
        let (source, count) = (status.MPI_SOURCE, words.len() as i32);
        // SAFETY: the probe found a control message, which is of this many words; the call does not wait for it.
        done(unsafe {
            MPI_Recv(
                words.as_mut_ptr().cast(),
                count,
                RSMPI_INT32_T,
                source,
                TAG,
                self.raw(),
                RSMPI_STATUS_IGNORE,
            )
        })?;
        Ok(Some((source as usize, words)))
    }
}
