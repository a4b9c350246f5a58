//! Lengths and head counts of one attention call.
//!
//! ```text
//!   |<------------- seqlen_k ------------->|
//!   |<---- cached_len ---->|<-extend_len ->|      seqlen_q = extend_len
//! ```
//! extend: any; prefill: cached_len = 0; decode: extend_len = 1; chunk: a part of a prompt in one step.

use crate::error::BadArgument;

/// One sequence of a batch, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SeqLen {
    /// Query tokens of this call (`extend_len`).
    pub seqlen_q: usize,
    /// Key tokens visible to the last query (`cached_len + extend_len` when serving).
    pub seqlen_k: usize,
    /// First keys that every query sees, whatever the mask says about them (prefix-LM: 0 = none; at most `seqlen_k` count).
    pub prefix_len: usize,
}

impl SeqLen {
    /// A sequence with `seqlen_q` queries over `seqlen_k` keys. Either may be zero or the larger.
    pub const fn new(seqlen_q: usize, seqlen_k: usize) -> Self {
        SeqLen { seqlen_q, seqlen_k, prefix_len: 0 }
    }

    /// A serving step: `extend_len` new tokens after `cached_len` cached ones.
    pub const fn extend(cached_len: usize, extend_len: usize) -> Self {
        SeqLen::new(extend_len, cached_len + extend_len)
    }

    /// The same lengths with `prefix_len` first keys in sight of every query.
    pub const fn with_prefix(self, prefix_len: usize) -> Self {
        SeqLen { prefix_len, ..self }
    }
}

/// Head counts and widths of one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadShape {
    /// Query heads.
    pub num_q_heads: usize,
    /// Key/value heads; divides `num_q_heads`.
    pub num_kv_heads: usize,
    /// Width of a query and a key, unpadded.
    pub head_dim_qk: usize,
    /// Width of a value and an output, unpadded.
    pub head_dim_v: usize,
    /// A value is the first `head_dim_v` elements of its key, stored once (absorbed multi-head latent attention, DeepSeek-V2,
    /// arXiv 2405.04434, section 2.1).
    pub values_in_keys: bool,
}

impl HeadShape {
    /// Same width for keys and values.
    pub const fn new(num_q_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        HeadShape::with_widths(num_q_heads, num_kv_heads, head_dim, head_dim)
    }

    /// Widths of their own for keys and values.
    pub const fn with_widths(
        num_q_heads: usize,
        num_kv_heads: usize,
        head_dim_qk: usize,
        head_dim_v: usize,
    ) -> Self {
        HeadShape { num_q_heads, num_kv_heads, head_dim_qk, head_dim_v, values_in_keys: false }
    }

    /// Absorbed multi-head latent attention: one kv head, keys of `head_dim_v` latent elements and some rotary ones behind them.
    pub const fn latent(num_q_heads: usize, head_dim_qk: usize, head_dim_v: usize) -> Self {
        HeadShape { values_in_keys: true, ..HeadShape::with_widths(num_q_heads, 1, head_dim_qk, head_dim_v) }
    }

    /// Elements stored a token and kv head: key and value, or a key that holds its value. At the widest where a sum would not fit.
    pub const fn kv_width(&self) -> usize {
        if self.values_in_keys { self.head_dim_qk } else { self.head_dim_qk.saturating_add(self.head_dim_v) }
    }

    /// Query heads per key/value head (1 = MHA, `num_q_heads` = MQA).
    pub const fn group_size(&self) -> usize {
        self.num_q_heads / self.num_kv_heads
    }

    /// 1/sqrt(head_dim_qk) of the true, unpadded width.
    pub fn default_scale(&self) -> f32 {
        (1.0 / (self.head_dim_qk as f64).sqrt()) as f32
    }

    /// Refuses zero sizes and groups that do not divide.
    pub fn check(&self, op: &'static str) -> Result<(), BadArgument> {
        for (field, n) in [
            ("num_q_heads", self.num_q_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim_qk", self.head_dim_qk),
            ("head_dim_v", self.head_dim_v),
        ] {
            if n == 0 {
                return Err(BadArgument::new(op, field, n, "at least 1"));
            }
        }
        if !self.num_q_heads.is_multiple_of(self.num_kv_heads) {
            let supported = format!("a divisor of num_q_heads = {}", self.num_q_heads);
            return Err(BadArgument::new(op, "num_kv_heads", self.num_kv_heads, supported));
        }
        if self.values_in_keys && self.head_dim_v > self.head_dim_qk {
            let supported = format!("at most head_dim_qk = {}: values lie in keys", self.head_dim_qk);
            return Err(BadArgument::new(op, "head_dim_v", self.head_dim_v, supported));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_do_not_divide_are_refused() {
        assert!(HeadShape::new(9, 3, 64).check("t").is_ok());
        assert_eq!(HeadShape::new(9, 2, 64).check("t").unwrap_err().field, "num_kv_heads");
        assert_eq!(HeadShape::new(0, 1, 64).check("t").unwrap_err().field, "num_q_heads");
    }

    #[test]
    fn a_value_is_no_wider_than_the_key_that_holds_it() {
        let heads = HeadShape::latent(16, 576, 512);
        assert!(heads.check("t").is_ok());
        assert_eq!((heads.kv_width(), HeadShape::with_widths(16, 1, 576, 512).kv_width()), (576, 1088));
        assert_eq!(HeadShape::latent(16, 512, 576).check("t").unwrap_err().field, "head_dim_v");
    }

    #[test]
    fn scale_uses_the_true_head_dim() {
        assert!((HeadShape::new(1, 1, 80).default_scale() - 0.111_803_4).abs() < 1e-7);
    }
}
