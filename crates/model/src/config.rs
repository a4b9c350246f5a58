//! What a transformer is, as far as running it goes: sizes, layers, positions, special ids. No weights, no files.

use suanpan_base::{BadArgument, HeadShape};
use suanpan_ops::RopeStyle;

/// How the rotary frequencies differ from the plain `theta^(-2i/d)`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all (`rope_type` "default").
    Default,
    /// Llama 3's piecewise scaling (`rope_type` "llama3"): short wavelengths stay, long ones are divided by `factor`,
    /// those between are blended.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are fully scaled.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone.
        high_freq_factor: f64,
        /// The length, in tokens, that the model was first trained on.
        original_max_position_embeddings: f64,
    },
    /// One divisor for each frequency, as a GGUF file's `rope_freqs.weight` gives them: `[head_dim_qk / 2]`.
    Factors(Vec<f64>),
}

/// Rotary positions of a model. The choice never depends on the length of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
    /// Multiplies cosine and sine; 1 for every supported scaling.
    pub attention_factor: f64,
}

impl RopeConfig {
    /// Plain rotary positions over base `theta`.
    pub fn plain(theta: f64) -> RopeConfig {
        RopeConfig { theta, scaling: RopeScaling::Default, attention_factor: 1.0 }
    }
}

/// What may differ from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Keys a query sees, its own included; `None`: all before it.
    pub window: Option<usize>,
    /// Whether queries and keys are rotated by their position.
    pub rope: bool,
}

/// A transformer of the Llama family.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name for people: from the file's metadata, else its file or folder name.
    pub name: String,
    /// Architecture as the file calls it, for example `llama`.
    pub architecture: String,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP; 0: the layers have none.
    pub intermediate_size: usize,
    /// Attention heads of every layer.
    pub heads: HeadShape,
    /// Multiplier of the scores; `None`: 1/sqrt(head_dim_qk).
    pub softmax_scale: Option<f32>,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f32,
    /// Rotary positions.
    pub rope: RopeConfig,
    /// Which elements form a rotary pair in this file's q and k rows.
    pub rope_style: RopeStyle,
    /// One entry for each layer.
    pub layers: Vec<LayerConfig>,
    /// Longest context the file claims, in tokens.
    pub max_position_embeddings: usize,
    /// Token that begins a text, if the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Whether encoding a text begins with `bos_token_id`.
    pub add_bos: bool,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
}

/// Largest value accepted for any size in a config; keeps every product of two far from overflow.
pub const MAX_SIZE: usize = 1 << 28;
/// Most layers accepted.
pub const MAX_LAYERS: usize = 4096;

impl ModelConfig {
    /// Refuses sizes that no kernel could run: zero, odd rotary widths, absurd counts, ids outside the vocabulary.
    pub fn check(&self) -> Result<(), BadArgument> {
        const OP: &str = "model config";
        let sizes = [
            ("vocab_size", self.vocab_size, 1),
            ("hidden_size", self.hidden_size, 1),
            ("intermediate_size", self.intermediate_size, 0),
            ("num_q_heads", self.heads.num_q_heads, 1),
            ("head_dim_qk", self.heads.head_dim_qk, 1),
            ("head_dim_v", self.heads.head_dim_v, 1),
            ("max_position_embeddings", self.max_position_embeddings, 1),
        ];
        for (field, n, least) in sizes {
            if n < least || n > MAX_SIZE {
                return Err(BadArgument::new(OP, field, n, format!("{least} to {MAX_SIZE}")));
            }
        }
        self.heads.check(OP)?;
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Err(BadArgument::new(OP, "num_layers", self.layers.len(), format!("1 to {MAX_LAYERS}")));
        }
        if !self.heads.head_dim_qk.is_multiple_of(2) && self.layers.iter().any(|l| l.rope) {
            return Err(BadArgument::new(OP, "head_dim_qk", self.heads.head_dim_qk, "an even number"));
        }
        if self.layers.iter().any(|l| l.window == Some(0)) {
            return Err(BadArgument::new(OP, "window", 0, "at least 1 (a window counts the current token)"));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(BadArgument::new(
                OP,
                "rms_norm_eps",
                self.rms_norm_eps,
                "a finite number, 0 or more",
            ));
        }
        if self.softmax_scale.is_some_and(|s| !(s.is_finite() && s > 0.0)) {
            let found = format!("{:?}", self.softmax_scale);
            return Err(BadArgument::new(OP, "softmax_scale", found, "a finite number above 0"));
        }
        let ids = self.eos_token_ids.iter().map(|&id| ("eos_token_id", id));
        for (field, id) in ids.chain(self.bos_token_id.map(|id| ("bos_token_id", id))) {
            if id as usize >= self.vocab_size {
                let supported = format!("below vocab_size = {}", self.vocab_size);
                return Err(BadArgument::new(OP, field, id, supported));
            }
        }
        Ok(())
    }
}
