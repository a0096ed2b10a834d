"""Odd and hostile requests through the real Envoy, in both body modes, as bytes on a connection.

What each must get is the same in both modes: the engine's own word or a 4xx, never a 5xx; no engine sees what a client
must not send; and a plain request on the same gateway is served afterwards.
"""

from __future__ import annotations

import gzip
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tests.support.engines import Answer, RecordedRequest, answer_decode
from tests.support.gateway import CHAT, CHAT_BODY, COMPLETIONS, Gateway, in_mode, until
from tests.support.scripted_envoy import Mode

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

JSON = "application/json"
FORM = "multipart/form-data; boundary=x"
URLENCODED = "application/x-www-form-urlencoded"
NAME = "kv_transfer_params"
DESTINATION = "x-gateway-destination-endpoint"


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def nothing_fails_inside(either: Gateway) -> AsyncIterator[None]:
    before = either.counts("extproc_errors_total").get("internal", 0)
    yield
    assert either.counts("extproc_errors_total").get("internal", 0) == before
    await either.reset()
    assert (await either.post()).status_code == 200


async def ask(
    gateway: Gateway,
    body: bytes = CHAT_BODY,
    path: str = CHAT,
    *,
    method: str = "POST",
    content_type: str | None = JSON,
    headers: Sequence[str] = (),
) -> tuple[int, bytes]:
    """Status and body of an answer."""
    lines = [f"{method} {path} HTTP/1.1", "Host: a", "Connection: close", *headers]
    lines += [f"Content-Type: {content_type}"] * (content_type is not None)
    lines += [f"Content-Length: {len(body)}"] * bool(body)
    answer = await gateway.raw("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), head
    return int(head[9:12]), rest


async def refused(gateway: Gateway, status: int, code: str, *arguments: Any, **options: Any) -> None:
    """By the service, before any engine saw it."""
    got, body = await ask(gateway, *arguments, **options)
    assert got == status
    assert json.loads(body)["error"]["code"] == code
    assert gateway.prefills == gateway.decodes == []


async def passed(gateway: Gateway, body: bytes = CHAT_BODY, *arguments: Any, **options: Any) -> RecordedRequest:
    """To a decoder alone, byte for byte, whose answer is the client's."""
    word = Answer(422, [("content-type", JSON)], b'{"detail":"the engine\'s"}')
    for engine in gateway.decoders:
        engine.respond = lambda _: word
    assert await ask(gateway, body, *arguments, **options) == (422, word.body)
    assert gateway.prefills == []
    (decode,) = gateway.decodes
    assert decode.body == body
    return decode


async def disaggregated(gateway: Gateway, body: bytes, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """What the prefiller and the decoder read."""
    status, _ = await ask(gateway, body, *arguments, **options)
    assert status == 200
    (prefill,), (decode,) = gateway.prefills, gateway.decodes
    value = decode.json()
    assert value.pop(NAME)["do_remote_prefill"] is True
    assert prefill.header("x-request-id") == decode.header("x-request-id")
    return prefill.json(), value


# ---- methods, upgrades, CONNECT ----


@pytest.mark.parametrize("method", ["OPTIONS", "DELETE", "PUT", "PATCH", "TRACE", "PROPFIND"])
@pytest.mark.parametrize("body", [b"", CHAT_BODY], ids=["nothing", "body"])
async def test_O14_only_posts_are_disaggregated(either: Gateway, method: str, body: bytes) -> None:
    decode = await passed(either, body, method=method, headers=["Origin: http://a"])
    assert decode.method == method


@pytest.mark.parametrize("body", [b"", CHAT_BODY], ids=["nothing", "body"])
async def test_B16_a_head_request(either: Gateway, body: bytes) -> None:
    for engine in either.decoders:
        engine.respond = lambda _: Answer(405, [("allow", "POST")])
    assert await ask(either, body, method="HEAD") == (405, b"")
    assert [(decode.method, decode.body) for decode in either.decodes] == [("HEAD", body)]


@pytest.mark.parametrize("protocol", ["websocket", "foo", "TLS/1.0", "websocket, h2c"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_B15_upgrades_on_other_paths_than_realtime_are_403(either: Gateway, protocol: str, method: str) -> None:
    body = b'{"%b":{"do_remote_prefill":true}}' % NAME.encode() if method == "POST" else b""
    headers = [f"Upgrade: {protocol}", "Connection: Upgrade"]
    status, _ = await ask(either, body, method=method, headers=headers)
    assert status == 403
    assert either.prefills == either.decodes == []


@pytest.mark.parametrize("headers", [["Upgrade: h2c", "Connection: Upgrade"], ["Upgrade: websocket"]])
async def test_B15_upgrades_that_are_none_are_requests_like_others(either: Gateway, headers: list[str]) -> None:
    """Envoy takes off h2c, and an Upgrade that Connection does not name: nothing is upgraded, and nothing waits."""
    body = CHAT_BODY.replace(b"{", b'{"%b":{"do_remote_prefill":true},' % NAME.encode(), 1)
    _, decode = await disaggregated(either, body, headers=headers)
    assert decode == json.loads(CHAT_BODY)
    assert either.decodes[0].header("upgrade") is None


async def test_B15_a_connect_is_answered_at_once(either: Gateway) -> None:
    for target in ("a:443", "127.0.0.1:1"):
        answer = await either.raw(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode(), timeout_s=3)
        assert answer.startswith(b"HTTP/1.1 404 ")
    assert either.prefills == either.decodes == []


# ---- bodies ----

FORM_BODY = b'--x\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n%b\r\n--x--\r\n'
CHUNKED = ["Transfer-Encoding: chunked"]


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "zstd", "deflate", "identity, gzip", "x"])
async def test_compressed_bodies_are_415(either: Gateway, encoding: str) -> None:
    for path in (CHAT, "/v1/embeddings"):
        headers = [f"Content-Encoding: {encoding}"]
        await refused(either, 415, "unsupported_content_encoding", gzip.compress(CHAT_BODY), path, headers=headers)


async def test_a_body_in_two_encodings_on_two_lines_is_415(either: Gateway) -> None:
    headers = ["Content-Encoding: identity", "Content-Encoding: gzip"]
    await refused(either, 415, "unsupported_content_encoding", gzip.compress(CHAT_BODY), headers=headers)


async def test_identity_is_no_compression(either: Gateway) -> None:
    await disaggregated(either, CHAT_BODY, headers=["Content-Encoding: identity"])


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (FORM_BODY % b'{"a":1}', FORM),
        (FORM_BODY % bytes(range(256)), "multipart/form-data; charset=utf-8; boundary=x"),
        (b"vllm_xargs=%7B%22a%22%3A1%7D&b=%zz%%", URLENCODED),
        (b"kv_transfer_params" * 10_000, "audio/wav"),
        (b'{"kv_transfer_params":1}', "application/octet-stream"),
    ],
    ids=["form", "binary form", "urlencoded", "audio", "bytes"],
)
@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", CHAT])
async def test_B29_what_is_not_json_passes(either: Gateway, body: bytes, content_type: str, path: str) -> None:
    decode = await passed(either, body, path, content_type=content_type)
    assert decode.header("content-type") == content_type


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (FORM_BODY % b'{"kv_transfer_params":0}', FORM, 400, "connector_params_not_accepted"),
        (FORM_BODY % b'{"kv_transfer_param\\u0073":0}', FORM, 400, "connector_params_not_accepted"),
        (b"vllm_xargs=%7B%22kv%5Ftransfer%5Fparams%22%3A0", URLENCODED, 400, "connector_params_not_accepted"),
        (FORM_BODY % b"{}", f"{FORM}; charset=utf-7", 415, "unsupported_charset"),
        (b'{"kv_transfer_params":1}', FORM, 400, "connector_params_not_accepted"),
    ],
)
async def test_forms_that_name_connector_params_are_refused(
    either: Gateway, body: bytes, content_type: str, status: int, code: str
) -> None:
    await refused(either, status, code, body, "/v1/audio/transcriptions", content_type=content_type)


