"""What the prefill leg carries, and how its connections stand hang-ups, bursts and engines that close them."""

from __future__ import annotations

import asyncio
import gc
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.answers import breaks_off
from tests.support.engines import Answer, RecordedRequest, StubEngine, answer_prefill
from tests.support.gateway import CHAT, CHAT_BODY, ENGINE_KEY, Gateway, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]


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


@pytest.mark.parametrize("client", ["Bearer of-the-client", None])
async def test_B35_each_pool_has_a_key_of_its_own(client: str | None) -> None:
    """As docs/security.md says. Neither key takes the place of a client's own."""
    page = (Path(__file__).parents[2] / "docs/security.md").read_text()
    (said,) = re.findall(r"^```yaml\n(routes:\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (example,) = yaml.safe_load(said)["routes"]

    def change(bootstrap: dict[str, Any]) -> None:
        (chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
        (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
        for route in host["routes"]:
            route["request_headers_to_add"] = example["request_headers_to_add"]

    async with Gateway.started({"fleet": {"api_key": ENGINE_KEY}}, change=change, prefill=1, decode=1) as gateway:
        headers = {"authorization": client} if client else {}
        assert (await gateway.post(headers=headers)).status_code == 200
        told = [requests[0].header("authorization") for requests in (gateway.prefills, gateway.decodes)]
    assert told == ([client] * 2 if client else [f"Bearer {ENGINE_KEY}", "Bearer the-decoders-key"])


@pytest.mark.parametrize(("client", "prefill_leg"), [("Bearer k1", "Bearer k1"), (None, f"Bearer {ENGINE_KEY}")])
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
    broken, good = gateway.prefillers
    broken.respond = breaks_off
    for _ in range(2):  # one of the two is the broken one's turn
        assert (await gateway.post()).status_code == 200
    assert [len(engine.requests) for engine in (broken, good)] == [1, 2]
