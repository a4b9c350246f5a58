//! A problem with its data: built from a seed, run on any machine, judged against the f64 oracle and plain f32 attention.
#![allow(dead_code)] // each test binary uses a part

pub mod backward;
pub mod beside;
pub mod random;
pub mod stored;

use std::num::NonZeroUsize;

use rayon::ThreadPool;
use suanpan_attn::reference::{self, Spec};
use suanpan_attn::{
    Args, BlockShape, Isa, KvLayout, Limits, Machine, Plan, Problem, Scores, Strides, Workspace, run,
};
use suanpan_base::{DType, HeadShape, Mask, ScaleGrain, SeqLen};
use suanpan_ledger::AttnBooks;

use beside::{Beside, Pairs};
pub use stored::{Flat, on_grid};
use stored::{ScaleLayout, scale_of};

/// Everything that decides a run; prints as one line that reproduces it.
#[derive(Clone, Debug)]
pub struct Case {
    pub heads: HeadShape,
    pub mask: Mask,
    pub tree: bool,
    pub block_mask: Option<BlockShape>,
    pub scores: Scores,
    /// Which of sequence, head, row and key a bias is broadcast over.
    pub broadcast: [bool; 4],
    pub scale: Option<f32>,
    pub q_dtype: DType,
    pub kv_dtype: DType,
    pub kv_scales: ScaleGrain,
    pub page_size: Option<usize>,
    pub batch_invariant: bool,
    pub seqs: Vec<SeqLen>,
    pub seed: u64,
}

impl Case {
    pub fn new(heads: HeadShape, mask: Mask, seqs: &[(usize, usize)]) -> Case {
        Case {
            heads,
            mask,
            tree: false,
            block_mask: None,
            scores: Scores::default(),
            broadcast: [false; 4],
            scale: None,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
            kv_scales: ScaleGrain::None,
            page_size: None,
            batch_invariant: false,
            seqs: seqs.iter().map(|&(q, k)| SeqLen::new(q, k)).collect(),
            seed: 1,
        }
    }
    pub fn dtypes(self, q: DType, kv: DType) -> Case {
        Case { q_dtype: q, kv_dtype: kv, ..self }
    }
    pub fn scaled(self, kv_scales: ScaleGrain) -> Case {
        Case { kv_scales, ..self }
    }
    pub fn paged(self, page_size: usize) -> Case {
        Case { page_size: Some(page_size), ..self }
    }
    pub fn scale(self, scale: f32) -> Case {
        Case { scale: Some(scale), ..self }
    }
    pub fn scores(self, scores: Scores) -> Case {
        Case { scores, ..self }
    }
    /// Block masks of `rows` query tokens x `keys` keys.
    pub fn blocks(self, rows: usize, keys: usize) -> Case {
        let shape = |n| NonZeroUsize::new(n).unwrap();
        Case { block_mask: Some(BlockShape { rows: shape(rows), keys: shape(keys) }), ..self }
    }
    /// Bits decide what rows see.
    pub fn by_bits(&self) -> bool {
        self.tree || self.block_mask.is_some()
    }
    /// Slopes that differ by head, as ALiBi's do, and one head without. Gentler ones where bits may hide every near key: what is left of
    /// scores of hundreds are their own roundings, in any f32 arithmetic.
    pub fn slopes(&self) -> Vec<f32> {
        let gentle = if self.by_bits() { 5 } else { 1 };
        let slope = |h: usize| if h == 3 { 0.0 } else { 0.5f32.powi(h as i32 % 9 + gentle) };
        (0..self.heads.num_q_heads).map(slope).collect()
    }
    /// Sinks of all sizes, none at all among them.
    pub fn sinks(&self) -> Vec<f32> {
        let some = [0.75, -2.0, 6.5, f32::NEG_INFINITY, -90.0];
        (0..self.heads.num_q_heads).map(|h| some[h % some.len()]).collect()
    }
    pub fn total_q(&self) -> usize {
        self.seqs.iter().map(|s| s.seqlen_q).sum()
    }
    pub fn total_k(&self) -> usize {
        self.seqs.iter().map(|s| s.seqlen_k).sum()
    }
    pub fn problem(&self) -> Problem {
        Problem {
            heads: self.heads,
            mask: self.mask,
            tree: self.tree,
            block_mask: self.block_mask,
            scores: self.scores,
            softmax_scale: self.scale,
            q_dtype: self.q_dtype,
            kv_dtype: self.kv_dtype,
            kv_scales: self.kv_scales,
            kv_scale_dtype: stored::scale_dtype(self),
            batch_invariant: self.batch_invariant,
            kv: self.page_size.map_or(KvLayout::Contiguous, |page_size| KvLayout::Paged { page_size }),
        }
    }
    pub fn limits(&self) -> Limits {
        Limits {
            max_seqs: self.seqs.len(),
            max_total_q: self.total_q(),
            max_seqlen_k: self.seqs.iter().map(|s| s.seqlen_k).max().unwrap_or(0),
        }
    }
    pub fn plan(&self, machine: &Machine) -> Plan {
        let mut plan = Plan::new(&self.problem(), machine, self.limits()).unwrap();
        plan.schedule(&self.seqs).unwrap();
        plan
    }
}

