//! Everything a call refuses before the device is touched: types and presence, extents, alignment, the page ids that will be read.

use suanpan_attn::{KvLayout, Strides};
use suanpan_base::{BadArgument, ScaleGrain};

use super::Plan;
use super::run::{Args, KeyCodes, View};

const OP: &str = "cuda attention run";

type Checked = Result<(), BadArgument>;

fn refuse(
    field: impl Into<String>,
    asked: impl std::fmt::Display,
    supported: impl std::fmt::Display,
) -> Checked {
    Err(BadArgument::new(OP, field, asked, supported))
}

/// One past the last element of a strided block; `None` past `u64`.
fn extent(dims: &[(usize, usize)], width: usize) -> Option<u64> {
    let mut last = 0u64;
    for &(count, stride) in dims {
        last = last.checked_add((count.saturating_sub(1) as u64).checked_mul(stride as u64)?)?;
    }
    last.checked_add(width as u64)
}

/// Refuses a view that is shorter than the block, or whose address or strides are not multiples of 16 bytes.
fn view(field: &str, x: View, dims: &[(usize, usize)], width: usize, bits: usize) -> Checked {
    if dims.iter().any(|d| d.0 == 0) {
        return Ok(());
    }
    match extent(dims, width) {
        Some(need) if need <= x.elements => {}
        Some(need) => {
            return refuse(format!("{field} length"), x.elements, format!("at least {need} elements"));
        }
        None => return refuse(format!("{field} strides"), format!("{dims:?}"), "offsets below 2^64"),
    }
    let odd = |d: &&(usize, usize)| d.0 > 1 && !(d.1 * bits).is_multiple_of(128);
    if x.address == 0 || !x.address.is_multiple_of(16) {
        return refuse(field, format!("address {:#x}", x.address), "multiples of 16 bytes");
    }
    dims.iter().find(odd).map_or(Ok(()), |d| {
        refuse(format!("{field} strides"), format!("{} elements", d.1), "multiples of 16 bytes")
    })
}

/// Pages that k and v hold whole under their strides; those that scales lack count as absent.
pub(super) fn num_pages(plan: &Plan, args: &Args<'_>) -> usize {
    let KvLayout::Paged { page_size } = plan.problem.kv else { return 0 };
    let h = plan.problem.heads;
    let whole = |x: View, s: Strides, width: usize| {
        let Some(one) = extent(&[(page_size, s.token), (h.num_kv_heads, s.head)], width) else { return 0 };
        let Some(rest) = x.elements.checked_sub(one) else { return 0 };
        rest.checked_div(s.page as u64).map_or(usize::MAX, |n| (n as usize).saturating_add(1))
    };
    let data = whole(args.k, args.k_strides, h.head_dim_qk).min(whole(args.v, args.v_strides, h.head_dim_v));
    let s = args.kv_scales.strides;
    let scaled = match plan.problem.kv_scales {
        ScaleGrain::Token => s,
        ScaleGrain::Page => Strides { token: 0, ..s },
        _ => return data,
    };
    data.min(whole(args.kv_scales.k, scaled, 1)).min(whole(args.kv_scales.v, scaled, 1))
}

fn presence(field: &str, wanted: bool, given: bool) -> Checked {
    let word = |there: bool| if there { "given" } else { "absent" };
    if wanted == given { Ok(()) } else { refuse(field, word(given), format!("{}, as planned", word(wanted))) }
}

fn extras(plan: &Plan, args: &Args<'_>, total_q: usize) -> Checked {
    let (p, x) = (&plan.problem, &args.extras);
    presence("alibi_slopes", p.scores.alibi, x.alibi_slopes.is_some())?;
    presence("sinks", p.scores.sink, x.sinks.is_some())?;
    presence("bias", p.scores.bias, x.bias.is_some())?;
    presence("tree", p.tree, x.tree.is_some())?;
    presence("dropout", p.scores.dropout.is_some(), x.dropout.is_some())?;
    for (field, numbers) in [("alibi_slopes", x.alibi_slopes), ("sinks", x.sinks)] {
        let Some(n) = numbers else { continue };
        if n.elements != p.heads.num_q_heads as u64 || n.address == 0 {
            return refuse(
                format!("{field} length"),
                n.elements,
                format!("num_q_heads = {}", p.heads.num_q_heads),
            );
        }
    }
    let most = |of: fn(&suanpan_base::SeqLen) -> usize| plan.seqs.iter().map(of).max().unwrap_or(0);
    if let Some(bias) = x.bias {
        let s = bias.strides;
        let dims = [
            (plan.seqs.len(), s.seq),
            (p.heads.num_q_heads, s.head),
            (most(|l| l.seqlen_q), s.row),
            (most(|l| l.seqlen_k), s.key),
        ];
        let empty = dims.iter().any(|d| d.0 == 0);
        if s.key > 1 {
            return refuse("bias strides", format!("key {}", s.key), "0 or 1 from key to key");
        }
        if !empty && extent(&dims, 1).is_none_or(|need| need > bias.values.elements) {
            return refuse("bias length", bias.values.elements, format!("all that {dims:?} reach"));
        }
    }
    if let Some((bits, words)) = x.tree {
        let need = most(|l| l.seqlen_q).div_ceil(64);
        if words < need || bits.elements < (total_q * words) as u64 {
            let asked = format!("{} words, {words} a row", bits.elements);
            return refuse("tree", asked, format!("at least {need} words a row of {total_q}"));
        }
    }
    Ok(())
}

