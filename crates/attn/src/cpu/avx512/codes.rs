//! int8 and int4 rows in the direct kernel by integer dot products (VNNI): four products of bytes a lane instead of one of f32.
//!
//! ```text
//! q row     -> step · (d0 + 256 d1 + ..), signed bytes         K: 16 rows as dwords, transposed -> lanes are keys
//! weights   -> step · (d0 + 256 d1 + ..), bytes, a block       V: 4 rows, bytes side by side    -> lanes are columns
//! ```
//! One side of a product is unsigned. Keys enter 128 (int4: 8) too large, and sums start at what that adds; weights are unsigned by nature,
//! and values of int4 enter 16 times too large, in the upper halves of bytes. All sums are exact integers.

use std::arch::x86_64::*;

use suanpan_base::DType;

use super::{Zmm, low};
use crate::cpu::ahead::{Ahead, NEAR};
use crate::cpu::direct::{self, Head, Kv, Rows};
use crate::cpu::element::{Elem, Int4Pair};
use crate::cpu::softmax::Columns;
use crate::cpu::task::{Counts, Scratch, Src, Task};
use crate::cpu::vector::{MAX_LANES, Vector};
use crate::plan::{DIRECT_TASK_ROWS, KEY_BLOCK, Kernel};
use crate::workspace::LINE;

/// Bytes of a vector.
const BYTES: usize = 64;
/// Groups of four keys of a block.
const GROUPS: usize = KEY_BLOCK / 4;
/// Most digits of a query element.
const MAX_DIGITS: usize = 4;
/// Words from a step's digits to the next step's: four rows of them.
const STEP: usize = 4 * MAX_DIGITS;
/// Words that are kept of a query row: what each digit's sums start at, and the step.
const ROW_WORDS: usize = MAX_DIGITS + 1;
/// Where the slot's k holds the digits of weights, in floats: behind the words of every row, on a cache line.
const DIGITS_AT: usize = (DIRECT_TASK_ROWS * ROW_WORDS).next_multiple_of(LINE);

/// An integer type.
trait Code: Elem {
    /// Codes a byte.
    const PER_BYTE: usize;
    /// What is added to keys to make them unsigned.
    const OFFSET: i32;
    /// The same on every byte of a lane, as an exclusive or.
    const FLIP: i32;
    /// What values are multiplied by.
    const VALUE: f32;
}

impl Code for i8 {
    const PER_BYTE: usize = 1;
    const OFFSET: i32 = 128;
    const FLIP: i32 = 0x8080_8080u32 as i32;
    const VALUE: f32 = 1.0;
}

impl Code for Int4Pair {
    const PER_BYTE: usize = 2;
    const OFFSET: i32 = 8;
    const FLIP: i32 = 0x8888_8888u32 as i32;
    const VALUE: f32 = 16.0;
}

/// True for tasks that `run` takes: integers, few rows, value rows of whole vectors.
pub(crate) fn fits(t: &Task<'_>) -> bool {
    let (plan, dtype) = (t.call.plan, t.call.plan.problem.kv_dtype);
    let len = plan.seqs[t.unit.seq as usize].len;
    // Sums of digits are in an order of their own.
    matches!(dtype, DType::I8 | DType::I4)
        && !plan.problem.batch_invariant
        && plan.kernel_for(len) == Kernel::Direct
        && dtype.bytes_of(t.call.heads.head_dim_v).is_multiple_of(BYTES)
}

/// A task that fits.
///
/// # Safety
/// As `Call::run_task`, on a processor with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
pub(crate) unsafe fn run(t: &Task<'_>) -> (Counts, Option<usize>) {
    // SAFETY: forwarded.
    unsafe {
        match (t.call.k, t.call.v) {
            (Src::I8(k), Src::I8(v)) => direct::run::<Zmm, i8, 4>(t, Kv::InPlace(k, v)),
            (Src::I4(k), Src::I4(v)) => direct::run::<Zmm, Int4Pair, 4>(t, Kv::InPlace(k, v)),
            _ => unreachable!("fits was asked"),
        }
    }
}

