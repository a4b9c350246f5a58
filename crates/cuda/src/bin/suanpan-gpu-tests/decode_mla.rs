//! Latent attention: page sizes, head counts, several query tokens, ragged and empty sequences, poison, run-to-run bits, replay.
use crate::Report;
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode_mla::{KEYS, MlaDecode, MlaPlan, VALUES};
use suanpan_cuda::driver::{Gpu, call};
use suanpan_cuda::testing::{
    Buffer, Errors, Rng, RowResult, from_bits, graph_of, parallel_rows, reference_scores, to_bits,
};
use suanpan_cuda::{Dtype, Error};

const BF16: Dtype = Dtype::Bf16;
const NAN: u16 = 0x7fff;
const D: usize = KEYS as usize;
const DV: usize = VALUES as usize;

struct Case {
    heads: usize,
    seqlen_q: usize,
    page_size: usize,
    lens: Vec<usize>,
}

/// Queries and pages on the host; what no sequence uses is NaN, and its table entries are hostile.
struct Inputs {
    q: Vec<f32>,
    kv: Vec<f32>, // [pages, page_size, 576]
    table: Vec<i32>,
    pages_max: usize,
    num_pages: usize,
}

fn inputs(c: &Case, rng: &mut Rng) -> Inputs {
    let pages = |n: &usize| n.div_ceil(c.page_size);
    let pages_max = c.lens.iter().map(pages).max().unwrap_or(0) + 1;
    let num_pages = c.lens.iter().map(pages).sum::<usize>() + 3;
    let mut ids: Vec<i32> = (0..num_pages as i32).collect();
    for i in (1..ids.len()).rev() {
        ids.swap(i, rng.below(i + 1));
    }
    let normals: Vec<f32> = (0..1 << 14).map(|_| from_bits(BF16, to_bits(BF16, rng.normal()))).collect();
    let mut kv = vec![f32::NAN; num_pages * c.page_size * D];
    let mut table = vec![i32::MAX; c.lens.len() * pages_max];
    let mut next = ids.into_iter();
    for (b, &len) in c.lens.iter().enumerate() {
        for t in 0..len {
            let entry = b * pages_max + t / c.page_size;
            if t % c.page_size == 0 {
                table[entry] = next.next().expect("enough pages");
            }
            let at = (table[entry] as usize * c.page_size + t % c.page_size) * D;
            kv[at..at + D].fill_with(|| normals[rng.below(normals.len())]);
        }
    }
    let q = (0..c.lens.len() * c.seqlen_q * c.heads * D).map(|_| normals[rng.below(normals.len())]).collect();
    Inputs { q, kv, table, pages_max, num_pages }
}

/// Row `n` ([tokens, heads]) by the oracle and by plain attention.
fn reference(c: &Case, x: &Inputs, lens: &[usize], n: usize) -> RowResult {
    let token = n / c.heads;
    let (b, i) = (token / c.seqlen_q, token % c.seqlen_q);
    let end = (lens[b] + i + 1).saturating_sub(c.seqlen_q).min(lens[b]);
    let key = |j: usize| {
        let page = x.table[b * x.pages_max + j / c.page_size] as usize;
        &x.kv[(page * c.page_size + j % c.page_size) * D..][..D]
    };
    let q = &x.q[n * D..(n + 1) * D];
    let keys: Vec<usize> = (0..end).collect();
    let dot = |j: &usize| q.iter().zip(key(*j)).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let scaled: Vec<f64> = keys.iter().map(|j| dot(j) / (D as f64).sqrt()).collect();
    reference_scores(BF16, DV, &keys, &scaled, f64::NEG_INFINITY, &|j| &key(j)[..DV], |_, s| s)
}

fn check(c: &Case, x: &Inputs, lens: &[usize], o: &[u16], lse: &[f32]) -> Errors {
    let rows = lens.len() * c.seqlen_q * c.heads;
    parallel_rows(rows, |n, errors| {
        let ours: Vec<f32> = o[n * DV..(n + 1) * DV].iter().map(|v| from_bits(BF16, *v)).collect();
        let lse = lse[n % c.heads * (rows / c.heads) + n / c.heads];
        errors.add_row(BF16, &ours, lse, &reference(c, x, lens, n));
    })
}

