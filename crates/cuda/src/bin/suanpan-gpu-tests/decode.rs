//! Decode: page sizes, head dims, GQA, several query tokens, ragged and empty sequences, poisoned pages, graph replay.
use crate::{NAN16, Report};
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode::{Decode, Pages};
use suanpan_cuda::driver::{Gpu, call};
use suanpan_cuda::testing::{
    Buffer, Errors, Rng, Row, from_bits, graph_of, parallel_rows, reference_row, to_bits,
};
use suanpan_cuda::{Dtype, Error};

const BF16: Dtype = Dtype::Bf16;

#[derive(Clone)]
struct Case {
    dim: usize,
    num_q_heads: usize,
    num_kv_heads: usize,
    seqlen_q: usize,
    page_size: usize,
    lens: Vec<usize>,
}

/// A cache whose every byte is NaN but the keys and values of the sequences; unused table entries are hostile.
struct Cache {
    case: Case,
    q: Vec<f32>,
    k: Vec<f32>, // [pages, page_size, num_kv_heads, dim]
    v: Vec<f32>,
    table: Vec<i32>,
    pages_max: usize,
    num_pages: usize,
}

impl Cache {
    fn new(case: &Case, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let pages_max = case.lens.iter().map(|n| n.div_ceil(case.page_size)).max().unwrap_or(0) + 2;
        let used: usize = case.lens.iter().map(|n| n.div_ceil(case.page_size)).sum();
        let num_pages = used + 5;
        let mut ids: Vec<i32> = (0..num_pages as i32).collect();
        for i in (1..ids.len()).rev() {
            ids.swap(i, rng.below(i + 1));
        }
        let row = case.num_kv_heads * case.dim;
        let mut k = vec![f32::NAN; num_pages * case.page_size * row];
        let mut v = k.clone();
        let mut table = vec![i32::MAX; case.lens.len() * pages_max];
        let mut next = ids.into_iter();
        for (b, &len) in case.lens.iter().enumerate() {
            for t in 0..len {
                let entry = b * pages_max + t / case.page_size;
                if t % case.page_size == 0 {
                    table[entry] = next.next().expect("enough pages");
                }
                let at = (table[entry] as usize * case.page_size + t % case.page_size) * row;
                for i in at..at + row {
                    k[i] = from_bits(BF16, to_bits(BF16, rng.normal()));
                    v[i] = from_bits(BF16, to_bits(BF16, rng.normal()));
                }
            }
        }
        let q = (0..case.lens.len() * case.seqlen_q * case.num_q_heads * case.dim)
            .map(|_| from_bits(BF16, to_bits(BF16, rng.normal())))
            .collect();
        Self { case: case.clone(), q, k, v, table, pages_max, num_pages }
    }

    fn at(&self, b: usize, token: usize, head: usize) -> usize {
        let c = &self.case;
        let page = self.table[b * self.pages_max + token / c.page_size] as usize;
        ((page * c.page_size + token % c.page_size) * c.num_kv_heads + head) * c.dim
    }
}

/// The cache on the device, its launch, and what the launch writes.
struct Device {
    launch: Decode,
    o: Buffer,
    lse: Buffer,
    lens: Buffer,
    _held: Vec<Buffer>,
}

fn upload(gpu: &Gpu, x: &Cache) -> Result<Device, Error> {
    let c = &x.case;
    let bits = |v: &[f32]| {
        v.iter().map(|f| if f.is_nan() { NAN16 } else { to_bits(BF16, *f) }).collect::<Vec<u16>>()
    };
    let (q, k, v) = (bits(&x.q), bits(&x.k), bits(&x.v));
    let (q, k, v) =
        (Buffer::from_slice(gpu, &q)?, Buffer::from_slice(gpu, &k)?, Buffer::from_slice(gpu, &v)?);
    let table = Buffer::from_slice(gpu, &x.table)?;
    let lens = Buffer::from_slice(gpu, &c.lens.iter().map(|n| *n as i32).collect::<Vec<i32>>())?;
    let o = Buffer::new(gpu, x.q.len() * 2)?;
    let lse = Buffer::new(gpu, c.lens.len() * c.seqlen_q * c.num_q_heads * 4)?;
    let row = (c.num_kv_heads * c.dim) as u64;
    let pages = |b: &Buffer| Pages {
        address: b.address,
        page_stride: c.page_size as u64 * row,
        token_stride: row,
        head_stride: c.dim as u64,
    };
    let mut launch = Decode {
        q: Operand {
            address: q.address,
            token_stride: (c.num_q_heads * c.dim) as u64,
            head_stride: c.dim as u64,
        },
        k: pages(&k),
        v: pages(&v),
        o: o.address,
        lse: lse.address,
        seqlens_k: lens.address,
        page_table: table.address,
        partial: 0,
        num_pages: x.num_pages as u32,
        page_size: c.page_size as u32,
        pages_max: x.pages_max as u32,
        batch: c.lens.len() as u32,
        seqlen_q: c.seqlen_q as u32,
        num_q_heads: c.num_q_heads as u32,
        num_kv_heads: c.num_kv_heads as u32,
        head_dim: c.dim as u32,
        softmax_scale: 1.0 / (c.dim as f32).sqrt(),
    };
    let partial = Buffer::new(gpu, launch.partial_bytes(gpu.num_sms) as usize)?;
    partial.fill(gpu, u32::MAX)?;
    launch.partial = partial.address;
    Ok(Device { launch, o, lse, lens, _held: vec![q, k, v, table, partial] })
}

