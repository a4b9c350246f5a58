//! What one JSON value of an answer adds: text, reasoning, pieces of tool calls, an end, usage; and the answer that grows from them.

use serde_json::Value;

use super::{Carries, Fault, FaultKind, Protocol, Usage};
use crate::item::{Answer, Finish, ToolCall};

/// Marks of reasoning that stands in the text itself.
const THINK: (&str, &str) = ("<think>", "</think>");
/// Most tool calls of one answer.
const TOOL_CALLS: usize = 1024;

/// An answer in the making.
#[derive(Default)]
pub struct Growing {
    answer: Answer,
    finished: bool,
    /// Usage so far.
    pub usage: Usage,
    /// Tokens so far, as the server last said.
    pub tokens_so_far: Option<u64>,
    /// The first token's candidates.
    pub first_logprobs: Option<Value>,
    /// Bytes of `answer.text` already known to be reasoning or answer.
    thinking: bool,
}

/// What one value added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Added {
    /// Kind of the most telling piece.
    pub carries: Carries,
    /// Bytes of text, reasoning and arguments.
    pub bytes: u32,
}

fn malformed(line: impl Into<String>) -> Fault {
    Fault::new(FaultKind::Malformed, line)
}

/// An error object, wherever servers put it.
pub fn in_band(value: &Value) -> Option<String> {
    let error = match value.get("error") {
        Some(Value::Null) | None => {
            let is_error = value.get("object").and_then(Value::as_str) == Some("error");
            return is_error.then(|| value["message"].as_str().unwrap_or("an error").to_owned());
        }
        Some(error) => error,
    };
    Some(match error {
        Value::String(s) => s.clone(),
        other => other.get("message").and_then(Value::as_str).map_or(other.to_string(), str::to_owned),
    })
}

fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str, Fault> {
    match value.get(field) {
        None | Some(Value::Null) => Ok(""),
        Some(Value::String(s)) => Ok(s),
        Some(other) => Err(malformed(format!("{field} is no text: {other}"))),
    }
}

/// Finish reasons as servers spell them.
pub fn finish(reason: &str) -> Finish {
    match reason {
        "stop" | "eos" | "stop_sequence" | "end_turn" => Finish::Stop,
        "length" | "max_tokens" => Finish::Length,
        "tool_calls" | "function_call" => Finish::ToolCalls,
        "content_filter" | "refusal" => Finish::Refused,
        _ => Finish::Other,
    }
}

