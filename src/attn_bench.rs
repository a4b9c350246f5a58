//! Attention alone, timed: each row checks its answer on sampled rows before the clock starts; FLOPs and bytes come from `ledger`.

use std::fmt;
use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use rayon::prelude::*;
use suanpan_attn::cpu::probe;
use suanpan_attn::quant::{Codes, Rows, quantize, scales_of};
use suanpan_attn::reference::{self, Spec};
use suanpan_attn::{Args, Extras, KvLayout, KvScales, Limits, Machine, Plan, Problem, Strides, Workspace};
use suanpan_base::{BadArgument, Buf, BufMut, DType, HeadShape, Mask, ScaleGrain, SeqLen};
use suanpan_cache::{KvStorage, LayerShape};
use suanpan_ledger::AttnBooks;

/// Fewest timed runs of a decode row.
const MIN_DECODES: usize = 31;
/// Steps of the multiply-add row: about a tenth of a second.
const MULTIPLY_ADDS: u64 = 40_000_000;

/// What to time.
#[derive(Clone, Debug)]
pub struct Config {
    /// Threads of the pool and of the plans.
    pub threads: usize,
    /// Timed runs a row; the median counts.
    pub repeats: usize,
    /// Prefill lengths.
    pub lengths: Vec<usize>,
    /// Head widths of the prefill rows.
    pub head_dims: Vec<usize>,
    /// Query and kv heads of the prefill rows.
    pub prefill_heads: usize,
    /// Keys of the decode rows; 0 leaves them and the streaming read out.
    pub decode_keys: usize,
    /// Bytes of the streaming read beside them; more than the caches hold.
    pub stream_bytes: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            repeats: 5,
            lengths: vec![1024, 4096, 8192],
            head_dims: vec![64, 128],
            prefill_heads: 8,
            decode_keys: 32768,
            stream_bytes: 1 << 30,
        }
    }
}

/// One timed row, with its conditions.
#[derive(Clone, Debug)]
pub struct Row {
    /// `prefill`, `decode`, or what they are held against: `multiply-add` on registers, `stream read`.
    pub phase: &'static str,
    /// Instruction set.
    pub isa: &'static str,
    /// Threads.
    pub threads: usize,
    /// Heads and widths.
    pub heads: HeadShape,
    /// Element type of q and out.
    pub dtype: DType,
    /// Element type of K and V; codes have a scale a token and kv head.
    pub kv_dtype: DType,
    /// Causal or not.
    pub causal: bool,
    /// Lengths of the one sequence.
    pub len: SeqLen,
    /// Tokens a page; `None` = contiguous.
    pub page_size: Option<usize>,
    /// Median seconds.
    pub seconds: f64,
    /// What the ledger expects.
    pub predicted: AttnBooks,
    /// Largest error against the oracle on the sampled rows.
    pub error: f64,
}

impl Row {
    /// FLOPs a second / 1e9.
    pub fn gflops(&self) -> f64 {
        self.predicted.flops as f64 / self.seconds / 1e9
    }

    /// K and V bytes a second / 1e9.
    pub fn gbytes(&self) -> f64 {
        self.predicted.kv_read_bytes as f64 / self.seconds / 1e9
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = self.page_size.map_or("contiguous".to_string(), |p| format!("pages of {p}"));
        write!(
            f,
            "{:<11} {} x{} {:>4} heads {}/{} d {:<3} q {:<5} k {:<6} {:<6} {:<11} {:>9.3} ms {:>7.1} GFLOP/s {:>6.2} GB/s error {:.1e}",
            self.phase,
            self.isa,
            self.threads,
            if self.kv_dtype == self.dtype { self.dtype.name() } else { self.kv_dtype.name() },
            self.heads.num_q_heads,
            self.heads.num_kv_heads,
            self.heads.head_dim_qk,
            self.len.seqlen_q,
            self.len.seqlen_k,
            if self.causal { "causal" } else { "full" },
            layout,
            self.seconds * 1e3,
            self.gflops(),
            self.gbytes(),
            self.error
        )
    }
}

