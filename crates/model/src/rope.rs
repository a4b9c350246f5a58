//! The definition of rotary frequencies, plain and scaled, in f64. Chosen from the config, never from a request's length.
//!
//! Does not rotate anything: tables and kernels are in the ops room.

use std::f64::consts::PI;

use suanpan_base::BadArgument;

use crate::config::{RopeConfig, RopeScaling};

/// The `rope_type` values of a `config.json` that are supported.
pub const SUPPORTED_TYPES: &str = "default, linear, dynamic, yarn, longrope (su), llama3";

/// Inverse frequencies in radians per token, `[rotary_dim / 2]`: pair i turns by `position * inv_freq[i]`. `length`: the longest
/// sequence, in tokens, by which "dynamic" and "longrope" choose.
///
/// Plain: theta^(-2i/rotary_dim) (RoFormer, section 3.2.2). The others: as `transformers` computes them.
pub fn inv_freq(rope: &RopeConfig, rotary_dim: usize, length: usize) -> Vec<f64> {
    let powers = |base: f64| (0..rotary_dim / 2).map(move |i| base.powf(-2.0 * i as f64 / rotary_dim as f64));
    let plain = powers(rope.theta);
    match &rope.scaling {
        RopeScaling::Default => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
        RopeScaling::Factors(factors) => plain.zip(factors).map(|(f, factor)| f / factor).collect(),
        &RopeScaling::Dynamic { factor, original } => {
            powers(dynamic_base(rope.theta, factor, original, rotary_dim, length)).collect()
        }
        RopeScaling::LongRope { short, long, original } => {
            let factors = if length as f64 > *original { long } else { short };
            plain.zip(factors).map(|(f, factor)| f / factor).collect()
        }
        &RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate } => {
            let ramp = yarn_ramp(rope.theta, original, (beta_fast, beta_slow), truncate, rotary_dim);
            plain.zip(ramp).map(|(f, share)| f * (share / factor + 1.0 - share)).collect()
        }
        &RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: original,
        } => plain
            .map(|f| {
                let turns = original * f / (2.0 * PI);
                // Share of the unscaled frequency: 1 for many turns within the original length, 0 for few.
                let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                f * (keep + (1.0 - keep) / factor)
            })
            .collect(),
    }
}

/// The base of "dynamic" at `length` tokens: theta up to `original`, then theta · (factor·length/original − (factor − 1))^(d/(d−2)).
pub fn dynamic_base(theta: f64, factor: f64, original: f64, rotary_dim: usize, length: usize) -> f64 {
    let length = (length as f64).max(original);
    // One pair has frequency 1 whatever the base.
    let exponent = rotary_dim as f64 / (rotary_dim as f64 - 2.0).max(1.0);
    theta * (factor * length / original - (factor - 1.0)).powf(exponent)
}

/// Share of the divided frequency for each pair, rising from 0 to 1 (arXiv 2309.00071, section 3.2, over pair numbers).
fn yarn_ramp(
    theta: f64,
    original: f64,
    (fast, slow): (f64, f64),
    truncate: bool,
    rotary_dim: usize,
) -> impl Iterator<Item = f64> {
    let dim = rotary_dim as f64;
    // The pair that turns `turns` times within the original length.
    let pair = |turns: f64| dim * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (low, high) = (pair(fast), pair(slow));
    let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, high) = (low.max(0.0), high.min(dim - 1.0));
    let high = if high == low { high + 0.001 } else { high };
    (0..rotary_dim / 2).map(move |i| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0))
}

/// 0.1 · `m` · ln(`factor`) + 1: YaRN's scale for an extension by `factor`; 1 for none.
pub fn mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// Multiplier of cosine and sine under YaRN: `given`, else by the two mscales, else 0.1 ln(factor) + 1.
pub fn yarn_attention_factor(
    given: Option<f64>,
    factor: f64,
    one_dim: Option<f64>,
    all_dim: Option<f64>,
) -> f64 {
    // As the reference does, a scale of 0 counts as not given.
    let both = one_dim.zip(all_dim).filter(|&(m, all)| m != 0.0 && all != 0.0);
    given.unwrap_or_else(|| {
        both.map_or(mscale(factor, 1.0), |(m, all)| mscale(factor, m) / mscale(factor, all))
    })
}

/// The same under LongRoPE: `given`, else sqrt(1 + ln(factor) / ln(original)), with `factor` the extension of the length.
pub fn longrope_attention_factor(given: Option<f64>, factor: f64, original: f64) -> f64 {
    let by_length = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
    given.unwrap_or(by_length)
}

