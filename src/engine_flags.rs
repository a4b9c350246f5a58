//! Flags that every command with an engine shares, and what they mean for its options. Also loading with a progress bar.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use suanpan_base::DType;
use suanpan_cache::{EvictionPolicy, LayerSet, NearTokens};
use suanpan_engine::{Engine, EngineHandle, EngineOptions, HandleOptions, LowerTiers};
use suanpan_model::{LoadOptions, LoadProgress, LoadStage, Model};
use suanpan_ops::Precision;

/// Host memory for pages on their way to and from disk: a prompt of 8k tokens of a small model.
const KV_STAGING_BYTES: u64 = 512 << 20;

/// What is multiplied in which type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Dtype {
    /// Integer dot products for quantised weights with activations of two 8-bit digits (254 times as fine as one), f32 for the rest.
    Auto,
    /// The same with activations of one 8-bit digit: faster, and as coarse as other CPU engines.
    Int8,
    /// Exact dequantisation, f32 activations and products.
    Float32,
}

impl Dtype {
    /// What it asks of the products.
    pub fn precision(self) -> Precision {
        match self {
            Dtype::Auto => Precision::Int16,
            Dtype::Int8 => Precision::Int8,
            Dtype::Float32 => Precision::F32,
        }
    }
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KvCacheDtype {
    /// bf16; f32 with --dtype float32 and for built-in models.
    Auto,
    /// f32.
    #[value(name = "f32", alias = "float32")]
    F32,
    /// bf16.
    #[value(name = "bf16", alias = "bfloat16")]
    Bf16,
    /// f16.
    #[value(name = "f16", alias = "float16")]
    F16,
    /// FP8 E4M3 with a scale a token and kv head.
    #[value(name = "fp8_e4m3", alias = "fp8")]
    E4m3,
    /// 8-bit integers with a scale a token and kv head.
    Int8,
    /// 4-bit integers with a scale a token and kv head.
    Int4,
}

/// Flags of the engine, named as vLLM names them.
#[derive(clap::Args)]
pub struct EngineFlags {
    /// How weights are multiplied.
    #[arg(long, value_enum, default_value = "auto")]
    pub dtype: Dtype,
    /// Prompt and output tokens of one request [default: the model's limit, as far as memory allows].
    #[arg(long)]
    pub max_model_len: Option<usize>,
    /// Tokens of a KV-cache page.
    #[arg(long, default_value_t = EngineOptions::default().page_size)]
    pub block_size: usize,
    /// How keys and values are stored.
    #[arg(long, value_enum, default_value = "auto")]
    pub kv_cache_dtype: KvCacheDtype,
    /// Layers that store bf16 all the same, where the type has fewer bits: numbers and ranges, as in 0,1,28-29.
    #[arg(long)]
    pub kv_cache_dtype_skip_layers: Option<LayerSet>,
    /// Most recent tokens before each query, its own included, that are read in bf16, where the type has fewer bits; 0 is none.
    #[arg(long, default_value_t = 0)]
    pub kv_cache_recent_tokens: usize,
    /// First tokens of a request that are read in bf16 as well, in whole pages; 0 is none.
    #[arg(long, default_value_t = 0)]
    pub kv_cache_sink_tokens: usize,
    /// Logits whose bits do not depend on what is cached, chunked or batched around a request; slower.
    #[arg(long)]
    pub batch_invariant: bool,
    /// Which cached prefixes go first when pages are needed: lru, lfu or priority (`cache_priority` of a request).
    #[arg(long, default_value_t = EvictionPolicy::Lru)]
    pub prefix_cache_eviction: EvictionPolicy,
    /// Bytes of the KV cache [default: room for four requests of full length, at most a quarter of memory].
    #[arg(long)]
    pub kv_cache_memory_bytes: Option<u64>,
    /// Pages of the KV cache, instead of bytes.
    #[arg(long, conflicts_with = "kv_cache_memory_bytes")]
    pub num_gpu_blocks_override: Option<usize>,
    /// Pages of the layers with a sliding window, which have pages of their own unless pages are kept below the pool [default: two windows
    /// for each request that runs at once].
    #[arg(long, conflicts_with_all = ["kv_disk_path", "kv_host_bytes"])]
    pub kv_window_pages: Option<usize>,
    /// Requests that run at once.
    #[arg(long, default_value_t = EngineOptions::default().max_num_seqs)]
    pub max_num_seqs: usize,
    /// Tokens of one step: decodes and prompt chunks together.
    #[arg(long, default_value_t = EngineOptions::default().max_num_batched_tokens)]
    pub max_num_batched_tokens: usize,
    /// Keep computed prefixes for later requests (on unless turned off).
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt whole. The last of the two flags counts.
    #[arg(long, overrides_with = "enable_prefix_caching")]
    pub no_enable_prefix_caching: bool,
    /// A folder for pages below the memory's: finished prompts are kept there and survive a restart; loaded where that is faster than
    /// computing them.
    #[arg(long)]
    pub kv_disk_path: Option<PathBuf>,
    /// Bytes kept in that folder.
    #[arg(long, default_value_t = 8 << 30, requires = "kv_disk_path")]
    pub kv_disk_bytes: u64,
    /// Bytes of host memory for finished prompts' pages that the pool has no room for, in front of the folder if there is one; 0 is none.
    #[arg(long, default_value_t = 0)]
    pub kv_host_bytes: u64,
    /// Threads of the model [default: one for each core].
    #[arg(long)]
    pub threads: Option<usize>,
}

impl EngineFlags {
    /// Where pages are kept below the pool, if anywhere.
    pub fn lower_tiers(&self) -> Option<LowerTiers> {
        let folder = self.kv_disk_path.clone();
        (folder.is_some() || self.kv_host_bytes > 0).then_some(LowerTiers {
            folder,
            disk_bytes: self.kv_disk_bytes,
            host_bytes: self.kv_host_bytes,
            staging_bytes: KV_STAGING_BYTES,
        })
    }

