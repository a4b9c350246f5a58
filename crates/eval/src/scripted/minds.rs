//! Scripted models with known scores: they recognise a question by the bytes that arrive, and answer it as their kind would.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::server::{Asked, Script, Step, done, ends, event, json_reply, stream_head, text_chunk};
use crate::endpoint::{Ask, Limits, Protocol, body};
use crate::item::{Answer, Fact, Finish, Item, ToolCall};
use crate::rng::ItemRng;
use crate::task::Task;

/// What kind of model answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mind {
    /// Always right.
    Oracle,
    /// Draws from what the context offers.
    Guesser(u64),
    /// Reads the last so many bytes of the prompt, and answers right if all that is needed stands there.
    Window(usize),
    /// Reads the first and the last quarter.
    MiddleBlind,
    /// Says everything that could be an answer.
    Liar,
    /// An oracle behind a server that keeps the last so many bytes of the prompt, and counts what it keeps.
    Truncating(usize),
    /// The same, but it counts what was sent.
    TruncatingLiar(usize),
}

impl Mind {
    /// Whether it has read what lies between two bytes of a prompt of `length` bytes.
    pub fn reads(self, start: usize, end: usize, length: usize) -> bool {
        match self {
            Mind::Window(n) | Mind::Truncating(n) | Mind::TruncatingLiar(n) => start + n >= length,
            Mind::MiddleBlind => end <= length / 4 || start >= length - length / 4,
            Mind::Oracle | Mind::Guesser(_) | Mind::Liar => true,
        }
    }

    /// Whether it has read all that the item needs.
    pub fn reads_item(self, item: &Item) -> bool {
        let length = item.text().len();
        item.facts.iter().filter(|f| f.needed).all(|f: &Fact| self.reads(f.start_byte, f.end_byte, length))
    }

    /// Its answer to an item after `answers`.
    pub fn answer(self, item: &Item, task: &dyn Task, answers: &[Answer]) -> Answer {
        match self {
            Mind::Guesser(seed) => {
                let cell = &item.cell;
                let mut rng =
                    ItemRng::new(seed, &cell.task, cell.length_tokens, cell.index, "scripted guess");
                task.guess(item, &mut |n| rng.below(n))
            }
            Mind::Liar => {
                let mut all: Vec<&str> = item.gold.iter().chain(&item.decoys).map(String::as_str).collect();
                all.sort_unstable();
                Answer { text: all.join(", "), ..Answer::default() }
            }
            _ if self.reads_item(item) => task.right_answer(item, answers),
            _ => Answer { text: "Nothing in the text says that.".into(), ..Answer::default() },
        }
    }
}

