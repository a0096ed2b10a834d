"""The release service: frees prefillers' pinned blocks off the requests' path, within bounds, and accounts for each.

Every release that is asked for ends in exactly one way: ``requested == released + refused + timed_out + dropped`` once
nothing is pending.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from extproc.connectors import connector
from extproc.connectors.base import ReleaseResult
from extproc.telemetry.logs import log
from extproc.ticket import VERSION, Ticket

if TYPE_CHECKING:
    from extproc.configsections import Release
    from extproc.connectors import Handoff
    from extproc.releaseways import ReleaseWays
    from extproc.telemetry.metrics import Metrics
    from extproc.telemetry.recent import Recent
    from extproc.telemetry.tracing import Span, Tracing

Result = Literal["released", "refused", "timed_out", "dropped"]
RESULTS: Final[tuple[Result, ...]] = ("released", "refused", "timed_out", "dropped")

TICKET_LIFE_S: Final = 600.0
"""How long tickets are good at least. Blocks can be pinned for longer than the lease that a handoff must be sent in:
decoders' heartbeats prolong it (NIXL), and vLLM Ascend's own timer is 480 s."""

_REMEMBERED: Final = 100_000
_RETRY_S: Final = 0.1
_PER_PREFILLER: Final = 16


@dataclass(slots=True)
class Accounts:
    """Counts of releases since the start."""

    requested: int = 0
    ended: dict[Result, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    left_to_timer: int = 0

    @property
    def pending(self) -> int:
        return self.requested - sum(self.ended.values())


class SeenHandoffs:
    """Handoffs by their id, for as long as their blocks may be pinned. Bounded: the oldest go first."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()

    def add(self, ticket: Ticket) -> bool:
        """False where the ticket's handoff is known already."""
        if ticket.handoff_id in self._until:
            return False
        now = time.time()
        while self._until and (len(self._until) >= self._limit or next(iter(self._until.values())) < now):
            self._until.popitem(last=False)
        self._until[ticket.handoff_id] = ticket.issued_at + ticket.lease_s
        return True

    def __contains__(self, handoff_id: object) -> bool:
        return handoff_id in self._until

    def __len__(self) -> int:
        return len(self._until)


def ticket_for(handoff: Handoff) -> Ticket | None:
    """The ticket of a handoff; None where only the engine's timer can free its blocks."""
    try:
        data = handoff.connector.release_data(handoff)
    except (LookupError, TypeError, ValueError) as error:  # params of a shape that no known engine gives
        log.warning("unknown shape of params", connector=handoff.connector.name, error=str(error))
        return None
    if data is None:
        return None
    age = time.monotonic() - handoff.made_at
    return Ticket(
        version=VERSION,
        connector=handoff.connector.name,
        prefiller=handoff.prefiller.endpoint or "",
        request_id=handoff.remote_request_id,
        issued_at=round(time.time() - age, 3),
        lease_s=max(handoff.prefiller.lease_s, TICKET_LIFE_S),
        data=data,
        trace=handoff.trace,
    )


class ReleaseService:
    """Takes tickets, at most once per handoff, and works them off in the background, one task for each."""

    def __init__(
        self, settings: Release, ways: ReleaseWays, metrics: Metrics, recent: Recent, tracing: Tracing
    ) -> None:
        self._settings = settings
        self._ways = ways
        self._metrics = metrics
        self._recent = recent
        self._tracing = tracing
        self._tasks: set[asyncio.Task[Result]] = set()
        # Held during a try, not between two, and not all by one prefiller: one that does not answer must not keep the
        # others from their turn.
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._slots_of: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_PER_PREFILLER))
        self._seen = SeenHandoffs()
        self._closed = False
        self.accounts = Accounts()

    def request(self, ticket: Ticket, *, delay_s: float = 0.0) -> bool:
        """Have this handoff's blocks freed, ``delay_s`` from now. Returns at once; False where it was asked before."""
        if not self._seen.add(ticket):
            return False
        asked_at = time.monotonic()
        span = self._tracing.resumed(ticket.trace, "release")
        self.accounts.requested += 1
        if self._closed or len(self._tasks) >= self._settings.queue:
            self._end(ticket, asked_at, span, "dropped")
            return True
        task = asyncio.create_task(self._release(ticket, delay_s), name="release")
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._done, ticket, asked_at, span))
        return True

    def leave_to_timer(self, handoff: Handoff) -> None:
        """Count a handoff that nothing but its engine's timer frees."""
        self.accounts.left_to_timer += 1
        self._metrics.releases.labels(handoff.connector.name, "left_to_timer").inc()

    async def flush(self, deadline: float) -> None:
        """Finish what is queued by ``deadline`` (``time.monotonic()``); what is left or comes later is dropped."""
        while self._tasks and (remaining := deadline - time.monotonic()) > 0:
            await asyncio.wait(set(self._tasks), timeout=remaining)
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ways.flush(deadline)

    async def _release(self, ticket: Ticket, delay_s: float) -> Result:
        """Try until an engine answers or the time is up."""
        if delay_s:
            await asyncio.sleep(delay_s)
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                while (result := await self._try(ticket)) is ReleaseResult.UNREACHABLE:
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            return "timed_out"
        return "released" if result is ReleaseResult.RELEASED else "refused"

    async def _try(self, ticket: Ticket) -> ReleaseResult:
        async with self._slots_of[ticket.prefiller], self._slots:
            try:
                return await connector(ticket.connector).release(ticket, self._ways)
            except Exception:  # noqa: BLE001 (the release must be counted, whatever an engine answered)
                log.exception("release failed", connector=ticket.connector)
                return ReleaseResult.REFUSED

    def _done(self, ticket: Ticket, asked_at: float, span: Span, task: asyncio.Task[Result]) -> None:
        self._tasks.discard(task)
        self._end(ticket, asked_at, span, "dropped" if task.cancelled() else task.result())

    def _end(self, ticket: Ticket, asked_at: float, span: Span, result: Result) -> None:
        self.accounts.ended[result] += 1
        span.set(
            prefiller=ticket.prefiller,
            connector=ticket.connector,
            remote_request_id=ticket.request_id,
            result=result,
        )
        if result != "released":
            span.fail(result)
        span.end()
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
