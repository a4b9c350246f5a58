//! The layout that tile kernels read: weights of 16 rows side by side, a few hundred columns at a time, in a thread's own scratch.
//!
//! An integer panel holds `[cols / 4][16 rows][4]` unsigned bytes and, a scale group, `[scale, bias, min][16 rows]` floats. A float
//! panel holds `[cols][16 rows]` floats. A tile is up to [`TILE_PANELS`] panels. Panels live for one tile of one call.

use super::ahead::Ahead;

/// Weight rows of a panel.
pub(crate) const PANEL_ROWS: usize = 16;
/// Panels of a tile at most.
pub(crate) const TILE_PANELS: usize = 3;
/// Weight rows of a tile at most.
pub(crate) const TILE_ROWS: usize = PANEL_ROWS * TILE_PANELS;
/// Columns of an integer panel at most: three panels and their scales then fit a first-level cache of 48 KiB.
pub(crate) const INT_COLS: usize = 640;
/// Columns of a float panel at most: the longest block.
pub(crate) const FLOAT_COLS: usize = 256;
/// Columns of a float panel where blocks allow: half of a first-level cache.
pub(crate) const FLOAT_STEP: usize = 128;
/// Floats that a panel keeps for one scale group.
pub(crate) const GROUP_FLOATS: usize = 3 * PANEL_ROWS;
/// Scale groups of an integer panel at most.
const INT_GROUPS: usize = INT_COLS / 16;
/// Bytes of a row's chunk at most, in any format: two bytes an element cover Q8_0 and K-quants, four the floats' shorter chunk.
const CHUNK_BYTES: usize = if INT_COLS * 2 > FLOAT_COLS * 4 { INT_COLS * 2 } else { FLOAT_COLS * 4 };

/// 16 weight rows: row `i` starts `i · pitch` bytes after `base`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    /// First row's bytes, at the chunk's first column.
    pub base: *const u8,
    /// Bytes from row to row, so that 16 rows stay below 2^31.
    pub pitch: usize,
}

impl Rows {
    /// Row `i` at `offset` bytes.
    #[inline(always)]
    pub fn at(&self, i: usize, offset: usize) -> *const u8 {
        self.base.wrapping_add(i * self.pitch + offset)
    }
}

/// What to unpack: `cols` columns of 16 rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// The rows; each must be readable for the bytes of `cols` columns.
    pub rows: Rows,
    /// Columns, whole blocks.
    pub cols: usize,
    /// What to ask for meanwhile.
    pub ahead: Ahead,
}

/// One integer panel in scratch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntPanels {
    /// `[cols / 4][16][4]` bytes.
    pub quants: *mut u8,
    /// `[groups][3][16]` floats: scale, −1.5·2²³·scale (see `kernel`), min.
    pub groups: *mut f32,
}

/// Where the sums of a tile come from and go to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dest {
    /// Partial sums `[rows][TILE_ROWS]`, read when `resume`, written unless the result goes straight to `out`.
    pub acc: *mut f32,
    /// Continue from `acc` instead of zero.
    pub resume: bool,
    /// All columns are in: write `out`.
    pub finish: bool,
    /// `[rows]` at `out_stride`, `cols` wide.
    pub out: *mut f32,
    /// Floats from one row of `out` to the next.
    pub out_stride: usize,
    /// Add to `out`.
    pub add: bool,
    /// Weight rows of the tile that exist.
    pub cols: usize,
}

/// One integer tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntTile {
    /// First panel.
    pub panel: IntPanels,
    /// Columns in the panels.
    pub cols: usize,
    /// Quantised input, first row, first column of the panels.
    pub x: *const i8,
    /// Elements from one input row to the next.
    pub x_stride: usize,
    /// Scales and sums of the input, one a 32 columns.
    pub meta: *const crate::quantize::Group,
    /// Groups from one input row to the next.
    pub meta_stride: usize,
    /// 8-bit digits of an input element.
    pub digits: usize,
    /// Elements from one digit to the next (32 times the groups).
    pub digit_stride: usize,
    /// Where the sums go.
    pub dest: Dest,
}

