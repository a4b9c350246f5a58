//! New keys and values into pages of every type: codes and scales are those of the CPU's quantiser bit by bit, keys turned before, and nothing
//! else in the pages changes; a decode that appends gives the bits of one that finds them there.
use suanpan_attn::quant::{Codes, Rows, quantize, scales_of};
use suanpan_base::{DType, ScaleGrain};
use suanpan_cuda::Error;
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::append::AppendRows;
use suanpan_cuda::attention::decode::{self, Fused, KvType, Pages, Rotary};
use suanpan_cuda::attention::forward::Paged;
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, Rng, from_bits, to_bits};

use crate::Report;
use crate::decode_cache::{BF16, Cache, Case, upload};
use crate::decode_fused::{angles, turn};
use crate::forward::prefix;

const POISON: u8 = 0x5a;
const SPARE_PAGES: usize = 3;

struct Shape {
    kv_type: KvType,
    dim: usize,
    heads: usize,
    page_size: usize,
    /// (new tokens, keys with them) of each sequence.
    lens: Vec<(usize, usize)>,
    rotary: Option<(usize, bool)>,
    /// Scales stand already, one a head.
    given: bool,
}

impl Shape {
    fn dtype(&self) -> DType {
        match self.kv_type {
            KvType::Bf16 => DType::Bf16,
            KvType::E4m3 => DType::E4m3,
            KvType::Int8 => DType::I8,
            KvType::Int4 => DType::I4,
        }
    }

    fn name(&self) -> String {
        let rotary =
            self.rotary.map_or(String::new(), |(n, pairs)| format!(", {n} turned, neighbours {pairs}"));
        let given = if self.given { ", scales given" } else { "" };
        format!(
            "append {} d{} {} heads, pages of {}, {} sequences{rotary}{given}",
            self.kv_type.name(),
            self.dim,
            self.heads,
            self.page_size,
            self.lens.len()
        )
    }

    fn row_bytes(&self) -> usize {
        self.dim * self.kv_type.bits() as usize / 8
    }
}

/// Codes and scales of one row as the host makes them.
fn on_host(s: &Shape, x: &[f32], given: f32) -> (Vec<u8>, f32) {
    if s.kv_type == KvType::Bf16 {
        return (x.iter().flat_map(|x| to_bits(BF16, *x).to_le_bytes()).collect(), 0.0);
    }
    let rows = Rows { x, num_kv_heads: 1, head_dim: s.dim, page_size: 1 };
    let grain = ScaleGrain::Token;
    let scales =
        if s.given { vec![given] } else { scales_of(&rows, s.dtype(), grain).expect("finite numbers") };
    let codes = match quantize(&rows, s.dtype(), grain, &scales).expect("finite numbers").0 {
        Codes::E4m3(x) | Codes::I4(x) => x,
        Codes::I8(x) => x.into_iter().map(|x| x as u8).collect(),
        other => panic!("{other:?}"),
    };
    (codes, scales[0])
}

/// Page ids of each sequence in a mixed order, and the table with hostile ids where no key is.
fn table(s: &Shape, rng: &mut Rng) -> (Vec<i32>, usize, usize) {
    let pages_max = s.lens.iter().map(|l| l.1.div_ceil(s.page_size)).max().unwrap_or(0) + 1;
    let num_pages = s.lens.iter().map(|l| l.1.div_ceil(s.page_size)).sum::<usize>() + SPARE_PAGES;
    let mut ids: Vec<i32> = (0..num_pages as i32).collect();
    for i in (1..ids.len()).rev() {
        ids.swap(i, rng.below(i + 1));
    }
    let mut table = vec![i32::MIN; s.lens.len() * pages_max];
    let mut next = ids.into_iter();
    for (b, len) in s.lens.iter().enumerate() {
        for page in 0..len.1.div_ceil(s.page_size) {
            table[b * pages_max + page] = next.next().expect("enough pages");
        }
    }
    (table, pages_max, num_pages)
}

/// A shape's numbers, and what its pages should become.
struct Host {
    table: Vec<i32>,
    pages_max: usize,
    num_pages: usize,
    /// Rows of k and of v.
    new: [Vec<Vec<u16>>; 2],
    cos: Vec<f32>,
    sin: Vec<f32>,
    blank_scales: Vec<f32>,
    /// Bytes and scales of k and of v.
    want: [(Vec<u8>, Vec<f32>); 2],
}

