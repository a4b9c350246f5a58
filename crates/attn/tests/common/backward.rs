//! A backward problem with its data: run on any machine, judged against the f64 oracle and plain f32 attention's backward.

use suanpan_attn::reference::{self, Spec};
use suanpan_attn::{BackwardArgs, BackwardPlan, BackwardWorkspace, Machine, Strides, run_backward};
use suanpan_base::{DType, SeqLen};
use suanpan_ledger::BackwardBooks;

use super::beside::{Beside, Pairs};
use super::{Case, Data, Flat, Worst, normal, run_case, unit};

/// What a training step hands to the backward: inputs, and gradients of out `[total_q, heads, dv]` and lse `[heads, total_q]`.
#[derive(Clone)]
pub struct Inputs {
    pub data: Data,
    pub d_out: Vec<f32>,
    pub d_lse: Option<Vec<f32>>,
}

impl Inputs {
    pub fn random(c: &Case, with_lse: bool) -> Inputs {
        let h = c.heads;
        let rows = c.total_q() * h.num_q_heads;
        Inputs {
            data: Data::random(c),
            d_out: normal(rows * h.head_dim_v, c.seed * 3 + 77, c.q_dtype),
            d_lse: with_lse.then(|| normal(rows, c.seed * 3 + 78, DType::F32)),
        }
    }
}

/// Dense results: dq `[total_q, heads, dqk]`, dk `[total_k, kv_heads, dqk]`, dv `[total_k, kv_heads, dv]`.
#[derive(Clone, Debug)]
pub struct Gradients {
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
    /// `[heads]`; empty without sinks.
    pub d_sinks: Vec<f32>,
    /// Under the strides of the case's bias; empty without one.
    pub d_bias: Vec<f32>,
    pub books: Vec<BackwardBooks>,
    /// The stored forward results that the call was given.
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
}

impl Gradients {
    /// All bits of the gradients.
    pub fn bits(&self) -> [Vec<u32>; 5] {
        [&self.dq, &self.dk, &self.dv, &self.d_sinks, &self.d_bias]
            .map(|x| x.iter().map(|x| x.to_bits()).collect())
    }
}

const CANARY: f32 = -77.0;

/// Shuffled pages of keys: ids a sequence, some never named; `None` = contiguous.
struct Pages {
    page_size: Option<usize>,
    table: Vec<u32>,
    table_stride: usize,
    /// (page, slot) of every token of all sequences.
    places: Vec<(usize, usize)>,
    count: usize,
}

impl Pages {
    fn of(c: &Case) -> Pages {
        let Some(page_size) = c.page_size else { return Pages::none(c.total_k()) };
        let pages = |s: &SeqLen| s.seqlen_k.div_ceil(page_size);
        let count = (c.seqs.iter().map(pages).sum::<usize>() * 3 / 2 + 1).next_power_of_two();
        let table_stride = c.seqs.iter().map(pages).max().unwrap_or(0) + 2;
        let mut table = vec![u32::MAX; c.seqs.len() * table_stride];
        let (mut places, mut next) = (Vec::new(), 0);
        for (i, s) in c.seqs.iter().enumerate() {
            for page in 0..pages(s) {
                let id = (next * 5 + 3) % count;
                next += 1;
                table[i * table_stride + page] = id as u32;
                let tokens = page_size.min(s.seqlen_k - page * page_size);
                places.extend((0..tokens).map(|slot| (id, slot)));
            }
        }
        Pages { page_size: Some(page_size), table, table_stride, places, count }
    }

    /// Tokens one after another: one long page.
    fn none(tokens: usize) -> Pages {
        let places = (0..tokens).map(|token| (0, token)).collect();
        Pages { page_size: None, table: Vec::new(), table_stride: 0, places, count: 1 }
    }
}

/// A strided buffer: `[tokens, heads, width]` with padding after each row, each token and each page.
struct Strided {
    flat: Flat,
    strides: Strides,
    /// Where each token starts.
    tokens: Vec<usize>,
    heads: usize,
    width: usize,
}

