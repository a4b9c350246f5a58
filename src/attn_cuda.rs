//! Attention on a Hopper device, timed through the same problem → plan → run as on the CPU: each row checks its answer on sampled rows
//! before the clock starts; FLOPs and bytes come from the plan's ledger entries.

use std::fmt;

use suanpan_attn::reference::{self, Spec};
use suanpan_attn::{KvLayout, Limits, Problem, Strides};
use suanpan_base::{BadArgument, DType, HeadShape, Mask, SeqLen};
use suanpan_cuda::driver::{Gpu, Memory};
use suanpan_cuda::plan::{Args, Bound, Device, Extras, KeyCodes, Plan, Scales, Slower, View, Workspace};
use suanpan_cuda::testing::{Rng, from_bits, graph_of, matrix_peak, time_us};
use suanpan_cuda::{Dtype, Error};
use suanpan_ledger::Entry;

/// Tokens of a prefill row, all sequences together; columns of its heads.
const TOKENS: usize = 32_768;
const COLUMNS: usize = 2048;

/// What to time.
#[derive(Clone, Debug)]
pub struct Config {
    /// Prefill lengths.
    pub lengths: Vec<usize>,
    /// Head widths of the prefill rows.
    pub head_dims: Vec<usize>,
    /// Keys of the decode rows; 0 leaves them out.
    pub decode_keys: usize,
    /// Timed launches a row; 0 checks and predicts alone (for `ncu`).
    pub repeats: usize,
}

/// Ceilings measured in the same run.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Of a bare loop of bf16 products.
    pub flops_per_s: f64,
    /// Of a plain read.
    pub bytes_per_s: f64,
}

/// One row.
#[derive(Clone, Debug)]
pub struct Row {
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// What was asked.
    pub problem: Problem,
    /// Sequences.
    pub batch: usize,
    /// Lengths of each.
    pub len: SeqLen,
    /// The plan's words.
    pub plan: String,
    /// The kernel's.
    pub kernel: String,
    /// Median microseconds; `None` without timed launches.
    pub us: Option<f64>,
    /// What the ledger expects of device memory and arithmetic.
    pub predicted: Entry,
    /// Largest error against the oracle on the sampled rows.
    pub error: f64,
    /// Share of the measured peak that bounds the phase: arithmetic of prefill, memory of decode.
    pub share: Option<f64>,
}

impl Row {
    /// FLOPs a second.
    pub fn flops_per_s(&self) -> Option<f64> {
        self.us.map(|us| self.predicted.flops as f64 / us * 1e6)
    }

    /// Predicted bytes a second.
    pub fn bytes_per_s(&self) -> Option<f64> {
        let bytes = self.predicted.device_read_bytes + self.predicted.device_write_bytes;
        self.us.map(|us| bytes as f64 / us * 1e6)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (h, p) = (self.problem.heads, &self.problem);
        write!(
            f,
            "{:<7} {:>4} heads {}/{} d {:<3} B {:<3} q {:<5} k {:<6} {:<6} {:<10}",
            self.phase,
            p.kv_dtype,
            h.num_q_heads,
            h.num_kv_heads,
            h.head_dim_qk,
            self.batch,
            self.len.seqlen_q,
            self.len.seqlen_k,
            p.mask.to_string(),
            p.kv.to_string(),
        )?;
        if let (Some(us), Some(flops), Some(bytes), Some(share)) =
            (self.us, self.flops_per_s(), self.bytes_per_s(), self.share)
        {
            write!(
                f,
                " {us:>9.1} us {:>6.1} TFLOP/s {:>5.2} TB/s {:>4.0} % of peak",
                flops / 1e12,
                bytes / 1e12,
                share * 100.0
            )?;
        }
        write!(
            f,
            " reads {} writes {} bytes error {:.1e} {}",
            self.predicted.device_read_bytes, self.predicted.device_write_bytes, self.error, self.kernel
        )
    }
}

