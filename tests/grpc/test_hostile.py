"""Odd and hostile requests: the right answer, nothing of ours for a client's mistake but 4xx, and the worker lives on.

All tests share one service: whatever one of them does to it, the next one would find out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.grpc.stand import ASKS, JSON, Stand, decoded, refused, through
from tests.support.engines import prefill_params
from tests.support.gateway import CHAT, CHAT_BODY, COMPLETIONS, until
from tests.support.scripted_envoy import Mode, ScriptedEnvoy

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAME = "kv_transfer_params"
ESCAPED = "".join(f"\\u{ord(character):04X}" for character in NAME)
FORM = "multipart/form-data; boundary=x"
PATHS = [
    *(CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/invocations", "/v1/chat/completions/batch"),
    *("/v1/chat%2Fcompletions", "/v1/chat/%63ompletions", "//v1/completions", "/inference/v1/generate", "/any?q=1"),
]


@pytest.fixture(autouse=True)
def nothing_fails_inside(stand: Stand) -> Iterator[None]:
    """A client's input never runs into an error that nobody thought of."""
    before = stand.counts("extproc_errors_total")
    yield
    after = stand.counts("extproc_errors_total")
    assert after.get("internal", 0) == before.get("internal", 0)


# ---- connector params ----

PLACES = {
    "top": ('"kv_transfer_params":{"do_remote_prefill":true}', "{}"),
    "null": ('"kv_transfer_params":null', "{}"),
    "escaped": (f'"{ESCAPED}":{{"do_remote_decode":true}}', "{}"),
    "half escaped": ('"kv_tr\\u0061nsfer_param\\u0073":1', "{}"),
    "twice": (f'"kv_transfer_params":{{}},"{ESCAPED}":{{"a":1}}', "{}"),
    "others": ('"ec_transfer_params":0,"batch_kv_transfer_params":{"a":{}}', "{}"),
    "falsy xargs": ('"vllm_xargs":{"kv_transfer_params":"","seed":1}', '{"vllm_xargs":{"seed":1}}'),
    "empty list": ('"vllm_xargs":{"kv_transfer_params":[]}', '{"vllm_xargs":{}}'),
    "zero": ('"vllm_xargs" : { "kv_transfer_params" : 0 , "a":"b" }', '{"vllm_xargs":{"a":"b"}}'),
    "escaped xargs": (f'"vllm_x\\u0061rgs":{{"{ESCAPED}":0}}', '{"vllm_xargs":{}}'),
    "xargs twice": ('"vllm_xargs":{},"vllm_xargs":{"kv_transfer_params":""}', '{"vllm_xargs":{}}'),
    "extra": ('"extra_args":{"kv_transfer_params":{}}', '{"extra_args":{}}'),
    "sampling": (
        '"sampling_params":{"top_p":1.0,"extra_args":{"kv_transfer_params":{"do_remote_prefill":true}}}',
        '{"sampling_params":{"top_p":1.0,"extra_args":{}}}',
    ),
}


@pytest.mark.parametrize("place", PLACES)
async def test_connector_params_of_a_client_reach_no_engine(envoy: ScriptedEnvoy, stand: Stand, place: str) -> None:
    members, left = PLACES[place]
    body = ('{"prompt":"hi","messages":[],' + members + ',"max_tokens":5}').encode()
    rest: dict[str, Any] = {"prompt": "hi", "messages": [], "max_tokens": 5, **json.loads(left)}
    for path in PATHS:
        upstream = (await through(envoy, body, path)).upstream
        value = upstream.json()
        if path in (CHAT, COMPLETIONS):
            assert value.pop(NAME) == prefill_params(upstream.header("x-request-id") or "")
        assert value == rest, path
    assert len(stand.prefills) == 2
    for request in stand.prefills:
        assert request.json() == {**rest, "max_tokens": 1, "stream": False, NAME: json.loads(ASKS)}


DIALECTS = {
    "not a number": f'{{"temperature":NaN,"{NAME}":{{}}}}'.encode(),
    "infinite": f'{{"a":-Infinity,"vllm_xargs":{{"{NAME}":0}}}}'.encode(),
    "half a pair": f'{{"prompt":"\\ud800","{NAME}":{{}}}}'.encode(),
    "raw surrogate in a key": b'{"\xed\xa0\x80":1,"' + NAME.encode() + b'":{}}',
    "nested and unreadable": b'{"vllm_xargs":{"\\ud800":1,"' + NAME.encode() + b'":""}}',
    **{
        f"{encoding} {kind}": f'{{"prompt":"é","{name}":{{}}}}'.encode(encoding)
        for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")
        for kind, name in (("plain", NAME), ("escaped", ESCAPED))
    },
    "broken": f'{{"{NAME}":'.encode(),
    "list": f'[{{"{NAME}":{{}}}}]'.encode(),
    "text": f'"{NAME}"'.encode(),
    "nothing but the name": NAME.encode(),
}


