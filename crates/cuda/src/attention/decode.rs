//! Launch of decode: a few query rows per sequence over a paged KV cache. Two kernels, chosen by [`Decode::plan`].
//!
//! `kernels/attention/decode_cluster.cu` takes every case; `decode.cu` (here: the line) plain bf16 where that would read or merge too often.
use super::append::AppendRows;
use super::decode_cluster;
use super::forward::Paged;
use super::{Operand, decode_line};
use crate::Error;
use crate::driver::{Address, Gpu};

/// How K and V are stored. Quantised numbers are multiplied by their scale: see [`Scales`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Brain floating point, without scales.
    Bf16,
    /// 8-bit floating point, 4 bits of exponent, 3 of mantissa.
    E4m3,
    /// Two's complement.
    Int8,
    /// Two numbers a byte in two's complement; element 2 i in the low half of byte i.
    Int4,
}

impl KvType {
    /// Bits an element.
    pub fn bits(self) -> u64 {
        match self {
            KvType::Bf16 => 16,
            KvType::E4m3 | KvType::Int8 => 8,
            KvType::Int4 => 4,
        }
    }

    /// The name used in cubin names and messages.
    pub fn name(self) -> &'static str {
        match self {
            KvType::Bf16 => "bf16",
            KvType::E4m3 => "e4m3",
            KvType::Int8 => "int8",
            KvType::Int4 => "int4",
        }
    }
}

/// f32 factors of quantised numbers, one for each (page, token, kv head) by strides in elements. A stride of 0 repeats them:
/// page and token stride 0 give one a head.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scales {
    /// Of the first factor, a multiple of 4 bytes.
    pub address: Address,
    /// Between pages.
    pub page_stride: u64,
    /// Between tokens.
    pub token_stride: u64,
    /// Between heads.
    pub head_stride: u64,
}

impl Scales {
    /// True where no factors are given.
    pub fn is_none(&self) -> bool {
        self.address == 0
    }
}

/// A paged K or V cache: [pages, page_size, num_kv_heads, head_dim], strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// Of the first element, a multiple of 16 bytes.
    pub address: Address,
    /// Between pages, in elements.
    pub page_stride: u64,
    /// Between tokens, in elements.
    pub token_stride: u64,
    /// Between heads, in elements.
    pub head_stride: u64,
    /// Of quantised numbers; refused beside 16-bit ones.
    pub scales: Scales,
}

impl Pages {
    /// Refuses scales beside numbers that have none.
    pub(super) fn without_scales(&self, field: &'static str) -> Result<(), Error> {
        if self.scales.is_none() {
            return Ok(());
        }
        let asked = format!("{:?}", self.scales);
        Err(Error::Unsupported { field, asked, supported: "no scales beside 16-bit numbers" })
    }
}

impl Pages {
    /// Strides of these keys and of values `v` in bytes: pages, tokens, heads. Refuses others for values, and addresses and strides that no
    /// 16-byte copy takes.
    pub(super) fn same_strides(&self, v: &Pages, kv_type: KvType) -> Result<[i64; 3], Error> {
        let of = |x: &Pages| [x.page_stride, x.token_stride, x.head_stride];
        let of_scales = |x: &Pages| [x.scales.page_stride, x.scales.token_stride, x.scales.head_stride];
        let quantised = kv_type != KvType::Bf16;
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if of(self) != of(v) || (quantised && of_scales(self) != of_scales(v)) {
            let asked = format!("{:?} {:?}, k {:?} {:?}", of(v), of_scales(v), of(self), of_scales(self));
            return bad("v", asked, "the strides of k");
        }
        let bytes = of(self).map(|n| n.saturating_mul(kv_type.bits()) / 8);
        for (field, x) in [("k", self), ("v", v)] {
            let aligned = x.address.is_multiple_of(16) && bytes.iter().all(|s| s.is_multiple_of(16));
            if !aligned || bytes.iter().any(|s| *s >= 1 << 40) {
                let asked = format!("address {:#x}, strides {bytes:?} bytes", x.address);
                return bad(field, asked, "multiples of 16 bytes, strides under 2^40");
            }
            if !quantised {
                x.without_scales(if field == "k" { "k.scales" } else { "v.scales" })?;
            } else if x.scales.is_none() || !x.scales.address.is_multiple_of(4) {
                let asked = format!("scales at {:#x}", x.scales.address);
                return bad(field, asked, "f32 scales of quantised numbers");
            } else if of_scales(x).iter().any(|s| *s >= 1 << 40) {
                return bad(field, format!("scale strides {:?}", of_scales(x)), "under 2^40");
            }
        }
        Ok(bytes.map(|s| s as i64))
    }
}

