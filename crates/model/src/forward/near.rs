//! Layers whose codes have rows of 16 bits beside them: what they store, and how the two parts of a query's attention become one.
//!
//! Which tokens are in which part is `NearTokens`' to say. The parts meet through their lse, so the result is the attention over both.

use rayon::prelude::*;
use suanpan_base::{DType, HeadShape, lse};
use suanpan_cache::{LayerSet, LayerShape, NearTokens};

use crate::config::ModelConfig;

/// Rows of a merge that one thread takes at least.
const MERGE_ROWS: usize = 16;

/// What the storage holds of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// Heads and type.
    pub shape: LayerShape,
    /// Only the last tokens are looked back to (and sinks, where there are any): may have pages of its own.
    pub windowed: bool,
    /// These are the rows of 16 bits of that layer.
    pub near_of: Option<usize>,
}

/// The storage's layers: the model's own, then the rows of 16 bits of those that have them: layers in codes that look back to the
/// first token. (Those with a window store all their tokens in codes.)
pub fn kv_layers(config: &ModelConfig, dtype: DType, spared: LayerSet, near: NearTokens) -> Vec<KvLayer> {
    let shape = |dtype| LayerShape { heads: config.heads, dtype };
    let own = config.layers.iter().enumerate().map(|(i, layer)| KvLayer {
        shape: shape(spared.stored(dtype, i)),
        windowed: layer.window.is_some(),
        near_of: None,
    });
    let mut layers: Vec<KvLayer> = own.collect();
    let has_near = |layer: &KvLayer| near.is_some() && layer.shape.dtype.is_code() && !layer.windowed;
    let twins: Vec<usize> = (0..layers.len()).filter(|&i| has_near(&layers[i])).collect();
    let twin = |i| KvLayer { shape: shape(DType::Bf16), windowed: true, near_of: Some(i) };
    layers.extend(twins.into_iter().map(twin));
    layers
}

/// Where in the storage each of the model's `layers` layers has its near tokens.
pub(super) fn places(kv_layers: &[KvLayer], layers: usize) -> Vec<Option<usize>> {
    (0..layers).map(|i| kv_layers.iter().position(|layer| layer.near_of == Some(i))).collect()
}

/// Merges what queries found near into what they found far: rows `[rows, num_q_heads, head_dim_v]`, lse `[num_q_heads, rows]`.
pub(super) fn merge(
    heads: HeadShape,
    (out, far_lse): (&mut [f32], &[f32]),
    (near, near_lse): (&[f32], &[f32]),
) {
    let (width, cols) = (heads.head_dim_v, heads.num_q_heads * heads.head_dim_v);
    let rows = out.len() / cols;
    let pairs = out.par_chunks_mut(cols).zip(near.par_chunks(cols)).with_min_len(MERGE_ROWS);
    pairs.enumerate().for_each(|(row, (out, near))| {
        for (head, (out, near)) in out.chunks_exact_mut(width).zip(near.chunks_exact(width)).enumerate() {
            let at = head * rows + row;
            lse::merge_into(out, &mut far_lse[at].clone(), near, near_lse[at]);
        }
    });
}
