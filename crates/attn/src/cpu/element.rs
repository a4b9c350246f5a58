//! Stored element types of K and V, and how each becomes a vector of f32.

use half::{bf16, f16};
use suanpan_base::codes;

use super::vector::{MAX_LANES, Vector};

/// An FP8 E4M3 code.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct E4m3(u8);

/// An FP8 E5M2 code.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct E5m2(u8);

/// Two 4-bit integers: the even element in the low half.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Int4Pair(u8);

/// Widening of codes, by each instruction set in its own way. The bodies here are plain Rust.
///
/// # Safety
/// As [`Vector`]; the pointer is good for `LANES` elements.
pub(crate) unsafe trait Widen: Sized {
    /// `LANES` binary16.
    #[inline(always)]
    unsafe fn f16s(p: *const f16) -> Self
    where
        Self: Vector,
    {
        let mut x = [0.0; MAX_LANES];
        for i in 0..Self::LANES {
            // SAFETY: by contract.
            x[i] = f16_to_f32(unsafe { *p.add(i) }.to_bits());
        }
        // SAFETY: forwarded.
        unsafe { Self::load(x.as_ptr()) }
    }
    /// `LANES` E4M3 codes.
    #[inline(always)]
    unsafe fn e4m3s(p: *const u8) -> Self
    where
        Self: Vector,
    {
        let mut x = [0.0; MAX_LANES];
        for i in 0..Self::LANES {
            // SAFETY: by contract.
            x[i] = codes::e4m3_to_f32(unsafe { *p.add(i) });
        }
        // SAFETY: forwarded.
        unsafe { Self::load(x.as_ptr()) }
    }
    /// `LANES` E5M2 codes.
    #[inline(always)]
    unsafe fn e5m2s(p: *const u8) -> Self
    where
        Self: Vector,
    {
        let mut x = [0.0; MAX_LANES];
        for i in 0..Self::LANES {
            // SAFETY: by contract. E5M2 is the upper half of binary16.
            x[i] = f16_to_f32(u16::from(unsafe { *p.add(i) }) << 8);
        }
        // SAFETY: forwarded.
        unsafe { Self::load(x.as_ptr()) }
    }
    /// `LANES` 8-bit integers.
    #[inline(always)]
    unsafe fn int8s(p: *const i8) -> Self
    where
        Self: Vector,
    {
        let mut x = [0.0; MAX_LANES];
        for i in 0..Self::LANES {
            // SAFETY: by contract.
            x[i] = f32::from(unsafe { *p.add(i) });
        }
        // SAFETY: forwarded.
        unsafe { Self::load(x.as_ptr()) }
    }
    /// `LANES` 4-bit integers of `LANES / 2` bytes.
    #[inline(always)]
    unsafe fn int4s(p: *const u8) -> Self
    where
        Self: Vector,
    {
        let mut x = [0.0; MAX_LANES];
        for i in 0..Self::LANES / 2 {
            // SAFETY: by contract.
            let pair = unsafe { *p.add(i) } as i8;
            (x[2 * i], x[2 * i + 1]) = (f32::from((pair << 4) >> 4), f32::from(pair >> 4));
        }
        // SAFETY: forwarded.
        unsafe { Self::load(x.as_ptr()) }
    }
}

/// binary16 without branches: exponents move by a product, infinities and NaN by filling their exponent.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let size = u32::from(bits & 0x7fff) << 13;
    // 2^112: the distance of the two biases.
    let x = (f32::from_bits(size) * f32::from_bits((127 + 112) << 23)).to_bits();
    let top = if size >= 0x0f80_0000 { 0x7f80_0000 } else { 0 };
    f32::from_bits(x | top | u32::from(bits & 0x8000) << 16)
}

/// A stored element type of K and V.
///
/// # Safety
/// As [`Vector`].
pub(crate) unsafe trait Elem: Copy + Default {
    /// The place `n` elements on.
    ///
    /// # Safety
    /// As `<*const Self>::add`; `n` is even where two elements share a byte.
    #[inline(always)]
    unsafe fn at(p: *const Self, n: usize) -> *const Self {
        // SAFETY: forwarded.
        unsafe { p.add(n) }
    }
    /// `LANES` elements.
    unsafe fn load<V: Vector>(p: *const Self) -> V;
    /// The first `n < LANES` elements, zeros after.
    #[inline(always)]
    unsafe fn load_partial<V: Vector>(p: *const Self, n: usize) -> V {
        let mut buf = [Self::default(); MAX_LANES];
        // SAFETY: n < LANES elements are readable by contract.
        unsafe {
            std::ptr::copy_nonoverlapping(p, buf.as_mut_ptr(), Self::units(n));
            Self::load(buf.as_ptr())
        }
    }
    /// Places of memory that `n` elements take.
    #[inline(always)]
    fn units(n: usize) -> usize {
        n
    }
}

