//! Chat templates: one conversation to one prompt, rendered as the `transformers` library renders them.
//!
//! A template is code from a model file: it is compiled once, runs on a budget, and reaches nothing but its inputs. Clock
//! times are UTC. Text a user wrote is kept from becoming control tokens by [`ChatTemplate::encode`].

mod clock;
mod python;
mod source;

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use crate::tokenizer::{Guard, Tokenizer, TokenizerError};

/// Work a render may do: about one unit an instruction and one for each 64 bytes made, so also a bound on memory.
const FUEL: u64 = 4_000_000;
/// Address space for a render's stack. A loop can nest values as deep as the budget allows, and the engine frees them by recursion; what is
/// not touched is never backed by memory.
const STACK_BYTES: usize = 256 << 20;
/// Name of the one template in its environment.
const NAME: &str = "chat";
/// Variables that a request cannot set through its template arguments.
const RESERVED: [&str; 5] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];
/// Names under which clients send a message's reasoning; templates read the first, or `thinking`.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Why a template could not be compiled or rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template is not valid: the model file is at fault.
    #[error("chat template, line {line}: {message}")]
    Compile {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// The template refused the conversation with this message: the request is at fault.
    #[error("the chat template refuses this conversation: {0}")]
    Raised(String),
    /// The render did more work than it may.
    #[error("the chat template did not finish within its budget of {0} units")]
    OutOfFuel(u64),
    /// The template failed on this conversation.
    #[error("the chat template failed on this conversation, line {line}: {message}")]
    Render {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// What went wrong.
        message: String,
    },
    /// An input has the wrong shape.
    #[error("{field}: found {found}; supported: {supported}")]
    Input {
        /// Name of the input.
        field: String,
        /// What was given.
        found: String,
        /// What would have been accepted.
        supported: String,
    },
    /// The rendered prompt could not be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// A compiled chat template.
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are the texts of the model's begin and end tokens, where it has them.
    pub fn compile(
        source: &str,
        bos: Option<&str>,
        eos: Option<&str>,
    ) -> Result<ChatTemplate, TemplateError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| compile_error(&e))?);
        env.set_fuel(Some(FUEL));
        env.set_formatter(python::print);
        env.set_unknown_method_callback(python::method);
        env.add_filter("tojson", python::tojson);
        env.add_filter("string", python::string);
        env.add_function("raise_exception", python::raise_exception);
        env.add_function("strftime_now", clock::strftime_now);
        env.add_template_owned(NAME, source::without_generation_tags(source))
            .map_err(|e| compile_error(&e))?;
        Ok(ChatTemplate {
            env,
            source: source.to_owned(),
            bos: bos.map(str::to_owned),
            eos: eos.map(str::to_owned),
        })
    }

    /// The template's text as the model file has it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of a conversation. `messages`: an array of objects, as the OpenAI API has them. `tools`: an array of objects.
    /// `kwargs`: further variables of the template (`documents`, `enable_thinking`, …); the names the template gets anyway are
    /// refused.
    pub fn render(
        &self,
        messages: &Json,
        add_generation_prompt: bool,
        tools: Option<&Json>,
        kwargs: &Map<String, Json>,
    ) -> Result<String, TemplateError> {
        check_inputs(messages, tools, kwargs)?;
        let mut context: BTreeMap<&str, Value> = BTreeMap::from([
            ("messages", Value::from(Serde(normalized(messages)))),
            ("tools", tools.map_or(Value::from(()), |t| Value::from(Serde(t)))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ]);
        context.extend(self.bos.as_deref().map(|t| ("bos_token", Value::from(t))));
        context.extend(self.eos.as_deref().map(|t| ("eos_token", Value::from(t))));
        context.extend(kwargs.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        on_deep_stack(|| {
            let template = self.env.get_template(NAME).map_err(|e| render_error(&e))?;
            template.render(Value::from(context)).map_err(|e| render_error(&e))
        })
    }

    /// The token ids of a conversation's prompt: rendered as by [`Self::render`], with the control tokens that the template
    /// wrote. Control tokens spelled inside the messages, tools or arguments stay text. The template decides about the begin token.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &Json,
        add_generation_prompt: bool,
        tools: Option<&Json>,
        kwargs: &Map<String, Json>,
    ) -> Result<Vec<u32>, TemplateError> {
        let mut used: Vec<char> = Vec::new();
        let mut note = |text: &str| used.extend(text.chars().filter(|&c| Guard::may_use(c)));
        note(&self.source);
        visit(messages, &mut note);
        tools.into_iter().for_each(|t| visit(t, &mut note));
        kwargs.values().for_each(|v| visit(v, &mut note));
        let guard = tokenizer.guard(|c| used.contains(&c)).ok_or_else(|| TemplateError::Input {
            field: "messages".into(),
            found: "text that uses every Unicode noncharacter".into(),
            supported: "text that leaves a few of them free".into(),
        })?;
        let messages = hidden(messages, &guard);
        let tools = tools.map(|t| hidden(t, &guard));
        let kwargs: Map<String, Json> = kwargs.iter().map(|(k, v)| (k.clone(), hidden(v, &guard))).collect();
        let prompt = self.render(&messages, add_generation_prompt, tools.as_ref(), &kwargs)?;
        Ok(tokenizer.encode_guarded(&prompt, &guard)?)
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("source", &self.source).finish_non_exhaustive()
    }
}

