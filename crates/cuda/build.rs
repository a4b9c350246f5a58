//! Compiles the kernels with nvcc (from NVCC, CUDA_HOME or PATH) and embeds the cubins. No JIT, no toolkit at run time.
use std::env;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "src/shapes.rs"]
mod shapes;

const FLAGS: [&str; 7] = [
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-cubin",
    "-Xptxas",
    "-v,-warn-spills",
];

/// One cubin: a source built under some definitions.
struct Unit {
    name: String,
    source: &'static str,
    defines: Vec<String>,
}

fn define(name: &str, value: impl std::fmt::Display) -> String {
    format!("-D{name}={value}")
}

fn forward(s: &shapes::ForwardShape, dtype: &str, tag: &str, more: bool) -> Unit {
    Unit {
        name: format!("forward_{}{}_{}_{dtype}", if more { "more_" } else { "" }, s.head_dim, s.head_dim_v),
        source: "kernels/attention/forward.cu",
        defines: vec![
            define("HEAD_DIM", s.head_dim),
            define("HEAD_DIM_V", s.head_dim_v),
            define("DTYPE", tag),
            define("WARPGROUPS", s.warpgroups),
            define("KEYS", s.keys),
            define("KV_STAGES", s.stages),
            define("Q_BUFFERS", s.q_buffers),
            define("TOKEN", s.token),
            define("OVERLAP", u32::from(s.overlap)),
            define("MORE", u32::from(more)),
        ],
    }
}

fn forward_fp8(s: &shapes::Fp8Shape) -> Unit {
    Unit {
        name: format!("forward_{}_e4m3", s.head_dim),
        source: "kernels/attention/forward_fp8.cu",
        defines: vec![
            define("HEAD_DIM", s.head_dim),
            define("WARPGROUPS", s.warpgroups),
            define("K_STAGES", s.k_stages),
            define("V_STAGES", s.v_stages),
            define("TRANSPOSED_STAGES", s.transposed_stages),
            define("TOKEN", s.token),
        ],
    }
}

fn units() -> Vec<Unit> {
    let mut out = vec![Unit { name: "random".into(), source: "kernels/testing/random.cu", defines: vec![] }];
    out.push(Unit { name: "peak".into(), source: "kernels/testing/peak.cu", defines: vec![] });
    out.push(Unit { name: "quantise".into(), source: "kernels/attention/quantise.cu", defines: vec![] });
    out.push(Unit { name: "append".into(), source: "kernels/attention/append.cu", defines: vec![] });
    out.push(Unit { name: "unpack".into(), source: "kernels/attention/unpack.cu", defines: vec![] });
    let combine = "kernels/attention/forward_combine.cu";
    out.push(Unit { name: "combine".into(), source: combine, defines: vec![] });
    for (dtype, tag) in [("bf16", "Bf16"), ("fp16", "Fp16")] {
        out.extend(shapes::FORWARD.iter().map(|shape| forward(shape, dtype, tag, false)));
        out.extend(shapes::FORWARD_MORE.iter().map(|shape| forward(shape, dtype, tag, true)));
    }
    out.extend(shapes::FORWARD_FP8.iter().map(forward_fp8));
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
    out.push(Unit { name: "decode_mla".into(), source: "kernels/attention/decode_mla.cu", defines: vec![] });
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

/// A number that changes with the unit's definitions, its source and everything that source includes by name.
fn fingerprint(nvcc: &Path, unit: &Unit) -> u64 {
    let mut hasher = DefaultHasher::new();
    (nvcc, &unit.defines, FLAGS).hash(&mut hasher);
    let mut files = vec![PathBuf::from(unit.source)];
    let mut at = 0;
    while at < files.len() {
        let text =
            std::fs::read_to_string(&files[at]).unwrap_or_else(|e| panic!("{}: {e}", files[at].display()));
        text.hash(&mut hasher);
        let folder = files[at].parent().expect("a file in kernels").to_path_buf();
        for name in text.lines().filter_map(|l| l.strip_prefix("#include \"")?.split('"').next()) {
            let file = folder.join(name);
            if !files.contains(&file) {
                files.push(file);
            }
        }
        at += 1;
    }
    hasher.finish()
}

/// Compiles one unit, unless its cubin is there from the same sources.
fn compile(nvcc: &Path, unit: &Unit, cubin: &Path) {
    let (key, stamp) = (fingerprint(nvcc, unit).to_string(), cubin.with_extension("key"));
    if cubin.exists() && std::fs::read_to_string(&stamp).is_ok_and(|old| old == key) {
        return;
    }
    let output = Command::new(nvcc)
        .args(FLAGS)
        .arg("-o")
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
    std::fs::write(&stamp, key).expect("OUT_DIR is writable");
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
