//! Checks every kernel on the device against the f64 oracle, in one command; exits 1 when anything fails.
mod api;
mod append;
mod decode;
mod decode_cache;
mod decode_fused;
mod decode_mla;
mod features;
mod forward;
mod fp8;
mod invariant;
mod lengths;
mod nccl;

use suanpan_cuda::Error;
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::Errors;

/// NaN in both bf16 and fp16: what outputs and unused inputs are filled with.
const NAN16: u16 = 0x7fff;

struct Report {
    failed: usize,
    run: usize,
    /// A few short cases of each kind, for tools that slow a kernel down a thousand times.
    small: bool,
    /// Calls of the api part whose name has this.
    only: String,
}

impl Report {
    fn line(&mut self, ok: bool, name: &str, detail: String) {
        self.run += 1;
        self.failed += usize::from(!ok);
        println!("{} {name}: {detail}", if ok { "ok  " } else { "FAIL" });
    }

    /// Good where a launch was refused by name.
    fn refused(&mut self, name: &str, launch: Result<(), Error>) {
        let ok = matches!(launch, Err(Error::Unsupported { .. }));
        self.line(ok, name, launch.err().map_or(String::new(), |e| e.to_string()));
    }

    fn errors(&mut self, name: &str, e: &Errors) {
        let detail = format!(
            "err {:.2e} plain {:.2e} rounding {:.2e} lse {:.1e} bad {}",
            e.ours, e.plain, e.rounding, e.lse, e.not_finite
        );
        self.line(e.pass(), name, detail);
    }
}

const ALL: &str = "api,invariant,lengths,forward,features,fp8,decode,fused,append,latent";
/// Run only where it is named: it needs a library that a machine with a GPU need not have.
const NCCL: &str = "nccl";
const USAGE: &str = "usage: suanpan-gpu-tests [--what PART,..] [--small] [--only TEXT] [--cubin-dir DIR]
  --what       parts to run, of api,invariant,lengths,forward,features,fp8,decode,fused,append,latent (default: all of these)
               and nccl (NCCL with one rank: SUANPAN_NCCL_LIBRARY names its libnccl.so.2 where the loader does not find it)
  --small      a few short cases of each kind, for compute-sanitizer
  --only       of the api part, the calls whose name has TEXT
  --cubin-dir  kernels of the same names from there instead of the embedded ones";

struct Options {
    what: String,
    small: bool,
    only: String,
    cubin_dir: Option<std::path::PathBuf>,
}

/// What the command line asks for; `None` after a word that it does not know.
fn options() -> Option<Options> {
    let mut o = Options { what: ALL.into(), small: false, only: String::new(), cubin_dir: None };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--what" => o.what = args.next()?,
            "--small" => o.small = true,
            "--only" => o.only = args.next()?,
            "--cubin-dir" => o.cubin_dir = Some(args.next()?.into()),
            _ => return None,
        }
    }
    let known = |part: &str| ALL.split(',').any(|known| known == part) || part == NCCL;
    o.what.split(',').all(known).then_some(o)
}

fn main() -> Result<(), Error> {
    let Some(Options { what, small, only, cubin_dir }) = options() else {
        println!("{USAGE}");
        std::process::exit(2);
    };
    let gpu = Gpu::open(0, cubin_dir)?;
    let mut report = Report { failed: 0, run: 0, small, only };
    if what.contains("api") {
        api::test(&gpu, &mut report)?;
    }
    if what.contains("invariant") {
        invariant::test(&gpu, &mut report)?;
    }
    if what.contains("lengths") {
        lengths::test(&gpu, &mut report)?;
    }
    if what.contains("forward") {
        forward::test(&gpu, &mut report)?;
    }
    if what.contains("features") {
        features::test(&gpu, &mut report)?;
    }
    if what.contains("fp8") {
        fp8::test(&gpu, &mut report)?;
    }
    if what.contains("decode") {
        decode::test(&gpu, &mut report)?;
    }
    if what.contains("fused") {
        decode_fused::test(&gpu, &mut report)?;
    }
    if what.contains("append") {
        append::test(&gpu, &mut report)?;
    }
    if what.contains("latent") {
        decode_mla::test(&gpu, &mut report)?;
    }
    if what.contains(NCCL) {
        nccl::test(&gpu, &mut report)?;
    }
    println!("{} of {} checks failed", report.failed, report.run);
    if report.failed > 0 {
        std::process::exit(1);
    }
    Ok(())
}
