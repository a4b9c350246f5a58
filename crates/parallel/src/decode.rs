//! Decode over many ranks: keys and values of every sequence dealt by position, one query a sequence on every rank, and one packed exchange of
//! (out, lse) a layer. Deliberately no cache and no projections: a rank's keys lie one after another, sequence by sequence.
//!
//! ```text
//! every rank:  all queries x its own keys -> (o, lse) of all heads -> each rank's heads to that rank, packed -> merge in order of ranks
//! ```
//! Bytes depend on the batch alone, not on how long sequences are (Helix Parallelism, arXiv 2507.07120, section 2.1).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use suanpan_attn::{Args, Extras, KvScales, Limits, Machine, Plan, Strides, Workspace};
use suanpan_base::{BadArgument, Buf, BufMut, HeadShape, Mask, SeqLen, lse};
use suanpan_ledger::AttnBooks;

use crate::attention::Attention;
use crate::plan::{CARRIER_BYTES, OP};
use crate::run::on_threads;
use crate::shard::{MAX_CP_SIZE, part_of};
use crate::transport::{Fault, Transport};

/// Who holds which keys, and who ends with which heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodePlan {
    heads: HeadShape,
    cp_size: usize,
    block: usize,
    lengths: Vec<usize>,
}

/// One rank's tensors; f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecodeInputs {
    /// Queries of all sequences `[batch, num_q_heads, head_dim_qk]`, the same on every rank.
    pub q: Vec<f32>,
    /// The rank's keys, sequence by sequence in order of positions: `[keys, num_kv_heads, head_dim_qk]`.
    pub k: Vec<f32>,
    /// Its values `[keys, num_kv_heads, head_dim_v]`.
    pub v: Vec<f32>,
}

/// One rank's results: its own heads of all sequences.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecodeOutputs {
    /// `[batch, heads of the rank, head_dim_v]`.
    pub out: Vec<f32>,
    /// `[batch, heads of the rank]`, natural.
    pub lse: Vec<f32>,
    /// Bytes handed to other ranks, counted.
    pub sent_bytes: u64,
}

impl DecodePlan {
    /// Sequences of `lengths` keys on `cp_size` ranks, block by block of `block` tokens in turn: growing sequences stay even.
    pub fn new(
        heads: HeadShape,
        lengths: &[usize],
        cp_size: usize,
        block: usize,
    ) -> Result<DecodePlan, BadArgument> {
        heads.check(OP)?;
        if heads.values_in_keys {
            return Err(BadArgument::new(OP, "values_in_keys", true, "false: keys and values lie apart"));
        }
        if !(1..=MAX_CP_SIZE).contains(&cp_size) {
            return Err(BadArgument::new(OP, "cp_size", cp_size, format!("1 to {MAX_CP_SIZE}")));
        }
        if block == 0 {
            return Err(BadArgument::new(OP, "block", block, "at least 1"));
        }
        if lengths
            .iter()
            .try_fold(0usize, |sum, n| sum.checked_add(*n))
            .is_none_or(|sum| sum > u32::MAX as usize)
        {
            return Err(BadArgument::new(OP, "lengths", lengths.len(), "at most 2^32 - 1 keys together"));
        }
        Ok(DecodePlan { heads, cp_size, block, lengths: lengths.to_vec() })
    }

    /// Positions of sequence `seq` that rank `rank` holds, in order.
    pub fn positions(&self, rank: usize, seq: usize) -> impl Iterator<Item = usize> + use<> {
        let (block, n) = (self.block, self.lengths[seq]);
        let starts = (rank * block..n).step_by(self.cp_size * block);
        starts.flat_map(move |start| start..n.min(start + block))
    }

    /// Keys of sequence `seq` on rank `rank`.
    pub fn keys(&self, rank: usize, seq: usize) -> usize {
        let round = self.cp_size * self.block;
        let (rounds, rest) = (self.lengths[seq] / round, self.lengths[seq] % round);
        rounds * self.block + rest.saturating_sub(rank * self.block).min(self.block)
    }

