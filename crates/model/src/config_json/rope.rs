//! Rotary positions of a config.json: `rope_parameters` (transformers 5), else `rope_theta` beside `rope_scaling` (before).
//!
//! One set for all layers, or one for each layer type where the family has two.

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::config::{RopeConfig, RopeScaling};
use crate::error::ModelError;
use crate::family::Family;
use crate::rope::{self, SUPPORTED_TYPES};

/// Longest list of factors that is read.
const MAX_FACTORS: usize = 4096;

/// Rotary positions as the file gives them.
pub(super) struct Ropes {
    /// Those of global layers, then those of window layers where they differ.
    pub ropes: Vec<RopeConfig>,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
}

/// Reads them. `max_len`: the file's `max_position_embeddings`.
pub(super) fn ropes(
    fields: &Fields,
    family: &Family,
    head_dim: usize,
    max_len: usize,
) -> Result<Ropes, ModelError> {
    let empty = Map::new();
    let newer = fields.object("rope_parameters")?;
    let (key, scaling) = match newer {
        Some(map) => ("rope_parameters", map),
        None => ("rope_scaling", fields.object("rope_scaling")?.unwrap_or(&empty)),
    };
    let theta = fields.number("rope_theta")?.unwrap_or(family.theta);
    let reader = |map, key: &str, theta| Reader {
        file: fields.file,
        key: key.into(),
        outer: fields,
        map,
        theta,
        max_len,
    };
    let nested = Fields { file: fields.file, map: scaling };
    let (ropes, partial) = match (nested.object("full_attention")?, family.local_theta) {
        (Some(_), None) => {
            let found = "one set for each layer type";
            let supported = format!("one set for all layers of {} models", family.name);
            return Err(ModelError::bad(fields.file, key, found, supported));
        }
        (Some(full), Some(local_theta)) => {
            let local = nested.object("sliding_attention")?.unwrap_or(&empty);
            let full = reader(full, &format!("{key}.full_attention"), theta);
            let local = reader(local, &format!("{key}.sliding_attention"), local_theta);
            let partial = full.partial()?;
            if partial != local.partial()? {
                let supported = "the same in full_attention and sliding_attention";
                return Err(ModelError::bad(fields.file, "partial_rotary_factor", partial, supported));
            }
            (vec![full.rope()?, local.rope()?], partial)
        }
        (None, local_theta) => {
            let global = reader(scaling, key, theta);
            let mut ropes = vec![global.rope()?];
            if let Some(default) = local_theta {
                ropes.push(RopeConfig::plain(fields.number("rope_local_base_freq")?.unwrap_or(default)));
            }
            (ropes, global.partial()?)
        }
    };
    let rotary_dim = (head_dim as f64 * partial) as usize;
    // A head too narrow to be rotated at all is the head's fault, and found with the other sizes.
    if !(partial > 0.0 && partial <= 1.0 && (rotary_dim >= 2 || head_dim < 2)) {
        let supported = format!("a share of head_dim = {head_dim} that is at least 2 elements, at most 1");
        return Err(ModelError::bad(fields.file, "partial_rotary_factor", partial, supported));
    }
    Ok(Ropes { ropes, rotary_dim })
}

/// One set of parameters.
struct Reader<'a> {
    file: &'a str,
    /// Where it stands, for errors.
    key: String,
    outer: &'a Fields<'a>,
    map: &'a Map<String, Value>,
    theta: f64,
    max_len: usize,
}

