//! Ranks that die or freeze: every other rank gets an error that names the lost one, within the bound.

mod common;

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::Whole;
use suanpan_base::{HeadShape, Mask};
use suanpan_parallel::{
    Fault, FaultKind, Inputs, Layout, Options, Outputs, ParallelPlan, Pass, Request, Scheme, check,
    run_threads,
};

const RANKS: usize = 4;

/// One run with `break_at(rank, step)` called before every step.
fn run(
    scheme: Scheme,
    pass: Pass,
    timeout: Duration,
    break_at: Arc<dyn Fn(usize, usize) + Send + Sync>,
) -> Vec<Result<Outputs, Fault>> {
    let whole = Whole::new(HeadShape::new(4, 4, 4), Mask::CAUSAL, &[16], 3);
    // Contiguous: the first rank needs nobody, and the last one's keys nobody.
    let (layout, cp_size) = (Layout::Contiguous, RANKS);
    let (heads, mask) = (whole.heads, &whole.mask);
    let request = Request { heads, mask, layout, cp_size, scheme, pass, invariant_block: None };
    let plan = check(ParallelPlan::new(&request).unwrap()).unwrap();
    let backward = pass == Pass::Backward;
    let inputs = (0..RANKS).map(|rank| {
        let of = |x: &[f32]| plan.plan().shards.scatter(rank, x, 16);
        let when = |x: Vec<f32>| if backward { x } else { Vec::new() };
        Inputs {
            q: of(&whole.q),
            k: of(&whole.k),
            v: of(&whole.v),
            out: when(of(&whole.d_out)),
            lse: when(vec![2.0; 16]),
            d_out: when(of(&whole.d_out)),
        }
    });
    let options = Options { timeout, observer: Some(break_at), ..Options::default() };
    run_threads(&plan, &Default::default(), inputs.collect(), &options).unwrap()
}

fn steps(scheme: Scheme, pass: Pass) -> usize {
    match (scheme, pass) {
        (Scheme::Ring, Pass::Forward) => RANKS,
        (Scheme::Ring, Pass::Backward) | (Scheme::RingQuery, _) => RANKS + 1,
        (Scheme::AllGather | Scheme::Halo, Pass::Forward) => 2,
        // Two groups: heads out, two turns of the ring (backward one home), results home.
        (Scheme::Hybrid(_), Pass::Forward) => 4,
        (Scheme::Hybrid(_), Pass::Backward) => 5,
        _ => 3,
    }
}

/// Every (scheme, pass, rank, step).
fn places() -> Vec<(Scheme, Pass, usize, usize)> {
    let schemes = Scheme::ALL.into_iter().chain([Scheme::Hybrid(2)]);
    let kinds = schemes.flat_map(|s| [Pass::Forward, Pass::Backward].map(|p| (s, p)));
    let ranks = kinds.flat_map(|(s, p)| (0..RANKS).map(move |r| (s, p, r)));
    ranks.flat_map(|(s, p, r)| (0..steps(s, p)).map(move |t| (s, p, r, t))).collect()
}

fn all_name(reports: &[Result<Outputs, Fault>], lost: usize, step: usize, kind: FaultKind, what: &str) {
    assert_eq!(reports.len(), RANKS);
    for (rank, report) in reports.iter().enumerate() {
        let fault = report.as_ref().expect_err(what);
        assert_eq!((fault.rank, fault.lost, fault.kind), (rank, lost, kind), "{what}: {fault}");
        // The board knows the step the lost rank was in when it last spoke: the one before the break.
        assert_eq!(fault.lost_step, step.saturating_sub(1), "{what}: {fault}");
    }
}

#[test]
fn a_rank_that_dies_at_any_step_is_named_by_all_others() {
    for (scheme, pass, lost, step) in places() {
        let begun = Instant::now();
        let timeout = Duration::from_secs(60);
        let reports = run(
            scheme,
            pass,
            timeout,
            Arc::new(move |rank, t| {
                if (rank, t) == (lost, step) {
                    // Like a panic, without its message.
                    std::panic::resume_unwind(Box::new("killed"));
                }
            }),
        );
        all_name(
            &reports,
            lost,
            step,
            FaultKind::Died,
            &format!("{scheme} {pass:?} rank {lost} step {step}"),
        );
        assert!(begun.elapsed() < timeout, "death is noticed at once, not by a time-out");
    }
}

#[test]
fn a_rank_that_freezes_at_any_step_is_named_by_all_others() {
    let timeout = Duration::from_secs(3);
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    // Frozen runs only wait: all of them at once.
    let runs = places().into_iter().map(|(scheme, pass, lost, step)| {
        let gate = gate.clone();
        std::thread::spawn(move || {
            let begun = Instant::now();
            let freeze = move |rank: usize, t: usize| {
                if (rank, t) == (lost, step) {
                    let open = gate.0.lock().unwrap();
                    drop(gate.1.wait_while(open, |open| !*open).unwrap());
                }
            };
            let reports = run(scheme, pass, timeout, Arc::new(freeze));
            let what = format!("{scheme} {pass:?} rank {lost} step {step}");
            all_name(&reports, lost, step, FaultKind::TimedOut, &what);
            // One time-out, and one more at most for whoever is silent then.
            assert!(begun.elapsed() < 3 * timeout, "{what}: {:?}", begun.elapsed());
        })
    });
    let failed: Vec<_> = runs.collect::<Vec<_>>().into_iter().filter_map(|run| run.join().err()).collect();
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    assert!(failed.is_empty(), "{} runs were wrong", failed.len());
}
