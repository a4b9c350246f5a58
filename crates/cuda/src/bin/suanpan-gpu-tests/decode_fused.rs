//! What decode does beyond attention over what lies in its pages: new keys and values put there, rotary embedding, prior results and the
//! shared-prefix cascade, many query tokens as one by one.
use crate::Report;
use crate::decode_cache::{BF16, Cache, Case, Device, Output, upload};
use suanpan_cuda::Error;
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode::{Append, Decode, Fused, KvType, Plan, Rotary};
use suanpan_cuda::attention::decode_cascade::{Cascade, Prefix};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, from_bits, graph_of, to_bits};

/// NaN in bf16.
const NAN: u16 = 0x7fff;

/// Cosines and sines of `[positions, dim / 2]`.
pub fn angles(positions: usize, dim: usize) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| {
        let (position, pair) = (i / (dim / 2), i % (dim / 2));
        position as f64 * 10_000f64.powf(-2.0 * pair as f64 / dim as f64)
    };
    let all = 0..positions * dim / 2;
    (all.clone().map(|i| angle(i).cos() as f32).collect(), all.map(|i| angle(i).sin() as f32).collect())
}

/// Turns the first `dim` elements of a head at `position`, rounded to bf16, in the kernel's arithmetic.
pub fn turn(x: &mut [f32], dim: usize, interleaved: bool, position: usize, cos: &[f32], sin: &[f32]) {
    for pair in 0..dim / 2 {
        let (a, b) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + dim / 2) };
        let (c, s) = (cos[position * dim / 2 + pair], sin[position * dim / 2 + pair]);
        let (u, v) = (x[a], x[b]);
        let round = |x: f32| from_bits(BF16, to_bits(BF16, x));
        (x[a], x[b]) = (round(u.mul_add(c, -(v * s))), round(v.mul_add(c, u * s)));
    }
}

/// Buffers of the new keys and values, taken out of the pages, where NaN stays behind.
fn take_new(gpu: &Gpu, x: &Cache, device: &Device, k_raw: &[f32]) -> Result<[Buffer; 2], Error> {
    let c = &x.case;
    let row = c.num_kv_heads * c.dim;
    let mut v_new = Vec::new();
    for (b, &len) in c.lens.iter().enumerate() {
        for t in len - c.seqlen_q..len {
            let at = x.at(b, t, 0);
            v_new.extend(x.v_values()[at..at + row].iter().map(|f| to_bits(BF16, *f)));
            device.k.write(at * 2, &vec![NAN; row])?;
            device.v.write(at * 2, &vec![NAN; row])?;
        }
    }
    let k_new: Vec<u16> = k_raw.iter().map(|f| to_bits(BF16, *f)).collect();
    Ok([Buffer::from_slice(gpu, &k_new)?, Buffer::from_slice(gpu, &v_new)?])
}

/// Elements of the new tokens whose bits in the pages are not what they should be.
fn pages_off(x: &Cache, device: &Device) -> Result<usize, Error> {
    let c = &x.case;
    let row = c.num_kv_heads * c.dim;
    let mut off = 0;
    for (b, &len) in c.lens.iter().enumerate() {
        for t in len - c.seqlen_q..len {
            let at = x.at(b, t, 0);
            for (held, values) in [(&device.k, x.k_values()), (&device.v, x.v_values())] {
                let bits: Vec<u16> = held.read(at * 2, row)?;
                off +=
                    bits.iter().zip(&values[at..at + row]).filter(|(a, b)| **a != to_bits(BF16, **b)).count();
            }
        }
    }
    Ok(off)
}

