//! A folder of safetensors files: which file holds which tensor, and no file outside the folder.
//!
//! The index decides between copies. A shard that is missing, cut or not what the index says is refused by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::assemble::{self, Names, Store};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::safetensors::{MAX_TENSORS, SafeTensors};
use crate::source::Source;
use crate::weights::{Tensor, Weights};
use suanpan_ops::WeightFormat;

/// The index of a sharded model.
pub const INDEX: &str = "model.safetensors.index.json";
/// The weights of an unsharded model.
pub const SINGLE: &str = "model.safetensors";
/// Largest index that is read, in bytes.
pub const MAX_INDEX_BYTES: usize = 16 << 20;

/// A folder whose files may be opened. Links are resolved first and must stay inside.
pub(crate) struct Folder {
    dir: PathBuf,
    roots: Vec<PathBuf>,
    title: String,
}

impl Folder {
    /// Opens the folder at `path`, itself resolved.
    pub fn open(path: &Path) -> Result<Folder, ModelError> {
        let dir = path.canonicalize().map_err(|e| ModelError::io(path, e))?;
        let mut roots = vec![dir.clone()];
        // A hub cache keeps contents in `blobs` and links to them from `snapshots/<commit>`: one store, two folders.
        let store =
            dir.parent().filter(|p| p.file_name().is_some_and(|n| n == "snapshots")).and_then(Path::parent);
        roots.extend(store.and_then(|s| s.join("blobs").canonicalize().ok()));
        let last = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let repo = store.and_then(|s| last(s).strip_prefix("models--").map(|n| n.replacen("--", "/", 1)));
        let title = repo.unwrap_or_else(|| last(&dir));
        Ok(Folder { dir, roots, title })
    }

    /// The folder's name for errors.
    pub fn name(&self) -> String {
        self.dir.display().to_string()
    }

    /// The model's name for people: the folder's own, or the repository's in a hub cache.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// The path of file `name`, or `None` if there is none. `name` is one plain file name.
    fn path(&self, name: &str) -> Result<Option<PathBuf>, ModelError> {
        let plain = matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(n)] if n == name);
        if !plain || name.contains(['/', '\\', '\0']) {
            let found = format!("{name:?}");
            return Err(ModelError::bad(self.name(), "file name", found, "a plain name inside the folder"));
        }
        let path = self.dir.join(name);
        if path.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
            return Ok(None);
        }
        let real = path.canonicalize().map_err(|e| ModelError::io(&path, e))?;
        if !self.roots.iter().any(|root| real.starts_with(root)) {
            let found = format!("a link to {}", real.display());
            return Err(ModelError::bad(self.name(), name, found, "a file inside the folder"));
        }
        Ok(Some(path))
    }

    /// File `name`, mapped, if there is one.
    pub fn read(&self, name: &str) -> Result<Option<Source>, ModelError> {
        self.path(name)?.map(|path| Source::open(&path)).transpose()
    }

    /// File `name`, mapped. `needed` says why it must be there.
    pub fn need(&self, name: &str, needed: &str) -> Result<Source, ModelError> {
        self.read(name)?.ok_or_else(|| ModelError::missing(self.name(), name, needed))
    }

    /// Names of the files that end in `.extension`, sorted.
    pub fn with_extension(&self, extension: &str) -> Result<Vec<String>, ModelError> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.dir).map_err(|e| ModelError::io(&self.dir, e))? {
            let name = PathBuf::from(entry.map_err(|e| ModelError::io(&self.dir, e))?.file_name());
            if name.extension().is_some_and(|e| e == extension) {
                names.extend(name.to_str().map(String::from));
            }
        }
        names.sort();
        Ok(names)
    }
}

/// The weight files of one model, opened and checked against each other.
pub(crate) struct Shards {
    /// The folder, or the one file, for errors.
    name: String,
    files: BTreeMap<String, SafeTensors>,
    /// Which of `files` each tensor comes from.
    home: BTreeMap<String, String>,
    /// What the files contradict each other about.
    pub warnings: Vec<String>,
    /// Rows and columns of a block of FP8 scales, as the config says.
    fp8_block: Option<[usize; 2]>,
}

