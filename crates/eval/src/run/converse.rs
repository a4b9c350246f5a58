//! One item from its first request to its judgement: salt, requests and their follow-ups, tries again, rows of the log.

use std::time::Duration;

use super::log::{Outcome, Row};
use super::proof::is_cut;
use super::spec::CacheState;
use super::{Place, Session, is_stopping};
use crate::EvalError;
use crate::count::Counter;
use crate::endpoint::{Ask, Carries, Exchange, FaultKind, Protocol, TokensBy, body};
use crate::item::{Answer, Cell, Finish, Item, Part, Prompt, Role, Turn};
use crate::load::Load;
use crate::pack;
use crate::task::Task;

/// Most requests of one item.
const TURNS: u32 = 64;
/// Longest wait that an endpoint may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// One item being asked.
pub(crate) struct Conversation<'a> {
    pub session: &'a Session<'a>,
    pub cell: &'a Cell,
    pub item: &'a Item,
    pub task: &'static dyn Task,
    /// Schedule, and wait for a place in flight.
    pub scheduled: Option<(u64, u64)>,
    /// Given back when the last answer is there: judging and writing it down must not hold up the next request.
    pub place: std::cell::Cell<Option<Place<'a>>>,
}

/// What stands in front of a prompt: no other request of any run begins with it.
fn salt_line(salt: u64, cell: &Cell, attempt: u32) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&salt.to_le_bytes()).update(&attempt.to_le_bytes());
    hasher.update(format!("{cell:?}").as_bytes());
    format!("[{}]\n", &hasher.finalize().to_hex()[..12])
}

/// The prompt with its salt.
fn salted(prompt: &Prompt, salt: Option<&str>) -> Prompt {
    let mut prompt = prompt.clone();
    let Some(salt) = salt else { return prompt };
    match prompt.turns.first_mut().and_then(|t| t.parts.first_mut()) {
        Some(Part::Text { text }) => text.insert_str(0, salt),
        Some(Part::Image { .. }) => {
            prompt.turns[0].parts.insert(0, Part::Text { text: salt.to_owned() });
        }
        None => prompt.turns.insert(0, Turn::text(Role::User, salt)),
    }
    prompt
}

/// Gives each chunk its tokens where the server did not: the counter's count of the text so far, scaled to the server's total.
pub fn spread_tokens(exchange: &mut Exchange, counter: &dyn Counter) {
    let outputs = exchange.chunks.iter().filter(|c| c.is_output());
    if exchange.tokens_by == TokensBy::Server || outputs.clone().count() == 0 {
        return;
    }
    // Only plain text can be cut at its chunks again; reasoning and tool calls are spread by their bytes.
    let plain = exchange.chunks.iter().all(|c| matches!(c.1, Carries::Answer | Carries::Nothing));
    let text = &exchange.answer.text;
    let bytes: usize = outputs.map(|c| c.2 as usize).sum();
    let by_text = plain && bytes == text.len();
    let (mut at, mut before, mut total) = (0usize, 0.0, 0.0);
    let mut counts = Vec::new();
    for chunk in exchange.chunks.iter().filter(|c| c.is_output()) {
        at += chunk.2 as usize;
        let now =
            if by_text && text.is_char_boundary(at) { counter.count(&text[..at]) as f64 } else { at as f64 };
        counts.push((now - before).max(0.0));
        total += (now - before).max(0.0);
        before = now.max(before);
    }
    let Some(said) = exchange.usage.completion_tokens.map(|n| n as f64).or(by_text.then_some(total)) else {
        return;
    };
    if total <= 0.0 {
        return;
    }
    for (chunk, count) in exchange.chunks.iter_mut().filter(|c| c.is_output()).zip(counts) {
        chunk.3 = Some(count * said / total);
    }
    exchange.tokens_by = TokensBy::Counter;
}

