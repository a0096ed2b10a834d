"""``grpc.workers``: several processes behind one real Envoy, which spreads its streams over them.

One supervisor lives through the module: it starts, loses a worker, and ends.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.engines import Answer, RecordedRequest, answer_prefill
from tests.support.gateway import until, until_async
from tests.support.workers import Workers

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


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
