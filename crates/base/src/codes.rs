//! Codes of 8 and 4 bits: what they stand for, and the nearest code of a number (ties to even, saturating).
//!
//! Sources: OCP 8-bit Floating Point Specification 1.0 for E4M3 and E5M2. No scales here.

/// Largest finite E4M3 number.
pub const E4M3_MAX: f32 = 448.0;
/// Largest finite E5M2 number.
pub const E5M2_MAX: f32 = 57344.0;
/// Largest integer that quantisers write in 8 bits; -128 is read but never written, so that codes negate exactly.
pub const INT8_MAX: f32 = 127.0;
/// Largest integer that quantisers write in 4 bits; -8 is read but never written.
pub const INT4_MAX: f32 = 7.0;

/// The number of an E4M3 code; 0x7f and 0xff are NaN.
pub fn e4m3_to_f32(code: u8) -> f32 {
    if code & 0x7f == 0x7f { f32::NAN } else { minifloat::<3, 7>(code) }
}

/// The number of an E5M2 code, infinities and NaN among them.
pub fn e5m2_to_f32(code: u8) -> f32 {
    match code & 0x7f {
        0x7c => f32::INFINITY.copysign(minifloat::<2, 15>(code)),
        0x7d.. => f32::NAN,
        _ => minifloat::<2, 15>(code),
    }
}

/// The nearest E4M3 code; past the largest number it is that number, infinities too. NaN stays NaN.
pub fn e4m3_from_f32(x: f32) -> u8 {
    if x.is_nan() { 0x7f } else { nearest::<3, 7>(x.clamp(-E4M3_MAX, E4M3_MAX)) }
}

/// The nearest E5M2 code; past the largest number it is that number, infinities too. NaN stays NaN.
pub fn e5m2_from_f32(x: f32) -> u8 {
    if x.is_nan() { 0x7f } else { nearest::<2, 15>(x.clamp(-E5M2_MAX, E5M2_MAX)) }
}

/// The nearest integer in -127 ..= 127; NaN gives 0.
pub fn int8_from_f32(x: f32) -> i8 {
    x.round_ties_even().clamp(-INT8_MAX, INT8_MAX) as i8
}

/// The nearest integer in -7 ..= 7; NaN gives 0.
pub fn int4_from_f32(x: f32) -> i8 {
    x.round_ties_even().clamp(-INT4_MAX, INT4_MAX) as i8
}

/// Element `i` of packed pairs.
pub fn int4(pairs: &[u8], i: usize) -> i8 {
    let byte = pairs[i / 2] as i8;
    if i.is_multiple_of(2) { (byte << 4) >> 4 } else { byte >> 4 }
}

/// Writes element `i` of packed pairs: the low four bits of `x`.
pub fn set_int4(pairs: &mut [u8], i: usize, x: i8) {
    let (byte, x) = (&mut pairs[i / 2], x as u8 & 0xf);
    *byte = if i.is_multiple_of(2) { *byte & 0xf0 | x } else { *byte & 0x0f | x << 4 };
}

/// Sign, exponent and `M` bits of mantissa as a finite number.
fn minifloat<const M: u32, const BIAS: i32>(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code & 0x7f) >> M, f32::from(code & ((1 << M) - 1)));
    // Below the smallest exponent numbers stand evenly, without the leading 1.
    let (lead, exponent) = if exponent == 0 { (0.0, 1) } else { ((1 << M) as f32, exponent) };
    let size = (lead + mantissa) * 2f32.powi(exponent - BIAS - M as i32);
    if code & 0x80 == 0 { size } else { -size }
}

/// The nearest code of a number that is not past the largest one.
fn nearest<const M: u32, const BIAS: i32>(x: f32) -> u8 {
    let (sign, size) = ((x.to_bits() >> 24) as u8 & 0x80, x.abs());
    let code = if size < 2f32.powi(1 - BIAS) {
        // A mantissa that rounds up to 2^M is the smallest number with an exponent.
        (size * 2f32.powi(BIAS - 1 + M as i32)).round_ties_even() as u32
    } else {
        let (bits, cut) = (size.to_bits(), 23 - M);
        let rounded = (bits + (1 << (cut - 1)) - 1 + ((bits >> cut) & 1)) >> cut;
        rounded - (((127 - BIAS) as u32) << M)
    };
    sign | code as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_codes() {
        for (code, x) in
            [(0x00, 0.0), (0x01, 0.001953125), (0x08, 0.015625), (0x38, 1.0), (0x7e, 448.0), (0xc0, -2.0)]
        {
            assert_eq!(e4m3_to_f32(code), x);
        }
        for (code, x) in [(0x01, 2f32.powi(-16)), (0x3c, 1.0), (0x7b, 57344.0), (0xfc, f32::NEG_INFINITY)] {
            assert_eq!(e5m2_to_f32(code), x);
        }
        assert!(e4m3_to_f32(0xff).is_nan() && e5m2_to_f32(0x7d).is_nan() && e5m2_to_f32(0xff).is_nan());
        // E5M2 is the upper half of binary16.
        for code in 0..=255u8 {
            let half = half::f16::from_bits(u16::from(code) << 8).to_f32();
            assert!(
                half.to_bits() == e5m2_to_f32(code).to_bits() || half.is_nan() && e5m2_to_f32(code).is_nan()
            );
        }
    }

    /// Every number between two codes goes to the nearer one, ties to the even code, in both formats.
    #[test]
    fn rounding_is_to_nearest_even_and_saturates() {
        type Format = (fn(u8) -> f32, fn(f32) -> u8, u8);
        let formats: [Format; 2] = [(e4m3_to_f32, e4m3_from_f32, 0x7e), (e5m2_to_f32, e5m2_from_f32, 0x7b)];
        for (to, from, top) in formats {
            for code in 0..top {
                let (a, b) = (to(code), to(code + 1));
                let middle = (a + b) / 2.0;
                assert_eq!(from(a), code);
                assert_eq!(from(-a), code | 0x80);
                assert_eq!(from(middle), code + code % 2, "tie after code {code}");
                assert_eq!(from(f32::from_bits(middle.to_bits() - 1)), code);
                assert_eq!(from(f32::from_bits(middle.to_bits() + 1)), code + 1);
            }
            for x in [to(top) * 1.01, 1e30, f32::INFINITY] {
                assert_eq!((from(x), from(-x)), (top, top | 0x80));
            }
            assert!(to(from(f32::NAN)).is_nan());
        }
    }

    #[test]
    fn integers_round_to_even_saturate_and_share_bytes() {
        assert_eq!([0.5, 1.5, -2.5, 300.0, -300.0, f32::NAN].map(int8_from_f32), [0, 2, -2, 127, -127, 0]);
        assert_eq!([0.5, 3.5, -2.5, 9.0, -9.0].map(int4_from_f32), [0, 4, -2, 7, -7]);
        let mut pairs = [0u8; 8];
        (0..16).for_each(|i| set_int4(&mut pairs, i, i as i8 - 8));
        assert!((0..16).all(|i| int4(&pairs, i) == i as i8 - 8));
        assert_eq!(pairs[0], 0x98);
    }
}
