"""Cases from public bug reports where Envoy itself matters, by their id, through the real one in both body modes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.engines import Answer, RecordedRequest, answer_prefill
from tests.support.gateway import (
    CHAT,
    CHAT_BODY,
    COMPLETIONS,
    Gateway,
    connection_manager,
    full_duplex,
    in_mode,
    until,
    within,
)
from tests.support.scripted_envoy import Mode

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

DESTINATION = "x-gateway-destination-endpoint"
JSON = {"content-type": "application/json"}
PARAMS = (
    b'{ "remote_port":5600, "do_remote_prefill" : true,"do_remote_decode":false,"remote_engine_id":"e1",'
    b'"remote_block_ids":[[1,9007199254740993]],"remote_host":"10.0.0.9","remote_request_id":"r-\\u2603"}'
)


def hand_over(_: RecordedRequest) -> Answer:
    body = b'{"kv_transfer_params" :' + PARAMS + b"}"
    return Answer(headers=[("content-type", "application/json")], body=body)


def of_size(size: int) -> bytes:
    start, end = b'{"model":"m","messages":[{"role":"user","content":"', b'"}],"max_tokens":5}'
    return start + b"x" * (size - len(start) - len(end)) + end


# ---- bodies ----


@pytest.mark.parametrize("size", [200, 32_769, 62_000, 300_000, 1_048_577, 6 * 1024 * 1024], ids=str)
async def test_B01_B03_B04_B05_bodies_of_any_size_reach_both_legs(streaming: Gateway, size: int) -> None:
    for engine in streaming.prefillers:
        engine.respond = hand_over
    body = of_size(size)
    response = await streaming.post(body)
    assert response.status_code == 200
    (prefill,), (decode,) = streaming.prefills, streaming.decodes
    assert decode.body == body[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    assert decode.header("transfer-encoding") == "chunked"
    assert decode.header("content-length") is None
    assert prefill.json()["messages"] == json.loads(body)["messages"]
    assert (prefill.json()["max_tokens"], prefill.json()["stream"]) == (1, False)
    assert prefill.header("x-request-id") == decode.header("x-request-id")


async def test_B24_every_other_byte_is_the_clients(streaming: Gateway) -> None:
    for engine in streaming.prefillers:
        engine.respond = hand_over
    body = '{ "seed" : 9007199254740993,"tools":[{"z":1,"a":[]}], "prompt":"caf\\u00e9 ☃ \\/" ,"x":1.0e2 }\n'.encode()
    assert (await streaming.post(body, path=COMPLETIONS)).status_code == 200
    assert streaming.decodes[0].body == body[: -len(b" }\n")] + b',"kv_transfer_params":' + PARAMS + b" }\n"


async def test_O12_a_body_in_small_chunks_is_prefilled_once(either: Gateway) -> None:
    async def one_by_one() -> AsyncIterator[bytes]:
        for byte in CHAT_BODY:
            yield bytes([byte])

    response = await either.client.post(CHAT, content=one_by_one(), headers=JSON)
    assert response.status_code == 200
    assert len(either.prefills) == len(either.decodes) == 1
    decode = either.decodes[0].json()
    assert decode.pop("kv_transfer_params")["do_remote_prefill"] is True
    assert decode == json.loads(CHAT_BODY)


def without_retries(bootstrap: dict[str, Any]) -> None:
    """With a retry policy, Envoy 1.40 sends a body that ends with trailers twice, whatever its processor answers."""
    (host,) = connection_manager(bootstrap)["route_config"]["virtual_hosts"]
    for route in host["routes"]:
        del route["route"]["retry_policy"]


async def test_B17_trailers_end_the_body_once() -> None:
    change = in_mode("FULL_DUPLEX_STREAMED", without_retries)
    async with Gateway.started(prefill=1, decode=1, change=change) as gateway:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (CHAT_BODY[:30], CHAT_BODY[30:]))
        response = await gateway.raw(
            b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n%b0\r\nx-sum: 1\r\n\r\n" % (CHAT.encode(), chunks)
        )
        assert response.startswith(b"HTTP/1.1 200 ")
        decode = gateway.decodes[0].json()
        assert decode.pop("kv_transfer_params")["do_remote_prefill"] is True
        assert decode == json.loads(CHAT_BODY)
        assert len(gateway.prefills) == 1
        await gateway.settled()


async def test_B29_uploads_pass_byte_for_byte(either: Gateway) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + bytes(range(256)) * 400 + b"\r\n--x--\r\n"
    for content_type in ("multipart/form-data; boundary=x", "audio/wav"):
        headers = {"content-type": content_type, "authorization": "Bearer k"}
        response = await either.client.post("/v1/audio/transcriptions", content=body, headers=headers)
        assert response.status_code == 400  # the recording decoder's word for what is no JSON
    assert [request.body for request in either.decodes] == [body, body]
    assert {request.header("authorization") for request in either.decodes} == {"Bearer k"}
    assert either.prefills == []


async def test_a_bodys_connector_params_reach_no_engine(either: Gateway) -> None:
    for path in (CHAT, "/v1/responses", "/v1/chat%2Fcompletions", "/invocations"):
        nested = b'"vllm_xargs":{"kv_transfer_params":"","b":1}'
        body = b'{"prompt":"hi","messages":[],"kv_transfer_params":{"a":1},' + nested + b"}"
        assert (await either.post(body, path=path)).status_code == 200
        response = await either.post(b'{"a":NaN,' + body[1:], path=path)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "connector_params_not_accepted")
    assert len(either.decodes) == 4
    for request in either.decodes:
        assert request.json()["vllm_xargs"] == {"b": 1}
        assert request.json().get("kv_transfer_params", {}).get("a") is None


# ---- headers and routing ----


async def test_B08_B10_fifty_requests_reach_the_decoder_that_was_named(streaming: Gateway) -> None:
    responses = await asyncio.gather(
        *(streaming.post(headers={"x-request-id": f"r{number}", DESTINATION: "10.9.9.9:1"}) for number in range(50))
    )
    assert Counter(response.status_code for response in responses) == {200: 50}
    for engine in streaming.decoders:
        assert len(engine.requests) == 25
        for request in engine.requests:
            assert (request.header(DESTINATION) or "").split(",")[0] == engine.endpoint
            assert uuid.UUID(request.header("x-request-id")).version == 4
    assert [response.headers["x-request-id"] for response in responses] == [f"r{number}" for number in range(50)]
    assert all(response.headers["server-timing"].startswith("prefill;dur=") for response in responses)


def two_routes(bootstrap: dict[str, Any]) -> None:
    """Requests with the destination header go to the decoders; what the route is first chosen for is answered 418."""
    (host,) = connection_manager(bootstrap)["route_config"]["virtual_hosts"]
    to_decoders = host["routes"][-1]
    to_decoders["match"] = {"prefix": "/", "headers": [{"name": DESTINATION, "present_match": True}]}
    host["routes"].append({"name": "before", "match": {"prefix": "/"}, "direct_response": {"status": 418}})


@pytest.mark.parametrize("clear", [True, False])
async def test_B09_a_route_may_depend_on_the_destination(mode: Mode, clear: bool) -> None:
    settings = {"routing": {"clear_route_cache": clear}}
    async with Gateway.started(settings, prefill=1, decode=1, change=in_mode(mode, two_routes)) as gateway:
        statuses = [(await gateway.post()).status_code, (await gateway.client.get("/v1/models")).status_code]
        assert statuses == ([200, 200] if clear else [418, 418])
        await gateway.settled()


async def test_O19_a_decoder_that_refuses_is_replaced_with_the_body_sent_once(either: Gateway) -> None:
    """Envoy tries the next of the list: the same KV, no second prefill."""
    await either.decoders[0].refuse()
    responses = [await either.post() for _ in range(4)]
    assert [response.status_code for response in responses] == [200] * 4
    assert len(either.prefills) == len(either.decoders[1].requests) == 4
    for request in either.decoders[1].requests:
        body = request.json()
        assert body.pop("kv_transfer_params")["do_remote_prefill"] is True
        assert body == json.loads(CHAT_BODY)


@pytest.mark.parametrize("stream", [False, True])
async def test_O21_usage_is_what_the_decoder_counts(either: Gateway, stream: bool) -> None:
    """All of the prompt came from elsewhere, so all of it counts as cached there: said in docs/faq.md."""
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}
    answer = Answer.stream({"choices": [], "usage": usage}) if stream else Answer.json({"choices": [], "usage": usage})
    for engine in either.prefillers:
        counted = {"usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}}}
        engine.respond = lambda request, counted=counted: Answer.json(  # type: ignore[misc]
            {**json.loads(answer_prefill(request).body), **counted}
        )
    for engine in either.decoders:
        engine.respond = lambda _: answer
    response = await either.post()
    assert response.content == (b"".join(answer.events) if answer.events else answer.body)
    assert len(either.prefills) == len(either.decodes) == 1


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("HEAD", "/v1/models"), ("OPTIONS", CHAT), ("DELETE", "/x")]
)
async def test_B07_B16_requests_without_a_body(streaming: Gateway, method: str, path: str) -> None:
    for engine in streaming.decoders:
        engine.respond = lambda _: Answer(405)
        engine.probes.clear()
    response = await within(2, streaming.client.request(method, path))
    assert response.status_code == (200 if method == "GET" else 405)
    assert streaming.prefills == []
    assert [(request.method, request.target) for request in streaming.decodes] == (
        [] if method == "GET" else [(method, path)]
    )


@pytest.mark.parametrize("body", [b"Content-Length: 0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"])
async def test_B16_a_post_of_nothing(either: Gateway, body: bytes) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n" % CHAT.encode()
    response = await within(3, either.raw(head + body))
    assert response.startswith(b"HTTP/1.1 400 ")  # the recording decoder's word
    assert [request.body for request in either.decodes] == [b""]
    assert either.prefills == []


async def test_B30_the_query_stays_and_other_paths_are_not_prefilled(streaming: Gateway) -> None:
    assert (await streaming.post(path=f"{CHAT}?a=%20b")).status_code == 200
    for path in ("/v1/chat/completions/", "//v1/completions", "/v1/embeddings", "/v1/chat/completions/render"):
        assert (await streaming.post(b'{ "input":"a"}', path=path)).status_code == 200
    assert [request.target for request in streaming.prefills] == [f"{CHAT}?a=%20b"]
    assert len(streaming.decodes) == 5


async def test_O11_expect_is_answered_by_envoy_and_goes_no_further(either: Gateway) -> None:
    host, _, port = either.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(CHAT_BODY))
        )
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(CHAT_BODY)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    finally:
        writer.close()
        await writer.wait_closed()
    for request in (*either.prefills, *either.decodes):
        assert request.header("expect") is None


async def test_O13_http_1_0_is_served(either: Gateway) -> None:
    head = b"POST %b HTTP/1.0\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    response = await within(5, either.raw(head % (CHAT.encode(), len(CHAT_BODY)) + CHAT_BODY))
    assert response.split(b"\r\n", 1)[0].endswith(b" 200 OK")
    assert len(either.prefills) == len(either.decodes) == 1


async def test_O24_a_request_without_a_host_goes_nowhere(either: Gateway) -> None:
    head = b"POST %b HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    response = await within(3, either.raw(head % (CHAT.encode(), len(CHAT_BODY)) + CHAT_BODY))
    assert response.startswith(b"HTTP/1.1 400 ")
    assert either.prefills == either.decodes == []


@pytest.mark.parametrize(
    "header",
    [b"X-Request-Id: a\r\nX-Request-Id: b\r\n", b"X-Request-Id: " + b"r" * 30_000 + b"\r\n", b"X-Request-Id:\r\n"],
    ids=["two", "long", "empty"],
)
async def test_absurd_request_ids_are_one_line_of_ours(either: Gateway, header: bytes) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n" % CHAT.encode()
    response = await either.raw(head + header + b"Content-Length: %d\r\n\r\n" % len(CHAT_BODY) + CHAT_BODY)
    assert response.startswith(b"HTTP/1.1 200 ")
    ours = {request.header("x-request-id") for request in (*either.prefills, *either.decodes)}
    assert len(ours) == 1
    assert uuid.UUID(ours.pop()).version == 4


# ---- time, cancels, upgrades ----


async def test_B12_a_prefill_may_take_longer_than_envoys_patience() -> None:
    """There is none in this mode, and nobody asks for it."""
    settings = {"envoy": {"message_timeout_s": 0.5}}
    async with Gateway.started(settings, prefill=1, decode=1, change=full_duplex) as gateway:

        def slow(request: RecordedRequest) -> Answer:
            answer = answer_prefill(request)
            answer.delay_s = 1.0
            return answer

        gateway.prefillers[0].respond = slow
        assert (await gateway.post()).status_code == 200
        assert len(gateway.prefills) == len(gateway.decodes) == 1
        await gateway.settled()


async def test_B15_a_websocket_opens_and_its_bytes_flow_both_ways(streaming: Gateway) -> None:
    """On this mode the bytes come by way of the service; nothing waits for an end that never comes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"upgrade" in head.lower():
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            while data := await reader.read(65536):
                writer.write(data.upper())
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        fleet = {"fleet": {"decode": [{"url": url}]}}
        async with Gateway.started(fleet, prefill=1, decode=0, change=full_duplex) as gateway:
            host, _, port = gateway.url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with asyncio.timeout(5):
                writer.write(
                    b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
                )
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
                for text in (b"ping", b"x" * 200_000):
                    writer.write(text)
                    assert await reader.readexactly(len(text)) == text.upper()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            await gateway.settled()


