//! Logits of every position of a token list, as raw little-endian f32 [tokens, vocab]: `dump_logits MODEL IDS_FILE OUT [f32|int16|int8] [f32|bf16]`.
//!
//! IDS_FILE holds token ids separated by white space. Compare with bench/peers/logit_error.py.

use std::io::Write;
use std::sync::Arc;

use suanpan_model::forward::{ExecOptions, Executor, LogitRows, MAX_LOGIT_ROWS, StepBatch, StepSeq};
use suanpan_model::{LoadOptions, load};
use suanpan_ops::Precision;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, ids, out, rest @ ..] = words.as_slice() else {
        return Err("usage: dump_logits MODEL IDS_FILE OUT [f32|int16|int8] [f32|bf16]".into());
    };
    let precision = match rest.first().map(String::as_str) {
        Some("f32") => Precision::F32,
        Some("int8") => Precision::Int8,
        None | Some("int16") => Precision::Int16,
        Some(other) => return Err(format!("precision {other}: supported: f32, int16, int8").into()),
    };
    let kv_dtype = rest.get(1).map_or(Ok(suanpan_base::DType::Bf16), |d| d.parse())?;
    let tokens =
        std::fs::read_to_string(ids)?.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    let n = tokens.len();
    let model = Arc::new(load(model, &LoadOptions::default(), &mut |_| {})?);
    let options = ExecOptions {
        precision,
        kv_dtype,
        kv_spared: suanpan_cache::LayerSet::NONE,
        kv_near: suanpan_cache::NearTokens::NONE,
        batch_invariant: false,
        threads: 2,
        max_tokens: n,
        max_seqs: 1,
        max_model_len: n,
        page_size: 16,
    };
    let mut exec = Executor::new(model, options)?;
    let mut kv = exec.kv_storage(n.div_ceil(16), None)?;
    let mut batch = StepBatch::default();
    batch.tokens.extend_from_slice(&tokens);
    batch.seqs.push(StepSeq { cached_len: 0, extend_len: n, logits: LogitRows::All });
    batch.page_table.extend(0..kv.num_pages() as u32);
    batch.page_table_stride = kv.num_pages();
    exec.step(&batch, &mut kv)?;
    let mut file = std::io::BufWriter::new(std::fs::File::create(out)?);
    for start in (0..n).step_by(MAX_LOGIT_ROWS) {
        for x in exec.logits(start..(start + MAX_LOGIT_ROWS).min(n)) {
            file.write_all(&x.to_le_bytes())?;
        }
    }
    Ok(())
}