fn scales(plan: &Plan, args: &Args<'_>) -> Checked {
    let (p, s) = (&plan.problem, &args.kv_scales);
    let heads = p.heads.num_kv_heads;
    let need = match p.kv_scales {
        ScaleGrain::None => 0,
        ScaleGrain::Tensor => 1,
        ScaleGrain::Head => extent(&[(heads, s.strides.head)], 1).unwrap_or(u64::MAX),
        // How many pages have scales decides which ids are in range.
        ScaleGrain::Token | ScaleGrain::Page => 1,
    };
    for (field, x) in [("k_scales", s.k), ("v_scales", s.v)] {
        if (need == 0) != (x == View::default()) || x.elements < need {
            return refuse(format!("{field} length"), x.elements, format!("{need} and more, as planned"));
        }
        if !x.address.is_multiple_of(4) {
            return refuse(field, format!("address {:#x}", x.address), "f32 numbers on the device");
        }
    }
    Ok(())
}

fn table(plan: &Plan, args: &Args<'_>, page_size: usize) -> Checked {
    let pages = num_pages(plan, args);
    for (i, &len) in plan.seqs.iter().enumerate() {
        let hull = plan.problem.mask.visible_hull(len, 0..len.seqlen_q).run;
        if hull.is_empty() {
            continue;
        }
        let (first, end) = (hull.start / page_size, hull.end.div_ceil(page_size));
        let row = args.page_table.get(i * args.page_table_stride..).unwrap_or(&[]);
        if end > args.page_table_stride || row.len() < end {
            let supported = format!("{end} ids in row {i}");
            return refuse(
                "page_table",
                format!("{} ids, stride {}", args.page_table.len(), args.page_table_stride),
                supported,
            );
        }
        if let Some(at) = (first..end).find(|&at| row[at] as usize >= pages) {
            let supported = format!("ids below {pages}, the pages that k, v and their scales hold");
            return refuse(format!("page_table[{i}][{at}]"), row[at], supported);
        }
    }
    Ok(())
}

/// Checks a call whole.
pub(super) fn check(plan: &Plan, args: &Args<'_>) -> Checked {
    let (p, h) = (&plan.problem, plan.problem.heads);
    let total = |of: fn(&suanpan_base::SeqLen) -> usize| plan.seqs.iter().map(of).sum::<usize>();
    let (n, total_k) = (total(|s| s.seqlen_q), total(|s| s.seqlen_k));
    let q_bits = p.q_dtype.bits();
    view("q", args.q, &[(n, args.q_strides.0), (h.num_q_heads, args.q_strides.1)], h.head_dim_qk, q_bits)?;
    view(
        "out",
        args.out,
        &[(n, args.out_strides.0), (h.num_q_heads, args.out_strides.1)],
        h.head_dim_v,
        q_bits,
    )?;
    if args.lse.elements < (n * h.num_q_heads) as u64 || args.lse.address == 0 && n > 0 {
        return refuse(
            "lse length",
            args.lse.elements,
            format!("num_q_heads x total_q = {}", n * h.num_q_heads),
        );
    }
    let rows = (args.out_strides.1 == h.head_dim_v, args.out_strides.0 == h.num_q_heads * h.head_dim_v);
    if matches!(plan.choice.as_ref().map(|c| c.kernel), Some(super::Kernel::Decode(_)))
        && rows != (true, true)
    {
        return refuse("out strides", format!("{:?}", args.out_strides), "contiguous in decode");
    }
    let fp8 = matches!(plan.choice.as_ref().map(|c| c.kernel), Some(super::Kernel::ForwardFp8 { .. }));
    if args.key_codes != KeyCodes::default() && !fp8 {
        let asked = format!("{:?}", args.key_codes);
        return refuse("key_codes", asked, "plain ones but for the e4m3 forward, which makes q alike");
    }
    extras(plan, args, n)?;
    scales(plan, args)?;
    let kv_bits = p.kv_dtype.bits();
    for (field, x, s, width) in
        [("k", args.k, args.k_strides, h.head_dim_qk), ("v", args.v, args.v_strides, h.head_dim_v)]
    {
        let dims = match p.kv {
            KvLayout::Contiguous => [(total_k, s.token), (h.num_kv_heads, s.head), (1, 0)],
            KvLayout::Paged { page_size } => [(page_size, s.token), (h.num_kv_heads, s.head), (2, s.page)],
        };
        let one_page = View { elements: u64::MAX, ..x };
        view(field, if p.kv == KvLayout::Contiguous { x } else { one_page }, &dims, width, kv_bits)?;
    }
    match p.kv {
        KvLayout::Contiguous => Ok(()),
        KvLayout::Paged { page_size } => table(plan, args, page_size),
    }
}
