//! The built-in tokenizer: one id per byte, then control tokens. It needs no file and encodes any text.

use std::borrow::Cow;
use std::sync::Arc;

use super::added::{AddedToken, AddedTokens};
use super::pieces::{Kind, Pieces};
use super::{SpecialIds, Tokenizer, TokenizerError};

impl Tokenizer {
    /// Ids 0 to 255 are the bytes; `control` tokens follow from 256 in the given order. `bos` and `eos` name some of them; with
    /// `bos` given, `add_special` writes it before a text. Refuses a name that is not in `control`, an empty or a repeated one.
    pub fn bytes(
        control: &[&str],
        bos: Option<&str>,
        eos: Option<&str>,
    ) -> Result<Tokenizer, TokenizerError> {
        let id_of = |name: Option<&str>| match name {
            None => Ok(None),
            Some(name) => match control.iter().position(|&c| c == name) {
                Some(index) => Ok(Some(256 + index as u32)),
                None => Err(TokenizerError::damaged(
                    "control tokens",
                    format!("{name:?} is not among {control:?}"),
                )),
            },
        };
        for (i, name) in control.iter().enumerate() {
            if control[..i].contains(name) {
                return Err(TokenizerError::damaged("control tokens", format!("{name:?} is there twice")));
            }
        }
        let special = SpecialIds { bos: id_of(bos)?, eos: id_of(eos)?, unk: None, pad: None };
        let bytes: Vec<u8> = (0..=255).collect();
        let plain = bytes.chunks(1).map(|b| (Cow::Borrowed(b), Kind::Text));
        let named = control.iter().map(|c| (Cow::Borrowed(c.as_bytes()), Kind::Control));
        let pieces = Pieces::pack(plain.chain(named))
            .ok_or_else(|| TokenizerError::damaged("control tokens", "over 4 GiB of text"))?;
        let added = (256u32..).zip(control).map(|(id, content)| AddedToken {
            id,
            content: (*content).to_owned(),
            control: true,
            ..AddedToken::default()
        });
        Ok(Tokenizer {
            pieces: Arc::new(pieces),
            added: AddedTokens::new(added.collect())?,
            merger: super::Merger::Bytes,
            special,
            prefix: special.bos.into_iter().collect(),
            suffix: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_survives_and_control_tokens_stay_text_unless_meant() {
        let t = Tokenizer::bytes(&["<bos>", "<eos>"], Some("<bos>"), Some("<eos>")).unwrap();
        assert_eq!(t.vocab_size(), 258);
        for text in ["", "key: 7412\n", "🎉 naïve\u{0}\u{4}", "<eos>"] {
            let ids = t.encode(text, false).unwrap();
            assert!(ids.iter().all(|&id| id < 256), "{text:?} became {ids:?}");
            assert_eq!(t.decode(&ids, true), text);
            assert_eq!(t.encode(text, true).unwrap(), [&[256], ids.as_slice()].concat());
        }
        assert_eq!(t.encode_with_specials("<bos>a<eos>", true).unwrap(), [256, 97, 257]);
        assert_eq!(t.decode(&[256, 97, 257, 9999], false), "<bos>a<eos>");
        assert_eq!(t.decode(&[256, 97, 257], true), "a");
        assert_eq!((t.id_of("<eos>"), t.id_of("a"), t.id_of("ab")), (Some(257), Some(97), None));
        assert!(t.missing_bytes().is_empty());
    }

    #[test]
    fn contradictory_names_are_refused() {
        assert!(Tokenizer::bytes(&["<a>"], Some("<b>"), None).is_err());
        assert!(Tokenizer::bytes(&["<a>", "<a>"], None, None).is_err());
        assert!(Tokenizer::bytes(&[""], None, None).is_err());
    }
}
