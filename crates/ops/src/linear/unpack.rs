//! From file bytes to panels: each format's bit layout once, for every vector width.
//!
//! A new block format implements [`BlockFormat`] (scalar, the truth) and [`Unpack`] (vectors of rows, tested against the first; without
//! a body of its own it goes row by row through the scalar one).

use super::kernel::MAGIC;
use super::panel::{GROUP_FLOATS, IntPanels, PANEL_ROWS, Rows, Source};
use super::vector::Vector;
use crate::dequant::BlockFormat;
use crate::dequant::kquant::{Q2K, Q3K, Q4K, Q5K, Q6K};
use crate::dequant::legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::dequant::table::{Iq4Nl, Iq4Xs, Mxfp4};
use crate::dequant::{MAX_BLOCK_ELEMS, MAX_BLOCK_GROUPS};

/// Where one block of `LANES` rows goes: into a panel, or into sums at once.
pub(crate) trait Sink<V: Vector> {
    /// Takes four elements `4·quad ..` of the block, a row a lane.
    ///
    /// # Safety
    /// The machine has `V`'s instruction set, the block has that quad, and each comes once.
    unsafe fn quad(&mut self, quad: usize, v: V::Int);

    /// Takes the scale of group `g` of the block.
    ///
    /// # Safety
    /// As [`Sink::quad`].
    unsafe fn scale(&mut self, g: usize, scale: V::Float);

    /// Takes the minimum of group `g` of the block.
    ///
    /// # Safety
    /// As [`Sink::quad`].
    unsafe fn min(&mut self, g: usize, min: V::Float);
}

/// A block's place in a panel.
#[derive(Clone, Copy, Debug)]
struct PanelSink {
    quants: *mut u8,
    groups: *mut f32,
}

impl<V: Vector> Sink<V> for PanelSink {
    #[inline(always)]
    unsafe fn quad(&mut self, quad: usize, v: V::Int) {
        // SAFETY: the caller's promise; the panel has room for the block.
        unsafe { V::store(self.quants.add(quad * 4 * PANEL_ROWS), v) }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, g: usize, scale: V::Float) {
        // SAFETY: as above.
        unsafe {
            let at = self.groups.add(g * GROUP_FLOATS);
            V::store_f(at, scale);
            V::store_f(at.add(PANEL_ROWS), V::mul(scale, V::splat_f(-MAGIC)));
        }
    }

    #[inline(always)]
    unsafe fn min(&mut self, g: usize, min: V::Float) {
        // SAFETY: as above.
        unsafe { V::store_f(self.groups.add(g * GROUP_FLOATS + 2 * PANEL_ROWS), min) }
    }
}

/// A block format that can be unpacked a vector of rows at a time.
pub(crate) trait Unpack: BlockFormat {
    /// The block `offset` bytes into rows `first..first + LANES`.
    ///
    /// # Safety
    /// The machine has `V`'s instruction set, each row has the block's bytes, the sink has room for it.
    unsafe fn block<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
        let mut q = [0u8; MAX_BLOCK_ELEMS];
        let (mut scale, mut min) = ([0f32; MAX_BLOCK_GROUPS], [0f32; MAX_BLOCK_GROUPS]);
        let mut quads = [[[0u8; 4]; PANEL_ROWS]; MAX_BLOCK_ELEMS / 4];
        let mut scales = [[0f32; PANEL_ROWS]; MAX_BLOCK_GROUPS];
        let mut mins = [[0f32; PANEL_ROWS]; MAX_BLOCK_GROUPS];
        for lane in 0..V::LANES {
            // SAFETY: the caller's promise.
            let block = unsafe { std::slice::from_raw_parts(rows.at(first + lane, offset), Self::BYTES) };
            Self::split(block, &mut q[..Self::ELEMS], &mut scale, &mut min);
            for (quad, q) in quads.iter_mut().zip(q[..Self::ELEMS].as_chunks::<4>().0) {
                quad[lane] = *q;
            }
            for g in 0..Self::ELEMS / Self::GROUP {
                (scales[g][lane], mins[g][lane]) = (scale[g], min[g]);
            }
        }
        // SAFETY: the arrays have a panel's rows, which are no fewer than lanes.
        unsafe {
            for g in 0..Self::ELEMS / Self::GROUP {
                sink.scale(g, V::load_f(scales[g].as_ptr()));
                if Self::HAS_MIN {
                    sink.min(g, V::load_f(mins[g].as_ptr()));
                }
            }
            for (quad, words) in quads[..Self::ELEMS / 4].iter().enumerate() {
                sink.quad(quad, V::load(words.as_ptr().cast()));
            }
        }
    }
}

