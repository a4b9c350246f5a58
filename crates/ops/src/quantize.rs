//! Activations of a linear layer, quantised once a call and shared by every weight that multiplies them.
//!
//! One digit is the scheme of GGUF's Q8_0 / Q8_1 dot products with the scale kept in f32: per 32 elements, scale = max|x| / 127, integers
//! rounded to nearest even. So its error is no larger than theirs. A second digit is the same scheme applied to what the first one
//! left over, at most half a step of it: the error falls 254-fold, for twice the dots.

use rayon::prelude::*;

use crate::isa::Isa;
use crate::linear::kernel::MAGIC;
use crate::linear::vector::{self, Kernels, Vector};
use crate::norm::PARALLEL_ELEMS;

/// How a linear layer multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Weights dequantised exactly, f32 activations, f32 multiply-add.
    F32,
    /// Activations as 8-bit integers with one scale per 32 elements, integer dots; float weights still multiply in f32.
    Int8,
    /// Activations as two such digits, the second for the remainder of the first: about 16 bits, integer dots.
    Int16,
}

impl Precision {
    /// 8-bit digits of an activation; 0 where it stays a float.
    pub const fn digits(self) -> usize {
        match self {
            Precision::F32 => 0,
            Precision::Int8 => 1,
            Precision::Int16 => 2,
        }
    }

    /// The name that options and records use.
    pub const fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Int8 => "int8",
            Precision::Int16 => "int16",
        }
    }
}

/// Elements of a quantisation group.
const GROUP: usize = 32;

/// Scale and sums of 32 quantised elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Group {
    /// Value of one step.
    pub scale: f32,
    /// `scale` times the sum of the integers, for weights with a minimum.
    pub scaled_sum: f32,
    /// Sum of the 32 integers, for weights with an offset.
    pub sum: i32,
    /// The same of each 16.
    pub half_sums: [i32; 2],
}

/// Input rows of a linear layer, in the forms that its weights ask for.
#[derive(Clone, Debug)]
pub struct LinearInput {
    precision: Precision,
    keeps_floats: bool,
    rows: usize,
    cols: usize,
    floats: Vec<f32>,
    /// Elements of room for one digit; digit `d` starts at `d * room`.
    room: usize,
    ints: Vec<i8>,
    groups: Vec<Group>,
}

impl LinearInput {
    /// Room for `max_rows` rows of `max_cols` elements. Holds the rows in f32 as well, since float weights multiply those.
    pub fn new(max_rows: usize, max_cols: usize, precision: Precision) -> LinearInput {
        let mut input = LinearInput::quantised_only(max_rows, max_cols, precision);
        input.keeps_floats = true;
        input.floats = vec![0.0; max_rows * max_cols];
        input
    }

    /// The same without the f32 rows, which saves their copy: for inputs that only meet quantised weights in an integer precision.
    /// A float weight then makes [`linear`](crate::linear()) panic.
    pub fn quantised_only(max_rows: usize, max_cols: usize, precision: Precision) -> LinearInput {
        // Whole groups, so that a digit's groups start where its integers do.
        let room = (max_rows * max_cols).next_multiple_of(GROUP);
        let ints = room * precision.digits();
        LinearInput {
            precision,
            keeps_floats: false,
            rows: 0,
            cols: 0,
            floats: Vec::new(),
            room,
            ints: vec![0; ints],
            groups: vec![Group::default(); ints / GROUP],
        }
    }