impl Conversation<'_> {
    fn tries(&self) -> u32 {
        match self.session.runner.spec.load {
            Load::Closed { .. } => self.session.runner.spec.retries,
            // Under an open load a refusal is a result.
            Load::Open { .. } => 0,
        }
    }

    /// Asks to the end. Returns the last row.
    pub fn run(&self) -> Result<Row, EvalError> {
        let mut answers: Vec<Answer> = Vec::new();
        let mut more: Vec<Turn> = Vec::new();
        let mut attempt = 0;
        loop {
            let turn = answers.len() as u32;
            let row = self.request(&answers, &more, turn, attempt)?;
            if row.outcome == Outcome::Failed {
                self.session.log.append(&row)?;
                if attempt >= self.tries() || is_stopping(self.session) {
                    return Ok(row);
                }
                self.pause(&row, attempt);
                attempt += 1;
                continue;
            }
            answers.push(row.exchange.answer.clone());
            let said = row.exchange.answer.clone();
            let next = match row.outcome {
                Outcome::Open if turn + 1 < TURNS => self.task.follow_up(self.item, &answers),
                _ => None,
            };
            let Some(next) = next else {
                drop(self.place.take());
                let row = self.judge(row, &answers);
                self.session.log.append(&row)?;
                return Ok(row);
            };
            self.session.log.append(&row)?;
            more.push(Turn { tool_calls: said.tool_calls, ..Turn::text(Role::Assistant, said.text) });
            more.extend(next);
        }
    }

    /// Waits as long as the endpoint asks for, else twice as long each time.
    fn pause(&self, row: &Row, attempt: u32) {
        let asked = row.exchange.fault.as_ref().and_then(|f| f.retry_after_s).map(Duration::from_secs);
        let own = Duration::from_millis(250 << attempt.min(6));
        std::thread::sleep(asked.unwrap_or(own).min(RETRY_AFTER_MAX));
    }

    fn request(&self, answers: &[Answer], more: &[Turn], turn: u32, attempt: u32) -> Result<Row, EvalError> {
        let (session, runner, spec) = (self.session, self.session.runner, self.session.runner.spec);
        let salt = match spec.cache {
            CacheState::Cold => Some(salt_line(session.salt, self.cell, attempt)),
            CacheState::Warm | CacheState::Mixed => None,
        };
        let mut prompt = salted(&self.item.prompt, salt.as_deref());
        prompt.turns.extend_from_slice(more);
        if turn > 0 || spec.protocol == Protocol::Chat {
            // The lead-in belongs to the first answer of the raw protocol, and to no count of another.
            prompt.lead_in = None;
        }
        let ask = Ask {
            prompt: &prompt,
            protocol: spec.protocol,
            max_tokens: spec.answer_tokens.unwrap_or(self.item.answer_tokens),
            stop: &spec.stop,
            ignore_eos: spec.ignore_eos,
            logprobs: false,
            limits: runner.limits,
        };
        let mut exchange = runner.endpoint.ask(&ask, &session.clock);
        // Counting a long prompt takes longer than sending it: never before it is sent.
        let text = body::raw_text(&prompt);
        let counter = runner.kit.counter;
        let (prompt_bytes, prompt_tokens) = (text.len(), counter.count(&text));
        drop(text);
        spread_tokens(&mut exchange, counter);
        let outcome = self.outcome(&exchange, prompt_tokens, answers);
        let needed: Vec<f64> = self.item.facts.iter().filter(|f| f.needed).map(|f| f.depth).collect();
        Ok(Row {
            cell: self.cell.clone(),
            turn,
            attempt,
            session: session.number,
            salt,
            prompt_blake3: pack::prompt_hash(self.item),
            prompt_bytes,
            prompt_tokens,
            cluster: self
                .item
                .recipe
                .get("cluster")
                .and_then(|v| v.as_u64())
                .unwrap_or(self.cell.index.into()),
            depth: (!needed.is_empty()).then(|| needed.iter().sum::<f64>() / needed.len() as f64),
            scheduled_us: self.scheduled.filter(|_| turn == 0).map(|s| s.0),
            queued_us: self.scheduled.filter(|_| turn == 0).map_or(0, |s| s.1),
            outcome,
            score: None,
            chance: self.task.chance(self.item),
            exchange,
        })
    }

    fn outcome(&self, exchange: &Exchange, ours: usize, answers: &[Answer]) -> Outcome {
        match &exchange.fault {
            Some(fault) if fault.kind == FaultKind::Overflow => return Outcome::Overflow,
            Some(_) => return Outcome::Failed,
            None => {}
        }
        // Pictures and tools only add to the endpoint's count, so the text alone is a lower bound.
        let cut =
            exchange.usage.prompt_tokens.is_some_and(|t| is_cut(ours, t, self.session.runner.tolerance));
        if cut {
            return Outcome::CutPrompt;
        }
        let mut all = answers.to_vec();
        all.push(exchange.answer.clone());
        if self.task.follow_up(self.item, &all).is_some() { Outcome::Open } else { Outcome::Scored }
    }

    /// Scores an answered item. An answer that the limit cut before it was right is no miss.
    fn judge(&self, mut row: Row, answers: &[Answer]) -> Row {
        if matches!(row.outcome, Outcome::CutPrompt | Outcome::Overflow) {
            return row;
        }
        let score = self.task.score(self.item, answers);
        let cut = answers.last().is_some_and(|a| a.finish == Finish::Length);
        row.outcome = if cut && score.compatible < 1.0 { Outcome::CutAnswer } else { Outcome::Scored };
        row.score = Some(score);
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::count::Bytes;
    use crate::endpoint::{Chunk, Usage};

    #[test]
    fn a_bundle_of_four_tokens_counts_four() {
        let mut x = Exchange {
            chunks: vec![
                Chunk(1, Carries::Nothing, 0, None),
                Chunk(2, Carries::Answer, 8, None),
                Chunk(3, Carries::Answer, 4, None),
            ],
            usage: Usage { completion_tokens: Some(6), ..Usage::default() },
            answer: Answer { text: "aaaabbbbcccc".into(), ..Answer::default() },
            ..Exchange::default()
        };
        spread_tokens(&mut x, &Bytes);
        assert_eq!(x.chunks.iter().map(|c| c.3).collect::<Vec<_>>(), [None, Some(4.0), Some(2.0)]);
        assert_eq!(x.tokens_by, TokensBy::Counter);
    }

    #[test]
    fn no_two_prompts_begin_alike() {
        let cell = |index| Cell { task: "t".into(), length_tokens: 9, index, view: Default::default() };
        let lines = [
            salt_line(1, &cell(0), 0),
            salt_line(1, &cell(1), 0),
            salt_line(1, &cell(0), 1),
            salt_line(2, &cell(0), 0),
        ];
        for (i, a) in lines.iter().enumerate() {
            assert!(lines[..i].iter().all(|b| a != b));
        }
        let prompt = Prompt { turns: vec![Turn::text(Role::User, "x")], ..Prompt::default() };
        let with = salted(&prompt, Some("[s]\n"));
        assert_eq!(body::raw_text(&with), "[s]\nx");
    }
}
