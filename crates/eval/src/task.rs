//! What a task is: it builds questions with known answers and judges what comes back. It knows no endpoint, no clock and no file.

use crate::EvalError;
use crate::count::Counter;
use crate::item::{Answer, Cell, Item, Score, Turn};

/// What every task builds from.
pub struct Kit<'a> {
    /// Seed of the pack.
    pub seed: u64,
    /// Counts tokens.
    pub counter: &'a dyn Counter,
    /// Text to hide facts in.
    pub haystack: &'a dyn Haystack,
}

/// Text that goes on as long as it is asked to, the same on every machine.
pub trait Haystack: Send + Sync {
    /// Sentence `i` of the stream, without a line break at its end; the stream has no end (it may repeat, and says so by `period`).
    fn sentence(&self, i: u64) -> &str;

    /// Sentences before the first repeats.
    fn period(&self) -> u64;

    /// Name and content hash, for the recipe.
    fn identity(&self) -> String;
}

/// A knob of a task, asked for in its name: `needle_grid:depth=25`.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// Its name.
    pub name: &'static str,
    /// What it may be.
    pub range: Range,
    /// What it does, in a line.
    pub about: &'static str,
}

/// What a knob may be, and what it is when nobody asks.
#[derive(Clone, Copy, Debug)]
pub enum Range {
    /// A whole number from `least` to `most`; without a default the task chooses by itself.
    Whole {
        /// Least.
        least: usize,
        /// Most.
        most: usize,
        /// When not asked for.
        default: Option<usize>,
    },
    /// One of these words; the first when not asked for.
    Word(&'static [&'static str]),
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Range::Whole { least, most, .. } => write!(f, "{least} to {most}"),
            Range::Word(words) => f.write_str(&words.join(" | ")),
        }
    }
}

/// One kind of question.
pub trait Task: Send + Sync {
    /// Its name, as the field knows it: `niah_single_1`, `vt`, `graphwalks_bfs`.
    fn name(&self) -> &'static str;

    /// What it asks, in a line, for `eval tasks`.
    fn about(&self) -> &'static str;

    /// Its knobs.
    fn knobs(&self) -> &'static [Knob] {
        &[]
    }

    /// The question of a cell. Deterministic in (kit, cell).
    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError>;

    /// Judges the answers, one for each request that was made.
    fn score(&self, item: &Item, answers: &[Answer]) -> Score;

    /// The turns that follow the answers so far (results of tool calls, the next question), or nothing when the item is done.
    /// A pure function of the transcript, so that a run resumes anywhere. The assistant's own turns are added by the runner.
    fn follow_up(&self, _item: &Item, _answers: &[Answer]) -> Option<Vec<Turn>> {
        None
    }

    /// The answer that must score 1, compatible and strict, after `answers`: the harness proves itself with it.
    fn right_answer(&self, item: &Item, answers: &[Answer]) -> Answer;

    /// What a guess from the decoys and the gold scores on average (compatible), so that a guesser's result can be held against it.
    fn chance(&self, item: &Item) -> f64;

    /// A guess that draws from what the context offers; `draw` gives numbers below its argument.
    fn guess(&self, item: &Item, draw: &mut dyn FnMut(usize) -> usize) -> Answer;
}
