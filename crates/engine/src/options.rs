//! How an engine is run, and how large its KV cache becomes: from options, model and memory to pages, with the reason in words.

use std::fmt;

use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, DType};
use suanpan_cache::memory::HostMemory;
use suanpan_cache::{EvictionPolicy, LayerSet, LayerShape, NearTokens};
use suanpan_model::ModelConfig;
use suanpan_ops::Precision;

use crate::scheduler::SchedulerOptions;

const OP: &str = "engine";

/// Context limit when none is asked for, if the model claims more: position tables and buffers grow with the limit.
pub const DEFAULT_MAX_MODEL_LEN: usize = 131_072;
/// Full-length requests that the default KV cache holds, if a quarter of memory allows.
const DEFAULT_FULL_REQUESTS: usize = 4;
/// Most pages that only name tokens: their records are memory, too.
const MAX_NAMES: usize = 1 << 24;
/// Memory assumed where the system does not tell.
const ASSUMED_MEMORY_BYTES: u64 = 8 << 30;

/// Options of an engine, named as vLLM's flags where it has one.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Prompt and output tokens of one request, in all. `None`: the model's own limit, at most [`DEFAULT_MAX_MODEL_LEN`] and
    /// what the KV cache holds.
    pub max_model_len: Option<usize>,
    /// Requests that run at once.
    pub max_num_seqs: usize,
    /// Tokens a step, decodes and prompt chunks together.
    pub max_num_batched_tokens: usize,
    /// Most prompt tokens of one request in a step; 0 is no limit but the budget.
    pub long_prefill_token_threshold: usize,
    /// Tokens of a page (`--block-size`).
    pub page_size: usize,
    /// Element type of stored keys and values.
    pub kv_cache_dtype: DType,
    /// Layers that store bf16 all the same, where the type has fewer bits.
    pub kv_cache_dtype_skip_layers: LayerSet,
    /// Tokens that are read in bf16 all the same, where the type has fewer bits.
    pub kv_cache_near: NearTokens,
    /// A request's logits have the same bits whatever is cached, chunked or batched around it.
    pub batch_invariant: bool,
    /// Bytes of the KV cache. Reserved as addresses; memory is taken as pages are first used.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Pages of the KV cache instead of bytes (`--num-gpu-blocks-override`).
    pub num_pages_override: Option<usize>,
    /// Layers with a window have pages of their own, given back as soon as no token looks back to them. Without effect on models
    /// without such layers, or where the window is as long as the longest request.
    pub window_groups: bool,
    /// Pages of those layers. `None`: for two windows of each request that runs at once, at most as many as the other layers have.
    pub window_pages: Option<usize>,
    /// Threads of the model; 0 is one for each core.
    pub threads: usize,
    /// How weights are multiplied.
    pub precision: Precision,
    /// Keep computed prefixes for later requests.
    pub enable_prefix_caching: bool,
    /// Which cached prefixes go first when pages are needed.
    pub prefix_cache_eviction: EvictionPolicy,
    /// Preemptions after which a request keeps its pages to the end.
    pub max_preemptions: u32,
    /// Younger requests that may pass one that does not fit.
    pub max_overtaken: u32,
    /// Seeds the requests that bring no seed; `None` draws a new one at start.
    pub seed: Option<u64>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        let s = SchedulerOptions::default();
        EngineOptions {
            max_model_len: None,
            max_num_seqs: s.max_num_seqs,
            max_num_batched_tokens: s.max_num_batched_tokens,
            long_prefill_token_threshold: s.long_prefill_token_threshold,
            page_size: 16,
            kv_cache_dtype: DType::Bf16,
            kv_cache_dtype_skip_layers: LayerSet::NONE,
            kv_cache_near: NearTokens::NONE,
            batch_invariant: false,
            kv_cache_memory_bytes: None,
            num_pages_override: None,
            window_groups: true,
            window_pages: None,
            threads: 0,
            precision: Precision::Int16,
            enable_prefix_caching: true,
            prefix_cache_eviction: s.eviction,
            max_preemptions: s.max_preemptions,
            max_overtaken: s.max_overtaken,
            seed: None,
        }
    }
}

/// Pages of layers that look back a window only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSizing {
    /// Pages.
    pub num_pages: usize,
    /// Bytes of a page, all these layers.
    pub bytes_per_page: u64,
    /// How far the widest of them looks back, the current token included.
    pub window: usize,
    /// First tokens of a sequence that they keep in sight, in whole pages.
    pub sinks: usize,
    /// How many layers these are; layers that keep near tokens in bf16 as well count.
    pub num_layers: usize,
}

