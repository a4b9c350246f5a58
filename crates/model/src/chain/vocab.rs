//! The vocabulary of the word-level models and its `tokenizer.json`: bytes, a few control tokens, numbers, common words and names.
//!
//! A word with the space before it is one token. Any other text is its bytes, so that every text can be encoded and comes back whole.
//! The file is an ordinary byte-level BPE without merges; `ignore_merges` takes a word that is a token whole.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::{MAX_COUNT, MAX_HOPS};
use crate::recall::haystack::WORDS;
use crate::tokenizer::byte_map;

/// Number of tokens.
pub const VOCAB_SIZE: usize = 1 << 15;
/// Begins every text. Its row in the caches is what a question without an answer finds.
pub const BEGIN: u32 = 256;
/// Ends an answer.
pub const END: u32 = 257;
/// The token after a key, in a fact: the byte `:`.
pub(super) const COLON: usize = b':' as usize;
/// The token that asks: the byte `?`.
const ASK: u32 = b'?' as u32;
/// The first of the tokens `?2`, `?3`, …, which ask for so many hops.
const ASK_HOPS: u32 = END + 1;
/// The first of the numbers 0, 1, …, [`MAX_COUNT`].
const NUMBERS: u32 = ASK_HOPS + MAX_HOPS as u32 - 1;
const COMMON: u32 = NUMBERS + MAX_COUNT as u32 + 1;
const NAMES: u32 = COMMON + WORDS.len() as u32;
/// Names that keys and values may have.
pub const NUM_NAMES: usize = VOCAB_SIZE - NAMES as usize;

const BEGIN_TEXT: &str = "<s>";
const END_TEXT: &str = "</s>";

/// Name `i`, below [`NUM_NAMES`]: three syllables.
///
/// # Panics
/// When there is no such name.
pub fn name(i: usize) -> String {
    assert!(i < NUM_NAMES, "name {i} of {NUM_NAMES}");
    let syllable = |n: usize| {
        let letter = |letters: &[u8], n: usize| char::from(letters[n]);
        [letter(b"bdfklmnr", n >> 2 & 7), letter(b"aeiu", n & 3)]
    };
    [i >> 10, i >> 5, i].into_iter().flat_map(syllable).collect()
}

/// Hops that a token asks for; `None` for a token that asks nothing.
pub(super) fn hops_asked(token: usize) -> Option<usize> {
    if token == ASK as usize {
        return Some(1);
    }
    let hops = (token + 2).checked_sub(ASK_HOPS as usize)?;
    (2..=MAX_HOPS).contains(&hops).then_some(hops)
}

/// The number that a token is.
pub(super) fn number(token: usize) -> Option<usize> {
    token.checked_sub(NUMBERS as usize).filter(|&n| n <= MAX_COUNT)
}

/// Spelling of a token in the vocabulary's alphabet. Added tokens are among them: libraries give those that are not an id of their own choice.
fn spelling(token: u32) -> String {
    let word = |text: String| format!(" {text}").bytes().map(byte_map::char_of).collect();
    match token {
        0..BEGIN => byte_map::char_of(token as u8).to_string(),
        BEGIN => BEGIN_TEXT.to_string(),
        END => END_TEXT.to_string(),
        ASK_HOPS..NUMBERS => format!("?{}", token - ASK_HOPS + 2),
        NUMBERS..COMMON => word((token - NUMBERS).to_string()),
        COMMON..NAMES => word(WORDS[(token - COMMON) as usize].to_string()),
        _ => word(name((token - NAMES) as usize)),
    }
}

/// The whole of `tokenizer.json`.
pub(crate) fn tokenizer_json() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let asks = (ASK_HOPS..NUMBERS).chain([ASK]).map(|id| (id, false));
        let added = asks.chain([(BEGIN, true), (END, true)]);
        let added = added.map(|(id, control)| added_token(id, &spelling(id), control)).collect();
        let words = (0..VOCAB_SIZE as u32).map(|id| (spelling(id), json!(id)));
        file(added, words.collect(), Some(BEGIN_TEXT)).to_string()
    });
    &TEXT
}

