//! The tasks: each builds questions with known answers at any length and judges what comes back.

use std::sync::LazyLock;

use crate::EvalError;
use crate::item::{Answer, Finish};
use crate::task::Task;

/// The half of `named_answers` beside the judging: what is right, what a guess is and what it scores.
macro_rules! named_guesses {
    ($combine:expr) => {
        fn right_answer(&self, item: &crate::item::Item, _: &[crate::item::Answer]) -> crate::item::Answer {
            crate::score::retrieval::right(item, $combine)
        }

        fn chance(&self, item: &crate::item::Item) -> f64 {
            crate::score::retrieval::chance(item, $combine)
        }

        fn guess(
            &self,
            item: &crate::item::Item,
            draw: &mut dyn FnMut(usize) -> usize,
        ) -> crate::item::Answer {
            crate::score::retrieval::guess(item, $combine, draw)
        }
    };
}
pub(crate) use named_guesses;

/// The judging half of a task whose answers name things (`score/retrieval.rs`).
macro_rules! named_answers {
    ($combine:expr) => {
        fn score(&self, item: &crate::item::Item, answers: &[crate::item::Answer]) -> crate::item::Score {
            crate::score::retrieval::score(item, crate::tasks::last(answers), $combine)
        }

        crate::tasks::named_guesses!($combine);
    };
}

/// The drawing half of a task that judges by itself: the first or all gold answers are right, and a guess is one of gold and decoys.
macro_rules! drawn_answers {
    ($combine:expr) => {
        fn right_answer(&self, item: &crate::item::Item, _: &[crate::item::Answer]) -> crate::item::Answer {
            crate::score::retrieval::right(item, $combine)
        }

        fn chance(&self, item: &crate::item::Item) -> f64 {
            let score = |a: &crate::item::Answer| self.score(item, std::slice::from_ref(a));
            crate::score::retrieval::chance_one(item, score)
        }

        fn guess(
            &self,
            item: &crate::item::Item,
            draw: &mut dyn FnMut(usize) -> usize,
        ) -> crate::item::Answer {
            crate::score::retrieval::guess_one(item, draw)
        }
    };
}

pub mod babi;
pub mod build;
pub mod code;
pub mod copy;
pub mod counts;
pub mod distraction;
pub mod graph;
pub mod grid;
pub mod keyed;
pub mod mrcr;
pub mod niah;
pub mod no_overlap;
pub mod numbers;
pub mod options;
pub mod procedure;
pub mod qa;
pub mod ruler2;
pub mod tools;
pub mod values;
pub mod vt;
pub mod world;

/// Every task, in the order in which they are listed.
pub fn all() -> &'static [&'static dyn Task] {
    ALL
}

static ALL: &[&dyn Task] = &[
    &niah::SINGLE_1,
    &niah::SINGLE_2,
    &niah::SINGLE_3,
    &niah::MULTIKEY_1,
    &niah::MULTIKEY_2,
    &niah::MULTIKEY_3,
    &niah::MULTIVALUE,
    &niah::MULTIQUERY,
    &vt::Tracking,
    &counts::CommonWords,
    &counts::FrequentWords,
    &qa::OneHop,
    &qa::TwoHops,
    &grid::NeedleGrid,
    &grid::UuidChain,
    &ruler2::CELLS[0],
    &ruler2::CELLS[1],
    &ruler2::CELLS[2],
    &ruler2::CELLS[3],
    &ruler2::CELLS[4],
    &ruler2::CELLS[5],
    &ruler2::CELLS[6],
    &ruler2::CELLS[7],
    &ruler2::CELLS[8],
    &ruler2::CELLS[9],
    &ruler2::CELLS[10],
    &ruler2::CELLS[11],
    &babi::TYPES[0],
    &babi::TYPES[1],
    &babi::TYPES[2],
    &babi::TYPES[3],
    &babi::TYPES[4],
    &babi::TYPES[5],
    &babi::TYPES[6],
    &babi::TYPES[7],
    &babi::TYPES[8],
    &babi::TYPES[9],
    &no_overlap::ONE_HOP,
    &no_overlap::TWO_HOPS,
    &mrcr::Mrcr,
    &graph::BFS,
    &graph::PARENTS,
    &numbers::LatentList,
    &keyed::DontKnow,
    &keyed::JsonKv,
    &numbers::PASSKEY,
    &numbers::DIGIT_STRING,
    &numbers::Extremes,
    &numbers::RunningSum,
    &copy::Copy,
    &procedure::PathFollowing,
    &procedure::TableExtract,
    &keyed::ManyShot,
    &distraction::Distraction,
    &tools::ToolCalling,
    &code::CONSTANT,
    &code::CALLERS,
];

/// The task of a name, whose knobs are checked: `niah_single_1`, `needle_grid:depth=25`.
pub fn by_name(name: &str) -> Result<&'static dyn Task, EvalError> {
    let base = name.split(':').next().unwrap_or(name);
    let Some(task) = all().iter().find(|t| t.name() == base) else {
        let known: Vec<&str> = all().iter().map(|t| t.name()).collect();
        return Err(EvalError::bad("task", name, known.join(", ")));
    };
    options::Options::of(*task, name)?;
    Ok(*task)
}

/// The answer that counts: the last. No answer at all is an empty one.
pub fn last(answers: &[Answer]) -> &Answer {
    static NONE: LazyLock<Answer> = LazyLock::new(|| Answer { finish: Finish::Other, ..Answer::default() });
    answers.last().unwrap_or(&NONE)
}

#[cfg(test)]
mod proof;
