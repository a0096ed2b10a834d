"""How releases reach engines: decoders over HTTP, ranks over ZMQ, and nobody outside the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import structlog.testing

from extproc import config, configsections
from extproc.connectors import connector
from extproc.connectors.base import ReleaseResult
from extproc.enginehttp import EngineClient
from extproc.fleet.engines import Engine, Spec
from extproc.fleet.fleet import Fleet, policies
from extproc.release import ReleaseService
from extproc.releaseways import ReleaseWays
from extproc.sidechannel import SideChannels
from extproc.sim.config import SimConfig
from extproc.sim.server import SimEngine
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.recent import Recent
from extproc.telemetry.tracing import Tracing
from extproc.ticket import VERSION, Ticket
from tests.support.engines import Answer, StubEngine

NOT_FOUND = Answer.json({"error": {"message": "no such model", "code": 404}}, status=404)
P, PATH, BODY = "10.0.0.7:8000", "/v1/completions", b'{"model":"extproc-release"}'


def spec(role: Any, url: str, **changes: Any) -> Spec:
    return Spec(**({"role": role, "url": url, "name": url, "connector": connector("nixl")} | changes))


class Bench:
    """Ways to a fleet of a prefiller at P and the given decoders."""

    def __init__(self, client: EngineClient, specs: Sequence[Spec], **settings: Any) -> None:
        self.channels = SideChannels()
        values = {"decode": [{"url": "http://10.0.0.8:8000"}]}
        whole = config.Config(fleet=values)  # type: ignore[arg-type]
        self.fleet = Fleet(whole.fleet, policies(whole))
        self.fleet.update("test", specs)
        self.settings = configsections.Release(**settings)
        self.ways = ReleaseWays(self.settings, self.fleet, client, self.channels)

    def engine(self, url: str) -> Engine:
        return next(engine for engine in self.fleet.engines() if engine.url == url)

    async def ask(self, count: int = 1) -> list[tuple[int, float]]:
        """The first answers' status, and when each came."""
        started = time.monotonic()
        answers = []
        async with contextlib.aclosing(self.ways.ask_decoders(P, PATH, BODY)) as coming:
            async for answer in coming:
                answers.append((answer.status, time.monotonic() - started))
                if len(answers) == count:
                    break
        return answers


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(connect_timeout_s=1, max_connections=100, keepalive_s=2) as client:
        yield client


@pytest.fixture
async def decoders() -> AsyncIterator[list[StubEngine]]:
    async with StubEngine("decode") as one, StubEngine("decode") as other:
        for engine in (one, other):
            engine.respond = lambda _: NOT_FOUND
        yield [one, other]


Make = Callable[..., Bench]


@pytest.fixture
async def make(client: EngineClient) -> AsyncIterator[Make]:
    """Builds a Bench from specs and release settings."""
    made: list[Bench] = []

    def build(specs: Sequence[Spec], **settings: Any) -> Bench:
        made.append(Bench(client, specs, **settings))
        return made[-1]

    yield build
    for bench in made:
        await bench.channels.aclose()


PREFILLER = spec("prefill", f"http://{P}")


# ── decoders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_decoder_is_enough(make: Make, decoders: list[StubEngine]) -> None:
    bench = make([PREFILLER, *(spec("decode", engine.url) for engine in decoders)])
    ((status, _),) = await bench.ask()
    assert status == 404
    (request,) = [request for engine in decoders for request in engine.requests]
    assert (request.method, request.target, request.body) == ("POST", PATH, BODY)
    assert request.header("content-type") == "application/json"
    assert request.header("authorization") is None


async def test_the_release_carries_the_engines_configured_key(make: Make) -> None:
    async with StubEngine("decode") as engine:
        engine.respond = lambda _: NOT_FOUND
        bench = make([PREFILLER, spec("decode", engine.url, api_key="of-the-fleet")])
        await bench.ask()
        assert engine.requests[0].header("authorization") == "Bearer of-the-fleet"


async def test_one_that_hangs_is_not_waited_for(make: Make, decoders: list[StubEngine]) -> None:
    decoders[0].hang = True
    bench = make([PREFILLER, *(spec("decode", engine.url) for engine in decoders)], timeout_s=30)
    for _ in range(6):  # they come in any order
        ((status, after_s),) = await bench.ask()
        assert status == 404
        assert after_s < 5
    await decoders[0].wait_for_disconnects(len(decoders[0].requests))  # the call is given up with the answer


async def test_one_that_failed_lately_comes_last(make: Make, decoders: list[StubEngine]) -> None:
    await decoders[0].refuse()
    bench = make([PREFILLER, *(spec("decode", engine.url) for engine in decoders)])
    while not bench.ways._backoff.closed(decoders[0].url):
        await bench.ask()
    before = decoders[0].connections
    for _ in range(3):
        await bench.ask()
    assert decoders[0].connections == before


