//! Scales of stored keys and values: what a problem may ask for, what a call must bring, what the ledger expects to be read.
//!
//! A key's scale multiplies its finished dot products, a value's scale its weight: codes themselves are never rescaled.

use suanpan_base::{BadArgument, Buf, DType, ScaleGrain, SeqLen};
use suanpan_ledger::kernel;

use crate::check::extent;
use crate::plan::{KEY_BLOCK, Plan};
use crate::problem::{KvLayout, OP, Problem, fits_powers_of_two};
use crate::run::{Args, Strides};

const RUN: &str = "attention run";

/// The scales of a call, of the problem's type. Strides are in elements; only those that the grain has are looked at: none a tensor, `head` a kv head, `token` and
/// `head` (and `page`, when paged) a token, `page` and `head` a page. Empty where the problem has no scales.
///
/// Values that lie in keys have no scales of their own.
///
/// Scales a tensor or a head must be finite and not negative. Scales of tokens and pages are data like K and V: `run` does not look through
/// them first, and one that is negative or not finite makes NaN of exactly the rows that see it.
#[derive(Clone, Copy, Debug)]
pub struct KvScales<'a> {
    /// Scales of keys.
    pub k: Buf<'a>,
    /// Strides of `k`.
    pub k_strides: Strides,
    /// Scales of values.
    pub v: Buf<'a>,
    /// Strides of `v`.
    pub v_strides: Strides,
}

impl Default for KvScales<'_> {
    fn default() -> Self {
        let strides = Strides::default();
        KvScales { k: Buf::F32(&[]), k_strides: strides, v: Buf::F32(&[]), v_strides: strides }
    }
}

/// Refuses element types and grains that do not go together.
pub(crate) fn check_problem(p: &Problem) -> Result<(), BadArgument> {
    if p.q_dtype.is_code() {
        return Err(BadArgument::new(OP, "q_dtype", p.q_dtype, "f32, bf16, f16"));
    }
    if p.kv_scales != ScaleGrain::None && !p.kv_dtype.is_code() {
        let supported = format!("{} for {} keys and values", ScaleGrain::None, p.kv_dtype);
        return Err(BadArgument::new(OP, "kv_scales", p.kv_scales, supported));
    }
    if !matches!(p.kv_scale_dtype, DType::F32 | DType::Bf16) {
        return Err(BadArgument::new(OP, "kv_scale_dtype", p.kv_scale_dtype, "f32, bf16"));
    }
    if p.kv_scales == ScaleGrain::Page && p.kv == KvLayout::Contiguous {
        return Err(BadArgument::new(OP, "kv_scales", p.kv_scales, "only with pages"));
    }
    for (field, d) in [("head_dim_qk", p.heads.head_dim_qk), ("head_dim_v", p.heads.head_dim_v)] {
        if p.kv_dtype == DType::I4 && !d.is_multiple_of(2) {
            return Err(BadArgument::new(OP, field, d, "an even width for int4: two elements a byte"));
        }
    }
    Ok(())
}

/// The strides that a grain has; 0 for the others.
pub(crate) fn strides_of(grain: ScaleGrain, s: Strides) -> Strides {
    match grain {
        ScaleGrain::None | ScaleGrain::Tensor => Strides::default(),
        ScaleGrain::Head => Strides { head: s.head, ..Strides::default() },
        ScaleGrain::Token => s,
        ScaleGrain::Page => Strides { token: 0, ..s },
    }
}

fn refuse(
    field: impl Into<String>,
    asked: impl std::fmt::Display,
    supported: impl std::fmt::Display,
) -> BadArgument {
    BadArgument::new(RUN, field, asked, supported)
}

