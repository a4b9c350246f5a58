//! What tells the families of transformers apart: a table of facts. No sizes, no tensors, no code of a family's own.
//!
//! Sources: the families' implementations in `transformers` (modeling and configuration files) and llama.cpp's converter for GGUF names.

use suanpan_ops::{Activation, RopeStyle};

/// Which products of attention add a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BiasRule {
    /// None.
    Never,
    /// Queries, keys and values, always.
    Qkv,
    /// All four where `attention_bias` says so, `false` when it is absent.
    Configured,
}

/// Where a layer normalises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before the MLP.
    Pre,
    /// Before and after both.
    Sandwich,
}

/// Which layers have a window where the file names no layer types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// All, where there is a `sliding_window`.
    All,
    /// The same in GGUF files, which call Mistral models so. The family's own config.json has none: a size there is refused.
    AllOfGguf,
    /// Those from `max_window_layers` on, and only where `use_sliding_window` says so.
    From,
    /// All but each n-th.
    Pattern(usize),
    /// Those without rotary positions, and only where `use_sliding_window` says so.
    NoRope,
}

/// Whether scores or logits are capped by a tanh.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cap {
    /// Never: a number in the file is refused.
    No,
    /// Where the file says so.
    Optional,
    /// By this where the file does not say.
    Default(f64),
}

/// Whether the MLP is a choice of experts, and what weighs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// One MLP.
    No,
    /// The softmax over the logits of the chosen ones; router and experts have biases.
    OverChosen,
    /// The softmax over all logits, times a factor of the config; no biases, experts for every token beside the chosen, first layers
    /// with one MLP.
    OverAll,
}

/// Facts of one family.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// Name for people.
    pub name: &'static str,
    /// `model_type` in config.json.
    pub model_types: &'static [&'static str],
    /// `architectures` in config.json.
    pub classes: &'static [&'static str],
    /// `general.architecture` in GGUF files.
    pub gguf: &'static [&'static str],
    /// Which elements form a rotary pair in safetensors files.
    pub rope: RopeStyle,
    /// The same in GGUF files.
    pub gguf_rope: RopeStyle,
    /// Base of the rotary frequencies where a file names none.
    pub theta: f64,
    /// A base of their own for window layers, where a file names none.
    pub local_theta: Option<f64>,
    /// Each n-th layer has no rotary positions, where the file does not say which.
    pub no_rope_interval: Option<usize>,
    /// Windows where the file does not name layer types.
    pub windows: Windows,
    /// Biases of attention.
    pub bias: BiasRule,
    /// Whether each head of q and k is normalised before it is rotated.
    pub qk_norm: bool,
    /// Cap of the scores.
    pub attn_cap: Cap,
    /// Cap of the logits.
    pub logit_cap: Cap,
    /// A learned logit a head that joins the softmax.
    pub sinks: bool,
    /// Where a layer normalises.
    pub norms: Norms,
    /// What safetensors files leave out of norm weights (GGUF files hold the sum).
    pub norm_offset: f32,
    /// Whether embeddings are multiplied by sqrt(hidden_size).
    pub scaled_embedding: bool,
    /// Whether safetensors hold q, k, v as one matrix, and gate and up as one.
    pub fused: bool,
    /// The function on the gate.
    pub activation: Activation,
    /// Whether the MLP is a choice of experts.
    pub experts: Experts,
    /// Whether keys and values are products of one latent vector a token, which is what the cache holds.
    pub latent: bool,
    /// `tie_word_embeddings` where config.json does not say.
    pub tied: bool,
}

/// Llama 2 and 3, SmolLM2, and what is shaped like them.
pub static LLAMA: Family = Family {
    name: "Llama",
    model_types: &["llama"],
    classes: &["LlamaForCausalLM"],
    gguf: &["llama"],
    rope: RopeStyle::Half,
    gguf_rope: RopeStyle::Interleaved,
    theta: 10_000.0,
    local_theta: None,
    no_rope_interval: None,
    windows: Windows::AllOfGguf,
    bias: BiasRule::Configured,
    qk_norm: false,
    attn_cap: Cap::No,
    logit_cap: Cap::No,
    sinks: false,
    norms: Norms::Pre,
    norm_offset: 0.0,
    scaled_embedding: false,
    fused: false,
    activation: Activation::Silu,
    experts: Experts::No,
    latent: false,
    tied: false,
};

/// Llama's layers with a window. GGUF files call them `llama`.
pub static MISTRAL: Family = Family {
    name: "Mistral",
    model_types: &["mistral"],
    classes: &["MistralForCausalLM"],
    gguf: &[],
    windows: Windows::All,
    bias: BiasRule::Never,
    ..LLAMA
};

