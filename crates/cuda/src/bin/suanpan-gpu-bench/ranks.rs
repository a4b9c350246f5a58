//! What sharding a sequence costs the kernels: the launches of all ranks of a zigzag ring, one rank after another on this device, beside one whole call.
//!
//! A launch a step, 16-bit out and lse in place: nothing is merged and nothing travels, so this is the least that a ring of one launch a step can take.
use suanpan_base::{Mask, SeqLen};
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::forward::{Forward, KeysValues, Scores};
use suanpan_cuda::driver::Gpu;
use suanpan_cuda::testing::{Buffer, median, time_us};
use suanpan_cuda::{Dtype, Error};

const HEADS: usize = 16;
const DIM: usize = 128;
/// Whole calls and ranks take turns, so that both meet the same clocks.
const ROUNDS: usize = 5;

/// Some rows of q, some of k and v, both neighbours in memory, and the mask between them.
#[derive(Clone, Copy)]
struct Step {
    q: usize,
    len_q: usize,
    k: usize,
    len_k: usize,
    mask: Mask,
}

/// A rank's steps, with its two ranges (`rank` and `2 ranks - 1 - rank` of `2 ranks`) side by side: first its own keys, then those of each other rank,
/// of which all its queries see the first range (a rank before it) or its later queries see both (a rank behind it).
fn steps(ranks: usize, rank: usize, tokens: usize) -> Vec<Step> {
    let (range, own) = (tokens / 2, rank * tokens);
    let step = |other: usize| match other {
        _ if other == rank => Step { q: own, len_q: tokens, k: own, len_k: tokens, mask: Mask::CAUSAL },
        _ if other < rank => {
            Step { q: own, len_q: tokens, k: other * tokens, len_k: range, mask: Mask::FULL }
        }
        _ => Step { q: own + range, len_q: range, k: other * tokens, len_k: tokens, mask: Mask::FULL },
    };
    (0..ranks).map(|hop| step((rank + ranks - hop) % ranks)).collect()
}

/// Device memory of a whole sequence.
struct Sequence {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    o: Buffer,
    lse: Buffer,
    counter: Buffer,
}

impl Sequence {
    fn new(gpu: &Gpu, tokens: usize) -> Result<Sequence, Error> {
        let random = |seed| {
            let b = Buffer::new(gpu, tokens * HEADS * DIM * 2)?;
            b.fill_normal(gpu, seed, Dtype::Bf16).map(|()| b)
        };
        let (o, lse) = (Buffer::new(gpu, tokens * HEADS * DIM * 2)?, Buffer::new(gpu, tokens * HEADS * 4)?);
        let counter = Buffer::from_slice(gpu, &[0u32; 2])?;
        Ok(Sequence { q: random(77)?, k: random(78)?, v: random(79)?, o, lse, counter })
    }

    fn forward(&self, step: Step) -> Forward {
        let rows = |b: &Buffer, first: usize| Operand {
            address: b.address + (first * HEADS * DIM * 2) as u64,
            token_stride: (HEADS * DIM) as u64,
            head_stride: DIM as u64,
        };
        Forward {
            q: rows(&self.q, step.q),
            kv: KeysValues::Packed { k: rows(&self.k, step.k), v: rows(&self.v, step.k) },
            o: rows(&self.o, step.q),
            lse: self.lse.address + (step.q * HEADS * 4) as u64,
            counter: self.counter.address,
            cu_seqlens_q: None,
            cu_seqlens_k: None,
            total_q: step.len_q as u32,
            total_k: step.len_k as u32,
            batch: 1,
            seqlen_q_max: step.len_q as u32,
            seqlen_k_max: step.len_k as u32,
            num_q_heads: HEADS as u32,
            num_kv_heads: HEADS as u32,
            head_dim: DIM as u32,
            head_dim_v: DIM as u32,
            dtype: Dtype::Bf16,
            mask: step.mask,
            scores: Scores::default(),
            tree: None,
            softmax_scale: 1.0 / (DIM as f32).sqrt(),
            pack_gqa: false,
            splits: None,
        }
    }
}

fn pairs(step: &Step) -> u128 {
    step.mask.visible_pairs(SeqLen::new(step.len_q, step.len_k)) as u128
}

/// One line: `ranks` of `tokens` tokens each.
pub fn cell(gpu: &Gpu, label: &str, ranks: usize, tokens: usize) -> Result<(), Error> {
    let all = ranks * tokens;
    let whole = Step { q: 0, len_q: all, k: 0, len_k: all, mask: Mask::CAUSAL };
    let parts: Vec<Step> = (0..ranks).flat_map(|rank| steps(ranks, rank, tokens)).collect();
    assert_eq!(parts.iter().map(pairs).sum::<u128>(), pairs(&whole), "every visible pair once");
    let sequence = Sequence::new(gpu, all)?;
    let whole_call = sequence.forward(whole);
    let launches: Vec<Forward> = parts.iter().map(|step| sequence.forward(*step)).collect();
    // SAFETY: the buffers cover the shapes and live past the synchronisation inside `time_us`.
    let mut one = || unsafe { whole_call.launch(gpu) };
    // SAFETY: as above; launches on one stream take turns, so that sharing outputs and a counter is no race.
    let mut many = || launches.iter().try_for_each(|f| unsafe { f.launch(gpu) });
    let once = time_us(gpu, 1, 1, &mut one)?;
    // 0.15 s of work first: the power limit then holds the clock where it stays.
    let (warm, repeats) = ((150_000.0 / once) as usize, (60_000.0 / once).clamp(3.0, 15.0) as usize);
    let (mut wholes, mut sums, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        wholes.push(time_us(gpu, repeats, if round == 0 { warm } else { 1 }, &mut one)?);
        sums.push(time_us(gpu, repeats, 1, &mut many)?);
        ratios.push(sums[round] / wholes[round]);
    }
    let flops = 4.0 * pairs(&whole) as f64 * (HEADS * DIM) as f64;
    let (whole_us, sum_us) = (median(&mut wholes), median(&mut sums));
    let ratio = median(&mut ratios);
    println!(
        "ranks{label} zigzag d {DIM} H {HEADS} causal N {ranks} x {tokens}: whole {whole_us:9.1} us ({:5.1} TFLOP/s), {} launches {sum_us:9.1} us, \
         ratio {ratio:.3} ({:.3}..{:.3})",
        flops / whole_us / 1e6,
        launches.len(),
        ratios[0],
        ratios[ROUNDS - 1]
    );
    Ok(())
}
