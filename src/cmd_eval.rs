//! `suanpan eval kv-error`: what storing keys and values in fewer bits loses on a model, against 16 bits, and what it gains.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use suanpan_base::{Buf, DType};
use suanpan_cache::{KvStorage, LayerSet, NearTokens};
use suanpan_model::forward::{ExecOptions, Executor, LogitRows, StepBatch, StepSeq};
use suanpan_model::{Model, ModelError};

use crate::{cmd_eval_report, cmd_eval_run, cmd_perplexity, engine_flags};

#[derive(clap::Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Error of stored keys and values by layer, divergence of next-token distributions, retrieval and decode speed, against bf16.
    KvError(KvErrorArgs),
    /// How well a model predicts a text.
    Perplexity(cmd_perplexity::PerplexityArgs),
    /// Ask a model or an endpoint questions whose answers are known, under stated conditions; every request is logged.
    Run(Box<cmd_eval_run::RunArgs>),
    /// What a run found: JSON, CSV, Markdown and one HTML page.
    Report(cmd_eval_report::ReportArgs),
    /// Two runs of one pack, item by item; refused if their conditions differ in anything that is not named.
    Compare(cmd_eval_report::CompareArgs),
    /// The tasks that can be asked.
    Tasks(cmd_eval_report::TasksArgs),
    /// Hold the harness against endpoints whose scores and times are known.
    SelfTest(cmd_eval_report::SelfTestArgs),
}

#[derive(clap::Args)]
struct KvErrorArgs {
    /// The model: a file or folder, builtin:recall (or :chain, :count), or `hf:owner/name[@revision][:file.gguf]`.
    #[arg(long)]
    model: String,
    /// Text to read; several files follow one another.
    #[arg(long, required = true)]
    text: Vec<PathBuf>,
    /// Tokens of it to read, hidden facts included.
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Types to judge, each against bf16.
    #[arg(long, value_delimiter = ',', default_value = "fp8_e4m3,int8,int4")]
    kv_cache_dtype: Vec<DType>,
    /// Layers that store bf16 all the same: numbers and ranges.
    #[arg(long)]
    kv_cache_dtype_skip_layers: Option<LayerSet>,
    /// Most recent tokens before each query, its own included, that are read in bf16 all the same.
    #[arg(long, default_value_t = 0)]
    kv_cache_recent_tokens: usize,
    /// First tokens that are read in bf16 as well, in whole pages.
    #[arg(long, default_value_t = 0)]
    kv_cache_sink_tokens: usize,
    /// Next-token distributions are compared once in so many tokens.
    #[arg(long, default_value_t = 16)]
    every: usize,
    /// Facts hidden in the text and asked for after it.
    #[arg(long, default_value_t = 8)]
    facts: usize,
    /// Decode steps timed at the end of the text, least time counted; 0 for none.
    #[arg(long, default_value_t = 24)]
    decode: usize,
    /// Tokens of a page.
    #[arg(long, default_value_t = 16)]
    block_size: usize,
    /// Threads [default: one for each core].
    #[arg(long)]
    threads: Option<usize>,
    /// Print JSON: {"model", "tokens", "positions", "facts", "baseline", "modes": [{"kv_cache_dtype", "spared_layers", "recent_tokens",
    /// "sink_tokens", "bytes_per_token",
    /// "capacity", "kl_mean", "kl_max", "same_top", "answer_nll", "answer_nll_loss", "answers_right", "decode_ratio", "layers": [{"k", "v"}]}]}.
    #[arg(long)]
    json: bool,
}

/// What one type gave. `capacity`: tokens in the memory of one bf16 token, where the text is one sequence and the pages of 16 bits it holds
/// between two steps count. Errors are root mean squares over those of bf16's rows.
#[derive(Serialize)]
struct ModeReport {
    kv_cache_dtype: &'static str,
    spared_layers: String,
    recent_tokens: usize,
    sink_tokens: usize,
    bytes_per_token: f64,
    capacity: f64,
    kl_mean: f64,
    kl_max: f64,
    same_top: f64,
    answer_nll: f64,
    answer_nll_loss: f64,
    answers_right: usize,
    decode_ratio: Option<f64>,
    layers: Vec<LayerError>,
}

#[derive(Serialize)]
struct LayerError {
    k: f64,
    v: f64,
}

