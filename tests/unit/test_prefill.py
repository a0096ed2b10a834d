"""The prefill leg: attempts that nobody waits for any more, and handoffs that are too old to be sent."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from extproc import config, configsections, prefill
from extproc.connectors import connector
from extproc.connectors.base import Handoff
from extproc.enginehttp import EngineClient
from extproc.fleet.engines import Spec
from extproc.fleet.fleet import Fleet, policies
from extproc.jsonobject import JsonObject
from extproc.prefill import Prefilled, Prefiller, PrefillFailed, PrefillRefused, PrefillRequest
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.tracing import Tracing
from tests.support.engines import ID_SUFFIX, Answer, CloseConnection, RecordedRequest, StubEngine, answer_prefill

NEARLY_DONE_S = 0.3


class Bench:
    """A prefiller with its engines; ``orphans`` are handoffs that nobody waited for."""

    def __init__(self, client: EngineClient, engines: Sequence[StubEngine], specs: dict[str, Any], **settings: Any):
        self.engines = engines
        self.metrics = Metrics()
        self.orphans: list[Handoff] = []
        self.orphans_requests: list[str] = []
        release = {"max_finishing": settings.pop("max_finishing", 256)}
        whole = config.Config(
            fleet={"decode": [{"url": "http://10.0.0.8:8000"}]},  # type: ignore[arg-type]
            prefill={"timeout_s": 30, **settings},  # type: ignore[arg-type]
            release=release,  # type: ignore[arg-type]
            routing={"prefill_policy": "round_robin"},  # type: ignore[arg-type]
        )
        self.fleet = Fleet(whole.fleet, policies(whole))
        values = {"connector": connector("nixl"), "lease_s": 30.0} | specs
        self.fleet.update("test", [Spec(role="prefill", url=e.url, name=e.url, **values) for e in engines])
        tracing = Tracing(configsections.Tracing())
        self.prefiller = Prefiller(whole, self.fleet, client, self.metrics, self._take_orphan, tracing)

    def _take_orphan(self, handoff: Handoff, request_id: str) -> None:
        self.orphans.append(handoff)
        self.orphans_requests.append(request_id)

    def start(self, request_id: str = "") -> asyncio.Task[Prefilled]:
        body = JsonObject(b'{"model":"m","prompt":"hi"}')
        request = PrefillRequest("/v1/completions", [], body, request_id or str(uuid.uuid4()))
        return asyncio.create_task(self.prefiller.run(request))

    async def leave(self, running: asyncio.Task[Prefilled]) -> None:
        """The client hangs up."""
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    async def settled(self) -> None:
        """Nothing is left of any attempt."""
        async with asyncio.timeout(10):
            while self.prefiller._abandoned or self.load:
                await asyncio.sleep(0.001)
        assert self.prefiller._finishing == 0

    @property
    def load(self) -> int:
        return sum(engine.inflight for engine in self.fleet.engines("prefill"))

    @property
    def orphan_ids(self) -> list[str]:
        return [orphan.remote_request_id for orphan in self.orphans]

    def count(self, name: str, **labels: str) -> int:
        return int(self.metrics.registry.get_sample_value(name, labels) or 0)


Make = Callable[..., Bench]


@pytest.fixture
async def engines() -> AsyncIterator[list[StubEngine]]:
    async with StubEngine("prefill") as one, StubEngine("prefill") as other:
        yield [one, other]


@pytest.fixture
async def make(engines: list[StubEngine], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Builds a Bench on so many of the engines, with settings of the prefill section and ``specs`` of the engines."""
    monkeypatch.setattr(prefill, "_NEARLY_DONE_S", (NEARLY_DONE_S, NEARLY_DONE_S))
    async with EngineClient(connect_timeout_s=5, max_connections=100, keepalive_s=2) as client:

        def build(count: int = 1, specs: dict[str, Any] | None = None, **settings: Any) -> Bench:
            return Bench(client, engines[:count], specs or {}, **settings)

        yield build


class Gate:
    """Holds answers back until it is opened."""

    def __init__(self, engine: StubEngine) -> None:
        self.opened = asyncio.Event()
        engine.respond = self._respond

    async def _respond(self, request: RecordedRequest) -> Answer:
        await self.opened.wait()
        return answer_prefill(request)


def _pinned(request: RecordedRequest) -> str:
    """The id that the engine pins the blocks of this request under."""
    return f"chatcmpl-{request.header('x-request-id')}-{ID_SUFFIX}"


# ── clients that leave ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_B34_a_client_that_leaves_before_the_call_is_written_costs_no_prefill(
    make: Make, engines: list[StubEngine]
) -> None:
    for way in ("disconnect", "finish"):
        bench = make(cancel=way)
        running = bench.start()
        await asyncio.sleep(0)  # it has begun, and has no connection yet
        await bench.leave(running)
        await bench.settled()
        assert bench.orphans == []
    assert engines[0].requests == []


