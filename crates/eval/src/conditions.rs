//! The conditions of a run: a fixed list of names, each with a value or with the reason why it is unknown. Without them there is no run.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::EvalError;

/// Names that every run must say, with what they mean.
pub const REQUIRED: &[(&str, &str)] = &[
    ("phase", "training forward or backward, prefill, decode, mixed"),
    ("device", "model of GPU or CPU"),
    ("device_count", "how many of them"),
    ("driver", "driver or kernel version"),
    ("clocks", "clocks or power cap, or \"not controlled\""),
    ("weights_dtype", "type of stored weights"),
    ("activation_dtype", "type of activations in products"),
    ("kv_dtype", "type of stored keys and values"),
    ("num_q_heads", "query heads"),
    ("num_kv_heads", "key and value heads"),
    ("head_dim", "width of a head"),
    ("mask", "causal, window, sparse"),
    ("dropout", "\"none\" in serving"),
    ("lengths", "tokens in and out, as a distribution"),
    ("load", "closed with so many users, or open with a rate"),
    ("batch", "requests and tokens of a step at most"),
    ("backend", "engine"),
    ("kernel", "attention kernel that was really selected"),
    ("parallelism", "tensor, context, pipeline"),
    ("page_size", "tokens of a KV page"),
    ("chunked_prefill_tokens", "tokens of a prompt chunk at most, or \"off\""),
    ("cache_state", "cold, warm or mixed; the measured share stands in the report"),
    ("speculative", "method, or \"none\""),
    ("sampling", "temperature and the rest"),
    ("max_context", "longest prompt and answer served"),
    ("model", "name"),
    ("model_hash", "hash of the model's files"),
    ("server_version", "name and version"),
    ("server_flags", "as it was started"),
    ("client_host", "machine that asks, and whether it is the server's"),
    ("protocol", "chat or completion"),
    ("token_counter", "what counted prompts"),
];

/// One condition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// What holds; null where nobody knows.
    pub value: Value,
    /// Who says so: `endpoint`, `flag`, `run`, `client`.
    pub source: String,
    /// Why it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// All of them, by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Conditions(pub BTreeMap<String, Condition>);

/// Where conditions come from; later ones win.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// From the endpoint.
    pub endpoint: Map<String, Value>,
    /// From the run itself.
    pub run: Map<String, Value>,
    /// From flags, `NAME=VALUE`.
    pub flags: Vec<String>,
    /// Unknown ones, `NAME=REASON`.
    pub unknown: Vec<String>,
    /// A reason for all that are left.
    pub rest_unknown: Option<String>,
}

fn is_known(value: &Value) -> bool {
    !matches!(value, Value::Null) && value.as_str().is_none_or(|s| !s.trim().is_empty())
}

fn pair(text: &str, flag: &str) -> Result<(String, String), EvalError> {
    let supported =
        || format!("NAME=TEXT with a name of docs/evidence-run.md, for instance {}", REQUIRED[1].0);
    let (name, value) = text.split_once('=').ok_or_else(|| EvalError::bad(flag, text, supported()))?;
    let (name, value) = (name.trim(), value.trim());
    if value.is_empty() || !REQUIRED.iter().any(|(n, _)| *n == name) {
        return Err(EvalError::bad(flag, text, supported()));
    }
    Ok((name.to_owned(), value.to_owned()))
}

impl Conditions {
    /// Puts the sources together, or names what is missing.
    pub fn gather(sources: &Sources) -> Result<Conditions, EvalError> {
        let mut all = BTreeMap::new();
        for (source, map) in [("endpoint", &sources.endpoint), ("run", &sources.run)] {
            for (name, value) in map.iter().filter(|(_, v)| is_known(v)) {
                let value = value.clone();
                all.insert(name.clone(), Condition { value, source: source.into(), reason: None });
            }
        }
        for text in &sources.flags {
            let (name, value) = pair(text, "--condition")?;
            let value = serde_json::from_str(&value).unwrap_or(Value::String(value));
            all.insert(name, Condition { value, source: "flag".into(), reason: None });
        }
        let mut unknown = |name: String, reason: String| {
            let none = Condition { value: Value::Null, source: "flag".into(), reason: Some(reason) };
            all.entry(name).or_insert(none);
        };
        for text in &sources.unknown {
            let (name, reason) = pair(text, "--unknown-condition")?;
            unknown(name, reason);
        }
        if let Some(reason) = sources.rest_unknown.as_deref().filter(|r| !r.trim().is_empty()) {
            REQUIRED.iter().for_each(|(name, _)| unknown((*name).into(), reason.into()));
        }
        let missing: Vec<&str> = REQUIRED.iter().map(|(n, _)| *n).filter(|n| !all.contains_key(*n)).collect();
        if missing.is_empty() {
            return Ok(Conditions(all));
        }
        Err(EvalError::bad(
            "conditions",
            format!("without {}", missing.join(", ")),
            "all of them: --condition NAME=VALUE, --unknown-condition NAME=REASON, or --unknown-conditions REASON for the rest",
        ))
    }

    /// Names whose values are not the same.
    pub fn differing(&self, other: &Conditions) -> Vec<String> {
        let names: BTreeSet<&String> = self.0.keys().chain(other.0.keys()).collect();
        let value = |c: &Conditions, name: &str| c.0.get(name).map(|c| c.value.clone());
        let differs = |name: &&&String| value(self, name) != value(other, name);
        names.iter().filter(differs).map(|n| (**n).clone()).collect()
    }

    /// A value, if known.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).map(|c| &c.value).filter(|v| is_known(v))
    }
}

/// The machine that asks.
pub fn client_host() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|l| l.strip_prefix("model name")).and_then(|l| l.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, m)| m.trim());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{} threads of {model}, {}", threads, std::env::consts::OS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete() -> Sources {
        let run = REQUIRED.iter().map(|(n, _)| ((*n).to_owned(), Value::from("said"))).collect();
        Sources { run, ..Sources::default() }
    }

    #[test]
    fn a_run_without_a_condition_is_refused_by_name() {
        let mut sources = complete();
        sources.run.insert("kv_dtype".into(), Value::Null);
        sources.run.insert("clocks".into(), " ".into());
        let e = Conditions::gather(&sources).unwrap_err().to_string();
        assert!(e.contains("clocks, kv_dtype") || e.contains("clocks") && e.contains("kv_dtype"), "{e}");
        sources.unknown = vec!["kv_dtype=the provider does not say".into()];
        sources.flags = vec!["clocks=not controlled".into()];
        let got = Conditions::gather(&sources).unwrap();
        assert_eq!(got.0["kv_dtype"].reason.as_deref(), Some("the provider does not say"));
        assert!(got.get("kv_dtype").is_none() && got.get("clocks").is_some());
        sources.flags = vec!["colour=blue".into()];
        assert!(Conditions::gather(&sources).is_err(), "unknown names are refused");
    }

    #[test]
    fn an_unknown_condition_does_not_hide_a_known_one() {
        let mut sources = complete();
        sources.rest_unknown = Some("a public service".into());
        let got = Conditions::gather(&sources).unwrap();
        assert!(got.get("kv_dtype").is_some());
        assert!(got.differing(&Conditions::default()).len() == REQUIRED.len());
    }
}
