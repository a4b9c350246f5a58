//! A long conversation in which the same request was made several times, of the MRCR kind: repeat the answer to one of them, behind a random
//! prefix. All answers come from one distribution, so only the order of the requests tells them apart.

use serde_json::json;

use super::build::{answer_tokens, recipe, rng, spread};
use super::options::Options;
use super::values::code;
use crate::EvalError;
use crate::corpus::words;
use crate::item::{Answer, Cell, Fact, Failure, Item, Prompt, Role, Score, Turn, View};
use crate::rng::ItemRng;
use crate::score::edit::similarity;
use crate::score::ratio::ratio;
use crate::score::retrieval::{Combine, judged};
use crate::task::{Kit, Knob, Range, Task};

/// One of several equal requests.
pub struct Mrcr;

const FORMATS: [&str; 10] = [
    "a letter",
    "a short poem",
    "a riddle",
    "a diary entry",
    "a speech",
    "a notice",
    "a song",
    "a scene",
    "a recipe",
    "an essay",
];
const ORDINALS: [&str; 8] = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];

/// A request and what was answered.
struct Exchange {
    request: String,
    reply: String,
    needed: bool,
}

impl Exchange {
    fn new(kit: &Kit<'_>, rng: &mut ItemRng, request: &str, topic: &str, needed: bool) -> Exchange {
        let start = rng.next_u64() % kit.haystack.period().max(1);
        let mut reply = format!("On the {topic}.");
        for i in 0..4 + rng.below(3) as u64 {
            reply.push(' ');
            reply.push_str(kit.haystack.sentence(start + i));
        }
        Exchange { request: request.into(), reply, needed }
    }

    fn tokens(&self, kit: &Kit<'_>) -> usize {
        kit.counter.count(&self.request) + kit.counter.count(&self.reply) + 2 * kit.counter.turn_tokens()
    }
}

/// The conversation as turns, facts in it, and tokens.
fn turns(kit: &Kit<'_>, exchanges: &[&Exchange], last: &str) -> (Vec<Turn>, Vec<Fact>, usize) {
    let (mut turns, mut facts, mut at, mut tokens) = (Vec::new(), Vec::new(), 0, 0);
    let total: usize = exchanges.iter().map(|e| e.request.len() + e.reply.len()).sum();
    for e in exchanges {
        let reply_at = at + e.request.len();
        if e.needed {
            let depth = reply_at as f64 / total.max(1) as f64;
            facts.push(Fact {
                start_byte: reply_at,
                end_byte: reply_at + e.reply.len(),
                depth,
                needed: true,
            });
        }
        at = reply_at + e.reply.len();
        tokens += e.tokens(kit);
        turns.push(Turn::text(Role::User, &*e.request));
        turns.push(Turn::text(Role::Assistant, &*e.reply));
    }
    turns.push(Turn::text(Role::User, last));
    (turns, facts, tokens + kit.counter.count(last) + kit.counter.turn_tokens())
}

