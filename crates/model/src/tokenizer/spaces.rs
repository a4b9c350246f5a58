//! SentencePiece's BPE: spaces become U+2581, pieces merge by score or by rank, what is no piece becomes byte tokens.
//!
//! Scores (GGUF): of all neighbours whose join is a piece, the pair of the greatest score merges first, the leftmost of equals
//! (github.com/google/sentencepiece, `bpe_model.cc`). Ranks (tokenizer.json): the `tokenizers` library's own BPE with byte fallback.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

use super::TokenizerError;

/// How a space is spelled in a vocabulary.
pub(super) const SPACE: char = '\u{2581}';

/// Where a space is put before text that has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefix {
    /// Nowhere.
    Never,
    /// Before the very first text.
    First,
    /// Before each stretch of text, also after a control token.
    Each,
}

/// What decides which neighbours merge.
pub(super) enum Merges {
    /// Scores of the joined pieces.
    Scores(HashMap<Box<str>, Piece>),
    /// The order of a list of pairs.
    Ranks(Box<BPE>),
}

/// A plain piece of a scored vocabulary.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub id: u32,
    pub score: f32,
}

/// A SentencePiece vocabulary ready to encode.
pub(super) struct Spaces {
    pub merges: Merges,
    /// Ids of the byte tokens; where there is none, of the unknown token.
    bytes: [Option<u32>; 256],
    pub prefix: Prefix,
    /// No piece holds a space after something else: text may be cut before such a space without changing an id.
    cut: bool,
}

impl Spaces {
    /// `plain`: the spellings of all pieces that text can become. `bytes`: ids of the byte tokens.
    pub(super) fn new<'a>(
        merges: Merges,
        prefix: Prefix,
        plain: impl Iterator<Item = &'a str>,
        bytes: [Option<u32>; 256],
    ) -> Spaces {
        let space_inside = |piece: &str| {
            let mut chars = piece.chars().skip_while(|&c| c == SPACE);
            chars.any(|c| c == SPACE)
        };
        let cut = !plain.into_iter().any(space_inside);
        Spaces { merges, bytes, prefix, cut }
    }

    /// Bytes that neither a piece nor a byte token holds.
    pub(super) fn missing_bytes(&self) -> Vec<u8> {
        (0..=255).filter(|&b| self.bytes[usize::from(b)].is_none()).collect()
    }

    /// Id of a plain piece by its spelling.
    pub(super) fn id_of(&self, piece: &str) -> Option<u32> {
        match &self.merges {
            Merges::Scores(pieces) => pieces.get(piece).map(|p| p.id),
            Merges::Ranks(bpe) => bpe.token_to_id(piece),
        }
    }

    /// Ids of `text`; `first`: nothing stands before it.
    pub(super) fn encode(&self, text: &str, first: bool, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let mut visible = String::with_capacity(text.len() + text.len() / 4 + SPACE.len_utf8());
        if self.prefix == Prefix::Each || (self.prefix == Prefix::First && first) {
            visible.push(SPACE);
        }
        visible.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        let mut merger = Merger::default();
        let mut rest = visible.as_str();
        while !rest.is_empty() {
            let (word, after) = rest.split_at(if self.cut { word_len(rest) } else { rest.len() });
            rest = after;
            match &self.merges {
                Merges::Scores(pieces) => merger.merge(word, pieces, &self.bytes, ids),
                Merges::Ranks(bpe) => {
                    let tokens = bpe.tokenize(word).map_err(|e| TokenizerError::Encode(e.to_string()))?;
                    ids.extend(tokens.iter().map(|t| t.id));
                }
            }
        }
        Ok(())
    }
}

/// Bytes up to the first space that follows something else.
fn word_len(text: &str) -> usize {
    let start = text.len() - text.trim_start_matches(SPACE).len();
    text[start..].find(SPACE).map_or(text.len(), |at| start + at)
}

/// The bytes that a piece stands for: a byte token's byte, else its text with spaces.
pub(super) fn bytes_of(piece: &str, is_byte: bool) -> Option<Cow<'_, [u8]>> {
    if is_byte {
        return byte_of(piece).map(|b| Cow::Owned(vec![b]));
    }
    Some(if piece.contains(SPACE) {
        Cow::Owned(piece.replace(SPACE, " ").into_bytes())
    } else {
        Cow::Borrowed(piece.as_bytes())
    })
}

/// The byte of a token spelled `<0xNN>`.
pub(super) fn byte_of(piece: &str) -> Option<u8> {
    let hex = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    let digits = hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit());
    digits.then(|| u8::from_str_radix(hex, 16).ok())?
}

/// A stretch of a word that is or may become one piece.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: usize,
    /// 0: merged into the one before it.
    len: usize,
    prev: usize,
    next: usize,
}

/// Two neighbours whose join is a piece.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Eq for Pair {}

