"""Waiting for a prefiller: a bounded queue that is fair to clients and gives up in time.

It forms only while every prefiller that could do the work is at its cap.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from extproc.errors import RequestError
from extproc.fleet.engines import Engine, Reservation
from extproc.picking import Need

if TYPE_CHECKING:
    from extproc import configsections
    from extproc.fleet.fleet import Fleet, Pairing
    from extproc.telemetry.metrics import Metrics

_SMOOTHING: Final = 0.2
_LONGEST_INTERVAL_S: Final = 1.0
_MAX_RETRY_AFTER_S: Final = 30


@dataclass(eq=False, slots=True)
class _Waiter:
    need: Need
    exclude: tuple[Engine, ...]
    pairing: Pairing | None
    granted: asyncio.Future[Reservation | RequestError | None]
    kind: Hashable = None
    """Two waiters of one kind can be served by the same engines."""

    def __post_init__(self) -> None:
        self.kind = (self.need.model, self.need.subset, self.exclude, self.pairing)


class Admission:
    """Hands out reservations on prefillers. Clients take turns; one client's requests are served in their order.

    A request that only other engines could serve than those that are full overtakes the ones that wait for them.
    """

    def __init__(self, settings: configsections.Admission, fleet: Fleet, metrics: Metrics) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._waiting: OrderedDict[bytes, deque[_Waiter]] = OrderedDict()
        self._count = 0
        self._kinds: Counter[Hashable] = Counter()
        self._interval_s = 0.0
        self._last_grant = 0.0
        metrics.queue_depth.set_function(lambda: self._count)
        fleet.on_release(self._serve)
        fleet.on_change(self._serve)

    async def reserve(
        self,
        need: Need,
        *,
        client: bytes = b"",
        exclude: tuple[Engine, ...] = (),
        pairing: Pairing | None = None,
        patience_s: float | None = None,
    ) -> Reservation | None:
        """A place on the best prefiller, at once or after a wait. None where no engine could ever give one.

        ``patience_s`` is the configured ``max_wait_s`` by default. Raises RequestError: 429 when the queue is full or
        its end cannot be reached in time, 503 after waiting in vain.
        """
        waiter = _Waiter(need, exclude, pairing, asyncio.get_running_loop().create_future())
        self._serve()
        # Whoever waits could not be served: what is free now is of use to none of them, and overtaking does no harm.
        if reservation := self._reserve(waiter):
            return reservation
        if not self._usable(waiter):
            return None
        patience_s = self._settings.max_wait_s if patience_s is None else max(0.0, patience_s)
        self._make_room(client, patience_s)
        return await self._wait(waiter, client, patience_s)

    def _make_room(self, client: bytes, patience_s: float) -> None:
        """Raises RequestError (429) where this client's next request has no place in the queue."""
        if (expected_s := self._expected_wait(client)) > patience_s:
            raise self._full(expected_s)
        if self._count < self._settings.queue:
            return
        # No client keeps the others out: the last in the longest line gives way.
        longest = max(self._waiting, key=lambda key: len(self._waiting[key]), default=client)
        own = len(self._waiting.get(client, ()))
        if len(self._waiting.get(longest, ())) <= own + 1:
            raise self._full(expected_s)
        last = self._waiting[longest][-1]
        self._remove(last, longest)
        last.granted.set_result(self._full(expected_s))

    async def _wait(self, waiter: _Waiter, client: bytes, patience_s: float) -> Reservation | None:
        started = time.monotonic()
        granted = waiter.granted
        if not self._count:
            self._last_grant = 0.0
        self._waiting.setdefault(client, deque()).append(waiter)
        self._kinds[waiter.kind] += 1
        self._count += 1
        try:
            await asyncio.wait({granted}, timeout=patience_s)
        except asyncio.CancelledError:
            if granted.done() and isinstance(reservation := granted.result(), Reservation):
                reservation.release()
            raise
        finally:
            self._remove(waiter, client)
            self._metrics.queue_seconds.observe(time.monotonic() - started)
        if not granted.done():
            self._metrics.queue_rejections.labels("timeout").inc()
            raise RequestError(
                503,
                "queue_timeout",
                "No prefill engine became free in time.",
                headers={"retry-after": _retry_after(self._expected_wait(client))},
            )
        result = granted.result()
        if isinstance(result, RequestError):
            raise result
        return result

    def _serve(self) -> None:
        """Give free places to those who wait, one client after the other, until nobody can be served."""
        busy: set[Hashable] = set()
        progress = True
        while progress and self._count:
            progress = False
            for client in list(self._waiting):
                progress |= self._serve_client(client, busy)

    def _serve_client(self, client: bytes, busy: set[Hashable]) -> bool:
        """Settle the client's first request that can be. ``busy`` collects kinds for which nothing is free."""
        for waiter in self._waiting[client]:
            if len(busy) == len(self._kinds):
                break
            if waiter.kind in busy:
                continue
            reservation = self._reserve(waiter)
            if reservation is None and self._usable(waiter):
                busy.add(waiter.kind)
                continue
            self._remove(waiter, client)
            if reservation is not None:
                self._granted(client)
            waiter.granted.set_result(reservation)
            return True
        return False

    def _granted(self, client: bytes) -> None:
        """The client's turn is over, and the queue's pace is known better."""
        if client in self._waiting:
            self._waiting.move_to_end(client)
        now = time.monotonic()
        if self._last_grant:
            interval_s = min(_LONGEST_INTERVAL_S, now - self._last_grant)
            self._interval_s += _SMOOTHING * (interval_s - self._interval_s)
        self._last_grant = now

    def _reserve(self, waiter: _Waiter) -> Reservation | None:
        return self._fleet.reserve("prefill", waiter.need, exclude=waiter.exclude, pairings=_only(waiter.pairing))

    def _usable(self, waiter: _Waiter) -> bool:
        return bool(self._fleet.usable("prefill", waiter.need, exclude=waiter.exclude, pairings=_only(waiter.pairing)))

    def _remove(self, waiter: _Waiter, client: bytes) -> None:
        line = self._waiting.get(client)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        self._count -= 1
        self._kinds[waiter.kind] -= 1
        if not self._kinds[waiter.kind]:
            del self._kinds[waiter.kind]
        if not line:
            del self._waiting[client]

    def _expected_wait(self, client: bytes) -> float:
        """Seconds until the client's next request would be served, by the pace of the queue and in its turn."""
        own = len(self._waiting.get(client, ()))
        ahead = sum(min(len(line), own + 1) for line in self._waiting.values())
        return ahead * self._interval_s

    def _full(self, expected_s: float) -> RequestError:
        self._metrics.queue_rejections.labels("full").inc()
        return RequestError(
            429,
            "queue_full",
            "All prefill engines are busy and the queue is full.",
            type="rate_limit_error",
            headers={"retry-after": _retry_after(expected_s)},
        )


def _only(pairing: Pairing | None) -> tuple[Pairing, ...] | None:
    return None if pairing is None else (pairing,)


def _retry_after(seconds: float) -> str:
    return str(min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds))))
