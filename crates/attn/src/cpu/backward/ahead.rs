//! A walk that asks for what a visit ends with and the next one starts with, while the products of this one run.
//!
//! Rows of dq, q and d_out come from the last-level cache or memory; without the walk, loads and arithmetic take turns.

use super::task::{Call, Place, Sink, Source, TileRows, Visit};
use crate::cpu::ahead::LINE_BYTES;
use crate::cpu::task::Dst;
use crate::cpu::vector::Vector;

/// Rows of a query tile in one buffer.
#[derive(Clone, Copy)]
struct Stream {
    rows: TileRows,
    start: *const u8,
    element: usize,
    token: usize,
    head: usize,
    row_bytes: usize,
}

/// The walk: one row a step, of one stream after the other.
pub(crate) struct Ahead {
    streams: [Option<Stream>; 3],
    stream: usize,
    row: usize,
}

impl Ahead {
    /// The walk over the visit's rows of dq (or of its sums), then the next visit's rows of q and d_out.
    pub fn new(c: &Call<'_>, visit: &Visit, next: Option<&Visit>) -> Ahead {
        let (dqk, dv) = (c.heads.head_dim_qk, c.heads.head_dim_v);
        let of = |source: &Source, rows: TileRows, width: usize| {
            let (start, element) = (source.src.start(), c.plan.problem.q_dtype.bytes_of(1));
            let (token, head) = (source.at(1, 0), source.at(0, 1));
            Stream { rows, start, element, token, head, row_bytes: width * element }
        };
        // The first key tile starts the sums without looking at them.
        let sums = (visit.rank > 0).then(|| sums_of(c, &c.dq, visit.rows, dqk));
        let q = next.map(|n| of(&c.q, n.rows, dqk));
        let d_out = next.map(|n| of(&c.d_out, n.rows, dv));
        Ahead { streams: [sums, q, d_out], stream: 0, row: 0 }
    }

    /// Asks for the next row.
    #[inline(always)]
    pub fn ask<V: Vector>(&mut self) {
        let Some(slot) = self.streams.get(self.stream) else { return };
        let Some(s) = slot.as_ref().filter(|s| self.row < s.rows.count) else {
            (self.stream, self.row) = (self.stream + 1, 0);
            return;
        };
        let (token, head) = s.rows.token_and_head(self.row);
        let row = s.start.wrapping_add((token * s.token + head * s.head) * s.element);
        for at in (0..s.row_bytes).step_by(LINE_BYTES) {
            // SAFETY: a prefetch never faults.
            unsafe { V::prefetch(row.wrapping_add(at)) };
        }
        self.row += 1;
    }
}

/// Where the sums of dq lie: in dq itself, or in the workspace, a row after the other.
fn sums_of(c: &Call<'_>, dq: &Sink, rows: TileRows, width: usize) -> Stream {
    let (element, row_bytes) = (size_of::<f32>(), width * size_of::<f32>());
    match dq.dst {
        Dst::F32(p) => {
            let (token, head) = (dq.at(1, 0), dq.at(0, 1));
            Stream { rows, start: p.cast_const().cast(), element, token, head, row_bytes }
        }
        Dst::Bf16(_) | Dst::F16(_) => {
            let start = c.sums.wrapping_add(rows.first * c.sums_width).cast_const().cast();
            Stream { rows: rows.counted(), start, element, token: c.sums_width, head: 0, row_bytes }
        }
    }
}
