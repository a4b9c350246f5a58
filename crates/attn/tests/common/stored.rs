//! Stored element types: flat buffers of each, the grid of each, and scales with every unused place poisoned.

use half::{bf16, f16};
use suanpan_attn::{KvScales, Strides};
use suanpan_base::{Buf, BufMut, DType, ScaleGrain, codes};

use super::Case;

/// The element nearest to `x`.
pub fn on_grid(x: f32, dtype: DType) -> f32 {
    match dtype {
        // A buffer for each number is what an interpreter spends its time on.
        DType::F32 => x,
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        _ => {
            let mut one = Flat::filled(2, 0.0, dtype);
            one.set(0, x);
            one.buf().get(0)
        }
    }
}

/// A flat buffer of any type.
pub enum Flat {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    E4m3(Vec<u8>),
    E5m2(Vec<u8>),
    I8(Vec<i8>),
    I4(Vec<u8>),
}

impl Flat {
    pub fn filled(n: usize, x: f32, dtype: DType) -> Flat {
        let mut flat = match dtype {
            DType::F32 => return Flat::F32(vec![x; n]),
            DType::Bf16 => return Flat::Bf16(vec![bf16::from_f32(x); n]),
            DType::F16 => Flat::F16(vec![f16::ZERO; n]),
            DType::E4m3 => Flat::E4m3(vec![0; n]),
            DType::E5m2 => Flat::E5m2(vec![0; n]),
            DType::I8 => Flat::I8(vec![0; n]),
            DType::I4 => Flat::I4(vec![0; n.div_ceil(2)]),
        };
        (0..n).for_each(|i| flat.set(i, x));
        flat
    }
    pub fn of(x: &[f32], dtype: DType) -> Flat {
        let mut flat = Flat::filled(x.len(), 0.0, dtype);
        x.iter().enumerate().for_each(|(i, &x)| flat.set(i, x));
        flat
    }
    /// The nearest element; what integers cannot be, NaN and infinities, is their lowest number.
    pub fn set(&mut self, i: usize, x: f32) {
        match self {
            Flat::F32(v) => v[i] = x,
            Flat::Bf16(v) => v[i] = bf16::from_f32(x),
            Flat::F16(v) => v[i] = f16::from_f32(x),
            Flat::E4m3(v) => v[i] = if x.is_finite() { codes::e4m3_from_f32(x) } else { 0xff },
            Flat::E5m2(v) if x.is_infinite() => v[i] = if x > 0.0 { 0x7c } else { 0xfc },
            Flat::E5m2(v) => v[i] = codes::e5m2_from_f32(x),
            Flat::I8(v) => v[i] = if x.is_finite() { codes::int8_from_f32(x) } else { -128 },
            Flat::I4(v) => codes::set_int4(v, i, if x.is_finite() { codes::int4_from_f32(x) } else { -8 }),
        }
    }
    pub fn buf(&self) -> Buf<'_> {
        match self {
            Flat::F32(v) => Buf::F32(v),
            Flat::Bf16(v) => Buf::Bf16(v),
            Flat::F16(v) => Buf::F16(v),
            Flat::E4m3(v) => Buf::E4m3(v),
            Flat::E5m2(v) => Buf::E5m2(v),
            Flat::I8(v) => Buf::I8(v),
            Flat::I4(v) => Buf::I4(v),
        }
    }
    pub fn buf_mut(&mut self) -> BufMut<'_> {
        match self {
            Flat::F32(v) => BufMut::F32(v),
            Flat::Bf16(v) => BufMut::Bf16(v),
            Flat::F16(v) => BufMut::F16(v),
            _ => panic!("not a type of outputs"),
        }
    }
    pub fn to_f32(&self) -> Vec<f32> {
        let buf = self.buf();
        (0..buf.len()).map(|i| buf.get(i)).collect()
    }
}

/// The scale of a key (side 0) or value (side 1), of 12 bits, so that its products with codes are exact in f32; normal data fill
/// about the type's range.
pub fn scale_of(c: &Case, side: usize, seq: usize, key: usize, head: usize) -> f32 {
    let page = c.page_size.map_or(0, |p| key / p);
    // What lies in keys has their scales.
    let side = if c.heads.values_in_keys { 0 } else { side };
    let (seq, key, head) = match c.kv_scales {
        ScaleGrain::None => return 1.0,
        ScaleGrain::Tensor => (0, 0, 0),
        ScaleGrain::Head => (0, 0, head),
        ScaleGrain::Token => (seq, key, head),
        ScaleGrain::Page => (seq, page, head),
    };
    let mix =
        (c.seed as usize + side * 7 + seq * 1009 + key * 31 + head * 613).wrapping_mul(2_654_435_761) >> 7;
    let unit = match c.kv_dtype {
        DType::I8 => 1.0 / 64.0,
        DType::I4 => 0.5,
        _ => 1.0,
    };
    let mix = if scale_dtype(c) == DType::Bf16 { mix % 4096 / 32 * 32 } else { mix % 4096 };
    unit * (2048 + mix) as f32 / 4096.0
}

