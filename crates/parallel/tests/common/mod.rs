//! Inputs, the oracle and whole runs for the tests of this crate.
#![allow(dead_code)] // Each test file uses its part.

use std::num::NonZeroUsize;

use suanpan_attn::DropoutKey;
use suanpan_attn::dropout::Dropout;
use suanpan_attn::reference::{Spec, attention_backward_f64, attention_f64};
use suanpan_base::{HeadShape, Mask, SeqLen};
use suanpan_parallel::{
    Attention, Bias, Checked, Inputs, Layout, MaskSlices, Options, Outputs, ParallelPlan, Pass, Request,
    Scheme, check, run_threads,
};

/// Numbers that look random and are the same every time.
pub struct Numbers(pub u64);

impl Numbers {
    /// The next 64 bits (splitmix64).
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// `n` numbers in -2 .. 2.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() >> 40) as f32 / (1u64 << 22) as f32 - 2.0).collect()
    }
}

/// Tensors of all tokens in global order: q, k, v, d_out.
pub struct Whole {
    pub heads: HeadShape,
    pub mask: MaskSlices,
    pub attention: Attention,
    pub invariant_block: Option<NonZeroUsize>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub d_out: Vec<f32>,
}

/// Results of all tokens in global order: out, lse, dq, dk, dv.
pub type Results<T> = [Vec<T>; 5];

impl Whole {
    pub fn new(heads: HeadShape, mask: Mask, lengths: &[usize], seed: u64) -> Whole {
        let mask = MaskSlices::packed(mask, lengths).unwrap();
        let (n, mut x) = (mask.tokens(), Numbers(seed));
        let q = x.floats(n * heads.num_q_heads * heads.head_dim_qk);
        let k = x.floats(n * heads.num_kv_heads * heads.head_dim_qk);
        let v = x.floats(n * heads.num_kv_heads * heads.head_dim_v);
        let d_out = x.floats(n * heads.num_q_heads * heads.head_dim_v);
        Whole { heads, mask, attention: Attention::default(), invariant_block: None, q, k, v, d_out }
    }

    fn widths(&self) -> [usize; 5] {
        let h = self.heads;
        let (hq, hk) = (h.num_q_heads, h.num_kv_heads);
        [hq * h.head_dim_v, hq, hq * h.head_dim_qk, hk * h.head_dim_qk, hk * h.head_dim_v]
    }

    /// Plans, checks and runs both passes, and gathers what comes out. Counted pairs and bytes must be the planned ones.
    pub fn run(&self, n: usize, layout: Layout, scheme: Scheme) -> Results<f32> {
        self.run_with_sinks(n, layout, scheme).0
    }

    /// The same, with the gradient of the sinks summed over ranks.
    pub fn run_with_sinks(&self, n: usize, layout: Layout, scheme: Scheme) -> (Results<f32>, Vec<f32>) {
        let [fw, lw, qw, kw, vw] = self.widths();
        let plan = |pass| {
            let (heads, mask, invariant_block) = (self.heads, &self.mask, self.invariant_block);
            let request = Request { heads, mask, layout, cp_size: n, scheme, pass, invariant_block };
            let plan = ParallelPlan::new(&request).unwrap();
            check(plan.clone()).unwrap_or_else(|flaw| panic!("{flaw}\n{plan}"))
        };
        let (forward, backward) = (plan(Pass::Forward), plan(Pass::Backward));
        let shards = forward.plan().shards.clone();
        let inputs = |rank: usize| Inputs {
            q: shards.scatter(rank, &self.q, qw),
            k: shards.scatter(rank, &self.k, kw),
            v: shards.scatter(rank, &self.v, vw),
            ..Inputs::default()
        };
        let mut results = self.widths().map(|w| vec![f32::NAN; w * self.mask.tokens()]);
        let ran = run_threads(&forward, &self.attention, (0..n).map(inputs).collect(), &Options::default())
            .unwrap();
        let mut next = Vec::new();
        for (rank, outputs) in ran.into_iter().enumerate() {
            let x = outputs.unwrap();
            as_planned(&x, &forward, rank);
            shards.gather(rank, &x.out, fw, &mut results[0]);
            shards.gather(rank, &x.lse, lw, &mut results[1]);
            let d_out = shards.scatter(rank, &self.d_out, fw);
            next.push(Inputs { out: x.out, lse: x.lse, d_out, ..inputs(rank) });
        }
        let mut d_sinks = vec![0.0; self.heads.num_q_heads];
        let ran = run_threads(&backward, &self.attention, next, &Options::default()).unwrap();
        for (rank, outputs) in ran.into_iter().enumerate() {
            let x = outputs.unwrap();
            as_planned(&x, &backward, rank);
            d_sinks.iter_mut().zip(&x.d_sinks).for_each(|(a, b)| *a += b);
            shards.gather(rank, &x.dq, qw, &mut results[2]);
            shards.gather(rank, &x.dk, kw, &mut results[3]);
            shards.gather(rank, &x.dv, vw, &mut results[4]);
        }
        (results, d_sinks)
    }

