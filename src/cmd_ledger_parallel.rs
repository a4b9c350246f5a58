//! `suanpan ledger parallel`: what one sequence over many devices should take, from the plan that would run and from declared constants.

use clap::Args;
use serde_json::json;
use suanpan_base::{BadArgument, HeadShape, Mask};
use suanpan_parallel::simulate::model::{Cluster, Job, JobForecast, Model};
use suanpan_parallel::simulate::{Constants, Link, published};
use suanpan_parallel::{Layout, MaskSlices, Scheme};

/// The name under which an option is refused.
const OP: &str = "parallel ledger";

/// One sequence over many devices.
#[derive(Args)]
pub struct ParallelArgs {
    /// Predict published rows from their hardware's constants, print the misses, and ask for nothing else.
    #[arg(long)]
    published: bool,
    /// A named shape such as llama-3.1-405b.
    #[arg(long, required_unless_present_any = ["layers", "published"],
          conflicts_with_all = ["layers", "heads", "kv_heads", "head_dim", "hidden", "params"])]
    model: Option<String>,
    /// Layers.
    #[arg(long, requires_all = ["heads", "kv_heads", "head_dim", "hidden", "params"])]
    layers: Option<usize>,
    /// Query heads.
    #[arg(long, requires = "layers")]
    heads: Option<usize>,
    /// Key/value heads.
    #[arg(long, requires = "layers")]
    kv_heads: Option<usize>,
    /// Width of a head.
    #[arg(long, requires = "layers")]
    head_dim: Option<usize>,
    /// Width of a token between layers.
    #[arg(long, requires = "layers")]
    hidden: Option<usize>,
    /// Weights that a token meets, such as 8.03e9.
    #[arg(long, requires = "layers")]
    params: Option<f64>,
    /// Tokens of the sequence: a number, or one with k, M (powers of 1,000), Ki, Mi (of 1,024).
    #[arg(long, value_parser = parse_tokens, required_unless_present = "published")]
    context: Option<usize>,
    /// The sequence is documents of so many tokens, packed [default: one].
    #[arg(long, value_parser = parse_tokens)]
    document: Option<usize>,
    /// Each token sees so many keys, its own included.
    #[arg(long)]
    window: Option<usize>,
    /// Devices.
    #[arg(long, required_unless_present = "published")]
    gpus: Option<usize>,
    /// Devices that share heads and weights; the rest share the sequence.
    #[arg(long, default_value_t = 1)]
    tensor_parallel: usize,
    /// ring, ring-query, all-gather, halo, ulysses or hybrid:N [default: the fastest one, with the reason].
    #[arg(long, value_parser = parse_scheme)]
    scheme: Option<Scheme>,
    /// contiguous, stripe, zigzag or document-zigzag.
    #[arg(long, value_parser = parse_layout, default_value = "zigzag")]
    layout: Layout,
    /// A training step, forward and backward; else prefill.
    #[arg(long)]
    training: bool,
    /// TFLOP/s of attention on one device, forward; backward runs at three quarters of it.
    #[arg(long, default_value_t = 600.0)]
    attention_tflops: f64,
    /// TFLOP/s of linear layers on one device.
    #[arg(long, default_value_t = 600.0)]
    linear_tflops: f64,
    /// TFLOP/s that utilisation is a share of.
    #[arg(long, default_value_t = 989.5)]
    peak_tflops: f64,
    /// GB/s of one direction between devices of a node (measured between two H200: 313).
    #[arg(long, default_value_t = 313.0)]
    link_gbs: f64,
    /// Microseconds of a small message in a node (measured between two H200: 140).
    #[arg(long, default_value_t = 140.0)]
    message_us: f64,
    /// GB/s of a device's link to other nodes (declared).
    #[arg(long, default_value_t = 45.0)]
    far_link_gbs: f64,
    /// Microseconds of a message between nodes (declared).
    #[arg(long, default_value_t = 20.0)]
    far_message_us: f64,
    /// Devices of a node.
    #[arg(long, default_value_t = 8)]
    node: usize,
    /// Price of a device's hour.
    #[arg(long, default_value_t = 0.0)]
    price: f64,
    /// Print JSON: {"cp_size", "seconds", "exposed_seconds", "utilisation", "memory_bytes", "cost", "attention": [{"pass", "scheme", …}]}.
    #[arg(long)]
    json: bool,
}

fn parse_tokens(text: &str) -> Result<usize, String> {
    let suffixes = [("Mi", 1 << 20), ("Ki", 1 << 10), ("M", 1_000_000), ("k", 1000)];
    let found = suffixes.iter().find_map(|(suffix, times)| Some((text.strip_suffix(suffix)?, *times)));
    let (digits, times) = found.unwrap_or((text, 1));
    let number: usize =
        digits.parse().map_err(|_| format!("{text}: a number of tokens, such as 131072, 128Ki or 1M"))?;
    number.checked_mul(times).ok_or_else(|| format!("{text}: too many tokens"))
}

fn parse_layout(text: &str) -> Result<Layout, String> {
    let names = ["contiguous", "stripe", "zigzag", "document-zigzag"];
    let at = names.iter().position(|name| *name == text);
    at.map(|i| Layout::ALL[i]).ok_or_else(|| format!("{text}: {} are supported", names.join(", ")))
}

