"""Prefillers that are slow, fail, or answer what no decoder could use, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from extproc.connectors.base import MAX_PARAMS_BYTES
from tests.support.answers import after, breaks_off, closes, json_answer
from tests.support.engines import (
    BROKEN_JSON,
    Answer,
    RecordedRequest,
    Respond,
    StubEngine,
    answer_prefill,
    prefill_params,
)
from tests.support.gateway import CHAT_BODY, FALLBACK_BYTES, Gateway, until, within

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hasty_gateway() -> AsyncIterator[Gateway]:
    """Envoy waits a second for a reply, the service three for a prefiller."""
    settings = {"prefill": {"timeout_s": 3}, "envoy": {"message_timeout_s": 1}}
    async with Gateway.started(settings, prefill=1, decode=1) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def hasty(hasty_gateway: Gateway) -> AsyncIterator[Gateway]:
    await hasty_gateway.reset()
    yield hasty_gateway
    await hasty_gateway.settled()


def error(status: int, code: str, message: str) -> tuple[int, str, Any]:
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
    return status, "application/json", body


NO_PREFILLER = error(503, "prefill_unavailable", "No prefill engine is available.")
PREFILL_TIMEOUT = error(504, "prefill_timeout", "No prefill engine answered in time.")


def told(response: httpx.Response) -> tuple[int, str, Any]:
    return response.status_code, response.headers["content-type"], response.json()


# ---- slow prefillers ----


async def test_B12_a_prefill_may_take_longer_than_envoys_message_timeout(hasty: Gateway) -> None:
    hasty.prefillers[0].respond = after(2.0)
    response = await hasty.post()
    assert response.status_code == 200
    assert len(hasty.prefills) == 1
    assert "kv_transfer_params" in hasty.decodes[0].json()


async def test_B12_a_prefill_of_twenty_seconds(gateway: Gateway) -> None:
    """Longer than Envoy's pings on the connection, and all its times but those that the service asks for."""
    for engine in gateway.prefillers:
        engine.respond = after(20.0)
    response = await gateway.post(timeout=60)
    assert response.status_code == 200
    assert len(gateway.prefills) == 1
    assert [b"kv_transfer_params" in request.body for request in gateway.decodes] == [True]


async def test_B12_beyond_the_limit_our_own_timeout_comes_first(hasty: Gateway) -> None:
    hasty.prefillers[0].hang = True
    response = await hasty.post(headers={"x-request-id": "b12"})
    assert told(response) == PREFILL_TIMEOUT
    await hasty.prefillers[0].wait_for_disconnects(1)  # and the engine frees what it has
    record = await hasty.exchange("b12")
    assert (record["outcome"], record["failed_attempts"]) == ("rejected_by_us", ["timeout"])
    assert hasty.decodes == []
    assert hasty.decoders[0].releases == []


# ---- failing prefillers ----


def lacks(key: str) -> Respond:
    def respond(request: RecordedRequest) -> Answer:
        params = prefill_params(request.header("x-request-id") or "")
        del params[key]
        return Answer.json({"kv_transfer_params": params})

    return respond


def with_params(**more: Any) -> Respond:
    return lambda request: Answer.json(
        {"kv_transfer_params": prefill_params(request.header("x-request-id") or "") | more}
    )


