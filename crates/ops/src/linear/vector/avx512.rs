//! AVX-512 with VNNI: 16 lanes, `vpdpbusd`.

use std::arch::x86_64::*;

use super::{Vector, entries};
use crate::linear::panel::Rows;

/// 16 lanes of 32 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512;

// SAFETY (all methods): the trait's promise, the machine has AVX-512 F, BW, DQ, VL and VNNI and pointers are valid; unaligned
// accesses only.
#[allow(clippy::undocumented_unsafe_blocks)] // one reason for all, above
impl Vector for Avx512 {
    type Int = __m512i;
    type Float = __m512;
    const LANES: usize = 16;
    const FUSED: bool = true;
    const WIDE_IS_SIGNED: bool = false;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, v: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn load_f(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(v) }
    }
    #[inline(always)]
    unsafe fn splat_f(v: f32) -> __m512 {
        unsafe { _mm512_set1_ps(v) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn as_int(v: __m512) -> __m512i {
        unsafe { _mm512_castps_si512(v) }
    }
    #[inline(always)]
    unsafe fn add_int(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn shr<const S: u32>(v: __m512i) -> __m512i {
        unsafe { _mm512_srli_epi32::<S>(v) }
    }
    #[inline(always)]
    unsafe fn shl<const S: u32>(v: __m512i) -> __m512i {
        unsafe { _mm512_slli_epi32::<S>(v) }
    }
    #[inline(always)]
    unsafe fn sar<const S: u32>(v: __m512i) -> __m512i {
        unsafe { _mm512_srai_epi32::<S>(v) }
    }
    #[inline(always)]
    unsafe fn to_float(v: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn as_float(v: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(v) }
    }
    #[inline(always)]
    unsafe fn half_to_float(v: __m512i) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn dot(acc: __m512i, u: __m512i, s: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, u, s) }
    }
    #[inline(always)]
    unsafe fn dot_wide(acc: __m512i, u: __m512i, s: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, u, s) }
    }
    #[inline(always)]
    unsafe fn max_u32(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_max_epu32(a, b) }
    }
    #[inline(always)]
    unsafe fn reduce_max_u32(v: __m512i) -> u32 {
        unsafe { _mm512_reduce_max_epu32(v) }
    }
    #[inline(always)]
    unsafe fn reduce_add(v: __m512i) -> i32 {
        unsafe { _mm512_reduce_add_epi32(v) }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut i8, v: __m512i) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)) }
    }
    #[inline(always)]
    unsafe fn gather(rows: &Rows, _first: usize, offset: usize) -> __m512i {
        unsafe {
            // Four chains of inserts: the gather instruction takes twice as long where it is microcode.
            let four = |g: usize| {
                let group = rows.at(4 * g, offset);
                let at = |i: usize| group.wrapping_add(i * rows.pitch).cast::<i32>().read_unaligned();
                let v = _mm_cvtsi32_si128(at(0));
                let v = _mm_insert_epi32::<1>(v, at(1));
                let v = _mm_insert_epi32::<2>(v, at(2));
                _mm_insert_epi32::<3>(v, at(3))
            };
            let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(four(0)), four(1));
            let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(four(2)), four(3));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }
    #[inline(always)]
    unsafe fn gather4(rows: &Rows, _first: usize, offset: usize) -> [__m512i; 4] {
        unsafe {
            // Lane group g of vector i takes 16 bytes of row 4g + i: the 4×4 transposes below then leave rows in lane order. Four
            // pointers with two strides address them all.
            let groups: [*const u8; 4] = std::array::from_fn(|g| rows.at(4 * g, offset));
            let quarter = |i: usize| {
                let at = |g: usize| _mm_loadu_si128(groups[g].wrapping_add(i * rows.pitch).cast());
                let v = _mm512_castsi128_si512(at(0));
                let v = _mm512_mask_broadcast_i32x4(v, 0x00f0, at(1));
                let v = _mm512_mask_broadcast_i32x4(v, 0x0f00, at(2));
                _mm512_mask_broadcast_i32x4(v, 0xf000, at(3))
            };
            let (a, b, c, d) = (quarter(0), quarter(1), quarter(2), quarter(3));
            let (ab0, ab1) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd0, cd1) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab0, cd0),
                _mm512_unpackhi_epi64(ab0, cd0),
                _mm512_unpacklo_epi64(ab1, cd1),
                _mm512_unpackhi_epi64(ab1, cd1),
            ]
        }
    }
}

entries!(Avx512, [#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]],
    panels: 3, int_rows: 4, float_rows: 8);
