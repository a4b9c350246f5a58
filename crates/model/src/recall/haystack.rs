//! Text with facts hidden in it, and the questions to ask: the input of the demo and of the recall tests.
//!
//! Every fact is a line `key: value`. A question ends in `key:`, so the answer is the value with the space before it.
//! What the model needs (each run of [`NGRAM`] bytes on the way through an answer occurs once) is counted, not hoped.

use std::collections::HashMap;

use suanpan_base::BadArgument;

use super::NGRAM;

/// One hidden fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// What is asked for, without the colon.
    pub key: String,
    /// What the answer must be.
    pub value: String,
    /// Position of the fact's first byte, in tokens from the start of the text.
    pub depth: usize,
}

/// A text and the facts in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Haystack {
    /// The text; one byte is one token.
    pub text: String,
    /// Its facts, by depth.
    pub facts: Vec<Fact>,
}

impl Haystack {
    /// What to append to the text to ask for fact `i`: a line that ends in the key and its colon.
    pub fn question(&self, i: usize) -> String {
        format!("\n{}:", self.facts[i].key)
    }

    /// What a right model continues question `i` with, up to but without the newline that ends it.
    pub fn answer(&self, i: usize) -> String {
        format!(" {}", self.facts[i].value)
    }

    /// Tokens of the text.
    pub fn tokens(&self) -> Vec<u32> {
        self.text.bytes().map(u32::from).collect()
    }
}

const OP: &str = "haystack";
/// Words of the text between the facts.
pub(crate) const WORDS: [&str; 32] = [
    "river", "stone", "morning", "ledger", "window", "copper", "harbour", "quiet", "garden", "paper",
    "winter", "signal", "market", "silver", "engine", "valley", "bridge", "candle", "forest", "letter",
    "island", "kettle", "meadow", "number", "orchard", "pencil", "railway", "shadow", "thunder", "village",
    "weather", "yellow",
];
const KEY_BYTES: usize = 9;
const VALUE_BYTES: usize = 12;
/// `\nkey: value\n`.
const FACT_BYTES: usize = 1 + KEY_BYTES + 2 + VALUE_BYTES + 1;
/// Draws before giving up; one nearly always suffices.
const ATTEMPTS: u64 = 16;

/// A text of exactly `tokens` bytes with `facts` facts at evenly spread depths, the same for the same `seed`.
///
/// Refuses lengths that do not hold the facts with some filler between them.
pub fn haystack(seed: u64, tokens: usize, facts: usize) -> Result<Haystack, BadArgument> {
    let least = facts.saturating_mul(2 * FACT_BYTES).saturating_add(2 * NGRAM);
    if tokens < least {
        return Err(BadArgument::new(OP, "tokens", tokens, format!("at least {least} for {facts} facts")));
    }
    for attempt in 0..ATTEMPTS {
        let drawn = draw(Random(seed ^ (attempt << 48)), tokens, facts);
        if answers_are_unique(&drawn) {
            return Ok(drawn);
        }
    }
    Err(BadArgument::new(OP, "facts", facts, "few enough that random keys differ in their last bytes"))
}

fn draw(mut random: Random, tokens: usize, count: usize) -> Haystack {
    let mut text = String::with_capacity(tokens + 16);
    let mut facts = Vec::with_capacity(count);
    for i in 0..count {
        // The middle of the i-th of `count` equal parts.
        let start = (tokens as u128 * (2 * i as u128 + 1) / (2 * count as u128)) as usize - FACT_BYTES / 2;
        fill(&mut text, start, &mut random);
        let key = random.string(KEY_BYTES, b"abcdefghijklmnopqrstuvwxyz");
        let value = random.string(VALUE_BYTES, b"ABCDEFGHJKLMNPQRSTUVWXYZ23456789");
        text.push('\n');
        facts.push(Fact { depth: text.len(), key: key.clone(), value: value.clone() });
        text.push_str(&key);
        text.push_str(": ");
        text.push_str(&value);
        text.push('\n');
    }
    fill(&mut text, tokens, &mut random);
    Haystack { text, facts }
}

/// Appends words until the text is exactly `end` bytes long.
fn fill(text: &mut String, end: usize, random: &mut Random) {
    while text.len() < end {
        text.push_str(WORDS[random.below(WORDS.len() as u64) as usize]);
        text.push(if random.below(9) == 0 { '.' } else { ' ' });
    }
    text.truncate(end);
}

/// Whether each run of [`NGRAM`] bytes that a right answer walks through occurs exactly once in the text.
fn answers_are_unique(h: &Haystack) -> bool {
    let bytes = h.text.as_bytes();
    let gram = |end: usize| bytes[end - NGRAM..end].iter().fold(0u64, |x, &b| x << 8 | u64::from(b));
    let mut count: HashMap<u64, u32> = HashMap::new();
    for fact in &h.facts {
        // From the colon, where the question ends, to the last byte of the value, after which the newline is copied.
        let colon = fact.depth + KEY_BYTES + 1;
        for end in colon..=colon + 1 + VALUE_BYTES {
            if count.insert(gram(end), 0).is_some() {
                return false;
            }
        }
    }
    for end in NGRAM..=bytes.len() {
        if let Some(n) = count.get_mut(&gram(end)) {
            *n += 1;
        }
    }
    count.values().all(|&n| n == 1)
}

/// SplitMix64 (Steele, Lea, Flood 2014): enough for texts, the same on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is far below 2^64: the remainder's bias is nothing.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn string(&mut self, len: usize, alphabet: &[u8]) -> String {
        (0..len).map(|_| char::from(alphabet[self.below(alphabet.len() as u64) as usize])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_asked_length_and_holds_every_fact_at_its_depth() {
        for (tokens, facts) in [(400, 0), (400, 4), (65_536, 40)] {
            let h = haystack(7, tokens, facts).unwrap();
            assert_eq!((h.text.len(), h.facts.len()), (tokens, facts));
            for f in &h.facts {
                assert!(h.text[f.depth..].starts_with(&format!("{}: {}\n", f.key, f.value)));
            }
            assert!(h.facts.is_sorted_by_key(|f| f.depth));
        }
        let h = haystack(7, 65_536, 40).unwrap();
        assert!(h.facts[0].depth < 1000 && h.facts[39].depth > 64_000);
        assert_eq!(h, haystack(7, 65_536, 40).unwrap());
        assert_ne!(h.facts, haystack(8, 65_536, 40).unwrap().facts);
    }

    #[test]
    fn a_key_that_shares_its_last_bytes_with_other_text_is_noticed() {
        let mut h = haystack(7, 4000, 4).unwrap();
        assert!(answers_are_unique(&h));
        let tail = format!("{}:", &h.facts[2].key[KEY_BYTES - NGRAM + 1..]);
        let at = 100;
        h.text.replace_range(at..at + tail.len(), &tail);
        assert!(!answers_are_unique(&h));
    }

    #[test]
    fn a_length_that_does_not_hold_the_facts_is_refused() {
        assert_eq!(haystack(1, 500, 40).unwrap_err().field, "tokens");
        assert_eq!(haystack(1, 500, usize::MAX).unwrap_err().field, "tokens");
    }
}
