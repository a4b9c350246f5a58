//! The name of a task with its knobs: `needle_grid:depth=25,value=uuid`. Unknown knobs are refused by name.

use crate::EvalError;
use crate::task::{Knob, Range, Task};

/// The knobs that a name asks for, checked.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    task: &'static str,
    knobs: &'static [Knob],
    asked: Vec<(&'a str, &'a str)>,
}

impl<'a> Options<'a> {
    /// Reads the knobs of `name`, which must be `task`'s.
    pub fn of(task: &dyn Task, name: &'a str) -> Result<Self, EvalError> {
        let (base, rest) = name.split_once(':').unwrap_or((name, ""));
        if base != task.name() {
            return Err(EvalError::bad("task", name, task.name()));
        }
        let mut options = Options { task: task.name(), knobs: task.knobs(), asked: Vec::new() };
        for pair in rest.split(',').filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let Some(knob) = options.knobs.iter().find(|k| k.name == key) else {
                return Err(EvalError::bad(format!("{base}:{key}"), value, options.supported()));
            };
            if options.asked.iter().any(|(k, _)| *k == key) {
                return Err(EvalError::bad(format!("{base}:{key}"), "asked twice", "once"));
            }
            let fits = match knob.range {
                Range::Whole { least, most, .. } => {
                    value.parse::<usize>().is_ok_and(|n| (least..=most).contains(&n))
                }
                Range::Word(words) => words.contains(&value),
            };
            if !fits {
                return Err(EvalError::bad(format!("{base}:{key}"), value, knob.range));
            }
            options.asked.push((key, value));
        }
        Ok(options)
    }

    fn supported(&self) -> String {
        match self.knobs {
            [] => "no knobs".into(),
            knobs => knobs.iter().map(|k| format!("{}={}", k.name, k.range)).collect::<Vec<_>>().join(", "),
        }
    }

    fn knob(&self, name: &str) -> &Knob {
        let found = self.knobs.iter().find(|k| k.name == name);
        found.unwrap_or_else(|| unreachable!("{} reads a knob that it does not declare: {name}", self.task))
    }

    /// A whole number, asked for or by default.
    pub fn whole(&self, name: &str) -> Option<usize> {
        let Range::Whole { default, .. } = self.knob(name).range else {
            unreachable!("{}: {name} is a word", self.task)
        };
        let asked = self.asked.iter().find(|(k, _)| *k == name).and_then(|(_, v)| v.parse().ok());
        asked.or(default)
    }

    /// A whole number that has a default.
    pub fn count(&self, name: &str) -> usize {
        self.whole(name).unwrap_or_else(|| unreachable!("{}: {name} has no default", self.task))
    }

    /// A word.
    pub fn word(&self, name: &str) -> &'a str {
        let Range::Word(words) = self.knob(name).range else {
            unreachable!("{}: {name} is a number", self.task)
        };
        self.asked.iter().find(|(k, _)| *k == name).map_or(words[0], |(_, v)| v)
    }
}
