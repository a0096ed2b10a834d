"""Requests through the service and a real Envoy: text, usage and errors are the engines', and the KV really moves."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any, Final

import pytest

from extproc.demo.vllm.launch import MODEL_NAME
from tests.support.simulated import until
from tests.vllm.gateway import Gate, VllmGateway
from tests.vllm.two_step import CHAT, COMPLETIONS, Body, chat, completion, freed, post, text_of, words

pytestmark = pytest.mark.asyncio(loop_scope="session")

FREED_WITHIN_S: Final = 1.0
STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}
SIZES: Final = (1, 20, 60, 120, 220)


def token_ids(count: int, seed: int) -> list[int]:
    return [5 + (37 * i + 11 * seed) % 380 for i in range(count)]


REQUESTS: Final[dict[str, tuple[str, Body]]] = {
    **{f"chat, {n} words": (CHAT, chat(words(n, 200 + n))) for n in SIZES},
    **{f"streamed chat, {n} words": (CHAT, chat(words(n, 500 + n), **STREAMED)) for n in SIZES},
    **{f"text, {n} words": (COMPLETIONS, completion(words(n, 800 + n))) for n in SIZES},
    **{f"{n} token ids": (COMPLETIONS, completion(token_ids(n, n))) for n in (5, 33, 64, 300, 800)},
}


@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS.keys())
async def test_text_is_that_of_one_engine_alone(gateway: VllmGateway, path: str, body: Body) -> None:
    before = await gateway.transfers()
    answer = await gateway.post(path, body)
    text = text_of(answer)
    assert await freed(gateway.prefill, timeout_s=5) < 5
    await gateway.transferred(before)
    alone = await post(gateway.prefill, path, body)
    assert text == text_of(alone)
    assert len(text) >= 32  # one character a token at least: it wrote all it was asked for
    assert _usage(answer.text) == _usage(alone.text)
    if isinstance(body.get("prompt"), list):
        assert _usage(answer.text)["prompt_tokens"] == len(body["prompt"])
    await gateway.settled()
    assert gateway.counted("extproc_exchanges_total") == {"disaggregated": 1}
    assert gateway.counted("extproc_releases_total") == {}


def _usage(text: str) -> dict[str, Any]:
    """Of a JSON answer, or of the last chunk but one of a stream."""
    if not text.startswith("data: "):
        return _counts(json.loads(text)["usage"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return _counts(json.loads(events[-2])["usage"])


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    return {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}


REFUSED: Final[dict[str, tuple[str, Body]]] = {
    "context too long": (CHAT, chat(words(3000, 1))),
    "context too long, token ids": (COMPLETIONS, completion(token_ids(2100, 1))),
    "more tokens than the context holds": (CHAT, chat(words(60, 2), max_tokens=100_000)),
    "no token": (CHAT, chat(words(60, 3), max_tokens=0)),
    "temperature below zero": (CHAT, chat(words(60, 4), temperature=-1)),
    "temperature is text": (CHAT, chat(words(60, 5), temperature="hot")),
    "max_tokens is text": (CHAT, chat(words(60, 6), max_tokens="many")),
    "unknown model": (CHAT, chat(words(60, 7), model="no-such-model")),
    "unknown model, completions": (COMPLETIONS, completion(words(60, 8), model="no-such-model")),
    "no messages": (CHAT, chat("x", messages=[])),
    "stream_options without stream": (CHAT, chat(words(60, 9), stream_options={"include_usage": True})),
    "min_tokens above max_tokens": (CHAT, chat(words(60, 10), min_tokens=40)),
    "no such role": (CHAT, chat("x", messages=[{"role": 7, "content": "x"}])),
    "token id out of range": (COMPLETIONS, completion([10**9])),
}


@pytest.mark.parametrize(("path", "body"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_vllm_refuses_reaches_the_client_as_vllm_says_it(
    gateway: VllmGateway, path: str, body: Body
) -> None:
    alone = await post(gateway.decode, path, body)
    assert 400 <= alone.status_code < 500
    answer = await gateway.post(path, body)
    assert answer.status_code == alone.status_code
    assert answer.headers["content-type"] == alone.headers["content-type"]
    assert answer.json()["error"] == alone.json()["error"]
    await gateway.settled()
    assert await freed(gateway.prefill, timeout_s=2) < 2


# ---- clients that leave ----


async def test_client_gone_before_the_prefiller_begins(gateway: VllmGateway) -> None:
    """The engine stands still, so the call has certainly no answer when it is closed."""
    gateway.prefill.signal(signal.SIGSTOP)
    try:
        request = await gateway.open(completion(token_ids(900, 3), stream=True), COMPLETIONS)
        await until(lambda: any(e.inflight for e in gateway.server.service.fleet.engines("prefill")), timeout_s=20)
        request.cut()
        await gateway.settled()
    finally:
        gateway.prefill.signal(signal.SIGCONT)
    assert gateway.counted("extproc_exchanges_total") == {"client_left": 1}
    assert gateway.counted("extproc_releases_total") == {}
    await post(gateway.prefill, CHAT, chat("hello", max_tokens=2))  # by now it has seen the first one, too
    assert await freed(gateway.prefill, timeout_s=10) < FREED_WITHIN_S * 2


async def test_client_gone_during_the_prefill(gateway: VllmGateway) -> None:
    """Either it was still running when the call was closed, or its answer was waited for and released."""
    request = await gateway.open(completion(token_ids(1900, 3), stream=True), COMPLETIONS)
    await until(lambda: any(e.inflight for e in gateway.server.service.fleet.engines("prefill")), timeout_s=20)
    request.cut()
    await gateway.settled()
    assert await freed(gateway.prefill, timeout_s=10) < FREED_WITHIN_S * 2
    assert gateway.counted("extproc_exchanges_total") in ({"client_left": 1}, {"disaggregated": 1})


async def test_client_gone_right_after_the_prefill(gateway: VllmGateway) -> None:
    """Cut while the loop that would give the answer to Envoy stands still."""
    asked, read = gateway.accounts.requested, await gateway.transfers()
    request = await gateway.open(chat(words(150, 31), stream=True, max_tokens=300))
    with gateway.at_dispatch(lambda _: request.cut_now()):
        await until(lambda: gateway.counted("extproc_exchanges_total") != {}, timeout_s=30)
    assert await freed(gateway.prefill, timeout_s=10) < FREED_WITHIN_S * 2
    await gateway.settled()
    assert gateway.accounts.requested - asked <= 1
    if gateway.accounts.requested == asked:  # then the decoder was faster than the cut, and took the blocks
        await gateway.transferred(read)


async def test_client_gone_in_mid_stream(gateway: VllmGateway) -> None:
    request = await gateway.open(chat(words(150, 32), stream=True, max_tokens=900, ignore_eos=True))
    await request.until(b"data: ", timeout_s=30)
    request.cut()
    assert await freed(gateway.prefill, timeout_s=10) < FREED_WITHIN_S
    assert await freed(gateway.decode, timeout_s=10) < FREED_WITHIN_S * 2
    await gateway.settled()


async def test_client_gone_while_an_answer_is_computed(gateway: VllmGateway) -> None:
    request = await gateway.open(chat(words(150, 33), max_tokens=900, ignore_eos=True))

    async def decoding() -> bool:
        return await gateway.decode.metric("vllm:num_requests_running") == 1

    await until(decoding, timeout_s=30)
    request.cut()
    assert await freed(gateway.prefill, timeout_s=10) < FREED_WITHIN_S
    assert await freed(gateway.decode, timeout_s=10) < FREED_WITHIN_S * 2
    await gateway.settled()


# ---- a decoder that is not there ----


async def test_another_decoder_takes_over_with_the_same_kv(gateway: VllmGateway) -> None:
    """The one picked first refuses connections: no second prefill."""
    async with Gate(gateway.decode) as gate:
        urls = [gate.url, gateway.decode.url]
        async with VllmGateway.started(gateway.prefill, gateway.decode, decode_urls=urls) as both:
            gate.shut()
            prefills = await gateway.prefill.metric("vllm:request_success_total")
            before = await both.transfers()
            for seed in range(4):
                body = chat(words(100, 340 + seed))
                assert text_of(await both.post(CHAT, body)) == text_of(await post(gateway.decode, CHAT, body))
            await both.settled()
            await both.transferred(before, 4)
            assert await gateway.prefill.metric("vllm:request_success_total") == prefills + 4
            assert both.counted("extproc_exchanges_total") == {"disaggregated": 4}


async def test_a_decoder_that_refuses_the_connection_leaves_nothing_pinned(gateway: VllmGateway) -> None:
    """The only one: the client gets 503, and the release goes through as soon as there is a decoder again."""
    async with (
        Gate(gateway.decode) as gate,
        VllmGateway.started(gateway.prefill, gateway.decode, decode_urls=[gate.url]) as only,
    ):
        with only.at_dispatch(lambda _: gate.shut()):
            answer = await only.post(CHAT, chat(words(150, 35)))
        assert answer.status_code == 503
        await until(lambda: only.accounts.pending == 1)
        assert await gateway.prefill.pinned_blocks() > 0
        await gate.open()
        assert await freed(gateway.prefill, timeout_s=10) < 3
        await only.settled()
        assert only.counted("extproc_releases_total") == {"released": 1}


async def test_any_decoder_frees_what_another_was_to_read(gateway: VllmGateway) -> None:
    """The one decoder that Envoy could use refuses; another of the fleet is asked for the release."""
    async with (
        Gate(gateway.decode) as gate,
        VllmGateway.started(
            gateway.prefill, gateway.decode, decode_urls=[gate.url], unrouted=[gateway.decode.url]
        ) as both,
    ):
        both.server.service.fleet.drain("decode-2", True)  # so that it is not picked for the request
        before = await both.transfers()
        with both.at_dispatch(lambda _: gate.shut()):
            answer = await both.post(CHAT, chat(words(150, 36)))
        assert answer.status_code == 503
        assert await freed(gateway.prefill, timeout_s=10) < FREED_WITHIN_S * 2
        await both.settled()
        assert both.counted("extproc_releases_total") == {"released": 1}
        assert await both.transfers() == before  # freed, not read


# ---- many ----


async def test_two_hundred_requests_with_random_hang_ups(gateway: VllmGateway) -> None:
    """Sixteen at a time; a third of the clients leave at a random moment."""
    import random

    draw = random.Random(7)
    slots = asyncio.Semaphore(16)
    before = gateway.accounts.requested
    ended: list[str] = []

    async def one(number: int) -> None:
        async with slots:
            stream = draw.random() < 0.5
            body = chat(words(draw.randrange(1, 120), 1000 + number), max_tokens=draw.randrange(1, 24), stream=stream)
            request = await gateway.open(body)
            if draw.random() < 1 / 3:
                try:
                    await request.until(b"\r\n\r\n", timeout_s=draw.uniform(0.0, 1.0))
                except TimeoutError:
                    ended.append("left before the answer")
                else:
                    ended.append("left after its start")
                request.cut()
            else:
                received = await request.to_end(timeout_s=120)
                assert received.startswith(b"HTTP/1.1 200"), received[:300]
                ended.append("complete")

    await asyncio.gather(*(one(number) for number in range(200)))
    assert len(ended) == 200
    assert ended.count("complete") > 100
    await gateway.settled(timeout_s=60)
    assert await freed(gateway.prefill, timeout_s=10) < 10
    assert await freed(gateway.decode, timeout_s=10) < 10
    asked = gateway.accounts.requested - before
    assert sum(gateway.counted("extproc_releases_total").values()) == asked
    assert gateway.counted("extproc_releases_total").keys() <= {"released"}
    assert sum(gateway.counted("extproc_exchanges_total").values()) == 200
    await until(lambda: sum(gateway.counted("extproc_stream_outcomes_total").values()) == 200)  # the log comes later
    assert MODEL_NAME in (await gateway.client.get("/v1/models")).text