@pytest.mark.parametrize("way", ["disconnect", "finish"])
async def test_B34_leaving_in_the_tick_of_the_answer_makes_one_orphan(
    make: Make, engines: list[StubEngine], way: str
) -> None:
    bench = make(cancel=way)
    running = bench.start()
    request = await engines[0].request()
    (attempt,) = [task for task in asyncio.all_tasks() if task.get_name() == "prefill"]
    attempt.add_done_callback(lambda _: running.cancel())
    with pytest.raises(asyncio.CancelledError):
        await running
    await bench.settled()
    assert bench.orphan_ids == [_pinned(request)]
    assert bench.count("extproc_prefill_attempts_total", result="cancelled") == 1


async def test_an_answer_that_is_near_is_waited_for(make: Make, engines: list[StubEngine]) -> None:
    """Closed just then, the call would leave blocks pinned under an id that nobody knows."""
    bench = make()
    gate = Gate(engines[0])
    running = bench.start()
    request = await engines[0].request()
    await bench.leave(running)
    gate.opened.set()
    await bench.settled()
    assert bench.orphan_ids == [_pinned(request)]
    assert engines[0].disconnects == 0


async def test_one_that_is_not_near_is_closed(make: Make, engines: list[StubEngine]) -> None:
    bench = make()
    engines[0].hang = True
    running = bench.start()
    await engines[0].request()
    left_at = time.monotonic()
    await bench.leave(running)
    assert bench.load == 1  # the engine is at work until it has noticed
    await engines[0].wait_for_disconnects(1)
    assert time.monotonic() - left_at >= NEARLY_DONE_S
    assert len(engines[0].probes) == 1  # it is at work, with others too
    await bench.settled()
    assert bench.orphans == []


