"""What clients, prefillers and decoders do wrong, and what comes of it."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.engines import (
    BROKEN_JSON,
    Answer,
    CloseConnection,
    RecordedRequest,
    Respond,
    StubEngine,
    answer_prefill,
    prefill_params,
)
from tests.support.gateway import CHAT, CHAT_BODY, Gateway, until, within

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

FALLBACK_BYTES = 2000
KEY = "configured-key"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fallback_gateway() -> AsyncIterator[Gateway]:
    """Decoders prefill where no prefiller can; engines have a key; few connections to them."""
    settings: dict[str, Any] = {
        "fleet": {"api_key": KEY},
        "prefill": {
            "timeout_s": 1.5,
            "on_failure": "decode",
            "fallback": {"max_body_bytes": FALLBACK_BYTES, "max_concurrent": 1},
            "max_connections": 4,
        },
    }
    async with Gateway.started(settings) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def falling_back(fallback_gateway: Gateway) -> AsyncIterator[Gateway]:
    await fallback_gateway.reset()
    yield fallback_gateway
    await fallback_gateway.settled()


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


def after(seconds: float) -> Respond:
    def respond(request: RecordedRequest) -> Answer:
        answer = answer_prefill(request)
        answer.delay_s = seconds
        return answer

    return respond


async def test_B12_a_prefill_may_take_longer_than_envoys_message_timeout(hasty: Gateway) -> None:
    hasty.prefillers[0].respond = after(2.0)
    response = await hasty.post()
    assert response.status_code == 200
    assert len(hasty.prefills) == 1
    assert "kv_transfer_params" in hasty.decodes[0].json()


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


def json_answer(text: bytes, content_type: str = "application/json") -> Respond:
    return lambda _: Answer(headers=[("content-type", content_type)], body=text)


def closes(_: RecordedRequest) -> Answer:
    raise CloseConnection


def breaks_off(request: RecordedRequest) -> Answer:
    """Closes the connection in the middle of a good answer."""

    async def between(number: int) -> None:
        if number:
            raise CloseConnection

    body = answer_prefill(request).body
    return Answer(headers=[("content-type", "application/json")], events=[body[:40], body[40:]], between_events=between)


def lacks(key: str) -> Respond:
    def respond(request: RecordedRequest) -> Answer:
        params = prefill_params(request.header("x-request-id") or "")
        del params[key]
        return Answer.json({"kv_transfer_params": params})

    return respond


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


# ---- the prefiller's own verdict ----

VERDICT = b'{"error": {"message":"This model\'s maximum context length is 10 tokens\\u2026", "code":400 }}\n'


def verdict(status: int, *headers: tuple[str, str], body: bytes = VERDICT) -> Respond:
    return lambda _: Answer(status, [("content-type", "application/json"), *headers], body)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 418, 422, 429, 451, 499])
@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_B32_a_prefillers_4xx_is_the_clients_answer(falling_back: Gateway, status: int, stream: bytes) -> None:
    for engine in falling_back.prefillers:
        engine.respond = verdict(status)
    response = await falling_back.post(b'{"model":"m","messages":[],"stream":' + stream + b"}")
    assert (response.status_code, response.content) == (status, VERDICT)
    assert response.headers.get_list("content-type") == ["application/json"]
    assert response.headers.get_list("content-length") == [str(len(VERDICT))]
    # The client's fault: no second prefiller, no fallback, no decode.
    assert len(falling_back.prefills) == 1
    assert falling_back.decodes == []


async def test_B32_its_headers_are_kept_but_for_its_connections(gateway: Gateway) -> None:
    headers = [
        ("Retry-After", "3"),
        ("WWW-Authenticate", 'Bearer realm="x"'),
        ("x-ratelimit-remaining", "0"),
        ("Connection", "close, x-hop"),
        ("Keep-Alive", "timeout=5"),
        ("Date", "Mon, 01 Jan 2024 00:00:00 GMT"),
        ("Server", "uvicorn"),
        ("Trailer", "x-after"),
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
    ]
    for engine in gateway.prefillers:
        engine.respond = verdict(429, *headers)
    response = await gateway.post(headers={"x-request-id": "b32"})
    assert (response.status_code, response.content) == (429, VERDICT)
    assert response.headers["retry-after"] == "3"
    assert response.headers["www-authenticate"] == 'Bearer realm="x"'
    assert response.headers["x-ratelimit-remaining"] == "0"
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    for name in ("connection", "keep-alive", "trailer", "transfer-encoding"):
        assert name not in response.headers
    assert response.headers.get("date") != "Mon, 01 Jan 2024 00:00:00 GMT"
    assert response.headers.get("server") != "uvicorn"
    assert response.headers.get_list("x-request-id") == ["b32"]
    assert gateway.decodes == []
    record = await gateway.exchange("b32")
    assert (record["decision"], record["outcome"]) == ("refused_by_engine", "rejected_by_us")


async def test_B32_a_compressed_verdict_stays_readable(gateway: Gateway) -> None:
    for engine in gateway.prefillers:
        engine.respond = verdict(400, ("content-encoding", "gzip"), body=gzip.compress(VERDICT))
    response = await gateway.post()
    assert (response.status_code, response.content) == (400, VERDICT)


async def test_B32_a_chunked_verdict_gets_a_length(gateway: Gateway) -> None:
    for engine in gateway.prefillers:
        engine.respond = lambda _: Answer(400, [("content-type", "application/json")], events=[b'{"a":', b"1}"])
    response = await gateway.post()
    assert (response.status_code, response.content) == (400, b'{"a":1}')
    assert response.headers.get_list("content-length") == ["7"]
    assert "transfer-encoding" not in response.headers


async def test_B32_a_verdict_without_a_body(gateway: Gateway) -> None:
    for engine in gateway.prefillers:
        engine.respond = lambda _: Answer(401, [("www-authenticate", "Bearer")])
    response = await gateway.post()
    assert (response.status_code, response.content) == (401, b"")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
async def test_B32_a_decoders_refusal_passes_as_it_is(gateway: Gateway, status: int, stream: bytes) -> None:
    for engine in gateway.decoders:
        engine.respond = verdict(status, ("Retry-After", "3"))
    response = await gateway.post(b'{"model":"m","messages":[],"stream":' + stream + b"}")
    assert (response.status_code, response.content) == (status, VERDICT)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["retry-after"] == "3"
    assert (len(gateway.prefills), len(gateway.decodes)) == (1, 1)


# ---- decoders that refuse the connection ----


async def test_a_refusing_decoder_is_replaced_with_the_same_handoff(gateway: Gateway) -> None:
    down, up = gateway.decoders
    await down.refuse()
    records = []
    for number in range(2):  # one of the two is meant for the decoder that is down
        name = f"refusing-{number}"
        assert (await gateway.post(headers={"x-request-id": name})).status_code == 200
        records.append(await gateway.exchange(name))
        assert len(gateway.prefills) == number + 1
    assert sorted((r["decoder"], r["upstream_attempts"]) for r in records) == [("decode-1", 2), ("decode-2", 1)]
    assert {r["upstream"] for r in records} == {up.endpoint}
    assert {r["outcome"] for r in records} == {"completed"}
    for request in up.requests:
        params = json.dumps(prefill_params(request.header("x-request-id") or "")).encode()
        assert request.body == CHAT_BODY[:-1] + b', "kv_transfer_params":'.replace(b", ", b",") + params + b"}"


async def test_all_decoders_refusing_is_an_error_and_one_prefill(gateway: Gateway) -> None:
    for engine in gateway.decoders:
        await engine.refuse()
    response = await within(5, gateway.post(headers={"x-request-id": "all-refuse"}))
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["type"] == "gateway_error"
    record = await gateway.exchange("all-refuse")
    assert (record["outcome"], record["upstream_attempts"]) == ("decode_unreachable", 3)
    assert len(gateway.prefills) == 1


# ---- what the prefill leg carries ----

FRAMING = (
    b"POST %s HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\nTE: trailers\r\nKeep-Alive: timeout=5\r\n"
    b"Expect: 100-continue\r\nAccept: text/event-stream\r\nAccept-Encoding: gzip, br\r\n"
    b"Content-Type: application/json\r\n"
    b"Proxy-Authorization: Basic eA==\r\nX-Request-Id: b35\r\nX-Forwarded-For: 1.2.3.4\r\nX-Envoy-Max-Retries: 9\r\n"
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\ntracestate: a=b\r\nUser-Agent: ua\r\n"
    b"X-Own: 1\r\nX-Own: 2\r\n%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("authorization", [b"Authorization: Bearer k1\r\n", b""])
async def test_B35_the_prefill_leg_has_the_clients_headers_but_for_its_connections(
    gateway: Gateway, authorization: bytes
) -> None:
    response = await gateway.raw(FRAMING % (CHAT.encode(), authorization, len(CHAT_BODY), CHAT_BODY))
    assert b"HTTP/1.1 200 OK\r\n" in response
    (prefill,), (decode,) = gateway.prefills, gateway.decodes
    expected = [
        ("accept", "application/json"),
        ("accept-encoding", "identity"),
        ("content-length", str(len(prefill.body))),
        ("content-type", "application/json"),
        ("host", next(engine.endpoint for engine in gateway.prefillers if engine.requests)),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "a=b"),
        ("user-agent", "ua"),
        ("x-own", "1"),
        ("x-own", "2"),
        ("x-request-id", decode.header("x-request-id")),
    ]
    if authorization:
        expected.append(("authorization", "Bearer k1"))
    assert sorted((name.lower(), value) for name, value in prefill.headers) == sorted(expected)
    assert decode.header("authorization") == ("Bearer k1" if authorization else None)
    assert decode.header("traceparent") == prefill.header("traceparent")


@pytest.mark.parametrize(("client", "prefill_leg"), [("Bearer k1", "Bearer k1"), (None, f"Bearer {KEY}")])
async def test_B35_a_configured_key_stands_in_for_none(
    falling_back: Gateway, client: str | None, prefill_leg: str
) -> None:
    headers = {"authorization": client} if client else {}
    assert (await falling_back.post(headers=headers)).status_code == 200
    (prefill,), (decode,) = falling_back.prefills, falling_back.decodes
    assert prefill.header("authorization") == prefill_leg
    assert decode.header("authorization") == client


# ---- the connections of the prefill leg ----


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # connections cancelled the moment they were made
async def test_B37_hundreds_of_hang_ups_cost_no_connection(falling_back: Gateway) -> None:
    """At all points: before the prefill call, waiting for one of four connections, in the call, at its answer."""
    chance = random.Random(37)

    def soon(request: RecordedRequest) -> Answer:
        answer = answer_prefill(request)
        answer.delay_s = chance.uniform(0, 0.02)
        return answer

    for engine in falling_back.prefillers:
        engine.respond = soon
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
        CHAT.encode(),
        len(CHAT_BODY),
    )
    host, port = falling_back.url.removeprefix("http://").split(":")

    async def hang_up() -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + CHAT_BODY)
        await asyncio.sleep(chance.uniform(0, 0.04))
        writer.transport.abort()

    for _ in range(10):
        await asyncio.gather(*(hang_up() for _ in range(50)))
    await falling_back.settled()
    await falling_back.reset()
    gc.collect()
    for number in range(4):  # each of both prefillers twice
        assert (await falling_back.post(headers={"x-request-id": f"b37-{number}"})).status_code == 200
        assert (await falling_back.exchange(f"b37-{number}"))["failed_attempts"] is None
    assert [len(engine.requests) for engine in falling_back.prefillers] == [2, 2]


async def test_B37_many_slow_prefills_at_once_all_get_a_connection(gateway: Gateway) -> None:
    """More than the hundred that HTTP clients allow by default, all held until the last has come."""
    count = 120
    for engine in gateway.prefillers:
        engine.hang = True
    calls = [
        asyncio.create_task(
            gateway.raw(
                b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(CHAT_BODY), CHAT_BODY),
                timeout_s=60,
            )
        )
        for _ in range(count)
    ]
    await until(lambda: len(gateway.prefills) == count, timeout_s=60)
    assert [len(engine.requests) for engine in gateway.prefillers] == [count / 2, count / 2]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for engine in gateway.prefillers:
        await engine.wait_for_disconnects(count // 2)


async def test_B38_a_kept_connection_that_the_engine_closes_costs_no_request(gateway: Gateway) -> None:
    for engine in gateway.prefillers:
        await drop_connections(engine)
        engine.close_on_nth = 2
    responses = [await gateway.post(headers={"x-request-id": f"b38-{n}"}) for n in range(4)]
    assert [response.status_code for response in responses] == [200] * 4
    for number in range(4):
        assert (await gateway.exchange(f"b38-{number}"))["failed_attempts"] is None
    answered: set[str | None] = set()
    for engine in gateway.prefillers:
        # Closed on the second request of a connection, without an answer; it comes again on a fresh one, unchanged.
        again = [request for request in engine.requests if request.nth == 1]
        unanswered = [request for request in engine.requests if request.nth == 2]
        for request in unanswered:
            (same,) = [r for r in again if r.header("x-request-id") == request.header("x-request-id")]
            assert same.body == request.body
            assert end_to_end(same) == end_to_end(request)
            assert same.connection > request.connection
        assert len({request.header("x-request-id") for request in again}) == len(again) == 2
        answered |= {request.header("x-request-id") for request in again}
    assert len(answered) == 4
    assert {request.header("x-request-id") for request in gateway.decodes} == answered


def end_to_end(request: RecordedRequest) -> list[tuple[str, str]]:
    return [(name, value) for name, value in request.headers if name.lower() != "connection"]


async def test_B38_connections_that_went_while_idle_cost_no_request(gateway: Gateway) -> None:
    for number in range(20):
        response = await gateway.post()
        assert response.status_code == 200, f"round {number}"
        for engine in gateway.prefillers:
            await drop_connections(engine)
    assert len(gateway.prefills) == 20


async def drop_connections(engine: StubEngine) -> None:
    await engine.refuse()
    await engine.listen()


async def test_B38_a_failure_after_the_first_bytes_is_not_repeated_there(gateway: Gateway) -> None:
    failing_first(gateway, breaks_off)
    assert (await gateway.post()).status_code == 200
    assert [len(engine.requests) for engine in gateway.prefillers] == [1, 1]
