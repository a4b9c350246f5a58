//! Needles on a grid of depths, and chains of codes whose question does not say that it is one.

use std::collections::BTreeSet;

use serde_json::json;

use super::build::{Frame, Insert, answer_tokens, prose, rng, spread};
use super::options::Options;
use super::values::{Kind, Source};
use crate::EvalError;
use crate::item::{Answer, Cell, Failure, Item, Score};
use crate::score::{retrieval, retrieval::Combine, text};
use crate::task::{Kit, Knob, Range, Task};

/// One or many needles from a stated depth on.
pub struct NeedleGrid;

/// A record that points to a record that points to …
pub struct UuidChain;

const ANSWER_TOKENS: usize = 128;

impl Task for NeedleGrid {
    fn name(&self) -> &'static str {
        "needle_grid"
    }

    fn about(&self) -> &'static str {
        "needles in prose from a stated depth on, evenly spread from there to the end"
    }

    fn knobs(&self) -> &'static [Knob] {
        const KNOBS: &[Knob] = &[
            Knob {
                name: "depth",
                range: Range::Whole { least: 0, most: 100, default: None },
                about: "depth of the first needle in percent; without it each sample has its own",
            },
            Knob {
                name: "needles",
                range: Range::Whole { least: 1, most: 64, default: Some(1) },
                about: "needles; all are asked, the score is the share that is found",
            },
            Knob { name: "value", range: Range::Word(&["number", "uuid"]), about: "what is hidden" },
            Knob { name: "key", range: Range::Word(&["words", "code"]), about: "what keys look like" },
        ];
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let options = Options::of(self, &cell.task)?;
        let n = options.count("needles");
        let mut facts = rng(kit, cell, "facts");
        let mut values = Source::new(if options.word("value") == "uuid" { Kind::Uuid } else { Kind::Number });
        let mut keys = Source::new(if options.word("key") == "code" { Kind::Code } else { Kind::Words });
        let key = keys.must(&mut facts);
        let gold: Vec<String> = (0..n).map(|_| values.must(&mut facts)).collect();
        let (s, many) = if n == 1 { ("", "") } else { ("s", "all ") };
        let frame = Frame {
            kit,
            cell,
            head: "Somewhere in the text below, lockers are said to open with certain codes.\n".into(),
            tail: format!(
                "\nWhat {} {many}the code{s} of the locker {key}? Answer with the code{s} alone.",
                if n == 1 { "is" } else { "are" }
            ),
            lead_in: Some(format!("\nThe code{s} of the locker {key}:")),
            answer_tokens: answer_tokens(kit, ANSWER_TOKENS, &gold),
        };
        let first = options.whole("depth").map_or_else(|| frame.depth(), |p| p as f64 / 100.0);
        let inserts: Vec<Insert> = gold
            .iter()
            .enumerate()
            .map(|(i, value)| Insert {
                text: format!(" The code of the locker {key}: {value}."),
                depth: first + i as f64 * (1.0 - first) / n as f64,
                needed: true,
            })
            .collect();
        let context = frame.fill(&inserts, 5, prose(kit.haystack, &mut rng(kit, cell, "filler")))?;
        let decoys = (0..(2 * n).max(9)).map(|_| values.must(&mut facts)).collect();
        frame.finish(context, gold, decoys, [("asked", json!([key])), ("target_depth", json!(first))])
    }

    named_answers!(Combine::All);
}

impl Task for UuidChain {
    fn name(&self) -> &'static str {
        "uuid_chain"
    }

    fn about(&self) -> &'static str {
        "what a record holds, when it points to another record and so on; credit by the furthest hop"
    }

    fn knobs(&self) -> &'static [Knob] {
        const KNOBS: &[Knob] = &[
            Knob {
                name: "hops",
                range: Range::Whole { least: 1, most: 32, default: Some(4) },
                about: "records from the first to the value",
            },
            Knob {
                name: "order",
                range: Range::Word(&["shuffled", "forward"]),
                about: "whether records stand in the order of the chain",
            },
        ];
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let options = Options::of(self, &cell.task)?;
        let hops = options.count("hops");
        let mut facts = rng(kit, cell, "facts");
        let (mut ids, mut numbers) = (Source::new(Kind::Uuid), Source::new(Kind::Number));
        let mut inserts = Vec::new();
        let (mut start, mut chain, mut gold, mut decoys) =
            (String::new(), Vec::new(), Vec::new(), Vec::new());
        for c in 0..3 {
            let codes: Vec<String> = (0..hops).map(|_| ids.must(&mut facts)).collect();
            let end = numbers.must(&mut facts);
            let mut depths = spread(&mut facts, hops);
            if options.word("order") == "shuffled" {
                facts.shuffle(&mut depths);
            }
            for (i, depth) in depths.into_iter().enumerate() {
                let text = match codes.get(i + 1) {
                    Some(next) => format!(" Record {} holds what record {next} holds.", codes[i]),
                    None => format!(" Record {} holds the number {end}.", codes[i]),
                };
                inserts.push(Insert { text, depth, needed: c == 0 });
            }
            if c == 0 {
                start = codes[0].clone();
                chain = codes[1..].to_vec();
                gold.push(end);
            } else {
                decoys.push(end);
            }
        }
        while decoys.len() < 9 {
            decoys.push(numbers.must(&mut facts));
        }
        let frame = Frame {
            kit,
            cell,
            head: "The text below mentions records and what they hold.\n".into(),
            tail: format!("\nWhich number does record {start} hold? Answer with the number alone."),
            lead_in: Some("\nThe number is".into()),
            answer_tokens: answer_tokens(kit, ANSWER_TOKENS, &gold),
        };
        let context = frame.fill(&inserts, 5, prose(kit.haystack, &mut rng(kit, cell, "filler")))?;
        frame.finish(context, gold, decoys, [("asked", json!([start])), ("chain", json!(chain))])
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let mut score = retrieval::score(item, answer, Combine::All);
        let said = answer.text.to_lowercase();
        let chain: Vec<&str> =
            item.recipe["chain"].as_array().into_iter().flatten().filter_map(|c| c.as_str()).collect();
        let named: BTreeSet<usize> = (0..chain.len()).filter(|&i| text::names(&said, chain[i])).collect();
        let hops = chain.len() + 1;
        let furthest = if score.compatible >= 1.0 { hops } else { named.last().map_or(0, |i| i + 1) };
        score.compatible = furthest as f64 / hops as f64;
        score.detail.insert("hops_reached".into(), furthest as f64);
        if furthest > 0 && furthest < hops && score.failure == Some(Failure::Wrong) {
            score.failure = Some(Failure::WrongHop);
        }
        score
    }

    super::named_guesses!(Combine::All);
}
