//! The vector of f32 lanes that the kernels are written in.
//!
//! Every method is inlined into an instance that carries the instruction set as a target feature; none is called otherwise.

use half::bf16;

use super::element::Widen;

/// Widest vector of any instance, in lanes.
pub(crate) const MAX_LANES: usize = 16;

/// f32 lanes of one instruction set.
///
/// # Safety
/// Methods may only run where the instruction set is available, and pointers must be valid for the lanes they name.
pub(crate) unsafe trait Vector: Copy + Widen {
    /// Lanes of a vector; at most [`MAX_LANES`] and a divisor of it.
    const LANES: usize;
    /// Exponents below this give exactly 0.
    const EXP2_MIN: f32;
    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self;
    /// `LANES` floats.
    unsafe fn load(p: *const f32) -> Self;
    /// The first `n < LANES` floats, zeros after.
    unsafe fn load_partial(p: *const f32, n: usize) -> Self;
    /// Stores `LANES` floats.
    unsafe fn store(self, p: *mut f32);
    /// `LANES` bf16, widened.
    unsafe fn load_bf16(p: *const bf16) -> Self;
    /// The first `n < LANES` bf16, widened, zeros after.
    unsafe fn load_bf16_partial(p: *const bf16, n: usize) -> Self;
    /// `2 * LANES` bf16: the even ones, the odd ones.
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const bf16) -> (Self, Self) {
        // SAFETY: forwarded.
        unsafe { Self::load(p.cast()).bf16_halves() }
    }
    /// Lanes that hold two bf16 each, widened: the first of each, the second of each.
    unsafe fn bf16_halves(self) -> (Self, Self);
    /// `self + b`.
    unsafe fn add(self, b: Self) -> Self;
    /// `self - b`.
    unsafe fn sub(self, b: Self) -> Self;
    /// `self * b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// `self / b`.
    unsafe fn div(self, b: Self) -> Self;
    /// `x` in lanes where `self < b`, `y` elsewhere (where either is NaN, too).
    unsafe fn if_less(self, b: Self, x: Self, y: Self) -> Self;
    /// The larger; `b` where either is NaN or both are equal.
    unsafe fn max(self, b: Self) -> Self;
    /// The smaller; `b` where either is NaN or both are equal.
    unsafe fn min(self, b: Self) -> Self;
    /// `self * b + c`, rounded once where the instruction set can.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// Nearest integer.
    unsafe fn round(self) -> Self;
    /// `self * 2^n` for integral `n >= EXP2_MIN`, flushed to 0 at the lower end.
    unsafe fn scale(self, n: Self) -> Self;
    /// True when some lane of `self` is greater than the same lane of `b`.
    unsafe fn any_gt(self, b: Self) -> bool;
    /// Lanes `lo <= i < hi` of `self`, `other` elsewhere.
    unsafe fn select(self, lo: usize, hi: usize, other: Self) -> Self;
    /// Largest lane.
    unsafe fn reduce_max(self) -> f32;
    /// Sum of lanes.
    unsafe fn reduce_add(self) -> f32;
    /// Lane `4g + j`: the sum of lanes `4g .. 4g + 4` of `x[j]`.
    unsafe fn fold4(x: [Self; 4]) -> Self;
    /// Lane `4i + j`: the sum over `g` of lanes `4g + j` of `x[i]`. Only `x[i]` with `4i < LANES` are looked at.
    unsafe fn join(x: [Self; 4]) -> Self;
    /// Transposes the `LANES` × `LANES` block in the first `LANES` elements.
    unsafe fn transpose(x: &mut [Self; MAX_LANES]);
    /// Asks for the cache line of `p`, into the second-level cache.
    unsafe fn prefetch(p: *const u8);
    /// The same, into the first-level cache.
    unsafe fn prefetch_near(p: *const u8);

    /// tanh(self), error below 1e-7 of the result; NaN stays NaN.
    #[inline(always)]
    unsafe fn tanh(self) -> Self {
        // x + x³·P(x²) below 1, relative error under 1e-8 in exact arithmetic (least maximum error by Lawson's iteration).
        const C: [f32; 7] = [
            -0.333_332_96,
            0.133_323_45,
            -0.053_879_8,
            0.021_486_657,
            -0.007_946_107,
            0.002_301_364_4,
            -0.000_358_451_94,
        ];
        // SAFETY: forwarded.
        unsafe {
            let (zero, one) = (Self::splat(0.0), Self::splat(1.0));
            let size = self.if_less(zero, zero.sub(self), self);
            let square = self.mul(self);
            let mut p = Self::splat(C[6]);
            for c in C[..6].iter().rev() {
                p = p.fma(square, Self::splat(*c));
            }
            let near = self.mul(square).fma(p, self);
            // 1 - 2 e / (1 + e), e = exp(-2 |x|): what is taken away is small from 1 on, and so is its error.
            let e = size.mul(Self::splat(-2.0 * std::f32::consts::LOG2_E)).exp2();
            let far = one.sub(e.add(e).div(one.add(e)));
            let far = self.if_less(zero, zero.sub(far), far);
            size.if_less(Self::splat(1.0), near, far)
        }
    }

    /// 2^self for `self <= 0` (or NaN, which stays NaN); exactly 1 at 0 and exactly 0 at -inf.
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: forwarded.
        unsafe {
            // The bound stands first so that a NaN on the right comes through.
            let x = Self::splat(Self::EXP2_MIN).max(self);
            let n = x.round();
            Self::power(x.sub(n), n)
        }
    }

    /// e^(self + rest) for `self <= 0` and a rest below one rounding of it: the factor from natural units to powers of two is not rounded.
    #[inline(always)]
    unsafe fn exp_of_sum(self, rest: Self) -> Self {
        /// What log2(e) is beyond its nearest f32.
        const LOG2_E_REST: f32 = 1.925_963e-8;
        // SAFETY: forwarded.
        unsafe {
            let (to_log2, zero) = (Self::splat(std::f32::consts::LOG2_E), Self::splat(0.0));
            let x = self.mul(to_log2);
            let rounding = self.fma(to_log2, zero.sub(x));
            let rest = rest.fma(to_log2, self.fma(Self::splat(LOG2_E_REST), rounding));
            let lowest = Self::splat(Self::EXP2_MIN);
            // Below the lowest exponent the result is 0 and the rest may be anything.
            let rest = x.if_less(lowest, zero, rest);
            let x = lowest.max(x);
            let n = x.round();
            Self::power(x.sub(n).add(rest), n)
        }
    }

    /// 2^(r + n) for `r` on [-1/2, 1/2] and integral `n`.
    #[inline(always)]
    unsafe fn power(r: Self, n: Self) -> Self {
        // 2^r on [-1/2, 1/2], relative error 1.6e-8 in exact arithmetic (least maximum error by Lawson's iteration).
        const C: [f32; 6] = [
            std::f32::consts::LN_2,
            0.240_226_48,
            0.055_503_324,
            0.009_618_437,
            0.001_339_887_6,
            0.000_153_533_63,
        ];
        // SAFETY: forwarded.
        unsafe {
            let mut p = r.fma(Self::splat(C[5]), Self::splat(C[4]));
            p = p.fma(r, Self::splat(C[3]));
            p = p.fma(r, Self::splat(C[2]));
            p = p.fma(r, Self::splat(C[1]));
            p = p.fma(r, Self::splat(C[0]));
            p = p.fma(r, Self::splat(1.0));
            p.scale(n)
        }
    }
}

