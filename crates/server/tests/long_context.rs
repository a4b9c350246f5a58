//! The constructed models through a real server: every needle, list and chain, at a few thousand tokens, or at the lengths in SUANPAN_LONG_TOKENS.
//!
//! `SUANPAN_LONG_TOKENS=65536,262144 cargo test --release -p suanpan-server --test long_context -- --nocapture` prints docs/constructed.md's table;
//! SUANPAN_LONG_HOPS chooses the hops of the chain model.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Server, completion, post_bytes, send_within};
use suanpan_engine::EngineOptions;
use suanpan_model::chain::haystack::{Facts, Kind, haystack};
use suanpan_model::{LoadOptions, recall};
use suanpan_server::ServerOptions;

/// One thing to ask and the text that must come back.
struct Case {
    kind: &'static str,
    prompt: String,
    answer: String,
    max_tokens: usize,
}

fn lengths() -> Vec<usize> {
    let asked = std::env::var("SUANPAN_LONG_TOKENS").unwrap_or_else(|_| "3000".into());
    asked.split(',').map(|n| n.trim().parse().expect("SUANPAN_LONG_TOKENS: numbers between commas")).collect()
}

fn hops() -> usize {
    let asked = std::env::var("SUANPAN_LONG_HOPS").unwrap_or_else(|_| "4".into());
    asked.parse().expect("SUANPAN_LONG_HOPS: a number")
}

/// Asks every case over HTTP; right answers of each kind, of how many.
async fn ask(spec: &str, tokens: usize, cases: &[Case]) -> BTreeMap<&'static str, (usize, usize)> {
    let model = Arc::new(suanpan_model::load(spec, &LoadOptions::default(), &mut |_| ()).unwrap());
    let engine =
        EngineOptions { max_model_len: Some(tokens + 64), max_num_seqs: 2, ..EngineOptions::default() };
    let server = Server::with_model(model, engine, ServerOptions::default(), 8).await;
    let mut table = BTreeMap::new();
    let patience = Duration::from_secs(4 * 3600);
    for (i, case) in cases.iter().enumerate() {
        let start = Instant::now();
        let body = completion(&case.prompt, case.max_tokens);
        let bytes = post_bytes("/v1/completions", "", body.to_string().as_bytes());
        let reply = send_within(server.addr, &bytes, patience).await.json();
        let choice = &reply["choices"][0];
        let (right, asked) = table.entry(case.kind).or_insert((0, 0));
        let ok = choice["text"].as_str().map(|t| t.trim_end_matches('\n')) == Some(&case.answer)
            && choice["finish_reason"] == "stop";
        *right += usize::from(ok);
        *asked += 1;
        if !ok || i == 0 {
            println!(
                "{spec}, {tokens} tokens: {:?} for {:?} after {:.1} s",
                choice["text"],
                case.answer,
                start.elapsed().as_secs_f64()
            );
        }
        assert_eq!(
            reply["usage"]["ledger"]["agree"], true,
            "{spec}: the books of question {i}: {}",
            reply["usage"]
        );
    }
    for (kind, (right, asked)) in &table {
        println!("| {spec} | {tokens} | {kind} | {right} of {asked} |");
    }
    table
}

fn all_right(table: &BTreeMap<&'static str, (usize, usize)>) {
    assert!(!table.is_empty() && table.values().all(|(right, asked)| right == asked), "{table:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_needle_list_and_chain_is_right_through_the_server() {
    let hops = hops();
    for tokens in lengths() {
        let facts = Facts { singles: 10, neighbours: 10, lists: 6, values: 4, chains: 6, hops };
        let h = haystack(tokens as u64, tokens, facts).unwrap();
        let case = |q: &suanpan_model::chain::haystack::Question| Case {
            kind: q.kind.name(),
            prompt: format!("{}{}", h.text, q.prompt),
            answer: q.answer.clone(),
            max_tokens: if q.kind == Kind::MultiValue { 6 } else { 3 },
        };
        let cases: Vec<Case> = h.questions.iter().map(case).collect();
        all_right(&ask(&format!("builtin:chain:hops={hops}"), tokens, &cases).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fact_among_many_is_right_through_the_server() {
    for tokens in lengths() {
        let h = recall::haystack(tokens as u64, tokens, 12).unwrap();
        let case = |i: usize| Case {
            kind: "multi-key",
            prompt: format!("{}{}", h.text, h.question(i)),
            answer: h.answer(i),
            max_tokens: h.answer(i).len() + 2,
        };
        let cases: Vec<Case> = (0..h.facts.len()).map(case).collect();
        all_right(&ask("builtin:recall", tokens, &cases).await);
    }
}
