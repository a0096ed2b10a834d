from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from extproc import configsections
from extproc.admission import Admission
from extproc.errors import RequestError
from extproc.fleet.engines import Engine, Reservation
from extproc.fleet.fleet import Fleet
from extproc.picking import Need
from extproc.telemetry.metrics import Metrics
from tests.support.fleet import Clock, fleet_of, named, spec, specs

NEED = Need(model="m", tokens=10)


class Queue:
    """A fleet of capped prefillers with the queue before it; requests by number."""

    def __init__(self, fleet: Fleet, **settings: Any) -> None:
        self.fleet = fleet
        self.metrics = Metrics()
        self.admission = Admission(configsections.Admission(**settings), fleet, self.metrics)
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[Reservation | None]] = {}

    async def arrive(self, name: str, client: bytes = b"", need: Need = NEED, **options: Any) -> None:
        """A request comes, and is served or waits."""

        async def request() -> Reservation | None:
            reservation = await self.admission.reserve(need, client=client, **options)
            self.served.append(name)
            return reservation

        self.tasks[name] = asyncio.create_task(request())
        await settle()

    async def outcome(self, name: str) -> Reservation | RequestError | None:
        try:
            return await asyncio.wait_for(self.tasks[name], 5)
        except RequestError as error:
            return error

    async def finish(self, name: str) -> None:
        """The request's prefill is done."""
        reservation = await self.tasks[name]
        assert reservation is not None
        reservation.release()
        await settle()

    @property
    def depth(self) -> int:
        return int(self.metrics.registry.get_sample_value("extproc_queue_depth") or 0)

    def rejected(self, reason: str) -> int:
        labels = {"reason": reason}
        return int(self.metrics.registry.get_sample_value("extproc_queue_rejections_total", labels) or 0)

    def nothing_left(self) -> bool:
        loads = [(engine.inflight, engine.reserved_tokens) for engine in self.fleet.engines()]
        return self.depth == 0 and not self.admission._waiting and set(loads) <= {(0, 0)}


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def queue_of(engines: int = 1, cap: int = 1, **settings: Any) -> Queue:
    return Queue(fleet_of(*specs("prefill", engines, max_inflight=cap)), **settings)


async def test_no_queue_while_there_is_room() -> None:
    queue = queue_of(engines=2, cap=2)
    for number in range(4):
        await queue.arrive(str(number))
    assert queue.served == ["0", "1", "2", "3"]
    assert [engine.inflight for engine in queue.fleet.engines()] == [2, 2]
    assert queue.metrics.registry.get_sample_value("extproc_queue_seconds_count") == 0
    for number in range(4):
        await queue.finish(str(number))
    assert queue.nothing_left()


async def test_a_release_wakes_the_next_in_line_and_one_only() -> None:
    queue = queue_of()
    for number in range(4):
        await queue.arrive(str(number))
    assert (queue.served, queue.depth) == (["0"], 3)
    await queue.finish("0")
    assert (queue.served, queue.depth) == (["0", "1"], 2)
    await queue.finish("1")
    await queue.finish("2")
    assert (queue.served, queue.depth) == (["0", "1", "2", "3"], 0)
    await queue.finish("3")
    assert queue.nothing_left()
    assert queue.metrics.registry.get_sample_value("extproc_queue_seconds_count") == 3


