//! For the test and bench binaries: device buffers, random inputs, the f64 oracle and plain attention at 16 bits.
use crate::driver::{Gpu, call};
use crate::{Dtype, Error};
use cudarc::driver::{CudaGraph, sys};
use std::ffi::c_void;

pub use crate::driver::Memory as Buffer;

impl Buffer {
    /// Fills the buffer with one 32-bit word.
    pub fn fill(&self, gpu: &Gpu, word: u32) -> Result<(), Error> {
        self.fill_async(gpu, word)?;
        gpu.synchronize()
    }

    /// The same, without waiting.
    pub fn fill_async(&self, gpu: &Gpu, word: u32) -> Result<(), Error> {
        let (mut address, mut n, mut word) = (self.address, (self.bytes / 4) as u64, word);
        let mut args: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut n).cast(), (&raw mut word).cast()];
        let kernel = gpu.kernel("random", "fill_word", 0)?;
        // SAFETY: the parameters match `fill_word`, which stays inside the buffer.
        unsafe { gpu.launch(kernel, (gpu.num_sms * 8, 1, 1), 256, 0, &mut args) }
    }

    /// Fills the buffer with 16-bit normal numbers.
    pub fn fill_normal(&self, gpu: &Gpu, seed: u64, dtype: Dtype) -> Result<(), Error> {
        let (mut address, mut n, mut seed) = (self.address, (self.bytes / 2) as u64, seed);
        let mut fp16 = i32::from(dtype == Dtype::Fp16);
        let mut args: [*mut c_void; 4] =
            [(&raw mut address).cast(), (&raw mut n).cast(), (&raw mut seed).cast(), (&raw mut fp16).cast()];
        let kernel = gpu.kernel("random", "fill_normal", 0)?;
        // SAFETY: the parameters match `fill_normal`, which stays inside the buffer.
        unsafe { gpu.launch(kernel, (gpu.num_sms * 8, 1, 1), 256, 0, &mut args) }?;
        gpu.synchronize()
    }

    /// Fills the buffer with random bits under `mask`.
    pub fn fill_bits(&self, gpu: &Gpu, seed: u64, mask: u32) -> Result<(), Error> {
        let (mut address, mut n, mut seed, mut mask) = (self.address, (self.bytes / 4) as u64, seed, mask);
        let mut args: [*mut c_void; 4] =
            [(&raw mut address).cast(), (&raw mut n).cast(), (&raw mut seed).cast(), (&raw mut mask).cast()];
        let kernel = gpu.kernel("random", "fill_bits", 0)?;
        // SAFETY: the parameters match `fill_bits`, which stays inside the buffer.
        unsafe { gpu.launch(kernel, (gpu.num_sms * 8, 1, 1), 256, 0, &mut args) }?;
        gpu.synchronize()
    }

    /// Reads `bytes` (a multiple of 16) from `offset` on, without waiting.
    pub fn read_all(&self, gpu: &Gpu, offset: u64, bytes: u64) -> Result<(), Error> {
        assert!(offset + bytes <= self.bytes as u64);
        let (mut address, mut n, mut out) = (self.address + offset, bytes / 16, self.address);
        let mut args: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut n).cast(), (&raw mut out).cast()];
        let kernel = gpu.kernel("random", "read_all", 0)?;
        // SAFETY: the parameters match `read_all`; the range was just checked.
        unsafe { gpu.launch(kernel, (gpu.num_sms * 4, 1, 1), 512, 0, &mut args) }
    }
}

/// A small reproducible generator (xorshift*), for inputs made on the host.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n.max(1)
    }

    pub fn normal(&mut self) -> f32 {
        let u = ((self.bits() >> 40) as f32 + 1.0) / (1u64 << 24) as f32;
        let v = (self.bits() >> 40) as f32 / (1u64 << 24) as f32;
        (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
    }
}

/// Rounds to the operand type and back.
pub fn to_bits(dtype: Dtype, x: f32) -> u16 {
    match dtype {
        Dtype::Bf16 => half::bf16::from_f32(x).to_bits(),
        Dtype::Fp16 => half::f16::from_f32(x).to_bits(),
    }
}

pub fn from_bits(dtype: Dtype, x: u16) -> f32 {
    match dtype {
        Dtype::Bf16 => half::bf16::from_bits(x).to_f32(),
        Dtype::Fp16 => half::f16::from_bits(x).to_f32(),
    }
}

/// Rounds to e4m3 (four exponent bits, bias 7, three of mantissa; largest 448, no infinity), to nearest even.
pub fn to_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let x = x.abs();
    if x.is_nan() {
        return sign | 0x7f;
    }
    let exponent = ((x.to_bits() >> 23) as i32 - 127).clamp(-6, 8);
    let unit = 2f32.powi(exponent - 3); // between neighbours of x; the smallest normal and all below it share one
    let steps = ((x / unit).round_ties_even() as i32).min(if exponent == 8 { 14 } else { 16 });
    sign | (steps + (exponent + 6) * 8).min(0x7e) as u8
}

