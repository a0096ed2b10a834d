"""Everything that goes wrong in production at once, for a while; then nothing may be left of it.

::

    python -m bench.soak [--seconds 600]

Clients complete their requests, read slowly, or hang up at random points, through a real Envoy, two replicas of the
service and four simulated engines. Meanwhile engines are drained and taken back, one replica is restarted and killed,
the other one stays, and Envoy is restarted. At the end no stream, task, socket, reservation, handoff or release may be
left, no block pinned on any engine, and the memory of the replica that stayed must not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from extproc.processes import free_port
from tests.support.simulated import HOST, Pair, Pairing, Replica, SimGateway, until

LEASE_S: Final = 10.0
"""After it engines free what nobody released: what a killed process cannot do."""
GROWTH_BYTES: Final = 24 * 1024 * 1024
"""How much more memory the replica that stayed may have at the end than after a quarter of the time."""
_CLIENTS: Final = 12
_TASKS_OF_A_LOG: Final = 2  # of an access-log stream: its handler, and gRPC's own around it
_PAUSE_S: Final = 0.5
_PATIENCE_S: Final = 60.0
_ENGINES: Final = {"connector": "nixl", "prefill_us_per_token": 50, "decode_ms_per_token": 5, "lease_s": LEASE_S}


@dataclass
class Held:
    """What a replica holds."""

    streams: int
    handoffs: int
    releases: int
    reservations: int
    tasks: int
    """Beside those of access-log streams, which Envoy opens to any replica."""
    sockets: int

    @property
    def settled(self) -> bool:
        return not (self.streams or self.handoffs or self.releases or self.reservations)


@dataclass
class Report:
    requests: Counter[str] = field(default_factory=Counter)
    """By what the client did and saw: ``complete 200``, ``hang-up``, ``complete refused``, …"""
    faults: Counter[str] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)
    """The accounts of the replica that stayed."""
    before: list[Held] = field(default_factory=list)
    """Each replica before the first request."""
    after: list[Held] = field(default_factory=list)
    """After the last one, once all had settled."""
    pinned: int = -1
    """Blocks still pinned on any engine."""
    by_timer: int = 0
    """Handoffs whose blocks only the engine's timer freed: those of killed processes."""
    rss: list[int] = field(default_factory=list)
    """Bytes of the replica that stayed, a quarter into the time and at the end."""

    def faults_found(self) -> list[str]:
        """What is wrong; empty where all is well."""
        found = []
        if self.requests["complete 200"] < sum(n for name, n in self.requests.items() if "complete" in name) // 2:
            found.append(f"most requests failed: {dict(self.requests)}")
        for before, after in zip(self.before, self.after, strict=True):
            if not after.settled:
                found.append(f"left behind: {after}")
            if after.tasks > before.tasks:
                found.append(f"tasks: {before.tasks} before, {after.tasks} after")
            # A connection that is kept for the next request may stay, to each engine and from each client of ours.
            if after.sockets > before.sockets + 2 * _CLIENTS:
                found.append(f"sockets: {before.sockets} before, {after.sockets} after")
        if self.pinned:
            found.append(f"{self.pinned} blocks still pinned")
        if self.rss[-1] - self.rss[0] > GROWTH_BYTES:
            found.append(f"memory grew from {self.rss[0]} to {self.rss[-1]} bytes")
        return found


