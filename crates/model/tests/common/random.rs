//! Small random models, and the generator behind them.

use std::sync::Arc;

use suanpan_base::HeadShape;
use suanpan_model::{
    Biases, Ffn, Gated, LayerConfig, LayerWeights, Linear, Mlp, Model, ModelConfig, RopeConfig, Tensor,
    Tokenizer, Values, Weights, family,
};
use suanpan_ops::RopeStyle;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in -1 .. 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn tokens(&mut self, n: usize, vocab: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(vocab) as u32).collect()
    }

    pub fn shuffle<T>(&mut self, x: &mut [T]) {
        for i in (1..x.len()).rev() {
            x.swap(i, self.below(i + 1));
        }
    }
}

/// Three layers that differ: global with positions, window of 5 with positions, global without; grouped heads, a wide MLP.
pub fn config() -> ModelConfig {
    ModelConfig {
        name: "tiny".into(),
        architecture: "test".into(),
        family: &family::LLAMA,
        vocab_size: 96,
        hidden_size: 48,
        intermediate_size: 80,
        experts: None,
        heads: HeadShape::new(4, 2, 16),
        latent: None,
        softmax_scale: None,
        attn_softcap: None,
        logit_softcap: None,
        fp8_block: None,
        biases: Biases::default(),
        rms_norm_eps: 1e-5,
        ropes: vec![RopeConfig::plain(10_000.0)],
        rotary_dim: 16,
        rope_style: RopeStyle::Half,
        layers: vec![
            LayerConfig { window: None, rope: Some(0) },
            LayerConfig { window: Some(5), rope: Some(0) },
            LayerConfig { window: None, rope: None },
        ],
        max_position_embeddings: 1 << 20,
        bos_token_id: None,
        eos_token_ids: vec![0],
        add_bos: false,
        tie_word_embeddings: false,
    }
}

/// `config` with random weights, large enough that attention is far from uniform.
pub fn model(config: ModelConfig, seed: u64) -> Arc<Model> {
    let mut random = Random(seed);
    let heads = config.heads;
    let (hidden, inter) = (config.hidden_size, config.intermediate_size);
    let mut matrix = |rows: usize, cols: usize| {
        let scale = 3.0 / (cols as f32).sqrt();
        let data: Vec<f32> = (0..rows * cols).map(|_| random.unit() * scale).collect();
        Tensor::from_f32("random", &data, rows, cols).unwrap()
    };
    let embed = matrix(config.vocab_size, hidden);
    let lm_head = matrix(config.vocab_size, hidden);
    let mut linear = |rows: usize, cols: usize| Linear::from(matrix(rows, cols));
    let layers = config.layers.iter().map(|_| LayerWeights {
        attn_norm: norm(hidden, seed),
        q: linear(heads.num_q_heads * heads.head_dim_qk, hidden),
        k: linear(heads.num_kv_heads * heads.head_dim_qk, hidden),
        v: Values::Own(linear(heads.num_kv_heads * heads.head_dim_v, hidden)),
        o: linear(hidden, heads.num_q_heads * heads.head_dim_v),
        qk_norms: None,
        sinks: None,
        post_attn_norm: None,
        ffn: (inter > 0).then(|| Ffn {
            norm: norm(hidden, seed + 1),
            post_norm: None,
            mlp: Mlp::Dense(Box::new(Gated {
                gate: linear(inter, hidden),
                up: linear(inter, hidden),
                down: linear(hidden, inter),
            })),
        }),
    });
    let weights = Weights { layers: layers.collect(), embed, lm_head, final_norm: norm(hidden, seed + 2) };
    wrap(config, weights)
}

fn norm(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..n).map(|_| 1.0 + 0.3 * random.unit()).collect()
}

/// A model around parts made in a test.
pub fn wrap(config: ModelConfig, weights: Weights) -> Arc<Model> {
    let tokenizer = Tokenizer::bytes(&[], None, None).unwrap();
    Arc::new(Model { config, weights, tokenizer, chat_template: None, file_bytes: 0, warnings: Vec::new() })
}

/// Reorders blocks of `block` rows: block i of the result is block `order[i]`.
pub fn reorder_rows(t: &Tensor, block: usize, order: &[usize]) -> Tensor {
    let (data, cols) = (t.to_f32(), t.cols());
    let moved: Vec<f32> =
        order.iter().flat_map(|&b| data[b * block * cols..][..block * cols].to_vec()).collect();
    Tensor::from_f32("reordered", &moved, t.rows(), cols).unwrap()
}

/// The same of columns.
pub fn reorder_cols(t: &Tensor, block: usize, order: &[usize]) -> Tensor {
    let data = t.to_f32();
    let moved: Vec<f32> = data
        .chunks_exact(t.cols())
        .flat_map(|row| order.iter().flat_map(|&b| row[b * block..][..block].to_vec()).collect::<Vec<_>>())
        .collect();
    Tensor::from_f32("reordered", &moved, t.rows(), t.cols()).unwrap()
}
