//! Forward over e4m3: head dims, masks, GQA, ragged lengths, empty rows, scales of heads and of pages, long sums, invariances.
use suanpan_base::{Mask, SeqLen};
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode::{Pages, Scales};
use suanpan_cuda::attention::forward::{Forward, KeysValues, Paged, Scores};
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
    page_size: Option<usize>,
    int8_keys: bool,
}

/// `[tokens, heads, dim]` with a gap of 16 poisoned bytes after each token.
struct Tensor {
    bits: Vec<u8>,
    heads: usize,
    dim: usize,
    int8: bool,
}

/// What an integer's step stands for in `Tensor::row`: numbers of spread one, as those of e4m3.
const STEP: f64 = 1.0 / 32.0;

impl Tensor {
    fn random(rng: &mut Rng, tokens: usize, (heads, dim): (usize, usize), int8: bool) -> Self {
        let row = heads * dim;
        let code =
            |x: f32| if int8 { (x * 32.0).round().clamp(-127.0, 127.0) as i8 as u8 } else { to_e4m3(x) };
        let byte = |i: usize, rng: &mut Rng| if i < row { code(rng.normal()) } else { 0x7f };
        let bits = (0..tokens * (row + 16)).map(|i| byte(i % (row + 16), rng)).collect();
        Self { bits, heads, dim, int8 }
    }

    fn stride(&self) -> usize {
        self.heads * self.dim + 16
    }

    fn row(&self, token: usize, head: usize) -> impl Iterator<Item = f64> {
        self.bits[token * self.stride() + head * self.dim..][..self.dim]
            .iter()
            .map(|x| if self.int8 { f64::from(*x as i8) * STEP } else { f64::from(from_e4m3(*x)) })
    }

    fn operand(&self, b: &Buffer) -> Operand {
        Operand { address: b.address, token_stride: self.stride() as u64, head_stride: self.dim as u64 }
    }
}

struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scales: Vec<f32>,    // [num_q_heads, total_q]
    scales: [Vec<f32>; 2], // of k and v: [batch, num_kv_heads], over pages [num_pages, num_kv_heads]
    ids: Vec<Vec<usize>>,  // pages of each sequence
}

impl Inputs {
    /// Scale of k or v at `token` of sequence `b`.
    fn scale(&self, c: &Case, which: usize, (b, token): (usize, usize), kv_head: usize) -> f64 {
        let outer = match c.page_size {
            Some(page_size) => self.ids[b][token / page_size],
            None => b,
        };
        if c.scaled { f64::from(self.scales[which][outer * c.heads.1 + kv_head]) } else { 1.0 }
    }

    /// V's scale at `token` as a part of the largest of its tile of 128 keys: over pages it goes into P before P is rounded, since a sum over
    /// keys cannot have it afterwards. Then not even a row of one key has a P without rounding.
    fn part(&self, c: &Case, (b, token): (usize, usize), kv_head: usize) -> f64 {
        if c.page_size.is_none() || !c.scaled {
            return 1.0;
        }
        let tile = token / 128 * 128;
        let of = |j| self.scale(c, 1, (b, j), kv_head).abs();
        let top = (tile..c.lens[b].1.min(tile + 128)).map(of).fold(0.0, f64::max);
        if top > 0.0 { self.scale(c, 1, (b, token), kv_head) / top } else { 0.0 }
    }
}