pub fn from_e4m3(x: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(x >> 3 & 15), f32::from(x & 7));
    let size = match (exponent, x & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if x & 0x80 == 0 { size } else { -size }
}

/// One (query row, head): its query and the keys and values it sees, in token order.
pub struct Row<'a> {
    pub q: &'a [f32],
    pub keys: usize,
    pub key: &'a (dyn Fn(usize) -> &'a [f32] + Sync),
    pub value: &'a (dyn Fn(usize) -> &'a [f32] + Sync),
}

/// Output of a row by the oracle (f64), its lse, and by plain attention that rounds scores, probabilities and o.
pub struct RowResult {
    pub oracle: Vec<f64>,
    pub lse: f64,
    pub plain: Vec<f64>,
}

/// The oracle and the yardstick for one row. An empty row gives o = 0 and lse = -inf.
pub fn reference_row(dtype: Dtype, scale: f64, row: &Row) -> RowResult {
    let dot = |j: usize| row.q.iter().zip((row.key)(j)).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    let keys: Vec<usize> = (0..row.keys).collect();
    let scaled: Vec<f64> = keys.iter().map(|&j| dot(j) * scale).collect();
    reference_scores(dtype, row.q.len(), &keys, &scaled, f64::NEG_INFINITY, &row.value, |_, x| x)
}

/// The same from `scaled`, the products q·k·scale with `keys`: `change` (key, scaled product) makes scores of them, and
/// `sink` joins the denominator. Plain attention rounds the products to 16 bits before anything else happens to them.
pub fn reference_scores<'a>(
    dtype: Dtype,
    dim_v: usize,
    keys: &[usize],
    scaled: &[f64],
    sink: f64,
    value: &dyn Fn(usize) -> &'a [f32],
    change: impl Fn(usize, f64) -> f64,
) -> RowResult {
    let round = |x: f64| f64::from(from_bits(dtype, to_bits(dtype, x as f32)));
    if keys.is_empty() {
        return RowResult { oracle: vec![0.0; dim_v], lse: sink, plain: vec![0.0; dim_v] };
    }
    let weigh = |products: &mut dyn Iterator<Item = f64>| {
        let scores: Vec<f64> = keys.iter().zip(products).map(|(j, x)| change(*j, x)).collect();
        let max = scores.iter().copied().fold(sink, f64::max);
        if max == f64::NEG_INFINITY {
            return (vec![0.0; keys.len()], max); // a bias took every key away
        }
        let mut p: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
        let sum: f64 = p.iter().sum::<f64>() + (sink - max).exp();
        p.iter_mut().for_each(|x| *x /= sum);
        (p, max + sum.ln())
    };
    let mix = |p: &[f64]| {
        let mut o = vec![0.0; dim_v];
        for (j, w) in keys.iter().zip(p) {
            for (x, v) in o.iter_mut().zip(value(*j)) {
                *x += w * f64::from(*v);
            }
        }
        o
    };
    let (p, lse) = weigh(&mut scaled.iter().copied());
    let (mut p_plain, _) = weigh(&mut scaled.iter().map(|x| round(*x)));
    p_plain.iter_mut().for_each(|x| *x = round(*x));
    let plain = mix(&p_plain).into_iter().map(round).collect();
    RowResult { oracle: mix(&p), lse, plain }
}

/// Largest errors of a kernel's output and of plain attention over many rows, and the output's own rounding.
#[derive(Clone, Copy, Default, Debug)]
pub struct Errors {
    pub ours: f64,
    pub plain: f64,
    pub rounding: f64,
    pub lse: f64,
    pub not_finite: usize,
}

impl Errors {
    pub fn add_row(&mut self, dtype: Dtype, o: &[f32], lse: f32, r: &RowResult) {
        for ((x, exact), plain) in o.iter().zip(&r.oracle).zip(&r.plain) {
            if !x.is_finite() || !exact.is_finite() || !plain.is_finite() {
                self.not_finite += 1;
                continue;
            }
            self.ours = self.ours.max((f64::from(*x) - exact).abs());
            self.plain = self.plain.max((plain - exact).abs());
            let rounded = f64::from(from_bits(dtype, to_bits(dtype, *exact as f32)));
            self.rounding = self.rounding.max((rounded - exact).abs());
        }
        if r.lse.is_nan() {
            self.not_finite += 1;
        } else if r.lse == f64::NEG_INFINITY {
            self.not_finite += usize::from(lse != f32::NEG_INFINITY);
        } else if lse.is_finite() {
            self.lse = self.lse.max((f64::from(lse) - r.lse).abs() / r.lse.abs().max(1.0));
        } else {
            self.not_finite += 1;
        }
    }

