//! Transformers in GGUF files: `<architecture>.*` metadata to a config, tensor names to weights, for every family.
//!
//! What a file does not say (window patterns, layers without positions) is what llama.cpp does for its architecture.

use std::collections::BTreeSet;
use std::path::Path;

use suanpan_base::HeadShape;

use super::{Gguf, rope};
use crate::assemble::{self, GGUF as NAMES, Names, Store, bias_name};
use crate::config::{Biases, ExpertsConfig, LatentConfig, LayerConfig, MAX_LAYERS, ModelConfig};
use crate::config_json::extended_len;
use crate::error::ModelError;
use crate::family::{self, BiasRule, Cap, Experts, Family, Windows};
use crate::rope::mscale;
use crate::weights::{Tensor, Weights};

/// Metadata of features that would change the numbers, each with the value that means "off".
const REFUSED_UNLESS: [(&str, f64); 4] =
    [("attention.clamp_kqv", 0.0), ("logit_scale", 1.0), ("residual_scale", 1.0), ("embedding_scale", 1.0)];
/// Layers of the Gemma 2 and 3 of 27B, whose scores are scaled by hidden_size / heads instead of head_dim; their files do not say so.
const GEMMA_27B_LAYERS: [usize; 2] = [46, 62];

impl Gguf {
    fn need_uint(&self, key: &str) -> Result<usize, ModelError> {
        let value = self.uniform_uint(key)?;
        let value =
            value.ok_or_else(|| ModelError::missing(self.name(), format!("metadata {key}"), "an integer"))?;
        self.size(key, value)
    }

    fn size(&self, key: &str, value: u64) -> Result<usize, ModelError> {
        let limit = crate::config::MAX_SIZE;
        match usize::try_from(value) {
            Ok(n) if n <= limit => Ok(n),
            _ => Err(self.bad(format!("metadata {key}"), value, format!("at most {limit}"))),
        }
    }

    pub(super) fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        self.uniform_uint(key)?.map_or(Ok(default), |n| self.size(key, n))
    }

    /// A number, whether the file holds it as float or integer.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.float(key) {
            Ok(value) => Ok(value),
            Err(_) => Ok(self.uint(key)?.map(|n| n as f64)),
        }
    }

    fn token_id(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let Some(id) = self.uint(key)? else { return Ok(None) };
        let id = u32::try_from(id);
        id.map(Some).map_err(|_| self.bad(format!("metadata {key}"), "an id above 2^32", "a token id"))
    }
}

/// The metadata of one architecture, keys without its name.
pub(super) struct Keys<'a> {
    pub gguf: &'a Gguf,
    pub family: &'static Family,
    architecture: &'a str,
}

impl Keys<'_> {
    /// The whole key.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// A number, if the file has it.
    pub fn number(&self, name: &str) -> Result<Option<f64>, ModelError> {
        self.gguf.number(&self.key(name))
    }

    /// An error about a key.
    pub fn bad(
        &self,
        name: &str,
        found: impl std::fmt::Display,
        supported: impl std::fmt::Display,
    ) -> ModelError {
        self.gguf.bad(format!("metadata {}", self.key(name)), found, supported)
    }

    /// A size, or `default`.
    pub fn size_or(&self, name: &str, default: usize) -> Result<usize, ModelError> {
        self.gguf.size_or(&self.key(name), default)
    }

    fn need(&self, name: &str) -> Result<usize, ModelError> {
        self.gguf.need_uint(&self.key(name))
    }
}

