//! Forward with features: windows, chunks, alignment, softcap, bias, ALiBi, sinks, dropout, tree masks, pages, 192/128; alone and together.
use suanpan_attn::dropout::Dropout as Weights;
use suanpan_attn::{BiasStrides, DropoutKey};
use suanpan_base::{Mask, SeqLen};
use suanpan_cuda::attention::decode::{Pages, Scales};
use suanpan_cuda::attention::forward::{
    Bias, Dropout, Forward, KeysValues, Paged, SPLITS_MAX, Scores, Splits, Tree, partial_bytes,
};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, Errors, Rng, from_bits, parallel_rows, reference_scores};
use suanpan_cuda::{Dtype, Error};

use crate::forward::{Output, Tensor, prefix};
use crate::{NAN16, Report};

/// A packed batch on the host, and what is asked of it.
#[derive(Clone)]
struct Case {
    name: &'static str,
    dtype: Dtype,
    dims: (usize, usize), // query and key, value
    mask: Mask,
    softcap: Option<f64>,
    alibi: bool,
    sinks: bool,
    tree: bool,
    /// Numbers a pair of its own, or with `Some(false)` one row a head for all sequences and queries.
    bias: Option<bool>,
    dropout: Option<f32>,
    page_size: Option<usize>,
    pack_gqa: bool,
    splits: u32,
    heads: (usize, usize), // query, key
    lens: Vec<(usize, usize)>,
}

struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    tree: Vec<u32>, // [total_q, words]
    words: usize,
    bias: Vec<f32>,
    bias_strides: BiasStrides,
}

/// Where the dropout of the tests stands in the numbering.
const KEY: DropoutKey =
    DropoutKey { seed: 0x1234_5678_9abc_def0, first_seq: 3, first_head: 5, first_row: 70, first_key: 12 };

impl Case {
    fn len(&self, b: usize) -> SeqLen {
        SeqLen::new(self.lens[b].0, self.lens[b].1)
    }

    fn inputs(&self, seed: u64) -> Inputs {
        let mut rng = Rng::new(seed);
        let (total_q, total_k) = (self.lens.iter().map(|l| l.0).sum(), self.lens.iter().map(|l| l.1).sum());
        let q = Tensor::random(&mut rng, self.dtype, total_q, self.heads.0, self.dims.0, 8);
        let mut k = Tensor::random(&mut rng, self.dtype, total_k, self.heads.1, self.dims.0, 8);
        let mut v = Tensor::random(&mut rng, self.dtype, total_k, self.heads.1, self.dims.1, 16);
        let cu_k = prefix(self.lens.iter().map(|l| l.1));
        for b in 0..self.lens.len() {
            // Keys that no row of the sequence sees are poison.
            let seen = self.mask.visible_hull(self.len(b), 0..self.lens[b].0);
            for j in (0..self.lens[b].1).filter(|&j| !seen.contains(j)) {
                for x in [&mut k, &mut v] {
                    let stride = x.stride();
                    x.bits[(cu_k[b] as usize + j) * stride..][..stride].fill(NAN16);
                }
            }
        }
        let (batch, most_k) = (self.lens.len(), self.lens.iter().map(|l| l.1).max().unwrap_or(0));
        let most_q = self.lens.iter().map(|l| l.0).max().unwrap_or(0);
        let bias_strides = match self.bias {
            Some(true) => {
                let row = most_k + 3;
                BiasStrides { seq: self.heads.0 * most_q * row, head: most_q * row, row, key: 1 }
            }
            _ => BiasStrides { seq: 0, head: most_k, row: 0, key: 1 },
        };
        let numbers = bias_strides.at(batch, self.heads.0, most_q, most_k) * usize::from(self.bias.is_some());
        // Now and then a key without weight.
        let number = |rng: &mut Rng| if rng.below(50) == 0 { f32::NEG_INFINITY } else { rng.normal() };
        let bias = (0..numbers).map(|_| number(&mut rng)).collect();
        let words = self.lens.iter().map(|l| l.0).max().unwrap_or(0).div_ceil(32) + 1;
        Inputs {
            q,
            k,
            v,
            slopes: (0..self.heads.0).map(|h| 0.5f32.powi(h as i32 + 1)).collect(),
            // One sink far above the scores, one absent, the rest among them.
            sinks: (0..self.heads.0).map(|h| [30.0, f32::NEG_INFINITY, 0.5, -2.0][h % 4]).collect(),
            tree: (0..total_q * words).map(|_| rng.bits() as u32 | rng.bits() as u32).collect(),
            words,
            bias,
            bias_strides,
        }
    }

