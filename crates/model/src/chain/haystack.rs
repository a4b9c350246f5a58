//! Texts with facts in them, the questions to ask and the right answers: inputs for `builtin:chain` and `builtin:count`.
//!
//! A fact is ` key: value.`, four tokens. No name is used twice, so no question has two answers.

use suanpan_base::BadArgument;

use super::vocab::{NUM_NAMES, name};
use super::{MAX_HOPS, MAX_VALUES};
use crate::recall::haystack::{Random, WORDS};

/// How many facts of each kind a text shall hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Keys of one value, each by itself in the text.
    pub singles: usize,
    /// Keys of one value, all side by side in the middle of the text.
    pub neighbours: usize,
    /// Keys of several values.
    pub lists: usize,
    /// Values of each of them, 2 to [`MAX_VALUES`].
    pub values: usize,
    /// Chains, whose facts stand in any order.
    pub chains: usize,
    /// Facts of each chain, 2 to [`MAX_HOPS`].
    pub hops: usize,
}

/// What a question asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The value of a key that stands by itself.
    Single,
    /// The value of a key among neighbours.
    MultiKey,
    /// All values of a key, in the order of the text.
    MultiValue,
    /// The end of a chain.
    Chain,
    /// How often a word stands in the text.
    Count,
}

impl Kind {
    /// Name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Single => "single",
            Kind::MultiKey => "multi-key",
            Kind::MultiValue => "multi-value",
            Kind::Chain => "chain",
            Kind::Count => "count",
        }
    }
}

/// A question about a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// What it asks for.
    pub kind: Kind,
    /// What to append to the text.
    pub prompt: String,
    /// What a right model continues with, up to but without the end token.
    pub answer: String,
    /// Position of the first token of each fact that the answer needs, counted from the text's first token, in the order of use.
    pub depths: Vec<usize>,
}

/// A text and what can be asked about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Haystack {
    /// The text. With the begin token before it, it is one token longer than asked for.
    pub text: String,
    /// The questions, each by itself behind the text.
    pub questions: Vec<Question>,
}

const OP: &str = "haystack";
/// ` key: value.`
const FACT_TOKENS: usize = 4;

/// A text being written.
struct Writer {
    text: String,
    tokens: usize,
    random: Random,
}

impl Writer {
    fn word(&mut self, word: &str) {
        self.text.push(' ');
        self.text.push_str(word);
        self.tokens += 1;
    }

    fn common_word(&mut self) {
        let i = self.random.below(WORDS.len() as u64) as usize;
        self.word(WORDS[i]);
    }

    /// Common words up to `end` tokens.
    fn fill(&mut self, end: usize) {
        while self.tokens < end {
            if self.tokens > 0 && self.tokens + 1 < end && self.random.below(9) == 0 {
                self.text.push('.');
                self.tokens += 1;
            }
            self.common_word();
        }
    }

    fn fact(&mut self, key: &str, value: &str) {
        self.word(key);
        self.text.push(':');
        self.word(value);
        self.text.push('.');
        self.tokens += FACT_TOKENS - 2;
    }

    /// `count` different names.
    fn names(&mut self, count: usize) -> Vec<String> {
        // The first `count` of a shuffle.
        let mut all: Vec<u32> = (0..NUM_NAMES as u32).collect();
        for i in 0..count {
            let j = i + self.random.below((all.len() - i) as u64) as usize;
            all.swap(i, j);
        }
        all[..count].iter().map(|&i| name(i as usize)).collect()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.random.below(i as u64 + 1) as usize;
            items.swap(i, j);
        }
    }
}

impl Facts {
    fn check(&self, tokens: usize) -> Result<usize, BadArgument> {
        let lengths =
            [("values", self.lists, self.values, MAX_VALUES), ("hops", self.chains, self.hops, MAX_HOPS)];
        for (field, used, n, most) in lengths {
            if used > 0 && !(2..=most).contains(&n) {
                return Err(BadArgument::new(OP, field, n, format!("2 to {most}")));
            }
        }
        // Saturating: what does not fit is refused, whatever the sum is.
        let of = |n: usize, each: usize| n.saturating_mul(each);
        let all = [of(self.lists, self.values), of(self.chains, self.hops), self.neighbours];
        let facts = all.into_iter().fold(self.singles, usize::saturating_add);
        let names = of(facts, 2);
        if names > NUM_NAMES {
            return Err(BadArgument::new(OP, "facts", facts, format!("at most {}", NUM_NAMES / 2)));
        }
        // Room for as much filler as facts, and for the first tokens, which have no two before them.
        let least = of(facts, 2 * FACT_TOKENS).saturating_add(8);
        if tokens < least {
            return Err(BadArgument::new(
                OP,
                "tokens",
                tokens,
                format!("at least {least} for {facts} facts"),
            ));
        }
        Ok(facts)
    }
}

