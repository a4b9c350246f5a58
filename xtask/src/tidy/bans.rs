//! Bans that name their replacement. Each is an invariant of ARCHITECTURE.md that a text search can hold.

use super::{File, Tree};

struct Ban {
    /// Text that may not stand in a source file.
    text: &'static str,
    /// Files it applies to, by prefix.
    within: &'static str,
    /// Prefixes where it is allowed all the same.
    except: &'static [&'static str],
    /// What to do instead.
    instead: &'static str,
}

const BANS: &[Ban] = &[
    Ban {
        text: "todo!(",
        within: "",
        except: &["xtask/src/tidy/"],
        instead: "build it or refuse it by name",
    },
    Ban { text: "unimplemented!(", within: "", except: &["xtask/src/tidy/"], instead: "refuse it by name" },
    Ban {
        text: "#[ignore",
        within: "",
        except: &["xtask/src/tidy/"],
        instead: "a quick test, or a named long profile",
    },
    Ban { text: "dbg!(", within: "", except: &["xtask/src/tidy/"], instead: "tracing" },
    Ban {
        text: "std::time",
        within: "crates/ledger/",
        except: &[],
        instead: "pass durations in: ledger reads no clock",
    },
    Ban { text: "std::time", within: "crates/base/", except: &[], instead: "base has no clock" },
    Ban { text: "std::time", within: "crates/cache/src/", except: &[], instead: "pass a logical clock in" },
    Ban {
        text: "Instant",
        within: "crates/engine/src/scheduler",
        except: &[],
        instead: "the scheduler has no clock",
    },
    Ban {
        text: "thread",
        within: "crates/engine/src/scheduler",
        except: &[],
        instead: "the scheduler has no thread",
    },
    Ban {
        text: "serde_json",
        within: "crates/engine/src/",
        except: &[],
        instead: "only the server knows JSON",
    },
    Ban {
        text: "extern \"C\"",
        within: "crates/",
        except: &["crates/cuda/", "crates/parallel/src/transport"],
        instead: "raw launches live in cuda",
    },
    Ban {
        text: "static mut",
        within: "",
        except: &["xtask/src/tidy/"],
        instead: "pass the context: no global mutable state",
    },
];

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with("//")
}

fn check_file(file: &File, faults: &mut Vec<String>) {
    for ban in BANS {
        let applies =
            file.path.starts_with(ban.within) && !ban.except.iter().any(|e| file.path.starts_with(e));
        if !applies {
            continue;
        }
        for (number, line) in file.text.lines().enumerate() {
            if line.contains(ban.text) && !is_comment(line) {
                faults.push(format!(
                    "{}:{}: `{}` is banned here: {}",
                    file.path,
                    number + 1,
                    ban.text,
                    ban.instead
                ));
            }
        }
    }
    if file.path.ends_with(".cu") && !file.path.starts_with("crates/cuda/") {
        faults.push(format!("{}: only crates/cuda holds .cu files", file.path));
    }
}

/// Applies every ban to every source file.
pub fn check(tree: &Tree) -> Vec<String> {
    let mut faults = Vec::new();
    for file in tree.files.iter().filter(|f| f.path.ends_with(".rs") || f.path.ends_with(".cu")) {
        check_file(file, &mut faults);
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_in_the_scheduler_is_a_fault_but_a_comment_is_not() {
        let text = "// no Instant here\nlet t = Instant::now();\n".to_string();
        let mut faults = Vec::new();
        check_file(&File { path: "crates/engine/src/scheduler.rs".into(), text }, &mut faults);
        assert_eq!(faults.len(), 1, "{faults:?}");
    }
}