async def test_all_are_asked_until_one_gives_what_is_wanted(make: Make, decoders: list[StubEngine]) -> None:
    decoders[0].respond = lambda _: Answer(500)
    bench = make([PREFILLER, *(spec("decode", engine.url) for engine in decoders)])
    assert sorted(status for status, _ in await bench.ask(2)) == [404, 500]


async def test_none_that_answers(make: Make, decoders: list[StubEngine]) -> None:
    for engine in decoders:
        await engine.refuse()
    bench = make([PREFILLER, *(spec("decode", engine.url) for engine in decoders)])
    assert await bench.ask() == []


async def test_only_decoders_that_the_prefiller_hands_over_to(make: Make, decoders: list[StubEngine]) -> None:
    """A decoder of another group cannot reach it, and one with another connector could die of the params."""
    stranger, relative = decoders
    async with StubEngine("decode") as other:
        bench = make(
            [
                spec("prefill", f"http://{P}", group="a"),
                spec("decode", stranger.url, group="b"),
                spec("decode", other.url, group="a", connector=connector("mooncake-ascend")),
                spec("decode", relative.url, group="a"),
                spec("decode", "http://no-such-name.invalid:8000", group="a"),  # without an address yet
            ],
        )
        for _ in range(5):
            await bench.ask()
        assert (len(stranger.requests), len(other.requests), len(relative.requests)) == (0, 0, 5)


async def test_a_draining_or_ejected_decoder_can_say_no(make: Make, decoders: list[StubEngine]) -> None:
    draining, _ = decoders
    bench = make([PREFILLER, spec("decode", draining.url, drain=True, max_inflight=1)])
    engine = bench.engine(draining.url)
    engine.health.probed_ok = False
    engine.health.ejected_until = time.monotonic() + 60
    bench.fleet.reserve_engine(engine)
    assert [status for status, _ in await bench.ask()] == [404]


async def test_a_prefiller_that_has_just_left_is_still_released_from(make: Make, decoders: list[StubEngine]) -> None:
    listed = [spec("decode", engine.url) for engine in decoders]
    bench = make([PREFILLER, *listed])
    bench.fleet.update("test", listed)
    assert [status for status, _ in await bench.ask()] == [404]


async def test_nobody_is_asked_for_a_prefiller_that_is_not_of_the_fleet(make: Make, decoders: list[StubEngine]) -> None:
    bench = make([spec("decode", engine.url) for engine in decoders])
    assert await bench.ask() == []
    assert [len(engine.requests) for engine in decoders] == [0, 0]


# ── side channels ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_hosts_of_a_prefiller(make: Make) -> None:
    bench = make([spec("prefill", f"http://{P}", side_channel_hosts=("10.0.1.7", "node-b"))])
    assert bench.ways.side_channel(P, None, 5700) == "tcp://10.0.0.7:5700"
    for host in ("10.0.0.7", "10.0.1.7", "node-b"):
        assert bench.ways.side_channel(P, host, 30000) == f"tcp://{host}:30000"
    assert bench.ways.side_channel("10.0.0.9:8000", "10.0.0.7", 30000) is None


@pytest.mark.parametrize("host", ["10.0.0.8", "169.254.169.254", "localhost", "127.0.0.1", "", "10.0.0.7:1", "*"])
async def test_no_other_host_is_contacted(make: Make, host: str) -> None:
    bench = make([PREFILLER, spec("decode", "http://10.0.0.8:8000")])
    with structlog.testing.capture_logs() as logs:
        assert [bench.ways.side_channel(P, host, 30000) for _ in range(3)] == [None] * 3
    assert [(entry["log_level"], entry["host"]) for entry in logs] == [("warning", host)]  # once


async def test_ipv6(make: Make) -> None:
    bench = make([spec("prefill", "http://[2001:db8::7]:8000")])
    assert bench.ways.side_channel("[2001:db8::7]:8000", "2001:DB8:0::7", 30000) == "tcp://[2001:db8::7]:30000"


