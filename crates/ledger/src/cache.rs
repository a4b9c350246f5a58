//! Ledger 2: what a KV cache holds, in bytes and pages, before anything is allocated.
//!
//! Closed forms over shapes; what a running cache does hold is counted by the `cache` room. All sequences of a request
//! here have one length, each starts a page of its own, and a page spans all layers.

use std::collections::BTreeMap;

use serde::Serialize;
use suanpan_base::{BadArgument, DType, HeadShape};

const OP: &str = "cache ledger";

/// Most layers accepted.
pub const MAX_LAYERS: usize = 1 << 16;
/// Most query heads accepted.
pub const MAX_HEADS: usize = 1 << 16;

/// What one layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayer {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Keys a query sees, its own included; None: all before it.
    pub window: Option<usize>,
}

/// The question: which layers, how long, how many, in which pages, into how much memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheRequest {
    /// Every layer that has a cache.
    pub layers: Vec<CacheLayer>,
    /// Tokens of each sequence.
    pub context_tokens: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Memory to fill, if that is asked.
    pub memory_bytes: Option<u64>,
}

/// The answer; the keys of its JSON form are stable.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheLedger {
    /// Layers with a cache.
    pub layers: usize,
    /// Layers among them that see a window only.
    pub window_layers: usize,
    /// Tokens of each sequence.
    pub context_tokens: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a page.
    pub page_size_tokens: usize,
    /// Pages of one sequence.
    pub pages_per_sequence: u64,
    /// Pages of all sequences.
    pub pages: u64,
    /// Slots of each sequence's last page that hold no token.
    pub waste_tokens_per_sequence: u64,
    /// One entry for each element type that needs no scales.
    pub dtypes: Vec<DTypeCache>,
    /// The same cache under every group size that the query heads allow; empty where layers differ in their heads.
    pub groups: Vec<GroupCache>,
}

/// The cache in one element type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DTypeCache {
    /// Name of the type.
    pub dtype: &'static str,
    /// Bytes of one token over all layers.
    pub bytes_per_token: u64,
    /// Bytes of one page over all layers.
    pub bytes_per_page: u64,
    /// batch · tokens · Σ layers kv_heads · (head_dim_qk + head_dim_v) · element.
    pub bytes: u64,
    /// The same in whole pages: what must be allocated.
    pub allocated_bytes: u64,
    /// `allocated_bytes - bytes`.
    pub waste_bytes: u64,
    /// What a cache would hold that keeps only each layer's window (= `bytes` without windows).
    pub windowed_bytes: u64,
    /// What fits in the given memory; absent where none was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<Fits>,
}

/// What a given memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fits {
    /// The memory.
    pub memory_bytes: u64,
    /// Whole pages.
    pub pages: u64,
    /// Sequences of the asked context.
    pub sequences: u64,
    /// Longest context of the asked number of sequences, in tokens (whole pages).
    pub context_tokens: u64,
}

/// The cache if the query heads shared keys and values in groups of another size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupCache {
    /// Query heads per kv head (1 = MHA, all = MQA).
    pub group_size: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Whether this is the model's own.
    pub this_model: bool,
    /// Bytes by the name of the element type.
    pub bytes: BTreeMap<&'static str, u64>,
}

/// Pages that `tokens` tokens need.
pub const fn pages_for(tokens: u64, page_size: u64) -> u64 {
    tokens.div_ceil(page_size)
}

/// Bytes of one token in one layer.
pub fn token_bytes(heads: HeadShape, dtype: DType) -> u128 {
    heads.num_kv_heads as u128 * heads.kv_width() as u128 * dtype.bits() as u128 / 8
}

/// Tokens of a sequence of `tokens` that a layer's next query can still see.
pub fn kept_tokens(window: Option<usize>, tokens: usize) -> usize {
    window.map_or(tokens, |w| w.min(tokens))
}

impl CacheRequest {
    /// The books of this request. Refused by field: zero sizes, heads that do not group, sums past 64 bits.
    pub fn ledger(&self) -> Result<CacheLedger, BadArgument> {
        self.check()?;
        let (tokens, page_size) = (self.context_tokens as u64, self.page_size as u64);
        let pages_per_sequence = pages_for(tokens, page_size);
        let pages = narrow("pages", u128::from(pages_per_sequence) * self.batch as u128)?;
        let slots = u128::from(pages_per_sequence) * u128::from(page_size);
        let waste_tokens_per_sequence = narrow("page_size", slots - u128::from(tokens))?;
        Ok(CacheLedger {
            layers: self.layers.len(),
            window_layers: self.layers.iter().filter(|l| l.window.is_some()).count(),
            context_tokens: self.context_tokens,
            batch: self.batch,
            page_size_tokens: self.page_size,
            pages_per_sequence,
            pages,
            waste_tokens_per_sequence,
            dtypes: DType::UNSCALED
                .iter()
                .map(|&d| self.in_dtype(d, pages_per_sequence))
                .collect::<Result<_, _>>()?,
            groups: self.groups()?,
        })
    }

