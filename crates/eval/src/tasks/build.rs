//! Puts a question together: instructions, context, question, lead-in, within a length that is never exceeded and never cut to. The largest
//! filler that fits is found on one draw; what cannot fit is a typed error that says the least length.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::EvalError;
use crate::count::Counter;
use crate::item::{Cell, Fact, Item, Prompt, Role, Turn, View};
use crate::rng::ItemRng;
use crate::task::{Haystack, Kit};

/// Version of the generators, for packs: raised whenever any prompt may change.
pub const GENERATOR: u32 = 1;

/// Depths are drawn one from each of so many strata, whatever the length: every length has the same histogram.
pub const STRATA: usize = 20;

/// What a question is made of around its context.
pub struct Frame<'a> {
    /// Where it comes from.
    pub kit: &'a Kit<'a>,
    /// Which.
    pub cell: &'a Cell,
    /// Before the context, with the line break at its end.
    pub head: String,
    /// After the context, with the line break at its start.
    pub tail: String,
    /// Start of the answer, for the raw protocol.
    pub lead_in: Option<String>,
    /// Room for the answer.
    pub answer_tokens: usize,
}

/// A fact on its way into the filler.
#[derive(Clone, Debug)]
pub struct Insert {
    /// A whole unit: a sentence or a line, with the separator that its neighbours have.
    pub text: String,
    /// Where, 0 ..= 1.
    pub depth: f64,
    /// The answer needs it.
    pub needed: bool,
}

/// A context that fits.
#[derive(Default)]
pub struct Context {
    /// Its text.
    pub text: String,
    /// Tokens by pieces.
    pub tokens: usize,
    /// Facts, with offsets in `text`; [`Frame::finish`] moves them.
    pub facts: Vec<Fact>,
    /// Tokens before each fact.
    pub token_indices: Vec<usize>,
    /// Units of filler.
    pub units: usize,
}

impl Context {
    /// Adds a piece that answers need or that misleads; its outer white space is not part of the fact.
    pub fn push_fact(&mut self, counter: &dyn Counter, piece: &str, needed: bool) {
        let start = self.text.len() + (piece.len() - piece.trim_start().len());
        let end = start + piece.trim().len();
        self.token_indices.push(self.tokens);
        self.text.push_str(piece);
        self.tokens += counter.count(piece);
        self.facts.push(Fact { start_byte: start, end_byte: end, depth: 0.0, needed });
    }

    /// Adds a piece of filler.
    pub fn push(&mut self, counter: &dyn Counter, piece: &str) {
        self.text.push_str(piece);
        self.tokens += counter.count(piece);
    }
}

/// Filler in units: sentences or lines, each with its separator.
#[derive(Default)]
pub struct Units {
    text: String,
    ends: Vec<usize>,
    tokens: Vec<usize>,
    total: usize,
}

impl Units {
    /// As many units as fit `room` tokens. `write(i, out)` appends unit `i`, or returns false when there are no more.
    pub fn fill(
        counter: &dyn Counter,
        room: usize,
        mut write: impl FnMut(usize, &mut String) -> bool,
    ) -> Self {
        let mut units = Units::default();
        loop {
            let start = units.text.len();
            if !write(units.len(), &mut units.text) {
                return units;
            }
            let tokens = counter.count(&units.text[start..]);
            if units.total + tokens > room {
                units.text.truncate(start);
                return units;
            }
            units.push_counted(tokens);
        }
    }

    fn push_counted(&mut self, tokens: usize) {
        self.ends.push(self.text.len());
        self.tokens.push(tokens);
        self.total += tokens;
    }

    /// Units.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no unit.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Drops units from the end until at most `room` tokens are left.
    fn shrink(&mut self, room: usize) {
        while self.total > room {
            let Some(tokens) = self.tokens.pop() else { return };
            self.total -= tokens;
            self.ends.pop();
        }
        self.text.truncate(self.ends.last().copied().unwrap_or(0));
    }

    /// Drops the last `n` units.
    pub fn drop_last(&mut self, n: usize) {
        let kept = self.len().saturating_sub(n);
        let room = self.tokens[..kept].iter().sum();
        self.shrink(room);
    }

    fn unit(&self, i: usize) -> &str {
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.text[start..self.ends[i]]
    }

