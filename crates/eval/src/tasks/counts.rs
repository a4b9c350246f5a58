//! Counting over the whole context, of the RULER kind: the ten commonest words of a numbered list, and the commonest coded words of a text
//! whose word frequencies fall with the square of their rank.

use std::collections::HashSet;

use serde_json::json;

use super::build::{Context, Frame, answer_tokens, rng};
use super::values::code;
use crate::EvalError;
use crate::corpus::words;
use crate::item::{Cell, Item, View};
use crate::rng::ItemRng;
use crate::score::retrieval::Combine;
use crate::task::{Kit, Task};

/// The ten words that stand most often in a numbered list.
pub struct CommonWords;

/// The three coded words that stand most often, the filler aside.
pub struct FrequentWords;

const CWE_ANSWER_TOKENS: usize = 120;
const FWE_ANSWER_TOKENS: usize = 50;
const COMMON: usize = 10;

/// Repeats in the list and in its worked example.
#[derive(Clone, Copy)]
struct Repeats {
    common: usize,
    other: usize,
    example_words: usize,
    example_common: usize,
    example_other: usize,
}

const LONG: Repeats =
    Repeats { common: 30, other: 3, example_words: 40, example_common: 10, example_other: 3 };
const SHORT: Repeats =
    Repeats { common: 6, other: 1, example_words: 20, example_common: 3, example_other: 1 };
/// From here on the long form is used, where it fits.
const LONG_FROM_TOKENS: usize = 4096;
/// Other words that a list has at least: with fewer there is nothing to count.
const LEAST_OTHERS: usize = 20;

/// Different words in random order without end: our lists, mixed with made-up ones in proportion to how many will be needed.
struct Vocabulary {
    known: Vec<&'static str>,
    seen: HashSet<String>,
    /// Share of made-up words.
    made_up: f64,
}

impl Vocabulary {
    fn new(rng: &mut ItemRng, expected: usize) -> Self {
        let mut known: Vec<&'static str> =
            [words::nouns(), words::adjectives(), words::verbs_past(), words::matters()]
                .concat()
                .into_iter()
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect();
        rng.shuffle(&mut known);
        let made_up = (1.0 - known.len() as f64 / (1.25 * expected.max(1) as f64)).max(0.0);
        Vocabulary { known, seen: HashSet::new(), made_up }
    }

    fn next(&mut self, rng: &mut ItemRng) -> String {
        loop {
            let word = if rng.unit() < self.made_up || self.known.is_empty() {
                let letters = 6 + rng.below(4);
                code(rng, letters)
            } else {
                self.known.pop().unwrap_or_default().to_string()
            };
            if self.seen.insert(word.clone()) {
                return word;
            }
        }
    }
}

/// `words`, each so often, in a random order.
fn shuffled<'a>(rng: &mut ItemRng, words: impl Iterator<Item = (&'a str, usize)>) -> Vec<&'a str> {
    let mut all: Vec<&str> = words.flat_map(|(w, n)| std::iter::repeat_n(w, n)).collect();
    rng.shuffle(&mut all);
    all
}

const CWE_QUESTION: &str = "\nQuestion: which ten words stand most often in the list above?";

impl CommonWords {
    fn example(rng: &mut ItemRng, vocabulary: &mut Vocabulary, repeats: Repeats) -> String {
        let words: Vec<String> = (0..repeats.example_words).map(|_| vocabulary.next(rng)).collect();
        let times = |i| if i < COMMON { repeats.example_common } else { repeats.example_other };
        let list = shuffled(rng, words.iter().enumerate().map(|(i, w)| (w.as_str(), times(i))));
        let mut text = String::from(
            "Below is a numbered list of words, in which some stand more often than others. Find the ten that stand most often. An \
             example:\n",
        );
        for (i, word) in list.iter().enumerate() {
            text.push_str(&format!(" {}. {word}", i + 1));
        }
        text.push_str(&format!(
            "{CWE_QUESTION}\nAnswer: {}\n\nNow the list that counts:\n",
            words[..COMMON].join(", ")
        ));
        text
    }

