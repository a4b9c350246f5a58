//! Tool calling at length: ten to a thousand functions with near-twin names on offer, the value of an argument hidden at depth. Kinds: one
//! call; several at once; a function that is missing (nothing may be called); a result that a later one replaced; and a small store whose
//! state is checked after several rounds. Gold comes from the simulator, never from a model.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::build::{Frame, Insert, answer_tokens, depths, prose, rng};
use super::options::Options;
use super::values::{Kind, Source};
use crate::EvalError;
use crate::corpus::words;
use crate::item::{Answer, Cell, Failure, Finish, Item, Role, Score, ToolCall, Turn, View};
use crate::rng::ItemRng;
use crate::score::retrieval::{judged, says};
use crate::task::{Kit, Knob, Range, Task};

/// The family.
pub struct ToolCalling;

/// What is to be said where no function fits.
const NO_TOOL: &str = "no suitable tool";
/// Rounds of the store at most: a model that only looks things up comes to an end.
const MOST_ROUNDS: usize = 6;
/// Stock that the store is to be filled up to.
const FULL: i64 = 100;

const ACTIONS: [&str; 4] = ["order", "return", "inspect", "reserve"];

fn function(action: &str, noun: &str, adjective: &str) -> String {
    format!("{action}_{adjective}_{noun}")
}

fn schema(name: &str) -> Value {
    let (action, thing) = name.split_once('_').unwrap_or((name, ""));
    json!({"type": "function", "function": {
        "name": name,
        "description": format!("{action} {}: by its stock code", thing.replace('_', " ")),
        "parameters": {"type": "object", "properties": {
            "code": {"type": "string", "description": "stock code"},
            "quantity": {"type": "integer", "description": "pieces"}
        }, "required": ["code", "quantity"]}
    }})
}

fn look_up_schema() -> Value {
    json!({"type": "function", "function": {
        "name": "look_up_stock",
        "description": "how many pieces of a stock code lie in the store",
        "parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "stock code"}}, "required": ["code"]}
    }})
}

/// A call in one form, whatever order and white space its arguments came in; nothing if they are no JSON object. Numbers that are whole
/// count as integers, however they are written.
fn canonical(call: &ToolCall) -> Option<String> {
    let arguments: BTreeMap<String, Value> = serde_json::from_str(&call.arguments).ok()?;
    let plain = |v: Value| match v.as_f64() {
        Some(x) if x.fract() == 0.0 && x.abs() < 1e15 => json!(x as i64),
        _ => v,
    };
    let arguments: BTreeMap<String, Value> = arguments.into_iter().map(|(k, v)| (k, plain(v))).collect();
    Some(format!("{} {}", call.name, json!(arguments)))
}

fn call(id: usize, name: &str, arguments: Value) -> ToolCall {
    ToolCall { id: format!("call_{id}"), name: name.into(), arguments: arguments.to_string() }
}

fn order(id: usize, name: &str, code: &str, quantity: i64) -> ToolCall {
    call(id, name, json!({"code": code, "quantity": quantity}))
}

fn calls(calls: Vec<ToolCall>) -> Answer {
    Answer { tool_calls: calls, finish: Finish::ToolCalls, ..Answer::default() }
}

/// The call that a gold answer or decoy stands for.
fn parse(text: &str) -> Option<ToolCall> {
    let (name, arguments) = text.split_once(' ')?;
    arguments.starts_with('{').then(|| ToolCall {
        id: "call_0".into(),
        name: name.into(),
        arguments: arguments.into(),
    })
}

/// The orders that must be made, as functions and codes, and the tools on offer.
struct Shop {
    tools: Vec<Value>,
    names: Vec<String>,
    codes: Vec<String>,
    quantities: Vec<i64>,
    twins: Vec<String>,
}

