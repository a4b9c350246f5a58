//! Small worlds, of the BABILong kind: people move, carry and hand over things; the sentences of one world stand in their order at random
//! places of a long text; ten types of question, simulated here. An answer is right if the labels in its first sentence, without those that the
//! question names, are exactly the right ones.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::build::{Frame, Insert, answer_tokens, prose, rng, spread};
use crate::EvalError;
use crate::item::{Answer, Cell, Failure, Item, Score};
use crate::rng::ItemRng;
use crate::score::retrieval::{Combine, judged};
use crate::score::text::names;
use crate::task::{Kit, Task};

/// One of the ten types.
pub struct Babi {
    name: &'static str,
    about: &'static str,
    kind: u8,
}

/// The ten types.
pub static TYPES: [Babi; 10] = [
    Babi { name: "babi_1", about: "where somebody is", kind: 1 },
    Babi { name: "babi_2", about: "where a thing is that somebody carries: two facts", kind: 2 },
    Babi { name: "babi_3", about: "where a thing was before it came somewhere: three facts", kind: 3 },
    Babi { name: "babi_4", about: "what lies in a direction from a place", kind: 4 },
    Babi { name: "babi_5", about: "who gave what to whom", kind: 5 },
    Babi { name: "babi_6", about: "yes or no: whether somebody is somewhere", kind: 6 },
    Babi { name: "babi_7", about: "how many things somebody carries", kind: 7 },
    Babi { name: "babi_8", about: "which things somebody carries", kind: 8 },
    Babi { name: "babi_9", about: "yes or no, with denials", kind: 9 },
    Babi { name: "babi_10", about: "yes, no or maybe, with uncertainty", kind: 10 },
];

const PEOPLE: [&str; 6] = ["Orla", "Piet", "Quinn", "Rhea", "Stig", "Tilda"];
const PLACES: [&str; 7] =
    ["greenhouse", "pantry", "stairwell", "bathroom", "boathouse", "hallway", "library"];
const THINGS: [&str; 5] = ["spanner", "teacup", "ledger", "marmalade", "satchel"];
const COUNTS: [&str; 5] = ["zero", "one", "two", "three", "four"];
const DIRECTIONS: [&str; 4] = ["north", "east", "south", "west"];
/// Events of a world before its question.
const EVENTS: usize = 10;

/// A world while it is told.
#[derive(Default)]
struct World {
    told: Vec<String>,
    /// The places that somebody may be in: one if known, several if told so.
    at: BTreeMap<&'static str, BTreeSet<&'static str>>,
    /// Places that somebody is said not to be in.
    not_at: BTreeMap<&'static str, &'static str>,
    /// Who has a thing.
    holder: BTreeMap<&'static str, &'static str>,
    /// Places that each thing has been in, in order.
    trail: BTreeMap<&'static str, Vec<&'static str>>,
    gifts: Vec<(&'static str, &'static str, &'static str)>,
}

/// What is asked. Labels that the text names do not count in answers; those of the hint do.
struct Question {
    text: String,
    hint: &'static str,
    gold: Vec<&'static str>,
    labels: Vec<&'static str>,
}

impl World {
    fn place_of(&self, person: &str) -> Option<&'static str> {
        let places = self.at.get(person)?;
        if places.len() == 1 { places.first().copied() } else { None }
    }

    fn moves(&mut self, person: &'static str, place: &'static str) {
        self.told.push(format!("{person} went to the {place}."));
        self.at.insert(person, BTreeSet::from([place]));
        self.not_at.remove(person);
        let carried: Vec<_> = self.holder.iter().filter(|(_, p)| **p == person).map(|(t, _)| *t).collect();
        for thing in carried {
            self.trail.entry(thing).or_default().push(place);
        }
    }

    fn takes(&mut self, person: &'static str, thing: &'static str) {
        self.told.push(format!("{person} picked up the {thing}."));
        self.holder.insert(thing, person);
        if let Some(place) = self.place_of(person) {
            self.trail.entry(thing).or_default().push(place);
        }
    }

