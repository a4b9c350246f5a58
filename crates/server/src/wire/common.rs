//! The fields that chat and text completions share. Ranges that need the model (vocabulary, context) are checked later.

use serde_json::{Value, json};
use suanpan_engine::params::{MAX_LOGPROBS, MAX_STOPS, MAX_TOKEN_IDS, SamplingParams};

use super::fields::{Fields, elements, parse, wrong_type};
use crate::error::{ApiError, shorten};

/// Most choices one request may ask for (prompts times `n`).
pub const MAX_CHOICES: usize = 128;
/// Values of `cache_priority`.
const CACHE_PRIORITIES: std::ops::RangeInclusive<i128> = -100..=100;
/// Longest `cache_salt` and `request_id`, in characters.
const MAX_NAME_CHARS: usize = 1024;

/// What both generation routes accept, apart from the prompt itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// The model asked for; absent = the one served.
    pub model: Option<String>,
    /// Choices per prompt.
    pub n: usize,
    /// Whether the reply is an event stream.
    pub stream: bool,
    /// Whether the stream ends with a usage chunk.
    pub include_usage: bool,
    /// Whether every chunk carries the usage so far.
    pub continuous_usage: bool,
    /// How tokens are chosen and when a choice ends. Choice i of `n` uses seed + i (wrapping).
    pub sampling: SamplingParams,
    /// Whether token ids of prompt and choices are returned.
    pub return_token_ids: bool,
    /// Splits the prefix cache: equal prompts with other salts never share pages.
    pub cache_salt: Option<String>,
    /// Cached prefixes of requests with a higher number go later, under the eviction policy `priority`.
    pub cache_priority: i32,
    /// The client's name for the request, used in logs only.
    pub request_id: Option<String>,
}

impl Common {
    /// Takes the shared fields out of `fields`. `logprobs` is left to the routes, which spell it differently.
    pub(super) fn take(fields: &mut Fields<'_>) -> Result<Common, ApiError> {
        let model = fields.string("model")?;
        let n = fields.size("n", 1..=MAX_CHOICES)?.unwrap_or(1);
        let stream = fields.bool("stream")?.unwrap_or(false);
        let (include_usage, continuous_usage) = stream_options(fields, stream)?;
        let sampling = sampling(fields)?;
        let common = Common {
            model,
            n,
            stream,
            include_usage,
            continuous_usage,
            sampling,
            return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
            cache_salt: name(fields, "cache_salt")?,
            cache_priority: fields.int("cache_priority", CACHE_PRIORITIES)?.map_or(0, |p| p as i32),
            request_id: name(fields, "request_id")?,
        };
        refuse_what_is_not_built(fields)?;
        Ok(common)
    }

    /// Checks what depends on several fields, and every range, by the engine's rules. The vocabulary comes later.
    pub(super) fn validate(&self) -> Result<(), ApiError> {
        if self.stream && self.sampling.prompt_logprobs.is_some() {
            let reason = "log-probabilities of the prompt are returned only without 'stream'.";
            return Err(ApiError::unsupported("prompt_logprobs", reason));
        }
        self.sampling.validate(usize::MAX).map_err(ApiError::from)
    }
}

/// Types are judged here, ranges by the engine's own rules (see [`Common::validate`]).
fn sampling(fields: &mut Fields<'_>) -> Result<SamplingParams, ApiError> {
    let plain = SamplingParams::default();
    Ok(SamplingParams {
        temperature: fields.float("temperature")?.unwrap_or(plain.temperature),
        top_p: fields.float("top_p")?.unwrap_or(plain.top_p),
        top_k: fields.int("top_k", -1..=i32::MAX as i128)?.map_or(plain.top_k, |k| k as i64),
        min_p: fields.float("min_p")?.unwrap_or(plain.min_p),
        presence_penalty: fields.float("presence_penalty")?.unwrap_or(plain.presence_penalty),
        frequency_penalty: fields.float("frequency_penalty")?.unwrap_or(plain.frequency_penalty),
        repetition_penalty: fields.float("repetition_penalty")?.unwrap_or(plain.repetition_penalty),
        seed: fields.int("seed", 0..=u64::MAX as i128)?.map(|s| s as u64),
        max_tokens: fields.size("max_tokens", 0..=i64::MAX as usize)?,
        min_tokens: fields.size("min_tokens", 0..=i64::MAX as usize)?.unwrap_or(plain.min_tokens),
        stop: stops(fields)?,
        stop_token_ids: token_ids(fields, "stop_token_ids")?.unwrap_or_default(),
        include_stop_str_in_output: fields
            .bool("include_stop_str_in_output")?
            .unwrap_or(plain.include_stop_str_in_output),
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(plain.ignore_eos),
        logprobs: None,
        prompt_logprobs: fields.size("prompt_logprobs", 0..=MAX_LOGPROBS)?,
        logit_bias: logit_bias(fields)?,
        allowed_token_ids: token_ids(fields, "allowed_token_ids")?,
        skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(plain.skip_special_tokens),
    })
}

