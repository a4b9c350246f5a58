//! Which rows of a step get logits: moves them to the front, so that nothing past the last attention is computed for the others.

use super::batch::StepSeq;

/// Moves the rows that get logits to the front of `x` in place; returns how many there are.
pub(super) fn compact_logit_rows(seqs: &[StepSeq], x: &mut [f32], cols: usize) -> usize {
    let (mut from, mut to) = (0, 0);
    for seq in seqs {
        let end = from + seq.extend_len;
        let rows = seq.logits.count(seq.extend_len);
        // Never overtakes: `to` counts a subset of the rows before `from`.
        x.copy_within((end - rows) * cols..end * cols, to * cols);
        (from, to) = (end, to + rows);
    }
    to
}

#[cfg(test)]
mod tests {
    use super::super::batch::LogitRows;
    use super::*;

    #[test]
    fn rows_with_logits_move_to_the_front_in_order() {
        let seq = |extend_len, logits| StepSeq { cached_len: 0, extend_len, logits };
        let seqs = [seq(2, LogitRows::None), seq(3, LogitRows::Last), seq(2, LogitRows::All)];
        let mut x: Vec<f32> = (0..14).map(|i| i as f32).collect();
        let rows = compact_logit_rows(&seqs, &mut x, 2);
        assert_eq!((rows, &x[..6]), (3, [8.0, 9.0, 10.0, 11.0, 12.0, 13.0].as_slice()));
    }
}
