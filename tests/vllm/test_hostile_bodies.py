"""Bodies meant to hurt: whatever a client sends, both engines still answer afterwards, and nothing stays pinned."""

from __future__ import annotations

import json
from typing import Final

import pytest

from tests.vllm.gateway import VllmGateway
from tests.vllm.two_step import CHAT, COMPLETIONS, Body, chat, completion, freed, post, text_of, words

pytestmark = pytest.mark.asyncio(loop_scope="session")

STALE: Final[Body] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "00000000-0000-0000-0000-000000000000",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}
"""Without ``remote_request_id``: on a bare decoder the request waits for ever, and the engine dies when it is given
up."""

PIN: Final[Body] = {"do_remote_decode": True}
PARAMS: Final = "kv_transfer_params"


def _body(**fields: object) -> bytes:
    return json.dumps(chat(words(50, 900), **fields)).encode()


def _raw(member: str) -> bytes:
    """A chat body with this text as its first member."""
    return b"{" + member.encode() + b"," + _body()[1:]


STALE_TEXT: Final = json.dumps(STALE)
PIN_TEXT: Final = json.dumps(PIN)

BODIES: Final[dict[str, tuple[str, bytes]]] = {
    "stale params": (CHAT, _body(kv_transfer_params=STALE)),
    "params that pin": (CHAT, _body(kv_transfer_params=PIN)),
    "params, completions": (
        COMPLETIONS,
        json.dumps(completion(words(50, 901), kv_transfer_params=STALE)).encode(),
    ),
    "params twice": (CHAT, _raw(f'"{PARAMS}":null,"{PARAMS}":{STALE_TEXT}')),
    "an escaped key": (CHAT, _raw(f'"kv_transfer_param\\u0073":{STALE_TEXT}')),
    "an escaped key that pins": (CHAT, _raw(f'"\\u006bv_transfer_params":{PIN_TEXT}')),
    "params of another type": (CHAT, _raw(f'"{PARAMS}":"x"')),
    "UTF-16": (CHAT, _raw(f'"{PARAMS}":{STALE_TEXT}').decode().encode("utf-16")),
    "UTF-16 without a mark": (CHAT, _raw(f'"{PARAMS}":{STALE_TEXT}').decode().encode("utf-16-le")),
    "UTF-32": (CHAT, _raw(f'"{PARAMS}":{STALE_TEXT}').decode().encode("utf-32")),
    "UTF-8 with a mark": (CHAT, b"\xef\xbb\xbf" + _raw(f'"{PARAMS}":{STALE_TEXT}')),
    "NaN": (CHAT, _raw(f'"x":NaN,"{PARAMS}":{STALE_TEXT}')),
    "Infinity": (CHAT, _raw(f'"x":-Infinity,"{PARAMS}":{STALE_TEXT}')),
    "1e999": (CHAT, _raw(f'"x":1e999,"{PARAMS}":{STALE_TEXT}')),
    "a lone surrogate": (CHAT, _raw(f'"x":"\\ud800","{PARAMS}":{STALE_TEXT}')),
    "a raw surrogate": (CHAT, _raw(f'"x":"?","{PARAMS}":{STALE_TEXT}').replace(b"?", b"\xed\xa0\x80")),
    "deep": (CHAT, _raw(f'"x":{"[" * 900}{"]" * 900},"{PARAMS}":{STALE_TEXT}')),
    "a long integer": (CHAT, _raw(f'"x":{"9" * 4000},"{PARAMS}":{STALE_TEXT}')),
    "trailing garbage": (CHAT, _raw(f'"{PARAMS}":{STALE_TEXT}') + b"x"),
    "an array": (CHAT, b"[" + _body(kv_transfer_params=STALE) + b"]"),
    "not JSON": (CHAT, b"kv_transfer_params"),
    "empty": (CHAT, b""),
    **{
        f"vllm_xargs {value}": (CHAT, _raw(f'"vllm_xargs":{{"{PARAMS}":{value}}}'))
        for value in ('""', "0", "[]", '"x"', "1", "false", "{}", "null", '["do_remote_decode"]', STALE_TEXT)
    },
    "vllm_xargs with an escaped key": (CHAT, _raw('"vllm_xargs":{"kv_transfer_param\\u0073":""}')),
    "vllm_xargs twice": (CHAT, _raw(f'"vllm_xargs":{{}},"vllm_xargs":{{"{PARAMS}":0}}')),
    "vllm_xargs, escaped": (CHAT, _raw(f'"vllm\\u005fxargs":{{"{PARAMS}":""}}')),
    "vllm_xargs, two choices": (CHAT, _raw(f'"n":2,"temperature":1,"vllm_xargs":{{"{PARAMS}":""}}')),
    "vllm_xargs, completions": (
        COMPLETIONS,
        json.dumps(completion(words(50, 902), vllm_xargs={PARAMS: ""})).encode(),
    ),
    "vllm_xargs, two prompts": (
        COMPLETIONS,
        json.dumps({**completion("x"), "prompt": ["a", "b"], "vllm_xargs": {PARAMS: ""}}).encode(),
    ),
    "two choices with params": (CHAT, _body(n=2, temperature=1, kv_transfer_params=PIN)),
    "%-encoded path": ("/v1/chat%2Fcompletions", _body(kv_transfer_params=PIN)),
    "%-encoded path, vllm_xargs": ("/v1/%63hat/completions", _raw(f'"vllm_xargs":{{"{PARAMS}":""}}')),
    "%-encoded letter": ("/v1/chat/%63ompletions", _body(kv_transfer_params=STALE)),
    "query": ("/v1/chat/completions?x=1", _body(kv_transfer_params=STALE)),
    "two slashes": ("//v1/chat/completions", _body(kv_transfer_params=PIN)),
    "trailing slash": ("/v1/chat/completions/", _body(kv_transfer_params=PIN)),
    "/invocations": ("/invocations", _body(kv_transfer_params=PIN)),
    "/invocations, stale": ("/invocations", _body(kv_transfer_params=STALE)),
    "/invocations, vllm_xargs": ("/invocations", _raw(f'"vllm_xargs":{{"{PARAMS}":""}}')),
    "batch": (
        "/v1/chat/completions/batch",
        json.dumps(
            {**chat("x"), "messages": [[{"role": "user", "content": words(40, 903)}]], "kv_transfer_params": PIN}
        ).encode(),
    ),
    "responses": (
        "/v1/responses",
        json.dumps(
            {"model": "tiny", "input": words(40, 904), "max_output_tokens": 4, "kv_transfer_params": PIN}
        ).encode(),
    ),
    "responses, vllm_xargs": (
        "/v1/responses",
        json.dumps({"model": "tiny", "input": "x", "max_output_tokens": 4, "vllm_xargs": {PARAMS: 0}}).encode(),
    ),
    "messages": (
        "/v1/messages",
        json.dumps(
            {
                "model": "tiny",
                "max_tokens": 4,
                "messages": [{"role": "user", "content": words(40, 905)}],
                "kv_transfer_params": PIN,
            }
        ).encode(),
    ),
    "messages, vllm_xargs": (
        "/v1/messages",
        json.dumps(
            {
                "model": "tiny",
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "x"}],
                "vllm_xargs": {PARAMS: ""},
            }
        ).encode(),
    ),
}


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES.keys())
async def test_engines_and_their_blocks_are_safe(gateway: VllmGateway, path: str, body: bytes) -> None:
    answer = await gateway.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 307, 400, 404, 405, 415), answer.text
    await gateway.settled()
    for engine in (gateway.prefill, gateway.decode):
        assert engine.running, engine.tail()
        assert await freed(engine, timeout_s=3) < 3
        # It generates, rather than only its HTTP server answering.
        assert text_of(await post(engine, CHAT, chat("hello", max_tokens=2)))


async def test_params_of_another_request_are_not_read(gateway: VllmGateway) -> None:
    """What a client says of KV has no say: its answer is that of its own prompt."""
    from tests.vllm.two_step import prefill

    theirs = await prefill(gateway.prefill, chat(words(60, 910)))
    body = chat(words(60, 911))
    answer = await gateway.post(CHAT, body | {"kv_transfer_params": theirs})
    assert text_of(answer) == text_of(await post(gateway.prefill, CHAT, body))
    # Theirs are still pinned, untouched.
    assert await gateway.prefill.pinned_blocks() == len(theirs["remote_block_ids"][0])
    await post(gateway.decode, CHAT, chat("x", model="no-such-model", kv_transfer_params=theirs))
    assert await freed(gateway.prefill, timeout_s=5) < 2
