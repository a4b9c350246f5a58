//! Text to token ids and back: byte-level BPE and SentencePiece's BPE from tokenizer.json or GGUF metadata, and a built-in tokenizer of
//! plain bytes.
//!
//! A user's text never becomes a control token: only [`Tokenizer::encode_with_specials`], meant for text that a chat template
//! wrote, recognises them. Vocabularies of other kinds (unigram, word piece) are refused by name.

mod added;
mod build;
pub(crate) mod byte_map;
mod bytes;
mod detokenizer;
mod gguf;
mod guard;
mod json;
mod pattern;
mod pieces;
mod spaces;
mod split;
mod steps;

use std::borrow::Cow;
use std::sync::Arc;

use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

pub use detokenizer::Detokenizer;
pub use gguf::GgufVocab;
pub(crate) use guard::Guard;
pub use json::TokenizerJson;

use added::{AddedTokens, Segment};
use pieces::{Kind, Pieces};
use spaces::Spaces;
use split::Split;

/// Why a tokenizer could not be built or a text not encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The vocabulary is of a kind this crate does not run.
    #[error("{field}: found {found}; supported: {supported}")]
    Unsupported {
        /// Metadata key or JSON path.
        field: String,
        /// What the file says.
        found: String,
        /// What would have been accepted.
        supported: String,
    },
    /// The file contradicts itself or lacks something.
    #[error("{field}: {message}")]
    Damaged {
        /// Metadata key or JSON path.
        field: String,
        /// What is wrong.
        message: String,
    },
    /// A text could not be encoded.
    #[error("encoding failed: {0}")]
    Encode(String),
}

impl TokenizerError {
    fn unsupported(field: &str, found: impl std::fmt::Display, supported: &str) -> Self {
        TokenizerError::Unsupported {
            field: field.into(),
            found: found.to_string(),
            supported: supported.into(),
        }
    }

    fn damaged(field: &str, message: impl std::fmt::Display) -> Self {
        TokenizerError::Damaged { field: field.into(), message: message.to_string() }
    }
}

/// Ids with a meaning, as the files name them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Begin of sequence.
    pub bos: Option<u32>,
    /// End of sequence.
    pub eos: Option<u32>,
    /// Unknown.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
}

/// How text becomes ids.
enum Merger {
    /// A byte's id is its value.
    Bytes,
    /// Words of a pattern, spelled in the byte-level alphabet; `nfc`: of the text's composed form.
    ByteLevel { split: Split, bpe: Box<BPE>, nfc: bool },
    /// SentencePiece.
    Spaces(Box<Spaces>),
}

/// A tokenizer. Cheap to share by reference between threads; encoding allocates, decoding is a table walk.
pub struct Tokenizer {
    pieces: Arc<Pieces>,
    added: AddedTokens,
    merger: Merger,
    special: SpecialIds,
    /// Control tokens written before a text when asked for (usually BOS alone, or nothing).
    prefix: Vec<u32>,
    /// Control tokens written after a text when asked for (usually nothing).
    suffix: Vec<u32>,
}

