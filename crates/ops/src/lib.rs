//! The rest of a transformer on CPU: linear layers over file-format weights, RMS norm, rotary positions, gated activation, embedding.
//!
//! Weights stay in the bytes of their file (see [`mod@format`]); nothing is repacked for longer than one tile of one call. Attention is
//! not here (`attn`), nor any file parsing (`model`). No function here allocates on the heap once its workspace exists.

pub mod activation;
pub mod dequant;
pub mod embed;
pub mod format;
pub mod isa;
pub mod linear;
pub mod norm;
pub mod quantize;
pub mod rope;
pub mod rotate;

pub use activation::{Activation, add_bias, add_into, gated, scale, softcap};
pub use embed::embed;
pub use format::{Scales, Weight, WeightFormat};
pub use isa::Isa;
pub use linear::{LinearOut, LinearWorkspace, linear};
pub use norm::{rms_norm, rms_norm_in_place};
pub use quantize::{LinearInput, Precision};
pub use rope::{RopeStyle, RopeTable, rope};
pub use rotate::hadamard;
