//! Any OpenAI-compatible server over HTTP or HTTPS, one connection a request.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::body::{self, Extras};
use super::delta::{self, Growing};
use super::response::{Body, Head, read_head};
use super::socket::{Socket, Target, tls_config};
use super::sse::{Event, Events};
use super::{Ask, Chunk, Clock, Endpoint, Exchange, Fault, FaultKind, Known, Limits, Protocol, TokensBy};
use crate::EvalError;

/// Longest error text that is read.
const ERROR_BYTES: usize = 64 << 10;

/// How to reach a server.
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// `http(s)://host[:port][/path]`.
    pub url: String,
    /// Served name of the model.
    pub model: String,
    /// Key, sent as a bearer token.
    pub api_key: Option<String>,
    /// Further roots for TLS, PEM.
    pub ca_file: Option<PathBuf>,
    /// Ask for streams (on, unless a server has none).
    pub stream: bool,
    /// Name of the limit's field in chat.
    pub limit_field: String,
    /// Further fields of every body.
    pub extra_body: Map<String, Value>,
}

impl HttpOptions {
    /// The usual.
    pub fn new(url: impl Into<String>, model: impl Into<String>) -> HttpOptions {
        HttpOptions {
            url: url.into(),
            model: model.into(),
            api_key: None,
            ca_file: None,
            stream: true,
            limit_field: "max_tokens".into(),
            extra_body: Map::new(),
        }
    }
}

/// A server.
pub struct HttpEndpoint {
    options: HttpOptions,
    target: Target,
    tls: Option<Arc<rustls::ClientConfig>>,
    /// What it is, once asked.
    kind: std::sync::OnceLock<String>,
}

/// A fault with what had been seen of the exchange by then.
type Step<T> = Result<T, Fault>;

impl HttpEndpoint {
    /// Checks the options; nothing is sent.
    pub fn new(options: HttpOptions) -> Result<HttpEndpoint, EvalError> {
        let target = Target::parse(&options.url)?;
        let bad_key = options.api_key.as_ref().is_some_and(|k| k.bytes().any(|b| !(0x21..0x7f).contains(&b)));
        if bad_key {
            return Err(EvalError::bad("api key", "(not shown)", "printable ASCII without spaces"));
        }
        let tls = if target.tls { Some(tls_config(options.ca_file.as_deref())?) } else { None };
        Ok(HttpEndpoint { options, target, tls, kind: std::sync::OnceLock::new() })
    }

    fn head(&self, method: &str, route: &str, length: usize) -> String {
        let mut head = format!(
            "{method} {}{route} HTTP/1.1\r\nhost: {}\r\nuser-agent: suanpan-eval/{}\r\naccept: text/event-stream, application/json\r\naccept-encoding: identity\r\nconnection: close\r\n",
            self.target.path,
            self.target.authority(),
            env!("CARGO_PKG_VERSION"),
        );
        if method == "POST" {
            head += &format!("content-type: application/json\r\ncontent-length: {length}\r\n");
        }
        if let Some(key) = &self.options.api_key {
            head += &format!("authorization: Bearer {key}\r\n");
        }
        head + "\r\n"
    }

    /// A small JSON document.
    fn get(&self, route: &str) -> Step<(u16, Value)> {
        let limits = Limits {
            total: Duration::from_secs(15),
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(10),
            body_bytes: 4 << 20,
        };
        let deadline = Instant::now() + limits.total;
        let mut socket = Socket::open(&self.target, self.tls.as_ref(), &limits, deadline)?;
        let sent = socket.send(self.head("GET", route, 0).as_bytes());
        let (head, _, mut body) = read_head(&mut socket, &limits).map_err(|fault| match sent {
            Ok(()) => fault,
            Err(e) => Fault::new(FaultKind::Disconnected, format!("sending the request: {e}")),
        })?;
        let text = body.all(limits.body_bytes)?;
        let value = serde_json::from_slice(&text);
        match value {
            Ok(value) => Ok((head.status, value)),
            Err(_) if head.status != 200 => Ok((head.status, Value::Null)),
            Err(e) => Err(not_json(&head, &text, &e.to_string())),
        }
    }

    fn extras(&self) -> Extras {
        let ours = matches!(self.kind.get().map(String::as_str), Some("suanpan" | "vllm"));
        Extras {
            model: self.options.model.clone(),
            stream: self.options.stream,
            continuous_usage: ours,
            ignore_eos: ours,
            limit_field: self.options.limit_field.clone(),
            fields: self.options.extra_body.clone(),
        }
    }