    fn drops(&mut self, person: &'static str, thing: &'static str) {
        self.told.push(format!("{person} put down the {thing}."));
        self.holder.remove(thing);
    }

    fn gives(&mut self, from: &'static str, to: &'static str, thing: &'static str) {
        self.told.push(format!("{from} handed the {thing} to {to}."));
        self.holder.insert(thing, to);
        self.gifts.push((from, to, thing));
    }

    /// One random event that makes sense. Things are handed over between people in one place, so that trails stay whole.
    fn event(&mut self, rng: &mut ItemRng, kind: u8) {
        let person = *rng.pick(&PEOPLE[..4]);
        let place = *rng.pick(&PLACES);
        let thing = *rng.pick(&THINGS);
        let known = self.place_of(person);
        match (kind, rng.below(10)) {
            (9, 0..=2) if known.is_some() => {
                let place = known.unwrap_or(place);
                self.told.push(format!("{person} is no longer in the {place}."));
                self.at.remove(person);
                self.not_at.insert(person, place);
            }
            (10, 0..=3) => {
                let other = *rng.pick(&PLACES);
                if other != place {
                    self.told.push(format!("{person} is either in the {place} or in the {other}."));
                    self.at.insert(person, BTreeSet::from([place, other]));
                }
            }
            (2 | 3 | 5 | 7 | 8, 0..=3) => match self.holder.get(thing).copied() {
                None if known.is_some() => self.takes(person, thing),
                Some(holder) => {
                    let with = self.place_of(holder);
                    let other = PEOPLE[..4]
                        .iter()
                        .copied()
                        .find(|p| *p != holder && self.place_of(p) == with && with.is_some());
                    match other {
                        Some(other) if kind != 3 => self.gives(holder, other, thing),
                        _ if kind != 3 => self.drops(holder, thing),
                        _ => {}
                    }
                }
                None => {}
            },
            _ => self.moves(person, place),
        }
    }

    fn carried(&self, person: &str) -> Vec<&'static str> {
        self.holder.iter().filter(|(_, p)| **p == person).map(|(t, _)| *t).collect()
    }

    /// A question of this kind, if the world has come to hold one.
    fn ask(&self, rng: &mut ItemRng, kind: u8) -> Option<Question> {
        let person = *rng.pick(&PEOPLE[..4]);
        let place = *rng.pick(&PLACES);
        let thing = *rng.pick(&THINGS);
        let places = PLACES.to_vec();
        let yes_no = vec!["yes", "no"];
        let question = |text: String, gold: Vec<&'static str>, labels| {
            Some(Question { text, hint: hint(kind), gold, labels })
        };
        match kind {
            1 => question(format!("Where is {person}?"), vec![self.place_of(person)?], places),
            2 => question(format!("Where is the {thing}?"), vec![*self.trail.get(thing)?.last()?], places),
            3 => {
                let trail = self.trail.get(thing)?;
                let at = trail.len().checked_sub(1)?;
                let (last, before) = (trail[at], *trail[..at].iter().rev().find(|p| **p != trail[at])?);
                // Asked about the last time it came there, and only if it was there once.
                let once = trail.windows(2).filter(|w| w[1] == last && w[0] != last).count() == 1
                    && trail[0] != last;
                let text = format!("Where was the {thing} before it came to the {last}?");
                if once { question(text, vec![before], places) } else { None }
            }
            5 => {
                let &(from, to, thing) = self.gifts.last()?;
                let again = self.gifts.iter().filter(|g| g.2 == thing).count() > 1;
                let people = PEOPLE.to_vec();
                match rng.below(3) {
                    _ if again => None,
                    0 => question(format!("Who handed the {thing} to {to}?"), vec![from], people),
                    1 => question(format!("To whom did {from} hand the {thing}?"), vec![to], people),
                    _ if self.gifts.iter().filter(|g| (g.0, g.1) == (from, to)).count() > 1 => None,
                    _ => question(format!("What did {from} hand to {to}?"), vec![thing], THINGS.to_vec()),
                }
            }
            6 | 9 => {
                let answer = match (self.place_of(person), self.not_at.get(person)) {
                    (Some(known), _) if rng.below(2) == 0 => (known, "yes"),
                    (Some(known), _) if known != place => (place, "no"),
                    (None, Some(denied)) if kind == 9 => (*denied, "no"),
                    _ => return None,
                };
                question(format!("Is {person} in the {}?", answer.0), vec![answer.1], yes_no)
            }
            7 => {
                let n = self.carried(person).len();
                let known = self.at.contains_key(person);
                let text = format!("How many things does {person} carry?");
                if known { question(text, vec![*COUNTS.get(n)?], COUNTS.to_vec()) } else { None }
            }
            8 => {
                let carried = self.carried(person);
                let text = format!("Which things does {person} carry?");
                let mut labels = THINGS.to_vec();
                labels.push("empty-handed");
                let gold = if carried.is_empty() { vec!["empty-handed"] } else { carried };
                if self.at.contains_key(person) { question(text, gold, labels) } else { None }
            }
            10 => {
                let places = self.at.get(person)?;
                let answer = match (places.contains(place), places.len()) {
                    (true, 1) => "yes",
                    (true, _) => "maybe",
                    (false, _) => "no",
                };
                let text = format!("Is {person} in the {place}?");
                question(text, vec![answer], vec!["yes", "no", "maybe"])
            }
            _ => None,
        }
    }
}

