//! Edit distances: how much of a long answer is right, and where it first goes wrong.

/// Cells of a distance table that are computed at most; what is longer is judged by its common start and end.
const MAX_CELLS: usize = 100_000_000;

/// Levenshtein distance of two sequences. Where the table would be too large
/// after common start and end: the longer of the two rests, an upper bound.
pub fn distance<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    let start = common_start(a, b);
    let (a, b) = (&a[start..], &b[start..]);
    let end = a.iter().rev().zip(b.iter().rev()).take_while(|(x, y)| x == y).count();
    let (a, b) = (&a[..a.len() - end], &b[..b.len() - end]);
    if a.is_empty() || b.is_empty() || a.len().saturating_mul(b.len()) > MAX_CELLS {
        return a.len().max(b.len());
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let cost = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Elements that two sequences begin with together.
pub fn common_start<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

/// 1 − distance / length of the longer; 1 for two empty sequences.
pub fn similarity<T: PartialEq>(a: &[T], b: &[T]) -> f64 {
    let longest = a.len().max(b.len());
    if longest == 0 { 1.0 } else { 1.0 - distance(a, b) as f64 / longest as f64 }
}

/// Word error rate of `said` against `reference`: word edits per word of the reference. 0 for two empty texts.
pub fn word_error_rate(reference: &str, said: &str) -> f64 {
    let (r, s): (Vec<&str>, Vec<&str>) =
        (reference.split_whitespace().collect(), said.split_whitespace().collect());
    if r.is_empty() {
        return f64::from(!s.is_empty());
    }
    distance(&r, &s) as f64 / r.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_by_hand() {
        let d = |a: &str, b: &str| distance(a.as_bytes(), b.as_bytes());
        assert_eq!((d("kitten", "sitting"), d("", "abc"), d("abc", "abc"), d("abcd", "bcde")), (3, 3, 0, 2));
        assert_eq!(word_error_rate("a b c d", "a x c"), 0.5);
        assert_eq!(similarity(b"", b""), 1.0);
    }
}