    /// Keys that row `i` of sequence `b` sees.
    fn keys(&self, x: &Inputs, b: usize, i: usize, token: usize) -> Vec<usize> {
        let (len_q, len_k) = self.lens[b];
        let in_tree = |j: usize| {
            let Some(bit) = (j + len_q).checked_sub(len_k) else { return true };
            x.tree[token * x.words + bit / 32] >> (bit % 32) & 1 == 1
        };
        self.mask.visible(self.len(b), i).keys().filter(|&j| !self.tree || in_tree(j)).collect()
    }
}

/// K or V in pages on the device: pages in random order, unused ones and unused rows NaN.
fn pages(
    gpu: &Gpu,
    x: &Tensor,
    c: &Case,
    ids: &[Vec<usize>],
    num_pages: usize,
) -> Result<(Buffer, Pages), Error> {
    let page_size = c.page_size.unwrap_or(16);
    let row = x.heads * x.dim;
    let mut pool = vec![NAN16; num_pages * page_size * row];
    let cu_k = prefix(c.lens.iter().map(|l| l.1));
    for (b, ids) in ids.iter().enumerate() {
        for j in 0..c.lens[b].1 {
            let from = (cu_k[b] as usize + j) * x.stride();
            pool[(ids[j / page_size] * page_size + j % page_size) * row..][..row]
                .copy_from_slice(&x.bits[from..from + row]);
        }
    }
    let buffer = Buffer::from_slice(gpu, &pool)?;
    let address = buffer.address;
    let (page_stride, token_stride) = ((page_size * row) as u64, row as u64);
    Ok((
        buffer,
        Pages { address, page_stride, token_stride, head_stride: x.dim as u64, scales: Scales::default() },
    ))
}

/// Pages of all sequences; the table names no page outside what the rows see.
fn paged(gpu: &Gpu, c: &Case, x: &Inputs) -> Result<(Paged, Vec<Buffer>), Error> {
    let page_size = c.page_size.unwrap_or(16);
    let mut rng = Rng::new(4242);
    let counts: Vec<usize> = c.lens.iter().map(|l| l.1.div_ceil(page_size)).collect();
    let num_pages = counts.iter().sum::<usize>() + 3;
    let mut order: Vec<usize> = (0..num_pages).collect();
    for i in (1..num_pages).rev() {
        order.swap(i, rng.below(i + 1));
    }
    let mut order = order.into_iter();
    let ids: Vec<Vec<usize>> = counts.iter().map(|&n| order.by_ref().take(n).collect()).collect();
    let pages_max = counts.iter().max().copied().unwrap_or(0) + 1;
    let hostile = [-1, i32::MAX, i32::MIN, num_pages as i32];
    let mut table: Vec<i32> = (0..c.lens.len() * pages_max).map(|i| hostile[i % 4]).collect();
    for (b, ids) in ids.iter().enumerate() {
        let seen = c.mask.visible_hull(c.len(b), 0..c.lens[b].0).run;
        for page in (0..ids.len()).filter(|p| p * page_size < seen.end && (p + 1) * page_size > seen.start) {
            table[b * pages_max + page] = ids[page] as i32;
        }
    }
    let (k_buffer, k) = pages(gpu, &x.k, c, &ids, num_pages)?;
    let (v_buffer, v) = pages(gpu, &x.v, c, &ids, num_pages)?;
    let device_table = Buffer::from_slice(gpu, &table)?;
    let page_table = device_table.address;
    let (pages_max, num_pages) = (pages_max as u32, num_pages as u32);
    let paged = Paged { k, v, page_table, pages_max, num_pages, page_size: page_size as u32 };
    let lens: Vec<SeqLen> = (0..c.lens.len()).map(|b| c.len(b)).collect();
    paged.check_ids(&table, &lens, &c.mask)?;
    Ok((paged, vec![k_buffer, v_buffer, device_table]))
}

