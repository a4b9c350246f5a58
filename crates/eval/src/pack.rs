//! Packs: a list of questions named by generator version, seed and corpus, one row a prompt with its hash. Prompts are not stored: any of them
//! is built again from its row, byte for byte, and refused where the bytes differ.

use std::io::{BufRead, Write};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::EvalError;
use crate::item::{Cell, Item, Part, View};
use crate::task::Kit;
use crate::tasks;
use crate::tasks::build::GENERATOR;

/// What all rows of a pack share: its first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Version of the generators.
    pub generator: u32,
    /// Seed.
    pub seed: u64,
    /// Haystack, with its hash.
    pub corpus: String,
    /// What counted the tokens.
    pub counter: String,
}

impl Header {
    /// The header of packs that `kit` makes.
    pub fn of(kit: &Kit<'_>) -> Header {
        Header {
            generator: GENERATOR,
            seed: kit.seed,
            corpus: kit.haystack.identity(),
            counter: kit.counter.name(),
        }
    }
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The recipe: with the header it rebuilds the prompt.
    pub cell: Cell,
    /// BLAKE3 of the prompt ([`prompt_hash`]), hexadecimal.
    pub prompt: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Room for the answer.
    pub answer_tokens: usize,
}

/// A pack as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Rows.
    pub rows: usize,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// BLAKE3 of header and rows, hexadecimal: equal packs have equal names.
    pub hash: String,
}

/// Which questions a pack holds: every combination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Names of tasks, with knobs.
    pub tasks: Vec<String>,
    /// Lengths in tokens.
    pub lengths: Vec<usize>,
    /// Samples of each task at each length.
    pub samples: u32,
    /// Views of each sample.
    pub views: Vec<View>,
}

/// The thirteen of the RULER kind.
pub const THIRTEEN: [&str; 13] = [
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
];

impl Plan {
    /// The cells: by task, then length, then sample, then view.
    pub fn cells(&self) -> impl Iterator<Item = Cell> + '_ {
        self.tasks.iter().flat_map(move |task| {
            self.lengths.iter().flat_map(move |&length_tokens| {
                (0..self.samples).flat_map(move |index| {
                    self.views.iter().map(move |&view| Cell {
                        task: task.clone(),
                        length_tokens,
                        index,
                        view,
                    })
                })
            })
        })
    }
}

