//! Forward: head dims, masks, GQA, ragged lengths, empty rows, strides, far offsets, invariances.
use suanpan_base::Mask;
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::forward::{Forward, KeysValues, Scores};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, Errors, Rng, Row, from_bits, parallel_rows, reference_row, to_bits};
use suanpan_cuda::{Dtype, Error};

use crate::{NAN16, Report};

/// A packed batch on the host: [tokens, heads, head_dim], with strides that leave poisoned gaps.
#[derive(Clone)]
struct Case {
    dtype: Dtype,
    dim: usize,
    causal: bool,
    num_q_heads: usize,
    num_kv_heads: usize,
    lens: Vec<(usize, usize)>, // (seqlen_q, seqlen_k)
    pad: usize,                // extra elements between tokens
}

pub struct Tensor {
    pub bits: Vec<u16>,
    pub values: Vec<f32>,
    pub heads: usize,
    pub dim: usize,
    pub pad: usize,
}

impl Tensor {
    pub fn random(rng: &mut Rng, dtype: Dtype, tokens: usize, heads: usize, dim: usize, pad: usize) -> Self {
        let stride = heads * dim + pad;
        let mut bits = vec![NAN16; tokens * stride];
        let mut values = vec![f32::NAN; tokens * stride];
        for t in 0..tokens {
            for i in t * stride..t * stride + heads * dim {
                bits[i] = to_bits(dtype, rng.normal());
                values[i] = from_bits(dtype, bits[i]);
            }
        }
        Self { bits, values, heads, dim, pad }
    }

    pub fn stride(&self) -> usize {
        self.heads * self.dim + self.pad
    }

    pub fn row(&self, token: usize, head: usize) -> &[f32] {
        let at = token * self.stride() + head * self.dim;
        &self.values[at..at + self.dim]
    }

    pub fn operand(&self, b: &Buffer) -> Operand {
        Operand { address: b.address, token_stride: self.stride() as u64, head_stride: self.dim as u64 }
    }
}

pub fn prefix(lens: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut sums = vec![0i32];
    for n in lens {
        sums.push(sums.last().expect("not empty") + n as i32);
    }
    sums
}

pub struct Output {
    pub o: Vec<u16>,   // with the padded stride
    pub lse: Vec<f32>, // [heads, total_q]
}

