//! A matrix filled entry by entry: how constructed models make their weights.

use half::bf16;
use suanpan_ops::WeightFormat;

use crate::weights::{LayerWeights, Linear, Tensor, Values};

/// A matrix under construction, row = output feature; what is not set is 0.
pub(crate) struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f32>,
}

impl Matrix {
    pub(crate) fn zeros(rows: usize, cols: usize) -> Matrix {
        Matrix { rows, cols, data: vec![0.0; rows * cols] }
    }

    /// Sets one entry. A construction that sets an entry twice, or one that is not there, is wrong.
    pub(crate) fn set(&mut self, row: usize, col: usize, x: f32) {
        assert!(row < self.rows && col < self.cols, "entry [{row}, {col}]");
        let entry = &mut self.data[row * self.cols + col];
        assert!(*entry == 0.0, "entry [{row}, {col}] is set twice");
        *entry = x;
    }

    /// In binary32. `name` stands for the file in errors.
    pub(crate) fn tensor(self, name: &str) -> Tensor {
        Tensor::from_f32(name, &self.data, self.rows, self.cols).expect("the data has the matrix's shape")
    }

    /// In bfloat16, which must hold every entry exactly.
    pub(crate) fn tensor_bf16(self, name: &str) -> Tensor {
        let bytes = self.data.iter().flat_map(|&x| {
            let short = bf16::from_f32(x);
            assert!(short.to_f32() == x, "{x} is no bfloat16");
            short.to_le_bytes()
        });
        Tensor::from_bytes(name, bytes.collect(), WeightFormat::Bf16, self.rows, self.cols)
            .expect("the data has the matrix's shape")
    }

    /// A layer of attention alone, from its norm and q, k, v, o.
    pub(crate) fn attention(name: &str, attn_norm: Vec<f32>, products: [Matrix; 4]) -> LayerWeights {
        let [q, k, v, o] = products.map(|m| Linear::from(m.tensor(name)));
        let v = Values::Own(v);
        LayerWeights { attn_norm, q, k, v, o, qk_norms: None, sinks: None, post_attn_norm: None, ffn: None }
    }
}
