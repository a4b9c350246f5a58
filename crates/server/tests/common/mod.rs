//! A real server on a real socket with `builtin:recall`, and an HTTP client that sends exactly the bytes it is given.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use suanpan_engine::{Engine, EngineHandle, EngineOptions, HandleOptions};
use suanpan_model::{LoadOptions, Model};
use suanpan_server::{App, Ending, EngineFacts, ServerOptions, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Context limit of every test server unless said otherwise.
pub const MAX_MODEL_LEN: usize = 2048;
const PATIENCE: Duration = Duration::from_secs(30);

/// A running server.
pub struct Server {
    pub addr: SocketAddr,
    pub app: App,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<std::io::Result<Ending>>,
}

fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let loaded = suanpan_model::load("builtin:recall", &LoadOptions::default(), &mut |_| ());
        Arc::new(loaded.expect("the built-in model loads"))
    };
    Arc::clone(MODEL.get_or_init(load))
}

/// Engine options small enough for tests.
pub fn engine_options() -> EngineOptions {
    EngineOptions {
        max_model_len: Some(MAX_MODEL_LEN),
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        num_pages_override: Some(512),
        threads: 1,
        ..EngineOptions::default()
    }
}

impl Server {
    pub async fn start() -> Server {
        Server::with(engine_options(), ServerOptions::default()).await
    }

    pub async fn with(engine: EngineOptions, options: ServerOptions) -> Server {
        Server::with_queue(engine, options, 200).await
    }

    pub async fn with_queue(engine: EngineOptions, options: ServerOptions, max_requests: usize) -> Server {
        Server::with_model(model(), engine, options, max_requests).await
    }

    pub async fn with_model(
        model: Arc<Model>,
        engine: EngineOptions,
        options: ServerOptions,
        max_requests: usize,
    ) -> Server {
        let engine = Engine::new(Arc::clone(&model), engine).expect("the engine fits");
        let handle = EngineHandle::spawn(engine, HandleOptions { max_requests }).expect("the engine starts");
        let max_model_len = handle.door().max_model_len;
        let facts = EngineFacts {
            max_model_len,
            max_requests,
            cache_config: vec![],
            capabilities: vec![],
            conditions: serde_json::Map::new(),
        };
        let app = App::new(handle, model, facts, options);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("an address");
        let (stop, stopped) = oneshot::channel();
        let until = async move {
            let _dropped = stopped.await;
        };
        let task = tokio::spawn(serve(listener, app.clone(), until));
        Server { addr, app, stop: Some(stop), task }
    }

    /// Tells the server to stop and waits for its end.
    pub async fn stop(mut self) -> Ending {
        drop(self.stop.take());
        let ended = tokio::time::timeout(PATIENCE, self.task).await.expect("the server ends in time");
        ended.expect("no panic").expect("no I/O error")
    }

