//! What one thread does: takes units, unpacks the tile of each a few hundred columns at a time, multiplies it with the unit's rows.

use super::ahead::Ahead;
use super::direct::RowTile;
use super::panel::{Dest, FLOAT_STEP, FloatTile, INT_COLS, IntTile, PANEL_ROWS, Rows, Slot, Source};
use super::unpack::{BFloat16, Float16, Float32, FloatFormat, Unpack};
use super::vector::{Kernels, portable::Portable};
use super::{AHEAD_BYTES, FEW_ROWS, Job, Region};
use crate::dequant::F8_E4M3;
use crate::dequant::kquant::{Q2K, Q3K, Q4K, Q5K, Q6K};
use crate::dequant::legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::dequant::table::{Iq4Nl, Iq4Xs, Mxfp4};
use crate::format::WeightFormat;
use crate::isa::Isa;

/// Works until no unit is left.
pub(super) fn units(isa: Isa, region: &Region<'_>, slot: &mut Slot) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => units_on::<super::vector::avx512::Avx512>(region, slot),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => units_on::<super::vector::avx2::Ymm<true>>(region, slot),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => units_on::<super::vector::avx2::Ymm<false>>(region, slot),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => units_on::<super::vector::neon::Neon>(region, slot),
        _ => units_on::<Portable>(region, slot),
    }
}

fn units_on<V: Kernels>(region: &Region<'_>, slot: &mut Slot) {
    loop {
        let taken = region.take();
        if taken.is_empty() {
            return;
        }
        for u in taken.clone() {
            let job = region.job_of(u);
            let mut unit = Unit::new(region, job, u);
            if region.input.rows() <= FEW_ROWS {
                // The first tile of a run has been asked for by nobody.
                if u == taken.start {
                    Ahead::over(unit.bytes()).ask_all();
                }
                if u + 1 < taken.end {
                    unit.next = Unit::new(region, region.job_of(u + 1), u + 1).bytes();
                }
            }
            match job.weight.format() {
                WeightFormat::F32 => unit.float::<V>(slot, unpack_floats::<V, Float32>),
                WeightFormat::F16 => unit.float::<V>(slot, unpack_floats::<V, Float16>),
                WeightFormat::Bf16 => unit.float::<V>(slot, unpack_floats::<V, BFloat16>),
                WeightFormat::F8E4M3 => unit.float::<V>(slot, unpack_bytes),
                WeightFormat::Q4_0 => unit.blocks::<V, Q4_0>(slot),
                WeightFormat::Q4_1 => unit.blocks::<V, Q4_1>(slot),
                WeightFormat::Q5_0 => unit.blocks::<V, Q5_0>(slot),
                WeightFormat::Q5_1 => unit.blocks::<V, Q5_1>(slot),
                WeightFormat::Q8_0 => unit.blocks::<V, Q8_0>(slot),
                WeightFormat::Q2K => unit.blocks::<V, Q2K>(slot),
                WeightFormat::Q3K => unit.blocks::<V, Q3K>(slot),
                WeightFormat::Q4K => unit.blocks::<V, Q4K>(slot),
                WeightFormat::Q5K => unit.blocks::<V, Q5K>(slot),
                WeightFormat::Q6K => unit.blocks::<V, Q6K>(slot),
                WeightFormat::Iq4Nl => unit.blocks::<V, Iq4Nl>(slot),
                WeightFormat::Iq4Xs => unit.blocks::<V, Iq4Xs>(slot),
                WeightFormat::Mxfp4 => unit.blocks::<V, Mxfp4>(slot),
            }
        }
    }
}

/// Input rows `m0..m1` in runs of powers of two, `most` where there are as many: (first row, rows).
fn tile_rows(m0: usize, m1: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut next = m0;
    std::iter::from_fn(move || {
        let (m, left) = (next, m1 - next);
        let rows = if left >= most { most } else { (left + 1).next_power_of_two() / 2 };
        next += rows;
        (rows > 0).then_some((m, rows))
    })
}

/// Panel `p` of plain floats.
///
/// # Safety
/// The machine has `V`'s instruction set and the source is readable.
unsafe fn unpack_floats<V: Kernels, F: FloatFormat>(slot: &mut Slot, p: usize, source: &Source) {
    // SAFETY: the caller's promise; a float panel has room for FLOAT_COLS columns.
    unsafe { V::unpack_float::<F>(source, slot.float_panel(p)) }
}

