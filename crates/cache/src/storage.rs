//! The bytes of the KV cache: a block of memory for each group of layers, cut into pages; a page holds the keys and values of all layers
//! of its group.
//!
//! Does not know who holds a page. Layers that look back a window only may be a group with fewer pages of their own. A layer's part of a page is `[num_kv_heads]` runs of keys, then values, of one head:
//! ```text
//! page p:  | layer 0: head 0: K slot 0, 1, .. V slot 0, 1, .. | head 1: K .. V .. | .. | layer 1: .. | .. | page p + 1: ..
//!                     '- page_size · dqk -' '- page_size · dv -'
//! ```
//! Where values lie in keys (`HeadShape::values_in_keys`) a head has keys and their scales only.
//! One step of one layer reads long runs, a page is one run to copy elsewhere, and memory becomes resident a page at a time,
//! so that large pages of the operating system waste at most one of theirs.

use memmap2::MmapMut;
use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, Buf, DType, HeadShape};
use suanpan_ledger::kernel::{kv_write_bytes, scale_pair_bytes};

use crate::memory::HostMemory;
use crate::quant::{self, SCALE_DTYPE};

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
    /// Bytes of the keys and values of `tokens` tokens, scales included.
    pub fn bytes(&self, tokens: usize) -> u64 {
        let scales =
            scale_pair_bytes(self.heads, self.scale_bytes()) * (self.heads.num_kv_heads * tokens) as u64;
        kv_write_bytes(self.heads, tokens, self.dtype) + scales
    }

    /// Bytes of one scale; 0 for types that are stored without.
    fn scale_bytes(&self) -> usize {
        if self.dtype.is_code() { SCALE_DTYPE.bytes_of(1) } else { 0 }
    }

    /// Bytes of the codes or elements of one head in a page of `page_size` tokens.
    fn head_codes(&self, page_size: usize) -> usize {
        let side = |width: usize| self.dtype.bytes_of(page_size * width);
        let bytes = side(width(self.heads, Side::K)) + side(width(self.heads, Side::V));
        bytes.next_multiple_of(self.scale_bytes().max(1))
    }

    /// Bytes of one head in a page of `page_size` tokens.
    fn head_bytes(&self, page_size: usize) -> usize {
        self.head_codes(page_size) + page_size * scale_pair_bytes(self.heads, self.scale_bytes()) as usize
    }
}

/// Layers whose pages have one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// Layers that look back to the first token, or all layers.
    Full,
    /// Layers that look back a window, where they have pages of their own.
    Window,
}

impl Group {
    /// Both, in order.
    pub const ALL: [Group; 2] = [Group::Full, Group::Window];
}

/// Where one layer lies in every page.
struct Layer {
    shape: LayerShape,
    group: Group,
    /// Bytes from the start of a page to this layer's keys.
    offset: usize,
}

/// The pages of a group.
struct Pages {
    /// Zero pages of the operating system: resident only as touched.
    map: MmapMut,
    num_pages: usize,
    bytes_per_page: usize,
}