    fn talk(&self, ask: &Ask<'_>, clock: &Clock, seen: &mut Exchange, growing: &mut Growing) -> Step<()> {
        let route = match ask.protocol {
            Protocol::Chat => "/v1/chat/completions",
            Protocol::Completion => "/v1/completions",
        };
        let body = body::build(ask, &self.extras());
        let deadline = Instant::now() + ask.limits.total;
        seen.sent_us = clock.now_us();
        let mut socket = Socket::open(&self.target, self.tls.as_ref(), &ask.limits, deadline)?;
        seen.connected_us = Some(clock.now_us());
        let head = self.head("POST", route, body.len());
        // A server may answer (413, 400) and close before it has read a long body: its answer says more than the broken pipe.
        let sent = socket.send(head.as_bytes()).and_then(|()| socket.send(&body));
        drop(body);
        let (head, at, mut body) = match (read_head(&mut socket, &ask.limits), sent) {
            (Ok(got), _) => got,
            (Err(fault), Ok(())) => return Err(fault),
            (Err(_), Err(e)) if e.kind() == std::io::ErrorKind::TimedOut => {
                return Err(Fault::new(FaultKind::Timeout, "the endpoint did not read the request in time"));
            }
            (Err(_), Err(e)) => {
                return Err(Fault::new(FaultKind::Disconnected, format!("sending the request: {e}")));
            }
        };
        seen.headers_us = Some(clock.us(at));
        seen.status = Some(head.status);
        if head.status != 200 {
            return Err(refusal(&head, &mut body));
        }
        match head.content_type.as_str() {
            "text/event-stream" => stream(&mut body, ask, clock, seen, growing),
            "application/json" => whole(&head, &mut body, ask, clock, seen, growing),
            other => {
                let start = body.all(200).unwrap_or_default();
                let start = String::from_utf8_lossy(&start).into_owned();
                let line = format!("content type {other:?} where JSON or an event stream belongs: {start:?}");
                Err(Fault::new(FaultKind::ContentType, line))
            }
        }
    }
}

/// What is said when a body is no JSON.
fn not_json(head: &Head, text: &[u8], why: &str) -> Fault {
    let start = String::from_utf8_lossy(&text[..text.len().min(120)]).into_owned();
    if head.content_type == "text/html" || start.trim_start().to_ascii_lowercase().starts_with("<!doctype") {
        return Fault::new(FaultKind::ContentType, format!("HTML where JSON belongs: {start:?}"));
    }
    Fault::new(FaultKind::Malformed, format!("not JSON ({why}): {start:?}"))
}

/// A status other than 200 as a fault.
fn refusal(head: &Head, body: &mut Body<'_>) -> Fault {
    let text = body.all(ERROR_BYTES).unwrap_or_default();
    let value: Option<Value> = serde_json::from_slice(&text).ok();
    let said = value.as_ref().and_then(delta::in_band);
    let said = said.or_else(|| value.as_ref().map(|v| v.get("detail").unwrap_or(v).to_string()));
    let said = said.unwrap_or_else(|| String::from_utf8_lossy(&text[..text.len().min(200)]).into_owned());
    let low = said.to_lowercase();
    let long = low.contains("context length")
        || low.contains("context_length")
        || low.contains("maximum context")
        || low.contains("maximum model length");
    let kind = match head.status {
        429 | 503 => FaultKind::Busy,
        400 | 413 | 422 if long => FaultKind::Overflow,
        _ => FaultKind::Status,
    };
    Fault { retry_after_s: head.retry_after_s, ..Fault::new(kind, format!("status {}: {said}", head.status)) }
}

/// Most bytes that an answer of so many tokens can reasonably have: a stream that never ends is cut here.
fn text_limit(ask: &Ask<'_>) -> usize {
    (64 << 10) + ask.max_tokens.saturating_mul(256)
}

fn stream(
    body: &mut Body<'_>,
    ask: &Ask<'_>,
    clock: &Clock,
    seen: &mut Exchange,
    growing: &mut Growing,
) -> Step<()> {
    seen.streamed = true;
    let (mut events, mut raw) = (Events::default(), Vec::new());
    let mut ended = false;
    let mut last_at = clock.now_us();
    while !ended {
        let more = body.next(&mut raw)?;
        if let Some(at) = more {
            last_at = clock.us(at);
            events.push(&mut raw);
            while let Some(event) = events.pop()? {
                ended = take_event(&event, last_at, ask, seen, growing)?;
                if ended {
                    break;
                }
            }
        } else {
            if let Some(event) = events.rest() {
                ended = take_event(&event, last_at, ask, seen, growing)?;
            }
            break;
        }
    }
    if ended || growing.is_finished() {
        return Ok(());
    }
    Err(Fault::new(FaultKind::Disconnected, "the stream ended without a finish reason and without [DONE]"))
}

