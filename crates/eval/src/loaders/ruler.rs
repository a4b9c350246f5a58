//! Files of RULER and of NeMo's branches of it: one JSON object a line with `index`, `input`, `outputs`, and where known `length` and
//! `answer_prefix`. Scores are upstream's, to the two decimals that it prints; beside them stands lm-evaluation-harness's reading, which
//! takes the mean over references where upstream takes the best.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::{rows, text, texts};
use crate::EvalError;
use crate::item::{Answer, Cell, Item, Prompt, Role, Score, Turn, View};
use crate::pack::THIRTEEN;
use crate::score::retrieval::{self, Combine};
use crate::task::{Kit, Task};
use crate::tasks::last;

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Upstream's number of the sample.
    pub index: u64,
    /// What is asked, whole.
    pub input: String,
    /// References.
    pub outputs: Vec<String>,
    /// Start of the answer, where the file keeps it apart.
    pub answer_prefix: Option<String>,
    /// Tokens by upstream's tokenizer, answer included.
    pub length: Option<u64>,
}

/// One of the thirteen tasks, from a file.
pub struct RulerFile {
    name: &'static str,
    rows: Vec<Row>,
    identity: String,
}

/// How upstream combines the references of a task, and the room that it gives an answer.
fn rules(name: &str) -> (Combine, usize) {
    match name {
        "vt" => (Combine::All, 30),
        "cwe" => (Combine::All, 120),
        "fwe" => (Combine::All, 50),
        "qa_1" | "qa_2" => (Combine::Any, 32),
        _ => (Combine::All, 128),
    }
}

fn row(value: &Value) -> Result<Row, String> {
    let outputs = if value.get("outputs").is_some() { "outputs" } else { "answer" };
    Ok(Row {
        index: value.get("index").and_then(Value::as_u64).unwrap_or(0),
        input: text(value, "input")?.to_string(),
        outputs: texts(value, outputs)?,
        answer_prefix: value.get("answer_prefix").and_then(Value::as_str).map(str::to_string),
        length: value.get("length").and_then(Value::as_u64),
    })
}

impl RulerFile {
    /// Reads the file of a task, whose name decides the scoring.
    pub fn open(task: &str, path: &Path) -> Result<RulerFile, EvalError> {
        let Some(name) = THIRTEEN.iter().find(|n| **n == task) else {
            return Err(EvalError::bad("task", task, THIRTEEN.join(", ")));
        };
        let rows = rows(path, row)?;
        let mut hasher = blake3::Hasher::new();
        for r in &rows {
            hasher.update(r.input.as_bytes());
        }
        Ok(RulerFile { name, rows, identity: format!("ruler-file-{}", &hasher.finalize().to_hex()[..16]) })
    }

    /// The rows: sample `i` of a run is row `i`.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }
}

impl Task for RulerFile {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        "a task of the RULER set, from a file"
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        if cell.view != View::Full {
            return Err(EvalError::bad(
                "view",
                format!("{:?}", cell.view),
                "full: the file keeps no facts apart",
            ));
        }
        let Some(row) = self.rows.get(cell.index as usize) else {
            return Err(EvalError::bad("index", cell.index, format!("0 to {}", self.rows.len() - 1)));
        };
        let answer_tokens = rules(self.name).1;
        let lead = row.answer_prefix.as_deref().unwrap_or("");
        let counter = kit.counter;
        let prompt_tokens = counter.count(&row.input) + counter.count(lead) + counter.turn_tokens();
        if prompt_tokens + answer_tokens > cell.length_tokens {
            return Err(EvalError::TooShort {
                task: cell.task.clone(),
                length_tokens: cell.length_tokens,
                least_tokens: prompt_tokens + answer_tokens,
            });
        }
        Ok(Item {
            cell: cell.clone(),
            prompt: Prompt {
                turns: vec![Turn::text(Role::User, &*row.input)],
                lead_in: row.answer_prefix.clone(),
                tools: Vec::new(),
            },
            answer_tokens,
            prompt_tokens,
            gold: row.outputs.clone(),
            decoys: Vec::new(),
            facts: Vec::new(),
            recipe: BTreeMap::from([
                ("corpus".to_string(), json!(self.identity)),
                ("source_index".to_string(), json!(row.index)),
            ]),
        })
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let mut score = retrieval::score(item, last(answers), rules(self.name).0);
        score.detail.insert("lm_eval".into(), lm_eval(&item.gold, &last(answers).text));
        score
    }

    fn right_answer(&self, item: &Item, _answers: &[Answer]) -> Answer {
        retrieval::right(item, rules(self.name).0)
    }

    fn chance(&self, item: &Item) -> f64 {
        retrieval::chance(item, rules(self.name).0)
    }

    fn guess(&self, item: &Item, draw: &mut dyn FnMut(usize) -> usize) -> Answer {
        retrieval::guess(item, rules(self.name).0, draw)
    }
}

