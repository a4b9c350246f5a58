//! Puts a tokenizer together from a vocabulary, whichever file it came from, after checking that its parts agree.

use std::borrow::Cow;
use std::sync::Arc;

use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};

use super::added::{AddedToken, AddedTokens};
use super::pieces::{Kind, Pieces};
use super::spaces::{self, Merges, Piece, Prefix, Spaces};
use super::split::Split;
use super::{Merger, SpecialIds, Tokenizer, TokenizerError, byte_map};

/// Ids at and above this are refused before anything is allocated for them.
const MAX_VOCAB: usize = 1 << 20;
/// Words kept merged per thread (about 150 bytes each).
const CACHED_WORDS: usize = 4096;

/// What a file says about its vocabulary.
pub(super) struct Parts {
    /// Where the vocabulary stands in the file, for messages.
    pub(super) field: &'static str,
    /// Plain tokens as the vocabulary spells them, with their ids. No added token is among them.
    pub(super) tokens: Vec<(String, u32)>,
    /// What merges them.
    pub(super) rules: Rules,
    /// Tokens matched whole.
    pub(super) added: Vec<AddedToken>,
    /// Number of ids, including those without a token.
    pub(super) vocab_size: usize,
    pub(super) special: SpecialIds,
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
}

/// How text is spelled, cut and merged.
pub(super) enum Rules {
    /// Byte-level BPE. Merges in order of rank; those that touch an added token can never apply and are dropped.
    ByteLevel {
        split: Split,
        /// Whether a text is composed (NFC) before it is cut.
        nfc: bool,
        merges: Vec<(String, String)>,
        /// A word that is a token is taken whole, without merging (Llama 3).
        ignore_merges: bool,
    },
    /// SentencePiece by ranks; byte tokens are those spelled `<0xNN>`.
    Ranks { merges: Vec<(String, String)>, prefix: Prefix },
    /// SentencePiece by scores, one for each of `tokens`; `bytes` are byte tokens.
    Scores { scores: Vec<f32>, bytes: Vec<(String, u32)>, prefix: Prefix },
}

/// Refuses vocabularies too large to be real.
pub(super) fn check_size(field: &str, vocab_size: usize) -> Result<(), TokenizerError> {
    if vocab_size == 0 || vocab_size > MAX_VOCAB {
        return Err(TokenizerError::damaged(field, format!("{vocab_size} ids; supported: 1 to {MAX_VOCAB}")));
    }
    Ok(())
}

impl Parts {
    pub(super) fn build(self) -> Result<Tokenizer, TokenizerError> {
        check_size(self.field, self.vocab_size)?;
        let pieces = self.pieces()?;
        self.check_named_ids()?;
        let Parts { field, tokens, rules, added, special, prefix, suffix, .. } = self;
        let unk = special.unk;
        let merger = match rules {
            Rules::ByteLevel { split, nfc, merges, ignore_merges } => {
                let merges = without_added(merges, &added);
                let bpe = bpe(field, tokens, merges, |b| b.ignore_merges(ignore_merges))?;
                Merger::ByteLevel { split, bpe: Box::new(bpe), nfc }
            }
            Rules::Ranks { merges, prefix } => {
                let bytes = byte_ids(tokens.iter().map(|(text, id)| (text.as_str(), *id)), unk);
                let plain: Vec<String> = tokens.iter().map(|t| t.0.clone()).collect();
                let bpe = bpe(field, tokens, without_added(merges, &added), |b| b.byte_fallback(true))?;
                let plain = plain.iter().map(String::as_str);
                Merger::Spaces(Box::new(Spaces::new(Merges::Ranks(Box::new(bpe)), prefix, plain, bytes)))
            }
            Rules::Scores { scores, bytes, prefix } => {
                let bytes = byte_ids(bytes.iter().map(|(text, id)| (text.as_str(), *id)), unk);
                let plain: Vec<String> = tokens.iter().map(|t| t.0.clone()).collect();
                let pieces = tokens.into_iter().zip(scores);
                let pieces =
                    pieces.map(|((text, id), score)| (text.into_boxed_str(), Piece { id, score })).collect();
                let plain = plain.iter().map(String::as_str);
                Merger::Spaces(Box::new(Spaces::new(Merges::Scores(pieces), prefix, plain, bytes)))
            }
        };
        Ok(Tokenizer {
            pieces: Arc::new(pieces),
            added: AddedTokens::new(added)?,
            merger,
            special,
            prefix,
            suffix,
        })
    }

