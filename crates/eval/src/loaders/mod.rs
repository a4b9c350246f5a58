//! Questions from files that the user has: public sets are read here and never shipped. What a file says is checked line by line, and what
//! does not fit a length is an error, never cut.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde_json::Value;

use crate::EvalError;

pub mod ruler;

/// Longest line that is read: prompts of some ten million tokens.
const MAX_LINE_BYTES: u64 = 64 << 20;
/// Most rows of a file.
const MAX_ROWS: usize = 1 << 20;

/// The rows of a JSON-lines file; empty lines are skipped. `each` makes a row out of a line's number and value, or says why it cannot.
pub fn rows<T>(path: &Path, mut each: impl FnMut(&Value) -> Result<T, String>) -> Result<Vec<T>, EvalError> {
    let shown = path.display().to_string();
    let io = |source| EvalError::Io { path: shown.clone(), source };
    let bad = |line: usize, why: String| EvalError::File { path: shown.clone(), line, why };
    let mut reader = BufReader::new(File::open(path).map_err(io)?);
    let (mut rows, mut number) = (Vec::new(), 0);
    loop {
        number += 1;
        let mut line = Vec::new();
        let read =
            std::io::Read::take(&mut reader, MAX_LINE_BYTES).read_until(b'\n', &mut line).map_err(io)?;
        if read == 0 {
            break;
        }
        if read as u64 == MAX_LINE_BYTES {
            return Err(bad(number, format!("a line of more than {MAX_LINE_BYTES} bytes")));
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let value: Value =
            serde_json::from_slice(&line).map_err(|e| bad(number, format!("not JSON: {e}")))?;
        rows.push(each(&value).map_err(|why| bad(number, why))?);
        if rows.len() > MAX_ROWS {
            return Err(bad(number, format!("more than {MAX_ROWS} rows")));
        }
    }
    if rows.is_empty() {
        return Err(bad(0, "no rows".into()));
    }
    Ok(rows)
}

/// A text field, by its name.
pub fn text<'a>(row: &'a Value, field: &str) -> Result<&'a str, String> {
    row.get(field).and_then(Value::as_str).ok_or_else(|| format!("no text field \"{field}\""))
}

/// A field that holds one text or a list of them.
pub fn texts(row: &Value, field: &str) -> Result<Vec<String>, String> {
    let bad = || format!("field \"{field}\" is neither a text nor a list of texts");
    match row.get(field) {
        Some(Value::String(one)) => Ok(vec![one.clone()]),
        Some(Value::Array(all)) if !all.is_empty() => {
            all.iter().map(|v| v.as_str().map(str::to_string).ok_or_else(bad)).collect()
        }
        _ => Err(bad()),
    }
}