impl Growing {
    /// Adds a chunk or a whole reply.
    pub fn add(&mut self, value: &Value, protocol: Protocol) -> Result<Added, Fault> {
        if let Some(message) = in_band(value) {
            return Err(Fault::new(FaultKind::InBand, format!("an error inside the answer: {message}")));
        }
        self.add_usage(value)?;
        let mut added = Added { carries: Carries::Nothing, bytes: 0 };
        let choices = match value.get("choices") {
            Some(Value::Array(choices)) => choices,
            None if value.get("usage").is_some() => return Ok(added),
            _ => return Err(malformed("no choices in the answer")),
        };
        let Some(choice) = choices.iter().find(|c| c.get("index").is_none_or(|i| i.as_u64() == Some(0)))
        else {
            return Ok(added);
        };
        if let Some(logprobs) = choice.get("logprobs").filter(|l| !l.is_null())
            && self.first_logprobs.is_none()
        {
            self.first_logprobs = first_token(logprobs);
        }
        match protocol {
            Protocol::Completion => added = self.add_text(text(choice, "text")?),
            Protocol::Chat => {
                if let Some(delta) =
                    choice.get("delta").or_else(|| choice.get("message")).filter(|d| !d.is_null())
                {
                    added = self.add_delta(delta)?;
                }
            }
        }
        if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
            self.finished = true;
            if self.answer.finish != Finish::Refused {
                self.answer.finish = finish(reason);
            }
        }
        Ok(added)
    }

    fn add_delta(&mut self, delta: &Value) -> Result<Added, Fault> {
        let mut reasoning = text(delta, "reasoning_content")?;
        if reasoning.is_empty() {
            reasoning = text(delta, "reasoning")?;
        }
        self.answer.reasoning.push_str(reasoning);
        let mut added = self.add_text(text(delta, "content")?);
        if added.carries == Carries::Nothing && !reasoning.is_empty() {
            added.carries = Carries::Reasoning;
        }
        added.bytes += reasoning.len() as u32;
        let refusal = text(delta, "refusal")?;
        if !refusal.is_empty() {
            self.answer.text.push_str(refusal);
            self.answer.finish = Finish::Refused;
            added = Added { carries: Carries::Answer, bytes: added.bytes + refusal.len() as u32 };
        }
        let calls = delta.get("tool_calls").and_then(Value::as_array).map_or(&[][..], |c| c);
        for (position, call) in calls.iter().enumerate() {
            added.bytes += self.add_call(position, call)?;
            if added.carries == Carries::Nothing {
                added.carries = Carries::Tool;
            }
        }
        Ok(added)
    }

    fn add_call(&mut self, position: usize, call: &Value) -> Result<u32, Fault> {
        let index = call.get("index").and_then(Value::as_u64).map_or(position, |i| i as usize);
        if index >= TOOL_CALLS {
            return Err(malformed(format!("tool call {index}: supported: below {TOOL_CALLS}")));
        }
        let calls = &mut self.answer.tool_calls;
        while calls.len() <= index {
            calls.push(ToolCall { id: String::new(), name: String::new(), arguments: String::new() });
        }
        let empty = Value::Null;
        let function = call.get("function").unwrap_or(&empty);
        let (id, name, arguments) =
            (text(call, "id")?, text(function, "name")?, text(function, "arguments")?);
        let into = &mut calls[index];
        into.id.push_str(id);
        into.name.push_str(name);
        into.arguments.push_str(arguments);
        Ok((name.len() + arguments.len()) as u32)
    }

    /// Text of the answer; what stands between thinking marks is reasoning.
    fn add_text(&mut self, piece: &str) -> Added {
        let bytes = piece.len() as u32;
        if piece.is_empty() {
            return Added { carries: Carries::Nothing, bytes };
        }
        self.answer.text.push_str(piece);
        let start = self.answer.text.trim_start();
        self.thinking |= self.answer.reasoning.is_empty() && start.starts_with(THINK.0);
        let mut carries = if self.thinking { Carries::Reasoning } else { Carries::Answer };
        if self.thinking
            && let Some(end) = self.answer.text.find(THINK.1)
        {
            let rest = self.answer.text.split_off(end + THINK.1.len());
            let said = std::mem::replace(&mut self.answer.text, rest);
            let said = said.trim_start().trim_start_matches(THINK.0);
            self.answer.reasoning = said.strip_suffix(THINK.1).unwrap_or(said).to_owned();
            self.thinking = false;
            if !self.answer.text.is_empty() {
                carries = Carries::Answer;
            }
        }
        Added { carries, bytes }
    }

    fn add_usage(&mut self, value: &Value) -> Result<(), Fault> {
        let Some(usage) = value.get("usage").filter(|u| !u.is_null()) else { return Ok(()) };
        let number = |v: Option<&Value>, field: &str| match v {
            None | Some(Value::Null) => Ok(None),
            Some(v) => v.as_u64().map(Some).ok_or_else(|| malformed(format!("usage.{field} is {v}"))),
        };
        let detail = |group: &str, field: &str| number(usage.get(group).and_then(|d| d.get(field)), field);
        let cached = detail("prompt_tokens_details", "cached_tokens")?;
        let reasoning = detail("completion_tokens_details", "reasoning_tokens")?;
        let prompt = number(usage.get("prompt_tokens"), "prompt_tokens")?;
        let completion = number(usage.get("completion_tokens"), "completion_tokens")?;
        self.tokens_so_far = completion.or(self.tokens_so_far);
        let u = &mut self.usage;
        u.prompt_tokens = prompt.or(u.prompt_tokens);
        u.completion_tokens = completion.or(u.completion_tokens);
        u.cached_tokens = cached.or(u.cached_tokens);
        u.reasoning_tokens = reasoning.or(u.reasoning_tokens);
        if let Some(ledger) = usage.get("ledger").filter(|l| !l.is_null()) {
            u.ledger = Some(ledger.clone());
        }
        Ok(())
    }

    /// Bytes of the answer so far.
    pub fn bytes(&self) -> usize {
        self.answer.text.len() + self.answer.reasoning.len()
    }

    /// A finish reason has come.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// The answer as it stands.
    pub fn into_answer(mut self) -> Answer {
        if self.thinking {
            // It never came to an answer.
            let said = std::mem::take(&mut self.answer.text);
            self.answer.reasoning = said.trim_start().trim_start_matches(THINK.0).to_owned();
        }
        if !self.finished && self.answer.finish != Finish::Refused {
            self.answer.finish = Finish::Other;
        }
        self.answer
    }
}

