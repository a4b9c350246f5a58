//! Writes `bench/record/<machine>/<date>-<what>.json`, or refuses when a condition is missing.
//!
//! Input: `{"conditions": {…}, "rows": [{…}, …]}`. A condition may stand once for all rows or in each row. A row that
//! states a `ratio` must name its `peer` and the peer's version: a peer is measured in the same run or not mentioned.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value, json};

/// What a reader needs to repeat a row. `clocks` and `dropout` may be "not controlled" and "none", but must be said.
const REQUIRED: [&str; 12] = [
    "phase",
    "device",
    "clocks",
    "dtype",
    "heads",
    "head_dim",
    "mask",
    "dropout",
    "lengths",
    "backend",
    "kernel",
    "cache_state",
];

fn said(map: &Map<String, Value>, key: &str) -> bool {
    match map.get(key) {
        None | Some(Value::Null) => false,
        Some(Value::String(s)) => !s.trim().is_empty(),
        Some(Value::Array(a)) => !a.is_empty(),
        Some(_) => true,
    }
}

/// Refuses rows without complete conditions, naming the row and the key.
fn check(conditions: &Map<String, Value>, rows: &[Value]) -> anyhow::Result<()> {
    ensure!(!rows.is_empty(), "record: rows is empty");
    for (i, row) in rows.iter().enumerate() {
        let row = row.as_object().with_context(|| format!("record: rows[{i}] is not an object"))?;
        for key in REQUIRED {
            ensure!(said(row, key) || said(conditions, key), "record: rows[{i}] lacks the condition `{key}`");
        }
        if row.contains_key("ratio") {
            for key in ["peer", "peer_version"] {
                ensure!(
                    said(row, key) || said(conditions, key),
                    "record: rows[{i}] states a ratio without `{key}`"
                );
            }
        }
    }
    Ok(())
}

fn output(command: &str, args: &[&str]) -> anyhow::Result<String> {
    let out = Command::new(command).args(args).output().with_context(|| format!("running {command}"))?;
    ensure!(out.status.success(), "{command} {args:?} failed");
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_string())
}

/// CPU model, cores and the instruction sets that matter here, from the running system.
fn cpu() -> (String, Value) {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| {
        info.lines()
            .find(|l| l.starts_with(key))
            .and_then(|l| l.split_once(':'))
            .map(|(_, v)| v.trim().to_string())
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let flags = field("flags").unwrap_or_default();
    let sets = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile"];
    let isa: Vec<_> = sets.iter().filter(|s| flags.split(' ').any(|f| f == **s)).collect();
    let (family, model) = (field("cpu family").unwrap_or_default(), field("model\t").unwrap_or_default());
    let vendor = field("vendor_id").unwrap_or_else(|| std::env::consts::ARCH.into());
    let slug = format!("{}-{family}-{model}-x{cores}", vendor.to_lowercase());
    let facts = json!({"cpu": field("model name"), "vendor": vendor, "family": family, "model": model, "cores": cores, "isa": isa});
    (slug, facts)
}

/// Checks `from`, adds machine, compiler, commit and date, and writes the record.
pub fn run(root: &Path, what: &str, from: &Path) -> anyhow::Result<String> {
    let name_ok =
        !what.is_empty() && what.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    ensure!(name_ok, "record: --what {what}: lower-case letters, digits and hyphens only");
    let text = fs::read_to_string(from).with_context(|| format!("reading {}", from.display()))?;
    let input: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", from.display()))?;
    let empty = Map::new();
    let conditions = input.get("conditions").and_then(Value::as_object).unwrap_or(&empty);
    let Some(rows) = input.get("rows").and_then(Value::as_array) else { bail!("record: no `rows`") };
    check(conditions, rows)?;
    let date = output("date", &["+%Y-%m-%d"])?;
    let (slug, machine) = cpu();
    let device = input.get("machine_name").and_then(Value::as_str).map_or(slug, str::to_string);
    let record = json!({
        "what": what, "date": date, "machine": machine,
        "rustc": output("rustc", &["--version"])?,
        "commit": output("git", &["rev-parse", "HEAD"])?,
        "tree_changed": !output("git", &["status", "--porcelain"])?.is_empty(),
        "conditions": conditions, "rows": rows,
    });
    let folder = root.join("bench/record").join(&device);
    fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{date}-{what}.json"));
    fs::write(&path, format!("{}\n", serde_json::to_string_pretty(&record)?))?;
    Ok(format!("record: {} rows to {}", rows.len(), path.strip_prefix(root)?.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete() -> Map<String, Value> {
        REQUIRED.iter().map(|k| (k.to_string(), Value::from("said"))).collect()
    }

    #[test]
    fn a_missing_condition_is_refused_by_name() {
        let mut conditions = complete();
        assert!(check(&conditions, &[json!({"ms": 1})]).is_ok());
        conditions.insert("cache_state".into(), Value::from(" "));
        let e = check(&conditions, &[json!({"ms": 1})]).unwrap_err().to_string();
        assert!(e.contains("cache_state"), "{e}");
        assert!(check(&conditions, &[json!({"ms": 1, "cache_state": "cold"})]).is_ok());
    }

    #[test]
    fn a_ratio_without_its_peer_is_refused() {
        let e = check(&complete(), &[json!({"ratio": 2.0})]).unwrap_err().to_string();
        assert!(e.contains("peer"), "{e}");
    }
}