/// Hash of everything that is sent: roles, texts, pictures, calls, tools and lead-in, each with its length before it.
pub fn prompt_hash(item: &Item) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("suanpan eval prompt v1");
    let mut put = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    for turn in &item.prompt.turns {
        put(format!("{:?} {:?}", turn.role, turn.tool_call_id).as_bytes());
        for part in &turn.parts {
            match part {
                Part::Text { text } => put(text.as_bytes()),
                Part::Image { mime, bytes, at_seconds } => {
                    put(format!("{mime} {at_seconds:?}").as_bytes());
                    put(bytes);
                }
            }
        }
        for call in &turn.tool_calls {
            put(format!("{} {} {}", call.id, call.name, call.arguments).as_bytes());
        }
    }
    put(item.prompt.lead_in.as_deref().unwrap_or("").as_bytes());
    for tool in &item.prompt.tools {
        put(tool.to_string().as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Builds the question of a cell.
pub fn item(kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
    tasks::by_name(&cell.task)?.item(kit, cell)
}

fn row(kit: &Kit<'_>, cell: Cell) -> Result<Row, EvalError> {
    let item = item(kit, &cell)?;
    Ok(Row {
        prompt: prompt_hash(&item),
        prompt_tokens: item.prompt_tokens,
        answer_tokens: item.answer_tokens,
        cell,
    })
}

/// Cells that are built before their rows are written: a prompt lives only while its row is made, and rows are small.
const BATCH: usize = 256;

/// Builds every cell on all threads of the current rayon pool and writes header and rows as JSON lines. Memory: one prompt a thread.
pub fn write(
    kit: &Kit<'_>,
    cells: impl Iterator<Item = Cell>,
    out: &mut dyn Write,
    mut progress: impl FnMut(usize),
) -> Result<Summary, EvalError> {
    let failed = |source| EvalError::Io { path: "pack".into(), source };
    let mut hasher = blake3::Hasher::new();
    let mut line = |value: String| {
        hasher.update(value.as_bytes());
        hasher.update(b"\n");
        writeln!(out, "{value}").map_err(failed)
    };
    line(json(&Header::of(kit)))?;
    let (mut rows, mut prompt_tokens) = (0, 0);
    let mut cells = cells.peekable();
    while cells.peek().is_some() {
        let batch: Vec<Cell> = cells.by_ref().take(BATCH).collect();
        let made: Vec<Result<Row, EvalError>> =
            batch.into_par_iter().with_max_len(1).map(|cell| row(kit, cell)).collect();
        for made in made {
            let made = made?;
            prompt_tokens += made.prompt_tokens as u64;
            line(json(&made))?;
            rows += 1;
        }
        progress(rows);
    }
    Ok(Summary { rows, prompt_tokens, hash: hasher.finalize().to_hex().to_string() })
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|e| unreachable!("rows and headers are plain data: {e}"))
}

/// Most rows that a pack may have.
pub const MAX_ROWS: usize = 1 << 22;

/// Reads a pack's header and rows; `path` is what errors name.
pub fn read(path: &str, from: impl BufRead) -> Result<(Header, Vec<Row>), EvalError> {
    let bad = |line: usize, why: String| EvalError::File { path: path.into(), line, why };
    let (mut header, mut rows) = (None, Vec::new());
    for (i, line) in from.lines().enumerate() {
        let line = line.map_err(|source| EvalError::Io { path: path.into(), source })?;
        if header.is_none() {
            header = Some(
                serde_json::from_str(&line).map_err(|e| bad(i + 1, format!("not a pack's header: {e}")))?,
            );
        } else {
            rows.push(serde_json::from_str(&line).map_err(|e| bad(i + 1, format!("not a row: {e}")))?);
        }
        if rows.len() > MAX_ROWS {
            return Err(bad(i + 1, format!("more than {MAX_ROWS} rows")));
        }
    }
    let header = header.ok_or_else(|| bad(0, "empty".into()))?;
    Ok((header, rows))
}

/// The question of a row, the same bytes as when the pack was made; refused where they are not.
pub fn rebuild(kit: &Kit<'_>, header: &Header, row: &Row) -> Result<Item, EvalError> {
    let ours = Header::of(kit);
    for (field, asked, supported) in [
        ("generator", header.generator.to_string(), ours.generator.to_string()),
        ("seed", header.seed.to_string(), ours.seed.to_string()),
        ("corpus", header.corpus.clone(), ours.corpus),
        ("counter", header.counter.clone(), ours.counter),
    ] {
        if asked != supported {
            return Err(EvalError::bad(format!("pack.{field}"), asked, supported));
        }
    }
    let item = item(kit, &row.cell)?;
    let hash = prompt_hash(&item);
    if hash != row.prompt {
        return Err(EvalError::bad("pack.prompt", &row.prompt, hash));
    }
    Ok(item)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::Prose;
    use crate::count::Bytes;

    fn kit() -> Kit<'static> {
        Kit { seed: 2026, counter: &Bytes, haystack: Prose::shipped() }
    }

    fn plan(samples: u32) -> Plan {
        Plan {
            tasks: THIRTEEN.map(String::from).to_vec(),
            lengths: vec![6_000, 32_768],
            samples,
            views: vec![View::Full],
        }
    }

    #[test]
    fn the_same_pack_on_two_machines_has_the_same_hash() {
        let mut file = Vec::new();
        let summary = write(&kit(), plan(3).cells(), &mut file, |_| ()).unwrap();
        assert_eq!(summary.rows, 78);
        assert_eq!(summary.hash, HASH, "a generator changed: raise GENERATOR and write the new hash here");
    }

    const HASH: &str = "2647700a0ef9f8e98dbe2d28de75c20c21b9be89e4b34d7434d699af43a12264";

    #[test]
    fn a_row_rebuilds_its_prompt_and_a_changed_row_is_refused() {
        let mut file = Vec::new();
        write(&kit(), plan(1).cells(), &mut file, |_| ()).unwrap();
        let (header, rows) = read("pack", file.as_slice()).unwrap();
        for row in &rows {
            let item = rebuild(&kit(), &header, row).unwrap();
            assert_eq!((prompt_hash(&item), item.prompt_tokens), (row.prompt.clone(), row.prompt_tokens));
        }
        let mut changed = rows[0].clone();
        changed.cell.index += 1;
        assert!(matches!(rebuild(&kit(), &header, &changed), Err(EvalError::Bad { .. })));
        let other = Kit { seed: 1, ..kit() };
        assert!(rebuild(&other, &header, &rows[0]).unwrap_err().to_string().contains("pack.seed"));
    }

    #[test]
    fn damaged_packs_name_the_line() {
        let mut file = Vec::new();
        write(&kit(), plan(1).cells().take(2), &mut file, |_| ()).unwrap();
        let text = String::from_utf8(file).unwrap();
        let cut = &text[..text.len() - 10];
        let Err(EvalError::File { line: 3, .. }) = read("p", cut.as_bytes()) else {
            panic!("a cut row was read")
        };
        assert!(matches!(read("p", &b""[..]), Err(EvalError::File { line: 0, .. })));
    }
}
