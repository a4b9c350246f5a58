//! What a feature costs or saves: two problems on the same data, timed in turn, and the ratio of their medians.
//!
//! usage: cargo run --release -p suanpan-attn --example ratios [REPEATS [ROW]]      rows whose name contains ROW only
//!
//! A machine that others use changes its speed in phases; both sides of a row go through the same ones. `share` is the ratio over what the
//! books expect of it (visible pairs in prefill, bytes of K and V in decode): 1.00 = the feature itself costs nothing.

use std::time::Instant;

use suanpan_attn::{
    Args, Bias, BiasStrides, DropoutKey, Extras, KvScales, Limits, Machine, Plan, Problem, Scores, Strides,
    Workspace, run,
};
use suanpan_base::{Buf, BufMut, DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::AttnBooks;

/// One problem with its data, ready to run.
struct Subject {
    plan: Plan,
    ws: Workspace,
    q: Vec<f32>,
    kv: Vec<half::bf16>,
    wide: Vec<f32>,
    bias: Vec<f32>,
    out: Vec<f32>,
}

impl Subject {
    fn new(problem: Problem, len: SeqLen, machine: &Machine) -> Subject {
        let limits = Limits { max_seqs: 1, max_total_q: len.seqlen_q, max_seqlen_k: len.seqlen_k };
        let mut plan = Plan::new(&problem, machine, limits).expect("a supported problem");
        plan.schedule(&[len]).expect("within the limits");
        let ws = Workspace::for_plans(&[&plan]);
        let h = problem.heads;
        let rows = len.seqlen_q * h.num_q_heads;
        let kv = len.seqlen_k * h.num_kv_heads * h.kv_width();
        let mut x = 1u32;
        let mut next = move || {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            x as f32 / u32::MAX as f32 - 0.5
        };
        let narrow = problem.kv_dtype == DType::Bf16;
        let mut subject = Subject {
            plan,
            ws,
            q: (0..rows * h.head_dim_qk).map(|_| next()).collect(),
            kv: (0..if narrow { kv } else { 0 }).map(|_| half::bf16::from_f32(next())).collect(),
            wide: (0..if narrow { 0 } else { kv }).map(|_| next()).collect(),
            bias: (0..if problem.scores.bias { len.seqlen_k } else { 0 }).map(|_| next()).collect(),
            out: vec![0.0; rows * h.head_dim_v],
        };
        subject.call();
        subject
    }

    /// One call; returns its books.
    fn call(&mut self) -> AttnBooks {
        let problem = *self.plan.problem();
        let h = problem.heads;
        let (keys, values) = match problem.kv_dtype {
            DType::Bf16 => {
                let (k, v) = self.kv.split_at(self.kv.len() / h.kv_width() * h.head_dim_qk);
                (Buf::Bf16(k), Buf::Bf16(v))
            }
            _ => {
                let (k, v) = self.wide.split_at(self.wide.len() / h.kv_width() * h.head_dim_qk);
                (Buf::F32(k), Buf::F32(v))
            }
        };
        let strides = |d: usize| Strides { token: h.num_kv_heads * d, head: d, page: 0 };
        let slopes = vec![0.01; h.num_q_heads];
        let bias_strides = BiasStrides { key: 1, ..BiasStrides::default() };
        let extras = Extras {
            alibi_slopes: problem.scores.alibi.then_some(&slopes[..]),
            bias: problem.scores.bias.then_some(Bias { values: &self.bias, strides: bias_strides }),
            dropout: problem.scores.dropout.map(|_| DropoutKey::default()),
            ..Extras::default()
        };
        let args = Args {
            q: Buf::F32(&self.q),
            q_strides: (h.num_q_heads * h.head_dim_qk, h.head_dim_qk),
            k: keys,
            k_strides: strides(h.head_dim_qk),
            v: values,
            v_strides: strides(h.head_dim_v),
            page_table: &[],
            page_table_stride: 0,
            kv_scales: KvScales::default(),
            extras,
            out: BufMut::F32(&mut self.out),
            out_strides: (h.num_q_heads * h.head_dim_v, h.head_dim_v),
            lse: None,
            max_scores: None,
        };
        let mut books = [AttnBooks::default()];
        run(&self.plan, args, &mut self.ws, &mut books).expect("a checked call");
        books[0]
    }

    /// Milliseconds of a call, several together where one is short.
    fn time(&mut self) -> f64 {
        let start = Instant::now();
        let mut calls = 0;
        while calls == 0 || start.elapsed().as_millis() < 40 {
            self.call();
            calls += 1;
        }
        start.elapsed().as_secs_f64() * 1e3 / f64::from(calls)
    }
}

fn median(x: &mut [f64]) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

/// The rows: name, lengths, the plain problem and the other one.
fn rows() -> Vec<(String, SeqLen, Problem, Problem)> {
    let prefill = Problem::new(HeadShape::new(4, 4, 128), Mask::CAUSAL);
    let bf16 = Problem { kv_dtype: DType::Bf16, ..Problem::new(HeadShape::new(8, 2, 128), Mask::CAUSAL) };
    let mut all = Vec::new();
    let mut row = |name: &str, len, plain, other| all.push((name.to_string(), len, plain, other));
    let square = |n: usize| SeqLen::new(n, n);
    for mask in [Mask::window(1024), Mask::streaming(4, 1024)] {
        row(&format!("prefill {mask}"), square(32_768), prefill, Problem { mask, ..prefill });
        row(&format!("decode {mask}"), SeqLen::extend(131_071, 1), bf16, Problem { mask, ..bf16 });
    }
    for n in [2048, 8192] {
        row("prefill batch-invariant", square(n), prefill, Problem { batch_invariant: true, ..prefill });
    }
    for n in [4096, 32_768, 131_072] {
        let other = Problem { batch_invariant: true, ..bf16 };
        row("decode batch-invariant", SeqLen::extend(n - 1, 1), bf16, other);
    }
    // Absorbed latent attention of DeepSeek-V2-Lite and V3, against keys and values stored apart.
    for num_q_heads in [16, 128] {
        let apart = HeadShape::with_widths(num_q_heads, 1, 576, 512);
        let heads = HeadShape { values_in_keys: true, ..apart };
        let plain = Problem { heads: apart, ..bf16 };
        row("decode values in keys", SeqLen::extend(32_767, 1), plain, Problem { heads, ..bf16 });
    }
    let scores = Scores::default();
    for (name, scores) in [
        ("softcap", Scores { softcap: Some(30.0), ..scores }),
        ("ALiBi", Scores { alibi: true, ..scores }),
        ("bias", Scores { bias: true, ..scores }),
        ("dropout", Scores { dropout: Some(0.1), ..scores }),
    ] {
        row(&format!("prefill {name}"), square(4096), prefill, Problem { scores, ..prefill });
        row(&format!("decode {name}"), SeqLen::extend(32_767, 1), bf16, Problem { scores, ..bf16 });
    }
    all
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let repeats = words.first().map_or(7, |w| w.parse().expect("a number of repeats"));
    let wanted = words.get(1).map_or("", String::as_str);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let machine = Machine::detect(threads);
    println!("{machine}; medians of {repeats}, in turn");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
    pool.install(|| {
        for (name, len, plain, other) in rows().into_iter().filter(|row| row.0.contains(wanted)) {
            let (mut a, mut b) = (Subject::new(plain, len, &machine), Subject::new(other, len, &machine));
            let (books_a, books_b) = (a.call(), b.call());
            let expected = if len.seqlen_q == 1 {
                books_b.kv_read_bytes as f64 / books_a.kv_read_bytes as f64
            } else {
                books_b.pairs as f64 / books_a.pairs as f64
            };
            let (mut times_a, mut times_b) = (Vec::new(), Vec::new());
            for _ in 0..repeats {
                times_a.push(a.time());
                times_b.push(b.time());
            }
            let (a, b) = (median(&mut times_a), median(&mut times_b));
            println!(
                "{name:<42} q {:<6} k {:<7} plain {a:>9.3} ms, with it {b:>9.3} ms: speed x{:<6.2} share {:.2}",
                len.seqlen_q,
                len.seqlen_k,
                a / b,
                expected * a / b
            );
        }
    });
}