fn inputs(c: &Case, seed: u64) -> Inputs {
    let mut rng = Rng::new(seed);
    let (total_q, total_k) = (c.lens.iter().map(|l| l.0).sum(), c.lens.iter().map(|l| l.1).sum());
    let (q, k, v) = (
        Tensor::random(&mut rng, total_q, (c.heads.0, c.dim), c.int8_keys),
        Tensor::random(&mut rng, total_k, (c.heads.1, c.dim), c.int8_keys),
        Tensor::random(&mut rng, total_k, (c.heads.1, c.dim), false),
    );
    let counts = c.lens.iter().map(|l| c.page_size.map_or(0, |size| l.1.div_ceil(size)));
    let num_pages = counts.clone().sum::<usize>() + SPARE_PAGES;
    let mut order: Vec<usize> = (0..num_pages).collect();
    for i in (1..num_pages).rev() {
        order.swap(i, rng.below(i + 1));
    }
    let mut order = order.into_iter();
    let ids = counts.map(|n| order.by_ref().take(n).collect()).collect();
    let mut draw = |around: f32, n: usize| {
        (0..n).map(|_| around * (1.0 + 0.3 * rng.normal().clamp(-2.0, 2.0))).collect::<Vec<f32>>()
    };
    let outer = if c.page_size.is_some() { num_pages } else { c.lens.len() };
    let q_scales = draw(0.7, c.heads.0 * total_q);
    let mut scales = [1.3, 0.02].map(|around| draw(around, outer * c.heads.1));
    if c.page_size.is_some() {
        // Pages of V that differ by factors of a hundred, and one in ten of zeros.
        let factor = |rng: &mut Rng| if rng.below(10) == 0 { 0.0 } else { 0.5f32.powi(rng.below(8) as i32) };
        scales[1].iter_mut().for_each(|x| *x *= factor(&mut rng));
    }
    Inputs { q, k, v, q_scales, scales, ids }
}

/// Pages that no sequence has: NaN, with scales of NaN.
const SPARE_PAGES: usize = 3;

/// K and V in pages on the device, unused rows and pages NaN, and a table whose unused ids are hostile.
fn paged(gpu: &Gpu, c: &Case, x: &Inputs, scales: [&Buffer; 2]) -> Result<(KeysValues, Vec<Buffer>), Error> {
    let page_size = c.page_size.unwrap_or(16);
    let num_pages = x.ids.iter().map(Vec::len).sum::<usize>() + SPARE_PAGES;
    let (row, cu_k) = (c.heads.1 * c.dim, prefix(c.lens.iter().map(|l| l.1)));
    let pages_max = x.ids.iter().map(Vec::len).max().unwrap_or(0) + 1;
    let mut table: Vec<i32> =
        (0..c.lens.len() * pages_max).map(|i| [-1, i32::MAX, i32::MIN][i % 3]).collect();
    let mut pool = |x: &Tensor, ids: &[Vec<usize>]| {
        let mut pool = vec![0x7fu8; num_pages * page_size * row];
        for (b, ids) in ids.iter().enumerate() {
            for j in 0..c.lens[b].1 {
                let from = (cu_k[b] as usize + j) * x.stride();
                pool[(ids[j / page_size] * page_size + j % page_size) * row..][..row]
                    .copy_from_slice(&x.bits[from..from + row]);
                table[b * pages_max + j / page_size] = ids[j / page_size] as i32;
            }
        }
        Buffer::from_slice(gpu, &pool)
    };
    let (k, v) = (pool(&x.k, &x.ids)?, pool(&x.v, &x.ids)?);
    let table = Buffer::from_slice(gpu, &table)?;
    let pages = |b: &Buffer, scales: &Buffer| Pages {
        address: b.address,
        page_stride: (page_size * row) as u64,
        token_stride: row as u64,
        head_stride: c.dim as u64,
        scales: Scales {
            address: if c.scaled { scales.address } else { 0 },
            page_stride: c.heads.1 as u64,
            token_stride: 0,
            head_stride: 1,
        },
    };
    let paged = Paged {
        k: pages(&k, scales[0]),
        v: pages(&v, scales[1]),
        page_table: table.address,
        pages_max: pages_max as u32,
        num_pages: num_pages as u32,
        page_size: page_size as u32,
    };
    Ok((KeysValues::Paged(paged), vec![k, v, table]))
}

