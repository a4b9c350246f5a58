//! Codes widened by AVX-512.

use std::arch::x86_64::*;

use half::f16;

use super::Zmm;
use crate::cpu::element::Widen;

/// The values of two's complement nibbles, by their bits.
const INT4: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0];

// SAFETY: AVX-512 F, BW and VL are enabled in the only instance.
unsafe impl Widen for Zmm {
    #[inline(always)]
    unsafe fn f16s(p: *const f16) -> Zmm {
        // SAFETY: as Widen.
        unsafe { Zmm(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn e4m3s(p: *const u8) -> Zmm {
        // SAFETY: as Widen.
        unsafe {
            let x = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
            let size = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
            // Moved to binary16, whose bias is 8 more.
            let half = _mm256_or_si256(
                _mm256_slli_epi16::<7>(size),
                _mm256_and_si256(x, _mm256_set1_epi16(i16::MIN)),
            );
            let nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f));
            let half = _mm256_mask_blend_epi16(nan, half, _mm256_set1_epi16(0x7e00));
            Zmm(_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0)))
        }
    }
    #[inline(always)]
    unsafe fn e5m2s(p: *const u8) -> Zmm {
        // SAFETY: as Widen. E5M2 is the upper half of binary16.
        unsafe {
            let x = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            Zmm(_mm512_cvtph_ps(_mm256_slli_epi16::<8>(x)))
        }
    }
    #[inline(always)]
    unsafe fn int8s(p: *const i8) -> Zmm {
        // SAFETY: as Widen.
        unsafe { Zmm(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn int4s(p: *const u8) -> Zmm {
        // SAFETY: as Widen. A byte in each 64-bit lane; its upper nibble goes to the upper half. The table looks at four bits only.
        unsafe {
            let x = _mm512_cvtepu8_epi64(_mm_loadl_epi64(p.cast()));
            let nibbles = _mm512_or_si512(x, _mm512_slli_epi64::<28>(x));
            Zmm(_mm512_permutexvar_ps(nibbles, _mm512_loadu_ps(INT4.as_ptr())))
        }
    }
}
