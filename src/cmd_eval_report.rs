//! `suanpan eval report | compare | tasks | self-test`: what runs found, what can be asked, and whether the harness itself is right.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use serde_json::json;
use suanpan_eval::compare::{self, Comparison};
use suanpan_eval::scripted::self_test::SelfTest;
use suanpan_eval::stats::paired::Paired;
use suanpan_eval::task::Task;
use suanpan_eval::tasks;

#[derive(clap::Args)]
pub struct ReportArgs {
    /// Folder of a run.
    folder: PathBuf,
    /// Where report.json, report.csv, report.md and report.html go [default: the run's folder].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub struct CompareArgs {
    /// Folder of run A.
    a: PathBuf,
    /// Folder of run B.
    b: PathBuf,
    /// Conditions that may differ.
    #[arg(long, value_delimiter = ',')]
    differing: Vec<String>,
    /// Print JSON: {"pack", "differing", "unpaired", "lengths", "tasks"}.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub struct TasksArgs {
    /// Print JSON: [{"name", "about", "knobs"}].
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub struct SelfTestArgs {
    /// Tasks, or `all`.
    #[arg(long, value_delimiter = ',', default_value = "all")]
    tasks: Vec<String>,
    /// Lengths in bytes.
    #[arg(long, value_delimiter = ',', default_value = "6000,12000")]
    lengths: Vec<usize>,
    /// Items of each task and length.
    #[arg(long, default_value_t = 6)]
    samples: u32,
    /// Print JSON: [{"name", "expected", "got", "ok"}].
    #[arg(long)]
    json: bool,
}

pub fn report(args: &ReportArgs) -> anyhow::Result<()> {
    let out = args.out.as_deref().unwrap_or(&args.folder);
    let (report, files) = suanpan_eval::report::write(&args.folder, out)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    report.invalid.iter().chain(&report.verdict).for_each(|l| println!("{l}"));
    files.iter().for_each(|f| println!("{}", f.display()));
    Ok(())
}

fn line(name: &str, p: &Paired) {
    let d = &p.difference;
    println!(
        "{name:<28} n {:>5}  B − A {:+.1} [{:+.1}, {:+.1}]  only A {} only B {}  {}",
        p.n,
        d.value * 100.0,
        d.low * 100.0,
        d.high * 100.0,
        p.only_a,
        p.only_b,
        p.mcnemar_p.map_or(String::new(), |p| format!("McNemar p {p:.4}"))
    );
}

pub fn compare(args: &CompareArgs) -> anyhow::Result<()> {
    let result: Comparison = compare::compare(&args.a, &args.b, &args.differing)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&result)?);
        return Ok(());
    }
    for (name, (a, b)) in &result.differing {
        println!("{name}: {a} and {b}");
    }
    println!("pack {}; {} items answered by one run only", result.pack, result.unpaired);
    for (length, p) in &result.lengths {
        line(&if *length == 0 { "all lengths".to_owned() } else { format!("{length} tokens") }, p);
    }
    result.tasks.iter().for_each(|(task, p)| line(task, p));
    Ok(())
}

pub fn tasks(args: &TasksArgs) -> anyhow::Result<()> {
    if args.json {
        let one = |t: &&'static dyn Task| {
            let knobs = t
                .knobs()
                .iter()
                .map(|k| json!({"name": k.name, "range": k.range.to_string(), "about": k.about}));
            json!({"name": t.name(), "about": t.about(), "knobs": knobs.collect::<Vec<_>>()})
        };
        println!("{}", serde_json::to_string_pretty(&tasks::all().iter().map(one).collect::<Vec<_>>())?);
        return Ok(());
    }
    for task in tasks::all() {
        println!("{:<20} {}", task.name(), task.about());
        task.knobs().iter().for_each(|k| println!("    :{}={}  {}", k.name, k.range, k.about));
    }
    Ok(())
}

pub fn self_test(args: &SelfTestArgs) -> anyhow::Result<()> {
    let names: Vec<String> = match args.tasks.as_slice() {
        [all] if all == "all" => tasks::all().iter().map(|t| t.name().to_owned()).collect(),
        named => named.to_vec(),
    };
    let named = names.into_iter().map(|n| Ok((n.clone(), tasks::by_name(&n)?)));
    let tasks: Vec<(String, &'static dyn Task)> = named.collect::<anyhow::Result<_>>()?;
    let folder = std::env::temp_dir().join(format!("suanpan-self-test-{}", std::process::id()));
    let test = SelfTest { tasks: &tasks, lengths: &args.lengths, samples: args.samples, folder: &folder };
    let checks = test.all(&mut |c| {
        if !args.json {
            println!("{} {}: {} (expected: {})", if c.ok { "ok " } else { "BAD" }, c.name, c.got, c.expected);
        }
    });
    std::fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let checks = checks?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&checks)?);
    }
    let bad = checks.iter().filter(|c| !c.ok).count();
    ensure!(bad == 0, "{bad} of {} checks failed: the harness is not to be trusted here", checks.len());
    Ok(())
}
