//! The buffers of a row of the bench, and its answer held against the oracle on sampled rows.

use suanpan_attn::reference::{self, Spec};
use suanpan_attn::{KvLayout, Limits, Problem, Strides};
use suanpan_base::{Buf, DType, HeadShape, ScaleGrain, SeqLen};
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::append::AppendRows;
use suanpan_cuda::attention::decode::{self, KvType, Pages};
use suanpan_cuda::attention::forward::Paged;
use suanpan_cuda::driver::{Gpu, Memory};
use suanpan_cuda::plan::{Args, Device, Extras, KeyCodes, Plan, Scales, Slower, View};
use suanpan_cuda::testing::{Rng, from_bits};
use suanpan_cuda::{Dtype, Error};

/// A scale a head of numbers of unit spread: nothing of theirs is past the type's range.
const HEAD_SCALE: f32 = 6.0 / 448.0;

/// K or V.
struct Stored {
    /// `[slots, num_kv_heads, head_dim]` of the stored type; contiguous rows are slots in order.
    numbers: Memory,
    /// f32, `[slots, num_kv_heads]` or `[num_kv_heads]`; empty where there are none.
    scales: Memory,
    /// What `append` puts there, in bf16 and in order; empty where nothing is appended.
    rows: Memory,
}

/// The buffers of a row.
pub(super) struct Subject {
    pub(super) plan: Plan,
    pub(super) batch: usize,
    pub(super) len: SeqLen,
    page_size: Option<usize>,
    table: Vec<u32>,
    device_table: Memory,
    lens_k: Memory,
    q: Memory,
    k: Stored,
    v: Stored,
    out: Memory,
    lse: Memory,
}

/// The stored type as kernels name it, where `append` fills its pages.
fn appended(p: &Problem) -> Option<KvType> {
    match p.kv_dtype {
        DType::E4m3 => Some(KvType::E4m3),
        DType::I8 => Some(KvType::Int8),
        DType::I4 => Some(KvType::Int4),
        _ => None,
    }
}

fn normal(gpu: &Gpu, elements: usize, seed: u64) -> Result<Memory, Error> {
    let memory = Memory::new(gpu, elements * 2)?;
    memory.fill_normal(gpu, seed, Dtype::Bf16)?;
    Ok(memory)
}

/// Room for `slots` tokens of K or V: normal numbers, or codes to be appended from such.
fn stored(gpu: &Gpu, p: &Problem, (slots, tokens): (usize, usize), seed: u64) -> Result<Stored, Error> {
    let heads = p.heads.num_kv_heads;
    let row = heads * p.heads.head_dim_qk;
    let none = || Memory::new(gpu, 0);
    if appended(p).is_none() {
        return Ok(Stored { numbers: normal(gpu, slots * row, seed)?, scales: none()?, rows: none()? });
    }
    let scales = match p.kv_scales {
        ScaleGrain::Head => Memory::from_slice(gpu, &vec![HEAD_SCALE; heads])?,
        _ => Memory::new(gpu, slots * heads * 4)?,
    };
    let numbers = Memory::new(gpu, p.kv_dtype.bytes_of(slots * row))?;
    Ok(Stored { numbers, scales, rows: normal(gpu, tokens * row, seed)? })
}

fn view(m: &Memory, bits: usize) -> View {
    View { address: m.address, elements: (m.bytes * 8 / bits) as u64 }
}

