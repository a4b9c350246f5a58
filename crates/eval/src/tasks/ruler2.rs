//! The twelve cells of the RULER-v2 kind: multi-key, multi-value and questions over documents, each at four levels. Basic: retrieve; easy:
//! copy what is stored under an index, or name the index of the document that answers; medium: do that first, then solve; hard: solve at once.
//! What upstream takes from public sets is generated here: sums and word questions for the stored problems, a made-up world for documents.

use serde_json::json;

use super::build::{Frame, Insert, answer_tokens, depths, rng};
use super::values::{Kind, Source, number};
use super::world::{Names, Person};
use crate::EvalError;
use crate::corpus::words;
use crate::item::{Answer, Cell, Item, Score};
use crate::rng::ItemRng;
use crate::score::edit::word_error_rate;
use crate::score::retrieval::{self, Combine};
use crate::task::{Kit, Task};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Domain {
    Key,
    Value,
    Qa,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Basic,
    Easy,
    Medium,
    Hard,
}

/// One cell of the grid.
pub struct Ruler2 {
    name: &'static str,
    about: &'static str,
    domain: Domain,
    level: Level,
}

const fn cell(name: &'static str, about: &'static str, domain: Domain, level: Level) -> Ruler2 {
    Ruler2 { name, about, domain, level }
}

/// The grid.
pub static CELLS: [Ruler2; 12] = [
    cell(
        "ruler2_mk_basic",
        "a ten-digit number by its key, among lines of the same kind",
        Domain::Key,
        Level::Basic,
    ),
    cell("ruler2_mk_easy", "copy the problem under an index", Domain::Key, Level::Easy),
    cell("ruler2_mk_medium", "copy the problem under an index, then solve it", Domain::Key, Level::Medium),
    cell("ruler2_mk_hard", "solve the problem under an index", Domain::Key, Level::Hard),
    cell("ruler2_mv_basic", "four ten-digit numbers of one key", Domain::Value, Level::Basic),
    cell("ruler2_mv_easy", "copy the four problems under one index", Domain::Value, Level::Easy),
    cell(
        "ruler2_mv_medium",
        "copy the four problems under one index, then solve the n-th",
        Domain::Value,
        Level::Medium,
    ),
    cell("ruler2_mv_hard", "solve the n-th problem under one index", Domain::Value, Level::Hard),
    cell("ruler2_qa_basic", "the index of a document from its own text", Domain::Qa, Level::Basic),
    cell("ruler2_qa_easy", "the index of the document that answers a question", Domain::Qa, Level::Easy),
    cell(
        "ruler2_qa_medium",
        "the index of the document that answers, then the answer",
        Domain::Qa,
        Level::Medium,
    ),
    cell("ruler2_qa_hard", "the answer, from one of many documents", Domain::Qa, Level::Hard),
];

const ORDINALS: [&str; 4] = ["first", "second", "third", "fourth"];
const LISTED_DECOYS: usize = 64;

/// A problem that can be stored and solved: its text and its solution.
fn problem(rng: &mut ItemRng) -> (String, String) {
    match rng.below(3) {
        0 => {
            let (a, b) = (100 + rng.below(900), 100 + rng.below(900));
            (format!("How much is {a} plus {b}?"), (a + b).to_string())
        }
        1 => {
            let (a, b) = (1000 + rng.below(9000), 100 + rng.below(800));
            (format!("How much is {a} minus {b}?"), (a - b).to_string())
        }
        _ => {
            let (a, b) = (11 + rng.below(89), 11 + rng.below(89));
            (format!("How much is {a} times {b}?"), (a * b).to_string())
        }
    }
}

/// What an item of a cell asks.
struct Question {
    head: &'static str,
    tail: String,
    gold: Vec<String>,
    decoys: Vec<String>,
    asked: Vec<String>,
    inserts: Vec<Insert>,
}

