//! Models made in code, by name: `builtin:recall`, `builtin:chain[:hops=N]`, `builtin:count`.
//!
//! Each is a config, weights and a tokenizer like any other model's; nothing beyond this file asks where they came from.

use crate::chain::{self, count, vocab};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::load::Model;
use crate::recall;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;

/// What every built-in name begins with.
pub const PREFIX: &str = "builtin:";
/// The built-in names.
pub const FORMS: &str = "builtin:recall, builtin:chain, builtin:chain:hops=1 to 16, builtin:count";

/// A built-in model with its options read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Builtin {
    Recall,
    Chain { hops: usize },
    Count,
}

impl Builtin {
    fn parse(spec: &str) -> Result<Builtin, ModelError> {
        let bad = |found: String| ModelError::BadSpec { spec: spec.into(), found, supported: FORMS.into() };
        let name = spec.strip_prefix(PREFIX).ok_or_else(|| bad("no built-in model".into()))?;
        let (name, options) =
            name.split_once(':').map_or((name, None), |(name, options)| (name, Some(options)));
        match (name, options) {
            (recall::NAME, None) => Ok(Builtin::Recall),
            (count::NAME, None) => Ok(Builtin::Count),
            (chain::NAME, None) => Ok(Builtin::Chain { hops: chain::DEFAULT_HOPS }),
            (chain::NAME, Some(options)) => {
                let hops = options.strip_prefix("hops=").and_then(|n| n.parse().ok());
                let hops = hops.filter(|n| (1..=chain::MAX_HOPS).contains(n));
                Ok(Builtin::Chain { hops: hops.ok_or_else(|| bad(format!("option {options:?}")))? })
            }
            (recall::NAME | count::NAME, Some(options)) => Err(bad(format!("option {options:?}"))),
            _ => Err(bad("no built-in model of that name".into())),
        }
    }

    fn parts(self) -> Result<(ModelConfig, Weights), ModelError> {
        Ok(match self {
            Builtin::Recall => (recall::config(), recall::weights()),
            Builtin::Chain { hops } => (chain::config(hops)?, chain::weights(hops)?),
            Builtin::Count => (count::config(), count::weights()),
        })
    }

    fn template(self) -> &'static str {
        match self {
            Builtin::Recall => recall::CHAT_TEMPLATE,
            Builtin::Chain { .. } | Builtin::Count => chain::CHAT_TEMPLATE,
        }
    }

    /// `tokenizer.json` and `tokenizer_config.json`.
    fn tokenizer_files(self) -> (String, String) {
        let words = self != Builtin::Recall;
        let json = if words { vocab::tokenizer_json().to_string() } else { vocab::bytes_json() };
        (json, vocab::tokenizer_config(self.template(), words).to_string())
    }
}

/// The model named `spec`, `builtin:` included.
pub fn load(spec: &str) -> Result<Model, ModelError> {
    let builtin = Builtin::parse(spec)?;
    let (config, weights) = builtin.parts()?;
    let bad = |message: String| ModelError::Tokenizer { file: spec.into(), message };
    let tokenizer = match builtin {
        Builtin::Recall => Tokenizer::bytes(&[], None, None),
        Builtin::Chain { .. } | Builtin::Count => {
            let (json, settings) = builtin.tokenizer_files();
            Tokenizer::from_json(json.as_bytes(), Some(settings.as_bytes())).map(|read| read.tokenizer)
        }
    };
    let tokenizer = tokenizer.map_err(|e| bad(e.to_string()))?;
    let text =
        |id: Option<u32>| id.and_then(|id| tokenizer.token_bytes(id)).and_then(|b| String::from_utf8(b).ok());
    let ids = tokenizer.special_ids();
    let template =
        ChatTemplate::compile(builtin.template(), text(ids.bos).as_deref(), text(ids.eos).as_deref())
            .map_err(|e| ModelError::Template { file: spec.into(), message: e.to_string() })?;
    Ok(Model {
        config,
        weights,
        tokenizer,
        chat_template: Some(template),
        file_bytes: 0,
        warnings: Vec::new(),
    })
}

/// `tokenizer.json` and `tokenizer_config.json` of the model named `spec`.
pub(crate) fn tokenizer_files(spec: &str) -> Result<(String, String), ModelError> {
    Ok(Builtin::parse(spec)?.tokenizer_files())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_options_are_read_and_others_refused() {
        assert_eq!(load("builtin:chain").unwrap().config.layers.len(), 7);
        let two = load("builtin:chain:hops=2").unwrap().config;
        assert_eq!((two.layers.len(), two.name.as_str()), (5, "builtin:chain:hops=2"));
        assert_eq!(load("builtin:count").unwrap().config.layers.len(), 2);
        for spec in [
            "builtin:",
            "builtin:chains",
            "builtin:chain:",
            "builtin:chain:hops=0",
            "builtin:chain:hops=17",
            "builtin:chain:hops=2,hops=3",
            "builtin:recall:hops=2",
            "builtin:count:x",
            "recall",
        ] {
            assert!(matches!(load(spec), Err(ModelError::BadSpec { .. })), "{spec}");
        }
    }

    #[test]
    fn every_built_in_config_is_one_that_runs() {
        for spec in ["builtin:recall", "builtin:chain", "builtin:chain:hops=16", "builtin:count"] {
            let model = load(spec).unwrap();
            model.config.check().unwrap();
            assert!(model.tokenizer.vocab_size() <= model.config.vocab_size, "{spec}");
        }
    }
}
