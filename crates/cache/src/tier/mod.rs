//! Pages below the pool: kept on disk by content, found again by digest, believed only after every check.
//!
//! Knows no scheduler and no pool. A page is named by a 256-bit digest of its layout, its namespace and every token up to its end, so
//! that equal prefixes of any process find each other. What comes back is checked whole (`object`) before a byte of it is used: damage,
//! another layout, another page under the same name are all a miss, and a miss means recompute.

mod choice;
mod disk;
mod memory;
mod object;
mod worker;

pub use choice::{Choice, Pace};
pub use disk::{DiskStore, folder_secret};
pub use memory::MemoryStore;
pub use object::{ObjectFault, PageName, decode, encode};
pub use worker::{Fetch, Fetched, Tier, TierBooks, TierOptions};

/// The hash behind every digest here.
pub use blake3::Hasher;

use std::io;

/// A page's name: every token up to its end, its namespace and its layout, digested (BLAKE3).
pub type Digest = [u8; 32];

/// Where objects lie. Implementations are plain storage: they check nothing, and tests bring slow, full and lying ones.
pub trait Store: Send + Sync {
    /// The bytes stored under `name`; `NotFound` where there are none.
    fn read(&self, name: &Digest) -> io::Result<Vec<u8>>;
    /// Stores an object whole or not at all.
    fn write(&self, name: &Digest, object: &[u8]) -> io::Result<()>;
    /// Removes an object; one that is not there is no error.
    fn remove(&self, name: &Digest) -> io::Result<()>;
    /// Names and sizes of all objects, least recently used first.
    fn list(&self) -> io::Result<Vec<(Digest, u64)>>;
    /// As `read`, past whatever is nearer than the rest.
    fn read_far(&self, name: &Digest) -> io::Result<Vec<u8>> {
        self.read(name)
    }
    /// Whether an object lies nearer than the rest, in memory: such are measured apart.
    fn is_near(&self, _name: &Digest) -> bool {
        false
    }
}

/// What makes pages of one process readable by another: the same model, element types and page layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Digest of everything that decides what the bytes of a page mean.
    pub id: Digest,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Tokens of a page.
    pub page_size: usize,
}

impl Layout {
    /// `model` names weights and rope; `layers` is the storage's own description of what a page holds.
    pub fn new(
        model: &Digest,
        layers: &[crate::LayerShape],
        page_size: usize,
    ) -> Result<Layout, suanpan_base::BadArgument> {
        let page_bytes = crate::bytes_per_page(layers, page_size)?;
        let mut hash = blake3::Hasher::new_derive_key("suanpan page layout 1");
        hash.update(model);
        hash.update(format!("{page_size} {page_bytes} {layers:?}").as_bytes());
        Ok(Layout { id: *hash.finalize().as_bytes(), page_bytes, page_size })
    }

    /// Names of the whole pages of `tokens`, in order.
    pub fn names(&self, namespace: u64, tokens: &[u32]) -> Vec<PageName> {
        let mut root = blake3::Hasher::new_derive_key("suanpan page prefix 1");
        root.update(&self.id);
        root.update(&namespace.to_le_bytes());
        let mut parent: Digest = *root.finalize().as_bytes();
        tokens
            .chunks_exact(self.page_size)
            .map(|page| {
                let mut hash = blake3::Hasher::new();
                hash.update(&parent);
                for token in page {
                    hash.update(&token.to_le_bytes());
                }
                let digest = *hash.finalize().as_bytes();
                let name = PageName { digest, parent, tokens: page.to_vec() };
                parent = digest;
                name
            })
            .collect()
    }
}
