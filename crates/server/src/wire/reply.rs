//! Replies as OpenAI clients expect them, with the `ledger` object in `usage`. Every number is finite: strict JSON.

use std::collections::BTreeMap;

use serde::Serialize;

/// The books of one response: what was counted, what had been predicted, and whether the two agree.
/// Summed over all choices; each choice counts its own prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LedgerReply {
    /// Prompt tokens of every choice.
    pub prompt_tokens: u64,
    /// Generated tokens of every choice, end tokens included.
    pub output_tokens: u64,
    /// Prompt tokens whose keys and values came from the prefix cache.
    pub cached_tokens: u64,
    /// What was counted where the work was done.
    #[serde(flatten)]
    pub counted: Totals,
    /// The same numbers from plan and lengths alone.
    pub predicted: Totals,
    /// True when predicted and counted are equal in every number of every choice.
    pub agree: bool,
}

/// The numbers that are entered twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Tokens that went through the model.
    pub computed_tokens: u64,
    /// FLOPs of attention.
    pub attention_flops: u64,
    /// Bytes of keys and values read by attention.
    pub kv_read_bytes: u64,
    /// Bytes of keys and values written to the cache.
    pub kv_write_bytes: u64,
    /// KV-cache pages held at peak (sum of the choices' peaks).
    pub pages_peak: u64,
}

/// `usage` of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompts, each counted once.
    pub prompt_tokens: u64,
    /// Tokens generated in all choices.
    pub completion_tokens: u64,
    /// The sum of both.
    pub total_tokens: u64,
    /// Where prompt tokens came from.
    pub prompt_tokens_details: PromptDetails,
    /// The books; absent while a choice is still running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ledger: Option<LedgerReply>,
}

/// Details of `prompt_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptDetails {
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
}

/// One token's log-probability in chat.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatLogprob {
    /// The token as text; `bytes:\xNN…` where it is not UTF-8 alone.
    pub token: String,
    /// Natural log of its probability.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Option<Vec<u8>>,
    /// Alternatives, best first (absent inside an alternative).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<Vec<ChatLogprob>>,
}

/// `logprobs` of a chat choice.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One entry per generated token.
    pub content: Vec<ChatLogprob>,
    /// Always null: this server refuses nothing in the model's name.
    pub refusal: Option<()>,
}

/// `logprobs` of a text completion: four lists of one length.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// The tokens as text.
    pub tokens: Vec<String>,
    /// Their log-probabilities; null for the first prompt token.
    pub token_logprobs: Vec<Option<f32>>,
    /// Alternatives by text; null for the first prompt token.
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where each token starts in the text, in characters.
    pub text_offset: Vec<usize>,
}

/// One candidate of `prompt_logprobs`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PromptLogprob {
    /// Natural log of its probability.
    pub logprob: f32,
    /// Its place among all tokens, 1 = best.
    pub rank: usize,
    /// The token as text.
    pub decoded_token: String,
}

/// `prompt_logprobs`: per prompt token its candidates by token id; null for the first token.
pub type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

/// Why a choice ended, beyond `finish_reason`: the stop string or the stop token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// The stop string that was met.
    Text(String),
    /// The stop token that was sampled.
    Token(u32),
}

/// An assistant message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReplyMessage {
    /// Always `assistant`.
    pub role: &'static str,
    /// The text.
    pub content: String,
    /// Always null.
    pub refusal: Option<()>,
}

/// One choice of a chat response.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// Position among the choices.
    pub index: usize,
    /// The answer.
    pub message: ReplyMessage,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `abort`.
    pub finish_reason: &'static str,
    /// What stopped it, if a stop string or stop token did.
    pub stop_reason: Option<StopReason>,
    /// Generated ids, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// A chat response.
#[derive(Debug, Serialize)]
pub struct ChatReply<'a> {
    /// Unique, `chatcmpl-…`.
    pub id: &'a str,
    /// `chat.completion`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// The model as the client named it.
    pub model: &'a str,
    /// All choices, by index.
    pub choices: Vec<ChatChoice>,
    /// Tokens and books.
    pub usage: Usage,
    /// Log-probabilities of the prompt, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Ids of the rendered prompt, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// What a streamed chat chunk adds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Delta {
    /// `assistant`, in the first chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// More text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// One choice of a streamed chat chunk.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChunkChoice {
    /// Position among the choices.
    pub index: usize,
    /// What is new.
    pub delta: Delta,
    /// Log-probabilities of the new tokens, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Null until the choice ends.
    pub finish_reason: Option<&'static str>,
    /// What stopped it, if a stop string or stop token did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// Ids of the new tokens, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// One choice of a text completion, whole or streamed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionChoice {
    /// Position among the choices.
    pub index: usize,
    /// The text (streamed: the new part).
    pub text: String,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop`, `length` or `abort`; null while a stream runs.
    pub finish_reason: Option<&'static str>,
    /// What stopped it, if a stop string or stop token did.
    pub stop_reason: Option<StopReason>,
    /// Generated ids, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Ids of the prompt, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Log-probabilities of the prompt, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// `usage` in a streamed chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ChunkUsage {
    /// `null`: the usage comes in the last chunk.
    Later(()),
    /// The usage so far, or in the end.
    Known(Usage),
}

/// The frame of a text completion and of every streamed chunk.
#[derive(Debug, Serialize)]
pub struct Frame<'a, C> {
    /// Unique, `chatcmpl-…` or `cmpl-…`.
    pub id: &'a str,
    /// `chat.completion.chunk` or `text_completion`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// The model as the client named it.
    pub model: &'a str,
    /// All choices, or those that a chunk speaks of (none in the usage chunk).
    pub choices: Vec<C>,
    /// Tokens and books; absent in a stream that did not ask.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<ChunkUsage>,
    /// Ids of the rendered chat prompt, in the first chunk, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
}

/// `GET /v1/models`.
#[derive(Clone, Debug, Serialize)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// One entry per served name.
    pub data: Vec<ModelCard>,
}

/// One served name.
#[derive(Clone, Debug, Serialize)]
pub struct ModelCard {
    /// The name that requests use.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// When the server started, Unix time in seconds.
    pub created: u64,
    /// `suanpan`.
    pub owned_by: &'static str,
    /// The name in the model's own files.
    pub root: String,
    /// Always null: no adapters.
    pub parent: Option<()>,
    /// Most tokens of prompt and completion together.
    pub max_model_len: usize,
}

/// `POST /tokenize`.
#[derive(Clone, Debug, Serialize)]
pub struct TokenizeReply {
    /// Number of tokens.
    pub count: usize,
    /// Most tokens of prompt and completion together.
    pub max_model_len: usize,
    /// The ids.
    pub tokens: Vec<u32>,
    /// The text of each token, if asked for.
    pub token_strs: Option<Vec<String>>,
}

/// `POST /detokenize`.
#[derive(Clone, Debug, Serialize)]
pub struct DetokenizeReply {
    /// The text.
    pub prompt: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_later_is_null_and_absent_usage_is_absent() {
        let frame = |usage| Frame::<u8> {
            id: "x",
            object: "o",
            created: 1,
            model: "m",
            choices: vec![],
            usage,
            prompt_token_ids: None,
        };
        assert!(!serde_json::to_string(&frame(None)).unwrap().contains("usage"));
        let text = serde_json::to_string(&frame(Some(ChunkUsage::Later(())))).unwrap();
        assert!(text.contains(r#""usage":null"#), "{text}");
    }
}
