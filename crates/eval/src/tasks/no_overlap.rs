//! Needles whose words share nothing with the question: what links them has to be known (a sight stands in a city, a city in a country; a
//! diet forbids a food; a trade uses a tool). The base score of a model at short lengths is the yardstick of its longer ones.

use serde_json::json;

use super::build::{Frame, Insert, answer_tokens, depths, prose, rng};
use crate::EvalError;
use crate::item::{Cell, Item};
use crate::score::retrieval::Combine;
use crate::task::{Kit, Task};

/// One kind of association.
pub struct NoOverlap {
    name: &'static str,
    about: &'static str,
    links: &'static [Link],
}

/// What a needle says of somebody, and what the question asks instead.
pub struct Link {
    /// After the name: "sees the … every morning".
    needle: &'static str,
    /// After "Who ".
    question: &'static str,
}

const fn link(needle: &'static str, question: &'static str) -> Link {
    Link { needle, question }
}

/// One step of knowledge.
pub static ONE_HOP: NoOverlap = NoOverlap {
    name: "no_overlap_1",
    about: "who …?, by a fact that shares no word with the question, one step of knowledge away",
    links: &[
        link("sees the Brandenburg Gate from the kitchen", "lives in Berlin"),
        link("jogs around the Colosseum before breakfast", "lives in Rome"),
        link("rents a flat beside the Alhambra", "lives in Granada"),
        link("hears Big Ben strike every hour", "lives in London"),
        link("paints the Sagrada Familia from the balcony", "lives in Barcelona"),
        link("passes the Little Mermaid on the way home", "lives in Copenhagen"),
        link("walks the dog past the Atomium", "lives in Brussels"),
        link("feeds pigeons under the Rialto Bridge", "lives in Venice"),
        link("refuses every dish with milk, eggs or honey", "is vegan"),
        link("gets a rash from a single peanut", "must avoid satay sauce"),
        link("cannot digest wheat, barley or rye", "must avoid ordinary bread"),
        link("fasts from dawn to dusk in the ninth lunar month", "keeps Ramadan"),
        link("spends the day with a chisel and blocks of marble", "is a sculptor"),
        link("carries a stethoscope around the neck", "is a physician"),
        link("earns a living with a loom", "is a weaver"),
        link("shoes horses at an anvil", "is a blacksmith"),
        link("blew out the candles on the last day of December", "has a birthday on New Year's Eve"),
        link("was wed on the fourteenth of February", "married on Valentine's Day"),
    ],
};

/// Two steps.
pub static TWO_HOPS: NoOverlap = NoOverlap {
    name: "no_overlap_2",
    about: "the same with two steps of knowledge between fact and question",
    links: &[
        link("sees the Brandenburg Gate from the kitchen", "lives in Germany"),
        link("jogs around the Colosseum before breakfast", "lives in Italy"),
        link("rents a flat beside the Alhambra", "lives in Spain"),
        link("hears Big Ben strike every hour", "lives in England"),
        link("passes the Little Mermaid on the way home", "lives in Denmark"),
        link("walks the dog past the Atomium", "lives in Belgium"),
        link("takes the tram to the Prater wheel on Sundays", "lives in Austria"),
        link("drinks coffee with a view of the Acropolis", "lives in Greece"),
        link("sells postcards below the Charles Bridge", "lives in the Czech Republic"),
        link("sketches Christ the Redeemer from the rooftop", "lives in South America"),
        link("sweeps the steps in front of the Taj Mahal", "lives in Asia"),
        link("guards the pyramids of Giza at night", "lives in Africa"),
        link("refuses every dish with milk, eggs or honey", "sends back an omelette"),
        link("gets a rash from a single prawn", "sends back a paella with seafood"),
        link("carries a stethoscope around the neck", "could treat a fever"),
        link("earns a living with a loom", "could make a carpet"),
        link("shoes horses at an anvil", "could repair a plough"),
    ],
};

impl Task for NoOverlap {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let link = facts.pick(self.links);
        // Others are said to do other things of the same list, but nothing that would answer the question too.
        let mut others: Vec<&Link> =
            self.links.iter().filter(|l| l.question != link.question && l.needle != link.needle).collect();
        others.retain(|l| !answers_too(l, link));
        facts.shuffle(&mut others);
        others.truncate(3);
        let mut names = super::world::Names::default();
        let people: Vec<String> = (0..10).map(|_| names.invent(&mut facts)).collect();
        let gold = vec![people[0].clone()];
        let frame = Frame {
            kit,
            cell,
            head: "The text below mentions several people. A question about one of them follows.\n".into(),
            tail: format!(
                "\nWho {}? Answer with the name alone, by what the text above implies.",
                link.question
            ),
            lead_in: Some("\nThe name:".into()),
            answer_tokens: answer_tokens(kit, 32, &gold),
        };
        // Two orders: the name first, or last.
        let forward = facts.below(2) == 0;
        let said = |name: &str, l: &Link| match forward {
            true => format!(" {name} {}.", l.needle),
            false => format!(" The one who {} is {name}.", l.needle),
        };
        let inserts: Vec<Insert> = std::iter::once(&link)
            .chain(&others)
            .zip(&people)
            .zip(depths(frame.depth(), others.len() + 1))
            .enumerate()
            .map(|(i, ((l, name), depth))| Insert { text: said(name, l), depth, needed: i == 0 })
            .collect();
        let context = frame.fill(&inserts, 5, prose(kit.haystack, &mut rng(kit, cell, "filler")))?;
        let decoys = people[1..].to_vec();
        frame.finish(context, gold, decoys, [("question", json!(link.question)), ("forward", json!(forward))])
    }

    named_answers!(Combine::Any);
}

/// Whether what `other` says could also answer `link`'s question: the same place word in both questions, or continents and countries, or
/// two things that people could do of the same kind.
fn answers_too(other: &Link, link: &Link) -> bool {
    let place = |l: &Link| l.question.starts_with("lives in");
    if place(other) && place(link) {
        let continents = ["Asia", "Africa", "South America"];
        let wide = |l: &Link| continents.iter().any(|c| l.question.ends_with(c));
        return wide(other) && wide(link) && other.question == link.question;
    }
    let kind = |l: &Link| l.question.split(' ').next().unwrap_or("").to_string();
    !place(other) && !place(link) && kind(other) == kind(link) && kind(link) != "is"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Stems of the words that carry meaning: four letters or more, endings cut.
    fn stems(text: &str) -> BTreeSet<String> {
        text.to_lowercase()
            .split(|c: char| !c.is_alphanumeric())
            .filter(|w| w.len() >= 4)
            .map(|w| {
                w.trim_end_matches("ing").trim_end_matches("es").trim_end_matches(['s', 'd']).to_string()
            })
            .collect()
    }

    impl Link {
        /// Whether needle and question share a stem of a content word.
        fn overlaps(&self) -> bool {
            !stems(self.needle).is_disjoint(&stems(self.question))
        }
    }

    #[test]
    fn no_needle_shares_a_content_word_with_its_question() {
        for l in ONE_HOP.links.iter().chain(TWO_HOPS.links) {
            assert!(!l.overlaps(), "{} / {}", l.needle, l.question);
        }
        assert!(link("walks in Rome", "lives in Rome").overlaps());
        assert!(ONE_HOP.links.len() + TWO_HOPS.links.len() >= 30);
    }
}
