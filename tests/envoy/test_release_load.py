"""Many requests: normal ones release nothing, hang-ups at any moment leave nothing pinned, and all is accounted for.

``EXTPROC_LOAD=1000`` plays the full number of requests; the default keeps a test run short.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.support.simulated import Pair, Pairing, Replica, SimGateway, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

REQUESTS: Final = int(os.environ.get("EXTPROC_LOAD", "200"))
AT_ONCE: Final = 32
KEY: Final = "of-the-fleet"
_AUTHORIZED: Final = {"authorization": f"Bearer {KEY}"}
_ENGINES: Final = {"prefill_us_per_token": 20, "blocks": 4096, "api_key": KEY, "log_size": 100_000}
_PAIRINGS: Final = {
    "nixl": Pairing(_ENGINES | {"connector": "nixl"}),
    "ascend": Pairing(_ENGINES | {"connector": "mooncake-ascend", "tp": 2}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[SimGateway]:
    """Engines behind a key; the service is a process, whose descriptors are its own."""
    settings: dict[str, Any] = {"fleet": {"api_key": KEY}, "release": {"deadline_s": 30, "timeout_s": 10}}
    async with SimGateway.replicated(_PAIRINGS, 1, settings=settings) as gateway:
        for pair in gateway.pairs.values():  # the engines of a pair have met
            await pair.complete(headers=_AUTHORIZED)
        yield gateway


def _sockets(replica: Replica) -> Counter[str]:
    """Open descriptors of a process by kind."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{replica.process.pid}/fd").iterdir():
        try:
            kinds[os.readlink(link).partition(":")[0]] += 1
        except FileNotFoundError:
            continue
    return kinds


async def _play(pair: Pair, count: int, seed: int, hang_ups: float) -> int:
    """So many requests, ``AT_ONCE`` at a time; returns how many clients left early."""
    rng = random.Random(seed)
    plans = [
        (rng.random() < hang_ups, rng.uniform(0, 0.25), rng.random() < 0.5, rng.random() < 0.5) for _ in range(count)
    ]
    slots = asyncio.Semaphore(AT_ONCE)
    left = 0

    async def one(leaves: bool, after_s: float, stream: bool, reset: bool) -> None:
        nonlocal left
        async with slots:
            options = {"stream": stream, "words": 20, "max_tokens": 16, "ignore_eos": True}
            request = await pair.open(headers=_AUTHORIZED, **options)
            if leaves:
                await asyncio.sleep(after_s)
                request.cut(reset=reset)
                left += 1
            else:
                answer = await request.to_end(60)
                assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
            await pair.gateway.drop(request)

    await asyncio.gather(*(one(*plan) for plan in plans))
    return left


async def _all_told(replica: Replica, count: int) -> None:
    """Wait until so many endings were logged and nothing is under way."""

    async def told() -> bool:
        outcomes = await replica.counts("extproc_stream_outcomes_total")
        open_handoffs = await replica.counts("extproc_handoffs_open")
        pending = (await replica.fleet())["releases"]["pending"]
        return sum(outcomes.values()) >= count and not open_handoffs and not pending and not await replica.in_flight()

    await until(told, 60)


@pytest.mark.parametrize("name", _PAIRINGS)
async def test_normal_requests_release_nothing(gateway: SimGateway, name: str) -> None:
    pair, (replica,) = gateway[name], gateway.replicas
    before = await replica.accounts()
    told = sum((await replica.counts("extproc_stream_outcomes_total")).values())

    await _play(pair, REQUESTS, seed=1, hang_ups=0.0)
    await _all_told(replica, told + REQUESTS)

    assert await replica.accounts() == before
    assert len(pair.pinned) >= REQUESTS
    await pair.all_free()
    assert pair.expired == []
    pair.assert_alive()


@pytest.mark.parametrize("name", _PAIRINGS)
async def test_hang_ups_at_any_moment_leave_nothing_pinned(gateway: SimGateway, name: str) -> None:
    pair, (replica,) = gateway[name], gateway.replicas
    told = sum((await replica.counts("extproc_stream_outcomes_total")).values())
    await _play(pair, AT_ONCE * 2, seed=2, hang_ups=0.5)  # connections to engines, side channels
    told += AT_ONCE * 2
    await _all_told(replica, told)
    warm = _sockets(replica)
    before = Counter(await replica.accounts())

    left = await _play(pair, REQUESTS, seed=3, hang_ups=0.7)
    await _all_told(replica, told + REQUESTS)

    assert left > REQUESTS // 2
    await pair.all_free()
    assert pair.expired == []  # by releases, not by the engine's timer
    pair.assert_alive()
    gained = Counter(await replica.accounts()) - before
    assert gained["requested"] == gained["released"] > 0
    # Not more than the connections that may have been kept for the next request.
    await until(lambda: _sockets(replica).total() <= warm.total() + 4, 30)