/// Panel `p` of E4M3 bytes, by table.
///
/// # Safety
/// The source is readable.
unsafe fn unpack_bytes(slot: &mut Slot, p: usize, source: &Source) {
    source.ahead.ask_all();
    let panel = slot.float_panel(p);
    for r in 0..PANEL_ROWS {
        for k in 0..source.cols {
            // SAFETY: the caller's promise; a float panel has room for FLOAT_COLS columns of PANEL_ROWS rows.
            unsafe { *panel.add(k * PANEL_ROWS + r) = F8_E4M3[usize::from(*source.rows.at(r, k))] }
        }
    }
}

/// Panel `p` of a quantised format, as floats.
///
/// # Safety
/// The machine has `V`'s instruction set and the source is readable.
unsafe fn unpack_expand<V: Kernels, F: Unpack>(slot: &mut Slot, p: usize, source: &Source) {
    let ints = slot.int_panel(p);
    // SAFETY: the caller's promise; both panels have room for FLOAT_COLS columns.
    unsafe {
        V::unpack::<F>(source, &ints);
        V::expand::<F>(source.cols, &ints, slot.float_panel(p));
    }
}

/// A tile of weight rows times a run of input rows.
struct Unit<'a> {
    region: &'a Region<'a>,
    job: &'a Job<'a>,
    /// First weight row.
    n0: usize,
    /// Weight rows.
    n: usize,
    /// First input row.
    m0: usize,
    /// Past the last input row.
    m1: usize,
    /// The tile that the thread works on next, where so few input rows meet a tile that memory is what takes time.
    next: &'a [u8],
}

