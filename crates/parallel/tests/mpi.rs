//! Ranks as processes under MPI: right results for 2 to 4 of them, and killed or frozen ones named by all others, within the bound.
//! Needs Open MPI's mpirun (Debian: openmpi-bin).

use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Runs `suanpan-ranks transport=mpi …` in `ranks` processes.
fn mpirun(ranks: usize, args: &[&str]) -> Output {
    let mut command = Command::new("mpirun");
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        command.env(name, "1");
    }
    command.args(["--oversubscribe", "-n", &ranks.to_string()]);
    command.arg(env!("CARGO_BIN_EXE_suanpan-ranks")).arg("transport=mpi").args(args);
    command.output().expect("mpirun of Open MPI")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn two_to_four_processes_are_right_under_every_scheme() {
    for (ranks, schemes) in [
        (2, &["scheme=ring", "scheme=ulysses"][..]),
        (3, &["scheme=ring-query", "scheme=halo"]),
        (4, &["scheme=ring", "scheme=all-gather", "scheme=hybrid:2"]),
    ] {
        for scheme in schemes {
            for invariant in ["invariant_block=0", "invariant_block=64"] {
                let run = mpirun(ranks, &[scheme, "tokens=700", "documents=3", invariant]);
                let (out, err) = (text(&run.stdout), text(&run.stderr));
                assert!(run.status.success(), "{ranks} {scheme}: {out}{err}");
                for rank in 0..ranks {
                    assert!(out.contains(&format!("rank {rank}: right")), "{ranks} {scheme}: {out}{err}");
                }
                assert_eq!(out.matches("hidden ").count(), 2 * ranks, "hidden fraction, rank by rank: {out}");
            }
        }
    }
}

/// C53: the lost rank is named by every other, the job ends with a status that is not 0, and nothing of it is left.
#[test]
fn a_killed_or_frozen_process_is_named_by_all_others() {
    for (how, lost, step) in [("kill", 1, 0), ("kill", 2, 1), ("freeze", 0, 1), ("freeze", 2, 2)] {
        let mark = format!("repeats={}", 7 + 10 * lost + 100 * step + if how == "kill" { 1 } else { 0 });
        let begun = Instant::now();
        let args = ["timeout_ms=2000", "tokens=256", &mark, &format!("break={how}:{lost}:{step}")];
        let run = mpirun(3, &args);
        let (out, err) = (text(&run.stdout), text(&run.stderr));
        assert!(!run.status.success(), "{how} {lost} {step}: {out}{err}");
        for rank in (0..3).filter(|r| *r != lost) {
            let says = format!("rank {rank}, step ");
            let named = |line: &str| line.contains(&says) && line.contains(&format!("rank {lost} was lost"));
            assert!(err.lines().any(named), "{how} {lost} {step}, rank {rank}: {out}{err}");
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{how} {lost} {step}: {:?}", begun.elapsed());
        let left = Command::new("pgrep").args(["-f", &mark]).output().expect("pgrep");
        assert!(left.stdout.is_empty(), "{how} {lost} {step}: left behind {}", text(&left.stdout));
    }
}

/// A launcher that MPI knows nothing of is refused, not taken for a job of one.
#[test]
fn variables_without_mpirun_are_refused_by_name() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_suanpan-ranks"));
    command.env("RANK", "1").env("WORLD_SIZE", "2").env("LOCAL_RANK", "1").arg("transport=mpi");
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        command.env(name, "1");
    }
    let run = command.output().unwrap();
    let err = text(&run.stderr);
    assert!(!run.status.success() && err.contains("launch") && err.contains("mpirun"), "{err}");
}
