//! What sharding a sequence costs the kernels: the launches of all ranks of a zigzag ring, one rank after another on this device, beside one whole call.
//!
//! Nothing is merged and nothing travels: 16-bit out and lse, of every other launch in a place of their own. Three ways: a launch a step on one stream;
//! the same on two streams in turn, so that blocks of the next step fill multiprocessors that the last round of this one leaves idle; and a causal launch
//! a rank with one more for all its other steps, as sequences of a batch, on two streams in turn.
use suanpan_base::{Mask, SeqLen};
use suanpan_cuda::attention::Operand;
use suanpan_cuda::attention::forward::{Forward, KeysValues, Scores};
use suanpan_cuda::driver::{Gpu, call};
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
    /// Out, lse and counter of each stream.
    places: [[Buffer; 3]; 2],
}

/// Prefix sums of a rank's steps beside its causal one.
struct Batch {
    sums: [Buffer; 2],
    totals: [usize; 2],
    longest: [usize; 2],
    sequences: usize,
}

impl Batch {
    fn new(gpu: &Gpu, steps: &[Step]) -> Result<Batch, Error> {
        let lens: [Vec<usize>; 2] =
            [steps.iter().map(|s| s.len_q).collect(), steps.iter().map(|s| s.len_k).collect()];
        let sums = |lens: &[usize]| {
            let mut at = vec![0i32];
            at.extend(lens.iter().scan(0, |sum, len| {
                *sum += *len as i32;
                Some(*sum)
            }));
            Buffer::from_slice(gpu, &at)
        };
        Ok(Batch {
            sums: [sums(&lens[0])?, sums(&lens[1])?],
            totals: [lens[0].iter().sum(), lens[1].iter().sum()],
            longest: [0, 1].map(|i| lens[i].iter().copied().max().unwrap_or(0)),
            sequences: steps.len(),
        })
    }
}

impl Sequence {
    fn new(gpu: &Gpu, tokens: usize) -> Result<Sequence, Error> {
        let random = |seed| {
            let b = Buffer::new(gpu, tokens * HEADS * DIM * 2)?;
            b.fill_normal(gpu, seed, Dtype::Bf16).map(|()| b)
        };
        let place = || -> Result<[Buffer; 3], Error> {
            let counter = Buffer::from_slice(gpu, &[0u32; 2])?;
            Ok([Buffer::new(gpu, tokens * HEADS * DIM * 2)?, Buffer::new(gpu, tokens * HEADS * 4)?, counter])
        };
        Ok(Sequence { q: random(77)?, k: random(78)?, v: random(79)?, places: [place()?, place()?] })
    }

    fn forward(&self, step: Step, stream: usize) -> Forward {
        let [o, lse, counter] = &self.places[stream];
        let rows = |b: &Buffer, first: usize| Operand {
            address: b.address + (first * HEADS * DIM * 2) as u64,
            token_stride: (HEADS * DIM) as u64,
            head_stride: DIM as u64,
        };
        Forward {
            q: rows(&self.q, step.q),
            kv: KeysValues::Packed { k: rows(&self.k, step.k), v: rows(&self.v, step.k) },
            o: rows(o, step.q),
            lse: lse.address + (step.q * HEADS * 4) as u64,
            counter: counter.address,
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

    /// All steps of `batch` in one launch. Which rows they are does not matter to the time: the first ones of the sequence stand for all.
    fn packed(&self, batch: &Batch, stream: usize) -> Forward {
        let [len_q, len_k] = batch.longest;
        let first = Step { q: 0, len_q, k: 0, len_k, mask: Mask::FULL };
        Forward {
            cu_seqlens_q: Some(batch.sums[0].address),
            cu_seqlens_k: Some(batch.sums[1].address),
            total_q: batch.totals[0] as u32,
            total_k: batch.totals[1] as u32,
            batch: batch.sequences as u32,
            ..self.forward(first, stream)
        }
    }
}

fn pairs(step: &Step) -> u128 {
    step.mask.visible_pairs(SeqLen::new(step.len_q, step.len_k)) as u128
}

/// Two streams of one device.
struct Streams<'g>([&'g Gpu; 2]);