    /// Bytes by id; every id is used at most once.
    fn pieces<'a>(&'a self) -> Result<Pieces, TokenizerError> {
        let mut entries: Vec<Option<(Cow<'a, [u8]>, Kind)>> = vec![None; self.vocab_size];
        let mut put = |id: u32, text: &str, entry: (Cow<'a, [u8]>, Kind)| {
            let place = entries.get_mut(id as usize).filter(|e| e.is_none());
            let place = place.ok_or_else(|| {
                let message = format!("id {id} of {text:?} is outside the vocabulary or used twice");
                TokenizerError::damaged(self.field, message)
            })?;
            *place = Some(entry);
            Ok(())
        };
        let byte_tokens = match &self.rules {
            Rules::Scores { bytes, .. } => bytes.as_slice(),
            Rules::ByteLevel { .. } | Rules::Ranks { .. } => &[],
        };
        let plain = self.tokens.iter().map(|t| (t, false)).chain(byte_tokens.iter().map(|t| (t, true)));
        for ((text, id), is_byte) in plain {
            let bytes = match &self.rules {
                Rules::ByteLevel { .. } => byte_map::bytes_of(text).map(Cow::Owned),
                Rules::Ranks { .. } => spaces::bytes_of(text, spaces::byte_of(text).is_some()),
                Rules::Scores { .. } => spaces::bytes_of(text, is_byte),
            };
            let bytes = bytes.ok_or_else(|| {
                let what = if is_byte { "is no byte token" } else { "is not in the byte-level alphabet" };
                TokenizerError::damaged(self.field, format!("token {id} {text:?} {what}"))
            })?;
            put(*id, text, (bytes, Kind::Text))?;
        }
        for token in &self.added {
            let kind = if token.control { Kind::Control } else { Kind::Added };
            put(token.id, &token.content, (Cow::Borrowed(token.content.as_bytes()), kind))?;
        }
        let entries = entries.into_iter().map(|e| e.unwrap_or((Cow::Borrowed(&[]), Kind::Text)));
        Pieces::pack(entries).ok_or_else(|| TokenizerError::damaged(self.field, "over 4 GiB of token text"))
    }

    fn check_named_ids(&self) -> Result<(), TokenizerError> {
        let SpecialIds { bos, eos, unk, pad } = self.special;
        for (name, id) in [("bos", bos), ("eos", eos), ("unk", unk), ("pad", pad)] {
            if let Some(id) = id.filter(|&id| id as usize >= self.vocab_size) {
                let message =
                    format!("{name} token id {id} is outside the vocabulary of {} ids", self.vocab_size);
                return Err(TokenizerError::damaged(self.field, message));
            }
        }
        Ok(())
    }
}

/// Ids of the byte tokens among `tokens`; the unknown token's where there is none.
fn byte_ids<'a>(tokens: impl Iterator<Item = (&'a str, u32)>, unk: Option<u32>) -> [Option<u32>; 256] {
    let mut ids = [unk; 256];
    for (text, id) in tokens {
        if let Some(byte) = spaces::byte_of(text) {
            ids[usize::from(byte)] = Some(id);
        }
    }
    ids
}

fn bpe(
    field: &str,
    tokens: Vec<(String, u32)>,
    merges: Vec<(String, String)>,
    options: impl Fn(BpeBuilder) -> BpeBuilder,
) -> Result<BPE, TokenizerError> {
    let vocab: Vocab = tokens.into_iter().collect();
    let builder = BPE::builder().vocab_and_merges(vocab, merges).cache_capacity(CACHED_WORDS);
    options(builder).build().map_err(|e| TokenizerError::damaged(field, e))
}

/// Drops pairs whose parts or result are added tokens: those are matched before merging, so the pair never meets.
fn without_added(mut merges: Vec<(String, String)>, added: &[AddedToken]) -> Vec<(String, String)> {
    let added: std::collections::HashSet<&str> = added.iter().map(|t| t.content.as_str()).collect();
    let mut joined = String::new();
    merges.retain(|(a, b)| {
        joined.clear();
        joined.push_str(a);
        joined.push_str(b);
        ![a.as_str(), b, &joined].iter().any(|part| added.contains(part))
    });
    merges
}