/// lm-evaluation-harness's reading: the share of references that is found, for every task, questions included.
pub fn lm_eval(gold: &[String], text: &str) -> f64 {
    retrieval::compatible(gold, text, Combine::All)
}

/// Score of a task over its samples: 100 × mean, rounded to two decimals as Python's `round` does (half to even on the binary value).
pub fn task_score(scores: &[f64]) -> f64 {
    let mean = scores.iter().sum::<f64>() / scores.len().max(1) as f64 * 100.0;
    format!("{mean:.2}").parse().unwrap_or(mean)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::Prose;
    use crate::count::Bytes;

    fn file(lines: &str) -> tempfile::Named {
        tempfile::Named::new(lines)
    }

    /// A file that is removed with its guard.
    mod tempfile {
        use std::path::PathBuf;
        use std::sync::atomic::{AtomicUsize, Ordering};

        pub struct Named(pub PathBuf);

        impl Named {
            pub fn new(text: &str) -> Named {
                static NEXT: AtomicUsize = AtomicUsize::new(0);
                let n = NEXT.fetch_add(1, Ordering::Relaxed);
                let path =
                    std::env::temp_dir().join(format!("suanpan-ruler-{}-{n}.jsonl", std::process::id()));
                std::fs::write(&path, text).unwrap();
                Named(path)
            }
        }

        impl Drop for Named {
            fn drop(&mut self) {
                std::fs::remove_file(&self.0).ok();
            }
        }
    }

    #[test]
    fn upstreams_best_reference_and_lm_evals_mean_differ_as_predicted() {
        // Four questions with 1, 2, 3 and 4 different ways to answer, each answered the first way: upstream 100, lm-eval the mean of 1/n.
        let lines: String = (1..=4)
            .map(|n| {
                let outputs: Vec<String> = (0..n).map(|i| format!("way{n}x{i}")).collect();
                json!({"index": n, "input": "q", "outputs": outputs, "length": 9}).to_string() + "\n"
            })
            .collect();
        let f = file(&lines);
        let task = RulerFile::open("qa_1", &f.0).unwrap();
        let kit = Kit { seed: 0, counter: &Bytes, haystack: Prose::shipped() };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for index in 0..4 {
            let cell = Cell { task: "qa_1".into(), length_tokens: 100, index, view: View::Full };
            let item = task.item(&kit, &cell).unwrap();
            let score = task.score(&item, &[task.right_answer(&item, &[])]);
            ours.push(score.compatible);
            theirs.push(score.detail["lm_eval"]);
        }
        assert_eq!(task_score(&ours), 100.0);
        assert_eq!(task_score(&theirs), 52.08);
    }

    #[test]
    fn rows_that_do_not_fit_or_do_not_exist_are_errors() {
        let f = file("{\"index\":0,\"input\":\"a long question\",\"outputs\":[\"x\"]}\n");
        let task = RulerFile::open("niah_single_1", &f.0).unwrap();
        let kit = Kit { seed: 0, counter: &Bytes, haystack: Prose::shipped() };
        let cell = |index, length_tokens| Cell {
            task: "niah_single_1".into(),
            length_tokens,
            index,
            view: View::Full,
        };
        assert!(matches!(task.item(&kit, &cell(0, 100)), Err(EvalError::TooShort { least_tokens: 143, .. })));
        assert!(matches!(task.item(&kit, &cell(1, 1000)), Err(EvalError::Bad { .. })));
        for bad in [
            "",
            "{",
            "[1]",
            "{\"input\":1}",
            "{\"input\":\"a\",\"outputs\":[]}",
            "{\"input\":\"a\",\"outputs\":[1]}",
        ] {
            let f = file(bad);
            assert!(matches!(RulerFile::open("vt", &f.0), Err(EvalError::File { .. })), "{bad}");
        }
        assert!(RulerFile::open("nothing", &f.0).is_err());
    }
}
