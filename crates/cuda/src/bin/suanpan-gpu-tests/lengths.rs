//! The error against f64 from 1,024 keys to 1,048,576 beside plain bf16 attention's, over four kinds of scores, on every way to a row.
use std::thread::{available_parallelism, scope};
use suanpan_attn::{KvLayout, Limits, Problem, Strides};
use suanpan_base::{DType, HeadShape, Mask, SeqLen};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::plan::{Args, Device, Extras, KeyCodes, Plan, Scales, Slower, View, Workspace, run};
use suanpan_cuda::testing::{Buffer, Rng, Row, from_bits, parallel_rows, reference_row, to_bits};
use suanpan_cuda::{Dtype, Error};

use crate::Report;

const WIDTH: usize = 128;
const HEADS: usize = 8;
const PAGE: usize = 64;
const LENGTHS: [usize; 6] = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20];
/// Query tokens, and whether no bit may depend on company: decode, tiles of (token, head) and tiles of a head over keys in parts, keys whole.
const CALLS: [(usize, bool); 4] = [(1, false), (64, false), (512, false), (512, true)];

/// Scores of four kinds, as in `error_by_length` of `suanpan-attn`.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Uniform,
    Normal,
    /// One element of a thousand a hundred times as large.
    Outlier,
    /// One key of 64 points where the first query does: a few keys hold nearly all of its weight.
    Peaked,
}

