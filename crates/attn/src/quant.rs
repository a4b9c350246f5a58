//! The quantiser: dense f32 rows of K or V become codes and scales, and a report of what was lost.
//!
//! Symmetric, to nearest, ties to even; what is past a type's range becomes its largest number and is counted. Deliberately no zero points,
//! no smoothing and no search for better scales: a group's scale maps its largest size to the type's largest number.

use half::{bf16, f16};
use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, Buf, DType, ScaleGrain, codes};

use crate::run::Strides;

const OP: &str = "quantiser";

/// Rows `[tokens, num_kv_heads, head_dim]` of keys or values, dense. Token t stands in page t / page_size.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The elements.
    pub x: &'a [f32],
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of a row.
    pub head_dim: usize,
    /// Tokens a page; looked at only where scales belong to pages.
    pub page_size: usize,
}

/// Codes in the order of their rows.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Codes {
    /// binary32: nothing is lost.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// binary16.
    F16(Vec<f16>),
    /// FP8 E4M3.
    E4m3(Vec<u8>),
    /// FP8 E5M2.
    E5m2(Vec<u8>),
    /// 8-bit integers, -127 to 127.
    I8(Vec<i8>),
    /// Pairs of 4-bit integers, -7 to 7.
    I4(Vec<u8>),
}

impl Codes {
    /// The codes as an argument of a run.
    pub fn buf(&self) -> Buf<'_> {
        match self {
            Codes::F32(x) => Buf::F32(x),
            Codes::Bf16(x) => Buf::Bf16(x),
            Codes::F16(x) => Buf::F16(x),
            Codes::E4m3(x) => Buf::E4m3(x),
            Codes::E5m2(x) => Buf::E5m2(x),
            Codes::I8(x) => Buf::I8(x),
            Codes::I4(x) => Buf::I4(x),
        }
    }
}

/// What quantising lost, over all finite elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QuantError {
    /// Largest distance of an element from its code times its scale.
    pub abs_max: f64,
    /// Root of the mean square of those distances.
    pub rms: f64,
    /// `rms` over the root mean square of the elements themselves; 0 where all of them are 0.
    pub rms_relative: f64,
    /// Elements past the type's range, infinities among them.
    pub saturated: u64,
}

impl std::fmt::Display for QuantError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "largest error {:.3e}, rms {:.3e} ({:.3e} of the data's), {} saturated",
            self.abs_max, self.rms, self.rms_relative, self.saturated
        )
    }
}

/// The largest number of a type; infinite where f32 cannot leave its range.
fn largest(dtype: DType) -> f32 {
    match dtype {
        DType::F32 | DType::Bf16 => f32::INFINITY,
        DType::F16 => f16::MAX.to_f32(),
        DType::E4m3 => codes::E4M3_MAX,
        DType::E5m2 => codes::E5M2_MAX,
        DType::I8 => codes::INT8_MAX,
        DType::I4 => codes::INT4_MAX,
    }
}

/// Strides of the scales that [`scales_of`] makes, as a run takes them.
pub fn scale_strides(grain: ScaleGrain, num_kv_heads: usize, page_size: usize) -> Strides {
    match grain {
        ScaleGrain::None | ScaleGrain::Tensor => Strides::default(),
        ScaleGrain::Head => Strides { head: 1, ..Strides::default() },
        ScaleGrain::Token => {
            Strides { token: num_kv_heads, head: 1, page: num_kv_heads.saturating_mul(page_size) }
        }
        ScaleGrain::Page => Strides { token: 0, head: 1, page: num_kv_heads },
    }
}

impl Rows<'_> {
    fn check(&self, dtype: DType, grain: ScaleGrain) -> Result<usize, BadArgument> {
        let width = checked_product(OP, "num_kv_heads * head_dim", &[self.num_kv_heads, self.head_dim])?;
        for (field, n) in [("num_kv_heads", self.num_kv_heads), ("head_dim", self.head_dim)] {
            if n == 0 {
                return Err(BadArgument::new(OP, field, n, "at least 1"));
            }
        }
        if !self.x.len().is_multiple_of(width) {
            let supported = format!("whole tokens of {width} elements");
            return Err(BadArgument::new(OP, "x length", self.x.len(), supported));
        }
        if dtype == DType::I4 && !self.head_dim.is_multiple_of(2) {
            return Err(BadArgument::new(OP, "head_dim", self.head_dim, "an even width for int4"));
        }
        if grain != ScaleGrain::None && !dtype.is_code() {
            return Err(BadArgument::new(OP, "scales", grain, format!("{} for {dtype}", ScaleGrain::None)));
        }
        if grain == ScaleGrain::Page && self.page_size == 0 {
            return Err(BadArgument::new(OP, "page_size", 0, "at least 1"));
        }
        Ok(self.x.len() / width)
    }

    /// Which scale row `row` (token · num_kv_heads + head) has.
    fn scale_at(&self, grain: ScaleGrain, row: usize) -> usize {
        let (token, head) = (row / self.num_kv_heads, row % self.num_kv_heads);
        match grain {
            ScaleGrain::None | ScaleGrain::Tensor => 0,
            ScaleGrain::Head => head,
            ScaleGrain::Token => row,
            ScaleGrain::Page => token / self.page_size * self.num_kv_heads + head,
        }
    }

    fn num_scales(&self, grain: ScaleGrain, tokens: usize) -> usize {
        match grain {
            ScaleGrain::None => 0,
            ScaleGrain::Tensor => 1,
            ScaleGrain::Head => self.num_kv_heads,
            ScaleGrain::Token => tokens * self.num_kv_heads,
            ScaleGrain::Page => tokens.div_ceil(self.page_size) * self.num_kv_heads,
        }
    }
}

