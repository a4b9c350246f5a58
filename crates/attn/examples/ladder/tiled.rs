//! Step 3: tiles (FlashAttention, arXiv 2205.14135; queries outside as in FlashAttention-2). A block of keys is read once for a tile of
//! rows, and the maximum, the rescale and the exponentials are done once a block: the inner loops are plain products.

use crate::{D, Head};

const ROWS: usize = 32;
const KEYS: usize = 64;
pub const EXTRA: usize = ROWS * KEYS + 2 * ROWS;

pub fn attention(h: &Head, out: &mut [f32]) {
    let mut s = [[0.0f32; KEYS]; ROWS];
    out.fill(0.0);
    for top in (0..h.n).step_by(ROWS) {
        let rows = ROWS.min(h.n - top);
        let (mut max, mut sum) = ([f32::NEG_INFINITY; ROWS], [0.0f32; ROWS]);
        for left in (0..top + rows).step_by(KEYS) {
            let keys = KEYS.min(h.n - left);
            for r in 0..rows {
                for c in 0..keys {
                    let dot: f32 = (0..D).map(|x| h.q[(top + r) * D + x] * h.k[(left + c) * D + x]).sum();
                    s[r][c] = h.scale() * dot;
                }
            }
            for r in 0..rows {
                // Only blocks on the diagonal hide keys.
                let seen = (top + r + 1).saturating_sub(left).min(keys);
                let o = &mut out[(top + r) * D..][..D];
                let block_max = s[r][..seen].iter().copied().fold(max[r], f32::max);
                let shrink = if block_max == max[r] { 1.0 } else { (max[r] - block_max).exp() };
                max[r] = block_max;
                sum[r] *= shrink;
                o.iter_mut().for_each(|o| *o *= shrink);
                for c in 0..seen {
                    let p = (s[r][c] - block_max).exp();
                    sum[r] += p;
                    for x in 0..D {
                        o[x] += p * h.v[(left + c) * D + x];
                    }
                }
            }
        }
        for r in 0..rows {
            out[(top + r) * D..][..D].iter_mut().for_each(|o| *o /= sum[r]);
        }
    }
}
