//! A paged cache on host and device for the decode tests, its oracle in f64, and plain attention in bf16 as the yardstick.
use crate::NAN16;
use std::sync::OnceLock;
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode::{Decode, KvType, Pages, Plan, Scales, Scores};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, Errors, Rng, RowResult, from_bits, parallel_rows, to_bits};
use suanpan_cuda::{Dtype, Error};

pub const BF16: Dtype = Dtype::Bf16;

/// What happens to scores beyond the scale.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Extras {
    pub softcap: Option<f32>,
    pub left: Option<usize>,
    pub slopes: bool,
    pub sinks: bool,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub dim: usize,
    pub num_q_heads: usize,
    pub num_kv_heads: usize,
    pub seqlen_q: usize,
    pub page_size: usize,
    pub lens: Vec<usize>,
    pub kv: KvType,
    pub scale_a_head: bool,
    pub extras: Extras,
    /// First pages that all sequences have in common; every sequence is longer.
    pub shared_pages: usize,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            dim: 128,
            num_q_heads: 8,
            num_kv_heads: 2,
            seqlen_q: 1,
            page_size: 16,
            lens: vec![],
            kv: KvType::Bf16,
            scale_a_head: false,
            extras: Extras::default(),
            shared_pages: 0,
        }
    }
}

/// K or V: numbers as the oracle sees them, and their stored form. What no sequence uses is NaN where the form has one,
/// else as large as it can be, with NaN as its scale.
struct Stored {
    values: Vec<f32>, // [pages, page_size, num_kv_heads, dim]
    bytes: Vec<u8>,
    scales: Vec<f32>, // [pages, page_size, num_kv_heads], or [num_kv_heads]
}

fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = if exponent == 0 {
        mantissa * 2f32.powi(-9)
    } else {
        (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7)
    };
    if code >> 7 == 1 { -size } else { size }
}

impl Stored {
    fn new(c: &Case, slots: usize, rng: &mut Rng) -> Self {
        let n = slots * c.num_kv_heads;
        // Few mantissa bits: code times scale is exact in f32.
        let scales: Vec<f32> = (0..if c.scale_a_head { c.num_kv_heads } else { n })
            .map(|_| (1.0 + rng.below(8) as f32 / 8.0) * 2f32.powi(rng.below(3) as i32))
            .collect();
        let poison = match c.kv {
            KvType::Bf16 => NAN16 as u8,
            KvType::E4m3 => 0x7f,
            KvType::Int8 | KvType::Int4 => 0x80,
        };
        let mut bytes = vec![poison; n * c.dim * c.kv.bits() as usize / 8];
        if c.kv == KvType::Bf16 {
            bytes.chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&NAN16.to_le_bytes()));
        }
        Self { values: vec![f32::NAN; n * c.dim], bytes, scales }
    }

    fn scale(&self, c: &Case, row: usize) -> f32 {
        if c.scale_a_head { self.scales[row % c.num_kv_heads] } else { self.scales[row] }
    }

    /// Gives row `row` (slot * num_kv_heads + head) its numbers.
    fn fill_row(&mut self, c: &Case, row: usize, normals: &[f32], rng: &mut Rng) {
        let scale = self.scale(c, row);
        for i in row * c.dim..(row + 1) * c.dim {
            let x = normals[rng.below(normals.len())];
            self.values[i] = match c.kv {
                KvType::Bf16 => {
                    let bits = to_bits(BF16, x);
                    self.bytes[2 * i..2 * i + 2].copy_from_slice(&bits.to_le_bytes());
                    from_bits(BF16, bits)
                }
                KvType::E4m3 => {
                    let code = (rng.bits() >> 40) as u8 & 0xbf; // below 2, zeros and subnormals too
                    self.bytes[i] = code;
                    e4m3(code) * scale * 0.5
                }
                KvType::Int8 => {
                    let code =
                        if rng.below(97) == 0 { -128 } else { (x * 40.0).round().clamp(-127.0, 127.0) as i8 };
                    self.bytes[i] = code as u8;
                    f32::from(code) * scale * 2f32.powi(-6)
                }
                KvType::Int4 => {
                    let code = (x * 2.5).round().clamp(-8.0, 7.0);
                    let nibble = (code as i8 as u8 & 0x0f) << (4 * (i % 2));
                    let kept = if i % 2 == 0 { 0xf0 } else { 0x0f };
                    self.bytes[i / 2] = self.bytes[i / 2] & kept | nibble;
                    code * scale * 0.25
                }
            };
        }
    }

    /// The scales as the device takes them: the codes' own unit folded in, NaN where no sequence is.
    fn device_scales(&self, c: &Case, used: &[bool]) -> Vec<f32> {
        let unit = match c.kv {
            KvType::Bf16 => 1.0,
            KvType::E4m3 => 0.5,
            KvType::Int8 => 2f32.powi(-6),
            KvType::Int4 => 0.25,
        };
        let poisoned = |i: usize| !c.scale_a_head && !used[i / c.num_kv_heads];
        self.scales.iter().enumerate().map(|(i, s)| if poisoned(i) { f32::NAN } else { s * unit }).collect()
    }
}

