"""Workers that are killed while the fleet changes: Envoy never loses a decoder that belongs to it, nor a request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.support.dns_server import DnsServer
from tests.support.gateway import Decoder, until, until_async
from tests.support.workers import WORKERS, Workers

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(180)]


class Load:
    """Four clients, each with one request after the other."""

    def __init__(self, workers: Workers) -> None:
        self.statuses: Counter[int] = Counter()
        self._workers = workers
        self._enough = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        clients = [asyncio.create_task(self._client()) for _ in range(4)]
        try:
            yield
        finally:
            self._enough = True
            await asyncio.gather(*clients)

    async def _client(self) -> None:
        while not self._enough:
            self.statuses[await self._workers.post()] += 1

    async def further(self, count: int) -> None:
        before = self.statuses.total()
        await until(lambda: self.statuses.total() >= before + count)


class Hosts:
    """Every set of decoders that Envoy has been seen with."""

    def __init__(self, workers: Workers) -> None:
        self.seen: list[frozenset[str]] = []
        self._workers = workers

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await self.now()
            await asyncio.sleep(0.02)

    async def now(self) -> frozenset[str]:
        hosts = frozenset((await self._workers.envoy.clusters())["decode"])
        if not self.seen or self.seen[-1] != hosts:
            self.seen.append(hosts)
        return hosts


async def test_workers_that_are_killed_while_the_fleet_changes(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    workers = Workers(tmp_path, file=str(file))
    async with Decoder() as second, Decoder() as third:

        def write(*decoders: Decoder) -> None:
            new = file.with_suffix(".new")
            new.write_text(yaml.safe_dump({"decode": [{"url": decoder.url} for decoder in decoders]}))
            new.replace(file)

        write(second)
        async with workers.running():
            both = frozenset((workers.decoder.endpoint, second.endpoint))
            all_three = both | {third.endpoint}
            hosts, load = Hosts(workers), Load(workers)

            async def all_agree(expected: frozenset[str]) -> None:
                async def agree() -> bool:
                    if not all([await workers.ready(worker) for worker in range(WORKERS)]):
                        return False
                    told = [(await workers.fleet(worker))["engines"] for worker in range(WORKERS)]
                    views = [{e["endpoint"] for e in engines if e["role"] == "decode"} for engines in told]
                    return [*views, await hosts.now()] == [expected] * 3

                await until_async(agree, 60)

            await all_agree(both)
            hosts.seen.clear()
            async with hosts.watched(), load.running():
                await load.further(20)
                for worker, decoders, expected in ((1, [second, third], all_three), (0, [third, second], all_three)):
                    killed = workers.pid(worker)
                    os.kill(killed, signal.SIGKILL)
                    write(*decoders)
                    await until(lambda worker=worker, killed=killed: workers.pid(worker) != killed)
                    await all_agree(expected)
                    await until_async(workers.all_seen_by_envoy)
                    before = len(third.requests)
                    await until(lambda before=before: len(third.requests) > before)
                killed = workers.pid(1)
                os.kill(killed, signal.SIGKILL)
                write(third)  # and one leaves
                await until(lambda: workers.pid(1) != killed)
                await all_agree(all_three - {second.endpoint})
                await load.further(20)
            assert list(load.statuses) == [200]
            assert [sorted(seen) for seen in hosts.seen] == [
                sorted(seen) for seen in (both, all_three, all_three - {second.endpoint})
            ]

            async def nothing_left() -> bool:
                told = [await workers.fleet(worker) for worker in range(WORKERS)]
                engines = [engine for one in told for engine in one["engines"]]
                return not any(one["in_flight"] for one in told) and not any(
                    engine[key] for engine in engines for key in ("inflight", "reserved_tokens", "handoffs")
                )

            await until_async(nothing_left)
            print(f"\nthree workers killed: {load.statuses.total()} requests, 0 lost")


async def test_workers_that_start_while_dns_is_silent_take_no_decoder_from_envoy(tmp_path: Path) -> None:
    """They know one decoder from their configuration, and wait with what they tell until they know the other."""
    async with DnsServer() as dns, Decoder() as found:
        dns.set("engines.test", "SRV", f"0 10 {found.port} pod.test.", ttl=1)
        dns.set("pod.test", "A", "127.0.0.1", ttl=1)
        entry = {"role": "decode", "name": "engines.test", "type": "srv"}
        workers = Workers(tmp_path, dns=[entry], dns_servers=[dns.address])
        async with workers.running():
            both = frozenset((workers.decoder.endpoint, found.endpoint))
            hosts = Hosts(workers)

            async def envoy_has_both() -> bool:
                return await hosts.now() == both

            async def both_known_to(worker: int) -> bool:
                engines = (await workers.fleet(worker))["engines"]
                return {engine["endpoint"] for engine in engines if engine["role"] == "decode"} == both

            async def told_by(worker: int) -> list[str | None]:
                return [source["problem"] for source in (await workers.fleet(worker))["sources"]]

            await until_async(envoy_has_both)
            dns.silent = True
            hosts.seen.clear()
            async with hosts.watched():
                for worker in range(WORKERS):
                    killed = workers.pid(worker)
                    os.kill(killed, signal.SIGKILL)
                    await until(lambda worker=worker, killed=killed: workers.pid(worker) != killed)
                for worker in range(WORKERS):
                    await until_async(lambda worker=worker: workers.ready(worker))
                    assert await told_by(worker) == [None, "look-up failed: LifetimeTimeout"]
                await until_async(workers.all_seen_by_envoy)
                assert {await workers.post() for _ in range(8)} == {200}
                dns.silent = False
                for worker in range(WORKERS):
                    await until_async(lambda worker=worker: both_known_to(worker))
                    assert await told_by(worker) == [None, None]
                before = len(found.requests)
                async with Load(workers).running():
                    await until(lambda: len(found.requests) >= before + 5)
            assert hosts.seen == [both]
