//! Tasks prove themselves: for every task and many cells, the right answer is right, a guess is as good as it says, a liar gains nothing,
//! facts stand where they say, equal cells are equal bytes, and no budget is exceeded.

use super::{all, by_name};
use crate::EvalError;
use crate::corpus::Prose;
use crate::count::{Bytes, Counter};
use crate::item::{Answer, Cell, Item, View};
use crate::rng::ItemRng;
use crate::task::{Kit, Task};

/// Counts words and line breaks: not additive over pieces on purpose (a word cut in two counts twice).
struct Words;

impl Counter for Words {
    fn count(&self, text: &str) -> usize {
        text.split_whitespace().count() + text.matches('\n').count()
    }

    fn name(&self) -> String {
        "words".into()
    }
}

/// More for the whole than for its pieces: the search must shrink.
struct Swelling;

impl Counter for Swelling {
    fn count(&self, text: &str) -> usize {
        let words = text.split_whitespace().count();
        words + words / 40
    }

    fn name(&self) -> String {
        "swelling".into()
    }
}

fn kit(counter: &dyn Counter) -> Kit<'_> {
    Kit { seed: 11, counter, haystack: Prose::shipped() }
}

fn cell(task: &str, length_tokens: usize, index: u32) -> Cell {
    Cell { task: task.into(), length_tokens, index, view: View::Full }
}

const LENGTHS: [usize; 3] = [6_000, 20_000, 60_000];

