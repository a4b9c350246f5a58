//! Objects in host memory, in front of a slower store: what was stored or read last is found here first.
//!
//! Checks nothing: objects carry their own checksum, and are believed after it only, wherever they come from.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Digest, Store};

#[derive(Default)]
struct Kept {
    objects: HashMap<Digest, (Arc<[u8]>, u64)>,
    /// By time of last use.
    order: BTreeMap<u64, Digest>,
    bytes: u64,
    clock: u64,
}

/// Up to so many bytes of objects in memory, and below them a slower store, if there is one. Clones are the same store.
#[derive(Clone)]
pub struct MemoryStore {
    kept: Arc<Mutex<Kept>>,
    capacity_bytes: u64,
    below: Option<Arc<dyn Store>>,
}

impl MemoryStore {
    /// An empty one. What is evicted here stays in `below`; without it, it is gone.
    pub fn new(capacity_bytes: u64, below: Option<Box<dyn Store>>) -> MemoryStore {
        MemoryStore { kept: Arc::default(), capacity_bytes, below: below.map(Arc::from) }
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, name: &Digest, object: &[u8]) {
        let bytes = object.len() as u64;
        if bytes > self.capacity_bytes {
            return;
        }
        let mut kept = self.lock();
        kept.forget(name);
        while kept.bytes + bytes > self.capacity_bytes {
            let Some((_, oldest)) = kept.order.pop_first() else { break };
            kept.forget(&oldest);
        }
        kept.clock += 1;
        let clock = kept.clock;
        kept.objects.insert(*name, (object.into(), clock));
        kept.order.insert(clock, *name);
        kept.bytes += bytes;
    }
}

impl Kept {
    fn forget(&mut self, name: &Digest) {
        if let Some((object, time)) = self.objects.remove(name) {
            self.order.remove(&time);
            self.bytes -= object.len() as u64;
        }
    }

    fn find(&mut self, name: &Digest) -> Option<Arc<[u8]>> {
        self.clock += 1;
        let clock = self.clock;
        let (object, time) = self.objects.get_mut(name)?;
        let before = std::mem::replace(time, clock);
        let object = Arc::clone(object);
        self.order.remove(&before);
        self.order.insert(clock, *name);
        Some(object)
    }
}

impl Store for MemoryStore {
    fn read(&self, name: &Digest) -> io::Result<Vec<u8>> {
        if let Some(object) = self.lock().find(name) {
            return Ok(object.to_vec());
        }
        let Some(below) = &self.below else { return Err(io::ErrorKind::NotFound.into()) };
        let object = below.read(name)?;
        self.keep(name, &object);
        Ok(object)
    }

    fn write(&self, name: &Digest, object: &[u8]) -> io::Result<()> {
        self.keep(name, object);
        // Below may be full or broken: what is in memory is found all the same.
        match &self.below {
            None if object.len() as u64 > self.capacity_bytes => Err(io::ErrorKind::StorageFull.into()),
            None => Ok(()),
            Some(below) => {
                below.write(name, object).or_else(|e| if self.is_near(name) { Ok(()) } else { Err(e) })
            }
        }
    }

    fn remove(&self, name: &Digest) -> io::Result<()> {
        self.lock().forget(name);
        self.below.as_ref().map_or(Ok(()), |below| below.remove(name))
    }

    fn list(&self) -> io::Result<Vec<(Digest, u64)>> {
        match &self.below {
            Some(below) => below.list(),
            None => {
                let kept = self.lock();
                let size = |name: &Digest| kept.objects[name].0.len() as u64;
                Ok(kept.order.values().map(|name| (*name, size(name))).collect())
            }
        }
    }

    fn read_far(&self, name: &Digest) -> io::Result<Vec<u8>> {
        match &self.below {
            Some(below) => below.read(name),
            None => self.read(name),
        }
    }

    fn is_near(&self, name: &Digest) -> bool {
        self.lock().objects.contains_key(name)
    }
}