/// The config of the model in `gguf`.
pub fn config(gguf: &Gguf) -> Result<ModelConfig, ModelError> {
    let keys = keys(gguf)?;
    let family = keys.family;
    let num_layers = keys.need("block_count")?;
    if num_layers > MAX_LAYERS {
        return Err(keys.bad("block_count", num_layers, format!("1 to {MAX_LAYERS}")));
    }
    let hidden_size = keys.need("embedding_length")?;
    let heads = head_shape(&keys, hidden_size)?;
    let rotary_dim = match family.latent {
        true => heads.head_dim_qk - heads.head_dim_v,
        false => keys.size_or("rope.dimension_count", heads.head_dim_qk)?,
    };
    let latent = latent(&keys, rotary_dim)?;
    let claimed = keys.need("context_length")?;
    let ropes = rope::ropes(&keys, rotary_dim, claimed)?;
    let experts = experts(&keys)?;
    let config = ModelConfig {
        name: model_name(gguf)?,
        architecture: keys.architecture.into(),
        family,
        vocab_size: vocab_size(&keys)?,
        hidden_size,
        intermediate_size: match experts {
            Some(e) => keys.size_or("feed_forward_length", e.width)?,
            None => keys.need("feed_forward_length")?,
        },
        experts,
        heads,
        latent,
        softmax_scale: match latent {
            Some(latent) => Some(latent_scale(&keys, latent.nope_dim + rotary_dim)?),
            None => softmax_scale(&keys, num_layers, hidden_size, heads)?,
        },
        attn_softcap: cap(&keys, family.attn_cap, "attn_logit_softcapping")?,
        logit_softcap: cap(&keys, family.logit_cap, "final_logit_softcapping")?,
        fp8_block: None,
        biases: biases(&keys),
        rms_norm_eps: eps(&keys)?,
        layers: layers(&keys, num_layers, ropes.len() - 1)?,
        max_position_embeddings: ropes
            .iter()
            .map(|r| extended_len(&r.scaling, claimed))
            .max()
            .unwrap_or(claimed),
        ropes,
        rotary_dim,
        rope_style: family.gguf_rope,
        bos_token_id: gguf.token_id("tokenizer.ggml.bos_token_id")?,
        eos_token_ids: eos_token_ids(gguf)?,
        // Whoever builds the tokenizer knows.
        add_bos: false,
        tie_word_embeddings: gguf.tensor_info(NAMES.lm_head).is_none(),
    };
    config.check().map_err(|e| gguf.bad(e.field, e.asked, e.supported))?;
    Ok(config)
}

/// Architecture and family; refuses files in parts and features that are not built.
fn keys(gguf: &Gguf) -> Result<Keys<'_>, ModelError> {
    const ARCH: &str = "general.architecture";
    let architecture = gguf.string(ARCH)?;
    let architecture = architecture
        .ok_or_else(|| ModelError::missing(gguf.name(), format!("metadata {ARCH}"), "a string"))?;
    let family = family::by_gguf(architecture).ok_or_else(|| {
        gguf.bad(format!("metadata {ARCH}"), format!("{architecture:?}"), family::names(|f| f.gguf))
    })?;
    if let Some(parts) = gguf.uint("split.count")?.filter(|&n| n > 1) {
        return Err(gguf.bad("metadata split.count", parts, "1 (a whole model in one file)"));
    }
    let keys = Keys { gguf, family, architecture };
    for (name, off) in REFUSED_UNLESS {
        if let Some(found) = keys.number(name)?.filter(|&x| x != off) {
            return Err(keys.bad(name, found, format!("{off} (off)")));
        }
    }
    Ok(keys)
}

fn head_shape(keys: &Keys, hidden_size: usize) -> Result<HeadShape, ModelError> {
    let num_q_heads = keys.need("attention.head_count")?;
    let num_kv_heads = keys.size_or("attention.head_count_kv", num_q_heads)?;
    if keys.family.latent {
        return latent_shape(keys, num_q_heads, num_kv_heads);
    }
    let even = hidden_size.checked_div(num_q_heads).unwrap_or(0);
    let shape = HeadShape {
        num_q_heads,
        num_kv_heads,
        head_dim_qk: keys.size_or("attention.key_length", even)?,
        head_dim_v: keys.size_or("attention.value_length", even)?,
        values_in_keys: false,
    };
    shape.check("model config").map_err(|e| keys.gguf.bad(e.field, e.asked, e.supported))?;
    Ok(shape)
}

fn eps(keys: &Keys) -> Result<f32, ModelError> {
    let key = keys.key("attention.layer_norm_rms_epsilon");
    let eps = keys.gguf.float(&key)?;
    let eps =
        eps.ok_or_else(|| ModelError::missing(keys.gguf.name(), format!("metadata {key}"), "a number"))?;
    Ok(eps as f32)
}

/// A cap of scores or logits; 0 is none.
fn cap(keys: &Keys, rule: Cap, name: &str) -> Result<Option<f32>, ModelError> {
    match (rule, keys.number(name)?) {
        (Cap::No, Some(found)) if found != 0.0 => Err(keys.bad(name, found, "0 (off)")),
        (Cap::Default(default), None) => Ok(Some(default as f32)),
        (_, number) => Ok(number.filter(|&x| x != 0.0).map(|x| x as f32)),
    }
}