fn run(gpu: &Gpu, c: &Case, x: &Inputs) -> Result<Output, Error> {
    let (cu_q, cu_k) = (prefix(c.lens.iter().map(|l| l.0)), prefix(c.lens.iter().map(|l| l.1)));
    let (total_q, total_k) = (*cu_q.last().expect("batch") as usize, *cu_k.last().expect("batch") as usize);
    let dev = |x: &Tensor| Buffer::from_slice(gpu, &x.bits);
    let q = dev(&x.q)?;
    let (dcq, dck) = (Buffer::from_slice(gpu, &cu_q)?, Buffer::from_slice(gpu, &cu_k)?);
    let o_stride = c.heads.0 * c.dim + 8;
    let o = Buffer::new(gpu, total_q * o_stride * 2)?;
    o.fill(gpu, 0x7fff_7fff)?;
    let lse = Buffer::new(gpu, total_q * c.heads.0 * 4)?;
    lse.fill(gpu, 0x7fc0_0000)?;
    let counter = Buffer::from_slice(gpu, &[0u32; 2])?;
    let of = |scales: &[f32]| Buffer::from_slice(gpu, scales);
    let (qs, ks, vs) = (of(&x.q_scales)?, of(&x.scales[0])?, of(&x.scales[1])?);
    let (kv, _held) = if c.page_size.is_some() {
        paged(gpu, c, x, [&ks, &vs])?
    } else {
        let (k, v) = (dev(&x.k)?, dev(&x.v)?);
        (KeysValues::Packed { k: x.k.operand(&k), v: x.v.operand(&v) }, vec![k, v])
    };
    let packed = c.scaled && c.page_size.is_none();
    let f = ForwardFp8 {
        attention: Forward {
            q: x.q.operand(&q),
            kv,
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
            softmax_scale: if c.int8_keys { (STEP * STEP) as f32 } else { 1.0 } / (c.dim as f32).sqrt(),
            pack_gqa: false,
            splits: None,
        },
        int8_keys: c.int8_keys,
        q_scales: c.scaled.then_some(qs.address),
        k_scales: packed.then_some(ks.address),
        v_scales: packed.then_some(vs.address),
        kv_scale_strides: (c.heads.1 as u32, 1),
    };
    // SAFETY: the buffers cover the shapes and live past the synchronisation.
    unsafe { f.launch(gpu)? };
    gpu.synchronize()?;
    Ok(Output { o: o.read(0, total_q * o_stride)?, lse: lse.read(0, total_q * c.heads.0)? })
}

/// The oracle in f64 on the values that the bytes stand for, and plain e4m3 attention: P of the row's maximum, times 2^8 and V's part, in
/// e4m3, everything else exact.
fn reference(scores: &[f64], values: &[Vec<f64>], parts: &[f64], dim: usize) -> RowResult {
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
    let rounded = |j: usize| {
        let factor = 256.0 * parts[j];
        if factor == 0.0 { 0.0 } else { f64::from(from_e4m3(to_e4m3((p[j] * factor) as f32))) / factor }
    };
    let plain = mix(&rounded).into_iter().map(bf16).collect();
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
        let (t, k0) = (cu_q[b] as usize + i, cu_k[b] as usize);
        let keys = c.mask.visible(SeqLen::new(c.lens[b].0, c.lens[b].1), i).run;
        let row_scale = if c.scaled { f64::from(x.q_scales[h * total_q + t]) } else { 1.0 };
        let of_q = f64::from(1.0 / (c.dim as f32).sqrt()) * row_scale;
        let factor = |j: usize| of_q * x.scale(c, 0, (b, j), kv);
        let q: Vec<f64> = x.q.row(t, h).collect();
        let dot = |j: usize| q.iter().zip(x.k.row(k0 + j, kv)).map(|(a, b)| a * b).sum::<f64>();
        let scores: Vec<f64> = keys.clone().map(|j| factor(j) * dot(j)).collect();
        let parts: Vec<f64> = keys.clone().map(|j| x.part(c, (b, j), kv)).collect();
        let values: Vec<Vec<f64>> =
            keys.map(|j| x.v.row(k0 + j, kv).map(|v| v * x.scale(c, 1, (b, j), kv)).collect()).collect();
        let at = t * stride + h * c.dim;
        let o: Vec<f32> = out.o[at..at + c.dim].iter().map(|x| from_bits(Dtype::Bf16, *x)).collect();
        let row = reference(&scores, &values, &parts, c.dim);
        let unsure = c.mask.visible(SeqLen::new(c.lens[b].0, c.lens[b].1), i).run;
        // Products of integers are exact.
        let unsure = unsure.map(|j| factor(j) * sum_uncertainty(&q, x.k.row(k0 + j, kv))).fold(0.0, f64::max)
            * f64::from(u8::from(!c.int8_keys));
        let lse = out.lse[h * total_q + t];
        let close = (f64::from(lse) - row.lse).abs() <= unsure;
        errors.add_row(Dtype::Bf16, &o, if close { row.lse as f32 } else { lse }, &row);
        if h == 0 {
            let gap = &out.o[t * stride + c.heads.0 * c.dim..(t + 1) * stride];
            errors.not_finite += gap.iter().filter(|x| **x != NAN16).count();
        }
    })
}

