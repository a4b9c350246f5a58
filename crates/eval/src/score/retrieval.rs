//! Answers that name things: all of them, or one of several ways to say one. Compatible: RULER's substring test. Strict: whole words, and
//! every wrong thing that is named takes a right one away, so that listing everything is worth nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::text::{declines, names, of_shape, printable, shape};
use crate::item::{Answer, Failure, Finish, Item, Score};

/// How the gold answers combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// Each is asked for; the score is the share that is named.
    All,
    /// They are ways to say the same: one is enough.
    Any,
}

/// What an answer names.
pub struct Named {
    /// Gold answers, whole.
    pub hits: usize,
    /// Different wrong ones: decoys, and values of a gold answer's shape.
    pub wrong: usize,
    /// Of those, decoys.
    pub decoys: usize,
}

/// Strings that an answer may repeat without naming anything: what the question itself named (`recipe["asked"]`).
pub fn asked(item: &Item) -> Vec<String> {
    item.recipe
        .get("asked")
        .and_then(|v| v.as_array())
        .map(|a| a.iter().filter_map(|s| s.as_str()).map(str::to_lowercase).collect())
        .unwrap_or_default()
}

/// Looks for gold and wrong answers in `text`.
pub fn named(item: &Item, text: &str) -> Named {
    let text = printable(text).to_lowercase();
    let gold: BTreeSet<String> = item.gold.iter().map(|g| g.to_lowercase()).collect();
    let asked = asked(item);
    let hits: BTreeSet<&str> = gold.iter().map(String::as_str).filter(|g| names(&text, g)).collect();
    // A decoy that only stands inside a gold answer that is named ("north" in "north gate") was not chosen.
    let mut rest = text.clone();
    let mut by_length: Vec<&str> = hits.iter().copied().collect();
    by_length.sort_by_key(|h| std::cmp::Reverse(h.len()));
    for hit in by_length {
        rest = blank(&rest, hit);
    }
    let mut wrong: BTreeSet<String> = BTreeSet::new();
    for decoy in item.decoys.iter().map(|d| d.to_lowercase()) {
        if !gold.contains(&decoy) && names(&rest, &decoy) {
            wrong.insert(decoy);
        }
    }
    let decoys = wrong.len();
    let shapes: BTreeSet<_> = gold.iter().filter_map(|g| shape(g)).collect();
    for s in shapes {
        let others = of_shape(&rest, s);
        wrong.extend(
            others.into_iter().map(str::to_string).filter(|v| !gold.contains(v) && !asked.contains(v)),
        );
    }
    Named { hits: hits.len(), wrong: wrong.len(), decoys }
}

/// `text` with each whole `name` overwritten, so that shorter names inside it are not found again.
fn blank(text: &str, name: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    for at in super::text::whole_matches(text, name) {
        if at >= from {
            out.push_str(&text[from..at]);
            out.push('\u{1}');
            from = at + name.len();
        }
    }
    out.push_str(&text[from..]);
    out
}

/// RULER's score of one answer.
pub fn compatible(gold: &[String], text: &str, combine: Combine) -> f64 {
    let text = printable(text).to_lowercase();
    let found = gold.iter().filter(|g| text.contains(&g.to_lowercase())).count();
    match combine {
        _ if gold.is_empty() => 0.0,
        Combine::All => found as f64 / gold.len() as f64,
        Combine::Any => f64::from(found > 0),
    }
}

/// Judges one answer.
pub fn score(item: &Item, answer: &Answer, combine: Combine) -> Score {
    let named = named(item, &answer.text);
    let different: BTreeSet<String> = item.gold.iter().map(|g| g.to_lowercase()).collect();
    let (hits, asked) = match combine {
        Combine::All => (named.hits, different.len()),
        Combine::Any => (named.hits.min(1), 1),
    };
    let strict = hits.saturating_sub(named.wrong) as f64 / asked.max(1) as f64;
    let precision = hits as f64 / (hits + named.wrong).max(1) as f64;
    let recall = hits as f64 / asked.max(1) as f64;
    let f1 = if hits == 0 { 0.0 } else { 2.0 * precision * recall / (precision + recall) };
    Score {
        compatible: compatible(&item.gold, &answer.text, combine),
        strict,
        failure: failure(answer, strict, hits, asked, &named),
        detail: BTreeMap::from([("set_f1".to_string(), f1), ("named_wrong".to_string(), named.wrong as f64)]),
    }
}

