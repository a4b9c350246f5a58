//! bf16 queries, keys and values by dot products of pairs (AVX512_BF16): two products a lane where f32 has one.

use std::arch::x86_64::*;

use half::bf16;

use super::Zmm;
use crate::cpu::backward;
use crate::cpu::direct::{self, Kv};
use crate::cpu::packed;
use crate::cpu::pairs::{Bf16Pairs, Pairs};
use crate::cpu::task::{Counts, Src, Task};
use crate::cpu::vector::PairDots;
use crate::plan::Kernel;

/// The lowest `n` of 32 halves of lanes.
#[inline(always)]
fn low_halves(n: usize) -> __mmask32 {
    ((1u64 << n.min(32)) - 1) as __mmask32
}

/// For `vpermt2w`: elements `first ..` of two vectors, one of each in turn.
const fn alternate(first: u16) -> [u16; 32] {
    let mut at = [0; 32];
    let mut i = 0;
    while i < 16 {
        at[2 * i] = first + i as u16;
        at[2 * i + 1] = first + i as u16 + 32;
        i += 1;
    }
    at
}
static LOWER: [u16; 32] = alternate(0);
static UPPER: [u16; 32] = alternate(16);
/// For `vpermw`: the lower and the upper half of one vector, an element of each in turn.
static HALVES: [u16; 32] = {
    let mut at = [0; 32];
    let mut i = 0;
    while i < 16 {
        at[2 * i] = i as u16;
        at[2 * i + 1] = i as u16 + 16;
        i += 1;
    }
    at
};

// SAFETY: AVX512_BF16 and AVX-512 BW are enabled in the only instance, `run`.
unsafe impl PairDots for Zmm {
    #[inline(always)]
    unsafe fn dot_pairs(self, b: Zmm, c: Zmm) -> Zmm {
        // SAFETY: as PairDots; the types differ in name only.
        unsafe {
            let as_pairs = |x: __m512| std::mem::transmute::<__m512, __m512bh>(x);
            Zmm(_mm512_dpbf16_ps(c.0, as_pairs(self.0), as_pairs(b.0)))
        }
    }
    #[inline(always)]
    unsafe fn narrow(lo: Zmm, hi: Zmm) -> Zmm {
        // SAFETY: as PairDots; the types differ in name only.
        unsafe { Zmm(std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(hi.0, lo.0))) }
    }
    #[inline(always)]
    unsafe fn load_pairs_partial(p: *const bf16, n: usize) -> Zmm {
        // SAFETY: masked elements are not touched.
        unsafe { Zmm(_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(low_halves(n), p.cast()))) }
    }
    #[inline(always)]
    unsafe fn interleave(a: Zmm, b: Zmm) -> (Zmm, Zmm) {
        // SAFETY: as PairDots.
        unsafe {
            let (a, b) = (_mm512_castps_si512(a.0), _mm512_castps_si512(b.0));
            let pick = |at: &[u16; 32]| {
                let at = _mm512_loadu_si512(at.as_ptr().cast());
                Zmm(_mm512_castsi512_ps(_mm512_permutex2var_epi16(a, at, b)))
            };
            (pick(&LOWER), pick(&UPPER))
        }
    }
    #[inline(always)]
    unsafe fn interleave_cheaply(a: Zmm, b: Zmm) -> (Zmm, Zmm) {
        // SAFETY: as PairDots.
        unsafe {
            let (a, b) = (_mm512_castps_si512(a.0), _mm512_castps_si512(b.0));
            (
                Zmm(_mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b))),
                Zmm(_mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b))),
            )
        }
    }
    #[inline(always)]
    fn cheap_place(i: usize) -> usize {
        // Within 128 bits: the lower four elements to the first vector, the upper four to the second.
        i % 8 / 4 * 16 + i / 8 * 4 + i % 4
    }
    #[inline(always)]
    unsafe fn beside(a: Zmm, b: Zmm) -> Zmm {
        // SAFETY: as PairDots.
        unsafe {
            let at = _mm512_loadu_si512(HALVES.as_ptr().cast());
            let both = _mm512_castps_si512(Zmm::narrow(a, b).0);
            Zmm(_mm512_castsi512_ps(_mm512_permutexvar_epi16(at, both)))
        }
    }
    #[inline(always)]
    unsafe fn and_bits(self, mask: u32) -> Zmm {
        // SAFETY: as PairDots.
        unsafe {
            let mask = _mm512_set1_epi32(mask as i32);
            Zmm(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(self.0), mask)))
        }
    }
}

/// A task of a plan that multiplies pairs.
///
/// # Safety
/// As `Call::run_task`, on a processor with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
pub(crate) unsafe fn run(t: &Task<'_>) -> (Counts, Option<usize>) {
    let len = t.call.plan.seqs[t.unit.seq as usize].len;
    // SAFETY: forwarded.
    unsafe {
        match (t.call.plan.kernel_for(len), t.call.k, t.call.v) {
            (Kernel::Direct, Src::Bf16(k), Src::Bf16(v)) => {
                direct::run::<Zmm, Bf16Pairs, 4>(t, Kv::InPlace(k.cast(), v.cast()))
            }
            _ => packed::run::<Zmm, Pairs, 4>(t),
        }
    }
}

/// A backward task of a plan that multiplies pairs.
///
/// # Safety
/// As `backward::run`, on a processor with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
pub(crate) unsafe fn run_backward(t: &backward::task::Task<'_>) {
    // SAFETY: forwarded.
    unsafe { backward::run_with::<Zmm, Pairs, 4>(t) }
}

/// Multiplies and adds pairs on registers.
///
/// # Safety
/// On a processor with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
pub(crate) unsafe fn probe(steps: u64) -> (f32, u64) {
    // SAFETY: forwarded.
    unsafe { crate::cpu::probe::dots::<Zmm>(steps) }
}
