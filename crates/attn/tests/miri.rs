//! Small cases of every path of the portable instance, for an interpreter that watches each load, store and race:
//!
//! `MIRIFLAGS="-Zmiri-ignore-leaks -Zmiri-deterministic-floats -Zmiri-tree-borrows" cargo +nightly miri test --release -p suanpan-attn --test miri`
//!
//! (miri otherwise adds random errors to exp and ln, which bounds of one rounding do not allow, and stops at crossbeam-epoch under rayon.)
//!
//! They run natively, too: the same checks against the oracle.

mod common;
use std::num::NonZeroUsize;

use common::backward::*;
use common::*;
use suanpan_attn::{Isa, Machine, Scores};
use suanpan_base::{DType, HeadShape, Mask, ScaleGrain, SeqLen};

const HEADS: HeadShape = HeadShape::with_widths(2, 1, 6, 4);
const ALL: Scores = Scores { softcap: Some(4.0), bias: true, alibi: true, sink: true, dropout: Some(0.3) };

fn forward(c: Case) {
    let data = Data::random(&c);
    judge(&c, &data, &run_case(&c, &data, &Machine::forced(Isa::Portable, 1).unwrap(), f32::NAN));
}

#[test]
fn few_rows_and_many_contiguous_and_paged() {
    for page_size in [None, Some(4)] {
        // The direct kernel with splits (from 257 keys on); the packed one.
        for lengths in [[(1, 260), (2, 9)], [(7, 12), (0, 3)]] {
            let mut c = Case::new(HEADS, Mask::CAUSAL, &lengths).dtypes(DType::F32, DType::Bf16);
            c.page_size = page_size;
            forward(c);
        }
    }
}

#[test]
fn coded_types_with_scales_and_values_in_keys() {
    for (kv_dtype, grain) in
        [(DType::I8, ScaleGrain::Token), (DType::I4, ScaleGrain::Page), (DType::E4m3, ScaleGrain::Head)]
    {
        let c =
            Case::new(HEADS, Mask::CAUSAL, &[(2, 11)]).dtypes(DType::Bf16, kv_dtype).scaled(grain).paged(4);
        forward(Case { heads: HeadShape::latent(2, 6, 4), ..c.clone() });
        forward(Case { seqs: vec![SeqLen::new(8, 9)], ..c });
    }
}

#[test]
fn every_score_and_every_way_to_see() {
    let c = Case::new(HEADS, Mask::CAUSAL, &[(7, 20), (2, 5)]).scores(ALL);
    forward(Case { mask: Mask::streaming(2, 3), ..c.clone() });
    forward(Case { tree: true, ..c.clone() }.blocks(2, 3));
    forward(Case { mask: Mask::chunked(NonZeroUsize::new(4).unwrap()), batch_invariant: true, ..c });
}

#[test]
fn gradients_contiguous_and_paged() {
    for page_size in [None, Some(4)] {
        let mut c = Case::new(HEADS, Mask::CAUSAL, &[(7, 12)]).dtypes(DType::Bf16, DType::F32).scores(ALL);
        c.page_size = page_size;
        let x = Inputs::random(&c, true);
        judge_gradients(
            &c,
            &x,
            &run_backward_case(&c, &x, &Machine::forced(Isa::Portable, 1).unwrap(), f32::NAN),
        );
    }
}

#[test]
fn two_threads_share_a_call() {
    let two = Machine::forced(Isa::Portable, 2).unwrap();
    // The fewest keys that make two splits of the forward, which merge, and two tiles of the backward, which add to dq in turn.
    let c = Case::new(HeadShape::new(1, 1, 2), Mask::CAUSAL, &[(2, 385)]).dtypes(DType::Bf16, DType::F32);
    let x = Inputs::random(&c, false);
    let got = pool(2).install(|| run_backward_case(&c, &x, &two, f32::NAN));
    judge_gradients(&c, &x, &got);
}
