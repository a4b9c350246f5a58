//! Reads the fields of one JSON object strictly: each field once, exact integers, ranges, leftovers refused by name.
//!
//! Values are kept as raw text until their field is known, so that a fault deep inside names its field. `null` counts
//! as absent everywhere, as OpenAI's own server does. No field is interpreted here.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde::Deserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::{ApiError, shorten};

/// The fields of one object that have not been taken yet.
pub(crate) struct Fields<'a> {
    path: String,
    left: BTreeMap<String, &'a RawValue>,
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = BTreeMap<String, &'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((key, value)) = access.next_entry::<String, &'de RawValue>()? {
            if let Some(_earlier) = map.get(&key) {
                return Err(A::Error::custom(format!("the field '{}' is given twice", shorten(&key))));
            }
            map.insert(key, value);
        }
        Ok(map)
    }
}

fn object(text: &str) -> Result<BTreeMap<String, &RawValue>, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let map = reader.deserialize_map(ObjectVisitor)?;
    reader.end()?;
    Ok(map)
}

impl<'a> Fields<'a> {
    /// The fields of a request body.
    pub fn of_body(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|e| ApiError::bad_json(format!("not UTF-8: {e}")))?;
        let left = object(text).map_err(ApiError::bad_json)?;
        Ok(Fields { path: String::new(), left })
    }

    /// The fields of a nested object, named `path` in errors.
    pub fn of_value(path: &str, raw: &'a RawValue) -> Result<Self, ApiError> {
        let left = object(raw.get()).map_err(|e| wrong_type(path, raw, &format!("an object ({e})")))?;
        Ok(Fields { path: format!("{path}."), left })
    }

    /// The name of `field` as errors show it.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// The names of the fields not taken yet.
    pub fn keys(&self) -> Vec<String> {
        self.left.keys().cloned().collect()
    }

    /// Removes a field; absent and `null` are the same.
    pub fn raw(&mut self, field: &str) -> Option<&'a RawValue> {
        self.left.remove(field).filter(|raw| raw.get() != "null")
    }

    /// Any JSON value.
    pub fn value(&mut self, field: &str) -> Result<Option<Value>, ApiError> {
        let Some(raw) = self.raw(field) else { return Ok(None) };
        parse(&self.name(field), raw, "a JSON value").map(Some)
    }

    /// `true` or `false`.
    pub fn bool(&mut self, field: &str) -> Result<Option<bool>, ApiError> {
        let Some(raw) = self.raw(field) else { return Ok(None) };
        parse(&self.name(field), raw, "a boolean").map(Some)
    }

    /// A string.
    pub fn string(&mut self, field: &str) -> Result<Option<String>, ApiError> {
        let Some(raw) = self.raw(field) else { return Ok(None) };
        parse(&self.name(field), raw, "a string").map(Some)
    }

    /// An integer in `range`, read exactly: no fraction, no exponent, no string, no wrap.
    pub fn int(&mut self, field: &str, range: RangeInclusive<i128>) -> Result<Option<i128>, ApiError> {
        let Some(raw) = self.raw(field) else { return Ok(None) };
        exact_int(&self.name(field), raw, range).map(Some)
    }

    /// An integer in `range` that fits `usize`.
    pub fn size(&mut self, field: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ApiError> {
        let value = self.int(field, *range.start() as i128..=*range.end() as i128)?;
        Ok(value.map(|v| v as usize))
    }

    /// A finite number.
    pub fn float(&mut self, field: &str) -> Result<Option<f64>, ApiError> {
        let Some(raw) = self.raw(field) else { return Ok(None) };
        let name = self.name(field);
        match number(raw) {
            Some(value) if value.is_finite() => Ok(Some(value)),
            Some(_) => Err(ApiError::bad_field(name, format!("{} is out of range.", shorten(raw.get())))),
            None => Err(wrong_type(&name, raw, "a number")),
        }
    }

    /// The elements of a list of at most `limit` raw values.
    pub fn list(&mut self, field: &str, limit: usize) -> Result<Option<Vec<&'a RawValue>>, ApiError> {
        let Some(raw) = self.raw(field) else { return Ok(None) };
        elements(&self.name(field), raw, limit).map(Some)
    }

    /// A list of integers in `range`.
    pub fn ints(
        &mut self,
        field: &str,
        limit: usize,
        range: RangeInclusive<i128>,
    ) -> Result<Option<Vec<i128>>, ApiError> {
        let name = self.name(field);
        let Some(list) = self.list(field, limit)? else { return Ok(None) };
        list.into_iter().map(|raw| exact_int(&name, raw, range.clone())).collect::<Result<_, _>>().map(Some)
    }

    /// Refuses a known field that is present (not null), with the reason.
    pub fn refuse(&mut self, field: &str, reason: &str) -> Result<(), ApiError> {
        match self.raw(field) {
            None => Ok(()),
            Some(_) => Err(ApiError::unsupported(self.name(field), reason)),
        }
    }

    /// Takes a known field only with the one value that changes nothing here.
    pub fn only(&mut self, field: &str, value: &Value, reason: &str) -> Result<(), ApiError> {
        match self.value(field)? {
            None => Ok(()),
            Some(v) if v == *value => Ok(()),
            Some(_) => Err(ApiError::unsupported(self.name(field), reason)),
        }
    }

    /// Takes a known field whose value has no effect on the reply, whatever it is (still valid JSON of some type).
    pub fn note(&mut self, fields: &[&str]) -> Result<(), ApiError> {
        for field in fields {
            self.value(field)?;
        }
        Ok(())
    }

    /// Ends the reading: a field nobody took is unknown (also when it is null).
    pub fn finish(self) -> Result<(), ApiError> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(field) => Err(ApiError::unknown_field(format!("{}{}", self.path, shorten(field)))),
        }
    }
}

