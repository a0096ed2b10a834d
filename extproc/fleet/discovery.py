"""Names of engines -> addresses: Envoy's override_host policy matches hosts by address."""

from __future__ import annotations

import asyncio
import socket

from extproc.fleet.engines import ROLES, Engine, Fleet
from extproc.telemetry.logs import log


class Resolver:
    """Looks up every engine that is configured by name, again and again. An engine keeps its last known address."""

    def __init__(self, fleet: Fleet, interval_s: float) -> None:
        self._engines = [engine for role in ROLES for engine in fleet.engines(role) if engine.address is None]
        self._interval_s = interval_s
        self._failing: set[Engine] = set()

    async def refresh(self) -> None:
        """One round over all names."""
        await asyncio.gather(*(self._look_up(engine) for engine in self._engines))

    async def run(self) -> None:
        """Rounds for ever; the first failure of a name is logged, and so is its recovery."""
        while self._engines:
            await self.refresh()
            await asyncio.sleep(self._interval_s)

    async def _look_up(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(engine.host, engine.port, type=socket.SOCK_STREAM)
        except OSError as error:
            if engine not in self._failing:
                self._failing.add(engine)
                log.warning("engine name does not resolve", engine=engine.name, error=str(error))
            return
        address = str(found[0][4][0])
        if engine in self._failing or engine.address is None:
            self._failing.discard(engine)
            log.info("engine resolved", engine=engine.name, address=address)
        engine.address = address