class Ascend:
    """A simulated prefiller with one handoff pinned, and ways to release it."""

    def __init__(self, engine: SimEngine, client: EngineClient, **settings: Any) -> None:
        self.engine = engine
        listed = [spec("prefill", engine.url, connector=connector("mooncake-ascend"))]
        self.bench = Bench(client, listed, **({"timeout_s": 5} | settings))
        self.ports = range(engine.side_channel_port, engine.side_channel_port + engine.config.tp)
        self._client = client

    async def pin(self) -> Ticket:
        params = b'{"do_remote_decode":true,"do_remote_prefill":false}'
        body = b'{"model":"tiny","prompt":[1,2,3],"max_tokens":1,"kv_transfer_params":' + params + b"}"
        answer = await self._client.post(
            self.engine.url + "/v1/completions", body, [(b"content-type", b"application/json")], timeout_s=10
        )
        prefiller = self.bench.engine(self.engine.url)
        handoff = prefiller.connector.handoff(prefiller, answer.body, time.monotonic())
        data = prefiller.connector.release_data(handoff)
        assert data is not None
        assert self.engine.pinned == [handoff.remote_request_id]
        return Ticket(
            version=VERSION,
            connector="mooncake-ascend",
            prefiller=prefiller.endpoint or "",
            request_id=handoff.remote_request_id,
            issued_at=time.time(),
            lease_s=600,
            data=data,
        )

    async def release(self) -> ReleaseResult:
        ticket = await self.pin()
        result = await connector("mooncake-ascend").release(ticket, self.bench.ways)
        assert self.engine.pinned == ([] if result is ReleaseResult.RELEASED else [ticket.request_id])
        return result

    @property
    def messages(self) -> int:
        return self.engine.connector.listener_messages

    @property
    def learnt(self) -> set[str]:
        return set(self.bench.ways._ascend_messages.values())


@contextlib.asynccontextmanager
async def ascend(client: EngineClient, *, aborts: bool, port: int = 0, **settings: Any) -> AsyncIterator[Ascend]:
    options = SimConfig(connector="mooncake-ascend", tp=2, ascend_abort=aborts, side_channel_port=port)
    async with SimEngine(options) as engine:
        prefiller = Ascend(engine, client, **settings)
        try:
            yield prefiller
        finally:
            await prefiller.bench.channels.aclose()


@pytest.mark.parametrize(("aborts", "learnt", "messages"), [(True, "abort", 2), (False, "done", 4)])
async def test_what_a_listener_understands_is_learnt(
    client: EngineClient, aborts: bool, learnt: str, messages: int
) -> None:
    """A stock listener does not answer an abort: each of the two ranks is asked twice the first time."""
    async with ascend(client, aborts=aborts) as prefiller:
        assert await prefiller.release() is ReleaseResult.RELEASED
        assert (prefiller.learnt, prefiller.messages) == ({learnt}, messages)
        assert await prefiller.release() is ReleaseResult.RELEASED
        assert prefiller.messages == messages + 2
        assert prefiller.engine.engine.death is None


@pytest.mark.parametrize(("aborts", "message"), [(True, "abort"), (True, "done"), (False, "done")])
async def test_a_configured_message_needs_no_learning(client: EngineClient, aborts: bool, message: str) -> None:
    async with ascend(client, aborts=aborts, ascend_message=message) as prefiller:
        assert await prefiller.release() is ReleaseResult.RELEASED
        assert (prefiller.learnt, prefiller.messages) == (set(), 2)


async def test_a_message_that_is_not_understood_is_no_release(client: EngineClient) -> None:
    async with ascend(client, aborts=False, ascend_message="abort", timeout_s=0.1) as prefiller:
        assert await prefiller.release() is ReleaseResult.UNREACHABLE


async def test_what_was_learnt_goes_with_the_engine(client: EngineClient) -> None:
    """The prefiller restarts as another release, on the same ports."""
    async with ascend(client, aborts=True) as first:
        assert await first.release() is ReleaseResult.RELEASED
        ways, port = first.bench.ways, first.engine.side_channel_port
        learnt = dict(ways._ascend_messages)
    async with ascend(client, aborts=False, port=port, timeout_s=0.3) as second:
        second.bench.ways._ascend_messages = learnt
        assert await second.release() is ReleaseResult.UNREACHABLE
        second.engine.engine._expire(second.engine.pinned[0])
        async with asyncio.timeout(10):
            while second.learnt != {"done"}:
                ticket = await second.pin()
                await connector("mooncake-ascend").release(ticket, second.bench.ways)
                for request_id in second.engine.pinned:
                    second.engine.engine._expire(request_id)
                await asyncio.sleep(0.02)
        assert await second.release() is ReleaseResult.RELEASED


async def test_the_socket_of_an_engine_that_left_is_closed(client: EngineClient) -> None:
    async with ascend(client, aborts=True) as prefiller:
        await prefiller.release()
        bench = prefiller.bench
        assert len(bench.channels.addresses) == 2
        descriptors = len(os.listdir("/proc/self/fd"))
        bench.fleet.update("test", [spec("decode", "http://10.0.0.8:8000")])
        assert bench.channels.addresses == frozenset()
        async with asyncio.timeout(10):
            while len(os.listdir("/proc/self/fd")) >= descriptors:
                await asyncio.sleep(0.01)
        assert prefiller.learnt == set()


