//! Rotary position embedding: angles in f64, cosines and sines rounded once to f32, applied in place.
//!
//! Which inverse frequencies a model uses (plain, Llama-3 scaling, …) is the model's business.

use rayon::prelude::*;

use crate::isa::{Isa, per_isa};
use crate::norm::PARALLEL_ELEMS;

/// Positions that share one coarse table row.
const FINE: usize = 1024;
/// Rotated pairs handled at once with cosines on the stack.
const PAIRS: usize = 64;

/// Which two elements of a head form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// (i, i + d/2), as NeoX and `transformers` lay them out.
    Half,
    /// (2i, 2i + 1), as GGUF files of the Llama family lay them out.
    Interleaved,
}

/// Cosines and sines for every position below `max_position`.
///
/// The angle of position p is split as p = 1024·c + f: two small f64 tables hold cos and sin of both parts, and one complex product
/// in f64 gives the pair, rounded once to f32. So a table for a million positions takes half a megabyte, not hundreds.
#[derive(Clone, Debug)]
pub struct RopeTable {
    pairs: usize,
    max_position: usize,
    /// `[max_position / FINE rounded up, pairs]` of (cos, sin), the attention factor multiplied in.
    coarse: Vec<(f64, f64)>,
    /// `[FINE, pairs]` of (cos, sin).
    fine: Vec<(f64, f64)>,
}

impl RopeTable {
    /// Tables for `inv_freq.len()` pairs; `attention_factor` scales cosines and sines (1 for most models).
    pub fn new(inv_freq: &[f64], attention_factor: f64, max_position: usize) -> RopeTable {
        let rows = |count: usize, step: usize, factor: f64| -> Vec<(f64, f64)> {
            let angles = (0..count).flat_map(|i| inv_freq.iter().map(move |f| (i * step) as f64 * f));
            angles.map(|a| (a.cos() * factor, a.sin() * factor)).collect()
        };
        RopeTable {
            pairs: inv_freq.len(),
            max_position,
            coarse: rows(max_position.div_ceil(FINE), FINE, attention_factor),
            fine: rows(FINE.min(max_position), 1, 1.0),
        }
    }

    /// Rotated pairs of a head.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// First position that the table does not hold.
    pub fn max_position(&self) -> usize {
        self.max_position
    }

    /// Bytes of both tables.
    pub fn bytes(&self) -> usize {
        (self.coarse.len() + self.fine.len()) * size_of::<(f64, f64)>()
    }

    /// Cosine and sine of `position` for pairs `first..first + cos.len()`.
    fn fill(&self, position: usize, first: usize, cos: &mut [f32], sin: &mut [f32]) {
        let coarse = &self.coarse[position / FINE * self.pairs + first..];
        let fine = &self.fine[position % FINE * self.pairs + first..];
        for i in 0..cos.len() {
            let ((ca, sa), (cb, sb)) = (coarse[i], fine[i]);
            cos[i] = (ca * cb - sa * sb) as f32;
            sin[i] = (sa * cb + ca * sb) as f32;
        }
    }
}

per_isa! {
    fn rotate_half(x: &mut [f32], head_dim: usize, first: usize, distance: usize, cos: &[f32], sin: &[f32]) {
        for head in x.chunks_exact_mut(head_dim) {
            let (low, high) = head.split_at_mut(distance);
            let (low, high) = (&mut low[first..first + cos.len()], &mut high[first..first + cos.len()]);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    }
}

per_isa! {
    fn rotate_interleaved(x: &mut [f32], head_dim: usize, first: usize, cos: &[f32], sin: &[f32]) {
        for head in x.chunks_exact_mut(head_dim) {
            let (pairs, _) = head[2 * first..].as_chunks_mut::<2>();
            for ((p, c), s) in pairs.iter_mut().zip(cos).zip(sin) {
                *p = [p[0] * c - p[1] * s, p[1] * c + p[0] * s];
            }
        }
    }
}

fn rope_token(x: &mut [f32], head_dim: usize, position: u32, table: &RopeTable, style: RopeStyle) {
    let isa = Isa::best();
    let (mut cos, mut sin) = ([0f32; PAIRS], [0f32; PAIRS]);
    let mut first = 0;
    while first < table.pairs {
        let n = PAIRS.min(table.pairs - first);
        let (cos, sin) = (&mut cos[..n], &mut sin[..n]);
        table.fill(position as usize, first, cos, sin);
        match style {
            RopeStyle::Half => rotate_half(isa, x, head_dim, first, table.pairs, cos, sin),
            RopeStyle::Interleaved => rotate_interleaved(isa, x, head_dim, first, cos, sin),
        }
        first += n;
    }
}

/// Rotates `x` `[positions.len(), heads, head_dim]` in place; elements past the table's pairs are left alone.
///
/// # Panics
/// When `x` has another length, the table has more pairs than a head, or a position is not below `table.max_position()`.
pub fn rope(
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
    positions: &[u32],
    table: &RopeTable,
    style: RopeStyle,
) {
    let width = heads * head_dim;
    assert_eq!(Some(x.len()), positions.len().checked_mul(width), "rope: x");
    assert!(2 * table.pairs <= head_dim, "rope: {} pairs in a head of {head_dim}", table.pairs);
    let max = positions.iter().copied().max().unwrap_or(0) as usize;
    assert!(x.is_empty() || max < table.max_position, "rope: position {max} of {}", table.max_position);
    if x.is_empty() {
        return;
    }
    if x.len() < PARALLEL_ELEMS {
        for (x, p) in x.chunks_exact_mut(width).zip(positions) {
            rope_token(x, head_dim, *p, table, style);
        }
        return;
    }
    x.par_chunks_exact_mut(width)
        .zip(positions)
        .with_min_len(16)
        .for_each(|(x, p)| rope_token(x, head_dim, *p, table, style));
}
