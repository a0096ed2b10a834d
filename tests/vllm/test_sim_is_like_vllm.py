"""The simulated pair is held to the real one: the same sequences of both legs, the same statuses, errors and pins.

tests/unit/test_sim_recorded.py compares single requests; here it is what one engine does to the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest

from extproc.processes import plain_http_client
from extproc.sim.config import SimConfig
from extproc.sim.server import SimEngine
from tests.vllm.conftest import Pair
from tests.vllm.two_step import CHAT, COMPLETIONS, Body, chat, completion, words

# Until blocks that are going to be freed are free, on a busy machine.
SETTLED_S: Final = 1.5

Seen = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One pair, and how many blocks its prefiller has in use."""

    name: str
    prefill_url: str
    decode_url: str
    pinned: Callable[[], Awaitable[int]]
    client: httpx.AsyncClient

    async def post(self, url: str, path: str, body: Body) -> tuple[httpx.Response, Seen]:
        answer = await self.client.post(url + path, json=body)
        seen: Seen = {"status": answer.status_code}
        if answer.headers.get("content-type", "").startswith("application/json"):
            json = answer.json()
            if error := json.get("error"):
                seen["error"] = error.get("type"), error.get("code")
            else:
                seen["finish"] = [choice["finish_reason"] for choice in json["choices"]]
                seen["params"] = _shape(json.get("kv_transfer_params"))
                seen["tokens"] = json["usage"]["completion_tokens"]
        else:
            seen["type"] = answer.headers.get("content-type", "").split(";")[0]
            seen["params"] = "kv_transfer_params" in answer.text.replace('"kv_transfer_params":null', "")
        return answer, seen

    async def prefill(self, body: Body, path: str = CHAT, **changes: Any) -> tuple[Any, Seen]:
        """The prefill leg, and what was seen of it."""
        leg = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}} | changes
        answer, seen = await self.post(self.prefill_url, path, {k: v for k, v in leg.items() if v is not ABSENT})
        return (answer.json().get("kv_transfer_params") if answer.status_code == 200 else None), seen

    async def decode(self, body: Body, params: Any, path: str = CHAT, **changes: Any) -> Seen:
        return (await self.post(self.decode_url, path, body | {"kv_transfer_params": params} | changes))[1]

    async def is_pinned(self) -> bool:
        """Whether blocks stay in use."""
        try:
            async with asyncio.timeout(SETTLED_S):
                while await self.pinned():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return True
        return False

    async def release(self, params: Any) -> Seen:
        return await self.decode(completion("x", model="no-such-model"), params, COMPLETIONS)


ABSENT: Final = object()


def _shape(value: Any) -> Any:
    """Keys and types, down to the block ids; values only where they are no engine's own."""
    if isinstance(value, dict):
        return {key: _shape(member) for key, member in sorted(value.items())}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return value if isinstance(value, bool) or value is None else type(value).__name__


async def _handover(side: Side, body: Body, path: str = CHAT, **changes: Any) -> list[Seen]:
    params, first = await side.prefill(body, path)
    pinned = await side.pinned()
    assert pinned == len(params["remote_block_ids"][0])
    second = await side.decode(body, params, path, **changes)
    return [first, second, {"pinned": await side.is_pinned()}]


async def _release(side: Side, body: Body, **changes: Any) -> list[Seen]:
    """A decode leg that differs from its request by these fields, and then a sure release."""
    params, first = await side.prefill(body)
    second = await side.decode(body, params, **changes)
    pinned = await side.is_pinned()
    third = await side.release(params)
    return [first, second, {"pinned": pinned}, third, {"pinned": await side.is_pinned()}]


async def _leave(side: Side, body: Body, **changes: Any) -> list[Seen]:
    """A prefill leg that differs by these fields; its blocks are freed where it gave params."""
    params, first = await side.prefill(body, **changes)
    pinned = await side.is_pinned()
    seen = [first, {"pinned": pinned}]
    if params is not None:
        seen += [await side.release(params), {"pinned": await side.is_pinned()}]
    return seen


async def _with_params(side: Side, body: Body, edit: Callable[[Body], Body | None]) -> list[Seen]:
    params, first = await side.prefill(body)
    second = await side.decode(body, edit(params))
    pinned = await side.is_pinned()
    return [first, second, {"pinned": pinned}, await side.release(params), {"pinned": await side.is_pinned()}]


async def _twice(side: Side, body: Body) -> list[Seen]:
    params, first = await side.prefill(body)
    seen = [first, *[await side.decode(body, params) for _ in range(2)]]
    return [*seen, {"pinned": await side.is_pinned()}]


async def _released_twice(side: Side, body: Body) -> list[Seen]:
    params, first = await side.prefill(body)
    seen = [first, await side.release(params), await side.release(params)]
    return [*seen, {"pinned": await side.is_pinned()}]


async def _used_after_its_release(side: Side, body: Body) -> list[Seen]:
    params, first = await side.prefill(body)
    seen = [first, await side.release(params), {"pinned": await side.is_pinned()}, await side.decode(body, params)]
    return [*seen, {"pinned": await side.is_pinned()}]


async def _released_at_the_prefiller(side: Side, body: Body) -> list[Seen]:
    params, first = await side.prefill(body)
    body = completion("x", model="no-such-model", kv_transfer_params=params)
    second = (await side.post(side.prefill_url, COMPLETIONS, body))[1]
    pinned = await side.is_pinned()
    return [first, second, {"pinned": pinned}, await side.release(params), {"pinned": await side.is_pinned()}]


