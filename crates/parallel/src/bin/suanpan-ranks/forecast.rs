//! `forecast=1`: measures this machine's constants, lets the simulator predict runs of many kinds, runs them, and prints how far off it was.

use std::num::NonZeroUsize;
use std::time::Duration;

use suanpan_base::{HeadShape, Mask};
use suanpan_parallel::simulate::{Constants, Link, simulate};
use suanpan_parallel::{
    Checked, Layout, MaskSlices, Options, Outputs, ParallelPlan, Pass, Request, Scheme, Times, check,
};

use super::{Attention, Failure, Job, run_threads};

/// Runs a plan on all ranks and returns every rank's times, to whoever prints (rank 0), and nothing to others.
pub trait Runner {
    fn ranks(&self) -> usize;
    fn prints(&self) -> bool;
    fn run(&mut self, job: &Job, plan: &Checked, messages_only: bool) -> Result<Vec<Times>, Failure>;
    /// All ranks wait here for each other.
    fn meet(&mut self) -> Result<(), Failure>;
}

/// Ranks as threads of this process.
pub struct Threads(pub usize);

impl Runner for Threads {
    fn ranks(&self) -> usize {
        self.0
    }

    fn prints(&self) -> bool {
        true
    }

    fn run(&mut self, job: &Job, plan: &Checked, messages_only: bool) -> Result<Vec<Times>, Failure> {
        let inputs =
            (0..plan.plan().ranks.len()).map(|r| job.inputs(plan.plan(), r, given(plan, r).as_ref()));
        let options = Options { messages_only, ..Options::default() };
        let reports = run_threads(plan, &Attention::default(), inputs.collect(), &options)?;
        Ok(reports.into_iter().map(|r| r.map(|x| x.times)).collect::<Result<_, _>>()?)
    }

