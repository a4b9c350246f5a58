//! A tokenizer from `tokenizer.json`, with what `tokenizer_config.json` adds: named tokens and the chat template.
//!
//! Byte-level BPE, and SentencePiece's BPE with byte fallback. Every part that changes ids (normalizer, pre-tokenizer, post-processor) is read; one that is not
//! known is refused by name, never skipped.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::Value;

use super::added::AddedToken;
use super::build::{Parts, Rules, check_size};
use super::spaces::Prefix;
use super::split::Split;
use super::steps::{MAX_STEPS, Step, Steps};
use super::{SpecialIds, Tokenizer, TokenizerError};

/// What the two files hold.
#[derive(Debug)]
pub struct TokenizerJson {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template of `tokenizer_config.json`, if it has one. A `chat_template.jinja` file beside it goes first.
    pub chat_template: Option<String>,
}

#[derive(Deserialize)]
struct Probe {
    model: ProbeModel,
}

#[derive(Deserialize)]
struct ProbeModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    merges: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct File {
    model: Bpe,
    #[serde(default)]
    added_tokens: Vec<Added>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
}

#[derive(Deserialize)]
struct Bpe {
    vocab: HashMap<String, u32>,
    merges: Vec<Pair>,
    #[serde(default)]
    ignore_merges: bool,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    single_word: bool,
}

/// A merge, written either `"left right"` or `["left", "right"]`.
struct Pair(String, String);

impl<'de> Deserialize<'de> for Pair {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairVisitor;
        impl<'de> Visitor<'de> for PairVisitor {
            type Value = Pair;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge: \"left right\" or [\"left\", \"right\"]")
            }
            fn visit_str<E: serde::de::Error>(self, merge: &str) -> Result<Pair, E> {
                match merge.split_once(' ') {
                    Some((left, right)) if !right.contains(' ') => {
                        Ok(Pair(left.to_owned(), right.to_owned()))
                    }
                    _ => Err(E::custom(format!("merge {merge:?} is not two tokens"))),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Pair, A::Error> {
                let short = |at| serde::de::Error::invalid_length(at, &"two tokens");
                let left = seq.next_element()?.ok_or_else(|| short(0))?;
                let right = seq.next_element()?.ok_or_else(|| short(1))?;
                match seq.next_element::<IgnoredAny>()? {
                    None => Ok(Pair(left, right)),
                    Some(_) => Err(short(3)),
                }
            }
        }
        deserializer.deserialize_any(PairVisitor)
    }
}

impl Tokenizer {
    /// Builds the tokenizer from the bytes of `tokenizer.json` and, if there is one, of `tokenizer_config.json`.
    pub fn from_json(tokenizer: &[u8], config: Option<&[u8]>) -> Result<TokenizerJson, TokenizerError> {
        let probe: Probe = parse("tokenizer.json", tokenizer)?;
        let kind =
            probe.model.kind.as_deref().unwrap_or(if probe.model.merges.is_some() { "BPE" } else { "none" });
        if kind != "BPE" {
            return Err(TokenizerError::unsupported("tokenizer.json: model.type", kind, "BPE"));
        }
        let file: File = parse("tokenizer.json", tokenizer)?;
        let config: Value = config.map_or(Ok(Value::Null), |c| parse("tokenizer_config.json", c))?;
        let parts = file.into_parts(&config)?;
        Ok(TokenizerJson { tokenizer: parts.build()?, chat_template: chat_template(&config)? })
    }
}

fn parse<'a, T: Deserialize<'a>>(name: &str, bytes: &'a [u8]) -> Result<T, TokenizerError> {
    serde_json::from_slice(bytes).map_err(|e| TokenizerError::damaged(name, e))
}