fn parse_scheme(text: &str) -> Result<Scheme, String> {
    if let Some(size) = text.strip_prefix("hybrid:").and_then(|size| size.parse().ok()) {
        return Ok(Scheme::Hybrid(size));
    }
    let names = ["ring", "ring-query", "all-gather", "halo", "ulysses"];
    let at = names.iter().position(|name| *name == text);
    at.map(|i| Scheme::ALL[i])
        .ok_or_else(|| format!("{text}: {} and hybrid:N are supported", names.join(", ")))
}

impl ParallelArgs {
    fn model(&self) -> Result<(String, Model), BadArgument> {
        if let Some(name) = &self.model {
            let names: Vec<_> = suanpan_ledger::shapes::NAMED_SHAPES.iter().map(|s| s.name).collect();
            let model =
                Model::named(name).ok_or_else(|| BadArgument::new(OP, "model", name, names.join(", ")))?;
            return Ok((name.clone(), model));
        }
        // clap has seen to it that these are given together.
        let of = |x: Option<usize>| x.unwrap_or(0);
        let heads = HeadShape::new(of(self.heads), of(self.kv_heads), of(self.head_dim));
        let params = self.params.unwrap_or(0.0);
        if !params.is_finite() || params < 0.0 {
            return Err(BadArgument::new(OP, "params", params, "0 or more"));
        }
        Ok((
            "the given shape".into(),
            Model { layers: of(self.layers), heads, hidden: of(self.hidden), params },
        ))
    }

    fn cluster(&self, head_dim: usize) -> Result<Cluster, BadArgument> {
        for (field, x) in [
            ("attention_tflops", self.attention_tflops),
            ("linear_tflops", self.linear_tflops),
            ("peak_tflops", self.peak_tflops),
        ] {
            if !x.is_finite() || x <= 0.0 {
                return Err(BadArgument::new(OP, field, x, "above 0"));
            }
        }
        let pair = |flops: f64, tflops: f64| flops * head_dim as f64 / (tflops * 1e6);
        // Neighbouring ranks of the sequence stand apart by the devices that share heads.
        let node = (self.node / self.tensor_parallel.max(1)).max(1);
        let constants = Constants {
            forward_pair_us: pair(4.0, self.attention_tflops),
            backward_pair_us: pair(10.0, 0.75 * self.attention_tflops),
            near: Link { message_us: self.message_us, bytes_per_us: self.link_gbs * 1e3 },
            far: Link { message_us: self.far_message_us, bytes_per_us: self.far_link_gbs * 1e3 },
            node,
            ..Constants::h200(head_dim)
        };
        Ok(Cluster {
            gpus: self.gpus.unwrap_or(0),
            tensor_parallel: self.tensor_parallel,
            linear_flops_per_s: self.linear_tflops * 1e12,
            peak_flops_per_s: self.peak_tflops * 1e12,
            constants,
            sum_bytes_per_us: self.link_gbs * 1e3,
            price_per_hour: self.price,
        })
    }

    fn forecast(&self) -> Result<(String, JobForecast), BadArgument> {
        let (name, model) = self.model()?;
        let context = self.context.unwrap_or(0);
        let document = self.document.unwrap_or(context.max(1));
        if document == 0 || self.window == Some(0) {
            let field = if document == 0 { "document" } else { "window" };
            return Err(BadArgument::new(OP, field, 0, "at least 1"));
        }
        let mut lengths = vec![document; context / document];
        let rest = context % document;
        lengths.extend((rest > 0).then_some(rest));
        let mask = self.window.map_or(Mask::CAUSAL, Mask::window);
        let mask = MaskSlices::packed(mask, &lengths)?;
        let cluster = self.cluster(model.heads.head_dim_qk)?;
        let (layout, scheme, training) = (self.layout, self.scheme, self.training);
        Ok((name, Job { model, cluster, mask: &mask, layout, scheme, training }.forecast()?))
    }

    /// What to print.
    pub fn render(&self) -> anyhow::Result<String> {
        if self.published {
            let lines = published::rows()?.into_iter().map(|row| format!("{row}\n"));
            return Ok(lines.collect());
        }
        let (name, forecast) = self.forecast()?;
        if !self.json {
            let tokens = self.context.unwrap_or(0);
            let gpus = self.gpus.unwrap_or(0);
            return Ok(format!(
                "{name}, {tokens} tokens on {gpus} devices, {} layout\n{forecast}",
                self.layout
            ));
        }
        let attention = forecast.attention.iter().map(|(pass, scheme, f)| {
            json!({"pass": format!("{pass:?}"), "scheme": scheme.to_string(), "layer_us": f.us, "exposed_us": f.exposed_us()})
        });
        let report = json!({
            "model": name,
            "cp_size": forecast.cp_size,
            "seconds": forecast.all_us * 1e-6,
            "linear_seconds": forecast.linear_us * 1e-6,
            "sums_seconds": forecast.sums_us * 1e-6,
            "exposed_seconds": forecast.exposed_us * 1e-6,
            "flops": forecast.flops,
            "utilisation": forecast.utilisation,
            "memory_bytes": forecast.memory_bytes,
            "cost": forecast.cost,
            "attention": attention.collect::<Vec<_>>(),
            "why": forecast.why,
        });
        Ok(serde_json::to_string_pretty(&report)? + "\n")
    }
}
