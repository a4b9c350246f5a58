//! A tokenizer from the vocabulary inside a GGUF file (`tokenizer.ggml.*`).
//!
//! Byte-level BPE (`tokenizer.ggml.model = gpt2`) and SentencePiece by scores (`llama`); other kinds are refused by name.

use crate::error::ModelError;
use crate::gguf::Gguf;

use super::added::AddedToken;
use super::build::{Parts, Rules, check_size};
use super::spaces::{Prefix, SPACE};
use super::split::Split;
use super::{SpecialIds, Tokenizer, TokenizerError};

/// What a GGUF file says about its tokenizer. Fields are named after their keys.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`.
    pub model: String,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`, by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`, by id; may be empty: then only the named ids are control tokens.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.scores`, by id; SentencePiece only.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.add_space_prefix`; SentencePiece only.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.merges`, in order of rank, each `left right`.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
}

/// Values of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

impl GgufVocab {
    /// Reads the keys of an opened file. Refuses wrong types; what the values mean is checked by [`Tokenizer::from_gguf`].
    pub fn read(gguf: &Gguf) -> Result<GgufVocab, ModelError> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let id = |name: &str| -> Result<Option<u32>, ModelError> {
            let id = gguf.uint(&key(name))?.map(u32::try_from).transpose();
            id.map_err(|_| gguf.bad(format!("metadata {}", key(name)), "an id above 2^32", "a token id"))
        };
        let owned =
            |list: Option<Vec<&str>>| list.unwrap_or_default().into_iter().map(String::from).collect();
        let Some(model) = gguf.string(&key("model"))? else {
            return Err(ModelError::missing(
                gguf.name(),
                format!("metadata {}", key("model")),
                "the tokenizer",
            ));
        };
        let types = gguf.ints(&key("token_type"))?.unwrap_or_default().into_iter().map(i32::try_from);
        let token_types: Result<_, _> = types.collect();
        let token_types = token_types.map_err(|_| {
            gguf.bad(format!("metadata {}", key("token_type")), "a type above 2^31", "types 1 to 6")
        });
        Ok(GgufVocab {
            model: model.into(),
            pre: gguf.string(&key("pre"))?.map(String::from),
            tokens: owned(gguf.strings(&key("tokens"))?),
            token_types: token_types?,
            scores: gguf.floats(&key("scores"))?.unwrap_or_default(),
            add_space_prefix: gguf.boolean(&key("add_space_prefix"))?,
            merges: owned(gguf.strings(&key("merges"))?),
            bos: id("bos_token_id")?,
            eos: id("eos_token_id")?,
            unk: id("unknown_token_id")?,
            pad: id("padding_token_id")?,
            add_bos: gguf.boolean(&key("add_bos_token"))?,
            add_eos: gguf.boolean(&key("add_eos_token"))?,
        })
    }
}

impl Tokenizer {
    /// Builds the tokenizer. Refuses an unknown model or pre-tokenizer by name, lists that do not agree in length, merges of
    /// tokens that do not exist, and ids outside the vocabulary.
    pub fn from_gguf(vocab: GgufVocab) -> Result<Tokenizer, TokenizerError> {
        const FIELD: &str = "tokenizer.ggml.tokens";
        let vocab_size = vocab.tokens.len();
        check_size(FIELD, vocab_size)?;
        for (name, len) in [("token_type", vocab.token_types.len()), ("scores", vocab.scores.len())] {
            if len != 0 && len != vocab_size {
                let message = format!("{len} entries for {vocab_size} tokens");
                return Err(TokenizerError::damaged(&format!("tokenizer.ggml.{name}"), message));
            }
        }
        let special = SpecialIds { bos: vocab.bos, eos: vocab.eos, unk: vocab.unk, pad: vocab.pad };
        let spaces = match vocab.model.as_str() {
            "gpt2" => false,
            "llama" => true,
            other => {
                let supported = "gpt2 (byte-level BPE), llama (SentencePiece)";
                return Err(TokenizerError::unsupported("tokenizer.ggml.model", other, supported));
            }
        };
        let Sorted { tokens, added, bytes } = sort_tokens(vocab.tokens, &vocab.token_types, special, spaces)?;
        // What files of a kind leave out is what llama.cpp takes for it.
        let (rules, add_bos) = if spaces {
            let scores = if vocab.scores.is_empty() { vec![0.0; vocab_size] } else { vocab.scores };
            if let Some(id) = scores.iter().position(|s| s.is_nan()) {
                return Err(TokenizerError::damaged("tokenizer.ggml.scores", format!("NaN for token {id}")));
            }
            let scores = tokens.iter().map(|(_, id)| scores[*id as usize]).collect();
            let prefix = if vocab.add_space_prefix.unwrap_or(true) { Prefix::Each } else { Prefix::Never };
            (Rules::Scores { scores, bytes, prefix }, true)
        } else {
            let split = Split::from_gguf(vocab.pre.as_deref()).ok_or_else(|| {
                let found = vocab.pre.as_deref().unwrap_or_default();
                TokenizerError::unsupported("tokenizer.ggml.pre", found, Split::GGUF_NAMES)
            })?;
            let merges = vocab.merges.into_iter().map(pair).collect::<Result<_, _>>()?;
            // Llama 3 and Tekken take words that are tokens whole and write a begin token. One other kind cuts as Llama 3 does, and does neither.
            let whole =
                matches!(split, Split::Llama3 | Split::Tekken) && vocab.pre.as_deref() != Some("smaug-bpe");
            // Its engine composes nothing, whatever the model's own tokenizer does.
            (Rules::ByteLevel { split, nfc: false, merges, ignore_merges: whole }, whole)
        };
        let wanted =
            |asked: Option<bool>, default: bool, id: Option<u32>| id.filter(|_| asked.unwrap_or(default));
        Parts {
            field: FIELD,
            tokens,
            rules,
            added,
            vocab_size,
            special,
            prefix: wanted(vocab.add_bos, add_bos, special.bos).into_iter().collect(),
            suffix: wanted(vocab.add_eos, false, special.eos).into_iter().collect(),
        }
        .build()
    }
}

/// Tokens by what becomes of them.
struct Sorted {
    /// Plain tokens with their ids.
    tokens: Vec<(String, u32)>,
    /// Tokens that are matched whole.
    added: Vec<AddedToken>,
    /// Byte tokens with their ids.
    bytes: Vec<(String, u32)>,
}

/// Tells plain tokens from those matched whole. Unused ids keep their text for decoding but are never produced from text.
fn sort_tokens(
    texts: Vec<String>,
    types: &[i32],
    special: SpecialIds,
    spaces: bool,
) -> Result<Sorted, TokenizerError> {
    let named = [special.bos, special.eos, special.unk, special.pad];
    let (mut tokens, mut added, mut bytes) = (Vec::with_capacity(texts.len()), Vec::new(), Vec::new());
    for (id, content) in (0u32..).zip(texts) {
        let named_only = if named.contains(&Some(id)) { CONTROL } else { NORMAL };
        match types.get(id as usize).copied().unwrap_or(named_only) {
            NORMAL => tokens.push((content, id)),
            BYTE if spaces => bytes.push((content, id)),
            kind @ (UNKNOWN | CONTROL | USER_DEFINED | UNUSED) => {
                // An unused id is as untouchable for a user as a control token.
                let control = kind != USER_DEFINED;
                // A user-defined token matches the text itself, where a space is a space.
                let content = if spaces && !control { content.replace(SPACE, " ") } else { content };
                added.push(AddedToken { id, content, control, ..AddedToken::default() });
            }
            other => {
                let found = format!("{other} for token {id} {content:?}");
                let supported =
                    "1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte (SentencePiece)";
                return Err(TokenizerError::unsupported("tokenizer.ggml.token_type", found, supported));
            }
        }
    }
    Ok(Sorted { tokens, added, bytes })
}

fn pair(merge: String) -> Result<(String, String), TokenizerError> {
    // A part may itself contain no space (the alphabet spells it Ġ), so the first one separates.
    match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            Ok((left.to_owned(), right.to_owned()))
        }
        _ => Err(TokenizerError::damaged("tokenizer.ggml.merges", format!("{merge:?} is not two tokens"))),
    }
}
