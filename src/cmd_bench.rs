//! `suanpan bench`: kernels alone (`attn`) or a whole model without server or scheduler (`model`).
//!
//! Answers are checked before the clock starts; FLOPs and bytes come from the ledger. No peer is run here: scripts under
//! bench/ run one beside it.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use suanpan_base::DType;
use suanpan_cache::KvStorage;
use suanpan_ledger::AttnBooks;
use suanpan_model::forward::{ExecOptions, Executor, LogitRows, StepBatch, StepSeq};

use crate::attn_bench::{self, Config, Row};
use crate::engine_flags::{self, EngineFlags};

#[derive(clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Attention alone: prefill over lengths and head widths, decode over a long history, and the memory it reads from.
    Attn(AttnArgs),
    /// A model's executor: prefill and decode tokens a second at given lengths and depths.
    Model(ModelArgs),
}

#[derive(clap::Args)]
struct AttnArgs {
    /// Prefill lengths in tokens.
    #[arg(long, value_delimiter = ',', default_values_t = Config::default().lengths)]
    lengths: Vec<usize>,
    /// Head widths of the prefill rows.
    #[arg(long, value_delimiter = ',', default_values_t = Config::default().head_dims)]
    head_dims: Vec<usize>,
    /// Query and kv heads of the prefill rows.
    #[arg(long, default_value_t = Config::default().prefill_heads)]
    prefill_heads: usize,
    /// Keys of the decode rows; 0 leaves them out.
    #[arg(long, default_value_t = Config::default().decode_keys)]
    decode_keys: usize,
    /// Timed runs a row; the median counts.
    #[arg(long, default_value_t = Config::default().repeats)]
    repeats: usize,
    /// Threads [default: one for each core].
    #[arg(long)]
    threads: Option<usize>,
    /// Where it runs: cpu, or cuda for the first Hopper device (then --threads does not apply, and --repeats 0 only checks and predicts).
    #[arg(long, value_enum, default_value_t = BenchDevice::Cpu)]
    device: BenchDevice,
    /// Stored types of K and V on a GPU (bf16, fp8_e4m3, int8, int4) [default: bf16]: the quantised ones lie in pages,
    /// and the append that fills them is a row, too.
    #[arg(long, value_delimiter = ',')]
    kv_dtypes: Vec<DType>,
    /// Print JSON; on the CPU a list of {"phase", "isa", "threads", "dtype", "kv_dtype", "num_q_heads", "num_kv_heads", "head_dim", "mask", "seqlen_q",
    /// "seqlen_k", "page_size", "ms", "gflops", "kv_gbytes_per_s", "error"}, on a GPU {"peaks", "rows"}.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum BenchDevice {
    Cpu,
    Cuda,
}

#[derive(clap::Args)]
struct ModelArgs {
    /// The model: a file or folder, builtin:recall (or :chain, :count), or `hf:owner/name[@revision][:file.gguf]`.
    #[arg(long)]
    model: String,
    /// Prompt lengths to prefill from an empty cache.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2048])]
    prompt: Vec<usize>,
    /// Depths to decode at: tokens already in the cache.
    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    depth: Vec<usize>,
    /// Tokens to decode at each depth.
    #[arg(long, default_value_t = 32)]
    tokens: usize,
    /// Runs of each row; the median counts.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Print JSON: {"model", "dtype", "kv_cache_dtype", "threads", "chunk", "resident_bytes", "rows": [{"phase", "tokens", "depth",
    /// "tok_per_s", "runs", "attention_flops", "kv_read_bytes", "ops"}]}.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineFlags,
}

pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    match &args.what {
        What::Attn(a) => attn(a),
        What::Model(a) => model(a),
    }
}

#[cfg(not(feature = "cuda"))]
fn attn_cuda(_: &AttnArgs) -> anyhow::Result<()> {
    anyhow::bail!("--device cuda: this binary was built without the feature `cuda`; supported: cpu")
}