impl Host {
    fn new(s: &Shape) -> Host {
        let mut rng = Rng::new(31);
        let (table, pages_max, num_pages) = table(s, &mut rng);
        let (slots, tokens) = (num_pages * s.page_size, s.lens.iter().map(|l| l.0).sum::<usize>());
        let mut draw = || -> Vec<u16> {
            let size = 2f32.powi(rng.below(12) as i32 - 6);
            (0..s.dim).map(|_| to_bits(BF16, rng.normal() * size)).collect()
        };
        let new = [0; 2].map(|_| (0..tokens * s.heads).map(|_| draw()).collect());
        let longest = s.lens.iter().map(|l| l.1).max().unwrap_or(1);
        let (cos, sin) = s.rotary.map_or((vec![0.0; 4], vec![0.0; 4]), |(n, _)| angles(longest, n));
        let given = (0..s.heads).map(|h| 0.01 * (h + 1) as f32).collect();
        let blank_scales = if s.given { given } else { vec![f32::NAN; slots * s.heads] };
        let blank = || (vec![POISON; slots * s.heads * s.row_bytes()], blank_scales.clone());
        let want = [blank(), blank()];
        let mut host = Host { table, pages_max, num_pages, new, cos, sin, blank_scales, want };
        host.append(s);
        host
    }

    fn append(&mut self, s: &Shape) {
        let (row, mut token) = (s.row_bytes(), 0);
        for (b, &(new_tokens, keys)) in s.lens.iter().enumerate() {
            for position in keys - new_tokens..keys {
                let page = self.table[b * self.pages_max + position / s.page_size] as usize;
                let slot = page * s.page_size + position % s.page_size;
                for (which, head) in (0..2 * s.heads).map(|i| (i / s.heads, i % s.heads)) {
                    let bits = &self.new[which][token * s.heads + head];
                    let mut x: Vec<f32> = bits.iter().map(|x| from_bits(BF16, *x)).collect();
                    if let (0, Some((n, pairs))) = (which, s.rotary) {
                        turn(&mut x, n, pairs, position, &self.cos, &self.sin);
                    }
                    let (codes, scale) = on_host(s, &x, self.blank_scales[head]);
                    let (bytes, scales) = &mut self.want[which];
                    bytes[(slot * s.heads + head) * row..][..row].copy_from_slice(&codes);
                    if s.kv_type != KvType::Bf16 && !s.given {
                        scales[slot * s.heads + head] = scale;
                    }
                }
                token += 1;
            }
        }
    }
}

/// The same on the device.
struct OnDevice {
    pools: [Buffer; 2],
    scales: [Buffer; 2],
    launch: AppendRows,
    _held: Vec<Buffer>,
}

fn two<T>(make: impl Fn(usize) -> Result<T, Error>) -> Result<[T; 2], Error> {
    Ok([make(0)?, make(1)?])
}

fn upload_rows(gpu: &Gpu, s: &Shape, host: &Host) -> Result<OnDevice, Error> {
    let (dim, heads, page) = (s.dim as u64, s.heads as u64, s.page_size as u64);
    let pools = two(|i| Buffer::from_slice(gpu, &vec![POISON; host.want[i].0.len()]))?;
    let scales = two(|_| Buffer::from_slice(gpu, &host.blank_scales))?;
    let rows = two(|i| Buffer::from_slice(gpu, &host.new[i].concat()))?;
    let cu = Buffer::from_slice(gpu, &prefix(s.lens.iter().map(|l| l.0)))?;
    let lens = Buffer::from_slice(gpu, &s.lens.iter().map(|l| l.1 as i32).collect::<Vec<i32>>())?;
    let table = Buffer::from_slice(gpu, &host.table)?;
    let (cos, sin) = (Buffer::from_slice(gpu, &host.cos)?, Buffer::from_slice(gpu, &host.sin)?);
    let quantised = s.kv_type != KvType::Bf16;
    let pages = |i: usize| Pages {
        address: pools[i].address,
        page_stride: page * heads * dim,
        token_stride: heads * dim,
        head_stride: dim,
        scales: decode::Scales {
            address: if quantised { scales[i].address } else { 0 },
            page_stride: if s.given { 0 } else { page * heads },
            token_stride: if s.given { 0 } else { heads },
            head_stride: 1,
        },
    };
    let operand = |b: &Buffer| Operand { address: b.address, token_stride: heads * dim, head_stride: dim };
    let launch = AppendRows {
        k: operand(&rows[0]),
        v: operand(&rows[1]),
        cache: Paged {
            k: pages(0),
            v: pages(1),
            page_table: table.address,
            pages_max: host.pages_max as u32,
            num_pages: host.num_pages as u32,
            page_size: s.page_size as u32,
        },
        kv_type: s.kv_type,
        seqlens_k: lens.address,
        cu_seqlens_q: Some(cu.address),
        tokens: s.lens.iter().map(|l| l.0 as u32).sum(),
        batch: s.lens.len() as u32,
        num_kv_heads: s.heads as u32,
        head_dim: s.dim as u32,
        rotary: s.rotary.map(|(n, interleaved)| Rotary {
            dim: n as u32,
            interleaved,
            cos: cos.address,
            sin: sin.address,
        }),
    };
    let held = rows.into_iter().chain([cu, lens, table, cos, sin]).collect();
    Ok(OnDevice { pools, scales, launch, _held: held })
}