    fn build(&self, kit: &Kit<'_>, cell: &Cell, repeats: Repeats) -> Result<Item, EvalError> {
        let mut rng = rng(kit, cell, "facts");
        let counter = kit.counter;
        // An entry takes some four tokens at the least; a vocabulary that is too large only changes the mix of words.
        let expected = cell.length_tokens / (4 * repeats.other);
        let mut vocabulary = Vocabulary::new(&mut rng, expected);
        let head = Self::example(&mut rng, &mut vocabulary, repeats);
        let gold: Vec<String> = (0..COMMON).map(|_| vocabulary.next(&mut rng)).collect();
        let frame = Frame {
            kit,
            cell,
            head,
            tail: CWE_QUESTION.into(),
            lead_in: Some("\nAnswer:".into()),
            answer_tokens: answer_tokens(kit, CWE_ANSWER_TOKENS, &gold),
        };
        let mut entries = 0;
        let mut cost = |word: &str, times: usize| {
            let numbers: usize = (0..times).map(|i| counter.count(&format!(" {}.", entries + i + 1))).sum();
            entries += times;
            numbers + times * counter.count(&format!(" {word}"))
        };
        let mut tokens: usize = gold.iter().map(|w| cost(w, repeats.common)).sum();
        let (mut others, mut costs): (Vec<String>, Vec<usize>) = (Vec::new(), Vec::new());
        let full = cell.view == View::Full;
        let room = frame.room(if full { 0 } else { tokens });
        if full {
            loop {
                let word = vocabulary.next(&mut rng);
                let more = cost(&word, repeats.other);
                let fits = room.as_ref().is_ok_and(|room| tokens + more <= *room);
                if !fits && others.len() >= LEAST_OTHERS {
                    break;
                }
                tokens += more;
                others.push(word);
                costs.push(more);
                if !fits && others.len() == LEAST_OTHERS {
                    return Err(frame.too_short(frame.fixed_tokens() + tokens));
                }
            }
        }
        room?;
        loop {
            let context = self.list(&frame, &gold, &others, repeats);
            let mut over = frame.over(&context);
            if over == 0 || others.len() <= LEAST_OTHERS {
                let decoys =
                    if full { others } else { (0..COMMON).map(|_| vocabulary.next(&mut rng)).collect() };
                let more = [("repeats", json!([repeats.common, repeats.other])), ("written", json!(true))];
                return frame.finish(context, gold, decoys, more);
            }
            while over > 0 && others.len() > LEAST_OTHERS {
                others.pop();
                over = over.saturating_sub(costs.pop().unwrap_or(over));
            }
        }
    }

    fn list(&self, frame: &Frame<'_>, gold: &[String], others: &[String], repeats: Repeats) -> Context {
        let mut context = Context { units: others.len(), ..Context::default() };
        if frame.cell.view == View::ClosedBook {
            return context;
        }
        let common: HashSet<&str> = gold.iter().map(String::as_str).collect();
        let all = gold
            .iter()
            .map(|w| (w.as_str(), repeats.common))
            .chain(others.iter().map(|w| (w.as_str(), repeats.other)));
        for (i, word) in shuffled(&mut frame.rng("order"), all).into_iter().enumerate() {
            context.push(frame.kit.counter, &format!(" {}.", i + 1));
            let piece = format!(" {word}");
            if common.contains(word) {
                context.push_fact(frame.kit.counter, &piece, true);
            } else {
                context.push(frame.kit.counter, &piece);
            }
        }
        context
    }
}

impl Task for CommonWords {
    fn name(&self) -> &'static str {
        "cwe"
    }

    fn about(&self) -> &'static str {
        "the ten words that stand most often in a numbered list"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        if cell.length_tokens >= LONG_FROM_TOKENS
            && let Ok(item) = self.build(kit, cell, LONG)
        {
            return Ok(item);
        }
        self.build(kit, cell, SHORT)
    }

    named_answers!(Combine::All);
}

/// ζ(2): the sum of the inverse squares.
const ZETA_2: f64 = std::f64::consts::PI * std::f64::consts::PI / 6.0;
/// Ranks that are asked: 2 to 4 of the draw, since rank 1 becomes dots.
const ASKED: std::ops::Range<usize> = 1..4;
/// Words of the draw that a text has at least: rank 5 must fall behind rank 4.
const LEAST_DRAW: usize = 200;

