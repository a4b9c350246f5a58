//! The answer's head and body off a socket: HTTP/1.1 with a length, in chunks, or to the end. Bounded, and each piece with its time.
//!
//! Written here over `httparse` and not with a client library: those read ahead of their caller, and a piece would carry the time of a
//! later read.

use std::time::Instant;

use super::socket::Socket;
use super::{Fault, FaultKind, Limits};

/// Longest head.
const HEAD_BYTES: usize = 64 << 10;
/// Most headers.
const HEADERS: usize = 128;
/// Longest line of a chunk's size, extensions included.
const SIZE_LINE_BYTES: usize = 1024;

/// Status and the headers that matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Status.
    pub status: u16,
    /// `content-type`, in lower case, without parameters.
    pub content_type: String,
    /// `retry-after`, where it is a number of seconds.
    pub retry_after_s: Option<u64>,
    length: Option<u64>,
    chunked: bool,
}

/// What is left of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Bytes(u64),
    /// Before the line with a chunk's size.
    ChunkSize,
    Chunk(u64),
    /// The line break after a chunk.
    ChunkEnd,
    Trailer,
    ToClose,
    Done,
}

/// A body being read.
pub struct Body<'a> {
    socket: &'a mut Socket,
    limits: &'a Limits,
    raw: Vec<u8>,
    left: Left,
    seen_bytes: usize,
}

fn malformed(line: impl Into<String>) -> Fault {
    Fault::new(FaultKind::Malformed, line)
}

fn io_fault(e: &std::io::Error, socket: &Socket, limits: &Limits, what: &str) -> Fault {
    if e.kind() == std::io::ErrorKind::TimedOut {
        Fault::new(FaultKind::Timeout, format!("{what}: {}", socket.waited_for(limits)))
    } else {
        Fault::new(FaultKind::Disconnected, format!("{what}: {e}"))
    }
}

fn parse_head(raw: &[u8]) -> Result<Option<(Head, usize)>, Fault> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let used = match response.parse(raw) {
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(e) => {
            let start = String::from_utf8_lossy(&raw[..raw.len().min(60)]).into_owned();
            return Err(malformed(format!("the answer is not HTTP ({e}): {start:?}")));
        }
    };
    let mut head = Head { status: response.code.unwrap_or(0), ..Head::default() };
    for header in response.headers.iter() {
        let value = String::from_utf8_lossy(header.value).trim().to_lowercase();
        match header.name.to_ascii_lowercase().as_str() {
            "content-type" => head.content_type = value.split(';').next().unwrap_or("").trim().to_owned(),
            "content-length" => {
                let length = value.parse().map_err(|_| malformed(format!("content-length {value:?}")))?;
                head.length = Some(length);
            }
            "transfer-encoding" => head.chunked = value.split(',').any(|v| v.trim() == "chunked"),
            "retry-after" => head.retry_after_s = value.parse().ok(),
            "content-encoding" if value != "identity" => {
                return Err(malformed(format!("content-encoding {value:?} was not asked for")));
            }
            _ => {}
        }
    }
    Ok(Some((head, used)))
}

/// Reads the head. Returns it with its time and the body behind it.
pub fn read_head<'a>(socket: &'a mut Socket, limits: &'a Limits) -> Result<(Head, Instant, Body<'a>), Fault> {
    let mut raw = Vec::new();
    loop {
        match socket.fill(&mut raw) {
            Ok(0) if raw.is_empty() => {
                return Err(Fault::new(FaultKind::Disconnected, "closed before an answer began"));
            }
            Ok(0) => return Err(Fault::new(FaultKind::Disconnected, "closed inside the answer's head")),
            Ok(_) => {}
            Err(e) => return Err(io_fault(&e, socket, limits, "waiting for the answer's head")),
        }
        if let Some((head, used)) = parse_head(&raw)? {
            if (100..200).contains(&head.status) {
                raw.drain(..used);
                continue;
            }
            raw.drain(..used);
            let left = match (head.chunked, head.length) {
                (true, _) => Left::ChunkSize,
                (false, Some(0)) => Left::Done,
                (false, Some(n)) => Left::Bytes(n),
                (false, None) => Left::ToClose,
            };
            let at = socket.last_read();
            return Ok((head, at, Body { socket, limits, raw, left, seen_bytes: 0 }));
        }
        if raw.len() > HEAD_BYTES {
            return Err(Fault::new(FaultKind::TooLong, format!("a head of more than {HEAD_BYTES} bytes")));
        }
    }
}

