//! Events out of a byte stream (`text/event-stream`): data lines joined, comments dropped, lines bounded.

use super::{Fault, FaultKind};

/// Longest line: an answer in one event, logprobs included, is far below.
const LINE_BYTES: usize = 8 << 20;

/// Splits bytes into events.
#[derive(Default)]
pub struct Events {
    raw: Vec<u8>,
    /// Bytes of `raw` that were searched for a line break.
    searched: usize,
    data: String,
    event: String,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `event:`, or nothing.
    pub name: String,
    /// `data:` lines, joined by line breaks.
    pub data: String,
}

impl Events {
    /// Adds what was read; `raw` is emptied.
    pub fn push(&mut self, bytes: &mut Vec<u8>) {
        self.raw.append(bytes);
    }

    /// The next complete event.
    pub fn pop(&mut self) -> Result<Option<Event>, Fault> {
        let mut start = 0;
        let found = loop {
            let from = self.searched.max(start);
            let Some(end) = self.raw[from..].iter().position(|&b| b == b'\n').map(|i| from + i) else {
                self.searched = self.raw.len();
                break None;
            };
            let line = self.raw[start..end].strip_suffix(b"\r").unwrap_or(&self.raw[start..end]).to_vec();
            start = end + 1;
            self.searched = start;
            if let Some(event) = self.line(&line)? {
                break Some(event);
            }
        };
        self.raw.drain(..start);
        self.searched = self.searched.saturating_sub(start);
        if self.raw.len() > LINE_BYTES || self.data.len() > LINE_BYTES {
            return Err(Fault::new(FaultKind::TooLong, format!("an event of more than {LINE_BYTES} bytes")));
        }
        Ok(found)
    }

    /// What is left when the stream ends without an empty line.
    pub fn rest(&mut self) -> Option<Event> {
        let line = std::mem::take(&mut self.raw);
        self.searched = 0;
        let last = self.line(&line).ok().flatten();
        last.or_else(|| self.flush())
    }

    fn flush(&mut self) -> Option<Event> {
        let (name, data) = (std::mem::take(&mut self.event), std::mem::take(&mut self.data));
        (!data.is_empty()).then_some(Event { name, data })
    }

    fn line(&mut self, line: &[u8]) -> Result<Option<Event>, Fault> {
        let text = std::str::from_utf8(line)
            .map_err(|_| Fault::new(FaultKind::Malformed, "an event that is not UTF-8"))?;
        if text.is_empty() {
            return Ok(self.flush());
        }
        let (field, value) = text.split_once(':').unwrap_or((text, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if !self.data.is_empty() {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            "event" => self.event = value.to_owned(),
            _ => {}
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_do_not_depend_on_how_bytes_were_cut() {
        let text = ": hi\r\n\ndata: a\r\ndata: b\n\nevent: error\ndata: {\"x\":1}\n\ndata: [DONE]";
        for size in [1, 2, 3, 7, 1000] {
            let (mut events, mut got) = (Events::default(), Vec::new());
            for piece in text.as_bytes().chunks(size) {
                events.push(&mut piece.to_vec());
                while let Some(e) = events.pop().unwrap() {
                    got.push(e.data);
                }
            }
            got.extend(events.rest().map(|e| e.data));
            assert_eq!(got, ["a\nb", "{\"x\":1}", "[DONE]"], "{size}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused_and_not_stored() {
        let mut events = Events::default();
        let mut refused = false;
        for _ in 0..200 {
            events.push(&mut vec![b'x'; 64 << 10]);
            if events.pop().is_err() {
                refused = true;
                break;
            }
        }
        assert!(refused && events.raw.len() <= LINE_BYTES + (64 << 10));
    }
}
