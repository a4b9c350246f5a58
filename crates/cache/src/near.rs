//! Tokens that are read in 16 bits beside a type of fewer: the first of a sequence, and the most recent before each query.
//!
//! Which they are depends on a query's own position alone, never on how its prompt was cut, cached or batched. Stores nothing.

use suanpan_base::{BadArgument, DType, Mask, SeqLen};

/// A query at position `p` reads keys `0 .. sinks` and `p - recent + 1 ..= p` from rows of 16 bits, all others from codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NearTokens {
    /// First tokens of a sequence; whole pages.
    pub sinks: usize,
    /// Most recent tokens, the query's own included; 0: none, and no sinks either.
    pub recent: usize,
}

impl NearTokens {
    /// Every token is read in the one type.
    pub const NONE: NearTokens = NearTokens { sinks: 0, recent: 0 };

    /// Whether any token is read in 16 bits.
    pub fn is_some(&self) -> bool {
        self.recent > 0
    }

    /// Refuses sinks that are no whole pages or that stand alone, and the whole where `dtype` has 16 bits anyway, in the name of `op`.
    pub fn check(&self, op: &'static str, dtype: DType, page_size: usize) -> Result<(), BadArgument> {
        if self.sinks > 0 && (self.recent == 0 || !self.sinks.is_multiple_of(page_size)) {
            let supported =
                format!("whole pages of {page_size}, beside kv_cache_recent_tokens of at least 1");
            return Err(BadArgument::new(op, "kv_cache_sink_tokens", self.sinks, supported));
        }
        if self.recent > 0 && !dtype.is_code() {
            let supported = format!("0: {dtype} has no codes to spare tokens from");
            return Err(BadArgument::new(op, "kv_cache_recent_tokens", self.recent, supported));
        }
        if self.sinks.checked_add(self.recent).is_none_or(|n| n > u32::MAX as usize) {
            return Err(BadArgument::new(
                op,
                "kv_cache_recent_tokens",
                self.recent,
                "below 2^32 with the sinks",
            ));
        }
        Ok(())
    }

    /// What a query sees of the rows of 16 bits.
    pub fn mask(&self) -> Mask {
        Mask::streaming(self.sinks, self.recent)
    }

    /// Lengths over the codes, counted from the first one behind the sinks. Causal, the last query stands on the last key: with so many
    /// keys fewer, each sees those that [`NearTokens::mask`] leaves out.
    pub fn far(&self, len: SeqLen) -> SeqLen {
        SeqLen { seqlen_k: len.seqlen_k.saturating_sub(self.sinks + self.recent), ..len }
    }

    /// Pages of rows of 16 bits that a sequence of `tokens` tokens holds between two steps, at most.
    pub fn pages(&self, tokens: usize, page_size: usize) -> usize {
        let window = self.recent.div_ceil(page_size) + usize::from(self.recent > 1);
        if self.is_some() { (self.sinks / page_size + window).min(tokens.div_ceil(page_size)) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of each query, whatever its chunk: every key up to its own in one part, none in both.
    #[test]
    fn near_and_far_tokens_are_all_tokens_once() {
        for near in [(0, 1), (0, 5), (4, 1), (8, 7)].map(|(sinks, recent)| NearTokens { sinks, recent }) {
            for (cached, new) in [(0, 1), (0, 40), (3, 4), (11, 2), (12, 9), (39, 1)] {
                let len = SeqLen::extend(cached, new);
                for row in 0..new {
                    let seen = near.mask().visible(len, row);
                    let far = Mask::CAUSAL.visible(near.far(len), row);
                    let far: Vec<usize> = far.keys().map(|key| key + near.sinks).collect();
                    for key in 0..len.seqlen_k {
                        let parts = usize::from(seen.contains(key)) + usize::from(far.contains(&key));
                        assert_eq!(parts, usize::from(key <= cached + row), "{near:?} {len:?} {row} {key}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_stored_so_is_refused_by_its_name() {
        let field = |sinks, recent, dtype| {
            NearTokens { sinks, recent }.check("test", dtype, 16).map_err(|e| e.field.to_string())
        };
        assert!(field(16, 64, DType::I4).is_ok() && field(0, 0, DType::Bf16).is_ok());
        assert_eq!(field(15, 64, DType::I4).unwrap_err(), "kv_cache_sink_tokens");
        assert_eq!(field(16, 0, DType::I4).unwrap_err(), "kv_cache_sink_tokens");
        assert_eq!(field(0, 64, DType::Bf16).unwrap_err(), "kv_cache_recent_tokens");
        assert_eq!(field(0, usize::MAX, DType::I4).unwrap_err(), "kv_cache_recent_tokens");
    }
}
