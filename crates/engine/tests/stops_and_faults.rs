//! The engine on a scripted model: stop strings, broken logits, failing and leaking steps.

mod common;

use common::*;
use suanpan_engine::sample::LogitFault;
use suanpan_engine::{FinishReason, RequestError, SamplingParams, StopReason};

const PROMPT: &str = "own fox";

fn say(text: &'static str, params: SamplingParams) -> Answer {
    let mut engine = speaking(options(16), PROMPT.len(), text);
    run(&mut engine, vec![request(PROMPT, params)]).remove(0)
}

fn stops(stop: &[&str]) -> SamplingParams {
    SamplingParams { stop: stop.iter().map(|s| s.to_string()).collect(), ..SamplingParams::greedy(60) }
}

#[test]
fn a_stop_string_ends_the_text_before_itself_and_not_in_the_prompt() {
    let fox = "The quick brown fox jumps";
    let hit = say(fox, stops(&["own fox"]));
    assert_eq!(hit.text, "The quick br");
    assert_eq!(hit.end, Some((FinishReason::Stop, Some(StopReason::Text("own fox".into())))));
    assert_eq!(say(fox, stops(&["own cat"])).text, fox);
    assert_eq!(say(fox, stops(&["jumps over"])).text, fox, "the held tail arrives at the end token");
    assert_eq!(say(fox, stops(&["fox j", "own fox"])).text, "The quick br");
    let limited = say(fox, SamplingParams { max_tokens: Some(22), ..stops(&["jumps"]) });
    assert_eq!((limited.text.as_str(), limited.reason()), ("The quick brown fox ju", FinishReason::Length));
    let kept = say(fox, SamplingParams { include_stop_str_in_output: true, ..stops(&["own fox"]) });
    assert_eq!(kept.text, "The quick brown fox");
    let late = say(fox, SamplingParams { min_tokens: 19, ..stops(&["own fox", "mp"]) });
    assert_eq!(late.text, "The quick brown fox ju");
}

#[test]
fn stop_tokens_and_characters_of_many_bytes() {
    let params = |include| SamplingParams {
        stop_token_ids: vec![u32::from(b'!')],
        include_stop_str_in_output: include,
        ..SamplingParams::greedy(60)
    };
    let cut = say("né ☃! more", params(false));
    assert_eq!(cut.text, "né ☃");
    assert_eq!(cut.end, Some((FinishReason::Stop, Some(StopReason::Token(33)))));
    assert_eq!(say("né ☃! more", params(true)).text, "né ☃!");
    let torn = say("a☃", SamplingParams { logprobs: Some(0), ..SamplingParams::greedy(3) });
    assert_eq!(torn.text, "a\u{FFFD}", "a character cut by the limit is flushed as one replacement");
    let joined: String = torn.logprobs.iter().map(|p| p.text.as_str()).collect();
    assert_eq!(joined, torn.text);
}

#[test]
fn broken_logits_fail_their_request_and_no_other() {
    let next = |token: u32, position: usize| {
        let mut row = one_hot(token);
        if token == u32::from(b'x') && position == 5 {
            row[7] = f32::NAN;
        }
        row
    };
    let mut engine = scripted(options(64), Scripted::boxed(next));
    let answers = run(
        &mut engine,
        vec![request("aaa", exactly(20)), request("xxx", exactly(20)), request("bbb", exactly(20))],
    );
    assert_eq!(answers[1].error, Some(RequestError::Logits { index: 3, fault: LogitFault::NotFinite }));
    assert_eq!(answers[1].text, "xxx");
    assert_eq!((answers[0].text.len(), answers[2].text.len()), (20, 20));
    let again = run(&mut engine, vec![request("ccc", exactly(3))]).remove(0);
    assert_eq!(again.text, "ccc", "the engine goes on");
}

#[test]
fn a_broken_prompt_is_no_prefix_for_others() {
    let broken = std::sync::atomic::AtomicBool::new(true);
    let next = move |token: u32, position: usize| {
        let first_time = position == 39 && broken.swap(false, std::sync::atomic::Ordering::Relaxed);
        if first_time { vec![f32::NAN; 256] } else { one_hot(token) }
    };
    let mut engine = scripted(options(64), Scripted::boxed(next));
    let prompt = "x".repeat(40);
    let first = run(&mut engine, vec![request(&prompt, exactly(3))]).remove(0);
    assert!(matches!(first.error, Some(RequestError::Logits { index: 0, .. })));
    assert_eq!(engine.stats().pages_free, 64, "nothing it computed stays");
    let second = run(&mut engine, vec![request(&prompt, exactly(3))]).remove(0);
    assert_eq!((second.text.as_str(), second.books.cached_tokens), ("xxx", 0));
}

#[test]
fn ten_thousand_submissions_and_aborts_return_the_pool_to_the_start() {
    let mut engine = scripted(options(40), Scripted::boxed(|token, _| one_hot(token)));
    let prompts: Vec<String> =
        (0..7).map(|i| char::from(b'a' + i).to_string().repeat(20 + 30 * usize::from(i))).collect();
    let mut live = std::collections::VecDeque::new();
    for i in 0..10_000usize {
        live.push_back(engine.submit(request(&prompts[i % 7], exactly(1 + i % 50))).unwrap());
        if i % 3 == 0 {
            engine.step();
        }
        if live.len() > i % 13 {
            let at = i * 7 % live.len();
            engine.abort(live.remove(at).unwrap());
        }
        if i % 1000 == 0 {
            engine.check().unwrap();
        }
    }
    live.into_iter().for_each(|key| drop(engine.abort(key)));
    assert_idle(&engine);
    engine.clear_prefix_cache();
    assert_eq!(engine.stats().pages_free, 40);
}

#[test]
fn identical_ids_do_not_disturb_each_other() {
    let mut engine = scripted(options(64), Scripted::boxed(|token, _| one_hot(token)));
    let first = engine.submit(request("aaa", exactly(9))).unwrap();
    engine.submit(request("bbb", exactly(9))).unwrap();
    engine.step();
    engine.abort(first);
    let mut answers = std::collections::HashMap::new();
    drive(&mut engine, &mut answers);
    let texts: Vec<&str> = answers.values().map(|a| a.text.as_str()).filter(|t| t.len() > 1).collect();
    assert_eq!(texts, ["bbbbbbbb"], "the first token came before the map was kept");
}
