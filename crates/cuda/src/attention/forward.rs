//! Launch of `kernels/attention/forward.cu`: exact attention of packed sequences over contiguous or paged K and V.
use super::Operand;
use super::decode::{KvType, Pages};
use crate::driver::{Address, Gpu};
use crate::shapes::FORWARD;
use crate::tensor_map::{TensorMap, encode};
use crate::{Dtype, Error};
use std::ffi::c_void;
use suanpan_attn::{BiasStrides, DropoutKey};
use suanpan_base::{Mask, SeqLen};

/// Where K and V lie.
#[derive(Clone, Copy, Debug)]
pub enum KeysValues {
    /// Sequences one after another.
    Packed {
        /// `[total_k, num_kv_heads, head_dim]`.
        k: Operand,
        /// `[total_k, num_kv_heads, head_dim_v]`.
        v: Operand,
    },
    /// Pages found through a table.
    Paged(Paged),
}

/// K and V in pages. Only pages with a key that some row sees are read: the other ids of the table may be anything.
#[derive(Clone, Copy, Debug)]
pub struct Paged {
    /// `[num_pages, page_size, num_kv_heads, head_dim]`.
    pub k: Pages,
    /// `[num_pages, page_size, num_kv_heads, head_dim_v]`.
    pub v: Pages,
    /// `[batch, pages_max]` i32.
    pub page_table: Address,
    /// Row length of the page table.
    pub pages_max: u32,
    /// Pages of each of k and v.
    pub num_pages: u32,
    /// Tokens a page, a multiple of 16.
    pub page_size: u32,
}

impl Paged {
    /// Strides in bytes (pages, tokens, heads) for kernels that move `tokens` rows of `kv_type` in or out: `shape` is (tokens, num_kv_heads,
    /// head_dim). Refuses what they do not count or copy.
    pub(super) fn row_strides(&self, kv_type: KvType, shape: (u32, u32, u32)) -> Result<[i64; 3], Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        let (tokens, heads, head_dim) = shape;
        if ![64, 128, 256].contains(&head_dim) {
            return bad("head_dim", head_dim.to_string(), "64, 128, 256");
        }
        if heads == 0 || heads > 1 << 16 || tokens > 1 << 30 {
            let asked = format!("{heads} heads, {tokens} tokens");
            return bad("num_kv_heads, tokens", asked, "1 to 2^16 heads, up to 2^30 tokens");
        }
        if self.page_size == 0 || self.num_pages > i32::MAX as u32 || self.pages_max > i32::MAX as u32 {
            let asked = format!("{}, {}, {}", self.page_size, self.num_pages, self.pages_max);
            return bad("page_size, num_pages, pages_max", asked, "a positive size, counts below 2^31");
        }
        if self.k.address == 0 || self.v.address == 0 {
            return bad(
                "k, v",
                format!("{:#x}, {:#x}", self.k.address, self.v.address),
                "pages on the device",
            );
        }
        self.k.same_strides(&self.v, kv_type)
    }

    /// Refuses a host copy of the page table (`[batch, pages_max]`) in which a page that the rows of `lens` see is not a
    /// page. The kernel itself reads zeros from such a page: wrong, but nothing of anybody else's.
    pub fn check_ids(&self, table: &[i32], lens: &[SeqLen], mask: &Mask) -> Result<(), Error> {
        let (page_size, pages_max) = (self.page_size.max(1) as usize, self.pages_max as usize);
        for (b, &len) in lens.iter().enumerate() {
            let pages = mask.visible_hull(len, 0..len.seqlen_q).tiles(page_size);
            for page in pages.into_iter().flatten() {
                let id = (page < pages_max).then(|| table.get(b * pages_max + page)).flatten();
                if !id.is_some_and(|&id| u32::try_from(id).is_ok_and(|id| id < self.num_pages)) {
                    let asked =
                        format!("{id:?} as page {page} of sequence {b} among {} pages", self.num_pages);
                    return Err(Error::Unsupported {
                        field: "page_table",
                        asked,
                        supported: "ids below num_pages",
                    });
                }
            }
        }
        Ok(())
    }
}