@pytest.mark.parametrize("content_type", [JSON, FORM, "audio/wav", None])
async def test_a_chunked_body_of_any_type_is_passed_on_whole(either: Gateway, content_type: str | None) -> None:
    parts = [b'{"input":', b'"a"', b"}"]
    for engine in either.decoders:
        engine.respond = answer_decode
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    named = f"Content-Type: {content_type}\r\n" if content_type else ""
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{named}Transfer-Encoding: chunked\r\n\r\n"
    assert (await either.raw(head.encode() + chunks)).startswith(b"HTTP/1.1 200 ")
    assert [decode.body for decode in either.decodes] == [b"".join(parts)]


ENGINES_TO_JUDGE = {
    "nothing but space": b" \n",
    "null": b"null",
    "list": b"[]",
    "broken": b'{"a":',
    "two": b"{}{}",
    "zero byte": b"\0",
    "not a number": b'{"temperature":NaN,"messages":[]}',
    "half a pair": b'{"prompt":"\\ud800"}',
    "half a pair for a model": b'{"model":"\\ud800"}',
    "byte order mark": b"\xef\xbb\xbf" + CHAT_BODY,
    "utf-16": CHAT_BODY.decode().encode("utf-16"),
    "utf-32": CHAT_BODY.decode().encode("utf-32"),
    "bad key": b'{"\xff":1}',
    "deep, and no object": b"[" * 100_000,
    "binary": bytes(range(256)) * 100,
}


