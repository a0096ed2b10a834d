"""Waiting for a prefiller: a bounded queue that is fair to clients and gives up in time.

It forms only while every prefiller that could do the work is at its cap.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from extproc.errors import RequestError
from extproc.fleet.engines import Engine, Reservation
from extproc.picking import Need

if TYPE_CHECKING:
    from extproc import config
    from extproc.fleet.fleet import Fleet, Where
    from extproc.telemetry.metrics import Metrics

_SMOOTHING: Final = 0.2
_MAX_RETRY_AFTER_S: Final = 30


@dataclass(eq=False, slots=True)
class _Waiter:
    need: Need
    exclude: Collection[Engine]
    where: Where | None
    granted: asyncio.Future[Reservation]


class Admission:
    """Hands out reservations on prefillers. Clients take turns; one client's requests are served in their order."""

    def __init__(self, settings: config.Admission, fleet: Fleet, metrics: Metrics) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._waiting: OrderedDict[bytes, deque[_Waiter]] = OrderedDict()
        self._count = 0
        self._interval_s = 0.0
        self._last_grant = 0.0
        metrics.queue_depth.set_function(lambda: self._count)
        fleet.on_release(self._serve)
        fleet.on_change(self._serve)

    async def reserve(
        self, need: Need, *, client: bytes = b"", exclude: Collection[Engine] = (), where: Where | None = None
    ) -> Reservation | None:
        """A place on the best prefiller, at once or after a wait. None where no engine could ever give one.

        Raises RequestError: 429 when the queue is full or its end cannot be reached in time, 503 after waiting in vain.
        """
        if not self._count and (reservation := self._fleet.reserve("prefill", need, exclude=exclude, where=where)):
            return reservation
        if not any(e not in exclude and (where is None or where(e)) for e in self._fleet.usable("prefill", need)):
            return None
        expected_s = self._expected_wait()
        if self._count >= self._settings.queue or expected_s > self._settings.max_wait_s:
            self._metrics.queue_rejections.labels("full").inc()
            raise RequestError(
                429,
                "queue_full",
                "All prefill engines are busy and the queue is full.",
                type="rate_limit_error",
                headers={"retry-after": _retry_after(expected_s)},
            )
        return await self._wait(_Waiter(need, exclude, where, asyncio.get_running_loop().create_future()), client)

    async def _wait(self, waiter: _Waiter, client: bytes) -> Reservation:
        started = time.monotonic()
        self._waiting.setdefault(client, deque()).append(waiter)
        self._count += 1
        self._serve()
        try:
            return await asyncio.wait_for(asyncio.shield(waiter.granted), self._settings.max_wait_s)
        except TimeoutError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                return waiter.granted.result()
            self._metrics.queue_rejections.labels("timeout").inc()
            raise RequestError(
                503,
                "queue_timeout",
                "No prefill engine became free in time.",
                headers={"retry-after": _retry_after(self._expected_wait())},
            ) from None
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                waiter.granted.result().release()
            raise
        finally:
            waiter.granted.cancel()
            self._remove(waiter, client)
            self._metrics.queue_seconds.observe(time.monotonic() - started)

    def _serve(self) -> None:
        """Give free places to those who wait, one client after the other, until nobody can be served."""
        progress = True
        while progress and self._count:
            progress = False
            for client in list(self._waiting):
                waiter = self._waiting[client][0]
                reservation = self._fleet.reserve("prefill", waiter.need, exclude=waiter.exclude, where=waiter.where)
                if reservation is None:
                    continue
                progress = True
                self._remove(waiter, client)
                if client in self._waiting:
                    self._waiting.move_to_end(client)
                now = time.monotonic()
                if self._last_grant:
                    self._interval_s += _SMOOTHING * (min(1.0, now - self._last_grant) - self._interval_s)
                self._last_grant = now
                waiter.granted.set_result(reservation)

    def _remove(self, waiter: _Waiter, client: bytes) -> None:
        line = self._waiting.get(client)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        self._count -= 1
        if not line:
            del self._waiting[client]
        if not self._count:
            self._last_grant = 0.0

    def _expected_wait(self) -> float:
        """Seconds until a request that came now would be served, by the pace of the queue so far."""
        return self._count * self._interval_s


def _retry_after(seconds: float) -> str:
    return str(min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds))))
