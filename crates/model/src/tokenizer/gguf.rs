//! A tokenizer from the vocabulary inside a GGUF file (`tokenizer.ggml.*`).
//!
//! Byte-level BPE only (`tokenizer.ggml.model = gpt2`); sentence-piece and word-piece vocabularies are refused by name.

use crate::error::ModelError;
use crate::gguf::Gguf;

use super::added::AddedToken;
use super::build::{Parts, check_size};
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
        if vocab.model != "gpt2" {
            return Err(TokenizerError::unsupported(
                "tokenizer.ggml.model",
                &vocab.model,
                "gpt2 (byte-level BPE)",
            ));
        }
        let split = Split::from_gguf(vocab.pre.as_deref()).ok_or_else(|| {
            let found = vocab.pre.as_deref().unwrap_or_default();
            TokenizerError::unsupported("tokenizer.ggml.pre", found, Split::GGUF_NAMES)
        })?;
        let vocab_size = vocab.tokens.len();
        check_size(FIELD, vocab_size)?;
        let types = vocab.token_types.len();
        if types != 0 && types != vocab_size {
            let message = format!("{types} types for {vocab_size} tokens");
            return Err(TokenizerError::damaged("tokenizer.ggml.token_type", message));
        }
        let special = SpecialIds { bos: vocab.bos, eos: vocab.eos, unk: vocab.unk, pad: vocab.pad };
        let (tokens, added) = sort_tokens(vocab.tokens, &vocab.token_types, special)?;
        let merges = vocab.merges.into_iter().map(pair).collect::<Result<_, _>>()?;
        let llama3 = split == Split::Llama3;
        let wanted =
            |asked: Option<bool>, default: bool, id: Option<u32>| id.filter(|_| asked.unwrap_or(default));
        Parts {
            field: FIELD,
            tokens,
            merges,
            added,
            vocab_size,
            split,
            ignore_merges: llama3,
            special,
            prefix: wanted(vocab.add_bos, llama3, special.bos).into_iter().collect(),
            suffix: wanted(vocab.add_eos, false, special.eos).into_iter().collect(),
        }
        .build()
    }
}

/// Plain tokens with their ids, and tokens that are matched whole.
type Sorted = (Vec<(String, u32)>, Vec<AddedToken>);

/// Tells plain tokens from those matched whole. Unused ids keep their text for decoding but are never produced from text.
fn sort_tokens(texts: Vec<String>, types: &[i32], special: SpecialIds) -> Result<Sorted, TokenizerError> {
    let named = [special.bos, special.eos, special.unk, special.pad];
    let (mut tokens, mut added) = (Vec::with_capacity(texts.len()), Vec::new());
    for (id, content) in (0u32..).zip(texts) {
        let named_only = if named.contains(&Some(id)) { CONTROL } else { NORMAL };
        match types.get(id as usize).copied().unwrap_or(named_only) {
            NORMAL => tokens.push((content, id)),
            kind @ (UNKNOWN | CONTROL | USER_DEFINED | UNUSED) => {
                // An unused id is as untouchable for a user as a control token.
                let control = kind != USER_DEFINED;
                added.push(AddedToken { id, content, control, ..AddedToken::default() });
            }
            other => {
                let found = format!("{other} for token {id} {content:?}");
                let supported = "1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused";
                return Err(TokenizerError::unsupported("tokenizer.ggml.token_type", found, supported));
            }
        }
    }
    Ok((tokens, added))
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
