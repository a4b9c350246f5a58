//! Times the kernels on one device: a line per cell with time and TFLOP/s or TB/s. Correctness is suanpan-gpu-tests' job.
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode::{Decode, Pages};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, Rng, graph_of, median, time_us};
use suanpan_cuda::{Dtype, Error};

#[path = "suanpan-gpu-bench/forward.rs"]
mod forward;

struct Options {
    cubin_dir: Option<std::path::PathBuf>,
    what: Vec<String>,
    dims: Vec<u32>,
    masks: Vec<String>,
    lens: Vec<u32>,
    chosen_lens: bool,
    repeats: usize,
    label: String,
}

fn options() -> Options {
    let mut o = Options {
        cubin_dir: None,
        what: vec!["forward".into(), "decode".into()],
        dims: vec![64, 128, 256],
        masks: vec!["full".into(), "causal".into()],
        lens: vec![2048, 8192, 16384, 32768],
        chosen_lens: false,
        repeats: 15,
        label: String::new(),
    };
    let mut args = std::env::args().skip(1);
    let list = |s: String| s.split(',').filter_map(|x| x.parse().ok()).collect::<Vec<u32>>();
    while let Some(a) = args.next() {
        let v = args.next().unwrap_or_default();
        match a.as_str() {
            "--cubin-dir" => o.cubin_dir = Some(v.into()),
            "--what" => o.what = v.split(',').map(String::from).collect(),
            "--dims" => o.dims = list(v),
            "--masks" => o.masks = v.split(',').map(String::from).collect(),
            "--lens" => (o.lens, o.chosen_lens) = (list(v), true),
            "--repeats" => o.repeats = v.parse().unwrap_or(15),
            "--label" => o.label = v,
            other => {
                eprintln!(
                    "unknown option {other}: --cubin-dir --what forward,decode --dims --lens --repeats --label\n\
                     --masks full,causal,window1024,chunk1024 and, each causal: softcap,alibi,sink,page16 (any multiple of 16); dim 192128 is 192/128"
                );
                std::process::exit(2);
            }
        }
    }
    o
}

/// Median time of single graph replays of `d`, in turn over page tables that share no page.
fn time_replays(
    gpu: &Gpu,
    opt: &Options,
    d: &Decode,
    tables: impl Iterator<Item = u64>,
) -> Result<f64, Error> {
    let mut graphs = Vec::new();
    for page_table in tables {
        let d = Decode { page_table, ..*d };
        // SAFETY: the caller's buffers cover the shapes and outlive the replays, which `time_us` ends by reading events.
        graphs.push(graph_of(gpu, || unsafe { d.launch(gpu) })?);
    }
    let mut us = Vec::new();
    for i in 0..opt.repeats.max(15) * 3 {
        let g = &graphs[i % graphs.len()];
        us.push(time_us(gpu, 1, 0, || g.launch().map_err(suanpan_cuda::driver::call("cuGraphLaunch")))?);
    }
    Ok(median(&mut us))
}