impl Streams<'_> {
    /// `launches` with the stream of each, which only start and end tie to each other.
    fn run(&self, launches: &[(usize, Forward)]) -> Result<(), Error> {
        let join = |a: &Gpu, b: &Gpu| a.stream.join(&b.stream).map_err(call("cuStreamWaitEvent"));
        let [first, second] = self.0;
        join(second, first)?;
        // SAFETY: the buffers cover the shapes and live past the synchronisation inside `time_us`; each stream has outputs and a counter of its own.
        launches.iter().try_for_each(|(stream, f)| unsafe { f.launch(self.0[*stream]) })?;
        join(first, second)
    }
}

/// Three lines: `ranks` of `tokens` tokens each. `gpus` are one device with two streams.
pub fn cell(gpus: [&Gpu; 2], label: &str, ranks: usize, tokens: usize) -> Result<(), Error> {
    let (gpu, all) = (gpus[0], ranks * tokens);
    let whole = Step { q: 0, len_q: all, k: 0, len_k: all, mask: Mask::CAUSAL };
    let of_ranks: Vec<Vec<Step>> = (0..ranks).map(|rank| steps(ranks, rank, tokens)).collect();
    assert_eq!(of_ranks.iter().flatten().map(pairs).sum::<u128>(), pairs(&whole), "every visible pair once");
    let sequence = Sequence::new(gpu, all)?;
    let batches: Vec<Batch> = of_ranks.iter().map(|s| Batch::new(gpu, &s[1..])).collect::<Result<_, _>>()?;
    let each = |streams: usize| -> Vec<(usize, Forward)> {
        let steps = of_ranks.iter().flatten().enumerate();
        steps.map(|(i, step)| (i % streams, sequence.forward(*step, i % streams))).collect()
    };
    let packed = of_ranks
        .iter()
        .zip(&batches)
        .flat_map(|(steps, batch)| [(0, sequence.forward(steps[0], 0)), (1, sequence.packed(batch, 1))]);
    let ways = [("one stream", each(1)), ("two streams", each(2)), ("packed", packed.collect())];
    let streams = Streams(gpus);
    let whole_call = [(0, sequence.forward(whole, 0))];
    let mut one = || streams.run(&whole_call);
    let once = time_us(gpu, 1, 1, &mut one)?;
    // 0.15 s of work first: the power limit then holds the clock where it stays.
    let (warm, repeats) = ((150_000.0 / once) as usize, (60_000.0 / once).clamp(3.0, 15.0) as usize);
    time_us(gpu, 1, warm, &mut one)?;
    let flops = 4.0 * pairs(&whole) as f64 * (HEADS * DIM) as f64;
    let (mut wholes, mut times, mut ratios) = (Vec::new(), vec![Vec::new(); 3], vec![Vec::new(); 3]);
    for _ in 0..ROUNDS {
        for (i, (_, launches)) in ways.iter().enumerate() {
            let whole_us = time_us(gpu, repeats, 1, &mut one)?;
            let us = time_us(gpu, repeats, 1, || streams.run(launches))?;
            wholes.push(whole_us);
            times[i].push(us);
            ratios[i].push(us / whole_us);
        }
    }
    let whole_us = median(&mut wholes);
    let rate = flops / whole_us / 1e6;
    println!(
        "ranks{label} zigzag d {DIM} H {HEADS} causal N {ranks} x {tokens}: whole {whole_us:9.1} us ({rate:5.1} TFLOP/s)"
    );
    for (i, (name, launches)) in ways.iter().enumerate() {
        let (n, us, ratio) = (launches.len(), median(&mut times[i]), median(&mut ratios[i]));
        let (least, most) = (ratios[i][0], ratios[i][ROUNDS - 1]);
        println!("  {name:11} {n:3} launches {us:9.1} us, ratio {ratio:.3} ({least:.3}..{most:.3})");
    }
    Ok(())
}