    fn meet(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

/// A backward's out and lse: any numbers take as long.
pub fn given(plan: &Checked, rank: usize) -> Option<Outputs> {
    let (plan, heads) = (plan.plan(), plan.plan().heads);
    let rows = plan.shards.tokens(rank) * heads.num_q_heads;
    (plan.pass == Pass::Backward).then(|| Outputs {
        out: vec![0.1; rows * heads.head_dim_v],
        lse: vec![5.0; rows],
        ..Outputs::default()
    })
}

fn planned(
    job: &Job,
    mask: &MaskSlices,
    layout: Layout,
    scheme: Scheme,
    cp_size: usize,
    pass: Pass,
) -> Result<Checked, Failure> {
    let (heads, invariant_block): (HeadShape, Option<NonZeroUsize>) = (job.heads, None);
    let request = Request { heads, mask, layout, cp_size, scheme, pass, invariant_block };
    Ok(check(ParallelPlan::new(&request)?)?)
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The least over repeats (a shared machine only ever adds) of the mean over ranks.
fn mean_of(
    runner: &mut dyn Runner,
    job: &Job,
    plan: &Checked,
    alone: bool,
    of: fn(&Times) -> Duration,
) -> Result<f64, Failure> {
    let mut all = Vec::new();
    for _ in 0..job.repeats {
        let times = runner.run(job, plan, alone)?;
        all.push(times.iter().map(|t| us(of(t))).sum::<f64>() / times.len().max(1) as f64);
    }
    Ok(least(all))
}

fn least(x: Vec<f64>) -> f64 {
    x.into_iter().fold(f64::INFINITY, f64::min)
}

/// Least squares of relative errors: `rows` of (features, time).
fn fit(rows: &[([f64; 3], f64)]) -> [f64; 3] {
    let mut best = ([0.0; 3], f64::INFINITY);
    // Which features cost anything: all sets, and of those without a negative cost the one that fits best.
    for set in 1..8usize {
        let used: Vec<usize> = (0..3).filter(|i| set >> i & 1 == 1).collect();
        let n = used.len();
        let mut a = vec![vec![0.0; n + 1]; n];
        for (x, t) in rows {
            for (i, &f) in used.iter().enumerate() {
                used.iter().enumerate().for_each(|(j, &g)| a[i][j] += x[f] * x[g] / (t * t));
                a[i][n] += x[f] / t;
            }
        }
        for i in 0..n {
            for j in (0..n).filter(|j| *j != i) {
                let factor = a[j][i] / a[i][i];
                let row = a[i].clone();
                a[j].iter_mut().zip(&row).for_each(|(x, y)| *x -= factor * y);
            }
        }
        let mut x = [0.0; 3];
        used.iter().enumerate().for_each(|(i, &f)| x[f] = a[i][n] / a[i][i]);
        let off =
            |(f, t): &([f64; 3], f64)| (f.iter().zip(&x).map(|(a, b)| a * b).sum::<f64>() / t - 1.0).powi(2);
        let error: f64 = rows.iter().map(off).sum();
        if x.iter().all(|x| *x >= 0.0) && error < best.1 {
            best = (x, error);
        }
    }
    best.0
}

/// Cost of a tile, a pair and a row, with every processor busy: equal documents, each on a rank of its own, nothing sent.
fn kernels(runner: &mut dyn Runner, job: &Job, pass: Pass) -> Result<[f64; 3], Failure> {
    let (mut rows, processors) = (Vec::new(), runner.ranks());
    for mask in [Mask::CAUSAL, Mask::FULL] {
        for tokens in [32, 64, 128, 256, 512, 1024] {
            let mask = MaskSlices::packed(mask, &vec![tokens; processors])?;
            let plan = planned(job, &mask, Layout::Contiguous, Scheme::Ring, processors, pass)?;
            let time = mean_of(runner, job, &plan, false, |t| t.work)?;
            let tile = &plan.plan().ranks[0].steps[0].work[0].tile;
            let heads = (tile.q_heads.len(), tile.kv_heads.len());
            let pairs = tile.pairs() as f64 * heads.0 as f64;
            rows.push(([1.0, pairs, (tokens * (heads.0 + heads.1)) as f64], time));
        }
    }
    Ok(fit(&rows))
}

/// Bytes that a rank carries in a plan: cleared, packed, unpacked, moved.
fn carried(plan: &ParallelPlan, rank: usize) -> f64 {
    let regions = plan.ranks[rank].steps.iter().flat_map(|s| {
        let sent = s.sends.iter().map(|x| &x.region);
        s.clears
            .iter()
            .chain(sent)
            .chain(s.recvs.iter().map(|x| &x.region))
            .chain(s.moves.iter().map(|m| &m.from))
    });
    regions.map(|r| plan.bytes(rank, r) as f64).sum()
}

/// This machine under this transport.
fn constants(runner: &mut dyn Runner, job: &Job, rendezvous: bool) -> Result<Constants, Failure> {
    let processors = std::thread::available_parallelism()?.get().min(runner.ranks());
    let mut c = Constants {
        processors,
        rendezvous,
        granule: 1,
        node: usize::MAX,
        wire_bytes: (4.0, 4.0),
        ..Constants::h200(64)
    };
    // Ranks beyond the processors would only wait for each other: then threads of the printing rank stand in, and all others wait.
    let mut kernels_of = |pass| {
        if runner.ranks() <= processors {
            return kernels(runner, job, pass);
        }
        runner.meet()?;
        let fitted = if runner.prints() { kernels(&mut Threads(processors), job, pass)? } else { [0.0; 3] };
        runner.meet()?;
        Ok(fitted)
    };
    let [tile, pair, row] = kernels_of(Pass::Forward)?;
    (c.tile_us, c.forward_pair_us, c.forward_row_us) = (tile, pair, row);
    let [tile, pair, row] = kernels_of(Pass::Backward)?;
    (c.tile_us, c.backward_pair_us, c.backward_row_us) = ((c.tile_us + tile) / 2.0, pair, row);
    // Messages alone, short and long, between as many ranks as run at once.
    let n = runner.ranks();
    let plan = |tokens: usize| -> Result<Checked, Failure> {
        planned(
            job,
            &MaskSlices::packed(Mask::CAUSAL, &[tokens])?,
            Layout::Zigzag,
            Scheme::Ring,
            n,
            Pass::Backward,
        )
    };
    let (short, long) = (plan(2 * n)?, plan(512 * n)?);
    let steps = short.plan().ranks[0].steps.len() as f64;
    let carry =
        [mean_of(runner, job, &short, true, |t| t.carry)?, mean_of(runner, job, &long, true, |t| t.carry)?];
    let wait =
        [mean_of(runner, job, &short, true, |t| t.wait)?, mean_of(runner, job, &long, true, |t| t.wait)?];
    // Ranks beyond the processors wait for those, too: what remains is the message's.
    let share = processors as f64 / n as f64;
    c.step_us = carry[0] / steps * share;
    c.carry_bytes_per_us = carried(long.plan(), 0) / (carry[1] * share - carry[0] * share).max(1e-3);
    let per_step = long.plan().sent_bytes(0) as f64 / steps;
    let more = (wait[1] - wait[0]) * share / steps;
    let bytes_per_us = if more > 0.0 { per_step / more } else { f64::INFINITY };
    c.near = Link { message_us: wait[0] * share / steps, bytes_per_us };
    Ok(c)
}

/// Measures, predicts, runs, compares.
pub fn forecast(runner: &mut dyn Runner, job: &Job, rendezvous: bool) -> Result<(), Failure> {
    let (constants, n) = (constants(runner, job, rendezvous)?, runner.ranks());
    if runner.prints() {
        println!("{constants:?}");
    }
    let mut cases = vec![
        (Layout::Zigzag, Scheme::Ring),
        (Layout::Contiguous, Scheme::Ring),
        (Layout::Zigzag, Scheme::RingQuery),
        (Layout::Zigzag, Scheme::AllGather),
        (Layout::Contiguous, Scheme::Halo),
        (Layout::Zigzag, Scheme::Ulysses),
    ];
    cases.extend((n.is_multiple_of(2) && n > 2).then_some((Layout::Zigzag, Scheme::Hybrid(2))));
    let mut errors = Vec::new();
    for (layout, scheme) in cases {
        for pass in [Pass::Forward, Pass::Backward] {
            let plan = planned(job, &job.mask, layout, scheme, n, pass)?;
            let predicted = simulate(&plan, &constants)?.us;
            let mut all = Vec::new();
            for _ in 0..job.repeats {
                let times = runner.run(job, &plan, false)?;
                all.push(times.iter().map(|t| us(t.all)).fold(0.0, f64::max));
            }
            let measured = least(all);
            if runner.prints() {
                let error = predicted / measured - 1.0;
                errors.push(error.abs());
                println!(
                    "{scheme}, {layout}, {pass:?}: predicted {predicted:.0} us, measured {measured:.0} us, {:+.1} %",
                    100.0 * error
                );
            }
        }
    }
    if runner.prints() {
        let worst = errors.iter().copied().fold(0.0, f64::max);
        println!("error: median {:.1} %, worst {:.1} %", 100.0 * median(errors), 100.0 * worst);
    }
    Ok(())
}
