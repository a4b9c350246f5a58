//! Linear layers `out[M, N] (=|+=) x[M, K] · W[N, K]ᵀ` over weights in their file's format.
//!
//! A tile of weight rows is unpacked into a thread's scratch (`panel.rs`) and multiplied with every input row of its unit; one code
//! path serves one row (decode) and thousands (prefill), with the same order of additions. Nothing is repacked for longer than that.

mod ahead;
mod direct;
pub(crate) mod kernel;
mod panel;
mod run;
mod unpack;
pub(crate) mod vector;

use rayon::join;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::format::Weight;
use crate::isa::Isa;
use crate::quantize::LinearInput;
use panel::{PANEL_ROWS, Slot, TILE_PANELS};
use suanpan_base::BadArgument;

/// Where a product goes: row `m` at `data[m · row_stride ..][.. N]`.
#[derive(Debug)]
pub struct LinearOut<'a> {
    /// The destination, at least `(M − 1) · row_stride + N` elements.
    pub data: &'a mut [f32],
    /// Elements from one row to the next, at least N.
    pub row_stride: usize,
    /// Add to what is there instead of replacing it.
    pub add: bool,
}

/// Scratch of one caller, one slot a thread. Its size depends on none of the weights.
#[derive(Debug)]
pub struct LinearWorkspace {
    isa: Isa,
    slots: Vec<Slot>,
}

/// Input rows of one unit of work at most.
const UNIT_ROWS: usize = 512;
/// Input bytes of one unit of work at most, where that leaves [`UNIT_ROWS_MIN`]: half of a common second-level cache.
const UNIT_BYTES: usize = 1 << 20;
/// Below this many rows a unit pays more for unpacking than it gains.
const UNIT_ROWS_MIN: usize = 64;
/// Weight bytes times rows below which a call stays on the caller's thread.
const SERIAL_WORK: usize = 24 * 1024;
/// Up to this many rows a call is bound by reading weights: tiles are narrow, and the next one is asked for while one is worked on.
const FEW_ROWS: usize = 8;
/// Bytes of a tile that is asked for so: well within a second-level cache.
const AHEAD_BYTES: usize = 256 << 10;
/// Jobs described at once, on the stack.
const BATCH: usize = 8;

impl LinearWorkspace {
    /// Scratch for inputs of up to `max_rows` rows on `threads` threads, with the machine's best instruction set. Columns and outputs
    /// are not bounded: panels have a fixed size.
    pub fn new(max_rows: usize, threads: usize) -> LinearWorkspace {
        LinearWorkspace::on(Isa::best(), max_rows, threads)
    }

    /// The same with a chosen instruction set.
    ///
    /// # Errors
    /// An instruction set that this machine lacks.
    pub fn with_isa(isa: Isa, max_rows: usize, threads: usize) -> Result<LinearWorkspace, BadArgument> {
        Ok(LinearWorkspace::on(isa.require()?, max_rows, threads))
    }

    fn on(isa: Isa, max_rows: usize, threads: usize) -> LinearWorkspace {
        let rows = max_rows.clamp(1, UNIT_ROWS);
        LinearWorkspace { isa, slots: (0..threads.max(1)).map(|_| Slot::new(rows)).collect() }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.slots.iter().map(Slot::bytes).sum()
    }
}

/// One job, its output as a pointer that threads may share: their units never overlap.
#[derive(Clone, Copy, Debug)]
struct Job<'a> {
    weight: Weight<'a>,
    out: *mut f32,
    out_stride: usize,
    add: bool,
    /// Whether the integer kernels multiply it.
    int: bool,
    /// Units of the jobs before it.
    first_unit: usize,
    /// Tiles of the job.
    tiles: usize,
}

/// One parallel region: what every thread reads.
#[derive(Debug)]
struct Region<'a> {
    jobs: [Option<Job<'a>>; BATCH],
    input: &'a LinearInput,
    /// Panels of a tile.
    panels: usize,
    /// Input rows of a unit.
    unit_rows: usize,
    /// Units in all.
    units: usize,
    /// Units taken at a time.
    grain: usize,
    next: AtomicUsize,
}

// SAFETY: threads share the region read-only but for `next`; the output pointers are written by disjoint units.
unsafe impl Sync for Region<'_> {}