impl Strided {
    fn new(x: &[f32], (heads, width): (usize, usize), pages: &Pages, dtype: DType, padding: f32) -> Strided {
        let token = heads * (width + 3) + 5;
        let page = pages.page_size.unwrap_or(pages.places.len()) * token + 7;
        let strides = Strides { token, head: width + 3, page };
        let mut flat = Flat::filled(pages.count * page, padding, dtype);
        let tokens: Vec<_> = pages.places.iter().map(|(id, slot)| id * page + slot * token).collect();
        for (i, &x) in x.iter().enumerate() {
            let row = tokens[i / width / heads] + i / width % heads * strides.head;
            flat.set(row + i % width, x);
        }
        Strided { flat, strides, tokens, heads, width }
    }

    /// An output: NaN where a result belongs, canaries beside it.
    fn output(dims: (usize, usize), pages: &Pages, dtype: DType) -> Strided {
        Strided::new(&vec![f32::NAN; pages.places.len() * dims.0 * dims.1], dims, pages, dtype, CANARY)
    }

    /// (token, head) strides.
    fn rows(&self) -> (usize, usize) {
        (self.strides.token, self.strides.head)
    }

    /// The dense result; padding must be as it was.
    fn collect(&self, c: &Case) -> Vec<f32> {
        let (heads, width) = (self.heads, self.width);
        let mut flat = self.flat.to_f32();
        let mut dense = Vec::with_capacity(self.tokens.len() * heads * width);
        for (&start, head) in self.tokens.iter().flat_map(|t| (0..heads).map(move |h| (t, h))) {
            let row = &mut flat[start + head * self.strides.head..][..width];
            dense.extend_from_slice(row);
            row.fill(CANARY);
        }
        assert!(flat.iter().all(|&x| x == CANARY), "canary overwritten: {c:?}");
        dense
    }
}

pub fn backward_plan(c: &Case, machine: &Machine) -> BackwardPlan {
    let mut plan = BackwardPlan::new(&c.problem(), machine, c.limits()).unwrap();
    if c.scores.bias {
        plan = plan.with_d_bias().unwrap();
    }
    plan.schedule(&c.seqs).unwrap();
    plan
}

/// Forward, then backward; checks canaries and that predicted = counted.
pub fn run_backward_case(c: &Case, x: &Inputs, machine: &Machine, poison: f32) -> Gradients {
    let h = c.heads;
    let forward = run_case(c, &x.data, machine, poison);
    let (rows, pages) = (Pages::none(c.total_q()), Pages::of(c));
    let (q_dims, o_dims) = ((h.num_q_heads, h.head_dim_qk), (h.num_q_heads, h.head_dim_v));
    let (k_dims, v_dims) = ((h.num_kv_heads, h.head_dim_qk), (h.num_kv_heads, h.head_dim_v));
    let q = Strided::new(&x.data.q, q_dims, &rows, c.q_dtype, poison);
    let k = Strided::new(&x.data.k, k_dims, &pages, c.kv_dtype, poison);
    let v = Strided::new(&x.data.v, v_dims, &pages, c.kv_dtype, poison);
    let out = Strided::new(&forward.out, o_dims, &rows, c.q_dtype, poison);
    let d_out = Strided::new(&x.d_out, o_dims, &rows, c.q_dtype, poison);
    let mut dq = Strided::output(q_dims, &rows, c.q_dtype);
    let mut dk = Strided::output(k_dims, &pages, c.kv_dtype);
    let mut dv = Strided::output(v_dims, &pages, c.kv_dtype);
    let (dq_rows, dk_strides, dv_strides) = (dq.rows(), dk.strides, dv.strides);
    let plan = backward_plan(c, machine);
    let mut ws = BackwardWorkspace::for_plans(&[&plan]);
    assert_eq!(ws.bytes(), plan.workspace_bytes());
    let mut books = vec![BackwardBooks::default(); c.seqs.len()];
    let beside = Beside::of(c);
    let extras = beside.extras(c);
    let mut d_sinks = vec![f32::NAN; if c.scores.sink { h.num_q_heads } else { 0 }];
    let mut d_bias = vec![CANARY; beside.bias.len()];
    let args = BackwardArgs {
        extras,
        d_sinks: c.scores.sink.then_some(&mut d_sinks[..]),
        d_bias: c.scores.bias.then_some(&mut d_bias[..]),
        q: q.flat.buf(),
        q_strides: q.rows(),
        k: k.flat.buf(),
        k_strides: k.strides,
        v: v.flat.buf(),
        v_strides: v.strides,
        page_table: &pages.table,
        page_table_stride: pages.table_stride,
        out: out.flat.buf(),
        out_strides: out.rows(),
        lse: &forward.lse,
        d_out: d_out.flat.buf(),
        d_out_strides: d_out.rows(),
        d_lse: x.d_lse.as_deref(),
        dq: dq.flat.buf_mut(),
        dq_strides: dq_rows,
        dk: dk.flat.buf_mut(),
        dk_strides,
        dv: dv.flat.buf_mut(),
        dv_strides,
    };
    run_backward(&plan, args, &mut ws, &mut books).unwrap_or_else(|e| panic!("{e}: {c:?}"));
    for (i, (len, book)) in c.seqs.iter().zip(&books).enumerate() {
        let predicted = if c.by_bits() { plan.predicted_with(i, &extras) } else { plan.predicted(*len) };
        assert_eq!(*book, predicted, "books of sequence {i}: {c:?} {plan}");
    }
    Gradients {
        dq: dq.collect(c),
        dk: dk.collect(c),
        dv: dv.collect(c),
        d_sinks,
        d_bias,
        books,
        out: forward.out,
        lse: forward.lse,
    }
}