fn kind(int8_keys: bool) -> &'static str {
    if int8_keys { "forward e4m3, keys of int8," } else { "forward e4m3" }
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let ragged = vec![(64, 128), (113, 203), (239, 1), (200, 517), (0, 77), (65, 0), (1, 300), (192, 192)];
    for (dim, int8_keys) in [(128, false), (256, false), (128, true), (256, true)] {
        let even = vec![(384, 384), (511, 511), (256, 1024)];
        for (n, (mask, heads, lens, scaled, page_size)) in [
            (Mask::FULL, (4, 4), even.clone(), false, None),
            (Mask::CAUSAL, (4, 4), even.clone(), true, None),
            (Mask::FULL, (6, 2), ragged.clone(), true, None),
            (Mask::CAUSAL, (8, 1), ragged.clone(), true, None),
            (Mask::CAUSAL, (2, 1), vec![(40, 20_000)], true, None),
            (Mask::FULL, (4, 4), even, true, Some(64)),
            (Mask::CAUSAL, (6, 2), ragged.clone(), true, Some(16)),
            (Mask::CAUSAL, (8, 1), ragged.clone(), true, Some(48)),
            (Mask::CAUSAL, (2, 1), vec![(40, 20_000)], true, Some(256)),
        ]
        .into_iter()
        .enumerate()
        {
            let c = Case { dim, mask, heads, lens, scaled, page_size, int8_keys };
            let x = inputs(&c, 500 + n as u64);
            let out = run(gpu, &c, &x)?;
            let name = format!(
                "{} d{dim} {mask} {}/{} heads, {} sequences{}",
                kind(int8_keys),
                heads.0,
                heads.1,
                c.lens.len(),
                page_size.map_or(String::new(), |n| format!(", pages of {n} with scales"))
            );
            report.errors(&name, &check(&c, &x, &out));
            let mut same = true;
            for _ in 0..10 {
                let again = run(gpu, &c, &x)?;
                same &= again.o == out.o && again.lse == out.lse;
            }
            report.line(same, &format!("{name}: the same bits in 10 runs"), String::new());
        }
        test_alone(gpu, report, dim, int8_keys)?;
        test_pages(gpu, report, dim, int8_keys)?;
    }
    Ok(())
}

/// Pages without scales give the bits of rows.
fn test_pages(gpu: &Gpu, report: &mut Report, dim: usize, int8_keys: bool) -> Result<(), Error> {
    for (mask, page_size) in [(Mask::FULL, 16), (Mask::CAUSAL, 16), (Mask::CAUSAL, 128), (Mask::CAUSAL, 80)] {
        let lens = vec![(333, 700), (130, 901), (1, 129), (0, 5)];
        let rows = Case { dim, mask, heads: (4, 2), lens, scaled: false, page_size: None, int8_keys };
        let want = run(gpu, &rows, &inputs(&rows, 21))?;
        let pages = Case { page_size: Some(page_size), ..rows };
        let got = run(gpu, &pages, &inputs(&pages, 21))?;
        let name = format!("{} d{dim} {mask}, pages of {page_size} give the bits of rows", kind(int8_keys));
        report.line(got.o == want.o && got.lse == want.lse, &name, String::new());
    }
    Ok(())
}

/// A sequence gives the same bits alone as among others, whatever the others hold.
fn test_alone(gpu: &Gpu, report: &mut Report, dim: usize, int8_keys: bool) -> Result<(), Error> {
    let c = Case {
        dim,
        mask: Mask::CAUSAL,
        heads: (4, 2),
        lens: vec![(333, 700), (130, 901)],
        scaled: false,
        page_size: None,
        int8_keys,
    };
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
        &format!("{} d{dim} a neighbour full of NaN changes nothing", kind(int8_keys)),
        String::new(),
    );
    x.k.bits.truncate(from);
    x.v.bits.truncate(from);
    let alone = run(gpu, &Case { lens: vec![(333, 700)], ..c.clone() }, &x)?;
    let same = alone.o[..] == first.o[..333 * row];
    report.line(
        same,
        &format!("{} d{dim} alone, the same bits as in a batch", kind(int8_keys)),
        String::new(),
    );
    Ok(())
}
