//! Every way to ask wrongly: the status, OpenAI's error shape, the field's name, and nobody else disturbed.

mod common;

use common::{
    MAX_MODEL_LEN, Server, completion, filler, long_completion, open, post_bytes, read_until, send, with,
};
use serde_json::{Value, json};
use suanpan_server::{Keys, ServerOptions};
use tokio::net::TcpListener;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(extra: Value) -> Value {
    with(json!({"model": "suanpan", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}), extra)
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_routes_and_wrong_methods_answer_in_openais_shape() {
    let server = Server::start().await;
    for path in ["/nowhere", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/v1/../../etc/passwd"] {
        assert_eq!(server.get(path).await.error(404).1, "unknown_url", "{path}");
    }
    for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
        assert_eq!(server.get(path).await.error(405).1, "method_not_allowed", "{path}");
    }
    for path in ["/v1/models", "/metrics", "/health", "/version", "/"] {
        server.post(path, &json!({})).await.error(405);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_bodies_are_400_and_the_next_request_works() {
    let server = Server::start().await;
    let bodies: [&[u8]; 9] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"nope",
        b"{\"a\":1}{",
        b"\xff\xfe",
        b"{\"prompt\": \"\\ud800\"}",
        b"{\"prompt\":NaN}",
    ];
    for body in bodies {
        for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
            server.post_bytes(path, body).await.error(400);
        }
    }
    let reply = send(server.addr, b"NONSENSE\r\n\r\n").await;
    assert_eq!(reply.status, 400);
    assert_eq!(server.post(TEXT, &completion("ab", 1)).await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_too_large_or_not_json_by_type_are_refused() {
    let options = ServerOptions { max_body_bytes: 1000, ..ServerOptions::default() };
    let server = Server::with(common::engine_options(), options).await;
    let big = completion(&"x".repeat(2000), 1).to_string();
    assert_eq!(server.post_bytes(TEXT, big.as_bytes()).await.error(413).1, "request_too_large");
    let plain = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}";
    assert_eq!(send(server.addr, plain).await.error(415).1, "unsupported_media_type");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_guard_every_route_but_health() {
    let keys = Keys::new(vec!["first-key".into(), "second-key".into()]).expect("valid keys");
    let server =
        Server::with(common::engine_options(), ServerOptions { api_keys: keys, ..ServerOptions::default() })
            .await;
    for path in ["/", "/v1/models", "/metrics", "/version", "/ping", "/v1/capabilities", "/nowhere", CHAT] {
        let (_, code) = server.get(path).await.error(401);
        assert_eq!(code, "invalid_api_key", "{path}");
    }
    for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
        server.post(path, &json!({})).await.error(401);
    }
    assert_eq!(server.get("/health").await.status, 200);
    let body = completion("ab", 1).to_string();
    for (header, status) in [
        ("Authorization: Bearer first-key\r\n", 200),
        ("authorization: bearer second-key\r\n", 200),
        ("Authorization: Bearer first-ke\r\n", 401),
        ("Authorization: Bearer first-key2\r\n", 401),
        ("Authorization: Bearer\r\n", 401),
        ("Authorization: first-key\r\n", 401),
    ] {
        let reply = send(server.addr, &post_bytes(TEXT, header, body.as_bytes())).await;
        assert_eq!(reply.status, status, "{header}");
    }
    // A browser shows its login for the page and sends the key as the password.
    let page = server.get("/").await;
    assert!(page.header("www-authenticate").is_some_and(|v| v.starts_with("Basic")), "{}", page.head);
    let request = b"GET / HTTP/1.1\r\nHost: t\r\nConnection: close\r\nAuthorization: Basic dXNlcjpmaXJzdC1rZXk=\r\n\r\n";
    assert_eq!(send(server.addr, request).await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_ids_come_back_and_bad_ones_are_refused() {
    let server = Server::start().await;
    let body = completion("ab", 1).to_string();
    let reply = send(server.addr, &post_bytes(TEXT, "X-Request-Id: my-id/7\r\n", body.as_bytes())).await;
    assert_eq!((reply.status, reply.header("x-request-id")), (200, Some("my-id/7")));
    let fresh = server.get("/nowhere").await;
    assert!(fresh.header("x-request-id").is_some_and(|id| id.starts_with("req-")));
    let long = format!("X-Request-Id: {}\r\n", "x".repeat(129));
    for header in [long.as_str(), "X-Request-Id: a b\r\n", "X-Request-Id: \r\n"] {
        let reply = send(server.addr, &post_bytes(TEXT, header, body.as_bytes())).await;
        assert_eq!(reply.error(400).0, "X-Request-Id");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_look_like_paths_are_just_unknown_names() {
    let server = Server::start().await;
    for name in ["../../x", "..%2f..%2fx", "/etc/passwd", "C:\\x", "", "suanpan\u{0}", "Suanpan"] {
        let (param, code) =
            server.post(TEXT, &with(completion("ab", 1), json!({"model": name}))).await.error(404);
        assert_eq!((param.as_str(), code.as_str()), ("model", "model_not_found"), "{name}");
        server.post(CHAT, &chat(json!({"model": name}))).await.error(404);
    }
    assert_eq!(server.get("/v1/models/..%2f..%2fx").await.error(404).1, "model_not_found");
    assert_eq!(server.get("/v1/models/suanpan").await.json()["id"], "suanpan");
    server.stop().await;
}

/// C40: a text-only server never opens a connection for a picture.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_url_is_refused_and_nothing_is_fetched() {
    let server = Server::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    for url in [format!("http://127.0.0.1:{port}/x.png"), "file:///etc/hostname".into()] {
        let part = json!([{"type": "image_url", "image_url": {"url": url}}]);
        let body = chat(json!({"messages": [{"role": "user", "content": part}]}));
        assert_eq!(server.post(CHAT, &body).await.error(400).0, "messages[0].content[0]");
    }
    let knock = tokio::time::timeout(std::time::Duration::from_millis(300), listener.accept()).await;
    assert!(knock.is_err(), "the server connected");
    server.stop().await;
}

/// C37: the limit is 2048.
#[tokio::test(flavor = "multi_thread")]
async fn context_errors_name_the_limit_and_both_parts() {
    let server = Server::start().await;
    let ask =
        |tokens: usize, max: Value| json!({"prompt": filler(tokens), "max_tokens": max, "ignore_eos": true});
    let reply = server.post(TEXT, &ask(8, json!(2045))).await;
    let message = reply.json()["error"]["message"].as_str().map(str::to_owned).expect("a message");
    assert_eq!(reply.error(400), ("prompt".into(), "context_length_exceeded".into()));
    for part in ["2048", "8 in the prompt", "2045 in the completion"] {
        assert!(message.contains(part), "{message}");
    }
    for (tokens, max) in [(2048, Value::Null), (3000, Value::Null), (3000, json!(5)), (8, json!(i64::MAX))] {
        let reply = server.post(TEXT, &ask(tokens, max)).await;
        let message = reply.json()["error"]["message"].as_str().map(str::to_owned).expect("a message");
        assert_eq!(reply.error(400).1, "context_length_exceeded");
        assert!(
            message.contains(&MAX_MODEL_LEN.to_string()) && message.contains(&tokens.to_string()),
            "{message}"
        );
        assert!(!message.contains('-'), "{message}");
    }
    // No token was computed for any of them.
    assert_eq!(server.metric("vllm:prompt_tokens_total", "").await, 0.0);
    let exact = server.post(TEXT, &ask(2047, Value::Null)).await.json();
    assert_eq!(exact["usage"]["completion_tokens"], 1);
    let chat_long = chat(json!({"messages": [{"role": "user", "content": filler(3000)}]}));
    assert_eq!(server.post(CHAT, &chat_long).await.error(400).0, "messages");
    let rest = json!({"messages": [{"role": "user", "content": filler(2040)}], "ignore_eos": true});
    let rest = server.post(CHAT, &rest).await.json();
    assert_eq!(
        (&rest["usage"]["completion_tokens"], &rest["choices"][0]["finish_reason"]),
        (&json!(8), &json!("length"))
    );
    server.stop().await;
}

/// C35: every fractional field, with numbers no request means.
async fn hostile_numbers_are_refused(server: &Server) {
    for number in ["-32", "2147483647", "1e400", "1e308"] {
        for field in [
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "n",
        ] {
            let body = format!(r#"{{"prompt": "ab", "{field}": {number}}}"#);
            assert_eq!(server.post_bytes(TEXT, body.as_bytes()).await.error(400).0, field, "{number}");
        }
    }
}

/// C34 and C35 while somebody else streams.
#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_name_their_field_and_do_not_harm_a_running_stream() {
    let server = Server::start().await;
    let body = with(long_completion(&filler(64), 1500), json!({"stream": true}));
    let mut healthy = open(server.addr, TEXT, &body).await;
    read_until(&mut healthy, "data: ").await;
    // Byte vocabulary: 256 ids.
    for (field, value) in [
        ("prompt", json!("")),
        ("prompt", json!([])),
        ("prompt", json!([-1])),
        ("prompt", json!([256])),
        ("prompt", json!([4294967296u64])),
        ("prompt", Value::Null),
        ("logit_bias", json!({"256": 5})),
        ("stop_token_ids", json!([257])),
        ("allowed_token_ids", json!([256])),
        ("allowed_token_ids", json!([])),
        ("stop", json!([""])),
        ("temperature", json!(-1)),
        ("top_p", json!(0)),
        ("top_k", json!(-5)),
        ("min_p", json!(2)),
        ("seed", json!(-1)),
        ("n", json!(0)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(1.5)),
        ("max_tokens", json!("3")),
        ("tempratur", json!(1)),
        ("suffix", json!("x")),
    ] {
        let reply = server.post(TEXT, &with(completion("ab", 2), json!({field: value}))).await;
        assert_eq!(reply.error(400).0, field, "{value}");
    }
    assert_eq!(
        server.post(TEXT, &with(completion("ab", 2), json!({"prompt": [""]}))).await.error(400).0,
        "prompt"
    );
    assert_eq!(
        server.post(TEXT, &with(completion("ab", 2), json!({"prompt": [[]]}))).await.error(400).0,
        "prompt[0]"
    );
    assert_eq!(server.post(CHAT, &chat(json!({"messages": []}))).await.error(400).0, "messages");
    let empty = chat(json!({"messages": [{"role": "user", "content": ""}]}));
    assert_eq!(server.post(CHAT, &empty).await.error(400).0, "messages");
    for (path, body, field) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/detokenize", json!({"tokens": [256]}), "tokens"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
    ] {
        assert_eq!(server.post(path, &body).await.error(400).0, field);
    }
    hostile_numbers_are_refused(&server).await;
    let rest = read_until(&mut healthy, "data: [DONE]").await;
    assert!(rest.contains(r#""finish_reason":"length""#), "{rest}");
    assert_eq!(server.post(TEXT, &completion("ab", 1)).await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_built_is_refused_and_listed() {
    let server = Server::start().await;
    for (field, value) in [
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("tool_choice", json!("required")),
        ("response_format", json!({"type": "json_schema", "json_schema": {}})),
        ("reasoning_effort", json!("low")),
        ("store", json!(true)),
    ] {
        let (param, code) = server.post(CHAT, &chat(json!({field: value}))).await.error(400);
        assert_eq!((param.as_str(), code.as_str()), (field, "unsupported_value"));
    }
    let list = server.get("/v1/capabilities").await.json();
    let state = |name: &str| {
        let all = list["data"].as_array().expect("a list");
        let found = all.iter().find(|c| c["feature"] == name).unwrap_or_else(|| panic!("{name} in {list}"));
        assert!(found["reason"].as_str().is_some_and(|r| !r.is_empty()));
        found["active"].as_bool().expect("a state")
    };
    assert!(state("streaming") && state("ledger") && !state("tools") && !state("structured_output"));
    server.stop().await;
}
