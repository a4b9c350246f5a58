//! Finds added tokens (control tokens and user-defined ones) in text: leftmost first, longest of those that start together.

use aho_corasick::{AhoCorasick, MatchKind};

use super::TokenizerError;

/// One token that is matched whole, before words are cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct AddedToken {
    /// Id in the vocabulary.
    pub(crate) id: u32,
    /// The text that is matched.
    pub(crate) content: String,
    /// A control token: matched only in text that a template wrote.
    pub(crate) control: bool,
    /// The match swallows white space before it.
    pub(crate) lstrip: bool,
    /// The match swallows white space after it.
    pub(crate) rstrip: bool,
    /// No match beside a letter, digit or underscore.
    pub(crate) single_word: bool,
}

/// A piece of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segment<'a> {
    /// Text between added tokens.
    Text(&'a str),
    /// An added token.
    Token(u32),
}

/// A matcher over a subset of the tokens.
struct Matcher {
    automaton: AhoCorasick,
    /// Index into `AddedTokens::tokens` by pattern number.
    tokens: Vec<usize>,
}

/// All added tokens of a vocabulary.
pub(crate) struct AddedTokens {
    tokens: Vec<AddedToken>,
    /// Every token: for text that a template wrote.
    all: Matcher,
    /// User-defined tokens only: for text that a user wrote.
    plain: Matcher,
}

impl Matcher {
    fn new(tokens: &[AddedToken], wanted: impl Fn(&AddedToken) -> bool) -> Result<Matcher, TokenizerError> {
        let indices: Vec<usize> = (0..tokens.len()).filter(|&i| wanted(&tokens[i])).collect();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(indices.iter().map(|&i| tokens[i].content.as_bytes()))
            .map_err(|e| TokenizerError::damaged("added tokens", e))?;
        Ok(Matcher { automaton, tokens: indices })
    }
}

impl AddedTokens {
    /// Builds the matchers. Refuses an empty token text, which would match everywhere.
    pub(crate) fn new(tokens: Vec<AddedToken>) -> Result<AddedTokens, TokenizerError> {
        if let Some(empty) = tokens.iter().find(|t| t.content.is_empty()) {
            return Err(TokenizerError::damaged("added tokens", format!("token {} has no text", empty.id)));
        }
        let all = Matcher::new(&tokens, |_| true)?;
        let plain = Matcher::new(&tokens, |t| !t.control)?;
        Ok(AddedTokens { tokens, all, plain })
    }

    /// Id of the added token spelled `content`.
    pub(crate) fn id_of(&self, content: &str) -> Option<u32> {
        self.tokens.iter().find(|t| t.content == content).map(|t| t.id)
    }

    /// Control tokens, in file order.
    pub(crate) fn control(&self) -> impl Iterator<Item = &AddedToken> {
        self.tokens.iter().filter(|t| t.control)
    }

    /// Calls `segment` for each piece of `text`, in order.
    pub(crate) fn for_each<E>(
        &self,
        text: &str,
        with_control: bool,
        mut segment: impl FnMut(Segment<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let matcher = if with_control { &self.all } else { &self.plain };
        let mut done = 0;
        for found in matcher.automaton.find_iter(text.as_bytes()) {
            let token = &self.tokens[matcher.tokens[found.pattern().as_usize()]];
            let (mut start, mut end) = (found.start(), found.end());
            if start < done || (token.single_word && touches_word(text, start, end)) {
                continue;
            }
            if token.lstrip {
                start = done + text[done..start].trim_end().len();
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start {
                segment(Segment::Text(&text[done..start]))?;
            }
            segment(Segment::Token(token.id))?;
            done = end;
        }
        if done < text.len() { segment(Segment::Text(&text[done..])) } else { Ok(()) }
    }
}

fn touches_word(text: &str, start: usize, end: usize) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    text[..start].chars().next_back().is_some_and(word) || text[end..].chars().next().is_some_and(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, content: &str, control: bool) -> AddedToken {
        AddedToken { id, content: content.into(), control, ..AddedToken::default() }
    }

    fn cut(added: &AddedTokens, text: &str, with_control: bool) -> Vec<String> {
        let mut out = Vec::new();
        added
            .for_each(text, with_control, |s| {
                out.push(match s {
                    Segment::Text(t) => t.to_owned(),
                    Segment::Token(id) => format!("#{id}"),
                });
                Ok::<(), ()>(())
            })
            .unwrap();
        out
    }

    #[test]
    fn control_tokens_match_only_when_allowed() {
        let added = AddedTokens::new(vec![token(1, "<|a|>", true), token(2, "<think>", false)]).unwrap();
        assert_eq!(cut(&added, "x<|a|>y<think>", true), ["x", "#1", "y", "#2"]);
        assert_eq!(cut(&added, "x<|a|>y<think>", false), ["x<|a|>y", "#2"]);
        assert!(cut(&added, "", true).is_empty());
    }

    #[test]
    fn the_longest_of_two_that_start_together_wins() {
        let added = AddedTokens::new(vec![token(1, "<a", true), token(2, "<a>", true)]).unwrap();
        assert_eq!(cut(&added, "<a><a", true), ["#2", "#1"]);
    }

    #[test]
    fn stripping_swallows_white_space_once() {
        let mut both = token(1, "<m>", true);
        (both.lstrip, both.rstrip) = (true, true);
        let added = AddedTokens::new(vec![both]).unwrap();
        assert_eq!(cut(&added, "a  <m> \n <m>b", true), ["a", "#1", "#1", "b"]);
        let mut single = token(1, "ab", false);
        single.single_word = true;
        let added = AddedTokens::new(vec![single]).unwrap();
        assert_eq!(cut(&added, "ab xab ab", true), ["#1", " xab ", "#1"]);
    }

    #[test]
    fn a_token_without_text_is_refused() {
        assert!(AddedTokens::new(vec![token(7, "", true)]).is_err());
    }
}
