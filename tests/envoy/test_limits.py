"""Every limit through the real Envoy, in both body modes: what is at it passes, what is over it is told so."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
import pytest_asyncio

from tests.support.gateway import CHAT, COMPLETIONS, Gateway, connection_manager, in_mode, until, within

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

JSON = {"content-type": "application/json"}

LIMITS = {
    "body_bytes": 100_000,
    "headers": 40,
    "header_bytes": 8192,
    "json_depth": 20,
    "body_timeout_s": 0.5,
    "exchange_s": 1.5,
    "in_flight": 2,
}


def without_envoys_own_timeout(bootstrap: dict[str, Any]) -> None:
    connection_manager(bootstrap)["request_timeout"] = "0s"


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def limited_gateway(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    """One prefiller, one decoder, and little of everything."""
    change = in_mode(request.param, without_envoys_own_timeout)
    async with Gateway.started({"limits": LIMITS}, prefill=1, decode=1, change=change) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def limited(limited_gateway: Gateway) -> AsyncIterator[Gateway]:
    await limited_gateway.reset()
    yield limited_gateway
    await limited_gateway.settled()


# ---- bodies ----


def of_size(size: int) -> bytes:
    start, end = b'{"model":"m","messages":[{"role":"user","content":"', b'"}],"max_tokens":5}'
    return start + b"x" * (size - len(start) - len(end)) + end


async def test_B03_the_limit_is_exact(limited: Gateway) -> None:
    assert (await limited.post(of_size(100_000))).status_code == 200
    response = await within(3, limited.post(of_size(100_001)))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert len(limited.prefills) == len(limited.decodes) == 1


@pytest.mark.parametrize("size", [100_001, 1_000_000, 1_200_000, 6_000_000, 20_000_000], ids=str)
async def test_B03_B04_far_over_the_limit_is_413_over_http_2_as_well(limited: Gateway, size: int) -> None:
    """There Envoy takes a whole window of a body, and hands it over in one piece, before it compares it with a limit;
    a piece that gRPC refuses would be a 500."""
    assert (await over_http_2(limited, of_size(100_000)))[0] == 200
    status, answer = await within(5, over_http_2(limited, of_size(size)))
    assert (status, json.loads(answer)["error"]["code"] in ("body_too_large", "request_payload_too_large")) == (
        413,
        True,
    )
    assert len(limited.prefills) == len(limited.decodes) == 1


async def over_http_2(gateway: Gateway, body: bytes) -> tuple[int, bytes]:
    """Status and body. Sends as fast as it may, and reads at the same time: the answer may come before the end."""
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    lines = {":method": "POST", ":path": CHAT, ":scheme": "http", ":authority": "a", "content-length": str(len(body))}
    client.send_headers(1, [*lines.items(), *JSON.items()])
    sent, status, answer, over = 0, 0, b"", False
    while not over:
        while room := min(client.local_flow_control_window(1), client.max_outbound_frame_size, len(body) - sent):
            client.send_data(1, body[sent : sent + room], end_stream=sent + room == len(body))
            sent += room
        writer.write(client.data_to_send())
        data = await reader.read(65536)
        assert data, "the connection was closed without an answer"
        for event in client.receive_data(data):
            match event:
                case h2.events.ResponseReceived(headers=headers):
                    status = int(dict(headers)[b":status"])
                case h2.events.DataReceived(data=chunk):
                    answer += chunk
                case h2.events.StreamEnded() | h2.events.StreamReset():
                    over = True
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return status, answer


async def test_nesting_up_to_the_limit_passes_and_beyond_is_400(limited: Gateway) -> None:
    for levels, status in ((20, 200), (21, 400), (5000, 400)):
        body = b'{"prompt":"[[[[","x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
        for path in (COMPLETIONS, "/v1/embeddings"):
            response = await limited.post(body, path=path)
            assert response.status_code == status, (levels, path)
            if status == 400:
                assert response.json()["error"]["code"] == "json_too_deep"
    assert len(limited.prefills) == 1
    assert len(limited.decodes) == 2


async def test_as_many_members_as_are_read_pass_and_more_are_400(limited: Gateway) -> None:
    for count, status in ((4096, 200), (4097, 400)):
        body = b"{%b}" % b",".join(b'"k%d":%d' % (number, number) for number in range(count))
        response = await limited.post(body)
        assert response.status_code == status
    assert response.json()["error"]["code"] == "json_too_large"
    assert len(limited.prefills) == len(limited.decodes) == 1


# ---- headers ----


async def sent(gateway: Gateway, more: Sequence[tuple[str, str]]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in more)
    return await gateway.raw(f"DELETE /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{lines}\r\n".encode())


async def measured(gateway: Gateway, more: Sequence[tuple[str, str]]) -> tuple[int, int]:
    """How many headers, and bytes of them, the service saw of such a request: by what the decoder got of it."""
    assert (await sent(gateway, more)).startswith(b"HTTP/1.1 400 ")  # the recording decoder's word for no body
    added = ("host", "x-request-id", "x-gateway-destination-endpoint")
    lines = [(name, value) for name, value in gateway.decodes[-1].headers if name.lower() not in added]
    lines += [(":method", "DELETE"), (":path", "/x"), (":authority", "a"), (":scheme", "http")]
    return len(lines), sum(len(name) + len(value) for name, value in lines)


async def test_headers_up_to_the_limits_pass_and_beyond_get_431(limited: Gateway) -> None:
    """The service adds a few headers, and Envoy answers 500 to what then exceeds its own limits: those are larger."""
    count, size = await measured(limited, [])
    for filling in ([(f"x-{number:02}", "1") for number in range(40 - count)], [("cookie", "c" * (8192 - size - 6))]):
        assert (await measured(limited, filling))[len(filling) == 1] == (40, 8192)[len(filling) == 1]
        before = len(limited.decodes)
        over = [*filling, ("y", "")] if len(filling) > 1 else [("cookie", filling[0][1] + "c")]
        answer = await sent(limited, over)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code": "headers_too_large"' in answer
        assert len(limited.decodes) == before


@pytest.mark.parametrize("count", [41, 60, 76])
async def test_with_many_headers_more_than_the_limit_it_is_still_the_services_431(limited: Gateway, count: int) -> None:
    answer = await sent(limited, [(f"x-{number:02}", "1") for number in range(count)])
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_an_id_as_long_as_the_limits_allow_comes_back(either: Gateway) -> None:
    """It is a header of the response as well, where Envoy has limits of its own."""
    response = await either.post(headers={"x-request-id": "r" * 56_000})
    assert (response.status_code, response.headers["x-request-id"]) == (200, "r" * 56_000)


# ---- time, and how many at once ----


async def test_B12_the_exchanges_deadline_is_504(limited: Gateway) -> None:
    limited.prefillers[0].hang = True
    response = await within(5, limited.post())
    assert (response.status_code, response.json()["error"]["code"]) == (504, "exchange_timeout")
    await limited.prefillers[0].wait_for_disconnects(1)
    assert limited.decodes == []


async def test_B15_a_body_that_never_completes_is_408(limited: Gateway) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n" % CHAT.encode()
    response = await within(5, limited.raw(head + b'Content-Length: 100\r\n\r\n{"a":'))
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "body_timeout"' in response
    assert limited.prefills == limited.decodes == []


async def test_exchanges_beyond_the_limit_are_503_with_retry_after(limited: Gateway) -> None:
    limited.decoders[0].hang = True
    held = [asyncio.create_task(limited.post()) for _ in range(2)]
    await limited.decoders[0].wait_for(2)
    response = await within(3, limited.post())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "overloaded"
    for call in held:
        call.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    limited.decoders[0].hang = False
    assert limited.server is not None
    service = limited.server.service
    await until(lambda: service.in_flight == 0)
    assert (await limited.post()).status_code == 200
