//! Latent attention cells (576 / 512, one kv head), timed as decode's: graph replays over rotating pages.
use crate::Options;
use crate::decode::{ROTATE_BYTES, time_replays};
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode_mla::{KEYS, MlaDecode, VALUES};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, Rng};
use suanpan_cuda::{Dtype, Error};

/// (query heads, batch, keys a sequence)
const CELLS: [(u32, u32, u32); 6] = [
    (128, 1, 8192),
    (128, 1, 131_072),
    (128, 16, 32_768),
    (128, 128, 4096),
    (16, 1, 131_072),
    (16, 64, 8192),
];

fn cell(
    gpu: &Gpu,
    opt: &Options,
    (heads, batch, seqlen): (u32, u32, u32),
    page_size: u32,
) -> Result<(), Error> {
    let pages_max = seqlen.div_ceil(page_size);
    let (tokens, row) = (u64::from(batch * pages_max * page_size), u64::from(KEYS));
    let cache_bytes = tokens * row * 2;
    let sets = if opt.rotate { ROTATE_BYTES.div_ceil(cache_bytes).clamp(1, 64) } else { 1 };
    let num_pages = sets as u32 * batch * pages_max;
    let kv = Buffer::new(gpu, (sets * cache_bytes) as usize)?;
    kv.fill_normal(gpu, 1, Dtype::Bf16)?;
    let mut ids: Vec<i32> = (0..num_pages as i32).collect();
    let mut rng = Rng::new(3);
    for i in (1..ids.len()).rev() {
        ids.swap(i, rng.below(i + 1));
    }
    let table = Buffer::from_slice(gpu, &ids)?;
    let lens = Buffer::from_slice(gpu, &vec![seqlen as i32; batch as usize])?;
    let rows = (batch * heads) as usize;
    let q = Buffer::new(gpu, rows * KEYS as usize * 2)?;
    q.fill_normal(gpu, 4, Dtype::Bf16)?;
    let (o, lse) = (Buffer::new(gpu, rows * VALUES as usize * 2)?, Buffer::new(gpu, rows * 4)?);
    let mut d = MlaDecode {
        q: Operand { address: q.address, token_stride: u64::from(heads) * row, head_stride: row },
        kv: kv.address,
        page_stride: u64::from(page_size) * row,
        token_stride: row,
        o: o.address,
        lse: lse.address,
        seqlens_k: lens.address,
        page_table: table.address,
        partial: 0,
        num_pages,
        page_size,
        pages_max,
        batch,
        seqlen_q: 1,
        num_q_heads: heads,
        softmax_scale: 1.0 / 24.0,
    };
    let plan = d.plan(gpu.num_sms);
    let partial = Buffer::new(gpu, d.partial_bytes(plan) as usize)?;
    d.partial = partial.address;
    // SAFETY: the buffers cover the shapes and live past the synchronisations inside `time_replays`.
    unsafe { d.launch(gpu, plan)? }; // modules load outside the capture
    let tables = (0..sets).map(|set| d.page_table + set * u64::from(batch * pages_max) * 4);
    // SAFETY: as above.
    let us = time_replays(gpu, opt, tables, |page_table| unsafe {
        MlaDecode { page_table, ..d }.launch(gpu, plan)
    })?;
    let flops = 2.0 * (KEYS + VALUES) as f64 * f64::from(heads) * tokens as f64;
    println!(
        "latent{} {heads} heads B {batch} S {seqlen} page {page_size}: {us:.2} us {:.3} TB/s {:.0} TFLOP/s ({plan})",
        opt.label,
        cache_bytes as f64 / us / 1e6,
        flops / us / 1e6
    );
    Ok(())
}

pub fn bench(gpu: &Gpu, opt: &Options) -> Result<(), Error> {
    for c in CELLS {
        for page_size in &opt.pages {
            cell(gpu, opt, c, *page_size)?;
        }
    }
    Ok(())
}
