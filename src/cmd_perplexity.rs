//! `suanpan eval perplexity`: how well a model predicts a text, in windows that each begin anew.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, ensure};
use suanpan_base::DType;
use suanpan_cache::{KvStorage, LayerSet};
use suanpan_model::Model;
use suanpan_model::forward::{ExecOptions, Executor, LogitRows, MAX_LOGIT_ROWS, StepBatch, StepSeq};

use crate::engine_flags::{self, Dtype};

#[derive(clap::Args)]
pub struct PerplexityArgs {
    /// The model: a file or folder, builtin:recall (or :chain, :count), or `hf:owner/name[@revision][:file.gguf]`.
    #[arg(long)]
    model: String,
    /// Text to read.
    #[arg(long)]
    text: PathBuf,
    /// Tokens of a window, the begin token of a model that writes one included. Each window begins anew; a last part that fills none is left out.
    #[arg(long, default_value_t = 8192)]
    window: usize,
    /// Windows to read [default: all].
    #[arg(long)]
    windows: Option<usize>,
    /// How weights are multiplied.
    #[arg(long, value_enum, default_value = "auto")]
    dtype: Dtype,
    /// How keys and values are stored.
    #[arg(long, default_value = "bf16")]
    kv_cache_dtype: DType,
    /// Tokens of one step.
    #[arg(long, default_value_t = 512)]
    chunk: usize,
    /// Threads [default: one for each core].
    #[arg(long)]
    threads: Option<usize>,
    /// Print JSON: {"model", "text", "window", "windows", "tokens", "scored", "nll_mean", "perplexity", "seconds", "dtype", "kv_cache_dtype", "nll":
    /// [mean of a window]}.
    #[arg(long)]
    json: bool,
}

/// A model with the cache of one window.
struct Reader {
    exec: Executor,
    kv: KvStorage,
    batch: StepBatch,
}

impl Reader {
    fn new(model: &Arc<Model>, args: &PerplexityArgs) -> anyhow::Result<Reader> {
        const PAGE: usize = 16;
        let threads = args.threads.unwrap_or(std::thread::available_parallelism().map_or(1, usize::from));
        let exec = Executor::new(
            Arc::clone(model),
            ExecOptions {
                precision: args.dtype.precision(),
                kv_dtype: args.kv_cache_dtype,
                kv_spared: LayerSet::NONE,
                kv_near: suanpan_cache::NearTokens::NONE,
                batch_invariant: false,
                threads,
                max_tokens: args.chunk,
                max_seqs: 1,
                max_model_len: args.window,
                page_size: PAGE,
            },
        )?;
        let kv = exec.kv_storage(args.window.div_ceil(PAGE), None)?;
        let batch = StepBatch {
            page_table: (0..kv.num_pages() as u32).collect(),
            page_table_stride: kv.num_pages(),
            ..StepBatch::default()
        };
        Ok(Reader { exec, kv, batch })
    }

    /// Sum over a window's tokens but the first of how surprising each was, in nats. `done` hears how many were read.
    fn nll(&mut self, tokens: &[u32], chunk: usize, done: &mut dyn FnMut(usize)) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for start in (0..tokens.len()).step_by(chunk) {
            let part = &tokens[start..tokens.len().min(start + chunk)];
            self.batch.tokens.clear();
            self.batch.tokens.extend_from_slice(part);
            self.batch.seqs.clear();
            self.batch.seqs.push(StepSeq {
                cached_len: start,
                extend_len: part.len(),
                logits: LogitRows::All,
            });
            self.exec.step(&self.batch, &mut self.kv)?;
            let vocab = self.exec.model().config.vocab_size;
            // The last token of the window has nothing to predict.
            let next = &tokens[start + 1..tokens.len().min(start + part.len() + 1)];
            for first in (0..next.len()).step_by(MAX_LOGIT_ROWS) {
                let rows = first..next.len().min(first + MAX_LOGIT_ROWS);
                let wanted = &next[rows.clone()];
                let logits = self.exec.logits(rows);
                sum += logits.chunks_exact(vocab).zip(wanted).map(|(l, &t)| surprise(l, t)).sum::<f64>();
            }
            done(part.len());
        }
        Ok(sum)
    }
}

