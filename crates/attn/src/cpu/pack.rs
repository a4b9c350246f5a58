//! Packing of a block of keys and values for the register-tiled products: K transposed into panels, V widened into panels.

use super::element::Elem;
use super::vector::{MAX_LANES, Vector};
use crate::plan::KEY_BLOCK;

/// Packs the K rows at `offsets[lo..hi]` into panels `[head_dim][panel]` of `panel` keys each; key `i` becomes column `i`.
///
/// Columns outside `lo..hi` of a touched group of lanes are zero, so that their (unused) scores are finite.
///
/// # Safety
/// As `Vector`; offsets are checked rows of `k`; `zeros` holds a row of zeros; `dst` holds `KEY_BLOCK * d` floats.
#[inline(always)]
pub(crate) unsafe fn pack_k<V: Vector, E: Elem>(
    k: *const E,
    offsets: &[usize],
    (lo, hi): (usize, usize),
    d: usize,
    panel: usize,
    zeros: *const E,
    dst: *mut f32,
) {
    let mut group = lo / V::LANES * V::LANES;
    while group < hi {
        let mut rows = [zeros; MAX_LANES];
        for i in 0..V::LANES {
            if (lo..hi).contains(&(group + i)) {
                // SAFETY: a checked offset.
                rows[i] = unsafe { E::at(k, offsets[group + i]) };
            }
        }
        // SAFETY: group < KEY_BLOCK, a multiple of panel.
        let out = unsafe { dst.add(group / panel * panel * d + group % panel) };
        let mut x = 0;
        // SAFETY: columns x .. x + LANES (or d) of every row exist, and the same rows of the panel.
        unsafe {
            while x + V::LANES <= d {
                pack_square::<V, E, false>(&rows, x, V::LANES, out, panel);
                x += V::LANES;
            }
            if x < d {
                pack_square::<V, E, true>(&rows, x, d - x, out, panel);
            }
        }
        group += V::LANES;
    }
}

/// Transposes columns `x .. x + n` of `LANES` rows into rows `x ..` of a panel; `PARTIAL` when `n < LANES`.
#[inline(always)]
unsafe fn pack_square<V: Vector, E: Elem, const PARTIAL: bool>(
    rows: &[*const E; MAX_LANES],
    x: usize,
    n: usize,
    out: *mut f32,
    panel: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        let mut block = [V::splat(0.0); MAX_LANES];
        for i in 0..V::LANES {
            let p = E::at(rows[i], x);
            block[i] = if PARTIAL { E::load_partial(p, n) } else { E::load(p) };
        }
        V::transpose(&mut block);
        for i in 0..V::LANES {
            if !PARTIAL || i < n {
                block[i].store(out.add((x + i) * panel));
            }
        }
    }
}

/// Packs the V rows at `offsets[lo..hi]` into panels `[KEY_BLOCK][width]`, `N` vectors wide but for a narrower last one
/// (whole vectors, zeros past head_dim). Returns true when every value is finite.
///
/// # Safety
/// As `Vector`; offsets are checked rows of `v`; `dst` holds `KEY_BLOCK` rows of `d` rounded up to a vector.
#[inline(always)]
pub(crate) unsafe fn pack_v<V: Vector, E: Elem, const N: usize>(
    v: *const E,
    offsets: &[usize],
    (lo, hi): (usize, usize),
    d: usize,
    dst: *mut f32,
) -> bool {
    let mut finite = true;
    let mut left = 0;
    while left < d {
        let keys = &offsets[lo..hi];
        // SAFETY: the panel holds KEY_BLOCK rows; columns left .. d of every row exist.
        unsafe {
            let v = E::at(v, left);
            let dst = dst.add(left * KEY_BLOCK);
            let width = (d - left).min(N * V::LANES);
            // Widths that are whole vectors take no partial load.
            let vectors = if width.is_multiple_of(V::LANES) { width / V::LANES } else { 0 };
            finite &= match vectors {
                1 => pack_panel::<V, E, 1>(v, keys, lo, dst),
                2 if N > 2 => pack_panel::<V, E, 2>(v, keys, lo, dst),
                3 if N > 3 => pack_panel::<V, E, 3>(v, keys, lo, dst),
                0 => pack_ragged::<V, E>(v, keys, lo, width, dst),
                _ => pack_panel::<V, E, N>(v, keys, lo, dst),
            };
        }
        left += N * V::LANES;
    }
    finite
}

/// One panel of M whole vectors.
#[inline(always)]
unsafe fn pack_panel<V: Vector, E: Elem, const M: usize>(
    v: *const E,
    offsets: &[usize],
    lo: usize,
    dst: *mut f32,
) -> bool {
    // SAFETY: forwarded.
    unsafe {
        let zero = V::splat(0.0);
        let mut taint = [zero; M];
        let mut out = dst.add(lo * M * V::LANES);
        for &offset in offsets {
            for m in 0..M {
                let x: V = E::load(E::at(v, offset + m * V::LANES));
                // x * 0 is 0 for finite x and NaN otherwise.
                taint[m] = x.fma(zero, taint[m]);
                x.store(out.add(m * V::LANES));
            }
            out = out.add(M * V::LANES);
        }
        taint.into_iter().all(|x| x.reduce_add() == 0.0)
    }
}

/// One panel whose last vector is partial.
#[inline(always)]
unsafe fn pack_ragged<V: Vector, E: Elem>(
    v: *const E,
    offsets: &[usize],
    lo: usize,
    width: usize,
    dst: *mut f32,
) -> bool {
    let stride = width.next_multiple_of(V::LANES);
    // SAFETY: forwarded.
    unsafe {
        let zero = V::splat(0.0);
        let mut taint = zero;
        for (i, &offset) in offsets.iter().enumerate() {
            let mut x = 0;
            while x < width {
                let p = E::at(v, offset + x);
                let y: V = if x + V::LANES <= width { E::load(p) } else { E::load_partial(p, width - x) };
                taint = y.fma(zero, taint);
                y.store(dst.add((lo + i) * stride + x));
                x += V::LANES;
            }
        }
        taint.reduce_add() == 0.0
    }
}
