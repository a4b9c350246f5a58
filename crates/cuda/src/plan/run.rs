//! One call on the device: check everything, copy lengths and page ids over, put the kernel on the stream.

use suanpan_attn::{BiasStrides, DropoutKey, KvLayout, Problem, Strides};
use suanpan_base::{BadArgument, DType, ScaleGrain};

use super::{Choice, Kernel, Plan};
use crate::attention::Operand;
use crate::attention::decode::{self, Decode, KvType, Pages};
use crate::attention::forward::{self, Forward, KeysValues, Paged, Splits, Tree};
use crate::attention::forward_fp8::ForwardFp8;
use crate::attention::quantise::{Grain, Quantise};
use crate::attention::unpack::Unpack;
use crate::driver::{Address, Gpu, Memory};
use crate::{Dtype, Error};

const OP: &str = "cuda attention run";

fn refuse<T>(
    field: impl Into<String>,
    asked: impl std::fmt::Display,
    supported: impl Into<String>,
) -> Result<T, Error> {
    Err(BadArgument::new(OP, field, asked, supported.into()).into())
}

/// A flat buffer on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Of the first element.
    pub address: Address,
    /// Elements from there on.
    pub elements: u64,
}

/// Scales of K and V on the device, f32; strides as in `suanpan_attn::KvScales`, the same for both.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scales {
    /// Scales of keys.
    pub k: View,
    /// Scales of values.
    pub v: View,
    /// In elements; only those that the problem's grain has are looked at.
    pub strides: Strides,
}

/// A bias on the device, as `suanpan_attn::Bias`.
#[derive(Clone, Copy, Debug)]
pub struct Bias {
    /// f32 numbers.
    pub values: View,
    /// Where each one is.
    pub strides: BiasStrides,
}

/// What a call brings beside q, k and v, as `suanpan_attn::Extras`, in device memory. What the problem does not ask for must be absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// `[num_q_heads]` f32.
    pub alibi_slopes: Option<View>,
    /// `[num_q_heads]` f32.
    pub sinks: Option<View>,
    /// Numbers added to scores.
    pub bias: Option<Bias>,
    /// `[total_q, row_words]` u64 as in `suanpan_attn::TreeMask`, and `row_words`.
    pub tree: Option<(View, usize)>,
    /// What the dropped weights follow from.
    pub dropout: Option<DropoutKey>,
}

/// What `quantise` did to keys for the e4m3 forward, which does the same to q. Values are e4m3 as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyCodes {
    /// Turned by the Hadamard matrix first.
    pub rotated: bool,
    /// Integers of 8 bits instead of e4m3: less than half of its rounding where numbers are spread evenly, as rotation leaves them.
    pub int8: bool,
}

/// The buffers of one call, as `suanpan_attn::Args`, in device memory. The page table is on the host: ids are checked, then copied over.
#[derive(Clone, Copy, Debug)]
pub struct Args<'a> {
    /// Queries `[total_q, num_q_heads, head_dim_qk]`.
    pub q: View,
    /// (token, head) strides of `q`, in elements.
    pub q_strides: (usize, usize),
    /// Keys.
    pub k: View,
    /// Strides of `k`, in elements.
    pub k_strides: Strides,
    /// Values.
    pub v: View,
    /// Strides of `v`, in elements.
    pub v_strides: Strides,
    /// Page ids, one row a sequence; only ids of pages with a visible key are looked at. Empty when contiguous.
    pub page_table: &'a [u32],
    /// Ids from one row of `page_table` to the next.
    pub page_table_stride: usize,
    /// Scales of K and V.
    pub kv_scales: Scales,
    /// How keys were made for the e4m3 forward.
    pub key_codes: KeyCodes,
    /// What the problem asks for beside q, k and v.
    pub extras: Extras,
    /// Output `[total_q, num_q_heads, head_dim_v]` of q's type.
    pub out: View,
    /// (token, head) strides of `out`, in elements.
    pub out_strides: (usize, usize),
    /// `[num_q_heads, total_q]` f32, natural log; -inf where a row sees no key.
    pub lse: View,
}

