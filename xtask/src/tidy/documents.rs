//! Documents tell the truth: every path they name exists, and every source file says what it is.

use super::Tree;

const PREFIXES: [&str; 9] =
    ["crates/", "docs/", "src/", "scripts/", "bench/", "xtask/", "tests/", "fuzz/", ".ci/"];

/// Paths in back quotes of a document that look like files or folders of this tree.
fn named_paths(text: &str) -> Vec<&str> {
    let mut fenced = false;
    let mut paths = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        if fenced {
            continue;
        }
        for quoted in line.split('`').skip(1).step_by(2) {
            let placeholder = quoted.contains(['*', '<', '{', ' ', '…']);
            if !placeholder && PREFIXES.iter().any(|p| quoted.starts_with(p)) {
                paths.push(quoted.trim_end_matches('/'));
            }
        }
    }
    paths
}

/// Checks documents and first lines.
pub fn check(tree: &Tree) -> Vec<String> {
    let mut faults = Vec::new();
    for file in &tree.files {
        if file.path.ends_with(".md") {
            for path in named_paths(&file.text) {
                // A document in a crate may name paths of that crate.
                let local =
                    file.path.rsplit_once('/').map_or(String::new(), |(dir, _)| format!("{dir}/{path}"));
                if !tree.root.join(path).exists() && (local.is_empty() || !tree.root.join(&local).exists()) {
                    faults.push(format!("{} names `{path}`, which does not exist", file.path));
                }
            }
        }
        if file.path.ends_with(".rs") && !file.text.starts_with("//!") {
            faults.push(format!("{}: the first line must say what the file is (//!)", file.path));
        }
        if file.path.ends_with(".py")
            && !file.text.trim_start_matches("#!/usr/bin/env python3\n").starts_with("\"\"\"")
        {
            faults.push(format!("{}: the first line must say what the file is (a docstring)", file.path));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_in_quotes_but_not_in_fences_or_patterns() {
        let text =
            "see `crates/base/src/lse.rs` and `docs/`\n```\n`crates/none`\n```\n`bench/record/<machine>`";
        assert_eq!(named_paths(text), ["crates/base/src/lse.rs", "docs"]);
    }
}
