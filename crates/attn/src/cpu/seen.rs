//! What rows see of a block of keys where a run does not say it: one bit a key, for heads of sequences, trees and block masks.

use std::ops::Range;

use suanpan_base::{Mask, SeqLen};

use super::task::Task;
use crate::extras::{BlockMask, Extras, TreeMask};
use crate::plan::{KEY_BLOCK, Seq};
use crate::problem::{BlockShape, Problem};

/// A bit for each key of a block.
pub(crate) type Bits = u128;
const _: () = assert!(Bits::BITS as usize == KEY_BLOCK);

/// Bits of the columns `columns` of a block.
#[inline(always)]
pub(crate) fn bits_of(columns: &Range<usize>) -> Bits {
    if columns.is_empty() { 0 } else { Bits::MAX >> (KEY_BLOCK - columns.len()) << columns.start }
}

/// From the first bit to the last.
#[inline(always)]
pub(crate) fn hull(bits: Bits) -> Range<usize> {
    if bits == 0 { 0..0 } else { bits.trailing_zeros() as usize..KEY_BLOCK - bits.leading_zeros() as usize }
}

/// The runs of bits, in order.
pub(crate) struct Runs(pub Bits);

impl Iterator for Runs {
    type Item = Range<usize>;

    #[inline(always)]
    fn next(&mut self) -> Option<Range<usize>> {
        if self.0 == 0 {
            return None;
        }
        let start = self.0.trailing_zeros() as usize;
        let len = (!(self.0 >> start)).trailing_zeros() as usize;
        let run = start..(start + len).min(KEY_BLOCK);
        self.0 &= !bits_of(&run);
        Some(run)
    }
}

/// Writes -inf over the scores of columns `from .. to` whose bit is not set.
///
/// # Safety
/// `s` holds these columns.
#[inline(always)]
pub(crate) unsafe fn hide(s: *mut f32, (from, to): (usize, usize), bits: Bits) {
    for run in Runs(bits_of(&(from..to)) & !bits) {
        for col in run {
            // SAFETY: forwarded.
            unsafe { *s.add(col) = f32::NEG_INFINITY };
        }
    }
}

/// `count <= 128` bits of `words` from bit `first` on.
#[inline(always)]
fn window(words: &[u64], first: usize, count: usize) -> Bits {
    let mut bits = 0;
    let mut have = 0;
    while have < count {
        let at = first + have;
        bits |= Bits::from(words[at / 64] >> (at % 64)) << have;
        have += 64 - at % 64;
    }
    bits & bits_of(&(0..count))
}

/// Everything that decides what a row sees.
#[derive(Clone, Copy)]
pub(crate) struct Sight<'a> {
    mask: Mask,
    tree: Option<TreeMask<'a>>,
    blocks: Option<(BlockMask<'a>, BlockShape)>,
}

/// A query token: its sequence's lengths, number and first query token of all, and its place within the sequence.
#[derive(Clone, Copy)]
pub(crate) struct Token {
    pub len: SeqLen,
    pub seq: usize,
    pub q_start: usize,
    pub token: usize,
}

impl<'a> Sight<'a> {
    pub fn new(problem: &Problem, extras: &Extras<'a>) -> Sight<'a> {
        Sight { mask: problem.mask, tree: extras.tree, blocks: extras.blocks.zip(problem.block_mask) }
    }

    /// Whether bits narrow the mask: then blocks may stand inside a tile's keys of which no row sees a key.
    pub fn narrowed(&self) -> bool {
        self.tree.is_some() || self.blocks.is_some()
    }

    /// Of 128 keys from `base` on, those that a token sees under query head `head`.
    pub fn bits(&self, at: Token, head: usize, base: usize) -> Bits {
        let mut bits = 0;
        for keys in self.mask.visible(at.len, at.token).within(&(base..base + KEY_BLOCK)) {
            bits |= bits_of(&(keys.start - base..keys.end - base));
        }
        if let Some(tree) = &self.tree
            && bits != 0
        {
            bits &= tree_bits(tree, at, base);
        }
        if let Some((blocks, shape)) = &self.blocks
            && bits != 0
        {
            bits &= block_bits(blocks, *shape, at, head, base, hull(bits).end);
        }
        bits
    }
}

/// What a tree lets a token see of 128 keys from `base` on.
fn tree_bits(tree: &TreeMask<'_>, at: Token, base: usize) -> Bits {
    let first = at.len.seqlen_k - at.len.seqlen_q;
    let from = first.clamp(base, base + KEY_BLOCK);
    let to = at.len.seqlen_k.clamp(from, base + KEY_BLOCK);
    if from == to {
        return Bits::MAX;
    }
    let words = &tree.bits[(at.q_start + at.token) * tree.row_words..][..tree.row_words];
    let grown = window(words, from - first, to - from) << (from - base);
    !bits_of(&(from - base..to - base)) | grown
}

/// What a block mask lets a token see of `count` keys from `base` on.
fn block_bits(
    blocks: &BlockMask<'_>,
    shape: BlockShape,
    at: Token,
    head: usize,
    base: usize,
    count: usize,
) -> Bits {
    let words = &blocks.bits[blocks.row(at.seq, head, at.token / shape.rows.get())..];
    let (keys, mut seen) = (shape.keys.get(), 0);
    for block in base / keys..(base + count - 1) / keys + 1 {
        if words[block / 64] >> (block % 64) & 1 == 1 {
            let start = (block * keys).max(base) - base;
            seen |= bits_of(&(start..((block + 1) * keys).min(base + KEY_BLOCK) - base));
        }
    }
    seen
}

impl Task<'_> {
    /// The keys of the block at `base` that row `row` of the task's head sees, of those in `pieces`.
    pub fn row_bits(&self, row: usize, base: usize, pieces: Bits) -> Bits {
        let (seq, head, token) = self.place_of_row(row);
        let Seq { len, q_start, .. } = self.call.plan.seqs[seq];
        self.call.sight.bits(Token { len, seq, q_start, token }, head, base) & pieces
    }

