//! Block formats whose digits are numbers of a table: IQ4_NL, IQ4_XS and MXFP4 (layouts as in ggml's reference quantiser).

use super::legacy::nibbles;
use super::{BlockFormat, f16_at};

/// f16 d, 16 bytes of nibbles; `w = d·VALUES[q]`.
pub struct Iq4Nl;
/// f16 d, 16 upper bit pairs and 8 low nibbles of 6-bit scales, 128 bytes of nibbles; `w = d·(sc − 32)·VALUES[q]` in groups of 32.
pub struct Iq4Xs;
/// E8M0 exponent, 16 bytes of nibbles, each an E2M1 float.
pub struct Mxfp4;

/// The table of IQ4_NL and IQ4_XS, plus 128 so that entries are unsigned.
const VALUES: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];
/// Twice the E2M1 values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, plus 16.
const E2M1: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

fn look_up(table: &[u8; 16], bytes: &[u8], q: &mut [u8]) {
    nibbles(bytes, q);
    q[..32].iter_mut().for_each(|q| *q = table[usize::from(*q)]);
}

impl BlockFormat for Iq4Nl {
    const ELEMS: usize = 32;
    const BYTES: usize = 18;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = Some(7);
    const HAS_MIN: bool = false;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], _min: &mut [f32]) {
        scale[0] = f16_at(block);
        look_up(&VALUES, &block[2..], q);
    }
}

impl BlockFormat for Iq4Xs {
    const ELEMS: usize = 256;
    const BYTES: usize = 136;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = Some(7);
    const HAS_MIN: bool = false;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], _min: &mut [f32]) {
        let d = f16_at(block);
        for (g, q) in q.chunks_exact_mut(32).enumerate() {
            let low = block[4 + g / 2] >> (g % 2 * 4) & 15;
            let high = block[2 + g / 4] >> (g % 4 * 2) & 3;
            scale[g] = d * (i32::from(low | high << 4) - 32) as f32;
            look_up(&VALUES, &block[8 + 16 * g..], q);
        }
    }
}

impl BlockFormat for Mxfp4 {
    const ELEMS: usize = 32;
    const BYTES: usize = 17;
    const GROUP: usize = 32;
    const OFFSET_LOG2: Option<u32> = Some(4);
    const HAS_MIN: bool = false;

    fn split(block: &[u8], q: &mut [u8], scale: &mut [f32], _min: &mut [f32]) {
        // 2^(e − 127), halved because the table holds twice the values; the smallest two are subnormal.
        let e = u32::from(block[0]);
        scale[0] = f32::from_bits(match e {
            0 | 1 => 0x0020_0000 << e,
            255 => 0x7fc0_0000,
            _ => (e - 1) << 23,
        });
        look_up(&E2M1, &block[1..], q);
    }
}
