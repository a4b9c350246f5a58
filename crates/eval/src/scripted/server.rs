//! A small HTTP server that follows a script, byte by byte if need be. A thread a connection: its waits are as exact as the system's.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Name of the model that scripts serve.
pub const MODEL: &str = "scripted";
/// Longest request that is read: prompts of a million tokens fit.
const REQUEST_BYTES: usize = 64 << 20;
/// Below this a sleep may overshoot.
const SPIN: Duration = Duration::from_micros(300);

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Asked {
    /// `/v1/chat/completions`, without what stands in front of `/v1`.
    pub route: String,
    /// Body.
    pub body: Value,
    /// Requests before this one.
    pub number: usize,
    /// When it was read whole.
    pub at: Instant,
}

impl Asked {
    /// Whether it is a chat.
    pub fn is_chat(&self) -> bool {
        self.route.ends_with("/chat/completions")
    }
}

/// What the server does next.
#[derive(Clone, Debug)]
pub enum Step {
    /// Waits from the moment the request was read, in all.
    Until(Duration),
    /// Sends bytes.
    Send(Vec<u8>),
    /// Sends the same bytes again and again, with a wait before each.
    Repeat(Vec<u8>, Duration),
    /// Waits without end: until the client goes or the server stops.
    Hang,
}

/// What answers requests.
pub trait Script: Send + Sync {
    /// What is done about a request; the connection closes after the last step.
    fn steps(&self, asked: &Asked) -> Vec<Step>;

    /// What `/v1/models` says of the context.
    fn max_model_len(&self) -> Option<usize> {
        None
    }

    /// Reads no request at all.
    fn is_deaf(&self) -> bool {
        false
    }
}

impl<F: Fn(&Asked) -> Vec<Step> + Send + Sync> Script for F {
    fn steps(&self, asked: &Asked) -> Vec<Step> {
        self(asked)
    }
}

/// A running server; dropping it stops it.
pub struct Server {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Serves `script` on a free port of the loopback.
    pub fn start(script: Arc<dyn Script>) -> std::io::Result<Server> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let numbers = Arc::new(AtomicUsize::new(0));
        let accept = move || {
            for stream in listener.incoming() {
                if told.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (script, stop, numbers) = (Arc::clone(&script), Arc::clone(&told), Arc::clone(&numbers));
                // A client that goes away ends its connection's thread with an error that nobody needs.
                std::thread::spawn(move || drop(serve(stream, script.as_ref(), &stop, &numbers)));
            }
        };
        let thread = std::thread::Builder::new().name("scripted".into()).spawn(accept)?;
        Ok(Server { address, stop, thread: Some(thread) })
    }

    /// `http://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the accepting thread.
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn read_request(stream: &mut TcpStream) -> std::io::Result<(String, String, Vec<u8>)> {
    let bad = |why: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, why.to_owned());
    let (mut raw, mut piece) = (Vec::new(), vec![0; 256 << 10]);
    loop {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut request = httparse::Request::new(&mut headers);
        if let Ok(httparse::Status::Complete(used)) = request.parse(&raw) {
            let length = request.headers.iter().find(|h| h.name.eq_ignore_ascii_case("content-length"));
            let length = length.and_then(|h| std::str::from_utf8(h.value).ok()?.trim().parse().ok());
            let length: usize = length.unwrap_or(0);
            if length > REQUEST_BYTES {
                return Err(bad("too long"));
            }
            let (method, path) =
                (request.method.unwrap_or("").to_owned(), request.path.unwrap_or("").to_owned());
            let mut body = raw.split_off(used);
            while body.len() < length {
                let n = stream.read(&mut piece)?;
                if n == 0 {
                    return Err(bad("cut"));
                }
                body.extend_from_slice(&piece[..n]);
            }
            return Ok((method, path, body));
        }
        let n = stream.read(&mut piece)?;
        if n == 0 || raw.len() > 1 << 20 {
            return Err(bad("no request"));
        }
        raw.extend_from_slice(&piece[..n]);
    }
}

fn serve(
    mut stream: TcpStream,
    script: &dyn Script,
    stop: &AtomicBool,
    numbers: &AtomicUsize,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    if script.is_deaf() {
        hang(stop);
        return Ok(());
    }
    let (method, path, body) = read_request(&mut stream)?;
    let at = Instant::now();
    let route = path.find("/v1").map_or(path.as_str(), |i| &path[i..]).to_owned();
    if method == "GET" {
        return stream.write_all(&get(&route, script));
    }
    let asked = Asked {
        route,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        number: numbers.fetch_add(1, Ordering::Relaxed),
        at,
    };
    drop(body);
    for step in script.steps(&asked) {
        match step {
            Step::Until(time) => wait_until(at + time),
            Step::Send(bytes) => stream.write_all(&bytes)?,
            Step::Repeat(bytes, gap) => {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(gap);
                    stream.write_all(&bytes)?;
                }
            }
            Step::Hang => hang(stop),
        }
    }
    Ok(())
}

fn hang(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sleeps, the last part without sleeping.
pub fn wait_until(at: Instant) {
    let left = at.saturating_duration_since(Instant::now());
    if left > SPIN {
        std::thread::sleep(left - SPIN);
    }
    while Instant::now() < at {
        std::hint::spin_loop();
    }
}

fn get(route: &str, script: &dyn Script) -> Vec<u8> {
    if route != "/v1/models" {
        return json_reply(404, &json!({"error": {"message": "no such route"}}));
    }
    let mut card = json!({"id": MODEL, "object": "model", "owned_by": "script"});
    if let Some(n) = script.max_model_len() {
        card["max_model_len"] = n.into();
    }
    json_reply(200, &json!({"object": "list", "data": [card]}))
}

/// A whole reply.
pub fn reply(status: u16, content_type: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status} -\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// A whole reply in JSON.
pub fn json_reply(status: u16, body: &Value) -> Vec<u8> {
    reply(status, "application/json", "", body.to_string().as_bytes())
}

/// The head of an event stream that ends when the connection does.
pub fn stream_head() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n".to_vec()
}

/// One event.
pub fn event(value: &Value) -> Vec<u8> {
    format!("data: {value}\n\n").into_bytes()
}

/// The end of a stream.
pub fn done() -> Vec<u8> {
    b"data: [DONE]\n\n".to_vec()
}

/// A chunk of either route that adds `text`.
pub fn text_chunk(chat: bool, text: &str) -> Value {
    if chat {
        json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]})
    } else {
        json!({"choices": [{"index": 0, "text": text, "finish_reason": null}]})
    }
}

/// The chunk that ends an answer, and the one with its usage.
pub fn ends(chat: bool, reason: &str, prompt_tokens: u64, completion_tokens: u64) -> [Value; 2] {
    let choice = if chat {
        json!({"index": 0, "delta": {}, "finish_reason": reason})
    } else {
        json!({"index": 0, "text": "", "finish_reason": reason})
    };
    let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens});
    [json!({"choices": [choice]}), json!({"choices": [], "usage": usage})]
}
