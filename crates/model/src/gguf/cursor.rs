//! Checked reading of a GGUF header: no byte outside the file, no length believed before it is compared with what is left.

use std::fmt::Display;
use std::ops::Range;

use super::value::{Value, ValueType};
use crate::error::ModelError;
use crate::source::Source;

/// Deepest nesting of arrays in metadata.
const MAX_DEPTH: usize = 4;
/// Most strings and nested arrays that one header may make us walk over.
const MAX_WALKED: u64 = 1 << 24;

/// A position in the header. Every read names the field, so that an error can.
pub(super) struct Cursor<'a> {
    source: &'a Source,
    pos: usize,
    walked: u64,
}

impl<'a> Cursor<'a> {
    pub fn new(source: &'a Source) -> Cursor<'a> {
        Cursor { source, pos: 0, walked: 0 }
    }

    pub fn pos(&self) -> usize {
        self.pos
    }

    pub fn remaining(&self) -> usize {
        self.source.len() - self.pos
    }

    pub fn bad(&self, field: &dyn Display, found: impl Display, supported: impl Display) -> ModelError {
        ModelError::bad(self.source.name(), field.to_string(), found, supported)
    }

    /// The next `n` bytes.
    pub fn take(&mut self, n: u64, field: &dyn Display) -> Result<Range<usize>, ModelError> {
        let left = self.remaining();
        match usize::try_from(n) {
            Ok(n) if n <= left => {
                self.pos += n;
                Ok(self.pos - n..self.pos)
            }
            _ => {
                let found = format!("{n} bytes at byte {}, where the file has {left} left", self.pos);
                Err(self.bad(field, found, "a complete file"))
            }
        }
    }

    fn array<const N: usize>(&mut self, field: &dyn Display) -> Result<[u8; N], ModelError> {
        let range = self.take(N as u64, field)?;
        let mut out = [0; N];
        out.copy_from_slice(&self.source[range]);
        Ok(out)
    }

    pub fn bytes4(&mut self, field: &dyn Display) -> Result<[u8; 4], ModelError> {
        self.array(field)
    }

    pub fn u32(&mut self, field: &dyn Display) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub fn u64(&mut self, field: &dyn Display) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A count of things that take at least `least_bytes` each: at most `limit`, and no more than the file could hold.
    pub fn count(&mut self, limit: u64, least_bytes: u64, field: &dyn Display) -> Result<usize, ModelError> {
        let n = self.u64(field)?;
        let fit = self.remaining() as u64 / least_bytes;
        if n > limit || n > fit {
            return Err(self.bad(
                field,
                n,
                format!("at most {} (limit {limit}, room for {fit})", limit.min(fit)),
            ));
        }
        // Both bounds are below usize::MAX on every supported target.
        Ok(n as usize)
    }

    /// A name of 1 to `limit` bytes of UTF-8.
    pub fn name(&mut self, limit: u64, field: &dyn Display) -> Result<&'a str, ModelError> {
        let len = self.u64(field)?;
        if len == 0 || len > limit {
            return Err(self.bad(field, format!("{len} bytes"), format!("1 to {limit} bytes")));
        }
        let range = self.take(len, field)?;
        std::str::from_utf8(&self.source[range])
            .map_err(|_| self.bad(field, "bytes that are not UTF-8", "UTF-8"))
    }

    fn value_type(&mut self, field: &dyn Display) -> Result<ValueType, ModelError> {
        let id = self.u32(field)?;
        ValueType::from_id(id)
            .ok_or_else(|| self.bad(field, format!("value type {id}"), "value types 0 to 12"))
    }

    /// A metadata value of any type; walks over it without storing its elements.
    pub fn value(&mut self, field: &dyn Display) -> Result<Value, ModelError> {
        let ty = self.value_type(field)?;
        match ty {
            ValueType::Array => {
                let elem = self.value_type(field)?;
                let count = self.u64(field)?;
                let start = self.pos;
                self.skip_elements(elem, count, 1, field)?;
                let count = usize::try_from(count).map_err(|_| self.bad(field, count, "fewer elements"))?;
                Ok(Value { ty, elem: Some(elem), count, bytes: start..self.pos })
            }
            ValueType::String => {
                let len = self.u64(field)?;
                let bytes = self.take(len, field)?;
                Ok(Value { ty, elem: None, count: 1, bytes })
            }
            scalar => {
                let size = scalar.size().unwrap_or_default() as u64;
                let bytes = self.take(size, field)?;
                if scalar == ValueType::Bool && self.source[bytes.start] > 1 {
                    return Err(self.bad(field, format!("boolean {}", self.source[bytes.start]), "0 or 1"));
                }
                Ok(Value { ty, elem: None, count: 1, bytes })
            }
        }
    }

    fn skip_elements(
        &mut self,
        elem: ValueType,
        count: u64,
        depth: usize,
        field: &dyn Display,
    ) -> Result<(), ModelError> {
        if depth > MAX_DEPTH {
            return Err(self.bad(
                field,
                format!("arrays nested {depth} deep"),
                format!("at most {MAX_DEPTH}"),
            ));
        }
        let least_bytes = match elem {
            ValueType::Array => 12,
            ValueType::String => 8,
            scalar => scalar.size().unwrap_or_default() as u64,
        };
        let fit = self.remaining() as u64 / least_bytes;
        if count > fit {
            return Err(self.bad(
                field,
                format!("array of {count} elements"),
                format!("at most the {fit} the file could hold"),
            ));
        }
        if let Some(size) = elem.size() {
            self.take(count * size as u64, field)?;
            return Ok(());
        }
        self.walked += count;
        if self.walked > MAX_WALKED {
            let found = format!("{} strings and arrays in the header", self.walked);
            return Err(self.bad(field, found, format!("at most {MAX_WALKED}")));
        }
        for _ in 0..count {
            if elem == ValueType::String {
                let len = self.u64(field)?;
                self.take(len, field)?;
            } else {
                let inner = self.value_type(field)?;
                let inner_count = self.u64(field)?;
                self.skip_elements(inner, inner_count, depth + 1, field)?;
            }
        }
        Ok(())
    }
}
