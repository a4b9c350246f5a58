//! What is asked: heads, mask, scale, element types and the layout of K and V. Lengths come later, with the schedule.

use std::num::NonZeroUsize;

use suanpan_base::{BadArgument, DType, HeadShape, Mask, ScaleGrain};

/// The name under which this file and the plan refuse a request.
pub(crate) const OP: &str = "attention plan";

/// Widest head the kernels take (576 is the widest key of a published latent-attention model).
pub const MAX_HEAD_DIM: usize = 576;

/// How keys and values lie in their buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// Sequences packed one after another, in the order of the schedule.
    Contiguous,
    /// Fixed pages found through a page table.
    Paged {
        /// Tokens a page.
        page_size: usize,
    },
}

impl KvLayout {
    /// Tokens a page; `None` = contiguous.
    pub const fn page_size(self) -> Option<usize> {
        match self {
            KvLayout::Contiguous => None,
            KvLayout::Paged { page_size } => Some(page_size),
        }
    }
}

impl std::fmt::Display for KvLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KvLayout::Contiguous => f.write_str("contiguous"),
            KvLayout::Paged { page_size } => write!(f, "pages of {page_size}"),
        }
    }
}

/// What happens to scores beyond scale and mask, in this order: softcap, bias, ALiBi, (mask), sink, dropout. The numbers come with the
/// call, in `Extras`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// `cap · tanh(score / cap)` (Gemma 2); positive and finite, or 0 for none.
    pub softcap: Option<f32>,
    /// A number added to each score.
    pub bias: bool,
    /// Minus a head's slope times the distance between the row's own position and the key's (ALiBi, arXiv 2108.12409).
    pub alibi: bool,
    /// A logit a head that joins the denominator and has no value (the learned sink of gpt-oss, arXiv 2309.17453).
    pub sink: bool,
    /// The probability, 0 to 1, with which a weight is dropped before it meets its value; what stays grows by 1 / (1 - probability).
    pub dropout: Option<f32>,
}

impl Scores {
    /// True when some score is changed before the softmax.
    pub(crate) fn change_scores(&self) -> bool {
        self.cap().is_some() || self.bias || self.alibi
    }

    /// The softcap in force.
    pub(crate) fn cap(&self) -> Option<f32> {
        self.softcap.filter(|&cap| cap != 0.0)
    }

    fn check(&self) -> Result<(), BadArgument> {
        if let Some(cap) = self.softcap
            && !(cap >= 0.0 && fits_powers_of_two(cap))
        {
            return Err(BadArgument::new(
                OP,
                "softcap",
                cap,
                "a positive number, at most 2.3e38; 0 for none",
            ));
        }
        match self.dropout {
            Some(p) if !(0.0..=1.0).contains(&p) => {
                Err(BadArgument::new(OP, "dropout", p, "a probability, 0 to 1"))
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Display for Scores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(cap) = self.cap() {
            write!(f, ", softcap {cap}")?;
        }
        for (there, name) in [(self.bias, ", bias"), (self.alibi, ", ALiBi"), (self.sink, ", sink")] {
            f.write_str(if there { name } else { "" })?;
        }
        self.dropout.map_or(Ok(()), |p| write!(f, ", dropout {p}"))
    }
}

/// Blocks of a block mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// Query tokens a block.
    pub rows: NonZeroUsize,
    /// Keys a block.
    pub keys: NonZeroUsize,
}

/// One kind of attention call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Which keys a row sees.
    pub mask: Mask,
    /// A tree mask narrows it (`Extras::tree`).
    pub tree: bool,
    /// A block mask of these blocks narrows it (`Extras::blocks`).
    pub block_mask: Option<BlockShape>,
    /// What happens to scores beyond scale and mask.
    pub scores: Scores,
    /// Factor of q·k; `None` = 1/sqrt(head_dim_qk).
    pub softmax_scale: Option<f32>,
    /// Element type of queries and of the output.
    pub q_dtype: DType,
    /// Element type of stored keys and values.
    pub kv_dtype: DType,
    /// Which of them share a scale; only types of 8 bits and fewer take scales.
    pub kv_scales: ScaleGrain,
    /// Element type of the scales: f32 or bf16.
    pub kv_scale_dtype: DType,
    /// Contiguous or paged.
    pub kv: KvLayout,
    /// A row's bits depend on its own keys alone: not on how its prompt is cut into chunks, on whether it is prefilled or decoded, or on
    /// the batch. (Without it they follow the chunk's length, too, but never the rest of the batch.)
    pub batch_invariant: bool,
}

