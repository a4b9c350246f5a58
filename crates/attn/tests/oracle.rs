//! Every kernel against the oracle: lengths × heads × masks × element types × layouts × widths × instruction sets.

mod common;
use std::num::NonZeroUsize;

use common::*;
use suanpan_attn::Scores;
use suanpan_base::{DType, HeadShape, Mask, ScaleGrain};

const LENGTHS: &[(usize, usize)] = &[
    (1, 1),
    (64, 128),
    (128, 192),
    (256, 256),
    (239, 1),
    (799, 3),
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (384, 256),
    (640, 128),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (1, 3),
    (2, 1),
    (511, 1),
    (3, 513),
    (307, 256),
    (0, 5),
    (4, 0),
    (0, 0),
    (1, 4099),
    (2, 2048),
    (7, 1500),
    (33, 3000),
];
const MASKS: [Mask; 4] =
    [Mask::FULL, Mask::CAUSAL, Mask::window(57), Mask { left: Some(130), right: Some(5), ..Mask::FULL }];
/// Masks that stand elsewhere: on the first key, and in chunks.
const MORE_MASKS: [Mask; 4] = [
    Mask { top_left: true, ..Mask::CAUSAL },
    Mask { top_left: true, left: Some(40), right: Some(9), ..Mask::FULL },
    Mask::chunked(NonZeroUsize::new(100).unwrap()),
    Mask { chunk: NonZeroUsize::new(7), left: Some(4), ..Mask::FULL },
];
const PLAIN: Scores = Scores { softcap: None, bias: false, alibi: false, sink: false, dropout: None };
const SCORES: [Scores; 7] = [
    Scores { softcap: Some(2.0), ..PLAIN },
    Scores { alibi: true, ..PLAIN },
    Scores { sink: true, ..PLAIN },
    Scores { softcap: Some(30.0), alibi: true, sink: true, ..PLAIN },
    Scores { bias: true, ..PLAIN },
    Scores { dropout: Some(0.25), ..PLAIN },
    Scores { softcap: Some(4.0), bias: true, alibi: true, sink: true, dropout: Some(0.1) },
];
const TYPES: [(DType, DType); 4] = [
    (DType::F32, DType::F32),
    (DType::F32, DType::Bf16),
    (DType::Bf16, DType::Bf16),
    (DType::Bf16, DType::F32),
];
const PAGES: [Option<usize>; 4] = [None, Some(16), Some(1), Some(64)];
const WIDTHS: [usize; 8] = [64, 128, 40, 80, 1, 96, 192, 256];

/// (num_q_heads, num_kv_heads): each query head its own, groups, one for all.
const GROUPS: [(usize, usize); 4] = [(2, 2), (6, 2), (5, 1), (3, 1)];

#[test]
fn lengths_heads_and_masks_agree_with_the_oracle() {
    let mut n = 0;
    for &(q, k) in LENGTHS {
        for (heads, kv_heads) in GROUPS {
            for mask in MASKS {
                // Types, layouts and widths turn at their own speeds, so that all pairs meet.
                let (q_dtype, kv_dtype) = TYPES[n % 4];
                let d = if q * k > 200_000 { WIDTHS[n % 2] } else { WIDTHS[n % 7] };
                let mut c =
                    Case::new(HeadShape::new(heads, kv_heads, d), mask, &[(q, k)]).dtypes(q_dtype, kv_dtype);
                c.page_size = PAGES[n / 3 % 4];
                c.seed = n as u64 + 1;
                let data = Data::random(&c);
                judge(&c, &data, &run_case(&c, &data, &machine(2), POISONS[n % 3]));
                n += 1;
            }
        }
    }
}

#[test]
fn every_width_type_and_layout_agrees_on_every_instruction_set() {
    for machine in machines() {
        for d in WIDTHS {
            for (i, (q_dtype, kv_dtype)) in TYPES.into_iter().enumerate() {
                for page_size in PAGES {
                    let lengths = [(37, 150), (1, 131), (2, 300), (9, 9)];
                    let mut c = Case::new(HeadShape::new(4, 2, d), MASKS[(i + d) % 4], &lengths);
                    c = c.dtypes(q_dtype, kv_dtype);
                    c.page_size = page_size;
                    let data = Data::random(&c);
                    judge(&c, &data, &run_case(&c, &data, &machine, f32::NAN));
                }
            }
        }
    }
}

