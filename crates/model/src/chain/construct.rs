//! The global layers of the word-level models, entry by entry, and their output heads.
//!
//! Keys of all of them have one shape. Element 0 says whether the row is a fact's value (+1 behind a colon, −1 else), the rest is a code;
//! in the row of `BEGIN` element 0 is 8 and the rest 0. Codes are +1 in the elements `FIXED`, so a row that is what it should be is a code itself.
//! Scores are whole multiples of [`GAIN`]. `BEGIN` scores between a match and everything else: it is found where nothing matches.

use super::codes::{CODE_LEN, FIXED};
use super::stream::{
    ASKS, ASKS_HOPS, BEGIN_AT, COPY, COUNT, COUNT_UNIT, FOUND, HEADS, HIDDEN, IS_BEGIN, IS_NUMBER, NULL, ONE,
    PAST, SEEN, TIMES, TIMES_LEN, UNSCALE, UNSEEN, WANTED, full_norm, group, key_sign, products, token_codes,
    value_sign,
};
use super::vocab::{BEGIN, END, VOCAB_SIZE, number};
use super::{GAIN, LOGIT_GAIN, MAX_HOPS};
use crate::matrix::Matrix;
use crate::weights::{Ffn, Gated, LayerWeights, Linear, Mlp, Tensor};

const DIM: usize = CODE_LEN;
/// A query element that weighs 1, before the softmax scale.
const UNIT: f32 = GAIN * UNSCALE;
/// Weights of element 0: where a row is found by its value; where a row is counted; where a row is found by its key; and what turns a
/// query off, by making `BEGIN` the best match of all.
const BY_VALUE: f32 = 8.0;
const BY_COUNT: f32 = 9.0;
const BY_KEY: f32 = 12.0;
const OFF: f32 = 16.0;
/// What stands for 1 where shares are counted: in a row of nothing else the rotation of coded caches makes it ±1 everywhere.
const COUNTED: f32 = 8.0;
/// Weight of each element of `WANTED`.
const BY_TIMES: f32 = 8.0;

/// Width of the MLP behind the counting layer: two units a threshold.
pub(super) const MLP_WIDTH: usize = 2 * TIMES_LEN;

/// Sets `rows[g * DIM + d]` of both kv heads to the sum of `entry(d)`'s `(column, factor)`, with the sign of the group.
fn both(m: &mut Matrix, sign: fn(usize, usize) -> f32, d: usize, entries: &[(usize, f32)]) {
    for g in 0..HEADS.num_kv_heads {
        entries.iter().for_each(|&(col, x)| m.set(g * DIM + d, col, x * sign(g, d)));
    }
}

/// The same of all query heads, in units of the score.
fn all_queries(m: &mut Matrix, d: usize, entries: &[(usize, f32)]) {
    for h in 0..HEADS.num_q_heads {
        entries.iter().for_each(|&(col, x)| m.set(h * DIM + d, col, x * UNIT * key_sign(group(h), d)));
    }
}

/// Elements 1 and on of a word's code that stands at `block`. Those that are +1 in every word are read from the first, which is so in the colon's
/// code as well and 0 in the row of `BEGIN`.
fn code_entries(block: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..DIM).map(move |d| (d, if FIXED.contains(&d) { block } else { block + d }))
}

/// Element 0 of keys: +1 behind a colon, whose code differs from all others in the sign of element 1; −1 behind words; 8 in the row of `BEGIN`.
fn behind_colon(k: &mut Matrix) {
    both(k, key_sign, 0, &[(COPY[1] + 1, -1.0), (COPY[0] + BEGIN_AT, 1.0), (COPY[0], -1.0)]);
}

/// Writes 1 / (n + 1) to `COUNT`: every row that `key` gives the code of the query weighs as much as `BEGIN`, which alone has a value in element 0; element 1 has the same in every row.
fn count_by(name: &str, query: usize, key: usize, [mut q, mut k, mut v, mut o]: [Matrix; 4]) -> LayerWeights {
    // Not the constant: codes of a cache may have changed the copied code by a common factor, and a match must still tie with BEGIN.
    all_queries(&mut q, 0, &[(query, BY_COUNT)]);
    code_entries(query).for_each(|(d, col)| all_queries(&mut q, d, &[(col, 1.0)]));
    code_entries(key).for_each(|(d, col)| both(&mut k, key_sign, d, &[(col, 1.0)]));
    both(&mut v, value_sign, 0, &[(IS_BEGIN, 0.5 * COUNTED)]);
    both(&mut v, value_sign, 1, &[(ONE, COUNTED)]);
    for h in 0..HEADS.num_q_heads {
        let part = |d: usize| value_sign(group(h), d) / (COUNTED * HEADS.num_q_heads as f32);
        o.set(COUNT, h * DIM, COUNT_UNIT * part(0));
        o.set(SEEN, h * DIM + 1, part(1));
        o.set(UNSEEN, h * DIM + 1, -part(1));
    }
    Matrix::attention(name, full_norm(), [q, k, v, o])
}

