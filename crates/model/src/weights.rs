//! The weights of a model: named roles, each a tensor that keeps its file's format in shared memory.

use std::ops::Range;
use std::sync::Arc;

use suanpan_ops::{Scales, Weight, WeightFormat};

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
    scales: Option<ScaleGrid>,
}

/// Scales beside a matrix, one a block of elements.
#[derive(Clone, Debug)]
struct ScaleGrid {
    data: Arc<[f32]>,
    block_rows: usize,
    block_cols: usize,
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

/// A product with its bias, if it has one.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[out features, in features]`.
    pub weight: Tensor,
    /// `[out features]`.
    pub bias: Option<Vec<f32>>,
}

impl ScaleGrid {
    fn view(&self) -> Scales<'_> {
        Scales { data: &self.data, block_rows: self.block_rows, block_cols: self.block_cols }
    }
}

impl From<Tensor> for Linear {
    fn from(weight: Tensor) -> Linear {
        Linear { weight, bias: None }
    }
}

/// Weights of one layer. What the model's family does not have is `None`.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[hidden_size]`, before attention.
    pub attn_norm: Vec<f32>,
    /// `[num_q_heads * head_dim_qk, hidden_size]`; of latent attention `[num_q_heads * (nope_dim + rotary_dim), hidden_size or q_rank]`.
    pub q: Linear,
    /// `[num_kv_heads * head_dim_qk, hidden_size]`; of latent attention what makes the latent elements, `[head_dim_v, hidden_size]`.
    pub k: Linear,
    /// Where values come from.
    pub v: Values,
    /// `[hidden_size, o_cols]`.
    pub o: Linear,
    /// `[head_dim_qk]` each: norms of q's and k's heads.
    pub qk_norms: Option<[Vec<f32>; 2]>,
    /// `[num_q_heads]`: logits that join the softmax.
    pub sinks: Option<Vec<f32>>,
    /// `[hidden_size]`, after attention's output.
    pub post_attn_norm: Option<Vec<f32>>,
    /// The MLP, if the layer has one.
    pub ffn: Option<Ffn>,
}

/// Where values come from.
#[derive(Clone, Debug)]
pub enum Values {
    /// A product of the stream: `[num_kv_heads * head_dim_v, hidden_size]`.
    Own(Linear),
    /// They lie in the keys, which are latent.
    InKeys(Box<Latent>),
}

/// What latent attention has beside q, k and o.
#[derive(Clone, Debug)]
pub struct Latent {
    /// `[q_rank, hidden_size]` and its norm `[q_rank]`: what queries are made from, if not the stream.
    pub q_down: Option<(Linear, Vec<f32>)>,
    /// `[rotary_dim, hidden_size]`: the rotated part of a key.
    pub k_rope: Linear,
    /// `[head_dim_v]`: norm of the latent elements.
    pub norm: Vec<f32>,
    /// `[head_dim_v, nope_dim]` a head: from a query to what it is multiplied with in the latent (the key's product, transposed).
    pub q_up: Vec<Linear>,
    /// `[v_dim, head_dim_v]` a head: from the latent that attention gives to the head's output.
    pub v_up: Vec<Linear>,
}

/// The second half of a layer.
#[derive(Clone, Debug)]
pub struct Ffn {
    /// `[hidden_size]`, before the MLP.
    pub norm: Vec<f32>,
    /// `[hidden_size]`, after it.
    pub post_norm: Option<Vec<f32>>,
    /// One MLP, or a choice of several.
    pub mlp: Mlp,
}

/// One MLP, or experts.
#[derive(Clone, Debug)]
pub enum Mlp {
    /// The same for every token.
    Dense(Box<Gated>),
    /// A few of many for each token.
    Experts {
        /// `[experts, hidden_size]`.
        router: Linear,
        /// The experts, all of one shape.
        experts: Vec<Gated>,
        /// What every token uses beside them.
        shared: Option<Box<Gated>>,
    },
}

/// Weights of a gated MLP: `down(activation(gate x, up x))`.
#[derive(Clone, Debug)]
pub struct Gated {
    /// `[intermediate_size, hidden_size]`.
    pub gate: Linear,
    /// `[intermediate_size, hidden_size]`.
    pub up: Linear,
    /// `[hidden_size, intermediate_size]`.
    pub down: Linear,
}

impl LayerWeights {
    /// Every product with the name of its role.
    pub fn linears(&self) -> impl Iterator<Item = (String, &Linear)> {
        let attention = [("q", &self.q), ("k", &self.k), ("o", &self.o)];
        let attention = attention.into_iter().map(|(role, l)| (role.to_string(), l));
        attention.chain(self.v.linears()).chain(self.ffn.iter().flat_map(|f| f.mlp.linears()))
    }

    /// Every vector that is not a bias.
    pub fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        let ffn = self.ffn.iter().flat_map(|f| std::iter::once(&f.norm).chain(&f.post_norm));
        std::iter::once(&self.attn_norm)
            .chain(self.qk_norms.iter().flatten())
            .chain(self.v.vectors())
            .chain(&self.sinks)
            .chain(&self.post_attn_norm)
            .chain(ffn)
    }
}

