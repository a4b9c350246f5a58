//! Forward over e4m3: head dims, masks, GQA, ragged lengths, empty rows, scales, long sums, invariances.
use suanpan_base::{Mask, SeqLen};
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::forward::{Forward, KeysValues, Scores};
use suanpan_cuda::attention::forward_fp8::ForwardFp8;
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{
    Buffer, Errors, Rng, RowResult, from_bits, from_e4m3, parallel_rows, to_bits, to_e4m3,
};
use suanpan_cuda::{Dtype, Error};

use crate::forward::{Output, prefix};
use crate::{NAN16, Report};

#[derive(Clone)]
struct Case {
    dim: usize,
    mask: Mask,
    heads: (usize, usize), // query, key
    lens: Vec<(usize, usize)>,
    scaled: bool,
}

/// `[tokens, heads, dim]` with a gap of 16 poisoned bytes after each token.
struct Tensor {
    bits: Vec<u8>,
    heads: usize,
    dim: usize,
}

impl Tensor {
    fn random(rng: &mut Rng, tokens: usize, heads: usize, dim: usize) -> Self {
        let row = heads * dim;
        let byte = |i: usize, rng: &mut Rng| if i < row { to_e4m3(rng.normal()) } else { 0x7f };
        Self { bits: (0..tokens * (row + 16)).map(|i| byte(i % (row + 16), rng)).collect(), heads, dim }
    }

    fn stride(&self) -> usize {
        self.heads * self.dim + 16
    }

    fn row(&self, token: usize, head: usize) -> impl Iterator<Item = f64> {
        self.bits[token * self.stride() + head * self.dim..][..self.dim]
            .iter()
            .map(|x| f64::from(from_e4m3(*x)))
    }

    fn operand(&self, b: &Buffer) -> Operand {
        Operand { address: b.address, token_stride: self.stride() as u64, head_stride: self.dim as u64 }
    }
}

struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: [Vec<f32>; 3], // [batch, num_kv_heads] of q, k, v
}

fn inputs(c: &Case, seed: u64) -> Inputs {
    let mut rng = Rng::new(seed);
    let (total_q, total_k) = (c.lens.iter().map(|l| l.0).sum(), c.lens.iter().map(|l| l.1).sum());
    Inputs {
        q: Tensor::random(&mut rng, total_q, c.heads.0, c.dim),
        k: Tensor::random(&mut rng, total_k, c.heads.1, c.dim),
        v: Tensor::random(&mut rng, total_k, c.heads.1, c.dim),
        scales: [0.7, 1.3, 0.02].map(|around| {
            (0..c.lens.len() * c.heads.1)
                .map(|_| around * (1.0 + 0.3 * rng.normal().clamp(-2.0, 2.0)))
                .collect()
        }),
    }
}

fn run(gpu: &Gpu, c: &Case, x: &Inputs) -> Result<Output, Error> {
    let (cu_q, cu_k) = (prefix(c.lens.iter().map(|l| l.0)), prefix(c.lens.iter().map(|l| l.1)));
    let (total_q, total_k) = (*cu_q.last().expect("batch") as usize, *cu_k.last().expect("batch") as usize);
    let dev = |x: &Tensor| Buffer::from_slice(gpu, &x.bits);
    let (q, k, v) = (dev(&x.q)?, dev(&x.k)?, dev(&x.v)?);
    let (dcq, dck) = (Buffer::from_slice(gpu, &cu_q)?, Buffer::from_slice(gpu, &cu_k)?);
    let o_stride = c.heads.0 * c.dim + 8;
    let o = Buffer::new(gpu, total_q * o_stride * 2)?;
    o.fill(gpu, 0x7fff_7fff)?;
    let lse = Buffer::new(gpu, total_q * c.heads.0 * 4)?;
    lse.fill(gpu, 0x7fc0_0000)?;
    let counter = Buffer::from_slice(gpu, &[0u32; 2])?;
    let [qs, ks, vs] = [0, 1, 2].map(|i| Buffer::from_slice(gpu, &x.scales[i]));
    let (qs, ks, vs) = (qs?, ks?, vs?);
    let scale = |b: &Buffer| c.scaled.then_some(b.address);
    let f = ForwardFp8 {
        attention: Forward {
            q: x.q.operand(&q),
            kv: KeysValues::Packed { k: x.k.operand(&k), v: x.v.operand(&v) },
            o: Operand { address: o.address, token_stride: o_stride as u64, head_stride: c.dim as u64 },
            lse: lse.address,
            counter: counter.address,
            cu_seqlens_q: Some(dcq.address),
            cu_seqlens_k: Some(dck.address),
            total_q: total_q as u32,
            total_k: total_k as u32,
            batch: c.lens.len() as u32,
            seqlen_q_max: c.lens.iter().map(|l| l.0).max().unwrap_or(0) as u32,
            seqlen_k_max: c.lens.iter().map(|l| l.1).max().unwrap_or(0) as u32,
            num_q_heads: c.heads.0 as u32,
            num_kv_heads: c.heads.1 as u32,
            head_dim: c.dim as u32,
            head_dim_v: c.dim as u32,
            dtype: Dtype::Bf16,
            mask: c.mask,
            scores: Scores::default(),
            tree: None,
            softmax_scale: 1.0 / (c.dim as f32).sqrt(),
        },
        q_scales: scale(&qs),
        k_scales: scale(&ks),
        v_scales: scale(&vs),
        kv_scale_strides: (c.heads.1 as u32, 1),
    };
    // SAFETY: the buffers cover the shapes and live past the synchronisation.
    unsafe { f.launch(gpu)? };
    gpu.synchronize()?;
    Ok(Output { o: o.read(0, total_q * o_stride)?, lse: lse.read(0, total_q * c.heads.0)? })
}

