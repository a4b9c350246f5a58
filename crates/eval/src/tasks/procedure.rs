//! Long answers: a path followed through a graph step by step, and a table read out of a web page. They load decoding, not only the prompt.

use std::collections::BTreeSet;

use serde_json::json;

use super::build::{Context, Frame, Insert, answer_tokens, depths, rng};
use super::options::Options;
use super::values::{Kind, Source};
use crate::EvalError;
use crate::corpus::words;
use crate::item::{Answer, Cell, Failure, Item, Score};
use crate::score::edit::common_start;
use crate::score::retrieval::{Combine, judged, says};
use crate::task::{Kit, Knob, Range, Task};

/// Steps along the only road out of each place.
pub struct PathFollowing;

/// Rows of a web page's table that belong together.
pub struct TableExtract;

const STEPS: &[Knob] = &[Knob {
    name: "steps",
    range: Range::Whole { least: 2, most: 4096, default: Some(16) },
    about: "places on the path; the answer names each",
}];

impl Task for PathFollowing {
    fn name(&self) -> &'static str {
        "path_following"
    }

    fn about(&self) -> &'static str {
        "every place on a path, when each place has one road out; credit for the right start"
    }

    fn knobs(&self) -> &'static [Knob] {
        STEPS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let steps = Options::of(self, &cell.task)?.count("steps");
        let mut facts = rng(kit, cell, "facts");
        let mut places = Source::new(Kind::Code);
        let path: Vec<String> = (0..=steps).map(|_| places.must(&mut facts)).collect();
        let road = |a: &str, b: &str| format!("From {a} the road leads to {b}.\n");
        // A quarter turn more for each step, so that the path jumps through the text.
        let first = rng(kit, cell, "phase").unit();
        let order = depths(first, steps);
        let inserts: Vec<Insert> = (0..steps)
            .map(|i| Insert {
                text: road(&path[i], &path[i + 1]),
                depth: order[(i * 5) % steps],
                needed: true,
            })
            .collect();
        let gold = vec![path[1..].join(" ")];
        // A wrong turn after each quarter of the way.
        let decoys = (0..4)
            .map(|q| {
                let from = q * steps / 4;
                let said = path[1..]
                    .iter()
                    .enumerate()
                    .map(|(i, p)| if i < from { p.clone() } else { places.must(&mut facts) });
                said.collect::<Vec<_>>().join(" ")
            })
            .collect();
        let frame = Frame {
            kit,
            cell,
            head: "Below are roads from place to place. Each place has one road out.\n".into(),
            tail: format!(
                "\nStart at {} and take {steps} roads, one after another. Name every place you come to, in order, separated by spaces, and nothing \
                 else.",
                path[0]
            ),
            lead_in: Some(format!("\nFrom {} the way leads to", path[0])),
            answer_tokens: answer_tokens(kit, 32, &gold),
        };
        let mut filler = rng(kit, cell, "filler");
        let mut lines: Vec<String> = Vec::new();
        let context = frame.fill(&inserts, 4, |i, out| {
            while lines.len() <= i {
                let (a, b) = (places.must(&mut filler), places.must(&mut filler));
                lines.push(road(&a, &b));
            }
            out.push_str(&lines[i]);
            true
        })?;
        let more = [("steps", json!(steps)), ("written", json!(false))];
        frame.finish(context, gold, decoys, more)
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let split = |text: &str| -> Vec<String> {
            let between = |c: char| !c.is_ascii_alphanumeric();
            text.to_lowercase().split(between).filter(|w| !w.is_empty()).map(str::to_string).collect()
        };
        let gold = split(item.gold.first().map_or("", String::as_str));
        let said = split(&answer.text);
        let right = common_start(&said, &gold);
        // Naming more than asked takes away as much as it names.
        let extra = said.len().saturating_sub(gold.len());
        let strict = right.saturating_sub(extra) as f64 / gold.len().max(1) as f64;
        let strict = if said == gold { 1.0 } else { strict.min(0.5) };
        let why = if right == gold.len() { Failure::Listed } else { Failure::WrongHop };
        let mut score = judged(answer, right as f64 / gold.len().max(1) as f64, strict, why);
        score.detail.insert("right_steps".into(), right as f64);
        score
    }

    drawn_answers!(Combine::Any);
}

/// One row of the page's table.
struct Record {
    name: String,
    trade: &'static str,
    year: usize,
}

impl Record {
    fn html(&self, noun: &str) -> String {
        let Record { name, trade, year } = self;
        format!("<tr><td>{name}</td><td class=\"{noun}\">{trade}</td><td>{year}</td></tr>\n")
    }

