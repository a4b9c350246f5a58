//! The eight retrieval tasks of the RULER kind: single, multi-key, multi-value and multi-query needles in repeated lines, in prose, or among
//! nothing but needles. A needle is a sentence that ends in `key: value.`, so that a lead-in can end in `key:`.

use serde_json::json;

use super::build::{Context, Frame, Insert, answer_tokens, depths, prose, rng};
use super::options::Options;
use super::values::{Kind, Source};
use crate::EvalError;
use crate::item::{Cell, Item};
use crate::rng::ItemRng;
use crate::score::retrieval::Combine;
use crate::task::{Kit, Knob, Range, Task};

/// What the needles lie in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hay {
    /// The same five lines again and again.
    Lines,
    /// Prose.
    Prose,
    /// Other needles, a line each.
    Needles,
}

/// One of the eight.
pub struct Niah {
    name: &'static str,
    about: &'static str,
    hay: Hay,
    key: Kind,
    value: Kind,
    /// Keys in the context, besides the needles that are the haystack.
    keys: usize,
    /// Values of each key.
    values: usize,
    /// Keys that are asked.
    asked: usize,
}

const fn niah(name: &'static str, about: &'static str, hay: Hay, key: Kind, value: Kind) -> Niah {
    Niah { name, about, hay, key, value, keys: 1, values: 1, asked: 1 }
}

/// One number in repeated lines.
pub static SINGLE_1: Niah =
    niah("niah_single_1", "one number in five lines that repeat", Hay::Lines, Kind::Words, Kind::Number);
/// One number in prose.
pub static SINGLE_2: Niah =
    niah("niah_single_2", "one number in prose", Hay::Prose, Kind::Words, Kind::Number);
/// One UUID in prose.
pub static SINGLE_3: Niah = niah("niah_single_3", "one UUID in prose", Hay::Prose, Kind::Words, Kind::Uuid);
/// One of four keys in prose.
pub static MULTIKEY_1: Niah = Niah {
    keys: 4,
    ..niah("niah_multikey_1", "one of four keys in prose", Hay::Prose, Kind::Words, Kind::Number)
};
/// One needle among needles.
pub static MULTIKEY_2: Niah = niah(
    "niah_multikey_2",
    "one of many: every line is a needle, words to numbers",
    Hay::Needles,
    Kind::Words,
    Kind::Number,
);
/// One needle among needles, UUIDs on both sides.
pub static MULTIKEY_3: Niah = niah(
    "niah_multikey_3",
    "one of many: every line is a needle, UUIDs to UUIDs",
    Hay::Needles,
    Kind::Uuid,
    Kind::Uuid,
);
/// All four values of one key.
pub static MULTIVALUE: Niah = Niah {
    values: 4,
    ..niah("niah_multivalue", "all four values of one key in prose", Hay::Prose, Kind::Words, Kind::Number)
};
/// The values of four keys.
pub static MULTIQUERY: Niah = Niah {
    keys: 4,
    asked: 4,
    ..niah("niah_multiquery", "the values of four keys in prose", Hay::Prose, Kind::Words, Kind::Number)
};

/// Lines that repeat: own words for an empty haystack.
pub const LINES: [&str; 5] = [
    "The field is wide and the sky is clear.",
    "The road goes on and comes around.",
    "Morning follows the night.",
    "Birds fly over the hills.",
    "Nothing else is written here.",
];

/// Answers get so many tokens, as upstream.
const ANSWER_TOKENS: usize = 128;
/// Wrong values of the right shape that stand nowhere, where the context offers none: guessers need something to draw.
const FOREIGN_DECOYS: usize = 9;
/// Decoys that an item lists at most; the context may hold more.
const LISTED_DECOYS: usize = 64;

const KNOBS: &[Knob] = &[
    Knob { name: "key", range: Range::Word(&["own", "words", "code", "uuid"]), about: "what keys look like" },
    Knob {
        name: "depth",
        range: Range::Whole { least: 0, most: 100, default: None },
        about: "where the first asked needle stands, in percent",
    },
];

fn value_name(kind: Kind) -> &'static str {
    if kind == Kind::Uuid { "access code" } else { "access number" }
}

impl Niah {
    fn needle(&self, key: &str, value: &str) -> String {
        format!("The {} of {key}: {value}.", value_name(self.value))
    }

