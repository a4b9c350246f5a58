//! Models named `hf:owner/name[@revision][:file.gguf]`: taken from the local hub cache, fetched into it when not there.
//!
//! The cache has the layout of the hub's own tools, so a model fetched by either serves both. Nothing is fetched when the cache has
//! every needed file, or when offline.

use std::path::{Path, PathBuf};

use crate::error::ModelError;

/// The forms of a hub name.
pub const FORM: &str = "hf:owner/name, hf:owner/name@revision, hf:owner/name:file.gguf";

/// A parsed hub name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSpec {
    /// `owner/name`.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// A GGUF file of the repository; `None`: its safetensors folder.
    pub file: Option<String>,
}

impl HubSpec {
    /// Parses what follows `hf:`.
    pub fn parse(spec: &str) -> Result<HubSpec, ModelError> {
        let bad = |found: &str| ModelError::BadSpec {
            spec: format!("hf:{spec}"),
            found: found.into(),
            supported: FORM.into(),
        };
        let (rest, file) = match spec.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (spec, None),
        };
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let Some((owner, name)) = repo.split_once('/') else { return Err(bad("no owner")) };
        if !is_name(owner) || !is_name(name) {
            return Err(bad("an owner or name that is not letters, digits, '.', '_' or '-'"));
        }
        if !revision.split('/').all(is_name) {
            return Err(bad("a revision that is not a branch, tag or commit"));
        }
        if file.is_some_and(|f| !f.split('/').all(is_name) || !f.to_ascii_lowercase().ends_with(".gguf")) {
            return Err(bad("a file that is not a .gguf file of the repository"));
        }
        Ok(HubSpec { repo: repo.into(), revision: revision.into(), file: file.map(String::from) })
    }

    /// The folder of this repository in the cache at `root`.
    pub fn store(&self, root: &Path) -> PathBuf {
        root.join(format!("models--{}", self.repo.replace('/', "--")))
    }
}

/// One path segment of ordinary characters; never `.` or `..`.
fn is_name(s: &str) -> bool {
    let ordinary = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !s.is_empty() && s.len() <= 200 && s.chars().all(ordinary) && !s.chars().all(|c| c == '.')
}

/// What a hub name leads to on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HubFiles {
    /// A folder with config, tokenizer and weights.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
}

/// Where models are cached: `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`.
pub fn default_cache() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("HF_HUB_CACHE")
        .or_else(|| Some(var("HF_HOME")?.join("hub")))
        .or_else(|| Some(std::env::home_dir()?.join(".cache/huggingface/hub")))
}

/// Whether `HF_HUB_OFFLINE` forbids fetching.
pub fn offline_by_environment() -> bool {
    let value = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
    matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
}

/// Files every safetensors folder needs besides its weights.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// The files of `spec` that the cache at `root` already holds, if they are all there.
pub fn cached(spec: &HubSpec, root: &Path) -> Option<HubFiles> {
    let snapshot = snapshot(spec, root)?;
    if let Some(file) = &spec.file {
        let path = snapshot.join(file);
        return path.is_file().then_some(HubFiles::Gguf(path));
    }
    let complete = NEEDED.iter().all(|f| snapshot.join(f).is_file())
        && weight_files(&snapshot).is_some_and(|names| names.iter().all(|f| snapshot.join(f).is_file()));
    complete.then_some(HubFiles::Folder(snapshot))
}

/// The folder of the cached revision; a revision may also be a commit itself.
fn snapshot(spec: &HubSpec, root: &Path) -> Option<PathBuf> {
    let store = spec.store(root);
    let commit = std::fs::read_to_string(store.join("refs").join(&spec.revision));
    let commit = commit.ok().map(|c| c.trim().to_string()).unwrap_or_else(|| spec.revision.clone());
    let path = store.join("snapshots").join(&commit);
    (is_name(&commit) && path.is_dir()).then_some(path)
}

/// Names of the weight files that a folder says it has: its index's, else the single file.
fn weight_files(folder: &Path) -> Option<Vec<String>> {
    use crate::folder::{Folder, INDEX, SINGLE, parse_index};
    match Folder::open(folder).and_then(|f| f.read(INDEX)).ok()? {
        None => Some(vec![SINGLE.into()]),
        Some(index) => {
            let mut names: Vec<String> = parse_index(&index).ok()?.into_values().collect();
            names.sort();
            names.dedup();
            names.iter().all(|n| is_name(n)).then_some(names)
        }
    }
}

#[cfg(feature = "hub")]
pub use fetch::fetch;

