//! A plain read of memory by the widest loads: the bandwidth that decode is held against.

use super::detect::{Isa, Machine};
use super::vector::Vector;

/// Runs of memory read side by side: one alone does not keep a core's memory requests busy.
const STREAMS: usize = 4;

/// Reads all of `data` once, on the calling thread, and returns a sum so that no load can be left out.
pub fn read(machine: &Machine, data: &[f32]) -> f32 {
    // SAFETY: `Machine` only holds an instruction set that is available.
    unsafe {
        match machine.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::avx512::read(data),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => super::avx2::read(data),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => super::neon::read(data),
            _ => super::portable::read(data),
        }
    }
}

/// The read on vectors `V`.
///
/// # Safety
/// As `Vector`.
#[inline(always)]
pub(crate) unsafe fn read_with<V: Vector>(data: &[f32]) -> f32 {
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