    /// The units with `inserts` between them, each at the first border at or after its depth; inserts of one border keep their order.
    pub fn with(&self, counter: &dyn Counter, inserts: &[Insert]) -> Context {
        let mut order: Vec<&Insert> = inserts.iter().collect();
        order.sort_by(|a, b| a.depth.total_cmp(&b.depth));
        let mut order = order.into_iter().peekable();
        let mut context = Context { units: self.len(), ..Context::default() };
        let inserted: usize = inserts.iter().map(|f| f.text.len()).sum();
        context.text.reserve(self.text.len() + inserted);
        let mut filled = 0;
        for i in 0..=self.len() {
            let last = i == self.len();
            while let Some(f) = order.next_if(|f| last || f.depth * self.total as f64 <= filled as f64) {
                context.push_fact(counter, &f.text, f.needed);
            }
            if !last {
                context.text.push_str(self.unit(i));
                context.tokens += self.tokens[i];
                filled += self.tokens[i];
            }
        }
        context
    }
}

impl<'a> Frame<'a> {
    /// Tokens of everything but the context, answer included.
    pub fn fixed_tokens(&self) -> usize {
        let counter = self.kit.counter;
        let lead = self.lead_in.as_deref().map_or(0, |l| counter.count(l));
        counter.count(&self.head)
            + counter.count(&self.tail)
            + lead
            + counter.turn_tokens()
            + self.answer_tokens
    }

    /// Tokens that the context may take, if any are left beside `more`.
    pub fn room(&self, more: usize) -> Result<usize, EvalError> {
        let fixed = self.fixed_tokens() + more;
        self.cell.length_tokens.checked_sub(fixed).ok_or_else(|| self.too_short(fixed))
    }

    /// The error of a length that cannot hold `least_tokens`.
    pub fn too_short(&self, least_tokens: usize) -> EvalError {
        EvalError::TooShort {
            task: self.cell.task.clone(),
            length_tokens: self.cell.length_tokens,
            least_tokens,
        }
    }

    /// A stream of this item.
    pub fn rng(&self, purpose: &str) -> ItemRng {
        rng(self.kit, self.cell, purpose)
    }

    /// The depth of this sample: stratified over samples, the same at every length.
    pub fn depth(&self) -> f64 {
        depth(self.kit, self.cell)
    }

    /// The largest context of `inserts` in filler that fits, with at least `least_units` of filler. A focused question has no filler and
    /// only the facts that are needed; a closed-book question has no context.
    pub fn fill(
        &self,
        inserts: &[Insert],
        least_units: usize,
        write: impl FnMut(usize, &mut String) -> bool,
    ) -> Result<Context, EvalError> {
        let counter = self.kit.counter;
        match self.cell.view {
            View::ClosedBook => return Ok(Context::default()),
            View::Focused => {
                let needed: Vec<Insert> = inserts.iter().filter(|f| f.needed).cloned().collect();
                let context = Units::default().with(counter, &needed);
                self.room(context.tokens)?;
                return Ok(context);
            }
            View::Full => {}
        }
        let inserted: usize = inserts.iter().map(|f| counter.count(&f.text)).sum();
        let mut write = write;
        let mut room = match self.room(inserted) {
            Ok(room) => room,
            Err(_) => return Err(self.too_short(self.least(inserted, least_units, &mut write))),
        };
        let mut units = Units::fill(counter, room, &mut write);
        loop {
            if units.len() < least_units {
                return Err(self.too_short(self.least(inserted, least_units, &mut write)));
            }
            let context = units.with(counter, inserts);
            let over = self.over(&context);
            if over == 0 {
                return Ok(context);
            }
            // Pieces add up to less than the whole for this counter: take away what it says is too much, at least one unit.
            room = room.min(units.total).saturating_sub(over.max(1));
            units.shrink(room);
        }
    }

    fn least(
        &self,
        inserted: usize,
        least_units: usize,
        write: &mut dyn FnMut(usize, &mut String) -> bool,
    ) -> usize {
        let mut sample = String::new();
        for i in 0..least_units {
            write(i, &mut sample);
        }
        self.fixed_tokens() + inserted + self.kit.counter.count(&sample)
    }

    /// Tokens by which a question with this context exceeds the length.
    pub fn over(&self, context: &Context) -> usize {
        let whole = self.prompt_tokens(&self.text(context), context.tokens);
        (whole + self.answer_tokens).saturating_sub(self.cell.length_tokens)
    }

    fn text(&self, context: &Context) -> String {
        let mut text = String::with_capacity(self.head.len() + context.text.len() + self.tail.len());
        // Without a context there is nothing to announce.
        if self.cell.view != View::ClosedBook {
            text.push_str(&self.head);
            text.push_str(&context.text);
        }
        text.push_str(&self.tail);
        text
    }

    fn prompt_tokens(&self, text: &str, context_tokens: usize) -> usize {
        let counter = self.kit.counter;
        let head = if self.cell.view == View::ClosedBook { 0 } else { counter.count(&self.head) };
        let by_pieces = head + context_tokens + counter.count(&self.tail);
        let lead = self.lead_in.as_deref().map_or(0, |l| counter.count(l));
        counter.whole(text, by_pieces) + lead + counter.turn_tokens()
    }