/// Times every row of `config`. Fails when an answer is wrong (`error` field) or the machine lacks a thread pool.
pub fn run(config: &Config) -> Result<Vec<Row>, BadArgument> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(config.threads)
        .build()
        .map_err(|e| BadArgument::new("attention bench", "threads", e, "a thread pool of this size"))?;
    let machine = Machine::detect(config.threads);
    pool.install(|| {
        let mut rows = Vec::new();
        for dtype in DType::UNSCALED {
            for &d in &config.head_dims {
                for causal in [false, true] {
                    for &s in &config.lengths {
                        let heads = HeadShape::new(config.prefill_heads, config.prefill_heads, d);
                        rows.push(time(
                            "prefill",
                            config,
                            &machine,
                            heads,
                            (dtype, dtype),
                            causal,
                            SeqLen::new(s, s),
                            None,
                        )?);
                    }
                }
            }
        }
        rows.push(multiply_add(config, &machine, DType::F32, &|| {
            probe::multiply_add(&machine, MULTIPLY_ADDS)
        }));
        if machine.bf16_dots() {
            let dots = || probe::dot_pairs(&machine, MULTIPLY_ADDS).unwrap_or_default();
            rows.push(multiply_add(config, &machine, DType::Bf16, &dots));
        }
        if config.decode_keys == 0 {
            return Ok(rows);
        }
        let (heads, len) = (HeadShape::new(32, 8, 128), SeqLen::extend(config.decode_keys - 1, 1));
        for page_size in [None, Some(16), Some(64)] {
            let types = (DType::Bf16, DType::Bf16);
            rows.push(time("decode", config, &machine, heads, types, true, len, page_size)?);
        }
        for kv_dtype in [DType::I8, DType::I4] {
            let types = (DType::Bf16, kv_dtype);
            rows.push(time("decode", config, &machine, heads, types, true, len, None)?);
        }
        rows.push(stream(config, &machine)?);
        Ok(rows)
    })
}

/// Numbers with a spread like normalised activations.
fn numbers(n: usize, seed: u64) -> Vec<bf16> {
    let mut x = seed | 1;
    let mut uniform = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..n).map(|_| bf16::from_f32((uniform() + uniform() + uniform()) * 2.0)).collect()
}

