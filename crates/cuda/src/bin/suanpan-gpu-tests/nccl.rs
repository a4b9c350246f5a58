//! NCCL with one rank: messages to itself, an all-gather, and that neither a rank that never comes nor a stream that stands still is waited for longer
//! than the deadline. (Two ranks need two devices: NCCL refuses two on one.)
use cudarc::driver::{CudaStream, result};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use suanpan_cuda::Error;
use suanpan_cuda::driver::{Gpu, call};
use suanpan_cuda::nccl::{self, Communicator, Library, Message, Place, UniqueId, Way};
use suanpan_cuda::testing::Buffer;

use crate::Report;

/// The first communicator of a process starts NCCL's threads and opens its sockets.
const TIMEOUT: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(400);
const ALONE: Place = Place { rank: 0, world: 1 };

/// Two buffers of random and of poisoned bytes.
fn buffers(gpu: &Gpu, bytes: usize) -> Result<(Buffer, Buffer), Error> {
    let (from, to) = (Buffer::new(gpu, bytes)?, Buffer::new(gpu, bytes)?);
    from.fill_bits(gpu, 7, u32::MAX)?;
    to.fill(gpu, 0x7fff_7fff)?;
    Ok((from, to))
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let library = match Library::open() {
        Ok(library) => library,
        Err(error) => {
            report.line(false, "nccl", error.to_string());
            return Ok(());
        }
    };
    report.line(true, "nccl", format!("{library:?}"));
    let stream = gpu.context.new_stream().map_err(call("cuStreamCreate"))?;
    let begun = Instant::now();
    let mut alone = Communicator::join(&library, gpu, &stream, (library.unique_id()?, ALONE), TIMEOUT)?;
    report.line(true, "nccl join", format!("one rank in {:?}", begun.elapsed()));
    messages(gpu, report, &mut alone)?;
    gather(gpu, report, &mut alone)?;
    let finished = alone.finish();
    report.line(finished.is_ok(), "nccl finish", format!("{finished:?}"));
    never_joined(gpu, report, &library, &stream)?;
    stands_still(gpu, report, &library)
}

/// A group of messages to itself of odd sizes at odd places, received in the order they are sent in: logical ranks on one device.
fn messages(gpu: &Gpu, report: &mut Report, alone: &mut Communicator) -> Result<(), Error> {
    let sizes = [1 << 24, 1, 4097, 64, 3 << 20];
    let (from, to) = buffers(gpu, sizes.iter().sum())?;
    let (mut group, mut at, mut back) = (Vec::new(), 0, to.bytes);
    for bytes in sizes {
        group.push(Message { way: Way::Send, peer: 0, address: from.address + at as u64, bytes });
        at += bytes;
        back -= bytes;
        group.push(Message { way: Way::Recv, peer: 0, address: to.address + back as u64, bytes });
    }
    // SAFETY: the ranges lie in the two buffers, do not overlap, and are used again after the wait.
    unsafe { alone.exchange(&group)? };
    alone.wait()?;
    let (sent, received) = (from.read::<u8>(0, from.bytes)?, to.read::<u8>(0, to.bytes)?);
    let (mut at, mut back, mut wrong) = (0, to.bytes, 0);
    for bytes in sizes {
        back -= bytes;
        wrong += usize::from(sent[at..at + bytes] != received[back..back + bytes]);
        at += bytes;
    }
    report.line(wrong == 0, "nccl messages to itself", format!("{wrong} of {} wrong", sizes.len()));
    let short = [group[0], Message { bytes: 8, ..group[1] }];
    // SAFETY: refused before anything is started.
    let refused = unsafe { alone.exchange(&short) };
    let ok = matches!(refused, Err(nccl::Error::Unsupported { field: "messages", .. }));
    report.line(ok, "nccl unequal messages", format!("{refused:?}"));
    Ok(())
}

