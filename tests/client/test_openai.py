"""The server as the `openai` package sees it: every call here is what an ordinary client program does."""

import concurrent.futures
import json
import math
import time

import openai
import pytest

from conftest import Server

# No two facts share seven bytes in a row that end in the same place of a line: that is what builtin:recall needs.
FACTS = "".join(f"k{i:02d}xyzw{i * 7:03d}: {i * 7919 % 10007:05d}\n" for i in range(40))
KEY = "k17xyzw119"
VALUE = f"{17 * 7919 % 10007:05d}"
QUESTION = [{"role": "user", "content": "Say hello."}]
FORCED = {"extra_body": {"ignore_eos": True}, "temperature": 0}


def ask(client, **options):
    options = {"messages": QUESTION, "model": "suanpan", "max_tokens": 8, **FORCED, **options}
    return client.chat.completions.create(**options)


def complete(client, **options):
    options = {"prompt": FACTS + KEY + ": ", "model": "suanpan", "max_tokens": 8, **FORCED, **options}
    return client.completions.create(**options)


def idle(server):
    """Waits until no request runs and only the prefix cache holds pages."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if server.metric("vllm:num_requests_running") == 0 and server.metric("suanpan:kv_pages", state="active") == 0:
            return
        time.sleep(0.02)
    raise AssertionError("pages are still held: " + server.get("/metrics")[1])


def test_chat_answers_with_usage_and_a_ledger_that_agrees(client):
    reply = ask(client)
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert choice.finish_reason == "length"
    usage = reply.usage
    assert usage.completion_tokens == 8
    assert usage.total_tokens == usage.prompt_tokens + 8
    ledger = usage.model_extra["ledger"]
    assert ledger["agree"] is True and ledger["output_tokens"] == 8
    assert ledger["attention_flops"] > 0 and ledger["kv_read_bytes"] > 0 and ledger["pages_peak"] > 0
    for name, value in ledger["predicted"].items():
        assert ledger[name] == value, name


def test_a_stream_carries_the_same_text_as_the_whole_reply(client):
    whole = ask(client, max_tokens=24)
    chunks = list(ask(client, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert ends == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage.model_extra["ledger"]["agree"] is True
    assert len({c.id for c in chunks}) == 1


def test_a_stream_without_usage_has_no_usage(client):
    chunks = list(ask(client, stream=True))
    assert all(c.usage is None for c in chunks) and all(c.choices for c in chunks)


def test_completions_batch_in_prompt_major_order(client):
    reply = complete(client, prompt=["ab", "cd"], n=2, echo=True, max_tokens=2)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert [c.text[:2] for c in reply.choices] == ["ab", "ab", "cd", "cd"]
    assert reply.usage.completion_tokens == 8


def test_completions_stream_equals_whole(client):
    whole = complete(client, max_tokens=12).choices[0].text
    streamed = "".join(c.choices[0].text for c in complete(client, max_tokens=12, stream=True))
    assert streamed == whole


def test_recall_finds_the_fact(server, client):
    if "recall" not in server.client().models.list().data[0].root:
        pytest.skip("only builtin:recall promises this answer")
    choice = complete(client, max_tokens=11, extra_body={}).choices[0]
    assert (choice.text, choice.finish_reason) == (VALUE, "stop")


def test_logprobs_in_chat(client):
    content = ask(client, logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert math.isfinite(entry.logprob) and -9999 <= entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        # Greedy: the chosen token is the best one.
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert isinstance(entry.bytes, list)


def test_logprobs_of_an_echoed_prompt(client):
    prompt = "The quick brown fox jumps over the lazy dog."
    choice = complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=1).choices[0]
    lp = choice.logprobs
    assert choice.text.startswith(prompt)
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset)
    assert lp.token_logprobs[0] is None and lp.top_logprobs[0] is None
    assert all(math.isfinite(v) for v in lp.token_logprobs[1:])
    assert lp.text_offset == sorted(lp.text_offset)
    for token, start in zip(lp.tokens, lp.text_offset):
        assert choice.text[start:].startswith(token)


def test_a_second_request_finds_the_first_ones_prefix(client):
    prompt = "prefix " * 60
    complete(client, prompt=prompt, max_tokens=1)
    again = complete(client, prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    salted = complete(client, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "other"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_errors_arrive_as_the_right_exceptions(client):
    with pytest.raises(openai.NotFoundError) as e:
        ask(client, model="../../x")
    assert e.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, temperature=-1)
    assert e.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, extra_body={"tempratur": 1})
    assert e.value.param == "tempratur"
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, messages=[])
    assert e.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert e.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as e:
        complete(client, prompt="x" * 40_000, max_tokens=5)
    assert e.value.code == "context_length_exceeded" and "4096" in e.value.message


def test_a_conversation_can_be_sent_back(client):
    reply = ask(client).choices[0].message
    messages = [*QUESTION, reply.model_dump(), {"role": "user", "content": "And again."}]
    assert ask(client, messages=messages).choices[0].finish_reason == "length"


def test_closing_a_stream_gives_its_pages_back(server, client):
    idle(server)
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    stream = complete(client, max_tokens=3000, stream=True)
    for _ in range(3):
        next(stream)
    assert server.metric("suanpan:kv_pages", state="active") > 0
    stream.close()
    idle(server)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert ask(client).usage.completion_tokens == 8


def test_eight_at_once_equal_one_after_the_other(server, client):
    prompts = [FACTS + f"k{i:02d}xyzw{i * 7:03d}: " for i in range(8)]
    alone = [complete(client, prompt=p, max_tokens=11).choices[0].text for p in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: complete(client, prompt=p, max_tokens=11).choices[0].text, prompts))
    assert together == alone
    idle(server)


def test_tokenize_and_back(server):
    import urllib.request

    def post(path, body):
        request = urllib.request.Request(
            server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.load(urllib.request.urlopen(request, timeout=10))

    text = "Grüße, 世界! 🎉"
    reply = post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == 4096
    assert post("/detokenize", {"tokens": reply["tokens"]})["prompt"] == text


def test_models_and_health(server, client):
    model = client.models.list().data[0]
    assert model.id == "suanpan" and abs(model.created - time.time()) < 3600
    assert model.model_extra["max_model_len"] == 4096
    assert server.get("/health")[0] == 200
    assert server.get("/v1/capabilities")[0] == 200


def test_api_keys_guard_every_route_but_health():
    locked = Server("--api-key", "right-key", "--api-key", "second-key", "--max-model-len", "2048")
    try:
        for key in ("right-key", "second-key"):
            assert ask(locked.client(key)).usage.completion_tokens == 8
        with pytest.raises(openai.AuthenticationError):
            ask(locked.client("wrong-key"))
        for path in ("/v1/models", "/metrics", "/version", "/ping", "/tokenize", "/nowhere", "/v1/capabilities"):
            assert locked.get(path)[0] == 401, path
        assert locked.get("/health")[0] == 200
        assert locked.get("/metrics", Authorization="Bearer right-key")[0] == 200
    finally:
        code, output = locked.stop()
    assert code == 0, output
    assert "right-key" not in output
