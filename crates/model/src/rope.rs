//! The definition of rotary frequencies, plain and scaled, in f64. Chosen from the config, never from a request's length.
//!
//! Does not rotate anything: tables and kernels are in the ops room.

use std::f64::consts::PI;

use suanpan_base::BadArgument;

use crate::config::{RopeConfig, RopeScaling};

/// The `rope_type` values of a `config.json` that are supported.
pub const SUPPORTED_TYPES: &str = "default, llama3";

/// Inverse frequencies in radians per token, `[head_dim / 2]`: pair i turns by `position * inv_freq[i]`.
///
/// Plain: theta^(-2i/head_dim) (RoFormer, section 3.2.2). Llama 3: as `transformers` computes `rope_type` "llama3".
pub fn inv_freq(rope: &RopeConfig, head_dim: usize) -> Vec<f64> {
    let plain = (0..head_dim / 2).map(|i| rope.theta.powf(-2.0 * i as f64 / head_dim as f64));
    match &rope.scaling {
        RopeScaling::Default => plain.collect(),
        RopeScaling::Factors(factors) => plain.zip(factors).map(|(f, factor)| f / factor).collect(),
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

/// Refuses numbers that would give infinite, negative or undefined frequencies, or a factor list of another length.
pub fn check(rope: &RopeConfig, head_dim: usize) -> Result<(), BadArgument> {
    const OP: &str = "rope";
    let positive = |field: &str, x: f64| {
        if x.is_finite() && x > 0.0 {
            return Ok(());
        }
        Err(BadArgument::new(OP, field, x, "a finite number above 0"))
    };
    positive("rope_theta", rope.theta)?;
    positive("attention_factor", rope.attention_factor)?;
    match &rope.scaling {
        RopeScaling::Default => Ok(()),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            positive("factor", *factor)?;
            positive("low_freq_factor", *low_freq_factor)?;
            positive("high_freq_factor", *high_freq_factor)?;
            positive("original_max_position_embeddings", *original_max_position_embeddings)?;
            if high_freq_factor <= low_freq_factor {
                let supported = format!("above low_freq_factor = {low_freq_factor}");
                return Err(BadArgument::new(OP, "high_freq_factor", high_freq_factor, supported));
            }
            Ok(())
        }
        RopeScaling::Factors(factors) => {
            if factors.len() != head_dim / 2 {
                let supported = format!("head_dim / 2 = {}", head_dim / 2);
                return Err(BadArgument::new(OP, "frequency factors", factors.len(), supported));
            }
            factors.iter().try_for_each(|&f| positive("frequency factors", f))
        }
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
        let f = inv_freq(&llama3(32.0), 64);
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
        assert_eq!(f[14], inv_freq(&RopeConfig::plain(500_000.0), 64)[14]);
        let f = inv_freq(&llama3(8.0), 128);
        assert_near(&f, &[(29, 2.16657e-3), (34, 1.78508e-4), (35, 9.55621e-5)]);
    }

    #[test]
    fn a_factor_tensor_says_the_same_as_the_formula() {
        let plain = inv_freq(&RopeConfig::plain(500_000.0), 64);
        let scaled = inv_freq(&llama3(32.0), 64);
        // What a converter writes: binary32 factors.
        let factors: Vec<f64> = plain.iter().zip(&scaled).map(|(p, s)| f64::from((p / s) as f32)).collect();
        let by_tensor = RopeConfig { scaling: RopeScaling::Factors(factors), ..RopeConfig::plain(500_000.0) };
        check(&by_tensor, 64).unwrap();
        for (a, b) in inv_freq(&by_tensor, 64).iter().zip(&scaled) {
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
}
