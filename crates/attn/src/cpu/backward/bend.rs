//! Softcap, bias, ALiBi and dropout in the backward: weights from plain scores, and the slope of what bent them.

use super::task::{Scratch, Task, Visit, Work};
use crate::cpu::scores::{bias_at, distances};
use crate::cpu::softmax::Columns;
use crate::cpu::vector::Vector;

/// A sum whose roundings are kept (Knuth's two-sum): scores of tens meet biases, slopes and lse, and what is left of them is small.
struct Sum<V> {
    rounded: V,
    rest: V,
}

impl<V: Vector> Sum<V> {
    /// Adds `b`.
    ///
    /// # Safety
    /// As `Vector`.
    #[inline(always)]
    unsafe fn add(&mut self, b: V) {
        // SAFETY: forwarded.
        unsafe {
            let a = self.rounded;
            let sum = a.add(b);
            let part = sum.sub(a);
            let rest = a.sub(sum.sub(part)).add(b.sub(part));
            (self.rounded, self.rest) = (sum, self.rest.add(rest));
        }
    }

    /// e to the sum, at most 1; NaN comes through. A sum that is not finite has no rest.
    ///
    /// # Safety
    /// As `Vector`.
    #[inline(always)]
    unsafe fn exp(self) -> V {
        // SAFETY: forwarded.
        unsafe {
            let zero = V::splat(0.0);
            let finite = self.rounded.sub(self.rounded);
            let rest = finite.if_less(V::splat(1.0), self.rest, zero);
            let sum = self.rounded.add(rest);
            let rest = sum.if_less(zero, rest.sub(sum.sub(self.rounded)), zero);
            zero.min(sum).exp_of_sum(rest)
        }
    }
}

/// Takes row `row` of a visit from plain scores (natural, scaled) in columns `cols` of p to weights in p and `weight · slope` in ds, where
/// slope is the derivative of a finished score with respect to q·k.
///
/// Only columns `cols.lo .. cols.hi` count; the others get 0. Dropped weights are 0 in p alone.
///
/// # Safety
/// As `Call::run_unit`, inside an instance of `V`, on loaded scratch.
#[inline(always)]
pub(crate) unsafe fn bend_row<V: Vector>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    visit: &Visit,
    row: usize,
    cols: Columns,
) {
    let (c, unit) = (t.call, t.unit());
    let (seq, base) = (unit.seq as usize, unit.key_start);
    let (i, head) = visit.rows.tile_token_and_head(row);
    let token = visit.token + i;
    let centre = c.mask.centre(c.plan.seqs[seq].len, token);
    let slope = c.extras.alibi_slopes.map_or(0.0, |slopes| slopes[head]);
    let cap = c.plan.problem.scores.cap();
    // The gradient of the bias stops at finished scores.
    let finished = matches!(t.work, Work::Bias(_));
    let scale = if finished { 1.0 } else { c.scale };
    // SAFETY: within the slot's parts; LANES <= MAX_LANES; `check` bounded the bias of every key that exists.
    unsafe {
        let (zero, one, scale) = (V::splat(0.0), V::splat(1.0), V::splat(scale));
        let lse = V::splat(*w.lse.add(row));
        let (p, ds) = (w.p.add(row * w.p_stride), w.ds.add(row * w.p_stride));
        let mut col = cols.from;
        while col < cols.to {
            let (mut x, mut bend) = (V::load(p.add(col)), scale);
            if let Some(cap) = cap {
                let bent = x.div(V::splat(cap)).tanh();
                x = bent.mul(V::splat(cap));
                if !finished {
                    bend = one.sub(bent.mul(bent)).mul(scale);
                }
            }
            let mut sum = Sum { rounded: x, rest: zero };
            if let Some(bias) = &c.extras.bias {
                let first = bias.values.as_ptr().add(bias.strides.at(seq, head, token, base));
                sum.add(bias_at::<V>(first, bias.strides.key, col, cols));
            }
            if slope != 0.0 {
                let (slope, distance) = (V::splat(-slope), distances::<V>(centre - (base + col) as i64));
                let step = slope.mul(distance);
                sum.add(step);
                sum.rest = sum.rest.add(slope.fma(distance, zero.sub(step)));
            }
            sum.add(lse);
            let (lo, hi) = (cols.lo.saturating_sub(col), cols.hi.saturating_sub(col));
            // As for plain scores: a weight is at most 1, and NaN comes through.
            let weight = sum.exp();
            weight.select(lo, hi, zero).store(p.add(col));
            weight.mul(bend).select(lo, hi, zero).store(ds.add(col));
            col += V::LANES;
        }
        if let Some(dropout) = &c.dropout
            && cols.lo < cols.hi
        {
            let (lo, hi) = (cols.lo.max(cols.from), cols.hi.min(cols.to));
            let weights = std::slice::from_raw_parts_mut(p.add(lo), hi.saturating_sub(lo));
            dropout.apply((seq, head, token), base + lo, weights);
        }
    }
}
