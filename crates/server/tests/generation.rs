//! What comes back when the request is right: texts, streams, choices, stops, log-probabilities, usage and books.

mod common;

use common::{Server, completion, fact, filler, long_completion, post_bytes, send, with};
use serde_json::{Value, json};
use suanpan_server::{Keys, ServerOptions};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const FOX: &str = "The quick brown fox jumps";

/// The model copies what followed `key-fox: ` in the context.
fn fox_prompt() -> String {
    format!("{}{}{}key-fox: ", filler(200), fact("key-fox", FOX), filler(90))
}

fn chat_of(prompt: &str, extra: Value) -> Value {
    let base =
        json!({"model": "suanpan", "messages": [{"role": "user", "content": prompt}], "temperature": 0});
    with(base, extra)
}

/// The text, finish reason and usage of a streamed reply, put together.
fn joined(events: &[Value], chat: bool) -> (String, String) {
    let mut text = String::new();
    let mut reason = String::new();
    for choice in events.iter().filter_map(|e| e["choices"].get(0)) {
        let piece = if chat { &choice["delta"]["content"] } else { &choice["text"] };
        text.push_str(piece.as_str().unwrap_or(""));
        if let Some(r) = choice["finish_reason"].as_str() {
            assert!(reason.is_empty(), "two ends");
            reason = r.into();
        }
    }
    (text, reason)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_answer_has_openais_shape_and_books_that_agree() {
    let server = Server::start().await;
    let reply = server.post(CHAT, &chat_of(&fox_prompt(), json!({}))).await.json();
    assert_eq!(reply["object"], "chat.completion");
    assert_eq!(reply["model"], "suanpan");
    assert!(reply["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")));
    let created = reply["created"].as_u64().expect("seconds");
    assert!((1_600_000_000..10_000_000_000).contains(&created), "{created} is not in seconds");
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": FOX, "refusal": null}));
    assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&json!("stop"), &Value::Null));
    let (usage, ledger) = (&reply["usage"], &reply["usage"]["ledger"]);
    assert_eq!(usage["prompt_tokens"], fox_prompt().len());
    // The newline that ends the value is drawn too.
    assert_eq!(usage["completion_tokens"], FOX.len() + 1);
    assert_eq!(usage["total_tokens"], fox_prompt().len() + FOX.len() + 1);
    assert_eq!(ledger["agree"], true);
    for name in ["computed_tokens", "attention_flops", "kv_read_bytes", "kv_write_bytes", "pages_peak"] {
        assert!(ledger[name].as_u64().is_some_and(|v| v > 0), "{name}: {ledger}");
        assert_eq!(ledger[name], ledger["predicted"][name], "{name}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_role_deltas_end_usage_and_done_in_this_order() {
    let server = Server::start().await;
    let extra = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events = server.post(CHAT, &chat_of(&fox_prompt(), extra)).await.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let last = events.last().expect("events");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["ledger"]["agree"], true);
    let end = &events[events.len() - 2]["choices"][0];
    assert_eq!((&end["finish_reason"], &end["delta"]), (&json!("stop"), &json!({})));
    for event in &events {
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["id"], last["id"]);
    }
    assert!(events[..events.len() - 1].iter().all(|e| e.get("usage") == Some(&Value::Null)));
    assert_eq!(joined(&events, true), (FOX.into(), "stop".into()));
    let plain = server.post(CHAT, &chat_of(&fox_prompt(), json!({"stream": true}))).await.events();
    assert!(plain.iter().all(|e| e.get("usage").is_none() && e["choices"][0]["index"] == 0));
    let extra =
        json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let counted = server.post(CHAT, &chat_of(&fox_prompt(), extra)).await.events();
    let totals: Vec<u64> = counted.iter().filter_map(|e| e["usage"]["completion_tokens"].as_u64()).collect();
    assert!(totals.len() == counted.len() && totals.is_sorted(), "{totals:?}");
    server.stop().await;
}

