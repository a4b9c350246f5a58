//! Cuts text into the words that merging never crosses (the "pre-tokenizer"), in linear time for any input.
//!
//! The published patterns end in `\s+(?!\S)|\s+`, which needs look-ahead. A backtracking engine gives up on a long run of
//! spaces, so here the look-ahead is done by hand: match the whole run, then give its last character back if a word follows.
//! Kinds that are not listed are refused by name; none is guessed.

use std::sync::LazyLock;

use regex::Regex;

use super::steps::{DEEPSEEK, Steps};

/// Which published pattern cuts the words.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Split {
    /// GPT-2.
    Gpt2,
    /// Every digit alone, then GPT-2 on what lies between (SmolLM, StarCoder).
    DigitsGpt2,
    /// Llama 3: contractions in any case, up to three digits together, newlines kept with punctuation.
    Llama3,
    /// Qwen 2: as Llama 3, every digit alone.
    Qwen2,
    /// GPT-4o and gpt-oss: capitals begin a word, contractions end it.
    Gpt4o,
    /// Mistral's Tekken: as GPT-4o, every digit alone, no contractions.
    Tekken,
    /// Patterns one after the other.
    Steps(Steps),
}

/// The pattern of GPT-2 without its look-ahead branch, which [`words`] does by hand.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
/// Llama 3's, likewise.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
/// Qwen 2's, likewise.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// GPT-4o's, likewise.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";

/// Tekken's, likewise.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";

/// What the look-ahead branch looks like in a file, and what [`GPT2`] and its siblings hold in its place.
const LOOK_AHEAD: (&str, &str) = (r"|\s+(?!\S)|\s+", r"|\s+");

static GPT2_RE: LazyLock<Regex> = LazyLock::new(|| compiled(GPT2));
static LLAMA3_RE: LazyLock<Regex> = LazyLock::new(|| compiled(LLAMA3));
static QWEN2_RE: LazyLock<Regex> = LazyLock::new(|| compiled(QWEN2));
static GPT4O_RE: LazyLock<Regex> = LazyLock::new(|| compiled(GPT4O));
static TEKKEN_RE: LazyLock<Regex> = LazyLock::new(|| compiled(TEKKEN));

fn compiled(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern written in this file compiles")
}

impl Split {
    /// Names accepted in a GGUF file's `tokenizer.ggml.pre`, for the message of a refusal.
    pub(crate) const GGUF_NAMES: &'static str = "smollm, starcoder, refact, codeshell, llama-bpe, llama3, llama-v3, smaug-bpe, gpt-2, default, qwen2, deepseek-r1-qwen, gpt-4o, tekken, deepseek-llm";

    /// The kind a GGUF file names; a file without a name means `default`.
    pub(crate) fn from_gguf(pre: Option<&str>) -> Option<Split> {
        match pre.unwrap_or("default") {
            "smollm" | "starcoder" | "refact" | "codeshell" => Some(Split::DigitsGpt2),
            "llama-bpe" | "llama3" | "llama-v3" | "smaug-bpe" => Some(Split::Llama3),
            "gpt-2" | "default" => Some(Split::Gpt2),
            "qwen2" | "deepseek-r1-qwen" => Some(Split::Qwen2),
            "gpt-4o" => Some(Split::Gpt4o),
            "tekken" => Some(Split::Tekken),
            "deepseek-llm" => Some(Split::Steps(DEEPSEEK.clone())),
            _ => None,
        }
    }

    /// The kind whose published pattern is `pattern`, as a tokenizer.json spells it.
    pub(crate) fn from_pattern(pattern: &str) -> Option<Split> {
        let kinds = [
            (GPT2, Split::Gpt2),
            (LLAMA3, Split::Llama3),
            (QWEN2, Split::Qwen2),
            (GPT4O, Split::Gpt4o),
            (TEKKEN, Split::Tekken),
        ];
        let by_hand = pattern.strip_suffix(LOOK_AHEAD.0).map(|head| format!("{head}{}", LOOK_AHEAD.1))?;
        kinds.into_iter().find(|(known, _)| *known == by_hand).map(|(_, kind)| kind)
    }

    /// Calls `word` for each word of `text`, in order; together they are `text` again.
    pub(crate) fn for_each<E>(
        &self,
        text: &str,
        mut word: impl FnMut(&str) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            Split::Gpt2 => words(&GPT2_RE, false, text, &mut word),
            Split::Llama3 => words(&LLAMA3_RE, true, text, &mut word),
            Split::Qwen2 => words(&QWEN2_RE, true, text, &mut word),
            Split::Gpt4o => words(&GPT4O_RE, true, text, &mut word),
            Split::Tekken => words(&TEKKEN_RE, true, text, &mut word),
            Split::Steps(steps) => steps.for_each(text, &mut word),
            Split::DigitsGpt2 => {
                let mut start = 0;
                for (at, digit) in text.char_indices().filter(|(_, c)| c.is_numeric()) {
                    words(&GPT2_RE, false, &text[start..at], &mut word)?;
                    start = at + digit.len_utf8();
                    word(&text[at..start])?;
                }
                words(&GPT2_RE, false, &text[start..], &mut word)
            }
        }
    }
}

