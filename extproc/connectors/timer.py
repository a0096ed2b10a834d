"""Engines that hand over like NIXL's but whose pinned blocks nothing frees early: their own timer has to.

Such handoffs are counted as left to the timer, so that an operator sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from extproc.connectors.base import Handoff, ReleaseResult
from extproc.connectors.nixl import Nixl

if TYPE_CHECKING:
    from extproc.releaseways import ReleaseWays
    from extproc.ticket import Ticket


class Timer(Nixl):
    name: ClassVar[str] = "timer"

    def release_data(self, handoff: Handoff) -> Mapping[str, Any] | None:
        return None

    async def release(self, ticket: Ticket, ways: ReleaseWays) -> ReleaseResult:
        return ReleaseResult.REFUSED
