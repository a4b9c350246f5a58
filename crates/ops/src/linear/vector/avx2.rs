//! AVX2 with FMA and F16C: 8 lanes, integer dots by `vpmaddubsw`, or by the 256-bit `vpdpbusd` where the machine has AVX-VNNI.

use std::arch::x86_64::*;

use super::{Vector, entries};
use crate::linear::panel::Rows;

/// 8 lanes of 32 bits; `VNNI` chooses the dot-product instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ymm<const VNNI: bool>;

// SAFETY (all methods): the trait's promise, the machine has AVX2, FMA and F16C (and AVX-VNNI where `VNNI`) and pointers are valid;
// unaligned accesses only.
#[allow(clippy::undocumented_unsafe_blocks)] // one reason for all, above
impl<const VNNI: bool> Vector for Ymm<VNNI> {
    type Int = __m256i;
    type Float = __m256;
    const LANES: usize = 8;
    const FUSED: bool = true;
    const WIDE_IS_SIGNED: bool = !VNNI;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, v: __m256i) {
        unsafe { _mm256_storeu_si256(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn load_f(p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, v: __m256) {
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(v) }
    }
    #[inline(always)]
    unsafe fn splat_f(v: f32) -> __m256 {
        unsafe { _mm256_set1_ps(v) }
    }
    #[inline(always)]
    unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_and_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn xor(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_xor_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn as_int(v: __m256) -> __m256i {
        unsafe { _mm256_castps_si256(v) }
    }
    #[inline(always)]
    unsafe fn add_int(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn shr<const S: u32>(v: __m256i) -> __m256i {
        unsafe { _mm256_srl_epi32(v, _mm_cvtsi32_si128(S.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn shl<const S: u32>(v: __m256i) -> __m256i {
        unsafe { _mm256_sll_epi32(v, _mm_cvtsi32_si128(S.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn sar<const S: u32>(v: __m256i) -> __m256i {
        unsafe { _mm256_sra_epi32(v, _mm_cvtsi32_si128(S.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn to_float(v: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn as_float(v: __m256i) -> __m256 {
        unsafe { _mm256_castsi256_ps(v) }
    }
    #[inline(always)]
    unsafe fn half_to_float(v: __m256i) -> __m256 {
        unsafe {
            let low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
            let packed = _mm256_packus_epi32(low, low); // each 128-bit half keeps its own four
            let packed = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn dot(acc: __m256i, u: __m256i, s: __m256i) -> __m256i {
        unsafe {
            if VNNI {
                return _mm256_dpbusd_avx_epi32(acc, u, s);
            }
            // u ≤ 127: a pair sums to at most 2·127·128, which 16 bits hold.
            let pairs = _mm256_maddubs_epi16(u, s);
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn dot_wide(acc: __m256i, u: __m256i, s: __m256i) -> __m256i {
        unsafe {
            if VNNI {
                return _mm256_dpbusd_avx_epi32(acc, u, s);
            }
            // Unsigned times signed would saturate at 255; |q| ≤ 128 with the sign moved to s (|s| ≤ 127) does not.
            let q = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(s, q));
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn max_u32(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_max_epu32(a, b) }
    }
    #[inline(always)]
    unsafe fn reduce_max_u32(v: __m256i) -> u32 {
        unsafe {
            let v = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_max_epu32(v, _mm_shuffle_epi32::<0b1110>(v));
            _mm_cvtsi128_si32(_mm_max_epu32(v, _mm_shuffle_epi32::<1>(v))).cast_unsigned()
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(v: __m256i) -> i32 {
        unsafe {
            let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b1110>(v));
            _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<1>(v)))
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut i8, v: __m256i) {
        unsafe {
            let low = _mm256_shuffle_epi8(v, _mm256_set1_epi32(0x0c08_0400)); // the low bytes, in each half's first word
            let (a, b) = (_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
            _mm_storel_epi64(p.cast(), _mm_unpacklo_epi32(a, b));
        }
    }
    #[inline(always)]
    unsafe fn gather(rows: &Rows, first: usize, offset: usize) -> __m256i {
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let index = _mm256_mullo_epi32(lanes, _mm256_set1_epi32(rows.pitch as i32));
            _mm256_i32gather_epi32::<1>(rows.at(first, offset).cast(), index)
        }
    }
    #[inline(always)]
    unsafe fn gather4(rows: &Rows, first: usize, offset: usize) -> [__m256i; 4] {
        unsafe {
            let half = |i: usize| {
                let at = |g: usize| _mm_loadu_si128(rows.at(first + 4 * g + i, offset).cast());
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(at(0)), at(1))
            };
            let (a, b, c, d) = (half(0), half(1), half(2), half(3));
            let (ab0, ab1) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (cd0, cd1) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            [
                _mm256_unpacklo_epi64(ab0, cd0),
                _mm256_unpackhi_epi64(ab0, cd0),
                _mm256_unpacklo_epi64(ab1, cd1),
                _mm256_unpackhi_epi64(ab1, cd1),
            ]
        }
    }
}

entries!(Ymm<false>, [#[target_feature(enable = "avx2,fma,f16c")]],
    panels: 1, int_rows: 2, float_rows: 4);
entries!(Ymm<true>, [#[target_feature(enable = "avx2,fma,f16c,avxvnni")]],
    panels: 1, int_rows: 2, float_rows: 4);
