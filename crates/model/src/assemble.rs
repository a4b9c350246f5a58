//! The one place that says which tensors a transformer of each family has and what shape each must have.
//!
//! Does not read files: a container (GGUF, safetensors) fetches a tensor by its own name.

use std::collections::BTreeSet;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::experts;
use crate::family::{Experts, Family, GPT_OSS, Norms};
use crate::latent;
use crate::weights::{Ffn, Gated, LayerWeights, Linear, Mlp, Tensor, Values, Weights};

/// A container's names. A layer's tensor is `layer_prefix` + number + `.` + the name below; a bias ends in `.bias` instead.
#[derive(Clone, Copy)]
pub(crate) struct Names {
    pub embed: &'static str,
    pub final_norm: &'static str,
    pub lm_head: &'static str,
    pub layer_prefix: &'static str,
    pub attn_norm: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub qkv: &'static str,
    pub o: &'static str,
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    pub sinks: &'static str,
    pub post_attn_norm: &'static str,
    pub ffn_norm: &'static str,
    pub post_ffn_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub gate_up: &'static str,
    pub down: &'static str,
    pub router: &'static str,
    /// What is still to be added to norm weights.
    pub norm_offset: f32,
}

/// Names in GGUF files.
pub(crate) const GGUF: Names = Names {
    embed: "token_embd.weight",
    final_norm: "output_norm.weight",
    lm_head: "output.weight",
    layer_prefix: "blk.",
    attn_norm: "attn_norm.weight",
    q: "attn_q.weight",
    k: "attn_k.weight",
    v: "attn_v.weight",
    qkv: "attn_qkv.weight",
    o: "attn_output.weight",
    q_norm: "attn_q_norm.weight",
    k_norm: "attn_k_norm.weight",
    sinks: "attn_sinks.weight",
    post_attn_norm: "post_attention_norm.weight",
    ffn_norm: "ffn_norm.weight",
    post_ffn_norm: "post_ffw_norm.weight",
    gate: "ffn_gate.weight",
    up: "ffn_up.weight",
    gate_up: "ffn_up.weight",
    down: "ffn_down.weight",
    router: "ffn_gate_inp.weight",
    norm_offset: 0.0,
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
    qkv: "self_attn.qkv_proj.weight",
    o: "self_attn.o_proj.weight",
    q_norm: "self_attn.q_norm.weight",
    k_norm: "self_attn.k_norm.weight",
    sinks: "self_attn.sinks",
    post_attn_norm: "post_attention_layernorm.weight",
    ffn_norm: "post_attention_layernorm.weight",
    post_ffn_norm: "post_feedforward_layernorm.weight",
    gate: "mlp.gate_proj.weight",
    up: "mlp.up_proj.weight",
    gate_up: "mlp.gate_up_proj.weight",
    down: "mlp.down_proj.weight",
    router: "mlp.router.weight",
    norm_offset: 0.0,
};

impl Names {
    /// Names of `family` in GGUF files.
    pub fn gguf(family: &Family) -> Names {
        // gpt-oss files call the norm before the experts by what stands before it.
        Names { ffn_norm: if *family == GPT_OSS { GGUF.post_attn_norm } else { GGUF.ffn_norm }, ..GGUF }
    }

    /// Names of `family` in safetensors files.
    pub fn safetensors(family: &Family) -> Names {
        let ffn_norm = match family.norms {
            Norms::Pre => SAFETENSORS.ffn_norm,
            Norms::Sandwich => "pre_feedforward_layernorm.weight",
        };
        let router = match family.experts {
            Experts::OverAll => "mlp.gate.weight",
            Experts::No | Experts::OverChosen => SAFETENSORS.router,
        };
        Names { ffn_norm, router, norm_offset: family.norm_offset, ..SAFETENSORS }
    }
}

/// The name of the bias beside a weight.
pub(crate) fn bias_name(weight: &str) -> String {
    format!("{}.bias", weight.strip_suffix(".weight").unwrap_or(weight))
}