impl Unpack for Q2K {}
impl Unpack for Q3K {}
impl Unpack for Q5K {}
impl Unpack for Iq4Nl {}
impl Unpack for Iq4Xs {}
impl Unpack for Mxfp4 {}

/// 16 bytes of nibbles at `offset`: low ones to quads 0..4, high ones to quads 4..8.
///
/// # Safety
/// As [`Unpack::block`].
#[inline(always)]
unsafe fn nibbles<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
    // SAFETY: the caller's promise.
    unsafe {
        let mask = V::splat(0x0f0f_0f0f);
        for (j, w) in V::gather4(rows, first, offset).into_iter().enumerate() {
            sink.quad(j, V::and(w, mask));
            sink.quad(j + 4, V::and(V::shr::<4>(w), mask));
        }
    }
}

impl Unpack for Q4_0 {
    #[inline(always)]
    unsafe fn block<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
        // SAFETY: the caller's promise.
        unsafe {
            sink.scale(0, V::half_to_float(V::gather(rows, first, offset)));
            nibbles::<V>(rows, first, offset + 2, sink);
        }
    }
}

impl Unpack for Q4_1 {
    #[inline(always)]
    unsafe fn block<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale_min = V::gather(rows, first, offset);
            sink.scale(0, V::half_to_float(scale_min));
            sink.min(0, V::half_to_float(V::shr::<16>(scale_min)));
            nibbles::<V>(rows, first, offset + 4, sink);
        }
    }
}

/// Bits `J..J + 4` of each word, one to the fifth bit of each byte.
///
/// # Safety
/// The machine has `V`'s instruction set.
#[inline(always)]
unsafe fn fifth_bits<V: Vector, const J: u32>(bits: V::Int) -> V::Int {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = V::shr::<J>(bits);
        let low =
            V::or(V::and(V::shl::<4>(bits), V::splat(0x10)), V::and(V::shl::<11>(bits), V::splat(0x1000)));
        let high = V::or(
            V::and(V::shl::<18>(bits), V::splat(0x10_0000)),
            V::and(V::shl::<25>(bits), V::splat(0x1000_0000)),
        );
        V::or(low, high)
    }
}

/// [`nibbles`] at `offset` with the fifth bits of `top`.
///
/// # Safety
/// As [`Unpack::block`].
#[inline(always)]
unsafe fn nibbles_and_top<V: Vector>(
    rows: &Rows,
    first: usize,
    offset: usize,
    top: V::Int,
    sink: &mut impl Sink<V>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mask = V::splat(0x0f0f_0f0f);
        let low = [
            fifth_bits::<V, 0>(top),
            fifth_bits::<V, 4>(top),
            fifth_bits::<V, 8>(top),
            fifth_bits::<V, 12>(top),
        ];
        let high = [
            fifth_bits::<V, 16>(top),
            fifth_bits::<V, 20>(top),
            fifth_bits::<V, 24>(top),
            fifth_bits::<V, 28>(top),
        ];
        for (j, w) in V::gather4(rows, first, offset).into_iter().enumerate() {
            sink.quad(j, V::or(V::and(w, mask), low[j]));
            sink.quad(j + 4, V::or(V::and(V::shr::<4>(w), mask), high[j]));
        }
    }
}