impl Tokenizer {
    /// Ids of a user's text. Control tokens spelled in it stay text. With `add_special`, the model's own begin (and end) tokens
    /// are put around it. A SentencePiece vocabulary may put a space before the text, which decoding keeps. Bytes that the vocabulary has no token for ([`Self::missing_bytes`]) are left out, as the reference
    /// implementations do.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode_plain(text)?;
        Ok(if add_special { self.with_special(ids) } else { ids })
    }

    /// Ids of a user's text and nothing else.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_segments(text, false, None)
    }

    /// Ids of a text whose control tokens are meant, such as a rendered chat template. With `add_special` the begin token is added
    /// unless the text already starts with it: there are never two.
    pub fn encode_with_specials(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode_segments(text, true, None)?;
        Ok(if add_special { self.with_special(ids) } else { ids })
    }

    /// As [`Self::encode_with_specials`], for text whose user-written parts are marked by `guard`.
    pub(crate) fn encode_guarded(&self, text: &str, guard: &Guard) -> Result<Vec<u32>, TokenizerError> {
        self.encode_segments(text, true, Some(guard))
    }

    /// Text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary have no text. With `skip_special`,
    /// control tokens have no text either.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            bytes.extend_from_slice(self.pieces.text(id, skip_special));
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(e) => String::from_utf8_lossy(e.as_bytes()).into_owned(),
        }
    }

    /// Bytes of one token, control tokens included; None outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.pieces.get(id).map(<[u8]>::to_vec)
    }

    /// Whether `id` is a control token.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.kind(id) == Some(Kind::Control)
    }

    /// Number of ids: one more than the greatest.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Id of an added token by its text, or of a plain token by its spelling in the vocabulary.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        if let Some(id) = self.added.id_of(token) {
            return Some(id);
        }
        match &self.merger {
            Merger::ByteLevel { bpe, .. } => bpe.token_to_id(token),
            Merger::Spaces(spaces) => spaces.id_of(token),
            Merger::Bytes => byte_map::bytes_of(token).filter(|b| b.len() == 1).map(|b| b[0] as u32),
        }
    }

    /// Ids with a meaning.
    pub fn special_ids(&self) -> SpecialIds {
        self.special
    }

    /// The control tokens that `add_special` writes before a text.
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// Bytes that no token holds; a text loses them when encoded.
    pub fn missing_bytes(&self) -> Vec<u8> {
        match &self.merger {
            Merger::ByteLevel { bpe, .. } => (0..=255u8)
                .filter(|&b| bpe.token_to_id(byte_map::char_of(b).encode_utf8(&mut [0; 4])).is_none())
                .collect(),
            Merger::Spaces(spaces) => spaces.missing_bytes(),
            Merger::Bytes => Vec::new(),
        }
    }

    /// A guard that hides this vocabulary's control tokens in user-written strings; None if the strings leave no code point free.
    pub(crate) fn guard(&self, used: impl Fn(char) -> bool) -> Option<Guard> {
        Guard::new(self.added.control().map(|t| t.content.as_str()), used)
    }

    fn with_special(&self, ids: Vec<u32>) -> Vec<u32> {
        let has_prefix = self.prefix.first().is_some_and(|first| ids.first() == Some(first));
        let has_suffix = self.suffix.last().is_some_and(|last| ids.last() == Some(last));
        let prefix = if has_prefix { &[] } else { self.prefix.as_slice() };
        let suffix = if has_suffix { &[] } else { self.suffix.as_slice() };
        if prefix.is_empty() && suffix.is_empty() { ids } else { [prefix, &ids, suffix].concat() }
    }

    fn encode_segments(
        &self,
        text: &str,
        control: bool,
        guard: Option<&Guard>,
    ) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut first = true;
        self.added.for_each(text, control, |segment| {
            match segment {
                Segment::Token(id) => ids.push(id),
                Segment::Text(part) => match guard {
                    Some(guard) => self.encode_text(&guard.reveal(part), first, &mut ids)?,
                    None => self.encode_text(part, first, &mut ids)?,
                },
            }
            first = false;
            Ok(())
        })?;
        Ok(ids)
    }

    /// `first`: nothing stands before the text.
    fn encode_text(&self, text: &str, first: bool, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match &self.merger {
            Merger::Bytes => {
                ids.extend(text.bytes().map(u32::from));
                Ok(())
            }
            Merger::Spaces(spaces) => spaces.encode(text, first, ids),
            Merger::ByteLevel { split, bpe, nfc } => {
                let mut visible = String::new();
                let text = if *nfc { composed(text) } else { Cow::Borrowed(text) };
                split.for_each(&text, |word| {
                    byte_map::write_visible(word, &mut visible);
                    let tokens = bpe.tokenize(&visible).map_err(|e| TokenizerError::Encode(e.to_string()))?;
                    ids.extend(tokens.iter().map(|t| t.id));
                    Ok(())
                })
            }
        }
    }

    /// The kind of vocabulary, for people.
    pub fn kind(&self) -> String {
        match &self.merger {
            Merger::Bytes => "bytes".into(),
            Merger::ByteLevel { split, .. } => format!("byte-level BPE, {split:?} words"),
            Merger::Spaces(spaces) => match spaces.merges {
                spaces::Merges::Scores(_) => "SentencePiece BPE by scores".into(),
                spaces::Merges::Ranks(_) => "SentencePiece BPE by ranks".into(),
            },
        }
    }
}

/// Unicode's form C, by the tables of the reference.
fn composed(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.nfc().map(|(c, _)| c).collect())
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("kind", &self.kind())
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}
