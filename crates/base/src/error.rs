//! The one typed error for a request that cannot be honoured: which operation, which field, what was asked, what is supported.

use std::fmt::Display;

/// A request refused before anything was allocated or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {field} = {asked}: supported: {supported}")]
pub struct BadArgument {
    /// The operation that refuses, for example `attention plan`.
    pub op: &'static str,
    /// The field at fault, by its public name.
    pub field: String,
    /// What was asked.
    pub asked: String,
    /// What is supported instead.
    pub supported: String,
}

impl BadArgument {
    /// A refusal of `field` in operation `op`.
    pub fn new(
        op: &'static str,
        field: impl Into<String>,
        asked: impl Display,
        supported: impl Display,
    ) -> Self {
        BadArgument { op, field: field.into(), asked: asked.to_string(), supported: supported.to_string() }
    }
}

/// Multiplies sizes; a product past `usize` is a refusal of `field`, never a wrapped number.
pub fn checked_product(op: &'static str, field: &str, factors: &[usize]) -> Result<usize, BadArgument> {
    let mut product = 1usize;
    for &f in factors {
        product = product.checked_mul(f).ok_or_else(|| {
            BadArgument::new(op, field, format!("{factors:?} (product overflows)"), "a product below 2^63")
        })?;
    }
    if product > isize::MAX as usize {
        return Err(BadArgument::new(op, field, format!("{factors:?}"), "a product below 2^63"));
    }
    Ok(product)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflowing_sizes_are_refused_by_name() {
        assert_eq!(checked_product("t", "bytes", &[3, 4, 5]).unwrap(), 60);
        assert_eq!(checked_product("t", "bytes", &[0, usize::MAX]).unwrap(), 0);
        let e = checked_product("t", "bytes", &[1 << 40, 1 << 40]).unwrap_err();
        assert_eq!(e.field, "bytes");
    }
}
