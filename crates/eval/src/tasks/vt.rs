//! Variable tracking of the RULER kind: a number is bound to a name, the name's value to another name, and so on; which names hold it? One
//! short worked example comes first, drawn anew for each item.

use std::collections::BTreeSet;

use serde_json::json;

use super::build::{Frame, Insert, answer_tokens, rng, spread};
use super::niah::LINES;
use super::options::Options;
use super::values::number;
use crate::EvalError;
use crate::item::{Answer, Cell, Failure, Item, Score};
use crate::rng::ItemRng;
use crate::score::{retrieval, retrieval::Combine, text};
use crate::task::{Kit, Knob, Range, Task};

/// Chains of assignments.
pub struct Tracking;

const ANSWER_TOKENS: usize = 30;

const KNOBS: &[Knob] = &[
    Knob {
        name: "hops",
        range: Range::Whole { least: 1, most: 32, default: Some(4) },
        about: "assignments from name to name",
    },
    Knob {
        name: "chains",
        range: Range::Whole { least: 1, most: 16, default: Some(1) },
        about: "chains in the context, of which one is asked",
    },
];

/// Names of so many capitals that were not drawn before.
fn fresh(rng: &mut ItemRng, letters: usize, seen: &mut BTreeSet<String>) -> String {
    loop {
        let name: String = (0..letters).map(|_| (b'A' + rng.below(26) as u8) as char).collect();
        if seen.insert(name.clone()) {
            return name;
        }
    }
}

fn lines(names: &[String], value: &str) -> Vec<String> {
    let mut lines = vec![format!("Let {} be {value}.\n", names[0])];
    lines.extend(names.windows(2).map(|w| format!("Let {} be the value of {}.\n", w[1], w[0])));
    lines
}

fn question(value: &str) -> String {
    format!("\nQuestion: which names hold the value {value} in the lines above? Name all of them.")
}

impl Tracking {
    fn example(rng: &mut ItemRng, hops: usize) -> (String, Vec<String>) {
        let mut seen = BTreeSet::new();
        let names: Vec<String> = (0..=hops.min(4)).map(|_| fresh(rng, 3, &mut seen)).collect();
        let value = number(rng, 5);
        let mut text = String::from(
            "Below are lines, some of which bind names to values. Follow the bindings. A short example:\n",
        );
        for (i, line) in lines(&names, &value).iter().enumerate() {
            text.push_str(LINES[i % LINES.len()]);
            text.push('\n');
            text.push_str(line);
        }
        text.push_str(&format!(
            "{}\nAnswer: {}\n\nNow the lines that count:\n",
            question(&value),
            names.join(", ")
        ));
        (text, names)
    }
}

impl Task for Tracking {
    fn name(&self) -> &'static str {
        "vt"
    }

    fn about(&self) -> &'static str {
        "all names that hold a number, along a chain of assignments"
    }

    fn knobs(&self) -> &'static [Knob] {
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let options = Options::of(self, &cell.task)?;
        let (hops, chains) = (options.count("hops"), options.count("chains"));
        let mut facts = rng(kit, cell, "facts");
        let (head, example) = Self::example(&mut facts, hops);
        let mut seen = BTreeSet::new();
        let (mut all, mut values) = (Vec::new(), BTreeSet::new());
        while all.len() < chains {
            let value = number(&mut facts, 5);
            if values.insert(value.clone()) {
                let names: Vec<String> = (0..=hops).map(|_| fresh(&mut facts, 5, &mut seen)).collect();
                all.push((names, value));
            }
        }
        let mut inserts = Vec::new();
        for (i, (names, value)) in all.iter().enumerate() {
            for (text, depth) in lines(names, value).into_iter().zip(spread(&mut facts, hops + 1)) {
                inserts.push(Insert { text, depth, needed: i == 0 });
            }
        }
        let (gold, value) = all[0].clone();
        let mut decoys: Vec<String> =
            all[1..].iter().flat_map(|(names, _)| names.clone()).chain(example).collect();
        // Names that stand nowhere, so that a guesser has as many wrong ones as right ones to draw from.
        while decoys.len() < 2 * gold.len() {
            decoys.push(fresh(&mut facts, 5, &mut seen));
        }
        let frame = Frame {
            kit,
            cell,
            head,
            tail: question(&value),
            lead_in: Some("\nAnswer:".into()),
            answer_tokens: answer_tokens(kit, ANSWER_TOKENS, &gold),
        };
        let context = frame.fill(&inserts, 5, |i, out| {
            out.push_str(LINES[i % LINES.len()]);
            out.push('\n');
            true
        })?;
        frame.finish(context, gold, decoys, [("value", json!(value)), ("hops", json!(hops))])
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let mut score = retrieval::score(item, answer, Combine::All);
        let said = answer.text.to_lowercase();
        let reached = item.gold.iter().take_while(|g| text::names(&said, &g.to_lowercase())).count();
        score.detail.insert("hops_reached".into(), reached.saturating_sub(1) as f64);
        if score.failure == Some(Failure::Partial) && reached > 0 {
            score.failure = Some(Failure::WrongHop);
        }
        score
    }

    super::named_guesses!(Combine::All);
}
