//! Attention's backward alone, timed: one shape a process, its answer checked against the oracle on sampled rows and keys first.
//!
//! usage: backward_vs DTYPE HEAD_DIM LENGTH full|causal [HEADS [KV_HEADS [THREADS]]]
//! Prints the shape as one JSON line, then runs once for each line of standard input and prints milliseconds: a script that times a peer
//! in between compares both in the same minute (bench/attn_backward_vs_torch.py). FLOPs come from `ledger`.

use std::io::{BufRead, Write};
use std::time::Instant;

use half::bf16;
use suanpan_attn::reference::{Spec, attention_backward_f64};
use suanpan_attn::{
    Args, BackwardArgs, BackwardPlan, BackwardWorkspace, Extras, KvScales, Limits, Machine, Plan, Problem,
    Strides, Workspace, run, run_backward,
};
use suanpan_base::{Buf, BufMut, DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::{AttnBooks, BackwardBooks};

enum Flat {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Flat {
    /// Numbers with a spread like normalised activations, on the grid of bf16.
    fn numbers(n: usize, seed: u64, dtype: DType) -> Flat {
        let mut x = seed | 1;
        let mut uniform = move || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        let x = (0..n).map(|_| bf16::from_f32((uniform() + uniform() + uniform()) * 2.0));
        match dtype {
            DType::F32 => Flat::F32(x.map(|x| x.to_f32()).collect()),
            _ => Flat::Bf16(x.collect()),
        }
    }

    fn nan(n: usize, dtype: DType) -> Flat {
        match dtype {
            DType::F32 => Flat::F32(vec![f32::NAN; n]),
            _ => Flat::Bf16(vec![bf16::NAN; n]),
        }
    }

    fn buf(&self) -> Buf<'_> {
        match self {
            Flat::F32(x) => Buf::F32(x),
            Flat::Bf16(x) => Buf::Bf16(x),
        }
    }

    fn buf_mut(&mut self) -> BufMut<'_> {
        match self {
            Flat::F32(x) => BufMut::F32(x),
            Flat::Bf16(x) => BufMut::Bf16(x),
        }
    }

    /// Head `head` of `[heads, length, d]`, widened.
    fn head(&self, head: usize, length: usize, d: usize) -> Vec<f64> {
        (head * length * d..(head + 1) * length * d).map(|i| f64::from(self.buf().get(i))).collect()
    }
}

/// One shape with its buffers, laid out `[heads, length, d]` as PyTorch does.
struct Subject {
    problem: Problem,
    length: usize,
    plan: BackwardPlan,
    ws: BackwardWorkspace,
    q: Flat,
    k: Flat,
    v: Flat,
    out: Flat,
    lse: Vec<f32>,
    d_out: Flat,
    dq: Flat,
    dk: Flat,
    dv: Flat,
}

impl Subject {
    /// Makes the inputs and runs the forward.
    fn new(problem: Problem, length: usize, threads: usize) -> Subject {
        let (h, dtype, d) = (problem.heads, problem.q_dtype, problem.heads.head_dim_qk);
        let len = SeqLen::new(length, length);
        let limits = Limits { max_seqs: 1, max_total_q: length, max_seqlen_k: length };
        let machine = Machine::detect(threads);
        let mut forward = Plan::new(&problem, &machine, limits).expect("a supported shape");
        let mut plan = BackwardPlan::new(&problem, &machine, limits).expect("a supported shape");
        forward.schedule(&[len]).expect("within the limits");
        plan.schedule(&[len]).expect("within the limits");
        let (rows, keys) = (length * h.num_q_heads, length * h.num_kv_heads);
        let mut s = Subject {
            problem,
            length,
            ws: BackwardWorkspace::for_plans(&[&plan]),
            plan,
            q: Flat::numbers(rows * d, 1, dtype),
            k: Flat::numbers(keys * d, 2, dtype),
            v: Flat::numbers(keys * d, 3, dtype),
            out: Flat::nan(rows * d, dtype),
            lse: vec![f32::NAN; rows],
            d_out: Flat::numbers(rows * d, 4, dtype),
            dq: Flat::nan(rows * d, dtype),
            dk: Flat::nan(keys * d, dtype),
            dv: Flat::nan(keys * d, dtype),
        };
        let strides = Strides { token: d, head: length * d, page: 0 };
        let args = Args {
            kv_scales: KvScales::default(),
            extras: Extras::default(),
            q: s.q.buf(),
            q_strides: (d, length * d),
            k: s.k.buf(),
            k_strides: strides,
            v: s.v.buf(),
            v_strides: strides,
            page_table: &[],
            page_table_stride: 0,
            out: s.out.buf_mut(),
            out_strides: (d, length * d),
            lse: Some(&mut s.lse),
            max_scores: None,
        };
        let mut ws = Workspace::for_plans(&[&forward]);
        run(&forward, args, &mut ws, &mut [AttnBooks::default()]).expect("a valid call");
        s
    }