fn failure(answer: &Answer, strict: f64, hits: usize, asked: usize, named: &Named) -> Option<Failure> {
    if strict >= 1.0 {
        None
    } else if hits == asked {
        Some(Failure::Listed)
    } else if let Some(why) = silence(answer) {
        Some(why)
    } else if hits > 0 && named.wrong == 0 {
        Some(Failure::Partial)
    } else if hits > 0 {
        Some(Failure::Listed)
    } else if named.decoys > 0 {
        Some(Failure::Decoy)
    } else if named.wrong == 0 && declines(&answer.text) {
        Some(Failure::Refused)
    } else {
        Some(Failure::Wrong)
    }
}

/// Why an answer that is not right may have had no chance: refused by the endpoint, cut by the limit, or not there.
pub fn silence(answer: &Answer) -> Option<Failure> {
    match answer.finish {
        Finish::Refused => Some(Failure::Refused),
        Finish::Length => Some(Failure::Cut),
        _ if answer.text.trim().is_empty() && answer.tool_calls.is_empty() => Some(Failure::Empty),
        _ => None,
    }
}

/// All gold answers in a row, or the first way to say it: right under both readings.
pub fn right(item: &Item, combine: Combine) -> Answer {
    let text = match combine {
        Combine::All => item.gold.join(", "),
        Combine::Any => item.gold.first().cloned().unwrap_or_default(),
    };
    Answer { text, ..Answer::default() }
}

/// As many different ones as are asked, drawn from gold and decoys.
pub fn guess(item: &Item, combine: Combine, draw: &mut dyn FnMut(usize) -> usize) -> Answer {
    let mut pool: Vec<&str> = pool(item, combine);
    let wanted = if combine == Combine::Any { 1 } else { item.gold.len() };
    let mut chosen = Vec::new();
    while chosen.len() < wanted && !pool.is_empty() {
        chosen.push(pool.swap_remove(draw(pool.len())));
    }
    Answer { text: chosen.join(", "), ..Answer::default() }
}

fn pool(item: &Item, combine: Combine) -> Vec<&str> {
    let gold = if combine == Combine::Any { &item.gold[..item.gold.len().min(1)] } else { &item.gold[..] };
    gold.iter().chain(&item.decoys).map(String::as_str).collect()
}

/// The mean compatible score of [`guess`]: each gold answer is drawn with probability wanted / pool, and any other drawn one may hold it by
/// accident as a substring, which the scorer itself is asked.
pub fn chance(item: &Item, combine: Combine) -> f64 {
    let pool = pool(item, combine);
    if pool.is_empty() {
        return 0.0;
    }
    if combine == Combine::Any {
        let sum: f64 = pool.iter().map(|p| compatible(&item.gold, p, combine)).sum();
        return sum / pool.len() as f64;
    }
    let wanted = item.gold.len().min(pool.len());
    let mut sum = 0.0;
    for gold in &item.gold {
        let lower = gold.to_lowercase();
        let holds = pool.iter().filter(|p| p.to_lowercase().contains(&lower)).count();
        // 1 − P(none of `holds` is among `wanted` drawn without replacement).
        let none: f64 = (0..wanted)
            .map(|i| (pool.len() - holds).saturating_sub(i) as f64 / (pool.len() - i) as f64)
            .product();
        sum += 1.0 - none;
    }
    sum / item.gold.len() as f64
}

/// One answer drawn from all gold answers and decoys.
pub fn guess_one(item: &Item, draw: &mut dyn FnMut(usize) -> usize) -> Answer {
    let pool: Vec<&str> = item.gold.iter().chain(&item.decoys).map(String::as_str).collect();
    if pool.is_empty() { Answer::default() } else { says(pool[draw(pool.len())]) }
}