async def _four_at_once(side: Side, body: Body) -> list[Seen]:
    legs = [await side.prefill(body | {"messages": [{"role": "user", "content": words(80, n)}]}) for n in range(4)]
    seen = await asyncio.gather(*(side.release(params) for params, _ in legs))
    return [*(first for _, first in legs), *seen, {"pinned": await side.is_pinned()}]


def _without(*keys: str) -> Callable[[Body], Body]:
    return lambda params: {key: value for key, value in params.items() if key not in keys}


STREAM: Final[Body] = {"stream": True, "stream_options": {"include_usage": True}}
Sequence = Callable[[Side], Awaitable[list[Seen]]]


def _ids(count: int, seed: int) -> list[int]:
    return [7 + (31 * i + 17 * seed) % 200 for i in range(count)]


def _c(number: int) -> Body:
    return chat(words(70, 7000 + number), max_tokens=8)


SEQUENCES: Final[dict[str, Sequence]] = {
    # both legs
    "chat": lambda s: _handover(s, _c(1)),
    "streamed chat": lambda s: _handover(s, _c(2), **STREAM),
    "completions": lambda s: _handover(s, completion(words(70, 7003), max_tokens=8), COMPLETIONS),
    "token ids": lambda s: _handover(s, completion(_ids(90, 3), max_tokens=8), COMPLETIONS),
    "a short prompt": lambda s: _handover(s, chat("hi", max_tokens=3)),
    # Of as many blocks: where the decoder needs more than the params name, the real one dies (an assertion).
    "another prompt's KV": lambda s: _handover(
        s, completion(_ids(90, 1), max_tokens=8), COMPLETIONS, prompt=_ids(90, 2)
    ),
    # Odd prefill legs. A streamed one is left out: it pins blocks for a lease, under an id that it does not tell.
    "stream_options in the prefill": lambda s: _leave(s, _c(11), stream_options={"include_usage": True}),
    "min_tokens in the prefill": lambda s: _leave(s, _c(12), min_tokens=2),
    "max_completion_tokens wins": lambda s: _leave(s, _c(13), max_completion_tokens=5),
    "eight tokens of prefill": lambda s: _leave(s, _c(14), max_tokens=8),
    "two greedy choices": lambda s: _leave(s, _c(15), n=2),
    "logprobs": lambda s: _leave(s, _c(16), logprobs=True),
    "all keys of the usual form": lambda s: _leave(
        s,
        _c(17),
        kv_transfer_params={
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    ),
    "no params asked for": lambda s: _leave(s, _c(18), kv_transfer_params=ABSENT),
    "empty params": lambda s: _leave(s, _c(19), kv_transfer_params={}),
    "params as text": lambda s: _leave(s, _c(20), kv_transfer_params="x"),
    "prefill of an unknown model": lambda s: _leave(s, _c(21), model="no-such-model"),
    "prefill below zero degrees": lambda s: _leave(s, _c(22), temperature=-1),
    "prefill beyond the context": lambda s: _leave(s, chat(words(3000, 7023))),
    # decode legs that are refused
    "unknown model": lambda s: _release(s, _c(30), model="no-such-model"),
    "too many tokens": lambda s: _release(s, _c(31), max_tokens=100_000),
    "no token": lambda s: _release(s, _c(32), max_tokens=0),
    "below zero degrees": lambda s: _release(s, _c(33), temperature=-1),
    "no messages": lambda s: _release(s, _c(34), messages=[]),
    "fails the schema": lambda s: _release(s, _c(35), max_tokens="many"),
    "one token": lambda s: _release(s, _c(36), max_tokens=1),
    # params that are not as they were given
    "null params": lambda s: _with_params(s, _c(40), lambda _: None),
    "no params": lambda s: _with_params(s, _c(41), lambda _: {}),
    "no flag": lambda s: _with_params(s, _c(42), _without("do_remote_prefill")),
    "a false flag": lambda s: _with_params(s, _c(43), lambda p: p | {"do_remote_prefill": False}),
    "no tp_size": lambda s: _with_params(s, _c(44), _without("tp_size")),
    "no number of tokens": lambda s: _with_params(s, _c(45), _without("remote_num_tokens")),
    "an unknown key": lambda s: _with_params(s, _c(46), lambda p: p | {"later": [1]}),
    # uses and releases
    "used twice": lambda s: _twice(s, _c(50)),
    "released twice": lambda s: _released_twice(s, _c(51)),
    "used after its release": lambda s: _used_after_its_release(s, _c(52)),
    "released at the prefiller": lambda s: _released_at_the_prefiller(s, _c(53)),
    "four at once": lambda s: _four_at_once(s, _c(54)),
}


@pytest.fixture
async def sides(pair: Pair) -> AsyncIterator[tuple[Side, Side]]:
    """The simulated pair and the real one, both acquainted."""
    options: dict[str, Any] = {"blocks": 256, "block_size": 32, "max_model_len": 2048, "max_num_seqs": 16}
    async with (
        SimEngine(SimConfig(role="prefill", **options)) as prefill,
        SimEngine(SimConfig(role="decode", load_failure_policy="recompute", **options)) as decode,
        plain_http_client(timeout_s=120.0) as client,
    ):

        async def used() -> int:
            return prefill.engine.pool.used

        simulated = Side("simulated", prefill.url, decode.url, used, client)
        real = Side("real", pair.prefill.url, pair.decode.url, pair.prefill.pinned_blocks, client)
        params, _ = await simulated.prefill(chat("hello"))
        await simulated.decode(chat("hello"), params)
        yield simulated, real
        assert prefill.engine.death is None
        assert decode.engine.death is None


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES.keys())
async def test_the_simulated_pair_does_the_same(sides: tuple[Side, Side], sequence: Sequence) -> None:
    simulated, real = [await sequence(side) for side in sides]
    assert simulated == real