/// The candidates of the first token, in either spelling.
fn first_token(logprobs: &Value) -> Option<Value> {
    if let Some(first) = logprobs.get("content").and_then(|c| c.get(0)) {
        return Some(first.get("top_logprobs").unwrap_or(first).clone());
    }
    logprobs.get("top_logprobs").and_then(|t| t.get(0)).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn grow(deltas: &[Value]) -> (Answer, Vec<Carries>) {
        let mut growing = Growing::default();
        let kinds = deltas
            .iter()
            .map(|d| growing.add(&json!({"choices": [{"index": 0, "delta": d}]}), Protocol::Chat).unwrap())
            .map(|a| a.carries)
            .collect();
        (growing.into_answer(), kinds)
    }

    #[test]
    fn a_role_and_an_empty_delta_are_not_output() {
        let (answer, kinds) =
            grow(&[json!({"role": "assistant", "content": ""}), json!({}), json!({"content": "x"})]);
        assert_eq!(kinds, [Carries::Nothing, Carries::Nothing, Carries::Answer]);
        assert_eq!(answer.text, "x");
    }

    #[test]
    fn reasoning_is_kept_apart_whether_the_server_or_the_model_marks_it() {
        let (answer, kinds) = grow(&[json!({"reasoning_content": "hm"}), json!({"content": "4"})]);
        assert_eq!((answer.text.as_str(), answer.reasoning.as_str()), ("4", "hm"));
        assert_eq!(kinds, [Carries::Reasoning, Carries::Answer]);
        let pieces = ["<think>", "h", "m</th", "ink>4", "2"].map(|p| json!({"content": p}));
        let (answer, kinds) = grow(&pieces);
        assert_eq!((answer.text.as_str(), answer.reasoning.as_str()), ("42", "hm"));
        assert_eq!(kinds[3..], [Carries::Answer, Carries::Answer]);
        let (answer, _) = grow(&[json!({"content": "<think>for ever"})]);
        assert_eq!((answer.text.as_str(), answer.reasoning.as_str()), ("", "for ever"));
    }

    #[test]
    fn tool_calls_are_put_together_from_their_pieces() {
        let call = |index: u32, id: &str, name: &str, arguments: &str| json!({"tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": arguments}}]});
        let (answer, kinds) = grow(&[
            call(0, "a", "f", ""),
            call(0, "", "", "{\"x\""),
            call(1, "b", "g", "{}"),
            call(0, "", "", ":1}"),
        ]);
        assert_eq!(answer.tool_calls[0].arguments, "{\"x\":1}");
        assert_eq!(answer.tool_calls[1].name, "g");
        assert!(kinds.iter().all(|k| *k == Carries::Tool));
    }

    #[test]
    fn errors_in_the_stream_are_faults() {
        for error in [
            json!({"error": {"message": "boom"}}),
            json!({"error": "boom"}),
            json!({"object": "error", "message": "boom"}),
        ] {
            let fault = Growing::default().add(&error, Protocol::Chat).unwrap_err();
            assert!(fault.kind == FaultKind::InBand && fault.line.contains("boom"), "{fault}");
        }
    }
}