/// A flat buffer of either type.
enum Flat {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Flat {
    fn new(x: Vec<bf16>, dtype: DType) -> Flat {
        match dtype {
            DType::F32 => Flat::F32(x.iter().map(|x| x.to_f32()).collect()),
            _ => Flat::Bf16(x),
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
}

/// Keys and values: `[heads, tokens, d]` as PyTorch lays them out, or the cache's own pages in shuffled order.
enum Memory {
    Contiguous(Flat, Flat, Strides),
    Quantised { k: (Codes, Vec<f32>), v: (Codes, Vec<f32>), strides: Strides, scale_strides: Strides },
    Paged(KvStorage, Vec<u32>),
}

impl Memory {
    fn new(problem: &Problem, len: SeqLen) -> Result<Memory, BadArgument> {
        let (heads, dtype) = (problem.heads, problem.kv_dtype);
        let d = heads.head_dim_qk;
        let row = heads.num_kv_heads * d;
        let (k, v) = (numbers(len.seqlen_k * row, 2), numbers(len.seqlen_k * row, 3));
        let KvLayout::Paged { page_size } = problem.kv else {
            let strides = Strides { token: d, head: len.seqlen_k * d, page: 0 };
            if problem.kv_scales != ScaleGrain::None {
                let quantise = |x: Vec<bf16>| {
                    let x: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
                    // Head after head: each row is a token of one head.
                    let rows = Rows { x: &x, num_kv_heads: 1, head_dim: d, page_size: 1 };
                    let scales = scales_of(&rows, dtype, problem.kv_scales)?;
                    Ok::<_, BadArgument>((quantize(&rows, dtype, problem.kv_scales, &scales)?.0, scales))
                };
                let scale_strides = Strides { token: 1, head: len.seqlen_k, page: 0 };
                return Ok(Memory::Quantised { k: quantise(k)?, v: quantise(v)?, strides, scale_strides });
            }
            return Ok(Memory::Contiguous(Flat::new(k, dtype), Flat::new(v, dtype), strides));
        };
        let pages = len.seqlen_k.div_ceil(page_size);
        let mut storage = KvStorage::new(&[LayerShape { heads, dtype }], pages, page_size)?;
        let step = (pages / 3) | 1;
        let mut table: Vec<u32> = (0..pages as u32).collect();
        // A fixed shuffle: neighbours in the sequence are not neighbours in memory.
        (0..pages).for_each(|i| table.swap(i, i * step % pages));
        let widen = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        for (page, (k, v)) in k.chunks(page_size * row).zip(v.chunks(page_size * row)).enumerate() {
            let first = u64::from(table[page]) * page_size as u64;
            let slots: Vec<u64> = (first..first + (k.len() / row) as u64).collect();
            storage.write(0, &slots, &widen(k), &widen(v));
        }
        Ok(Memory::Paged(storage, table))
    }

    fn k(&self) -> (Buf<'_>, Strides) {
        match self {
            Memory::Contiguous(k, _, strides) => (k.buf(), *strides),
            Memory::Quantised { k, strides, .. } => (k.0.buf(), *strides),
            Memory::Paged(storage, _) => (storage.k(0), paged(storage.k_strides(0))),
        }
    }

    fn v(&self) -> (Buf<'_>, Strides) {
        match self {
            Memory::Contiguous(_, v, strides) => (v.buf(), *strides),
            Memory::Quantised { v, strides, .. } => (v.0.buf(), *strides),
            Memory::Paged(storage, _) => (storage.v(0), paged(storage.v_strides(0))),
        }
    }

    fn table(&self) -> &[u32] {
        match self {
            Memory::Contiguous(..) | Memory::Quantised { .. } => &[],
            Memory::Paged(_, table) => table,
        }
    }

    fn scales(&self) -> KvScales<'_> {
        match self {
            Memory::Quantised { k, v, scale_strides: s, .. } => {
                KvScales { k: Buf::F32(&k.1), k_strides: *s, v: Buf::F32(&v.1), v_strides: *s }
            }
            _ => KvScales::default(),
        }
    }

    /// Where key `j` of head `head` starts.
    fn row(&self, strides: Strides, head: usize, j: usize) -> usize {
        match self {
            Memory::Contiguous(..) | Memory::Quantised { .. } => head * strides.head + j * strides.token,
            Memory::Paged(storage, table) => {
                let (page, slot) = (j / storage.page_size(), j % storage.page_size());
                table[page] as usize * strides.page + head * strides.head + slot * strides.token
            }
        }
    }
}

fn paged((token, head, page): (usize, usize, usize)) -> Strides {
    Strides { token, head, page }
}

/// One problem with its buffers.
struct Subject {
    plan: Plan,
    len: SeqLen,
    q: Flat,
    memory: Memory,
    out: Flat,
}

impl Subject {
    fn new(problem: &Problem, machine: &Machine, len: SeqLen) -> Result<Subject, BadArgument> {
        let limits = Limits { max_seqs: 1, max_total_q: len.seqlen_q, max_seqlen_k: len.seqlen_k };
        let mut plan = Plan::new(problem, machine, limits)?;
        plan.schedule(&[len])?;
        let n = len.seqlen_q * problem.heads.num_q_heads * problem.heads.head_dim_qk;
        Ok(Subject {
            plan,
            len,
            q: Flat::new(numbers(n, 1), problem.q_dtype),
            memory: Memory::new(problem, len)?,
            out: Flat::new(vec![bf16::NAN; n], problem.q_dtype),
        })
    }

    /// (token, head) strides of q and out.
    fn q_strides(&self) -> (usize, usize) {
        let d = self.plan.problem().heads.head_dim_qk;
        (d, self.len.seqlen_q * d)
    }