/// Whether a factor of natural scores stays finite as a factor of powers of two, in which the kernels hold them.
pub(crate) fn fits_powers_of_two(x: f32) -> bool {
    (x * std::f32::consts::LOG2_E).is_finite()
}

impl Problem {
    /// A plain problem: f32, contiguous, the default scale.
    pub const fn new(heads: HeadShape, mask: Mask) -> Problem {
        Problem {
            heads,
            mask,
            tree: false,
            block_mask: None,
            scores: Scores { softcap: None, bias: false, alibi: false, sink: false, dropout: None },
            softmax_scale: None,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
            kv_scales: ScaleGrain::None,
            kv_scale_dtype: DType::F32,
            kv: KvLayout::Contiguous,
            batch_invariant: false,
        }
    }

    /// The factor of q·k in use.
    pub fn scale(&self) -> f32 {
        self.softmax_scale.unwrap_or_else(|| self.heads.default_scale())
    }

    /// Refuses what no kernel can do: zero or too wide heads, a scale that is not finite, pages of no token.
    pub fn check(&self) -> Result<(), BadArgument> {
        self.heads.check(OP)?;
        for (field, d) in [("head_dim_qk", self.heads.head_dim_qk), ("head_dim_v", self.heads.head_dim_v)] {
            if d > MAX_HEAD_DIM {
                return Err(BadArgument::new(OP, field, d, format!("1 to {MAX_HEAD_DIM}")));
            }
        }
        if self.heads.num_q_heads > 1 << 20 {
            return Err(BadArgument::new(OP, "num_q_heads", self.heads.num_q_heads, "1 to 2^20"));
        }
        if let Some(s) = self.softmax_scale
            && !fits_powers_of_two(s)
        {
            return Err(BadArgument::new(OP, "softmax_scale", s, "a finite number, at most 2.3e38 in size"));
        }
        self.scores.check()?;
        if let KvLayout::Paged { page_size } = self.kv
            && !(1..=1 << 20).contains(&page_size)
        {
            return Err(BadArgument::new(OP, "page_size", page_size, "1 to 2^20 tokens"));
        }
        crate::scales::check_problem(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_sizes_are_refused_by_name() {
        let kv = KvLayout::Paged { page_size: 16 };
        let ok =
            Problem { kv_dtype: DType::Bf16, kv, ..Problem::new(HeadShape::new(4, 2, 64), Mask::CAUSAL) };
        assert!(ok.check().is_ok());
        let field = |p: Problem| p.check().unwrap_err().field;
        assert_eq!(field(Problem { heads: HeadShape::new(4, 2, 577), ..ok }), "head_dim_qk");
        assert_eq!(field(Problem { heads: HeadShape::new(4, 3, 64), ..ok }), "num_kv_heads");
        assert_eq!(field(Problem { softmax_scale: Some(f32::NAN), ..ok }), "softmax_scale");
        assert_eq!(field(Problem { softmax_scale: Some(f32::MAX), ..ok }), "softmax_scale");
        assert_eq!(field(Problem { kv: KvLayout::Paged { page_size: 0 }, ..ok }), "page_size");
        for cap in [-30.0, -1e-30, f32::NAN, f32::INFINITY, f32::MAX] {
            let scores = Scores { softcap: Some(cap), ..Scores::default() };
            assert_eq!(field(Problem { scores, ..ok }), "softcap");
        }
        for p in [-0.1, 1.5, f32::NAN] {
            let scores = Scores { dropout: Some(p), ..Scores::default() };
            assert_eq!(field(Problem { scores, ..ok }), "dropout");
        }
    }
}
