//! One input row times 16 weight rows straight from their file's bytes: a decode reads each weight once, so no panel pays for itself.
//!
//! The same unpackers, integer dots and roundings as the panels' kernel, in the same order: an output has the same bits either way.

use super::kernel::{MAGIC, Scaled, dot, finish, first_int};
use super::panel::{Dest, PANEL_ROWS, Source};
use super::unpack::{Sink, Unpack};
use super::vector::Vector;
use crate::dequant::MAX_BLOCK_GROUPS;
use crate::quantize::Group;

/// One input row and 16 weight rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTile {
    /// All columns of the weight rows, which must exist.
    pub source: Source,
    /// Quantised input row.
    pub x: *const i8,
    /// Scales and sums of the input, one a 32 columns.
    pub meta: *const Group,
    /// 8-bit digits of an input element.
    pub digits: usize,
    /// Elements from one digit to the next (32 times the groups).
    pub digit_stride: usize,
    /// Where the sums go.
    pub dest: Dest,
}

/// Sums of one block, a weight row a lane, for `D` digits.
struct Dots<'a, V: Vector, F, const D: usize> {
    tile: &'a RowTile,
    /// First column of the block.
    col: usize,
    ints: [[V::Int; D]; MAX_BLOCK_GROUPS],
    scaled: [Scaled<V>; MAX_BLOCK_GROUPS],
    format: std::marker::PhantomData<F>,
}

impl<V: Vector, F: Unpack, const D: usize> Dots<'_, V, F, D> {
    /// Digit `d` of group `g` of the block.
    ///
    /// # Safety
    /// The tile's input has the block's columns.
    #[inline(always)]
    unsafe fn meta(&self, d: usize, g: usize) -> &Group {
        // SAFETY: the caller's promise.
        unsafe { &*self.tile.meta.add((d * self.tile.digit_stride + self.col + g * F::GROUP) / 32) }
    }
}

impl<V: Vector, F: Unpack, const D: usize> Sink<V> for Dots<'_, V, F, D> {
    #[inline(always)]
    unsafe fn quad(&mut self, quad: usize, v: V::Int) {
        let g = quad * 4 / F::GROUP;
        for d in 0..D {
            // SAFETY: the tile's input has the block's columns.
            unsafe {
                let x = self.tile.x.add(d * self.tile.digit_stride + self.col + quad * 4);
                let x = V::splat(x.cast::<i32>().read_unaligned());
                self.ints[g][d] = dot::<V, F>(self.ints[g][d], v, x);
            }
        }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, g: usize, scale: V::Float) {
        self.scaled[g].scale = scale;
        // SAFETY: the caller's promise.
        self.scaled[g].bias = unsafe { V::mul(scale, V::splat_f(-MAGIC)) };
    }

    #[inline(always)]
    unsafe fn min(&mut self, g: usize, min: V::Float) {
        self.scaled[g].min = min;
    }
}

/// Runs the tile.
///
/// # Safety
/// The machine has `V`'s instruction set, the tile's pointers are valid for its columns and 16 rows, digits are 1 or 2.
#[inline(always)]
pub(crate) unsafe fn row_any<V: Vector, F: Unpack>(tile: &RowTile) {
    // SAFETY: the caller's promise.
    unsafe {
        match (PANEL_ROWS / V::LANES, tile.digits) {
            (1, 1) => row::<V, F, 1, 1>(tile),
            (1, 2) => row::<V, F, 1, 2>(tile),
            (2, 1) => row::<V, F, 2, 1>(tile),
            (2, 2) => row::<V, F, 2, 2>(tile),
            (4, 1) => row::<V, F, 4, 1>(tile),
            (4, 2) => row::<V, F, 4, 2>(tile),
            (_, digits) => unreachable!("{digits} digits"),
        }
    }
}

/// `NV` vectors of weight rows, `D` digits.
///
/// # Safety
/// As [`row_any`].
#[inline(always)]
unsafe fn row<V: Vector, F: Unpack, const NV: usize, const D: usize>(tile: &RowTile) {
    // SAFETY: the caller's promise; blocks lie inside the columns.
    unsafe {
        let mut sums = [[V::splat_f(0.0); NV]; 1];
        let blocks = tile.source.cols / F::ELEMS;
        let mut ahead = tile.source.ahead;
        let share = ahead.share(blocks);
        for b in 0..blocks {
            ahead.ask(share);
            for (v, sum) in sums[0].iter_mut().enumerate() {
                *sum = block::<V, F, D>(tile, v * V::LANES, b, *sum);
            }
        }
        finish::<V, 1, NV>(&tile.dest, sums);
    }
}

/// Block `b` of weight rows `first..first + LANES` onto `sum`.
///
/// # Safety
/// As [`row_any`].
#[inline(always)]
unsafe fn block<V: Vector, F: Unpack, const D: usize>(
    tile: &RowTile,
    first: usize,
    b: usize,
    sum: V::Float,
) -> V::Float {
    let groups = F::ELEMS / F::GROUP;
    // SAFETY: the caller's promise.
    unsafe {
        let none = Scaled { scale: V::splat_f(0.0), bias: V::splat_f(0.0), min: V::splat_f(0.0) };
        let mut dots = Dots::<V, F, D> {
            tile,
            col: b * F::ELEMS,
            ints: [[V::splat(0); D]; MAX_BLOCK_GROUPS],
            scaled: [none; MAX_BLOCK_GROUPS],
            format: std::marker::PhantomData,
        };
        for g in 0..groups {
            for d in 0..D {
                dots.ints[g][d] = V::splat(first_int::<V, F>(dots.meta(d, g), g));
            }
        }
        F::block::<V>(&tile.source.rows, first, b * F::BYTES, &mut dots);
        let mut sum = sum;
        for g in 0..groups {
            for d in 0..D {
                sum = dots.scaled[g].add_to::<F>(sum, dots.ints[g][d], dots.meta(d, g), g);
            }
        }
        sum
    }
}