async def test_clients_take_turns() -> None:
    queue = queue_of()
    await queue.arrive("running")
    for number in range(4):
        await queue.arrive(f"a{number}", b"a")
    await queue.arrive("b0", b"b")
    await queue.arrive("c0", b"c")
    await queue.arrive("b1", b"b")
    while queue.depth:
        await queue.finish(queue.served[-1])
    assert queue.served == ["running", "a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    await queue.finish("a3")
    assert queue.nothing_left()


async def test_a_full_queue_turns_requests_away() -> None:
    queue = queue_of(queue=2)
    for number in range(3):
        await queue.arrive(str(number))
    await queue.arrive("late")
    error = await queue.outcome("late")
    assert isinstance(error, RequestError)
    assert (error.status, error.code, error.type) == (429, "queue_full", "rate_limit_error")
    assert error.headers == {"retry-after": "1"}
    assert (queue.rejected("full"), queue.depth) == (1, 2)


async def test_no_queue_at_all() -> None:
    queue = queue_of(queue=0)
    await queue.arrive("0")
    await queue.arrive("1")
    error = await queue.outcome("1")
    assert isinstance(error, RequestError)
    assert error.status == 429
    await queue.finish("0")
    await queue.arrive("2")
    assert queue.served == ["0", "2"]


async def test_one_client_cannot_keep_the_others_out_of_the_queue() -> None:
    queue = queue_of(queue=4)
    await queue.arrive("running")
    for number in range(4):
        await queue.arrive(f"greedy{number}", b"greedy")
    await queue.arrive("modest", b"modest")
    error = await queue.outcome("greedy3")  # the last in the longest line gives way
    assert isinstance(error, RequestError)
    assert (error.status, queue.depth, queue.rejected("full")) == (429, 4, 1)
    await queue.arrive("modest2", b"modest")  # 3 : 1 -> 2 : 2
    assert isinstance(await queue.outcome("greedy2"), RequestError)
    await queue.arrive("modest3", b"modest")
    assert isinstance(await queue.outcome("modest3"), RequestError)  # its share is used up
    for name in ("running", "greedy0", "modest", "greedy1", "modest2"):
        await queue.finish(name)
    assert queue.served == ["running", "greedy0", "modest", "greedy1", "modest2"]
    assert queue.nothing_left()


async def test_waiting_ends_with_the_deadline() -> None:
    queue = queue_of(max_wait_s=0.05)
    await queue.arrive("0")
    await queue.arrive("1")
    error = await queue.outcome("1")
    assert isinstance(error, RequestError)
    assert (error.status, error.code, error.headers) == (503, "queue_timeout", {"retry-after": "1"})
    assert (queue.rejected("timeout"), queue.depth) == (1, 0)
    await queue.finish("0")
    assert queue.nothing_left()


async def test_a_request_with_less_patience_gives_up_earlier() -> None:
    queue = queue_of(max_wait_s=3600)
    await queue.arrive("0")
    for name, patience_s in (("1", 0.01), ("2", 0.0), ("3", -1.0)):
        await queue.arrive(name, patience_s=patience_s)
        error = await queue.outcome(name)
        assert isinstance(error, RequestError)
        assert error.status == 503
    assert queue.depth == 0


async def test_a_request_whose_turn_would_come_too_late_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, "extproc.admission")
    queue = queue_of(max_wait_s=2.5)
    for number in range(9):
        await queue.arrive(str(number))
    for number in range(8):  # one place a second
        clock.advance(1.0)
        await queue.finish(str(number))
    await queue.arrive("9", b"a")
    await queue.arrive("10", b"a")
    assert queue.admission._interval_s == pytest.approx(1 - 0.8**7)  # 0.79
    await queue.arrive("b0", b"b")
    await queue.arrive("b1", b"b")
    # Two of each client would be before this one: 3.2 s.
    await queue.arrive("b2", b"b")
    error = await queue.outcome("b2")
    assert isinstance(error, RequestError)
    assert (error.status, error.headers) == (429, {"retry-after": "4"})
    await queue.arrive("c0", b"c")  # and one of each before this one: 1.6 s
    assert queue.depth == 5


