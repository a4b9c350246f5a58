//! Two runs side by side: refused when their conditions differ in anything that was not named, paired on the same items otherwise.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::EvalError;
use crate::item::{Cell, View};
use crate::report;
use crate::run::log::{self, Header, Outcome};
use crate::stats::paired::{self, Paired};

/// Two runs on the same items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Pack of both.
    pub pack: String,
    /// Conditions that differ, with both values.
    pub differing: BTreeMap<String, (serde_json::Value, serde_json::Value)>,
    /// Items that only one run has answered.
    pub unpaired: usize,
    /// By length (full view), strict scores; 0 is all lengths.
    pub lengths: Vec<(usize, Paired)>,
    /// By task, strict scores.
    pub tasks: Vec<(String, Paired)>,
}

type Scores = BTreeMap<Cell, (String, f64)>;

fn read(folder: &Path) -> Result<(Header, Scores), EvalError> {
    let header = log::read_header(folder)?.ok_or_else(|| {
        EvalError::bad("folder", folder.display(), "the folder of a run, with its run.json")
    })?;
    let mut scores = Scores::new();
    log::for_rows(folder, |row| {
        if let (Outcome::Scored, Some(score)) = (row.outcome, &row.score) {
            scores.insert(row.cell, (row.prompt_blake3, score.strict));
        }
    })?;
    Ok((header, scores))
}

fn check(a: &Header, b: &Header, named: &[String]) -> Result<Vec<String>, EvalError> {
    if a.pack != b.pack {
        let fields = a.spec.differing(&b.spec).join(", ");
        return Err(EvalError::bad(
            "packs",
            format!("{} and {} ({fields})", a.pack, b.pack),
            "two runs of one pack",
        ));
    }
    let differing = a.conditions.differing(&b.conditions);
    let unnamed: Vec<&str> = differing.iter().filter(|d| !named.contains(*d)).map(String::as_str).collect();
    if !unnamed.is_empty() {
        return Err(EvalError::bad(
            "conditions",
            format!("differ in {}", unnamed.join(", ")),
            "the same, or named: --differing NAME,NAME",
        ));
    }
    let needless: Vec<&str> = named.iter().filter(|n| !differing.contains(*n)).map(String::as_str).collect();
    if !needless.is_empty() {
        return Err(EvalError::bad("differing", needless.join(", "), "conditions that do differ"));
    }
    Ok(differing)
}

/// Compares the runs in two folders. `named` are the conditions that may differ.
///
/// Errors: another pack, a run whose report says that it is invalid (a failed read-proof, items without an answer), conditions that differ
/// without being named or are named without differing, one item with two prompts.
pub fn compare(folder_a: &Path, folder_b: &Path, named: &[String]) -> Result<Comparison, EvalError> {
    let ((header_a, a), (header_b, b)) = (read(folder_a)?, read(folder_b)?);
    let differing = check(&header_a, &header_b, named)?;
    for (folder, name) in [(folder_a, "A"), (folder_b, "B")] {
        if let Some(why) = report::summary::why_invalid(folder)?.first() {
            return Err(EvalError::bad(format!("run {name}"), format!("invalid: {why}"), "two valid runs"));
        }
    }
    let mut pairs: Vec<(&Cell, f64, f64)> = Vec::new();
    for (cell, (hash_a, score_a)) in &a {
        let Some((hash_b, score_b)) = b.get(cell) else { continue };
        if hash_a != hash_b {
            return Err(EvalError::bad(
                "item",
                format!("{cell:?} with two prompts"),
                "the same prompt in both runs",
            ));
        }
        pairs.push((cell, *score_a, *score_b));
    }
    let cells: BTreeSet<&Cell> = a.keys().chain(b.keys()).collect();
    let of = |label: &str, keep: &dyn Fn(&Cell) -> bool| {
        let kept = pairs.iter().filter(|(c, ..)| c.view == View::Full && keep(c));
        paired::compare(&kept.map(|(_, a, b)| (*a, *b)).collect::<Vec<_>>(), label)
    };
    let mut lengths = vec![(0, of("all", &|_| true))];
    let mut sorted = header_a.spec.lengths.clone();
    sorted.sort_unstable();
    lengths.extend(sorted.iter().map(|&l| (l, of(&l.to_string(), &|c| c.length_tokens == l))));
    lengths.retain(|(_, p)| p.n > 0);
    let tasks = header_a.spec.tasks.iter().map(|t| (t.clone(), of(t, &|c| c.task == *t)));
    let value = |h: &Header, name: &String| {
        h.conditions.0.get(name).map_or(serde_json::Value::Null, |c| c.value.clone())
    };
    Ok(Comparison {
        pack: header_a.pack.clone(),
        differing: differing
            .iter()
            .map(|n| (n.clone(), (value(&header_a, n), value(&header_b, n))))
            .collect(),
        unpaired: cells.len() - pairs.len(),
        tasks: tasks.filter(|(_, p)| p.n > 0).collect(),
        lengths,
    })
}
