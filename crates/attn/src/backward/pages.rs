//! Pages of a backward call: every id in range of all four buffers, and no page written by two.

use suanpan_base::BadArgument;

use super::plan::BackwardPlan;
use super::run::BackwardArgs;
use super::workspace::BackwardWorkspace;
use crate::check::{table_row, whole_pages};
use crate::problem::KvLayout;

const OP: &str = "attention backward";

/// Checks the page table; before it, `check` has passed.
pub(crate) fn check(
    plan: &BackwardPlan,
    args: &BackwardArgs<'_>,
    ws: &mut BackwardWorkspace,
) -> Result<(), BadArgument> {
    let KvLayout::Paged { page_size } = plan.problem.kv else { return Ok(()) };
    let num_pages = pages_held(plan, args, page_size)?;
    let mut named = 0;
    for (i, seq) in plan.seqs.iter().enumerate() {
        let table = (args.page_table, args.page_table_stride);
        let row = table_row(OP, table, (i, seq.len.seqlen_k), page_size)?;
        if let Some(at) = row.iter().position(|&id| id as usize >= num_pages) {
            let supported = format!("page ids below {num_pages}, the pages that k, v, dk and dv hold");
            return Err(BadArgument::new(OP, format!("page_table[{i}][{at}]"), row[at], supported));
        }
        ws.pages[named..named + row.len()].copy_from_slice(row);
        named += row.len();
    }
    let ids = &mut ws.pages[..named];
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            let supported = "every page once: its gradients are written";
            Err(BadArgument::new(OP, "page_table", format!("page {} twice", pair[0]), supported))
        }
        None => Ok(()),
    }
}

/// Pages that all of k, v, dk and dv hold.
fn pages_held(plan: &BackwardPlan, args: &BackwardArgs<'_>, page_size: usize) -> Result<usize, BadArgument> {
    let h = plan.problem.heads;
    let mut fewest = usize::MAX;
    for (field, len, strides, width) in [
        ("k", args.k.len(), args.k_strides, h.head_dim_qk),
        ("v", args.v.len(), args.v_strides, h.head_dim_v),
        ("dk", args.dk.len(), args.dk_strides, h.head_dim_qk),
        ("dv", args.dv.len(), args.dv_strides, h.head_dim_v),
    ] {
        let page = (page_size, h.num_kv_heads, width);
        fewest = fewest.min(whole_pages((OP, field), len, strides, page)?);
    }
    Ok(fewest)
}
