//! Everything a backward run refuses, before any output is touched; after it, every address a kernel forms is in range.

use suanpan_base::error::checked_product;
use suanpan_base::{BadArgument, DType};
use suanpan_ledger::BackwardBooks;

use super::plan::BackwardPlan;
use super::run::BackwardArgs;
use super::workspace::{BackwardWorkspace, Sizes};
use crate::check::{extent, rows_are_disjoint, whole_pages};
use crate::extras::Asked;
use crate::problem::KvLayout;
use crate::run::Strides;

const OP: &str = "attention backward";

fn refuse(
    field: impl Into<String>,
    asked: impl std::fmt::Display,
    supported: impl std::fmt::Display,
) -> BadArgument {
    BadArgument::new(OP, field, asked, supported)
}

/// One strided buffer of a call.
struct Rows {
    field: &'static str,
    dtype: DType,
    len: usize,
    strides: Strides,
    /// As planned: element type, tokens, heads, width.
    want: DType,
    tokens: usize,
    heads: usize,
    width: usize,
    written: bool,
    /// Rows of queries, which never lie in pages.
    queries: bool,
}

/// Checks a call whole: element types, strides, lengths, the workspace.
pub(crate) fn check(
    plan: &BackwardPlan,
    args: &BackwardArgs<'_>,
    ws: &BackwardWorkspace,
    books: &[BackwardBooks],
) -> Result<(), BadArgument> {
    for rows in buffers(plan, args) {
        check_rows(&rows, plan.problem.kv)?;
    }
    if books.len() != plan.seqs.len() {
        return Err(refuse("books", books.len(), format!("one a sequence: {}", plan.seqs.len())));
    }
    if let Some((field, need, have)) = ws.sizes.lacks(&Sizes::of(plan)) {
        let supported = format!("at least {need}: made for this plan");
        return Err(refuse(format!("workspace ({field})"), have, supported));
    }
    let asked = Asked { op: OP, problem: &plan.problem, total_q: plan.total_q };
    asked.check(&args.extras, plan.seqs.iter().map(|s| s.len))?;
    if let Some(d_sinks) = &args.d_sinks {
        let want = if plan.problem.scores.sink { plan.problem.heads.num_q_heads } else { 0 };
        if d_sinks.len() != want || want == 0 {
            return Err(refuse("d_sinks length", d_sinks.len(), format!("{want}, one a sink")));
        }
    }
    check_d_bias(plan, args)?;
    let want = checked_product(OP, "lse", &[plan.total_q, plan.problem.heads.num_q_heads])?;
    for (field, len) in [("lse length", Some(args.lse.len())), ("d_lse length", args.d_lse.map(<[f32]>::len))]
    {
        if let Some(len) = len
            && len != want
        {
            return Err(refuse(field, len, format!("num_q_heads x total_q = {want}")));
        }
    }
    Ok(())
}

/// Room for the gradient of the bias, and no two of its numbers in one place.
fn check_d_bias(plan: &BackwardPlan, args: &BackwardArgs<'_>) -> Result<(), BadArgument> {
    let word = |there: bool| if there { "given" } else { "absent" };
    let Some((d_bias, bias)) = args.d_bias.as_ref().zip(args.extras.bias).filter(|_| plan.d_bias) else {
        let given = args.d_bias.is_some();
        return if given == plan.d_bias {
            Ok(())
        } else {
            Err(refuse("d_bias", word(given), format!("{}, as planned", word(plan.d_bias))))
        };
    };
    let lens = || plan.seqs.iter().map(|s| s.len);
    let need = bias.strides.extent(plan.problem.heads, lens()).unwrap_or(usize::MAX);
    if d_bias.len() < need {
        return Err(refuse("d_bias length", d_bias.len(), format!("at least {need} elements, as the bias")));
    }
    if !bias.strides.apart(plan.problem.heads, lens()) {
        let asked = format!("{:?}", bias.strides);
        return Err(refuse(
            "bias strides",
            asked,
            "with a gradient: numbers that do not share elements, but for strides of 0",
        ));
    }
    Ok(())
}

#[rustfmt::skip]
fn buffers(plan: &BackwardPlan, args: &BackwardArgs<'_>) -> [Rows; 8] {
    let p = &plan.problem;
    let row = |field, (dtype, len), strides: Strides, queries: bool, width, written| Rows {
        field, dtype, len, strides, width, written, queries,
        want: if queries { p.q_dtype } else { p.kv_dtype },
        tokens: if queries { plan.total_q } else { plan.total_k },
        heads: if queries { p.heads.num_q_heads } else { p.heads.num_kv_heads },
    };
    let read = |b: &suanpan_base::Buf<'_>| (b.dtype(), b.len());
    let write = |b: &suanpan_base::BufMut<'_>| (b.dtype(), b.len());
    let (dqk, dv) = (p.heads.head_dim_qk, p.heads.head_dim_v);
    [
        row("q", read(&args.q), args.q_strides.into(), true, dqk, false),
        row("k", read(&args.k), args.k_strides, false, dqk, false),
        row("v", read(&args.v), args.v_strides, false, dv, false),
        row("out", read(&args.out), args.out_strides.into(), true, dv, false),
        row("d_out", read(&args.d_out), args.d_out_strides.into(), true, dv, false),
        row("dq", write(&args.dq), args.dq_strides.into(), true, dqk, true),
        row("dk", write(&args.dk), args.dk_strides, false, dqk, true),
        row("dv", write(&args.dv), args.dv_strides, false, dv, true),
    ]
}

fn check_rows(r: &Rows, kv: KvLayout) -> Result<(), BadArgument> {
    let field = r.field;
    if r.dtype != r.want {
        return Err(refuse(format!("{field} dtype"), r.dtype, format!("{}, as planned", r.want)));
    }
    if r.tokens == 0 {
        return Ok(());
    }
    let Strides { token, head, page } = r.strides;
    if let (false, KvLayout::Paged { page_size }) = (r.queries, kv) {
        // How many pages there are decides which ids are in range.
        let pages = whole_pages((OP, field), r.len, r.strides, (page_size, r.heads, r.width))?;
        if r.written && !rows_are_disjoint([(page_size, token), (r.heads, head), (pages, page)], r.width) {
            let supported = format!("rows of {} elements that do not overlap", r.width);
            return Err(refuse(format!("{field} strides"), format!("{:?}", r.strides), supported));
        }
        return Ok(());
    }
    match extent(&[(r.tokens, token), (r.heads, head)], r.width) {
        None => {
            let asked = format!("(token {token}, head {head})");
            return Err(refuse(format!("{field} strides"), asked, "offsets below 2^64"));
        }
        Some(need) if need > r.len => {
            let supported = format!("at least {need} elements for these strides");
            return Err(refuse(format!("{field} length"), r.len, supported));
        }
        Some(_) => {}
    }
    if r.written && !rows_are_disjoint([(r.tokens, token), (r.heads, head)], r.width) {
        let asked = format!("(token {token}, head {head})");
        let supported = format!("rows of {} elements that do not overlap", r.width);
        return Err(refuse(format!("{field} strides"), asked, supported));
    }
    Ok(())
}
