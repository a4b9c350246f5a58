//! From the engine's log-probabilities to OpenAI's two spellings of them.
//!
//! A token that is not UTF-8 alone reads `bytes:\xNN…`. The engine clips at −9999: no number here is infinite.

use std::collections::BTreeMap;

use suanpan_engine::logprobs::{PositionLogprobs, TokenLogprob};
use suanpan_model::Tokenizer;

use crate::wire::{ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs};

/// The text of one token on its own.
pub(crate) fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(e) => {
            let hex: String = e.as_bytes().iter().map(|b| format!("\\x{b:02x}")).collect();
            format!("bytes:{hex}")
        }
    }
}

/// `logprobs` of a chat choice or chunk.
pub(crate) fn chat(tokenizer: &Tokenizer, positions: &[PositionLogprobs]) -> ChatLogprobs {
    let entry = |t: &TokenLogprob, top: Option<Vec<ChatLogprob>>| ChatLogprob {
        token: token_text(tokenizer, t.id),
        logprob: t.logprob,
        bytes: tokenizer.token_bytes(t.id),
        top_logprobs: top,
    };
    let position = |p: &PositionLogprobs| {
        let top = p.top.iter().map(|t| entry(t, None)).collect();
        entry(&p.token, Some(top))
    };
    ChatLogprobs { content: positions.iter().map(position).collect(), refusal: None }
}

/// Adds `positions` to the lists of a text completion. `offset` is where the first of them starts, in characters, and
/// moves to where the next one will. `top` alternatives are kept.
pub(crate) fn append(
    tokenizer: &Tokenizer,
    lists: &mut CompletionLogprobs,
    positions: &[PositionLogprobs],
    top: usize,
    offset: &mut usize,
) {
    for p in positions {
        let best = p.top.iter().take(top);
        // The token itself is always among its alternatives.
        let alternatives = best.chain([&p.token]).map(|t| (token_text(tokenizer, t.id), t.logprob));
        lists.tokens.push(token_text(tokenizer, p.token.id));
        lists.token_logprobs.push(Some(p.token.logprob));
        lists.top_logprobs.push(Some(alternatives.collect()));
        lists.text_offset.push(*offset);
        *offset += p.text.chars().count();
    }
}

/// The lists of an echoed prompt of `ids` that reads `text`, and where the output starts.
pub(crate) fn echoed(
    tokenizer: &Tokenizer,
    ids: &[u32],
    text: &str,
    positions: &[Option<PositionLogprobs>],
    top: usize,
) -> (CompletionLogprobs, usize) {
    let end = text.chars().count();
    let known: Vec<PositionLogprobs> = positions.iter().flatten().cloned().collect();
    let after_first: usize = known.iter().map(|p| p.text.chars().count()).sum();
    let mut lists = CompletionLogprobs::default();
    if let Some(&first) = ids.first() {
        lists.tokens.push(token_text(tokenizer, first));
        lists.token_logprobs.push(None);
        lists.top_logprobs.push(None);
        lists.text_offset.push(0);
    }
    let mut offset = end.saturating_sub(after_first);
    append(tokenizer, &mut lists, &known, top, &mut offset);
    (lists, end)
}

/// vLLM's `prompt_logprobs`.
pub(crate) fn prompt(tokenizer: &Tokenizer, positions: &[Option<PositionLogprobs>]) -> PromptLogprobs {
    let candidate = |t: &TokenLogprob| {
        (t.id, PromptLogprob { logprob: t.logprob, rank: t.rank, decoded_token: token_text(tokenizer, t.id) })
    };
    let position = |p: &PositionLogprobs| -> BTreeMap<u32, PromptLogprob> {
        p.top.iter().chain([&p.token]).map(candidate).collect()
    };
    positions.iter().map(|p| p.as_ref().map(position)).collect()
}
