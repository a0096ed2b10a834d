from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from extproc.enginehttp import EngineClient, EngineUnavailable
from extproc.fleet.engines import Engine, Report
from extproc.fleet.fleet import Fleet
from extproc.fleet.monitor import Monitor, samples
from extproc.fleet.names import FleetNames
from extproc.picking import STALE_S
from extproc.sim.metrics import Metrics as SimulatedMetrics
from tests.support.engines import Answer, CloseConnection, RecordedRequest, StubEngine
from tests.support.fleet import fleet_of, named, spec

# Of a page of vLLM 0.32 with two data-parallel engines, three requests running on the one and one on the other.
PAGE = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason. Reason labels: 'capacity' = waiting …
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="tiny",reason="capacity"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 0.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="tiny",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 0.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7960518895262825e+09
"""
WAITING, RUNNING, KV = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"


# ---- the metrics page ----


def test_a_page_of_several_engines_is_summed_and_kv_usage_is_their_mean() -> None:
    assert samples(PAGE) == {RUNNING: 4.0, WAITING: 2.0, KV: 0.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("vllm:num_requests_running 3", {RUNNING: 3.0}),
        ("vllm:num_requests_running 3 1700000000000", {RUNNING: 3.0}),
        ('vllm:num_requests_running{model_name="a b}{"} 3.0 1700000000000', {RUNNING: 3.0}),
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.5', {"vllm:gpu_cache_usage_perc": 0.5}),  # vLLM < 0.10
        ('vllm:num_requests_running{model_name="m"} NaN', {}),
        ('vllm:num_requests_running{model_name="m"} +Inf', {}),
        ('vllm:num_requests_running{model_name="m"} many', {}),
        ('vllm:num_requests_running{model_name="m"}', {}),
        ("vllm:num_requests_running", {}),
        ("vllm:num_requests_running{", {}),
        ("<html>busy</html>", {}),
    ],
)
def test_odd_pages(text: str, expected: dict[str, float]) -> None:
    assert samples(text) == expected


def test_the_simulated_engines_page_reads_alike() -> None:
    metrics = SimulatedMetrics("tiny", nixl=True)
    metrics.watch(lambda: 0.5, lambda: 3, lambda: 2)
    assert samples(metrics.render().decode()) == {RUNNING: 3.0, WAITING: 2.0, KV: 0.5}


def test_a_report_counts_only_while_it_is_fresh() -> None:
    engine = Engine(spec("prefill", 1))
    assert engine.foreign_load(0.0, STALE_S) == 0
    engine.report = Report(waiting=2, running=4, foreign=5, at=100.0)
    assert [engine.foreign_load(now, STALE_S) for now in (100.0, 105.0, 105.1)] == [5, 5, 0]


# ---- a running monitor ----

Page = Callable[[RecordedRequest], Awaitable[Answer] | Answer]


class ProbedEngine(StubEngine):
    """``pages`` replaces what it answers at a path."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pages: dict[str, Page] = {}

    async def answer(self, request: RecordedRequest) -> Answer:
        page = self.pages.get(request.target)
        if page is None:
            return await super().answer(request)
        answer = page(request)
        return answer if isinstance(answer, Answer) else await answer

    def set(self, path: str, status: int = 200, body: str = "") -> None:
        self.pages[path] = lambda _: Answer(status, body=body.encode())

    async def probed(self, path: str, count: int = 1) -> RecordedRequest:
        """Once so many further probes of that path have begun."""
        before = len(self._of(path))
        await self.wait_until(lambda: len(self._of(path)) >= before + count)
        return self._of(path)[-1]

    def _of(self, path: str) -> list[RecordedRequest]:
        return [request for request in self.probes if request.target == path]