    /// The f64 oracle, document by document.
    pub fn oracle(&self) -> Results<f64> {
        self.oracle_with_sinks().0
    }

    /// The oracle's gradient of the sinks.
    pub fn oracle_d_sinks(&self) -> Vec<f64> {
        self.oracle_with_sinks().1
    }

    fn oracle_with_sinks(&self) -> (Results<f64>, Vec<f64>) {
        let mut all: Results<f64> = Default::default();
        let mut d_sinks = vec![0.0; self.heads.num_q_heads];
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let scale = self.attention.softmax_scale.unwrap_or_else(|| self.heads.default_scale());
        let [fw, _, qw, kw, vw] = self.widths();
        for (document, (&start, &n)) in self.mask.starts().iter().zip(self.mask.lengths()).enumerate() {
            let part = |x: &[f32], w: usize| wide(&x[start * w..(start + n) * w]);
            let kept = self
                .attention
                .dropout
                .map(|(p, seed)| Dropout::new(p, DropoutKey { seed, ..DropoutKey::default() }));
            let factor =
                |h: usize, i: usize, j: usize| kept.map_or(1.0, |d| f64::from(d.factor(document, h, i, j)));
            let mut spec = Spec::new(self.heads, self.mask.mask(), f64::from(scale));
            spec.softcap = self.attention.softcap.map(f64::from);
            spec.dropout = Some(&factor);
            let at = |b: &Bias, h: usize, i: usize, j: usize| {
                f64::from(b.values[h * b.head_stride + (start + i) * b.row_stride + start + j])
            };
            let bias =
                |h: usize, i: usize, j: usize| self.attention.bias.as_ref().map_or(0.0, |b| at(b, h, i, j));
            spec.bias = self.attention.bias.is_some().then_some(&bias);
            let sinks: Option<Vec<f64>> = self.attention.sinks.as_ref().map(|s| wide(s));
            spec.sinks = sinks.as_deref();
            let (len, q, k, v) = (SeqLen::new(n, n), part(&self.q, qw), part(&self.k, kw), part(&self.v, vw));
            let r = attention_f64(&spec, len, &q, &k, &v);
            let g = attention_backward_f64(&spec, len, &q, &k, &v, &part(&self.d_out, fw), None);
            d_sinks.iter_mut().zip(&g.d_sinks).for_each(|(a, b)| *a += b);
            // The oracle's lse is [heads, tokens]; ours is [tokens, heads].
            let hq = self.heads.num_q_heads;
            let lse =
                (0..n).flat_map(|i| (0..hq).map(move |h| (i, h))).map(|(i, h)| r.lse[h * n + i]).collect();
            for (all, part) in all.iter_mut().zip([r.out, lse, g.dq, g.dk, g.dv]) {
                all.extend(part);
            }
        }
        (all, d_sinks)
    }
}

/// Counted is planned.
fn as_planned(x: &Outputs, plan: &Checked, rank: usize) {
    let plan = plan.plan();
    let planned = (plan.pairs(rank), plan.sent_bytes(rank), plan.buffer_bytes(rank));
    assert_eq!((x.pairs, x.sent_bytes, x.buffer_bytes), planned, "rank {rank}\n{plan}");
}

/// Names of [`Results`].
pub const NAMES: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

/// Root of the summed squares of the differences; places that are not finite must be the same.
pub fn distance(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mut sum = 0.0;
    for (g, w) in got.iter().zip(want) {
        if w.is_finite() {
            assert!(g.is_finite(), "{g} for {w}");
            sum += (f64::from(*g) - w).powi(2);
        } else {
            assert_eq!(f64::from(*g), *w);
        }
    }
    sum.sqrt()
}
