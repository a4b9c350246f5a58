//! Peaks of machines, each with its source, and the time no run on such a machine can beat.
//!
//! Numbers only: nothing here looks at the machine it runs on.

use serde::Serialize;
use suanpan_base::DType;

use crate::entry::Entry;

/// A machine's ceilings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Short name.
    pub name: &'static str,
    /// Where the numbers come from.
    pub source: &'static str,
    /// Multiply-adds on f32 elements, in FLOP/s.
    pub f32_flops_per_s: f64,
    /// Multiply-adds on bf16 elements with f32 accumulation, in FLOP/s.
    pub bf16_flops_per_s: f64,
    /// Device memory (CPU: main memory), in bytes/s.
    pub memory_bytes_per_s: f64,
}

/// What limits a floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Arithmetic.
    Compute,
    /// Device memory.
    Memory,
}

/// The least time an entry takes: the larger of its arithmetic at peak and its bytes at peak.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Floor {
    /// FLOPs at the machine's peak, in microseconds.
    pub compute_us: f64,
    /// Bytes read and written at the machine's peak, in microseconds.
    pub memory_us: f64,
    /// The larger of the two.
    pub floor_us: f64,
    /// Which one it is.
    pub bound: Bound,
}

/// Every machine known, in the order in which tables print them.
///
/// GPUs: dense tensor-core rate for bf16 (half of the sheet's rate with sparsity), plain FMA rate for f32, because
/// tensor cores would round f32 inputs to TF32.
pub const MACHINES: [Machine; 4] = [
    Machine {
        name: "H200 SXM",
        source: "NVIDIA H200 data sheet: 1,979 TFLOPS bf16 with sparsity, 67 TFLOPS f32, 4.8 TB/s",
        f32_flops_per_s: 67e12,
        bf16_flops_per_s: 989.5e12,
        memory_bytes_per_s: 4.8e12,
    },
    Machine {
        name: "H100 SXM",
        source: "NVIDIA H100 data sheet: 1,979 TFLOPS bf16 with sparsity, 67 TFLOPS f32, 3.35 TB/s",
        f32_flops_per_s: 67e12,
        bf16_flops_per_s: 989.5e12,
        memory_bytes_per_s: 3.35e12,
    },
    Machine {
        name: "2 cores Zen 4",
        source: "measured: one core 115 GFLOP/s f32 and 231 bf16 dot products, both reading 33 GB/s",
        f32_flops_per_s: 230e9,
        bf16_flops_per_s: 462e9,
        memory_bytes_per_s: 33e9,
    },
    Machine {
        name: "2 cores Sapphire Rapids",
        source: "measured: one core 186 GFLOP/s f32 FMA (bf16 dot products only 86, so widened); memory as Zen 4's, not measured alone",
        f32_flops_per_s: 372e9,
        bf16_flops_per_s: 372e9,
        memory_bytes_per_s: 33e9,
    },
];

impl Machine {
    /// Peak for elements of `dtype`, in FLOP/s.
    pub fn flops_per_s(&self, dtype: DType) -> f64 {
        match dtype {
            DType::F32 => self.f32_flops_per_s,
            // Narrower types are widened to it.
            _ => self.bf16_flops_per_s,
        }
    }

    /// The least time `entry` takes here on elements of `dtype`.
    pub fn floor(&self, entry: &Entry, dtype: DType) -> Floor {
        let bytes = entry.device_read_bytes as f64 + entry.device_write_bytes as f64;
        let compute_us = entry.flops as f64 / self.flops_per_s(dtype) * 1e6;
        let memory_us = bytes / self.memory_bytes_per_s * 1e6;
        let bound = if compute_us >= memory_us { Bound::Compute } else { Bound::Memory };
        Floor { compute_us, memory_us, floor_us: compute_us.max(memory_us), bound }
    }

    /// FLOPs per byte above which arithmetic is the limit.
    pub fn ridge_flops_per_byte(&self, dtype: DType) -> f64 {
        self.flops_per_s(dtype) / self.memory_bytes_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_larger_of_arithmetic_and_memory() {
        let machine = MACHINES[0];
        let flops = Entry { flops: 989_500_000_000_000, device_read_bytes: 4_800, ..Entry::default() };
        let floor = machine.floor(&flops, DType::Bf16);
        assert!((floor.floor_us - 1e6).abs() < 1e-3 && floor.bound == Bound::Compute, "{floor:?}");
        let bytes = Entry { device_read_bytes: 2_400_000, device_write_bytes: 2_400_000, ..Entry::default() };
        let floor = machine.floor(&bytes, DType::F32);
        assert!((floor.floor_us - 1.0).abs() < 1e-9 && floor.bound == Bound::Memory, "{floor:?}");
    }

    #[test]
    fn every_machine_names_its_source() {
        for m in MACHINES {
            assert!(!m.source.is_empty() && m.ridge_flops_per_byte(DType::F32) > 1.0, "{}", m.name);
        }
    }
}