/// One model over one type of cache.
struct Lane {
    exec: Executor,
    kv: KvStorage,
    batch: StepBatch,
    vocab: usize,
    kl: Vec<f64>,
    same_top: usize,
    answer: Answer,
    decode_s: f64,
}

#[derive(Clone, Copy, Default)]
struct Answer {
    nll: f64,
    tokens: usize,
    right: usize,
}

/// The text with its facts, and each question with its answer.
struct Task {
    tokens: Vec<u32>,
    questions: Vec<(Vec<u32>, Vec<u32>)>,
}

impl KvErrorArgs {
    /// Tokens that a lane of `dtype` reads in 16 bits all the same.
    fn near(&self, dtype: DType) -> NearTokens {
        let near = NearTokens { sinks: self.kv_cache_sink_tokens, recent: self.kv_cache_recent_tokens };
        if dtype.is_code() { near } else { NearTokens::NONE }
    }
}

impl Lane {
    fn new(model: &Arc<Model>, args: &KvErrorArgs, dtype: DType, longest: usize) -> anyhow::Result<Lane> {
        let threads = args.threads.unwrap_or(std::thread::available_parallelism().map_or(1, usize::from));
        let exec = Executor::new(
            Arc::clone(model),
            ExecOptions {
                precision: suanpan_ops::Precision::Int16,
                kv_dtype: dtype,
                kv_spared: args.kv_cache_dtype_skip_layers.unwrap_or_default(),
                kv_near: args.near(dtype),
                batch_invariant: false,
                threads,
                max_tokens: args.every.max(256),
                max_seqs: 1,
                max_model_len: longest,
                page_size: args.block_size,
            },
        )?;
        let kv = exec.kv_storage(longest.div_ceil(args.block_size), None)?;
        let batch = StepBatch {
            page_table: (0..kv.num_pages() as u32).collect(),
            page_table_stride: kv.num_pages(),
            ..StepBatch::default()
        };
        let vocab = model.config.vocab_size;
        let answer = Answer::default();
        Ok(Lane { exec, kv, batch, vocab, kl: Vec::new(), same_top: 0, answer, decode_s: f64::INFINITY })
    }

    fn extend(&mut self, cached_len: usize, tokens: &[u32], logits: LogitRows) -> Result<(), ModelError> {
        self.batch.tokens.clear();
        self.batch.tokens.extend_from_slice(tokens);
        self.batch.seqs.clear();
        self.batch.seqs.push(StepSeq { cached_len, extend_len: tokens.len(), logits });
        self.exec.step(&self.batch, &mut self.kv)
    }

    fn logits(&mut self, row: usize) -> &[f32] {
        self.exec.logits(row..row + 1)
    }

    /// Asks a question after `at` tokens of text and scores the right answer.
    fn ask(&mut self, at: usize, question: &[u32], answer: &[u32]) -> Result<(), ModelError> {
        let all = [question, &answer[..answer.len() - 1]].concat();
        self.extend(at, &all, LogitRows::All)?;
        let mut right = true;
        for (i, &token) in answer.iter().enumerate() {
            let logits = self.logits(question.len() - 1 + i);
            let nll = log_sum_exp(logits) - f64::from(logits[token as usize]);
            right &= top(logits) == token as usize;
            self.answer.nll += nll;
        }
        self.answer.tokens += answer.len();
        self.answer.right += usize::from(right);
        Ok(())
    }

    fn answer_nll(&self) -> f64 {
        self.answer.nll / self.answer.tokens.max(1) as f64
    }
}

fn top(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0)
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(f64::from(x)));
    max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}

/// Kullback-Leibler divergence of the distribution of `q` from that of `p`, in nats.
fn kl(p: &[f32], q: &[f32]) -> f64 {
    let (lp, lq) = (log_sum_exp(p), log_sum_exp(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let p = f64::from(p) - lp;
        p.exp() * (p - (f64::from(q) - lq))
    });
    terms.sum::<f64>().max(0.0)
}

const NAMES: [&str; 16] = [
    "Abacus", "Bellows", "Copper", "Damask", "Ermine", "Falcon", "Garnet", "Harbour", "Indigo", "Juniper",
    "Kestrel", "Lantern", "Meadow", "Nutmeg", "Orchard", "Pewter",
];