impl<'a> Unit<'a> {
    fn new(region: &'a Region<'a>, job: &'a Job<'a>, u: usize) -> Unit<'a> {
        let local = u - job.first_unit;
        let (run, tile) = (local / job.tiles, local % job.tiles);
        let n0 = tile * region.panels * PANEL_ROWS;
        let m0 = run * region.unit_rows;
        Unit {
            region,
            job,
            n0,
            n: (region.panels * PANEL_ROWS).min(job.weight.rows() - n0),
            m0,
            m1: (m0 + region.unit_rows).min(region.input.rows()),
            next: &[],
        }
    }

    /// Panels that hold a row.
    fn panels(&self) -> usize {
        self.n.div_ceil(PANEL_ROWS)
    }

    /// The tile's bytes, or none of them where they are too many to wait in a cache.
    fn bytes(&self) -> &'a [u8] {
        let pitch = self.job.weight.row_bytes();
        let bytes = &self.job.weight.data()[self.n0 * pitch..(self.n0 + self.n) * pitch];
        if bytes.len() <= AHEAD_BYTES { bytes } else { &[] }
    }

    /// What to ask for while columns `k..k + cols` of panel `p` are read: their part of the next tile.
    fn ahead(&self, p: usize, k: usize, cols: usize) -> Ahead {
        let (bytes, all) = (self.next.len(), self.panels() * self.job.weight.cols());
        let at = |k: usize| bytes * (p * self.job.weight.cols() + k) / all;
        Ahead::over(&self.next[at(k)..at(k + cols)])
    }

    /// Columns `k..k + cols` of panel `p`'s rows.
    fn source(&self, slot: &mut Slot, p: usize, k: usize, cols: usize) -> Source {
        let weight = &self.job.weight;
        let elem = |k: usize| k / weight.format().block_elems() * weight.format().block_bytes();
        let (pitch, n0) = (weight.row_bytes(), self.n0 + p * PANEL_ROWS);
        let rows = if weight.rows() - n0 >= PANEL_ROWS {
            Rows { base: weight.data()[n0 * pitch + elem(k)..].as_ptr(), pitch }
        } else {
            let chunk = elem(k)..elem(k + cols);
            slot.tail_rows((n0..weight.rows()).map(|r| &weight.row(r)[chunk.clone()]), chunk.len())
        };
        Source { rows, cols, ahead: self.ahead(p, k, cols) }
    }

    /// Where input rows `m..` of panels `p..` go after columns `k..k + cols`.
    fn dest(&self, slot: &mut Slot, m: usize, p: usize, k: usize, cols: usize) -> Dest {
        let n = p * PANEL_ROWS;
        let at = m * self.job.out_stride + self.n0 + n;
        Dest {
            acc: slot.acc().wrapping_add((m - self.m0) * super::panel::TILE_ROWS + n),
            resume: k > 0,
            finish: k + cols == self.job.weight.cols(),
            out: self.job.out.wrapping_add(at),
            out_stride: self.job.out_stride,
            add: self.job.add,
            cols: self.n - n,
        }
    }

    /// A quantised format: integers times integers, or both as floats.
    fn blocks<V: Kernels, F: Unpack>(&self, slot: &mut Slot) {
        if self.job.int { self.int::<V, F>(slot) } else { self.float::<V>(slot, unpack_expand::<V, F>) }
    }

    /// One input row by 16 weight rows that all exist: nothing would be read twice.
    fn row<V: Kernels, F: Unpack>(&self, slot: &mut Slot) {
        let (cols, input) = (self.job.weight.cols(), self.region.input);
        let (x, meta) = input.quantised(self.m0, 0);
        let tile = RowTile {
            source: self.source(slot, 0, 0, cols),
            x,
            meta,
            digits: input.precision().digits(),
            digit_stride: input.digit_stride(),
            dest: self.dest(slot, self.m0, 0, 0, cols),
        };
        // SAFETY: the region's instruction set is available; rows and columns lie inside weight, input and output, which `plan` checked.
        unsafe { V::row_tile::<F>(&tile) };
    }

    fn int<V: Kernels, F: Unpack>(&self, slot: &mut Slot) {
        // The sums of a long block's many groups would not stay in registers.
        if self.m1 - self.m0 == 1 && self.n == PANEL_ROWS && F::ELEMS == 32 {
            return self.row::<V, F>(slot);
        }
        let (k_all, input) = (self.job.weight.cols(), self.region.input);
        let step = k_all.div_ceil(k_all.div_ceil(INT_COLS).max(1)).next_multiple_of(F::ELEMS);
        let step = step.min(INT_COLS / F::ELEMS * F::ELEMS);
        for k in (0..k_all).step_by(step.max(1)) {
            let cols = step.min(k_all - k);
            for p in 0..self.panels() {
                let (source, to) = (self.source(slot, p, k, cols), slot.int_panel(p));
                // SAFETY: the region's instruction set is available; rows and columns lie inside the weight; cols ≤ INT_COLS.
                unsafe { V::unpack::<F>(&source, &to) };
            }
            for (m, rows) in tile_rows(self.m0, self.m1, V::INT_ROWS) {
                for p in (0..self.panels()).step_by(V::PANELS) {
                    let (x, meta) = input.quantised(m, k);
                    let tile = IntTile {
                        panel: slot.int_panel(p),
                        cols,
                        x,
                        x_stride: k_all,
                        meta,
                        meta_stride: k_all / 32,
                        digits: input.precision().digits(),
                        digit_stride: input.digit_stride(),
                        dest: self.dest(slot, m, p, k, cols),
                    };
                    let panels = V::PANELS.min(self.panels() - p);
                    // SAFETY: as above; the tile's rows lie inside input, partial sums and output, which `plan` checked.
                    unsafe { V::int_tile::<F>(rows, panels, &tile) };
                }
            }
        }
    }

    fn float<V: Kernels>(&self, slot: &mut Slot, unpack: unsafe fn(&mut Slot, usize, &Source)) {
        let (k_all, input) = (self.job.weight.cols(), self.region.input);
        let step = FLOAT_STEP.max(self.job.weight.format().block_elems());
        for k in (0..k_all).step_by(step) {
            let cols = step.min(k_all - k);
            for p in 0..self.panels() {
                let source = self.source(slot, p, k, cols);
                // SAFETY: the region's instruction set is available; rows and columns lie inside the weight.
                unsafe { unpack(slot, p, &source) };
                if let Some(block) = self.job.weight.scale_cols() {
                    self.scale(slot, p, k..k + cols, block);
                }
            }
            for (m, rows) in tile_rows(self.m0, self.m1, V::FLOAT_ROWS) {
                for p in (0..self.panels()).step_by(V::PANELS) {
                    let tile = FloatTile {
                        panel: slot.float_panel(p),
                        cols,
                        x: input.floats(m, k),
                        x_stride: k_all,
                        dest: self.dest(slot, m, p, k, cols),
                    };
                    let panels = V::PANELS.min(self.panels() - p);
                    // SAFETY: as above; the tile's rows lie inside input, partial sums and output, which `plan` checked.
                    unsafe { V::float_tile(rows, panels, &tile) };
                }
            }
        }
    }

    /// Multiplies panel `p`, which holds columns `cols`, by the scales of its elements.
    fn scale(&self, slot: &mut Slot, p: usize, cols: std::ops::Range<usize>, block: usize) {
        let (weight, n0) = (&self.job.weight, self.n0 + p * PANEL_ROWS);
        let panel = slot.float_panel(p);
        let mut k = cols.start;
        while k < cols.end {
            let end = ((k / block + 1) * block).min(cols.end);
            let scales: [f32; PANEL_ROWS] =
                std::array::from_fn(|r| if n0 + r < weight.rows() { weight.scale(n0 + r, k) } else { 0.0 });
            for at in (k - cols.start)..(end - cols.start) {
                for (r, scale) in scales.iter().enumerate() {
                    // SAFETY: a float panel has room for the columns of a step.
                    unsafe { *panel.add(at * PANEL_ROWS + r) *= scale }
                }
            }
            k = end;
        }
    }
}