    fn frame<'a>(&self, kit: &'a Kit<'a>, cell: &'a Cell, asked: &[String], gold: &[String]) -> Frame<'a> {
        let answer_tokens = answer_tokens(kit, ANSWER_TOKENS, gold);
        let what = value_name(self.value);
        let keys = match asked {
            [one] => one.clone(),
            [most @ .., last] => format!("{} and {last}", most.join(", ")),
            [] => unreachable!("every needle task asks for a key"),
        };
        let many = self.values > 1 || asked.len() > 1;
        let (head, tail) = if many {
            (
                format!("Some {what}s are noted in the text below. Remember them; a question follows.\n"),
                format!(
                    "\nWhat are all the {what}s of {keys} that the text above notes? Answer with the {what}s, separated by commas."
                ),
            )
        } else {
            (
                format!("An {what} is noted in the text below. Remember it; a question follows.\n"),
                format!(
                    "\nWhat is the {what} of {keys} that the text above notes? Answer with the {what} alone."
                ),
            )
        };
        let lead_in =
            if many { format!("\nThe {what}s of {keys}:") } else { format!("\nThe {what} of {keys}:") };
        Frame { kit, cell, head, tail, lead_in: Some(lead_in), answer_tokens }
    }

    fn key_kind(&self, asked: &str) -> Kind {
        match asked {
            "words" => Kind::Words,
            "code" => Kind::Code,
            "uuid" => Kind::Uuid,
            _ => self.key,
        }
    }

    /// Keys that differ in their last word as well: what follows a key is then determined by little of it.
    fn keys(&self, rng: &mut ItemRng, kind: Kind) -> (Vec<String>, Source) {
        let mut source = Source::new(kind);
        let mut keys: Vec<String> = Vec::new();
        while keys.len() < self.keys {
            let key = source.must(rng);
            let end = |k: &str| k.rsplit('-').next().map(str::to_string);
            if kind != Kind::Words || keys.iter().all(|k| end(k) != end(&key)) {
                keys.push(key);
            }
        }
        (keys, source)
    }
}

impl Task for Niah {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn knobs(&self) -> &'static [Knob] {
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let options = Options::of(self, &cell.task)?;
        let key_kind = self.key_kind(options.word("key"));
        let mut facts = rng(kit, cell, "facts");
        let (keys, mut key_source) = self.keys(&mut facts, key_kind);
        let mut values = Source::new(self.value);
        let mut needles: Vec<(usize, String)> = Vec::new();
        for key in 0..keys.len() {
            for _ in 0..self.values {
                needles.push((key, values.must(&mut facts)));
            }
        }
        let asked: Vec<String> = keys[..self.asked].to_vec();
        let gold: Vec<String> =
            needles.iter().filter(|(key, _)| *key < self.asked).map(|(_, v)| v.clone()).collect();
        let frame = self.frame(kit, cell, &asked, &gold);
        let first = options.whole("depth").map_or_else(|| frame.depth(), |p| p as f64 / 100.0);
        let separator = if self.hay == Hay::Prose { " " } else { "" };
        let end = if self.hay == Hay::Prose { "" } else { "\n" };
        let inserts: Vec<Insert> = needles
            .iter()
            .zip(depths(first, needles.len()))
            .map(|((key, value), depth)| Insert {
                text: format!("{separator}{}{end}", self.needle(&keys[*key], value)),
                depth,
                needed: *key < self.asked,
            })
            .collect();
        let mut decoys: Vec<String> =
            needles.iter().filter(|(key, _)| *key >= self.asked).map(|(_, v)| v.clone()).collect();
        let mut filler = rng(kit, cell, "filler");
        let context: Context = match self.hay {
            Hay::Lines => frame.fill(&inserts, 5, |i, out| {
                out.push_str(LINES[i % LINES.len()]);
                out.push('\n');
                true
            })?,
            Hay::Prose => frame.fill(&inserts, 5, prose(kit.haystack, &mut filler))?,
            Hay::Needles => {
                let mut known: Vec<String> = Vec::new();
                let context = frame.fill(&inserts, 5, |i, out| {
                    // The search may ask for a unit a second time, to say the least length.
                    while known.len() <= i {
                        let (Some(key), Some(value)) =
                            (key_source.draw(&mut filler), values.draw(&mut filler))
                        else {
                            return false;
                        };
                        known.push(format!("{}\n", self.needle(&key, &value)));
                        if decoys.len() < LISTED_DECOYS {
                            decoys.push(value);
                        }
                    }
                    out.push_str(&known[i]);
                    true
                })?;
                // The last line that was drawn did not fit.
                decoys.retain(|d| context.text.contains(d.as_str()));
                context
            }
        };
        while decoys.len() < FOREIGN_DECOYS {
            decoys.push(values.must(&mut facts));
        }
        frame.finish(context, gold, decoys, [("asked", json!(asked)), ("target_depth", json!(first))])
    }

    named_answers!(Combine::All);
}