async def test_B34_a_client_that_hangs_up_in_the_prefill_closes_the_call(either: Gateway) -> None:
    for engine in either.prefillers:
        engine.hang = True
    call = asyncio.create_task(either.post(headers={"x-request-id": "gone"}))
    await until(lambda: bool(either.prefills))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    (engine,) = [engine for engine in either.prefillers if engine.requests]
    await engine.wait_for_disconnects(1, within_s=3)
    record = await either.exchange("gone")
    assert (record["decision"], record["outcome"]) == ("client_left", "client_reset")
    assert either.decodes == []


async def test_B34_a_client_that_hangs_up_before_the_first_token_has_its_blocks_freed(either: Gateway) -> None:
    for engine in either.decoders:
        engine.hang = True
    call = asyncio.create_task(either.post())
    await until(lambda: bool(either.decodes))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for engine in either.decoders:
        engine.hang = False
    await until(lambda: any(engine.releases for engine in either.decoders))
    (request_id,) = {request.header("x-request-id") for request in either.prefills}
    released = {
        release.json()["kv_transfer_params"]["remote_request_id"]
        for engine in either.decoders
        for release in engine.releases
    }
    assert released == {f"chatcmpl-{request_id}-0a1b2c3d"}


async def test_B36_hang_ups_at_any_point_of_the_body_leave_nothing(either: Gateway) -> None:
    async def hang_up(after: int) -> None:
        host, _, port = either.url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write((head % (CHAT.encode(), len(CHAT_BODY)) + CHAT_BODY)[:after])
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    await asyncio.gather(*(hang_up(after) for after in range(20, 180, 4)))
    await either.settled()
    assert (await either.post()).status_code == 200