/// Where things lie in a workspace, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    cu_q: u64,
    cu_k: u64,
    lens_k: u64,
    table: u64,
    scales: u64,
    codes: u64,
    parts: u64,
    rows: u64,
    partial: u64,
    pub(super) bytes: u64,
}

impl Layout {
    pub(super) fn of(plan: &Plan) -> Result<Layout, BadArgument> {
        let (p, l) = (&plan.problem, plan.limits);
        let seqs = l.max_seqs as u64;
        let fp8 = super::choose::fp8_shape(p).is_ok();
        let q_rows = if fp8 { l.max_total_q * p.heads.num_q_heads } else { 0 };
        let rows = if super::choose::unpacked(p).is_ok() { super::unpack::bytes(p, l) } else { 0 };
        let mut at = 256; // the counter of tiles comes first
        let mut take = |bytes: u64| {
            let start = at;
            at += bytes.next_multiple_of(256);
            start
        };
        let mut layout = Layout {
            cu_q: take(4 * (seqs + 1)),
            cu_k: take(4 * (2 * seqs + 1)), // of groups that each begin at 0
            lens_k: take(4 * seqs),
            table: take(4 * seqs * plan.pages_max() as u64),
            scales: take(4 * q_rows as u64),
            codes: take((q_rows * p.heads.head_dim_qk) as u64),
            parts: take(super::choose::forward_partial_bytes(p, plan.device, l.max_total_q)),
            rows: take(rows as u64),
            partial: 0,
            bytes: 0,
        };
        layout.partial = take(partial_bytes(plan));
        layout.bytes = at;
        Ok(layout)
    }
}

/// Most bytes of partial results of any batch within the limits.
fn partial_bytes(plan: &Plan) -> u64 {
    let p = &plan.problem;
    if super::choose::decode_type(p).is_err() {
        return 0;
    }
    // Layouts change with small batches only: past 1,024 sequences all are alike.
    let batches = (1..=plan.limits.max_seqs.min(1024)).chain([plan.limits.max_seqs]);
    let tokens = 1..=64 / p.heads.group_size();
    let bytes = |(batch, tokens): (usize, usize)| {
        let d = decode_shape(p, batch, tokens, plan.pages_max());
        d.partial_bytes(d.plan(plan.device.num_sms), plan.device.num_sms)
    };
    batches.flat_map(|b| tokens.clone().map(move |t| (b, t))).map(bytes).max().unwrap_or(0)
}

/// A decode without its buffers: enough for its layout.
pub(super) fn decode_shape(p: &Problem, batch: usize, tokens: usize, pages_max: usize) -> Decode {
    let page_size = match p.kv {
        KvLayout::Paged { page_size } => page_size as u32,
        KvLayout::Contiguous => 16,
    };
    let kv_type = super::choose::decode_type(p).unwrap_or(KvType::Bf16);
    let nowhere = Pages {
        address: 0,
        page_stride: 0,
        token_stride: 0,
        head_stride: 0,
        scales: decode::Scales::default(),
    };
    Decode {
        q: Operand { address: 0, token_stride: 0, head_stride: 0 },
        k: nowhere,
        v: nowhere,
        kv_type,
        o: 0,
        lse: 0,
        seqlens_k: 0,
        page_table: 0,
        partial: 0,
        num_pages: 0,
        page_size,
        pages_max: pages_max as u32,
        batch: batch as u32,
        seqlen_q: tokens as u32,
        num_q_heads: p.heads.num_q_heads as u32,
        num_kv_heads: p.heads.num_kv_heads as u32,
        head_dim: p.heads.head_dim_qk as u32,
        softmax_scale: p.scale(),
        scores: decode::Scores {
            softcap: p.scores.softcap.filter(|c| *c != 0.0),
            // An address that is never read: it only says that there are some.
            slopes: p.scores.alibi.then_some(4),
            left: p.mask.left.map(|n| n.min(super::choose::TOKENS_MAX) as u32),
            sinks: p.scores.sink.then_some(4),
        },
        fused: decode::Fused::default(),
        batch_invariant: false,
    }
}