#[cfg(feature = "cuda")]
fn attn_cuda(args: &AttnArgs) -> anyhow::Result<()> {
    use crate::attn_cuda;
    ensure!(args.threads.is_none(), "--threads: supported with --device cpu");
    for dtype in &args.kv_dtypes {
        let known = [DType::Bf16, DType::E4m3, DType::I8, DType::I4].contains(dtype);
        ensure!(known, "--kv-dtypes: asked {dtype}; supported bf16, fp8_e4m3, int8, int4");
    }
    let config = attn_cuda::Config {
        kv_dtypes: if args.kv_dtypes.is_empty() { vec![DType::Bf16] } else { args.kv_dtypes.clone() },
        lengths: args.lengths.clone(),
        head_dims: args.head_dims.clone(),
        decode_keys: args.decode_keys,
        repeats: args.repeats,
    };
    let (peaks, rows) = attn_cuda::run(&config)?;
    if args.json {
        let rows: Vec<_> = rows.iter().map(cuda_json).collect();
        let peaks =
            peaks.map(|p| serde_json::json!({"flops_per_s": p.flops_per_s, "bytes_per_s": p.bytes_per_s}));
        println!("{}", serde_json::to_string_pretty(&serde_json::json!({"peaks": peaks, "rows": rows}))?);
        return Ok(());
    }
    if let Some(p) = peaks {
        println!(
            "measured peaks: {:.0} TFLOP/s of bf16 products, {:.2} TB/s read",
            p.flops_per_s / 1e12,
            p.bytes_per_s / 1e12
        );
    }
    for row in &rows {
        println!("{row}");
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn cuda_json(row: &crate::attn_cuda::Row) -> serde_json::Value {
    let h = row.problem.heads;
    serde_json::json!({
        "phase": row.phase, "dtype": row.problem.q_dtype.name(), "kv_dtype": row.problem.kv_dtype.name(),
        "num_q_heads": h.num_q_heads, "num_kv_heads": h.num_kv_heads, "head_dim": h.head_dim_qk,
        "mask": row.problem.mask.to_string(), "kv": row.problem.kv.to_string(), "batch": row.batch,
        "seqlen_q": row.len.seqlen_q, "seqlen_k": row.len.seqlen_k, "kernel": row.kernel, "launches": row.launches, "plan": row.plan, "us": row.us,
        "flops_per_s": row.flops_per_s(), "bytes_per_s": row.bytes_per_s(), "share_of_peak": row.share, "predicted": row.predicted,
        "error": row.error,
    })
}

fn attn(args: &AttnArgs) -> anyhow::Result<()> {
    if args.device == BenchDevice::Cuda {
        return attn_cuda(args);
    }
    ensure!(args.kv_dtypes.is_empty(), "--kv-dtypes: supported with --device cuda");
    let mut config = Config {
        lengths: args.lengths.clone(),
        head_dims: args.head_dims.clone(),
        prefill_heads: args.prefill_heads,
        decode_keys: args.decode_keys,
        repeats: args.repeats,
        ..Config::default()
    };
    config.threads = args.threads.unwrap_or(config.threads);
    let rows = attn_bench::run(&config)?;
    if args.json {
        let rows: Vec<_> = rows.iter().map(attn_json).collect();
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        rows.iter().for_each(|row| println!("{row}"));
    }
    Ok(())
}

fn attn_json(row: &Row) -> serde_json::Value {
    serde_json::json!({
        "phase": row.phase, "isa": row.isa, "threads": row.threads, "dtype": row.dtype.name(), "kv_dtype": row.kv_dtype.name(),
        "num_q_heads": row.heads.num_q_heads, "num_kv_heads": row.heads.num_kv_heads, "head_dim": row.heads.head_dim_qk,
        "mask": if row.causal { "causal" } else { "full" }, "seqlen_q": row.len.seqlen_q, "seqlen_k": row.len.seqlen_k,
        "page_size": row.page_size, "ms": row.seconds * 1e3, "gflops": row.gflops(), "kv_gbytes_per_s": row.gbytes(),
        "error": row.error,
    })
}

/// One sequence on pages 0, 1, 2, …: no scheduler in the way.
struct Lane {
    exec: Executor,
    kv: KvStorage,
    batch: StepBatch,
    tokens: Vec<u32>,
    books: AttnBooks,
}

impl Lane {
    fn extend(&mut self, cached_len: usize, end: usize, logits: LogitRows) -> anyhow::Result<()> {
        let seq = StepSeq { cached_len, extend_len: end - cached_len, logits };
        self.batch.clear();
        self.batch.tokens.extend_from_slice(&self.tokens[cached_len..end]);
        let predicted = self.exec.predicted(&seq);
        self.batch.seqs.push(seq);
        self.batch.page_table.extend(0..self.kv.num_pages() as u32);
        self.batch.page_table_stride = self.kv.num_pages();
        self.exec.step(&self.batch, &mut self.kv)?;
        let counted = self.exec.books()[0];
        ensure!(
            counted == predicted,
            "books disagree at {cached_len}..{end}: {predicted:?} predicted, {counted:?} counted"
        );
        self.books += counted;
        Ok(())
    }

    /// A prompt of `n` tokens in chunks, then the logits of its last token.
    fn prefill(&mut self, n: usize) -> anyhow::Result<()> {
        let chunk = self.exec.options().max_tokens;
        let mut at = 0;
        while at < n {
            let end = (at + chunk).min(n);
            self.extend(at, end, if end == n { LogitRows::Last } else { LogitRows::None })?;
            at = end;
        }
        self.finite_logits(n)
    }

    fn decode(&mut self, depth: usize, n: usize) -> anyhow::Result<()> {
        for at in depth..depth + n {
            self.extend(at, at + 1, LogitRows::Last)?;
            self.finite_logits(at)?;
        }
        Ok(())
    }

    /// Computes the logits and looks at one: an executor that returns NaN quickly is not fast.
    fn finite_logits(&mut self, at: usize) -> anyhow::Result<()> {
        let logits = self.exec.logits(0..1);
        ensure!(logits[at % logits.len()].is_finite(), "logits after {at} tokens are not finite");
        Ok(())
    }
}

/// A timed row.
struct Timed {
    phase: &'static str,
    tokens: usize,
    depth: usize,
    runs: Vec<Duration>,
    books: AttnBooks,
    ops: String,
}

impl Timed {
    fn tokens_per_second(&self) -> f64 {
        let mut runs = self.runs.clone();
        runs.sort();
        self.tokens as f64 / runs[runs.len() / 2].as_secs_f64()
    }
}

fn timed(
    lane: &mut Lane,
    phase: &'static str,
    (tokens, depth): (usize, usize),
    repeats: usize,
    once: impl Fn(&mut Lane) -> anyhow::Result<()>,
) -> anyhow::Result<Timed> {
    let mut runs = Vec::with_capacity(repeats);
    let (mut books, mut ops) = (AttnBooks::default(), String::new());
    for _ in 0..repeats {
        lane.books = AttnBooks::default();
        lane.exec.time_ops(true);
        let start = Instant::now();
        once(lane)?;
        runs.push(start.elapsed());
        books = lane.books;
        ops = lane.exec.op_times().map(|t| t.to_string()).unwrap_or_default();
    }
    Ok(Timed { phase, tokens, depth, runs, books, ops })
}

fn measure(lane: &mut Lane, args: &ModelArgs) -> anyhow::Result<Vec<Timed>> {
    let mut rows = Vec::new();
    lane.prefill(lane.exec.options().max_tokens.min(lane.tokens.len()))?; // touches every weight once
    for &n in &args.prompt {
        rows.push(timed(lane, "prefill", (n, 0), args.repeats, |lane| lane.prefill(n))?);
    }
    for &depth in &args.depth {
        // At depth 0 the first token has no history; each run decodes over the same positions.
        if depth > 0 {
            lane.prefill(depth)?;
        }
        rows.push(timed(lane, "decode", (args.tokens, depth), args.repeats, |lane| {
            lane.decode(depth, args.tokens)
        })?);
    }
    Ok(rows)
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

fn lane(args: &ModelArgs) -> anyhow::Result<Lane> {
    ensure!(args.repeats >= 1 && args.tokens >= 1, "--repeats and --tokens: supported: at least 1");
    let model = engine_flags::load(&args.model)?;
    let options = args.engine.options(&args.model)?;
    let prompt = args.prompt.iter().max().copied().unwrap_or(0);
    let depth = args.depth.iter().max().map_or(0, |d| d + args.tokens);
    let longest = prompt.max(depth).max(1);
    let threads = args.engine.threads.unwrap_or(std::thread::available_parallelism().map_or(1, usize::from));
    let exec = Executor::new(
        model,
        ExecOptions {
            precision: options.precision,
            kv_dtype: options.kv_cache_dtype,
            kv_spared: options.kv_cache_dtype_skip_layers,
            batch_invariant: options.batch_invariant,
            threads,
            max_tokens: options.max_num_batched_tokens,
            max_seqs: 1,
            max_model_len: longest,
            page_size: options.page_size,
        },
    )?;
    let kv = KvStorage::new(&exec.kv_layers(), longest.div_ceil(options.page_size), options.page_size)?;
    let vocab = exec.model().config.vocab_size;
    let tokens = (0..longest).map(|i| (i.wrapping_mul(2_654_435_761) % vocab) as u32).collect();
    Ok(Lane { exec, kv, batch: StepBatch::default(), tokens, books: AttnBooks::default() })
}

fn model(args: &ModelArgs) -> anyhow::Result<()> {
    let mut lane = lane(args)?;
    let rows = lane.exec.pool().install(|| measure(&mut lane, args)).context("bench model")?;
    let options = lane.exec.options();
    let resident = resident_bytes();
    if !args.json {
        println!(
            "{}: {}, kv {}, {} threads, chunks of {}",
            args.model,
            options.precision.name(),
            options.kv_dtype,
            options.threads,
            options.max_tokens
        );
        for row in &rows {
            println!(
                "{:<8}{:>7} tokens at depth {:>7} {:>10.1} tok/s",
                row.phase,
                row.tokens,
                row.depth,
                row.tokens_per_second()
            );
            println!("    {}", row.ops);
        }
        println!("resident {:.0} MB", resident.unwrap_or(0) as f64 / 1e6);
        return Ok(());
    }
    let list: Vec<_> = rows
        .iter()
        .map(|row| {
            let runs: Vec<f64> = row.runs.iter().map(|r| row.tokens as f64 / r.as_secs_f64()).collect();
            serde_json::json!({
                "phase": row.phase, "tokens": row.tokens, "depth": row.depth, "tok_per_s": row.tokens_per_second(), "runs": runs,
                "attention_flops": row.books.flops, "kv_read_bytes": row.books.kv_read_bytes, "ops": row.ops,
            })
        })
        .collect();
    let report = serde_json::json!({
        "model": args.model, "dtype": options.precision.name(), "kv_cache_dtype": options.kv_dtype.name(),
        "threads": options.threads, "chunk": options.max_tokens, "resident_bytes": resident, "rows": list,
    });
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}