fn hint(kind: u8) -> &'static str {
    match kind {
        6 | 9 => "Yes or no? ",
        7 => "Zero, one, two, three or four? ",
        8 => "If none, say empty-handed. ",
        10 => "Yes, no or maybe? ",
        _ => "",
    }
}

/// Places on a line or around a corner: "the pantry is north of the hallway".
fn directions(rng: &mut ItemRng) -> (Vec<String>, Question) {
    let chosen = rng.distinct(3, PLACES.len());
    let (a, b, c) = (PLACES[chosen[0]], PLACES[chosen[1]], PLACES[chosen[2]]);
    let turn = rng.distinct(2, 4);
    let told = vec![
        format!("The {a} is {} of the {b}.", DIRECTIONS[turn[0]]),
        format!("The {c} is {} of the {b}.", DIRECTIONS[turn[1]]),
    ];
    let text = format!("What is {} of the {b}?", DIRECTIONS[turn[0]]);
    (told, Question { text, hint: "", gold: vec![a], labels: PLACES.to_vec() })
}

impl Babi {
    fn tell(&self, rng: &mut ItemRng) -> (Vec<String>, Question) {
        if self.kind == 4 {
            return directions(rng);
        }
        // A world that holds no question of this kind after its events lives on until it does.
        let mut world = World::default();
        for person in &PEOPLE[..4] {
            let place = *rng.pick(&PLACES);
            world.moves(person, place);
        }
        loop {
            world.event(rng, self.kind);
            if world.told.len() < EVENTS {
                continue;
            }
            if world.told.len() > 4 * EVENTS {
                world = World::default();
                for person in &PEOPLE[..4] {
                    let place = *rng.pick(&PLACES);
                    world.moves(person, place);
                }
            }
            if let Some(question) = world.ask(rng, self.kind) {
                return (world.told, question);
            }
        }
    }
}

fn labels_in<'a>(text: &str, labels: &'a [String], whole: bool) -> BTreeSet<&'a str> {
    let found = |l: &&'a str| if whole { names(text, l) } else { text.contains(l) };
    labels.iter().map(String::as_str).filter(|l| found(l)).collect()
}

