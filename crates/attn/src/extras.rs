//! What a call brings beside q, k and v: numbers of heads, bias, visibility by bits, the key of dropout. All absent by default.

use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, HeadShape, SeqLen};

use crate::problem::{BlockShape, Problem, fits_powers_of_two};

/// What the problem's `Scores` and masks ask for; what they do not ask for must be absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras<'a> {
    /// `[num_q_heads]`, finite, at most 2.3e38 in size: ALiBi slopes.
    pub alibi_slopes: Option<&'a [f32]>,
    /// `[num_q_heads]`: sink logits, natural; -inf is no sink.
    pub sinks: Option<&'a [f32]>,
    /// Numbers added to scores.
    pub bias: Option<Bias<'a>>,
    /// Which of the newest keys each query sees.
    pub tree: Option<TreeMask<'a>>,
    /// Which blocks of keys each block of queries sees.
    pub blocks: Option<BlockMask<'a>>,
    /// What the dropped weights follow from.
    pub dropout: Option<DropoutKey>,
}

impl Extras<'_> {
    /// Whether tree and block mask let query token `row` of a sequence (its number, lengths and first query token of all) see key `key`.
    pub(crate) fn sees(
        &self,
        problem: &Problem,
        (seq, len, q_start): (usize, SeqLen, usize),
        head: usize,
        row: usize,
        key: usize,
    ) -> bool {
        let blocks = self.blocks.as_ref().zip(problem.block_mask);
        self.tree.as_ref().is_none_or(|tree| tree.sees(len, q_start + row, key))
            && blocks.is_none_or(|(blocks, shape)| blocks.sees(shape, seq, head, row, key))
    }
}

/// Distances, in elements, between neighbours of a bias; 0 = one number for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BiasStrides {
    /// From sequence to sequence.
    pub seq: usize,
    /// From query head to query head.
    pub head: usize,
    /// From query token to query token of a sequence.
    pub row: usize,
    /// From key to key of a sequence: 0 or 1.
    pub key: usize,
}

impl BiasStrides {
    /// The element of sequence `seq`, query head `head`, query token `row` and key `key` (both counted within the sequence).
    pub fn at(&self, seq: usize, head: usize, row: usize, key: usize) -> usize {
        seq * self.seq + head * self.head + row * self.row + key * self.key
    }

    /// Whether no two numbers share an element but those that a stride of 0 makes one. Extents were checked.
    pub(crate) fn apart(&self, heads: HeadShape, lens: impl Iterator<Item = SeqLen> + Clone) -> bool {
        let most = |n: fn(&SeqLen) -> usize| lens.clone().map(|len| n(&len)).max().unwrap_or(0);
        let counts = [lens.clone().count(), heads.num_q_heads, most(|l| l.seqlen_q), most(|l| l.seqlen_k)];
        let strides = [self.seq, self.head, self.row, self.key];
        let mut dims: [(usize, usize); 4] = std::array::from_fn(|i| (strides[i], counts[i]));
        dims.sort_unstable();
        let mut reach = 0usize;
        dims.iter().filter(|(stride, count)| *stride > 0 && *count > 1).all(|&(stride, count)| {
            let inside = stride > reach;
            reach = reach.saturating_add(stride.saturating_mul(count - 1));
            inside
        })
    }

    /// One past the last element that `lens` reach; `None` past `usize`.
    pub(crate) fn extent(&self, heads: HeadShape, lens: impl Iterator<Item = SeqLen>) -> Option<usize> {
        let mut most = 0;
        for (i, len) in lens.enumerate().filter(|(_, len)| len.seqlen_q > 0 && len.seqlen_k > 0) {
            let dims = [
                (i, self.seq),
                (heads.num_q_heads - 1, self.head),
                (len.seqlen_q - 1, self.row),
                (len.seqlen_k - 1, self.key),
            ];
            let last =
                dims.iter().try_fold(0usize, |sum, (n, stride)| sum.checked_add(n.checked_mul(*stride)?))?;
            most = most.max(last.checked_add(1)?);
        }
        Some(most)
    }
}

/// An additive bias, natural: `[sequence, num_q_heads, seqlen_q, seqlen_k]` under any strides that broadcast.
///
/// -inf takes a key's weight away; NaN and +inf come through as NaN.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    /// The numbers.
    pub values: &'a [f32],
    /// Where each one is.
    pub strides: BiasStrides,
}

