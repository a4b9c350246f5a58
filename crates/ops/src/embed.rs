//! Embedding lookup: one dequantised row of the table a token.

use suanpan_base::BadArgument;

use crate::format::Weight;

/// `out[t] = table[ids[t]]`, exact f32 rows; `out` is `[ids.len(), table.cols()]`.
///
/// # Errors
/// An id outside the table (named with its position; `out` is untouched), or an `out` of another length.
pub fn embed(table: Weight<'_>, ids: &[u32], out: &mut [f32]) -> Result<(), BadArgument> {
    const OP: &str = "embed";
    let cols = table.cols();
    if ids.len().checked_mul(cols) != Some(out.len()) {
        let asked = format!("{} elements", out.len());
        return Err(BadArgument::new(OP, "out", asked, format!("{} tokens of {cols}", ids.len())));
    }
    if let Some((t, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= table.rows()) {
        return Err(BadArgument::new(OP, format!("ids[{t}]"), id, format!("0..{}", table.rows())));
    }
    for (id, out) in ids.iter().zip(out.chunks_exact_mut(cols.max(1))) {
        table.dequantize_row(*id as usize, out);
    }
    Ok(())
}
