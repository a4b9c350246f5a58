//! Compiles the kernels with nvcc (from NVCC, CUDA_HOME or PATH) and embeds the cubins. No JIT, no toolkit at run time.
use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One cubin: a source built under some definitions.
struct Unit {
    name: String,
    source: &'static str,
    defines: Vec<String>,
}

fn units() -> Vec<Unit> {
    let mut out = vec![Unit { name: "random".into(), source: "kernels/testing/random.cu", defines: vec![] }];
    for (dtype, tag) in [("bf16", "Bf16"), ("fp16", "Fp16")] {
        for (dim, dim_v) in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
            out.push(Unit {
                name: format!("forward_{dim}_{dim_v}_{dtype}"),
                source: "kernels/attention/forward.cu",
                defines: vec![
                    format!("-DHEAD_DIM={dim}"),
                    format!("-DHEAD_DIM_V={dim_v}"),
                    format!("-DDTYPE={tag}"),
                ],
            });
        }
    }
    for dim in [128, 256] {
        let defines = vec![format!("-DHEAD_DIM={dim}")];
        out.push(Unit {
            name: format!("forward_{dim}_e4m3"),
            source: "kernels/attention/forward_fp8.cu",
            defines,
        });
    }
    for dim in [64, 128, 256] {
        let defines = vec![format!("-DHEAD_DIM={dim}")];
        out.push(Unit { name: format!("decode_{dim}_bf16"), source: "kernels/attention/decode.cu", defines });
    }
    for dim in [64, 128, 256] {
        for (n, kv) in ["bf16", "e4m3", "int8", "int4"].into_iter().enumerate() {
            let defines = vec![format!("-DHEAD_DIM={dim}"), format!("-DKV_TYPE={n}")];
            let name = format!("decode_cluster_{dim}_{kv}");
            out.push(Unit { name, source: "kernels/attention/decode_cluster.cu", defines });
        }
    }
    out.retain(|u| Path::new(u.source).exists());
    out
}

fn find_nvcc() -> PathBuf {
    let mut tried = Vec::new();
    let named = env::var_os("NVCC").map(PathBuf::from);
    let home = env::var_os("CUDA_HOME").map(|h| PathBuf::from(h).join("bin/nvcc"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|d| d.join("nvcc"));
    for candidate in named.into_iter().chain(home).chain(on_path) {
        if candidate.is_file() {
            return candidate;
        }
        tried.push(candidate);
    }
    panic!(
        "nvcc 13.0 is needed to build the Hopper kernels: set NVCC or CUDA_HOME (export CUDA_HOME=$(scripts/fetch-nvcc) \
         installs it from PyPI), or put it on PATH (looked in {tried:?})"
    );
}

fn compile(nvcc: &Path, unit: &Unit, cubin: &Path) {
    let output = Command::new(nvcc)
        .args(["-std=c++17", "-O3", "-lineinfo", "-gencode=arch=compute_90a,code=sm_90a", "-cubin"])
        .args(["-Xptxas", "-v,-warn-spills", "-o"])
        .arg(cubin)
        .arg(unit.source)
        .args(&unit.defines)
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}", nvcc.display()));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {log}", unit.name);
    // A spill, or matrix products that the assembler serialises (C75xx), would only show as a slow kernel.
    let fault = log.lines().find(|l| l.contains("spilled") || l.contains("(C75"));
    assert!(fault.is_none(), "{}: {}", unit.name, fault.unwrap_or_default());
    for line in log.lines().filter(|l| l.contains("warning")) {
        println!("cargo:warning={}: {line}", unit.name);
    }
}

fn main() {
    println!("cargo:rerun-if-changed=kernels");
    for name in ["NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let nvcc = find_nvcc();
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let units = units();
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize);
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(units.len()) {
            scope.spawn(|| {
                while let Some(u) = units.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    compile(&nvcc, u, &out.join(format!("{}.cubin", u.name)));
                }
            });
        }
    });
    let mut table = String::from("static CUBINS: &[(&str, &[u8])] = &[\n");
    for u in &units {
        writeln!(table, "    ({0:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{0}.cubin\"))),", u.name)
            .expect("string");
    }
    table.push_str("];\n");
    std::fs::write(out.join("cubins.rs"), table).expect("OUT_DIR is writable");
}
