//! The log of a run: `run.json` says what was asked under which conditions, `requests.jsonl` holds one line for each request, written through
//! to the disk before the next one counts. A line cut by a crash is dropped when the run goes on.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use super::spec::Spec;
use crate::EvalError;
use crate::conditions::Conditions;
use crate::endpoint::Exchange;
use crate::item::{Cell, Score};

/// Version of both files.
pub const FORMAT: u32 = 1;
/// Longest line that is read back.
const LINE_BYTES: usize = 256 << 20;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Answered and judged.
    Scored,
    /// Answered; the item goes on with a further request.
    Open,
    /// The limit cut the answer before it was right: not a miss.
    CutAnswer,
    /// The endpoint counted fewer prompt tokens than were sent: not a miss.
    CutPrompt,
    /// The endpoint's context does not hold it.
    Overflow,
    /// No answer.
    Failed,
}

/// One line of `requests.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Which question.
    pub cell: Cell,
    /// Request of the item, from 0.
    pub turn: u32,
    /// Earlier tries of this request.
    pub attempt: u32,
    /// Session of the run: clocks of two sessions do not compare.
    pub session: u32,
    /// What stood in front of the prompt so that no cache knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<String>,
    /// BLAKE3 of the item's prompt, salt left out.
    pub prompt_blake3: String,
    /// Bytes of the prompt's text.
    pub prompt_bytes: usize,
    /// Tokens of the text sent, by our counter, template left out.
    pub prompt_tokens: usize,
    /// Items of one cluster share their haystack.
    pub cluster: u64,
    /// Depth of the needed facts (mean), where there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<f64>,
    /// When it was to be sent, under an open load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduled_us: Option<u64>,
    /// How long it then waited for a place among the requests in flight.
    #[serde(default)]
    pub queued_us: u64,
    /// What became of it.
    pub outcome: Outcome,
    /// Judgement, with the last request of an item.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<Score>,
    /// Chance of a guess.
    pub chance: f64,
    /// What came.
    pub exchange: Exchange,
}

impl Row {
    /// Whether the item it belongs to needs no further request.
    pub fn ends_item(&self) -> bool {
        !matches!(self.outcome, Outcome::Open | Outcome::Failed)
    }
}

/// `run.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`FORMAT`].
    pub format: u32,
    /// What was asked.
    pub spec: Spec,
    /// Hash of everything that decides the prompts.
    pub pack: String,
    /// Conditions.
    pub conditions: Conditions,
    /// Salts of this run are drawn from it.
    pub salt: u64,
    /// Unix seconds at which each session began.
    pub sessions: Vec<u64>,
    /// What the read-proof found, once it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<super::proof::Proof>,
    /// How to make the run again.
    pub reproduce: String,
}

/// A run's folder.
pub struct Log {
    folder: PathBuf,
    header: Mutex<Header>,
    rows: Mutex<File>,
}

fn io(path: &Path, source: std::io::Error) -> EvalError {
    EvalError::Io { path: path.display().to_string(), source }
}

/// Replaces a file as a whole or not at all.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), EvalError> {
    let beside = path.with_extension("part");
    let write = || {
        let mut file = File::create(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    };
    write().map_err(|e| io(path, e))
}

/// Reads `run.json` of a folder; nothing where there is none.
pub fn read_header(folder: &Path) -> Result<Option<Header>, EvalError> {
    let path = folder.join("run.json");
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(&path, e)),
    };
    let bad = |why: String| EvalError::File { path: path.display().to_string(), line: 0, why };
    let header: Header = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    if header.format != FORMAT {
        return Err(bad(format!("format {}: supported: {FORMAT}", header.format)));
    }
    Ok(Some(header))
}