impl Task for Mrcr {
    fn name(&self) -> &'static str {
        "mrcr"
    }

    fn about(&self) -> &'static str {
        "repeat the answer to the i-th of several equal requests of a long conversation, behind a prefix"
    }

    fn knobs(&self) -> &'static [Knob] {
        const KNOBS: &[Knob] = &[Knob {
            name: "needles",
            range: Range::Whole { least: 2, most: 8, default: Some(2) },
            about: "equal requests",
        }];
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let needles = Options::of(self, &cell.task)?.count("needles");
        let mut facts = rng(kit, cell, "facts");
        let topics = facts.distinct(words::nouns().len().min(200), words::nouns().len());
        let request = |format: usize, topic: usize| {
            let topic = words::nouns()[topics[topic]];
            (format!("Write {} about the {topic}.", FORMATS[format]), topic)
        };
        let (format, which) = (facts.below(FORMATS.len()), facts.below(needles));
        let (asked, topic) = request(format, 0);
        let wanted: Vec<Exchange> =
            (0..needles).map(|_| Exchange::new(kit, &mut facts, &asked, topic, true)).collect();
        let prefix = code(&mut facts, 10);
        let gold = vec![format!("{prefix}{}", wanted[which].reply)];
        let decoys =
            (0..needles).filter(|&i| i != which).map(|i| format!("{prefix}{}", wanted[i].reply)).collect();
        let last = format!(
            "Write {prefix} and directly after it, without a space, your answer to the {} time I asked: {asked} Repeat it word for word, and \
             nothing else.",
            ORDINALS[which]
        );
        let answer_tokens = answer_tokens(kit, 64, &gold);
        let fixed = kit.counter.count(&last)
            + kit.counter.turn_tokens()
            + answer_tokens
            + wanted.iter().map(|e| e.tokens(kit)).sum::<usize>();
        let too_short = |least_tokens| EvalError::TooShort {
            task: cell.task.clone(),
            length_tokens: cell.length_tokens,
            least_tokens,
        };
        let mut filler = rng(kit, cell, "filler");
        let mut others: Vec<Exchange> = Vec::new();
        let mut tokens = fixed;
        loop {
            // Any topic with another format, or another topic: near-twins of the request in both directions.
            let (f, t) = (filler.below(FORMATS.len()), filler.below(topics.len()));
            if (f, t) == (format, 0) {
                continue;
            }
            let (text, topic) = request(f, t);
            let other = Exchange::new(kit, &mut filler, &text, topic, false);
            tokens += other.tokens(kit);
            if tokens > cell.length_tokens {
                if others.len() < 2 {
                    return Err(too_short(tokens + 2 * other.tokens(kit)));
                }
                break;
            }
            others.push(other);
        }
        let places = spread(&mut facts, needles);
        let (chosen, cell_view) = (order(&others, &wanted, &places), cell.view);
        let shown: Vec<&Exchange> = chosen
            .into_iter()
            .filter(|e| cell_view == View::Full || (cell_view == View::Focused && e.needed))
            .collect();
        let (turns, facts, prompt_tokens) = turns(kit, &shown, &last);
        let mut recipe = recipe(kit);
        recipe.insert("units".into(), json!(shown.len()));
        recipe.insert("prefix".into(), json!(prefix));
        recipe.insert("instance".into(), json!(which + 1));
        recipe.insert("written".into(), json!(false));
        let prompt = Prompt { turns, lead_in: None, tools: Vec::new() };
        Ok(Item { cell: cell.clone(), prompt, answer_tokens, prompt_tokens, gold, decoys, facts, recipe })
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let prefix = item.recipe.get("prefix").and_then(|p| p.as_str()).unwrap_or("");
        let Some(said) = answer.text.strip_prefix(prefix) else {
            return judged(answer, 0.0, 0.0, Failure::Unparsed);
        };
        let body = |text: &'_ str| text.strip_prefix(prefix).unwrap_or(text).to_string();
        let gold = body(item.gold.first().map_or("", String::as_str));
        let alike = |other: &str| {
            let words = |t: &str| t.split_whitespace().map(str::to_string).collect::<Vec<_>>();
            similarity(&words(said), &words(other))
        };
        let right = alike(&gold);
        let rival = item.decoys.iter().map(|d| alike(&body(d))).fold(0.0, f64::max);
        let chosen = right > rival;
        let strict = match (said.trim() == gold.trim(), chosen) {
            (true, _) => 1.0,
            // An edit takes away twice: what is added is as wrong as what is missing.
            (false, true) => (2.0 * right - 1.0).clamp(0.0, 0.99),
            (false, false) => 0.0,
        };
        let why = if chosen { Failure::Partial } else { Failure::Decoy };
        let mut score = judged(answer, ratio(said, &gold), strict, why);
        score.detail.insert("edit_similarity".into(), right);
        score.detail.insert("right_instance".into(), f64::from(chosen));
        score
    }

    drawn_answers!(Combine::Any);
}

/// All exchanges in their order: `wanted` at their depths among `others`.
fn order<'a>(others: &'a [Exchange], wanted: &'a [Exchange], places: &[f64]) -> Vec<&'a Exchange> {
    let mut all: Vec<&Exchange> = Vec::with_capacity(others.len() + wanted.len());
    let mut next = wanted.iter().zip(places).peekable();
    for (i, other) in others.iter().enumerate() {
        while let Some((e, _)) = next.next_if(|(_, p)| **p * others.len() as f64 <= i as f64) {
            all.push(e);
        }
        all.push(other);
    }
    all.extend(next.map(|(e, _)| e));
    all
}