/// The size of a KV cache and where it comes from. `Display` is a line for the start report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSizing {
    /// Pages.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Bytes of a page, all layers but those of `window`.
    pub bytes_per_page: u64,
    /// The layers with a window, where they have pages of their own.
    pub window: Option<WindowSizing>,
    /// Longest request, prompt and output.
    pub max_model_len: usize,
    /// Why this many pages.
    pub reason: String,
}

impl KvSizing {
    /// Bytes of the whole cache when every page has been used.
    pub fn bytes(&self) -> u64 {
        let window = self.window.map_or(0, |w| w.num_pages as u64 * w.bytes_per_page);
        self.num_pages as u64 * self.bytes_per_page + window
    }

    /// Tokens it holds.
    pub fn tokens(&self) -> usize {
        self.num_pages * self.page_size
    }
}

impl fmt::Display for KvSizing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.bytes() as f64 / (1 << 20) as f64;
        let full = self.tokens() as f64 / self.max_model_len as f64;
        write!(
            f,
            "KV cache: {} pages of {} tokens = {} tokens, {mib:.1} MiB when full ({} bytes a token); {}; {full:.1} requests of \
             max_model_len = {}",
            self.num_pages,
            self.page_size,
            self.tokens(),
            self.bytes_per_page / self.page_size as u64,
            self.reason,
            self.max_model_len,
        )?;
        self.window.map_or(Ok(()), |w| {
            let (pages, layers, window) = (w.num_pages, w.num_layers, w.window);
            write!(f, "; {pages} pages more for {layers} layers with a window of {window}")
        })
    }
}

impl EngineOptions {
    /// The scheduler's part.
    pub fn scheduler(&self) -> SchedulerOptions {
        SchedulerOptions {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            long_prefill_token_threshold: self.long_prefill_token_threshold,
            max_preemptions: self.max_preemptions,
            max_overtaken: self.max_overtaken,
            eviction: self.prefix_cache_eviction,
        }
    }