/// Two digits leave a weight off by at most 2^-16 of the block's largest, a whole block of them by half a unit of a bf16 output; three by
/// 2^-24 each, as f32 would.
fn weight_digits_of(t: &Task<'_>) -> usize {
    if t.call.plan.problem.q_dtype == DType::Bf16 { 2 } else { 3 }
}

/// Three digits hold every bf16 down to 2^-14 of the row's largest exactly, four every f32 to 2^-30 of it.
fn query_digits(t: &Task<'_>) -> usize {
    if t.call.plan.problem.q_dtype == DType::Bf16 { 3 } else { MAX_DIGITS }
}

macro_rules! rows_of_codes {
    ($code:ty) => {
        // SAFETY: VNNI is enabled in the only instance that multiplies codes, `run`.
        unsafe impl Rows<Zmm> for $code {
            #[inline(always)]
            unsafe fn start_row(t: &Task<'_>, w: &Scratch<'_>, row: usize, at: usize) {
                // SAFETY: forwarded.
                unsafe { query_row::<$code>(t, w, row, at) }
            }
            #[inline(always)]
            fn place(i: usize) -> usize {
                value_place(i, <$code>::PER_BYTE)
            }
            #[inline(always)]
            unsafe fn dots<const R: usize, const N: usize>(
                t: &Task<'_>,
                w: &Scratch<'_>,
                h: Head<$code>,
                ahead: &mut Ahead,
                cols: Columns,
            ) {
                // SAFETY: forwarded.
                unsafe {
                    if query_digits(t) == 3 {
                        dot_block::<$code, R, 3>(t, w, h, ahead, cols);
                    } else {
                        dot_block::<$code, R, MAX_DIGITS>(t, w, h, ahead, cols);
                    }
                }
            }
            #[inline(always)]
            unsafe fn values<const R: usize, const N: usize>(
                t: &Task<'_>,
                w: &Scratch<'_>,
                h: Head<$code>,
                ahead: &mut Ahead,
                keys: (usize, usize),
            ) {
                // SAFETY: forwarded.
                unsafe {
                    if weight_digits_of(t) == 2 {
                        add_values::<$code, R, 2>(t, w, h, ahead, keys);
                    } else {
                        add_values::<$code, R, 3>(t, w, h, ahead, keys);
                    }
                }
            }
        }
    };
}

rows_of_codes!(i8);
rows_of_codes!(Int4Pair);

/// Where element `i` of a value stands as `add_values` leaves it: byte 16 L + 4 z + i of 64 in lane 4 L + i of vector z, low halves first.
#[inline(always)]
fn value_place(i: usize, per_byte: usize) -> usize {
    let chunk = BYTES * per_byte;
    let (byte, half) = (i % chunk / per_byte, i % per_byte);
    let (lane, vector) = (byte / 16 * 4 + byte % 4, byte % 16 / 4 * per_byte + half);
    i / chunk * chunk + vector * Zmm::LANES + lane
}

/// Where digit 0 of the first four bytes of the query row at `at` stands; the same of the next bytes is `STEP` further, the other digits
/// behind it. Four rows lie interleaved, so that one step's operands of all of them are one cache line.
#[inline(always)]
unsafe fn query_digits_at(w: &Scratch<'_>, at: usize) -> *mut i32 {
    // SAFETY: four rows of the slot hold four digits of 4 bytes for each four bytes of each row.
    unsafe { w.q.add(at / 4 * 4 * w.q_stride).cast::<i32>().add(at % 4 * MAX_DIGITS) }
}