impl Shop {
    fn draw(rng: &mut ItemRng, offered: usize, kind: &str) -> Shop {
        let wanted = if kind == "parallel" { 3 } else { 1 };
        let (nouns, adjectives) = (rng.distinct(wanted, words::nouns().len()), words::adjectives());
        let mut codes = Source::new(Kind::Code);
        let names: Vec<String> =
            nouns.iter().map(|&n| function("order", words::nouns()[n], rng.word(adjectives))).collect();
        // Near-twins first: another action, another adjective; then anything.
        let mut others: Vec<String> = Vec::new();
        for name in &names {
            let parts: Vec<&str> = name.split('_').collect();
            others.extend(ACTIONS[1..].iter().map(|a| function(a, parts[2], parts[1])));
            others.extend((0..3).map(|_| function("order", parts[2], rng.word(adjectives))));
        }
        let twins: Vec<String> = others.iter().filter(|o| !names.contains(o)).cloned().collect();
        let mut all = if kind == "missing" { Vec::new() } else { names.clone() };
        all.extend(twins.iter().cloned());
        while all.len() < offered {
            all.push(function(rng.word(&ACTIONS), rng.word(words::nouns()), rng.word(adjectives)));
            if names.contains(&all[all.len() - 1]) {
                all.pop();
            }
        }
        let mut seen = std::collections::BTreeSet::new();
        all.retain(|n| seen.insert(n.clone()));
        rng.shuffle(&mut all);
        let mut tools: Vec<Value> = all.iter().map(|n| schema(n)).collect();
        if kind == "state" {
            tools.push(look_up_schema());
        }
        let codes = names.iter().map(|_| codes.must(rng)).collect();
        let quantities = names.iter().map(|_| 2 + rng.below(90) as i64).collect();
        Shop { tools, names, codes, quantities, twins }
    }

    fn gold(&self) -> Vec<String> {
        let each = self.names.iter().zip(&self.codes).zip(&self.quantities);
        each.map(|((n, c), q)| canonical(&order(0, n, c, *q)).unwrap_or_default()).collect()
    }

    /// Sentences that give the stock codes in force, and for a replaced code the call that would use it.
    fn facts(&self, rng: &mut ItemRng, kind: &str, first: f64) -> (Vec<Insert>, Option<String>) {
        let mut inserts: Vec<Insert> = self
            .names
            .iter()
            .zip(&self.codes)
            .zip(depths(first, self.names.len()))
            .map(|((name, code), depth)| Insert {
                text: format!(" The stock code of the {}: {code}.", Shop::thing(name)),
                depth,
                needed: true,
            })
            .collect();
        if kind != "stale" {
            return (inserts, None);
        }
        let (thing, code) = (Shop::thing(&self.names[0]), &self.codes[0]);
        let mut source = Source::new(Kind::Code);
        let old = loop {
            let old = source.must(rng);
            if old != *code {
                break old;
            }
        };
        inserts[0].text =
            format!(" New list, replaces all older ones: the stock code of the {thing}: {code}.");
        let depth = inserts[0].depth * rng.unit();
        let text = format!(" Old list: the stock code of the {thing}: {old}.");
        inserts.insert(0, Insert { text, depth, needed: false });
        (inserts, canonical(&order(0, &self.names[0], &old, self.quantities[0])))
    }

    fn thing(name: &str) -> String {
        name.split_once('_').map_or(name, |(_, thing)| thing).replace('_', " ")
    }

    fn request(&self, kind: &str) -> String {
        if kind == "state" {
            let thing = Shop::thing(&self.names[0]);
            return format!(
                "\nLook up how many pieces of the {thing} lie in the store, then order as many as are missing to {FULL}. Its stock code is in the text above."
            );
        }
        let each: Vec<String> = self
            .names
            .iter()
            .zip(&self.quantities)
            .map(|(n, q)| format!("{q} pieces of the {}", Shop::thing(n)))
            .collect();
        format!(
            "\nOrder {}, each by one call of its own function, all at once. The stock codes in force are in the text above. If a function is \
             missing, call nothing and answer \"{NO_TOOL}\".",
            each.join(" and ")
        )
    }
}

