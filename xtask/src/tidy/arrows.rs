//! Arrows between rooms: each crate's dependencies against the drawing in ARCHITECTURE.md.

use std::fs;

use anyhow::Context;

use super::Tree;

/// Room, and the rooms it may use. A room absent here may not exist: draw it first.
pub const ALLOWED: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("ledger", &["base"]),
    ("attn", &["base", "ledger"]),
    ("parallel", &["base", "ledger", "attn"]),
    ("cuda", &["base", "ledger", "attn"]),
    ("ops", &["base", "ledger"]),
    ("cache", &["base", "ledger"]),
    ("model", &["base", "ledger", "attn", "ops", "cache"]),
    ("engine", &["base", "ledger", "attn", "ops", "cache", "model"]),
    ("server", &["base", "ledger", "attn", "ops", "cache", "model", "engine"]),
    ("eval", &["base", "ledger", "attn", "ops", "cache", "model", "engine"]),
    (
        "suanpan",
        &["base", "ledger", "parallel", "cuda", "attn", "ops", "cache", "model", "engine", "server", "eval"],
    ),
    ("xtask", &[]),
];

/// Outside libraries that only one room may name.
const ONLY_IN: &[(&str, &[&str])] = &[
    ("axum", &["server"]),
    ("tower-http", &["server"]),
    ("clap", &["suanpan", "server"]),
    ("tokenizers", &["model"]),
    ("minijinja", &["model"]),
    ("cudarc", &["cuda"]),
    ("mpi", &["parallel"]),
];

fn check_crate(room: &str, manifest: &toml::Table, faults: &mut Vec<String>) {
    let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == room) else {
        faults.push(format!("crates/{room}: not in the drawing (xtask/src/tidy/arrows.rs, ARCHITECTURE.md)"));
        return;
    };
    let empty = toml::Table::new();
    let dependencies = manifest.get("dependencies").and_then(|d| d.as_table()).unwrap_or(&empty);
    for name in dependencies.keys() {
        if let Some(target) = name.strip_prefix("suanpan-")
            && !allowed.contains(&target)
        {
            faults.push(format!(
                "crates/{room} -> {target}: an arrow against the drawing; allowed: {allowed:?}"
            ));
        }
        if let Some((_, rooms)) = ONLY_IN.iter().find(|(dep, _)| dep == name)
            && !rooms.contains(&room)
        {
            faults.push(format!("crates/{room} uses {name}: only {rooms:?} may"));
        }
    }
}

/// Compares every manifest with the drawing.
pub fn check(tree: &Tree) -> anyhow::Result<Vec<String>> {
    let mut faults = Vec::new();
    for file in tree.files.iter().filter(|f| f.path.ends_with("Cargo.toml")) {
        let room = match file.path.as_str() {
            "Cargo.toml" => "suanpan",
            "xtask/Cargo.toml" => "xtask",
            p => match p.strip_prefix("crates/").and_then(|p| p.strip_suffix("/Cargo.toml")) {
                Some(room) => room,
                None => continue, // fuzz stands outside the workspace
            },
        };
        let manifest: toml::Table = file.text.parse().with_context(|| file.path.clone())?;
        check_crate(room, &manifest, &mut faults);
    }
    let architecture = fs::read_to_string(tree.root.join("ARCHITECTURE.md")).context("ARCHITECTURE.md")?;
    for entry in fs::read_dir(tree.root.join("crates"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !architecture.contains(&format!("crates/{name}")) {
            faults.push(format!("ARCHITECTURE.md does not name crates/{name}"));
        }
    }
    Ok(faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrow_upwards_is_a_fault() {
        let manifest: toml::Table = "[dependencies]\nsuanpan-engine = {}\naxum = {}\n".parse().unwrap();
        let mut faults = Vec::new();
        check_crate("cache", &manifest, &mut faults);
        assert_eq!(faults.len(), 2, "{faults:?}");
    }

    #[test]
    fn the_drawing_has_no_cycle() {
        // Each room may use only rooms drawn before it.
        for (i, (_, allowed)) in ALLOWED.iter().enumerate() {
            for target in *allowed {
                assert!(ALLOWED[..i].iter().any(|(name, _)| name == target));
            }
        }
    }
}
