//! `suanpan doctor`: what this binary and this machine can do, each feature active or not, with the reason.

use std::fs;

use suanpan_attn::Machine;

/// One line of the report.
#[derive(serde::Serialize)]
struct Feature {
    feature: &'static str,
    active: bool,
    reason: String,
}

#[derive(clap::Args)]
pub struct DoctorArgs {
    /// Print JSON: {"version", "machine": {…}, "features": [{"feature", "active", "reason"}]}.
    #[arg(long)]
    json: bool,
}

fn memory_gib(key: &str) -> Option<f64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|l| l.starts_with(key))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / (1024.0 * 1024.0))
}

/// Why the GPU does not serve, and what is there of it.
fn cuda() -> String {
    #[cfg(feature = "cuda")]
    return match suanpan_cuda::driver::Gpu::open(0, None) {
        Ok(gpu) => {
            format!(
                "attention kernels run on this device ({} multiprocessors): `suanpan bench attn --device cuda`; serving does not use them yet",
                gpu.num_sms
            )
        }
        Err(error) => format!("attention kernels are built in; {error}"),
    };
    #[cfg(not(feature = "cuda"))]
    "built without the feature `cuda`; even with it serving does not use the GPU yet".into()
}

/// Which NCCL there is.
fn nccl() -> String {
    #[cfg(feature = "cuda")]
    return match suanpan_cuda::nccl::Library::open() {
        Ok(nccl) => format!(
            "{} found as {}; no plan runs over it yet: `suanpan-gpu-tests --what nccl` tries it",
            nccl.version(),
            nccl.file()
        ),
        Err(error) => error.to_string(),
    };
    #[cfg(not(feature = "cuda"))]
    "built without the feature `cuda`".into()
}

fn features(machine: &Machine) -> Vec<Feature> {
    let feature = |feature, active, reason: String| Feature { feature, active, reason };
    let hub = match std::env::var("HF_HUB_OFFLINE") {
        Ok(v) if v == "1" || v.eq_ignore_ascii_case("true") => {
            "offline: HF_HUB_OFFLINE is set; cached models load".to_string()
        }
        _ if std::env::var_os("HF_TOKEN").is_some() => "online, with HF_TOKEN".to_string(),
        _ => "online, without a token (set HF_TOKEN for gated models)".to_string(),
    };
    vec![
        feature("cpu", true, format!("attention: {machine}")),
        feature(
            "integer linear",
            true,
            format!("{}; --dtype float32 turns them off", suanpan_ops::isa::Isa::best().name()),
        ),
        feature(
            "paged KV cache",
            true,
            "f32, bf16, f16, fp8_e4m3, int8 and int4 pages; --kv-cache-dtype chooses".into(),
        ),
        feature(
            "prefix cache",
            true,
            "to the token, exact comparison; --no-enable-prefix-caching turns it off".into(),
        ),
        feature("hf: models", true, hub),
        feature("cuda", false, cuda()),
        feature("nccl", false, nccl()),
        feature(
            "mpi",
            false,
            "for `suanpan-ranks` of crates/parallel alone: serving runs on one rank".into(),
        ),
        feature(
            "quantised KV cache",
            true,
            "--kv-cache-dtype; `suanpan eval kv-error` says what a type loses".into(),
        ),
    ]
}

pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let machine = Machine::detect(threads);
    let features = features(&machine);
    let (total, free) = (memory_gib("MemTotal"), memory_gib("MemAvailable"));
    if args.json {
        let report = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "machine": {"arch": std::env::consts::ARCH, "os": std::env::consts::OS, "threads": threads,
                        "memory_gib": total, "memory_available_gib": free, "attention": machine.to_string()},
            "features": features,
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    println!("suanpan {} on {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
    println!(
        "threads {threads}, memory {:.1} GiB ({:.1} GiB available)",
        total.unwrap_or(f64::NAN),
        free.unwrap_or(f64::NAN)
    );
    for f in features {
        println!("  {} {:<20} {}", if f.active { "on " } else { "off" }, f.feature, f.reason);
    }
    Ok(())
}
