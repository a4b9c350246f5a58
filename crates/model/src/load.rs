//! One door for every model: reads a spec (path, `builtin:name`, `hf:owner/name`) and gives a checked, runnable model.

use std::path::{Path, PathBuf};

use crate::builtin;
use crate::config::ModelConfig;
use crate::config_json;
use crate::error::ModelError;
use crate::folder::{Folder, Shards};
use crate::gguf::{self, Gguf};
use crate::hub::{self, HubFiles, HubSpec};
use crate::source::Source;
use crate::template::ChatTemplate;
use crate::tokenizer::{GgufVocab, Tokenizer};
use crate::weights::Weights;

/// The forms of a model's name.
pub const FORMS: &str = "a .gguf file, a folder with config.json, a .safetensors file beside one, builtin:recall, builtin:chain, builtin:count, hf:owner/name[@revision][:file.gguf]";

/// A model that is complete and checked: every tensor the architecture needs is there with its right shape.
pub struct Model {
    /// Sizes, layers, positions, special ids.
    pub config: ModelConfig,
    /// Weights in their file's format.
    pub weights: Weights,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// How a conversation becomes one prompt, if the files say so.
    pub chat_template: Option<ChatTemplate>,
    /// Bytes of the weight files (0 for weights made in code).
    pub file_bytes: u64,
    /// What was decided for the user where the files contradict themselves; also logged.
    pub warnings: Vec<String>,
}

/// How to load. The default takes everything from the environment.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Folder of the hub cache; `None`: [`hub::default_cache`].
    pub hub_cache: Option<PathBuf>,
    /// Address of the hub; `None`: `HF_ENDPOINT`, else the public hub.
    pub hub_endpoint: Option<String>,
    /// Access token of the hub; `None`: `HF_TOKEN`, else the token file beside the cache.
    pub hub_token: Option<String>,
    /// Whether fetching is forbidden; `None`: `HF_HUB_OFFLINE`.
    pub offline: Option<bool>,
    /// Leave the weights on disk until they are first used, instead of bringing them into memory now.
    pub lazy: bool,
}

/// Which part of loading is going on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadStage {
    /// Fetching a file from a hub.
    Download,
    /// Bringing the weights' bytes into memory.
    Read,
}

/// A step of loading, for progress bars.
#[derive(Clone, Debug)]
pub struct LoadProgress {
    /// What is going on.
    pub stage: LoadStage,
    /// File or tensor of the moment.
    pub item: String,
    /// Bytes done: of this file when downloading, of all weights when reading.
    pub done_bytes: u64,
    /// Bytes in all, likewise; 0 while unknown.
    pub total_bytes: u64,
    /// Files or tensors done.
    pub done_items: usize,
    /// Files or tensors in all.
    pub total_items: usize,
}

/// Loads `spec`: a `.gguf` file, a folder with `config.json`, `*.safetensors` and `tokenizer.json`, one `.safetensors` beside
/// its `config.json`, a [`builtin`] name, or `hf:owner/name[@revision][:file.gguf]`.
pub fn load(
    spec: &str,
    opts: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Model, ModelError> {
    let model = if spec.starts_with(builtin::PREFIX) {
        return builtin::load(spec);
    } else if let Some(name) = spec.strip_prefix("hf:") {
        match from_hub(&HubSpec::parse(name)?, opts, progress)? {
            HubFiles::Folder(path) => load_folder(&path, None)?,
            HubFiles::Gguf(path) => load_gguf(&path)?,
        }
    } else {
        load_path(spec)?
    };
    for warning in &model.warnings {
        tracing::warn!(model = spec, "{warning}");
    }
    if !opts.lazy {
        read_weights(&model.weights, progress);
    }
    Ok(model)
}

fn bad_spec(spec: &str, found: impl Into<String>, supported: &str) -> ModelError {
    ModelError::BadSpec { spec: spec.into(), found: found.into(), supported: supported.into() }
}

fn load_path(spec: &str) -> Result<Model, ModelError> {
    let path = Path::new(spec);
    let meta = match path.metadata() {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(bad_spec(spec, "no such file or folder", FORMS));
        }
        Err(e) => return Err(ModelError::io(path, e)),
    };
    if meta.is_dir() {
        return load_folder(path, None);
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some(e) if e.eq_ignore_ascii_case("gguf") => load_gguf(path),
        Some(e) if e.eq_ignore_ascii_case("safetensors") => {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            load_folder(folder, Some(name))
        }
        _ => Err(bad_spec(spec, "a file of another kind", FORMS)),
    }
}