/// Items of every task: few at the long lengths.
fn items(mut each: impl FnMut(&'static dyn Task, Item)) {
    for task in all() {
        for (length, samples) in LENGTHS.into_iter().zip([12, 6, 2]) {
            for index in 0..samples {
                let item = task.item(&kit(&Bytes), &cell(task.name(), length, index));
                each(*task, item.unwrap_or_else(|e| panic!("{} {length}: {e}", task.name())));
            }
        }
    }
}

/// Plays the item to its end with the right answers.
fn right_answers(task: &dyn Task, item: &Item) -> Vec<Answer> {
    let mut answers = vec![task.right_answer(item, &[])];
    while task.follow_up(item, &answers).is_some() {
        assert!(answers.len() < 64, "{}: an item without an end", task.name());
        answers.push(task.right_answer(item, &answers));
    }
    answers
}

#[test]
fn the_right_answer_is_right_under_both_readings() {
    items(|task, item| {
        let score = task.score(&item, &right_answers(task, &item));
        assert_eq!((score.compatible, score.strict, score.failure), (1.0, 1.0, None), "{:?}", item.cell);
    });
}

#[test]
fn a_liar_who_lists_everything_gets_at_most_half() {
    items(|task, item| {
        let mut all: Vec<&str> = item.gold.iter().chain(&item.decoys).map(String::as_str).collect();
        all.sort();
        let lie = Answer { text: all.join(", "), ..Answer::default() };
        let score = task.score(&item, &[lie]);
        assert!(score.strict <= 0.5, "{:?}: {score:?}", item.cell);
        assert!(score.failure.is_some(), "{:?}", item.cell);
    });
}

#[test]
fn silence_and_noise_score_nothing() {
    items(|task, item| {
        for text in ["", " \n", "Lorem ipsum.", "{\"\\u00", "[[[[", "\u{0}\u{7f}é漢"] {
            let score = task.score(&item, &[Answer { text: text.into(), ..Answer::default() }]);
            assert!(score.strict < 1.0 && score.failure.is_some(), "{:?} {text:?}: {score:?}", item.cell);
        }
        assert!(task.score(&item, &[]).failure.is_some());
    });
}

#[test]
fn a_guess_is_as_good_as_it_says() {
    for task in all() {
        let (mut got, mut expected, mut variance) = (0.0, 0.0, 0.0);
        let n = 400;
        for index in 0..n {
            // A few items, many guesses at each.
            let item = task.item(&kit(&Bytes), &cell(task.name(), 6_000, index / 50)).unwrap();
            let mut rng = ItemRng::new(1, task.name(), 0, index, "guess");
            let score = task.score(&item, &[task.guess(&item, &mut |n| rng.below(n))]);
            let chance = task.chance(&item);
            assert!((0.0..=1.0).contains(&chance), "{}", task.name());
            got += score.compatible;
            expected += chance;
            // A score in 0 ..= 1 with this mean varies at most this much.
            variance += chance * (1.0 - chance);
        }
        // Five standard deviations, and one for the boundaries of small chances.
        let bound = 5.0 * variance.sqrt() + 1.0;
        assert!((got - expected).abs() <= bound, "{}: {got} instead of {expected} of {n}", task.name());
    }
}

#[test]
fn facts_stand_where_they_say() {
    items(|_, item| {
        let text = item.text();
        let unanswerable = item.recipe.get("answerable").and_then(|v| v.as_bool()) == Some(false);
        assert!(unanswerable || item.facts.iter().any(|f| f.needed), "{:?}: nothing is needed", item.cell);
        for fact in &item.facts {
            let said = &text[fact.start_byte..fact.end_byte];
            assert!(!said.is_empty() && said.trim() == said, "{:?}: {said:?}", item.cell);
            assert!((0.0..=1.0).contains(&fact.depth), "{:?}: {}", item.cell, fact.depth);
        }
        if unanswerable || item.recipe.get("written").and_then(|v| v.as_bool()) == Some(false) {
            return;
        }
        for gold in &item.gold {
            let somewhere =
                item.facts.iter().any(|f| f.needed && text[f.start_byte..f.end_byte].contains(gold.as_str()));
            assert!(somewhere, "{:?}: {gold} stands in no needed fact", item.cell);
        }
    });
}

#[test]
fn equal_cells_are_equal_bytes_and_others_differ() {
    items(|task, item| {
        let again = task.item(&kit(&Bytes), &item.cell).unwrap();
        assert_eq!(again, item);
        let other = Kit { seed: 12, counter: &Bytes, haystack: Prose::shipped() };
        assert_ne!(task.item(&other, &item.cell).unwrap().prompt, item.prompt, "{:?}", item.cell);
    });
}

#[test]
fn no_budget_is_exceeded_and_little_is_left() {
    for task in all() {
        for (counter, length) in [(&Bytes as &dyn Counter, 30_000), (&Words, 6_000), (&Swelling, 6_000)] {
            for view in [View::Full, View::Focused, View::ClosedBook] {
                let item = task.item(&kit(counter), &Cell { view, ..cell(task.name(), length, 3) }).unwrap();
                let lead = item.prompt.lead_in.as_deref().unwrap_or("");
                let tools: usize = item.prompt.tools.iter().map(|t| counter.count(&t.to_string())).sum();
                let counted = counter.count(&item.text()) + counter.count(lead) + tools;
                assert!(counted + item.answer_tokens <= length, "{:?} {}", item.cell, counter.name());
                assert!(
                    counted.abs_diff(item.prompt_tokens) <= counted / 20 + 8,
                    "{:?}: {counted}",
                    item.cell
                );
                let bounded = item.recipe.contains_key("bounded");
                if view == View::Full && !bounded {
                    let used = (counted + item.answer_tokens) as f64 / length as f64;
                    assert!(used > 0.9, "{:?} {}: {used}", item.cell, counter.name());
                }
            }
        }
    }
}

#[test]
fn a_length_that_cannot_hold_the_question_is_an_error_that_says_what_can() {
    for task in all() {
        for length in [0, 1, 50, 150] {
            let error = task.item(&kit(&Bytes), &cell(task.name(), length, 0)).unwrap_err();
            let EvalError::TooShort { least_tokens, .. } = error else { panic!("{}: {error}", task.name()) };
            assert!(least_tokens > length, "{}: {least_tokens}", task.name());
            // What it says is the least is not far from it.
            let item = task.item(&kit(&Bytes), &cell(task.name(), least_tokens * 3 / 2 + 64, 0));
            assert!(item.is_ok(), "{}: {least_tokens}: {item:?}", task.name());
        }
    }
}

#[test]
fn every_length_has_the_same_depths() {
    for task in all() {
        if !["niah_single_2", "niah_multikey_1"].contains(&task.name()) {
            continue;
        }
        let histogram = |length: usize| {
            let mut strata = [0; 20];
            for index in 0..40 {
                let item = task.item(&kit(&Bytes), &cell(task.name(), length, index)).unwrap();
                strata[(item.recipe["target_depth"].as_f64().unwrap() * 20.0) as usize] += 1;
            }
            strata
        };
        assert_eq!(histogram(6_000), [2; 20], "{}", task.name());
        assert_eq!(histogram(60_000), [2; 20], "{}", task.name());
    }
}

#[test]
fn unknown_tasks_and_knobs_are_refused_by_name() {
    for bad in [
        "",
        "nothing",
        "niah_single_1:x=1",
        "niah_single_1:depth=101",
        "niah_single_1:depth=1,depth=2",
        "niah_single_1:depth",
    ] {
        let Err(error) = by_name(bad) else { panic!("{bad} was taken") };
        assert!(matches!(error, EvalError::Bad { .. }), "{bad}: {error}");
    }
    assert_eq!(by_name("niah_single_1:depth=25,key=code").unwrap().name(), "niah_single_1");
}
