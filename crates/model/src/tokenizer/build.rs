//! Puts a tokenizer together from a vocabulary, whichever file it came from, after checking that its parts agree.

use std::borrow::Cow;
use std::sync::Arc;

use tokenizers::models::bpe::{BPE, Vocab};

use super::added::{AddedToken, AddedTokens};
use super::pieces::{Kind, Pieces};
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
    /// Plain tokens in the visible alphabet, with their ids. No added token is among them.
    pub(super) tokens: Vec<(String, u32)>,
    /// Pairs in order of rank. Pairs that touch an added token can never apply and are dropped.
    pub(super) merges: Vec<(String, String)>,
    /// Tokens matched whole.
    pub(super) added: Vec<AddedToken>,
    /// Number of ids, including those without a token.
    pub(super) vocab_size: usize,
    pub(super) split: Split,
    /// A word that is a token is taken whole, without merging (Llama 3).
    pub(super) ignore_merges: bool,
    pub(super) special: SpecialIds,
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
}

/// Refuses vocabularies too large to be real.
pub(super) fn check_size(field: &str, vocab_size: usize) -> Result<(), TokenizerError> {
    if vocab_size == 0 || vocab_size > MAX_VOCAB {
        return Err(TokenizerError::damaged(field, format!("{vocab_size} ids; supported: 1 to {MAX_VOCAB}")));
    }
    Ok(())
}

impl Parts {
    pub(super) fn build(mut self) -> Result<Tokenizer, TokenizerError> {
        check_size(self.field, self.vocab_size)?;
        let pieces = self.pieces()?;
        self.check_named_ids()?;
        self.drop_merges_of_added();
        let vocab: Vocab = self.tokens.into_iter().collect();
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, self.merges)
            .ignore_merges(self.ignore_merges)
            .cache_capacity(CACHED_WORDS)
            .build()
            .map_err(|e| TokenizerError::damaged(self.field, e))?;
        Ok(Tokenizer {
            pieces: Arc::new(pieces),
            added: AddedTokens::new(self.added)?,
            merger: Some(Merger { split: self.split, bpe }),
            special: self.special,
            prefix: self.prefix,
            suffix: self.suffix,
        })
    }

    /// Bytes by id; every id is used at most once.
    fn pieces(&self) -> Result<Pieces, TokenizerError> {
        let mut entries: Vec<(Cow<'_, [u8]>, Kind)> = Vec::with_capacity(self.vocab_size);
        entries.resize(self.vocab_size, (Cow::Borrowed(&[]), Kind::Text));
        let twice = |id: u32, text: &str| {
            TokenizerError::damaged(
                self.field,
                format!("id {id} of {text:?} is outside the vocabulary or used twice"),
            )
        };
        for (text, id) in &self.tokens {
            let bytes = byte_map::bytes_of(text).ok_or_else(|| {
                TokenizerError::damaged(
                    self.field,
                    format!("token {id} {text:?} is not in the byte-level alphabet"),
                )
            })?;
            let entry =
                entries.get_mut(*id as usize).filter(|e| e.0.is_empty()).ok_or_else(|| twice(*id, text))?;
            *entry = (Cow::Owned(bytes), Kind::Text);
        }
        for token in &self.added {
            let kind = if token.control { Kind::Control } else { Kind::Added };
            let entry = entries
                .get_mut(token.id as usize)
                .filter(|e| e.0.is_empty())
                .ok_or_else(|| twice(token.id, &token.content))?;
            *entry = (Cow::Borrowed(token.content.as_bytes()), kind);
        }
        Pieces::pack(entries.into_iter())
            .ok_or_else(|| TokenizerError::damaged(self.field, "over 4 GiB of token text"))
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

    /// Drops pairs whose parts or result are added tokens: those are matched before merging, so the pair never meets.
    fn drop_merges_of_added(&mut self) {
        let added: std::collections::HashSet<&str> = self.added.iter().map(|t| t.content.as_str()).collect();
        let mut joined = String::new();
        self.merges.retain(|(a, b)| {
            joined.clear();
            joined.push_str(a);
            joined.push_str(b);
            ![a.as_str(), b, &joined].iter().any(|part| added.contains(part))
        });
    }
}
