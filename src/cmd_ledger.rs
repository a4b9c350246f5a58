//! `suanpan ledger`: what a call or a cache should cost, before anything runs. Arithmetic on shapes; no model runs.

use std::io::Write;

use anyhow::Context;
use clap::{Args, Subcommand};
use suanpan_base::{BadArgument, DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::cache::{CacheLayer, CacheRequest, MAX_LAYERS};
use suanpan_ledger::report::{CacheReport, KernelReport, KernelRequest, parse_bytes};
use suanpan_ledger::shapes::{NAMED_SHAPES, NamedShape};

use crate::cmd_ledger_parallel::ParallelArgs;

/// The ledger to print.
#[derive(Args)]
pub struct LedgerArgs {
    #[command(subcommand)]
    ledger: Ledger,
}

#[derive(Subcommand)]
enum Ledger {
    /// One attention call: what plain attention materialises beside what tiled attention moves, and the least times.
    Kernel(KernelArgs),
    /// A KV cache: bytes by element type and group size, pages, waste of the last page, and what fits in a memory.
    Cache(CacheArgs),
    /// One sequence over many devices: time, exposed messages, memory a device, utilisation and cost, simulated from the plan.
    Parallel(Box<ParallelArgs>),
}

#[derive(Args)]
struct KernelArgs {
    /// Query tokens.
    #[arg(long)]
    seqlen_q: usize,
    /// Key tokens.
    #[arg(long)]
    seqlen_k: usize,
    /// Query heads.
    #[arg(long, default_value_t = 1)]
    heads: usize,
    /// Key/value heads [default: as many as query heads].
    #[arg(long)]
    kv_heads: Option<usize>,
    /// Width of a query and a key.
    #[arg(long)]
    head_dim: usize,
    /// Width of a value and an output [default: --head-dim].
    #[arg(long)]
    head_dim_v: Option<usize>,
    /// A value is the first --head-dim-v elements of its key and is loaded once (latent attention, MLA).
    #[arg(long)]
    values_in_keys: bool,
    /// Element type: f32, bf16 or f16.
    #[arg(long, default_value = "bf16")]
    dtype: DType,
    /// Row i sees keys up to seqlen_k - seqlen_q + i.
    #[arg(long)]
    causal: bool,
    /// Each row sees this many keys, its own included (implies --causal).
    #[arg(long)]
    window: Option<usize>,
    /// Query tokens of a tile.
    #[arg(long, default_value_t = 128)]
    tile_q: usize,
    /// Print JSON: {"seqlen_q", …, "pairs", "plain", "tiled", "once", "machines": [{"machine", "plain", "tiled", "once"}]}.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct CacheArgs {
    /// A model file or folder, builtin:recall (or :chain, :count), hf:owner/name, or a named shape such as llama-3.1-8b.
    #[arg(long, required_unless_present_all = ["layers", "kv_heads", "head_dim"],
          conflicts_with_all = ["layers", "heads", "kv_heads", "head_dim", "head_dim_v", "values_in_keys", "window"])]
    model: Option<String>,
    /// Layers.
    #[arg(long, requires_all = ["kv_heads", "head_dim"])]
    layers: Option<usize>,
    /// Query heads [default: as many as kv heads].
    #[arg(long, requires = "layers")]
    heads: Option<usize>,
    /// Key/value heads.
    #[arg(long, requires = "layers")]
    kv_heads: Option<usize>,
    /// Width of a key.
    #[arg(long, requires = "layers")]
    head_dim: Option<usize>,
    /// Width of a value [default: --head-dim].
    #[arg(long, requires = "layers")]
    head_dim_v: Option<usize>,
    /// A value is the first --head-dim-v elements of its key and is stored once (latent attention, MLA).
    #[arg(long, requires = "layers")]
    values_in_keys: bool,
    /// Every layer sees this many keys, the query's own included.
    #[arg(long, requires = "layers")]
    window: Option<usize>,
    /// Tokens of each sequence.
    #[arg(long)]
    context: usize,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Tokens of a page.
    #[arg(long, default_value_t = 16)]
    page_size: usize,
    /// Memory to fill, such as 80GiB.
    #[arg(long, value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Print JSON: {"model", …, "pages", "waste_tokens_per_sequence", "dtypes": [{"dtype", "bytes", …}], "groups": […]}.
    #[arg(long)]
    json: bool,
}