    fn check(&self) -> Result<(), BadArgument> {
        let sizes = [
            ("layers", self.layers.len(), MAX_LAYERS),
            ("context", self.context_tokens, usize::MAX),
            ("batch", self.batch, usize::MAX),
            ("page_size", self.page_size, usize::MAX),
        ];
        for (field, n, most) in sizes {
            if n == 0 || n > most {
                let supported =
                    if most == usize::MAX { "at least 1".into() } else { format!("1 ..= {most}") };
                return Err(BadArgument::new(OP, field, n, supported));
            }
        }
        for layer in &self.layers {
            layer.heads.check(OP)?;
            if layer.heads.num_q_heads > MAX_HEADS {
                let asked = layer.heads.num_q_heads;
                return Err(BadArgument::new(OP, "num_q_heads", asked, format!("1 ..= {MAX_HEADS}")));
            }
            if layer.window == Some(0) {
                return Err(BadArgument::new(
                    OP,
                    "window",
                    0,
                    "at least 1: a window counts the current token",
                ));
            }
        }
        Ok(())
    }

    fn in_dtype(&self, dtype: DType, pages_per_sequence: u64) -> Result<DTypeCache, BadArgument> {
        let batch = self.batch as u128;
        let per_token = sum(self.layers.iter().map(|l| Some(token_bytes(l.heads, dtype))))?;
        let windowed = sum(self.layers.iter().map(|l| {
            token_bytes(l.heads, dtype)
                .checked_mul(kept_tokens(l.window, self.context_tokens) as u128)?
                .checked_mul(batch)
        }))?;
        let page = product(&[per_token, self.page_size as u128])?;
        let bytes = product(&[per_token, self.context_tokens as u128, batch])?;
        let allocated = product(&[page, u128::from(pages_per_sequence), batch])?;
        let bytes_per_page = narrow("bytes_per_page", page)?;
        let fits = self.memory_bytes.map(|memory_bytes| {
            let pages = memory_bytes / bytes_per_page;
            Fits {
                memory_bytes,
                pages,
                sequences: pages / pages_per_sequence,
                context_tokens: pages / self.batch as u64 * self.page_size as u64,
            }
        });
        Ok(DTypeCache {
            dtype: dtype.name(),
            bytes_per_token: narrow("bytes_per_token", per_token)?,
            bytes_per_page,
            bytes: narrow("bytes", bytes)?,
            allocated_bytes: narrow("allocated_bytes", allocated)?,
            waste_bytes: narrow("waste_bytes", allocated - bytes)?,
            windowed_bytes: narrow("windowed_bytes", windowed)?,
            fits,
        })
    }

    fn groups(&self) -> Result<Vec<GroupCache>, BadArgument> {
        let heads = self.layers[0].heads;
        if self.layers.iter().any(|l| l.heads != heads) {
            return Ok(Vec::new());
        }
        let factors = [self.layers.len(), self.context_tokens, self.batch].map(|n| n as u128);
        (1..=heads.num_q_heads)
            .filter(|group| heads.num_q_heads.is_multiple_of(*group))
            .map(|group_size| {
                let num_kv_heads = heads.num_q_heads / group_size;
                let of = |dtype: DType| {
                    let token = token_bytes(HeadShape { num_kv_heads, ..heads }, dtype);
                    let bytes = product(&[token, factors[0], factors[1], factors[2]])?;
                    Ok((dtype.name(), narrow("bytes", bytes)?))
                };
                let bytes = DType::UNSCALED.iter().map(|&d| of(d)).collect::<Result<_, _>>()?;
                Ok(GroupCache {
                    group_size,
                    num_kv_heads,
                    this_model: group_size == heads.group_size(),
                    bytes,
                })
            })
            .collect()
    }
}

fn too_large() -> BadArgument {
    BadArgument::new(OP, "bytes", "a product past 64 bits", "at most 2^64 - 1 bytes")
}

fn sum(mut terms: impl Iterator<Item = Option<u128>>) -> Result<u128, BadArgument> {
    terms.try_fold(0u128, |sum, term| sum.checked_add(term?)).ok_or_else(too_large)
}

fn product(factors: &[u128]) -> Result<u128, BadArgument> {
    factors.iter().try_fold(1u128, |p, &f| p.checked_mul(f)).ok_or_else(too_large)
}

