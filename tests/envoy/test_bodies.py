"""What each leg's body is, byte for byte, and how large it may be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.engines import Answer, RecordedRequest
from tests.support.gateway import CHAT, COMPLETIONS, Gateway, until, within

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

ASKS = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""What the nixl connector asks a prefiller for."""

PARAMS = (
    b'{ "remote_port":5600, "do_remote_prefill" : true,"do_remote_decode":false,\n "remote_engine_id":"e1",'
    b'"remote_block_ids":[[1,9007199254740993]],"remote_host":"10.0.0.9","remote_request_id":"r-\\u2603",'
    b'"x_new":1.0e+2,"tp_size":1}'
)
"""A prefiller's answer in a spelling of its own: it must reach the decoder as it is."""


def hand_over(_: RecordedRequest) -> Answer:
    body = b'{"id":"p", "kv_transfer_params" :' + PARAMS + b' , "choices":[]}'
    return Answer(headers=[("content-type", "application/json")], body=body)


@pytest.fixture(autouse=True)
def spelled(gateway: Gateway) -> None:
    for engine in gateway.prefillers:
        engine.respond = hand_over


async def legs(gateway: Gateway, body: bytes, path: str = CHAT) -> tuple[bytes, bytes]:
    """The bodies that the one prefiller and the one decoder got."""
    response = await gateway.post(body, path=path)
    assert response.status_code == 200, response.text
    (prefill,), (decode,) = gateway.prefills, gateway.decodes
    for request in (prefill, decode):
        assert request.header("content-length") == str(len(request.body))
        assert request.header("transfer-encoding") is None
        assert request.header("content-type") == "application/json"
        assert (request.method, request.target) == ("POST", path)
    return prefill.body, decode.body