#[test]
fn keys_and_values_of_different_widths_up_to_the_widest() {
    for (dqk, dv) in [(192, 128), (576, 512), (576, 576), (3, 577 - 20), (64, 1), (1, 64), (33, 17)] {
        for lengths in [[(40, 200)], [(2, 290)]] {
            let heads = HeadShape::with_widths(4, 1, dqk, dv);
            let c = Case::new(heads, Mask::CAUSAL, &lengths).dtypes(DType::F32, DType::Bf16).paged(16);
            let data = Data::random(&c);
            judge(&c, &data, &run_case(&c, &data, &machine(1), f32::NAN));
        }
    }
}

#[test]
fn values_that_lie_in_keys_are_loaded_once_by_every_kernel_and_type() {
    // DeepSeek-V2-Lite's and V3's shapes, more rows than a tile and fewer than a packed task; the books say loaded once.
    let shapes = [(16, 576, 512), (128, 576, 512), (4, 576, 512), (3, 70, 64), (2, 40, 40), (1, 96, 2)];
    for (n, (num_q_heads, dqk, dv)) in shapes.into_iter().enumerate() {
        for (i, kv_dtype) in DType::ALL.into_iter().enumerate() {
            let heads = HeadShape::latent(num_q_heads, dqk, dv);
            let mut c = Case::new(heads, Mask::CAUSAL, &[(1, 300), (2, 131), (7, 7)]);
            c = c.dtypes([DType::F32, DType::Bf16][i % 2], kv_dtype);
            if kv_dtype.is_code() {
                c = c.scaled([ScaleGrain::Token, ScaleGrain::Head][n % 2]);
            }
            c.page_size = PAGES[(n + i) % 4];
            c.batch_invariant = (n + i) % 3 == 0;
            let data = Data::random(&c);
            for machine in machines() {
                judge(&c, &data, &run_case(&c, &data, &machine, POISONS[i % 3]));
            }
        }
    }
}

#[test]
fn top_left_and_chunked_masks_agree_with_the_oracle() {
    for (n, &(q, k)) in LENGTHS.iter().enumerate() {
        for mask in MORE_MASKS {
            let (q_dtype, kv_dtype) = TYPES[n % 4];
            let mut c =
                Case::new(HeadShape::new(4, 2, 64), mask, &[(q, k), (5, 300)]).dtypes(q_dtype, kv_dtype);
            c.page_size = PAGES[n % 4];
            let data = Data::random(&c);
            judge(&c, &data, &run_case(&c, &data, &machine(2), f32::NAN));
        }
    }
}

#[test]
fn changed_scores_agree_with_the_oracle_on_every_instruction_set() {
    for (m, machine) in machines().into_iter().enumerate() {
        for (i, scores) in SCORES.into_iter().enumerate() {
            // Every instruction set meets every score feature and every mask; a third of their pairs.
            let masks = MASKS.into_iter().chain(MORE_MASKS).enumerate();
            for (j, mask) in masks.filter(|(j, _)| (i + j + m).is_multiple_of(3)) {
                // Both kernels; split and whole; a row that sees nothing; scores large enough for the cap to bend.
                let lengths = [(37, 150), (1, 131), (2, 3000), (9, 2), (260, 300)];
                let (q_dtype, kv_dtype) = TYPES[(i + j) % 4];
                let heads = HeadShape::new(6, 2, [64, 40, 128][j % 3]);
                let mut c =
                    Case::new(heads, mask, &lengths).dtypes(q_dtype, kv_dtype).scores(scores).scale(1.0);
                c.page_size = PAGES[(i * 3 + j) % 4];
                c.broadcast = [j % 2 == 0, j % 3 == 0, j % 2 == 1, j == 4];
                let data = Data::random(&c);
                judge(&c, &data, &run_case(&c, &data, &machine, f32::NAN));
            }
        }
    }
}

/// Masks that show two pieces of keys.
const TWO_PIECES: [Mask; 5] = [
    Mask::streaming(4, 57),
    Mask::streaming(130, 40),
    Mask { sink_tokens: 3, ..Mask::chunked(NonZeroUsize::new(100).unwrap()) },
    Mask { sink_tokens: 1, left: Some(9), right: Some(9), top_left: true, chunk: None },
    Mask { sink_tokens: 700, left: Some(20), ..Mask::CAUSAL },
];

