//! One attention layer over many ranks, from the command line: planned, checked, run forward and backward on threads or under MPI, compared
//! with one rank, and timed. `suanpan-ranks key=value …`; under MPI every process runs it (`mpirun -n 4 suanpan-ranks transport=mpi`).

mod forecast;

use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use suanpan_base::{HeadShape, Mask};
use suanpan_parallel::{
    Attention, Checked, Inputs, Layout, MaskSlices, Options, Outputs, ParallelPlan, Pass, Request, Scheme,
    check, run_threads,
};

const KEYS: &str = "transport=threads|mpi ranks=N tokens=N documents=N window=N heads=N kv_heads=N head_dim=N \
layout=contiguous|stripe|zigzag|document-zigzag scheme=ring|ring-query|all-gather|halo|ulysses|hybrid:N \
invariant_block=N repeats=N timeout_ms=N break=kill|freeze:RANK:STEP print_plan=1 forecast=1";

type Failure = Box<dyn std::error::Error>;

/// What was asked for, key by key; every key is taken once, and what is left over is unknown.
struct Asked(BTreeMap<String, String>);

impl Asked {
    fn parse(args: impl Iterator<Item = String>) -> Result<Asked, Failure> {
        let mut all = BTreeMap::new();
        for arg in args {
            let (key, value) = arg.split_once('=').ok_or(format!("{arg}: not key=value; keys: {KEYS}"))?;
            if all.insert(key.to_string(), value.to_string()).is_some() {
                return Err(format!("{key}: given twice").into());
            }
        }
        Ok(Asked(all))
    }

    fn text(&mut self, key: &str, default: &str) -> String {
        self.0.remove(key).unwrap_or_else(|| default.to_string())
    }

    fn number(&mut self, key: &str, default: usize) -> Result<usize, Failure> {
        let Some(text) = self.0.remove(key) else { return Ok(default) };
        text.parse().map_err(|_| format!("{key}: {text}; a number is supported").into())
    }
}

struct Job {
    mpi: bool,
    ranks: usize,
    heads: HeadShape,
    mask: MaskSlices,
    layout: Layout,
    scheme: Scheme,
    invariant_block: Option<NonZeroUsize>,
    repeats: usize,
    timeout: Duration,
    /// (signal, rank, step).
    broken: Option<(String, usize, usize)>,
    print_plan: bool,
    forecast: bool,
}

fn layout(text: &str) -> Result<Layout, Failure> {
    let names = ["contiguous", "stripe", "zigzag", "document-zigzag"];
    let at = names.iter().position(|n| *n == text);
    at.map(|i| Layout::ALL[i]).ok_or_else(|| format!("layout: {text}; {names:?} are supported").into())
}

fn scheme(text: &str) -> Result<Scheme, Failure> {
    if let Some(size) = text.strip_prefix("hybrid:").and_then(|size| size.parse().ok()) {
        return Ok(Scheme::Hybrid(size));
    }
    let names = ["ring", "ring-query", "all-gather", "halo", "ulysses"];
    let at = names.iter().position(|n| *n == text);
    at.map(|i| Scheme::ALL[i])
        .ok_or_else(|| format!("scheme: {text}; {names:?} and hybrid:N are supported").into())
}

fn broken(text: &str) -> Result<Option<(String, usize, usize)>, Failure> {
    let parts: Vec<&str> = text.split(':').collect();
    match parts[..] {
        [""] => Ok(None),
        ["kill" | "freeze", rank, step] => {
            let signal = if parts[0] == "kill" { "-KILL" } else { "-STOP" };
            Ok(Some((signal.into(), rank.parse()?, step.parse()?)))
        }
        _ => Err(format!("break: {text}; kill:RANK:STEP and freeze:RANK:STEP are supported").into()),
    }
}