impl Unpack for Q5_0 {
    #[inline(always)]
    unsafe fn block<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
        // SAFETY: the caller's promise.
        unsafe {
            sink.scale(0, V::half_to_float(V::gather(rows, first, offset)));
            let top = V::gather(rows, first, offset + 2);
            nibbles_and_top::<V>(rows, first, offset + 6, top, sink);
        }
    }
}

impl Unpack for Q5_1 {
    #[inline(always)]
    unsafe fn block<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale_min = V::gather(rows, first, offset);
            sink.scale(0, V::half_to_float(scale_min));
            sink.min(0, V::half_to_float(V::shr::<16>(scale_min)));
            let top = V::gather(rows, first, offset + 4);
            nibbles_and_top::<V>(rows, first, offset + 8, top, sink);
        }
    }
}

impl Unpack for Q8_0 {
    #[inline(always)]
    unsafe fn block<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
        // SAFETY: the caller's promise.
        unsafe {
            sink.scale(0, V::half_to_float(V::gather(rows, first, offset)));
            let flip = V::splat(0x8080_8080_u32.cast_signed());
            for part in 0..2 {
                for (j, w) in V::gather4(rows, first, offset + 2 + 16 * part).into_iter().enumerate() {
                    sink.quad(4 * part + j, V::xor(w, flip));
                }
            }
        }
    }
}

/// Byte `BITS / 8` of each word shifted to the bottom, its low six bits.
///
/// # Safety
/// The machine has `V`'s instruction set.
#[inline(always)]
unsafe fn six_bits<V: Vector, const BITS: u32>(w: V::Int) -> V::Int {
    // SAFETY: the caller's promise.
    unsafe { V::and(V::shr::<BITS>(w), V::splat(63)) }
}

/// The four low bits at `BITS` of `low` under the two top bits of the byte at `TOP − 6` of `top`.
///
/// # Safety
/// The machine has `V`'s instruction set.
#[inline(always)]
unsafe fn split_bits<V: Vector, const BITS: u32, const TOP: u32>(low: V::Int, top: V::Int) -> V::Int {
    // SAFETY: the caller's promise.
    unsafe {
        let low = V::and(V::shr::<BITS>(low), V::splat(15));
        V::or(low, V::shl::<4>(V::and(V::shr::<TOP>(top), V::splat(3))))
    }
}

impl Unpack for Q4K {
    #[inline(always)]
    unsafe fn block<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
        // SAFETY: the caller's promise.
        unsafe {
            let [head, s, m, high] = V::gather4(rows, first, offset);
            let d = V::half_to_float(head);
            let dmin = V::mul(V::half_to_float(V::shr::<16>(head)), V::splat_f(-1.0));
            let groups = [
                (six_bits::<V, 0>(s), six_bits::<V, 0>(m)),
                (six_bits::<V, 8>(s), six_bits::<V, 8>(m)),
                (six_bits::<V, 16>(s), six_bits::<V, 16>(m)),
                (six_bits::<V, 24>(s), six_bits::<V, 24>(m)),
                (split_bits::<V, 0, 6>(high, s), split_bits::<V, 4, 6>(high, m)),
                (split_bits::<V, 8, 14>(high, s), split_bits::<V, 12, 14>(high, m)),
                (split_bits::<V, 16, 22>(high, s), split_bits::<V, 20, 22>(high, m)),
                (split_bits::<V, 24, 30>(high, s), split_bits::<V, 28, 30>(high, m)),
            ];
            for (g, (scale, min)) in groups.into_iter().enumerate() {
                sink.scale(g, V::mul(d, V::to_float(scale)));
                sink.min(g, V::mul(dmin, V::to_float(min)));
            }
            let mask = V::splat(0x0f0f_0f0f);
            for part in 0..8 {
                // 32 bytes hold two groups; this half of them the same half of both.
                let quad = part / 2 * 16 + part % 2 * 4;
                for (j, w) in V::gather4(rows, first, offset + 16 + 16 * part).into_iter().enumerate() {
                    sink.quad(quad + j, V::and(w, mask));
                    sink.quad(quad + j + 8, V::and(V::shr::<4>(w), mask));
                }
            }
        }
    }
}