/// Vectors whose instruction set multiplies pairs of bf16: a lane of 32 bits holds two of them, the first in its low half.
///
/// # Safety
/// As [`Vector`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe trait PairDots: Vector {
    /// `c + a.0 * b.0 + a.1 * b.1` by lanes, products exact, sums rounded as f32; subnormal numbers count as 0.
    unsafe fn dot_pairs(self, b: Self, c: Self) -> Self;
    /// The lanes of `lo`, then those of `hi`, each rounded to bf16 (to nearest, ties to even): two a lane in that order.
    unsafe fn narrow(lo: Self, hi: Self) -> Self;
    /// `2 * LANES` bf16 as they lie.
    #[inline(always)]
    unsafe fn load_pairs(p: *const bf16) -> Self {
        // SAFETY: forwarded.
        unsafe { Self::load(p.cast()) }
    }
    /// The first `n < 2 * LANES` bf16, zeros after.
    unsafe fn load_pairs_partial(p: *const bf16, n: usize) -> Self;
    /// Element `i` of `a` beside element `i` of `b`: elements `0 .. LANES`, then the rest.
    unsafe fn interleave(a: Self, b: Self) -> (Self, Self);
    /// The same in the order that is cheapest: element `i` of the rows stands where [`PairDots::cheap_place`] says.
    unsafe fn interleave_cheaply(a: Self, b: Self) -> (Self, Self);
    /// Lane of the two vectors of [`PairDots::interleave_cheaply`] that holds element `i`.
    fn cheap_place(i: usize) -> usize;
    /// Lane `i`: lanes `i` of `a` and of `b`, rounded to bf16.
    unsafe fn beside(a: Self, b: Self) -> Self;
    /// Keeps the bits of lanes that are set in `mask`, lane by lane.
    unsafe fn and_bits(self, mask: u32) -> Self;
}