impl Job {
    fn parse(mut asked: Asked) -> Result<Job, Failure> {
        let transport = asked.text("transport", "threads");
        if !["threads", "mpi"].contains(&transport.as_str()) {
            return Err(format!("transport: {transport}; threads and mpi are supported").into());
        }
        let (tokens, documents) = (asked.number("tokens", 1024)?, asked.number("documents", 1)?.max(1));
        let window = asked.number("window", 0)?;
        let mask = if window > 0 { Mask::window(window) } else { Mask::CAUSAL };
        // Lengths in ratios 1 : 2 : 3 …, the rest in the last one.
        let unit = tokens / (documents * (documents + 1) / 2);
        let mut lengths: Vec<usize> = (1..documents).map(|i| i * unit).collect();
        lengths.push(tokens - lengths.iter().sum::<usize>());
        let (heads, kv_heads) = (asked.number("heads", 4)?, asked.number("kv_heads", 2)?);
        let job = Job {
            mpi: transport == "mpi",
            ranks: asked.number("ranks", 4)?,
            heads: HeadShape::new(heads, kv_heads, asked.number("head_dim", 64)?),
            mask: MaskSlices::packed(mask, &lengths)?,
            layout: layout(&asked.text("layout", "zigzag"))?,
            scheme: scheme(&asked.text("scheme", "ring"))?,
            invariant_block: NonZeroUsize::new(asked.number("invariant_block", 0)?),
            repeats: asked.number("repeats", 1)?.max(1),
            timeout: Duration::from_millis(asked.number("timeout_ms", 60_000)? as u64),
            broken: broken(&asked.text("break", ""))?,
            print_plan: asked.number("print_plan", 0)? > 0,
            forecast: asked.number("forecast", 0)? > 0,
        };
        match asked.0.into_keys().next() {
            None => Ok(job),
            Some(key) => Err(format!("{key}: unknown; keys: {KEYS}").into()),
        }
    }

    fn plan(&self, pass: Pass, cp_size: usize) -> Result<Checked, Failure> {
        let (heads, mask, layout, invariant_block) =
            (self.heads, &self.mask, self.layout, self.invariant_block);
        let scheme = if cp_size == 1 { Scheme::Ring } else { self.scheme };
        let request = Request { heads, mask, layout, cp_size, scheme, pass, invariant_block };
        Ok(check(ParallelPlan::new(&request)?)?)
    }

