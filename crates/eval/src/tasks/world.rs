//! A made-up world of people, towns and regions, as paragraphs: what questions are asked about where no public set is at hand. Names are
//! invented, so nothing can be known without the text.

use std::collections::HashSet;

use super::values::code;
use crate::corpus::words;
use crate::rng::ItemRng;

/// Somebody.
#[derive(Clone, Debug)]
pub struct Person {
    /// Given name and family name.
    pub name: String,
    /// What she or he does.
    pub trade: &'static str,
    /// Year of birth.
    pub born: usize,
    /// Where.
    pub town: String,
    /// Who taught them.
    pub teacher: String,
    /// What they are remembered for having made.
    pub work: String,
}

/// Somewhere.
#[derive(Clone, Debug)]
pub struct Town {
    /// Its name.
    pub name: String,
    /// The region it lies in.
    pub region: String,
    /// The river.
    pub river: String,
    /// When it was founded.
    pub founded: usize,
}

/// Names that do not repeat.
#[derive(Default)]
pub struct Names {
    seen: HashSet<String>,
}

impl Names {
    /// An invented proper name, no part of which equals another's.
    pub fn invent(&mut self, rng: &mut ItemRng) -> String {
        loop {
            let letters = 6 + rng.below(4);
            let name = capital(&code(rng, letters));
            if self.seen.insert(name.clone()) {
                return name;
            }
        }
    }
}

fn capital(word: &str) -> String {
    let mut chars = word.chars();
    chars.next().map_or(String::new(), |c| c.to_uppercase().chain(chars).collect())
}

impl Person {
    /// Somebody of a family, born in `town`.
    pub fn draw(rng: &mut ItemRng, names: &mut Names, family: &str, town: &str) -> Person {
        Person {
            name: format!("{} {family}", rng.word(words::names())),
            trade: rng.word(words::trades()),
            born: 1700 + rng.below(250),
            town: town.into(),
            teacher: format!("{} {}", rng.word(words::names()), names.invent(rng)),
            work: format!("{} {}", rng.word(words::adjectives()), rng.word(words::nouns())),
        }
    }

    /// A paragraph that holds every fact, in one of several wordings, under the name as its heading.
    pub fn paragraph(&self, rng: &mut ItemRng) -> String {
        let Person { name, trade, born, town, teacher, work } = self;
        let family = name.rsplit(' ').next().unwrap_or(name);
        let birth = match rng.below(3) {
            0 => format!("{name} was born in {born} in the town of {town}."),
            1 => format!("In {born} {name} came into the world in {town}."),
            _ => format!("The town of {town} is the birthplace of {name}, whose year of birth is {born}."),
        };
        let life = match rng.below(3) {
            0 => format!("{family} worked as a {trade} and had learned the craft from {teacher}."),
            1 => format!("After years as a pupil of {teacher}, {family} earned a living as a {trade}."),
            _ => format!("The profession was that of a {trade}; {teacher} had been the teacher."),
        };
        let fame = match rng.below(3) {
            0 => format!("People remember the {work} that {family} left behind."),
            1 => format!("A {work} is still shown to visitors as the main work."),
            _ => format!("Most letters of the time speak of a {work}."),
        };
        format!("{name}\n{birth} {life} {fame}\n\n")
    }
}

impl Town {
    /// Somewhere.
    pub fn draw(rng: &mut ItemRng, names: &mut Names) -> Town {
        Town {
            name: names.invent(rng),
            region: names.invent(rng),
            river: names.invent(rng),
            founded: 1100 + rng.below(500),
        }
    }

    /// A paragraph that holds every fact, under the town's name.
    pub fn paragraph(&self, rng: &mut ItemRng) -> String {
        let Town { name, region, river, founded } = self;
        let noun = rng.word(words::nouns());
        let place = match rng.below(3) {
            0 => format!("{name} lies on the river {river} in the region of {region}."),
            1 => format!("The river {river} runs through {name}, a town of the region of {region}."),
            _ => format!("In the region of {region}, on the banks of the {river}, stands {name}."),
        };
        let past = match rng.below(2) {
            0 => format!("It was founded in {founded} and is known for its {noun}."),
            _ => format!("Its oldest {noun} dates from {founded}, the year in which it was founded."),
        };
        format!("{name}\n{place} {past}\n\n")
    }
}
