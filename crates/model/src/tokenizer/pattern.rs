//! Which patterns of a tokenizer.json the linear engine runs with the meaning that the reference's engine (Oniguruma) gives them.
//!
//! The two read many spellings differently and neither says so: `a++` is possessive to one and nested to the other, `\w` differs by the joiners,
//! `[[:alpha:]]` by everything past ASCII, `(?m:` by what the letter means, `[a-c--b]` by what the dashes do. Ids would change in silence, so a
//! pattern is taken only if all of its parts are on a list of those that mean the same; `scripts/make-tokenizer-fixtures.py` writes what the reference
//! cuts by them. The published patterns with a look-ahead are known by their text in `split.rs` and do not come here.

use regex::{Regex, RegexBuilder};
use regex_syntax::ast::{
    AssertionKind, Ast, ClassPerlKind, ClassSet, ClassSetItem, ClassUnicode, ClassUnicodeKind, GroupKind,
    HexLiteralKind, Literal, LiteralKind, RepetitionKind, RepetitionRange, parse::Parser,
};

/// Scripts by whose names both engines mean the same characters. General categories are taken by their one or two letters.
const SCRIPTS: [&str; 10] =
    ["Han", "Hiragana", "Katakana", "Hangul", "Latin", "Greek", "Cyrillic", "Arabic", "Hebrew", "Thai"];

/// The pattern for the linear engine; `None` where the two engines may differ, or where it matches the empty text.
pub(super) fn exact(pattern: &str) -> Option<Regex> {
    let ast = Parser::new().parse(pattern).ok()?;
    // The reference's engine ends a line, not the text, at `$`.
    let hir = regex_syntax::ParserBuilder::new().multi_line(true).build().parse(pattern).ok()?;
    let some_text = hir.properties().minimum_len().is_some_and(|n| n > 0);
    if !(some_text && means_the_same(&ast)) {
        return None;
    }
    RegexBuilder::new(pattern).multi_line(true).build().ok()
}

/// Depth is bounded by the parser's own limit on nesting.
fn means_the_same(ast: &Ast) -> bool {
    match ast {
        Ast::Empty(_) | Ast::Dot(_) => true,
        Ast::Flags(_) => false,
        Ast::Literal(literal) => same_literal(literal),
        // `^` after the last line break is a place to the one engine only.
        Ast::Assertion(a) => {
            matches!(a.kind, AssertionKind::EndLine | AssertionKind::StartText | AssertionKind::EndText)
        }
        Ast::ClassUnicode(class) => same_class(class),
        Ast::ClassPerl(class) => same_perl(&class.kind),
        Ast::ClassBracketed(class) => match &class.kind {
            ClassSet::Item(item) => same_item(item),
            ClassSet::BinaryOp(_) => false,
        },
        Ast::Repetition(r) => {
            let stacked = matches!(*r.ast, Ast::Repetition(_));
            // Oniguruma reads `{2}?` as "twice or not at all".
            let counted_lazy =
                !r.greedy && matches!(r.op.kind, RepetitionKind::Range(RepetitionRange::Exactly(_)));
            !stacked && !counted_lazy && means_the_same(&r.ast)
        }
        Ast::Group(group) => {
            let plain = match &group.kind {
                GroupKind::CaptureIndex(_) => true,
                GroupKind::CaptureName { .. } => false,
                GroupKind::NonCapturing(flags) => flags.items.is_empty(),
            };
            plain && means_the_same(&group.ast)
        }
        Ast::Alternation(a) => a.asts.iter().all(means_the_same),
        Ast::Concat(c) => c.asts.iter().all(means_the_same),
    }
}

/// A `\xE9` is a byte to one engine and a character to the other.
fn same_literal(literal: &Literal) -> bool {
    !matches!(literal.kind, LiteralKind::HexFixed(HexLiteralKind::X)) || literal.c.is_ascii()
}

fn same_perl(kind: &ClassPerlKind) -> bool {
    match kind {
        ClassPerlKind::Digit | ClassPerlKind::Space => true,
        ClassPerlKind::Word => false,
    }
}

fn same_class(class: &ClassUnicode) -> bool {
    match &class.kind {
        // `\pL` without braces is text to the reference's engine.
        ClassUnicodeKind::OneLetter(_) => false,
        ClassUnicodeKind::Named(name) => name.len() <= 2 || SCRIPTS.contains(&name.as_str()),
        ClassUnicodeKind::NamedValue { .. } => false,
    }
}

fn same_item(item: &ClassSetItem) -> bool {
    match item {
        ClassSetItem::Empty(_) => true,
        ClassSetItem::Literal(literal) => same_literal(literal),
        ClassSetItem::Range(range) => same_literal(&range.start) && same_literal(&range.end),
        ClassSetItem::Ascii(_) => false,
        ClassSetItem::Unicode(class) => same_class(class),
        ClassSetItem::Perl(class) => same_perl(&class.kind),
        // A bracket in brackets: a set of its own to both, but one negates what the other joins.
        ClassSetItem::Bracketed(_) => false,
        ClassSetItem::Union(union) => union.items.iter().all(same_item),
    }
}

#[cfg(test)]
mod tests {
    use super::super::steps::{Step, Steps};
    use super::*;

    /// What the `tokenizers` library of Python cuts, which runs Oniguruma.
    #[test]
    fn accepted_patterns_cut_as_the_reference_does() {
        let rows: Vec<serde_json::Value> =
            serde_json::from_str(include_str!("../../tests/fixtures/tokenizer/cuts.expected.json")).unwrap();
        let text = rows[0]["text"].as_str().unwrap();
        assert!(rows.len() > 10);
        for row in &rows[1..] {
            let pattern = row["pattern"].as_str().unwrap();
            let step = Step::pattern(pattern).unwrap_or_else(|| panic!("{pattern} is refused"));
            let mut ours = Vec::new();
            Steps::new(vec![step])
                .for_each::<()>(text, &mut |piece| {
                    ours.push((piece.chars().count(), piece.to_owned()));
                    Ok(())
                })
                .unwrap();
            let theirs = row["chars"].as_array().unwrap();
            for (at, ((count, piece), wanted)) in ours.iter().zip(theirs).enumerate() {
                assert_eq!(*count as u64, wanted.as_u64().unwrap(), "{pattern}: piece {at}, {piece:?}");
            }
            assert_eq!(ours.len(), theirs.len(), "{pattern}");
        }
    }

    /// Each of these is read differently by the two engines, or may be.
    #[test]
    fn patterns_that_the_reference_reads_otherwise_are_refused() {
        let other = [
            r"\w+",
            r"\W",
            r"[\w-]",
            r"\bа",
            r"\B",
            r"a++a",
            r"a*+",
            r"a?+",
            r"a{2}+",
            r"a{2}?",
            r"[[:alpha:]]+",
            r"[a[b]]",
            r"[a&&b]",
            r"[a-c--b]+",
            r"[a~~b]",
            r"(?m:.+)",
            r"(?i:ss)",
            r"(?i)k",
            r"(?x) a",
            r"^a",
            r"\xE9",
            r"(?P<n>a)",
            r"\p{Alphabetic}+",
            r"\p{script=Han}",
            r"\s*",
            r"a|",
            r"$",
            r"(?=a)",
            r"\pL",
            r"a(?!b)",
            r"(a)\1",
        ];
        for pattern in other {
            assert!(exact(pattern).is_none(), "{pattern}");
        }
    }
}
