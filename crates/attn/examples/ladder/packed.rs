//! Step 5: the crate. Keys are packed into panels that stay in the first-level cache while all rows of a tile stream past, and the inner
//! loop is a register tile of 6 rows × 4 vectors: 24 products for every 10 loads. Blocks that come next are asked for ahead of time.

use suanpan_attn::{Args, Extras, KvScales, Limits, Machine, Plan, Problem, Strides, Workspace, run};
use suanpan_base::{Buf, BufMut, HeadShape, Mask, SeqLen};
use suanpan_ledger::AttnBooks;

use crate::{D, Head};

fn plan(n: usize) -> Plan {
    let problem = Problem::new(HeadShape::new(1, 1, D), Mask::CAUSAL);
    let limits = Limits { max_seqs: 1, max_total_q: n, max_seqlen_k: n };
    let mut plan = Plan::new(&problem, &Machine::detect(1), limits).expect("a supported problem");
    plan.schedule(&[SeqLen::new(n, n)]).expect("within the limits");
    plan
}

/// Floats of scratch: it depends on the tile, not on the length.
pub fn extra_floats() -> usize {
    plan(1 << 20).workspace_bytes() / size_of::<f32>()
}

pub fn attention(h: &Head, out: &mut [f32]) {
    let plan = plan(h.n);
    let mut workspace = Workspace::for_plans(&[&plan]);
    let strides = Strides { token: D, head: D, page: 0 };
    let args = Args {
        kv_scales: KvScales::default(),
        extras: Extras::default(),
        q: Buf::F32(&h.q),
        q_strides: (D, D),
        k: Buf::F32(&h.k),
        k_strides: strides,
        v: Buf::F32(&h.v),
        v_strides: strides,
        page_table: &[],
        page_table_stride: 0,
        out: BufMut::F32(out),
        out_strides: (D, D),
        lse: None,
        max_scores: None,
    };
    run(&plan, args, &mut workspace, &mut [AttnBooks::default()]).expect("a checked call");
}
