//! Numbers from long contexts: a passkey, a digit string, the extremes of a list, a running sum written step by step, and a list that is
//! known only through the operations on it.

use serde_json::json;

use super::build::{Context, Frame, Insert, Units, answer_tokens, rng, spread};
use super::niah::LINES;
use super::options::Options;
use super::values::number;
use crate::EvalError;
use crate::item::{Answer, Cell, Failure, Item, Score, View};
use crate::rng::ItemRng;
use crate::score::number::{closeness, whole_numbers};
use crate::score::retrieval::{self, Combine, judged};
use crate::score::sets::bracketed;
use crate::task::{Kit, Knob, Range, Task};

/// One number in repeated lines: five digits, or ten in runs.
pub struct Passkey {
    name: &'static str,
    about: &'static str,
    runs: bool,
}

/// Five digits.
pub static PASSKEY: Passkey =
    Passkey { name: "passkey", about: "a five-digit key in lines that repeat", runs: false };
/// Ten digits in runs.
pub static DIGIT_STRING: Passkey = Passkey {
    name: "digit_string",
    about: "a ten-digit string whose digits come in runs, in lines that repeat",
    runs: true,
};

fn key(rng: &mut ItemRng, runs: bool) -> String {
    if !runs {
        return number(rng, 5);
    }
    let mut digits = String::new();
    let mut last = b'0';
    while digits.len() < 10 {
        let digit = b'1' + rng.below(9) as u8;
        let times = (1 + rng.below(4)).min(10 - digits.len());
        if digit != last {
            digits.extend(std::iter::repeat_n(digit as char, times));
        }
        last = digit;
    }
    digits
}

impl Task for Passkey {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let gold = vec![key(&mut facts, self.runs)];
        let mut decoys: Vec<String> = Vec::new();
        while decoys.len() < 9 {
            let decoy = key(&mut facts, self.runs);
            if decoy != gold[0] {
                decoys.push(decoy);
            }
        }
        let frame = Frame {
            kit,
            cell,
            head: "A key is written somewhere in the lines below.\n".into(),
            tail: "\nWhat is the key? Answer with its digits alone.".into(),
            lead_in: Some("\nThe key:".into()),
            answer_tokens: answer_tokens(kit, 12, &gold),
        };
        let inserts = [Insert {
            text: format!("Keep it in mind. The key: {}\n", gold[0]),
            depth: frame.depth(),
            needed: true,
        }];
        let context = frame.fill(&inserts, 5, |i, out| {
            out.push_str(LINES[i % LINES.len()]);
            out.push('\n');
            true
        })?;
        frame.finish(context, gold, decoys, [])
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let mut score = retrieval::score(item, answer, Combine::All);
        // Upstream reads the first number of the answer.
        let first = whole_numbers(&answer.text).first().map(i64::to_string);
        score.compatible = f64::from(first.as_ref() == item.gold.first());
        score
    }

    drawn_answers!(Combine::All);
}

/// The largest, smallest or middle one of a long list.
pub struct Extremes;

/// One whole number, or the failure that there is none or more than one.
fn one_number(item: &Item, answer: &Answer, compatible: impl Fn(i64, i64) -> f64) -> Score {
    let said = whole_numbers(&answer.text);
    let gold: i64 = item.gold.first().and_then(|g| g.parse().ok()).unwrap_or(i64::MIN);
    let Some(&first) = said.first() else { return judged(answer, 0.0, 0.0, Failure::Unparsed) };
    let alone = said.iter().all(|&n| n == first);
    let strict = f64::from(alone && first == gold);
    let why = if said.contains(&gold) {
        Failure::Listed
    } else if item.decoys.contains(&first.to_string()) {
        Failure::Decoy
    } else {
        Failure::Wrong
    };
    judged(answer, compatible(first, gold), strict, why)
}