@pytest.mark.parametrize("kind", DIALECTS)
async def test_what_cannot_be_cleaned_is_refused(envoy: ScriptedEnvoy, stand: Stand, kind: str) -> None:
    for path in (CHAT, "/v1/responses", "/new"):
        await refused(envoy, 400, "connector_params_not_accepted", DIALECTS[kind], path)
    assert stand.prefills == []


@pytest.mark.parametrize(
    "content_type",
    [
        *(
            "",
            "text/plain",
            "application/json, text/plain",
            "application/vnd.api+json",
            "application/octet-stream+json",
        ),
    ],
)
async def test_connector_params_are_looked_for_whatever_the_content_type(
    envoy: ScriptedEnvoy, stand: Stand, content_type: str
) -> None:
    headers = [("content-type", content_type)] if content_type else []
    body = f'{{"prompt":"hi","{NAME}":{{"a":1}}}}'.encode()
    assert (await decoded(envoy, body, headers=headers)).body == b'{"prompt":"hi"}'
    assert stand.prefills == []


def form(*fields: tuple[str, bytes]) -> bytes:
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in fields
    ]
    return b"".join(parts) + b"--x--\r\n"


WAVE = ("file", bytes(range(256)) * 400)
FORMS = {
    "xargs": (form(WAVE, ("vllm_xargs", f'{{"{NAME}":""}}'.encode())), FORM),
    "escaped": (form(WAVE, ("vllm_xargs", f'{{"{ESCAPED}":""}}'.encode())), FORM),
    "a field": (form(WAVE, (NAME, b"{}")), FORM),
    "urlencoded": (b"vllm_xargs=%7B%22kv%5Ftransfer%5Fparams%22%3A0%7D", "application/x-www-form-urlencoded"),
}


@pytest.mark.parametrize("kind", FORMS)
async def test_forms_with_connector_params_are_refused(envoy: ScriptedEnvoy, kind: str) -> None:
    body, content_type = FORMS[kind]
    headers = [("content-type", content_type)]
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations", CHAT):
        await refused(envoy, 400, "connector_params_not_accepted", body, path, headers=headers)


@pytest.mark.parametrize("charset", ["utf-7", "utf-16", "cp037", "unicode_escape"])
async def test_forms_that_hide_their_text_are_refused(envoy: ScriptedEnvoy, charset: str) -> None:
    headers = [("content-type", f"{FORM}; charset={charset}")]
    await refused(envoy, 415, "unsupported_charset", form(WAVE), "/v1/audio/transcriptions", headers=headers)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (FORM, form(WAVE, ("model", b"whisper"), ("prompt", b"transfer params"))),
        ("multipart/form-data; charset=utf-8; boundary=x", form(WAVE)),
        ("audio/wav", NAME.encode() + bytes(range(256))),
        ("application/octet-stream", b"\0" * 1000),
        ("image/png", b"\x89PNG\r\n"),
    ],
)
async def test_B29_uploads_pass_byte_for_byte(
    envoy: ScriptedEnvoy, stand: Stand, content_type: str, body: bytes
) -> None:
    headers = [("content-type", content_type), ("authorization", "Bearer k"), ("content-length", str(len(body)))]
    upstream = await decoded(envoy, body, "/v1/audio/transcriptions", headers=headers)
    assert upstream.body == body
    assert (upstream.header("content-type"), upstream.header("authorization")) == (content_type, "Bearer k")
    length = None if envoy.mode == "FULL_DUPLEX_STREAMED" else str(len(body))
    assert upstream.header("content-length") == length
    assert stand.prefills == []


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/json ;charset=utf-8", "text/json"])
async def test_B29_a_wrong_content_type_is_left_to_the_engine(
    envoy: ScriptedEnvoy, stand: Stand, content_type: str | None
) -> None:
    headers = [("content-type", content_type)] if content_type else []
    upstream = await decoded(envoy, headers=headers, status=400)
    assert (upstream.body, upstream.header("content-type")) == (CHAT_BODY, content_type)
    assert stand.prefills == []


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "GZIP", "gzip, identity", "x"])
async def test_compressed_bodies_are_refused(envoy: ScriptedEnvoy, stand: Stand, encoding: str) -> None:
    """What is in them could not be looked into; engines do not read them either (400, seen with vLLM 0.32)."""
    headers = [*JSON, ("content-encoding", encoding)]
    await refused(envoy, 415, "unsupported_content_encoding", b"\x1f\x8b\x08", headers=headers)
    assert (await through(envoy, b"", headers=headers)).immediate is None
    assert stand.prefills == []