    /// Threads of the model, with 0 resolved.
    pub fn resolved_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        if self.threads == 0 { cores() } else { self.threads }
    }

    /// Pages and context limit for a model on a machine with `memory`. Refuses, with both numbers, a cache that cannot hold one
    /// request of the length asked for.
    pub fn size_kv(&self, config: &ModelConfig, memory: HostMemory) -> Result<KvSizing, BadArgument> {
        if self.page_size == 0 {
            return Err(BadArgument::new(OP, "block_size", 0, "at least 1 token"));
        }
        let model_max = config.max_position_embeddings;
        if self.max_model_len.is_some_and(|asked| asked == 0 || asked > model_max) {
            let asked = self.max_model_len.unwrap_or_default();
            return Err(BadArgument::new(
                OP,
                "max_model_len",
                asked,
                format!("1 to {model_max} (the model's limit)"),
            ));
        }
        let near = self.kv_cache_near;
        near.check(OP, self.kv_cache_dtype, self.page_size)?;
        let stored = suanpan_model::forward::kv_layers(
            config,
            self.kv_cache_dtype,
            self.kv_cache_dtype_skip_layers,
            near,
        );
        let window = self.window_of(config);
        let of = |windowed: bool| {
            let layers = stored.iter().filter(|l| (window.is_some() && l.windowed) == windowed);
            let layers: Vec<LayerShape> = layers.map(|l| l.shape).collect();
            suanpan_cache::bytes_per_page(&layers, self.page_size).map(|bytes| (bytes as u64, layers.len()))
        };
        let (bytes_per_page, (window_bytes, num_layers)) = (of(false)?.0, of(true)?);
        let (num_pages, window_pages, reason) =
            self.group_pages(model_max, (bytes_per_page, window_bytes), window, memory)?;
        let window = window.map(|window| WindowSizing {
            num_pages: window_pages,
            bytes_per_page: window_bytes,
            window,
            sinks: near.sinks,
            num_layers,
        });
        let tokens = checked_product(OP, "num_pages * block_size", &[num_pages, self.page_size])?;
        let max_model_len = match self.max_model_len {
            Some(asked) if asked > tokens => {
                let asked = format!("{asked} tokens");
                let supported = format!(
                    "at most {tokens}: the KV cache has {num_pages} pages of {} ({reason})",
                    self.page_size
                );
                return Err(BadArgument::new(OP, "max_model_len", asked, supported));
            }
            Some(asked) => asked,
            None => model_max.min(DEFAULT_MAX_MODEL_LEN).min(tokens),
        };
        Ok(KvSizing { num_pages, page_size: self.page_size, bytes_per_page, window, max_model_len, reason })
    }

    /// The widest window, where layers with one are to have pages of their own and a request can be longer than it.
    fn window_of(&self, config: &ModelConfig) -> Option<usize> {
        let near = self.kv_cache_near.is_some().then_some(self.kv_cache_near.recent);
        let window = config.layers.iter().filter_map(|layer| layer.window).chain(near).max()?;
        let held = window.saturating_add(self.kv_cache_near.sinks);
        let longest = self.max_model_len.unwrap_or(config.max_position_embeddings.min(DEFAULT_MAX_MODEL_LEN));
        (self.window_groups && held.saturating_add(4 * self.page_size) < longest).then_some(window)
    }

    /// Pages of the two groups of layers, whose pages have so many bytes. Where no layer looks back to the first token, pages of the
    /// first group cost nothing: they only name what is cached.
    fn group_pages(
        &self,
        model_max: usize,
        (full, windowed): (u64, u64),
        window: Option<usize>,
        memory: HostMemory,
    ) -> Result<(usize, usize, String), BadArgument> {
        let Some(window) = window else {
            let (pages, reason) = self.pages(model_max, full, 0, memory)?;
            return Ok((pages, 0, reason));
        };
        // A request holds its window, a chunk being computed, and a cached prefix's window it started from.
        let one = window.div_ceil(self.page_size) + self.kv_cache_near.sinks / self.page_size + 4;
        let chunk = self.max_num_batched_tokens.div_ceil(self.page_size);
        let wanted = one.saturating_mul(2).saturating_mul(self.max_num_seqs.max(1)).saturating_add(chunk);
        let together = self.pages(model_max, full + windowed, 0, memory)?;
        let window_pages = self.window_pages.unwrap_or(wanted.min(together.0));
        if window_pages < one.min(together.0) {
            let supported = format!("at least {}: one window of {window} tokens", one.min(together.0));
            return Err(BadArgument::new(OP, "kv_window_pages", window_pages, supported));
        }
        let reserved = (window_pages as u64).saturating_mul(windowed);
        let (pages, reason) = match full {
            0 => {
                let len = self.max_model_len.unwrap_or(model_max.min(DEFAULT_MAX_MODEL_LEN));
                let names = len.div_ceil(self.page_size).saturating_mul(DEFAULT_FULL_REQUESTS);
                let names = self.num_pages_override.unwrap_or(names.max(window_pages.saturating_mul(4)));
                (names.min(MAX_NAMES), together.1)
            }
            _ => self.pages(model_max, full, reserved, memory)?,
        };
        Ok((pages, window_pages, reason))
    }

    /// Pages of `page_bytes`, where `reserved` bytes of what there is go elsewhere.
    fn pages(
        &self,
        model_max: usize,
        page_bytes: u64,
        reserved: u64,
        memory: HostMemory,
    ) -> Result<(usize, String), BadArgument> {
        match (self.num_pages_override, self.kv_cache_memory_bytes) {
            (Some(_), Some(_)) => {
                let supported = "either num_gpu_blocks_override or kv_cache_memory_bytes";
                Err(BadArgument::new(OP, "kv_cache_memory_bytes", "both", supported))
            }
            (Some(0), None) => Err(BadArgument::new(OP, "num_gpu_blocks_override", 0, "at least 1 page")),
            (Some(pages), None) => Ok((pages, "pages as asked".into())),
            (None, Some(bytes)) if bytes < reserved.saturating_add(page_bytes) => {
                let supported = format!("at least one page = {} bytes", reserved.saturating_add(page_bytes));
                Err(BadArgument::new(OP, "kv_cache_memory_bytes", bytes, supported))
            }
            (None, Some(bytes)) => {
                let pages = usize::try_from((bytes - reserved) / page_bytes).unwrap_or(usize::MAX);
                Ok((pages, format!("{bytes} bytes as asked")))
            }
            (None, None) => self.default_pages(model_max, page_bytes, reserved, memory),
        }
    }

    fn default_pages(
        &self,
        model_max: usize,
        page_bytes: u64,
        reserved: u64,
        memory: HostMemory,
    ) -> Result<(usize, String), BadArgument> {
        let limit = memory.limit_bytes.unwrap_or(ASSUMED_MEMORY_BYTES);
        let pages_in = |bytes: u64| usize::try_from(bytes / page_bytes).unwrap_or(usize::MAX);
        let quarter = pages_in((limit / 4).saturating_sub(reserved)).max(1);
        let len = self.max_model_len.unwrap_or(model_max.min(DEFAULT_MAX_MODEL_LEN));
        let one = len.div_ceil(self.page_size);
        let requests = self.max_num_seqs.clamp(1, DEFAULT_FULL_REQUESTS);
        let wanted = one.saturating_mul(requests);
        if wanted <= quarter {
            return Ok((wanted, format!("room for {requests} requests of {len} tokens")));
        }
        if self.max_model_len.is_none() || one <= quarter {
            return Ok((quarter, format!("a quarter of {} MiB of memory", limit >> 20)));
        }
        // A length asked for by name is honoured past the quarter, but not past what can ever be resident.
        let most = pages_in((limit / 10 * 9).saturating_sub(reserved));
        if one > most {
            let asked = format!(
                "{len} tokens ({} MiB of keys and values)",
                (one as u64).saturating_mul(page_bytes) >> 20
            );
            let supported =
                format!("at most {} tokens in 9/10 of {} MiB of memory", most * self.page_size, limit >> 20);
            return Err(BadArgument::new(OP, "max_model_len", asked, supported));
        }
        Ok((one, "room for one request of max_model_len".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use suanpan_model::recall;

    const MEMORY: HostMemory = HostMemory { limit_bytes: Some(16 << 30), available_bytes: None };

    fn size(change: impl Fn(&mut EngineOptions)) -> Result<KvSizing, BadArgument> {
        let mut opts = EngineOptions { window_groups: false, ..EngineOptions::default() };
        change(&mut opts);
        opts.size_kv(&recall::config(), MEMORY)
    }

    fn bytes_per_token() -> u64 {
        let config = recall::config();
        let heads = config.heads;
        (config.layers.len() * heads.num_kv_heads * heads.kv_width() * 2) as u64
    }

    #[test]
    fn default_holds_four_full_requests_within_a_quarter_of_memory() {
        let sizing = size(|_| ()).unwrap();
        assert_eq!(sizing.bytes_per_page, 16 * bytes_per_token());
        assert_eq!(
            (sizing.max_model_len, sizing.tokens()),
            (DEFAULT_MAX_MODEL_LEN, 4 * DEFAULT_MAX_MODEL_LEN)
        );
        assert!(sizing.to_string().contains("4.0 requests of max_model_len = 131072"), "{sizing}");
        let few = HostMemory { limit_bytes: Some(256 << 20), available_bytes: None };
        let plain = EngineOptions { window_groups: false, ..EngineOptions::default() };
        let small = plain.size_kv(&recall::config(), few).unwrap();
        assert!(small.bytes() <= 64 << 20);
        assert_eq!(small.max_model_len, small.tokens().min(DEFAULT_MAX_MODEL_LEN));
    }

    #[test]
    fn a_length_asked_for_goes_past_the_quarter_but_not_past_memory() {
        let per_token = bytes_per_token();
        let half = ((8u64 << 30) / per_token) as usize;
        assert_eq!(size(|o| o.max_model_len = Some(half)).unwrap().tokens(), half.next_multiple_of(16));
        let twice = (((32u64 << 30) / per_token) as usize).min(recall::MAX_TOKENS);
        if twice as u64 * per_token > 15 << 30 {
            assert_eq!(size(|o| o.max_model_len = Some(twice)).unwrap_err().field, "max_model_len");
        }
    }

    #[test]
    fn pages_or_bytes_as_asked_bound_the_context() {
        let by_pages = size(|o| o.num_pages_override = Some(12)).unwrap();
        assert_eq!((by_pages.num_pages, by_pages.max_model_len), (12, 192));
        let by_bytes = size(|o| o.kv_cache_memory_bytes = Some(10 * 16 * bytes_per_token() + 1)).unwrap();
        assert_eq!(by_bytes.num_pages, 10);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_by_name() {
        let field = |change: fn(&mut EngineOptions)| size(change).unwrap_err().field;
        assert_eq!(
            field(|o| (o.num_pages_override, o.max_model_len) = (Some(12), Some(193))),
            "max_model_len"
        );
        assert_eq!(field(|o| o.max_model_len = Some(0)), "max_model_len");
        assert_eq!(field(|o| o.max_model_len = Some(recall::MAX_TOKENS + 1)), "max_model_len");
        assert_eq!(field(|o| o.kv_cache_memory_bytes = Some(1)), "kv_cache_memory_bytes");
        assert_eq!(
            field(|o| (o.num_pages_override, o.kv_cache_memory_bytes) = (Some(1), Some(1 << 30))),
            "kv_cache_memory_bytes"
        );
        assert_eq!(field(|o| o.num_pages_override = Some(0)), "num_gpu_blocks_override");
        assert_eq!(field(|o| o.page_size = 0), "block_size");
    }
}
