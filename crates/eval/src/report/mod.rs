//! Reports: one log becomes JSON, CSV, Markdown and one HTML page without outside assets, all from the same summary.

use std::path::{Path, PathBuf};

use crate::EvalError;
use crate::run::log::write_whole;

pub mod csv;
pub mod html;
pub mod markdown;
pub mod summary;
pub mod svg;

pub use summary::{Report, build};

/// Writes `report.json`, `report.csv`, `report.md` and `report.html` of the run in `folder` to `out`.
pub fn write(folder: &Path, out: &Path) -> Result<(Report, Vec<PathBuf>), EvalError> {
    let report = build(folder)?;
    std::fs::create_dir_all(out)
        .map_err(|source| EvalError::Io { path: out.display().to_string(), source })?;
    let json = serde_json::to_string_pretty(&report)
        .map_err(|e| EvalError::bad("report.json", e, "numbers that JSON has"))?;
    let files = [
        ("report.json", json + "\n"),
        ("report.csv", csv::render(&report)),
        ("report.md", markdown::render(&report)),
        ("report.html", html::render(&report)),
    ];
    let mut written = Vec::new();
    for (name, text) in files {
        let path = out.join(name);
        write_whole(&path, text.as_bytes())?;
        written.push(path);
    }
    Ok((report, written))
}