    /// The task's keys in the block at `base`, as columns in two pieces.
    pub fn pieces(&self, base: usize) -> [Range<usize>; 2] {
        let clip = |key: usize| key.clamp(base, base + KEY_BLOCK) - base;
        let u = self.unit;
        [clip(u.head_start)..clip(u.head_end), clip(u.key_start)..clip(u.key_end)]
    }

    /// The first block at `base` (a multiple of a block) or after it in which the task has keys to look at.
    pub fn block_from(&self, mut base: usize) -> Option<usize> {
        let u = self.unit;
        loop {
            base = base.max(u.head_start / KEY_BLOCK * KEY_BLOCK);
            if base >= u.head_end {
                base = base.max(u.key_start / KEY_BLOCK * KEY_BLOCK);
                if base >= u.key_end || u.key_start >= u.key_end {
                    return None;
                }
            }
            if self.some_row_sees(base) {
                return Some(base);
            }
            base += KEY_BLOCK;
        }
    }

    /// The first block of the task.
    pub fn first_block(&self) -> Option<usize> {
        self.block_from(0)
    }

    /// Whether the block mask, where there is one, lets some row of some head of the task see a key of the block at `base`.
    #[inline(always)]
    fn some_row_sees(&self, base: usize) -> bool {
        let Some((blocks, shape)) = &self.call.sight.blocks else { return true };
        let (u, group) = (self.unit, self.call.heads.group_size());
        let (rows, keys) = (shape.rows.get(), shape.keys.get());
        let last_key = (base + KEY_BLOCK).min(self.call.plan.seqs[u.seq as usize].len.seqlen_k) - 1;
        let mut heads = u.kv_head * group..(u.kv_head + u.kv_heads) * group;
        heads.any(|head| {
            (u.token / rows..(u.token + u.tokens - 1) / rows + 1).any(|block_row| {
                let words = &blocks.bits[blocks.row(u.seq as usize, head, block_row)..];
                (base / keys..last_key / keys + 1).any(|b| words[b / 64] >> (b % 64) & 1 == 1)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_hulls_of_bits() {
        assert_eq!(bits_of(&(0..128)), Bits::MAX);
        assert_eq!((bits_of(&(5..5)), hull(0)), (0, 0..0));
        let bits = bits_of(&(0..3)) | bits_of(&(7..8)) | bits_of(&(60..128));
        assert_eq!(Runs(bits).collect::<Vec<_>>(), [0..3, 7..8, 60..128]);
        assert_eq!(Runs(Bits::MAX).map(|run| (run.start, run.end)).collect::<Vec<_>>(), [(0, 128)]);
        assert_eq!(hull(bits_of(&(9..70))), 9..70);
    }

    #[test]
    fn windows_of_words_start_anywhere() {
        let words = [0x8000_0000_0000_0001, 0b110, 1];
        assert_eq!(window(&words, 63, 5), 0b01101);
        assert_eq!(window(&words, 0, 64), 0x8000_0000_0000_0001);
        assert_eq!(window(&words, 1, 128), 1 << 62 | 0b110 << 63 | 1 << 127);
    }
}