/// Runs `work` on a thread of its own with [`STACK_BYTES`] of stack.
fn on_deep_stack<T: Send>(
    work: impl FnOnce() -> Result<T, TemplateError> + Send,
) -> Result<T, TemplateError> {
    let failed = |message: String| TemplateError::Render { line: 0, message };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat-template".into()).stack_size(STACK_BYTES);
        let handle =
            thread.spawn_scoped(scope, work).map_err(|e| failed(format!("no thread to render on: {e}")))?;
        handle.join().unwrap_or_else(|_| Err(failed("the render panicked".into())))
    })
}

fn check_inputs(
    messages: &Json,
    tools: Option<&Json>,
    kwargs: &Map<String, Json>,
) -> Result<(), TemplateError> {
    let refuse = |field: String, found: String, supported: &str| {
        Err(TemplateError::Input { field, found, supported: supported.to_owned() })
    };
    for (field, list) in [("messages", Some(messages)), ("tools", tools)] {
        let Some(list) = list else { continue };
        let Some(list) = list.as_array() else {
            return refuse(field.into(), type_of(list).into(), "an array of objects");
        };
        if let Some(at) = list.iter().position(|item| !item.is_object()) {
            return refuse(format!("{field}[{at}]"), type_of(&list[at]).into(), "an object");
        }
    }
    match RESERVED.iter().find(|name| kwargs.contains_key(**name)) {
        Some(name) => refuse(
            "chat_template_kwargs".into(),
            format!("{name:?}"),
            "names other than the template's own inputs",
        ),
        None => Ok(()),
    }
}

fn type_of(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "an array",
        Json::Object(_) => "an object",
    }
}

/// Messages without null fields (templates test for presence), with reasoning under the names that templates read.
fn normalized(messages: &Json) -> Json {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().into_iter().flatten().filter_map(Json::as_object_mut) {
        message.retain(|_, value| !value.is_null());
        if let Some(reasoning) = REASONING.iter().find_map(|name| message.get(*name)).cloned() {
            message.entry("thinking").or_insert_with(|| reasoning.clone());
            message.insert("reasoning_content".into(), reasoning);
        }
    }
    messages
}

/// Calls `text` for every string and key in `value`.
fn visit(value: &Json, text: &mut impl FnMut(&str)) {
    match value {
        Json::String(s) => text(s),
        Json::Array(list) => list.iter().for_each(|item| visit(item, text)),
        Json::Object(map) => map.iter().for_each(|(key, item)| {
            text(key);
            visit(item, text);
        }),
        _ => {}
    }
}

/// `value` with every control token in its strings and keys hidden.
fn hidden(value: &Json, guard: &Guard) -> Json {
    match value {
        Json::String(s) => Json::String(guard.hide(s).into_owned()),
        Json::Array(list) => list.iter().map(|item| hidden(item, guard)).collect(),
        Json::Object(map) => {
            map.iter().map(|(key, item)| (guard.hide(key).into_owned(), hidden(item, guard))).collect()
        }
        other => other.clone(),
    }
}

fn compile_error(error: &minijinja::Error) -> TemplateError {
    TemplateError::Compile { line: error.line().unwrap_or(0), message: words_of(error) }
}

fn render_error(error: &minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(at) = cause {
        if let Some(python::Raised(message)) = at.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        if at.downcast_ref().is_some_and(|e: &minijinja::Error| e.kind() == ErrorKind::OutOfFuel) {
            return TemplateError::OutOfFuel(FUEL);
        }
        cause = at.source();
    }
    TemplateError::Render { line: error.line().unwrap_or(0), message: words_of(error) }
}

/// The kind of an error with its detail, without the source excerpt.
fn words_of(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

#[cfg(test)]
mod tests;
