//! Everything a run refuses, before any byte of K, V, q or out is touched; after it, every address a kernel forms is in range.

use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, DType};
use suanpan_ledger::AttnBooks;

use crate::extras::Asked;
use crate::plan::{Plan, Seq};
use crate::problem::KvLayout;
use crate::run::{Args, Strides};
use crate::scales::KvScales;
use crate::workspace::{Sizes, Workspace};

const OP: &str = "attention run";

fn refuse(
    field: impl Into<String>,
    asked: impl std::fmt::Display,
    supported: impl std::fmt::Display,
) -> BadArgument {
    BadArgument::new(OP, field, asked, supported)
}

/// Checks a call whole: element types, strides, lengths, the page ids that will be read, the workspace.
pub(crate) fn check(
    plan: &Plan,
    args: &Args<'_>,
    ws: &Workspace,
    books: &[AttnBooks],
) -> Result<(), BadArgument> {
    let p = &plan.problem;
    for (field, got, want) in [
        ("q dtype", args.q.dtype(), p.q_dtype),
        ("out dtype", args.out.dtype(), p.q_dtype),
        ("k dtype", args.k.dtype(), p.kv_dtype),
        ("v dtype", args.v.dtype(), p.kv_dtype),
    ] {
        check_dtype(field, got, want)?;
    }
    if books.len() != plan.seqs.len() {
        return Err(refuse("books", books.len(), format!("one a sequence: {}", plan.seqs.len())));
    }
    if let Some((field, need, have)) = ws.sizes.lacks(&Sizes::of(plan)) {
        return Err(refuse(
            format!("workspace ({field})"),
            have,
            format!("at least {need}: made for this plan"),
        ));
    }
    let (h, n) = (p.heads, plan.total_q);
    check_rows("q", args.q.len(), args.q_strides, n, h.num_q_heads, h.head_dim_qk)?;
    check_rows("out", args.out.len(), args.out_strides, n, h.num_q_heads, h.head_dim_v)?;
    check_disjoint(args.out_strides, n, h.num_q_heads, h.head_dim_v)?;
    if let Some(lse) = &args.lse {
        let want = checked_product(OP, "lse", &[n, h.num_q_heads])?;
        if lse.len() != want {
            return Err(refuse("lse length", lse.len(), format!("num_q_heads x total_q = {want}")));
        }
    }
    if let Some(max) = &args.max_scores
        && max.len() != h.num_q_heads
    {
        return Err(refuse("max_scores length", max.len(), format!("num_q_heads = {}", h.num_q_heads)));
    }
    let asked = Asked { op: OP, problem: p, total_q: n };
    asked.check(&args.extras, plan.seqs.iter().map(|s| s.len))?;
    crate::scales::check_numbers(plan, args)?;
    match p.kv {
        KvLayout::Contiguous => check_contiguous(plan, args),
        KvLayout::Paged { page_size } => check_paged(plan, args, page_size),
    }
}

/// The call with its values named: where they lie in keys, the keys with their strides and scales. From here on nobody asks where values are
/// but the walk that asks for memory ahead, which asks for them once.
pub(crate) fn with_values<'a>(plan: &Plan, args: Args<'a>) -> Result<Args<'a>, BadArgument> {
    if !plan.problem.heads.values_in_keys {
        return Ok(args);
    }
    check_dtype("v dtype", args.v.dtype(), plan.problem.kv_dtype)?;
    for (field, len) in [("v length", args.v.len()), ("v_scales length", args.kv_scales.v.len())] {
        if len > 0 {
            return Err(refuse(field, len, "0: the plan's values lie in keys"));
        }
    }
    let (k, k_strides) = (args.kv_scales.k, args.kv_scales.k_strides);
    let kv_scales = KvScales { v: k, v_strides: k_strides, ..args.kv_scales };
    Ok(Args { v: args.k, v_strides: args.k_strides, kv_scales, ..args })
}

fn check_dtype(field: &str, got: DType, want: DType) -> Result<(), BadArgument> {
    if got == want { Ok(()) } else { Err(refuse(field, got, format!("{want}, as planned"))) }
}

/// One past the last element of a strided block; `None` past `usize`.
pub(crate) fn extent(dims: &[(usize, usize)], width: usize) -> Option<usize> {
    let mut last = 0usize;
    for &(count, stride) in dims {
        last = last.checked_add((count - 1).checked_mul(stride)?)?;
    }
    last.checked_add(width)
}

fn check_extent(field: &str, len: usize, dims: &[(usize, usize)], width: usize) -> Result<(), BadArgument> {
    if dims.iter().any(|&(count, _)| count == 0) {
        return Ok(());
    }
    match extent(dims, width) {
        Some(need) if need <= len => Ok(()),
        Some(need) => {
            Err(refuse(format!("{field} length"), len, format!("at least {need} elements for these strides")))
        }
        None => Err(refuse(format!("{field} strides"), format!("{dims:?}"), "offsets below 2^64")),
    }
}

pub(crate) fn check_rows(
    field: &str,
    len: usize,
    (token, head): (usize, usize),
    tokens: usize,
    heads: usize,
    width: usize,
) -> Result<(), BadArgument> {
    check_extent(field, len, &[(tokens, token), (heads, head)], width)
}

