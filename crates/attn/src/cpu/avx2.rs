//! The AVX2 + FMA instance: eight lanes, 6 × 2 register tiles.

mod widen;

use std::arch::x86_64::*;

use half::bf16;

use super::backward;
use super::products::Floats;
use super::task::{Counts, Task};
use super::vector::{MAX_LANES, Vector};

#[derive(Clone, Copy)]
pub(crate) struct Ymm(__m256);

#[inline(always)]
unsafe fn widen(x: __m128i) -> Ymm {
    // SAFETY: as Vector.
    unsafe { Ymm(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))) }
}

#[inline(always)]
unsafe fn halves(x: __m256) -> (__m128, __m128) {
    // SAFETY: as Vector.
    unsafe { (_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x)) }
}

// SAFETY: AVX2 and FMA are enabled in the only instance, `run`.
unsafe impl Vector for Ymm {
    const LANES: usize = 8;
    const EXP2_MIN: f32 = -127.0;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> Ymm {
        let mut x = [0.0f32; 8];
        // SAFETY: n < LANES floats are readable by contract.
        unsafe {
            std::ptr::copy_nonoverlapping(p, x.as_mut_ptr(), n);
            Ymm::load(x.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as Vector.
        unsafe { _mm256_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Ymm {
        // SAFETY: as Vector.
        unsafe { widen(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_partial(p: *const bf16, n: usize) -> Ymm {
        let mut x = [bf16::ZERO; 8];
        // SAFETY: n < LANES elements are readable by contract.
        unsafe {
            std::ptr::copy_nonoverlapping(p, x.as_mut_ptr(), n);
            Ymm::load_bf16(x.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn bf16_halves(self) -> (Ymm, Ymm) {
        // SAFETY: as Vector.
        unsafe {
            let x = _mm256_castps_si256(self.0);
            let odd = _mm256_and_si256(x, _mm256_set1_epi32(0xffff_0000u32 as i32));
            (Ymm(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))), Ymm(_mm256_castsi256_ps(odd)))
        }
    }
    #[inline(always)]
    unsafe fn add(self, b: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_sub_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn if_less(self, b: Ymm, x: Ymm, y: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe {
            let less = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, b.0);
            Ymm(_mm256_blendv_ps(y.0, x.0, less))
        }
    }
    #[inline(always)]
    unsafe fn max(self, b: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_max_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_min_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Ymm, c: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Ymm {
        // SAFETY: as Vector.
        unsafe { Ymm(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)) }
    }
    #[inline(always)]
    unsafe fn scale(self, n: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe {
            let e = _mm256_add_epi32(_mm256_cvtps_epi32(n.0), _mm256_set1_epi32(127));
            Ymm(_mm256_mul_ps(self.0, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(e))))
        }
    }
    #[inline(always)]
    unsafe fn any_gt(self, b: Ymm) -> bool {
        // SAFETY: as Vector.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(self.0, b.0)) != 0 }
    }
    #[inline(always)]
    unsafe fn select(self, lo: usize, hi: usize, other: Ymm) -> Ymm {
        // SAFETY: as Vector.
        unsafe {
            let i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo.min(8) as i32), i);
            let inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi.min(8) as i32), i);
            let keep = _mm256_castsi256_ps(_mm256_andnot_si256(below, inside));
            Ymm(_mm256_blendv_ps(other.0, self.0, keep))
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        // SAFETY: as Vector.
        unsafe {
            let (a, b) = halves(self.0);
            let x = _mm_max_ps(a, b);
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        // SAFETY: as Vector.
        unsafe {
            let (a, b) = halves(self.0);
            let x = _mm_add_ps(a, b);
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    unsafe fn fold4(x: [Ymm; 4]) -> Ymm {
        // SAFETY: as Vector.
        unsafe {
            let ab = _mm256_hadd_ps(x[0].0, x[1].0);
            let cd = _mm256_hadd_ps(x[2].0, x[3].0);
            Ymm(_mm256_hadd_ps(ab, cd))
        }
    }
    #[inline(always)]
    unsafe fn join(x: [Ymm; 4]) -> Ymm {
        // SAFETY: as Vector.
        unsafe {
            let lo = _mm256_permute2f128_ps::<0x20>(x[0].0, x[1].0);
            let hi = _mm256_permute2f128_ps::<0x31>(x[0].0, x[1].0);
            Ymm(_mm256_add_ps(lo, hi))
        }
    }
    #[inline(always)]
    unsafe fn transpose(x: &mut [Ymm; MAX_LANES]) {
        // SAFETY: as Vector.
        unsafe {
            let mut t = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                t[2 * i] = _mm256_unpacklo_ps(x[2 * i].0, x[2 * i + 1].0);
                t[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i].0, x[2 * i + 1].0);
            }
            let mut u = [_mm256_setzero_ps(); 8];
            for i in 0..2 {
                let b = 4 * i;
                u[b] = _mm256_shuffle_ps::<0b01_00_01_00>(t[b], t[b + 2]);
                u[b + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(t[b], t[b + 2]);
                u[b + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(t[b + 1], t[b + 3]);
                u[b + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(t[b + 1], t[b + 3]);
            }
            for i in 0..4 {
                x[i] = Ymm(_mm256_permute2f128_ps::<0x20>(u[i], u[i + 4]));
                x[i + 4] = Ymm(_mm256_permute2f128_ps::<0x31>(u[i], u[i + 4]));
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_near(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

/// The task on AVX2 and FMA.
///
/// # Safety
/// As `Call::run_task`, on a processor with these features.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn run(t: &Task<'_>) -> (Counts, Option<usize>) {
    // SAFETY: forwarded.
    unsafe { super::run_with::<Ymm, 2>(t) }
}

/// The backward task on AVX2 and FMA.
///
/// # Safety
/// As `backward::run`, on a processor with these features.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn run_backward(t: &backward::task::Task<'_>) {
    // SAFETY: forwarded.
    unsafe { backward::run_with::<Ymm, Floats, 2>(t) }
}

/// A plain read of memory, or multiply-adds.
///
/// # Safety
/// On a processor with these features.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn probe(probe: super::probe::Probe<'_>) -> (f32, u64) {
    // SAFETY: forwarded.
    unsafe { super::probe::run_with::<Ymm>(probe) }
}
