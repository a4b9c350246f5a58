//! `suanpan serve`: loads a model, starts the engine, prints what was decided, and answers OpenAI's API until told to stop.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use suanpan_engine::{EngineHandle, EngineOptions};
use suanpan_model::{ChatTemplate, Model};
use suanpan_ops::Precision;
use suanpan_server::{App, Capability, Ending, EngineFacts, Keys, ServerOptions};

use crate::engine_flags::{self, EngineFlags};

#[derive(clap::Args)]
pub struct ServeArgs {
    /// The model: a file or folder, builtin:recall (or :chain, :count), or `hf:owner/name[@revision][:file.gguf]`.
    #[arg(value_name = "MODEL", required_unless_present = "model", conflicts_with = "model")]
    model_positional: Option<String>,
    /// The same, as a flag.
    #[arg(long)]
    model: Option<String>,
    /// Address to listen on. Give 0.0.0.0 to be reached from other machines, and an --api-key with it.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes any free one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// A key that opens every route but /health; may be given several times. In the environment: SUANPAN_API_KEY.
    #[arg(long)]
    api_key: Vec<String>,
    /// Name that requests use; may be given several times [default: the model as given].
    #[arg(long, num_args = 1..)]
    served_model_name: Vec<String>,
    #[command(flatten)]
    engine: EngineFlags,
    /// File with a chat template that replaces the model's own.
    #[arg(long)]
    chat_template: Option<PathBuf>,
    /// Write no line for each finished request.
    #[arg(long)]
    disable_log_requests: bool,
    /// Requests that may wait beyond those that run; further ones get 429.
    #[arg(long, default_value_t = 256)]
    max_queue: usize,
    /// Longest request body, in bytes.
    #[arg(long, default_value_t = ServerOptions::default().max_body_bytes)]
    max_body_bytes: usize,
    /// Print the start report as one line of JSON: {"address", "model", "served_model_names", "max_model_len", "max_num_seqs",
    /// "block_size", "kv_pages", "kv_bytes", "kv_cache_dtype", "dtype", "api_keys", "report", "capabilities"}.
    #[arg(long)]
    json: bool,
}

pub fn run(args: ServeArgs) -> anyhow::Result<()> {
    start_log();
    let keys = api_keys(&args)?;
    let spec = args.model.clone().or_else(|| args.model_positional.clone()).context("no model was given")?;
    let mut model = engine_flags::load(&spec)?;
    if let Some(path) = &args.chat_template {
        let template = chat_template(path, &model)?;
        let model = Arc::get_mut(&mut model).context("the model is in use before the server starts")?;
        model.chat_template = Some(template);
    }
    let options = args.engine.options(&spec)?;
    let max_requests = options.max_num_seqs.saturating_add(args.max_queue);
    let engine = engine_flags::start(&model, options, args.engine.lower_tiers(), max_requests)?;
    let names =
        if args.served_model_name.is_empty() { vec![spec.clone()] } else { args.served_model_name.clone() };
    let server = ServerOptions {
        served_model_names: names,
        api_keys: keys,
        max_body_bytes: args.max_body_bytes,
        log_requests: !args.disable_log_requests,
        namespace_secret: suanpan_engine::folder_secret(args.engine.kv_disk_path.as_deref())
            .context("--kv-disk-path: its secret")?,
        ..ServerOptions::default()
    };
    let mut facts = engine_facts(&engine, &options, max_requests);
    facts.conditions = crate::eval_engine::conditions(&spec, &model, &engine, &options);
    let app = App::new(engine, model, facts, server);
    let told = app.clone();
    let ending = suanpan_server::run_until_signal(&args.host, args.port, app, |address| {
        report(&args, &spec, &options, &told, address);
    })
    .with_context(|| format!("serving on {}:{}", args.host, args.port))?;
    match ending {
        Ending::Drained => tracing::info!("stopped; every request had finished"),
        Ending::TimedOut => tracing::warn!("stopped; requests that did not finish in time were aborted"),
    }
    Ok(())
}

/// Log lines go to standard error; `RUST_LOG` chooses them. A log that is set up already stays.
fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let colours = std::io::stderr().is_terminal();
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    drop(log.try_init());
}