/// Multiplies every job's weight with the input, all jobs in one parallel region of the surrounding rayon pool.
///
/// The bits of an output element depend on its input row, its weight row, the precision and the instruction set only: not on the
/// number of rows, jobs or threads.
///
/// # Panics
/// When a weight's columns differ from the input's, an output is too short, or a weight needs a form of the input that it does not
/// hold (see [`LinearInput::new`]).
pub fn linear(jobs: &mut [(Weight<'_>, LinearOut<'_>)], input: &LinearInput, ws: &mut LinearWorkspace) {
    if input.rows() == 0 {
        return;
    }
    for batch in jobs.chunks_mut(BATCH) {
        let region = plan(batch, input, ws);
        let work: usize = batch.iter().map(|(w, _)| w.data().len()).sum::<usize>() * input.rows();
        let threads = if work < SERIAL_WORK { 1 } else { ws.slots.len().min(region.units) };
        fan_out(&mut ws.slots[..threads], &|slot| run::units(ws.isa, &region, slot));
    }
}

/// Runs `f` once a slot, each on a thread of its own where one is free; a late thread finds nothing left to do.
fn fan_out(slots: &mut [Slot], f: &(impl Fn(&mut Slot) + Sync)) {
    match slots {
        [] => {}
        [slot] => f(slot),
        _ => {
            let (a, b) = slots.split_at_mut(slots.len() / 2);
            join(|| fan_out(a, f), || fan_out(b, f));
        }
    }
}

/// Checks a batch of jobs and cuts it into units of (tile of weight rows) × (run of input rows).
fn plan<'a, 'w: 'a>(
    batch: &mut [(Weight<'w>, LinearOut<'_>)],
    input: &'a LinearInput,
    ws: &LinearWorkspace,
) -> Region<'a> {
    let (rows, cols, threads) = (input.rows(), input.cols(), ws.slots.len());
    let out_rows: usize = batch.iter().map(|(w, _)| w.rows()).sum();
    let row_bytes = cols
        * match input.precision().digits() {
            0 => 4,
            digits => digits,
        };
    let fitting = (UNIT_BYTES / row_bytes.max(1)).max(UNIT_ROWS_MIN);
    let limit = fitting.min(ws.slots[0].acc_rows());
    // A decode is fastest with a tile that leaves first-level cache to the bytes fetched ahead; a prefill with the widest.
    let panels = if rows > FEW_ROWS { TILE_PANELS } else { 1 };
    // Enough units that no thread waits long for the last.
    let wanted = 4 * threads;
    let tiles = out_rows.div_ceil(PANEL_ROWS * panels).max(1);
    let share = rows.div_ceil(wanted.div_ceil(tiles)).max(UNIT_ROWS_MIN);
    let unit_rows = rows.div_ceil(rows.div_ceil(limit.min(share)));
    let mut region = Region {
        jobs: [None; BATCH],
        input,
        panels,
        unit_rows,
        units: 0,
        grain: 1,
        next: AtomicUsize::new(0),
    };
    for (slot, (weight, out)) in region.jobs.iter_mut().zip(batch) {
        assert_eq!(weight.cols(), cols, "linear: columns of the weight and of the input");
        assert!(out.row_stride >= weight.rows(), "linear: row_stride of {} rows", weight.rows());
        let need = (rows - 1).checked_mul(out.row_stride).and_then(|n| n.checked_add(weight.rows()));
        assert!(need.is_some_and(|n| n <= out.data.len()), "linear: out holds {}", out.data.len());
        let int = weight.format().is_quantised() && input.precision().digits() > 0;
        assert!(int || input.has_floats(), "linear: {} needs the input in f32", weight.format());
        let tiles = weight.rows().div_ceil(PANEL_ROWS * panels);
        *slot = Some(Job {
            weight: *weight,
            out: out.data.as_mut_ptr(),
            out_stride: out.row_stride,
            add: out.add,
            int,
            first_unit: region.units,
            tiles,
        });
        region.units += tiles * rows.div_ceil(unit_rows);
    }
    region.grain = if rows > FEW_ROWS { 1 } else { (region.units / (4 * threads)).max(1) };
    region
}

impl Region<'_> {
    /// The next run of units for a thread; empty when none is left.
    fn take(&self) -> std::ops::Range<usize> {
        let first = self.next.fetch_add(self.grain, Ordering::Relaxed).min(self.units);
        first..(first + self.grain).min(self.units)
    }

    /// The job that unit `u` belongs to.
    fn job_of(&self, u: usize) -> &Job<'_> {
        let jobs = self.jobs.iter().flatten();
        jobs.take_while(|job| job.first_unit <= u).last().expect("the first job starts at unit 0")
    }
}
