//! Step 4: lanes. A dot product sums across lanes, which no processor likes; so the block of keys is transposed once and every lane takes
//! a key of its own. One tile of rows shares the transposed block, and exp becomes a polynomial that fits in lanes, too.

use crate::{D, Head};

const ROWS: usize = 32;
const KEYS: usize = 64;
pub const EXTRA: usize = ROWS * KEYS + 2 * ROWS + D * KEYS;

pub fn attention(h: &Head, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has what the function needs.
        return unsafe { avx512(h, out) };
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: as above.
        return unsafe { avx2(h, out) };
    }
    lanes(h, out);
}

/// # Safety
/// The processor must have AVX-512 F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(h: &Head, out: &mut [f32]) {
    lanes(h, out);
}

/// # Safety
/// The processor must have AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(h: &Head, out: &mut [f32]) {
    lanes(h, out);
}

/// The tile of step 3 with keys in lanes; the compiler makes vectors of the fixed-size inner loops.
#[inline(always)]
fn lanes(h: &Head, out: &mut [f32]) {
    let mut k_t = [[0.0f32; KEYS]; D];
    let mut s = [[0.0f32; KEYS]; ROWS];
    out.fill(0.0);
    for top in (0..h.n).step_by(ROWS) {
        let rows = ROWS.min(h.n - top);
        let (mut max, mut sum) = ([f32::NEG_INFINITY; ROWS], [0.0f32; ROWS]);
        for left in (0..top + rows).step_by(KEYS) {
            let keys = KEYS.min(h.n - left);
            for c in 0..keys {
                (0..D).for_each(|x| k_t[x][c] = h.k[(left + c) * D + x]);
            }
            for r in 0..rows {
                s[r] = [0.0; KEYS];
                for x in 0..D {
                    let a = h.scale() * h.q[(top + r) * D + x];
                    for c in 0..KEYS {
                        s[r][c] = a.mul_add(k_t[x][c], s[r][c]);
                    }
                }
                let seen = (top + r + 1).saturating_sub(left).min(keys);
                s[r][seen..].fill(f32::NEG_INFINITY);
            }
            for r in 0..rows {
                let o: &mut [f32; D] = (&mut out[(top + r) * D..][..D]).try_into().expect("D floats");
                let grown = s[r].iter().copied().fold(max[r], |a, b| if b > a { b } else { a });
                let shrink = exp(max[r] - grown);
                max[r] = grown;
                s[r].iter_mut().for_each(|s| *s = exp(*s - grown));
                sum[r] = sum[r] * shrink + s[r].iter().sum::<f32>();
                o.iter_mut().for_each(|o| *o *= shrink);
                for c in 0..keys {
                    let v: &[f32; D] = h.v[(left + c) * D..][..D].try_into().expect("D floats");
                    for x in 0..D {
                        o[x] = s[r][c].mul_add(v[x], o[x]);
                    }
                }
            }
        }
        for r in 0..rows {
            out[(top + r) * D..][..D].iter_mut().for_each(|o| *o /= sum[r]);
        }
    }
}

/// exp(x) for x <= 0, 0 at -inf: 2^(x·log2 e) as a power from exponent bits times a polynomial of the fraction.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const C: [f32; 6] = [
        std::f32::consts::LN_2,
        0.240_226_48,
        0.055_503_324,
        0.009_618_437,
        0.001_339_887_6,
        0.000_153_533_63,
    ];
    let y = (x * std::f32::consts::LOG2_E).max(-126.0);
    let n = (y + 0.5).floor();
    let r = y - n;
    let p = C.iter().rev().fold(0.0f32, |p, &c| p.mul_add(r, c)).mul_add(r, 1.0);
    let power = f32::from_bits(((n as i32 + 127) << 23) as u32);
    if x < -87.0 { 0.0 } else { p * power }
}
