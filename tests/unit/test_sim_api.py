"""The simulated engine over HTTP: the bodies that a client sees, what they depend on, and how requests queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.sim.config import SimConfig
from extproc.sim.server import SimEngine

FAST = {"prefill_us_per_token": 0.0, "decode_ms_per_token": 0.0, "eos_after": 50, "record": True}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


class Api:
    def __init__(self, engine: SimEngine, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.client = client

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": HELLO, "max_tokens": 3, "temperature": 0, **fields}
        return await self.client.post(CHAT, json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, **fields}
        return await self.client.post(COMPLETIONS, json=body)

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A streamed answer's events; the framing is checked on the way."""
        response = await self.client.post(path, json={"stream": True, "temperature": 0, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with (
        SimEngine(SimConfig(**FAST, max_model_len=2048)) as engine,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=engine.url, trust_env=False, verify=False, timeout=60) as client,
    ):
        yield Api(engine, client)


# -- whole answers


async def test_a_chat_completion_has_vllms_keys_in_vllms_order(api: Api) -> None:
    response = await api.client.post(
        CHAT,
        headers={"X-Request-Id": "pd-1"},
        json={"model": "tiny", "messages": HELLO, "max_tokens": 2, "temperature": 0},
    )
    answer = response.json()
    created, text = answer["created"], answer["choices"][0]["message"]["content"]
    fingerprint = answer["system_fingerprint"]
    assert fingerprint.startswith("vllm-0.32.0-")
    assert response.text == (
        f'{{"id":"chatcmpl-pd-1","object":"chat.completion","created":{created},"model":"tiny","choices":[{{"index":0,'
        f'"message":{{"role":"assistant","content":"{text}","refusal":null,"annotations":null,"audio":null,'
        '"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,'
        '"token_ids":null,"routed_experts":null}],"service_tier":null,'
        f'"system_fingerprint":"{fingerprint}","usage":{{"prompt_tokens":12,"total_tokens":14,"completion_tokens":2,'
        '"prompt_tokens_details":null,"completion_tokens_details":null},"prompt_logprobs":null,'
        '"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    )
    assert list(response.headers) == ["date", "server", "content-length", "content-type", "vary"]
    assert response.headers["server"] == "uvicorn"
    assert response.headers["content-type"] == "application/json"
    assert response.headers["vary"] == "Origin"


async def test_a_completion_has_vllms_keys_in_vllms_order(api: Api) -> None:
    response = await api.client.post(
        COMPLETIONS, headers={"X-Request-Id": "pd-2"}, json={"prompt": [5, 6], "max_tokens": 1, "temperature": 0}
    )
    answer = response.json()
    created, text = answer["created"], answer["choices"][0]["text"]
    assert response.text == (
        f'{{"id":"cmpl-pd-2","object":"text_completion","created":{created},"model":"tiny","choices":[{{"index":0,'
        f'"text":"{text}","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
        '"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,'
        f'"system_fingerprint":"{answer["system_fingerprint"]}",'
        '"usage":{"prompt_tokens":2,"total_tokens":3,"completion_tokens":1,'
        '"prompt_tokens_details":null,"completion_tokens_details":null},'
        '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    )


async def test_a_streamed_chat_opens_with_the_role_and_ends_with_usage(api: Api) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "stream_options": {"include_usage": True}}
    events = await api.events(CHAT, body)
    head = {key: events[0][key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"
    whole = (await api.chat(max_tokens=2)).json()
    first, second = [event["choices"][0]["delta"]["content"] for event in events[1:3]]
    assert first + second == whole["choices"][0]["message"]["content"]
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    chunk = {"index": 0, "logprobs": None, "token_ids": None}
    assert events == [
        {**head, "choices": [opening], "prompt_token_ids": None, "prompt_text": None},
        {**head, "choices": [{**chunk, "delta": {"content": first}, "finish_reason": None}]},
        {
            **head,
            "choices": [{**chunk, "delta": {"content": second}, "finish_reason": "length", "stop_reason": None}],
        },
        {
            **head,
            "choices": [],
            "usage": {"prompt_tokens": 12, "total_tokens": 14, "completion_tokens": 2},
            "system_fingerprint": whole["system_fingerprint"],
        },
    ]


async def test_without_usage_the_last_chunk_carries_the_fingerprint(api: Api) -> None:
    for path, body in ((CHAT, {"messages": HELLO, "max_tokens": 2}), (COMPLETIONS, {"prompt": "hi", "max_tokens": 2})):
        events = await api.events(path, body)
        assert ["system_fingerprint" in event for event in events[-2:]] == [False, True]
        assert not any("usage" in event for event in events)


async def test_continuous_usage_counts_up(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await api.events(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 3, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


async def test_several_prompts_and_choices_are_told_apart(api: Api) -> None:
    body = {"prompt": [[1, 2], [3]], "n": 2, "temperature": 1.0, "max_tokens": 4}
    response = (await api.client.post(COMPLETIONS, json=body)).json()
    texts = [choice["text"] for choice in response["choices"]]
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert response["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 19,
        "completion_tokens": 16,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    streamed = ["", "", "", ""]
    for event in await api.events(COMPLETIONS, body):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts
    xrid = response["id"].removeprefix("cmpl-")
    assert [name.split(xrid)[0] + name.split(xrid)[1][:2] for name in api.engine.requests[0].internal_ids] == [
        "0_cmpl--0",
        "1_cmpl--0",
        "0_cmpl--1",
        "1_cmpl--1",
    ]


# -- what the text depends on


async def test_text_and_its_token_ids_are_the_same_prompt(api: Api) -> None:
    text = "The quick brown fox"
    tokens = (await api.client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    by_text, by_tokens = await api.complete(prompt=text), await api.complete(prompt=tokens)
    assert by_text.json()["choices"] == by_tokens.json()["choices"]
    assert by_text.json()["usage"]["prompt_tokens"] == len(tokens)
    assert (await api.complete(prompt=text + "!")).json()["choices"] != by_text.json()["choices"]


async def test_a_longer_answer_begins_with_the_shorter(api: Api) -> None:
    short, long = [(await api.complete(max_tokens=n)).json()["choices"][0]["text"] for n in (5, 40)]
    assert long.startswith(short)


async def test_a_seed_matters_only_when_sampling(api: Api) -> None:
    async def text(**fields: Any) -> str:
        return str((await api.complete(**fields)).json()["choices"][0]["text"])

    assert await text(seed=1) == await text(seed=2) == await text()
    assert await text(seed=1, temperature=1.0) != await text(seed=2, temperature=1.0)
    assert await text(seed=1, temperature=1.0) == await text(seed=1, temperature=1.0)


async def test_other_weights_say_other_things(api: Api) -> None:
    async with SimEngine(SimConfig(seed=1, **FAST)) as other:  # type: ignore[arg-type]
        response = await api.client.post(f"{other.url}{COMPLETIONS}", json={"prompt": [1, 2, 3], "max_tokens": 3})
    assert response.json()["choices"] != (await api.complete()).json()["choices"]


async def test_an_answer_ends_at_eos_which_counts_and_is_not_shown(api: Api) -> None:
    ended, ignored = [(await api.complete(max_tokens=60, ignore_eos=ignore)).json() for ignore in (False, True)]
    assert (ended["choices"][0]["finish_reason"], ended["usage"]["completion_tokens"]) == ("stop", 51)
    assert (ignored["choices"][0]["finish_reason"], ignored["usage"]["completion_tokens"]) == ("length", 60)
    assert "<|im_end|>" not in ended["choices"][0]["text"]
    longer = (await api.complete(max_tokens=60, min_tokens=55)).json()
    assert longer["usage"]["completion_tokens"] == 56


async def test_stop_strings_and_ids(api: Api) -> None:
    plain = (await api.complete(max_tokens=10, return_token_ids=True)).json()["choices"][0]
    word = plain["text"].split(" ")[4]
    stopped = (await api.complete(max_tokens=10, stop=[word])).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", word)
    assert plain["text"].startswith(stopped["text"])
    assert word not in stopped["text"]
    by_id = (await api.complete(max_tokens=10, stop_token_ids=[plain["token_ids"][2]])).json()
    assert by_id["choices"][0]["stop_reason"] == plain["token_ids"][2]
    assert by_id["usage"]["completion_tokens"] == 3


async def test_a_fourth_kind_of_end_leaves_nothing_behind(api: Api) -> None:
    plain = (await api.complete(max_tokens=10)).json()["choices"][0]["text"]
    await api.complete(max_tokens=40, stop=[plain.split(" ")[2]], kv_transfer_params={"do_remote_decode": True})
    await api.engine.until(lambda: not api.engine.engine.requests)
    assert api.engine.pinned == []
    assert api.engine.state()["blocks"]["used"] == 0


async def test_logprobs_of_every_token(api: Api) -> None:
    choice = (await api.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert [bytes(entry["bytes"]).decode() for entry in entries] == [entry["token"] for entry in entries]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2, 2]
    assert entries[0]["top_logprobs"][0] == {key: entries[0][key] for key in ("token", "logprob", "bytes")}
    older = (await api.complete(logprobs=1)).json()["choices"][0]
    assert "".join(older["logprobs"]["tokens"]) == older["text"]
    assert older["logprobs"]["text_offset"][0] == 0
    assert [len(top) for top in older["logprobs"]["top_logprobs"]] == [2, 2, 2]
    streamed = await api.events(CHAT, {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2})
    assert [event["choices"][0]["logprobs"]["content"][0] for event in streamed[1:]] == entries


async def test_echo(api: Api) -> None:
    assert (await api.complete(prompt="abc", echo=True)).json()["choices"][0]["text"].startswith("abc")
    only = (await api.complete(prompt="abc", echo=True, max_tokens=0)).json()
    assert (only["choices"][0]["text"], only["usage"]["completion_tokens"]) == ("abc", 1)


async def test_cached_tokens_show_where_asked_for() -> None:
    config = SimConfig(**FAST, prompt_tokens_details=True)  # type: ignore[arg-type]
    async with SimEngine(config) as engine, httpx.AsyncClient(trust_env=False, verify=False) as client:
        seen = []
        for _ in range(2):
            response = await client.post(f"{engine.url}{COMPLETIONS}", json={"prompt": [1] * 70, "max_tokens": 1})
            seen.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert seen == [0, 64]
    assert engine.metrics.value("vllm:prefix_cache_hits_total") == 64


# -- identity


async def test_the_first_request_id_line_wins(api: Api) -> None:
    response = await api.client.post(
        CHAT,
        headers=[("X-Request-Id", "first"), ("X-Request-Id", "second")],
        json={"messages": HELLO, "max_tokens": 1},
    )
    assert response.json()["id"] == "chatcmpl-first"
    assert "x-request-id" not in response.headers
    record = api.engine.requests[0]
    assert (record.request_id, record.request_id_lines) == ("first", 2)
    assert record.internal_ids[0].startswith("chatcmpl-first-")
    assert len(record.internal_ids[0]) == len("chatcmpl-first-") + 8


async def test_without_a_header_the_bodys_id_counts(api: Api) -> None:
    assert (await api.chat(request_id="mine")).json()["id"] == "chatcmpl-mine"


async def test_a_request_is_logged_byte_for_byte(api: Api) -> None:
    body = b'{"prompt":"\xe2\x98\x83","max_tokens":1,"seed":9007199254740993,"x":{"b":1,"a":2}}'
    await api.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json", "X-A": "b"})
    record = api.engine.requests[0]
    assert record.body == body
    assert (b"x-a", b"b") in (record.headers or [])
    assert (record.leg, record.outcome, record.status, record.prompt_tokens) == ("plain", "completed", 200, 3)


async def test_an_api_key_guards_v1_only() -> None:
    config = SimConfig(**FAST, api_key="k1")  # type: ignore[arg-type]
    async with SimEngine(config) as engine, httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        for headers in ({}, {"Authorization": "Bearer None"}, {"Authorization": "Basic k1"}):
            response = await client.get("/v1/models", headers=headers)
            assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
        assert (await client.get("/v1/models", headers={"Authorization": "bearer k1"})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.options("/v1/models")).status_code == 405


# -- the other routes


async def test_models_version_health(api: Api) -> None:
    (card,) = (await api.client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("tiny", "model", "vllm", 2048)
    assert (await api.client.get("/version")).json() == {"version": "0.32.0"}
    health = await api.client.get("/health")
    assert (health.status_code, health.content) == (200, b"")


async def test_metrics_have_vllms_names_and_labels(api: Api) -> None:
    await api.complete()
    text = (await api.client.get("/metrics")).text
    samples = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = {"model_name": "tiny", "engine": "0"}
    for name, value in {
        "vllm:kv_cache_usage_perc": 0.0,
        "vllm:num_requests_running": 0.0,
        "vllm:num_requests_waiting": 0.0,
        "vllm:prompt_tokens_total": 3.0,
        "vllm:generation_tokens_total": 3.0,
        "vllm:nixl_num_kv_expired_reqs_total": 0.0,
        "vllm:nixl_num_notifications_after_expiry_total": 0.0,
        "vllm:nixl_num_failed_transfers_total": 0.0,
        "vllm:nixl_bytes_transferred_count": 0.0,
    }.items():
        assert samples[name] == (labels, value), name


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", CHAT, 405, '{"detail":"Method Not Allowed"}'),
        ("PUT", COMPLETIONS, 405, '{"detail":"Method Not Allowed"}'),
        ("HEAD", "/v1/models", 405, ""),
        ("OPTIONS", CHAT, 405, '{"detail":"Method Not Allowed"}'),
        ("POST", "/v1/embeddings", 404, '{"detail":"Not Found"}'),
        ("DELETE", "/x", 404, '{"detail":"Not Found"}'),
        ("POST", f"{CHAT}/", 307, ""),
    ],
)
async def test_routes_that_do_not_exist(api: Api, method: str, path: str, status: int, body: str) -> None:
    response = await api.client.request(method, path)
    assert (response.status_code, response.text) == (status, body)


async def test_no_foreign_origin_is_allowed_by_default(api: Api) -> None:
    headers = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    response = await api.client.options(CHAT, headers=headers)
    assert (response.status_code, response.text) == (400, "Disallowed CORS origin")


# -- load


async def test_max_num_seqs_makes_requests_wait() -> None:
    config = SimConfig(max_num_seqs=2, decode_ms_per_token=5, prefill_us_per_token=0, eos_after=500)
    async with SimEngine(config) as engine, httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client:
        body = {"prompt": [1], "max_tokens": 20}
        tasks = [asyncio.create_task(client.post(f"{engine.url}{COMPLETIONS}", json=body)) for _ in range(3)]
        await engine.until(lambda: engine.engine.waiting == 1 and engine.engine.running == 2)
        assert engine.metrics.value("vllm:num_requests_running") == 2
        assert engine.metrics.value("vllm:num_requests_waiting") == 1
        assert [(await task).status_code for task in tasks] == [200, 200, 200]


async def test_a_full_cache_preempts_and_the_answer_is_the_same() -> None:
    config = SimConfig(blocks=6, max_model_len=160, decode_ms_per_token=0.1, prefill_us_per_token=0, eos_after=500)
    async with SimEngine(config) as engine, httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client:

        async def text(prompt: int) -> str:
            body = {"prompt": [prompt] * 60, "max_tokens": 80}
            response = await client.post(f"{engine.url}{COMPLETIONS}", json=body)
            return str(response.json()["choices"][0]["text"])

        alone = [await text(1), await text(2)]
        assert engine.metrics.value("vllm:num_preemptions_total") == 0
        assert list(await asyncio.gather(text(1), text(2))) == alone
        assert engine.metrics.value("vllm:num_preemptions_total") > 0
        assert engine.state()["blocks"]["used"] == 0


async def test_prefills_take_turns() -> None:
    config = SimConfig(prefill_us_per_token=1000, decode_ms_per_token=0, eos_after=500)
    async with SimEngine(config) as engine, httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client:
        loop = asyncio.get_running_loop()
        started = loop.time()
        bodies = [{"prompt": [number] * 100, "max_tokens": 1} for number in range(3)]
        await asyncio.gather(*(client.post(f"{engine.url}{COMPLETIONS}", json=body) for body in bodies))
        assert loop.time() - started >= 0.3