impl File {
    fn into_parts(self, config: &Value) -> Result<Parts, TokenizerError> {
        const FIELD: &str = "tokenizer.json: model.vocab";
        let spaces = if self.model.byte_fallback { Some(self.spaces()?) } else { None };
        self.refuse_options(spaces.is_some())?;
        let highest = self.model.vocab.values().copied().chain(self.added_tokens.iter().map(|t| t.id)).max();
        let vocab_size = highest.map_or(0, |id| id as usize + 1);
        check_size(FIELD, vocab_size)?;
        let mut vocab = self.model.vocab;
        // A run of U+2581 never stands in text before it is normalised: such a token is made by merging, as any other.
        let by_merging = |t: &Added| {
            spaces.is_some()
                && !t.special
                && t.content.contains('\u{2581}')
                && vocab.get(&t.content) == Some(&t.id)
        };
        let added: Vec<Added> = self.added_tokens.into_iter().filter(|t| !by_merging(t)).collect();
        for token in &added {
            vocab.remove(&token.content);
        }
        let added: Vec<AddedToken> = added.into_iter().map(Added::into_token).collect();
        let (mut prefix, suffix) = match &self.post_processor {
            Some(post) => around(post)?,
            None => (Vec::new(), Vec::new()),
        };
        let special = special_ids(config, &added, prefix.first().copied());
        if prefix.is_empty() && config.get("add_bos_token") == Some(&Value::Bool(true)) {
            prefix.extend(special.bos);
        }
        let merges = self.model.merges.into_iter().map(|p| (p.0, p.1)).collect();
        let rules = match spaces {
            Some(prefix) => Rules::Ranks { merges, prefix },
            None => Rules::ByteLevel {
                split: split_of(self.pre_tokenizer.as_ref())?,
                nfc: composes(self.normalizer.as_ref())?,
                merges,
                ignore_merges: self.model.ignore_merges,
            },
        };
        Ok(Parts {
            field: FIELD,
            tokens: vocab.into_iter().collect(),
            rules,
            added,
            vocab_size,
            special,
            prefix,
            suffix,
        })
    }

    /// Where a SentencePiece vocabulary puts a space, by its normalizer and pre-tokenizer.
    fn spaces(&self) -> Result<Prefix, TokenizerError> {
        let steps = |part: &Option<Value>, list: &str| match part.as_ref().filter(|p| !p.is_null()) {
            None => Vec::new(),
            Some(one) => match one.get(list).and_then(Value::as_array) {
                Some(many) => many.clone(),
                None => vec![one.clone()],
            },
        };
        let (mut prefix, mut replaced) = (Prefix::Never, false);
        for step in steps(&self.normalizer, "normalizers") {
            let text = |key: &str| step.get(key).and_then(Value::as_str);
            match kind_of(&step).as_str() {
                "Prepend" if text("prepend") == Some("\u{2581}") => prefix = Prefix::Each,
                "Replace" if is_space(&step) && text("content") == Some("\u{2581}") => replaced = true,
                _ => return Err(refuse("normalizer", &step, "Prepend and Replace of a space by U+2581")),
            }
        }
        for step in steps(&self.pre_tokenizer, "pretokenizers") {
            let scheme = step.get("prepend_scheme").and_then(Value::as_str).unwrap_or("always");
            match (kind_of(&step).as_str(), scheme) {
                // No space is left that it could cut at.
                ("Split", _) if replaced && is_space(&step) => {}
                ("Metaspace", "never") if !replaced => replaced = true,
                ("Metaspace", "first") if !replaced => (prefix, replaced) = (Prefix::First, true),
                ("Metaspace", "always") if !replaced => (prefix, replaced) = (Prefix::Each, true),
                _ => return Err(refuse("pre_tokenizer", &step, "none, Metaspace, or a Split at spaces")),
            }
        }
        if !replaced {
            return Err(refuse(
                "normalizer",
                &"none that replaces spaces",
                "Replace of a space by U+2581, or Metaspace",
            ));
        }
        Ok(prefix)
    }