#[test]
fn sink_tokens_and_prefixes_agree_with_the_oracle_on_every_instruction_set() {
    for (m, machine) in machines().into_iter().enumerate() {
        for (i, mask) in TWO_PIECES.into_iter().chain(MASKS).enumerate() {
            for prefix in [[0, 90], [1, 400]][(i + m) % 2] {
                // Both kernels; split and whole; a gap inside one block of 128 keys and over many.
                let lengths = [(37, 150), (1, 131), (2, 3000), (9, 2), (260, 300), (1, 1500), (300, 700)];
                let mut c = Case::new(HeadShape::new(4, 2, [64, 40, 128][i % 3]), mask, &lengths);
                c.seqs.iter_mut().for_each(|s| s.prefix_len = prefix);
                let (q_dtype, kv_dtype) = TYPES[i % 4];
                c = c.dtypes(q_dtype, kv_dtype);
                c.page_size = PAGES[(i + prefix) % 4];
                let data = Data::random(&c);
                judge(&c, &data, &run_case(&c, &data, &machine, f32::NAN));
            }
        }
    }
}

#[test]
fn trees_and_block_masks_agree_with_the_oracle_on_every_instruction_set() {
    for (m, machine) in machines().into_iter().enumerate() {
        for (i, mask) in MASKS.into_iter().chain(TWO_PIECES).enumerate() {
            for (j, shape) in
                [None, Some((1, 1)), Some((64, 64)), Some((5, 200)), Some((128, 128))].into_iter().enumerate()
            {
                for tree in [false, true]
                    .into_iter()
                    .filter(|&tree| (i + j + m).is_multiple_of(3) || !tree && j % 3 == m)
                {
                    let lengths = [(37, 150), (1, 131), (2, 3000), (3, 3), (200, 300), (300, 900)];
                    let (q_dtype, kv_dtype) = TYPES[(i + j) % 4];
                    let mut c = Case::new(HeadShape::new(6, 2, 40), mask, &lengths).dtypes(q_dtype, kv_dtype);
                    if let Some((rows, keys)) = shape {
                        c = c.blocks(rows, keys);
                    }
                    (c.tree, c.page_size, c.seed) = (tree, PAGES[(i + j) % 4], 2 + (i * 5 + j) as u64);
                    let data = Data::random(&c);
                    judge(&c, &data, &run_case(&c, &data, &machine, f32::NAN));
                }
            }
        }
    }
}

/// Weights that are rounded for their products are summed as rounded, too: what all values agree on comes back exactly.
#[test]
fn equal_values_come_back_exactly_from_bf16() {
    for machine in machines() {
        for (q, k) in [(1, 333), (3, 1001), (70, 517)] {
            let mut c = Case::new(HeadShape::new(4, 2, 64), Mask::CAUSAL, &[(q, k)]);
            (c.q_dtype, c.kv_dtype) = (DType::Bf16, DType::Bf16);
            let mut data = Data::random(&c);
            data.v.fill(-1.375);
            let got = run_case(&c, &data, &machine, f32::NAN);
            assert!(got.out.iter().all(|&x| x == -1.375), "{machine}: {c:?}");
        }
    }
}

/// A key pairs up with its neighbour in bf16 products: a neighbour that a row may not see must not reach it, whatever it holds.
#[test]
fn a_hidden_neighbour_of_a_visible_key_stays_hidden() {
    for machine in machines() {
        for (q, k) in [(1, 6), (1, 7), (9, 9), (40, 301)] {
            let mut c = Case::new(HeadShape::new(2, 1, 32), Mask::window(2), &[(q, k)]);
            (c.q_dtype, c.kv_dtype) = (DType::Bf16, DType::Bf16);
            let mut data = Data::random(&c);
            let clean = run_case(&c, &data, &machine, f32::NAN);
            // The last key is seen by the last row alone.
            data.v[(k - 1) * 32..].fill(f32::NAN);
            data.k[(k - 1) * 32..].fill(f32::INFINITY);
            let poisoned = run_case(&c, &data, &machine, f32::NAN);
            let others = (q - 1) * 2 * 32;
            assert_eq!(poisoned.out[..others], clean.out[..others], "{machine}: {c:?}");
            assert!(poisoned.out[others..].iter().all(|x| x.is_nan()), "{machine}: {c:?}");
        }
    }
}