# ---- failures ----


@pytest.mark.parametrize("status", [400, 401, 429])
async def test_B32_a_prefillers_4xx_is_the_clients_answer(streaming: Gateway, status: int) -> None:
    body = b'{"error":{"message":"maximum context length","code":%d}}' % status
    for engine in streaming.prefillers:
        engine.respond = lambda _: Answer(status, [("content-type", "application/json"), ("retry-after", "3")], body)
    response = await streaming.post()
    assert (response.status_code, response.content, response.headers["retry-after"]) == (status, body, "3")
    assert response.headers["content-type"] == "application/json"
    assert streaming.decodes == []


@pytest.mark.parametrize("kind", ["503", "null", "refused"])
async def test_B31_without_a_prefiller_the_client_is_told(streaming: Gateway, kind: str) -> None:
    for engine in streaming.prefillers:
        if kind == "refused":
            await engine.refuse()
        else:
            answer = Answer(503) if kind == "503" else Answer.json({"kv_transfer_params": None})
            engine.respond = lambda _, answer=answer: answer  # type: ignore[misc]
    response = await within(5, streaming.post())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "prefill_unavailable")
    assert streaming.decodes == []


@pytest.mark.parametrize("body_mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL"])
async def test_other_modes_are_refused_clearly(body_mode: str) -> None:
    def change(bootstrap: dict[str, Any]) -> None:
        mode = connection_manager(bootstrap)["http_filters"][0]["typed_config"]["processing_mode"]
        mode["request_body_mode"] = body_mode

    async with Gateway.started(prefill=1, decode=1, change=change) as gateway:
        for call in (gateway.post(), gateway.client.get("/v1/models")):
            response = await call
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (500, "unsupported_processing_mode")
            assert f"request_body_mode {body_mode} " in error["message"]
        assert gateway.prefills == gateway.decodes == []
        await gateway.settled()