/// Hides facts at even distances in the text.
fn task(model: &Model, args: &KvErrorArgs) -> anyhow::Result<Task> {
    let mut text = String::new();
    for path in &args.text {
        text += &std::fs::read_to_string(path).with_context(|| format!("--text {}", path.display()))?;
    }
    ensure!(args.facts <= NAMES.len(), "--facts {}: supported: 0 to {}", args.facts, NAMES.len());
    let encode = |s: &str| model.tokenizer.encode(s, false);
    let mut facts = Vec::new();
    let mut questions = Vec::new();
    for (i, name) in NAMES[..args.facts].iter().enumerate() {
        let number = 10_000 + (i as u32 + 1).wrapping_mul(2_654_435_761) % 90_000;
        let ask = format!("\n\nThe secret number of {name} is");
        facts.push(encode(&format!("{ask} {number}.\n\n"))?);
        questions.push((encode(&ask)?, encode(&format!(" {number}"))?));
    }
    let words = encode(&text)?;
    let hidden: usize = facts.iter().map(Vec::len).sum();
    let wanted = args.tokens.saturating_sub(hidden);
    ensure!(wanted > 0, "--tokens {}: supported: more than the {hidden} of the facts", args.tokens);
    if words.len() < wanted {
        bail!(
            "--tokens {}: the text has {} tokens, with facts {}",
            args.tokens,
            words.len(),
            words.len() + hidden
        );
    }
    let mut tokens = Vec::with_capacity(args.tokens);
    for (i, part) in words[..wanted].chunks(wanted.div_ceil(args.facts + 1)).enumerate() {
        tokens.extend_from_slice(part);
        tokens.extend_from_slice(facts.get(i).map_or(&[], |f| f));
    }
    Ok(Task { tokens, questions })
}

pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    match &args.what {
        What::KvError(args) => kv_error(args),
        What::Perplexity(args) => cmd_perplexity::run(args),
        What::Run(args) => cmd_eval_run::run(args),
        What::Report(args) => cmd_eval_report::report(args),
        What::Compare(args) => cmd_eval_report::compare(args),
        What::Tasks(args) => cmd_eval_report::tasks(args),
        What::SelfTest(args) => cmd_eval_report::self_test(args),
    }
}

fn kv_error(args: &KvErrorArgs) -> anyhow::Result<()> {
    ensure!(args.every >= 1, "--every 0: supported: at least 1");
    ensure!(args.threads != Some(0), "--threads 0: supported: at least 1");
    let model = engine_flags::load(&args.model)?;
    let task = task(&model, args)?;
    let asked = task.questions.iter().map(|(q, a)| q.len() + a.len()).max().unwrap_or(0);
    let longest = task.tokens.len() + asked.max(args.decode + 1);
    let dtypes = std::iter::once(DType::Bf16).chain(args.kv_cache_dtype.iter().copied());
    let mut lanes =
        dtypes.map(|dtype| Lane::new(&model, args, dtype, longest)).collect::<anyhow::Result<Vec<_>>>()?;
    read(&mut lanes, &task.tokens, args.every)?;
    let at = task.tokens.len();
    for lane in &mut lanes {
        for (question, answer) in &task.questions {
            lane.ask(at, question, answer)?;
        }
    }
    decode(&mut lanes, at, args.decode)?;
    let reports = report(&lanes, at);
    print(args, &lanes[0], at, &reports)
}