/// What happens to scores beyond the scale, in this order: softcap, ALiBi, window, sink.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// `cap * tanh(score / cap)`, positive.
    pub softcap: Option<f32>,
    /// `[num_q_heads]` f32: a key at distance x from the row's own position loses `slope * x`.
    pub slopes: Option<Address>,
    /// Keys before a row's own that it sees (window W: W - 1).
    pub left: Option<u32>,
    /// `[num_q_heads]` f32, finite: a logit that joins the denominator and has no value.
    pub sinks: Option<Address>,
}

/// The keys and values of the queries' own tokens, put into the pages by the launch that reads them.
#[derive(Clone, Copy, Debug)]
pub struct Append {
    /// `[batch * seqlen_q, num_kv_heads, head_dim]` bf16, contiguous, a multiple of 16 bytes.
    pub k: Address,
    /// As k.
    pub v: Address,
}

/// Rotary position embedding of the queries, and of the keys that come with them. Positions count from a sequence's first key.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Elements of a head that turn, its first ones: 16, 32, .. head_dim.
    pub dim: u32,
    /// Pairs are neighbours; else half of `dim` apart.
    pub interleaved: bool,
    /// `[positions, dim / 2]` f32, as many positions as the longest sequence has keys.
    pub cos: Address,
    /// As cos.
    pub sin: Address,
}

impl Rotary {
    pub(super) fn check(&self, head_dim: u32) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if self.dim < 16 || self.dim > head_dim || !self.dim.is_power_of_two() {
            return bad("rotary.dim", self.dim.to_string(), "powers of two from 16 to head_dim");
        }
        if !self.cos.is_multiple_of(16) || !self.sin.is_multiple_of(16) || self.cos == 0 || self.sin == 0 {
            let asked = format!("cos {:#x}, sin {:#x}", self.cos, self.sin);
            return bad("rotary", asked, "multiples of 16 bytes");
        }
        Ok(())
    }
}

/// A result over other keys that joins this one, as if all had been read at once.
#[derive(Clone, Copy, Debug)]
pub struct Prior {
    /// `[batch * seqlen_q, num_q_heads, head_dim]` f32.
    pub o: Address,
    /// `[num_q_heads, batch * seqlen_q]` f32, natural logarithm.
    pub lse: Address,
}

/// What else one launch does; by default nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fused {
    /// Put into the pages first: by the launch itself where they are bf16, by a kernel before it (`append`) where they are quantised.
    pub append: Option<Append>,
    /// Turns q, and the keys of `append`.
    pub rotary: Option<Rotary>,
    /// Joined before sinks.
    pub prior: Option<Prior>,
    /// o is f32.
    pub wide: bool,
    /// Every row sees every key; else the keys up to its own.
    pub all_keys: bool,
    /// Every sequence has the first one's length and pages.
    pub shared_pages: bool,
    /// Elements of a row of lse (and of `prior`'s), of which the first batch * seqlen_q are this launch's; 0: no others.
    pub lse_row: u32,
    /// Entries of a row of the page table, of which the first `pages_max` are this launch's; 0: no others.
    pub table_row: u32,
}

impl Fused {
    /// Whether the kernels without extras do.
    pub(super) fn is_plain(&self) -> bool {
        self.append.is_none() && self.rotary.is_none() && self.prior.is_none() && !self.wide
    }
}

