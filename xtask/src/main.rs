//! `cargo xtask`: the checks and tools of the repository that are not the product.
//!
//! `tidy` holds the tree against ARCHITECTURE.md and STYLE.md; `record` writes a bench record or refuses it.

mod record;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask tidy | cargo xtask record --what NAME --from FILE.json";

/// Root of the workspace: the folder above this crate.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_path_buf()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["tidy"] => tidy::run(&root()),
        ["record", "--what", what, "--from", file] => record::run(&root(), what, Path::new(file)),
        _ => Err(anyhow::anyhow!("{USAGE}")),
    };
    match result {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e:#}");
            ExitCode::FAILURE
        }
    }
}