fn softmax_scale(
    keys: &Keys,
    num_layers: usize,
    hidden_size: usize,
    heads: HeadShape,
) -> Result<Option<f32>, ModelError> {
    let given = keys.number("attention.scale")?.filter(|&x| x != 0.0).map(|x| x as f32);
    let large_gemma = keys.family.scaled_embedding && GEMMA_27B_LAYERS.contains(&num_layers);
    Ok(given.or(large_gemma.then(|| (hidden_size as f32 / heads.num_q_heads as f32).powf(-0.5))))
}

/// Biases, where the first layer has them and the family may.
fn biases(keys: &Keys) -> Biases {
    let has = |name: &str| keys.gguf.tensor_info(&format!("blk.0.{}", bias_name(name))).is_some();
    let free = keys.family.bias == BiasRule::Configured;
    Biases {
        qkv: keys.family.bias == BiasRule::Qkv || free && has(NAMES.q),
        o: free && has(NAMES.o),
        mlp: free && has(NAMES.gate),
    }
}

fn experts(keys: &Keys) -> Result<Option<ExpertsConfig>, ModelError> {
    let count = keys.size_or("expert_count", 0)?;
    let shared = keys.size_or("expert_shared_count", 0)?;
    let rule = keys.family.experts;
    if rule != Experts::OverAll && shared != 0 {
        return Err(keys.bad("expert_shared_count", shared, "0 (off)"));
    }
    if count == 0 && rule != Experts::OverChosen {
        return Ok(None);
    }
    if rule == Experts::No {
        let supported = format!("0: {} models have no experts", keys.family.name);
        return Err(keys.bad("expert_count", count, supported));
    }
    let width = keys.size_or("expert_feed_forward_length", keys.size_or("feed_forward_length", 0)?)?;
    let all = ExpertsConfig::new(keys.need("expert_count")?, keys.need("expert_used_count")?, width);
    if rule == Experts::OverChosen {
        return Ok(Some(all));
    }
    // 1: a softmax; weights that are made to add to one again are another rule.
    for (name, value) in [("expert_gating_func", 1.0), ("expert_weights_norm", 0.0)] {
        if let Some(found) = keys.number(name)?.filter(|&x| x != value) {
            return Err(keys.bad(name, found, value));
        }
    }
    Ok(Some(ExpertsConfig {
        shared_width: shared.saturating_mul(width),
        dense_layers: keys.size_or("leading_dense_block_count", 0)?,
        scale: keys.number("expert_weights_scale")?.unwrap_or(1.0) as f32,
        ..all
    }))
}

/// The absorbed heads: as the file's own metadata has them, one kv head of latent and rotated elements.
fn latent_shape(keys: &Keys, num_q_heads: usize, num_kv_heads: usize) -> Result<HeadShape, ModelError> {
    if num_kv_heads != 1 {
        let supported = "1: the keys' and values' products stand apart (files converted since 2025)";
        return Err(keys.bad("attention.head_count_kv", num_kv_heads, supported));
    }
    let rank = keys.need("attention.kv_lora_rank")?;
    let rotated = keys.need("rope.dimension_count")?;
    Ok(HeadShape::latent(num_q_heads, rank + rotated, rank))
}

fn latent(keys: &Keys, rotary_dim: usize) -> Result<Option<LatentConfig>, ModelError> {
    if !keys.family.latent {
        return Ok(None);
    }
    let key = "attention.key_length_mla";
    let whole = keys.need(key)?;
    let nope_dim = whole.checked_sub(rotary_dim);
    let supported = || format!("more than rope.dimension_count = {rotary_dim}");
    Ok(Some(LatentConfig {
        nope_dim: nope_dim.ok_or_else(|| keys.bad(key, whole, supported()))?,
        v_dim: keys.need("attention.value_length_mla")?,
        q_rank: match keys.size_or("attention.q_lora_rank", 0)? {
            0 => None,
            n => Some(n),
        },
    }))
}

