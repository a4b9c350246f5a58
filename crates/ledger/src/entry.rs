//! Additive books: bytes and FLOPs of one operation, and of the attention of one sequence.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::Serialize;

/// What one operation computes and moves. Entries of parts add up to the entry of the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: u64,
    /// Bytes read from device memory (on a CPU: from main memory, caches not deducted).
    pub device_read_bytes: u64,
    /// Bytes written to device memory.
    pub device_write_bytes: u64,
    /// Bytes sent over a link between devices.
    pub link_bytes: u64,
}

/// What attention did, or should do, for one sequence over one or more calls and layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AttnBooks {
    /// Visible (query, key) pairs, summed over query heads.
    pub pairs: u64,
    /// 2 · pairs · (head_dim_qk + head_dim_v): QKᵀ and P·V, forward.
    pub flops: u64,
    /// Key and value bytes loaded from the cache, once per query tile and kv head.
    pub kv_read_bytes: u64,
    /// Key and value bytes appended to the cache.
    pub kv_write_bytes: u64,
}

/// What the backward pass of attention did, or should do, for one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BackwardBooks {
    /// Visible (query, key) pairs, summed over query heads.
    pub pairs: u64,
    /// 2 · pairs · (3 · head_dim_qk + 2 · head_dim_v): scores and their gradients, dV, dK and dQ. With equal widths 2.5 × forward.
    pub flops: u64,
    /// Key and value bytes loaded, once per key tile and kv head.
    pub kv_read_bytes: u64,
    /// Query and output-gradient bytes loaded, once per pair of a query tile and a key tile that see each other.
    pub q_read_bytes: u64,
}

macro_rules! additive {
    ($type:ident, $($field:ident),+) => {
        impl Add for $type {
            type Output = $type;
            fn add(self, other: $type) -> $type {
                $type { $($field: self.$field + other.$field),+ }
            }
        }
        impl AddAssign for $type {
            fn add_assign(&mut self, other: $type) {
                *self = *self + other;
            }
        }
        impl Sum for $type {
            fn sum<I: Iterator<Item = $type>>(iter: I) -> $type {
                iter.fold($type::default(), Add::add)
            }
        }
    };
}

additive!(Entry, flops, device_read_bytes, device_write_bytes, link_bytes);
additive!(AttnBooks, pairs, flops, kv_read_bytes, kv_write_bytes);
additive!(BackwardBooks, pairs, flops, kv_read_bytes, q_read_bytes);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_parts_add_up() {
        let a = Entry { flops: 1, device_read_bytes: 2, device_write_bytes: 3, link_bytes: 4 };
        let total: Entry = [a, a, a].into_iter().sum();
        assert_eq!(total, Entry { flops: 3, device_read_bytes: 6, device_write_bytes: 9, link_bytes: 12 });
    }
}
