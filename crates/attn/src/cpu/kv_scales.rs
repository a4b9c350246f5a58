//! The scales of a block: laid out by key, so that a vector of scores or weights meets its scales in one product.

use std::ops::Range;

use half::bf16;
use suanpan_base::{Buf, ScaleGrain};
use suanpan_ledger::kernel::scale_runs;

use super::softmax::Columns;
use super::task::{Scratch, Task};
use super::vector::Vector;
use crate::plan::{KEY_BLOCK, Plan};
use crate::run::Strides;
use crate::scales::KvScales;
use crate::workspace::LINE;

/// A call's scales: raw starts and the strides of the grain.
#[derive(Clone, Copy)]
pub(crate) struct Scales {
    grain: ScaleGrain,
    k: Start,
    k_strides: Strides,
    v: Start,
    v_strides: Strides,
}

/// Some scales in a row, or the first of all.
#[derive(Clone, Copy)]
enum Start {
    F32(*const f32),
    Bf16(*const bf16),
}

impl Start {
    fn new(scales: &Buf<'_>) -> Start {
        match scales {
            Buf::F32(x) => Start::F32(x.as_ptr()),
            Buf::Bf16(x) => Start::Bf16(x.as_ptr()),
            other => unreachable!("scales in {} were refused", other.dtype()),
        }
    }

    #[inline(always)]
    fn at(self, i: usize) -> Start {
        match self {
            Start::F32(p) => Start::F32(p.wrapping_add(i)),
            Start::Bf16(p) => Start::Bf16(p.wrapping_add(i)),
        }
    }

    #[inline(always)]
    fn bytes(self) -> (*const u8, usize) {
        match self {
            Start::F32(p) => (p.cast(), 4),
            Start::Bf16(p) => (p.cast(), 2),
        }
    }

    /// The scale here.
    ///
    /// # Safety
    /// It must be inside the scales.
    #[inline(always)]
    unsafe fn get(self) -> f32 {
        // SAFETY: forwarded.
        unsafe {
            match self {
                Start::F32(p) => *p,
                Start::Bf16(p) => (*p).to_f32(),
            }
        }
    }

    /// A vector of scales from here.
    ///
    /// # Safety
    /// As `get`, for all lanes; as `Vector`.
    #[inline(always)]
    unsafe fn load<V: Vector>(self) -> V {
        // SAFETY: forwarded.
        unsafe {
            match self {
                Start::F32(p) => V::load(p),
                Start::Bf16(p) => V::load_bf16(p),
            }
        }
    }
}

impl Scales {
    pub fn new(plan: &Plan, given: &KvScales<'_>) -> Scales {
        let grain = plan.problem.kv_scales;
        Scales {
            grain,
            k: Start::new(&given.k),
            k_strides: crate::scales::strides_of(grain, given.k_strides),
            v: Start::new(&given.v),
            v_strides: crate::scales::strides_of(grain, given.v_strides),
        }
    }

    /// Where a run of keys has the scales of head `head`.
    #[inline(always)]
    fn of(&self, head: usize, (n, token, page): (usize, usize, usize)) -> (usize, Start, Start) {
        let at = |s: Strides| page * s.page + token * s.token + head * s.head;
        (n, self.k.at(at(self.k_strides)), self.v.at(at(self.v_strides)))
    }

    /// True when values have scales, too.
    pub fn any(&self) -> bool {
        self.grain != ScaleGrain::None
    }
}

/// What a block's scales were.
#[derive(Clone, Copy)]
pub(crate) struct Filled {
    /// Runs of keys that share a scale: as many scales of keys and as many of values were read.
    pub runs: u64,
    /// Every scale of a value is finite.
    pub finite: bool,
}

