"""Names of engines -> addresses: Envoy's override_host policy matches hosts by address."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from extproc.fleet.engines import Engine, is_address
from extproc.fleet.fleet import Fleet
from extproc.telemetry.logs import log


class Resolver:
    """Looks up every engine that is configured by name, again and again. An engine keeps its last known address."""

    def __init__(self, fleet: Fleet, interval_s: float) -> None:
        self._fleet = fleet
        self._interval_s = interval_s
        self._failing: set[Engine] = set()
        self._wake = asyncio.Event()
        fleet.on_change(self._wake.set)

    async def refresh(self) -> None:
        """One round over all names."""
        named = [e for e in self._fleet.engines() if e.spec.address is None and not is_address(e.host)]
        if any(await asyncio.gather(*(self._look_up(engine) for engine in named))):
            self._fleet.changed()

    async def run(self) -> None:
        """Rounds for ever, at once when engines come; the first failure of a name is logged, and its recovery."""
        while True:
            self._wake.clear()
            await self.refresh()
            self._failing.intersection_update(self._fleet.engines())
            self._wake.clear()  # our own change
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._interval_s)

    async def _look_up(self, engine: Engine) -> bool:
        """Whether the address changed."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(engine.host, engine.port, type=socket.SOCK_STREAM)
        except OSError as error:
            if engine not in self._failing:
                self._failing.add(engine)
                log.warning("engine name does not resolve", engine=engine.name, error=str(error))
            return False
        addresses = [str(entry[4][0]) for entry in found]
        if engine in self._failing or engine.address is None:
            self._failing.discard(engine)
            log.info("engine resolved", engine=engine.name, address=addresses[0])
        if engine.address in addresses:  # several records come in any order
            return False
        engine.address = addresses[0]
        return True