/// Counts the facts so far that have the row's own key, the row included, and writes which one it is to `TIMES`.
pub(super) fn times_layer(name: &str) -> LayerWeights {
    let mut products = products();
    behind_colon(&mut products[1]);
    let layer = count_by(name, COPY[2], COPY[2], products);
    LayerWeights { ffn: Some(thresholds(name)), ..layer }
}

/// Counts the words so far that are the one asked for, the one in the question included.
pub(super) fn count_layer(name: &str) -> LayerWeights {
    let mut products = products();
    // Every row counts, behind a colon or not.
    both(&mut products[1], key_sign, 0, &[(COPY[0] + BEGIN_AT, 1.0)]);
    count_by(name, FOUND, COPY[0], products)
}

/// From 1 / (n + 1) to n in steps: element j of `TIMES` falls from 1 to −1 where n > j + 1.
///
/// Of y = slope · (threshold − count), silu(y + 1) − silu(y) is a step from 0 to 1: at the two counts beside a threshold |y| is 34 or more,
/// where silu is 0 or the identity to 1e-13.
fn thresholds(name: &str) -> Ffn {
    let [mut gate, mut up] = [(); 2].map(|()| Matrix::zeros(MLP_WIDTH, HIDDEN));
    let mut down = Matrix::zeros(HIDDEN, MLP_WIDTH);
    for j in 0..TIMES_LEN {
        let (above, below) = (1.0 / (j + 2) as f32, 1.0 / (j + 3) as f32);
        let half_gap = 0.5 * (above - below);
        let slope = (32.0 / half_gap).log2().ceil().exp2();
        for (unit, step) in [(2 * j, 0.0), (2 * j + 1, 1.0)] {
            gate.set(unit, SEEN, slope * 0.5 * (above + below));
            gate.set(unit, ONE, step);
            gate.set(unit, COUNT, -slope / COUNT_UNIT);
            up.set(unit, ONE, 1.0);
            down.set(TIMES + j, unit, 2.0 - 4.0 * step);
        }
    }
    let [gate, up, down] = [gate, up, down].map(|m| Linear::from(m.tensor(name)));
    Ffn { norm: full_norm(), post_norm: None, mlp: Mlp::Dense(Box::new(Gated { gate, up, down })) }
}

/// At a word, finds the fact whose value it is: `FOUND` becomes the fact's key, and `WANTED` the fact after it of the same key.
pub(super) fn next_layer(name: &str) -> LayerWeights {
    let [mut q, mut k, mut v, mut o] = products();
    // On at a word (ASKS = -1), off at a question.
    all_queries(&mut q, 0, &[(ONE, BY_VALUE + 0.5 * OFF), (ASKS, 0.5 * OFF)]);
    code_entries(FOUND).for_each(|(d, col)| all_queries(&mut q, d, &[(col, 1.0)]));
    behind_colon(&mut k);
    code_entries(COPY[0]).for_each(|(d, col)| both(&mut k, key_sign, d, &[(col, 1.0)]));
    // The first kv head: key minus value, so that adding it to the value gives the key.
    for d in 0..DIM {
        v.set(d, COPY[2] + d, value_sign(0, d));
        v.set(d, COPY[0] + d, -value_sign(0, d));
    }
    for d in 0..DIM {
        let h = d * HEADS.group_size() / DIM;
        o.set(FOUND + d, h * DIM + d, value_sign(0, d));
    }
    next_times(&mut v, &mut o);
    Matrix::attention(name, full_norm(), [q, k, v, o])
}

