"""Several replicas, one cluster in Envoy: a ticket is acted on by whichever gets it, whatever became of its maker."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.simulated import HOST, Pair, Pairing, Replica, Request, SimGateway, Stalls, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

_ENGINES = {"prefill_us_per_token": 100}
# One decode at a time, so that a test can keep a decoder busy.
_PAIRINGS = {
    "nixl": Pairing(_ENGINES | {"connector": "nixl"}, {"max_num_seqs": 1}),
    "ascend": Pairing(_ENGINES | {"connector": "mooncake-ascend", "tp": 2}, {"max_num_seqs": 1}),
    "idle": Pairing(_ENGINES | {"connector": "nixl"}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[SimGateway]:
    async with SimGateway.replicated(_PAIRINGS) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: SimGateway) -> SimGateway:
    """All replicas alive, and one of them with Envoy's log stream."""
    await shared.close_requests()
    for replica in shared.replicas:
        if not replica.process.running:
            await replica.process.start()
    await shared.service_seen()
    for pair in shared.pairs.values():
        await pair.reset()  # what one test leaves pinned is not the next one's fault
        await pair.all_free()
    await shared["nixl"].complete()
    return shared


async def _log_holder(gateway: SimGateway) -> Replica:
    """The replica that Envoy's one worker sends its log to."""
    holders: list[Replica] = []

    async def found() -> bool:
        holders[:] = [r for r in gateway.replicas if await r.counts("extproc_access_log_streams")]
        return len(holders) == 1

    await until(found)
    return holders[0]


async def _handled_by(replica: Replica, pair: Pair, **more: Any) -> Request:
    """A request whose exchange is on that replica: Envoy takes them in turn."""
    while True:
        await pair.reset()
        request = await pair.open(**more)
        await until(lambda: bool(pair.decodes()))
        if await replica.in_flight() == 1:
            return request
        request.cut()
        await pair.freed(time.monotonic())
        await until(lambda: pair.decoder.engine.waiting == 0)


async def _hold(pair: Pair) -> None:
    """Keep the decoder busy, so that the next requests wait in its queue after their response's headers."""
    busy = await pair.open(pair.decoder.url, max_tokens=8000, ignore_eos=True, stream=True)
    await busy.until(b"data: ")


async def _killed(gateway: SimGateway, replica: Replica) -> None:
    replica.process.signal(signal.SIGKILL)
    assert await replica.process.wait(5) == -signal.SIGKILL
    await _missed(gateway, replica)


async def _missed(gateway: SimGateway, replica: Replica) -> None:
    """Envoy has seen the replica's connections close. What it writes to them before that is lost with the replica."""

    async def seen() -> bool:
        return await gateway.envoy.connections("extproc", f"{HOST}:{replica.grpc_port}") == 0

    await until(seen)


async def _ended(replica: Replica) -> Counter[str]:
    """The replica's accounts, once nothing is under way."""

    async def settled() -> bool:
        open_handoffs = await replica.counts("extproc_handoffs_open")
        return await replica.in_flight() == 0 and not open_handoffs and "pending" not in await replica.accounts()

    await until(settled)
    return Counter(await replica.accounts())


def _roles(gateway: SimGateway, holder: Replica, victim: str) -> tuple[Replica, Replica]:
    (other,) = [replica for replica in gateway.replicas if replica is not holder]
    return (holder, other) if victim == "log-holder" else (other, holder)


@pytest.mark.parametrize(
    ("name", "victim", "picks"),
    [("nixl", "log-holder", 1), ("ascend", "log-holder", 0), ("ascend", "log-holder", 1), ("ascend", "other", 0)],
)
async def test_killed_before_the_first_chunk(gateway: SimGateway, name: str, victim: str, picks: int) -> None:
    """``picks``: whose turn it is in Envoy when the entry has to be sent, the survivor's or the dead one's."""
    pair = gateway[name]
    dying, survivor = _roles(gateway, await _log_holder(gateway), victim)
    await _hold(pair)
    request = await _handled_by(dying, pair, stream=True)
    assert await request.head() == 200
    before = await _ended(survivor)

    await _killed(gateway, dying)
    assert pair.prefiller.pinned == pair.pinned  # nothing was freed by that
    for _ in range(picks):
        other = await gateway["idle"].open(stream=True, max_tokens=2000, ignore_eos=True)
        await other.until(b"data: ")
    cut_at = request.cut()

    await _freed_by(survivor, pair, cut_at, before)


async def test_killed_before_the_response(gateway: SimGateway) -> None:
    pair = gateway["ascend"]
    dying, survivor = _roles(gateway, await _log_holder(gateway), "log-holder")
    await _hold(pair)
    request = await _handled_by(dying, pair, max_tokens=3)
    before = await _ended(survivor)

    await _killed(gateway, dying)
    assert pair.prefiller.pinned == pair.pinned
    cut_at = request.cut()

    await _freed_by(survivor, pair, cut_at, before)


async def _freed_by(survivor: Replica, pair: Pair, cut_at: float, before: Counter[str]) -> None:
    async with Stalls() as stalls:
        freed_s = await pair.freed(cut_at)
    assert await _ended(survivor) - before == {"requested": 1, "released": 1}
    assert len(pair.pinned) == 1
    assert pair.expired == []
    assert freed_s - stalls.seconds < 1.0
    pair.assert_alive()


async def test_killed_in_the_stream(gateway: SimGateway) -> None:
    """The tokens flow on, and nothing is released."""
    pair = gateway["nixl"]
    dying, survivor = _roles(gateway, await _log_holder(gateway), "log-holder")
    request = await _handled_by(dying, pair, stream=True, max_tokens=300, ignore_eos=True)
    await request.until(b"data: ")
    before = await _ended(survivor)
    told = (await survivor.counts("extproc_stream_outcomes_total")).get("completed", 0)

    await _killed(gateway, dying)
    assert b"[DONE]" in await request.to_end()

    async def logged() -> bool:
        return (await survivor.counts("extproc_stream_outcomes_total")).get("completed", 0) == told + 1

    await until(logged)
    assert await _ended(survivor) == before
    await pair.all_free()
    pair.assert_alive()


async def test_terminated_before_the_first_chunk(gateway: SimGateway) -> None:
    """A rolling update: the request goes on, and the other replica hears of its end."""
    pair = gateway["ascend"]
    leaving, survivor = _roles(gateway, await _log_holder(gateway), "log-holder")
    await _hold(pair)
    request = await _handled_by(leaving, pair, stream=True)
    assert await request.head() == 200
    before = await _ended(survivor)

    leaving.process.signal(signal.SIGTERM)
    assert await leaving.process.wait(10) == 0
    await _missed(gateway, leaving)
    assert pair.prefiller.pinned == pair.pinned
    cut_at = request.cut()

    await _freed_by(survivor, pair, cut_at, before)


@pytest.mark.parametrize("handled_by", ["log-holder", "other"])
async def test_one_release_for_all_replicas(gateway: SimGateway, handled_by: str) -> None:
    """Whichever replica has the exchange, the one that is told of the end releases, and it alone."""
    pair, holder = gateway["ascend"], await _log_holder(gateway)
    handling, other = _roles(gateway, holder, handled_by)
    await _hold(pair)
    request = await _handled_by(handling, pair, stream=True)
    assert await request.head() == 200
    before = {replica.name: Counter(await replica.accounts()) for replica in (handling, other)}

    await pair.freed(request.cut())

    for replica in (handling, other):
        expected = {"requested": 1, "released": 1} if replica is holder else {}
        assert await _ended(replica) - before[replica.name] == expected
