//! Writes GGUF bytes field by field, right or wrong.

/// A GGUF file under construction.
#[derive(Clone)]
pub struct GgufBytes(pub Vec<u8>);

pub const U32: u32 = 4;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const F32_TENSOR: u32 = 0;

impl GgufBytes {
    /// Magic, version 3, counts.
    pub fn header(tensors: u64, keys: u64) -> GgufBytes {
        GgufBytes(b"GGUF".to_vec()).u32(3).u64(tensors).u64(keys)
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn u32(self, n: u32) -> Self {
        self.bytes(&n.to_le_bytes())
    }

    pub fn u64(self, n: u64) -> Self {
        self.bytes(&n.to_le_bytes())
    }

    pub fn string(self, text: &[u8]) -> Self {
        self.u64(text.len() as u64).bytes(text)
    }

    pub fn key_u32(self, key: &str, value: u32) -> Self {
        self.string(key.as_bytes()).u32(U32).u32(value)
    }

    pub fn key_string(self, key: &str, value: &str) -> Self {
        self.string(key.as_bytes()).u32(STRING).string(value.as_bytes())
    }

    /// One entry of the tensor table.
    pub fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let start = self.string(name.as_bytes()).u32(dims.len() as u32);
        dims.iter().fold(start, |f, &d| f.u64(d)).u32(kind).u64(offset)
    }

    /// Pads to the alignment and appends `n` bytes of data.
    pub fn data(mut self, n: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + n, 0);
        self
    }
}