/// The second kv head of [`next_layer`]: how `WANTED` and `PAST` differ from 1. The second of a key follows the first, and so on: each element
/// of `TIMES` moves on by one place.
///
/// The five numbers are spread over eight elements by Walsh functions, because the rotation of coded caches gathers those again: what is rounded
/// there is 0 and −2 only.
fn next_times(v: &mut Matrix, o: &mut Matrix) {
    const PARTS: usize = 8;
    let walsh = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    for i in 0..PARTS {
        let element = i * PARTS;
        let sign = value_sign(1, element);
        // COPY[0]'s first element is 1 in every row but that of BEGIN, where TIMES is 0 as well.
        let ones = -2.0 * walsh(i, 0) - (1..=TIMES_LEN).map(|j| walsh(i, j)).sum::<f32>();
        v.set(DIM + element, COPY[0], sign * ones);
        for j in 0..TIMES_LEN {
            v.set(DIM + element, TIMES + j, sign * walsh(i, j + 1));
        }
        for j in 0..=TIMES_LEN {
            let (row, h) = if j == TIMES_LEN { (PAST, 3) } else { (WANTED + j, 2 + j / 2) };
            o.set(row, h * DIM + element, sign * walsh(i, j) / PARTS as f32);
        }
    }
}

/// Hop `hop`, counted from 1: `FOUND` moves from a key to its value; where no fact has that key it stays, and the first hop says so in `NULL`.
pub(super) fn hop_layer(name: &str, hop: usize) -> LayerWeights {
    let [mut q, mut k, mut v, mut o] = products();
    let off = 0.5 * OFF;
    // The first hop is off where a value after the last is looked for, a later one where it is not asked for.
    let switch = if hop == 1 { PAST } else { ASKS_HOPS + hop - 2 };
    all_queries(&mut q, 0, &[(ONE, BY_KEY + off), (switch, -off)]);
    behind_colon(&mut k);
    for d in 1..DIM {
        let (query, key) = match FIXED.iter().position(|&x| x == d) {
            Some(j) if hop == 1 => ((WANTED + j - 1, BY_TIMES), TIMES + j - 1),
            Some(j) => ((ONE, BY_TIMES), TIMES + j - 1),
            None => ((FOUND + d, 1.0), COPY[2] + d),
        };
        all_queries(&mut q, d, &[query]);
        both(&mut k, key_sign, d, &[(key, 1.0)]);
        both(&mut v, value_sign, d, &[(COPY[0] + d, 1.0), (COPY[2] + d, -1.0)]);
        let h = d * HEADS.num_q_heads / DIM;
        o.set(FOUND + d, h * DIM + d, value_sign(group(h), d));
    }
    // Element 0 of the difference of two codes is 0; here it says whether BEGIN was found.
    both(&mut v, value_sign, 0, &[(IS_BEGIN, -1.0)]);
    if hop == 1 {
        o.set(NULL, 0, value_sign(0, 0));
    }
    Matrix::attention(name, full_norm(), [q, k, v, o])
}

/// The word whose code was found; the end where the first hop found nothing or more hops were asked for than there are.
pub(super) fn word_head(name: &str, hops: usize) -> Tensor {
    let mut m = Matrix::zeros(VOCAB_SIZE, HIDDEN);
    for (t, code) in token_codes().into_iter().enumerate().filter(|(t, _)| *t != BEGIN as usize) {
        (0..DIM).for_each(|d| m.set(t, FOUND + d, LOGIT_GAIN * code.at(d)));
    }
    let (end, bonus) = (END as usize, LOGIT_GAIN * DIM as f32);
    m.set(end, NULL, -bonus);
    if hops < MAX_HOPS {
        m.set(end, ASKS_HOPS + hops - 1, bonus);
    }
    m.set(end, ONE, if hops < MAX_HOPS { 2.0 * bonus } else { bonus });
    m.tensor_bf16(name)
}

/// Of a count a = 1 / (n + 1): the number whose line 3 m² − 2 m³ a, with m two more than the number, is highest at a. These lines touch the curve
/// 1 / a² where a = 1 / m. The word in the question is one match, so n is one more than the number. After a number, the end.
pub(super) fn number_head(name: &str) -> Tensor {
    let mut m = Matrix::zeros(VOCAB_SIZE, HIDDEN);
    for t in 0..VOCAB_SIZE {
        if let Some(n) = number(t) {
            let x = (n + 2) as f64;
            m.set(t, SEEN, super::count::LINE_GAIN * (3.0 * x * x) as f32);
            m.set(t, COUNT, super::count::LINE_GAIN * (-2.0 * x * x * x / f64::from(COUNT_UNIT)) as f32);
        }
    }
    // Higher than any line.
    let top = (1u32 << 26) as f32;
    m.set(END as usize, ONE, top);
    m.set(END as usize, IS_NUMBER, top);
    m.tensor(name)
}
