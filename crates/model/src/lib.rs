//! Model files and what runs them: config, weights (GGUF, safetensors), tokenizer, chat template, transformer forward.
//!
//! Knows no request, no scheduler and no HTTP. Everything read from a file is checked before it is used or allocated for.

pub(crate) mod assemble;
pub mod builtin;
pub mod chain;
pub mod config;
pub mod config_json;
pub mod error;
mod experts;
pub mod export;
pub mod facts;
pub mod family;
pub mod folder;
pub mod forward;
pub mod gguf;
pub mod hub;
pub mod inspect;
mod latent;
pub mod load;
mod matrix;
pub mod recall;
pub mod rope;
pub mod safetensors;
pub mod source;
pub mod template;
pub mod tokenizer;
pub mod weights;

pub use config::{Biases, ExpertsConfig, LatentConfig, LayerConfig, ModelConfig, RopeConfig, RopeScaling};
pub use error::ModelError;
pub use family::Family;
pub use load::{LoadOptions, LoadProgress, LoadStage, Model, load};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
pub use weights::{Ffn, Gated, Latent, LayerWeights, Linear, Mlp, Tensor, Values, Weights};
