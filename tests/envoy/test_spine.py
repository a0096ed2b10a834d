"""The way of a request through Envoy, service, prefiller and decoder: identity, routing, what the client sees."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.support.engines import Answer, RecordedRequest, answer_prefill
from tests.support.gateway import CHAT, CHAT_BODY, COMPLETIONS, Gateway, until, until_async

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

DESTINATION = "x-gateway-destination-endpoint"


async def test_both_legs_carry_one_request_id_of_ours(gateway: Gateway) -> None:
    responses = [await gateway.post(headers={"x-request-id": "the-client's"}) for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    # `header` insists on exactly one line.
    by_prefill = [request.header("x-request-id") for request in gateway.prefills]
    by_decode = [request.header("x-request-id") for request in gateway.decodes]
    assert sorted(map(str, by_prefill)) == sorted(map(str, by_decode))
    assert len(set(by_prefill)) == 2  # the client used its id twice, we do not
    assert {uuid.UUID(request_id).version for request_id in by_prefill} == {4}
    assert [response.headers.get_list("x-request-id") for response in responses] == [["the-client's"]] * 2


async def test_a_client_without_a_request_id_learns_ours(gateway: Gateway) -> None:
    response = await gateway.post()
    assert response.headers.get_list("x-request-id") == [gateway.decodes[0].header("x-request-id")]


async def test_several_request_id_lines_of_a_client_become_one(gateway: Gateway) -> None:
    response = await gateway.raw(
        b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Request-Id: a\r\nx-request-id: b\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(CHAT_BODY), CHAT_BODY)
    )
    assert response.startswith(b"HTTP/1.1 200 ")
    (prefill,), (decode,) = gateway.prefills, gateway.decodes
    assert decode.header("x-request-id") == prefill.header("x-request-id")


async def test_B10_requests_reach_the_decoder_that_the_metadata_named(gateway: Gateway) -> None:
    ids = [f"b10-{number}" for number in range(50)]
    responses = await asyncio.gather(*(gateway.post(headers={"x-request-id": name}) for name in ids))
    assert Counter(response.status_code for response in responses) == {200: 50}

    served = {d.header("x-request-id"): engine for engine in gateway.decoders for d in engine.requests}
    names = {engine: f"decode-{number}" for number, engine in enumerate(gateway.decoders, 1)}
    assert len(served) == 50
    for name in ids:
        record = await gateway.exchange(name)
        engine = served[record["request_id"]]
        assert (record["decoder"], record["upstream"]) == (names[engine], engine.endpoint)
        assert (record["upstream_attempts"], record["outcome"]) == (1, "completed")
    assert [len(engine.requests) for engine in gateway.decoders] == [25, 25]  # each in its turn
    assert [len(engine.requests) for engine in gateway.prefillers] == [25, 25]


async def test_B08_B10_the_destination_header_names_the_decoder_first(gateway: Gateway) -> None:
    for _ in range(4):
        await gateway.post()
    one, other = gateway.decoders
    for engine, second in ((one, other), (other, one)):
        values = [request.header(DESTINATION) for request in engine.requests]
        assert values == [f"{engine.endpoint},{second.endpoint}"] * 2


async def test_B10_without_a_decoder_the_client_is_told(gateway: Gateway) -> None:
    assert gateway.server is not None
    fleet = gateway.server.service.fleet
    for name in ("decode-1", "decode-2"):
        assert fleet.drain(name, drained=True)
    try:
        responses = [await gateway.post(path=path) for path in (CHAT, "/v1/embeddings")]
    finally:
        for name in ("decode-1", "decode-2"):
            fleet.drain(name, drained=False)
    for response in responses:
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("server_error", None, "no_decoder")
        assert error["message"] == "No decode engine is ready."
    assert gateway.prefills == gateway.decodes == []
    await until_async(gateway_is_serving(gateway))


def gateway_is_serving(gateway: Gateway) -> Callable[[], Awaitable[bool]]:
    async def serving() -> bool:
        return (await gateway.client.get(f"{gateway.admin_url}/readyz")).status_code == 200

    return serving


async def test_clients_cannot_steer(gateway: Gateway) -> None:
    one, other = gateway.decoders
    steering = {
        DESTINATION: one.endpoint,
        f"{DESTINATION}-subset": one.endpoint,
        f"{DESTINATION}-served": one.endpoint,
        "X-Data-Parallel-Rank": "3",
        "x-extproc-anything": "1",
        "x-envoy-retry-on": "5xx",
    }
    for path in (CHAT, "/v1/embeddings"):
        for _ in range(2):
            assert (await gateway.post(path=path, headers=steering)).status_code == 200
    assert (len(one.requests), len(other.requests)) == (2, 2)
    for request in gateway.decodes:
        assert request.header(DESTINATION) in (f"{one.endpoint},{other.endpoint}", f"{other.endpoint},{one.endpoint}")
    for request in (*gateway.decodes, *gateway.prefills):
        names = {name.lower() for name, _ in request.headers}
        assert not names & ({name.lower() for name in steering} - {DESTINATION})
    assert [request.header(DESTINATION) for request in gateway.prefills] == [None, None]


async def test_server_timing_tells_the_prefill_time(gateway: Gateway) -> None:
    def slow(request: RecordedRequest) -> Answer:
        answer = answer_prefill(request)
        answer.delay_s = 0.15
        return answer

    for engine in gateway.prefillers:
        engine.respond = slow
    started = time.monotonic()
    response = await gateway.post()
    total_ms = (time.monotonic() - started) * 1000
    (value,) = response.headers.get_list("server-timing")
    found = re.fullmatch(r"prefill;dur=(\d+\.\d)", value)
    assert found is not None, value
    assert 150 <= float(found[1]) <= total_ms
    # Nothing to tell where there was no prefill.
    assert "server-timing" not in (await gateway.post(path="/v1/embeddings")).headers


async def test_the_decoders_answer_passes_as_it_is(gateway: Gateway) -> None:
    body = b'{"id":"x",  "choices":[],"usage":{"n":9007199254740993},"kv_transfer_params":null}\n'
    head = [("content-type", "application/json; charset=utf-8"), ("x-engine", "1"), ("set-cookie", "a=1")]
    for engine in gateway.decoders:
        engine.respond = lambda _: Answer(headers=[*head, ("set-cookie", "b=2")], body=body)
    response = await gateway.post()
    assert (response.status_code, response.content) == (200, body)
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    assert response.headers["x-engine"] == "1"
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert DESTINATION not in response.headers


async def test_tokens_come_one_by_one_and_the_service_sees_none(gateway: Gateway) -> None:
    """Each event reaches the client before the decoder sends the next; the ext_proc stream has no message for any."""
    arrived = [asyncio.Event() for _ in range(21)]

    async def after_the_one_before(number: int) -> None:
        if number:
            await asyncio.wait_for(arrived[number - 1].wait(), 10)

    def streaming(_: RecordedRequest) -> Answer:
        answer = Answer.stream(*({"choices": [{"index": 0, "delta": {"content": str(n)}}]} for n in range(20)))
        answer.between_events = after_the_one_before
        return answer

    for engine in gateway.decoders:
        engine.respond = streaming
    before = await ext_proc_messages(gateway)
    body = b""
    async with gateway.client.stream(
        "POST", CHAT, content=CHAT_BODY.replace(b"}]", b'}], "stream": true'), headers={"x-request-id": "tokens"}
    ) as response:
        async for chunk in response.aiter_raw():
            body += chunk
            for event in arrived[: body.count(b"\n\n")]:
                event.set()
    assert body.count(b"data: ") == 21
    assert body.endswith(b"data: [DONE]\n\n")
    await gateway.exchange("tokens")
    after = await ext_proc_messages(gateway)
    # Request headers, request body, response headers.
    assert (after[0] - before[0], after[1] - before[1]) == (3, 3)


async def ext_proc_messages(gateway: Gateway) -> tuple[int, int]:
    """(to the service, from the service)"""
    stats = await gateway.envoy.stats(r"ext_proc.*stream_msgs")
    sent = [value for name, value in stats.items() if name.endswith("stream_msgs_sent")]
    received = [value for name, value in stats.items() if name.endswith("stream_msgs_received")]
    return sum(sent), sum(received)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_in_the_prefill_closes_the_prefill_call(
    gateway: Gateway, path: str, stream: bool
) -> None:
    for engine in gateway.prefillers:
        engine.hang = True
    name = f"gone-{path}-{stream}"
    body = {"model": "m", "prompt": "hi", "messages": [], "stream": stream}
    call = asyncio.create_task(gateway.post(body, path=path, headers={"x-request-id": name}))
    await until(lambda: bool(gateway.prefills))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    (engine,) = [engine for engine in gateway.prefillers if engine.requests]
    await engine.wait_for_disconnects(1, within_s=2)
    record = await gateway.exchange(name)
    assert (record["decision"], record["outcome"], record["prefiller"]) == ("client_left", "client_reset", None)
    assert len(gateway.prefills) == 1
    assert gateway.decodes == []
    assert [engine.releases for engine in gateway.decoders] == [[], []]  # an engine frees an unfinished prefill itself
