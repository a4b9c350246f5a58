//! A KV cache as a report: bytes by element type and group size, pages, waste, and what fits.

use std::fmt;

use serde::Serialize;
use suanpan_base::{BadArgument, HeadShape};

use super::{bytes, digits, table};
use crate::cache::{CacheLedger, CacheRequest};

/// The report; the keys of its JSON form are stable.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheReport {
    /// What was asked about.
    pub model: String,
    /// Query heads of the first layer.
    pub num_q_heads: usize,
    /// Key/value heads of the first layer.
    pub num_kv_heads: usize,
    /// Query heads per kv head.
    pub group_size: usize,
    /// Width of a key.
    pub head_dim_qk: usize,
    /// Width of a value.
    pub head_dim_v: usize,
    /// Values are parts of keys.
    pub values_in_keys: bool,
    /// The books.
    #[serde(flatten)]
    pub ledger: CacheLedger,
}

impl CacheReport {
    /// The report on `request`, named after `model`.
    pub fn new(model: impl Into<String>, request: &CacheRequest) -> Result<CacheReport, BadArgument> {
        let ledger = request.ledger()?;
        let heads = request.layers[0].heads;
        let HeadShape { num_q_heads, num_kv_heads, head_dim_qk, head_dim_v, values_in_keys } = heads;
        let group_size = num_q_heads / num_kv_heads;
        Ok(CacheReport {
            model: model.into(),
            num_q_heads,
            num_kv_heads,
            group_size,
            head_dim_qk,
            head_dim_v,
            values_in_keys,
            ledger,
        })
    }
}

impl fmt::Display for CacheReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let l = &self.ledger;
        let same = !l.groups.is_empty();
        let heads = format!(
            "{} query heads over {} kv heads (groups of {})",
            self.num_q_heads, self.num_kv_heads, self.group_size
        );
        let heads = if same { heads } else { "heads that differ by layer".into() };
        writeln!(f, "KV cache of {}: {} layers, {heads}", self.model, l.layers)?;
        let (batch, context) = (digits(l.batch as u64), digits(l.context_tokens as u64));
        writeln!(f, "batch {batch}, {context} tokens each, pages of {} tokens\n", l.page_size_tokens)?;
        let width = match (self.head_dim_qk, self.head_dim_v) {
            (qk, _) if self.values_in_keys => [
                format!("{} · {} · {qk}", l.layers, self.num_kv_heads),
                "layers · kv_heads · head_dim_qk (values lie in keys)".into(),
            ],
            (qk, v) if qk == v => [
                format!("2 · {} · {} · {v}", l.layers, self.num_kv_heads),
                "2 · layers · kv_heads · head_dim".into(),
            ],
            (qk, v) => [
                format!("{} · {} · ({qk} + {v})", l.layers, self.num_kv_heads),
                "layers · kv_heads · (head_dim_qk + head_dim_v)".into(),
            ],
        };
        if same {
            writeln!(f, "bytes = batch · tokens · {} · element", width[1])?;
            writeln!(f, "      = {batch} · {context} · {} · element\n", width[0])?;
        } else {
            writeln!(
                f,
                "bytes = batch · tokens · sum over layers of kv_heads · (head_dim_qk + head_dim_v, or head_dim_qk where values lie in keys) · element\n"
            )?;
        }
        self.by_dtype(f)?;
        writeln!(
            f,
            "\npages: {} a sequence, {} in all; the last page of each sequence leaves {} of {} slots empty",
            digits(l.pages_per_sequence),
            digits(l.pages),
            l.waste_tokens_per_sequence,
            l.page_size_tokens,
        )?;
        if l.window_layers > 0 {
            writeln!(
                f,
                "windows: {} of {} layers see a window only; \"windows only\" keeps no more than that for them",
                l.window_layers, l.layers
            )?;
        }
        self.by_group(f)
    }
}

impl CacheReport {
    fn by_dtype(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtypes = &self.ledger.dtypes;
        let mut rows = vec![vec![String::new()]];
        let mut row = |name: String, cells: Vec<String>| rows.push([vec![name], cells].concat());
        let each = |n: &dyn Fn(&crate::cache::DTypeCache) -> String| dtypes.iter().map(n).collect::<Vec<_>>();
        row("a token".into(), each(&|d| bytes(d.bytes_per_token)));
        row("a page".into(), each(&|d| bytes(d.bytes_per_page)));
        row("all tokens, bytes".into(), each(&|d| digits(d.bytes)));
        row("all tokens".into(), each(&|d| bytes(d.bytes)));
        row("allocated in pages".into(), each(&|d| bytes(d.allocated_bytes)));
        row("waste of last pages".into(), each(&|d| bytes(d.waste_bytes)));
        if self.ledger.window_layers > 0 {
            row("windows only".into(), each(&|d| bytes(d.windowed_bytes)));
        }
        if let Some(fits) = dtypes[0].fits {
            let fits_of = |n: &dyn Fn(crate::cache::Fits) -> u64| {
                dtypes
                    .iter()
                    .map(|d| d.fits.map_or_else(String::new, |fits| digits(n(fits))))
                    .collect::<Vec<_>>()
            };
            let memory = bytes(fits.memory_bytes);
            row(format!("{memory} hold, in pages"), fits_of(&|f| f.pages));
            row("  sequences of this length".into(), fits_of(&|f| f.sequences));
            row(
                format!("  tokens each at batch {}", digits(self.ledger.batch as u64)),
                fits_of(&|f| f.context_tokens),
            );
        }
        rows[0].extend(dtypes.iter().map(|d| d.dtype.to_string()));
        table(f, &rows)
    }

    fn by_group(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ledger.groups.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nby group size (1 = MHA, {} = MQA):", self.num_q_heads)?;
        let mut rows = vec![["group", "kv heads"].map(String::from).to_vec()];
        rows[0].extend(self.ledger.dtypes.iter().map(|d| d.dtype.to_string()));
        for g in &self.ledger.groups {
            let mark = if g.this_model { " <- this model" } else { "" };
            let mut row = vec![g.group_size.to_string(), g.num_kv_heads.to_string()];
            row.extend(self.ledger.dtypes.iter().map(|d| bytes(g.bytes[d.dtype])));
            row.push(mark.into());
            rows.push(row);
        }
        table(f, &rows)
    }
}
