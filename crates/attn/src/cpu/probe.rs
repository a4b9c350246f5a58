//! What a core can do at most, by the vectors of the kernels: read memory, multiply and add on registers. Kernels are held against it.

use std::hint::black_box;

use super::detect::{Isa, Machine};
use super::vector::Vector;

/// Runs of memory read side by side: one alone does not keep a core's memory requests busy.
const STREAMS: usize = 4;

/// Independent sums of the multiply-adds: a core starts two each cycle and waits four for each.
const SUMS: usize = 12;

/// What to do as fast as possible.
#[derive(Clone, Copy)]
pub(crate) enum Probe<'a> {
    /// Read all of it once.
    Read(&'a [f32]),
    /// So many steps of `SUMS` vectors.
    MultiplyAdd(u64),
}

/// Reads all of `data` once, on the calling thread, and returns a sum so that no load can be left out.
pub fn read(machine: &Machine, data: &[f32]) -> f32 {
    run(machine, Probe::Read(data)).0
}

/// `steps` rounds of independent multiply-adds on registers, on the calling thread: a number that depends on all of them, and the FLOPs.
pub fn multiply_add(machine: &Machine, steps: u64) -> (f32, u64) {
    run(machine, Probe::MultiplyAdd(steps))
}

/// The same of pairs of bf16; nothing where the machine does not multiply them.
pub fn dot_pairs(machine: &Machine, steps: u64) -> Option<(f32, u64)> {
    match machine.isa() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Machine` only holds what is available.
        Isa::Avx512 if machine.bf16_dots() => Some(unsafe { super::avx512::pairs::probe(steps) }),
        _ => None,
    }
}

fn run(machine: &Machine, probe: Probe<'_>) -> (f32, u64) {
    // SAFETY: `Machine` only holds an instruction set that is available.
    unsafe {
        match machine.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::avx512::probe(probe),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => super::avx2::probe(probe),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => super::neon::probe(probe),
            _ => super::portable::probe(probe),
        }
    }
}

/// The probe on vectors `V`: a number that keeps all of it, and the FLOPs.
///
/// # Safety
/// As `Vector`.
#[inline(always)]
pub(crate) unsafe fn run_with<V: Vector>(probe: Probe<'_>) -> (f32, u64) {
    // SAFETY: forwarded.
    unsafe {
        match probe {
            Probe::Read(data) => (read_all::<V>(data), 0),
            Probe::MultiplyAdd(steps) => multiply_adds::<V>(steps),
        }
    }
}

#[inline(always)]
unsafe fn multiply_adds<V: Vector>(steps: u64) -> (f32, u64) {
    // SAFETY: forwarded.
    unsafe {
        // Known numbers would let the compiler find where the sums end up.
        let (a, b) = (V::splat(black_box(0.999)), V::splat(black_box(0.25)));
        let mut sums = [V::splat(1.0); SUMS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = sum.fma(a, b);
            }
        }
        (sums.iter().map(|x| x.reduce_add()).sum(), steps * (2 * SUMS * V::LANES) as u64)
    }
}

/// `steps` rounds of dot products of pairs.
///
/// # Safety
/// As `Vector`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn dots<V: super::vector::PairDots>(steps: u64) -> (f32, u64) {
    // SAFETY: forwarded.
    unsafe {
        // Two halves a lane: 1 and 1/4 times 1/4 and 1/4.
        let (a, b) = (
            V::splat(black_box(f32::from_bits(0x3e80_3f80))),
            V::splat(black_box(f32::from_bits(0x3e80_3e80))),
        );
        let mut sums = [V::splat(1.0); SUMS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = a.dot_pairs(b, *sum);
            }
        }
        (sums.iter().map(|x| x.reduce_add()).sum(), steps * (4 * SUMS * V::LANES) as u64)
    }
}

#[inline(always)]
unsafe fn read_all<V: Vector>(data: &[f32]) -> f32 {
    let step = 4 * V::LANES;
    let part = data.len() / STREAMS / step * step;
    // SAFETY: STREAMS parts of whole steps lie inside `data`.
    unsafe {
        let mut sums = [[V::splat(0.0); 4]; STREAMS];
        let mut at = 0;
        while at < part {
            for s in 0..STREAMS {
                for i in 0..4 {
                    sums[s][i] = sums[s][i].add(V::load(data.as_ptr().add(s * part + at + i * V::LANES)));
                }
            }
            at += step;
        }
        let total: f32 = sums.iter().flatten().map(|x| x.reduce_add()).sum();
        total + data[STREAMS * part..].iter().sum::<f32>()
    }
}