fn test_case(gpu: &Gpu, report: &mut Report, c: &Case, seed: u64) -> Result<(), Error> {
    let x = inputs(c, &mut Rng::new(seed));
    let bits =
        |v: &[f32]| v.iter().map(|f| if f.is_nan() { NAN } else { to_bits(BF16, *f) }).collect::<Vec<u16>>();
    let (q, kv) = (Buffer::from_slice(gpu, &bits(&x.q))?, Buffer::from_slice(gpu, &bits(&x.kv))?);
    let table = Buffer::from_slice(gpu, &x.table)?;
    let as_i32 = |lens: &[usize]| lens.iter().map(|n| *n as i32).collect::<Vec<i32>>();
    let lens = Buffer::from_slice(gpu, &as_i32(&c.lens))?;
    let rows = c.lens.len() * c.seqlen_q * c.heads;
    let (o, lse) = (Buffer::new(gpu, rows * DV * 2)?, Buffer::new(gpu, rows * 4)?);
    let mut d = MlaDecode {
        q: Operand { address: q.address, token_stride: (c.heads * D) as u64, head_stride: D as u64 },
        kv: kv.address,
        page_stride: (c.page_size * D) as u64,
        token_stride: D as u64,
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
        num_q_heads: c.heads as u32,
        softmax_scale: 1.0 / (D as f32).sqrt(),
    };
    let run = |f: &dyn Fn() -> Result<(), Error>| -> Result<(Vec<u16>, Vec<f32>), Error> {
        o.fill(gpu, 0x7fff_7fff)?;
        lse.fill(gpu, 0x7fc0_0000)?;
        f()?;
        gpu.synchronize()?;
        Ok((o.read(0, rows * DV)?, lse.read(0, rows)?))
    };
    let chosen = d.plan(gpu.num_sms);
    let mut plans = vec![chosen];
    plans.extend([1, 2, 7].map(|parts| MlaPlan { parts }).into_iter().filter(|p| *p != chosen));
    for plan in plans {
        let partial = Buffer::new(gpu, d.partial_bytes(plan) as usize)?;
        partial.fill(gpu, 0x7fc0_0000)?;
        d.partial = partial.address;
        let name = format!(
            "latent {} heads, {} query tokens, page {}, {} sequences: {plan}",
            c.heads,
            c.seqlen_q,
            c.page_size,
            c.lens.len()
        );
        // SAFETY: the buffers were made to the launch's shape, and `run` waits for it.
        let launch = || unsafe { d.launch(gpu, plan) };
        let out = run(&launch)?;
        report.errors(&name, &check(c, &x, &c.lens, &out.0, &out.1));
        let same =
            (0..3).map(|_| run(&launch)).collect::<Result<Vec<_>, _>>()?.iter().all(|again| *again == out);
        report.line(same, &format!("{name}: the same bits in 4 runs"), String::new());
        let graph = graph_of(gpu, launch)?;
        let shorter: Vec<usize> = c.lens.iter().map(|n| n.saturating_sub(65)).collect();
        lens.write(0, &as_i32(&shorter))?;
        let (o, lse) = run(&|| graph.launch().map_err(call("cuGraphLaunch")))?;
        report.errors(&format!("{name}: graph replay, 65 keys less"), &check(c, &x, &shorter, &o, &lse));
        lens.write(0, &as_i32(&c.lens))?;
    }
    Ok(())
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let shapes = [(128, 1, 64), (16, 1, 16), (128, 2, 16), (64, 1, 48), (40, 3, 256), (1, 1, 64)];
    for (n, (heads, seqlen_q, page_size)) in shapes.into_iter().enumerate() {
        let lens = if report.small { vec![70, 1, 128] } else { vec![700, 1, 64, 0, 65, 1500, 63] };
        test_case(gpu, report, &Case { heads, seqlen_q, page_size, lens }, 300 + n as u64)?;
    }
    if report.small {
        return Ok(());
    }
    test_case(gpu, report, &Case { heads: 16, seqlen_q: 1, page_size: 64, lens: vec![9000] }, 400)
}