    fn tsv(&self) -> String {
        format!("{}\t{}", self.name, self.year)
    }
}

fn rows(text: &str) -> BTreeSet<String> {
    let cells = |line: &str| {
        line.split(['\t', '|']).map(str::trim).filter(|c| !c.is_empty()).collect::<Vec<_>>().join("\t")
    };
    text.lines().map(cells).filter(|r| !r.is_empty()).collect()
}

impl Task for TableExtract {
    fn name(&self) -> &'static str {
        "table_extract"
    }

    fn about(&self) -> &'static str {
        "the rows of one kind out of a web page's table, as lines; F1 of rows"
    }

    fn knobs(&self) -> &'static [Knob] {
        const KNOBS: &[Knob] = &[Knob {
            name: "rows",
            range: Range::Whole { least: 1, most: 2048, default: Some(12) },
            about: "rows that are asked",
        }];
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let asked = Options::of(self, &cell.task)?.count("rows");
        let mut facts = rng(kit, cell, "facts");
        let trade = facts.word(words::trades());
        let mut names = super::world::Names::default();
        let record = |rng: &mut crate::rng::ItemRng, trade, names: &mut super::world::Names| Record {
            name: format!("{} {}", rng.word(words::names()), names.invent(rng)),
            trade,
            year: 1700 + rng.below(300),
        };
        let wanted: Vec<Record> = (0..asked).map(|_| record(&mut facts, trade, &mut names)).collect();
        let gold: Vec<String> = wanted.iter().map(Record::tsv).collect();
        let first = rng(kit, cell, "phase").unit();
        let inserts: Vec<Insert> = wanted
            .iter()
            .zip(depths(first, asked))
            .map(|(r, depth)| Insert { text: r.html(facts.word(words::nouns())), depth, needed: true })
            .collect();
        let frame = Frame {
            kit,
            cell,
            head: "Below is a web page with a table of names, trades and years.\n<html><body><table>\n"
                .into(),
            tail: format!(
                "</table></body></html>\nWrite a line with name, tabulator and year for every {trade} of the table, and nothing else."
            ),
            lead_in: Some("\n".into()),
            answer_tokens: answer_tokens(kit, 32, &gold) + 2 * asked,
        };
        let mut filler = rng(kit, cell, "filler");
        let (mut lines, mut decoys) = (Vec::new(), Vec::new());
        let context: Context = frame.fill(&inserts, 4, |i, out| {
            while lines.len() <= i {
                let other = loop {
                    let other = filler.word(words::trades());
                    if other != trade {
                        break other;
                    }
                };
                let r = record(&mut filler, other, &mut names);
                lines.push(r.html(filler.word(words::nouns())));
                if decoys.len() < 2 * asked {
                    decoys.push(r.tsv());
                }
            }
            out.push_str(&lines[i]);
            true
        })?;
        while decoys.len() < 2 * asked {
            decoys.push(record(&mut filler, trade, &mut names).tsv());
        }
        frame.finish(
            context,
            gold,
            decoys,
            [("rows", json!(asked)), ("trade", json!(trade)), ("written", json!(false))],
        )
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let (said, gold) = (rows(&answer.text), item.gold.iter().cloned().collect::<BTreeSet<_>>());
        let hits = said.intersection(&gold).count();
        let f1 = 2.0 * hits as f64 / (said.len() + gold.len()).max(1) as f64;
        let wrong = said.len() - hits;
        let strict = hits.saturating_sub(wrong) as f64 / gold.len().max(1) as f64;
        let why = match (hits, wrong) {
            (0, _) => Failure::Wrong,
            (_, 0) => Failure::Partial,
            _ => Failure::Listed,
        };
        judged(answer, f1, strict, why)
    }

    fn right_answer(&self, item: &Item, _answers: &[Answer]) -> Answer {
        says(item.gold.join("\n"))
    }

    fn chance(&self, item: &Item) -> f64 {
        // As many rows as are asked, drawn from all: precision and recall are the same share.
        item.gold.len() as f64 / (item.gold.len() + item.decoys.len()) as f64
    }

    fn guess(&self, item: &Item, draw: &mut dyn FnMut(usize) -> usize) -> Answer {
        let mut pool: Vec<&str> = item.gold.iter().chain(&item.decoys).map(String::as_str).collect();
        let chosen: Vec<&str> = (0..item.gold.len()).map(|_| pool.swap_remove(draw(pool.len()))).collect();
        says(chosen.join("\n"))
    }
}
