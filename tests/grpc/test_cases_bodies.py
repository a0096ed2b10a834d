"""Cases from public bug reports, by their id: what each leg's body is and how large it may be, in both body modes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.grpc.stand import ASKS, JSON, Stand, decoded, handed_over, refused, through
from tests.support.engines import Answer, RecordedRequest
from tests.support.gateway import CHAT, COMPLETIONS
from tests.support.scripted_envoy import Mode, ScriptedEnvoy

pytestmark = pytest.mark.asyncio(loop_scope="session")

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
def spelled(stand: Stand) -> None:
    for engine in stand.prefillers:
        engine.respond = hand_over


async def legs(
    envoy: ScriptedEnvoy, stand: Stand, body: bytes, path: str = CHAT, **options: Any
) -> tuple[bytes, bytes]:
    """The bodies that the one prefiller and the decoder get; the decoder's must be framed as its mode wants."""
    decode = await decoded(envoy, body, path, **options)
    length = None if envoy.mode == "FULL_DUPLEX_STREAMED" else str(len(decode.body))
    assert decode.header("content-length") == length
    assert stand.prefill.header("content-length") == str(len(stand.prefill.body))
    return stand.prefill.body, decode.body


async def bypassed(envoy: ScriptedEnvoy, stand: Stand, body: bytes, path: str = CHAT) -> None:
    """No prefill, and the decoder gets the client's own bytes."""
    assert (await decoded(envoy, body, path)).body == body
    assert stand.prefills == []


# ---- sizes ----


async def test_B01_lengths_are_in_bytes(envoy: ScriptedEnvoy, stand: Stand) -> None:
    body = '{"model":"m","prompt":"é☃","max_tokens":5}'.encode()
    prefill, decode = await legs(envoy, stand, body, COMPLETIONS)
    assert decode == handed_over(body, PARAMS)
    limits = '{"model":"m","prompt":"é☃","max_tokens":1,"stream":false}'.encode()
    assert prefill == handed_over(limits, ASKS)


async def test_B01_what_is_not_changed_keeps_its_body_and_its_length(envoy: ScriptedEnvoy, stand: Stand) -> None:
    body = '\n {"input" : "é☃",\t"n":2 }  '.encode()
    decode = await decoded(envoy, body, "/v1/embeddings")
    assert decode.body == body
    assert decode.header("content-length") == (None if envoy.mode == "FULL_DUPLEX_STREAMED" else str(len(body)))


def of_size(size: int) -> bytes:
    start, end = b'{"model":"m","messages":[{"role":"user","content":"', b'"}],"max_tokens":5}'
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("size", [32_768, 32_769, 1_048_577, 6 * 1024 * 1024], ids=str)
async def test_B03_B04_large_bodies_pass_whole(envoy: ScriptedEnvoy, stand: Stand, size: int) -> None:
    body = of_size(size)
    prefill, decode = await legs(envoy, stand, body)
    assert decode == handed_over(body, PARAMS)
    assert len(prefill) == len(body) + len(b',"stream":false,"kv_transfer_params":' + ASKS)


async def test_B03_B04_the_limit_is_exact(mode: Mode) -> None:
    limit = 100_000
    async with (
        Stand.standing({"limits": {"body_bytes": limit}}, prefill=1, decode=1) as stand,
        stand.envoy(mode) as envoy,
    ):
        await through(envoy, of_size(limit))
        chunks = [of_size(limit + 1)[:60_000], of_size(limit + 1)[60_000:]]
        for options in ({"body": of_size(limit + 1)}, {"chunks": chunks}):
            await refused(envoy, 413, "body_too_large", **options)
        assert len(stand.prefills) == 1
        assert stand.releases == []
        await stand.settled()