/// The queries' own keys and values come with the launch, turned or not; they are read as if they had lain in the pages, and lie there after.
fn test_append(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let shapes = [
        (64, 8, 2, 1, 16),
        (128, 32, 8, 1, 16),
        (128, 8, 2, 5, 48),
        (256, 16, 1, 1, 64),
        (128, 16, 2, 8, 16),
    ];
    for (dim, num_q_heads, num_kv_heads, seqlen_q, page_size) in shapes {
        for turned in [None, Some((dim, false)), Some((dim, true)), Some((dim / 2, false))] {
            let lens = if report.small { vec![9, 64, 77] } else { vec![9, 64, 65, 700, 8, 4111] };
            let c = Case { dim, num_q_heads, num_kv_heads, seqlen_q, page_size, lens, ..Case::default() };
            let mut x = Cache::new(&c, 90);
            let q_raw = x.q().to_vec();
            let (cos, sin) = turned.map_or((vec![0.0; 4], vec![0.0; 4]), |(n, _)| angles(4200, n));
            let mut k_raw = Vec::new();
            for (b, &len) in c.lens.iter().enumerate() {
                for (i, t) in (len - seqlen_q..len).enumerate() {
                    for head in 0..num_kv_heads {
                        let at = x.at(b, t, head);
                        let key = &mut x.k_values_mut()[at..at + dim];
                        k_raw.extend_from_slice(key);
                        turned.inspect(|(n, pairs)| turn(key, *n, *pairs, t, &cos, &sin));
                    }
                    for head in 0..num_q_heads {
                        let at = ((b * seqlen_q + i) * num_q_heads + head) * dim;
                        turned.inspect(|(n, pairs)| {
                            turn(&mut x.q_mut()[at..at + dim], *n, *pairs, t, &cos, &sin)
                        });
                    }
                }
            }
            let mut device = upload(gpu, &x)?;
            device.write_q(&q_raw)?;
            let [k_new, v_new] = take_new(gpu, &x, &device, &k_raw)?;
            let (cos, sin) = (Buffer::from_slice(gpu, &cos)?, Buffer::from_slice(gpu, &sin)?);
            device.launch.fused = Fused {
                append: Some(Append { k: k_new.address, v: v_new.address }),
                rotary: turned.map(|(n, interleaved)| Rotary {
                    dim: n as u32,
                    interleaved,
                    cos: cos.address,
                    sin: sin.address,
                }),
                ..Fused::default()
            };
            let exact = x.references(&c.lens);
            for plan in [
                device.launch.plan(gpu.num_sms),
                Plan::Clusters { ranks: 4, parts: 2, line: false },
                Plan::Clusters { ranks: 2, parts: 3, line: true },
            ] {
                device.use_plan(gpu, plan)?;
                let out = device.once(gpu)?;
                let name = format!(
                    "decode d{dim} {num_q_heads}/{num_kv_heads} heads, {seqlen_q} new tokens, page {page_size}, turned {turned:?}: {plan}"
                );
                report.errors(&name, &x.check(&exact, &out));
                let off = pages_off(&x, &device)?;
                report.line(off == 0, &format!("{name}: lie in the pages"), format!("{off} elements differ"));
            }
        }
    }
    Ok(())
}

/// Sequences that begin with the same pages: the cascade gives what reading each whole sequence gives.
fn test_cascade(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let shapes = [
        (128, 32, 8, 1, 37, KvType::Bf16),
        (64, 8, 2, 3, 5, KvType::Bf16),
        (256, 16, 1, 1, 9, KvType::Bf16),
        (128, 8, 2, 1, 20, KvType::E4m3),
        (128, 8, 8, 1, 3, KvType::Int4),
    ];
    for (dim, num_q_heads, num_kv_heads, seqlen_q, batch, kv) in shapes {
        for shared_pages in [1usize, 40] {
            if report.small && (shared_pages > 1 || batch > 9) {
                continue;
            }
            let prefix = shared_pages * 16;
            let lens: Vec<usize> = (0..batch)
                .map(|b| prefix + [5usize, 200, 16, if report.small { 40 } else { 1000 }, 77][b % 5])
                .collect();
            let c =
                Case { dim, num_q_heads, num_kv_heads, seqlen_q, lens, kv, shared_pages, ..Case::default() };
            let x = Cache::new(&c, 11);
            let mut device = upload(gpu, &x)?;
            let suffix_lens: Vec<i32> = c.lens.iter().map(|n| (n - prefix) as i32).collect();
            device.lens.write(0, &suffix_lens)?;
            let length = Buffer::from_slice(gpu, &[prefix as i32])?;
            let outputs = c.lens.len() * seqlen_q * num_q_heads;
            let (o, lse) = (Buffer::new(gpu, outputs * dim * 4)?, Buffer::new(gpu, outputs * 4)?);
            let table = device.launch.page_table;
            device.launch.page_table += 4 * shared_pages as u64;
            device.launch.fused.table_row = device.launch.pages_max;
            device.launch.pages_max -= shared_pages as u32;
            let mut cascade = Cascade {
                suffix: device.launch,
                prefix: Prefix {
                    seqlen_k: length.address,
                    page_table: table,
                    pages_max: shared_pages as u32,
                    o: o.address,
                    lse: lse.address,
                    partial: 0,
                },
            };
            let plan = cascade.plan(gpu.num_sms);
            let partial = Buffer::new(gpu, cascade.prefix_partial_bytes(plan, gpu.num_sms) as usize)?;
            partial.fill(gpu, u32::MAX)?;
            cascade.prefix.partial = partial.address;
            device.use_plan(gpu, plan.suffix)?;
            cascade.suffix.partial = device.launch.partial;
            // SAFETY: every buffer has the shape that the launches ask for and lives past `run`'s synchronisation.
            let out = device.run(gpu, || unsafe { cascade.launch(gpu, plan) })?;
            let name = format!(
                "cascade {} d{dim} {num_q_heads}/{num_kv_heads} heads, {batch} sequences of {seqlen_q} tokens, {prefix} shared keys: {plan}",
                kv.name()
            );
            report.errors(&name, &x.check(&x.references(&c.lens), &out));
            // SAFETY: as above.
            let graph = graph_of(gpu, || unsafe { cascade.launch(gpu, plan) })?;
            let shorter: Vec<i32> = suffix_lens.iter().map(|n| n - 2).collect();
            device.lens.write(0, &shorter)?;
            let now: Vec<usize> = c.lens.iter().map(|n| n - 2).collect();
            let again =
                device.run(gpu, || graph.launch().map_err(suanpan_cuda::driver::call("cuGraphLaunch")))?;
            report.errors(
                &format!("{name}: graph replay, two keys less"),
                &x.check(&x.references(&now), &again),
            );
        }
    }
    Ok(())
}