/// Times every row of `config` on the first device.
pub fn run(config: &Config) -> Result<(Option<Peaks>, Vec<Row>), Error> {
    let gpu = Gpu::open(0, None)?;
    let peaks = match config.repeats {
        0 => None,
        _ => Some(Peaks { flops_per_s: matrix_peak(&gpu)?, bytes_per_s: read_peak(&gpu)? }),
    };
    let mut rows = Vec::new();
    for &d in &config.head_dims {
        for mask in [Mask::FULL, Mask::CAUSAL] {
            for &n in &config.lengths {
                let heads = COLUMNS / d.max(1);
                let problem = bf16(HeadShape::new(heads, heads, d), mask, KvLayout::Contiguous);
                let batch = (TOKENS / n.max(1)).max(1);
                rows.push(time(&gpu, config, peaks, ("prefill", problem), batch, SeqLen::new(n, n))?);
            }
        }
    }
    let decode = if config.decode_keys == 0 { &[][..] } else { &[(1, 16), (16, 16), (16, 64)] };
    for &(batch, page_size) in decode {
        let problem = bf16(HeadShape::new(32, 8, 128), Mask::CAUSAL, KvLayout::Paged { page_size });
        let len = SeqLen::extend(config.decode_keys.saturating_sub(1), 1);
        rows.push(time(&gpu, config, peaks, ("decode", problem), batch, len)?);
    }
    Ok((peaks, rows))
}

fn bf16(heads: HeadShape, mask: Mask, kv: KvLayout) -> Problem {
    Problem { q_dtype: DType::Bf16, kv_dtype: DType::Bf16, kv, ..Problem::new(heads, mask) }
}

/// A plain read of 2 GB, in bytes a second.
fn read_peak(gpu: &Gpu) -> Result<f64, Error> {
    let bytes = 2u64 << 30;
    let memory = Memory::new(gpu, bytes as usize)?;
    let us = time_us(gpu, 9, 3, || memory.read_all(gpu, 0, bytes))?;
    Ok(bytes as f64 / us * 1e6)
}

/// The buffers of a row.
struct Subject {
    plan: Plan,
    batch: usize,
    len: SeqLen,
    page_size: Option<usize>,
    table: Vec<u32>,
    q: Memory,
    k: Memory,
    v: Memory,
    out: Memory,
    lse: Memory,
}

impl Subject {
    fn new(gpu: &Gpu, problem: &Problem, batch: usize, len: SeqLen) -> Result<Subject, Error> {
        let limits =
            Limits { max_seqs: batch, max_total_q: batch * len.seqlen_q, max_seqlen_k: len.seqlen_k };
        let mut plan = Plan::new(problem, Device { num_sms: gpu.num_sms }, limits, Slower::Refuse)?;
        plan.schedule(&vec![len; batch])?;
        let h = problem.heads;
        let page_size = match problem.kv {
            KvLayout::Contiguous => None,
            KvLayout::Paged { page_size } => Some(page_size),
        };
        let pages = page_size.map_or(0, |p| batch * len.seqlen_k.div_ceil(p));
        let mut table: Vec<u32> = (0..pages as u32).collect();
        let mut rng = Rng::new(3);
        (1..pages).rev().for_each(|i| table.swap(i, rng.below(i + 1)));
        let slots = page_size.map_or(batch * len.seqlen_k, |p| pages * p);
        let random = |elements: usize, seed: u64| {
            let memory = Memory::new(gpu, elements * 2)?;
            memory.fill_normal(gpu, seed, Dtype::Bf16)?;
            Ok::<_, Error>(memory)
        };
        let rows = batch * len.seqlen_q * h.num_q_heads;
        let out = Memory::new(gpu, rows * h.head_dim_v * 2)?;
        out.fill(gpu, 0x7fff_7fff)?;
        Ok(Subject {
            plan,
            batch,
            len,
            page_size,
            table,
            q: random(rows * h.head_dim_qk, 1)?,
            k: random(slots * h.num_kv_heads * h.head_dim_qk, 2)?,
            v: random(slots * h.num_kv_heads * h.head_dim_v, 3)?,
            out,
            lse: Memory::new(gpu, rows * 4)?,
        })
    }