@pytest.mark.parametrize("kind", ENGINES_TO_JUDGE)
async def test_what_is_no_json_object_is_the_engines_to_judge(either: Gateway, kind: str) -> None:
    await passed(either, ENGINES_TO_JUDGE[kind])


@pytest.mark.parametrize("body", [b'{"prompt":"\xff\xfe"}', b'{"prompt":"\xed\xa0\x80"}'])
async def test_bad_utf_8_in_a_value_is_the_prefillers_to_judge(either: Gateway, body: bytes) -> None:
    for engine in either.prefillers:
        engine.respond = lambda _: Answer(400, [("content-type", JSON)], b'{"error":"utf-8"}')
    assert await ask(either, body) == (400, b'{"error":"utf-8"}')
    assert either.decodes == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("content_type", [JSON, "text/plain", None, "application/octet-stream+json"])
async def test_connector_params_in_other_encodings_are_refused(
    either: Gateway, encoding: str, content_type: str | None
) -> None:
    body = f'{{"prompt":"é","{NAME}":{{}}}}'.encode(encoding)
    await refused(either, 400, "connector_params_not_accepted", body, content_type=content_type)


PATHS = [
    *("/v1/responses", "/v1/messages", "/inference/v1/generate", "/v1/embeddings", "/tokenize", "/v1/rerank"),
    *("/pooling", "/v2/chat", "/v1/chat/completions/", "//v1/completions", "/v1/chat%2fcompletions", "/a?q=1"),
    *("/v1/../v1/chat/completions", "/V1/chat/completions", "/v1/chat/completions;a", "/%00", "/\\"),
]


@pytest.mark.parametrize("content_type", [JSON, "text/plain", "application/octet-stream+json"])
async def test_connector_params_are_taken_out_on_any_path(either: Gateway, content_type: str) -> None:
    nested = '"vllm_xargs":{"kv_transfer_params":"","a":1},"sampling_params":{"extra_args":{"kv_transfer_params":0}}'
    body = f'{{ "{NAME}":{{"do_remote_prefill":true}},"ec_transfer_params":1,{nested}, "n" : 1.0}}'.encode()
    for path in PATHS:
        assert (await ask(either, body, path, content_type=content_type))[0] == 200
    assert sorted(decode.target for decode in either.decodes) == sorted(PATHS)
    left = b'{ "vllm_xargs":{"a":1},"sampling_params":{"extra_args":{}}, "n" : 1.0}'
    assert {decode.body for decode in either.decodes} == {left}
    assert either.prefills == []