/// Visibility among the newest keys, for drafts that branch (speculative trees): the last `seqlen_q` keys are the queries' own tokens,
/// and a query sees those of them whose bit is set. It narrows the mask: what that hides stays hidden, and older keys are its business.
#[derive(Clone, Copy, Debug)]
pub struct TreeMask<'a> {
    /// `[total_q, row_words]`: bit `j % 64` of word `j / 64` is the sequence's query token `j`.
    pub bits: &'a [u64],
    /// Words a query token.
    pub row_words: usize,
}

impl TreeMask<'_> {
    /// Whether query token `row` (of all sequences) sees key `key` of its sequence.
    pub fn sees(&self, len: SeqLen, row: usize, key: usize) -> bool {
        let first = len.seqlen_k - len.seqlen_q;
        key < first || self.bits[row * self.row_words + (key - first) / 64] >> ((key - first) % 64) & 1 == 1
    }
}

/// Visibility by blocks: queries in blocks of `BlockShape::rows` tokens (counted from the sequence's first query) and keys in blocks of
/// `BlockShape::keys`. It narrows the mask.
#[derive(Clone, Copy, Debug)]
pub struct BlockMask<'a> {
    /// Bit `b % 64` of word `b / 64` of a block row is its key block `b`.
    pub bits: &'a [u64],
    /// Words from one block row to the next.
    pub row_words: usize,
    /// Words from one query head to the next; 0 = one pattern for all heads.
    pub head_words: usize,
    /// Words from one sequence to the next; 0 = one pattern for all sequences.
    pub seq_words: usize,
}

impl BlockMask<'_> {
    /// The first word of a block row.
    pub(crate) fn row(&self, seq: usize, head: usize, block_row: usize) -> usize {
        seq * self.seq_words + head * self.head_words + block_row * self.row_words
    }

    /// Whether query token `row` of sequence `seq` sees key `key` under query head `head`.
    pub fn sees(&self, shape: BlockShape, seq: usize, head: usize, row: usize, key: usize) -> bool {
        let block = key / shape.keys.get();
        self.bits[self.row(seq, head, row / shape.rows.get()) + block / 64] >> (block % 64) & 1 == 1
    }
}

/// Where a call's weights stand in the numbering that dropout follows: a shard of a batch, of heads or of a sequence drops what the whole
/// would have dropped there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DropoutKey {
    /// Any number; the same one gives the same dropped weights, forward and backward.
    pub seed: u64,
    /// Number of the call's first sequence.
    pub first_seq: u32,
    /// Number of its first query head.
    pub first_head: u32,
    /// Number of the first query token of every sequence.
    pub first_row: u32,
    /// Number of the first key of every sequence.
    pub first_key: u32,
}

/// A call's extras with what they must fit.
pub(crate) struct Asked<'p> {
    pub op: &'static str,
    pub problem: &'p Problem,
    pub total_q: usize,
}

