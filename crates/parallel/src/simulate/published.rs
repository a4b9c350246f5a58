//! Published rows, predicted from their hardware's constants: what others measured beside what the simulator says, misses shown.

use std::fmt;

use suanpan_base::{BadArgument, HeadShape, Mask};

use super::model::{Cluster, Job, Model};
use super::{Constants, Link, simulate_plan};
use crate::mask::MaskSlices;
use crate::plan::{ParallelPlan, Pass, Request, Scheme};
use crate::shard::Layout;

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What was measured, where.
    pub what: &'static str,
    /// Who says so.
    pub source: &'static str,
    /// Published, from least to most.
    pub published: (f64, f64),
    /// Predicted.
    pub predicted: f64,
    /// Of both.
    pub unit: &'static str,
}

impl Row {
    /// How far off: 0 inside the published range, else the share of its nearer end.
    pub fn miss(&self) -> f64 {
        let (low, high) = self.published;
        if self.predicted < low { self.predicted / low - 1.0 } else { (self.predicted / high - 1.0).max(0.0) }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = self.published;
        let published = if low == high { format!("{low}") } else { format!("{low} to {high}") };
        let miss =
            if self.miss() == 0.0 { "inside".into() } else { format!("{:+.1} %", 100.0 * self.miss()) };
        write!(
            f,
            "{}: published {published} {}, predicted {:.1}, {miss} ({})",
            self.what, self.unit, self.predicted, self.source
        )
    }
}

/// FlashAttention-2 on Hopper (350 / 300 TFLOP/s for long causal calls, its authors' own range), H800's NVLink: 200 GB/s one way, of which 160
/// reach a message; 25 us a grouped message (declared). Gradients travel in f32, keys in bf16. Every step's partial results are merged by
/// kernels of their own: about 1.5 KB a row and head forward (f32 out read and written, bf16 part read, twice), 1.3 KB backward, at 2.5 TB/s.
fn h800() -> Constants {
    let pair = |flops: f64, rate: f64| flops * 128.0 / rate;
    Constants {
        forward_pair_us: pair(4.0, 350e6),
        backward_pair_us: pair(10.0, 300e6),
        near: Link { message_us: 25.0, bytes_per_us: 160e3 },
        forward_row_us: 0.6e-3,
        backward_row_us: 0.5e-3,
        ..Constants::h200(128)
    }
}

fn plan(
    heads: HeadShape,
    mask: &MaskSlices,
    (layout, scheme, cp_size): (Layout, Scheme, usize),
    pass: Pass,
) -> Result<ParallelPlan, BadArgument> {
    ParallelPlan::new(&Request { heads, mask, layout, cp_size, scheme, pass, invariant_block: None })
}

/// Forward and backward on 8 ranks over the same FLOPs on one, in percent.
fn efficiency(layout: Layout) -> Result<f64, BadArgument> {
    let (heads, constants) = (HeadShape::new(32, 8, 128), h800());
    let mask = MaskSlices::packed(Mask::CAUSAL, &[8 * 8192])?;
    let (mut many, mut one) = (0.0, 0.0);
    for pass in [Pass::Forward, Pass::Backward] {
        many += simulate_plan(&plan(heads, &mask, (layout, Scheme::Ring, 8), pass)?, &constants)?.us;
        one += simulate_plan(&plan(heads, &mask, (layout, Scheme::Ring, 1), pass)?, &constants)?.us / 8.0;
    }
    Ok(100.0 * one / many)
}

/// 405B, one million tokens: 8 devices share heads, 16 nodes the sequence. Attention and FP8 linear layers at 540 TFLOP/s a device (attention's
/// rate as published for one device; linear declared the same), 45 GB/s between nodes.
fn million_tokens() -> Result<f64, BadArgument> {
    let pair = 4.0 * 128.0 / 540e6;
    let far = Link { message_us: 20.0, bytes_per_us: 45e3 };
    let constants = Constants { forward_pair_us: pair, node: 1, far, ..Constants::h200(128) };
    let cluster = Cluster {
        gpus: 128,
        tensor_parallel: 8,
        linear_flops_per_s: 540e12,
        peak_flops_per_s: 800e12,
        constants,
        sum_bytes_per_us: 300e3,
        price_per_hour: 0.0,
    };
    let mask = MaskSlices::packed(Mask::CAUSAL, &[1_000_000])?;
    let model = Model::named("llama-3.1-405b").expect("named");
    let (layout, scheme) = (Layout::Zigzag, Some(Scheme::Ring));
    let job = Job { model, cluster, mask: &mask, layout, scheme, training: false };
    Ok(job.forecast()?.all_us * 1e-6)
}