    /// The item: one user turn. Refused if it is longer than the cell, which [`Frame::fill`] has made sure of already.
    pub fn finish(
        self,
        mut context: Context,
        gold: Vec<String>,
        decoys: Vec<String>,
        more: impl IntoIterator<Item = (&'static str, Value)>,
    ) -> Result<Item, EvalError> {
        let text = self.text(&context);
        let prompt_tokens = self.prompt_tokens(&text, context.tokens);
        if prompt_tokens + self.answer_tokens > self.cell.length_tokens {
            return Err(self.too_short(prompt_tokens + self.answer_tokens));
        }
        if self.cell.view == View::ClosedBook {
            context = Context::default();
        }
        let length = context.text.len();
        for fact in &mut context.facts {
            fact.depth = fact.start_byte as f64 / length.max(1) as f64;
            fact.start_byte += self.head.len();
            fact.end_byte += self.head.len();
        }
        let mut recipe = recipe(self.kit);
        recipe.insert("units".into(), json!(context.units));
        recipe.insert("token_indices".into(), json!(context.token_indices));
        recipe.extend(more.into_iter().map(|(k, v)| (k.to_string(), v)));
        Ok(Item {
            cell: self.cell.clone(),
            prompt: Prompt {
                turns: vec![Turn::text(Role::User, text)],
                lead_in: self.lead_in,
                tools: Vec::new(),
            },
            answer_tokens: self.answer_tokens,
            prompt_tokens,
            gold,
            decoys: without(decoys),
            facts: context.facts,
            recipe,
        })
    }
}

/// Decoys, each once, order kept.
fn without(decoys: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    decoys.into_iter().filter(|d| seen.insert(d.clone())).collect()
}

/// What every recipe holds.
pub fn recipe(kit: &Kit<'_>) -> BTreeMap<String, Value> {
    BTreeMap::from([
        ("generator".to_string(), json!(GENERATOR)),
        ("seed".to_string(), json!(kit.seed)),
        ("corpus".to_string(), json!(kit.haystack.identity())),
        ("counter".to_string(), json!(kit.counter.name())),
    ])
}

/// A stream of one item. The view is not part of it: the three views of a cell ask the same.
pub fn rng(kit: &Kit<'_>, cell: &Cell, purpose: &str) -> ItemRng {
    ItemRng::new(kit.seed, &cell.task, cell.length_tokens, cell.index, purpose)
}

/// Depth of a sample, 0 .. 1: each run of [`STRATA`] samples visits each stratum once, in an order of its own, and the place within the
/// stratum belongs to the sample. The length is no part of either.
pub fn depth(kit: &Kit<'_>, cell: &Cell) -> f64 {
    let round = cell.index / STRATA as u32;
    let mut order: Vec<usize> = (0..STRATA).collect();
    ItemRng::new(kit.seed, &cell.task, 0, round, "depth order").shuffle(&mut order);
    let within = ItemRng::new(kit.seed, &cell.task, 0, cell.index, "depth").unit();
    (order[cell.index as usize % STRATA] as f64 + within) / STRATA as f64
}

/// Depths of `n` facts of one sample, the first of them stratified over samples: the circle of depths in `n` equal steps.
pub fn depths(first: f64, n: usize) -> Vec<f64> {
    (0..n).map(|i| (first + i as f64 / n as f64).fract()).collect()
}

/// Depths of `n` facts in their order: one in each of `n` equal stretches.
pub fn spread(rng: &mut ItemRng, n: usize) -> Vec<f64> {
    (0..n).map(|i| (i as f64 + rng.unit()) / n as f64).collect()
}

/// Room for an answer: what the public evaluation gives, or what the right answer takes where the counter's tokens are smaller.
pub fn answer_tokens(kit: &Kit<'_>, upstream: usize, gold: &[String]) -> usize {
    upstream.max(kit.counter.count(&gold.join(", ")) + 8)
}

/// Prose from a random place of the haystack, in paragraphs of seven sentences. Every unit but the first begins with its separator.
pub fn prose<'a>(
    haystack: &'a dyn Haystack,
    rng: &mut ItemRng,
) -> impl FnMut(usize, &mut String) -> bool + 'a {
    let start = rng.next_u64() % haystack.period().max(1);
    move |i, out| {
        out.push_str(if i % 7 == 0 && i > 0 { "\n" } else { " " });
        out.push_str(haystack.sentence(start + i as u64));
        true
    }
}
