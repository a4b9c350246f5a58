//! The residual stream of the word-level models, the embedding that fills it and the window layer that copies neighbours' codes.
//!
//! Stream (384 wide): five blocks of a code each, then flags. Every block holds 64 squares and the flags 64 more, in every row alike: the
//! mean square is 1/3 before the window layer and exactly 1 from there on.

use suanpan_base::HeadShape;

use super::MAX_HOPS;
use super::codes::{CODE_LEN, Code, codes};
use super::vocab::{BEGIN, COLON, VOCAB_SIZE, hops_asked, number};
use crate::matrix::Matrix;
use crate::weights::{LayerWeights, Tensor};

pub(super) const HEADS: HeadShape = HeadShape::new(4, 2, CODE_LEN);
pub(super) const HIDDEN: usize = 6 * CODE_LEN;
/// Keys of the window layer: offsets 0, 1 and 2.
pub const WINDOW: usize = 3;
/// The rotary pair that tells offsets apart. Its frequency is a third of a circle, so that the window goes once around.
pub(super) const OFFSET_PAIR: usize = 1;

/// The token's own code.
const OWN: usize = 0;
/// Codes of the tokens at offsets 0, 1 and 2.
pub(super) const COPY: [usize; 3] = [CODE_LEN, 2 * CODE_LEN, 3 * CODE_LEN];
/// The code found so far: at a question that of the token before it, anywhere else the token's own, after the window layer.
pub(super) const FOUND: usize = 4 * CODE_LEN;
/// The constant 1.
pub(super) const ONE: usize = 5 * CODE_LEN;
/// +1 at a question, −1 anywhere else.
pub(super) const ASKS: usize = ONE + 1;
/// +1 at a number, −1 anywhere else.
pub(super) const IS_NUMBER: usize = ONE + 2;
/// +1 until the first hop finds nothing, then −1.
pub(super) const NULL: usize = ONE + 3;
/// +1 at a question for 2 hops or more, for 3 or more, …, [`MAX_HOPS`].
pub(super) const ASKS_HOPS: usize = ONE + 4;
/// How often the key before has occurred, as the second layer of `chain` writes it: +1, −1 from the second time on, from the third on, ….
pub(super) const TIMES: usize = ASKS_HOPS + MAX_HOPS - 1;
/// The same of the value that is looked for.
pub(super) const WANTED: usize = TIMES + TIMES_LEN;
/// −1 where a value is looked for that would come after the last.
pub(super) const PAST: usize = WANTED + TIMES_LEN;
/// 2 in every row: its square makes the sum whole.
const TWO: usize = PAST + 1;
/// Where a count arrives: [`COUNT_UNIT`] / (n + 1) for n matches.
pub(super) const COUNT: usize = TWO + 1;
/// 2 in the row of [`BEGIN`], 0 anywhere else.
pub(super) const IS_BEGIN: usize = COUNT + 1;
/// 1 until the counting layer, then 0: it makes room for [`SEEN`].
pub(super) const UNSEEN: usize = IS_BEGIN + 1;
const PAD: usize = UNSEEN + 1;
/// The 1 that counts are shares of, 0 before the counting layer: it comes the same way, and what codes of a cache make of it they make of a count.
pub(super) const SEEN: usize = HIDDEN - 1;

/// Elements of [`TIMES`] and [`WANTED`].
pub(super) const TIMES_LEN: usize = 4;
/// So small that its square changes no mean square by more than one rounding.
pub(super) const COUNT_UNIT: f32 = 1.0 / 64.0;
/// The element of [`BEGIN`]'s code that is not 0, one that is +1 in every word, and its size: as many squares as any code has.
pub(super) const BEGIN_AT: usize = 2;
const BEGIN_SIZE: f32 = 8.0;

/// Score of the right offset in the window layer; any other scores minus half of it.
const OFFSET_GAIN: f32 = 64.0;
/// 1 / softmax_scale: 8 for a head_dim of 64, exactly.
pub(super) const UNSCALE: f32 = 8.0;
const DIM: usize = CODE_LEN;

// All flags, with SEEN, IS_BEGIN and COUNT at 0 and TWO at 2, make 64 squares.
const _: () = assert!(HIDDEN - ONE == CODE_LEN && PAD < SEEN && HEADS.num_q_heads == COPY.len() + 1);