/// Documents of 1,024 to 16,384 tokens in turn, doubling: packed batches.
fn documents(tokens: usize) -> Vec<usize> {
    let (mut lengths, mut left) = (Vec::new(), tokens);
    while left > 0 {
        let n = (1024usize << (lengths.len() % 5)).min(left);
        lengths.push(n);
        left -= n;
    }
    lengths
}

/// TFLOP/s of one device under packed documents, 64 query heads over 8, 8,192 tokens a rank, forward.
fn packed(cp_size: usize, layout: Layout, scheme: Scheme) -> Result<f64, BadArgument> {
    let mask = MaskSlices::packed(Mask::CAUSAL, &documents(8192 * cp_size))?;
    let plan = plan(HeadShape::new(64, 8, 128), &mask, (layout, scheme, cp_size), Pass::Forward)?;
    let us = simulate_plan(&plan, &h800())?.us;
    Ok(mask.pairs() as f64 * 64.0 * 4.0 * 128.0 / us / cp_size as f64 / 1e6)
}

/// All rows. Known misses: a stripe's causal calls reach less of the kernel's rate than whole ones do, which no constant here says; all-gather is
/// simulated as messages between pairs of ranks, where NCCL lets each chunk enter a node once.
pub fn rows() -> Result<Vec<Row>, BadArgument> {
    let row = |what, source, published, predicted, unit| Row { what, source, published, predicted, unit };
    let readme = "ring-flash-attention, README, 8 x H800, 8k tokens a rank, 32/8 heads, forward and backward";
    let magi = "MagiAttention, benchmark charts, H100, packed causal, 64/8 heads, forward; document lengths not published";
    let meta = "arXiv 2411.01783, Llama-3 405B, 128 H100 over RDMA";
    Ok(vec![
        row(
            "ring, contiguous, 8 ranks",
            readme,
            (52.0, 54.0),
            efficiency(Layout::Contiguous)?,
            "% of one device",
        ),
        row("ring, zigzag, 8 ranks", readme, (89.8, 90.2), efficiency(Layout::Zigzag)?, "% of one device"),
        row("ring, stripe, 8 ranks", readme, (80.2, 82.9), efficiency(Layout::Stripe)?, "% of one device"),
        row("prefill of 1M tokens, 16 nodes", meta, (77.0, 77.0), million_tokens()?, "s"),
        row(
            "packed, ring, 8 ranks",
            magi,
            (88.0, 88.0),
            packed(8, Layout::DocumentZigzag, Scheme::Ring)?,
            "TFLOP/s",
        ),
        row(
            "packed, ring, 64 ranks",
            magi,
            (28.0, 28.0),
            packed(64, Layout::DocumentZigzag, Scheme::Ring)?,
            "TFLOP/s",
        ),
        row(
            "packed, all-gather, 8 ranks",
            magi,
            (288.0, 288.0),
            packed(8, Layout::DocumentZigzag, Scheme::AllGather)?,
            "TFLOP/s",
        ),
        row(
            "packed, all-gather, 64 ranks",
            magi,
            (180.0, 180.0),
            packed(64, Layout::DocumentZigzag, Scheme::AllGather)?,
            "TFLOP/s",
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_published_rows_is_predicted() {
        let rows = rows().unwrap();
        rows.iter().for_each(|row| println!("{row}"));
        let of = |i: usize| rows[i].predicted;
        assert!(rows[0].miss().abs() <= 0.1, "contiguous: {}", rows[0]);
        assert!(rows[1].miss().abs() <= 0.1, "zigzag: {}", rows[1]);
        assert!(of(0) < of(2), "a stripe is balanced, too: {}", rows[2]);
        assert!(rows[3].miss().abs() <= 0.1, "1M tokens: {}", rows[3]);
        assert!(
            of(5) < 0.5 * of(4),
            "packed documents: a ring over 64 ranks collapses: {} {}",
            rows[4],
            rows[5]
        );
    }
}