impl Shards {
    /// Opens the weights of `folder`: what the index names, else `model.safetensors`, else the only `.safetensors` file.
    pub fn open(folder: &Folder) -> Result<Shards, ModelError> {
        if let Some(index) = folder.read(INDEX)? {
            return Shards::indexed(folder, &index);
        }
        let name = match folder.read(SINGLE)? {
            Some(_) => SINGLE.to_string(),
            None => {
                let mut names = folder.with_extension("safetensors")?;
                match names.len() {
                    1 => names.remove(0),
                    0 => {
                        return Err(ModelError::missing(
                            folder.name(),
                            SINGLE,
                            format!("weights ({SINGLE} or {INDEX})"),
                        ));
                    }
                    n => {
                        let found = format!("{n} .safetensors files without an index");
                        return Err(ModelError::missing(
                            folder.name(),
                            INDEX,
                            format!("to say which of {found} to use"),
                        ));
                    }
                }
            }
        };
        Shards::single(folder, &name)
    }

    /// Opens the one weight file `name`.
    pub fn single(folder: &Folder, name: &str) -> Result<Shards, ModelError> {
        let file = SafeTensors::parse(folder.need(name, "weights")?)?;
        let home = file.tensor_names().map(|t| (t.to_string(), name.to_string())).collect();
        let files = BTreeMap::from([(name.to_string(), file)]);
        Ok(Shards { name: folder.name(), files, home, warnings: Vec::new(), fp8_block: None })
    }

    fn indexed(folder: &Folder, index: &Source) -> Result<Shards, ModelError> {
        let home = parse_index(index)?;
        let mut files = BTreeMap::new();
        for (tensor, file) in &home {
            if !files.contains_key(file) {
                let needed = format!("tensor {tensor}, by {INDEX}");
                files.insert(file.clone(), SafeTensors::parse(folder.need(file, &needed)?)?);
            }
        }
        for (tensor, file) in &home {
            let shard: &SafeTensors = &files[file];
            if shard.tensor_info(tensor).is_none() {
                let elsewhere = files.iter().find(|(_, s)| s.tensor_info(tensor).is_some());
                let hint = elsewhere.map_or(String::new(), |(other, _)| format!(" (it is in {other})"));
                let needed = format!("here, by {INDEX}{hint}");
                return Err(ModelError::missing(shard.name(), format!("tensor {tensor}"), needed));
            }
        }
        let mut warnings = Vec::new();
        for (file, shard) in &files {
            for tensor in shard.tensor_names() {
                match home.get(tensor) {
                    Some(owner) if owner == file => {}
                    Some(owner) => warnings
                        .push(format!("{file}: tensor {tensor} is left out: {INDEX} takes it from {owner}")),
                    None => warnings
                        .push(format!("{file}: tensor {tensor} is left out: {INDEX} does not name it")),
                }
            }
        }
        Ok(Shards { name: folder.name(), files, home, warnings, fp8_block: None })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|f| f.source().len() as u64).sum()
    }

    /// The mapped files.
    pub fn sources(&self) -> impl Iterator<Item = &Source> {
        self.files.values().map(SafeTensors::source)
    }

    /// The weights of `config`'s model, as views of the files. A tensor that nobody used is refused.
    pub fn weights(&mut self, config: &ModelConfig) -> Result<Weights, ModelError> {
        let names = Names::safetensors(config.family);
        self.fp8_block = config.fp8_block;
        let mut store = Tensors { shards: self, used: BTreeSet::new() };
        let weights = assemble::weights(config, &names, &mut store)?;
        let mut warnings = Vec::new();
        if config.tie_word_embeddings && store.has(names.lm_head) {
            // As the reference does: a tied model's own head is not read. That it differs is worth a word.
            let head = store.tensor(names.lm_head, &[config.vocab_size, config.hidden_size])?;
            if head.format() != weights.embed.format() || head.bytes() != weights.embed.bytes() {
                warnings.push(format!(
                    "tensor {} differs from {}: tie_word_embeddings is true, so the embedding is used",
                    names.lm_head, names.embed
                ));
            }
        }
        let used = store.used;
        self.warnings.append(&mut warnings);
        // Frequencies that old exporters stored beside the weights; the config says the same.
        let all = self.home.keys().map(String::as_str).filter(|n| !n.ends_with(".rotary_emb.inv_freq"));
        assemble::refuse_unused(&self.name, all, &used, config.family)?;
        Ok(weights)
    }
}

/// Shards whose fetched tensors are remembered.
struct Tensors<'a> {
    shards: &'a Shards,
    used: BTreeSet<String>,
}

