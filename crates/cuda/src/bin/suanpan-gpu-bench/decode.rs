//! Decode cells: graph replays, one at a time with the device idle before, rotating over page tables that share no page.
use crate::Options;
use suanpan_cuda::Error;
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode::{Decode, KvType, Pages, Plan, Scales};
use suanpan_cuda::driver::{Gpu, call};
use suanpan_cuda::testing::{Buffer, Rng, graph_of, median, time_us};

/// (batch, keys a sequence)
const LOADS: [(u32, u32); 7] =
    [(1, 1024), (1, 4096), (1, 8192), (1, 131_072), (16, 32768), (64, 8192), (128, 4096)];
/// Caches rotate over at least this much, so that no replay finds its own in the 50 MB of L2.
pub const ROTATE_BYTES: u64 = 400_000_000;

/// Median time of single graph replays of what `launch` puts on the stream for each of `tables`, in turn.
pub fn time_replays(
    gpu: &Gpu,
    opt: &Options,
    tables: impl Iterator<Item = u64>,
    launch: impl Fn(u64) -> Result<(), Error>,
) -> Result<f64, Error> {
    let mut graphs = Vec::new();
    for page_table in tables {
        graphs.push(graph_of(gpu, || launch(page_table))?);
    }
    let mut us = Vec::new();
    for i in 0..opt.repeats.max(15) * 3 {
        let g = &graphs[i % graphs.len()];
        us.push(time_us(gpu, 1, 0, || g.launch().map_err(call("cuGraphLaunch")))?);
    }
    Ok(median(&mut us))
}

struct Cell {
    heads: (u32, u32, u32),
    batch: u32,
    seqlen: u32,
    page_size: u32,
    kv: KvType,
}

fn plan_of(name: &str, d: &Decode, gpu: &Gpu) -> Plan {
    let line = name.ends_with('l');
    let numbers: Vec<u32> = name.trim_end_matches('l').split('x').filter_map(|x| x.parse().ok()).collect();
    match (name, &numbers[..]) {
        ("line", _) => Plan::Line,
        (_, [ranks, parts]) => Plan::Clusters { ranks: *ranks, parts: *parts, line },
        _ => d.plan(gpu.num_sms),
    }
}

/// Fills `b` with numbers of type `kv`: finite, of ordinary size.
fn fill(gpu: &Gpu, b: &Buffer, kv: KvType, seed: u64) -> Result<(), Error> {
    match kv {
        KvType::Bf16 => b.fill_normal(gpu, seed, suanpan_cuda::Dtype::Bf16),
        KvType::E4m3 => b.fill_bits(gpu, seed, 0xbfbf_bfbf),
        KvType::Int8 | KvType::Int4 => b.fill_bits(gpu, seed, u32::MAX),
    }
}

/// The pages, tables and operands of a cell, and a launch over the first of its tables.
struct Inputs {
    launch: Decode,
    sets: u32,
    table_bytes: u64, // of one set
    cache_bytes: u64, // that one launch must read, scales included
    _held: Vec<Buffer>,
}

fn inputs(gpu: &Gpu, opt: &Options, c: &Cell) -> Result<Inputs, Error> {
    let (num_q_heads, num_kv_heads, dim) = c.heads;
    let (batch, page_size) = (c.batch, c.page_size);
    let pages_per = c.seqlen.div_ceil(page_size);
    let tokens = u64::from(batch * pages_per * page_size);
    let row = u64::from(num_kv_heads * dim);
    let scale_bytes = if c.kv == KvType::Bf16 { 0 } else { 8 * tokens * u64::from(num_kv_heads) };
    let cache_bytes = tokens * row * 2 * c.kv.bits() / 8 + scale_bytes;
    let sets = if opt.rotate { ROTATE_BYTES.div_ceil(cache_bytes).clamp(1, 64) as u32 } else { 1 };
    let num_pages = sets * batch * pages_per;
    let pool = u64::from(num_pages) * u64::from(page_size) * row * c.kv.bits() / 8;
    let (k, v) = (Buffer::new(gpu, pool as usize)?, Buffer::new(gpu, pool as usize)?);
    fill(gpu, &k, c.kv, 1)?;
    fill(gpu, &v, c.kv, 2)?;
    let scales = Buffer::new(gpu, (u64::from(sets) * scale_bytes) as usize)?;
    scales.fill(gpu, (1.0f32 / 64.0).to_bits())?;
    let mut ids: Vec<i32> = (0..num_pages as i32).collect();
    let mut rng = Rng::new(3);
    for i in (1..ids.len()).rev() {
        ids.swap(i, rng.below(i + 1));
    }
    let table = Buffer::from_slice(gpu, &ids)?;
    let lens = Buffer::from_slice(gpu, &vec![c.seqlen as i32; batch as usize])?;
    let outputs = (batch * num_q_heads * dim) as usize;
    let (q, o) = (Buffer::new(gpu, outputs * 2)?, Buffer::new(gpu, outputs * 2)?);
    q.fill_normal(gpu, 4, suanpan_cuda::Dtype::Bf16)?;
    let lse = Buffer::new(gpu, (batch * num_q_heads) as usize * 4)?;
    // Scales: [pages, num_kv_heads, page_size], K's then V's.
    let pages = |b: &Buffer, half: u64| Pages {
        address: b.address,
        page_stride: u64::from(page_size) * row,
        token_stride: row,
        head_stride: u64::from(dim),
        scales: if c.kv == KvType::Bf16 {
            Scales::default()
        } else {
            Scales {
                address: scales.address + half * u64::from(sets) * scale_bytes / 2,
                page_stride: u64::from(num_kv_heads * page_size),
                token_stride: 1,
                head_stride: u64::from(page_size),
            }
        },
    };
    let token_stride = u64::from(num_q_heads * dim);
    let launch = Decode {
        q: Operand { address: q.address, token_stride, head_stride: u64::from(dim) },
        k: pages(&k, 0),
        v: pages(&v, 1),
        kv_type: c.kv,
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
        scores: Default::default(),
        fused: Default::default(),
        batch_invariant: false,
    };
    let held = vec![k, v, scales, table, lens, q, o, lse];
    Ok(Inputs { launch, sets, table_bytes: u64::from(batch * pages_per) * 4, cache_bytes, _held: held })
}