impl FrequentWords {
    /// How often each rank stands in a draw of `n` words, rank 1 first, up to the last rank that stands at all.
    fn times(n: usize, vocabulary: usize) -> Vec<usize> {
        (1..=vocabulary)
            .map(|rank| (n as f64 / (rank * rank) as f64 / ZETA_2).floor() as usize)
            .take_while(|&t| t > 0)
            .collect()
    }

    fn text(&self, frame: &Frame<'_>, words: &[String], n: usize) -> Context {
        let mut context = Context::default();
        let times = Self::times(n, words.len());
        let asked_only = match frame.cell.view {
            View::ClosedBook => return context,
            View::Focused => true,
            View::Full => false,
        };
        let chosen = times.iter().enumerate().filter(|(i, _)| !asked_only || ASKED.contains(i));
        let all = shuffled(&mut frame.rng("order"), chosen.map(|(i, &t)| (words[i].as_str(), t)));
        context.units = all.len();
        for word in all {
            let piece = format!(" {word}");
            if words[ASKED].iter().any(|w| w == word) {
                context.push_fact(frame.kit.counter, &piece, true);
            } else {
                context.push(frame.kit.counter, &piece);
            }
        }
        context
    }
}

impl Task for FrequentWords {
    fn name(&self) -> &'static str {
        "fwe"
    }

    fn about(&self) -> &'static str {
        "the three commonest coded words; frequencies fall with the square of the rank"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let mut rng = rng(kit, cell, "facts");
        let (mut words, mut seen) = (vec!["...".to_string()], HashSet::new());
        while words.len() < (cell.length_tokens / 50).clamp(50, 1 << 16) {
            let word = code(&mut rng, 6);
            if seen.insert(word.clone()) {
                words.push(word);
            }
        }
        let gold = words[ASKED].to_vec();
        let frame = Frame {
            kit,
            cell,
            head: "Below is a coded text. The dots mean nothing. Find the three coded words that stand most often.\n".into(),
            tail: "\nQuestion: which three coded words stand most often in the text above, the dots aside?".into(),
            lead_in: Some("\nAnswer: the three words that stand most often are".into()),
            answer_tokens: answer_tokens(kit, FWE_ANSWER_TOKENS, &gold),
        };
        let costs: Vec<usize> = words.iter().map(|w| kit.counter.count(&format!(" {w}"))).collect();
        let tokens =
            |n| -> usize { Self::times(n, words.len()).iter().zip(&costs).map(|(t, c)| t * c).sum() };
        let room = match frame.room(0) {
            Ok(room) if tokens(LEAST_DRAW) <= room => room,
            _ => return Err(frame.too_short(frame.fixed_tokens() + tokens(LEAST_DRAW))),
        };
        // The largest draw that fits: each word of it costs a token or more, or falls under rank 1's share of dots.
        let (mut fits, mut too_many) = (LEAST_DRAW, 4 * room + LEAST_DRAW);
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            if tokens(middle) <= room { fits = middle } else { too_many = middle }
        }
        loop {
            let context = self.text(&frame, &words, fits);
            let over = frame.over(&context);
            if over == 0 || fits == LEAST_DRAW {
                let ranks = Self::times(fits, words.len()).len();
                let decoys = words[ASKED.end..ranks.max(ASKED.end + 6).min(words.len())].to_vec();
                return frame.finish(context, gold, decoys, [("draw", json!(fits)), ("ranks", json!(ranks))]);
            }
            fits = (fits - over.min(fits / 8).max(1)).max(LEAST_DRAW);
        }
    }

    named_answers!(Combine::All);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_follow_the_inverse_square() {
        let times = FrequentWords::times(10_000, 1000);
        assert_eq!(times[..4], [6079, 1519, 675, 379]);
        assert!(times.windows(2).all(|w| w[0] >= w[1]) && times.iter().sum::<usize>() <= 10_000);
        let least = FrequentWords::times(LEAST_DRAW, 50);
        assert!(least[3] > least[4], "{least:?}");
    }
}
