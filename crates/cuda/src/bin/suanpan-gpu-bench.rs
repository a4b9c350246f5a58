//! Times the kernels on one device: a line per cell with time and TFLOP/s or TB/s. Correctness is suanpan-gpu-tests' job.
use suanpan_cuda::attention::{Operand, forward::Forward};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, time_us};
use suanpan_cuda::{Dtype, Error};

#[path = "suanpan-gpu-bench/decode.rs"]
mod decode;

struct Options {
    cubin_dir: Option<std::path::PathBuf>,
    what: Vec<String>,
    dims: Vec<u32>,
    lens: Vec<u32>,
    chosen_lens: bool,
    repeats: usize,
    label: String,
    kv: Vec<String>,
    plans: Vec<String>,
    heads: Vec<String>,
    pages: Vec<u32>,
}

fn options() -> Options {
    let mut o = Options {
        cubin_dir: None,
        what: vec!["forward".into(), "decode".into()],
        dims: vec![64, 128, 256],
        lens: vec![2048, 8192, 16384, 32768],
        chosen_lens: false,
        repeats: 15,
        label: String::new(),
        kv: vec!["bf16".into()],
        plans: vec!["auto".into()],
        heads: vec!["32/8".into(), "16/1".into()],
        pages: vec![16, 64],
    };
    let mut args = std::env::args().skip(1);
    let list = |s: String| s.split(',').filter_map(|x| x.parse().ok()).collect::<Vec<u32>>();
    while let Some(a) = args.next() {
        let v = args.next().unwrap_or_default();
        match a.as_str() {
            "--cubin-dir" => o.cubin_dir = Some(v.into()),
            "--what" => o.what = v.split(',').map(String::from).collect(),
            "--dims" => o.dims = list(v),
            "--lens" => (o.lens, o.chosen_lens) = (list(v), true),
            "--repeats" => o.repeats = v.parse().unwrap_or(15),
            "--label" => o.label = v,
            "--kv" => o.kv = v.split(',').map(String::from).collect(),
            "--plans" => o.plans = v.split(',').map(String::from).collect(),
            "--heads" => o.heads = v.split(',').map(String::from).collect(),
            "--pages" => o.pages = list(v),
            other => {
                eprintln!(
                    "unknown option {other}: --cubin-dir --what forward,decode --dims --lens --repeats --label; decode: --kv \
                     bf16,e4m3,int8,int4 --plans auto,line,RANKSxPARTS,RANKSxPARTSl --heads 32/8,16/1 --pages"
                );
                std::process::exit(2);
            }
        }
    }
    o
}

/// One cell: 32k tokens in all, 2,048 columns of heads, as the peers are measured.
fn forward_cell(gpu: &Gpu, opt: &Options, dim: u32, seqlen: u32, causal: bool) -> Result<(), Error> {
    let batch = (32768 / seqlen).max(1);
    let heads = 2048 / dim;
    let tokens = batch * seqlen;
    let elements = tokens as usize * heads as usize * dim as usize;
    let buffers: Vec<Buffer> = (0..4).map(|_| Buffer::new(gpu, elements * 2)).collect::<Result<_, _>>()?;
    for (i, b) in buffers.iter().enumerate() {
        b.fill_normal(gpu, 77 + i as u64, Dtype::Bf16)?;
    }
    let lse = Buffer::new(gpu, tokens as usize * heads as usize * 4)?;
    let counter = Buffer::from_slice(gpu, &[0u32; 2])?;
    let operand = |b: &Buffer| Operand {
        address: b.address,
        token_stride: u64::from(heads * dim),
        head_stride: u64::from(dim),
    };
    let f = Forward {
        q: operand(&buffers[0]),
        k: operand(&buffers[1]),
        v: operand(&buffers[2]),
        o: operand(&buffers[3]),
        lse: lse.address,
        counter: counter.address,
        cu_seqlens_q: None,
        cu_seqlens_k: None,
        total_q: tokens,
        total_k: tokens,
        batch,
        seqlen_q_max: seqlen,
        seqlen_k_max: seqlen,
        num_q_heads: heads,
        num_kv_heads: heads,
        head_dim: dim,
        dtype: Dtype::Bf16,
        causal,
        softmax_scale: 1.0 / (dim as f32).sqrt(),
    };
    // SAFETY: the buffers cover the shapes and live past the synchronisation inside `time_us`.
    let us = time_us(gpu, opt.repeats, 3, || unsafe { f.launch(gpu) })?;
    gpu.synchronize()?;
    let pairs = f64::from(seqlen) * f64::from(seqlen) * if causal { 0.5 } else { 1.0 };
    let tflops = 4.0 * f64::from(batch) * f64::from(heads) * pairs * f64::from(dim) / us / 1e6;
    let mask = if causal { "causal" } else { "full" };
    println!(
        "forward{} d {dim} {mask:6} S {seqlen:6} B {batch:2} H {heads:2}: {us:10.1} us {tflops:7.1} TFLOP/s",
        opt.label
    );
    Ok(())
}

fn main() -> Result<(), Error> {
    let opt = options();
    let gpu = Gpu::open(0, opt.cubin_dir.clone())?;
    if opt.what.iter().any(|w| w == "forward") {
        for &dim in &opt.dims {
            for causal in [false, true] {
                for &seqlen in &opt.lens {
                    forward_cell(&gpu, &opt, dim, seqlen, causal)?;
                }
            }
        }
    }
    if opt.what.iter().any(|w| w == "decode") {
        decode::bench(&gpu, &opt)?;
    }
    Ok(())
}