/// One line a plan.
fn cell(gpu: &Gpu, opt: &Options, c: &Cell) -> Result<(), Error> {
    let x = inputs(gpu, opt, c)?;
    for name in &opt.plans {
        let mut d = x.launch;
        let plan = plan_of(name, &d, gpu);
        if plan == Plan::Line && c.kv != KvType::Bf16 {
            continue;
        }
        let partial = Buffer::new(gpu, d.partial_bytes(plan, gpu.num_sms) as usize)?;
        partial.fill(gpu, u32::MAX)?;
        d.partial = partial.address;
        // SAFETY: the buffers cover the shapes and live past the synchronisations inside `graph_of` and `time_us`.
        unsafe { d.launch(gpu, plan)? }; // modules load outside the capture
        let tables = (0..x.sets).map(|set| d.page_table + u64::from(set) * x.table_bytes);
        // SAFETY: as above; `time_replays` ends by reading events behind the last replay.
        let us = time_replays(gpu, opt, tables, |page_table| unsafe {
            Decode { page_table, ..d }.launch(gpu, plan)
        })?;
        println!(
            "decode{}{} {} {}/{} d {} B {} S {} page {}: {us:.2} us {:.3} TB/s ({plan})",
            opt.label,
            if opt.rotate { "" } else { "=again" },
            c.kv.name(),
            c.heads.0,
            c.heads.1,
            c.heads.2,
            c.batch,
            c.seqlen,
            c.page_size,
            x.cache_bytes as f64 / us / 1e6
        );
    }
    Ok(())
}

/// What the memory gives to a plain read, and what an almost empty kernel costs by this timing.
fn floors(gpu: &Gpu, opt: &Options) -> Result<(), Error> {
    let nothing = Buffer::new(gpu, 256)?;
    let g = graph_of(gpu, || nothing.fill_async(gpu, 0))?;
    let mut us = Vec::new();
    for _ in 0..50 {
        us.push(time_us(gpu, 1, 0, || g.launch().map_err(call("cuGraphLaunch")))?);
    }
    println!("floor{}: an almost empty kernel {:.2} us", opt.label, median(&mut us));
    let [smem, threads, ..]: [u32; 8] = gpu.constants("decode_cluster_128_bf16", "decode_cluster_tiling")?;
    let kernel = gpu.kernel("decode_cluster_128_bf16", "decode_8", smem)?;
    for ranks in [16, 8, 4, 2] {
        let at_once = gpu.clusters_at_once(kernel, ranks, threads, smem)?;
        println!("floor{}: {at_once} clusters of {ranks} blocks side by side", opt.label);
    }
    let big = Buffer::new(gpu, 4 << 30)?;
    big.fill_normal(gpu, 1, suanpan_cuda::Dtype::Bf16)?;
    for (name, bytes) in [("0.5 GB", 1u64 << 29), ("2 GB", 1 << 31), ("4 GB", 1 << 32)] {
        let parts = big.bytes as u64 / bytes;
        let mut us = Vec::new();
        for i in 0..12 {
            us.push(time_us(gpu, 1, 0, || big.read_all(gpu, i % parts * bytes, bytes))?);
        }
        println!(
            "floor{}: a plain read of {name} {:.3} TB/s",
            opt.label,
            bytes as f64 / median(&mut us) / 1e6
        );
    }
    Ok(())
}

pub fn bench(gpu: &Gpu, opt: &Options) -> Result<(), Error> {
    floors(gpu, opt)?;
    for dim in &opt.dims {
        for heads in &opt.heads {
            let Some((q, kv)) = heads.split_once('/') else { continue };
            let (q, kv) = (q.parse().unwrap_or(32), kv.parse().unwrap_or(8));
            if (kv == 1) != (*dim == 256) && opt.heads.len() > 1 {
                continue; // 16/1 heads at d 256, 32/8 at the others, as published models have them
            }
            for (batch, seqlen) in LOADS {
                if opt.chosen_lens && !opt.lens.contains(&seqlen) {
                    continue;
                }
                for page_size in &opt.pages {
                    for kv_type in [KvType::Bf16, KvType::E4m3, KvType::Int8, KvType::Int4] {
                        if opt.kv.iter().any(|k| k == kv_type.name()) {
                            let c = Cell {
                                heads: (q, kv, *dim),
                                batch,
                                seqlen,
                                page_size: *page_size,
                                kv: kv_type,
                            };
                            cell(gpu, opt, &c)?;
                        }
                    }
                }
            }
        }
    }
    Ok(())
}