@pytest.mark.parametrize("size", [62_000, 124_000, 123_999, 124_001, 300_000], ids=str)
async def test_B05_chunks_stay_below_the_limit_and_the_last_one_ends_the_stream(
    envoy: ScriptedEnvoy, stand: Stand, size: int
) -> None:
    """An exact multiple of the chunk size has neither an extra nor a missing last chunk."""
    body = of_size(size)
    chunks = [body[start : start + size // 5] for start in range(0, size, size // 5)]
    exchange = await through(envoy, body, "/v1/embeddings", chunks=chunks)
    assert exchange.upstream.body == body
    sent = [reply.request_body.response.body_mutation for reply in exchange.replies if reply.HasField("request_body")]
    if envoy.mode == "BUFFERED":
        assert [mutation.WhichOneof("mutation") for mutation in sent] == [None]
    else:
        streamed = [mutation.streamed_response for mutation in sent]
        assert [len(chunk.body) for chunk in streamed] == [
            min(62_000, size - start) for start in range(0, size, 62_000)
        ]
        assert [chunk.end_of_stream for chunk in streamed] == [False] * (len(streamed) - 1) + [True]


async def test_B05_a_long_prompt_is_disaggregated_in_chunks(envoy: ScriptedEnvoy, stand: Stand) -> None:
    body = of_size(300_000)
    exchange = await through(envoy, chunks=[body[start : start + 60_000] for start in range(0, 300_000, 60_000)])
    assert exchange.upstream.body == handed_over(body, PARAMS)
    assert len(stand.prefills) == 1


# ---- limits of length ----


@pytest.mark.parametrize(
    ("limits", "prefill_limits"),
    [
        (b'"max_completion_tokens":500', b'"max_completion_tokens":1,"stream":false,"max_tokens":1'),
        (b'"max_completion_tokens":500,"max_tokens":70', b'"max_completion_tokens":1,"max_tokens":1,"stream":false'),
        (b'"user":"u"', b'"user":"u","stream":false,"max_tokens":1'),
        (b'"max_tokens":null', b'"max_tokens":1,"stream":false'),
        (b'"max_output_tokens":500', b'"max_output_tokens":1,"stream":false,"max_tokens":1'),
        (b'"max_tokens":"7"', b'"max_tokens":1,"stream":false'),
        (b'"max_tokens":1E2', b'"max_tokens":1,"stream":false'),
        (b'"max_tokens":true', b'"max_tokens":1,"stream":false'),
        (b'"max_tokens":-1', b'"max_tokens":1,"stream":false'),
    ],
)
async def test_B18_O5_limits_are_one_for_the_prefill_and_the_clients_for_the_decode(
    envoy: ScriptedEnvoy, stand: Stand, limits: bytes, prefill_limits: bytes
) -> None:
    start = b'{"model":"m","messages":[{"role":"user","content":"hi"}],'
    prefill, decode = await legs(envoy, stand, start + limits + b"}")
    assert prefill == handed_over(start + prefill_limits + b"}", ASKS)
    assert decode == handed_over(start + limits + b"}", PARAMS)


@pytest.mark.parametrize("options", [b'{"include_usage":true}', b'{"include_usage":false}', b"{}", b"null"])
async def test_B19_stream_and_its_options_stay_with_the_decode(
    envoy: ScriptedEnvoy, stand: Stand, options: bytes
) -> None:
    body = b'{"model":"m","stream":true,"stream_options":' + options + b',"messages":[],"max_tokens":5}'
    prefill, decode = await legs(envoy, stand, body)
    assert prefill == handed_over(b'{"model":"m","stream":false,"messages":[],"max_tokens":1}', ASKS)
    assert decode == handed_over(body, PARAMS)
    assert stand.prefill.header("accept") == "application/json"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_B20_min_tokens_stays_with_the_decode(envoy: ScriptedEnvoy, stand: Stand, path: str) -> None:
    body = b'{"max_tokens":100,"min_tokens":5,"prompt":"hi","messages":[]}'
    prefill, decode = await legs(envoy, stand, body, path)
    assert prefill == handed_over(b'{"max_tokens":1,"prompt":"hi","messages":[],"stream":false}', ASKS)
    assert decode == handed_over(body, PARAMS)


# ---- prompts ----


@pytest.mark.parametrize("prompt", [b'"hi"', b'["hi"]', b"[1,2,3]", b"[[1,2]]", b'""', b"[ ]", b"null"])
async def test_B21_one_prompt_is_disaggregated(envoy: ScriptedEnvoy, stand: Stand, prompt: bytes) -> None:
    body = b'{"model":"m","prompt":' + prompt + b"}"
    _, decode = await legs(envoy, stand, body, COMPLETIONS)
    assert decode == handed_over(body, PARAMS)


@pytest.mark.parametrize(
    "prompt", [b'["a","b"]', b"[[1,2],[3]]", b'[{"prompt_embeds":"x"},"b"]', b'[ "a" , [1] ]', b'["a",null]']
)
async def test_B21_several_prompts_are_not(envoy: ScriptedEnvoy, stand: Stand, prompt: bytes) -> None:
    await bypassed(envoy, stand, b'{"model":"m","prompt":' + prompt + b"}", COMPLETIONS)


async def test_B21_content_parts_and_tool_calls_are_one_prompt(envoy: ScriptedEnvoy, stand: Stand) -> None:
    parts = b'[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]'
    calls = b'[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]'
    body = (
        b'{"model":"m","messages":[{"role":"user","content":' + parts + b'},{"role":"assistant","content":null,'
        b'"tool_calls":' + calls + b'},{"role":"tool","tool_call_id":"1","content":"4"}],"prompt":["ignored","here"]}'
    )
    _, decode = await legs(envoy, stand, body)
    assert decode == handed_over(body, PARAMS)


@pytest.mark.parametrize("member", [b'"n":2', b'"best_of":2', b'"n":"2"', b'"n":1.5', b'"use_beam_search":true'])
async def test_B21_several_choices_are_not_disaggregated(envoy: ScriptedEnvoy, stand: Stand, member: bytes) -> None:
    await bypassed(envoy, stand, b'{"model":"m","prompt":"hi",' + member + b"}", COMPLETIONS)


# ---- faithfulness ----

REQUEST = (
    b'\r\n{ "seed" : 9007199254740993,"temperature":0.70,\t"top_p":1E0, "logit_bias":{"10":1,"9":-1},\n'
    b'  "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","required":["z"],'
    b'"properties":{"z":{},"a":{}}}}}],"messages": [ {"role":"user","content":"caf\\u00e9 \xe2\x98\x83 \\ud83d'
    b'\\ude00 \\/ \xf0\x9f\x98\x80"} ],"response_format":{"type":"json_schema","json_schema":{"z":1,'
    b'"a":18446744073709551615}},"unknown":[1e400,-0,0.1000],"max_tokens": 5 , "\\u0073top":["\\n"]}\n '
)


async def test_B24_every_other_byte_is_the_clients(envoy: ScriptedEnvoy, stand: Stand) -> None:
    prefill, decode = await legs(envoy, stand, REQUEST)
    assert decode == handed_over(REQUEST, PARAMS)
    limited = REQUEST.replace(b'"max_tokens": 5 ,', b'"max_tokens": 1 ,').replace(b"]}\n ", b'],"stream":false}\n ')
    assert prefill == handed_over(limited, ASKS)


@pytest.mark.parametrize("seed", [b"-0", b"1e999", b"1" + b"0" * 5000, b"0.1e-7", b"123456789012345678901234567890"])
async def test_B24_numbers_keep_their_spelling(envoy: ScriptedEnvoy, stand: Stand, seed: bytes) -> None:
    body = b'{"seed":' + seed + b',"prompt":"hi","max_tokens":5}'
    prefill, decode = await legs(envoy, stand, body, COMPLETIONS)
    assert decode == handed_over(body, PARAMS)
    assert prefill.startswith(b'{"seed":' + seed + b",")


# ---- oddities ----


async def test_O1_logprobs_are_the_clients_on_both_legs(envoy: ScriptedEnvoy, stand: Stand) -> None:
    body = b'{"messages":[],"stream":true,"logprobs":true,"top_logprobs":5}'
    prefill, decode = await legs(envoy, stand, body)
    assert decode == handed_over(body, PARAMS)
    assert {key: value for key, value in json.loads(prefill).items() if "logprobs" in key} == {
        "logprobs": True,
        "top_logprobs": 5,
    }


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"messages":[],"prompt_logprobs":2}', CHAT),
        (b'{"prompt":"hi","echo":true,"logprobs":1}', COMPLETIONS),
        (b'{"prompt":"hi","prompt_logprobs":0}', COMPLETIONS),
        (b'{"messages":[],"prompt_logprobs":2,"stream":true}', CHAT),
        (b'{"prompt":"hi","max_tokens":0,"echo":true}', COMPLETIONS),
    ],
    ids=["O2 chat", "O2 echo", "O2 none", "O3 stream", "O4 no tokens"],
)
async def test_O2_O3_O4_what_needs_the_prompt_pass_is_the_decoders(
    envoy: ScriptedEnvoy, stand: Stand, body: bytes, path: str
) -> None:
    await bypassed(envoy, stand, body, path)


