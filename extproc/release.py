"""The release service: frees prefillers' pinned blocks off the requests' path, within bounds, and accounts for each.

Every release that is asked for ends in exactly one way: ``requested == released + refused + timed_out + dropped`` once
nothing is pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from extproc.connectors import connector
from extproc.connectors.base import ReleaseResult
from extproc.telemetry.logs import log
from extproc.ticket import VERSION, Ticket

if TYPE_CHECKING:
    from extproc.config import Release
    from extproc.connectors import Handoff
    from extproc.releaseways import ReleaseWays
    from extproc.telemetry.metrics import Metrics
    from extproc.telemetry.recent import Recent

Result = Literal["released", "refused", "timed_out", "dropped"]
RESULTS: Final[tuple[Result, ...]] = ("released", "refused", "timed_out", "dropped")

_REMEMBERED: Final = 100_000
_RETRY_S: Final = 0.1


@dataclass(slots=True)
class Accounts:
    """Counts of releases since the start."""

    requested: int = 0
    ended: dict[Result, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    left_to_timer: int = 0

    @property
    def pending(self) -> int:
        return self.requested - sum(self.ended.values())


def ticket_for(handoff: Handoff) -> Ticket | None:
    """The ticket of a handoff; None where only the engine's timer can free its blocks."""
    data = handoff.connector.release_data(handoff)
    if data is None:
        return None
    age = time.monotonic() - handoff.made_at
    return Ticket(
        version=VERSION,
        connector=handoff.connector.name,
        prefiller=handoff.prefiller.endpoint or "",
        request_id=handoff.remote_request_id,
        issued_at=round(time.time() - age, 3),
        lease_s=handoff.prefiller.lease_s,
        data=data,
    )


class ReleaseService:
    """Takes tickets, at most once per handoff, and works them off in the background."""

    def __init__(self, settings: Release, ways: ReleaseWays, metrics: Metrics, recent: Recent) -> None:
        self._settings = settings
        self._ways = ways
        self._metrics = metrics
        self._recent = recent
        self._waiting: deque[tuple[Ticket, float]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._seen: OrderedDict[tuple[str, str], float] = OrderedDict()
        self.accounts = Accounts()

    def request(self, ticket: Ticket) -> bool:
        """Have this handoff's blocks freed. Returns at once; False where it has been asked for before."""
        if not self._remember(ticket):
            return False
        self.accounts.requested += 1
        if len(self._waiting) >= self._settings.queue:
            self._end(ticket, "dropped", time.monotonic())
            return True
        self._waiting.append((ticket, time.monotonic()))
        self._start_workers()
        return True

    def leave_to_timer(self, handoff: Handoff) -> None:
        """Count a handoff that nothing but its engine's timer frees."""
        self.accounts.left_to_timer += 1
        self._metrics.releases.labels(handoff.connector.name, "left_to_timer").inc()

    async def flush(self, deadline: float) -> None:
        """Finish what is queued by ``deadline`` (``time.monotonic()``); what is left then counts as dropped."""
        while self._running and (remaining := deadline - time.monotonic()) > 0:
            await asyncio.wait(set(self._running), timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        while self._waiting:
            self._end(*self._drop())

    def _drop(self) -> tuple[Ticket, Result, float]:
        ticket, asked_at = self._waiting.popleft()
        return ticket, "dropped", asked_at

    def _remember(self, ticket: Ticket) -> bool:
        """At most one release per handoff, for as long as its blocks may be pinned."""
        now = time.time()
        while self._seen and (len(self._seen) >= _REMEMBERED or next(iter(self._seen.values())) < now):
            self._seen.popitem(last=False)
        if ticket.handoff_id in self._seen:
            return False
        self._seen[ticket.handoff_id] = ticket.issued_at + ticket.lease_s
        return True

    def _start_workers(self) -> None:
        if len(self._running) < self._settings.concurrency:
            task = asyncio.create_task(self._work(), name="release")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _work(self) -> None:
        while self._waiting:
            ticket, asked_at = self._waiting.popleft()
            result: Result = "dropped"
            try:
                result = await self._release(ticket, asked_at)
            finally:
                self._end(ticket, result, asked_at)

    async def _release(self, ticket: Ticket, asked_at: float) -> Result:
        """Try until an engine answers or the time is up."""
        deadline = asked_at + self._settings.deadline_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while True:
                    try:
                        result = await connector(ticket.connector).release(ticket, self._ways)
                    except Exception:  # noqa: BLE001 (the worker must live on, and the release must be counted)
                        log.exception("release failed", connector=ticket.connector)
                        return "refused"
                    if result is not ReleaseResult.UNREACHABLE:
                        return "released" if result is ReleaseResult.RELEASED else "refused"
                    await asyncio.sleep(_RETRY_S)
        return "timed_out"

    def _end(self, ticket: Ticket, result: Result, asked_at: float) -> None:
        self.accounts.ended[result] += 1
        self._metrics.releases.labels(ticket.connector, result).inc()
        seconds = time.monotonic() - asked_at
        self._recent.released(ticket.handoff_id, result, seconds)
        if result == "released":
            self._metrics.release_seconds.observe(seconds)
        log.info(
            "release",
            result=result,
            connector=ticket.connector,
            prefiller=ticket.prefiller,
            remote_request_id=ticket.request_id,
            ms=round(seconds * 1000, 1),
        )
