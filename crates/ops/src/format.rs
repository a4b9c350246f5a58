//! Weight formats as they lie in GGUF and safetensors files, and a checked view of one weight matrix in its file's bytes.
//!
//! No copy, no ownership, no file access: a [`Weight`] borrows bytes that somebody else mapped.

use suanpan_base::BadArgument;
use suanpan_base::error::checked_product;

use crate::dequant;

/// Element format of a stored weight matrix. Rows are stored one after another, each a whole number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// IEEE binary32, little endian.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 with 4 bits of exponent (E4M3, no infinities), with scales beside it.
    F8E4M3,
    /// 32 elements: f16 scale, 16 bytes of 4-bit values; `w = d·(q − 8)`.
    Q4_0,
    /// 32 elements: f16 scale, f16 minimum, 16 bytes of 4-bit values; `w = d·q + m`.
    Q4_1,
    /// 32 elements: f16 scale, 4 bytes of top bits, 16 bytes of low nibbles; `w = d·(q − 16)`.
    Q5_0,
    /// As [`WeightFormat::Q5_0`] with an f16 minimum; `w = d·q + m`.
    Q5_1,
    /// 32 elements: f16 scale, 32 signed bytes; `w = d·q`.
    Q8_0,
    /// 256 elements in 16 groups: f16 scale and minimum, 4-bit scale and minimum a group, 2-bit values.
    Q2K,
    /// 256 elements in 16 groups: f16 scale, 6-bit scale a group, 3-bit values; `w = d·sc·(q − 4)`.
    Q3K,
    /// 256 elements in 8 groups: f16 scale and minimum, 6-bit scale and minimum a group, 4-bit values; `w = d·sc·q − dmin·mn`.
    Q4K,
    /// As [`WeightFormat::Q4K`] with 5-bit values.
    Q5K,
    /// 256 elements in 16 groups: 6-bit values, 8-bit scale a group, f16 scale; `w = d·sc·(q − 32)`.
    Q6K,
    /// 32 elements: f16 scale, 16 bytes of numbers of a table of 16 values.
    Iq4Nl,
    /// 256 elements in 8 groups: f16 scale, 6-bit scale a group, numbers of the same table.
    Iq4Xs,
    /// 32 elements: power of two (E8M0), 16 bytes of E2M1 floats (OCP microscaling formats, version 1.0).
    Mxfp4,
}

impl WeightFormat {
    /// Every format, in the order in which tables print them.
    pub const ALL: [WeightFormat; 17] = [
        WeightFormat::F32,
        WeightFormat::F16,
        WeightFormat::Bf16,
        WeightFormat::F8E4M3,
        WeightFormat::Q4_0,
        WeightFormat::Q4_1,
        WeightFormat::Q5_0,
        WeightFormat::Q5_1,
        WeightFormat::Q8_0,
        WeightFormat::Q2K,
        WeightFormat::Q3K,
        WeightFormat::Q4K,
        WeightFormat::Q5K,
        WeightFormat::Q6K,
        WeightFormat::Iq4Nl,
        WeightFormat::Iq4Xs,
        WeightFormat::Mxfp4,
    ];

    /// Elements and bytes of a block, and the name as GGUF tools print it.
    const fn facts(self) -> (usize, usize, &'static str) {
        match self {
            WeightFormat::F32 => (1, 4, "F32"),
            WeightFormat::F16 => (1, 2, "F16"),
            WeightFormat::Bf16 => (1, 2, "BF16"),
            WeightFormat::F8E4M3 => (1, 1, "F8_E4M3"),
            WeightFormat::Q4_0 => (32, 18, "Q4_0"),
            WeightFormat::Q4_1 => (32, 20, "Q4_1"),
            WeightFormat::Q5_0 => (32, 22, "Q5_0"),
            WeightFormat::Q5_1 => (32, 24, "Q5_1"),
            WeightFormat::Q8_0 => (32, 34, "Q8_0"),
            WeightFormat::Q2K => (256, 84, "Q2_K"),
            WeightFormat::Q3K => (256, 110, "Q3_K"),
            WeightFormat::Q4K => (256, 144, "Q4_K"),
            WeightFormat::Q5K => (256, 176, "Q5_K"),
            WeightFormat::Q6K => (256, 210, "Q6_K"),
            WeightFormat::Iq4Nl => (32, 18, "IQ4_NL"),
            WeightFormat::Iq4Xs => (256, 136, "IQ4_XS"),
            WeightFormat::Mxfp4 => (32, 17, "MXFP4"),
        }
    }

    /// Elements of one block; 1 for the plain float formats.
    pub const fn block_elems(self) -> usize {
        self.facts().0
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.facts().1
    }

