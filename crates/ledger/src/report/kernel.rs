//! One attention call as a report: what plain attention materialises beside what tiled attention moves.

use std::fmt;

use serde::Serialize;
use suanpan_base::{BadArgument, DType, HeadShape, Mask, SeqLen};

use super::{bytes, digits, table, time};
use crate::entry::Entry;
use crate::kernel;
use crate::machine::{Bound, Floor, MACHINES};

const OP: &str = "kernel ledger";

/// Most query tiles accepted: the ledger walks them.
const MAX_TILES: usize = 1 << 26;

/// One sequence of an attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRequest {
    /// Head counts and widths.
    pub heads: HeadShape,
    /// Visibility.
    pub mask: Mask,
    /// Lengths; both at least 1.
    pub len: SeqLen,
    /// Element type of everything.
    pub dtype: DType,
    /// Query tokens a tile.
    pub tile_q: usize,
}

/// What a way of computing attention costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// The books.
    #[serde(flatten)]
    pub entry: Entry,
    /// FLOPs per byte of device memory moved.
    pub intensity_flops_per_byte: f64,
}

/// Plain attention's cost, and what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlainCost {
    /// Elements of the score matrix, all heads.
    pub scores: u64,
    /// Bytes of one copy of it.
    pub score_copy_bytes: u64,
    /// The whole call.
    #[serde(flatten)]
    pub cost: Cost,
}

/// The least times on one machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MachineFloors {
    /// Short name.
    pub machine: &'static str,
    /// Where its peaks come from.
    pub source: &'static str,
    /// FLOPs per byte above which arithmetic is the limit.
    pub ridge_flops_per_byte: f64,
    /// Plain attention.
    pub plain: Floor,
    /// Tiled attention, keys and values from device memory for every tile.
    pub tiled: Floor,
    /// Tiled attention, every byte moved once.
    pub once: Floor,
}

/// Visibility, as JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MaskReport {
    /// Whether keys after the row are hidden.
    pub causal: bool,
    /// Keys a row sees, its own included; null: all.
    pub window: Option<usize>,
}

/// The report; the keys of its JSON form are stable.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelReport {
    /// Query tokens.
    pub seqlen_q: usize,
    /// Key tokens.
    pub seqlen_k: usize,
    /// Query heads.
    pub num_q_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of a query and a key.
    pub head_dim_qk: usize,
    /// Width of a value and an output.
    pub head_dim_v: usize,
    /// Element type.
    pub dtype: &'static str,
    /// Visibility.
    pub mask: MaskReport,
    /// Query tokens a tile.
    pub tile_q: usize,
    /// Visible (query, key) pairs, summed over query heads.
    pub pairs: u64,
    /// Scores and probabilities in device memory.
    pub plain: PlainCost,
    /// Online softmax over tiles; keys and values come from device memory for every query tile.
    pub tiled: Cost,
    /// The same with every byte of q, k, v, out and lse moved once: the least any exact kernel moves.
    pub once: Cost,
    /// Least times, machine by machine.
    pub machines: Vec<MachineFloors>,
}

impl KernelRequest {
    /// The report. Refused by field: zero sizes, heads that do not group, more tiles or FLOPs than can be counted.
    pub fn report(&self) -> Result<KernelReport, BadArgument> {
        self.check()?;
        let KernelRequest { heads, mask, len, dtype, tile_q } = *self;
        let plain = kernel::plain(heads, len, dtype);
        let tiled = kernel::tiled(heads, mask, len, dtype, tile_q);
        // One tile over all queries loads each visible key once.
        let once = kernel::tiled(heads, mask, len, dtype, len.seqlen_q);
        let machines = MACHINES.iter().map(|m| MachineFloors {
            machine: m.name,
            source: m.source,
            ridge_flops_per_byte: m.ridge_flops_per_byte(dtype),
            plain: m.floor(&plain.entry, dtype),
            tiled: m.floor(&tiled, dtype),
            once: m.floor(&once, dtype),
        });
        Ok(KernelReport {
            seqlen_q: len.seqlen_q,
            seqlen_k: len.seqlen_k,
            num_q_heads: heads.num_q_heads,
            num_kv_heads: heads.num_kv_heads,
            head_dim_qk: heads.head_dim_qk,
            head_dim_v: heads.head_dim_v,
            dtype: dtype.name(),
            mask: MaskReport { causal: mask.right == Some(0), window: mask.left.map(|l| l + 1) },
            tile_q,
            pairs: mask.visible_pairs(len) * heads.num_q_heads as u64,
            plain: PlainCost {
                scores: plain.scores,
                score_copy_bytes: plain.score_copy_bytes,
                cost: Cost::new(plain.entry),
            },
            tiled: Cost::new(tiled),
            once: Cost::new(once),
            machines: machines.collect(),
        })
    }

