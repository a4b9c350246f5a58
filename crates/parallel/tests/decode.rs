//! Decode over ranks on threads: against one rank and the f64 oracle, whatever the lengths, heads and ranks.

mod common;

use std::time::Duration;

use common::{Numbers, distance};
use suanpan_attn::reference::{Spec, attention_f64};
use suanpan_base::{HeadShape, Mask, SeqLen};
use suanpan_parallel::Attention;
use suanpan_parallel::decode::{DecodeInputs, DecodePlan, decode_threads};

const TIMEOUT: Duration = Duration::from_secs(60);

struct Batch {
    heads: HeadShape,
    lengths: Vec<usize>,
    attention: Attention,
    q: Vec<f32>,
    /// Keys and values of each sequence, all positions.
    kv: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Batch {
    fn new(heads: HeadShape, lengths: &[usize]) -> Batch {
        let mut x = Numbers(lengths.iter().sum::<usize>() as u64 + 1);
        let q = x.floats(lengths.len() * heads.num_q_heads * heads.head_dim_qk);
        let rows = |n: usize, width: usize| n * heads.num_kv_heads * width;
        let kv = lengths
            .iter()
            .map(|&n| (x.floats(rows(n, heads.head_dim_qk)), x.floats(rows(n, heads.head_dim_v))))
            .collect();
        let sinks = Some((0..heads.num_q_heads).map(|h| h as f32 - 1.0).collect());
        Batch {
            heads,
            lengths: lengths.to_vec(),
            attention: Attention { sinks, ..Attention::default() },
            q,
            kv,
        }
    }

    /// out and lse of all heads, `[batch, heads, …]`; counted bytes must be the planned ones.
    fn run(&self, ranks: usize, block: usize) -> [Vec<f32>; 2] {
        let (h, batch) = (self.heads, self.lengths.len());
        let plan = DecodePlan::new(h, &self.lengths, ranks, block).unwrap();
        let of = |rank: usize| {
            let mut input = DecodeInputs { q: self.q.clone(), ..DecodeInputs::default() };
            for (seq, (k, v)) in self.kv.iter().enumerate() {
                assert_eq!(plan.positions(rank, seq).count(), plan.keys(rank, seq));
                for at in plan.positions(rank, seq) {
                    let (wk, wv) = (h.num_kv_heads * h.head_dim_qk, h.num_kv_heads * h.head_dim_v);
                    input.k.extend_from_slice(&k[at * wk..][..wk]);
                    input.v.extend_from_slice(&v[at * wv..][..wv]);
                }
            }
            input
        };
        let reports = decode_threads(&plan, &self.attention, (0..ranks).map(of).collect(), TIMEOUT).unwrap();
        let mut all =
            [vec![f32::NAN; batch * h.num_q_heads * h.head_dim_v], vec![f32::NAN; batch * h.num_q_heads]];
        for (rank, report) in reports.into_iter().enumerate() {
            let (x, heads) = (report.unwrap(), plan.heads(rank));
            assert_eq!(x.sent_bytes, plan.sent_bytes(rank));
            for (row, (seq, head)) in (0..batch).flat_map(|s| heads.clone().map(move |h| (s, h))).enumerate()
            {
                let at = seq * h.num_q_heads + head;
                all[0][at * h.head_dim_v..][..h.head_dim_v]
                    .copy_from_slice(&x.out[row * h.head_dim_v..][..h.head_dim_v]);
                all[1][at] = x.lse[row];
            }
        }
        all
    }

    fn oracle(&self) -> [Vec<f64>; 2] {
        let (h, wide) = (self.heads, |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>());
        let sinks: Vec<f64> = wide(self.attention.sinks.as_ref().unwrap());
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for ((&n, (k, v)), q) in
            self.lengths.iter().zip(&self.kv).zip(self.q.chunks_exact(h.num_q_heads * h.head_dim_qk))
        {
            let mut spec = Spec::new(h, Mask::FULL, h.default_scale().into());
            spec.sinks = Some(&sinks);
            let r = attention_f64(&spec, SeqLen::new(1, n), &wide(q), &wide(k), &wide(v));
            out.extend(r.out);
            lse.extend(r.lse);
        }
        [out, lse]
    }
}

#[test]
fn any_ranks_decode_as_one() {
    for heads in [HeadShape::new(8, 2, 32), HeadShape::new(3, 1, 16), HeadShape::with_widths(4, 4, 24, 8)] {
        for lengths in [&[1000, 17, 1, 300][..], &[5], &[0, 64], &[]] {
            let batch = Batch::new(heads, lengths);
            let (oracle, one) = (batch.oracle(), batch.run(1, 16));
            for (ranks, block) in [(2, 16), (3, 1), (4, 16), (8, 4)] {
                let got = batch.run(ranks, block);
                for i in 0..2 {
                    let size = oracle[i].iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>().sqrt();
                    let (error, base) = (distance(&got[i], &oracle[i]), distance(&one[i], &oracle[i]));
                    assert!(
                        error <= 2.0 * base + size / (1u64 << 24) as f64,
                        "{ranks} ranks, {lengths:?}: {error:e}, one {base:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn bytes_do_not_grow_with_the_context() {
    let heads = HeadShape::new(64, 8, 128);
    let sent = |n: usize| DecodePlan::new(heads, &[n; 4], 8, 16).unwrap().sent_bytes(0);
    assert_eq!(sent(1000), 4 * 56 * 129 * 4);
    assert_eq!(sent(1000), sent(1_000_000));
    // Growth stays even: no rank is more than a block ahead.
    let plan = DecodePlan::new(heads, &[12_345], 8, 16).unwrap();
    let counts: Vec<usize> = (0..8).map(|rank| plan.keys(rank, 0)).collect();
    assert_eq!(counts.iter().sum::<usize>(), 12_345);
    assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 16, "{counts:?}");
}

#[test]
fn what_a_decode_cannot_do_is_refused_by_name() {
    let heads = HeadShape::new(2, 1, 8);
    let plan = |lengths: &[usize], ranks, block| DecodePlan::new(heads, lengths, ranks, block);
    assert_eq!(plan(&[1], 0, 1).unwrap_err().field, "cp_size");
    assert_eq!(plan(&[1], 1, 0).unwrap_err().field, "block");
    assert_eq!(plan(&[usize::MAX, 2], 1, 1).unwrap_err().field, "lengths");
    let run = |attention: Attention, inputs| {
        decode_threads(&plan(&[1], 1, 1).unwrap(), &attention, inputs, TIMEOUT).unwrap_err().field
    };
    let input = DecodeInputs { q: vec![0.0; 16], k: vec![0.0; 8], v: vec![0.0; 8] };
    assert_eq!(run(Attention::default(), vec![]), "inputs");
    assert_eq!(
        run(Attention::default(), vec![DecodeInputs { k: vec![], ..input.clone() }]),
        "inputs[0].k length"
    );
    assert_eq!(
        run(Attention { dropout: Some((0.1, 1)), ..Attention::default() }, vec![input.clone()]),
        "dropout"
    );
    assert_eq!(run(Attention { sinks: Some([1.0].into()), ..Attention::default() }, vec![input]), "sinks");
}