/// Refuses odd strides of int4, missing or superfluous scales, and the few scales a tensor or head that no result could use.
pub(crate) fn check_numbers(plan: &Plan, args: &Args<'_>) -> Result<(), BadArgument> {
    let p = &plan.problem;
    if p.kv_dtype == DType::I4 {
        for (field, s) in [("k strides", args.k_strides), ("v strides", args.v_strides)] {
            if [s.token, s.head, s.page].iter().any(|n| !n.is_multiple_of(2)) {
                return Err(refuse(field, format!("{s:?}"), "even strides for int4: two elements a byte"));
            }
        }
    }
    let given = [
        ("k_scales", args.kv_scales.k, args.kv_scales.k_strides),
        ("v_scales", args.kv_scales.v, args.kv_scales.v_strides),
    ];
    // Values that lie in keys have the keys' scales, which are refused under the keys' name.
    for (field, scales, strides) in given.into_iter().take(if p.heads.values_in_keys { 1 } else { 2 }) {
        let kv_heads = p.heads.num_kv_heads;
        let dims: &[(usize, usize)] = match (p.kv_scales, p.kv) {
            (ScaleGrain::None, _) if scales.is_empty() => continue,
            (ScaleGrain::None, _) => {
                return Err(refuse(format!("{field} length"), scales.len(), "0, as planned"));
            }
            _ if scales.dtype() != p.kv_scale_dtype => {
                let supported = format!("{}, as planned", p.kv_scale_dtype);
                return Err(refuse(format!("{field} dtype"), scales.dtype(), supported));
            }
            (ScaleGrain::Tensor, _) => &[],
            (ScaleGrain::Head, _) => &[(kv_heads, strides.head)],
            (ScaleGrain::Token, KvLayout::Contiguous) => {
                &[(plan.total_k, strides.token), (kv_heads, strides.head)]
            }
            // How many pages have scales decides which ids are in range.
            _ => continue,
        };
        if dims.iter().any(|&(count, _)| count == 0) {
            continue;
        }
        match extent(dims, 1) {
            Some(need) if need <= scales.len() => {}
            Some(need) => {
                let supported = format!("at least {need} for these strides");
                return Err(refuse(format!("{field} length"), scales.len(), supported));
            }
            None => {
                return Err(refuse(format!("{field} strides"), format!("{strides:?}"), "offsets below 2^64"));
            }
        }
        if matches!(p.kv_scales, ScaleGrain::Tensor | ScaleGrain::Head) {
            let stride = strides_of(p.kv_scales, strides).head;
            // Keys' scales meet the softmax scale in one factor.
            let factor = if field == "k_scales" { p.scale() } else { 1.0 };
            check_values(field, factor, (0..kv_heads).map(|head| scales.get(head * stride)))?;
        }
    }
    Ok(())
}

fn check_values(field: &str, factor: f32, scales: impl Iterator<Item = f32>) -> Result<(), BadArgument> {
    for (head, s) in scales.enumerate() {
        if !(s >= 0.0 && s.is_finite() && fits_powers_of_two(s * factor)) {
            let supported = "finite, not negative, and so is its product with softmax_scale in powers of two";
            return Err(refuse(format!("{field}[{head}]"), s, supported));
        }
    }
    Ok(())
}

/// (pages of k, pages of v) that hold both data and scales.
pub(crate) fn pages_with_scales(plan: &Plan, args: &Args<'_>, pages: (usize, usize)) -> (usize, usize) {
    let (p, given) = (&plan.problem, &args.kv_scales);
    let KvLayout::Paged { page_size } = p.kv else { return pages };
    if !matches!(p.kv_scales, ScaleGrain::Token | ScaleGrain::Page) {
        return pages;
    }
    let scaled = |scales: Buf<'_>, strides: Strides| {
        let s = strides_of(p.kv_scales, strides);
        let one = extent(&[(page_size, s.token), (p.heads.num_kv_heads, s.head)], 1);
        let Some(rest) = one.and_then(|one| scales.len().checked_sub(one)) else { return 0 };
        rest.checked_div(s.page).map_or(usize::MAX, |n| n.saturating_add(1))
    };
    (pages.0.min(scaled(given.k, given.k_strides)), pages.1.min(scaled(given.v, given.v_strides)))
}

/// Tokens that may share a page's scale.
pub(crate) fn page_size_of(p: &Problem) -> usize {
    p.kv.page_size().unwrap_or(1)
}

/// Bytes of scales that the ledger expects one call of a sequence of this length to read.
pub(crate) fn predicted_bytes(plan: &Plan, len: SeqLen) -> u64 {
    let p = &plan.problem;
    let tile = (plan.tile_q_for(len), KEY_BLOCK);
    let scales = (p.kv_scales, page_size_of(p), p.kv_scale_dtype.bytes_of(1));
    kernel::scale_read_bytes(p.heads, p.mask, len, scales, tile)
}