/// Keys and values of all layers.
pub struct KvStorage {
    layers: Vec<Layer>,
    full: Pages,
    window: Option<Pages>,
    page_size: usize,
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
        let groups: Vec<_> = layers.iter().map(|&shape| (shape, Group::Full)).collect();
        KvStorage::grouped(&groups, num_pages, None, page_size)
    }

    /// The same with layers in groups: `num_pages` pages for those of `Group::Full`, of which there may be none, and `window_pages` for
    /// those of `Group::Window`.
    pub fn grouped(
        layers: &[(LayerShape, Group)],
        num_pages: usize,
        window_pages: Option<usize>,
        page_size: usize,
    ) -> Result<KvStorage, BadArgument> {
        let sizes = [("layers", layers.len()), ("num_pages", num_pages), ("page_size", page_size)];
        for (field, n) in sizes.into_iter().chain(window_pages.map(|n| ("window_pages", n))) {
            if n == 0 {
                return Err(BadArgument::new(OP, field, n, "at least 1"));
            }
        }
        if window_pages.is_none() && layers.iter().any(|(_, group)| *group == Group::Window) {
            return Err(BadArgument::new(OP, "window_pages", "none", "pages for the layers with a window"));
        }
        let of = |group, layers: &[(LayerShape, Group)]| -> Vec<LayerShape> {
            layers.iter().filter(|(_, g)| *g == group).map(|(shape, _)| *shape).collect()
        };
        let mut placed = Vec::with_capacity(layers.len());
        for (i, &(shape, group)) in layers.iter().enumerate() {
            placed.push(Layer { shape, group, offset: bytes_per_page(&of(group, &layers[..i]), page_size)? });
        }
        let full = Pages::new(&of(Group::Full, layers), num_pages, page_size)?;
        let window =
            window_pages.map(|n| Pages::new(&of(Group::Window, layers), n, page_size)).transpose()?;
        let bytes = full.map.len() + window.as_ref().map_or(0, |w| w.map.len());
        refuse_above(bytes, HostMemory::detect().limit_bytes)?;
        Ok(KvStorage { layers: placed, full, window, page_size })
    }

    /// Bytes of all pages of all layers, touched or not.
    pub fn bytes(&self) -> usize {
        self.full.map.len() + self.window.as_ref().map_or(0, |w| w.map.len())
    }

    /// Bytes of one page over all layers of `Group::Full`.
    pub fn bytes_per_page(&self) -> usize {
        self.full.bytes_per_page
    }

    /// The group whose pages hold `layer`.
    pub fn group(&self, layer: usize) -> Group {
        self.layers[layer].group
    }

    /// Pages of the layers with a window, where they have their own.
    pub fn window_pages(&self) -> Option<usize> {
        self.window.as_ref().map(|w| w.num_pages)
    }

    fn pages(&self, group: Group) -> &Pages {
        match (group, &self.window) {
            (Group::Window, Some(window)) => window,
            _ => &self.full,
        }
    }

    fn pages_mut(&mut self, group: Group) -> &mut Pages {
        match (group, &mut self.window) {
            (Group::Window, Some(window)) => window,
            _ => &mut self.full,
        }
    }

    fn pages_of(&self, layer: usize) -> &Pages {
        self.pages(self.layers[layer].group)
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Number of pages of `Group::Full`.
    pub fn num_pages(&self) -> usize {
        self.full.num_pages
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

    /// All values of `layer` under `v_strides(layer)`, likewise; empty where they lie in keys.
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

    /// Scales of the keys of `layer`, from page 0's first to the end of the storage; empty where it stores none. One a token and head.
    pub fn k_scales(&self, layer: usize) -> Buf<'_> {
        self.scales(layer, Side::K)
    }

    /// Scales of the values of `layer`, likewise; empty where values lie in keys.
    pub fn v_scales(&self, layer: usize) -> Buf<'_> {
        self.scales(layer, Side::V)
    }

    /// Scales between (tokens, heads, pages) of `k_scales(layer)` and `v_scales(layer)`.
    pub fn scale_strides(&self, layer: usize) -> (usize, usize, usize) {
        let shape = &self.layers[layer].shape;
        let size = shape.scale_bytes().max(1);
        (1, shape.head_bytes(self.page_size) / size, self.pages_of(layer).bytes_per_page / size)
    }

    fn scales(&self, layer: usize, side: Side) -> Buf<'_> {
        let shape = &self.layers[layer].shape;
        if shape.scale_bytes() == 0 || width(shape.heads, side) == 0 {
            return Buf::F32(&[]);
        }
        let bytes = &self.pages_of(layer).map[self.scale_offset(layer, side)..];
        Buf::Bf16(bytemuck::cast_slice(bytes))
    }

    /// Bytes from the start of a page to the first scale of a side.
    fn scale_offset(&self, layer: usize, side: Side) -> usize {
        let Layer { shape, offset, .. } = &self.layers[layer];
        let keys = offset + shape.head_codes(self.page_size);
        if side == Side::K { keys } else { keys + self.page_size * shape.scale_bytes() }
    }

    /// The bytes of a page of a group, all its layers. Panics on an id past the storage.
    pub fn page(&self, group: Group, page: u32) -> &[u8] {
        let pages = self.pages(group);
        &pages.map[page as usize * pages.bytes_per_page..][..pages.bytes_per_page]
    }

    /// The same, to be filled with the bytes of a page of the same layout.
    pub fn page_mut(&mut self, group: Group, page: u32) -> &mut [u8] {
        let pages = self.pages_mut(group);
        &mut pages.map[page as usize * pages.bytes_per_page..][..pages.bytes_per_page]
    }

    /// Stores new keys `[T, num_kv_heads, head_dim_qk]` and values `[T, num_kv_heads, head_dim_v]` (none where they lie in keys), token `t` at
    /// `slots[t]` (`PageTable::slot`), converted to the layer's type (nearest, ties to even), with scales where it takes them. Returns the bytes
    /// written. Panics, before it writes anything, on lengths that disagree or a slot past the storage: both are faults
    /// of the caller that would otherwise land in another request's tokens.
    pub fn write(&mut self, layer: usize, slots: &[u64], k: &[f32], v: &[f32]) -> u64 {
        let num_slots = (self.pages_of(layer).num_pages * self.page_size) as u64;
        if let Some(slot) = slots.iter().find(|&&s| s >= num_slots) {
            panic!("slot {slot} of {num_slots}");
        }
        let shape = self.layers[layer].shape;
        let heads = shape.heads;
        let kv_heads = heads.num_kv_heads;
        assert_eq!(k.len(), slots.len() * kv_heads * width(heads, Side::K), "keys of {} tokens", slots.len());
        assert_eq!(
            v.len(),
            slots.len() * kv_heads * width(heads, Side::V),
            "values of {} tokens",
            slots.len()
        );
        self.scatter(layer, Side::K, slots, k);
        if !heads.values_in_keys {
            self.scatter(layer, Side::V, slots, v);
        }
        shape.bytes(slots.len())
    }

    /// Copies a page of a group whole, scales and all. Panics on an id past the storage.
    pub fn copy_page(&mut self, group: Group, from: u32, to: u32) {
        let Pages { map, bytes_per_page, .. } = self.pages_mut(group);
        let at = |page: u32| page as usize * *bytes_per_page;
        map.copy_within(at(from)..at(from) + *bytes_per_page, at(to));
    }

    /// Bytes from the start of a page to the first element of a side.
    fn offset(&self, layer: usize, side: Side) -> usize {
        let Layer { shape, offset, .. } = &self.layers[layer];
        match side {
            Side::K => *offset,
            Side::V => offset + shape.dtype.bytes_of(self.page_size * shape.heads.head_dim_qk),
        }
    }

    fn strides(&self, layer: usize, side: Side) -> (usize, usize, usize) {
        let shape = &self.layers[layer].shape;
        let elements = |bytes: usize| bytes * 8 / shape.dtype.bits();
        (
            width(shape.heads, side),
            elements(shape.head_bytes(self.page_size)),
            elements(self.pages_of(layer).bytes_per_page),
        )
    }

    fn view(&self, layer: usize, side: Side) -> Buf<'_> {
        let (map, held) = (&self.pages_of(layer).map, width(self.layers[layer].shape.heads, side) > 0);
        let bytes = if held { &map[self.offset(layer, side)..] } else { &map[..0] };
        match self.layers[layer].shape.dtype {
            DType::F32 => Buf::F32(bytemuck::cast_slice(bytes)),
            DType::Bf16 => Buf::Bf16(bytemuck::cast_slice(bytes)),
            DType::F16 => Buf::F16(bytemuck::cast_slice(bytes)),
            DType::E4m3 => Buf::E4m3(bytes),
            DType::I8 => Buf::I8(bytemuck::cast_slice(bytes)),
            DType::I4 => Buf::I4(bytes),
            DType::E5m2 => unreachable!("{} pages were refused", DType::E5m2),
        }
    }

    fn scatter(&mut self, layer: usize, side: Side, slots: &[u64], rows: &[f32]) {
        let Layer { shape, group, .. } = self.layers[layer];
        let place = Place {
            strides: self.strides(layer, side),
            page_size: self.page_size,
            kv_heads: shape.heads.num_kv_heads,
            head_dim: width(shape.heads, side),
        };
        let offset = self.offset(layer, side);
        if shape.dtype.is_code() {
            let scales = self.scale_offset(layer, side) - offset;
            let place = place.in_bytes(shape.dtype);
            let bytes = &mut self.pages_mut(group).map[offset..];
            return scatter_codes(bytes, &place, slots, rows, shape.dtype, scales);
        }
        let bytes = &mut self.pages_mut(group).map[offset..];
        match shape.dtype {
            DType::F32 => {
                scatter(bytemuck::cast_slice_mut(bytes), &place, slots, rows, |to: &mut [f32], from| {
                    to.copy_from_slice(from)
                })
            }
            DType::F16 => scatter(bytemuck::cast_slice_mut(bytes), &place, slots, rows, quant::to_f16),
            _ => scatter(bytemuck::cast_slice_mut(bytes), &place, slots, rows, quant::to_bf16),
        }
    }
}

