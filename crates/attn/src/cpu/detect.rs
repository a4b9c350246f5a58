//! Which instruction set the kernels use: asked of the processor once, or forced by a test. No environment variable is read.

use std::fmt;

use suanpan_base::BadArgument;

/// An instruction set that has an instance of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, any processor.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW and VL.
    Avx512,
    /// AArch64 Advanced SIMD.
    Neon,
}

impl Isa {
    /// Every instruction set, best last for each architecture.
    pub const ALL: [Isa; 4] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Neon];

    /// Short name, as records print it.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        }
    }

    /// True when this processor has dot products of bytes that go with it: VNNI beside AVX-512.
    fn has_integer_dots(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => is_x86_feature_detected!("avx512vnni"),
            _ => false,
        }
    }

    /// True when dot products of pairs of bf16 go with it and are worth it: AVX512_BF16, at twice the rate of f32 products.
    ///
    /// The processor's maker decides the rate: AMD's run one such instruction where they run one of f32, Intel's run half as many (measured on
    /// Xeon 6: 86 GFLOP/s for 186), for their fast bf16 lies in tiles. A probe by the clock would let bits depend on a busy moment.
    fn has_fast_bf16_dots(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => is_x86_feature_detected!("avx512bf16") && made_by_amd(),
            _ => false,
        }
    }

    /// True when this processor can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.is_available()
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
}

/// The maker's name, as the processor says it.
#[cfg(target_arch = "x86_64")]
fn made_by_amd() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

/// The processor as a plan sees it: instruction set and threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    isa: Isa,
    /// The instruction set has dot products of bytes beside it.
    integer_dots: bool,
    /// Pairs of bf16 are multiplied as such.
    bf16_dots: bool,
    threads: usize,
}

impl Machine {
    /// The best available instruction set, with up to `threads` tasks at once (at least 1).
    pub fn detect(threads: usize) -> Machine {
        let isa = Isa::ALL.into_iter().rev().find(|i| i.is_available()).unwrap_or(Isa::Portable);
        Machine::of(isa, threads)
    }

    fn of(isa: Isa, threads: usize) -> Machine {
        Machine {
            isa,
            integer_dots: isa.has_integer_dots(),
            bf16_dots: isa.has_fast_bf16_dots(),
            threads: threads.clamp(1, MAX_THREADS),
        }
    }

    /// A given instruction set; refused where this processor lacks it.
    pub fn forced(isa: Isa, threads: usize) -> Result<Machine, BadArgument> {
        if !isa.is_available() {
            let have: Vec<_> = Isa::ALL.into_iter().filter(|i| i.is_available()).map(Isa::name).collect();
            return Err(BadArgument::new("machine", "isa", isa.name(), have.join(", ")));
        }
        Ok(Machine::of(isa, threads))
    }

    /// The same without dot products of bytes, as if the processor lacked them.
    pub fn without_integer_dots(self) -> Machine {
        Machine { integer_dots: false, ..self }
    }

    /// True when int8 and int4 keys and values may meet their queries as bytes.
    pub fn integer_dots(&self) -> bool {
        self.integer_dots
    }

    /// The same without dot products of bf16: bf16 is widened, and every product is one of f32.
    pub fn without_bf16_dots(self) -> Machine {
        Machine { bf16_dots: false, ..self }
    }

    /// True when bf16 queries, keys and values are multiplied as bf16 and weights are rounded to it (sums stay f32).
    pub fn bf16_dots(&self) -> bool {
        self.bf16_dots
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Tasks at once.
    pub fn threads(&self) -> usize {
        self.threads
    }
}

/// More threads than this are not used by one call.
const MAX_THREADS: usize = 1024;

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dots = match (self.integer_dots, self.bf16_dots) {
            (true, true) => " with VNNI and bf16 dots",
            (true, false) => " with VNNI",
            (false, true) => " with bf16 dots",
            (false, false) => "",
        };
        write!(f, "cpu {}{dots}, {} threads", self.isa.name(), self.threads)
    }
}