/// The tokenizer of `builtin:recall` as a file: the 256 bytes.
pub(crate) fn bytes_json() -> String {
    let vocab = (0..=255u8).map(|b| (byte_map::char_of(b).to_string(), json!(b))).collect();
    file(Vec::new(), vocab, None).to_string()
}

/// What `tokenizer_config.json` says: control tokens by name, and the template.
pub(crate) fn tokenizer_config(template: &str, with_control: bool) -> Value {
    let named = |text: &str| if with_control { json!(text) } else { Value::Null };
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": named(BEGIN_TEXT), "eos_token": named(END_TEXT),
        "clean_up_tokenization_spaces": false, "chat_template": template,
    })
}

/// `strip`: spaces before a question belong to it, so that `key ?` asks as `key?` does.
fn added_token(id: u32, content: &str, control: bool) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": !control, "rstrip": false, "normalized": false,
        "special": control,
    })
}

fn file(added: Vec<Value>, vocab: Map<String, Value>, begin: Option<&str>) -> Value {
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let post = begin.map(|text| {
        let special = json!({"SpecialToken": {"id": text, "type_id": 0}});
        json!({
            "type": "TemplateProcessing", "single": [special, sequence("A")], "pair": [special, sequence("A"), sequence("B")],
            "special_tokens": {text: {"id": text, "ids": [BEGIN], "tokens": [text]}},
        })
    });
    let byte_level = |prefix: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level(false), "post_processor": post, "decoder": byte_level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": true, "vocab": vocab, "merges": [],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;

    fn tokenizer() -> Tokenizer {
        let config = tokenizer_config("", true).to_string();
        Tokenizer::from_json(tokenizer_json().as_bytes(), Some(config.as_bytes())).unwrap().tokenizer
    }

    #[test]
    fn a_word_a_number_and_a_question_are_one_token_each_and_come_back() {
        let t = tokenizer();
        assert_eq!(t.vocab_size(), VOCAB_SIZE);
        let text = format!(" river {}: {}. 17 {}", name(3), name(NUM_NAMES - 1), name(3));
        let ids = t.encode(&format!("{text}?4"), true).unwrap();
        let river = COMMON + WORDS.iter().position(|&w| w == "river").unwrap() as u32;
        let want = [
            BEGIN,
            river,
            NAMES + 3,
            COLON as u32,
            VOCAB_SIZE as u32 - 1,
            u32::from(b'.'),
            NUMBERS + 17,
            NAMES + 3,
            ASK_HOPS + 2,
        ];
        assert_eq!(ids, want);
        assert_eq!(t.decode(&ids, true), format!("{text}?4"));
        // A space before the question belongs to it; a name without one before it is bytes.
        assert_eq!(t.encode(&format!(" {} ?", name(3)), false).unwrap(), [NAMES + 3, ASK]);
        assert_eq!(t.encode(&name(3), false).unwrap().len(), 6);
        assert_eq!((hops_asked(ASK as usize), hops_asked(ASK_HOPS as usize + 2)), (Some(1), Some(4)));
        assert_eq!(
            (hops_asked(END as usize), hops_asked(NUMBERS as usize), hops_asked(5)),
            (None, None, None)
        );
        assert_eq!((number(NUMBERS as usize), number(COMMON as usize), number(0)), (Some(0), None, None));
    }

    #[test]
    fn every_token_is_in_the_file_once_under_its_id() {
        // `transformers` gave an added token that the vocabulary did not hold another id than the file said.
        let file: Value = serde_json::from_str(tokenizer_json()).unwrap();
        let vocab = file["model"]["vocab"].as_object().unwrap();
        let mut ids: Vec<u64> = vocab.values().map(|id| id.as_u64().unwrap()).collect();
        ids.sort_unstable();
        assert!(ids.into_iter().eq(0..VOCAB_SIZE as u64));
        for added in file["added_tokens"].as_array().unwrap() {
            assert_eq!(vocab[added["content"].as_str().unwrap()], added["id"]);
        }
    }

    #[test]
    fn control_tokens_in_a_users_text_stay_text() {
        let t = tokenizer();
        assert!(t.encode("</s>", false).unwrap().iter().all(|&id| id < BEGIN));
        assert_eq!(t.special_ids().eos, Some(END));
    }
}
