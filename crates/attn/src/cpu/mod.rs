//! Attention on the CPU: one algorithm over a vector trait, an instance per instruction set, chosen once at run time.
//!
//! Deliberately no tuning by processor name: instruction sets and shapes decide; the maker alone says whether bf16 dot products pay (`detect`).

mod ahead;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod backward;
mod buffer;
pub mod detect;
mod direct;
mod element;
mod kv_scales;
#[cfg(target_arch = "aarch64")]
mod neon;
mod ordered;
mod pack;
mod packed;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod portable;
pub mod probe;
mod products;
mod scores;
pub(crate) mod seen;
mod segment;
mod softmax;
pub(crate) mod task;
mod vector;
mod widen;

use half::bf16;

use crate::plan::Kernel;
use detect::Isa;
use direct::Kv;
use products::Floats;
use task::{Counts, Src, Task};
use vector::Vector;

/// Runs a task on the instance of its plan's machine. Returns what it did and the task to run next.
///
/// # Safety
/// As `Call::run_task`; the machine was detected or checked on this processor.
pub(crate) unsafe fn run_task(t: &Task<'_>) -> (Counts, Option<usize>) {
    // SAFETY: forwarded; `Machine` only holds an instruction set that is available.
    unsafe {
        match t.call.plan.machine.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if t.call.plan.machine.integer_dots() && avx512::codes::fits(t) => {
                avx512::codes::run(t)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if t.call.plan.multiplies_pairs() => avx512::pairs::run(t),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::run(t),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::run(t),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::run(t),
            _ => portable::run(t),
        }
    }
}

/// The algorithm: the kernel that the plan chose, on vectors `V`, in register tiles `N` vectors wide.
#[inline(always)]
unsafe fn run_with<V: Vector, const N: usize>(t: &Task<'_>) -> (Counts, Option<usize>) {
    let len = t.call.plan.seqs[t.unit.seq as usize].len;
    // SAFETY: forwarded.
    unsafe {
        match (t.call.plan.kernel_for(len), t.call.k, t.call.v) {
            (Kernel::Direct, Src::F32(k), Src::F32(v)) => direct::run::<V, f32, N>(t, Kv::InPlace(k, v)),
            (Kernel::Direct, Src::Bf16(k), Src::Bf16(v)) => direct::run::<V, bf16, N>(t, Kv::InPlace(k, v)),
            (Kernel::Direct, ..) => direct::run::<V, f32, N>(t, Kv::Widened),
            _ => packed::run::<V, Floats, N>(t),
        }
    }
}