    fn check(&self) -> Result<(), BadArgument> {
        self.heads.check(OP)?;
        for (field, n) in
            [("seqlen_q", self.len.seqlen_q), ("seqlen_k", self.len.seqlen_k), ("tile_q", self.tile_q)]
        {
            if n == 0 {
                return Err(BadArgument::new(OP, field, n, "at least 1"));
            }
        }
        if self.dtype.is_code() {
            // One type stands for q, k, v and o here, and q and o are never codes.
            return Err(BadArgument::new(OP, "dtype", self.dtype, "f32, bf16, f16"));
        }
        let tiles = self.len.seqlen_q.div_ceil(self.tile_q);
        if tiles > MAX_TILES {
            let asked = format!("{} ({tiles} tiles)", self.tile_q);
            return Err(BadArgument::new(OP, "tile_q", asked, format!("at most {MAX_TILES} tiles")));
        }
        // Every number of the report is below 16 · scores · widths: FLOPs are 2 of it, bytes at most 4 an element.
        let factors = [16, self.heads.num_q_heads, self.len.seqlen_q, self.len.seqlen_k];
        let width = self.heads.head_dim_qk.checked_add(self.heads.head_dim_v);
        let fits = width.and_then(|width| {
            factors.iter().try_fold(width as u64, |product, &f| product.checked_mul(f as u64))
        });
        if fits.is_none() {
            let asked = format!("{} x {} tokens", self.len.seqlen_q, self.len.seqlen_k);
            return Err(BadArgument::new(
                OP,
                "seqlen_q * seqlen_k",
                asked,
                "16 * scores * widths below 2^64",
            ));
        }
        Ok(())
    }
}

impl Cost {
    fn new(entry: Entry) -> Cost {
        let moved = entry.device_read_bytes + entry.device_write_bytes;
        Cost { entry, intensity_flops_per_byte: entry.flops as f64 / moved as f64 }
    }
}

impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mask = match (self.mask.causal, self.mask.window) {
            (_, Some(window)) => format!("causal, window {}", digits(window as u64)),
            (true, None) => "causal".into(),
            (false, None) => "no mask".into(),
        };
        let dims = if self.head_dim_qk == self.head_dim_v {
            format!("head_dim {}", self.head_dim_qk)
        } else {
            format!("head_dim_qk {}, head_dim_v {}", self.head_dim_qk, self.head_dim_v)
        };
        writeln!(
            f,
            "attention: {} queries x {} keys, {} query heads over {} kv heads, {dims}, {}, {mask}",
            digits(self.seqlen_q as u64),
            digits(self.seqlen_k as u64),
            self.num_q_heads,
            self.num_kv_heads,
            self.dtype,
        )?;
        writeln!(
            f,
            "plain attention materialises {} scores, {} a copy; {} of the pairs are visible\n",
            digits(self.plain.scores),
            bytes(self.plain.score_copy_bytes),
            digits(self.pairs),
        )?;
        self.costs(f)?;
        writeln!(f, "\nleast time, and what sets it:")?;
        self.floors(f)?;
        writeln!(f, "\ntiled: keys and values from device memory for each tile of {} queries", self.tile_q)?;
        writeln!(f, "once: caches hold keys and values, every byte moves once")?;
        for m in &self.machines {
            writeln!(f, "{}: {}", m.machine, m.source)?;
        }
        Ok(())
    }
}

impl KernelReport {
    fn costs(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let costs = [self.plain.cost, self.tiled, self.once];
        let row = |name: &str, cell: &dyn Fn(&Cost) -> String| {
            std::iter::once(name.to_string()).chain(costs.iter().map(cell)).collect::<Vec<_>>()
        };
        table(
            f,
            &[
                ["", "plain", "tiled", "once"].map(String::from).to_vec(),
                row("FLOPs", &|c| digits(c.entry.flops)),
                row("bytes read", &|c| digits(c.entry.device_read_bytes)),
                row("bytes written", &|c| digits(c.entry.device_write_bytes)),
                row("moved", &|c| bytes(c.entry.device_read_bytes + c.entry.device_write_bytes)),
                row("FLOPs per byte", &|c| format!("{:.1}", c.intensity_flops_per_byte)),
            ],
        )
    }

    fn floors(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cell = |floor: Floor| {
            let bound = if floor.bound == Bound::Compute { "compute" } else { "memory" };
            format!("{} {bound:>7}", time(floor.floor_us))
        };
        let mut rows = vec![["", "plain", "tiled", "once"].map(String::from).to_vec()];
        rows.extend(
            self.machines.iter().map(|m| vec![m.machine.into(), cell(m.plain), cell(m.tiled), cell(m.once)]),
        );
        table(f, &rows)
    }
}