async def test_how_near_is_near_goes_by_what_the_engines_answers_take(
    make: Make, engines: list[StubEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_NEARLY_DONE_S", (0.5, 2.0))
    bench = make(2)
    slow, quick = bench.fleet.engines("prefill")
    for _ in range(30):
        bench.prefiller._learn(quick, 0.05)
    bench.prefiller._learn(slow, 0.4)
    assert bench.prefiller._nearly_done_s(quick) == 0.5
    assert bench.prefiller._nearly_done_s(slow) == pytest.approx(1.2)
    for _ in range(30):
        bench.prefiller._learn(slow, 5.0)
    assert bench.prefiller._nearly_done_s(slow) == 2.0
    for _ in range(60):
        bench.prefiller._learn(slow, 0.05)
    assert bench.prefiller._nearly_done_s(slow) == 0.5


async def test_B34_an_engine_that_is_behind_with_its_sockets_is_waited_for(
    make: Make, engines: list[StubEngine]
) -> None:
    """It has neither answered nor could it notice that we leave. Then it gets to both."""
    bench = make()
    (engine, _), gate = engines, Gate(engines[0])
    engine.probes_pass.clear()
    running = bench.start()
    request = await engine.request()
    await bench.leave(running)
    await engine.wait_until(lambda: bool(engine.probes))
    assert engine.probes[0].target == "/health"
    await asyncio.sleep(0.1)
    assert engine.disconnects == 0
    engine.probes_pass.set()
    await engine.wait_until(lambda: engine.answered == 1)
    gate.opened.set()
    await bench.settled()
    assert bench.orphan_ids == [_pinned(request)]


async def test_an_answer_that_is_coming_in_is_read_to_its_end(make: Make, engines: list[StubEngine]) -> None:
    bench = make()
    gate = asyncio.Event()

    async def half_way(number: int) -> None:
        if number:
            await gate.wait()

    def respond(request: RecordedRequest) -> Answer:
        text = answer_prefill(request).body
        headers = [("content-type", "application/json")]
        return Answer(headers=headers, events=[text[:20], text[20:]], between_events=half_way)

    engines[0].respond = respond
    running = bench.start()
    request = await engines[0].request()
    await asyncio.sleep(0.05)  # its head is here; nothing outside tells
    await bench.leave(running)
    await asyncio.sleep(NEARLY_DONE_S * 1.5)
    assert bench.orphans == []
    gate.set()
    await bench.settled()
    assert bench.orphan_ids == [_pinned(request)]


async def test_finish_waits_for_as_long_as_it_takes(make: Make, engines: list[StubEngine]) -> None:
    bench = make(specs={"connector": connector("mooncake-ascend")})
    gate = Gate(engines[0])
    running = bench.start()
    request = await engines[0].request()
    await bench.leave(running)
    await asyncio.sleep(NEARLY_DONE_S * 1.5)
    assert bench.load == 1
    gate.opened.set()
    await bench.settled()
    assert bench.orphan_ids == [_pinned(request)]
    assert engines[0].disconnects == 0


async def test_but_not_longer_than_twice_an_attempts_time(make: Make, engines: list[StubEngine]) -> None:
    bench = make(cancel="finish", timeout_s=0.2)
    engines[0].hang = True
    running = bench.start()
    await engines[0].request()
    await bench.leave(running)
    await engines[0].wait_for_disconnects(1)
    await bench.settled()
    assert bench.orphans == []


@pytest.mark.parametrize("way", ["disconnect", "finish"])
async def test_only_so_many_are_waited_for(make: Make, engines: list[StubEngine], way: str) -> None:
    bench = make(cancel=way, max_finishing=2)
    gate = Gate(engines[0])
    running = [bench.start() for _ in range(5)]
    await engines[0].wait_for(5)
    for task in running:
        await bench.leave(task)
    await engines[0].wait_for_disconnects(3)
    gate.opened.set()
    await bench.settled()
    assert len(bench.orphans) == 2
    assert len(set(bench.orphan_ids)) == 2


@pytest.mark.parametrize("kind", ["refused", "broken", "closed"])
async def test_an_abandoned_attempt_may_end_in_any_way(make: Make, engines: list[StubEngine], kind: str) -> None:
    bench = make()
    gate = asyncio.Event()

    async def respond(request: RecordedRequest) -> Answer:
        await gate.wait()
        if kind == "closed":
            raise CloseConnection
        return Answer(400 if kind == "refused" else 500)

    engines[0].respond = respond
    running = bench.start()
    await engines[0].request()
    await bench.leave(running)
    gate.set()
    await bench.settled()
    assert bench.orphans == []


# ── attempts that take too long ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_late_answer_is_an_orphan_beside_the_other_engines_handoff(
    make: Make, engines: list[StubEngine]
) -> None:
    bench = make(2, timeout_s=2, cancel="finish")
    gates = [Gate(engine) for engine in engines]
    running = bench.start("the request's")
    async with asyncio.timeout(10):
        while not all(engine.requests for engine in engines):
            await asyncio.sleep(0.005)
    for gate in gates:
        gate.opened.set()
    prefilled = await running
    await bench.settled()
    assert bench.orphans_requests == ["the request's"]
    assert list(prefilled.failed_attempts) == ["timeout"]
    assert len(bench.orphans) == 1
    pinned = {_pinned(engine.requests[0]) for engine in engines}
    assert {prefilled.handoff.remote_request_id, *bench.orphan_ids} == pinned


# ── handoffs that are too old ─────────────────────────────────────────────────────────────────────────────────────────


def _slow_body(request: RecordedRequest) -> Answer:
    """The lease counts from the answer's head; by its end it is over."""
    text = answer_prefill(request).body

    async def between(number: int) -> None:
        await asyncio.sleep(0.5 if number else 0)

    headers = [("content-type", "application/json")]
    return Answer(headers=headers, events=[text[:20], text[20:]], between_events=between)


async def test_D12_an_expired_handoff_is_prefilled_again_and_never_sent(make: Make, engines: list[StubEngine]) -> None:
    """By the same engine, where there is no other: it is not to blame."""
    bench = make(specs={"lease_s": 0.4})
    answers = iter([_slow_body, answer_prefill])
    engines[0].respond = lambda request: next(answers)(request)
    prefilled = await bench.start()
    first, second = engines[0].requests
    assert prefilled.handoff.remote_request_id == _pinned(second)
    assert first.header("x-request-id") != second.header("x-request-id")
    assert list(prefilled.failed_attempts) == ["expired"]
    assert bench.count("extproc_handoffs_expired_total") == 1
    assert bench.orphans == []  # the engine has freed it by itself


async def test_D12_handoffs_that_always_expire_are_a_failure(make: Make, engines: list[StubEngine]) -> None:
    bench = make(specs={"lease_s": 0.2}, attempts=2)
    engines[0].respond = _slow_body
    with pytest.raises(PrefillFailed) as failure:
        await bench.start()
    assert failure.value.reasons == ["expired", "expired"]
    assert bench.count("extproc_handoffs_expired_total") == 2


async def test_a_refusal_is_the_clients_and_no_engines_fault(make: Make, engines: list[StubEngine]) -> None:
    bench = make(2)
    for engine in engines:
        engine.respond = lambda _: Answer(422, body=b"{}")
    with pytest.raises(PrefillRefused) as refusal:
        await bench.start()
    assert refusal.value.answer.status == 422
    assert sum(len(engine.requests) for engine in engines) == 1
    await bench.settled()


# ── the end of the process ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_flush_waits_for_what_finishes_in_time(make: Make, engines: list[StubEngine]) -> None:
    bench = make(cancel="finish")
    gate = Gate(engines[0])
    running = bench.start()
    request = await engines[0].request()
    await bench.leave(running)
    asyncio.get_running_loop().call_later(0.05, gate.opened.set)
    await bench.prefiller.flush(time.monotonic() + 10)
    assert bench.orphan_ids == [_pinned(request)]


async def test_and_closes_the_rest(make: Make, engines: list[StubEngine]) -> None:
    bench = make(cancel="finish")
    engines[0].hang = True
    running = bench.start()
    await engines[0].request()
    await bench.leave(running)
    started = time.monotonic()
    await bench.prefiller.flush(started + 0.1)
    assert 0.1 <= time.monotonic() - started < 5
    await engines[0].wait_for_disconnects(1)
    await bench.settled()
    assert bench.orphans == []