impl Asked<'_> {
    fn refuse(
        &self,
        field: impl Into<String>,
        asked: impl std::fmt::Display,
        supported: impl std::fmt::Display,
    ) -> BadArgument {
        BadArgument::new(self.op, field, asked, supported)
    }

    /// Refuses what is missing, what nobody asked for, and what does not hold all that `lens` reach.
    pub fn check(
        &self,
        x: &Extras<'_>,
        lens: impl Iterator<Item = SeqLen> + Clone,
    ) -> Result<(), BadArgument> {
        let (p, finite) = (self.problem, "finite slopes, at most 2.3e38 in size");
        self.numbers("alibi_slopes", p.scores.alibi, x.alibi_slopes, fits_powers_of_two, finite)?;
        let logit = |s: f32| !s.is_nan() && s != f32::INFINITY;
        self.numbers("sinks", p.scores.sink, x.sinks, logit, "numbers below infinity, or -inf")?;
        self.presence("bias", p.scores.bias, x.bias.is_some())?;
        self.presence("tree", p.tree, x.tree.is_some())?;
        self.presence("blocks", p.block_mask.is_some(), x.blocks.is_some())?;
        self.presence("dropout", p.scores.dropout.is_some(), x.dropout.is_some())?;
        if let Some(bias) = &x.bias {
            self.bias(bias, lens.clone())?;
        }
        if let Some(tree) = &x.tree {
            self.tree(tree, lens.clone())?;
        }
        if let (Some(blocks), Some(shape)) = (&x.blocks, p.block_mask) {
            self.blocks(blocks, shape, lens.clone())?;
        }
        x.dropout.map_or(Ok(()), |key| self.dropout(&key, lens))
    }

    fn presence(&self, field: &str, wanted: bool, given: bool) -> Result<(), BadArgument> {
        let word = |there: bool| if there { "given" } else { "absent" };
        if wanted == given {
            Ok(())
        } else {
            Err(self.refuse(field, word(given), format!("{}, as planned", word(wanted))))
        }
    }

    fn numbers(
        &self,
        field: &str,
        wanted: bool,
        numbers: Option<&[f32]>,
        good: impl Fn(f32) -> bool,
        supported: &str,
    ) -> Result<(), BadArgument> {
        let want = if wanted { self.problem.heads.num_q_heads } else { 0 };
        let have = numbers.map_or(0, <[f32]>::len);
        if have != want || numbers.is_some() != wanted {
            return Err(self.refuse(format!("{field} length"), have, format!("{want}, as planned")));
        }
        match numbers.unwrap_or(&[]).iter().enumerate().find(|(_, x)| !good(**x)) {
            Some((head, x)) => Err(self.refuse(format!("{field}[{head}]"), x, supported)),
            None => Ok(()),
        }
    }

    fn bias(&self, bias: &Bias<'_>, lens: impl Iterator<Item = SeqLen>) -> Result<(), BadArgument> {
        if bias.strides.key > 1 {
            return Err(self.refuse("bias key stride", bias.strides.key, "0 or 1: keys side by side"));
        }
        match bias.strides.extent(self.problem.heads, lens) {
            Some(need) if need <= bias.values.len() => Ok(()),
            Some(need) => {
                let supported = format!("at least {need} elements for these strides");
                Err(self.refuse("bias length", bias.values.len(), supported))
            }
            None => Err(self.refuse("bias strides", format!("{:?}", bias.strides), "offsets below 2^64")),
        }
    }

    fn tree(&self, tree: &TreeMask<'_>, lens: impl Iterator<Item = SeqLen>) -> Result<(), BadArgument> {
        for (i, len) in lens.enumerate() {
            if len.seqlen_q > len.seqlen_k {
                let supported =
                    format!("at most seqlen_k = {}: a tree's tokens are among the keys", len.seqlen_k);
                return Err(self.refuse(format!("seqs[{i}].seqlen_q"), len.seqlen_q, supported));
            }
            if len.seqlen_q.div_ceil(64) > tree.row_words {
                let supported =
                    format!("at least {} for {} query tokens", len.seqlen_q.div_ceil(64), len.seqlen_q);
                return Err(self.refuse("tree row_words", tree.row_words, supported));
            }
        }
        let need = checked_product(self.op, "tree", &[self.total_q, tree.row_words])?;
        if tree.bits.len() < need {
            return Err(self.refuse(
                "tree length",
                tree.bits.len(),
                format!("total_q x row_words = {need} words"),
            ));
        }
        Ok(())
    }

    fn blocks(
        &self,
        blocks: &BlockMask<'_>,
        shape: BlockShape,
        lens: impl Iterator<Item = SeqLen>,
    ) -> Result<(), BadArgument> {
        for (i, len) in lens.enumerate().filter(|(_, len)| len.seqlen_q > 0 && len.seqlen_k > 0) {
            let words = len.seqlen_k.div_ceil(shape.keys.get()).div_ceil(64);
            if words > blocks.row_words {
                let supported =
                    format!("at least {words} for {} keys in blocks of {}", len.seqlen_k, shape.keys);
                return Err(self.refuse("blocks row_words", blocks.row_words, supported));
            }
            let dims = [
                (i, blocks.seq_words),
                (self.problem.heads.num_q_heads - 1, blocks.head_words),
                ((len.seqlen_q - 1) / shape.rows.get(), blocks.row_words),
            ];
            let last =
                dims.iter().try_fold(0usize, |sum, (n, stride)| sum.checked_add(n.checked_mul(*stride)?));
            let need = last.and_then(|last| last.checked_add(words));
            if need.is_none_or(|need| need > blocks.bits.len()) {
                let need = need.map_or("more than 2^64".to_string(), |n| n.to_string());
                return Err(self.refuse(
                    "blocks length",
                    blocks.bits.len(),
                    format!("{need} words for seqs[{i}]"),
                ));
            }
        }
        Ok(())
    }

    fn dropout(&self, key: &DropoutKey, lens: impl Iterator<Item = SeqLen>) -> Result<(), BadArgument> {
        for (i, len) in lens.enumerate() {
            let ends = [
                ("first_seq", key.first_seq, i),
                ("first_head", key.first_head, self.problem.heads.num_q_heads),
                ("first_row", key.first_row, len.seqlen_q),
                ("first_key", key.first_key, len.seqlen_k),
            ];
            for (field, first, count) in ends {
                if first as usize + count > u32::MAX as usize {
                    let supported = format!("numbers below 2^32; seqs[{i}] adds {count}");
                    return Err(self.refuse(format!("dropout {field}"), first, supported));
                }
            }
        }
        Ok(())
    }
}