impl Reader<'_> {
    fn fields(&self) -> Fields<'_> {
        Fields { file: self.file, map: self.map }
    }

    fn missing(&self, name: &str, needed: impl std::fmt::Display) -> ModelError {
        ModelError::missing(self.file, format!("{}.{name}", self.key), needed)
    }

    fn need(&self, name: &str, kind: &str) -> Result<f64, ModelError> {
        self.fields().number(name)?.ok_or_else(|| self.missing(name, format!("rope_type {kind}")))
    }

    /// Share of a head that is rotated.
    fn partial(&self) -> Result<f64, ModelError> {
        const KEY: &str = "partial_rotary_factor";
        Ok(self.fields().number(KEY)?.or(self.outer.number(KEY)?).unwrap_or(1.0))
    }

    /// The length that the model was first trained on: beside the parameters first, as the reference does, then among them.
    fn original(&self) -> Result<f64, ModelError> {
        const KEY: &str = "original_max_position_embeddings";
        Ok(self.outer.number(KEY)?.or(self.fields().number(KEY)?).unwrap_or(self.max_len as f64))
    }

    fn rope(&self) -> Result<RopeConfig, ModelError> {
        let inner = self.fields();
        let theta = inner.number("rope_theta")?.unwrap_or(self.theta);
        let plain = RopeConfig::plain(theta);
        let with = |scaling, attention_factor| RopeConfig { theta, scaling, attention_factor };
        let Some(kind) = inner.text("rope_type")?.or(inner.text("type")?) else {
            let known = ["rope_theta", "partial_rotary_factor"];
            if inner.map.iter().all(|(k, v)| v.is_null() || known.contains(&k.as_str())) {
                return Ok(plain);
            }
            return Err(self.missing("rope_type", SUPPORTED_TYPES));
        };
        match kind {
            "default" => Ok(plain),
            "linear" => Ok(with(RopeScaling::Linear { factor: self.need("factor", kind)? }, 1.0)),
            "dynamic" => {
                let scaling = RopeScaling::Dynamic {
                    factor: self.need("factor", kind)?,
                    original: self.max_len as f64,
                };
                Ok(with(scaling, 1.0))
            }
            // Early Phi-3 files call their two lists "su" or "yarn".
            "longrope" | "su" => self.longrope(theta),
            "yarn" if inner.map.contains_key("short_factor") => self.longrope(theta),
            "yarn" => self.yarn(theta),
            "llama3" => {
                let scaling = RopeScaling::Llama3 {
                    factor: self.need("factor", kind)?,
                    low_freq_factor: self.need("low_freq_factor", kind)?,
                    high_freq_factor: self.need("high_freq_factor", kind)?,
                    original_max_position_embeddings: self.need("original_max_position_embeddings", kind)?,
                };
                Ok(with(scaling, 1.0))
            }
            other => {
                let field = format!("{}.rope_type", self.key);
                Err(ModelError::bad(self.file, field, format!("{other:?}"), SUPPORTED_TYPES))
            }
        }
    }

    fn yarn(&self, theta: f64) -> Result<RopeConfig, ModelError> {
        let inner = self.fields();
        let original = self.original()?;
        let factor = inner.number("factor")?.unwrap_or(self.max_len as f64 / original);
        // As the reference does, 0 counts as not given.
        let beta = |key: &str, default: f64| {
            Ok::<_, ModelError>(inner.number(key)?.filter(|&b| b != 0.0).unwrap_or(default))
        };
        let scaling = RopeScaling::Yarn {
            factor,
            original,
            beta_fast: beta("beta_fast", 32.0)?,
            beta_slow: beta("beta_slow", 1.0)?,
            truncate: inner.flag("truncate")?.unwrap_or(true),
        };
        let attention_factor = rope::yarn_attention_factor(
            inner.number("attention_factor")?,
            factor,
            inner.number("mscale")?,
            inner.number("mscale_all_dim")?,
        );
        Ok(RopeConfig { theta, scaling, attention_factor })
    }

    fn longrope(&self, theta: f64) -> Result<RopeConfig, ModelError> {
        let inner = self.fields();
        let original = self.original()?;
        let factor = inner.number("factor")?.unwrap_or(self.max_len as f64 / original);
        let list = |key: &str| {
            let list = inner.numbers(key, MAX_FACTORS)?;
            list.ok_or_else(|| self.missing(key, "rope_type longrope"))
        };
        let scaling =
            RopeScaling::LongRope { short: list("short_factor")?, long: list("long_factor")?, original };
        let attention_factor =
            rope::longrope_attention_factor(inner.number("attention_factor")?, factor, original);
        Ok(RopeConfig { theta, scaling, attention_factor })
    }
}
