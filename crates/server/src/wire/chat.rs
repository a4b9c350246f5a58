//! `POST /v1/chat/completions`: the request. Text only; rendering happens later, with the model's template.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use suanpan_engine::params::MAX_LOGPROBS;

use super::common::{Common, response_format};
use super::fields::{Fields, elements, parse, wrong_type};
use crate::error::{ApiError, shorten};

const TOOLS: &str = "tool calling is not supported";
/// Most messages of one conversation (the body limit comes first for long ones).
const MAX_MESSAGES: usize = 100_000;

/// A chat request with every field checked as far as it can be without the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// Fields shared with text completions.
    pub common: Common,
    /// What is rendered.
    pub conversation: Conversation,
}

/// The part of a chat request that becomes the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// At least one `{role, content}` with text content.
    pub messages: Vec<Message>,
    /// Whether the prompt ends with the start of an assistant turn.
    pub add_generation_prompt: bool,
    /// Extra variables of the template.
    pub chat_template_kwargs: Map<String, Value>,
}

/// One turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant` (`developer` arrives as `system`).
    pub role: &'static str,
    /// The text; several text parts are joined by newlines.
    pub content: String,
    /// The speaker's name, if given.
    pub name: Option<String>,
}

/// Reads a chat request; pure, and total on any bytes.
pub fn parse_chat(body: &[u8]) -> Result<ChatRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut common = Common::take(&mut fields)?;
    let newer = fields.size("max_completion_tokens", 0..=i64::MAX as usize)?;
    common.sampling.max_tokens = match (common.sampling.max_tokens, newer) {
        (Some(a), Some(b)) if a != b => {
            let message = format!("{b} contradicts 'max_tokens' ({a}): send one of them.");
            return Err(ApiError::bad_field("max_completion_tokens", message));
        }
        (a, b) => b.or(a),
    };
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.size("top_logprobs", 0..=MAX_LOGPROBS)?;
    if top.is_some_and(|k| k > 0) && !wanted {
        return Err(ApiError::bad_field("top_logprobs", "it needs 'logprobs': true."));
    }
    common.sampling.logprobs = wanted.then(|| top.unwrap_or(0));
    let conversation = Conversation::take(&mut fields)?;
    refuse_tools(&mut fields)?;
    response_format(&mut fields)?;
    refuse_what_is_not_built(&mut fields)?;
    fields.finish()?;
    common.validate()?;
    Ok(ChatRequest { common, conversation })
}

impl Conversation {
    /// Takes the fields that make the prompt (shared with `/tokenize`).
    pub(super) fn take(fields: &mut Fields<'_>) -> Result<Conversation, ApiError> {
        let Some(list) = fields.list("messages", MAX_MESSAGES)? else {
            return Err(ApiError::bad_field("messages", "it is required: a list of messages."));
        };
        if list.is_empty() {
            return Err(ApiError::bad_field(
                "messages",
                "the list is empty: at least one message is needed.",
            ));
        }
        let messages =
            list.into_iter().enumerate().map(|(i, raw)| message(i, raw)).collect::<Result<_, _>>()?;
        let chat_template_kwargs = match fields.value("chat_template_kwargs")? {
            None => Map::new(),
            Some(Value::Object(map)) => map,
            Some(_) => return Err(ApiError::bad_field("chat_template_kwargs", "expected an object.")),
        };
        let add_generation_prompt = fields.bool("add_generation_prompt")?.unwrap_or(true);
        fields.only("continue_final_message", &json!(false), "only false is supported.")?;
        fields
            .refuse("chat_template", "the template is the server's (--chat-template), not the request's.")?;
        fields.refuse("documents", "documents are not supported: put them into a message.")?;
        fields.refuse("mm_processor_kwargs", "this server takes text only.")?;
        Ok(Conversation { messages, add_generation_prompt, chat_template_kwargs })
    }

    /// The messages as the template sees them.
    pub fn to_value(&self) -> Value {
        let turn = |m: &Message| match &m.name {
            None => json!({"role": m.role, "content": m.content}),
            Some(name) => json!({"role": m.role, "content": m.content, "name": name}),
        };
        Value::Array(self.messages.iter().map(turn).collect())
    }
}

