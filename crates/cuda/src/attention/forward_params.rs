//! What `kernels/attention/forward.cu` is launched with, made of a [`Forward`].
use super::forward::{Forward, KeysValues, LOG2_E, TOKENS_MAX};
use crate::driver::Address;

/// Mirrors `ForwardParams` of the kernels.
#[repr(C)]
pub(super) struct Params {
    lse: Address,
    o: Address,
    cu_q: Address,
    cu_k: Address,
    counter: Address,
    o_token_stride: i64,
    o_head_stride: i64,
    total_q: i32,
    batch: i32,
    num_kv_heads: i32,
    group_size: i32,
    seqlen_q_max: i32,
    seqlen_k_max: i32,
    units_per_section: i32,
    scale: f32,
    scale_log2: f32,
    features: Features,
}

/// The parameters that only `forward_features` and `forward_more` read.
#[repr(C)]
struct Features {
    page_table: Address,
    alibi_slopes: Address,
    sinks: Address,
    tree: Address,
    tree_words: i32,
    page_size: i32,
    pages_max: i32,
    box_rows: i32,
    left: i32,
    right: i32,
    chunk: i32,
    top_left: i32,
    longest_first: i32,
    softcap_log2: f32,
    softcap_inner: f32,
    dot_scale_log2: f32,
    change_scores: i32,
    pack_log2: i32,
    more: More,
}

/// The parameters that only `forward_more` reads.
#[repr(C)]
#[derive(Default)]
struct More {
    bias: Address,
    bias_seq_stride: i64,
    bias_head_stride: i64,
    bias_row_stride: i64,
    seed: [u32; 2],
    first: [u32; 4],
    dropped_below: u32,
    kept_factor: f32,
    bias_key_stride: i32,
    split_share: f32,
    partial_o: Address,
    partial_lse: Address,
}

impl More {
    fn new(f: &Forward) -> More {
        let (scores, mut more) = (&f.scores, More::default());
        if let Some(splits) = f.splits {
            more.split_share = 1.0 / splits.count as f32;
            (more.partial_o, more.partial_lse) = f.partials(splits);
        }
        if let Some(bias) = scores.bias {
            more.bias = bias.address;
            more.bias_key_stride = bias.strides.key as i32;
            more.bias_seq_stride = bias.strides.seq as i64;
            more.bias_head_stride = bias.strides.head as i64;
            more.bias_row_stride = bias.strides.row as i64;
        }
        if let Some(d) = scores.dropout {
            let (p, key) = (f64::from(d.probability), d.key);
            more.seed = [key.seed as u32, (key.seed >> 32) as u32];
            more.first = [key.first_seq, key.first_head, key.first_row, key.first_key / 4];
            more.dropped_below = (p * 2f64.powi(32)).round() as u32;
            more.kept_factor = (1.0 / (1.0 - p)) as f32;
        }
        more
    }
}

/// K and V of a section of tiles. Of 24 MB, full attention over 8k keys read K and V from memory 2.4 times; of 6 MB and less, once. (The L2 has
/// 50 MB in two halves, what processors of both read stands in both, and sections overlap.)
const L2_SECTION_BYTES: u64 = 4 << 20;

impl Forward {
    fn features(&self, box_rows: u32) -> Features {
        let (pages, page_size, pages_max) = match self.kv {
            KeysValues::Paged(p) => (p.page_table, p.page_size as i32, p.pages_max as i32),
            KeysValues::Packed { .. } => (0, 1, 0),
        };
        let bound = |side: Option<usize>| {
            side.map_or(TOKENS_MAX - 1, |n| n.min(TOKENS_MAX as usize - 1) as u32) as i32
        };
        let mask = &self.mask;
        let softcap = self.scores.softcap;
        Features {
            page_table: pages,
            alibi_slopes: self.scores.alibi_slopes.unwrap_or(0),
            sinks: self.scores.sinks.unwrap_or(0),
            tree: self.tree.map_or(0, |t| t.bits),
            tree_words: self.tree.map_or(0, |t| t.words as i32),
            page_size,
            pages_max,
            box_rows: box_rows as i32,
            left: bound(mask.left),
            right: bound(mask.right),
            chunk: mask.chunk.map_or(0, |c| bound(Some(c.get()))),
            top_left: i32::from(mask.top_left),
            longest_first: i32::from(mask.right.is_some() && mask.left.is_none() && mask.chunk.is_none()),
            softcap_log2: softcap.unwrap_or(0.0) * LOG2_E,
            softcap_inner: softcap.map_or(0.0, |cap| 2.0 * self.softmax_scale * LOG2_E / cap),
            dot_scale_log2: self.softmax_scale * LOG2_E,
            change_scores: i32::from(self.changes_scores()),
            pack_log2: self.packed_heads().trailing_zeros() as i32,
            more: More::new(self),
        }
    }

    fn changes_scores(&self) -> bool {
        self.scores.softcap.is_some() || self.scores.alibi_slopes.is_some() || self.scores.bias.is_some()
    }

    /// (Sequence, kv head) pairs whose K and V share the L2. Even sections: a short last one ends unevenly.
    fn units_per_section(&self) -> u32 {
        let unit_bytes =
            (u64::from(self.seqlen_k_max) * u64::from(self.head_dim + self.head_dim_v) * 2).max(1);
        let units = u64::from(self.batch) * u64::from(self.num_kv_heads);
        let sections = units.div_ceil((L2_SECTION_BYTES / unit_bytes).clamp(1, units.max(1)));
        units.div_ceil(sections.max(1)).max(1) as u32
    }

    pub(super) fn params(&self, box_rows: u32) -> Params {
        let scale = if self.changes_scores() { std::f32::consts::LN_2 } else { self.softmax_scale };
        Params {
            lse: self.lse,
            o: self.o.address,
            cu_q: self.cu_seqlens_q.unwrap_or(0),
            cu_k: self.cu_seqlens_k.unwrap_or(0),
            counter: self.counter,
            o_token_stride: self.o.token_stride as i64,
            o_head_stride: self.o.head_stride as i64,
            total_q: self.total_q as i32,
            batch: self.batch as i32,
            num_kv_heads: self.num_kv_heads as i32,
            group_size: (self.num_q_heads / self.num_kv_heads / self.packed_heads()) as i32,
            seqlen_q_max: (self.seqlen_q_max * self.packed_heads()) as i32,
            seqlen_k_max: self.seqlen_k_max as i32,
            units_per_section: self.units_per_section() as i32,
            scale,
            scale_log2: if self.changes_scores() { 1.0 } else { scale * LOG2_E },
            features: self.features(box_rows),
        }
    }
}