/// Numbers added to scores, natural: f32 at `[sequence, query head, query token, key]`, both counted within the sequence.
#[derive(Clone, Copy, Debug)]
pub struct Bias {
    /// Of the first number, a multiple of 4 bytes.
    pub address: Address,
    /// In elements; 0 repeats the numbers, and the key's is 0 or 1.
    pub strides: BiasStrides,
}

/// Which weights are dropped: those that `suanpan_attn::dropout` drops.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// The probability, below 1.
    pub probability: f32,
    /// Seed, and where the call stands in the numbering; `first_key` a multiple of 4.
    pub key: DropoutKey,
}

/// What happens to scores beyond scale and mask, in this order: softcap, bias, ALiBi, (mask), sink, dropout of the weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scores {
    /// `cap * tanh(score / cap)`; positive and finite.
    pub softcap: Option<f32>,
    /// Added after it.
    pub bias: Option<Bias>,
    /// After the sums: lse does not see it.
    pub dropout: Option<Dropout>,
    /// `[num_q_heads]` f32: a key at distance x from the row's own position loses `slope * x`.
    pub alibi_slopes: Option<Address>,
    /// `[num_q_heads]` f32: a logit that joins the denominator and has no value.
    pub sinks: Option<Address>,
}

/// Which of the last seqlen_q keys each row sees, on top of the mask.
#[derive(Clone, Copy, Debug)]
pub struct Tree {
    /// `[total_q, words]` u32: bit j % 32 of word j / 32 is key seqlen_k - seqlen_q + j.
    pub bits: Address,
    /// At least seqlen_q_max / 32, rounded up.
    pub words: u32,
}

/// Everything one launch needs. Lengths come from the prefix sums, or are uniform where those are `None`.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// `[total_q, num_q_heads, head_dim]`.
    pub q: Operand,
    /// Keys and values.
    pub kv: KeysValues,
    /// `[total_q, num_q_heads, head_dim_v]`.
    pub o: Operand,
    /// `[num_q_heads, total_q]` f32, natural logarithm.
    pub lse: Address,
    /// 8 bytes for each split, zero before the first launch; one per stream.
    pub counter: Address,
    /// `[batch + 1]` i32.
    pub cu_seqlens_q: Option<Address>,
    /// The same for keys; of paged ones only the differences count.
    pub cu_seqlens_k: Option<Address>,
    /// Query tokens of all sequences.
    pub total_q: u32,
    /// Key tokens of all sequences.
    pub total_k: u32,
    /// Sequences.
    pub batch: u32,
    /// The longest query length; every one where there are no prefix sums.
    pub seqlen_q_max: u32,
    /// The same for keys.
    pub seqlen_k_max: u32,
    /// A multiple of num_kv_heads.
    pub num_q_heads: u32,
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// Elements of a query and a key.
    pub head_dim: u32,
    /// Elements of a value and an output.
    pub head_dim_v: u32,
    /// Of q, k, v and o.
    pub dtype: Dtype,
    /// Which keys a row sees.
    pub mask: Mask,
    /// Beyond scale and mask.
    pub scores: Scores,
    /// A mask by bits over the last keys.
    pub tree: Option<Tree>,
    /// Positive; usually 1 / sqrt(head_dim).
    pub softmax_scale: f32,
    /// A tile's rows are (token, query head of a group), so that few tokens fill a tile and a group reads K and V once. For groups of 2 to 64
    /// heads, a power of two, without ALiBi, sinks, bias and dropout, which differ from head to head.
    pub pack_gqa: bool,
    /// Cuts every tile's keys into parts that other blocks take, and joins them in a second kernel: for few tiles over many keys.
    pub splits: Option<Splits>,
}

/// Parts of the keys.
#[derive(Clone, Copy, Debug)]
pub struct Splits {
    /// 1 to [`SPLITS_MAX`]. 1 joins nothing, but runs on the build whose tiles have 128 rows, which fills the last round of blocks better.
    pub count: u32,
    /// [`partial_bytes`] of f32, a multiple of 16 bytes, of any content.
    pub partial: Address,
}

/// Most parts.
pub const SPLITS_MAX: u32 = 16;

/// Bytes of the results of `count` parts of `rows` (query tokens times query heads).
pub fn partial_bytes(count: u32, rows: u64, head_dim_v: u32) -> u64 {
    u64::from(count) * rows * (u64::from(head_dim_v) + 1) * 4
}