/// Lays out the scales of the task's head for its keys in the block at `base`: keys' times the factor of q·k, values' as they are
/// (nothing, where there are none).
///
/// # Safety
/// As `Vector`.
#[inline(always)]
pub(crate) unsafe fn fill<V: Vector>(t: &Task<'_>, w: &Scratch<'_>, base: usize) -> Filled {
    let pieces = t.pieces(base);
    let (scales, factor) = (&t.call.scales, t.call.scale_log2);
    // SAFETY: the slot's parts hold a block; `check` bounded the scales of every visible key.
    unsafe {
        match scales.grain {
            ScaleGrain::None => splat::<V>(w.k_scales, factor),
            ScaleGrain::Tensor | ScaleGrain::Head => {
                splat::<V>(w.k_scales, factor * scales.k.at(t.kv_head * scales.k_strides.head).get());
                splat::<V>(w.v_scales, scales.v.at(t.kv_head * scales.v_strides.head).get());
            }
            ScaleGrain::Token | ScaleGrain::Page => {
                if !pieces[0].is_empty() {
                    // What stands between the pieces has weight 0, and no page of it is touched.
                    splat::<V>(w.k_scales, 0.0);
                    splat::<V>(w.v_scales, 0.0);
                }
                let mut taint = V::splat(0.0);
                for piece in &pieces {
                    let mut col = piece.start;
                    for run in t.runs(base + piece.start..base + piece.end) {
                        let (n, k, v) = scales.of(t.kv_head, run);
                        // Keys' scales reach their own scores alone.
                        copy::<V>(k, scales.k_strides.token, n, factor, w.k_scales.add(col));
                        let tainted = copy::<V>(v, scales.v_strides.token, n, 1.0, w.v_scales.add(col));
                        taint = taint.add(tainted);
                        col += n;
                    }
                }
                return Filled { runs: runs(t, base), finite: taint.reduce_add() == 0.0 };
            }
        }
    }
    Filled { runs: runs(t, base), finite: true }
}

#[inline(always)]
fn runs(t: &Task<'_>, base: usize) -> u64 {
    let page_size = crate::scales::page_size_of(&t.call.plan.problem);
    let runs = |piece: Range<usize>| {
        scale_runs(t.call.scales.grain, page_size, base + piece.start..base + piece.end)
    };
    t.pieces(base).map(runs).iter().sum()
}

/// Asks for the scales of the task's head in the block at `base`, a whole block before they are needed: nobody else guesses them.
///
/// # Safety
/// As `Vector`.
#[inline(always)]
pub(crate) unsafe fn ask<V: Vector>(t: &Task<'_>, base: usize) {
    let scales = &t.call.scales;
    if !matches!(scales.grain, ScaleGrain::Token | ScaleGrain::Page) {
        return;
    }
    for run in t.pieces(base).into_iter().flat_map(|piece| t.runs(base + piece.start..base + piece.end)) {
        let (n, k, v) = scales.of(t.kv_head, run);
        for (p, strides) in [(k, scales.k_strides), (v, scales.v_strides)] {
            // Heads that share a line ask for it once.
            let (start, size) = p.bytes();
            let line = LINE * 4 / size;
            if strides.head >= line || t.kv_head == t.unit.kv_head {
                let keys_a_line = (line / strides.token.max(1)).max(1);
                for i in (0..if strides.token == 0 { 1 } else { n }).step_by(keys_a_line) {
                    // SAFETY: a prefetch never faults.
                    unsafe { V::prefetch_near(start.wrapping_add(i * strides.token * size)) };
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn splat<V: Vector>(to: *mut f32, x: f32) {
    for i in (0..KEY_BLOCK).step_by(V::LANES) {
        // SAFETY: a block of floats.
        unsafe { V::splat(x).store(to.add(i)) };
    }
}

/// Copies `n` scales, `step` apart, times `factor`; what is negative or not finite is no scale and becomes NaN. Returns lanes of 0 where all of them are finite, else some NaN.
#[inline(always)]
unsafe fn copy<V: Vector>(from: Start, step: usize, n: usize, factor: f32, to: *mut f32) -> V {
    // SAFETY: forwarded.
    unsafe {
        let (zero, mut i) = (V::splat(0.0), 0);
        let mut taint = zero;
        while step == 1 && i + V::LANES <= n {
            let x = from.at(i).load::<V>();
            // x * 0 is 0 for finite x and NaN otherwise.
            let x = x.fma(zero, x);
            let x = x.if_less(zero, V::splat(f32::NAN), x);
            taint = x.fma(zero, taint);
            x.mul(V::splat(factor)).store(to.add(i));
            i += V::LANES;
        }
        let mut rest = 0.0;
        while i < n {
            let x = from.at(i * step).get();
            let x = if (0.0..f32::INFINITY).contains(&x) { x } else { f32::NAN };
            rest += x * 0.0;
            *to.add(i) = x * factor;
            i += 1;
        }
        taint.add(V::splat(rest))
    }
}

/// Weights `s` times the scales of their values. A column that the row does not see may become NaN; nobody may look at it then.
///
/// # Safety
/// As `Vector`; `s` holds columns `cols.from .. cols.to`; `fill` was called for the block.
#[inline(always)]
pub(crate) unsafe fn scale_weights<V: Vector>(w: &Scratch<'_>, s: *mut f32, cols: Columns) {
    let mut col = cols.from;
    while col < cols.to {
        // SAFETY: within the row and the block's scales.
        unsafe { V::load(s.add(col)).mul(V::load(w.v_scales.add(col))).store(s.add(col)) };
        col += V::LANES;
    }
}