/// The oracle in f64 on the values that the bytes stand for, and plain e4m3 attention: P of the row's maximum, times 2^8, in
/// e4m3, everything else exact.
fn reference(scores: &[f64], values: &[Vec<f64>], dim: usize) -> RowResult {
    if scores.is_empty() {
        return RowResult { oracle: vec![0.0; dim], lse: f64::NEG_INFINITY, plain: vec![0.0; dim] };
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = p.iter().sum();
    let mix = |p: &dyn Fn(usize) -> f64| {
        let mut o = vec![0.0; dim];
        for (j, v) in values.iter().enumerate() {
            let w = p(j) / sum;
            o.iter_mut().zip(v).for_each(|(o, v)| *o += w * v);
        }
        o
    };
    let bf16 = |x: f64| f64::from(from_bits(Dtype::Bf16, to_bits(Dtype::Bf16, x as f32)));
    let plain = mix(&|j| f64::from(from_e4m3(to_e4m3((p[j] * 256.0) as f32))) / 256.0)
        .into_iter()
        .map(bf16)
        .collect();
    RowResult { oracle: mix(&|j| p[j]), lse: max + sum.ln(), plain }
}

/// What the matrix unit may lose of one dot product of 8-bit numbers: it takes 32 products and the sum so far at a time, aligns
/// them to the largest and keeps some 13 bits below its leading one (arXiv 2412.19437, 3.3.2). No lse can be surer than its scores.
fn sum_uncertainty(q: &[f64], k: impl Iterator<Item = f64>) -> f64 {
    let products: Vec<f64> = q.iter().zip(k).map(|(a, b)| a * b).collect();
    let mut sum = 0.0f64;
    products
        .chunks(32)
        .map(|step| {
            let before = sum;
            sum += step.iter().sum::<f64>();
            let largest = step.iter().fold(before.abs().max(sum.abs()), |m, p| m.max(p.abs()));
            33.0 * largest * 2f64.powi(-13)
        })
        .sum()
}

fn check(c: &Case, x: &Inputs, out: &Output) -> Errors {
    let (cu_q, cu_k) = (prefix(c.lens.iter().map(|l| l.0)), prefix(c.lens.iter().map(|l| l.1)));
    let total_q = *cu_q.last().expect("batch") as usize;
    let stride = c.heads.0 * c.dim + 8;
    let rows: Vec<(usize, usize, usize)> = (0..c.lens.len())
        .flat_map(|b| (0..c.lens[b].0).flat_map(move |i| (0..c.heads.0).map(move |h| (b, i, h))))
        .collect();
    parallel_rows(rows.len(), |n, errors| {
        let (b, i, h) = rows[n];
        let kv = h / (c.heads.0 / c.heads.1);
        let scale_of =
            |which: usize| if c.scaled { f64::from(x.scales[which][b * c.heads.1 + kv]) } else { 1.0 };
        let (t, k0) = (cu_q[b] as usize + i, cu_k[b] as usize);
        let keys = c.mask.visible(SeqLen::new(c.lens[b].0, c.lens[b].1), i).run;
        let factor = f64::from(1.0 / (c.dim as f32).sqrt()) * scale_of(0) * scale_of(1);
        let q: Vec<f64> = x.q.row(t, h).collect();
        let dot = |j: usize| q.iter().zip(x.k.row(k0 + j, kv)).map(|(a, b)| a * b).sum::<f64>();
        let scores: Vec<f64> = keys.clone().map(|j| factor * dot(j)).collect();
        let values: Vec<Vec<f64>> =
            keys.map(|j| x.v.row(k0 + j, kv).map(|v| v * scale_of(2)).collect()).collect();
        let at = t * stride + h * c.dim;
        let o: Vec<f32> = out.o[at..at + c.dim].iter().map(|x| from_bits(Dtype::Bf16, *x)).collect();
        let row = reference(&scores, &values, c.dim);
        let unsure = c.mask.visible(SeqLen::new(c.lens[b].0, c.lens[b].1), i).run;
        let unsure = unsure.map(|j| factor * sum_uncertainty(&q, x.k.row(k0 + j, kv))).fold(0.0, f64::max);
        let lse = out.lse[h * total_q + t];
        let close = (f64::from(lse) - row.lse).abs() <= unsure;
        errors.add_row(Dtype::Bf16, &o, if close { row.lse as f32 } else { lse }, &row);
        if h == 0 {
            let gap = &out.o[t * stride + c.heads.0 * c.dim..(t + 1) * stride];
            errors.not_finite += gap.iter().filter(|x| **x != NAN16).count();
        }
    })
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let ragged = vec![(64, 128), (113, 203), (239, 1), (200, 517), (0, 77), (65, 0), (1, 300), (192, 192)];
    for dim in [128, 256] {
        for (n, (mask, heads, lens, scaled)) in [
            (Mask::FULL, (4, 4), vec![(384, 384), (511, 511), (256, 1024)], false),
            (Mask::CAUSAL, (4, 4), vec![(384, 384), (511, 511), (256, 1024)], true),
            (Mask::FULL, (6, 2), ragged.clone(), true),
            (Mask::CAUSAL, (8, 1), ragged.clone(), true),
            (Mask::CAUSAL, (2, 1), vec![(40, 20_000)], true),
        ]
        .into_iter()
        .enumerate()
        {
            let c = Case { dim, mask, heads, lens, scaled };
            let x = inputs(&c, 500 + n as u64);
            let out = run(gpu, &c, &x)?;
            let name = format!(
                "forward e4m3 d{dim} {mask} {}/{} heads, {} sequences",
                heads.0,
                heads.1,
                c.lens.len()
            );
            report.errors(&name, &check(&c, &x, &out));
            let mut same = true;
            for _ in 0..10 {
                let again = run(gpu, &c, &x)?;
                same &= again.o == out.o && again.lse == out.lse;
            }
            report.line(same, &format!("{name}: the same bits in 10 runs"), String::new());
        }
        test_alone(gpu, report, dim)?;
    }
    Ok(())
}

/// A sequence gives the same bits alone as among others, whatever the others hold.
fn test_alone(gpu: &Gpu, report: &mut Report, dim: usize) -> Result<(), Error> {
    let c =
        Case { dim, mask: Mask::CAUSAL, heads: (4, 2), lens: vec![(333, 700), (130, 901)], scaled: false };
    let mut x = inputs(&c, 9);
    let row = c.heads.0 * dim + 8;
    let first = run(gpu, &c, &x)?;
    let from = 700 * x.k.stride();
    x.k.bits[from..].fill(0x7f);
    x.v.bits[from..].fill(0x7f);
    let poisoned = run(gpu, &c, &x)?;
    let clean = poisoned.o[..333 * row] == first.o[..333 * row];
    report.line(
        clean,
        &format!("forward e4m3 d{dim} a neighbour full of NaN changes nothing"),
        String::new(),
    );
    x.k.bits.truncate(from);
    x.v.bits.truncate(from);
    let alone = run(gpu, &Case { lens: vec![(333, 700)], ..c.clone() }, &x)?;
    let same = alone.o[..] == first.o[..333 * row];
    report.line(same, &format!("forward e4m3 d{dim} alone, the same bits as in a batch"), String::new());
    Ok(())
}
