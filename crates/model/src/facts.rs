//! Sizes of a model that tables and ledgers print: parameters, weight bytes by format, K/V bytes of a token.
//!
//! Arithmetic only; nothing is read or measured.

use std::collections::BTreeMap;

use suanpan_base::DType;

use crate::config::ModelConfig;
use crate::load::Model;
use crate::weights::{LayerWeights, Tensor, Weights};

impl ModelConfig {
    /// Bytes of keys and values that one token keeps in the cache, over all layers:
    /// layers · num_kv_heads · (elements of a key and its value) · bytes.
    ///
    /// A window layer keeps as much per token while the token is in its window.
    pub fn kv_bytes_per_token(&self, dtype: DType) -> u64 {
        let heads = self.heads;
        let width = heads.kv_width() as u64;
        // Saturating: a config without weights may claim any sizes.
        let elements = [heads.num_kv_heads as u64, self.layers.len() as u64]
            .into_iter()
            .fold(width, u64::saturating_mul);
        (u128::from(elements) * dtype.bits() as u128 / 8).try_into().unwrap_or(u64::MAX)
    }
}

impl Weights {
    /// Every matrix with its role's name, a tied head not repeated. Norms and biases are vectors of their own and not among them.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &Tensor)> {
        let head = (!self.lm_head.same_bytes(&self.embed)).then_some(("lm_head".to_string(), &self.lm_head));
        let layers = self.layers.iter().enumerate().flat_map(|(i, layer)| {
            layer.linears().map(move |(role, linear)| (format!("layer {i} {role}"), &linear.weight))
        });
        std::iter::once(("embed".to_string(), &self.embed)).chain(layers).chain(head)
    }

    /// Numbers that the model holds, a tied head counted once.
    pub fn num_parameters(&self) -> u64 {
        let matrices: u64 = self.tensors().map(|(_, t)| t.rows() as u64 * t.cols() as u64).sum();
        matrices + self.vector_elems() as u64
    }

    /// Bytes in memory: matrices in their file's format, norms and biases in f32.
    pub fn bytes(&self) -> u64 {
        let matrices: u64 = self.tensors().map(|(_, t)| t.bytes().len() as u64).sum();
        matrices + 4 * self.vector_elems() as u64
    }

    /// Matrices and bytes of each format, by the format's name.
    pub fn formats(&self) -> BTreeMap<&'static str, (usize, u64)> {
        let mut formats = BTreeMap::new();
        for (_, tensor) in self.tensors() {
            let (count, bytes) = formats.entry(tensor.format().name()).or_insert((0, 0));
            *count += 1;
            *bytes += tensor.bytes().len() as u64;
        }
        formats
    }

    fn vector_elems(&self) -> usize {
        let layer = |l: &LayerWeights| {
            let biases =
                l.linears().filter_map(|(_, linear)| linear.bias.as_ref()).map(Vec::len).sum::<usize>();
            biases + l.vectors().map(Vec::len).sum::<usize>()
        };
        self.final_norm.len() + self.layers.iter().map(layer).sum::<usize>()
    }
}

impl Model {
    /// Bytes of keys and values that one token keeps in the cache, over all layers.
    pub fn kv_bytes_per_token(&self, dtype: DType) -> u64 {
        self.config.kv_bytes_per_token(dtype)
    }

    /// Numbers that the model holds, a tied head counted once.
    pub fn num_parameters(&self) -> u64 {
        self.weights.num_parameters()
    }

    /// Bytes of the weights in memory.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes()
    }
}