    pub fn merge(&mut self, other: &Self) {
        self.ours = self.ours.max(other.ours);
        self.plain = self.plain.max(other.plain);
        self.rounding = self.rounding.max(other.rounding);
        self.lse = self.lse.max(other.lse);
        self.not_finite += other.not_finite;
    }

    /// At most twice plain attention's error plus one rounding of the output; lse to f32 precision of its parts.
    pub fn pass(&self) -> bool {
        self.not_finite == 0 && self.ours <= 2.0 * self.plain + self.rounding && self.lse <= 2e-5
    }
}

/// Runs `work(i)` for i in 0..n on all cores and merges the errors.
pub fn parallel_rows(n: usize, work: impl Fn(usize, &mut Errors) + Sync) -> Errors {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let next = std::sync::atomic::AtomicUsize::new(0);
    let total = std::sync::Mutex::new(Errors::default());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut mine = Errors::default();
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if i >= n {
                        break;
                    }
                    work(i, &mut mine);
                }
                total.lock().expect("no panic under the lock").merge(&mine);
            });
        }
    });
    total.into_inner().expect("all threads have ended")
}

/// The middle value.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Median time in microseconds of `f`, each call between two events, after `warm` calls. The calls are queued back to back:
/// waiting for each would add its launch and give the chip a rest that a busy one does not get.
pub fn time_us(
    gpu: &Gpu,
    repeats: usize,
    warm: usize,
    mut f: impl FnMut() -> Result<(), Error>,
) -> Result<f64, Error> {
    for _ in 0..warm {
        f()?;
    }
    gpu.synchronize()?;
    let flags = Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT);
    let record = || gpu.stream.record_event(flags).map_err(call("cuEventRecord"));
    let mut spans = Vec::new();
    for _ in 0..repeats {
        let start = record()?;
        f()?;
        spans.push((start, record()?));
    }
    let read = call("cuEventElapsedTime");
    let mut times = Vec::new();
    for (start, end) in &spans {
        times.push(f64::from(start.elapsed_ms(end).map_err(&read)?) * 1e3);
    }
    Ok(median(&mut times))
}

/// Matrix products a second of a bare loop on random bf16 numbers, in FLOP/s, after 0.15 s of it: what the power limit leaves.
pub fn matrix_peak(gpu: &Gpu) -> Result<f64, Error> {
    const LOOPS: u32 = 4000;
    let random = Buffer::new(gpu, 80 << 10)?;
    random.fill_normal(gpu, 5, Dtype::Bf16)?;
    let out = Buffer::new(gpu, 4096)?;
    let smem = (80 << 10) + 1024;
    let kernel = gpu.kernel("peak", "matrix_peak", smem)?;
    let launch = || {
        let (mut from, mut loops, mut to) = (random.address, LOOPS as i32, out.address);
        let mut args: [*mut c_void; 3] =
            [(&raw mut from).cast(), (&raw mut loops).cast(), (&raw mut to).cast()];
        // SAFETY: the parameters match `matrix_peak`, which reads 80 KiB and writes inside `out`.
        unsafe { gpu.launch(kernel, (gpu.num_sms, 1, 1), 384, smem, &mut args) }
    };
    let us = time_us(gpu, 10, 60, launch)?;
    let flops = f64::from(gpu.num_sms) * 3.0 * f64::from(LOOPS) * 8.0 * 2.0 * 64.0 * 128.0 * 16.0;
    Ok(flops / us * 1e6)
}

/// Captures what `f` puts on the stream.
pub fn graph_of(gpu: &Gpu, f: impl FnOnce() -> Result<(), Error>) -> Result<CudaGraph, Error> {
    gpu.synchronize()?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    gpu.stream.begin_capture(mode).map_err(call("cuStreamBeginCapture"))?;
    let put = f();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = gpu.stream.end_capture(flags).map_err(call("cuStreamEndCapture"))?;
    put?;
    let graph = graph.expect("something was captured");
    graph.upload().map_err(call("cuGraphUpload"))?;
    gpu.synchronize()?;
    Ok(graph)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_goes_there_and_back_and_rounds_to_the_nearest() {
        for bits in 0..=255u8 {
            let x = from_e4m3(bits);
            if x.is_nan() {
                assert_eq!(bits & 0x7f, 0x7f);
            } else {
                assert_eq!(to_e4m3(x), bits, "{x}");
            }
        }
        let smallest = 2f32.powi(-9);
        for (x, rounded) in
            [(1.0625, 1.0), (-1.1875, -1.25), (1e9, 448.0), (460.0, 448.0), (1.4 * smallest, smallest)]
        {
            assert_eq!(from_e4m3(to_e4m3(x)), rounded, "{x}");
        }
    }
}