/// Lays a query row out as digits, bytes in the order in which keys meet them.
#[inline(always)]
unsafe fn query_row<C: Code>(t: &Task<'_>, w: &Scratch<'_>, row: usize, at: usize) {
    let (d, digits) = (t.call.heads.head_dim_qk, query_digits(t));
    // SAFETY: zeros holds a padded row of floats, k the words of every row.
    unsafe {
        let q = w.zeros;
        t.load_query(row, q, 1);
        std::ptr::write_bytes(q.add(d), 0, w.q_stride - d);
        // As integers, sizes of floats are in order, and NaN stands last.
        let mut sizes = _mm512_setzero_si512();
        for i in (0..d).step_by(Zmm::LANES) {
            let bits = _mm512_castps_si512(Zmm::load(q.add(i)).0);
            sizes = _mm512_max_epu32(sizes, _mm512_and_si512(bits, _mm512_set1_epi32(i32::MAX)));
        }
        let top = f32::from_bits(_mm512_reduce_max_epu32(sizes));
        let exponent = ((top.to_bits() >> 23) as i32).max(1) - 127;
        let power = exponent + 3 - 8 * digits as i32;
        let place = query_digits_at(w, at);
        let mut sums = [_mm512_setzero_si512(); MAX_DIGITS];
        for i in (0..w.q_stride).step_by(Zmm::LANES) {
            let x = _mm512_scalef_ps(Zmm::load(q.add(i)).0, _mm512_set1_ps(-power as f32));
            let mut rest = _mm512_cvtps_epi32(x);
            for digit in 0..digits {
                let bytes = _mm512_cvtepi32_epi8(rest);
                sums[digit] = _mm512_add_epi32(sums[digit], _mm512_cvtepi8_epi32(bytes));
                rest = _mm512_srai_epi32::<8>(_mm512_add_epi32(rest, _mm512_set1_epi32(128)));
                // Keys' low halves meet even elements, four at a time, high halves odd ones.
                let halves = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
                let bytes = if C::PER_BYTE == 1 { bytes } else { _mm_shuffle_epi8(bytes, halves) };
                let mut fours = [0i32; 4];
                _mm_storeu_si128(fours.as_mut_ptr().cast(), bytes);
                for (four, x) in fours.into_iter().enumerate() {
                    *place.add((i / 4 + four) * STEP + digit) = x;
                }
            }
        }
        let words: *mut i32 = w.k.add(at * ROW_WORDS).cast();
        for digit in 0..MAX_DIGITS {
            *words.add(digit) = -C::OFFSET * _mm512_reduce_add_epi32(sums[digit]);
        }
        let step = if top.is_finite() { 2f64.powi(power) as f32 } else { f32::NAN };
        *words.add(MAX_DIGITS) = step.to_bits() as i32;
    }
}

/// Bytes of keys as unsigned ones.
#[inline(always)]
unsafe fn unsigned<C: Code>(p: *const C, bytes: usize) -> __m512i {
    // SAFETY: masked bytes are not touched.
    unsafe {
        let x = if bytes >= BYTES {
            _mm512_loadu_si512(p.cast())
        } else {
            _mm512_maskz_loadu_epi8((1u64 << bytes) - 1, p.cast())
        };
        _mm512_xor_si512(x, _mm512_set1_epi32(C::FLIP))
    }
}

/// The low and the high halves of bytes.
#[inline(always)]
unsafe fn halves(x: __m512i) -> (__m512i, __m512i) {
    // SAFETY: as Vector.
    unsafe {
        let mask = _mm512_set1_epi32(0x0f0f_0f0f);
        (_mm512_and_si512(x, mask), _mm512_and_si512(_mm512_srli_epi32::<4>(x), mask))
    }
}

