//! Metadata values of a GGUF file: a type and the bytes it lies in, decoded when asked for.

use std::ops::Range;

use super::Gguf;
use crate::error::ModelError;

/// Type of a metadata value, with the numbers of the GGUF specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ValueType {
    /// 8-bit unsigned.
    U8 = 0,
    /// 8-bit signed.
    I8 = 1,
    /// 16-bit unsigned.
    U16 = 2,
    /// 16-bit signed.
    I16 = 3,
    /// 32-bit unsigned.
    U32 = 4,
    /// 32-bit signed.
    I32 = 5,
    /// binary32.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// Length and UTF-8 bytes.
    String = 8,
    /// Element type, count, elements.
    Array = 9,
    /// 64-bit unsigned.
    U64 = 10,
    /// 64-bit signed.
    I64 = 11,
    /// binary64.
    F64 = 12,
}

impl ValueType {
    /// Every type, at the index of its number.
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    /// The type of number `id`.
    pub fn from_id(id: u32) -> Option<ValueType> {
        ValueType::ALL.get(id as usize).copied()
    }

    /// Bytes of one value; `None` for strings and arrays.
    pub fn size(self) -> Option<usize> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::String | ValueType::Array => None,
        }
    }
}

/// Where a metadata value lies. For an array, `elem` is its element type and `bytes` its elements.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub ty: ValueType,
    pub elem: Option<ValueType>,
    pub count: usize,
    pub bytes: Range<usize>,
}

impl Value {
    fn describe(&self) -> String {
        match self.elem {
            Some(elem) => format!("array of {} {elem:?}", self.count),
            None => format!("{:?}", self.ty),
        }
    }
}

/// Little-endian unsigned integer of 1 to 8 bytes.
fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |acc, &b| acc << 8 | u64::from(b))
}

fn integer(ty: ValueType, bytes: &[u8]) -> Option<i128> {
    let raw = little_endian(bytes);
    Some(match ty {
        ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => i128::from(raw),
        ValueType::I8 => i128::from(raw as u8 as i8),
        ValueType::I16 => i128::from(raw as u16 as i16),
        ValueType::I32 => i128::from(raw as u32 as i32),
        ValueType::I64 => i128::from(raw as i64),
        _ => return None,
    })
}

fn real(ty: ValueType, bytes: &[u8]) -> Option<f64> {
    match ty {
        ValueType::F32 => Some(f64::from(f32::from_bits(little_endian(bytes) as u32))),
        ValueType::F64 => Some(f64::from_bits(little_endian(bytes))),
        _ => None,
    }
}

/// Typed reading of the metadata. `Ok(None)`: the key is absent. A value of another type is an error naming the key.
impl Gguf {
    fn refuse<T>(&self, key: &str, value: &Value, supported: &str) -> Result<T, ModelError> {
        Err(self.bad(format!("metadata {key}"), value.describe(), supported))
    }

    fn scalar<T>(
        &self,
        key: &str,
        supported: &str,
        decode: impl Fn(ValueType, &[u8]) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        match decode(value.ty, &self.source[value.bytes.clone()]) {
            Some(x) => Ok(Some(x)),
            None => self.refuse(key, value, supported),
        }
    }

    fn array<'a, T>(
        &'a self,
        key: &str,
        supported: &str,
        decode: impl Fn(ValueType, &'a [u8]) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let Some((elem, size)) = value.elem.and_then(|e| Some((e, e.size()?))) else {
            return self.refuse(key, value, supported);
        };
        let bytes = &self.source[value.bytes.clone()];
        match bytes.chunks_exact(size).map(|b| decode(elem, b)).collect() {
            Some(list) => Ok(Some(list)),
            None => self.refuse(key, value, supported),
        }
    }

    /// A non-negative integer of any width.
    pub fn uint(&self, key: &str) -> Result<Option<u64>, ModelError> {
        self.scalar(key, "a non-negative integer", |ty, b| integer(ty, b)?.try_into().ok())
    }

    /// A non-negative integer that may be given once, or once for each layer with the same value throughout.
    pub fn uniform_uint(&self, key: &str) -> Result<Option<u64>, ModelError> {
        if self.metadata.get(key).is_none_or(|v| v.ty != ValueType::Array) {
            return self.uint(key);
        }
        let list = self.ints(key)?.unwrap_or_default();
        match list.first() {
            Some(&first) if first >= 0 && list.iter().all(|&x| x == first) => Ok(Some(first as u64)),
            _ => Err(self.bad(
                format!("metadata {key}"),
                format!("{list:?}"),
                "the same value for every layer",
            )),
        }
    }

    /// A floating-point number.
    pub fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.scalar(key, "a floating-point number", real)
    }

    /// A boolean.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.scalar(key, "a boolean", |ty, b| (ty == ValueType::Bool).then(|| b[0] != 0))
    }

    /// A UTF-8 string.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ModelError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        if value.ty != ValueType::String {
            return self.refuse(key, value, "a string");
        }
        match std::str::from_utf8(&self.source[value.bytes.clone()]) {
            Ok(text) => Ok(Some(text)),
            Err(e) => {
                Err(self.bad(format!("metadata {key}"), format!("bytes that are not UTF-8 ({e})"), "UTF-8"))
            }
        }
    }

    /// An array of integers of any width that fit i64.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        self.array(key, "an array of integers", |ty, b| integer(ty, b)?.try_into().ok())
    }

    /// An array of floating-point numbers.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        self.array(key, "an array of floating-point numbers", |ty, b| real(ty, b).map(|x| x as f32))
    }

    /// An array of UTF-8 strings.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        if value.elem != Some(ValueType::String) {
            return self.refuse(key, value, "an array of strings");
        }
        let mut rest = &self.source[value.bytes.clone()];
        let mut list = Vec::with_capacity(value.count);
        for i in 0..value.count {
            // The walk when the file was opened proved that every length stays inside the array.
            let text = rest.split_at_checked(8).and_then(|(len, tail)| {
                let (text, tail) = tail.split_at_checked(usize::try_from(little_endian(len)).ok()?)?;
                rest = tail;
                std::str::from_utf8(text).ok()
            });
            let Some(text) = text else {
                return Err(self.bad(format!("metadata {key}[{i}]"), "bytes that are not UTF-8", "UTF-8"));
            };
            list.push(text);
        }
        Ok(Some(list))
    }
}