impl Task for Extremes {
    fn name(&self) -> &'static str {
        "extremes"
    }

    fn about(&self) -> &'static str {
        "the largest, smallest or middle number of a list as long as the context"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let which = ["largest", "smallest", "middle"][cell.index as usize % 3];
        let frame = Frame {
            kit,
            cell,
            head: "Below is a list of numbers.\n".into(),
            tail: format!("\nWhat is the {which} number of the list, by size? Answer with the number alone."),
            lead_in: Some("\nThe number is".into()),
            answer_tokens: answer_tokens(kit, 16, &["999999".into()]),
        };
        let mut numbers: Vec<usize> = Vec::new();
        let room = frame.room(0);
        let fits = room.as_ref().map_or(0, |r| *r);
        let mut units = Units::fill(kit.counter, fits, |i, out| {
            while numbers.len() <= i {
                numbers.push(facts.below(1_000_000));
            }
            out.push_str(&format!(" {}", numbers[i]));
            true
        });
        if units.len() < 15 {
            return Err(frame.too_short(frame.fixed_tokens() + 15 * kit.counter.count(" 999999")));
        }
        loop {
            // An odd count has a middle.
            let n = units.len() - (1 - units.len() % 2);
            let mut sorted = numbers[..n].to_vec();
            sorted.sort_unstable();
            let at = match which {
                "largest" => n - 1,
                "smallest" => 0,
                _ => n / 2,
            };
            let gold = sorted[at];
            let decoys: Vec<String> = sorted
                .iter()
                .filter(|x| **x != gold)
                .step_by((n / 12).max(1))
                .map(usize::to_string)
                .collect();
            let context = self.list(&frame, &numbers[..n], gold);
            if frame.over(&context) == 0 || units.len() < 17 {
                return frame.finish(context, vec![gold.to_string()], decoys, [("which", json!(which))]);
            }
            units.drop_last(2);
        }
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        one_number(item, super::last(answers), |said, gold| f64::from(said == gold))
    }

    drawn_answers!(Combine::All);
}

impl Extremes {
    fn list(&self, frame: &Frame<'_>, numbers: &[usize], gold: usize) -> Context {
        let mut context = Context { units: numbers.len(), ..Context::default() };
        for &n in numbers {
            let piece = format!(" {n}");
            match (frame.cell.view, n == gold) {
                (View::ClosedBook, _) => {}
                (_, true) => context.push_fact(frame.kit.counter, &piece, true),
                (View::Full, false) => context.push(frame.kit.counter, &piece),
                (View::Focused, false) => {}
            }
        }
        context
    }
}

/// A sum written step by step.
pub struct RunningSum;

impl Task for RunningSum {
    fn name(&self) -> &'static str {
        "running_sum"
    }

    fn about(&self) -> &'static str {
        "every intermediate result of the additions and subtractions in the text; credit for the right start"
    }

    fn knobs(&self) -> &'static [Knob] {
        const KNOBS: &[Knob] = &[Knob {
            name: "steps",
            range: Range::Whole { least: 2, most: 256, default: Some(12) },
            about: "numbers in the text",
        }];
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let steps = Options::of(self, &cell.task)?.count("steps");
        let mut facts = rng(kit, cell, "facts");
        let (mut sum, mut inserts, mut gold) = (0i64, Vec::new(), Vec::new());
        for depth in spread(&mut facts, steps) {
            let n = 1 + facts.below(99) as i64;
            let plus = sum < 100 || facts.below(2) == 0;
            sum += if plus { n } else { -n };
            gold.push(sum.to_string());
            let verb = if plus { "put into" } else { "taken out of" };
            inserts.push(Insert { text: format!(" Coins {verb} the chest: {n}."), depth, needed: true });
        }
        let gold = vec![format!("[{}]", gold.join(", "))];
        // Wrong from some step on: a coin too many.
        let decoys = (0..steps.min(4))
            .map(|from| {
                let wrong: Vec<String> = bracketed(&gold[0])
                    .unwrap_or_default()
                    .iter()
                    .enumerate()
                    .map(|(i, v)| if i >= from { format!("{v}1") } else { v.clone() })
                    .collect();
                format!("[{}]", wrong.join(", "))
            })
            .collect();
        let frame = Frame {
            kit,
            cell,
            head: "A chest is empty at first. The text below says what is put in and taken out.\n".into(),
            tail: "\nHow many coins are in the chest after each change, in order? Answer with a list like [3, 8, 5].".into(),
            lead_in: Some("\nThe list:".into()),
            answer_tokens: answer_tokens(kit, 32, &gold),
        };
        let context =
            frame.fill(&inserts, 5, super::build::prose(kit.haystack, &mut rng(kit, cell, "filler")))?;
        frame.finish(context, gold, decoys, [("steps", json!(steps)), ("written", json!(false))])
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let gold = item.gold.first().and_then(|g| bracketed(g)).unwrap_or_default();
        let Some(said) = bracketed(&answer.text) else { return judged(answer, 0.0, 0.0, Failure::Unparsed) };
        let right = crate::score::edit::common_start(&said, &gold);
        let lists = answer.text.matches('[').count();
        let mut score = judged(
            answer,
            right as f64 / gold.len().max(1) as f64,
            f64::from(said == gold && lists == 1),
            if lists > 1 { Failure::Listed } else { Failure::WrongHop },
        );
        score.detail.insert("right_steps".into(), right as f64);
        score
    }

    drawn_answers!(Combine::All);
}

