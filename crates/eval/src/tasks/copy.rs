//! Copying: a passage with one word that does not belong there, to be repeated as it stands; the answer is as long as the passage.

use serde_json::json;

use super::build::{Context, Frame, Units, prose, rng};
use super::values::code;
use crate::EvalError;
use crate::item::{Answer, Cell, Failure, Item, Score, View};
use crate::score::edit::{common_start, similarity};
use crate::score::retrieval::{Combine, judged};
use crate::task::{Kit, Task};

/// A passage, copied.
pub struct Copy;

impl Task for Copy {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn about(&self) -> &'static str {
        "a passage with one altered word, repeated as it stands; edit similarity and place of the first error"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let odd = code(&mut facts, 9);
        let mut frame = Frame {
            kit,
            cell,
            head: "Repeat the passage below exactly, word by word. It holds one word that is none; keep it.\nPassage:".into(),
            tail: "\n\nRepeat the passage above exactly, and nothing else.".into(),
            lead_in: Some("\nPassage:".into()),
            answer_tokens: 0,
        };
        let odd_tokens = kit.counter.count(&format!(" {odd}"));
        // The passage stands in the prompt and again in the answer, with a sixteenth to spare.
        let least = |room: usize| (room * 31 / 64).saturating_sub(odd_tokens + 8);
        let room = least(frame.room(0).unwrap_or(0));
        let mut filler = rng(kit, cell, "filler");
        let mut write = prose(kit.haystack, &mut filler);
        let mut units = Units::fill(kit.counter, room, &mut write);
        if units.len() < 2 {
            let mut two = String::new();
            for i in 0..2 {
                write(i, &mut two);
            }
            let passage = kit.counter.count(&two) + odd_tokens + 8;
            return Err(frame.too_short(frame.fixed_tokens() + passage * 64 / 31 + 8));
        }
        loop {
            let (context, passage, plain) = alter(kit, &units, &odd, frame.depth());
            frame.answer_tokens = kit.counter.count(&passage) * 33 / 32 + 8;
            let context = if cell.view == View::ClosedBook { Context::default() } else { context };
            if frame.over(&context) == 0 || units.len() <= 2 {
                let words = passage.split_whitespace().count();
                let more = [("odd_word", json!(odd)), ("words", json!(words)), ("written", json!(false))];
                return frame.finish(context, vec![passage], vec![plain], more);
            }
            units.drop_last(1);
        }
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let words = |text: &'_ str| text.split_whitespace().map(str::to_string).collect::<Vec<_>>();
        let gold = words(item.gold.first().map_or("", String::as_str));
        let said = words(&answer.text);
        let odd = item.recipe.get("odd_word").and_then(|w| w.as_str()).unwrap_or("");
        let similar = similarity(&said, &gold);
        let failure = if said.iter().any(|w| w.starts_with(odd)) { Failure::Partial } else { Failure::Wrong };
        // Strict: the share of the passage before the first error; one error early spoils what follows.
        let start = common_start(&said, &gold);
        let strict =
            if said == gold { 1.0 } else { (start as f64 / said.len().max(gold.len()) as f64).min(0.5) };
        let mut score = judged(answer, similar, strict, failure);
        score.detail.insert("words_before_first_error".into(), start as f64);
        score
    }

    drawn_answers!(Combine::Any);
}

/// The passage with `odd` after the word at `depth`, as context, as gold, and without the odd word.
fn alter(kit: &Kit<'_>, units: &Units, odd: &str, depth: f64) -> (Context, String, String) {
    let plain = units.with(kit.counter, &[]).text;
    let spaces: Vec<usize> = plain.match_indices(' ').map(|(at, _)| at).filter(|&at| at > 0).collect();
    let at = spaces[((depth * spaces.len() as f64) as usize).min(spaces.len() - 1)];
    let mut context = Context { units: units.len(), ..Context::default() };
    context.push(kit.counter, &plain[..at]);
    context.push_fact(kit.counter, &format!(" {odd}"), true);
    context.push(kit.counter, &plain[at..]);
    let passage = context.text.trim().to_string();
    (context, passage, plain.trim().to_string())
}
