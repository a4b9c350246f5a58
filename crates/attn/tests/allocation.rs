//! A scheduled run allocates nothing, whatever the lengths within the limits.

#[path = "common/counting.rs"]
mod counting;
use std::sync::atomic::Ordering;

use counting::ALLOCATIONS;
use suanpan_attn::{Args, Extras, KvScales, Limits, Machine, Plan, Problem, Strides, Workspace, run};
use suanpan_base::{Buf, BufMut, HeadShape, Mask, SeqLen};
use suanpan_ledger::AttnBooks;

#[test]
fn scheduling_and_running_allocate_nothing() {
    let problem = Problem::new(HeadShape::new(4, 2, 64), Mask::CAUSAL);
    let limits = Limits { max_seqs: 8, max_total_q: 600, max_seqlen_k: 3000 };
    let mut plan = Plan::new(&problem, &Machine::detect(2), limits).unwrap();
    let mut ws = Workspace::for_plans(&[&plan]);
    assert!(ws.bytes() >= plan.workspace_bytes());
    let batches: [&[(usize, usize)]; 4] =
        [&[(500, 500), (1, 3000)], &[(1, 2000); 8], &[(64, 64), (20, 900), (4, 3000)], &[(600, 1000)]];
    let (q, kv) = (vec![0.5; 600 * 256], vec![0.25; 16000 * 128]);
    let mut out = vec![0.0; 600 * 256];
    let mut books = [AttnBooks::default(); 8];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let lens: Vec<Vec<SeqLen>> =
        batches.iter().map(|b| b.iter().map(|&(q, k)| SeqLen::new(q, k)).collect()).collect();
    let mut counts = Vec::with_capacity(100);
    pool.install(|| {
        for round in 0..12 {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            for lens in &lens {
                plan.schedule(lens).unwrap();
                let strides = Strides { token: 128, head: 64, page: 0 };
                let args = Args {
                    kv_scales: KvScales::default(),
                    extras: Extras::default(),
                    q: Buf::F32(&q),
                    q_strides: (256, 64),
                    k: Buf::F32(&kv),
                    k_strides: strides,
                    v: Buf::F32(&kv),
                    v_strides: strides,
                    page_table: &[],
                    page_table_stride: 0,
                    out: BufMut::F32(&mut out),
                    out_strides: (256, 64),
                    lse: None,
                    max_scores: None,
                };
                run(&plan, args, &mut ws, &mut books[..lens.len()]).unwrap();
            }
            if round > 0 {
                counts.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
            }
        }
    });
    assert_eq!(counts, [0; 11], "allocations a round of {} calls", batches.len());
}