fn run(gpu: &Gpu, c: &Case, x: &Inputs) -> Result<Output, Error> {
    let (cu_q, cu_k) = (prefix(c.lens.iter().map(|l| l.0)), prefix(c.lens.iter().map(|l| l.1)));
    let (total_q, total_k) = (*cu_q.last().expect("batch") as usize, *cu_k.last().expect("batch") as usize);
    let (q, dcq, dck) = (
        Buffer::from_slice(gpu, &x.q.bits)?,
        Buffer::from_slice(gpu, &cu_q)?,
        Buffer::from_slice(gpu, &cu_k)?,
    );
    let (slopes, sinks) = (Buffer::from_slice(gpu, &x.slopes)?, Buffer::from_slice(gpu, &x.sinks)?);
    let (tree, bias) = (Buffer::from_slice(gpu, &x.tree)?, Buffer::from_slice(gpu, &x.bias)?);
    let (kv, _held) = if c.page_size.is_some() {
        let (paged, held) = paged(gpu, c, x)?;
        (KeysValues::Paged(paged), held)
    } else {
        let (k, v) = (Buffer::from_slice(gpu, &x.k.bits)?, Buffer::from_slice(gpu, &x.v.bits)?);
        (KeysValues::Packed { k: x.k.operand(&k), v: x.v.operand(&v) }, vec![k, v])
    };
    let o_stride = c.heads.0 * c.dims.1 + 8;
    let o = Buffer::new(gpu, total_q * o_stride * 2)?;
    o.fill(gpu, 0x7fff_7fff)?;
    let lse = Buffer::new(gpu, total_q * c.heads.0 * 4)?;
    lse.fill(gpu, 0x7fc0_0000)?;
    let counter = Buffer::from_slice(gpu, &[0u32; 2 * SPLITS_MAX as usize])?;
    let rows = (total_q * c.heads.0) as u64;
    let partial = Buffer::new(gpu, partial_bytes(c.splits, rows, c.dims.1 as u32) as usize)?;
    partial.fill(gpu, 0x7fc0_0000)?;
    let f = Forward {
        q: x.q.operand(&q),
        kv,
        o: suanpan_cuda::attention::Operand {
            address: o.address,
            token_stride: o_stride as u64,
            head_stride: c.dims.1 as u64,
        },
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
        head_dim: c.dims.0 as u32,
        head_dim_v: c.dims.1 as u32,
        dtype: c.dtype,
        mask: c.mask,
        scores: Scores {
            softcap: c.softcap.map(|cap| cap as f32),
            alibi_slopes: c.alibi.then_some(slopes.address),
            sinks: c.sinks.then_some(sinks.address),
            bias: c.bias.map(|_| Bias { address: bias.address, strides: x.bias_strides }),
            dropout: c.dropout.map(|probability| Dropout { probability, key: KEY }),
        },
        tree: c.tree.then_some(Tree { bits: tree.address, words: x.words as u32 }),
        softmax_scale: 1.0 / (c.dims.0 as f32).sqrt(),
        pack_gqa: c.pack_gqa,
        splits: (c.splits > 1).then_some(Splits { count: c.splits, partial: partial.address }),
    };
    // SAFETY: the buffers cover the shapes and live past the synchronisation.
    unsafe { f.launch(gpu)? };
    gpu.synchronize()?;
    Ok(Output { o: o.read(0, total_q * o_stride)?, lse: lse.read(0, total_q * c.heads.0)? })
}