impl Pages {
    fn new(layers: &[LayerShape], num_pages: usize, page_size: usize) -> Result<Pages, BadArgument> {
        let bytes_per_page = bytes_per_page(layers, page_size)?;
        let bytes = checked_product(OP, "num_pages * bytes_per_page", &[num_pages, bytes_per_page])?;
        refuse_above(bytes, HostMemory::detect().limit_bytes)?;
        let map = MmapMut::map_anon(bytes).map_err(|error| {
            BadArgument::new(OP, "bytes", format!("{bytes} (refused: {error})"), available())
        })?;
        ask_for_large_pages(&map);
        Ok(Pages { map, num_pages, bytes_per_page })
    }
}

/// Elements stored of a token and kv head.
fn width(heads: HeadShape, side: Side) -> usize {
    match side {
        Side::K => heads.head_dim_qk,
        Side::V if heads.values_in_keys => 0,
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

impl Place {
    /// The same with strides in bytes.
    fn in_bytes(self, dtype: DType) -> Place {
        let (token, head, page) = self.strides;
        Place { strides: (dtype.bytes_of(token), dtype.bytes_of(head), dtype.bytes_of(page)), ..self }
    }
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

/// Writes codes and scales; `at` counts bytes from the side's first code, `scales` is where its first scale lies.
fn scatter_codes(all: &mut [u8], at: &Place, slots: &[u64], rows: &[f32], dtype: DType, scales: usize) {
    let (token, head, page) = at.strides;
    let row_bytes = dtype.bytes_of(at.head_dim);
    for (&slot, row) in slots.iter().zip(rows.chunks_exact(at.kv_heads * at.head_dim)) {
        let (p, s) = (slot as usize / at.page_size, slot as usize % at.page_size);
        for (h, from) in row.chunks_exact(at.head_dim).enumerate() {
            let base = p * page + h * head;
            let scale = quant::write_codes(dtype, from, &mut all[base + s * token..][..row_bytes]);
            let size = SCALE_DTYPE.bytes_of(1);
            all[base + scales + s * size..][..size].copy_from_slice(&scale.to_bits().to_ne_bytes());
        }
    }
}

/// Refuses a layer whose rows cannot be stored.
fn check_layer(shape: &LayerShape) -> Result<(), BadArgument> {
    shape.heads.check(OP)?;
    if !quant::is_stored(shape.dtype) {
        return Err(BadArgument::new(OP, "dtype", shape.dtype, "f32, bf16, f16, fp8_e4m3, int8, int4"));
    }
    let heads = shape.heads;
    for (field, d) in [("head_dim_qk", heads.head_dim_qk), ("head_dim_v", heads.head_dim_v)] {
        if shape.dtype == DType::I4 && !d.is_multiple_of(2) {
            return Err(BadArgument::new(OP, field, d, "an even width for int4: two elements a byte"));
        }
    }
    Ok(())
}

/// Bytes of one page of `page_size` tokens over all `layers`: what a cache of these layers takes.
pub fn bytes_per_page(layers: &[LayerShape], page_size: usize) -> Result<usize, BadArgument> {
    layers.iter().try_fold(0usize, |before, shape| {
        check_layer(shape)?;
        page_bytes(shape, page_size)?
            .checked_add(before)
            .and_then(|n| n.checked_next_multiple_of(ALIGN))
            .ok_or_else(|| BadArgument::new(OP, "bytes_per_page", "past 2^64", "below 2^63"))
    })
}

/// Bytes of a layer's part of a page.
fn page_bytes(layer: &LayerShape, page_size: usize) -> Result<usize, BadArgument> {
    let heads = layer.heads;
    let width = heads.head_dim_qk.checked_add(heads.head_dim_v);
    let width = width.ok_or_else(|| BadArgument::new(OP, "head_dim", "past 2^64", "below 2^63"))?;
    // Room for every type and its scales: what follows cannot overflow.
    let factors = [page_size, heads.num_kv_heads, width, 16];
    checked_product(OP, "page_size * num_kv_heads * (head_dim_qk + head_dim_v) * bytes", &factors)?;
    Ok(heads.num_kv_heads * layer.head_bytes(page_size))
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
    fn more_than_the_machine_has_is_refused_with_both_numbers() {
        let e = refuse_above(1000, Some(999)).unwrap_err().to_string();
        assert!(e.contains("1000") && e.contains("999"), "{e}");
        assert!(refuse_above(1000, Some(1000)).is_ok());
        assert!(refuse_above(1000, None).is_ok());
    }
}
