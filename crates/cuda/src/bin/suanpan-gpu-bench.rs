//! Times the kernels on one device: a line per cell with time and TFLOP/s or TB/s. Correctness is suanpan-gpu-tests' job.
use suanpan_cuda::Error;
use suanpan_cuda::driver::Gpu;

#[path = "suanpan-gpu-bench/decode.rs"]
mod decode;
#[path = "suanpan-gpu-bench/decode_mla.rs"]
mod decode_mla;
#[path = "suanpan-gpu-bench/forward.rs"]
mod forward;
#[path = "suanpan-gpu-bench/ranks.rs"]
mod ranks;

struct Options {
    cubin_dir: Option<std::path::PathBuf>,
    what: Vec<String>,
    masks: Vec<String>,
    dims: Vec<u32>,
    lens: Vec<u32>,
    chosen_lens: bool,
    repeats: usize,
    label: String,
    kv: Vec<String>,
    plans: Vec<String>,
    heads: Vec<String>,
    pages: Vec<u32>,
    rotate: bool,
}

fn options() -> Options {
    let mut o = Options {
        cubin_dir: None,
        what: vec!["forward".into(), "decode".into()],
        masks: vec!["full".into(), "causal".into()],
        dims: vec![64, 128, 256],
        lens: vec![2048, 8192, 16384, 32768],
        chosen_lens: false,
        repeats: 15,
        label: String::new(),
        kv: vec!["bf16".into()],
        plans: vec!["auto".into()],
        heads: vec!["32/8".into(), "16/1".into()],
        pages: vec![16, 64],
        rotate: true,
    };
    let mut args = std::env::args().skip(1);
    let list = |s: String| s.split(',').filter_map(|x| x.parse().ok()).collect::<Vec<u32>>();
    while let Some(a) = args.next() {
        let v = args.next().unwrap_or_default();
        match a.as_str() {
            "--cubin-dir" => o.cubin_dir = Some(v.into()),
            "--what" => o.what = v.split(',').map(String::from).collect(),
            "--masks" => o.masks = v.split(',').map(String::from).collect(),
            "--dims" => o.dims = list(v),
            "--lens" => (o.lens, o.chosen_lens) = (list(v), true),
            "--repeats" => o.repeats = v.parse().unwrap_or(15),
            "--label" => o.label = v,
            "--kv" => o.kv = v.split(',').map(String::from).collect(),
            "--plans" => o.plans = v.split(',').map(String::from).collect(),
            "--heads" => o.heads = v.split(',').map(String::from).collect(),
            "--pages" => o.pages = list(v),
            "--rotate" if v == "yes" || v == "no" => o.rotate = v == "yes",
            other => {
                eprintln!(
                    "unknown option {other}: --cubin-dir --what forward,decode,latent,ranks --dims --lens --repeats --label\n\
                     forward: --masks full,causal,window1024,chunk1024 and, each causal: softcap,alibi,sink,page16 (any multiple of 16), \
                     fp8full,fp8causal,fp8page16, int8full,int8causal (keys of int8, values of e4m3), extend64 (query tokens, four heads a kv head; laid out as planned; pack64: heads packed, apart64: not); \
                     dim 192128 is 192/128\n\
                     decode: --kv bf16,e4m3,int8,int4 --plans auto,line,RANKSxPARTS,RANKSxPARTSl --heads 32/8,16/1 --pages --rotate yes,no (no: the same pages each time, from L2 where they fit)\n\
                     ranks: --lens tokens a rank (16384)"
                );
                std::process::exit(2);
            }
        }
    }
    o
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
        decode::bench(&gpu, &opt)?;
    }
    if opt.what.iter().any(|w| w == "latent") {
        decode_mla::bench(&gpu, &opt)?;
    }
    if opt.what.iter().any(|w| w == "ranks") {
        let second = Gpu::open(0, opt.cubin_dir.clone())?;
        let lens = if opt.chosen_lens { opt.lens.clone() } else { vec![16_384] };
        for tokens in lens {
            for ranks in [2, 4, 8] {
                ranks::cell([&gpu, &second], &opt.label, ranks, tokens as usize)?;
            }
        }
    }
    Ok(())
}
