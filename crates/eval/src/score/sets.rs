//! Lists in answers, as sets and in order.

use std::collections::BTreeSet;

/// The elements of the last bracketed list of `line`, trimmed, quotes taken off; nothing if there is no such list.
pub fn bracketed(line: &str) -> Option<Vec<String>> {
    let start = line.rfind('[')?;
    let end = start + line[start..].find(']')?;
    let inside = line[start + 1..end].trim();
    if inside.is_empty() {
        return Some(Vec::new());
    }
    let quotes = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`');
    Some(inside.split(',').map(|e| e.trim_matches(quotes).to_string()).collect())
}

/// F1 of two sets; 1 when both are empty.
pub fn f1(said: &BTreeSet<&str>, gold: &BTreeSet<&str>) -> f64 {
    if said.is_empty() && gold.is_empty() {
        return 1.0;
    }
    let both = said.intersection(gold).count() as f64;
    2.0 * both / (said.len() + gold.len()) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_from_brackets() {
        assert_eq!(bracketed("Final Answer: [a, 'b', \"c\"]").unwrap(), ["a", "b", "c"]);
        assert_eq!(bracketed("[]"), Some(Vec::new()));
        assert_eq!(bracketed("a, b"), None);
        assert_eq!(bracketed("[a"), None);
        let set = |all: &[&'static str]| all.iter().copied().collect::<BTreeSet<_>>();
        assert_eq!(f1(&set(&["a", "b"]), &set(&["b", "c"])), 0.5);
        assert_eq!(f1(&set(&[]), &set(&[])), 1.0);
    }
}
