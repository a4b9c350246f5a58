//! What must not change a bit: order of the batch, company in it, threads, layout, chunks of a prompt, another run.

mod common;
use common::*;
use suanpan_attn::Scores;
use suanpan_base::{DType, HeadShape, Mask, SeqLen};

const LENGTHS: [(usize, usize); 7] = [(1, 700), (200, 200), (3, 1500), (0, 9), (64, 300), (5, 2), (1, 1)];

/// Rows of sequence `i` of a batch result.
fn rows_of(c: &Case, r: &Outcome, i: usize) -> (Vec<u32>, Vec<u32>) {
    let q0: usize = c.seqs[..i].iter().map(|s| s.seqlen_q).sum();
    let n = c.seqs[i].seqlen_q;
    let width = c.heads.num_q_heads * c.heads.head_dim_v;
    let out = r.out[q0 * width..(q0 + n) * width].iter().map(|x| x.to_bits()).collect();
    let lse = (0..c.heads.num_q_heads)
        .flat_map(|h| r.lse[h * c.total_q() + q0..][..n].iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        .collect();
    (out, lse)
}

/// The data of `c` with its sequences in another order.
fn reorder(c: &Case, data: &Data, order: &[usize]) -> (Case, Data) {
    let h = c.heads;
    let take = |x: &[f32], width: usize, len: fn(&SeqLen) -> usize| -> Vec<f32> {
        let start = |i: usize| c.seqs[..i].iter().map(len).sum::<usize>() * width;
        order.iter().flat_map(|&i| x[start(i)..start(i + 1)].to_vec()).collect()
    };
    let moved = Data {
        q: take(&data.q, h.num_q_heads * h.head_dim_qk, |s| s.seqlen_q),
        k: take(&data.k, h.num_kv_heads * h.head_dim_qk, |s| s.seqlen_k),
        v: take(&data.v, h.num_kv_heads * h.head_dim_v, |s| s.seqlen_k),
    };
    (Case { seqs: order.iter().map(|&i| c.seqs[i]).collect(), ..c.clone() }, moved)
}

#[test]
fn permuting_a_batch_changes_no_bit_of_a_sequence() {
    for mask in [Mask::CAUSAL, Mask::window(100)] {
        for kv_dtype in DType::ALL {
            let c =
                Case::new(HeadShape::new(6, 2, 64), mask, &LENGTHS).dtypes(DType::F32, kv_dtype).paged(16);
            let data = Data::random(&c);
            let first = run_case(&c, &data, &machine(2), f32::NAN);
            let order = [6, 2, 0, 5, 1, 4, 3];
            let (moved, moved_data) = reorder(&c, &data, &order);
            let second = run_case(&moved, &moved_data, &machine(2), f32::INFINITY);
            for (at, &i) in order.iter().enumerate() {
                assert_eq!(rows_of(&c, &first, i), rows_of(&moved, &second, at), "sequence {i}");
                let (alone, alone_data) = reorder(&c, &data, &[i]);
                let solo = run_case(&alone, &alone_data, &machine(1), f32::NAN);
                assert_eq!(rows_of(&c, &first, i), rows_of(&alone, &solo, 0), "sequence {i} alone");
            }
        }
    }
}

#[test]
fn threads_layout_and_repetition_change_no_bit() {
    for kv_dtype in DType::ALL {
        let c = Case::new(HeadShape::new(4, 2, 80), Mask::CAUSAL, &LENGTHS).dtypes(DType::Bf16, kv_dtype);
        let data = Data::random(&c);
        let first = run_case(&c, &data, &machine(1), f32::NAN);
        for threads in [1, 2, 3, 7] {
            for page_size in [None, Some(1), Some(16), Some(64), Some(100)] {
                let c = Case { page_size, ..c.clone() };
                let r = pool(threads).install(|| run_case(&c, &data, &machine(threads), f32::NAN));
                assert_eq!(r, first, "{threads} threads, pages {page_size:?}");
            }
        }
    }
}

#[test]
fn a_prompt_in_chunks_equals_the_prompt_at_once_bit_for_bit() {
    // Chunks long enough for the packed kernel without splits: blocks stand on absolute key positions.
    let whole = Case::new(HeadShape::new(2, 1, 64), Mask::CAUSAL, &[(600, 600)]).paged(16);
    let data = Data::random(&whole);
    let all = run_case(&whole, &data, &machine(2), f32::NAN);
    let mut done = 0;
    for chunk in [130, 70, 300, 100] {
        let c = Case { seqs: vec![SeqLen::extend(done, chunk)], ..whole.clone() };
        let part = Data {
            q: data.q[done * 128..(done + chunk) * 128].to_vec(),
            k: data.k[..(done + chunk) * 64].to_vec(),
            v: data.v[..(done + chunk) * 64].to_vec(),
        };
        let r = run_case(&c, &part, &machine(2), f32::NAN);
        assert_eq!(r.out, all.out[done * 128..(done + chunk) * 128], "chunk at {done}");
        done += chunk;
    }
}

/// Rows `rows` of the whole prompt `c`, computed as a chunk that ends with them.
fn chunk(c: &Case, data: &Data, rows: std::ops::Range<usize>) -> (Case, Data) {
    let h = c.heads;
    let width = |heads: usize, d: usize| heads * d;
    let (q, k, v) = (
        width(h.num_q_heads, h.head_dim_qk),
        width(h.num_kv_heads, h.head_dim_qk),
        width(h.num_kv_heads, h.head_dim_v),
    );
    let part = Data {
        q: data.q[rows.start * q..rows.end * q].to_vec(),
        k: data.k[..rows.end * k].to_vec(),
        v: data.v[..rows.end * v].to_vec(),
    };
    (Case { seqs: vec![SeqLen::extend(rows.start, rows.len())], ..c.clone() }, part)
}

#[test]
fn a_batch_invariant_row_depends_on_chunks_decode_or_company() {
    let scores = Scores { softcap: Some(20.0), alibi: true, sink: true, ..Scores::default() };
    let masks = [Mask::CAUSAL, Mask::window(900), Mask::streaming(1500, 700), Mask::streaming(4, 60)];
    for (m, machine) in machines().into_iter().enumerate() {
        for (i, mask) in masks.into_iter().enumerate() {
            let n = 3300;
            let mut whole = Case::new(HeadShape::new(4, 2, 40), mask, &[(n, n)]);
            whole.kv_dtype = [DType::Bf16, DType::F32, DType::I8][(i + m) % 3];
            whole.batch_invariant = true;
            whole.page_size = [None, Some(16)][i % 2];
            if i == 1 {
                whole.scores = scores;
            }
            let data = Data::random(&whole);
            let all = run_case(&whole, &data, &machine, f32::NAN);
            // Sampled rows agree with the oracle, too.
            judge(&whole, &data, &all);
            let cuts = [0, 900, 901, 904, 1024, 2047, 2049, 2050, 3100, 3150, 3292, 3299, 3300];
            for rows in cuts.windows(2) {
                let (c, part) = chunk(&whole, &data, rows[0]..rows[1]);
                let r = run_case(&c, &part, &machine, f32::INFINITY);
                let width = 4 * 40;
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(
                    bits(&r.out),
                    bits(&all.out[rows[0] * width..rows[1] * width]),
                    "{machine} {mask} {rows:?}"
                );
                for head in 0..4 {
                    let got = &r.lse[head * c.total_q()..][..c.total_q()];
                    assert_eq!(
                        bits(got),
                        bits(&all.lse[head * n + rows[0]..head * n + rows[1]]),
                        "{mask} {rows:?}"
                    );
                }
            }
        }
    }
}
