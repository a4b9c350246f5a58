//! The tasks: each builds questions with known answers at any length and judges what comes back.

use std::sync::LazyLock;

use crate::EvalError;
use crate::item::{Answer, Finish};
use crate::task::Task;

/// The judging half of a task whose answers name things (`score/retrieval.rs`).
macro_rules! named_answers {
    ($combine:expr) => {
        fn score(&self, item: &crate::item::Item, answers: &[crate::item::Answer]) -> crate::item::Score {
            crate::score::retrieval::score(item, crate::tasks::last(answers), $combine)
        }

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

pub mod build;
pub mod counts;
pub mod niah;
pub mod options;
pub mod qa;
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
