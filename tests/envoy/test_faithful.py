"""Through the gateway a client gets what a decoder alone would have answered: differences are searched on simulated
engines, which validate as vLLM does, in both body modes."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.gateway import CHAT, COMPLETIONS, in_mode
from tests.support.simulated import Pair, Pairing, SimGateway

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "f"}}
LONG = "w " * 60_000

CASES: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {},
        *({"max_tokens": value} for value in (0, -1, 10**9, "7", "x", 1.5, None, True)),
        *({"max_completion_tokens": value} for value in (0, 3, None)),
        *({"min_tokens": value} for value in (2, 9, -1)),
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": "yes"},
        {"logprobs": True, "top_logprobs": 2},
        *({"logprobs": True, "top_logprobs": value} for value in (99_999, -2)),
        {"top_logprobs": 2},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 1, "stream": True},
        *({"n": value} for value in (2, 0, -1, "1", 20_000)),
        {"best_of": 2},
        *({"temperature": value} for value in (-1, "x")),
        {"top_p": 2},
        {"stop": [""]},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": NAMED},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": []},
        {"tool_choice": "auto"},
        *({"response_format": {"type": value}} for value in ("json_object", "other")),
        *({"model": value} for value in ("other", 3)),
        *({"seed": value} for value in (2**63, 2**70, "x")),
        *({"messages": value} for value in ([], "x", [{"role": "other"}], [{"role": "user", "content": LONG}])),
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"echo": True, "unknown": 1, "user": 3},
    ],
    COMPLETIONS: [
        {},
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": True},
        {"echo": True, "logprobs": 1},
        *({"logprobs": value} for value in (3, 10**6, -2)),
        *({"prompt": value} for value in (["a", "b"], ["a b c"], [1, 2, 3], [[1, 2], [3]], [], "", None, 1, {"a": 1})),
        *({"prompt": value} for value in (["a", 1], [-1], [10**9], LONG)),
        *({"best_of": value} for value in (1, 2)),
        {"suffix": "x"},
        {"prompt_embeds": "AA"},
        {"stream_options": {}},
        {"use_beam_search": True},
        {"stream": True},
        {"truncate_prompt_tokens": 5},
    ],
}

_numbers = itertools.count(1)


def request(path: str, members: dict[str, Any], model: str) -> dict[str, Any]:
    """With a prompt that no other request has, so that it has to be prefilled."""
    number = next(_numbers)
    text = " ".join(str(number * 7919 + index) for index in range(60))
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    if path == COMPLETIONS:
        prompt = {"prompt": text, "max_tokens": 4}
    return {"model": model, **prompt, **members}


def told(response: httpx.Response) -> Any:
    """All of an answer but ids, times, and how many of the prompt's tokens were cached."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, response.text.count("data: "), response.text[-20:]
    value = response.json()
    if response.status_code != 200:
        return response.status_code, value
    usage = {key: count for key, count in (value.get("usage") or {}).items() if isinstance(count, int)}
    return response.status_code, sorted(value), value["choices"], usage


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def gateway(request: pytest.FixtureRequest) -> AsyncIterator[SimGateway]:
    pairs = {"tiny": Pairing({"connector": "nixl"})}
    async with SimGateway.started(pairs, change=in_mode(request.param)) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def pair(gateway: SimGateway) -> AsyncIterator[Pair]:
    await gateway["tiny"].reset()
    yield gateway["tiny"]
    # What a decoder refused after its prefill had pinned blocks has been released.
    await gateway["tiny"].all_free()
    gateway["tiny"].assert_alive()


@pytest.mark.parametrize("path", CASES)
async def test_O1_O5_O6_O7_the_answer_is_a_decoders_own(gateway: SimGateway, pair: Pair, path: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        for members in CASES[path]:
            body = request(path, members, "tiny")
            plain = {key: value for key, value in body.items() if key != "kv_transfer_params"}
            alone = told(await client.post(pair.decoder.url + path, json=plain))
            assert told(await client.post(gateway.url + path, json=body)) == alone, members
            assert alone[0] < 500
    assert pair.prefiller.requests
