//! The bytes of the KV cache: one block of memory, cut into pages; a page holds the keys and values of all layers.
//!
//! Does not know who holds a page. A layer's part of a page is `[num_kv_heads]` runs of keys, then values, of one head:
//! ```text
//! page p:  | layer 0: head 0: K slot 0, 1, .. V slot 0, 1, .. | head 1: K .. V .. | .. | layer 1: .. | .. | page p + 1: ..
//!                     '- page_size · dqk -' '- page_size · dv -'
//! ```
//! One step of one layer reads long runs, a page is one run to copy elsewhere, and memory becomes resident a page at a time,
//! so that large pages of the operating system waste at most one of theirs.

use half::bf16;
use memmap2::MmapMut;
use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, Buf, DType, HeadShape};

use crate::memory::HostMemory;

const OP: &str = "KV storage";
/// Each layer's part of a page, and so each page, starts on a cache line.
const ALIGN: usize = 64;

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

/// Where one layer lies in every page.
struct Layer {
    shape: LayerShape,
    /// Bytes from the start of a page to this layer's keys.
    offset: usize,
}

/// Keys and values of all layers, `num_pages` pages.
pub struct KvStorage {
    layers: Vec<Layer>,
    /// Zero pages of the operating system: resident only as touched.
    map: MmapMut,
    num_pages: usize,
    page_size: usize,
    bytes_per_page: usize,
}

/// Keys or values.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    K,
    V,
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
        let mut placed = Vec::with_capacity(layers.len());
        for &shape in layers {
            shape.heads.check(OP)?;
            if !DType::UNSCALED.contains(&shape.dtype) {
                // Codes need scales, which these pages have no place for.
                return Err(BadArgument::new(OP, "dtype", shape.dtype, "f32, bf16"));
            }
            placed.push(Layer { shape, offset: bytes_per_page });
            bytes_per_page = page_bytes(&shape, page_size)?
                .checked_add(bytes_per_page)
                .and_then(|n| n.checked_next_multiple_of(ALIGN))
                .ok_or_else(|| BadArgument::new(OP, "bytes_per_page", "past 2^64", "below 2^63"))?;
        }
        let bytes = checked_product(OP, "num_pages * bytes_per_page", &[num_pages, bytes_per_page])?;
        refuse_above(bytes, HostMemory::detect().limit_bytes)?;
        let map = MmapMut::map_anon(bytes).map_err(|error| {
            BadArgument::new(OP, "bytes", format!("{bytes} (refused: {error})"), available())
        })?;
        ask_for_large_pages(&map);
        Ok(KvStorage { layers: placed, map, num_pages, page_size, bytes_per_page })
    }

    /// Bytes of all pages of all layers, touched or not.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Bytes of one page over all layers.
    pub fn bytes_per_page(&self) -> usize {
        self.bytes_per_page
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Number of pages.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// What `layer` stores of a token.
    pub fn layer(&self, layer: usize) -> LayerShape {
        self.layers[layer].shape
    }

    /// All keys of `layer` under `k_strides(layer)`, from the first element of page 0 to the end of the storage.
    pub fn k(&self, layer: usize) -> Buf<'_> {
        self.view(layer, Side::K)
    }

    /// All values of `layer` under `v_strides(layer)`, likewise.
    pub fn v(&self, layer: usize) -> Buf<'_> {
        self.view(layer, Side::V)
    }

    /// Elements between (tokens, heads, pages) of `k(layer)`.
    pub fn k_strides(&self, layer: usize) -> (usize, usize, usize) {
        self.strides(layer, Side::K)
    }

    /// Elements between (tokens, heads, pages) of `v(layer)`.
    pub fn v_strides(&self, layer: usize) -> (usize, usize, usize) {
        self.strides(layer, Side::V)
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
        let shape = self.layers[layer].shape;
        let heads = shape.heads;
        let kv_heads = heads.num_kv_heads;
        assert_eq!(k.len(), slots.len() * kv_heads * heads.head_dim_qk, "keys of {} tokens", slots.len());
        assert_eq!(v.len(), slots.len() * kv_heads * heads.head_dim_v, "values of {} tokens", slots.len());
        self.scatter(layer, Side::K, slots, k);
        self.scatter(layer, Side::V, slots, v);
        shape.bytes(slots.len())
    }

    /// Copies a page whole, scales and all. Panics on an id past the storage.
    pub fn copy_page(&mut self, from: u32, to: u32) {
        let at = |page: u32| page as usize * self.bytes_per_page;
        self.map.copy_within(at(from)..at(from) + self.bytes_per_page, at(to));
    }

    /// Bytes from the start of a page to the first element of a side.
    fn offset(&self, layer: usize, side: Side) -> usize {
        let Layer { shape, offset } = &self.layers[layer];
        match side {
            Side::K => *offset,
            Side::V => offset + shape.dtype.bytes_of(self.page_size * shape.heads.head_dim_qk),
        }
    }

    fn strides(&self, layer: usize, side: Side) -> (usize, usize, usize) {
        let LayerShape { heads, dtype } = self.layers[layer].shape;
        let head = self.page_size * (heads.head_dim_qk + heads.head_dim_v);
        (width(heads, side), head, self.bytes_per_page / dtype.bytes_of(1))
    }

    fn view(&self, layer: usize, side: Side) -> Buf<'_> {
        let bytes = &self.map[self.offset(layer, side)..];
        match self.layers[layer].shape.dtype {
            DType::F32 => Buf::F32(bytemuck::cast_slice(bytes)),
            DType::Bf16 => Buf::Bf16(bytemuck::cast_slice(bytes)),
            other => unreachable!("{other} pages were refused"),
        }
    }

    fn scatter(&mut self, layer: usize, side: Side, slots: &[u64], rows: &[f32]) {
        let LayerShape { heads, dtype } = self.layers[layer].shape;
        let place = Place {
            strides: self.strides(layer, side),
            page_size: self.page_size,
            kv_heads: heads.num_kv_heads,
            head_dim: width(heads, side),
        };
        let offset = self.offset(layer, side);
        let bytes = &mut self.map[offset..];
        match dtype {
            DType::F32 => {
                scatter(bytemuck::cast_slice_mut(bytes), &place, slots, rows, |to: &mut [f32], from| {
                    to.copy_from_slice(from)
                })
            }
            DType::Bf16 => scatter(bytemuck::cast_slice_mut(bytes), &place, slots, rows, to_bf16),
            other => unreachable!("{other} pages were refused"),
        }
    }
}

