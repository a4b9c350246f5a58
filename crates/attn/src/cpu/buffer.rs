//! Starts of a call's buffers, whatever their element type.

use half::{bf16, f16};
use suanpan_base::{Buf, BufMut};

use super::element::{E4m3, E5m2, Int4Pair};

/// The start of a buffer of one of the element types.
#[derive(Clone, Copy)]
pub(crate) enum Src {
    F32(*const f32),
    Bf16(*const bf16),
    F16(*const f16),
    E4m3(*const E4m3),
    E5m2(*const E5m2),
    I8(*const i8),
    I4(*const Int4Pair),
}

/// The same, to be written.
#[derive(Clone, Copy)]
pub(crate) enum Dst {
    F32(*mut f32),
    Bf16(*mut bf16),
    F16(*mut f16),
}

impl Dst {
    pub fn of(buf: BufMut<'_>) -> Dst {
        match buf {
            BufMut::F32(x) => Dst::F32(x.as_mut_ptr()),
            BufMut::Bf16(x) => Dst::Bf16(x.as_mut_ptr()),
            BufMut::F16(x) => Dst::F16(x.as_mut_ptr()),
        }
    }

    /// Writes `row` from element `at` on, each number rounded to the nearest.
    ///
    /// # Safety
    /// A checked row that nobody else touches.
    pub unsafe fn write(self, at: usize, row: impl Iterator<Item = f32>) {
        // SAFETY: forwarded.
        unsafe {
            match self {
                Dst::F32(p) => row.enumerate().for_each(|(i, x)| *p.add(at + i) = x),
                Dst::Bf16(p) => row.enumerate().for_each(|(i, x)| *p.add(at + i) = bf16::from_f32(x)),
                Dst::F16(p) => row.enumerate().for_each(|(i, x)| *p.add(at + i) = f16::from_f32(x)),
            }
        }
    }
}

impl Src {
    pub fn of(buf: Buf<'_>) -> Src {
        match buf {
            Buf::F32(x) => Src::F32(x.as_ptr()),
            Buf::Bf16(x) => Src::Bf16(x.as_ptr()),
            Buf::F16(x) => Src::F16(x.as_ptr()),
            Buf::E4m3(x) => Src::E4m3(x.as_ptr().cast()),
            Buf::E5m2(x) => Src::E5m2(x.as_ptr().cast()),
            Buf::I8(x) => Src::I8(x.as_ptr()),
            Buf::I4(x) => Src::I4(x.as_ptr().cast()),
        }
    }

    /// The start as bytes.
    pub fn start(self) -> *const u8 {
        match self {
            Src::F32(p) => p.cast(),
            Src::Bf16(p) => p.cast(),
            Src::F16(p) => p.cast(),
            Src::E4m3(p) => p.cast(),
            Src::E5m2(p) => p.cast(),
            Src::I8(p) => p.cast(),
            Src::I4(p) => p.cast(),
        }
    }
}
