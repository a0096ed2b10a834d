"""Where engine names lead, for HTTP calls: to the address that the fleet knows, which outlasts a DNS outage."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

if TYPE_CHECKING:
    from extproc.fleet.fleet import Fleet


class FleetNames(AbstractResolver):
    """Resolves names of engines as the fleet did last, and other names by the system.

    Envoy is told the same addresses. Build it inside the running event loop.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._system = aiohttp.ThreadedResolver()  # holds nothing that has to be closed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self._fleet.address_of(host)
        if address is None:
            return await self._system.resolve(host, port, family)
        found = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=found, proto=0, flags=int(socket.AI_NUMERICHOST)
            )
        ]

    async def close(self) -> None:
        await self._system.close()