    /// The query heads that rank `rank` ends with.
    pub fn heads(&self, rank: usize) -> Range<usize> {
        part_of(self.heads.num_q_heads, self.cp_size, rank)
    }

    /// Bytes that rank `rank` sends: all heads but its own, out and lse, of every sequence.
    pub fn sent_bytes(&self, rank: usize) -> u64 {
        let heads = self.heads.num_q_heads - self.heads(rank).len();
        (self.lengths.len() * heads * (self.heads.head_dim_v + 1)) as u64 * CARRIER_BYTES
    }

    fn check(&self, rank: usize, x: &DecodeInputs, attention: &Attention) -> Result<(), BadArgument> {
        let h = self.heads;
        let keys: usize = (0..self.lengths.len()).map(|seq| self.keys(rank, seq)).sum();
        for (field, have, want) in [
            ("q", x.q.len(), self.lengths.len() * h.num_q_heads * h.head_dim_qk),
            ("k", x.k.len(), keys * h.num_kv_heads * h.head_dim_qk),
            ("v", x.v.len(), keys * h.num_kv_heads * h.head_dim_v),
        ] {
            if have != want {
                let field = format!("inputs[{rank}].{field} length");
                return Err(BadArgument::new(OP, field, have, format!("{want}, as planned")));
            }
        }
        for (field, asked) in [("dropout", attention.dropout.is_some()), ("bias", attention.bias.is_some())] {
            if asked {
                return Err(BadArgument::new(OP, field, "in a decode", "none"));
            }
        }
        attention.check_sinks(h)?;
        attention.problem(h, Mask::FULL, false).check()
    }

    /// All queries over the rank's own keys: out `[batch, num_q_heads, head_dim_v]` and lse `[num_q_heads, batch]`.
    fn partial(
        &self,
        rank: usize,
        x: &DecodeInputs,
        attention: &Attention,
    ) -> Result<(Vec<f32>, Vec<f32>), BadArgument> {
        let (h, batch) = (self.heads, self.lengths.len());
        let lens: Vec<SeqLen> = (0..batch).map(|seq| SeqLen::new(1, self.keys(rank, seq))).collect();
        let most = lens.iter().map(|len| len.seqlen_k).max().unwrap_or(0);
        let limits = Limits { max_seqs: batch, max_total_q: batch, max_seqlen_k: most };
        // One thread a rank: ranks are what runs at once.
        let mut plan = Plan::new(&attention.problem(h, Mask::FULL, false), &Machine::detect(1), limits)?;
        plan.schedule(&lens)?;
        let mut ws = Workspace::for_plans(&[&plan]);
        let (mut out, mut lse) =
            (vec![f32::NAN; batch * h.num_q_heads * h.head_dim_v], vec![f32::NAN; batch * h.num_q_heads]);
        let mut books = vec![AttnBooks::default(); batch];
        let args = Args {
            q: Buf::F32(&x.q),
            q_strides: (h.num_q_heads * h.head_dim_qk, h.head_dim_qk),
            k: Buf::F32(&x.k),
            k_strides: Strides::from((h.num_kv_heads * h.head_dim_qk, h.head_dim_qk)),
            v: Buf::F32(&x.v),
            v_strides: Strides::from((h.num_kv_heads * h.head_dim_v, h.head_dim_v)),
            page_table: &[],
            page_table_stride: 0,
            kv_scales: KvScales::default(),
            extras: Extras::default(),
            out: BufMut::F32(&mut out),
            out_strides: (h.num_q_heads * h.head_dim_v, h.head_dim_v),
            lse: Some(&mut lse),
            max_scores: None,
        };
        suanpan_attn::run(&plan, args, &mut ws, &mut books)?;
        Ok((out, lse))
    }

    /// The message for rank `peer`: (out, lse) of its heads, sequence by sequence.
    fn pack(&self, peer: usize, (out, lse): &(Vec<f32>, Vec<f32>)) -> Vec<f32> {
        let (batch, hq, dv) = (self.lengths.len(), self.heads.num_q_heads, self.heads.head_dim_v);
        let mut message = Vec::with_capacity(batch * self.heads(peer).len() * (dv + 1));
        for (seq, head) in (0..batch).flat_map(|seq| self.heads(peer).map(move |head| (seq, head))) {
            message.extend_from_slice(&out[(seq * hq + head) * dv..][..dv]);
            message.push(lse[head * batch + seq]);
        }
        message
    }
}

