//! Element types of activations and of the KV cache, and typed views of flat buffers.

use half::bf16;
use std::fmt;
use std::str::FromStr;

use crate::error::BadArgument;

/// Element type of a query, an output or a stored key or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16: the upper half of binary32.
    Bf16,
}

impl DType {
    /// Every type, in the order in which tables print them.
    pub const ALL: [DType; 2] = [DType::F32, DType::Bf16];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 => 2,
        }
    }

    /// The short name used in options and records.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
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
            _ => Err(BadArgument::new("dtype", "dtype", s, "f32 (float32), bf16 (bfloat16)")),
        }
    }
}

/// A read-only flat buffer of one of the element types.
#[derive(Clone, Copy, Debug)]
pub enum Buf<'a> {
    /// binary32 elements.
    F32(&'a [f32]),
    /// bfloat16 elements.
    Bf16(&'a [bf16]),
}

impl<'a> Buf<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Buf::F32(x) => x.len(),
            Buf::Bf16(x) => x.len(),
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
        }
    }

    /// Element `i`, widened. Panics when `i` is out of range.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Buf::F32(x) => x[i],
            Buf::Bf16(x) => x[i].to_f32(),
        }
    }
}

/// A writable flat buffer of one of the element types.
#[derive(Debug)]
pub enum BufMut<'a> {
    /// binary32 elements.
    F32(&'a mut [f32]),
    /// bfloat16 elements.
    Bf16(&'a mut [bf16]),
}

impl BufMut<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            BufMut::F32(x) => x.len(),
            BufMut::Bf16(x) => x.len(),
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
}
