//! A value under a key, in three more forms: a large JSON object, a question whose answer may not be there, and labels learnt from examples.

use serde_json::json;

use super::build::{Frame, Insert, answer_tokens, depths, prose, rng, spread};
use super::options::Options;
use super::values::{Kind, Source, code};
use crate::EvalError;
use crate::corpus::words;
use crate::item::{Answer, Cell, Failure, Item, Score};
use crate::rng::ItemRng;
use crate::score::retrieval::{self, Combine, judged};
use crate::score::text::declines;
use crate::task::{Kit, Task};

/// One of many pairs of a JSON object.
pub struct JsonKv;

/// A key that may have no value.
pub struct DontKnow;

/// Nonsense labels.
pub struct ManyShot;

const LISTED_DECOYS: usize = 64;

impl Task for JsonKv {
    fn name(&self) -> &'static str {
        "json_kv"
    }

    fn about(&self) -> &'static str {
        "the value of one key of a large JSON object, UUIDs on both sides"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let mut ids = Source::new(Kind::Uuid);
        let (key, value) = (ids.must(&mut facts), ids.must(&mut facts));
        let gold = vec![value.clone()];
        let frame = Frame {
            kit,
            cell,
            head: "Below is a JSON object. Find the value of a key that is named after it.\n{\n".into(),
            tail: format!("\"end\": null\n}}\nKey: \"{key}\". Answer with its value alone."),
            lead_in: Some(format!("\n\"{key}\": \"")),
            answer_tokens: answer_tokens(kit, 100, &gold),
        };
        let line = |k: &str, v: &str| format!("\"{k}\": \"{v}\",\n");
        let inserts = [Insert { text: line(&key, &value), depth: frame.depth(), needed: true }];
        let mut filler = rng(kit, cell, "filler");
        let (mut lines, mut decoys) = (Vec::new(), Vec::new());
        let context = frame.fill(&inserts, 10, |i, out| {
            while lines.len() <= i {
                let (k, v) = (ids.must(&mut filler), ids.must(&mut filler));
                lines.push(line(&k, &v));
                if decoys.len() < LISTED_DECOYS {
                    decoys.push(v);
                }
            }
            out.push_str(&lines[i]);
            true
        })?;
        while decoys.len() < 9 {
            decoys.push(ids.must(&mut filler));
        }
        frame.finish(context, gold, decoys, [("asked", json!([key]))])
    }

    named_answers!(Combine::All);
}

/// What declining is to be written as.
const DECLINE: &str = "not in the text";

impl Task for DontKnow {
    fn name(&self) -> &'static str {
        "dont_know"
    }

    fn about(&self) -> &'static str {
        "a number that the text does not give in every other sample, with near-twins that it does give"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        // Two adjectives and two nouns cross: the key that is asked shares a word with each of two that stand there.
        let (a, n) = (facts.distinct(2, words::adjectives().len()), facts.distinct(2, words::nouns().len()));
        let key = |i: usize, j: usize| format!("{}-{}", words::adjectives()[a[i]], words::nouns()[n[j]]);
        let answerable = cell.index % 2 == 1;
        let mut keys = vec![key(0, 1), key(1, 0), key(1, 1)];
        if answerable {
            keys.insert(0, key(0, 0));
        }
        let mut numbers = Source::new(Kind::Number);
        let values: Vec<String> = keys.iter().map(|_| numbers.must(&mut facts)).collect();
        let (gold, decoys): (Vec<String>, Vec<String>) = if answerable {
            let decoys = values[1..].iter().cloned().chain([DECLINE.to_string()]);
            (vec![values[0].clone()], decoys.collect())
        } else {
            (vec![DECLINE.into()], values.clone())
        };
        let asked = key(0, 0);
        let frame = Frame {
            kit,
            cell,
            head: "Some shelf numbers are noted in the text below. A question follows.\n".into(),
            tail: format!(
                "\nWhat is the shelf number of {asked}? Answer with the number alone, or with \"{DECLINE}\" if the text above does not give it."
            ),
            lead_in: Some(format!("\nThe shelf number of {asked}:")),
            answer_tokens: answer_tokens(kit, 64, &gold),
        };
        let inserts: Vec<Insert> = keys
            .iter()
            .zip(&values)
            .zip(depths(frame.depth(), keys.len()))
            .enumerate()
            .map(|(i, ((key, value), depth))| Insert {
                text: format!(" The shelf number of {key}: {value}."),
                depth,
                needed: answerable && i == 0,
            })
            .collect();
        let context = frame.fill(&inserts, 5, prose(kit.haystack, &mut rng(kit, cell, "filler")))?;
        frame.finish(context, gold, decoys, [("asked", json!([asked])), ("answerable", json!(answerable))])
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        if item.recipe["answerable"] == json!(true) {
            let mut score = retrieval::score(item, answer, Combine::All);
            if score.strict < 1.0 && score.failure == Some(Failure::Decoy) && declines(&answer.text) {
                score.failure = Some(Failure::Refused);
            }
            return score;
        }
        let declined = declines(&answer.text) && answer.finish != crate::item::Finish::Refused;
        // The words of declining are no value; whatever value is named beside them is one too many.
        let named = retrieval::named(item, &answer.text);
        let values = crate::score::text::of_shape(&answer.text, crate::score::text::Shape::Digits(7)).len();
        let right = f64::from(declined);
        let strict = if values == 0 && named.decoys == 0 { right } else { 0.0 };
        judged(answer, right, strict, if values > 0 { Failure::Decoy } else { Failure::Wrong })
    }

    drawn_answers!(Combine::Any);
}

