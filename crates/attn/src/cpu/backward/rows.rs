//! Rows on their way in and out: widened copies of q, d_out and K, sums of dq, and the last rounding of every gradient.

use half::{bf16, f16};

use super::task::{Call, Place, Scratch, Sink, Visit};
use crate::cpu::element::Elem;
use crate::cpu::task::{Dst, Src};
use crate::cpu::vector::{MAX_LANES, Vector};

/// Rows asked for before they are copied: a few hundred cycles' worth.
const ROWS_AHEAD: usize = 12;

/// Asks for the cache lines of a row.
#[inline(always)]
unsafe fn ask<V: Vector, E: Elem>(row: *const E, d: usize) {
    let line = 64 / size_of::<E>();
    for at in (0..d).step_by(line) {
        // SAFETY: a prefetch never faults.
        unsafe { V::prefetch_near(row.add(at).cast()) };
    }
}

/// Copies the rows at `offsets`, `d` wide, to rows of `dst` that are `stride` floats apart, zeros up to a whole vector.
/// Returns true when every element is finite.
///
/// # Safety
/// As `Vector`; offsets are checked rows; `dst` has room for as many rows of whole vectors.
#[inline(always)]
pub(crate) unsafe fn copy_rows<V: Vector>(
    src: Src,
    offsets: &[usize],
    d: usize,
    dst: *mut f32,
    stride: usize,
) -> bool {
    // SAFETY: forwarded.
    unsafe {
        match src {
            Src::F32(p) => copy::<V, f32>(p, offsets, d, dst, stride),
            Src::Bf16(p) => copy::<V, bf16>(p, offsets, d, dst, stride),
            Src::F16(p) => copy::<V, f16>(p, offsets, d, dst, stride),
            _ => unreachable!("the plan refuses other types"),
        }
    }
}

#[inline(always)]
unsafe fn copy<V: Vector, E: Elem>(
    src: *const E,
    offsets: &[usize],
    d: usize,
    dst: *mut f32,
    stride: usize,
) -> bool {
    // SAFETY: forwarded.
    unsafe {
        let zero = V::splat(0.0);
        let mut taint = [zero; 2];
        for (i, &offset) in offsets.iter().enumerate() {
            let (from, to) = (src.add(offset), dst.add(i * stride));
            if let Some(&next) = offsets.get(i + ROWS_AHEAD) {
                ask::<V, E>(src.add(next), d);
            }
            let mut x = 0;
            while x + 2 * V::LANES <= d {
                for (j, taint) in taint.iter_mut().enumerate() {
                    let y: V = E::load(from.add(x + j * V::LANES));
                    // y * 0 is 0 for finite y and NaN otherwise.
                    *taint = y.fma(zero, *taint);
                    y.store(to.add(x + j * V::LANES));
                }
                x += 2 * V::LANES;
            }
            if x + V::LANES <= d {
                let y: V = E::load(from.add(x));
                taint[1] = y.fma(zero, taint[1]);
                y.store(to.add(x));
                x += V::LANES;
            }
            if x < d {
                let y: V = E::load_partial(from.add(x), d - x);
                taint[0] = y.fma(zero, taint[0]);
                y.store(to.add(x));
            }
        }
        taint[0].add(taint[1]).reduce_add() == 0.0
    }
}

/// The dot products of `LANES` pairs of stored rows, one a lane, each summed from its first element to its last: the order in which the
/// tile products sum d_out·v. Where a row sees one key, out is that value and delta cancels d_out·v to exactly 0.
///
/// # Safety
/// As `Vector`; `d` elements at each of the places.
#[inline(always)]
pub(crate) unsafe fn dots<V: Vector, E: Elem>(
    a: (*const E, &[usize; MAX_LANES]),
    b: (*const E, &[usize; MAX_LANES]),
    d: usize,
) -> V {
    // SAFETY: forwarded.
    unsafe {
        let mut sum = V::splat(0.0);
        let mut x = 0;
        while x < d {
            let a = columns::<V, E>(a, x, d);
            let b = columns::<V, E>(b, x, d);
            for i in 0..V::LANES {
                sum = b[i].fma(a[i], sum);
            }
            x += V::LANES;
        }
        sum
    }
}

