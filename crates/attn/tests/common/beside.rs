//! What a case brings beside q, k and v, drawn from its seed, and the same as functions of pairs for the oracle.

use suanpan_attn::dropout::Dropout;
use suanpan_attn::reference::Spec;
use suanpan_attn::{Bias, BiasStrides, BlockMask, DropoutKey, Extras, TreeMask};
use suanpan_base::SeqLen;

use super::{Case, normal, rng};

/// Owned numbers and bits of a case's extras.
pub struct Beside {
    pub slopes: Vec<f32>,
    pub sinks: Vec<f32>,
    pub bias: Vec<f32>,
    pub bias_strides: BiasStrides,
    tree: Vec<u64>,
    tree_words: usize,
    blocks: Vec<u64>,
    /// Words a row, a head and a sequence.
    block_words: (usize, usize, usize),
    dropout: DropoutKey,
}

impl Beside {
    pub fn of(c: &Case) -> Beside {
        let most = |n: fn(&SeqLen) -> usize| c.seqs.iter().map(n).max().unwrap_or(0);
        let (q, k) = (most(|s| s.seqlen_q), most(|s| s.seqlen_k));
        let heads = c.heads.num_q_heads;
        // Rows of keys are padded, heads stand outside rows; a dimension that is broadcast takes no room.
        let room = |i: usize, n: usize| if c.broadcast[i] { 1 } else { n };
        let row = room(3, k + 3);
        let head = room(2, q) * row;
        let seq = room(1, heads) * head;
        let unless = |i: usize, stride: usize| if c.broadcast[i] { 0 } else { stride };
        let bias_strides = BiasStrides {
            seq: unless(0, seq),
            head: unless(1, head),
            row: unless(2, row),
            key: unless(3, 1),
        };
        let bias_len = if c.scores.bias { room(0, c.seqs.len()) * seq } else { 0 };
        let mut bias = normal(bias_len, c.seed * 7 + 5, suanpan_base::DType::F32);
        // Some biases take a key's weight away.
        bias.iter_mut().skip(3).step_by(11).for_each(|b| *b = f32::NEG_INFINITY);
        let tree_words = q.div_ceil(64) + 1;
        let tree_len = if c.tree { c.total_q() * tree_words } else { 0 };
        let (rows, keys) = c.block_mask.map_or((1, 1), |b| (b.rows.get(), b.keys.get()));
        let row_words = k.div_ceil(keys).div_ceil(64) + 1;
        let block_words = (row_words, q.div_ceil(rows) * row_words, heads * q.div_ceil(rows) * row_words);
        let blocks_len = if c.block_mask.is_some() { c.seqs.len() * block_words.2 } else { 0 };
        let mut bits = rng(c.seed * 11 + 3);
        Beside {
            slopes: c.slopes(),
            sinks: c.sinks(),
            bias,
            bias_strides,
            tree: (0..tree_len).map(|_| bits() | bits()).collect(),
            tree_words,
            blocks: (0..blocks_len)
                .map(|_| bits() & if c.seed.is_multiple_of(2) { bits() } else { u64::MAX })
                .collect(),
            block_words,
            dropout: DropoutKey {
                seed: c.seed,
                first_seq: 1,
                first_head: 2,
                first_row: 3,
                first_key: c.seed as u32 % 7,
            },
        }
    }

    pub fn extras(&self, c: &Case) -> Extras<'_> {
        let (row_words, head_words, seq_words) = self.block_words;
        Extras {
            alibi_slopes: c.scores.alibi.then_some(&self.slopes[..]),
            sinks: c.scores.sink.then_some(&self.sinks[..]),
            bias: c.scores.bias.then_some(Bias { values: &self.bias, strides: self.bias_strides }),
            tree: c.tree.then_some(TreeMask { bits: &self.tree, row_words: self.tree_words }),
            blocks: c.block_mask.map(|_| BlockMask { bits: &self.blocks, row_words, head_words, seq_words }),
            dropout: c.scores.dropout.map(|_| self.dropout),
        }
    }
}

/// One sequence of a case.
pub struct Pairs<'a> {
    pub c: &'a Case,
    pub beside: &'a Beside,
    pub seq: usize,
}

type Function<'a, T> = Option<Box<dyn Fn(usize, usize, usize) -> T + 'a>>;

/// Its extras as functions of (query head, row, key), and its numbers of heads in f64.
pub struct Functions<'a> {
    hidden: Function<'a, bool>,
    bias: Function<'a, f64>,
    dropout: Function<'a, f64>,
    slopes: Vec<f64>,
    sinks: Vec<f64>,
}

impl<'a> Pairs<'a> {
    pub fn functions(&self) -> Functions<'a> {
        let (c, beside, seq) = (self.c, self.beside, self.seq);
        let x = beside.extras(c);
        let (len, q0) = (c.seqs[seq], c.seqs[..seq].iter().map(|s| s.seqlen_q).sum::<usize>());
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let by_bits = x.tree.is_some() || x.blocks.is_some();
        let dropout = c.scores.dropout.map(|p| Dropout::new(p, beside.dropout));
        Functions {
            hidden: by_bits.then(|| -> Box<dyn Fn(usize, usize, usize) -> bool + 'a> {
                Box::new(move |h, i, j| {
                    let blocks = x.blocks.zip(c.block_mask);
                    x.tree.is_some_and(|tree| !tree.sees(len, q0 + i, j))
                        || blocks.is_some_and(|(blocks, shape)| !blocks.sees(shape, seq, h, i, j))
                })
            }),
            bias: x.bias.map(|bias| -> Box<dyn Fn(usize, usize, usize) -> f64 + 'a> {
                Box::new(move |h, i, j| f64::from(bias.values[bias.strides.at(seq, h, i, j)]))
            }),
            dropout: dropout.map(|dropout| -> Box<dyn Fn(usize, usize, usize) -> f64 + 'a> {
                Box::new(move |h, i, j| f64::from(dropout.factor(seq, h, i, j)))
            }),
            slopes: wide(&beside.slopes),
            sinks: wide(&beside.sinks),
        }
    }

    pub fn spec<'f>(&self, of: &'f Functions<'_>) -> Spec<'f> {
        let c = self.c;
        Spec {
            hidden: of.hidden.as_deref().map(|f| f as _),
            softcap: c.scores.softcap.filter(|&cap| cap > 0.0).map(f64::from),
            bias: of.bias.as_deref().map(|f| f as _),
            alibi_slopes: c.scores.alibi.then_some(&of.slopes[..]),
            sinks: c.scores.sink.then_some(&of.sinks[..]),
            dropout: of.dropout.as_deref().map(|f| f as _),
            ..Spec::new(c.heads, c.mask, f64::from(c.problem().scale()))
        }
    }
}