/// Plain attention's backward of one sequence in f32, one step after another, from what the kernel is given: stored out and lse included.
#[rustfmt::skip]
fn plain_f32(c: &Case, spec: &Spec<'_>, d_sinks: &mut [(f32, f32)], mut d_bias: impl FnMut(usize, usize, usize, f32), len: SeqLen, q: &[f32], k: &[f32], v: &[f32], out: &[f32], lse: impl Fn(usize, usize) -> f32, d_out: &[f32], d_lse: impl Fn(usize, usize) -> f32) -> [Vec<f32>; 3] {
    let h = c.heads;
    let (dqk, dv_width, scale) = (h.head_dim_qk, h.head_dim_v, c.problem().scale());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let add = |sum: &mut [f32], factor: f32, x: &[f32]| sum.iter_mut().zip(x).for_each(|(s, x)| *s += factor * x);
    let mut dq = vec![0.0; len.seqlen_q * h.num_q_heads * dqk];
    let mut dk = vec![0.0; len.seqlen_k * h.num_kv_heads * dqk];
    let mut dv = vec![0.0; len.seqlen_k * h.num_kv_heads * dv_width];
    for (i, head) in (0..len.seqlen_q).flat_map(|i| (0..h.num_q_heads).map(move |head| (i, head))) {
        let keys = spec.keys(len, i, head);
        let (row, kv_head) = (i * h.num_q_heads + head, head / h.group_size());
        let (q_row, d_row) = (&q[row * dqk..][..dqk], &d_out[row * dv_width..][..dv_width]);
        let at = |j: usize, width: usize| (j * h.num_kv_heads + kv_head) * width..(j * h.num_kv_heads + kv_head + 1) * width;
        let kept = |j: usize| spec.dropout.map_or(1.0, |f| f(head, i, j)) as f32;
        let delta = dot(&out[row * dv_width..][..dv_width], d_row) - d_lse(i, head);
        if c.scores.sink {
            let term = (c.sinks()[head] - lse(i, head)).exp() * delta;
            d_sinks[head] = (d_sinks[head].0 - term, d_sinks[head].1 + term.abs());
        }
        for j in keys {
            let mut s = dot(q_row, &k[at(j, dqk)]) * scale;
            let mut bend = 1.0;
            if let Some(cap) = c.scores.softcap.filter(|&cap| cap > 0.0) {
                bend = 1.0 - (s / cap).tanh().powi(2);
                s = cap * (s / cap).tanh();
            }
            s += spec.bias.map_or(0.0, |f| f(head, i, j)) as f32;
            if c.scores.alibi {
                s -= c.slopes()[head] * (c.mask.centre(len, i) - j as i64).abs() as f32;
            }
            let p = if lse(i, head) == f32::NEG_INFINITY { 0.0 } else { (s - lse(i, head)).exp() };
            let ds = p * (kept(j) * dot(d_row, &v[at(j, dv_width)]) - delta);
            d_bias(head, i, j, ds);
            let ds = ds * bend * scale;
            add(&mut dv[at(j, dv_width)], p * kept(j), d_row);
            add(&mut dk[at(j, dqk)], ds, q_row);
            add(&mut dq[row * dqk..][..dqk], ds, &k[at(j, dqk)]);
        }
    }
    [dq, dk, dv]
}