    /// Rows of a rank: the same numbers in every process.
    fn inputs(&self, plan: &ParallelPlan, rank: usize, forward: Option<&Outputs>) -> Inputs {
        let rows = |seed: u64, heads: usize| -> Vec<f32> {
            let width = heads * self.heads.head_dim_qk;
            let number = |at: usize| {
                let mut x = (seed << 48 | at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                ((x ^ (x >> 27)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            };
            plan.shards.positions(rank).flat_map(|p| (p * width..(p + 1) * width).map(number)).collect()
        };
        let (q, kv) = (self.heads.num_q_heads, self.heads.num_kv_heads);
        let base = Inputs { q: rows(1, q), k: rows(2, kv), v: rows(3, kv), ..Inputs::default() };
        match forward {
            None => base,
            Some(x) => Inputs { out: x.out.clone(), lse: x.lse.clone(), d_out: rows(4, q), ..base },
        }
    }

    fn options(&self) -> Options {
        let broken = self.broken.clone();
        let observer = broken.map(|(signal, lost, at)| -> Arc<dyn Fn(usize, usize) + Send + Sync> {
            Arc::new(move |rank, step| {
                if (rank, step) == (lost, at) {
                    let own = std::process::id().to_string();
                    // The shell's kill: a signal to this process, from outside of its own code.
                    let _ = std::process::Command::new("kill").args([&signal, &own]).status();
                    std::thread::sleep(Duration::from_secs(3600));
                }
            })
        });
        Options { timeout: self.timeout, observer, ..Options::default() }
    }
}

/// Greatest difference to one rank's rows, over the greatest number there.
fn difference(got: &[f32], want: &[f32]) -> f64 {
    let size = want.iter().fold(0.0f32, |m, x| m.max(x.abs())).max(f32::MIN_POSITIVE);
    let most = got.iter().zip(want).fold(0.0f32, |m, (a, b)| if a == b { m } else { m.max((a - b).abs()) });
    f64::from(most / size)
}

/// Results of both passes.
type Both = (Outputs, Outputs);

/// Compares a rank's rows with those of one rank alone, which this process computes, too; returns the greatest difference.
fn compare(job: &Job, plan: &ParallelPlan, rank: usize, (forward, backward): &Both) -> Result<f64, Failure> {
    let (one, options) = (job.plan(Pass::Forward, 1)?, Options::default());
    let run = |plan: &Checked, input| -> Result<Outputs, Failure> {
        Ok(run_threads(plan, &Attention::default(), vec![input], &options)?.remove(0)?)
    };
    let whole = run(&one, job.inputs(one.plan(), 0, None))?;
    let input = job.inputs(one.plan(), 0, Some(&whole));
    let gradients = run(&job.plan(Pass::Backward, 1)?, input)?;
    let h = job.heads;
    let (q, kv) = (h.num_q_heads, h.num_kv_heads);
    let pairs = [
        (&forward.out, &whole.out, q * h.head_dim_v),
        (&forward.lse, &whole.lse, q),
        (&backward.dq, &gradients.dq, q * h.head_dim_qk),
        (&backward.dk, &gradients.dk, kv * h.head_dim_qk),
        (&backward.dv, &gradients.dv, kv * h.head_dim_v),
    ];
    let mut most: f64 = 0.0;
    for (got, whole, width) in pairs {
        let want = plan.shards.scatter(rank, whole, width);
        most = most.max(difference(got, &want));
        if job.invariant_block.is_some() && *got != want {
            return Err(format!("rank {rank}: other bits than one rank, in N-invariant mode").into());
        }
    }
    if most > 1e-4 { Err(format!("rank {rank}: {most:e} away from one rank").into()) } else { Ok(most) }
}

/// One line in one write: other processes write to the same place.
fn say(what: &dyn std::fmt::Display) {
    let _ = std::io::stderr().write_all(format!("{what}\n").as_bytes());
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// One line a rank and pass: where the time went, and how much of the messages' time alone is hidden behind the kernels.
fn report(rank: usize, pass: &str, runs: &[Outputs], alone: &[Outputs]) {
    let of = |runs: &[Outputs], f: fn(&Outputs) -> Duration| median(runs.iter().map(f).collect());
    let (exposed, messages) = (of(runs, |x| x.times.wait), of(alone, |x| x.times.wait));
    let hidden = if messages > 0.0 { (1.0 - exposed / messages).max(0.0) } else { 1.0 };
    println!(
        "rank {rank} {pass}: all {:.0} us, work {:.0} us, carry {:.0} us, exposed {exposed:.0} us, messages alone {messages:.0} us, hidden {hidden:.2}, sent {} bytes, {} pairs",
        of(runs, |x| x.times.all),
        of(runs, |x| x.times.work),
        of(runs, |x| x.times.carry),
        runs[0].sent_bytes,
        runs[0].pairs
    );
}

/// Runs a pass on threads: `[repeat][rank]`.
fn on_threads(
    job: &Job,
    plan: &Checked,
    inputs: &[Inputs],
    alone: bool,
) -> Result<Vec<Vec<Outputs>>, Failure> {
    let options = Options { messages_only: alone, ..job.options() };
    let mut all = Vec::new();
    for _ in 0..job.repeats {
        let mut ended = Vec::new();
        for report in run_threads(plan, &Attention::default(), inputs.to_vec(), &options)? {
            match report {
                Ok(outputs) => ended.push(outputs),
                Err(fault) => say(&fault),
            }
        }
        if ended.len() < job.ranks {
            return Err("a rank was lost".into());
        }
        all.push(ended);
    }
    Ok(all)
}

fn threads(job: &Job) -> Result<(), Failure> {
    let (forward, backward) = (job.plan(Pass::Forward, job.ranks)?, job.plan(Pass::Backward, job.ranks)?);
    if job.print_plan {
        println!("{}{}", forward.plan(), backward.plan());
    }
    let inputs: Vec<_> = (0..job.ranks).map(|r| job.inputs(forward.plan(), r, None)).collect();
    let (first, alone) =
        (on_threads(job, &forward, &inputs, false)?, on_threads(job, &forward, &inputs, true)?);
    let inputs: Vec<_> = (0..job.ranks).map(|r| job.inputs(forward.plan(), r, Some(&first[0][r]))).collect();
    let (second, alone2) =
        (on_threads(job, &backward, &inputs, false)?, on_threads(job, &backward, &inputs, true)?);
    for rank in 0..job.ranks {
        let of = |runs: &[Vec<Outputs>]| runs.iter().map(|r| r[rank].clone()).collect::<Vec<_>>();
        report(rank, "forward", &of(&first), &of(&alone));
        report(rank, "backward", &of(&second), &of(&alone2));
        let both = (first[0][rank].clone(), second[0][rank].clone());
        println!("rank {rank}: right, {:.1e} from one rank", compare(job, forward.plan(), rank, &both)?);
    }
    Ok(())
}

#[cfg(feature = "mpi")]
mod under_mpi {
    use suanpan_parallel::launch::Launch;
    use suanpan_parallel::mpi::{Mpi, supervise};
    use suanpan_parallel::{Fault, Times, Transport, run_rank};

    use super::forecast::{Runner, forecast, given};

    use super::*;

    /// A rank's repeats of one pass.
    fn repeat(
        job: &Job,
        mpi: &mut Mpi,
        plan: &Checked,
        input: &Inputs,
        alone: bool,
    ) -> Result<Vec<Outputs>, Failure> {
        let options = Options { messages_only: alone, ..job.options() };
        let rank = mpi.rank();
        let run = |_| Ok(run_rank(plan, &Attention::default(), input.clone(), (mpi, rank), &options)??);
        (0..job.repeats).map(run).collect()
    }

    impl Runner for Mpi {
        fn ranks(&self) -> usize {
            self.size()
        }

        fn prints(&self) -> bool {
            self.rank() == 0
        }

        fn run(&mut self, job: &Job, plan: &Checked, messages_only: bool) -> Result<Vec<Times>, Failure> {
            let (rank, options) = (self.rank(), Options { messages_only, ..Options::default() });
            let input = job.inputs(plan.plan(), rank, given(plan, rank).as_ref());
            let own = run_rank(plan, &Attention::default(), input, (self, rank), &options)??.times;
            // Rank 0 hears all.
            self.begin(0)?;
            let all = [own.work, own.wait, own.carry, own.all].map(|t| t.as_secs_f32() * 1e6);
            let mut times = vec![own];
            if rank > 0 {
                self.send(0, all.to_vec())?;
                self.sent()?;
            } else {
                (1..self.size()).try_for_each(|peer| self.expect(peer, all.len()))?;
                for peer in 1..self.size() {
                    let of = |us: f32| Duration::from_secs_f32(us * 1e-6);
                    let x = self.recv(peer)?;
                    times.push(Times { work: of(x[0]), wait: of(x[1]), carry: of(x[2]), all: of(x[3]) });
                }
            }
            self.meet()?;
            Ok(times)
        }

        fn meet(&mut self) -> Result<(), Failure> {
            Ok(self.finish(0)?)
        }
    }

    fn passes(job: &Job, mpi: &mut Mpi) -> Result<(), Failure> {
        if job.forecast {
            return forecast(mpi, job, true);
        }
        let (rank, size) = (mpi.rank(), mpi.size());
        let (forward, backward) = (job.plan(Pass::Forward, size)?, job.plan(Pass::Backward, size)?);
        if job.print_plan && rank == 0 {
            println!("{}{}", forward.plan(), backward.plan());
        }
        let input = job.inputs(forward.plan(), rank, None);
        let first = repeat(job, mpi, &forward, &input, false)?;
        let alone = repeat(job, mpi, &forward, &input, true)?;
        let input = job.inputs(forward.plan(), rank, Some(&first[0]));
        let second = repeat(job, mpi, &backward, &input, false)?;
        let alone2 = repeat(job, mpi, &backward, &input, true)?;
        report(rank, "forward", &first, &alone);
        report(rank, "backward", &second, &alone2);
        let both = (first[0].clone(), second[0].clone());
        println!("rank {rank}: right, {:.1e} from one rank", compare(job, forward.plan(), rank, &both)?);
        Ok(())
    }

    /// Runs this process's rank. A fault ends the whole job, after all others have reported it, too.
    pub fn run(job: &Job) -> Result<(), Failure> {
        if let Some(status) = supervise(4 * job.timeout)? {
            std::process::exit(status);
        }
        let mut mpi = Mpi::start(&Launch::from_env()?, job.timeout)?;
        let Err(failure) = passes(job, &mut mpi) else { return Ok(()) };
        say(&failure);
        mpi.leave(if failure.is::<Fault>() { 3 } else { 1 })
    }
}

fn run() -> Result<(), Failure> {
    let job = Job::parse(Asked::parse(std::env::args().skip(1))?)?;
    if !job.mpi && job.forecast {
        return forecast::forecast(&mut forecast::Threads(job.ranks), &job, false);
    }
    if !job.mpi {
        return threads(&job);
    }
    #[cfg(feature = "mpi")]
    return under_mpi::run(&job);
    #[cfg(not(feature = "mpi"))]
    Err("transport: mpi; this build has no feature mpi".into())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            say(&failure);
            ExitCode::FAILURE
        }
    }
}