/// SmolLM3: every fourth layer without positions.
pub static SMOLLM3: Family = Family {
    name: "SmolLM3",
    model_types: &["smollm3"],
    classes: &["SmolLM3ForCausalLM"],
    gguf: &["smollm3"],
    theta: 2_000_000.0,
    no_rope_interval: Some(4),
    windows: Windows::NoRope,
    tied: true,
    ..LLAMA
};

/// Qwen2 and Qwen2.5: biases on q, k and v.
pub static QWEN2: Family = Family {
    name: "Qwen2",
    model_types: &["qwen2"],
    classes: &["Qwen2ForCausalLM"],
    gguf: &["qwen2"],
    gguf_rope: RopeStyle::Half,
    windows: Windows::From,
    bias: BiasRule::Qkv,
    ..LLAMA
};

/// Qwen3: norms on q and k.
pub static QWEN3: Family = Family {
    name: "Qwen3",
    model_types: &["qwen3"],
    classes: &["Qwen3ForCausalLM"],
    gguf: &["qwen3"],
    gguf_rope: RopeStyle::Half,
    windows: Windows::From,
    qk_norm: true,
    ..LLAMA
};

/// Gemma 2: alternating windows, caps, four norms a layer.
pub static GEMMA2: Family = Family {
    name: "Gemma 2",
    model_types: &["gemma2"],
    classes: &["Gemma2ForCausalLM"],
    gguf: &["gemma2"],
    gguf_rope: RopeStyle::Half,
    windows: Windows::Pattern(2),
    attn_cap: Cap::Default(50.0),
    logit_cap: Cap::Default(30.0),
    norms: Norms::Sandwich,
    norm_offset: 1.0,
    scaled_embedding: true,
    activation: Activation::GeluTanh,
    tied: true,
    ..LLAMA
};

/// Gemma 3, text: five window layers to a global one, a rotary base for each kind, four norms a layer.
pub static GEMMA3: Family = Family {
    name: "Gemma 3",
    model_types: &["gemma3_text"],
    classes: &["Gemma3ForCausalLM"],
    gguf: &["gemma3"],
    gguf_rope: RopeStyle::Half,
    theta: 1_000_000.0,
    local_theta: Some(10_000.0),
    windows: Windows::Pattern(6),
    qk_norm: true,
    // Its config has a key for a cap of the scores, which the reference does not read.
    attn_cap: Cap::No,
    logit_cap: Cap::Optional,
    ..GEMMA2
};

/// Phi-3 and Phi-4-mini: fused matrices, LongRoPE, part of a head rotated.
pub static PHI3: Family = Family {
    name: "Phi-3",
    model_types: &["phi3"],
    classes: &["Phi3ForCausalLM"],
    gguf: &["phi3"],
    gguf_rope: RopeStyle::Half,
    windows: Windows::All,
    bias: BiasRule::Never,
    fused: true,
    ..LLAMA
};

/// gpt-oss: sinks, alternating windows, experts.
pub static GPT_OSS: Family = Family {
    name: "gpt-oss",
    model_types: &["gpt_oss"],
    classes: &["GptOssForCausalLM"],
    gguf: &["gpt-oss"],
    gguf_rope: RopeStyle::Half,
    theta: 150_000.0,
    windows: Windows::Pattern(2),
    sinks: true,
    activation: Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
    experts: Experts::OverChosen,
    ..LLAMA
};

/// DeepSeek-V2: latent attention, experts beside shared ones.
pub static DEEPSEEK2: Family = Family {
    name: "DeepSeek-V2",
    model_types: &["deepseek_v2"],
    classes: &["DeepseekV2ForCausalLM"],
    gguf: &["deepseek2"],
    rope: RopeStyle::Interleaved,
    bias: BiasRule::Never,
    experts: Experts::OverAll,
    latent: true,
    ..LLAMA
};

/// Every family, in the order in which tables print them.
pub static ALL: [&Family; 10] =
    [&LLAMA, &MISTRAL, &SMOLLM3, &QWEN2, &QWEN3, &GEMMA2, &GEMMA3, &PHI3, &GPT_OSS, &DEEPSEEK2];

/// The family of a `model_type` of config.json.
pub fn by_model_type(name: &str) -> Option<&'static Family> {
    ALL.into_iter().find(|f| f.model_types.contains(&name))
}

/// The family of a `general.architecture` of a GGUF file.
pub fn by_gguf(name: &str) -> Option<&'static Family> {
    ALL.into_iter().find(|f| f.gguf.contains(&name))
}

/// Every name that `pick` gives, for refusals.
pub(crate) fn names(pick: fn(&Family) -> &'static [&'static str]) -> String {
    ALL.into_iter().flat_map(pick).copied().collect::<Vec<_>>().join(", ")
}
