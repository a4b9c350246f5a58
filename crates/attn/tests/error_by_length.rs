//! The error against f64 from 1,024 keys to 1,048,576 beside plain attention's in the same precision: at most twice it, and not growing.

mod common;
use common::*;
use suanpan_attn::reference::{self, Spec};
use suanpan_attn::{Args, Extras, KvScales, Limits, Plan, Problem, Strides, Workspace, run};
use suanpan_base::{DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::AttnBooks;

const WIDTH: usize = 64;

/// Scores of four kinds.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Uniform,
    Normal,
    /// One element of a thousand a hundred times as large (as FlashAttention-3's test data, arXiv 2407.08608, section 4.3).
    Outlier,
    /// One key of 64 points where the queries do: a few keys hold nearly all the weight.
    Peaked,
}

const KINDS: [Kind; 4] = [Kind::Uniform, Kind::Normal, Kind::Outlier, Kind::Peaked];

impl Kind {
    fn numbers(self, n: usize, seed: u64, dtype: DType) -> Vec<f32> {
        let mut x = match self {
            Kind::Uniform => {
                let mut next = rng(seed);
                (0..n).map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
            }
            _ => normal(n, seed, DType::F32),
        };
        if let Kind::Outlier = self {
            x.iter_mut().skip(seed as usize % 1000).step_by(1000).for_each(|x| *x *= 100.0);
        }
        x.into_iter().map(|x| on_grid(x, dtype)).collect()
    }

    fn keys(self, n: usize, q: &[f32], dtype: DType) -> Vec<f32> {
        let mut k = self.numbers(n * WIDTH, 2, dtype);
        if let Kind::Peaked = self {
            for key in k.chunks_mut(WIDTH).step_by(64) {
                key.iter_mut().zip(q).for_each(|(k, q)| *k = on_grid(*k + 3.0 * q, dtype));
            }
        }
        k
    }
}

/// Largest errors of ours and of plain attention.
struct Errors {
    ours: f64,
    plain: f64,
    /// One rounding of the largest output.
    rounding: f64,
}

impl Errors {
    /// Ours over plain attention's (or over half a rounding of the largest output, where that is more).
    fn ratio(&self) -> f64 {
        self.ours / self.plain.max(self.rounding / 2.0)
    }

    /// The rule of all oracle tests.
    fn holds(&self) -> bool {
        self.ours <= 2.0 * self.plain + self.rounding
    }
}

/// `rows` queries of one head over `n` keys: up to 12 take the direct kernel, more the packed one.
fn errors(kind: Kind, rows: usize, n: usize, dtype: DType) -> Errors {
    let heads = HeadShape::new(rows, 1, WIDTH);
    let q = kind.numbers(rows * WIDTH, 1, dtype);
    let (k, v) = (kind.keys(n, &q, dtype), kind.numbers(n * WIDTH, 3, dtype));
    let problem = Problem { q_dtype: dtype, kv_dtype: dtype, ..Problem::new(heads, Mask::FULL) };
    let limits = Limits { max_seqs: 1, max_total_q: 1, max_seqlen_k: n };
    let mut plan = Plan::new(&problem, &machine(2), limits).unwrap();
    let len = SeqLen::new(1, n);
    plan.schedule(&[len]).unwrap();
    let [fq, fk, fv] = [&q, &k, &v].map(|x| Flat::of(x, dtype));
    let mut out = Flat::filled(rows * WIDTH, f32::NAN, dtype);
    let strides = Strides { token: WIDTH, head: WIDTH, page: 0 };
    let args = Args {
        kv_scales: KvScales::default(),
        extras: Extras::default(),
        q: fq.buf(),
        q_strides: (rows * WIDTH, WIDTH),
        k: fk.buf(),
        k_strides: strides,
        v: fv.buf(),
        v_strides: strides,
        page_table: &[],
        page_table_stride: 0,
        out: out.buf_mut(),
        out_strides: (rows * WIDTH, WIDTH),
        lse: None,
        max_scores: None,
    };
    run(&plan, args, &mut Workspace::for_plans(&[&plan]), &mut [AttnBooks::default()]).unwrap();
    compare(&problem, &out.to_f32(), (&q, &k, &v), len)
}

fn compare(problem: &Problem, got: &[f32], (q, k, v): (&[f32], &[f32], &[f32]), len: SeqLen) -> Errors {
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (q64, k64, v64) = (wide(q), wide(k), wide(v));
    let (scale, dtype) = (problem.scale(), problem.q_dtype);
    let spec = Spec::new(problem.heads, Mask::FULL, f64::from(scale));
    let (mut ours, mut plain, mut top) = (0.0f64, 0.0f64, 0.0f64);
    for row in 0..problem.heads.num_q_heads.min(4) {
        let (mut exact, mut o) = ([0.0; WIDTH], [0.0f32; WIDTH]);
        reference::attention_row_f64(&spec, len, 0, row, &q64, &k64, &v64, &mut exact);
        let q = &q[row * WIDTH..][..WIDTH];
        let s: Vec<f32> =
            k.chunks(WIDTH).map(|k| q.iter().zip(k).map(|(a, b)| a * b).sum::<f32>() * scale).collect();
        let max = s.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = s.iter().map(|s| (s - max).exp()).sum();
        for (s, v) in s.iter().zip(v.chunks(WIDTH)) {
            let p = (s - max).exp() / sum;
            o.iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
        }
        for (at, exact) in exact.iter().enumerate() {
            let got = f64::from(got[row * WIDTH + at]);
            assert!(got.is_finite(), "row {row}: {got}");
            ours = ours.max((got - exact).abs());
            plain = plain.max((f64::from(on_grid(o[at], dtype)) - exact).abs());
            top = top.max(exact.abs());
        }
    }
    Errors { ours, plain, rounding: unit(dtype) * top }
}

/// One line a kind, kernel and type; every length's error at most twice plain attention's and one rounding: it may not grow where plain
/// attention's does not.
fn table(lengths: &[usize]) {
    for dtype in [DType::F32, DType::Bf16] {
        for rows in [4, 16] {
            for kind in KINDS {
                let cells: Vec<_> = lengths.iter().map(|&n| errors(kind, rows, n, dtype)).collect();
                let line: Vec<_> =
                    cells.iter().map(|e| format!("{:.1e} ({:.2})", e.ours, e.ratio())).collect();
                println!(
                    "| {dtype} | {} | {kind:?} | {} |",
                    if rows > 12 { "packed" } else { "direct" },
                    line.join(" | ")
                );
                for (n, e) in lengths.iter().zip(&cells) {
                    assert!(
                        e.holds(),
                        "{kind:?} {dtype} {rows} rows {n} keys: {:e} for {:e}",
                        e.ours,
                        e.plain
                    );
                }
            }
        }
    }
}

/// `SUANPAN_LENGTHS=1024,4096,16384,65536,262144,1048576 cargo test --release -p suanpan-attn --test error_by_length -- --nocapture`
/// prints the table of docs/attn-cpu-notes.md in five minutes.
#[test]
fn errors_stay_within_twice_plain_attentions_at_every_length() {
    let lengths = std::env::var("SUANPAN_LENGTHS").unwrap_or("1024,8192,65536".into());
    let lengths: Vec<_> = lengths.split(',').map(|n| n.parse().expect("a number of keys")).collect();
    table(&lengths);
}
