//! Our engine as an endpoint of the evaluation, in this process: eval stays free of engines, and the engine of questions. Also what the
//! engine knows of its conditions, for `serve` and for `eval run` alike.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value, json};
use suanpan_engine::{EngineHandle, EngineOptions, Event, FinishReason, Request, SamplingParams, TimedOut};
use suanpan_eval::count::Counter;
use suanpan_eval::endpoint::{
    Ask, Carries, Chunk, Clock, Endpoint, Exchange, Fault, FaultKind, Known, Protocol, TokensBy, Usage, body,
};
use suanpan_eval::item::{Answer, Finish, Part, Role};
use suanpan_model::Model;

/// Files up to this size are hashed whole; of larger ones, 64 pieces.
const HASHED_WHOLE_BYTES: u64 = 512 << 20;
const PIECES: u64 = 64;
const PIECE_BYTES: u64 = 1 << 20;

/// An engine that answers questions.
pub struct EngineEndpoint {
    pub engine: EngineHandle,
    pub model: Arc<Model>,
    pub name: String,
    pub conditions: Map<String, Value>,
}

/// Counts with the tokenizer of a model.
pub struct ModelCounter {
    pub model: Arc<Model>,
    pub name: String,
}

impl Counter for ModelCounter {
    fn count(&self, text: &str) -> usize {
        // A text that the tokenizer refuses is counted by its bytes: more than any vocabulary makes of it.
        self.model.tokenizer.encode_plain(text).map_or(text.len(), |ids| ids.len())
    }

    fn name(&self) -> String {
        format!("tokenizer of {}", self.name)
    }
}

impl EngineEndpoint {
    fn prompt(&self, ask: &Ask<'_>) -> Result<Vec<u32>, Fault> {
        let bad = |e: String| Fault::new(FaultKind::Engine, e);
        if ask.protocol == Protocol::Completion {
            let text = body::raw_text(ask.prompt);
            return self.model.tokenizer.encode_with_specials(&text, true).map_err(|e| bad(e.to_string()));
        }
        let Some(template) = &self.model.chat_template else {
            return Err(bad("the model has no chat template: use --protocol completion".into()));
        };
        if !ask.prompt.tools.is_empty() {
            return Err(bad("this engine has no parser for tool calls".into()));
        }
        let mut messages = Vec::new();
        for turn in &ask.prompt.turns {
            let role = match turn.role {
                Role::System => "system",
                Role::User => "user",
                Role::Assistant => "assistant",
                Role::Tool => "tool",
            };
            let mut content = String::new();
            for part in &turn.parts {
                match part {
                    Part::Text { text } => content.push_str(text),
                    Part::Image { .. } => return Err(bad("this engine reads text only".into())),
                }
            }
            messages.push(json!({"role": role, "content": content}));
        }
        template
            .encode(&self.model.tokenizer, &Value::Array(messages), true, None, &Map::new())
            .map_err(|e| bad(e.to_string()))
    }

    fn talk(&self, ask: &Ask<'_>, clock: &Clock, seen: &mut Exchange) -> Result<(), Fault> {
        let prompt = self.prompt(ask)?;
        let limit = self.engine.door().max_model_len;
        if prompt.len() + ask.max_tokens > limit {
            let line = format!(
                "{} prompt and {} answer tokens in a context of {limit}",
                prompt.len(),
                ask.max_tokens
            );
            return Err(Fault::new(FaultKind::Overflow, line));
        }
        let params = SamplingParams {
            stop: ask.stop.to_vec(),
            ignore_eos: ask.ignore_eos,
            logprobs: ask.logprobs.then_some(5),
            ..SamplingParams::greedy(ask.max_tokens)
        };
        let request = Request { id: "eval".into(), prompt, params, ..Request::default() };
        seen.sent_us = clock.now_us();
        let fault = |e: String| Fault::new(FaultKind::Engine, e);
        let mut stream = self.engine.submit(request).map_err(|e| fault(e.to_string()))?;
        let deadline = Instant::now() + ask.limits.total;
        loop {
            let event = stream.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            let at = clock.now_us();
            match event {
                Err(TimedOut) => {
                    let line = format!("not complete within {:?} (the limit of a request)", ask.limits.total);
                    return Err(Fault::new(FaultKind::Timeout, line));
                }
                Ok(None) => return Err(fault("the engine stopped".into())),
                Ok(Some(Event::Token { tokens, text, logprobs, .. })) => {
                    if seen.first_logprobs.is_none() && ask.logprobs {
                        let top = logprobs.first().map(|p| &p.top);
                        seen.first_logprobs =
                            top.map(|top| top.iter().map(|t| json!([t.id, t.logprob])).collect());
                    }
                    // Text may lag behind its tokens; the token is what was made at this moment.
                    let kind = if tokens.is_empty() { Carries::Nothing } else { Carries::Answer };
                    seen.chunks.push(Chunk(at, kind, text.len() as u32, Some(tokens.len() as f64)));
                    seen.answer.text.push_str(&text);
                }
                Ok(Some(Event::Finished { reason, books, .. })) => {
                    seen.answer.finish = match reason {
                        FinishReason::Stop => Finish::Stop,
                        FinishReason::Length => Finish::Length,
                        FinishReason::Abort => Finish::Other,
                    };
                    seen.usage = Usage {
                        prompt_tokens: Some(books.prompt_tokens as u64),
                        completion_tokens: Some(books.output_tokens as u64),
                        cached_tokens: Some(books.cached_tokens as u64),
                        reasoning_tokens: None,
                        ledger: serde_json::to_value(books).ok(),
                    };
                    return Ok(());
                }
                Ok(Some(Event::Failed { error, .. })) => return Err(fault(error.to_string())),
                Ok(Some(Event::Prefill { .. } | Event::PromptLogprobs { .. })) => {}
            }
        }
    }
}

