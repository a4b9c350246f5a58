//! Forward cells of the bench: 32k tokens in all, 2,048 columns of value heads, as the peers are measured.
use suanpan_attn::{KvLayout, Limits, Problem};
use suanpan_base::{DType, HeadShape, Mask, SeqLen};
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::decode::{Pages, Scales};
use suanpan_cuda::attention::forward::{
    Forward, KeysValues, Paged, SPLITS_MAX, Scores, Splits, partial_bytes,
};
use suanpan_cuda::attention::forward_fp8::ForwardFp8;
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::plan::{Device, Kernel, Plan, Slower};
use suanpan_cuda::testing::{Buffer, Rng, time_us, to_e4m3};
use suanpan_cuda::{Dtype, Error};

/// What a name of `--masks` asks for.
struct Asked {
    mask: Mask,
    page_size: Option<u32>,
    softcap: Option<f32>,
    alibi: bool,
    sinks: bool,
    fp8: bool,
    /// With fp8: q and k are integers.
    int8_keys: bool,
    /// Query tokens a sequence, four query heads a kv head; else as many as keys, and as many heads.
    extend: Option<u32>,
    /// How an extend is laid out.
    layout: Layout,
}

#[derive(Clone, Copy, PartialEq)]
enum Layout {
    /// A head's tiles.
    Apart,
    /// A group's.
    Packed,
    /// As the plan has it.
    Planned,
}

impl Asked {
    /// `halves` stand for slopes and sinks of all heads.
    fn scores(&self, halves: &Buffer) -> Scores {
        Scores {
            softcap: self.softcap,
            alibi_slopes: self.alibi.then_some(halves.address),
            sinks: self.sinks.then_some(halves.address),
            ..Scores::default()
        }
    }

    /// The same over numbers of 8 bits: a scale a row of q, none of k and v.
    fn fp8_of(&self, attention: Forward, q_scales: &Buffer) -> ForwardFp8 {
        let int8_keys = self.int8_keys;
        ForwardFp8 {
            attention,
            int8_keys,
            q_scales: Some(q_scales.address),
            k_scales: None,
            v_scales: None,
            kv_scale_strides: (0, 0),
        }
    }
}

fn asked(name: &str) -> Option<Asked> {
    let number = |prefix: &str| name.strip_prefix(prefix)?.parse::<usize>().ok().filter(|n| *n > 0);
    let mut a = Asked {
        mask: Mask::CAUSAL,
        page_size: None,
        softcap: None,
        alibi: false,
        sinks: false,
        fp8: false,
        int8_keys: false,
        extend: None,
        layout: Layout::Apart,
    };
    if let Some(window) = number("window") {
        a.mask = Mask::window(window);
    } else if let Some(chunk) = number("chunk").and_then(std::num::NonZeroUsize::new) {
        a.mask = Mask::chunked(chunk);
    } else if let Some(page_size) = number("page") {
        a.page_size = Some(page_size as u32);
    } else if let Some((tokens, layout)) =
        [("extend", Layout::Planned), ("pack", Layout::Packed), ("apart", Layout::Apart)]
            .into_iter()
            .find_map(|(prefix, layout)| Some((number(prefix)?, layout)))
    {
        (a.extend, a.layout) = (Some(tokens as u32), layout);
    } else if let Some(page_size) = number("fp8page") {
        (a.page_size, a.fp8) = (Some(page_size as u32), true);
    } else {
        match name {
            "full" => a.mask = Mask::FULL,
            "causal" => {}
            "softcap" => a.softcap = Some(30.0),
            "alibi" => a.alibi = true,
            "sink" => a.sinks = true,
            "fp8full" => (a.mask, a.fp8) = (Mask::FULL, true),
            "fp8causal" => a.fp8 = true,
            "int8full" => (a.mask, a.fp8, a.int8_keys) = (Mask::FULL, true, true),
            "int8causal" => (a.fp8, a.int8_keys) = (true, true),
            _ => return None,
        }
    }
    Some(a)
}

