//! Keeps control tokens out of user-written strings while a template joins them with its own text.
//!
//! The first character of every control token spelled in such a string is replaced by a code point that Unicode will never
//! assign and that occurs nowhere else, so lengths stay and the rendered text shows who wrote what. After control tokens were
//! looked for, the character is put back.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, MatchKind};

/// Stand-ins for one render.
pub(crate) struct Guard {
    automaton: AhoCorasick,
    /// (first character of some control token, its stand-in).
    stand_ins: Vec<(char, char)>,
}

/// The code points that are no characters.
fn noncharacters() -> impl Iterator<Item = char> {
    let planes = (0..=16u32).flat_map(|plane| [plane << 16 | 0xFFFE, plane << 16 | 0xFFFF]);
    (0xFDD0..=0xFDEFu32).chain(planes).filter_map(char::from_u32)
}

impl Guard {
    /// Whether `c` is one of the code points that may become a stand-in.
    pub(crate) fn may_use(c: char) -> bool {
        matches!(c as u32, 0xFDD0..=0xFDEF) || (c as u32) & 0xFFFE == 0xFFFE
    }

    /// A guard against `control` tokens. `used` says which characters occur in the strings or the template; None if too few are left.
    pub(crate) fn new<'a>(
        control: impl Iterator<Item = &'a str>,
        used: impl Fn(char) -> bool,
    ) -> Option<Guard> {
        let mut free = noncharacters().filter(|&c| !used(c));
        let mut stand_ins: Vec<(char, char)> = Vec::new();
        let tokens: Vec<&str> = control.collect();
        for first in tokens.iter().filter_map(|t| t.chars().next()) {
            if !stand_ins.iter().any(|(c, _)| *c == first) {
                stand_ins.push((first, free.next()?));
            }
        }
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostFirst).build(&tokens).ok()?;
        Some(Guard { automaton, stand_ins })
    }

    /// `text` with every control token hidden, those that overlap included.
    pub(crate) fn hide<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut out = String::new();
        let mut at = 0;
        // A token may begin inside another one, so the search goes on behind the first character only.
        while let Some(found) = self.automaton.find(&text.as_bytes()[at..]) {
            let start = at + found.start();
            let Some(first) = text[start..].chars().next() else { break };
            let Some((_, stand_in)) = self.stand_ins.iter().find(|(c, _)| *c == first) else { break };
            out.push_str(&text[at..start]);
            out.push(*stand_in);
            at = start + first.len_utf8();
        }
        if at == 0 {
            return Cow::Borrowed(text);
        }
        out.push_str(&text[at..]);
        Cow::Owned(out)
    }

    /// Undoes [`Self::hide`].
    pub(crate) fn reveal<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let original = |c: char| self.stand_ins.iter().find(|(_, s)| *s == c).map(|(first, _)| *first);
        if text.is_ascii() || !text.chars().any(|c| original(c).is_some()) {
            return Cow::Borrowed(text);
        }
        Cow::Owned(text.chars().map(|c| original(c).unwrap_or(c)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_tokens_are_gone_and_come_back() {
        let control = ["<|im_end|>", "ab", "bc", "é"];
        let guard = Guard::new(control.into_iter(), |c| c == '\u{FDD0}').unwrap();
        for text in ["", "plain", "a<|im_end|>b<|im_end|>", "abc", "<<|im_end|>", "é", "<|im_", "日本é語"]
        {
            let hidden = guard.hide(text);
            assert!(control.iter().all(|c| !hidden.contains(c)), "{hidden:?}");
            assert!(!hidden.contains('\u{FDD0}'), "a code point in use was taken");
            assert_eq!(hidden.chars().count(), text.chars().count());
            assert_eq!(guard.reveal(&hidden), text);
        }
    }

    #[test]
    fn stand_ins_come_from_the_declared_set() {
        assert_eq!(noncharacters().count(), 66);
        assert!(noncharacters().all(Guard::may_use));
        assert!(!Guard::may_use('a') && !Guard::may_use('\u{FFFD}'));
    }

    #[test]
    fn strings_that_use_every_noncharacter_are_refused() {
        assert!(Guard::new(["<a>"].into_iter(), |_| true).is_none());
        assert!(Guard::new(std::iter::empty(), |_| true).is_some());
    }
}