/// Device memory of a plan's calls: counter, lengths, page ids, q in 8 bits, partial results. One per stream.
pub struct Workspace {
    memory: Memory,
}

impl Workspace {
    /// Room for every schedule of `plan`.
    pub fn new(gpu: &Gpu, plan: &Plan) -> Result<Workspace, Error> {
        let layout = plan.layout()?;
        let memory = Memory::new(gpu, layout.bytes as usize)?;
        // SAFETY: both ranges lie in the memory just allocated.
        unsafe {
            gpu.fill(memory.address, layout.partial / 4, 0)?;
            gpu.fill(memory.address + layout.partial, (layout.bytes - layout.partial) / 4, u32::MAX)?;
        }
        gpu.synchronize()?;
        Ok(Workspace { memory })
    }
}

/// A call whose lengths and page ids lie on the device: what a graph captures.
#[derive(Clone, Debug)]
pub struct Bound {
    launch: Launch,
}

#[derive(Clone, Debug)]
enum Launch {
    Nothing,
    Forward(Forward),
    /// One group of sequences after another.
    Unpacked(Vec<(Unpack, Forward)>),
    Fp8(Quantise, ForwardFp8),
    Decode(Decode, decode::Plan),
}

impl Bound {
    /// Checks the call and copies lengths and page ids over, in the stream's order.
    pub fn new(gpu: &Gpu, plan: &Plan, args: &Args<'_>, ws: &Workspace) -> Result<Bound, Error> {
        let Some(choice) = &plan.choice else { return refuse("schedule", "none", "a scheduled plan") };
        let layout = plan.layout()?;
        if (ws.memory.bytes as u64) < layout.bytes {
            return refuse(
                "workspace",
                ws.memory.bytes,
                format!("at least {}: made for this plan", layout.bytes),
            );
        }
        super::check::check(plan, args)?;
        if plan.seqs.iter().all(|s| s.seqlen_q == 0) {
            return Ok(Bound { launch: Launch::Nothing });
        }
        let call = Call { plan, args, base: ws.memory.address, layout };
        call.copy_lengths(gpu)?;
        let launch = match choice.kernel {
            Kernel::Forward { unpacks: Some(kv_type), .. } => call.unpacked(gpu, kv_type)?,
            Kernel::Forward { .. } => Launch::Forward(call.forward(call.q())),
            Kernel::ForwardFp8 { .. } => call.fp8(),
            Kernel::Decode(layout) => Launch::Decode(call.decode(), layout),
        };
        Ok(Bound { launch })
    }

    /// How many kernels [`Bound::launch`] puts on the stream.
    pub fn launches(&self) -> usize {
        let forward = |f: &Forward| 1 + usize::from(f.splits.is_some_and(|s| s.count > 1));
        match &self.launch {
            Launch::Nothing => 0,
            Launch::Forward(f) => forward(f),
            Launch::Unpacked(groups) => groups.iter().map(|(_, f)| 1 + forward(f)).sum(),
            Launch::Fp8(..) => 2,
            Launch::Decode(..) => 1,
        }
    }

    /// Puts the kernels on the device's stream.
    ///
    /// # Safety
    /// The views cover what they say until the stream has run the kernels, `out` and `lse` overlap nothing, and the plan was made for a
    /// device like this one. Scales, slopes and sinks are finite where the CPU's `run` asks for it.
    pub unsafe fn launch(&self, gpu: &Gpu) -> Result<(), Error> {
        // SAFETY: `new` checked shapes and ids; the caller vouches for the memory.
        unsafe {
            match &self.launch {
                Launch::Nothing => Ok(()),
                Launch::Forward(f) => f.launch(gpu),
                Launch::Unpacked(groups) => groups.iter().try_for_each(|(unpack, f)| {
                    unpack.launch(gpu)?;
                    f.launch(gpu)
                }),
                Launch::Fp8(q, f) => {
                    q.launch(gpu)?;
                    f.launch(gpu)
                }
                Launch::Decode(d, plan) => d.launch(gpu, *plan),
            }
        }
    }
}

