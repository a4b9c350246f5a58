//! The 256-element block formats of GGUF: Q2_K to Q6_K (layout as in the GGUF specification's reference quantiser).

use super::{BlockFormat, f16_at};

/// 16 bytes of a 4-bit scale and minimum each, 64 bytes of 2-bit values, f16 d, f16 dmin; `w = d·sc·q − dmin·mn` in groups of 16.
pub struct Q2K;
/// 32 bytes of top bits, 64 bytes of 2-bit values, 12 bytes of packed 6-bit scales, f16 d; `w = d·(sc − 32)·(q − 4)` in groups of 16.
pub struct Q3K;
/// As [`Q4K`] with 32 bytes of top bits before the nibbles.
pub struct Q5K;
/// f16 d, f16 dmin, 12 bytes of packed 6-bit scales and minimums, 128 bytes of nibbles; `w = d·sc·q − dmin·mn` in groups of 32.
pub struct Q4K;
/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, f16 d; `w = d·sc·(q − 32)` in groups of 16.
pub struct Q6K;

/// 6-bit scale and minimum of group `g` (0..8) from the 12 packed bytes: four of each lie whole in the low six bits of bytes
/// 0..8, the other four as nibbles in bytes 8..12 with their upper two bits on top of bytes 0..8.
fn q4k_scale_min(packed: &[u8], g: usize) -> (u8, u8) {
    if g < 4 {
        (packed[g] & 63, packed[g + 4] & 63)
    } else {
        let low = packed[g + 4];
        ((low & 15) | (packed[g - 4] >> 6 << 4), (low >> 4) | (packed[g] >> 6 << 4))
    }
}

/// The 2-bit values of Q2_K and Q3_K: each half of 128 elements is four runs of 32, a bit pair of the same 32 bytes each.
fn pairs(bytes: &[u8], q: &mut [u8]) {
    for (half, q) in q.chunks_exact_mut(128).enumerate() {
        for (run, q) in q.chunks_exact_mut(32).enumerate() {
            for (q, b) in q.iter_mut().zip(&bytes[32 * half..]) {
                *q = b >> (2 * run) & 3;
            }
        }
    }
}

impl BlockFormat for Q2K {
    const ELEMS: usize = 256;
    const BYTES: usize = 84;
    const GROUP: usize = 16;
    const OFFSET_LOG2: Option<u32> = None;
    const HAS_MIN: bool = true;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], min: &mut [f32]) {
        let (d, dmin) = (f16_at(&block[80..]), f16_at(&block[82..]));
        for (g, b) in block[..16].iter().enumerate() {
            scale[g] = d * f32::from(b & 15);
            min[g] = -(dmin * f32::from(b >> 4));
        }
        pairs(&block[16..80], q);
    }
}

impl BlockFormat for Q3K {
    const ELEMS: usize = 256;
    const BYTES: usize = 110;
    const GROUP: usize = 16;
    const OFFSET_LOG2: Option<u32> = Some(2);
    const HAS_MIN: bool = false;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], _min: &mut [f32]) {
        let (top, packed) = (&block[..32], &block[96..108]);
        let d = f16_at(&block[108..]);
        for (g, scale) in scale.iter_mut().enumerate().take(16) {
            // Low nibbles as in Q2_K's order of two halves; bit pairs four to a byte.
            let low = packed[g % 8] >> (g / 8 * 4) & 15;
            let high = packed[8 + g % 4] >> (g / 4 * 2) & 3;
            *scale = d * (i32::from(low | high << 4) - 32) as f32;
        }
        pairs(&block[32..96], q);
        for (run, q) in q.chunks_exact_mut(32).enumerate() {
            for (q, b) in q.iter_mut().zip(top) {
                *q |= (b >> run & 1) << 2;
            }
        }
    }
}

/// d, dmin and packed scales of the 4- and 5-bit formats.
fn scales_mins(block: &[u8], scale: &mut [f32], min: &mut [f32]) {
    let (d, dmin) = (f16_at(block), f16_at(&block[2..]));
    for g in 0..8 {
        let (sc, mn) = q4k_scale_min(&block[4..16], g);
        scale[g] = d * f32::from(sc);
        min[g] = -(dmin * f32::from(mn));
    }
}

/// Low nibbles of 32 bytes, then their high ones.
fn long_nibbles(bytes: &[u8], q: &mut [u8]) {
    for (pair, bytes) in bytes.chunks_exact(32).enumerate() {
        for (i, b) in bytes.iter().enumerate() {
            q[pair * 64 + i] = b & 15;
            q[pair * 64 + 32 + i] = b >> 4;
        }
    }
}

impl BlockFormat for Q5K {
    const ELEMS: usize = 256;
    const BYTES: usize = 176;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = None;
    const HAS_MIN: bool = true;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], min: &mut [f32]) {
        scales_mins(block, scale, min);
        long_nibbles(&block[48..], q);
        for (run, q) in q.chunks_exact_mut(32).enumerate() {
            for (q, b) in q.iter_mut().zip(&block[16..48]) {
                *q |= (b >> run & 1) << 4;
            }
        }
    }
}

impl BlockFormat for Q4K {
    const ELEMS: usize = 256;
    const BYTES: usize = 144;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = None;
    const HAS_MIN: bool = true;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], min: &mut [f32]) {
        scales_mins(block, scale, min);
        long_nibbles(&block[16..], q);
    }
}

impl BlockFormat for Q6K {
    const ELEMS: usize = 256;
    const BYTES: usize = 210;
    const GROUP: usize = 16;
    const OFFSET_LOG2: Option<u32> = Some(5);
    const HAS_MIN: bool = false;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], _min: &mut [f32]) {
        let (ql, qh, sc) = (&block[..128], &block[128..192], &block[192..208]);
        let d = f16_at(&block[208..]);
        for g in 0..16 {
            scale[g] = d * f32::from(sc[g].cast_signed());
        }
        // Each half of 128 elements: four runs of 32 share 64 low bytes and 32 high bytes.
        for half in 0..2 {
            let (ql, qh, q) = (&ql[half * 64..], &qh[half * 32..], &mut q[half * 128..]);
            for i in 0..32 {
                let h = qh[i];
                q[i] = (ql[i] & 15) | ((h & 3) << 4);
                q[i + 32] = (ql[i + 32] & 15) | ((h >> 2 & 3) << 4);
                q[i + 64] = (ql[i] >> 4) | ((h >> 4 & 3) << 4);
                q[i + 96] = (ql[i + 32] >> 4) | ((h >> 6) << 4);
            }
        }
    }
}