#[cfg(feature = "hub")]
mod fetch {
    use hf_hub::api::Progress;
    use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};
    use hf_hub::{Cache, Repo, RepoType};

    use super::{HubFiles, HubSpec, NEEDED, is_name, weight_files};
    use crate::error::ModelError;
    use crate::folder::{INDEX, SINGLE};
    use crate::load::{LoadProgress, LoadStage};
    use std::path::{Path, PathBuf};

    /// Files that are taken when a repository has them.
    const OPTIONAL: [&str; 3] = ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"];
    /// How often a broken transfer is taken up again.
    const RETRIES: usize = 3;

    struct Fetcher<'a> {
        spec: &'a HubSpec,
        repo: ApiRepo,
        snapshot: PathBuf,
        names: Vec<String>,
        done: usize,
        total: usize,
        progress: &'a mut dyn FnMut(LoadProgress),
    }

    /// Fetches the files of `spec` into the cache at `root`. `endpoint`: the hub's address; `token`: for private repositories.
    pub fn fetch(
        spec: &HubSpec,
        root: &Path,
        endpoint: Option<&str>,
        token: Option<&str>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<HubFiles, ModelError> {
        let refuse = |file: &str, message: String| ModelError::Hub {
            repo: spec.repo.clone(),
            file: file.into(),
            message,
        };
        let cache = Cache::new(root.to_path_buf());
        let mut builder = ApiBuilder::from_cache(cache.clone()).with_progress(false).with_retries(RETRIES);
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').into());
        }
        if let Some(token) = token {
            builder = builder.with_token(Some(token.into()));
        }
        let api: Api = builder.build().map_err(|e| refuse("", e.to_string()))?;
        let repo = |revision: &str| Repo::with_revision(spec.repo.clone(), RepoType::Model, revision.into());
        let info =
            api.repo(repo(&spec.revision)).info().map_err(|e| refuse(&spec.revision, e.to_string()))?;
        if !is_name(&info.sha) {
            return Err(refuse(&spec.revision, format!("the hub gave a strange commit {:?}", info.sha)));
        }
        // All files come from one commit, also when the branch moves while we fetch.
        let mut fetcher = Fetcher {
            spec,
            repo: api.repo(repo(&info.sha)),
            snapshot: cache.repo(repo(&info.sha)).pointer_path(&info.sha),
            names: info.siblings.into_iter().map(|s| s.rfilename).collect(),
            done: 0,
            total: 1,
            progress,
        };
        let files = fetcher.files()?;
        let noted = cache.repo(repo(&spec.revision)).create_ref(&info.sha);
        noted.map_err(|e| refuse("refs", e.to_string()))?;
        Ok(files)
    }

    impl Fetcher<'_> {
        fn refuse(&self, file: &str, message: impl Into<String>) -> ModelError {
            ModelError::Hub { repo: self.spec.repo.clone(), file: file.into(), message: message.into() }
        }

        fn has(&self, name: &str) -> bool {
            self.names.iter().any(|n| n == name)
        }

        fn ggufs(&self) -> Vec<&str> {
            self.names
                .iter()
                .map(String::as_str)
                .filter(|n| n.to_ascii_lowercase().ends_with(".gguf"))
                .collect()
        }

        fn files(&mut self) -> Result<HubFiles, ModelError> {
            if let Some(file) = self.spec.file.clone() {
                return self.get(&file).map(HubFiles::Gguf);
            }
            if !self.has(NEEDED[0]) {
                return match self.ggufs()[..] {
                    [only] => {
                        let only = only.to_string();
                        self.get(&only).map(HubFiles::Gguf)
                    }
                    [] => Err(self.refuse(NEEDED[0], "not in the repository, nor any .gguf file")),
                    ref many => {
                        let list = many.iter().take(20).copied().collect::<Vec<_>>().join(", ");
                        let form = format!("hf:{}:FILE", self.spec.repo);
                        Err(self.refuse("", format!("several .gguf files; name one as {form}: {list}")))
                    }
                };
            }
            // Small files first: once the weights are there, everything is, and no listing is needed again.
            let index = self.has(INDEX);
            let mut small: Vec<&str> = NEEDED.to_vec();
            small.extend(OPTIONAL.iter().copied().filter(|n| self.has(n)));
            small.extend(index.then_some(INDEX));
            self.total = small.len() + 1;
            for name in small {
                self.get(name)?;
            }
            let snapshot = self.snapshot.clone();
            let weights = weight_files(&snapshot).ok_or_else(|| {
                self.refuse(if index { INDEX } else { SINGLE }, "does not name weight files")
            })?;
            self.total += weights.len() - 1;
            for name in weights {
                self.get(&name)?;
            }
            Ok(HubFiles::Folder(snapshot))
        }

        /// Fetches one file, unless the snapshot has it.
        fn get(&mut self, name: &str) -> Result<PathBuf, ModelError> {
            if !self.has(name) {
                let hint = match self.ggufs()[..] {
                    [] => String::new(),
                    ref some => format!(
                        "; .gguf files there: {}",
                        some.iter().take(20).copied().collect::<Vec<_>>().join(", ")
                    ),
                };
                return Err(self.refuse(name, format!("not in the repository{hint}")));
            }
            let path = self.snapshot.join(name);
            if !path.is_file() {
                let meter = Meter {
                    item: name,
                    done: 0,
                    total: 0,
                    items: (self.done, self.total),
                    progress: self.progress,
                };
                self.repo
                    .download_with_progress(name, meter)
                    .map_err(|e| self.refuse(name, e.to_string()))?;
            }
            if !path.is_file() {
                return Err(self.refuse(name, "the hub served another commit than it named; try again"));
            }
            self.done += 1;
            Ok(path)
        }
    }

    /// Passes the transfer's progress on.
    struct Meter<'a> {
        item: &'a str,
        done: u64,
        total: u64,
        items: (usize, usize),
        progress: &'a mut dyn FnMut(LoadProgress),
    }

    impl Meter<'_> {
        fn report(&mut self, done_items: usize) {
            (self.progress)(LoadProgress {
                stage: LoadStage::Download,
                item: self.item.into(),
                done_bytes: self.done,
                total_bytes: self.total,
                done_items,
                total_items: self.items.1,
            });
        }
    }

    impl Progress for Meter<'_> {
        fn init(&mut self, size: usize, _file: &str) {
            (self.done, self.total) = (0, size as u64);
            self.report(self.items.0);
        }

        fn update(&mut self, size: usize) {
            self.done += size as u64;
            self.report(self.items.0);
        }

        fn finish(&mut self) {
            self.report(self.items.0 + 1);
        }
    }
}
