//! The one place that says which tensors a Llama-shaped transformer has and what shape each must have.
//!
//! Does not read files: a container (GGUF, safetensors) fetches a tensor by its own name.

use std::collections::BTreeSet;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::weights::{Ffn, LayerWeights, Tensor, Weights};

/// A container's names. A layer's tensor is `layer_prefix` + number + `.` + the name below.
pub(crate) struct Names {
    pub embed: &'static str,
    pub final_norm: &'static str,
    pub lm_head: &'static str,
    pub layer_prefix: &'static str,
    pub attn_norm: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub o: &'static str,
    pub ffn_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

/// Names in GGUF files of the Llama family.
pub(crate) const GGUF: Names = Names {
    embed: "token_embd.weight",
    final_norm: "output_norm.weight",
    lm_head: "output.weight",
    layer_prefix: "blk.",
    attn_norm: "attn_norm.weight",
    q: "attn_q.weight",
    k: "attn_k.weight",
    v: "attn_v.weight",
    o: "attn_output.weight",
    ffn_norm: "ffn_norm.weight",
    gate: "ffn_gate.weight",
    up: "ffn_up.weight",
    down: "ffn_down.weight",
};

/// Names in safetensors files as `transformers` writes them.
pub(crate) const SAFETENSORS: Names = Names {
    embed: "model.embed_tokens.weight",
    final_norm: "model.norm.weight",
    lm_head: "lm_head.weight",
    layer_prefix: "model.layers.",
    attn_norm: "input_layernorm.weight",
    q: "self_attn.q_proj.weight",
    k: "self_attn.k_proj.weight",
    v: "self_attn.v_proj.weight",
    o: "self_attn.o_proj.weight",
    ffn_norm: "post_attention_layernorm.weight",
    gate: "mlp.gate_proj.weight",
    up: "mlp.up_proj.weight",
    down: "mlp.down_proj.weight",
};

/// Gives the tensor of a name; it must have exactly the shape asked for.
pub(crate) type Fetch<'a> = dyn FnMut(&str, &[usize]) -> Result<Tensor, ModelError> + 'a;

/// Fetches every tensor of `config`'s transformer. A tied head is the embedding itself, whatever else the file holds.
pub(crate) fn weights(
    config: &ModelConfig,
    names: &Names,
    fetch: &mut Fetch<'_>,
) -> Result<Weights, ModelError> {
    let embed_shape = [config.vocab_size, config.hidden_size];
    let embed = fetch(names.embed, &embed_shape)?;
    let final_norm = fetch(names.final_norm, &[config.hidden_size])?.to_f32();
    let lm_head =
        if config.tie_word_embeddings { embed.clone() } else { fetch(names.lm_head, &embed_shape)? };
    let layers = (0..config.layers.len())
        .map(|layer| {
            layer_weights(config, names, &mut |name: &str, shape: &[usize]| {
                fetch(&format!("{}{layer}.{name}", names.layer_prefix), shape)
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(Weights { embed, layers, final_norm, lm_head })
}

fn layer_weights(
    config: &ModelConfig,
    names: &Names,
    fetch: &mut Fetch<'_>,
) -> Result<LayerWeights, ModelError> {
    let (hidden, inter, heads) = (config.hidden_size, config.intermediate_size, config.heads);
    Ok(LayerWeights {
        attn_norm: fetch(names.attn_norm, &[hidden])?.to_f32(),
        q: fetch(names.q, &[heads.num_q_heads * heads.head_dim_qk, hidden])?,
        k: fetch(names.k, &[heads.num_kv_heads * heads.head_dim_qk, hidden])?,
        v: fetch(names.v, &[heads.num_kv_heads * heads.head_dim_v, hidden])?,
        o: fetch(names.o, &[hidden, heads.num_q_heads * heads.head_dim_v])?,
        ffn: match inter {
            0 => None,
            _ => Some(Ffn {
                norm: fetch(names.ffn_norm, &[hidden])?.to_f32(),
                gate: fetch(names.gate, &[inter, hidden])?,
                up: fetch(names.up, &[inter, hidden])?,
                down: fetch(names.down, &[hidden, inter])?,
            }),
        },
    })
}

/// Refuses a file that holds tensors nobody used: a bias, an adapter or a second expert silently left out is a wrong model.
pub(crate) fn refuse_unused<'a>(
    file: &str,
    all: impl Iterator<Item = &'a str>,
    used: &BTreeSet<String>,
    architecture: &str,
) -> Result<(), ModelError> {
    let unused: Vec<&str> = all.filter(|name| !used.contains(*name)).collect();
    let Some(first) = unused.first() else { return Ok(()) };
    let found = format!("{} tensor(s) that {architecture} as read here does not use", unused.len());
    let supported = "weights of attention, gated MLP, norms, embedding and head, without biases";
    Err(ModelError::bad(file, format!("tensor {first}"), found, supported))
}
