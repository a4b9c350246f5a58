//! `GET /v1/capabilities`: every feature that a client might expect, active or not, with the reason. Nothing is silently off.

use serde::Serialize;

/// One feature of this server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capability {
    /// Its name, stable.
    pub feature: &'static str,
    /// Whether requests can use it now.
    pub active: bool,
    /// Why, or how to use it.
    pub reason: String,
}

impl Capability {
    /// A feature with its state.
    pub fn new(feature: &'static str, active: bool, reason: impl Into<String>) -> Capability {
        Capability { feature, active, reason: reason.into() }
    }
}

const ACTIVE: [(&str, &str); 9] = [
    ("chat_completions", "POST /v1/chat/completions"),
    ("completions", "POST /v1/completions: texts, token ids, lists of both"),
    ("streaming", "\"stream\": true; usage with \"stream_options\""),
    ("logprobs", "up to 20 alternatives per token, also of the prompt"),
    ("multiple_choices", "n, best_of and lists of prompts, up to 128 choices a request"),
    ("stop", "up to 16 strings, and stop_token_ids"),
    ("penalties", "presence, frequency, repetition; logit_bias; allowed_token_ids"),
    ("seed", "choice i of n draws with seed + i"),
    ("ledger", "usage.ledger: counted and predicted work of every response"),
];

const ABSENT: [(&str, &str); 8] = [
    ("tools", "there is no tool-call parser: requests with tools are refused unless tool_choice is \"none\""),
    ("structured_output", "there is no grammar engine: response_format other than text is refused"),
    ("images_audio", "text only: other parts are refused, nothing is fetched"),
    ("beam_search", "not built: use_beam_search is refused"),
    ("speculative_decoding", "not built"),
    ("adapters", "not built"),
    ("priority", "first come, first served: a priority other than 0 is refused"),
    ("embeddings", "not built: the route answers 404"),
];

/// The features of this server: `engine` says those that depend on how it was started.
pub fn list(engine: &[Capability], api_keys: bool, chat_template: bool) -> Vec<Capability> {
    let mut all: Vec<Capability> = ACTIVE.iter().map(|(f, r)| Capability::new(f, true, *r)).collect();
    if !chat_template {
        all[0] = Capability::new(
            "chat_completions",
            false,
            "the model has no chat template; give --chat-template",
        );
    }
    let keys = if api_keys { "every route but /health wants a key" } else { "no --api-key was given" };
    all.push(Capability::new("api_keys", api_keys, keys));
    all.extend_from_slice(engine);
    all.extend(ABSENT.iter().map(|(f, r)| Capability::new(f, false, *r)));
    all
}
