//! Scores answers to a RULER-format file as the harness does, for `bench/ruler_parity.py`:
//! `ruler_scores TASK FILE ANSWERS`, answers being JSON lines with a field `pred` in the order of the file's rows.

use std::path::Path;

use suanpan_eval::EvalError;
use suanpan_eval::corpus::Prose;
use suanpan_eval::count::Bytes;
use suanpan_eval::item::{Answer, Cell, View};
use suanpan_eval::loaders::{rows, ruler, text};
use suanpan_eval::task::{Kit, Task};

fn main() -> Result<(), EvalError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, file, answers] = arguments.as_slice() else {
        return Err(EvalError::bad("arguments", arguments.join(" "), "TASK FILE ANSWERS"));
    };
    let task = ruler::RulerFile::open(name, Path::new(file))?;
    let answers = rows(Path::new(answers), |row| text(row, "pred").map(str::to_string))?;
    let kit = Kit { seed: 0, counter: &Bytes, haystack: Prose::shipped() };
    let (mut upstream, mut lm_eval, mut strict) = (Vec::new(), Vec::new(), Vec::new());
    for (index, answer) in answers.into_iter().enumerate() {
        let cell =
            Cell { task: name.clone(), length_tokens: usize::MAX / 2, index: index as u32, view: View::Full };
        let item = task.item(&kit, &cell)?;
        let score = task.score(&item, &[Answer { text: answer, ..Answer::default() }]);
        upstream.push(score.compatible);
        lm_eval.push(score.detail.get("lm_eval").copied().unwrap_or(0.0));
        strict.push(score.strict);
    }
    println!(
        "{{\"upstream\": {}, \"lm_eval\": {}, \"strict\": {}, \"rows\": {}}}",
        ruler::task_score(&upstream),
        ruler::task_score(&lm_eval),
        ruler::task_score(&strict),
        upstream.len()
    );
    Ok(())
}