impl Gated {
    fn roles(&self) -> [(&'static str, &Linear); 3] {
        [("gate", &self.gate), ("up", &self.up), ("down", &self.down)]
    }
}

impl Values {
    /// Every product with the name of its role.
    fn linears(&self) -> impl Iterator<Item = (String, &Linear)> {
        let (own, latent) = match self {
            Values::Own(v) => (Some(v), None),
            Values::InKeys(latent) => (None, Some(&**latent)),
        };
        let up = |role: &'static str, all: fn(&Latent) -> &Vec<Linear>| {
            let heads = latent.into_iter().flat_map(move |l| all(l).iter().enumerate());
            heads.map(move |(h, l)| (format!("head {h} {role}"), l))
        };
        let down = latent.into_iter().flat_map(|l| {
            let q_down = l.q_down.iter().map(|(linear, _)| ("q_down".to_string(), linear));
            q_down.chain([("k_rope".to_string(), &l.k_rope)])
        });
        let own = own.into_iter().map(|v| ("v".to_string(), v));
        own.chain(down).chain(up("q_up", |l| &l.q_up)).chain(up("v_up", |l| &l.v_up))
    }

    /// Every vector that is not a bias.
    fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        let latent = match self {
            Values::Own(_) => None,
            Values::InKeys(latent) => Some(latent),
        };
        latent.into_iter().flat_map(|l| l.q_down.iter().map(|(_, norm)| norm).chain([&l.norm]))
    }
}

impl Mlp {
    /// Every product with the name of its role.
    pub fn linears(&self) -> impl Iterator<Item = (String, &Linear)> {
        let (router, all, shared) = match self {
            Mlp::Dense(gated) => (None, std::slice::from_ref(&**gated), None),
            Mlp::Experts { router, experts, shared } => (Some(router), experts.as_slice(), shared.as_deref()),
        };
        let beside = shared.into_iter().flat_map(Gated::roles).map(|(role, l)| (format!("shared {role}"), l));
        let many = router.is_some();
        let each = all.iter().enumerate().flat_map(move |(e, g)| {
            let name = move |role: &str| if many { format!("expert {e} {role}") } else { role.to_string() };
            g.roles().map(|(role, l)| (name(role), l))
        });
        router.into_iter().map(|r| ("router".to_string(), r)).chain(each).chain(beside)
    }
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
        let tensor = Tensor { source: source.clone(), range, format, rows, cols, scales: None };
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

    /// The same matrix, each element times the scale of its block of `block_rows` x `block_cols`; `data`: `[rows / block_rows, cols /
    /// block_cols]`, both rounded up.
    pub fn with_scales(
        self,
        data: Vec<f32>,
        block_rows: usize,
        block_cols: usize,
    ) -> Result<Tensor, ModelError> {
        let grid = ScaleGrid { data: data.into(), block_rows, block_cols };
        self.weight().with_scales(grid.view())?;
        Ok(Tensor { scales: Some(grid), ..self })
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

    /// Rows `rows` of the same bytes. `None` where they cut a block of scales.
    ///
    /// Panics when they are not inside: callers have checked shapes.
    pub fn slice_rows(&self, rows: Range<usize>) -> Option<Tensor> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let row_bytes = self.range.len() / self.rows;
        let range = self.range.start + rows.start * row_bytes..self.range.start + rows.end * row_bytes;
        let scales = match &self.scales {
            None => None,
            Some(grid) => {
                let whole = |row: usize| row.is_multiple_of(grid.block_rows) || row == self.rows;
                if !whole(rows.start) || !whole(rows.end) {
                    return None;
                }
                let per_row = self.cols.div_ceil(grid.block_cols);
                let first = rows.start / grid.block_rows * per_row;
                let data = &grid.data[first..rows.end.div_ceil(grid.block_rows) * per_row];
                Some(ScaleGrid { data: data.into(), ..*grid })
            }
        };
        Some(Tensor { source: self.source.clone(), range, rows: rows.len(), scales, ..*self })
    }

    /// A copy of rows `first`, `first + 2`, …, `count` of them.
    pub(crate) fn every_second_row(&self, first: usize, count: usize) -> Result<Tensor, ModelError> {
        let rows = (0..count).flat_map(|i| self.weight().row(first + 2 * i)).copied().collect();
        Tensor::from_bytes(self.source.name(), rows, self.format, count, self.cols)
    }

    /// A copy in which each of `count` stacked matrices of plain floats is transposed.
    pub(crate) fn transposed(&self, count: usize) -> Result<Tensor, ModelError> {
        if self.format.is_quantised() {
            let found = format!("a matrix in {} that is to be transposed", self.format);
            return Err(ModelError::bad(self.source.name(), "tensor", found, "F32, F16 or BF16"));
        }
        let (rows, size) = (self.rows / count, self.format.block_bytes());
        let data = self.bytes();
        let mut out = Vec::with_capacity(data.len());
        for matrix in data.chunks_exact(rows * self.cols * size) {
            for c in 0..self.cols {
                (0..rows).for_each(|r| out.extend_from_slice(&matrix[(r * self.cols + c) * size..][..size]));
            }
        }
        Tensor::from_bytes(self.source.name(), out, self.format, count * self.cols, rows)
    }

    /// The view that kernels take.
    pub fn weight(&self) -> Weight<'_> {
        let weight = Weight::new(self.format, self.rows, self.cols, self.bytes());
        let scaled = weight.and_then(|w| match &self.scales {
            None => Ok(w),
            Some(grid) => w.with_scales(grid.view()),
        });
        scaled.expect("checked when the tensor was made")
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