/// The factor of latent scores: by the unabsorbed width, times the square of what YaRN puts on all dimensions.
fn latent_scale(keys: &Keys, width: usize) -> Result<f32, ModelError> {
    let factor = keys.number("rope.scaling.factor")?.unwrap_or(1.0);
    // The converter writes a tenth of the config's mscale_all_dim.
    let m = keys.number(rope::YARN_ALL_DIM)?.unwrap_or(0.0) * 10.0;
    Ok(((width as f64).powf(-0.5) * mscale(factor, m).powi(2)) as f32)
}

/// Windows and positions of the layers. `local`: index of the rotary positions of window layers.
fn layers(keys: &Keys, count: usize, local: usize) -> Result<Vec<LayerConfig>, ModelError> {
    let window = match keys.size_or("attention.sliding_window", 0)? {
        0 => None,
        w => Some(w),
    };
    let interval = keys.family.no_rope_interval;
    let pattern = match keys.family.windows {
        Windows::Pattern(n) => match keys.size_or("attention.sliding_window_pattern", n)? {
            0 => return Err(keys.bad("attention.sliding_window_pattern", 0, "at least 1")),
            n => Some(n),
        },
        Windows::All | Windows::AllOfGguf => None,
        // These files name no window for the layers that have one: a size would have to be guessed at.
        Windows::From | Windows::NoRope if window.is_some() => {
            let supported = format!("0: {} files do not say which layers have it", keys.family.name);
            return Err(keys.bad("attention.sliding_window", format!("{window:?}"), supported));
        }
        Windows::From | Windows::NoRope => None,
    };
    let layer = |i: usize| {
        let window = window.filter(|_| pattern.is_none_or(|n| !(i + 1).is_multiple_of(n)));
        let rope = interval.is_none_or(|n| !(i + 1).is_multiple_of(n));
        LayerConfig { window, rope: rope.then_some(if window.is_some() { local } else { 0 }) }
    };
    Ok((0..count).map(layer).collect())
}

fn model_name(gguf: &Gguf) -> Result<String, ModelError> {
    let stem = || Path::new(gguf.name()).file_stem().map(|s| s.to_string_lossy().into_owned());
    let given = gguf.string("general.name")?.map(str::trim).filter(|n| !n.is_empty()).map(String::from);
    Ok(given.or_else(stem).unwrap_or_default())
}

/// Rows of the embedding; a size in the metadata must agree.
fn vocab_size(keys: &Keys) -> Result<usize, ModelError> {
    let name = NAMES.embed;
    let Some(info) = keys.gguf.tensor_info(name) else {
        return Err(ModelError::missing(keys.gguf.name(), format!("tensor {name}"), "the embedding"));
    };
    let rows = info.dims[1];
    match keys.gguf.uint(&keys.key("vocab_size"))? {
        Some(n) if n != rows as u64 => {
            Err(keys.bad("vocab_size", n, format!("{rows}, the rows of tensor {name}")))
        }
        _ => Ok(rows),
    }
}

fn eos_token_ids(gguf: &Gguf) -> Result<Vec<u32>, ModelError> {
    let mut ids = Vec::new();
    for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        if let Some(id) = gguf.token_id(&format!("tokenizer.ggml.{name}"))?
            && !ids.contains(&id)
        {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// A GGUF file whose fetched tensors are remembered.
struct Tensors<'a> {
    gguf: &'a Gguf,
    used: BTreeSet<String>,
}

impl Store for Tensors<'_> {
    fn has(&self, name: &str) -> bool {
        self.gguf.tensor_info(name).is_some()
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.used.insert(name.to_string());
        self.gguf.tensor(name, shape)
    }

    fn bytes(&mut self, name: &str, shape: &[usize]) -> Result<Vec<u8>, ModelError> {
        Err(ModelError::missing(self.gguf.name(), format!("tensor {name}"), format!("shape {shape:?}")))
    }
}

/// The weights of `config`'s model in `gguf`, as views of the file. A tensor that nobody used is refused.
pub fn weights(gguf: &Gguf, config: &ModelConfig) -> Result<Weights, ModelError> {
    let mut store = Tensors { gguf, used: rope::TENSORS.map(String::from).into() };
    let weights = assemble::weights(config, &Names::gguf(config.family), &mut store)?;
    assemble::refuse_unused(gguf.name(), gguf.tensor_names(), &store.used, config.family)?;
    Ok(weights)
}
