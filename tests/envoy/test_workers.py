"""``grpc.workers``: several processes behind one real Envoy, which spreads its streams over them.

One supervisor lives through the module: it starts, loses a worker, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extproc.bootstrap import render
from extproc.config import build
from extproc.processes import EnvoyProcess, Process, envoy_process
from tests.support.engines import Answer, RecordedRequest, StubEngine, answer_prefill
from tests.support.gateway import CHAT, CHAT_BODY, Decoder, until, until_async

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

HOST: Final = "127.0.0.1"
WORKERS: Final = 2
JSON: Final = {"content-type": "application/json"}


def _consecutive_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = 0
            for number in range(count):
                probe = stack.enter_context(socket.socket())
                probe.bind((HOST, first + number if first else 0))
                first = first or int(probe.getsockname()[1])
            return first


class Workers:
    """A supervisor with its workers, engines, and an Envoy that was told of them by its bootstrap alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.grpc = _consecutive_ports(2 * WORKERS)
        self.admin = self.grpc + WORKERS
        self.prefiller = StubEngine("prefill")
        self.decoder = Decoder()
        self.supervisor: Process
        self.envoy: EnvoyProcess
        self.client: httpx.AsyncClient

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for engine in (self.prefiller, self.decoder):
                await stack.enter_async_context(engine)
            values = self._values()
            file = self._folder / "extproc.yaml"
            file.write_text(yaml.safe_dump(values))
            command = [sys.executable, "-m", "extproc", "serve", "--config", str(file)]
            self.client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
            self.supervisor = await stack.enter_async_context(
                Process(
                    command,
                    log=self._folder / "extproc.log",
                    name="extproc",
                    ready=self._all_ready,
                    ready_timeout_s=90,
                )
            )
            bootstrap = await asyncio.to_thread(render, build(values))
            bootstrap = bootstrap.replace("timeout: 1s", "timeout: 20s")  # a slow worker is no dead one
            self.envoy = await stack.enter_async_context(envoy_process(bootstrap, directory=self._folder / "envoy"))
            await until_async(self.all_seen_by_envoy)
            self.client.base_url = httpx.URL(f"http://{(await self.envoy.listeners())['gateway']}")
            yield

    def _values(self) -> dict[str, Any]:
        return {
            "grpc": {"listen": f"{HOST}:{self.grpc}", "workers": WORKERS},
            "admin": {"listen": f"{HOST}:{self.admin}"},
            "fleet": {"prefill": [{"url": self.prefiller.url}], "decode": [{"url": self.decoder.url}]},
            "life": {"notice_s": 0.0, "drain_s": 20.0},
            "log": {"format": "json"},
            "envoy": {"listen": f"{HOST}:0", "admin": f"{HOST}:0", "extproc": f"{HOST}:{self.grpc}"},
        }

    # ---- requests ----

    async def post(self, name: str = "") -> int:
        headers = JSON | ({"x-request-id": name} if name else {})
        return (await self.client.post(CHAT, content=CHAT_BODY, headers=headers)).status_code

    # ---- what is known ----

    async def _all_ready(self) -> bool:
        return all([await self.ready(worker) for worker in range(WORKERS)])

    async def ready(self, worker: int) -> bool:
        try:
            return (await self.client.get(f"http://{HOST}:{self.admin + worker}/readyz")).is_success
        except httpx.TransportError:
            return False

    async def all_seen_by_envoy(self) -> bool:
        hosts = (await self.envoy.clusters())["extproc"]
        return hosts == {f"{HOST}:{self.grpc + worker}": True for worker in range(WORKERS)}

    async def disaggregated(self) -> list[int]:
        """Requests, by worker."""
        counts = []
        for worker in range(WORKERS):
            text = (await self.client.get(f"http://{HOST}:{self.admin + worker}/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            (count,) = [
                sample.value
                for sample in samples
                if sample.name == "extproc_exchanges_total" and sample.labels["decision"] == "disaggregated"
            ]
            counts.append(int(count))
        return counts

    def events(self, event: str) -> list[dict[str, Any]]:
        """What supervisor and workers have logged under that name."""
        lines = [json.loads(line) for line in self.supervisor.output().splitlines()]
        return [line for line in lines if line["event"] == event]

    def pid(self, worker: int) -> int:
        """Of its present life."""
        return int([line["pid"] for line in self.events("worker started") if line["worker"] == worker][-1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("workers"))
    async with workers.running():
        yield workers


async def test_streams_are_spread_evenly(workers: Workers) -> None:
    statuses = Counter[int]()

    async def client(requests: int) -> None:
        for _ in range(requests):
            statuses[await workers.post()] += 1

    await asyncio.gather(*(client(20) for _ in range(10)))
    assert statuses == {200: 200}
    first, second = await workers.disaggregated()
    assert first + second == 200
    assert 80 <= first <= 120
    assert len(workers.prefiller.requests) == 200

    # Both are processes of the same configuration, told apart in the log.
    assert len({workers.pid(0), workers.pid(1), workers.supervisor.pid}) == 3
    assert sorted(line["worker"] for line in workers.events("serving")) == [0, 1]
    assert Counter(line["worker"] for line in workers.events("exchange")) == {0: first, 1: second}


async def test_a_killed_worker_costs_no_request_and_comes_back(workers: Workers) -> None:
    statuses = Counter[int]()
    enough = asyncio.Event()

    async def client() -> None:
        while not enough.is_set():
            statuses[await workers.post()] += 1

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await until(lambda: statuses.total() >= 40, 30)
    killed = workers.pid(1)
    os.kill(killed, signal.SIGKILL)
    await until(lambda: len(workers.events("worker ended")) == 1)
    at_the_crash = statuses.total()
    await until(lambda: statuses.total() >= at_the_crash + 40, 30)
    await until(lambda: workers.pid(1) != killed)
    await until_async(lambda: workers.ready(1), 60)
    await until_async(workers.all_seen_by_envoy, 30)

    async def works_again() -> bool:
        return (await workers.disaggregated())[1] >= 20  # it counts from 0

    await until_async(works_again, 30)
    enough.set()
    await asyncio.gather(*clients)
    assert list(statuses) == [200]
    (ended,) = workers.events("worker ended")
    assert (ended["worker"], ended["status"], ended["level"]) == (1, -signal.SIGKILL, "error")


async def test_sigterm_drains_all_workers(workers: Workers) -> None:
    """Requests that are being prefilled, on either worker, end well; the supervisor waits for both."""
    going_on = asyncio.Event()

    asking: list[RecordedRequest] = []

    async def held(request: RecordedRequest) -> Answer:
        asking.append(request)
        await going_on.wait()
        return answer_prefill(request)

    workers.prefiller.respond = held
    requests = [asyncio.create_task(workers.post(f"held-{number}")) for number in range(4)]
    await until(lambda: len(asking) == 4)
    workers.supervisor.signal(signal.SIGTERM)
    await until(lambda: len(workers.events("draining")) == 2)
    held_by = {line["worker"]: line["in_flight"] for line in workers.events("draining")}
    assert (set(held_by), sum(held_by.values())) == ({0, 1}, 4)  # each of Envoy's threads takes them in turn
    assert workers.supervisor.running
    going_on.set()
    assert await asyncio.gather(*requests) == [200] * 4
    assert await workers.supervisor.wait(30) == 0
    assert sorted(line["worker"] for line in workers.events("stopped")) == [0, 1]
    exchanges = [line for line in workers.events("exchange") if line.get("client_request_id", "").startswith("held-")]
    assert {line["decision"] for line in exchanges} == {"disaggregated"}
    assert Counter(line["worker"] for line in exchanges) == held_by
    assert re.findall("Traceback", workers.supervisor.output()) == []