@pytest.mark.parametrize(
    "member",
    [
        b'"response_format":{"type":"json_schema","json_schema":{"name":"a","strict":true,"schema":{"z":1,"a":2}}}',
        b'"structured_outputs":{"regex":"[a-z]+\\\\d"}',
        b'"guided_json":{"b":1,"a":[]}',
        b'"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required"',
        b'"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":'
        b'{"name":"f"}},"parallel_tool_calls":false',
        b'"metadata":{"a":"b"},"chat_template_kwargs":{"enable_thinking":false},"x_unknown":[{}],"stop":["\\n"]',
        b'"tools":[]',
    ],
    ids=["schema", "regex", "guided", "required", "named tool", "O9 unknown", "O7 no tools"],
)
async def test_O6_O7_O9_other_members_are_the_clients_on_both_legs(
    envoy: ScriptedEnvoy, stand: Stand, member: bytes
) -> None:
    body = b'{"model":"m","messages":[],' + member + b"}"
    prefill, decode = await legs(envoy, stand, body)
    assert decode == handed_over(body, PARAMS)
    rest = b'{"model":"m","messages":[],' + member + b',"stream":false,"max_tokens":1}'
    assert prefill == handed_over(rest, ASKS)


@pytest.mark.parametrize(
    "members", [b'"max_tokens":5,"max_tokens":7', b'"max_tokens":5,"max_tok\\u0065ns":7', b'"max_tok\\u0065ns":7']
)
async def test_O8_a_repeated_key_counts_once_with_its_last_value(
    envoy: ScriptedEnvoy, stand: Stand, members: bytes
) -> None:
    prefill, decode = await legs(envoy, stand, b'{"prompt":"hi",' + members + b"}", COMPLETIONS)
    for body, expected in ((prefill, 1), (decode, 7)):
        pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
        assert [value for key, value in pairs if key == "max_tokens"] == [expected]


async def test_O10_no_content_is_logged(
    envoy: ScriptedEnvoy, stand: Stand, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    image = b"QUJD" * 1_250_000
    body = (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;'
        b"base64," + image + b'"}},{"type":"text","text":"a secret question"}]}]}'
    )
    _, decode = await legs(envoy, stand, body, headers=[*JSON, ("authorization", "Bearer k-secret")])
    assert decode == handed_over(body, PARAMS)
    captured = capsys.readouterr()
    logged = captured.out + captured.err + caplog.text
    assert "decision=disaggregated" in logged
    assert len(logged) < 8000
    for secret in ("QUJDQUJD", "secret"):
        assert secret not in logged


async def test_O12_a_body_in_single_bytes_is_prefilled_once_it_is_whole(envoy: ScriptedEnvoy, stand: Stand) -> None:
    body = b'{"model":"m","messages":[],"max_tokens":5}'
    exchange = await through(envoy, chunks=[bytes([byte]) for byte in body])
    assert exchange.upstream.body == handed_over(body, PARAMS)
    assert len(stand.prefills) == 1
