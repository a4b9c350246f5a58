//! Bytes of a file, shared by everything that points into it: memory-mapped, or owned for data made in code.
//!
//! Does not interpret the bytes. A mapped file must not be cut while it is in use: the system would end the process.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Advice, Mmap};

use crate::error::ModelError;

/// Shared, immutable bytes with the name of the file they came from.
#[derive(Clone)]
pub struct Source {
    name: Arc<str>,
    bytes: Arc<Bytes>,
}

enum Bytes {
    Mapped(Mmap),
    Owned(Box<[u8]>),
}

impl Source {
    /// Maps the file at `path`. Refuses folders and empty files by name.
    pub fn open(path: &Path) -> Result<Source, ModelError> {
        // Asked before opening: opening a pipe would wait for somebody to write.
        let meta = path.metadata().map_err(|e| ModelError::io(path, e))?;
        let name = path.display().to_string();
        if !meta.is_file() {
            return Err(ModelError::bad(name, "file", "not a regular file", "a regular file"));
        }
        if meta.len() == 0 {
            return Err(ModelError::bad(name, "file length", "0 bytes", "a complete file"));
        }
        let file = File::open(path).map_err(|e| ModelError::io(path, e))?;
        // SAFETY: the mapping is read-only and private to this value. Another process changing the file could change the
        // bytes under us; every header value is copied out and checked once, and weights are plain numbers of any bits.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e))?;
        Ok(Source { name: name.into(), bytes: Arc::new(Bytes::Mapped(map)) })
    }

    /// Wraps bytes made in memory; `name` stands for the file name in errors.
    pub fn owned(name: &str, bytes: Vec<u8>) -> Source {
        Source { name: name.into(), bytes: Arc::new(Bytes::Owned(bytes.into_boxed_slice())) }
    }

    /// The file's name, for errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Asks the system to read the whole file ahead. A hint: failure changes only speed.
    pub fn read_ahead(&self) {
        if let Bytes::Mapped(map) = &*self.bytes
            && let Err(e) = map.advise(Advice::WillNeed)
        {
            tracing::debug!(file = %self.name, error = %e, "read-ahead was not accepted");
        }
    }
}

impl Deref for Source {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Source({}, {} bytes)", self.name, self.len())
    }
}