fn width(heads: HeadShape, side: Side) -> usize {
    match side {
        Side::K => heads.head_dim_qk,
        Side::V => heads.head_dim_v,
    }
}

/// Decode streams over the whole cache: with small pages of the operating system the walks of its page tables cost a third of the
/// bandwidth. Only a hint: a system that refuses it is slower and not wrong.
fn ask_for_large_pages(map: &MmapMut) {
    #[cfg(target_os = "linux")]
    map.advise(memmap2::Advice::HugePage).ok();
    #[cfg(not(target_os = "linux"))]
    let _ = map;
}

/// How the rows of one side lie in its view.
struct Place {
    /// Elements between (tokens, heads, pages).
    strides: (usize, usize, usize),
    page_size: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// Copies row `(t, head)` of `rows` to its place in `all`.
fn scatter<T>(all: &mut [T], at: &Place, slots: &[u64], rows: &[f32], store: impl Fn(&mut [T], &[f32])) {
    let (token, head, page) = at.strides;
    for (&slot, row) in slots.iter().zip(rows.chunks_exact(at.kv_heads * at.head_dim)) {
        let (p, s) = (slot as usize / at.page_size, slot as usize % at.page_size);
        let base = p * page + s * token;
        for (h, from) in row.chunks_exact(at.head_dim).enumerate() {
            store(&mut all[base + h * head..][..at.head_dim], from);
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

/// Bytes of a layer's part of a page.
fn page_bytes(layer: &LayerShape, page_size: usize) -> Result<usize, BadArgument> {
    let heads = layer.heads;
    let width = heads.head_dim_qk.checked_add(heads.head_dim_v);
    let width = width.ok_or_else(|| BadArgument::new(OP, "head_dim", "past 2^64", "below 2^63"))?;
    let factors = [page_size, heads.num_kv_heads, width, layer.dtype.bytes_of(1)];
    checked_product(OP, "page_size * num_kv_heads * (head_dim_qk + head_dim_v) * bytes", &factors)
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