fn api_keys(args: &ServeArgs) -> anyhow::Result<Keys> {
    let mut keys = args.api_key.clone();
    match std::env::var("SUANPAN_API_KEY") {
        Ok(key) => keys.push(key),
        Err(std::env::VarError::NotPresent) => {}
        Err(e) => bail!("SUANPAN_API_KEY: {e}"),
    }
    Ok(Keys::new(keys)?)
}

fn chat_template(path: &std::path::Path, model: &Model) -> anyhow::Result<ChatTemplate> {
    let source =
        std::fs::read_to_string(path).with_context(|| format!("--chat-template {}", path.display()))?;
    let special = model.tokenizer.special_ids();
    let text = |id: Option<u32>| {
        id.and_then(|id| model.tokenizer.token_bytes(id)).and_then(|b| String::from_utf8(b).ok())
    };
    let (bos, eos) = (text(special.bos), text(special.eos));
    ChatTemplate::compile(&source, bos.as_deref(), eos.as_deref())
        .with_context(|| format!("--chat-template {}", path.display()))
}

fn engine_facts(engine: &EngineHandle, options: &EngineOptions, max_requests: usize) -> EngineFacts {
    let sizing = engine.kv_sizing();
    let prefix = match options.enable_prefix_caching {
        true => Capability::new(
            "prefix_caching",
            true,
            "to the token, exact comparison, apart for each API key and cache_salt",
        ),
        false => Capability::new("prefix_caching", false, "turned off by --no-enable-prefix-caching"),
    };
    let digits = match options.precision {
        Precision::F32 => Capability::new("integer_linear", false, "--dtype float32"),
        Precision::Int16 => Capability::new(
            "integer_linear",
            true,
            "quantised weights, activations of two 8-bit digits (--dtype)",
        ),
        Precision::Int8 => Capability::new("integer_linear", true, "quantised weights, --dtype int8"),
    };
    let chunks = format!("up to {} tokens a step, decodes first", options.max_num_batched_tokens);
    EngineFacts {
        max_model_len: engine.door().max_model_len,
        max_requests,
        conditions: serde_json::Map::new(),
        cache_config: vec![
            ("block_size", sizing.page_size.to_string()),
            ("num_gpu_blocks", sizing.num_pages.to_string()),
            ("cache_dtype", options.kv_cache_dtype.to_string()),
            ("enable_prefix_caching", options.enable_prefix_caching.to_string()),
        ],
        capabilities: vec![
            Capability::new("chunked_prefill", true, chunks),
            prefix,
            digits,
            Capability::new("kv_quantization", false, "keys and values are stored in f32 or bf16"),
            Capability::new("gpu", false, "this version runs on the CPU"),
            Capability::new("context_parallel", false, "this version runs in one process"),
        ],
    }
}

fn report(args: &ServeArgs, spec: &str, options: &EngineOptions, app: &App, address: SocketAddr) {
    let (engine, config) = (&app.engine, &app.model.config);
    let sizing = engine.kv_sizing();
    let capabilities = app.capabilities();
    if args.json {
        let report = serde_json::json!({
            "address": address.to_string(),
            "model": spec,
            "served_model_names": app.options.served_model_names,
            "max_model_len": sizing.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "block_size": sizing.page_size,
            "kv_pages": sizing.num_pages,
            "kv_bytes": sizing.bytes(),
            "kv_cache_dtype": options.kv_cache_dtype.name(),
            "dtype": options.precision.name(),
            "api_keys": !app.options.api_keys.is_open(),
            "report": engine.report(),
            "capabilities": capabilities,
        });
        println!("{report}");
    } else {
        println!("{} ({}), {} layers, from {spec}", config.name, config.architecture, config.layers.len());
        println!("{}", engine.report().replace("; ", "\n  "));
        println!(
            "up to {} requests at once, {} tokens a step",
            options.max_num_seqs, options.max_num_batched_tokens
        );
        for c in &capabilities {
            println!("  {} {:<20} {}", if c.active { "on " } else { "off" }, c.feature, c.reason);
        }
        println!("listening on http://{address}");
    }
    if !address.ip().is_loopback() && app.options.api_keys.is_open() {
        tracing::warn!("other machines can reach this server, and no --api-key was given");
    }
}
