//! Runs a checked plan with one thread a rank, and returns what every rank has, or whom it lost, within the deadline.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use suanpan_base::{BadArgument, lse};

use crate::attention::{Attention, Inputs, Outputs, interleave, split};
use crate::check::Checked;
use crate::kernel::Worker;
use crate::plan::{OP, ParallelPlan, Pass, Step, Work, own};
use crate::threads::{Board, Thread};
use crate::transport::{Fault, Transport};

/// Called by a rank's thread before each of its steps, with (rank, step): to watch a run, or to break it in a test.
pub type Observer = Arc<dyn Fn(usize, usize) + Send + Sync>;

/// How a run waits.
#[derive(Clone)]
pub struct Options {
    /// Deadline of every wait. A rank that computes longer than this in one step counts as frozen.
    pub timeout: Duration,
    /// Sees every step begin.
    pub observer: Option<Observer>,
    /// Kernels are skipped: how long messages alone take. Results mean nothing.
    pub messages_only: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { timeout: Duration::from_secs(60), observer: None, messages_only: false }
    }
}

fn check_inputs(plan: &ParallelPlan, inputs: &[Inputs]) -> Result<(), BadArgument> {
    if inputs.len() != plan.ranks.len() {
        let supported = format!("one a rank: {}", plan.ranks.len());
        return Err(BadArgument::new(OP, "inputs", inputs.len(), supported));
    }
    inputs.iter().enumerate().try_for_each(|(rank, input)| input.check(plan, rank))
}

/// Runs every rank in a thread of its own. The outer error is a refusal, before anything started; the inner ones say, for each rank, who was
/// lost where. A rank that never comes back is left to itself: its thread owns all it can touch, and ends at its next step.
pub fn run_threads(
    checked: &Checked,
    attention: &Attention,
    inputs: Vec<Inputs>,
    options: &Options,
) -> Result<Vec<Result<Outputs, Fault>>, BadArgument> {
    let plan = checked.plan();
    check_inputs(plan, &inputs)?;
    attention.check(plan)?;
    let shared = Arc::new((plan.clone(), attention.clone(), options.clone()));
    let body = move |input: Inputs, mut end: Thread<Outputs>| {
        let ((plan, attention, options), rank) = (&*shared, end.rank);
        rank_main(plan, &mut end, rank, attention, input, options)
    };
    Ok(on_threads(inputs, options.timeout, body))
}

/// Runs `body` for each rank, in a thread of its own with its input; returns every rank's report.
pub(crate) fn on_threads<I: Send + 'static, R: Send + 'static>(
    inputs: Vec<I>,
    timeout: Duration,
    body: impl Fn(I, Thread<R>) -> Result<R, Fault> + Send + Sync + 'static,
) -> Vec<Result<R, Fault>> {
    let (board, body) = (Arc::new(Board::new(inputs.len(), timeout)), Arc::new(body));
    for (rank, input) in inputs.into_iter().enumerate() {
        let (board, own_board, body) = (board.clone(), board.clone(), body.clone());
        let run = move || {
            let end = Thread { board: board.clone(), rank };
            match catch_unwind(AssertUnwindSafe(|| body(input, end))) {
                Ok(report) => board.report(rank, report),
                Err(_) => board.died(rank),
            }
        };
        if std::thread::Builder::new().name(format!("rank {rank}")).spawn(run).is_err() {
            own_board.died(rank);
        }
    }
    board.reports()
}

/// Runs rank `rank` of a checked plan over a transport, in this thread. The outer error is a refusal, before anything is sent; the inner one
/// says who was lost where. `Options::timeout` is the transport's own business.
pub fn run_rank<T: Transport<Message = Vec<f32>>>(
    checked: &Checked,
    attention: &Attention,
    input: Inputs,
    (transport, rank): (&mut T, usize),
    options: &Options,
) -> Result<Result<Outputs, Fault>, BadArgument> {
    let plan = checked.plan();
    if rank >= plan.ranks.len() {
        return Err(BadArgument::new(OP, "rank", rank, format!("below {}", plan.ranks.len())));
    }
    input.check(plan, rank)?;
    attention.check(plan)?;
    let sends = plan.ranks[rank].steps.iter().flat_map(|s| &s.sends);
    if let Some(most) = sends.map(|s| plan.message_len(rank, &s.region)).max().filter(|n| *n > T::MAX_NUMBERS)
    {
        return Err(BadArgument::new(
            OP,
            "message length",
            most,
            format!("at most {} numbers", T::MAX_NUMBERS),
        ));
    }
    Ok(rank_main(plan, transport, rank, attention, input, options))
}

