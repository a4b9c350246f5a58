//! What all routes of one server share: the engine, the model, the options, the instruments.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use suanpan_engine::EngineHandle;
use suanpan_model::Model;

use crate::auth::Keys;
use crate::capabilities::{self, Capability};
use crate::error::ApiError;
use crate::http::Ids;
use crate::metrics::Metrics;

/// How a server behaves, apart from the engine.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Names that requests may use; the first one is shown. At least one.
    pub served_model_names: Vec<String>,
    /// Keys that open every route but `/health`; none = open.
    pub api_keys: Keys,
    /// Longest request body, in bytes.
    pub max_body_bytes: usize,
    /// Whether each finished choice logs one line.
    pub log_requests: bool,
    /// Time between two comments that keep an idle stream open.
    pub keep_alive: Duration,
    /// Keys the numbers that stand for API keys and salts in the prefix cache. Whoever keeps it finds what he cached again; else it
    /// is as good as random and lives as long as the process.
    pub namespace_secret: [u8; 32],
    /// Time that running requests get to finish when the server is told to stop.
    pub drain: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            served_model_names: vec!["suanpan".into()],
            api_keys: Keys::default(),
            max_body_bytes: 32 << 20,
            log_requests: true,
            keep_alive: Duration::from_secs(15),
            namespace_secret: suanpan_engine::folder_secret(None).unwrap_or_default(),
            drain: Duration::from_secs(10),
        }
    }
}

/// The engine's limits and settings, as routes and `/v1/capabilities` need them.
#[derive(Clone, Debug)]
pub struct EngineFacts {
    /// Most tokens of prompt and completion together.
    pub max_model_len: usize,
    /// Choices that run and wait at once, at most; further ones are answered with 429.
    pub max_requests: usize,
    /// Labels of `vllm:cache_config_info`.
    pub cache_config: Vec<(&'static str, String)>,
    /// Features that depend on how the engine was started.
    pub capabilities: Vec<Capability>,
    /// Conditions of any measurement of this server, for `/v1/conditions`.
    pub conditions: serde_json::Map<String, serde_json::Value>,
}

/// Shared state; cloning it is cheap.
#[derive(Clone)]
pub struct App(Arc<Inner>);

/// The fields of [`App`].
pub struct Inner {
    /// Where requests run.
    pub engine: EngineHandle,
    /// Config, tokenizer and chat template.
    pub model: Arc<Model>,
    /// How this server behaves.
    pub options: ServerOptions,
    /// What the engine can do.
    pub facts: EngineFacts,
    /// Prometheus instruments.
    pub metrics: Metrics,
    /// Names of requests.
    pub ids: Ids,
    /// When the server started, Unix time in seconds.
    pub started: u64,
}

impl Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl App {
    /// The state of a server over a running engine.
    pub fn new(engine: EngineHandle, model: Arc<Model>, facts: EngineFacts, options: ServerOptions) -> App {
        let name = options.served_model_names.first().map_or("", String::as_str);
        let metrics = Metrics::new(name, facts.max_model_len, &facts.cache_config);
        App(Arc::new(Inner {
            engine,
            model,
            facts,
            metrics,
            ids: Ids::default(),
            started: unix_seconds(),
            options,
        }))
    }

    /// The served name that a request means, or 404.
    pub fn model_name(&self, asked: Option<&str>) -> Result<String, ApiError> {
        let names = &self.options.served_model_names;
        match asked {
            None => Ok(names.first().cloned().unwrap_or_default()),
            Some(name) if names.iter().any(|n| n == name) => Ok(name.to_owned()),
            Some(name) => Err(ApiError::model_not_found(name)),
        }
    }

    /// Every feature, active or not, with the reason.
    pub fn capabilities(&self) -> Vec<Capability> {
        let template = self.model.chat_template.is_some();
        capabilities::list(&self.facts.capabilities, !self.options.api_keys.is_open(), template)
    }

    /// 503 unless the engine runs.
    pub fn ensure_alive(&self) -> Result<(), ApiError> {
        if self.engine.is_alive() { Ok(()) } else { Err(ApiError::unavailable("The engine has stopped.")) }
    }
}

/// Now, as OpenAI's `created` wants it.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