    fn call(&mut self, ws: &mut Workspace, books: &mut AttnBooks) -> Result<(), BadArgument> {
        let q_strides = self.q_strides();
        let ((k, k_strides), (v, v_strides)) = (self.memory.k(), self.memory.v());
        let args = Args {
            kv_scales: self.memory.scales(),
            extras: Extras::default(),
            q: self.q.buf(),
            q_strides,
            k,
            k_strides,
            v,
            v_strides,
            page_table: self.memory.table(),
            page_table_stride: self.memory.table().len(),
            out: self.out.buf_mut(),
            out_strides: q_strides,
            lse: None,
            max_scores: None,
        };
        suanpan_attn::run(&self.plan, args, ws, std::slice::from_mut(books))
    }

    /// Largest error over a few rows of a few heads.
    fn error(&self) -> f64 {
        let p = self.plan.problem();
        let (h, d) = (p.heads, p.heads.head_dim_qk);
        let one = HeadShape::new(1, 1, d);
        let mut worst = 0.0f64;
        for head in [0, h.num_q_heads - 1] {
            let (kv_head, scales) = (head / h.group_size(), self.memory.scales());
            let rows = |(buf, strides): (Buf<'_>, Strides), scales: Buf<'_>, s: Strides| -> Vec<f64> {
                let element = |j: usize, x: usize| {
                    let at = j * s.token + kv_head * s.head;
                    let scale = if scales.is_empty() { 1.0 } else { scales.get(at) };
                    f64::from(scale) * f64::from(buf.get(self.memory.row(strides, kv_head, j) + x))
                };
                (0..self.len.seqlen_k * d).map(|x| element(x / d, x % d)).collect()
            };
            let k = rows(self.memory.k(), scales.k, scales.k_strides);
            let v = rows(self.memory.v(), scales.v, scales.v_strides);
            for i in [0, self.len.seqlen_q / 2, self.len.seqlen_q - 1] {
                let at = i * self.q_strides().0 + head * self.q_strides().1;
                let mut q = vec![0.0; self.len.seqlen_q * d];
                (0..d).for_each(|x| q[i * d + x] = f64::from(self.q.buf().get(at + x)));
                let mut o = vec![0.0; d];
                let spec = Spec::new(one, p.mask, f64::from(p.scale()));
                reference::attention_row_f64(&spec, self.len, i, 0, &q, &k, &v, &mut o);
                for x in 0..d {
                    let error = (f64::from(self.out.buf().get(at + x)) - o[x]).abs();
                    // A NaN must not pass for a small error.
                    worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
                }
            }
        }
        worst
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

#[rustfmt::skip]
fn time(
    phase: &'static str, config: &Config, machine: &Machine, heads: HeadShape, (dtype, kv_dtype): (DType, DType),
    causal: bool, len: SeqLen, page_size: Option<usize>,
) -> Result<Row, BadArgument> {
    let problem = Problem {
        kv_scales: if kv_dtype.is_code() { ScaleGrain::Token } else { ScaleGrain::None },
        q_dtype: dtype,
        kv_dtype,
        kv: page_size.map_or(KvLayout::Contiguous, |page_size| KvLayout::Paged { page_size }),
        ..Problem::new(heads, if causal { Mask::CAUSAL } else { Mask::FULL })
    };
    let mut subject = Subject::new(&problem, machine, len)?;
    let mut ws = Workspace::for_plans(&[&subject.plan]);
    let mut books = AttnBooks::default();
    subject.call(&mut ws, &mut books)?;
    let (error, most) = (subject.error(), if dtype == DType::F32 { 1e-5 } else { 2e-2 });
    if error > most {
        return Err(BadArgument::new("attention bench", "error", format!("{error:e}"), format!("at most {most:e}")));
    }
    // A decode takes milliseconds: a few of them would time the machine's mood.
    let repeats = if phase == "decode" { config.repeats.max(MIN_DECODES) } else { config.repeats.max(1) };
    let mut seconds = Vec::new();
    for _ in 0..repeats {
        let start = Instant::now();
        subject.call(&mut ws, &mut books)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let predicted = subject.plan.predicted(len);
    let (isa, threads) = (machine.isa().name(), machine.threads());
    Ok(Row { phase, isa, threads, heads, dtype, kv_dtype, causal, len, page_size, seconds: median(seconds), predicted, error })
}

/// Multiply-adds of `dtype` on the registers of all threads: the rate that prefill is held against.
fn multiply_add(
    config: &Config,
    machine: &Machine,
    dtype: DType,
    probe: &(dyn Fn() -> (f32, u64) + Sync),
) -> Row {
    let (mut seconds, mut flops) = (Vec::new(), 0);
    for _ in 0..config.repeats.max(1) {
        let start = Instant::now();
        flops = (0..config.threads)
            .into_par_iter()
            .with_max_len(1)
            .map(|_| {
                let (kept, flops) = probe();
                black_box(kept);
                flops
            })
            .sum();
        seconds.push(start.elapsed().as_secs_f64());
    }
    Row {
        dtype,
        kv_dtype: dtype,
        ..beside("multiply-add", machine, seconds, AttnBooks { flops, ..AttnBooks::default() })
    }
}

/// A row that no attention call is in.
fn beside(phase: &'static str, machine: &Machine, seconds: Vec<f64>, predicted: AttnBooks) -> Row {
    Row {
        phase,
        isa: machine.isa().name(),
        threads: machine.threads(),
        heads: HeadShape::new(1, 1, 1),
        dtype: DType::F32,
        kv_dtype: DType::F32,
        causal: false,
        len: SeqLen::new(0, 0),
        page_size: None,
        seconds: median(seconds),
        predicted,
        error: 0.0,
    }
}

/// A plain read of cache pages by all threads: the bandwidth that decode is held against.
fn stream(config: &Config, machine: &Machine) -> Result<Row, BadArgument> {
    let (page_size, dtype) = (16, DType::F32);
    let layer = LayerShape { heads: HeadShape::new(8, 8, 128), dtype };
    let page_bytes = layer.bytes(page_size) as usize;
    let mut storage = KvStorage::new(&[layer], config.stream_bytes.div_ceil(page_bytes), page_size)?;
    let rows = vec![1.0; page_size * 8 * 128];
    for page in 0..storage.num_pages() as u64 {
        let slots: Vec<u64> = (0..page_size as u64).map(|slot| page * page_size as u64 + slot).collect();
        storage.write(0, &slots, &rows, &rows);
    }
    let Buf::F32(data) = storage.k(0) else { unreachable!("f32 pages") };
    let part = data.len().div_ceil(config.threads).max(1);
    let mut seconds = Vec::new();
    for _ in 0..config.repeats.max(1) {
        let start = Instant::now();
        let sum: f32 = data.par_chunks(part).map(|x| probe::read(machine, x)).sum();
        black_box(sum);
        seconds.push(start.elapsed().as_secs_f64());
    }
    let predicted = AttnBooks { kv_read_bytes: size_of_val(data) as u64, ..AttnBooks::default() };
    Ok(beside("stream read", machine, seconds, predicted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_bench_checks_and_prints_every_row() {
        let config = Config {
            threads: 2,
            repeats: 1,
            lengths: vec![100],
            head_dims: vec![64],
            prefill_heads: 8,
            decode_keys: 700,
            stream_bytes: 1 << 20,
        };
        let rows = run(&config).unwrap();
        // A processor that multiplies pairs of bf16 has a rate of its own for them.
        let peaks = 1 + usize::from(Machine::detect(2).bf16_dots());
        assert_eq!(rows.len(), 2 * 2 + peaks + 3 + 2 + 1);
        assert!(rows.iter().all(|r| r.seconds > 0.0 && (r.gbytes() > 0.0 || r.gflops() > 0.0)));
        assert!(rows[0].to_string().contains("GFLOP/s"), "{}", rows[0]);
    }
}