/// A scale a group: its largest finite size over the type's largest number; 1 where all of the group is 0. Empty without a grain.
pub fn scales_of(rows: &Rows<'_>, dtype: DType, grain: ScaleGrain) -> Result<Vec<f32>, BadArgument> {
    let tokens = rows.check(dtype, grain)?;
    let mut scales = vec![0.0f32; rows.num_scales(grain, tokens)];
    if grain == ScaleGrain::None {
        return Ok(scales);
    }
    for (row, x) in rows.x.chunks_exact(rows.head_dim).enumerate() {
        let sizes = x.iter().map(|x| x.abs()).filter(|x| x.is_finite());
        let top = &mut scales[rows.scale_at(grain, row)];
        *top = sizes.fold(*top, f32::max);
    }
    for scale in &mut scales {
        // A scale below the normal numbers would have no digits left.
        *scale = if *scale == 0.0 { 1.0 } else { (*scale / largest(dtype)).max(f32::MIN_POSITIVE) };
    }
    Ok(scales)
}

/// Codes of `rows` under `scales` (from [`scales_of`], of these rows or of earlier ones), and what they lose.
///
/// Refused by name: a length that is not whole tokens, an odd width for int4, scales that are too few, too many, or not positive and finite,
/// and NaN for integers, which have no code for it.
pub fn quantize(
    rows: &Rows<'_>,
    dtype: DType,
    grain: ScaleGrain,
    scales: &[f32],
) -> Result<(Codes, QuantError), BadArgument> {
    let tokens = rows.check(dtype, grain)?;
    let want = rows.num_scales(grain, tokens);
    if scales.len() != want {
        return Err(BadArgument::new(OP, "scales length", scales.len(), want));
    }
    if let Some((i, s)) = scales.iter().enumerate().find(|(_, s)| !(**s > 0.0 && s.is_finite())) {
        return Err(BadArgument::new(OP, format!("scales[{i}]"), s, "positive and finite"));
    }
    if matches!(dtype, DType::I8 | DType::I4)
        && let Some(i) = rows.x.iter().position(|x| x.is_nan())
    {
        return Err(BadArgument::new(OP, format!("x[{i}]"), f32::NAN, format!("numbers, for {dtype}")));
    }
    let scale = |i: usize| if want == 0 { 1.0 } else { scales[rows.scale_at(grain, i / rows.head_dim)] };
    let scaled = rows.x.iter().enumerate().map(|(i, &x)| x / scale(i));
    let codes = match dtype {
        DType::F32 => Codes::F32(rows.x.to_vec()),
        DType::Bf16 => Codes::Bf16(scaled.map(bf16::from_f32).collect()),
        DType::F16 => Codes::F16(scaled.map(to_f16).collect()),
        DType::E4m3 => Codes::E4m3(scaled.map(codes::e4m3_from_f32).collect()),
        DType::E5m2 => Codes::E5m2(scaled.map(codes::e5m2_from_f32).collect()),
        DType::I8 => Codes::I8(scaled.map(codes::int8_from_f32).collect()),
        DType::I4 => {
            let mut pairs = vec![0u8; rows.x.len() / 2];
            scaled.enumerate().for_each(|(i, x)| codes::set_int4(&mut pairs, i, codes::int4_from_f32(x)));
            Codes::I4(pairs)
        }
    };
    let error = error_of(rows, &codes, dtype, scale);
    Ok((codes, error))
}

/// The nearest binary16, its largest past its range.
fn to_f16(x: f32) -> f16 {
    if x.is_nan() { f16::NAN } else { f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())) }
}

fn error_of(rows: &Rows<'_>, codes: &Codes, dtype: DType, scale: impl Fn(usize) -> f32) -> QuantError {
    let (buf, top) = (codes.buf(), f64::from(largest(dtype)));
    // What still rounds to the largest number: half a step past it.
    let top = match dtype {
        DType::I8 | DType::I4 => top + 0.5,
        DType::E4m3 => top + 16.0,
        DType::E5m2 => top + 4096.0,
        DType::F16 => top + 16.0,
        DType::F32 | DType::Bf16 => top,
    };
    let (mut error, mut lost, mut all, mut count) = (QuantError::default(), 0.0, 0.0, 0u64);
    for (i, &x) in rows.x.iter().enumerate() {
        let (x, s) = (f64::from(x), f64::from(scale(i)));
        error.saturated += u64::from((x / s).abs() > top);
        if x.is_finite() {
            let distance = (f64::from(buf.get(i)) * s - x).abs();
            error.abs_max = error.abs_max.max(distance);
            lost += distance * distance;
            all += x * x;
            count += 1;
        }
    }
    if all > 0.0 {
        error.rms = (lost / count as f64).sqrt();
        error.rms_relative = (lost / all).sqrt();
    }
    error
}