/// A fact before it has a place: key, value, and the question it belongs to.
struct Link {
    key: String,
    value: String,
    question: usize,
}

/// A text of exactly `tokens` tokens with `facts`, the same for the same `seed`. Single facts and lists are spread evenly, so are chains, whose facts
/// are in random order.
///
/// Refuses numbers that cannot be told apart and lengths that do not hold the facts.
pub fn haystack(seed: u64, tokens: usize, facts: Facts) -> Result<Haystack, BadArgument> {
    let count = facts.check(tokens)?;
    let mut w = Writer { text: String::with_capacity(8 * tokens), tokens: 0, random: Random(seed) };
    let mut names = w.names(2 * count).into_iter();
    let mut take = |n: usize| names.by_ref().take(n).collect::<Vec<String>>();
    let (mut questions, mut spread, mut together) = (Vec::new(), Vec::new(), Vec::new());
    let ask = |kind, prompt: String, answer: &[String]| Question {
        kind,
        prompt: format!(" {prompt}"),
        answer: answer.iter().map(|a| format!(" {a}")).collect(),
        depths: Vec::new(),
    };
    for i in 0..facts.singles + facts.neighbours {
        let alone = i < facts.singles;
        let [key, value] = take(2).try_into().expect("names were counted");
        let kind = if alone { Kind::Single } else { Kind::MultiKey };
        let question = questions.len();
        questions.push(ask(kind, format!("{key}?"), std::slice::from_ref(&value)));
        let links = if alone { &mut spread } else { &mut together };
        links.push(Link { key, value, question });
    }
    for _ in 0..facts.lists {
        let (key, values) = (take(1).remove(0), take(facts.values));
        let question = questions.len();
        questions.push(ask(Kind::MultiValue, format!("{key}?"), &values));
        spread.extend(values.into_iter().map(|value| Link { key: key.clone(), value, question }));
    }
    for _ in 0..facts.chains {
        let stops = take(facts.hops + 1);
        let question = questions.len();
        questions.push(ask(Kind::Chain, format!("{}?{}", stops[0], facts.hops), &stops[facts.hops..]));
        let links =
            stops.windows(2).map(|pair| Link { key: pair[0].clone(), value: pair[1].clone(), question });
        spread.extend(links);
    }
    w.shuffle(&mut spread);
    in_order_of_answers(&mut spread, &questions);
    write(&mut w, tokens, &spread, &together, &mut questions);
    Ok(Haystack { text: w.text, questions })
}

/// Values of a list stand in the order in which they are answered: the shuffled places of each list are dealt out again.
fn in_order_of_answers(links: &mut [Link], questions: &[Question]) {
    for (q, question) in questions.iter().enumerate().filter(|(_, q)| q.kind == Kind::MultiValue) {
        let values = question.answer.split_whitespace();
        for (link, value) in links.iter_mut().filter(|l| l.question == q).zip(values) {
            link.value = value.to_string();
        }
    }
}

fn write(w: &mut Writer, tokens: usize, spread: &[Link], together: &[Link], questions: &mut [Question]) {
    let parts = spread.len() + usize::from(!together.is_empty());
    // Each part of the text has its facts at a random place; the neighbours' part is the middle one.
    let room = tokens - 8 - FACT_TOKENS * (spread.len() + together.len());
    let middle = spread.len() / 2;
    let mut filler = 8;
    for part in 0..parts {
        let end = 8 + (room as u128 * (part as u128 + 1) / parts as u128) as usize;
        let before = w.random.below((end - filler) as u64 + 1) as usize;
        w.fill(w.tokens + before + if part == 0 { 8 } else { 0 });
        let here = match (part.cmp(&middle), together.is_empty()) {
            (_, true) | (std::cmp::Ordering::Less, _) => &spread[part..=part],
            (std::cmp::Ordering::Equal, _) => together,
            (std::cmp::Ordering::Greater, _) => &spread[part - 1..part],
        };
        for link in here {
            questions[link.question].depths.push(w.tokens);
            w.fact(&link.key, &link.value);
        }
        w.fill(w.tokens + (end - filler - before));
        filler = end;
    }
    w.fill(tokens);
}