/// Walks `text` by `pattern`. `newlines_apart`: the pattern has its own branch for white space that ends in a line break, so such
/// a match keeps its last character.
fn words<E>(
    pattern: &Regex,
    newlines_apart: bool,
    text: &str,
    word: &mut impl FnMut(&str) -> Result<(), E>,
) -> Result<(), E> {
    let mut at = 0;
    while at < text.len() {
        let found = pattern.find_at(text, at);
        // Every character is in some branch, so a match starts where the last one ended; were it not so, the gap is a word too.
        let (start, mut end) = found.map_or((text.len(), text.len()), |m| (m.start(), m.end()));
        if start > at {
            word(&text[at..start])?;
            at = start;
            continue;
        }
        if let Some(last) = text[at..end].chars().next_back() {
            let breaks_line = newlines_apart && matches!(last, '\r' | '\n');
            if last.is_whitespace() && !breaks_line && end < text.len() && end - last.len_utf8() > at {
                end -= last.len_utf8();
            }
        }
        word(&text[at..end])?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenizers::SplitDelimiterBehavior;
    use tokenizers::pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        split::{Split as HfSplit, SplitPattern},
    };
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    fn ours(kind: &Split, text: &str) -> Vec<String> {
        let mut out = Vec::new();
        kind.for_each(text, |w| {
            out.push(w.to_owned());
            Ok::<(), ()>(())
        })
        .unwrap();
        out
    }

    fn published(pattern: &str) -> HfSplit {
        let full = pattern.strip_suffix(r"|\s+").unwrap().to_owned() + r"|\s+(?!\S)|\s+";
        HfSplit::new(SplitPattern::Regex(full), SplitDelimiterBehavior::Isolated, false).unwrap()
    }

    static THEIR_LLAMA3: LazyLock<HfSplit> = LazyLock::new(|| published(LLAMA3));
    static THEIR_QWEN2: LazyLock<HfSplit> = LazyLock::new(|| published(QWEN2));
    static THEIR_GPT4O: LazyLock<HfSplit> = LazyLock::new(|| published(GPT4O));
    static THEIR_TEKKEN: LazyLock<HfSplit> = LazyLock::new(|| published(TEKKEN));
    static THEIR_DEEPSEEK: LazyLock<Vec<HfSplit>> = LazyLock::new(|| {
        let patterns = DEEPSEEK.patterns();
        let isolated = |p: &str| {
            // Their engine spells a code point otherwise.
            let p = p.replace("\\u{", "\\x{");
            HfSplit::new(SplitPattern::Regex(p), SplitDelimiterBehavior::Isolated, false).unwrap()
        };
        patterns.iter().map(|p| isolated(p)).collect()
    });

    /// The same cut by the backtracking engine of the `tokenizers` crate.
    fn theirs(kind: &Split, text: &str) -> Vec<String> {
        let mut pre = PreTokenizedString::from(text);
        match kind {
            Split::DigitsGpt2 => {
                Digits::new(true).pre_tokenize(&mut pre).unwrap();
                ByteLevel::new(false, true, true).pre_tokenize(&mut pre).unwrap();
            }
            Split::Gpt2 => ByteLevel::new(false, true, true).pre_tokenize(&mut pre).unwrap(),
            Split::Llama3 => THEIR_LLAMA3.pre_tokenize(&mut pre).unwrap(),
            Split::Qwen2 => THEIR_QWEN2.pre_tokenize(&mut pre).unwrap(),
            Split::Gpt4o => THEIR_GPT4O.pre_tokenize(&mut pre).unwrap(),
            Split::Tekken => THEIR_TEKKEN.pre_tokenize(&mut pre).unwrap(),
            Split::Steps(_) => THEIR_DEEPSEEK.iter().for_each(|step| step.pre_tokenize(&mut pre).unwrap()),
        }
        pre.get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(_, (start, end), _)| text[start..end].to_owned())
            .collect()
    }

    fn kinds() -> [Split; 7] {
        let steps = Split::Steps(DEEPSEEK.clone());
        [Split::Gpt2, Split::DigitsGpt2, Split::Llama3, Split::Qwen2, Split::Gpt4o, Split::Tekken, steps]
    }

    proptest! {
        #[test]
        fn words_are_those_of_the_published_patterns(
            text in "([ \\t\\n\\r\u{a0}\u{3000}]{0,4}('(s|T|re|LL|x)|[a-cA-BéÉ中ǅ\u{301}]{0,4}|[0-9½²]{0,4}|[!?_—🎉，「]{0,2})){0,8}[ \\n]{0,3}"
        ) {
            for kind in &kinds() {
                prop_assert_eq!(ours(kind, &text), theirs(kind, &text), "{:?} on {:?}", kind, &text);
            }
        }

        #[test]
        fn words_join_to_the_text(text in any::<String>()) {
            for kind in &kinds() {
                prop_assert_eq!(ours(kind, &text).concat(), text.clone());
                prop_assert_eq!(ours(kind, &text), theirs(kind, &text), "{:?} on {:?}", kind, &text);
            }
        }
    }

    #[test]
    fn a_pattern_is_known_by_its_text() {
        let gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
        assert_eq!(Split::from_pattern(gpt2), Some(Split::Gpt2));
        let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        assert_eq!(Split::from_pattern(llama3), Some(Split::Llama3));
        assert_eq!(Split::from_pattern(r"\w+"), None);
        assert_eq!(Split::from_gguf(Some("bloom")), None);
        assert_eq!(Split::from_gguf(None), Some(Split::Gpt2));
    }

    /// A backtracking engine stops at its limit here and hands over the rest as one word.
    #[test]
    fn two_megabytes_of_spaces_are_still_cut_before_the_word() {
        let text = " ".repeat(2 << 20) + "word";
        for kind in &kinds() {
            assert_eq!(ours(kind, &text).last().map(String::as_str), Some(" word"), "{kind:?}");
        }
    }
}