/// Prints the ledger that `args` asks for.
pub fn run(args: &LedgerArgs) -> anyhow::Result<()> {
    // Not print!, which panics when the reader has gone (`| head`).
    std::io::stdout().lock().write_all(render(args)?.as_bytes()).context("standard output")
}

fn render(args: &LedgerArgs) -> anyhow::Result<String> {
    match &args.ledger {
        Ledger::Parallel(args) => args.render(),
        Ledger::Kernel(args) => {
            let report = args.report()?;
            Ok(if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { report.to_string() })
        }
        Ledger::Cache(args) => {
            let report = args.report()?;
            Ok(if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { report.to_string() })
        }
    }
}

impl KernelArgs {
    fn report(&self) -> Result<KernelReport, BadArgument> {
        let mask = match self.window {
            Some(0) => {
                let supported = "at least 1: a window counts the current token";
                return Err(BadArgument::new("kernel ledger", "window", 0, supported));
            }
            Some(window) => Mask::window(window),
            None if self.causal => Mask::CAUSAL,
            None => Mask::FULL,
        };
        let heads = HeadShape {
            num_q_heads: self.heads,
            num_kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim_qk: self.head_dim,
            head_dim_v: self.head_dim_v.unwrap_or(self.head_dim),
            values_in_keys: self.values_in_keys,
        };
        let len = SeqLen::new(self.seqlen_q, self.seqlen_k);
        KernelRequest { heads, mask, len, dtype: self.dtype, tile_q: self.tile_q }.report()
    }
}

impl CacheArgs {
    fn report(&self) -> anyhow::Result<CacheReport> {
        let (name, layers) = self.layers()?;
        let request = CacheRequest {
            layers,
            context_tokens: self.context,
            batch: self.batch,
            page_size: self.page_size,
            memory_bytes: self.memory,
        };
        Ok(CacheReport::new(name, &request)?)
    }

    /// The name to print and every layer of the model, or of the shape given by numbers.
    fn layers(&self) -> anyhow::Result<(String, Vec<CacheLayer>)> {
        if let Some(spec) = &self.model {
            return layers_of(spec);
        }
        // clap has seen to it that these three are given together.
        let (layers, kv_heads) = (self.layers.unwrap_or(0), self.kv_heads.unwrap_or(0));
        let head_dim_qk = self.head_dim.unwrap_or(0);
        if layers > MAX_LAYERS {
            let supported = format!("1 ..= {MAX_LAYERS}");
            return Err(BadArgument::new("cache ledger", "layers", layers, supported).into());
        }
        let heads = HeadShape {
            num_q_heads: self.heads.unwrap_or(kv_heads),
            num_kv_heads: kv_heads,
            head_dim_qk,
            head_dim_v: self.head_dim_v.unwrap_or(head_dim_qk),
            values_in_keys: self.values_in_keys,
        };
        Ok(("the given shape".into(), vec![CacheLayer { heads, window: self.window }; layers]))
    }
}

