//! Rows of keys and values as they are stored: converted, or as codes with one bf16 scale a token and kv head, chosen as the row is written.
//!
//! Knows no pages. Symmetric, to nearest: a row's scale maps its largest size to the type's largest number, and the scale is rounded up
//! to bf16 first, so that no element is past the range. A row with an element that is not finite gets a scale that is NaN: whoever sees
//! it knows.

use half::bf16;
use half::slice::HalfFloatSliceExt;
use suanpan_base::{DType, codes};

/// Element type of the scales.
pub const SCALE_DTYPE: DType = DType::Bf16;

/// 1.5 · 2^23: adding it leaves the nearest integer (ties to even) in the low bits of a float of at most 2^22.
const ROUND: f32 = 12_582_912.0;

/// Rounds to nearest, ties to even; a NaN stays a NaN of the same sign. Without branches, so that it vectorises.
pub(crate) fn to_bf16(to: &mut [bf16], from: &[f32]) {
    for (to, &from) in to.iter_mut().zip(from) {
        let bits = from.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Truncating could leave no mantissa bit, which would read as infinity: the quiet bit keeps it a NaN.
        let nan = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        *to = bf16::from_bits(if is_nan { nan } else { rounded } as u16);
    }
}

/// Rounds to nearest, ties to even; what is past the range becomes infinite.
pub(crate) fn to_f16(to: &mut [half::f16], from: &[f32]) {
    to.convert_from_f32_slice(from);
}

/// The largest number of a code; None for types without scales.
fn largest(dtype: DType) -> Option<f32> {
    match dtype {
        DType::I8 => Some(codes::INT8_MAX),
        DType::I4 => Some(codes::INT4_MAX),
        DType::E4m3 => Some(codes::E4M3_MAX),
        _ => None,
    }
}

/// Whether rows of this type can be written: with scales, or as they come.
pub fn is_stored(dtype: DType) -> bool {
    !dtype.is_code() || largest(dtype).is_some()
}

/// The scale of a row under `dtype`, NaN where the row is not finite, and the factor that makes codes of its elements.
fn scale_of(row: &[f32], largest: f32) -> (bf16, f32) {
    // Bits of sizes are in the order of the sizes, with infinity and NaN last.
    let top = row.iter().fold(0u32, |top, x| top.max(x.to_bits() & 0x7fff_ffff));
    if top >= f32::INFINITY.to_bits() {
        return (bf16::NAN, 0.0);
    }
    if top == 0 {
        return (bf16::ONE, 1.0);
    }
    // A scale below the normal numbers would have no digits left.
    let scale = (f32::from_bits(top) / largest).max(f32::MIN_POSITIVE);
    let up = bf16::from_bits((scale.to_bits().wrapping_add(0xffff) >> 16) as u16);
    (up, 1.0 / up.to_f32())
}

/// Writes the codes of one row and returns its scale. `to` has the row's bytes. Panics on a type without scales.
pub(crate) fn write_codes(dtype: DType, row: &[f32], to: &mut [u8]) -> bf16 {
    let Some(largest) = largest(dtype) else { unreachable!("{dtype} has no scales") };
    let (scale, factor) = scale_of(row, largest);
    if factor == 0.0 {
        to.fill(0);
        return scale;
    }
    match dtype {
        DType::I8 => to.iter_mut().zip(row).for_each(|(to, x)| *to = integer(x * factor)),
        DType::I4 => {
            for (to, pair) in to.iter_mut().zip(row.chunks_exact(2)) {
                *to = (integer(pair[0] * factor) & 0xf) | (integer(pair[1] * factor) << 4);
            }
        }
        _ => to.iter_mut().zip(row).for_each(|(to, x)| *to = e4m3(x * factor)),
    }
    scale
}

/// The nearest integer, ties to even, as two's complement of 8 bits.
fn integer(x: f32) -> u8 {
    (x + ROUND).to_bits() as u8
}

/// The nearest E4M3 code of a number in its range, without branches: `codes::e4m3_from_f32` there.
fn e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let size = bits & 0x7fff_ffff;
    let rounded = (size + 0x7_ffff + ((size >> 20) & 1)) >> 20;
    let normal = rounded.wrapping_sub(120 << 3);
    // Below 2^-6 numbers stand evenly, 2^-9 apart.
    let even = (f32::from_bits(size) * 512.0 + ROUND).to_bits() & 0xff;
    let code = if size < 0x3c80_0000 { even } else { normal };
    ((bits >> 24) as u8 & 0x80) | code as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_equals_the_reference_on_every_upper_half_and_tie() {
        for upper in 0..=u16::MAX {
            for lower in [0u16, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | u32::from(lower));
                let mut ours = [bf16::ZERO];
                to_bf16(&mut ours, &[x]);
                assert_eq!(ours[0].to_bits(), bf16::from_f32(x).to_bits(), "{:08x}", x.to_bits());
            }
        }
    }

    #[test]
    fn codes_without_branches_equal_the_reference() {
        for upper in 0..=u16::MAX {
            for lower in [0u16, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | u32::from(lower));
                if x.abs() <= codes::E4M3_MAX {
                    assert_eq!(e4m3(x), codes::e4m3_from_f32(x), "{x:e}");
                }
                if x.abs() <= 127.4 {
                    assert_eq!(integer(x) as i8, codes::int8_from_f32(x), "{x:e}");
                }
            }
        }
    }

    /// Each element comes back within half a step of its row (E4M3: half a step of its own exponent), whatever the row's size.
    #[test]
    fn a_row_comes_back_within_half_a_step() {
        let mut x = 1u32;
        for size in [1e-38f32, 1e-20, 0.3, 7.0, 6e4, 1e38] {
            let row: Vec<f32> = (0..64)
                .map(|_| {
                    x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (x as i32 as f32 / i32::MAX as f32) * size
                })
                .collect();
            for (dtype, step) in [(DType::I8, 0.51), (DType::I4, 0.51), (DType::E4m3, 16.1)] {
                let mut to = vec![0u8; dtype.bytes_of(64)];
                let scale = write_codes(dtype, &row, &mut to).to_f32();
                for (i, &x) in row.iter().enumerate() {
                    let code = match dtype {
                        DType::I8 => f32::from(to[i] as i8),
                        DType::I4 => f32::from(codes::int4(&to, i)),
                        _ => codes::e4m3_to_f32(to[i]),
                    };
                    let lost = (f64::from(code) * f64::from(scale) - f64::from(x)).abs();
                    assert!(lost <= step * f64::from(scale), "{dtype}: {x:e} as {code} times {scale:e}");
                }
            }
        }
    }

    #[test]
    fn rows_that_are_zero_or_not_finite_say_so() {
        let mut to = [9u8; 4];
        assert_eq!(write_codes(DType::I8, &[0.0, -0.0, 0.0, 0.0], &mut to).to_f32(), 1.0);
        assert_eq!(to, [0; 4]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(write_codes(DType::I8, &[1.0, bad, 0.0, 0.0], &mut to).to_f32().is_nan());
        }
        assert!(!is_stored(DType::E5m2) && is_stored(DType::F16));
    }
}
