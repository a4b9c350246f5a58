//! Streaming text: pieces that join to exactly what [`Tokenizer::decode`] gives for all ids at once.
//!
//! A character is handed out when it is complete, and what was handed out never changes.

use std::sync::Arc;

use super::Tokenizer;
use super::pieces::Pieces;

/// The state of one stream of ids.
#[derive(Clone)]
pub struct Detokenizer {
    pieces: Arc<Pieces>,
    skip_special: bool,
    /// The start of a character that later ids may complete: at most three bytes between calls.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// A new stream. `skip_special`: control tokens have no text.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Detokenizer {
        Detokenizer { pieces: Arc::clone(&tokenizer.pieces), skip_special, pending: Vec::new() }
    }

    /// Takes the next id and returns the text that is now certain; often empty inside a multi-byte character.
    pub fn push(&mut self, id: u32) -> String {
        self.pending.extend_from_slice(self.pieces.text(id, self.skip_special));
        let (text, used) = complete(&self.pending);
        self.pending.drain(..used);
        text
    }

    /// Ends the stream: an unfinished character becomes U+FFFD. The stream may be used again.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    /// Whether bytes of an unfinished character are held back.
    pub fn holds_back(&self) -> bool {
        !self.pending.is_empty()
    }
}

impl std::fmt::Debug for Detokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Detokenizer")
            .field("skip_special", &self.skip_special)
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

/// The longest certain text of `bytes` and how many bytes it takes. Bytes that can no longer become a character are U+FFFD.
fn complete(bytes: &[u8]) -> (String, usize) {
    let mut text = String::with_capacity(bytes.len());
    let mut used = 0;
    loop {
        match std::str::from_utf8(&bytes[used..]) {
            Ok(rest) => {
                text.push_str(rest);
                return (text, bytes.len());
            }
            Err(e) => {
                let valid = used + e.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&bytes[used..valid]));
                match e.error_len() {
                    Some(bad) => {
                        text.push('\u{FFFD}');
                        used = valid + bad;
                    }
                    None => return (text, valid),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_tokenizer() -> Tokenizer {
        Tokenizer::bytes(&["<end>"], None, Some("<end>")).unwrap()
    }

    #[test]
    fn an_emoji_arrives_whole_with_its_last_byte() {
        let t = bytes_tokenizer();
        let mut stream = Detokenizer::new(&t, true);
        let pieces: Vec<String> = "a🎉".bytes().map(|b| stream.push(b as u32)).collect();
        assert_eq!(pieces, ["a", "", "", "", "🎉"]);
        assert_eq!(stream.flush(), "");
    }

    #[test]
    fn a_character_cut_by_the_end_becomes_one_replacement() {
        let t = bytes_tokenizer();
        let mut stream = Detokenizer::new(&t, true);
        assert_eq!(stream.push(0xF0), "");
        assert_eq!(stream.push(0x9F), "");
        assert!(stream.holds_back());
        assert_eq!(stream.flush(), "\u{FFFD}");
        assert_eq!(stream.push(b'x' as u32), "x");
    }

    #[test]
    fn a_byte_that_cannot_continue_is_replaced_at_once() {
        let t = bytes_tokenizer();
        let mut stream = Detokenizer::new(&t, true);
        assert_eq!(stream.push(0xE4), "");
        assert_eq!(stream.push(b'a' as u32), "\u{FFFD}a");
        assert_eq!(stream.push(0xFF), "\u{FFFD}");
    }

    #[test]
    fn control_tokens_are_left_out_on_request_only() {
        let t = bytes_tokenizer();
        assert_eq!(Detokenizer::new(&t, true).push(256), "");
        assert_eq!(Detokenizer::new(&t, false).push(256), "<end>");
        assert_eq!(Detokenizer::new(&t, false).push(70_000), "");
    }

    proptest! {
        #[test]
        fn a_stream_joins_to_the_decoded_whole(
            ids in prop::collection::vec(prop_oneof![3 => 0u32..300, 1 => Just(0xE2u32), 1 => 0x80u32..0xC0], 0..60),
            skip in any::<bool>(),
        ) {
            let t = bytes_tokenizer();
            let mut stream = Detokenizer::new(&t, skip);
            let mut joined = String::new();
            for &id in &ids {
                joined += &stream.push(id);
            }
            joined += &stream.flush();
            prop_assert_eq!(joined, t.decode(&ids, skip));
        }
    }
}