    /// Options that would change ids and are not run here. `spaces`: a SentencePiece vocabulary, whose normalizer has been read.
    fn refuse_options(&self, spaces: bool) -> Result<(), TokenizerError> {
        let refuse =
            |field: &str, found: &dyn fmt::Display, supported: &str| Err(refuse(field, found, supported));
        let filled = |text: &Option<String>| text.clone().filter(|t| !t.is_empty());
        // A sequence undoes what the normalizer did, which its reading has checked.
        let decoder = if spaces { "Sequence" } else { "ByteLevel" };
        if let Some(found) = self.decoder.as_ref().filter(|d| kind_of(d) != decoder) {
            return refuse("decoder", &kind_of(found), decoder);
        }
        if let Some(dropout) = self.model.dropout.filter(|&d| d != 0.0) {
            return refuse("model.dropout", &dropout, "none or 0");
        }
        if let Some(unk) = filled(&self.model.unk_token).filter(|_| !spaces) {
            return refuse("model.unk_token", &unk, "none (byte-level vocabularies have no unknown text)");
        }
        if let Some(prefix) = filled(&self.model.continuing_subword_prefix) {
            return refuse("model.continuing_subword_prefix", &prefix, "none");
        }
        if let Some(suffix) = filled(&self.model.end_of_word_suffix) {
            return refuse("model.end_of_word_suffix", &suffix, "none");
        }
        if spaces && self.model.ignore_merges {
            return refuse("model.ignore_merges", &true, "false beside byte_fallback");
        }
        Ok(())
    }
}

impl Added {
    fn into_token(self) -> AddedToken {
        let Added { id, content, special, lstrip, rstrip, single_word } = self;
        AddedToken { id, content, control: special, lstrip, rstrip, single_word }
    }
}

fn refuse(field: &str, found: &dyn fmt::Display, supported: &str) -> TokenizerError {
    TokenizerError::unsupported(&format!("tokenizer.json: {field}"), found, supported)
}

/// Whether a step's pattern is one space.
fn is_space(step: &Value) -> bool {
    step.pointer("/pattern/String").and_then(Value::as_str) == Some(" ")
}

fn kind_of(part: &Value) -> String {
    part.get("type").and_then(Value::as_str).unwrap_or("of no type").to_owned()
}

fn flag(part: &Value, name: &str, default: bool) -> bool {
    part.get(name).and_then(Value::as_bool).unwrap_or(default)
}

/// Whether a byte-level vocabulary's normalizer composes a text (NFC); any other normalizer is refused.
fn composes(normalizer: Option<&Value>) -> Result<bool, TokenizerError> {
    let Some(one) = normalizer.filter(|n| !n.is_null()) else { return Ok(false) };
    match (kind_of(one).as_str(), one.get("normalizers").and_then(Value::as_array)) {
        ("NFC", _) => Ok(true),
        ("Sequence", Some(many)) => many.iter().try_fold(false, |so_far, n| Ok(composes(Some(n))? || so_far)),
        (other, _) => Err(refuse("normalizer", &other, "none, NFC, a Sequence of these")),
    }
}

/// Recognises a pre-tokenizer by its parts.
fn split_of(pre: Option<&Value>) -> Result<Split, TokenizerError> {
    let refuse = |found: String| {
        let supported = "ByteLevel; Sequence[Digits(individual), ByteLevel]; Sequence[Split(the published pattern of GPT-2, Llama 3, \
                         Qwen 2, GPT-4o or Tekken), ByteLevel]; Sequence of Digits and isolating Splits by classes, literals, groups and single repetitions, \
                         ByteLevel; each with add_prefix_space = false";
        TokenizerError::unsupported("tokenizer.json: pre_tokenizer", found, supported)
    };
    let pre = pre.filter(|p| !p.is_null()).ok_or_else(|| refuse("none".into()))?;
    let list = match pre.get("pretokenizers").and_then(Value::as_array) {
        Some(list) => list.as_slice(),
        None => std::slice::from_ref(pre),
    };
    let (last, before) = list.split_last().ok_or_else(|| refuse("an empty sequence".into()))?;
    if kind_of(last) != "ByteLevel" || flag(last, "add_prefix_space", true) {
        return Err(refuse(last.to_string()));
    }
    let own_pattern = flag(last, "use_regex", true);
    let known = match before {
        [split] if !own_pattern => isolated(split).and_then(Split::from_pattern),
        _ => None,
    };
    if let Some(known) = known {
        return Ok(known);
    }
    match (before, own_pattern) {
        ([], true) => Ok(Split::Gpt2),
        ([digits], true) if kind_of(digits) == "Digits" && flag(digits, "individual_digits", false) => {
            Ok(Split::DigitsGpt2)
        }
        _ if (1..=MAX_STEPS).contains(&before.len()) => {
            let step = |part: &Value| step_of(part).ok_or_else(|| refuse(part.to_string()));
            let mut steps = before.iter().map(step).collect::<Result<Vec<_>, _>>()?;
            steps.extend(own_pattern.then_some(Step::Gpt2));
            Ok(Split::Steps(Steps::new(steps)))
        }
        _ => Err(refuse(pre.to_string())),
    }
}