pub fn rng(seed: u64) -> impl FnMut() -> u64 {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}

/// Roughly normal numbers, on the grid of `dtype`.
pub fn normal(n: usize, seed: u64, dtype: DType) -> Vec<f32> {
    let mut next = rng(seed);
    let mut uniform = || (next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    (0..n).map(|_| on_grid((uniform() + uniform() + uniform() + uniform()) * 1.73, dtype)).collect()
}

/// Logical data: q `[total_q, heads, dqk]`, k `[total_k, kv_heads, dqk]`, v `[total_k, kv_heads, dv]`.
#[derive(Clone)]
pub struct Data {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl Data {
    pub fn random(c: &Case) -> Data {
        let h = c.heads;
        // Codes times scales of few bits: exact in f32.
        let stored = |side: usize, width: usize| {
            let n = c.total_k() * h.num_kv_heads * width;
            let mut x = normal(n, c.seed * 3 + 2 + side as u64, DType::F32).into_iter();
            let rows = c.seqs.iter().enumerate().flat_map(|(i, s)| (0..s.seqlen_k).map(move |key| (i, key)));
            let rows = rows.flat_map(|(i, key)| (0..h.num_kv_heads).map(move |head| (i, key, head)));
            let scales = rows.map(|(i, key, head)| scale_of(c, side, i, key, head));
            let mut all = Vec::with_capacity(n);
            for scale in scales {
                all.extend(x.by_ref().take(width).map(|x| on_grid(x / scale, c.kv_dtype) * scale));
            }
            all
        };
        let k = stored(0, h.head_dim_qk);
        let v = match h.values_in_keys {
            true => k.chunks(h.head_dim_qk).flat_map(|key| &key[..h.head_dim_v]).copied().collect(),
            false => stored(1, h.head_dim_v),
        };
        let q = normal(c.total_q() * h.num_q_heads * h.head_dim_qk, c.seed * 3 + 1, c.q_dtype);
        Data { q, k, v }
    }
}

/// Physical buffers with every unused place poisoned.
pub struct Layout {
    pub k: Flat,
    pub v: Flat,
    pub k_strides: Strides,
    pub v_strides: Strides,
    pub table: Vec<u32>,
    pub table_stride: usize,
    pub scales: ScaleLayout,
}

pub const POISONS: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// Lays K and V out: contiguous with padded token strides, or in shuffled pages; all padding is `poison`, unused ids u32::MAX.
pub fn lay_out(c: &Case, data: &Data, poison: f32) -> Layout {
    match c.page_size {
        None => contiguous(c, data, poison),
        Some(p) => paged(c, data, poison, p),
    }
}

fn contiguous(c: &Case, data: &Data, poison: f32) -> Layout {
    let h = c.heads;
    let place = |x: &[f32], side: usize, width: usize| {
        // Rows of int4 start at bytes.
        let pad = if c.kv_dtype == DType::I4 { 4 } else { 3 };
        let strides = Strides { token: h.num_kv_heads * (width + pad) + pad + 2, head: width + pad, page: 0 };
        let mut flat = Flat::filled(c.total_k() * strides.token + 7, poison, c.kv_dtype);
        let keys = c.seqs.iter().enumerate().flat_map(|(i, s)| (0..s.seqlen_k).map(move |key| (i, key)));
        for (t, (seq, key)) in keys.enumerate() {
            for head in 0..h.num_kv_heads {
                let scale = scale_of(c, side, seq, key, head);
                for i in 0..width {
                    let at = t * strides.token + head * strides.head + i;
                    flat.set(at, x[(t * h.num_kv_heads + head) * width + i] / scale);
                }
            }
        }
        (flat, strides)
    };
    let (k, k_strides) = place(&data.k, 0, h.head_dim_qk);
    let (v, v_strides) = place(&data.v, 1, h.head_dim_v);
    let v = if h.values_in_keys { Flat::filled(0, 0.0, c.kv_dtype) } else { v };
    let scales = ScaleLayout::contiguous(c, poison);
    Layout { k, v, k_strides, v_strides, table: Vec::new(), table_stride: 0, scales }
}

fn paged(c: &Case, data: &Data, poison: f32, page_size: usize) -> Layout {
    let h = c.heads;
    let pages: usize = c.seqs.iter().map(|s| s.seqlen_k.div_ceil(page_size)).sum();
    let table_stride = c.seqs.iter().map(|s| s.seqlen_k.div_ceil(page_size)).max().unwrap_or(0) + 2;
    // A permutation by a step coprime with the count; one page in three stays unused.
    let num_pages = (pages * 3 / 2 + 1).next_power_of_two();
    let mut table = vec![u32::MAX; c.seqs.len() * table_stride];
    let strides = |width: usize| Strides {
        token: width,
        head: page_size * width,
        page: h.num_kv_heads * page_size * width + 4,
    };
    let (ks, vs) = (strides(h.head_dim_qk), strides(h.head_dim_v));
    let mut k = Flat::filled(num_pages * ks.page, poison, c.kv_dtype);
    let mut v = Flat::filled(num_pages * vs.page, poison, c.kv_dtype);
    let mut scales = ScaleLayout::paged(c, poison, num_pages, page_size);
    let (mut next, mut first) = (0usize, 0);
    for (i, s) in c.seqs.iter().enumerate() {
        let hull = c.mask.visible_hull(*s, 0..s.seqlen_q);
        for page in 0..s.seqlen_k.div_ceil(page_size) {
            let id = (next * 5 + 3) % num_pages;
            next += 1;
            let keys = page * page_size..((page + 1) * page_size).min(s.seqlen_k);
            if !keys.clone().any(|key| hull.contains(key)) {
                continue; // Never visible: the id stays hostile and the bytes poison.
            }
            table[i * table_stride + page] = id as u32;
            for key in keys.filter(|&key| hull.contains(key)) {
                for head in 0..h.num_kv_heads {
                    let row = (first + key) * h.num_kv_heads + head;
                    let slot = key % page_size;
                    let (k_scale, v_scale) = (scale_of(c, 0, i, key, head), scale_of(c, 1, i, key, head));
                    scales.set(c, id, slot, head, (k_scale, v_scale));
                    for j in 0..h.head_dim_qk {
                        let at = id * ks.page + head * ks.head + slot * ks.token + j;
                        k.set(at, data.k[row * h.head_dim_qk + j] / k_scale);
                    }
                    for j in 0..h.head_dim_v {
                        v.set(
                            id * vs.page + head * vs.head + slot * vs.token + j,
                            data.v[row * h.head_dim_v + j] / v_scale,
                        );
                    }
                }
            }
        }
        first += s.seqlen_k;
    }
    let v = if h.values_in_keys { Flat::filled(0, 0.0, c.kv_dtype) } else { v };
    Layout { k, v, k_strides: ks, v_strides: vs, table, table_stride, scales }
}

/// Result: out `[total_q, heads, dv]`, lse `[heads, total_q]`, the largest score a head, books a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub max_scores: Vec<f32>,
    pub books: Vec<AttnBooks>,
}

pub fn pool(threads: usize) -> ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Runs a case; checks canaries around the output, that all rows were written, and that predicted = counted.
pub fn run_case(c: &Case, data: &Data, machine: &Machine, poison: f32) -> Outcome {
    let h = c.heads;
    let layout = lay_out(c, data, poison);
    let plan = c.plan(machine);
    let mut ws = Workspace::for_plans(&[&plan]);
    let q = Flat::of(&data.q, c.q_dtype);
    const CANARY: f32 = -77.0;
    let row = h.head_dim_v + 1;
    let out_strides = (h.num_q_heads * row + 2, row);
    let mut out = Flat::filled(c.total_q() * out_strides.0 + 3, CANARY, c.q_dtype);
    let mut lse = vec![f32::NAN; h.num_q_heads * c.total_q()];
    let mut books = vec![AttnBooks::default(); c.seqs.len()];
    let beside = Beside::of(c);
    let extras = beside.extras(c);
    let mut max_scores = vec![f32::NAN; h.num_q_heads];
    let args = Args {
        extras,
        kv_scales: layout.scales.args(),
        q: q.buf(),
        q_strides: (h.num_q_heads * h.head_dim_qk, h.head_dim_qk),
        k: layout.k.buf(),
        k_strides: layout.k_strides,
        v: layout.v.buf(),
        v_strides: layout.v_strides,
        page_table: &layout.table,
        page_table_stride: layout.table_stride,
        out: out.buf_mut(),
        out_strides,
        lse: Some(&mut lse),
        max_scores: Some(&mut max_scores),
    };
    run(&plan, args, &mut ws, &mut books).unwrap_or_else(|e| panic!("{e}: {c:?}"));
    for (i, (len, book)) in c.seqs.iter().zip(&books).enumerate() {
        let predicted = if c.by_bits() { plan.predicted_with(i, &extras) } else { plan.predicted(*len) };
        assert_eq!(*book, predicted, "books of sequence {i}: {c:?} {plan}");
    }
    let flat = out.to_f32();
    let mut dense = Vec::new();
    let mut used = vec![false; flat.len()];
    for t in 0..c.total_q() {
        for head in 0..h.num_q_heads {
            let at = t * out_strides.0 + head * row;
            dense.extend_from_slice(&flat[at..at + h.head_dim_v]);
            used[at..at + h.head_dim_v].fill(true);
        }
    }
    assert!(flat.iter().zip(&used).all(|(x, u)| *u || *x == CANARY), "canary overwritten: {c:?}");
    Outcome { out: dense, lse, max_scores, books }
}

pub fn machine(threads: usize) -> Machine {
    Machine::detect(threads)
}

/// Every instruction set that is available, with each kind of dot products beside it and without.
pub fn machines() -> Vec<Machine> {
    let mut all: Vec<Machine> = Isa::ALL.into_iter().filter_map(|i| Machine::forced(i, 1).ok()).collect();
    for machine in all.clone() {
        for less in [machine.without_integer_dots(), machine.without_bf16_dots()] {
            if !all.contains(&less) {
                all.push(less);
            }
        }
    }
    all
}

/// Plain attention of one row in f32: scores, max, exp, sum, weighted sum, one after another. Returns lse and the size of the largest score.
#[rustfmt::skip]
fn plain_row_f32(c: &Case, spec: &Spec<'_>, len: SeqLen, i: usize, h: usize, q: &[f32], k: &[f32], v: &[f32], o: &mut [f32]) -> (f32, f32) {
    let (heads, kv_head) = (c.heads, h / c.heads.group_size());
    let scale = c.problem().scale();
    let q = &q[(i * heads.num_q_heads + h) * heads.head_dim_qk..][..heads.head_dim_qk];
    let keys = spec.keys(len, i, h);
    let sink = if c.scores.sink { c.sinks()[h] } else { f32::NEG_INFINITY };
    o.fill(0.0);
    let s: Vec<f32> = keys.iter().map(|&j| {
        let k = &k[(j * heads.num_kv_heads + kv_head) * heads.head_dim_qk..][..heads.head_dim_qk];
        let mut s = q.iter().zip(k).map(|(a, b)| a * b).sum::<f32>() * scale;
        if let Some(cap) = c.scores.softcap.filter(|&cap| cap > 0.0) {
            s = cap * (s / cap).tanh();
        }
        if let Some(bias) = spec.bias {
            s += bias(h, i, j) as f32;
        }
        if c.scores.alibi {
            s -= c.slopes()[h] * (c.mask.centre(len, i) - j as i64).abs() as f32;
        }
        s
    }).collect();
    if s.iter().all(|&s| s == f32::NEG_INFINITY) {
        return (sink, 0.0);
    }
    let max = s.iter().copied().fold(sink, f32::max);
    let sum: f32 = s.iter().map(|s| (s - max).exp()).sum::<f32>() + (sink - max).exp();
    for (&j, s) in keys.iter().zip(&s) {
        let p = (s - max).exp() / sum * spec.dropout.map_or(1.0, |kept| kept(h, i, j)) as f32;
        let v = &v[(j * heads.num_kv_heads + kv_head) * heads.head_dim_v..][..heads.head_dim_v];
        o.iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
    }
    let size = s.iter().filter(|s| s.is_finite()).fold(0.0f32, |size, s| size.max(s.abs()));
    (max + sum.ln(), size)
}

/// One rounding.
pub fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-23),
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-8),
    }
}