/// s = scale·q·k for R rows and the block's keys, sixteen keys at a time.
#[inline(always)]
unsafe fn dot_block<C: Code, const R: usize, const D: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<C>,
    ahead: &mut Ahead,
    cols: Columns,
) {
    let row_bytes = t.call.heads.head_dim_qk.div_ceil(C::PER_BYTE);
    // SAFETY: checked offsets, also beside the task's keys; within the slot's parts.
    unsafe {
        let mut rows = [std::ptr::null::<i32>(); R];
        for r in 0..R {
            rows[r] = query_digits_at(w, h.row + r);
        }
        let words: *const i32 = w.k.add(h.row * ROW_WORDS).cast();
        let mut col = cols.from;
        while col < cols.to {
            // Low and high halves of bytes apart: two short chains of sums instead of a long one.
            let mut acc = [[[_mm512_setzero_si512(); D]; 2]; R];
            for r in 0..R {
                for i in 0..D {
                    acc[r][0][i] = _mm512_set1_epi32(*words.add(r * ROW_WORDS + i));
                }
            }
            let mut q = rows;
            let mut byte = 0;
            while byte < row_bytes {
                let n = (row_bytes - byte).min(BYTES);
                let mut block = [Zmm(_mm512_setzero_ps()); MAX_LANES];
                for i in 0..MAX_LANES {
                    let p = C::at(h.k, *w.k_off.get_unchecked(col + i) + byte * C::PER_BYTE);
                    block[i] = Zmm(_mm512_castsi512_ps(unsigned::<C>(p, n)));
                }
                Zmm::transpose(&mut block);
                // In pairs: bytes past a row are zeros of q.
                for lane in (0..n.div_ceil(4)).step_by(2) {
                    ahead.ask::<Zmm, NEAR>(2);
                    multiply::<C, R, D>(&mut acc, _mm512_castps_si512(block[lane].0), &q, 0);
                    multiply::<C, R, D>(&mut acc, _mm512_castps_si512(block[lane + 1].0), &q, 1);
                    for r in 0..R {
                        q[r] = q[r].add(2 * C::PER_BYTE * STEP);
                    }
                }
                byte += BYTES;
            }
            let scales = Zmm::load(w.k_scales.add(col));
            for r in 0..R {
                let step = f32::from_bits(*words.add(r * ROW_WORDS + MAX_DIGITS) as u32);
                let s = join(both(acc[r])).mul(Zmm::splat(step)).mul(scales);
                s.store(w.s.add(r * KEY_BLOCK + col));
            }
            col += Zmm::LANES;
        }
    }
}

/// Four bytes of sixteen keys, the step `step` from those that `q` stands at, times all digits of R rows.
#[inline(always)]
unsafe fn multiply<C: Code, const R: usize, const D: usize>(
    acc: &mut [[[__m512i; D]; 2]; R],
    x: __m512i,
    q: &[*const i32; R],
    step: usize,
) {
    // SAFETY: rows of q hold a step for each four bytes of each half.
    unsafe {
        let (low, high) = if C::PER_BYTE == 1 { (x, x) } else { halves(x) };
        for r in 0..R {
            for i in 0..D {
                let q = q[r].add(step * C::PER_BYTE * STEP + i);
                if C::PER_BYTE == 1 {
                    acc[r][step][i] = _mm512_dpbusd_epi32(acc[r][step][i], low, _mm512_set1_epi32(*q));
                } else {
                    acc[r][0][i] = _mm512_dpbusd_epi32(acc[r][0][i], low, _mm512_set1_epi32(*q));
                    acc[r][1][i] = _mm512_dpbusd_epi32(acc[r][1][i], high, _mm512_set1_epi32(*q.add(STEP)));
                }
            }
        }
    }
}

/// The sums of both chains.
#[inline(always)]
unsafe fn both<const D: usize>(acc: [[__m512i; D]; 2]) -> [__m512i; D] {
    let mut sums = acc[0];
    for i in 0..D {
        // SAFETY: as Vector.
        sums[i] = unsafe { _mm512_add_epi32(acc[0][i], acc[1][i]) };
    }
    sums
}