fn narrow(field: &'static str, n: u128) -> Result<u64, BadArgument> {
    u64::try_from(n).map_err(|_| BadArgument::new(OP, field, n, "at most 2^64 - 1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(layers: usize, heads: HeadShape, context_tokens: usize, batch: usize) -> CacheRequest {
        let layers = vec![CacheLayer { heads, window: None }; layers];
        CacheRequest { layers, context_tokens, batch, page_size: 16, memory_bytes: None }
    }

    #[test]
    fn an_8b_model_at_128k_takes_16_gib_a_sequence_in_bf16() {
        let ledger = request(32, HeadShape::new(32, 8, 128), 131_072, 8).ledger().unwrap();
        let bf16 = &ledger.dtypes[1];
        assert_eq!((bf16.dtype, bf16.bytes_per_token, bf16.bytes), ("bf16", 128 << 10, 8 * (16u64 << 30)));
        assert_eq!((ledger.pages, ledger.waste_tokens_per_sequence, bf16.waste_bytes), (65_536, 0, 0));
        let groups: Vec<_> = ledger.groups.iter().map(|g| (g.group_size, g.num_kv_heads)).collect();
        assert_eq!(groups, [(1, 32), (2, 16), (4, 8), (8, 4), (16, 2), (32, 1)]);
        assert!(ledger.groups[2].this_model && ledger.groups[2].bytes["bf16"] == bf16.bytes);
        assert_eq!(ledger.groups[0].bytes["bf16"], 4 * bf16.bytes);
    }

    #[test]
    fn the_last_page_wastes_what_the_context_does_not_fill() {
        let ledger = request(2, HeadShape::new(2, 1, 8), 33, 3).ledger().unwrap();
        assert_eq!((ledger.pages_per_sequence, ledger.pages, ledger.waste_tokens_per_sequence), (3, 9, 15));
        let f32 = &ledger.dtypes[0];
        assert_eq!((f32.bytes_per_token, f32.bytes), (2 * 16 * 4, 33 * 3 * 128));
        assert_eq!((f32.allocated_bytes, f32.waste_bytes), (48 * 3 * 128, 15 * 3 * 128));
    }

    #[test]
    fn widths_of_keys_and_values_may_differ() {
        let heads = HeadShape::with_widths(4, 2, 192, 128);
        assert_eq!(request(1, heads, 1, 1).ledger().unwrap().dtypes[1].bytes, 2 * 320 * 2);
    }

    #[test]
    fn window_layers_keep_at_most_their_window() {
        let mut r = request(2, HeadShape::new(1, 1, 8), 100, 1);
        r.layers[0].window = Some(10);
        let ledger = r.ledger().unwrap();
        assert_eq!((ledger.window_layers, ledger.dtypes[1].windowed_bytes), (1, 110 * 32));
        assert_eq!(ledger.dtypes[1].bytes, 200 * 32);
        r.context_tokens = 5;
        assert_eq!(r.ledger().unwrap().dtypes[1].windowed_bytes, 10 * 32);
    }

    #[test]
    fn memory_is_filled_in_whole_pages() {
        let mut r = request(1, HeadShape::new(1, 1, 8), 40, 2);
        // A page is 16 tokens of 32 bytes; ten pages and a half.
        r.memory_bytes = Some(512 * 10 + 256);
        let fits = r.ledger().unwrap().dtypes[1].fits.unwrap();
        assert_eq!((fits.pages, fits.sequences, fits.context_tokens), (10, 3, 80));
    }

    #[test]
    fn impossible_requests_are_refused_by_field() {
        let ok = request(2, HeadShape::new(2, 1, 8), 33, 3);
        let field = |change: fn(&mut CacheRequest)| {
            let mut r = ok.clone();
            change(&mut r);
            r.ledger().unwrap_err().field
        };
        assert_eq!(field(|r| r.layers.clear()), "layers");
        assert_eq!(field(|r| r.context_tokens = 0), "context");
        assert_eq!(field(|r| r.batch = 0), "batch");
        assert_eq!(field(|r| r.page_size = 0), "page_size");
        assert_eq!(field(|r| r.layers[1].window = Some(0)), "window");
        assert_eq!(field(|r| r.layers[1].heads.num_kv_heads = 3), "num_kv_heads");
        assert_eq!(field(|r| r.layers[0].heads.num_q_heads = 1 << 20), "num_q_heads");
        assert_eq!(field(|r| (r.context_tokens, r.batch) = (usize::MAX, usize::MAX)), "pages");
        assert_eq!(field(|r| r.context_tokens = usize::MAX), "bytes");
        assert_eq!(field(|r| r.layers[0].heads.head_dim_qk = usize::MAX), "bytes_per_page");
    }
}