/// −log of the probability of `token`.
fn surprise(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    // Lanes of f64, so that the sum of a large vocabulary is not one chain of additions.
    let mut lanes = [0.0f64; 8];
    for part in logits.chunks(8) {
        part.iter().zip(&mut lanes).for_each(|(x, lane)| *lane += f64::from((x - max).exp()));
    }
    f64::from(max) + lanes.iter().sum::<f64>().ln() - f64::from(logits[token as usize])
}

/// Windows of a text's ids, each with the begin token where the model writes one.
fn windows(model: &Model, text: &str, window: usize) -> anyhow::Result<Vec<Vec<u32>>> {
    let ids = model.tokenizer.encode(text, false)?;
    let begin: Vec<u32> = if model.config.add_bos { model.tokenizer.prefix().to_vec() } else { Vec::new() };
    ensure!(window > begin.len() + 1, "--window {window}: supported: at least {}", begin.len() + 2);
    let parts = ids.chunks_exact(window - begin.len());
    Ok(parts.map(|part| [begin.as_slice(), part].concat()).collect())
}

pub fn run(args: &PerplexityArgs) -> anyhow::Result<()> {
    ensure!(args.threads != Some(0), "--threads 0: supported: at least 1");
    let model = engine_flags::load(&args.model)?;
    let text =
        std::fs::read_to_string(&args.text).with_context(|| format!("--text {}", args.text.display()))?;
    let mut windows = windows(&model, &text, args.window)?;
    ensure!(!windows.is_empty(), "--window {}: the text has fewer tokens", args.window);
    windows.truncate(args.windows.unwrap_or(usize::MAX).max(1));
    let mut reader = Reader::new(&model, args)?;
    let bar = engine_flags::prefill_bar();
    bar.set_length((windows.len() * args.window) as u64);
    let start = Instant::now();
    let mut nll = Vec::new();
    for window in &windows {
        let sum = reader.nll(window, args.chunk, &mut |n| bar.inc(n as u64))?;
        nll.push(sum / (window.len() - 1) as f64);
    }
    bar.finish_and_clear();
    print(args, &nll, start.elapsed().as_secs_f64())
}

fn print(args: &PerplexityArgs, nll: &[f64], seconds: f64) -> anyhow::Result<()> {
    let mean = nll.iter().sum::<f64>() / nll.len() as f64;
    let (tokens, scored) = (nll.len() * args.window, nll.len() * (args.window - 1));
    if args.json {
        let report = serde_json::json!({
            "model": args.model, "text": args.text, "window": args.window, "windows": nll.len(), "tokens": tokens, "scored": scored,
            "nll_mean": mean, "perplexity": mean.exp(), "seconds": seconds, "dtype": args.dtype.precision().name(),
            "kv_cache_dtype": args.kv_cache_dtype.to_string(), "nll": nll,
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    for (i, nll) in nll.iter().enumerate() {
        println!("window {i}: {:.4}", nll.exp());
    }
    println!("perplexity {:.4} over {scored} tokens in {} windows of {}", mean.exp(), nll.len(), args.window);
    println!("{:.1} tokens a second, logits of every token included", tokens as f64 / seconds);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surprise_is_the_log_of_a_softmax() {
        let logits: Vec<f32> = (0..19).map(|i| (i as f32 * 0.7).sin() * 4.0).collect();
        let all: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        for (t, &x) in logits.iter().enumerate() {
            assert!((surprise(&logits, t as u32) - (all.ln() - f64::from(x))).abs() < 1e-6);
        }
    }

    #[test]
    fn chunks_of_a_window_do_not_change_its_perplexity() {
        let model = engine_flags::load("builtin:recall").unwrap();
        let tokens: Vec<u32> = (0..150).map(|i| (i * 37 % 250) as u32).collect();
        let run = |chunk: usize| {
            let args = PerplexityArgs {
                model: "builtin:recall".into(),
                text: PathBuf::new(),
                window: 150,
                windows: None,
                dtype: Dtype::Float32,
                kv_cache_dtype: DType::F32,
                chunk,
                threads: Some(1),
                json: false,
            };
            Reader::new(&model, &args).unwrap().nll(&tokens, chunk, &mut |_| {}).unwrap()
        };
        let whole = run(150);
        assert!(whole.is_finite() && whole > 0.0);
        for chunk in [1, 64, 65, 149] {
            assert!((run(chunk) / whole - 1.0).abs() < 1e-5, "chunks of {chunk}");
        }
    }
}
