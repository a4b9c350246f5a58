//! A JSON object read key by key, with refusals that name file and key.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::config::MAX_SIZE;
use crate::error::ModelError;

/// A JSON object with its file's name, read key by key.
pub(super) struct Fields<'a> {
    pub file: &'a str,
    pub map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The value of `key`; null counts as absent.
    pub fn get<T: Deserialize<'a>>(&self, key: &str, supported: &str) -> Result<Option<T>, ModelError> {
        match self.map.get(key).filter(|v| !v.is_null()) {
            None => Ok(None),
            Some(value) => match T::deserialize(value) {
                Ok(x) => Ok(Some(x)),
                Err(_) => Err(self.bad(key, value, supported)),
            },
        }
    }

    pub fn bad(&self, key: &str, found: &Value, supported: &str) -> ModelError {
        // A hostile value may be long; the start of it is enough to find it.
        let found: String = found.to_string().chars().take(80).collect();
        ModelError::bad(self.file, key, found, supported)
    }

    pub fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let supported = format!("an integer from 0 to {MAX_SIZE}");
        match self.get::<usize>(key, &supported)? {
            Some(n) if n > MAX_SIZE => Err(ModelError::bad(self.file, key, n, supported)),
            n => Ok(n),
        }
    }

    pub fn need<T>(&self, key: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::missing(self.file, key, "the config of every model of this family"))
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.get(key, "a number")
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.get(key, "a string")
    }

    /// One token id or a list of them.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Ids {
            One(u32),
            Many(Vec<u32>),
        }
        Ok(match self.get(key, "a token id or a list of them")? {
            None => Vec::new(),
            Some(Ids::One(id)) => vec![id],
            Some(Ids::Many(ids)) => ids,
        })
    }

    /// true or false.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.get(key, "true or false")
    }

    /// An object under `key`, as fields of its own.
    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        match self.map.get(key).filter(|v| !v.is_null()) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.bad(key, other, "an object")),
        }
    }

    /// A list of numbers, at most `most` of them.
    pub fn numbers(&self, key: &str, most: usize) -> Result<Option<Vec<f64>>, ModelError> {
        let list = self.get::<Vec<f64>>(key, "a list of numbers")?;
        match list {
            Some(list) if list.len() > most => Err(ModelError::bad(
                self.file,
                key,
                format!("{} numbers", list.len()),
                format!("at most {most}"),
            )),
            list => Ok(list),
        }
    }
}
