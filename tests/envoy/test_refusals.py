"""Refusals: a prefiller's or a decoder's verdict on the request, and decoders that refuse the connection."""

from __future__ import annotations

import gzip
import json

import pytest

from extproc.enginehttp import MAX_REFUSAL_BYTES
from tests.support.engines import Answer, Respond, prefill_params
from tests.support.gateway import CHAT_BODY, Gateway, within

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]


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


NOT_ACCEPTED = {
    "x-envoy": ("x-envoy-ratelimited", "true"),
    "host": ("host", "engine"),
    "named by connection": ("x-hop", "1"),
    "control character": ("x-odd", "a\x01b"),
}


@pytest.mark.parametrize("kind", NOT_ACCEPTED)
async def test_B32_a_header_that_must_not_go_on_costs_no_other(gateway: Gateway, kind: str) -> None:
    bad = NOT_ACCEPTED[kind]
    headers = [bad, ("content-type", "application/json"), ("connection", "x-hop"), bad, ("retry-after", "3")]
    for engine in gateway.prefillers:
        engine.respond = lambda _: Answer(429, headers, VERDICT)
    response = await gateway.post(headers={"x-request-id": "b32-odd"})
    assert (response.status_code, response.content) == (429, VERDICT)
    assert response.headers.get_list("content-type") == ["application/json"]
    assert response.headers.get_list("x-request-id") == ["b32-odd"]
    assert response.headers.get_list("retry-after") == ["3"]
    assert bad[0] not in response.headers


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


async def test_B32_a_verdict_of_any_size_is_answered(falling_back: Gateway) -> None:
    """An engine may repeat a large body in what it says of it. More than fits into a gRPC message is no exception."""
    whole = b"x" * MAX_REFUSAL_BYTES
    for engine in falling_back.prefillers:
        engine.respond = verdict(422, body=whole)
    response = await falling_back.post()
    assert (response.status_code, response.content) == (422, whole)
    for engine in falling_back.prefillers:
        engine.respond = verdict(422, ("retry-after", "3"), body=b"x" * 41_000_000)
    response = await falling_back.post(headers={"x-request-id": "b32-large"})
    message = "A prefill engine answered 422, with more to say than can be passed on."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "refusal_too_large"}
    assert (response.status_code, response.json()) == (400, {"error": error})
    assert response.headers["x-request-id"] == "b32-large"
    # The client's fault all the same: no second prefiller, no fallback, no decode.
    assert len(falling_back.prefills) == 2
    assert falling_back.decodes == []


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
