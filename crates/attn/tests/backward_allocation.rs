//! A scheduled backward run allocates nothing, whatever the lengths within the limits.

#[path = "common/counting.rs"]
mod counting;
use std::sync::atomic::Ordering;

use counting::ALLOCATIONS;
use half::bf16;
use suanpan_attn::{
    BackwardArgs, BackwardPlan, BackwardWorkspace, Extras, Limits, Machine, Problem, run_backward,
};
use suanpan_base::{Buf, BufMut, DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::BackwardBooks;

#[test]
fn scheduling_and_running_a_backward_allocate_nothing() {
    let problem = Problem { q_dtype: DType::Bf16, ..Problem::new(HeadShape::new(4, 2, 64), Mask::CAUSAL) };
    let limits = Limits { max_seqs: 8, max_total_q: 600, max_seqlen_k: 1000 };
    let mut plan = BackwardPlan::new(&problem, &Machine::detect(2), limits).unwrap();
    let mut ws = BackwardWorkspace::for_plans(&[&plan]);
    let batches: [&[(usize, usize)]; 4] =
        [&[(500, 500), (1, 1000)], &[(1, 900); 8], &[(64, 64), (20, 900), (4, 1000)], &[(600, 1000)]];
    let lens: Vec<Vec<SeqLen>> =
        batches.iter().map(|b| b.iter().map(|&(q, k)| SeqLen::new(q, k)).collect()).collect();
    let (q, kv) = (vec![bf16::ONE; 600 * 256], vec![0.25; 8000 * 128]);
    let (mut dq, mut dk, mut dv) = (vec![bf16::ONE; 600 * 256], kv.clone(), kv.clone());
    let (lse, mut books) = (vec![4.0; 600 * 4], [BackwardBooks::default(); 8]);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let mut counts = Vec::with_capacity(100);
    pool.install(|| {
        for round in 0..12 {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            for lens in &lens {
                plan.schedule(lens).unwrap();
                let rows: usize = lens.iter().map(|l| l.seqlen_q).sum();
                let args = BackwardArgs {
                    extras: Extras::default(),
                    d_sinks: None,
                    d_bias: None,
                    q: Buf::Bf16(&q),
                    q_strides: (256, 64),
                    k: Buf::F32(&kv),
                    k_strides: (128, 64).into(),
                    v: Buf::F32(&kv),
                    v_strides: (128, 64).into(),
                    page_table: &[],
                    page_table_stride: 0,
                    out: Buf::Bf16(&q),
                    out_strides: (256, 64),
                    lse: &lse[..rows * 4],
                    d_out: Buf::Bf16(&q),
                    d_out_strides: (256, 64),
                    d_lse: None,
                    dq: BufMut::Bf16(&mut dq),
                    dq_strides: (256, 64),
                    dk: BufMut::F32(&mut dk),
                    dk_strides: (128, 64).into(),
                    dv: BufMut::F32(&mut dv),
                    dv_strides: (128, 64).into(),
                };
                run_backward(&plan, args, &mut ws, &mut books[..lens.len()]).unwrap();
            }
            if round > 0 {
                counts.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
            }
        }
    });
    assert_eq!(counts, [0; 11], "allocations a round of {} calls", batches.len());
}
