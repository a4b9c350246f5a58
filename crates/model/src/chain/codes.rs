//! Codes of words: ±1 vectors of length 64 that stay ±1 under the Hadamard transform, and far apart from each other.
//!
//! They are the quadratic bent functions of six variables (Rothaus 1976): element x of a code is (−1)^f(x) with f a quadratic form over
//! two elements whose alternating form is regular. Their transform is flat, which is what being bent means; and as words of the second
//! order Reed–Muller code of length 64 two of them differ in at least 16 places.

/// Elements of a code.
pub const CODE_LEN: usize = 64;
/// Elements that are +1 in the code of every word: the origin and the first four unit vectors. They carry no information about the word,
/// so that keys and queries may use them for something else.
pub(super) const FIXED: [usize; 5] = [0, 1, 2, 4, 8];
/// Number of codes there are.
pub(super) const MOST: usize = 55_552;

const VARIABLES: usize = 6;

/// The code of one word: bit x is set where element x is −1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(u64);

impl Code {
    /// Element `x`.
    pub(super) fn at(self, x: usize) -> f32 {
        if self.0 >> x & 1 == 1 { -1.0 } else { 1.0 }
    }

    /// The same quadratic form plus the variable whose unit vector is element 1: that element is −1, and the code is as bent as before.
    pub(super) fn marked(self) -> Code {
        Code(self.0 ^ monomial(1))
    }

    /// Sum of products of elements.
    #[cfg(test)]
    fn dot(self, other: Code) -> i32 {
        CODE_LEN as i32 - 2 * (self.0 ^ other.0).count_ones() as i32
    }
}

/// Where the product of the variables in `mask` is 1.
const fn monomial(mask: usize) -> u64 {
    let (mut bits, mut x) = (0, 0);
    while x < CODE_LEN {
        if x & mask == mask {
            bits |= 1 << x;
        }
        x += 1;
    }
    bits
}

/// Sums of the code times each character of the group: 64 times the normalised Hadamard transform, over 8.
fn transform(f: u64) -> [i32; CODE_LEN] {
    let mut sums: [i32; CODE_LEN] = std::array::from_fn(|x| 1 - 2 * (f >> x & 1) as i32);
    for step in (0..VARIABLES).map(|i| 1 << i) {
        for x in (0..CODE_LEN).filter(|x| x & step == 0) {
            (sums[x], sums[x + step]) = (sums[x] + sums[x + step], sums[x] - sums[x + step]);
        }
    }
    sums
}

/// The first `count` codes, at most [`MOST`], the same ones in the same order every time.
pub(super) fn codes(count: usize) -> Vec<Code> {
    assert!(count <= MOST, "{count} codes of {MOST}");
    let products: Vec<u64> =
        (0..VARIABLES).flat_map(|i| (0..i).map(move |j| monomial(1 << i | 1 << j))).collect();
    // The two variables whose unit vectors are not among the fixed elements.
    let linear = [16, 32].map(monomial);
    let sum = |mask: usize, terms: &[u64]| {
        terms.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).fold(0, |f, (_, term)| f ^ term)
    };
    let forms = (0..1usize << products.len()).map(|mask| sum(mask, &products));
    let bent = forms.filter(|&f| transform(f).iter().all(|s| s.abs() == 8));
    bent.flat_map(|f| (0..1 << linear.len()).map(move |mask| Code(f ^ sum(mask, &linear))))
        .take(count)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_flat_under_the_transform_and_has_the_fixed_elements() {
        let all = codes(MOST);
        assert_eq!(all.len(), MOST);
        for code in all.iter().copied().chain([all[0].marked(), all[999].marked()]) {
            assert!(transform(code.0).iter().all(|s| s.abs() == 8), "{code:?}");
        }
        assert!(all.iter().all(|code| FIXED.iter().all(|&x| code.at(x) == 1.0)));
        assert_eq!((all[7].marked().at(1), all[7].marked().at(0)), (-1.0, 1.0));
    }

    #[test]
    fn two_codes_differ_in_sixteen_places_or_more() {
        let all = codes(MOST);
        // Every pair of a sample with all.
        for (i, &a) in all.iter().enumerate().step_by(613) {
            for (j, &b) in all.iter().enumerate() {
                let dot = a.dot(b);
                assert!(if i == j { dot == 64 } else { (-32..=32).contains(&dot) }, "{i} {j}: {dot}");
            }
            assert!((-32..=32).contains(&a.dot(all[5].marked())));
        }
    }
}
