//! The portable instance: eight lanes in a plain array, left to the compiler to vectorise.

use half::bf16;

use super::backward;
use super::element::Widen;
use super::products::Floats;
use super::task::{Counts, Task};
use super::vector::{MAX_LANES, Vector};

const L: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct Lanes([f32; L]);

impl Lanes {
    #[inline(always)]
    fn zip(self, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
        let mut x = self.0;
        for i in 0..L {
            x[i] = f(x[i], b.0[i]);
        }
        Lanes(x)
    }

    #[inline(always)]
    unsafe fn from_bf16(p: *const bf16, n: usize) -> Lanes {
        let mut x = [0.0; L];
        for i in 0..n {
            // SAFETY: the caller's lanes are readable.
            x[i] = unsafe { (*p.add(i)).to_f32() };
        }
        Lanes(x)
    }
}

// SAFETY: plain Rust.
unsafe impl Widen for Lanes {}

// SAFETY: plain Rust; pointers are read and written only as each method's contract says.
unsafe impl Vector for Lanes {
    const LANES: usize = L;
    const EXP2_MIN: f32 = -127.0;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Lanes {
        Lanes([x; L])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Lanes {
        // SAFETY: by contract.
        Lanes(unsafe { p.cast::<[f32; L]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> Lanes {
        let mut x = [0.0; L];
        // SAFETY: n < LANES floats are readable by contract.
        unsafe { std::ptr::copy_nonoverlapping(p, x.as_mut_ptr(), n) };
        Lanes(x)
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: by contract.
        unsafe { p.cast::<[f32; L]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Lanes {
        // SAFETY: by contract.
        unsafe { Lanes::from_bf16(p, L) }
    }
    #[inline(always)]
    unsafe fn load_bf16_partial(p: *const bf16, n: usize) -> Lanes {
        // SAFETY: by contract.
        unsafe { Lanes::from_bf16(p, n) }
    }
    #[inline(always)]
    unsafe fn bf16_halves(self) -> (Lanes, Lanes) {
        let half = |x: f32, at: usize| {
            let bytes = x.to_ne_bytes();
            bf16::from_ne_bytes([bytes[at], bytes[at + 1]]).to_f32()
        };
        (Lanes(self.0.map(|x| half(x, 0))), Lanes(self.0.map(|x| half(x, 2))))
    }
    #[inline(always)]
    unsafe fn add(self, b: Lanes) -> Lanes {
        self.zip(b, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn sub(self, b: Lanes) -> Lanes {
        self.zip(b, |x, y| x - y)
    }
    #[inline(always)]
    unsafe fn mul(self, b: Lanes) -> Lanes {
        self.zip(b, |x, y| x * y)
    }
    #[inline(always)]
    unsafe fn div(self, b: Lanes) -> Lanes {
        self.zip(b, |x, y| x / y)
    }
    #[inline(always)]
    unsafe fn if_less(self, b: Lanes, x: Lanes, y: Lanes) -> Lanes {
        Lanes(std::array::from_fn(|i| if self.0[i] < b.0[i] { x.0[i] } else { y.0[i] }))
    }
    #[inline(always)]
    unsafe fn max(self, b: Lanes) -> Lanes {
        self.zip(b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    unsafe fn min(self, b: Lanes) -> Lanes {
        self.zip(b, |x, y| if x < y { x } else { y })
    }
    #[inline(always)]
    unsafe fn fma(self, b: Lanes, c: Lanes) -> Lanes {
        let mut x = self.0;
        for i in 0..L {
            x[i] = x[i] * b.0[i] + c.0[i];
        }
        Lanes(x)
    }
    #[inline(always)]
    unsafe fn round(self) -> Lanes {
        // Adding and taking away 1.5 * 2^23 rounds to nearest even within +-2^22; EXP2_MIN keeps inputs there.
        const MAGIC: f32 = 12_582_912.0;
        self.zip(self, |x, _| (x + MAGIC) - MAGIC)
    }
    #[inline(always)]
    unsafe fn scale(self, n: Lanes) -> Lanes {
        self.zip(n, |x, n| x * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn any_gt(self, b: Lanes) -> bool {
        let mut any = false;
        for i in 0..L {
            any |= self.0[i] > b.0[i];
        }
        any
    }
    #[inline(always)]
    unsafe fn select(self, lo: usize, hi: usize, other: Lanes) -> Lanes {
        let mut x = other.0;
        for i in 0..L {
            if i >= lo && i < hi {
                x[i] = self.0[i];
            }
        }
        Lanes(x)
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        let x = self.0;
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }
    #[inline(always)]
    unsafe fn fold4(x: [Lanes; 4]) -> Lanes {
        Lanes(std::array::from_fn(|i| x[i % 4].0[i / 4 * 4..][..4].iter().sum()))
    }
    #[inline(always)]
    unsafe fn join(x: [Lanes; 4]) -> Lanes {
        Lanes(std::array::from_fn(|i| x[i / 4].0.iter().skip(i % 4).step_by(4).sum()))
    }
    #[inline(always)]
    unsafe fn transpose(x: &mut [Lanes; MAX_LANES]) {
        for i in 0..L {
            for j in 0..i {
                let t = x[i].0[j];
                x[i].0[j] = x[j].0[i];
                x[j].0[i] = t;
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_near(_: *const u8) {}
}

/// The task on plain lanes.
///
/// # Safety
/// As `Call::run_task`.
pub(crate) unsafe fn run(t: &Task<'_>) -> (Counts, Option<usize>) {
    // SAFETY: forwarded.
    unsafe { super::run_with::<Lanes, 2>(t) }
}

/// The backward task on plain lanes.
///
/// # Safety
/// As `backward::run`.
pub(crate) unsafe fn run_backward(t: &backward::task::Task<'_>) {
    // SAFETY: forwarded.
    unsafe { backward::run_with::<Lanes, Floats, 2>(t) }
}

/// A plain read of memory, or multiply-adds.
///
/// # Safety
/// On a processor with these features.
pub(crate) unsafe fn probe(probe: super::probe::Probe<'_>) -> (f32, u64) {
    // SAFETY: forwarded.
    unsafe { super::probe::run_with::<Lanes>(probe) }
}
