//! What a transformer is, as far as running it goes: sizes, layers, positions, special ids. No weights, no files.

use suanpan_base::{BadArgument, HeadShape};
use suanpan_ops::RopeStyle;

use crate::family::Family;
use crate::rope;

/// How the rotary frequencies differ from the plain `theta^(-2i/d)`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all (`rope_type` "default").
    Default,
    /// Positions divided by `factor` (`rope_type` "linear").
    Linear {
        /// Divisor of every position.
        factor: f64,
    },
    /// A base that grows with the length past `original` (`rope_type` "dynamic", NTK-aware).
    Dynamic {
        /// Growth of the base.
        factor: f64,
        /// The length, in tokens, up to which the base is theta.
        original: f64,
    },
    /// High frequencies kept, low ones divided, by wavelength (`rope_type` "yarn", arXiv 2309.00071).
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// The length, in tokens, that the model was first trained on.
        original: f64,
        /// Turns within `original` above which a frequency is kept.
        beta_fast: f64,
        /// Turns within `original` below which a frequency is fully divided.
        beta_slow: f64,
        /// Whether the ends of the ramp are rounded to whole pairs.
        truncate: bool,
    },
    /// One divisor a pair, of two lists: by whether the length passes `original` (`rope_type` "longrope", arXiv 2402.13753).
    LongRope {
        /// Divisors up to `original` tokens, `[rotary_dim / 2]`.
        short: Vec<f64>,
        /// Divisors past it.
        long: Vec<f64>,
        /// The length, in tokens, that the model was first trained on.
        original: f64,
    },
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
    /// One divisor for each frequency, as a GGUF file's `rope_freqs.weight` gives them: `[rotary_dim / 2]`.
    Factors(Vec<f64>),
}

/// Rotary positions of a kind of layer. Where they depend on a length, it is the executor's `max_model_len`: one choice for all its
/// sequences, so that a cached key never meets a query rotated otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
    /// Multiplies cosine and sine.
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
    /// Which of the model's `ropes` rotates queries and keys; `None`: they have no positions.
    pub rope: Option<usize>,
}

/// Which products add a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// Attention's output.
    pub o: bool,
    /// The MLP's three.
    pub mlp: bool,
}

/// A choice of experts in place of one MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that a token uses: those with the greatest router logits, weighed as the family says.
    pub per_token: usize,
    /// Width of one of them.
    pub width: usize,
    /// Width of the MLP that every token uses beside them; 0: none.
    pub shared_width: usize,
    /// First layers, which have one MLP instead.
    pub dense_layers: usize,
    /// Factor of their weights.
    pub scale: f32,
}

impl ExpertsConfig {
    /// `count` experts in every layer, of which a token uses `per_token`, and nothing beside them.
    pub fn new(count: usize, per_token: usize, width: usize) -> ExpertsConfig {
        ExpertsConfig { count, per_token, width, shared_width: 0, dense_layers: 0, scale: 1.0 }
    }
}

/// Attention over one latent vector a token (DeepSeek-V2, arXiv 2405.04434, section 2.1). The cache holds the latent elements and the rotated
/// ones behind them: `heads` are those of the absorbed form, `HeadShape::latent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Elements of a query that are not rotated.
    pub nope_dim: usize,
    /// Width of a head's output.
    pub v_dim: usize,
    /// Width that queries are made from, where it is not the stream itself.
    pub q_rank: Option<usize>,
}