fn run_forward(gpu: &Gpu, c: &Case, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Output, Error> {
    let (cu_q, cu_k) = (prefix(c.lens.iter().map(|l| l.0)), prefix(c.lens.iter().map(|l| l.1)));
    let (total_q, total_k) = (*cu_q.last().expect("batch") as usize, *cu_k.last().expect("batch") as usize);
    let dev = |x: &Tensor| Buffer::from_slice(gpu, &x.bits);
    let (dq, dk, dv) = (dev(q)?, dev(k)?, dev(v)?);
    let o = Buffer::new(gpu, total_q * q.stride() * 2)?;
    o.fill(gpu, 0x7fff_7fff)?;
    let lse = Buffer::new(gpu, total_q * c.num_q_heads * 4)?;
    lse.fill(gpu, 0x7fc0_0000)?;
    let counter = Buffer::from_slice(gpu, &[0u32; 2])?;
    let (dcq, dck) = (Buffer::from_slice(gpu, &cu_q)?, Buffer::from_slice(gpu, &cu_k)?);
    let f = Forward {
        q: q.operand(&dq),
        kv: KeysValues::Packed { k: k.operand(&dk), v: v.operand(&dv) },
        o: q.operand(&o),
        lse: lse.address,
        counter: counter.address,
        cu_seqlens_q: Some(dcq.address),
        cu_seqlens_k: Some(dck.address),
        total_q: total_q as u32,
        total_k: total_k as u32,
        batch: c.lens.len() as u32,
        seqlen_q_max: c.lens.iter().map(|l| l.0).max().unwrap_or(0) as u32,
        seqlen_k_max: c.lens.iter().map(|l| l.1).max().unwrap_or(0) as u32,
        num_q_heads: c.num_q_heads as u32,
        num_kv_heads: c.num_kv_heads as u32,
        head_dim: c.dim as u32,
        head_dim_v: c.dim as u32,
        dtype: c.dtype,
        mask: if c.causal { Mask::CAUSAL } else { Mask::FULL },
        scores: Scores::default(),
        tree: None,
        softmax_scale: 1.0 / (c.dim as f32).sqrt(),
        pack_gqa: false,
        splits: None,
    };
    // SAFETY: the buffers cover the shapes and live past the synchronisation.
    unsafe { f.launch(gpu)? };
    gpu.synchronize()?;
    Ok(Output { o: o.read(0, total_q * q.stride())?, lse: lse.read(0, total_q * c.num_q_heads)? })
}

fn inputs(c: &Case, seed: u64) -> (Tensor, Tensor, Tensor) {
    let mut rng = Rng::new(seed);
    let total_q = c.lens.iter().map(|l| l.0).sum();
    let total_k = c.lens.iter().map(|l| l.1).sum();
    let q = Tensor::random(&mut rng, c.dtype, total_q, c.num_q_heads, c.dim, c.pad);
    let k = Tensor::random(&mut rng, c.dtype, total_k, c.num_kv_heads, c.dim, c.pad);
    let v = Tensor::random(&mut rng, c.dtype, total_k, c.num_kv_heads, c.dim, c.pad);
    (q, k, v)
}

/// Errors of sequences `which` against the oracle; a gap that lost its poison counts as not finite.
fn check_forward(c: &Case, q: &Tensor, k: &Tensor, v: &Tensor, out: &Output, which: &[usize]) -> Errors {
    let (cu_q, cu_k) = (prefix(c.lens.iter().map(|l| l.0)), prefix(c.lens.iter().map(|l| l.1)));
    let total_q = *cu_q.last().expect("batch") as usize;
    let rows: Vec<(usize, usize, usize)> = which
        .iter()
        .flat_map(|&b| (0..c.lens[b].0).flat_map(move |i| (0..c.num_q_heads).map(move |h| (b, i, h))))
        .collect();
    parallel_rows(rows.len(), |n, errors| {
        let (b, i, h) = rows[n];
        let (len_q, len_k) = c.lens[b];
        let keys = if c.causal { (len_k + i + 1).saturating_sub(len_q).min(len_k) } else { len_k };
        let (t, k0, kv) = (cu_q[b] as usize + i, cu_k[b] as usize, h / (c.num_q_heads / c.num_kv_heads));
        let (key, value) = (|j: usize| k.row(k0 + j, kv), |j: usize| v.row(k0 + j, kv));
        let row = Row { q: q.row(t, h), keys, key: &key, value: &value };
        let exact = reference_row(c.dtype, 1.0 / (c.dim as f64).sqrt(), &row);
        let at = t * q.stride() + h * c.dim;
        let o: Vec<f32> = out.o[at..at + c.dim].iter().map(|x| from_bits(c.dtype, *x)).collect();
        errors.add_row(c.dtype, &o, out.lse[h * total_q + t], &exact);
        if h == 0 {
            let gap = &out.o[t * q.stride() + q.heads * q.dim..(t + 1) * q.stride()];
            errors.not_finite += gap.iter().filter(|x| **x != NAN16).count();
        }
    })
}

fn forward_cases() -> Vec<Case> {
    let ragged =
        vec![(1, 1), (64, 128), (113, 203), (239, 1), (200, 517), (0, 77), (65, 0), (1, 300), (192, 192)];
    let square = vec![(384, 384), (511, 511), (256, 1024)];
    let mut cases = Vec::new();
    for dim in [64, 96, 128, 192, 256] {
        for dtype in [Dtype::Bf16, Dtype::Fp16] {
            for causal in [false, true] {
                for (num_q_heads, num_kv_heads, lens, pad) in
                    [(4, 4, &square, 0), (6, 2, &ragged, 8), (8, 1, &ragged, 64)]
                {
                    cases.push(Case {
                        dtype,
                        dim,
                        causal,
                        num_q_heads,
                        num_kv_heads,
                        lens: lens.clone(),
                        pad,
                    });
                }
            }
        }
    }
    cases
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    for (n, c) in forward_cases().iter().enumerate() {
        let (q, k, v) = inputs(c, 1000 + n as u64);
        let out = run_forward(gpu, c, &q, &k, &v)?;
        let all: Vec<usize> = (0..c.lens.len()).collect();
        let mask = if c.causal { "causal" } else { "full" };
        let name = format!(
            "forward {} d{} {mask} {}/{} heads, {} sequences, pad {}",
            c.dtype.name(),
            c.dim,
            c.num_q_heads,
            c.num_kv_heads,
            c.lens.len(),
            c.pad
        );
        report.errors(&name, &check_forward(c, &q, &k, &v, &out, &all));
    }
    for dim in [64, 128, 256] {
        test_forward_invariance(gpu, report, dim)?;
    }
    test_forward_far_offsets(gpu, report)
}

/// Run-to-run bits, a permuted batch, and a neighbour full of NaN.
fn test_forward_invariance(gpu: &Gpu, report: &mut Report, dim: usize) -> Result<(), Error> {
    let lens = vec![(700, 700), (130, 900), (33, 65), (512, 512)];
    let c = Case { dtype: Dtype::Bf16, dim, causal: true, num_q_heads: 8, num_kv_heads: 2, lens, pad: 0 };
    let (q, mut k, mut v) = inputs(&c, 5);
    let first = run_forward(gpu, &c, &q, &k, &v)?;
    let mut same = true;
    for _ in 0..20 {
        let again = run_forward(gpu, &c, &q, &k, &v)?;
        same &= again.o == first.o && again.lse == first.lse;
    }
    report.line(same, &format!("forward d{dim} gives the same bits in 20 runs"), String::new());

    let order = [2usize, 0, 3, 1];
    let mut p = c.clone();
    p.lens = order.iter().map(|&b| c.lens[b]).collect();
    let (cu_q, cu_k) = (prefix(c.lens.iter().map(|l| l.0)), prefix(c.lens.iter().map(|l| l.1)));
    let gather = |x: &Tensor, cu: &[i32]| {
        let ranges = order.iter().map(|&b| cu[b] as usize * x.stride()..cu[b + 1] as usize * x.stride());
        let bits = ranges.clone().flat_map(|r| x.bits[r].to_vec()).collect();
        let values = ranges.flat_map(|r| x.values[r].to_vec()).collect();
        Tensor { bits, values, heads: x.heads, dim: x.dim, pad: x.pad }
    };
    let permuted = run_forward(gpu, &p, &gather(&q, &cu_q), &gather(&k, &cu_k), &gather(&v, &cu_k))?;
    let at = |b: usize| cu_q[b] as usize * q.stride()..cu_q[b + 1] as usize * q.stride();
    let expected: Vec<u16> = order.iter().flat_map(|&b| first.o[at(b)].to_vec()).collect();
    report.line(permuted.o == expected, &format!("forward d{dim} permuted batch, same bits"), String::new());

    let poisoned = cu_k[1] as usize * k.stride()..cu_k[2] as usize * k.stride();
    k.bits[poisoned.clone()].fill(NAN16);
    v.bits[poisoned].fill(NAN16);
    let out = run_forward(gpu, &c, &q, &k, &v)?;
    let clean = [0, 2, 3].iter().all(|&b| out.o[at(b)] == first.o[at(b)]);
    report.line(clean, &format!("forward d{dim} a neighbour full of NaN changes nothing"), String::new());
    Ok(())
}

/// q, k, v and o in one allocation of 2^32 elements, tokens 2^20 elements apart: offsets pass 2^31.
fn test_forward_far_offsets(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let (tokens, dim, stride) = (4096usize, 128usize, 1usize << 20);
    let c = Case {
        dtype: Dtype::Bf16,
        dim,
        causal: true,
        num_q_heads: 1,
        num_kv_heads: 1,
        lens: vec![(100, 4096 - 100), (100, 100)],
        pad: 0,
    };
    let (mut q, k, v) = inputs(&Case { lens: vec![(tokens, tokens)], ..c.clone() }, 9);
    q.bits.truncate(200 * dim);
    let big = Buffer::new(gpu, tokens * stride * 2)?;
    let first_q = tokens - 200; // the queries sit on the last tokens
    for t in 0..tokens {
        big.write((t * stride + dim) * 2, &k.bits[t * dim..(t + 1) * dim])?;
        big.write((t * stride + 2 * dim) * 2, &v.bits[t * dim..(t + 1) * dim])?;
        if t >= first_q {
            big.write(t * stride * 2, &q.bits[(t - first_q) * dim..(t - first_q + 1) * dim])?;
        }
    }
    let lse = Buffer::new(gpu, 200 * 4)?;
    let (cu_q, cu_k) = (prefix([100, 100].into_iter()), prefix([tokens - 100, 100].into_iter()));
    let counter = Buffer::from_slice(gpu, &[0u32; 2])?;
    let (dcq, dck) = (Buffer::from_slice(gpu, &cu_q)?, Buffer::from_slice(gpu, &cu_k)?);
    let operand = |element: usize| Operand {
        address: big.address + 2 * element as u64,
        token_stride: stride as u64,
        head_stride: dim as u64,
    };
    let f = Forward {
        q: operand(first_q * stride),
        kv: KeysValues::Packed { k: operand(dim), v: operand(2 * dim) },
        o: operand(first_q * stride + 3 * dim),
        lse: lse.address,
        counter: counter.address,
        cu_seqlens_q: Some(dcq.address),
        cu_seqlens_k: Some(dck.address),
        total_q: 200,
        total_k: tokens as u32,
        batch: 2,
        seqlen_q_max: 100,
        seqlen_k_max: tokens as u32 - 100,
        num_q_heads: 1,
        num_kv_heads: 1,
        head_dim: dim as u32,
        head_dim_v: dim as u32,
        dtype: c.dtype,
        mask: Mask::CAUSAL,
        scores: Scores::default(),
        tree: None,
        softmax_scale: 1.0 / (dim as f32).sqrt(),
        pack_gqa: false,
        splits: None,
    };
    // SAFETY: every operand lies inside `big`, which outlives the synchronisation.
    unsafe { f.launch(gpu)? };
    gpu.synchronize()?;
    let mut o = Vec::new();
    for t in first_q..tokens {
        o.extend(big.read::<u16>((t * stride + 3 * dim) * 2, dim)?);
    }
    let out = Output { o, lse: lse.read(0, 200)? };
    report.errors("forward d128 offsets past 2^31 elements", &check_forward(&c, &q, &k, &v, &out, &[0, 1]));
    Ok(())
}