/// Two rows of the output must not share an element: tasks write them from different threads.
pub(crate) fn check_disjoint(
    strides: (usize, usize),
    tokens: usize,
    heads: usize,
    width: usize,
) -> Result<(), BadArgument> {
    if rows_are_disjoint([(tokens, strides.0), (heads, strides.1)], width) {
        return Ok(());
    }
    let asked = format!("(token {}, head {})", strides.0, strides.1);
    Err(refuse("out strides", asked, format!("rows of {width} elements that do not overlap")))
}

/// Whether no two rows of `width` elements share an element, one row for each index into the dimensions (count, stride).
pub(crate) fn rows_are_disjoint<const N: usize>(mut dims: [(usize, usize); N], width: usize) -> bool {
    if dims.iter().any(|&(count, _)| count == 0) {
        return true;
    }
    dims.sort_unstable_by_key(|&(_, stride)| stride);
    let mut span = Some(width);
    dims.iter().filter(|&&(count, _)| count > 1).all(|&(count, stride)| {
        let apart = span.is_some_and(|span| stride >= span);
        span = span.and_then(|span| (count - 1).checked_mul(stride)?.checked_add(span));
        apart
    })
}

fn check_contiguous(plan: &Plan, args: &Args<'_>) -> Result<(), BadArgument> {
    let (h, n) = (plan.problem.heads, plan.total_k);
    let kv = h.num_kv_heads;
    check_extent("k", args.k.len(), &[(n, args.k_strides.token), (kv, args.k_strides.head)], h.head_dim_qk)?;
    check_extent("v", args.v.len(), &[(n, args.v_strides.token), (kv, args.v_strides.head)], h.head_dim_v)
}

fn check_paged(plan: &Plan, args: &Args<'_>, page_size: usize) -> Result<(), BadArgument> {
    let h = plan.problem.heads;
    let pages = |field: &str, len: usize, s: Strides, width: usize| {
        whole_pages((OP, field), len, s, (page_size, h.num_kv_heads, width))
    };
    let k_pages = pages("k", args.k.len(), args.k_strides, h.head_dim_qk)?;
    let v_pages = pages("v", args.v.len(), args.v_strides, h.head_dim_v)?;
    let (k_pages, v_pages) = crate::scales::pages_with_scales(plan, args, (k_pages, v_pages));
    for (i, seq) in plan.seqs.iter().enumerate() {
        check_table_row(plan, args, page_size, i, seq, k_pages.min(v_pages))?;
    }
    Ok(())
}

/// Whole pages of (tokens, heads, width) that a buffer of `len` elements holds under strides `s`. Refuses, in the name of `op`, strides under
/// which a page is past `usize`.
pub(crate) fn whole_pages(
    (op, field): (&'static str, &str),
    len: usize,
    s: Strides,
    (page_size, heads, width): (usize, usize, usize),
) -> Result<usize, BadArgument> {
    let one = extent(&[(page_size, s.token), (heads, s.head)], width).ok_or_else(|| {
        BadArgument::new(op, format!("{field} strides"), format!("{s:?}"), "offsets below 2^64")
    })?;
    let Some(rest) = len.checked_sub(one) else { return Ok(0) };
    Ok(rest.checked_div(s.page).map_or(usize::MAX, |n| n.saturating_add(1)))
}

fn check_table_row(
    plan: &Plan,
    args: &Args<'_>,
    page_size: usize,
    i: usize,
    seq: &Seq,
    num_pages: usize,
) -> Result<(), BadArgument> {
    if seq.len.seqlen_k == 0 || seq.len.seqlen_q == 0 {
        return Ok(());
    }
    // Only pages with a visible key are ever read; what stands elsewhere in the table is nobody's business.
    let row = table_row(OP, (args.page_table, args.page_table_stride), (i, seq.len.seqlen_k), page_size)?;
    let hull = plan.problem.mask.visible_hull(seq.len, 0..seq.len.seqlen_q);
    for keys in hull.pieces().into_iter().filter(|keys| !keys.is_empty()) {
        for at in keys.start / page_size..(keys.end - 1) / page_size + 1 {
            let id = row[at];
            if id as usize >= num_pages {
                let supported =
                    format!("page ids below {num_pages}, the pages that k, v and their scales hold");
                return Err(refuse(format!("page_table[{i}][{at}]"), id, supported));
            }
        }
    }
    Ok(())
}

/// The ids of a sequence's pages, in the name of `op`.
pub(crate) fn table_row<'a>(
    op: &'static str,
    (table, stride): (&'a [u32], usize),
    (seq, seqlen_k): (usize, usize),
    page_size: usize,
) -> Result<&'a [u32], BadArgument> {
    let needed = seqlen_k.div_ceil(page_size);
    if needed > stride {
        let supported =
            format!("at most {} tokens: {stride} pages of {page_size}", stride.saturating_mul(page_size));
        return Err(BadArgument::new(op, format!("seqs[{seq}].seqlen_k"), seqlen_k, supported));
    }
    let end = seq.checked_mul(stride).and_then(|x| x.checked_add(needed));
    end.and_then(|end| table.get(end - needed..end)).ok_or_else(|| {
        let supported = format!("{needed} ids in row {seq} of stride {stride}");
        BadArgument::new(op, "page_table length", table.len(), supported)
    })
}
