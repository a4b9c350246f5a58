//! What a model is, as one printable value: facts of the family, context, positions, layers, formats, tokenizer, template.
//!
//! Arithmetic and words only; nothing is run.

use serde::Serialize;
use suanpan_base::DType;

use crate::config::{ModelConfig, RopeConfig, RopeScaling};
use crate::family::{Experts, Norms};
use crate::load::Model;
use crate::rope;

/// Everything about a model; keys as `suanpan inspect --json` prints them.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// Name for people.
    pub name: String,
    /// The family.
    pub family: &'static str,
    /// Architecture as the file calls it.
    pub architecture: String,
    /// Bytes of the weight files.
    pub file_bytes: u64,
    /// Bytes of the weights in memory.
    pub weight_bytes: u64,
    /// Numbers that the model holds.
    pub parameters: u64,
    /// Matrices by format.
    pub formats: Vec<Format>,
    /// Sizes and what the layers are made of.
    pub config: Sizes,
    /// Lengths.
    pub context: Context,
    /// Rotary positions in force.
    pub ropes: Vec<Rope>,
    /// Layers of one kind.
    pub layer_groups: Vec<LayerGroup>,
    /// Bytes of keys and values of a token, all layers.
    pub kv_bytes_per_token: u64,
    /// Element type of stored keys and values that the bytes are for.
    pub kv_cache_dtype: String,
    /// The tokenizer.
    pub tokenizer: TokenizerFacts,
    /// The chat template, if there is one.
    pub chat_template: Option<String>,
    /// What was decided where the files contradict themselves.
    pub warnings: Vec<String>,
    /// Every matrix.
    pub tensors: Vec<TensorFacts>,
}

/// Matrices of one format.
#[derive(Clone, Debug, Serialize)]
pub struct Format {
    /// Its name.
    pub format: &'static str,
    /// How many.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Sizes and facts of the layers.
#[derive(Clone, Debug, Serialize)]
pub struct Sizes {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP or of one expert.
    pub intermediate_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_q_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a query and key head.
    pub head_dim_qk: usize,
    /// Width of a value head.
    pub head_dim_v: usize,
    /// Of latent attention, whose heads above are the absorbed ones: a head's elements that are not rotated, and its output's width.
    pub latent: Option<[usize; 2]>,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// Factor of the scores.
    pub softmax_scale: f32,
    /// Cap of the scores.
    pub attn_softcap: Option<f32>,
    /// Cap of the logits.
    pub logit_softcap: Option<f32>,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f32,
    /// `pre` or `sandwich` (before and after).
    pub norms: &'static str,
    /// Whether heads of q and k are normalised.
    pub qk_norm: bool,
    /// Whether a learned logit a head joins the softmax.
    pub sinks: bool,
    /// The function on the gate.
    pub activation: String,
    /// Products that add a bias.
    pub biases: Vec<&'static str>,
    /// Experts of a layer, and how many a token uses.
    pub experts: Option<[usize; 2]>,
    /// Width of what every token uses beside them.
    pub shared_experts_width: Option<usize>,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
}

/// Lengths in tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Context {
    /// What the model was first trained on.
    pub native_tokens: usize,
    /// With the scaling of its positions.
    pub extended_tokens: usize,
    /// The longest sequence that the positions below are for.
    pub max_model_len: usize,
}

/// Rotary positions in force.
#[derive(Clone, Debug, Serialize)]
pub struct Rope {
    /// Base.
    pub theta: f64,
    /// Kind of scaling, and its numbers.
    pub scaling: String,
    /// Factor of cosine and sine.
    pub attention_factor: f64,
    /// Radians a token of the first pair.
    pub first_frequency: f64,
    /// Radians a token of the last pair.
    pub last_frequency: f64,
}

/// Layers with one window and one kind of positions.
#[derive(Clone, Debug, Serialize)]
pub struct LayerGroup {
    /// Their numbers.
    pub layers: Vec<usize>,
    /// Keys that a query sees; null: all before it.
    pub window: Option<usize>,
    /// Which of `ropes`; null: no positions.
    pub rope: Option<usize>,
    /// Bytes of keys and values of a token, in these layers together.
    pub kv_bytes_per_token: u64,
    /// The same of a whole sequence of `max_model_len` tokens: a window layer keeps no more than its window.
    pub kv_bytes_at_max_len: u64,
}

/// The tokenizer.
#[derive(Clone, Debug, Serialize)]
pub struct TokenizerFacts {
    /// Its kind.
    pub kind: String,
    /// Ids.
    pub vocab_size: usize,
    /// Begin token.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Whether a text begins with the begin token.
    pub add_bos: bool,
}

/// One matrix.
#[derive(Clone, Debug, Serialize)]
pub struct TensorFacts {
    /// Its role.
    pub name: String,
    /// Its format.
    pub format: &'static str,
    /// Out features.
    pub rows: usize,
    /// In features.
    pub cols: usize,
    /// Bytes.
    pub bytes: usize,
}

