//! The tier at work: an index of what is stored, a thread that writes behind and reads ahead, and limits on what waits for it.
//!
//! Nothing here blocks its caller: a page that does not fit into the queue is not stored, a fetch is asked for and polled.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::object::{PageName, decode, encode, object_bytes};
use super::{Digest, Layout, Store};

/// Limits of a tier.
#[derive(Clone, Copy, Debug)]
pub struct TierOptions {
    /// Bytes of objects kept; the least recently used go first.
    pub capacity_bytes: u64,
    /// Bytes of pages in host memory on their way to or from the store.
    pub staging_bytes: u64,
    /// Seconds from some start: reads are timed by it.
    pub seconds: fn() -> f64,
}

/// What a tier holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TierBooks {
    /// Objects stored.
    pub objects: u64,
    /// Their bytes.
    pub stored_bytes: u64,
    /// Bytes of pages in host memory now.
    pub staged_bytes: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Pages that came back whole.
    pub pages_loaded: u64,
    /// Pages not stored, because too much waited or the store refused.
    pub pages_not_stored: u64,
    /// Objects that were damaged or not what their name said; they were removed.
    pub faults: u64,
}

/// Pages that came back: the first so many of those asked for.
#[derive(Debug)]
pub struct Fetched {
    /// The pages' bytes, in order.
    pub pages: Vec<Vec<u8>>,
    /// What reading them took, without the wait before.
    pub read_seconds: f64,
    _staged: Staged,
}

/// A running fetch. Dropping it abandons the rest.
#[derive(Debug)]
pub struct Fetch {
    result: Receiver<Fetched>,
    wanted: Arc<AtomicBool>,
}

impl Fetch {
    /// What came; None while it is under way.
    pub fn poll(&self) -> Option<Fetched> {
        match self.result.try_recv() {
            Ok(fetched) => Some(fetched),
            Err(TryRecvError::Empty) => None,
            // The worker is gone: nothing will come.
            Err(TryRecvError::Disconnected) => {
                let _staged = Staged { shared: None, bytes: 0 };
                Some(Fetched { pages: Vec::new(), read_seconds: 0.0, _staged })
            }
        }
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.wanted.store(false, Ordering::Relaxed);
    }
}

enum Job {
    Write { name: PageName, page: Vec<u8>, staged: Staged },
    Read { names: Vec<PageName>, to: Sender<Fetched>, wanted: Arc<AtomicBool> },
}

#[derive(Default)]
struct Index {
    /// Bytes and time of last use of each object; `None` while it is being written.
    objects: HashMap<Digest, (Option<u64>, u64)>,
    clock: u64,
    books: TierBooks,
}

struct Shared {
    index: Mutex<Index>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.lock().books.fmt(f)
    }
}

/// Bytes of host memory on the books for as long as this lives.
#[derive(Debug)]
struct Staged {
    shared: Option<Arc<Shared>>,
    bytes: u64,
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.lock().books.staged_bytes -= self.bytes;
        }
    }
}

/// Pages below the pool. Dropping it finishes what waits to be written.
pub struct Tier {
    layout: Layout,
    options: TierOptions,
    shared: Arc<Shared>,
    store: Arc<dyn Store>,
    jobs: Option<Sender<Job>>,
    worker: Option<JoinHandle<()>>,
}

impl Tier {
    /// A tier over `store`, with whatever it holds already.
    pub fn new(layout: Layout, store: Box<dyn Store>, options: TierOptions) -> std::io::Result<Tier> {
        let mut index = Index::default();
        for (name, bytes) in store.list()? {
            index.clock += 1;
            let clock = index.clock;
            index.objects.insert(name, (Some(bytes), clock));
            index.books.objects += 1;
            index.books.stored_bytes += bytes;
        }
        let shared = Arc::new(Shared { index: Mutex::new(index) });
        let (jobs, queue) = channel();
        let store: Arc<dyn Store> = Arc::from(store);
        let work = Worker {
            layout: layout.clone(),
            store: Arc::clone(&store),
            options,
            shared: Arc::clone(&shared),
        };
        let worker =
            std::thread::Builder::new().name("suanpan-tier".into()).spawn(move || work.run(queue))?;
        Ok(Tier { layout, options, shared, store, jobs: Some(jobs), worker: Some(worker) })
    }

    /// What a page is to this tier.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How many of `names`, from the first on, are stored.
    pub fn stored(&self, names: &[PageName]) -> usize {
        let index = self.shared.lock();
        names.iter().take_while(|n| index.objects.get(&n.digest).is_some_and(|o| o.0.is_some())).count()
    }

    /// How many of `names` lie nearer than the rest.
    pub fn near(&self, names: &[PageName]) -> usize {
        names.iter().filter(|n| self.store.is_near(&n.digest)).count()
    }

    /// Seconds to read one object, measured now and here: the one not used for the longest, so that it lies where the rest does, or
    /// where there is none one that is written for it. None where that cannot be done.
    pub fn measure_read(&self) -> Option<f64> {
        let far = |name: &Digest| !self.store.is_near(name);
        let oldest = {
            let index = self.shared.lock();
            let stored = index.objects.iter().filter(|(name, o)| o.0.is_some() && far(name));
            stored.min_by_key(|(_, o)| o.1).map(|(name, _)| *name)
        };
        let probe: Digest = [0xa5; 32];
        if oldest.is_none() {
            self.store.write(&probe, &vec![0; object_bytes(&self.layout)]).ok()?;
        }
        let start = (self.options.seconds)();
        let read = self.store.read_far(&oldest.unwrap_or(probe));
        let seconds = (self.options.seconds)() - start;
        if oldest.is_none() {
            self.store.remove(&probe).ok();
        }
        read.ok().map(|_| seconds)
    }