impl Subject {
    pub(super) fn new(gpu: &Gpu, problem: &Problem, batch: usize, len: SeqLen) -> Result<Subject, Error> {
        let limits =
            Limits { max_seqs: batch, max_total_q: batch * len.seqlen_q, max_seqlen_k: len.seqlen_k };
        let mut plan = Plan::new(problem, Device { num_sms: gpu.num_sms }, limits, Slower::Refuse)?;
        plan.schedule(&vec![len; batch])?;
        let h = problem.heads;
        let page_size = match problem.kv {
            KvLayout::Contiguous => None,
            KvLayout::Paged { page_size } => Some(page_size),
        };
        let pages = page_size.map_or(0, |p| batch * len.seqlen_k.div_ceil(p));
        let mut table: Vec<u32> = (0..pages as u32).collect();
        let mut rng = Rng::new(3);
        (1..pages).rev().for_each(|i| table.swap(i, rng.below(i + 1)));
        let slots = page_size.map_or(batch * len.seqlen_k, |p| pages * p);
        let kv = |seed| stored(gpu, problem, (slots, batch * len.seqlen_k), seed);
        let rows = batch * len.seqlen_q * h.num_q_heads;
        let out = Memory::new(gpu, rows * h.head_dim_v * 2)?;
        out.fill(gpu, 0x7fff_7fff)?;
        Ok(Subject {
            plan,
            batch,
            len,
            page_size,
            device_table: Memory::from_slice(gpu, &table)?,
            lens_k: Memory::from_slice(gpu, &vec![len.seqlen_k as i32; batch])?,
            table,
            q: normal(gpu, rows * h.head_dim_qk, 1)?,
            k: kv(2)?,
            v: kv(3)?,
            out,
            lse: Memory::new(gpu, rows * 4)?,
        })
    }

    /// Strides of K and V, and of their scales, in elements.
    fn strides(&self) -> (Strides, Strides) {
        let p = self.plan.problem();
        let page = self.page_size.unwrap_or(0);
        let of = |head: usize| {
            let token = p.heads.num_kv_heads * head;
            Strides { token, head, page: token * page }
        };
        let scales = match p.kv_scales {
            ScaleGrain::Head => Strides { head: 1, ..Strides::default() },
            _ => of(1),
        };
        (of(p.heads.head_dim_qk), scales)
    }

    /// The launch that fills quantised pages; `None` where K and V are in 16 bits.
    pub(super) fn append(&self) -> Option<AppendRows> {
        let (p, h) = (self.plan.problem(), self.plan.problem().heads);
        let kv_type = appended(p)?;
        let page_size = self.page_size?;
        let (s, scale) = self.strides();
        let pages = |x: &Stored| Pages {
            address: x.numbers.address,
            page_stride: s.page as u64,
            token_stride: s.token as u64,
            head_stride: s.head as u64,
            scales: decode::Scales {
                address: x.scales.address,
                page_stride: scale.page as u64,
                token_stride: scale.token as u64,
                head_stride: scale.head as u64,
            },
        };
        let rows = |x: &Stored| Operand {
            address: x.rows.address,
            token_stride: s.token as u64,
            head_stride: s.head as u64,
        };
        Some(AppendRows {
            k: rows(&self.k),
            v: rows(&self.v),
            cache: Paged {
                k: pages(&self.k),
                v: pages(&self.v),
                page_table: self.device_table.address,
                pages_max: (self.table.len() / self.batch) as u32,
                num_pages: self.table.len() as u32,
                page_size: page_size as u32,
            },
            kv_type,
            seqlens_k: self.lens_k.address,
            cu_seqlens_q: None,
            tokens: (self.batch * self.len.seqlen_k) as u32,
            batch: self.batch as u32,
            num_kv_heads: h.num_kv_heads as u32,
            head_dim: h.head_dim_qk as u32,
            rotary: None,
        })
    }

