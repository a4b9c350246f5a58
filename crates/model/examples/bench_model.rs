//! Speed of the executor alone on a model file: prefill and decode, with the time of each kind of operation.
//!
//! `bench_model MODEL [--precision f32|int8] [--kv f32|bf16] [--threads N] [--chunk N] [--prompt N,N,..] [--decode N] [--repeat N]`

use std::sync::Arc;
use std::time::Instant;

use suanpan_base::DType;
use suanpan_cache::KvStorage;
use suanpan_model::forward::{ExecOptions, Executor, LogitRows, StepBatch, StepSeq};
use suanpan_model::{LoadOptions, load};
use suanpan_ops::Precision;

struct Args {
    model: String,
    precision: Precision,
    kv: DType,
    threads: usize,
    chunk: usize,
    prompts: Vec<usize>,
    decode: usize,
    repeat: usize,
}

fn parse() -> Result<Args, String> {
    let mut words = std::env::args().skip(1);
    let mut args = Args {
        model: words.next().ok_or("a model is needed")?,
        precision: Precision::Int8,
        kv: DType::Bf16,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        chunk: 512,
        prompts: vec![512, 2048, 7936],
        decode: 32,
        repeat: 1,
    };
    while let Some(flag) = words.next() {
        let value = words.next().ok_or(format!("{flag} needs a value"))?;
        let number = |v: &str| v.parse::<usize>().map_err(|e| format!("{flag} {v}: {e}"));
        match flag.as_str() {
            "--precision" if value == "f32" => args.precision = Precision::F32,
            "--precision" if value == "int8" => args.precision = Precision::Int8,
            "--kv" => args.kv = value.parse().map_err(|e| format!("{e}"))?,
            "--threads" => args.threads = number(&value)?,
            "--chunk" => args.chunk = number(&value)?,
            "--decode" => args.decode = number(&value)?,
            "--repeat" => args.repeat = number(&value)?,
            "--prompt" => args.prompts = value.split(',').map(number).collect::<Result<_, _>>()?,
            _ => return Err(format!("unknown: {flag} {value}")),
        }
    }
    Ok(args)
}

/// Resident bytes of this process, where the system tells.
fn resident_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS:"));
    line.and_then(|l| l.split_whitespace().nth(1)?.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0
}

struct Bench {
    exec: Executor,
    kv: KvStorage,
    batch: StepBatch,
}

impl Bench {
    /// Extends the one sequence, whose pages are 0, 1, 2, ..
    fn step(
        &mut self,
        cached_len: usize,
        tokens: &[u32],
        logits: LogitRows,
    ) -> Result<(), Box<dyn std::error::Error>> {
        self.batch.clear();
        self.batch.tokens.extend_from_slice(tokens);
        self.batch.seqs.push(StepSeq { cached_len, extend_len: tokens.len(), logits });
        self.batch.page_table.extend(0..self.kv.num_pages() as u32);
        self.batch.page_table_stride = self.kv.num_pages();
        Ok(self.exec.step(&self.batch, &mut self.kv)?)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = parse()?;
    let started = Instant::now();
    let model = Arc::new(load(&args.model, &LoadOptions::default(), &mut |_| {})?);
    let page_size = 16;
    let longest = args.prompts.iter().copied().max().unwrap_or(0) + args.decode;
    let opts = ExecOptions {
        precision: args.precision,
        kv_dtype: args.kv,
        threads: args.threads,
        max_tokens: args.chunk,
        max_seqs: 1,
        max_model_len: longest,
        page_size,
    };
    let exec = Executor::new(model, opts)?;
    let kv = KvStorage::new(&exec.kv_layers(), longest.div_ceil(page_size), page_size)?;
    let vocab = exec.model().config.vocab_size;
    println!(
        "{}: {:?}, kv {}, {} threads, chunks of {}; ready after {:.0} ms; arena {:.1} MB, kv {:.1} MB",
        exec.model().config.name,
        args.precision,
        args.kv,
        args.threads,
        args.chunk,
        started.elapsed().as_secs_f64() * 1e3,
        exec.arena_bytes() as f64 / 1e6,
        kv.bytes() as f64 / 1e6
    );
    let pool = exec.pool();
    let mut bench = Bench { exec, kv, batch: StepBatch::default() };
    let tokens: Vec<u32> = (0..longest).map(|i| ((i * 2_654_435_761) % vocab) as u32).collect();
    pool.install(|| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let mut run = || -> Result<(), Box<dyn std::error::Error>> {
            for _ in 0..args.repeat {
                for &n in &args.prompts {
                    measure(&mut bench, &args, &tokens, n)?;
                }
            }
            Ok(())
        };
        run().map_err(|e| e.to_string().into())
    })
    .map_err(|e| e as Box<dyn std::error::Error>)?;
    println!("resident {:.0} MB", resident_mb());
    Ok(())
}

fn measure(b: &mut Bench, args: &Args, tokens: &[u32], n: usize) -> Result<(), Box<dyn std::error::Error>> {
    b.exec.time_ops(true);
    let start = Instant::now();
    for (i, chunk) in tokens[..n].chunks(args.chunk).enumerate() {
        let end = i * args.chunk + chunk.len() == n;
        b.step(i * args.chunk, chunk, if end { LogitRows::Last } else { LogitRows::None })?;
    }
    let first = b.exec.logits(0..1)[0];
    let took = start.elapsed().as_secs_f64();
    println!("prefill {n}: {:.1} tok/s ({:.1} ms; logit 0 {first})", n as f64 / took, took * 1e3);
    println!("  {}", b.exec.op_times().unwrap_or_default());
    if args.decode == 0 {
        return Ok(());
    }
    b.exec.time_ops(true);
    let start = Instant::now();
    for i in n..n + args.decode {
        b.step(i, &tokens[i..=i], LogitRows::Last)?;
        b.exec.logits(0..1);
    }
    let took = start.elapsed().as_secs_f64();
    println!(
        "decode at {n}: {:.1} tok/s ({:.3} ms a token)",
        args.decode as f64 / took,
        took * 1e3 / args.decode as f64
    );
    println!("  {}", b.exec.op_times().unwrap_or_default());
    Ok(())
}