/// A cache on the host; unused table entries are hostile.
pub struct Cache {
    pub case: Case,
    q: Vec<f32>,
    k: Stored,
    v: Stored,
    used: Vec<bool>, // slots
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    table: Vec<i32>,
    pub pages_max: usize,
    num_pages: usize,
}

impl Cache {
    pub fn new(case: &Case, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let pages_max = case.lens.iter().map(|n| n.div_ceil(case.page_size)).max().unwrap_or(0) + 2;
        let used: usize = case.lens.iter().map(|n| n.div_ceil(case.page_size)).sum();
        let num_pages = used + 5;
        let mut ids: Vec<i32> = (0..num_pages as i32).collect();
        for i in (1..ids.len()).rev() {
            ids.swap(i, rng.below(i + 1));
        }
        let slots = num_pages * case.page_size;
        let (mut k, mut v) = (Stored::new(case, slots, &mut rng), Stored::new(case, slots, &mut rng));
        let normals: Vec<f32> = (0..1 << 14).map(|_| rng.normal()).collect();
        let mut used = vec![false; slots];
        let mut table = vec![i32::MAX; case.lens.len() * pages_max];
        let mut next = ids.into_iter();
        for (b, &len) in case.lens.iter().enumerate() {
            for t in 0..len {
                let entry = b * pages_max + t / case.page_size;
                let shared = t / case.page_size < case.shared_pages && b > 0;
                if t % case.page_size == 0 {
                    table[entry] = match shared {
                        true => table[t / case.page_size],
                        false => next.next().expect("enough pages"),
                    };
                }
                if shared {
                    continue;
                }
                let slot = table[entry] as usize * case.page_size + t % case.page_size;
                used[slot] = true;
                for row in slot * case.num_kv_heads..(slot + 1) * case.num_kv_heads {
                    k.fill_row(case, row, &normals, &mut rng);
                    v.fill_row(case, row, &normals, &mut rng);
                }
            }
        }
        let q = (0..case.lens.len() * case.seqlen_q * case.num_q_heads * case.dim)
            .map(|_| from_bits(BF16, to_bits(BF16, rng.normal())))
            .collect();
        let slopes = (0..case.num_q_heads).map(|h| 2f32.powf(-(h as f32 + 1.0) / 2.0)).collect();
        let sinks = (0..case.num_q_heads).map(|_| 2.0 * rng.normal()).collect();
        Self { case: case.clone(), q, k, v, used, slopes, sinks, table, pages_max, num_pages }
    }

    pub fn q(&self) -> &[f32] {
        &self.q
    }

    pub fn q_mut(&mut self) -> &mut [f32] {
        &mut self.q
    }

    pub fn k_values(&self) -> &[f32] {
        &self.k.values
    }

    pub fn k_values_mut(&mut self) -> &mut [f32] {
        &mut self.k.values
    }

    pub fn v_values(&self) -> &[f32] {
        &self.v.values
    }

    /// Where a head's K and V begin among the elements of all pages.
    pub fn at(&self, b: usize, token: usize, head: usize) -> usize {
        let c = &self.case;
        let page = self.table[b * self.pages_max + token / c.page_size] as usize;
        ((page * c.page_size + token % c.page_size) * c.num_kv_heads + head) * c.dim
    }