impl Task for Babi {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let (told, question) = self.tell(&mut facts);
        let labels: Vec<String> = question.labels.iter().map(|l| l.to_lowercase()).collect();
        let gold: Vec<String> = question.gold.iter().map(|l| l.to_lowercase()).collect();
        let decoys = labels.iter().filter(|l| !gold.contains(l)).cloned().collect();
        let frame = Frame {
            kit,
            cell,
            head: "Some sentences of the text below tell of a few people, places and things in one house. Follow them.\n".into(),
            tail: format!(
                "\nQuestion: {} {}Answer in a word or two, by the last state of things.",
                question.text, question.hint
            ),
            lead_in: Some("\nAnswer:".into()),
            answer_tokens: answer_tokens(kit, 20, &gold),
        };
        let depths = spread(&mut facts, told.len());
        let inserts: Vec<Insert> = told
            .into_iter()
            .zip(depths)
            .map(|(text, depth)| Insert { text: format!(" {text}"), depth, needed: true })
            .collect();
        let context = frame.fill(&inserts, 5, prose(kit.haystack, &mut rng(kit, cell, "filler")))?;
        let more = [("labels", json!(labels)), ("question", json!(question.text)), ("written", json!(false))];
        frame.finish(context, gold, decoys, more)
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let labels: Vec<String> = item.gold.iter().chain(&item.decoys).cloned().collect();
        let question = item.recipe["question"].as_str().unwrap_or("").to_lowercase();
        let gold: BTreeSet<&str> = item.gold.iter().map(String::as_str).collect();
        let lower = answer.text.trim().to_lowercase();
        let sentence = lower.split(['.', '\n']).next().unwrap_or("");
        let judge = |whole: bool, text: &str| {
            let in_question = labels_in(&question, &labels, whole);
            let said: BTreeSet<&str> = labels_in(text, &labels, whole)
                .into_iter()
                .filter(|l| gold.contains(l) || !in_question.contains(l))
                .collect();
            said
        };
        let (compatible, strict) = (judge(false, sentence) == gold, judge(true, &lower) == gold);
        let said = judge(true, &lower);
        let why = match said.intersection(&gold).count() {
            0 if said.is_empty() => Failure::Unparsed,
            0 => Failure::Decoy,
            hits if hits == gold.len() => Failure::Listed,
            _ => Failure::Partial,
        };
        judged(answer, f64::from(compatible), f64::from(strict), why)
    }

    drawn_answers!(Combine::All);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the told sentences again, independently of the simulator's state.
    fn replay(told: &[String]) -> (BTreeMap<String, String>, BTreeMap<String, String>) {
        let (mut at, mut has) = (BTreeMap::new(), BTreeMap::new());
        for s in told {
            let words: Vec<&str> = s.trim_end_matches('.').split(' ').collect();
            match words[1] {
                "went" => drop(at.insert(words[0].to_string(), words[4].to_string())),
                "picked" => drop(has.insert(words[4].to_string(), words[0].to_string())),
                "put" => drop(has.remove(words[4])),
                "handed" => drop(has.insert(words[3].to_string(), words[5].to_string())),
                other => panic!("{other}"),
            }
        }
        (at, has)
    }

    #[test]
    fn the_story_itself_gives_the_answer() {
        let mut answers = BTreeSet::new();
        for index in 0..300 {
            for kind in [1, 7, 8] {
                let mut rng = ItemRng::new(index, "babi", 0, kind, "test");
                let (told, question) = TYPES[kind as usize - 1].tell(&mut rng);
                let (at, has) = replay(&told);
                let who = PEOPLE.iter().find(|p| question.text.contains(**p)).unwrap().to_string();
                let carried: BTreeSet<&str> =
                    has.iter().filter(|(_, p)| **p == who).map(|(t, _)| t.as_str()).collect();
                let gold: BTreeSet<&str> = question.gold.iter().copied().collect();
                match kind {
                    1 => assert_eq!(question.gold, [at[&who].as_str()]),
                    7 => assert_eq!(question.gold, [COUNTS[carried.len()]]),
                    _ if carried.is_empty() => assert_eq!(question.gold, ["empty-handed"]),
                    _ => assert_eq!(gold, carried),
                }
                answers.extend(question.gold);
            }
        }
        assert!(answers.len() > 12, "{answers:?}");
    }
}