/// Runs the plan's current schedule: [`Bound::new`], then [`Bound::launch`]. Results are there when the stream has run it.
///
/// # Safety
/// As [`Bound::launch`].
pub unsafe fn run(gpu: &Gpu, plan: &Plan, args: &Args<'_>, ws: &Workspace) -> Result<(), Error> {
    // SAFETY: the caller vouches for the memory.
    unsafe { Bound::new(gpu, plan, args, ws)?.launch(gpu) }
}

/// A checked call.
struct Call<'a> {
    plan: &'a Plan,
    args: &'a Args<'a>,
    base: Address,
    layout: Layout,
}

fn operand(x: View, (token, head): (usize, usize)) -> Operand {
    Operand { address: x.address, token_stride: token as u64, head_stride: head as u64 }
}

impl Call<'_> {
    fn copy_lengths(&self, gpu: &Gpu) -> Result<(), Error> {
        // SAFETY: the layout's ranges lie in the workspace, which this plan's calls alone use.
        let copy = |at: u64, host: &[i32]| unsafe { gpu.copy(self.base + at, host) };
        let seqs = &self.plan.seqs;
        let sums = |of: fn(&suanpan_base::SeqLen) -> usize| {
            let mut sum = 0;
            let mut out = vec![0i32];
            out.extend(seqs.iter().map(|s| {
                sum += of(s) as i32;
                sum
            }));
            out
        };
        copy(self.layout.cu_q, &sums(|s| s.seqlen_q))?;
        copy(self.layout.cu_k, &sums(|s| s.seqlen_k))?;
        copy(self.layout.lens_k, &seqs.iter().map(|s| s.seqlen_k as i32).collect::<Vec<_>>())?;
        let pages_max = self.plan.pages_max();
        if pages_max > 0 {
            let (from, stride) = (self.args.page_table, self.args.page_table_stride);
            let mut table = vec![0i32; seqs.len() * pages_max];
            for (row, ids) in table.chunks_mut(pages_max).zip(from.chunks(stride.max(1))) {
                row.iter_mut().zip(ids).for_each(|(to, id)| *to = *id as i32);
            }
            copy(self.layout.table, &table)?;
        }
        Ok(())
    }

    fn q(&self) -> Operand {
        operand(self.args.q, self.args.q_strides)
    }

    /// K or V as pages, with their scales.
    fn pages(&self, x: View, s: Strides, scales: View) -> Pages {
        let grain = self.plan.problem.kv_scales;
        let given = self.args.kv_scales.strides;
        let s_of = match grain {
            ScaleGrain::None | ScaleGrain::Tensor => Strides::default(),
            ScaleGrain::Head => Strides { head: given.head, ..Strides::default() },
            ScaleGrain::Token => given,
            ScaleGrain::Page => Strides { token: 0, ..given },
        };
        Pages {
            address: x.address,
            page_stride: s.page as u64,
            token_stride: s.token as u64,
            head_stride: s.head as u64,
            scales: decode::Scales {
                address: if grain == ScaleGrain::None { 0 } else { scales.address },
                page_stride: s_of.page as u64,
                token_stride: s_of.token as u64,
                head_stride: s_of.head as u64,
            },
        }
    }

    fn num_pages(&self) -> u32 {
        super::check::num_pages(self.plan, self.args).min(i32::MAX as usize) as u32
    }

    fn keys_values(&self) -> KeysValues {
        let (a, p) = (self.args, &self.plan.problem);
        match p.kv {
            KvLayout::Contiguous => KeysValues::Packed {
                k: operand(a.k, (a.k_strides.token, a.k_strides.head)),
                v: operand(a.v, (a.v_strides.token, a.v_strides.head)),
            },
            KvLayout::Paged { page_size } => KeysValues::Paged(self.paged(page_size)),
        }
    }

    fn paged(&self, page_size: usize) -> Paged {
        let a = self.args;
        Paged {
            k: self.pages(a.k, a.k_strides, a.kv_scales.k),
            v: self.pages(a.v, a.v_strides, a.kv_scales.v),
            page_table: self.base + self.layout.table,
            pages_max: self.plan.pages_max() as u32,
            num_pages: self.num_pages(),
            page_size: page_size as u32,
        }
    }

    /// How the chosen forward packs heads and cuts keys.
    fn packing(&self) -> (bool, Option<Splits>) {
        let Some(Choice { kernel: Kernel::Forward { pack_gqa, splits, function, .. }, .. }) =
            self.plan.choice
        else {
            return (false, None);
        };
        let partial = self.base + self.layout.parts;
        (pack_gqa, (function == "forward_more").then_some(Splits { count: splits, partial }))
    }

    fn forward(&self, q: Operand) -> Forward {
        let (a, p, seqs) = (self.args, &self.plan.problem, &self.plan.seqs);
        let total = |of: fn(&suanpan_base::SeqLen) -> usize| seqs.iter().map(of).sum::<usize>() as u32;
        let most = |of: fn(&suanpan_base::SeqLen) -> usize| seqs.iter().map(of).max().unwrap_or(0) as u32;
        let (x, (pack_gqa, splits)) = (&a.extras, self.packing());
        Forward {
            q,
            kv: self.keys_values(),
            o: operand(a.out, a.out_strides),
            lse: a.lse.address,
            counter: self.base,
            cu_seqlens_q: Some(self.base + self.layout.cu_q),
            cu_seqlens_k: Some(self.base + self.layout.cu_k),
            total_q: total(|s| s.seqlen_q),
            total_k: total(|s| s.seqlen_k),
            batch: seqs.len() as u32,
            seqlen_q_max: most(|s| s.seqlen_q),
            seqlen_k_max: most(|s| s.seqlen_k),
            num_q_heads: p.heads.num_q_heads as u32,
            num_kv_heads: p.heads.num_kv_heads as u32,
            head_dim: p.heads.head_dim_qk as u32,
            head_dim_v: p.heads.head_dim_v as u32,
            dtype: if p.q_dtype == DType::F16 { Dtype::Fp16 } else { Dtype::Bf16 },
            mask: p.mask,
            scores: forward::Scores {
                softcap: p.scores.softcap.filter(|c| *c != 0.0),
                bias: x.bias.map(|b| forward::Bias { address: b.values.address, strides: b.strides }),
                dropout: x
                    .dropout
                    .zip(p.scores.dropout)
                    .map(|(key, probability)| forward::Dropout { probability, key }),
                alibi_slopes: x.alibi_slopes.map(|v| v.address),
                sinks: x.sinks.map(|v| v.address),
            },
            // Two words of 32 bits a word of 64, the low one first.
            tree: x.tree.map(|(bits, words)| Tree { bits: bits.address, words: 2 * words as u32 }),
            softmax_scale: p.scale(),
            pack_gqa,
            splits,
        }
    }

    /// Each group's pages become rows in the workspace, which its forward reads: lengths and first keys of all groups are copied over.
    fn unpacked(&self, gpu: &Gpu, kv_type: KvType) -> Result<Launch, Error> {
        let (p, seqs) = (&self.plan.problem, &self.plan.seqs);
        let (heads, dim) = (p.heads.num_kv_heads, p.heads.head_dim_qk);
        let KvLayout::Paged { page_size } = p.kv else {
            return refuse("kv", p.kv, "pages of quantised numbers");
        };
        let cache = self.paged(page_size);
        let rows = [0, super::unpack::tokens_max(self.plan.limits)]
            .map(|token| self.base + self.layout.rows + (2 * token * heads * dim) as u64);
        let of_rows =
            |address| Operand { address, token_stride: (heads * dim) as u64, head_stride: dim as u64 };
        let whole = self.forward(self.q());
        let (mut launches, mut sums) = (Vec::new(), Vec::new());
        for group in super::unpack::groups(self.plan.limits, seqs) {
            let (first, cu_k) = (group.start as u64, self.base + self.layout.cu_k + 4 * sums.len() as u64);
            let mine = &seqs[group.clone()];
            sums.push(0i32);
            let tokens = mine.iter().fold(0, |sum, s| {
                sums.push(sum + s.seqlen_k as i32);
                sum + s.seqlen_k as i32
            }) as u32;
            let most = |of: fn(&suanpan_base::SeqLen) -> usize| mine.iter().map(of).max().unwrap_or(0) as u32;
            let page_table = cache.page_table + 4 * first * u64::from(cache.pages_max);
            let unpack = Unpack {
                cache: Paged { page_table, ..cache },
                kv_type,
                k: rows[0],
                v: rows[1],
                cu_seqlens_k: cu_k,
                starts: self.base + self.layout.lens_k + 4 * first,
                tokens,
                batch: mine.len() as u32,
                num_kv_heads: heads as u32,
                head_dim: dim as u32,
            };
            let mut scores = whole.scores;
            if let Some(bias) = &mut scores.bias {
                bias.address += 4 * first * bias.strides.seq as u64;
            }
            if let Some(dropout) = &mut scores.dropout {
                dropout.key.first_seq = dropout.key.first_seq.wrapping_add(first as u32);
            }
            let forward = Forward {
                kv: KeysValues::Packed { k: of_rows(rows[0]), v: of_rows(rows[1]) },
                cu_seqlens_q: whole.cu_seqlens_q.map(|at| at + 4 * first),
                cu_seqlens_k: Some(cu_k),
                total_k: tokens,
                batch: mine.len() as u32,
                seqlen_q_max: most(|s| s.seqlen_q),
                seqlen_k_max: most(|s| s.seqlen_k),
                scores,
                ..whole
            };
            launches.push((unpack, forward));
        }
        let starts: Vec<i32> = seqs.iter().map(|s| super::unpack::start(p, *s) as i32).collect();
        // SAFETY: the layout's ranges lie in the workspace, which this plan's calls alone use.
        unsafe {
            gpu.copy(self.base + self.layout.cu_k, &sums)?;
            gpu.copy(self.base + self.layout.lens_k, &starts)?;
        }
        Ok(Launch::Unpacked(launches))
    }

    fn fp8(&self) -> Launch {
        let (a, p) = (self.args, &self.plan.problem);
        let (codes, scales) = (self.base + self.layout.codes, self.base + self.layout.scales);
        let dim = p.heads.head_dim_qk;
        let q = Operand {
            address: codes,
            token_stride: (p.heads.num_q_heads * dim) as u64,
            head_stride: dim as u64,
        };
        let attention = self.forward(q);
        let quantise = Quantise {
            x: self.q(),
            codes,
            scales,
            grain: Grain::Row,
            tokens: attention.total_q,
            heads: attention.num_q_heads,
            head_dim: dim as u32,
            rotate: a.key_codes.rotated,
            int8: a.key_codes.int8,
        };
        // Pages bring their scales.
        let packed = p.kv == KvLayout::Contiguous && p.kv_scales != ScaleGrain::None;
        let given = |x: View| packed.then_some(x.address);
        let head_stride = if p.kv_scales == ScaleGrain::Head { a.kv_scales.strides.head as u32 } else { 0 };
        let forward = ForwardFp8 {
            attention,
            int8_keys: a.key_codes.int8,
            q_scales: Some(scales),
            k_scales: given(a.kv_scales.k),
            v_scales: given(a.kv_scales.v),
            kv_scale_strides: (0, head_stride),
        };
        Launch::Fp8(quantise, forward)
    }

    fn decode(&self) -> Decode {
        let (a, p, seqs) = (self.args, &self.plan.problem, &self.plan.seqs);
        let shape = decode_shape(p, seqs.len(), seqs[0].seqlen_q, self.plan.pages_max());
        Decode {
            q: self.q(),
            k: self.pages(a.k, a.k_strides, a.kv_scales.k),
            v: self.pages(a.v, a.v_strides, a.kv_scales.v),
            o: a.out.address,
            lse: a.lse.address,
            seqlens_k: self.base + self.layout.lens_k,
            page_table: self.base + self.layout.table,
            partial: self.base + self.layout.partial,
            num_pages: self.num_pages(),
            scores: decode::Scores {
                slopes: a.extras.alibi_slopes.map(|v| v.address),
                sinks: a.extras.sinks.map(|v| v.address),
                ..shape.scores
            },
            ..shape
        }
    }
}