fn rank_main<T: Transport<Message = Vec<f32>>>(
    plan: &ParallelPlan,
    transport: &mut T,
    rank: usize,
    attention: &Attention,
    input: Inputs,
    options: &Options,
) -> Result<Outputs, Fault> {
    let (dqk, dv) = (plan.heads.head_dim_qk, plan.heads.head_dim_v);
    let q = match plan.pass {
        Pass::Forward => input.q,
        Pass::Backward => {
            interleave(&[(&input.q, dqk), (&input.out, dv), (&input.d_out, dv), (&input.lse, 1)])
        }
    };
    let kv = interleave(&[(&input.k, dqk), (&input.v, dv)]);
    // `Attention::check` and the checker passed: a refusal here is our own fault, and ends the rank as one.
    let mut worker = Worker::new(plan, rank, attention, [q, kv]).expect("checked");
    let mut outputs = Outputs { buffer_bytes: worker.memory.bytes(), ..Outputs::default() };
    let started = Instant::now();
    for (t, step) in plan.ranks[rank].steps.iter().enumerate() {
        if let Some(observer) = &options.observer {
            observer(rank, t);
        }
        transport.begin(t)?;
        let work = if options.messages_only { &[] } else { &step.work[..] };
        run_step(transport, (plan, rank), &mut worker, (step, work), &mut outputs)?;
    }
    outputs.times.all = started.elapsed();
    transport.finish(plan.ranks[rank].steps.len())?;
    outputs.pairs = worker.pairs;
    let result = worker.memory.result(own::RESULT);
    match plan.pass {
        Pass::Forward => {
            [outputs.out, outputs.lse] = split(&result, [dv, 1]);
            join_sinks(attention, plan, &mut outputs);
        }
        Pass::Backward => {
            outputs.dq = result;
            [outputs.dk, outputs.dv] = split(&worker.memory.result(own::D_KV), [dqk, dv]);
            outputs.d_sinks = d_sinks(attention, plan, [&input.out, &input.d_out, &input.lse]);
        }
    }
    Ok(outputs)
}

/// Sinks join every row after its last merge.
fn join_sinks(attention: &Attention, plan: &ParallelPlan, outputs: &mut Outputs) {
    let Some(sinks) = &attention.sinks else { return };
    let rows = outputs.out.chunks_exact_mut(plan.heads.head_dim_v).zip(&mut outputs.lse);
    for ((out, lse), &sink) in rows.zip(sinks.iter().cycle()) {
        lse::join_sink(out, lse, sink);
    }
}

/// The rank's part of the sinks' gradient: minus the sum of the sinks' weights times D over its rows.
fn d_sinks(attention: &Attention, plan: &ParallelPlan, [out, d_out, lse]: [&[f32]; 3]) -> Vec<f32> {
    let Some(sinks) = &attention.sinks else { return Vec::new() };
    let (dv, mut sums) = (plan.heads.head_dim_v, vec![0f64; sinks.len()]);
    for (row, (out, d_out)) in out.chunks_exact(dv).zip(d_out.chunks_exact(dv)).enumerate() {
        let (head, sink) = (row % sinks.len(), f64::from(sinks[row % sinks.len()]));
        let delta: f64 = out.iter().zip(d_out).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        if sink > f64::NEG_INFINITY {
            sums[head] -= (sink - f64::from(lse[row])).exp() * delta;
        }
    }
    sums.into_iter().map(|x| x as f32).collect()
}

/// One step, in the order of `Step`'s fields.
fn run_step<T: Transport<Message = Vec<f32>>>(
    transport: &mut T,
    (plan, rank): (&ParallelPlan, usize),
    worker: &mut Worker<'_>,
    (step, work): (&Step, &[Work]),
    outputs: &mut Outputs,
) -> Result<(), Fault> {
    let times = &mut outputs.times;
    let begun = Instant::now();
    step.clears.iter().for_each(|clear| worker.memory.clear(clear));
    for recv in &step.recvs {
        worker.memory.poison(&recv.region);
        transport.expect(recv.peer, plan.message_len(rank, &recv.region))?;
    }
    for send in &step.sends {
        let message = worker.memory.pack(&send.region);
        outputs.sent_bytes += size_of_val(message.as_slice()) as u64;
        transport.send(send.peer, message)?;
    }
    let posted = Instant::now();
    times.carry += posted - begun;
    transport.progress();
    for work in work {
        worker.work(work).expect("checked");
        transport.progress();
    }
    times.work += posted.elapsed();
    for recv in &step.recvs {
        let asked = Instant::now();
        let message = transport.recv(recv.peer)?;
        let arrived = Instant::now();
        worker.memory.unpack(&recv.region, &message);
        times.wait += arrived - asked;
        times.carry += arrived.elapsed();
    }
    let asked = Instant::now();
    transport.sent()?;
    let left = Instant::now();
    step.moves.iter().for_each(|m| worker.memory.shift(m));
    times.wait += left - asked;
    times.carry += left.elapsed();
    Ok(())
}