async def test_cancelled_while_waiting_leaves_nothing() -> None:
    queue = queue_of()
    for name in ("0", "1", "2"):
        await queue.arrive(name)
    queue.tasks["1"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await queue.tasks["1"]
    assert queue.depth == 1
    await queue.finish("0")
    assert queue.served == ["0", "2"]
    await queue.finish("2")
    assert queue.nothing_left()


async def test_cancelled_in_the_same_moment_as_served_gives_the_place_on() -> None:
    queue = queue_of()
    for name in ("0", "1", "2"):
        await queue.arrive(name)
    reservation = await queue.tasks["0"]
    assert reservation is not None
    reservation.release()  # grants to "1", whose task has not run yet
    queue.tasks["1"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await queue.tasks["1"]
    await settle()
    assert queue.served == ["0", "2"]
    await queue.finish("2")
    assert queue.nothing_left()


async def test_cancelled_in_the_same_moment_as_turned_away() -> None:
    queue = queue_of(queue=2)
    await queue.arrive("0")
    await queue.arrive("a1", b"a")
    await queue.arrive("a2", b"a")
    newcomer = asyncio.create_task(queue.admission.reserve(NEED, client=b"b"))
    await asyncio.sleep(0)
    queue.tasks["a2"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await queue.tasks["a2"]
    await queue.finish("0")
    await queue.finish("a1")
    reservation = await newcomer
    assert reservation is not None
    reservation.release()
    assert queue.nothing_left()


async def test_served_in_the_same_moment_as_timed_out_is_served() -> None:
    queue = queue_of(max_wait_s=0.02)
    await queue.arrive("0")
    held = await queue.tasks["0"]
    assert held is not None
    for attempt in range(20):
        name = f"late{attempt}"
        await queue.arrive(name)
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, held.release)  # due in the same turn of the loop, or one before, or one after
        outcome = await queue.outcome(name)
        if isinstance(outcome, RequestError):
            assert outcome.status == 503
            await asyncio.sleep(0.005)
            outcome = await queue.admission.reserve(NEED)
        assert outcome is not None
        held = outcome
        assert (queue.depth, named(queue.fleet, "prefill-1").inflight) == (0, 1)
    held.release()
    assert queue.nothing_left()


async def test_a_new_engine_wakes_those_who_wait() -> None:
    queue = queue_of()
    for name in ("0", "1", "2"):
        await queue.arrive(name)
    queue.fleet.update("file", [spec("prefill", 7, max_inflight=1)])
    await settle()
    assert queue.served == ["0", "1"]
    served = await queue.tasks["1"]
    assert served is not None
    assert served.engine.name == "prefill-7"


def _undrain(fleet: Fleet, engine: Engine) -> None:
    fleet.drain(engine.name, False)


def _healthy_again(fleet: Fleet, engine: Engine) -> None:
    engine.health.probed("", 1)
    fleet.changed()


def _resolved(fleet: Fleet, engine: Engine) -> None:
    engine.address = "10.0.0.9"
    fleet.changed()


def _raised_cap(fleet: Fleet, engine: Engine) -> None:
    fleet.update("test", [*specs("prefill", 1, max_inflight=2), engine.spec])


@pytest.mark.parametrize("change", [_undrain, _healthy_again, _resolved, _raised_cap])
async def test_every_way_to_get_a_place_wakes_those_who_wait(change: Callable[[Fleet, Engine], None]) -> None:
    url = "http://named:8000" if change is _resolved else "http://10.0.1.2:8000"
    fleet = fleet_of(spec("prefill", 1, max_inflight=1), spec("prefill", 2, url=url))
    queue = Queue(fleet)
    engine = named(fleet, "prefill-2")
    if change is not _resolved:
        fleet.drain("prefill-2", True)
    if change is _healthy_again:
        engine.health.probed("ConnectError", 1)
        fleet.drain("prefill-2", False)
    await queue.arrive("0")
    await queue.arrive("1")
    assert queue.served == ["0"]
    change(fleet, engine)
    await settle()
    assert queue.served == ["0", "1"]


async def test_no_engine_that_could_ever_serve_is_told_at_once() -> None:
    queue = Queue(fleet_of(spec("prefill", 1, max_inflight=1, models=frozenset({"m"}))))
    await queue.arrive("0")
    tried = named(queue.fleet, "prefill-1")
    for name, options in {
        "model": {"need": Need(model="other")},
        "pairing": {"pairing": ("other", "nixl")},
        "tried": {"exclude": (tried,)},
    }.items():
        await queue.arrive(name, **options)
        assert await queue.outcome(name) is None
    assert queue.depth == 0


async def test_those_who_wait_for_an_engine_that_leaves_are_told_at_once() -> None:
    """Their requests can still be answered in another way."""
    queue = Queue(fleet_of(spec("prefill", 1, max_inflight=1), spec("prefill", 2, group="b", max_inflight=1)))
    for name in ("a0", "a1"):
        await queue.arrive(name, pairing=("", "nixl"))
    for name in ("b0", "b1"):
        await queue.arrive(name, pairing=("b", "nixl"))
    queue.fleet.update("test", [spec("prefill", 2, group="b", max_inflight=1)])
    assert await queue.outcome("a1") is None
    assert queue.depth == 1
    await queue.finish("b0")
    await queue.finish("b1")
    await queue.finish("a0")
    assert queue.nothing_left()


async def test_who_waits_for_a_full_engine_does_not_hold_up_requests_for_another() -> None:
    queue = Queue(
        fleet_of(
            spec("prefill", 1, max_inflight=1, models=frozenset({"busy"})),
            spec("prefill", 2, max_inflight=1, models=frozenset({"idle"})),
        )
    )
    for name in ("0", "1", "2"):
        await queue.arrive(name, need=Need(model="busy"))
    await queue.arrive("other", need=Need(model="idle"))
    assert (queue.served, queue.depth) == (["0", "other"], 2)
    await queue.arrive("next", need=Need(model="idle"))
    await queue.finish("other")  # behind two of the same client that wait for the other engine
    assert (queue.served, queue.depth) == (["0", "other", "next"], 2)


async def test_a_second_attempt_waits_for_the_engines_that_it_has_not_tried() -> None:
    queue = queue_of(engines=2, cap=1)
    await queue.arrive("0")
    await queue.arrive("1")
    first = named(queue.fleet, "prefill-1")
    await queue.arrive("again", exclude=(first,))
    (on_first,) = [name for name in ("0", "1") if queue.tasks[name].result().engine is first]  # type: ignore[union-attr]
    await queue.finish(on_first)
    assert queue.depth == 1
    await queue.finish("1" if on_first == "0" else "0")
    outcome = await queue.outcome("again")
    assert isinstance(outcome, Reservation)
    assert outcome.engine is named(queue.fleet, "prefill-2")


async def test_a_thousand_requests_of_ten_clients_are_all_served_and_leave_nothing() -> None:
    queue = queue_of(engines=4, cap=3, queue=2000)
    running = most = 0

    async def request(number: int) -> None:
        nonlocal running, most
        reservation = await queue.admission.reserve(NEED, client=str(number % 10).encode())
        assert reservation is not None
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(0)
        finally:
            running -= 1
            reservation.release()

    tasks: list[Awaitable[None]] = [asyncio.create_task(request(number)) for number in range(1000)]
    results = await asyncio.gather(*tasks)
    assert len(results) == 1000
    assert most == 12
    assert queue.nothing_left()
