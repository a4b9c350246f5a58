//! Exact dequantisation, one block format a type: the seam at which further formats are added.
//!
//! A format states how one block splits into unsigned integers, scales and minimums; everything else (row dequantisation, the
//! portable panels, the tests of the vector kernels) is derived from that one function. Nothing here is tuned for speed.

pub mod kquant;
pub mod legacy;
pub mod table;

use half::{bf16, f16};

use crate::format::WeightFormat;
use kquant::{Q2K, Q3K, Q4K, Q5K, Q6K};
use legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use table::{Iq4Nl, Iq4Xs, Mxfp4};

/// Most elements in a block of any format.
pub const MAX_BLOCK_ELEMS: usize = 256;
/// Most scale groups in a block of any format.
pub const MAX_BLOCK_GROUPS: usize = 16;

/// A quantised block format: element `i` of group `g` is `scale[g]·(q[i] − OFFSET) + min[g]`, exact in f32 but for the last add.
pub trait BlockFormat {
    /// Elements of a block.
    const ELEMS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Elements that share one scale: 32 or 16.
    const GROUP: usize;
    /// log2 of the value that stands for zero in `q`; `None` when zero is 0.
    const OFFSET_LOG2: Option<u32>;
    /// Whether groups have a minimum.
    const HAS_MIN: bool;

    /// Splits one block of `BYTES` bytes into `ELEMS` integers and a scale (and minimum, if any) a group.
    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], min: &mut [f32]);
}

/// The little-endian f16 at the start of `bytes`, widened.
pub(crate) fn f16_at(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// The value of each E4M3 byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones are NaN.
pub(crate) static F8_E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut b = 0;
    while b < 256 {
        let (exponent, mantissa) = ((b as u32 >> 3) & 15, b as u32 & 7);
        let size = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        values[b] = if b < 128 { size } else { -size };
        b += 1;
    }
    values
};

/// One row in `format` to f32. `out` must have as many elements as `bytes` holds.
pub(crate) fn row(format: WeightFormat, bytes: &[u8], out: &mut [f32]) {
    match format {
        WeightFormat::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        WeightFormat::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        WeightFormat::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        WeightFormat::F8E4M3 => {
            for (o, b) in out.iter_mut().zip(bytes) {
                *o = F8_E4M3[usize::from(*b)];
            }
        }
        WeightFormat::Q4_0 => blocks::<Q4_0>(bytes, out),
        WeightFormat::Q4_1 => blocks::<Q4_1>(bytes, out),
        WeightFormat::Q5_0 => blocks::<Q5_0>(bytes, out),
        WeightFormat::Q5_1 => blocks::<Q5_1>(bytes, out),
        WeightFormat::Q8_0 => blocks::<Q8_0>(bytes, out),
        WeightFormat::Q2K => blocks::<Q2K>(bytes, out),
        WeightFormat::Q3K => blocks::<Q3K>(bytes, out),
        WeightFormat::Q4K => blocks::<Q4K>(bytes, out),
        WeightFormat::Q5K => blocks::<Q5K>(bytes, out),
        WeightFormat::Q6K => blocks::<Q6K>(bytes, out),
        WeightFormat::Iq4Nl => blocks::<Iq4Nl>(bytes, out),
        WeightFormat::Iq4Xs => blocks::<Iq4Xs>(bytes, out),
        WeightFormat::Mxfp4 => blocks::<Mxfp4>(bytes, out),
    }
}

fn blocks<F: BlockFormat>(bytes: &[u8], out: &mut [f32]) {
    let offset = F::OFFSET_LOG2.map_or(0, |s| 1 << s);
    let mut q = [0u8; MAX_BLOCK_ELEMS];
    let mut scale = [0f32; MAX_BLOCK_GROUPS];
    let mut min = [0f32; MAX_BLOCK_GROUPS];
    for (block, out) in bytes.chunks_exact(F::BYTES).zip(out.chunks_exact_mut(F::ELEMS)) {
        F::split(block, &mut q[..F::ELEMS], &mut scale, &mut min);
        for (g, out) in out.chunks_exact_mut(F::GROUP).enumerate() {
            for (o, &q) in out.iter_mut().zip(&q[g * F::GROUP..]) {
                let w = scale[g] * (i32::from(q) - offset) as f32;
                *o = if F::HAS_MIN { w + min[g] } else { w };
            }
        }
    }
}
