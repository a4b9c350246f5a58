//! Predicted against counted: the two sides of the books, compared field by field, exactly.
//!
//! Counts of pages, tokens, FLOPs and bytes have no tolerance. A difference is a fault of the prediction or of the run.

use std::fmt;

use serde::Serialize;

use crate::entry::{AttnBooks, Entry};

/// Books whose fields can be compared by name.
pub trait Books {
    /// Names and values, in a fixed order.
    fn fields(&self) -> [(&'static str, u64); 4];
}

impl Books for AttnBooks {
    fn fields(&self) -> [(&'static str, u64); 4] {
        [
            ("pairs", self.pairs),
            ("flops", self.flops),
            ("kv_read_bytes", self.kv_read_bytes),
            ("kv_write_bytes", self.kv_write_bytes),
        ]
    }
}

impl Books for Entry {
    fn fields(&self) -> [(&'static str, u64); 4] {
        [
            ("flops", self.flops),
            ("device_read_bytes", self.device_read_bytes),
            ("device_write_bytes", self.device_write_bytes),
            ("link_bytes", self.link_bytes),
        ]
    }
}

/// One field whose two sides differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The field's name.
    pub field: &'static str,
    /// What the plan said.
    pub predicted: u64,
    /// What the run did.
    pub counted: u64,
}

/// Books that do not agree: every field that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Disagreement {
    /// At least one.
    pub differences: Vec<Difference>,
}

/// Compares two books of one kind.
pub fn reconcile<B: Books>(predicted: &B, counted: &B) -> Result<(), Disagreement> {
    let pairs = predicted.fields().into_iter().zip(counted.fields());
    reconcile_fields(pairs.map(|((field, predicted), (_, counted))| Difference { field, predicted, counted }))
}

/// Compares any named counts (pages, tokens); fields whose sides agree are dropped.
pub fn reconcile_fields(fields: impl IntoIterator<Item = Difference>) -> Result<(), Disagreement> {
    let differences: Vec<_> = fields.into_iter().filter(|d| d.predicted != d.counted).collect();
    if differences.is_empty() { Ok(()) } else { Err(Disagreement { differences }) }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let delta = i128::from(self.counted) - i128::from(self.predicted);
        write!(f, "{}: predicted {}, counted {} ({delta:+})", self.field, self.predicted, self.counted)
    }
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("books do not agree: ")?;
        for (i, difference) in self.differences.iter().enumerate() {
            write!(f, "{}{difference}", if i > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}

impl std::error::Error for Disagreement {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_off_is_reported_with_both_numbers() {
        let predicted = AttnBooks { pairs: 10, flops: 40, kv_read_bytes: 512, kv_write_bytes: 64 };
        assert_eq!(reconcile(&predicted, &predicted), Ok(()));
        let counted = AttnBooks { kv_read_bytes: 511, pairs: 12, ..predicted };
        let e = reconcile(&predicted, &counted).unwrap_err();
        let text = "books do not agree: pairs: predicted 10, counted 12 (+2); \
                    kv_read_bytes: predicted 512, counted 511 (-1)";
        assert_eq!(e.to_string(), text);
    }

    #[test]
    fn every_field_of_both_kinds_of_books_is_compared() {
        for changed in 0..4 {
            let mut n = [1u64; 4];
            n[changed] = 2;
            let entry = |n: [u64; 4]| Entry {
                flops: n[0],
                device_read_bytes: n[1],
                device_write_bytes: n[2],
                link_bytes: n[3],
            };
            assert_eq!(reconcile(&entry([1; 4]), &entry(n)).unwrap_err().differences.len(), 1);
            let books = |n: [u64; 4]| AttnBooks {
                pairs: n[0],
                flops: n[1],
                kv_read_bytes: n[2],
                kv_write_bytes: n[3],
            };
            assert_eq!(reconcile(&books([1; 4]), &books(n)).unwrap_err().differences.len(), 1);
        }
        assert_eq!(reconcile_fields([Difference { field: "pages", predicted: 3, counted: 3 }]), Ok(()));
    }
}