/// The number whose digits' sums these are.
#[inline(always)]
unsafe fn join<const D: usize>(digits: [__m512i; D]) -> Zmm {
    // SAFETY: as Vector.
    unsafe {
        let mut x = Zmm(_mm512_cvtepi32_ps(digits[D - 1]));
        for i in (0..D - 1).rev() {
            x = x.fma(Zmm::splat(256.0), Zmm(_mm512_cvtepi32_ps(digits[i])));
        }
        x
    }
}

/// The weights of a block in the slot: four digits of four keys in 16 bytes, digit by digit; those past `D` are 0.
struct Weights<const R: usize> {
    digits: *const i32,
    /// What a unit of the last digit is worth.
    step: [f32; R],
}

/// o = alpha·o + p·v for R rows and keys `lo .. hi` of the block.
#[inline(always)]
unsafe fn add_values<C: Code, const R: usize, const D: usize>(
    t: &Task<'_>,
    w: &Scratch<'_>,
    h: Head<C>,
    ahead: &mut Ahead,
    (lo, hi): (usize, usize),
) {
    let chunks = t.call.heads.head_dim_v / (BYTES * C::PER_BYTE);
    // Whole vectors of weights: groups beside the keys have weights 0.
    let groups = (lo / Zmm::LANES * 4, hi.div_ceil(Zmm::LANES) * 4);
    // SAFETY: checked offsets; v holds a block of rows; o rows are chunks of whole vectors.
    unsafe {
        let weights = weight_digits::<R, D>(w, (lo, hi));
        for chunk in 0..chunks {
            interleave::<C>(w, h, chunk, (lo, hi));
            // Two vectors of columns at a time: both halves of one vector of bytes, or two of bytes.
            for pair in 0..2 * C::PER_BYTE {
                let mut acc = [[[_mm512_setzero_si512(); D]; 2]; R];
                let v: *const __m512i = w.v.cast();
                for g in (groups.0..groups.1).step_by(2) {
                    ahead.ask::<Zmm, NEAR>(4 / C::PER_BYTE);
                    for g in [g, g + 1] {
                        let (a, b) = if C::PER_BYTE == 1 {
                            let v = v.add(2 * pair * GROUPS + g);
                            (*v, *v.add(GROUPS))
                        } else {
                            let (x, upper) =
                                (*v.add(pair * GROUPS + g), _mm512_set1_epi32(0xf0f0_f0f0u32 as i32));
                            (_mm512_and_si512(_mm512_slli_epi32::<4>(x), upper), _mm512_and_si512(x, upper))
                        };
                        for r in 0..R {
                            for i in 0..D {
                                let p = _mm512_set1_epi32(*weights.digits.add((r * GROUPS + g) * 4 + i));
                                acc[r][0][i] = _mm512_dpbusd_epi32(acc[r][0][i], p, a);
                                acc[r][1][i] = _mm512_dpbusd_epi32(acc[r][1][i], p, b);
                            }
                        }
                    }
                }
                for r in 0..R {
                    let alpha = Zmm::splat(*w.alpha.add(h.row + r));
                    let step = Zmm::splat(weights.step[r] / C::VALUE);
                    let at = chunk * BYTES * C::PER_BYTE + pair * 2 * Zmm::LANES;
                    for (half, digits) in acc[r].into_iter().enumerate() {
                        let o = w.o.add((h.row + r) * w.o_stride + at + half * Zmm::LANES);
                        join(digits).fma(step, Zmm::load(o).mul(alpha)).store(o);
                    }
                }
            }
        }
    }
}