/// A character of the group that codes are functions on: a code times it is as bent as before.
fn character(mask: usize, x: usize) -> f32 {
    if (mask & x).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// Sign of element `d` in the keys (and queries) of kv head `g`: a query that meets another group's keys matches nothing.
/// Both elements of the rotary pair share a sign, because only then does the sign survive the rotation.
pub(super) fn key_sign(g: usize, d: usize) -> f32 {
    if g == 0 { 1.0 } else { character(0b01_1111, d) }
}

/// Sign of element `d` in the values of kv head `g`, undone in the output projection.
pub(super) fn value_sign(g: usize, d: usize) -> f32 {
    if g == 0 { 1.0 } else { character(0b11_0101, d) }
}

/// The kv head that query head `h` reads.
pub(super) fn group(h: usize) -> usize {
    h / HEADS.group_size()
}

/// Codes by token; that of [`BEGIN`] is never used.
pub(super) fn token_codes() -> Vec<Code> {
    let mut all = codes(VOCAB_SIZE);
    all[COLON] = all[COLON].marked();
    all
}

pub(super) fn embed(name: &str) -> Tensor {
    let mut m = Matrix::zeros(VOCAB_SIZE, HIDDEN);
    let sign = |on: bool| if on { 1.0 } else { -1.0 };
    for (t, code) in token_codes().into_iter().enumerate() {
        if t == BEGIN as usize {
            m.set(t, OWN + BEGIN_AT, BEGIN_SIZE);
            m.set(t, IS_BEGIN, 2.0);
        } else {
            (0..CODE_LEN).for_each(|d| m.set(t, OWN + d, code.at(d)));
            (0..TIMES_LEN).for_each(|j| m.set(t, TIMES + j, 1.0));
        }
        let hops = hops_asked(t);
        m.set(t, ASKS, sign(hops.is_some()));
        m.set(t, IS_NUMBER, sign(number(t).is_some()));
        (2..=MAX_HOPS).for_each(|h| m.set(t, ASKS_HOPS + h - 2, sign(hops >= Some(h))));
        m.set(t, TWO, 2.0);
        let ones = [ONE, NULL].into_iter().chain(WANTED..TWO).chain(UNSEEN..SEEN);
        ones.for_each(|c| m.set(t, c, 1.0));
    }
    m.tensor_bf16(name)
}

/// A norm after which a row of `squares` squares is itself again: the weight is the number whose product with the inverse root rounds
/// to 1, searched among its neighbours.
fn norm(squares: f32, eps: f32) -> Vec<f32> {
    let inverse = 1.0 / (squares / HIDDEN as f32 + eps).sqrt();
    let near = (1.0 / inverse).to_bits();
    let mut weights = (near - 4..=near + 4).map(f32::from_bits);
    let weight = weights.find(|w| 1.0 * inverse * w == 1.0).expect("a weight whose product rounds to 1");
    vec![weight; HIDDEN]
}

/// The norm of every row from the window layer's output on.
pub(super) fn full_norm() -> Vec<f32> {
    norm(HIDDEN as f32, super::EPS)
}

/// The four products of a layer, all 0.
pub(super) fn products() -> [Matrix; 4] {
    let (q_rows, kv_rows) = (HEADS.num_q_heads * DIM, HEADS.num_kv_heads * DIM);
    [(q_rows, HIDDEN), (kv_rows, HIDDEN), (kv_rows, HIDDEN), (HIDDEN, q_rows)]
        .map(|(rows, cols)| Matrix::zeros(rows, cols))
}

/// Heads 0 to 2 copy the codes at offsets 0 to 2. Head 3 begins [`FOUND`]: its offset is 1 at a question and 0 anywhere else.
pub(super) fn window_layer(name: &str) -> LayerWeights {
    let [mut q, mut k, mut v, mut o] = products();
    for g in 0..HEADS.num_kv_heads {
        k.set(g * DIM + OFFSET_PAIR, ONE, key_sign(g, OFFSET_PAIR));
        (0..DIM).for_each(|d| v.set(g * DIM + d, OWN + d, value_sign(g, d)));
    }
    for (h, block) in COPY.into_iter().chain([FOUND]).enumerate() {
        let g = group(h);
        let gain = f64::from(OFFSET_GAIN * UNSCALE * key_sign(g, OFFSET_PAIR));
        // Rotated, q.k = gain * cos((i - p - offset) * 2 pi/3) for a query at i and a key at p.
        let aim = |offset: usize| {
            let angle = -(offset as f64) * std::f64::consts::TAU / WINDOW as f64;
            [gain * angle.cos(), gain * angle.sin()]
        };
        let rows = [h * DIM + OFFSET_PAIR, h * DIM + OFFSET_PAIR + DIM / 2];
        for (i, row) in rows.into_iter().enumerate() {
            if block == FOUND {
                let (asked, else_) = (aim(1)[i], aim(0)[i]);
                q.set(row, ONE, (0.5 * (asked + else_)) as f32);
                q.set(row, ASKS, (0.5 * (asked - else_)) as f32);
            } else {
                q.set(row, ONE, aim(h)[i] as f32);
            }
        }
        (0..DIM).for_each(|d| o.set(block + d, h * DIM + d, value_sign(g, d)));
    }
    let embedded = (2 * CODE_LEN) as f32;
    Matrix::attention(name, norm(embedded, super::EPS), [q, k, v, o])
}