/// Labels; as many classes.
const CLASSES: usize = 6;
/// Nouns that a class is known by.
const CLASS_NOUNS: usize = 12;

struct Lesson {
    labels: Vec<String>,
    /// Nouns of each class.
    nouns: Vec<Vec<&'static str>>,
}

impl Lesson {
    fn draw(rng: &mut ItemRng) -> Lesson {
        let mut labels: Vec<String> = Vec::new();
        while labels.len() < CLASSES {
            let label = code(rng, 5);
            if !labels.contains(&label) {
                labels.push(label);
            }
        }
        let chosen = rng.distinct(CLASSES * CLASS_NOUNS, words::nouns().len());
        let nouns =
            chosen.chunks(CLASS_NOUNS).map(|c| c.iter().map(|&n| words::nouns()[n]).collect()).collect();
        Lesson { labels, nouns }
    }

    fn example(&self, rng: &mut ItemRng, class: usize, noun: &str) -> String {
        format!("{}\nKind: {}\n\n", sentence(rng, noun), self.labels[class])
    }
}

fn sentence(rng: &mut ItemRng, noun: &str) -> String {
    format!(
        "{} {} the {} {noun} {}.",
        rng.word(words::names()),
        rng.word(words::verbs_past()),
        rng.word(words::adjectives()),
        rng.word(words::adverbs())
    )
}

impl Task for ManyShot {
    fn name(&self) -> &'static str {
        "many_shot"
    }

    fn about(&self) -> &'static str {
        "the made-up label of a sentence, learnt from labelled examples; balanced classes known by their nouns"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let lesson = Lesson::draw(&mut facts);
        let class = facts.below(CLASSES);
        let noun = *facts.pick(&lesson.nouns[class]);
        let gold = vec![lesson.labels[class].clone()];
        let decoys: Vec<String> = lesson.labels.iter().filter(|l| **l != gold[0]).cloned().collect();
        let frame = Frame {
            kit,
            cell,
            head: format!(
                "Each sentence is of one of {CLASSES} kinds. What kind a sentence is follows from the thing it speaks of. Learn the kinds from \
                 the examples.\n\n"
            ),
            tail: format!("{}\nWhat is its kind? Answer with the kind alone.", sentence(&mut facts, noun)),
            lead_in: Some("\nKind:".into()),
            answer_tokens: answer_tokens(kit, 20, &gold),
        };
        // The noun that is asked stands in two examples whose place is known; other nouns come as they come.
        let inserts: Vec<Insert> = spread(&mut facts, 2)
            .into_iter()
            .map(|depth| Insert { text: lesson.example(&mut facts, class, noun), depth, needed: true })
            .collect();
        let mut filler = rng(kit, cell, "filler");
        let mut examples: Vec<String> = Vec::new();
        let context = frame.fill(&inserts, 2 * CLASSES, |i, out| {
            while examples.len() <= i {
                let class = examples.len() % CLASSES;
                let nouns: Vec<&str> = lesson.nouns[class].iter().copied().filter(|n| *n != noun).collect();
                let other = *filler.pick(&nouns);
                examples.push(lesson.example(&mut filler, class, other));
            }
            out.push_str(&examples[i]);
            true
        })?;
        frame.finish(context, gold, decoys, [("classes", json!(CLASSES)), ("noun", json!(noun))])
    }

    named_answers!(Combine::Any);
}