fn load_gguf(path: &Path) -> Result<Model, ModelError> {
    from_gguf(&Gguf::open(path)?)
}

/// The model in an opened GGUF file.
pub fn from_gguf(gguf: &Gguf) -> Result<Model, ModelError> {
    let mut config = gguf::model::config(gguf)?;
    let weights = gguf::model::weights(gguf, &config)?;
    gguf.source().read_ahead();
    let tokenizer = gguf_tokenizer(gguf)?;
    let chat_template = gguf.string("tokenizer.chat_template")?;
    let chat_template = chat_template.map(|t| compile_template(gguf.name(), t, &tokenizer)).transpose()?;
    config.add_bos = begins_with_bos(&config, &tokenizer);
    check_vocabulary(gguf.name(), &config, &tokenizer)?;
    let file_bytes = gguf.source().len() as u64;
    Ok(Model { config, weights, tokenizer, chat_template, file_bytes, warnings: Vec::new() })
}

fn gguf_tokenizer(gguf: &Gguf) -> Result<Tokenizer, ModelError> {
    Tokenizer::from_gguf(GgufVocab::read(gguf)?)
        .map_err(|e| ModelError::Tokenizer { file: gguf.name().into(), message: e.to_string() })
}

/// Loads a safetensors folder; `file`: only that weight file of it.
fn load_folder(path: &Path, file: Option<&str>) -> Result<Model, ModelError> {
    let folder = Folder::open(path)?;
    let Some(config_file) = folder.read("config.json")? else {
        return match (file, &folder.with_extension("gguf")?[..]) {
            (None, [only]) => load_gguf(&path.join(only)),
            _ => Err(ModelError::missing(folder.name(), "config.json", "the sizes of a safetensors model")),
        };
    };
    let mut config = config_json::config(config_file.name(), &config_file, folder.title())?;
    if let Some(source) = folder.read("generation_config.json")? {
        config_json::apply_generation_config(&mut config, source.name(), &source)?;
    }
    let mut shards = match file {
        Some(name) => Shards::single(&folder, name)?,
        None => Shards::open(&folder)?,
    };
    let weights = shards.weights(&config)?;
    shards.sources().for_each(Source::read_ahead);
    let warnings = std::mem::take(&mut shards.warnings);
    let (tokenizer, chat_template) = folder_tokenizer(&folder)?;
    config.add_bos = begins_with_bos(&config, &tokenizer);
    check_vocabulary(&folder.name(), &config, &tokenizer)?;
    Ok(Model { config, weights, tokenizer, chat_template, file_bytes: shards.bytes(), warnings })
}

fn folder_tokenizer(folder: &Folder) -> Result<(Tokenizer, Option<ChatTemplate>), ModelError> {
    let json = folder.need("tokenizer.json", "the tokenizer")?;
    let settings = folder.read("tokenizer_config.json")?;
    let read = Tokenizer::from_json(&json, settings.as_deref())
        .map_err(|e| ModelError::Tokenizer { file: json.name().into(), message: e.to_string() })?;
    // A template in a file of its own is the newer place and wins.
    let own = folder.read("chat_template.jinja")?;
    let own = match &own {
        None => None,
        Some(s) => Some(std::str::from_utf8(s).map_err(|e| ModelError::bad(s.name(), "text", e, "UTF-8"))?),
    };
    let source = own.or(read.chat_template.as_deref());
    let template = source.map(|t| compile_template(&folder.name(), t, &read.tokenizer)).transpose()?;
    Ok((read.tokenizer, template))
}

