//! Codes widened by AVX2.

use std::arch::x86_64::*;

use half::f16;

use super::Ymm;
use crate::cpu::element::Widen;

// SAFETY: AVX2 and F16C are enabled in the only instance.
unsafe impl Widen for Ymm {
    #[inline(always)]
    unsafe fn f16s(p: *const f16) -> Ymm {
        // SAFETY: as Widen.
        unsafe { Ymm(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn e4m3s(p: *const u8) -> Ymm {
        // SAFETY: as Widen.
        unsafe {
            let x = _mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast()));
            let size = _mm_and_si128(x, _mm_set1_epi16(0x7f));
            // Moved to binary16, whose bias is 8 more; a NaN gets all exponent bits.
            let half = _mm_or_si128(_mm_slli_epi16::<7>(size), _mm_and_si128(x, _mm_set1_epi16(i16::MIN)));
            let nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
            let half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
            Ymm(_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0)))
        }
    }
    #[inline(always)]
    unsafe fn e5m2s(p: *const u8) -> Ymm {
        // SAFETY: as Widen. E5M2 is the upper half of binary16.
        unsafe { Ymm(_mm256_cvtph_ps(_mm_slli_epi16::<8>(_mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()))))) }
    }
    #[inline(always)]
    unsafe fn int8s(p: *const i8) -> Ymm {
        // SAFETY: as Widen.
        unsafe { Ymm(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn int4s(p: *const u8) -> Ymm {
        // SAFETY: as Widen. A byte in each 64-bit lane; its upper nibble goes to the upper half, then each to the top, and back with its sign.
        unsafe {
            let x = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned()));
            let nibbles = _mm256_or_si256(x, _mm256_slli_epi64::<28>(x));
            Ymm(_mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(_mm256_slli_epi32::<28>(nibbles))))
        }
    }
}
