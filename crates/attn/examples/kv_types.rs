//! Decode over stored keys and values of each type and in the batch-invariant mode, beside bf16 and beside a plain read of the same
//! buffers, turn by turn in one loop: medians and ratios.
//!
//! `cargo run --release -p suanpan-attn --example kv_types -- [keys] [rounds] [threads] [q: bf16|f32] [page size, 0: contiguous] [one type]`

use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use memmap2::MmapMut;
use rayon::prelude::*;
use suanpan_attn::cpu::probe;
use suanpan_attn::{
    Args, Extras, KvLayout, KvScales, Limits, Machine, Plan, Problem, Strides, Workspace, run,
};
use suanpan_base::{BadArgument, Buf, BufMut, DType, HeadShape, Mask, ScaleGrain, SeqLen};
use suanpan_ledger::AttnBooks;

const HEADS: HeadShape = HeadShape::new(32, 8, 128);

/// Element type, scales, and whether in the batch-invariant mode. The first is what the others are held against.
const KINDS: [(DType, ScaleGrain, bool); 10] = [
    (DType::Bf16, ScaleGrain::None, false),
    (DType::Bf16, ScaleGrain::None, true),
    (DType::I8, ScaleGrain::Token, false),
    (DType::I4, ScaleGrain::Token, false),
    (DType::I8, ScaleGrain::Head, false),
    (DType::I4, ScaleGrain::Head, false),
    (DType::F32, ScaleGrain::None, false),
    (DType::F16, ScaleGrain::None, false),
    (DType::E4m3, ScaleGrain::Token, false),
    (DType::E5m2, ScaleGrain::Token, false),
];

/// One type with its buffers. Bytes are random; every pattern that is not a number is left out.
struct Subject {
    dtype: DType,
    name: String,
    plan: Plan,
    ws: Workspace,
    k: MmapMut,
    v: MmapMut,
    strides: Strides,
    scale_strides: Strides,
    numbers: Vec<f32>,
    table: Vec<u32>,
    seconds: Vec<f64>,
}

/// In large pages of the system, where it has them, as a cache would keep them.
fn random_bytes(bytes: usize, seed: u64, dtype: DType) -> std::io::Result<MmapMut> {
    let mut x = seed;
    let mut next = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    let mask = match dtype {
        // Exponents between 2^-15 and 2.
        DType::F32 => 0x8fff_ffff_8fff_ffff,
        DType::Bf16 => 0x8fff_8fff_8fff_8fff,
        DType::F16 => 0xbfff_bfff_bfff_bfff,
        DType::E4m3 | DType::E5m2 => 0xbfbf_bfbf_bfbf_bfbf,
        DType::I8 | DType::I4 => u64::MAX,
    };
    let low = match dtype {
        DType::F32 => 0x3000_0000_3000_0000,
        DType::Bf16 => 0x3000_3000_3000_3000,
        _ => 0,
    };
    let mut map = MmapMut::map_anon(bytes.next_multiple_of(8))?;
    #[cfg(target_os = "linux")]
    map.advise(memmap2::Advice::HugePage)?;
    bytemuck::cast_slice_mut::<u8, u64>(&mut map).iter_mut().for_each(|x| *x = next() & mask | low);
    Ok(map)
}

impl Subject {
    fn new(
        (dtype, scales, batch_invariant): (DType, ScaleGrain, bool),
        (keys, page): (usize, usize),
        q_dtype: DType,
        machine: &Machine,
    ) -> Result<Subject, Box<dyn std::error::Error>> {
        let (kv, d) = (HEADS.num_kv_heads, HEADS.head_dim_qk);
        let problem = Problem {
            q_dtype,
            kv_dtype: dtype,
            kv_scales: scales,
            batch_invariant,
            kv: if page == 0 { KvLayout::Contiguous } else { KvLayout::Paged { page_size: page } },
            ..Problem::new(HEADS, Mask::CAUSAL)
        };
        let mut plan =
            Plan::new(&problem, machine, Limits { max_seqs: 1, max_total_q: 1, max_seqlen_k: keys })?;
        plan.schedule(&[SeqLen::extend(keys - 1, 1)])?;
        let pages = if page == 0 { 0 } else { keys.div_ceil(page) };
        let (run, tokens) = if page == 0 { (keys, keys) } else { (page, pages * page) };
        let bytes = dtype.bytes_of(tokens * kv * d);
        // A fixed shuffle of the pages.
        let table = (0..pages).map(|i| (i * 7919 % pages.max(1)) as u32).collect();
        Ok(Subject {
            dtype,
            name: if batch_invariant { "batch-invariant".to_string() } else { scales.to_string() },
            ws: Workspace::for_plans(&[&plan]),
            plan,
            k: random_bytes(bytes, 3, dtype)?,
            v: random_bytes(bytes, 5, dtype)?,
            strides: Strides { token: d, head: run * d, page: kv * run * d },
            scale_strides: Strides { token: 1, head: run, page: kv * run },
            numbers: vec![0.01; if scales == ScaleGrain::None { 0 } else { tokens * kv }],
            table,
            seconds: Vec::new(),
        })
    }