/// By seed; bf16 holds scales of 8 bits.
pub fn scale_dtype(c: &Case) -> DType {
    if c.kv_scales != ScaleGrain::None && c.seed % 3 == 1 { DType::Bf16 } else { DType::F32 }
}

/// The scales of a call as they lie in memory.
pub struct ScaleLayout {
    k: Vec<f32>,
    v: Vec<f32>,
    /// The same in bf16.
    halves: [Vec<bf16>; 2],
    dtype: DType,
    strides: Strides,
}

impl ScaleLayout {
    fn new(c: &Case, poison: f32, strides: Strides, places: usize) -> ScaleLayout {
        let all = if c.kv_scales == ScaleGrain::None { 0 } else { places };
        let values = if c.heads.values_in_keys { 0 } else { all };
        let halves = [vec![bf16::from_f32(poison); all], vec![bf16::from_f32(poison); values]];
        let (k, v) = (vec![poison; all], vec![poison; values]);
        let mut layout = ScaleLayout { k, v, halves, dtype: scale_dtype(c), strides };
        if matches!(c.kv_scales, ScaleGrain::Tensor | ScaleGrain::Head) {
            for head in 0..c.heads.num_kv_heads {
                layout.set(c, 0, 0, head, (scale_of(c, 0, 0, 0, head), scale_of(c, 1, 0, 0, head)));
            }
        }
        layout
    }

    pub fn contiguous(c: &Case, poison: f32) -> ScaleLayout {
        let (kv, total) = (c.heads.num_kv_heads, c.total_k());
        // By seed, heads side by side or tokens side by side.
        let strides = match c.seed % 2 {
            0 => Strides { token: kv + 1, head: 1, page: 77 },
            _ => Strides { token: 1, head: total + 3, page: 77 },
        };
        let mut layout = ScaleLayout::new(c, poison, strides, (total + 3) * (kv + 1));
        if c.kv_scales == ScaleGrain::Token {
            let mut first = 0;
            for (i, s) in c.seqs.iter().enumerate() {
                for (key, head) in (0..s.seqlen_k).flat_map(|key| (0..kv).map(move |head| (key, head))) {
                    let pair = (scale_of(c, 0, i, key, head), scale_of(c, 1, i, key, head));
                    layout.set(c, 0, first + key, head, pair);
                }
                first += s.seqlen_k;
            }
        }
        layout
    }

    /// Nothing is set yet where scales belong to pages or their tokens.
    pub fn paged(c: &Case, poison: f32, num_pages: usize, page_size: usize) -> ScaleLayout {
        let kv = c.heads.num_kv_heads;
        let page = if c.kv_scales == ScaleGrain::Page { kv + 1 } else { kv * page_size + 3 };
        let (token, head) = match (c.kv_scales, c.seed % 2) {
            (ScaleGrain::Page, _) => (55, 1),
            (_, 0) => (kv, 1),
            _ => (1, page_size),
        };
        ScaleLayout::new(c, poison, Strides { token, head, page }, num_pages * page)
    }

    pub fn set(&mut self, c: &Case, page: usize, slot: usize, head: usize, (k, v): (f32, f32)) {
        let s = self.strides;
        let at = match c.kv_scales {
            ScaleGrain::None => return,
            ScaleGrain::Tensor => 0,
            ScaleGrain::Head => head * s.head,
            ScaleGrain::Token if c.page_size.is_none() => slot * s.token + head * s.head,
            ScaleGrain::Token => page * s.page + slot * s.token + head * s.head,
            ScaleGrain::Page => page * s.page + head * s.head,
        };
        (self.k[at], self.halves[0][at]) = (k, bf16::from_f32(k));
        if at < self.v.len() {
            (self.v[at], self.halves[1][at]) = (v, bf16::from_f32(v));
        }
    }

    pub fn args(&self) -> KvScales<'_> {
        let (k, v) = match self.dtype {
            DType::Bf16 => (Buf::Bf16(&self.halves[0]), Buf::Bf16(&self.halves[1])),
            _ => (Buf::F32(&self.k), Buf::F32(&self.v)),
        };
        KvScales { k, k_strides: self.strides, v, v_strides: self.strides }
    }
}