/// Everything about `model`, its positions as for sequences of up to `max_model_len` tokens.
pub fn inspect(model: &Model, max_model_len: usize, kv_dtype: DType) -> Inspection {
    let config = &model.config;
    let formats = model.weights.formats().into_iter();
    Inspection {
        name: config.name.clone(),
        family: config.family.name,
        architecture: config.architecture.clone(),
        file_bytes: model.file_bytes,
        weight_bytes: model.weight_bytes(),
        parameters: model.num_parameters(),
        formats: formats.map(|(format, (tensors, bytes))| Format { format, tensors, bytes }).collect(),
        config: sizes(config),
        context: Context {
            native_tokens: config.native_len(),
            extended_tokens: config.max_position_embeddings,
            max_model_len,
        },
        ropes: config.ropes.iter().map(|r| rope_facts(r, config.rotary_dim, max_model_len)).collect(),
        layer_groups: layer_groups(config, max_model_len, kv_dtype),
        kv_bytes_per_token: model.kv_bytes_per_token(kv_dtype),
        kv_cache_dtype: kv_dtype.to_string(),
        tokenizer: TokenizerFacts {
            kind: model.tokenizer.kind(),
            vocab_size: model.tokenizer.vocab_size(),
            bos_token_id: config.bos_token_id.or(model.tokenizer.special_ids().bos),
            eos_token_ids: config.eos_token_ids.clone(),
            add_bos: config.add_bos,
        },
        chat_template: model.chat_template.as_ref().map(|t| t.source().to_string()),
        warnings: model.warnings.clone(),
        tensors: tensors(model),
    }
}

fn tensors(model: &Model) -> Vec<TensorFacts> {
    let facts = |(name, t): (String, &crate::weights::Tensor)| TensorFacts {
        name,
        format: t.format().name(),
        rows: t.rows(),
        cols: t.cols(),
        bytes: t.bytes().len(),
    };
    model.weights.tensors().map(facts).collect()
}

fn sizes(config: &ModelConfig) -> Sizes {
    let (heads, family, biases) = (config.heads, config.family, config.biases);
    let with_bias = [
        ("qkv", biases.qkv),
        ("o", biases.o),
        ("mlp", biases.mlp),
        ("experts", family.experts == Experts::OverChosen),
    ];
    Sizes {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_layers: config.layers.len(),
        num_q_heads: heads.num_q_heads,
        num_kv_heads: heads.num_kv_heads,
        head_dim_qk: heads.head_dim_qk,
        head_dim_v: heads.head_dim_v,
        latent: config.latent.map(|l| [l.nope_dim, l.v_dim]),
        rotary_dim: config.rotary_dim,
        softmax_scale: config.softmax_scale.unwrap_or(heads.default_scale()),
        attn_softcap: config.attn_softcap,
        logit_softcap: config.logit_softcap,
        rms_norm_eps: config.rms_norm_eps,
        norms: match family.norms {
            Norms::Pre => "pre",
            Norms::Sandwich => "sandwich",
        },
        qk_norm: family.qk_norm,
        sinks: family.sinks,
        activation: format!("{:?}", family.activation),
        biases: with_bias.into_iter().filter(|b| b.1).map(|b| b.0).collect(),
        experts: config.experts.map(|e| [e.count, e.per_token]),
        shared_experts_width: config.experts.map(|e| e.shared_width).filter(|&n| n > 0),
        tie_word_embeddings: config.tie_word_embeddings,
    }
}

fn rope_facts(rope: &RopeConfig, rotary_dim: usize, max_model_len: usize) -> Rope {
    let freq = rope::inv_freq(rope, rotary_dim, max_model_len);
    let scaling = match &rope.scaling {
        RopeScaling::Default => "default".to_string(),
        RopeScaling::Linear { factor } => format!("linear, factor {factor}"),
        RopeScaling::Dynamic { factor, original } => {
            let base = rope::dynamic_base(rope.theta, *factor, *original, rotary_dim, max_model_len);
            format!("dynamic, factor {factor}, original {original}, base {base:.1}")
        }
        RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate } => {
            let ends = if *truncate { "rounded" } else { "as they fall" };
            format!(
                "yarn, factor {factor}, original {original}, betas {beta_fast} and {beta_slow}, ramp ends {ends}"
            )
        }
        RopeScaling::LongRope { original, .. } => {
            let list = if max_model_len as f64 > *original { "long" } else { "short" };
            format!("longrope, {list} factors, original {original}")
        }
        RopeScaling::Llama3 { factor, original_max_position_embeddings: original, .. } => {
            format!("llama3, factor {factor}, original {original}")
        }
        RopeScaling::Factors(_) => "a divisor a pair, from the file".to_string(),
    };
    Rope {
        theta: rope.theta,
        scaling,
        attention_factor: rope.attention_factor,
        first_frequency: freq.first().copied().unwrap_or(0.0),
        last_frequency: freq.last().copied().unwrap_or(0.0),
    }
}

fn layer_groups(config: &ModelConfig, max_model_len: usize, kv_dtype: DType) -> Vec<LayerGroup> {
    let mut groups: Vec<LayerGroup> = Vec::new();
    for (i, layer) in config.layers.iter().enumerate() {
        match groups.iter_mut().find(|g| g.window == layer.window && g.rope == layer.rope) {
            Some(group) => group.layers.push(i),
            None => groups.push(LayerGroup {
                layers: vec![i],
                window: layer.window,
                rope: layer.rope,
                kv_bytes_per_token: 0,
                kv_bytes_at_max_len: 0,
            }),
        }
    }
    let all = config.kv_bytes_per_token(kv_dtype);
    for group in &mut groups {
        group.kv_bytes_per_token = all / config.layers.len() as u64 * group.layers.len() as u64;
        let kept = group.window.map_or(max_model_len, |w| w.min(max_model_len));
        group.kv_bytes_at_max_len = group.kv_bytes_per_token.saturating_mul(kept as u64);
    }
    groups
}