/// One decode cell: graph replays, rotating over page tables that share no page, so that no replay finds its cache in L2.
fn decode_cell(
    gpu: &Gpu,
    opt: &Options,
    heads: (u32, u32, u32),
    batch: u32,
    seqlen: u32,
    page_size: u32,
) -> Result<(), Error> {
    let (num_q_heads, num_kv_heads, dim) = heads;
    let pages_per = seqlen.div_ceil(page_size);
    let cache_bytes = u64::from(batch * pages_per * page_size) * u64::from(num_kv_heads * dim) * 4;
    let sets = (400_000_000u64.div_ceil(cache_bytes)).clamp(1, 64) as u32;
    let num_pages = sets * batch * pages_per;
    let row = u64::from(num_kv_heads * dim);
    let pool = u64::from(num_pages) * u64::from(page_size) * row * 2;
    let (k, v) = (Buffer::new(gpu, pool as usize)?, Buffer::new(gpu, pool as usize)?);
    k.fill_normal(gpu, 1, Dtype::Bf16)?;
    v.fill_normal(gpu, 2, Dtype::Bf16)?;
    let mut ids: Vec<i32> = (0..num_pages as i32).collect();
    let mut rng = Rng::new(3);
    for i in (1..ids.len()).rev() {
        ids.swap(i, rng.below(i + 1));
    }
    let table = Buffer::from_slice(gpu, &ids)?;
    let lens = Buffer::from_slice(gpu, &vec![seqlen as i32; batch as usize])?;
    let outputs = (batch * num_q_heads * dim) as usize;
    let (q, o) = (Buffer::new(gpu, outputs * 2)?, Buffer::new(gpu, outputs * 2)?);
    q.fill_normal(gpu, 4, Dtype::Bf16)?;
    let lse = Buffer::new(gpu, (batch * num_q_heads) as usize * 4)?;
    let pages = |b: &Buffer| Pages {
        address: b.address,
        page_stride: u64::from(page_size) * row,
        token_stride: row,
        head_stride: u64::from(dim),
    };
    let mut d = Decode {
        q: Operand {
            address: q.address,
            token_stride: u64::from(num_q_heads * dim),
            head_stride: u64::from(dim),
        },
        k: pages(&k),
        v: pages(&v),
        o: o.address,
        lse: lse.address,
        seqlens_k: lens.address,
        page_table: table.address,
        partial: 0,
        num_pages,
        page_size,
        pages_max: pages_per,
        batch,
        seqlen_q: 1,
        num_q_heads,
        num_kv_heads,
        head_dim: dim,
        softmax_scale: 1.0 / (dim as f32).sqrt(),
    };
    let partial = Buffer::new(gpu, d.partial_bytes(gpu.num_sms) as usize)?;
    partial.fill(gpu, u32::MAX)?;
    d.partial = partial.address;
    // SAFETY: the buffers cover the shapes and live past the synchronisations inside `graph_of` and `time_us`.
    unsafe { d.launch(gpu)? }; // modules load outside the capture
    let tables = (0..sets).map(|set| table.address + u64::from(set * batch * pages_per) * 4);
    let us = time_replays(gpu, opt, &d, tables)?;
    let tbps = cache_bytes as f64 / us / 1e6;
    println!(
        "decode{} {num_q_heads}/{num_kv_heads} d {dim} B {batch:3} S {seqlen:7} page {page_size:3}: {us:9.2} us {tbps:6.3} TB/s",
        opt.label
    );
    Ok(())
}

fn main() -> Result<(), Error> {
    let opt = options();
    let gpu = Gpu::open(0, opt.cubin_dir.clone())?;
    if opt.what.iter().any(|w| w == "forward") {
        for &dim in &opt.dims {
            for mask in &opt.masks {
                for &seqlen in &opt.lens {
                    forward::cell(&gpu, (opt.repeats, &opt.label), dim, seqlen, mask)?;
                }
            }
        }
    }
    if opt.what.iter().any(|w| w == "decode") {
        let nothing = Buffer::new(&gpu, 256)?;
        let g = graph_of(&gpu, || nothing.fill_async(&gpu, 0))?;
        let mut us = Vec::new();
        for _ in 0..50 {
            us.push(time_us(&gpu, 1, 0, || g.launch().map_err(suanpan_cuda::driver::call("cuGraphLaunch")))?);
        }
        println!("an almost empty kernel, timed the same way: {:.2} us", median(&mut us));
        for heads in [(32, 8, 128), (16, 1, 256), (64, 8, 128), (32, 8, 64)] {
            if !opt.dims.contains(&heads.2) {
                continue;
            }
            for (batch, seqlen) in
                [(1, 1024), (1, 4096), (1, 8192), (1, 131_072), (16, 32768), (64, 8192), (128, 4096)]
            {
                if opt.chosen_lens && !opt.lens.contains(&seqlen) {
                    continue;
                }
                for page_size in [16, 64] {
                    decode_cell(&gpu, &opt, heads, batch, seqlen, page_size)?;
                }
            }
        }
    }
    Ok(())
}