impl Unpack for Q6K {
    #[inline(always)]
    unsafe fn block<V: Vector>(rows: &Rows, first: usize, offset: usize, sink: &mut impl Sink<V>) {
        // SAFETY: the caller's promise.
        unsafe {
            // The f16 ends the block: read the word that ends with it.
            let d = V::half_to_float(V::shr::<16>(V::gather(rows, first, offset + 206)));
            for (i, w) in V::gather4(rows, first, offset + 192).into_iter().enumerate() {
                let bytes = [V::shl::<24>(w), V::shl::<16>(w), V::shl::<8>(w), w];
                for (j, b) in bytes.into_iter().enumerate() {
                    sink.scale(4 * i + j, V::mul(d, V::to_float(V::sar::<24>(b))));
                }
            }
            let (low, two, top) = (V::splat(0x0f0f_0f0f), V::splat(0x0303_0303), V::splat(0x3030_3030));
            for part in 0..4 {
                // Half of 128 elements, then half of its four runs of 32.
                let (half, side) = (part / 2, part % 2);
                let a = V::gather4(rows, first, offset + 64 * half + 16 * side);
                let b = V::gather4(rows, first, offset + 64 * half + 32 + 16 * side);
                let h = V::gather4(rows, first, offset + 128 + 32 * half + 16 * side);
                for j in 0..4 {
                    let quad = 32 * half + 4 * side + j;
                    let first_run = V::shl::<4>(V::and(h[j], two));
                    let second_run = V::and(V::shl::<2>(h[j]), top);
                    let fourth_run = V::and(V::shr::<2>(h[j]), top);
                    sink.quad(quad, V::or(V::and(a[j], low), first_run));
                    sink.quad(quad + 8, V::or(V::and(b[j], low), second_run));
                    let (a, b) = (V::and(V::shr::<4>(a[j]), low), V::and(V::shr::<4>(b[j]), low));
                    sink.quad(quad + 16, V::or(a, V::and(h[j], top)));
                    sink.quad(quad + 24, V::or(b, fourth_run));
                }
            }
        }
    }
}

/// All blocks of the source into one panel.
///
/// # Safety
/// The machine has `V`'s instruction set, the source is readable, the panel has room for its columns.
#[inline(always)]
pub(crate) unsafe fn blocks<V: Vector, F: Unpack>(source: &Source, to: &IntPanels) {
    let blocks = source.cols / F::ELEMS;
    let mut ahead = source.ahead;
    let share = ahead.share(blocks);
    for b in 0..blocks {
        ahead.ask(share);
        for first in (0..PANEL_ROWS).step_by(V::LANES) {
            // SAFETY: the caller's promise; block `b` lies inside `cols`.
            unsafe {
                let mut sink = PanelSink {
                    quants: to.quants.add(b * F::ELEMS * PANEL_ROWS + first * 4),
                    groups: to.groups.add(b * (F::ELEMS / F::GROUP) * GROUP_FLOATS + first),
                };
                F::block::<V>(&source.rows, first, b * F::BYTES, &mut sink);
            }
        }
    }
}