/// In batch-invariant mode the tokens of an extend have the bits that each has when it is decoded alone.
fn test_extend_equals_decode(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    for (dim, num_q_heads, num_kv_heads, seqlen_q, kv) in [
        (128, 32, 8, 16, KvType::Bf16),
        (64, 8, 2, 3, KvType::Bf16),
        (256, 16, 1, 4, KvType::Bf16),
        (128, 8, 8, 40, KvType::Bf16),
        (128, 32, 8, 16, KvType::E4m3),
        (128, 32, 8, 5, KvType::Int4),
        (64, 4, 1, 9, KvType::Int8),
    ] {
        let lens = vec![seqlen_q, 700, 9000, 64 + seqlen_q];
        let c = Case { dim, num_q_heads, num_kv_heads, seqlen_q, kv, lens, ..Case::default() };
        let x = Cache::new(&c, 37);
        let mut device = upload(gpu, &x)?;
        device.launch.batch_invariant = true;
        device.use_plan(gpu, device.launch.plan(gpu.num_sms))?;
        let extend = device.once(gpu)?;
        let (row, total) = (num_q_heads * dim, c.lens.len() * seqlen_q);
        let mut same = true;
        for b in 0..c.lens.len() {
            for i in 0..seqlen_q {
                let token = b * seqlen_q + i;
                let one = one_token(gpu, &device, &c, b, i)?;
                same &= one.o == extend.o[token * row..(token + 1) * row];
                same &= one
                    .lse
                    .iter()
                    .enumerate()
                    .all(|(h, lse)| lse.to_bits() == extend.lse[h * total + token].to_bits());
            }
        }
        let name = format!(
            "{} d{dim} {num_q_heads}/{num_kv_heads} heads: {seqlen_q} tokens at once as one by one, same bits",
            kv.name()
        );
        report.line(same, &name, String::new());
    }
    Ok(())
}

/// Query token `i` of sequence `b` in a launch of its own.
fn one_token(gpu: &Gpu, device: &Device, c: &Case, b: usize, i: usize) -> Result<Output, Error> {
    let (d, token) = (&device.launch, (b * c.seqlen_q + i) as u64);
    let length = Buffer::from_slice(gpu, &[(c.lens[b] - (c.seqlen_q - 1 - i)) as i32])?;
    let one = Decode {
        q: Operand { address: d.q.address + token * d.q.token_stride * 2, ..d.q },
        seqlens_k: length.address,
        page_table: d.page_table + 4 * b as u64 * u64::from(d.pages_max),
        batch: 1,
        seqlen_q: 1,
        ..*d
    };
    // SAFETY: one token of one sequence needs a part of every buffer of the launch it is taken from.
    let out = device.run(gpu, || unsafe { one.launch(gpu, one.plan(gpu.num_sms)) })?;
    Ok(Output { o: out.o[..c.num_q_heads * c.dim].to_vec(), lse: out.lse[..c.num_q_heads].to_vec() })
}

/// What cannot go together is refused by name.
fn test_refusals(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let c = Case { lens: vec![20], ..Case::default() };
    let x = Cache::new(&c, 1);
    let device = upload(gpu, &x)?;
    let d = device.launch;
    let append = Some(Append { k: d.k.address, v: d.v.address });
    let rotary = |dim| Some(Rotary { dim, interleaved: false, cos: d.q.address, sin: d.q.address });
    let with = |fused| Decode { fused, ..d };
    let none = Fused::default();
    let mut scaled = d;
    scaled.k.scales.address = d.q.address;
    let windowed = suanpan_cuda::attention::decode::Scores { left: Some(5), ..d.scores };
    let line = Plan::Line;
    for (what, launch, plan) in [
        ("scales beside 16-bit keys", scaled, device.plan),
        ("scales beside 16-bit keys on one line", scaled, line),
        (
            "append to e4m3 pages",
            Decode { kv_type: KvType::E4m3, ..with(Fused { append, ..none }) },
            device.plan,
        ),
        ("append on one line", with(Fused { append, ..none }), line),
        ("append to shared pages", with(Fused { append, shared_pages: true, ..none }), device.plan),
        ("48 turned elements", with(Fused { rotary: rotary(48), ..none }), device.plan),
        ("more turned elements than a head has", with(Fused { rotary: rotary(256), ..none }), device.plan),
        (
            "a window over rows that see all keys",
            Decode { scores: windowed, ..with(Fused { all_keys: true, ..none }) },
            device.plan,
        ),
    ] {
        // SAFETY: a launch that is refused runs nothing; one that is not uses buffers of at least its shape.
        let refused = unsafe { launch.launch(gpu, plan) };
        report.refused(&format!("decode refuses {what}"), refused);
    }
    gpu.synchronize()
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    test_append(gpu, report)?;
    test_cascade(gpu, report)?;
    if report.small {
        return Ok(());
    }
    test_extend_equals_decode(gpu, report)?;
    test_refusals(gpu, report)
}