impl Body<'_> {
    /// Appends the next piece to `out` and returns the time of the read that brought it; `None` after the last.
    pub fn next(&mut self, out: &mut Vec<u8>) -> Result<Option<Instant>, Fault> {
        loop {
            let before = out.len();
            self.decode(out)?;
            let gained = out.len() - before;
            self.seen_bytes += gained;
            if self.seen_bytes > self.limits.body_bytes {
                let limit = self.limits.body_bytes;
                return Err(Fault::new(FaultKind::TooLong, format!("an answer of more than {limit} bytes")));
            }
            if gained > 0 {
                return Ok(Some(self.socket.last_read()));
            }
            if self.left == Left::Done {
                return Ok(None);
            }
            match self.socket.fill(&mut self.raw) {
                Ok(0) if self.left == Left::ToClose => self.left = Left::Done,
                Ok(0) => {
                    return Err(Fault::new(FaultKind::Disconnected, "closed before the answer was complete"));
                }
                Ok(_) => {}
                // TLS servers that skip the closing alert end a body of unknown length this way.
                Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof && self.left == Left::ToClose => {
                    self.left = Left::Done;
                }
                Err(e) => return Err(io_fault(&e, self.socket, self.limits, "reading the answer")),
            }
        }
    }

    /// Everything, up to `most` bytes; what comes after is not read.
    pub fn all(&mut self, most: usize) -> Result<Vec<u8>, Fault> {
        let mut out = Vec::new();
        while out.len() < most && self.next(&mut out)?.is_some() {}
        out.truncate(most);
        Ok(out)
    }

    fn take(&mut self, n: u64, out: &mut Vec<u8>) -> u64 {
        let n = n.min(self.raw.len() as u64) as usize;
        out.extend(self.raw.drain(..n));
        n as u64
    }

    fn line(&mut self) -> Result<Option<Vec<u8>>, Fault> {
        match self.raw.iter().position(|&b| b == b'\n') {
            Some(end) => Ok(Some(self.raw.drain(..=end).collect())),
            None if self.raw.len() > SIZE_LINE_BYTES => Err(malformed("a chunk without a size")),
            None => Ok(None),
        }
    }

    /// Moves what stands in `raw` as far as it goes.
    fn decode(&mut self, out: &mut Vec<u8>) -> Result<(), Fault> {
        loop {
            self.left = match self.left {
                Left::Done => return Ok(()),
                Left::ToClose => {
                    out.append(&mut self.raw);
                    return Ok(());
                }
                Left::Bytes(n) => match n - self.take(n, out) {
                    0 => Left::Done,
                    n => {
                        self.left = Left::Bytes(n);
                        return Ok(());
                    }
                },
                Left::Chunk(n) => match n - self.take(n, out) {
                    0 => Left::ChunkEnd,
                    n => {
                        self.left = Left::Chunk(n);
                        return Ok(());
                    }
                },
                Left::ChunkEnd | Left::ChunkSize | Left::Trailer => {
                    let Some(line) = self.line()? else { return Ok(()) };
                    let text = String::from_utf8_lossy(&line);
                    let text = text.trim();
                    match self.left {
                        Left::ChunkEnd if text.is_empty() => Left::ChunkSize,
                        Left::ChunkEnd => return Err(malformed("a chunk longer than its size")),
                        Left::Trailer if text.is_empty() => Left::Done,
                        Left::Trailer => Left::Trailer,
                        _ => {
                            let size = text.split(';').next().unwrap_or("").trim();
                            match u64::from_str_radix(size, 16) {
                                Ok(0) => Left::Trailer,
                                Ok(n) => Left::Chunk(n),
                                Err(_) => return Err(malformed(format!("a chunk of size {size:?}"))),
                            }
                        }
                    }
                }
            };
        }
    }
}