# ---- what a request asks for ----

TOOL = '"tools":[{"type":"function","function":{"name":"f"}}]'


@pytest.mark.parametrize(
    "member",
    [
        f'{TOOL},"tool_choice":"required"',
        f'{TOOL},"tool_choice":{{"type":"function","function":{{"name":"f"}}}}',
        '"tools":[]',
        '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"z":1,"a":2}}}',
        '"structured_outputs":{"choice":["a","b"]}',
        '"guided_json":{"b":1,"a":[]}',
        '"logprobs":true,"top_logprobs":5,"stream":true',
        '"stream":true,"stream_options":{"include_usage":true}',
        '"max_tokens":"7"',
        '"max_tokens":0',
        '"max_tokens":null,"max_completion_tokens":9',
        '"min_tokens":5',
        '"n":1.0,"best_of":"1"',
        '"seed":9007199254740993,"logit_bias":{"10":1,"9":-1}',
    ],
)
async def test_O1_O5_O6_O7_what_one_prefill_can_do_is_disaggregated(either: Gateway, member: str) -> None:
    body = f'{{"model":"m","messages":[],{member}}}'.encode()
    prefill, decode = await disaggregated(either, body)
    client = json.loads(body)
    assert decode == client
    assert (prefill.pop("max_tokens"), prefill.pop("stream"), prefill.pop(NAME)["do_remote_decode"]) == (1, False, True)
    assert prefill.pop("max_completion_tokens", None) == (1 if "max_completion_tokens" in client else None)
    ours = ("max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options")
    assert prefill == {key: value for key, value in client.items() if key not in ours}


@pytest.mark.parametrize(
    ("path", "member"),
    [
        (CHAT, '"n":2'),
        (CHAT, '"n":[1]'),
        (CHAT, '"prompt_logprobs":1'),
        (COMPLETIONS, '"best_of":2'),
        (COMPLETIONS, '"use_beam_search":true'),
        (COMPLETIONS, '"echo":true,"max_tokens":0'),
        (COMPLETIONS, '"prompt_embeds":"AA"'),
        (COMPLETIONS, '"prompt":["a","b"]'),
        (COMPLETIONS, '"prompt":[[1,2],[3]]'),
    ],
)
async def test_O2_O4_what_it_cannot_is_the_decoders_alone(either: Gateway, path: str, member: str) -> None:
    await passed(either, f'{{"model":"m", {member} }}'.encode(), path)


@pytest.mark.parametrize("prompt", ['"a"', '["a"]', "[1,2]", "[[1,2]]", "null", "[]", "1", '{"a":1}'])
async def test_B21_one_prompt_or_none_goes_to_a_prefiller(either: Gateway, prompt: str) -> None:
    _, decode = await disaggregated(either, f'{{"model":"m","prompt":{prompt}}}'.encode(), COMPLETIONS)
    assert decode == {"model": "m", "prompt": json.loads(prompt)}


async def test_O26_responses_and_messages_are_disaggregated_where_they_are_configured(mode: Mode) -> None:
    paths = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
    settings = {"routing": {"paths": list(paths)}}
    async with Gateway.started(settings, prefill=1, decode=1, change=in_mode(mode)) as gateway:
        for path, limit in paths.items():
            await gateway.reset()
            client = {"input" if path == "/v1/responses" else "messages": [], limit: 700, "stream": True}
            prefill, decode = await disaggregated(gateway, json.dumps(client).encode(), path)
            assert decode == client
            assert (prefill[limit], prefill["stream"], gateway.prefills[0].target) == (1, False, path)
        for member in ("previous_response_id", "background"):
            await gateway.reset()
            await passed(gateway, b'{"input":"a","%b":1}' % member.encode(), "/v1/responses")
        await gateway.settled()


# ---- headers ----

