//! Element types of activations and of the KV cache, and typed views of flat buffers.

use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

use crate::codes;
use crate::error::BadArgument;

/// Element type of a query, an output or a stored key or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16: the upper half of binary32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 8-bit floating point, 4 exponent and 3 mantissa bits, no infinity (OCP E4M3, "e4m3fn").
    E4m3,
    /// 8-bit floating point, 5 exponent and 2 mantissa bits (OCP E5M2).
    E5m2,
    /// Signed 8-bit integers.
    I8,
    /// Signed 4-bit integers in two's complement, two a byte: element 2i in the low half of byte i, 2i + 1 in the high half.
    I4,
}

impl DType {
    /// Every type, in the order in which tables print them.
    pub const ALL: [DType; 7] =
        [DType::F32, DType::Bf16, DType::F16, DType::E4m3, DType::E5m2, DType::I8, DType::I4];

    /// The types that a cache keeps rows in as they come, without choosing scales.
    pub const UNSCALED: [DType; 2] = [DType::F32, DType::Bf16];

    /// Bits of one element.
    pub const fn bits(self) -> usize {
        match self {
            DType::F32 => 32,
            DType::Bf16 | DType::F16 => 16,
            DType::E4m3 | DType::E5m2 | DType::I8 => 8,
            DType::I4 => 4,
        }
    }

    /// Bytes of a run of `elements` elements that starts at a byte; a last half byte counts whole.
    pub const fn bytes_of(self, elements: usize) -> usize {
        match self {
            DType::I4 => elements.div_ceil(2),
            _ => elements * (self.bits() / 8),
        }
    }

    /// True for types whose elements mean little without a scale: 8 bits and fewer.
    pub const fn is_code(self) -> bool {
        self.bits() <= 8
    }

    /// The short name used in options and records.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::E4m3 => "fp8_e4m3",
            DType::E5m2 => "fp8_e5m2",
            DType::I8 => "int8",
            DType::I4 => "int4",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = BadArgument;

    fn from_str(s: &str) -> Result<Self, BadArgument> {
        match s {
            "f32" | "float32" | "float" => Ok(DType::F32),
            "bf16" | "bfloat16" => Ok(DType::Bf16),
            "f16" | "float16" | "half" => Ok(DType::F16),
            "fp8_e4m3" => Ok(DType::E4m3),
            "fp8_e5m2" => Ok(DType::E5m2),
            "int8" => Ok(DType::I8),
            "int4" => Ok(DType::I4),
            _ => Err(BadArgument::new("dtype", "dtype", s, "f32, bf16, f16, fp8_e4m3, fp8_e5m2, int8, int4")),
        }
    }
}

/// Which stored keys or values share one f32 scale: an element is its code times the scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleGrain {
    /// No scales: codes are the elements.
    #[default]
    None,
    /// One scale for all keys and one for all values of a layer.
    Tensor,
    /// One a kv head.
    Head,
    /// One a token and kv head.
    Token,
    /// One a page and kv head.
    Page,
}

impl ScaleGrain {
    /// Every grain.
    pub const ALL: [ScaleGrain; 5] =
        [ScaleGrain::None, ScaleGrain::Tensor, ScaleGrain::Head, ScaleGrain::Token, ScaleGrain::Page];
}

impl fmt::Display for ScaleGrain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ScaleGrain::None => "no scales",
            ScaleGrain::Tensor => "a scale a tensor",
            ScaleGrain::Head => "a scale a kv head",
            ScaleGrain::Token => "a scale a token and kv head",
            ScaleGrain::Page => "a scale a page and kv head",
        })
    }
}

/// A read-only flat buffer of one of the element types.
#[derive(Clone, Copy, Debug)]
pub enum Buf<'a> {
    /// binary32 elements.
    F32(&'a [f32]),
    /// bfloat16 elements.
    Bf16(&'a [bf16]),
    /// binary16 elements.
    F16(&'a [f16]),
    /// FP8 E4M3 codes.
    E4m3(&'a [u8]),
    /// FP8 E5M2 codes.
    E5m2(&'a [u8]),
    /// 8-bit integers.
    I8(&'a [i8]),
    /// Pairs of 4-bit integers: twice as many elements as bytes.
    I4(&'a [u8]),
}

impl<'a> Buf<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Buf::F32(x) => x.len(),
            Buf::Bf16(x) => x.len(),
            Buf::F16(x) => x.len(),
            Buf::E4m3(x) | Buf::E5m2(x) => x.len(),
            Buf::I8(x) => x.len(),
            Buf::I4(x) => 2 * x.len(),
        }
    }

    /// True when the buffer holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type of the buffer.
    pub fn dtype(&self) -> DType {
        match self {
            Buf::F32(_) => DType::F32,
            Buf::Bf16(_) => DType::Bf16,
            Buf::F16(_) => DType::F16,
            Buf::E4m3(_) => DType::E4m3,
            Buf::E5m2(_) => DType::E5m2,
            Buf::I8(_) => DType::I8,
            Buf::I4(_) => DType::I4,
        }
    }

    /// Element `i`, widened, without its scale. Panics when `i` is out of range.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Buf::F32(x) => x[i],
            Buf::Bf16(x) => x[i].to_f32(),
            Buf::F16(x) => x[i].to_f32(),
            Buf::E4m3(x) => codes::e4m3_to_f32(x[i]),
            Buf::E5m2(x) => codes::e5m2_to_f32(x[i]),
            Buf::I8(x) => f32::from(x[i]),
            Buf::I4(x) => f32::from(codes::int4(x, i)),
        }
    }
}

/// A writable flat buffer of one of the types that kernels write.
#[derive(Debug)]
pub enum BufMut<'a> {
    /// binary32 elements.
    F32(&'a mut [f32]),
    /// bfloat16 elements.
    Bf16(&'a mut [bf16]),
    /// binary16 elements.
    F16(&'a mut [f16]),
}

impl BufMut<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            BufMut::F32(x) => x.len(),
            BufMut::Bf16(x) => x.len(),
            BufMut::F16(x) => x.len(),
        }
    }

    /// True when the buffer holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type of the buffer.
    pub fn dtype(&self) -> DType {
        match self {
            BufMut::F32(_) => DType::F32,
            BufMut::Bf16(_) => DType::Bf16,
            BufMut::F16(_) => DType::F16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_unknown_names_are_refused() {
        for d in DType::ALL {
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
        }
        let e = "f8".parse::<DType>().unwrap_err().to_string();
        assert!(e.contains("f8") && e.contains("bf16"), "{e}");
    }

    #[test]
    fn two_int4_elements_share_a_byte() {
        let buf = Buf::I4(&[0x8f, 0x70]);
        assert_eq!((buf.len(), buf.dtype(), DType::I4.bytes_of(4)), (4, DType::I4, 2));
        assert_eq!([0, 1, 2, 3].map(|i| buf.get(i)), [-1.0, -8.0, 0.0, 7.0]);
        assert_eq!((DType::I4.bytes_of(5), DType::F16.bytes_of(5)), (3, 10));
    }
}
