//! Times linear layers: GOP/s of a prefill and weight bytes a second of a decode, per format and shape, with the conditions.
//!
//! `cargo run --release -p suanpan-ops --example bench_linear [threads] [isa] [format] [f32|int8]`. The answer is checked before it is timed.

use std::error::Error;
use std::time::Instant;

use suanpan_ops::{Isa, LinearInput, LinearOut, LinearWorkspace, Precision, Weight, WeightFormat, linear};

/// Bytes of copies of a matrix that decodes go through in turn: more than a last-level cache holds.
const COPIES_BYTES: usize = 400_000_000;

/// Deterministic noise in −1..1.
struct Noise(u64);

impl Noise {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn unit(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// Random bytes of a matrix whose scales are small finite numbers.
fn random_matrix(format: WeightFormat, rows: usize, cols: usize, noise: &mut Noise) -> Vec<u8> {
    let bytes = format.row_bytes(cols).expect("whole blocks") * rows;
    let mut data: Vec<u8> = (0..bytes).map(|_| noise.bits() as u8).collect();
    let scales: &[usize] = match format {
        WeightFormat::F32 => &[2],
        WeightFormat::F16 | WeightFormat::Bf16 | WeightFormat::Q4_0 | WeightFormat::Q8_0 => &[0],
        WeightFormat::Q5_0 | WeightFormat::Iq4Nl | WeightFormat::Iq4Xs => &[0],
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => &[0, 2],
        WeightFormat::Q2K => &[80, 82],
        WeightFormat::Q3K => &[108],
        WeightFormat::Q6K => &[208],
        WeightFormat::Mxfp4 | WeightFormat::F8E4M3 => &[],
    };
    if format == WeightFormat::F8E4M3 {
        data.iter_mut().for_each(|b| *b &= 0xbf);
    }
    if format == WeightFormat::Mxfp4 {
        data.chunks_exact_mut(17).for_each(|block| block[0] = 120);
    }
    let top = if matches!(format, WeightFormat::F32 | WeightFormat::Bf16) { 0x3c } else { 0x20 };
    for block in data.chunks_exact_mut(format.block_bytes()) {
        for at in scales {
            block[at + 1] = top | (block[at + 1] & 0x83);
        }
    }
    data
}

/// Largest error of a few outputs against f64, over the largest output.
fn check(w: &Weight<'_>, x: &[f32], out: &[f32], rows: usize) -> f64 {
    let (n, k) = (w.rows(), w.cols());
    let mut row = vec![0.0; k];
    let (mut worst, mut top) = (0f64, 0f64);
    for j in (0..n).step_by(n / 7 + 1) {
        w.dequantize_row(j, &mut row);
        for m in (0..rows).step_by(rows / 5 + 1) {
            let x = &x[m * k..(m + 1) * k];
            let want: f64 = row.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            worst = worst.max((f64::from(out[m * n + j]) - want).abs());
            top = top.max(want.abs());
        }
    }
    worst / top
}

struct Bench {
    isa: Isa,
    threads: usize,
    noise: Noise,
    /// Format and kind of input to time, all where there is none.
    only: (Option<String>, Option<String>),
}

impl Bench {
    /// Fastest and median seconds of one call (quantisation of the input included) and its error.
    fn time(
        &mut self,
        format: WeightFormat,
        precision: Precision,
        (rows, n, k): (usize, usize, usize),
        copies: usize,
    ) -> Result<(f64, f64, f64), Box<dyn Error>> {
        let row_bytes = format.row_bytes(k).ok_or("whole blocks")?;
        let data = random_matrix(format, n * copies, k, &mut self.noise);
        let x: Vec<f32> = (0..rows * k).map(|_| self.noise.unit()).collect();
        let mut out = vec![0.0; rows * n];
        let mut ws = LinearWorkspace::with_isa(self.isa, rows, self.threads)?;
        let float = !format.is_quantised() || precision == Precision::F32;
        let mut input = match float {
            true => LinearInput::new(rows, k, precision),
            false => LinearInput::quantised_only(rows, k, precision),
        };
        let mut times = Vec::new();
        let mut error = 0f64;
        let begin = Instant::now();
        let mut copy = 0;
        while times.len() < 5 || (begin.elapsed().as_secs_f64() < 0.25 && times.len() < 2000) {
            // Each call reads another copy, so that a decode reads memory rather than cache.
            let bytes = &data[copy * n * row_bytes..(copy + 1) * n * row_bytes];
            let w = Weight::new(format, n, k, bytes)?;
            let start = Instant::now();
            input.set(&x, rows, k);
            let job = (w, LinearOut { data: &mut out, row_stride: n, add: false });
            linear(&mut [job], &input, &mut ws);
            times.push(start.elapsed().as_secs_f64());
            if times.len() <= 2 {
                error = error.max(check(&w, &x, &out, rows));
            }
            copy = (copy + 1) % copies;
        }
        times.sort_by(f64::total_cmp);
        Ok((times[0], times[times.len() / 2], error))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let threads: usize = args.next().map_or(Ok(2), |s| s.parse())?;
    let isa = match args.next() {
        None => Isa::best(),
        Some(name) => {
            let found = Isa::ALL.into_iter().find(|i| i.name() == name);
            found.ok_or_else(|| format!("isa = {name}: supported: {:?}", Isa::ALL.map(Isa::name)))?
        }
    };
    let only = (args.next(), args.next());
    let mut bench = Bench { isa, threads, noise: Noise(7), only };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    pool.install(|| run(&mut bench)).map_err(|e| e.to_string())?;
    Ok(())
}

fn run(bench: &mut Bench) -> Result<(), String> {
    let (isa, threads) = (bench.isa.name(), bench.threads);
    println!(
        "isa {isa}, {threads} threads, input quantisation included, fastest and median call, error relative to the largest output"
    );
    println!(
        "{:6} {:5} {:>5} {:>6} {:>5} {:>9} {:>9} {:>9} {:>8} {:>9}",
        "format", "in", "M", "N", "K", "us min", "us med", "GOP/s", "GB/s", "error"
    );
    let prefill = [(512, 576, 576), (512, 192, 576), (512, 1536, 576), (512, 576, 1536), (32, 1536, 576)];
    let decode = [(1, 576, 576), (1, 3072, 576), (1, 576, 1536), (1, 49152, 576), (4, 3072, 576)];
    let wide = [(512, 1024, 1024), (1, 1024, 1024), (1, 32768, 1024)];
    for format in WeightFormat::ALL {
        for precision in [Precision::Int8, Precision::Int16, Precision::F32] {
            if precision.digits() > 0 && !format.is_quantised() {
                continue;
            }
            let kind = precision.name();
            let skip = |only: &Option<String>, name: &str| only.as_ref().is_some_and(|o| o != name);
            if skip(&bench.only.0, format.name()) || skip(&bench.only.1, kind) {
                continue;
            }
            let shapes: &[_] = if format.block_elems() == 256 { &wide } else { &[prefill, decode].concat() };
            for &(m, n, k) in shapes {
                let bytes = format.row_bytes(k).ok_or("whole blocks")? * n;
                let copies = if m > 8 { 1 } else { (COPIES_BYTES / bytes).clamp(1, 400) };
                let (t, median, error) =
                    bench.time(format, precision, (m, n, k), copies).map_err(|e| e.to_string())?;
                let (ops, name) = (2.0 * (m * n * k) as f64, format.name());
                let (gops, rate) = (ops / t * 1e-9, bytes as f64 / t * 1e-9);
                let (us, us_median) = (t * 1e6, median * 1e6);
                println!(
                    "{name:6} {kind:5} {m:5} {n:6} {k:5} {us:9.1} {us_median:9.1} {gops:9.1} {rate:8.2} {error:9.1e}"
                );
            }
        }
    }
    Ok(())
}
