//! `POST /v1/completions`: the request.

use serde_json::json;
use serde_json::value::RawValue;

use suanpan_engine::params::MAX_LOGPROBS;

use super::common::{Common, MAX_CHOICES, response_format};
use super::fields::{Fields, elements, exact_int, parse, wrong_type};
use crate::error::ApiError;

/// Most token ids of one prompt (the context limit of the model is checked later and is lower).
const MAX_PROMPT_IDS: usize = 1 << 26;

/// One prompt of a text completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text, possibly empty.
    Text(String),
    /// Token ids, at least one; not yet checked against the vocabulary.
    Ids(Vec<u32>),
}

/// A text-completion request with every field checked as far as it can be without the model.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// Fields shared with chat.
    pub common: Common,
    /// One or more prompts; choices come back prompt by prompt.
    pub prompts: Vec<Prompt>,
    /// Whether each text starts with its prompt. With `logprobs` this sets the engine's `prompt_logprobs` too.
    pub echo: bool,
    /// Whether `prompt_logprobs` itself was asked for.
    pub prompt_logprobs: bool,
    /// Whether the tokenizer adds its start token to text prompts.
    pub add_special_tokens: bool,
    /// Choices drawn for each prompt, at least `n`: the `n` likeliest of them come back.
    pub best_of: usize,
}

/// Reads a text-completion request; pure, and total on any bytes.
pub fn parse_completion(body: &[u8]) -> Result<CompletionRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut common = Common::take(&mut fields)?;
    common.sampling.logprobs = fields.size("logprobs", 0..=MAX_LOGPROBS)?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    let prompt_logprobs = common.sampling.prompt_logprobs.is_some();
    if echo && common.sampling.logprobs.is_some() {
        if common.stream {
            let reason = "an echoed prompt is returned with log-probabilities only without 'stream'.";
            return Err(ApiError::unsupported("echo", reason));
        }
        // An echoed prompt is reported with its log-probabilities.
        let asked = common.sampling.prompt_logprobs.max(common.sampling.logprobs);
        common.sampling.prompt_logprobs = asked;
    }
    let Some(raw) = fields.raw("prompt") else {
        return Err(ApiError::bad_field("prompt", "it is required: a text, a list of texts, or token ids."));
    };
    let prompts = prompts(raw)?;
    let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(true);
    let best_of = best_of(&mut fields, &common, prompts.len())?;
    fields.only("suffix", &json!(""), "insertion before a suffix is not supported.")?;
    fields.refuse("prompt_embeds", "embeddings as prompts are not supported.")?;
    response_format(&mut fields)?;
    fields.finish()?;
    common.validate()?;
    Ok(CompletionRequest { common, prompts, echo, prompt_logprobs, add_special_tokens, best_of })
}

/// Choices to draw for each prompt.
fn best_of(fields: &mut Fields<'_>, common: &Common, prompts: usize) -> Result<usize, ApiError> {
    let asked = fields.size("best_of", 1..=MAX_CHOICES)?;
    let best_of = asked.unwrap_or(common.n);
    if best_of < common.n {
        let message = format!("{best_of} is below n = {}: the best n are chosen among them.", common.n);
        return Err(ApiError::bad_field("best_of", message));
    }
    if best_of > common.n && common.stream {
        let reason = "choices are ranked when all are complete: above 'n' it is supported without 'stream'.";
        return Err(ApiError::unsupported("best_of", reason));
    }
    let choices = prompts.saturating_mul(best_of);
    if choices > MAX_CHOICES {
        let field = if asked.is_some() { "best_of" } else { "n" };
        let message = format!("{prompts} prompts × {best_of} is {choices} choices: at most {MAX_CHOICES}.");
        return Err(ApiError::bad_field(field, message));
    }
    Ok(best_of)
}

fn prompts(raw: &RawValue) -> Result<Vec<Prompt>, ApiError> {
    match raw.get().as_bytes().first() {
        Some(b'"') => return Ok(vec![Prompt::Text(parse("prompt", raw, "a string")?)]),
        Some(b'[') => {}
        _ => return Err(wrong_type("prompt", raw, "a text, a list of texts, or token ids")),
    }
    let list = elements("prompt", raw, MAX_PROMPT_IDS)?;
    match list.first().and_then(|first| first.get().as_bytes().first()) {
        None => Err(ApiError::bad_field("prompt", "the list is empty.")),
        Some(b'"' | b'[') => batch(&list),
        Some(_) => Ok(vec![Prompt::Ids(ids("prompt", &list)?)]),
    }
}

fn batch(list: &[&RawValue]) -> Result<Vec<Prompt>, ApiError> {
    if list.len() > MAX_CHOICES {
        let message = format!("{} prompts are too many: at most {MAX_CHOICES}.", list.len());
        return Err(ApiError::bad_field("prompt", message));
    }
    let one = |(i, raw): (usize, &&RawValue)| {
        let name = format!("prompt[{i}]");
        match raw.get().as_bytes().first() {
            Some(b'"') => parse(&name, raw, "a string").map(Prompt::Text),
            Some(b'[') => ids(&name, &elements(&name, raw, MAX_PROMPT_IDS)?).map(Prompt::Ids),
            _ => Err(wrong_type(&name, raw, "a text or a list of token ids")),
        }
    };
    list.iter().enumerate().map(one).collect()
}

fn ids(name: &str, list: &[&RawValue]) -> Result<Vec<u32>, ApiError> {
    if list.is_empty() {
        return Err(ApiError::bad_field(name, "the list of token ids is empty."));
    }
    list.iter().map(|raw| exact_int(name, raw, 0..=u32::MAX as i128).map(|id| id as u32)).collect()
}