/// Everything one launch needs. Lengths and page tables are read on the device: a captured launch follows their changes.
#[derive(Clone, Copy, Debug)]
pub struct Decode {
    /// `[batch * seqlen_q, num_q_heads, head_dim]` bf16.
    pub q: Operand,
    /// As many heads as v; rows as long as q's.
    pub k: Pages,
    /// As k; the clusters' kernel takes the same strides only.
    pub v: Pages,
    /// Of k and v.
    pub kv_type: KvType,
    /// `[batch * seqlen_q, num_q_heads, head_dim]` bf16 (f32 where `fused` says so), contiguous.
    pub o: Address,
    /// `[num_q_heads, batch * seqlen_q]` f32 (rows longer where `fused` says so), natural logarithm.
    pub lse: Address,
    /// `[batch]` i32, the queries' own tokens included.
    pub seqlens_k: Address,
    /// `[batch, pages_max]` i32.
    pub page_table: Address,
    /// `partial_bytes`, all bits one before the first launch, left so; one per stream.
    pub partial: Address,
    /// Pages of each of k and v.
    pub num_pages: u32,
    /// Tokens a page, a multiple of 16.
    pub page_size: u32,
    /// Row length of the page table.
    pub pages_max: u32,
    /// Sequences.
    pub batch: u32,
    /// Query tokens a sequence; with the group size at most 64 rows.
    pub seqlen_q: u32,
    /// A multiple of num_kv_heads.
    pub num_q_heads: u32,
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// Elements a head.
    pub head_dim: u32,
    /// Positive; usually 1 / sqrt(head_dim).
    pub softmax_scale: f32,
    /// Beyond the scale.
    pub scores: Scores,
    /// Beyond attention over what lies in the pages.
    pub fused: Fused,
    /// A sequence's result may depend on nothing but itself: no bit of it changes with the batch around it.
    pub batch_invariant: bool,
}

/// Which kernel runs, and how it is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// `decode.cu`: all (sequence, tile) pairs as one line, cut into equal parts.
    Line,
    /// `decode_cluster.cu`: clusters of blocks for each kv head.
    Clusters {
        /// Blocks a cluster: a power of two up to 16.
        ranks: u32,
        /// Clusters that share one kv head's (and row group's) work.
        parts: u32,
        /// They take equal parts of the line of all tiles, instead of every sequence in turn.
        line: bool,
    },
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Plan::Line => f.write_str("one line of tiles, cut into equal parts"),
            Plan::Clusters { ranks, parts, line } => {
                write!(f, "clusters of {ranks} blocks, {parts} a kv head")?;
                f.write_str(if *line { ", parts of one line" } else { ", each in every sequence" })
            }
        }
    }
}

/// Rows of one unit: the query tokens of a sequence times the heads that share a kv head.
const ROWS_MAX: u32 = 64;

impl Decode {
    pub(super) fn lse_row(&self) -> u32 {
        self.fused.lse_row.max(self.batch * self.seqlen_q)
    }

    pub(super) fn rows(&self) -> u32 {
        self.seqlen_q * (self.num_q_heads / self.num_kv_heads.max(1))
    }

    /// The kernel for a device with `num_sms` multiprocessors, from shapes alone: a captured launch stays right when lengths change.
    pub fn plan(&self, num_sms: u32) -> Plan {
        let line_can = decode_line::can(self);
        // The clusters' kernel would read K and V once for each 16 rows.
        if line_can && self.rows() > 16 {
            return Plan::Line;
        }
        decode_cluster::layout(self, num_sms)
    }

    /// Bytes of `partial` under `plan` on a device with `num_sms` multiprocessors.
    pub fn partial_bytes(&self, plan: Plan, num_sms: u32) -> u64 {
        match plan {
            Plan::Line => decode_line::partial_bytes(self, num_sms),
            Plan::Clusters { parts, line, .. } => decode_cluster::partial_bytes(self, parts, line),
        }
    }