# ── many ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _service(bench: Bench) -> ReleaseService:
    return ReleaseService(bench.settings, bench.ways, Metrics(), Recent(), Tracing(configsections.Tracing()))


def _tickets(count: int, prefiller: str, port: int, name: str = "") -> list[Ticket]:
    data = {"ports": {prefiller.partition(":")[0]: [port]}}
    return [
        Ticket(VERSION, "mooncake-ascend", prefiller, f"{name}{port}-{n}", time.time(), 600.0, data)
        for n in range(count)
    ]


async def _settled(service: ReleaseService) -> None:
    async with asyncio.timeout(60):
        while service.accounts.pending:
            await asyncio.sleep(0.005)


async def test_B39_thousands_of_releases_hold_one_socket_for_each_prefiller(make: Make) -> None:
    async with contextlib.AsyncExitStack() as stack:
        options = SimConfig(connector="mooncake-ascend", ascend_abort=True)
        engines = [await stack.enter_async_context(SimEngine(options)) for _ in range(3)]
        specs = [spec("prefill", engine.url, connector=connector("mooncake-ascend")) for engine in engines]
        bench = make(specs, timeout_s=30, deadline_s=60)
        service = _service(bench)
        descriptors = []
        batches = [_tickets(500, engine.url.removeprefix("http://"), engine.side_channel_port) for engine in engines]
        for group in zip(*batches, strict=True):
            for ticket in group:
                service.request(ticket)
            if service.accounts.requested % 300 == 0:
                await _settled(service)
                descriptors.append(len(os.listdir("/proc/self/fd")))
        await _settled(service)
        assert service.accounts.ended == {"released": 1500, "refused": 0, "timed_out": 0, "dropped": 0}
        assert len(descriptors) == 5
        assert max(descriptors) - descriptors[0] < 10  # the process has others, that come and go
        assert len(bench.channels.addresses) == 3


async def test_B40_a_prefiller_that_is_down_delays_nobody_and_gets_no_backlog(make: Make) -> None:
    """Half of the fleet is down for a while; no more than a handful of frames reaches it when it is back."""
    async with SimEngine(SimConfig(connector="mooncake-ascend", ascend_abort=True)) as living:
        down = SimEngine(SimConfig(connector="mooncake-ascend", ascend_abort=True))
        await down.start()
        port, url = down.side_channel_port, down.url
        await down.stop()
        specs = [spec("prefill", engine, connector=connector("mooncake-ascend")) for engine in (url, living.url)]
        bench = make(specs, timeout_s=0.3, deadline_s=1.0)
        service = _service(bench)
        slowest = 0.0
        gc.freeze()  # as the service does: what other tests left on the heap is not walked in here
        for ticket in _tickets(1100, url.removeprefix("http://"), port):
            started = time.process_time()
            service.request(ticket)
            slowest = max(slowest, time.process_time() - started)
        gc.unfreeze()
        assert slowest < 0.05
        (first,) = _tickets(1, living.url.removeprefix("http://"), living.side_channel_port)
        service.request(first)
        await _settled(service)
        assert service.accounts.ended == {"released": 1, "refused": 0, "timed_out": 1100, "dropped": 0}

        options = SimConfig(connector="mooncake-ascend", ascend_abort=True, side_channel_port=port)
        async with SimEngine(options) as back:
            (last,) = _tickets(1, url.removeprefix("http://"), port, "afterwards-")
            service.request(last)
            await _settled(service)
            assert back.connector.listener_messages <= 2


def test_B39_undeliverable_messages_do_not_hold_up_the_exit() -> None:
    program = textwrap.dedent(
        """
        import asyncio, time
        from tests.unit import test_releaseways as t

        async def main():
            async with t.EngineClient(connect_timeout_s=1, max_connections=10, keepalive_s=2) as client:
                connector = t.connector("mooncake-ascend")
                bench = t.Bench(client, [t.spec("prefill", "http://127.0.0.1:9", connector=connector)])
                service = t._service(bench)
                for ticket in t._tickets(5, "127.0.0.1:9", 1):
                    service.request(ticket)
                await asyncio.sleep(0.1)
                await service.flush(time.monotonic() + 0.2)
                assert service.accounts.ended["dropped"] == 5, service.accounts
                await bench.channels.aclose()
            print("done at", time.monotonic(), flush=True)

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        done_at = next(float(line.split()[-1]) for line in process.stdout if line.startswith("done at"))
        assert process.wait(60) == 0
        assert time.monotonic() - done_at < 5  # pyzmq's default would wait for ever