/// Tokens a sequence may have; also what the kernel takes for "unbounded", and no sum of two such overflows.
pub(super) const TOKENS_MAX: u32 = 1 << 30;

pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;

impl Forward {
    /// What holds for every element type.
    pub(super) fn check(&self) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if self.num_kv_heads == 0 || !self.num_q_heads.is_multiple_of(self.num_kv_heads) {
            let asked = format!("{} query heads on {} kv heads", self.num_q_heads, self.num_kv_heads);
            return bad("num_q_heads", asked, "a multiple of num_kv_heads");
        }
        let fits = |x: f32| x > 0.0 && (x * LOG2_E).is_finite();
        if !fits(self.softmax_scale) {
            return bad("softmax_scale", self.softmax_scale.to_string(), "positive and at most 2.3e38");
        }
        if let Some(cap) = self.scores.softcap
            && !(fits(cap) && (2.0 * self.softmax_scale * LOG2_E / cap).is_finite())
        {
            return bad(
                "softcap",
                cap.to_string(),
                "positive, at most 2.3e38 and not vanishing beside the scale",
            );
        }
        self.check_pack()?;
        let tiles =
            u64::from(self.seqlen_q_max.div_ceil(64)) * u64::from(self.batch) * u64::from(self.num_q_heads);
        let tokens = self.total_q.max(self.total_k).max(self.seqlen_q_max).max(self.seqlen_k_max);
        let rows = u64::from(self.seqlen_q_max) * u64::from(self.packed_heads());
        if tokens > TOKENS_MAX || rows > u64::from(TOKENS_MAX) || tiles > 1 << 30 {
            let asked = format!("{tokens} tokens, {tiles} tiles");
            return bad("total_q, total_k", asked, "up to 2^30 tokens and tiles");
        }
        if self.mask.sink_tokens > 0 {
            return bad(
                "mask.sink_tokens",
                self.mask.sink_tokens.to_string(),
                "0: no leading keys beside a window",
            );
        }
        if let Some(tree) = self.tree
            && (tree.words < self.seqlen_q_max.div_ceil(32) || tree.words > TOKENS_MAX / 32)
        {
            return bad("tree.words", tree.words.to_string(), "seqlen_q_max / 32, rounded up, or more");
        }
        self.check_more()?;
        self.check_splits()?;
        self.check_pages()
    }

    fn check_pack(&self) -> Result<(), Error> {
        let group = self.num_q_heads / self.num_kv_heads;
        if !self.pack_gqa || can_pack(group) && !self.differs_by_head() {
            return Ok(());
        }
        let asked = format!("true for {group} query heads a kv head, {:?}", self.scores);
        let supported = "groups of 2, 4, .. 64 heads without ALiBi, sinks, bias and dropout";
        Err(Error::Unsupported { field: "pack_gqa", asked, supported })
    }

    fn differs_by_head(&self) -> bool {
        let s = &self.scores;
        s.alibi_slopes.is_some() || s.sinks.is_some() || s.bias.is_some() || s.dropout.is_some()
    }

    fn check_splits(&self) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        match self.splits {
            Some(s) if !(1..=SPLITS_MAX).contains(&s.count) => {
                bad("splits.count", s.count.to_string(), "1 to 16")
            }
            Some(s) if s.partial == 0 || !s.partial.is_multiple_of(16) => {
                bad("splits.partial", format!("{:#x}", s.partial), "a multiple of 16 bytes")
            }
            _ => Ok(()),
        }
    }

    /// Query heads in a tile.
    pub(super) fn packed_heads(&self) -> u32 {
        if self.pack_gqa { self.num_q_heads / self.num_kv_heads } else { 1 }
    }

    fn check_more(&self) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if let Some(bias) = self.scores.bias {
            let s = bias.strides;
            if bias.address == 0 || !bias.address.is_multiple_of(4) {
                return bad("bias", format!("{:#x}", bias.address), "f32 numbers on the device");
            }
            if s.key > 1 || [s.seq, s.head, s.row].iter().any(|n| *n > 1 << 40) {
                return bad(
                    "bias strides",
                    format!("{s:?}"),
                    "0 or 1 from key to key, the others up to 2^40",
                );
            }
        }
        match self.scores.dropout {
            Some(d) if !(0.0..1.0).contains(&d.probability) => {
                bad("dropout", d.probability.to_string(), "0 up to below 1")
            }
            Some(d) if d.key.first_key % 4 != 0 => {
                bad("dropout.first_key", d.key.first_key.to_string(), "multiples of 4")
            }
            _ => Ok(()),
        }
    }

    fn check_pages(&self) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        let KeysValues::Paged(pages) = self.kv else { return Ok(()) };
        if pages.page_size == 0 || !pages.page_size.is_multiple_of(16) || pages.page_size > TOKENS_MAX {
            return bad("page_size", pages.page_size.to_string(), "multiples of 16 tokens");
        }
        if pages.num_pages == 0 || pages.num_pages > i32::MAX as u32 {
            return bad("num_pages", pages.num_pages.to_string(), "1 to 2^31 - 1");
        }
        if u64::from(pages.pages_max) * u64::from(pages.page_size) < u64::from(self.seqlen_k_max) {
            let asked =
                format!("{} pages of {} for {} keys", pages.pages_max, pages.page_size, self.seqlen_k_max);
            return bad("pages_max", asked, "enough pages for seqlen_k_max");
        }
        Ok(())
    }

    /// The kernel that a launch puts on the stream.
    pub fn kernel_name(&self) -> &'static str {
        let plain = self.plain() && !matches!(self.kv, KeysValues::Paged(_)) && !self.pack_gqa;
        function(self.mask, self.has_more(), plain)
    }

    /// Nothing happens to scores beyond scale and mask.
    pub(super) fn plain(&self) -> bool {
        let s = &self.scores;
        let few = s.softcap.is_none() && s.alibi_slopes.is_none() && s.sinks.is_none();
        few && self.tree.is_none() && !self.has_more()
    }

    fn has_more(&self) -> bool {
        self.scores.bias.is_some() || self.scores.dropout.is_some() || self.splits.is_some()
    }

    /// Maps of k and v, and the rows that one copy of them moves.
    fn key_value_maps(&self, block_n: u32) -> Result<(TensorMap, TensorMap, u32), Error> {
        let heads = u64::from(self.num_kv_heads);
        let (dim, dim_v) = (u64::from(self.head_dim), u64::from(self.head_dim_v));
        match self.kv {
            KeysValues::Packed { k, v } => {
                let map = |x: &Operand, dim: u64| {
                    let dims = [dim, u64::from(self.total_k.max(1)), heads];
                    encode(self.dtype, x.address, &dims, &[x.token_stride, x.head_stride], &[64, block_n, 1])
                };
                // No keys: the maps point at q, and nothing is read through them.
                let (k, v) = if self.total_k == 0 { (self.q, self.q) } else { (k, v) };
                Ok((map(&k, dim)?, map(&v, dim_v)?, block_n))
            }
            KeysValues::Paged(p) => {
                let rows = gcd(block_n, p.page_size);
                let map = |x: &Pages, dim: u64| {
                    let dims = [dim, u64::from(p.page_size), heads, u64::from(p.num_pages)];
                    let strides = [x.token_stride, x.head_stride, x.page_stride];
                    encode(self.dtype, x.address, &dims, &strides, &[64, rows, 1, 1])
                };
                Ok((map(&p.k, dim)?, map(&p.v, dim_v)?, rows))
            }
        }
    }

    /// Blocks for tiles of 64 * num_wg rows: one a multiprocessor, or one a tile where those are fewer.
    pub(super) fn blocks(&self, gpu: &Gpu, num_wg: u32) -> u32 {
        let packed = self.packed_heads();
        let tiles = (self.seqlen_q_max * packed).div_ceil(num_wg * 64) * (self.num_q_heads / packed);
        let splits = self.splits.map_or(1, |s| s.count);
        tiles.saturating_mul(self.batch).min(gpu.num_sms.div_ceil(splits))
    }

    /// Puts the kernel on the device's stream.
    ///
    /// # Safety
    /// The operands cover their shapes, the prefix sums are ascending and end at total_q and total_k, the page table covers
    /// the lengths, and all of it stays valid until the stream has run the kernel. `o` and `lse` overlap nothing.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        let dims = (self.head_dim, self.head_dim_v);
        if !FORWARD.iter().any(|s| (s.head_dim, s.head_dim_v) == dims) {
            return Err(Error::Unsupported {
                field: "head_dim, head_dim_v",
                asked: format!("{dims:?}"),
                supported: "64, 96, 128, 192, 256 for both, 192 and 128",
            });
        }
        self.check()?;
        if let KeysValues::Paged(pages) = self.kv {
            pages.k.without_scales("k.scales")?;
            pages.v.without_scales("v.scales")?;
        }
        if self.total_q == 0 || self.batch == 0 {
            return Ok(());
        }
        let more = if self.has_more() { "more_" } else { "" };
        let cubin = format!("forward_{more}{}_{}_{}", self.head_dim, self.head_dim_v, self.dtype.name());
        let [num_wg, block_n, smem] = gpu.constants(&cubin, "forward_tiling")?;
        let packed = self.packed_heads();
        // Columns, heads of a tile, tokens, tiles' heads.
        let rows = |x: &Operand, dim: u32| {
            let dims = [dim, packed, self.total_q, self.num_q_heads / packed].map(u64::from);
            let strides = [x.head_stride, x.token_stride, x.head_stride * u64::from(packed)];
            encode(self.dtype, x.address, &dims, &strides, &[64, packed, 64 / packed, 1])
        };
        let (mut q, mut o) = (rows(&self.q, self.head_dim)?, rows(&self.o, self.head_dim_v)?);
        let (mut k, mut v, box_rows) = self.key_value_maps(block_n)?;
        let mut params = self.params(box_rows);
        let kernel = gpu.kernel(&cubin, self.kernel_name(), smem)?;
        let mut args: [*mut c_void; 5] = [
            (&raw mut q).cast(),
            (&raw mut k).cast(),
            (&raw mut v).cast(),
            (&raw mut o).cast(),
            (&raw mut params).cast(),
        ];
        let grid = (self.blocks(gpu, num_wg), self.splits.map_or(1, |s| s.count), 1);
        // SAFETY: the five values are the kernel's parameters in order; the caller vouches for the addresses.
        unsafe {
            gpu.launch(kernel, grid, (num_wg + 1) * 128, smem, &mut args)?;
            match self.splits {
                Some(splits) if splits.count > 1 => self.combine(gpu, splits),
                _ => Ok(()),
            }
        }
    }
}

