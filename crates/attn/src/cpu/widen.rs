//! Widening of a block's rows into the slot, for element types that the direct kernel does not multiply where they lie.

use super::element::Elem;
use super::task::{Scratch, Src, Task};
use super::vector::Vector;

/// Widens the rows of the task's kv head `head` (counted from its first one) in columns `lo .. hi` to f32, into the slot's `k` and `v`, and
/// swaps their offsets in. Columns beside them stand for the nearest key.
///
/// # Safety
/// As `Vector`; the offsets in `w` are those of the block.
#[inline(always)]
pub(crate) unsafe fn widen_block<V: Vector>(
    t: &Task<'_>,
    w: &mut Scratch<'_>,
    head: usize,
    (lo, hi): (usize, usize),
) {
    let (heads, strides) = (t.call.heads, t.head_strides());
    let (k, v) = ((head * strides.0, heads.head_dim_qk), (head * strides.1, heads.head_dim_v));
    if lo < hi {
        // SAFETY: forwarded; the slot's k and v hold a block of padded rows.
        unsafe {
            rows::<V>(t.call.k, k, &w.k_off[lo..hi], (w.k, w.q_stride), &mut w.k_wide[lo..hi]);
            rows::<V>(t.call.v, v, &w.v_off[lo..hi], (w.v, w.o_stride), &mut w.v_wide[lo..hi]);
        }
        let last = w.k_wide[hi - 1];
        w.k_wide[..lo].fill(0);
        w.k_wide[hi..].fill(last);
    }
    w.swap_wide();
}

#[inline(always)]
unsafe fn rows<V: Vector>(
    src: Src,
    (head, d): (usize, usize),
    offsets: &[usize],
    to: (*mut f32, usize),
    places: &mut [usize],
) {
    // SAFETY: forwarded.
    unsafe {
        match src {
            Src::F32(p) => rows_of::<V, f32>(p, head, d, offsets, to),
            Src::Bf16(p) => rows_of::<V, half::bf16>(p, head, d, offsets, to),
            Src::F16(p) => rows_of::<V, half::f16>(p, head, d, offsets, to),
            Src::E4m3(p) => rows_of::<V, _>(p, head, d, offsets, to),
            Src::E5m2(p) => rows_of::<V, _>(p, head, d, offsets, to),
            Src::I8(p) => rows_of::<V, i8>(p, head, d, offsets, to),
            Src::I4(p) => rows_of::<V, _>(p, head, d, offsets, to),
        }
    }
    for (i, place) in places.iter_mut().enumerate() {
        *place = i * to.1;
    }
}

#[inline(always)]
unsafe fn rows_of<V: Vector, E: Elem>(
    src: *const E,
    head: usize,
    d: usize,
    offsets: &[usize],
    (dst, stride): (*mut f32, usize),
) {
    for (i, &offset) in offsets.iter().enumerate() {
        // SAFETY: a checked row of d elements; a padded row of the slot.
        unsafe {
            let (from, to) = (E::at(src, offset + head), dst.add(i * stride));
            let mut x = 0;
            while x + V::LANES <= d {
                E::load::<V>(E::at(from, x)).store(to.add(x));
                x += V::LANES;
            }
            if x < d {
                E::load_partial::<V>(E::at(from, x), d - x).store(to.add(x));
            }
        }
    }
}
