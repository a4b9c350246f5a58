//! Holds the tree against its own documents: arrows, paths, budgets, bans. Prints every fault, not just the first.

mod arrows;
mod bans;
mod budgets;
mod documents;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// A source or document file of the tree, read once.
pub struct File {
    /// Path relative to the root, with `/`.
    pub path: String,
    /// Whole text.
    pub text: String,
}

/// Everything the checks look at.
pub struct Tree {
    /// Root folder.
    pub root: PathBuf,
    /// Text files with the endings the checks know.
    pub files: Vec<File>,
}

const ENDINGS: [&str; 9] = ["rs", "md", "toml", "py", "sh", "cu", "cuh", "html", "yml"];
const SKIPPED: [&str; 9] =
    ["target", ".git", ".cache", "carry", "node_modules", "fixtures", "record", "__pycache__", "corpus"];

fn collect(root: &Path, dir: &Path, files: &mut Vec<File>) -> anyhow::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(|e| e.file_name());
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            if !SKIPPED.contains(&name.as_str()) && !name.starts_with(".venv") {
                collect(root, &path, files)?;
            }
        } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| ENDINGS.contains(&e)) {
            let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            let relative = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
            files.push(File { path: relative, text });
        }
    }
    Ok(())
}

/// Runs every check over the tree at `root`.
pub fn run(root: &Path) -> anyhow::Result<String> {
    let mut files = Vec::new();
    collect(root, root, &mut files)?;
    let tree = Tree { root: root.to_path_buf(), files };
    let mut faults = Vec::new();
    faults.extend(arrows::check(&tree)?);
    faults.extend(documents::check(&tree));
    faults.extend(budgets::check(&tree));
    faults.extend(bans::check(&tree));
    if !faults.is_empty() {
        bail!("{}\ntidy: {} faults", faults.join("\n"), faults.len());
    }
    Ok(format!("tidy: {} files in order", tree.files.len()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tree_is_tidy() {
        if let Err(e) = super::run(&crate::root()) {
            panic!("{e}");
        }
    }
}