/// Columns `x .. x + LANES` of the rows, a vector each; zeros from `d` on. No closure: it would not carry the instruction set.
#[inline(always)]
unsafe fn columns<V: Vector, E: Elem>(
    (rows, places): (*const E, &[usize; MAX_LANES]),
    x: usize,
    d: usize,
) -> [V; MAX_LANES] {
    // SAFETY: forwarded.
    unsafe {
        let mut block = [V::splat(0.0); MAX_LANES];
        for i in 0..V::LANES {
            let p = rows.add(places[i] + x);
            block[i] = if x + V::LANES <= d { E::load(p) } else { E::load_partial(p, d - x) };
        }
        V::transpose(&mut block);
        block
    }
}

/// Rounds to the nearest bf16, ties to even; NaN stays NaN. Without branches, so that a loop of it becomes vectors.
#[inline(always)]
fn round(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    bf16::from_bits(if x.is_nan() { (bits >> 16 | 0x40) as u16 } else { nearest as u16 })
}

/// Writes `count` rows of `d` floats from `src` (rows `stride` apart) to the rows that `place` names.
///
/// # Safety
/// Checked rows that nobody else touches.
#[inline(always)]
pub(crate) unsafe fn write_rows<V: Vector>(
    sink: &Sink,
    count: usize,
    place: impl Fn(usize) -> usize,
    d: usize,
    src: *const f32,
    stride: usize,
) {
    for row in 0..count {
        // SAFETY: forwarded.
        unsafe { write_row::<V>(sink.dst, place(row), src.add(row * stride), d) }
    }
}

#[inline(always)]
unsafe fn write_row<V: Vector>(dst: Dst, at: usize, src: *const f32, d: usize) {
    // SAFETY: forwarded.
    unsafe {
        match dst {
            Dst::F32(p) => copy_row::<V>(src, p.add(at), d),
            Dst::Bf16(p) => {
                for i in 0..d {
                    *p.add(at + i) = round(*src.add(i));
                }
            }
            Dst::F16(p) => {
                for i in 0..d {
                    *p.add(at + i) = f16::from_f32(*src.add(i));
                }
            }
        }
    }
}

/// Adds the visit's part of dq (in scratch) to the sums; the first part starts them and the last one rounds them into dq.
///
/// # Safety
/// As `Vector`; it is the caller's turn to touch these rows.
#[inline(always)]
pub(crate) unsafe fn add_rows<V: Vector>(c: &Call<'_>, w: &Scratch<'_>, visit: &Visit) {
    let d = c.heads.head_dim_qk;
    for row in 0..visit.rows.count {
        let (token, head) = visit.rows.token_and_head(row);
        let at = c.dq.at(token, head);
        // SAFETY: a checked row of dq, or a row of the sums, which hold every row.
        unsafe {
            let part = w.dq.add(row * w.qk_stride);
            let sum = match c.dq.dst {
                Dst::F32(p) => p.add(at),
                Dst::Bf16(_) | Dst::F16(_) => c.sums.add((visit.rows.first + row) * c.sums_width),
            };
            if visit.rank > 0 {
                add_row::<V>(part, sum, d);
            }
            if visit.last {
                write_row::<V>(c.dq.dst, at, part, d);
            } else {
                copy_row::<V>(part, sum, d);
            }
        }
    }
}

/// Copies `d` floats.
#[inline(always)]
unsafe fn copy_row<V: Vector>(src: *const f32, dst: *mut f32, d: usize) {
    // SAFETY: forwarded.
    unsafe {
        let mut x = 0;
        while x + V::LANES <= d {
            V::load(src.add(x)).store(dst.add(x));
            x += V::LANES;
        }
        for x in x..d {
            *dst.add(x) = *src.add(x);
        }
    }
}

/// part += sum.
#[inline(always)]
unsafe fn add_row<V: Vector>(part: *mut f32, sum: *const f32, d: usize) {
    // SAFETY: forwarded; rows of scratch hold whole vectors.
    unsafe {
        let mut x = 0;
        while x + V::LANES <= d {
            V::load(sum.add(x)).add(V::load(part.add(x))).store(part.add(x));
            x += V::LANES;
        }
        if x < d {
            V::load_partial(sum.add(x), d - x).add(V::load(part.add(x))).store(part.add(x));
        }
    }
}