impl Kind {
    /// bf16 numbers; every 2^16 are drawn from a seed of their own.
    fn numbers(self, n: usize, seed: u64) -> Vec<u16> {
        let mut out = vec![0u16; n];
        let part = |at: usize, out: &mut [u16]| {
            let mut rng = Rng::new(seed << 32 | at as u64);
            for (i, x) in out.iter_mut().enumerate() {
                let number = match self {
                    Kind::Uniform => (rng.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0,
                    Kind::Outlier if i % 1000 == 7 => 100.0 * rng.normal(),
                    _ => rng.normal(),
                };
                *x = to_bits(Dtype::Bf16, number);
            }
        };
        let parts: Vec<_> = out.chunks_mut(1 << 16).enumerate().collect();
        let each = parts.len().div_ceil(available_parallelism().map_or(1, |n| n.get())).max(1);
        scope(|scope| {
            let mut parts = parts.into_iter().peekable();
            while parts.peek().is_some() {
                let mine: Vec<_> = parts.by_ref().take(each).collect();
                scope.spawn(|| mine.into_iter().for_each(|(at, out)| part(at, out)));
            }
        });
        out
    }

    fn keys(self, n: usize, q: &[u16]) -> Vec<u16> {
        let mut keys = self.numbers(n * WIDTH, 2);
        if let Kind::Peaked = self {
            let wide = |x: u16| from_bits(Dtype::Bf16, x);
            for key in keys.chunks_mut(WIDTH).step_by(64) {
                key.iter_mut().zip(q).for_each(|(k, q)| *k = to_bits(Dtype::Bf16, wide(*k) + 3.0 * wide(*q)));
            }
        }
        keys
    }
}

/// q, k and v of one kind, here and there.
struct Inputs {
    values: [Vec<f32>; 3],
    device: [Buffer; 3],
    table: Vec<u32>,
}

impl Inputs {
    fn new(gpu: &Gpu, kind: Kind, most: usize) -> Result<Inputs, Error> {
        let q = kind.numbers(CALLS[3].0 * HEADS * WIDTH, 1);
        let (k, v) = (kind.keys(most, &q), kind.numbers(most * WIDTH, 3));
        let wide = |x: &[u16]| x.iter().map(|x| from_bits(Dtype::Bf16, *x)).collect::<Vec<f32>>();
        let up = |x: &[u16]| Buffer::from_slice(gpu, x);
        Ok(Inputs {
            values: [wide(&q), wide(&k), wide(&v)],
            device: [up(&q)?, up(&k)?, up(&v)?],
            table: (0..most.div_ceil(PAGE) as u32).collect(),
        })
    }
}

pub fn test(gpu: &Gpu, report: &mut Report) -> Result<(), Error> {
    let lengths = if report.small { &LENGTHS[..2] } else { &LENGTHS[..] };
    for kind in [Kind::Uniform, Kind::Normal, Kind::Outlier, Kind::Peaked] {
        let inputs = Inputs::new(gpu, kind, lengths[lengths.len() - 1])?;
        for (tokens, batch_invariant) in CALLS {
            for &keys in lengths {
                one(gpu, report, (kind, batch_invariant), &inputs, SeqLen::new(tokens, keys))?;
            }
        }
    }
    Ok(())
}

/// Eight query heads on one kv head see `len.seqlen_k` keys from each of `len.seqlen_q` tokens.
fn one(
    gpu: &Gpu,
    report: &mut Report,
    (kind, batch_invariant): (Kind, bool),
    x: &Inputs,
    len: SeqLen,
) -> Result<(), Error> {
    let (tokens, n) = (len.seqlen_q, len.seqlen_k);
    let kv = if tokens == 1 { KvLayout::Paged { page_size: PAGE } } else { KvLayout::Contiguous };
    let heads = HeadShape::new(HEADS, 1, WIDTH);
    let bf16 = Problem { q_dtype: DType::Bf16, kv_dtype: DType::Bf16, ..Problem::new(heads, Mask::FULL) };
    let problem = Problem { kv, batch_invariant, ..bf16 };
    let limits = Limits { max_seqs: 1, max_total_q: tokens, max_seqlen_k: n };
    let mut plan = Plan::new(&problem, Device { num_sms: gpu.num_sms }, limits, Slower::Refuse)?;
    plan.schedule(&[len])?;
    let out = Buffer::new(gpu, tokens * HEADS * WIDTH * 2)?;
    out.fill(gpu, 0x7fff_7fff)?;
    let lse = Buffer::new(gpu, tokens * HEADS * 4)?;
    let view = |b: &Buffer, elements: usize| View { address: b.address, elements: elements as u64 };
    let rows = Strides { token: WIDTH, head: WIDTH, page: PAGE * WIDTH };
    let args = Args {
        q: view(&x.device[0], tokens * HEADS * WIDTH),
        q_strides: (HEADS * WIDTH, WIDTH),
        k: view(&x.device[1], n * WIDTH),
        k_strides: rows,
        v: view(&x.device[2], n * WIDTH),
        v_strides: rows,
        page_table: if tokens == 1 { &x.table[..n.div_ceil(PAGE)] } else { &[] },
        page_table_stride: if tokens == 1 { n.div_ceil(PAGE) } else { 0 },
        kv_scales: Scales::default(),
        key_codes: KeyCodes::default(),
        extras: Extras::default(),
        out: view(&out, tokens * HEADS * WIDTH),
        out_strides: (HEADS * WIDTH, WIDTH),
        lse: view(&lse, tokens * HEADS),
    };
    let workspace = Workspace::new(gpu, &plan)?;
    // SAFETY: the buffers cover the call and outlive the synchronisation.
    unsafe { run(gpu, &plan, &args, &workspace)? };
    gpu.synchronize()?;
    let got: Vec<u16> = out.read(0, tokens * HEADS * WIDTH)?;
    let lse: Vec<f32> = lse.read(0, tokens * HEADS)?;
    // The peaked query, and rows of other heads and of the last tile.
    let checked = [(0, 0), (0, 3), (tokens - 1, 6), (tokens / 2, 7)];
    let errors = parallel_rows(checked.len(), |i, errors| {
        let (token, head) = checked[i];
        let at = (token * HEADS + head) * WIDTH;
        let (key, value) =
            (|j: usize| &x.values[1][j * WIDTH..][..WIDTH], |j: usize| &x.values[2][j * WIDTH..][..WIDTH]);
        let row = Row { q: &x.values[0][at..at + WIDTH], keys: n, key: &key, value: &value };
        let exact = reference_row(Dtype::Bf16, f64::from(problem.scale()), &row);
        let o: Vec<f32> = got[at..at + WIDTH].iter().map(|x| from_bits(Dtype::Bf16, *x)).collect();
        errors.add_row(Dtype::Bf16, &o, lse[head * tokens + token], &exact);
    });
    let ratio = errors.ours / errors.plain.max(errors.rounding / 2.0);
    let kernel = plan.choice().map_or(String::new(), |c| c.kernel.to_string());
    report.errors(
        &format!("{n} keys, {kind:?}, {tokens} tokens, {ratio:.2} of plain bf16 ({kernel})"),
        &errors,
    );
    Ok(())
}
