//! The bytes of the KV cache: one block of memory a layer for keys and one for values, cut into pages.
//!
//! Does not know who holds a page. A page of a layer is `[num_kv_heads][page_size][head_dim]`, so that one head's part
//! of a page is one contiguous run:
//! ```text
//! page p:  | head 0: slot 0, slot 1, .. | head 1: slot 0, .. | .. |
//!          '---- page_size · head_dim --'
//! ```

use half::bf16;
use memmap2::MmapMut;
use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, Buf, DType, HeadShape};

use crate::memory::HostMemory;

const OP: &str = "KV storage";

/// What one layer stores of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Head counts and widths; only the kv side matters here.
    pub heads: HeadShape,
    /// Element type of stored keys and values.
    pub dtype: DType,
}

impl LayerShape {
    /// Bytes of the keys and values of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> u64 {
        suanpan_ledger::kernel::kv_write_bytes(self.heads, tokens, self.dtype)
    }
}

/// Keys or values of one layer.
struct Side {
    /// Zero pages of the operating system: resident only as touched.
    map: MmapMut,
    head_dim: usize,
}

/// Keys and values of all layers, `num_pages` pages each.
pub struct KvStorage {
    layers: Vec<(LayerShape, Side, Side)>,
    num_pages: usize,
    page_size: usize,
    bytes: usize,
    bytes_per_page: usize,
}

impl KvStorage {
    /// Zeroed storage for `num_pages` pages of `page_size` tokens in each layer. Memory becomes resident as it is
    /// written. Refused before anything is allocated: zero sizes, sizes that overflow, more than the machine has.
    pub fn new(layers: &[LayerShape], num_pages: usize, page_size: usize) -> Result<KvStorage, BadArgument> {
        for (field, n) in [("layers", layers.len()), ("num_pages", num_pages), ("page_size", page_size)] {
            if n == 0 {
                return Err(BadArgument::new(OP, field, n, "at least 1"));
            }
        }
        let mut bytes_per_page = 0usize;
        for layer in layers {
            layer.heads.check(OP)?;
            for head_dim in [layer.heads.head_dim_qk, layer.heads.head_dim_v] {
                bytes_per_page = bytes_per_page
                    .checked_add(side_bytes(layer, head_dim, 1, page_size)?)
                    .ok_or_else(|| BadArgument::new(OP, "bytes_per_page", "past 2^64", "below 2^63"))?;
            }
        }
        let bytes = checked_product(OP, "num_pages * bytes_per_page", &[num_pages, bytes_per_page])?;
        refuse_above(bytes, HostMemory::detect().limit_bytes)?;
        let side = |layer: &LayerShape, head_dim| -> Result<Side, BadArgument> {
            let len = side_bytes(layer, head_dim, num_pages, page_size)?;
            let map = MmapMut::map_anon(len).map_err(|error| {
                let asked = format!("{bytes} ({len} of them refused: {error})");
                BadArgument::new(OP, "bytes", asked, available())
            })?;
            Ok(Side { map, head_dim })
        };
        let layers = layers
            .iter()
            .map(|l| Ok((*l, side(l, l.heads.head_dim_qk)?, side(l, l.heads.head_dim_v)?)))
            .collect::<Result<Vec<_>, BadArgument>>()?;
        Ok(KvStorage { layers, num_pages, page_size, bytes, bytes_per_page })
    }

    /// Bytes of all pages of all layers, touched or not.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of one page over all layers.
    pub fn bytes_per_page(&self) -> usize {
        self.bytes_per_page
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Pages of each layer.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// All keys of `layer`: `[num_pages, num_kv_heads, page_size, head_dim_qk]`.
    pub fn k(&self, layer: usize) -> Buf<'_> {
        let (shape, k, _) = &self.layers[layer];
        k.view(shape.dtype)
    }

    /// All values of `layer`: `[num_pages, num_kv_heads, page_size, head_dim_v]`.
    pub fn v(&self, layer: usize) -> Buf<'_> {
        let (shape, _, v) = &self.layers[layer];
        v.view(shape.dtype)
    }

    /// Elements between (tokens, heads, pages) of `k(layer)`.
    pub fn k_strides(&self, layer: usize) -> (usize, usize, usize) {
        let (shape, k, _) = &self.layers[layer];
        k.strides(shape.heads.num_kv_heads, self.page_size)
    }

    /// Elements between (tokens, heads, pages) of `v(layer)`.
    pub fn v_strides(&self, layer: usize) -> (usize, usize, usize) {
        let (shape, _, v) = &self.layers[layer];
        v.strides(shape.heads.num_kv_heads, self.page_size)
    }

    /// Stores new keys `[T, num_kv_heads, head_dim_qk]` and values `[T, num_kv_heads, head_dim_v]`, token `t` at
    /// `slots[t]` (`PageTable::slot`), converted to the layer's type (bf16: nearest, ties to even). Returns the bytes
    /// written. Panics, before it writes anything, on lengths that disagree or a slot past the storage: both are faults
    /// of the caller that would otherwise land in another request's tokens.
    pub fn write(&mut self, layer: usize, slots: &[u64], k: &[f32], v: &[f32]) -> u64 {
        let num_slots = (self.num_pages * self.page_size) as u64;
        if let Some(slot) = slots.iter().find(|&&s| s >= num_slots) {
            panic!("slot {slot} of {num_slots}");
        }
        let (shape, k_side, v_side) = &mut self.layers[layer];
        let kv_heads = shape.heads.num_kv_heads;
        assert_eq!(k.len(), slots.len() * kv_heads * k_side.head_dim, "keys of {} tokens", slots.len());
        assert_eq!(v.len(), slots.len() * kv_heads * v_side.head_dim, "values of {} tokens", slots.len());
        k_side.scatter(shape.dtype, kv_heads, self.page_size, slots, k);
        v_side.scatter(shape.dtype, kv_heads, self.page_size, slots, v);
        shape.bytes(slots.len())
    }
}

