//! Decode: page sizes, head dims, GQA, several query tokens, ragged and empty sequences, quantised caches, scores, poison, replay.
use crate::Report;
use crate::decode_cache::{Cache, Case, Extras, upload};
use suanpan_cuda::Error;
use suanpan_cuda::attention::decode::{KvType, Plan};
use suanpan_cuda::driver::{Gpu, call};
use suanpan_cuda::testing::graph_of;

const RAGGED: [usize; 9] = [1, 15, 64, 65, 0, 1000, 4099, 300, 128];
const HEADS: [(usize, usize, usize); 4] = [(8, 2, 1), (16, 1, 1), (4, 4, 3), (16, 2, 8)];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dim in [64, 128, 256] {
        for page_size in [16, 48, 64, 256] {
            for (num_q_heads, num_kv_heads, seqlen_q) in HEADS {
                let lens = RAGGED.to_vec();
                cases.push(Case {
                    dim,
                    num_q_heads,
                    num_kv_heads,
                    seqlen_q,
                    page_size,
                    lens,
                    ..Case::default()
                });
            }
        }
        let of = |lens: Vec<usize>| Case { dim, lens, ..Case::default() };
        cases.extend([of(vec![40_000]), of(vec![300; 150]), of(vec![0, 0, 5]), of(vec![0; 3])]);
        cases.push(Case { num_q_heads: 16, num_kv_heads: 1, ..of(vec![30_000, 7, 20_011]) });
    }
    cases
}

fn quantised_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kv in [KvType::E4m3, KvType::Int8, KvType::Int4] {
        for dim in [64, 128, 256] {
            for (n, (num_q_heads, num_kv_heads, seqlen_q)) in HEADS.into_iter().enumerate() {
                let page_size = [16, 48, 64, 256][n];
                let base =
                    Case { dim, num_q_heads, num_kv_heads, seqlen_q, page_size, kv, ..Case::default() };
                cases.push(Case { lens: RAGGED.to_vec(), ..base.clone() });
                cases.push(Case { lens: vec![20_000, 33], scale_a_head: true, ..base });
            }
        }
    }
    cases
}

fn score_cases() -> Vec<Case> {
    let none = Extras::default();
    let all = Extras { softcap: Some(3.0), left: Some(99), slopes: true, sinks: true };
    let extras = [
        Extras { softcap: Some(2.0), ..none },
        Extras { left: Some(0), ..none },
        Extras { left: Some(511), ..none },
        Extras { slopes: true, ..none },
        Extras { sinks: true, ..none },
        all,
    ];
    let mut cases = Vec::new();
    for dim in [64, 128, 256] {
        for extras in extras {
            for (num_q_heads, num_kv_heads, seqlen_q) in HEADS {
                let base = Case { dim, num_q_heads, num_kv_heads, seqlen_q, extras, ..Case::default() };
                cases.push(Case { lens: RAGGED.to_vec(), ..base });
            }
        }
        for kv in [KvType::E4m3, KvType::Int8, KvType::Int4] {
            cases.push(Case { dim, kv, extras: all, lens: RAGGED.to_vec(), ..Case::default() });
        }
    }
    cases
}

/// Every plan that a case can run: the one chosen, both kernels, and layouts that other devices would choose.
fn plans(gpu: &Gpu, device: &crate::decode_cache::Device) -> Vec<Plan> {
    let mut invariant = device.launch;
    invariant.batch_invariant = true;
    let mut plans = vec![device.plan, invariant.plan(gpu.num_sms)];
    if device.launch.kv_type == KvType::Bf16 && device.launch.scores == Default::default() {
        plans.push(Plan::Line);
    }
    let others = [(8, 2, false), (1, 3, false), (4, 1, false), (2, 5, true), (8, 1, true), (1, 16, true)];
    plans.extend(others.map(|(ranks, parts, line)| Plan::Clusters { ranks, parts, line }));
    let mut kept: Vec<Plan> = Vec::new();
    plans.into_iter().for_each(|p| {
        if !kept.contains(&p) {
            kept.push(p);
        }
    });
    kept
}

fn name(c: &Case) -> String {
    let mut extra = if c.extras == Extras::default() { String::new() } else { format!(", {:?}", c.extras) };
    extra += if c.scale_a_head { ", a scale a head" } else { "" };
    format!(
        "decode {} d{} {}/{} heads, {} query tokens, page {}, {} sequences{extra}",
        c.kv.name(),
        c.dim,
        c.num_q_heads,
        c.num_kv_heads,
        c.seqlen_q,
        c.page_size,
        c.lens.len()
    )
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let all = cases().into_iter().chain(quantised_cases()).chain(score_cases());
    for (n, mut c) in all.enumerate() {
        if report.small {
            if n % 11 != 0 {
                continue;
            }
            c.lens = c.lens.iter().take(4).map(|len| len % 200).collect();
        }
        let x = Cache::new(&c, 50 + n as u64);
        let exact = x.references(&c.lens);
        let mut device = upload(gpu, &x)?;
        for plan in plans(gpu, &device) {
            device.use_plan(gpu, plan)?;
            let out = device.once(gpu)?;
            report.errors(&format!("{}: {plan}", name(&c)), &x.check(&exact, &out));
            let mut same = true;
            for _ in 0..if report.small { 0 } else { 5 } {
                same &= device.once(gpu)? == out;
            }
            if !same {
                report.line(false, &format!("{}: {plan}: the same bits in 5 runs", name(&c)), String::new());
            }
        }
    }
    if report.small {
        return Ok(());
    }
    test_batch_invariance(gpu, report)?;
    test_graph_with_changed_lengths(gpu, report)?;
    test_refusals(gpu, report)
}

