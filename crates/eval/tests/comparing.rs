//! Two runs side by side: same items in pairs, and no number out of a run that may not be used.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use suanpan_eval::compare::compare;
use suanpan_eval::endpoint::Protocol;
use suanpan_eval::scripted::minds::Mind;
use suanpan_eval::scripted::self_test::SelfTest;
use suanpan_eval::task::Task;
use suanpan_eval::tasks;

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run(folder: &Path, name: &str, mind: Mind) -> PathBuf {
    let tasks: Vec<(String, &'static dyn Task)> = tasks::all()
        .iter()
        .filter(|t| ["passkey", "json_kv"].contains(&t.name()))
        .map(|t| (t.name().to_owned(), *t))
        .collect();
    let test = SelfTest { tasks: &tasks, lengths: &[6_000], samples: 4, folder };
    let spec = test.spec(Protocol::Chat);
    let report = test.run(name, &spec, Arc::new(test.model(&spec, mind).unwrap())).unwrap();
    assert!(report.invalid.is_empty(), "{:?}", report.invalid);
    folder.join(name)
}

#[test]
fn a_run_that_has_not_come_to_its_end_is_not_compared() {
    let folder = Folder(std::env::temp_dir().join(format!("suanpan-comparing-{}", std::process::id())));
    let oracle = run(&folder.0, "oracle", Mind::Oracle);
    let guesser = run(&folder.0, "guesser", Mind::Guesser(7));
    let same = compare(&oracle, &oracle, &[]).unwrap();
    assert_eq!((same.unpaired, same.lengths[0].1.n, same.lengths[0].1.difference.value), (0, 8, 0.0));
    let worse = compare(&oracle, &guesser, &[]).unwrap();
    assert!(worse.lengths[0].1.difference.value < -0.5, "{:?}", worse.lengths[0]);

    let log = guesser.join("requests.jsonl");
    let text = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    std::fs::write(&log, lines[..lines.len() - 1].join("\n") + "\n").unwrap();
    let refused = compare(&oracle, &guesser, &[]).unwrap_err().to_string();
    assert!(refused.contains("run B") && refused.contains("1 of 8 items have no answer"), "{refused}");
    let refused = compare(&guesser, &oracle, &[]).unwrap_err().to_string();
    assert!(refused.contains("run A"), "{refused}");
}