impl Device {
    fn run(&self, gpu: &Gpu, f: impl FnOnce() -> Result<(), Error>) -> Result<(Vec<u16>, Vec<f32>), Error> {
        let rows = (self.launch.batch * self.launch.seqlen_q * self.launch.num_q_heads) as usize;
        self.o.fill(gpu, 0x7fff_7fff)?;
        self.lse.fill(gpu, 0x7fc0_0000)?;
        f()?;
        gpu.synchronize()?;
        Ok((self.o.read(0, rows * self.launch.head_dim as usize)?, self.lse.read(0, rows)?))
    }

    fn once(&self, gpu: &Gpu) -> Result<(Vec<u16>, Vec<f32>), Error> {
        // SAFETY: `upload` made every buffer to the launch's shape; `run` synchronises.
        self.run(gpu, || unsafe { self.launch.launch(gpu) })
    }
}

fn check(x: &Cache, lens: &[usize], o: &[u16], lse: &[f32]) -> Errors {
    let c = &x.case;
    let total_q = lens.len() * c.seqlen_q;
    parallel_rows(total_q * c.num_q_heads, |n, errors| {
        let (token, head) = (n / c.num_q_heads, n % c.num_q_heads);
        let (b, i) = (token / c.seqlen_q, token % c.seqlen_q);
        let kv = head / (c.num_q_heads / c.num_kv_heads);
        let key = |j: usize| &x.k[x.at(b, j, kv)..][..c.dim];
        let value = |j: usize| &x.v[x.at(b, j, kv)..][..c.dim];
        let keys = (lens[b] + i + 1).saturating_sub(c.seqlen_q).min(lens[b]);
        let row = Row { q: &x.q[n * c.dim..(n + 1) * c.dim], keys, key: &key, value: &value };
        let exact = reference_row(BF16, 1.0 / (c.dim as f64).sqrt(), &row);
        let ours: Vec<f32> = o[n * c.dim..(n + 1) * c.dim].iter().map(|v| from_bits(BF16, *v)).collect();
        errors.add_row(BF16, &ours, lse[head * total_q + token], &exact);
    })
}

fn cases() -> Vec<Case> {
    let ragged = vec![1, 15, 64, 65, 0, 1000, 4099, 300, 128];
    let mut cases = Vec::new();
    for dim in [64, 128, 256] {
        for page_size in [16, 48, 64, 256] {
            for (num_q_heads, num_kv_heads, seqlen_q) in [(8, 2, 1), (16, 1, 1), (4, 4, 3), (16, 2, 8)] {
                cases.push(Case {
                    dim,
                    num_q_heads,
                    num_kv_heads,
                    seqlen_q,
                    page_size,
                    lens: ragged.clone(),
                });
            }
        }
        let long =
            Case { dim, num_q_heads: 8, num_kv_heads: 2, seqlen_q: 1, page_size: 16, lens: vec![40_000] };
        cases.push(Case { lens: vec![700; 150], ..long.clone() });
        cases.push(Case { lens: vec![0, 0, 5], ..long.clone() });
        cases.push(long);
    }
    cases
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    for (n, c) in cases().iter().enumerate() {
        let x = Cache::new(c, 50 + n as u64);
        let device = upload(gpu, &x)?;
        let (o, lse) = device.once(gpu)?;
        let name = format!(
            "decode d{} {}/{} heads, {} query tokens, page {}, {} sequences",
            c.dim,
            c.num_q_heads,
            c.num_kv_heads,
            c.seqlen_q,
            c.page_size,
            c.lens.len()
        );
        report.errors(&name, &check(&x, &c.lens, &o, &lse));
        let mut same = true;
        for _ in 0..10 {
            same &= device.once(gpu)?.0 == o;
        }
        if !same {
            report.line(false, &format!("{name}: the same bits in 10 runs"), String::new());
        }
    }
    test_graph_with_changed_lengths(gpu, report)
}

/// A captured launch follows lengths that change under it; counters are left clean from one replay to the next.
fn test_graph_with_changed_lengths(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let lens = vec![900, 64, 3000, 1, 2048, 77];
    let c = Case { dim: 128, num_q_heads: 32, num_kv_heads: 8, seqlen_q: 1, page_size: 16, lens };
    let x = Cache::new(&c, 7);
    let device = upload(gpu, &x)?;
    // SAFETY: as in `once`.
    unsafe { device.launch.launch(gpu)? };
    // SAFETY: as in `once`; the graph is replayed while `device` lives.
    let graph = graph_of(gpu, || unsafe { device.launch.launch(gpu) })?;
    for shorter in [0usize, 1, 63, 500] {
        let now: Vec<usize> = c.lens.iter().map(|n| n.saturating_sub(shorter)).collect();
        device.lens.write(0, &now.iter().map(|n| *n as i32).collect::<Vec<i32>>())?;
        let (o, lse) = device.run(gpu, || graph.launch().map_err(call("cuGraphLaunch")))?;
        report.errors(&format!("decode graph replay, lengths less {shorter}"), &check(&x, &now, &o, &lse));
    }
    Ok(())
}