/// With `batch_invariant` a sequence alone and the same one amid a batch give the same bits.
fn test_batch_invariance(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    for (dim, num_q_heads, num_kv_heads, seqlen_q) in
        [(128, 32, 8, 1), (256, 16, 1, 1), (64, 8, 2, 4), (128, 12, 12, 1)]
    {
        for kv in [KvType::Bf16, KvType::E4m3, KvType::Int4] {
            let lens = vec![9000, 1, 0, 777, 16_500, 64, 2048, 8191, 33, 5000];
            let c = Case { dim, num_q_heads, num_kv_heads, seqlen_q, kv, lens, ..Case::default() };
            let x = Cache::new(&c, 31);
            let mut device = upload(gpu, &x)?;
            device.launch.batch_invariant = true;
            device.use_plan(gpu, device.launch.plan(gpu.num_sms))?;
            let whole = device.once(gpu)?;
            let (row, total_q) = (seqlen_q * num_q_heads * dim, c.lens.len() * seqlen_q);
            let mut same = true;
            for b in 0..c.lens.len() {
                let one = device.alone(gpu, b)?;
                same &= one.o == whole.o[b * row..(b + 1) * row];
                for (h, lse) in one.lse.chunks(seqlen_q).enumerate() {
                    same &= lse == &whole.lse[h * total_q + b * seqlen_q..][..seqlen_q];
                }
            }
            report.line(same, &format!("{}: alone as in the batch, same bits", name(&c)), String::new());
        }
    }
    Ok(())
}

/// A captured launch follows lengths that change under it; the workspace is left clean from one replay to the next.
fn test_graph_with_changed_lengths(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    for (num_q_heads, num_kv_heads, kv) in
        [(32, 8, KvType::Bf16), (8, 1, KvType::Bf16), (32, 8, KvType::Int8), (16, 1, KvType::Int4)]
    {
        let lens = vec![900, 64, 3000, 1, 2048, 77];
        let c = Case { num_q_heads, num_kv_heads, kv, lens, ..Case::default() };
        let x = Cache::new(&c, 7);
        let mut device = upload(gpu, &x)?;
        for plan in plans(gpu, &device) {
            device.use_plan(gpu, plan)?;
            device.lens.write(0, &c.lens.iter().map(|n| *n as i32).collect::<Vec<i32>>())?;
            device.launch(gpu)?;
            let graph = graph_of(gpu, || device.launch(gpu))?;
            for shorter in [0usize, 1, 63, 500] {
                let now: Vec<usize> = c.lens.iter().map(|n| n.saturating_sub(shorter)).collect();
                device.lens.write(0, &now.iter().map(|n| *n as i32).collect::<Vec<i32>>())?;
                let out = device.run(gpu, || graph.launch().map_err(call("cuGraphLaunch")))?;
                let what = format!("{}: {plan}: graph replay, lengths less {shorter}", name(&c));
                report.errors(&what, &x.check(&x.references(&now), &out));
            }
        }
    }
    Ok(())
}

/// What no kernel can do is refused by name before anything runs.
fn test_refusals(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let c = Case { lens: vec![20], kv: KvType::E4m3, ..Case::default() };
    let x = Cache::new(&c, 1);
    let device = upload(gpu, &x)?;
    let good = device.launch;
    let mut no_scales = good;
    no_scales.k.scales.address = 0;
    let mut far = good;
    far.scores.softcap = Some(f32::INFINITY);
    let mut uneven = good;
    uneven.v.token_stride += 16;
    let line = suanpan_cuda::attention::decode::Decode { batch_invariant: true, ..good };
    let rows = suanpan_cuda::attention::decode::Decode { seqlen_q: 17, ..good };
    let odd = Plan::Clusters { ranks: 3, parts: 1, line: false };
    for (what, d, plan) in [
        ("e4m3 without scales", no_scales, device.plan),
        ("an infinite softcap", far, device.plan),
        ("68 rows", rows, device.plan),
        ("quantised on one line", good, Plan::Line),
        ("three ranks", good, odd),
        ("strides of v unlike k's", uneven, device.plan),
        ("one line where no bit may change", line, Plan::Clusters { ranks: 1, parts: 4, line: true }),
    ] {
        // SAFETY: a launch that is refused runs nothing; one that is not uses buffers of at least its shape.
        let refused = unsafe { d.launch(gpu, plan) };
        report.refused(&format!("decode refuses {what}"), refused);
    }
    gpu.synchronize()
}