impl Tensors<'_> {
    /// An FP8 matrix with the scales beside it: `<name>_scale_inv`, one a block, or `<name>_scale`, one a row or one in all. (Both
    /// multiply; the first name is of those who divided by it.)
    fn scaled(&mut self, tensor: Tensor, name: &str, rows: usize, cols: usize) -> Result<Tensor, ModelError> {
        let beside = ["_scale_inv", "_scale"].map(|end| format!("{name}{end}"));
        let Some(scale) = beside.iter().find(|s| self.has(s)) else {
            return Err(ModelError::missing(
                &*self.shards.name,
                format!("tensor {}", beside[0]),
                "F8_E4M3 weights",
            ));
        };
        let file = self.file(scale, &[])?;
        let shape = file.tensor_info(scale).map(|info| info.shape.clone()).unwrap_or_default();
        let (block_rows, block_cols) = match (shape.as_slice(), self.shards.fp8_block) {
            ([] | [1], _) => (rows, cols),
            (&[r], _) if r == rows => (1, cols),
            (&[r, 1], _) if r == rows => (1, cols),
            (&[r, c], Some([br, bc])) if r == rows.div_ceil(br) && c == cols.div_ceil(bc) => (br, bc),
            (_, block) => {
                let supported = format!("one, one a row, or one a block of {block:?} of {rows} x {cols}");
                let field = format!("tensor {scale}");
                return Err(ModelError::bad(
                    &*self.shards.name,
                    field,
                    format!("shape {shape:?}"),
                    supported,
                ));
            }
        };
        let file = self.file(scale, &shape)?;
        tensor.with_scales(file.tensor(scale, &shape)?.to_f32(), block_rows, block_cols)
    }

    /// The file that holds `name`, which from now on counts as used.
    fn file(&mut self, name: &str, shape: &[usize]) -> Result<&SafeTensors, ModelError> {
        self.used.insert(name.to_string());
        let Shards { name: folder, files, home, .. } = self.shards;
        let file = home.get(name).and_then(|file| files.get(file));
        file.ok_or_else(|| ModelError::missing(folder, format!("tensor {name}"), format!("shape {shape:?}")))
    }
}

impl Store for Tensors<'_> {
    fn has(&self, name: &str) -> bool {
        self.shards.home.contains_key(name)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let tensor = self.file(name, shape)?.tensor(name, shape)?;
        match (tensor.format(), shape) {
            (WeightFormat::F8E4M3, &[rows, cols]) => self.scaled(tensor, name, rows, cols),
            (WeightFormat::F8E4M3, _) => {
                let found = format!("F8_E4M3 of shape {shape:?}");
                Err(ModelError::bad(
                    &*self.shards.name,
                    format!("tensor {name}"),
                    found,
                    "matrices with scales",
                ))
            }
            _ => Ok(tensor),
        }
    }

    fn bytes(&mut self, name: &str, shape: &[usize]) -> Result<Vec<u8>, ModelError> {
        Ok(self.file(name, shape)?.bytes(name, shape)?.to_vec())
    }
}

/// The `weight_map` of an index: file by tensor, each tensor once.
pub fn parse_index(source: &Source) -> Result<BTreeMap<String, String>, ModelError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: WeightMap,
    }
    if source.len() > MAX_INDEX_BYTES {
        let found = format!("{} bytes", source.len());
        return Err(ModelError::bad(
            source.name(),
            "file length",
            found,
            format!("at most {MAX_INDEX_BYTES} bytes"),
        ));
    }
    let index: Index = serde_json::from_slice(source)
        .map_err(|e| ModelError::bad(source.name(), "JSON", e, "an object with a weight_map"))?;
    if index.weight_map.0.is_empty() {
        return Err(ModelError::bad(source.name(), "weight_map", "no tensor", "a file for every tensor"));
    }
    Ok(index.weight_map.0)
}

struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WeightMap, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object from tensor to file")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut pairs = BTreeMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if pairs.len() == MAX_TENSORS {
                        return Err(A::Error::custom(format!("weight_map: more than {MAX_TENSORS} tensors")));
                    }
                    if pairs.contains_key(&tensor) {
                        return Err(A::Error::custom(format!("weight_map: tensor {tensor}: the name twice")));
                    }
                    pairs.insert(tensor, file);
                }
                Ok(WeightMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
