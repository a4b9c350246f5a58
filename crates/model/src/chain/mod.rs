//! `builtin:chain` and `builtin:count`: word-level transformers whose weights are set by construction, so that they look up, follow and count
//! exactly.
//!
//! `chain` reads facts ` key: value.` and answers ` key?` with every value of the key, in order, and ` key?3` with the word three facts further on. As
//! `builtin:recall` they are ordinary [`ModelConfig`]s with ordinary [`Weights`] and have no code path of their own, so a wrong answer is a fault
//! of the stack. The derivation and every margin are in `docs/constructed.md`.

mod codes;
mod construct;
pub mod count;
pub mod haystack;
mod stream;
pub(crate) mod vocab;

use suanpan_base::BadArgument;
use suanpan_ops::RopeStyle;

use crate::config::{Biases, LayerConfig, ModelConfig, RopeConfig};
use crate::family::LLAMA;
use crate::weights::Weights;

pub use codes::CODE_LEN;
pub use count::MAX_COUNT;
pub use stream::WINDOW;
pub use vocab::{BEGIN, END, NUM_NAMES, VOCAB_SIZE, name};

/// Name after `builtin:`.
pub const NAME: &str = "chain";
const BASE_NAME: &str = "builtin:";
/// Hops of `builtin:chain` where the name does not say.
pub const DEFAULT_HOPS: usize = 4;
/// Most hops of a model: there is a token for each of `?2` to `?16`.
pub const MAX_HOPS: usize = 16;
/// Most values of one key that are told apart. A sixth counts as another fifth, and two fifths are a tie.
pub const MAX_VALUES: usize = 5;
/// Longest context promised in `config`: 2^24 tokens.
pub const MAX_TOKENS: usize = 1 << 24;
/// Scores, after the softmax scale, are whole multiples of this.
pub const GAIN: f32 = 8.0;
/// The least lead of what must be found over everything else, in units of [`GAIN`]: a hop's match leads the row of [`BEGIN`] by 7, and that row leads
/// everything else by 9.
pub const LEAD: f32 = 7.0;
/// Logit of the found word over [`CODE_LEN`]; the next best stands at least half as far below.
pub const LOGIT_GAIN: f32 = 1.0;
/// The smallest difference between the best and the second logit that a right stack shows with floats in its cache. The exact margin is 32; the slack
/// is a thousand roundings of f32 at the size of the largest logit.
pub const MIN_MARGIN: f32 = 32.0 * LOGIT_GAIN - 0.01;
/// The same with codes: a row's scale is rounded to bf16, so what is copied or found is off by a factor within 1 ± 2^−7, and a difference of two
/// of them once more a layer.
pub const MIN_MARGIN_CODES: f32 = 31.0 * LOGIT_GAIN;
/// Far below half an ulp of every mean square here (1/3 and 1), so it changes no bit.
const EPS: f32 = 1e-12;

/// Begins with [`BEGIN`], then the conversation as one text: what the last message ends with is the question.
pub const CHAT_TEMPLATE: &str =
    "{{- bos_token -}}{%- for message in messages -%}{{ message['content'] }}{%- endfor -%}";

/// What both models share: sizes, positions, ids.
fn base_config(name: &str, layers: Vec<LayerConfig>, intermediate_size: usize) -> ModelConfig {
    let heads = stream::HEADS;
    // theta^(-2 * OFFSET_PAIR / head_dim) = 2 pi / 3: a base below 1, since the frequency is above 1.
    let exponent = heads.head_dim_qk as f64 / (2 * stream::OFFSET_PAIR) as f64;
    let theta = (WINDOW as f64 / std::f64::consts::TAU).powf(exponent);
    ModelConfig {
        name: format!("{BASE_NAME}{name}"),
        architecture: name.to_string(),
        family: &LLAMA,
        vocab_size: VOCAB_SIZE,
        hidden_size: stream::HIDDEN,
        intermediate_size,
        experts: None,
        heads,
        latent: None,
        softmax_scale: None,
        attn_softcap: None,
        logit_softcap: None,
        fp8_block: None,
        biases: Biases::default(),
        rms_norm_eps: EPS,
        ropes: vec![RopeConfig::plain(theta)],
        rotary_dim: heads.head_dim_qk,
        rope_style: RopeStyle::Half,
        layers,
        max_position_embeddings: MAX_TOKENS,
        bos_token_id: Some(BEGIN),
        eos_token_ids: vec![END],
        add_bos: true,
        tie_word_embeddings: false,
    }
}

fn check(hops: usize) -> Result<(), BadArgument> {
    match hops {
        1..=MAX_HOPS => Ok(()),
        _ => Err(BadArgument::new(NAME, "hops", hops, format!("1 to {MAX_HOPS}"))),
    }
}

/// The configuration: a window layer with rotary positions, then `2 + hops` global layers without positions.
pub fn config(hops: usize) -> Result<ModelConfig, BadArgument> {
    check(hops)?;
    let mut layers = vec![LayerConfig { window: None, rope: None }; 3 + hops];
    layers[0] = LayerConfig { window: Some(WINDOW), rope: Some(0) };
    let mut config = base_config(NAME, layers, construct::MLP_WIDTH);
    if hops != DEFAULT_HOPS {
        config.name.push_str(&format!(":hops={hops}"));
    }
    Ok(config)
}

/// The weights: embedding and output head in bf16, which holds them exactly, everything else in f32.
pub fn weights(hops: usize) -> Result<Weights, BadArgument> {
    check(hops)?;
    let name = &format!("{BASE_NAME}{NAME}");
    let mut layers =
        vec![stream::window_layer(name), construct::times_layer(name), construct::next_layer(name)];
    layers.extend((1..=hops).map(|hop| construct::hop_layer(name, hop)));
    Ok(Weights {
        embed: stream::embed(name),
        layers,
        final_norm: stream::full_norm(),
        lm_head: construct::word_head(name, hops),
    })
}
