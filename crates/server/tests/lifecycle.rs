//! Clients that leave, queues that fill, engines that die, servers that stop.

mod common;

use std::time::Duration;

use common::{
    Server, completion, engine_options, fact, filler, long_completion, open, post_bytes, read_until, send,
    with,
};
use serde_json::{Value, json};
use suanpan_engine::{EngineOptions, Shutdown};
use suanpan_server::{Ending, ServerOptions};
use tokio::io::AsyncReadExt;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn streamed(body: Value) -> Value {
    with(body, json!({"stream": true}))
}

async fn aborted(server: &Server) -> f64 {
    server.metric("vllm:request_success_total", r#"finished_reason="abort""#).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_a_stream_gives_its_pages_back() {
    let server = Server::start().await;
    let mut socket = open(server.addr, TEXT, &streamed(long_completion(&filler(300), 1700))).await;
    read_until(&mut socket, "data: ").await;
    assert!(server.metric("suanpan:kv_pages", r#"state="active""#).await > 0.0);
    drop(socket);
    server.idle().await;
    assert_eq!(aborted(&server).await, 1.0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_before_the_whole_reply_gives_its_pages_back() {
    let server = Server::start().await;
    for path in [TEXT, CHAT] {
        let body = match path {
            TEXT => long_completion(&filler(300), 1700),
            _ => json!({"messages": [{"role": "user", "content": filler(300)}], "ignore_eos": true}),
        };
        let before = aborted(&server).await;
        let socket = open(server.addr, path, &body).await;
        while server.metric("vllm:num_requests_running", "").await == 0.0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(socket);
        server.idle().await;
        assert_eq!(aborted(&server).await, before + 1.0, "{path}");
    }
    server.stop().await;
}

/// C20: the prompt is in many chunks when its client leaves; the same prompt comes again at once, and one that contains it.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_during_prefill_leaves_no_half_filled_page_behind() {
    let engine =
        EngineOptions { max_num_batched_tokens: 16, num_pages_override: Some(160), ..engine_options() };
    let server = Server::with(engine, ServerOptions::default()).await;
    let prompt = format!("{}{}{}key-pre: ", filler(900), fact("key-pre", "value-7"), filler(80));
    let longer = format!("{prompt}\n{}{}key-two: ", fact("key-two", "other-9"), filler(100));
    let alone =
        server.post(TEXT, &with(completion(&prompt, 12), json!({"cache_salt": "alone"}))).await.json();
    assert_eq!(alone["choices"][0]["text"], "value-7");
    for round in 0..8u64 {
        let salt = json!({"cache_salt": format!("round {round}")});
        let socket = open(server.addr, TEXT, &with(streamed(completion(&prompt, 12)), salt.clone())).await;
        tokio::time::sleep(Duration::from_millis(3 * round)).await;
        drop(socket);
        let (again, more) =
            (with(completion(&prompt, 12), salt.clone()), with(completion(&longer, 12), salt));
        let (same, contains) = tokio::join!(server.post(TEXT, &again), server.post(TEXT, &more));
        assert_eq!(same.json()["choices"][0]["text"], "value-7", "round {round}");
        assert_eq!(contains.json()["choices"][0]["text"], "other-9", "round {round}");
    }
    server.idle().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_a_stream_before_its_first_token_is_noticed_at_once() {
    let engine = EngineOptions {
        max_num_seqs: 1,
        max_model_len: Some(30_000),
        num_pages_override: Some(4096),
        ..engine_options()
    };
    // No comment is ever due, so it is the closed connection itself that is seen.
    let options = ServerOptions { keep_alive: Duration::from_secs(600), ..ServerOptions::default() };
    let server = Server::with(engine, options).await;
    let mut first = open(server.addr, TEXT, &streamed(long_completion(&filler(50), 29_000))).await;
    read_until(&mut first, "data: ").await;
    let second = open(server.addr, TEXT, &streamed(completion(&filler(60), 2))).await;
    while server.metric("vllm:num_requests_waiting", "").await == 0.0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(second);
    let start = std::time::Instant::now();
    while server.metric("vllm:num_requests_waiting", "").await > 0.0 {
        assert!(start.elapsed() < Duration::from_secs(5), "nobody noticed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The first one still runs: it was not the end of the line that freed the place.
    assert_eq!(server.metric("vllm:num_requests_running", "").await, 1.0);
    assert_eq!(aborted(&server).await, 1.0);
    drop(first);
    server.idle().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_429_with_retry_after_and_disturbs_nobody() {
    let engine = EngineOptions { max_num_seqs: 1, ..engine_options() };
    let server = Server::with_queue(engine, ServerOptions::default(), 2).await;
    let mut first = open(server.addr, TEXT, &streamed(long_completion(&filler(50), 1900))).await;
    read_until(&mut first, "data: ").await;
    let second = open(server.addr, TEXT, &streamed(long_completion(&filler(60), 1900))).await;
    while server.metric("vllm:num_requests_waiting", "").await == 0.0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let refused = server.post(TEXT, &completion("ab", 1)).await;
    assert_eq!(refused.error(429).1, "rate_limit_exceeded");
    assert!(refused.header("retry-after").and_then(|v| v.parse::<u32>().ok()).is_some_and(|s| s >= 1));
    // More choices than ever fit are no matter of waiting.
    assert_eq!(server.post(TEXT, &with(completion("ab", 1), json!({"n": 3}))).await.error(400).0, "n");
    read_until(&mut first, "data: ").await;
    drop((first, second));
    server.idle().await;
    assert_eq!(server.post(TEXT, &completion("ab", 1)).await.status, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_engine_is_503_everywhere() {
    let server = Server::start().await;
    assert_eq!(server.get("/health").await.status, 200);
    let mut running = open(server.addr, TEXT, &streamed(long_completion(&filler(50), 1900))).await;
    read_until(&mut running, "data: ").await;
    server.app.engine.shutdown(Shutdown::Now);
    let tail = read_until(&mut running, "0\r\n\r\n").await;
    assert!(tail.contains("\"finish_reason\":\"abort\"") || tail.contains("\"error\":{"), "{tail}");
    for path in ["/health", "/ping"] {
        assert_eq!(server.get(path).await.error(503).1, "service_unavailable");
    }
    server.post(TEXT, &completion("ab", 1)).await.error(503);
    assert_eq!(server.get("/v1/models").await.status, 200);
    server.stop().await;
}

/// C38.
#[tokio::test(flavor = "multi_thread")]
async fn requests_with_one_id_are_neither_mixed_up_nor_cancelled_together() {
    let server = Server::start().await;
    let prompt = |i: usize| {
        format!(
            "{}{}{}key-{i:03}: ",
            filler(64),
            fact(&format!("key-{i:03}"), &format!("answer {i}")),
            filler(40)
        )
    };
    let body = |i: usize| with(completion(&prompt(i), 20), json!({"request_id": "the-same"}));
    let header = "X-Request-Id: the-same\r\n";
    let victim = with(streamed(long_completion(&filler(100), 1500)), json!({"request_id": "the-same"}));
    let mut socket = open(server.addr, TEXT, &victim).await;
    read_until(&mut socket, "data: ").await;
    let other = {
        let bytes = post_bytes(TEXT, header, body(1).to_string().as_bytes());
        tokio::spawn(async move { send(server.addr, &bytes).await })
    };
    drop(socket);
    assert_eq!(other.await.expect("no panic").json()["choices"][0]["text"], "answer 1");
    let all: Vec<_> = (0..100)
        .map(|i| {
            let bytes = post_bytes(TEXT, header, body(i).to_string().as_bytes());
            tokio::spawn(async move { send(server.addr, &bytes).await })
        })
        .collect();
    for (i, reply) in all.into_iter().enumerate() {
        let reply = reply.await.expect("no panic");
        assert_eq!(reply.json()["choices"][0]["text"], format!("answer {i}"));
    }
    server.idle().await;
    let page = server.get("/metrics").await.text();
    assert!(page.lines().filter(|l| !l.starts_with('#')).all(|l| !l.contains(" -")), "{page}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_stream_is_kept_open_by_comments() {
    let engine = EngineOptions { max_num_seqs: 1, ..engine_options() };
    let options = ServerOptions { keep_alive: Duration::from_millis(20), ..ServerOptions::default() };
    let server = Server::with(engine, options).await;
    let mut first = open(server.addr, TEXT, &streamed(long_completion(&filler(50), 1900))).await;
    read_until(&mut first, "data: ").await;
    let mut waiting = open(server.addr, TEXT, &streamed(completion(&filler(60), 2))).await;
    read_until(&mut waiting, ": keep-alive\n\n").await;
    drop(first);
    read_until(&mut waiting, "data: [DONE]").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_told_to_stop_finishes_what_runs_and_takes_nothing_new() {
    let mut server = Server::start().await;
    let mut running = open(server.addr, TEXT, &streamed(long_completion(&filler(50), 400))).await;
    read_until(&mut running, "data: ").await;
    server.begin_stop();
    let rest = read_until(&mut running, "data: [DONE]").await;
    assert!(rest.contains(r#""finish_reason":"length""#), "{rest}");
    let addr = server.addr;
    assert_eq!(server.stop().await, Ending::Drained);
    assert!(tokio::net::TcpStream::connect(addr).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_told_to_stop_aborts_what_does_not_finish_in_time() {
    let engine =
        EngineOptions { max_model_len: Some(100_000), num_pages_override: Some(8192), ..engine_options() };
    let options = ServerOptions { drain: Duration::from_millis(200), ..ServerOptions::default() };
    let server = Server::with(engine, options).await;
    let mut running = open(server.addr, TEXT, &streamed(long_completion(&filler(50), 99_000))).await;
    read_until(&mut running, "data: ").await;
    assert_eq!(server.stop().await, Ending::TimedOut);
    let mut rest = Vec::new();
    let _reset_or_end = running.read_to_end(&mut rest).await;
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_books_add_up() {
    let server = Server::start().await;
    let mut flops = 0;
    for n in 1..=3 {
        let reply = server.post(TEXT, &with(long_completion(&filler(64), 5), json!({"n": n}))).await.json();
        flops += reply["usage"]["ledger"]["attention_flops"].as_u64().expect("a count");
    }
    assert_eq!(server.metric("vllm:generation_tokens_total", "").await, 30.0);
    assert_eq!(server.metric("vllm:prompt_tokens_total", "").await, 6.0 * 64.0);
    assert_eq!(server.metric("vllm:time_to_first_token_seconds_count", "").await, 6.0);
    assert_eq!(server.metric("vllm:inter_token_latency_seconds_count", "").await, 24.0);
    // A prompt of one step is prefill, not waiting: the two start and end at known moments.
    let prefill = server.metric("vllm:request_prefill_time_seconds_sum", "").await;
    let decode = server.metric("vllm:request_decode_time_seconds_sum", "").await;
    assert!(prefill > 0.0 && decode > 0.0, "{prefill} {decode}");
    assert_eq!(server.metric("suanpan:attention_flops_total", "counted").await, flops as f64);
    assert_eq!(server.metric("suanpan:attention_flops_total", "predicted").await, flops as f64);
    assert_eq!(server.metric("suanpan:books_disagree_total", "").await, 0.0);
    assert_eq!(server.metric("vllm:request_success_total", r#"finished_reason="length""#).await, 6.0);
    server.stop().await;
}
