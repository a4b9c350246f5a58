//! Requests against the strict reader: what is accepted, what is refused and under which name.

use super::*;
use crate::error::ApiError;

fn chat(extra: &str) -> Result<ChatRequest, ApiError> {
    parse_chat(format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}]{extra}}}"#).as_bytes())
}

fn completion(extra: &str) -> Result<CompletionRequest, ApiError> {
    parse_completion(format!(r#"{{"prompt": "hi"{extra}}}"#).as_bytes())
}

fn param(result: Result<impl std::fmt::Debug, ApiError>) -> String {
    let e = result.expect_err("must be refused");
    assert_eq!(e.status, 400);
    e.param.unwrap_or_default()
}

#[test]
fn what_openai_and_vllm_clients_send_is_accepted() {
    let r = chat(
        r#", "model": "m", "temperature": 0, "top_p": 0.9, "n": 2, "max_completion_tokens": 7, "seed": 18446744073709551615,
        "stop": ["a", "b"], "stream": true, "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 3,
        "presence_penalty": -2, "frequency_penalty": 2.0, "logit_bias": {"5": -100, "7": 3.5}, "user": "u", "metadata": {"a": "b"},
        "store": false, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "parallel_tool_calls": true,
        "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": true, "stop_token_ids": [3],
        "include_stop_str_in_output": true, "skip_special_tokens": false, "add_generation_prompt": false,
        "chat_template_kwargs": {"x": 1}, "cache_salt": "s", "return_token_ids": true, "request_id": "r", "priority": 0,
        "allowed_token_ids": [5], "truncate_prompt_tokens": null"#,
    )
    .unwrap();
    let s = &r.common.sampling;
    assert_eq!((s.max_tokens, s.seed, s.logprobs, s.top_k), (Some(7), Some(u64::MAX), Some(3), -1));
    assert_eq!(s.logit_bias, [(5, -100.0), (7, 3.5)]);
    assert!(r.common.stream && r.common.include_usage && !r.common.continuous_usage);
    assert!(!r.conversation.add_generation_prompt);
}

#[test]
fn hostile_numbers_are_refused_under_the_name_of_their_field() {
    let everywhere = ["-32", "1e400", "-1e400", "\"3\"", "[]", "{}", "true"];
    let numeric: [(&str, &[&str]); 13] = [
        ("temperature", &["1e308", "-1", "999999"]),
        ("top_p", &["-1", "0", "2"]),
        ("top_k", &["-5", "2147483648", "1.5"]),
        ("min_p", &["2", "-0.5"]),
        ("repetition_penalty", &["0", "-1"]),
        ("presence_penalty", &["2.1", "2147483647"]),
        ("frequency_penalty", &["-2.1", "2147483647"]),
        ("seed", &["-1", "18446744073709551616", "1.5"]),
        ("n", &["0", "-1", "2147483647", "1.0"]),
        ("max_tokens", &["-1", "1.5", "9223372036854775808", "0"]),
        ("min_tokens", &["-1", "9223372036854775808"]),
        ("prompt_logprobs", &["-1", "21", "2147483647"]),
        ("priority", &["1", "2147483647"]),
    ];
    for (field, values) in numeric {
        for value in values.iter().chain(&everywhere) {
            let body = format!(r#", "{field}": {value}"#);
            assert_eq!(param(chat(&body)), field, "{field} = {value}");
            assert_eq!(param(completion(&body)), field, "{field} = {value}");
        }
    }
    for value in ["21", "-1", "2147483647", "true"] {
        assert_eq!(param(completion(&format!(r#", "logprobs": {value}"#))), "logprobs");
        assert_eq!(param(chat(&format!(r#", "logprobs": true, "top_logprobs": {value}"#))), "top_logprobs");
    }
    assert_eq!(param(chat(r#", "logprobs": 5"#)), "logprobs");
    assert_eq!(param(chat(r#", "logit_bias": {"1": 101}"#)), "logit_bias");
    assert_eq!(param(chat(r#", "logit_bias": {"1": 1e400}"#)), "logit_bias.1");
    assert_eq!(param(chat(r#", "logit_bias": {"-1": 1}"#)), "logit_bias");
    assert_eq!(param(chat(r#", "stop_token_ids": [4294967296]"#)), "stop_token_ids");
}

#[test]
fn unknown_fields_are_refused_by_name_at_every_depth() {
    assert_eq!(param(chat(r#", "tempratur": 1"#)), "tempratur");
    assert_eq!(param(chat(r#", "nope": null"#)), "nope");
    assert_eq!(param(completion(r#", "messages": []"#)), "messages");
    assert_eq!(param(chat(r#", "stream": true, "stream_options": {"x": 1}"#)), "stream_options.x");
    let body = br#"{"messages": [{"role": "user", "content": "hi", "colour": 1}]}"#;
    assert_eq!(param(parse_chat(body)), "messages[0].colour");
}

#[test]
fn what_is_not_built_is_refused_by_name_never_ignored() {
    let refused = [
        r#""tools": [{"type": "function", "function": {"name": "f"}}]"#,
        r#""tool_choice": "required""#,
        r#""response_format": {"type": "json_object"}"#,
        r#""response_format": {"type": "json_schema", "json_schema": {}}"#,
        r#""store": true"#,
        r#""modalities": ["audio"]"#,
        r#""reasoning_effort": "high""#,
        r#""structured_outputs": {"regex": "a"}"#,
        r#""bad_words": ["x"]"#,
        r#""truncate_prompt_tokens": 5"#,
        r#""continue_final_message": true"#,
        r#""service_tier": "flex""#,
        r#""stream_options": {"include_usage": true}"#,
        r#""priority": 3"#,
    ];
    for field in refused {
        let name = field.split('"').nth(1).unwrap();
        let e = chat(&format!(", {field}")).unwrap_err();
        assert_eq!((e.param.as_deref(), e.code), (Some(name), Some("unsupported_value")), "{field}");
    }
    for field in [r#""suffix": "x""#, r#""best_of": 2, "stream": true"#, r#""prompt_embeds": "x""#] {
        let name = field.split('"').nth(1).unwrap();
        assert_eq!(param(completion(&format!(", {field}"))), name);
    }
}

#[test]
fn image_parts_are_refused_before_anything_could_be_fetched() {
    for url in ["http://127.0.0.1:1/x", "file:///etc/hostname"] {
        let body = format!(
            r#"{{"messages": [{{"role": "user", "content": [{{"type": "text", "text": "a"}},
            {{"type": "image_url", "image_url": {{"url": "{url}"}}}}]}}]}}"#
        );
        assert_eq!(param(parse_chat(body.as_bytes())), "messages[0].content[1]");
    }
}

#[test]
fn empty_prompts_are_refused_by_field() {
    for (prompt, name) in [
        ("[]", "prompt"),
        ("[[]]", "prompt[0]"),
        ("[-1]", "prompt"),
        ("[4294967296]", "prompt"),
        ("[[1], []]", "prompt[1]"),
        ("[\"a\", 5]", "prompt[1]"),
        ("[1, \"a\"]", "prompt"),
        ("5", "prompt"),
        ("null", "prompt"),
        ("{}", "prompt"),
        ("[true]", "prompt"),
        ("[1.5]", "prompt"),
    ] {
        assert_eq!(
            param(parse_completion(format!(r#"{{"prompt": {prompt}}}"#).as_bytes())),
            name,
            "{prompt}"
        );
    }
    for (messages, name) in [
        ("[]", "messages"),
        ("null", "messages"),
        ("\"hi\"", "messages"),
        ("[1]", "messages[0]"),
        ("[{}]", "messages[0].role"),
        (r#"[{"role": "king", "content": "x"}]"#, "messages[0].role"),
        (r#"[{"role": "user"}]"#, "messages[0].content"),
        (r#"[{"role": "user", "content": 5}]"#, "messages[0].content"),
        (r#"[{"role": "user", "content": []}]"#, "messages[0].content"),
    ] {
        assert_eq!(
            param(parse_chat(format!(r#"{{"messages": {messages}}}"#).as_bytes())),
            name,
            "{messages}"
        );
    }
    assert_eq!(param(chat(r#", "stop": [""]"#)), "stop");
    assert_eq!(param(chat(r#", "stop": """#)), "stop");
}

#[test]
fn prompts_come_as_text_ids_and_lists_of_both() {
    let prompts = |p: &str| parse_completion(format!(r#"{{"prompt": {p}}}"#).as_bytes()).unwrap().prompts;
    assert_eq!(prompts("\"\""), [Prompt::Text(String::new())]);
    assert_eq!(prompts("[1, 2]"), [Prompt::Ids(vec![1, 2])]);
    assert_eq!(prompts(r#"["a", [3]]"#), [Prompt::Text("a".into()), Prompt::Ids(vec![3])]);
    let many = format!(r#"{{"prompt": ["a", "b"], "n": {MAX_CHOICES}}}"#);
    assert_eq!(param(parse_completion(many.as_bytes())), "n");
}

#[test]
fn contradictions_are_refused() {
    assert_eq!(param(chat(r#", "max_tokens": 3, "max_completion_tokens": 4"#)), "max_completion_tokens");
    assert_eq!(param(chat(r#", "top_logprobs": 3"#)), "top_logprobs");
    assert_eq!(param(chat(r#", "stream": true, "prompt_logprobs": 1"#)), "prompt_logprobs");
    assert_eq!(param(completion(r#", "stream": true, "echo": true, "logprobs": 1"#)), "echo");
    assert_eq!(param(completion(r#", "min_tokens": 9, "max_tokens": 3"#)), "min_tokens");
}

#[test]
fn an_echoed_prompt_with_logprobs_may_be_scored_without_generating() {
    let r = completion(r#", "echo": true, "logprobs": 2, "max_tokens": 0"#).unwrap();
    assert_eq!((r.common.sampling.max_tokens, r.common.sampling.prompt_logprobs), (Some(0), Some(2)));
    assert_eq!(param(completion(r#", "max_tokens": 0"#)), "max_tokens");
}

#[test]
fn bodies_that_are_not_one_json_object_are_refused() {
    for body in ["", "{", "[]", "null", "5", "{}x", "{\"a\":}", "{\"messages\": [}", "\u{feff}{}", "{'a': 1}"]
    {
        let e = parse_chat(body.as_bytes()).unwrap_err();
        assert_eq!((e.status.as_u16(), e.code), (400, Some("invalid_json")), "{body:?}");
    }
    assert!(parse_chat(b"{\"model\": \"\xff\"}").is_err());
    assert_eq!(param(chat(r#", "model": "\ud800""#)), "model");
}

/// A seed of valid bodies, mutated byte by byte: the reader must answer (either way) and never panic.
#[test]
fn mutated_requests_never_panic_and_errors_stay_short() {
    const SEEDS: [&str; 3] = [
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"é\u00e9"}]}],"n":2,"logit_bias":{"5":-1e2},"stop":["a"],"stream":true,"stream_options":{"include_usage":true}}"#,
        r#"{"prompt":[[1,2],[3]],"max_tokens":16,"temperature":0.5,"logprobs":5,"echo":true,"seed":18446744073709551615}"#,
        r#"{"prompt":"abc","suffix":null,"best_of":1,"stop_token_ids":[1],"cache_salt":"x","return_token_strs":false}"#,
    ];
    const BYTES: &[u8] = b"{}[]\",:\\0129.eE-+ntfu\x00\xff \xc3";
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    for round in 0..60_000 {
        let mut body = SEEDS[round % SEEDS.len()].as_bytes().to_vec();
        for _ in 0..=draw(4) {
            let at = draw(body.len());
            match draw(4) {
                0 => body[at] = BYTES[draw(BYTES.len())],
                1 => body.insert(at, BYTES[draw(BYTES.len())]),
                2 => drop(body.remove(at)),
                _ => {
                    let end = at + draw(body.len() - at + 1);
                    let piece = body[at..end].to_vec();
                    let to = draw(body.len());
                    body.splice(to..to, piece);
                }
            }
        }
        for e in [
            parse_chat(&body).err(),
            parse_completion(&body).err(),
            parse_tokenize(&body).err(),
            parse_detokenize(&body).err(),
        ]
        .into_iter()
        .flatten()
        {
            assert_eq!(e.status, 400);
            assert!(e.message.len() < 1000, "{}", e.message);
        }
    }
}
