//! One backward call: check everything, row constants first, then key tiles through one counter, then the books.

use std::sync::atomic::Ordering;

use suanpan_base::{BadArgument, Buf, BufMut};
use suanpan_ledger::{BackwardBooks, kernel};

use super::plan::BackwardPlan;
use super::workspace::BackwardWorkspace;
use crate::cpu::backward::task::Call;
use crate::cpu::task::Queue;
use crate::extras::Extras;
use crate::run::{Strides, on_workers};

/// The buffers of one call. Sequences are packed one after another, in schedule order; strides are in elements, (token, head) but for
/// keys and values, and elements of a row are contiguous.
///
/// Over pages, k, v, dk and dv each have page strides and share one page table. Every page that holds a key of a sequence is read and
/// written, so no page may stand twice in the table: gradients of a shared prefix are the sum of its users', which no order decides.
#[derive(Debug)]
pub struct BackwardArgs<'a> {
    /// Queries `[total_q, num_q_heads, head_dim_qk]`.
    pub q: Buf<'a>,
    /// Strides of `q`.
    pub q_strides: (usize, usize),
    /// Keys `[total_k, num_kv_heads, head_dim_qk]`.
    pub k: Buf<'a>,
    /// Strides of `k`.
    pub k_strides: Strides,
    /// Values `[total_k, num_kv_heads, head_dim_v]`.
    pub v: Buf<'a>,
    /// Strides of `v`.
    pub v_strides: Strides,
    /// Page ids, one row a sequence; empty when contiguous.
    pub page_table: &'a [u32],
    /// Ids from one row of `page_table` to the next, and the most a row holds.
    pub page_table_stride: usize,
    /// The forward's output `[total_q, num_q_heads, head_dim_v]`, of q's element type.
    pub out: Buf<'a>,
    /// Strides of `out`.
    pub out_strides: (usize, usize),
    /// The forward's lse `[num_q_heads, total_q]`, natural log; -inf where a row sees no key.
    pub lse: &'a [f32],
    /// Gradient of the loss with respect to `out`, of its shape and element type.
    pub d_out: Buf<'a>,
    /// Strides of `d_out`.
    pub d_out_strides: (usize, usize),
    /// Gradient of the loss with respect to `lse`, of its shape; `None` = the loss does not look at lse.
    pub d_lse: Option<&'a [f32]>,
    /// What the problem asks for beside q, k and v: the forward's.
    pub extras: Extras<'a>,
    /// `[num_q_heads]`: gradient with respect to the sinks of `extras`, written; `None` = not wanted.
    pub d_sinks: Option<&'a mut [f32]>,
    /// Gradient with respect to the bias of `extras`, under its strides, summed over what it is broadcast to; wanted when the plan says so
    /// ([`BackwardPlan::with_d_bias`]). Numbers of pairs that nobody sees are 0; elements beside the lengths stay as they are.
    pub d_bias: Option<&'a mut [f32]>,
    /// Gradient with respect to `q`, of its shape and element type. Every row is written; zeros where a row sees no key.
    pub dq: BufMut<'a>,
    /// Strides of `dq`; rows must not overlap.
    pub dq_strides: (usize, usize),
    /// Gradient with respect to `k`, of its shape and element type, summed over the query heads of a group.
    pub dk: BufMut<'a>,
    /// Strides of `dk`; rows must not overlap.
    pub dk_strides: Strides,
    /// Gradient with respect to `v`, of its shape and element type, summed over the query heads of a group.
    pub dv: BufMut<'a>,
    /// Strides of `dv`; rows must not overlap.
    pub dv_strides: Strides,
}

/// Runs the plan's current schedule. Adds to `books[i]` what was counted for sequence `i`.
///
/// Call it from inside a rayon pool. Allocates nothing. A refused call has touched neither a gradient nor `books`. Bits of a sequence's
/// gradients depend on its own data and the instruction set only: not on threads, on the batch or on the run.
pub fn run_backward(
    plan: &BackwardPlan,
    args: BackwardArgs<'_>,
    ws: &mut BackwardWorkspace,
    books: &mut [BackwardBooks],
) -> Result<(), BadArgument> {
    super::check::check(plan, &args, ws, books)?;
    super::pages::check(plan, &args, ws)?;
    let (mut args, mut none) = (args, []);
    let d_sinks = args.d_sinks.take().unwrap_or(&mut none);
    let call = Call::new(plan, args, ws);
    let kv_heads = plan.problem.heads.num_kv_heads;
    // SAFETY: `check` passed; each tile is taken once.
    for_each(plan, plan.tiles.len() * kv_heads, |at, _| unsafe {
        call.prepare(at / kv_heads, at % kv_heads)
    });
    d_sinks.iter_mut().enumerate().for_each(|(head, d)| *d = call.d_sink(head));
    // SAFETY: `check` passed; rows are prepared; each unit is taken once, in order, and each worker index has a slot of its own.
    for_each(plan, plan.units.len(), |at, worker| unsafe { call.run_unit(at, worker) });
    // SAFETY: `check` passed and found elements of d_bias apart; rows are prepared; each part is taken once.
    for_each(plan, call.bias_parts(), |at, worker| unsafe { call.run_bias(at, worker) });
    let (heads, p) = (plan.problem.heads, &plan.problem);
    let per_key = kernel::kv_write_bytes(heads, 1, p.kv_dtype) / kv_heads as u64;
    let per_row = p.q_dtype.bytes_of(heads.head_dim_qk + heads.head_dim_v) as u64;
    for (book, counted) in books.iter_mut().zip(call.counters) {
        let pairs = counted.pairs.load(Ordering::Relaxed);
        let again = counted.bias_pairs.load(Ordering::Relaxed);
        *book += BackwardBooks {
            pairs,
            flops: kernel::backward_flops(pairs, heads) + kernel::forward_flops(again, heads),
            kv_read_bytes: counted.keys.load(Ordering::Relaxed) * per_key,
            q_read_bytes: counted.rows.load(Ordering::Relaxed) * per_row,
        };
    }
    Ok(())
}

/// Hands `0 .. count` to the plan's threads through one counter; the work gets (item, worker).
fn for_each(plan: &BackwardPlan, count: usize, work: impl Fn(usize, usize) + Sync + Send) {
    let queue = Queue::new(count);
    on_workers(plan.machine.threads().min(count), |worker| {
        while let Some(at) = queue.take() {
            work(at, worker);
        }
    });
}
