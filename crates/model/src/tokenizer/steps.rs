//! Words cut in steps: each step cuts the pieces that the one before it left, as a "Sequence" of a tokenizer.json does.
//!
//! Only patterns that `pattern.rs` takes. Those with the usual look-ahead are `split.rs`'s.

use std::sync::{Arc, LazyLock};

use regex::Regex;

use super::pattern::exact;
use super::split::Split;

/// Most steps of one vocabulary.
pub(super) const MAX_STEPS: usize = 16;

/// One step.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Matches stand apart, and so does what lies between them.
    Pattern(Regex),
    /// Every digit stands apart.
    EachDigit,
    /// Runs of digits stand apart.
    Digits,
    /// GPT-2's words.
    Gpt2,
}

/// Steps in their order.
#[derive(Clone)]
pub(crate) struct Steps(Arc<[Step]>);

impl Steps {
    pub(super) fn new(steps: Vec<Step>) -> Steps {
        Steps(steps.into())
    }

    /// The patterns, where all steps are.
    #[cfg(test)]
    pub(super) fn patterns(&self) -> Vec<String> {
        let pattern = |step: &Step| match step {
            Step::Pattern(p) => p.as_str().to_owned(),
            other => panic!("{other:?} is no pattern"),
        };
        self.0.iter().map(pattern).collect()
    }

    /// Calls `word` for each word of `text`, in order.
    pub(super) fn for_each<E>(
        &self,
        text: &str,
        word: &mut dyn FnMut(&str) -> Result<(), E>,
    ) -> Result<(), E> {
        cut(&self.0, text, word)
    }
}

impl PartialEq for Steps {
    fn eq(&self, other: &Steps) -> bool {
        format!("{:?}", self.0) == format!("{:?}", other.0)
    }
}

impl std::fmt::Debug for Steps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} steps of", self.0.len())
    }
}

impl Step {
    /// A step by its pattern; `None` if the engine does not run it with the reference's meaning.
    pub(super) fn pattern(pattern: &str) -> Option<Step> {
        exact(pattern).map(Step::Pattern)
    }

    /// Ranges of `text` that the step takes out, in order.
    fn found(&self, text: &str) -> Vec<std::ops::Range<usize>> {
        let digits = |each: bool| {
            let mut found: Vec<std::ops::Range<usize>> = Vec::new();
            for (at, c) in text.char_indices().filter(|(_, c)| c.is_numeric()) {
                match found.last_mut().filter(|last| !each && last.end == at) {
                    Some(last) => last.end += c.len_utf8(),
                    None => found.push(at..at + c.len_utf8()),
                }
            }
            found
        };
        match self {
            Step::Pattern(pattern) => pattern.find_iter(text).map(|m| m.range()).collect(),
            Step::EachDigit => digits(true),
            Step::Digits => digits(false),
            Step::Gpt2 => Vec::new(),
        }
    }
}

fn cut<E>(steps: &[Step], text: &str, word: &mut dyn FnMut(&str) -> Result<(), E>) -> Result<(), E> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((step, rest)) = steps.split_first() else { return word(text) };
    if let Step::Gpt2 = step {
        return Split::Gpt2.for_each(text, |w| cut(rest, w, word));
    }
    let mut at = 0;
    for found in step.found(text) {
        cut(rest, &text[at..found.start], word)?;
        at = found.end;
        cut(rest, &text[found], word)?;
    }
    cut(rest, &text[at..], word)
}

/// DeepSeek's steps (LLM and V2), as llama.cpp reads them where a GGUF file says `deepseek-llm`.
pub(super) static DEEPSEEK: LazyLock<Steps> = LazyLock::new(|| {
    let steps = [
        r"[\r\n]",
        DEEPSEEK_LETTERS,
        DEEPSEEK_MARKS,
        r"\s+$",
        r"[\u{4E00}-\u{9FA5}\u{800}-\u{4E00}\u{AC00}-\u{D7FF}]+",
        r"\p{N}+",
    ];
    Steps::new(
        steps.iter().map(|p| Step::pattern(p).expect("a pattern written in this file compiles")).collect(),
    )
});

/// Letters of scripts with two cases, a space before them taken along.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[",
    r"A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}\u{370}-\u{373}\u{376}",
    r"\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}",
    r"\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}",
    r"\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}",
    r"\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}",
    r"\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}",
    r"\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}",
    r"\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}",
    r"\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}",
    r"\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}",
    r"\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}",
    r"]+"
);

/// Punctuation, narrow and wide, likewise.
const DEEPSEEK_MARKS: &str =
    r"\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+";