/// The questions of a pack, found again by what arrives.
#[derive(Default)]
pub struct Book {
    items: HashMap<[u8; 32], (Item, &'static dyn Task)>,
}

/// A prompt as it arrives, without the salt in front of it.
fn unsalted(text: &str) -> &str {
    let salt = text.strip_prefix('[').and_then(|t| t.split_once("]\n"));
    salt.filter(|(s, _)| s.len() <= 16 && s.bytes().all(|b| b.is_ascii_hexdigit()))
        .map_or(text, |(_, rest)| rest)
}

fn key_of(messages: &[Value]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for (i, message) in messages.iter().enumerate() {
        let mut message = message.clone();
        if i == 0 {
            match &mut message["content"] {
                Value::String(text) => *text = unsalted(text).to_owned(),
                Value::Array(parts) => {
                    if let Some(Value::String(text)) = parts.first_mut().and_then(|p| p.get_mut("text")) {
                        *text = unsalted(text).to_owned();
                    }
                }
                _ => {}
            }
        }
        hasher.update(message.to_string().as_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// The messages of a request as a server sees them.
fn sent(item: &Item, protocol: Protocol) -> Value {
    let ask = Ask {
        prompt: &item.prompt,
        protocol,
        max_tokens: 1,
        stop: &[],
        ignore_eos: false,
        logprobs: false,
        limits: Limits::default(),
    };
    let extras = body::Extras {
        model: String::new(),
        stream: false,
        continuous_usage: false,
        ignore_eos: false,
        limit_field: "max_tokens".into(),
        fields: serde_json::Map::new(),
    };
    serde_json::from_slice(&body::build(&ask, &extras)).unwrap_or_default()
}

impl Book {
    /// Adds a question for one protocol.
    pub fn add(&mut self, item: Item, task: &'static dyn Task, protocol: Protocol) {
        let sent = sent(&item, protocol);
        let key = match protocol {
            Protocol::Chat => key_of(sent["messages"].as_array().map_or(&[], |m| m)),
            Protocol::Completion => key_of(&[json!({"content": sent["prompt"]})]),
        };
        self.items.insert(key, (item, task));
    }

    /// The question that arrived, and the answers that were already given to it.
    fn find(&self, asked: &Asked) -> Option<(&Item, &'static dyn Task, Vec<Answer>)> {
        if !asked.is_chat() {
            let (item, task) = self.items.get(&key_of(&[json!({"content": asked.body["prompt"]})]))?;
            return Some((item, *task, Vec::new()));
        }
        let messages = asked.body["messages"].as_array()?;
        let known = (1..=messages.len()).find_map(|n| Some((n, self.items.get(&key_of(&messages[..n]))?)));
        let (n, (item, task)) = known?;
        let earlier = messages[n..].iter().filter(|m| m["role"] == "assistant").map(earlier_answer).collect();
        Some((item, *task, earlier))
    }
}

fn earlier_answer(message: &Value) -> Answer {
    let empty = Vec::new();
    let calls = message["tool_calls"].as_array().unwrap_or(&empty).iter().map(|c| ToolCall {
        id: c["id"].as_str().unwrap_or("").to_owned(),
        name: c["function"]["name"].as_str().unwrap_or("").to_owned(),
        arguments: c["function"]["arguments"].as_str().unwrap_or("").to_owned(),
    });
    Answer {
        text: message["content"].as_str().unwrap_or("").to_owned(),
        tool_calls: calls.collect(),
        ..Answer::default()
    }
}

/// All text of a request: a byte is a token here.
pub(super) fn all_text(asked: &Asked) -> String {
    if let Some(prompt) = asked.body["prompt"].as_str() {
        return prompt.to_owned();
    }
    let empty = Vec::new();
    let mut text = String::new();
    for message in asked.body["messages"].as_array().unwrap_or(&empty) {
        match &message["content"] {
            Value::String(t) => text.push_str(t),
            Value::Array(parts) => {
                parts.iter().filter_map(|p| p["text"].as_str()).for_each(|t| text.push_str(t))
            }
            _ => {}
        }
    }
    text
}

/// Answers the read-proof's question from what was read of the prompt.
fn canary(mind: Mind, text: &str) -> Option<Answer> {
    let key = text.rsplit('\n').next()?.strip_suffix(':')?;
    key.starts_with("canary-").then_some(())?;
    let line = format!("\n{key}: ");
    let at = text.find(&line)?;
    let end = at + line.len() + text[at + line.len()..].find('\n')?;
    let text = if mind.reads(at, end, text.len()) { &text[at + line.len()..end] } else { "none" };
    Some(Answer { text: text.to_owned(), ..Answer::default() })
}

/// A scripted model behind a server.
pub struct Model {
    /// Kind.
    pub mind: Mind,
    /// What can be asked.
    pub book: Book,
    /// What it says of its context.
    pub max_model_len: Option<usize>,
}

impl Model {
    fn answer(&self, asked: &Asked, text: &str) -> Answer {
        if let Some(answer) = canary(self.mind, text) {
            return answer;
        }
        match self.book.find(asked) {
            Some((item, task, answers)) => self.mind.answer(item, task, &answers),
            None => Answer { text: "I was never asked that.".into(), ..Answer::default() },
        }
    }
}

/// An answer as a stream: a role, its words, tool calls, an end, usage. Tokens are bytes, cut at `limit`.
pub fn stream_answer(chat: bool, answer: &Answer, prompt_tokens: u64, limit: usize) -> Vec<Step> {
    let mut events = vec![stream_head()];
    if chat {
        events
            .push(event(&json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})));
    }
    let end =
        (0..=limit.min(answer.text.len())).rev().find(|&i| answer.text.is_char_boundary(i)).unwrap_or(0);
    let said = &answer.text[..end];
    let mut at = 0;
    while at < said.len() {
        let next = (at + 8..=said.len()).find(|&i| said.is_char_boundary(i)).unwrap_or(said.len());
        events.push(event(&text_chunk(chat, &said[at..next])));
        at = next;
    }
    for (i, call) in answer.tool_calls.iter().enumerate() {
        let (head, tail) = call.arguments.split_at(
            (0..=call.arguments.len() / 2).rev().find(|&i| call.arguments.is_char_boundary(i)).unwrap_or(0),
        );
        for (name, arguments, id) in [(call.name.as_str(), head, call.id.as_str()), ("", tail, "")] {
            let piece = json!({"index": i, "id": id, "function": {"name": name, "arguments": arguments}});
            events.push(event(&json!({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})));
        }
    }
    let reason = match answer.finish {
        _ if end < answer.text.len() => "length",
        _ if !answer.tool_calls.is_empty() => "tool_calls",
        Finish::Refused => "content_filter",
        _ => "stop",
    };
    events.extend(ends(chat, reason, prompt_tokens, said.len() as u64).map(|e| event(&e)));
    events.push(done());
    events.into_iter().map(Step::Send).collect()
}

impl Script for Model {
    fn steps(&self, asked: &Asked) -> Vec<Step> {
        let text = all_text(asked);
        let prompt_tokens = match self.mind {
            Mind::Truncating(n) => text.len().min(n),
            _ => text.len(),
        } as u64;
        if let Some(limit) = self.max_model_len.filter(|&l| text.len() > l) {
            let message = format!("This model's maximum context length is {limit} tokens.");
            return vec![Step::Send(json_reply(400, &json!({"error": {"message": message}})))];
        }
        let answer = self.answer(asked, &text);
        let limit = asked.body["max_tokens"].as_u64().unwrap_or(u64::MAX) as usize;
        if asked.body["logprobs"] != Value::Null {
            return vec![Step::Send(json_reply(
                200,
                &with_logprobs(asked.is_chat(), self.mind, &text, &answer),
            ))];
        }
        stream_answer(asked.is_chat(), &answer, prompt_tokens, limit)
    }

    fn max_model_len(&self) -> Option<usize> {
        self.max_model_len
    }
}

/// One token with a distribution that depends on every byte that was read, and on no other.
fn with_logprobs(chat: bool, mind: Mind, text: &str, answer: &Answer) -> Value {
    let read: Vec<u8> =
        text.bytes().enumerate().filter(|(i, _)| mind.reads(*i, i + 1, text.len())).map(|(_, b)| b).collect();
    let hash = blake3::hash(&read);
    let lp = -f64::from(hash.as_bytes()[0]) / 256.0 - f64::from(hash.as_bytes()[1]) / 65536.0;
    let first: String = answer.text.chars().take(1).collect();
    let choice = if chat {
        let top = json!([{"token": first, "logprob": lp}]);
        json!({"index": 0, "message": {"role": "assistant", "content": first}, "finish_reason": "length",
            "logprobs": {"content": [{"token": first, "logprob": lp, "top_logprobs": top}]}})
    } else {
        json!({"index": 0, "text": first, "finish_reason": "length", "logprobs": {"top_logprobs": [{first.clone(): lp}]}})
    };
    json!({"choices": [choice], "usage": {"prompt_tokens": text.len(), "completion_tokens": 1}})
}