/// The length, in tokens, before the scaling; `claimed` where there is none.
pub(crate) fn native_len(rope: &RopeConfig, claimed: usize) -> usize {
    match rope.scaling {
        RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Factors(_) => claimed,
        RopeScaling::Dynamic { original, .. }
        | RopeScaling::Yarn { original, .. }
        | RopeScaling::LongRope { original, .. }
        | RopeScaling::Llama3 { original_max_position_embeddings: original, .. } => original as usize,
    }
}

/// Refuses numbers that would give infinite, negative or undefined frequencies, or a factor list of another length.
pub fn check(rope: &RopeConfig, rotary_dim: usize) -> Result<(), BadArgument> {
    const OP: &str = "rope";
    let positive = |field: &str, x: f64| {
        if x.is_finite() && x > 0.0 {
            return Ok(());
        }
        Err(BadArgument::new(OP, field, x, "a finite number above 0"))
    };
    let at_least = |field: &str, least: f64, x: f64| {
        if x.is_finite() && x >= least {
            return Ok(());
        }
        Err(BadArgument::new(OP, field, x, format!("a finite number, at least {least}")))
    };
    let list = |field: &str, factors: &[f64]| {
        if factors.len() != rotary_dim / 2 {
            let supported = format!("rotary_dim / 2 = {}", rotary_dim / 2);
            return Err(BadArgument::new(OP, field, factors.len(), supported));
        }
        factors.iter().try_for_each(|&f| positive(field, f))
    };
    const ORIGINAL: &str = "original_max_position_embeddings";
    positive("rope_theta", rope.theta)?;
    positive("attention_factor", rope.attention_factor)?;
    match &rope.scaling {
        RopeScaling::Default => Ok(()),
        RopeScaling::Linear { factor } => positive("factor", *factor),
        RopeScaling::Dynamic { factor, original } => {
            at_least("factor", 1.0, *factor)?;
            at_least(ORIGINAL, 1.0, *original)
        }
        RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate: _ } => {
            at_least("factor", 1.0, *factor)?;
            at_least(ORIGINAL, 1.0, *original)?;
            positive("beta_slow", *beta_slow)?;
            at_least("beta_fast", *beta_slow, *beta_fast)?;
            if rope.theta == 1.0 {
                return Err(BadArgument::new(OP, "rope_theta", 1, "a base other than 1 under yarn"));
            }
            Ok(())
        }
        RopeScaling::LongRope { short, long, original } => {
            at_least(ORIGINAL, 1.0, *original)?;
            list("short_factor", short)?;
            list("long_factor", long)
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            positive("factor", *factor)?;
            positive("low_freq_factor", *low_freq_factor)?;
            positive("high_freq_factor", *high_freq_factor)?;
            at_least(ORIGINAL, 1.0, *original_max_position_embeddings)?;
            if high_freq_factor <= low_freq_factor {
                let supported = format!("above low_freq_factor = {low_freq_factor}");
                return Err(BadArgument::new(OP, "high_freq_factor", high_freq_factor, supported));
            }
            Ok(())
        }
        RopeScaling::Factors(factors) => list("frequency factors", factors),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama3(factor: f64) -> RopeConfig {
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        RopeConfig { theta: 500_000.0, scaling, attention_factor: 1.0 }
    }

    fn assert_near(inv_freq: &[f64], expected: &[(usize, f64)]) {
        for &(i, want) in expected {
            let got = inv_freq[i];
            assert!((got / want - 1.0).abs() < 3e-6, "i = {i}: {got:e}, expected {want:e}");
        }
    }

    #[test]
    fn llama3_frequencies_are_scaled_not_plain() {
        let f = inv_freq(&llama3(32.0), 64, 100);
        assert_eq!(f.len(), 32);
        assert_near(
            &f,
            &[
                (14, 3.21145e-3),
                (15, 1.29055e-3),
                (16, 4.29557e-4),
                (17, 9.70829e-5),
                (18, 1.94616e-5),
                (31, 9.41833e-8),
            ],
        );
        assert_eq!(f[14], inv_freq(&RopeConfig::plain(500_000.0), 64, 100)[14]);
        let f = inv_freq(&llama3(8.0), 128, 100);
        assert_near(&f, &[(29, 2.16657e-3), (34, 1.78508e-4), (35, 9.55621e-5)]);
    }

    #[test]
    fn a_factor_tensor_says_the_same_as_the_formula() {
        let plain = inv_freq(&RopeConfig::plain(500_000.0), 64, 100);
        let scaled = inv_freq(&llama3(32.0), 64, 100);
        // What a converter writes: binary32 factors.
        let factors: Vec<f64> = plain.iter().zip(&scaled).map(|(p, s)| f64::from((p / s) as f32)).collect();
        let by_tensor = RopeConfig { scaling: RopeScaling::Factors(factors), ..RopeConfig::plain(500_000.0) };
        check(&by_tensor, 64).unwrap();
        for (a, b) in inv_freq(&by_tensor, 64, 100).iter().zip(&scaled) {
            assert!((a / b - 1.0).abs() < 1e-7, "{a:e} {b:e}");
        }
        assert_eq!(check(&by_tensor, 128).unwrap_err().field, "frequency factors");
    }

    #[test]
    fn numbers_that_give_no_frequency_are_refused_by_name() {
        let field = |rope: &RopeConfig| check(rope, 64).unwrap_err().field;
        assert_eq!(field(&RopeConfig::plain(0.0)), "rope_theta");
        assert_eq!(field(&RopeConfig::plain(f64::NAN)), "rope_theta");
        assert_eq!(field(&llama3(0.0)), "factor");
        let mut equal = llama3(8.0);
        if let RopeScaling::Llama3 { high_freq_factor, .. } = &mut equal.scaling {
            *high_freq_factor = 1.0;
        }
        assert_eq!(field(&equal), "high_freq_factor");
        let zero = RopeConfig { scaling: RopeScaling::Factors(vec![0.0; 32]), ..RopeConfig::plain(1e4) };
        assert_eq!(field(&zero), "frequency factors");
    }

    /// Case C47: base 10000, dim 128, trained on 4096 tokens, factor 6.
    #[test]
    fn the_dynamic_base_grows_from_the_original_length_on_and_not_before() {
        for (length, want) in [(100, 10_000.0), (4096, 10_000.0), (4097, 10_014.9), (8192, 72_195.9)] {
            let got = dynamic_base(10_000.0, 6.0, 4096.0, 128, length);
            assert!((got - want).abs() < 0.06, "{length}: {got}, expected {want}");
        }
        let scaling = RopeScaling::Dynamic { factor: 6.0, original: 4096.0 };
        let rope = RopeConfig { scaling, ..RopeConfig::plain(10_000.0) };
        assert_eq!(inv_freq(&rope, 128, 4096), inv_freq(&RopeConfig::plain(10_000.0), 128, 4096));
        assert_near(&inv_freq(&rope, 128, 8192), &[(1, 72_195.9f64.powf(-2.0 / 128.0))]);
    }

    /// Case C47: factor 16 plain, with equal mscales, with a factor of its own; no entry at all is 1.
    #[test]
    fn the_yarn_attention_factor_follows_the_file_first_and_then_the_formula() {
        assert!((yarn_attention_factor(None, 16.0, None, None) - 1.27726).abs() < 1e-5);
        assert_eq!(yarn_attention_factor(None, 16.0, Some(1.0), Some(1.0)), 1.0);
        assert_eq!(yarn_attention_factor(Some(0.5), 16.0, Some(1.0), Some(1.0)), 0.5);
        assert_eq!(yarn_attention_factor(None, 1.0, None, None), 1.0);
        assert_eq!(RopeConfig::plain(1e4).attention_factor, 1.0);
        let want = (1.0 + 8f64.ln() / 64f64.ln()).sqrt();
        assert_eq!(longrope_attention_factor(None, 8.0, 64.0), want);
        assert_eq!(longrope_attention_factor(Some(1.25), 8.0, 64.0), 1.25);
    }

    #[test]
    fn longrope_takes_the_long_list_only_past_the_original_length() {
        let scaling = RopeScaling::LongRope { short: vec![1.0, 2.0], long: vec![4.0, 8.0], original: 4096.0 };
        let rope = RopeConfig { scaling, ..RopeConfig::plain(10_000.0) };
        let plain = inv_freq(&RopeConfig::plain(10_000.0), 4, 0);
        assert_eq!(inv_freq(&rope, 4, 4096), [plain[0], plain[1] / 2.0]);
        assert_eq!(inv_freq(&rope, 4, 4097), [plain[0] / 4.0, plain[1] / 8.0]);
        assert_eq!(check(&rope, 8).unwrap_err().field, "short_factor");
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_divides_slow_ones() {
        let yarn = |truncate| {
            let scaling = RopeScaling::Yarn {
                factor: 16.0,
                original: 4096.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate,
            };
            inv_freq(&RopeConfig { scaling, ..RopeConfig::plain(10_000.0) }, 128, 0)
        };
        let plain = inv_freq(&RopeConfig::plain(10_000.0), 128, 0);
        // 128 ln(4096 / 64π) / (2 ln 10000) = 20.94 and, for one turn, 45.03.
        let (f, exact) = (yarn(true), yarn(false));
        assert_eq!(f[..21], plain[..21]);
        assert!((f[46] * 16.0 / plain[46] - 1.0).abs() < 1e-12);
        let share = (30.0 - 20.0) / (46.0 - 20.0);
        assert!((f[30] / plain[30] - (share / 16.0 + 1.0 - share)).abs() < 1e-12);
        assert!(exact[30] != f[30] && (exact[30] / f[30] - 1.0).abs() < 0.05);
    }
}
