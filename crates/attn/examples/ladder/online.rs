//! Step 2: the online softmax (Milakov and Gimelshein, arXiv 1805.02867). A running maximum and sum replace the row of scores: when the
//! maximum grows, what was summed so far shrinks by exp(old - new). Nothing of size n is kept.

use crate::{D, Head};

pub fn attention(h: &Head, out: &mut [f32]) {
    for i in 0..h.n {
        let o = &mut out[i * D..][..D];
        o.fill(0.0);
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        for j in 0..=i {
            let dot: f32 = (0..D).map(|x| h.q[i * D + x] * h.k[j * D + x]).sum();
            let s = h.scale() * dot;
            if s > max {
                let shrink = (max - s).exp();
                sum *= shrink;
                o.iter_mut().for_each(|o| *o *= shrink);
                max = s;
            }
            let p = (s - max).exp();
            sum += p;
            for x in 0..D {
                o[x] += p * h.v[j * D + x];
            }
        }
        o.iter_mut().for_each(|o| *o /= sum);
    }
}