/// C32.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_that_spans_tokens_never_leaks_its_start() {
    let server = Server::start().await;
    let cases = [
        (json!(["own fox"]), "The quick br", "stop", json!("own fox")),
        (json!("own fox"), "The quick br", "stop", json!("own fox")),
        (json!(["own cat"]), FOX, "stop", Value::Null),
        (json!(["fox j", "own fox jumps"]), "The quick brown ", "stop", json!("fox j")),
        (json!(["jumps!", "mps\n"]), FOX, "stop", Value::Null),
        (json!(["key-fox"]), FOX, "stop", Value::Null),
    ];
    for (stop, text, reason, met) in cases {
        for (path, chat) in [(CHAT, true), (TEXT, false)] {
            let extra = json!({"stop": stop, "n": 2, "max_tokens": 60});
            let body = match chat {
                true => chat_of(&fox_prompt(), extra),
                false => with(completion(&fox_prompt(), 60), extra),
            };
            let whole = server.post(path, &body).await.json();
            for i in 0..2 {
                let choice = &whole["choices"][i];
                let got = if chat { &choice["message"]["content"] } else { &choice["text"] };
                assert_eq!(
                    (got.as_str(), choice["finish_reason"].as_str()),
                    (Some(text), Some(reason)),
                    "{stop}"
                );
                assert_eq!(choice["stop_reason"], met, "{stop}");
            }
            let events = server.post(path, &with(body, json!({"stream": true, "n": 1}))).await.events();
            assert_eq!(joined(&events, chat), (text.into(), reason.into()), "{stop} streamed on {path}");
        }
    }
    // Held back as a possible stop, and let go at the token limit.
    let cut = with(completion(&fox_prompt(), 15), json!({"stop": ["own cat"]}));
    let reply = server.post(TEXT, &cut).await.json();
    assert_eq!(reply["choices"][0]["text"], "The quick brown");
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    let kept =
        with(completion(&fox_prompt(), 60), json!({"stop": ["own"], "include_stop_str_in_output": true}));
    assert_eq!(server.post(TEXT, &kept).await.json()["choices"][0]["text"], "The quick brown");
    server.stop().await;
}

