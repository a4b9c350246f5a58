//! Attention on a Hopper device, timed through the same problem → plan → run as on the CPU: each row checks its answer on sampled rows
//! before the clock starts; FLOPs and bytes come from the plan's ledger entries.

use std::fmt;

use suanpan_attn::{KvLayout, Problem};
use suanpan_base::{BadArgument, DType, HeadShape, Mask, ScaleGrain, SeqLen};
use suanpan_cuda::Error;
use suanpan_cuda::driver::{Gpu, Memory};
use suanpan_cuda::plan::{Bound, Kernel, Workspace};
use suanpan_cuda::testing::{graph_of, matrix_peak, time_us};
use suanpan_ledger::{Entry, kernel};

use subject::Subject;

mod subject;

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
    /// Stored types: bf16 as rows and pages, the quantised ones in pages that `append` writes.
    pub kv_dtypes: Vec<DType>,
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
    /// `prefill`, `decode`, or `append`: new K and V into the pages of one of them.
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
    /// Kernels that a launch puts on the device.
    pub launches: usize,
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
    for &dtype in &config.kv_dtypes {
        let cells = if dtype == DType::Bf16 { bf16_cells(config) } else { quantised_cells(config, dtype) };
        for cell in &cells {
            time(&gpu, config, peaks, cell, &mut rows)?;
        }
    }
    Ok((peaks, rows))
}

/// A row to be.
struct Cell {
    phase: &'static str,
    problem: Problem,
    batch: usize,
    len: SeqLen,
}

fn problem(
    heads: HeadShape,
    mask: Mask,
    kv: KvLayout,
    (kv_dtype, kv_scales): (DType, ScaleGrain),
) -> Problem {
    Problem { q_dtype: DType::Bf16, kv_dtype, kv_scales, kv, ..Problem::new(heads, mask) }
}

fn bf16_cells(config: &Config) -> Vec<Cell> {
    let stored = (DType::Bf16, ScaleGrain::None);
    let mut cells = Vec::new();
    for &d in &config.head_dims {
        for mask in [Mask::FULL, Mask::CAUSAL] {
            for &n in &config.lengths {
                let heads = COLUMNS / d.max(1);
                let problem = problem(HeadShape::new(heads, heads, d), mask, KvLayout::Contiguous, stored);
                let batch = (TOKENS / n.max(1)).max(1);
                cells.push(Cell { phase: "prefill", problem, batch, len: SeqLen::new(n, n) });
            }
        }
    }
    cells.extend(decode_cells(config, stored));
    cells
}

/// A scale a token and head; one a head for prefill over e4m3, as its own forward takes them.
fn quantised_cells(config: &Config, dtype: DType) -> Vec<Cell> {
    let of_prefill = if dtype == DType::E4m3 { ScaleGrain::Head } else { ScaleGrain::Token };
    let pages = KvLayout::Paged { page_size: 64 };
    let problem = problem(HeadShape::new(16, 4, 128), Mask::CAUSAL, pages, (dtype, of_prefill));
    let prefill = |&n: &usize| {
        let batch = (TOKENS / n.max(1)).max(1);
        Cell { phase: "prefill", problem, batch, len: SeqLen::new(n, n) }
    };
    config.lengths.iter().map(prefill).chain(decode_cells(config, (dtype, ScaleGrain::Token))).collect()
}

fn decode_cells(config: &Config, stored: (DType, ScaleGrain)) -> Vec<Cell> {
    let shapes = if config.decode_keys == 0 { &[][..] } else { &[(1, 16), (16, 16), (16, 64)] };
    let cell = |&(batch, page_size): &(usize, usize)| {
        let problem =
            problem(HeadShape::new(32, 8, 128), Mask::CAUSAL, KvLayout::Paged { page_size }, stored);
        Cell { phase: "decode", problem, batch, len: SeqLen::extend(config.decode_keys.saturating_sub(1), 1) }
    };
    shapes.iter().map(cell).collect()
}

/// A plain read of 2 GB, in bytes a second.
fn read_peak(gpu: &Gpu) -> Result<f64, Error> {
    let bytes = 2u64 << 30;
    let memory = Memory::new(gpu, bytes as usize)?;
    let us = time_us(gpu, 9, 3, || memory.read_all(gpu, 0, bytes))?;
    Ok(bytes as f64 / us * 1e6)
}

/// Pushes the rows of a cell: where K and V are quantised, the append that fills its pages first.
fn time(
    gpu: &Gpu,
    config: &Config,
    peaks: Option<Peaks>,
    cell: &Cell,
    rows: &mut Vec<Row>,
) -> Result<(), Error> {
    let Cell { phase, problem, batch, len } = *cell;
    let subject = Subject::new(gpu, &problem, batch, len)?;
    if let Some(append) = subject.append() {
        // SAFETY: the buffers of `subject` cover the launch and outlive every wait below.
        let launch = || unsafe { append.launch(gpu) };
        launch()?;
        let us = if config.repeats > 0 { Some(time_us(gpu, config.repeats, 3, launch)?) } else { None };
        rows.push(append_row(&subject, us, peaks));
    }
    let ws = Workspace::new(gpu, &subject.plan)?;
    let bound = Bound::new(gpu, &subject.plan, &subject.args(), &ws)?;
    // SAFETY: the buffers of `subject` and `ws` cover the call and outlive every wait below.
    let launch = || unsafe { bound.launch(gpu) };
    launch()?;
    gpu.synchronize()?;
    let error = subject.error()?;
    // The e4m3 forward rounds q and P to three bits.
    let eight_bits = matches!(subject.plan.choice().map(|c| c.kernel), Some(Kernel::ForwardFp8 { .. }));
    let most = if eight_bits { 2e-1 } else { 2e-2 };
    if error > most {
        let supported = format!("at most {most:e}");
        return Err(BadArgument::new("attention bench", "error", format!("{error:e}"), supported).into());
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
    let kernel = subject.plan.choice().map(|c| c.kernel.to_string()).unwrap_or_default();
    let (plan, predicted) = (subject.plan.to_string(), subject.plan.predicted_device());
    let launches = bound.launches();
    let mut row =
        Row { phase, problem, batch, len, plan, kernel, launches, us, predicted, error, share: None };
    row.share = peaks.and_then(|p| match phase {
        "decode" => row.bytes_per_s().map(|x| x / p.bytes_per_s),
        _ => row.flops_per_s().map(|x| x / p.flops_per_s),
    });
    rows.push(row);
    Ok(())
}

/// Reads K and V in 16 bits once, writes their codes once, and a scale a token and head where it works them out.
fn append_row(subject: &Subject, us: Option<f64>, peaks: Option<Peaks>) -> Row {
    let (problem, tokens) = (*subject.plan.problem(), subject.batch * subject.len.seqlen_k);
    let heads = problem.heads;
    let scales = if problem.kv_scales == ScaleGrain::Token {
        kernel::scale_pair_bytes(heads, 4) * (tokens * heads.num_kv_heads) as u64
    } else {
        0
    };
    let predicted = Entry {
        device_read_bytes: kernel::kv_write_bytes(heads, tokens, DType::Bf16),
        device_write_bytes: kernel::kv_write_bytes(heads, tokens, problem.kv_dtype) + scales,
        ..Entry::default()
    };
    let mut row = Row {
        phase: "append",
        problem,
        batch: subject.batch,
        len: subject.len,
        plan: String::new(),
        kernel: "append (append.cu)".into(),
        launches: 1,
        us,
        predicted,
        error: 0.0,
        share: None,
    };
    row.share = peaks.and_then(|p| row.bytes_per_s().map(|x| x / p.bytes_per_s));
    row
}