/// Runs rank `rank` over a transport, in this thread. The outer error is a refusal, before anything is sent.
pub fn decode_rank<T: Transport<Message = Vec<f32>>>(
    plan: &DecodePlan,
    attention: &Attention,
    input: &DecodeInputs,
    (transport, rank): (&mut T, usize),
) -> Result<Result<DecodeOutputs, Fault>, BadArgument> {
    plan.check(rank, input, attention)?;
    let partial = plan.partial(rank, input, attention)?;
    Ok(exchange(plan, attention, &partial, (transport, rank)))
}

fn exchange<T: Transport<Message = Vec<f32>>>(
    plan: &DecodePlan,
    attention: &Attention,
    partial: &(Vec<f32>, Vec<f32>),
    (transport, rank): (&mut T, usize),
) -> Result<DecodeOutputs, Fault> {
    let (batch, dv, heads) = (plan.lengths.len(), plan.heads.head_dim_v, plan.heads(rank));
    let rows = batch * heads.len();
    let others = || (0..plan.cp_size).filter(|&p| p != rank);
    transport.begin(0)?;
    if rows > 0 {
        others().try_for_each(|peer| transport.expect(peer, rows * (dv + 1)))?;
    }
    let mut sent_bytes = 0;
    for peer in others().filter(|&p| batch > 0 && !plan.heads(p).is_empty()) {
        let message = plan.pack(peer, partial);
        sent_bytes += size_of_val(message.as_slice()) as u64;
        transport.send(peer, message)?;
    }
    // In order of ranks on every rank: the same bits whoever merges.
    let mut merged = vec![0.0; rows * dv];
    let mut pairs = [lse::EMPTY_LSE, 0.0].repeat(rows);
    for from in 0..if rows > 0 { plan.cp_size } else { 0 } {
        let message = if from == rank { plan.pack(rank, partial) } else { transport.recv(from)? };
        let parts =
            merged.chunks_exact_mut(dv).zip(pairs.chunks_exact_mut(2)).zip(message.chunks_exact(dv + 1));
        for ((out, pair), other) in parts {
            lse::merge_pair_into(out, pair, &other[..dv], [other[dv], 0.0]);
        }
    }
    transport.sent()?;
    transport.finish(1)?;
    let mut outputs =
        DecodeOutputs { out: merged, lse: pairs.chunks_exact(2).map(|p| p[0]).collect(), sent_bytes };
    if let Some(sinks) = &attention.sinks {
        let rows = outputs.out.chunks_exact_mut(dv).zip(&mut outputs.lse);
        for ((out, lse), &sink) in rows.zip(sinks[heads].iter().cycle()) {
            lse::join_sink(out, lse, sink);
        }
    }
    Ok(outputs)
}

/// Runs every rank in a thread of its own, as [`crate::run_threads`] does.
pub fn decode_threads(
    plan: &DecodePlan,
    attention: &Attention,
    inputs: Vec<DecodeInputs>,
    timeout: Duration,
) -> Result<Vec<Result<DecodeOutputs, Fault>>, BadArgument> {
    if inputs.len() != plan.cp_size {
        return Err(BadArgument::new(OP, "inputs", inputs.len(), format!("one a rank: {}", plan.cp_size)));
    }
    inputs.iter().enumerate().try_for_each(|(rank, input)| plan.check(rank, input, attention))?;
    let shared = Arc::new((plan.clone(), attention.clone()));
    Ok(on_threads(inputs, timeout, move |input: DecodeInputs, mut end| {
        let ((plan, attention), rank) = (&*shared, end.rank);
        let partial = plan.partial(rank, &input, attention).expect("checked");
        exchange(plan, attention, &partial, (&mut end, rank))
    }))
}