impl Ruler2 {
    fn draw(&self, kit: &Kit<'_>, cell: &Cell, first: f64) -> Question {
        let mut rng = rng(kit, cell, "facts");
        match self.domain {
            Domain::Key => self.stored(&mut rng, 1, first),
            Domain::Value => self.stored(&mut rng, 4, first),
            Domain::Qa => self.documents(&mut rng, first),
        }
    }

    /// One key or index with `n` things under it.
    fn stored(&self, rng: &mut ItemRng, n: usize, first: f64) -> Question {
        let basic = self.level == Level::Basic;
        let key = if basic { Source::new(Kind::Words).must(rng) } else { number(rng, 7) };
        let mut places = depths(first, n);
        // "n-th" counts in order of appearance.
        places.sort_by(f64::total_cmp);
        let mut things: Vec<(String, String)> = Vec::new();
        while things.len() < n {
            let thing = if basic { (number(rng, 10), String::new()) } else { problem(rng) };
            if things.iter().all(|(text, solution)| *text != thing.0 && (basic || *solution != thing.1)) {
                things.push(thing);
            }
        }
        let inserts = things
            .iter()
            .zip(places)
            .map(|((text, _), depth)| Insert { text: line(basic, &key, text), depth, needed: true })
            .collect();
        let which = rng.below(n);
        let nth = if n == 1 { "the problem".into() } else { format!("the {} problem", ORDINALS[which]) };
        let texts: Vec<String> = things.iter().map(|(text, _)| text.clone()).collect();
        let all = if n == 1 { "the problem" } else { "all four problems" };
        let (tail, gold) = match self.level {
            Level::Basic if n == 1 => {
                (format!("\nWhat is the number of {key}? Answer with the number alone."), texts)
            }
            Level::Basic => (
                format!(
                    "\nWhat are the four numbers of {key}? Answer with the numbers, separated by commas."
                ),
                texts,
            ),
            Level::Easy => {
                (format!("\nCopy {all} under index {key}, word for word, and nothing else."), texts)
            }
            Level::Medium => (
                format!(
                    "\nCopy {all} under index {key}. Then solve {nth} and write its solution as a paragraph of its own at the end."
                ),
                vec![things[which].1.clone()],
            ),
            Level::Hard => (
                format!("\nSolve {nth} stored under index {key}. Answer with the solution alone."),
                vec![things[which].1.clone()],
            ),
        };
        let solving = matches!(self.level, Level::Medium | Level::Hard);
        let decoys = if solving {
            things.iter().enumerate().filter(|(i, _)| *i != which).map(|(_, t)| t.1.clone()).collect()
        } else {
            Vec::new()
        };
        let head = if basic {
            "Below are lines with keys and numbers.\n"
        } else {
            "Below are problems, each stored under an index. Several may share one.\n"
        };
        Question { head, tail, gold, decoys, asked: vec![key], inserts }
    }

    fn documents(&self, rng: &mut ItemRng, first: f64) -> Question {
        let mut names = Names::default();
        let (family, town) = (names.invent(rng), names.invent(rng));
        let person = Person::draw(rng, &mut names, &family, &town);
        let index = number(rng, 7);
        let text = person.paragraph(rng);
        let question = format!("In which town was {} born?", person.name);
        let (tail, gold) = match self.level {
            Level::Basic => (
                format!(
                    "Which index has the document that reads: \"{}\" Answer with the index alone.",
                    text.trim().replace('\n', " ")
                ),
                index.clone(),
            ),
            Level::Easy => (
                format!(
                    "Question: {question} Answer with the index of the document that says so, and nothing else."
                ),
                index.clone(),
            ),
            Level::Medium => (
                format!(
                    "Question: {question} Give the index of the document that says so, then the answer as a paragraph of its own at the end."
                ),
                town,
            ),
            Level::Hard => (format!("Question: {question} Answer with the town alone."), town),
        };
        let inserts = vec![Insert { text: document(&index, &text), depth: first, needed: true }];
        Question {
            head: "Below are documents, each with an index.\n\n",
            tail,
            gold: vec![gold],
            decoys: Vec::new(),
            asked: Vec::new(),
            inserts,
        }
    }