/// `cols` columns of one integer panel as exact floats `[cols][16]`.
///
/// # Safety
/// The machine has `V`'s instruction set, both panels have `cols` columns.
#[inline(always)]
pub(crate) unsafe fn expand<V: Vector, F: BlockFormat>(cols: usize, from: &IntPanels, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let offset = V::splat(F::OFFSET_LOG2.map_or(0, |s| 1 << s));
        let byte = V::splat(0xff);
        for first in (0..PANEL_ROWS).step_by(V::LANES) {
            for quad in 0..cols / 4 {
                let at = from.groups.add(quad * 4 / F::GROUP * GROUP_FLOATS + first);
                let (scale, min) = (V::load_f(at), V::load_f(at.add(2 * PANEL_ROWS)));
                let w = V::load(from.quants.add(quad * 4 * PANEL_ROWS + first * 4));
                let q = [w, V::shr::<8>(w), V::shr::<16>(w), V::shr::<24>(w)];
                for (j, q) in q.into_iter().enumerate() {
                    let q = V::to_float(V::sub(V::and(q, byte), offset));
                    // The product is exact in f32, so that one or two roundings give the same bits.
                    let w = if F::HAS_MIN { V::mul_add(q, scale, min) } else { V::mul(q, scale) };
                    V::store_f(to.add((quad * 4 + j) * PANEL_ROWS + first), w);
                }
            }
        }
    }
}

/// A plain float format.
pub(crate) trait FloatFormat {
    /// Bytes of an element.
    const BYTES: usize;
    /// The element at `p`.
    ///
    /// # Safety
    /// `BYTES` bytes are readable.
    unsafe fn one(p: *const u8) -> f32;
    /// The elements in one word of each row, first element first; `4 / BYTES` of them count.
    ///
    /// # Safety
    /// The machine has `V`'s instruction set.
    unsafe fn word<V: Vector>(w: V::Int) -> [V::Float; 2];
}

/// IEEE binary32.
pub(crate) struct Float32;
/// IEEE binary16.
pub(crate) struct Float16;
/// bfloat16.
pub(crate) struct BFloat16;

impl FloatFormat for Float32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<f32>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn word<V: Vector>(w: V::Int) -> [V::Float; 2] {
        // SAFETY: the caller's promise.
        unsafe { [V::as_float(w), V::as_float(w)] }
    }
}

impl FloatFormat for Float16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        half::f16::from_bits(unsafe { p.cast::<u16>().read_unaligned() }).to_f32()
    }

    #[inline(always)]
    unsafe fn word<V: Vector>(w: V::Int) -> [V::Float; 2] {
        // SAFETY: the caller's promise.
        unsafe { [V::half_to_float(w), V::half_to_float(V::shr::<16>(w))] }
    }
}

impl FloatFormat for BFloat16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        half::bf16::from_bits(unsafe { p.cast::<u16>().read_unaligned() }).to_f32()
    }

    #[inline(always)]
    unsafe fn word<V: Vector>(w: V::Int) -> [V::Float; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let high = V::splat(0xffff_0000_u32.cast_signed());
            [V::as_float(V::shl::<16>(w)), V::as_float(V::and(w, high))]
        }
    }
}

/// All columns of plain float rows into one float panel `[cols][16]`.
///
/// # Safety
/// The machine has `V`'s instruction set, the source is readable, the panel has room for its columns.
#[inline(always)]
pub(crate) unsafe fn floats<V: Vector, F: FloatFormat>(source: &Source, to: *mut f32) {
    let per_word = 4 / F::BYTES;
    let whole = source.cols / (4 * per_word);
    source.ahead.ask_all();
    // SAFETY: the caller's promise; `whole` runs of 16 bytes lie inside the columns, the rest is read one by one.
    unsafe {
        for first in (0..PANEL_ROWS).step_by(V::LANES) {
            for run in 0..whole {
                for (j, w) in V::gather4(&source.rows, first, run * 16).into_iter().enumerate() {
                    for (i, v) in F::word::<V>(w).into_iter().take(per_word).enumerate() {
                        V::store_f(to.add(((run * 4 + j) * per_word + i) * PANEL_ROWS + first), v);
                    }
                }
            }
        }
        for k in whole * 4 * per_word..source.cols {
            for r in 0..PANEL_ROWS {
                *to.add(k * PANEL_ROWS + r) = F::one(source.rows.at(r, k * F::BYTES));
            }
        }
    }
}