/// The mean compatible score of [`guess_one`], by asking the scorer about each.
pub fn chance_one(item: &Item, score: impl Fn(&Answer) -> Score) -> f64 {
    let pool = item.gold.iter().chain(&item.decoys);
    let sum: f64 = pool.map(|p| score(&says(p)).compatible).sum();
    sum / (item.gold.len() + item.decoys.len()).max(1) as f64
}

/// An answer of plain text.
pub fn says(text: impl Into<String>) -> Answer {
    Answer { text: text.into(), ..Answer::default() }
}

/// A score with a failure for whatever is not strictly right: silence first, then `otherwise`.
pub fn judged(answer: &Answer, compatible: f64, strict: f64, otherwise: Failure) -> Score {
    let failure = (strict < 1.0).then(|| silence(answer).unwrap_or(otherwise));
    Score { compatible, strict, failure, detail: BTreeMap::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::{Cell, Prompt, View};

    fn item(gold: &[&str], decoys: &[&str]) -> Item {
        let owned = |all: &[&str]| all.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        Item {
            cell: Cell { task: "t".into(), length_tokens: 1, index: 0, view: View::Full },
            prompt: Prompt::default(),
            answer_tokens: 1,
            prompt_tokens: 1,
            gold: owned(gold),
            decoys: owned(decoys),
            facts: Vec::new(),
            recipe: BTreeMap::new(),
        }
    }

    fn says(item: &Item, text: &str) -> Score {
        score(item, &super::says(text), Combine::All)
    }

    #[test]
    fn c55_answers_are_scored_by_what_they_say() {
        let item = item(&["7412"], &["9999"]);
        for text in ["7412", "The number is 7412."] {
            let s = says(&item, text);
            assert_eq!((s.compatible, s.strict, s.failure), (1.0, 1.0, None), "{text}");
        }
        let split = says(&item, "74 12");
        assert_eq!((split.compatible, split.strict, split.failure), (0.0, 0.0, Some(Failure::Wrong)));
        let declined = says(&item, "I do not know");
        assert_eq!(
            (declined.compatible, declined.strict, declined.failure),
            (0.0, 0.0, Some(Failure::Refused))
        );
        let twice = says(&item, "The access number is 7412. The number is 7412.");
        assert_eq!((twice.compatible, twice.strict), (1.0, 1.0));
        assert_eq!(says(&item, "").failure, Some(Failure::Empty));
        assert_eq!(says(&item, "9999").failure, Some(Failure::Decoy));
        assert_eq!(says(&item, "1234").failure, Some(Failure::Wrong));
        let cut = score(
            &item,
            &Answer { text: "74".into(), finish: Finish::Length, ..Answer::default() },
            Combine::All,
        );
        assert_eq!(cut.failure, Some(Failure::Cut));
    }

    #[test]
    fn a_liar_who_lists_everything_gets_nothing_strict() {
        let item = item(&["1111", "2222"], &["3333", "4444"]);
        let s = says(&item, "1111, 2222, 3333, 4444");
        assert_eq!((s.compatible, s.strict, s.failure), (1.0, 0.0, Some(Failure::Listed)));
        // Values that no decoy list knows count as named all the same.
        assert_eq!(says(&item, "1111, 2222, 5555").strict, 0.5);
        assert_eq!(says(&item, "1111").failure, Some(Failure::Partial));
    }

    #[test]
    fn a_decoy_inside_the_gold_answer_was_not_chosen() {
        let s = says(&item(&["north gate"], &["gate", "north"]), "At the north gate.");
        assert_eq!((s.strict, s.failure), (1.0, None));
    }

    #[test]
    fn chance_counts_decoys_that_hold_the_gold_as_a_substring() {
        assert_eq!(chance(&item(&["12"], &["123", "45", "67"]), Combine::All), 0.5);
        assert_eq!(chance(&item(&["a", "b"], &["c", "d"]), Combine::All), 0.5);
    }
}