    fn call(&mut self) -> BackwardBooks {
        let strides = (self.problem.heads.head_dim_qk, self.length * self.problem.heads.head_dim_qk);
        let mut books = BackwardBooks::default();
        let args = BackwardArgs {
            extras: Extras::default(),
            d_sinks: None,
            d_bias: None,
            q: self.q.buf(),
            q_strides: strides,
            k: self.k.buf(),
            k_strides: strides.into(),
            v: self.v.buf(),
            v_strides: strides.into(),
            page_table: &[],
            page_table_stride: 0,
            out: self.out.buf(),
            out_strides: strides,
            lse: &self.lse,
            d_out: self.d_out.buf(),
            d_out_strides: strides,
            d_lse: None,
            dq: self.dq.buf_mut(),
            dq_strides: strides,
            dk: self.dk.buf_mut(),
            dk_strides: strides.into(),
            dv: self.dv.buf_mut(),
            dv_strides: strides.into(),
        };
        run_backward(&self.plan, args, &mut self.ws, std::slice::from_mut(&mut books)).expect("a valid call");
        books
    }

    /// Largest error of a few rows of dq and a few keys of dk and dv, as a share of their largest value.
    fn error(&self) -> f64 {
        let (h, n, d) = (self.problem.heads, self.length, self.problem.heads.head_dim_qk);
        let (mask, scale, len) = (self.problem.mask, f64::from(self.problem.scale()), SeqLen::new(n, n));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut worst = [(0.0f64, 0.0f64); 3];
        let mut see = |which: usize, got: &[f64], want: &[f64]| {
            for (g, r) in got.iter().zip(want) {
                let e = (g - r).abs();
                // A NaN must not pass for a small error.
                worst[which].0 = if e.is_nan() { f64::INFINITY } else { worst[which].0.max(e) };
                worst[which].1 = worst[which].1.max(r.abs());
            }
        };
        for kv_head in [0, h.num_kv_heads - 1] {
            let (k, v) = (self.k.head(kv_head, n, d), self.v.head(kv_head, n, d));
            let keys = [0, n / 3, n - 1];
            let mut dk = vec![vec![0.0; d]; keys.len()];
            let mut dv = dk.clone();
            for head in kv_head * h.group_size()..(kv_head + 1) * h.group_size() {
                let (q, d_out) = (self.q.head(head, n, d), self.d_out.head(head, n, d));
                let dq = self.dq.head(head, n, d);
                // Exact rows of dq; of all rows only lse and out, which the forward gives.
                for i in [0, n / 2, n - 1] {
                    let row = |x: &[f64]| x[i * d..(i + 1) * d].to_vec();
                    let len = SeqLen::new(1, mask.visible(len, i).len());
                    let one = HeadShape::new(1, 1, d);
                    let spec = Spec::new(one, Mask::FULL, scale);
                    let exact = attention_backward_f64(&spec, len, &row(&q), &k, &v, &row(&d_out), None);
                    see(0, &row(&dq), &exact.dq);
                }
                let out = self.out.head(head, n, d);
                for i in 0..n {
                    let row = |x: &[f64]| x[i * d..(i + 1) * d].to_vec();
                    let (q, d_out) = (row(&q), row(&d_out));
                    let delta = dot(&row(&out), &d_out);
                    for (at, &j) in
                        keys.iter().enumerate().filter(|(_, j)| mask.visible(len, i).contains(**j))
                    {
                        let p = (scale * dot(&q, &k[j * d..][..d]) - f64::from(self.lse[head * n + i])).exp();
                        let ds = scale * p * (dot(&d_out, &v[j * d..][..d]) - delta);
                        for x in 0..d {
                            dk[at][x] += ds * q[x];
                            dv[at][x] += p * d_out[x];
                        }
                    }
                }
            }
            let (got_k, got_v) = (self.dk.head(kv_head, n, d), self.dv.head(kv_head, n, d));
            for (at, j) in keys.into_iter().enumerate() {
                see(1, &got_k[j * d..][..d], &dk[at]);
                see(2, &got_v[j * d..][..d], &dv[at]);
            }
        }
        worst.iter().map(|(error, top)| error / top).fold(0.0, f64::max)
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| words.get(at).map_or(default, |w| w.parse().expect("a number"));
    let dtype: DType = words.first().map_or("f32", String::as_str).parse().expect("an element type");
    let (d, length) = (number(1, 128), number(2, 1024));
    let causal = words.get(3).is_some_and(|m| m == "causal");
    let heads = number(4, 8);
    let (kv_heads, threads) = (number(5, heads), number(6, 2));
    let mask = if causal { Mask::CAUSAL } else { Mask::FULL };
    let problem =
        Problem { q_dtype: dtype, kv_dtype: dtype, ..Problem::new(HeadShape::new(heads, kv_heads, d), mask) };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
    pool.install(|| {
        let mut subject = Subject::new(problem, length, threads);
        let books = subject.call();
        let error = subject.error();
        assert!(error < if dtype == DType::F32 { 2e-5 } else { 2e-2 }, "the answer is wrong: {error:e}");
        println!(
            r#"{{"phase": "backward", "isa": "{}", "threads": {threads}, "dtype": "{dtype}", "num_q_heads": {heads}, "num_kv_heads": {kv_heads}, "head_dim": {d}, "mask": "{}", "seqlen": {length}, "flops": {}, "workspace_bytes": {}, "error": {error:.2e}}}"#,
            Machine::detect(threads).isa().name(),
            problem.mask,
            books.flops,
            subject.ws.bytes(),
        );
        for line in std::io::stdin().lock().lines() {
            line.expect("standard input");
            let start = Instant::now();
            subject.call();
            println!("{:.4}", start.elapsed().as_secs_f64() * 1e3);
            std::io::stdout().flush().expect("standard output");
        }
    });
}