/// The rule: non-finite places agree first; then error <= 2x plain attention's error in the same precision + one rounding, for each of
/// dq, dk and dv.
pub fn judge_gradients(c: &Case, x: &Inputs, got: &Gradients) {
    let h = c.heads;
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let beside = Beside::of(c);
    let mut sinks_plain = vec![(0.0f32, 0.0f32); h.num_q_heads];
    let mut sinks_exact = vec![0.0f64; h.num_q_heads];
    let mut bias_sums = BiasSums::new(got.d_bias.len());
    let (mut q0, mut k0) = (0, 0);
    let mut worst = [Worst::default(); 3];
    for (seq, &len) in c.seqs.iter().enumerate() {
        let pairs = Pairs { c, beside: &beside, seq };
        let of = pairs.functions();
        let spec = pairs.spec(&of);
        let part = |x: &[f32], start: usize, count: usize, row: usize| {
            x[start * row..(start + count) * row].to_vec()
        };
        let (q_row, o_row) = (h.num_q_heads * h.head_dim_qk, h.num_q_heads * h.head_dim_v);
        let (k_row, v_row) = (h.num_kv_heads * h.head_dim_qk, h.num_kv_heads * h.head_dim_v);
        let q = part(&x.data.q, q0, len.seqlen_q, q_row);
        let k = part(&x.data.k, k0, len.seqlen_k, k_row);
        let v = part(&x.data.v, k0, len.seqlen_k, v_row);
        let out = part(&got.out, q0, len.seqlen_q, o_row);
        let d_out = part(&x.d_out, q0, len.seqlen_q, o_row);
        let d_lse = |i: usize, head: usize| x.d_lse.as_ref().map_or(0.0, |d| d[head * c.total_q() + q0 + i]);
        let lse = |i: usize, head: usize| got.lse[head * c.total_q() + q0 + i];
        let d_lse_64: Vec<f64> = (0..h.num_q_heads)
            .flat_map(|head| (0..len.seqlen_q).map(move |i| (i, head)))
            .map(|(i, head)| f64::from(d_lse(i, head)))
            .collect();
        let [q64, k64, v64, d64] = [&q, &k, &v, &d_out].map(|x| wide(x));
        let exact = reference::attention_backward_f64(&spec, len, &q64, &k64, &v64, &d64, Some(&d_lse_64));
        sinks_exact.iter_mut().zip(&exact.d_sinks).for_each(|(sum, d)| *sum += d);
        let place = |h: usize, i: usize, j: usize| beside.bias_strides.at(seq, h, i, j);
        bias_sums.expect(c, len, &exact.d_bias, &place);
        let d_bias = |h: usize, i: usize, j: usize, ds: f32| {
            if c.scores.bias {
                bias_sums.plain[place(h, i, j)] += ds;
                bias_sums.size[place(h, i, j)] += ds.abs();
            }
        };
        let plain = plain_f32(c, &spec, &mut sinks_plain, d_bias, len, &q, &k, &v, &out, lse, &d_out, d_lse);
        let ours = [
            part(&got.dq, q0, len.seqlen_q, q_row),
            part(&got.dk, k0, len.seqlen_k, k_row),
            part(&got.dv, k0, len.seqlen_k, v_row),
        ];
        let types = [c.q_dtype, c.kv_dtype, c.kv_dtype];
        for (which, exact) in [exact.dq, exact.dk, exact.dv].iter().enumerate() {
            let what = || format!("{}: {c:?}", NAMES[which]);
            worst[which].see(&ours[which], exact, &plain[which], types[which], what);
        }
        (q0, k0) = (q0 + len.seqlen_q, k0 + len.seqlen_k);
    }
    bias_sums.judge(c, &got.d_bias);
    judge_sinks(c, &got.d_sinks, &sinks_exact, &sinks_plain);
    for (which, worst) in worst.iter().enumerate() {
        worst.judge(unit([c.q_dtype, c.kv_dtype, c.kv_dtype][which]), NAMES[which], c);
    }
}