    fn call(&mut self, q: Buf<'_>, out: BufMut<'_>) -> Result<(), BadArgument> {
        let rows = (HEADS.num_q_heads * HEADS.head_dim_qk, HEADS.head_dim_qk);
        let buf = |x| typed(x, self.dtype);
        let args = Args {
            q,
            q_strides: rows,
            k: buf(&self.k),
            k_strides: self.strides,
            v: buf(&self.v),
            v_strides: self.strides,
            page_table: &self.table,
            page_table_stride: self.table.len(),
            kv_scales: KvScales {
                k: Buf::F32(&self.numbers),
                k_strides: self.scale_strides,
                v: Buf::F32(&self.numbers),
                v_strides: self.scale_strides,
            },
            extras: Extras::default(),
            max_scores: None,
            out,
            out_strides: rows,
            lse: None,
        };
        run(&self.plan, args, &mut self.ws, &mut [AttnBooks::default()])
    }
}

fn typed(x: &[u8], dtype: DType) -> Buf<'_> {
    match dtype {
        DType::F32 => Buf::F32(bytemuck::cast_slice(x)),
        DType::Bf16 => Buf::Bf16(bytemuck::cast_slice(x)),
        DType::F16 => Buf::F16(bytemuck::cast_slice(x)),
        DType::E4m3 => Buf::E4m3(x),
        DType::E5m2 => Buf::E5m2(x),
        DType::I8 => Buf::I8(bytemuck::cast_slice(x)),
        DType::I4 => Buf::I4(x),
    }
}

/// A plain read of all of it by all threads.
fn read(machine: &Machine, bytes: &[u8]) -> f32 {
    let data: &[f32] = bytemuck::cast_slice(bytes);
    data.par_chunks(data.len().div_ceil(machine.threads()).max(1)).map(|x| probe::read(machine, x)).sum()
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |x| x.parse::<usize>());
    let (keys, rounds, threads, page) = (number(0, 131_072)?, number(1, 21)?, number(2, 2)?, number(4, 0)?);
    let q_dtype: DType = args.get(3).map_or(Ok(DType::Bf16), |x| x.parse())?;
    let only: Option<DType> = args.get(5).map(|x| x.parse()).transpose()?;
    let machine = Machine::detect(threads);
    let mut subjects = Vec::new();
    for kind in KINDS.into_iter().filter(|(d, ..)| only.is_none_or(|o| o == *d || *d == DType::Bf16)) {
        subjects.push(Subject::new(kind, (keys, page), q_dtype, &machine)?);
    }
    let n = HEADS.num_q_heads * HEADS.head_dim_qk;
    let q: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    let q16: Vec<bf16> = q.iter().map(|&x| bf16::from_f32(x)).collect();
    let (mut out, mut out16) = (vec![0f32; n], vec![bf16::ZERO; n]);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let mut reads = Vec::new();
    pool.install(|| -> Result<(), BadArgument> {
        for round in 0..=rounds {
            let start = Instant::now();
            black_box(read(&machine, &subjects[0].k) + read(&machine, &subjects[0].v));
            if round > 0 {
                reads.push(start.elapsed().as_secs_f64());
            }
            for s in &mut subjects {
                let start = Instant::now();
                match q_dtype {
                    DType::F32 => s.call(Buf::F32(&q), BufMut::F32(&mut out))?,
                    _ => s.call(Buf::Bf16(&q16), BufMut::Bf16(&mut out16))?,
                }
                if round > 0 {
                    s.seconds.push(start.elapsed().as_secs_f64());
                }
            }
        }
        Ok(())
    })?;
    let base: Vec<f64> = subjects[0].seconds.clone();
    let stream_bytes = (subjects[0].k.len() + subjects[0].v.len()) as f64;
    println!("{machine}: {HEADS:?}, {keys} keys, q {q_dtype}, page {page}, {rounds} rounds");
    println!("plain read of bf16's bytes: {:.2} GB/s", stream_bytes / median(reads.clone()) / 1e9);
    for s in &subjects {
        // Each round's own ratio: phases of the machine meet both sides.
        let ratio = median(base.iter().zip(&s.seconds).map(|(b, s)| b / s).collect());
        let bytes = s.plan.predicted(SeqLen::extend(keys - 1, 1)).kv_read_bytes as f64;
        let t = median(s.seconds.clone());
        let least = |x: &[f64]| x.iter().copied().fold(f64::INFINITY, f64::min);
        println!(
            "{:<9} {:<28} {:>8.3} ms  {:>6.2} GB/s ({:.2} of the read)  {ratio:.2} x bf16; least times {:>8.3} ms, {:.2} x",
            s.dtype.name(),
            s.name,
            t * 1e3,
            bytes / t / 1e9,
            bytes / stream_bytes * median(reads.iter().zip(&s.seconds).map(|(r, s)| r / s).collect()),
            least(&s.seconds) * 1e3,
            least(&base) / least(&s.seconds)
        );
    }
    Ok(())
}
