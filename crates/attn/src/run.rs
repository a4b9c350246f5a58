//! One call: check everything, hand tasks to the threads through one counter, book what the loops did.

use std::sync::atomic::Ordering;

use rayon::prelude::*;
use suanpan_base::{BadArgument, Buf, BufMut};
use suanpan_ledger::{AttnBooks, kernel};

use crate::cpu::task::{Call, Queue};
use crate::extras::Extras;
use crate::plan::Plan;
use crate::scales::KvScales;
use crate::workspace::Workspace;

/// Distances between neighbours in K or V, in elements. Within a row elements are contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strides {
    /// To the next token (of the same page, when paged).
    pub token: usize,
    /// To the next kv head.
    pub head: usize,
    /// To the next page; unused when contiguous.
    pub page: usize,
}

impl From<(usize, usize)> for Strides {
    /// (token, head) strides, without pages.
    fn from((token, head): (usize, usize)) -> Strides {
        Strides { token, head, page: 0 }
    }
}

/// The buffers of one call. Queries of all sequences are packed in schedule order; so are contiguous keys and values.
#[derive(Debug)]
pub struct Args<'a> {
    /// Queries `[total_q, num_q_heads, head_dim_qk]` under `q_strides`.
    pub q: Buf<'a>,
    /// (token, head) strides of `q`, in elements.
    pub q_strides: (usize, usize),
    /// Keys.
    pub k: Buf<'a>,
    /// Strides of `k`.
    pub k_strides: Strides,
    /// Values; empty where they lie in keys (`HeadShape::values_in_keys`), whose strides and scales are then theirs.
    pub v: Buf<'a>,
    /// Strides of `v`.
    pub v_strides: Strides,
    /// Page ids, one row a sequence; only ids of pages with a visible key are read. Empty when contiguous.
    pub page_table: &'a [u32],
    /// Ids from one row of `page_table` to the next, and the most a row holds.
    pub page_table_stride: usize,
    /// Scales of K and V, as the problem's `kv_scales` says.
    pub kv_scales: KvScales<'a>,
    /// What the problem asks for beside q, k and v.
    pub extras: Extras<'a>,
    /// Output `[total_q, num_q_heads, head_dim_v]` under `out_strides`, of q's element type.
    pub out: BufMut<'a>,
    /// (token, head) strides of `out`, in elements; rows must not overlap.
    pub out_strides: (usize, usize),
    /// `[num_q_heads, total_q]`, natural log; -inf where a row sees no key.
    pub lse: Option<&'a mut [f32]>,
    /// `[num_q_heads]`: the largest score of each head that entered a softmax in this call (after softcap, bias and ALiBi, natural; without
    /// sinks); -inf where nothing was visible. What QK-clip watches (MuonClip, arXiv 2507.20534).
    pub max_scores: Option<&'a mut [f32]>,
}

/// Runs the plan's current schedule. Adds to `books[i]` what was counted for sequence `i`.
///
/// Call it from inside a rayon pool. Allocates nothing. A refused call has touched neither `out` nor `books`.
pub fn run(
    plan: &Plan,
    args: Args<'_>,
    ws: &mut Workspace,
    books: &mut [AttnBooks],
) -> Result<(), BadArgument> {
    let args = crate::check::with_values(plan, args)?;
    crate::check::check(plan, &args, ws, books)?;
    let call = Call::new(plan, args, ws);
    let queue = Queue::new(plan.units.len());
    on_workers(plan.machine.threads().min(plan.units.len()), |worker| {
        let mut task = queue.take();
        while let Some(at) = task {
            // SAFETY: `check` passed; each task index is taken once and each worker index has a slot of its own.
            task = unsafe { call.run_task(at, worker, &queue) };
        }
    });
    let heads = plan.problem.heads;
    let per_key = kernel::kv_write_bytes(heads, 1, plan.problem.kv_dtype) / heads.num_kv_heads as u64;
    let scale_pair = kernel::scale_pair_bytes(heads, plan.problem.kv_scale_dtype.bytes_of(1));
    for (book, counts) in books.iter_mut().zip(call.counts) {
        let [pairs, keys, scales] = counts.each_ref().map(|n| n.load(Ordering::Relaxed));
        *book += AttnBooks {
            pairs,
            flops: kernel::forward_flops(pairs, heads),
            kv_read_bytes: keys * per_key + scales * scale_pair,
            kv_write_bytes: 0,
        };
    }
    Ok(())
}

/// Runs `work` once a worker, on the calling thread where one is enough, and waits for all of them.
pub(crate) fn on_workers(workers: usize, work: impl Fn(usize) + Sync + Send) {
    if workers <= 1 {
        work(0);
    } else {
        (0..workers).into_par_iter().with_max_len(1).for_each(work);
    }
}