    /// Bytes of a row of `cols` elements; `None` when `cols` is not a whole number of blocks or the product overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_elems()) {
            return None;
        }
        (cols / self.block_elems()).checked_mul(self.block_bytes())
    }

    /// The name as GGUF tools print it.
    pub const fn name(self) -> &'static str {
        self.facts().2
    }

    /// True for formats of small integers with scales, which the integer dot products read.
    pub const fn is_quantised(self) -> bool {
        self.block_elems() > 1
    }
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Longest row the kernels address: 16 rows must stay within a signed 32-bit byte offset.
const MAX_ROW_BYTES: usize = 1 << 26;

/// Scales of a matrix, one for each block of `block_rows` x `block_cols` elements; blocks at the ends may be cut.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// `[rows / block_rows, cols / block_cols]`, both rounded up.
    pub data: &'a [f32],
    /// Rows of a block.
    pub block_rows: usize,
    /// Columns of a block.
    pub block_cols: usize,
}

/// A weight matrix `[rows, cols]` (out features, in features) in its file's bytes.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    data: &'a [u8],
    scales: Option<Scales<'a>>,
}

impl<'a> Weight<'a> {
    /// A checked view: `data` must be exactly `rows` rows of `cols` elements.
    ///
    /// # Errors
    /// `cols` not a whole number of blocks, sizes that overflow, rows past 64 MiB, or `data` of another length.
    pub fn new(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        data: &'a [u8],
    ) -> Result<Weight<'a>, BadArgument> {
        const OP: &str = "weight";
        let row_bytes = format.row_bytes(cols).ok_or_else(|| {
            let supported = format!("a multiple of {} for {format}, below 2^63 bytes", format.block_elems());
            BadArgument::new(OP, "cols", cols, supported)
        })?;
        if row_bytes > MAX_ROW_BYTES {
            let asked = format!("{cols} ({row_bytes} bytes a row)");
            return Err(BadArgument::new(OP, "cols", asked, format!("rows up to {MAX_ROW_BYTES} bytes")));
        }
        let need = checked_product(OP, "rows", &[rows, row_bytes])?;
        if data.len() != need {
            let asked = format!("{} bytes for {format} [{rows}, {cols}]", data.len());
            return Err(BadArgument::new(OP, "data", asked, format!("exactly {need} bytes")));
        }
        Ok(Weight { format, rows, cols, row_bytes, data, scales: None })
    }

    /// The same matrix, each element times the scale of its block.
    ///
    /// # Errors
    /// Blocks without rows or columns, another number of scales, or a block format, which has its own.
    pub fn with_scales(self, scales: Scales<'a>) -> Result<Weight<'a>, BadArgument> {
        const OP: &str = "weight";
        if self.format.is_quantised() {
            return Err(BadArgument::new(OP, "scales", format!("beside {}", self.format), "none"));
        }
        if scales.block_rows == 0 || scales.block_cols == 0 {
            let asked = format!("blocks of {} x {}", scales.block_rows, scales.block_cols);
            return Err(BadArgument::new(OP, "scales", asked, "at least 1 x 1"));
        }
        let need = self.rows.div_ceil(scales.block_rows) * self.cols.div_ceil(scales.block_cols);
        if scales.data.len() != need {
            return Err(BadArgument::new(OP, "scales", scales.data.len(), format!("{need}, one a block")));
        }
        Ok(Weight { scales: Some(scales), ..self })
    }

    /// Scale of element (`r`, `k`); 1 without scales.
    pub(crate) fn scale(&self, r: usize, k: usize) -> f32 {
        self.scales
            .map_or(1.0, |s| s.data[r / s.block_rows * self.cols.div_ceil(s.block_cols) + k / s.block_cols])
    }

    /// Columns that share a scale; `None` without scales.
    pub(crate) fn scale_cols(&self) -> Option<usize> {
        self.scales.map(|s| s.block_cols)
    }

    /// Element format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Out features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// In features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes from one row to the next.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The file's bytes, `rows · row_bytes` of them.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The bytes of row `r`. Panics when `r` is out of range.
    pub fn row(&self, r: usize) -> &'a [u8] {
        assert!(r < self.rows, "row {r} of a weight of {} rows", self.rows);
        &self.data[r * self.row_bytes..(r + 1) * self.row_bytes]
    }

    /// Row `r` as exact f32 values into `out` (`cols` elements). Panics when `r` or the length of `out` is wrong.
    pub fn dequantize_row(&self, r: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "dequantize_row: length of out");
        dequant::row(self.format, self.row(r), out);
        if let Some(cols) = self.scale_cols() {
            for (block, out) in out.chunks_mut(cols).enumerate() {
                let scale = self.scale(r, block * cols);
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }
}
