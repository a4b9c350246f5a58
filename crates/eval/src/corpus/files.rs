//! Haystack from the user's own files: a text file, or every text file of a folder in the order of their paths. It cuts into sentences and
//! changes nothing else; it downloads nothing.

use std::fs;
use std::path::{Path, PathBuf};

use crate::EvalError;
use crate::task::Haystack;

/// Most bytes that are read: prompts of ten million tokens need no more.
pub const MAX_BYTES: u64 = 256 << 20;

/// Longest sentence in bytes; what is longer is cut at a space, so that depths stay fine-grained.
const MAX_SENTENCE_BYTES: usize = 600;

/// Extensions that count as text in a folder.
const EXTENSIONS: [&str; 5] = ["txt", "md", "rst", "text", "html"];

/// Text of files, as sentences.
pub struct Files {
    text: String,
    /// Start and end of each sentence.
    spans: Vec<(u32, u32)>,
    identity: String,
}

impl Files {
    /// Reads `path`. Refused: unreadable, not UTF-8, over [`MAX_BYTES`], fewer than two sentences.
    pub fn open(path: &Path) -> Result<Files, EvalError> {
        let mut paths = Vec::new();
        collect(path, &mut paths, 0)?;
        paths.sort();
        let mut total = 0u64;
        for p in &paths {
            total += fs::metadata(p).map_err(|e| io(p, e))?.len();
            if total > MAX_BYTES {
                return Err(EvalError::bad(
                    "haystack",
                    path.display(),
                    format!("up to {MAX_BYTES} bytes of text"),
                ));
            }
        }
        let mut text = String::with_capacity(total as usize + paths.len());
        for p in &paths {
            let bytes = fs::read(p).map_err(|e| io(p, e))?;
            let read = String::from_utf8(bytes).map_err(|e| EvalError::File {
                path: p.display().to_string(),
                line: 0,
                why: format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to()),
            })?;
            text.push_str(&read);
            text.push('\n');
        }
        let name = path.file_name().map_or_else(|| "text".into(), |n| n.to_string_lossy().into_owned());
        Files::of_text(&name, text).ok_or_else(|| EvalError::File {
            path: path.display().to_string(),
            line: 0,
            why: "fewer than two sentences of text".into(),
        })
    }

    /// Cuts `text`; nothing if it holds fewer than two sentences. Line breaks inside a sentence become spaces.
    pub fn of_text(name: &str, text: String) -> Option<Files> {
        let flat: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let spans = sentences(&flat);
        if spans.len() < 2 {
            return None;
        }
        let hash = blake3::hash(flat.as_bytes()).to_hex();
        Some(Files { text: flat, spans, identity: format!("files:{name}-{}", &hash[..16]) })
    }
}

fn io(path: &Path, source: std::io::Error) -> EvalError {
    EvalError::Io { path: path.display().to_string(), source }
}

/// Text files under `path`, links not followed into folders, at most 16 folders deep.
fn collect(path: &Path, into: &mut Vec<PathBuf>, depth: usize) -> Result<(), EvalError> {
    let meta = fs::metadata(path).map_err(|e| io(path, e))?;
    if meta.is_file() {
        into.push(path.to_path_buf());
        return Ok(());
    }
    if depth > 16 {
        return Err(EvalError::bad("haystack", path.display(), "folders up to 16 deep"));
    }
    for entry in fs::read_dir(path).map_err(|e| io(path, e))? {
        let entry = entry.map_err(|e| io(path, e))?;
        let p = entry.path();
        let kind = entry.file_type().map_err(|e| io(&p, e))?;
        let known = p.extension().and_then(|e| e.to_str()).is_some_and(|e| EXTENSIONS.contains(&e));
        if kind.is_dir() {
            collect(&p, into, depth + 1)?;
        } else if kind.is_file() && known {
            into.push(p);
        }
    }
    Ok(())
}

/// Spans of sentences: up to a full stop, question or exclamation mark before white space, or a cut at a space where none comes.
fn sentences(text: &str) -> Vec<(u32, u32)> {
    let bytes = text.as_bytes();
    let mut spans = Vec::new();
    let (mut start, mut last_space) = (0, None);
    for i in 0..bytes.len() {
        let ends =
            matches!(bytes[i], b'.' | b'?' | b'!') && bytes.get(i + 1).is_none_or(u8::is_ascii_whitespace);
        if bytes[i] == b' ' {
            last_space = Some(i);
        }
        let cut = if ends {
            Some(i + 1)
        } else if i - start >= MAX_SENTENCE_BYTES {
            last_space.filter(|&s| s > start)
        } else if i + 1 == bytes.len() {
            Some(bytes.len())
        } else {
            None
        };
        if let Some(end) = cut {
            let piece = &text[start..end];
            let trimmed = piece.trim();
            if !trimmed.is_empty() {
                let at = start + (piece.len() - piece.trim_start().len());
                spans.push((at as u32, (at + trimmed.len()) as u32));
            }
            start = end;
        }
    }
    spans
}

impl Haystack for Files {
    fn sentence(&self, i: u64) -> &str {
        let (start, end) = self.spans[(i % self.spans.len() as u64) as usize];
        &self.text[start as usize..end as usize]
    }

    fn period(&self) -> u64 {
        self.spans.len() as u64
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_becomes_sentences() {
        let f = Files::of_text("t", "One is 3.5 long.\nTwo? Yes! and a rest".into()).unwrap();
        let all: Vec<&str> = (0..f.period()).map(|i| f.sentence(i)).collect();
        assert_eq!(all, ["One is 3.5 long.", "Two?", "Yes!", "and a rest"]);
        assert_eq!(f.sentence(4), "One is 3.5 long.");
        assert!(Files::of_text("t", "alone".into()).is_none());
        assert!(Files::of_text("t", " \n ".into()).is_none());
    }

    #[test]
    fn a_text_without_full_stops_is_cut_at_spaces() {
        let f = Files::of_text("t", "wört ".repeat(1000)).unwrap();
        for i in 0..f.period() {
            assert!(f.sentence(i).len() <= MAX_SENTENCE_BYTES + 8, "{}", f.sentence(i).len());
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused_by_name() {
        let dir = std::env::temp_dir().join(format!("suanpan-eval-files-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("bad.txt"), [0xff, 0xfe]).unwrap();
        assert!(matches!(Files::open(&dir), Err(EvalError::File { .. })));
        fs::write(dir.join("bad.txt"), "A b. C d.").unwrap();
        fs::write(dir.join("skipped.bin"), [0xff]).unwrap();
        assert_eq!(Files::open(&dir).unwrap().period(), 2);
        assert!(matches!(Files::open(&dir.join("none")), Err(EvalError::Io { .. })));
        fs::remove_dir_all(&dir).unwrap();
    }
}
