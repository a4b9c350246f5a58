//! The paged KV cache: page ownership, page tables, storage and the prefix cache.
//!
//! Knows no request, no scheduler and no model: who holds a page, what lies in it, and that the books balance.

#![forbid(unsafe_code)]

pub mod books;
pub mod layer_set;
pub mod memory;
pub mod near;
pub mod page_table;
pub mod pool;
pub mod quant;
pub mod radix;
pub mod storage;
pub mod tier;

pub use books::CacheBooks;
pub use layer_set::LayerSet;
pub use near::NearTokens;
pub use page_table::{OutOfPages, PageCopy, PageTable};
pub use pool::{Imbalance, NO_PAGE, PageHandle, PagePool};
pub use radix::{EvictionPolicy, Hit, PartialPage, PrefixCache, WindowHit};
pub use storage::{Group, KvStorage, LayerShape, bytes_per_page};
