"""The release service: at most once per handoff, bounded, and every release ends in exactly one way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from extproc import configsections, sidechannel
from extproc.connectors import connector
from extproc.connectors.base import Handoff
from extproc.fleet.engines import Engine, Spec
from extproc.release import TICKET_LIFE_S, ReleaseService, SeenHandoffs, ticket_for
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.recent import Recent
from extproc.telemetry.tracing import Tracing
from extproc.ticket import VERSION, Ticket

ACK, JUNK, SILENCE = sidechannel.ACK, b"JUNK", None

Reply = Callable[[str], Awaitable[bytes | None]]


class Ways:
    """Ascend listeners: what they reply to the release of an id, and what they were asked, in order."""

    def __init__(self, reply: Reply | bytes | None = ACK) -> None:
        self.reply = reply
        self.asked: list[str] = []
        self.running = self.most_at_once = 0

    def side_channel(self, prefiller: str, host: str | None, port: int) -> str | None:
        return f"tcp://{host}:{port}"

    async def release_on_ascend(self, addresses: Sequence[str], request_id: str) -> list[bytes | None]:
        assert addresses == ["tcp://10.0.0.7:30000"]
        self.asked.append(request_id)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            reply = await self.reply(request_id) if callable(self.reply) else self.reply
        finally:
            self.running -= 1
        return [reply]

    async def flush(self, deadline: float) -> None:
        pass


class Bench:
    """A release service and what it counts."""

    def __init__(self, ways: Ways, **settings: Any) -> None:
        self.ways = ways
        self.metrics = Metrics()
        used: Any = ways
        self.service = ReleaseService(
            configsections.Release(**settings), used, self.metrics, Recent(), Tracing(configsections.Tracing())
        )

    async def settled(self) -> dict[str, int]:
        """The accounts once nothing is pending, without zeros; they must add up, here and in the metrics."""
        async with asyncio.timeout(10):
            while self.accounts.pending:
                await asyncio.sleep(0.001)
        ended = {result: count for result, count in self.accounts.ended.items() if count}
        assert sum(ended.values()) == self.accounts.requested
        labels = {"connector": "mooncake-ascend"}
        get = self.metrics.registry.get_sample_value
        for result, count in self.accounts.ended.items():
            assert (get("extproc_releases_total", {**labels, "result": result}) or 0) == count
        assert get("extproc_release_seconds_count") == self.accounts.ended["released"]
        return ended

    @property
    def accounts(self) -> Any:
        return self.service.accounts


def ticket(request_id: str = "chatcmpl-1", **changes: Any) -> Ticket:
    values: dict[str, Any] = {
        "version": VERSION,
        "connector": "mooncake-ascend",
        "prefiller": "10.0.0.7:8000",
        "request_id": request_id,
        "issued_at": time.time(),
        "lease_s": 600.0,
        "data": {"ports": {"10.0.0.7": [30000]}},
    }
    return Ticket(**(values | changes))


async def test_a_handoff_is_released_once() -> None:
    bench = Bench(Ways())
    assert bench.service.request(ticket())
    assert not bench.service.request(ticket())
    assert await bench.settled() == {"released": 1}
    assert not bench.service.request(ticket())
    assert bench.ways.asked == ["chatcmpl-1"]
    assert bench.accounts.requested == 1


async def test_the_same_id_on_another_prefiller_is_another_handoff() -> None:
    bench = Bench(Ways())
    assert bench.service.request(ticket())
    assert bench.service.request(ticket(prefiller="10.0.0.8:8000"))
    assert await bench.settled() == {"released": 2}


@pytest.mark.parametrize(("reply", "result"), [(ACK, "released"), (JUNK, "refused")])
async def test_an_answer_ends_it(reply: bytes, result: str) -> None:
    bench = Bench(Ways(reply))
    bench.service.request(ticket())
    assert await bench.settled() == {result: 1}
    assert bench.ways.asked == ["chatcmpl-1"]


async def test_silence_is_tried_again() -> None:
    replies = iter([SILENCE, SILENCE, ACK])

    async def reply(_: str) -> bytes | None:
        return next(replies)

    bench = Bench(Ways(reply))
    bench.service.request(ticket())
    assert await bench.settled() == {"released": 1}
    assert bench.ways.asked == ["chatcmpl-1"] * 3


async def test_silence_to_the_end_is_a_time_out() -> None:
    bench = Bench(Ways(SILENCE), deadline_s=0.25)
    bench.service.request(ticket())
    assert await bench.settled() == {"timed_out": 1}
    assert 2 <= len(bench.ways.asked) <= 3  # every 0.1 s


async def test_a_try_that_takes_too_long_is_given_up() -> None:
    given_up = asyncio.Event()

    async def reply(_: str) -> bytes | None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        raise AssertionError

    bench = Bench(Ways(reply), deadline_s=0.05)
    bench.service.request(ticket())
    assert await bench.settled() == {"timed_out": 1}
    assert given_up.is_set()


async def test_an_exception_is_a_refusal_and_harms_no_other() -> None:
    async def reply(request_id: str) -> bytes | None:
        if request_id == "bad":
            raise RuntimeError("an engine answered what nobody expected")
        return ACK

    bench = Bench(Ways(reply), concurrency=1)
    for request_id in ("bad", "good"):
        bench.service.request(ticket(request_id))
    assert await bench.settled() == {"refused": 1, "released": 1}


async def test_a_full_queue_drops() -> None:
    answer = asyncio.Event()

    async def reply(_: str) -> bytes | None:
        await answer.wait()
        return ACK

    bench = Bench(Ways(reply), queue=3, concurrency=1)
    assert all(bench.service.request(ticket(str(number))) for number in range(5))
    assert bench.accounts.ended["dropped"] == 2  # at once: nobody waits for a place
    answer.set()
    assert await bench.settled() == {"released": 3, "dropped": 2}
    assert bench.ways.asked == ["0", "1", "2"]
    # There is room again; what was dropped stays so, for its blocks have been waited for already.
    assert bench.service.request(ticket("5"))
    assert not bench.service.request(ticket("4"))
    assert await bench.settled() == {"released": 4, "dropped": 2}


async def test_tries_at_once_are_limited() -> None:
    async def reply(_: str) -> bytes | None:
        await asyncio.sleep(0.001)
        return ACK

    bench = Bench(Ways(reply), concurrency=4)
    for number in range(50):
        bench.service.request(ticket(str(number)))
    assert await bench.settled() == {"released": 50}
    assert bench.ways.most_at_once == 4


async def test_engines_that_do_not_answer_do_not_keep_others_waiting() -> None:
    async def reply(request_id: str) -> bytes | None:
        return ACK if request_id == "living" else SILENCE

    bench = Bench(Ways(reply), concurrency=2, deadline_s=60)
    for number in range(100):
        bench.service.request(ticket(f"dead-{number}"))
    bench.service.request(ticket("living"))
    async with asyncio.timeout(5):
        while not bench.accounts.ended["released"]:
            await asyncio.sleep(0.001)
    assert bench.accounts.pending == 100
    await bench.service.flush(time.monotonic())
    assert await bench.settled() == {"released": 1, "dropped": 100}


async def test_a_prefiller_whose_tries_hang_does_not_take_every_turn() -> None:
    async def reply(request_id: str) -> bytes | None:
        if request_id.startswith("hanging"):
            await asyncio.Event().wait()
        return ACK

    bench = Bench(Ways(reply), deadline_s=60)
    for number in range(100):
        bench.service.request(ticket(f"hanging-{number}"))
    bench.service.request(ticket("living", prefiller="10.0.0.8:8000"))
    async with asyncio.timeout(5):
        while not bench.accounts.ended["released"]:
            await asyncio.sleep(0.001)
    assert bench.ways.running == 16
    await bench.service.flush(time.monotonic())
    assert await bench.settled() == {"released": 1, "dropped": 100}


async def test_a_delayed_release_waits() -> None:
    bench = Bench(Ways())
    asked_at = time.monotonic()
    bench.service.request(ticket(), delay_s=0.1)
    await asyncio.sleep(0)
    assert bench.ways.asked == []
    assert await bench.settled() == {"released": 1}
    assert time.monotonic() - asked_at >= 0.1


async def test_a_flush_finishes_what_there_is() -> None:
    bench = Bench(Ways())
    bench.service.request(ticket("now"))
    bench.service.request(ticket("soon"), delay_s=0.05)
    await bench.service.flush(time.monotonic() + 5)
    assert await bench.settled() == {"released": 2}


async def test_a_flush_ends_by_its_deadline_and_accounts_for_the_rest() -> None:
    bench = Bench(Ways(SILENCE), concurrency=2, deadline_s=60)
    for number in range(20):
        bench.service.request(ticket(str(number)))
    started = time.monotonic()
    await bench.service.flush(started + 0.1)
    assert 0.1 <= time.monotonic() - started < 2
    assert await bench.settled() == {"dropped": 20}
    bench.service.request(ticket("late"))
    assert await bench.settled() == {"dropped": 21}


async def test_a_flush_without_time_drops_what_never_began() -> None:
    bench = Bench(Ways())
    bench.service.request(ticket())
    await bench.service.flush(time.monotonic() - 1)
    assert await bench.settled() == {"dropped": 1}
    assert bench.ways.asked == []


async def test_accounts_are_exact_whatever_happens() -> None:
    async def reply(request_id: str) -> bytes | None:
        await asyncio.sleep(0.0001 * (int(request_id) % 7))
        if request_id.endswith("3"):
            raise ValueError(request_id)
        return {"1": JUNK, "2": SILENCE}.get(request_id[-1], ACK)

    bench = Bench(Ways(reply), queue=190, concurrency=16, deadline_s=60)
    for number in range(200):
        bench.service.request(ticket(str(number)), delay_s=0.01 * (number % 3))
    async with asyncio.timeout(30):
        while bench.accounts.pending > 19:  # those that meet silence; one more was among the ten without a place
            await asyncio.sleep(0.001)
    await bench.service.flush(time.monotonic())
    assert await bench.settled() == {"released": 133, "refused": 38, "dropped": 29}


async def test_handoffs_left_to_the_timer_are_counted_apart() -> None:
    bench = Bench(Ways())
    bench.service.leave_to_timer(handoff("timer"))
    assert bench.accounts.left_to_timer == 1
    assert await bench.settled() == {}
    labels = {"connector": "timer", "result": "left_to_timer"}
    assert bench.metrics.registry.get_sample_value("extproc_releases_total", labels) == 1


# ── handoffs that are known ───────────────────────────────────────────────────────────────────────────────────────────


def test_handoffs_are_remembered_while_their_blocks_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_800_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    seen = SeenHandoffs()
    one = ticket("1", lease_s=30.0)
    assert seen.add(one)
    assert not seen.add(one)
    assert one.handoff_id in seen
    now[0] += 31
    assert seen.add(ticket("2"))
    assert one.handoff_id not in seen
    assert len(seen) == 1


def test_only_so_many_are_remembered() -> None:
    seen = SeenHandoffs(limit=10)
    tickets = [ticket(str(number)) for number in range(25)]
    assert all(seen.add(one) for one in tickets)
    assert [one.request_id for one in tickets if one.handoff_id in seen] == [str(n) for n in range(15, 25)]


# ── tickets ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def handoff(name: str = "mooncake-ascend", **changes: Any) -> Handoff:
    values = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2, 3]],
        "remote_request_id": "chatcmpl-1",
        "remote_host": "10.0.0.7",
        "remote_port": 30000,
        "remote_ptp_size": 1,
    } | changes
    spec = Spec(role="prefill", url="http://10.0.0.7:8000", name="p", connector=connector(name), lease_s=30.0)
    return Handoff(
        connector=connector(name),
        prefiller=Engine(spec),
        params=b'{"remote_block_ids":[[1,2,3]]}',
        remote_request_id="chatcmpl-1",
        values=values,
        made_at=time.monotonic() - 7,
    )


def test_a_ticket_outlives_the_lease_that_a_handoff_must_be_sent_in() -> None:
    """Heartbeats prolong a lease, and Ascend's own timer is 480 s."""
    made = ticket_for(handoff())
    assert made is not None
    assert made.handoff_id == ("10.0.0.7:8000", "chatcmpl-1")
    assert made.issued_at == pytest.approx(time.time() - 7, abs=1)
    assert made.lease_s == TICKET_LIFE_S
    assert not made.expired(time.time() + 500)


def test_so_does_one_of_an_engine_with_a_long_lease() -> None:
    one = handoff()
    one.prefiller.spec = Spec(
        role="prefill", url="http://10.0.0.7:8000", name="p", connector=one.connector, lease_s=3600
    )
    made = ticket_for(one)
    assert made is not None
    assert made.lease_s == 3600


@pytest.mark.parametrize("blocks", [{"a": 1}, 7])
def test_params_of_no_known_shape_have_no_ticket(blocks: Any) -> None:
    assert ticket_for(handoff("nixl", remote_block_ids=blocks)) is None


def test_the_timer_has_no_ticket() -> None:
    assert ticket_for(handoff("timer")) is None