/// A text of exactly `tokens` tokens in which one name stands as often as each entry of `counts` says, at random places; the same for the same
/// `seed`.
pub fn counting(seed: u64, tokens: usize, counts: &[usize]) -> Result<Haystack, BadArgument> {
    let all = counts.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
    if counts.len() > NUM_NAMES {
        return Err(BadArgument::new(OP, "counts", counts.len(), format!("at most {NUM_NAMES} names")));
    }
    if tokens < all.saturating_add(8) {
        return Err(BadArgument::new(
            OP,
            "tokens",
            tokens,
            format!("at least {} for {all} words", all.saturating_add(8)),
        ));
    }
    let mut w = Writer { text: String::with_capacity(8 * tokens), tokens: 0, random: Random(seed) };
    let names = w.names(counts.len());
    let mut questions = Vec::new();
    // Which name stands at each place that is not filler.
    let mut places = Vec::with_capacity(tokens - 8);
    for (i, &n) in counts.iter().enumerate() {
        let answer = super::count::answer(n)?;
        questions.push(Question {
            kind: Kind::Count,
            prompt: super::count::question(&names[i]),
            answer,
            depths: Vec::new(),
        });
        places.extend(std::iter::repeat_n(Some(i), n));
    }
    places.resize(tokens - 8, None);
    w.shuffle(&mut places);
    w.fill(8);
    for place in places {
        match place {
            None => w.common_word(),
            Some(i) => {
                questions[i].depths.push(w.tokens);
                w.word(&names[i]);
            }
        }
    }
    Ok(Haystack { text: w.text, questions })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin;

    const FACTS: Facts = Facts { singles: 3, neighbours: 5, lists: 2, values: 4, chains: 2, hops: 4 };

    #[test]
    fn a_text_has_the_asked_tokens_and_every_fact_where_the_question_says() {
        let model = builtin::load("builtin:chain").unwrap();
        for tokens in [400, 401, 5000] {
            let h = haystack(7, tokens, FACTS).unwrap();
            let ids = model.tokenizer.encode(&h.text, true).unwrap();
            assert_eq!(ids.len(), tokens + 1);
            assert_eq!(h.questions.len(), 3 + 5 + 2 + 2);
            for q in &h.questions {
                assert_eq!(
                    q.depths.len(),
                    match q.kind {
                        Kind::MultiValue | Kind::Chain => 4,
                        _ => 1,
                    }
                );
                for &at in &q.depths {
                    let fact = model.tokenizer.decode(&ids[at + 1..][..4], true);
                    assert!(fact.contains(": ") && fact.ends_with('.'), "{fact:?}");
                }
                if q.kind != Kind::Chain {
                    let key = q.prompt.trim_end_matches('?');
                    let values = q.depths.iter().map(|&at| model.tokenizer.decode(&ids[at + 1..][..4], true));
                    let facts: String =
                        values.map(|f| f.replace(&format!("{key}:"), "").replace('.', "")).collect();
                    assert_eq!(facts, q.answer);
                    assert!(q.depths.is_sorted());
                }
            }
            assert_eq!(h, haystack(7, tokens, FACTS).unwrap());
        }
        let h =
            haystack(1, 100_000, Facts { singles: 40, neighbours: 0, lists: 0, chains: 0, ..FACTS }).unwrap();
        let mut depths: Vec<usize> = h.questions.iter().map(|q| q.depths[0]).collect();
        depths.sort_unstable();
        assert!(depths[0] < 2600 && depths[39] > 97_000, "{depths:?}");
    }

    #[test]
    fn a_counted_word_stands_as_often_as_asked() {
        let h = counting(3, 900, &[0, 1, 7, 400]).unwrap();
        assert_eq!(h.text.split_whitespace().count(), 900 - h.text.matches('.').count());
        for (q, n) in h.questions.iter().zip([0, 1, 7, 400]) {
            let word = q.prompt.trim().trim_end_matches('?');
            assert_eq!(h.text.split([' ', '.']).filter(|w| *w == word).count(), n);
            assert_eq!((q.answer.clone(), q.depths.len()), (format!(" {n}"), n));
        }
    }

    #[test]
    fn what_does_not_fit_or_cannot_be_told_apart_is_refused() {
        let field = |tokens, facts| haystack(1, tokens, facts).unwrap_err().field;
        assert_eq!(field(100, FACTS), "tokens");
        assert_eq!(field(4000, Facts { values: 6, ..FACTS }), "values");
        assert_eq!(field(4000, Facts { hops: 1, ..FACTS }), "hops");
        assert_eq!(field(1 << 20, Facts { singles: 20_000, ..FACTS }), "facts");
        assert_eq!(field(4000, Facts { singles: usize::MAX, ..FACTS }), "facts");
        assert_eq!(counting(1, 100, &[90, 9]).unwrap_err().field, "tokens");
        assert_eq!(counting(1, 5000, &[1001]).unwrap_err().field, "n");
    }
}