    fn args(&self) -> Args<'_> {
        let h = self.plan.problem().heads;
        let view = |m: &Memory, bytes: u64| View { address: m.address, elements: m.bytes as u64 / bytes };
        let strides = |d: usize| {
            let token = h.num_kv_heads * d;
            Strides { token, head: d, page: token * self.page_size.unwrap_or(0) }
        };
        Args {
            q: view(&self.q, 2),
            q_strides: (h.num_q_heads * h.head_dim_qk, h.head_dim_qk),
            k: view(&self.k, 2),
            k_strides: strides(h.head_dim_qk),
            v: view(&self.v, 2),
            v_strides: strides(h.head_dim_v),
            page_table: &self.table,
            page_table_stride: self.table.len() / self.batch.max(1),
            kv_scales: Scales::default(),
            key_codes: KeyCodes::default(),
            extras: Extras::default(),
            out: view(&self.out, 2),
            out_strides: (h.num_q_heads * h.head_dim_v, h.head_dim_v),
            lse: view(&self.lse, 4),
        }
    }

    /// Rows of one kv head of sequence `seq` of K or V, in f64.
    fn stored(&self, memory: &Memory, seq: usize, kv_head: usize, d: usize) -> Result<Vec<f64>, Error> {
        let row = self.plan.problem().heads.num_kv_heads * d;
        let page = self.page_size.unwrap_or(self.len.seqlen_k);
        let per_seq = self.len.seqlen_k.div_ceil(page);
        let mut out = Vec::new();
        for at in 0..per_seq {
            let id = if self.page_size.is_some() { self.table[seq * per_seq + at] as usize } else { seq };
            let bits: Vec<u16> = memory.read(id * page * row * 2, page * row)?;
            let tokens = page.min(self.len.seqlen_k - at * page);
            let head = |t: usize| &bits[t * row + kv_head * d..][..d];
            out.extend((0..tokens).flat_map(head).map(|x| f64::from(from_bits(Dtype::Bf16, *x))));
        }
        Ok(out)
    }

    /// Largest error over a few rows of the first and the last sequence and head.
    fn error(&self) -> Result<f64, Error> {
        let p = self.plan.problem();
        let (h, d) = (p.heads, p.heads.head_dim_qk);
        let one = HeadShape::new(1, 1, d);
        let spec = Spec::new(one, p.mask, f64::from(p.scale()));
        let mut worst = 0.0f64;
        for (seq, head) in [(0, 0), (self.batch - 1, h.num_q_heads - 1)] {
            let kv_head = head / h.group_size();
            let (k, v) = (self.stored(&self.k, seq, kv_head, d)?, self.stored(&self.v, seq, kv_head, d)?);
            for i in [0, self.len.seqlen_q / 2, self.len.seqlen_q - 1] {
                let at = ((seq * self.len.seqlen_q + i) * h.num_q_heads + head) * d * 2;
                let numbers = |m: &Memory| {
                    let bits: Vec<u16> = m.read(at, d)?;
                    Ok::<_, Error>(
                        bits.iter().map(|x| f64::from(from_bits(Dtype::Bf16, *x))).collect::<Vec<_>>(),
                    )
                };
                let mut q = vec![0.0; self.len.seqlen_q * d];
                q[i * d..(i + 1) * d].copy_from_slice(&numbers(&self.q)?);
                let mut o = vec![0.0; d];
                reference::attention_row_f64(&spec, self.len, i, 0, &q, &k, &v, &mut o);
                for (got, want) in numbers(&self.out)?.iter().zip(&o) {
                    let error = (got - want).abs();
                    // A NaN must not pass for a small error.
                    worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
                }
            }
        }
        Ok(worst)
    }
}

fn time(
    gpu: &Gpu,
    config: &Config,
    peaks: Option<Peaks>,
    (phase, problem): (&'static str, Problem),
    batch: usize,
    len: SeqLen,
) -> Result<Row, Error> {
    let subject = Subject::new(gpu, &problem, batch, len)?;
    let ws = Workspace::new(gpu, &subject.plan)?;
    let bound = Bound::new(gpu, &subject.plan, &subject.args(), &ws)?;
    // SAFETY: the buffers of `subject` and `ws` cover the call and outlive every wait below.
    let launch = || unsafe { bound.launch(gpu) };
    launch()?;
    gpu.synchronize()?;
    let error = subject.error()?;
    if error > 2e-2 {
        return Err(BadArgument::new("attention bench", "error", format!("{error:e}"), "at most 2e-2").into());
    }
    let us = match (config.repeats, phase) {
        (0, _) => None,
        (n, "decode") => {
            // As a server would: one graph, replayed.
            let graph = graph_of(gpu, launch)?;
            let replay = || graph.launch().map_err(suanpan_cuda::driver::call("cuGraphLaunch"));
            Some(time_us(gpu, n.max(31), 5, replay)?)
        }
        (n, _) => {
            // 0.15 s of work first: the power limit then holds the clock where it stays.
            let once = time_us(gpu, 3, 1, launch)?;
            Some(time_us(gpu, n, (150_000.0 / once) as usize, launch)?)
        }
    };
    let choice = subject.plan.choice().map(|c| c.kernel.to_string()).unwrap_or_default();
    let plan = subject.plan.to_string();
    let predicted = subject.plan.predicted_device();
    let mut row = Row { phase, problem, batch, len, plan, kernel: choice, us, predicted, error, share: None };
    row.share = peaks.and_then(|p| match phase {
        "decode" => row.bytes_per_s().map(|x| x / p.bytes_per_s),
        _ => row.flops_per_s().map(|x| x / p.flops_per_s),
    });
    Ok(row)
}
