//! Keys and values of needles: word pairs, codes, numbers, UUIDs; each kind drawn without repeats within an item.

use std::collections::HashSet;

use crate::corpus::words;
use crate::rng::ItemRng;

/// What a key or a value looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// "brave-otter".
    Words,
    /// Nine lower-case letters that alternate consonant and vowel, drawn so that no two end alike.
    Code,
    /// Seven decimal digits.
    Number,
    /// Version 4.
    Uuid,
}

/// Draws that do not repeat.
pub struct Source {
    kind: Kind,
    seen: HashSet<String>,
}

impl Source {
    /// Of one kind.
    pub fn new(kind: Kind) -> Self {
        Source { kind, seen: HashSet::new() }
    }

    /// The next, or nothing when the kind has no more to give.
    pub fn draw(&mut self, rng: &mut ItemRng) -> Option<String> {
        // A pair that was drawn before is drawn again; near the end of a kind's supply that would never end.
        for _ in 0..64 {
            let value = one(self.kind, rng);
            // Codes are told apart by their last six letters: models that match the bytes before a value need no more.
            let mark = if self.kind == Kind::Code { value[3..].to_string() } else { value.clone() };
            if self.seen.insert(mark) {
                return Some(value);
            }
        }
        None
    }

    /// The next of a kind that cannot run out at the number that is drawn.
    pub fn must(&mut self, rng: &mut ItemRng) -> String {
        self.draw(rng).unwrap_or_else(|| unreachable!("64 draws of {:?} in a row were known", self.kind))
    }
}

fn one(kind: Kind, rng: &mut ItemRng) -> String {
    match kind {
        Kind::Words => format!("{}-{}", rng.word(words::adjectives()), rng.word(words::nouns())),
        Kind::Code => code(rng, 9),
        Kind::Number => (1_000_000 + rng.below(9_000_000)).to_string(),
        Kind::Uuid => uuid(rng),
    }
}

/// Letters that alternate consonant and vowel.
pub fn code(rng: &mut ItemRng, letters: usize) -> String {
    (0..letters)
        .map(|i| *rng.pick(if i % 2 == 0 { b"bcdfghjklmnpqrstvwxz".as_slice() } else { b"aeiou" }) as char)
        .collect()
}

/// A random UUID, version 4.
pub fn uuid(rng: &mut ItemRng) -> String {
    let (a, b) = (rng.next_u64(), rng.next_u64());
    format!(
        "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
        a >> 32,
        a >> 16 & 0xffff,
        a & 0xfff,
        0x8000 | b >> 48 & 0x3fff,
        b & 0xffff_ffff_ffff
    )
}

/// A decimal number of exactly `digits` digits.
pub fn number(rng: &mut ItemRng, digits: u32) -> String {
    let least = 10usize.pow(digits - 1);
    (least + rng.below(9 * least)).to_string()
}
