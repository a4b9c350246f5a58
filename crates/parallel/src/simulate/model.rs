//! A whole model over many devices: the plan's attention, layer by layer, beside linear layers and tensor-parallel sums. One sequence, prefill
//! or a training step; deliberately no pipeline, no data parallelism, no optimizer step.

use std::fmt;

use suanpan_base::{BadArgument, HeadShape};

use super::{Constants, Forecast, simulate_plan};
use crate::mask::MaskSlices;
use crate::plan::{OP, ParallelPlan, Pass, Request, Scheme};
use crate::shard::Layout;

/// What of a model costs time beside attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Layers.
    pub layers: usize,
    /// Heads of every layer.
    pub heads: HeadShape,
    /// Width of a token between layers.
    pub hidden: usize,
    /// Weights that a token meets.
    pub params: f64,
}

/// (name, width between layers, weights that a token meets), each from the model's published config and card.
const WIDTHS: [(&str, usize, f64); 7] = [
    ("smollm2-135m", 576, 134.5e6),
    ("qwen3-0.6b", 1024, 0.6e9),
    ("llama-3.1-8b", 4096, 8.03e9),
    ("llama-3.1-70b", 8192, 70.6e9),
    ("llama-3.1-405b", 16384, 405.9e9),
    ("mistral-7b-v0.1", 4096, 7.24e9),
    ("gpt-oss-20b", 2880, 3.6e9),
];

impl Model {
    /// The model of that name among the ledger's named shapes.
    pub fn named(name: &str) -> Option<Model> {
        let shape = suanpan_ledger::shapes::NamedShape::find(name)?;
        let (_, hidden, params) = *WIDTHS.iter().find(|w| w.0 == name)?;
        Some(Model { layers: shape.layers, heads: shape.heads, hidden, params })
    }
}

/// Where and how it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// Devices.
    pub gpus: usize,
    /// Devices that share every layer's heads and weights; the sequence is shared by the rest, `gpus / tensor_parallel`.
    pub tensor_parallel: usize,
    /// FLOP/s of linear layers on one device.
    pub linear_flops_per_s: f64,
    /// FLOP/s that utilisation is a share of.
    pub peak_flops_per_s: f64,
    /// What attention and messages cost; links are those of the sequence's ranks.
    pub constants: Constants,
    /// Bytes a microsecond of a tensor-parallel sum on one device.
    pub sum_bytes_per_us: f64,
    /// Price of a device's hour, in any currency.
    pub price_per_hour: f64,
}

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The model.
    pub model: Model,
    /// The machine.
    pub cluster: Cluster,
    /// The sequence, and who sees whom.
    pub mask: &'a MaskSlices,
    /// Who holds what.
    pub layout: Layout,
    /// What travels; `None` = whatever takes least time.
    pub scheme: Option<Scheme>,
    /// A training step with full recomputation kept out: forward and backward; else prefill.
    pub training: bool,
}

/// What comes out.
#[derive(Clone, Debug)]
pub struct JobForecast {
    /// Ranks of the sequence.
    pub cp_size: usize,
    /// Scheme and time of one layer's attention, pass by pass.
    pub attention: Vec<(Pass, Scheme, Forecast)>,
    /// Why these schemes.
    pub why: Vec<String>,
    /// Linear layers, all of them.
    pub linear_us: f64,
    /// Tensor-parallel sums, all of them, none hidden.
    pub sums_us: f64,
    /// All together.
    pub all_us: f64,
    /// Waiting for the sequence's messages, all layers, on the rank that waits longest.
    pub exposed_us: f64,
    /// FLOPs of the model on this sequence, recomputation not counted.
    pub flops: f64,
    /// `flops` over what the devices could do in that time at peak.
    pub utilisation: f64,
    /// Bytes of a rank: one layer's buffers, every layer's input (training) or keys and values (prefill), weights (training: and their state,
    /// 18 bytes a weight over all devices).
    pub memory_bytes: f64,
    /// Devices times hours times price.
    pub cost: f64,
}

