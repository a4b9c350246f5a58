//! The 20 best log-probabilities after chosen numbers of tokens: `top_logprobs MODEL IDS_FILE n1,n2,.. [f32|int16|int8] [K/V: bf16|f32]`, one JSON object
//! a line.
//!
//! The same question as `positions_llama_cpp MODEL top`; bench/first_token_logprobs.py holds the answers beside each other.

use std::collections::BTreeSet;
use std::sync::Arc;

use suanpan_base::DType;
use suanpan_cache::LayerSet;
use suanpan_model::forward::{ExecOptions, Executor, LogitRows, StepBatch, StepSeq};
use suanpan_model::{LoadOptions, load};
use suanpan_ops::Precision;

/// Tokens of a step.
const CHUNK: usize = 512;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, ids, wanted, rest @ ..] = words.as_slice() else {
        return Err("usage: top_logprobs MODEL IDS_FILE n1,n2,.. [f32|int16|int8] [bf16|f32]".into());
    };
    let precision = match rest.first().map(String::as_str) {
        Some("f32") => Precision::F32,
        Some("int8") => Precision::Int8,
        None | Some("int16") => Precision::Int16,
        Some(other) => return Err(format!("precision {other}: supported: f32, int16, int8").into()),
    };
    let kv_dtype = match rest.get(1).map(String::as_str) {
        None | Some("bf16") => DType::Bf16,
        Some("f32") => DType::F32,
        Some(other) => return Err(format!("K/V {other}: supported: bf16, f32").into()),
    };
    let wanted = wanted.split(',').map(str::parse).collect::<Result<BTreeSet<usize>, _>>()?;
    let text = std::fs::read_to_string(ids)?;
    let tokens = text.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    let longest = wanted.last().copied().unwrap_or(0);
    if wanted.first().is_none_or(|&n| n == 0) || longest > tokens.len() {
        return Err(format!("numbers of tokens: supported: 1 to {}", tokens.len()).into());
    }
    let model = Arc::new(load(model, &LoadOptions::default(), &mut |_| {})?);
    let options = ExecOptions {
        precision,
        kv_dtype,
        kv_spared: LayerSet::NONE,
        kv_near: suanpan_cache::NearTokens::NONE,
        batch_invariant: false,
        threads: 2,
        max_tokens: CHUNK,
        max_seqs: 1,
        max_model_len: longest,
        page_size: 16,
    };
    let mut exec = Executor::new(model, options)?;
    let mut kv = exec.kv_storage(longest.div_ceil(16), None)?;
    let mut batch = StepBatch::default();
    batch.page_table.extend(0..kv.num_pages() as u32);
    batch.page_table_stride = kv.num_pages();
    let mut done = 0;
    for n in wanted {
        while done < n {
            let end = n.min(done + CHUNK);
            batch.tokens.clear();
            batch.tokens.extend_from_slice(&tokens[done..end]);
            batch.seqs.clear();
            batch.seqs.push(StepSeq { cached_len: done, extend_len: end - done, logits: LogitRows::Last });
            exec.step(&batch, &mut kv)?;
            done = end;
        }
        print_top(n, exec.logits(0..1));
    }
    Ok(())
}

fn print_top(n: usize, logits: &[f32]) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_unstable_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let max = f64::from(logits[order[0]]);
    let all = max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
    let best = &order[..order.len().min(20)];
    let logprobs: Vec<f64> = best.iter().map(|&i| f64::from(logits[i]) - all).collect();
    println!("{{\"tokens\": {n}, \"ids\": {best:?}, \"logprobs\": {logprobs:?}}}");
}