/// The pattern of a Split whose matches stand apart.
fn isolated(split: &Value) -> Option<&str> {
    let isolated = split.get("behavior").and_then(Value::as_str) == Some("Isolated");
    let whole = kind_of(split) == "Split" && isolated && !flag(split, "invert", false);
    split.pointer("/pattern/Regex").and_then(Value::as_str).filter(|_| whole)
}

/// One step of a sequence.
fn step_of(part: &Value) -> Option<Step> {
    match kind_of(part).as_str() {
        "Digits" if flag(part, "individual_digits", false) => Some(Step::EachDigit),
        "Digits" => Some(Step::Digits),
        _ => isolated(part).and_then(Step::pattern),
    }
}

/// Control tokens that the post-processor puts before and after a text.
fn around(post: &Value) -> Result<(Vec<u32>, Vec<u32>), TokenizerError> {
    const FIELD: &str = "tokenizer.json: post_processor";
    match kind_of(post).as_str() {
        "of no type" if post.is_null() => Ok((Vec::new(), Vec::new())),
        "ByteLevel" => Ok((Vec::new(), Vec::new())),
        "Sequence" => {
            let (mut before, mut after) = (Vec::new(), Vec::new());
            for part in post.get("processors").and_then(Value::as_array).into_iter().flatten() {
                let (b, a) = around(part)?;
                before.extend(b);
                after.extend(a);
            }
            Ok((before, after))
        }
        "TemplateProcessing" => {
            let damaged =
                || TokenizerError::damaged(FIELD, "TemplateProcessing without a usable `single` template");
            let single = post.get("single").and_then(Value::as_array).ok_or_else(damaged)?;
            let (mut before, mut after, mut seen) = (Vec::new(), Vec::new(), false);
            for item in single {
                let Some(name) = item.pointer("/SpecialToken/id").and_then(Value::as_str) else {
                    seen = true;
                    continue;
                };
                let ids = post.get("special_tokens").and_then(|t| t.get(name)).and_then(|t| t.get("ids"));
                let ids: Vec<u32> = ids.and_then(|i| Vec::deserialize(i).ok()).ok_or_else(damaged)?;
                if seen { after.extend(ids) } else { before.extend(ids) }
            }
            Ok((before, after))
        }
        other => {
            Err(TokenizerError::unsupported(FIELD, other, "ByteLevel, TemplateProcessing, Sequence of these"))
        }
    }
}

/// Ids of the tokens that tokenizer_config.json names; a begin token that the post-processor writes counts as named.
fn special_ids(config: &Value, added: &[AddedToken], first: Option<u32>) -> SpecialIds {
    let named = |key: &str| {
        let text = config.get(key).and_then(token_text)?;
        added.iter().find(|t| t.content == text).map(|t| t.id)
    };
    SpecialIds {
        bos: named("bos_token").or(first),
        eos: named("eos_token"),
        unk: named("unk_token"),
        pad: named("pad_token"),
    }
}

/// A token is written as its text or as an object with the text in `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// One template, or a list of named ones of which `default` is meant.
fn chat_template(config: &Value) -> Result<Option<String>, TokenizerError> {
    let damaged = || {
        TokenizerError::damaged(
            "tokenizer_config.json: chat_template",
            "neither a text nor a list of named texts",
        )
    };
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(list)) => {
            let default = list.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
            let text = default.and_then(|t| t.get("template")).and_then(Value::as_str).ok_or_else(damaged)?;
            Ok(Some(text.to_owned()))
        }
        Some(_) => Err(damaged()),
    }
}