    /// Takes `x` `[rows, cols]`, quantising it where the precision asks for that and `cols` is a multiple of 32 (quantised weights
    /// have no other).
    ///
    /// A group that holds an infinity or a NaN becomes NaN as a whole, and so every output of its row; no other row is touched.
    ///
    /// # Panics
    /// When `x` has another length or exceeds the room.
    pub fn set(&mut self, x: &[f32], rows: usize, cols: usize) {
        assert_eq!(Some(x.len()), rows.checked_mul(cols), "linear input: x");
        (self.rows, self.cols) = (rows, cols);
        if self.keeps_floats {
            assert!(x.len() <= self.floats.len(), "linear input: room for {} elements", self.floats.len());
            self.floats[..x.len()].copy_from_slice(x);
        }
        if self.precision == Precision::F32 || !cols.is_multiple_of(GROUP) {
            return;
        }
        assert!(x.len() <= self.room, "linear input: room for {} elements", self.room);
        let (first, second) = self.ints.split_at_mut(self.room);
        let (first_groups, second_groups) = self.groups.split_at_mut(self.room / GROUP);
        let (n, two) = (x.len(), self.precision.digits() == 2);
        // An absent second digit is empty slices.
        let (ints, groups) = (&mut first[..n], &mut first_groups[..n / GROUP]);
        let (rest, rest_groups) =
            if two { (&mut second[..n], &mut second_groups[..n / GROUP]) } else { (second, second_groups) };
        let isa = Isa::best();
        if n < PARALLEL_ELEMS {
            return digits(isa, x, (ints, groups), (rest, rest_groups));
        }
        const PART: usize = PARALLEL_ELEMS / 4;
        let parts = (x.par_chunks(PART), ints.par_chunks_mut(PART), groups.par_chunks_mut(PART / GROUP));
        if two {
            let rests = (rest.par_chunks_mut(PART), rest_groups.par_chunks_mut(PART / GROUP));
            parts
                .into_par_iter()
                .zip(rests.into_par_iter())
                .for_each(|((x, i, g), rest)| digits(isa, x, (i, g), rest));
        } else {
            parts.into_par_iter().for_each(|(x, i, g)| digits(isa, x, (i, g), (&mut [], &mut [])));
        }
    }

    /// Rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How this input is multiplied.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.floats.len() * 4 + self.ints.len() + self.groups.len() * size_of::<Group>()
    }

    /// Whether the rows are there in f32.
    pub(crate) fn has_floats(&self) -> bool {
        self.keeps_floats
    }

    /// Row `m` from column `k` on.
    pub(crate) fn floats(&self, m: usize, k: usize) -> *const f32 {
        self.floats[m * self.cols + k..].as_ptr()
    }

    /// First digit of quantised row `m` from column `k` (a multiple of 32) on, and its groups.
    pub(crate) fn quantised(&self, m: usize, k: usize) -> (*const i8, *const Group) {
        let at = m * self.cols + k;
        (self.ints[at..].as_ptr(), self.groups[at / GROUP..].as_ptr())
    }

    /// Elements from one digit of a row to the next.
    pub(crate) fn digit_stride(&self) -> usize {
        self.room
    }
}

/// Quantises whole groups into their first digit, and what that leaves over into the second, where there is one.
fn digits(isa: Isa, x: &[f32], first: (&mut [i8], &mut [Group]), second: (&mut [i8], &mut [Group])) {
    if second.0.is_empty() {
        return quantise(isa, x, first.0, first.1, None);
    }
    // A chunk on the stack: the remainder is never kept.
    const CHUNK: usize = 16 * GROUP;
    let mut left = [0.0f32; CHUNK];
    let firsts = first.0.chunks_mut(CHUNK).zip(first.1.chunks_mut(CHUNK / GROUP));
    let seconds = second.0.chunks_mut(CHUNK).zip(second.1.chunks_mut(CHUNK / GROUP));
    for ((x, (ints, groups)), (more_ints, more_groups)) in x.chunks(CHUNK).zip(firsts).zip(seconds) {
        let left = &mut left[..x.len()];
        quantise(isa, x, ints, groups, Some(left));
        quantise(isa, left, more_ints, more_groups, None);
    }
}

