//! Activations of a linear layer, quantised once a call and shared by every weight that multiplies them.
//!
//! The scheme is that of GGUF's Q8_0 / Q8_1 dot products with the scale kept in f32: per 32 elements, scale = max|x| / 127, integers
//! rounded to nearest even. So its error is no larger than theirs.

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
    ints: Vec<i8>,
    groups: Vec<Group>,
}

impl LinearInput {
    /// Room for `max_rows` rows of `max_cols` elements. Holds the rows in f32 as well, since float weights multiply those.
    pub fn new(max_rows: usize, max_cols: usize, precision: Precision) -> LinearInput {
        let elems = max_rows * max_cols;
        let ints = if precision == Precision::Int8 { elems } else { 0 };
        LinearInput {
            precision,
            keeps_floats: true,
            rows: 0,
            cols: 0,
            floats: vec![0.0; elems],
            ints: vec![0; ints],
            groups: vec![Group::default(); ints / GROUP],
        }
    }

    /// The same without the f32 rows, which saves their copy: for inputs that only meet quantised weights in [`Precision::Int8`].
    /// A float weight then makes [`linear`](crate::linear()) panic.
    pub fn quantised_only(max_rows: usize, max_cols: usize) -> LinearInput {
        let mut input = LinearInput::new(0, 0, Precision::Int8);
        input.keeps_floats = false;
        input.ints = vec![0; max_rows * max_cols];
        input.groups = vec![Group::default(); max_rows * max_cols / GROUP];
        input
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
        assert!(x.len() <= self.ints.len(), "linear input: room for {} elements", self.ints.len());
        let (ints, groups) = (&mut self.ints[..x.len()], &mut self.groups[..x.len() / GROUP]);
        let isa = Isa::best();
        if x.len() < PARALLEL_ELEMS {
            return quantise(isa, x, ints, groups);
        }
        const PART: usize = PARALLEL_ELEMS / 4;
        (x.par_chunks(PART), ints.par_chunks_mut(PART), groups.par_chunks_mut(PART / GROUP))
            .into_par_iter()
            .for_each(|(x, ints, groups)| quantise(isa, x, ints, groups));
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

    /// Quantised row `m` from column `k` (a multiple of 32) on, and its groups.
    pub(crate) fn quantised(&self, m: usize, k: usize) -> (*const i8, *const Group) {
        let at = m * self.cols + k;
        (self.ints[at..].as_ptr(), self.groups[at / GROUP..].as_ptr())
    }
}

/// Quantises whole groups with the kernels of `isa`.
fn quantise(isa: Isa, x: &[f32], ints: &mut [i8], groups: &mut [Group]) {
    assert!(x.len() == ints.len() && x.len() == groups.len() * GROUP, "whole groups");
    let (x, ints) = (x.as_ptr(), ints.as_mut_ptr());
    // SAFETY: an `Isa` in use has passed `is_available`; the lengths were checked.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => vector::avx512::Avx512::quantise(x, ints, groups),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => vector::avx2::Ymm::<true>::quantise(x, ints, groups),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => vector::avx2::Ymm::<false>::quantise(x, ints, groups),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => vector::neon::Neon::quantise(x, ints, groups),
            _ => vector::portable::Portable::quantise(x, ints, groups),
        }
    }
}

/// Quantises `groups.len()` groups of 32 elements.
///
/// # Safety
/// The machine has `V`'s instruction set; `x` and `ints` hold the groups' elements.
#[inline(always)]
pub(crate) unsafe fn groups_on<V: Vector>(x: *const f32, ints: *mut i8, groups: &mut [Group]) {
    for (g, group) in groups.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *group = unsafe { group_on::<V>(x.add(g * GROUP), ints.add(g * GROUP)) };
    }
}

/// One group.
///
/// # Safety
/// As [`groups_on`].
#[inline(always)]
unsafe fn group_on<V: Vector>(x: *const f32, ints: *mut i8) -> Group {
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
            if !max.is_finite() {
                (group.scale, group.scaled_sum) = (f32::NAN, f32::NAN);
            }
            return group;
        }
        // Adding 1.5 · 2^23 rounds to the nearest even integer and leaves it in the low bits.
        let magic = V::splat_f(MAGIC);
        let bits = V::splat(MAGIC.to_bits().cast_signed());
        let scale = V::splat_f(inverse);
        for half in 0..2 {
            let mut sums = V::splat(0);
            for i in (half * 16..half * 16 + 16).step_by(V::LANES) {
                let shifted = V::add(V::mul(V::load_f(x.add(i)), scale), magic);
                let q = V::sub(V::as_int(shifted), bits);
                V::store_bytes(ints.add(i), q);
                sums = V::add_int(sums, q);
            }
            group.half_sums[half] = V::reduce_add(sums);
        }
        group.sum = group.half_sums[0] + group.half_sums[1];
        group.scaled_sum = group.scale * group.sum as f32;
        group
    }
}