/// A container of tensors.
pub(crate) trait Store {
    /// Whether there is a tensor of that name.
    fn has(&self, name: &str) -> bool;
    /// The tensor of a name; it must have exactly the shape asked for. All dimensions but the last become rows.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError>;
    /// The bytes of a tensor of plain bytes of exactly the shape asked for.
    fn bytes(&mut self, name: &str, shape: &[usize]) -> Result<Vec<u8>, ModelError>;
}

/// A container with the names of one layer's tensors.
pub(crate) struct LayerStore<'a> {
    pub store: &'a mut dyn Store,
    pub names: &'a Names,
    pub layer: usize,
}

impl LayerStore<'_> {
    fn full(&self, name: &str) -> String {
        format!("{}{}.{name}", self.names.layer_prefix, self.layer)
    }

    /// Whether the layer has a tensor `name`.
    pub fn has(&self, name: &str) -> bool {
        self.store.has(&self.full(name))
    }

    /// As [`Store::tensor`].
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.store.tensor(&self.full(name), shape)
    }

    /// As [`Store::bytes`].
    pub fn bytes(&mut self, name: &str, shape: &[usize]) -> Result<Vec<u8>, ModelError> {
        self.store.bytes(&self.full(name), shape)
    }

    /// A vector widened to f32.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.tensor(name, &[len])?.to_f32())
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let offset = self.names.norm_offset;
        Ok(self.vector(name, len)?.into_iter().map(|w| w + offset).collect())
    }

    /// A product, with the bias beside it where there is one.
    pub fn linear(&mut self, name: &str, shape: [usize; 2], bias: bool) -> Result<Linear, ModelError> {
        let weight = self.tensor(name, &shape)?;
        let bias = if bias { Some(self.vector(&bias_name(name), shape[0])?) } else { None };
        Ok(Linear { weight, bias })
    }

    /// One matrix that holds several one after the other, `rows` of each.
    fn fused(
        &mut self,
        name: &str,
        rows: &[usize],
        cols: usize,
        bias: bool,
    ) -> Result<Vec<Linear>, ModelError> {
        let whole = self.linear(name, [rows.iter().sum(), cols], bias)?;
        let mut start = 0;
        let parts = rows.iter().map(|&n| {
            let part = start..start + n;
            start += n;
            let bias = whole.bias.as_ref().map(|b| b[part.clone()].to_vec());
            let weight = whole.weight.slice_rows(part.clone()).ok_or_else(|| {
                let found = format!("a block of scales across row {} or {}", part.start, part.end);
                ModelError::bad(&*self.full(name), format!("tensor {name}"), found, "blocks within one part")
            })?;
            Ok(Linear { weight, bias })
        });
        parts.collect()
    }
}

/// Fetches every tensor of `config`'s transformer. A tied head is the embedding itself, whatever else the file holds.
pub(crate) fn weights(
    config: &ModelConfig,
    names: &Names,
    store: &mut dyn Store,
) -> Result<Weights, ModelError> {
    let embed_shape = [config.vocab_size, config.hidden_size];
    let embed = store.tensor(names.embed, &embed_shape)?;
    let final_norm = store.tensor(names.final_norm, &[config.hidden_size])?.to_f32();
    let final_norm = final_norm.into_iter().map(|w| w + names.norm_offset).collect();
    let lm_head =
        if config.tie_word_embeddings { embed.clone() } else { store.tensor(names.lm_head, &embed_shape)? };
    let layers = (0..config.layers.len())
        .map(|layer| layer_weights(config, &mut LayerStore { store, names, layer }))
        .collect::<Result<_, _>>()?;
    Ok(Weights { embed, layers, final_norm, lm_head })
}