/// Errors of every row against the oracle; a gap that lost its poison counts as not finite.
fn check(c: &Case, x: &Inputs, out: &Output) -> Errors {
    let (cu_q, cu_k) = (prefix(c.lens.iter().map(|l| l.0)), prefix(c.lens.iter().map(|l| l.1)));
    let total_q = *cu_q.last().expect("batch") as usize;
    let (stride, dim_v) = (c.heads.0 * c.dims.1 + 8, c.dims.1);
    let scale = f64::from(1.0 / (c.dims.0 as f32).sqrt());
    let rows: Vec<(usize, usize, usize)> = (0..c.lens.len())
        .flat_map(|b| (0..c.lens[b].0).flat_map(move |i| (0..c.heads.0).map(move |h| (b, i, h))))
        .collect();
    parallel_rows(rows.len(), |n, errors| {
        let (b, i, h) = rows[n];
        let (t, k0, kv) = (cu_q[b] as usize + i, cu_k[b] as usize, h / (c.heads.0 / c.heads.1));
        let keys = c.keys(x, b, i, t);
        let dot = |j: usize| -> f64 {
            let key = x.k.row(k0 + j, kv);
            x.q.row(t, h).iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let scaled: Vec<f64> = keys.iter().map(|&j| scale * dot(j)).collect();
        let centre = c.mask.centre(c.len(b), i);
        let change = |j: usize, s: f64| {
            let capped = c.softcap.map_or(s, |cap| cap * (s / cap).tanh());
            let slope = if c.alibi { f64::from(x.slopes[h]) } else { 0.0 };
            let biased = capped + c.bias.map_or(0.0, |_| f64::from(x.bias[x.bias_strides.at(b, h, i, j)]));
            biased - slope * (centre - j as i64).abs() as f64
        };
        let sink = if c.sinks { f64::from(x.sinks[h]) } else { f64::NEG_INFINITY };
        // Dropped weights as values of zero: lse does not see them.
        let weights = c.dropout.map(|p| Weights::new(p, KEY));
        let dropped: Vec<Vec<f32>> = weights.map_or(Vec::new(), |w| {
            let of = |j: usize| x.v.row(k0 + j, kv).iter().map(|v| v * w.factor(b, h, i, j)).collect();
            (0..c.lens[b].1)
                .map(|j| if keys.binary_search(&j).is_ok() { of(j) } else { Vec::new() })
                .collect()
        });
        let value = |j: usize| if dropped.is_empty() { x.v.row(k0 + j, kv) } else { &dropped[j][..] };
        let exact = reference_scores(c.dtype, dim_v, &keys, &scaled, sink, &value, change);
        let at = t * stride + h * dim_v;
        let o: Vec<f32> = out.o[at..at + dim_v].iter().map(|x| from_bits(c.dtype, *x)).collect();
        errors.add_row(c.dtype, &o, out.lse[h * total_q + t], &exact);
        if h == 0 {
            let gap = &out.o[t * stride + c.heads.0 * dim_v..(t + 1) * stride];
            errors.not_finite += gap.iter().filter(|x| **x != NAN16).count();
        }
    })
}

fn cases(dtype: Dtype, dims: (usize, usize)) -> Vec<Case> {
    let lens =
        vec![(64, 128), (113, 203), (239, 1), (300, 700), (0, 77), (65, 0), (1, 300), (192, 192), (17, 530)];
    let plain = Case {
        name: "",
        dtype,
        dims,
        mask: Mask::CAUSAL,
        softcap: None,
        alibi: false,
        sinks: false,
        tree: false,
        bias: None,
        dropout: None,
        page_size: None,
        pack_gqa: false,
        splits: 1,
        heads: (4, 2),
        lens,
    };
    let chunked = Mask::chunked(std::num::NonZeroUsize::new(96).expect("not zero"));
    let both = Mask { left: Some(37), right: Some(21), ..Mask::FULL };
    let c = |name, mask| Case { name, mask, ..plain.clone() };
    vec![
        c("window 100", Mask::window(100)),
        c("37 left, 21 right", both),
        c("chunks of 96", chunked),
        c("chunks, all of a row's chunk", Mask { right: None, ..chunked }),
        c("causal top-left", Mask { top_left: true, ..Mask::CAUSAL }),
        c("window top-left", Mask { top_left: true, ..Mask::window(50) }),
        Case { softcap: Some(2.0), ..c("softcap causal", Mask::CAUSAL) },
        Case { alibi: true, ..c("alibi causal", Mask::CAUSAL) },
        Case { alibi: true, sinks: true, softcap: Some(20.0), ..c("alibi, softcap, sink, both sides", both) },
        Case { sinks: true, ..c("sink full", Mask::FULL) },
        Case { page_size: Some(16), ..c("pages of 16 causal", Mask::CAUSAL) },
        Case { page_size: Some(48), sinks: true, ..c("pages of 48, window 100, sink", Mask::window(100)) },
        Case { page_size: Some(256), ..c("pages of 256 full", Mask::FULL) },
        Case { bias: Some(true), ..c("bias a pair, causal", Mask::CAUSAL) },
        Case { bias: Some(false), softcap: Some(5.0), ..c("bias a key, softcap, window", Mask::window(100)) },
        Case { dropout: Some(0.3), ..c("dropout causal", Mask::CAUSAL) },
        Case {
            dropout: Some(0.1),
            bias: Some(true),
            alibi: true,
            sinks: true,
            page_size: Some(32),
            ..c("dropout, bias, alibi, sink, pages of 32", both)
        },
        Case { tree: true, ..c("tree", Mask::FULL) },
        Case {
            tree: true,
            page_size: Some(64),
            alibi: true,
            ..c("tree, pages of 64, window, alibi", Mask::window(200))
        },
    ]
}

/// A mask that asks for what the causal kernel does, and pages instead of rows, must not change a bit.
fn test_bits(gpu: &Gpu, report: &mut Report, plain: &Case) -> Result<(), Error> {
    let x = plain.inputs(77);
    let causal = run(gpu, &Case { page_size: None, ..plain.clone() }, &x)?;
    for page_size in [16, 32, 80, 512] {
        let mut same = true;
        for _ in 0..5 {
            let out = run(gpu, &Case { page_size: Some(page_size), ..plain.clone() }, &x)?;
            same &= out.o == causal.o && out.lse == causal.lse;
        }
        let name =
            format!("forward {:?} {}, pages of {page_size} give the bits of rows", plain.dims, plain.name);
        report.line(same, &name, String::new());
    }
    Ok(())
}

/// Tiles of (token, head of a group) give every row the bits of tiles of one head.
fn test_packed_heads(
    gpu: &Gpu,
    report: &mut Report,
    dtype: Dtype,
    dims: (usize, usize),
) -> Result<(), Error> {
    let differs = |c: &Case| c.alibi || c.sinks || c.bias.is_some() || c.dropout.is_some();
    for heads in [(8, 2), (16, 1), (64, 1), (6, 3)] {
        for (n, c) in cases(dtype, dims).into_iter().filter(|c| !differs(c)).enumerate() {
            let c = Case { heads, lens: c.lens.iter().map(|l| (l.0.min(120), l.1)).collect(), ..c };
            let x = c.inputs(7000 + n as u64);
            let (apart, packed) = (run(gpu, &c, &x)?, run(gpu, &Case { pack_gqa: true, ..c.clone() }, &x)?);
            let name = format!(
                "forward {} d{}/{} {} heads packed by {}",
                dtype.name(),
                dims.0,
                dims.1,
                c.name,
                heads.0 / heads.1
            );
            report.line(
                packed.o == apart.o && packed.lse == apart.lse,
                &format!("{name}: same bits"),
                String::new(),
            );
            if heads == (8, 2) {
                report.errors(&name, &check(&c, &x, &packed));
            }
        }
    }
    let c = Case { pack_gqa: true, heads: (6, 2), ..cases(dtype, dims)[0].clone() };
    let refused = run(gpu, &c, &c.inputs(1)).err().map_or(String::new(), |e| e.to_string());
    report.line(refused.contains("pack_gqa"), "forward refuses to pack three heads", refused);
    Ok(())
}

/// Keys in parts, more parts than some rows have key tiles; heads packed where they can be.
fn test_splits(gpu: &Gpu, report: &mut Report, dtype: Dtype, dims: (usize, usize)) -> Result<(), Error> {
    for (n, c) in cases(dtype, dims).into_iter().enumerate() {
        let x = c.inputs(9000 + n as u64);
        let differs = c.alibi || c.sinks || c.bias.is_some() || c.dropout.is_some();
        for splits in [2, 7, SPLITS_MAX] {
            let c = Case { splits, pack_gqa: !differs, ..c.clone() };
            let out = run(gpu, &c, &x)?;
            let name =
                format!("forward {} d{}/{} {}, keys in {splits} parts", dtype.name(), dims.0, dims.1, c.name);
            report.errors(&name, &check(&c, &x, &out));
            let again = run(gpu, &c, &x)?;
            if again.o != out.o || again.lse != out.lse {
                report.line(false, &format!("{name}: the same bits again"), String::new());
            }
        }
    }
    Ok(())
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    for dims in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
        for dtype in [Dtype::Bf16, Dtype::Fp16] {
            for (n, c) in cases(dtype, dims).iter().enumerate() {
                let x = c.inputs(3000 + n as u64);
                let out = run(gpu, c, &x)?;
                let name = format!("forward {} d{}/{} {}", dtype.name(), dims.0, dims.1, c.name);
                report.errors(&name, &check(c, &x, &out));
            }
        }
        test_packed_heads(gpu, report, Dtype::Bf16, dims)?;
        test_splits(gpu, report, if dims.0 == 128 { Dtype::Fp16 } else { Dtype::Bf16 }, dims)?;
        let all = cases(Dtype::Bf16, dims);
        test_bits(
            gpu,
            report,
            &Case { name: "causal", softcap: None, mask: Mask::CAUSAL, ..all[6].clone() },
        )?;
        test_bits(gpu, report, &all[0])?;
    }
    Ok(())
}