fn layers_of(spec: &str) -> anyhow::Result<(String, Vec<CacheLayer>)> {
    if let Some(shape) = NamedShape::find(spec) {
        return Ok((format!("{} ({})", shape.name, shape.source), shape.cache_layers()));
    }
    let options = suanpan_model::LoadOptions::default();
    let model = suanpan_model::load(spec, &options, &mut |_| ()).with_context(|| {
        let names: Vec<_> = NAMED_SHAPES.iter().map(|s| s.name).collect();
        format!("--model {spec} is no named shape ({}) and does not load", names.join(", "))
    })?;
    let config = &model.config;
    let layers = config.layers.iter().map(|l| CacheLayer { heads: config.heads, window: l.window }).collect();
    Ok((config.name.clone(), layers))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: LedgerArgs,
    }

    fn output(line: &str) -> anyhow::Result<String> {
        render(&Cli::try_parse_from(std::iter::once("ledger").chain(line.split_whitespace()))?.args)
    }

    fn json(line: &str) -> serde_json::Value {
        serde_json::from_str(&output(line).unwrap()).unwrap()
    }

    #[test]
    fn the_kernel_ledger_shows_what_plain_attention_materialises() {
        let line = "kernel --seqlen-q 16384 --seqlen-k 16384 --heads 1 --head-dim 128 --dtype bf16";
        let text = output(line).unwrap();
        assert!(text.contains("268,435,456 scores, 512 MiB a copy"), "{text}");
        let json = json(&format!("{line} --json"));
        assert_eq!(json["plain"]["scores"], 268_435_456u64);
        assert_eq!(json["plain"]["score_copy_bytes"], 512 << 20);
        assert_eq!(json["mask"], serde_json::json!({"causal": false, "window": null}));
    }

    #[test]
    fn the_cache_ledger_takes_names_and_numbers() {
        let line = "cache --model llama-3.1-8b --context 131072 --batch 8 --memory 80GiB --json";
        let named = json(line);
        assert_eq!(
            (&named["dtypes"][1]["dtype"], &named["dtypes"][1]["bytes"]),
            (&"bf16".into(), &(128u64 << 30).into())
        );
        assert_eq!(named["dtypes"][1]["fits"]["sequences"], 5);
        let given = json(
            "cache --layers 32 --heads 32 --kv-heads 8 --head-dim 128 --context 131072 --batch 8 --memory 80GiB --json",
        );
        assert_eq!((&named["dtypes"], &named["groups"]), (&given["dtypes"], &given["groups"]));
    }

    #[test]
    fn the_parallel_ledger_names_schemes_and_costs() {
        let line = "parallel --model llama-3.1-8b --context 64Ki --gpus 8 --price 2";
        let auto = json(&format!("{line} --json"));
        assert_eq!(auto["cp_size"], 8);
        assert!(auto["why"][0].as_str().unwrap().contains("takes least time"), "{auto}");
        let ring = json(&format!("{line} --scheme ring --training --json"));
        assert_eq!(ring["attention"][1]["scheme"], "ring");
        assert!(auto["seconds"].as_f64() < ring["seconds"].as_f64() && ring["cost"].as_f64().unwrap() > 0.0);
        let text = output(&format!("{line} --scheme hybrid:2 --document 4k --window 1024")).unwrap();
        assert!(text.contains("ring of ulysses groups of 2 over 8 ranks"), "{text}");
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (line, name) in [
            ("kernel --seqlen-q 1 --seqlen-k 1 --head-dim 8 --dtype fp8", "fp8"),
            ("kernel --seqlen-q 1 --seqlen-k 1 --head-dim 8 --dtype int4", "dtype"),
            ("kernel --seqlen-q 1 --seqlen-k 1 --head-dim 8 --window 0", "window"),
            ("kernel --seqlen-q 0 --seqlen-k 1 --head-dim 8", "seqlen_q"),
            ("kernel --seqlen-q 1 --seqlen-k 1 --head-dim 8 --heads 3 --kv-heads 2", "num_kv_heads"),
            ("kernel --seqlen-q 9999999999 --seqlen-k 9999999999 --head-dim 8", "tile_q"),
            ("kernel --seqlen-q 1 --seqlen-k 1 --head-dim 8 --flash", "--flash"),
            ("cache --context 1", "--model"),
            ("cache --layers 2 --context 1", "--kv-heads"),
            ("cache --model llama-3.1-8b --layers 2 --kv-heads 1 --head-dim 8 --context 1", "--layers"),
            ("cache --layers 99999999999 --kv-heads 1 --head-dim 8 --context 1", "layers"),
            ("cache --model llama-3.1-8b --context 1 --memory 80GB!", "80GB!"),
            ("cache --model llama-3.1-8b --context 0", "context"),
            ("cache --model no-such-model --context 1", "no-such-model"),
            ("parallel --context 1 --gpus 1", "--model"),
            ("parallel --model llama-3.1-8b --gpus 1", "--context"),
            ("parallel --model llama --context 1 --gpus 1", "model"),
            ("parallel --model llama-3.1-8b --context 9 --gpus 9 --tensor-parallel 5", "tensor_parallel"),
            ("parallel --model llama-3.1-8b --context 9 --gpus 4 --scheme hybrid:3", "ulysses_size"),
            ("parallel --model llama-3.1-8b --context 9 --gpus 4 --scheme rung", "rung"),
            ("parallel --model llama-3.1-8b --context 9x --gpus 4", "9x"),
            ("parallel --model llama-3.1-8b --context 9 --gpus 4 --link-gbs 0", "bytes_per_us"),
            ("parallel --model llama-3.1-8b --context 9 --gpus 4 --peak-tflops 0", "peak_tflops"),
        ] {
            let error = format!("{:#}", output(line).unwrap_err());
            assert!(error.contains(name), "{line}: {error}");
        }
    }
}