/// Whether scores are worked on after they were rounded once: then the rule takes one more rounding of the largest score, by which any
/// weight may move.
pub fn bends(scores: &Scores) -> bool {
    scores.softcap.is_some_and(|cap| cap > 0.0) || scores.bias || scores.alibi
}

/// The rule: non-finite places agree first; then error <= 2x plain attention's error in the same precision + one rounding.
pub fn judge(c: &Case, data: &Data, got: &Outcome) {
    let h = c.heads;
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (q64, k64, v64) = (wide(&data.q), wide(&data.k), wide(&data.v));
    let (mut q0, mut k0) = (0, 0);
    let beside = Beside::of(c);
    let mut out = Worst::default();
    let mut scores = 0.0f64;
    let (mut lse_ours, mut lse_plain, mut lse_top) = (0.0f64, 0.0f64, 1.0f64);
    for (seq, len) in c.seqs.iter().enumerate() {
        let pairs = Pairs { c, beside: &beside, seq };
        let of = pairs.functions();
        let spec = pairs.spec(&of);
        let (qa, ka, va) = (
            q0 * h.num_q_heads * h.head_dim_qk,
            k0 * h.num_kv_heads * h.head_dim_qk,
            k0 * h.num_kv_heads * h.head_dim_v,
        );
        for i in sample(len.seqlen_q) {
            for head in 0..h.num_q_heads {
                let mut o64 = vec![0.0; h.head_dim_v];
                let mut o32 = vec![0.0; h.head_dim_v];
                #[rustfmt::skip]
                let l64 = reference::attention_row_f64(&spec, *len, i, head, &q64[qa..], &k64[ka..], &v64[va..], &mut o64);
                let (l32, score) = plain_row_f32(
                    c,
                    &spec,
                    *len,
                    i,
                    head,
                    &data.q[qa..],
                    &data.k[ka..],
                    &data.v[va..],
                    &mut o32,
                );
                scores = scores.max(f64::from(score));
                let at = ((q0 + i) * h.num_q_heads + head) * h.head_dim_v;
                let row = &got.out[at..at + h.head_dim_v];
                out.see(row, &o64, &o32, c.q_dtype, || format!("row {i} head {head}: {c:?}"));
                let l = got.lse[head * c.total_q() + q0 + i];
                assert_eq!(
                    l.is_finite(),
                    l64.is_finite(),
                    "lse of row {i} head {head}: {l} for {l64}: {c:?}"
                );
                if l64.is_finite() {
                    lse_ours = lse_ours.max((f64::from(l) - l64).abs());
                    lse_plain = lse_plain.max((f64::from(l32) - l64).abs());
                    lse_top = lse_top.max(l64.abs());
                } else {
                    assert_eq!(l.is_nan(), l64.is_nan(), "lse of row {i} head {head}: {l} for {l64}: {c:?}");
                }
            }
        }
        (q0, k0) = (q0 + len.seqlen_q, k0 + len.seqlen_k);
    }
    let bent = if bends(&c.scores) { 2f64.powi(-24) * scores } else { 0.0 };
    out.judge(unit(c.q_dtype) + bent, "out", c);
    let bound = 2.0 * lse_plain + unit(DType::F32) * lse_top + bent;
    assert!(lse_ours <= bound, "lse error {lse_ours:.3e} > {bound:.3e} (plain {lse_plain:.3e}): {c:?}");
}

