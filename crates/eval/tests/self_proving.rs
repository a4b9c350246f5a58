//! The harness proves itself: scripted endpoints through real HTTP come back with their known scores and times.

use suanpan_eval::scripted::self_test::{Check, SelfTest};
use suanpan_eval::task::Task;
use suanpan_eval::tasks;

#[test]
fn scripted_endpoints_get_their_known_scores_and_times() {
    let folder = std::env::temp_dir().join(format!("suanpan-self-test-{}", std::process::id()));
    let tasks: Vec<(String, &'static dyn Task)> =
        tasks::all().iter().map(|t| (t.name().to_owned(), *t)).collect();
    let test = SelfTest { tasks: &tasks, lengths: &[6_000, 12_000], samples: 6, folder: &folder };
    let checks = test.all(&mut |c| println!("{} {}: {} ({})", c.ok, c.name, c.got, c.expected)).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let bad: Vec<&Check> = checks.iter().filter(|c| !c.ok).collect();
    assert!(bad.is_empty() && checks.len() >= 14, "{bad:#?}");
}