impl Job<'_> {
    fn heads(&self) -> Result<HeadShape, BadArgument> {
        let (h, tp) = (self.model.heads, self.cluster.tensor_parallel);
        if tp == 0
            || !h.num_q_heads.is_multiple_of(tp)
            || !self.cluster.gpus.is_multiple_of(tp)
            || self.cluster.gpus == 0
        {
            let asked = format!("{tp} of {} devices, {} heads", self.cluster.gpus, h.num_q_heads);
            return Err(BadArgument::new(
                OP,
                "tensor_parallel",
                asked,
                "a divisor of devices and of query heads",
            ));
        }
        let kv = if h.num_kv_heads >= tp { h.num_kv_heads / tp } else { 1 };
        let heads = HeadShape { num_q_heads: h.num_q_heads / tp, num_kv_heads: kv, ..h };
        heads.check(OP)?;
        Ok(heads)
    }

    /// Predicts the job.
    pub fn forecast(&self) -> Result<JobForecast, BadArgument> {
        let (c, m, heads) = (&self.cluster, &self.model, self.heads()?);
        let cp_size = c.gpus / c.tensor_parallel;
        let passes: &[Pass] = if self.training { &[Pass::Forward, Pass::Backward] } else { &[Pass::Forward] };
        let (mut attention, mut why, mut buffers) = (Vec::new(), Vec::new(), 0.0f64);
        for &pass in passes {
            let request = Request {
                heads,
                mask: self.mask,
                layout: self.layout,
                cp_size,
                scheme: self.scheme.unwrap_or(Scheme::Ring),
                pass,
                invariant_block: None,
            };
            let choice = match self.scheme {
                Some(_) => {
                    simulate_plan(&ParallelPlan::new(&request)?, &c.constants).map(|f| (request.scheme, f))?
                }
                None => {
                    let choice = crate::choose::choose(&request, &c.constants)?;
                    why.extend(choice.why);
                    (choice.scheme, choice.forecast)
                }
            };
            let plan = ParallelPlan::new(&Request { scheme: choice.0, ..request })?;
            buffers = (0..cp_size).map(|r| plan.buffer_bytes(r) as f64 / 4.0).fold(buffers, f64::max);
            attention.push((pass, choice.0, choice.1));
        }
        let tokens = self.mask.tokens() as f64;
        let (times, rounds) = if self.training { (3.0, 3.5) } else { (1.0, 1.0) };
        let pairs = self.mask.pairs() as f64 * m.heads.num_q_heads as f64 * m.layers as f64;
        let widths = (m.heads.head_dim_qk + m.heads.head_dim_v) as f64;
        let linear_flops = 2.0 * m.params * tokens * times;
        let flops = linear_flops + 2.0 * pairs * widths * rounds;
        let linear_us = linear_flops / c.gpus as f64 / c.linear_flops_per_s * 1e6;
        let tp = c.tensor_parallel as f64;
        let row_bytes = tokens / cp_size as f64 * m.hidden as f64 * 2.0;
        // Two sums a layer and pass, each sends 2 (tp - 1) / tp of its bytes.
        let sums = 2.0 * m.layers as f64 * if self.training { 2.0 } else { 1.0 };
        let sums_us = sums * row_bytes * 2.0 * (tp - 1.0) / tp / c.sum_bytes_per_us;
        let layers = m.layers as f64;
        let attention_us: f64 = attention.iter().map(|(_, _, f)| f.us * layers).sum();
        let all_us = attention_us + linear_us + sums_us;
        let kept = if self.training {
            row_bytes * layers
        } else {
            tokens / cp_size as f64 * heads.num_kv_heads as f64 * widths * 2.0 * layers
        };
        let weights = if self.training { 18.0 * m.params / c.gpus as f64 } else { 2.0 * m.params / tp };
        let seconds = all_us * 1e-6;
        Ok(JobForecast {
            cp_size,
            exposed_us: attention.iter().map(|(_, _, f)| f.exposed_us() * layers).sum(),
            attention,
            why,
            linear_us,
            sums_us,
            all_us,
            flops,
            utilisation: flops / (seconds * c.gpus as f64 * c.peak_flops_per_s),
            memory_bytes: buffers * c.constants.wire_bytes.0 + kept + weights,
            cost: seconds / 3600.0 * c.gpus as f64 * c.price_per_hour,
        })
    }
}

impl fmt::Display for JobForecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |us: f64| us * 1e-6;
        for line in &self.why {
            writeln!(f, "  {line}")?;
        }
        for (pass, scheme, forecast) in &self.attention {
            let of = |g: fn(&super::RankTime) -> f64| forecast.ranks.iter().map(g).fold(0.0, f64::max);
            writeln!(
                f,
                "attention {pass:?}, a layer: {scheme} over {} ranks, {:.1} us; work {:.1} us, exposed {:.1} us, carrying {:.1} us, {:.1} MB sent (each the rank with most)",
                self.cp_size,
                forecast.us,
                of(|r| r.work_us),
                of(|r| r.exposed_us),
                of(|r| r.carry_us),
                of(|r| r.sent_bytes) / 1e6
            )?;
        }
        writeln!(
            f,
            "all layers: {:.3} s; linear {:.3} s, tensor-parallel sums {:.3} s, exposed messages {:.3} s",
            seconds(self.all_us),
            seconds(self.linear_us),
            seconds(self.sums_us),
            seconds(self.exposed_us)
        )?;
        writeln!(
            f,
            "{:.3e} FLOPs, utilisation {:.1} %, memory {:.1} GB a device, cost {:.2}",
            self.flops,
            100.0 * self.utilisation,
            self.memory_bytes / 1e9,
            self.cost
        )
    }
}