UNUSABLE: dict[str, tuple[Respond, str]] = {
    "503": (lambda _: Answer.json({"error": "busy"}, status=503), "status_5xx"),
    "500": (lambda _: Answer(500), "status_5xx"),
    "redirect": (lambda _: Answer(307, [("location", "/elsewhere")]), "status_3xx"),
    "closed": (closes, "disconnected"),
    "broken off": (breaks_off, "disconnected"),
    "null": (json_answer(b'{"kv_transfer_params": null}'), "unusable_no_params"),
    "absent": (json_answer(b'{"choices": []}'), "unusable_no_params"),
    "list": (json_answer(b'{"kv_transfer_params": []}'), "unusable_bad_params"),
    "answer is a list": (json_answer(b"[]"), "unusable_not_json"),
    "broken json": (lambda _: BROKEN_JSON, "unusable_not_json"),
    "event stream": (lambda _: Answer.stream({"kv_transfer_params": {"a": 1}}), "unusable_not_json"),
    "too large": (with_params(padding="x" * MAX_PARAMS_BYTES), "unusable_params_too_large"),
    "no blocks": (lacks("remote_block_ids"), "unusable_missing_remote_block_ids"),
    "not remote": (json_answer(b'{"kv_transfer_params": {"do_remote_prefill": false}}'), "unusable_not_remote"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_B31_without_a_usable_prefill_the_decoder_prefills(falling_back: Gateway, kind: str) -> None:
    respond, reason = UNUSABLE[kind]
    for engine in falling_back.prefillers:
        engine.respond = respond
    fallbacks = falling_back.counts("extproc_fallbacks_total").get("decode", 0)
    response = await falling_back.post(headers={"x-request-id": f"b31-{kind}"})
    assert response.status_code == 200
    assert [request.body for request in falling_back.decodes] == [CHAT_BODY]
    assert [len(attempts(engine)) for engine in falling_back.prefillers] == [1, 1]
    record = await falling_back.exchange(f"b31-{kind}")
    assert (record["decision"], record["failed_attempts"]) == ("fallback", [reason, reason])
    assert falling_back.counts("extproc_fallbacks_total")["decode"] == fallbacks + 1


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_B31_without_a_usable_prefill_or_a_fallback_the_client_is_told(gateway: Gateway, kind: str) -> None:
    respond, reason = UNUSABLE[kind]
    for engine in gateway.prefillers:
        engine.respond = respond
    response = await gateway.post(headers={"x-request-id": f"told-{kind}"})
    assert told(response) == NO_PREFILLER
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-request-id"] == f"told-{kind}"
    record = await gateway.exchange(f"told-{kind}")
    assert (record["outcome"], record["failed_attempts"]) == ("rejected_by_us", [reason, reason])
    assert gateway.decodes == []
    assert [engine.releases for engine in gateway.decoders] == [[], []]


async def test_B31_all_prefillers_down(gateway: Gateway, falling_back: Gateway) -> None:
    for engine in (*gateway.prefillers, *falling_back.prefillers):
        await engine.refuse()
    response = await within(2, gateway.post())
    assert told(response) == NO_PREFILLER
    assert response.headers["retry-after"] == "1"
    assert gateway.decodes == []
    response = await within(2, falling_back.post())
    assert response.status_code == 200
    assert [request.body for request in falling_back.decodes] == [CHAT_BODY]


async def test_B31_prefillers_that_take_too_long(falling_back: Gateway) -> None:
    for engine in falling_back.prefillers:
        engine.hang = True
    response = await falling_back.post()
    assert response.status_code == 200
    assert [request.body for request in falling_back.decodes] == [CHAT_BODY]
    for engine in falling_back.prefillers:
        await engine.wait_for_disconnects(1)


def attempts(engine: StubEngine) -> set[str | None]:
    """Ids of the requests that an engine got: one is sent again where a kept connection turns out to be closed."""
    return {request.header("x-request-id") for request in engine.requests}


def failing_first(gateway: Gateway, respond: Respond) -> None:
    """Whoever is asked first fails, the other does not."""
    first: set[str | None] = set()

    def either(request: RecordedRequest) -> Answer:
        if not first:
            first.add(request.header("x-request-id"))
        answer = respond(request) if request.header("x-request-id") in first else answer_prefill(request)
        assert isinstance(answer, Answer)
        return answer

    for engine in gateway.prefillers:
        engine.respond = either


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_a_prefill_moves_to_the_other_prefiller(gateway: Gateway, kind: str) -> None:
    respond, reason = UNUSABLE[kind]
    failing_first(gateway, respond)
    response = await gateway.post(headers={"x-request-id": f"moved-{kind}"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == f"moved-{kind}"
    one, other = (attempts(engine) for engine in gateway.prefillers)
    (decode,) = gateway.decodes
    assert len({request.body for request in gateway.prefills}) == 1
    # Each attempt has its own id; the decode leg carries the one that worked.
    assert len(one) == len(other) == len(one ^ other) / 2 == 1
    assert decode.header("x-request-id") in one | other
    params = decode.json()["kv_transfer_params"]
    assert params == prefill_params(decode.header("x-request-id") or "")
    record = await gateway.exchange(f"moved-{kind}")
    assert (record["decision"], record["failed_attempts"]) == ("disaggregated", [reason])
    assert record["request_id"] == decode.header("x-request-id")


async def test_a_prefiller_that_is_down_costs_no_request(gateway: Gateway) -> None:
    down, up = gateway.prefillers
    await down.refuse()
    responses = [await gateway.post() for _ in range(4)]
    assert [response.status_code for response in responses] == [200] * 4
    assert len(up.requests) == 4
    assert [request.json()["kv_transfer_params"] for request in gateway.decodes] == [
        prefill_params(request.header("x-request-id") or "") for request in gateway.decodes
    ]


# ---- the fallback's bounds ----


def chat_of(size: int) -> bytes:
    start, end = b'{"model":"m","messages":[],"user":"', b'"}'
    return start + b"u" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize(("size", "status"), [(FALLBACK_BYTES, 200), (FALLBACK_BYTES + 1, 503)])
async def test_only_small_prompts_fall_back(falling_back: Gateway, size: int, status: int) -> None:
    for engine in falling_back.prefillers:
        engine.respond = lambda _: Answer(500)
    refused = falling_back.counts("extproc_fallbacks_total").get("out_of_bounds", 0)
    response = await falling_back.post(chat_of(size))
    assert response.status_code == status
    assert [request.body for request in falling_back.decodes] == ([chat_of(size)] if status == 200 else [])
    if status == 503:
        assert told(response) == NO_PREFILLER
        assert response.headers["retry-after"] == "1"
        assert falling_back.counts("extproc_fallbacks_total")["out_of_bounds"] == refused + 1


async def test_only_so_many_fall_back_at_once(falling_back: Gateway) -> None:
    for engine in falling_back.prefillers:
        engine.respond = lambda _: Answer(500)
    for decoder in falling_back.decoders:
        decoder.hang = True
    first = asyncio.create_task(falling_back.post())
    await until(lambda: len(falling_back.decodes) == 1)
    assert told(await falling_back.post()) == NO_PREFILLER
    first.cancel()  # its slot comes back, however it ended
    with pytest.raises(asyncio.CancelledError):
        await first
    await falling_back.settled()
    for decoder in falling_back.decoders:
        decoder.hang = False
    assert (await falling_back.post()).status_code == 200