/// A list known only by what is done to it.
pub struct LatentList;

/// One operation on a list, as text and done.
fn operation(rng: &mut ItemRng, name: &str, list: &mut Vec<i64>) -> String {
    match rng.below(10) {
        0 | 1 if list.len() > 2 => {
            list.pop();
            format!("{name}.pop()\n")
        }
        2 if list.len() > 2 => {
            let at = rng.below(list.len());
            list.remove(at);
            format!("del {name}[{at}]\n")
        }
        3 if list.len() > 1 => {
            list.reverse();
            format!("{name}.reverse()\n")
        }
        4 if list.len() > 1 => {
            let at = rng.below(list.len());
            let value = rng.below(90) as i64 + 10;
            list[at] = value;
            format!("{name}[{at}] = {value}\n")
        }
        5 if list.len() > 1 => {
            list.sort_unstable();
            format!("{name}.sort()\n")
        }
        6 if !list.is_empty() => {
            let (at, value) = (rng.below(list.len()), rng.below(90) as i64 + 10);
            list.insert(at, value);
            format!("{name}.insert({at}, {value})\n")
        }
        _ => {
            let value = rng.below(90) as i64 + 10;
            list.push(value);
            format!("{name}.append({value})\n")
        }
    }
}

impl Task for LatentList {
    fn name(&self) -> &'static str {
        "latent_list"
    }

    fn about(&self) -> &'static str {
        "length, sum or element of a list after the operations on it, among operations on other lists"
    }

    fn knobs(&self) -> &'static [Knob] {
        const KNOBS: &[Knob] = &[Knob {
            name: "operations",
            range: Range::Whole { least: 1, most: 512, default: Some(12) },
            about: "operations on the list that is asked",
        }];
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let operations = Options::of(self, &cell.task)?.count("operations");
        let mut facts = rng(kit, cell, "facts");
        let mut list = Vec::new();
        let mut inserts = Vec::new();
        let mut before = Vec::new();
        for depth in spread(&mut facts, operations) {
            before = list.clone();
            inserts.push(Insert { text: operation(&mut facts, "apples", &mut list), depth, needed: true });
        }
        let at = facts.below(list.len().max(1));
        let kind = if list.is_empty() { 0 } else { cell.index % 3 };
        let ask = |l: &[i64]| match kind {
            0 => l.len() as i64,
            1 => l.iter().sum(),
            _ => l.get(at).copied().unwrap_or(0),
        };
        let question = match kind {
            0 => "len(apples)".to_string(),
            1 => "sum(apples)".to_string(),
            _ => format!("apples[{at}]"),
        };
        let gold = vec![ask(&list).to_string()];
        let mut decoys: Vec<String> =
            [ask(&before), ask(&list) + 1, ask(&list) + 2, ask(&list) + 10, (ask(&list) - 1).max(0)]
                .map(|n| n.to_string())
                .to_vec();
        decoys.retain(|d| *d != gold[0]);
        let frame = Frame {
            kit,
            cell,
            head: "Below is a Python program. All its lists start empty.\n".into(),
            tail: format!("\nWhat is {question} at the end of the program? Answer with the number alone."),
            lead_in: Some(format!("\n>>> {question}\n")),
            answer_tokens: answer_tokens(kit, 16, &gold),
        };
        let mut filler = rng(kit, cell, "filler");
        let mut others: Vec<Vec<i64>> = vec![Vec::new(); 6];
        let names = ["pears", "plums", "quinces", "grapes", "melons", "berries"];
        let mut lines: Vec<String> = Vec::new();
        let context = frame.fill(&inserts, 10, |i, out| {
            while lines.len() <= i {
                let which = filler.below(names.len());
                lines.push(match filler.below(8) {
                    0 => "print(len(apples))\n".into(),
                    1 => format!("print(sum({}))\n", names[which]),
                    _ => operation(&mut filler, names[which], &mut others[which]),
                });
            }
            out.push_str(&lines[i]);
            true
        })?;
        frame.finish(context, gold, decoys, [("question", json!(question)), ("written", json!(false))])
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        one_number(item, super::last(answers), closeness)
    }

    drawn_answers!(Combine::All);
}