    /// Options for the model named by `spec`.
    pub fn options(&self, spec: &str) -> anyhow::Result<EngineOptions> {
        let exact = self.dtype == Dtype::Float32 || spec.starts_with("builtin:");
        if self.threads == Some(0) {
            bail!("--threads 0: supported: at least 1");
        }
        Ok(EngineOptions {
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            page_size: self.block_size,
            kv_cache_dtype: match self.kv_cache_dtype {
                KvCacheDtype::Auto if exact => DType::F32,
                KvCacheDtype::Auto | KvCacheDtype::Bf16 => DType::Bf16,
                KvCacheDtype::F32 => DType::F32,
                KvCacheDtype::F16 => DType::F16,
                KvCacheDtype::E4m3 => DType::E4m3,
                KvCacheDtype::Int8 => DType::I8,
                KvCacheDtype::Int4 => DType::I4,
            },
            kv_cache_dtype_skip_layers: self.kv_cache_dtype_skip_layers.unwrap_or_default(),
            kv_cache_near: NearTokens {
                sinks: self.kv_cache_sink_tokens,
                recent: self.kv_cache_recent_tokens,
            },
            batch_invariant: self.batch_invariant,
            prefix_cache_eviction: self.prefix_cache_eviction,
            kv_cache_memory_bytes: self.kv_cache_memory_bytes,
            num_pages_override: self.num_gpu_blocks_override,
            window_groups: self.lower_tiers().is_none(),
            window_pages: self.kv_window_pages,
            threads: self.threads.unwrap_or(0),
            precision: self.dtype.precision(),
            enable_prefix_caching: self.enable_prefix_caching || !self.no_enable_prefix_caching,
            ..EngineOptions::default()
        })
    }
}

/// Loads `spec` with a progress bar on standard error; warnings about the files go to the log.
pub fn load(spec: &str) -> anyhow::Result<Arc<Model>> {
    let bar = ProgressBar::no_length();
    let style = "{msg:32!} {wide_bar} {bytes}/{total_bytes}";
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    let model = suanpan_model::load(spec, &LoadOptions::default(), &mut |p: LoadProgress| {
        let verb = if p.stage == LoadStage::Download { "fetching" } else { "reading" };
        bar.set_length(p.total_bytes);
        bar.set_position(p.done_bytes);
        bar.set_message(format!("{verb} {}", p.item));
    });
    bar.finish_and_clear();
    Ok(Arc::new(model?))
}

/// Starts an engine for `model` with room for `max_requests` requests, running and waiting.
pub fn start(
    model: &Arc<Model>,
    options: EngineOptions,
    lower: Option<LowerTiers>,
    max_requests: usize,
) -> anyhow::Result<EngineHandle> {
    let mut engine = Engine::new(Arc::clone(model), options)?;
    if let Some(lower) = lower {
        engine = engine.with_lower_tiers(&lower)?;
    }
    EngineHandle::spawn(engine, HandleOptions { max_requests }).context("starting the engine's thread")
}

/// A bar for a long prefill, hidden until it has a length.
pub fn prefill_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    let style = "prefill {wide_bar} {pos}/{len} tokens, {per_sec}, {eta} left";
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
