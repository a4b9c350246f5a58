//! Looking into an answer's text: normal forms, whole words, things of one shape, and whether the model declined.

/// RULER's post-processing: trimmed, control characters as line breaks, trimmed again.
pub fn printable(text: &str) -> String {
    let replaced: String = text.trim().chars().map(|c| if c < '\u{20}' { '\n' } else { c }).collect();
    replaced.trim().to_string()
}

/// Whether `name` stands in `text` as a whole: no letter or digit touches it, and no digit through a point, comma or hyphen
/// ("7412" is not in "74 12", "17412", "7412.5" or "7,412,000"). Both in lower case already.
pub fn names(text: &str, name: &str) -> bool {
    whole_matches(text, name).next().is_some()
}

/// Byte positions where `name` stands in `text` as a whole.
pub fn whole_matches<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(name)
        .map(|(at, _)| at)
        .filter(move |&at| !name.is_empty() && free_before(text, at) && free_after(text, at + name.len()))
}

fn free_before(text: &str, at: usize) -> bool {
    let mut before = text[..at].chars().rev();
    match before.next() {
        None => true,
        Some(c) if c.is_alphanumeric() || c == '_' => false,
        Some('.' | ',' | '-' | ':' | '/') => {
            let digit_follows = text[at..].starts_with(|c: char| c.is_ascii_digit());
            !(digit_follows && before.next().is_some_and(|c| c.is_ascii_digit()))
        }
        Some('\u{2010}' | '\u{2011}') => false,
        Some(_) => true,
    }
}

fn free_after(text: &str, end: usize) -> bool {
    let mut after = text[end..].chars();
    match after.next() {
        None => true,
        Some(c) if c.is_alphanumeric() || c == '_' => false,
        Some('.' | ',' | '-' | ':' | '/') => {
            let digit_before = text[..end].ends_with(|c: char| c.is_ascii_digit());
            !(digit_before && after.next().is_some_and(|c| c.is_ascii_digit()))
        }
        Some(_) => true,
    }
}

/// A form that values of one kind share, so that a wrong value is seen as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Shape {
    /// Decimal digits, so many.
    Digits(usize),
    /// 8-4-4-4-12 hexadecimal digits.
    Uuid,
}

/// The shape of a value, if it has one that can be told from ordinary words.
pub fn shape(value: &str) -> Option<Shape> {
    if is_uuid(value) {
        Some(Shape::Uuid)
    } else if value.len() >= 3 && value.bytes().all(|b| b.is_ascii_digit()) {
        Some(Shape::Digits(value.len()))
    } else {
        None
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        })
}

/// Everything of one shape that stands in `text` as a whole.
pub fn of_shape(text: &str, shape: Shape) -> Vec<&str> {
    let part = |c: char| c.is_ascii_hexdigit() || (shape == Shape::Uuid && c == '-');
    text.split(|c: char| !(part(c) || c.is_alphanumeric()))
        .filter(|run| match shape {
            Shape::Digits(n) => run.len() == n && run.bytes().all(|b| b.is_ascii_digit()),
            Shape::Uuid => is_uuid(run),
        })
        .collect()
}

/// Ways to say that one cannot say. The rule: an answer that holds one of them and none of the right ones has declined; it scores nothing
/// and is counted apart from wrong answers.
const DECLINING: [&str; 22] = [
    "i do not know",
    "i don't know",
    "i don\u{2019}t know",
    "not mentioned",
    "not stated",
    "not specified",
    "not given",
    "not provided",
    "not in the text",
    "does not say",
    "doesn't say",
    "does not mention",
    "does not contain",
    "no information",
    "cannot be determined",
    "can't be determined",
    "cannot be answered",
    "cannot answer",
    "can't answer",
    "unknown",
    "unanswerable",
    "there is no mention",
];

/// Whether the text declines to answer.
pub fn declines(text: &str) -> bool {
    let lower = text.to_lowercase();
    DECLINING.iter().any(|d| lower.contains(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_counts_whole_and_not_in_pieces() {
        for yes in [
            "7412",
            "the number is 7412.",
            "(7412)",
            "a: 7412, b",
            "7412\n",
            "=7412;",
            "7412, 7413",
            "x 7412-",
        ] {
            assert!(names(yes, "7412"), "{yes}");
        }
        for no in
            ["74 12", "17412", "74123", "7412.5", "1,7412", "7412,000", "x7412", "7412kg", "", "7 4 1 2"]
        {
            assert!(!names(no, "7412"), "{no}");
        }
    }

    #[test]
    fn no_inside_not_is_not_an_answer() {
        assert!(!names("it is not", "no") && names("no, it is", "no") && !names("nothing", "no"));
    }

    #[test]
    fn values_are_seen_by_their_shape() {
        let id = "0a1b2c3d-0000-4000-8000-00000000ffff";
        assert_eq!(shape(id), Some(Shape::Uuid));
        assert_eq!(shape("1234567"), Some(Shape::Digits(7)));
        assert_eq!(shape("otter"), None);
        assert_eq!(of_shape(&format!("a {id}, {id}x 1234567"), Shape::Uuid), [id]);
        assert_eq!(of_shape("1234567 12345678 a1234567 7654321.", Shape::Digits(7)), ["1234567", "7654321"]);
    }

    #[test]
    fn printable_is_what_ruler_makes_of_an_answer() {
        assert_eq!(printable(" \u{1}a\tb\u{0}\n"), "a\nb");
    }
}
