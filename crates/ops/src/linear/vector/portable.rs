//! Plain Rust: 16 lanes in arrays, for machines without a kernel of their own and as the yardstick of the others.

use super::{Vector, entries};
use crate::linear::panel::Rows;

/// 16 lanes of 32 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

#[inline(always)]
fn each<T: Copy, U: Copy>(a: [T; 16], f: impl Fn(T) -> U) -> [U; 16] {
    a.map(f)
}

#[inline(always)]
fn both<T: Copy, U: Copy>(a: [T; 16], b: [T; 16], f: impl Fn(T, T) -> U) -> [U; 16] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

// SAFETY (all methods): the trait's promise, pointers are valid; unaligned accesses only.
#[allow(clippy::undocumented_unsafe_blocks)] // one reason for all, above
impl Vector for Portable {
    type Int = [u32; 16];
    type Float = [f32; 16];
    const LANES: usize = 16;
    const FUSED: bool = false;
    const WIDE_IS_SIGNED: bool = false;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> [u32; 16] {
        unsafe { p.cast::<[u32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, v: [u32; 16]) {
        unsafe { p.cast::<[u32; 16]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f(p: *const f32) -> [f32; 16] {
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, v: [f32; 16]) {
        unsafe { p.cast::<[f32; 16]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> [u32; 16] {
        [v.cast_unsigned(); 16]
    }
    #[inline(always)]
    unsafe fn splat_f(v: f32) -> [f32; 16] {
        [v; 16]
    }
    #[inline(always)]
    unsafe fn and(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        both(a, b, |a, b| a & b)
    }
    #[inline(always)]
    unsafe fn or(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        both(a, b, |a, b| a | b)
    }
    #[inline(always)]
    unsafe fn xor(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        both(a, b, |a, b| a ^ b)
    }
    #[inline(always)]
    unsafe fn as_int(v: [f32; 16]) -> [u32; 16] {
        each(v, f32::to_bits)
    }
    #[inline(always)]
    unsafe fn add_int(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        both(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn sub(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        both(a, b, u32::wrapping_sub)
    }
    #[inline(always)]
    unsafe fn shr<const S: u32>(v: [u32; 16]) -> [u32; 16] {
        each(v, |v| v >> S)
    }
    #[inline(always)]
    unsafe fn shl<const S: u32>(v: [u32; 16]) -> [u32; 16] {
        each(v, |v| v << S)
    }
    #[inline(always)]
    unsafe fn sar<const S: u32>(v: [u32; 16]) -> [u32; 16] {
        each(v, |v| (v.cast_signed() >> S).cast_unsigned())
    }
    #[inline(always)]
    unsafe fn to_float(v: [u32; 16]) -> [f32; 16] {
        each(v, |v| v.cast_signed() as f32)
    }
    #[inline(always)]
    unsafe fn as_float(v: [u32; 16]) -> [f32; 16] {
        each(v, f32::from_bits)
    }
    #[inline(always)]
    unsafe fn half_to_float(v: [u32; 16]) -> [f32; 16] {
        each(v, |v| half::f16::from_bits(v as u16).to_f32())
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        both(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        both(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn mul_add(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i] + c[i]) // a fused one would be a library call a lane
    }
    #[inline(always)]
    unsafe fn dot(acc: [u32; 16], u: [u32; 16], s: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|i| {
            let (u, s) = (u[i].to_le_bytes(), s[i].to_le_bytes());
            let sum: i32 = (0..4).map(|j| i32::from(u[j]) * i32::from(s[j].cast_signed())).sum();
            acc[i].wrapping_add(sum.cast_unsigned())
        })
    }
    #[inline(always)]
    unsafe fn dot_wide(acc: [u32; 16], u: [u32; 16], s: [u32; 16]) -> [u32; 16] {
        unsafe { Self::dot(acc, u, s) }
    }
    #[inline(always)]
    unsafe fn max_u32(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        both(a, b, u32::max)
    }
    #[inline(always)]
    unsafe fn reduce_max_u32(v: [u32; 16]) -> u32 {
        v.into_iter().fold(0, u32::max)
    }
    #[inline(always)]
    unsafe fn reduce_add(v: [u32; 16]) -> i32 {
        v.into_iter().fold(0, u32::wrapping_add).cast_signed()
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut i8, v: [u32; 16]) {
        unsafe { p.cast::<[i8; 16]>().write_unaligned(each(v, |v| v as i8)) }
    }
    #[inline(always)]
    unsafe fn gather(rows: &Rows, _first: usize, offset: usize) -> [u32; 16] {
        std::array::from_fn(|i| unsafe { rows.at(i, offset).cast::<u32>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn gather4(rows: &Rows, first: usize, offset: usize) -> [[u32; 16]; 4] {
        std::array::from_fn(|j| unsafe { Self::gather(rows, first, offset + 4 * j) })
    }
}

entries!(Portable, [], panels: 1, int_rows: 2, float_rows: 2);
