//! A prompt as the JSON body of a request: chat messages with pictures and tools, or one text.

use base64::Engine;
use serde_json::{Map, Value, json};

use super::{Ask, Protocol};
use crate::item::{Part, Prompt, Role, Turn};

/// What a server is sent beyond OpenAI's own fields.
#[derive(Clone, Debug)]
pub struct Extras {
    /// The model's served name.
    pub model: String,
    /// Ask for a stream.
    pub stream: bool,
    /// Ask for the tokens so far in every chunk (vLLM and this project's server).
    pub continuous_usage: bool,
    /// `ignore_eos` is understood.
    pub ignore_eos: bool,
    /// Name of the field with the limit: `max_tokens`, `max_completion_tokens`.
    pub limit_field: String,
    /// Further fields, as given.
    pub fields: Map<String, Value>,
}

fn role(role: Role) -> &'static str {
    match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    }
}

fn content(parts: &[Part]) -> Value {
    if let [Part::Text { text }] = parts {
        return Value::String(text.clone());
    }
    if parts.is_empty() {
        return Value::Null;
    }
    let one = |part: &Part| match part {
        Part::Text { text } => json!({"type": "text", "text": text}),
        Part::Image { mime, bytes, .. } => {
            let data = base64::engine::general_purpose::STANDARD.encode(bytes);
            json!({"type": "image_url", "image_url": {"url": format!("data:{mime};base64,{data}")}})
        }
    };
    Value::Array(parts.iter().map(one).collect())
}

fn message(turn: &Turn) -> Value {
    let mut message = Map::new();
    message.insert("role".into(), role(turn.role).into());
    message.insert("content".into(), content(&turn.parts));
    if !turn.tool_calls.is_empty() {
        let call = |c: &crate::item::ToolCall| json!({"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}});
        message.insert("tool_calls".into(), turn.tool_calls.iter().map(call).collect());
    }
    if let Some(id) = &turn.tool_call_id {
        message.insert("tool_call_id".into(), id.as_str().into());
    }
    Value::Object(message)
}

/// What a base model reads: the turns' text, one after another, and the lead-in.
pub fn raw_text(prompt: &Prompt) -> String {
    let mut text = String::new();
    for part in prompt.turns.iter().flat_map(|t| &t.parts) {
        if let Part::Text { text: t } = part {
            text.push_str(t);
        }
    }
    text.push_str(prompt.lead_in.as_deref().unwrap_or(""));
    text
}

/// The body.
pub fn build(ask: &Ask<'_>, extras: &Extras) -> Vec<u8> {
    let mut body = Map::new();
    body.insert("model".into(), extras.model.as_str().into());
    match ask.protocol {
        Protocol::Chat => {
            body.insert("messages".into(), ask.prompt.turns.iter().map(message).collect());
            if !ask.prompt.tools.is_empty() {
                let tool = |t: &Value| match t.get("function") {
                    Some(_) => t.clone(),
                    None => json!({"type": "function", "function": t}),
                };
                body.insert("tools".into(), ask.prompt.tools.iter().map(tool).collect());
            }
            if ask.logprobs {
                body.insert("logprobs".into(), true.into());
                body.insert("top_logprobs".into(), 5.into());
            }
        }
        Protocol::Completion => {
            body.insert("prompt".into(), raw_text(ask.prompt).into());
            if ask.logprobs {
                body.insert("logprobs".into(), 5.into());
            }
        }
    }
    let limit = if ask.protocol == Protocol::Chat { extras.limit_field.as_str() } else { "max_tokens" };
    body.insert(limit.into(), ask.max_tokens.into());
    body.insert("temperature".into(), 0.into());
    if !ask.stop.is_empty() {
        body.insert("stop".into(), ask.stop.to_vec().into());
    }
    if ask.ignore_eos && extras.ignore_eos {
        body.insert("ignore_eos".into(), true.into());
    }
    if extras.stream {
        body.insert("stream".into(), true.into());
        let mut options = json!({"include_usage": true});
        if extras.continuous_usage {
            options["continuous_usage_stats"] = true.into();
        }
        body.insert("stream_options".into(), options);
    }
    body.extend(extras.fields.clone());
    Value::Object(body).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Limits;

    #[test]
    fn pictures_and_tools_are_spelled_as_openai_does() {
        let mut turn = Turn::text(Role::User, "look");
        turn.parts.push(Part::Image { mime: "image/png".into(), bytes: vec![1, 2, 3], at_seconds: None });
        let prompt = Prompt { turns: vec![turn], tools: vec![json!({"name": "f"})], lead_in: None };
        let limits = Limits::default();
        let ask = Ask {
            prompt: &prompt,
            protocol: Protocol::Chat,
            max_tokens: 7,
            stop: &[],
            ignore_eos: true,
            logprobs: false,
            limits,
        };
        let extras = Extras {
            model: "m".into(),
            stream: true,
            continuous_usage: false,
            ignore_eos: false,
            limit_field: "max_completion_tokens".into(),
            fields: Map::new(),
        };
        let body: Value = serde_json::from_slice(&build(&ask, &extras)).unwrap();
        assert_eq!(body["messages"][0]["content"][1]["image_url"]["url"], "data:image/png;base64,AQID");
        assert_eq!(body["tools"][0], json!({"type": "function", "function": {"name": "f"}}));
        assert_eq!(body["max_completion_tokens"], 7);
        assert!(body.get("ignore_eos").is_none(), "a server that does not know it would refuse it");
    }
}
