//! Step 1: the formula as it is written. All scores stand in memory at once: n² floats, written and read again.

use crate::{D, Head};

pub fn attention(h: &Head, out: &mut [f32]) {
    let n = h.n;
    let mut scores = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let dot: f32 = (0..D).map(|x| h.q[i * D + x] * h.k[j * D + x]).sum();
            scores[i * n + j] = h.scale() * dot;
        }
    }
    for i in 0..n {
        let row = &mut scores[i * n..][..i + 1];
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|s| *s = (*s - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|p| *p /= sum);
    }
    out.fill(0.0);
    for i in 0..n {
        for j in 0..=i {
            for x in 0..D {
                out[i * D + x] += scores[i * n + j] * h.v[j * D + x];
            }
        }
    }
}