impl Endpoint for EngineEndpoint {
    fn name(&self) -> String {
        format!("{} in this process", self.name)
    }

    fn known(&self) -> Result<Known, Fault> {
        Ok(Known {
            kind: "suanpan".into(),
            max_model_len: Some(self.engine.door().max_model_len),
            conditions: self.conditions.clone(),
        })
    }

    fn ask(&self, ask: &Ask<'_>, clock: &Clock) -> Exchange {
        let mut seen = Exchange {
            sent_us: clock.now_us(),
            streamed: true,
            tokens_by: TokensBy::Server,
            answer: Answer::default(),
            ..Exchange::default()
        };
        seen.fault = self.talk(ask, clock, &mut seen).err();
        seen.end_us = clock.now_us();
        seen
    }
}

/// The files of a model's weights, tokenizer and config, where `spec` is a path.
fn files(spec: &str) -> Vec<PathBuf> {
    let path = Path::new(spec);
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let Ok(entries) = std::fs::read_dir(path) else { return Vec::new() };
    let belongs = |p: &PathBuf| {
        let kind = p.extension().and_then(|e| e.to_str()).unwrap_or("");
        matches!(kind, "gguf" | "safetensors" | "json" | "model" | "jinja")
    };
    let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(belongs).collect();
    files.sort();
    files
}

/// BLAKE3 of a model's files; of pieces of very large ones, and it says so. Nothing where `spec` names no path.
fn model_hash(spec: &str) -> std::io::Result<Option<String>> {
    use std::io::{Read, Seek, SeekFrom};
    if let Some(name) = spec.strip_prefix("builtin:") {
        return Ok(Some(format!("builtin:{name} of suanpan {}", env!("CARGO_PKG_VERSION"))));
    }
    let files = files(spec);
    if files.is_empty() {
        return Ok(None);
    }
    let (mut hasher, mut sampled) = (blake3::Hasher::new(), false);
    let mut buffer = vec![0; PIECE_BYTES as usize];
    for path in &files {
        let mut file = std::fs::File::open(path)?;
        let bytes = file.metadata()?.len();
        hasher.update(path.file_name().map_or(&[][..], |n| n.as_encoded_bytes()));
        hasher.update(&bytes.to_le_bytes());
        let whole = bytes <= HASHED_WHOLE_BYTES;
        sampled |= !whole;
        let pieces = if whole { bytes.div_ceil(PIECE_BYTES) } else { PIECES };
        for i in 0..pieces {
            let at = if whole { i * PIECE_BYTES } else { (bytes - PIECE_BYTES) / (PIECES - 1) * i };
            file.seek(SeekFrom::Start(at))?;
            let n = PIECE_BYTES.min(bytes - at) as usize;
            file.read_exact(&mut buffer[..n])?;
            hasher.update(&buffer[..n]);
        }
    }
    let kind = if sampled { "blake3 of 64 pieces a file" } else { "blake3" };
    Ok(Some(format!("{kind} {}", &hasher.finalize().to_hex()[..32])))
}

/// The processor, as the system names it.
fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or(std::env::consts::ARCH.to_owned(), |(_, n)| n.trim().to_owned())
}

fn mask(model: &Model) -> String {
    let layers = &model.config.layers;
    let windows: Vec<usize> = layers.iter().filter_map(|l| l.window).collect();
    match windows.iter().max() {
        None => "causal".into(),
        Some(w) => format!("causal, window {w} in {} of {} layers", windows.len(), layers.len()),
    }
}

/// The command line without its keys.
fn flags(args: impl Iterator<Item = String>) -> Vec<String> {
    let mut hide = false;
    let mut one = |arg: String| {
        let hidden = std::mem::replace(&mut hide, arg == "--api-key");
        if hidden || arg.starts_with("--api-key=") { "(hidden)".to_owned() } else { arg }
    };
    args.map(&mut one).collect()
}

/// What the engine knows of the conditions of a measurement, by the names of `suanpan_eval::conditions`.
pub fn conditions(
    spec: &str,
    model: &Model,
    engine: &EngineHandle,
    options: &EngineOptions,
) -> Map<String, Value> {
    let heads = model.config.heads;
    let formats =
        suanpan_model::inspect::inspect(model, engine.door().max_model_len, options.kv_cache_dtype).formats;
    let weights: Vec<String> = formats.iter().map(|f| format!("{} ({})", f.format, f.tensors)).collect();
    let threads = match options.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let driver = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let flags = flags(std::env::args().skip(1));
    let hash = model_hash(spec).ok().flatten();
    let all = json!({
        "device": cpu(),
        "device_count": format!("{threads} threads"),
        "driver": format!("none (CPU), {} {}", std::env::consts::OS, driver.trim()),
        "clocks": "not controlled",
        "weights_dtype": weights.join(", "),
        "activation_dtype": options.precision.name(),
        "kv_dtype": options.kv_cache_dtype.name(),
        "num_q_heads": heads.num_q_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim_qk,
        "mask": mask(model),
        "dropout": "none",
        "batch": format!("{} requests, {} tokens a step", options.max_num_seqs, options.max_num_batched_tokens),
        "backend": "suanpan on the CPU",
        "kernel": engine.report(),
        "parallelism": format!("one process, {threads} threads"),
        "page_size": engine.kv_sizing().page_size,
        "chunked_prefill_tokens": options.max_num_batched_tokens,
        "speculative": "none",
        "max_context": engine.door().max_model_len,
        "model": model.config.name,
        "model_hash": hash,
        "server_version": format!("suanpan {}", env!("CARGO_PKG_VERSION")),
        "server_flags": flags.join(" "),
    });
    match all {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