/// Passes every row of a folder to `each`, one at a time. Returns the length of the part that is whole.
pub fn for_rows(folder: &Path, mut each: impl FnMut(Row)) -> Result<u64, EvalError> {
    let path = folder.join("requests.jsonl");
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(io(&path, e)),
    };
    let (mut reader, mut line, mut whole, mut number) = (BufReader::new(file), Vec::new(), 0u64, 0);
    loop {
        line.clear();
        let mut limited = std::io::Read::take(&mut reader, LINE_BYTES as u64);
        let n = limited.read_until(b'\n', &mut line).map_err(|e| io(&path, e))?;
        number += 1;
        if n == 0 || line.last() != Some(&b'\n') {
            // Cut while it was written: the request counts as not made.
            return Ok(whole);
        }
        let row = serde_json::from_slice(&line).map_err(|e| EvalError::File {
            path: path.display().to_string(),
            line: number,
            why: e.to_string(),
        })?;
        each(row);
        whole += n as u64;
    }
}

/// What of a run is done: the last row of each item that needs no more.
pub type Done = HashMap<Cell, Outcome>;

impl Log {
    /// Opens `folder` for `fresh`, or goes on with what stands there if it was the same run.
    ///
    /// Errors: another run, other conditions or another format stands there; the difference is named.
    pub fn open(folder: &Path, fresh: Header) -> Result<(Log, Done), EvalError> {
        std::fs::create_dir_all(folder).map_err(|e| io(folder, e))?;
        let now = fresh.sessions.clone();
        let header = match read_header(folder)? {
            None => fresh,
            Some(old) => {
                refuse_other(folder, &old, &fresh)?;
                Header { sessions: [old.sessions.clone(), now].concat(), ..old }
            }
        };
        let mut done = Done::new();
        let whole = for_rows(folder, |row| {
            if row.ends_item() {
                done.insert(row.cell, row.outcome);
            }
        })?;
        let path = folder.join("requests.jsonl");
        let open = || {
            let mut file =
                OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
            file.set_len(whole)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        let file = open().map_err(|e| io(&path, e))?;
        let log = Log { folder: folder.to_owned(), header: Mutex::new(header), rows: Mutex::new(file) };
        log.save_header()?;
        Ok((log, done))
    }

    fn save_header(&self) -> Result<(), EvalError> {
        let header = self.header();
        let text = serde_json::to_string_pretty(&header)
            .map_err(|e| EvalError::bad("run.json", e, "numbers that JSON has"))?;
        write_whole(&self.folder.join("run.json"), (text + "\n").as_bytes())
    }

    /// The header as it stands.
    pub fn header(&self) -> Header {
        self.header.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Writes down what the read-proof found.
    pub fn set_proof(&self, proof: super::proof::Proof) -> Result<(), EvalError> {
        self.header.lock().unwrap_or_else(std::sync::PoisonError::into_inner).proof = Some(proof);
        self.save_header()
    }

    /// Appends one row and waits until the disk has it.
    pub fn append(&self, row: &Row) -> Result<(), EvalError> {
        let path = self.folder.join("requests.jsonl");
        let mut line =
            serde_json::to_vec(row).map_err(|e| EvalError::bad("row", e, "numbers that JSON has"))?;
        line.push(b'\n');
        let mut file = self.rows.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.write_all(&line).and_then(|()| file.sync_data()).map_err(|e| io(&path, e))
    }
}

fn refuse_other(folder: &Path, old: &Header, new: &Header) -> Result<(), EvalError> {
    let refuse = |what: String| {
        Err(EvalError::bad(
            "out",
            folder.display(),
            format!("a folder of the same run; it holds another one: {what}"),
        ))
    };
    if old.pack != new.pack {
        return refuse(format!("pack {} instead of {}", old.pack, new.pack));
    }
    if old.spec != new.spec {
        return refuse(old.spec.differing(&new.spec).join(", "));
    }
    let differing = old.conditions.differing(&new.conditions);
    if differing.is_empty() { Ok(()) } else { refuse(format!("conditions: {}", differing.join(", "))) }
}