/// Whether the stream is over.
fn take_event(
    event: &Event,
    at_us: u64,
    ask: &Ask<'_>,
    seen: &mut Exchange,
    growing: &mut Growing,
) -> Step<bool> {
    if event.data.trim() == "[DONE]" {
        return Ok(true);
    }
    let number = seen.chunks.len() + 1;
    let value: Value = serde_json::from_str(&event.data).map_err(|e| {
        let start: String = event.data.chars().take(80).collect();
        Fault::new(FaultKind::Malformed, format!("event {number} is not JSON ({e}): {start:?}"))
    })?;
    if event.name == "error" && delta::in_band(&value).is_none() {
        return Err(Fault::new(FaultKind::InBand, format!("an error event: {value}")));
    }
    let before = growing.tokens_so_far;
    let added = growing.add(&value, ask.protocol)?;
    let said = value.get("usage").is_some_and(|u| !u.is_null());
    let tokens = match (said && value.get("choices").is_some_and(has_choice), growing.tokens_so_far) {
        (true, Some(now)) => Some(now.saturating_sub(before.unwrap_or(0)) as f64),
        _ => None,
    };
    seen.chunks.push(Chunk(at_us, added.carries, added.bytes, tokens));
    if growing.bytes() > text_limit(ask) {
        let line = format!("the answer passed {} bytes with max_tokens {}", text_limit(ask), ask.max_tokens);
        return Err(Fault::new(FaultKind::TooLong, line));
    }
    Ok(false)
}

fn has_choice(choices: &Value) -> bool {
    choices.as_array().is_some_and(|c| !c.is_empty())
}

fn whole(
    head: &Head,
    body: &mut Body<'_>,
    ask: &Ask<'_>,
    clock: &Clock,
    seen: &mut Exchange,
    growing: &mut Growing,
) -> Step<()> {
    let mut text = Vec::new();
    let mut at = clock.now_us();
    while let Some(read) = body.next(&mut text)? {
        at = clock.us(read);
    }
    let value: Value = serde_json::from_slice(&text).map_err(|e| not_json(head, &text, &e.to_string()))?;
    let added = growing.add(&value, ask.protocol)?;
    let tokens = growing.usage.completion_tokens.map(|n| n as f64);
    seen.chunks.push(Chunk(at, added.carries, added.bytes, tokens));
    Ok(())
}

impl Endpoint for HttpEndpoint {
    fn name(&self) -> String {
        self.options.url.clone()
    }

    fn known(&self) -> Result<Known, Fault> {
        let (status, models) = self.get("/v1/models")?;
        if matches!(status, 401 | 403) {
            return Err(Fault::new(FaultKind::Status, format!("status {status}: the key was not accepted")));
        }
        let empty = Vec::new();
        let list = models.get("data").and_then(Value::as_array).unwrap_or(&empty);
        let ours = list.iter().find(|m| m["id"].as_str() == Some(&self.options.model));
        if !list.is_empty() && ours.is_none() {
            let names: Vec<&str> = list.iter().filter_map(|m| m["id"].as_str()).take(8).collect();
            let line =
                format!("the model {:?} is not served; served: {}", self.options.model, names.join(", "));
            return Err(Fault::new(FaultKind::Status, line));
        }
        let mut known = Known { kind: "openai".into(), ..Known::default() };
        if let Some(card) = ours {
            if let Some(owner @ ("suanpan" | "vllm")) = card["owned_by"].as_str() {
                known.kind = owner.to_owned();
            }
            known.max_model_len = card["max_model_len"].as_u64().map(|n| n as usize);
        }
        if known.kind == "suanpan"
            && let Ok((200, Value::Object(conditions))) = self.get("/v1/conditions")
        {
            known.conditions = conditions;
        }
        if let Ok((200, version)) = self.get("/version")
            && let Some(version) = version["version"].as_str()
        {
            let text = format!("{} {version}", known.kind);
            known.conditions.entry("server_version").or_insert(text.into());
        }
        drop(self.kind.set(known.kind.clone()));
        Ok(known)
    }

    fn ask(&self, ask: &Ask<'_>, clock: &Clock) -> Exchange {
        let (mut seen, mut growing) = (Exchange::default(), Growing::default());
        let fault = self.talk(ask, clock, &mut seen, &mut growing).err();
        seen.end_us = clock.now_us();
        seen.fault = fault;
        seen.usage = growing.usage.clone();
        seen.first_logprobs = growing.first_logprobs.take();
        let told = seen.chunks.iter().filter(|c| c.is_output()).all(|c| c.3.is_some());
        seen.tokens_by = if told { TokensBy::Server } else { TokensBy::Chunks };
        seen.answer = growing.into_answer();
        seen
    }
}