/// A transformer of one of the [`family`](crate::family)s.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name for people: from the file's metadata, else its file or folder name.
    pub name: String,
    /// Architecture as the file calls it, for example `llama`.
    pub architecture: String,
    /// What the family's layers are made of.
    pub family: &'static Family,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP, of one expert where no layer has one MLP; 0: the layers have none.
    pub intermediate_size: usize,
    /// Experts, where the MLP is a choice of them.
    pub experts: Option<ExpertsConfig>,
    /// Attention heads of every layer, as the cache and the kernels see them.
    pub heads: HeadShape,
    /// What is behind them where they are latent.
    pub latent: Option<LatentConfig>,
    /// Multiplier of the scores; `None`: 1/sqrt(head_dim_qk).
    pub softmax_scale: Option<f32>,
    /// `cap · tanh(score / cap)` before the mask.
    pub attn_softcap: Option<f32>,
    /// The same of the logits.
    pub logit_softcap: Option<f32>,
    /// Rows and columns of a block of FP8 scales, where the file's weights have them.
    pub fp8_block: Option<[usize; 2]>,
    /// Products with a bias.
    pub biases: Biases,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f32,
    /// Rotary positions, one entry for each kind of layer.
    pub ropes: Vec<RopeConfig>,
    /// Elements of a head that are rotated, from its first on; even.
    pub rotary_dim: usize,
    /// Which elements form a rotary pair in this file's q and k rows.
    pub rope_style: RopeStyle,
    /// One entry for each layer.
    pub layers: Vec<LayerConfig>,
    /// Longest context the file claims, in tokens, the extension by a rotary scaling included.
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
/// Most experts of a layer accepted.
pub const MAX_EXPERTS: usize = 4096;

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
        self.check_latent()?;
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Err(BadArgument::new(OP, "num_layers", self.layers.len(), format!("1 to {MAX_LAYERS}")));
        }
        self.check_rope()?;
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
        let factors = [
            ("softmax_scale", self.softmax_scale),
            ("attn_logit_softcapping", self.attn_softcap),
            ("final_logit_softcapping", self.logit_softcap),
        ];
        for (field, factor) in factors {
            if let Some(found) = factor.filter(|s| !(s.is_finite() && *s > 0.0)) {
                return Err(BadArgument::new(OP, field, found, "a finite number above 0"));
            }
        }
        self.check_experts()?;
        let ids = self.eos_token_ids.iter().map(|&id| ("eos_token_id", id));
        for (field, id) in ids.chain(self.bos_token_id.map(|id| ("bos_token_id", id))) {
            if id as usize >= self.vocab_size {
                let supported = format!("below vocab_size = {}", self.vocab_size);
                return Err(BadArgument::new(OP, field, id, supported));
            }
        }
        Ok(())
    }

    /// Columns of attention's output projection.
    pub fn o_cols(&self) -> usize {
        self.heads.num_q_heads * self.latent.map_or(self.heads.head_dim_v, |l| l.v_dim)
    }

    /// Width of the widest MLP.
    pub fn widest_mlp(&self) -> usize {
        let experts = self.experts.map_or(0, |e| e.width.max(e.shared_width));
        experts.max(self.intermediate_size)
    }

    fn check_latent(&self) -> Result<(), BadArgument> {
        const OP: &str = "model config";
        let Some(latent) = self.latent else { return Ok(()) };
        let sizes = [
            ("qk_nope_head_dim", latent.nope_dim),
            ("v_head_dim", latent.v_dim),
            ("q_lora_rank", latent.q_rank.unwrap_or(1)),
        ];
        match sizes.into_iter().find(|(_, n)| !(1..=MAX_SIZE).contains(n)) {
            Some((field, n)) => Err(BadArgument::new(OP, field, n, format!("1 to {MAX_SIZE}"))),
            None => Ok(()),
        }
    }

    fn check_experts(&self) -> Result<(), BadArgument> {
        const OP: &str = "model config";
        let Some(ExpertsConfig { count, per_token, width, shared_width, dense_layers, scale }) = self.experts
        else {
            return Ok(());
        };
        let sizes = [
            ("num_experts", count, 1, MAX_EXPERTS),
            ("num_experts_per_tok", per_token, 1, count),
            ("moe_intermediate_size", width, 1, MAX_SIZE),
            ("n_shared_experts * moe_intermediate_size", shared_width, 0, MAX_SIZE),
            ("first_k_dense_replace", dense_layers, 0, self.layers.len()),
        ];
        if let Some((field, n, least, most)) =
            sizes.into_iter().find(|(_, n, least, most)| n < least || n > most)
        {
            return Err(BadArgument::new(OP, field, n, format!("{least} to {most}")));
        }
        if !(scale.is_finite() && scale > 0.0) {
            return Err(BadArgument::new(OP, "routed_scaling_factor", scale, "a finite number above 0"));
        }
        Ok(())
    }

    /// The length, in tokens, that the model was first trained on, as far as the file says so.
    pub fn native_len(&self) -> usize {
        let native = self.ropes.iter().map(|r| rope::native_len(r, self.max_position_embeddings));
        native.min().unwrap_or(self.max_position_embeddings)
    }

    fn check_rope(&self) -> Result<(), BadArgument> {
        const OP: &str = "model config";
        let (dim, most) = (self.rotary_dim, self.heads.head_dim_qk);
        let used = self.layers.iter().filter_map(|l| l.rope).max();
        if used.is_some() && !(dim.is_multiple_of(2) && (2..=most).contains(&dim)) {
            return Err(BadArgument::new(
                OP,
                "rotary_dim",
                dim,
                format!("an even number, 2 to head_dim = {most}"),
            ));
        }
        if let Some(index) = used.filter(|&i| i >= self.ropes.len()) {
            let supported = format!("below {}, the rotary positions there are", self.ropes.len());
            return Err(BadArgument::new(OP, "layers.rope", index, supported));
        }
        self.ropes.iter().try_for_each(|r| rope::check(r, dim))
    }
}
