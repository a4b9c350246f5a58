//! Sums that do not depend on the order of their terms: what makes results equal bit by bit however many ranks add to them.
//!
//! A row of numbers is summed in fixed point, in two fields of 32 bits at absolute places: field `t` holds the bits worth 2^(32 t) up to
//! 2^(32 (t + 1)). A row keeps the highest field that any of its terms reaches and the one below; both sums are exact in 64 bits for 2^31
//! terms, and what lies below is cut off each term, never off a sum. So order and grouping change nothing (the idea of binned sums: Demmel
//! and Nguyen, ARITH 2013). What is cut is at most 2^-32 of the row's greatest term, a term.
//!
//! A row of `width` numbers is [`words`] words that lie in `f32`s as bits: they are copied and sent as floats, and read here only.

/// Bits of a field.
const FIELD: i64 = 32;
const FIELD_WORTH: f64 = (1u64 << FIELD) as f64;
/// Highest field of a row without a term.
const EMPTY: i64 = i64::MIN;
/// Highest field of a row with a term that is not finite: all its sums are NaN.
const BROKEN: i64 = i64::MAX;

/// Words of a row of `width` numbers.
pub const fn words(width: usize) -> usize {
    2 + 4 * width
}

fn get(words: &[f32]) -> i64 {
    (u64::from(words[0].to_bits()) | u64::from(words[1].to_bits()) << 32) as i64
}

fn put(words: &mut [f32], x: i64) {
    words[0] = f32::from_bits(x as u32);
    words[1] = f32::from_bits((x as u64 >> 32) as u32);
}

/// Sets a row to no term.
pub fn clear(row: &mut [f32]) {
    row.fill(0.0);
    put(row, EMPTY);
}

/// Lifts the row's highest field to `top`: what falls out below is what every order would have cut.
fn raise(row: &mut [f32], top: i64) {
    let now = get(row);
    if top <= now {
        return;
    }
    let next = now != EMPTY && top != BROKEN && top == now + 1;
    for number in row[2..].chunks_exact_mut(4) {
        let high = if next { get(number) } else { 0 };
        put(number, 0);
        put(&mut number[2..], high);
    }
    put(row, top);
}

/// 2^e for exponents of normal numbers.
fn power(e: i64) -> f64 {
    f64::from_bits(((1023 + e) as u64) << 52)
}

/// Adds `factor · 2^exponent · terms`; `factor` lies in 0 ..= 2^64, and at least at 2^-64 unless 0. One number that is not finite breaks the row.
pub fn add(row: &mut [f32], terms: &[f32], factor: f64, exponent: i64) {
    let finite = factor.is_finite() && terms.iter().all(|x| x.is_finite());
    if !finite {
        return raise(row, BROKEN);
    }
    let largest = f64::from(terms.iter().fold(0.0f32, |most, x| most.max(x.abs()))) * factor;
    if largest == 0.0 {
        return;
    }
    let log2 = (largest.to_bits() >> 52) as i64 - 1023;
    raise(row, (log2 + exponent).div_euclid(FIELD));
    let top = get(row);
    // Far below the row's fields: every term is cut whole. A broken row takes nothing more.
    let Some(shift) = (top - 1).checked_mul(FIELD).map(|low| exponent - low).filter(|s| *s > -1000) else {
        return;
    };
    let scale = power(shift);
    for (number, &x) in row[2..].chunks_exact_mut(4).zip(terms) {
        let fixed = (f64::from(x) * factor * scale).trunc();
        let high = (fixed / FIELD_WORTH).trunc();
        let (sum_high, sum_low) = (get(number), get(&number[2..]));
        put(number, sum_high + high as i64);
        put(&mut number[2..], sum_low + (fixed - high * FIELD_WORTH) as i64);
    }
}

/// Adds all terms of another row.
pub fn merge(row: &mut [f32], other: &[f32]) {
    let theirs = get(other);
    if theirs == EMPTY {
        return;
    }
    raise(row, theirs);
    let below = get(row).checked_sub(theirs);
    for (number, other) in row[2..].chunks_exact_mut(4).zip(other[2..].chunks_exact(4)) {
        let (high, low) = match below {
            Some(0) => (get(other), get(&other[2..])),
            Some(1) => (0, get(other)),
            _ => return,
        };
        let (sum_high, sum_low) = (get(number), get(&number[2..]));
        put(number, sum_high + high);
        put(&mut number[2..], sum_low + low);
    }
}