    fn check(&self) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        if ![64, 128, 256].contains(&self.head_dim) {
            return bad("head_dim", self.head_dim.to_string(), "64, 128, 256");
        }
        if self.num_kv_heads == 0 || !self.num_q_heads.is_multiple_of(self.num_kv_heads) {
            let asked = format!("{} query heads on {} kv heads", self.num_q_heads, self.num_kv_heads);
            return bad("num_q_heads", asked, "a multiple of num_kv_heads");
        }
        if self.rows() == 0 || self.rows() > ROWS_MAX {
            return bad("seqlen_q * group_size", self.rows().to_string(), "1 to 64 rows");
        }
        if self.page_size == 0 || !self.page_size.is_multiple_of(16) {
            return bad("page_size", self.page_size.to_string(), "multiples of 16 tokens");
        }
        self.check_fused()?;
        let positive = |x: f32| x > 0.0 && (x * std::f32::consts::LOG2_E).is_finite();
        if !positive(self.softmax_scale) {
            return bad("softmax_scale", self.softmax_scale.to_string(), "positive and finite");
        }
        if let Some(cap) = self.scores.softcap
            && !positive(cap)
        {
            return bad("softcap", cap.to_string(), "positive and finite");
        }
        Ok(())
    }

    fn check_fused(&self) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        let f = &self.fused;
        if let Some(r) = f.rotary {
            r.check(self.head_dim)?;
        }
        if let Some(a) = f.append {
            if a.k == 0 || a.v == 0 || !a.k.is_multiple_of(16) || !a.v.is_multiple_of(16) {
                return bad("append", format!("k {:#x}, v {:#x}", a.k, a.v), "multiples of 16 bytes");
            }
            if f.shared_pages || f.all_keys {
                return bad(
                    "append",
                    "with shared pages or all keys".into(),
                    "each sequence's own pages, causal",
                );
            }
        }
        // Distances and positions would be those of another place.
        let places = self.scores.left.is_some() || self.scores.slopes.is_some() || f.rotary.is_some();
        if f.all_keys && places {
            return bad(
                "all_keys",
                "with a window, ALiBi or rotary".into(),
                "neither beside rows that see every key",
            );
        }
        Ok(())
    }

    /// The launch that puts new keys and values into quantised pages.
    fn append_rows(&self, new: Append) -> AppendRows {
        let dim = u64::from(self.head_dim);
        let rows =
            |address| Operand { address, token_stride: u64::from(self.num_kv_heads) * dim, head_stride: dim };
        AppendRows {
            k: rows(new.k),
            v: rows(new.v),
            cache: Paged {
                k: self.k,
                v: self.v,
                page_table: self.page_table,
                pages_max: self.fused.table_row.max(self.pages_max),
                num_pages: self.num_pages,
                page_size: self.page_size,
            },
            kv_type: self.kv_type,
            seqlens_k: self.seqlens_k,
            cu_seqlens_q: None,
            tokens: self.batch * self.seqlen_q,
            batch: self.batch,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            rotary: self.fused.rotary,
        }
    }

    /// Puts the kernel of `plan` on the device's stream.
    ///
    /// # Safety
    /// Every address covers its shape until the stream has run the kernel; every page id that a sequence's length
    /// reaches is below `num_pages`; with `append` lengths are at least `seqlen_q` and no two sequences share the pages it writes; lengths are at most `pages_max * page_size`; `partial` is as long as `partial_bytes(plan)`.
    pub unsafe fn launch(&self, gpu: &Gpu, plan: Plan) -> Result<(), Error> {
        self.check()?;
        if self.batch == 0 {
            return Ok(());
        }
        if self.kv_type != KvType::Bf16
            && let Some(new) = self.fused.append
        {
            // SAFETY: the caller vouches for the addresses.
            unsafe { self.append_rows(new).launch(gpu)? };
            let there = Decode { fused: Fused { append: None, ..self.fused }, ..*self };
            // SAFETY: as above.
            return unsafe { there.launch(gpu, plan) };
        }
        match plan {
            // SAFETY: the caller vouches for the addresses.
            Plan::Line => unsafe { decode_line::launch(self, gpu) },
            // SAFETY: as above.
            Plan::Clusters { ranks, parts, line } => unsafe {
                decode_cluster::launch(self, gpu, ranks, parts, line)
            },
        }
    }
}