/// Random normal numbers: 16 bits from the device; e4m3 or integers of 8 bits from the host, repeated every megabyte.
fn random(gpu: &Gpu, elements: usize, seed: u64, (fp8, int8): (bool, bool)) -> Result<Buffer, Error> {
    if !fp8 {
        let b = Buffer::new(gpu, elements * 2)?;
        b.fill_normal(gpu, seed, Dtype::Bf16)?;
        return Ok(b);
    }
    let mut rng = Rng::new(seed);
    let code = |x: f32| if int8 { (x * 28.0).round() as i8 as u8 } else { to_e4m3(x) };
    let piece: Vec<u8> = (0..1 << 20).map(|_| code(rng.normal())).collect();
    let b = Buffer::new(gpu, elements)?;
    for at in (0..elements).step_by(piece.len()) {
        b.write(at, &piece[..piece.len().min(elements - at)])?;
    }
    Ok(b)
}

/// The same rows as pages in random order, and their table.
fn paged(
    gpu: &Gpu,
    kv: (Operand, Operand),
    page_size: u32,
    shape: (u32, u32),
) -> Result<(KeysValues, Buffer), Error> {
    let (batch, seqlen) = shape;
    let num_pages = batch * seqlen / page_size;
    let mut rng = Rng::new(3);
    let mut table: Vec<i32> = (0..num_pages as i32).collect();
    for i in (1..table.len()).rev() {
        table.swap(i, rng.below(i + 1));
    }
    let table = Buffer::from_slice(gpu, &table)?;
    let pages = |x: Operand| Pages {
        address: x.address,
        page_stride: u64::from(page_size) * x.token_stride,
        token_stride: x.token_stride,
        head_stride: x.head_stride,
        scales: Scales::default(),
    };
    let (k, v, pages_max) = (pages(kv.0), pages(kv.1), seqlen / page_size);
    Ok((KeysValues::Paged(Paged { k, v, page_table: table.address, pages_max, num_pages, page_size }), table))
}

/// Whether the plan packs heads, and its splits where it takes the build that has them; contiguous keys, causal.
fn planned(
    gpu: &Gpu,
    heads: (u32, u32, u32),
    batch: u32,
    len: (u32, u32),
) -> Result<(bool, Option<u32>), Error> {
    let (batch, len) = (batch as usize, SeqLen::new(len.0 as usize, len.1 as usize));
    let heads = HeadShape::new(heads.0 as usize, heads.1 as usize, heads.2 as usize);
    let problem = Problem {
        q_dtype: DType::Bf16,
        kv_dtype: DType::Bf16,
        kv: KvLayout::Contiguous,
        ..Problem::new(heads, Mask::CAUSAL)
    };
    let limits = Limits { max_seqs: batch, max_total_q: batch * len.seqlen_q, max_seqlen_k: len.seqlen_k };
    let mut plan = Plan::new(&problem, Device { num_sms: gpu.num_sms }, limits, Slower::Allow)?;
    plan.schedule(&vec![len; batch])?;
    Ok(match plan.choice().map(|c| c.kernel) {
        Some(Kernel::Forward { pack_gqa, splits, function, .. }) => {
            (pack_gqa, (function == "forward_more").then_some(splits))
        }
        _ => (false, None),
    })
}