/// The elements of a raw list.
pub(crate) fn elements<'a>(
    name: &str,
    raw: &'a RawValue,
    limit: usize,
) -> Result<Vec<&'a RawValue>, ApiError> {
    let list: Vec<&RawValue> =
        serde_json::from_str(raw.get()).map_err(|_| wrong_type(name, raw, "a list"))?;
    if list.len() > limit {
        return Err(ApiError::bad_field(
            name,
            format!("{} elements are too many: at most {limit} are supported.", list.len()),
        ));
    }
    Ok(list)
}

/// A raw value as a Rust type; `wanted` names the type in the refusal.
pub(crate) fn parse<'a, T: serde::Deserialize<'a>>(
    name: &str,
    raw: &'a RawValue,
    wanted: &str,
) -> Result<T, ApiError> {
    serde_json::from_str(raw.get()).map_err(|_| wrong_type(name, raw, wanted))
}

/// A raw value as an integer, read from its digits.
pub(crate) fn exact_int(name: &str, raw: &RawValue, range: RangeInclusive<i128>) -> Result<i128, ApiError> {
    let text = raw.get();
    if number(raw).is_none() {
        return Err(wrong_type(name, raw, "an integer"));
    }
    if text.contains(['.', 'e', 'E']) {
        return Err(ApiError::bad_field(name, format!("{} is not an integer.", shorten(text))));
    }
    match text.parse::<i128>() {
        Ok(v) if range.contains(&v) => Ok(v),
        // A number of 40 digits does not fit i128 and is out of every range here.
        _ => Err(ApiError::bad_field(
            name,
            format!("{} is out of range: supported: {} to {}.", shorten(text), range.start(), range.end()),
        )),
    }
}

/// The value of a JSON number (infinite when past f64), or None for any other JSON type.
fn number(raw: &RawValue) -> Option<f64> {
    let text = raw.get();
    let first = text.as_bytes().first()?;
    if !(first.is_ascii_digit() || *first == b'-') {
        return None;
    }
    text.parse().ok()
}

/// 400: a value of the wrong JSON type.
pub(crate) fn wrong_type(name: &str, raw: &RawValue, wanted: &str) -> ApiError {
    let got = match raw.get().as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "a list",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    };
    ApiError::bad_field(name, format!("expected {wanted}, got {got}: {}.", shorten(raw.get())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int(body: &str) -> Result<Option<i128>, ApiError> {
        Fields::of_body(body.as_bytes())?.int("x", 0..=i64::MAX as i128)
    }

    #[test]
    fn integers_are_exact_and_never_wrap() {
        assert_eq!(int(r#"{"x": 7}"#).unwrap(), Some(7));
        assert_eq!(int(r#"{"x": null}"#).unwrap(), None);
        for bad in ["1.5", "\"3\"", "9223372036854775808", "1e400", "-1", "1.0", "1e2", "true", "[1]", "{}"] {
            let e = int(&format!(r#"{{"x": {bad}}}"#)).unwrap_err();
            assert_eq!(e.param.as_deref(), Some("x"), "{bad}");
        }
        let e = int(&format!(r#"{{"x": {}}}"#, "9".repeat(5000))).unwrap_err();
        assert!(e.message.len() < 400);
    }

    #[test]
    fn numbers_past_f64_are_refused_with_their_field() {
        let mut f = Fields::of_body(br#"{"t": 1e400}"#).unwrap();
        let e = f.float("t").unwrap_err();
        assert_eq!(e.param.as_deref(), Some("t"));
    }

    #[test]
    fn a_field_given_twice_is_refused_not_resolved() {
        let e = Fields::of_body(br#"{"a": 1, "a": 2}"#).err().unwrap();
        assert!(e.message.contains("'a'"), "{e}");
    }

    #[test]
    fn leftovers_are_named() {
        let mut f = Fields::of_body(br#"{"a": 1, "tempratur": 2}"#).unwrap();
        f.value("a").unwrap();
        assert_eq!(f.finish().unwrap_err().param.as_deref(), Some("tempratur"));
    }

    #[test]
    fn deep_nesting_is_an_error_not_a_stack_overflow() {
        let deep = format!(r#"{{"a": {}1{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        let fields = Fields::of_body(deep.as_bytes());
        assert!(fields.and_then(|mut f| f.value("a")).is_err());
    }
}