class Soak:
    """One run; :meth:`run` it."""

    def __init__(self, gateway: SimGateway, seconds: float, seed: int) -> None:
        self._gateway = gateway
        self._seconds = seconds
        self._random = random.Random(seed)
        self._over = False
        self.report = Report()

    @property
    def _pair(self) -> Pair:
        return self._gateway["soak"]

    async def run(self) -> Report:
        report, stayed = self.report, self._gateway.replicas[0]
        report.before = [await held(replica) for replica in self._gateway.replicas]
        started = time.monotonic()
        clients = [asyncio.create_task(self._client()) for _ in range(_CLIENTS)]
        faults = asyncio.create_task(self._cause_faults())
        await asyncio.sleep(self._seconds / 4)
        report.rss.append(_rss(stayed))
        await asyncio.sleep(started + self._seconds - time.monotonic())
        self._over = True
        await faults
        await asyncio.gather(*clients)
        await self._settle()
        report.rss.append(_rss(stayed))
        report.releases = Counter(await stayed.accounts())
        report.by_timer = len(self._pair.expired)
        return report

    async def _settle(self) -> None:
        """Wait until nothing is held any more, or for as long as all timers together may take."""

        async def nothing_held() -> bool:
            self.report.after = [await held(replica) for replica in self._gateway.replicas]
            self.report.pinned = sum(engine.engine.pool.used for engine in self._pair.engines)
            before = zip(self.report.before, self.report.after, strict=True)
            calm = all(now.settled and now.tasks <= then.tasks for then, now in before)
            return calm and not self.report.pinned

        with contextlib.suppress(TimeoutError):
            await until(nothing_held, LEASE_S + _PATIENCE_S)

    # ── clients ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _client(self) -> None:
        behaviours: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("complete", self._complete),
            ("hang-up", self._hang_up),
            ("slow", self._read_slowly),
        ]
        while not self._over:
            ((name, behave),) = self._random.choices(behaviours, (5, 3, 1))
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    seen = await behave()
            except TimeoutError:
                seen = "no end"
            except OSError:
                seen = "cut"  # by a restart, of Envoy or of the replica that had the stream
                await asyncio.sleep(_PAUSE_S)
            self.report.requests[f"{name} {seen}".strip()] += 1

    async def _complete(self) -> str:
        stream = self._random.random() < 0.5
        request = await self._pair.open(stream=stream, words=self._random.randrange(5, 60), max_tokens=16)
        try:
            status = (await request.to_end(_PATIENCE_S)).split(b" ", 2)[1].decode()
            if status != "200":
                await asyncio.sleep(_PAUSE_S)
            return status
        finally:
            await self._gateway.drop(request)

    async def _hang_up(self) -> str:
        request = await self._pair.open(stream=True, words=self._random.randrange(5, 60), max_tokens=64)
        try:
            await asyncio.sleep(self._random.uniform(0.0, 0.4))
            request.cut(reset=self._random.random() < 0.5)
        finally:
            await self._gateway.drop(request)
        return ""

    async def _read_slowly(self) -> str:
        request = await self._pair.open(stream=True, words=20, max_tokens=64)
        try:
            for number in itertools.count(1):
                await asyncio.sleep(0.05)
                if await request.until(b"\n\n") and number >= 20:
                    break
            return (await request.to_end(_PATIENCE_S)).split(b" ", 2)[1].decode()
        finally:
            await self._gateway.drop(request)

    # ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _cause_faults(self) -> None:
        faults = itertools.cycle(
            (self._drain, self._restart_service, self._drain, self._kill_service, self._restart_envoy)
        )
        for fault in faults:
            await asyncio.sleep(min(10.0, self._seconds / 12))
            if self._over:
                return
            await fault()
            self.report.faults[fault.__name__.strip("_").replace("_", " ")] += 1

    async def _drain(self) -> None:
        """An engine goes, and comes back: at the replica that stayed; the other one still uses it."""
        replica, engine = self._gateway.replicas[0], f"soak-{self._random.choice(('prefill', 'decode'))}-1"
        await self._post(replica, engine, "drain")
        await asyncio.sleep(min(3.0, self._seconds / 20))
        await self._post(replica, engine, "undrain")

    async def _post(self, replica: Replica, engine: str, action: str) -> None:
        url = f"{replica.admin_url}/fleet/{engine}/{action}"
        (await self._gateway.client.post(url)).raise_for_status()

    async def _restart_service(self) -> None:
        replica = self._gateway.replicas[1]
        await replica.process.stop()
        await replica.process.start()

    async def _kill_service(self) -> None:
        replica = self._gateway.replicas[1]
        replica.process.signal(signal.SIGKILL)
        await replica.process.wait(10)
        await replica.process.start()

    async def _restart_envoy(self) -> None:
        await self._gateway.envoy.stop()
        await self._gateway.envoy.start()
        await self._gateway.service_seen()


async def held(replica: Replica) -> Held:
    fleet = await replica.fleet()
    handoffs = await replica.counts("extproc_handoffs_open")
    tasks = await replica.counts("extproc_tasks")
    logs = await replica.counts("extproc_access_log_streams")
    return Held(
        streams=fleet["in_flight"],
        handoffs=sum(handoffs.values()),
        releases=fleet["releases"]["pending"],
        reservations=sum(engine["inflight"] + engine["reserved_tokens"] for engine in fleet["engines"]),
        tasks=sum(tasks.values()) - _TASKS_OF_A_LOG * sum(logs.values()),
        sockets=_sockets(replica),
    )


def _sockets(replica: Replica) -> int:
    count = 0
    for link in Path(f"/proc/{replica.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(link).startswith("socket:")
    return count


def _rss(replica: Replica) -> int:
    pages = int(Path(f"/proc/{replica.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.asynccontextmanager
async def soaking() -> AsyncIterator[SimGateway]:
    """Two replicas, two prefillers, two decoders, and an Envoy that comes back at the same port."""
    settings: dict[str, Any] = {
        "envoy": {"listen": f"{HOST}:{free_port()}"},
        "life": {"notice_s": 0.0, "drain_s": 3.0},
        "log": {"level": "warning"},
    }
    pairings = {"soak": Pairing(_ENGINES, prefill=2, decode=2)}
    async with SimGateway.replicated(pairings, 2, settings=settings) as gateway:
        for _ in range(8):  # connections to engines, and what is imported late
            await gateway["soak"].complete()
        await asyncio.sleep(0.5)
        yield gateway


async def soak(seconds: float, seed: int = 8) -> Report:
    """Raises what the set-up raises."""
    async with soaking() as gateway:
        return await Soak(gateway, seconds, seed).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=8)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    report = asyncio.run(soak(options.seconds, options.seed))
    print(json.dumps(vars(report), indent=2, default=vars))
    found = report.faults_found()
    print("\n".join(found) or "nothing is left")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