@contextlib.asynccontextmanager
async def monitored(*listed: Any, **settings: Any) -> AsyncIterator[Fleet]:
    health = {"interval_s": 0.02, "timeout_s": 0.5, **settings.pop("health", {})}
    fleet = fleet_of(*listed, **{"scrape_s": 0.02, "health": health, **settings})
    task = asyncio.create_task(Monitor(fleet).run())
    try:
        yield fleet
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def stub() -> AsyncIterator[ProbedEngine]:
    async with ProbedEngine() as engine:
        yield engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def of(stub: StubEngine, **fields: Any) -> Any:
    return spec("prefill", 1, **{"url": stub.url, "name": "engine", **fields})


async def test_health_follows_the_engine(stub: ProbedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    async with monitored(of(stub)) as fleet:
        engine = named(fleet, "engine")
        heard: list[bool | None] = []
        fleet.on_change(lambda: heard.append(engine.health.probed_ok))
        for failing in range(2):
            await until(lambda: engine.health.probed_ok is True)
            if failing:
                stub.set("/health", 503)
            else:
                await stub.refuse()
            await until(lambda: engine.health.probed_ok is False)
            assert engine.health.reason == ("health 503" if failing else "ConnectError")
            assert not fleet.ready("prefill")
            stub.pages.clear()
            if not failing:
                await stub.listen()
        await until(lambda: engine.health.probed_ok is True)
        assert engine.state(0) == "ready"
    changes = [state for state, _ in itertools.groupby(heard) if state is not None]
    assert changes == [True, False, True, False, True]
    output = capsys.readouterr().out
    assert (output.count("engine unhealthy"), output.count("engine healthy")) == (2, 2)


async def test_pages_without_an_end_are_read_so_far(stub: ProbedEngine) -> None:
    """The engine is healthy all the same, and says nothing of its load."""
    sent = dict.fromkeys(("/health", "/metrics"), 0)

    def endless(path: str) -> Page:
        async def between(_: int) -> None:
            sent[path] += 1
            await asyncio.sleep(0)

        return lambda _: Answer(events=[PAGE.encode() + b"# " + b"x" * 2**20 + b"\n"] * 2**12, between_events=between)

    stub.pages |= {path: endless(path) for path in sent}
    async with monitored(of(stub), health={"unhealthy_after": 1, "timeout_s": 30}) as fleet:
        await stub.probed("/health", 2)
        await stub.probed("/metrics", 2)
        assert named(fleet, "engine").health.probed_ok is True
        assert named(fleet, "engine").report.running == 0
    assert all(0 < count < 200 for count in sent.values())


async def test_an_engines_name_leads_where_it_led_before_a_dns_outage(stub: ProbedEngine) -> None:
    """Probes and calls go to the address that the fleet knows, and other names are asked for."""
    url = f"http://prefill.nowhere.invalid:{stub.port}"
    async with (
        monitored(of(stub, url=url, address="127.0.0.1"), health={"unhealthy_after": 1}) as fleet,
        EngineClient(connect_timeout_s=5, max_connections=10, keepalive_s=2, resolver=FleetNames(fleet)) as client,
    ):
        await stub.probed("/health", 3)
        assert named(fleet, "engine").health.probed_ok is True
        assert (await client.post(url + "/v1/completions", b"{}", [], timeout_s=5)).status == 200
        assert stub.requests[0].header("host") == f"prefill.nowhere.invalid:{stub.port}"
        assert (await client.post(f"http://localhost:{stub.port}/", b"{}", [], timeout_s=5)).status == 200
        with pytest.raises(EngineUnavailable) as fault:
            await client.post("http://other.invalid/", b"{}", [], timeout_s=5)
        assert fault.value.reason == "connect"


@pytest.mark.parametrize("status", [200, 204, 301, 401, 404, 405, 429])
async def test_an_engine_that_answers_is_healthy_even_without_a_health_page(stub: ProbedEngine, status: int) -> None:
    stub.set("/health", status)
    async with monitored(of(stub)) as fleet:
        await until(lambda: named(fleet, "engine").health.probed_ok is not None)
        assert named(fleet, "engine").health.probed_ok is True


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_an_engine_that_says_5xx_is_not(stub: ProbedEngine, status: int) -> None:
    stub.set("/health", status)
    async with monitored(of(stub)) as fleet:
        await until(lambda: named(fleet, "engine").health.probed_ok is not None)
        assert (named(fleet, "engine").health.probed_ok, named(fleet, "engine").health.reason) == (
            False,
            f"health {status}",
        )


async def test_one_failed_probe_is_not_enough(stub: ProbedEngine) -> None:
    turns = iter(range(1000))

    def every_second(_: RecordedRequest) -> Answer:
        return Answer(503 if next(turns) % 2 else 200)

    stub.pages["/health"] = every_second
    async with monitored(of(stub), health={"interval_s": 0.01}) as fleet:
        await stub.probed("/health", 10)
        assert named(fleet, "engine").health.probed_ok is True


async def test_an_engine_that_accepts_and_never_answers(stub: ProbedEngine) -> None:
    async def hang(_: RecordedRequest) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    stub.pages["/health"] = hang
    async with monitored(of(stub), health={"timeout_s": 0.05}) as fleet:
        await until(lambda: named(fleet, "engine").health.probed_ok is False)
        assert named(fleet, "engine").health.reason in ("TimeoutError", "ReadTimeout")


async def test_an_engine_that_answers_one_byte_at_a_time(stub: ProbedEngine) -> None:
    """Each read is in time, the answer as a whole is not."""

    async def a_moment(_: int) -> None:
        await asyncio.sleep(0.02)

    stub.pages["/health"] = lambda _: Answer(events=[b"x"] * 10_000, between_events=a_moment)
    async with monitored(of(stub), health={"timeout_s": 0.1}) as fleet:
        await until(lambda: named(fleet, "engine").health.probed_ok is False)


async def test_another_health_path(stub: ProbedEngine) -> None:
    stub.set("/health", 503)
    stub.set("/ready", 200)
    async with monitored(of(stub), health={"path": "/ready"}) as fleet:
        await until(lambda: named(fleet, "engine").health.probed_ok is True)


async def test_load_is_reported_and_what_is_not_ours_counts_as_foreign(stub: ProbedEngine) -> None:
    stub.set("/metrics", 200, PAGE)
    async with monitored(of(stub)) as fleet:
        engine = named(fleet, "engine")
        await until(lambda: engine.report.running > 0)
        report = engine.report
        assert (report.waiting, report.running, report.kv_usage, report.foreign) == (2, 4, 0.5, 6)
        held = [fleet.reserve_engine(engine) for _ in range(4)]
        await until(lambda: engine.report.foreign == 2)
        held += [fleet.reserve_engine(engine) for _ in range(4)]  # some are still on their way
        await until(lambda: engine.report.foreign == 0)
        assert engine.report.running == 4
        for reservation in held:
            reservation.release()


async def test_the_last_report_grows_old_when_no_new_one_comes(stub: ProbedEngine) -> None:
    stub.set("/metrics", 200, PAGE)
    async with monitored(of(stub)) as fleet:
        engine = named(fleet, "engine")
        await until(lambda: engine.report.running > 0)
        for status, body in ((500, PAGE), (200, "no metrics"), (200, "vllm:num_requests_running NaN")):
            stub.set("/metrics", status, body)
            await stub.probed("/metrics", 2)
            at = engine.report.at
            await stub.probed("/metrics", 3)
            assert (engine.report.at, engine.report.running) == (at, 4)


async def test_a_slow_metrics_page_does_not_hold_up_the_probes(stub: ProbedEngine) -> None:
    async def hang(_: RecordedRequest) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    stub.pages["/metrics"] = hang
    async with monitored(of(stub), health={"timeout_s": 30}):
        await stub.probed("/metrics")
        await stub.probed("/health", 5)


async def test_scraping_can_be_turned_off(stub: ProbedEngine) -> None:
    async with monitored(of(stub), scrape_s=0):
        await stub.probed("/health", 5)
    assert [probe for probe in stub.probes if probe.target == "/metrics"] == []


async def test_models_are_asked_for_where_they_are_not_configured(stub: ProbedEngine) -> None:
    stub.set("/v1/models", 200, '{"object": "list", "data": [{"id": "base"}, {"id": "adapter", "parent": "base"}]}')
    async with (
        ProbedEngine() as other,
        monitored(
            of(stub), spec("prefill", 2, url=other.url, name="configured", models=frozenset({"mine"})), scrape_s=0
        ) as fleet,
    ):
        heard: list[int] = []
        fleet.on_change(lambda: heard.append(1))
        engine = named(fleet, "engine")
        await until(lambda: engine.known_models is not None)
        assert engine.known_models == frozenset({"base", "adapter"})
        assert heard  # somebody may wait for an engine that serves it
        await other.probed("/health", 3)
        assert [probe for probe in other.probes if probe.target == "/v1/models"] == []
        assert [engine.serves(model) for model in ("base", "mine", None)] == [True, False, True]


@pytest.mark.parametrize(
    "body",
    ["", "[]", "{}", '{"data": 7}', '{"data": [{}]}', '{"data": []}', '{"data": ["m"]}', "\ud800", '{"data":[null]}'],
)
async def test_nonsense_for_models_is_no_news(stub: ProbedEngine, body: str) -> None:
    stub.pages["/v1/models"] = lambda _: Answer(body=body.encode("utf-8", "surrogatepass"))
    async with monitored(of(stub)) as fleet:
        await stub.probed("/v1/models", 2)  # asked again soon
        assert named(fleet, "engine").known_models is None
        assert named(fleet, "engine").health.probed_ok is True


async def test_the_engines_key_is_sent_where_it_guards(stub: ProbedEngine) -> None:
    async with monitored(of(stub, api_key="k3y")):
        requests = [await stub.probed(path) for path in ("/v1/models", "/metrics", "/health")]
    assert [request.header("authorization") for request in requests] == ["Bearer k3y", "Bearer k3y", None]


async def test_without_a_key_none_is_sent(stub: ProbedEngine) -> None:
    async with monitored(of(stub)):
        request = await stub.probed("/v1/models")
    assert request.header("authorization") is None


async def test_engines_that_come_are_watched_and_those_that_go_are_left_alone(stub: ProbedEngine) -> None:
    async with ProbedEngine() as other, monitored(of(stub)) as fleet:
        await stub.probed("/health")
        fleet.update("file", [spec("decode", 2, url=other.url, name="other")])
        await other.probed("/health")
        fleet.update("file", [])
        await stub.probed("/health", 2)  # the other's watch has ended by now
        seen = len(other.probes)
        await stub.probed("/health", 10)
        assert len(other.probes) == seen


async def test_an_engine_that_closes_every_connection_hurts_nobody_else(stub: ProbedEngine) -> None:
    def close(_: RecordedRequest) -> Answer:
        raise CloseConnection

    async with ProbedEngine() as other:
        for path in ("/health", "/metrics", "/v1/models"):
            other.pages[path] = close
        async with monitored(of(stub), spec("decode", 2, url=other.url, name="other")) as fleet:
            await until(lambda: named(fleet, "other").health.probed_ok is False)
            await until(lambda: named(fleet, "engine").health.probed_ok is True)


async def test_O16_an_engine_at_an_ipv6_address() -> None:
    class Six(ProbedEngine):
        @property
        def url(self) -> str:
            return f"http://[::1]:{self.port}"

    async with Six() as engine:
        server = await asyncio.start_server(engine._connected, "::1", engine.port)
        try:
            engine.set("/metrics", 200, PAGE)
            async with monitored(of(engine)) as fleet:
                await until(lambda: named(fleet, "engine").report.running == 4)
                assert named(fleet, "engine").endpoint == f"[::1]:{engine.port}"
        finally:
            server.close()
            await server.wait_closed()