/// An element type that the direct kernel multiplies where it lies.
///
/// # Safety
/// As [`Vector`].
pub(crate) unsafe trait InPlace: Elem {
    /// `load_pair` gives even and odd elements instead of the lower and upper half.
    const INTERLEAVED: bool;
    /// Elements that lie side by side in a lane's four bytes.
    const PER_LANE: usize;
    /// Lanes of `PER_LANE` elements each, widened: the first of each, the second of each (where there is one).
    unsafe fn widen_lanes<V: Vector>(x: V) -> [V; 2];
    /// `2 * LANES` elements in the order of `INTERLEAVED`.
    unsafe fn load_pair<V: Vector>(p: *const Self) -> (V, V);
    /// The first `n < 2 * LANES` elements in that order, zeros after.
    #[inline(always)]
    unsafe fn load_pair_partial<V: Vector>(p: *const Self, n: usize) -> (V, V) {
        let mut buf = [Self::default(); 2 * MAX_LANES];
        // SAFETY: n < 2 * LANES elements are readable by contract.
        unsafe {
            std::ptr::copy_nonoverlapping(p, buf.as_mut_ptr(), n);
            Self::load_pair::<V>(buf.as_ptr())
        }
    }
}

// SAFETY: forwards to the vector's own loads.
unsafe impl Elem for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const f32) -> V {
        // SAFETY: forwarded.
        unsafe { V::load(p) }
    }
    #[inline(always)]
    unsafe fn load_partial<V: Vector>(p: *const f32, n: usize) -> V {
        // SAFETY: forwarded.
        unsafe { V::load_partial(p, n) }
    }
}

// SAFETY: as above.
unsafe impl InPlace for f32 {
    const INTERLEAVED: bool = false;
    const PER_LANE: usize = 1;
    #[inline(always)]
    unsafe fn widen_lanes<V: Vector>(x: V) -> [V; 2] {
        [x, x]
    }
    #[inline(always)]
    unsafe fn load_pair<V: Vector>(p: *const f32) -> (V, V) {
        // SAFETY: forwarded.
        unsafe { (V::load(p), V::load(p.add(V::LANES))) }
    }
}

// SAFETY: forwards to the vector's own loads.
unsafe impl Elem for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const bf16) -> V {
        // SAFETY: forwarded.
        unsafe { V::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn load_partial<V: Vector>(p: *const bf16, n: usize) -> V {
        // SAFETY: forwarded.
        unsafe { V::load_bf16_partial(p, n) }
    }
}

// SAFETY: as above.
unsafe impl InPlace for bf16 {
    const INTERLEAVED: bool = true;
    const PER_LANE: usize = 2;
    #[inline(always)]
    unsafe fn widen_lanes<V: Vector>(x: V) -> [V; 2] {
        // SAFETY: forwarded.
        let (first, second) = unsafe { x.bf16_halves() };
        [first, second]
    }
    #[inline(always)]
    unsafe fn load_pair<V: Vector>(p: *const bf16) -> (V, V) {
        // SAFETY: forwarded.
        unsafe { V::load_bf16_pair(p) }
    }
}

/// An element type that loads through one method of `Widen`.
macro_rules! widened {
    ($element:ty, $method:ident) => {
        // SAFETY: forwards to the vector's own loads.
        unsafe impl Elem for $element {
            #[inline(always)]
            unsafe fn load<V: Vector>(p: *const Self) -> V {
                // SAFETY: forwarded.
                unsafe { V::$method(p.cast()) }
            }
        }
    };
}

widened!(f16, f16s);
widened!(E4m3, e4m3s);
widened!(E5m2, e5m2s);
widened!(i8, int8s);

// SAFETY: forwards to the vector's own loads; two elements a place.
unsafe impl Elem for Int4Pair {
    #[inline(always)]
    unsafe fn at(p: *const Self, n: usize) -> *const Self {
        // SAFETY: forwarded.
        unsafe { p.add(n / 2) }
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Self) -> V {
        // SAFETY: forwarded.
        unsafe { V::int4s(p.cast()) }
    }
    #[inline(always)]
    fn units(n: usize) -> usize {
        n / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary16_is_exact_on_every_bit_pattern() {
        for bits in 0..=u16::MAX {
            let (ours, want) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == want.to_bits() || ours.is_nan() && want.is_nan(), "{bits:04x}");
        }
    }
}