    /// The oracle (f64) and plain attention that rounds scores, probabilities and o to bf16, for query row `n` of lengths `lens`.
    fn reference(&self, lens: &[usize], n: usize) -> RowResult {
        let c = &self.case;
        let (token, head) = (n / c.num_q_heads, n % c.num_q_heads);
        let (b, i) = (token / c.seqlen_q, token % c.seqlen_q);
        let kv = head / (c.num_q_heads / c.num_kv_heads);
        let round = |x: f64| f64::from(from_bits(BF16, to_bits(BF16, x as f32)));
        let end = (lens[b] + i + 1).saturating_sub(c.seqlen_q).min(lens[b]);
        let start = c.extras.left.map_or(0, |l| end.saturating_sub(l + 1));
        let q = &self.q[n * c.dim..(n + 1) * c.dim];
        let scale = 1.0 / (c.dim as f64).sqrt();
        let score = |j: usize| {
            let k = &self.k.values[self.at(b, j, kv)..][..c.dim];
            let x = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * scale;
            let x = c.extras.softcap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh());
            if c.extras.slopes { x - f64::from(self.slopes[head]) * (end - 1 - j) as f64 } else { x }
        };
        let scores: Vec<f64> = (start..end).map(score).collect();
        let sink = if c.extras.sinks { f64::from(self.sinks[head]) } else { f64::NEG_INFINITY };
        if scores.is_empty() {
            return RowResult { oracle: vec![0.0; c.dim], lse: sink, plain: vec![0.0; c.dim] };
        }
        let weigh = |s: &[f64]| {
            let max = s.iter().copied().fold(sink, f64::max);
            let p: Vec<f64> = s.iter().map(|x| (x - max).exp()).collect();
            let sum = p.iter().sum::<f64>() + (sink - max).exp();
            (p.iter().map(|x| x / sum).collect::<Vec<f64>>(), max + sum.ln())
        };
        let mix = |p: &[f64]| {
            let mut o = vec![0.0; c.dim];
            for (j, w) in p.iter().enumerate() {
                for (x, v) in o.iter_mut().zip(&self.v.values[self.at(b, start + j, kv)..][..c.dim]) {
                    *x += w * f64::from(*v);
                }
            }
            o
        };
        let (p, lse) = weigh(&scores);
        let (plain, _) = weigh(&scores.iter().map(|x| round(*x)).collect::<Vec<f64>>());
        let plain = mix(&plain.into_iter().map(round).collect::<Vec<f64>>());
        RowResult { oracle: mix(&p), lse, plain: plain.into_iter().map(round).collect() }
    }

    /// What every query row should be at lengths `lens`, worked out on all cores.
    pub fn references(&self, lens: &[usize]) -> Vec<RowResult> {
        let n = lens.len() * self.case.seqlen_q * self.case.num_q_heads;
        let rows: Vec<OnceLock<RowResult>> = (0..n).map(|_| OnceLock::new()).collect();
        parallel_rows(n, |i, _| {
            rows[i].get_or_init(|| self.reference(lens, i));
        });
        rows.into_iter().map(|r| r.into_inner().expect("every row was worked out")).collect()
    }

    /// Errors of a launch's results against `exact`.
    pub fn check(&self, exact: &[RowResult], out: &Output) -> Errors {
        let c = &self.case;
        let total_q = exact.len() / c.num_q_heads;
        parallel_rows(exact.len(), |n, errors| {
            let ours: Vec<f32> =
                out.o[n * c.dim..(n + 1) * c.dim].iter().map(|v| from_bits(BF16, *v)).collect();
            let lse = out.lse[n % c.num_q_heads * total_q + n / c.num_q_heads];
            errors.add_row(BF16, &ours, lse, &exact[n]);
        })
    }
}

/// What a launch wrote.
#[derive(PartialEq)]
pub struct Output {
    pub o: Vec<u16>,   // [total_q, num_q_heads, dim]
    pub lse: Vec<f32>, // [num_q_heads, total_q]
}

/// The cache on the device and its launch.
pub struct Device {
    pub launch: Decode,
    pub plan: Plan,
    o: Buffer,
    lse: Buffer,
    pub lens: Buffer,
    pub k: Buffer,
    pub v: Buffer,
    q: Buffer,
    partial: Buffer,
    _held: Vec<Buffer>,
}