    /// What a line of filler offers as a wrong answer.
    fn filler(&self, rng: &mut ItemRng, names: &mut Names) -> (String, String) {
        match (self.domain, self.level) {
            (Domain::Qa, level) => {
                let (family, town) = (names.invent(rng), names.invent(rng));
                let person = Person::draw(rng, names, &family, &town);
                let index = number(rng, 7);
                let text = document(&index, &person.paragraph(rng));
                (text, if matches!(level, Level::Basic | Level::Easy) { index } else { town })
            }
            (_, Level::Basic) => {
                let key = format!("{}-{}", rng.word(words::adjectives()), rng.word(words::nouns()));
                let value = number(rng, 10);
                (line(true, &key, &value), value)
            }
            (_, level) => {
                let (text, solution) = problem(rng);
                let stored = line(false, &number(rng, 7), &text);
                (stored, if level == Level::Easy { text } else { solution })
            }
        }
    }
}

fn line(basic: bool, key: &str, text: &str) -> String {
    if basic { format!("The number of {key}: {text}\n") } else { format!("Index {key}: {text}\n") }
}

fn document(index: &str, text: &str) -> String {
    format!("Document {index}\n{text}")
}

impl Task for Ruler2 {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let Question { head, tail, gold, mut decoys, asked, inserts } =
            self.draw(kit, cell, super::build::depth(kit, cell));
        let copied: String = inserts.iter().map(|i| i.text.as_str()).collect();
        let two_steps = self.level == Level::Medium;
        let frame = Frame {
            kit,
            cell,
            head: head.into(),
            tail,
            lead_in: Some("\nAnswer:".into()),
            answer_tokens: answer_tokens(kit, 64, &gold)
                + if two_steps { kit.counter.count(&copied) } else { 0 },
        };
        let mut filler = rng(kit, cell, "filler");
        let (mut names, mut lines) = (Names::default(), Vec::new());
        let context = frame.fill(&inserts, 4, |i, out| {
            while lines.len() <= i {
                let (text, decoy) = loop {
                    let (text, decoy) = self.filler(&mut filler, &mut names);
                    let key = |k: &String| text.contains(k.as_str());
                    if !gold.contains(&decoy) && !gold.iter().any(key) && !asked.iter().any(key) {
                        break (text, decoy);
                    }
                };
                lines.push(text);
                if decoys.len() < LISTED_DECOYS {
                    decoys.push(decoy);
                }
            }
            out.push_str(&lines[i]);
            true
        })?;
        while decoys.len() < 2 * gold.len() + 4 {
            let decoy = self.filler(&mut filler, &mut names).1;
            if !gold.contains(&decoy) {
                decoys.push(decoy);
            }
        }
        let solved = matches!(self.level, Level::Medium | Level::Hard) && self.domain != Domain::Qa;
        let more =
            [("asked", json!(asked)), ("last_paragraph", json!(two_steps)), ("written", json!(!solved))];
        frame.finish(context, gold, decoys, more)
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let text = answer.text.rsplit("</think>").next().unwrap_or("").trim();
        let text =
            if self.level == Level::Medium { text.rsplit("\n\n").next().unwrap_or(text) } else { text };
        let judged = Answer { text: text.to_string(), ..answer.clone() };
        let mut score = retrieval::score(item, &judged, Combine::All);
        let lower = text.to_lowercase();
        let per = |gold: &String| {
            let gold = gold.to_lowercase();
            let hit = f64::from(lower.contains(&gold));
            hit.max(1.0 - word_error_rate(&gold, &lower))
        };
        score.compatible = item.gold.iter().map(per).sum::<f64>() / item.gold.len().max(1) as f64;
        score
    }

    // A guess is one of all, drawn alone: the scorer itself says what each is worth, near misses of copied sentences included.
    drawn_answers!(Combine::All);
}