fn one(gpu: &Gpu, report: &mut Report, s: &Shape) -> Result<(), Error> {
    let host = Host::new(s);
    let device = upload_rows(gpu, s, &host)?;
    // SAFETY: the buffers cover the shapes and outlive the synchronisation; every page belongs to one sequence.
    unsafe { device.launch.launch(gpu)? };
    gpu.synchronize()?;
    let mut off = [0usize; 2];
    for (i, (bytes, scales)) in host.want.iter().enumerate() {
        let got: Vec<u8> = device.pools[i].read(0, bytes.len())?;
        off[0] += got.iter().zip(bytes).filter(|(a, b)| a != b).count();
        let got: Vec<f32> = device.scales[i].read(0, scales.len())?;
        off[1] += got.iter().zip(scales).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    }
    report.line(off == [0, 0], &s.name(), format!("{} bytes and {} scales off", off[0], off[1]));
    let zeros = vec![0u8; host.want[0].0.len()];
    device.pools[0].write(0, &zeros)?;
    // SAFETY: as above.
    unsafe {
        AppendRows { cache: Paged { num_pages: 0, ..device.launch.cache }, ..device.launch }.launch(gpu)?
    };
    gpu.synchronize()?;
    let same = device.pools[0].read::<u8>(0, zeros.len())? == zeros;
    report.line(same, &format!("{}: nothing is written past the last page", s.name()), String::new());
    Ok(())
}

/// A decode over quantised pages that puts its own keys and values there gives the bits of one that finds them.
fn test_decode(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    for kv in [KvType::E4m3, KvType::Int8, KvType::Int4] {
        for (dim, seqlen_q) in [(64, 1), (128, 1), (128, 4), (256, 2)] {
            let c = Case { dim, kv, seqlen_q, lens: vec![9, 64, 65, 700, 8, 2111], ..Case::default() };
            let x = Cache::new(&c, 17);
            let mut device = upload(gpu, &x)?;
            let elements = c.lens.len() * seqlen_q * c.num_kv_heads * dim;
            let (k, v) = (Buffer::new(gpu, 2 * elements)?, Buffer::new(gpu, 2 * elements)?);
            k.fill_normal(gpu, 3, BF16)?;
            v.fill_normal(gpu, 4, BF16)?;
            let (cos, sin) = angles(2200, dim);
            let (cos, sin) = (Buffer::from_slice(gpu, &cos)?, Buffer::from_slice(gpu, &sin)?);
            let rotary = Rotary { dim: dim as u32, interleaved: false, cos: cos.address, sin: sin.address };
            let there = Fused { rotary: Some(rotary), ..Fused::default() };
            let before = device.once(gpu)?;
            device.launch.fused =
                Fused { append: Some(decode::Append { k: k.address, v: v.address }), ..there };
            let appended = device.once(gpu)?;
            device.launch.fused = there;
            let found = device.once(gpu)?;
            let name = format!("decode {} d{dim}, {seqlen_q} tokens appended by the launch", kv.name());
            report.line(appended == found && appended != before, &name, String::new());
        }
    }
    Ok(())
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    for kv_type in [KvType::Bf16, KvType::E4m3, KvType::Int8, KvType::Int4] {
        for (dim, heads, page_size) in [(64, 3, 16), (128, 8, 16), (128, 1, 48), (256, 2, 64)] {
            for rotary in [None, Some((dim, false)), Some((dim, true)), Some((dim / 2, false))] {
                let lens = vec![(1, 1), (5, 5), (0, 33), (17, 40), (1, 700), (64, 64), (130, 1031)];
                let shape = Shape { kv_type, dim, heads, page_size, lens, rotary, given: false };
                one(gpu, report, &shape)?;
                if kv_type != KvType::Bf16 && rotary.is_none() {
                    one(gpu, report, &Shape { given: true, ..shape })?;
                }
                if report.small {
                    break;
                }
            }
        }
    }
    test_decode(gpu, report)
}