/// C31.
#[tokio::test(flavor = "multi_thread")]
async fn token_counts_are_exact_and_an_empty_completion_is_empty() {
    let server = Server::start().await;
    for count in [1, 5, 20] {
        let body = long_completion(&filler(50), count);
        let whole = server.post(TEXT, &with(body.clone(), json!({"return_token_ids": true}))).await.json();
        assert_eq!(whole["usage"]["completion_tokens"], count);
        assert_eq!(whole["choices"][0]["token_ids"].as_array().map(Vec::len), Some(count));
        assert_eq!(whole["choices"][0]["finish_reason"], "length");
        let extra =
            json!({"stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true});
        let events = server.post(TEXT, &with(body, extra)).await.events();
        let ids: usize =
            events.iter().filter_map(|e| e["choices"][0]["token_ids"].as_array()).map(Vec::len).sum();
        assert_eq!(ids, count);
        assert_eq!(events.last().expect("usage")["usage"]["completion_tokens"], count);
    }
    // The first token drawn is the end token: an empty text, and never the prompt.
    let empty = format!("{}{}{}key-nil: ", filler(64), fact("key-nil", ""), filler(32));
    for body in [completion(&empty, 20), with(completion(&empty, 20), json!({"n": 2}))] {
        let choice = &server.post(TEXT, &body).await.json()["choices"][0];
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(""), &json!("stop")));
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_come_prompt_by_prompt_also_in_a_stream() {
    let server = Server::start().await;
    let body =
        json!({"prompt": ["ab", "cd"], "n": 2, "echo": true, "max_tokens": 3, "ignore_eos": true, "seed": 5});
    let whole = server.post(TEXT, &body).await.json();
    let texts: Vec<&str> =
        whole["choices"].as_array().expect("choices").iter().filter_map(|c| c["text"].as_str()).collect();
    assert_eq!(texts.iter().map(|t| &t[..2]).collect::<Vec<_>>(), ["ab", "ab", "cd", "cd"]);
    let indices: Vec<_> =
        whole["choices"].as_array().expect("choices").iter().map(|c| c["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let usage = &whole["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(4), &json!(12)));
    let events = server.post(TEXT, &with(body.clone(), json!({"stream": true}))).await.events();
    for (i, text) in texts.iter().enumerate() {
        let of = |e: &&Value| e["choices"][0]["index"] == i;
        let streamed: String =
            events.iter().filter(of).filter_map(|e| e["choices"][0]["text"].as_str()).collect();
        assert_eq!(&streamed, text, "choice {i}");
    }
    // Choice 1 is what a single request with the next seed gives; the temperature makes the model's sure bets uncertain.
    let hot = json!({"prompt": "ab", "max_tokens": 8, "ignore_eos": true, "temperature": 100, "return_token_ids": true});
    let two = server.post(TEXT, &with(hot.clone(), json!({"n": 2, "seed": 5}))).await.json();
    let one = server.post(TEXT, &with(hot, json!({"seed": 6}))).await.json();
    assert_eq!(two["choices"][1]["token_ids"], one["choices"][0]["token_ids"]);
    assert_ne!(two["choices"][0]["token_ids"], two["choices"][1]["token_ids"]);
    server.stop().await;
}

/// C25.
#[tokio::test(flavor = "multi_thread")]
async fn c25_prompt_logprobs_are_the_same_after_a_prefix_hit_and_line_up_with_the_text() {
    let server = Server::start().await;
    let prompt = filler(48);
    let body = with(completion(&prompt, 1), json!({"echo": true, "logprobs": 1, "ignore_eos": true}));
    let first = server.post(TEXT, &body).await.json();
    let longer = with(body.clone(), json!({"prompt": format!("{prompt}{}", filler(32))}));
    server.post(TEXT, &longer).await;
    let again = server.post(TEXT, &body).await.json();
    let lists = |reply: &Value| reply["choices"][0]["logprobs"].clone();
    let (a, b) = (lists(&first), lists(&again));
    assert_eq!(a["token_logprobs"].as_array().map(Vec::len), Some(49));
    assert_eq!((&a["token_logprobs"][0], &a["top_logprobs"][0]), (&Value::Null, &Value::Null));
    for i in 1..49 {
        let (x, y) = (
            a["token_logprobs"][i].as_f64().expect("a number"),
            b["token_logprobs"][i].as_f64().expect("one"),
        );
        assert!((x - y).abs() <= 1e-3 && (-9999.0..=0.0).contains(&x), "position {i}: {x} {y}");
        assert!(a["top_logprobs"][i].as_object().is_some_and(|o| (1..=2).contains(&o.len())));
    }
    let text = first["choices"][0]["text"].as_str().expect("text");
    assert!(text.starts_with(&prompt));
    for (token, offset) in
        a["tokens"].as_array().expect("tokens").iter().zip(a["text_offset"].as_array().expect("offsets"))
    {
        let (token, offset) = (token.as_str().expect("text"), offset.as_u64().expect("offset") as usize);
        assert!(text[offset..].starts_with(token), "{token:?} at {offset}");
    }
    server.stop().await;
}

/// C25, second half: most of the vocabulary is ruled out.
#[tokio::test(flavor = "multi_thread")]
async fn c25_impossible_tokens_leave_the_json_strict() {
    let server = Server::start().await;
    let extra = json!({"logprobs": true, "top_logprobs": 5, "max_tokens": 3, "allowed_token_ids": [65, 66], "ignore_eos": true});
    let reply = server.post(CHAT, &chat_of(&filler(40), extra)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let content = reply.json()["choices"][0]["logprobs"]["content"].clone();
    let content = content.as_array().expect("entries");
    assert_eq!(content.len(), 3);
    for entry in content {
        assert!(["A", "B"].contains(&entry["token"].as_str().expect("a token")));
        assert_eq!(entry["bytes"].as_array().map(Vec::len), Some(1));
        assert_eq!(entry["top_logprobs"].as_array().map(Vec::len), Some(5));
        for candidate in entry["top_logprobs"].as_array().expect("candidates").iter().chain([entry]) {
            assert!(
                candidate["logprob"].as_f64().is_some_and(|v| (-9999.0..=0.0).contains(&v)),
                "{candidate}"
            );
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn vllms_prompt_logprobs_and_pure_scoring_work() {
    let server = Server::start().await;
    let scored = with(completion("abcabcabc", 0), json!({"echo": true, "logprobs": 2}));
    let reply = server.post(TEXT, &scored).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let reply = reply.json();
    assert_eq!(reply["choices"][0]["text"], "abcabcabc");
    assert_eq!(reply["choices"][0]["logprobs"]["tokens"].as_array().map(Vec::len), Some(9));
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    assert!(reply["choices"][0].get("prompt_logprobs").is_none());
    let extra = json!({"prompt_logprobs": 1, "max_tokens": 1});
    let chat = server.post(CHAT, &chat_of("abcabcabc", extra)).await.json();
    let list = chat["prompt_logprobs"].as_array().expect("a list");
    assert_eq!((list.len(), &list[0]), (9, &Value::Null));
    let entry = list[5]
        .as_object()
        .expect("candidates")
        .get(&(u32::from(b'c')).to_string())
        .expect("the token itself");
    assert!(entry["rank"].as_u64().is_some_and(|r| r >= 1) && entry["decoded_token"] == "c", "{entry}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cached_prefixes_are_reported_and_split_by_salt() {
    let server = Server::start().await;
    let prompt = filler(200);
    let cached =
        |reply: Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    assert_eq!(cached(server.post(TEXT, &completion(&prompt, 1)).await.json()), 0);
    let again = server.post(TEXT, &completion(&prompt, 1)).await.json();
    assert_eq!(again["usage"]["ledger"]["agree"], true);
    let hit = cached(again);
    assert!(hit > 0 && hit < 200, "{hit}");
    for salt in ["mine", "yours"] {
        let salted = with(completion(&prompt, 1), json!({"cache_salt": salt}));
        assert_eq!(cached(server.post(TEXT, &salted).await.json()), 0, "{salt}");
        assert_eq!(cached(server.post(TEXT, &salted).await.json()), hit, "{salt}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_keys_prompts_are_never_found_by_another_key() {
    let api_keys = Keys::new(vec!["first".into(), "second".into()]).expect("valid keys");
    let options = ServerOptions { api_keys, ..ServerOptions::default() };
    let server = Server::with(common::engine_options(), options).await;
    let body = completion(&filler(200), 1).to_string();
    let cached = async |key: &str| {
        let header = format!("Authorization: Bearer {key}\r\n");
        let reply = send(server.addr, &post_bytes(TEXT, &header, body.as_bytes())).await.json();
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
    };
    assert_eq!((cached("first").await, cached("second").await), (0, 0));
    assert!(cached("first").await > 0 && cached("second").await > 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokenize_and_detokenize_are_inverse() {
    let server = Server::start().await;
    let text = "Grüße, 世界! 🎉";
    let reply = server.post("/tokenize", &json!({"prompt": text, "return_token_strs": true})).await.json();
    assert_eq!(reply["count"], text.len());
    assert_eq!(reply["max_model_len"], common::MAX_MODEL_LEN);
    assert_eq!((&reply["token_strs"][0], &reply["token_strs"][2]), (&json!("G"), &json!("bytes:\\xc3")));
    let back = server.post("/detokenize", &json!({"tokens": reply["tokens"]})).await.json();
    assert_eq!(back["prompt"], text);
    let chat =
        server.post("/tokenize", &json!({"messages": [{"role": "user", "content": "abc"}]})).await.json();
    assert_eq!(chat["tokens"], json!([97, 98, 99]));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_character_is_never_cut_in_a_stream() {
    let server = Server::start().await;
    let prompt = format!("{}{}{}key-uni: ", filler(80), fact("key-uni", "a🎉é世b"), filler(40));
    let events = server.post(TEXT, &with(completion(&prompt, 40), json!({"stream": true}))).await.events();
    let pieces: Vec<&str> = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(pieces.concat(), "a🎉é世b");
    assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')), "{pieces:?}");
    server.stop().await;
}

/// `best_of`: of the choices that `n` would give, the ones with the highest mean log-probability a token, the best first; all are paid for.
#[tokio::test(flavor = "multi_thread")]
async fn best_of_returns_the_likeliest_of_the_choices_it_draws() {
    let server = Server::start().await;
    let hot =
        json!({"prompt": "a b c d", "max_tokens": 6, "temperature": 100, "seed": 3, "ignore_eos": true});
    let all = server.post(TEXT, &with(hot.clone(), json!({"n": 5, "logprobs": 0}))).await.json();
    let mean = |choice: &Value| {
        let list = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        list.iter().map(|x| x.as_f64().unwrap()).sum::<f64>() / list.len() as f64
    };
    let mut ranked: Vec<(f64, String)> = all["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (mean(c), c["text"].as_str().unwrap().to_owned()))
        .collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    let best = server.post(TEXT, &with(hot.clone(), json!({"n": 2, "best_of": 5}))).await.json();
    let texts: Vec<&str> =
        best["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, [ranked[0].1.as_str(), ranked[1].1.as_str()]);
    assert_eq!((&best["choices"][0]["logprobs"], &best["choices"][1]["index"]), (&Value::Null, &json!(1)));
    assert_eq!(
        (&best["usage"]["prompt_tokens"], &best["usage"]["completion_tokens"]),
        (&all["usage"]["prompt_tokens"], &json!(30))
    );
    for wrong in
        [json!({"n": 3, "best_of": 2}), json!({"best_of": 2, "stream": true}), json!({"best_of": 129})]
    {
        assert_eq!(server.post(TEXT, &with(hot.clone(), wrong)).await.status, 400);
    }
    server.stop().await;
}