/// Quantises whole groups with the kernels of `isa`; with `left`, what the integers leave over goes there.
fn quantise(isa: Isa, x: &[f32], ints: &mut [i8], groups: &mut [Group], left: Option<&mut [f32]>) {
    assert!(x.len() == ints.len() && x.len() == groups.len() * GROUP, "whole groups");
    assert!(left.as_ref().is_none_or(|left| left.len() == x.len()), "a remainder an element");
    let left = left.map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr);
    let (x, ints) = (x.as_ptr(), ints.as_mut_ptr());
    // SAFETY: an `Isa` in use has passed `is_available`; the lengths were checked.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => vector::avx512::Avx512::quantise(x, ints, groups, left),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => vector::avx2::Ymm::<true>::quantise(x, ints, groups, left),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => vector::avx2::Ymm::<false>::quantise(x, ints, groups, left),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => vector::neon::Neon::quantise(x, ints, groups, left),
            _ => vector::portable::Portable::quantise(x, ints, groups, left),
        }
    }
}

/// Quantises `groups.len()` groups of 32 elements.
///
/// # Safety
/// The machine has `V`'s instruction set; `x`, `ints` and (unless null) `left` hold the groups' elements.
#[inline(always)]
pub(crate) unsafe fn groups_on<V: Vector>(
    x: *const f32,
    ints: *mut i8,
    groups: &mut [Group],
    left: *mut f32,
) {
    for (g, group) in groups.iter_mut().enumerate() {
        // SAFETY: the caller's promise; a null pointer is moved but never followed.
        unsafe {
            let left = if left.is_null() { left } else { left.add(g * GROUP) };
            *group = group_on::<V>(x.add(g * GROUP), ints.add(g * GROUP), left);
        }
    }
}

/// One group.
///
/// # Safety
/// As [`groups_on`].
#[inline(always)]
unsafe fn group_on<V: Vector>(x: *const f32, ints: *mut i8, left: *mut f32) -> Group {
    // SAFETY: the caller's promise; a group is a whole number of vectors.
    unsafe {
        // Magnitudes order like their bits, and infinities and NaNs come out on top.
        let mut top = V::splat(0);
        for i in (0..GROUP).step_by(V::LANES) {
            top = V::max_u32(top, V::and(V::load(x.add(i).cast()), V::splat(0x7fff_ffff)));
        }
        let max = f32::from_bits(V::reduce_max_u32(top));
        let inverse = 127.0 / max;
        let mut group = Group { scale: max / 127.0, ..Group::default() };
        if !(inverse.is_finite() && max.is_finite()) {
            // Zero, or so small that the inverse overflows (below 4e-37), or not finite: the integers are zero.
            ints.write_bytes(0, GROUP);
            if !left.is_null() {
                left.copy_from_nonoverlapping(x, GROUP);
            }
            if !max.is_finite() {
                (group.scale, group.scaled_sum) = (f32::NAN, f32::NAN);
            }
            return group;
        }
        // Adding 1.5 · 2^23 rounds to the nearest even integer and leaves it in the low bits.
        let magic = V::splat_f(MAGIC);
        let bits = V::splat(MAGIC.to_bits().cast_signed());
        let (scale, step) = (V::splat_f(inverse), V::splat_f(-group.scale));
        for half in 0..2 {
            let mut sums = V::splat(0);
            for i in (half * 16..half * 16 + 16).step_by(V::LANES) {
                let shifted = V::add(V::mul(V::load_f(x.add(i)), scale), magic);
                let q = V::sub(V::as_int(shifted), bits);
                V::store_bytes(ints.add(i), q);
                if !left.is_null() {
                    // The integer as a float is exact; so is the remainder, where the multiply-add rounds once.
                    let float = V::add(shifted, V::splat_f(-MAGIC));
                    V::store_f(left.add(i), V::mul_add(float, step, V::load_f(x.add(i))));
                }
                sums = V::add_int(sums, q);
            }
            group.half_sums[half] = V::reduce_add(sums);
        }
        group.sum = group.half_sums[0] + group.half_sums[1];
        group.scaled_sum = group.scale * group.sum as f32;
        group
    }
}
