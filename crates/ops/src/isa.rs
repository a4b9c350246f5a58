//! Which instruction set the kernels of this process use: chosen once by what the machine reports, forced in tests.

use std::sync::OnceLock;

use suanpan_base::BadArgument;

/// An instruction set with a kernel of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, any machine.
    Portable,
    /// 256-bit with FMA; integer dots by `vpmaddubsw`.
    Avx2,
    /// AVX2 with the 256-bit `vpdpbusd`.
    AvxVnni,
    /// 512-bit with `vpdpbusd` (F, BW, DQ, VL, VNNI).
    Avx512Vnni,
    /// AArch64 with the dot-product extension.
    Neon,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::AvxVnni, Isa::Avx512Vnni, Isa::Neon];

    /// The name that `doctor` and bench records print.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Neon => "neon-dotprod",
        }
    }

    /// True when this machine can run kernels of this instruction set.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => has_avx2() && std::arch::is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => has_avx512(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[allow(unreachable_patterns)] // the arms above depend on the architecture
            _ => false,
        }
    }

    /// The widest available instruction set; asked of the machine once.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            Isa::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
        })
    }

    /// `self` when this machine has it; a refusal that names what it has otherwise.
    pub fn require(self) -> Result<Isa, BadArgument> {
        if self.is_available() {
            return Ok(self);
        }
        let have: Vec<&str> = Isa::ALL.into_iter().filter(|i| i.is_available()).map(Isa::name).collect();
        Err(BadArgument::new("ops", "isa", self.name(), have.join(", ")))
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx2") && has!("fma") && has!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has_avx2()
        && has!("avx512f")
        && has!("avx512bw")
        && has!("avx512dq")
        && has!("avx512vl")
        && has!("avx512vnni")
}

/// Compiles one plain Rust body once per vector width and picks by [`Isa`]: the body's own order of operations decides every bit,
/// so all instruction sets give the same result.
macro_rules! per_isa {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        fn $name(isa: $crate::isa::Isa, $($arg: $ty),*) {
            #[inline(always)]
            fn body($($arg: $ty),*) $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) {
                body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) {
                body($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx512Vnni => {
                    debug_assert!(isa.is_available());
                    // SAFETY: an `Isa` in use has passed `is_available`, which asked for these features.
                    unsafe { avx512($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx2 | $crate::isa::Isa::AvxVnni => {
                    debug_assert!(isa.is_available());
                    // SAFETY: an `Isa` in use has passed `is_available`, which asked for these features.
                    unsafe { avx2($($arg),*) }
                }
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use per_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_instruction_set_is_available_and_a_missing_one_is_refused_by_name() {
        assert!(Isa::best().is_available());
        assert_eq!(Isa::Portable.require().unwrap(), Isa::Portable);
        for isa in Isa::ALL {
            if !isa.is_available() {
                let e = isa.require().unwrap_err().to_string();
                assert!(e.contains(isa.name()) && e.contains("portable"), "{e}");
            }
        }
    }
}