async def test_B01_a_body_of_multibyte_characters_gets_its_length_in_bytes(gateway: Gateway) -> None:
    body = '{"model":"m","prompt":"é☃","max_tokens":5}'.encode()
    prefill, decode = await legs(gateway, body, COMPLETIONS)
    assert (
        prefill
        == '{"model":"m","prompt":"é☃","max_tokens":1,"stream":false,"kv_transfer_params":'.encode() + ASKS + b"}"
    )
    assert decode == body[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"


async def test_B01_nothing_is_touched_where_nothing_is_added(gateway: Gateway) -> None:
    body = '\n {"input" : "é☃",\t"n":2 }  '.encode()
    response = await gateway.post(body, path="/v1/embeddings")
    assert response.status_code == 200
    (decode,) = gateway.decodes
    assert (decode.body, decode.header("content-length")) == (body, str(len(body)))
    assert gateway.prefills == []


@pytest.mark.parametrize(
    ("limits", "prefill_limits"),
    [
        (b'"max_completion_tokens":500', b'"max_completion_tokens":1,"stream":false,"max_tokens":1'),
        (b'"max_completion_tokens":500,"max_tokens":70', b'"max_completion_tokens":1,"max_tokens":1,"stream":false'),
        (b'"user":"u"', b'"user":"u","stream":false,"max_tokens":1'),
        (b'"max_tokens":null', b'"max_tokens":1,"stream":false'),
        (b'"max_tokens": "7"', b'"max_tokens": 1,"stream":false'),
        (b'"max_output_tokens":500', b'"max_output_tokens":1,"stream":false,"max_tokens":1'),
    ],
    ids=["completion", "both", "neither", "null", "text", "output"],
)
async def test_B18_every_limit_is_one_for_the_prefill_and_the_clients_for_the_decode(
    gateway: Gateway, limits: bytes, prefill_limits: bytes
) -> None:
    start = b'{"model":"m","messages":[{"role":"user","content":"hi"}],'
    prefill, decode = await legs(gateway, start + limits + b"}")
    assert prefill == start + prefill_limits + b',"kv_transfer_params":' + ASKS + b"}"
    assert decode == start + limits + b',"kv_transfer_params":' + PARAMS + b"}"


@pytest.mark.parametrize("options", [b'{"include_usage":true}', b'{"include_usage":false}', b"{}", b"null"])
async def test_B19_stream_options_stay_with_the_decode(gateway: Gateway, options: bytes) -> None:
    def with_usage(request: RecordedRequest) -> Answer:
        chunk = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
        return Answer.stream(chunk, {"choices": [], "usage": {"completion_tokens": 1}})

    for engine in gateway.decoders:
        engine.respond = with_usage
    start = b'{"model":"m","stream":true,"stream_options":' + options + b',"messages":[],"max_tokens":5'
    response = await gateway.post(start + b"}")
    (prefill,), (decode,) = gateway.prefills, gateway.decodes
    assert prefill.body == (
        b'{"model":"m","stream":false,"messages":[],"max_tokens":1,"kv_transfer_params":' + ASKS + b"}"
    )
    assert decode.body == start + b',"kv_transfer_params":' + PARAMS + b"}"
    assert prefill.header("accept") == "application/json"
    assert response.headers["content-type"] == "text/event-stream"
    *_, last, done, _ = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: ")) == {"choices": [], "usage": {"completion_tokens": 1}}
    assert done == "data: [DONE]"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_B20_min_tokens_stays_with_the_decode(gateway: Gateway, path: str) -> None:
    start = b'{"max_tokens":100,"min_tokens":5,"prompt":"hi","messages":[]'
    prefill, decode = await legs(gateway, start + b"}", path)
    assert prefill == (
        b'{"max_tokens":1,"prompt":"hi","messages":[],"stream":false,"kv_transfer_params":' + ASKS + b"}"
    )
    assert decode == start + b',"kv_transfer_params":' + PARAMS + b"}"


REQUEST = (
    b'\r\n{ "seed" : 9007199254740993,"temperature":0.70,\t"top_p":1E0, "logit_bias":{"10":1,"9":-1},\n'
    b'  "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","required":["z"],'
    b'"properties":{"z":{},"a":{}}}}}],"messages": [ {"role":"user","content":"caf\\u00e9 \xe2\x98\x83 \\ud83d'
    b'\\ude00 \\/ \xf0\x9f\x98\x80"} ],"response_format":{"type":"json_schema","json_schema":{"z":1,'
    b'"a":18446744073709551615}},"unknown":[1e400,-0,0.1000],"max_tokens": 5 , "\\u0073top":["\\n"] }\n '
)


async def test_B24_every_other_byte_is_the_clients(gateway: Gateway) -> None:
    """64-bit integers, spellings of numbers, key order, escapes, white space around and inside."""
    prefill, decode = await legs(gateway, REQUEST)
    end = b'"\\u0073top":["\\n"] }\n '
    assert REQUEST.endswith(end)
    member = b',"kv_transfer_params":'
    assert decode == REQUEST[: -len(b" }\n ")] + member + PARAMS + b" }\n "
    assert prefill == (
        REQUEST.replace(b'"max_tokens": 5 ,', b'"max_tokens": 1 ,')[: -len(b" }\n ")]
        + b',"stream":false'
        + member
        + ASKS
        + b" }\n "
    )


async def test_client_sent_params_never_survive(gateway: Gateway) -> None:
    foreign = b'"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"x"}'
    nested = b'"vllm_xargs":{"kv_transfer_params":{"a":1},"b":2}'
    body = b'{"model":"m","messages":[],' + foreign + b"," + nested + b',"max_tokens":5}'
    prefill, decode = await legs(gateway, body)
    rest = b'"vllm_xargs":{"b":2},'
    assert json.loads(decode) == json.loads(
        b'{"model":"m","messages":[],' + rest + b'"max_tokens":5,"kv_transfer_params":' + PARAMS + b"}"
    )
    assert decode.count(b"kv_transfer_params") == prefill.count(b"kv_transfer_params") == 1
    assert json.loads(prefill)["kv_transfer_params"] == json.loads(ASKS)
    response = await gateway.post(b'{"input":"a","kv_transfer_params":{"a":1}}', path="/v1/embeddings")
    assert response.status_code == 200
    assert gateway.decodes[-1].body == b'{"input":"a"}' or gateway.decodes[0].body == b'{"input":"a"}'


async def test_a_chunked_body_reaches_both_legs_whole(gateway: Gateway) -> None:
    body = b'{"model":"m","messages":[],"max_tokens":5}'

    async def one_by_one() -> AsyncIterator[bytes]:
        for byte in body:
            yield bytes([byte])

    response = await gateway.client.post(CHAT, content=one_by_one(), headers={"content-type": "application/json"})
    assert response.status_code == 200
    (prefill,), (decode,) = gateway.prefills, gateway.decodes
    assert decode.body == body[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    assert decode.header("content-length") == str(len(decode.body))
    assert decode.header("transfer-encoding") is None
    assert prefill.header("content-length") == str(len(prefill.body))


# ---- sizes ----


def of_size(size: int) -> bytes:
    start, end = b'{"model":"m","messages":[{"role":"user","content":"', b'"}],"max_tokens":5}'
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("size", [32_768, 32_769, 1_048_576, 1_048_577, 6 * 1024 * 1024])
async def test_B03_B04_large_bodies_pass_whole(gateway: Gateway, size: int) -> None:
    body = of_size(size)
    prefill, decode = await legs(gateway, body)
    assert decode == body[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    assert prefill == (
        body.replace(b'"max_tokens":5', b'"max_tokens":1,"stream":false')[:-1] + b',"kv_transfer_params":' + ASKS + b"}"
    )


LIMIT = 256 * 1024


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small_gateway() -> AsyncIterator[Gateway]:
    async with Gateway.started({"limits": {"body_bytes": LIMIT}}, prefill=1, decode=1) as small:
        yield small


@pytest.mark.parametrize("chunked", [False, True])
async def test_B03_the_limit_is_exact(small_gateway: Gateway, chunked: bool) -> None:
    gateway = small_gateway
    await gateway.reset()

    async def post(size: int) -> tuple[int, bytes]:
        async def chunks() -> AsyncIterator[bytes]:
            yield of_size(size)[:100_000]
            yield of_size(size)[100_000:]

        content = chunks() if chunked else of_size(size)
        headers = {"content-type": "application/json"}
        response = await within(2, gateway.client.post(CHAT, content=content, headers=headers))
        assert response.headers["content-type"] == "application/json"
        return response.status_code, response.content

    assert (await post(LIMIT))[0] == 200
    assert len(gateway.prefills) == len(gateway.decodes) == 1
    status, answer = await post(LIMIT + 1)
    assert (status, json.loads(answer)) == (
        413,
        {
            "error": {
                "message": f"The request body exceeds {LIMIT} bytes.",
                "type": "invalid_request_error",
                "param": None,
                "code": "body_too_large",
            }
        },
    )
    # Far over the limit, Envoy says so without asking.
    status, answer = await post(LIMIT + 1024 * 1024)
    assert status == 413
    assert json.loads(answer)["error"]["type"] == "gateway_error"
    assert len(gateway.prefills) == len(gateway.decodes) == 1
    assert gateway.decoders[0].releases == []
    await gateway.settled()


async def test_B03_no_stream_is_left_of_a_refused_body(small_gateway: Gateway) -> None:
    await small_gateway.reset()
    assert (await small_gateway.post(of_size(LIMIT + 1))).status_code == 413

    await until(lambda: small_gateway.counts("extproc_exchanges_in_flight") == {}, timeout_s=2)