/// The exponent that all sums of the row share; `None` without a term. A broken row's is 0.
pub fn exponent(row: &[f32]) -> Option<i64> {
    match get(row) {
        EMPTY => None,
        BROKEN => Some(0),
        top => Some((top - 1) * FIELD),
    }
}

/// The sums, each to be multiplied by 2^[`exponent`]; zeros without a term, NaN in a broken row.
pub fn sums(row: &[f32]) -> impl Iterator<Item = f64> + '_ {
    let broken = get(row) == BROKEN;
    row[2..].chunks_exact(4).map(move |number| {
        let sum = get(number) as f64 * FIELD_WORTH + get(&number[2..]) as f64;
        if broken { f64::NAN } else { sum }
    })
}

/// `x · 2^exponent`, in two steps where the power alone would not be a number.
pub fn times_power(x: f64, exponent: i64) -> f64 {
    let near = exponent.clamp(-1000, 1000);
    let far = (exponent - near).clamp(-1000, 1000);
    x * power(near) * power(far)
}

/// Writes the sums of terms that were added with exponents near 0.
pub fn write(row: &[f32], sums_out: &mut [f32]) {
    let exponent = exponent(row).unwrap_or(0);
    for (out, sum) in sums_out.iter_mut().zip(sums(row)) {
        *out = times_power(sum, exponent) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Terms of very different sizes with factors and exponents, the same every time.
    fn terms(count: usize) -> Vec<([f32; 3], f64, i64)> {
        let mut x = 9u64;
        let mut next = move || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let mut term = |i: usize| {
            let numbers = [next(), next() * 1e-3, next() * 1e3];
            (numbers, f64::from(1.0 + next().abs()), (i % 7) as i64 * 9 - 30)
        };
        (0..count).map(&mut term).collect()
    }

    fn sum_of(terms: &[([f32; 3], f64, i64)]) -> Vec<f32> {
        let mut row = vec![0.0; words(3)];
        clear(&mut row);
        terms.iter().for_each(|(numbers, factor, exponent)| add(&mut row, numbers, *factor, *exponent));
        row
    }

    fn bits(row: &[f32]) -> Vec<u32> {
        row.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn order_and_grouping_change_no_bit() {
        let mut terms = terms(200);
        let want = bits(&sum_of(&terms));
        terms.reverse();
        assert_eq!(bits(&sum_of(&terms)), want);
        terms.rotate_left(77);
        for parts in [2, 3, 50] {
            let mut row = sum_of(&[]);
            for part in terms.chunks(terms.len().div_ceil(parts)).rev() {
                merge(&mut row, &sum_of(part));
            }
            assert_eq!(bits(&row), want, "{parts} parts");
        }
    }

    #[test]
    fn sums_are_nearer_than_floats_would_be() {
        let terms = terms(1000);
        let row = sum_of(&terms);
        let exponent = exponent(&row).unwrap();
        for (i, sum) in sums(&row).enumerate() {
            let exact: f64 = terms.iter().map(|(x, f, e)| times_power(f64::from(x[i]) * f, *e)).sum();
            let largest = terms.iter().map(|(x, f, e)| times_power(f64::from(x[2].abs()) * f, *e));
            let bound = largest.fold(0.0, f64::max) * 1000.0 / (1u64 << 32) as f64;
            assert!((times_power(sum, exponent) - exact).abs() <= bound, "{i}: {sum} for {exact}");
        }
    }

    #[test]
    fn far_exponents_empty_rows_and_broken_rows() {
        let mut row = sum_of(&[([1.0, 2.0, 3.0], 1.0, 140_000_000_000)]);
        let before = bits(&row);
        add(&mut row, &[5.0; 3], 1.5, -140_000_000_000);
        merge(&mut row, &sum_of(&[]));
        assert_eq!(bits(&row), before, "terms far below change nothing");
        assert_eq!(
            sums(&row).map(|x| times_power(x, exponent(&row).unwrap() - 140_000_000_000)).collect::<Vec<_>>(),
            [1.0, 2.0, 3.0]
        );
        let mut out = [7.0; 3];
        write(&sum_of(&[]), &mut out);
        assert_eq!((out, exponent(&sum_of(&[]))), ([0.0; 3], None));
        add(&mut row, &[f32::NAN, 0.0, 0.0], 1.0, 0);
        add(&mut row, &[1.0; 3], 1.0, 0);
        let mut other = sum_of(&[([1.0; 3], 1.0, 0)]);
        merge(&mut other, &row);
        assert!(sums(&row).chain(sums(&other)).all(f64::is_nan));
    }
}