fn gather(gpu: &Gpu, report: &mut Report, alone: &mut Communicator) -> Result<(), Error> {
    let (from, to) = buffers(gpu, 5 << 20)?;
    // SAFETY: both buffers have as many bytes, and are used again after the wait.
    unsafe { alone.all_gather(from.address, to.address, from.bytes)? };
    alone.wait()?;
    let same = from.read::<u32>(0, from.bytes / 4)? == to.read::<u32>(0, to.bytes / 4)?;
    report.line(same, "nccl all-gather", format!("{} bytes", from.bytes));
    Ok(())
}

/// The deadline must hold, and not by a long way: NCCL has to end its own threads and sockets.
fn bounded(report: &mut Report, name: &str, begun: Instant, error: Option<String>) {
    let (took, named) =
        (begun.elapsed(), error.as_ref().is_some_and(|e| e.contains("was not through within")));
    let ok = named && took >= SHORT && took < SHORT + Duration::from_secs(5);
    report.line(ok, name, format!("{took:?}: {error:?}"));
}

/// The other of two ranks does not come.
fn never_joined(
    gpu: &Gpu,
    report: &mut Report,
    library: &Library,
    stream: &Arc<CudaStream>,
) -> Result<(), Error> {
    let (begun, place) = (Instant::now(), Place { rank: 0, world: 2 });
    let joined = Communicator::join(library, gpu, stream, (library.unique_id()?, place), SHORT);
    bounded(report, "nccl other rank never joins", begun, joined.err().map(|e| e.to_string()));
    Ok(())
}

/// Holds a stream until it is told to go on.
unsafe extern "C" fn hold(go: *mut c_void) {
    // SAFETY: `stands_still` hands in a static.
    let go = unsafe { &*go.cast::<AtomicBool>() };
    while !go.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Messages behind work that does not end: the wait ends without them, and the device is as good as before.
fn stands_still(gpu: &Gpu, report: &mut Report, library: &Library) -> Result<(), Error> {
    static GO: AtomicBool = AtomicBool::new(false);
    let stream = gpu.context.new_stream().map_err(call("cuStreamCreate"))?;
    let id: UniqueId = library.unique_id()?;
    let mut alone = Communicator::join(library, gpu, &stream, (id, ALONE), TIMEOUT)?;
    alone.set_timeout(SHORT);
    let (from, to) = buffers(gpu, 1 << 20)?;
    let group = [(Way::Send, from.address), (Way::Recv, to.address)].map(|(way, address)| Message {
        way,
        peer: 0,
        address,
        bytes: 1 << 20,
    });
    // SAFETY: the function only reads the static. The stream may be told to go on by anybody; the guard below does.
    unsafe {
        result::stream::launch_host_function(stream.cu_stream(), hold, (&raw const GO).cast_mut().cast())
    }
    .map_err(call("cuLaunchHostFunc"))?;
    // NCCL's abort may wait for the stream, so another thread lets it go on after the deadline.
    let release = std::thread::spawn(|| {
        std::thread::sleep(SHORT + Duration::from_millis(300));
        GO.store(true, Ordering::Release);
    });
    let begun = Instant::now();
    // SAFETY: the buffers live until the stream is empty, below.
    let put = unsafe { alone.exchange(&group) };
    let waited = put.map_err(Error::from).and_then(|()| alone.wait());
    bounded(report, "nccl stream stands still", begun, waited.err().map(|e| e.to_string()));
    // SAFETY: refused before anything is started.
    let later = unsafe { alone.exchange(&group) };
    let ok = matches!(later, Err(nccl::Error::Aborted { .. }));
    report.line(ok, "nccl after an abort", format!("{later:?}"));
    release.join().expect("the thread only sleeps");
    stream.synchronize().map_err(call("cuStreamSynchronize"))?;
    let mut again = Communicator::join(library, gpu, &stream, (library.unique_id()?, ALONE), TIMEOUT)?;
    gather(gpu, report, &mut again)?;
    again.finish()?;
    Ok(())
}