    pub(super) fn args(&self) -> Args<'_> {
        let (p, h) = (self.plan.problem(), self.plan.problem().heads);
        let (strides, scale_strides) = self.strides();
        let numbers = |x: &Stored| view(&x.numbers, p.kv_dtype.bits());
        let scales =
            |x: &Stored| if p.kv_scales == ScaleGrain::None { View::default() } else { view(&x.scales, 32) };
        Args {
            q: view(&self.q, 16),
            q_strides: (h.num_q_heads * h.head_dim_qk, h.head_dim_qk),
            k: numbers(&self.k),
            k_strides: strides,
            v: numbers(&self.v),
            v_strides: strides,
            page_table: &self.table,
            page_table_stride: self.table.len() / self.batch.max(1),
            kv_scales: Scales { k: scales(&self.k), v: scales(&self.v), strides: scale_strides },
            key_codes: KeyCodes::default(),
            extras: Extras::default(),
            out: view(&self.out, 16),
            out_strides: (h.num_q_heads * h.head_dim_v, h.head_dim_v),
            lse: view(&self.lse, 32),
        }
    }

    /// What the rows of one kv head of sequence `seq` stand for, in f64.
    fn values(&self, x: &Stored, seq: usize, kv_head: usize) -> Result<Vec<f64>, Error> {
        let p = self.plan.problem();
        let (heads, d) = (p.heads.num_kv_heads, p.heads.head_dim_qk);
        let page = self.page_size.unwrap_or(self.len.seqlen_k);
        let per_seq = self.len.seqlen_k.div_ceil(page);
        let mut out = Vec::new();
        for at in 0..per_seq {
            let id = if self.page_size.is_some() { self.table[seq * per_seq + at] as usize } else { seq };
            let bytes = p.kv_dtype.bytes_of(page * heads * d);
            let (codes, signed): (Vec<u8>, Vec<i8>) =
                (x.numbers.read(id * bytes, bytes)?, x.numbers.read(id * bytes, bytes)?);
            let scales: Vec<f32> = match p.kv_scales {
                ScaleGrain::None => vec![1.0; page * heads],
                ScaleGrain::Head => x.scales.read::<f32>(0, heads)?.repeat(page),
                _ => x.scales.read(id * page * heads * 4, page * heads)?,
            };
            let number = |i: usize| match p.kv_dtype {
                DType::E4m3 => Buf::E4m3(&codes).get(i),
                DType::I8 => Buf::I8(&signed).get(i),
                DType::I4 => Buf::I4(&codes).get(i),
                _ => from_bits(Dtype::Bf16, u16::from_le_bytes([codes[2 * i], codes[2 * i + 1]])),
            };
            for t in 0..page.min(self.len.seqlen_k - at * page) {
                let row = t * heads + kv_head;
                let of = |c: usize| f64::from(number(row * d + c)) * f64::from(scales[row]);
                out.extend((0..d).map(of));
            }
        }
        Ok(out)
    }

    /// Largest error over a few rows of the first and the last sequence and head.
    pub(super) fn error(&self) -> Result<f64, Error> {
        let p = self.plan.problem();
        let (h, d) = (p.heads, p.heads.head_dim_qk);
        let one = HeadShape::new(1, 1, d);
        let spec = Spec::new(one, p.mask, f64::from(p.scale()));
        let mut worst = 0.0f64;
        for (seq, head) in [(0, 0), (self.batch - 1, h.num_q_heads - 1)] {
            let kv_head = head / h.group_size();
            let (k, v) = (self.values(&self.k, seq, kv_head)?, self.values(&self.v, seq, kv_head)?);
            for i in [0, self.len.seqlen_q / 2, self.len.seqlen_q - 1] {
                let at = ((seq * self.len.seqlen_q + i) * h.num_q_heads + head) * d * 2;
                let numbers = |m: &Memory| {
                    let bits: Vec<u16> = m.read(at, d)?;
                    Ok::<_, Error>(
                        bits.iter().map(|x| f64::from(from_bits(Dtype::Bf16, *x))).collect::<Vec<_>>(),
                    )
                };
                let mut q = vec![0.0; self.len.seqlen_q * d];
                q[i * d..(i + 1) * d].copy_from_slice(&numbers(&self.q)?);
                let mut o = vec![0.0; d];
                reference::attention_row_f64(&spec, self.len, i, 0, &q, &k, &v, &mut o);
                for (got, want) in numbers(&self.out)?.iter().zip(&o) {
                    let error = (got - want).abs();
                    // A NaN must not pass for a small error.
                    worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
                }
            }
        }
        Ok(worst)
    }
}
