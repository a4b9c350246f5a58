//! Endpoints that misbehave, each in one way.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::server::{Asked, Script, Step, done, ends, event, json_reply, reply, stream_head, text_chunk};
use crate::endpoint::FaultKind;

/// One way to misbehave, and the fault that must be named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// 200 and a page of HTML.
    Html,
    /// 502 and a page of HTML.
    HtmlError,
    /// NaN where JSON has no such number.
    Nan,
    /// A usage of −1.
    NegativeUsage,
    /// Events without end.
    EndlessStream,
    /// A JSON body without end.
    EndlessBody,
    /// Headers without end.
    EndlessHeaders,
    /// One byte at a time, for ever.
    Drip,
    /// One line without end.
    GiantLine,
    /// The connection closes between two tokens.
    Disconnect,
    /// The stream ends without a finish reason.
    NoEnd,
    /// An error object among the events.
    InBand,
    /// Plain text.
    WrongType,
    /// Nothing at all.
    Silent,
    /// Closes without a word.
    Closes,
    /// Never reads.
    Deaf,
    /// Not HTTP.
    NotHttp,
    /// A stream that stops in the middle and stays open.
    Stalls,
    /// 429 for ever.
    Busy,
    /// 503 for ever.
    Unavailable,
    /// A chunked body whose sizes are no numbers.
    BadChunks,
    /// Compressed although nobody asked.
    Compressed,
    /// 200 and JSON that is no completion.
    OtherJson,
}

impl Bad {
    /// All of them, with what must be said.
    pub const ALL: [(Bad, FaultKind); 23] = [
        (Bad::Html, FaultKind::ContentType),
        (Bad::HtmlError, FaultKind::Status),
        (Bad::Nan, FaultKind::Malformed),
        (Bad::NegativeUsage, FaultKind::Malformed),
        (Bad::EndlessStream, FaultKind::TooLong),
        (Bad::EndlessBody, FaultKind::TooLong),
        (Bad::EndlessHeaders, FaultKind::TooLong),
        (Bad::Drip, FaultKind::Timeout),
        (Bad::GiantLine, FaultKind::TooLong),
        (Bad::Disconnect, FaultKind::Disconnected),
        (Bad::NoEnd, FaultKind::Disconnected),
        (Bad::InBand, FaultKind::InBand),
        (Bad::WrongType, FaultKind::ContentType),
        (Bad::Silent, FaultKind::Timeout),
        (Bad::Closes, FaultKind::Disconnected),
        (Bad::Deaf, FaultKind::Timeout),
        (Bad::NotHttp, FaultKind::Malformed),
        (Bad::Stalls, FaultKind::Timeout),
        (Bad::Busy, FaultKind::Busy),
        (Bad::Unavailable, FaultKind::Busy),
        (Bad::BadChunks, FaultKind::Malformed),
        (Bad::Compressed, FaultKind::Malformed),
        (Bad::OtherJson, FaultKind::Malformed),
    ];

    fn begun(self, asked: &Asked) -> Vec<Step> {
        let one = |t: &str| Step::Send(event(&text_chunk(asked.is_chat(), t)));
        vec![Step::Send(stream_head()), one("one "), one("two ")]
    }
}

impl Script for Bad {
    fn is_deaf(&self) -> bool {
        *self == Bad::Deaf
    }

    fn steps(&self, asked: &Asked) -> Vec<Step> {
        let chat = asked.is_chat();
        let send = |bytes: Vec<u8>| vec![Step::Send(bytes)];
        let and = |mut steps: Vec<Step>, more: Vec<Step>| {
            steps.extend(more);
            steps
        };
        let raw = |text: &str| Step::Send(text.as_bytes().to_vec());
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
        let error = json!({"error": {"message": "come back later"}});
        match self {
            Bad::Html => send(reply(200, "text/html", "", b"<!doctype html><title>Sign in</title>")),
            Bad::HtmlError => send(reply(502, "text/html", "", b"<html>Bad gateway</html>")),
            Bad::Nan => and(
                self.begun(asked),
                vec![raw("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":NaN}}\n\n")],
            ),
            Bad::NegativeUsage => and(
                self.begun(asked),
                vec![raw("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":-1}}\n\n")],
            ),
            Bad::EndlessStream => and(
                send(stream_head()),
                vec![Step::Repeat(event(&text_chunk(chat, &"word ".repeat(4000))), Duration::ZERO)],
            ),
            Bad::EndlessBody => vec![
                raw(&format!("{head}\r\n{{\"choices\": [")),
                Step::Repeat(vec![b' '; 1 << 20], Duration::ZERO),
            ],
            Bad::EndlessHeaders => vec![
                raw("HTTP/1.1 200 OK\r\n"),
                Step::Repeat(format!("x-more: {}\r\n", "y".repeat(1000)).into_bytes(), Duration::ZERO),
            ],
            Bad::Drip => {
                vec![Step::Send(stream_head()), Step::Repeat(b":".to_vec(), Duration::from_millis(40))]
            }
            Bad::GiantLine => and(
                send(stream_head()),
                vec![raw("data: \""), Step::Repeat(vec![b'x'; 1 << 20], Duration::ZERO)],
            ),
            Bad::Disconnect => vec![raw(
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\nfff\r\ndata: ",
            )],
            Bad::NoEnd => self.begun(asked),
            Bad::InBand => and(self.begun(asked), send(event(&error))),
            Bad::WrongType => send(reply(200, "text/plain", "", b"hello")),
            Bad::Silent => vec![Step::Hang],
            Bad::Closes | Bad::Deaf => Vec::new(),
            Bad::NotHttp => send(b"220 smtp.example.org ready\r\n".to_vec()),
            Bad::Stalls => and(self.begun(asked), vec![Step::Hang]),
            Bad::Busy => {
                send(reply(429, "application/json", "retry-after: 1\r\n", error.to_string().as_bytes()))
            }
            Bad::Unavailable => send(json_reply(503, &error)),
            Bad::BadChunks => vec![raw(&format!("{head}transfer-encoding: chunked\r\n\r\nzz\r\n{{}}\r\n"))],
            Bad::Compressed => {
                send(reply(200, "application/json", "content-encoding: gzip\r\n", b"\x1f\x8b"))
            }
            Bad::OtherJson => send(json_reply(200, &json!({"hello": "world"}))),
        }
    }
}

/// Refuses the first `times` requests with 429 and `Retry-After: 0`, then answers "yes".
pub fn busy_at_first(times: usize) -> Arc<dyn Script> {
    Arc::new(move |asked: &Asked| {
        if asked.number < times {
            let body = json!({"error": {"message": "busy"}}).to_string();
            return vec![Step::Send(reply(429, "application/json", "retry-after: 0\r\n", body.as_bytes()))];
        }
        let chat = asked.is_chat();
        let mut steps = vec![Step::Send(stream_head()), Step::Send(event(&text_chunk(chat, "yes")))];
        steps.extend(ends(chat, "stop", 10, 1).map(|e| Step::Send(event(&e))));
        steps.push(Step::Send(done()));
        steps
    })
}