/// Reads the text in all lanes at once and compares distributions with the first lane's.
fn read(lanes: &mut [Lane], tokens: &[u32], every: usize) -> anyhow::Result<()> {
    let bar = engine_flags::prefill_bar();
    bar.set_length(tokens.len() as u64);
    let (base, others) = lanes.split_at_mut(1);
    for (i, chunk) in tokens.chunks(every).enumerate() {
        let at = i * every;
        base[0].extend(at, chunk, LogitRows::Last)?;
        let p = base[0].logits(0);
        for lane in &mut *others {
            lane.extend(at, chunk, LogitRows::Last)?;
            let q = lane.logits(0);
            let (divergence, same) = (kl(p, q), top(p) == top(q));
            lane.kl.push(divergence);
            lane.same_top += usize::from(same);
        }
        bar.set_position((at + chunk.len()) as u64);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Times single steps at the end of the text, the lanes in turn, so that a busy moment meets all of them.
fn decode(lanes: &mut [Lane], at: usize, steps: usize) -> anyhow::Result<()> {
    for _ in 0..steps {
        for lane in &mut *lanes {
            let token = [(at % lane.vocab) as u32];
            let start = Instant::now();
            lane.extend(at, &token, LogitRows::Last)?;
            lane.logits(0);
            lane.decode_s = lane.decode_s.min(start.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

fn report(lanes: &[Lane], tokens: usize) -> Vec<ModeReport> {
    let base = &lanes[0];
    let per_token = |lane: &Lane| {
        let (near, page_size) = (lane.exec.options().kv_near, lane.kv.page_size());
        let (near_pages, pages) = (near.pages(tokens, page_size), tokens.div_ceil(page_size));
        let bytes = lane.exec.kv_layers().iter().map(|layer| {
            let held = if layer.near_of.is_some() { near_pages } else { pages };
            layer.shape.bytes(page_size) * held as u64
        });
        bytes.sum::<u64>() as f64 / tokens.max(1) as f64
    };
    let one = |lane: &Lane| {
        let compared = lane.kl.len().max(1) as f64;
        let options = lane.exec.options();
        ModeReport {
            kv_cache_dtype: options.kv_dtype.name(),
            spared_layers: options.kv_spared.to_string(),
            recent_tokens: options.kv_near.recent,
            sink_tokens: options.kv_near.sinks,
            bytes_per_token: per_token(lane),
            capacity: per_token(base) / per_token(lane),
            kl_mean: lane.kl.iter().sum::<f64>() / compared,
            kl_max: lane.kl.iter().copied().fold(0.0, f64::max),
            same_top: lane.same_top as f64 / compared,
            answer_nll: lane.answer_nll(),
            answer_nll_loss: lane.answer_nll() - base.answer_nll(),
            answers_right: lane.answer.right,
            decode_ratio: base.decode_s.is_finite().then(|| base.decode_s / lane.decode_s),
            layers: (0..base.kv.num_layers()).map(|layer| layer_error(base, lane, layer, tokens)).collect(),
        }
    };
    lanes[1..].iter().map(one).collect()
}

/// Root mean square of what a lane's stored rows differ from the base's, over the base's own.
fn layer_error(base: &Lane, lane: &Lane, layer: usize, tokens: usize) -> LayerError {
    let heads = base.kv.layer(layer).heads;
    let one = |a: Rows<'_>, b: Rows<'_>, width: usize| {
        let (mut lost, mut all) = (0.0, 0.0);
        let (mut x, mut y) = (vec![0.0; width], vec![0.0; width]);
        for (token, head) in (0..tokens).flat_map(|t| (0..heads.num_kv_heads).map(move |h| (t, h))) {
            a.read(token, head, &mut x);
            b.read(token, head, &mut y);
            for (&x, &y) in x.iter().zip(&y) {
                let (x, y) = (f64::from(x), f64::from(y));
                lost += (y - x) * (y - x);
                all += x * x;
            }
        }
        if all > 0.0 { (lost / all).sqrt() } else { 0.0 }
    };
    LayerError {
        k: one(Rows::keys(&base.kv, layer), Rows::keys(&lane.kv, layer), heads.head_dim_qk),
        v: one(Rows::values(&base.kv, layer), Rows::values(&lane.kv, layer), heads.head_dim_v),
    }
}

/// The stored rows of one side of a layer, page i holding the tokens from i · page_size on.
#[derive(Clone, Copy)]
struct Rows<'a> {
    codes: Buf<'a>,
    strides: (usize, usize, usize),
    scales: Buf<'a>,
    scale_strides: (usize, usize, usize),
    page_size: usize,
    /// Rows were rotated before they were stored.
    rotated: bool,
}

impl<'a> Rows<'a> {
    fn keys(kv: &'a KvStorage, layer: usize) -> Rows<'a> {
        Rows {
            codes: kv.k(layer),
            strides: kv.k_strides(layer),
            scales: kv.k_scales(layer),
            scale_strides: kv.scale_strides(layer),
            page_size: kv.page_size(),
            rotated: kv.layer(layer).dtype.is_code(),
        }
    }

    fn values(kv: &'a KvStorage, layer: usize) -> Rows<'a> {
        Rows {
            codes: kv.v(layer),
            strides: kv.v_strides(layer),
            scales: kv.v_scales(layer),
            ..Rows::keys(kv, layer)
        }
    }

    fn read(&self, token: usize, head: usize, row: &mut [f32]) {
        let (page, slot) = (token / self.page_size, token % self.page_size);
        let at = |s: (usize, usize, usize)| page * s.2 + head * s.1 + slot * s.0;
        let scale = if self.scales.is_empty() { 1.0 } else { self.scales.get(at(self.scale_strides)) };
        let codes = at(self.strides);
        row.iter_mut().enumerate().for_each(|(dim, x)| *x = self.codes.get(codes + dim) * scale);
        if self.rotated {
            suanpan_ops::hadamard(row, row.len());
        }
    }
}

fn print(args: &KvErrorArgs, base: &Lane, tokens: usize, modes: &[ModeReport]) -> anyhow::Result<()> {
    let positions = modes.first().map_or(0, |_| tokens.div_ceil(args.every));
    if args.json {
        let report = serde_json::json!({
            "model": args.model, "tokens": tokens, "positions": positions, "facts": args.facts,
            "baseline": {"kv_cache_dtype": "bf16", "answer_nll": base.answer_nll(), "answers_right": base.answer.right},
            "modes": modes,
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    println!(
        "{}: {tokens} tokens, {positions} distributions and {} facts against bf16",
        args.model, args.facts
    );
    println!(
        "bf16: answers {:.4} nats a token, {} of {} right",
        base.answer_nll(),
        base.answer.right,
        args.facts
    );
    for m in modes {
        println!(
            "{}: capacity {:.2}, KL mean {:.2e} max {:.2e}, same top token {:.1} %, answers {:+.4} nats a token, {} right, decode {}",
            m.kv_cache_dtype,
            m.capacity,
            m.kl_mean,
            m.kl_max,
            m.same_top * 100.0,
            m.answer_nll_loss,
            m.answers_right,
            m.decode_ratio.map_or("not timed".into(), |r| format!("{r:.2} times as fast")),
        );
        for (i, layer) in m.layers.iter().enumerate() {
            println!("    layer {i:>3}: keys {:.2e}, values {:.2e}", layer.k, layer.v);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_zero_for_equal_and_known_for_two_tokens() {
        assert_eq!(kl(&[1.0, 2.0, -3.0], &[1.0, 2.0, -3.0]), 0.0);
        assert!(kl(&[1.0, 2.0], &[11.0, 12.0]) < 1e-9, "a shift changes nothing");
        // (1/2, 1/2) against (3/4, 1/4): ln 2 - ln(3) / 2.
        let got = kl(&[0.0, 0.0], &[3f32.ln(), 0.0]);
        assert!((got - (2f64.ln() - 3f64.ln() / 2.0)).abs() < 1e-7, "{got}");
    }

    /// On the built-in model: int8 finds every fact that bf16 finds, and int4 has the larger error in every layer.
    #[test]
    fn fewer_bits_lose_more_and_hold_more() {
        let model = engine_flags::load("builtin:recall").unwrap();
        let dir = std::env::temp_dir().join(format!("suanpan-eval-{}", std::process::id()));
        std::fs::write(&dir, "river stone morning ledger window copper harbour\n".repeat(20)).unwrap();
        let args = KvErrorArgs {
            model: "builtin:recall".into(),
            text: vec![dir.clone()],
            tokens: 900,
            kv_cache_dtype: vec![DType::I8, DType::I4],
            kv_cache_dtype_skip_layers: None,
            kv_cache_recent_tokens: 0,
            kv_cache_sink_tokens: 0,
            every: 64,
            facts: 2,
            decode: 0,
            block_size: 16,
            threads: Some(2),
            json: false,
        };
        let task = task(&model, &args).unwrap();
        assert_eq!((task.tokens.len(), task.questions.len()), (900, 2));
        let lanes = [DType::Bf16, DType::I8, DType::I4].map(|d| Lane::new(&model, &args, d, 1000).unwrap());
        let mut lanes = Vec::from(lanes);
        read(&mut lanes, &task.tokens, args.every).unwrap();
        let reports = report(&lanes, 900);
        assert!(reports[0].capacity > 1.8 && reports[1].capacity > 3.4);
        for (i8, i4) in reports[0].layers.iter().zip(&reports[1].layers) {
            assert!(i8.k < 0.02 && i8.v < 0.02 && i8.k <= i4.k && i8.v <= i4.v);
        }
        std::fs::remove_file(dir).unwrap();
    }
}