impl Task for ToolCalling {
    fn name(&self) -> &'static str {
        "tool_calling"
    }

    fn about(&self) -> &'static str {
        "the right function out of many near-twins, with an argument from the depth of the text"
    }

    fn knobs(&self) -> &'static [Knob] {
        const KNOBS: &[Knob] = &[
            Knob {
                name: "tools",
                range: Range::Whole { least: 10, most: 1000, default: Some(10) },
                about: "functions on offer",
            },
            Knob {
                name: "kind",
                range: Range::Word(&["one", "parallel", "missing", "stale", "state"]),
                about: "one call; several; none fits; a value that was replaced; rounds with a state",
            },
        ];
        KNOBS
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        let options = Options::of(self, &cell.task)?;
        let kind = options.word("kind");
        let mut facts = rng(kit, cell, "facts");
        let shop = Shop::draw(&mut facts, options.count("tools"), kind);
        let tool_tokens: usize = shop.tools.iter().map(|t| kit.counter.count(&t.to_string())).sum();
        // Tools are part of the prompt: the text gets what they leave.
        let text_cell =
            Cell { length_tokens: cell.length_tokens.saturating_sub(tool_tokens), ..cell.clone() };
        let orders = shop.gold();
        let mut decoys: Vec<String> = Vec::new();
        for (twin, (code, quantity)) in shop.twins.iter().zip(shop.codes.iter().zip(&shop.quantities).cycle())
        {
            decoys.extend(canonical(&order(0, twin, code, *quantity)));
        }
        let gold = if kind == "missing" { vec![NO_TOOL.to_string()] } else { orders };
        let (inserts, stale) = shop.facts(&mut facts, kind, super::build::depth(kit, cell));
        decoys.extend(stale);
        let frame = Frame {
            kit,
            cell: &text_cell,
            head: "You run a store by calling functions. The text below holds stock codes.\n".into(),
            tail: shop.request(kind),
            lead_in: None,
            answer_tokens: answer_tokens(kit, 128, &gold) * if kind == "state" { 3 } else { 1 },
        };
        let whole = |e| match e {
            EvalError::TooShort { task, least_tokens, .. } => EvalError::TooShort {
                task,
                length_tokens: cell.length_tokens,
                least_tokens: least_tokens + tool_tokens,
            },
            other => other,
        };
        let context =
            frame.fill(&inserts, 5, prose(kit.haystack, &mut rng(kit, cell, "filler"))).map_err(whole)?;
        let more = [
            ("kind", json!(kind)),
            ("code", json!(shop.codes[0])),
            ("function", json!(shop.names[0])),
            ("stock", json!(FULL - shop.quantities[0])),
            ("tool_tokens", json!(tool_tokens)),
            ("written", json!(false)),
        ];
        let mut item = frame.finish(context, gold, decoys, more).map_err(whole)?;
        item.cell = cell.clone();
        item.prompt.tools = shop.tools;
        item.prompt_tokens += tool_tokens;
        if cell.view == View::ClosedBook {
            item.facts.clear();
        }
        Ok(item)
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let kind = item.recipe["kind"].as_str().unwrap_or("");
        let answer = super::last(answers);
        let made: Vec<&ToolCall> = answers.iter().flat_map(|a| &a.tool_calls).collect();
        if kind == "missing" {
            let said = answer.text.to_lowercase();
            let named =
                item.decoys.iter().any(|d| said.contains(d.to_lowercase().split(' ').next().unwrap_or(d)));
            let right = f64::from(made.is_empty() && said.contains(NO_TOOL));
            return judged(answer, right, if named { 0.0 } else { right }, Failure::Wrong);
        }
        let parsed: Vec<Option<String>> = made.iter().map(|c| canonical(c)).collect();
        let changing: Vec<&String> =
            parsed.iter().flatten().filter(|c| !c.starts_with("look_up_stock ")).collect();
        let mut open: Vec<&String> = item.gold.iter().collect();
        let mut wrong = 0;
        for call in &changing {
            match open.iter().position(|g| g == call) {
                Some(i) => drop(open.swap_remove(i)),
                None => wrong += 1,
            }
        }
        let invalid = parsed.iter().filter(|c| c.is_none()).count();
        let hits = item.gold.len() - open.len();
        let share = hits as f64 / item.gold.len().max(1) as f64;
        let strict = hits.saturating_sub(wrong + invalid) as f64 / item.gold.len().max(1) as f64;
        let decoy = changing.iter().any(|c| item.decoys.contains(c));
        let why = match (hits, wrong + invalid) {
            (0, 0) => Failure::Unparsed,
            _ if invalid > 0 => Failure::Unparsed,
            (0, _) if decoy => Failure::Decoy,
            (0, _) => Failure::Wrong,
            (_, 0) => Failure::Partial,
            _ => Failure::Listed,
        };
        let mut score = judged(answer, if wrong + invalid == 0 { share } else { 0.0 }, strict, why);
        score.detail.insert("calls".into(), made.len() as f64);
        score.detail.insert("valid_json".into(), f64::from(invalid == 0));
        score
    }

    fn follow_up(&self, item: &Item, answers: &[Answer]) -> Option<Vec<Turn>> {
        if item.recipe["kind"] != json!("state") || answers.len() >= MOST_ROUNDS {
            return None;
        }
        let last = answers.last()?;
        // An order ends the item: its effect on the store is what is judged.
        let looks = last.tool_calls.iter().all(|c| c.name == "look_up_stock");
        if last.tool_calls.is_empty() || !looks {
            return None;
        }
        let reply = |c: &ToolCall| {
            let asked: Value = serde_json::from_str(&c.arguments).unwrap_or(Value::Null);
            let known = asked.get("code").is_some() && asked.get("code") == item.recipe.get("code");
            let text = if known {
                json!({"pieces": item.recipe["stock"]}).to_string()
            } else {
                json!({"error": "unknown stock code"}).to_string()
            };
            Turn { tool_call_id: Some(c.id.clone()), ..Turn::text(Role::Tool, text) }
        };
        Some(last.tool_calls.iter().map(reply).collect())
    }

    fn right_answer(&self, item: &Item, answers: &[Answer]) -> Answer {
        let kind = item.recipe["kind"].as_str().unwrap_or("");
        match kind {
            "missing" => says(NO_TOOL),
            "state" if answers.is_empty() => {
                calls(vec![call(0, "look_up_stock", json!({"code": item.recipe["code"]}))])
            }
            _ => calls(item.gold.iter().filter_map(|g| parse(g)).collect()),
        }
    }

    fn chance(&self, item: &Item) -> f64 {
        let pool: Vec<Answer> = item.gold.iter().chain(&item.decoys).map(|t| answer(t)).collect();
        let sum: f64 = pool.iter().map(|a| self.score(item, std::slice::from_ref(a)).compatible).sum();
        sum / pool.len().max(1) as f64
    }

    fn guess(&self, item: &Item, draw: &mut dyn FnMut(usize) -> usize) -> Answer {
        let pool: Vec<&String> = item.gold.iter().chain(&item.decoys).collect();
        answer(pool[draw(pool.len())])
    }
}