/// The largest errors of a result and of plain attention, and its largest number.
#[derive(Clone, Copy, Default)]
pub struct Worst {
    ours: f64,
    plain: f64,
    top: f64,
}

impl Worst {
    /// Looks at a run of numbers: got, exact, and plain attention's, which are rounded to `dtype`.
    pub fn see(
        &mut self,
        got: &[f32],
        exact: &[f64],
        plain: &[f32],
        dtype: DType,
        what: impl Fn() -> String,
    ) {
        for (at, (&g, &r)) in got.iter().zip(exact).enumerate() {
            assert_eq!(g.is_finite(), r.is_finite(), "at {at}: {g} for {r}: {}", what());
            if r.is_finite() {
                self.ours = self.ours.max((f64::from(g) - r).abs());
                self.plain = self.plain.max((f64::from(on_grid(plain[at], dtype)) - r).abs());
                self.top = self.top.max(r.abs());
            }
        }
    }

    /// The rule.
    pub fn judge(&self, rounding: f64, name: &str, c: &Case) {
        let bound = 2.0 * self.plain + rounding * self.top;
        let Worst { ours, plain, .. } = self;
        assert!(*ours <= bound, "{name} error {ours:.3e} > {bound:.3e} (plain {plain:.3e}): {c:?}");
    }
}

/// All rows of a short sequence, edges and a spread of a long one.
fn sample(rows: usize) -> Vec<usize> {
    if rows <= 24 {
        return (0..rows).collect();
    }
    let mut at: Vec<usize> = (0..5).chain((5..rows - 5).step_by(rows / 8)).chain(rows - 5..rows).collect();
    at.dedup();
    at
}