    /// Takes the stop signal out, so that a test can stop the server while it does something else.
    pub fn begin_stop(&mut self) {
        drop(self.stop.take());
    }

    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_bytes(path, body.to_string().as_bytes()).await
    }

    pub async fn post_bytes(&self, path: &str, body: &[u8]) -> Reply {
        send(self.addr, &post_bytes(path, "", body)).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        send(self.addr, format!("GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").as_bytes())
            .await
    }

    /// One sample of the metrics page by name and a part of its labels.
    pub async fn metric(&self, name: &str, label: &str) -> f64 {
        let page = self.get("/metrics").await.text();
        let line = page.lines().find(|l| l.starts_with(&format!("{name}{{")) && l.contains(label));
        let value = line.and_then(|l| l.rsplit(' ').next()).and_then(|v| v.parse().ok());
        value.unwrap_or_else(|| panic!("{name} {label} is not on the page:\n{page}"))
    }

    /// Waits until nothing runs and only the prefix cache holds pages; returns how long that took.
    pub async fn idle(&self) -> Duration {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            let running = self.metric("vllm:num_requests_running", "").await;
            let waiting = self.metric("vllm:num_requests_waiting", "").await;
            let active = self.metric("suanpan:kv_pages", r#"state="active""#).await;
            if running + waiting + active == 0.0 {
                return start.elapsed();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("requests or pages are left:\n{}", self.get("/metrics").await.text());
    }
}

/// The bytes of a POST with a JSON body.
pub fn post_bytes(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Sends raw bytes and reads the reply until the server closes.
pub async fn send(addr: SocketAddr, bytes: &[u8]) -> Reply {
    send_within(addr, bytes, PATIENCE).await
}

/// The same with a patience of its own.
pub async fn send_within(addr: SocketAddr, bytes: &[u8], patience: Duration) -> Reply {
    let mut socket = TcpStream::connect(addr).await.expect("the server listens");
    socket.write_all(bytes).await.expect("the request is written");
    let mut raw = Vec::new();
    let read = tokio::time::timeout(patience, socket.read_to_end(&mut raw)).await.expect("a reply in time");
    read.expect("a whole reply");
    Reply::parse(&raw)
}

/// Opens a connection, sends a POST and leaves it open.
pub async fn open(addr: SocketAddr, path: &str, body: &Value) -> TcpStream {
    let mut socket = TcpStream::connect(addr).await.expect("the server listens");
    socket
        .write_all(&post_bytes(path, "", body.to_string().as_bytes()))
        .await
        .expect("the request is written");
    socket
}

/// Reads from `socket` until `needle` has arrived; returns everything read.
pub async fn read_until(socket: &mut TcpStream, needle: &str) -> String {
    let mut raw = Vec::new();
    let mut buffer = [0u8; 4096];
    while !String::from_utf8_lossy(&raw).contains(needle) {
        let read = tokio::time::timeout(PATIENCE, socket.read(&mut buffer)).await.expect("data in time");
        let n = read.expect("data");
        assert!(n > 0, "closed before {needle:?}: {}", String::from_utf8_lossy(&raw));
        raw.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&raw).into_owned()
}

/// One HTTP reply.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Reply {
    fn parse(raw: &[u8]) -> Reply {
        let split = raw.windows(4).position(|w| w == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8_lossy(&raw[..split]).into_owned();
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
        let body = &raw[split + 4..];
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        Reply { status, body: if chunked { unchunk(body) } else { body.to_vec() }, head }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|l| l.split_once(": "));
        lines.into_iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v)
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    /// The body as JSON: strict, so NaN and Infinity fail here.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// Checks that this is an error in OpenAI's shape and returns (param, code).
    pub fn error(&self, status: u16) -> (String, String) {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"));
        let body = self.json();
        let error = body["error"].as_object().expect("an error object");
        for key in ["message", "type", "param", "code"] {
            assert!(error.contains_key(key), "{body}");
        }
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{body}");
        let text = |key: &str| error[key].as_str().unwrap_or("").to_owned();
        (text("param"), text("code"))
    }

    /// The events of a stream: JSON of each `data:` line; the last one must be `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert!(
            self.header("content-type").is_some_and(|v| v.starts_with("text/event-stream")),
            "{}",
            self.head
        );
        let text = self.text();
        assert!(text.ends_with("\n\n"), "{text}");
        let mut data: Vec<&str> = Vec::new();
        for event in text.split_terminator("\n\n") {
            match event.strip_prefix("data: ") {
                Some(d) => data.push(d),
                None => assert!(event.starts_with(':'), "{event}"),
            }
        }
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.into_iter().map(|d| serde_json::from_str(d).expect("strict JSON")).collect()
    }
}

fn unchunk(mut body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(end) = body.windows(2).position(|w| w == b"\r\n") {
        let size =
            std::str::from_utf8(&body[..end]).ok().and_then(|s| usize::from_str_radix(s.trim(), 16).ok());
        let size = size.expect("a chunk size");
        if size == 0 {
            break;
        }
        out.extend_from_slice(&body[end + 2..end + 2 + size]);
        body = &body[end + 2 + size + 2..];
    }
    out
}

/// A text that makes the model emit `continuation` after `key: `, on its own line.
pub fn fact(key: &str, continuation: &str) -> String {
    format!("{key}: {continuation}\n")
}

/// Filler of `bytes` bytes whose last seven bytes never repeat another place's.
pub fn filler(bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 16);
    let mut i = 0u32;
    while text.len() < bytes {
        text.push_str(&format!("<{:05x}>", i.wrapping_mul(40503) % 0xfffff));
        i += 1;
    }
    text.truncate(bytes);
    text
}

/// A greedy text completion.
pub fn completion(prompt: &str, max_tokens: usize) -> Value {
    json!({"model": "suanpan", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}

/// `extra` laid over `base`.
pub fn with(mut base: Value, extra: Value) -> Value {
    for (key, value) in extra.as_object().expect("an object") {
        base[key.as_str()] = value.clone();
    }
    base
}

/// A request that runs for long: end tokens are ordinary.
pub fn long_completion(prompt: &str, max_tokens: usize) -> Value {
    with(completion(prompt, max_tokens), json!({"ignore_eos": true}))
}
