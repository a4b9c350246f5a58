//! Questions about paragraphs, of the RULER kind: one hop (a fact of a person among relatives and strangers) and two (the region of the town
//! where somebody was born), over a made-up world. `loaders/` asks the public sets' questions in the same form.

use serde_json::json;

use super::build::{Frame, Insert, answer_tokens, depths, rng};
use super::world::{Names, Person, Town};
use crate::EvalError;
use crate::item::{Cell, Item};
use crate::score::retrieval::Combine;
use crate::task::{Kit, Task};

/// One paragraph holds the answer.
pub struct OneHop;

/// Two paragraphs together hold it.
pub struct TwoHops;

const ANSWER_TOKENS: usize = 32;
/// Decoys that an item lists at most.
const LISTED_DECOYS: usize = 64;
const HEAD: &str = "Read the entries below. A question about them follows.\n\n";

fn frame<'a>(kit: &'a Kit<'a>, cell: &'a Cell, question: &str, gold: &[String]) -> Frame<'a> {
    Frame {
        kit,
        cell,
        head: HEAD.into(),
        tail: format!("Question: {question} Answer in a few words, by the entries above only."),
        lead_in: Some("\nAnswer:".into()),
        answer_tokens: answer_tokens(kit, ANSWER_TOKENS, gold),
    }
}

/// What is asked of a person, and the answer.
fn attribute(person: &Person, which: usize) -> (String, String) {
    let name = &person.name;
    match which {
        0 => (format!("In which town was {name} born?"), person.town.clone()),
        1 => (format!("In which year was {name} born?"), person.born.to_string()),
        2 => (format!("Who taught {name}?"), person.teacher.clone()),
        _ => (format!("What do people remember {name} for?"), person.work.clone()),
    }
}

impl Task for OneHop {
    fn name(&self) -> &'static str {
        "qa_1"
    }

    fn about(&self) -> &'static str {
        "a fact of one paragraph among many, relatives nearby (a made-up world)"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let mut names = Names::default();
        let family = names.invent(&mut facts);
        let mut people: Vec<Person> = Vec::new();
        while people.len() < 4 {
            let town = names.invent(&mut facts);
            let person = Person::draw(&mut facts, &mut names, &family, &town);
            if people.iter().all(|p| p.name != person.name) {
                people.push(person);
            }
        }
        let which = facts.below(4);
        let (question, answer) = attribute(&people[0], which);
        let gold = vec![answer];
        let frame = frame(kit, cell, &question, &gold);
        let inserts: Vec<Insert> = people
            .iter()
            .zip(depths(frame.depth(), people.len()))
            .enumerate()
            .map(|(i, (p, depth))| Insert { text: p.paragraph(&mut facts), depth, needed: i == 0 })
            .collect();
        let mut decoys: Vec<String> = people[1..].iter().map(|p| attribute(p, which).1).collect();
        let mut filler = rng(kit, cell, "filler");
        let mut paragraphs: Vec<String> = Vec::new();
        let context = frame.fill(&inserts, 2, |i, out| {
            while paragraphs.len() <= i {
                let (stranger, town) = (names.invent(&mut filler), names.invent(&mut filler));
                let person = Person::draw(&mut filler, &mut names, &stranger, &town);
                if decoys.len() < LISTED_DECOYS {
                    decoys.push(attribute(&person, which).1);
                }
                paragraphs.push(person.paragraph(&mut filler));
            }
            out.push_str(&paragraphs[i]);
            true
        })?;
        decoys.retain(|d| !gold.contains(d));
        frame.finish(
            context,
            gold,
            decoys,
            [("source", json!("made-up world")), ("question", json!(question))],
        )
    }

    named_answers!(Combine::Any);
}

impl Task for TwoHops {
    fn name(&self) -> &'static str {
        "qa_2"
    }

    fn about(&self) -> &'static str {
        "two paragraphs together hold the answer (a made-up world)"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let mut names = Names::default();
        let mut pairs: Vec<(Person, Town)> = Vec::new();
        while pairs.len() < 5 {
            let (town, family) = (Town::draw(&mut facts, &mut names), names.invent(&mut facts));
            pairs.push((Person::draw(&mut facts, &mut names, &family, &town.name), town));
        }
        let which = facts.below(2);
        let (person, town) = &pairs[0];
        let answer = |t: &Town| if which == 0 { t.region.clone() } else { t.river.clone() };
        let question = match which {
            0 => format!("In which region lies the town where {} was born?", person.name),
            _ => format!("Which river runs through the town where {} was born?", person.name),
        };
        let gold = vec![answer(town)];
        let frame = frame(kit, cell, &question, &gold);
        let mut inserts = Vec::new();
        let places = depths(frame.depth(), 2 * pairs.len());
        for (i, (person, town)) in pairs.iter().enumerate() {
            let needed = i == 0;
            inserts.push(Insert { text: person.paragraph(&mut facts), depth: places[i], needed });
            inserts.push(Insert { text: town.paragraph(&mut facts), depth: places[i + pairs.len()], needed });
        }
        let mut decoys: Vec<String> = pairs[1..].iter().map(|(_, t)| answer(t)).collect();
        let mut filler = rng(kit, cell, "filler");
        let mut paragraphs: Vec<String> = Vec::new();
        let context = frame.fill(&inserts, 2, |i, out| {
            while paragraphs.len() <= i {
                let (town, family) = (Town::draw(&mut filler, &mut names), names.invent(&mut filler));
                if decoys.len() < LISTED_DECOYS {
                    decoys.push(answer(&town));
                }
                let person = Person::draw(&mut filler, &mut names, &family, &town.name);
                paragraphs.push(town.paragraph(&mut filler));
                paragraphs.push(person.paragraph(&mut filler));
            }
            out.push_str(&paragraphs[i]);
            true
        })?;
        frame.finish(
            context,
            gold,
            decoys,
            [("source", json!("made-up world")), ("question", json!(question))],
        )
    }

    named_answers!(Combine::Any);
}