fn message(index: usize, raw: &RawValue) -> Result<Message, ApiError> {
    let path = format!("messages[{index}]");
    let mut fields = Fields::of_value(&path, raw)?;
    let role = match fields.string("role")?.as_deref() {
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("tool" | "function") => {
            return Err(ApiError::unsupported(format!("{path}.role"), format!("{TOOLS}.")));
        }
        Some(other) => {
            let message = format!("'{}': supported: system, developer, user, assistant.", shorten(other));
            return Err(ApiError::bad_field(format!("{path}.role"), message));
        }
        None => return Err(ApiError::bad_field(format!("{path}.role"), "it is required.")),
    };
    let content_path = format!("{path}.content");
    let content = match fields.raw("content") {
        Some(raw) => content(&content_path, raw)?,
        None => {
            return Err(ApiError::bad_field(content_path, "it is required: a text or a list of text parts."));
        }
    };
    let name = fields.string("name")?;
    for field in ["tool_calls", "function_call", "tool_call_id"] {
        fields.refuse(field, &format!("{TOOLS}."))?;
    }
    for field in ["audio", "reasoning", "reasoning_content"] {
        fields.refuse(field, "only 'content' is supported.")?;
    }
    // What a client gets back from us and sends again unchanged.
    fields.refuse("refusal", "only 'content' is supported.")?;
    fields.only("annotations", &json!([]), "only 'content' is supported.")?;
    fields.finish()?;
    Ok(Message { role, content, name })
}

fn content(path: &str, raw: &RawValue) -> Result<String, ApiError> {
    match raw.get().as_bytes().first() {
        Some(b'"') => return parse(path, raw, "a string"),
        Some(b'[') => {}
        _ => return Err(wrong_type(path, raw, "a string or a list of text parts")),
    }
    let parts = elements(path, raw, MAX_MESSAGES)?;
    if parts.is_empty() {
        return Err(ApiError::bad_field(path, "the list of parts is empty."));
    }
    let mut texts = Vec::with_capacity(parts.len());
    for (i, raw) in parts.into_iter().enumerate() {
        let part_path = format!("{path}[{i}]");
        let mut part = Fields::of_value(&part_path, raw)?;
        match part.string("type")?.as_deref() {
            Some("text") => {}
            Some(other) => {
                let reason = format!("parts of type '{}': this server takes text only.", shorten(other));
                return Err(ApiError::unsupported(part_path, reason));
            }
            None => return Err(ApiError::bad_field(format!("{part_path}.type"), "it is required.")),
        }
        match part.string("text")? {
            Some(text) => texts.push(text),
            None => return Err(ApiError::bad_field(format!("{part_path}.text"), "it is required.")),
        }
        part.finish()?;
    }
    Ok(texts.join("\n"))
}

/// Without a tool parser a request with tools can be honoured only when it forbids their use.
fn refuse_tools(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let choice = fields.value("tool_choice")?;
    let tools = fields.value("tools")?;
    let none = choice.as_ref().is_some_and(|c| c == "none");
    if choice.as_ref().is_some_and(|c| c != "none" && c != "auto") {
        return Err(ApiError::unsupported("tool_choice", format!("{TOOLS}: only \"none\".")));
    }
    match tools {
        None => {}
        Some(Value::Array(list)) if list.is_empty() || none => {}
        Some(Value::Array(_)) => {
            return Err(ApiError::unsupported(
                "tools",
                format!("{TOOLS}; send 'tool_choice': \"none\" or no tools."),
            ));
        }
        Some(_) => return Err(ApiError::bad_field("tools", "expected a list.")),
    }
    fields.refuse("functions", &format!("{TOOLS}."))?;
    fields.only("function_call", &json!("none"), &format!("{TOOLS}."))?;
    // With no call ever made, both values mean the same.
    fields.bool("parallel_tool_calls").map(|_| ())
}

fn refuse_what_is_not_built(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    fields.only("modalities", &json!(["text"]), "this server answers in text only.")?;
    fields.refuse("audio", "this server answers in text only.")?;
    fields.refuse("prediction", "predicted outputs are not supported.")?;
    fields.refuse("web_search_options", "this server fetches nothing.")?;
    fields.refuse("reasoning_effort", "there is no reasoning control; see 'chat_template_kwargs'.")?;
    fields.refuse("include_reasoning", "there is no reasoning parser.")?;
    fields.only("verbosity", &json!("medium"), "there is no verbosity control.")?;
    fields.only("echo", &json!(false), "the prompt is echoed only by /v1/completions.")?;
    fields.only("add_special_tokens", &json!(false), "the chat template writes the control tokens.")
}
