//! The AArch64 Advanced SIMD instance: four lanes, 6 × 4 register tiles.

use std::arch::aarch64::*;

use half::bf16;

use super::backward;
use super::element::Widen;
use super::products::Floats;
use super::task::{Counts, Task};
use super::vector::{MAX_LANES, Vector};

#[derive(Clone, Copy)]
pub(crate) struct Quad(float32x4_t);

// SAFETY: plain Rust.
unsafe impl Widen for Quad {}

// SAFETY: NEON is enabled in the only instance, `run`, and part of every AArch64 target that Rust ships.
unsafe impl Vector for Quad {
    const LANES: usize = 4;
    const EXP2_MIN: f32 = -127.0;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vdupq_n_f32(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vld1q_f32(p)) }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> Quad {
        let mut x = [0.0f32; 4];
        // SAFETY: n < LANES floats are readable by contract.
        unsafe {
            std::ptr::copy_nonoverlapping(p, x.as_mut_ptr(), n);
            Quad::load(x.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as Vector.
        unsafe { vst1q_f32(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_bf16_partial(p: *const bf16, n: usize) -> Quad {
        let mut x = [bf16::ZERO; 4];
        // SAFETY: n < LANES elements are readable by contract.
        unsafe {
            std::ptr::copy_nonoverlapping(p, x.as_mut_ptr(), n);
            Quad::load_bf16(x.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn bf16_halves(self) -> (Quad, Quad) {
        // SAFETY: as Vector.
        unsafe {
            let x = vreinterpretq_u32_f32(self.0);
            let even = vreinterpretq_f32_u32(vshlq_n_u32::<16>(x));
            let odd = vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff_0000)));
            (Quad(even), Quad(odd))
        }
    }
    #[inline(always)]
    unsafe fn add(self, b: Quad) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vaddq_f32(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Quad) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vsubq_f32(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Quad) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vmulq_f32(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Quad) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vdivq_f32(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn if_less(self, b: Quad, x: Quad, y: Quad) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vbslq_f32(vcltq_f32(self.0, b.0), x.0, y.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Quad) -> Quad {
        // SAFETY: as Vector. A compare and a select, because FMAX would turn (NaN, number) into NaN on both sides.
        unsafe { Quad(vbslq_f32(vcgtq_f32(self.0, b.0), self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Quad) -> Quad {
        // SAFETY: as Vector. A compare and a select, as for `max`.
        unsafe { Quad(vbslq_f32(vcltq_f32(self.0, b.0), self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Quad, c: Quad) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vfmaq_f32(c.0, self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vrndnq_f32(self.0)) }
    }
    #[inline(always)]
    unsafe fn scale(self, n: Quad) -> Quad {
        // SAFETY: as Vector.
        unsafe {
            let e = vaddq_s32(vcvtq_s32_f32(n.0), vdupq_n_s32(127));
            Quad(vmulq_f32(self.0, vreinterpretq_f32_s32(vshlq_n_s32::<23>(e))))
        }
    }
    #[inline(always)]
    unsafe fn any_gt(self, b: Quad) -> bool {
        // SAFETY: as Vector.
        unsafe { vmaxvq_u32(vcgtq_f32(self.0, b.0)) != 0 }
    }
    #[inline(always)]
    unsafe fn select(self, lo: usize, hi: usize, other: Quad) -> Quad {
        const INDEX: [u32; 4] = [0, 1, 2, 3];
        // SAFETY: as Vector.
        unsafe {
            let i = vld1q_u32(INDEX.as_ptr());
            let from = vcgeq_u32(i, vdupq_n_u32(lo.min(4) as u32));
            let to = vcltq_u32(i, vdupq_n_u32(hi.min(4) as u32));
            Quad(vbslq_f32(vandq_u32(from, to), self.0, other.0))
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        // SAFETY: as Vector.
        unsafe { vmaxnmvq_f32(self.0) }
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        // SAFETY: as Vector.
        unsafe { vaddvq_f32(self.0) }
    }
    #[inline(always)]
    unsafe fn fold4(x: [Quad; 4]) -> Quad {
        // SAFETY: as Vector.
        unsafe { Quad(vpaddq_f32(vpaddq_f32(x[0].0, x[1].0), vpaddq_f32(x[2].0, x[3].0))) }
    }
    #[inline(always)]
    unsafe fn join(x: [Quad; 4]) -> Quad {
        x[0]
    }
    #[inline(always)]
    unsafe fn transpose(x: &mut [Quad; MAX_LANES]) {
        // SAFETY: as Vector.
        unsafe {
            let (a, b, c, d) = (x[0].0, x[1].0, x[2].0, x[3].0);
            let f64s = |v: float32x4_t| vreinterpretq_f64_f32(v);
            let (ab0, ab1) = (f64s(vtrn1q_f32(a, b)), f64s(vtrn2q_f32(a, b)));
            let (cd0, cd1) = (f64s(vtrn1q_f32(c, d)), f64s(vtrn2q_f32(c, d)));
            x[0] = Quad(vreinterpretq_f32_f64(vtrn1q_f64(ab0, cd0)));
            x[1] = Quad(vreinterpretq_f32_f64(vtrn1q_f64(ab1, cd1)));
            x[2] = Quad(vreinterpretq_f32_f64(vtrn2q_f64(ab0, cd0)));
            x[3] = Quad(vreinterpretq_f32_f64(vtrn2q_f64(ab1, cd1)));
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe {
            std::arch::asm!("prfm pldl2keep, [{0}]", in(reg) p, options(nostack, preserves_flags, readonly))
        }
    }
    #[inline(always)]
    unsafe fn prefetch_near(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) p, options(nostack, preserves_flags, readonly))
        }
    }
}

/// The task on Advanced SIMD.
///
/// # Safety
/// As `Call::run_task`.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn run(t: &Task<'_>) -> (Counts, Option<usize>) {
    // SAFETY: forwarded.
    unsafe { super::run_with::<Quad, 4>(t) }
}

/// The backward task on Advanced SIMD.
///
/// # Safety
/// As `backward::run`.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn run_backward(t: &backward::task::Task<'_>) {
    // SAFETY: forwarded.
    unsafe { backward::run_with::<Quad, Floats, 4>(t) }
}

/// A plain read of memory, or multiply-adds.
///
/// # Safety
/// On a processor with these features.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn probe(probe: super::probe::Probe<'_>) -> (f32, u64) {
    // SAFETY: forwarded.
    unsafe { super::probe::run_with::<Quad>(probe) }
}
