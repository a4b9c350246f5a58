//! What templates expect of Python: how values print, `json.dumps`, string methods, `raise_exception`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};

/// Values nested deeper are not printed: a loop can nest them without end, and printing recurses. JSON inputs stay below.
const MAX_DEPTH: usize = 200;

/// Carries a template's own words through the engine's error.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// Methods that the compatibility crate lacks, or does otherwise than Python.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let affix = || args.first().and_then(Value::as_str);
    match (value.as_str(), name, args.len()) {
        (Some(text), "removeprefix", 1) => {
            Ok(Value::from(affix().and_then(|a| text.strip_prefix(a)).unwrap_or(text)))
        }
        (Some(text), "removesuffix", 1) => {
            Ok(Value::from(affix().and_then(|a| text.strip_suffix(a)).unwrap_or(text)))
        }
        (Some(text), "title", 0) => Ok(Value::from(title(text))),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Python's `str.title`: every letter after something that is no letter is a capital.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = c.is_alphabetic();
    }
    out
}

/// Prints `{{ value }}`.
pub(super) fn print(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text)?,
        None if value.is_undefined() => {}
        None => out.write_str(&string(value))?,
    }
    Ok(())
}

/// Python's `str(value)`.
pub(super) fn string(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            repr(value, 0, &mut out);
            out
        }
    }
}

/// Python's `repr(value)` for what JSON can hold; other values print as the engine prints them.
fn repr(value: &Value, depth: usize, out: &mut String) {
    match value.kind() {
        _ if depth > MAX_DEPTH => out.push_str("..."),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(value, out, ["inf", "-inf", "nan"]),
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            out.push('[');
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(&item, depth + 1, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(&key, depth + 1, out);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), depth + 1, out);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// A string literal as Python writes it: single quotes unless the text has some and no double ones.
fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() && (c as u32) < 0x100 => _ = write!(out, "\\x{:02x}", c as u32),
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// A number as Python prints it; `names` are its words for the infinities and for not-a-number.
fn number(value: &Value, out: &mut String, names: [&str; 3]) {
    if value.is_integer() {
        out.push_str(&value.to_string());
        return;
    }
    let Ok(float) = f64::try_from(value.clone()) else {
        out.push_str(&value.to_string());
        return;
    };
    if !float.is_finite() {
        out.push_str(names[if float.is_nan() { 2 } else { usize::from(float < 0.0) }]);
        return;
    }
    // Both languages print the shortest digits that read back; Python writes the exponent with a sign and two digits.
    let text = format!("{float:?}");
    match text.split_once('e') {
        None => out.push_str(&text),
        Some((digits, exponent)) => {
            let (sign, size) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
            _ = write!(out, "{}e{sign}{size:0>2}", digits.trim_end_matches(".0"));
        }
    }
}

/// How `json.dumps` lays text out.
struct Layout {
    ensure_ascii: bool,
    /// One level's indentation; None: everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `json.dumps(value, ensure_ascii=False, …)`: the filter that `transformers` puts in place of the engine's own.
pub(super) fn tojson(value: &Value, args: Kwargs) -> Result<Value, Error> {
    let indent = match args.get::<Option<Value>>("indent")?.filter(|v| !v.is_none()) {
        None => None,
        Some(v) => Some(match v.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(v)?.min(64)),
        }),
    };
    let separators = args.get::<Option<Vec<String>>>("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are two strings")),
    };
    let layout = Layout {
        ensure_ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    args.assert_all_used()?;
    let mut out = String::new();
    layout.write(value, 0, &mut out)?;
    Ok(Value::from_safe_string(out))
}

impl Layout {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            let message = format!("tojson: nested deeper than {MAX_DEPTH} levels");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(value, out, ["Infinity", "-Infinity", "NaN"]),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_list('[', ']', &items, depth, out, |item, out| self.write(item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_list('{', '}', &keys, depth, out, |key, out| {
                    self.write_key(key, out)?;
                    out.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            kind => {
                let message = format!("tojson: a value of kind {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn write_list(
        &self,
        open: char,
        close: char,
        items: &[Value],
        depth: usize,
        out: &mut String,
        mut item: impl FnMut(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (i, value) in items.iter().enumerate() {
            out.push_str(if i == 0 { "" } else { &self.item_separator });
            self.new_line(depth + 1, out);
            item(value, out)?;
        }
        if !items.is_empty() {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        if key.as_str().is_some() {
            return self.write(key, 0, out);
        }
        let mut text = String::new();
        self.write(key, 0, &mut text)?;
        self.write_text(&text, out);
        Ok(())
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}
