//! From the prompts of a request to token ids that fit the model. Runs off the async threads: a prompt may be long.

use suanpan_engine::SamplingParams;
use suanpan_model::Model;
use suanpan_model::template::TemplateError;

use crate::error::ApiError;
use crate::wire::{Conversation, Prompt};

/// One prompt, ready to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    /// Token ids, at least one, all inside the vocabulary.
    pub ids: Vec<u32>,
    /// The text, as `echo` returns it.
    pub text: String,
}

/// Ids of a text or id prompt; `name` is the field in errors.
pub(crate) fn completion(
    model: &Model,
    name: &str,
    prompt: &Prompt,
    add_special: bool,
    skip_special: bool,
) -> Result<Ready, ApiError> {
    match prompt {
        Prompt::Ids(ids) => {
            check_ids(model, name, ids)?;
            Ok(Ready { text: model.tokenizer.decode(ids, skip_special), ids: ids.clone() })
        }
        Prompt::Text(text) => {
            let ids = text_ids(model, name, text, add_special)?;
            if ids.is_empty() {
                return Err(ApiError::bad_field(name, "it is empty, and this model has no start token."));
            }
            Ok(Ready { text: text.clone(), ids })
        }
    }
}

/// Ids of a conversation in the model's own chat format. Control tokens spelled inside messages stay text.
pub(crate) fn chat(model: &Model, conversation: &Conversation) -> Result<Vec<u32>, ApiError> {
    let Some(template) = &model.chat_template else {
        let reason =
            "this model has no chat template: use /v1/completions, or start the server with --chat-template.";
        return Err(ApiError::unsupported("messages", reason));
    };
    let (messages, kwargs) = (conversation.to_value(), &conversation.chat_template_kwargs);
    let ids = template
        .encode(&model.tokenizer, &messages, conversation.add_generation_prompt, None, kwargs)
        .map_err(|e| match e {
            TemplateError::Input { field, found, supported } => {
                ApiError::bad_field(field, format!("found {found}; supported: {supported}."))
            }
            other => ApiError::bad_field("messages", format!("{other}.")),
        })?;
    if ids.is_empty() {
        return Err(ApiError::bad_field("messages", "the conversation renders to an empty prompt."));
    }
    Ok(ids)
}

/// Ids of a text whose author writes the whole prompt: control tokens spelled in it are meant.
pub(crate) fn text_ids(
    model: &Model,
    name: &str,
    text: &str,
    add_special: bool,
) -> Result<Vec<u32>, ApiError> {
    model
        .tokenizer
        .encode_with_specials(text, add_special)
        .map_err(|e| ApiError::bad_field(name, format!("it cannot be turned into tokens: {e}.")))
}

/// Refuses ids outside the vocabulary.
pub(crate) fn check_ids(model: &Model, name: &str, ids: &[u32]) -> Result<(), ApiError> {
    let vocab = model.config.vocab_size;
    match ids.iter().find(|id| **id as usize >= vocab) {
        None => Ok(()),
        Some(id) => {
            let message = format!("token id {id} is outside the vocabulary: supported: 0 to {}.", vocab - 1);
            Err(ApiError::bad_field(name, message))
        }
    }
}

/// Most tokens the completion may have: what was asked if it fits beside the prompt, else the shorter of `default` and
/// the rest of the context. `name` is the field that holds the prompt.
pub(crate) fn budget(
    limit: usize,
    name: &str,
    prompt_tokens: usize,
    asked: Option<usize>,
    default: usize,
) -> Result<usize, ApiError> {
    let room = limit.saturating_sub(prompt_tokens);
    match asked {
        Some(0) if prompt_tokens <= limit => Ok(0),
        Some(n) if n <= room && n > 0 => Ok(n),
        Some(n) => Err(ApiError::context_length(name, limit, prompt_tokens, Some(n))),
        None if room == 0 => Err(ApiError::context_length(name, limit, prompt_tokens, None)),
        None => Ok(room.min(default)),
    }
}

/// The parameters of one prompt: its own `max_tokens`, everything checked against the vocabulary.
pub(crate) fn params(
    model: &Model,
    asked: &SamplingParams,
    max_tokens: usize,
) -> Result<SamplingParams, ApiError> {
    let params = SamplingParams { max_tokens: Some(max_tokens), ..asked.clone() };
    params.validate(model.config.vocab_size)?;
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_errors_name_the_true_limit_and_never_a_negative_rest() {
        let ask = |prompt, asked| budget(2048, "prompt", prompt, asked, usize::MAX);
        assert_eq!(ask(8, Some(2040)).unwrap(), 2040);
        assert_eq!(ask(2047, None).unwrap(), 1);
        assert_eq!(ask(2000, None).unwrap(), 48);
        assert_eq!(budget(2048, "prompt", 2000, None, 16).unwrap(), 16);
        for (prompt, asked, parts) in [
            (8, Some(2045), vec!["2048", "8 in the prompt", "2045 in the completion"]),
            (2048, None, vec!["2048", "leaves no room"]),
            (3000, None, vec!["2048", "3000"]),
            (3000, Some(0), vec!["2048", "3000"]),
            (8, Some(2041), vec!["2048", "2049", "8 in the prompt", "2041 in the completion"]),
            (8, Some(usize::MAX), vec!["2048", "8 in the prompt"]),
        ] {
            let e = ask(prompt, asked).unwrap_err();
            assert_eq!((e.code, e.param.as_deref()), (Some("context_length_exceeded"), Some("prompt")));
            assert!(parts.iter().all(|p| e.message.contains(p)) && !e.message.contains('-'), "{e}");
        }
    }
}
