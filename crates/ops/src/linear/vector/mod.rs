//! What a vector instruction set must offer so that the panels, the unpackers and the tile kernels can be written once.
//!
//! Everything is `inline(always)` and becomes machine code of the instruction set only inside the entry points that the `entries!`
//! macro makes, which carry the target features.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod portable;

use crate::dequant::BlockFormat;
use crate::linear::direct::RowTile;
use crate::linear::panel::{FloatTile, IntPanels, IntTile, Rows, Source};
use crate::linear::unpack::{FloatFormat, Unpack};
use crate::quantize::Group;

/// Vectors of `LANES` 32-bit lanes. One lane is one weight row.
///
/// # Safety
/// Implementors' methods may only run on a machine that has the instruction set; pointers must be valid for the bytes that a method
/// names. No alignment is asked of any pointer.
pub(crate) trait Vector: Copy {
    /// `LANES` 32-bit integers (or four bytes a lane).
    type Int: Copy;
    /// `LANES` floats.
    type Float: Copy;
    /// Lanes of a vector: 4, 8 or 16.
    const LANES: usize;
    /// Whether [`Vector::mul_add`] rounds once.
    const FUSED: bool;
    /// Whether [`Vector::dot_wide`] takes the 128 off its unsigned operand itself.
    const WIDE_IS_SIGNED: bool;