fn layer_weights(config: &ModelConfig, store: &mut LayerStore<'_>) -> Result<LayerWeights, ModelError> {
    let (names, family) = (store.names, config.family);
    let (hidden, heads) = (config.hidden_size, config.heads);
    let attn_norm = store.norm(names.attn_norm, hidden)?;
    let (q, k, v) = qkv(config, store)?;
    let sandwich = family.norms == Norms::Sandwich;
    Ok(LayerWeights {
        attn_norm,
        q,
        k,
        v,
        o: store.linear(names.o, [hidden, config.o_cols()], config.biases.o)?,
        qk_norms: if family.qk_norm {
            Some([store.norm(names.q_norm, heads.head_dim_qk)?, store.norm(names.k_norm, heads.head_dim_qk)?])
        } else {
            None
        },
        sinks: if family.sinks { Some(store.vector(names.sinks, heads.num_q_heads)?) } else { None },
        post_attn_norm: if sandwich { Some(store.norm(names.post_attn_norm, hidden)?) } else { None },
        ffn: match config.intermediate_size {
            0 => None,
            _ => Some(Ffn {
                norm: store.norm(names.ffn_norm, hidden)?,
                post_norm: if sandwich { Some(store.norm(names.post_ffn_norm, hidden)?) } else { None },
                mlp: mlp(config, store)?,
            }),
        },
    })
}

fn qkv(config: &ModelConfig, store: &mut LayerStore<'_>) -> Result<(Linear, Linear, Values), ModelError> {
    if let Some(facts) = config.latent {
        let (q, k, rest) = latent::weights(config, facts, store)?;
        return Ok((q, k, Values::InKeys(Box::new(rest))));
    }
    let (names, hidden, heads) = (store.names, config.hidden_size, config.heads);
    let (q_rows, k_rows) = (heads.num_q_heads * heads.head_dim_qk, heads.num_kv_heads * heads.head_dim_qk);
    let v_rows = heads.num_kv_heads * heads.head_dim_v;
    let bias = config.biases.qkv;
    let [q, k, v] = if config.family.fused && store.has(names.qkv) {
        let parts = store.fused(names.qkv, &[q_rows, k_rows, v_rows], hidden, bias)?;
        parts.try_into().expect("three parts were asked for")
    } else {
        [
            store.linear(names.q, [q_rows, hidden], bias)?,
            store.linear(names.k, [k_rows, hidden], bias)?,
            store.linear(names.v, [v_rows, hidden], bias)?,
        ]
    };
    Ok((q, k, Values::Own(v)))
}

fn mlp(config: &ModelConfig, store: &mut LayerStore<'_>) -> Result<Mlp, ModelError> {
    let (names, bias) = (store.names, config.biases.mlp);
    let (hidden, inter) = (config.hidden_size, config.intermediate_size);
    if let Some(facts) = config.experts.filter(|e| store.layer >= e.dense_layers) {
        return match config.family.experts {
            Experts::OverAll => experts::beside_shared(facts, hidden, bias, store),
            Experts::No | Experts::OverChosen => experts::with_biases(facts, hidden, store),
        };
    }
    let fused = config.family.fused && !store.has(names.gate);
    let [gate, up] = if fused {
        let parts = store.fused(names.gate_up, &[inter, inter], hidden, bias)?;
        parts.try_into().expect("two parts were asked for")
    } else {
        [store.linear(names.gate, [inter, hidden], bias)?, store.linear(names.up, [inter, hidden], bias)?]
    };
    let down = store.linear(names.down, [hidden, inter], bias)?;
    Ok(Mlp::Dense(Box::new(Gated { gate, up, down })))
}

/// Refuses a file that holds tensors nobody used: a bias, an adapter or a second expert silently left out is a wrong model.
pub(crate) fn refuse_unused<'a>(
    file: &str,
    all: impl Iterator<Item = &'a str>,
    used: &BTreeSet<String>,
    family: &Family,
) -> Result<(), ModelError> {
    let unused: Vec<&str> = all.filter(|name| !used.contains(*name)).collect();
    let Some(first) = unused.first() else { return Ok(()) };
    let found = format!("{} tensor(s) that a {} model as read here does not use", unused.len(), family.name);
    let supported = "the family's own tensors, biases where the config says so";
    Err(ModelError::bad(file, format!("tensor {first}"), found, supported))
}