    /// Stores a page behind the caller's back. False where it is stored already, or too much waits.
    pub fn store(&self, name: &PageName, page: &[u8]) -> bool {
        let bytes = page.len() as u64;
        {
            let mut index = self.shared.lock();
            index.clock += 1;
            let clock = index.clock;
            if let Some(object) = index.objects.get_mut(&name.digest) {
                object.1 = clock;
                return false;
            }
            if index.books.staged_bytes + bytes > self.options.staging_bytes {
                index.books.pages_not_stored += 1;
                return false;
            }
            index.books.staged_bytes += bytes;
            index.objects.insert(name.digest, (None, clock));
        }
        let staged = Staged { shared: Some(Arc::clone(&self.shared)), bytes };
        let job = Job::Write { name: name.clone(), page: page.to_vec(), staged };
        self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }

    /// Fetches pages, in order, up to the first that is not there, is not believed, or finds no room on the way. None where nothing
    /// may wait for it.
    pub fn fetch(&self, names: Vec<PageName>) -> Option<Fetch> {
        let (to, result) = channel();
        let wanted = Arc::new(AtomicBool::new(true));
        let room = self.options.staging_bytes.saturating_sub(self.books().staged_bytes);
        let most = usize::try_from(room / self.layout.page_bytes.max(1) as u64).unwrap_or(usize::MAX);
        let names: Vec<PageName> = names.into_iter().take(most).collect();
        if names.is_empty() {
            return None;
        }
        self.jobs.as_ref()?.send(Job::Read { names, to, wanted: Arc::clone(&wanted) }).ok()?;
        Some(Fetch { result, wanted })
    }

    /// What it holds and has done.
    pub fn books(&self) -> TierBooks {
        self.shared.lock().books
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(worker) = self.worker.take() {
            // It ends when its queue is empty; how it ended changes nothing any more.
            drop(worker.join());
        }
    }
}

struct Worker {
    layout: Layout,
    store: Arc<dyn Store>,
    options: TierOptions,
    shared: Arc<Shared>,
}

impl Worker {
    fn run(self, queue: Receiver<Job>) {
        // Whoever waits for a page comes before whoever has one to give.
        let mut writes = std::collections::VecDeque::new();
        loop {
            let job = if writes.is_empty() { queue.recv().ok() } else { queue.try_recv().ok() };
            match job {
                Some(Job::Read { names, to, wanted }) => self.read(&names, &to, &wanted),
                Some(Job::Write { name, page, staged }) => writes.push_back((name, page, staged)),
                None => match writes.pop_front() {
                    Some((name, page, staged)) => self.write(&name, &page, staged),
                    None => return,
                },
            }
        }
    }

    fn write(&self, name: &PageName, page: &[u8], staged: Staged) {
        let object = encode(&self.layout, name, page);
        let written = self.store.write(&name.digest, &object);
        drop(staged);
        let mut index = self.shared.lock();
        if written.is_err() {
            index.objects.remove(&name.digest);
            index.books.pages_not_stored += 1;
            return;
        }
        let bytes = object.len() as u64;
        if let Some(entry) = index.objects.get_mut(&name.digest) {
            entry.0 = Some(bytes);
        }
        index.books.objects += 1;
        index.books.stored_bytes += bytes;
        index.books.pages_written += 1;
        drop(index);
        self.trim();
    }

    /// Removes the least recently used objects past the capacity.
    fn trim(&self) {
        loop {
            let mut index = self.shared.lock();
            if index.books.stored_bytes <= self.options.capacity_bytes {
                return;
            }
            let stored = index.objects.iter().filter(|(_, o)| o.0.is_some());
            let Some(oldest) = stored.min_by_key(|(_, o)| o.1).map(|(&name, _)| name) else { return };
            index.forget(&oldest);
            drop(index);
            // What cannot be removed is off the books all the same, and is found again at the next start.
            self.store.remove(&oldest).ok();
        }
    }

    fn read(&self, names: &[PageName], to: &Sender<Fetched>, wanted: &AtomicBool) {
        let mut staged = Staged { shared: Some(Arc::clone(&self.shared)), bytes: 0 };
        let mut pages = Vec::with_capacity(names.len());
        let start = (self.options.seconds)();
        for name in names {
            if !wanted.load(Ordering::Relaxed) {
                return;
            }
            let Some(page) = self.read_page(name) else { break };
            let bytes = page.len() as u64;
            let mut index = self.shared.lock();
            index.books.staged_bytes += bytes;
            index.books.pages_loaded += 1;
            staged.bytes += bytes;
            pages.push(page);
        }
        // Nobody may wait any more: then it all goes at once.
        let read_seconds = (self.options.seconds)() - start;
        to.send(Fetched { pages, read_seconds, _staged: staged }).ok();
    }

    fn read_page(&self, name: &PageName) -> Option<Vec<u8>> {
        let object = self.store.read(&name.digest);
        let page = object
            .as_ref()
            .ok()
            .and_then(|object| decode(&self.layout, name, object).ok().map(<[u8]>::to_vec));
        let mut index = self.shared.lock();
        if page.is_none() {
            index.books.faults += u64::from(object.is_ok());
            index.forget(&name.digest);
            drop(index);
            if object.is_ok() {
                self.store.remove(&name.digest).ok();
            }
            return None;
        }
        index.clock += 1;
        let clock = index.clock;
        if let Some(entry) = index.objects.get_mut(&name.digest) {
            entry.1 = clock;
        }
        page
    }
}

impl Index {
    fn forget(&mut self, name: &Digest) {
        if let Some((Some(bytes), _)) = self.objects.remove(name) {
            self.books.objects -= 1;
            self.books.stored_bytes -= bytes;
        }
    }
}