/// The weights of R rows over columns `lo .. hi`, each row in steps of its largest weight; nothing outside.
#[inline(always)]
unsafe fn weight_digits<const R: usize, const D: usize>(
    w: &Scratch<'_>,
    (lo, hi): (usize, usize),
) -> Weights<R> {
    // The largest weight in units of the last digit: a power of two, so that it comes back exactly.
    let most = (1u32 << (8 * D - 1)) as f32;
    // SAFETY: a row of weights has KEY_BLOCK columns; the slot's k holds 4 bytes a column and row behind the words.
    unsafe {
        let digits: *mut i32 = w.k.add(DIGITS_AT).cast();
        let mut weights = Weights { digits, step: [0.0; R] };
        let (from, to) = (lo / Zmm::LANES * Zmm::LANES, hi.next_multiple_of(Zmm::LANES));
        // Four keys' digits side by side: bytes of 4 x 4, transposed in each lane.
        let turn =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        // Row by row in two passes, so that one row's largest weight is waited for while others are looked through.
        let mut tops = [0.0; R];
        for r in 0..R {
            let s = w.s.add(r * KEY_BLOCK);
            let mut sizes = _mm512_setzero_si512();
            for col in (from..to).step_by(Zmm::LANES) {
                let bits = _mm512_castps_si512(Zmm::load(s.add(col)).0);
                // As integers, sizes of floats are in order, and NaN stands last.
                let size = _mm512_maskz_and_epi32(inside(col, (lo, hi)), bits, _mm512_set1_epi32(i32::MAX));
                sizes = _mm512_max_epu32(sizes, size);
            }
            tops[r] = f32::from_bits(_mm512_reduce_max_epu32(sizes));
        }
        for r in 0..R {
            let (s, top) = (w.s.add(r * KEY_BLOCK), tops[r]);
            weights.step[r] = if top.is_finite() { top * (1.0 / most) } else { f32::NAN };
            // Two factors, so that neither overflows for the smallest weights.
            let first = if top < 1e-18 { 1e24 } else { 1.0 };
            let second = if top > 0.0 { most / (top * first) } else { 0.0 };
            for col in (from..to).step_by(Zmm::LANES) {
                let x = Zmm::load(s.add(col)).mul(Zmm::splat(first)).mul(Zmm::splat(second));
                let x = _mm512_maskz_cvtps_epi32(inside(col, (lo, hi)), x.0);
                _mm512_store_si512(digits.add(r * KEY_BLOCK + col).cast(), _mm512_shuffle_epi8(x, turn));
            }
        }
        weights
    }
}

/// The lanes at columns `col ..` that stand in `lo .. hi`.
#[inline(always)]
fn inside(col: usize, (lo, hi): (usize, usize)) -> __mmask16 {
    low(hi - col) & !low(lo.saturating_sub(col))
}

/// Bytes `chunk` of the value rows, four rows side by side: vector z of four, then group of rows.
#[inline(always)]
unsafe fn interleave<C: Code>(w: &Scratch<'_>, h: Head<C>, chunk: usize, (lo, hi): (usize, usize)) {
    let to: *mut __m512i = w.v.cast();
    // SAFETY: keys lo .. hi have checked offsets; the others of a group stand for the nearest one.
    unsafe {
        let v = C::at(h.v, chunk * BYTES * C::PER_BYTE);
        for g in lo / 4..hi.div_ceil(4) {
            let mut keys = [4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3];
            if 4 * g < lo || 4 * g + 4 > hi {
                for key in &mut keys {
                    *key = (*key).clamp(lo, hi - 1);
                }
            }
            let mut x = [_mm512_setzero_si512(); 4];
            for i in 0..4 {
                x[i] = _mm512_loadu_si512(C::at(v, *w.v_off.get_unchecked(keys[i])).cast());
            }
            let (ab, cd) = (_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3]));
            *to.add(g) = _mm512_unpacklo_epi16(ab, cd);
            *to.add(GROUPS + g) = _mm512_unpackhi_epi16(ab, cd);
            let (ab, cd) = (_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3]));
            *to.add(2 * GROUPS + g) = _mm512_unpacklo_epi16(ab, cd);
            *to.add(3 * GROUPS + g) = _mm512_unpackhi_epi16(ab, cd);
        }
    }
}
