//! AArch64 NEON with the dot-product extension: 4 lanes, `sdot`.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Vector, entries};
use crate::linear::panel::Rows;

/// 4 lanes of 32 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon;

/// `acc + Σ a·b` over four signed bytes a lane.
///
/// # Safety
/// The machine has the dot-product extension.
#[inline(always)]
unsafe fn sdot(acc: uint32x4_t, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
    let mut acc = acc;
    // SAFETY: pure register arithmetic; the intrinsic of this instruction is not stable yet.
    unsafe {
        asm!(".arch_extension dotprod", "sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b",
            acc = inout(vreg) acc, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

// SAFETY (all methods): the trait's promise, the machine has NEON with dot products and pointers are valid; unaligned accesses only.
#[allow(clippy::undocumented_unsafe_blocks)] // one reason for all, above
impl Vector for Neon {
    type Int = uint32x4_t;
    type Float = float32x4_t;
    const LANES: usize = 4;
    const FUSED: bool = true;
    const WIDE_IS_SIGNED: bool = true;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> uint32x4_t {
        unsafe { vreinterpretq_u32_u8(vld1q_u8(p)) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, v: uint32x4_t) {
        unsafe { vst1q_u8(p, vreinterpretq_u8_u32(v)) }
    }
    #[inline(always)]
    unsafe fn load_f(p: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, v: float32x4_t) {
        unsafe { vst1q_f32(p, v) }
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> uint32x4_t {
        unsafe { vdupq_n_u32(v.cast_unsigned()) }
    }
    #[inline(always)]
    unsafe fn splat_f(v: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(v) }
    }
    #[inline(always)]
    unsafe fn and(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        unsafe { vandq_u32(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        unsafe { vorrq_u32(a, b) }
    }
    #[inline(always)]
    unsafe fn xor(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        unsafe { veorq_u32(a, b) }
    }
    #[inline(always)]
    unsafe fn as_int(v: float32x4_t) -> uint32x4_t {
        unsafe { vreinterpretq_u32_f32(v) }
    }
    #[inline(always)]
    unsafe fn add_int(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        unsafe { vaddq_u32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        unsafe { vsubq_u32(a, b) }
    }
    #[inline(always)]
    unsafe fn shr<const S: u32>(v: uint32x4_t) -> uint32x4_t {
        unsafe { vshlq_u32(v, vdupq_n_s32(-S.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn shl<const S: u32>(v: uint32x4_t) -> uint32x4_t {
        unsafe { vshlq_u32(v, vdupq_n_s32(S.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn sar<const S: u32>(v: uint32x4_t) -> uint32x4_t {
        unsafe { vreinterpretq_u32_s32(vshlq_s32(vreinterpretq_s32_u32(v), vdupq_n_s32(-S.cast_signed()))) }
    }
    #[inline(always)]
    unsafe fn to_float(v: uint32x4_t) -> float32x4_t {
        unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(v)) }
    }
    #[inline(always)]
    unsafe fn as_float(v: uint32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(v) }
    }
    #[inline(always)]
    unsafe fn half_to_float(v: uint32x4_t) -> float32x4_t {
        unsafe {
            // Exponent and mantissa moved into place and scaled by 2^112 (the difference of the biases); an all-ones exponent is
            // infinity or NaN and keeps its mantissa.
            let bits = vandq_u32(v, vdupq_n_u32(0x7fff));
            let sign = vshlq_n_u32::<16>(vandq_u32(v, vdupq_n_u32(0x8000)));
            let moved = vshlq_n_u32::<13>(bits);
            let scaled =
                vmulq_f32(vreinterpretq_f32_u32(moved), vdupq_n_f32(f32::from_bits((127 + 112) << 23)));
            let special = vorrq_u32(moved, vdupq_n_u32(0x7f80_0000));
            let is_special = vcgeq_u32(bits, vdupq_n_u32(0x7c00));
            let magnitude = vbslq_u32(is_special, special, vreinterpretq_u32_f32(scaled));
            vreinterpretq_f32_u32(vorrq_u32(magnitude, sign))
        }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn dot(acc: uint32x4_t, u: uint32x4_t, s: uint32x4_t) -> uint32x4_t {
        unsafe { sdot(acc, u, s) } // u ≤ 127 reads the same signed
    }
    #[inline(always)]
    unsafe fn dot_wide(acc: uint32x4_t, u: uint32x4_t, s: uint32x4_t) -> uint32x4_t {
        unsafe { sdot(acc, veorq_u32(u, vdupq_n_u32(0x8080_8080)), s) }
    }
    #[inline(always)]
    unsafe fn max_u32(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        unsafe { vmaxq_u32(a, b) }
    }
    #[inline(always)]
    unsafe fn reduce_max_u32(v: uint32x4_t) -> u32 {
        unsafe { vmaxvq_u32(v) }
    }
    #[inline(always)]
    unsafe fn reduce_add(v: uint32x4_t) -> i32 {
        unsafe { vaddvq_u32(v).cast_signed() }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut i8, v: uint32x4_t) {
        unsafe {
            let words = vmovn_u32(v);
            let bytes = vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words)));
            p.cast::<u32>().write_unaligned(vget_lane_u32::<0>(bytes));
        }
    }
    #[inline(always)]
    unsafe fn gather(rows: &Rows, first: usize, offset: usize) -> uint32x4_t {
        unsafe {
            let at = |i: usize| rows.at(first + i, offset).cast::<u32>().read_unaligned();
            let words = [at(0), at(1), at(2), at(3)];
            vld1q_u32(words.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn gather4(rows: &Rows, first: usize, offset: usize) -> [uint32x4_t; 4] {
        unsafe {
            let row = |i: usize| vreinterpretq_u32_u8(vld1q_u8(rows.at(first + i, offset)));
            let (a, b, c, d) = (row(0), row(1), row(2), row(3));
            let (ab0, ab1) = (vzip1q_u32(a, b), vzip2q_u32(a, b));
            let (cd0, cd1) = (vzip1q_u32(c, d), vzip2q_u32(c, d));
            let low =
                |x, y| vreinterpretq_u32_u64(vzip1q_u64(vreinterpretq_u64_u32(x), vreinterpretq_u64_u32(y)));
            let high =
                |x, y| vreinterpretq_u32_u64(vzip2q_u64(vreinterpretq_u64_u32(x), vreinterpretq_u64_u32(y)));
            [low(ab0, cd0), high(ab0, cd0), low(ab1, cd1), high(ab1, cd1)]
        }
    }
}

entries!(Neon, [], panels: 1, int_rows: 2, float_rows: 4);
