//! The 32-element block formats of GGUF: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (layout as in the GGUF specification's reference quantiser).

use super::{BlockFormat, f16_at};

/// f16 d, 16 bytes; low nibbles are elements 0..16, high nibbles 16..32; `w = d·(q − 8)`.
pub struct Q4_0;
/// f16 d, f16 m, 16 bytes as in [`Q4_0`]; `w = d·q + m`.
pub struct Q4_1;
/// f16 d, 32 top bits, 16 bytes as in [`Q4_0`]; `w = d·(q − 16)`.
pub struct Q5_0;
/// f16 d, f16 m, then as [`Q5_0`]; `w = d·q + m`.
pub struct Q5_1;
/// f16 d, 32 signed bytes; `w = d·q`, here with `q + 128` so that the integers are unsigned.
pub struct Q8_0;

pub(super) fn nibbles(bytes: &[u8], q: &mut [u8]) {
    for i in 0..16 {
        q[i] = bytes[i] & 15;
        q[i + 16] = bytes[i] >> 4;
    }
}

impl BlockFormat for Q4_0 {
    const ELEMS: usize = 32;
    const BYTES: usize = 18;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = Some(3);
    const HAS_MIN: bool = false;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], _min: &mut [f32]) {
        scale[0] = f16_at(block);
        nibbles(&block[2..], q);
    }
}

impl BlockFormat for Q4_1 {
    const ELEMS: usize = 32;
    const BYTES: usize = 20;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = None;
    const HAS_MIN: bool = true;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], min: &mut [f32]) {
        scale[0] = f16_at(block);
        min[0] = f16_at(&block[2..]);
        nibbles(&block[4..], q);
    }
}

/// Bit `i` of the four bytes onto element `i`, above its four low bits.
fn top_bits(bytes: &[u8], q: &mut [u8]) {
    for (i, q) in q.iter_mut().enumerate().take(32) {
        *q |= (bytes[i / 8] >> (i % 8) & 1) << 4;
    }
}

impl BlockFormat for Q5_0 {
    const ELEMS: usize = 32;
    const BYTES: usize = 22;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = Some(4);
    const HAS_MIN: bool = false;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], _min: &mut [f32]) {
        scale[0] = f16_at(block);
        nibbles(&block[6..], q);
        top_bits(&block[2..6], q);
    }
}

impl BlockFormat for Q5_1 {
    const ELEMS: usize = 32;
    const BYTES: usize = 24;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = None;
    const HAS_MIN: bool = true;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], min: &mut [f32]) {
        scale[0] = f16_at(block);
        min[0] = f16_at(&block[2..]);
        nibbles(&block[8..], q);
        top_bits(&block[4..8], q);
    }
}

impl BlockFormat for Q8_0 {
    const ELEMS: usize = 32;
    const BYTES: usize = 34;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = Some(7);
    const HAS_MIN: bool = false;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], _min: &mut [f32]) {
        scale[0] = f16_at(block);
        for (q, b) in q.iter_mut().zip(&block[2..34]) {
            *q = b ^ 0x80;
        }
    }
}