/// One float tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloatTile {
    /// First panel; the next is `FLOAT_COLS · 16` floats on.
    pub panel: *const f32,
    /// Columns in the panels.
    pub cols: usize,
    /// Input, first row, first column of the panels.
    pub x: *const f32,
    /// Elements from one input row to the next.
    pub x_stride: usize,
    /// Where the sums go.
    pub dest: Dest,
}

/// Bytes from one integer panel to the next.
pub(crate) const PANEL_QUANTS: usize = INT_COLS * PANEL_ROWS;
/// Floats from one panel's groups to the next's.
pub(crate) const PANEL_GROUPS: usize = INT_GROUPS * GROUP_FLOATS;
/// Floats from one float panel to the next.
pub(crate) const PANEL_FLOATS: usize = FLOAT_COLS * PANEL_ROWS;

/// One cache line, so that panels start on one.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Line([u8; 64]);

/// A thread's scratch.
#[derive(Debug)]
pub(crate) struct Slot {
    quants: Vec<Line>,
    groups: Vec<Line>,
    floats: Vec<Line>,
    acc: Vec<Line>,
    tail: Vec<Line>,
    acc_rows: usize,
}

fn lines(bytes: usize) -> Vec<Line> {
    vec![Line([0; 64]); bytes.div_ceil(64)]
}

impl Slot {
    /// Scratch for units of up to `acc_rows` input rows.
    pub fn new(acc_rows: usize) -> Slot {
        Slot {
            quants: lines(TILE_PANELS * PANEL_QUANTS),
            groups: lines(TILE_PANELS * PANEL_GROUPS * 4),
            floats: lines(TILE_PANELS * PANEL_FLOATS * 4),
            acc: lines(acc_rows * TILE_ROWS * 4),
            tail: lines(PANEL_ROWS * CHUNK_BYTES),
            acc_rows,
        }
    }

    /// Input rows for which there are partial sums.
    pub fn acc_rows(&self) -> usize {
        self.acc_rows
    }

    /// Integer panel `p`.
    pub fn int_panel(&mut self, p: usize) -> IntPanels {
        assert!(p < TILE_PANELS);
        IntPanels {
            quants: self.quants.as_mut_ptr().cast::<u8>().wrapping_add(p * PANEL_QUANTS),
            groups: self.groups.as_mut_ptr().cast::<f32>().wrapping_add(p * PANEL_GROUPS),
        }
    }

    /// Float panel `p`.
    pub fn float_panel(&mut self, p: usize) -> *mut f32 {
        assert!(p < TILE_PANELS);
        self.floats.as_mut_ptr().cast::<f32>().wrapping_add(p * PANEL_FLOATS)
    }

    /// Partial sums `[acc_rows][TILE_ROWS]`.
    pub fn acc(&mut self) -> *mut f32 {
        self.acc.as_mut_ptr().cast()
    }

    /// A copy of fewer than 16 rows of `bytes` bytes, zeros for the missing ones, so that unpackers need not know of them.
    pub fn tail_rows<'a>(&mut self, rows: impl Iterator<Item = &'a [u8]>, bytes: usize) -> Rows {
        assert!(bytes <= CHUNK_BYTES);
        let tail: &mut [u8] = self.tail_bytes();
        tail[..PANEL_ROWS * bytes].fill(0);
        for (to, from) in tail.chunks_exact_mut(bytes).zip(rows) {
            to.copy_from_slice(from);
        }
        Rows { base: tail.as_ptr(), pitch: bytes }
    }

    fn tail_bytes(&mut self) -> &mut [u8] {
        let len = self.tail.len() * 64;
        // SAFETY: a line is 64 plain bytes without padding.
        unsafe { std::slice::from_raw_parts_mut(self.tail.as_mut_ptr().cast(), len) }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let lines = [&self.quants, &self.groups, &self.floats, &self.acc, &self.tail];
        lines.iter().map(|l| l.len() * 64).sum()
    }
}