impl Ord for Pair {
    fn cmp(&self, other: &Pair) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Past the last symbol, before the first.
const NONE: usize = usize::MAX;

/// Memory of one text's words.
#[derive(Default)]
struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Pair>,
}

impl Merger {
    fn merge(
        &mut self,
        word: &str,
        pieces: &HashMap<Box<str>, Piece>,
        bytes: &[Option<u32>; 256],
        ids: &mut Vec<u32>,
    ) {
        self.symbols.clear();
        self.heap.clear();
        for (i, (start, c)) in word.char_indices().enumerate() {
            self.symbols.push(Symbol { start, len: c.len_utf8(), prev: i.wrapping_sub(1), next: i + 1 });
        }
        if let Some(last) = self.symbols.last_mut() {
            last.next = NONE;
        }
        for right in 1..self.symbols.len() {
            self.offer(word, right - 1, right, pieces);
        }
        while let Some(pair) = self.heap.pop() {
            let (left, right) = (self.symbols[pair.left], self.symbols[pair.right]);
            if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
                continue;
            }
            self.symbols[pair.left].len = pair.len;
            self.symbols[pair.left].next = right.next;
            self.symbols[pair.right].len = 0;
            if right.next != NONE {
                self.symbols[right.next].prev = pair.left;
                self.offer(word, pair.left, right.next, pieces);
            }
            if left.prev != NONE {
                self.offer(word, left.prev, pair.left, pieces);
            }
        }
        let mut at = if self.symbols.is_empty() { NONE } else { 0 };
        while at != NONE {
            let Symbol { start, len, next, .. } = self.symbols[at];
            match pieces.get(&word[start..start + len]) {
                Some(piece) => ids.push(piece.id),
                None => ids.extend(word[start..start + len].bytes().filter_map(|b| bytes[usize::from(b)])),
            }
            at = next;
        }
    }

    fn offer(&mut self, word: &str, left: usize, right: usize, pieces: &HashMap<Box<str>, Piece>) {
        let (start, len) = (self.symbols[left].start, self.symbols[left].len + self.symbols[right].len);
        if let Some(piece) = pieces.get(&word[start..start + len]) {
            self.heap.push(Pair { score: piece.score, left, right, len });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spaces(pieces: &[(&str, f32)], prefix: Prefix) -> Spaces {
        let plain: HashMap<Box<str>, Piece> =
            (0..).zip(pieces).map(|(id, &(text, score))| (text.into(), Piece { id, score })).collect();
        let bytes = std::array::from_fn(|b| Some(1000 + b as u32));
        Spaces::new(Merges::Scores(plain), prefix, pieces.iter().map(|p| p.0), bytes)
    }

    fn encode(spaces: &Spaces, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        spaces.encode(text, true, &mut ids).unwrap();
        ids
    }

    #[test]
    fn the_greatest_score_merges_first_and_the_leftmost_of_equals() {
        let s = spaces(&[("a", -9.0), ("b", -9.0), ("ab", -2.0), ("ba", -1.0), ("aa", -3.0)], Prefix::Never);
        assert_eq!(encode(&s, "aba"), [0, 3]);
        assert_eq!(encode(&s, "aaa"), [4, 0]);
        assert_eq!(encode(&s, ""), [0u32; 0]);
    }

    #[test]
    fn what_is_no_piece_becomes_its_bytes_and_neighbours_still_merge() {
        let s = spaces(&[("a", -9.0), ("aa", -1.0)], Prefix::Never);
        assert_eq!(encode(&s, "aaéaa"), [1, 1000 + 0xc3, 1000 + 0xa9, 1]);
        assert_eq!(encode(&s, " "), [1000 + 0xe2, 1000 + 0x96, 1000 + 0x81]);
    }

    #[test]
    fn text_is_cut_only_where_no_piece_can_reach_over() {
        let words = [("\u{2581}", -9.0), ("a", -9.0), ("\u{2581}a", -1.0), ("\u{2581}\u{2581}", -2.0)];
        let mut pieces = words.to_vec();
        assert!(spaces(&pieces, Prefix::Never).cut);
        assert_eq!(encode(&spaces(&pieces, Prefix::Each), "a  a"), [2, 0, 2]);
        pieces.push(("a\u{2581}", -0.5));
        let whole = spaces(&pieces, Prefix::Each);
        assert!(!whole.cut);
        assert_eq!(encode(&whole, "a a"), [0, 4, 1]);
        assert_eq!(word_len("\u{2581}\u{2581}ab\u{2581}c"), 8);
    }

    #[test]
    fn only_two_hexadecimal_digits_name_a_byte() {
        assert_eq!((byte_of("<0x0A>"), byte_of("<0xff>")), (Some(10), Some(255)));
        for no in ["<0xA>", "<0x0AB>", "0x0A", "<0xGG>", "<0x+1>"] {
            assert_eq!(byte_of(no), None, "{no}");
        }
    }
}
