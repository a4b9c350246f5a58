//! `POST /tokenize` and `POST /detokenize`: the requests.

use super::chat::Conversation;
use super::fields::Fields;
use crate::error::ApiError;

/// Most token ids turned into text at once.
const MAX_IDS: usize = 1 << 26;

/// What to turn into token ids.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeInput {
    /// A text, with or without the tokenizer's start token.
    Prompt {
        /// The text, possibly empty.
        text: String,
        /// Whether the start token is added.
        add_special_tokens: bool,
    },
    /// A conversation, rendered by the chat template.
    Chat(Conversation),
}

/// A request of `/tokenize`.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// The model asked for; absent = the one served.
    pub model: Option<String>,
    /// What to turn into token ids.
    pub input: TokenizeInput,
    /// Whether the text of each token is returned too.
    pub return_token_strs: bool,
}

/// A request of `/detokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The model asked for; absent = the one served.
    pub model: Option<String>,
    /// Token ids, not yet checked against the vocabulary.
    pub tokens: Vec<u32>,
}

/// Reads a request of `/tokenize`; pure, and total on any bytes.
pub fn parse_tokenize(body: &[u8]) -> Result<TokenizeRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let model = fields.string("model")?;
    let return_token_strs = fields.bool("return_token_strs")?.unwrap_or(false);
    let input = match fields.string("prompt")? {
        Some(text) => {
            let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(true);
            TokenizeInput::Prompt { text, add_special_tokens }
        }
        None if !fields.keys().iter().any(|key| key == "messages") => {
            return Err(ApiError::bad_field("prompt", "it is required: a text (or 'messages')."));
        }
        None => TokenizeInput::Chat(Conversation::take(&mut fields)?),
    };
    fields.finish()?;
    Ok(TokenizeRequest { model, input, return_token_strs })
}

/// Reads a request of `/detokenize`; pure, and total on any bytes.
pub fn parse_detokenize(body: &[u8]) -> Result<DetokenizeRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let model = fields.string("model")?;
    let Some(ids) = fields.ints("tokens", MAX_IDS, 0..=u32::MAX as i128)? else {
        return Err(ApiError::bad_field("tokens", "it is required: a list of token ids."));
    };
    fields.finish()?;
    Ok(DetokenizeRequest { model, tokens: ids.into_iter().map(|id| id as u32).collect() })
}
