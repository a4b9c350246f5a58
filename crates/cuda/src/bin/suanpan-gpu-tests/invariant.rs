//! Batch-invariant calls through the one API: a row has the bits of its prefill alone, in a chunk, decoded, and among other sequences.
use suanpan_attn::{KvLayout, Limits, Problem};
use suanpan_base::{DType, HeadShape, Mask, ScaleGrain, SeqLen};
use suanpan_cuda::Error;
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::plan::{Device, KeyCodes, Plan, Slower, Workspace, run};

use crate::Report;
use crate::api::{Call, OnDevice};

/// Rows of a sequence of the whole call: their sequence, the first one, and how many.
#[derive(Clone, Copy)]
struct Piece {
    seq: usize,
    first: usize,
    rows: usize,
}

/// Output rows `[total_q * num_q_heads]` of `head_dim` numbers, and their lse `[num_q_heads, total_q]`.
struct Rows {
    out: Vec<u16>,
    lse: Vec<u32>,
}

fn compute(
    gpu: &Gpu,
    p: &Problem,
    key_codes: KeyCodes,
    lens: &[SeqLen],
    call: &Call,
) -> Result<(Rows, String), Error> {
    let total_q = lens.iter().map(|l| l.seqlen_q).sum();
    let limits = Limits { max_seqs: lens.len(), max_total_q: total_q, max_seqlen_k: 4096 };
    let mut plan = Plan::new(p, Device { num_sms: gpu.num_sms }, limits, Slower::Allow)?;
    plan.schedule(lens)?;
    let device = OnDevice::new(gpu, p, lens, call)?;
    let ws = Workspace::new(gpu, &plan)?;
    let args = suanpan_cuda::plan::Args { key_codes, ..device.args(p, call) };
    // SAFETY: the buffers cover the call and outlive the synchronisation.
    unsafe { run(gpu, &plan, &args, &ws)? };
    gpu.synchronize()?;
    let rows = Rows {
        out: device.out.read(0, call.q.len())?,
        lse: device.lse.read(0, call.q.len() / p.heads.head_dim_qk)?,
    };
    Ok((rows, plan.choice().map_or(String::new(), |c| c.kernel.to_string())))
}

/// The call of these pieces alone, each behind the keys that its last row sees (causal).
fn cut(p: &Problem, lens: &[SeqLen], whole: &Call, pieces: &[Piece]) -> (Vec<SeqLen>, Call) {
    let mut call = whole.clone();
    call.q.clear();
    for x in [&mut call.k, &mut call.v] {
        x.bytes.clear();
        // Scales of heads are those of all sequences.
        if p.kv_scales == ScaleGrain::Token {
            x.scales.clear();
        }
    }
    let total_k: usize = lens.iter().map(|l| l.seqlen_k).sum();
    let q_row = p.heads.num_q_heads * p.heads.head_dim_qk;
    let mut cut_lens = Vec::new();
    for piece in pieces {
        let before = |of: fn(&SeqLen) -> usize| lens[..piece.seq].iter().map(of).sum::<usize>();
        let (q0, k0, len) = (before(|l| l.seqlen_q), before(|l| l.seqlen_k), lens[piece.seq]);
        let keys = len.seqlen_k - len.seqlen_q + piece.first + piece.rows;
        call.q.extend(&whole.q[(q0 + piece.first) * q_row..][..piece.rows * q_row]);
        for (to, from) in [(&mut call.k, &whole.k), (&mut call.v, &whole.v)] {
            let row = from.bytes.len() / total_k;
            to.bytes.extend(&from.bytes[k0 * row..][..keys * row]);
            if p.kv_scales == ScaleGrain::Token {
                let row = p.heads.num_kv_heads;
                to.scales.extend(&from.scales[k0 * row..][..keys * row]);
            }
        }
        cut_lens.push(SeqLen::new(piece.rows, keys));
    }
    (cut_lens, call)
}

/// Rows of `got`, the call of `pieces`, that have not the bits of `want`, the whole call's.
fn different(p: &Problem, lens: &[SeqLen], pieces: &[Piece], want: &Rows, got: &Rows) -> usize {
    let (heads, d) = (p.heads.num_q_heads, p.heads.head_dim_v);
    let (total, total_got) = (want.lse.len() / heads, got.lse.len() / heads);
    let (mut at, mut different) = (0, 0);
    for piece in pieces {
        let q0: usize = lens[..piece.seq].iter().map(|l| l.seqlen_q).sum();
        for row in 0..piece.rows {
            let (a, b) = (q0 + piece.first + row, at + row);
            let out = want.out[a * heads * d..][..heads * d] == got.out[b * heads * d..][..heads * d];
            let lse = (0..heads).all(|h| want.lse[h * total + a] == got.lse[h * total_got + b]);
            different += usize::from(!(out && lse));
        }
        at += piece.rows;
    }
    different
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let lens = [SeqLen::new(333, 333), SeqLen::new(130, 901), SeqLen::new(200, 200)];
    let piece = |seq, first, rows| Piece { seq, first, rows };
    // Alone, in chunks beside chunks of others, and decoded one beside another.
    let ways: [(&str, Vec<Piece>); 4] = [
        ("a sequence alone", vec![piece(1, 0, 130)]),
        ("chunks", vec![piece(2, 64, 100), piece(0, 100, 77), piece(1, 17, 113)]),
        (
            "decode",
            [(0, 332), (1, 0), (2, 65), (1, 129), (0, 0), (0, 128)].map(|(s, f)| piece(s, f, 1)).into(),
        ),
        ("four tokens a sequence", [(0, 329), (1, 5), (2, 124)].map(|(s, f)| piece(s, f, 4)).into()),
    ];
    let (rotated, int8) = (KeyCodes { rotated: true, int8: false }, KeyCodes { rotated: true, int8: true });
    let plain = KeyCodes::default();
    for (d, kv_dtype, kv_scales, page_size, key_codes) in [
        (128, DType::Bf16, ScaleGrain::None, Some(16), plain),
        (128, DType::E4m3, ScaleGrain::Head, None, plain),
        (128, DType::E4m3, ScaleGrain::Head, Some(64), rotated),
        (128, DType::E4m3, ScaleGrain::Head, Some(16), int8),
        (256, DType::E4m3, ScaleGrain::Head, Some(16), plain),
        (256, DType::E4m3, ScaleGrain::Head, None, int8),
        (128, DType::E4m3, ScaleGrain::Token, Some(16), plain),
        (128, DType::I8, ScaleGrain::Token, Some(16), plain),
        (64, DType::I4, ScaleGrain::Token, Some(48), plain),
    ] {
        let kv = page_size.map_or(KvLayout::Contiguous, |page_size| KvLayout::Paged { page_size });
        let p = Problem {
            q_dtype: DType::Bf16,
            kv_dtype,
            kv_scales,
            kv,
            batch_invariant: true,
            ..Problem::new(HeadShape::new(8, 2, d), Mask::CAUSAL)
        };
        let whole = Call::new(&p, &lens);
        let (want, kernel) = compute(gpu, &p, key_codes, &lens, &whole)?;
        for (name, pieces) in &ways {
            let (cut_lens, call) = cut(&p, &lens, &whole, pieces);
            let (got, _) = compute(gpu, &p, key_codes, &cut_lens, &call)?;
            let off = different(&p, &lens, pieces, &want, &got);
            let name =
                format!("invariant {kv_dtype}, scales {kv_scales}, {kv}, d{d}, {name}: its prefill's bits");
            report.line(off == 0, &name, format!("{off} rows differ; {kernel}"));
        }
    }
    Ok(())
}
