//! `builtin:recall`: a transformer whose weights are set by construction, so that it copies what followed its last tokens.
//!
//! No training and no file: two layers, a byte vocabulary, 1.6 MB of f32 weights. It is an ordinary [`ModelConfig`] with
//! ordinary [`Weights`]: it runs through the same executor, cache and kernels as every model and has no code path of its own,
//! so a wrong answer is a fault of the stack. The derivation and every margin are in `docs/recall.md`.

mod construct;
pub(crate) mod haystack;

use suanpan_base::HeadShape;
use suanpan_ops::RopeStyle;

use crate::config::{Biases, LayerConfig, ModelConfig, RopeConfig};
use crate::family::LLAMA;
use crate::weights::Weights;

pub use haystack::{Fact, Haystack, haystack};

/// Name after `builtin:`.
pub const NAME: &str = "recall";
/// Tokens: the 256 bytes, each its own id. There is no special token.
pub const VOCAB_SIZE: usize = 256;
/// Binary digits of a token's code; digit `d` of token `t` is bit `d`, as +1 or -1.
pub const CODE_DIGITS: usize = 8;
/// Tokens that are matched: the last `NGRAM` of the prompt must occur once in the context.
pub const NGRAM: usize = 7;
/// Keys the first layer sees, its own included: offsets `0 ..= NGRAM`, one for each query head.
pub const WINDOW: usize = NGRAM + 1;
/// Longest context promised in `config`: 2^24 tokens. The margins of `docs/recall.md` hold far beyond.
pub const MAX_TOKENS: usize = 1 << 24;
/// The token that ends a value, and so a generation: the newline.
pub const END: u32 = b'\n' as u32;
/// Score gap, after the softmax scale, between a full match and a match with one digit wrong: `2 * MATCH_GAIN`.
pub const MATCH_GAIN: f32 = 16.0;
/// Logit of the copied token over `CODE_DIGITS`; the next best token stands `2 * LOGIT_GAIN` below it.
pub const LOGIT_GAIN: f32 = 16.0;
/// The smallest difference between the best and the second logit that a right stack shows. The exact margin is
/// `2 * LOGIT_GAIN`; the slack is a thousand roundings of f32 at the size of the largest logit.
pub const MIN_MARGIN: f32 = 2.0 * LOGIT_GAIN - 0.01;

/// The whole conversation as one text: what the last message ends with is what gets continued.
pub const CHAT_TEMPLATE: &str = "{%- for message in messages -%}{{ message['content'] }}{%- endfor -%}";

const HEADS: HeadShape = HeadShape::new(8, 2, 64);
const HIDDEN: usize = 128;
/// The rotary pair that tells offsets apart. Its frequency is a quarter of pi, so `WINDOW` offsets go once around.
const OFFSET_PAIR: usize = 1;

/// The configuration: a window layer with rotary positions, then a global layer without positions.
pub fn config() -> ModelConfig {
    // theta^(-2 * OFFSET_PAIR / head_dim) = pi / 4.
    let exponent = HEADS.head_dim_qk as f64 / (2 * OFFSET_PAIR) as f64;
    let theta = (4.0 / std::f64::consts::PI).powf(exponent);
    ModelConfig {
        name: format!("builtin:{NAME}"),
        architecture: NAME.to_string(),
        family: &LLAMA,
        vocab_size: VOCAB_SIZE,
        hidden_size: HIDDEN,
        intermediate_size: 0,
        experts: None,
        heads: HEADS,
        latent: None,
        softmax_scale: None,
        attn_softcap: None,
        logit_softcap: None,
        fp8_block: None,
        biases: Biases::default(),
        // Far below half an ulp of every mean square here (1/4 and 1), so it changes no bit.
        rms_norm_eps: 1e-12,
        ropes: vec![RopeConfig::plain(theta)],
        rotary_dim: HEADS.head_dim_qk,
        rope_style: RopeStyle::Half,
        layers: vec![
            LayerConfig { window: Some(WINDOW), rope: Some(0) },
            LayerConfig { window: None, rope: None },
        ],
        max_position_embeddings: MAX_TOKENS,
        bos_token_id: None,
        eos_token_ids: vec![END],
        add_bos: false,
        tie_word_embeddings: false,
    }
}

/// The weights, in f32.
pub fn weights() -> Weights {
    construct::weights()
}