SPOOFED = [
    *(DESTINATION, f"{DESTINATION}-subset", f"{DESTINATION}-served", "x-data-parallel-rank", "x-extproc-ticket"),
    *("x-envoy-retry-on", "x-envoy-max-retries", "x-envoy-upstream-rq-timeout-ms", "x-envoy-original-dst-host"),
    *("x-envoy-retriable-status-codes", "x-envoy-hedge-on-per-try-timeout", "x-envoy-original-path"),
    *("x-envoy-upstream-rq-per-try-timeout-ms", "x-envoy-decorator-operation", "x-envoy-internal"),
]


@pytest.mark.parametrize(("method", "body"), [("POST", CHAT_BODY), ("POST", b"[]"), ("DELETE", b"")])
async def test_headers_that_steer_reach_nobody(either: Gateway, method: str, body: bytes) -> None:
    values = ["9.9.9.9:1", "7", "5xx"]
    for engine in either.decoders:
        engine.respond = lambda _: Answer(503)
    headers = [f"{name}: {value}" for name in SPOOFED for value in values]
    status, _ = await ask(either, body, method=method, headers=headers)
    assert status == 503  # the engine's own, and not tried again
    (decode,) = either.decodes
    lines = [line for request in (*either.prefills, decode) for line in request.headers]
    assert not [line for line in lines if line[1] in values]
    endpoints = {engine.endpoint for engine in either.decoders}
    assert set((decode.header(DESTINATION) or "").split(",")) == endpoints


@pytest.mark.parametrize(
    "ids", [["a", "b"], ["a"] * 60, [""], ["r" * 30_000], ["\xe9\xff"], ["a, b"], ["a\tb"], ["", "a"]]
)
async def test_whatever_ids_a_client_sends_engines_get_one_of_ours(either: Gateway, ids: list[str]) -> None:
    await disaggregated(either, CHAT_BODY, headers=[f"X-Request-Id: {value}" for value in ids])
    for request in (*either.prefills, *either.decodes):
        (ours,) = (value for name, value in request.headers if name.lower() == "x-request-id")
        assert uuid.UUID(ours).version == 4


@pytest.mark.parametrize("name", ["te: trailers", "expect: 200-ok", "proxy-connection: keep-alive", "keep-alive: 1"])
async def test_headers_of_the_clients_connection_stay_with_it(either: Gateway, name: str) -> None:
    await disaggregated(either, CHAT_BODY, headers=[name])
    assert either.prefills[0].header(name.partition(":")[0]) is None


@pytest.mark.parametrize(
    ("content_type", "leg"),
    [
        ("application/json; charset=utf-16", "both"),
        ("APPLICATION/JSON;", "both"),
        ("application/json, text/plain", "decoder"),
        ("application/vnd.api+json", "decoder"),
        ("", "decoder"),
        (None, "decoder"),
        ("a" * 5000, "decoder"),
        ("\x80", "decoder"),
    ],
)
async def test_B29_only_what_an_engine_takes_for_json_is_prefilled(
    either: Gateway, content_type: str | None, leg: str
) -> None:
    if leg == "both":
        await disaggregated(either, CHAT_BODY, content_type=content_type)
    else:
        await passed(either, CHAT_BODY, content_type=content_type)


# ---- connections ----


async def test_requests_one_after_another_on_one_connection_are_all_answered(either: Gateway) -> None:
    """Also behind one that was refused before its body was read."""

    def one(more: str = "", close: str = "keep-alive") -> bytes:
        lines = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nConnection: {close}\r\nContent-Type: {JSON}\r\n{more}"
        return f"{lines}Content-Length: {len(CHAT_BODY)}\r\n\r\n".encode() + CHAT_BODY

    answers = await either.raw(one() + one("Content-Encoding: gzip\r\n") + one() + one(close="close"))
    statuses = [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 415, 200, 200]
    assert len(either.prefills) == len(either.decodes) == 3


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
    ],
)
async def test_what_two_parsers_could_read_in_two_ways_goes_nowhere(either: Gateway, request_: bytes) -> None:
    answer = await either.raw(request_)
    assert not answer or answer[9:10] == b"4", answer
    assert either.prefills == either.decodes == []
    assert either.server is not None
    service = either.server.service
    await until(lambda: service.in_flight == 0)