impl Side {
    fn view(&self, dtype: DType) -> Buf<'_> {
        match dtype {
            DType::F32 => Buf::F32(bytemuck::cast_slice(&self.map)),
            DType::Bf16 => Buf::Bf16(bytemuck::cast_slice(&self.map)),
        }
    }

    fn strides(&self, kv_heads: usize, page_size: usize) -> (usize, usize, usize) {
        (self.head_dim, page_size * self.head_dim, kv_heads * page_size * self.head_dim)
    }

    fn scatter(&mut self, dtype: DType, kv_heads: usize, page_size: usize, slots: &[u64], rows: &[f32]) {
        let strides = self.strides(kv_heads, page_size);
        let head_dim = self.head_dim;
        match dtype {
            DType::F32 => {
                let all: &mut [f32] = bytemuck::cast_slice_mut(&mut self.map);
                scatter(all, strides, kv_heads, page_size, head_dim, slots, rows, |to, from| {
                    to.copy_from_slice(from)
                });
            }
            DType::Bf16 => {
                let all: &mut [bf16] = bytemuck::cast_slice_mut(&mut self.map);
                scatter(all, strides, kv_heads, page_size, head_dim, slots, rows, to_bf16);
            }
        }
    }
}

/// Copies row `(t, head)` of `rows` to its place in `all`.
fn scatter<T>(
    all: &mut [T],
    (token, head, page): (usize, usize, usize),
    kv_heads: usize,
    page_size: usize,
    head_dim: usize,
    slots: &[u64],
    rows: &[f32],
    store: impl Fn(&mut [T], &[f32]),
) {
    for (&slot, row) in slots.iter().zip(rows.chunks_exact(kv_heads * head_dim)) {
        let (p, s) = (slot as usize / page_size, slot as usize % page_size);
        let base = p * page + s * token;
        for (h, from) in row.chunks_exact(head_dim).enumerate() {
            store(&mut all[base + h * head..][..head_dim], from);
        }
    }
}

/// Rounds to nearest, ties to even; a NaN stays a NaN of the same sign. Without branches, so that it vectorises.
fn to_bf16(to: &mut [bf16], from: &[f32]) {
    for (to, &from) in to.iter_mut().zip(from) {
        let bits = from.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Truncating could leave no mantissa bit, which would read as infinity: the quiet bit keeps it a NaN.
        let nan = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        *to = bf16::from_bits(if is_nan { nan } else { rounded } as u16);
    }
}

/// Bytes of one side of a layer over `num_pages` pages.
fn side_bytes(
    layer: &LayerShape,
    head_dim: usize,
    num_pages: usize,
    page_size: usize,
) -> Result<usize, BadArgument> {
    let factors = [num_pages, page_size, layer.heads.num_kv_heads, head_dim, layer.dtype.bytes()];
    checked_product(OP, "num_pages * page_size * num_kv_heads * head_dim * bytes", &factors)
}

fn refuse_above(bytes: usize, limit: Option<u64>) -> Result<(), BadArgument> {
    match limit {
        Some(limit) if bytes as u64 > limit => {
            Err(BadArgument::new(OP, "bytes", bytes, format!("at most {limit} bytes, this machine's memory")))
        }
        _ => Ok(()),
    }
}

fn available() -> String {
    match HostMemory::detect().available_bytes {
        Some(bytes) => format!("about {bytes} bytes, available now"),
        None => "less: the system refused".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_equals_the_reference_on_every_upper_half_and_tie() {
        for upper in 0..=u16::MAX {
            for lower in [0u16, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | u32::from(lower));
                let mut ours = [bf16::ZERO];
                to_bf16(&mut ours, &[x]);
                assert_eq!(ours[0].to_bits(), bf16::from_f32(x).to_bits(), "{:08x}", x.to_bits());
            }
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused_with_both_numbers() {
        let e = refuse_above(1000, Some(999)).unwrap_err().to_string();
        assert!(e.contains("1000") && e.contains("999"), "{e}");
        assert!(refuse_above(1000, Some(1000)).is_ok());
        assert!(refuse_above(1000, None).is_ok());
    }
}
