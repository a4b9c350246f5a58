//! `builtin:count`: how often a word stands in a text, by construction: one window layer, one global layer, a head of numbers.

use suanpan_base::BadArgument;

use super::stream::WINDOW;
use super::{BASE_NAME, construct, stream};
use crate::config::{LayerConfig, ModelConfig};
use crate::weights::Weights;

/// Name after `builtin:`.
pub const NAME: &str = "count";
/// The greatest number that is promised, and that has a token. The margin loses a rounding that grows as n²; docs/constructed.md says where it
/// would be used up.
pub const MAX_COUNT: usize = 1000;
/// Factor of the lines of the output head: a power of two, so that it rounds nothing.
pub const LINE_GAIN: f32 = 8.0;
/// The smallest difference between the best and the second logit at a number. The exact margin is 3 − 2/(n + 2) times [`LINE_GAIN`], which is least
/// (18.67) for one occurrence; the rest is for the rounding of logits of up to 8·10⁶, at most 4.3.
pub const MIN_MARGIN: f32 = 12.0;

/// The configuration: the window layer, then one global layer without positions.
pub fn config() -> ModelConfig {
    let global = LayerConfig { window: None, rope: None };
    let layers = vec![LayerConfig { window: Some(WINDOW), rope: Some(0) }, global];
    super::base_config(NAME, layers, 0)
}

/// The weights: the embedding in bf16, everything else in f32.
pub fn weights() -> Weights {
    let name = &format!("{BASE_NAME}{NAME}");
    Weights {
        embed: stream::embed(name),
        layers: vec![stream::window_layer(name), construct::count_layer(name)],
        final_norm: stream::full_norm(),
        lm_head: construct::number_head(name),
    }
}

/// What to append to a text to ask how often `word` stands in it.
pub fn question(word: &str) -> String {
    format!(" {word}?")
}

/// What a right model answers.
pub fn answer(n: usize) -> Result<String, BadArgument> {
    if n > MAX_COUNT {
        return Err(BadArgument::new("count", "n", n, format!("0 to {MAX_COUNT}")));
    }
    Ok(format!(" {n}"))
}
