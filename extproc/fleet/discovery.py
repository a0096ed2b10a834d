"""Names of engines -> addresses: Envoy's override_host policy matches hosts by address."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from extproc.fleet.engines import Engine, canonical
from extproc.fleet.fleet import Fleet
from extproc.telemetry.logs import log


class Resolver:
    """Looks up every engine that is configured by name, again and again. An engine keeps its last known address."""

    def __init__(self, fleet: Fleet, interval_s: float) -> None:
        self._fleet = fleet
        self._interval_s = interval_s
        self._failing: set[Engine] = set()
        self._running: dict[Engine, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._announcing = False
        fleet.on_change(self._fleet_changed)

    async def refresh(self) -> None:
        """One round over all names."""
        self._start_round()
        if self._running:
            await asyncio.wait(set(self._running.values()))

    async def run(self) -> None:
        """Rounds for ever, at once when engines come; the first failure of a name is logged, and its recovery."""
        try:
            while True:
                self._wake.clear()
                self._start_round()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._wake.wait()
        finally:
            for task in self._running.values():
                task.cancel()

    def _start_round(self) -> None:
        """A name whose look-up still hangs holds up no other."""
        engines = self._fleet.engines()
        self._failing.intersection_update(engines)
        for engine in engines:
            if engine.spec.address is None and canonical(engine.host) is None and engine not in self._running:
                self._running[engine] = asyncio.create_task(self._look_up(engine), name=f"resolve {engine.name}")

    async def _look_up(self, engine: Engine) -> None:
        try:
            await self._resolve(engine)
        finally:
            del self._running[engine]

    async def _resolve(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(engine.host, engine.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
            if engine not in self._failing:
                self._failing.add(engine)
                log.warning("engine name does not resolve", engine=engine.name, error=str(error))
            return
        # IPv4 first, as Envoy's cluster looks names up (V4_PREFERRED): it must know the address.
        found.sort(key=lambda entry: entry[0] is not socket.AF_INET)
        addresses = [str(entry[4][0]) for entry in found]
        if engine in self._failing or engine.address is None:
            self._failing.discard(engine)
            log.info("engine resolved", engine=engine.name, address=addresses[0])
        if engine.address not in addresses:  # several records come in any order
            engine.address = addresses[0]
            self._announce()

    def _announce(self) -> None:
        self._announcing = True
        try:
            self._fleet.changed()
        finally:
            self._announcing = False

    def _fleet_changed(self) -> None:
        if not self._announcing:
            self._wake.set()