    /// `LANES` words from `p`.
    unsafe fn load(p: *const u8) -> Self::Int;
    /// `LANES` words to `p`.
    unsafe fn store(p: *mut u8, v: Self::Int);
    /// `LANES` floats from `p`.
    unsafe fn load_f(p: *const f32) -> Self::Float;
    /// `LANES` floats to `p`.
    unsafe fn store_f(p: *mut f32, v: Self::Float);
    /// One word in every lane.
    unsafe fn splat(v: i32) -> Self::Int;
    /// One float in every lane.
    unsafe fn splat_f(v: f32) -> Self::Float;
    /// Bitwise and.
    unsafe fn and(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Bitwise or.
    unsafe fn or(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Bitwise exclusive or.
    unsafe fn xor(a: Self::Int, b: Self::Int) -> Self::Int;
    /// The same bits as integers.
    unsafe fn as_int(v: Self::Float) -> Self::Int;
    /// Lane-wise wrapping sum of words.
    unsafe fn add_int(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Lane-wise difference of words.
    unsafe fn sub(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Logical shift right of each word by `S` bits, 0 ≤ S < 32.
    unsafe fn shr<const S: u32>(v: Self::Int) -> Self::Int;
    /// Shift left of each word by `S` bits, 0 ≤ S < 32.
    unsafe fn shl<const S: u32>(v: Self::Int) -> Self::Int;
    /// Arithmetic shift right of each word by `S` bits, 0 < S < 32.
    unsafe fn sar<const S: u32>(v: Self::Int) -> Self::Int;
    /// Words as signed integers, converted.
    unsafe fn to_float(v: Self::Int) -> Self::Float;
    /// The same bits as floats.
    unsafe fn as_float(v: Self::Int) -> Self::Float;
    /// The f16 in the low half of each word, widened.
    unsafe fn half_to_float(v: Self::Int) -> Self::Float;
    /// Product.
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    /// Sum.
    unsafe fn add(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a·b + c`, one rounding where the machine has it.
    unsafe fn mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// `acc + Σ u·s` over the four bytes of each lane, `u` unsigned and ≤ 127, `s` signed; exact.
    unsafe fn dot(acc: Self::Int, u: Self::Int, s: Self::Int) -> Self::Int;
    /// The same for any unsigned `u`: `acc + Σ u·s`, or `acc + Σ (u − 128)·s` where `WIDE_IS_SIGNED`; exact.
    unsafe fn dot_wide(acc: Self::Int, u: Self::Int, s: Self::Int) -> Self::Int;
    /// Lane-wise larger of unsigned words.
    unsafe fn max_u32(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Largest unsigned word.
    unsafe fn reduce_max_u32(v: Self::Int) -> u32;
    /// Wrapping sum of the words.
    unsafe fn reduce_add(v: Self::Int) -> i32;
    /// The low byte of each word to `LANES` bytes at `p`.
    unsafe fn store_bytes(p: *mut i8, v: Self::Int);
    /// Word `offset` bytes into each of the rows `first..first + LANES`.
    unsafe fn gather(rows: &Rows, first: usize, offset: usize) -> Self::Int;
    /// Four words from `offset` bytes into each of the rows `first..first + LANES`, transposed: result `j` holds word `j` of each row.
    unsafe fn gather4(rows: &Rows, first: usize, offset: usize) -> [Self::Int; 4];
}

/// The kernels of one instruction set, compiled with its target features.
///
/// # Safety
/// As for [`Vector`]; the argument structs say which pointers must be valid for what.
pub(crate) trait Kernels: Vector {
    /// Panels of 16 rows that one tile spans.
    const PANELS: usize;
    /// Input rows of an integer tile at most, a power of two.
    const INT_ROWS: usize;
    /// Input rows of a float tile at most, a power of two.
    const FLOAT_ROWS: usize;

    /// Integer tile of `rows` input rows, a power of two ≤ `INT_ROWS`, and `panels` ≤ `PANELS`.
    unsafe fn int_tile<F: BlockFormat>(rows: usize, panels: usize, tile: &IntTile);
    /// One input row straight from the weight's bytes.
    unsafe fn row_tile<F: Unpack>(tile: &RowTile);
    /// Float tile of `rows` input rows, a power of two ≤ `FLOAT_ROWS`, and `panels` ≤ `PANELS`.
    unsafe fn float_tile(rows: usize, panels: usize, tile: &FloatTile);
    /// Unpacks the columns of one panel from a quantised format.
    unsafe fn unpack<F: Unpack>(source: &Source, to: &IntPanels);
    /// Expands `cols` columns of one integer panel to a float panel, exactly.
    unsafe fn expand<F: BlockFormat>(cols: usize, from: &IntPanels, to: *mut f32);
    /// Quantises `groups.len()` groups of 32 from `x` to `ints`, and unless `left` is null what that leaves over to `left`.
    unsafe fn quantise(x: *const f32, ints: *mut i8, groups: &mut [Group], left: *mut f32);
    /// Unpacks the columns of one panel from plain floats.
    unsafe fn unpack_float<F: FloatFormat>(source: &Source, to: *mut f32);
}

/// Implements [`Kernels`] for a [`Vector`] by wrapping the generic bodies in functions that carry its target features.
macro_rules! entries {
    ($vector:ty, [$(#[$features:meta])*], panels: $panels:literal, int_rows: $int:literal, float_rows: $float:literal) => {
        impl $crate::linear::vector::Kernels for $vector {
            const PANELS: usize = $panels;
            const INT_ROWS: usize = $int;
            const FLOAT_ROWS: usize = $float;

            $(#[$features])*
            unsafe fn int_tile<F: $crate::dequant::BlockFormat>(
                rows: usize,
                panels: usize,
                tile: &$crate::linear::panel::IntTile,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::linear::kernel::int_any::<$vector, F>(rows, panels, tile) }
            }

            $(#[$features])*
            unsafe fn row_tile<F: $crate::linear::unpack::Unpack>(tile: &$crate::linear::direct::RowTile) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::linear::direct::row_any::<$vector, F>(tile) }
            }

            $(#[$features])*
            unsafe fn float_tile(rows: usize, panels: usize, tile: &$crate::linear::panel::FloatTile) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::linear::kernel::float_any::<$vector>(rows, panels, tile) }
            }

            $(#[$features])*
            unsafe fn unpack<F: $crate::linear::unpack::Unpack>(
                source: &$crate::linear::panel::Source,
                to: &$crate::linear::panel::IntPanels,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::linear::unpack::blocks::<$vector, F>(source, to) }
            }

            $(#[$features])*
            unsafe fn expand<F: $crate::dequant::BlockFormat>(
                cols: usize,
                from: &$crate::linear::panel::IntPanels,
                to: *mut f32,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::linear::unpack::expand::<$vector, F>(cols, from, to) }
            }

            $(#[$features])*
            unsafe fn quantise(
                x: *const f32,
                ints: *mut i8,
                groups: &mut [$crate::quantize::Group],
                left: *mut f32,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::quantize::groups_on::<$vector>(x, ints, groups, left) }
            }

            $(#[$features])*
            unsafe fn unpack_float<F: $crate::linear::unpack::FloatFormat>(
                source: &$crate::linear::panel::Source,
                to: *mut f32,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { $crate::linear::unpack::floats::<$vector, F>(source, to) }
            }
        }
    };
}
pub(crate) use entries;