# ---- bodies that engines refuse, or read otherwise ----

NOT_OBJECTS = {
    "nothing": b" \n",
    "null": b"null",
    "number": b"1",
    "list": b"[]",
    "string": b'"a"',
    "broken": b'{"a":',
    "trailing": b'{"a":1} x',
    "two": b"{}{}",
    "comment": b'{"a":1 /* b */}',
    "single quotes": b"{'a':1}",
    "trailing comma": b'{"a":1,}',
    "control character": b'{"a":"\x01"}',
    "zero byte": b'{"a":"\x00"}',
    "bad escape": b'{"a":"\\x41"}',
    "leading zero": b'{"a":01}',
    "plus": b'{"a":+1}',
    "not a number": b'{"prompt":"hi","temperature":NaN}',
    "half a pair": b'{"prompt":"\\ud83d"}',
    "byte order mark": b'\xef\xbb\xbf{"prompt":"hi"}',
    "utf-16": '{"prompt":"hi ☃"}'.encode("utf-16"),
    "utf-32": '{"prompt":"hi ☃"}'.encode("utf-32-le"),
    "bad key": b'{"\xff":1}',
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("kind", NOT_OBJECTS)
async def test_what_is_no_json_object_is_left_to_the_engine(envoy: ScriptedEnvoy, stand: Stand, kind: str) -> None:
    """The decoder gets the client's bytes and has its own word: 400 for most, an answer for what only Python reads."""
    body = NOT_OBJECTS[kind]
    assert (await decoded(envoy, body, status=400)).body == body
    assert stand.prefills == []


ODD = {
    "empty": b"{}",
    "invalid utf-8 in a value": b'{"prompt":"\xff\xfe"}',
    "raw surrogate in a value": b'{"prompt":"\xed\xa0\x80"}',
    "huge number": b'{"seed":' + b"9" * 4000 + b"}",
    "beyond a double": b'{"n":1,"temperature":1e999}',
    "many members": b'{%b"n":1}' % b"".join(b'"k%d":%d,' % (number, number) for number in range(4095)),
    "repeated a thousand times": b'{%b"prompt":"b"}' % (b'"prompt":"a",' * 1000),
    "long key": b'{"%b":1}' % (b"k" * 100_000),
    "many escapes": b'{"prompt":"%b"}' % (b"\\u0041\\n\\\\" * 20_000),
    "white space": b" \n\t\r" * 10_000 + b'{"prompt":"a"}' + b" \n\t\r" * 10_000,
    "odd types": b'{"model":[],"stream":"yes","max_tokens":{},"messages":"x","n":true,"stop":1}',
    "numbers as text": b'{"n":"1","best_of":"1","echo":0}',
    "empty key": b'{"":1,"\\u0000":2}',
    "prototype": b'{"__proto__":{"kv":1},"constructor":1}',
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_any_object_reaches_both_legs_or_one(envoy: ScriptedEnvoy, stand: Stand, path: str, kind: str) -> None:
    body = ODD[kind]
    upstream = await decoded(envoy, body, path)
    value = json.loads(upstream.body.decode("utf-8", "surrogateescape"))
    if stand.prefills:
        assert value.pop(NAME)["do_remote_prefill"] is True
        assert stand.prefill.header("x-request-id") == upstream.header("x-request-id")
    else:
        assert upstream.body == body
    assert value == json.loads(body.decode("utf-8", "surrogateescape"))


async def test_the_depth_limit_is_exact_and_says_so(envoy: ScriptedEnvoy, stand: Stand) -> None:
    def nested(levels: int) -> bytes:
        return b'{"prompt":"[[[[","x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    for path in (COMPLETIONS, "/v1/embeddings"):
        assert (await through(envoy, nested(256), path)).immediate is None
        for levels in (257, 1000, 100_000):
            answer = await refused(envoy, 400, "json_too_deep", nested(levels), path)
            assert answer.json()["error"]["message"] == "The request body nests deeper than 256 levels."
    assert len(stand.prefills) == 1


# ---- headers ----


STEERING = [
    "x-gateway-destination-endpoint",
    "X-Gateway-Destination-Endpoint-Subset",
    "x-gateway-destination-endpoint-served",
    "X-Data-Parallel-Rank",
    "x-extproc-anything",
]


@pytest.mark.parametrize(
    ("body", "path"), [(CHAT_BODY, CHAT), (b"{}", "/v1/embeddings"), (b"", "/v1/models"), (b"\0", "/upload")]
)
async def test_steering_headers_of_a_client_reach_no_engine(
    envoy: ScriptedEnvoy, stand: Stand, body: bytes, path: str
) -> None:
    content_type = "audio/wav" if path == "/upload" else "application/json"
    spoofed = [(spelled, value) for name in STEERING for spelled, value in ((name, "10.9.9.9:1"), (name.lower(), "3"))]
    headers = [("content-type", content_type), *spoofed, ("x-else", "1")]
    upstream = await decoded(envoy, body, path, headers=headers)
    for sent in (upstream.headers, *(request.headers for request in stand.prefills)):
        assert not [value for _, value in sent if value in ("10.9.9.9:1", "3")]
        assert ("x-else", "1") in sent
    endpoints = {engine.endpoint for engine in stand.decoders}
    assert set((upstream.header("x-gateway-destination-endpoint") or "").split(",")) == endpoints
    assert {name for name, _ in upstream.headers} & {name.lower() for name in STEERING} == {
        "x-gateway-destination-endpoint"
    }


@pytest.mark.parametrize("query", ["a=%00%ff", 'q="<>|\\^`{}', "%", "%zz", "?", "a=b&a=b;c", "x" * 8000])
async def test_any_query_reaches_both_legs_as_it_is(envoy: ScriptedEnvoy, stand: Stand, query: str) -> None:
    upstream = await decoded(envoy, path=f"{CHAT}?{query}")
    assert (upstream.path, stand.prefill.target) == (f"{CHAT}?{query}", f"{CHAT}?{query}")


@pytest.mark.parametrize("value", ["r" * 256, "r" * 257, "r" * 50_000, "é\xff", "a b;c", ""])
async def test_absurd_request_ids_come_back_and_steer_nothing(
    envoy: ScriptedEnvoy, stand: Stand, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exchange = await envoy.request("POST", CHAT, [*JSON, ("x-request-id", value)], CHAT_BODY)
    response = await exchange.response(200)
    await exchange.finish()
    ours = exchange.upstream.header("x-request-id")
    assert ours == stand.prefill.header("x-request-id") != value
    assert response.header("x-request-id") == (value or ours)
    assert len(capsys.readouterr().out) < 3000


async def test_the_headers_limits(mode: Mode) -> None:
    settings = {"limits": {"headers": 20, "header_bytes": 4096}}
    async with Stand.standing(settings, prefill=1, decode=1) as stand, stand.envoy(mode) as envoy:
        few = [*JSON, *((f"x-{number}", "1") for number in range(12))]
        assert (await through(envoy, headers=few)).immediate is None
        many = [*few, *((f"y-{number}", "1") for number in range(8))]
        for headers in (many, [*JSON, ("cookie", "c" * 4096)]):
            for body in (CHAT_BODY, b""):
                answer = await refused(envoy, 431, "headers_too_large", body, headers=headers)
                assert "20 headers" in answer.json()["error"]["message"]
        assert len(stand.prefills) == 1
        await stand.settled()


# ---- how many at once ----


async def test_exchanges_beyond_the_limit_are_told_to_come_again_at_the_headers(mode: Mode) -> None:
    async with Stand.standing({"limits": {"in_flight": 3}}, prefill=1, decode=1) as stand, stand.envoy(mode) as envoy:
        held = [await envoy.request("POST", CHAT, JSON, CHAT_BODY) for _ in range(3)]
        for body, path in ((CHAT_BODY, CHAT), (b"", "/v1/models")):
            exchange = await through(envoy, body, path)
            answer = exchange.immediate
            assert answer is not None
            assert (answer.status, answer.header("retry-after"), answer.json()["error"]["code"]) == (
                503,
                "1",
                "overloaded",
            )
            assert len(exchange.replies) == 1  # the body was not waited for
        assert len(stand.prefills) == 3
        await held.pop().reset()
        assert stand.server is not None
        service = stand.server.service
        await until(lambda: service.in_flight == 2)
        assert (await through(envoy)).immediate is None
        for exchange in held:
            await exchange.response(200)
            await exchange.finish()
        await stand.settled()
