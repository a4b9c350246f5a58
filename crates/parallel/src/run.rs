//! Runs a checked plan with one thread a rank, and returns what every rank has, or whom it lost, within the deadline.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use suanpan_base::BadArgument;

use crate::check::Checked;
use crate::kernel::{Attention, Inputs, Memory, Outputs, interleave, split};
use crate::plan::{OP, ParallelPlan, Pass, Step, own};
use crate::transport::{Board, Fault};

/// Called by a rank's thread before each of its steps, with (rank, step): to watch a run, or to break it in a test.
pub type Observer = Arc<dyn Fn(usize, usize) + Send + Sync>;

/// How a run waits.
#[derive(Clone)]
pub struct Options {
    /// Deadline of every wait. A rank that computes longer than this in one step counts as frozen.
    pub timeout: Duration,
    /// Sees every step begin.
    pub observer: Option<Observer>,
}

impl Default for Options {
    fn default() -> Options {
        Options { timeout: Duration::from_secs(60), observer: None }
    }
}

fn check_inputs(plan: &ParallelPlan, inputs: &[Inputs]) -> Result<(), BadArgument> {
    if inputs.len() != plan.ranks.len() {
        return Err(BadArgument::new(
            OP,
            "inputs",
            inputs.len(),
            format!("one a rank: {}", plan.ranks.len()),
        ));
    }
    let h = plan.heads;
    let backward = plan.pass == Pass::Backward;
    for (rank, x) in inputs.iter().enumerate() {
        let (q, kv) = (plan.shards.tokens(rank) * h.num_q_heads, plan.shards.tokens(rank) * h.num_kv_heads);
        let there = |n: usize| if backward { n } else { 0 };
        for (field, have, want) in [
            ("q", x.q.len(), q * h.head_dim_qk),
            ("k", x.k.len(), kv * h.head_dim_qk),
            ("v", x.v.len(), kv * h.head_dim_v),
            ("out", x.out.len(), there(q * h.head_dim_v)),
            ("lse", x.lse.len(), there(q)),
            ("d_out", x.d_out.len(), there(q * h.head_dim_v)),
        ] {
            if have != want {
                let field = format!("inputs[{rank}].{field} length");
                return Err(BadArgument::new(OP, field, have, format!("{want}, as planned")));
            }
        }
    }
    Ok(())
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
    let board = Arc::new(Board::new(plan.ranks.len(), options.timeout));
    for (rank, input) in inputs.into_iter().enumerate() {
        let (plan, board, attention) = (plan.clone(), board.clone(), *attention);
        let observer = options.observer.clone();
        let own_board = board.clone();
        let body = move || {
            let run = || rank_main(&plan, &board, rank, &attention, input, observer.as_ref());
            match catch_unwind(AssertUnwindSafe(run)) {
                Ok(report) => board.report(rank, report),
                Err(_) => board.died(rank),
            }
        };
        if std::thread::Builder::new().name(format!("rank {rank}")).spawn(body).is_err() {
            own_board.died(rank);
        }
    }
    Ok(board.reports())
}

fn rank_main(
    plan: &ParallelPlan,
    board: &Board<Outputs>,
    rank: usize,
    attention: &Attention,
    input: Inputs,
    observer: Option<&Observer>,
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
    let mut memory = Memory::new(plan, rank, attention, [q, kv]).expect("checked");
    let mut sent_bytes = 0;
    for (t, step) in plan.ranks[rank].steps.iter().enumerate() {
        if let Some(observer) = observer {
            observer(rank, t);
        }
        board.begin(rank, t)?;
        sent_bytes += run_step(board, rank, &mut memory, step)?;
    }
    board.finish(rank, plan.ranks[rank].steps.len())?;
    let mut outputs = Outputs { pairs: memory.pairs, sent_bytes, ..Outputs::default() };
    match plan.pass {
        Pass::Forward => [outputs.out, outputs.lse] = parts(&memory.result(own::RESULT), [dv, 1]),
        Pass::Backward => {
            outputs.dq = memory.result(own::RESULT);
            [outputs.dk, outputs.dv] = parts(&memory.result(own::D_KV), [dqk, dv]);
        }
    }
    Ok(outputs)
}

fn parts(rows: &[f32], widths: [usize; 2]) -> [Vec<f32>; 2] {
    let mut parts = split(rows, &widths).into_iter();
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

/// One step, in the order of `Step`'s fields; returns the bytes sent.
fn run_step(board: &Board<Outputs>, rank: usize, memory: &mut Memory<'_>, step: &Step) -> Result<u64, Fault> {
    let mut sent = 0;
    step.clears.iter().for_each(|clear| memory.clear(clear));
    for send in &step.sends {
        let message = memory.pack(&send.region);
        sent += size_of_val(message.as_slice()) as u64;
        board.send(rank, send.peer, message);
    }
    step.recvs.iter().for_each(|recv| memory.poison(&recv.region));
    for work in &step.work {
        memory.work(work).expect("checked");
    }
    for recv in &step.recvs {
        let message = board.recv(rank, recv.peer)?;
        memory.unpack(&recv.region, &message);
    }
    step.moves.iter().for_each(|m| memory.shift(m));
    Ok(sent)
}
