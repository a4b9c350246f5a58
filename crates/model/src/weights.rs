//! The weights of a model: named roles, each a tensor that keeps its file's format in shared memory.

use std::ops::Range;

use suanpan_ops::{Weight, WeightFormat};

use crate::error::ModelError;
use crate::source::Source;

/// A matrix `[rows = out features, cols = in features]` in its file's own format.
///
/// The bytes of float formats start at a multiple of the element's size.
#[derive(Clone, Debug)]
pub struct Tensor {
    source: Source,
    range: Range<usize>,
    format: WeightFormat,
    rows: usize,
    cols: usize,
}

/// Weights of the whole transformer.
#[derive(Clone, Debug)]
pub struct Weights {
    /// `[vocab_size, hidden_size]`.
    pub embed: Tensor,
    /// One entry for each layer.
    pub layers: Vec<LayerWeights>,
    /// `[hidden_size]`.
    pub final_norm: Vec<f32>,
    /// `[vocab_size, hidden_size]`; shares the embedding's bytes when tied.
    pub lm_head: Tensor,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[hidden_size]`, before attention.
    pub attn_norm: Vec<f32>,
    /// `[num_q_heads * head_dim_qk, hidden_size]`.
    pub q: Tensor,
    /// `[num_kv_heads * head_dim_qk, hidden_size]`.
    pub k: Tensor,
    /// `[num_kv_heads * head_dim_v, hidden_size]`.
    pub v: Tensor,
    /// `[hidden_size, num_q_heads * head_dim_v]`.
    pub o: Tensor,
    /// The MLP, if the layer has one.
    pub ffn: Option<Ffn>,
}

/// Weights of a gated MLP: `down(silu(gate x) * up x)`.
#[derive(Clone, Debug)]
pub struct Ffn {
    /// `[hidden_size]`, before the MLP.
    pub norm: Vec<f32>,
    /// `[intermediate_size, hidden_size]`.
    pub gate: Tensor,
    /// `[intermediate_size, hidden_size]`.
    pub up: Tensor,
    /// `[hidden_size, intermediate_size]`.
    pub down: Tensor,
}

impl Tensor {
    /// A view of `source[range]` as `rows` × `cols` in `format`. `name` is the tensor's name in errors.
    ///
    /// Refuses ranges outside the source, sizes that do not multiply out and columns that do not fill whole blocks.
    pub fn new(
        source: &Source,
        name: &str,
        range: Range<usize>,
        format: WeightFormat,
        rows: usize,
        cols: usize,
    ) -> Result<Tensor, ModelError> {
        let refuse =
            |found: String, supported: String| ModelError::bad(source.name(), name, found, supported);
        if rows == 0 || cols == 0 {
            return Err(refuse(format!("shape [{rows}, {cols}]"), "no dimension of 0".into()));
        }
        let Some(data) = source.get(range.clone()) else {
            let found = format!("bytes {} to {}", range.start, range.end);
            return Err(refuse(found, format!("bytes inside the file of {} bytes", source.len())));
        };
        Weight::new(format, rows, cols, data)
            .map_err(|e| refuse(format!("{} {}", e.field, e.asked), e.supported))?;
        let tensor = Tensor { source: source.clone(), range, format, rows, cols };
        Ok(tensor.aligned())
    }

    /// A tensor over bytes made in code.
    pub fn from_bytes(
        name: &str,
        bytes: Vec<u8>,
        format: WeightFormat,
        rows: usize,
        cols: usize,
    ) -> Result<Tensor, ModelError> {
        let len = bytes.len();
        Tensor::new(&Source::owned(name, bytes), name, 0..len, format, rows, cols)
    }

    /// A binary32 tensor made in code; `values` holds `rows * cols` elements.
    pub fn from_f32(name: &str, values: &[f32], rows: usize, cols: usize) -> Result<Tensor, ModelError> {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor::from_bytes(name, bytes, WeightFormat::F32, rows, cols)
    }

    /// Kernels read float formats as typed slices. A file may place a tensor at any byte (safetensors does not align), so
    /// a crooked one is copied once, here; a straight one stays in the mapping.
    fn aligned(self) -> Tensor {
        let align = match self.format {
            WeightFormat::F32 => 4,
            WeightFormat::F16 | WeightFormat::Bf16 => 2,
            _ => 1,
        };
        if (self.bytes().as_ptr() as usize).is_multiple_of(align) {
            return self;
        }
        // The allocator may hand out a byte buffer at any address: leave room to start at an aligned one.
        let len = self.range.len();
        let mut copy = vec![0u8; len + align];
        let start = copy.as_ptr().align_offset(align);
        copy[start..start + len].copy_from_slice(self.bytes());
        Tensor { source: Source::owned(self.source.name(), copy), range: start..start + len, ..self }
    }

    /// The view that kernels take.
    pub fn weight(&self) -> Weight<'_> {
        Weight::new(self.format, self.rows, self.cols, self.bytes())
            .expect("checked when the tensor was made")
    }

    /// Out features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// In features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The file's format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// The raw bytes, in the file's format.
    pub fn bytes(&self) -> &[u8] {
        &self.source[self.range.clone()]
    }

    /// Whether both are views of the same bytes (a tied head costs nothing).
    pub fn same_bytes(&self, other: &Tensor) -> bool {
        std::ptr::eq(self.bytes(), other.bytes())
    }

    /// All elements widened to binary32, row by row.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        let weight = self.weight();
        for (r, row) in out.chunks_exact_mut(self.cols).enumerate() {
            weight.dequantize_row(r, row);
        }
        out
    }
}