/// Times one cell: `dims` is the head dim, 192128 stands for 192/128; `name` one of `--masks`.
pub fn cell(gpu: &Gpu, how: (usize, &str), dims: u32, seqlen: u32, name: &str) -> Result<(), Error> {
    let Some(asked) = asked(name) else {
        eprintln!("unknown mask {name}");
        std::process::exit(2);
    };
    let (dim, dim_v) = if dims == 192_128 { (192, 128) } else { (dims, dims) };
    let batch = (32768 / seqlen).max(1);
    let (heads, tokens) = (2048 / dim_v, batch * seqlen);
    let kv_heads = if asked.extend.is_some() { heads / 4 } else { heads };
    let seqlen_q = asked.extend.unwrap_or(seqlen);
    let buffer =
        |columns: u32, seed, int8| random(gpu, tokens as usize * columns as usize, seed, (asked.fp8, int8));
    let int8 = asked.int8_keys;
    let (q, k) = (buffer(heads * dim, 77, int8)?, buffer(kv_heads * dim, 78, int8)?);
    let v = buffer(kv_heads * dim_v, 79, false)?;
    let o = Buffer::new(gpu, tokens as usize * (heads * dim_v) as usize * 2)?;
    let lse = Buffer::new(gpu, tokens as usize * heads as usize * 4)?;
    let counter = Buffer::from_slice(gpu, &[0u32; 2 * SPLITS_MAX as usize])?;
    let halves = Buffer::from_slice(gpu, &vec![0.5f32; heads as usize])?;
    let operand = |b: &Buffer, heads: u32, dim: u32| Operand {
        address: b.address,
        token_stride: u64::from(heads * dim),
        head_stride: u64::from(dim),
    };
    let rows = (operand(&k, kv_heads, dim), operand(&v, kv_heads, dim_v));
    let (kv, _table) = match asked.page_size {
        Some(page_size) => paged(gpu, rows, page_size, (batch, seqlen))?,
        None => (KeysValues::Packed { k: rows.0, v: rows.1 }, Buffer::new(gpu, 0)?),
    };
    let layout = if asked.layout == Layout::Planned {
        planned(gpu, (heads, kv_heads, dim), batch, (seqlen_q, seqlen))?
    } else {
        (asked.layout == Layout::Packed, None)
    };
    let rows = u64::from(batch * seqlen_q) * u64::from(heads);
    let partial = Buffer::new(gpu, partial_bytes(layout.1.unwrap_or(1), rows, dim_v) as usize)?;
    let f = Forward {
        q: operand(&q, heads, dim),
        kv,
        o: operand(&o, heads, dim_v),
        lse: lse.address,
        counter: counter.address,
        cu_seqlens_q: None,
        cu_seqlens_k: None,
        total_q: batch * seqlen_q,
        total_k: tokens,
        batch,
        seqlen_q_max: seqlen_q,
        seqlen_k_max: seqlen,
        num_q_heads: heads,
        num_kv_heads: kv_heads,
        head_dim: dim,
        head_dim_v: dim_v,
        dtype: Dtype::Bf16,
        mask: asked.mask,
        scores: asked.scores(&halves),
        tree: None,
        softmax_scale: if int8 { 1.0 / 784.0 } else { 1.0 } / (dim as f32).sqrt(),
        pack_gqa: layout.0,
        splits: layout.1.map(|count| Splits { count, partial: partial.address }),
    };
    let ones = Buffer::from_slice(gpu, &vec![1f32; if asked.fp8 { rows as usize } else { 0 }])?;
    let fp8 = asked.fp8_of(f, &ones);
    // SAFETY: the buffers cover the shapes and live past the synchronisation inside `time_us`.
    let launch = || unsafe { if asked.fp8 { fp8.launch(gpu) } else { f.launch(gpu) } };
    report(gpu, how, launch, &asked, (dims, name), (batch, seqlen, heads, dim + dim_v))
}

fn report(
    gpu: &Gpu,
    (repeats, label): (usize, &str),
    mut launch: impl FnMut() -> Result<(), Error>,
    asked: &Asked,
    (dims, name): (u32, &str),
    (batch, seqlen, heads, columns): (u32, u32, u32, u32),
) -> Result<(), Error> {
    // 0.15 s of work first: the power limit then holds the clock where it stays.
    let once = time_us(gpu, 3, 3, &mut launch)?;
    let us = time_us(gpu, repeats, (150_000.0 / once) as usize, &mut launch)?;
    let square = f64::from(seqlen) * f64::from(seqlen);
    let pairs = match asked.mask {
        mask if let Some(tokens) = asked.extend => {
            mask.visible_pairs(SeqLen::new(tokens as usize, seqlen as usize)) as f64
        }
        Mask::FULL => square,
        Mask::CAUSAL => square / 2.0,
        mask => mask.visible_pairs(SeqLen::new(seqlen as usize, seqlen as usize)) as f64,
    };
    let tflops = 2.0 * f64::from(batch) * f64::from(heads) * pairs * f64::from(columns) / us / 1e6;
    println!(
        "forward{label} d {dims} {name:6} S {seqlen:6} B {batch:2} H {heads:2}: {us:10.1} us {tflops:7.1} TFLOP/s"
    );
    Ok(())
}
