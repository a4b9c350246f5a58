//! The AVX-512 instance: sixteen lanes, 6 × 4 register tiles.

pub(crate) mod codes;
pub(crate) mod pairs;
mod widen;

use std::arch::x86_64::*;

use half::bf16;

use super::backward;
use super::products::Floats;
use super::task::{Counts, Task};
use super::vector::{MAX_LANES, Vector};

#[derive(Clone, Copy)]
pub(crate) struct Zmm(__m512);

/// The lowest `n` of 16 lanes; all of them for `n >= 16`.
#[inline(always)]
fn low(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

/// bf16 bits in 32-bit lanes, moved to where f32 keeps them.
#[inline(always)]
unsafe fn widen(x: __m256i) -> Zmm {
    // SAFETY: as Vector.
    unsafe { Zmm(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))) }
}

// SAFETY: AVX-512 F, BW and VL are enabled in the only instance, `run`.
unsafe impl Vector for Zmm {
    const LANES: usize = 16;
    const EXP2_MIN: f32 = -127.0;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> Zmm {
        // SAFETY: masked lanes are not touched.
        unsafe { Zmm(_mm512_maskz_loadu_ps(low(n), p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as Vector.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Zmm {
        // SAFETY: as Vector.
        unsafe { widen(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_partial(p: *const bf16, n: usize) -> Zmm {
        // SAFETY: masked lanes are not touched.
        unsafe { widen(_mm256_maskz_loadu_epi16(low(n), p.cast())) }
    }
    #[inline(always)]
    unsafe fn bf16_halves(self) -> (Zmm, Zmm) {
        // SAFETY: as Vector.
        unsafe {
            let x = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000u32 as i32));
            (Zmm(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))), Zmm(_mm512_castsi512_ps(odd)))
        }
    }
    #[inline(always)]
    unsafe fn add(self, b: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_sub_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn if_less(self, b: Zmm, x: Zmm, y: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, b.0);
            Zmm(_mm512_mask_blend_ps(less, y.0, x.0))
        }
    }
    #[inline(always)]
    unsafe fn max(self, b: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_max_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_min_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Zmm, c: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)) }
    }
    #[inline(always)]
    unsafe fn scale(self, n: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe {
            // A subnormal weight would cost every product with it a microcode assist. Not-less-than keeps a NaN's lane.
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(n.0, _mm512_set1_ps(-126.0));
            Zmm(_mm512_maskz_scalef_ps(normal, self.0, n.0))
        }
    }
    #[inline(always)]
    unsafe fn any_gt(self, b: Zmm) -> bool {
        // SAFETY: as Vector.
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, b.0) != 0 }
    }
    #[inline(always)]
    unsafe fn select(self, lo: usize, hi: usize, other: Zmm) -> Zmm {
        // SAFETY: as Vector.
        unsafe { Zmm(_mm512_mask_blend_ps(low(hi) & !low(lo), other.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        // SAFETY: as Vector.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        // SAFETY: as Vector.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn fold4(x: [Zmm; 4]) -> Zmm {
        // SAFETY: as Vector.
        unsafe {
            let [a, b, c, d] = x.map(|x| x.0);
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let lo = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let hi = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
            Zmm(_mm512_add_ps(lo, hi))
        }
    }
    #[inline(always)]
    unsafe fn join(x: [Zmm; 4]) -> Zmm {
        // SAFETY: as Vector.
        unsafe {
            let halves = |a: Zmm, b: Zmm| {
                let lo = _mm512_shuffle_f32x4::<0b01_00_01_00>(a.0, b.0);
                let hi = _mm512_shuffle_f32x4::<0b11_10_11_10>(a.0, b.0);
                _mm512_add_ps(lo, hi)
            };
            let (ab, cd) = (halves(x[0], x[1]), halves(x[2], x[3]));
            let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
            let odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd);
            Zmm(_mm512_add_ps(even, odd))
        }
    }
    #[inline(always)]
    unsafe fn transpose(x: &mut [Zmm; MAX_LANES]) {
        // SAFETY: as Vector. Three rounds: pairs and quads inside 128-bit lanes, then the lanes themselves.
        unsafe {
            let mut t = [_mm512_setzero_ps(); 16];
            for i in 0..8 {
                t[2 * i] = _mm512_unpacklo_ps(x[2 * i].0, x[2 * i + 1].0);
                t[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i].0, x[2 * i + 1].0);
            }
            let mut u = [_mm512_setzero_ps(); 16];
            for i in 0..4 {
                let b = 4 * i;
                u[b] = _mm512_shuffle_ps::<0b01_00_01_00>(t[b], t[b + 2]);
                u[b + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(t[b], t[b + 2]);
                u[b + 2] = _mm512_shuffle_ps::<0b01_00_01_00>(t[b + 1], t[b + 3]);
                u[b + 3] = _mm512_shuffle_ps::<0b11_10_11_10>(t[b + 1], t[b + 3]);
            }
            for i in 0..4 {
                let ac = _mm512_shuffle_f32x4::<0b10_00_10_00>(u[i], u[i + 4]);
                let bd = _mm512_shuffle_f32x4::<0b11_01_11_01>(u[i], u[i + 4]);
                let eg = _mm512_shuffle_f32x4::<0b10_00_10_00>(u[i + 8], u[i + 12]);
                let fh = _mm512_shuffle_f32x4::<0b11_01_11_01>(u[i + 8], u[i + 12]);
                x[i] = Zmm(_mm512_shuffle_f32x4::<0b10_00_10_00>(ac, eg));
                x[i + 4] = Zmm(_mm512_shuffle_f32x4::<0b10_00_10_00>(bd, fh));
                x[i + 8] = Zmm(_mm512_shuffle_f32x4::<0b11_01_11_01>(ac, eg));
                x[i + 12] = Zmm(_mm512_shuffle_f32x4::<0b11_01_11_01>(bd, fh));
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

/// The task on AVX-512.
///
/// # Safety
/// As `Call::run_task`, on a processor with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub(crate) unsafe fn run(t: &Task<'_>) -> (Counts, Option<usize>) {
    // SAFETY: forwarded.
    unsafe { super::run_with::<Zmm, 4>(t) }
}

/// The backward task on AVX-512.
///
/// # Safety
/// As `backward::run`, on a processor with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub(crate) unsafe fn run_backward(t: &backward::task::Task<'_>) {
    // SAFETY: forwarded.
    unsafe { backward::run_with::<Zmm, Floats, 4>(t) }
}

/// A plain read of memory, or multiply-adds.
///
/// # Safety
/// On a processor with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub(crate) unsafe fn probe(probe: super::probe::Probe<'_>) -> (f32, u64) {
    // SAFETY: forwarded.
    unsafe { super::probe::run_with::<Zmm>(probe) }
}