/// A template that does not compile is a damaged file: it is refused here, not at the first conversation.
fn compile_template(file: &str, source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, ModelError> {
    let ids = tokenizer.special_ids();
    let text =
        |id: Option<u32>| id.and_then(|id| tokenizer.token_bytes(id)).and_then(|b| String::from_utf8(b).ok());
    ChatTemplate::compile(source, text(ids.bos).as_deref(), text(ids.eos).as_deref())
        .map_err(|e| ModelError::Template { file: file.into(), message: e.to_string() })
}

fn begins_with_bos(config: &ModelConfig, tokenizer: &Tokenizer) -> bool {
    let bos = config.bos_token_id.or(tokenizer.special_ids().bos);
    tokenizer.prefix().first().is_some_and(|&id| Some(id) == bos)
}

/// An id that the tokenizer can write must have a row in the embedding.
fn check_vocabulary(file: &str, config: &ModelConfig, tokenizer: &Tokenizer) -> Result<(), ModelError> {
    let (ids, rows) = (tokenizer.vocab_size(), config.vocab_size);
    if ids > rows {
        return Err(ModelError::bad(
            file,
            "tokenizer",
            format!("{ids} ids"),
            format!("at most vocab_size = {rows}"),
        ));
    }
    Ok(())
}

fn from_hub(
    spec: &HubSpec,
    opts: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<HubFiles, ModelError> {
    let refuse =
        |message: String| ModelError::Hub { repo: spec.repo.clone(), file: spec.revision.clone(), message };
    let Some(root) = opts.hub_cache.clone().or_else(hub::default_cache) else {
        return Err(refuse("no home folder: set HF_HUB_CACHE to where models are kept".into()));
    };
    if let Some(files) = hub::cached(spec, &root) {
        return Ok(files);
    }
    if opts.offline.unwrap_or_else(hub::offline_by_environment) {
        return Err(refuse(format!("not complete in {}, and offline", root.display())));
    }
    #[cfg(feature = "hub")]
    {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let endpoint = opts.hub_endpoint.clone().or_else(|| var("HF_ENDPOINT"));
        let token = opts.hub_token.clone().or_else(|| var("HF_TOKEN"));
        hub::fetch(spec, &root, endpoint.as_deref(), token.as_deref(), progress)
    }
    #[cfg(not(feature = "hub"))]
    {
        let _ = progress;
        Err(refuse("this build cannot fetch models (feature `hub` is off)".into()))
    }
}

/// Touches every page of the weights, so that the first request does not pay for the disk.
fn read_weights(weights: &Weights, progress: &mut dyn FnMut(LoadProgress)) {
    const PAGE: usize = 4096;
    /// Bytes between two reports.
    const STRIDE: usize = 16 << 20;
    let total_bytes = weights.tensors().map(|(_, t)| t.bytes().len() as u64).sum();
    let total_items = weights.tensors().count();
    let mut done_bytes = 0;
    for (i, (item, tensor)) in weights.tensors().enumerate() {
        for part in tensor.bytes().chunks(STRIDE) {
            let sum = part.iter().step_by(PAGE).fold(0u8, |sum, &b| sum.wrapping_add(b));
            // The sum itself is of no use; reading it must not be optimised away.
            std::hint::black_box(sum);
            done_bytes += part.len() as u64;
            let done_items = i + usize::from(part.as_ptr_range().end == tensor.bytes().as_ptr_range().end);
            let item = item.clone();
            progress(LoadProgress {
                stage: LoadStage::Read,
                item,
                done_bytes,
                total_bytes,
                done_items,
                total_items,
            });
        }
    }
}