/// What a gold answer or decoy looks like as an answer.
fn answer(text: &str) -> Answer {
    parse(text).map_or_else(|| says(text), |c| calls(vec![c]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::Prose;
    use crate::count::Bytes;

    fn item(kind: &str, tools: usize) -> Item {
        let kit = Kit { seed: 3, counter: &Bytes, haystack: Prose::shipped() };
        let task = format!("tool_calling:kind={kind},tools={tools}");
        let cell = Cell { task, length_tokens: 400 * tools + 8000, index: 4, view: View::Full };
        ToolCalling.item(&kit, &cell).unwrap()
    }

    #[test]
    fn every_kind_is_right_when_played_right_and_offers_its_tools() {
        for kind in ["one", "parallel", "missing", "stale", "state"] {
            for tools in [10, 300] {
                let item = item(kind, tools);
                assert!(item.prompt.tools.len().abs_diff(tools) <= 12, "{kind}: {}", item.prompt.tools.len());
                let mut answers = vec![ToolCalling.right_answer(&item, &[])];
                while ToolCalling.follow_up(&item, &answers).is_some() {
                    answers.push(ToolCalling.right_answer(&item, &answers));
                }
                assert_eq!(answers.len(), if kind == "state" { 2 } else { 1 });
                let score = ToolCalling.score(&item, &answers);
                assert_eq!((score.compatible, score.strict, score.failure), (1.0, 1.0, None), "{kind}");
            }
        }
    }

    #[test]
    fn wrong_calls_cost_and_broken_json_is_unparsed() {
        let one = item("one", 10);
        let mut right = ToolCalling.right_answer(&one, &[]);
        let twin = parse(&one.decoys[0]).unwrap();
        right.tool_calls.push(twin.clone());
        assert_eq!(ToolCalling.score(&one, &[right.clone()]).failure, Some(Failure::Listed));
        right.tool_calls = vec![twin];
        assert_eq!(ToolCalling.score(&one, &[right.clone()]).failure, Some(Failure::Decoy));
        right.tool_calls[0].arguments = "{\"code\":".into();
        assert_eq!(ToolCalling.score(&one, &[right]).failure, Some(Failure::Unparsed));
        // 7.0 is 7, and order and white space of arguments mean nothing.
        let said = ToolCall {
            id: String::new(),
            name: "f".into(),
            arguments: "{ \"b\": 7.0, \"a\": \"x\" }".into(),
        };
        assert_eq!(canonical(&said).unwrap(), "f {\"a\":\"x\",\"b\":7}");
    }

    #[test]
    fn a_call_where_none_fits_is_wrong() {
        let missing = item("missing", 10);
        let called = answer(&missing.decoys[0]);
        assert_eq!(ToolCalling.score(&missing, &[called]).strict, 0.0);
    }

    #[test]
    fn a_store_that_is_only_looked_at_comes_to_an_end() {
        let state = item("state", 10);
        let look = ToolCalling.right_answer(&state, &[]);
        let mut answers = vec![look.clone()];
        while ToolCalling.follow_up(&state, &answers).is_some() {
            answers.push(look.clone());
        }
        assert_eq!(answers.len(), MOST_ROUNDS);
        assert!(ToolCalling.score(&state, &answers).failure.is_some());
    }
}
