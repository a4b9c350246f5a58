//! OpenAI's JSON, both ways: strict requests in, typed replies out. Pure: no engine, no model, no clock.

mod chat;
mod common;
mod completion;
mod fields;
mod reply;
mod tokenize;

#[cfg(test)]
mod tests;

pub use chat::{ChatRequest, Conversation, Message, parse_chat};
pub use common::{Common, MAX_CHOICES};
pub use completion::{CompletionRequest, Prompt, parse_completion};
pub use reply::*;
pub use tokenize::{DetokenizeRequest, TokenizeInput, TokenizeRequest, parse_detokenize, parse_tokenize};
