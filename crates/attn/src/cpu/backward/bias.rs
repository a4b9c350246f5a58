//! The gradient of an additive bias: p · (d_out·v − delta) of every pair, added to the number that the pair was given.

use std::sync::atomic::Ordering;

use super::ahead::Ahead;
use super::operands::Operands;
use super::task::{Scratch, Task, Visit};
use super::{load_keys, load_queries, look_up, products};
use crate::cpu::seen::Runs;
use crate::cpu::vector::Vector;
use crate::plan::KEY_BLOCK;

/// One key tile against its query tiles.
///
/// # Safety
/// As `Call::run_bias`, inside an instance of `V`.
#[inline(always)]
pub(crate) unsafe fn key_tile<V: Vector, S: Operands<V>, const N: usize>(t: &Task<'_>) {
    let (c, unit) = (t.call, t.unit());
    let tiles = c.plan.seqs[unit.seq as usize].len.seqlen_q.div_ceil(c.plan.tile_q());
    // SAFETY: forwarded; the slot's parts hold a key tile and a query tile.
    unsafe {
        let mut w = t.scratch();
        let (mut loaded, mut pairs, mut rows) = (false, 0, 0);
        for tile in 0..tiles {
            let Some(visit) = t.visit(tile) else { continue };
            let seen = look_up(t, &mut w, &visit);
            if seen == 0 {
                continue;
            }
            if !loaded {
                load_keys::<V, S, N>(t, &mut w);
                loaded = true;
            }
            pairs += seen;
            rows += visit.rows.count;
            load_queries::<V, S>(t, &mut w, &visit);
            let mut ahead = Ahead::new(c, &visit, None);
            products::tile_score_gradients::<V, S, N>(t, &mut w, &visit, &mut ahead);
            add(t, &w, &visit);
        }
        let counters = &c.counters[unit.seq as usize];
        counters.bias_pairs.fetch_add(pairs, Ordering::Relaxed);
        counters.keys.fetch_add(if loaded { unit.keys as u64 } else { 0 }, Ordering::Relaxed);
        counters.rows.fetch_add(rows as u64, Ordering::Relaxed);
    }
}

/// Adds ds of the visible pairs, row by row, keys in order.
unsafe fn add(t: &Task<'_>, w: &Scratch<'_>, visit: &Visit) {
    for row in 0..visit.rows.count {
        let (i, head) = visit.rows.tile_token_and_head(row);
        let Some((first, stride)) = t.bias_row(head, visit.token + i) else { return };
        let add_run = |run: std::ops::Range<usize>| {
            for col in run {
                // SAFETY: `check` bounded the number of every pair; they are this part's own.
                unsafe { *first.add(col * stride) += *w.ds.add(row * w.p_stride + col) };
            }
        };
        if visit.by_bits {
            for (block, &bits) in w.bits[row].iter().enumerate() {
                let left = block * KEY_BLOCK;
                Runs(bits).for_each(|run| add_run(left + run.start..left + run.end));
            }
        } else {
            add_run(w.visible[row].clone());
        }
    }
}

impl Task<'_> {
    /// Where the gradients of a query token's biases for the keys of the tile start, and how far apart they are.
    fn bias_row(&self, head: usize, token: usize) -> Option<(*mut f32, usize)> {
        let (c, unit) = (self.call, self.unit());
        let strides = c.extras.bias?.strides;
        let at = strides.at(unit.seq as usize, head, token, unit.key_start);
        // In bounds by `check`; a raw address all the same.
        Some((c.d_bias?.wrapping_add(at), strides.key))
    }

    /// Zeros for all pairs of the key tile.
    ///
    /// # Safety
    /// As `Call::run_bias`.
    pub(crate) unsafe fn zero_bias(&self) {
        let (c, unit) = (self.call, self.unit());
        let group = c.heads.group_size();
        let heads = unit.kv_head as usize * group..(unit.kv_head as usize + 1) * group;
        for head in heads {
            for token in 0..c.plan.seqs[unit.seq as usize].len.seqlen_q {
                let Some((first, stride)) = self.bias_row(head, token) else { return };
                for key in 0..if stride == 0 { 1 } else { unit.keys } {
                    // SAFETY: forwarded.
                    unsafe { *first.add(key) = 0.0 };
                }
            }
        }
    }
}
