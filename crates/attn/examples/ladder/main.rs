//! The ladder: one attention, five ways, each step one idea. Checks every step against the f64 oracle, then times it.
//!
//! `cargo run --release -p suanpan-attn --example ladder [-- tokens]`; the text beside it is docs/ladder/README.md.

mod naive;
mod online;
mod packed;
mod simd;
mod tiled;

use std::time::Instant;

use suanpan_attn::reference::{Spec, attention_f64};
use suanpan_base::{HeadShape, Mask, SeqLen};

/// Width of the one head.
pub(crate) const D: usize = 64;

/// One head: `n` queries, keys and values of `D` floats.
pub(crate) struct Head {
    pub(crate) n: usize,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

impl Head {
    fn new(n: usize) -> Head {
        let numbers = |seed: u64| {
            let mut x = seed;
            let mut next = move || {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 40) as f32 / (1 << 24) as f32 - 0.5
            };
            (0..n * D).map(|_| next() + next() + next()).collect()
        };
        Head { n, q: numbers(1), k: numbers(2), v: numbers(3) }
    }

    /// Factor of q·k.
    pub(crate) fn scale(&self) -> f32 {
        1.0 / (D as f32).sqrt()
    }
}

/// A step: its name, its idea, and causal attention of one head into `out` (`[n][D]`).
struct Step {
    name: &'static str,
    run: fn(&Head, &mut [f32]),
    /// Floats beside q, k, v and out.
    extra: fn(usize) -> usize,
}

const STEPS: [Step; 5] = [
    Step { name: "1 naive", run: naive::attention, extra: |n| n * n },
    Step { name: "2 online softmax", run: online::attention, extra: |_| 2 },
    Step { name: "3 tiled", run: tiled::attention, extra: |_| tiled::EXTRA },
    Step { name: "4 SIMD", run: simd::attention, extra: |_| simd::EXTRA },
    Step { name: "5 packed (this crate)", run: packed::attention, extra: |_| packed::extra_floats() },
];

fn main() {
    let n = std::env::args().nth(1).map_or(2048, |x| x.parse().expect("tokens: a number"));
    let head = Head::new(n);
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let spec = Spec::new(HeadShape::new(1, 1, D), Mask::CAUSAL, f64::from(head.scale()));
    let truth = attention_f64(&spec, SeqLen::new(n, n), &wide(&head.q), &wide(&head.k), &wide(&head.v));
    let flops = 4.0 * D as f64 * Mask::CAUSAL.visible_pairs(SeqLen::new(n, n)) as f64;
    println!("causal, {n} tokens, one head of {D}, f32, one thread");
    let mut before = None;
    for step in &STEPS {
        let mut out = vec![f32::NAN; n * D];
        (step.run)(&head, &mut out);
        let error = out.iter().zip(&truth.out).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(error < 1e-5, "{}: error {error:e}", step.name);
        let best = (0..5)
            .map(|_| {
                let start = Instant::now();
                (step.run)(&head, &mut out);
                start.elapsed().as_secs_f64()
            })
            .fold(f64::INFINITY, f64::min);
        let gain = before.map_or(String::new(), |t: f64| format!("{:5.1} times the step before", t / best));
        println!(
            "{:<22} {:>9.2} ms {:>7.2} GFLOP/s {:>10} extra bytes  error {error:.0e}  {gain}",
            step.name,
            best * 1e3,
            flops / best / 1e9,
            (step.extra)(n) * size_of::<f32>(),
        );
        before = Some(best);
    }
}