/// What the gradient of a bias should be, element by element, and the sizes of the terms of each sum.
struct BiasSums {
    exact: Vec<f64>,
    plain: Vec<f32>,
    size: Vec<f32>,
    reached: Vec<bool>,
}

impl BiasSums {
    fn new(n: usize) -> BiasSums {
        BiasSums { exact: vec![0.0; n], plain: vec![0.0; n], size: vec![0.0; n], reached: vec![false; n] }
    }

    /// Adds the exact gradients of a sequence, dense by head, row and key.
    fn expect(
        &mut self,
        c: &Case,
        len: SeqLen,
        exact: &[f64],
        place: &impl Fn(usize, usize, usize) -> usize,
    ) {
        for (at, d) in exact.iter().enumerate().filter(|_| c.scores.bias) {
            let row = at / len.seqlen_k;
            let at = place(row / len.seqlen_q, row % len.seqlen_q, at % len.seqlen_k);
            self.exact[at] += d;
            self.reached[at] = true;
        }
    }

    /// The rule, over all elements; elements beside the lengths are as they were.
    fn judge(&self, c: &Case, got: &[f32]) {
        let (mut error, mut plain, mut size) = (0.0f64, 0.0f64, 0.0f64);
        for (at, &g) in got.iter().enumerate() {
            if !self.reached[at] {
                assert_eq!(g, CANARY, "d_bias at {at} written: {c:?}");
                continue;
            }
            let r = self.exact[at];
            assert_eq!(g.is_finite(), r.is_finite(), "d_bias at {at}: {g} for {r}: {c:?}");
            if r.is_finite() {
                error = error.max((f64::from(g) - r).abs());
                plain = plain.max((f64::from(self.plain[at]) - r).abs());
                size = size.max(f64::from(self.size[at]));
            }
        }
        let bound = 2.0 * plain + 2f64.powi(-23) * size;
        assert!(error <= bound, "d_bias error {error:.3e} > {bound:.3e} (plain {plain:.3e}): {c:?}");
    }
}

/// The rule for gradients of sinks, worst of all heads. Each is one long sum that may cancel: the rounding is one of its terms' sizes.
fn judge_sinks(c: &Case, got: &[f32], exact: &[f64], plain: &[(f32, f32)]) {
    let (mut error, mut bound) = (0.0f64, 0.0f64);
    for ((g, r), (p, size)) in got.iter().zip(exact).zip(plain) {
        assert_eq!(g.is_finite(), r.is_finite(), "d_sinks: {g} for {r}: {c:?}");
        if r.is_finite() {
            error = error.max((f64::from(*g) - r).abs());
            bound = bound.max(2.0 * (f64::from(*p) - r).abs() + 2f64.powi(-23) * f64::from(*size));
        }
    }
    assert!(error <= bound, "d_sinks error {error:.3e} > {bound:.3e}: {c:?}");
}

const NAMES: [&str; 3] = ["dq", "dk", "dv"];