fn stream_options(fields: &mut Fields<'_>, stream: bool) -> Result<(bool, bool), ApiError> {
    let Some(raw) = fields.raw("stream_options") else { return Ok((false, false)) };
    if !stream {
        return Err(ApiError::unsupported("stream_options", "only allowed when 'stream' is true."));
    }
    let mut options = Fields::of_value("stream_options", raw)?;
    let include = options.bool("include_usage")?.unwrap_or(false);
    let continuous = options.bool("continuous_usage_stats")?.unwrap_or(false);
    options.note(&["include_obfuscation"])?;
    options.finish()?;
    Ok((include, include && continuous))
}

fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let name = fields.name("stop");
    let Some(raw) = fields.raw("stop") else { return Ok(Vec::new()) };
    match raw.get().as_bytes().first() {
        Some(b'"') => Ok(vec![parse(&name, raw, "a string")?]),
        Some(b'[') => {
            let list = elements(&name, raw, MAX_STOPS)?;
            list.into_iter().map(|raw| parse(&name, raw, "a list of strings")).collect()
        }
        _ => Err(wrong_type(&name, raw, "a string or a list of strings")),
    }
}

fn token_ids(fields: &mut Fields<'_>, field: &str) -> Result<Option<Vec<u32>>, ApiError> {
    let ids = fields.ints(field, MAX_TOKEN_IDS, 0..=u32::MAX as i128)?;
    Ok(ids.map(|ids| ids.into_iter().map(|id| id as u32).collect()))
}

fn logit_bias(fields: &mut Fields<'_>) -> Result<Vec<(u32, f64)>, ApiError> {
    let name = fields.name("logit_bias");
    let Some(raw) = fields.raw("logit_bias") else { return Ok(Vec::new()) };
    let mut entries = Fields::of_value(&name, raw)?;
    let keys = entries.keys();
    if keys.len() > MAX_TOKEN_IDS {
        let message = format!("{} entries are too many: at most {MAX_TOKEN_IDS} are supported.", keys.len());
        return Err(ApiError::bad_field(name, message));
    }
    let mut bias = Vec::with_capacity(keys.len());
    for key in keys {
        let Ok(id) = key.parse::<u32>() else {
            return Err(ApiError::bad_field(name, format!("the key '{}' is not a token id.", shorten(&key))));
        };
        if let Some(v) = entries.float(&key)? {
            bias.push((id, v));
        }
    }
    bias.sort_by_key(|entry| entry.0);
    if bias.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(ApiError::bad_field(name, "a token id is given twice."));
    }
    Ok(bias)
}

/// A client-chosen label: 1 to 1,024 characters, no control characters (it may reach a log line).
fn name(fields: &mut Fields<'_>, field: &str) -> Result<Option<String>, ApiError> {
    let Some(value) = fields.string(field)? else { return Ok(None) };
    let chars = value.chars().count();
    if chars == 0 || chars > MAX_NAME_CHARS || value.chars().any(char::is_control) {
        let message =
            format!("it has {chars} characters: supported: 1 to {MAX_NAME_CHARS}, no control characters.");
        return Err(ApiError::bad_field(fields.name(field), message));
    }
    Ok(Some(value))
}

/// Fields that exist elsewhere and are not honoured here: refused by name unless they ask for nothing.
fn refuse_what_is_not_built(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    fields.only("priority", &json!(0), "one queue, first come first served: only 0 is supported.")?;
    fields.only("use_beam_search", &json!(false), "beam search is not supported.")?;
    fields.only("length_penalty", &json!(1.0), "beam search is not supported.")?;
    fields.only("spaces_between_special_tokens", &json!(true), "only true is supported.")?;
    fields.only("return_tokens_as_token_ids", &json!(false), "use 'return_token_ids' instead.")?;
    fields.only("truncation_side", &json!("left"), "prompts are never cut here.")?;
    fields.refuse("truncate_prompt_tokens", "prompts are never cut here: send what should be read.")?;
    fields.refuse("bad_words", "a list of forbidden words is not supported.")?;
    for field in
        ["structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"]
    {
        fields.refuse(field, "output constrained by a grammar is not supported.")?;
    }
    fields.refuse("kv_transfer_params", "moving K/V between servers is not supported.")?;
    fields.refuse("lora", "adapters are not supported.")?;
    fields.refuse("session_id", "sessions are not supported: equal prefixes are found by content.")?;
    fields.refuse("logits_processors", "code in requests is not supported.")?;
    fields.refuse("stream_interval", "every step is streamed.")?;
    fields.refuse("repetition_detection", "not supported.")?;
    fields.only("store", &json!(false), "completions are not stored: only false is supported.")?;
    service_tier(fields)?;
    // Labels for the caller's own books: they change no reply.
    fields.note(&["user", "metadata", "safety_identifier", "prompt_cache_key"])
}

fn service_tier(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    match fields.string("service_tier")?.as_deref() {
        None | Some("auto" | "default") => Ok(()),
        Some(_) => Err(ApiError::unsupported("service_tier", "there is one tier: auto or default.")),
    }
}

/// Refuses `response_format` unless it asks for plain text.
pub(super) fn response_format(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let Some(value) = fields.value("response_format")? else { return Ok(()) };
    match value.get("type").and_then(Value::as_str) {
        Some("text") if value.as_object().is_some_and(|o| o.len() == 1) => Ok(()),
        _ => Err(ApiError::unsupported(
            "response_format",
            "only {\"type\": \"text\"} is supported; output constrained by a schema is not.",
        )),
    }
}