/// The function for a mask: `plain` is neither pages nor anything beyond scale and mask, `more` bias, dropout or parts of the keys.
pub(crate) fn function(mask: Mask, more: bool, plain: bool) -> &'static str {
    match (more, plain, mask) {
        (true, ..) => "forward_more",
        (false, true, Mask::FULL) => "forward_full",
        (false, true, Mask::CAUSAL) => "forward_causal",
        _ => "forward_features",
    }
}

/// Whether a tile can have all heads of a group this large.
pub(crate) fn can_pack(group_size: u32) -> bool {
    group_size.is_power_of_two() && (2..=64).contains(&group_size)
}

/// Greatest common divisor.
pub(super) fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_page_ids_are_refused_where_some_row_sees_the_page() {
        use crate::attention::decode::Scales;
        let nowhere =
            Pages { address: 0, page_stride: 0, token_stride: 0, head_stride: 0, scales: Scales::default() };
        let paged =
            Paged { k: nowhere, v: nowhere, page_table: 0, pages_max: 4, num_pages: 9, page_size: 16 };
        let lens = [SeqLen::new(2, 60), SeqLen::new(0, 64)];
        let mut table = vec![0, 8, 3, 1, -5, i32::MAX, 9, -1];
        assert!(paged.check_ids(&table, &lens, &Mask::FULL).is_ok());
        table[3] = 9;
        let refused = paged.check_ids(&table, &lens, &Mask::FULL).unwrap_err().to_string();
        assert!(refused.contains("Some(9) as page 3 of sequence 0"), "{refused}");
        // A window of 10 keys sees none of page 0 and 1.
        table[..4].copy_from_slice(&[-1, 1000, 3, 1]);
        assert!(paged.check_ids(&table, &lens, &Mask::window(10)).is_ok());
        assert!(paged.check_ids(&table, &[SeqLen::new(1, 65)], &Mask::FULL).is_err());
    }
}