pub fn upload(gpu: &Gpu, x: &Cache) -> Result<Device, Error> {
    let c = &x.case;
    let q: Vec<u16> = x.q.iter().map(|f| to_bits(BF16, *f)).collect();
    let q = Buffer::from_slice(gpu, &q)?;
    let (k, v) = (Buffer::from_slice(gpu, &x.k.bytes)?, Buffer::from_slice(gpu, &x.v.bytes)?);
    let scales = |s: &Stored| Buffer::from_slice(gpu, &s.device_scales(c, &x.used));
    let (k_scales, v_scales) = (scales(&x.k)?, scales(&x.v)?);
    let (slopes, sinks) = (Buffer::from_slice(gpu, &x.slopes)?, Buffer::from_slice(gpu, &x.sinks)?);
    let table = Buffer::from_slice(gpu, &x.table)?;
    let lens = Buffer::from_slice(gpu, &c.lens.iter().map(|n| *n as i32).collect::<Vec<i32>>())?;
    let o = Buffer::new(gpu, x.q.len() * 2)?;
    let lse = Buffer::new(gpu, c.lens.len() * c.seqlen_q * c.num_q_heads * 4)?;
    let row = (c.num_kv_heads * c.dim) as u64;
    let heads = c.num_kv_heads as u64;
    let pages = |b: &Buffer, s: &Buffer| Pages {
        address: b.address,
        page_stride: c.page_size as u64 * row,
        token_stride: row,
        head_stride: c.dim as u64,
        scales: match c.kv {
            KvType::Bf16 => Scales::default(),
            _ => Scales {
                address: s.address,
                page_stride: if c.scale_a_head { 0 } else { c.page_size as u64 * heads },
                token_stride: if c.scale_a_head { 0 } else { heads },
                head_stride: 1,
            },
        },
    };
    let launch = Decode {
        q: Operand {
            address: q.address,
            token_stride: (c.num_q_heads * c.dim) as u64,
            head_stride: c.dim as u64,
        },
        k: pages(&k, &k_scales),
        v: pages(&v, &v_scales),
        kv_type: c.kv,
        o: o.address,
        lse: lse.address,
        seqlens_k: lens.address,
        page_table: table.address,
        partial: 0,
        num_pages: x.num_pages as u32,
        page_size: c.page_size as u32,
        pages_max: x.pages_max as u32,
        batch: c.lens.len() as u32,
        seqlen_q: c.seqlen_q as u32,
        num_q_heads: c.num_q_heads as u32,
        num_kv_heads: c.num_kv_heads as u32,
        head_dim: c.dim as u32,
        softmax_scale: 1.0 / (c.dim as f32).sqrt(),
        scores: Scores {
            softcap: c.extras.softcap,
            slopes: c.extras.slopes.then_some(slopes.address),
            left: c.extras.left.map(|l| l as u32),
            sinks: c.extras.sinks.then_some(sinks.address),
        },
        fused: Default::default(),
        batch_invariant: false,
    };
    let partial = Buffer::new(gpu, 0)?;
    let held = vec![k_scales, v_scales, slopes, sinks, table];
    let mut device =
        Device { launch, plan: launch.plan(gpu.num_sms), o, lse, lens, k, v, q, partial, _held: held };
    device.use_plan(gpu, device.plan)?;
    Ok(device)
}

impl Device {
    /// Gives the launch other queries.
    pub fn write_q(&self, q: &[f32]) -> Result<(), Error> {
        self.q.write(0, &q.iter().map(|f| to_bits(BF16, *f)).collect::<Vec<u16>>())
    }

    /// Runs `plan` from now on, with a workspace of its own.
    pub fn use_plan(&mut self, gpu: &Gpu, plan: Plan) -> Result<(), Error> {
        gpu.synchronize()?;
        self.partial = Buffer::new(gpu, self.launch.partial_bytes(plan, gpu.num_sms) as usize)?;
        self.partial.fill(gpu, u32::MAX)?;
        self.launch.partial = self.partial.address;
        self.plan = plan;
        Ok(())
    }

    pub fn run(&self, gpu: &Gpu, f: impl FnOnce() -> Result<(), Error>) -> Result<Output, Error> {
        let rows = (self.launch.batch * self.launch.seqlen_q * self.launch.num_q_heads) as usize;
        self.o.fill(gpu, 0x7fff_7fff)?;
        self.lse.fill(gpu, 0x7fc0_0000)?;
        f()?;
        gpu.synchronize()?;
        Ok(Output { o: self.o.read(0, rows * self.launch.head_dim as usize)?, lse: self.lse.read(0, rows)? })
    }

    pub fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        // SAFETY: `upload` made every buffer to the launch's shape and `use_plan` the workspace; callers synchronise.
        unsafe { self.launch.launch(gpu, self.plan) }
    }

    pub fn once(&self, gpu: &Gpu) -> Result<Output, Error> {
        self.run(gpu, || self.launch(gpu))
    }

    /// Results of sequence `b` in a launch of its own.
    pub fn alone(&self, gpu: &Gpu, b: usize) -> Result<Output, Error> {
        let d = &self.launch;
        let b = b as u64;
        let tokens = b * u64::from(d.seqlen_q);
        let one = Decode {
            q: Operand { address: d.q.address + tokens * d.q.token_stride * 2, ..d.q },
            seqlens_k: d.seqlens_k + 4 * b,
            page_table: d.page_table + 4 * b * u64::from(d.pages_max),
            batch: 1,
            ..*d
        };
        let rows = (d.seqlen_q * d.num_q_heads) as usize;
        // SAFETY: as in `launch`; one sequence needs a part of every buffer.
        self.run(gpu, || unsafe { one.launch(gpu, one.plan(gpu.num_sms)) })?;
        Ok(Output { o: self.o.read(0, rows * d.head_dim as usize)?, lse: self.lse.read(0, rows)? })
    }
}
